//! What there is to make models of.

use ortrain_graph::DType;
use ortrain_ops::{Gradient, Registry, Runs};

/// An operator.
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
    /// Its domain.
    pub domain: &'static str,
    /// Its name.
    pub name: &'static str,
    /// Whether ONNX has it. Others are those of ONNX Runtime, some of them for its training models only.
    pub standard: bool,
    /// The versions of its domain in which its definition changed, oldest first; each is read.
    pub versions: &'static [i64],
    /// How it runs.
    pub runs: Runs,
    /// What it passes back.
    pub gradient: Gradient,
    /// For each input, the element types that it takes.
    pub types: Vec<Vec<DType>>,
    /// Whether it takes any number of inputs like the last one.
    pub variadic: bool,
}

/// Every operator, sorted by domain and name.
///
/// What is said of them is found out by asking them: each is given nodes until it accepts one, and that is
/// differentiated. It takes a moment.
///
/// ```
/// use ortrain::{Gradient, operators};
///
/// let zero = operators().into_iter().filter(|operator| operator.gradient == Gradient::Zero);
/// assert!(zero.map(|operator| operator.name).any(|name| name == "Floor"));
/// ```
#[must_use]
pub fn operators() -> Vec<OperatorInfo> {
    let known = Registry::standard().all().into_iter().filter_map(|definition| {
        let facts = definition.facts()?;
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
    known.collect()
}
