//! Why a program cannot be made.

use crate::instruction::Instruction;

/// Why a program cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProgramError {
    /// An instruction that a backend could not run safely: a mistake in a lowering or in what became of it.
    #[error("{node} was lowered to a faulty {instruction} instruction: {fault}")]
    Faulty {
        /// The node.
        node: String,
        /// The instruction.
        instruction: &'static str,
        /// What is wrong.
        fault: String,
    },
    /// A pass has put a write to state, or to a result, behind a later one: a mistake of the pass.
    #[error("{label:?} would not hold the last of its updates at the end of the program")]
    LostUpdate {
        /// The value.
        label: String,
    },
    /// More memory than can be addressed.
    #[error("the buffer for {label:?} is too large to address")]
    TooLarge {
        /// The value.
        label: String,
    },
    /// A pass has made a program that is none: a mistake of the pass.
    #[error("the pass {pass} made a program that cannot run: {source}")]
    InvalidPass {
        /// The pass.
        pass: &'static str,
        /// What is wrong.
        source: Box<ProgramError>,
    },
    /// Passes are to be left out that are not there, or that programs need.
    #[error("ORTRAIN_PASSES names {name:?}; it takes names of optional passes with a - in front: {known}")]
    UnknownPass {
        /// The name.
        name: String,
        /// The names of the optional passes.
        known: String,
    },
}

impl ProgramError {
    /// The fault of an instruction that a node was lowered to.
    pub(crate) fn faulty(node: &str, instruction: &Instruction, fault: String) -> ProgramError {
        ProgramError::Faulty { node: node.to_owned(), instruction: instruction.name(), fault }
    }
}
