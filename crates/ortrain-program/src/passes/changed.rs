//! What a pass says that it did.

/// The number of changes that a pass has made. With 0 the program is what it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Changed(pub(crate) usize);
