//! What a pass says that it did.

use crate::error::ProgramError;

/// The number of changes that a pass has made. With 0 the program is what it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Changed(pub(crate) usize);

/// What becomes of a draft: the pass may find that its program cannot be made.
pub(crate) type Outcome = Result<Changed, ProgramError>;
