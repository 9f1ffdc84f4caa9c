//! Tables of kernels: several candidates for one computation, from which the sizes choose.
//!
//! A table lists its candidates from the fastest to the most general one. The first candidate that accepts a request
//! and prefers it computes the request. The environment variable `ORTRAIN_KERNELS` excludes candidates, or uses one
//! wherever it accepts a request ([`KernelFilter`]).

/// Requests and kernels of a table.
pub(crate) trait Table {
    /// Description of a computation.
    type Request<'a>;
    /// Compiled kernel.
    type Kernel;
}

/// Condition of a request.
type Condition<T> = fn(&<T as Table>::Request<'_>) -> bool;

/// Kernel for some of the requests of a table.
pub(crate) struct Candidate<T: Table + 'static> {
    /// Name in descriptions of kernels and in `ORTRAIN_KERNELS`.
    pub(crate) name: &'static str,
    /// Returns true if the kernel computes the request.
    pub(crate) accepts: Condition<T>,
    /// Conditions under which the kernel is faster than all candidates after it. All of them must hold.
    pub(crate) preferences: &'static [Condition<T>],
    /// Compiles an accepted request. Returns `None` if its sizes are unsupported.
    pub(crate) build: fn(&T::Request<'_>) -> Option<T::Kernel>,
}

/// Returns the kernel for a request with its name, or the error message if the filter excludes every candidate.
pub(crate) fn choose<T: Table>(
    candidates: &[Candidate<T>],
    request: &T::Request<'_>,
    filter: &KernelFilter,
) -> Result<(&'static str, T::Kernel), String> {
    let enabled = || candidates.iter().filter(|candidate| !filter.excludes(candidate.name));
    let accepts = |candidate: &&Candidate<T>| (candidate.accepts)(request);
    let prefers = |candidate: &&Candidate<T>| candidate.preferences.iter().all(|holds| holds(request));
    let build = |candidate: &Candidate<T>| (candidate.build)(request).map(|kernel| (candidate.name, kernel));
    let forced = enabled().filter(|candidate| filter.forces(candidate.name)).filter(accepts).find_map(build);
    let preferred = || enabled().filter(accepts).filter(prefers).find_map(build);
    forced.or_else(preferred).ok_or_else(|| {
        let names: Vec<&str> = candidates.iter().map(|candidate| candidate.name).collect();
        format!("ORTRAIN_KERNELS excludes all kernels that support its sizes, among {}", names.join(", "))
    })
}

/// Kernels that are excluded, and kernels that are used wherever they accept a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelFilter {
    pub(crate) excluded: Vec<&'static str>,
    pub(crate) forced: Vec<&'static str>,
}

/// Filter without entries.
pub(crate) static ALL_KERNELS: KernelFilter = KernelFilter { excluded: Vec::new(), forced: Vec::new() };

impl KernelFilter {
    fn excludes(&self, name: &str) -> bool {
        self.excluded.contains(&name)
    }

    fn forces(&self, name: &str) -> bool {
        self.forced.contains(&name)
    }

    /// Returns the filter with more excluded kernels.
    pub(crate) fn without(&self, names: &[&'static str]) -> KernelFilter {
        let mut filter = self.clone();
        filter.excluded.extend(names);
        filter
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers; a kernel is a number, too.
    struct Numbers;

    impl Table for Numbers {
        type Request<'a> = u32;
        type Kernel = u32;
    }

    const EVEN: Candidate<Numbers> = Candidate {
        name: "even",
        accepts: |n| n.is_multiple_of(2),
        preferences: &[|n| *n > 10, |n| *n < 100],
        build: |n| (*n != 42).then_some(n / 2),
    };
    const ANY: Candidate<Numbers> =
        Candidate { name: "any", accepts: |_| true, preferences: &[], build: |n| Some(*n) };

    fn chosen(n: u32, filter: &KernelFilter) -> Result<(&'static str, u32), String> {
        choose(&[EVEN, ANY], &n, filter)
    }

    #[test]
    fn first_preferred_candidate_is_chosen() {
        for (n, expected) in
            [(12, ("even", 6)), (13, ("any", 13)), (8, ("any", 8)), (200, ("any", 200)), (42, ("any", 42))]
        {
            assert_eq!(chosen(n, &ALL_KERNELS), Ok(expected));
        }
    }

    #[test]
    fn filters_exclude_and_force_candidates() {
        let forced = KernelFilter { forced: vec!["even"], ..KernelFilter::default() };
        assert_eq!(chosen(8, &forced), Ok(("even", 4)));
        assert_eq!(chosen(9, &forced), Ok(("any", 9)));
        let excluded = ALL_KERNELS.without(&["even"]);
        assert_eq!(chosen(12, &excluded), Ok(("any", 12)));
        let message = chosen(12, &excluded.without(&["any"])).unwrap_err();
        assert_eq!(message, "ORTRAIN_KERNELS excludes all kernels that support its sizes, among even, any");
    }
}
