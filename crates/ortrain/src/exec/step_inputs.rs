//! Inputs of a step: some are copied, others are read from memory of the caller.

use ortrain_graph::Tensor;
use ortrain_program::{InputBytes, InputView, Memory};

/// Inputs of a program: copied ones, and others that are read in place.
#[derive(Clone, Copy)]
pub(crate) struct StepInputs<'a> {
    /// Copied inputs in model order.
    pub(crate) copied_values: &'a [InputView<'a>],
    /// Inputs that are read in place, with their positions among all inputs.
    pub(crate) in_place: &'a [(usize, InputView<'a>)],
}

impl<'a> StepInputs<'a> {
    /// Creates inputs that are all copied.
    pub(crate) fn all_copied(inputs: &'a [InputView<'a>]) -> StepInputs<'a> {
        StepInputs { copied_values: inputs, in_place: &[] }
    }

    /// Returns the memory of the inputs that are read in place.
    pub(crate) fn in_place_memories(&self) -> impl Iterator<Item = &'a Memory> + use<'a> {
        self.in_place.iter().filter_map(|(_, input)| input.memory().map(|memory| &**memory))
    }
}

/// Separates inputs: copied ones, and memory that is read in place.
pub(crate) fn split_inputs<'a>(
    inputs: &[InputView<'a>],
    copies: &'a [Option<Tensor>],
) -> (Vec<InputView<'a>>, Vec<(usize, InputView<'a>)>) {
    let (mut copied, mut in_place) = (Vec::with_capacity(inputs.len()), Vec::new());
    for (k, (input, copy)) in inputs.iter().zip(copies).enumerate() {
        match (input.bytes, copy) {
            (_, Some(tensor)) => copied.push(InputView::from(tensor)),
            (InputBytes::Host(_), None) => copied.push(*input),
            (InputBytes::Memory(_), None) => in_place.push((k, *input)),
            (InputBytes::Sequence(_), None) => {}
        }
    }
    (copied, in_place)
}
