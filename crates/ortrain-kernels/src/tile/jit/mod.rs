//! Machine code for groups of operations.
//!
//! Operation by operation, a tape brings every value to the first-level cache and back. A group of operations on f32
//! and truths becomes one function instead, which keeps values in registers. It computes the same operations in the
//! same order, so results have the same bits with and without it; where the system lets no program make code, or a
//! group takes more registers than there are, operations run one by one.
//!
//! `ir` says what is computed, `codegen` makes code of it, `assembler` encodes instructions. Memory is writable until the
//! code is there, and executable from then on, never both.

#[cfg(target_arch = "x86_64")]
mod assembler;
#[cfg(target_arch = "x86_64")]
mod codegen;
#[cfg(target_arch = "x86_64")]
mod function;
#[cfg(target_arch = "x86_64")]
mod ir;
#[cfg(all(test, target_arch = "x86_64"))]
mod tests;
#[cfg(not(target_arch = "x86_64"))]
mod unsupported;

use rustc_hash::FxHashMap;

use super::memory::StridedView;
use super::{Size, Slot};
use crate::isa::Isa;
#[cfg(target_arch = "x86_64")]
pub(super) use function::{CodeMemory, Functions, Group, takes};
#[cfg(not(target_arch = "x86_64"))]
pub(super) use unsupported::{CodeMemory, Functions, Group, takes};

/// What a group must know of the tape that it is made of.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "there are no groups that look at it"))]
pub(super) struct Context<'a> {
    pub(super) isa: Isa,
    /// Of every register.
    pub(super) sizes: &'a dyn Fn(Slot) -> Size,
    /// The bits of registers that hold a constant.
    pub(super) constants: &'a FxHashMap<Slot, u64>,
    pub(super) loads: &'a [StridedView],
    pub(super) stores: &'a [StridedView],
    /// How often each register is read, by all operations of the tape.
    pub(super) readers: &'a FxHashMap<Slot, usize>,
    /// Up to where what is read lies side by side.
    pub(super) piece: usize,
    /// Indices of a tile, at most.
    pub(super) tile: usize,
}
