//! Inputs of a step: some are copied, others are read from memory of the caller.

use ortrain_graph::Tensor;
use ortrain_program::{Memory, RunInput};

use crate::{Feed, Lent};

/// Inputs of a program: copied ones, and others that are read in place.
#[derive(Clone, Copy)]
pub(crate) struct StepInputs<'a> {
    /// Copied inputs in model order.
    pub(crate) copied_values: &'a [RunInput<'a>],
    /// Inputs that are read in place, with their positions among all inputs.
    pub(crate) in_place: &'a [(usize, Lent<'a>)],
}

impl<'a> StepInputs<'a> {
    /// Creates inputs that are all copied.
    pub(crate) fn all_copied(inputs: &'a [RunInput<'a>]) -> StepInputs<'a> {
        StepInputs { copied_values: inputs, in_place: &[] }
    }

    /// Returns the memory of the inputs that are read in place.
    pub(crate) fn in_place_memories(&self) -> impl Iterator<Item = &'a Memory> + use<'a> {
        self.in_place.iter().map(|(_, lent)| &**lent.memory)
    }
}

/// Separates feeds: values and copies, and memory that is read in place.
pub(crate) fn split_inputs<'a>(
    feeds: &[Feed<'a>],
    copies: &'a [Option<Tensor>],
) -> (Vec<RunInput<'a>>, Vec<(usize, Lent<'a>)>) {
    let (mut copied, mut lent) = (Vec::with_capacity(feeds.len()), Vec::new());
    for (k, (feed, copy)) in feeds.iter().zip(copies).enumerate() {
        match (feed, copy) {
            (_, Some(tensor)) => copied.push(RunInput::from(tensor)),
            (Feed::Tensor(value), None) => copied.push(*value),
            (Feed::Lent(value), None) => lent.push((k, *value)),
            (Feed::Sequence(_), None) => {}
        }
    }
    (copied, lent)
}
