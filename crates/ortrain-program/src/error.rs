//! Errors of program compilation.

use crate::instruction::Instruction;

/// Error of program compilation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProgramError {
    /// An instruction that a backend could not run safely: a bug in a lowering or in a pass.
    #[error("{node} was lowered to an invalid {instruction} instruction: {fault}")]
    Faulty {
        /// Node.
        node: String,
        /// Name of the instruction.
        instruction: &'static str,
        /// Fault.
        fault: String,
    },
    /// A pass moved a write to state, or to a result, after a later write: a bug in the pass.
    #[error("{label:?} would not have its last value at the end of the program")]
    LostUpdate {
        /// Value.
        label: String,
    },
    /// A size that exceeds the address space.
    #[error("the buffer for {label:?} is too large to address")]
    TooLarge {
        /// Value.
        label: String,
    },
    /// A pass produced an invalid program: a bug in the pass.
    #[error("the pass {pass} produced an invalid program: {source}")]
    InvalidPass {
        /// Pass.
        pass: &'static str,
        /// Fault.
        source: Box<ProgramError>,
    },
    /// `ORTRAIN_PASSES` excludes passes that do not exist or that programs need.
    #[error(
        "ORTRAIN_PASSES: unknown entry {name:?}; expected names of optional passes, each after a -: {known}"
    )]
    UnknownPass {
        /// Name in the variable.
        name: String,
        /// Names of the optional passes.
        known: String,
    },
}

impl ProgramError {
    /// Creates an error for the faulty instruction of a node.
    pub(crate) fn faulty(node: &str, instruction: &Instruction, fault: String) -> ProgramError {
        ProgramError::Faulty { node: node.to_owned(), instruction: instruction.name(), fault }
    }
}
