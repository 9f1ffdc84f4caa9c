//! Selection of matrix product kernels by size.

use ortrain_program::Nest;

use crate::bounds_checks::{Accumulate, guard_launches};
use crate::context::Context;
use crate::inner_product::MatmulOperands;
use crate::launch::Launch;
use crate::split_k::MatmulOutput;
use crate::{nest, skinny, tiled};

/// Maximum length of sums for the plain kernel: with short sums, tiles reuse loads too rarely.
const MAX_PLAIN_TERMS: usize = 4;
/// Maximum length of sums that the invocations of a group do not share.
const MAX_UNSHARED_TERMS: usize = 16;
/// Maximum number of rows or columns for the skinny kernel: one invocation computes all of them.
const MAX_SKINNY_LINES: usize = 8;

/// Returns the launches of a product. Whole groups compute it if its shape allows; otherwise `plain` computes each
/// point.
pub(crate) fn launches(
    cx: &Context<'_>,
    factors: &dyn MatmulOperands,
    epilogue: &Nest,
    plain: Accumulate<'_>,
) -> Result<Vec<Launch>, String> {
    // Plain kernels can succeed if group kernels fail, for example because a device has too few bindings.
    match group_launches(cx, factors, epilogue, plain) {
        Ok(Some(launches)) => Ok(launches),
        _ => nest::launches(cx, epilogue, plain),
    }
}

fn group_launches(
    cx: &Context<'_>,
    factors: &dyn MatmulOperands,
    epilogue: &Nest,
    plain: Accumulate<'_>,
) -> Result<Option<Vec<Launch>>, String> {
    let [m, n, k] = factors.sides();
    let is_skinny = m.min(n) <= MAX_SKINNY_LINES;
    if is_skinny && factors.is_costly() {
        return Ok(None);
    }
    if k <= if is_skinny { MAX_UNSHARED_TERMS } else { MAX_PLAIN_TERMS } || epilogue.segments.is_some() {
        return Ok(None);
    }
    let target = MatmulOutput::new(cx, factors, epilogue)?;
    let mut launches = guard_launches(cx, target.known(), plain)?;
    launches.extend(match is_skinny {
        true => skinny::launches(cx, &target)?,
        false => tiled::launches(cx, &target)?,
    });
    Ok(Some(launches))
}
