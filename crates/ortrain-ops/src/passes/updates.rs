//! State updates move to the end of the graph.
//!
//! An operator may declare that an output replaces an input that is state ([`crate::Op::updates`]). This pass makes
//! this output an ordinary value, and adds a node at the end of the graph that writes it to the state. A failed run
//! thus changes nothing, and no reader sees a partial update. Updates in branches become additional results of their
//! node; a branch without an update returns the old value. The body of a loop carries its updates from iteration to
//! iteration.

use ortrain_graph::{Attr, Graph, Node, ValueId};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::op::{Placement, Repetition};
use crate::registry::build;
use crate::support::state_update::add_state_update;

/// Newest value of every piece of state.
type NewestValues = FxHashMap<ValueId, ValueId>;

/// Returns the inputs of a graph that its nodes write to.
#[must_use]
pub fn written_inputs(graph: &Graph) -> Vec<ValueId> {
    let writing = graph.nodes.iter().filter(|node| writes_state(graph, node));
    let read_values: FxHashSet<ValueId> = writing.flat_map(Node::present_inputs).collect();
    graph.inputs.iter().copied().filter(|id| read_values.contains(id)).collect()
}

/// Returns true for a node that writes to inputs of its graph.
#[must_use]
pub fn writes_state(graph: &Graph, node: &Node) -> bool {
    build(graph, node).is_ok_and(|op| op.writes_state())
}

/// Adds the nodes that write the newest values of `state` (inputs of the graph). Nodes that update the same state do
/// this in sequence.
pub(crate) fn move_updates_last(graph: &mut Graph, state: &[ValueId]) {
    let mut newest: NewestValues = state.iter().map(|&id| (id, id)).collect();
    lift_updates(graph, &mut newest);
    for &id in state {
        if newest[&id] != id {
            add_state_update(graph, id, newest[&id]);
        }
    }
}

fn lift_updates(graph: &mut Graph, newest: &mut NewestValues) {
    for index in 0..graph.nodes.len() {
        // An invalid node is reported when the graph is compiled.
        let Ok(op) = build(graph, &graph.nodes[index]) else { continue };
        let node = &mut graph.nodes[index];
        let before = node.inputs.clone();
        for &(output, input) in op.state_updates() {
            let new = node.outputs.get(output).copied().flatten();
            let old = before.get(input).copied().flatten();
            if let (Some(new), Some(old)) = (new, old)
                && let Some(value) = newest.get_mut(&old)
            {
                if !node.outputs.contains(&Some(*value)) {
                    node.inputs[input] = Some(*value);
                }
                *value = new;
            }
        }
        match op.placement() {
            Placement::If { then_branch, else_branch } => {
                lift_branches(graph, index, [then_branch, else_branch], newest);
            }
            Placement::Repeat(repetition) => lift_body(graph, index, &repetition, newest),
            Placement::Program | Placement::Composition | Placement::Host(_) | Placement::Yield => {}
        }
    }
}

/// Converts the updates in the body of a node to carried values.
fn lift_body(graph: &mut Graph, index: usize, r: &Repetition, newest: &mut NewestValues) {
    let node = &graph.nodes[index];
    let input_count = node.inputs.len() - node.captures;
    let Some(Attr::Graph(body)) = node.attrs.0.get(r.body) else { return };
    let mut body = (**body).clone();
    if body.inputs.len() != r.formal_inputs() + node.captures {
        return;
    }
    let captured: Vec<(ValueId, ValueId)> = (0..node.captures)
        .filter_map(|k| Some((body.inputs[r.formal_inputs() + k], node.inputs[input_count + k]?)))
        .filter(|(_, outer)| newest.contains_key(outer))
        .collect();
    if captured.is_empty() {
        return;
    }
    // Readers in the body see the old values. Only nodes that update them get the carried values.
    let mut inside: NewestValues = FxHashMap::default();
    let mut starts: Vec<ValueId> = Vec::with_capacity(captured.len());
    for &(inner, outer) in &captured {
        let ty = graph.value(outer).ty.clone();
        let start = body.add_value(&format!("{}_now", body.name_of(inner)), ty);
        inside.insert(inner, start);
        starts.push(start);
    }
    lift_updates(&mut body, &mut inside);
    let mut carried = r.carried;
    // The additional results follow the carried values; unused results are included.
    graph.nodes[index].outputs.resize(r.carried + r.stacked.len(), None);
    if r.conditional && input_count < r.leading_inputs() {
        let node = &mut graph.nodes[index];
        for k in input_count..r.leading_inputs() {
            node.inputs.insert(k, None);
        }
    }
    for (&(inner, outer), start) in captured.iter().zip(starts) {
        let end = inside[&inner];
        if end == start {
            continue;
        }
        body.inputs.insert(r.leading_inputs() + carried, start);
        body.outputs.insert(r.leading_outputs() + carried, end);
        let value = graph.value(outer);
        let (name, ty) = (format!("{}_updated", value.name), value.ty.clone());
        let new = graph.add_value(&name, ty);
        let node = &mut graph.nodes[index];
        node.inputs.insert(r.leading_inputs() + carried, Some(newest[&outer]));
        node.outputs.insert(carried, Some(new));
        newest.insert(outer, new);
        carried += 1;
    }
    if carried > r.carried {
        graph.nodes[index].attrs.0.insert(r.body.to_owned(), Attr::Graph(Box::new(body)));
    }
}

/// Converts the updates in the branches of a node to results of the node.
fn lift_branches(graph: &mut Graph, index: usize, attributes: [&str; 2], newest: &mut NewestValues) {
    let node = &graph.nodes[index];
    let input_count = node.inputs.len() - node.captures;
    let captured: Vec<(usize, ValueId)> = (input_count..node.inputs.len())
        .filter_map(|k| node.inputs[k].map(|id| (k - input_count, id)))
        .filter(|(_, id)| newest.contains_key(id))
        .collect();
    let branch = |attribute: &str| match node.attrs.0.get(attribute) {
        Some(Attr::Graph(branch)) => Some((**branch).clone()),
        _ => None,
    };
    let (Some(first), Some(second)) = (branch(attributes[0]), branch(attributes[1])) else { return };
    let mut halves = [first, second];
    if captured.is_empty() || halves.iter().any(|half| half.inputs.len() != node.captures) {
        return;
    }
    // A value that was updated before is passed in addition to the old value.
    let mut more: Vec<ValueId> = Vec::new();
    let mut inside: [NewestValues; 2] = Default::default();
    for &(position, id) in &captured {
        let (value, ty) = (newest[&id], graph.value(id).ty.clone());
        for (half, inside) in halves.iter_mut().zip(&mut inside) {
            let old = half.inputs[position];
            let mut current = old;
            if value != id {
                current = half.add_value(graph.name_of(value), ty.clone());
                half.inputs.push(current);
            }
            inside.insert(old, current);
        }
        if value != id {
            more.push(value);
        }
    }
    let starts = inside.clone();
    for (half, inside) in halves.iter_mut().zip(&mut inside) {
        lift_updates(half, inside);
    }
    let updated: Vec<(usize, ValueId)> = captured
        .into_iter()
        .filter(|&(position, _)| {
            (0..2).any(|h| {
                let old = &halves[h].inputs[position];
                inside[h][old] != starts[h][old]
            })
        })
        .collect();
    if updated.is_empty() {
        return;
    }
    let results = halves[0].outputs.len();
    graph.nodes[index].outputs.resize(results, None);
    for (position, id) in updated {
        for (half, inside) in halves.iter_mut().zip(&inside) {
            let value = inside[&half.inputs[position]];
            half.outputs.push(value);
        }
        let value = graph.value(id);
        let (name, ty) = (format!("{}_updated", value.name), value.ty.clone());
        let new = graph.add_value(&name, ty);
        graph.nodes[index].outputs.push(Some(new));
        newest.insert(id, new);
    }
    let node = &mut graph.nodes[index];
    node.captures += more.len();
    node.inputs.extend(more.into_iter().map(Some));
    for (attribute, half) in attributes.into_iter().zip(halves) {
        node.attrs.0.insert(attribute.to_owned(), Attr::Graph(Box::new(half)));
    }
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{Attrs, DType, Graph, Tensor, ValueId};
    use ortrain_program::{Memory, PlaneId, Scalars};

    use crate::Role;
    use crate::passes::differentiate::backpropagate;
    use crate::passes::infer::infer;
    use crate::testing::{
        Failure, add, assert_close, f64s, generic_tensor, graph, run_bound, run_specialised,
    };

    const NORM: (&str, &str) = ("com.microsoft", "BatchNormInternal");
    const MOMENTUM: f64 = 0.75;

    fn attrs() -> Attrs {
        Attrs::new().with("momentum", MOMENTUM as f32)
    }

    /// Mean and variance of two channels, in a plane.
    struct State(Memory);

    impl State {
        const OFFSETS: [usize; 2] = [0, 256];

        fn new() -> State {
            let memory = Memory::new(512);
            memory.write(0, f64s(&[2], &[1.0, -1.0]).data()).unwrap();
            memory.write(256, f64s(&[2], &[2.0, 3.0]).data()).unwrap();
            State(memory)
        }

        fn values(&self) -> Vec<f64> {
            let read = |&offset: &usize| {
                let bytes = self.0.to_vec(offset, 16).unwrap();
                Tensor::new(DType::F64, vec![2], bytes.into()).expect("two numbers").to_f64()
            };
            Self::OFFSETS.iter().flat_map(read).collect()
        }

        /// Runs a graph with the state as its last two inputs.
        fn run(&self, graph: &Graph, inputs: &[Tensor]) -> Result<Vec<Tensor>, Failure> {
            let mut roles = vec![Role::User; inputs.len()];
            roles.extend(Self::OFFSETS.map(|offset| Role::Plane(PlaneId(0), offset)));
            Ok(run_bound(graph, roles, &[&self.0], inputs, Scalars::default())?.1)
        }
    }

    /// Returns the statistics after an update with a batch of two channels.
    fn updated_statistics(values: &[f64], x: &Tensor) -> Vec<f64> {
        let x = x.to_f64();
        let rows = x.len() / 2;
        let of = |c: usize| (0..rows).map(move |r| 2 * r + c);
        let mean = |c: usize| of(c).map(|k| x[k]).sum::<f64>() / rows as f64;
        let var = |c: usize| of(c).map(|k| (x[k] - mean(c)).powi(2)).sum::<f64>() / rows as f64;
        let batch = [mean(0), mean(1), var(0), var(1)];
        values.iter().zip(batch).map(|(old, new)| MOMENTUM * old + (1.0 - MOMENTUM) * new).collect()
    }

    #[track_caller]
    fn assert_values(state: &State, expected: &[f64]) {
        assert_close(&f64s(&[4], &state.values()), &f64s(&[4], expected), 1e-12);
    }

    fn parameters() -> [Tensor; 2] {
        [f64s(&[2], &[1.5, 0.5]), f64s(&[2], &[0.1, -0.2])]
    }

    /// Starts a graph of `x`, scale, bias, mean and variance, with an optional condition first.
    fn normalization_graph(x: &Tensor, condition: Option<&Tensor>) -> (Graph, Vec<ValueId>, Vec<Tensor>) {
        let [scale, bias] = parameters();
        let feeds: Vec<Tensor> = condition.into_iter().chain([x, &scale, &bias]).cloned().collect();
        let statistic = f64s(&[2], &[0.0; 2]);
        let tensors: Vec<&Tensor> = feeds.iter().chain([&statistic, &statistic]).collect();
        let (graph, ids) = graph(&tensors);
        (graph, ids, feeds)
    }

    /// Adds a normalization; its first result is an output of the graph.
    fn normalize(graph: &mut Graph, name: &str, inputs: &[ValueId]) -> ValueId {
        let ports: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        let outputs = add(graph, NORM, name, &ports, 5, attrs());
        graph.outputs.truncate(graph.outputs.len() - 4);
        outputs[0]
    }

    #[test]
    fn every_run_updates() {
        let x = generic_tensor(&[3, 2], 1);
        let (mut graph, ids, feeds) = normalization_graph(&x, None);
        normalize(&mut graph, "y", &ids);
        let state = State::new();
        let first = updated_statistics(&state.values(), &x);
        state.run(&graph, &feeds).expect("the graph runs");
        assert_values(&state, &first);
        state.run(&graph, &feeds).expect("the graph runs");
        assert_values(&state, &updated_statistics(&first, &x));
    }

    #[test]
    fn an_empty_batch_updates_nothing() {
        let x = generic_tensor(&[0, 2], 1);
        let (mut graph, ids, feeds) = normalization_graph(&x, None);
        normalize(&mut graph, "y", &ids);
        let state = State::new();
        let before = state.values();
        state.run(&graph, &feeds).expect("the graph runs");
        assert_eq!(state.values(), before);
    }

    #[test]
    fn shared_updates_are_sequential_and_readers_see_old_state() {
        let x = generic_tensor(&[3, 2], 2);
        let (mut graph, ids, feeds) = normalization_graph(&x, None);
        let y = normalize(&mut graph, "y", &ids);
        normalize(&mut graph, "z", &[&[y], &ids[1..]].concat());
        add(&mut graph, ("", "Neg"), "seen", &[Some(ids[3])], 1, Attrs::new());
        let state = State::new();
        let before = state.values();
        let got = state.run(&graph, &feeds).expect("the graph runs");
        assert_values(&state, &updated_statistics(&updated_statistics(&before, &x), &got[0]));
        assert_eq!(got[2].to_f64(), [-before[0], -before[1]]);
    }

    #[test]
    fn one_piece_of_state_as_both_statistics() {
        let x = generic_tensor(&[3, 2], 2);
        let (mut graph, ids, feeds) = normalization_graph(&x, None);
        normalize(&mut graph, "y", &[ids[0], ids[1], ids[2], ids[3], ids[3]]);
        let state = State::new();
        let before = state.values();
        state.run(&graph, &feeds).expect("the graph runs");
        let old = [&before[..2], &before[..2]].concat();
        assert_values(&state, &[&updated_statistics(&old, &x)[2..], &before[2..]].concat());
    }

    #[test]
    fn failed_runs_change_nothing() {
        // A host function between the update and the failing node.
        let x = generic_tensor(&[3, 2], 3);
        let (mut graph, ids, feeds) = normalization_graph(&x, None);
        let y = normalize(&mut graph, "y", &ids);
        let rows = add(&mut graph, ("", "NonZero"), "rows", &[Some(y)], 1, Attrs::new())[0];
        let out_of_range = graph.add_constant("far", Tensor::i64(&[1], &[1]));
        let sum = add(&mut graph, ("", "Add"), "sum", &[Some(rows), Some(out_of_range)], 1, Attrs::new())[0];
        add(&mut graph, ("", "Gather"), "z", &[Some(y), Some(sum)], 1, Attrs::new());
        let state = State::new();
        let before = state.values();
        assert!(matches!(state.run(&graph, &feeds), Err(Failure::Run(_))));
        assert_eq!(state.values(), before);
    }

    /// Builds `condition ? normalized x : x * scale` (reversed if `swapped`), and its sum of squares.
    fn branch_graph(x: &Tensor, swapped: bool) -> (Graph, Vec<ValueId>, Vec<Tensor>) {
        let (mut graph, ids, feeds) = normalization_graph(x, Some(&Tensor::filled(DType::Bool, &[], 1.0)));
        let branch = |normalized: bool| {
            let mut branch = Graph::new("branch");
            let inputs: Vec<ValueId> = (0..5)
                .map(|k| branch.add_value(&format!("c{k}"), graph.value(ids[1 + k]).ty.clone()))
                .collect();
            branch.inputs.clone_from(&inputs);
            if normalized {
                normalize(&mut branch, "y", &inputs);
            } else {
                add(&mut branch, ("", "Mul"), "y", &[Some(inputs[0]), Some(inputs[1])], 1, Attrs::new());
            }
            branch
        };
        let attrs = Attrs::new().with("then_branch", branch(!swapped)).with("else_branch", branch(swapped));
        let ports: Vec<Option<ValueId>> = ids.iter().copied().map(Some).collect();
        let y = add(&mut graph, ("", "If"), "chosen", &ports, 1, attrs)[0];
        graph.nodes.last_mut().expect("just added").captures = 5;
        let square = add(&mut graph, ("", "Mul"), "square", &[Some(y), Some(y)], 1, Attrs::new())[0];
        graph.outputs = vec![square];
        infer(&mut graph).expect("valid");
        (graph, ids, feeds)
    }

    #[test]
    fn updates_in_branches() {
        let x = generic_tensor(&[3, 2], 4);
        for swapped in [false, true] {
            for holds in [true, false] {
                for known in [true, false] {
                    let (mut graph, ids, mut feeds) = branch_graph(&x, swapped);
                    // Forward, and once more for the gradient, which updates nothing.
                    let seed = graph.add_constant("seed", generic_tensor(&[3, 2], 5));
                    let seeds = [(graph.outputs[0], seed)];
                    let gradients =
                        backpropagate(&mut graph, &seeds, &[ids[1], ids[2]]).expect("it has gradients");
                    graph.outputs.extend(gradients.into_iter().flatten());
                    feeds[0] = Tensor::filled(DType::Bool, &[], f64::from(u8::from(holds)));
                    if known {
                        graph.value_mut(ids[0]).constant = Some(feeds.remove(0));
                        graph.inputs.remove(0);
                    }
                    let state = State::new();
                    let before = state.values();
                    let got = state.run(&graph, &feeds).expect("the graph runs");
                    assert_eq!(got.len(), 3);
                    let expected =
                        if holds == swapped { before.clone() } else { updated_statistics(&before, &x) };
                    assert_values(&state, &expected);
                }
            }
        }
    }

    /// A normalization of each slice of x, and an optional one before it.
    #[test]
    fn updates_in_bodies() {
        let x = generic_tensor(&[3, 4, 2], 6);
        let parts: Vec<Tensor> = x.to_f64().chunks(8).map(|part| f64s(&[4, 2], part)).collect();
        for before in [false, true] {
            let (mut graph, ids, feeds) = normalization_graph(&x, None);
            let mut body = Graph::new("body");
            let inputs: Vec<ValueId> = ["part", "scale", "bias", "mean", "var"]
                .iter()
                .map(|name| body.add_value(name, ortrain_graph::ValueType::Unknown))
                .collect();
            body.inputs.clone_from(&inputs);
            normalize(&mut body, "normal", &inputs);
            let attrs = Attrs::new().with("num_scan_inputs", 1i64).with("body", body);
            let ports: Vec<Option<ValueId>> = ids.iter().copied().map(Some).collect();
            if before {
                let first = graph.add_constant("first", parts[0].clone());
                normalize(&mut graph, "y", &[&[first], &ids[1..]].concat());
            }
            add(&mut graph, ("", "Scan"), "scanned", &ports, 1, attrs);
            graph.nodes.last_mut().expect("just added").captures = 4;
            infer(&mut graph).expect("valid");
            // Forward, and once more for the gradient, which updates nothing.
            let seed = graph.add_constant("seed", generic_tensor(&[3, 4, 2], 5));
            let seeds = [(*graph.outputs.last().expect("the Scan"), seed)];
            let gradients = backpropagate(&mut graph, &seeds, &[ids[0], ids[1]]).expect("it has gradients");
            graph.outputs.extend(gradients.into_iter().flatten());
            for nodes in [0, 1000] {
                let state = State::new();
                let mut expected = state.values();
                if before {
                    expected = updated_statistics(&expected, &parts[0]);
                }
                for part in &parts {
                    expected = updated_statistics(&expected, part);
                }
                let mut roles = vec![Role::User; feeds.len()];
                roles.extend(State::OFFSETS.map(|offset| Role::Plane(PlaneId(0), offset)));
                let specialiser = crate::Specialiser::new(graph.clone(), roles).unrolled_nodes(nodes);
                run_specialised(&specialiser, &[&state.0], &feeds, Scalars::default())
                    .expect("the graph runs");
                assert_values(&state, &expected);
            }
        }
    }

    #[test]
    fn updates_branch_after_outer_update() {
        let x = generic_tensor(&[3, 2], 6);
        for holds in [true, false] {
            let (mut graph, ids, mut feeds) = branch_graph(&x, false);
            let ports: Vec<Option<ValueId>> = ids[1..].iter().copied().map(Some).collect();
            add(&mut graph, NORM, "before", &ports, 5, attrs());
            graph.outputs.truncate(1);
            let last = graph.nodes.pop().expect("just added");
            graph.nodes.insert(0, last);
            infer(&mut graph).expect("valid");
            feeds[0] = Tensor::filled(DType::Bool, &[], f64::from(u8::from(holds)));
            let state = State::new();
            let once = updated_statistics(&state.values(), &x);
            state.run(&graph, &feeds).expect("the graph runs");
            assert_values(&state, &if holds { updated_statistics(&once, &x) } else { once });
        }
    }
}
