//! The softmax of rows, and its gradient, in place. Sums have [`LANES`] chains, joined as a tree.

use crate::isa::{Level, Work};
use crate::tape::number::Float;

/// Chains of a sum.
const LANES: usize = 32;

/// What combines two numbers.
trait Join<T> {
    fn join(a: T, b: T) -> T;
}

struct Sum;
struct Largest;

impl<T: Float> Join<T> for Sum {
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a.plus(b)
    }
}

impl<T: Float> Join<T> for Largest {
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a.larger(b)
    }
}

/// Joins what the chains hold.
#[inline(always)]
fn joined<T: Copy, J: Join<T>>(mut lanes: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = J::join(lanes[lane], lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Each row becomes its softmax, after every element was multiplied with `scale`.
pub(super) struct Softmax<'a, T> {
    pub(super) rows: &'a mut [T],
    /// Elements of a row.
    pub(super) keys: usize,
    pub(super) scale: Option<T>,
}

/// The largest element.
#[inline(always)]
fn largest<T: Float>(row: &[T]) -> T {
    let mut lanes = [T::LEAST; LANES];
    let (tiles, rest) = row.as_chunks::<LANES>();
    for tile in tiles {
        for (lane, &x) in lanes.iter_mut().zip(tile) {
            *lane = lane.larger(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = lane.larger(x);
    }
    joined::<T, Largest>(lanes)
}

/// Every element `x` becomes `exp(x - largest)`; returns their sum.
#[inline(always)]
fn powers<T: Float, L: Level>(row: &mut [T], largest: T) -> T {
    let mut lanes = [T::ZERO; LANES];
    let (tiles, rest) = row.as_chunks_mut::<LANES>();
    for tile in tiles {
        for (lane, x) in lanes.iter_mut().zip(tile) {
            *x = x.minus(largest).exp::<L>();
            *lane = lane.plus(*x);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *x = x.minus(largest).exp::<L>();
        *lane = lane.plus(*x);
    }
    joined::<T, Sum>(lanes)
}

#[inline(always)]
fn scale<T: Float>(row: &mut [T], factor: T) {
    for x in row {
        *x = x.times(factor);
    }
}

impl<T: Float> Work for Softmax<'_, T> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        for row in self.rows.chunks_exact_mut(self.keys) {
            if let Some(factor) = self.scale {
                scale(row, factor);
            }
            let sum = powers::<T, L>(row, largest(row));
            scale(row, T::ONE.over(sum));
        }
    }
}

/// Each row of gradients of a softmax becomes that of its operand, times `scale`.
pub(super) struct SoftmaxGradient<'a, T> {
    pub(super) softmax: &'a [T],
    pub(super) gradients: &'a mut [T],
    /// Elements of a row.
    pub(super) keys: usize,
    pub(super) scale: Option<T>,
}

/// The sum of products of two rows.
#[inline(always)]
fn dot<T: Float>(a: &[T], b: &[T]) -> T {
    let mut lanes = [T::ZERO; LANES];
    let ((a_tiles, a_rest), (b_tiles, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a_tiles.iter().zip(b_tiles) {
        for (lane, (&a, &b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane = lane.plus(a.times(b));
        }
    }
    for (lane, (&a, &b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *lane = lane.plus(a.times(b));
    }
    joined::<T, Sum>(lanes)
}

impl<T: Float> Work for SoftmaxGradient<'_, T> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let rows = self.softmax.chunks_exact(self.keys).zip(self.gradients.chunks_exact_mut(self.keys));
        for (softmax, gradients) in rows {
            let sum = dot(softmax, gradients);
            for (g, &p) in gradients.iter_mut().zip(softmax) {
                *g = p.times(g.minus(sum));
            }
            if let Some(factor) = self.scale {
                scale(gradients, factor);
            }
        }
    }
}
