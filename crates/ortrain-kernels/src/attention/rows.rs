//! The softmax of rows, and its gradient, in place. Sums have [`LANES`] chains, joined as a tree.
//!
//! Each pass goes over a few rows before the next one does: what one row waits for at its end, the next one's work fills.

use crate::isa::{Level, Work};
use crate::tile::number::Float;

/// Chains of a sum.
const LANES: usize = 32;
/// Rows that go through the passes together, at most, and about how many elements they have, which stay in the
/// first-level cache.
const GROUP: usize = 8;
const ELEMENTS: usize = 2048;

/// Joins what the chains hold.
#[inline(always)]
fn joined<T: Copy>(mut lanes: [T; LANES], join: impl Fn(T, T) -> T) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = join(lanes[lane], lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// The last elements of a row, filled up to a whole tile.
#[inline(always)]
fn tile<T: Copy>(rest: &[T], padding: T) -> [T; LANES] {
    let mut tile = [padding; LANES];
    tile[..rest.len()].copy_from_slice(rest);
    tile
}

/// The larger one; of what is not a number, nothing remains.
#[inline(always)]
fn larger<T: Float>(a: T, b: T) -> T {
    if a > b { a } else { b }
}

/// The largest element, times `scale`, but for what is not a number: its power is none either, nor is their sum.
#[inline(always)]
fn largest<T: Float>(row: &[T], scale: T) -> T {
    let mut lanes = [T::LOWEST; LANES];
    let mut take = |tile: &[T; LANES]| {
        for (lane, &x) in lanes.iter_mut().zip(tile) {
            *lane = larger(x.mul(scale), *lane);
        }
    };
    let (tiles, rest) = row.as_chunks::<LANES>();
    tiles.iter().for_each(&mut take);
    if let Some(&last) = rest.last() {
        take(&tile(rest, last));
    }
    joined(lanes, larger)
}

#[inline(always)]
fn sum<T: Float>(row: &[T]) -> T {
    let mut lanes = [T::ZERO; LANES];
    let mut take = |tile: &[T; LANES]| {
        for (lane, &x) in lanes.iter_mut().zip(tile) {
            *lane = lane.add(x);
        }
    };
    let (tiles, rest) = row.as_chunks::<LANES>();
    tiles.iter().for_each(&mut take);
    if !rest.is_empty() {
        take(&tile(rest, T::ZERO));
    }
    joined(lanes, T::add)
}

/// The sum of products of two rows.
#[inline(always)]
fn dot<T: Float>(a: &[T], b: &[T]) -> T {
    let mut lanes = [T::ZERO; LANES];
    let mut take = |a: &[T; LANES], b: &[T; LANES]| {
        for (lane, (&a, &b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane = lane.add(a.mul(b));
        }
    };
    let ((a_tiles, a_rest), (b_tiles, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    a_tiles.iter().zip(b_tiles).for_each(|(a, b)| take(a, b));
    if !a_rest.is_empty() {
        take(&tile(a_rest, T::ZERO), &tile(b_rest, T::ZERO));
    }
    joined(lanes, T::add)
}

/// Rows of scores in memory.
#[derive(Clone, Copy)]
pub(super) struct Rows<T> {
    pub(super) at: *mut T,
    pub(super) rows: usize,
    /// Elements from one row to the next, and how many of them, the first ones, are looked at.
    pub(super) pitch: usize,
    pub(super) keys: usize,
}

impl<T> Rows<T> {
    /// # Safety
    /// The row is there, and no other reference to it lives.
    #[inline(always)]
    unsafe fn row<'a>(self, i: usize) -> &'a mut [T] {
        // SAFETY: the caller's contract.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(i * self.pitch), self.keys) }
    }

    /// The first row of each group that goes through the passes together, and the one behind it.
    fn groups(self) -> impl Iterator<Item = (usize, usize)> {
        let group = (ELEMENTS / self.keys).clamp(1, GROUP);
        (0..self.rows).step_by(group).map(move |first| (first, self.rows.min(first + group)))
    }
}

/// An element in memory of callers, wherever it lies.
#[repr(C, packed)]
#[derive(Clone, Copy)]
struct Anywhere<T>(T);

/// Rows of callers, such as what is added to scores: elements of a row lie side by side.
#[derive(Clone, Copy)]
pub(super) struct Added<T> {
    pub(super) at: *const T,
    pub(super) row: isize,
}

impl<T> Added<T> {
    /// # Safety
    /// The row has so many elements, and nobody writes to them.
    #[inline(always)]
    unsafe fn row<'a>(self, i: usize, keys: usize) -> &'a [Anywhere<T>] {
        // SAFETY: the caller's contract.
        unsafe { std::slice::from_raw_parts(self.at.wrapping_offset(i as isize * self.row).cast(), keys) }
    }
}

/// Each row becomes its softmax, after every element was multiplied with `scale` and something was added. Who makes it
/// promises that the rows are there, and nobody else's, and what is added is there too.
pub(super) struct Softmax<T> {
    pub(super) rows: Rows<T>,
    pub(super) scale: T,
    pub(super) added: Option<Added<T>>,
}

impl<T: Float> Work for Softmax<T> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let Softmax { rows, scale, added } = self;
        // SAFETY: promised by who made the work, and one row is borrowed at a time.
        let row = |i: usize| unsafe { rows.row(i) };
        // What is added comes behind the scale, which is then done with.
        let later = if added.is_some() { T::ONE } else { scale };
        for (first, end) in rows.groups() {
            let mut most = [T::ZERO; GROUP];
            for (i, most) in (first..end).zip(&mut most) {
                let row = row(i);
                if let Some(added) = added {
                    // SAFETY: as above.
                    let added = unsafe { added.row(i, rows.keys) };
                    for (x, &Anywhere(y)) in row.iter_mut().zip(added) {
                        *x = x.mul(scale).add(y);
                    }
                }
                *most = largest(row, later);
            }
            let mut sums = [T::ZERO; GROUP];
            for ((i, &most), total) in (first..end).zip(&most).zip(&mut sums) {
                let row = row(i);
                for x in &mut *row {
                    *x = x.mul(later).sub(most).exp::<L>();
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

/// Each row of gradients of a softmax becomes that of its operand, times `scale`. Promised is what [`Softmax`] wants,
/// of rows that are not the same.
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
        // SAFETY: promised by who made the work, and one pair of rows is borrowed at a time.
        let both = |i: usize| unsafe { (&*softmax.row(i), gradients.row(i)) };
        for (first, end) in gradients.groups() {
            let mut sums = [T::ZERO; GROUP];
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

/// The largest magnitude of rows, of which nothing is written. Not a number, if one of them is none or infinite.
pub(super) struct Magnitude<T>(pub(super) Added<T>, pub(super) [usize; 2]);

impl<T: Float> Work for Magnitude<T> {
    type Out = T;
    #[inline(always)]
    fn work<L: Level>(self) -> T {
        let Magnitude(from, [rows, elements]) = self;
        let (mut most, mut wrong) = ([T::ZERO; LANES], [T::ZERO; LANES]);
        let mut take = |tile: &[Anywhere<T>; LANES]| {
            for ((most, wrong), &Anywhere(x)) in most.iter_mut().zip(&mut wrong).zip(tile) {
                *most = larger(x.magnitude(), *most);
                *wrong = wrong.add(x.mul(T::ZERO));
            }
        };
        for i in 0..rows {
            // SAFETY: promised by who made the work.
            let (tiles, rest) = unsafe { from.row(i, elements) }.as_chunks::<LANES>();
            tiles.iter().for_each(&mut take);
            if !rest.is_empty() {
                take(&tile(rest, Anywhere(T::ZERO)));
            }
        }
        joined(most, larger).add(joined(wrong, T::add))
    }
}

/// How many of the first keys any row sees: what is added to the others is at most `hidden`. All, if in some row nothing
/// is at least `open` or something is not at most `most`.
pub(super) struct Seen<T> {
    pub(super) added: Added<T>,
    pub(super) rows: usize,
    pub(super) keys: usize,
    pub(super) hidden: T,
    pub(super) open: T,
    pub(super) most: T,
}

impl<T: Float> Work for Seen<T> {
    type Out = usize;
    #[inline(always)]
    fn work<L: Level>(self) -> usize {
        let Seen { added, rows, keys, hidden, open, most } = self;
        let mut seen = 0;
        for i in 0..rows {
            let (mut any, mut all) = (false, true);
            // SAFETY: promised by who made the work.
            let row = unsafe { added.row(i, keys) };
            for (tile, end) in row.chunks(LANES / 2).zip((LANES / 2..).step_by(LANES / 2)) {
                let mut sees = false;
                for &Anywhere(x) in tile {
                    // What is not a number is seen.
                    let hides = x <= hidden;
                    sees |= !hides;
                    any |= x >= open;
                    all &= x <= most;
                }
                if sees {
                    seen = seen.max(end);
                }
            }
            if !(any && all) {
                return keys;
            }
        }
        seen.min(keys)
    }
}
