//! Transposing copies: elements are adjacent along one axis where they are read, and along another axis where they are
//! written.

use ortrain_expr::{Access, DType, Inst, Load, Nest, Type};

use crate::gemm::levels::Real;
use crate::gemm::pack::transpose;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::scratch::BaseAddresses;
use crate::tile::strided_iter::StridedIter;

/// Approximate number of elements of a task.
const MIN_TASK_WORK: usize = 1 << 14;
/// The number of lines of a task is a multiple of this: one task writes a whole cache line of results.
const TASK_LINE_UNIT: usize = 16;
/// Minimum size of both axes for a blocked transposition instead of a copy along one axis.
const MIN_BLOCKED_SIZE: usize = 8;

/// Transposition of matrices of `lines` lines of `len` adjacent elements into matrices of `len` lines.
#[derive(Debug)]
pub(crate) struct TransposingCopy {
    dtype: DType,
    matrices: usize,
    lines: usize,
    len: usize,
    from: MatrixLayout,
    to: MatrixLayout,
    /// Lines and matrices of a task. A task has several matrices only if it has all of their lines.
    task_lines: usize,
    task_matrices: usize,
}

/// Position of the matrices in a buffer: the first element of the first matrix, and the step from line to line.
#[derive(Debug)]
struct MatrixLayout {
    offset: isize,
    matrices: StridedIter,
    step: usize,
}

impl TransposingCopy {
    /// Returns the transposition that a map performs, if the map only copies matrices that are large enough.
    pub(crate) fn from_nest(nest: &Nest) -> Option<TransposingCopy> {
        let ([Load::Buffer(load)], [store]) = (nest.loads.as_slice(), nest.stores.as_slice()) else {
            return None;
        };
        let dtype = load.dtype;
        let copies = nest.inner == 0
            && nest.expr.insts() == [(Inst::Load(0), Type::of(dtype))]
            && store.dtype == dtype
            && matches!(dtype, DType::F32 | DType::F64);
        if !copies {
            return None;
        }
        let axes = 0..nest.dims.len();
        let adjacent = |access: &Access| {
            axes.clone().find(|&axis| access.strides[axis] == 1 && nest.dims[axis] >= MIN_BLOCKED_SIZE)
        };
        let (along, across) = (adjacent(load)?, adjacent(store)?);
        let side = |access: &Access, line: usize| {
            let others = axes.clone().filter(|axis| ![along, across].contains(axis));
            Some(MatrixLayout {
                offset: access.offset as isize,
                matrices: StridedIter::new(others.map(|axis| (nest.dims[axis], access.strides[axis])))
                    .ok()?,
                step: usize::try_from(access.strides[line]).ok().filter(|&step| step > 1)?,
            })
        };
        let (lines, len) = (nest.dims[across], nest.dims[along]);
        let (from, to) = (side(load, across)?, side(store, along)?);
        let matrices = nest.dims.iter().product::<usize>() / (lines * len);
        let piece = (MIN_TASK_WORK / len)
            .next_multiple_of(TASK_LINE_UNIT)
            .clamp(TASK_LINE_UNIT, lines.next_multiple_of(TASK_LINE_UNIT));
        let group = (MIN_TASK_WORK / (lines * len)).max(1);
        Some(TransposingCopy {
            dtype,
            matrices,
            lines,
            len,
            from,
            to,
            task_lines: piece,
            task_matrices: group,
        })
    }

    /// Runs the copy.
    ///
    /// # Safety
    /// The contract of [`crate::NestKernel::run`] for the nest that this copy was created from.
    pub(crate) unsafe fn run(&self, isa: Isa, bases: BaseAddresses<'_>, pool: &Pool, workers: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            match self.dtype {
                DType::F64 => self.run_as::<f64>(isa, bases, pool, workers),
                _ => self.run_as::<f32>(isa, bases, pool, workers),
            }
        }
    }

    unsafe fn run_as<T: Real>(&self, isa: Isa, bases: BaseAddresses<'_>, pool: &Pool, workers: usize) {
        let pieces = self.lines.div_ceil(self.task_lines);
        pool.run(self.matrices.div_ceil(self.task_matrices) * pieces, workers, &|task, _| {
            let bases = &{ bases };
            let (group, first) = (task / pieces * self.task_matrices, task % pieces * self.task_lines);
            let size = (self.task_lines.min(self.lines - first), self.len);
            for matrix in group..self.matrices.min(group + self.task_matrices) {
                let at = |base: *mut u8, side: &MatrixLayout, more: usize| {
                    let offset = side.offset + side.matrices.offset(matrix);
                    base.cast::<T>().wrapping_offset(offset).wrapping_add(more)
                };
                let from = at(bases.0[0], &self.from, first * self.from.step);
                let to = at(bases.0[1], &self.to, first);
                // SAFETY: these are elements of the nest, and its accesses stay in their buffers. Tasks have distinct
                // elements.
                unsafe { transpose(isa, from, self.from.step, size, to, self.to.step) };
            }
        });
    }
}
