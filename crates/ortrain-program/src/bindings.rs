//! The planes of a run.

use ortrain_memory::Memory;

/// The planes a program runs on: index `k` is [`crate::PlaneId`] `k`.
#[derive(Clone, Copy, Debug)]
pub struct Bindings<'a> {
    /// The planes.
    pub planes: &'a [&'a Memory],
}
