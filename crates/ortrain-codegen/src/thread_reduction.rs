//! Reductions of rows with one invocation per row.

use std::ops::Range;

use ortrain_expr::{BinaryOp, Inst, ReduceOp, Reg};
use ortrain_program::Nest;

use crate::expr::{AnalyzedNest, Point, double_binary, float_binary, integer_binary};
use crate::kernel::Kernel;
use crate::repr::{Repr, Value, repr_of, type_of};
use crate::thread_index::{define_coordinates, print_results, segment_table, store, store_values};

/// Starts the loops over the reduced axes of a row, and returns the coordinates along them.
pub(crate) fn begin_inner_loops(kernel: &mut Kernel<'_>, nest: &Nest, row: &Row) -> Vec<String> {
    match row {
        Row::Full => nest.inner_dims().iter().map(|dim| kernel.begin_loop("0", &dim.to_string())).collect(),
        Row::Segment(start, end) => vec![kernel.begin_loop(start, end)],
    }
}

/// Reduced part of a space at an outer point.
pub(crate) enum Row {
    Full,
    Segment(String, String),
}

/// Row with finished reductions: outer coordinates, extent, and results.
pub(crate) struct ReducedRow {
    pub(crate) outer: Vec<String>,
    pub(crate) row: Row,
    pub(crate) results: Vec<Value>,
}

/// Prints the reductions of the row at an outer point.
pub(crate) fn print_reductions(
    kernel: &mut Kernel<'_>,
    known: &AnalyzedNest<'_>,
    outer: Vec<String>,
) -> Result<ReducedRow, String> {
    let nest = known.nest;
    let row = match &nest.segments {
        None => Row::Full,
        Some(segments) => {
            let (table, count) = (segment_table(segments), segments.len());
            let scratch_word = |kernel: &mut Kernel<'_>, skip: usize| {
                let value = kernel.table(&table, &format!("{} + {}", skip * count, outer[0]));
                kernel.define(value).text
            };
            Row::Segment(scratch_word(kernel, 1), scratch_word(kernel, 2))
        }
    };
    let mut point = Point::default();
    for stage in stages(nest) {
        let totals: Vec<Value> = stage.clone().map(|k| define_total(kernel, known, k)).collect();
        let depth = kernel.depth();
        let inner = begin_inner_loops(kernel, nest, &row);
        point.at = outer.iter().cloned().chain(inner).collect();
        add_point(kernel, known, &stage, &totals, &point)?;
        kernel.close_to(depth);
        point.reduced.extend(totals);
    }
    Ok(ReducedRow { outer, row, results: point.reduced })
}

/// Adds the values at a point to the totals of the reductions of a stage.
pub(crate) fn add_point(
    kernel: &mut Kernel<'_>,
    known: &AnalyzedNest<'_>,
    stage: &Range<usize>,
    totals: &[Value],
    point: &Point,
) -> Result<(), String> {
    let reductions = &known.nest.reductions[stage.clone()];
    let roots: Vec<Reg> = reductions.iter().map(|reduction| reduction.value).collect();
    let values = known.print(kernel, point, &roots)?;
    for ((reduction, total), value) in reductions.iter().zip(totals).zip(values) {
        let combined = combine(kernel, reduction.op, total, &value);
        kernel.assign(total, &combined);
    }
    Ok(())
}

/// Returns the stores per row and the stores per point.
pub(crate) fn split_stores(nest: &Nest) -> (Vec<usize>, Vec<usize>) {
    let outer_rank = nest.dims.len() - nest.inner;
    let is_once = |k: &usize| nest.stores[*k].access.strides[outer_rank..].iter().all(|&stride| stride == 0);
    (0..nest.stores.len()).partition(is_once)
}

pub(crate) fn reduce(kernel: &mut Kernel<'_>, known: &AnalyzedNest<'_>) -> Result<(), String> {
    let nest = known.nest;
    let outer = define_coordinates(kernel, "id", nest.outer_dims());
    let ReducedRow { outer, row, results: reduced } = print_reductions(kernel, known, outer)?;
    let (row_stores, each) = split_stores(nest);
    // A store per row may overwrite the bytes of the row: it comes last.
    let first = match &row {
        Row::Full => vec![String::from("0"); nest.inner],
        Row::Segment(start, _) => vec![start.clone()],
    };
    let at = |inner: Vec<String>| outer.iter().cloned().chain(inner).collect();
    let at_first = Point { at: at(first), reduced, ..Point::default() };
    let values = print_results(kernel, known, &at_first, &row_stores)?;
    if !each.is_empty() {
        let depth = kernel.depth();
        let inner = begin_inner_loops(kernel, nest, &row);
        store(kernel, known, &Point { at: at(inner), ..at_first.clone() }, &each)?;
        kernel.close_to(depth);
    }
    store_values(kernel, known, &at_first, &row_stores, &values);
    Ok(())
}

/// Returns stages of reductions: the reductions of a stage are independent and share a pass over a row.
pub(crate) fn stages(nest: &Nest) -> Vec<Range<usize>> {
    let mut stages: Vec<Range<usize>> = Vec::new();
    for (k, reduction) in nest.reductions.iter().enumerate() {
        let needed = nest.expr.dependencies_of(&[reduction.value]);
        let insts = nest.expr.insts().iter().zip(needed).filter(|(_, needed)| *needed);
        let last = insts.filter_map(|((inst, _), _)| match inst {
            Inst::Reduced(j) => Some(usize::from(*j)),
            _ => None,
        });
        let last = last.max();
        match stages.last_mut() {
            Some(stage) if last.is_none_or(|last| last < stage.start) => stage.end = k + 1,
            _ => stages.push(k..k + 1),
        }
    }
    stages
}

/// Returns the printed type of the total of a reduction.
pub(crate) fn total_repr(known: &AnalyzedNest<'_>, k: usize) -> Repr {
    let nest = known.nest;
    let ty = nest.expr.ty(nest.reductions[k].value);
    let read = nest.expr.insts().iter().position(|(inst, _)| *inst == Inst::Reduced(k as u8));
    match read {
        // The type of the register that reads the sum bounds its range.
        Some(reg) if nest.expr.ty(Reg(reg as u16)) == ty => known.repr(Reg(reg as u16)),
        _ => repr_of(ty),
    }
}

/// Defines the total of a reduction, with the neutral element as initial value.
pub(crate) fn define_total(kernel: &mut Kernel<'_>, known: &AnalyzedNest<'_>, k: usize) -> Value {
    let reduction = &known.nest.reductions[k];
    let repr = total_repr(known, k);
    let neutral = reduction.op.neutral(known.nest.expr.ty(reduction.value));
    let neutral = kernel.constant(neutral.convert(type_of(repr)), repr);
    kernel.variable(&neutral)
}

pub(crate) fn combine(kernel: &Kernel<'_>, op: ReduceOp, total: &Value, value: &Value) -> Value {
    let op = match op {
        ReduceOp::Sum => BinaryOp::Add,
        ReduceOp::Prod => BinaryOp::Mul,
        ReduceOp::Max => BinaryOp::Max,
        ReduceOp::Min => BinaryOp::Min,
    };
    let value = kernel.as_repr(value, total.repr);
    match total.repr {
        Repr::F32 => float_binary(op, total, &value),
        Repr::F64 => double_binary(op, total, &value),
        repr => Value::new(integer_binary(kernel, op, repr, &total.text, &value.text), repr),
    }
}
