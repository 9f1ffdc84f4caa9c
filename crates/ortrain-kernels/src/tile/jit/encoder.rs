//! Interface of code generation to a machine: registers, and an encoder of instructions.
//!
//! Code generation allocates registers and stack slots by number. An encoder knows the instructions, the registers of
//! pointers and loop counters, and the calling convention. Each machine has one folder beside this file.

use super::ir::{Comparison, Logic, VectorBinaryOp};
use crate::isa::Kind as Level;
use crate::tile::op::Slot;

/// Registers of a machine, and operands that its instructions accept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resources {
    /// Number of 32-bit lanes of a vector register.
    pub(super) lanes: usize,
    /// Vector registers, as a bit set.
    pub(super) vectors: u32,
    /// Registers of truth values. `None` if vector registers hold truth values.
    pub(super) truths: Option<TruthRegisters>,
    /// True if instructions broadcast their last operand from memory.
    pub(super) broadcasts_operands: bool,
    /// True if [`VectorBinaryOp::Scale`] is an instruction.
    pub(super) has_scale: bool,
    /// True if instructions load bytes into lanes and store lanes as bytes, also under a mask.
    pub(super) has_bytes: bool,
}

/// Registers that hold one truth value for each lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct TruthRegisters {
    /// Registers for values, as a bit set.
    pub(super) free: u32,
    /// Register of the mask of the incomplete end.
    pub(super) end: u8,
}

/// Memory that an instruction accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The frame: `displacement` bytes after the start of a register of the tile program.
    Frame { slot: Slot, displacement: i32 },
    /// A register of the tile program at the current index, for values of `1 << power` bytes.
    Tile { slot: Slot, power: u8, displacement: i32 },
    /// The element at a pointer to callers' memory.
    Element { pointer: u8 },
    /// The elements at a pointer to callers' memory, at the current index, of `1 << power` bytes.
    Elements { pointer: u8, power: u8, displacement: i32 },
    /// A vector on the stack.
    Stack { slot: u8 },
    /// A constant that is stored with the code.
    Constant { bits: u32 },
    /// Words of the incomplete end: all ones for valid indices, all zeros for the others.
    End { displacement: i32 },
}

/// Last operand of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operand {
    Register(u8),
    /// A vector in memory.
    Vector(Place),
    /// One number in memory, for every lane.
    Broadcast(Place),
}

/// Access for which a cache line is prefetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PrefetchKind {
    Read,
    Write,
}

/// Encoder of one function. The function has the arguments of `EntryPoint`: the frame of the tile program, a table of
/// pointers to callers' memory, the number of indices, and the words of the incomplete end.
///
/// An index counts the finished indices, and loops run until it reaches a limit. Parameters named `to` are results.
/// Truth values are numbers of truth registers, or of vector registers if [`Resources::truths`] is `None`.
pub(super) trait Encoder: Sized {
    /// Complete, position-independent code.
    type Code;
    /// Position in the code: the start of a loop, or a jump without a target.
    type Label: Copy;

    /// Returns the registers of a level of instructions.
    fn resources(level: Level) -> Resources;
    /// Returns an encoder without code.
    fn new(level: Level) -> Self;
    /// Begins a function that uses `pointers` pointers of the table.
    fn begin(&mut self, pointers: usize);
    /// Ends the function, which uses `stack_slots` vectors of the stack.
    fn finish(self, stack_slots: usize) -> Self::Code;

    /// Sets the index to zero.
    fn clear_index(&mut self);
    /// Jumps if there are fewer than `count` indices.
    fn skip_if_fewer_than(&mut self, count: usize) -> Self::Label;
    /// Sets the limit to the number of indices, rounded down to a multiple of a power of two.
    fn limit_to_multiple_of(&mut self, power_of_two: usize);
    /// Jumps if the index has reached the limit.
    fn skip_at_limit(&mut self) -> Self::Label;
    /// Jumps if no index is left.
    fn skip_at_end(&mut self) -> Self::Label;
    /// Returns the current position, as the start of a loop.
    fn position(&self) -> Self::Label;
    /// Adds `count` to the index, and jumps to `start` if the index is below the limit.
    fn repeat(&mut self, count: usize, start: Self::Label);
    /// Makes the current position the target of a jump.
    fn bind(&mut self, jump: Self::Label);

    /// Loads a vector.
    fn load(&mut self, to: u8, from: Place);
    /// Loads the lanes of a vector that `mask` selects. The other lanes become zero, and their memory is not accessed.
    fn load_masked(&mut self, to: u8, from: Place, mask: u8);
    /// Loads one number into all lanes.
    fn broadcast(&mut self, to: u8, from: Place);
    /// Loads truth values of one byte each. `spare` is a vector register, or `to` if vector registers hold truth values.
    fn load_truths(&mut self, to: u8, from: Place, spare: u8);
    /// Converts words of all ones and all zeros to a truth value.
    fn truth_of_words(&mut self, to: u8, words: u8);
    /// Stores a vector.
    fn store(&mut self, from: u8, to: Place);
    /// Stores the lanes of a vector that `mask` selects. The memory of other lanes is not accessed.
    fn store_masked(&mut self, from: u8, to: Place, mask: u8);
    /// Loads bytes into lanes, under a mask if there is one: with their sign, or with zeros.
    fn load_bytes(&mut self, to: u8, from: Place, is_signed: bool, mask: Option<u8>);
    /// Stores the lowest byte of each lane, under a mask if there is one.
    fn store_bytes(&mut self, from: u8, to: Place, mask: Option<u8>);
    /// Stores the first lane.
    fn store_first(&mut self, from: u8, to: Place);
    /// Stores truth values as bytes 0 and 1. May write past the last index: registers of the tile program have capacity
    /// for whole rounds. Overwrites the vector register `spare`.
    fn store_truths(&mut self, from: u8, to: Place, spare: u8);
    /// Prefetches the cache line `displacement` bytes after the element at the current index. A prefetch is a hint, so
    /// any address is valid.
    fn prefetch(&mut self, kind: PrefetchKind, pointer: u8, displacement: i32);

    /// `to = from`.
    fn copy(&mut self, to: u8, from: u8);
    /// `to = from` in the lanes that `mask` selects.
    fn copy_masked(&mut self, to: u8, from: u8, mask: u8);
    /// `to = a op b`.
    fn binary(&mut self, op: VectorBinaryOp, to: u8, a: u8, b: Operand);
    /// `to = sqrt(a)`.
    fn sqrt(&mut self, to: u8, a: Operand);
    /// `to = floor(a)`, without an exception.
    fn floor(&mut self, to: u8, a: Operand);
    /// `to` = nearest integer to `a`, of two the even one, without an exception.
    fn round(&mut self, to: u8, a: Operand);
    /// `to = a`, from signed integers.
    fn convert_integer(&mut self, to: u8, a: Operand);
    /// `to = a` as signed integers, towards zero; the least integer if a number does not fit.
    fn truncate_to_integer(&mut self, to: u8, a: Operand);
    /// `to = a << count`.
    fn shift_left(&mut self, to: u8, a: u8, count: u8);
    /// `to = a >> count`, with copies of the sign.
    fn shift_right(&mut self, to: u8, a: u8, count: u8);
    /// `factor = factor * b + c` in one rounding.
    fn mul_add_to_factor(&mut self, factor: u8, b: u8, c: Operand);
    /// `sum = a * b + sum` in one rounding.
    fn mul_add_to_sum(&mut self, sum: u8, a: u8, b: Operand);
    /// `to = a comparison b`, a truth value.
    fn compare(&mut self, comparison: Comparison, to: u8, a: u8, b: Operand);
    /// `to = a logic b` of truth values. `b` is a register if there are truth registers.
    fn logic(&mut self, logic: Logic, to: u8, a: u8, b: Operand);
    /// `to = truth ? yes : no`.
    fn select(&mut self, to: u8, truth: u8, yes: Operand, no: u8);
}
