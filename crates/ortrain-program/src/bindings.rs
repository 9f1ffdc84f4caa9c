//! State memory of a run.

use ortrain_memory::Memory;

/// Planes that a program runs on: index `k` is [`crate::PlaneId`] `k`.
#[derive(Clone, Copy, Debug)]
pub struct Bindings<'a> {
    /// Planes, by index.
    pub planes: &'a [&'a Memory],
}
