//! Loop nests: an expression evaluated at every point of a space of indices.

use smallvec::SmallVec;

use crate::{DType, Expr, Inst, Reg};

/// Sizes of the axes of an iteration space.
pub type Dims = SmallVec<[usize; 6]>;

/// Steps, in elements, per axis of an iteration space. May be zero (broadcast) or negative (reversed).
pub type Strides = SmallVec<[isize; 6]>;

/// How a nest reaches into one buffer: the element of index `i` is at `offset + sum(i[k] * strides[k])`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// How the elements are stored.
    pub dtype: DType,
    /// Element of index zero, counted from the buffer's start.
    pub offset: usize,
    /// One stride per axis of the nest.
    pub strides: Strides,
    /// Number of elements of the buffer. Affine accesses stay inside (checked when a program is made);
    /// [`crate::Inst::LoadAt`] reads zero outside `offset..len`; a load that it reads has no other strides than zeros.
    pub len: usize,
}

impl Access {
    /// The whole of a row-major buffer of shape `dims`.
    #[must_use]
    pub fn contiguous(dtype: DType, dims: &[usize]) -> Access {
        Access { dtype, offset: 0, strides: row_major(dims), len: dims.iter().product() }
    }

    /// A row-major buffer of shape `dims`, broadcast by ONNX's rules to `to` (trailing axes aligned, 1 stretches).
    ///
    /// # Panics
    /// When the shapes do not broadcast: shape inference has checked it.
    #[must_use]
    pub fn broadcast(dtype: DType, dims: &[usize], to: &[usize]) -> Access {
        let own = row_major(dims);
        let lead = to.len() - dims.len();
        let strides = (0..to.len())
            .map(|k| {
                if k < lead || dims[k - lead] == 1 {
                    return 0;
                }
                assert_eq!(dims[k - lead], to[k], "{dims:?} broadcasts to {to:?}");
                own[k - lead]
            })
            .collect();
        Access { dtype, offset: 0, strides, len: dims.iter().product() }
    }

    /// The smallest and largest element reached over `dims`, or `None` if the space is empty.
    #[must_use]
    pub fn reach(&self, dims: &[usize]) -> Option<(isize, isize)> {
        if dims.contains(&0) {
            return None;
        }
        let mut range = (self.offset as isize, self.offset as isize);
        for (&dim, &stride) in dims.iter().zip(&self.strides) {
            let end = stride * (dim as isize - 1);
            if end < 0 {
                range.0 += end;
            } else {
                range.1 += end;
            }
        }
        Some(range)
    }
}

/// Row-major strides of a shape.
#[must_use]
pub(crate) fn row_major(dims: &[usize]) -> Strides {
    let mut strides: Strides = dims.iter().map(|_| 0).collect();
    let mut step = 1isize;
    for (stride, &dim) in strides.iter_mut().zip(dims).rev() {
        *stride = step;
        step = step.saturating_mul(dim as isize);
    }
    strides
}

/// How values are combined over the reduced axes, in index order and from a neutral element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum, from 0.
    Sum,
    /// Product, from 1.
    Prod,
    /// Largest, from the least value; NaN wins.
    Max,
    /// Smallest, from the greatest value; NaN wins.
    Min,
}

/// One reduction of a nest over its inner axes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reduction {
    /// How values are combined.
    pub op: ReduceOp,
    /// What is reduced: a register of the nest's expression. It may use the results of earlier reductions.
    pub value: Reg,
}

/// An expression over a space of indices.
///
/// The space is `dims`, row-major; its last `inner` axes are reduced. For each point of the outer axes the reductions
/// run one after the other (reduction `k` sees [`crate::Inst::Reduced`] of those before it), then the results of the
/// expression are stored at every point of the whole space. A store whose strides are zero along all inner axes is
/// written once per outer point. Loads of an element happen before stores to it, so a buffer may be loaded and stored
/// through equal accesses.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Nest {
    /// Sizes of the axes.
    pub dims: Dims,
    /// How many of the last axes are reduced; 0 for a map.
    pub inner: usize,
    /// What is read.
    pub loads: Vec<Access>,
    /// What is computed; one result per store.
    pub expr: Expr,
    /// Reductions, in order; empty for a map.
    pub reductions: Vec<Reduction>,
    /// Where the results go.
    pub stores: Vec<Access>,
}

impl Nest {
    /// The outer axes.
    #[must_use]
    pub fn outer_dims(&self) -> &[usize] {
        &self.dims[..self.dims.len() - self.inner]
    }

    /// The reduced axes.
    #[must_use]
    pub fn inner_dims(&self) -> &[usize] {
        &self.dims[self.dims.len() - self.inner..]
    }

    /// True for a gathered load: one that is read by computed index.
    #[must_use]
    pub fn is_gathered(&self, slot: usize) -> bool {
        self.expr
            .insts()
            .iter()
            .any(|(inst, _)| matches!(inst, Inst::LoadAt(s, _) if usize::from(*s) == slot))
    }

    /// The first fault of the nest, if it has one: accesses out of bounds, ranks that differ, untyped results, strides of a
    /// load that is read by computed index. A nest without a fault can be run by any backend without reading or writing
    /// outside its buffers.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        if self.inner > self.dims.len() {
            return Some(format!("{} reduced axes of {}", self.inner, self.dims.len()));
        }
        if self.stores.len() != self.expr.outputs().len() {
            return Some(format!("{} stores for {} results", self.stores.len(), self.expr.outputs().len()));
        }
        if self.dims.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim)).is_none() {
            return Some(format!("the space {:?} is too large to count", self.dims));
        }
        for access in self.loads.iter().chain(&self.stores) {
            if access.strides.len() != self.dims.len() {
                return Some(format!("strides {:?} for {} axes", access.strides, self.dims.len()));
            }
            // What is the same along a row is touched once per row, even if the row has no elements.
            let kept = self.dims.len() - self.inner;
            let mut dims = self.dims.clone();
            if access.strides[kept..].iter().all(|&stride| stride == 0) {
                dims[kept..].fill(1);
            }
            if let Some((low, high)) = access.reach(&dims)
                && (low < 0 || high >= access.len as isize)
            {
                return Some(format!("elements {low}..={high} of a buffer of {}", access.len));
            }
        }
        // The index says where the element lies: strides beside it would be added a second time by a pass that moves or
        // cuts axes.
        let strided = |(slot, load): &(usize, &Access)| {
            load.strides.iter().any(|&stride| stride != 0) && self.is_gathered(*slot)
        };
        if let Some((slot, load)) = self.loads.iter().enumerate().find(strided) {
            let strides = load.strides.as_slice();
            return Some(format!(
                "strides {strides:?} for load {slot}, which is read by computed index: zeros are needed"
            ));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, Type};

    #[test]
    fn broadcasting_stretches_ones() {
        let access = Access::broadcast(DType::F32, &[3, 1], &[2, 3, 4]);
        assert_eq!(access.strides.as_slice(), [0, 1, 0]);
    }

    #[test]
    fn reach_follows_negative_strides() {
        let access = Access { dtype: DType::F32, offset: 5, strides: [-1, 0].into_iter().collect(), len: 6 };
        assert_eq!(access.reach(&[6, 9]), Some((0, 5)));
        assert_eq!(access.reach(&[7, 9]), Some((-1, 5)));
        assert_eq!(access.reach(&[0, 9]), None);
    }

    #[test]
    fn what_is_read_by_computed_index_has_no_strides() {
        let nest = |strides: [isize; 2], gathered: bool| {
            let mut b = Builder::new();
            let at = b.coordinate(1);
            let value = if gathered { b.load_at(0, at, Type::F32) } else { b.load(0, Type::F32) };
            Nest {
                dims: [2, 3].into_iter().collect(),
                inner: 0,
                loads: vec![Access {
                    strides: strides.into_iter().collect(),
                    ..Access::contiguous(DType::F32, &[2, 3])
                }],
                expr: b.finish(&[value]),
                reductions: Vec::new(),
                stores: vec![Access::contiguous(DType::F32, &[2, 3])],
            }
        };
        assert_eq!(nest([0, 0], true).fault(), None);
        assert_eq!(nest([3, 1], false).fault(), None);
        for strides in [[3, 1], [0, 1], [3, 0]] {
            let expected =
                format!("strides {strides:?} for load 0, which is read by computed index: zeros are needed");
            assert_eq!(nest(strides, true).fault(), Some(expected));
        }
    }

    #[test]
    fn rows_without_elements_are_checked() {
        let access = |strides: [isize; 2], len| Access {
            dtype: DType::F32,
            offset: 0,
            strides: strides.into_iter().collect(),
            len,
        };
        let nest = |load| Nest {
            dims: [3, 0].into_iter().collect(),
            inner: 1,
            loads: vec![load],
            expr: Expr::default(),
            reductions: Vec::new(),
            stores: Vec::new(),
        };
        assert_eq!(nest(access([1, 0], 3)).fault(), None);
        assert_eq!(nest(access([0, 1], 0)).fault(), None, "elements of a row, of which there are none");
        assert!(nest(access([1, 0], 2)).fault().is_some(), "one for each of three rows");
    }
}
