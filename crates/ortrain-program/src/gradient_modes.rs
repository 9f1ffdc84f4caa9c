//! Gradient modes: overwrite or accumulate.

/// Set of gradient modes. All modes share the memory plan of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GradientModes(u8);

/// Effect of a run on the gradient buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GradientMode {
    /// Gradients are added to the buffers. Programs with only one mode use this mode too.
    Accumulate,
    /// Gradients replace the contents of the buffers.
    Overwrite,
}

impl GradientModes {
    /// All modes.
    pub const ALL: GradientModes = GradientModes(0b11);

    /// No modes.
    pub const NONE: GradientModes = GradientModes(0);

    /// Returns the set of one mode.
    #[must_use]
    pub fn only(entry: GradientMode) -> GradientModes {
        GradientModes(1 << entry as u8)
    }

    /// Returns true if the set contains a mode.
    #[must_use]
    pub fn contains(self, entry: GradientMode) -> bool {
        self.0 & (1 << entry as u8) != 0
    }

    /// Returns the intersection.
    #[must_use]
    pub fn and(self, other: GradientModes) -> GradientModes {
        GradientModes(self.0 & other.0)
    }

    /// Returns the union.
    #[must_use]
    pub fn or(self, other: GradientModes) -> GradientModes {
        GradientModes(self.0 | other.0)
    }

    /// Returns true if the set is empty.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the number of modes.
    pub(crate) fn count(self) -> u64 {
        u64::from(self.0.count_ones())
    }
}
