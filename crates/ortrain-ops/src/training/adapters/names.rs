//! Names of the constants and values of adapters.

use crate::support::low_rank::{DELTA, NORM};

/// One of the trained constants of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FactorKind {
    /// From the inputs of a layer to the rank.
    A,
    /// From the rank to the outputs of a layer.
    B,
    /// Magnitudes of the rows of the adapted weight (DoRA).
    Magnitude,
}

impl FactorKind {
    fn infix(self) -> &'static str {
        match self {
            FactorKind::A => ".lora_A.",
            FactorKind::B => ".lora_B.",
            FactorKind::Magnitude => ".lora_magnitude.",
        }
    }
}

const SCALE_INFIX: &str = ".lora_scale.";
const SITE_INFIX: &str = "/lora.";
const BASE_SUFFIX: &str = "/base";

/// Name of a factor, in parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FactorName<'a> {
    /// Name of the adapted weight.
    pub weight: &'a str,
    /// Factor.
    pub kind: FactorKind,
    /// Name of the adapter.
    pub adapter: &'a str,
}

impl<'a> FactorName<'a> {
    /// Splits the name of a factor into its parts. Returns `None` for other names.
    ///
    /// ```
    /// use ortrain_ops::training::{FactorKind, FactorName};
    ///
    /// let name = FactorName::split("fc1.weight.lora_B.default").unwrap();
    /// assert_eq!((name.weight, name.kind, name.adapter), ("fc1.weight", FactorKind::B, "default"));
    /// assert!(FactorName::split("fc1.weight").is_none());
    /// ```
    #[must_use]
    pub fn split(name: &'a str) -> Option<FactorName<'a>> {
        [FactorKind::A, FactorKind::B, FactorKind::Magnitude].into_iter().find_map(|kind| {
            let (weight, adapter) = name.rsplit_once(kind.infix())?;
            (!weight.is_empty() && is_adapter_name(adapter)).then_some(FactorName { weight, kind, adapter })
        })
    }
}

/// Returns true for valid names of adapters: letters, digits, `_` and `-`.
///
/// ```
/// use ortrain_ops::training::is_adapter_name;
///
/// assert!(is_adapter_name("style-2") && !is_adapter_name("a.b") && !is_adapter_name(""));
/// ```
#[must_use]
pub fn is_adapter_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|sign| sign.is_ascii_alphanumeric() || matches!(sign, '_' | '-'))
}

/// Returns the name of a factor of a weight.
///
/// ```
/// use ortrain_ops::training::{FactorKind, factor_name};
///
/// assert_eq!(factor_name("fc1.weight", FactorKind::A, "default"), "fc1.weight.lora_A.default");
/// ```
#[must_use]
pub fn factor_name(weight: &str, kind: FactorKind, adapter: &str) -> String {
    format!("{weight}{}{adapter}", kind.infix())
}

/// Returns the name of the scale of an adapter of a weight.
///
/// ```
/// use ortrain_ops::training::scale_name;
///
/// assert_eq!(scale_name("fc1.weight", "default"), "fc1.weight.lora_scale.default");
/// ```
#[must_use]
pub fn scale_name(weight: &str, adapter: &str) -> String {
    format!("{weight}{SCALE_INFIX}{adapter}")
}

/// Returns the begin of the names of the values of an adapter. `root` is the result of the layer with all adapters.
pub(super) fn site_prefix(root: &str, adapter: &str) -> String {
    format!("{root}{SITE_INFIX}{adapter}")
}

/// Returns the name of the result of a layer without an adapter.
pub(super) fn base_value(root: &str, adapter: &str) -> String {
    site_prefix(root, adapter) + BASE_SUFFIX
}

/// Returns the name of the lengths of the rows of the adapted weight.
pub(super) fn norm_value(root: &str, adapter: &str) -> String {
    site_prefix(root, adapter) + NORM
}

/// Returns the name of the result of an adapter.
pub(super) fn delta_value(root: &str, adapter: &str) -> String {
    site_prefix(root, adapter) + DELTA
}

/// Splits the name of the result of a layer without an adapter into the result with all adapters and the adapter.
pub(super) fn split_base(value: &str) -> Option<(&str, &str)> {
    let (root, adapter) = value.strip_suffix(BASE_SUFFIX)?.rsplit_once(SITE_INFIX)?;
    is_adapter_name(adapter).then_some((root, adapter))
}

/// Returns the name of the result of a layer with all adapters.
pub(super) fn root_of(value: &str) -> &str {
    split_base(value).map_or(value, |(root, _)| root)
}
