//! Instruction for scattered sums of rows.

use ortrain_expr::{DType, product_of_sizes};

use super::body::{Body, contiguous_fault};
use crate::buffer::{Buffer, BufferId};
use crate::cost::Traffic;
use crate::operand::{Operand, Use};

/// `target[o, index[j], i] += source[o, j, i]`; duplicates are added in the order of `j`. With `last`, `target[o,
/// index[j], i] = source[o, j, i]`; the last of several duplicates remains. All operands are whole buffers, row-major.
///
/// Negative indices count from the end. Indices out of range contribute nothing; an operator that forbids them must
/// emit a check. The target is initialized before: with zeros, or with a gradient to add to.
#[derive(Clone, Debug)]
pub struct ScatterAdd {
    /// Number of outer slices.
    pub outer: usize,
    /// Number of rows in each outer slice of the target.
    pub rows: usize,
    /// Number of indices.
    pub count: usize,
    /// Number of elements of a row.
    pub inner: usize,
    /// Rows to add: `[outer, count, inner]`.
    pub source: Operand,
    /// Row indices: `count` integers (`I32` or `I64`).
    pub index: Operand,
    /// Target rows: `[outer, rows, inner]`.
    pub target: Operand,
    /// True if the source overwrites the target instead of being added.
    pub overwrites: bool,
}

impl ScatterAdd {
    /// Returns the number of elements that are added.
    fn elements(&self) -> u64 {
        product_of_sizes([self.outer, self.count, self.inner])
    }
}

impl Body for ScatterAdd {
    fn name(&self) -> &'static str {
        "ScatterAdd"
    }

    fn describe_sizes(&self) -> String {
        let last = if self.overwrites { ", last write wins" } else { "" };
        format!("{}x{}x{} rows {}{last}", self.outer, self.count, self.inner, self.rows)
    }

    fn buffers(&self, each: &mut dyn FnMut(BufferId, Use)) {
        [&self.source, &self.index].into_iter().for_each(|operand| each(operand.buffer, Use::Read));
        each(self.target.buffer, Use::Update);
    }

    fn buffers_mut(&mut self, each: &mut dyn FnMut(&mut BufferId, Use)) {
        [&mut self.source, &mut self.index]
            .into_iter()
            .for_each(|operand| each(&mut operand.buffer, Use::Read));
        each(&mut self.target.buffer, Use::Update);
    }

    fn validate(&self, buffers: &[Buffer]) -> Option<String> {
        let buffer = |operand: &Operand| &buffers[operand.buffer.0 as usize];
        let need = |operand: &Operand, len: usize| {
            let actual = buffer(operand).len;
            (actual != len).then(|| format!("expected {len} elements, got {actual}"))
        };
        need(&self.source, self.elements() as usize)
            .or_else(|| need(&self.index, self.count))
            .or_else(|| need(&self.target, self.outer * self.rows * self.inner))
            .or_else(|| {
                let dtype = buffer(&self.index).dtype;
                (!matches!(dtype, DType::I32 | DType::I64))
                    .then(|| format!("indices of type {dtype} are not supported"))
            })
            .or_else(|| {
                let [from, to] = [&self.source, &self.target].map(|operand| buffer(operand).dtype);
                (from != to).then(|| format!("the source rows are {from}, but the target rows are {to}"))
            })
            .or_else(|| contiguous_fault([&self.source, &self.index, &self.target], buffers))
    }

    fn traffic(&self, traffic: &mut Traffic<'_>) {
        traffic.add_read(self.source.buffer, u64::MAX);
        traffic.add_read(self.index.buffer, u64::MAX);
        traffic.add_write(self.target.buffer, self.elements());
        if !self.overwrites {
            traffic.add_read(self.target.buffer, self.elements());
        }
    }

    fn flops(&self) -> u64 {
        if !self.overwrites && self.target.access.dtype.is_float() { self.elements() } else { 0 }
    }

    fn is_empty(&self) -> bool {
        self.elements() == 0
    }
}
