//! Why a run fails.

use std::fmt;

use ortrain_expr::{DType, OutOfRange, index_of};

use crate::scheduled::ScheduledInstruction;
use crate::{AllocationError, DeviceError, OutOfMemory};

/// What a run takes, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryNeed {
    /// Parameters and gradients.
    pub held: usize,
    /// Constants of the program.
    pub constants: usize,
    /// The work arena: inputs, values, outputs.
    pub work: usize,
    /// What kernels use while they run.
    pub scratch: usize,
    /// Values that pass between the segments of a schedule.
    pub between: usize,
}

impl MemoryNeed {
    /// All of it.
    #[must_use]
    pub fn total(&self) -> usize {
        let parts = [self.held, self.constants, self.work, self.scratch, self.between];
        parts.into_iter().fold(0, usize::saturating_add)
    }
}

/// A buffer, as an error names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LargeBuffer {
    /// The value.
    pub label: String,
    /// The element type.
    pub dtype: DType,
    /// The number of elements.
    pub elements: usize,
    /// The size.
    pub bytes: usize,
}

/// A run that would take more memory than it may.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverLimit {
    /// The most that it may take.
    pub limit: usize,
    /// What it would take.
    pub need: MemoryNeed,
    /// Its largest buffers, the largest first.
    pub largest: Vec<LargeBuffer>,
}

impl OverLimit {
    /// What it takes, a limit that is enough, and the largest buffers, without what helps.
    #[must_use]
    pub fn describe(&self) -> String {
        let MemoryNeed { held, constants, work, scratch, between } = self.need;
        let parts = [
            (held, "parameters and gradients"),
            (constants, "constants"),
            (work, "values of a step"),
            (scratch, "scratch of kernels"),
            (between, "values between segments"),
        ];
        let parts = parts.iter().filter(|(bytes, _)| *bytes > 0);
        let parts: Vec<String> = parts.map(|(bytes, what)| format!("{bytes} {what}")).collect();
        let mut text = format!(
            "this takes {} bytes of memory ({}), but memory_limit is {}",
            self.need.total(),
            parts.join(", "),
            self.limit
        );
        let largest = self.largest.iter().map(|LargeBuffer { label, dtype, elements, bytes }| {
            format!("{label:?} ({elements} {dtype}, {bytes} bytes)")
        });
        let largest: Vec<String> = largest.collect();
        if !largest.is_empty() {
            text += &format!("; the largest buffers are {}", largest.join(", "));
        }
        text
    }
}

impl fmt::Display for OverLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe())?;
        if self.need.held + self.need.constants < self.limit {
            f.write_str("; a smaller batch needs less")
        } else {
            f.write_str("; this model does not fit at any batch size")
        }
    }
}

/// Where an index stands, as part of a sentence.
#[must_use]
pub fn place(at: &[usize]) -> String {
    match at {
        [] => String::new(),
        [row] => format!(" in row {row}"),
        _ => format!(" at {at:?}"),
    }
}

/// Why a run failed. Nothing was committed: state is as it was before the run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// An index outside its range: a class label, a row of an embedding.
    #[error("{node}: index {index}{} is out of range for {bound} entries (0 to {})", place(.at), .bound - 1)]
    IndexOutOfRange {
        /// The node.
        node: String,
        /// The position of the index in the tensor of indices, by axis.
        at: Vec<usize>,
        /// The index.
        index: i64,
        /// The number of entries.
        bound: i64,
    },
    /// A plane is smaller than the program needs, or absent.
    #[error("plane {plane} has {found} bytes but the program needs {needed}")]
    Plane {
        /// The plane.
        plane: u32,
        /// Bytes needed.
        needed: usize,
        /// Bytes there are.
        found: usize,
    },
    /// A plane that the program writes is memory that was lent for reading.
    #[error("plane {plane} is written, but it lies in memory that is read-only")]
    ReadOnly {
        /// The plane.
        plane: u32,
    },
    /// A plane that was lent starts where its elements cannot be reached.
    #[error("plane {plane} lies at an address that is no multiple of the size of its elements")]
    Unaligned {
        /// The plane.
        plane: u32,
    },
    /// The memory that the plan asks for is not there.
    #[error("the step needs more memory than there is: {0}; a smaller batch needs less")]
    Memory(AllocationError),
    /// The device of planes and values failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The plan asks for more memory than the run may take. Nothing was allocated.
    #[error("{0}")]
    OverLimit(Box<OverLimit>),
    /// A host function failed.
    #[error("{node}: {message}")]
    Host {
        /// The node.
        node: String,
        /// What went wrong.
        message: String,
    },
    /// A loop that did not end.
    #[error(
        "{node}: it still runs after {limit} iterations, which is iteration_limit; if it is not endless, raise the limit"
    )]
    Iterations {
        /// The node.
        node: String,
        /// The limit.
        limit: u64,
    },
    /// A value in a loop that grows from iteration to iteration.
    #[error(
        "{node}: iteration {iteration} makes {value:?} {bytes} bytes large, and it grows from iteration to iteration; \
         {most} bytes are the most without a limit; if it is to be as large, set memory_limit"
    )]
    Growing {
        /// The node.
        node: String,
        /// The value.
        value: String,
        /// The iteration, counted from zero.
        iteration: u64,
        /// What the value takes.
        bytes: usize,
        /// What it may take.
        most: usize,
    },
    /// Somebody asked for its end.
    #[error("the run was interrupted; nothing has changed")]
    Interrupted,
    /// A branch was taken that cannot be run.
    #[error("{node} takes its {branch}, which cannot be run on these inputs: {message}")]
    Branch {
        /// The node.
        node: String,
        /// The branch.
        branch: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// A program could not be specialised when its shapes became known.
    #[error("{0}")]
    Specialise(String),
    /// A run as a whole of what is run in two parts.
    #[error(
        "{node} hands over to the caller, who runs the model forward and then backward; it cannot be run as a whole"
    )]
    Yield {
        /// The node.
        node: String,
    },
    /// A run in two parts of what has one.
    #[error(
        "nothing in the model hands over to the caller, so that it cannot be run forward and then backward"
    )]
    NoYield,
}

impl RunError {
    /// Makes errors of sentences about a node that runs on the host.
    pub(crate) fn about(node: &str) -> impl Fn(String) -> RunError + '_ {
        move |message| RunError::Host { node: node.to_owned(), message }
    }

    /// What a guard of an instruction that failed is to the user.
    #[must_use]
    pub fn out_of_range(scheduled: &ScheduledInstruction, failure: OutOfRange) -> RunError {
        let dims = scheduled.instruction.nest().map_or(&[][..], |nest| nest.dims.as_slice());
        let at = index_of(failure.point, dims);
        let node = scheduled.node.to_string();
        RunError::IndexOutOfRange { node, at, index: failure.index, bound: failure.bound }
    }
}

impl From<AllocationError> for RunError {
    /// A device that failed is no lack of memory.
    fn from(error: AllocationError) -> RunError {
        match error {
            AllocationError::Device(failed) => RunError::Device(failed),
            lack => RunError::Memory(lack),
        }
    }
}

impl From<OutOfMemory> for RunError {
    fn from(error: OutOfMemory) -> RunError {
        RunError::Memory(error.into())
    }
}
