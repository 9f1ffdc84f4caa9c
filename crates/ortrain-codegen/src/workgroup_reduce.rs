//! Reductions that invocations of a group share.

use std::ops::Range;

use ortrain_expr::ReduceOp;
use ortrain_program::Nest;

use crate::dialect::{GROUP, Repr};
use crate::expr::{AnalyzedNest, Point};
use crate::kernel::{Kernel, Value};
use crate::thread_index::coordinates;
use crate::thread_reduction::{add, combine, total};

/// Elements of a row that an invocation goes through.
pub(crate) struct Span {
    /// The number of the first one.
    pub(crate) from: String,
    /// From one to the next.
    pub(crate) step: usize,
    /// Their number.
    pub(crate) count: usize,
    /// The number of elements of the row, where some of the span may lie behind them.
    pub(crate) end: Option<usize>,
}

impl Span {
    /// Starts the loop over the elements; the number of one.
    pub(crate) fn walk(&self, kernel: &mut Kernel<'_>) -> String {
        let turn = kernel.counted("0", &self.count.to_string());
        let number = kernel.int(format!("{} + {turn} * {}", self.from, self.step));
        if let Some(end) = self.end {
            kernel.when(&format!("{number} < {end}"));
        }
        number
    }

    /// The same for the positions along the reduced axes of a nest.
    pub(crate) fn walk_row(&self, kernel: &mut Kernel<'_>, nest: &Nest) -> Vec<String> {
        let number = self.walk(kernel);
        let number = kernel.define(Value::new(format!("bits_of_int({number})"), Repr::U32)).text;
        coordinates(kernel, &number, nest.inner_dims())
    }
}

/// The totals of the elements that an invocation has of a row, for the reductions of a stage.
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

/// The operations of the reductions of a stage.
pub(crate) fn operations(nest: &Nest, stage: &Range<usize>) -> Vec<ReduceOp> {
    nest.reductions[stage.clone()].iter().map(|reduction| reduction.op).collect()
}

/// Arrays that a group shares, for one stage after the other.
#[derive(Debug, Default)]
pub(crate) struct Arrays {
    made: Vec<Value>,
}

/// The invocations that have parts of one row: those whose numbers differ by multiples of `stride`, of which there are
/// `count`, a power of two. `number` is that of an invocation among them.
pub(crate) struct Slices<'s> {
    pub(crate) number: &'s str,
    pub(crate) count: usize,
    pub(crate) stride: usize,
}

impl Arrays {
    /// An array for each value, none for two.
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

    /// Combines what invocations have of a row: pairs, then pairs of pairs, always the same ones. All of them get the result.
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
