//! The instruction at which the caller takes over.

use super::body::Body;
use crate::buffer::{Buffer, BufferId, is_work};
use crate::operand::Use;

/// The point of a program at which its caller takes over: it is given some values, and the rest of the program begins
/// when it has handed others in.
///
/// A forward pass ends here and its backward pass begins, with the gradients of what was given. Data alone decides which
/// instructions come before: none of those that make what is given needs what is taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Yield<T = BufferId> {
    /// The values that the caller is given, in order.
    pub outputs: Vec<T>,
    /// The values that the caller hands in, in order. Buffers are those of the arena that nothing else writes.
    pub inputs: Vec<T>,
}

impl Body for Yield {
    fn name(&self) -> &'static str {
        "Yield"
    }

    fn sizes(&self) -> String {
        format!("{} given, {} taken", self.outputs.len(), self.inputs.len())
    }

    fn buffers(&self, each: &mut dyn FnMut(BufferId, Use)) {
        self.outputs.iter().for_each(|&id| each(id, Use::Read));
        self.inputs.iter().for_each(|&id| each(id, Use::Write));
    }

    fn buffers_mut(&mut self, each: &mut dyn FnMut(&mut BufferId, Use)) {
        self.outputs.iter_mut().for_each(|id| each(id, Use::Read));
        self.inputs.iter_mut().for_each(|id| each(id, Use::Write));
    }

    /// The fault of a hand-over that takes a value which is not the caller's to give.
    fn validate(&self, buffers: &[Buffer]) -> Option<String> {
        let elsewhere = self.inputs.iter().find(|id| !is_work(buffers, **id))?;
        let label = &buffers[elsewhere.0 as usize].label;
        Some(format!("{label:?} cannot be handed in: it is no value of the arena"))
    }
}
