//! Reductions along rows: some invocations of a group for each row.

use crate::dialect::{GROUP, Repr};
use crate::expr::{Known, Point};
use crate::fold::{Arrays, Slices, Span, fold, operations};
use crate::kernel::{Kernel, Value};
use crate::launch::Launch;
use crate::lower::Context;
use crate::points::{coordinates, put, results, store};
use crate::reduce::{stages, stores};

const LANES: usize = GROUP as usize;

/// Invocations for a row of so many elements: at most four elements each, if there are enough invocations.
pub(crate) fn width_of(size: usize) -> usize {
    size.div_ceil(4).next_power_of_two().clamp(32, LANES)
}

/// The launch of a nest by rows.
pub(crate) fn launch(cx: &Context<'_>, known: &Known<'_>) -> Result<Launch, String> {
    let nest = known.nest;
    let rows: usize = nest.outer_dims().iter().product();
    let size: usize = nest.inner_dims().iter().product();
    let width = width_of(size);
    let each = LANES / width;
    let mut kernel = cx.group_kernel();
    let number = kernel.int(format!("int_of(group) * {each} + lane / {width}"));
    let exists = (!rows.is_multiple_of(each)).then(|| format!("{number} < {rows}"));
    // Behind the last row the last one is computed again, and not stored.
    let row = match &exists {
        Some(exists) => kernel.select(exists, &number, &(rows - 1).to_string()),
        None => number,
    };
    let row = kernel.define(Value::new(format!("bits_of_int({row})"), Repr::U32));
    let outer = coordinates(&mut kernel, &row.text, nest.outer_dims());
    let slot = kernel.int(format!("lane % {width}"));
    let end = (!size.is_multiple_of(width)).then_some(size);
    let span = Span { from: slot.clone(), step: width, count: size.div_ceil(width), end };
    let slices = Slices { number: &slot, count: width, stride: 1 };
    let (mut reduced, mut arrays) = (Vec::new(), Arrays::default());
    for stage in stages(nest) {
        let totals = fold(&mut kernel, known, &stage, (&outer, &reduced), &span)?;
        reduced.extend(arrays.combined(&mut kernel, &operations(nest, &stage), &totals, &slices));
    }
    let first = vec![String::from("0i"); nest.inner];
    let at = |inner: Vec<String>| outer.iter().cloned().chain(inner).collect();
    let point = Point { at: at(first), reduced, ..Point::default() };
    finish(&mut kernel, known, &point, (&span, exists, &slot))?;
    cx.finish_groups(kernel, rows.div_ceil(each) as u64)
}

/// Stores the results of a row. What is stored once may lie where the row is read: it is stored last.
fn finish(
    kernel: &mut Kernel<'_>,
    known: &Known<'_>,
    first: &Point,
    (span, exists, slot): (&Span, Option<String>, &str),
) -> Result<(), String> {
    let nest = known.nest;
    let (once, each) = stores(nest);
    let values = results(kernel, known, first, &once)?;
    let depth = kernel.depth();
    if !each.is_empty() {
        kernel.when_live(exists.clone());
        let inner = span.walk_row(kernel, nest);
        let at = first.at[..nest.outer_dims().len()].iter().cloned().chain(inner).collect();
        store(kernel, known, &Point { at, ..first.clone() }, &each)?;
        kernel.close_to(depth);
    }
    if !once.is_empty() {
        kernel.binding_barrier();
        let is_first = [Some(format!("{slot} == 0i")), exists];
        kernel.when_live(Some(is_first.into_iter().flatten().collect::<Vec<_>>().join(" && ")));
        put(kernel, known, first, &once, &values);
        kernel.close_to(depth);
    }
    Ok(())
}
