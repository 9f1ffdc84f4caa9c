//! Entries: ways to run one program.

/// A set of entries: ways to run a program that share its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GradientModes(u8);

/// One way to run a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GradientMode {
    /// Gradients are added to what the buffers hold. Also the entry of programs that have only one.
    Accumulate,
    /// Gradients replace what the buffers hold.
    Overwrite,
}

impl GradientModes {
    /// Every entry.
    pub const ALL: GradientModes = GradientModes(0b11);

    /// No entry.
    pub const NONE: GradientModes = GradientModes(0);

    /// One entry.
    #[must_use]
    pub fn only(entry: GradientMode) -> GradientModes {
        GradientModes(1 << entry as u8)
    }

    /// Whether an entry belongs to the set.
    #[must_use]
    pub fn contains(self, entry: GradientMode) -> bool {
        self.0 & (1 << entry as u8) != 0
    }

    /// The entries in both.
    #[must_use]
    pub fn and(self, other: GradientModes) -> GradientModes {
        GradientModes(self.0 & other.0)
    }

    /// The entries in either.
    #[must_use]
    pub fn or(self, other: GradientModes) -> GradientModes {
        GradientModes(self.0 | other.0)
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many there are.
    pub(crate) fn count(self) -> u64 {
        u64::from(self.0.count_ones())
    }
}
