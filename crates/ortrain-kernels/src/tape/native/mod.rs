//! Machine code for groups of operations.
//!
//! Operation by operation, a tape brings every value to the first-level cache and back. A group of operations on f32
//! and truths becomes one function instead, which keeps values in registers. It computes the same operations in the
//! same order, so results have the same bits with and without it; where the system lets no program make code, or a
//! group takes more registers than there are, operations run one by one.
//!
//! `lanes` says what is computed, `emit` makes code of it, `assembler` encodes instructions. Memory is writable until the
//! code is there, and executable from then on, never both.

#[cfg(target_arch = "x86_64")]
mod assembler;
#[cfg(target_arch = "x86_64")]
mod code;
#[cfg(target_arch = "x86_64")]
mod emit;
#[cfg(target_arch = "x86_64")]
mod lanes;
#[cfg(all(test, target_arch = "x86_64"))]
mod tests;

#[cfg(target_arch = "x86_64")]
pub(super) use code::{Context, Group, Native, takes};
#[cfg(not(target_arch = "x86_64"))]
mod none;
#[cfg(not(target_arch = "x86_64"))]
pub(super) use none::{Context, Group, Native, takes};
