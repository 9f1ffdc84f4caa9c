//! Names of constants: made up by an exporter, or given by the author of the network.

/// Parts of names that exporters and optimizers of graphs give to their own constants.
const GENERATED: [&str; 12] = [
    "Constant",
    "const_fold",
    "Const:",
    "Const_",
    "onnx::",
    "ortshared",
    "lifted_tensor",
    "tensor_constant",
    "_to_copy",
    "scalar_tensor",
    "/x:0",
    "/y:0",
];

/// Operators of PyTorch that an exporter computes once; their results have the name of the operator.
const OPERATORS: [&str; 24] = [
    "add",
    "clone",
    "div",
    "empty_like",
    "exp",
    "expand",
    "fill",
    "full",
    "full_like",
    "masked_fill",
    "mul",
    "neg",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones",
    "ones_like",
    "repeat",
    "select_scatter",
    "slice_scatter",
    "sub",
    "where",
    "zeros",
    "zeros_like",
];

/// Last words of names of learned numbers.
const LEARNED: [&str; 20] = [
    "alpha",
    "beta",
    "bias",
    "gain",
    "gamma",
    "gate",
    "kernel",
    "log_temperature",
    "logit_bias",
    "logit_scale",
    "magnitude",
    "original0",
    "rezero",
    "scale",
    "shift",
    "slope",
    "temperature",
    "weight",
    "weight_g",
    "zeta",
];

/// Last words of names of numbers that layers are given: bounds, guards of divisions, statistics, fixed factors.
const FIXED: [&str; 14] = [
    "embed_scale",
    "eps",
    "epsilon",
    "max",
    "mean",
    "min",
    "momentum",
    "normalizer",
    "running_mean",
    "running_var",
    "std",
    "var",
    "variance",
    "zero_point",
];

/// Operators of PyTorch that fill tensors.
const FILLERS: [&str; 13] = [
    "_to_copy",
    "convert_element_type_default",
    "empty_like",
    "fill",
    "full",
    "full_like",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones",
    "ones_like",
    "zeros",
    "zeros_like",
];

/// Last words of names of tables that describe the cells of an image, which detectors decode boxes with.
const GEOMETRY: [&str; 8] =
    ["anchor_points", "anchors", "grid", "grids", "points", "stride", "stride_tensor", "strides"];

/// Returns true if an exporter or an optimizer of graphs made the name up.
pub(super) fn is_generated(name: &str) -> bool {
    let number = name.strip_prefix("val_").or_else(|| name.strip_prefix("scalar_")).unwrap_or(name);
    GENERATED.iter().any(|part| name.contains(part)) || is_number(number)
}

/// Returns true for the name of an operator of PyTorch that makes constants, with a number or without.
pub(super) fn is_operator(name: &str) -> bool {
    let stem = name.trim_end_matches(|letter: char| letter.is_ascii_digit()).trim_end_matches('_');
    OPERATORS.contains(&stem)
}

/// Returns true for the name of an operator of PyTorch that fills a tensor, and for a number that was written in a program.
pub(super) fn is_filler(name: &str) -> bool {
    let stem = name.trim_end_matches(|letter: char| letter.is_ascii_digit()).trim_end_matches('_');
    FILLERS.contains(&stem) || is_literal(name)
}

/// Returns true for the name that PyTorch's older exporter gives to a constant of a program, never to a parameter.
pub(super) fn is_literal(name: &str) -> bool {
    let last = name.rsplit('/').next().unwrap_or(name);
    last.strip_prefix("Constant").and_then(|rest| rest.strip_suffix("_output_0")).is_some_and(|middle| {
        middle.strip_prefix('_').map_or(middle.is_empty(), |number| !number.is_empty() && is_number(number))
    })
}

/// Returns true for a path of attributes (`encoder.layers.0.gate`), which exporters give to parameters and buffers.
pub(in crate::training) fn is_path(name: &str) -> bool {
    !is_generated(name) && !name.contains('/') && name.split('.').filter(|part| !part.is_empty()).count() > 1
}

/// Returns true if the name says that a number was learned: a known word, or the index in a list of parameters.
pub(super) fn is_learned(name: &str) -> bool {
    let last = last_word(name);
    LEARNED.iter().any(|word| last.eq_ignore_ascii_case(word))
        || last.rsplit('_').next().is_some_and(|word| word != "scale" && LEARNED.contains(&word))
            && !is_fixed(name)
        || (is_path(name) && is_number(last))
}

/// Returns true if the name says that a number was not learned.
pub(super) fn is_fixed(name: &str) -> bool {
    FIXED.contains(&last_word(name))
}

/// Returns true for a name of a table that describes the cells of an image.
pub(super) fn is_geometry(name: &str) -> bool {
    GEOMETRY.contains(&last_word(name))
}

/// Returns true for a name of a vector of a power iteration, as spectral normalizations keep them.
pub(super) fn is_singular_vector(name: &str) -> bool {
    ["_u", "_v"].iter().any(|end| last_word(name).ends_with(end))
}

/// The part behind the last separator. TensorFlow's names end in `:0`.
fn last_word(name: &str) -> &str {
    name.rsplit(['.', '/', ':'])
        .find(|part| !part.is_empty() && (*part != "0" || !name.contains(':')))
        .unwrap_or(name)
}

fn is_number(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_exporters() {
        for name in ["val_12", "17", "/net/Constant_3_output_0", "onnx::MatMul_120", "lifted_tensor_0"] {
            assert!(is_generated(name) && !is_path(name), "{name}");
        }
        for name in ["/net/layers.0/Constant_12_output_0", "Constant_output_0"] {
            assert!(is_literal(name) && is_filler(name), "{name}");
        }
        for name in ["my_Constant", "h_Constant_0", "/net/Add_output_0"] {
            assert!(!is_literal(name) && !is_filler(name), "{name}");
        }
        for name in ["full", "zeros_3", "select_scatter_12"] {
            assert!(is_operator(name) && !is_generated(name), "{name}");
        }
        for name in ["cls_token", "fc.weight", "zeros.weight", "multiplier"] {
            assert!(!is_generated(name) && !is_operator(name), "{name}");
        }
    }

    #[test]
    fn names_of_numbers() {
        for name in [
            "act.weight",
            "gates.1",
            "logit_scale",
            "conv.weight_g",
            "stages.0.skipinit_gain",
            "dense/bias:0",
        ] {
            assert!(is_learned(name) && !is_fixed(name), "{name}");
        }
        for name in ["embed_tokens.embed_scale", "norm.eps", "factor", "12"] {
            assert!(!is_learned(name), "{name}");
        }
        assert!(is_path("gates.1") && !is_path("gate") && !is_path("/net/gates.1"));
        assert!(is_singular_vector("fc.weight_u") && is_singular_vector("parametrizations.weight.0._v"));
        assert!(!is_singular_vector("u"));
    }
}
