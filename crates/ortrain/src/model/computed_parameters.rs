//! Computed parameters: some models have no initializers for weights, but nodes that compute them from
//! constants.

use std::sync::Arc;

use ortrain_graph::{DType, Graph, Tensor, ValueId, tensor_to_proto};
use ortrain_onnx::proto::TensorProto;
use ortrain_onnx::{AttributeProto, GraphProto, LoadedModel, ModelProto, NodeProto};
use ortrain_ops::passes::{
    functions::{is_custom_gradient, unwrap_gradients},
    infer::infer,
    versions::upgrade,
};
use ortrain_program::{GradientMode, Scalars, Workspace};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::exec::executable_cache::ExecutableCache;
use crate::model::graph::graph_for;
use crate::model::node_inputs::collect_inputs;
use crate::{Error, Result, default_backend};

/// Returns the values that nodes compute from constants alone, without the constants themselves.
fn computed_constants(graph: &Graph) -> FxHashSet<ValueId> {
    let mut names = FxHashSet::default();
    // The graph's nodes are in topological order.
    for node in &graph.nodes {
        if node.present_inputs().all(|id| graph.value(id).constant.is_some() || names.contains(&id)) {
            names.extend(node.present_outputs());
        }
    }
    names
}

/// Converts the values in `parameters` that nodes compute from constants alone to initializers. Returns the names
/// of all values that could be converted.
///
/// The values are computed now. Nodes and initializers without other uses are removed. The parts of the model
/// that `needed` does not depend on may contain unsupported operators.
///
/// Values in `independent` may be computed from each other (copies, as some exporters write equal values).
/// They become independent parameters.
///
/// # Errors
/// If a value cannot be computed, or is computed from another value in `parameters`.
pub(crate) fn make_initializers(
    label: &str,
    model: &mut LoadedModel,
    parameters: &FxHashSet<&str>,
    independent: &[String],
    needed: &[&str],
) -> Result<FxHashSet<Arc<str>>> {
    let mut graph = graph_for(label, model, needed)?;
    let computed = computed_constants(&graph);
    let computable = computed.iter().map(|&id| graph.value(id).name.clone()).collect();
    // In node order, so that results do not depend on the order of the names.
    let ids: Vec<ValueId> = graph
        .nodes
        .iter()
        .flat_map(ortrain_graph::Node::present_outputs)
        .filter(|id| computed.contains(id) && parameters.contains(graph.name_of(*id)))
        .collect();
    if ids.is_empty() {
        return Ok(computable);
    }
    reject_dependent_parameters(&graph, &ids, parameters, independent)?;
    let names: Vec<Arc<str>> = ids.iter().map(|&id| graph.value(id).name.clone()).collect();
    graph.outputs = ids;
    graph.remove_unused();
    graph.inputs.clear();
    let values = compute_outputs(label, graph)?;
    if let Some(message) = &mut model.proto.graph {
        remove_producers(message, &names);
        let tensors = names.iter().zip(&values).map(|(name, value)| tensor_to_proto(name, value));
        message.initializer.extend(tensors);
        message.value_info.retain(|info| !names.iter().any(|name| **name == info.name));
    }
    Ok(computable)
}

/// Returns the float constants of subgraphs that can be parameters after [`lift_from_subgraphs`]. Their names
/// are unique in the model.
pub(crate) fn constants_of_subgraphs(model: &ModelProto) -> Vec<String> {
    let Some(graph) = &model.graph else { return Vec::new() };
    let mut names = Vec::new();
    let mut defined: FxHashMap<&str, usize> = FxHashMap::default();
    collect_constants(graph, true, &mut names, &mut defined);
    names.retain(|name| defined.get(name) == Some(&1));
    names.into_iter().map(str::to_owned).collect()
}

/// Collects the float constants in the subgraphs of a graph, and counts the definitions of each name.
fn collect_constants<'a>(
    graph: &'a GraphProto,
    outermost: bool,
    constants: &mut Vec<&'a str>,
    defined: &mut FxHashMap<&'a str, usize>,
) {
    let is_float = |tensor: &TensorProto| DType::from_onnx(tensor.data_type).is_some_and(DType::is_float);
    let names = graph.initializer.iter().map(|tensor| tensor.name.as_str());
    let inputs = graph.input.iter().map(|info| info.name.as_str());
    let inputs = inputs.filter(|name| !graph.initializer.iter().any(|tensor| tensor.name == *name));
    let outputs = graph.node.iter().flat_map(|node| node.output.iter().map(String::as_str));
    for name in names.chain(inputs).chain(outputs).filter(|name| !name.is_empty()) {
        *defined.entry(name).or_default() += 1;
    }
    if !outermost {
        let initializers = graph.initializer.iter().filter(|tensor| is_float(tensor));
        constants.extend(initializers.map(|tensor| tensor.name.as_str()));
    }
    // The body of a node with a custom gradient is private to the node.
    for node in graph.node.iter().filter(|node| !is_custom_gradient(node)) {
        // A constant is a node with its value as the only attribute.
        let holds = |attribute: &AttributeProto| match attribute.name.as_str() {
            "value" => attribute.t.as_deref().is_some_and(is_float),
            "value_float" | "value_floats" => true,
            _ => false,
        };
        if let (false, true, [output], [attribute]) =
            (outermost, node.input.is_empty(), node.output.as_slice(), node.attribute.as_slice())
            && holds(attribute)
        {
            constants.push(output);
        }
        for attribute in &node.attribute {
            for subgraph in attribute.g.as_deref().into_iter().chain(&attribute.graphs) {
                collect_constants(subgraph, false, constants, defined);
            }
        }
    }
}

/// Moves constants of subgraphs to the main graph, so that they can be parameters: initializers, and outputs
/// of nodes without inputs.
///
/// # Errors
/// If a constant is computed inside a subgraph, or its name has different values in different subgraphs.
pub(crate) fn lift_from_subgraphs(label: &str, model: &mut ModelProto, names: &[&str]) -> Result<()> {
    let Some(graph) = &mut model.graph else { return Ok(()) };
    for &name in names {
        let mut lifted = LiftedConstants::default();
        extract_constant(graph, name, &mut lifted);
        let is_used = graph.initializer.iter().any(|tensor| tensor.name == name)
            || graph.input.iter().any(|info| info.name == name)
            || graph.node.iter().any(|node| node.output.iter().any(|output| output == name));
        let count = lifted.initializers.len() + lifted.nodes.len();
        if is_used || count != 1 {
            return Err(Error::WrongModel {
                model: label.to_owned(),
                reason: if count == 0 {
                    format!(
                        "running statistic {name:?} is computed inside a subgraph, but it must be a parameter; make \
                         it an initializer"
                    )
                } else {
                    format!(
                        "several subgraphs have a value {name:?}, and one of them is a parameter; rename the others"
                    )
                },
            });
        }
        graph.initializer.extend(lifted.initializers);
        graph.node.splice(0..0, lifted.nodes);
    }
    Ok(())
}

/// Definitions found in subgraphs.
#[derive(Default)]
struct LiftedConstants {
    initializers: Vec<TensorProto>,
    nodes: Vec<NodeProto>,
}

/// Removes the definitions of a value from the subgraphs of a graph, and collects them.
fn extract_constant(graph: &mut GraphProto, name: &str, lifted: &mut LiftedConstants) {
    for attribute in graph.node.iter_mut().flat_map(|node| &mut node.attribute) {
        for subgraph in attribute.g.as_deref_mut().into_iter().chain(&mut attribute.graphs) {
            extract_constant(subgraph, name, lifted);
            lifted.initializers.extend(subgraph.initializer.extract_if(.., |tensor| tensor.name == name));
            let makes = |node: &mut NodeProto| node.input.is_empty() && node.output == [name];
            lifted.nodes.extend(subgraph.node.extract_if(.., makes));
            subgraph.value_info.retain(|info| info.name != name);
        }
    }
}

/// Rejects a parameter that is computed from another parameter: it would no longer follow its changes.
fn reject_dependent_parameters(
    graph: &Graph,
    ids: &[ValueId],
    parameters: &FxHashSet<&str>,
    independent: &[String],
) -> Result<()> {
    let producers = graph.producers();
    let is_independent = |id: ValueId| independent.iter().any(|name| name == graph.name_of(id));
    let mut visited = FxHashSet::default();
    // Values, each with the parameter from which it was reached.
    let mut rest: Vec<(ValueId, ValueId)> = ids.iter().map(|&id| (id, id)).collect();
    while let Some((id, parameter)) = rest.pop() {
        let both_independent = is_independent(id) && is_independent(parameter);
        if id != parameter && parameters.contains(graph.name_of(id)) && !both_independent {
            return Err(Error::Argument(format!(
                "parameter {:?} is computed from parameter {:?} and would no longer follow it; name only one of them",
                graph.name_of(parameter),
                graph.name_of(id)
            )));
        }
        if let (true, Some(index)) = (visited.insert(id), producers[id.0 as usize]) {
            rest.extend(graph.nodes[index].present_inputs().map(|input| (input, parameter)));
        }
    }
    Ok(())
}

/// Computes the outputs of a graph without inputs.
fn compute_outputs(label: &str, mut graph: Graph) -> Result<Vec<Tensor>> {
    let fail = |source| Error::model(label, source);
    upgrade(&mut graph).map_err(fail)?;
    unwrap_gradients(&mut graph).map_err(fail)?;
    infer(&mut graph).map_err(fail)?;
    let mut values = Vec::with_capacity(graph.outputs.len());
    let backend = default_backend()?;
    let mut work = Workspace::new(backend.clone());
    let mut runners = ExecutableCache::new(graph, Vec::new(), backend);
    runners.run(&mut work, &[], GradientMode::Accumulate, Scalars::default(), &[], &mut |_, value| {
        values.push(value.to_tensor()?);
        Ok(())
    })?;
    Ok(values)
}

/// Disconnects values from the nodes that compute them, then removes nodes and initializers without remaining
/// uses.
fn remove_producers(graph: &mut GraphProto, names: &[Arc<str>]) {
    let mut producers: FxHashMap<String, usize> = FxHashMap::default();
    let mut uses: FxHashMap<String, usize> = FxHashMap::default();
    let mut inputs: Vec<FxHashSet<String>> = Vec::with_capacity(graph.node.len());
    for (index, node) in graph.node.iter().enumerate() {
        let mut of_node = FxHashSet::default();
        collect_inputs(node, &mut of_node);
        for name in &of_node {
            *uses.entry(name.clone()).or_default() += 1;
        }
        inputs.push(of_node);
        producers.extend(node.output.iter().map(|name| (name.clone(), index)));
    }
    for info in &graph.output {
        *uses.entry(info.name.clone()).or_default() += 1;
    }

    let mut used_names: FxHashSet<String> = producers.keys().chain(uses.keys()).cloned().collect();
    used_names.extend(graph.input.iter().map(|info| info.name.clone()));
    used_names.extend(graph.initializer.iter().map(|tensor| tensor.name.clone()));
    let mut doubtful = Vec::with_capacity(names.len());
    for name in names {
        let Some(index) = producers.remove(&**name) else { continue };
        // The node remains if another of its outputs is used; then this output is unused.
        let mut other = format!("{name}/computed");
        while !used_names.insert(other.clone()) {
            other.push('_');
        }
        if let Some(output) = graph.node[index].output.iter_mut().find(|output| **output == **name) {
            *output = other;
        }
        doubtful.push(index);
    }
    let mut gone = vec![false; graph.node.len()];
    let mut unused: FxHashSet<String> = FxHashSet::default();
    let is_used =
        |uses: &FxHashMap<String, usize>, name: &str| uses.get(name).is_some_and(|&count| count > 0);
    while let Some(index) = doubtful.pop() {
        if gone[index] || graph.node[index].output.iter().any(|name| is_used(&uses, name)) {
            continue;
        }
        gone[index] = true;
        for name in &inputs[index] {
            let count = uses.get_mut(name).expect("the use was counted");
            *count -= 1;
            if *count == 0 {
                match producers.get(name) {
                    Some(&producer) => doubtful.push(producer),
                    None => drop(unused.insert(name.clone())),
                }
            }
        }
    }
    let mut index = 0;
    graph.node.retain(|_| {
        index += 1;
        !gone[index - 1]
    });
    graph.initializer.retain(|tensor| !unused.contains(&tensor.name));
    let is_unused = |values: &ortrain_onnx::proto::TensorProto| unused.contains(&values.name);
    graph.sparse_initializer.retain(|sparse| !sparse.values.as_ref().is_some_and(is_unused));
}

#[cfg(test)]
mod tests {
    use ortrain_onnx::{NodeProto, ValueInfoProto};

    use super::*;

    fn strings(list: &[&str]) -> Vec<String> {
        list.iter().map(|&name| name.to_owned()).collect()
    }

    fn node(inputs: &[&str], outputs: &[&str]) -> NodeProto {
        NodeProto { input: strings(inputs), output: strings(outputs), ..NodeProto::default() }
    }

    fn graph(nodes: &[NodeProto], initializers: &[&str], output: &str) -> GraphProto {
        let tensor = |&name: &&str| tensor_to_proto(name, &Tensor::f32(&[1], &[1.0]));
        GraphProto {
            node: nodes.to_vec(),
            initializer: initializers.iter().map(tensor).collect(),
            output: vec![ValueInfoProto { name: output.into(), ..ValueInfoProto::default() }],
            ..GraphProto::default()
        }
    }

    fn remaining(mut graph: GraphProto, names: &[&str]) -> (Vec<Vec<String>>, Vec<String>) {
        let names: Vec<Arc<str>> = names.iter().map(|&name| name.into()).collect();
        remove_producers(&mut graph, &names);
        (
            graph.node.into_iter().map(|node| node.output).collect(),
            graph.initializer.into_iter().map(|tensor| tensor.name).collect(),
        )
    }

    #[test]
    fn removes_producers_without_other_uses() {
        let nodes = [node(&["a"], &["b"]), node(&["b", "b", "c"], &["w"]), node(&["x", "w", "c"], &["y"])];
        let remaining_graph = remaining(graph(&nodes, &["a", "c", "d"], "y"), &["w"]);
        assert_eq!(remaining_graph, (vec![strings(&["y"])], strings(&["c", "d"])));
    }

    #[test]
    fn keeps_producers_with_other_outputs() {
        let nodes = [node(&["a"], &["w", "v"]), node(&["w", "v", "w/computed"], &["y"])];
        let remaining_graph = remaining(graph(&nodes, &["a", "w/computed"], "y"), &["w"]);
        let expected = vec![strings(&["w/computed_", "v"]), strings(&["y"])];
        assert_eq!(remaining_graph, (expected, strings(&["a", "w/computed"])));
        let remaining_both = remaining(graph(&nodes, &["a", "w/computed"], "y"), &["w", "v"]);
        assert_eq!(remaining_both, (vec![strings(&["y"])], strings(&["w/computed"])));
    }

    #[test]
    fn graph_outputs_count_as_uses() {
        let nodes = [node(&["a"], &["b"]), node(&["b"], &["w"])];
        let remaining_graph = remaining(graph(&nodes, &["a"], "b"), &["w"]);
        assert_eq!(remaining_graph, (vec![strings(&["b"])], strings(&["a"])));
    }
}
