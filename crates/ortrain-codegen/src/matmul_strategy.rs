//! The kernels of a product: which sizes are computed by groups, and how.

use ortrain_program::Nest;

use crate::bounds_checks::{Accumulate, checks};
use crate::inner_product::MatmulOperands;
use crate::launch::Launch;
use crate::lower::Context;
use crate::split_k::MatmulOutput;
use crate::{nest, skinny, tiled};

/// The shortest sums that tiles make; without that, elements are used seldom, and nothing is won.
const SHORT: usize = 4;
/// The shortest sums that the invocations of a group share.
const SHORT_SHARED: usize = 16;
/// Lines of a factor that are few: one invocation has all of them.
const FEW: usize = 8;

/// The launches of a product: whole groups compute it where its shape allows, else `plain` each point by itself.
pub(crate) fn launches(
    cx: &Context<'_>,
    factors: &dyn MatmulOperands,
    epilogue: &Nest,
    plain: Accumulate<'_>,
) -> Result<Vec<Launch>, String> {
    // What groups cannot do, because a device binds too little, say, plain kernels may.
    match grouped(cx, factors, epilogue, plain) {
        Ok(Some(launches)) => Ok(launches),
        _ => nest::launches(cx, epilogue, plain),
    }
}

fn grouped(
    cx: &Context<'_>,
    factors: &dyn MatmulOperands,
    epilogue: &Nest,
    plain: Accumulate<'_>,
) -> Result<Option<Vec<Launch>>, String> {
    let [m, n, k] = factors.sides();
    let few = m.min(n) <= FEW;
    if few && factors.is_costly() {
        return Ok(None);
    }
    if k <= if few { SHORT_SHARED } else { SHORT } || epilogue.segments.is_some() {
        return Ok(None);
    }
    let target = MatmulOutput::new(factors, epilogue)?;
    let mut launches = checks(cx, target.known(), plain)?;
    launches.extend(match few {
        true => skinny::launches(cx, &target)?,
        false => tiled::launches(cx, &target)?,
    });
    Ok(Some(launches))
}
