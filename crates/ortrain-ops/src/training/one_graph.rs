//! Training as one graph: forward pass, gradients, and nodes that update the weights (`onnxruntime.TrainingSession`).

use std::collections::BTreeMap;

use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId, ValueType};
use ortrain_onnx::{GraphProto, NodeProto};
use rustc_hash::{FxHashMap, FxHashSet};

use super::MICROSOFT;
use crate::OpError;
use crate::Registry;
use crate::families::optimizers::{LAMB_OPTIMIZER, SGD_OPTIMIZER};
use crate::optimizers::{NODE_OPTIMIZERS, Optimizer, Start};
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
/// Optimizer with nodes that have neither a counter nor a loss scale.
const PLAIN: &str = SGD_OPTIMIZER.name;

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

/// Appender of nodes to a graph.
struct NodeAppender<'a> {
    graph: &'a mut Graph,
}

impl NodeAppender<'_> {
    fn value(&mut self, name: &str, ty: ValueType) -> ValueId {
        self.graph.add_value(name, ty)
    }

    fn node(
        &mut self,
        name: &str,
        op: &str,
        inputs: &[Option<ValueId>],
        outputs: &[Option<ValueId>],
        attrs: Attrs,
    ) {
        let mut node = Node::new(MICROSOFT, op, inputs, outputs, attrs);
        node.name = name.into();
        self.graph.nodes.push(node);
    }

    /// Adds a node of `ai.onnx`.
    fn onnx_node(&mut self, op: &str, inputs: &[ValueId], output: ValueId) {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.graph.nodes.push(Node::new("", op, &inputs, &[Some(output)], Attrs::new()));
    }

    /// Adds a value that is stored between runs.
    fn add_state(&mut self, name: &str, tensor: Tensor) -> ValueId {
        self.graph.add_constant(name, tensor)
    }
}

/// Adds to a graph with gradients the nodes that sum the gradients, test them and update the parameters. `parameters`
/// are constants of the graph, each with its gradient. Also appends outputs of the graph.
///
/// # Errors
/// Returns an error if a parameter has no shape.
pub fn append_updates(
    graph: &mut Graph,
    parameters: &[(ValueId, ValueId)],
    updates: &Updates,
) -> Result<(), OpError> {
    let mut w = NodeAppender { graph };
    let mut gradients: Vec<ValueId> = parameters.iter().map(|&(_, gradient)| gradient).collect();
    let mut zeroed: Vec<(ValueId, ValueId)> = Vec::new();
    if updates.accumulated > 1 {
        for (&(parameter, _), gradient) in parameters.iter().zip(&mut gradients) {
            let name = w.graph.name_of(parameter).to_owned();
            let dims = w.graph.value(parameter).ty.shape().and_then(ortrain_graph::Shape::concrete);
            let dims = dims.ok_or_else(|| OpError::invalid("a parameter has no shape"))?;
            let dtype = w.graph.value(parameter).ty.dtype().unwrap_or(DType::F32);
            let zeros = Tensor::zeros(dtype, dims).map_err(|source| OpError::invalid(source.to_string()))?;
            let buffer = w.add_state(&format!("{name}_grad_accumulate_buffer"), zeros);
            let ty = w.graph.value(buffer).ty.clone();
            let sum = w.value(&format!("{name}_grad_accumulator_output"), ty);
            w.node("", "InPlaceAccumulator", &[Some(buffer), Some(*gradient)], &[Some(sum)], Attrs::new());
            zeroed.push((sum, parameter));
            *gradient = sum;
        }
        let done = w.value(ACCUMULATED, ValueType::tensor(DType::Bool, &[]));
        let sums: Vec<Option<ValueId>> = gradients.iter().copied().map(Some).collect();
        w.node(ACCUMULATED, "Group", &sums, &[Some(done)], Attrs::new());
        w.graph.outputs.push(done);
        let share = w.add_state("accumulated_share", Tensor::f32(&[1], &[1.0 / updates.accumulated as f32]));
        for gradient in &mut gradients {
            let ty = w.graph.value(*gradient).ty.clone();
            let to = ty.dtype().unwrap_or(DType::F32).to_onnx();
            let mean = w.value(&format!("{}_mean", w.graph.name_of(*gradient)), ty);
            let attrs = Attrs::new().with("to", i64::from(to));
            w.node("", "MixedPrecisionScale", &[Some(share), Some(*gradient)], &[Some(mean)], attrs);
            *gradient = mean;
        }
    }
    let Some(row) = updates.optimizer.and_then(find_node_optimizer) else { return Ok(()) };
    let rate = w.value(&updates.rate, ValueType::tensor(DType::F32, &[1]));
    w.graph.inputs.push(rate);
    let (mut norm, mut finite) = (None, None);
    if updates.norm || updates.copies.is_some() {
        let dtype = w.graph.value(gradients[0]).ty.dtype().unwrap_or(DType::F32);
        let value = w.value(GRADIENT_NORM, ValueType::tensor(dtype, &[]));
        let ports: Vec<Option<ValueId>> = gradients.iter().copied().map(Some).collect();
        w.node(GRADIENT_NORM, "ReduceAllL2", &ports, &[Some(value)], Attrs::new());
        norm = Some(value);
        w.graph.outputs.push(value);
    }
    if let (Some(norm), Some(_)) = (norm, updates.copies) {
        let value = w.value(ALL_FINITE, ValueType::tensor(DType::Bool, &[]));
        w.node(ALL_FINITE, "IsAllFinite", &[Some(norm)], &[Some(value)], Attrs::new());
        finite = Some(value);
        w.graph.outputs.push(value);
    }
    let clip = if updates.norm { norm } else { None };
    let scale = updates.copies.and_then(|_| w.graph.find(LOSS_SCALE));
    let unit = || Tensor::i64(&[1], &[1]);
    let counter = |w: &mut NodeAppender<'_>, name: &str| {
        let before = w.add_state(name, unit());
        let ty = w.graph.value(before).ty.clone();
        (before, ty)
    };
    let mut shared: (Vec<Option<ValueId>>, Vec<Option<ValueId>>) = (Vec::new(), Vec::new());
    let mut lists: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for ((&(parameter, _), &gradient), settings) in parameters.iter().zip(&gradients).zip(&updates.settings) {
        let name = w.graph.name_of(parameter).to_owned();
        let gradient_name = format!("{name}_grad");
        let ty = w.graph.value(parameter).ty.clone();
        let mut slots = Vec::new();
        for slot in row.slots {
            debug_assert_eq!(slot.start, Start::Zero, "optimizers of nodes start at zero");
            let dims = ty.shape().and_then(ortrain_graph::Shape::concrete).unwrap_or_default();
            let dtype = if ty.dtype() == Some(DType::F64) { DType::F64 } else { DType::F32 };
            let zeros = Tensor::zeros(dtype, dims).map_err(|source| OpError::invalid(source.to_string()))?;
            let before = w.add_state(&format!("{}_{name}", slot.name), zeros);
            let ty = w.graph.value(before).ty.clone();
            let after = w.value(&format!("{}_{name}_Out", slot.name), ty);
            slots.push((before, after));
        }
        let copy = updates.copies.map(|dtype| {
            let value = w.graph.value(parameter).constant.as_ref().map(|tensor| tensor.converted(dtype));
            let tensor = value.unwrap_or_else(|| Tensor::filled(dtype, &[], 0.0));
            let before = w.add_state(&format!("{name}_fp16_before"), tensor);
            let ty = w.graph.value(before).ty.clone();
            (before, ty)
        });
        match row.name {
            PLAIN => {
                let new = w.value(&format!("{name}_SGD_out"), ty.clone());
                // The node supports neither a loss scale nor a signal.
                let (mut used_gradient, mut moved) = (gradient, new);
                if let (Some(scale), Some(_)) = (scale, finite) {
                    used_gradient = w.value(&format!("{gradient_name}_unscaled"), ty.clone());
                    w.onnx_node("Div", &[gradient, scale], used_gradient);
                    moved = w.value(&format!("{name}_SGD_moved"), ty);
                }
                let inputs = [Some(rate), Some(parameter), Some(used_gradient)];
                w.node(
                    &format!("{}_{name}", row.name),
                    row.name,
                    &inputs,
                    &[Some(moved), None],
                    Attrs::new(),
                );
                if let Some(finite) = finite {
                    w.onnx_node("Where", &[finite, moved, parameter], new);
                }
            }
            SHARED_COUNTER => {
                let new = w.value(&format!("{name}_Lamb_out"), ty);
                let copied = copy.map(|(before, ty)| (before, w.value(&format!("{name}_fp16_Lamb_out"), ty)));
                shared.0.extend([
                    Some(parameter),
                    Some(gradient),
                    Some(slots[0].0),
                    Some(slots[1].0),
                    copied.map(|c| c.0),
                ]);
                shared.1.extend([Some(new), None, Some(slots[0].1), Some(slots[1].1), copied.map(|c| c.1)]);
                for (setting, &value) in settings {
                    lists.entry(setting.clone()).or_default().push(value as f32);
                }
            }
            _ => {
                let (count, count_ty) = counter(&mut w, &format!("Update_Count_{name}"));
                let counted = w.value(&format!("{gradient_name}_Step_Out"), count_ty);
                let new = w.value(&format!("{name}_Adam_out"), ty);
                let copied = copy.map(|(before, ty)| (before, w.value(&format!("{name}_fp16_Adam_out"), ty)));
                let mut attrs = Attrs::new();
                for (setting, &value) in settings {
                    attrs = match setting.as_str() {
                        "do_bias_correction" | "weight_decay_mode" => attrs.with(setting, value as i64),
                        _ => attrs.with(setting, value as f32),
                    };
                }
                let inputs = [
                    Some(rate),
                    Some(count),
                    Some(parameter),
                    Some(gradient),
                    Some(slots[0].0),
                    Some(slots[1].0),
                    copied.map(|c| c.0),
                    scale,
                    clip,
                    finite,
                ];
                let outputs =
                    [Some(counted), Some(slots[0].1), Some(slots[1].1), Some(new), None, copied.map(|c| c.1)];
                w.node(&format!("{}_{name}", row.name), row.name, &inputs, &outputs, attrs);
            }
        }
    }
    if row.name == SHARED_COUNTER {
        let (count, ty) = counter(&mut w, "Step");
        let counted = w.value("Step_Out", ty);
        let mut attrs = Attrs::new();
        for (setting, values) in lists {
            let first = values.first().copied().unwrap_or_default();
            attrs = match setting.as_str() {
                "do_bias_correction" => attrs.with(&setting, first as i64),
                "ratio_min" | "ratio_max" => attrs.with(&setting, first),
                _ => attrs.with(&setting, values),
            };
        }
        let inputs: Vec<Option<ValueId>> =
            [finite, scale, clip, Some(rate), Some(count)].into_iter().chain(shared.0).collect();
        let outputs: Vec<Option<ValueId>> = std::iter::once(Some(counted)).chain(shared.1).collect();
        w.node(&format!("{}_AllWeights", row.name), row.name, &inputs, &outputs, attrs);
    }
    for (sum, parameter) in zeroed {
        let name = w.graph.name_of(parameter).to_owned();
        let ty = w.graph.value(sum).ty.clone();
        let zero = w.value(&format!("{name}_grad_zeroed"), ty);
        let signal = finite.or(norm).unwrap_or(sum);
        w.node("", "ZeroGradient", &[Some(sum), Some(signal)], &[Some(zero)], Attrs::new());
    }
    Ok(())
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
