//! Common type of the values of two branches or iterations.

use ortrain_graph::{Dim, Shape, ValueType};
use rustc_hash::FxHashSet;

use crate::OpError;
use crate::infer::Infer;

/// Returns the common type of two values. A symbol has the same meaning in both branches only if it comes from outside.
pub(super) fn common_type(
    cx: &Infer<'_>,
    k: usize,
    (yes, no): (&ValueType, &ValueType),
    outer: &FxHashSet<&Dim>,
) -> Result<ValueType, OpError> {
    match (yes, no) {
        (ValueType::Tensor(a, from), ValueType::Tensor(b, to)) if a == b => {
            let shape = match (from, to) {
                (Some(from), Some(to)) if from.rank() == to.rank() => {
                    let pairs = from.iter().zip(to.iter()).enumerate();
                    let dim = |(axis, (x, y)): (usize, (&Dim, &Dim))| {
                        let same = x == y && (x.known().is_some() || outer.contains(x));
                        if same { x.clone() } else { cx.unknown_dim(k, axis) }
                    };
                    Some(pairs.map(dim).collect::<Shape>())
                }
                _ => None,
            };
            Ok(ValueType::Tensor(*a, shape))
        }
        (ValueType::Sequence(a), ValueType::Sequence(b)) if a == b => Ok(yes.clone()),
        (ValueType::Unknown, _) | (_, ValueType::Unknown) => Ok(ValueType::Unknown),
        _ => Err(OpError::invalid(format!("output {k} is {yes} in {THEN} but {no} in {ELSE}"))),
    }
}

pub(super) const THEN: &str = "then_branch";

pub(super) const ELSE: &str = "else_branch";
