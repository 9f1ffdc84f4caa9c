//! Quantized tensors: integers with a scale and a zero point.

mod blocks;
mod convolutions;
mod linear;
mod packed_products;
mod pointwise;
mod products;

use crate::op::Definition;

pub(crate) fn definitions() -> Vec<Definition> {
    [
        blocks::definitions(),
        linear::definitions(),
        packed_products::definitions(),
        products::definitions(),
        convolutions::definitions(),
        pointwise::definitions(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
