//! The class axis of scores `[batch, sequence, classes]` with fixed sizes: the labels of the first step determine it.
//!
//! ONNX has the classes on axis 1, as does the loss of a training model. Labels `[batch, sequence]` imply classes on
//! the last axis. A `Transpose` before the loss, and another one after its gradient, then move the classes to axis 1.

use ortrain_graph::{Attrs, DType, Graph, Node, Shape, ValueId, ValueType};

use super::losses::without_axis;
use crate::class::Class;
use crate::registry::class_of;

/// Class of the loss.
const LOSS: Class = Class::LabelLoss { of_logits: true };

/// Input index of the labels of the loss, and of the gradient.
const LABELS: usize = 1;
const LABELS_OF_GRADIENT: usize = 2;

/// Returns true if scores of this shape may have their classes on another axis than 1, and if the sizes of both are
/// known.
#[must_use]
pub fn is_class_axis_open(shape: &Shape) -> bool {
    shape.rank() > 2 && shape.iter().skip(1).all(|dim| dim.known().is_some())
}

/// Returns true if sizes match a shape.
fn matches_shape(shape: &Shape, dims: &[usize]) -> bool {
    shape.rank() == dims.len()
        && shape.iter().zip(dims).all(|(dim, &size)| dim.known().is_none_or(|known| known == size))
}

/// Returns the scores of the only loss that uses the labels, and their shape.
fn scores_for_labels(graph: &Graph, labels: ValueId) -> Option<(ValueId, &Shape)> {
    let is_loss = |node: &&Node| class_of(node) == LOSS && node.inputs.get(LABELS) == Some(&Some(labels));
    let mut losses = graph.nodes.iter().filter(is_loss);
    let scores = losses.next()?.inputs.first().copied().flatten()?;
    let shape = graph.value(scores).ty.shape().filter(|shape| shape.rank() > 2)?;
    losses.next().is_none().then_some((scores, shape))
}

/// Returns the graph with the classes of a loss on the last axis, if labels of these sizes imply this.
///
/// Returns `None` for other labels, if other nodes use the labels, for class weights of another length, and for a loss
/// without reduction. Smoothed labels are never ambiguous: other nodes use their scores.
#[must_use]
pub fn with_classes_last(graph: &Graph, labels: ValueId, dims: &[usize]) -> Option<Graph> {
    let (scores, shape) = scores_for_labels(graph, labels)?;
    let last = shape.rank() - 1;
    let (read, classes) = (without_axis(shape, last), shape[last].known()?);
    if !matches_shape(&read, dims) || matches_shape(&without_axis(shape, 1), dims) {
        return None;
    }
    let mut order: Vec<usize> = (0..=last).collect();
    order.insert(1, last);
    order.pop();
    let mut back: Vec<usize> = (0..=last).collect();
    let second = back.remove(1);
    back.push(second);
    let attrs = |order: &[usize]| {
        Attrs::new().with("perm", order.iter().map(|&axis| axis as i64).collect::<Vec<_>>())
    };
    let dtype = graph.value(scores).ty.dtype()?;
    let moved: Shape = order.iter().map(|&axis| shape[axis].clone()).collect();

    let mut changed = graph.clone();
    let mut nodes = Vec::with_capacity(graph.nodes.len() + 2);
    for node in &graph.nodes {
        let mut node = node.clone();
        let reads = |at: usize| node.inputs.get(at) == Some(&Some(labels));
        let is_loss = class_of(&node) == LOSS && reads(LABELS);
        let is_gradient = class_of(&node) == Class::LogitGradient && reads(LABELS_OF_GRADIENT);
        if !is_loss && !is_gradient {
            if node.present_inputs().any(|input| input == labels) {
                return None;
            }
            nodes.push(node);
            continue;
        }
        let weights = node.inputs.get(if is_loss { 2 } else { 3 }).copied().flatten();
        let count = weights.map(|id| graph.value(id).ty.shape().and_then(|shape| shape[0].known()));
        if count.is_some_and(|count| count != Some(classes))
            || node.attrs.string("reduction").ok().flatten().is_some_and(|reduction| reduction == "none")
        {
            return None;
        }
        let ty = ValueType::Tensor(dtype, Some(moved.clone()));
        if is_loss {
            let to = changed.add_value("classes_second", ty.clone());
            nodes.push(Node::new("", "Transpose", &[Some(scores)], &[Some(to)], attrs(&order)));
            node.inputs[0] = Some(to);
            if let Some(logs) = node.outputs.get(1).copied().flatten() {
                changed.value_mut(logs).ty = ty;
            }
            nodes.push(node);
        } else {
            let from = changed.add_value("gradient_with_classes_second", ty);
            let gradient = node.outputs[0];
            node.outputs[0] = Some(from);
            nodes.push(node);
            nodes.push(Node::new("", "Transpose", &[Some(from)], &[gradient], attrs(&back)));
        }
    }
    changed.nodes = nodes;
    changed.value_mut(labels).ty = ValueType::Tensor(DType::I64, Some(read));
    Some(changed)
}

/// Returns the sentence about a class axis that the labels of the first step determined.
#[must_use]
pub fn classes_last_note(graph: &Graph, labels: ValueId, dims: &[usize]) -> Option<String> {
    let (scores, shape) = scores_for_labels(graph, labels)?;
    let (last, ty) = (shape.rank() - 1, &graph.value(scores).ty);
    Some(format!(
        "the class axis of {:?} ({ty}) is assumed to be {last}, the last one, because {:?} has shape {dims:?}; \
         confirm it with class_axis={last} of the loss",
        graph.name_of(scores),
        graph.name_of(labels)
    ))
}

/// Returns the part of a sentence with the labels for both possible class axes, for labels of this name.
#[must_use]
pub fn label_readings(graph: &Graph, labels: &str) -> Option<String> {
    let labels = graph.find(labels)?;
    let (mut scores, mut shape) = scores_for_labels(graph, labels)?;
    let mut axis = 1;
    // Classes on a later axis were transposed.
    let maker = graph.nodes.iter().find(|node| node.present_outputs().any(|output| output == scores));
    if let Some(node) = maker.filter(|node| class_of(node) == Class::Transpose)
        && let Some(perm) = node.attrs.ints("perm").ok().flatten()
        && let [0, moved, rest @ ..] = perm
        && *moved > 1
        && rest.is_sorted()
        && let Some(from) = node.inputs[0]
        && let Some(label_shape) = graph.value(from).ty.shape()
    {
        (scores, shape, axis) = (from, label_shape, *moved as usize);
    }
    let other = if axis == 1 { shape.rank() - 1 } else { 1 };
    let [current_shape, other_shape] = [axis, other].map(|axis| without_axis(shape, axis));
    let dtype = graph.value(labels).ty.dtype()?;
    Some(format!(
        "; {:?} ({}) has its classes on axis {axis}, so labels are {dtype}{current_shape}. For classes on axis {other} and \
         labels {dtype}{other_shape} set class_axis={other} of the loss",
        graph.name_of(scores),
        graph.value(scores).ty
    ))
}
