//! Activations, Clip, extremes, Pad and Resize with random combinations of attributes: gradients against
//! central differences, every backend against the reference evaluator, gradients in plain ONNX, and extreme
//! attributes.

use std::sync::Arc;

use ortrain_graph::{Attrs, DType, Graph, Shape, Tensor, ValueType};
use ortrain_ops::{Role, Specialiser};
use ortrain_program::Backend;
use ortrain_testkit::suites::attributes::{
    activation, activation_case, check_other_types, dims, padding, resizing, without_sizes,
};
use ortrain_testkit::{Case, CaseBuilder, Fill, check_backend, check_gradient, check_standard};
use proptest::prelude::*;
use proptest::sample::select;

fn every_level() -> Vec<Arc<dyn Backend>> {
    ortrain_kernels::Isa::available()
        .into_iter()
        .map(|isa| Arc::new(ortrain_cpu::Cpu::with_isa(isa)) as Arc<dyn Backend>)
        .collect()
}

fn passes(outcome: Result<(), String>) -> Result<(), TestCaseError> {
    outcome.map_err(TestCaseError::fail)
}

/// Checks gradients (in plain ONNX, too, if sizes are known) and every backend.
fn check(case: &Case, sizes_known: bool) -> Result<(), TestCaseError> {
    passes(check_gradient(case).map(drop))?;
    if sizes_known {
        passes(check_standard(case))?;
    }
    for backend in every_level() {
        passes(check_backend(case, &backend, true))?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn activations((op, attrs) in activation(), dims in dims(3)) {
        check(&activation_case(op, attrs, &dims), true)?;
    }

    #[test]
    fn slopes_of_prelu(dims in dims(4), ones in any::<[bool; 4]>(), lead in 0..4usize) {
        let slope: Vec<usize> =
            dims.iter().zip(ones).map(|(&dim, is_one)| if is_one { 1 } else { dim }).skip(lead).collect();
        let mut b = CaseBuilder::new("PRelu", &format!("{dims:?} by {slope:?}"));
        let x = b.float(&dims, &Fill::Signed);
        let w = b.float(&slope, &Fill::Positive);
        let y = b.node("PRelu", &[x, w], Attrs::new());
        check(&b.outputs(&[y]), true)?;
    }

    #[test]
    fn bounds(dims in dims(3), low in select(vec![None, Some(-0.71), Some(1.13)]),
              high in select(vec![None, Some(0.39), Some(-1.21)]), trained: bool) {
        let mut b = CaseBuilder::new("Clip", &format!("{dims:?} from {low:?} to {high:?}, {trained}"));
        let x = b.float(&dims, &Fill::Signed);
        let mut bound = |bound: Option<f64>| bound.map(|bound| match trained {
            true => b.float(&[], &Fill::Exactly(vec![bound])),
            false => b.constant(Tensor::f32(&[], &[bound as f32])),
        });
        let inputs = [Some(x), bound(low), bound(high)];
        let y = b.node_with("", "Clip", &inputs, 1, Attrs::new());
        check(&b.outputs(&y), true)?;
    }

    #[test]
    fn extremes(dims in dims(4), chosen in any::<[bool; 4]>(), flags in any::<[bool; 4]>()) {
        let [max, keepdims, noop, unknown] = flags;
        let op = if max { "ReduceMax" } else { "ReduceMin" };
        let axes: Vec<i64> = (0..dims.len()).filter(|&axis| chosen[axis]).map(|axis| axis as i64).collect();
        let mut b = CaseBuilder::new(op, &format!("{dims:?} along {axes:?}, {flags:?}"));
        let x = b.float(&dims, &Fill::Signed);
        let axes = b.ints(&axes);
        let attrs = Attrs::new()
            .with("keepdims", i64::from(keepdims))
            .with("noop_with_empty_axes", i64::from(noop));
        let y = b.node(op, &[x, axes], attrs);
        let case = b.outputs(&[y]);
        check(&if unknown { without_sizes(case) } else { case }, true)?;
    }

    #[test]
    fn paddings(padding in padding()) {
        check(&padding.case(DType::F32), true)?;
    }

    #[test]
    fn resizings(resizing in resizing()) {
        check(&resizing.case(DType::F32), !resizing.unknown)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Other types than float32 use the same instructions.
    #[test]
    fn other_types(padding in padding(), resizing in resizing(), dtype in select(DType::ALL.to_vec())) {
        for backend in every_level() {
            passes(check_other_types(&backend, &padding, resizing.clone(), dtype))?;
        }
    }
}

/// Numbers, some of them extreme.
fn extreme_ints() -> impl Strategy<Value = i64> {
    select(vec![-7, -1, 0, 0, 1, 1, 2, 3, 1 << 20, 1 << 31, 1 << 40, 1 << 62, i64::MAX, i64::MIN])
}

/// Scales, some of them extreme.
fn extreme_scales() -> impl Strategy<Value = f32> {
    select(vec![
        1.0f32,
        1.0,
        2.0,
        0.3,
        0.0,
        -1.0,
        1e-30,
        1e7,
        1e30,
        f32::NAN,
        f32::INFINITY,
        f32::MIN_POSITIVE,
    ])
}

/// Maximum number of elements in a test.
const MAX_ELEMENTS: usize = 1 << 16;

/// Checks that shapes, instructions and gradients give a result or an error.
fn check_result_or_error(mut graph: Graph, inputs: &[Tensor]) -> Result<(), TestCaseError> {
    if ortrain_ops::passes::infer::infer(&mut graph).is_err() {
        return Ok(());
    }
    let known = graph.value(graph.outputs[0]).ty.shape().and_then(Shape::concrete);
    if known.is_some_and(|dims| dims.iter().product::<usize>() > MAX_ELEMENTS) {
        return Ok(());
    }
    let roles = |graph: &Graph| vec![Role::User; graph.inputs.len()];
    let Ok(forward) = Specialiser::new(graph.clone(), roles(&graph)).schedule(inputs) else { return Ok(()) };
    let dims = forward.slots[forward.outputs[0].0 as usize].ty.as_ref().expect("known").1.clone();
    let seed = graph.add_value("seed", ValueType::tensor(DType::F32, &dims));
    graph.inputs.push(seed);
    let (output, targets) = (graph.outputs[0], [graph.inputs[0]]);
    let gradients =
        ortrain_ops::passes::differentiate::backpropagate(&mut graph, &[(output, seed)], &targets);
    let Ok(gradients) = gradients else { return Ok(()) };
    graph.outputs = gradients.into_iter().flatten().collect();
    let mut run_inputs = inputs.to_vec();
    run_inputs.push(Tensor::zeros(DType::F32, dims).expect("not too many"));
    let first_schedule = Specialiser::new(graph.clone(), roles(&graph)).schedule(&run_inputs);
    prop_assert!(first_schedule.is_ok(), "{:?}", first_schedule.err());
    if ortrain_ops::passes::decompose::standardise(&mut graph).is_ok() {
        let second_schedule = Specialiser::new(graph.clone(), roles(&graph)).schedule(&run_inputs);
        prop_assert!(second_schedule.is_ok(), "{:?}", second_schedule.err());
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn extreme_pads_give_result_or_error(padding in padding(), pads in prop::collection::vec(extreme_ints(), 0..9),
                              axes in prop::option::of(prop::collection::vec(-5..5i64, 0..4)), fits: bool) {
        let mut b = CaseBuilder::new("Pad", "wild");
        let x = b.float(&padding.dims, &Fill::Signed);
        let count = axes.as_ref().map_or(padding.dims.len(), Vec::len);
        let pads = if fits { pads.iter().copied().chain([0; 9]).take(2 * count).collect() } else { pads };
        let mut inputs = vec![Some(x), Some(b.ints(&pads)), None];
        if let Some(axes) = axes {
            inputs.push(Some(b.ints(&axes)));
        }
        let y = b.node_with("", "Pad", &inputs, 1, Attrs::new().with("mode", padding.mode));
        let case = b.outputs(&y);
        check_result_or_error(case.graph, &case.inputs)?;
    }

    #[test]
    fn extreme_scales_give_result_or_error(resizing in resizing(), scales in prop::collection::vec(extreme_scales(), 0..5),
                                sizes in prop::collection::vec(extreme_ints(), 0..5), by_sizes: bool, fits: bool,
                                roi in prop::collection::vec(extreme_scales(), 0..9)) {
        let mut b = CaseBuilder::new("Resize", "wild");
        let x = b.float(&resizing.dims, &Fill::Signed);
        let count = resizing.axes.len();
        let fill = |list: Vec<f32>, n: usize| -> Vec<f32> {
            if fits { list.into_iter().chain([1.0; 9]).take(n).collect() } else { list }
        };
        let (scales, roi) = (fill(scales, count), fill(roi, 2 * count));
        let sizes = if fits { sizes.into_iter().chain([2; 9]).take(count).collect() } else { sizes };
        let mut inputs = vec![Some(x), Some(b.constant(Tensor::f32(&[roi.len()], &roi)))];
        match by_sizes {
            true => inputs.extend([None, Some(b.ints(&sizes))]),
            false => inputs.push(Some(b.constant(Tensor::f32(&[scales.len()], &scales)))),
        }
        let y = b.node_with("", "Resize", &inputs, 1, resizing.attrs.clone());
        let case = b.outputs(&y);
        check_result_or_error(case.graph, &case.inputs)?;
    }
}
