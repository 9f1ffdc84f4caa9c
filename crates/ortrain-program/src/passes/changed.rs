//! Result of a pass.

use crate::error::ProgramError;

/// Number of changes of a pass. With 0 the program is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Changed(pub(crate) usize);

/// Result of a pass, which fails if the program cannot be compiled.
pub(crate) type Outcome = Result<Changed, ProgramError>;
