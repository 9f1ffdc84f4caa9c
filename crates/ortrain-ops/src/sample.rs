//! Sample of a node that an operator accepts.

use ortrain_graph::{Attrs, DType, ValueType};

/// Node that an operator accepts.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Attributes.
    pub attrs: Attrs,
    /// Types of the inputs; `None` for a missing input.
    pub inputs: Vec<Option<ValueType>>,
    /// Number of inputs that subgraphs capture.
    pub captures: usize,
    /// Declared type of the output, if it is required.
    pub output: Option<ValueType>,
}

impl Sample {
    /// Creates a sample with these attributes. Its inputs are found by trial.
    #[must_use]
    pub fn of(attrs: Attrs) -> Sample {
        Sample { attrs, ..Sample::default() }
    }

    /// Creates a sample with inputs of these types and sizes.
    #[must_use]
    pub fn with_inputs(attrs: Attrs, inputs: &[(DType, &[usize])]) -> Sample {
        let inputs = inputs.iter().map(|&(dtype, dims)| Some(ValueType::tensor(dtype, dims))).collect();
        Sample { attrs, inputs, ..Sample::default() }
    }
}
