//! Loop nests: an expression evaluated at every point of an iteration space.

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::{Builder, DType, Expr, Inst, Reduction, Type};

/// Sizes of the axes of an iteration space.
pub type Dims = SmallVec<[usize; 6]>;

/// Steps in elements, per axis of an iteration space. A stride may be zero (broadcast) or negative (reversed).
pub type Strides = SmallVec<[isize; 6]>;

/// Affine access of a nest to one buffer: the element of index `i` is at `offset + sum(i[k] * strides[k])`.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// Storage type of the elements.
    pub dtype: DType,
    /// Position of the element of index zero, in elements from the buffer's start.
    pub offset: usize,
    /// One stride per axis of the nest.
    pub strides: Strides,
    /// Number of elements of the buffer. Affine accesses must stay inside (checked when a program is built).
    /// [`crate::Inst::LoadAt`] reads zero outside of `offset..len`; the strides of its load must be zero.
    pub len: usize,
}

impl Clone for Access {
    fn clone(&self) -> Access {
        // Copies the strides with one memory copy; the derived function would copy them one by one.
        Access { strides: Strides::from_slice(&self.strides), ..*self }
    }
}

impl Access {
    /// Returns the access to a whole row-major buffer of shape `dims`.
    #[must_use]
    pub fn contiguous(dtype: DType, dims: &[usize]) -> Access {
        Access { dtype, offset: 0, strides: row_major(dims), len: dims.iter().product() }
    }

    /// Returns the access to a row-major buffer of shape `dims`, broadcast to `to` by ONNX's rules (trailing axes
    /// aligned, 1 stretches).
    ///
    /// # Panics
    /// Panics if the shapes do not broadcast. Shape inference has checked them.
    #[must_use]
    pub fn broadcast(dtype: DType, dims: &[usize], to: &[usize]) -> Access {
        let source_strides = row_major(dims);
        let lead = to.len() - dims.len();
        let strides = (0..to.len())
            .map(|k| {
                if k < lead || dims[k - lead] == 1 {
                    return 0;
                }
                assert_eq!(dims[k - lead], to[k], "{dims:?} broadcasts to {to:?}");
                source_strides[k - lead]
            })
            .collect();
        Access { dtype, offset: 0, strides, len: dims.iter().product() }
    }

    /// Returns the position of the element at an index of the nest.
    #[must_use]
    pub fn position(&self, index: &[usize]) -> usize {
        let step = |(&i, &stride): (&usize, &isize)| i as isize * stride;
        (self.offset as isize + index.iter().zip(&self.strides).map(step).sum::<isize>()) as usize
    }

    /// Returns the smallest and the largest position reached over `dims`, or `None` if the space is empty.
    #[must_use]
    pub fn position_range(&self, dims: &[usize]) -> Option<(isize, isize)> {
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

impl AsRef<Access> for Access {
    fn as_ref(&self) -> &Access {
        self
    }
}

/// Value that a nest loads. An operand is an [`Access`], or an access together with its buffer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Load<O = Access> {
    /// Elements of a buffer.
    Buffer(O),
    /// Value that the instruction computed at each point before the nest finishes it, for example an element of a
    /// product.
    Accumulator(DType),
}

impl<O> Load<O> {
    /// Returns the operand, unless the load is an accumulator.
    pub fn operand(&self) -> Option<&O> {
        match self {
            Load::Buffer(operand) => Some(operand),
            Load::Accumulator(_) => None,
        }
    }

    /// Returns the operand by mutable reference, unless the load is an accumulator.
    pub fn operand_mut(&mut self) -> Option<&mut O> {
        match self {
            Load::Buffer(operand) => Some(operand),
            Load::Accumulator(_) => None,
        }
    }

    /// Returns true for an accumulator.
    #[must_use]
    pub fn is_accumulator(&self) -> bool {
        matches!(self, Load::Accumulator(_))
    }
}

impl<O: AsRef<Access>> Load<O> {
    /// Returns the access to the buffer, unless the load is an accumulator.
    pub fn access(&self) -> Option<&Access> {
        self.operand().map(AsRef::as_ref)
    }

    /// Returns the storage type of the elements.
    pub fn dtype(&self) -> DType {
        match self {
            Load::Buffer(operand) => operand.as_ref().dtype,
            Load::Accumulator(dtype) => *dtype,
        }
    }
}

/// Returns the row-major strides of a shape.
#[must_use]
pub(crate) fn row_major(dims: &[usize]) -> Strides {
    let mut strides = Strides::from_elem(0, dims.len());
    let mut step = 1isize;
    for (stride, &dim) in strides.iter_mut().zip(dims).rev() {
        *stride = step;
        step = step.saturating_mul(dim as isize);
    }
    strides
}

/// Segments of the last axis of a nest: one range for each index of the first axis, in ascending order.
///
/// For example, tensors are stored side by side in a plane, with gaps between them, and each has its own settings. One
/// nest processes all of them. Clones share the table.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Segments(Arc<[(usize, usize)]>);

impl Segments {
    /// Creates segments from ranges. [`Nest::validate`] checks that they fit a nest.
    #[must_use]
    pub fn new(ranges: impl IntoIterator<Item = Range<usize>>) -> Segments {
        Segments(ranges.into_iter().map(|range| (range.start, range.end)).collect())
    }

    /// Returns the number of segments.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if there are no segments.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the positions of segment `k` along the last axis.
    #[must_use]
    pub fn range(&self, k: usize) -> Range<usize> {
        let (start, end) = self.0[k];
        start..end
    }

    /// Iterates over the positions of each segment.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Range<usize>> + '_ {
        self.0.iter().map(|&(start, end)| start..end)
    }

    /// Returns the total number of points of all segments.
    #[must_use]
    pub fn num_points(&self) -> usize {
        self.iter().map(|range| range.len()).fold(0, usize::saturating_add)
    }

    /// Returns the number of points of the longest segment.
    #[must_use]
    pub fn max_len(&self) -> usize {
        self.iter().map(|range| range.len()).max().unwrap_or(0)
    }
}

/// Expression over an iteration space.
///
/// The space is `dims`, row-major. Its last `inner` axes are reduced. For each point of the outer axes the reductions
/// run one after the other (reduction `k` sees [`crate::Inst::Reduced`] of earlier ones). Then the results of the
/// expression are stored at every point of the whole space. A store with zero strides along all inner axes is written
/// once per outer point. Loads of an element happen before stores to it, so a buffer may be loaded and stored through
/// equal accesses.
///
/// With [`Segments`] the space has two axes, and only the segments of the last axis exist: point `(s, i)` exists if `i`
/// is in segment `s`. Nothing else is read or written. A plane is loaded and stored with strides `[0, 1]`, a table of
/// settings with `[k, 0]`, one value per segment with `[1, 0]`. Reductions are over the points of each segment; an
/// empty segment gives the neutral element. No element may be stored twice.
///
/// A nest may finish the result of another computation, as the epilogue of a product. The values of that computation
/// are the first loads, [`Load::Accumulator`]. If that computation also takes the results, there are no stores.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Nest<O = Access> {
    /// Sizes of the axes.
    pub dims: Dims,
    /// Number of reduced axes, the last ones; 0 for a map.
    pub inner: usize,
    /// Existing parts of the last axis; `None` if all of the axis exists.
    pub segments: Option<Segments>,
    /// Loaded values: accumulators, then buffers.
    pub loads: Vec<Load<O>>,
    /// Expression, with one result per store.
    pub expr: Expr,
    /// Reductions, in order; empty for a map.
    pub reductions: Vec<Reduction>,
    /// Destinations of the results.
    pub stores: Vec<O>,
}

impl<O> Nest<O> {
    /// Creates a map: a nest that computes every result element by element.
    #[must_use]
    pub fn elementwise(dims: Dims, loads: Vec<Load<O>>, expr: Expr, stores: Vec<O>) -> Nest<O> {
        Nest { dims, inner: 0, segments: None, loads, expr, reductions: Vec::new(), stores }
    }

    /// Returns the sizes of the outer axes.
    #[must_use]
    pub fn outer_dims(&self) -> &[usize] {
        &self.dims[..self.dims.len() - self.inner]
    }

    /// Returns the sizes of the reduced axes.
    #[must_use]
    pub fn inner_dims(&self) -> &[usize] {
        &self.dims[self.dims.len() - self.inner..]
    }

    /// Returns true if the load is gathered: read by computed index.
    #[must_use]
    pub fn is_gathered(&self, slot: usize) -> bool {
        self.expr
            .insts()
            .iter()
            .any(|(inst, _)| matches!(inst, Inst::LoadAt(s, _) if usize::from(*s) == slot))
    }

    /// Returns true if no axis is reduced: results are computed element by element.
    #[must_use]
    pub fn is_map(&self) -> bool {
        self.inner == 0
    }

    /// Returns the number of accumulators. They are the first loads.
    #[must_use]
    pub fn num_accumulators(&self) -> usize {
        self.loads.iter().take_while(|load| load.is_accumulator()).count()
    }

    /// Iterates over the operands of the loads, in order, without accumulators.
    pub fn load_operands(&self) -> impl DoubleEndedIterator<Item = &O> {
        self.loads.iter().filter_map(Load::operand)
    }

    /// Iterates over the operands of the loads by mutable reference.
    pub fn load_operands_mut(&mut self) -> impl DoubleEndedIterator<Item = &mut O> {
        self.loads.iter_mut().filter_map(Load::operand_mut)
    }

    /// Iterates over the operands of the loads and then of the stores, in order.
    pub fn operands(&self) -> impl Iterator<Item = &O> {
        self.load_operands().chain(&self.stores)
    }

    /// Iterates over the operands of the loads and then of the stores by mutable reference.
    pub fn operands_mut(&mut self) -> impl Iterator<Item = &mut O> {
        self.loads.iter_mut().filter_map(Load::operand_mut).chain(&mut self.stores)
    }

    /// Returns the nest with replaced operands.
    pub fn map_operands<P>(&self, operand: impl Fn(&O) -> P) -> Nest<P> {
        let load = |load: &Load<O>| match load {
            Load::Buffer(from) => Load::Buffer(operand(from)),
            Load::Accumulator(dtype) => Load::Accumulator(*dtype),
        };
        Nest {
            dims: self.dims.clone(),
            inner: self.inner,
            segments: self.segments.clone(),
            loads: self.loads.iter().map(load).collect(),
            expr: self.expr.clone(),
            reductions: self.reductions.clone(),
            stores: self.stores.iter().map(operand).collect(),
        }
    }
}

impl<O: AsRef<Access>> Nest<O> {
    /// Creates the map that copies elements from one access to another.
    #[must_use]
    pub fn copy(dims: &[usize], from: O, to: O) -> Nest<O> {
        let mut b = Builder::new();
        let element = b.load(0, Type::of(from.as_ref().dtype));
        Nest::elementwise(Dims::from_slice(dims), vec![Load::Buffer(from)], b.finish(&[element]), vec![to])
    }

    /// Returns the first fault of the nest, if any: an access out of bounds, different ranks, a wrong number of
    /// results, or nonzero strides of a gathered load. A backend can run a nest without a fault, and never reads or
    /// writes outside of its buffers.
    #[must_use]
    pub fn validate(&self) -> Option<String> {
        if self.stores.len() != self.expr.outputs().len() {
            return Some(format!("{} stores for {} results", self.stores.len(), self.expr.outputs().len()));
        }
        self.operand_fault()
    }

    /// Checks as [`Nest::validate`], but allows results without stores, which another computation takes.
    #[must_use]
    pub fn operand_fault(&self) -> Option<String> {
        if self.inner > self.dims.len() {
            return Some(format!("{} reduced axes, but only {} axes", self.inner, self.dims.len()));
        }
        if self.loads[self.num_accumulators()..].iter().any(Load::is_accumulator) {
            return Some("accumulators must precede the loads of buffers".into());
        }
        if self.dims.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim)).is_none() {
            return Some(format!("the space {:?} is too large to count", self.dims));
        }
        for access in self.operands().map(AsRef::as_ref) {
            if access.strides.len() != self.dims.len() {
                return Some(format!("strides {:?} for {} axes", access.strides, self.dims.len()));
            }
            if self.segments.is_some() {
                // Checked below, after the segments.
                continue;
            }
            // An operand that is constant along a row is accessed once per row, even if the row has no elements.
            let outer_rank = self.dims.len() - self.inner;
            let mut dims = self.dims.clone();
            if access.strides[outer_rank..].iter().all(|&stride| stride == 0) {
                dims[outer_rank..].fill(1);
            }
            if let Some((low, high)) = access.position_range(&dims)
                && (low < 0 || high >= access.len as isize)
            {
                return Some(format!("elements {low}..={high} of a buffer of {}", access.len));
            }
        }
        if let Some(segments) = &self.segments
            && let Some(fault) = self.segments_fault(segments)
        {
            return Some(fault);
        }
        // The computed index is the position of the element. A pass that moves or cuts axes would add strides to this
        // position a second time.
        self.loads.iter().enumerate().find_map(|(slot, load)| match load.access() {
            None if self.is_gathered(slot) => Some(format!("accumulator {slot} is read at a computed index")),
            Some(Access { strides, .. })
                if strides.iter().any(|&stride| stride != 0) && self.is_gathered(slot) =>
            {
                let strides = strides.as_slice();
                Some(format!(
                    "load {slot} is read at a computed index, so its strides must be zero, got {strides:?}"
                ))
            }
            _ => None,
        })
    }

    /// Returns the fault of segments that do not fit the space, or of accesses that do not fit the segments.
    fn segments_fault(&self, segments: &Segments) -> Option<String> {
        let &[count, len] = self.dims.as_slice() else {
            return Some(format!("segments need a space of 2 axes, got {}", self.dims.len()));
        };
        if self.inner > 1 {
            return Some(format!("segments allow at most 1 reduced axis, got {}", self.inner));
        }
        if segments.len() != count {
            return Some(format!("{} segments, but the first axis has size {count}", segments.len()));
        }
        let mut before = 0;
        for (k, Range { start, end }) in segments.iter().enumerate() {
            if start < before || end < start || end > len {
                return Some(format!("segment {k} is {start}..{end}, but must be within {before}..{len}"));
            }
            before = end;
        }
        for access in self.operands().map(AsRef::as_ref) {
            let ranges =
                segments.iter().enumerate().filter_map(|(k, range)| segment_position_range(access, k, range));
            let bounds = ranges.reduce(|all, next| (all.0.min(next.0), all.1.max(next.1)));
            if let Some((low, high)) = bounds
                && (low < 0 || high >= access.len as i128)
            {
                return Some(format!("elements {low}..={high} of a buffer of {}", access.len));
            }
        }
        for (k, store) in self.stores.iter().map(AsRef::as_ref).enumerate() {
            let [across, along] = [store.strides[0], store.strides[1]];
            // If both strides have the same sign, positions are monotonic from one segment to the next.
            let is_unique = match (across, along) {
                (_, 0) => self.inner == 1 && (across != 0 || count <= 1),
                _ => across == 0 || across.signum() == along.signum(),
            };
            if !is_unique {
                return Some(format!("store {k} can write several results to one element"));
            }
        }
        None
    }
}

/// Returns the smallest and the largest position that an access reaches in a segment; `None` if it reaches nothing. An
/// operand that is constant along a segment is accessed even if the segment is empty.
fn segment_position_range(access: &Access, segment: usize, range: Range<usize>) -> Option<(i128, i128)> {
    let [across, along] = [access.strides[0] as i128, access.strides[1] as i128];
    let at = |position: usize| access.offset as i128 + segment as i128 * across + position as i128 * along;
    let range = if along == 0 { 0..1 } else { range };
    (!range.is_empty()).then(|| {
        let (first, last) = (at(range.start), at(range.end - 1));
        (first.min(last), first.max(last))
    })
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "there may be one segment")]
mod tests {
    use super::*;

    #[test]
    fn broadcasting_stretches_ones() {
        let access = Access::broadcast(DType::F32, &[3, 1], &[2, 3, 4]);
        assert_eq!(access.strides.as_slice(), [0, 1, 0]);
    }

    #[test]
    fn position_range_follows_negative_strides() {
        let access = Access { dtype: DType::F32, offset: 5, strides: [-1, 0].into_iter().collect(), len: 6 };
        assert_eq!(access.position_range(&[6, 9]), Some((0, 5)));
        assert_eq!(access.position_range(&[7, 9]), Some((-1, 5)));
        assert_eq!(access.position_range(&[0, 9]), None);
    }

    #[test]
    fn gathered_loads_have_zero_strides() {
        let nest = |strides: [isize; 2], gathered: bool| {
            let mut b = Builder::new();
            let at = b.coordinate(1);
            let value = if gathered { b.load_at(0, at, Type::F32) } else { b.load(0, Type::F32) };
            Nest {
                dims: [2, 3].into_iter().collect(),
                inner: 0,
                segments: None,
                loads: vec![Load::Buffer(Access {
                    strides: strides.into_iter().collect(),
                    ..Access::contiguous(DType::F32, &[2, 3])
                })],
                expr: b.finish(&[value]),
                reductions: Vec::new(),
                stores: vec![Access::contiguous(DType::F32, &[2, 3])],
            }
        };
        assert_eq!(nest([0, 0], true).validate(), None);
        assert_eq!(nest([3, 1], false).validate(), None);
        for strides in [[3, 1], [0, 1], [3, 0]] {
            let expected =
                format!("load 0 is read at a computed index, so its strides must be zero, got {strides:?}");
            assert_eq!(nest(strides, true).validate(), Some(expected));
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
            segments: None,
            loads: vec![Load::Buffer(load)],
            expr: Expr::default(),
            reductions: Vec::new(),
            stores: Vec::new(),
        };
        assert_eq!(nest(access([1, 0], 3)).validate(), None);
        assert_eq!(nest(access([0, 1], 0)).validate(), None, "elements of a row, of which there are none");
        assert!(nest(access([1, 0], 2)).validate().is_some(), "one for each of three rows");
    }

    /// Returns a nest with a load and a store over segments of 0..10.
    fn nest_over_segments(
        segments: &[Range<usize>],
        inner: usize,
        strides: [[isize; 2]; 2],
        lens: [usize; 2],
    ) -> Nest {
        let access = |k: usize| Access {
            dtype: DType::F32,
            offset: 0,
            strides: strides[k].into_iter().collect(),
            len: lens[k],
        };
        let mut b = Builder::new();
        let value = b.load(0, Type::F32);
        Nest {
            dims: [segments.len(), 10].into_iter().collect(),
            inner,
            segments: Some(Segments::new(segments.iter().cloned())),
            loads: vec![Load::Buffer(access(0))],
            expr: b.finish(&[value]),
            reductions: Vec::new(),
            stores: vec![access(1)],
        }
    }

    #[test]
    fn segments_are_counted() {
        let segments = Segments::new([0..3, 3..3, 5..10]);
        assert_eq!((segments.len(), segments.num_points(), segments.max_len()), (3, 8, 5));
        assert_eq!((segments.range(2), segments.is_empty()), (5..10, false));
        assert_eq!(segments.iter().map(|range| range.len()).collect::<Vec<_>>(), [3, 0, 5]);
        assert!(Segments::new([]).is_empty());
    }

    #[test]
    fn segments_are_in_ascending_order() {
        let fault =
            |segments: &[Range<usize>]| nest_over_segments(segments, 0, [[0, 1]; 2], [10, 10]).validate();
        for good in [&[][..], &[0..10], &[0..3, 3..3, 5..10], &[10..10]] {
            assert_eq!(fault(good), None, "{good:?}");
        }
        let faulty = |k: usize, range: &str, within: &str| {
            Some(format!("segment {k} is {range}, but must be within {within}"))
        };
        assert_eq!(fault(&[0..11]), faulty(0, "0..11", "0..10"));
        assert_eq!(fault(&[0..4, 3..5]), faulty(1, "3..5", "4..10"));
        assert_eq!(fault(&[5..7, 2..2]), faulty(1, "2..2", "7..10"));
        #[expect(clippy::reversed_empty_ranges, reason = "it is what is wrong")]
        let backwards = fault(&[5..4]);
        assert_eq!(backwards, faulty(0, "5..4", "0..10"));
    }

    #[test]
    fn segments_fit_the_space() {
        let fault = |change: &dyn Fn(&mut Nest)| {
            let mut nest = nest_over_segments(&[0..4, 6..9], 1, [[0, 1]; 2], [10, 10]);
            change(&mut nest);
            nest.validate()
        };
        assert_eq!(fault(&|_| {}), None);
        let three = fault(&|nest| nest.dims[0] = 3);
        assert_eq!(three.as_deref(), Some("2 segments, but the first axis has size 3"));
        let two_axes = fault(&|nest| nest.inner = 2);
        assert_eq!(two_axes.as_deref(), Some("segments allow at most 1 reduced axis, got 2"));
        let more = fault(&|nest| {
            nest.dims.push(1);
            nest.operands_mut().for_each(|access| access.strides.push(0));
        });
        assert_eq!(more.as_deref(), Some("segments need a space of 2 axes, got 3"));
    }

    #[test]
    fn accesses_over_segments_are_bounded() {
        let segments = &[2..4, 4..4, 6..9];
        // The plane needs no elements after the last segment; a table needs one for every segment, even an empty one.
        for (strides, min_len) in [([0, 1], 9), ([1, 0], 3), ([8, 0], 17), ([0, 0], 1), ([10, 1], 29)] {
            let fault = |len: usize| nest_over_segments(segments, 1, [strides, [0, 1]], [len, 9]).validate();
            assert_eq!(fault(min_len), None, "{strides:?}");
            let fault = fault(min_len - 1).expect("one element less");
            assert!(fault.ends_with(&format!("={} of a buffer of {}", min_len - 1, min_len - 1)), "{fault}");
        }
        assert_eq!(
            nest_over_segments(&[2..4, 4..4], 0, [[0, 1]; 2], [4, 4]).validate(),
            None,
            "an empty segment reaches nothing"
        );
        let before = nest_over_segments(segments, 0, [[0, -1], [0, 1]], [10, 10]).validate();
        assert_eq!(before.as_deref(), Some("elements -8..=-2 of a buffer of 10"));
    }

    #[test]
    fn no_element_of_segments_is_stored_twice() {
        let fault = |inner: usize, strides: [isize; 2]| {
            nest_over_segments(&[0..4, 4..4, 6..9], inner, [[0, 1], strides], [10, 100]).validate()
        };
        let good = [(0, [0, 1]), (1, [0, 1]), (1, [1, 0]), (1, [8, 0]), (0, [10, 1]), (1, [1, 2])];
        for (inner, strides) in good {
            assert_eq!(fault(inner, strides), None, "{inner} {strides:?}");
        }
        for (inner, strides) in [(0, [1, 0]), (0, [0, 0]), (1, [0, 0])] {
            let expected = "store 0 can write several results to one element";
            assert_eq!(fault(inner, strides).as_deref(), Some(expected), "{inner} {strides:?}");
        }
        assert_eq!(
            nest_over_segments(&[3..9], 1, [[0, 1], [0, 0]], [10, 1]).validate(),
            None,
            "there is one segment"
        );
        let mut reversed = nest_over_segments(&[0..4, 6..9], 0, [[0, 1], [3, -1]], [10, 100]);
        reversed.stores[0].offset = 20;
        assert!(reversed.validate().is_some(), "17 is both 20 - 3 and 20 + 3 - 6");
    }
}
