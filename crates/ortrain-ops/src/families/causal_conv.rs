//! Causal convolution with state: `CausalConvWithState`.
//!
//! CausalConvWithState-27 of ONNX (<https://onnx.ai/onnx/operators/onnx__CausalConvWithState.html>). The input is
//! concatenated to `past_state`, or to zeros, along the last axis. Each channel is convolved along this axis with its
//! own kernel. The outputs are the result, after an optional activation, and the last elements of the concatenated
//! input.
//!
//! The operator is a composition (Concat or Pad, Conv, Slice), so `past_state` has a gradient. The activation is
//! computed in float32 or wider.
//!
//! Limits: the number of channels must be known.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, ValueId};

use crate::OpError;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::casts::arithmetic_dtype;
use crate::support::sizes::{
    Size, add_op, cast, concat_sizes, dtype_of, size_of, slice_between, subtract_sizes,
};

const WEIGHT: usize = 1;
const BIAS: usize = 2;
const PAST: usize = 3;

struct CausalConv;

/// Returns true if the result goes through `x * sigmoid(x)`.
fn is_activated(attrs: &Attrs) -> Result<bool, OpError> {
    match attrs.string("activation")?.unwrap_or("none") {
        "none" => Ok(false),
        "silu" | "swish" => Ok(true),
        other => Err(OpError::invalid(format!(
            "activation must be \"none\", \"silu\" or \"swish\", got {other:?}"
        ))),
    }
}

impl Op for CausalConv {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 4, 2)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        cx.expect_same_dtype(0..4)?;
        let (x, weight) = (cx.shape(0), cx.shape(WEIGHT));
        let wrong = |what: &str| {
            let list: Vec<String> =
                (0..4).filter_map(|k| Some(format!("input {k} has shape {}", cx.shape(k)?))).collect();
            OpError::invalid(format!("{}; {what}", list.join(", ")))
        };
        if x.is_some_and(|x| x.rank() != 3) || weight.is_some_and(|weight| weight.rank() != 3) {
            return Err(wrong("inputs 0 and 1 must have shapes [N, C, length] and [C, 1, k]"));
        }
        if cx.shape(BIAS).is_some_and(|bias| bias.rank() != 1) {
            return Err(wrong("the bias must have shape [C]"));
        }
        let known = |shape: Option<&Shape>, axis: usize| shape.and_then(|shape| shape.get(axis)?.known());
        let kernel = known(weight, 2);
        if known(weight, 1).is_some_and(|size| size != 1) || kernel == Some(0) {
            return Err(wrong("the filter must have shape [C, 1, k] with k at least 1"));
        }
        let channels = known(x, 1).or(known(weight, 0));
        let differs = |actual: Option<usize>, expected: Option<usize>| {
            actual.zip(expected).is_some_and(|(a, b)| a != b)
        };
        if differs(known(weight, 0), channels) || differs(known(cx.shape(BIAS), 0), channels) {
            return Err(wrong("the filter and the bias must have one entry for each channel"));
        }
        if let Some(past) = cx.shape(PAST) {
            let fits = past.rank() == 3
                && !differs(past[0].known(), known(x, 0))
                && !differs(past[1].known(), channels)
                && !differs(past[2].known(), kernel.map(|kernel| kernel - 1));
            if !fits {
                return Err(wrong("the past must have shape [N, C, k - 1]"));
            }
        }
        let past: Option<Shape> = cx.shape(PAST).cloned().or_else(|| {
            let last = kernel.map_or_else(|| cx.unknown_dim(1, 2), |kernel| Dim::Known(kernel - 1));
            x.map(|x| [x[0].clone(), x[1].clone(), last].into_iter().collect())
        });
        cx.set_output(0, dtype, x.cloned());
        cx.set_output(1, dtype, past);
        Ok(())
    }
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let activated = is_activated(rw.attrs())?;
    let (x, weight) = (rw.required_input(0)?, rw.required_input(WEIGHT)?);
    let dtype = dtype_of(rw, x, "input 0")?;
    let channels = [size_of(rw, x, 1), size_of(rw, weight, 0)].into_iter().find_map(Size::scalar_constant);
    let channels = channels.ok_or_else(|| {
        OpError::unsupported("the number of channels must be known; declare it in the model")
    })?;
    let extended = match rw.input(PAST) {
        Some(past) => rw.add("Concat", &[past, x], Attrs::new().with("axis", 2i64)),
        None => {
            let kernel = size_of(rw, weight, 2);
            let before = subtract_sizes(rw, kernel, Size::Number(1));
            let none = Size::Number(0);
            let pads = concat_sizes(rw, &[none, none, before, none, none, none]);
            add_op(rw, "Pad", &[x, pads])
        }
    };
    let inputs: Vec<Option<ValueId>> =
        [Some(extended), Some(weight)].into_iter().chain(rw.input(BIAS).map(Some)).collect();
    let mut result = rw.add_node("", "Conv", &inputs, 1, Attrs::new().with("group", channels))[0];
    if activated {
        let data = cast(rw, result, dtype, arithmetic_dtype(dtype));
        let gate = add_op(rw, "Sigmoid", &[data]);
        let product = add_op(rw, "Mul", &[data, gate]);
        result = cast(rw, product, arithmetic_dtype(dtype), dtype);
    }
    if rw.has_output(1) {
        // The state has the length of `past_state`: everything after the first `length` elements.
        let length = size_of(rw, x, 2);
        let present = slice_between(rw, extended, 2, length, Size::Number(i64::MAX));
        rw.replace_output(1, present);
    }
    rw.replace_output(0, result);
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    is_activated(&node.attrs)?;
    Ok(Box::new(CausalConv))
}

/// Decomposes the operator for opsets before 27.
fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 27 { decompose(rw) } else { Ok(()) }
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "CausalConvWithState", &[27], build)
            .composition(decompose)
            .downgrade(downgrade)
            .weights(&[WEIGHT, BIAS]),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{Tensor, ValueType};

    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, add, assert_close, check_decomposition, check_downgrade, check_gradients, f64s,
        generic_tensor, graph, one_node_graph, run, run_node,
    };

    const OP: (&str, &str) = ("", "CausalConvWithState");
    const BATCH: usize = 2;
    const CHANNELS: usize = 3;

    /// Returns data, kernels, bias and past state.
    fn inputs(length: usize, kernel: usize, bias: bool, past: bool) -> [Option<Tensor>; 4] {
        [
            Some(generic_tensor(&[BATCH, CHANNELS, length], 1)),
            Some(generic_tensor(&[CHANNELS, 1, kernel], 2)),
            bias.then(|| generic_tensor(&[CHANNELS], 3)),
            past.then(|| generic_tensor(&[BATCH, CHANNELS, kernel - 1], 4)),
        ]
    }

    /// Computes the result and the next state by the definition.
    fn expected(inputs: &[Option<Tensor>; 4], activated: bool) -> [Tensor; 2] {
        let elements = |k: usize| inputs[k].as_ref().map(Tensor::to_f64);
        let (x, weight) = (elements(0).expect("data"), elements(1).expect("kernels"));
        let kernel = weight.len() / CHANNELS;
        let length = x.len() / (BATCH * CHANNELS);
        let (mut result, mut present) = (Vec::new(), Vec::new());
        for row in 0..BATCH * CHANNELS {
            let c = row % CHANNELS;
            let before = match elements(3) {
                Some(past) => past[row * (kernel - 1)..][..kernel - 1].to_vec(),
                None => vec![0.0; kernel - 1],
            };
            let all = [before, x[row * length..][..length].to_vec()].concat();
            for t in 0..length {
                let sum: f64 = (0..kernel).map(|k| weight[c * kernel + k] * all[t + k]).sum();
                let sum = sum + elements(2).map_or(0.0, |bias| bias[c]);
                result.push(if activated { sum / (1.0 + (-sum).exp()) } else { sum });
            }
            present.extend(&all[length..]);
        }
        [f64s(&[BATCH, CHANNELS, length], &result), f64s(&[BATCH, CHANNELS, kernel - 1], &present)]
    }

    #[test]
    fn all_variants_and_gradients() {
        for (length, kernel) in [(5, 3), (1, 4), (4, 1)] {
            for (bias, past) in [(false, false), (true, false), (false, true), (true, true)] {
                for activation in ["none", "silu", "swish"] {
                    let args = inputs(length, kernel, bias, past);
                    let ports: Vec<Option<&Tensor>> = args.iter().map(Option::as_ref).collect();
                    let attrs = Attrs::new().with("activation", activation);
                    let graph = one_node_graph(NEWEST_OPSET, OP, &ports, 2, attrs).expect("valid");
                    let inputs: Vec<Tensor> = args.iter().flatten().cloned().collect();
                    let got = run(&graph, &inputs).expect("it runs");
                    for (got, expected) in got.iter().zip(&expected(&args, activation != "none")) {
                        assert_close(got, expected, 1e-13);
                    }
                    let floats: Vec<usize> =
                        (0..inputs.len()).filter(|&k| !inputs[k].to_f64().is_empty()).collect();
                    check_gradients(&graph, &inputs, &floats, &[0]);
                    check_decomposition(&graph, &inputs, 1e-13);
                    assert_eq!(check_downgrade(&graph, &inputs, 27).nodes.len(), 1);
                    check_downgrade(&graph, &inputs, 9);
                }
            }
        }
    }

    /// Symbolic batch and length, with the gradient through the next state.
    #[test]
    fn symbolic_batch_and_length() {
        let args = inputs(2, 4, true, true);
        let inputs: Vec<Tensor> = args.iter().flatten().cloned().collect();
        let (mut symbolic, ids) = graph(&inputs.iter().collect::<Vec<_>>());
        let shape = |last: Dim| [Dim::symbol("n"), Dim::Known(CHANNELS), last].into_iter().collect::<Shape>();
        symbolic.value_mut(ids[0]).ty = ValueType::Tensor(DType::F64, Some(shape(Dim::symbol("t"))));
        symbolic.value_mut(ids[3]).ty = ValueType::Tensor(DType::F64, Some(shape(Dim::Known(3))));
        let ports: Vec<Option<ValueId>> = ids.iter().copied().map(Some).collect();
        add(&mut symbolic, OP, "y", &ports, 2, Attrs::new().with("activation", "silu"));
        crate::passes::infer::infer(&mut symbolic).expect("valid");
        let got = run(&symbolic, &inputs).expect("it runs");
        for (got, expected) in got.iter().zip(&expected(&args, true)) {
            assert_close(got, expected, 1e-13);
        }
        check_gradients(&symbolic, &inputs, &[0, 1, 2, 3], &[0, 1]);
    }

    #[test]
    fn rejects_mismatched_inputs() {
        let none = Attrs::new;
        let x = generic_tensor(&[2, 3, 4], 1);
        for (weight, bias, past, attrs, message) in [
            (
                vec![3, 2, 2],
                vec![3],
                vec![2, 3, 1],
                none(),
                "the filter must have shape [C, 1, k] with k at least 1",
            ),
            (
                vec![4, 1, 2],
                vec![3],
                vec![2, 3, 1],
                none(),
                "the filter and the bias must have one entry for each channel",
            ),
            (
                vec![3, 1, 2],
                vec![2],
                vec![2, 3, 1],
                none(),
                "the filter and the bias must have one entry for each channel",
            ),
            (vec![3, 1, 2], vec![3], vec![2, 3, 2], none(), "the past must have shape [N, C, k - 1]"),
            (
                vec![3, 2],
                vec![3],
                vec![2, 3, 1],
                none(),
                "inputs 0 and 1 must have shapes [N, C, length] and [C, 1, k]",
            ),
            (
                vec![3, 1, 2],
                vec![3],
                vec![2, 3, 1],
                none().with("activation", "gelu"),
                "activation must be \"none\", \"silu\" or \"swish\", got \"gelu\"",
            ),
        ] {
            let other_inputs =
                [generic_tensor(&weight, 2), generic_tensor(&bias, 3), generic_tensor(&past, 4)];
            let ports = [Some(&x), Some(&other_inputs[0]), Some(&other_inputs[1]), Some(&other_inputs[2])];
            let failure = run_node(OP, &ports, 2, attrs).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
