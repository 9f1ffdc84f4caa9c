use ortrain_graph::{Attrs, DType, Graph, Tensor, ValueId, ValueType};
use ortrain_program::{RunError, Scalars, Schedule, Segment};

use crate::passes::infer::infer;
use crate::support::subgraphs::BODY;
use crate::testing::{
    Failure, add, assert_close, check_decomposition, check_downgrade, check_gradients, f64s, generic_tensor,
    gradient_graph, graph, round_trip_through_file, run, run_specialised,
};
use crate::{Role, Specialiser};

fn add_op(graph: &mut Graph, op: &str, name: &str, inputs: &[ValueId]) -> ValueId {
    add_op_with(graph, op, name, inputs, Attrs::new())
}

fn add_op_with(graph: &mut Graph, op: &str, name: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
    let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
    let output = add(graph, ("", op), name, &inputs, 1, attrs)[0];
    graph.outputs.pop();
    output
}

/// Returns a body with named inputs, the captured ones last; `build` returns the outputs.
fn body(inputs: &[&str], build: impl FnOnce(&mut Graph, &[ValueId]) -> Vec<ValueId>) -> Graph {
    let mut graph = Graph::new("body");
    let ids: Vec<ValueId> = inputs.iter().map(|name| graph.add_value(name, ValueType::Unknown)).collect();
    graph.inputs.clone_from(&ids);
    graph.outputs = build(&mut graph, &ids);
    graph
}

/// Adds a Scan, Loop or If. Its results are named after `name` and become outputs of the graph.
fn add_control_flow(
    graph: &mut Graph,
    (op, name): (&str, &str),
    inputs: &[Option<ValueId>],
    captured: &[ValueId],
    outputs: usize,
    attrs: Attrs,
) -> Vec<ValueId> {
    let ports: Vec<Option<ValueId>> =
        inputs.iter().copied().chain(captured.iter().copied().map(Some)).collect();
    let output = add(graph, ("", op), name, &ports, outputs, attrs);
    graph.nodes.last_mut().expect("just added").captures = captured.len();
    output
}

fn scan_attrs(body: Graph, scanned: i64) -> Attrs {
    Attrs::new().with("num_scan_inputs", scanned).with(BODY, body)
}

fn flag(value: bool) -> Tensor {
    Tensor::filled(DType::Bool, &[], f64::from(u8::from(value)))
}

fn run_with_unroll_limit(
    graph: &Graph,
    inputs: &[Tensor],
    nodes: usize,
) -> (std::sync::Arc<Schedule>, Vec<Tensor>) {
    let specialiser = Specialiser::new(graph.clone(), vec![Role::User; inputs.len()]).unrolled_nodes(nodes);
    let scalars = Scalars { seed: 5, train_step: 2 };
    run_specialised(&specialiser, &[], inputs, scalars).expect("it runs")
}

fn has_repeat_segment(schedule: &Schedule) -> bool {
    schedule.segments.iter().any(|node| matches!(node.segment, Segment::Repeat(..)))
}

/// Runs a graph with and without unrolling. Checks that the results are bit-identical, and returns them.
#[track_caller]
fn run_unrolled_and_looped(graph: &Graph, inputs: &[Tensor]) -> Vec<Tensor> {
    let (written_out, results) = run_with_unroll_limit(graph, inputs, 100_000);
    assert!(!has_repeat_segment(&written_out), "{written_out}");
    let (as_segment, other_inputs) = run_with_unroll_limit(graph, inputs, 0);
    assert!(has_repeat_segment(&as_segment), "{as_segment}");
    assert_eq!(results, other_inputs);
    results
}

/// Checks gradients, and that they are bit-identical with and without unrolling.
#[track_caller]
fn check_gradients_unrolled_and_looped(
    graph: &Graph,
    inputs: &[Tensor],
    targets: &[usize],
    through: &[usize],
) {
    check_gradients(graph, inputs, targets, through);
    let outputs = run(graph, inputs).expect("it runs");
    let weights: Vec<Option<Tensor>> = (outputs.iter().enumerate())
        .map(|(k, output)| through.contains(&k).then(|| generic_tensor(output.dims(), 11 + k as u32)))
        .collect();
    let gradient = gradient_graph(graph, &weights, targets);
    assert_eq!(
        run_with_unroll_limit(&gradient, inputs, 100_000).1,
        run_with_unroll_limit(&gradient, inputs, 0).1
    );
}

/// Returns a graph of cumulative sums along axis 0: the last sum, and all sums.
fn cumulative_sum_scan(x: &Tensor, attrs: impl FnOnce(Attrs) -> Attrs) -> Graph {
    let (mut graph, ids) = graph(&[&f64s(&[2], &[0.0; 2]), x]);
    let inner = body(&["sum", "x"], |g, c| {
        let next = add_op(g, "Add", "next", c);
        vec![next, add_op(g, "Identity", "out", &[next])]
    });
    let ports: Vec<Option<ValueId>> = ids.iter().copied().map(Some).collect();
    add_control_flow(&mut graph, ("Scan", "y"), &ports, &[], 2, attrs(scan_attrs(inner, 1)));
    infer(&mut graph).expect("valid");
    graph
}

#[test]
fn cumulative_sums() {
    let x = f64s(&[3, 2], &[1.0, 10.0, 2.0, 20.0, 4.0, 40.0]);
    let start = f64s(&[2], &[0.5, 0.0]);
    let graph = cumulative_sum_scan(&x, |attrs| attrs);
    assert_eq!(graph.value(graph.outputs[1]).ty, ValueType::tensor(DType::F64, &[3, 2]));
    let got = run_unrolled_and_looped(&graph, &[start.clone(), x.clone()]);
    assert_eq!(got[0], f64s(&[2], &[7.5, 70.0]));
    assert_eq!(got[1], f64s(&[3, 2], &[1.5, 10.0, 3.5, 30.0, 7.5, 70.0]));
    check_gradients_unrolled_and_looped(&graph, &[start, x], &[0, 1], &[0, 1]);
}

#[test]
fn axes_and_directions() {
    // x is scanned along its last axis, and results are collected along axis 1.
    let x = f64s(&[2, 3], &[1.0, 2.0, 4.0, 10.0, 20.0, 40.0]);
    let start = f64s(&[2], &[0.0; 2]);
    for (axis_in, axis_out) in [(1i64, 1i64), (-1, -1)] {
        for (back_in, back_out) in [(0i64, 0i64), (1, 0), (0, 1), (1, 1)] {
            let graph = cumulative_sum_scan(&x, |attrs| {
                attrs
                    .with("scan_input_axes", vec![axis_in])
                    .with("scan_output_axes", vec![axis_out])
                    .with("scan_input_directions", vec![back_in])
                    .with("scan_output_directions", vec![back_out])
            });
            let got = run_unrolled_and_looped(&graph, &[start.clone(), x.clone()]);
            let mut rows = if back_in == 1 { [4.0, 6.0, 7.0] } else { [1.0, 3.0, 7.0] };
            if back_out == 1 {
                rows.reverse();
            }
            let all: Vec<f64> = rows.iter().copied().chain(rows.iter().map(|x| 10.0 * x)).collect();
            assert_eq!(got[1], f64s(&[2, 3], &all));
            check_gradients_unrolled_and_looped(&graph, &[start.clone(), x.clone()], &[0, 1], &[1]);
            let written = check_downgrade(&graph, &[start.clone(), x.clone()], 9);
            assert_eq!(written.nodes[0].attrs.ints("scan_input_axes").expect("ints"), Some(&[1i64][..]));
        }
    }
}

/// Returns a recurrent cell `h = tanh(x w + h r + b)` with the inputs x, h, w, r, b.
fn recurrent_cell(x: &Tensor, h: &Tensor, w: &Tensor, r: &Tensor, b: &Tensor) -> Graph {
    let (mut graph, ids) = graph(&[x, h, w, r, b]);
    let inner = body(&["h", "x", "w", "r", "b"], |g, c| {
        let xw = add_op(g, "MatMul", "xw", &[c[1], c[2]]);
        let hr = add_op(g, "MatMul", "hr", &[c[0], c[3]]);
        let sum = add_op(g, "Add", "sum", &[xw, hr]);
        let biased = add_op(g, "Add", "biased", &[sum, c[4]]);
        let next = add_op(g, "Tanh", "next", &[biased]);
        vec![next, add_op(g, "Identity", "out", &[next])]
    });
    add_control_flow(
        &mut graph,
        ("Scan", "y"),
        &[Some(ids[1]), Some(ids[0])],
        &ids[2..],
        2,
        scan_attrs(inner, 1),
    );
    infer(&mut graph).expect("valid");
    graph
}

fn cell_inputs(steps: usize) -> Vec<Tensor> {
    vec![
        generic_tensor(&[steps, 2, 3], 1),
        generic_tensor(&[2, 5], 2),
        generic_tensor(&[3, 5], 3),
        generic_tensor(&[5, 5], 4),
        generic_tensor(&[5], 5),
    ]
}

#[test]
fn recurrent_cell_values_and_gradients() {
    let inputs = cell_inputs(4);
    let [x, h, w, r, b] = &inputs[..] else { panic!("five inputs") };
    let graph = recurrent_cell(x, h, w, r, b);
    let got = run_unrolled_and_looped(&graph, &inputs);
    let [x, h, w, r, b] = [x, h, w, r, b].map(Tensor::to_f64);
    let mut state = h;
    let mut all = Vec::new();
    for step in 0..4 {
        let mut next = vec![0.0; 10];
        for row in 0..2 {
            for column in 0..5 {
                let mut sum = b[column];
                for k in 0..3 {
                    sum += x[(step * 2 + row) * 3 + k] * w[k * 5 + column];
                }
                for k in 0..5 {
                    sum += state[row * 5 + k] * r[k * 5 + column];
                }
                next[row * 5 + column] = sum.tanh();
            }
        }
        all.extend(&next);
        state = next;
    }
    assert_close(&got[0], &f64s(&[2, 5], &state), 1e-12);
    assert_close(&got[1], &f64s(&[4, 2, 5], &all), 1e-12);
    check_gradients_unrolled_and_looped(&graph, &inputs, &[0, 1, 2, 3, 4], &[0, 1]);
    check_gradients_unrolled_and_looped(&graph, &inputs, &[3], &[0]);
    check_gradients_unrolled_and_looped(&graph, &inputs, &[0], &[1]);
}

#[test]
fn unrolled_gradient_has_no_saved_copies() {
    let inputs = cell_inputs(4);
    let [x, h, w, r, b] = &inputs[..] else { panic!("five inputs") };
    let forward = recurrent_cell(x, h, w, r, b);
    let weights = [Some(generic_tensor(&[2, 5], 7)), None];
    let gradient = gradient_graph(&forward, &weights, &[3]);
    let (schedule, _) = run_with_unroll_limit(&gradient, &inputs, 100_000);
    let program = schedule.single_program().expect("one program");
    // No node reads the values that the forward node collected, so no buffer holds them.
    assert!(program.buffers.iter().all(|buffer| buffer.len < 4 * 2 * 5), "{program}");
}

#[test]
fn gradients_of_gradients() {
    // The sum of squares of a gradient is differentiated again.
    let inputs = cell_inputs(3);
    let [x, h, w, r, b] = &inputs[..] else { panic!("five inputs") };
    let forward = recurrent_cell(x, h, w, r, b);
    let weights = [Some(generic_tensor(&[2, 5], 7)), Some(generic_tensor(&[3, 2, 5], 8))];
    let mut penalty = gradient_graph(&forward, &weights, &[0, 3]);
    infer(&mut penalty).expect("valid");
    check_gradients_unrolled_and_looped(&penalty, &inputs, &[0, 1, 2, 3], &[0, 1]);
}

#[test]
fn gradients_decompose_into_plain_onnx() {
    let inputs = cell_inputs(3);
    let [x, h, w, r, b] = &inputs[..] else { panic!("five inputs") };
    let forward = recurrent_cell(x, h, w, r, b);
    let weights = [Some(generic_tensor(&[2, 5], 7)), Some(generic_tensor(&[3, 2, 5], 8))];
    let gradient = gradient_graph(&forward, &weights, &[0, 1, 2, 3, 4]);
    check_decomposition(&gradient, &inputs, 1e-12);
}

#[test]
fn multiple_states_inputs_and_outputs() {
    let (a, b) = (generic_tensor(&[2], 1), generic_tensor(&[3], 2));
    let (x, y) = (generic_tensor(&[4, 2], 3), generic_tensor(&[3, 4], 4));
    let (mut graph, ids) = graph(&[&a, &b, &x, &y]);
    let inner = body(&["a", "b", "x", "y"], |g, c| {
        let product = add_op(g, "Mul", "product", &[c[0], c[2]]);
        let sum = add_op_with(g, "ReduceSum", "sum", &[product], Attrs::new().with("keepdims", 1i64));
        let next = add_op(g, "Sub", "next_b", &[c[3], sum]);
        let sine = add_op(g, "Sin", "next_a", &[c[2]]);
        let mixed = add_op(g, "Mul", "mixed", &[c[1], next]);
        vec![sine, next, mixed, product]
    });
    let attrs = scan_attrs(inner, 2)
        .with("scan_input_axes", vec![0i64, 1])
        .with("scan_input_directions", vec![0i64, 1]);
    let ports: Vec<Option<ValueId>> = ids.iter().copied().map(Some).collect();
    add_control_flow(&mut graph, ("Scan", "z"), &ports, &[], 4, attrs);
    infer(&mut graph).expect("valid");
    let inputs = [a, b, x, y];
    let got = run_unrolled_and_looped(&graph, &inputs);
    assert_eq!((got[2].dims(), got[3].dims()), (&[4, 3][..], &[4, 2][..]));
    check_gradients_unrolled_and_looped(&graph, &inputs, &[0, 1, 2, 3], &[0, 1, 2, 3]);
    check_gradients_unrolled_and_looped(&graph, &inputs, &[0, 2], &[2]);
    check_gradients_unrolled_and_looped(&graph, &inputs, &[2, 3], &[1]);
}

/// Returns a `Loop` of `v = v * w + i` that collects `v`; the inputs are the count, the condition, v and w.
fn power_loop(v: &Tensor, w: &Tensor) -> Graph {
    let (mut graph, ids) = graph(&[&Tensor::i64(&[], &[3]), &flag(true), v, w]);
    let inner = body(&["i", "go", "v", "w"], |g, c| {
        let product = add_op(g, "Mul", "product", &c[2..]);
        let to = Attrs::new().with("to", i64::from(DType::F64.to_onnx()));
        let number = add_op_with(g, "Cast", "number", &c[..1], to);
        let next = add_op(g, "Add", "next", &[product, number]);
        vec![add_op(g, "Identity", "on", &c[1..2]), next, add_op(g, "Identity", "out", &[next])]
    });
    let ports: Vec<Option<ValueId>> = ids[..3].iter().copied().map(Some).collect();
    let attrs = Attrs::new().with(BODY, inner);
    add_control_flow(&mut graph, ("Loop", "y"), &ports, &ids[3..], 2, attrs);
    infer(&mut graph).expect("valid");
    graph
}

#[test]
fn loop_values_and_gradients() {
    let (v, w) = (f64s(&[2], &[1.0, 2.0]), f64s(&[2], &[3.0, 0.5]));
    let graph = power_loop(&v, &w);
    for count in [0i64, 1, 3, -1] {
        for begins in [true, false] {
            let inputs = [Tensor::i64(&[], &[count]), flag(begins), v.clone(), w.clone()];
            let mut now = v.to_f64();
            let mut all = Vec::new();
            let times = if begins { count.max(0) } else { 0 };
            for i in 0..times {
                now = now.iter().zip(w.to_f64()).map(|(v, w)| v * w + i as f64).collect();
                all.extend(&now);
            }
            let got = run(&graph, &inputs).expect("it runs");
            assert_eq!(got, [f64s(&[2], &now), f64s(&[times as usize, 2], &all)]);
            check_gradients(&graph, &inputs, &[2, 3], &[0, 1]);
            // The same with a constant count and condition.
            let mut known = graph.clone();
            for (k, tensor) in inputs[..2].iter().enumerate() {
                let id = known.inputs.remove(0);
                assert_eq!(id, graph.inputs[k]);
                known.value_mut(id).constant = Some(tensor.clone());
            }
            infer(&mut known).expect("valid");
            assert_eq!(run(&known, &inputs[2..]).expect("it runs"), got);
            if times > 0 {
                assert_eq!(run_unrolled_and_looped(&known, &inputs[2..]), got);
            }
            check_gradients_unrolled_and_looped(&known, &inputs[2..], &[0, 1], &[0, 1]);
        }
    }
}

#[test]
fn loop_with_computed_condition() {
    // While v < limit: v = v + v. The maximum number of iterations is missing.
    let (v, limit) = (f64s(&[], &[3.0]), f64s(&[], &[20.0]));
    let (mut graph, ids) = graph(&[&v, &limit]);
    let begins = add_op(&mut graph, "Less", "begins", &ids);
    let inner = body(&["i", "go", "v", "limit"], |g, c| {
        let next = add_op(g, "Add", "next", &[c[2], c[2]]);
        vec![add_op(g, "Less", "on", &[next, c[3]]), next]
    });
    let ports = [None, Some(begins), Some(ids[0])];
    add_control_flow(&mut graph, ("Loop", "y"), &ports, &ids[1..], 1, Attrs::new().with(BODY, inner));
    infer(&mut graph).expect("valid");
    for (from, to) in [(3.0, 24.0), (19.0, 38.0), (21.0, 21.0)] {
        let inputs = [f64s(&[], &[from]), limit.clone()];
        assert_eq!(run(&graph, &inputs).expect("it runs"), [f64s(&[], &[to])]);
        check_gradients(&graph, &inputs, &[0], &[0]);
    }
}

#[test]
fn endless_loop_hits_iteration_limit() {
    let v = f64s(&[], &[3.0]);
    let (mut graph, ids) = graph(&[&v]);
    let inner = body(&["i", "go", "v"], |g, c| vec![add_op(g, "Identity", "on", &c[1..2]), c[2]]);
    let ports = [None, None, Some(ids[0])];
    add_control_flow(&mut graph, ("Loop", "forever"), &ports, &[], 1, Attrs::new().with(BODY, inner));
    infer(&mut graph).expect("valid");
    let Failure::Run(error) = run(&graph, &[v]).expect_err("it is endless") else { panic!("it runs") };
    assert!(matches!(&error, RunError::Iterations { limit: 1_000_000, .. }), "{error}");
    for part in ["\"forever\" (Loop)", "1000000 iterations", "iteration_limit", "raise the limit"] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn carried_shape_changes() {
    // Every iteration appends its index.
    let v = f64s(&[1], &[7.0]);
    let (mut graph, ids) = graph(&[&Tensor::i64(&[], &[3]), &v]);
    let inner = body(&["i", "go", "v"], |g, c| {
        let to = Attrs::new().with("to", i64::from(DType::F64.to_onnx()));
        let number = add_op_with(g, "Cast", "number", &c[..1], to);
        let one_axis = g.add_constant("one_axis", Tensor::i64(&[1], &[1]));
        let vector = add_op(g, "Reshape", "vector", &[number, one_axis]);
        let next = add_op_with(g, "Concat", "next", &[c[2], vector], Attrs::new().with("axis", 0i64));
        vec![add_op(g, "Identity", "on", &c[1..2]), next]
    });
    let ports = [Some(ids[0]), None, Some(ids[1])];
    let y = add_control_flow(&mut graph, ("Loop", "y"), &ports, &[], 1, Attrs::new().with(BODY, inner))[0];
    let square = add_op(&mut graph, "Mul", "square", &[y, y]);
    graph.outputs = vec![square];
    infer(&mut graph).expect("valid");
    for (count, expected) in [(0, &[49.0][..]), (3, &[49.0, 0.0, 1.0, 4.0])] {
        let inputs = [Tensor::i64(&[], &[count]), v.clone()];
        assert_eq!(run(&graph, &inputs).expect("it runs"), [f64s(&[expected.len()], expected)]);
    }
    let mut known = graph.clone();
    known.inputs.remove(0);
    known.value_mut(ids[0]).constant = Some(Tensor::i64(&[], &[3]));
    infer(&mut known).expect("valid");
    assert_eq!(run_unrolled_and_looped(&known, &[v])[0].to_f64(), [49.0, 0.0, 1.0, 4.0]);
}

#[test]
fn loop_in_scan() {
    // For each row x: h = h * x + w three times, then h is collected.
    let (h, x, w) = (generic_tensor(&[2], 1), generic_tensor(&[3, 2], 2), generic_tensor(&[2], 3));
    let (mut graph, ids) = graph(&[&h, &x, &w]);
    let inner = body(&["h", "x", "w"], |g, c| {
        let times = g.add_constant("times", Tensor::i64(&[], &[3]));
        let looped = body(&["i", "go", "v", "cx", "cw"], |g, c| {
            let product = add_op(g, "Mul", "product", &c[2..4]);
            let next = add_op(g, "Add", "next_v", &[product, c[4]]);
            vec![add_op(g, "Identity", "on", &c[1..2]), next]
        });
        let ports = [Some(times), None, Some(c[0])];
        let attrs = Attrs::new().with(BODY, looped);
        let next = add_control_flow(g, ("Loop", "looped"), &ports, &c[1..], 1, attrs)[0];
        g.outputs.clear();
        let out = add_op(g, "Sin", "out", &[next]);
        vec![next, out]
    });
    let ports = [Some(ids[0]), Some(ids[1])];
    add_control_flow(&mut graph, ("Scan", "y"), &ports, &ids[2..], 2, scan_attrs(inner, 1));
    infer(&mut graph).expect("valid");
    let inputs = [h.clone(), x.clone(), w.clone()];
    let got = run_unrolled_and_looped(&graph, &inputs);
    let (mut now, mut all) = (h.to_f64(), Vec::new());
    for row in x.to_f64().chunks(2) {
        for _ in 0..3 {
            now = now.iter().zip(row).zip(w.to_f64()).map(|((h, x), w)| h * x + w).collect();
        }
        all.extend(now.iter().map(|h| h.sin()));
    }
    assert_close(&got[0], &f64s(&[2], &now), 1e-12);
    assert_close(&got[1], &f64s(&[3, 2], &all), 1e-12);
    check_gradients_unrolled_and_looped(&graph, &inputs, &[0, 1, 2], &[0, 1]);
}

#[test]
fn if_in_loop() {
    // In even iterations v = v * w, in odd ones v = sin(v).
    let (v, w) = (generic_tensor(&[2], 1), generic_tensor(&[2], 3));
    let (mut graph, ids) = graph(&[&Tensor::i64(&[], &[3]), &v, &w]);
    let inner = body(&["i", "go", "v", "w"], |g, c| {
        let two = g.add_constant("two", Tensor::i64(&[], &[2]));
        let half = add_op(g, "Div", "half", &[c[0], two]);
        let twice = add_op(g, "Mul", "twice", &[half, two]);
        let even = add_op(g, "Equal", "even", &[twice, c[0]]);
        let yes = body(&["yes_v", "yes_w"], |g, c| vec![add_op(g, "Mul", "scaled", c)]);
        let no = body(&["no_v", "no_w"], |g, c| vec![add_op(g, "Sin", "sine", &c[..1])]);
        let attrs = Attrs::new().with("then_branch", yes).with("else_branch", no);
        let next = add_control_flow(g, ("If", "chosen"), &[Some(even)], &c[2..], 1, attrs)[0];
        g.outputs.clear();
        vec![add_op(g, "Identity", "on", &c[1..2]), next]
    });
    let ports = [Some(ids[0]), None, Some(ids[1])];
    add_control_flow(&mut graph, ("Loop", "y"), &ports, &ids[2..], 1, Attrs::new().with(BODY, inner));
    infer(&mut graph).expect("valid");
    for count in 0..4 {
        let inputs = [Tensor::i64(&[], &[count]), v.clone(), w.clone()];
        let mut now = v.to_f64();
        for i in 0..count {
            let step = |(v, w): (&f64, f64)| if i % 2 == 0 { v * w } else { v.sin() };
            now = now.iter().zip(w.to_f64()).map(step).collect();
        }
        assert_close(&run(&graph, &inputs).expect("it runs")[0], &f64s(&[2], &now), 1e-12);
        check_gradients(&graph, &inputs, &[1], &[0]);
        if count > 0 {
            check_gradients(&graph, &inputs, &[1, 2], &[0]);
        }
        let mut known = graph.clone();
        known.inputs.remove(0);
        known.value_mut(ids[0]).constant = Some(inputs[0].clone());
        infer(&mut known).expect("valid");
        if count > 0 {
            run_unrolled_and_looped(&known, &inputs[1..]);
        }
        check_gradients_unrolled_and_looped(&known, &inputs[1..], &[0, 1], &[0]);
    }
}

#[test]
fn if_in_body_with_condition_from_shapes() {
    // Exported models contain such tests of the rank. The branch that never runs reads a value of the body, by Identity
    // or by an operator that its shape does not allow.
    let (v, w) = (generic_tensor(&[2], 1), generic_tensor(&[2], 3));
    for (k, op) in ["Identity", "Squeeze", "MatMul"].into_iter().enumerate() {
        for scanned in [false, true] {
            let inside = |g: &mut Graph, v: ValueId, w: ValueId| {
                let product = add_op(g, "Mul", "product", &[v, w]);
                let shape = add_op(g, "Shape", "shape", &[product]);
                let rank = add_op(g, "Size", "rank", &[shape]);
                let one_axis = g.add_constant("one_axis", Tensor::i64(&[], &[1]));
                let vector = add_op(g, "Equal", "vector", &[rank, one_axis]);
                let yes = body(&["yes_p", "yes_w"], |g, c| vec![add_op(g, "Sin", "sine", &c[..1])]);
                let no = body(&["no_p", "no_w"], |g, c| {
                    let passed = match k {
                        0 => add_op(g, "Identity", "passed", &c[..1]),
                        1 => {
                            let axes = g.add_constant("axes", Tensor::i64(&[1], &[0]));
                            add_op(g, "Squeeze", "passed", &[c[0], axes])
                        }
                        _ => {
                            let longer = add_op_with(
                                g,
                                "Concat",
                                "longer",
                                &[c[0], c[0]],
                                Attrs::new().with("axis", 0i64),
                            );
                            add_op(g, "MatMul", "passed", &[longer, c[1]])
                        }
                    };
                    vec![add_op(g, "Mul", "scaled", &[passed, c[1]])]
                });
                let attrs = Attrs::new().with("then_branch", yes).with("else_branch", no);
                let next = add_control_flow(g, ("If", "chosen"), &[Some(vector)], &[product, w], 1, attrs)[0];
                g.outputs.clear();
                next
            };
            let x = generic_tensor(&[3, 2], 5);
            let (mut graph, ids) = graph(&[&v, &w, &x]);
            if scanned {
                let inner = body(&["v", "x", "w"], |g, c| {
                    let sum = add_op(g, "Add", "sum", &c[..2]);
                    vec![inside(g, sum, c[2])]
                });
                add_control_flow(
                    &mut graph,
                    ("Scan", "y"),
                    &[Some(ids[0]), Some(ids[2])],
                    &ids[1..2],
                    1,
                    scan_attrs(inner, 1),
                );
            } else {
                let count = graph.add_constant("count", Tensor::i64(&[], &[3]));
                let inner = body(&["i", "go", "v", "w"], |g, c| {
                    vec![add_op(g, "Identity", "on", &c[1..2]), inside(g, c[2], c[3])]
                });
                let attrs = Attrs::new().with(BODY, inner);
                add_control_flow(
                    &mut graph,
                    ("Loop", "y"),
                    &[Some(count), None, Some(ids[0])],
                    &ids[1..2],
                    1,
                    attrs,
                );
            }
            infer(&mut graph).expect("valid");
            let inputs = [v.clone(), w.clone(), x.clone()];
            let mut now = v.to_f64();
            for step in 0..3 {
                for (axis, now) in now.iter_mut().enumerate() {
                    let args = if scanned { x.to_f64()[step * 2 + axis] } else { 0.0 };
                    *now = ((*now + args) * w.to_f64()[axis]).sin();
                }
            }
            assert_close(&run_unrolled_and_looped(&graph, &inputs)[0], &f64s(&[2], &now), 1e-12);
            let targets = if scanned { &[0, 1, 2][..] } else { &[0, 1] };
            check_gradients_unrolled_and_looped(&graph, &inputs, targets, &[0]);
            let read = round_trip_through_file(&graph);
            assert_eq!(run(&read, &inputs).expect("it runs"), run(&graph, &inputs).expect("it runs"), "{op}");
        }
    }
}

#[test]
fn declared_shapes_in_body_are_hints() {
    let inputs = cell_inputs(3);
    let [x, h, w, r, b] = &inputs[..] else { panic!("five inputs") };
    let right = recurrent_cell(x, h, w, r, b);
    let mut wrong = right.clone();
    wrong.nodes[0].attrs = {
        let mut inner = wrong.nodes[0].attrs.graph(BODY).expect("a graph").expect("it is there").clone();
        let output: Vec<ValueId> =
            inner.nodes.iter().flat_map(ortrain_graph::Node::present_outputs).collect();
        for id in output.into_iter().chain(inner.inputs.clone()) {
            inner.value_mut(id).ty = ValueType::tensor(DType::F64, &[9, 8]);
        }
        scan_attrs(inner, 1)
    };
    infer(&mut wrong).expect("shapes are advice");
    assert_eq!(run_unrolled_and_looped(&wrong, &inputs), run_unrolled_and_looped(&right, &inputs));
    check_gradients_unrolled_and_looped(&wrong, &inputs, &[0, 1, 2, 3, 4], &[0, 1]);
}

#[test]
fn loop_in_branch() {
    let (v, w) = (generic_tensor(&[2], 1), generic_tensor(&[2], 3));
    let (mut graph, ids) = graph(&[&flag(true), &Tensor::i64(&[], &[3]), &v, &w]);
    let yes = body(&["yes_n", "yes_v", "yes_w"], |g, c| {
        let looped = body(&["i", "go", "v", "w"], |g, c| {
            vec![add_op(g, "Identity", "on", &c[1..2]), add_op(g, "Mul", "product", &c[2..])]
        });
        let ports = [Some(c[0]), None, Some(c[1])];
        let output =
            add_control_flow(g, ("Loop", "looped"), &ports, &c[2..], 1, Attrs::new().with(BODY, looped))[0];
        g.outputs.clear();
        vec![output]
    });
    let no = body(&["no_n", "no_v", "no_w"], |g, c| vec![add_op(g, "Sin", "sine", &c[1..2])]);
    let attrs = Attrs::new().with("then_branch", yes).with("else_branch", no);
    add_control_flow(
        &mut graph,
        ("If", "y"),
        &ids[..1].iter().map(|&id| Some(id)).collect::<Vec<_>>(),
        &ids[1..],
        1,
        attrs,
    );
    infer(&mut graph).expect("valid");
    for holds in [true, false] {
        let inputs = [flag(holds), Tensor::i64(&[], &[3]), v.clone(), w.clone()];
        check_gradients(&graph, &inputs, &[2, 3], &[0]);
    }
}

#[test]
fn large_invariants_are_stored_in_planes() {
    let inputs = cell_inputs(4);
    let [x, h, w, r, b] = &inputs[..] else { panic!("five inputs") };
    let graph = recurrent_cell(x, h, w, r, b);
    let (schedule, _) = run_with_unroll_limit(&graph, &inputs, 0);
    let repeats = schedule.segments.iter().find_map(|node| match &node.segment {
        Segment::Repeat(repeat, _) => Some(repeat),
        _ => None,
    });
    let repeat = repeats.expect("a Scan");
    // r, with 25 elements, is in a plane. w, with 15 elements, and b are inputs.
    assert_eq!((repeat.in_planes, repeat.body.inputs.len()), (1, 4), "{schedule}");
    assert!(repeat.body.single_program().is_some(), "{schedule}");
}

/// The body draws a mask for each slice. In the nested case it draws the mask again in a branch that is recomputed for
/// the gradient.
#[test]
fn dropout_masks_differ_by_iteration_and_repeat_in_gradient() {
    let x = Tensor::filled(DType::F64, &[4, 64], 1.0);
    for reversed in [0i64, 1] {
        for nested in [false, true] {
            let (mut graph, ids) = graph(&[&x, &flag(true)]);
            let drop = |g: &mut Graph, x: ValueId| {
                let ratio = g.add_constant("ratio", Tensor::f32(&[], &[0.5]));
                let training = g.add_constant("training", flag(true));
                let retained = add_op(g, "Dropout", "kept", &[x, ratio, training]);
                add_op(g, "Mul", "squared", &[retained, retained])
            };
            let inner = body(&["x", "condition"], |g, c| {
                if !nested {
                    return vec![drop(g, c[0])];
                }
                let yes = body(&["yes"], |g, c| vec![drop(g, c[0])]);
                let no = body(&["no"], |g, c| vec![add_op(g, "Sin", "sine", c)]);
                let attrs = Attrs::new().with("then_branch", yes).with("else_branch", no);
                let output = add_control_flow(g, ("If", "chosen"), &[Some(c[1])], &c[..1], 1, attrs);
                g.outputs.clear();
                output
            });
            let attrs = scan_attrs(inner, 1).with("scan_input_directions", vec![reversed]);
            let y = add_control_flow(
                &mut graph,
                ("Scan", "y"),
                &ids[..1].iter().map(|&id| Some(id)).collect::<Vec<_>>(),
                &ids[1..],
                1,
                attrs,
            )[0];
            infer(&mut graph).expect("valid");
            let ones = Tensor::filled(DType::F64, &[4, 64], 1.0);
            let mut gradient = gradient_graph(&graph, &[Some(ones)], &[0]);
            // Forward and backward nodes are in one graph, as during training.
            if !gradient.nodes.iter().any(|node| node.present_outputs().any(|id| id == y)) {
                gradient.nodes.insert(0, graph.nodes[0].clone());
            }
            gradient.outputs.push(y);
            let inputs = [x.clone(), flag(true)];
            let (_, got) = run_with_unroll_limit(&gradient, &inputs, 100_000);
            // x is 1 and the remaining elements are doubled: y is 4 or 0, and its slope 8 or 0.
            // The results are collected in the order of the iterations.
            let mut doubled: Vec<f64> = got[1].to_f64().iter().map(|y| 2.0 * y).collect();
            if reversed == 1 {
                doubled = doubled.chunks(64).rev().flatten().copied().collect();
            }
            assert_eq!(got[0].to_f64(), doubled);
            assert!(doubled.contains(&0.0) && doubled.contains(&8.0));
            let rows: Vec<&[f64]> = doubled.chunks(64).collect();
            for k in 1..4 {
                assert!(!rows[..k].contains(&rows[k]), "iteration {k} draws what another one drew");
            }
            assert_eq!(run_with_unroll_limit(&gradient, &inputs, 0).1, got);
        }
    }
}

#[test]
fn nested_iterations_draw_different_masks() {
    let x = Tensor::filled(DType::F64, &[3, 3, 64], 1.0);
    let (mut graph, ids) = graph(&[&x]);
    let inner = body(&["rows"], |g, c| {
        let row = body(&["row"], |g, c| {
            let ratio = g.add_constant("ratio", Tensor::f32(&[], &[0.5]));
            let training = g.add_constant("training", flag(true));
            vec![add_op(g, "Dropout", "kept", &[c[0], ratio, training])]
        });
        let output = add_control_flow(g, ("Scan", "inner"), &[Some(c[0])], &[], 1, scan_attrs(row, 1));
        g.outputs.clear();
        output
    });
    add_control_flow(&mut graph, ("Scan", "y"), &[Some(ids[0])], &[], 1, scan_attrs(inner, 1));
    infer(&mut graph).expect("valid");
    let got = run_unrolled_and_looped(&graph, std::slice::from_ref(&x));
    let elements = got[0].to_f64();
    let rows: Vec<&[f64]> = elements.chunks(64).collect();
    for k in 1..9 {
        assert!(!rows[..k].contains(&rows[k]), "row {k} is one that was drawn before");
    }
    // Depending on the limit, only the inner loop is unrolled, or the outer loop also.
    for nodes in 3..40 {
        assert_eq!(run_with_unroll_limit(&graph, std::slice::from_ref(&x), nodes).1, got, "{nodes} nodes");
    }
}

/// Returns a Scan of opset 8.
fn scan_of_opset_8(
    x: &Tensor,
    start: &Tensor,
    lens: Option<&Tensor>,
    directions: Option<i64>,
) -> Result<Graph, crate::Error> {
    let inputs: Vec<&Tensor> = [start, x].into_iter().chain(lens).collect();
    let (mut graph, ids) = graph(&inputs);
    graph.opsets.insert(String::new(), 8);
    let inner = body(&["sum", "x"], |g, c| {
        let next = add_op(g, "Add", "next", c);
        vec![next, add_op(g, "Mul", "out", &[next, next])]
    });
    let mut attrs = scan_attrs(inner, 1);
    if let Some(direction) = directions {
        attrs = attrs.with("directions", vec![direction]);
    }
    let ports = [ids.get(2).copied(), Some(ids[0]), Some(ids[1])];
    add_control_flow(&mut graph, ("Scan", "y"), &ports, &[], 2, attrs);
    crate::passes::versions::upgrade(&mut graph)?;
    infer(&mut graph)?;
    Ok(graph)
}

#[test]
fn opset_8_scans_each_batch_item() {
    let (start, x) = (f64s(&[2, 1], &[0.0, 100.0]), f64s(&[2, 3, 1], &[1.0, 2.0, 4.0, 10.0, 20.0, 40.0]));
    for (direction, rows) in [
        (None, [[1.0, 3.0, 7.0], [110.0, 130.0, 170.0]]),
        (Some(1), [[4.0, 6.0, 7.0], [140.0, 160.0, 170.0]]),
    ] {
        let graph = scan_of_opset_8(&x, &start, None, direction).expect("valid");
        let inputs = [start.clone(), x.clone()];
        let got = run_unrolled_and_looped(&graph, &inputs);
        assert_eq!(got[0], f64s(&[2, 1], &[7.0, 170.0]));
        let squares: Vec<f64> = rows.iter().flatten().map(|x| x * x).collect();
        assert_eq!(got[1], f64s(&[2, 3, 1], &squares));
    }
    let small = [generic_tensor(&[2, 1], 1), generic_tensor(&[2, 3, 1], 2)];
    check_gradients_unrolled_and_looped(
        &scan_of_opset_8(&small[1], &small[0], None, None).expect("valid"),
        &small,
        &[0, 1],
        &[0, 1],
    );
    let error = scan_of_opset_8(&x, &start, Some(&Tensor::i64(&[2], &[3, 2])), None)
        .expect_err("refused")
        .to_string();
    for part in ["\"y\" (Scan)", "sequence_lens", "opset 9"] {
        assert!(error.contains(part), "{error}");
    }
    let graph = scan_of_opset_8(&x, &start, None, None).expect("valid");
    let error = crate::passes::versions::downgrade(&mut graph.clone(), 8).expect_err("refused").to_string();
    assert!(error.contains("opset 9"), "{error}");
}

#[test]
fn file_round_trip() {
    let inputs = cell_inputs(3);
    let [x, h, w, r, b] = &inputs[..] else { panic!("five inputs") };
    let forward = recurrent_cell(x, h, w, r, b);
    let weights = [Some(generic_tensor(&[2, 5], 7)), Some(generic_tensor(&[3, 2, 5], 8))];
    let training = gradient_graph(&forward, &weights, &[0, 1, 2, 3, 4]);
    let read = round_trip_through_file(&training);
    assert_eq!(run(&read, &inputs).expect("it runs"), run(&training, &inputs).expect("it runs"));
}

#[test]
fn rejects_invalid_bodies() {
    let (h, x) = (f64s(&[2], &[0.0; 2]), f64s(&[3, 2], &[0.0; 6]));
    let attempt = |op: &str, inputs: usize, outputs: usize, attrs: Attrs| {
        let (mut graph, ids) = graph(&[&h, &x]);
        let ports: Vec<Option<ValueId>> = match op {
            "Scan" => ids[..inputs].iter().copied().map(Some).collect(),
            _ => [None, None].into_iter().chain(ids[..inputs].iter().copied().map(Some)).collect(),
        };
        add_control_flow(&mut graph, (op, "y"), &ports, &[], outputs, attrs);
        infer(&mut graph).expect_err("refused").to_string()
    };
    let sum = || body(&["h", "x"], |g, c| vec![add_op(g, "Add", "next", c)]);
    let wide = || {
        body(&["h", "x"], |g, c| {
            let axis = Attrs::new().with("axis", 0i64);
            vec![add_op_with(g, "Concat", "next", c, axis)]
        })
    };
    let other = || body(&["h", "x"], |g, c| vec![add_op(g, "Less", "next", c)]);
    let looped = |inputs: &[&str], outputs: &[usize]| {
        Attrs::new().with(BODY, body(inputs, |_, c| outputs.iter().map(|&k| c[k]).collect()))
    };
    for (op, inputs, outputs, attrs, part) in [
        ("Scan", 2, 1, Attrs::new().with(BODY, sum()), "attribute \"num_scan_inputs\" is missing"),
        ("Scan", 2, 1, Attrs::new().with("num_scan_inputs", 1i64), "attribute \"body\" is missing"),
        (
            "Scan",
            2,
            1,
            scan_attrs(sum(), 3),
            "num_scan_inputs must be from 1 to 2 (the number of inputs), got 3",
        ),
        ("Scan", 2, 1, scan_attrs(sum(), 0), "(the number of inputs), got 0"),
        ("Scan", 1, 1, scan_attrs(sum(), 1), "body has 2 inputs, but 1 are needed: 0 states and 1 slices"),
        ("Scan", 2, 2, scan_attrs(sum(), 1), "the node has 2 outputs, but body has 1"),
        (
            "Scan",
            2,
            1,
            scan_attrs(sum(), 1).with("scan_input_axes", vec![2i64]),
            "axis 2 is out of range for rank 2",
        ),
        (
            "Scan",
            2,
            1,
            scan_attrs(sum(), 1).with("scan_input_axes", vec![0i64, 1]),
            "scan_input_axes has 2 elements",
        ),
        (
            "Scan",
            2,
            1,
            scan_attrs(sum(), 1).with("scan_input_directions", vec![2i64]),
            "scan_input_directions must be 0 or 1, got 2",
        ),
        (
            "Scan",
            2,
            1,
            scan_attrs(wide(), 1),
            "the carried value \"h\" is float64[2], but body returns float64[4]",
        ),
        (
            "Scan",
            2,
            1,
            scan_attrs(other(), 1),
            "the carried value \"h\" is float64[2], but body returns bool[2]",
        ),
        ("Loop", 1, 1, looped(&["i", "go", "v"], &[1]), "body has 1 outputs, but 2 are needed"),
        ("Loop", 1, 1, looped(&["i", "go"], &[1]), "body has 2 inputs, but 3 are needed"),
        (
            "Loop",
            1,
            1,
            looped(&["i", "go", "v"], &[2, 2]),
            "the condition of body must be a bool, got float64[2]",
        ),
        ("Loop", 1, 1, looped(&["i", "go", "v"], &[1, 0]), "the carried value \"v\" is float64[2]"),
    ] {
        let message = attempt(op, inputs, outputs, attrs);
        assert!(message.contains("\"y\"") && message.contains(op) && message.contains(part), "{message}");
    }
    // The lengths differ.
    let (mut graph, ids) = graph(&[&x, &f64s(&[2, 2], &[0.0; 4])]);
    let ports: Vec<Option<ValueId>> = ids.iter().copied().map(Some).collect();
    add_control_flow(&mut graph, ("Scan", "y"), &ports, &[], 1, scan_attrs(sum(), 2));
    let message = infer(&mut graph).expect_err("refused").to_string();
    assert!(
        message.contains("the scanned inputs 0 and 1 must have the same number of slices, got 3 and 2"),
        "{message}"
    );
}

#[test]
fn gradients_of_growing_carried_values() {
    // The carried value doubles its length, and the gradient needs all its elements.
    let v = f64s(&[1], &[7.0]);
    let (mut graph, ids) = graph(&[&Tensor::i64(&[], &[3]), &v]);
    let inner = body(&["i", "go", "v"], |g, c| {
        let axis = Attrs::new().with("axis", 0i64);
        let twice = add_op_with(g, "Concat", "twice", &[c[2], c[2]], axis);
        vec![add_op(g, "Identity", "on", &c[1..2]), add_op(g, "Exp", "next", &[twice])]
    });
    let ports = [Some(ids[0]), None, Some(ids[1])];
    add_control_flow(&mut graph, ("Loop", "y"), &ports, &[], 1, Attrs::new().with(BODY, inner));
    infer(&mut graph).expect("valid");
    let v = f64s(&[1], &[-0.7]);
    for count in [0i64, 1, 2, 3] {
        check_gradients_unrolled_and_looped(&graph, &[Tensor::i64(&[], &[count]), v.clone()], &[1], &[0]);
    }
}

#[test]
fn rejects_deep_nesting() {
    for deep in [8, 9] {
        let x = generic_tensor(&[1; 9], 1);
        let (mut graph, ids) = graph(&[&x]);
        let mut inner = body(&["x"], |g, c| vec![add_op(g, "Sin", "sine", c)]);
        for _ in 1..deep {
            inner = body(&["x"], |g, c| {
                let output = add_control_flow(g, ("Scan", "y"), &[Some(c[0])], &[], 1, scan_attrs(inner, 1));
                g.outputs.clear();
                output
            });
        }
        add_control_flow(&mut graph, ("Scan", "y"), &[Some(ids[0])], &[], 1, scan_attrs(inner, 1));
        match infer(&mut graph) {
            Ok(()) => assert_eq!((deep, run_unrolled_and_looped(&graph, &[x])[0].to_f64().len()), (8, 1)),
            Err(error) => {
                assert!(deep == 9 && error.to_string().contains("nested 9 deep; at most 8"), "{error}");
            }
        }
    }
}

/// Returns a decoder. In every iteration the newest row attends to all previous rows, and a new row is appended. The
/// Loop collects a number in each iteration, and an integer list grows with the rows.
///
/// The inputs are the count, the rows `[n, 2]`, a matrix and a limit for the sum of the rows.
fn decoder_graph(inputs: &[Tensor]) -> Graph {
    let references: Vec<&Tensor> = inputs.iter().collect();
    let (mut graph, ids) = graph(&references);
    let started = graph.add_constant("started", Tensor::i64(&[1], &[0]));
    let inner = body(&["i", "go", "rows", "places", "w", "limit"], |g, c| {
        let ints =
            |g: &mut Graph, values: &[i64]| g.add_constant("ints", Tensor::i64(&[values.len()], values));
        let axis = |axis: i64| Attrs::new().with("axis", axis);
        let (newest, end, zero) = (ints(g, &[-1]), ints(g, &[i64::MAX]), ints(g, &[0]));
        let row = add_op(g, "Slice", "row", &[c[2], newest, end, zero]);
        let keys = add_op(g, "MatMul", "keys", &[c[2], c[4]]);
        let transposed =
            add_op_with(g, "Transpose", "turned", &[keys], Attrs::new().with("perm", vec![1i64, 0]));
        let scores = add_op(g, "MatMul", "scores", &[row, transposed]);
        let shares = add_op_with(g, "Softmax", "shares", &[scores], axis(-1));
        let mixed = add_op(g, "MatMul", "mixed", &[shares, c[2]]);
        let output = add_op(g, "Tanh", "made", &[mixed]);
        let rows = add_op_with(g, "Concat", "rows_next", &[c[2], output], axis(0));
        let one_more = ints(g, &[1]);
        let position = add_op(g, "Reshape", "place", &[c[0], one_more]);
        let positions = add_op_with(g, "Concat", "places_next", &[c[3], position], axis(0));
        let picked = add_op_with(g, "Gather", "picked", &[c[2], c[3]], axis(0));
        let sum = add_op_with(g, "ReduceSum", "sum", &[picked], Attrs::new().with("keepdims", 0i64));
        vec![add_op(g, "Less", "on", &[sum, c[5]]), rows, positions, add_op(g, "Mul", "number", &[sum, sum])]
    });
    let ports = [Some(ids[0]), None, Some(ids[1]), Some(started)];
    add_control_flow(&mut graph, ("Loop", "y"), &ports, &ids[2..4], 3, Attrs::new().with(BODY, inner));
    infer(&mut graph).expect("valid");
    graph
}

#[test]
fn decoder_with_growing_rows() {
    let rows = f64s(&[2, 2], &[0.3, -0.5, 0.8, 0.2]);
    let inputs = |count: i64, limit: f64| {
        [Tensor::i64(&[], &[count]), rows.clone(), generic_tensor(&[2, 2], 3), f64s(&[], &[limit])]
    };
    let args = inputs(3, 100.0);
    let graph = decoder_graph(&args);
    let results = run(&graph, &args).expect("it runs");
    let shapes: Vec<&[usize]> = results.iter().map(Tensor::dims).collect();
    assert_eq!(shapes, [&[5, 2][..], &[4], &[3]]);
    for (through, targets) in [(&[0][..], &[1, 2][..]), (&[2], &[1, 2]), (&[0, 2], &[2]), (&[0, 2], &[1])] {
        check_gradients_unrolled_and_looped(&graph, &args, targets, through);
    }
    // The number of iterations depends on the values.
    let stopped = inputs(1000, 1.0);
    let graph = decoder_graph(&stopped);
    let results = run(&graph, &stopped).expect("it runs");
    assert!((2..1000).contains(&results[2].len()), "{:?}", results[2].dims());
    check_gradients(&graph, &stopped, &[1, 2], &[0, 2]);
    let read = round_trip_through_file(&graph);
    assert_eq!(run(&read, &stopped).expect("it runs"), results);
}

#[test]
fn growing_loop_draws_random_numbers_once() {
    let (mut graph, ids) = graph(&[&Tensor::i64(&[], &[3]), &f64s(&[1], &[0.7])]);
    let inner = |inside: bool| {
        body(&["i", "go", "v"], |g, c| {
            let ratio = g.add_constant("ratio", Tensor::scalar(DType::F64, 0.5));
            let training = g.add_constant("training", flag(true));
            let dropped = if inside {
                let branch = |name: &str| {
                    let mut branch =
                        body(&["v", "ratio", "training"], |g, c| vec![add_op(g, "Dropout", name, c)]);
                    branch.name = name.to_owned();
                    branch
                };
                let attrs = Attrs::new().with("then_branch", branch("yes")).with("else_branch", branch("no"));
                let chosen =
                    add_control_flow(g, ("If", "chosen"), &[Some(c[1])], &[c[2], ratio, training], 1, attrs)
                        [0];
                g.outputs.clear();
                chosen
            } else {
                add_op(g, "Dropout", "dropped", &[c[2], ratio, training])
            };
            let squared = add_op(g, "Mul", "squared", &[dropped, dropped]);
            let next = add_op_with(g, "Concat", "next", &[c[2], squared], Attrs::new().with("axis", 0i64));
            vec![add_op(g, "Identity", "on", &c[1..2]), next]
        })
    };
    let ports = [Some(ids[0]), None, Some(ids[1])];
    let empty = graph.clone();
    add_control_flow(&mut graph, ("Loop", "y"), &ports, &[], 1, Attrs::new().with(BODY, inner(false)));
    infer(&mut graph).expect("valid");
    let inputs = [Tensor::i64(&[], &[3]), f64s(&[1], &[0.7])];
    let values = run(&graph, &inputs).expect("it runs")[0].to_f64();
    let dropped = values.iter().filter(|&&value| value == 0.0).count();
    assert!((1..values.len() - 1).contains(&dropped), "{values:?}");
    check_gradients_unrolled_and_looped(&graph, &inputs, &[1], &[0]);
    let mut graph = empty;
    add_control_flow(&mut graph, ("Loop", "y"), &ports, &[], 1, Attrs::new().with(BODY, inner(true)));
    infer(&mut graph).expect("valid");
    let loss = graph.outputs[0];
    let ones = graph.add_constant("ones", Tensor::filled(DType::F64, &[8], 1.0));
    let error = crate::passes::differentiate::backpropagate(&mut graph, &[(loss, ones)], &[ids[1]]);
    let message = error.expect_err("refused").to_string();
    for part in ["\"y\" (Loop)", "changes its shape", "random numbers of"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn body_without_iterations_may_be_invalid() {
    // The body reads the first row of a matrix without rows.
    let inputs = [f64s(&[0, 2], &[]), f64s(&[2], &[1.0, 2.0])];
    for count in [0, 1] {
        let (mut graph, ids) = graph(&[&inputs[0], &inputs[1]]);
        let count_id = graph.add_constant("count", Tensor::i64(&[], &[count]));
        let inner = body(&["i", "go", "v", "rows"], |g, c| {
            let row = add_op_with(g, "Gather", "row", &[c[3], c[0]], Attrs::new().with("axis", 0i64));
            vec![add_op(g, "Identity", "on", &c[1..2]), add_op(g, "Add", "next", &[c[2], row])]
        });
        let ports = [Some(count_id), None, Some(ids[1])];
        add_control_flow(&mut graph, ("Loop", "y"), &ports, &ids[..1], 1, Attrs::new().with(BODY, inner));
        match infer(&mut graph) {
            Ok(()) if count == 0 => {}
            Err(error) if count == 1 => {
                assert!(error.to_string().contains("the indexed axis is empty"), "{error}");
                continue;
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(run(&graph, &inputs).expect("it runs")[0], inputs[1]);
    }
}
