//! Reductions that the invocations of a group share.

use std::ops::Range;

use ortrain_expr::ReduceOp;
use ortrain_program::Nest;

use crate::dialect::GROUP_SIZE;
use crate::expr::{AnalyzedNest, Point};
use crate::kernel::Kernel;
use crate::repr::{Repr, Value};
use crate::thread_index::define_coordinates;
use crate::thread_reduction::{add_point, combine, define_total};

/// Strided elements of a row that an invocation visits.
pub(crate) struct Span {
    /// Index of the first element.
    pub(crate) from: String,
    /// Step between elements.
    pub(crate) step: usize,
    /// Number of elements.
    pub(crate) count: usize,
    /// Number of elements of the row, if the span can exceed the row.
    pub(crate) end: Option<usize>,
}

impl Span {
    /// Starts the loop over the elements, and returns the index of the current element.
    pub(crate) fn begin_loop(&self, kernel: &mut Kernel<'_>) -> String {
        let turn = kernel.begin_loop("0", &self.count.to_string());
        let index = kernel.int(format!("{} + {turn} * {}", self.from, self.step));
        if let Some(end) = self.end {
            kernel.begin_if(&format!("{index} < {end}"));
        }
        index
    }

    /// Starts the loop over the elements, and returns the coordinates along the reduced axes of a nest.
    pub(crate) fn begin_row_loop(&self, kernel: &mut Kernel<'_>, nest: &Nest) -> Vec<String> {
        let index = self.begin_loop(kernel);
        let index_bits = kernel.define(Value::new(format!("bits_of_int({index})"), Repr::U32)).text;
        define_coordinates(kernel, &index_bits, nest.inner_dims())
    }
}

/// Prints the totals of an invocation's elements of a row, for the reductions of a stage.
pub(crate) fn fold_span(
    kernel: &mut Kernel<'_>,
    known: &AnalyzedNest<'_>,
    stage: &Range<usize>,
    (outer, reduced): (&[String], &[Value]),
    span: &Span,
) -> Result<Vec<Value>, String> {
    let totals: Vec<Value> = stage.clone().map(|k| define_total(kernel, known, k)).collect();
    let depth = kernel.depth();
    let inner = span.begin_row_loop(kernel, known.nest);
    let at = outer.iter().cloned().chain(inner).collect();
    let point = Point { at, reduced: reduced.to_vec(), ..Point::default() };
    add_point(kernel, known, stage, &totals, &point)?;
    kernel.close_to(depth);
    Ok(totals)
}

/// Returns the operations of the reductions of a stage.
pub(crate) fn stage_operations(nest: &Nest, stage: &Range<usize>) -> Vec<ReduceOp> {
    nest.reductions[stage.clone()].iter().map(|reduction| reduction.op).collect()
}

/// Shared arrays of a group, reused by successive stages.
#[derive(Debug, Default)]
pub(crate) struct StageArrays {
    declared: Vec<Value>,
}

/// Invocations with parts of one row: `count` invocations (a power of two) at a distance of `stride`. `number` is the
/// index of an invocation among them.
pub(crate) struct RowLanes<'s> {
    pub(crate) index: &'s str,
    pub(crate) count: usize,
    pub(crate) stride: usize,
}

impl StageArrays {
    /// Returns an array for each value. Values do not share arrays.
    fn assign_arrays(&mut self, kernel: &mut Kernel<'_>, values: &[Value]) -> Vec<Value> {
        let mut used = Vec::new();
        for value in values {
            let free = |k: &usize| self.declared[*k].repr == value.repr && !used.contains(k);
            let at = (0..self.declared.len()).find(free).unwrap_or_else(|| {
                let name = kernel.shared(value.repr, GROUP_SIZE as usize);
                self.declared.push(Value::new(name, value.repr));
                self.declared.len() - 1
            });
            used.push(at);
        }
        used.into_iter().map(|k| self.declared[k].clone()).collect()
    }

    /// Combines the values of the invocations of a row in a binary tree with a fixed order. All invocations receive the
    /// result.
    pub(crate) fn combine_lanes(
        &mut self,
        kernel: &mut Kernel<'_>,
        operations: &[ReduceOp],
        values: &[Value],
        slices: &RowLanes<'_>,
    ) -> Vec<Value> {
        if !self.declared.is_empty() {
            kernel.barrier();
        }
        let arrays = self.assign_arrays(kernel, values);
        for (array, value) in arrays.iter().zip(values) {
            kernel.line(&format!("{}[lane] = {};", array.text, value.text));
        }
        kernel.barrier();
        let mut half = slices.count / 2;
        while half > 0 {
            let depth = kernel.depth();
            kernel.begin_if(&format!("{} < {half}", slices.index));
            for (array, &op) in arrays.iter().zip(operations) {
                let element = |at: String| Value::new(format!("{}[{at}]", array.text), array.repr);
                let (own_value, other) =
                    (element("lane".into()), element(format!("lane + {}", half * slices.stride)));
                let both = combine(kernel, op, &own_value, &other);
                kernel.assign(&own_value, &both);
            }
            kernel.close_to(depth);
            kernel.barrier();
            half /= 2;
        }
        let first = kernel.int(format!("lane - {} * {}", slices.index, slices.stride));
        let result = |array: &Value| Value::new(format!("{}[{first}]", array.text), array.repr);
        arrays.iter().map(result).map(|value| kernel.define(value)).collect()
    }
}
