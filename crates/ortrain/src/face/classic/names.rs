//! Names in the states of sessions.

use std::collections::BTreeMap;

use ortrain_graph::Tensor;

/// Key of state that all weights share.
pub(super) const SHARED_KEY: &str = "shared_optimizer_state";

/// State by weights, then by names.
///
/// ```
/// use ortrain::classic::StatesByWeight;
///
/// assert!(StatesByWeight::new().is_empty());
/// ```
pub type StatesByWeight = BTreeMap<String, BTreeMap<String, Tensor>>;

/// Suffix of the name of a weight's low-precision copy.
pub(super) const LOW_PRECISION_SUFFIX: &str = "_fp16";
