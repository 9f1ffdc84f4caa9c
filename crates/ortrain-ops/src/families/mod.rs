//! The operators, one file per family, and the one list of them.

mod activations;
mod clip;
mod concat;
mod control_flow;
mod conv;
mod conv_shared;
mod conv_transpose;
pub(crate) mod dropout;
mod elementwise;
mod gather;
mod layer_norm;
mod loss;
mod lrn;
mod matmul;
mod nonzero;
pub(crate) mod norm;
pub(crate) mod optim;
mod pad;
mod pool;
mod reduce;
mod resize;
mod reverse_sequence;
mod rnn;
mod select;
pub(crate) mod shape;
mod slice;
mod softmax;

use crate::op::Definition;

/// The list.
const FAMILIES: &[fn() -> Vec<Definition>] = &[
    clip::definitions,
    concat::definitions,
    control_flow::definitions,
    conv::definitions,
    conv_transpose::definitions,
    dropout::definitions,
    elementwise::definitions,
    gather::definitions,
    layer_norm::definitions,
    loss::definitions,
    lrn::definitions,
    matmul::definitions,
    nonzero::definitions,
    norm::definitions,
    optim::definitions,
    pad::definitions,
    pool::definitions,
    reduce::definitions,
    resize::definitions,
    reverse_sequence::definitions,
    rnn::definitions,
    select::definitions,
    shape::definitions,
    slice::definitions,
    softmax::definitions,
];

/// Every operator.
pub(crate) fn definitions() -> Vec<Definition> {
    FAMILIES.iter().flat_map(|family| family()).collect()
}

/// Whether an operator's derivative is zero almost everywhere.
pub(crate) fn has_zero_derivative(domain: &str, name: &str) -> bool {
    elementwise::is_flat(domain, name)
}

/// Whether an operator gives another result on every run.
pub(crate) fn draws_random_numbers(domain: &str, name: &str) -> bool {
    domain.is_empty() && name == "Dropout"
}
