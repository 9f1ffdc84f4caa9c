//! Nests: one invocation per outer point.

use std::sync::Arc;

use ortrain_expr::{BinaryOp, CompareOp, Inst, ReduceOp, Reg, Scalar, Segments, Type};
use ortrain_program::{Load, Nest};

use crate::dialect::Repr;
use crate::expr::{
    Known, Point, compare, double_binary, float_binary, integer_binary, position, repr_of, type_of,
};
use crate::kernel::{Kernel, Value};
use crate::launch::Launch;
use crate::lower::Context;

/// Prints what the instruction makes for the nest at a point, before the nest finishes it.
pub(crate) type Accumulate<'f> = &'f dyn Fn(&mut Kernel<'_>, &[String]) -> Result<Vec<Value>, String>;

/// The launches of a nest, which finishes what `accumulate` makes.
pub(crate) fn launches(
    cx: &Context<'_>,
    nest: &Nest,
    accumulate: Accumulate<'_>,
) -> Result<Vec<Launch>, String> {
    let known = Known::new(nest)?;
    let mut launches = Vec::new();
    if nest.expr.can_fail() {
        for step in [Step::Find, Step::Tell] {
            let (kernel, points) = check(cx, &known, accumulate, step)?;
            launches.push(cx.finish(kernel, points)?);
        }
    }
    let outer: u64 = match &nest.segments {
        Some(segments) if nest.is_map() => segments.elements() as u64,
        _ => nest.outer_dims().iter().map(|&dim| dim as u64).product(),
    };
    let mut kernel = cx.kernel();
    if nest.is_map() {
        map(&mut kernel, &known, accumulate)?;
    } else {
        reduce(&mut kernel, &known)?;
    };
    launches.push(cx.finish(kernel, outer)?);
    Ok(launches)
}

/// The position along each axis of the point with a number, counted row-major.
pub(crate) fn coordinates(kernel: &mut Kernel<'_>, number: &str, dims: &[usize]) -> Vec<String> {
    let mut rest = number.to_owned();
    let mut at = vec![String::from("0i"); dims.len()];
    let lead = dims.iter().position(|&dim| dim > 1).unwrap_or(0);
    for (axis, &dim) in dims.iter().enumerate().rev() {
        if dim <= 1 {
            continue;
        }
        let (here, above) = match axis == lead {
            true => (rest.clone(), String::new()),
            false => (format!("{rest} % {dim}u"), format!("{rest} / {dim}u")),
        };
        at[axis] = kernel.define(Value::new(format!("int_of({here})"), Repr::I32)).text;
        if axis != lead {
            rest = kernel.define(Value::new(above, Repr::U32)).text;
        }
    }
    at
}

/// The table of segments: how many points come before each one, then where each starts, then where each ends.
fn table_of(segments: &Segments) -> Arc<[u32]> {
    let before = segments.iter().scan(0usize, |points, range| {
        let before = *points;
        *points += range.len();
        Some(before)
    });
    let starts = segments.iter().map(|range| range.start);
    let ends = segments.iter().map(|range| range.end);
    before.chain(starts).chain(ends).map(|word| word as u32).collect()
}

/// The point with a number, of those that exist.
fn point_of(kernel: &mut Kernel<'_>, nest: &Nest, number: &str) -> Vec<String> {
    let Some(segments) = &nest.segments else { return coordinates(kernel, number, &nest.dims) };
    let (table, count) = (table_of(segments), segments.len());
    // The last segment that starts at the number or before.
    let low = kernel.variable(&Value::new("0i", Repr::I32));
    let high = kernel.variable(&Value::new(format!("{count}i"), Repr::I32));
    let depth = kernel.depth();
    kernel.counted("0", &usize::BITS.saturating_sub(count.leading_zeros()).to_string());
    let middle = kernel.define(Value::new(format!("({} + {}) / 2", low.text, high.text), Repr::I32));
    let before = kernel.table(&table, &middle.text);
    let is_before =
        kernel.define(Value::new(format!("{} <= int_of({number})", before.text), Repr::Bool)).text;
    let (new_low, new_high) = (
        kernel.select(&is_before, &middle.text, &low.text),
        kernel.select(&is_before, &high.text, &middle.text),
    );
    kernel.assign(&low, &Value::new(new_low, Repr::I32));
    kernel.assign(&high, &Value::new(new_high, Repr::I32));
    kernel.close_to(depth);
    let before = kernel.table(&table, &low.text).text;
    let start = kernel.table(&table, &format!("{count} + {}", low.text)).text;
    let at = kernel.define(Value::new(format!("{start} + (int_of({number}) - {before})"), Repr::I32));
    vec![low.text, at.text]
}

fn map(kernel: &mut Kernel<'_>, known: &Known<'_>, accumulate: Accumulate<'_>) -> Result<(), String> {
    let at = point_of(kernel, known.nest, "id");
    let accumulators = accumulate(kernel, &at)?;
    let point = Point { at, accumulators, reduced: Vec::new() };
    store(kernel, known, &point, &(0..known.nest.stores.len()).collect::<Vec<_>>())
}

/// Computes some results at a point and stores them there.
fn store(kernel: &mut Kernel<'_>, known: &Known<'_>, point: &Point, stores: &[usize]) -> Result<(), String> {
    let values = results(kernel, known, point, stores)?;
    put(kernel, known, point, stores, &values)
}

fn results(
    kernel: &mut Kernel<'_>,
    known: &Known<'_>,
    point: &Point,
    stores: &[usize],
) -> Result<Vec<Value>, String> {
    let roots: Vec<Reg> = stores.iter().map(|&k| known.nest.expr.outputs()[k]).collect();
    known.print(kernel, point, &roots)
}

fn put(
    kernel: &mut Kernel<'_>,
    known: &Known<'_>,
    point: &Point,
    stores: &[usize],
    values: &[Value],
) -> Result<(), String> {
    stores.iter().zip(values).try_for_each(|(&k, value)| {
        let to = &known.nest.stores[k];
        kernel.store(to.buffer, &position(to, &point.at), value)
    })
}

/// Starts the loops over the reduced axes of a row; the positions along them.
fn inner_loops(kernel: &mut Kernel<'_>, nest: &Nest, row: &Row) -> Vec<String> {
    match row {
        Row::Whole => nest.inner_dims().iter().map(|dim| kernel.counted("0", &dim.to_string())).collect(),
        Row::Segment(start, end) => vec![kernel.counted(start, end)],
    }
}

/// The reduced part of a space at an outer point.
enum Row {
    Whole,
    Segment(String, String),
}

/// A row whose reductions are done: its place, its extent, and their results.
struct Reduced {
    outer: Vec<String>,
    row: Row,
    results: Vec<Value>,
}

/// Computes the reductions of the row at an outer point.
fn reductions(kernel: &mut Kernel<'_>, known: &Known<'_>, outer: Vec<String>) -> Result<Reduced, String> {
    let nest = known.nest;
    let row = match &nest.segments {
        None => Row::Whole,
        Some(segments) => {
            let (table, count) = (table_of(segments), segments.len());
            let word = |kernel: &mut Kernel<'_>, skip: usize| {
                let value = kernel.table(&table, &format!("{} + {}", skip * count, outer[0]));
                kernel.define(value).text
            };
            Row::Segment(word(kernel, 1), word(kernel, 2))
        }
    };
    let mut point = Point::default();
    for stage in stages(nest) {
        let totals: Vec<Value> = stage.clone().map(|k| total(kernel, known, k)).collect();
        let depth = kernel.depth();
        let inner = inner_loops(kernel, nest, &row);
        point.at = outer.iter().cloned().chain(inner).collect();
        let roots: Vec<Reg> = stage.clone().map(|k| nest.reductions[k].value).collect();
        let values = known.print(kernel, &point, &roots)?;
        for ((k, total), value) in stage.zip(&totals).zip(values) {
            let combined = combine(kernel, nest.reductions[k].op, total, &value);
            kernel.assign(total, &combined);
        }
        kernel.close_to(depth);
        point.reduced.extend(totals);
    }
    Ok(Reduced { outer, row, results: point.reduced })
}

fn reduce(kernel: &mut Kernel<'_>, known: &Known<'_>) -> Result<(), String> {
    let nest = known.nest;
    let outer = coordinates(kernel, "id", nest.outer_dims());
    let Reduced { outer, row, results: reduced } = reductions(kernel, known, outer)?;
    let kept = nest.dims.len() - nest.inner;
    let is_once = |k: &usize| nest.stores[*k].access.strides[kept..].iter().all(|&stride| stride == 0);
    let (once, each): (Vec<usize>, Vec<usize>) = (0..nest.stores.len()).partition(is_once);
    // What is stored once for a row may lie where the row is read: it is stored last.
    let first = match &row {
        Row::Whole => vec![String::from("0i"); nest.inner],
        Row::Segment(start, _) => vec![start.clone()],
    };
    let at = |inner: Vec<String>| outer.iter().cloned().chain(inner).collect();
    let at_first = Point { at: at(first), accumulators: Vec::new(), reduced };
    let values = results(kernel, known, &at_first, &once)?;
    if !each.is_empty() {
        let depth = kernel.depth();
        let inner = inner_loops(kernel, nest, &row);
        store(kernel, known, &Point { at: at(inner), ..at_first.clone() }, &each)?;
        kernel.close_to(depth);
    }
    put(kernel, known, &at_first, &once, &values)
}

/// Reductions that one pass over a row can make: none needs another one of them.
fn stages(nest: &Nest) -> Vec<std::ops::Range<usize>> {
    let mut stages: Vec<std::ops::Range<usize>> = Vec::new();
    for (k, reduction) in nest.reductions.iter().enumerate() {
        let needed = nest.expr.needed_by(&[reduction.value]);
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

/// The variable of a reduction, at its neutral element.
fn total(kernel: &mut Kernel<'_>, known: &Known<'_>, k: usize) -> Value {
    let nest = known.nest;
    let reduction = &nest.reductions[k];
    let ty = nest.expr.ty(reduction.value);
    let read = nest.expr.insts().iter().position(|(inst, _)| *inst == Inst::Reduced(k as u8));
    let repr = match read {
        // What the sum is read as says how large it can be.
        Some(reg) if nest.expr.ty(Reg(reg as u16)) == ty => known.repr(Reg(reg as u16)),
        _ => repr_of(ty),
    };
    let neutral = kernel.constant(reduction.op.neutral(ty).convert(type_of(repr)), repr);
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

/// The part of a kernel in a check of guards.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// It finds the least point where one fails.
    Find,
    /// It says what fails there.
    Tell,
}

/// The guards of a nest, and what they are made of.
struct Guards {
    /// The index and the bound of each.
    roots: Vec<Reg>,
    /// True if they look at accumulators.
    accumulators: bool,
    /// True if they look at reductions.
    reductions: bool,
}

impl Guards {
    fn of(nest: &Nest) -> Guards {
        let guards = nest.expr.insts().iter().filter_map(|(inst, _)| match *inst {
            Inst::Guard(index, bound) => Some([index, bound]),
            _ => None,
        });
        let roots: Vec<Reg> = guards.flatten().collect();
        let needed = nest.expr.needed_by(&roots);
        let needs = |is: &dyn Fn(&Inst) -> bool| {
            nest.expr.insts().iter().zip(&needed).any(|((inst, _), needed)| *needed && is(inst))
        };
        let accumulators = needs(&|inst| match inst {
            Inst::Load(slot) => matches!(nest.loads[usize::from(*slot)], Load::Accumulator(_)),
            _ => false,
        });
        let reductions = needs(&|inst| matches!(inst, Inst::Reduced(_)));
        Guards { roots, accumulators, reductions }
    }
}

/// The kernel of a step, and how many points it has.
fn check<'a>(
    cx: &'a Context<'a>,
    known: &Known<'_>,
    accumulate: Accumulate<'_>,
    step: Step,
) -> Result<(Kernel<'a>, u64), String> {
    let nest = known.nest;
    let guards = Guards::of(nest);
    let mut kernel = cx.plain_kernel();
    let none_yet = format!("{} == 0u", kernel.fault_word(0));
    let kept = nest.dims.len() - nest.inner;
    let points = match step {
        Step::Tell => 1,
        Step::Find if guards.reductions => nest.outer_dims().iter().map(|&dim| dim as u64).product(),
        Step::Find => nest.points(u64::MAX),
    };
    let (mut at, mut reduced) = (Vec::new(), Vec::new());
    match step {
        Step::Find if guards.reductions => {
            kernel.when(&none_yet);
            let outer = coordinates(&mut kernel, "id", nest.outer_dims());
            let Reduced { outer, row, results } = reductions(&mut kernel, known, outer)?;
            let inner = inner_loops(&mut kernel, nest, &row);
            at.extend(outer.into_iter().chain(inner));
            reduced = results;
        }
        Step::Find => {
            kernel.when(&none_yet);
            at = point_of(&mut kernel, nest, "id");
        }
        Step::Tell => {
            let least = kernel.fault_word(1);
            let least = kernel.define(Value::new(least, Repr::U32)).text;
            kernel.when(&format!("{none_yet} && {least} != 4294967295u"));
            at = coordinates(&mut kernel, &least, &nest.dims);
            if guards.reductions {
                reduced = reductions(&mut kernel, known, at[..kept].to_vec())?.results;
            }
        }
    }
    let accumulators = if guards.accumulators { accumulate(&mut kernel, &at)? } else { Vec::new() };
    let point = Point { at, accumulators, reduced };
    let values = known.print(&mut kernel, &point, &guards.roots)?;
    values.chunks_exact(2).for_each(|pair| verdict(cx, &mut kernel, nest, &point.at, pair, step));
    Ok((kernel, points))
}

/// The statements that note a guard which fails at a point.
fn verdict(
    cx: &Context<'_>,
    kernel: &mut Kernel<'_>,
    nest: &Nest,
    at: &[String],
    pair: &[Value],
    step: Step,
) {
    let zero = kernel.constant(Scalar::I32(0), Repr::I32);
    let [index, bound] = [&pair[0], &pair[1]];
    let below = compare(kernel, CompareOp::Lt, Type::I64, [index.clone(), zero]).text;
    let above = compare(kernel, CompareOp::Le, Type::I64, [bound.clone(), index.clone()]).text;
    let depth = kernel.depth();
    match step {
        Step::Find => {
            kernel.when(&format!("{below} || {above}"));
            let axes = nest.dims.iter().zip(at);
            let number =
                axes.fold(String::from("0i"), |number, (dim, at)| format!("({number} * {dim} + {at})"));
            kernel.lower_fault_word(1, &format!("bits_of_int({number})"));
        }
        Step::Tell => {
            let none_yet = format!("{} == 0u", kernel.fault_word(0));
            kernel.when(&format!("{none_yet} && ({below} || {above})"));
            for (k, value) in [index, bound].into_iter().enumerate() {
                let value = kernel.as_repr(value, Repr::I64);
                let value = kernel.define(value).text;
                kernel.set_fault_word(2 + 2 * k, &format!("low({value})"));
                kernel.set_fault_word(3 + 2 * k, &format!("high({value})"));
            }
            kernel.set_fault_word(0, &format!("{}u", cx.instruction + 1));
        }
    }
    kernel.close_to(depth);
}
