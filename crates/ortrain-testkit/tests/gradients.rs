//! Gradients of every operator against central differences in float64.

use std::collections::BTreeMap;

use ortrain_graph::Attrs;
use ortrain_ops::{Definition, Gradient, Registry};
use ortrain_testkit::{Case, CaseBuilder, Fill, cases, check_gradient, check_second_order};

/// Operators with a gradient that no case has. The tests of their families check their gradients, or the tests of the
/// operators that they become.
const CHECKED_BY_FAMILIES: [&str; 42] = [
    "Attention",
    "BatchNormInternal",
    "BiasGelu",
    "CenterCropPad",
    "Compress",
    "ConcatTraining",
    "DynamicQuantizeLSTM",
    "Einsum",
    "EmbedLayerNormalization",
    "FakeQuant",
    "FastGelu",
    "FusedConv",
    "FusedGemm",
    "GRU",
    "GRUTraining",
    "Group",
    "If",
    "InPlaceAccumulator",
    "IsAllFinite",
    "IsFinite",
    "LSTM",
    "LSTMTraining",
    "LinearAttention",
    "Loop",
    "MixedPrecisionScale",
    "MultiHeadAttention",
    "PassThrough",
    "RNN",
    "ReduceSumTraining",
    "ReverseSequence",
    "RotaryEmbedding",
    "Scale",
    "Scan",
    "Scatter",
    "SimplifiedLayerNormalization",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
    "SplitTraining",
    "TransposeMatMul",
    "Unique",
    "Upsample",
    "View",
];

/// Operators with a gradient that `tests/test_quantized_gradients.py`, `tests/test_fused_operators.py` and
/// `tests/test_grouped_queries.py` check: their inputs are integers, or have many shapes.
const CHECKED_IN_PYTHON: [&str; 34] = [
    "BiasAdd",
    "BiasSplitGelu",
    "ConvInteger",
    "DecoderMaskedMultiHeadAttention",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "DynamicQuantizeMatMul",
    "GatherBlockQuantized",
    "GroupNorm",
    "GroupQueryAttention",
    "MatMulBnb4",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "MatMulNBits",
    "MoE",
    "NhwcConv",
    "PackedMultiHeadAttention",
    "QAttention",
    "QGemm",
    "QLinearAdd",
    "QLinearAveragePool",
    "QLinearConcat",
    "QLinearConv",
    "QLinearGlobalAveragePool",
    "QLinearLeakyRelu",
    "QLinearMatMul",
    "QLinearMul",
    "QLinearSigmoid",
    "QLinearSoftmax",
    "QMoE",
    "QuantizeLinear",
    "RelativePositionBias",
    "SkipGroupNorm",
    "SparseAttention",
];

#[test]
fn gradients_are_those_of_central_differences() {
    let mut points: BTreeMap<String, usize> = BTreeMap::new();
    let mut failures = Vec::new();
    for case in cases() {
        match check_gradient(&case) {
            Ok(count) => *points.entry(case.operator).or_default() += count,
            Err(failure) => failures.push(failure),
        }
    }
    for (operator, count) in &points {
        println!("{operator:26} {count:6} points");
    }
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
    let checked = |name: &str| points.get(name).is_some_and(|&count| count > 0);
    // The next test checks the gradients of gradient operators, inside of the graphs that have them.
    let elsewhere = |name: &str| {
        CHECKED_BY_FAMILIES.contains(&name) || CHECKED_IN_PYTHON.contains(&name) || name.contains("Grad")
    };
    let has_gradient = |definition: &&Definition| {
        let gradient = definition.operator_info().map(|info| info.gradient);
        matches!(gradient, Some(Gradient::Full | Gradient::Partial(_)))
    };
    let definitions = Registry::standard().file_definitions();
    let names = definitions.into_iter().filter(has_gradient).map(|definition| definition.name);
    let unchecked: Vec<&str> = names.filter(|&name| !checked(name) && !elsewhere(name)).collect();
    assert!(unchecked.is_empty(), "no case checks the gradients of {}", unchecked.join(", "));
    let twice: Vec<&str> =
        CHECKED_BY_FAMILIES.into_iter().chain(CHECKED_IN_PYTHON).filter(|name| checked(name)).collect();
    assert!(twice.is_empty(), "cases check the gradients of {}", twice.join(", "));
}

/// Gradients of gradient graphs are correct, too, for all operators in them.
#[test]
fn gradients_of_gradients_are_those_of_central_differences() {
    let mut failures = Vec::new();
    // The statistics of no elements are NaN, and so are all values that depend on them.
    let of_nothing = |case: &Case| case.inputs.iter().any(ortrain_graph::Tensor::is_empty);
    for case in cases().into_iter().filter(|case| !of_nothing(case)) {
        if let Err(failure) = check_second_order(&case) {
            failures.push(failure);
        }
    }
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
}

/// The check can fail: it detects the gradient operator of another function.
#[test]
fn detects_wrong_sign() {
    let mut b = CaseBuilder::new("Sub", "as if it were Add");
    let x = b.float(&[2, 3], &Fill::Signed);
    let z = b.float(&[2, 3], &Fill::Signed);
    let y = b.node("Sub", &[x, z], Attrs::new());
    let case = b.outputs(&[y]);
    check_gradient(&case).expect("the true gradient passes");
    let outcome = ortrain_testkit::check_gradient_after(&case, |graph| {
        // The gradient of the subtrahend is Neg of the incoming gradient; drop the sign.
        let node =
            graph.nodes.iter_mut().find(|node| &*node.op == "Neg").expect("Sub passes back a negation");
        node.op = "Identity".into();
    });
    let message = outcome.expect_err("a wrong sign is a failure");
    assert!(message.contains("the gradient of input 1"), "{message}");
}
