//! Expressions compiled to tile programs: lists of operations over tile registers.
//!
//! A tile program runs along a part of the iteration space, one tile of consecutive indices at a time. A driver steps
//! through the other axes (see [`crate::nest`]). Every instruction is placed as far out of the loops as its operands
//! allow. An instruction with the same result for the whole tile computes one value instead of a tile.

mod jit;
pub(crate) mod memory;
pub(crate) mod number;
pub(crate) mod ops;
mod shared;
pub(crate) mod strided_iter;

use std::ops::{Deref, Range};
use std::sync::Arc;

use ortrain_expr::{
    Access, BinaryOp, CompareOp, DType, Expr, Inst, Load, Nest, OutOfRange, ReduceOp, Reg, RunScalar, Scalar,
    Type, UnaryOp,
};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use crate::RunScalars;
use crate::isa::Isa;
pub(crate) use crate::scratch::ALIGN;
use jit::{CodeMemory, Context, Functions, Group};
use memory::{StridedView, width};
pub use shared::{Compiler, with_shared_code};

/// A register. Before allocation: the index of the register. After allocation: the byte offset in a worker's frame.
/// Operands that are read directly from callers' memory ([`RegisterKind::Direct`],
/// [`RegisterKind::DirectUniform`]) have the bit [`DIRECT_BIT`] set, and the index of the load instead.
type Slot = u32;

/// Bit of a [`Slot`] that is read directly from callers' memory.
const DIRECT_BIT: Slot = 1 << 31;
/// The completed block of a matrix product, read directly.
const DIRECT_PRODUCT: Slot = Slot::MAX;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    kind: Kind,
    /// True if the operation computes one value, not one for each index of the tile.
    is_uniform: bool,
    d: Slot,
    a: [Slot; 3],
    /// For an operation that computes a value for each index: the operands that are one value for the whole tile.
    uniform_operands: [bool; 3],
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Const(u64),
    Run(RunScalar),
    /// `(linear / after) % dim`, of the linear index along the tile (`along`) or outside of the tile.
    Coordinate {
        along: bool,
        after: usize,
        dim: usize,
    },
    Load(u16),
    /// Copies an operand from callers' memory into a register.
    Copy(Type),
    LoadAt(u16),
    /// Loads consecutive elements from an index on that is the same for the whole row.
    LoadRow(u16),
    Unary(UnaryOp, Type),
    Binary(BinaryOp, Type),
    Compare(CompareOp, Type),
    /// Compares a coordinate along the tile with one number. `first`: the coordinate is the first operand.
    CompareCoordinate {
        op: CompareOp,
        first: bool,
        after: usize,
        dim: usize,
    },
    Select(Type),
    Convert(Type, Type),
    /// Bounds check, with the index of its instruction.
    Guard(u16),
    Random,
    Splat(Type),
    Store(u16),
    /// Reduces a tile and adds the result to a [`PairwiseSum`].
    Fold(ReduceOp, Type),
    /// Combines a tile with another tile, element by element.
    Accumulate(ReduceOp, Type),
    /// Several operations as one function of machine code, with the index of the function.
    Native(u16),
}

/// Loop order of a tile program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LoopOrder {
    /// Every point is independent.
    Map,
    /// Tiles run along the reduced axes.
    Row,
    /// Tiles run along the axes that are not reduced. The driver steps through the reduced axes.
    Col,
}

/// Assignment of the axes of a nest to loops.
pub(crate) struct LoopPlan<'a> {
    pub(crate) nest: &'a Nest,
    pub(crate) loop_order: LoopOrder,
    /// Axes that the driver steps through.
    pub(crate) outer_axes: &'a [usize],
    /// Axes that tiles run along.
    pub(crate) tile_axes: &'a [usize],
}

impl LoopPlan<'_> {
    /// Selects the work that the first stage does for later stages, over segments. `overlaps` tells for a store and a
    /// load if the two may share elements.
    fn first_stage_outputs(&self, overlaps: &dyn Fn(usize, usize) -> bool) -> FirstStageOutputs {
        let nest = self.nest;
        let mut ahead = FirstStageOutputs::default();
        let Some(segments) = &nest.segments else { return ahead };
        if nest.reductions.is_empty() || nest.expr.can_fail() {
            return ahead;
        }
        let insts = nest.expr.insts();
        // For each instruction: true if the value varies along a segment, needs a reduction, is expensive.
        let mut about: Vec<(bool, bool, bool)> = Vec::with_capacity(insts.len());
        for &(inst, ty) in insts {
            let (mut along, mut late, mut slow) = (false, false, false);
            for operand in inst.operands() {
                let of = about[usize::from(operand.0)];
                (along, late, slow) = (along | of.0, late | of.1, slow | of.2);
            }
            match inst {
                Inst::Load(slot) => {
                    along = match &nest.loads[usize::from(slot)] {
                        Load::Buffer(access) => access.strides[1] != 0,
                        Load::Accumulator(_) => true,
                    }
                }
                Inst::Coordinate(axis) => along = axis == 1,
                Inst::Reduced(_) => late = true,
                Inst::Unary(op, _) => slow |= along && Kind::Unary(op, ty).cost() > 1,
                Inst::Binary(op, ..) => slow |= along && Kind::Binary(op, ty).cost() > 1,
                _ => {}
            }
            about.push((along, late, slow));
        }
        let of = |reg: Reg| about[usize::from(reg.0)];
        let outputs = nest.expr.outputs();
        let (late, early): (Vec<Reg>, Vec<Reg>) =
            nest.reductions.iter().map(|reduction| reduction.value).partition(|&value| of(value).1);
        let is_early = |&store: &usize| {
            matches!(of(outputs[store]), (true, false, _)) && nest.stores[store].strides[1] != 0
        };
        ahead.stored = (0..outputs.len()).filter(is_early).collect();
        loop {
            // Marks the instructions that later stages need, from their outputs back to their loads.
            ahead.saved.clear();
            let stored = ahead.stored.iter().map(|&store| outputs[store]);
            let available =
                nest.expr.dependencies_of(&early.iter().copied().chain(stored).collect::<Vec<_>>());
            let mut needed = vec![false; insts.len()];
            let later = (0..outputs.len()).filter(|store| !ahead.stored.contains(store));
            for root in late.iter().copied().chain(later.map(|store| outputs[store])) {
                needed[usize::from(root.0)] = true;
            }
            for (i, &(inst, ty)) in insts.iter().enumerate().rev() {
                if !needed[i] {
                    continue;
                }
                let is_slow = matches!(about[i], (true, false, true)) && ty == Type::F32;
                if is_slow && available[i] && segments.max_len() <= MAX_SAVED_SEGMENT {
                    ahead.saved.push(Reg(i as u16));
                } else {
                    inst.operands().for_each(|operand| needed[usize::from(operand.0)] = true);
                }
            }
            let is_saved = |i: usize| ahead.saved.iter().any(|reg| usize::from(reg.0) == i);
            let read: Vec<usize> = (insts.iter().enumerate())
                .filter(|&(i, _)| needed[i] && !is_saved(i))
                .filter_map(|(_, &(inst, _))| match inst {
                    Inst::Load(slot) | Inst::LoadAt(slot, _) => Some(usize::from(slot)),
                    _ => None,
                })
                .collect();
            let before = ahead.stored.len();
            // A store that moves to a later stage makes that stage read more. Other early stores may overwrite these
            // elements.
            ahead.stored.retain(|store| !read.iter().any(|&load| overlaps(*store, load)));
            if ahead.stored.len() == before {
                return ahead;
            }
        }
    }

    /// Returns true if a load is the first accumulator: the completed block at [`ExecContext::product`]. Further
    /// accumulators are row-major over the iteration space, at addresses of their own.
    fn is_product(&self, slot: u16) -> bool {
        slot == 0 && self.has_product()
    }

    fn has_product(&self) -> bool {
        self.nest.num_accumulators() > 0
    }
}

/// Work that the first stage does for later stages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct FirstStageOutputs {
    /// Values that later stages load instead of recomputing them, because they need a division, a root or the like. No
    /// register keeps them between stages, and storing and loading them costs less.
    saved: SmallVec<[Reg; 2]>,
    /// Stores of the nest that need no reduction, if no later stage reads their elements. Their operands are already
    /// computed in the first stage.
    stored: SmallVec<[usize; 4]>,
}

/// A reduction inside a stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StageReduction {
    pub(crate) op: ReduceOp,
    pub(crate) ty: Type,
    /// Index of the reduction in the nest.
    pub(crate) reduction_index: usize,
    /// `Row`: a [`PairwiseSum`]. `Col`: the tile that accumulates the values.
    pub(crate) state: Slot,
    /// Register of the result: one value (`Row`) or a tile (`Col`).
    pub(crate) result: Slot,
}

/// The operations between two dependent reductions.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stage {
    /// Runs once for each outer index (`Row`), or once for each tile (`Col`).
    pub(crate) pre: Vec<Op>,
    /// Runs for each tile of the reduced axes (`Row`), for each reduced index (`Col`), or for each tile (`Map`).
    pub(crate) body: Vec<Op>,
    pub(crate) reductions: Vec<StageReduction>,
}

/// A compiled expression, with the memory accesses of its loads and stores.
#[derive(Debug)]
pub(crate) struct TileProgram {
    loads: Vec<StridedView>,
    stores: Vec<StridedView>,
    /// Linear index in the index order of the nest.
    index: StridedView,
    code: Arc<Code>,
}

/// Returns a number with its noun, for example `2 tasks`.
pub(crate) fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

impl Code {
    /// Describes the size of a tile, and the execution of the operations.
    pub(crate) fn describe(&self) -> String {
        let of_stages = self.stages.iter().flat_map(|stage| stage.pre.iter().chain(&stage.body));
        let ops = || self.per_run.iter().chain(of_stages.clone()).chain(&self.post);
        let functions = ops().filter(|op| matches!(op.kind, Kind::Native(_))).count();
        format!(
            "tiles of {}, {}, {}",
            counted(self.tile, "element"),
            counted(ops().count() - functions, "interpreted operation"),
            counted(functions, "machine-code function")
        )
    }
}

impl Deref for TileProgram {
    type Target = Code;

    fn deref(&self) -> &Code {
        &self.code
    }
}

/// Operations, independent of the offsets and lengths of buffers. The steps of a recurrent network share one code at
/// different offsets.
#[derive(Debug)]
pub(crate) struct Code {
    pub(crate) isa: Isa,
    /// Runs once for each task.
    pub(crate) per_run: Vec<Op>,
    /// The last stage has no totals.
    pub(crate) stages: Vec<Stage>,
    /// Stores of one element per outer index.
    pub(crate) post: Vec<Op>,
    functions: Functions,
    /// Maximum number of indices of a tile.
    pub(crate) tile: usize,
    /// No tile crosses a multiple of this index. Between two multiples, elements that are read directly are contiguous.
    piece: usize,
    /// Bytes of a worker's frame, a multiple of [`ALIGN`].
    pub(crate) frame: usize,
    /// Number of values that the first stage saves for later stages, in buffers of the driver. Each has one load after
    /// the loads of the nest, and one store after the stores of the nest.
    pub(crate) num_saved: usize,
    /// True if a guard may fail.
    pub(crate) can_fail: bool,
    /// Work per element of the last axis, in additions.
    pub(crate) cost: usize,
}

/// Bytes of tile registers that fit into the first-level cache.
const TILE_CACHE_BYTES: usize = 24 * 1024;
/// Maximum bytes of tile registers to keep a whole row between the stages, instead of recomputing it.
const MAX_FUSED_ROW_BYTES: usize = 96 * 1024;
/// Bytes of 16 partial results.
const LANES_BYTES: usize = 64;
const MAX_TILE: usize = 1024;
/// Maximum number of elements of a segment with values saved between stages: 16 MiB of working memory for each value. A
/// longer segment fits no cache, and neither would its saved values.
const MAX_SAVED_SEGMENT: usize = 4 << 20;
const MIN_TILE: usize = 64;

/// The first guard that failed, at the start of each frame. All zero bits do not mean "no failure": see
/// [`Failure::NONE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(C)]
pub(crate) struct Failure {
    linear: u64,
    inst: u64,
    index: i64,
    bound: i64,
}

/// Header of a worker's frame.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct FrameHeader {
    failure: Failure,
    /// The frame has the values before the body of this stage, for this long segment.
    pub(crate) prepared: Option<(usize, usize)>,
}

impl Default for FrameHeader {
    fn default() -> FrameHeader {
        FrameHeader { failure: Failure::NONE, prepared: None }
    }
}

impl Failure {
    pub(crate) const NONE: Failure = Failure { linear: u64::MAX, inst: 0, index: 0, bound: 0 };

    pub(crate) fn result(self) -> Result<(), OutOfRange> {
        if self == Failure::NONE {
            return Ok(());
        }
        Err(OutOfRange { point: self.linear as usize, index: self.index, bound: self.bound })
    }
}

/// Pairwise combination of partial results, in an order that depends only on their number. Works as a binary counter:
/// its digits hold the results of 1, 2, 4, ... partial results.
#[repr(C)]
pub(crate) struct PairwiseSum {
    count: u64,
    levels: [u64; PairwiseSum::LEVELS],
}

impl PairwiseSum {
    const LEVELS: usize = 48;

    pub(crate) fn reset(&mut self) {
        self.count = 0;
    }

    pub(crate) fn push(&mut self, op: ReduceOp, ty: Type, mut value: u64) {
        let mut level = 0;
        while self.count >> level & 1 != 0 {
            value = combine_bits(op, ty, self.levels[level], value);
            level += 1;
        }
        self.levels[level] = value;
        self.count += 1;
    }

    pub(crate) fn result(&self, op: ReduceOp, ty: Type) -> u64 {
        let mut result = None;
        let mut left = self.count;
        while left != 0 {
            let earlier = self.levels[left.trailing_zeros() as usize];
            result = Some(result.map_or(earlier, |later| combine_bits(op, ty, earlier, later)));
            left &= left - 1;
        }
        result.unwrap_or_else(|| neutral_bits(op, ty))
    }
}

fn neutral_bits(op: ReduceOp, ty: Type) -> u64 {
    let mut value = 0u64;
    // SAFETY: `value` has eight bytes, and one number of any type fits into eight bytes.
    unsafe { ops::neutral(op, ty, (&raw mut value).cast(), 1) };
    value
}

fn combine_bits(op: ReduceOp, ty: Type, a: u64, b: u64) -> u64 {
    let mut value = a;
    // SAFETY: `value` and `b` have eight bytes each, and one number of any type fits into eight bytes.
    unsafe { ops::accumulate(Isa::PORTABLE, op, ty, (&raw const b).cast(), (&raw mut value).cast(), 1) };
    value
}

impl TileProgram {
    /// Returns the number of loads of the nest itself, without the loads of saved values.
    pub(crate) fn num_loads(&self) -> usize {
        self.loads.len() - self.code.num_saved
    }

    /// Iterates over the tiles of the indices `begin..end`: start and number of indices of each tile.
    pub(crate) fn tiles(&self, begin: usize, end: usize) -> impl Iterator<Item = (usize, usize)> {
        let mut start = begin;
        std::iter::from_fn(move || {
            let n = self.tile.min(end - start).min(self.piece - start % self.piece);
            start += n;
            (n > 0).then_some((start - n, n))
        })
    }
}

/// Context in which one worker executes a tile program.
pub(crate) struct ExecContext<'a> {
    pub(crate) program: &'a TileProgram,
    pub(crate) bases: &'a [*mut u8],
    pub(crate) scalars: RunScalars,
    pub(crate) frame: *mut u8,
    /// First value of the completed block of a matrix product.
    pub(crate) product: *const u8,
}

impl ExecContext<'_> {
    /// Runs operations over the indices (`outside`, `start..start + n`).
    ///
    /// # Safety
    /// - `frame` has the size and alignment of the tile program's frame, and only this worker uses it.
    /// - `bases` are the base pointers of [`crate::NestKernel::run`], with the contract of that function.
    /// - The indices are in the iteration space, and `n` is at most the tile of the program.
    /// - The operations that produce the operands of `list` have run.
    #[inline]
    pub(crate) unsafe fn run(&self, mut list: &[Op], outside: usize, start: usize, n: usize) {
        // Rows may be short, and many rows are a single function.
        while let [op, rest @ ..] = list {
            let Kind::Native(k) = op.kind else {
                // SAFETY: the caller's contract.
                unsafe { self.interpret(list, outside, start, n) };
                return;
            };
            // SAFETY: as above.
            unsafe { self.run_function(k, op.is_uniform, outside, start, n) };
            list = rest;
        }
    }

    /// Runs a function of machine code. The function reads and writes its operands itself.
    ///
    /// # Safety
    /// As [`ExecContext::run`].
    #[inline(always)]
    unsafe fn run_function(&self, k: u16, is_uniform: bool, outside: usize, start: usize, n: usize) {
        let n = if is_uniform { 1 } else { n };
        // SAFETY: the caller's contract.
        unsafe { self.program.functions.run(k, self, outside, start, n) };
    }

    /// Interprets operations one by one.
    ///
    /// # Safety
    /// As [`ExecContext::run`].
    #[inline(never)]
    unsafe fn interpret(&self, list: &[Op], outside: usize, start: usize, n: usize) {
        let isa = self.program.isa;
        let count = n;
        for op in list {
            let n = if op.is_uniform { 1 } else { count };
            if let Kind::Native(k) = op.kind {
                // SAFETY: the caller's contract.
                unsafe { self.run_function(k, op.is_uniform, outside, start, n) };
                continue;
            }
            // SAFETY: slots are offsets in the frame (see `TileCompiler::assign_offsets`). A result shares bytes with
            // no operand.
            let (d, a, b, c) = unsafe {
                let at = |operand_slot: Slot| self.operand_address(operand_slot, outside, start);
                (self.frame.add(op.d as usize), at(op.a[0]), at(op.a[1]), at(op.a[2]))
            };
            let with = |at: *const u8, k: usize| ops::Operand { at, is_uniform: op.uniform_operands[k] };
            // SAFETY: registers have `n` values of the operation's types, as compiled. Accesses stay inside of their
            // buffers, by the caller's contract.
            unsafe {
                match op.kind {
                    Kind::Const(bits) => *d.cast::<u64>() = bits,
                    Kind::Run(RunScalar::Seed) => *d.cast::<u64>() = self.scalars.seed,
                    Kind::Run(RunScalar::TrainStep) => *d.cast::<u64>() = self.scalars.train_step,
                    Kind::Coordinate { along: false, after, dim } => {
                        *d.cast::<i64>() = (outside / after % dim) as i64;
                    }
                    Kind::Coordinate { along: true, after, dim } => {
                        write_coordinates(start, after, dim, ops::values_mut::<i64>(d, n));
                    }
                    Kind::CompareCoordinate { op, first, after, dim } => {
                        let among = matching_range(op, first, *a.cast::<i64>());
                        test_coordinates(start, after, dim, &among, ops::values_mut(d, n));
                    }
                    Kind::Load(slot) => {
                        let base = self.bases[usize::from(slot)];
                        self.program.loads[usize::from(slot)].load(isa, base, outside, start, d, n);
                    }
                    Kind::Copy(ty) => std::ptr::copy_nonoverlapping(a, d, n * width(ty)),
                    Kind::LoadAt(slot) => {
                        let base = self.bases[usize::from(slot)];
                        self.program.loads[usize::from(slot)].load_at(isa, base, a, d, n);
                    }
                    Kind::LoadRow(slot) => {
                        let (base, first) = (self.bases[usize::from(slot)], *a.cast::<i64>());
                        let first = first.wrapping_add(start as i64);
                        self.program.loads[usize::from(slot)].load_from(isa, base, first, d, n);
                    }
                    Kind::Unary(op, ty) => ops::unary(isa, op, ty, a, d, n),
                    Kind::Binary(op, ty) => ops::binary(isa, op, ty, with(a, 0), with(b, 1), d, n),
                    Kind::Compare(op, ty) => ops::compare(isa, op, ty, with(a, 0), with(b, 1), d, n),
                    Kind::Select(ty) => ops::select(isa, width(ty), a, with(b, 1), with(c, 2), d, n),
                    Kind::Convert(from, to) => ops::convert(isa, from, to, a, d, n),
                    Kind::Guard(inst) => {
                        self.check_bounds(inst, outside, start, ops::values(a, n), ops::values(b, n), d);
                    }
                    Kind::Random => ops::random(isa, a, b, c, d, n),
                    Kind::Splat(ty) => ops::splat(width(ty), a, d, n),
                    Kind::Store(slot) => {
                        let base = self.bases[self.program.loads.len() + usize::from(slot)];
                        self.program.stores[usize::from(slot)].store(isa, base, outside, start, a, n);
                    }
                    Kind::Fold(op, ty) => {
                        let mut partial = 0u64;
                        ops::fold(isa, op, ty, a, (&raw mut partial).cast(), n);
                        (*d.cast::<PairwiseSum>()).push(op, ty, partial);
                    }
                    Kind::Accumulate(op, ty) => ops::accumulate(isa, op, ty, a, d, n),
                    Kind::Native(_) => unreachable!("run above"),
                }
            }
        }
    }

    /// Returns the address of an operand.
    ///
    /// # Safety
    /// As [`ExecContext::run`].
    #[inline(always)]
    unsafe fn operand_address(&self, operand_slot: Slot, outside: usize, start: usize) -> *const u8 {
        if operand_slot & DIRECT_BIT == 0 {
            // SAFETY: slots are offsets in the frame.
            return unsafe { self.frame.add(operand_slot as usize) };
        }
        if operand_slot == DIRECT_PRODUCT {
            return self.product;
        }
        let slot = (operand_slot & !DIRECT_BIT) as usize;
        self.program.loads[slot].address(self.bases[slot], outside, start)
    }

    /// Records the first index that is out of bounds. Passes valid indices on, and replaces invalid ones by 0.
    ///
    /// # Safety
    /// The contract of [`ExecContext::run`], and `d` is a register with a value for each value of `index`.
    unsafe fn check_bounds(
        &self,
        inst: u16,
        outside: usize,
        start: usize,
        index: &[i64],
        bound: &[i64],
        d: *mut u8,
    ) {
        // SAFETY: the caller's contract.
        let d = unsafe { ops::values_mut::<i64>(d, index.len()) };
        for (i, ((d, &index), &bound)) in d.iter_mut().zip(index).zip(bound).enumerate() {
            if index >= 0 && index < bound {
                *d = index;
                continue;
            }
            *d = 0;
            let access = &self.program.index;
            let linear = (access.outside.offset(outside) + access.along.offset(start + i)) as u64;
            let failure = Failure { linear, inst: u64::from(inst), index, bound };
            // SAFETY: every frame starts with a failure.
            unsafe {
                let first = self.frame.cast::<Failure>();
                if failure < *first {
                    *first = failure;
                }
            }
        }
    }

    /// Returns the pointer to a value of the frame.
    ///
    /// # Safety
    /// `slot` is the slot of a `T`, and no other reference to that `T` is alive.
    pub(crate) unsafe fn register_ptr<T>(&self, slot: Slot) -> *mut T {
        // SAFETY: slots are offsets in the frame.
        unsafe { self.frame.add(slot as usize).cast() }
    }
}

fn write_coordinates(start: usize, after: usize, dim: usize, d: &mut [i64]) {
    for_each_run(start, after, dim, d, |coordinate, now| {
        if after == 1 {
            for (i, d) in now.iter_mut().enumerate() {
                *d = (coordinate + i) as i64;
            }
        } else {
            now.fill(coordinate as i64);
        }
    });
}

/// Returns the coordinates for which the comparison with `one` is true. `first`: the coordinate is the first operand.
fn matching_range(op: CompareOp, first: bool, constant: i64) -> Range<i64> {
    let above = constant.saturating_add(1);
    match (op, first) {
        (CompareOp::Eq, _) => constant..above,
        (CompareOp::Lt, true) => i64::MIN..constant,
        (CompareOp::Le, true) => i64::MIN..above,
        (CompareOp::Lt, false) => above..i64::MAX,
        (CompareOp::Le, false) => constant..i64::MAX,
    }
}

/// Tests for each index if its coordinate is in a range.
fn test_coordinates(start: usize, after: usize, dim: usize, among: &Range<i64>, d: &mut [u8]) {
    for_each_run(start, after, dim, d, |coordinate, now| {
        if after == 1 {
            let index =
                |bound: i64| bound.saturating_sub(coordinate as i64).clamp(0, now.len() as i64) as usize;
            let (begin, end) = (index(among.start), index(among.end));
            now.fill(0);
            now[begin..end.max(begin)].fill(1);
        } else {
            now.fill(u8::from(among.contains(&(coordinate as i64))));
        }
    });
}

/// Calls `f` with the first coordinate and the elements of each run. In a run the coordinate is constant, or counts up
/// if `after` is 1, as for the last axis.
fn for_each_run<T>(start: usize, after: usize, dim: usize, d: &mut [T], mut f: impl FnMut(usize, &mut [T])) {
    let mut coordinate = start / after % dim;
    let mut left = if after == 1 { dim - coordinate } else { after - start % after };
    let mut rest = d;
    while !rest.is_empty() {
        let (now, later) = rest.split_at_mut(left.min(rest.len()));
        f(coordinate, now);
        (coordinate, left) = match after {
            1 => (0, dim),
            _ => (if coordinate + 1 == dim { 0 } else { coordinate + 1 }, after),
        };
        rest = later;
    }
}

/// Section of a tile program that contains an operation. Sections are ordered as they run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Section {
    Once,
    Pre(usize),
    Body(usize),
    Post,
}

/// Storage of a register.
#[derive(Clone, Copy)]
enum RegisterKind {
    /// One value.
    Uniform,
    /// A value per index of a tile.
    Tile(Type),
    /// A [`PairwiseSum`].
    PairwiseSum,
    /// 16 partial results of a fold.
    Lanes,
    /// No bytes: contiguous elements are read directly at this slot.
    Direct(Slot),
    /// No bytes: one value is read directly at this slot.
    DirectUniform(Slot),
}

struct TileCompiler<'a> {
    plan: &'a LoopPlan<'a>,
    expr: &'a Expr,
    loads: &'a [StridedView],
    piece: usize,
    /// Values that the first stage saves and later stages load.
    saved: &'a [Reg],
    /// For each instruction: true if its value varies along the tile, and true if it varies with the outer index.
    varies: Vec<(bool, bool)>,
    registers: Vec<(RegisterKind, Section)>,
    lists: Vec<(Section, Vec<Op>)>,
    /// Register of each instruction that is already emitted, and register of its copy over a tile.
    value: Vec<Option<Slot>>,
    splat: Vec<Option<Slot>>,
    totals: Vec<Vec<StageReduction>>,
    /// Type and register of the result of each reduction.
    reduced: Vec<Option<(Type, Slot)>>,
    groups: Vec<Group>,
    /// Work per element, in additions.
    cost: usize,
}

impl TileProgram {
    /// Compiles an expression.
    pub(crate) fn new<'a>(
        plan: &LoopPlan<'_>,
        compiler: impl Into<Compiler<'a>>,
    ) -> Result<TileProgram, String> {
        TileProgram::with_overlaps(plan, compiler, &|_, _| true)
    }

    /// Compiles an expression. `overlaps` tells for a store and a load if the two may share elements.
    pub(crate) fn with_overlaps<'a>(
        plan: &LoopPlan<'_>,
        compiler: impl Into<Compiler<'a>>,
        overlaps: &dyn Fn(usize, usize) -> bool,
    ) -> Result<TileProgram, String> {
        let compiler = compiler.into();
        let nest = plan.nest;
        check(nest)?;
        if nest.segments.is_some() && (plan.has_product() || plan.loop_order != LoopOrder::Row) {
            return Err("segments are not supported in this loop".to_owned());
        }
        let mut dims = nest.dims.clone();
        if nest.segments.is_some() {
            // An axis of size 1 counts as constant, but not with segments: an empty segment lacks the only index of the
            // axis.
            dims[1] = dims[1].max(2);
        }
        let reach = |access: &Access| StridedView::new(access, &dims, plan.outer_axes, plan.tile_axes);
        let load = |load: &Load| match load {
            Load::Buffer(access) => reach(access),
            Load::Accumulator(dtype) => reach(&Access::contiguous(*dtype, &nest.dims)),
        };
        let mut loads = nest.loads.iter().map(load).collect::<Result<Vec<_>, _>>()?;
        let mut stores = nest.stores.iter().map(reach).collect::<Result<Vec<_>, _>>()?;
        let ahead = plan.first_stage_outputs(overlaps);
        if let [_, along] = *nest.dims {
            let index_access = Access {
                strides: [0, 1].into_iter().collect(),
                ..Access::contiguous(DType::F32, &[1, along])
            };
            for _ in &ahead.saved {
                loads.push(reach(&index_access)?);
                stores.push(reach(&index_access)?);
            }
        }
        let index = reach(&Access::contiguous(DType::U8, &nest.dims))?;
        let make = |memory: Option<&_>| Code::new(plan, compiler.isa(), memory, (&loads, &stores), &ahead);
        let code = compiler.get_or_compile(plan, &ahead, make)?;
        loads.truncate(nest.loads.len() + code.num_saved);
        stores.truncate(nest.stores.len() + code.num_saved);
        Ok(TileProgram { loads, stores, index, code })
    }
}

impl Code {
    /// Compiles a plan, with machine code if there is memory for it.
    fn new(
        plan: &LoopPlan<'_>,
        isa: Isa,
        memory: Option<&Arc<CodeMemory>>,
        (loads, stores): (&[StridedView], &[StridedView]),
        ahead: &FirstStageOutputs,
    ) -> Result<Code, String> {
        let nest = plan.nest;
        let along = match &nest.segments {
            Some(segments) => segments.max_len(),
            None => plan.tile_axes.iter().map(|&axis| nest.dims[axis]).product(),
        };

        // A row that fits is computed once, and its tile registers keep it through all stages.
        if plan.loop_order == LoopOrder::Row && !nest.reductions.is_empty() && along <= 4 * MAX_TILE {
            let draft = TileCompiler::new(plan, (loads, stores), usize::MAX, None)?;
            let tile = along.next_multiple_of(16).max(16);
            if along <= MIN_TILE || draft.bytes(tile, draft.assign_slots().1) <= MAX_FUSED_ROW_BYTES {
                return Ok(draft.finish(isa, memory, stores, tile));
            }
        }
        // Pieces shorter than this are better copied together into a tile.
        const LONG_PIECE: usize = 192;
        let pieces = loads.iter().filter_map(StridedView::contiguous_len);
        // The drivers of matrix products and of `Col` split their tiles themselves, without `TileProgram::tiles`.
        let cut_elsewhere = plan.has_product() || plan.loop_order == LoopOrder::Col;
        let piece = if cut_elsewhere { usize::MAX } else { pieces.min().unwrap_or(usize::MAX) };
        let piece = if piece < LONG_PIECE { usize::MAX } else { piece };
        let draft = TileCompiler::new(plan, (loads, stores), piece, Some(ahead))?;
        // The difference of two slot sizes gives the bytes that one index of a tile takes.
        let slots = draft.assign_slots().1;
        let bytes = slots * (draft.slot_bytes(2 * MIN_TILE) - draft.slot_bytes(MIN_TILE));
        let per_index = bytes.div_ceil(MIN_TILE).max(1);
        let tile = (TILE_CACHE_BYTES / per_index).clamp(MIN_TILE, MAX_TILE) / MIN_TILE * MIN_TILE;
        Ok(draft.finish(isa, memory, stores, tile.min(along.next_multiple_of(16).max(16))))
    }
}

impl<'a> TileCompiler<'a> {
    /// `piece`: see [`Code::piece`]. `ahead`: `None` if later stages reuse the values of a body.
    fn new(
        plan: &'a LoopPlan<'a>,
        (loads, stores): (&'a [StridedView], &[StridedView]),
        piece: usize,
        ahead: Option<&'a FirstStageOutputs>,
    ) -> Result<TileCompiler<'a>, String> {
        let nest = plan.nest;
        let expr = &nest.expr;
        let count = expr.insts().len();
        let mut draft = TileCompiler {
            plan,
            expr,
            loads,
            piece,
            saved: ahead.map_or(&[], |ahead| ahead.saved.as_slice()),
            varies: Vec::with_capacity(count),
            registers: Vec::new(),
            lists: vec![(Section::Once, Vec::new())],
            value: vec![None; count],
            splat: vec![None; count],
            totals: Vec::new(),
            reduced: vec![None; nest.reductions.len()],
            groups: Vec::new(),
            cost: 0,
        };

        for &(inst, _) in expr.insts() {
            let varies = draft.variance(inst);
            draft.varies.push(varies);
        }
        // A reduction runs in the stage after the reductions that it needs.
        let mut reduction_stage: Vec<usize> = Vec::new();
        for reduction in &nest.reductions {
            let needed = expr.dependencies_of(&[reduction.value]);
            let before = expr.insts().iter().zip(&needed).filter_map(|(&(inst, _), &needed)| match inst {
                Inst::Reduced(k) if needed => Some(reduction_stage[usize::from(k)] + 1),
                _ => None,
            });
            let stage = before.max().unwrap_or(0);
            reduction_stage.push(stage);
        }
        let stored_ahead = ahead.map_or(&[][..], |ahead| &ahead.stored);
        let last = reduction_stage.iter().map(|stage| stage + 1).max().unwrap_or(0);

        let stores_per_row: Vec<bool> = stores[..nest.stores.len()]
            .iter()
            .map(|store| plan.loop_order != LoopOrder::Map && draft.is_per_row(store))
            .collect();
        for stage in 0..=last {
            draft.totals.push(Vec::new());
            draft.lists.push((Section::Pre(stage), Vec::new()));
            draft.lists.push((Section::Body(stage), Vec::new()));
            let mut roots: Vec<Reg> = nest
                .reductions
                .iter()
                .zip(&reduction_stage)
                .filter(|(_, at)| **at == stage)
                .map(|(reduction, _)| reduction.value)
                .collect();
            let slots = (0..expr.outputs().len()).filter(|slot| {
                let is_stored_early = stored_ahead.contains(slot);
                stage == 0 && is_stored_early || stage == last && !is_stored_early
            });
            roots.extend(draft.saved.iter().filter(|_| stage == 0));
            roots.extend(slots.clone().map(|slot| expr.outputs()[slot]));
            if stage == last {
                // A guard is a side effect, and runs even if its result is unused.
                let guards = expr.insts().iter().enumerate();
                roots.extend(
                    guards
                        .filter(|(_, entry)| matches!(entry.0, Inst::Guard(..)))
                        .map(|(i, _)| Reg(i as u16)),
                );
            }
            draft.compute(stage, &roots);
            for (k, reduction) in nest.reductions.iter().enumerate() {
                if reduction_stage[k] == stage {
                    draft.reduce(stage, k, reduction.op, reduction.value);
                }
            }
            if stage == last {
                draft.lists.push((Section::Post, Vec::new()));
            }
            let mut sections = Vec::new();
            for slot in slots {
                let reg = expr.outputs()[slot];
                sections.push(draft.emit_output(stage, slot, &stores[slot], reg, stores_per_row[slot])?);
            }
            for (k, reg) in draft.saved.iter().enumerate().filter(|_| stage == 0) {
                let a = draft.value[usize::from(reg.0)].expect("a value of the first stage");
                let kind = Kind::Store((nest.stores.len() + k) as u16);
                sections.push((
                    Section::Body(0),
                    Op { kind, is_uniform: false, d: a, a: [a, 0, 0], uniform_operands: [false; 3] },
                ));
            }
            // Stores come after all loads, because a store may overwrite an element that is loaded through an equal
            // access.
            for (section, op) in sections {
                draft.section_ops(section).push(op);
            }
            if ahead.is_some() {
                draft.forget_section(Section::Body(stage));
            }
        }
        let bodies = draft.lists.iter().filter(|(section, _)| matches!(section, Section::Body(_)));
        let work = bodies.flat_map(|(_, list)| list).filter(|op| !op.is_uniform).map(|op| op.kind.cost());
        draft.cost = work.sum::<usize>().max(1);
        Ok(draft)
    }

    fn variance(&self, inst: Inst) -> (bool, bool) {
        let LoopPlan { nest, loop_order: drive, tile_axes: along, .. } = *self.plan;
        match inst {
            Inst::Load(slot) if self.plan.is_product(slot) => (true, true),
            Inst::Load(slot) => {
                let reach = &self.loads[usize::from(slot)];
                (!reach.along.is_constant(), !reach.outside.is_constant())
            }
            Inst::Coordinate(axis) if nest.dims[usize::from(axis)] == 1 => (false, false),
            Inst::Coordinate(axis) => {
                let along = along.contains(&usize::from(axis));
                (along, !along)
            }
            // In `Col` a tile runs along the axes that are not reduced. In `Row` there is one value for each outer
            // index.
            Inst::Reduced(_) => (drive == LoopOrder::Col, drive != LoopOrder::Col),
            other => other.operands().fold((false, false), |(along, outside), reg| {
                let varies = self.varies[usize::from(reg.0)];
                (along | varies.0, outside | varies.1)
            }),
        }
    }

    /// Returns true if a store writes the same element for all indices of the reduced axes.
    fn is_per_row(&self, store: &StridedView) -> bool {
        match self.plan.loop_order {
            LoopOrder::Map => false,
            LoopOrder::Row => store.along.is_constant(),
            LoopOrder::Col => store.outside.is_constant(),
        }
    }

    /// Returns the section of an instruction that is first needed in `stage`.
    fn section_of(&self, inst: usize, stage: usize) -> Section {
        match (self.plan.loop_order, self.varies[inst]) {
            (_, (false, false)) => Section::Once,
            (LoopOrder::Row, (false, true)) | (LoopOrder::Col, (true, false)) => Section::Pre(stage),
            _ => Section::Body(stage),
        }
    }

    fn section_ops(&mut self, section: Section) -> &mut Vec<Op> {
        let list = self.lists.iter_mut().find(|(at, _)| *at == section);
        &mut list.expect("sections are made with their stage").1
    }

    fn new_register(&mut self, size: RegisterKind, section: Section) -> Slot {
        self.registers.push((size, section));
        (self.registers.len() - 1) as Slot
    }

    fn push(&mut self, section: Section, kind: Kind, is_uniform: bool, ty: Type, a: [Slot; 3]) -> Slot {
        self.push_with(section, kind, is_uniform, ty, a, [false; 3])
    }

    fn push_with(
        &mut self,
        section: Section,
        kind: Kind,
        uniform: bool,
        ty: Type,
        a: [Slot; 3],
        ones: [bool; 3],
    ) -> Slot {
        let d =
            self.new_register(if uniform { RegisterKind::Uniform } else { RegisterKind::Tile(ty) }, section);
        self.section_ops(section).push(Op { kind, is_uniform: uniform, d, a, uniform_operands: ones });
        d
    }

    /// Emits the instructions that `roots` need and that are not emitted yet.
    fn compute(&mut self, stage: usize, roots: &[Reg]) {
        let mut needed = vec![false; self.expr.insts().len()];
        for root in roots {
            needed[usize::from(root.0)] = true;
        }
        // Load of a value that the first stage has saved.
        let keep_inst = |i: usize| {
            let k = self.saved.iter().position(|reg| usize::from(reg.0) == i).filter(|_| stage > 0)?;
            Some(Inst::Load((self.plan.nest.loads.len() + k) as u16))
        };
        let used_insts: Vec<Option<Inst>> = (0..needed.len()).map(keep_inst).collect();
        for (i, (inst, _)) in self.expr.insts().iter().enumerate().rev() {
            let numbers = matches!(inst, Inst::Binary(..)) && self.linear_index_axes(Reg(i as u16)).is_some();
            if needed[i] && self.value[i].is_none() && !numbers && used_insts[i].is_none() {
                for operand in inst.operands() {
                    needed[usize::from(operand.0)] = true;
                }
            }
        }
        for (i, &(inst, ty)) in self.expr.insts().iter().enumerate() {
            if needed[i] && self.value[i].is_none() {
                let section = self.section_of(i, stage);
                let value = self.emit(i, used_insts[i].unwrap_or(inst), ty, section, stage);
                self.value[i] = Some(value);
            }
        }
    }

    /// Returns the axes, as positions along a tile, that have their elements numbered by `reg` in row-major order, as
    /// in `(i * size + j) * size + k`.
    fn linear_index_axes(&self, reg: Reg) -> Option<Range<usize>> {
        let inst = |reg: Reg| self.expr.insts()[usize::from(reg.0)].0;
        match inst(reg) {
            Inst::Coordinate(axis) => {
                let at = self.plan.tile_axes.iter().position(|&other| other == usize::from(axis))?;
                Some(at..at + 1)
            }
            Inst::Binary(BinaryOp::Add, before, last) => {
                let (Inst::Coordinate(axis), Inst::Binary(BinaryOp::Mul, before, size)) =
                    (inst(last), inst(before))
                else {
                    return None;
                };
                let Inst::Const(Scalar::I64(size)) = inst(size) else { return None };
                let (before, last) = (self.linear_index_axes(before)?, self.linear_index_axes(last)?);
                let dim = self.plan.nest.dims[usize::from(axis)];
                (usize::try_from(size) == Ok(dim) && before.end == last.start)
                    .then_some(before.start..last.end)
            }
            _ => None,
        }
    }

    /// Returns the operation for the linear index over the axes `of` among `axes`.
    fn coordinate_op(&self, axes: &[usize], of: Range<usize>, along: bool) -> Kind {
        let size = |axes: &[usize]| axes.iter().map(|&axis| self.plan.nest.dims[axis]).product::<usize>();
        // An axis with one index has coordinate zero. An axis without indices never runs.
        let dim = size(&axes[of.clone()]).max(1);
        let after = if dim == 1 { 1 } else { size(&axes[of.end..]).max(1) };
        Kind::Coordinate { along, after, dim }
    }

    /// Emits one instruction, after its operands.
    fn emit(&mut self, i: usize, inst: Inst, ty: Type, section: Section, stage: usize) -> Slot {
        let is_uniform = !self.varies[i].0;
        if let (Inst::Binary(..), Some(axes)) = (inst, self.linear_index_axes(Reg(i as u16))) {
            let kind = self.coordinate_op(self.plan.tile_axes, axes, !is_uniform);
            return self.push(section, kind, is_uniform, ty, [0; 3]);
        }
        let mut a = [0; 3];
        let mut ones = [false; 3];
        for (k, reg) in inst.operands().enumerate() {
            // A uniform operand need not be copied over a tile if the operation reads one value.
            let takes_one = match inst {
                Inst::Binary(..) | Inst::Compare(..) => ops::takes_one(self.expr.ty(reg)),
                Inst::Select(..) => k > 0,
                _ => false,
            };
            ones[k] =
                !is_uniform && takes_one && !self.varies[usize::from(reg.0)].0 && !ones[..k].contains(&true);
            a[k] = self.operand(reg, is_uniform || ones[k], stage);
        }
        let of = |reg: Reg| self.expr.ty(reg);
        let (kind, op_type) = match inst {
            Inst::Const(value) => (Kind::Const(value.convert(ty).bits()), ty),
            Inst::Run(scalar) => (Kind::Run(scalar), Type::U64),
            Inst::Coordinate(axis) => {
                let along = self.plan.tile_axes.contains(&usize::from(axis));
                let axes = if along { self.plan.tile_axes } else { self.plan.outer_axes };
                let at = axes.iter().take_while(|&&other| other != usize::from(axis)).count();
                (self.coordinate_op(axes, at..at + 1, along && !is_uniform), Type::I64)
            }
            Inst::Load(slot) => {
                let load = &self.loads[usize::from(slot)];
                let stored = Type::of(load.dtype);
                // A value that each row has once is read directly by its users: in machine code, often by one function.
                // If rows have several elements, a store to such a value has one element per row too, and runs after
                // all loads.
                let has_long_axis = self.plan.tile_axes.iter().any(|&axis| self.plan.nest.dims[axis] > 1);
                let plain = load.dtype == DType::F32 && ty == Type::F32;
                if is_uniform && plain && has_long_axis && section != Section::Once {
                    return self
                        .new_register(RegisterKind::DirectUniform(DIRECT_BIT | Slot::from(slot)), section);
                }
                let operand_type = match slot {
                    _ if self.plan.is_product(slot) => Some(DIRECT_PRODUCT),
                    _ => {
                        let target_slot = !is_uniform
                            && load.contiguous_len().is_some_and(|piece| piece.is_multiple_of(self.piece));
                        target_slot.then_some(DIRECT_BIT | Slot::from(slot))
                    }
                };
                match operand_type {
                    Some(target_slot) if stored == ty => {
                        return self.new_register(RegisterKind::Direct(target_slot), section);
                    }
                    Some(target_slot) => {
                        a[0] = self.new_register(RegisterKind::Direct(target_slot), section);
                        (Kind::Copy(stored), stored)
                    }
                    None => (Kind::Load(slot), stored),
                }
            }
            Inst::LoadAt(slot, _) => (Kind::LoadAt(slot), Type::of(self.loads[usize::from(slot)].dtype)),
            Inst::Reduced(k) => {
                let (reduced_type, result) =
                    self.reduced[usize::from(k)].expect("reduced in an earlier stage");
                if reduced_type == ty {
                    return result;
                }
                a[0] = result;
                (Kind::Convert(reduced_type, ty), ty)
            }
            Inst::Unary(op, _) => (Kind::Unary(op, ty), ty),
            Inst::Binary(op, ..) => (Kind::Binary(op, ty), ty),
            Inst::Compare(op, x, _) => (Kind::Compare(op, of(x)), Type::Bool),
            Inst::Select(..) => (Kind::Select(ty), ty),
            Inst::Convert(x) if of(x) == ty => return a[0],
            Inst::Convert(x) => (Kind::Convert(of(x), ty), ty),
            Inst::Guard(..) => (Kind::Guard(i as u16), Type::I64),
            Inst::Random(..) => (Kind::Random, Type::U32),
        };
        let result_slot = self.push_with(section, kind, is_uniform, op_type, a, ones);
        if op_type == ty {
            result_slot
        } else {
            self.push(section, Kind::Convert(op_type, ty), is_uniform, ty, [result_slot, 0, 0])
        }
    }

    /// Returns the register of a value that is already emitted: as one value, or over the tile.
    fn operand(&mut self, reg: Reg, is_uniform: bool, stage: usize) -> Slot {
        let i = usize::from(reg.0);
        let value = self.value[i].expect("operands come before users");
        if is_uniform || self.varies[i].0 {
            return value;
        }
        if let Some(splat) = self.splat[i] {
            return splat;
        }
        let section = self.section_of(i, stage);
        let ty = self.expr.ty(reg);
        let splat = self.push(section, Kind::Splat(ty), false, ty, [value, 0, 0]);
        self.splat[i] = Some(splat);
        splat
    }

    fn reduce(&mut self, stage: usize, k: usize, op: ReduceOp, value: Reg) {
        let ty = self.expr.ty(value);
        let a = self.operand(value, false, stage);
        let (kind, state, result) = match self.plan.loop_order {
            LoopOrder::Col => (Kind::Accumulate(op, ty), RegisterKind::Tile(ty), RegisterKind::Tile(ty)),
            _ => (Kind::Fold(op, ty), RegisterKind::PairwiseSum, RegisterKind::Uniform),
        };
        // State and result live as long as the whole tile program.
        let state = self.new_register(state, Section::Once);
        let result = self.new_register(result, Section::Once);
        self.section_ops(Section::Body(stage)).push(Op {
            kind,
            is_uniform: false,
            d: state,
            a: [a, 0, 0],
            uniform_operands: [false; 3],
        });
        self.totals[stage].push(StageReduction { op, ty, reduction_index: k, state, result });
        self.reduced[k] = Some((ty, result));
    }

    /// Emits an output into a register. Returns the operation that stores it, and the section of that operation.
    fn emit_output(
        &mut self,
        stage: usize,
        slot: usize,
        store: &StridedView,
        reg: Reg,
        stores_per_row: bool,
    ) -> Result<(Section, Op), String> {
        let (along, outside) = self.varies[usize::from(reg.0)];
        let section = if stores_per_row { Section::Post } else { Section::Body(stage) };
        let is_per_row = stores_per_row && self.plan.loop_order == LoopOrder::Row;
        if stores_per_row && (if is_per_row { along } else { outside }) {
            return Err(format!("store {slot} has one element per row, but its value changes along the row"));
        }
        let mut a = self.operand(reg, is_per_row, stage);
        let (ty, stored) = (self.expr.ty(reg), Type::of(store.dtype));
        if ty != stored {
            a = self.push(section, Kind::Convert(ty, stored), is_per_row, stored, [a, 0, 0]);
        } else if matches!(
            self.registers[a as usize].0,
            RegisterKind::Direct(_) | RegisterKind::DirectUniform(_)
        ) {
            a = self.push(section, Kind::Copy(ty), is_per_row, ty, [a, 0, 0]);
        }
        // A store produces no value; its result register is never written.
        Ok((
            section,
            Op {
                kind: Kind::Store(slot as u16),
                is_uniform: is_per_row,
                d: a,
                a: [a, 0, 0],
                uniform_operands: [false; 3],
            },
        ))
    }

    /// Finishes the code, with machine code if there is memory for it. Tiles and the order of sums do not depend on
    /// machine code.
    fn finish(
        mut self,
        isa: Isa,
        memory: Option<&Arc<CodeMemory>>,
        stores: &[StridedView],
        tile: usize,
    ) -> Code {
        self.compare_coordinates();
        self.gather_to_row_loads();
        if memory.is_some() {
            self.group_sections(isa, stores, tile);
        }
        self.assign_offsets(isa, memory, tile)
    }

    /// Compares coordinates with one number directly, instead of writing both over a tile first.
    fn compare_coordinates(&mut self) {
        let mut producer_by_slot: FxHashMap<Slot, Op> = FxHashMap::default();
        for op in self.lists.iter().flat_map(|(_, list)| list) {
            if matches!(op.kind, Kind::Coordinate { along: true, .. } | Kind::Splat(Type::I64)) {
                producer_by_slot.insert(op.d, *op);
            }
        }
        for op in self.lists.iter_mut().flat_map(|(_, list)| list) {
            let Kind::Compare(compare, Type::I64) = op.kind else { continue };
            let [a, b] = [op.a[0], op.a[1]]
                .map(|slot| producer_by_slot.get(&slot).map(|producer| (producer.kind, producer.a[0])));
            let (coordinate, uniform, first) = match (a, b) {
                (Some((kind, _)), Some((Kind::Splat(_), one))) => (kind, one, true),
                (Some((Kind::Splat(_), one)), Some((kind, _))) => (kind, one, false),
                _ => continue,
            };
            let Kind::Coordinate { after, dim, .. } = coordinate else { continue };
            op.kind = Kind::CompareCoordinate { op: compare, first, after, dim };
            op.a = [uniform, 0, 0];
        }
        self.drop_unread_ops(&producer_by_slot);
    }

    /// Loads a row of consecutive elements from its first index, instead of writing the index of every element over a
    /// tile first. Examples are embeddings and the steps of a sequence.
    fn gather_to_row_loads(&mut self) {
        let LoopPlan { nest, tile_axes: along, .. } = *self.plan;
        let row_len: usize = along.iter().map(|&axis| nest.dims[axis]).product();
        let mut producer_by_slot: FxHashMap<Slot, Op> = FxHashMap::default();
        let mut sums: FxHashMap<Slot, Op> = FxHashMap::default();
        for op in self.lists.iter().flat_map(|(_, list)| list).filter(|op| !op.is_uniform) {
            match op.kind {
                Kind::Coordinate { along: true, .. } | Kind::Splat(Type::I64) => {
                    _ = producer_by_slot.insert(op.d, *op);
                }
                Kind::Binary(BinaryOp::Add, Type::I64) => _ = sums.insert(op.d, *op),
                _ => {}
            }
        }
        for op in self.lists.iter_mut().flat_map(|(_, list)| list).filter(|op| !op.is_uniform) {
            let (Kind::LoadAt(slot), Some(sum)) = (op.kind, sums.get(&op.a[0])) else { continue };
            let [a, b] = [sum.a[0], sum.a[1]].map(|source_slot| {
                producer_by_slot.get(&source_slot).map(|producer| (producer.kind, producer.a[0]))
            });
            let terms = || [a, b].into_iter().flatten();
            let first = terms().find(|(kind, _)| matches!(kind, Kind::Splat(_)));
            // Only the linear index along the whole tile counts up by one from element to element.
            let counts =
                |kind: Kind| matches!(kind, Kind::Coordinate { after: 1, dim, .. } if dim == row_len);
            if let (Some((_, first)), true) = (first, terms().any(|(kind, _)| counts(kind))) {
                op.kind = Kind::LoadRow(slot);
                op.a = [first, 0, 0];
            }
        }
        self.drop_unread_ops(&sums);
        self.drop_unread_ops(&producer_by_slot);
    }

    /// Drops each operation of `some` if its result is not read any more.
    fn drop_unread_ops(&mut self, some: &FxHashMap<Slot, Op>) {
        if some.is_empty() {
            return;
        }
        let ops = self.lists.iter().flat_map(|(_, list)| list);
        let read: FxHashSet<Slot> = ops.flat_map(|op| op.a.into_iter().take(op.kind.operands())).collect();
        for (_, list) in &mut self.lists {
            list.retain(|op| !some.contains_key(&op.d) || read.contains(&op.d));
        }
    }

    /// Groups the operations that machine code supports.
    fn group_sections(&mut self, isa: Isa, stores: &[StridedView], tile: usize) {
        let mut readers: FxHashMap<Slot, usize> = FxHashMap::default();
        let mut constants: FxHashMap<Slot, u64> = FxHashMap::default();
        for op in self.lists.iter().flat_map(|(_, list)| list) {
            for slot in &op.a[..op.kind.operands()] {
                *readers.entry(*slot).or_default() += 1;
            }
            if let Kind::Const(bits) = op.kind {
                constants.insert(op.d, bits);
            }
        }
        for index in 0..self.lists.len() {
            let list = std::mem::take(&mut self.lists[index].1);
            let list = self.group_ops(isa, (stores, tile), list, &readers, &constants);
            self.lists[index].1 = list;
        }
    }

    /// Groups the operations of a list, each group as large as the dependencies allow.
    fn group_ops(
        &mut self,
        isa: Isa,
        (stores, tile): (&[StridedView], usize),
        list: Vec<Op>,
        readers: &FxHashMap<Slot, usize>,
        constants: &FxHashMap<Slot, u64>,
    ) -> Vec<Op> {
        let sizes: Vec<RegisterKind> = self.registers.iter().map(|(size, _)| *size).collect();
        let context = Context {
            isa,
            sizes: &|slot| sizes[slot as usize],
            constants,
            loads: self.loads,
            stores,
            readers,
            piece: self.piece,
            tile,
        };
        let is_store = |op: &Op| matches!(op.kind, Kind::Store(_));
        let (stores, mut rest): (Vec<Op>, Vec<Op>) = list.into_iter().partition(is_store);
        let mut missing: Vec<Slot> = rest.iter().filter(|op| op.kind.has_result()).map(|op| op.d).collect();
        let ready =
            |op: &Op, missing: &[Slot]| op.a[..op.kind.operands()].iter().all(|slot| !missing.contains(slot));
        let mut done = Vec::new();
        let mut group: Vec<Op> = Vec::new();
        while !rest.is_empty() {
            let mut later = Vec::new();
            for op in std::mem::take(&mut rest) {
                if !jit::takes(&op, &context) && ready(&op, &missing) {
                    missing.retain(|&slot| slot != op.d);
                    done.push(op);
                } else {
                    later.push(op);
                }
            }
            // Uniform operations come first, because tiles may need their results. A function never mixes both.
            for is_uniform in [true, false] {
                rest = Vec::new();
                for op in std::mem::take(&mut later) {
                    if op.is_uniform == is_uniform && jit::takes(&op, &context) && ready(&op, &missing) {
                        missing.retain(|&slot| slot != op.d || !op.kind.has_result());
                        group.push(op);
                    } else {
                        rest.push(op);
                    }
                }
                if is_uniform {
                    self.compile_group(std::mem::take(&mut group), &context, &mut done);
                    later = std::mem::take(&mut rest);
                }
            }
            if !rest.is_empty() {
                self.compile_group(std::mem::take(&mut group), &context, &mut done);
            }
        }
        // All loads come before all stores.
        let (together, separate): (Vec<Op>, Vec<Op>) =
            stores.into_iter().partition(|op| jit::takes(op, &context));
        group.extend(together);
        self.compile_group(group, &context, &mut done);
        done.extend(separate);
        done
    }

    /// Compiles a list of operations to one function. If that fails, tries each half; a single operation stays
    /// interpreted.
    fn compile_group(&mut self, list: Vec<Op>, context: &Context<'_>, done: &mut Vec<Op>) {
        if list.is_empty() {
            return;
        }
        let registers = &mut self.registers;
        let lanes_of = || {
            registers.push((RegisterKind::Lanes, Section::Once));
            (registers.len() - 1) as Slot
        };
        if let Some(group) = Group::new(&list, context, lanes_of) {
            let kind = Kind::Native(self.groups.len() as u16);
            self.groups.push(group);
            done.push(Op {
                kind,
                is_uniform: list[0].is_uniform,
                d: 0,
                a: [0; 3],
                uniform_operands: [false; 3],
            });
        } else if list.len() == 1 {
            done.extend(list);
        } else {
            let mut first = list;
            let second = first.split_off(first.len() / 2);
            self.compile_group(first, context, done);
            self.compile_group(second, context, done);
        }
    }

    /// Forgets the values that a section has computed.
    fn forget_section(&mut self, section: Section) {
        for slot in self.value.iter_mut().chain(&mut self.splat) {
            if slot.is_some_and(|slot| self.registers[slot as usize].1 == section) {
                *slot = None;
            }
        }
    }

    /// Returns the live ranges of tile registers: (register, first and last position).
    fn lifetimes(&self) -> Vec<(usize, usize, usize)> {
        const FOREVER: usize = usize::MAX;
        let mut first = vec![None; self.registers.len()];
        let mut last = vec![0; self.registers.len()];
        let mut position = 0;
        for (section, list) in &self.lists {
            let end = position + list.len();
            for op in list {
                position += 1;
                let (reads, writes) = match op.kind {
                    Kind::Native(k) => {
                        let group = &self.groups[usize::from(k)];
                        (group.reads(), group.writes())
                    }
                    _ => (op.a.as_slice(), std::slice::from_ref(&op.d)),
                };
                for &slot in writes {
                    first[slot as usize].get_or_insert(position);
                }
                for &slot in reads.iter().chain(writes) {
                    let index = slot as usize;
                    // A value from outside of a loop must live until the loop ends.
                    let looped = matches!(section, Section::Body(_)) && self.registers[index].1 != *section;
                    last[index] = last[index].max(if looped { end } else { position });
                }
            }
        }
        let tiles =
            self.registers.iter().enumerate().filter(|(_, (size, _))| matches!(size, RegisterKind::Tile(_)));
        tiles
            .map(|(i, (_, section))| match section {
                // Computed once for many passes through the other sections.
                Section::Once => (i, 0, FOREVER),
                _ => (i, first[i].unwrap_or(0), last[i]),
            })
            .collect()
    }

    /// Assigns a slot to each tile register. Returns the slots, and the number of slots in use.
    fn assign_slots(&self) -> (Vec<usize>, usize) {
        let mut lifetimes = self.lifetimes();
        lifetimes.sort_by_key(|&(register, first, _)| (first, register));
        let mut slots = vec![0; self.registers.len()];
        let mut free_from: Vec<usize> = Vec::new();
        for (register, first, last) in lifetimes {
            // Strictly before: a result never gets the slot of an operand that ends at the same operation.
            let slot = free_from.iter().position(|&end| end < first).unwrap_or_else(|| {
                free_from.push(0);
                free_from.len() - 1
            });
            free_from[slot] = last;
            slots[register] = slot;
        }
        (slots, free_from.len())
    }

    /// Returns the bytes of one slot.
    fn slot_bytes(&self, tile: usize) -> usize {
        let widths = self.registers.iter().map(|(size, _)| match size {
            RegisterKind::Tile(ty) => width(*ty),
            _ => 0,
        });
        // Slots at distances of 4096 bytes would alias in the store buffer.
        (tile * widths.max().unwrap_or(0)).next_multiple_of(ALIGN) + ALIGN
    }

    fn fixed_bytes(&self) -> usize {
        let sizes = self.registers.iter().map(|(size, _)| match size {
            RegisterKind::Uniform => 8,
            RegisterKind::Tile(_) | RegisterKind::Direct(_) | RegisterKind::DirectUniform(_) => 0,
            RegisterKind::PairwiseSum => size_of::<PairwiseSum>(),
            RegisterKind::Lanes => LANES_BYTES,
        });
        (size_of::<FrameHeader>() + sizes.sum::<usize>()).next_multiple_of(ALIGN)
    }

    fn bytes(&self, tile: usize, slots: usize) -> usize {
        self.fixed_bytes() + slots * self.slot_bytes(tile)
    }

    /// Assigns an offset in the frame to every register.
    fn assign_offsets(self, isa: Isa, memory: Option<&Arc<CodeMemory>>, tile: usize) -> Code {
        let (slots, count) = self.assign_slots();
        let frame = self.bytes(tile, count);
        let (slot_bytes, tiles) = (self.slot_bytes(tile), self.fixed_bytes());
        let mut fixed = size_of::<FrameHeader>();
        let offsets: Vec<Slot> = self
            .registers
            .iter()
            .zip(&slots)
            .map(|((size, _), &slot)| {
                let frame_offset = match size {
                    RegisterKind::Direct(there) | RegisterKind::DirectUniform(there) => return *there,
                    RegisterKind::Tile(_) => tiles + slot * slot_bytes,
                    RegisterKind::Uniform => {
                        fixed += 8;
                        fixed - 8
                    }
                    RegisterKind::PairwiseSum => {
                        fixed += size_of::<PairwiseSum>();
                        fixed - size_of::<PairwiseSum>()
                    }
                    RegisterKind::Lanes => {
                        fixed += LANES_BYTES;
                        fixed - LANES_BYTES
                    }
                };
                frame_offset as Slot
            })
            .collect();
        let offset_of = |register: Slot| offsets.get(register as usize).copied().unwrap_or(0);
        let functions = Functions::new(&self.groups, &offset_of, memory.unwrap_or(&Arc::default()));
        let mut code = Code {
            isa,
            per_run: Vec::new(),
            stages: vec![Stage::default(); self.totals.len()],
            post: Vec::new(),
            functions,
            tile,
            piece: self.piece,
            frame,
            num_saved: self.saved.len(),
            can_fail: self.expr.can_fail(),
            cost: self.cost,
        };
        for (section, mut list) in self.lists {
            for op in &mut list {
                op.d = offset_of(op.d);
                op.a = op.a.map(offset_of);
            }
            match section {
                Section::Once => code.per_run = list,
                Section::Pre(stage) => code.stages[stage].pre = list,
                Section::Body(stage) => code.stages[stage].body = list,
                Section::Post => code.post = list,
            }
        }
        for (stage, totals) in code.stages.iter_mut().zip(self.totals) {
            stage.reductions = totals
                .into_iter()
                .map(|total| StageReduction {
                    state: offset_of(total.state),
                    result: offset_of(total.result),
                    ..total
                })
                .collect();
        }
        code
    }
}

impl Kind {
    /// Returns the number of registers that the operation reads.
    fn operands(self) -> usize {
        match self {
            Kind::Const(_) | Kind::Run(_) | Kind::Coordinate { .. } | Kind::Load(_) | Kind::Native(_) => 0,
            Kind::Copy(_)
            | Kind::LoadAt(_)
            | Kind::LoadRow(_)
            | Kind::CompareCoordinate { .. }
            | Kind::Unary(..)
            | Kind::Convert(..)
            | Kind::Splat(_)
            | Kind::Store(_)
            | Kind::Fold(..)
            | Kind::Accumulate(..) => 1,
            Kind::Binary(..) | Kind::Compare(..) | Kind::Guard(_) => 2,
            Kind::Select(_) | Kind::Random => 3,
        }
    }

    /// Returns true if the operation defines its result register.
    fn has_result(self) -> bool {
        !matches!(self, Kind::Store(_) | Kind::Fold(..) | Kind::Accumulate(..))
    }

    /// Estimates the work per element, in additions.
    fn cost(self) -> usize {
        match self {
            Kind::Unary(
                UnaryOp::Exp
                | UnaryOp::Log
                | UnaryOp::Erf
                | UnaryOp::Tanh
                | UnaryOp::Sigmoid
                | UnaryOp::Sqrt
                | UnaryOp::Rsqrt
                | UnaryOp::Sin
                | UnaryOp::Cos
                | UnaryOp::Atan,
                ty,
            ) => {
                if ty == Type::F32 {
                    8
                } else {
                    64
                }
            }
            Kind::Binary(BinaryOp::Pow | BinaryOp::Rem, _) => 32,
            Kind::Random => 16,
            Kind::Unary(UnaryOp::ToF16 | UnaryOp::ToBf16, _)
            | Kind::Binary(BinaryOp::Div, _)
            | Kind::LoadAt(_)
            | Kind::Guard(_) => 4,
            _ => 1,
        }
    }
}

/// Checks that the expression is well typed, and that the nest runs without reads or writes out of bounds.
fn check(nest: &Nest) -> Result<(), String> {
    if let Some(fault) = nest.validate() {
        return Err(fault);
    }
    let expr = &nest.expr;
    let insts = expr.insts();
    for (i, &(inst, ty)) in insts.iter().enumerate() {
        let error = |what: &str| Err(format!("instruction {i} ({inst:?} as {ty:?}): {what}"));
        if inst.operands().any(|reg| usize::from(reg.0) >= i) {
            return error("an operand is computed later");
        }
        let of = |reg: Reg| expr.ty(reg);
        match inst {
            Inst::Load(slot) | Inst::LoadAt(slot, _) if usize::from(slot) >= nest.loads.len() => {
                return error("no such load");
            }
            Inst::LoadAt(_, index) if of(index) != Type::I64 => return error("the index is not i64"),
            Inst::Coordinate(axis) if usize::from(axis) >= nest.dims.len() => return error("no such axis"),
            Inst::Coordinate(_) | Inst::Guard(..) if ty != Type::I64 => {
                return error("the result must be i64");
            }
            Inst::Run(_) if ty != Type::U64 => return error("the result must be u64"),
            Inst::Compare(..) if ty != Type::Bool => return error("the result must be bool"),
            Inst::Random(..) if ty != Type::U32 => return error("the result must be u32"),
            Inst::Reduced(k) if usize::from(k) >= nest.reductions.len() => return error("no such reduction"),
            Inst::Unary(_, a) if of(a) != ty => return error("the operand has another type"),
            Inst::Unary(op, _) => {
                let fits = match op {
                    UnaryOp::Not => ty == Type::Bool,
                    UnaryOp::ToF16 | UnaryOp::ToBf16 => ty == Type::F32,
                    UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Sign | UnaryOp::Floor => ty != Type::Bool,
                    _ => ty.is_float(),
                };
                if !fits {
                    return error("not defined for the type");
                }
            }
            Inst::Binary(_, a, b) if of(a) != ty || of(b) != ty => {
                return error("an operand has another type");
            }
            Inst::Binary(op, ..) => {
                let fits = match op {
                    BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => !ty.is_float(),
                    _ => ty != Type::Bool,
                };
                if !fits {
                    return error("not defined for the type");
                }
            }
            Inst::Compare(_, a, b) if of(a) != of(b) => return error("operands of two types"),
            Inst::Select(c, a, b) if of(c) != Type::Bool || of(a) != ty || of(b) != ty => {
                return error("an operand has another type");
            }
            Inst::Guard(a, b) if of(a) != Type::I64 || of(b) != Type::I64 => {
                return error("an operand is not i64");
            }
            Inst::Random(a, b, c) if [a, b, c].iter().any(|&reg| of(reg) != Type::U64) => {
                return error("an operand is not u64");
            }
            Inst::Const(value) if matches!(value, Scalar::Bool(_)) != (ty == Type::Bool) => {
                return error("a constant has another type");
            }
            _ => {}
        }
    }
    if expr
        .outputs()
        .iter()
        .chain(nest.reductions.iter().map(|r| &r.value))
        .any(|reg| usize::from(reg.0) >= insts.len())
    {
        return Err("a result is not computed".to_owned());
    }
    for (k, reduction) in nest.reductions.iter().enumerate() {
        if expr.ty(reduction.value) == Type::Bool {
            return Err(format!("reduction {k} reduces booleans"));
        }
        let needed = expr.dependencies_of(&[reduction.value]);
        let later = |inst: Inst| matches!(inst, Inst::Reduced(other) if usize::from(other) >= k);
        if insts.iter().zip(&needed).any(|(&(inst, _), &needed)| needed && later(inst)) {
            return Err(format!("reduction {k} depends on a later reduction"));
        }
    }
    if nest.inner == 0 && !nest.reductions.is_empty() {
        return Err("a reduction needs a reduced axis".to_owned());
    }
    let outer_rank = nest.dims.len() - nest.inner;
    for (i, store) in nest.stores.iter().enumerate() {
        let (outer, inner) = store.strides.split_at(outer_rank);
        let per_row = inner.iter().all(|&stride| stride == 0);
        let stored = if per_row { nest.outer_dims() } else { &nest.dims };
        if nest.segments.is_some() {
            // `Nest::validate` has checked the accesses of segments.
            continue;
        }
        let twice = outer.iter().zip(&nest.dims).any(|(&stride, &dim)| stride == 0 && dim > 1);
        if twice && !stored.contains(&0) {
            return Err(format!("store {i} writes several results to one element"));
        }
    }
    Ok(())
}
