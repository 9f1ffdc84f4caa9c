//! Split reductions, for adjacent rows and for long rows. Groups write partial results to scratch memory, and later
//! launches combine them.

use std::ops::Range;

use ortrain_expr::{Inst, Reg, Scalar};
use ortrain_program::Operand;

use crate::context::Context;
use crate::expr::{AnalyzedNest, Point};
use crate::kernel::Kernel;
use crate::launch::Launch;
use crate::reduction_strategy::ReductionStrategy;
use crate::repr::{Repr, Value};
use crate::thread_index::{define_coordinates, store};
use crate::thread_reduction::{combine, define_total, split_stores, stages, total_repr};
use crate::workgroup_reduce::{RowLanes, Span, StageArrays, fold_span, stage_operations};

/// Returns the launches of a split nest.
///
/// # Errors
/// When results and loads share bytes in a way that separate launches do not support, or when sums have two words.
pub(crate) fn launches(
    cx: &Context<'_>,
    known: &AnalyzedNest<'_>,
    strategy: ReductionStrategy,
) -> Result<Vec<Launch>, String> {
    let nest = known.nest;
    let rows: usize = nest.outer_dims().iter().product();
    let (once_per_row, each) = split_stores(nest);
    let stages = stages(nest);
    let max_stages = stages.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
    if (0..nest.reductions.len()).any(|k| total_repr(known, k).bytes() > 4) {
        return Err("its sums need more than 32 bits".into());
    }
    let parts = if strategy.count > 1 { max_stages * strategy.count } else { 0 };
    cx.reserve((nest.reductions.len() + parts) * rows);
    let printer = Printer {
        cx,
        known,
        reduction_strategy: strategy,
        rows,
        row_stores: once_per_row,
        point_stores: each,
    };
    let orders = printer.store_order()?;
    let mut launches = Vec::new();
    for stage in &stages {
        launches.push(printer.parts_launch(stage)?);
        if strategy.count > 1 {
            launches.push(printer.combine_launch(stage)?);
        }
    }
    for is_once in orders {
        launches.push(printer.store_launch(is_once)?);
    }
    Ok(launches)
}

struct Printer<'p> {
    cx: &'p Context<'p>,
    known: &'p AnalyzedNest<'p>,
    reduction_strategy: ReductionStrategy,
    rows: usize,
    /// Stores per row.
    row_stores: Vec<usize>,
    /// Stores per point.
    point_stores: Vec<usize>,
}

/// Row of an invocation.
struct GroupRow {
    /// Index of the row; past the end, the index of the last row.
    row: String,
    /// Condition for an existing row.
    exists: Option<String>,
    outer: Vec<String>,
    /// Index of the invocation among the invocations of the row.
    slice: String,
}

impl Printer<'_> {
    /// Returns the launches for stores after the reductions, in order: true for stores per row.
    ///
    /// If there are both kinds, the first launch must not overwrite operands of the second. If all stores are per row,
    /// the last reduction launch executes them.
    fn store_order(&self) -> Result<Vec<bool>, String> {
        let nest = self.known.nest;
        let are_disjoint = |stores: &[usize]| {
            let is_disjoint =
                |k: &usize, from: &Operand| !self.cx.may_share_bytes(nest.stores[*k].buffer, from.buffer);
            stores.iter().all(|k| nest.load_operands().all(|from| is_disjoint(k, from)))
        };
        match (self.row_stores.is_empty(), self.point_stores.is_empty()) {
            (_, true) => Ok(Vec::new()),
            (true, false) => Ok(vec![false]),
            _ if are_disjoint(&self.row_stores) => Ok(vec![true, false]),
            _ if are_disjoint(&self.point_stores) => Ok(vec![false, true]),
            _ => Err("its results overlap the rows that it reads".into()),
        }
    }

    fn tiles(&self) -> usize {
        self.rows.div_ceil(self.reduction_strategy.width)
    }

    /// Defines the row of an invocation in a tile of rows.
    fn define_row(&self, kernel: &mut Kernel<'_>, tile: &str) -> GroupRow {
        let ReductionStrategy { width, .. } = self.reduction_strategy;
        let index = kernel.int(format!("{tile} * {width} + lane % {width}"));
        let exists = (!self.rows.is_multiple_of(width)).then(|| format!("{index} < {}", self.rows));
        let row = match &exists {
            Some(exists) => {
                let last = kernel.select(exists, &index, &(self.rows - 1).to_string());
                kernel.int(last)
            }
            None => index,
        };
        let bits = kernel.define(Value::new(format!("bits_of_int({row})"), Repr::U32)).text;
        let outer = define_coordinates(kernel, &bits, self.known.nest.outer_dims());
        let slice = kernel.int(format!("lane / {width}"));
        GroupRow { row, exists, outer, slice }
    }

    fn slices<'s>(&self, row: &'s GroupRow) -> RowLanes<'s> {
        RowLanes {
            index: &row.slice,
            count: self.reduction_strategy.slices(),
            stride: self.reduction_strategy.width,
        }
    }

    /// Returns the scratch offset of the result of a reduction.
    fn result_offset(&self, k: usize, row: &str) -> String {
        format!("{} + {row}", k * self.rows)
    }

    /// Returns the scratch offset of a part of a reduction, the `k`-th one of its stage.
    fn part_offset(&self, k: usize, part: &str, row: &str) -> String {
        let start = self.known.nest.reductions.len() * self.rows;
        format!("{start} + ({} + {part}) * {} + {row}", k * self.reduction_strategy.count, self.rows)
    }

    /// Loads the results of reductions before a stage that `roots` need.
    fn load_reduced(&self, kernel: &mut Kernel<'_>, before: usize, roots: &[Reg], row: &str) -> Vec<Value> {
        let expr = &self.known.nest.expr;
        let needed = expr.dependencies_of(roots);
        let is_read = |k: usize| {
            let mut insts = expr.insts().iter().zip(&needed);
            insts.any(|((inst, _), needed)| *needed && *inst == Inst::Reduced(k as u8))
        };
        (0..before)
            .map(|k| {
                let repr = total_repr(self.known, k);
                if !is_read(k) {
                    return kernel.constant(Scalar::I32(0), Repr::I32);
                }
                let value = kernel.scratch(&self.result_offset(k, row), repr);
                kernel.define(value)
            })
            .collect()
    }

    /// Returns the launch that reduces parts of rows.
    fn parts_launch(&self, stage: &Range<usize>) -> Result<Launch, String> {
        let (nest, ReductionStrategy { count, elements, .. }) = (self.known.nest, self.reduction_strategy);
        let size: usize = nest.inner_dims().iter().product();
        let mut kernel = self.cx.group_kernel();
        let group = define_coordinates(&mut kernel, "group", &[count, self.tiles()]);
        let row = self.define_row(&mut kernel, &group[1]);
        let roots: Vec<Reg> = stage.clone().map(|k| nest.reductions[k].value).collect();
        let reduced = self.load_reduced(&mut kernel, stage.start, &roots, &row.row);
        let from = kernel.int(format!("{} * {elements} + {}", group[0], row.slice));
        let slices = self.reduction_strategy.slices();
        let end = (count * elements != size).then_some(size);
        let span = Span { from, step: slices, count: elements / slices, end };
        let totals = fold_span(&mut kernel, self.known, stage, (&row.outer, &reduced), &span)?;
        let operations = stage_operations(nest, stage);
        let values =
            StageArrays::default().combine_lanes(&mut kernel, &operations, &totals, &self.slices(&row));
        if count == 1 {
            self.write_results(&mut kernel, stage, &row, values)?;
        } else {
            kernel.begin_if(&self.first_condition(&row));
            for (k, value) in values.iter().enumerate() {
                kernel.set_scratch(&self.part_offset(k, &group[0], &row.row), value);
            }
        }
        self.cx.finish_groups(kernel, (count * self.tiles()) as u64)
    }

    /// Returns the launch that combines parts.
    fn combine_launch(&self, stage: &Range<usize>) -> Result<Launch, String> {
        let (nest, ReductionStrategy { count, .. }) = (self.known.nest, self.reduction_strategy);
        let mut kernel = self.cx.group_kernel();
        let group = define_coordinates(&mut kernel, "group", &[self.tiles()]);
        let row = self.define_row(&mut kernel, &group[0]);
        let slices = self.reduction_strategy.slices();
        let end = (!count.is_multiple_of(slices)).then_some(count);
        let span = Span { from: row.slice.clone(), step: slices, count: count.div_ceil(slices), end };
        let totals: Vec<Value> = stage.clone().map(|k| define_total(&mut kernel, self.known, k)).collect();
        let operations = stage_operations(nest, stage);
        let depth = kernel.depth();
        let part = span.begin_loop(&mut kernel);
        for (k, (value, &op)) in totals.iter().zip(&operations).enumerate() {
            let other = kernel.scratch(&self.part_offset(k, &part, &row.row), value.repr);
            let both = combine(&kernel, op, value, &other);
            kernel.assign(value, &both);
        }
        kernel.close_to(depth);
        let values =
            StageArrays::default().combine_lanes(&mut kernel, &operations, &totals, &self.slices(&row));
        self.write_results(&mut kernel, stage, &row, values)?;
        self.cx.finish_groups(kernel, self.tiles() as u64)
    }

    /// Returns the condition that is true for one invocation of each row.
    fn first_condition(&self, row: &GroupRow) -> String {
        let conditions = [Some(format!("{} == 0", row.slice)), row.exists.clone()];
        conditions.into_iter().flatten().collect::<Vec<_>>().join(" && ")
    }

    /// Writes the results of a stage to scratch memory, or stores the results of rows if nothing follows.
    fn write_results(
        &self,
        kernel: &mut Kernel<'_>,
        stage: &Range<usize>,
        row: &GroupRow,
        values: Vec<Value>,
    ) -> Result<(), String> {
        let nest = self.known.nest;
        if !self.point_stores.is_empty() || stage.end < nest.reductions.len() {
            kernel.begin_if(&self.first_condition(row));
            for (k, value) in stage.clone().zip(&values) {
                kernel.set_scratch(&self.result_offset(k, &row.row), value);
            }
            return Ok(());
        }
        // A store may overwrite a row that other invocations have read.
        kernel.binding_barrier();
        kernel.begin_if_live(Some(self.first_condition(row)));
        let roots: Vec<Reg> = self.row_stores.iter().map(|&k| nest.expr.outputs()[k]).collect();
        let mut reduced = self.load_reduced(kernel, stage.start, &roots, &row.row);
        reduced.extend(values);
        let first = std::iter::repeat_n(String::from("0"), nest.inner);
        let at = row.outer.iter().cloned().chain(first).collect();
        store(kernel, self.known, &Point { at, reduced, ..Point::default() }, &self.row_stores)
    }

    /// Returns the launch that stores results per row, or per point.
    fn store_launch(&self, is_once: bool) -> Result<Launch, String> {
        let nest = self.known.nest;
        let mut kernel = self.cx.kernel();
        let size: usize = nest.inner_dims().iter().product();
        let (stores, points) =
            if is_once { (&self.row_stores, self.rows) } else { (&self.point_stores, self.rows * size) };
        let (at, row) = match is_once {
            true => {
                let outer = define_coordinates(&mut kernel, "id", nest.outer_dims());
                let first = std::iter::repeat_n(String::from("0"), nest.inner);
                (outer.into_iter().chain(first).collect(), kernel.int("int_of(id)".into()))
            }
            false => {
                let at = define_coordinates(&mut kernel, "id", &nest.dims);
                (at, kernel.int(format!("int_of(id / {size}u)")))
            }
        };
        let roots: Vec<Reg> = stores.iter().map(|&k| nest.expr.outputs()[k]).collect();
        let reduced = self.load_reduced(&mut kernel, nest.reductions.len(), &roots, &row);
        store(&mut kernel, self.known, &Point { at, reduced, ..Point::default() }, stores)?;
        self.cx.finish(kernel, points as u64)
    }
}
