//! Checks of shapes that the forms of attention share.

use ortrain_graph::{Dim, Shape, ValueId};

use crate::OpError;
use crate::rewrite::Rewrite;

pub(super) const ATTENTION: &str = "Attention";

/// Returns true if two sizes are known and differ.
pub(super) fn sizes_differ(a: Option<&Dim>, b: Option<&Dim>) -> bool {
    matches!((a.and_then(Dim::known), b.and_then(Dim::known)), (Some(a), Some(b)) if a != b)
}

/// Checks that a mask broadcasts to `[batch, heads, queries, keys]`. Its last axis may be shorter.
pub(super) fn check_mask(k: usize, mask: &Shape, to: &[Option<Dim>; 4]) -> Result<(), OpError> {
    let fits = |axis: usize, dim: &Dim| match (dim.known(), to[axis].as_ref().and_then(Dim::known)) {
        (Some(size), Some(expected)) => {
            if axis == 3 {
                size <= expected
            } else {
                size == expected || size == 1
            }
        }
        _ => true,
    };
    let lead = 4usize.checked_sub(mask.rank());
    let fits = lead.is_some_and(|lead| {
        mask.rank() > 0 && mask.iter().enumerate().all(|(axis, dim)| fits(axis + lead, dim))
    });
    if !fits {
        let target_sizes: Vec<String> =
            to.iter().map(|dim| dim.as_ref().map_or("?".into(), ToString::to_string)).collect();
        return Err(OpError::invalid(format!(
            "input {k} has shape {mask}, which does not broadcast to [{}]: batch, heads, queries, keys",
            target_sizes.join(", ")
        )));
    }
    Ok(())
}

/// Returns true if the axes of two values have the same size, by number or symbol.
pub(super) fn same_size(rw: &Rewrite<'_>, a: (ValueId, usize), b: (ValueId, usize)) -> bool {
    let dim = |(value, axis): (ValueId, usize)| rw.shape(value).and_then(|shape| shape.get(axis)).cloned();
    dim(a).is_some() && dim(a) == dim(b)
}
