//! Analysis of the iteration space of a nest: axes along which a value changes, and counts of points and elements.

use smallvec::SmallVec;

use crate::{Access, Inst, Load, Nest};

/// Returns the product of sizes, saturated at `u64::MAX`.
#[must_use]
pub fn product_of_sizes(dims: impl IntoIterator<Item = usize>) -> u64 {
    dims.into_iter().fold(1, |n: u64, dim| n.saturating_mul(dim as u64))
}

/// Returns the index by axis of element number `element` of a tensor, in row-major order.
#[must_use]
pub fn index_of(mut element: usize, dims: &[usize]) -> Vec<usize> {
    let mut index: Vec<usize> = dims
        .iter()
        .rev()
        .map(|&size| {
            let position = element % size.max(1);
            element /= size.max(1);
            position
        })
        .collect();
    index.reverse();
    index
}

/// Returns the row-major number of an element with an index by axis: the inverse of [`index_of`].
#[must_use]
pub fn flat_index_of(dims: &[usize], index: &[usize]) -> usize {
    dims.iter().zip(index).fold(0, |element, (&dim, &i)| element * dim + i)
}

impl Access {
    /// Returns the number of distinct elements that the access reaches over axes of sizes `dims`: the product of the
    /// sizes with nonzero stride.
    #[must_use]
    pub fn elements_reached(&self, dims: &[usize]) -> u64 {
        product_of_sizes(
            dims.iter().zip(&self.strides).filter(|&(_, &stride)| stride != 0).map(|(&dim, _)| dim),
        )
    }
}

impl<O: AsRef<Access>> Nest<O> {
    /// Returns the slots of the gathered loads (read by computed index), in ascending order.
    #[must_use]
    pub fn gathered_loads(&self) -> SmallVec<[u16; 4]> {
        let slots = self.expr.insts().iter().filter_map(|(inst, _)| match *inst {
            Inst::LoadAt(slot, _) => Some(slot),
            _ => None,
        });
        let mut slots: SmallVec<[u16; 4]> = slots.collect();
        slots.sort_unstable();
        slots.dedup();
        slots
    }

    /// Returns for each instruction of the expression a bit mask of the axes along which its result changes.
    #[must_use]
    pub fn dependent_axes(&self) -> SmallVec<[u64; 32]> {
        let bit = |axis: usize| if axis < 64 { 1u64 << axis } else { u64::MAX };
        let moving = |load: &Load<O>| {
            // An accumulator has a separate value at every point.
            let stride = |axis: usize| load.access().map_or(1, |access| access.strides[axis]);
            let axes = self.dims.iter().enumerate().filter(|&(axis, &dim)| dim > 1 && stride(axis) != 0);
            axes.fold(0, |mask, (axis, _)| mask | bit(axis))
        };
        let outer = (0..self.dims.len() - self.inner).filter(|&axis| self.dims[axis] > 1);
        let outer = outer.fold(0, |mask, axis| mask | bit(axis));
        let mut axes: SmallVec<[u64; 32]> = SmallVec::with_capacity(self.expr.insts().len());
        for (inst, _) in self.expr.insts() {
            let inst_axes = match *inst {
                Inst::Load(slot) => moving(&self.loads[usize::from(slot)]),
                Inst::Coordinate(axis) => bit(usize::from(axis)),
                Inst::Reduced(_) => outer,
                _ => 0,
            };
            let operands = inst.operands().fold(0, |mask, reg| mask | axes[usize::from(reg.0)]);
            axes.push(inst_axes | operands);
        }
        axes
    }

    /// Returns the number of points along the axes of a bit mask.
    #[must_use]
    pub fn points_along(&self, axes: u64) -> u64 {
        if let Some(segments) = &self.segments {
            return match axes & 0b11 {
                0 => 1,
                1 => segments.len() as u64,
                _ => segments.num_points() as u64,
            };
        }
        let along = |&(axis, _): &(usize, &usize)| axis >= 64 || axes & (1 << axis) != 0;
        product_of_sizes(self.dims.iter().enumerate().filter(along).map(|(_, &dim)| dim))
    }

    /// Returns the number of distinct elements that an access of the nest reaches.
    #[must_use]
    pub fn elements_reached_by(&self, access: &Access) -> u64 {
        match (&self.segments, access.strides.as_slice()) {
            (Some(_), &[across, along]) => {
                self.points_along(u64::from(across != 0) | u64::from(along != 0) << 1)
            }
            _ => access.elements_reached(&self.dims),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, DType, Segments, Type};

    /// Returns a nest over two rows of three elements, with a scale for each row.
    fn nest_of_scaled_rows() -> Nest {
        let mut b = Builder::new();
        let (x, scale) = (b.load(0, Type::F32), b.load(1, Type::F32));
        let y = b.mul(x, scale);
        let contiguous = Access::contiguous(DType::F32, &[2, 3]);
        let of_row = Access { strides: [1, 0].into_iter().collect(), len: 2, ..contiguous.clone() };
        let loads = [contiguous.clone(), of_row].map(Load::Buffer).to_vec();
        Nest::elementwise([2, 3].into_iter().collect(), loads, b.finish(&[y]), vec![contiguous])
    }

    #[test]
    fn dependent_axes_of_a_row_scale() {
        let nest = nest_of_scaled_rows();
        assert_eq!(nest.dependent_axes()[..], [0b11, 0b01, 0b11]);
        assert_eq!([0b00, 0b01, 0b10, 0b11].map(|axes| nest.points_along(axes)), [1, 2, 3, 6]);
        let elements = |slot: usize| nest.elements_reached_by(nest.loads[slot].access().unwrap());
        assert_eq!([elements(0), elements(1)], [6, 2]);
    }

    #[test]
    fn index_and_element_are_inverse() {
        let dims = [2, 3, 4];
        assert_eq!(index_of(17, &dims), [1, 1, 1]);
        assert!((0..24).all(|element| flat_index_of(&dims, &index_of(element, &dims)) == element));
    }

    #[test]
    fn only_points_of_segments_are_counted() {
        let segments = Some(Segments::new([0..1, 2..3]));
        let nest = Nest { segments, ..nest_of_scaled_rows() };
        assert_eq!([0b00, 0b01, 0b10, 0b11].map(|axes| nest.points_along(axes)), [1, 2, 2, 2]);
        assert_eq!(nest.elements_reached_by(nest.loads[0].access().unwrap()), 2);
    }
}
