//! Reductions that the invocations of a group share.

use std::ops::Range;

use ortrain_expr::ReduceOp;
use ortrain_program::Nest;

use crate::dialect::{GROUP, Repr};
use crate::expr::{AnalyzedNest, Point};
use crate::kernel::{Kernel, Value};
use crate::thread_index::coordinates;
use crate::thread_reduction::{add, combine, total};

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
    pub(crate) fn walk(&self, kernel: &mut Kernel<'_>) -> String {
        let turn = kernel.counted("0", &self.count.to_string());
        let number = kernel.int(format!("{} + {turn} * {}", self.from, self.step));
        if let Some(end) = self.end {
            kernel.when(&format!("{number} < {end}"));
        }
        number
    }

    /// Starts the loop over the elements, and returns the coordinates along the reduced axes of a nest.
    pub(crate) fn walk_row(&self, kernel: &mut Kernel<'_>, nest: &Nest) -> Vec<String> {
        let number = self.walk(kernel);
        let number = kernel.define(Value::new(format!("bits_of_int({number})"), Repr::U32)).text;
        coordinates(kernel, &number, nest.inner_dims())
    }
}

/// Prints the totals of an invocation's elements of a row, for the reductions of a stage.
pub(crate) fn fold(
    kernel: &mut Kernel<'_>,
    known: &AnalyzedNest<'_>,
    stage: &Range<usize>,
    (outer, reduced): (&[String], &[Value]),
    span: &Span,
) -> Result<Vec<Value>, String> {
    let totals: Vec<Value> = stage.clone().map(|k| total(kernel, known, k)).collect();
    let depth = kernel.depth();
    let inner = span.walk_row(kernel, known.nest);
    let at = outer.iter().cloned().chain(inner).collect();
    let point = Point { at, reduced: reduced.to_vec(), ..Point::default() };
    add(kernel, known, stage, &totals, &point)?;
    kernel.close_to(depth);
    Ok(totals)
}

/// Returns the operations of the reductions of a stage.
pub(crate) fn operations(nest: &Nest, stage: &Range<usize>) -> Vec<ReduceOp> {
    nest.reductions[stage.clone()].iter().map(|reduction| reduction.op).collect()
}

/// Shared arrays of a group, reused by successive stages.
#[derive(Debug, Default)]
pub(crate) struct Arrays {
    made: Vec<Value>,
}

/// Invocations with parts of one row: `count` invocations (a power of two) at a distance of `stride`. `number` is the
/// index of an invocation among them.
pub(crate) struct Slices<'s> {
    pub(crate) number: &'s str,
    pub(crate) count: usize,
    pub(crate) stride: usize,
}

impl Arrays {
    /// Returns an array for each value. Values do not share arrays.
    fn of(&mut self, kernel: &mut Kernel<'_>, values: &[Value]) -> Vec<Value> {
        let mut used = Vec::new();
        for value in values {
            let free = |k: &usize| self.made[*k].repr == value.repr && !used.contains(k);
            let at = (0..self.made.len()).find(free).unwrap_or_else(|| {
                let name = kernel.shared(value.repr, GROUP as usize);
                self.made.push(Value::new(name, value.repr));
                self.made.len() - 1
            });
            used.push(at);
        }
        used.into_iter().map(|k| self.made[k].clone()).collect()
    }

    /// Combines the values of the invocations of a row in a binary tree with a fixed order. All invocations receive the
    /// result.
    pub(crate) fn combined(
        &mut self,
        kernel: &mut Kernel<'_>,
        operations: &[ReduceOp],
        values: &[Value],
        slices: &Slices<'_>,
    ) -> Vec<Value> {
        if !self.made.is_empty() {
            kernel.barrier();
        }
        let arrays = self.of(kernel, values);
        for (array, value) in arrays.iter().zip(values) {
            kernel.line(&format!("{}[lane] = {};", array.text, value.text));
        }
        kernel.barrier();
        let mut half = slices.count / 2;
        while half > 0 {
            let depth = kernel.depth();
            kernel.when(&format!("{} < {half}", slices.number));
            for (array, &op) in arrays.iter().zip(operations) {
                let element = |at: String| Value::new(format!("{}[{at}]", array.text), array.repr);
                let (own, other) =
                    (element("lane".into()), element(format!("lane + {}", half * slices.stride)));
                let both = combine(kernel, op, &own, &other);
                kernel.assign(&own, &both);
            }
            kernel.close_to(depth);
            kernel.barrier();
            half /= 2;
        }
        let first = kernel.int(format!("lane - {} * {}", slices.number, slices.stride));
        let result = |array: &Value| Value::new(format!("{}[{first}]", array.text), array.repr);
        arrays.iter().map(result).map(|value| kernel.define(value)).collect()
    }
}
