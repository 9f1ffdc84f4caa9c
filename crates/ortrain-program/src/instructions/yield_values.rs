//! Instruction that yields to the caller in the middle of a run.

use super::body::Body;
use crate::buffer::{Buffer, BufferId, is_work};
use crate::operand::Use;

/// Point of a program that passes control to the caller. The caller receives the outputs. The rest of the program
/// starts when the caller has supplied the inputs.
///
/// A forward pass ends here, and its backward pass begins with the gradients of the outputs. Only data dependencies
/// decide which instructions come before. The outputs must not depend on the inputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Yield<T = BufferId> {
    /// Values that the caller receives, in order.
    pub outputs: Vec<T>,
    /// Values that the caller supplies, in order. Their buffers are in the work arena and have no other writer.
    pub inputs: Vec<T>,
}

impl Body for Yield {
    fn name(&self) -> &'static str {
        "Yield"
    }

    fn describe_sizes(&self) -> String {
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

    /// Returns a fault if an input is not in the work arena: the caller cannot supply such a value.
    fn validate(&self, buffers: &[Buffer]) -> Option<String> {
        let outside_arena = self.inputs.iter().find(|id| !is_work(buffers, **id))?;
        let label = &buffers[outside_arena.0 as usize].label;
        Some(format!("{label:?} cannot be an input of the yield: it is not in the work arena"))
    }
}
