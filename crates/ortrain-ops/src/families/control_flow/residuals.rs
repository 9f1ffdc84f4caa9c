//! Parts of the body of a loop that its gradient uses.

use ortrain_graph::{DType, Graph, Node, Shape, Tensor, ValueId, ValueType};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::OpError;
use crate::op::Repetition;
use crate::support::random::draws_random_numbers;

/// Parts of the forward body that the gradient's body uses.
pub(super) struct Residuals {
    /// Values that the forward node collects.
    pub(super) saved: Vec<ValueId>,
    /// Slices that the gradient scans again.
    pub(super) slices: FxHashSet<ValueId>,
    /// Indices of forward nodes that the gradient recomputes.
    pub(super) recomputed: FxHashSet<usize>,
}

impl Residuals {
    /// Finds these parts for a graph of forward nodes, followed by the nodes of the gradient.
    pub(super) fn select(graph: &Graph, forward_nodes: usize, r: &Repetition) -> Result<Residuals, OpError> {
        let forward = &graph.nodes[..forward_nodes];
        let maker: FxHashMap<ValueId, usize> = forward
            .iter()
            .enumerate()
            .flat_map(|(index, node)| node.present_outputs().map(move |id| (id, index)))
            .collect();
        // Values that are the same in every iteration.
        let mut same: FxHashSet<ValueId> = graph.inputs[r.formal_inputs()..].iter().copied().collect();
        for node in forward {
            let is_same = |id: ValueId| same.contains(&id) || graph.value(id).constant.is_some();
            if node.present_inputs().all(is_same) && !draws_random_numbers(node) {
                same.extend(node.present_outputs());
            }
        }
        let slices = &graph.inputs[r.leading_inputs() + r.carried..r.formal_inputs()];
        let firsts = &graph.inputs[..r.leading_inputs() + r.carried];
        let mut residuals =
            Residuals { saved: Vec::new(), slices: FxHashSet::default(), recomputed: FxHashSet::default() };
        let mut visited: FxHashSet<ValueId> = FxHashSet::default();
        let later = graph.nodes[forward_nodes..].iter().flat_map(Node::present_inputs);
        let mut stack: Vec<ValueId> = later.chain(graph.outputs.iter().copied()).collect();
        stack.reverse();
        while let Some(id) = stack.pop() {
            if !visited.insert(id) || graph.value(id).constant.is_some() {
                continue;
            }
            let condition = r.conditional && id == graph.inputs[1];
            if slices.contains(&id) {
                residuals.slices.insert(id);
            } else if firsts.contains(&id) && !condition {
                residuals.saved.push(id);
            } else if let Some(&index) = maker.get(&id) {
                let node = &forward[index];
                let dtype = graph.value(id).ty.dtype();
                let is_integer = dtype.is_some_and(|dtype| !dtype.is_float() && dtype != DType::Bool);
                if matches!(graph.value(id).ty, ValueType::Sequence(_)) {
                    let name = graph.name_of(id);
                    return Err(OpError::unsupported(format!(
                        "the gradient needs the sequence {name:?} of every iteration, but only tensors can be collected"
                    )));
                }
                if same.contains(&id) || (is_integer && !draws_random_numbers(node)) {
                    residuals.recomputed.insert(index);
                    stack.extend(node.present_inputs());
                } else {
                    residuals.saved.push(id);
                }
            }
        }
        Ok(residuals)
    }

    /// Removes the forward nodes that are not recomputed.
    pub(super) fn retain_recomputed(&self, graph: &mut Graph, forward_nodes: usize, r: &Repetition) {
        let mut index = 0;
        graph.nodes.retain(|_| {
            index += 1;
            index > forward_nodes || self.recomputed.contains(&(index - 1))
        });
        // A recomputed node may also have an output that is saved. This output gets a new name.
        for index in 0..self.recomputed.len() {
            for port in 0..graph.nodes[index].outputs.len() {
                if let Some(id) = graph.nodes[index].outputs[port]
                    && self.saved.contains(&id)
                {
                    let name = format!("{}_again", graph.name_of(id));
                    let copy = graph.add_value(&name, graph.value(id).ty.clone());
                    graph.nodes[index].outputs[port] = Some(copy);
                }
            }
        }
        if r.conditional {
            let condition = graph.inputs[1];
            let dims = graph.value(condition).ty.shape().and_then(Shape::concrete).unwrap_or_default();
            graph.value_mut(condition).constant = Some(Tensor::filled(DType::Bool, &dims, 1.0));
        }
    }
}
