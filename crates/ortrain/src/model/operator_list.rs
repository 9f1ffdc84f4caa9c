//! List of the supported operators.

use ortrain_graph::DType;
use ortrain_ops::{Gradient, Registry, Runs};

/// A supported operator.
///
/// ```
/// use ortrain::{DType, Gradient, OperatorInfo, Runs, operators};
///
/// let all = operators();
/// let gather = all.iter().find(|operator| operator.name == "Gather").unwrap();
/// let OperatorInfo { domain, versions, runs, gradient, types, .. } = gather;
/// assert_eq!((*domain, versions[0]), ("ai.onnx", 1));
/// assert_eq!((runs, gradient), (&Runs::Instructions, &Gradient::Full));
/// assert_eq!(types[1], [DType::I32, DType::I64]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperatorInfo {
    /// Domain of the operator.
    pub domain: &'static str,
    /// Name of the operator.
    pub name: &'static str,
    /// True for a standard ONNX operator. The others belong to ONNX Runtime, some of them only to its
    /// training models.
    pub standard: bool,
    /// Versions of its domain in which its definition changed, oldest first; all of them are supported.
    pub versions: &'static [i64],
    /// Kind of its execution.
    pub runs: Runs,
    /// Kind of its gradient.
    pub gradient: Gradient,
    /// Supported element types of each input.
    pub types: Vec<Vec<DType>>,
    /// True if the last input may be repeated.
    pub variadic: bool,
}

/// Returns every operator, sorted by domain and name.
///
/// The facts are probed, which takes a moment: each operator receives nodes until it accepts one, which is
/// then differentiated.
///
/// ```
/// use ortrain::{Gradient, operators};
///
/// let zero = operators().into_iter().filter(|operator| operator.gradient == Gradient::Zero);
/// assert!(zero.map(|operator| operator.name).any(|name| name == "Floor"));
/// ```
#[must_use]
pub fn operators() -> Vec<OperatorInfo> {
    let rows = Registry::standard().file_definitions().into_iter().filter_map(|definition| {
        let facts = definition.operator_info()?;
        Some(OperatorInfo {
            domain: if definition.domain.is_empty() { "ai.onnx" } else { definition.domain },
            name: definition.name,
            standard: definition.is_standard(),
            versions: definition.versions(),
            runs: facts.runs,
            gradient: facts.gradient,
            types: facts.types,
            variadic: facts.variadic,
        })
    });
    rows.collect()
}
