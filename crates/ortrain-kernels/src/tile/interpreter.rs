//! Execution of tile programs.

use std::ops::Range;

use ortrain_expr::{CompareOp, RunScalar};

use super::jit::Site;
use super::memory::width;
use super::op::{DIRECT_BIT, DIRECT_PRODUCT, Kind, Op, Slot};
use super::ops;
use super::pairwise_sum::PairwiseSum;
use super::program::{Failure, TileProgram};
use super::random::random;
use crate::RunScalars;

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
        unsafe {
            let TileProgram { loads, stores, code, .. } = self.program;
            let site = Site { loads, stores, bases: self.bases, frame: self.frame, product: self.product };
            code.functions.run(k, site, outside, start, n);
        }
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
                    Kind::Random => random(isa, a, b, c, d, n),
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
