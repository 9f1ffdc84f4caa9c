//! Sums of squares of short rows, for example of the groups of elements in a norm of millions of elements.

use ortrain_expr::{BinaryOp, DType, Inst, Load, Nest, ReduceOp, Reg, Type};

use crate::isa::{Isa, Level, Work};
use crate::pool::Pool;
use crate::scratch::BaseAddresses;
use crate::tile::ops;

/// Maximum row length. For longer rows, the overhead per row is small beside the work on its elements.
const MAX_ROW_LEN: usize = 128;
/// Approximate number of elements of a task.
const MIN_TASK_WORK: usize = 1 << 15;

/// Rows of adjacent elements, and the destination of their sums of squares.
#[derive(Debug)]
pub(crate) struct RowSquareSums {
    rows: usize,
    len: usize,
    from: RowAddresses,
    to: RowAddresses,
}

/// First element, and step from row to row.
#[derive(Clone, Copy, Debug)]
struct RowAddresses {
    offset: isize,
    step: isize,
}

impl RowSquareSums {
    /// Returns the sums of squares that a reduction of rows computes, if its shape and types fit.
    pub(crate) fn from_nest(nest: &Nest) -> Option<RowSquareSums> {
        let (&[rows, len], [Load::Buffer(load)], [store]) =
            (&*nest.dims, nest.loads.as_slice(), nest.stores.as_slice())
        else {
            return None;
        };
        let [reduction] = nest.reductions.as_slice() else { return None };
        let at = |reg: Reg| nest.expr.insts().get(usize::from(reg.0)).copied();
        let is_load = |reg: Reg| at(reg) == Some((Inst::Load(0), Type::F32));
        let is_square = match at(reduction.value) {
            Some((Inst::Binary(BinaryOp::Mul, a, b), Type::F32)) => is_load(a) && is_load(b),
            _ => false,
        };
        let is_sum = match nest.expr.outputs() {
            &[result] => at(result) == Some((Inst::Reduced(0), Type::F32)),
            _ => false,
        };
        let fits = nest.inner == 1
            && nest.segments.is_none()
            && reduction.op == ReduceOp::Sum
            && [load.dtype, store.dtype] == [DType::F32; 2]
            && load.strides[1] == 1
            && (1..=MAX_ROW_LEN).contains(&len)
            && is_square
            && is_sum;
        let side = |offset: usize, step: isize| RowAddresses { offset: offset as isize, step };
        let (from, to) = (side(load.offset, load.strides[0]), side(store.offset, store.strides[0]));
        fits.then_some(RowSquareSums { rows, len, from, to })
    }

    /// Computes the sums.
    ///
    /// # Safety
    /// The contract of [`crate::NestKernel::run`] for the nest that the sums were created from.
    pub(crate) unsafe fn run(&self, isa: Isa, bases: BaseAddresses<'_>, pool: &Pool, workers: usize) {
        let each = (MIN_TASK_WORK / self.len).max(1);
        pool.run(self.rows.div_ceil(each), workers, &|task, _| {
            let bases = &{ bases };
            let (first, last) = (task * each, self.rows.min((task + 1) * each));
            let at = |base: *mut u8, side: RowAddresses| {
                base.cast::<f32>().wrapping_offset(side.offset + first as isize * side.step)
            };
            let (from, to) = (at(bases.0[0], self.from), at(bases.0[1], self.to));
            isa.run(TaskRows {
                rows: last - first,
                len: self.len,
                from: (from, self.from.step),
                to: (to, self.to.step),
            });
        });
    }
}

/// Rows of a task.
struct TaskRows {
    rows: usize,
    len: usize,
    from: (*const f32, isize),
    to: (*mut f32, isize),
}

impl Work for TaskRows {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let mut squares = [0f32; MAX_ROW_LEN];
        for row in 0..self.rows as isize {
            let from = self.from.0.wrapping_offset(row * self.from.1);
            for (i, square) in squares[..self.len].iter_mut().enumerate() {
                // SAFETY: by the contract of `run` this is an element of the nest.
                let value = unsafe { from.wrapping_add(i).read_unaligned() };
                *square = value * value;
            }
            let sum = ops::sum::<L>(&squares[..self.len]);
            // SAFETY: as above; no two rows have the same destination.
            unsafe { self.to.0.wrapping_offset(row * self.to.1).write_unaligned(sum) };
        }
    }
}

#[cfg(test)]
mod tests {
    use ortrain_expr::{Access, Builder, Reduction};

    use super::*;
    use crate::{NestKernel, Order, RunScalars, Scratch};

    fn square_sum_nest(rows: usize, len: usize, step: usize) -> Nest {
        let access = |strides: [isize; 2]| Access {
            dtype: DType::F32,
            strides: strides.into_iter().collect(),
            ..Access::contiguous(DType::F32, &[rows, len])
        };
        let mut b = Builder::new();
        let x = b.load(0, Type::F32);
        let square = b.mul(x, x);
        let sum = b.reduced(0, Type::F32);
        let (expr, values) = b.finish_keeping(&[sum], &[square]);
        Nest {
            dims: [rows, len].into_iter().collect(),
            inner: 1,
            segments: None,
            loads: vec![Load::Buffer(Access { len: rows * step, ..access([step as isize, 1]) })],
            expr,
            reductions: vec![Reduction { op: ReduceOp::Sum, value: values[0] }],
            stores: vec![Access { len: rows, ..access([1, 0]) }],
        }
    }

    /// Checks that the sums have the bits of the general reduction, at every level and on several threads.
    #[test]
    fn sums_equal_the_general_reduction() {
        for (rows, len, step) in
            [(1500, 64, 64), (700, 100, 101), (3, 128, 128), (40, 33, 33), (900, 127, 130)]
        {
            let nest = square_sum_nest(rows, len, step);
            let x: Vec<f32> = (0..rows * step).map(|k| ((k as f32) * 0.37).sin() * 3.0).collect();
            for isa in Isa::available() {
                let run = |order: Order| {
                    let kernel = NestKernel::with_order(&nest, isa, order).expect("valid nest");
                    assert_eq!(RowSquareSums::from_nest(&nest).is_some(), len <= MAX_ROW_LEN);
                    let mut sums = vec![0f32; rows];
                    let bases = [x.as_ptr().cast_mut().cast::<u8>(), sums.as_mut_ptr().cast::<u8>()];
                    let mut scratch = vec![0u128; kernel.scratch_bytes(3).div_ceil(16) + 4];
                    let at = scratch.as_mut_ptr().cast::<u8>();
                    let at = at.wrapping_add(at.align_offset(64));
                    let scratch = Scratch::new(at, kernel.scratch_bytes(3));
                    // SAFETY: buffers of the accesses' lengths, which do not overlap.
                    unsafe { kernel.run(&bases, RunScalars::default(), &Pool::new(3), scratch) }
                        .expect("no guards");
                    sums.iter().map(|sum| sum.to_bits()).collect::<Vec<u32>>()
                };
                assert_eq!(run(Order::Auto), run(Order::Row), "{isa}: {rows} rows of {len}");
            }
        }
    }
}
