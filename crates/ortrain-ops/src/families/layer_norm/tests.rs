use ortrain_graph::ValueType;

use super::*;
use crate::testing::{
    assert_close, cast_tensor, check_decomposition, check_downgrade, check_gradients, f64s, generic_tensor,
    gradient_graph, one_node_graph, run, run_node,
};

const NEWEST: i64 = crate::NEWEST_OPSET;
const EPSILON: f64 = 1e-5_f32 as f64;
const KINDS: [&str; 3] = [LAYER, SIMPLIFIED, RMS];

/// Shapes and axes, among them a single element, rows of one element, and normalization over all axes.
const SHAPES: [(&[usize], i64); 8] = [
    (&[4], 0),
    (&[3, 5], -1),
    (&[3, 1], 1),
    (&[2, 3, 4], -1),
    (&[2, 3, 4], 1),
    (&[2, 3, 4], -3),
    (&[2, 1, 2, 3], 2),
    (&[1], -1),
];

fn attrs(axis: i64) -> Attrs {
    Attrs::new().with("axis", axis)
}

fn output_count(op: &str) -> usize {
    match op {
        LAYER => 3,
        SIMPLIFIED => 2,
        _ => 1,
    }
}

/// Returns data, a scale and, for operators with a bias, a bias. Scale and bias have the normalized shape.
fn inputs(op: &str, dims: &[usize], axis: i64, seed: u32) -> Vec<Tensor> {
    let axis = normalize_axis(axis, dims.len()).expect("it is one");
    let parameters = if op == LAYER { 2 } else { 1 };
    let parameters = (1..=parameters).map(|k| generic_tensor(&dims[axis..], seed + k));
    std::iter::once(generic_tensor(dims, seed)).chain(parameters).collect()
}

fn ports(inputs: &[Tensor]) -> Vec<Option<&Tensor>> {
    inputs.iter().map(Some).collect()
}

/// Computes result, mean and inverse standard deviation by the definition. Scale and bias have the normalized shape.
fn expected(op: &str, args: &[Tensor], axis: i64) -> Vec<Tensor> {
    let dims = args[0].dims();
    let axis = normalize_axis(axis, dims.len()).expect("it is one");
    let count = dims[axis..].iter().product::<usize>();
    let (x, scale) = (args[0].to_f64(), args[1].to_f64());
    let bias = args.get(2).map_or(vec![0.0; count], Tensor::to_f64);
    let (mut y, mut means, mut inverses) = (Vec::new(), Vec::new(), Vec::new());
    for row in x.chunks(count) {
        let mean = if op == LAYER { row.iter().sum::<f64>() / count as f64 } else { 0.0 };
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count as f64;
        let inverse = 1.0 / (variance + EPSILON).sqrt();
        y.extend((0..count).map(|k| (row[k] - mean) * inverse * scale[k] + bias[k]));
        means.push(mean);
        inverses.push(inverse);
    }
    let retained: Vec<usize> =
        dims.iter().enumerate().map(|(k, &dim)| if k < axis { dim } else { 1 }).collect();
    let mut all = vec![f64s(dims, &y)];
    if op == LAYER {
        all.push(f64s(&retained, &means));
    }
    if op != RMS {
        all.push(f64s(&retained, &inverses));
    }
    all
}

fn op_names(graph: &Graph) -> Vec<&str> {
    graph.nodes.iter().map(|node| &*node.op).collect()
}

#[test]
fn matches_definition() {
    for op in KINDS {
        for (dims, axis) in SHAPES {
            let args = inputs(op, dims, axis, 1);
            let got = run_node(("", op), &ports(&args), output_count(op), attrs(axis)).expect("it runs");
            let expected_outputs = expected(op, &args, axis);
            assert_close(&got[0], &expected_outputs[0], 1e-12);
            for (got, expected_output) in got[1..].iter().zip(&expected_outputs[1..]) {
                assert_eq!(got.dtype(), DType::F32, "the default type of statistics");
                assert_close(got, &cast_tensor(expected_output, DType::F32), 1e-6);
            }
            let wide = attrs(axis).with("stash_type", 11i64);
            let got = run_node(("", op), &ports(&args), output_count(op), wide).expect("it runs");
            for (got, expected_output) in got.iter().zip(&expected_outputs) {
                assert_close(got, expected_output, 1e-12);
            }
        }
    }
}

#[test]
fn hand_computed_values() {
    let x = f64s(&[2, 2], &[1.0, 3.0, 10.0, 30.0]);
    let (scale, bias) = (f64s(&[2], &[2.0, 1.0]), f64s(&[2], &[0.0, 5.0]));
    let none = Attrs::new().with("epsilon", 0.0f32);
    let got = run_node(("", LAYER), &[Some(&x), Some(&scale), Some(&bias)], 3, none).expect("it runs");
    assert_eq!(got[0], f64s(&[2, 2], &[-2.0, 6.0, -2.0, 6.0]));
    assert_eq!(got[1], Tensor::f32(&[2, 1], &[2.0, 20.0]));
    assert_eq!(got[2], Tensor::f32(&[2, 1], &[1.0, 0.1]));
    // The mean square of 3 and 4 with an epsilon of 12.5 is 25.
    let (x, one) = (f64s(&[1, 2], &[3.0, 4.0]), f64s(&[1], &[1.0]));
    let attrs = Attrs::new().with("epsilon", 12.5f32);
    let got = run_node(("", RMS), &[Some(&x), Some(&one)], 1, attrs).expect("it runs");
    assert_eq!(got[0], f64s(&[1, 2], &[3.0 * (1.0 / 5.0), 4.0 * (1.0 / 5.0)]));
}

#[test]
fn large_mean_keeps_precision() {
    let x: Vec<f32> = (0..64).map(|k| 10_000.0 + (k % 4) as f32).collect();
    let (x, one) = (Tensor::f32(&[1, 64], &x), Tensor::f32(&[], &[1.0]));
    let got = run_node(("", LAYER), &[Some(&x), Some(&one)], 1, Attrs::new()).expect("it runs");
    for (k, y) in got[0].to_f64().into_iter().enumerate() {
        let expected_y = ((k % 4) as f64 - 1.5) / (1.25 + EPSILON).sqrt();
        assert!((y - expected_y).abs() < 1e-6, "{y} for {expected_y}");
    }
}

#[test]
fn gradients_of_all_outputs() {
    for op in KINDS {
        for (dims, axis) in SHAPES {
            let args = inputs(op, dims, axis, 2);
            let targets: Vec<usize> = (0..args.len()).collect();
            // Finite differences need statistics in float64; in float32 they are too coarse.
            for stash in [1i64, 11] {
                let attrs = attrs(axis).with("epsilon", 0.1f32).with("stash_type", stash);
                let outputs = output_count(op);
                let graph =
                    one_node_graph(NEWEST, ("", op), &ports(&args), outputs, attrs).expect("it is read");
                check_gradients(&graph, &args, &targets, &[0]);
                if stash == 11 {
                    check_gradients(&graph, &args, &targets, &(0..outputs).collect::<Vec<_>>());
                    for k in 1..outputs {
                        check_gradients(&graph, &args, &[0], &[k]);
                    }
                }
            }
        }
    }
}

/// Scale and bias broadcast to the data along different axes.
#[test]
fn broadcast_parameters() {
    for (dims, scale, bias) in [
        (&[2, 3, 4][..], &[][..], &[4][..]),
        (&[2, 3, 4], &[4], &[]),
        (&[2, 3, 4], &[3, 1], &[1]),
        (&[2, 3, 4], &[2, 1, 4], &[3, 4]),
        (&[2, 3, 4], &[2, 3, 4], &[2, 1, 1]),
        (&[2, 1, 3], &[1], &[1, 3]),
    ] {
        let args = [generic_tensor(dims, 3), generic_tensor(scale, 4), generic_tensor(bias, 5)];
        for axis in [-1, 1] {
            let attrs = attrs(axis).with("epsilon", 0.2f32);
            let graph =
                one_node_graph(NEWEST, ("", LAYER), &ports(&args), 1, attrs.clone()).expect("it is read");
            check_gradients(&graph, &args, &[0, 1, 2], &[0]);
            check_gradients(&graph, &args, &[2], &[0]);
            check_downgrade(&graph, &args, 16);
            let gradient = gradient_graph(&graph, &[Some(generic_tensor(dims, 6))], &[0, 1]);
            check_decomposition(&gradient, &args, 1e-9);
            let graph = one_node_graph(NEWEST, ("", RMS), &ports(&args[..2]), 1, attrs).expect("it is read");
            check_gradients(&graph, &args[..2], &[0, 1], &[0]);
        }
    }
}

#[test]
fn gradient_graph_equals_onnxruntime() {
    for op in KINDS {
        let args: Vec<Tensor> =
            inputs(op, &[3, 4], 1, 6).iter().map(|tensor| cast_tensor(tensor, DType::F32)).collect();
        let graph = one_node_graph(NEWEST, ("", op), &ports(&args), 1, attrs(1)).expect("it is read");
        let targets: Vec<usize> = (0..args.len()).collect();
        let gradient = gradient_graph(&graph, &[Some(Tensor::filled(DType::F32, &[3, 4], 0.5))], &targets);
        let (forward, backward) =
            if op == LAYER { (LAYER, LAYER_GRAD) } else { (SIMPLIFIED, SIMPLIFIED_GRAD) };
        assert_eq!(op_names(&gradient)[..2], [forward, backward], "{gradient}");
        assert!(gradient.nodes.len() == 2, "{gradient}");
        let (saved, inputs) = (&gradient.nodes[0].outputs[1..], &gradient.nodes[1].inputs[3..]);
        assert_eq!(saved, inputs, "what was saved is used");
        assert_eq!(gradient.nodes[1].attrs, attrs(1));
    }
}

#[test]
fn gradient_of_each_parameter() {
    let args = inputs(LAYER, &[3, 4], 1, 7);
    let graph = one_node_graph(NEWEST, ("", LAYER), &ports(&args), 1, attrs(1)).expect("it is read");
    for target in 0..3 {
        check_gradients(&graph, &args, &[target], &[0]);
    }
    // The gradient of the bias needs no statistics.
    let gradient = gradient_graph(&graph, &[Some(generic_tensor(&[3, 4], 1))], &[2]);
    assert_eq!(op_names(&gradient)[0], "ReduceSum", "{gradient}");
}

#[test]
fn decompositions() {
    for (op, grad) in [(LAYER, LAYER_GRAD), (SIMPLIFIED, SIMPLIFIED_GRAD)] {
        for (dims, axis) in SHAPES {
            let args = inputs(op, dims, axis, 8);
            let wide = attrs(axis).with("stash_type", 11i64);
            let graph =
                one_node_graph(NEWEST, ("", op), &ports(&args), output_count(op), wide).expect("it is read");
            if op == SIMPLIFIED {
                check_decomposition(&graph, &args, 1e-12);
            }
            let statistics = run(&graph, &args).expect("it runs");
            let visible = [&[generic_tensor(dims, 9)], &args[..2], &statistics[1..]].concat();
            let outputs = output_count(op).max(2);
            let graph = one_node_graph(NEWEST, (MICROSOFT, grad), &ports(&visible), outputs, attrs(axis))
                .expect("it is read");
            check_decomposition(&graph, &visible, 1e-9);
        }
    }
}

#[test]
fn older_opsets() {
    for (op, since) in [(LAYER, 17), (RMS, 23)] {
        for (dims, axis) in SHAPES {
            let args = inputs(op, dims, axis, 10);
            let outputs = output_count(op);
            let graph =
                one_node_graph(NEWEST, ("", op), &ports(&args), outputs, attrs(axis)).expect("it is read");
            assert_eq!(op_names(&check_downgrade(&graph, &args, since)), [op]);
            for opset in [7, 12, since - 1] {
                let old = check_downgrade(&graph, &args, opset);
                assert!(op_names(&old).contains(&"ReduceMean") && !op_names(&old).contains(&op), "{old}");
            }
        }
    }
    // ONNX Runtime also has LayerNormalization in older opsets.
    let arguments = inputs(LAYER, &[3, 4], 1, 11);
    for opset in [7, 16] {
        let graph = one_node_graph(opset, ("", LAYER), &ports(&arguments), 3, attrs(1)).expect("it is read");
        assert_close(
            &run(&graph, &arguments).expect("it runs")[0],
            &expected(LAYER, &arguments, 1)[0],
            1e-12,
        );
    }
    let error =
        one_node_graph(22, ("", RMS), &ports(&arguments[..2]), 1, attrs(1)).expect_err("too old").to_string();
    assert!(error.contains("the operator needs opset 23 or newer"), "{error}");
}

#[test]
fn narrow_dtypes() {
    use DType::{BF16, F16, F32};
    for (dtype, stash, tolerance) in [
        (F16, F32, 4e-3),
        (F16, BF16, 2e-2),
        (BF16, F32, 4e-2),
        (BF16, BF16, 4e-2),
        (F32, F32, 1e-5),
        (F32, BF16, 1e-2),
    ] {
        for op in KINDS {
            let attrs = Attrs::new().with("epsilon", 0.01f32);
            let wide = inputs(op, &[3, 4], -1, 12);
            let args: Vec<Tensor> = wide.iter().map(|tensor| cast_tensor(tensor, dtype)).collect();
            let outputs = output_count(op);
            let narrow = attrs.clone().with("stash_type", i64::from(stash.to_onnx()));
            let graph = one_node_graph(NEWEST, ("", op), &ports(&args), outputs, narrow).expect("it is read");
            let got = run(&graph, &args).expect("it runs");
            let expected_outputs =
                run_node(("", op), &ports(&wide), outputs, attrs.clone()).expect("it runs");
            assert_eq!(got[0].dtype(), dtype);
            assert!(got[1..].iter().all(|tensor| tensor.dtype() == stash));
            for (got, expected_output) in got.iter().zip(&expected_outputs) {
                assert_close(
                    &cast_tensor(got, DType::F64),
                    &cast_tensor(expected_output, DType::F64),
                    tolerance,
                );
            }
            // The gradients use statistics in the type of the arithmetic, even if the statistics results are narrower.
            let gradients = |graph: &Graph, arguments: &[Tensor], dtypes: [DType; 2]| {
                let weights = (0..outputs).map(|k| {
                    let dims: &[usize] = if k == 0 { &[3, 4] } else { &[3, 1] };
                    Some(cast_tensor(&generic_tensor(dims, 20 + k as u32), dtypes[usize::from(k > 0)]))
                });
                let targets: Vec<usize> = (0..arguments.len()).collect();
                let gradient = gradient_graph(graph, &weights.collect::<Vec<_>>(), &targets);
                run(&gradient, arguments).expect("it runs")
            };
            let exact = one_node_graph(NEWEST, ("", op), &ports(&wide), outputs, attrs).expect("it is read");
            let (got, expected_gradients) =
                (gradients(&graph, &args, [dtype, stash]), gradients(&exact, &wide, [DType::F64, F32]));
            for (got, expected_gradient) in got.iter().zip(&expected_gradients) {
                assert_eq!(got.dtype(), dtype);
                assert_close(&cast_tensor(got, DType::F64), expected_gradient, 4.0 * tolerance);
            }
        }
    }
}

#[test]
fn float16_intermediates_do_not_overflow() {
    let elements = [300.0f32, -400.0, 500.0].map(half::f16::from_f32);
    let x = Tensor::from_slice(DType::F16, &[1, 3], &elements);
    let one = cast_tensor(&f64s(&[3], &[1.0; 3]), DType::F16);
    let got = run_node(("", RMS), &[Some(&x), Some(&one)], 1, Attrs::new()).expect("it runs");
    let expected_outputs = expected(RMS, &[f64s(&[1, 3], &x.to_f64()), f64s(&[3], &[1.0; 3])], -1);
    assert_close(&cast_tensor(&got[0], DType::F64), &expected_outputs[0], 1e-3);
}

#[test]
fn empty_tensors() {
    for op in KINDS {
        for dims in [&[0, 3][..], &[2, 0], &[2, 0, 3]] {
            let args = inputs(op, dims, -1, 13);
            let graph = one_node_graph(NEWEST, ("", op), &ports(&args), 1, attrs(-1)).expect("it is read");
            assert_eq!(run(&graph, &args).expect("it runs")[0].dims(), dims);
            let targets: Vec<usize> = (0..args.len()).collect();
            let gradient = gradient_graph(&graph, &[Some(generic_tensor(dims, 1))], &targets);
            let got = run(&gradient, &args).expect("it runs");
            assert_eq!(got[0].dims(), dims);
            for parameter in &got[1..] {
                assert!(parameter.to_f64().iter().all(|&g| g == 0.0));
            }
        }
    }
}

#[test]
fn symbolic_sizes() {
    let args = inputs(LAYER, &[2, 3, 4], 1, 14);
    let mut graph = one_node_graph(
        NEWEST,
        ("", LAYER),
        &ports(&args),
        3,
        attrs(1).with("epsilon", 0.3f32).with("stash_type", 11i64),
    )
    .expect("it is read");
    let symbols = |names: &[&str]| names.iter().map(|name| Dim::symbol(name)).collect::<Shape>();
    for (k, names) in [&["n", "c", "l"][..], &["c", "l"], &["l"]].into_iter().enumerate() {
        let id = graph.inputs[k];
        graph.value_mut(id).ty = ValueType::Tensor(DType::F64, Some(symbols(names)));
    }
    let arguments = [args[0].clone(), args[1].clone(), generic_tensor(&[4], 3)];
    for &id in &graph.outputs.clone() {
        graph.value_mut(id).ty = ValueType::Unknown;
    }
    crate::passes::infer::infer(&mut graph).expect("valid");
    check_gradients(&graph, &arguments, &[0, 1], &[0, 1, 2]);
    let gradient = gradient_graph(&graph, &[Some(generic_tensor(&[2, 3, 4], 15)), None, None], &[0, 1]);
    check_decomposition(&gradient, &arguments, 1e-9);
}

#[test]
fn rejects_invalid_nodes() {
    let message = |op: &str, shapes: &[&[usize]], attrs: Attrs| {
        let args: Vec<Tensor> = shapes.iter().map(|dims| generic_tensor(dims, 1)).collect();
        let domain = if op.ends_with("Grad") { MICROSOFT } else { "" };
        one_node_graph(NEWEST, (domain, op), &ports(&args), 1, attrs)
            .expect_err("it does not fit")
            .to_string()
    };
    let none = Attrs::new;
    assert!(
        message(LAYER, &[&[2, 3], &[4]], none())
            .ends_with("input 1 has shape [4], which does not broadcast to [2, 3], the shape of input 0")
    );
    assert!(message(LAYER, &[&[2, 3], &[3], &[1, 2, 3]], none()).contains("input 2 has shape [1, 2, 3]"));
    assert!(message(LAYER, &[&[], &[]], none()).contains("axis -1 is out of range for rank 0"));
    assert!(message(RMS, &[&[2, 3], &[3]], attrs(2)).contains("axis 2 is out of range for rank 2"));
    assert!(message(RMS, &[&[2, 3], &[3], &[3]], none()).contains("expected 2 inputs, got 3"));
    assert!(
        message(LAYER, &[&[2, 3], &[3]], none().with("stash_type", 7i64))
            .contains("stash_type must be a float type, 1 (FLOAT) or 16 (BFLOAT16), got 7")
    );
    assert!(
        message(LAYER_GRAD, &[&[2, 3], &[3, 2], &[3], &[2, 1], &[2, 1]], none())
            .contains("the gradient has shape [2, 3], but the input has shape [3, 2]")
    );
    assert!(
        message(LAYER_GRAD, &[&[2, 3], &[2, 3], &[3], &[2, 1], &[1, 3]], none())
            .contains("input 4 has shape [1, 3], but [2, 1] is needed")
    );
    let (x, scale) = (generic_tensor(&[2, 3], 1), cast_tensor(&generic_tensor(&[3], 2), DType::F32));
    let error =
        one_node_graph(NEWEST, ("", LAYER), &[Some(&x), Some(&scale)], 1, none()).expect_err("two types");
    assert!(error.to_string().contains("insert a Cast"), "{error}");
}

#[test]
fn invertible_gradient_equals_layer_norm_gradient() {
    for (dims, axis) in SHAPES {
        let args = inputs(LAYER, dims, axis, 3);
        let ports: Vec<Option<&Tensor>> = args.iter().map(Some).collect();
        let results = run_node(("", LAYER), &ports, 3, attrs(axis)).expect("it runs");
        let [y, mean, inverse] = &results[..] else { panic!("three results") };
        let (g, scale, bias) = (generic_tensor(dims, 9), &args[1], &args[2]);
        let retained = [&g, &args[0], scale, mean, inverse].map(Some);
        let expected_gradients =
            run_node((MICROSOFT, LAYER_GRAD), &retained, 3, attrs(axis)).expect("it runs");
        let local = [&g, y, scale, bias, inverse].map(Some);
        let got = run_node((MICROSOFT, INVERTIBLE_GRAD), &local, 3, attrs(axis)).expect("it runs");
        for (got, expected_gradient) in got.iter().zip(&expected_gradients) {
            // The division by a small scale loses precision.
            assert_close(got, expected_gradient, 1e-5);
        }
        let graph =
            one_node_graph(NEWEST, (MICROSOFT, INVERTIBLE_GRAD), &local, 3, attrs(axis)).expect("valid");
        let own_values: Vec<Tensor> = local.into_iter().flatten().cloned().collect();
        check_decomposition(&graph, &own_values, 1e-12);
    }
    let (x, row) = (generic_tensor(&[2, 3], 1), generic_tensor(&[3], 2));
    let statistics = generic_tensor(&[2, 1], 3);
    let ports = [Some(&x), Some(&x), Some(&row), Some(&statistics), Some(&row)];
    let failure = run_node((MICROSOFT, INVERTIBLE_GRAD), &ports, 3, attrs(-1)).expect_err("refused");
    let crate::testing::Failure::Prepare(error) = failure else { panic!("prepared") };
    let message = "input 4 has shape [3], but [2, 1] is needed";
    assert!(error.to_string().contains(message), "{error}");
}
