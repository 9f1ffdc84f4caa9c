//! Mixed precision: converts the values of a float32 forward graph to float16 or bfloat16, except inputs, weights and
//! loss.
//!
//! Weights stay float32 as master weights, and are read through a cast. The loss, the loss operators, all values
//! computed from them, and inputs that an operator needs in float32 (Dropout's ratio, running statistics) stay float32.
//! A node that cannot use the narrow type stays float32 between casts: its operator does not accept the type, its
//! inputs are constants, or it contains a subgraph. (Micikevicius et al., "Mixed Precision Training", 2018.)

use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId, ValueType};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::Error;
use crate::class::{Class, Traits};
use crate::passes::node::infer_node;
use crate::registry::{class_of, definition_of, has_traits};
use crate::training::master_weight_node;

/// Converts the values of a forward graph to the narrow type, except some that stay float32 (see the module). Weights
/// are read through casts; `weights` maps each weight to the name of its cast's result.
///
/// # Errors
/// Returns an error if the types of a node cannot be inferred.
pub fn mixed_precision(
    graph: &mut Graph,
    narrow: DType,
    loss: ValueId,
    weights: &FxHashMap<ValueId, String>,
) -> Result<(), Error> {
    let wide_nodes = depends_on_loss(graph, loss);
    narrow_nodes(graph, narrow, weights, wide_nodes)
}

/// Converts the values and constants of a graph for inference to the narrow type, except inputs and outputs, which
/// keep their names and float32.
///
/// # Errors
/// Returns an error if the types of a node cannot be inferred.
pub fn narrow_values(graph: &mut Graph, narrow: DType) -> Result<(), Error> {
    let wide_outputs: Vec<usize> = (0..graph.outputs.len())
        .filter(|&k| graph.value(graph.outputs[k]).ty.dtype() == Some(DType::F32))
        .collect();
    let count = graph.nodes.len();
    narrow_nodes(graph, narrow, &FxHashMap::default(), vec![false; count])?;
    for k in wide_outputs {
        let result = graph.outputs[k];
        if graph.value(result).ty.dtype() == Some(narrow) {
            let name = graph.name_of(result).to_owned();
            let ty = ValueType::Tensor(DType::F32, graph.value(result).ty.shape().cloned());
            graph.rename(result, &format!("{name}_{narrow}"));
            graph.outputs[k] = graph.add_value(&name, ty);
            graph.nodes.push(cast_node(result, graph.outputs[k], DType::F32));
        }
    }
    Ok(())
}

/// Returns a node that converts a value to another type.
fn cast_node(value: ValueId, result: ValueId, to: DType) -> Node {
    let attrs = Attrs::new().with("to", i64::from(to.to_onnx()));
    Node::new("", "Cast", &[Some(value)], &[Some(result)], attrs)
}

/// Converts the nodes of a graph, except wide ones, to the narrow type.
fn narrow_nodes(
    graph: &mut Graph,
    narrow: DType,
    weights: &FxHashMap<ValueId, String>,
    wide_nodes: Vec<bool>,
) -> Result<(), Error> {
    let nodes = std::mem::take(&mut graph.nodes);
    let mut pass = NarrowingPass { graph, narrow, weights, converted: FxHashMap::default() };
    for (node, is_wide) in nodes.into_iter().zip(wide_nodes) {
        let has_subgraph = Graph::subgraphs(&node).next().is_some();
        if is_wide || has_subgraph || pass.has_constant_floats(&node) || !pass.push_narrow(&node) {
            pass.push_wide(node)?;
        }
    }
    Ok(())
}

/// Returns true for each node that is a loss operator, produces the loss, or depends on it.
fn depends_on_loss(graph: &Graph, loss: ValueId) -> Vec<bool> {
    let mut from_loss: FxHashSet<ValueId> = FxHashSet::default();
    (graph.nodes.iter())
        .map(|node| {
            let is_dependent = has_traits(node, Traits::COMPUTES_LOSS)
                || node.present_outputs().any(|output| output == loss)
                || node.present_inputs().any(|input| from_loss.contains(&input));
            if is_dependent {
                from_loss.extend(node.present_outputs());
            }
            is_dependent
        })
        .collect()
}

struct NarrowingPass<'a> {
    graph: &'a mut Graph,
    narrow: DType,
    weights: &'a FxHashMap<ValueId, String>,
    /// Values in the other type, by the original value.
    converted: FxHashMap<ValueId, ValueId>,
}

impl NarrowingPass<'_> {
    /// Returns a value converted to another type.
    fn converted_value(&mut self, value: ValueId, to: DType) -> ValueId {
        if let Some(&existing) = self.converted.get(&value) {
            return existing;
        }
        let name = self.graph.name_of(value).to_owned();
        let entry = self.graph.value(value);
        let copy_id = if let Some(constant) = &entry.constant {
            let constant =
                if to == self.narrow { convert_in_range(constant, to) } else { constant.converted(to) };
            self.graph.add_constant(&format!("{name}_{to}"), constant)
        } else {
            let ty = ValueType::Tensor(to, entry.ty.shape().cloned());
            let copy = self.weights.get(&value).cloned();
            let cast_value =
                self.graph.add_value(&copy.clone().unwrap_or_else(|| format!("{name}_{to}")), ty);
            let mut node = cast_node(value, cast_value, to);
            if copy.is_some() {
                node.name = master_weight_node(&name).into();
            }
            self.graph.nodes.push(node);
            cast_value
        };
        self.converted.insert(value, copy_id);
        copy_id
    }

    /// Adds a node with narrow inputs instead of float32 inputs. Returns false, and adds nothing, if its operator does
    /// not accept them.
    fn push_narrow(&mut self, node: &Node) -> bool {
        let wide = definition_of(node).map_or(&[][..], |definition| definition.kept_inputs);
        let is_wide = |graph: &Graph, id: ValueId| graph.value(id).ty.dtype() == Some(DType::F32);
        let before = self.graph.nodes.len();
        let known: FxHashSet<ValueId> = self.converted.keys().copied().collect();
        let mut changed = node.clone();
        for (k, input) in changed.inputs.iter_mut().enumerate() {
            if let Some(id) = *input
                && !wide.contains(&k)
                && is_wide(self.graph, id)
            {
                *input = Some(self.converted_value(id, self.narrow));
            }
        }
        if let Some(to) = changed.attrs.int("to").ok().flatten()
            && class_of(node) == Class::Cast
            && to == i64::from(DType::F32.to_onnx())
        {
            changed.attrs = changed.attrs.clone().with("to", i64::from(self.narrow.to_onnx()));
        }
        let types: Vec<(ValueId, ValueType)> =
            node.present_outputs().map(|id| (id, self.graph.value(id).ty.clone())).collect();
        for (id, ty) in &types {
            if ty.dtype() == Some(DType::F32) {
                self.graph.value_mut(*id).ty = ValueType::Unknown;
            }
        }
        self.graph.nodes.push(changed);
        let accepted = infer_node(self.graph, self.graph.nodes.len() - 1).is_ok();
        if accepted {
            for (id, ty) in types {
                let inferred = &self.graph.value(id).ty;
                // A declared shape is kept if inference does not find it.
                if inferred.shape().is_none()
                    && let Some(dtype) = inferred.dtype()
                {
                    self.graph.value_mut(id).ty = ValueType::Tensor(dtype, ty.shape().cloned());
                }
            }
            return true;
        }
        // Restores the previous state, without the casts for this node.
        self.graph.nodes.truncate(before);
        self.converted.retain(|value, _| known.contains(value));
        types.into_iter().for_each(|(id, ty)| self.graph.value_mut(id).ty = ty);
        false
    }

    /// Returns true if the float inputs of a node are constants, such as positions, which need their full precision.
    fn has_constant_floats(&self, node: &Node) -> bool {
        let floats: Vec<bool> = (node.present_inputs().map(|id| self.graph.value(id)))
            .filter(|value| value.ty.dtype().is_some_and(DType::is_float))
            .map(|value| value.constant.is_some())
            .collect();
        !floats.is_empty() && floats.iter().all(|&constant| constant)
    }

    /// Adds a node with its original float32 inputs.
    fn push_wide(&mut self, mut node: Node) -> Result<(), Error> {
        for input in &mut node.inputs {
            if let Some(id) = *input
                && self.graph.value(id).ty.dtype() == Some(self.narrow)
                && self.was_wide(id)
            {
                *input = Some(self.converted_value(id, DType::F32));
            }
        }
        self.graph.nodes.push(node);
        infer_node(self.graph, self.graph.nodes.len() - 1)
    }

    /// Returns true unless a value is narrow in the model itself: an input, or a constant.
    fn was_wide(&self, id: ValueId) -> bool {
        !self.graph.inputs.contains(&id) && self.graph.value(id).constant.is_none()
    }
}

/// Converts a constant to a narrow type. Finite nonzero elements stay finite and nonzero: a mask with the lowest
/// float32 becomes a mask with the lowest number of the narrow type.
fn convert_in_range(constant: &Tensor, to: DType) -> Tensor {
    let (lower, upper) = match to {
        // 2^-24 is the smallest subnormal number.
        DType::F16 => (2f64.powi(-24), 65504.0),
        _ => (0.0, 2f64.powi(127) * (2.0 - 2f64.powi(-7))),
    };
    let fitted = |value: f64| match value {
        value if !value.is_finite() || value == 0.0 => value,
        value => value.abs().clamp(lower, upper).copysign(value),
    };
    let values: Vec<f64> = constant.to_f64().into_iter().map(fitted).collect();
    Tensor::from_f64(to, constant.dims().to_vec(), &values)
}

#[cfg(test)]
mod tests {
    use ortrain_expr::DType::{F16, F32};

    use super::*;
    use crate::passes::infer::infer;

    fn value(graph: &mut Graph, name: &str, dtype: DType, dims: &[usize]) -> ValueId {
        graph.add_value(name, ValueType::tensor(dtype, dims))
    }

    /// Builds `loss = SoftmaxCrossEntropyLoss(Dropout(x w + mask, ratio), labels)`.
    fn network() -> (Graph, ValueId, ValueId) {
        let mut graph = Graph::new("");
        let x = value(&mut graph, "x", F32, &[2, 3]);
        let weight = value(&mut graph, "w", F32, &[3, 4]);
        let labels = value(&mut graph, "labels", DType::I64, &[2]);
        graph.inputs = vec![x, weight, labels];
        let mask = graph.add_constant("mask", Tensor::f32(&[4], &[0.0, f32::MIN, 1e-12, 1.0]));
        let ratio = graph.add_constant("ratio", Tensor::scalar(F32, 0.5));
        let product = graph.emit_node("MatMul", &[x, weight]);
        let masked = graph.emit_node("Add", &[product, mask]);
        let dropped = graph.emit_node("Dropout", &[masked, ratio]);
        let loss = graph.emit_node("SoftmaxCrossEntropyLoss", &[dropped, labels]);
        let twice = graph.emit_node("Add", &[loss, loss]);
        graph.outputs = vec![twice, dropped];
        infer(&mut graph).expect("the graph is valid");
        (graph, weight, twice)
    }

    trait EmitNode {
        fn emit_node(&mut self, op: &str, inputs: &[ValueId]) -> ValueId;
    }

    impl EmitNode for Graph {
        fn emit_node(&mut self, op: &str, inputs: &[ValueId]) -> ValueId {
            let output = self.add_value(&format!("{op}_{}", self.nodes.len()), ValueType::Unknown);
            let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
            self.nodes.push(Node::new("", op, &inputs, &[Some(output)], Attrs::new()));
            output
        }
    }

    #[test]
    fn loss_and_ratio_remain_float32() {
        let (mut graph, weight, loss) = network();
        let names = [(weight, "w_fp16".to_owned())].into_iter().collect();
        mixed_precision(&mut graph, F16, loss, &names).expect("it fits");
        let ops: Vec<&str> = graph.nodes.iter().map(|node| &*node.op).collect();
        let expected = ["Cast", "Cast", "MatMul", "Add", "Dropout", "Cast", "SoftmaxCrossEntropyLoss", "Add"];
        assert_eq!(ops, expected);
        assert_eq!(&*graph.nodes[1].name, "w/master_weight");
        assert_eq!(graph.name_of(graph.nodes[1].outputs[0].expect("it has one")), "w_fp16");
        let dtypes: Vec<Option<DType>> = graph.outputs.iter().map(|&id| graph.value(id).ty.dtype()).collect();
        assert_eq!(dtypes, [Some(F32), Some(F16)]);
        let ratio = graph.nodes[4].inputs[1].expect("it has a ratio");
        assert_eq!(graph.value(ratio).ty.dtype(), Some(F32));
    }

    #[test]
    fn outputs_keep_their_names_and_float32() {
        let (mut graph, _, _) = network();
        let names = |graph: &Graph| -> Vec<String> {
            graph.outputs.iter().map(|&id| graph.name_of(id).to_owned()).collect()
        };
        let before = names(&graph);
        narrow_values(&mut graph, F16).expect("it fits");
        assert_eq!(names(&graph), before);
        let dtypes: Vec<Option<DType>> = graph.outputs.iter().map(|&id| graph.value(id).ty.dtype()).collect();
        assert_eq!(dtypes, [Some(F32), Some(F32)]);
        infer(&mut graph).expect("the graph is valid");
    }

    #[test]
    fn constants_remain_finite_and_nonzero() {
        let (mut graph, _, loss) = network();
        mixed_precision(&mut graph, F16, loss, &FxHashMap::default()).expect("it fits");
        let mask = graph.nodes[3].inputs[1].expect("it adds the mask");
        let mask = graph.value(mask).constant.as_ref().expect("it is constant").to_f64();
        assert_eq!(mask, [0.0, -65504.0, 2f64.powi(-24), 1.0]);
    }

    #[test]
    fn incompatible_nodes_remain_float32() {
        let mut graph = Graph::new("");
        let boxes = value(&mut graph, "boxes", F32, &[1, 3, 4]);
        let scores = value(&mut graph, "scores", F32, &[1, 1, 3]);
        graph.inputs = vec![boxes, scores];
        let doubled = graph.emit_node("Add", &[scores, scores]);
        let selected = graph.emit_node("NonMaxSuppression", &[boxes, doubled]);
        graph.outputs = vec![selected];
        infer(&mut graph).expect("the graph is valid");
        mixed_precision(&mut graph, F16, boxes, &FxHashMap::default()).expect("it fits");
        let ops: Vec<&str> = graph.nodes.iter().map(|node| &*node.op).collect();
        assert_eq!(ops, ["Cast", "Add", "Cast", "NonMaxSuppression"]);
        let last = graph.nodes.last().expect("there are nodes");
        assert!(last.present_inputs().all(|id| graph.value(id).ty.dtype() == Some(F32)), "{graph}");
    }

    #[test]
    fn constant_nodes_remain_float32() {
        let mut graph = Graph::new("");
        let x = value(&mut graph, "x", F32, &[1]);
        graph.inputs = vec![x];
        let [start, limit] =
            [0.0, 3.0].map(|number| graph.add_constant("number", Tensor::scalar(F32, number)));
        let range = graph.emit_node("Range", &[start, limit, limit]);
        let sum = graph.emit_node("Add", &[x, range]);
        let loss = graph.emit_node("ReduceSum", &[sum]);
        graph.outputs = vec![loss];
        infer(&mut graph).expect("the graph is valid");
        mixed_precision(&mut graph, F16, loss, &FxHashMap::default()).expect("it fits");
        let ops: Vec<&str> = graph.nodes.iter().map(|node| &*node.op).collect();
        assert_eq!(ops, ["Range", "Cast", "Cast", "Add", "Cast", "ReduceSum"]);
    }
}
