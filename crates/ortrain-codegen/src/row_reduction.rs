//! Reductions along rows: several invocations of a group per row.

use crate::context::Context;
use crate::dialect::GROUP_SIZE;
use crate::expr::{AnalyzedNest, Point};
use crate::kernel::Kernel;
use crate::launch::Launch;
use crate::repr::{Repr, Value};
use crate::thread_index::{define_coordinates, print_results, store, store_values};
use crate::thread_reduction::{split_stores, stages};
use crate::workgroup_reduce::{RowLanes, Span, StageArrays, fold_span, stage_operations};

const LANES: usize = GROUP_SIZE as usize;

/// Returns the number of invocations per row of `size` elements: at most four elements each, up to a whole group.
fn lanes_per_row(size: usize) -> usize {
    size.div_ceil(4).next_power_of_two().clamp(32, LANES)
}

/// Row of a space that several invocations of a group traverse together.
pub(crate) struct Row {
    /// Index along the outer axes.
    pub(crate) at: Vec<String>,
    /// Condition for an existing row. Past the end, the last row is computed again but not stored.
    exists: Option<String>,
    /// Index of the invocation among the invocations of the row.
    slot: String,
    /// Elements of the invocation.
    pub(crate) span: Span,
    /// Number of groups for all rows.
    pub(crate) groups: u64,
}

impl Row {
    /// Defines the row of an invocation, for rows of `size` elements in the space `outer`.
    pub(crate) fn define(kernel: &mut Kernel<'_>, outer: &[usize], size: usize) -> Row {
        let (rows, width) = (outer.iter().product::<usize>(), lanes_per_row(size));
        let each = LANES / width;
        let index = kernel.int(format!("int_of(group) * {each} + lane / {width}"));
        let exists = (!rows.is_multiple_of(each)).then(|| format!("{index} < {rows}"));
        let row = match &exists {
            Some(exists) => kernel.select(exists, &index, &(rows - 1).to_string()),
            None => index,
        };
        let row = kernel.define(Value::new(format!("bits_of_int({row})"), Repr::U32));
        let at = define_coordinates(kernel, &row.text, outer);
        let slot = kernel.int(format!("lane % {width}"));
        let end = (!size.is_multiple_of(width)).then_some(size);
        let span = Span { from: slot.clone(), step: width, count: size.div_ceil(width), end };
        Row { at, exists, slot, span, groups: rows.div_ceil(each) as u64 }
    }

    /// Returns the invocations of the row.
    pub(crate) fn slices(&self) -> RowLanes<'_> {
        RowLanes { index: &self.slot, count: self.span.step, stride: 1 }
    }

    /// Starts a block for the first invocation of an existing row.
    pub(crate) fn when_first(&self, kernel: &mut Kernel<'_>) {
        let is_first = [Some(format!("{} == 0", self.slot)), self.exists.clone()];
        kernel.begin_if_live(Some(is_first.into_iter().flatten().collect::<Vec<_>>().join(" && ")));
    }
}

/// Returns the launch of a nest with reductions along rows.
pub(crate) fn launch(cx: &Context<'_>, known: &AnalyzedNest<'_>) -> Result<Launch, String> {
    let nest = known.nest;
    let mut kernel = cx.group_kernel();
    let row = Row::define(&mut kernel, nest.outer_dims(), nest.inner_dims().iter().product());
    let (mut reduced, mut arrays) = (Vec::new(), StageArrays::default());
    for stage in stages(nest) {
        let totals = fold_span(&mut kernel, known, &stage, (&row.at, &reduced), &row.span)?;
        reduced.extend(arrays.combine_lanes(
            &mut kernel,
            &stage_operations(nest, &stage),
            &totals,
            &row.slices(),
        ));
    }
    let first = vec![String::from("0"); nest.inner];
    let at = row.at.iter().cloned().chain(first).collect();
    let point = Point { at, reduced, ..Point::default() };
    finish(&mut kernel, known, &point, &row)?;
    cx.finish_groups(kernel, row.groups)
}

/// Stores the results of a row. Results per row may overwrite the bytes of the row: they are stored last.
fn finish(kernel: &mut Kernel<'_>, known: &AnalyzedNest<'_>, first: &Point, row: &Row) -> Result<(), String> {
    let nest = known.nest;
    let (row_stores, each) = split_stores(nest);
    let values = print_results(kernel, known, first, &row_stores)?;
    let depth = kernel.depth();
    if !each.is_empty() {
        kernel.begin_if_live(row.exists.clone());
        let inner = row.span.begin_row_loop(kernel, nest);
        let at = row.at.iter().cloned().chain(inner).collect();
        store(kernel, known, &Point { at, ..first.clone() }, &each)?;
        kernel.close_to(depth);
    }
    if !row_stores.is_empty() {
        kernel.binding_barrier();
        row.when_first(kernel);
        store_values(kernel, known, first, &row_stores, &values);
        kernel.close_to(depth);
    }
    Ok(())
}
