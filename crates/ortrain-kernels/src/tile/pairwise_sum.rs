//! Pairwise combination of partial results.

use ortrain_expr::{ReduceOp, Type};

use super::ops;
use crate::isa::Isa;

/// Pairwise combination of partial results, in an order that depends only on their number. Works as a binary counter:
/// its digits hold the results of 1, 2, 4, ... partial results.
#[repr(C)]
pub(crate) struct PairwiseSum {
    pub(super) count: u64,
    pub(super) levels: [u64; PairwiseSum::LEVELS],
}

impl PairwiseSum {
    const LEVELS: usize = 48;

    pub(crate) fn reset(&mut self) {
        self.count = 0;
    }

    pub(crate) fn push(&mut self, op: ReduceOp, ty: Type, mut value: u64) {
        let mut level = 0;
        while self.count >> level & 1 != 0 {
            value = combine_bits(op, ty, self.levels[level], value);
            level += 1;
        }
        self.levels[level] = value;
        self.count += 1;
    }

    pub(crate) fn result(&self, op: ReduceOp, ty: Type) -> u64 {
        let mut result = None;
        let mut left = self.count;
        while left != 0 {
            let earlier = self.levels[left.trailing_zeros() as usize];
            result = Some(result.map_or(earlier, |later| combine_bits(op, ty, earlier, later)));
            left &= left - 1;
        }
        result.unwrap_or_else(|| neutral_bits(op, ty))
    }
}

fn neutral_bits(op: ReduceOp, ty: Type) -> u64 {
    let mut value = 0u64;
    // SAFETY: `value` has eight bytes, and one number of any type fits into eight bytes.
    unsafe { ops::neutral(op, ty, (&raw mut value).cast(), 1) };
    value
}

fn combine_bits(op: ReduceOp, ty: Type, a: u64, b: u64) -> u64 {
    let mut value = a;
    // SAFETY: `value` and `b` have eight bytes each, and one number of any type fits into eight bytes.
    unsafe { ops::accumulate(Isa::PORTABLE, op, ty, (&raw const b).cast(), (&raw mut value).cast(), 1) };
    value
}
