use ortrain_graph::Tensor;

use super::*;
use crate::testing::{
    add, assert_close, cast_tensor, check_decomposition, check_downgrade, check_gradients, f64s,
    generic_tensor, gradient_graph, graph, one_node_graph, run, run_node,
};

const NEWEST: i64 = crate::NEWEST_OPSET;
const NORM: (&str, &str) = ("", "BatchNormalization");
const EPSILON: f64 = 1e-5_f32 as f64;

/// Shapes of batches of every rank, among them one pixel, one channel, and one element.
const SHAPES: [&[usize]; 8] =
    [&[4], &[3, 2], &[1, 3, 4], &[2, 3, 1], &[2, 2, 3, 2], &[3, 1, 2, 2], &[1, 2, 1, 1], &[2, 3, 1, 2, 2]];

fn training_attrs() -> Attrs {
    Attrs::new().with("training_mode", 1i64)
}

fn channel_count(dims: &[usize]) -> usize {
    dims.get(1).copied().unwrap_or(1)
}

/// Returns a batch, scale, bias, mean and (positive) variance.
fn inputs(dims: &[usize], seed: u32) -> Vec<Tensor> {
    let per_channel = |seed| generic_tensor(&[channel_count(dims)], seed);
    let var: Vec<f64> = per_channel(seed + 4).to_f64().iter().map(|x| x.abs() + 0.3).collect();
    let var = f64s(&[channel_count(dims)], &var);
    vec![generic_tensor(dims, seed), per_channel(seed + 1), per_channel(seed + 2), per_channel(seed + 3), var]
}

fn ports(inputs: &[Tensor]) -> Vec<Option<&Tensor>> {
    inputs.iter().map(Some).collect()
}

/// Returns the channel of an element, by its flat index.
fn channel_of(dims: &[usize], k: usize) -> usize {
    match dims {
        [_] => 0,
        [_, channels, space @ ..] => k / space.iter().product::<usize>() % channels,
        [] => unreachable!("a batch has axes"),
    }
}

/// Computes mean and variance of each channel, by the definition.
fn statistics(x: &Tensor) -> (Vec<f64>, Vec<f64>) {
    let (dims, elements) = (x.dims(), x.to_f64());
    let of = |c: usize| -> Vec<f64> {
        let local = elements.iter().enumerate().filter(|&(k, _)| channel_of(dims, k) == c);
        local.map(|(_, &x)| x).collect()
    };
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let groups: Vec<Vec<f64>> = (0..channel_count(dims)).map(of).collect();
    let means: Vec<f64> = groups.iter().map(|group| mean(group)).collect();
    let square = |(group, middle): (&Vec<f64>, &f64)| {
        mean(&group.iter().map(|x| (x - middle).powi(2)).collect::<Vec<_>>())
    };
    let vars = groups.iter().zip(&means).map(square).collect();
    (means, vars)
}

/// Computes the result by the definition.
fn normalized(args: &[Tensor], means: &[f64], vars: &[f64]) -> Tensor {
    let (x, scale, bias) = (&args[0], args[1].to_f64(), args[2].to_f64());
    let element = |(k, x): (usize, f64)| {
        let c = channel_of(args[0].dims(), k);
        (x - means[c]) / (vars[c] + EPSILON).sqrt() * scale[c] + bias[c]
    };
    f64s(x.dims(), &x.to_f64().into_iter().enumerate().map(element).collect::<Vec<_>>())
}

#[test]
fn inference_mode() {
    for dims in SHAPES {
        let args = inputs(dims, 1);
        let got = run_node(NORM, &ports(&args), 1, Attrs::new()).expect("it runs");
        assert_close(&got[0], &normalized(&args, &args[3].to_f64(), &args[4].to_f64()), 1e-12);
    }
}

#[test]
fn training_mode() {
    for dims in SHAPES {
        let args = inputs(dims, 2);
        let (means, vars) = statistics(&args[0]);
        let blend = |old: &Tensor, new: &[f64]| {
            let momentum = f64::from(0.75f32);
            let pairs = old.to_f64().into_iter().zip(new);
            let blended: Vec<f64> = pairs.map(|(old, new)| momentum * old + (1.0 - momentum) * new).collect();
            f64s(old.dims(), &blended)
        };
        let attrs = training_attrs().with("momentum", 0.75f32);
        for (op, outputs) in [(NORM, 3), ((MICROSOFT, INTERNAL), 5)] {
            let got = run_node(op, &ports(&args), outputs, attrs.clone()).expect("it runs");
            assert_close(&got[0], &normalized(&args, &means, &vars), 1e-9);
            assert_close(&got[1], &blend(&args[3], &means), 1e-12);
            assert_close(&got[2], &blend(&args[4], &vars), 1e-12);
            if outputs == 5 {
                let inverse: Vec<f64> = vars.iter().map(|var| 1.0 / (var + EPSILON).sqrt()).collect();
                assert_close(&got[3], &f64s(&[means.len()], &means), 1e-12);
                assert_close(&got[4], &f64s(&[means.len()], &inverse), 1e-9);
            }
        }
    }
}

#[test]
fn hand_computed_values() {
    // Two elements, two channels: means 2 and 20, variances 1 and 100.
    let x = f64s(&[2, 2], &[1.0, 10.0, 3.0, 30.0]);
    let args =
        [x, f64s(&[2], &[2.0, 1.0]), f64s(&[2], &[0.0, 5.0]), f64s(&[2], &[1.0; 2]), f64s(&[2], &[4.0; 2])];
    let attrs = training_attrs().with("epsilon", 0.0f32).with("momentum", 0.5f32);
    let got = run_node(NORM, &ports(&args), 3, attrs).expect("it runs");
    assert_eq!(got[0], f64s(&[2, 2], &[-2.0, 4.0, 2.0, 6.0]));
    assert_eq!(got[1], f64s(&[2], &[1.5, 10.5]));
    assert_eq!(got[2], f64s(&[2], &[2.5, 52.0]));
}

#[test]
fn large_mean_keeps_precision() {
    let x: Vec<f32> = (0..64).map(|k| 10_000.0 + (k % 4) as f32).collect();
    let (ones, zeros) = (Tensor::f32(&[1], &[1.0]), Tensor::f32(&[1], &[0.0]));
    let args = [Tensor::f32(&[64, 1], &x), ones.clone(), zeros.clone(), zeros, ones];
    let got = run_node(NORM, &ports(&args), 1, training_attrs()).expect("it runs");
    for (k, y) in got[0].to_f64().into_iter().enumerate() {
        let expected = ((k % 4) as f64 - 1.5) / (1.25 + EPSILON).sqrt();
        assert!((y - expected).abs() < 1e-6, "{y} for {expected}");
    }
}

#[test]
fn inference_mode_gradients() {
    for dims in SHAPES {
        let args = inputs(dims, 3);
        let graph = one_node_graph(NEWEST, NORM, &ports(&args), 1, Attrs::new()).expect("it is read");
        check_gradients(&graph, &args, &[0, 1, 2, 3, 4], &[0]);
    }
}

#[test]
fn training_mode_gradients() {
    for dims in SHAPES {
        let args = inputs(dims, 4);
        for (op, outputs) in [(NORM, 1), (NORM, 3), ((MICROSOFT, INTERNAL), 5)] {
            // The epsilon is larger, because with one element for each channel the variance is zero.
            let attrs = training_attrs().with("epsilon", 0.1f32);
            let graph = one_node_graph(NEWEST, op, &ports(&args), outputs, attrs).expect("it is read");
            check_gradients(&graph, &args, &[0, 1, 2], &[0]);
        }
    }
}

#[test]
fn running_statistics_have_no_gradient() {
    let args = inputs(&[3, 2], 5);
    let graph = one_node_graph(NEWEST, NORM, &ports(&args), 3, training_attrs()).expect("it is read");
    let weights =
        [Some(generic_tensor(&[3, 2], 6)), Some(generic_tensor(&[2], 7)), Some(generic_tensor(&[2], 8))];
    let both = run(&gradient_graph(&graph, &weights, &[0]), &args).expect("it runs");
    let first = [weights[0].clone(), None, None];
    let single = run(&gradient_graph(&graph, &first, &[0]), &args).expect("it runs");
    assert_eq!(both, single);
}

#[test]
fn gradient_graph_equals_onnxruntime() {
    let args = inputs(&[2, 3, 2, 2], 6);
    let graph = one_node_graph(NEWEST, NORM, &ports(&args), 1, training_attrs()).expect("it is read");
    let weights = [Some(generic_tensor(&[2, 3, 2, 2], 9))];
    let gradient = gradient_graph(&graph, &weights, &[0, 1, 2]);
    let ops: Vec<&str> = gradient.nodes.iter().map(|node| &*node.op).collect();
    assert_eq!(ops, [INTERNAL, GRADIENT, "Identity", "Identity", "Identity"][..ops.len()], "{gradient}");
    let names: Vec<&str> =
        gradient.nodes[0].present_outputs().skip(1).map(|id| gradient.name_of(id)).collect();
    assert_eq!(names, ADDED_OUTPUTS);
}

#[test]
fn decompositions() {
    for dims in SHAPES {
        let args = inputs(dims, 7);
        for (training, outputs) in [(1, 5), (1, 3), (1, 1), (0, 1)] {
            let attrs = Attrs::new().with("training_mode", training).with("momentum", 0.6f32);
            let graph = one_node_graph(NEWEST, (MICROSOFT, INTERNAL), &ports(&args), outputs, attrs)
                .expect("it is read");
            check_decomposition(&graph, &args, 1e-6);
        }
        let count = channel_count(dims);
        let arguments = [
            generic_tensor(dims, 1),
            generic_tensor(dims, 2),
            generic_tensor(&[count], 3),
            generic_tensor(&[count], 4),
            generic_tensor(&[count], 5),
        ];
        let attrs = Attrs::new().with("epsilon", 1e-5f32);
        let graph =
            one_node_graph(NEWEST, (MICROSOFT, GRADIENT), &ports(&arguments), 3, attrs).expect("it is read");
        check_decomposition(&graph, &arguments, 1e-12);
    }
}

#[test]
fn mixed_dtypes() {
    use DType::{BF16, F16, F32, F64};
    for (data, parameters, statistics, tolerance) in [
        (F16, F16, F16, 4e-3),
        (F16, F16, F32, 4e-3),
        (F16, F32, F32, 4e-3),
        (BF16, F32, F64, 3e-2),
        (F32, F32, F32, 1e-5),
        (F32, F64, F16, 4e-3),
        (F64, F32, F32, 1e-6),
    ] {
        let wide = inputs(&[3, 2, 4], 8);
        let dtypes = [data, parameters, parameters, statistics, statistics];
        let args: Vec<Tensor> = wide.iter().zip(dtypes).map(|(t, dtype)| cast_tensor(t, dtype)).collect();
        let attrs = || training_attrs().with("epsilon", 0.01f32);
        for (op, outputs, attrs) in
            [(NORM, 1, Attrs::new()), (NORM, 3, attrs()), ((MICROSOFT, INTERNAL), 5, attrs())]
        {
            let got = run_node(op, &ports(&args), outputs, attrs.clone()).expect("it runs");
            let expected = run_node(op, &ports(&wide), outputs, attrs.clone()).expect("it runs");
            assert_eq!(got[0].dtype(), data);
            for (got, expected) in got.iter().zip(&expected) {
                assert_close(&cast_tensor(got, F64), expected, tolerance);
            }
            assert!(got[1..].iter().all(|tensor| tensor.dtype() == statistics));

            let gradients = |arguments: &[Tensor], dtype: DType| {
                let graph = one_node_graph(NEWEST, op, &ports(arguments), outputs, attrs.clone())
                    .expect("it is read");
                let mut weights = vec![None; outputs];
                weights[0] = Some(cast_tensor(&generic_tensor(&[3, 2, 4], 9), dtype));
                let gradient = gradient_graph(&graph, &weights, &[0, 1, 2]);
                run(&gradient, arguments).expect("it runs")
            };
            let (got, expected) = (gradients(&args, data), gradients(&wide, F64));
            for ((got, expected), dtype) in got.iter().zip(&expected).zip(dtypes) {
                assert_eq!(got.dtype(), dtype);
                assert_close(&cast_tensor(got, F64), expected, 4.0 * tolerance);
            }
        }
    }
}

#[test]
fn empty_batches_do_not_change_statistics() {
    for dims in [&[0, 3][..], &[0, 3, 2, 2], &[2, 3, 0]] {
        let args = inputs(dims, 9);
        for (op, outputs) in [(NORM, 3), ((MICROSOFT, INTERNAL), 5)] {
            let got = run_node(op, &ports(&args), outputs, training_attrs()).expect("it runs");
            assert_eq!(got[0].dims(), dims);
            assert_eq!(got[1..3], args[3..5]);
        }
        for attrs in [training_attrs(), Attrs::new()] {
            let graph = one_node_graph(NEWEST, NORM, &ports(&args), 1, attrs).expect("it is read");
            let gradient = gradient_graph(&graph, &[Some(generic_tensor(dims, 1))], &[0, 1, 2]);
            let got = run(&gradient, &args).expect("it runs");
            assert_eq!(got[0].dims(), dims);
            assert_eq!(got[1..], [f64s(&[3], &[0.0; 3]), f64s(&[3], &[0.0; 3])]);
        }
    }
}

#[test]
fn no_channels() {
    let args = inputs(&[2, 0, 3], 1);
    for attrs in [training_attrs(), Attrs::new()] {
        let graph = one_node_graph(NEWEST, NORM, &ports(&args), 1, attrs).expect("it is read");
        assert_eq!(run(&graph, &args).expect("it runs")[0].dims(), [2, 0, 3]);
        let gradient = gradient_graph(&graph, &[Some(generic_tensor(&[2, 0, 3], 1))], &[0, 1]);
        assert_eq!(run(&gradient, &args).expect("it runs")[1].dims(), [0]);
    }
}

#[test]
fn output_count_selects_mode_before_opset_14() {
    let args = inputs(&[2, 3, 4], 10);
    for opset in [7, 9, 13] {
        let graph = one_node_graph(opset, NORM, &ports(&args), 1, Attrs::new()).expect("it is read");
        let got = run(&graph, &args).expect("it runs");
        assert_close(&got[0], &normalized(&args, &args[3].to_f64(), &args[4].to_f64()), 1e-12);

        let (means, vars) = statistics(&args[0]);
        for outputs in [3, 5] {
            let graph =
                one_node_graph(opset, NORM, &ports(&args), outputs, Attrs::new()).expect("it is read");
            let got = run(&graph, &args).expect("it runs");
            let expected = run_node(NORM, &ports(&args), 3, training_attrs()).expect("it runs");
            assert_eq!(got[..3], expected[..]);
            if outputs == 5 {
                assert_close(&got[3], &f64s(&[3], &means), 1e-12);
                assert_close(&got[4], &f64s(&[3], &vars), 1e-12);
            }
        }
        // An old runtime takes five outputs as the training mode.
        let graph = one_node_graph(NEWEST, NORM, &ports(&args), 3, training_attrs()).expect("it is read");
        let old = check_downgrade(&graph, &args, opset);
        assert_eq!((old.nodes[0].outputs.len(), old.nodes[0].attrs.int("training_mode")), (5, Ok(None)));
        let graph = one_node_graph(NEWEST, NORM, &ports(&args), 1, Attrs::new().with("training_mode", 0i64));
        let old = check_downgrade(&graph.expect("it is read"), &args, opset);
        assert_eq!((old.nodes[0].outputs.len(), old.nodes[0].attrs.int("training_mode")), (1, Ok(None)));
    }
    let one = generic_tensor(&[5], 1);
    let arguments =
        [one.clone(), f64s(&[1], &[1.0]), f64s(&[1], &[0.0]), f64s(&[1], &[0.0]), f64s(&[1], &[1.0])];
    let graph = one_node_graph(9, NORM, &ports(&arguments), 5, Attrs::new()).expect("it is read");
    assert_eq!(run(&graph, &arguments).expect("it runs")[3].dims(), [1], "a vector has one channel");
}

#[test]
fn spatial_0_of_opset_7() {
    let local: Vec<Tensor> = (1..5).map(|seed| generic_tensor(&[2, 3], seed)).collect();
    let var: Vec<f64> = local[3].to_f64().iter().map(|x| x.abs() + 0.5).collect();
    let args = [vec![generic_tensor(&[4, 2, 3], 9)], local[..3].to_vec(), vec![f64s(&[2, 3], &var)]].concat();
    let flat: Vec<Tensor> = std::iter::once(args[0].reshaped(vec![4, 6]).expect("as many"))
        .chain(args[1..].iter().map(|t| t.reshaped(vec![6]).expect("as many")))
        .collect();
    let attrs = Attrs::new().with("spatial", 0i64);
    for outputs in [1, 5] {
        let graph = one_node_graph(7, NORM, &ports(&args), outputs, attrs.clone()).expect("it is read");
        let got = run(&graph, &args).expect("it runs");
        let graph_of_rows =
            one_node_graph(9, NORM, &ports(&flat), outputs, Attrs::new()).expect("it is read");
        let expected = run(&graph_of_rows, &flat).expect("it runs");
        for (k, (got, expected)) in got.iter().zip(expected).enumerate() {
            let dims = if k == 0 { vec![4, 2, 3] } else { vec![2, 3] };
            assert_close(got, &expected.reshaped(dims).expect("as many"), 1e-12);
        }
        check_gradients(&graph, &args, &[0, 1, 2], &[0]);
    }
}

#[test]
fn older_opsets_have_one_type() {
    let types = [DType::F16, DType::F32, DType::F32, DType::F32, DType::F32];
    let args: Vec<Tensor> =
        inputs(&[2, 3, 4], 11).iter().zip(types).map(|(tensor, dtype)| cast_tensor(tensor, dtype)).collect();
    for (attrs, outputs) in [(Attrs::new(), 1), (training_attrs(), 3)] {
        let graph = one_node_graph(NEWEST, NORM, &ports(&args), outputs, attrs).expect("it is read");
        for opset in [9, 14] {
            let mut old = graph.clone();
            crate::passes::versions::downgrade(&mut old, opset).expect("it can be written");
            crate::passes::versions::upgrade(&mut old).expect("it can be read");
            let (got, expected) = (run(&old, &args).expect("it runs"), run(&graph, &args).expect("it runs"));
            for (got, expected) in got.iter().zip(&expected) {
                assert_close(got, expected, 4e-3);
            }
        }
    }
}

#[test]
fn inference_mode_returns_input_statistics() {
    let args = inputs(&[2, 3], 12);
    let got = run_node(NORM, &ports(&args), 3, Attrs::new()).expect("it runs");
    assert_eq!(got[1..], args[3..]);
    let (mut graph, ids) = graph(&args.iter().collect::<Vec<_>>());
    let ids: Vec<Option<ValueId>> = ids.into_iter().map(Some).collect();
    let outputs = add(&mut graph, NORM, "y", &ids, 3, training_attrs());
    let sum = add(&mut graph, ("", "Add"), "sum", &[Some(outputs[1]), Some(outputs[2])], 1, Attrs::new());
    assert_eq!(convert_to_inference(&mut graph, 0), 2);
    graph.outputs = vec![outputs[1], sum[0]];
    crate::passes::infer::infer(&mut graph).expect("valid");
    let got = run(&graph, &args).expect("it runs");
    assert_eq!(got[0], args[3]);
}

#[test]
fn rejects_invalid_nodes() {
    let message = |dims: &[usize], count: &[usize], attrs: Attrs, outputs: usize| {
        let x = generic_tensor(dims, 1);
        let c = generic_tensor(count, 2);
        let error = one_node_graph(
            NEWEST,
            (MICROSOFT, INTERNAL),
            &[Some(&x), Some(&c), Some(&c), Some(&c), Some(&c)],
            outputs,
            attrs,
        );
        error.expect_err("it does not fit").to_string()
    };
    assert!(
        message(&[2, 3, 4], &[4], training_attrs(), 1)
            .ends_with("input 1 has shape [4], but [3] is needed: one element for each channel of input 0")
    );
    assert!(
        message(&[3, 2], &[2, 1], training_attrs(), 1)
            .contains("input 1 has shape [2, 1], but [2] is needed")
    );
    assert!(message(&[], &[1], training_attrs(), 1).contains("input 0 must have a batch axis, got a scalar"));
    let off = Attrs::new().with("training_mode", 0i64);
    assert!(message(&[3, 2], &[2], off, 5).contains("exist only in training mode"));
}
