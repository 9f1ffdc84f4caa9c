//! The inputs of a step, of which some are read in memory of the caller's.

use ortrain_graph::Tensor;
use ortrain_program::{Given, Memory};

use crate::{Feed, Lent};

/// Inputs as a program takes them: those that are copied into it, and those that it reads where they lie.
#[derive(Clone, Copy)]
pub(crate) struct StepInputs<'a> {
    /// In the order of the model.
    pub(crate) given: &'a [Given<'a>],
    /// With their positions among all inputs.
    pub(crate) lent: &'a [(usize, Lent<'a>)],
}

impl<'a> StepInputs<'a> {
    /// Inputs that are all copied.
    pub(crate) fn copied(given: &'a [Given<'a>]) -> StepInputs<'a> {
        StepInputs { given, lent: &[] }
    }

    /// The memory of the inputs that are read where they lie.
    pub(crate) fn memories(&self) -> impl Iterator<Item = &'a Memory> + use<'a> {
        self.lent.iter().map(|(_, lent)| &**lent.memory)
    }
}

/// Feeds apart: those that are given or have a copy, and those that are lent.
pub(crate) fn split_inputs<'a>(
    feeds: &[Feed<'a>],
    copies: &'a [Option<Tensor>],
) -> (Vec<Given<'a>>, Vec<(usize, Lent<'a>)>) {
    let (mut given, mut lent) = (Vec::with_capacity(feeds.len()), Vec::new());
    for (k, (feed, copy)) in feeds.iter().zip(copies).enumerate() {
        match (feed, copy) {
            (_, Some(tensor)) => given.push(Given::from(tensor)),
            (Feed::Given(value), None) => given.push(*value),
            (Feed::Lent(value), None) => lent.push((k, *value)),
            (Feed::Sequence(_), None) => {}
        }
    }
    (given, lent)
}
