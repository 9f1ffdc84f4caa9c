//! Nest kernels: one invocation per outer point, or groups of invocations per row.

use ortrain_program::Nest;

use crate::bounds_checks::{Accumulate, guard_launches};
use crate::context::Context;
use crate::expr::{AnalyzedNest, Point};
use crate::kernel::Kernel;
use crate::launch::Launch;
use crate::reduction_strategy::ReductionKind;
use crate::repr::Value;
use crate::thread_index::{define_point, store};
use crate::thread_reduction::reduce;
use crate::{row_reduction, split_reduction, vectorized_map};

/// Returns the launches of a nest. The nest is the epilogue of the values that `accumulate` prints.
pub(crate) fn launches(
    cx: &Context<'_>,
    nest: &Nest,
    accumulate: Accumulate<'_>,
) -> Result<Vec<Launch>, String> {
    let known = AnalyzedNest::new(cx, nest)?;
    let mut launches = guard_launches(cx, &known, accumulate)?;
    match group_launches(cx, &known) {
        Some(launches_of_nest) => launches.extend(launches_of_nest),
        None => match vectorized_map::launch(cx, &known)? {
            Some(launch) => launches.push(launch),
            None => launches.push(plain_launch(cx, &known, accumulate)?),
        },
    }
    Ok(launches)
}

/// Returns the launches of whole groups that compute a nest, if they are faster for its sizes. If they fail, plain
/// kernels can still succeed.
fn group_launches(cx: &Context<'_>, known: &AnalyzedNest<'_>) -> Option<Vec<Launch>> {
    if let ReductionKind::Parts(strategy) = ReductionKind::for_nest(known.nest)?
        && let Ok(split_launches) = split_reduction::launches(cx, known, strategy)
    {
        return Some(split_launches);
    }
    row_reduction::launch(cx, known).ok().map(|launch| vec![launch])
}

/// Returns the launch with one invocation per outer point.
pub(crate) fn plain_launch(
    cx: &Context<'_>,
    known: &AnalyzedNest<'_>,
    accumulate: Accumulate<'_>,
) -> Result<Launch, String> {
    let nest = known.nest;
    let outer: u64 = match &nest.segments {
        Some(segments) if nest.is_map() => segments.num_points() as u64,
        _ => nest.outer_dims().iter().map(|&dim| dim as u64).product(),
    };
    let mut kernel = cx.kernel();
    if nest.is_map() {
        let at = define_point(&mut kernel, nest, "id");
        let accumulators = accumulate(&mut kernel, &at)?;
        finish_map(&mut kernel, known, at, accumulators)?;
    } else {
        reduce(&mut kernel, known)?;
    };
    cx.finish(kernel, outer)
}

/// Computes the results of a map at a point from its accumulators, and stores them.
pub(crate) fn finish_map(
    kernel: &mut Kernel<'_>,
    known: &AnalyzedNest<'_>,
    at: Vec<String>,
    accumulators: Vec<Value>,
) -> Result<(), String> {
    let point = Point { at, accumulators, ..Point::default() };
    store(kernel, known, &point, &(0..known.nest.stores.len()).collect::<Vec<_>>())
}
