//! Points of spaces: the point of an invocation, and the stores at a point.

use std::sync::Arc;

use ortrain_expr::{Reg, Segments};
use ortrain_program::Nest;

use crate::expr::{AnalyzedNest, Point, position};
use crate::kernel::Kernel;
use crate::repr::{Repr, Value};

/// Defines the coordinates of the point with a row-major index.
pub(crate) fn define_coordinates(kernel: &mut Kernel<'_>, index: &str, dims: &[usize]) -> Vec<String> {
    let mut rest = index.to_owned();
    let mut at = vec![String::from("0"); dims.len()];
    let lead = dims.iter().position(|&dim| dim > 1).unwrap_or(0);
    for (axis, &dim) in dims.iter().enumerate().rev() {
        if dim <= 1 {
            continue;
        }
        let (coordinate, above) = match axis == lead {
            true => (rest.clone(), String::new()),
            false => (format!("{rest} % {dim}u"), format!("{rest} / {dim}u")),
        };
        at[axis] = kernel.define(Value::new(format!("int_of({coordinate})"), Repr::I32)).text;
        if axis != lead {
            rest = kernel.define(Value::new(above, Repr::U32)).text;
        }
    }
    at
}

/// Returns the table of segments: the number of points before each segment, then the start of each, then the end of
/// each.
pub(crate) fn segment_table(segments: &Segments) -> Arc<[u32]> {
    let before = segments.iter().scan(0usize, |points, range| {
        let before = *points;
        *points += range.len();
        Some(before)
    });
    let starts = segments.iter().map(|range| range.start);
    let ends = segments.iter().map(|range| range.end);
    before.chain(starts).chain(ends).map(|word| word as u32).collect()
}

/// Defines the existing point with an index.
pub(crate) fn define_point(kernel: &mut Kernel<'_>, nest: &Nest, index: &str) -> Vec<String> {
    let Some(segments) = &nest.segments else { return define_coordinates(kernel, index, &nest.dims) };
    let (table, count) = (segment_table(segments), segments.len());
    // Binary search for the last segment that starts at or before the index.
    let low = kernel.variable(&Value::new("0", Repr::I32));
    let high = kernel.variable(&Value::new(count.to_string(), Repr::I32));
    let depth = kernel.depth();
    kernel.begin_loop("0", &usize::BITS.saturating_sub(count.leading_zeros()).to_string());
    let middle = kernel.define(Value::new(format!("({} + {}) / 2", low.text, high.text), Repr::I32));
    let before = kernel.table(&table, &middle.text);
    let is_earlier_segment =
        kernel.define(Value::new(format!("{} <= int_of({index})", before.text), Repr::Bool)).text;
    let (new_low, new_high) = (
        kernel.select(&is_earlier_segment, &middle.text, &low.text),
        kernel.select(&is_earlier_segment, &high.text, &middle.text),
    );
    kernel.assign(&low, &Value::new(new_low, Repr::I32));
    kernel.assign(&high, &Value::new(new_high, Repr::I32));
    kernel.close_to(depth);
    let before = kernel.table(&table, &low.text).text;
    let start = kernel.table(&table, &format!("{count} + {}", low.text)).text;
    let at = kernel.define(Value::new(format!("{start} + (int_of({index}) - {before})"), Repr::I32));
    vec![low.text, at.text]
}

/// Computes some results at a point and stores them.
pub(crate) fn store(
    kernel: &mut Kernel<'_>,
    known: &AnalyzedNest<'_>,
    point: &Point,
    stores: &[usize],
) -> Result<(), String> {
    let values = print_results(kernel, known, point, stores)?;
    store_values(kernel, known, point, stores, &values);
    Ok(())
}

pub(crate) fn print_results(
    kernel: &mut Kernel<'_>,
    known: &AnalyzedNest<'_>,
    point: &Point,
    stores: &[usize],
) -> Result<Vec<Value>, String> {
    let roots: Vec<Reg> = stores.iter().map(|&k| known.nest.expr.outputs()[k]).collect();
    known.print(kernel, point, &roots)
}

pub(crate) fn store_values(
    kernel: &mut Kernel<'_>,
    known: &AnalyzedNest<'_>,
    point: &Point,
    stores: &[usize],
    values: &[Value],
) {
    for (&k, value) in stores.iter().zip(values) {
        let to = &known.nest.stores[k];
        kernel.store(to.buffer, &position(to, &point.at), value);
    }
}
