//! Training as one graph: forward pass, gradients, and nodes that update the weights (`onnxruntime.TrainingSession`).

use std::collections::BTreeMap;

use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId, ValueType};
use ortrain_onnx::{GraphProto, NodeProto};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::Registry;
use crate::families::optimizers::LAMB_OPTIMIZER;
use crate::optimizers::{NODE_OPTIMIZERS, Optimizer};
use crate::registry::normalize_domain;

/// Name of the input with the loss scale.
pub const LOSS_SCALE: &str = "loss_scale";
/// Name of the output with the norm of all gradients together.
pub const GRADIENT_NORM: &str = "global_gradient_norm";
/// Name of the output that is true if all gradients are finite.
pub const ALL_FINITE: &str = "all_gradients_finite";
/// Name of the output that signals the accumulation of gradients.
pub const ACCUMULATED: &str = "Group_Accumulated_Gradients";
/// Optimizer with one step counter for all parameters.
const SHARED_COUNTER: &str = LAMB_OPTIMIZER.name;

fn blocks_gradient(node: &NodeProto, input: usize) -> bool {
    let definition = Registry::standard().find(normalize_domain(&node.domain), &node.op_type);
    definition.is_some_and(|known| known.inputs_without_gradient.contains(&input))
}

/// Returns the value of a scalar float32 initializer of a message.
fn scalar_initializer(graph: &GraphProto, name: &str) -> Option<f32> {
    let tensor = graph.initializer.iter().find(|tensor| tensor.name == name)?;
    if !tensor.dims.is_empty() || tensor.data_type != DType::F32.to_onnx() {
        return None;
    }
    let raw = tensor.raw_data.get(..4).and_then(|bytes| bytes.try_into().ok()).map(f32::from_le_bytes);
    tensor.float_data.first().copied().or(raw)
}

/// Returns the initializers that are trained by default: the loss is computed from them through inputs with gradients.
/// `immutable` contains inputs of operators, and values of scalars that are not trained there.
#[must_use]
pub fn default_trained(
    graph: &GraphProto,
    loss: &str,
    immutable: &BTreeMap<String, Vec<(i64, f32)>>,
) -> Vec<String> {
    let makers: FxHashMap<&str, &NodeProto> = graph
        .node
        .iter()
        .flat_map(|node| node.output.iter().map(move |output| (output.as_str(), node)))
        .filter(|(name, _)| !name.is_empty())
        .collect();
    let initializers: FxHashSet<&str> = graph
        .initializer
        .iter()
        .filter(|tensor| DType::from_onnx(tensor.data_type).is_some_and(DType::is_float))
        .map(|tensor| tensor.name.as_str())
        .collect();
    let mut trained: FxHashSet<&str> = FxHashSet::default();
    let mut visited: FxHashSet<&str> = FxHashSet::default();
    let mut open = vec![loss];
    while let Some(value) = open.pop() {
        let Some(node) = makers.get(value).filter(|_| visited.insert(value)) else { continue };
        let immutable = immutable.get(&node.op_type).map_or(&[][..], Vec::as_slice);
        for (k, input) in node.input.iter().enumerate().filter(|&(k, _)| !blocks_gradient(node, k)) {
            if !initializers.contains(input.as_str()) {
                open.push(input);
                continue;
            }
            let fixed = immutable.iter().any(|&(at, value)| {
                usize::try_from(at).is_ok_and(|at| at == k) && scalar_initializer(graph, input) == Some(value)
            });
            if !fixed {
                trained.insert(input);
            }
        }
    }
    let in_order = graph.initializer.iter().filter(|tensor| trained.contains(tensor.name.as_str()));
    in_order.map(|tensor| tensor.name.clone()).collect()
}

/// Nodes at the end of a training graph.
#[derive(Clone, Debug, Default)]
pub struct Updates {
    /// Operator of the optimizer; `None` without updates.
    pub optimizer: Option<&'static str>,
    /// Name of the input with the learning rate.
    pub rate: String,
    /// Settings of each trained parameter.
    pub settings: Vec<BTreeMap<String, f64>>,
    /// True if the norm of all gradients together is computed.
    pub norm: bool,
    /// Type of copies of weights, if the forward pass reads them.
    pub copies: Option<DType>,
    /// Number of runs with gradients that are summed for one update.
    pub accumulated: i64,
}

/// Returns the table entry of an optimizer that runs as a node for each parameter.
#[must_use]
pub fn find_node_optimizer(name: &str) -> Option<&'static Optimizer> {
    NODE_OPTIMIZERS.iter().copied().find(|row| row.name == name)
}

/// Returns true for an optimizer with one step counter for all parameters.
#[must_use]
pub fn has_shared_counter(optimizer: &str) -> bool {
    optimizer == SHARED_COUNTER
}

/// Adds the product of the loss and the loss scale input. Returns the product: gradients are computed for it.
pub fn append_scaled_loss(graph: &mut Graph, loss: ValueId) -> ValueId {
    let scale = graph.add_value(LOSS_SCALE, ValueType::tensor(DType::F32, &[1]));
    graph.inputs.push(scale);
    let shape = graph.add_constant("loss_shape", Tensor::i64(&[0], &[]));
    let [scalar, factor] = ["loss_scale_scalar", "scaled_loss"].map(|name| {
        let dims: &[usize] = &[];
        graph.add_value(name, ValueType::tensor(DType::F32, dims))
    });
    let shape_of_loss = graph.value(loss).ty.clone();
    graph.value_mut(factor).ty = shape_of_loss;
    graph.nodes.push(Node::new("", "Reshape", &[Some(scale), Some(shape)], &[Some(scalar)], Attrs::new()));
    graph.nodes.push(Node::new("", "Mul", &[Some(loss), Some(scalar)], &[Some(factor)], Attrs::new()));
    factor
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(op: &str, inputs: &[&str], output: &str) -> NodeProto {
        NodeProto {
            op_type: op.into(),
            input: inputs.iter().map(ToString::to_string).collect(),
            output: vec![output.into()],
            ..NodeProto::default()
        }
    }

    #[test]
    fn finds_weights_backwards_from_loss() {
        let float = |name: &str, dims: &[i64], value: f32| ortrain_onnx::TensorProto {
            name: name.into(),
            dims: dims.to_vec(),
            data_type: DType::F32.to_onnx(),
            float_data: vec![value; dims.iter().product::<i64>() as usize],
            ..Default::default()
        };
        let graph = GraphProto {
            node: vec![
                node("MatMul", &["x", "w"], "h"),
                node("Mul", &["h", "two"], "doubled"),
                node("Pow", &["doubled", "exponent"], "power"),
                node("ReduceMean", &["power"], "loss"),
                node("Add", &["h", "aside"], "other"),
            ],
            initializer: vec![
                float("w", &[2, 2], 1.0),
                float("two", &[], 2.0),
                float("exponent", &[], 2.0),
                float("aside", &[2], 0.0),
            ],
            ..GraphProto::default()
        };
        let none = BTreeMap::new();
        assert_eq!(default_trained(&graph, "loss", &none), ["w", "two"]);
        let immutable = |value| BTreeMap::from([("Mul".to_owned(), vec![(1, value)])]);
        assert_eq!(default_trained(&graph, "loss", &immutable(2.0)), ["w"]);
        assert_eq!(default_trained(&graph, "loss", &immutable(3.0)), ["w", "two"]);
        assert_eq!(default_trained(&graph, "other", &none), ["w", "aside"]);
    }
}
