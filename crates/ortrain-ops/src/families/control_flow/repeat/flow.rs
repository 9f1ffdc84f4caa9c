//! Flow of gradients through the body of a loop.

use ortrain_graph::{Graph, Node, ValueId};
use rustc_hash::FxHashSet;

use super::Repeat;
use crate::dependence::{GradientValues, dependent_values};
use crate::grad::Grad;
use crate::op::Repetition;

/// Returns the values on which `ends` depend through floats and quantized tensors, including `ends`. Integers among the
/// targets are quantized tensors.
fn gradient_ancestors(
    graph: &Graph,
    targets: &[ValueId],
    ends: impl Iterator<Item = ValueId>,
) -> FxHashSet<ValueId> {
    let values = GradientValues::with_targets(graph, targets);
    let mut leading: FxHashSet<ValueId> = ends.collect();
    for node in graph.nodes.iter().rev() {
        if node.present_outputs().any(|output| leading.contains(&output)) {
            leading.extend(node.present_inputs().filter(|&id| values.contains(graph, id)));
        }
    }
    leading
}

/// Inputs and outputs of a body, by their role.
pub(super) struct Ports {
    pub(super) carried_in: Vec<ValueId>,
    pub(super) carried_out: Vec<ValueId>,
    pub(super) slices: Vec<ValueId>,
    pub(super) captured: Vec<ValueId>,
    pub(super) collected: Vec<ValueId>,
    /// Number of inputs of the node in front of the captured ones.
    pub(super) explicit_count: usize,
}

impl Ports {
    pub(super) fn new(node: &Node, body: &Graph, r: &Repetition) -> Ports {
        Ports {
            carried_in: body.inputs[r.leading_inputs()..][..r.carried].to_vec(),
            carried_out: body.outputs[r.leading_outputs()..][..r.carried].to_vec(),
            slices: body.inputs[r.leading_inputs() + r.carried..r.formal_inputs()].to_vec(),
            captured: body.inputs[r.formal_inputs()..].to_vec(),
            collected: body.outputs[r.leading_outputs() + r.carried..].to_vec(),
            explicit_count: node.inputs.len() - node.captures,
        }
    }
}

/// Values between which gradients may flow, as indices of carried values, slices, captured and collected values.
pub(super) struct Flow {
    pub(super) slices_with_grad: Vec<usize>,
    pub(super) captures_with_grad: Vec<usize>,
    /// Carried values that depend on values with a required gradient, over any number of iterations.
    pub(super) depends: Vec<bool>,
    /// Collected values with a gradient from outside.
    pub(super) arriving: Vec<usize>,
}

impl Flow {
    pub(super) fn new(repeat: &Repeat, cx: &Grad<'_>, body: &Graph, ports: &Ports) -> Flow {
        let r = &repeat.repetition;
        let slices_with_grad: Vec<usize> =
            (0..ports.slices.len()).filter(|&s| cx.needs_grad(repeat.scanned_input(s))).collect();
        let captures_with_grad: Vec<usize> =
            (0..ports.captured.len()).filter(|&c| cx.needs_grad(ports.explicit_count + c)).collect();
        let depends = (0..r.carried).map(|j| cx.needs_grad(repeat.carried_input(j))).collect();
        let arriving =
            (0..ports.collected.len()).filter(|&k| cx.output_grad(r.carried + k).is_some()).collect();
        let mut flow = Flow { slices_with_grad, captures_with_grad, depends, arriving };
        loop {
            let reached = dependent_values(body, &flow.targets(ports));
            let more =
                (0..r.carried).map(|j| flow.depends[j] || reached.contains(&ports.carried_out[j])).collect();
            if flow.depends == more {
                return flow;
            }
            flow.depends = more;
        }
    }

    /// Returns the indices of the carried values that depend on values with a required gradient.
    pub(super) fn followed(&self) -> Vec<usize> {
        (0..self.depends.len()).filter(|&j| self.depends[j]).collect()
    }

    /// Returns the inputs of the body that need a gradient: carried values, slices, captured values.
    pub(super) fn targets(&self, ports: &Ports) -> Vec<ValueId> {
        let carried = self.followed().into_iter().map(|j| ports.carried_in[j]);
        let slices = self.slices_with_grad.iter().map(|&s| ports.slices[s]);
        carried.chain(slices).chain(self.captures_with_grad.iter().map(|&c| ports.captured[c])).collect()
    }

    /// Returns the outputs of the body that may have a gradient: carried values and collected values.
    pub(super) fn sources(&self, ports: &Ports) -> Vec<ValueId> {
        let carried = self.followed().into_iter().map(|j| ports.carried_out[j]);
        carried.chain(self.arriving.iter().map(|&k| ports.collected[k])).collect()
    }

    /// Returns for each carried value whether it may have a gradient from outside or from a later iteration, if those
    /// of `arrives` have one from outside.
    pub(super) fn carried_gradients(&self, body: &Graph, ports: &Ports, arrives: &[bool]) -> Vec<bool> {
        let (mut carries, targets) = (arrives.to_vec(), self.targets(ports));
        loop {
            let through =
                ports.carried_out.iter().zip(&carries).filter(|(_, carries)| **carries).map(|(&id, _)| id);
            let collected = self.arriving.iter().map(|&k| ports.collected[k]);
            let reaching = gradient_ancestors(body, &targets, through.chain(collected));
            let more = (0..carries.len())
                .map(|j| carries[j] || self.depends[j] && reaching.contains(&ports.carried_in[j]))
                .collect();
            if carries == more {
                return carries;
            }
            carries = more;
        }
    }
}
