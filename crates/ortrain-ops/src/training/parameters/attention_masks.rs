//! Masks of the scores of an attention.

use ortrain_graph::ValueId;
use rustc_hash::FxHashSet;

use super::ConstantUses;
use super::names;
use super::values::element;
use crate::class::Class;
use crate::training::parameters::levels::DependencyLevel;

/// Maximum term that removes a score from a softmax: the weight is below 1e-21.
pub(super) const MASK_TERM: f64 = -50.0;

impl ConstantUses<'_> {
    /// Returns the node that adds a mask to the scores of an attention, if a constant is one.
    ///
    /// A mask hides some scores. A tensor of zeros is a mask if it has a name from the exporter, and no size for the
    /// heads.
    pub(super) fn masked_scores(&self, id: ValueId) -> Option<String> {
        let tensor = self.graph.value(id).content()?;
        let (mut has_mask, mut all_valid) = (false, true);
        for score in (0..tensor.len()).map(|k| element(tensor, k)) {
            has_mask |= score.is_some_and(|score| score <= MASK_TERM);
            all_valid &= score.is_some_and(|score| score == 0.0 || score <= MASK_TERM);
        }
        if !all_valid
            || !(has_mask || self.is_generated_constant(id) || names::is_operator(self.graph.name_of(id)))
        {
            return None;
        }
        let meetings = self.data_meetings(id);
        let first = meetings.first().map(|&(node, _)| self.graph.node_label(&self.graph.nodes[node]))?;
        let is_added = |node: usize, input: usize| {
            let other = self.graph.nodes[node].inputs.get(1 - input.min(1)).copied().flatten();
            let compared = other.is_some_and(|other| self.compares_data(other));
            self.class(node) == Class::Add
                && compared
                && (has_mask || !self.differs_by_head(node, input))
                && self.outputs(node).any(|output| self.reaches_softmax(output))
        };
        meetings.iter().all(|&(node, input)| is_added(node, input)).then_some(first)
    }

    /// Returns true if a term of scores `[batch, heads, queries, keys]` has a size above 1 at the axis of the heads.
    pub(super) fn differs_by_head(&self, node: usize, input: usize) -> bool {
        let inputs = &self.graph.nodes[node].inputs;
        let shape = |input: usize| {
            let value = inputs.get(input).copied().flatten()?;
            self.graph.value(value).ty.shape().map(|shape| &shape.0[..])
        };
        let (Some(term), Some(scores)) = (shape(input), shape(1 - input.min(1))) else { return false };
        let heads = term.len().checked_sub(3).and_then(|axis| term[axis].known());
        scores.len() >= 4 && heads.is_some_and(|heads| heads > 1)
    }

    /// Returns true if a softmax reads a value or moves of it, possibly with further terms.
    pub(super) fn reaches_softmax(&self, id: ValueId) -> bool {
        let mut visited = FxHashSet::from_iter([id]);
        let mut rest = vec![id];
        while let Some(id) = rest.pop() {
            for (node, _) in self.readers_of(id) {
                match self.class(node) {
                    Class::Softmax { log: false } => return true,
                    class if class == Class::Add || self.moves(node) => {
                        rest.extend(self.outputs(node).filter(|output| visited.insert(*output)));
                    }
                    _ => {}
                }
            }
        }
        false
    }

    /// Returns true for a product of two values that both depend on data, possibly moved and scaled.
    pub(super) fn compares_data(&self, mut id: ValueId) -> bool {
        while let Some(maker) = self.producers[id.0 as usize] {
            let node = &self.graph.nodes[maker];
            let mut data = node.present_inputs().filter(|&id| self.level(id) > DependencyLevel::Shape);
            id = match (self.class(maker), data.next(), data.next()) {
                (Class::MatrixProduct | Class::ScaledProduct | Class::Contraction, Some(_), Some(_)) => {
                    return true;
                }
                // A positional bias, computed from learned tables.
                (Class::Add, Some(first), Some(_)) => first,
                (class, Some(only), None) if class.is_arithmetic() || self.moves(maker) => only,
                _ => return false,
            };
        }
        false
    }
}
