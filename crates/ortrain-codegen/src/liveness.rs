//! Liveness: from where to where each value of a program is needed, and how many bytes that takes.

/// The first and the last place at which a value is needed. Inputs are there before place 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Life {
    pub(crate) first: isize,
    pub(crate) last: isize,
}

impl Life {
    /// Whether both are needed at some place.
    pub(crate) fn meets(self, other: Life) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}
