//! Guards of nests: kernels that find the first point with a failed guard.

use ortrain_expr::{CompareOp, Inst, Reg, Scalar, Type};
use ortrain_program::{Load, Nest};

use crate::context::Context;
use crate::expr::{AnalyzedNest, Point, compare};
use crate::kernel::Kernel;
use crate::launch::Launch;
use crate::repr::{Repr, Value};
use crate::thread_index::{define_coordinates, define_point};
use crate::thread_reduction::{ReducedRow, begin_inner_loops, print_reductions};

/// Printer of the values that the instruction accumulates at a point, before the epilogue nest.
pub(crate) type Accumulate<'f> = &'f dyn Fn(&mut Kernel<'_>, &[String]) -> Result<Vec<Value>, String>;

/// Returns the launches that search for failed guards.
pub(crate) fn guard_launches(
    cx: &Context<'_>,
    known: &AnalyzedNest<'_>,
    accumulate: Accumulate<'_>,
) -> Result<Vec<Launch>, String> {
    let steps: &[Step] = if cx.checks { &[Step::Find, Step::Report] } else { &[] };
    let launch = |&step: &Step| {
        let (kernel, points) = guard_kernel(cx, known, accumulate, step)?;
        cx.finish(kernel, points)
    };
    steps.iter().map(launch).collect()
}

/// Step of a check of guards.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Finds the smallest point with a failed guard.
    Find,
    /// Reports the failed guard at this point.
    Report,
}

/// Guards of a nest, and their dependencies.
struct Guards {
    /// Index and bound of each guard.
    roots: Vec<Reg>,
    /// True if a guard depends on accumulators.
    accumulators: bool,
    /// True if a guard depends on reductions.
    reductions: bool,
}

impl Guards {
    fn from_nest(nest: &Nest) -> Guards {
        let guards = nest.expr.insts().iter().filter_map(|(inst, _)| match *inst {
            Inst::Guard(index, bound) => Some([index, bound]),
            _ => None,
        });
        let roots: Vec<Reg> = guards.flatten().collect();
        let needed = nest.expr.dependencies_of(&roots);
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

/// Returns the kernel of a step, and its number of points.
fn guard_kernel<'a>(
    cx: &'a Context<'a>,
    known: &AnalyzedNest<'_>,
    accumulate: Accumulate<'_>,
    step: Step,
) -> Result<(Kernel<'a>, u64), String> {
    let nest = known.nest;
    let guards = Guards::from_nest(nest);
    let mut kernel = cx.plain_kernel();
    let none_yet = format!("{} == 0u", kernel.fault_word(0));
    let outer_rank = nest.dims.len() - nest.inner;
    let points = match step {
        Step::Report => 1,
        Step::Find if guards.reductions => nest.outer_dims().iter().map(|&dim| dim as u64).product(),
        Step::Find => nest.points_along(u64::MAX),
    };
    let (mut at, mut reduced) = (Vec::new(), Vec::new());
    match step {
        Step::Find if guards.reductions => {
            kernel.begin_if(&none_yet);
            let outer = define_coordinates(&mut kernel, "id", nest.outer_dims());
            let ReducedRow { outer, row, results } = print_reductions(&mut kernel, known, outer)?;
            let inner = begin_inner_loops(&mut kernel, nest, &row);
            at.extend(outer.into_iter().chain(inner));
            reduced = results;
        }
        Step::Find => {
            kernel.begin_if(&none_yet);
            at = define_point(&mut kernel, nest, "id");
        }
        Step::Report => {
            let lowest_word = kernel.fault_word(1);
            let lowest_point = kernel.define(Value::new(lowest_word, Repr::U32)).text;
            kernel.begin_if(&format!("{none_yet} && {lowest_point} != 4294967295u"));
            at = define_coordinates(&mut kernel, &lowest_point, &nest.dims);
            if guards.reductions {
                reduced = print_reductions(&mut kernel, known, at[..outer_rank].to_vec())?.results;
            }
        }
    }
    let accumulators = if guards.accumulators { accumulate(&mut kernel, &at)? } else { Vec::new() };
    let point = Point { at, accumulators, reduced, ..Point::default() };
    let values = known.print(&mut kernel, &point, &guards.roots)?;
    values.chunks_exact(2).for_each(|pair| record_failure(cx, &mut kernel, nest, &point.at, pair, step));
    Ok((kernel, points))
}

/// Prints the statements that record a failed guard at a point.
fn record_failure(
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
            kernel.begin_if(&format!("{below} || {above}"));
            let axes = nest.dims.iter().zip(at);
            let point =
                axes.fold(String::from("0"), |linear, (dim, at)| format!("({linear} * {dim} + {at})"));
            kernel.min_fault_word(1, &format!("bits_of_int({point})"));
        }
        Step::Report => {
            let none_yet = format!("{} == 0u", kernel.fault_word(0));
            kernel.begin_if(&format!("{none_yet} && ({below} || {above})"));
            for (k, value) in [index, bound].into_iter().enumerate() {
                let value = kernel.as_repr(value, Repr::I64);
                let value = kernel.define(value).text;
                kernel.set_fault_word(2 + 2 * k, &format!("low({value})"));
                kernel.set_fault_word(3 + 2 * k, &format!("high({value})"));
            }
            let run = kernel.run_number();
            kernel.set_fault_word(6, &run);
            kernel.set_fault_word(0, &format!("{}u", cx.instruction + 1));
        }
    }
    kernel.close_to(depth);
}
