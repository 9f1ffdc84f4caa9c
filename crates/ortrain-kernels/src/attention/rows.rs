//! Softmax of rows, and its gradient, in place. Sums have [`LANES`] chains, joined as a tree.
//!
//! Each pass processes a few rows before the next pass begins: the latency at the end of one row overlaps with the next
//! row.

use crate::isa::{Level, Work};
use crate::tile::number::Float;

/// Number of chains of a sum.
const LANES: usize = 32;
/// Maximum number of rows that go through the passes together, and their approximate number of elements, which fit the
/// first-level cache.
const MAX_GROUP_ROWS: usize = 8;
const GROUP_ELEMENTS: usize = 2048;

/// Reduces the chains to one value, as a tree.
#[inline(always)]
fn join_lanes<T: Copy>(mut lanes: [T; LANES], join: impl Fn(T, T) -> T) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = join(lanes[lane], lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Returns the last elements of a row, padded to a whole tile.
#[inline(always)]
fn pad_to_tile<T: Copy>(rest: &[T], padding: T) -> [T; LANES] {
    let mut tile = [padding; LANES];
    tile[..rest.len()].copy_from_slice(rest);
    tile
}

/// Returns the larger value. If `a` is NaN, returns `b`.
#[inline(always)]
fn max_ignoring_nan<T: Float>(a: T, b: T) -> T {
    if a > b { a } else { b }
}

/// Returns the largest element times `scale`, ignoring NaN: the exponential of NaN, and the sum with it, are NaN
/// anyway.
#[inline(always)]
fn scaled_max<T: Float>(row: &[T], scale: T) -> T {
    let mut lanes = [T::LOWEST; LANES];
    let mut add_tile = |tile: &[T; LANES]| {
        for (lane, &x) in lanes.iter_mut().zip(tile) {
            *lane = max_ignoring_nan(x.mul(scale), *lane);
        }
    };
    let (tiles, rest) = row.as_chunks::<LANES>();
    tiles.iter().for_each(&mut add_tile);
    if let Some(&last) = rest.last() {
        add_tile(&pad_to_tile(rest, last));
    }
    join_lanes(lanes, max_ignoring_nan)
}

#[inline(always)]
fn sum<T: Float>(row: &[T]) -> T {
    let mut lanes = [T::ZERO; LANES];
    let mut add_tile = |tile: &[T; LANES]| {
        for (lane, &x) in lanes.iter_mut().zip(tile) {
            *lane = lane.add(x);
        }
    };
    let (tiles, rest) = row.as_chunks::<LANES>();
    tiles.iter().for_each(&mut add_tile);
    if !rest.is_empty() {
        add_tile(&pad_to_tile(rest, T::ZERO));
    }
    join_lanes(lanes, T::add)
}

/// Returns the sum of products of two rows.
#[inline(always)]
fn dot<T: Float>(a: &[T], b: &[T]) -> T {
    let mut lanes = [T::ZERO; LANES];
    let mut add_tile = |a: &[T; LANES], b: &[T; LANES]| {
        for (lane, (&a, &b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane = lane.add(a.mul(b));
        }
    };
    let ((a_tiles, a_rest), (b_tiles, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    a_tiles.iter().zip(b_tiles).for_each(|(a, b)| add_tile(a, b));
    if !a_rest.is_empty() {
        add_tile(&pad_to_tile(a_rest, T::ZERO), &pad_to_tile(b_rest, T::ZERO));
    }
    join_lanes(lanes, T::add)
}

/// Rows of scores in memory.
#[derive(Clone, Copy)]
pub(super) struct Rows<T> {
    pub(super) at: *mut T,
    pub(super) rows: usize,
    /// Number of elements from one row to the next, and the number of elements in use, the first ones.
    pub(super) pitch: usize,
    pub(super) keys: usize,
}

impl<T> Rows<T> {
    /// # Safety
    /// The row is valid, and no other reference to it exists.
    #[inline(always)]
    unsafe fn row<'a>(self, i: usize) -> &'a mut [T] {
        // SAFETY: the caller's contract.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(i * self.pitch), self.keys) }
    }

    /// Yields for each group of rows that go through the passes together its first row and its end.
    fn groups(self) -> impl Iterator<Item = (usize, usize)> {
        let group = (GROUP_ELEMENTS / self.keys).clamp(1, MAX_GROUP_ROWS);
        (0..self.rows).step_by(group).map(move |first| (first, self.rows.min(first + group)))
    }
}

/// Element in memory of callers, at any alignment.
#[repr(C, packed)]
#[derive(Clone, Copy)]
struct Unaligned<T>(T);

/// Rows in memory of callers, such as a bias of the scores: elements of a row are adjacent.
#[derive(Clone, Copy)]
pub(super) struct BiasRows<T> {
    pub(super) at: *const T,
    pub(super) row: isize,
}

impl<T> BiasRows<T> {
    /// # Safety
    /// The row has `keys` elements, and no other code writes to them.
    #[inline(always)]
    unsafe fn row<'a>(self, i: usize, keys: usize) -> &'a [Unaligned<T>] {
        // SAFETY: the caller's contract.
        unsafe { std::slice::from_raw_parts(self.at.wrapping_offset(i as isize * self.row).cast(), keys) }
    }
}

/// Replaces each row by its softmax, after multiplying every element by `scale` and adding a bias. The creator
/// guarantees that the rows are valid, that no other code accesses them, and that the bias is valid.
pub(super) struct Softmax<T> {
    pub(super) rows: Rows<T>,
    pub(super) scale: T,
    pub(super) added: Option<BiasRows<T>>,
}

impl<T: Float> Work for Softmax<T> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let Softmax { rows, scale, added } = self;
        // SAFETY: guaranteed by the creator of the work, and only one row is borrowed at a time.
        let row = |i: usize| unsafe { rows.row(i) };
        // The bias is added after scaling, so the later passes need no scale.
        let later = if added.is_some() { T::ONE } else { scale };
        for (first, end) in rows.groups() {
            let mut maxima = [T::ZERO; MAX_GROUP_ROWS];
            for (i, maximum) in (first..end).zip(&mut maxima) {
                let row = row(i);
                if let Some(added) = added {
                    // SAFETY: as above.
                    let added = unsafe { added.row(i, rows.keys) };
                    for (x, &Unaligned(y)) in row.iter_mut().zip(added) {
                        *x = x.mul(scale).add(y);
                    }
                }
                *maximum = scaled_max(row, later);
            }
            let mut sums = [T::ZERO; MAX_GROUP_ROWS];
            for ((i, &maximum), total) in (first..end).zip(&maxima).zip(&mut sums) {
                let row = row(i);
                for x in &mut *row {
                    *x = x.mul(later).sub(maximum).exp::<L>();
                }
                *total = sum(row);
            }
            for (i, &sum) in (first..end).zip(&sums) {
                let share = T::ONE.div(sum);
                for x in row(i) {
                    *x = x.mul(share);
                }
            }
        }
    }
}

/// Replaces each row of gradients of a softmax by the gradient of the softmax's operand, times `scale`. The creator
/// guarantees the same as for [`Softmax`], and that the two sets of rows are distinct.
pub(super) struct SoftmaxGradient<T> {
    pub(super) softmax: Rows<T>,
    pub(super) gradients: Rows<T>,
    pub(super) scale: T,
}

impl<T: Float> Work for SoftmaxGradient<T> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let SoftmaxGradient { softmax, gradients, scale } = self;
        // SAFETY: guaranteed by the creator of the work, and only one pair of rows is borrowed at a time.
        let both = |i: usize| unsafe { (&*softmax.row(i), gradients.row(i)) };
        for (first, end) in gradients.groups() {
            let mut sums = [T::ZERO; MAX_GROUP_ROWS];
            for (i, sum) in (first..end).zip(&mut sums) {
                let (softmax, gradients) = both(i);
                *sum = dot(softmax, gradients);
            }
            for (i, &sum) in (first..end).zip(&sums) {
                let (softmax, gradients) = both(i);
                for (g, &p) in gradients.iter_mut().zip(softmax) {
                    *g = p.mul(g.sub(sum)).mul(scale);
                }
            }
        }
    }
}

/// Largest magnitude of rows, which are only read. NaN, if an element is NaN or infinite.
pub(super) struct MaxMagnitude<T>(pub(super) BiasRows<T>, pub(super) [usize; 2]);

impl<T: Float> Work for MaxMagnitude<T> {
    type Out = T;
    #[inline(always)]
    fn work<L: Level>(self) -> T {
        let MaxMagnitude(from, [rows, elements]) = self;
        let (mut maxima, mut wrong) = ([T::ZERO; LANES], [T::ZERO; LANES]);
        let mut add_tile = |tile: &[Unaligned<T>; LANES]| {
            for ((maximum, wrong), &Unaligned(x)) in maxima.iter_mut().zip(&mut wrong).zip(tile) {
                *maximum = max_ignoring_nan(x.magnitude(), *maximum);
                *wrong = wrong.add(x.mul(T::ZERO));
            }
        };
        for i in 0..rows {
            // SAFETY: guaranteed by the creator of the work.
            let (tiles, rest) = unsafe { from.row(i, elements) }.as_chunks::<LANES>();
            tiles.iter().for_each(&mut add_tile);
            if !rest.is_empty() {
                add_tile(&pad_to_tile(rest, Unaligned(T::ZERO)));
            }
        }
        join_lanes(maxima, max_ignoring_nan).add(join_lanes(wrong, T::add))
    }
}

/// Number of first keys that any row sees: the bias of all later keys is at most `masked`. Returns all keys if some row
/// has no bias of at least `open`, or has a bias that is not at most `limit`.
pub(super) struct VisibleKeys<T> {
    pub(super) added: BiasRows<T>,
    pub(super) rows: usize,
    pub(super) keys: usize,
    pub(super) masked: T,
    pub(super) open: T,
    pub(super) limit: T,
}

impl<T: Float> Work for VisibleKeys<T> {
    type Out = usize;
    #[inline(always)]
    fn work<L: Level>(self) -> usize {
        let VisibleKeys { added, rows, keys, masked: hidden, open, limit } = self;
        let mut visible = 0;
        for i in 0..rows {
            let (mut any, mut all_equal) = (false, true);
            // SAFETY: guaranteed by the creator of the work.
            let row = unsafe { added.row(i, keys) };
            for (tile, end) in row.chunks(LANES / 2).zip((LANES / 2..).step_by(LANES / 2)) {
                let mut is_visible = false;
                for &Unaligned(x) in tile {
                    // NaN counts as visible.
                    let hides = x <= hidden;
                    is_visible |= !hides;
                    any |= x >= open;
                    all_equal &= x <= limit;
                }
                if is_visible {
                    visible = visible.max(end);
                }
            }
            if !(any && all_equal) {
                return keys;
            }
        }
        visible.min(keys)
    }
}
