//! Just-in-time compilation of groups of operations to machine code.
//!
//! The interpreter of a tile program runs one operation at a time, and stores every intermediate value in memory. A
//! group of operations on f32 and boolean values, and of their conversions to 32-bit integers and bytes, becomes one
//! function instead, and keeps its values in registers. The function computes the same operations in the same order, so
//! results have the same bits with and without machine code. Operations are interpreted if the system does not allow machine code, or if a group needs too many registers.
//!
//! `function` forms groups and runs their functions. `ir` has the vector instructions, `order` has their order, and
//! `codegen` allocates registers and generates code. `encoder` is the interface to a machine, and `x86_64` implements
//! that interface. Memory of code is writable until the code is complete, and executable from then on, never both.

#[cfg(target_arch = "x86_64")]
mod codegen;
#[cfg(target_arch = "x86_64")]
mod encoder;
#[cfg(target_arch = "x86_64")]
mod function;
#[cfg(target_arch = "x86_64")]
mod ir;
#[cfg(target_arch = "x86_64")]
mod order;
#[cfg(all(test, target_arch = "x86_64"))]
mod tests;
#[cfg(not(target_arch = "x86_64"))]
mod unsupported;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use rustc_hash::FxHashMap;

use super::memory::StridedView;
use super::op::{RegisterKind, Slot};
use crate::isa::Isa;
#[cfg(target_arch = "x86_64")]
pub(super) use function::{CodeMemory, Functions, Group, takes};
#[cfg(not(target_arch = "x86_64"))]
pub(super) use unsupported::{CodeMemory, Functions, Group, takes};

/// Properties of a tile program that the compilation of a group needs.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "there are no groups that look at it"))]
pub(super) struct Context<'a> {
    pub(super) isa: Isa,
    /// Storage of every register.
    pub(super) sizes: &'a dyn Fn(Slot) -> RegisterKind,
    /// Bits of each register that holds a constant.
    pub(super) constants: &'a FxHashMap<Slot, u64>,
    pub(super) loads: &'a [StridedView],
    pub(super) stores: &'a [StridedView],
    /// Number of reads of each register, by all operations of the tile program.
    pub(super) readers: &'a FxHashMap<Slot, usize>,
    /// Number of indices of a piece. Tiles do not cross a multiple of it, and elements that are read directly are
    /// contiguous between two multiples.
    pub(super) piece: usize,
    /// Maximum number of indices of a tile.
    pub(super) tile: usize,
}

/// Memory that a function accesses.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "there are no functions that access it"))]
pub(super) struct Site<'a> {
    pub(super) loads: &'a [StridedView],
    pub(super) stores: &'a [StridedView],
    /// Base pointers of the loads, then of the stores.
    pub(super) bases: &'a [*mut u8],
    pub(super) frame: *mut u8,
    /// First value of the completed block of a matrix product.
    pub(super) product: *const u8,
}
