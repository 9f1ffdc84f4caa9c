//! Memory of a caller that passes access in place.

use std::sync::Arc;

use ortrain_graph::DType;
use ortrain_program::Memory;

/// A weight, or a buffer for its gradient, in memory of the caller that passes access in place.
///
/// ```
/// use std::sync::Arc;
///
/// use ortrain::{DType, Lent, Memory};
///
/// let memory = Arc::new(Memory::new(24));
/// let weight = Lent { dtype: DType::F32, dims: &[2, 3], memory: &memory };
/// # assert_eq!(weight.dims, [2, 3]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Lent<'a> {
    /// The element type.
    pub dtype: DType,
    /// The shape.
    pub dims: &'a [usize],
    /// Memory of the elements; the first element is at its start.
    pub memory: &'a Arc<Memory>,
}
