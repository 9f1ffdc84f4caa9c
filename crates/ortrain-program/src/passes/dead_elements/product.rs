//! Narrowing of matrix products to slices of their axes.

use ortrain_expr::{Access, Dims, Strides};
use smallvec::SmallVec;

use super::strided_range::{AxisSlice, AxisSlices, NarrowedSpace};
use crate::buffer::add_work;
use crate::{Buffer, Instruction, MatMul, Nest, Operand};

/// Factor of a product. The axes are the batch, then rows and terms (left), or terms and columns (right).
struct Factor {
    operand: Operand,
    dims: Dims,
}

/// Narrows a product to `cuts` of the result and to `terms` of the sums. Axes are numbered in the order batch, rows,
/// columns, terms.
///
/// Non-contiguous columns are not narrowed. If terms are non-contiguous, the returned nests copy the factors first.
/// Returns `None` if kernels do not support the layout of the factors.
pub(super) fn narrow_product(
    m: &MatMul,
    cuts: &AxisSlices,
    terms: &AxisSlices,
    buffers: &mut Vec<Buffer>,
) -> Option<(Instruction, SmallVec<[Nest; 2]>)> {
    let (rows, columns, sums) = (m.batch.len(), m.batch.len() + 1, m.batch.len() + 2);
    let is_removable = |cut: &&AxisSlice| cut.axis != columns || cut.period == m.n || cut.count == 1;
    let cuts: AxisSlices = cuts.iter().filter(is_removable).copied().collect();
    let of_factor = |axes: [usize; 2]| -> AxisSlices {
        let moved_slice = |cut: &AxisSlice| {
            let axis = if cut.axis < rows {
                cut.axis
            } else {
                rows + axes.iter().position(|&axis| axis == cut.axis)?
            };
            Some(AxisSlice { axis, ..*cut })
        };
        cuts.iter().chain(terms).filter_map(moved_slice).collect()
    };
    let [a_space, b_space] = m.spaces();
    let a = NarrowedSpace::new(&a_space, &of_factor([rows, sums]));
    let b = NarrowedSpace::new(&b_space, &of_factor([sums, columns]));
    let mut a = Factor { operand: m.a.with_access(a.access(&m.a.access)), dims: a.dims() };
    let mut b = Factor { operand: m.b.with_access(b.access(&m.b.access)), dims: b.dims() };
    let mut copies = SmallVec::new();
    let is_split = |slice: &&AxisSlice| slice.period != [m.m, m.n, m.k][slice.axis - rows] && slice.count > 1;
    if terms.iter().any(|slice| is_split(&slice)) {
        let (last, first) = (a.dims.len() - 1, b.dims.len() - 3);
        copies.push(a.merge_axes(last - 1, buffers)?);
        copies.push(b.merge_axes(first, buffers)?);
    }
    // Non-contiguous rows have two axes. The outer axis becomes a batch of products with the same right factor.
    if cuts.iter().filter(|slice| slice.axis == rows).any(|slice| is_split(&slice)) {
        let at = b.dims.len() - 2;
        b.dims.insert(at, a.dims[at]);
        b.operand.access.strides.insert(at, 0);
    }
    let batch = a.dims.len() - 2;
    // Kernels require rows or columns of adjacent elements.
    let adjacent = |Factor { dims, operand }: &Factor| {
        let last = dims.iter().zip(&operand.access.strides).skip(batch);
        last.into_iter().any(|(&dim, &stride)| dim == 1 || stride == 1)
    };
    if !adjacent(&a) || !adjacent(&b) {
        return None;
    }
    let product = MatMul {
        batch: a.dims[..batch].iter().copied().collect(),
        m: a.dims[batch],
        n: b.dims[batch + 1],
        k: b.dims[batch],
        a: a.operand,
        b: b.operand,
        epilogue: NarrowedSpace::new(&m.epilogue.dims, &cuts).nest(&m.epilogue),
        rounded: m.rounded,
        precision: m.precision,
    };
    Some((Instruction::from(product), copies))
}

impl Factor {
    /// Merges axis `outer` with the next axis, and returns the nest that copies the factor for this. Returns `None` if
    /// the inner axis has stride zero.
    fn merge_axes(&mut self, outer: usize, buffers: &mut Vec<Buffer>) -> Option<Nest> {
        let inner = outer + 1;
        let Operand { buffer, access } = &self.operand;
        if access.strides[inner] == 0 {
            return None;
        }
        // Axes have the same order in memory as before, except that `outer` directly encloses `inner`.
        let mut axes: SmallVec<[usize; 6]> =
            (0..self.dims.len()).filter(|&axis| axis != outer && access.strides[axis] != 0).collect();
        axes.sort_by_key(|&axis| access.strides[axis].unsigned_abs());
        let mut strides: Strides = self.dims.iter().map(|_| 0).collect();
        let mut len = 1;
        for axis in axes {
            strides[axis] = len as isize;
            len *= self.dims[axis];
            if axis == inner {
                strides[outer] = len as isize;
                len *= self.dims[outer];
            }
        }
        let label = format!("{}/part", buffers[buffer.0 as usize].label);
        let dtype = access.dtype;
        let buffer = add_work(buffers, label, dtype, len);
        let copied = Operand { buffer, access: Access { dtype, offset: 0, strides, len } };
        // Elements that repeat along an axis of stride zero are copied once.
        let dims: Dims = self
            .dims
            .iter()
            .zip(&copied.access.strides)
            .map(|(&dim, &stride)| if stride == 0 { 1 } else { dim })
            .collect();
        let copy = Nest::copy(&dims, std::mem::replace(&mut self.operand, copied.clone()), copied);
        self.operand.access.strides.remove(outer);
        let turns = self.dims.remove(outer);
        self.dims[outer] *= turns;
        Some(copy)
    }
}
