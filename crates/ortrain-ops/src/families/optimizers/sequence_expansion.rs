//! Expansion of optimizer models into single tensors.
//!
//! A model with steps that are not element-wise is expanded for the parameters of a state. Each input sequence is
//! replaced by its tensors, and each new tensor is written in place at the end.

use std::sync::Arc;

use ortrain_graph::{Attr, Attrs, DType, Dim, Graph, Node, Tensor, ValueId, ValueType};

use super::map_tensors::{BoundInputs, SETTINGS, add_snapshot, bound_inputs, overwritten_inputs};
use crate::Error;
use crate::passes::{infer::infer_known, versions::upgrade};
use crate::support::onnx_decomposition::NodeSink;
use crate::support::state_update::add_state_update;

/// Tensor of an input sequence of an optimizer model.
#[derive(Clone, Debug)]
pub struct SequenceTensor {
    /// Input that replaces the tensor.
    pub input: ValueId,
    /// Name of the sequence: `params`, `gradients`, or a slot.
    pub sequence: Arc<str>,
    /// Index of the parameter.
    pub parameter_index: usize,
}

/// Expands an optimizer model for the parameters of a state.
///
/// `types` returns the tensor types of a sequence; `count` is the number of tensors. Afterwards the inputs of the graph
/// are its own tensors, the table `settings`, and the returned tensors. The new values of the returned tensors
/// overwrite them.
///
/// # Errors
/// Returns an error if an output sequence overwrites no input, or the model uses sequences in an unsupported way.
pub fn expand_sequences(
    graph: &mut Graph,
    count: usize,
    types: &dyn Fn(&str) -> Option<Vec<ValueType>>,
) -> Result<(BoundInputs, Vec<SequenceTensor>), Error> {
    let bound = bound_inputs(graph)?;
    let overwritten = overwritten_inputs(graph)?;
    let mut members: Vec<SequenceTensor> = Vec::new();
    let mut first: Vec<Node> = Vec::new();
    let table = ValueType::tensor(DType::F64, &[count, bound.columns.len()]);
    let settings = graph.add_value(SETTINGS, table);
    let construct = |of: &[ValueId], sequence: ValueId| {
        let ports: Vec<Option<ValueId>> = of.iter().copied().map(Some).collect();
        match ports.is_empty() {
            true => Node::new("", "SequenceEmpty", &[], &[Some(sequence)], Attrs::new()),
            false => Node::new("", "SequenceConstruct", &ports, &[Some(sequence)], Attrs::new()),
        }
    };
    let mut inputs: Vec<ValueId> = Vec::new();
    let nodes = std::mem::take(&mut graph.nodes);
    for id in std::mem::take(&mut graph.inputs) {
        if !matches!(graph.value(id).ty, ValueType::Sequence(_)) {
            inputs.push(id);
            continue;
        }
        let name: Arc<str> = graph.value(id).name.clone();
        if let Some(column) = bound.columns.iter().position(|known| **known == *name) {
            // One scalar for each parameter.
            let mut scalars = Vec::with_capacity(count);
            let axes = graph.emit_constant(Tensor::i64(&[2], &[0, 1]));
            for at in 0..count {
                let mut pair = |values: [i64; 2]| graph.emit_constant(Tensor::i64(&[2], &values));
                let index = [at as i64, column as i64];
                let (start, end) = (pair(index), pair(index.map(|at| at + 1)));
                let element = graph.emit("Slice", &[settings, start, end, axes].map(Some), Attrs::new());
                scalars.push(graph.emit("Squeeze", &[element, axes].map(Some), Attrs::new()));
            }
            first.append(&mut graph.nodes);
            first.push(construct(&scalars, id));
            continue;
        }
        let Some(types) = types(&name) else {
            return Err(Error::Graph(format!("the sequence {name:?}, an input of the model, is unknown")));
        };
        let mut tensors = Vec::with_capacity(types.len());
        for (at, ty) in types.into_iter().enumerate() {
            let input = graph.add_value(&format!("{name}[{at}]"), ty);
            tensors.push(input);
            members.push(SequenceTensor { input, sequence: name.clone(), parameter_index: at });
        }
        inputs.extend(&tensors);
        first.push(construct(&tensors, id));
    }
    inputs.push(settings);
    graph.inputs = inputs;
    graph.nodes = first;
    graph.nodes.extend(nodes);
    // The new tensors are outputs temporarily, so that the rewrite does not remove them.
    let mut written: Vec<(ValueId, ValueId)> = Vec::new();
    let mut outputs: Vec<ValueId> = Vec::new();
    let mut lengths: Vec<(String, ValueId)> = Vec::new();
    for id in std::mem::take(&mut graph.outputs) {
        let Some(&state_input) = overwritten.get(&id) else {
            outputs.push(id);
            continue;
        };
        let name: Arc<str> = graph.value(state_input).name.clone();
        let length = graph.emit("SequenceLength", &[Some(id)], Attrs::new());
        lengths.push((graph.name_of(id).to_owned(), length));
        for member in members.iter().filter(|member| member.sequence == name) {
            let at = graph.emit_constant(Tensor::i64(&[], &[member.parameter_index as i64]));
            let new = graph.emit("SequenceAt", &[Some(id), Some(at)], Attrs::new());
            written.push((member.input, new));
        }
    }
    let new = written.iter().map(|&(_, new)| new);
    graph.outputs =
        outputs.iter().copied().chain(new).chain(lengths.iter().map(|&(_, length)| length)).collect();
    upgrade(graph)?;
    graph.outputs = outputs;
    for (name, length) in lengths {
        let maker = graph.nodes.iter().find(|node| node.present_outputs().any(|output| output == length));
        let length_value = match maker.and_then(|node| node.attrs.0.get("value")) {
            Some(Attr::Tensor(tensor)) => tensor.to_i64().and_then(|length| length.first().copied()),
            _ => None,
        };
        if length_value.is_some_and(|len| len != count as i64) {
            return Err(Error::Graph(format!(
                "its output {name:?} has {} tensors, but {count} parameters are trained",
                length_value.unwrap_or_default()
            )));
        }
    }
    // All new tensors are computed before the first write, because a new tensor may alias an input that is overwritten.
    let written: Vec<(ValueId, ValueId)> =
        written.into_iter().map(|(state, new)| (state, add_snapshot(graph, new))).collect();
    for (state, new) in written {
        add_state_update(graph, state, new);
    }
    // The rewrite removed the consumers of the sequences; their constructors are left.
    graph.nodes.retain(|node| &*node.op != "SequenceConstruct" && &*node.op != "SequenceEmpty");
    if let Some(error) = infer_known(graph).into_iter().next() {
        return Err(error);
    }
    let mismatched = members.iter().find(|member| {
        let known = |dim: &Dim| dim.known().is_some();
        !graph.value(member.input).ty.shape().is_some_and(|shape| shape.iter().all(known))
    });
    match mismatched {
        Some(member) => {
            Err(Error::Graph(format!("the shape of {:?} is not known", graph.name_of(member.input))))
        }
        None => Ok((bound, members)),
    }
}
