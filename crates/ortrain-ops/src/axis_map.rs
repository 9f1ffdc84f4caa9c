//! Sparse linear maps along one axis: the operation of Resize, its gradient, and copying modes of Pad on each axis.

use ortrain_expr::{BinaryOp, ReduceOp, Reg, Type};
use ortrain_graph::{DType, Tensor};
use ortrain_program::BufferId;

use crate::OpError;
use crate::lower::{Lower, NestBuilder, split_at_axis};

/// Maximum difference between weights that count as equal: smaller differences come from rounding.
const WEIGHT_TOLERANCE: f64 = 1e-12;
/// Maximum distance between rows that may have the same weights (a factor of 2 has two phases).
const MAX_PHASES: usize = 8;
/// Maximum number of pieces; each piece is an instruction.
const MAX_PIECES: usize = 16;
/// Maximum number of terms without a loop.
const MAX_TERMS: usize = 16;
/// Maximum number of terms of all rows: tables store them.
pub(crate) const MAX_TAPS: usize = 1 << 24;

/// Term of a row: an element of the source and its weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tap {
    pub(crate) index: usize,
    pub(crate) weight: f64,
}

/// Linear map along an axis: element `k` of the result is the sum of the terms of row `k`, or 0 without terms.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AxisMap {
    /// Size of the source axis.
    source: usize,
    /// Index of the first term of each row, and the total number of terms.
    starts: Vec<usize>,
    taps: Vec<Tap>,
}

/// Equidistant rows with the same weights and equidistant source elements.
#[derive(Clone, Debug, PartialEq)]
struct Piece {
    first: usize,
    step: usize,
    count: usize,
    /// For each term: the element for the first row, the offset from row to row, and the weight.
    terms: Vec<(usize, isize, f64)>,
}

impl AxisMap {
    /// Creates a map without rows from an axis of size `source`.
    pub(crate) fn new(source: usize) -> AxisMap {
        AxisMap { source, starts: vec![0], taps: Vec::new() }
    }

    /// Creates a map with rows that copy one element each.
    pub(crate) fn from_copies(source: usize, indices: impl IntoIterator<Item = usize>) -> AxisMap {
        let mut map = AxisMap::new(source);
        for index in indices {
            map.push(&[Tap { index, weight: 1.0 }]);
        }
        map
    }

    /// Adds a row of terms in ascending order. Terms of the same element are added. Terms of weight 0 are dropped, so
    /// that they cannot contribute an infinity.
    pub(crate) fn push(&mut self, taps: &[Tap]) {
        let first = self.taps.len();
        for tap in taps {
            assert!(tap.index < self.source, "indices are within the source axis");
            match self.taps[first..].last_mut() {
                Some(last) if last.index == tap.index => last.weight += tap.weight,
                last => {
                    assert!(last.is_none_or(|last| last.index < tap.index), "indices are in ascending order");
                    self.taps.push(*tap);
                }
            }
        }
        let mut write_index = first;
        for k in first..self.taps.len() {
            if self.taps[k].weight != 0.0 {
                self.taps[write_index] = self.taps[k];
                write_index += 1;
            }
        }
        self.taps.truncate(write_index);
        self.starts.push(self.taps.len());
    }

    /// Returns the size of the source axis.
    pub(crate) fn source_size(&self) -> usize {
        self.source
    }

    /// Returns the size of the result axis: the number of rows.
    pub(crate) fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// Returns the terms of a row.
    pub(crate) fn row(&self, k: usize) -> &[Tap] {
        &self.taps[self.starts[k]..self.starts[k + 1]]
    }

    /// Returns true if the map is the identity.
    pub(crate) fn is_identity(&self) -> bool {
        self.len() == self.source
            && (0..self.len()).all(|k| matches!(self.row(k), [tap] if tap.index == k && tap.weight == 1.0))
    }

    /// Returns true if every element of the result is an element of the source, or 0.
    pub(crate) fn only_copies(&self) -> bool {
        (0..self.len()).all(|k| self.row(k).len() <= 1) && self.taps.iter().all(|tap| tap.weight == 1.0)
    }

    /// Returns the map from results to sources with the same weights: the gradient of this map.
    pub(crate) fn transposed(&self) -> AxisMap {
        let mut starts = vec![0; self.source + 1];
        for tap in &self.taps {
            starts[tap.index + 1] += 1;
        }
        for k in 0..self.source {
            starts[k + 1] += starts[k];
        }
        let mut next = starts.clone();
        let mut taps = vec![Tap { index: 0, weight: 0.0 }; self.taps.len()];
        for k in 0..self.len() {
            for tap in self.row(k) {
                taps[next[tap.index]] = Tap { index: k, weight: tap.weight };
                next[tap.index] += 1;
            }
        }
        AxisMap { source: self.len(), starts, taps }
    }

    /// Returns the weights as a row-major matrix, `[results, sources]` or transposed.
    pub(crate) fn matrix(&self, transposed: bool) -> Vec<f64> {
        let mut matrix = vec![0.0; self.len() * self.source];
        for k in 0..self.len() {
            for tap in self.row(k) {
                let at = if transposed { tap.index * self.len() + k } else { k * self.source + tap.index };
                matrix[at] = tap.weight;
            }
        }
        matrix
    }

    /// Returns the rows as a few pieces, if they are regular enough.
    fn split_into_pieces(&self) -> Option<Vec<Piece>> {
        let mut best: Option<Vec<Piece>> = None;
        for step in 1..=MAX_PHASES.min(self.len()) {
            let max_pieces = best.as_ref().map_or(MAX_PIECES, |best| best.len() - 1);
            if let Some(pieces) = self.pieces_at_step(step, max_pieces) {
                best = Some(pieces);
            }
        }
        best
    }

    /// Returns the pieces of rows at distance `step`, or `None` for more than `max_pieces` pieces.
    fn pieces_at_step(&self, step: usize, max_pieces: usize) -> Option<Vec<Piece>> {
        let mut pieces = Vec::new();
        for phase in 0..step {
            let mut first = phase;
            while first < self.len() {
                if pieces.len() == max_pieces || self.row(first).len() > MAX_TERMS {
                    return None;
                }
                let piece = self.longest_piece_from(first, step);
                first += piece.count * step;
                pieces.push(piece);
            }
        }
        Some(pieces)
    }

    /// Returns the longest piece that starts at a row.
    fn longest_piece_from(&self, first: usize, step: usize) -> Piece {
        let start = self.row(first);
        let weights_fit = |row: &[Tap]| {
            row.len() == start.len()
                && row.iter().zip(start).all(|(a, b)| (a.weight - b.weight).abs() <= WEIGHT_TOLERANCE)
        };
        let mut moves = vec![0isize; start.len()];
        let mut count = 1;
        for (n, k) in (first + step..self.len()).step_by(step).enumerate() {
            let row = self.row(k);
            if !weights_fit(row) {
                break;
            }
            if n == 0 {
                for (by, (tap, from)) in moves.iter_mut().zip(row.iter().zip(start)) {
                    *by = tap.index as isize - from.index as isize;
                }
            }
            let follows =
                row.iter().zip(start).zip(&moves).all(|((tap, from), by)| {
                    tap.index as isize == from.index as isize + by * (n as isize + 1)
                });
            if !follows {
                break;
            }
            count += 1;
        }
        let terms = start.iter().zip(&moves).map(|(tap, &by)| (tap.index, by, tap.weight)).collect();
        Piece { first, step, count, terms }
    }

    /// Emits the instructions that apply the map along an axis of `from`, of shape `dims`, into `to`. Sums are computed
    /// in `computed`, a float type; copies keep their type.
    fn lower(
        &self,
        cx: &mut Lower<'_>,
        (from, dims, axis): (BufferId, &[usize], usize),
        to: BufferId,
        computed: Type,
    ) -> Result<(), OpError> {
        let (outer, source, inner) = split_at_axis(dims, axis);
        debug_assert_eq!(source, self.source, "the axis has the size that the map expects");
        if outer * self.len() * inner == 0 {
            return Ok(());
        }
        let computed = if self.only_copies() { Type::of(cx.buffer_dtype(from)) } else { computed };
        let Some(pieces) = self.split_into_pieces() else {
            return self.lower_table(cx, from, [outer, inner], to, computed);
        };
        for piece in pieces {
            let mut nest = cx.nest(&[outer, piece.count, inner], 0);
            let mut sum: Option<Reg> = None;
            for &(index, by, weight) in &piece.terms {
                let strides = [(source * inner) as isize, by * inner as isize, 1];
                let value = nest.load_strided(cx, from, index * inner, &strides);
                let value = multiply_by_weight(&mut nest, value, weight, computed);
                sum = Some(sum.map_or(value, |sum| nest.b.add(sum, value)));
            }
            let sum = sum.unwrap_or_else(|| nest.b.constant(computed, 0.0));
            let strides = [self.len() * inner, piece.step * inner, 1].map(|stride| stride as isize);
            let value = saturate_to_dtype(&mut nest, sum, cx.buffer_dtype(to));
            nest.store_strided(cx, to, piece.first * inner, strides.into_iter().collect(), value);
            cx.emit(nest.instruction())?;
        }
        Ok(())
    }

    /// Emits the map with tables of indices and weights: every element of the result loads its terms.
    fn lower_table(
        &self,
        cx: &mut Lower<'_>,
        from: BufferId,
        [outer, inner]: [usize; 2],
        to: BufferId,
        computed: Type,
    ) -> Result<(), OpError> {
        let rows = self.len();
        let width = (0..rows).map(|k| self.row(k).len()).max().unwrap_or(0).max(1);
        let entries = rows.checked_mul(width).filter(|&entries| entries <= MAX_TAPS);
        let entries = entries.ok_or_else(|| {
            OpError::unsupported(format!(
                "an axis of {} elements that is computed from {} elements needs up to {width} terms for each \
                 element, which is too many",
                rows, self.source
            ))
        })?;
        // This index is out of range for every row of the source, so that the load gives 0.
        let out_of_range = -((outer * self.source) as i64) - 1;
        let (mut indices, mut weights) = (vec![out_of_range; entries], vec![0.0; entries]);
        for k in 0..rows {
            for (t, tap) in self.row(k).iter().enumerate() {
                indices[k * width + t] = tap.index as i64;
                weights[k * width + t] = tap.weight;
            }
        }
        let indices = cx.constant_buffer("indices", &Tensor::i64(&[entries], &indices));
        let copies = self.only_copies();
        let looped = usize::from(width > 1);
        let mut space = vec![outer, rows, inner];
        space.extend((width > 1).then_some(width));
        let mut nest = cx.nest(&space, looped);
        let mut along = vec![0, width as isize, 0];
        along.extend((width > 1).then_some(1));
        let index = nest.load_strided(cx, indices, 0, &along);
        let (o, j) = (nest.b.coordinate(0), nest.b.coordinate(2));
        let (size, step) = (nest.b.int(self.source as i64), nest.b.int(inner as i64));
        let start = nest.b.mul(o, size);
        let row = nest.b.add(start, index);
        let row = nest.b.mul(row, step);
        let at = nest.b.add(row, j);
        let value = nest.gather(cx, from, at);
        let mut value = nest.b.convert(value, computed);
        if !copies {
            let weights = match computed {
                Type::F64 => Tensor::from_slice(DType::F64, &[entries], &weights),
                _ => Tensor::f32(&[entries], &weights.iter().map(|&w| w as f32).collect::<Vec<_>>()),
            };
            let weights = cx.constant_buffer("weights", &weights);
            let weight = nest.load_strided(cx, weights, 0, &along);
            value = nest.b.mul(value, weight);
        }
        if looped == 0 {
            let value = saturate_to_dtype(&mut nest, value, cx.buffer_dtype(to));
            nest.store_contiguous(cx, to, value);
            return cx.emit(nest.instruction());
        }
        let sum = nest.reduce(ReduceOp::Sum, value);
        let value = saturate_to_dtype(&mut nest, sum, cx.buffer_dtype(to));
        nest.store_outer(cx, to, value);
        cx.emit(nest.instruction())
    }
}

/// Converts a value to the compute type and multiplies it by a weight.
fn multiply_by_weight(nest: &mut NestBuilder, value: Reg, weight: f64, computed: Type) -> Reg {
    let value = nest.b.convert(value, computed);
    if weight == 1.0 {
        return value;
    }
    let weight = nest.b.constant(computed, weight);
    nest.b.mul(value, weight)
}

/// Converts a float to an element of `dtype`, with saturation for narrow integers.
fn saturate_to_dtype(nest: &mut NestBuilder, value: Reg, dtype: DType) -> Reg {
    let ty = nest.b.ty(value);
    let bits = 8 * dtype.size() as i32;
    if !ty.is_float() || !dtype.is_integer() || bits > 16 {
        return value;
    }
    let signed = Type::of(dtype) == Type::I32;
    let (low, high) = match signed {
        true => (-f64::powi(2.0, bits - 1), f64::powi(2.0, bits - 1) - 1.0),
        false => (0.0, f64::powi(2.0, bits) - 1.0),
    };
    let (low, high) = (nest.b.constant(ty, low), nest.b.constant(ty, high));
    let raised = nest.b.binary(BinaryOp::Max, value, low);
    nest.b.binary(BinaryOp::Min, raised, high)
}

/// Returns the type in which weighted sums of elements of a type are computed and stored.
fn sum_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 | DType::I32 | DType::I64 | DType::U32 | DType::U64 => DType::F64,
        _ => DType::F32,
    }
}

/// Applies maps along axes of `from`, of shape `dims`, into `to`. The axis with the smallest ratio of sizes comes
/// first. At least one map must not be an identity.
pub(crate) fn apply_axis_maps(
    cx: &mut Lower<'_>,
    (from, dims): (BufferId, &[usize]),
    maps: &[(usize, AxisMap)],
    to: BufferId,
) -> Result<(), OpError> {
    let mut order: Vec<&(usize, AxisMap)> = maps.iter().filter(|(_, map)| !map.is_identity()).collect();
    // By the ratio of sizes; of equal ratios the last axis first, while the tensor is small.
    order.sort_by(|(a, p), (b, q)| {
        let (left, right) =
            (p.len() as u128 * q.source_size() as u128, q.len() as u128 * p.source_size() as u128);
        left.cmp(&right).then(b.cmp(a))
    });
    let dtype = cx.buffer_dtype(from);
    let copies = order.iter().all(|(_, map)| map.only_copies());
    let between = if copies { dtype } else { sum_dtype(dtype) };
    let (mut at, mut dims) = (from, dims.to_vec());
    for (n, (axis, map)) in order.iter().enumerate() {
        let mut next_dims = dims.clone();
        next_dims[*axis] = map.len();
        let next = match n + 1 == order.len() {
            true => to,
            false => cx.alloc_temp(&format!("axis_{axis}"), between, next_dims.iter().product()),
        };
        map.lower(cx, (at, &dims, *axis), next, Type::of(between))?;
        (at, dims) = (next, next_dims);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(source: usize, rows: &[&[(usize, f64)]]) -> AxisMap {
        let mut map = AxisMap::new(source);
        for row in rows {
            let taps: Vec<Tap> = row.iter().map(|&(index, weight)| Tap { index, weight }).collect();
            map.push(&taps);
        }
        map
    }

    /// Returns the rows that pieces represent.
    fn rows_of_pieces(pieces: &[Piece], len: usize) -> Vec<Vec<(usize, f64)>> {
        let mut rows = vec![Vec::new(); len];
        for piece in pieces {
            for n in 0..piece.count {
                let row = &mut rows[piece.first + n * piece.step];
                assert!(row.is_empty(), "no row is made twice");
                let at = |from: usize, by: isize| from.strict_add_signed(by * n as isize);
                row.extend(piece.terms.iter().map(|&(from, by, weight)| (at(from, by), weight)));
            }
        }
        rows
    }

    #[test]
    fn push_merges_equal_elements_and_drops_zeros() {
        let map = map(3, &[&[(0, 0.25), (0, 0.5), (2, 0.0)], &[(1, 1.0), (2, -1.0), (2, 1.0)], &[]]);
        assert_eq!(map.row(0), [Tap { index: 0, weight: 0.75 }]);
        assert_eq!(map.row(1), [Tap { index: 1, weight: 1.0 }]);
        assert_eq!(map.row(2), []);
        assert_eq!((map.source_size(), map.len()), (3, 3));
        assert!(!map.is_identity() && !map.only_copies());
        assert!(AxisMap::from_copies(2, [0, 1]).is_identity());
        assert!(AxisMap::from_copies(2, [1, 0, 0]).only_copies());
    }

    #[test]
    fn map_and_transpose() {
        let map = map(3, &[&[(0, 0.5), (2, 0.25)], &[(2, 1.0)]]);
        assert_eq!(map.matrix(false), [0.5, 0.0, 0.25, 0.0, 0.0, 1.0]);
        let back = map.transposed();
        assert_eq!((back.source_size(), back.len()), (2, 3));
        assert_eq!(back.matrix(true), map.matrix(false));
        assert_eq!(back.matrix(false), map.matrix(true));
        assert_eq!(back.transposed(), map);
    }

    #[test]
    fn regular_rows_are_merged_into_pieces() {
        let double = AxisMap::from_copies(5, (0..10).map(|k| k / 2));
        let reflected = AxisMap::from_copies(5, [2, 1, 0, 1, 2, 3, 4, 3, 2]);
        let edges = AxisMap::from_copies(3, [0, 0, 0, 1, 2, 2, 2]);
        let every_third = AxisMap::from_copies(9, [1, 4, 7]);
        let mut linear = AxisMap::new(6);
        for k in 0..12 {
            let x = (f64::from(k) + 0.5) / 2.0 - 0.5;
            let left = x.floor();
            let index = |at: f64| at.clamp(0.0, 5.0) as usize;
            let (a, b) = (x - left, index(left + 1.0));
            linear.push(&[Tap { index: index(left), weight: 1.0 - a }, Tap { index: b, weight: a }]);
        }
        let gradient = linear.transposed();
        for (map, max_pieces) in
            [(&double, 2), (&reflected, 3), (&edges, 3), (&every_third, 1), (&linear, 4), (&gradient, 3)]
        {
            let pieces = map.split_into_pieces().expect("it is regular");
            assert!(pieces.len() <= max_pieces, "{} pieces of {map:?}", pieces.len());
            let expected: Vec<Vec<(usize, f64)>> = (0..map.len())
                .map(|k| map.row(k).iter().map(|tap| (tap.index, tap.weight)).collect())
                .collect();
            assert_eq!(rows_of_pieces(&pieces, map.len()), expected);
        }
        let scattered = AxisMap::from_copies(97, (0..97).map(|k| k * k % 97));
        assert_eq!(scattered.split_into_pieces(), None);
        let dense = map(40, &[&(0..40).map(|k| (k, 1.0)).collect::<Vec<_>>()]);
        assert_eq!(dense.split_into_pieces(), None);
    }
}
