//! Entries: ways to run one program.

/// A set of entries: ways to run a program that share its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Entries(u8);

/// One way to run a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Entry {
    /// Gradients are added to what the buffers hold. Also the entry of programs that have only one.
    Accumulate,
    /// Gradients replace what the buffers hold.
    Overwrite,
}

impl Entries {
    /// Every entry.
    pub const ALL: Entries = Entries(0b11);

    /// No entry.
    pub const NONE: Entries = Entries(0);

    /// One entry.
    #[must_use]
    pub fn only(entry: Entry) -> Entries {
        Entries(1 << entry as u8)
    }

    /// Whether an entry belongs to the set.
    #[must_use]
    pub fn contains(self, entry: Entry) -> bool {
        self.0 & (1 << entry as u8) != 0
    }

    /// The entries in both.
    #[must_use]
    pub fn and(self, other: Entries) -> Entries {
        Entries(self.0 & other.0)
    }

    /// The entries in either.
    #[must_use]
    pub fn or(self, other: Entries) -> Entries {
        Entries(self.0 | other.0)
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
