//! The input `training_mode`: true if a run of a graph is a training run.

use ortrain_graph::{Attr, Attrs, Graph, Node, ValueId, ValueType};
use ortrain_onnx::{GraphProto, NodeProto, TensorProto};
use rustc_hash::FxHashSet;

use super::modes::{is_batch_norm, is_dropout};
use crate::class::Class;
use crate::families::batch_norm::convert_to_inference;
use crate::registry::class_of_message;

/// Name of the input of a training graph that switches Dropout on, and selects the statistics for an evaluation.
pub const TRAINING_MODE: &str = "training_mode";
/// First opset in which an attribute selects the batch statistics of a BatchNormalization. Before it, the outputs
/// select them.
const MODE_ATTRIBUTE_SINCE: i64 = 14;

/// Replaces the flag of each Dropout that the model switches on by one input, a scalar bool. A Dropout that is switched
/// off, or has an input or a computed value as its flag, is unchanged. Returns true if a flag was replaced.
pub fn share_training_mode(graph: &mut GraphProto) -> bool {
    let is_on = |tensor: &TensorProto| {
        let raw = tensor.raw_data.first().map(|&byte| byte != 0);
        raw.or(tensor.int32_data.first().map(|&value| value != 0)).unwrap_or(false)
    };
    let initializers =
        graph.initializer.iter().filter(|tensor| is_on(tensor)).map(|tensor| tensor.name.clone());
    let constants =
        graph.node.iter().filter(|node| class_of_message(node) == Class::Constant).filter_map(|node| {
            let value = node.attribute.iter().find_map(|attribute| attribute.t.as_ref())?;
            if is_on(value) { node.output.first().cloned() } else { None }
        });
    let on: FxHashSet<String> = initializers.chain(constants).collect();
    share_flags(graph, &on)
}

fn share_flags(graph: &mut GraphProto, on: &FxHashSet<String>) -> bool {
    let mut is_shared = false;
    for node in &mut graph.node {
        for subgraph in subgraphs_mut(node) {
            is_shared |= share_flags(subgraph, on);
        }
        if is_dropout(&node.domain, &node.op_type)
            && let Some(flag) = node.input.get_mut(2)
            && on.contains(flag)
        {
            TRAINING_MODE.clone_into(flag);
            is_shared = true;
        }
    }
    is_shared
}

/// Renames a value of a message that is called `training_mode` and is not an input, so that an input may have the name.
/// An output of the model keeps its name.
pub fn free_training_mode(graph: &mut GraphProto) {
    let mut names = FxHashSet::default();
    collect_names(graph, &mut names);
    let free = (1..).map(|k| format!("{TRAINING_MODE}_{k}")).find(|name| !names.contains(name));
    if let Some(free) = free.filter(|_| names.contains(TRAINING_MODE)) {
        rename_training_mode(graph, &free);
    }
}

fn collect_names(graph: &GraphProto, names: &mut FxHashSet<String>) {
    names.extend(graph.initializer.iter().map(|tensor| tensor.name.clone()));
    names.extend(graph.input.iter().chain(&graph.output).map(|info| info.name.clone()));
    for node in &graph.node {
        names.extend(node.input.iter().chain(&node.output).cloned());
        for attribute in &node.attribute {
            for subgraph in attribute.g.as_deref().into_iter().chain(&attribute.graphs) {
                collect_names(subgraph, names);
            }
        }
    }
}

fn rename_training_mode(graph: &mut GraphProto, free: &str) {
    let tensors = graph.initializer.iter_mut().map(|tensor| &mut tensor.name);
    let tensors = tensors.chain(graph.value_info.iter_mut().map(|info| &mut info.name));
    tensors.filter(|name| *name == TRAINING_MODE).for_each(|name| free.clone_into(name));
    for node in &mut graph.node {
        let ports = node.input.iter_mut().chain(&mut node.output);
        ports.filter(|name| *name == TRAINING_MODE).for_each(|name| free.clone_into(name));
        for subgraph in subgraphs_mut(node) {
            rename_training_mode(subgraph, free);
            let infos = subgraph.input.iter_mut().chain(&mut subgraph.output).map(|info| &mut info.name);
            infos.filter(|name| *name == TRAINING_MODE).for_each(|name| free.clone_into(name));
        }
    }
}

fn subgraphs_mut(node: &mut NodeProto) -> impl Iterator<Item = &mut GraphProto> {
    node.attribute
        .iter_mut()
        .flat_map(|attribute| attribute.g.as_deref_mut().into_iter().chain(&mut attribute.graphs))
}

/// Returns the number of BatchNormalizations of a model of this opset that use batch statistics, and of the others,
/// including subgraphs.
#[must_use]
pub fn count_batch_norm_modes(graph: &GraphProto, opset: i64) -> (usize, usize) {
    let (mut training, mut inference) = (0, 0);
    for node in &graph.node {
        for attribute in &node.attribute {
            for subgraph in attribute.g.as_deref().into_iter().chain(&attribute.graphs) {
                let inner = count_batch_norm_modes(subgraph, opset);
                (training, inference) = (training + inner.0, inference + inner.1);
            }
        }
        if !is_batch_norm(&node.domain, &node.op_type) {
            continue;
        }
        let trains = match opset < MODE_ATTRIBUTE_SINCE {
            true => node.output.iter().skip(1).any(|output| !output.is_empty()),
            false => node.attribute.iter().any(|attr| attr.name == "training_mode" && attr.i != 0),
        };
        match trains {
            true => training += 1,
            false => inference += 1,
        }
    }
    (training, inference)
}

/// Selects the statistics of each BatchNormalization with batch statistics by a bool value. If it is false, the node
/// uses the running statistics, and returns them unchanged. The graph must have the newest versions.
pub fn choose_statistics(graph: &mut Graph, mode: ValueId) {
    let ty = graph.value(mode).ty.clone();
    for mut node in std::mem::take(&mut graph.nodes) {
        if uses_batch_statistics(&node) {
            emit_choice(graph, &node, mode);
            continue;
        }
        if Graph::subgraphs(&node).any(|(_, subgraph)| has_batch_statistics(subgraph)) {
            node.inputs.push(Some(mode));
            node.captures += 1;
            for attr in node.attrs.0.values_mut() {
                if let Attr::Graph(subgraph) = attr {
                    let inner = subgraph.add_value(graph.name_of(mode), ty.clone());
                    subgraph.inputs.push(inner);
                    choose_statistics(subgraph, inner);
                }
            }
        }
        graph.nodes.push(node);
    }
}

fn uses_batch_statistics(node: &Node) -> bool {
    is_batch_norm(&node.domain, &node.op)
        && matches!(node.attrs.int("training_mode"), Ok(Some(mode)) if mode != 0)
}

fn has_batch_statistics(graph: &Graph) -> bool {
    let within = |node: &Node| Graph::subgraphs(node).any(|(_, subgraph)| has_batch_statistics(subgraph));
    graph.nodes.iter().any(|node| uses_batch_statistics(node) || within(node))
}

/// Adds a node in both modes, and the selection between their results.
fn emit_choice(graph: &mut Graph, node: &Node, mode: ValueId) {
    let outputs = node.outputs.clone();
    let in_mode = |graph: &mut Graph, end: &str| {
        let mut mode = node.clone();
        for output in mode.outputs.iter_mut().flatten() {
            *output = graph.add_value(&format!("{}_{end}", graph.name_of(*output)), ValueType::Unknown);
        }
        graph.nodes.push(mode);
        graph.nodes.len() - 1
    };
    let of_batch = in_mode(graph, "of_batch");
    let running = in_mode(graph, "of_running");
    let [firsts, seconds] = [of_batch, running].map(|index| graph.nodes[index].outputs.clone());
    convert_to_inference(graph, running);
    for ((output, first), second) in outputs.iter().zip(firsts).zip(seconds) {
        if output.is_some() {
            let inputs = [Some(mode), first, second];
            graph.nodes.push(Node::new("", "Where", &inputs, &[*output], Attrs::new()));
        }
    }
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{DType, Tensor};
    use ortrain_onnx::{AttributeProto, ValueInfoProto};

    use super::*;
    use crate::passes::infer::infer;
    use crate::testing::{add, assert_close, f64s, generic_tensor, graph, run};

    const NORM: (&str, &str) = ("", "BatchNormalization");
    const MOMENTUM: f64 = 0.75;
    const EPSILON: f64 = 0.125;
    const SCALE: [f64; 2] = [1.5, 0.5];
    const BIAS: [f64; 2] = [0.1, -0.2];
    const RUNNING: [[f64; 2]; 2] = [[1.0, -1.0], [2.0, 3.0]];

    fn attrs() -> Attrs {
        let attrs = Attrs::new().with("training_mode", 1i64);
        attrs.with("momentum", MOMENTUM as f32).with("epsilon", EPSILON as f32)
    }

    /// Returns the flag, a batch of two channels, and the parameters of the normalization.
    fn inputs(mode: bool, x: &Tensor) -> Vec<Tensor> {
        let flag = Tensor::scalar(DType::Bool, f64::from(u8::from(mode)));
        let rest = [SCALE, BIAS, RUNNING[0], RUNNING[1]].map(|values| f64s(&[2], &values));
        [flag, x.clone()].into_iter().chain(rest).collect()
    }

    /// Returns the normalized batch, and the running statistics after it.
    fn expected(mode: bool, x: &Tensor) -> [Vec<f64>; 3] {
        let x = x.to_f64();
        let rows = x.len() / 2;
        let of = |c: usize| (0..rows).map(move |row| 2 * row + c);
        let mean = |c: usize| of(c).map(|k| x[k]).sum::<f64>() / rows as f64;
        let var = |c: usize| of(c).map(|k| (x[k] - mean(c)).powi(2)).sum::<f64>() / rows as f64;
        let batch = [[mean(0), mean(1)], [var(0), var(1)]];
        let used = if mode { batch } else { RUNNING };
        let normal = |k: usize| (x[k] - used[0][k % 2]) / (used[1][k % 2] + EPSILON).sqrt();
        let y = (0..x.len()).map(|k| normal(k) * SCALE[k % 2] + BIAS[k % 2]).collect();
        let moved = |k: usize| match mode {
            true => (0..2).map(|c| MOMENTUM * RUNNING[k][c] + (1.0 - MOMENTUM) * batch[k][c]).collect(),
            false => RUNNING[k].to_vec(),
        };
        [y, moved(0), moved(1)]
    }

    #[test]
    fn flag_selects_statistics() {
        let x = generic_tensor(&[3, 2], 1);
        for count in [1, 3] {
            let (mut graph, ids) = graph(&inputs(true, &x).iter().collect::<Vec<_>>());
            let ports: Vec<Option<ValueId>> = ids[1..].iter().copied().map(Some).collect();
            add(&mut graph, NORM, "y", &ports, count, attrs());
            choose_statistics(&mut graph, ids[0]);
            infer(&mut graph).expect("it has types");
            for mode in [true, false] {
                let results = run(&graph, &inputs(mode, &x)).expect("the graph runs");
                assert_eq!(results.len(), count);
                for (actual, expected) in results.iter().zip(expected(mode, &x)) {
                    assert_close(actual, &f64s(actual.dims(), &expected), 1e-12);
                }
            }
        }
    }

    #[test]
    fn flag_is_captured_by_branches() {
        let x = generic_tensor(&[3, 2], 1);
        let inputs_of_branch = inputs(true, &x);
        let half = |trains: bool| {
            let (mut half, ids) = graph(&inputs_of_branch[1..].iter().collect::<Vec<_>>());
            let ports: Vec<Option<ValueId>> = ids.into_iter().map(Some).collect();
            match trains {
                true => add(&mut half, NORM, "inner", &ports, 1, attrs()),
                false => add(&mut half, ("", "Identity"), "same", &ports[..1], 1, Attrs::new()),
            };
            half
        };
        let condition = Tensor::scalar(DType::Bool, 1.0);
        let all_ports: Vec<&Tensor> = std::iter::once(&condition).chain(&inputs_of_branch).collect();
        let (mut graph, ids) = graph(&all_ports);
        let ports: Vec<Option<ValueId>> = [ids[0]].iter().chain(&ids[2..]).copied().map(Some).collect();
        let attrs = Attrs::new().with("then_branch", half(true)).with("else_branch", half(false));
        add(&mut graph, ("", "If"), "y", &ports, 1, attrs);
        graph.nodes[0].captures = ports.len() - 1;
        choose_statistics(&mut graph, ids[1]);
        infer(&mut graph).expect("it has types");
        for mode in [true, false] {
            let feeds: Vec<Tensor> = std::iter::once(condition.clone()).chain(inputs(mode, &x)).collect();
            let results = run(&graph, &feeds).expect("the graph runs");
            assert_close(&results[0], &f64s(&[3, 2], &expected(mode, &x)[0]), 1e-12);
        }
    }

    fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
        let strings = |list: &[&str]| list.iter().map(|&name| name.to_owned()).collect();
        NodeProto {
            op_type: op.into(),
            input: strings(inputs),
            output: strings(outputs),
            ..NodeProto::default()
        }
    }

    fn with_branch(mut node: NodeProto, branch: GraphProto) -> NodeProto {
        node.attribute.push(AttributeProto { g: Some(Box::new(branch)), ..AttributeProto::default() });
        node
    }

    #[test]
    fn outputs_then_attribute_mark_training() {
        let old = node(NORM.1, &["x", "scale", "bias", "mean", "var"], &["y", "new_mean", "new_var"]);
        let mut new = node(NORM.1, &["x", "scale", "bias", "mean", "var"], &["y"]);
        new.attribute.push(AttributeProto {
            name: "training_mode".into(),
            i: 1,
            ..AttributeProto::default()
        });
        let graph = GraphProto { node: vec![old, new.clone(), new], ..GraphProto::default() };
        let outer = with_branch(node("If", &["condition"], &["z"]), graph.clone());
        let outer = GraphProto { node: vec![outer], ..GraphProto::default() };
        for graph in [graph, outer] {
            assert_eq!(count_batch_norm_modes(&graph, 13), (1, 2));
            assert_eq!(count_batch_norm_modes(&graph, 14), (2, 1));
        }
    }

    #[test]
    fn frees_training_mode_name() {
        let output = ValueInfoProto { name: TRAINING_MODE.into(), ..ValueInfoProto::default() };
        let branch = GraphProto {
            node: vec![node("Identity", &[TRAINING_MODE], &["inner"])],
            output: vec![output],
            ..GraphProto::default()
        };
        let outer = with_branch(node("If", &[TRAINING_MODE], &["z"]), branch);
        let flag = TensorProto { name: TRAINING_MODE.into(), ..TensorProto::default() };
        let mut graph = GraphProto {
            node: vec![node("Identity", &["x"], &["training_mode_1"]), outer],
            initializer: vec![flag],
            ..GraphProto::default()
        };
        free_training_mode(&mut graph);
        assert_eq!(graph.initializer[0].name, "training_mode_2");
        assert_eq!(graph.node[1].input, ["training_mode_2"]);
        let branch = graph.node[1].attribute[0].g.as_ref().expect("a branch");
        assert_eq!(branch.node[0].input, ["training_mode_2"]);
        assert_eq!(branch.output[0].name, "training_mode_2");
        let mut names = FxHashSet::default();
        collect_names(&graph, &mut names);
        assert!(!names.contains(TRAINING_MODE));
    }
}
