use ortrain_graph::{Tensor, ValueType};

use super::*;
use crate::testing::{
    Failure, add, assert_close, check_decomposition, check_downgrade, check_gradients, f64s, generic_tensor,
    gradient_graph, graph, one_node_graph, run, run_node,
};

const STANDARD: (&str, &str) = ("", ATTENTION);
const MERGED: (&str, &str) = ("com.microsoft", ATTENTION);
const MULTI: (&str, &str) = ("com.microsoft", "MultiHeadAttention");

/// Float64 sums of a few products and exponentials, added in another order.
const TOLERANCE: f64 = 1e-11;
const BATCH: usize = 2;
const QUERIES: usize = 3;
const KEYS: usize = 2;
const HEAD_SIZE: usize = 2;
const VALUE_SIZE: usize = 3;

/// Sizes and scales of a reference attention.
struct ReferenceSizes {
    heads: usize,
    of_keys: usize,
    keys: usize,
    scale: f64,
    softcap: f64,
}

/// Returns the products, capped products, masked products, weights and results by the definition, in row-major order.
/// `mask(b, h, i, j)` is added.
fn expected(
    plan: &ReferenceSizes,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    mask: impl Fn([usize; 4]) -> f64,
) -> [Vec<f64>; 5] {
    let mut stages = [const { Vec::new() }; 5];
    for b in 0..BATCH {
        for h in 0..plan.heads {
            let group = h / (plan.heads / plan.of_keys);
            let row = |data: &[f64], heads: usize, head: usize, length: usize, i: usize, size: usize| {
                let from = ((b * heads + head) * length + i) * size;
                data[from..from + size].to_vec()
            };
            for i in 0..QUERIES {
                let query = row(q, plan.heads, h, QUERIES, i, HEAD_SIZE);
                let product = |j: usize| {
                    let key = row(k, plan.of_keys, group, plan.keys, j, HEAD_SIZE);
                    query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>() * plan.scale
                };
                let products: Vec<f64> = (0..plan.keys).map(product).collect();
                let bend =
                    |x: &f64| if plan.softcap > 0.0 { (x / plan.softcap).tanh() * plan.softcap } else { *x };
                let bent: Vec<f64> = products.iter().map(bend).collect();
                let masked: Vec<f64> = bent.iter().enumerate().map(|(j, x)| x + mask([b, h, i, j])).collect();
                let sum: f64 = masked.iter().map(|x| x.exp()).sum();
                let shares: Vec<f64> =
                    masked.iter().map(|x| if sum == 0.0 { 0.0 } else { x.exp() / sum }).collect();
                for column in 0..VALUE_SIZE {
                    let value = |j: usize| row(v, plan.of_keys, group, plan.keys, j, VALUE_SIZE)[column];
                    stages[4].push((0..plan.keys).map(|j| shares[j] * value(j)).sum());
                }
                for (stage, values) in stages.iter_mut().zip([products, bent, masked, shares]) {
                    stage.extend(values);
                }
            }
        }
    }
    stages
}

/// Returns heads as `[batch, length, heads * size]`.
fn flatten_heads(tensor: &Tensor) -> Tensor {
    let [batch, heads, length, size] = *tensor.dims() else { panic!("four axes") };
    let data = tensor.to_f64();
    let mut elements = Vec::new();
    for b in 0..batch {
        for i in 0..length {
            for h in 0..heads {
                let from = ((b * heads + h) * length + i) * size;
                elements.extend_from_slice(&data[from..from + size]);
            }
        }
    }
    f64s(&[batch, length, heads * size], &elements)
}

/// Returns queries, keys and values as heads.
fn spread_heads(heads: usize, of_keys: usize, keys: usize) -> [Tensor; 3] {
    [
        generic_tensor(&[BATCH, heads, QUERIES, HEAD_SIZE], 1),
        generic_tensor(&[BATCH, of_keys, keys, HEAD_SIZE], 2),
        generic_tensor(&[BATCH, of_keys, keys, VALUE_SIZE], 3),
    ]
}

fn bools(dims: &[usize], visible: &[u8]) -> Tensor {
    Tensor::from_slice(DType::Bool, dims, visible)
}

fn graph_and_inputs(
    op: (&str, &str),
    inputs: &[Option<&Tensor>],
    outputs: usize,
    attrs: Attrs,
) -> (Graph, Vec<Tensor>) {
    let graph = one_node_graph(28, op, inputs, outputs, attrs).expect("valid");
    (graph, inputs.iter().flatten().map(|&tensor| tensor.clone()).collect())
}

/// Returns the graph with symbolic input sizes, named by `name(input, axis)`. Sizes of 1 stay numbers.
fn symbolic(of: &Graph, inputs: &[Tensor], name: impl Fn(usize, usize) -> String) -> Graph {
    let mut symbolic = of.clone();
    for (k, tensor) in inputs.iter().enumerate() {
        let dim = |axis: usize| match tensor.dims()[axis] {
            1 => Dim::Known(1),
            _ => Dim::symbol(&name(k, axis)),
        };
        let shape = (0..tensor.dims().len()).map(dim).collect();
        let id = symbolic.inputs[k];
        symbolic.value_mut(id).ty = ValueType::Tensor(tensor.dtype(), Some(shape));
    }
    for &output in &of.outputs {
        symbolic.value_mut(output).ty = ValueType::Unknown;
    }
    crate::passes::infer::infer(&mut symbolic).expect("valid");
    symbolic
}

fn floats(inputs: &[Tensor]) -> Vec<usize> {
    (0..inputs.len()).filter(|&k| inputs[k].dtype() == DType::F64).collect()
}

#[test]
fn grouped_queries_softcap_and_scale() {
    for (count, of_keys) in [(2, 2), (2, 1), (4, 2)] {
        for (scale, softcap) in [(None, 0.0f32), (Some(-0.7f32), 0.0), (Some(1.3), 0.5)] {
            let [q, k, v] = spread_heads(count, of_keys, KEYS);
            let plan = ReferenceSizes {
                heads: count,
                of_keys,
                keys: KEYS,
                scale: scale.map_or(1.0 / (HEAD_SIZE as f64).sqrt(), f64::from),
                softcap: f64::from(softcap),
            };
            let stages = expected(&plan, &q.to_f64(), &k.to_f64(), &v.to_f64(), |_| 0.0);
            let mut attrs = Attrs::new().with("softcap", softcap);
            if let Some(scale) = scale {
                attrs = attrs.with("scale", scale);
            }
            let expected = f64s(&[BATCH, count, QUERIES, VALUE_SIZE], &stages[4]);
            let (graph, inputs) =
                graph_and_inputs(STANDARD, &[Some(&q), Some(&k), Some(&v)], 1, attrs.clone());
            assert_close(&run(&graph, &inputs).expect("it runs")[0], &expected, TOLERANCE);
            check_gradients(&graph, &inputs, &[0, 1, 2], &[0]);
            check_decomposition(&graph, &inputs, TOLERANCE);
            assert_eq!(check_downgrade(&graph, &inputs, 23).nodes.len(), 1);
            check_downgrade(&graph, &inputs, 14);
            let open = symbolic(&graph, &inputs, |k, axis| match (k, axis) {
                (_, 0) => "batch".into(),
                (1 | 2, 1) if count != of_keys => "of_keys".into(),
                (_, 1) => "heads".into(),
                (0, 2) => "queries".into(),
                (_, 2) => "keys".into(),
                (2, _) => "of_values".into(),
                _ => "size".into(),
            });
            assert_close(&run(&open, &inputs).expect("it runs")[0], &expected, TOLERANCE);
            check_gradients(&open, &inputs, &[1], &[0]);

            // The same computation with inputs of three axes.
            let attrs = attrs.with("q_num_heads", count as i64).with("kv_num_heads", of_keys as i64);
            let data = [&q, &k, &v].map(flatten_heads);
            let (graph, inputs) = graph_and_inputs(STANDARD, &data.each_ref().map(Some), 1, attrs);
            assert_close(&run(&graph, &inputs).expect("it runs")[0], &flatten_heads(&expected), TOLERANCE);
            check_gradients(&graph, &inputs, &[2], &[0]);
            let open = symbolic(&graph, &inputs, |k, axis| match axis {
                0 => "batch".into(),
                1 if k > 0 => "keys".into(),
                axis => format!("d{k}_{axis}"),
            });
            assert_close(&run(&open, &inputs).expect("it runs")[0], &flatten_heads(&expected), TOLERANCE);
        }
    }
}

/// Masks of every rank, bool and float. Some hide all keys of a query.
#[test]
fn masks() {
    let [q, k, v] = spread_heads(2, 2, KEYS);
    let plan = ReferenceSizes {
        heads: 2,
        of_keys: 2,
        keys: KEYS,
        scale: 1.0 / (HEAD_SIZE as f64).sqrt(),
        softcap: 0.0,
    };
    for dims in [
        &[KEYS][..],
        &[QUERIES, KEYS],
        &[1, KEYS],
        &[2, 1, KEYS],
        &[2, 1, 1, KEYS],
        &[BATCH, 2, QUERIES, KEYS],
        &[QUERIES, 1],
    ] {
        let count: usize = dims.iter().product();
        let visible: Vec<u8> = (0..count).map(|k| u8::from(k % 5 != 1 && k % 7 > 1)).collect();
        let numbers: Vec<f64> = generic_tensor(dims, 4).to_f64();
        let hidden: Vec<f64> = visible
            .iter()
            .zip(&numbers)
            .map(|(&observed, &x)| if observed == 1 { x } else { f64::NEG_INFINITY })
            .collect();
        for (mask, is_bool) in
            [(bools(dims, &visible), true), (f64s(dims, &numbers), false), (f64s(dims, &hidden), false)]
        {
            for causal in [false, true] {
                let of_mask = mask.to_f64();
                let added = |at: [usize; 4]| {
                    let last = dims[dims.len() - 1];
                    let position = dims.iter().rev().zip(at.iter().rev()).fold(
                        (0, 1),
                        |(index, stride), (&size, &at)| {
                            (index + if size == 1 { 0 } else { at * stride }, stride * size)
                        },
                    );
                    let hidden = at[3] >= last || (causal && at[3] > at[2]);
                    match (hidden, is_bool) {
                        (true, _) => f64::NEG_INFINITY,
                        (false, true) => {
                            if of_mask[position.0] == 1.0 {
                                0.0
                            } else {
                                f64::NEG_INFINITY
                            }
                        }
                        (false, false) => of_mask[position.0],
                    }
                };
                let stages = expected(&plan, &q.to_f64(), &k.to_f64(), &v.to_f64(), added);
                let attrs =
                    Attrs::new().with("is_causal", i64::from(causal)).with("qk_matmul_output_mode", 3i64);
                let ports = [Some(&q), Some(&k), Some(&v), Some(&mask)];
                let (mut graph, inputs) = graph_and_inputs(STANDARD, &ports, 4, attrs);
                graph.outputs = vec![graph.outputs[0], graph.outputs[3]];
                let got = run(&graph, &inputs).expect("it runs");
                assert_close(&got[0], &f64s(&[BATCH, 2, QUERIES, VALUE_SIZE], &stages[4]), TOLERANCE);
                assert_close(&got[1], &f64s(&[BATCH, 2, QUERIES, KEYS], &stages[3]), TOLERANCE);
                if of_mask.iter().all(|x| x.is_finite()) {
                    let targets = if is_bool { vec![0] } else { vec![0, 3] };
                    check_gradients(&graph, &inputs, &targets, &[0, 1]);
                } else {
                    let weights = [generic_tensor(&[BATCH, 2, QUERIES, VALUE_SIZE], 5)].map(Some);
                    let mut first = graph.clone();
                    first.outputs.truncate(1);
                    let gradient = gradient_graph(&first, &weights, &[0, 1, 2, 3]);
                    for gradient in run(&gradient, &inputs).expect("it runs") {
                        assert!(gradient.to_f64().iter().all(|x| x.is_finite()), "{gradient:?}");
                    }
                }
                check_decomposition(&graph, &inputs, TOLERANCE);
                let open = symbolic(&graph, &inputs, |k, axis| match (k, axis) {
                    (3, axis) => format!("mask{axis}"),
                    (0, 2) => "queries".into(),
                    (_, 2) => "keys".into(),
                    (2, 3) => "of_values".into(),
                    (_, axis) => format!("d{axis}"),
                });
                assert_close(&run(&open, &inputs).expect("it runs")[0], &got[0], TOLERANCE);
            }
        }
    }
}

/// A query without visible keys gives 0 and a zero gradient, even if keys are NaN or infinite.
#[test]
fn queries_without_keys() {
    let [q, _, v] = spread_heads(1, 1, KEYS);
    let k = f64s(&[BATCH, 1, KEYS, HEAD_SIZE], &[f64::INFINITY, 1.0, f64::NAN, 1.0, 0.5, 1.0, 2.0, 1.0]);
    let mask = bools(&[BATCH, 1, 1, KEYS], &[0, 0, 1, 1]);
    let (graph, inputs) =
        graph_and_inputs(STANDARD, &[Some(&q), Some(&k), Some(&v), Some(&mask)], 1, Attrs::new());
    let got = run(&graph, &inputs).expect("it runs");
    let first = &got[0].to_f64()[..QUERIES * VALUE_SIZE];
    assert!(first.iter().all(|&x| x == 0.0), "{first:?}");
    let weights = [Some(generic_tensor(&[BATCH, 1, QUERIES, VALUE_SIZE], 5))];
    let of_values = &run(&gradient_graph(&graph, &weights, &[2]), &inputs).expect("it runs")[0];
    let first = &of_values.to_f64()[..KEYS * VALUE_SIZE];
    assert!(first.iter().all(|&x| x == 0.0), "{first:?}");
}

#[test]
fn past_and_intermediate_outputs() {
    const PAST: usize = 2;
    let [q, k, v] = spread_heads(2, 1, KEYS);
    let past_key = generic_tensor(&[BATCH, 1, PAST, HEAD_SIZE], 6);
    let past_value = generic_tensor(&[BATCH, 1, PAST, VALUE_SIZE], 7);
    let after = |past: &Tensor, new: &Tensor| -> Vec<f64> {
        let size = new.dims()[3];
        let rows = |tensor: &Tensor, b: usize| {
            let each = tensor.dims()[2] * size;
            tensor.to_f64()[b * each..(b + 1) * each].to_vec()
        };
        (0..BATCH).flat_map(|b| [rows(past, b), rows(new, b)].concat()).collect()
    };
    let (keys, values) = (after(&past_key, &k), after(&past_value, &v));
    let plan = ReferenceSizes { heads: 2, of_keys: 1, keys: PAST + KEYS, scale: 0.25, softcap: 2.0 };
    for (mode, causal) in [(0, false), (1, false), (2, true), (3, true)] {
        let mask = |at: [usize; 4]| if causal && at[3] > at[2] + PAST { f64::NEG_INFINITY } else { 0.0 };
        let stages = expected(&plan, &q.to_f64(), &keys, &values, mask);
        let attrs = Attrs::new()
            .with("scale", 0.25f32)
            .with("softcap", 2.0f32)
            .with("is_causal", i64::from(causal))
            .with("qk_matmul_output_mode", mode);
        let ports = [Some(&q), Some(&k), Some(&v), None, Some(&past_key), Some(&past_value)];
        let (graph, inputs) = graph_and_inputs(STANDARD, &ports, 4, attrs);
        let got = run(&graph, &inputs).expect("it runs");
        let expected = [
            f64s(&[BATCH, 2, QUERIES, VALUE_SIZE], &stages[4]),
            f64s(&[BATCH, 1, PAST + KEYS, HEAD_SIZE], &keys),
            f64s(&[BATCH, 1, PAST + KEYS, VALUE_SIZE], &values),
            f64s(&[BATCH, 2, QUERIES, PAST + KEYS], &stages[mode as usize]),
        ];
        for (got, expected) in got.iter().zip(&expected) {
            assert_close(got, expected, TOLERANCE);
        }
        let through: &[usize] = if mode == 2 { &[0, 1, 2] } else { &[0, 1, 2, 3] };
        check_gradients(&graph, &inputs, &[0, 1, 2, 3, 4], through);
        check_decomposition(&graph, &inputs, TOLERANCE);
        let open = symbolic(&graph, &inputs, |k, axis| match (k, axis) {
            (_, 0) => "batch".into(),
            (0, 2) => "queries".into(),
            (1 | 2, 2) => "keys".into(),
            (_, 2) => "past".into(),
            (2 | 4, 3) => "of_values".into(),
            (_, axis) => format!("d{axis}"),
        });
        for (got, expected) in run(&open, &inputs).expect("it runs").iter().zip(&expected) {
            assert_close(got, expected, TOLERANCE);
        }
    }
}

/// Keys of which only the first are valid, and windows relative to the last valid key.
#[test]
fn filled_keys_and_windows() {
    const FILLED: [i64; 2] = [4, 2];
    let [q, k, v] = spread_heads(1, 1, 4);
    let filled = Tensor::i64(&[BATCH], &FILLED);
    let plan = ReferenceSizes {
        heads: 1,
        of_keys: 1,
        keys: 4,
        scale: 1.0 / (HEAD_SIZE as f64).sqrt(),
        softcap: 0.0,
    };
    for (with_filled, causal, window) in [
        (true, false, [-1i64, -1]),
        (true, true, [-1, -1]),
        (true, false, [1, 0]),
        (false, false, [1, 1]),
        (false, true, [0, 2]),
        (false, false, [-1, 1]),
        (false, false, [0, -1]),
    ] {
        let mask = |[b, _, i, j]: [usize; 4]| {
            let offset = if with_filled { FILLED[b] - QUERIES as i64 } else { 0 };
            let distance = j as i64 - (i as i64 + offset);
            let right = if causal { 0 } else { window[1] };
            let hidden = (with_filled && j as i64 >= FILLED[b])
                || (right >= 0 && distance > right)
                || (window[0] >= 0 && -distance > window[0]);
            if hidden { f64::NEG_INFINITY } else { 0.0 }
        };
        let stages = expected(&plan, &q.to_f64(), &k.to_f64(), &v.to_f64(), mask);
        let attrs = Attrs::new()
            .with("is_causal", i64::from(causal))
            .with("left_window_size", window[0])
            .with("right_window_size", window[1]);
        let filled = with_filled.then_some(&filled);
        let (graph, inputs) =
            graph_and_inputs(STANDARD, &[Some(&q), Some(&k), Some(&v), None, None, None, filled], 1, attrs);
        let expected = f64s(&[BATCH, 1, QUERIES, VALUE_SIZE], &stages[4]);
        assert_close(&run(&graph, &inputs).expect("it runs")[0], &expected, TOLERANCE);
        check_gradients(&graph, &inputs, &[0, 1, 2], &[0]);
        check_decomposition(&graph, &inputs, TOLERANCE);
        check_downgrade(&graph, &inputs, 24);
        check_downgrade(&graph, &inputs, 23);
    }
}

/// Known shapes need no nodes that compute shapes at run time.
#[test]
fn known_shapes_need_no_shape_nodes() {
    let [q, k, v] = spread_heads(2, 2, KEYS);
    let (mut graph, _) =
        graph_and_inputs(STANDARD, &[Some(&q), Some(&k), Some(&v)], 1, Attrs::new().with("is_causal", 1i64));
    crate::passes::node::decompose_node(&mut graph, 0).expect("it decomposes");
    let ops: Vec<&str> = graph.nodes.iter().map(|node| &*node.op).collect();
    assert_eq!(ops, ["Unsqueeze", "Less", "Mul", "Mul", "Transpose", "MatMul", "Where", "Softmax", "MatMul"]);
}

/// For float16 the softmax runs in float32 and is rounded once, or runs in the requested type.
#[test]
fn precision() {
    let half = |tensor: &Tensor, factor: f64| {
        let elements: Vec<half::f16> =
            tensor.to_f64().iter().map(|&x| half::f16::from_f64(x * factor)).collect();
        Tensor::from_slice(DType::F16, tensor.dims(), &elements)
    };
    let data = spread_heads(1, 1, KEYS);
    let [q, k, v] = data.each_ref().map(|tensor| half(tensor, 1.0));
    let wide = [&q, &k, &v].map(Tensor::to_f64);
    let plan = ReferenceSizes {
        heads: 1,
        of_keys: 1,
        keys: KEYS,
        scale: 1.0 / (HEAD_SIZE as f64).sqrt(),
        softcap: 0.0,
    };
    let expected = &expected(&plan, &wide[0], &wide[1], &wide[2], |_| 0.0)[4];
    for precision in [None, Some(1i64), Some(10), Some(11)] {
        let mut attrs = Attrs::new();
        if let Some(precision) = precision {
            attrs = attrs.with("softmax_precision", precision);
        }
        let (graph, inputs) = graph_and_inputs(STANDARD, &[Some(&q), Some(&k), Some(&v)], 1, attrs);
        let got = run(&graph, &inputs).expect("it runs");
        assert_eq!(got[0].dtype(), DType::F16);
        for (got, expected) in got[0].to_f64().iter().zip(expected) {
            // There are four intermediate roundings to float16.
            assert!((got - expected).abs() < 4e-3 * expected.abs().max(1.0), "{got} for {expected}");
        }
    }
    // The values have another type than queries and keys.
    let values = Tensor::f32(v.dims(), &v.to_f64().iter().map(|&x| x as f32).collect::<Vec<_>>());
    let (graph, inputs) = graph_and_inputs(STANDARD, &[Some(&q), Some(&k), Some(&values)], 3, Attrs::new());
    let got = run(&graph, &inputs).expect("it runs");
    assert_eq!([got[0].dtype(), got[1].dtype(), got[2].dtype()], [DType::F16, DType::F16, DType::F32]);
}

/// An empty batch gives an empty result, without an error.
#[test]
fn empty_batches() {
    let data = [
        generic_tensor(&[0, 2, QUERIES, HEAD_SIZE], 1),
        generic_tensor(&[0, 1, KEYS, HEAD_SIZE], 2),
        generic_tensor(&[0, 1, KEYS, VALUE_SIZE], 3),
    ];
    let (graph, inputs) =
        graph_and_inputs(STANDARD, &data.each_ref().map(Some), 1, Attrs::new().with("is_causal", 1i64));
    let open = symbolic(&graph, &inputs, |_, axis| format!("d{axis}"));
    for graph in [graph, open] {
        assert_eq!(run(&graph, &inputs).expect("it runs")[0].dims(), [0, 2, QUERIES, VALUE_SIZE]);
    }
}

const WIDTH: usize = 4;

/// Returns the number that a mask of `com.microsoft` adds, by the rank of the mask.
fn mask_addend(mask: Option<&Tensor>, keys: usize, [b, _, i, j]: [usize; 4]) -> f64 {
    let Some(mask) = mask else { return 0.0 };
    let at = |k: usize| mask.to_f64()[k];
    let visible = match mask.dims() {
        [count] => (j as f64) < at(b) && (*count == BATCH || j as f64 >= at(BATCH + b)),
        [_, _] => at(b * keys + j) > 0.0,
        _ => at((b * QUERIES + i) * keys + j) > 0.0,
    };
    if visible { 0.0 } else { -3.0 }
}

fn int_masks(keys: usize) -> Vec<Option<Tensor>> {
    let int = |dims: &[usize], numbers: &[i32]| Some(Tensor::from_slice(DType::I32, dims, numbers));
    let visible = |count: usize| (0..count).map(|k| i32::from(k % 3 != 1)).collect::<Vec<_>>();
    vec![
        None,
        int(&[BATCH], &[2, 1]),
        int(&[2 * BATCH], &[2, 3, 0, 1]),
        int(&[BATCH, keys], &visible(BATCH * keys)),
        int(&[BATCH, QUERIES, keys], &visible(BATCH * QUERIES * keys)),
    ]
}

#[test]
fn merged_projections() {
    let x = generic_tensor(&[BATCH, QUERIES, WIDTH], 1);
    let widths = [2 * HEAD_SIZE, 2 * HEAD_SIZE, 2 * VALUE_SIZE];
    let all: usize = widths.iter().sum();
    let (weights, bias) = (generic_tensor(&[WIDTH, all], 2), generic_tensor(&[all], 3));
    let plan = ReferenceSizes { heads: 2, of_keys: 2, keys: QUERIES, scale: 0.6f32.into(), softcap: 0.0 };
    for mask in int_masks(QUERIES) {
        for causal in [false, true] {
            // The projections, split into heads.
            let (data, matrix, shift) = (x.to_f64(), weights.to_f64(), bias.to_f64());
            let project = |from: usize, size: usize| -> Vec<f64> {
                let mut elements = Vec::new();
                for b in 0..BATCH {
                    for h in 0..2 {
                        for i in 0..QUERIES {
                            for column in (0..size).map(|k| from + h * size + k) {
                                let row = &data[(b * QUERIES + i) * WIDTH..][..WIDTH];
                                let sum: f64 =
                                    row.iter().enumerate().map(|(k, x)| x * matrix[k * all + column]).sum();
                                elements.push(sum + shift[column]);
                            }
                        }
                    }
                }
                elements
            };
            let (q, k, v) = (
                project(0, HEAD_SIZE),
                project(2 * HEAD_SIZE, HEAD_SIZE),
                project(4 * HEAD_SIZE, VALUE_SIZE),
            );
            let added = |at: [usize; 4]| {
                if causal && at[3] > at[2] {
                    f64::NEG_INFINITY
                } else {
                    mask_addend(mask.as_ref(), QUERIES, at)
                }
            };
            let stages = expected(&plan, &q, &k, &v, added);
            let expected = flatten_heads(&f64s(&[BATCH, 2, QUERIES, VALUE_SIZE], &stages[4]));
            let attrs = Attrs::new()
                .with("num_heads", 2i64)
                .with("scale", 0.6f32)
                .with("mask_filter_value", -3.0f32)
                .with("unidirectional", i64::from(causal))
                .with("qkv_hidden_sizes", widths.iter().map(|&width| width as i64).collect::<Vec<_>>());
            let ports = [Some(&x), Some(&weights), Some(&bias), mask.as_ref()];
            let (graph, inputs) =
                graph_and_inputs(MERGED, &ports[..if mask.is_some() { 4 } else { 3 }], 1, attrs);
            assert_close(&run(&graph, &inputs).expect("it runs")[0], &expected, TOLERANCE);
            if causal {
                check_gradients(&graph, &inputs, &floats(&inputs), &[0]);
            }
            check_decomposition(&graph, &inputs, TOLERANCE);
        }
    }
}

#[test]
fn packed_past_and_attention_bias() {
    let x = generic_tensor(&[BATCH, QUERIES, WIDTH], 1);
    let weights = generic_tensor(&[WIDTH, 3 * WIDTH], 2);
    let past = generic_tensor(&[2, BATCH, 2, 2, WIDTH / 2], 3);
    let bias = generic_tensor(&[1, 2, QUERIES, QUERIES + 2], 4);
    let attrs = Attrs::new().with("num_heads", 2i64).with("unidirectional", 1i64);
    let ports = [Some(&x), Some(&weights), None, None, Some(&past), Some(&bias)];
    let (graph, inputs) = graph_and_inputs(MERGED, &ports, 2, attrs);
    let got = run(&graph, &inputs).expect("it runs");
    assert_eq!(
        (got[0].dims(), got[1].dims()),
        (&[BATCH, QUERIES, WIDTH][..], &[2, BATCH, 2, QUERIES + 2, 2][..])
    );
    let (present, args) = (got[1].to_f64(), past.to_f64());
    for head in 0..2 * BATCH * 2 {
        assert_eq!(present[head * 10..head * 10 + 4], args[head * 4..head * 4 + 4], "the past comes first");
    }
    check_gradients(&graph, &inputs, &[0, 1, 2, 3], &[0, 1]);
    let open = symbolic(&graph, &inputs, |k, axis| match (k, axis) {
        (0, axis) => format!("d{axis}"),
        (1, 0) => "d2".into(),
        (2, 1) => "d0".into(),
        (k, axis) => format!("d{k}_{axis}"),
    });
    let error = run(&open, &inputs).map(|_| ());
    assert!(error.is_ok(), "sizes are known when it runs: {error:?}");
}

/// All layouts of `MultiHeadAttention` give the same result.
#[test]
fn layouts() {
    let plan = ReferenceSizes {
        heads: 2,
        of_keys: 2,
        keys: QUERIES,
        scale: 1.0 / (HEAD_SIZE as f64).sqrt(),
        softcap: 0.0,
    };
    let (q, k, v) = (
        generic_tensor(&[BATCH, 2, QUERIES, HEAD_SIZE], 1),
        generic_tensor(&[BATCH, 2, QUERIES, HEAD_SIZE], 2),
        generic_tensor(&[BATCH, 2, QUERIES, HEAD_SIZE], 3),
    );
    let attrs = || Attrs::new().with("num_heads", 2i64).with("mask_filter_value", -3.0f32);
    let packed = |parts: &[&Tensor]| {
        let data: Vec<Vec<f64>> = parts.iter().map(|part| flatten_heads(part).to_f64()).collect();
        let rows = BATCH * QUERIES * 2;
        let elements: Vec<f64> = (0..rows)
            .flat_map(|row| data.iter().flat_map(move |part| part[row * HEAD_SIZE..][..HEAD_SIZE].to_vec()))
            .collect();
        f64s(&[BATCH, QUERIES, 2, parts.len(), HEAD_SIZE], &elements)
    };
    let [flat_q, flat_k, flat_v] = [&q, &k, &v].map(flatten_heads);
    let mask = Tensor::from_slice(DType::I32, &[BATCH, QUERIES], &[1, 0, 1, 1, 1, 0]);
    let (pairs, all) = (packed(&[&k, &v]), packed(&[&q, &k, &v]));
    let ports: [Vec<Option<&Tensor>>; 4] = [
        vec![Some(&flat_q), Some(&flat_k), Some(&flat_v)],
        vec![Some(&flat_q), Some(&k), Some(&v)],
        vec![Some(&flat_q), Some(&pairs), None],
        vec![Some(&all), None, None],
    ];
    let mut first: Option<Tensor> = None;
    for ports in &ports {
        let mut args = ports.clone();
        args.extend([None, Some(&mask)]);
        let (graph, inputs) = graph_and_inputs(MULTI, &args, 1, attrs());
        let got = run(&graph, &inputs).expect("it runs").remove(0);
        check_gradients(&graph, &inputs, &floats(&inputs), &[0]);
        check_decomposition(&graph, &inputs, TOLERANCE);
        match &first {
            Some(first) => assert_close(&got, first, TOLERANCE),
            None => {
                // Values have the size of keys here. They are padded to the size that the reference uses.
                let mut elements = Vec::new();
                for row in v.to_f64().chunks(HEAD_SIZE) {
                    elements.extend_from_slice(row);
                    elements.resize(elements.len() + VALUE_SIZE - HEAD_SIZE, 0.0);
                }
                let added = |at: [usize; 4]| mask_addend(Some(&mask), QUERIES, at);
                let stages = expected(&plan, &q.to_f64(), &k.to_f64(), &elements, added);
                let narrow: Vec<f64> =
                    stages[4].chunks(VALUE_SIZE).flat_map(|row| row[..HEAD_SIZE].to_vec()).collect();
                assert_close(
                    &got,
                    &flatten_heads(&f64s(&[BATCH, 2, QUERIES, HEAD_SIZE], &narrow)),
                    TOLERANCE,
                );
                first = Some(got);
            }
        }
    }
    // A bias of queries, keys and values equals a bias that is added to the inputs before.
    let bias = generic_tensor(&[6 * HEAD_SIZE], 9);
    for ports in [&ports[0], &ports[2], &ports[3]] {
        let mut arguments = ports.clone();
        arguments.push(Some(&bias));
        let (graph, inputs) = graph_and_inputs(MULTI, &arguments, 1, attrs());
        let got = run(&graph, &inputs).expect("it runs").remove(0);
        check_gradients(&graph, &inputs, &floats(&inputs), &[0]);
        let numbers = bias.to_f64();
        let shifted = |data: &Tensor, part: usize| {
            let width = 2 * HEAD_SIZE;
            let elements: Vec<f64> = data
                .to_f64()
                .iter()
                .enumerate()
                .map(|(k, x)| x + numbers[part * width + k % width])
                .collect();
            f64s(data.dims(), &elements)
        };
        let before = [shifted(&flat_q, 0), shifted(&flat_k, 1), shifted(&flat_v, 2)];
        let (graph, inputs) = graph_and_inputs(MULTI, &before.each_ref().map(Some), 1, attrs());
        assert_close(&got, &run(&graph, &inputs).expect("it runs")[0], TOLERANCE);
    }
}

#[test]
fn symbolic_sizes_of_layouts() {
    let (q, k, v) = (
        generic_tensor(&[BATCH, QUERIES, 4], 1),
        generic_tensor(&[BATCH, KEYS, 4], 2),
        generic_tensor(&[BATCH, KEYS, 6], 3),
    );
    let (bias, past_key, past_value) = (
        generic_tensor(&[14], 4),
        generic_tensor(&[BATCH, 2, 2, 2], 5),
        generic_tensor(&[BATCH, 2, 2, 3], 6),
    );
    let mask =
        Tensor::from_slice(DType::I32, &[BATCH, QUERIES, KEYS + 2], &[1; BATCH * QUERIES * (KEYS + 2)]);
    let ports =
        [Some(&q), Some(&k), Some(&v), Some(&bias), Some(&mask), None, Some(&past_key), Some(&past_value)];
    let attrs = Attrs::new().with("num_heads", 2i64).with("unidirectional", 1i64);
    let (graph, inputs) = graph_and_inputs(MULTI, &ports, 3, attrs);
    let expected = run(&graph, &inputs).expect("it runs");
    let open = symbolic(&graph, &inputs, |k, axis| match (k, axis) {
        (0..=2 | 4.., 0) => "batch".into(),
        (0 | 4, 1) => "queries".into(),
        (1 | 2, 1) => "keys".into(),
        (5 | 6, 2) => "past".into(),
        _ => format!("d{k}_{axis}"),
    });
    let mut plain = open.clone();
    crate::passes::node::decompose_node(&mut plain, 0).expect("it decomposes");
    for (got, expected) in run(&plain, &inputs).expect("it runs").iter().zip(&expected) {
        assert_close(got, expected, TOLERANCE);
    }
    check_gradients(&graph, &inputs, &[0, 1, 2, 3, 5, 6], &[0, 1, 2]);
}

/// A symbolic mask is only accepted if its shape shows that it has ends, with or without starts.
#[test]
fn rejects_ambiguous_mask_shapes() {
    let x = generic_tensor(&[BATCH, QUERIES, WIDTH], 1);
    let weights = generic_tensor(&[WIDTH, 3 * WIDTH], 2);
    let mask = Tensor::from_slice(DType::I32, &[BATCH], &[1, 2]);
    for (name, is_valid) in [("batch", true), ("other", false)] {
        let (mut open, ids) = graph(&[&x, &weights, &mask]);
        let batch = [Dim::symbol("batch"), QUERIES.into(), WIDTH.into()];
        open.value_mut(ids[0]).ty = ValueType::Tensor(DType::F64, Some(batch.into_iter().collect()));
        open.value_mut(ids[2]).ty =
            ValueType::Tensor(DType::I32, Some([Dim::symbol(name)].into_iter().collect()));
        let ports = [Some(ids[0]), Some(ids[1]), None, Some(ids[2])];
        add(&mut open, MERGED, "y", &ports, 1, Attrs::new().with("num_heads", 2i64));
        match crate::passes::infer::infer(&mut open) {
            Ok(()) => assert!(is_valid),
            Err(error) => {
                assert!(!is_valid && error.to_string().contains("ambiguous shape"), "{error}");
            }
        }
    }
}

#[test]
fn rejects_invalid_inputs() {
    let [q, k, v] = spread_heads(2, 2, KEYS);
    let [three, wide, long] = [
        generic_tensor(&[BATCH, 3, KEYS, HEAD_SIZE], 1),
        generic_tensor(&[BATCH, 2, KEYS, 5], 1),
        generic_tensor(&[BATCH, 2, 7, VALUE_SIZE], 1),
    ];
    let data = [&q, &k, &v].map(flatten_heads);
    let mask = |dims: &[usize]| bools(dims, &vec![1; dims.iter().product()]);
    let (bad_mask, long_mask, scalar) = (mask(&[5, KEYS]), mask(&[KEYS + 1]), mask(&[]));
    let filled = Tensor::i64(&[BATCH], &[1, 2]);
    let of_three = Tensor::i64(&[3], &[1, 2, 1]);
    let past = generic_tensor(&[BATCH, 2, 2, HEAD_SIZE], 1);
    let none = Attrs::new;
    let basic = [Some(&q), Some(&k), Some(&v)];
    let with = |extra: &[Option<&Tensor>]| -> Vec<Option<Tensor>> {
        basic.iter().chain(extra).map(|port| port.cloned()).collect()
    };
    let local =
        |ports: &[&Tensor]| -> Vec<Option<Tensor>> { ports.iter().map(|&port| Some(port.clone())).collect() };
    for (ports, attrs, words) in [
        (local(&[&q, &three, &v]), none(), "numbers of heads of queries, keys and values differ: 3 and 2"),
        (
            local(&[&q, &three, &three]),
            none(),
            "the number of query heads, 2, must be a multiple of the number of key heads, 3",
        ),
        (local(&[&q, &wide, &v]), none(), "the queries have head size 2, but the keys 5"),
        (local(&[&q, &k, &long]), none(), "lengths of queries, keys and values differ: 2 and 7"),
        (local(&[&q, &k, &data[2]]), none(), "input 2 has shape [2, 2, 6], but the queries have 4 axes"),
        (local(&[&data[0], &data[1], &data[2]]), none(), "an input with three axes needs q_num_heads"),
        (
            local(&[&data[0], &data[1], &data[2]]),
            none().with("q_num_heads", 3i64).with("kv_num_heads", 3i64),
            "the last axis of input 0, of shape [2, 3, 4], cannot be divided into 3 heads",
        ),
        (with(&[]), none().with("q_num_heads", 5i64), "with 2 heads, but q_num_heads is 5"),
        (with(&[]), none().with("q_num_heads", -5i64), "q_num_heads must be positive, got -5"),
        (
            with(&[]),
            none().with("softmax_precision", 7i64),
            "softmax_precision must be 1 (FLOAT), 10 (FLOAT16), 11 (DOUBLE) or 16 (BFLOAT16), got 7",
        ),
        (
            with(&[]),
            none().with("qk_matmul_output_mode", 4i64),
            "qk_matmul_output_mode must be from 0 to 3, got 4",
        ),
        (
            with(&[]),
            none().with("left_window_size", -2i64),
            "left_window_size must be at least 0, or -1 (no limit), got -2",
        ),
        (
            with(&[Some(&bad_mask)]),
            none(),
            "input 3 has shape [5, 2], which does not broadcast to [2, 2, 3, 2]",
        ),
        (with(&[Some(&long_mask)]), none(), "input 3 has shape [3], which does not broadcast"),
        (with(&[Some(&scalar)]), none(), "input 3 has shape [], which does not broadcast"),
        (
            with(&[None, Some(&past)]),
            none(),
            "past_key and past_value must both be present or both be absent",
        ),
        (
            with(&[None, Some(&past), Some(&past)]),
            none(),
            "input 5 has shape [2, 2, 2, 2], but [2, 2, length, 3] is needed",
        ),
        (with(&[None, Some(&past), Some(&v), Some(&filled)]), none(), "it cannot be combined with past_key"),
        (
            with(&[None, None, None, Some(&of_three)]),
            none(),
            "nonpad_kv_seqlen has shape [3], but [2] is needed",
        ),
    ] {
        let ports: Vec<Option<&Tensor>> = ports.iter().map(Option::as_ref).collect();
        let error = one_node_graph(28, STANDARD, &ports, 1, attrs).expect_err("refused").to_string();
        assert!(error.contains(words), "{error}");
        assert!(error.contains("node \"y\" (Attention)"), "{error}");
    }
    // If sizes are only known at run time, a mask that is too long fails then.
    let (known, inputs) =
        graph_and_inputs(STANDARD, &[Some(&q), Some(&k), Some(&v), Some(&mask(&[KEYS]))], 1, none());
    let open = symbolic(&known, &inputs, |k, axis| format!("d{}_{axis}", k / 3));
    let mut plain = open.clone();
    crate::passes::node::decompose_node(&mut plain, 0).expect("it decomposes");
    let long = [inputs[..3].to_vec(), vec![mask(&[KEYS + 1])]].concat();
    assert!(matches!(run(&plain, &long), Err(Failure::Prepare(_) | Failure::Run(_))));
}

#[test]
fn rejects_invalid_microsoft_inputs() {
    let (x, weights) = (generic_tensor(&[BATCH, QUERIES, WIDTH], 1), generic_tensor(&[WIDTH, 3 * WIDTH], 2));
    let int = |dims: &[usize]| Tensor::from_slice(DType::I32, dims, &vec![1i32; dims.iter().product()]);
    let (offsets, square, keys) = (int(&[3 * BATCH + 2]), int(&[BATCH, 1, 8, 8]), int(&[BATCH, 7]));
    let (past, vector) = (generic_tensor(&[2, BATCH, 2, 1, 3], 1), generic_tensor(&[5], 1));
    let two = || Attrs::new().with("num_heads", 2i64);
    let (x, w) = (Some(&x), Some(&weights));
    for (ports, attrs, words) in [
        (vec![x, w], Attrs::new(), "attribute \"num_heads\" is missing"),
        (vec![x, w], Attrs::new().with("num_heads", 0i64), "num_heads must be positive, got 0"),
        (vec![x, w], Attrs::new().with("num_heads", 3i64), "of width 4 cannot be divided into 3 heads"),
        (
            vec![x, w],
            two().with("do_rotary", 1i64),
            "do_rotary (rotation of queries and keys inside the operator) is for text generation",
        ),
        (
            vec![x, w],
            two().with("past_present_share_buffer", 1i64),
            "past_present_share_buffer (one buffer for past and present) is for text generation",
        ),
        (
            vec![x, w],
            two().with("qkv_hidden_sizes", vec![4i64, 4]),
            "queries, keys (same width) and values, got [4, 4]",
        ),
        (vec![x, w], two().with("qkv_hidden_sizes", vec![4i64, 4, 6]), "do not add up to 12"),
        (vec![x, x], two(), "input 1 (weights) must be a matrix"),
        (vec![x, w, Some(&vector)], two(), "input 2 has shape [5], but [12] is needed"),
        (vec![x, w, None, Some(&offsets)], two(), "has shape [8] (lengths with offsets) for batch size 2"),
        (vec![x, w, None, Some(&square)], two(), "[batch, keys] or [batch, queries, keys], got [2, 1, 8, 8]"),
        (vec![x, w, None, Some(&keys)], two(), "input 3 (mask) has shape [2, 7], but [2, 3] is needed"),
        (
            vec![x, w, None, None, Some(&past)],
            two(),
            "input 4 has shape [2, 2, 2, 1, 3], but [2, 2, 2, length, 2]",
        ),
    ] {
        let error = one_node_graph(17, MERGED, &ports, 1, attrs).expect_err("refused").to_string();
        assert!(error.contains(words), "{error}");
        assert!(error.contains("node \"y\" (com.microsoft:Attention)"), "{error}");
    }
    let narrow = generic_tensor(&[BATCH, KEYS, 6], 1);
    for (ports, words) in [
        (vec![x], "queries of shape [2, 3, 4], no keys and no values are not supported"),
        (vec![x, x], "keys of shape [2, 3, 4] and no values"),
        (vec![x, Some(&narrow), x], "the queries have head size 2, but the keys 3"),
        (vec![x, x, Some(&narrow)], "keys of shape [2, 3, 4] do not match values of shape [2, 2, 6]"),
        (vec![x, x, x, Some(&vector)], "input 3 has shape [5], but [12] is needed"),
        (vec![x, x, x, None, Some(&offsets)], "has shape [8] (lengths with offsets) for batch size 2"),
        (vec![x, x, x, None, None, None, Some(&past)], "past_key and past_value must both be present"),
    ] {
        let error = one_node_graph(17, MULTI, &ports, 1, two()).expect_err("refused").to_string();
        assert!(error.contains(words), "{error}");
        assert!(error.contains("node \"y\" (com.microsoft:MultiHeadAttention)"), "{error}");
    }
    let message = match run_node(MULTI, &[x, x, x, None, None, None, None, None, Some(&keys)], 1, two()) {
        Err(Failure::Prepare(error)) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(message.contains("input 8 is for a cache shared by past and present"), "{message}");
}
