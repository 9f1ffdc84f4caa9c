//! Output of matrix products. Results go directly to the epilogue. With split-K, partial sums go to scratch memory, and
//! a second launch adds them.

use std::cell::Cell;

use ortrain_program::Nest;

use crate::context::Context;
use crate::expr::AnalyzedNest;
use crate::inner_product::{InnerProduct, MatmulOperands};
use crate::kernel::Kernel;
use crate::launch::Launch;
use crate::nest;
use crate::repr::{Repr, Value};

/// Minimum number of groups that keep a device busy. With fewer groups, long sums are split.
const MIN_BUSY_GROUPS: usize = 128;
/// Target number of groups for the split.
const TARGET_GROUPS: usize = 512;
/// Minimum number of terms of a part.
const MIN_PART_TERMS: usize = 256;

/// Split of sums into parts. It depends on sizes alone, so that results have the same bits on every device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Split {
    /// Number of parts.
    pub(crate) count: usize,
    /// Number of terms of a part; the last part may have fewer.
    pub(crate) terms: usize,
}

impl Split {
    /// Chooses the split of sums of `terms` terms. The kernel has `groups` groups without a split, and adds `step`
    /// terms per iteration.
    pub(crate) fn for_sums(groups: usize, terms: usize, step: usize) -> Split {
        let count = match groups {
            0..MIN_BUSY_GROUPS => TARGET_GROUPS.div_ceil(groups.max(1)).min(terms / MIN_PART_TERMS).max(1),
            _ => 1,
        };
        let part = terms.div_ceil(count).next_multiple_of(step);
        Split { count: terms.div_ceil(part), terms: part }
    }
}

/// Output of a matrix product: its epilogue, and scratch memory for the parts of split sums.
pub(crate) struct MatmulOutput<'t> {
    pub(crate) factors: &'t dyn MatmulOperands,
    /// Offset of the parts in scratch memory.
    first: Cell<usize>,
    known: AnalyzedNest<'t>,
}

impl<'t> MatmulOutput<'t> {
    pub(crate) fn new(
        cx: &Context<'_>,
        factors: &'t dyn MatmulOperands,
        epilogue: &'t Nest,
    ) -> Result<MatmulOutput<'t>, String> {
        Ok(MatmulOutput { factors, first: Cell::new(0), known: AnalyzedNest::new(cx, epilogue)? })
    }

    pub(crate) fn known(&self) -> &AnalyzedNest<'t> {
        &self.known
    }

    /// Returns the number of elements of the result.
    fn points(&self) -> usize {
        self.known.nest.dims.iter().product()
    }

    /// Returns the number of sums per element of the result: two if factors are split into several terms, otherwise
    /// one.
    fn sums(&self) -> usize {
        InnerProduct::sums_per_product(self.factors.precision())
    }

    /// Reserves scratch memory for the parts of sums.
    pub(crate) fn reserve(&self, cx: &Context<'_>, split: Split) {
        if split.count > 1 {
            self.first.set(cx.reserve(split.count * self.sums() * self.points()));
        }
    }

    /// Returns the scratch offset of a part of a sum.
    fn part_offset(&self, part: &str, sum: usize, point: &str) -> String {
        let (sums, points) = (self.sums(), self.points());
        format!("{} + ({part} * {sums} + {sum}) * {points} + {point}", self.first.get())
    }

    /// Defines a kernel variable with the row-major index of a point, and returns its name.
    fn point_index(&self, kernel: &mut Kernel<'_>, at: &[String]) -> String {
        let axes = self.known.nest.dims.iter().zip(at);
        let index = axes.fold(String::from("0"), |index, (dim, at)| format!("({index} * {dim} + {at})"));
        kernel.int(index)
    }

    /// Runs the epilogue on the result at a point, and stores it.
    pub(crate) fn finish(
        &self,
        kernel: &mut Kernel<'_>,
        at: Vec<String>,
        result: Value,
    ) -> Result<(), String> {
        self.factors.finish(kernel, &self.known, at, result)
    }

    /// Stores a part of a sum of a point in scratch memory.
    pub(crate) fn store_part(
        &self,
        kernel: &mut Kernel<'_>,
        at: &[String],
        part: &str,
        (sum, value): (usize, &Value),
    ) {
        let point = self.point_index(kernel, at);
        kernel.set_scratch(&self.part_offset(part, sum, &point), value);
    }

    /// Returns the launch that adds the parts in order and runs the epilogue.
    pub(crate) fn add_parts_launch(&self, cx: &Context<'_>, split: Split) -> Result<Launch, String> {
        nest::plain_launch(cx, &self.known, &|kernel, at| {
            let point = self.point_index(kernel, at);
            let product = InnerProduct::new(kernel, self.factors.precision());
            let depth = kernel.depth();
            let part = kernel.begin_loop("0", &split.count.to_string());
            let offsets: Vec<String> =
                (0..self.sums()).map(|sum| self.part_offset(&part, sum, &point)).collect();
            let sums: Vec<Value> = offsets.iter().map(|offset| kernel.scratch(offset, Repr::F32)).collect();
            product.add_sums(kernel, &sums);
            kernel.close_to(depth);
            let result = product.result(kernel);
            Ok(vec![self.factors.finish_value(kernel, at, result)?])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_sums_are_split() {
        assert_eq!(Split::for_sums(128, 1 << 20, 16), Split { count: 1, terms: 1 << 20 });
        assert_eq!(Split::for_sums(1, 511, 16), Split { count: 1, terms: 512 });
        assert_eq!(Split::for_sums(64, 512, 16), Split { count: 2, terms: 256 });
        assert_eq!(Split::for_sums(127, 1 << 20, 16), Split { count: 5, terms: 209_728 });
        // Every part has terms.
        for terms in 1..3000 {
            let Split { count, terms: part } = Split::for_sums(3, terms, 32);
            assert!((count - 1) * part < terms && terms <= count * part, "{terms} in {count} of {part}");
        }
    }
}
