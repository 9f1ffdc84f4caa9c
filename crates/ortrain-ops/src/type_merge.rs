//! Declared and inferred types of one value.

use ortrain_graph::ValueType;

/// Merges a declared and an inferred type. A declared shape that contradicts the inferred shape is ignored.
///
/// # Errors
/// Returns both types if their element types contradict each other.
pub(crate) fn merge_advised(
    declared: &ValueType,
    inferred: ValueType,
) -> Result<ValueType, Box<(ValueType, ValueType)>> {
    match (declared, &inferred) {
        (ValueType::Tensor(a, Some(_)), ValueType::Tensor(b, Some(_))) if a == b => {
            Ok(merge_types(declared, inferred.clone()).unwrap_or(inferred))
        }
        _ => merge_types(declared, inferred),
    }
}

/// Merges two types of one value: each may have information that the other does not have.
///
/// # Errors
/// Returns both types if they contradict each other.
pub(crate) fn merge_types(
    declared: &ValueType,
    inferred: ValueType,
) -> Result<ValueType, Box<(ValueType, ValueType)>> {
    match (declared, &inferred) {
        (ValueType::Unknown, _) => Ok(inferred),
        (_, ValueType::Unknown) => Ok(declared.clone()),
        (ValueType::Tensor(a, from), ValueType::Tensor(b, to)) if a == b => match (from, to) {
            (_, None) => Ok(declared.clone()),
            (None, _) => Ok(inferred),
            (Some(from), Some(to)) if from.rank() == to.rank() => {
                let contradiction = from
                    .iter()
                    .zip(to.iter())
                    .any(|(x, y)| matches!((x.known(), y.known()), (Some(x), Some(y)) if x != y));
                if contradiction {
                    return Err(Box::new((declared.clone(), inferred)));
                }
                let dims = from.iter().zip(to.iter()).map(|(x, y)| {
                    if y.known().is_some() {
                        y
                    } else if x.known().is_some() {
                        x
                    } else {
                        y
                    }
                });
                Ok(ValueType::Tensor(*a, Some(dims.cloned().collect())))
            }
            _ => Err(Box::new((declared.clone(), inferred))),
        },
        (ValueType::Sequence(a), ValueType::Sequence(b)) if a == b => Ok(inferred),
        _ => Err(Box::new((declared.clone(), inferred))),
    }
}
