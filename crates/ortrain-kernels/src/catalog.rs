//! Names of all kernels that the environment variable `ORTRAIN_KERNELS` excludes or forces.

use std::sync::OnceLock;

use crate::candidates::KernelFilter;
use crate::settings::{UnknownSetting, value_of};
use crate::{conv, gemm, window};

/// Environment variable that excludes or forces kernels.
const KERNELS: &str = "ORTRAIN_KERNELS";

/// Returns the names of the kernels of products, convolutions and pooling.
#[must_use]
pub fn kernel_names() -> Vec<&'static str> {
    gemm::kernel_names().into_iter().chain(conv::kernel_names()).chain(window::kernel_names()).collect()
}

impl KernelFilter {
    /// Returns the filter that the environment variable `ORTRAIN_KERNELS` describes ([`KernelFilter::parse`]). Without
    /// the variable no kernel is excluded. Decided once per process.
    ///
    /// # Errors
    /// The error of [`KernelFilter::parse`].
    pub fn detect() -> Result<KernelFilter, UnknownSetting> {
        static FILTER: OnceLock<Result<KernelFilter, UnknownSetting>> = OnceLock::new();
        let parse =
            || value_of(KERNELS).map_or(Ok(KernelFilter::default()), |text| KernelFilter::parse(&text));
        FILTER.get_or_init(parse).clone()
    }

    /// Parses names of kernels ([`kernel_names`]), separated by commas. A kernel after a `-` is excluded. A kernel after
    /// a `+` is used wherever it supports the sizes, even if another kernel is faster there.
    ///
    /// # Errors
    /// Returns an error for an entry without a sign and for an unknown name.
    pub fn parse(text: &str) -> Result<KernelFilter, UnknownSetting> {
        let names = kernel_names();
        let mut filter = KernelFilter::default();
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let known = |name: &str| names.iter().copied().find(|&known| known == name);
            if let Some(name) = entry.strip_prefix('-').and_then(known) {
                filter.excluded.push(name);
            } else if let Some(name) = entry.strip_prefix('+').and_then(known) {
                filter.forced.push(name);
            } else {
                return Err(UnknownSetting::Kernels { entry: entry.to_owned(), known: names.join(", ") });
            }
        }
        Ok(filter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct_and_name_their_table() {
        let mut names = kernel_names();
        assert!(names.iter().all(|name| name.split_once('.').is_some()), "{names:?}");
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn entries_exclude_or_force() {
        let filter = KernelFilter::parse(" -conv.winograd, +conv.direct,,").unwrap();
        assert_eq!((filter.excluded, filter.forced), (vec!["conv.winograd"], vec!["conv.direct"]));
        assert_eq!(KernelFilter::parse(""), Ok(KernelFilter::default()));
        for entry in ["conv.direct", "-conv.direkt", "-", "+-conv.direct"] {
            let message = KernelFilter::parse(entry).unwrap_err().to_string();
            let start = format!("the environment variable ORTRAIN_KERNELS has the unknown entry {entry:?}; ");
            assert!(message.starts_with(&start), "{message}");
        }
    }
}
