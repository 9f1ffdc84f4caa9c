//! Nodes of a training graph that sum the gradients, test them, and update the parameters.

use std::collections::BTreeMap;

use ortrain_graph::{Attrs, DType, Graph, Node, Shape, Tensor, ValueId, ValueType};

use super::MICROSOFT;
use super::one_graph::{
    ACCUMULATED, ALL_FINITE, GRADIENT_NORM, LOSS_SCALE, Updates, find_node_optimizer, has_shared_counter,
};
use crate::OpError;
use crate::families::optimizers::SGD_OPTIMIZER;
use crate::optimizers::{Optimizer, Start};

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

/// Inputs that the steps of all parameters share.
struct Signals {
    rate: ValueId,
    /// Loss scale, if the training has one.
    scale: Option<ValueId>,
    /// Norm of all gradients, if a node computes it.
    norm: Option<ValueId>,
    /// Norm by which gradients are clipped.
    clip: Option<ValueId>,
    /// Result of the test that all gradients are finite.
    finite: Option<ValueId>,
}

/// A parameter and the tensors of its step.
struct Step<'a> {
    name: String,
    ty: ValueType,
    parameter: ValueId,
    gradient: ValueId,
    settings: &'a BTreeMap<String, f64>,
    /// States of the optimizer before and after the step.
    slots: Vec<(ValueId, ValueId)>,
    /// Copy of the parameter in a narrow type.
    copy: Option<(ValueId, ValueType)>,
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
        zeroed = sum_gradients(&mut w, parameters, &mut gradients)?;
        divide_sums(&mut w, &mut gradients, updates.accumulated);
    }
    let Some(row) = updates.optimizer.and_then(find_node_optimizer) else { return Ok(()) };
    let signals = append_signals(&mut w, &gradients, updates);
    let mut shared = SharedStep::default();
    for ((&(parameter, _), &gradient), settings) in parameters.iter().zip(&gradients).zip(&updates.settings) {
        let step = Step::new(&mut w, row, (parameter, gradient), settings, updates.copies)?;
        match row.name {
            PLAIN => append_plain_step(&mut w, &step, &signals),
            name if has_shared_counter(name) => shared.add(&mut w, &step),
            name => append_own_step(&mut w, name, &step, &signals),
        }
    }
    if has_shared_counter(row.name) {
        shared.append(&mut w, row.name, &signals);
    }
    for (sum, parameter) in zeroed {
        let name = w.graph.name_of(parameter).to_owned();
        let ty = w.graph.value(sum).ty.clone();
        let zero = w.value(&format!("{name}_grad_zeroed"), ty);
        let signal = signals.finite.or(signals.norm).unwrap_or(sum);
        w.node("", "ZeroGradient", &[Some(sum), Some(signal)], &[Some(zero)], Attrs::new());
    }
    Ok(())
}

/// Adds each gradient to its buffer. Replaces the gradients by the sums, and returns the sums with their parameters.
fn sum_gradients(
    w: &mut NodeAppender<'_>,
    parameters: &[(ValueId, ValueId)],
    gradients: &mut [ValueId],
) -> Result<Vec<(ValueId, ValueId)>, OpError> {
    let mut sums = Vec::with_capacity(parameters.len());
    for (&(parameter, _), gradient) in parameters.iter().zip(gradients.iter_mut()) {
        let name = w.graph.name_of(parameter).to_owned();
        let dims = w.graph.value(parameter).ty.shape().and_then(Shape::concrete);
        let dims = dims.ok_or_else(|| OpError::invalid("a parameter has no shape"))?;
        let dtype = w.graph.value(parameter).ty.dtype().unwrap_or(DType::F32);
        let buffer = w.add_state(&format!("{name}_grad_accumulate_buffer"), zeros(dtype, dims)?);
        let ty = w.graph.value(buffer).ty.clone();
        let sum = w.value(&format!("{name}_grad_accumulator_output"), ty);
        w.node("", "InPlaceAccumulator", &[Some(buffer), Some(*gradient)], &[Some(sum)], Attrs::new());
        sums.push((sum, parameter));
        *gradient = sum;
    }
    let done = w.value(ACCUMULATED, ValueType::tensor(DType::Bool, &[]));
    let all: Vec<Option<ValueId>> = gradients.iter().copied().map(Some).collect();
    w.node(ACCUMULATED, "Group", &all, &[Some(done)], Attrs::new());
    w.graph.outputs.push(done);
    Ok(sums)
}

/// Replaces sums of gradients by means.
fn divide_sums(w: &mut NodeAppender<'_>, gradients: &mut [ValueId], accumulated: i64) {
    let share = w.add_state("accumulated_share", Tensor::f32(&[1], &[1.0 / accumulated as f32]));
    for gradient in gradients {
        let ty = w.graph.value(*gradient).ty.clone();
        let to = ty.dtype().unwrap_or(DType::F32).to_onnx();
        let mean = w.value(&format!("{}_mean", w.graph.name_of(*gradient)), ty);
        let attrs = Attrs::new().with("to", i64::from(to));
        w.node("", "MixedPrecisionScale", &[Some(share), Some(*gradient)], &[Some(mean)], attrs);
        *gradient = mean;
    }
}

/// Adds the input of the learning rate, and the nodes that compute the norm of the gradients and test it.
fn append_signals(w: &mut NodeAppender<'_>, gradients: &[ValueId], updates: &Updates) -> Signals {
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
    Signals { rate, scale, norm, clip, finite }
}

fn zeros(dtype: DType, dims: Vec<usize>) -> Result<Tensor, OpError> {
    Tensor::zeros(dtype, dims).map_err(|source| OpError::invalid(source.to_string()))
}

/// Adds a counter of steps, which starts at one.
fn add_counter(w: &mut NodeAppender<'_>, name: &str) -> (ValueId, ValueType) {
    let before = w.add_state(name, Tensor::i64(&[1], &[1]));
    (before, w.graph.value(before).ty.clone())
}

impl<'a> Step<'a> {
    /// Adds the states of the optimizer, and the copy in the type `copies`.
    fn new(
        w: &mut NodeAppender<'_>,
        row: &Optimizer,
        (parameter, gradient): (ValueId, ValueId),
        settings: &'a BTreeMap<String, f64>,
        copies: Option<DType>,
    ) -> Result<Step<'a>, OpError> {
        let name = w.graph.name_of(parameter).to_owned();
        let ty = w.graph.value(parameter).ty.clone();
        let mut slots = Vec::new();
        for slot in row.slots {
            debug_assert_eq!(slot.start, Start::Zero, "optimizers of nodes start at zero");
            let dims = ty.shape().and_then(Shape::concrete).unwrap_or_default();
            let dtype = if ty.dtype() == Some(DType::F64) { DType::F64 } else { DType::F32 };
            let before = w.add_state(&format!("{}_{name}", slot.name), zeros(dtype, dims)?);
            let ty = w.graph.value(before).ty.clone();
            let after = w.value(&format!("{}_{name}_Out", slot.name), ty);
            slots.push((before, after));
        }
        let copy = copies.map(|dtype| {
            let value = w.graph.value(parameter).constant.as_ref().map(|tensor| tensor.converted(dtype));
            let tensor = value.unwrap_or_else(|| Tensor::filled(dtype, &[], 0.0));
            let before = w.add_state(&format!("{name}_fp16_before"), tensor);
            let ty = w.graph.value(before).ty.clone();
            (before, ty)
        });
        Ok(Step { name, ty, parameter, gradient, settings, slots, copy })
    }

    /// Adds the copy after the step; returns the copies before and after.
    fn copied(&self, w: &mut NodeAppender<'_>, suffix: &str) -> (Option<ValueId>, Option<ValueId>) {
        let name = format!("{}_fp16_{suffix}", self.name);
        let copied = self.copy.clone().map(|(before, ty)| (before, w.value(&name, ty)));
        (copied.map(|c| c.0), copied.map(|c| c.1))
    }
}

/// Optimizer with neither a step counter nor a loss scale as an input.
const PLAIN: &str = SGD_OPTIMIZER.name;

/// Adds the step of a node that supports neither a loss scale nor a signal.
fn append_plain_step(w: &mut NodeAppender<'_>, step: &Step<'_>, signals: &Signals) {
    let name = &step.name;
    let new = w.value(&format!("{name}_SGD_out"), step.ty.clone());
    let (mut used_gradient, mut moved) = (step.gradient, new);
    if let (Some(scale), Some(_)) = (signals.scale, signals.finite) {
        used_gradient = w.value(&format!("{name}_grad_unscaled"), step.ty.clone());
        w.onnx_node("Div", &[step.gradient, scale], used_gradient);
        moved = w.value(&format!("{name}_SGD_moved"), step.ty.clone());
    }
    let inputs = [Some(signals.rate), Some(step.parameter), Some(used_gradient)];
    w.node(&format!("{PLAIN}_{name}"), PLAIN, &inputs, &[Some(moved), None], Attrs::new());
    if let Some(finite) = signals.finite {
        w.onnx_node("Where", &[finite, moved, step.parameter], new);
    }
}

/// Adds the step of a node with a counter of its own.
fn append_own_step(w: &mut NodeAppender<'_>, optimizer: &str, step: &Step<'_>, signals: &Signals) {
    let name = &step.name;
    let (count, count_ty) = add_counter(w, &format!("Update_Count_{name}"));
    let counted = w.value(&format!("{name}_grad_Step_Out"), count_ty);
    let new = w.value(&format!("{name}_Adam_out"), step.ty.clone());
    let (copy, copied) = step.copied(w, "Adam_out");
    let mut attrs = Attrs::new();
    for (setting, &value) in step.settings {
        attrs = match setting.as_str() {
            "do_bias_correction" | "weight_decay_mode" => attrs.with(setting, value as i64),
            _ => attrs.with(setting, value as f32),
        };
    }
    let slots = &step.slots;
    let inputs = [
        Some(signals.rate),
        Some(count),
        Some(step.parameter),
        Some(step.gradient),
        Some(slots[0].0),
        Some(slots[1].0),
        copy,
        signals.scale,
        signals.clip,
        signals.finite,
    ];
    let outputs = [Some(counted), Some(slots[0].1), Some(slots[1].1), Some(new), None, copied];
    w.node(&format!("{optimizer}_{name}"), optimizer, &inputs, &outputs, attrs);
}

/// Step of one node with one counter for all parameters.
#[derive(Default)]
struct SharedStep {
    inputs: Vec<Option<ValueId>>,
    outputs: Vec<Option<ValueId>>,
    settings: BTreeMap<String, Vec<f32>>,
}

impl SharedStep {
    fn add(&mut self, w: &mut NodeAppender<'_>, step: &Step<'_>) {
        let new = w.value(&format!("{}_Lamb_out", step.name), step.ty.clone());
        let (copy, copied) = step.copied(w, "Lamb_out");
        let slots = &step.slots;
        let (parameter, gradient) = (Some(step.parameter), Some(step.gradient));
        self.inputs.extend([parameter, gradient, Some(slots[0].0), Some(slots[1].0), copy]);
        self.outputs.extend([Some(new), None, Some(slots[0].1), Some(slots[1].1), copied]);
        for (setting, &value) in step.settings {
            self.settings.entry(setting.clone()).or_default().push(value as f32);
        }
    }

    fn append(self, w: &mut NodeAppender<'_>, optimizer: &str, signals: &Signals) {
        let (count, ty) = add_counter(w, "Step");
        let counted = w.value("Step_Out", ty);
        let mut attrs = Attrs::new();
        for (setting, values) in self.settings {
            let first = values.first().copied().unwrap_or_default();
            attrs = match setting.as_str() {
                "do_bias_correction" => attrs.with(&setting, first as i64),
                "ratio_min" | "ratio_max" => attrs.with(&setting, first),
                _ => attrs.with(&setting, values),
            };
        }
        let Signals { rate, scale, clip, finite, .. } = *signals;
        let first = [finite, scale, clip, Some(rate), Some(count)];
        let inputs: Vec<Option<ValueId>> = first.into_iter().chain(self.inputs).collect();
        let outputs: Vec<Option<ValueId>> = std::iter::once(Some(counted)).chain(self.outputs).collect();
        w.node(&format!("{optimizer}_AllWeights"), optimizer, &inputs, &outputs, attrs);
    }
}
