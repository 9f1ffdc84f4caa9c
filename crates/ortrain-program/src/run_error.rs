//! Errors of runs.

use std::fmt;

use ortrain_expr::{DType, OutOfRange, index_of};

use crate::scheduled::ScheduledInstruction;
use crate::{AllocationError, DeviceError, LateFault, OutOfMemory};

/// Memory requirement of a run, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryNeed {
    /// Parameters and gradients.
    pub state: usize,
    /// Constants of the program.
    pub constants: usize,
    /// Work arena: inputs, values, outputs.
    pub work: usize,
    /// Temporary memory of kernels.
    pub scratch: usize,
    /// Values between the segments of a schedule.
    pub intermediates: usize,
}

impl MemoryNeed {
    /// Returns the sum of all parts.
    #[must_use]
    pub fn total(&self) -> usize {
        let parts = [self.state, self.constants, self.work, self.scratch, self.intermediates];
        parts.into_iter().fold(0, usize::saturating_add)
    }
}

/// Buffer in an error message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LargeBuffer {
    /// Value.
    pub label: String,
    /// Element type.
    pub dtype: DType,
    /// Number of elements.
    pub elements: usize,
    /// Size in bytes.
    pub bytes: usize,
}

/// Run that would exceed the memory limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverLimit {
    /// Memory limit in bytes.
    pub limit: usize,
    /// Memory requirement of the run.
    pub need: MemoryNeed,
    /// Largest buffers, in descending order.
    pub largest: Vec<LargeBuffer>,
}

impl OverLimit {
    /// Describes the requirement, the limit, and the largest buffers, without advice.
    #[must_use]
    pub fn describe(&self) -> String {
        let MemoryNeed { state: state_bytes, constants, work, scratch, intermediates: intermediate_bytes } =
            self.need;
        let parts = [
            (state_bytes, "parameters and gradients"),
            (constants, "constants"),
            (work, "values of a step"),
            (scratch, "scratch of kernels"),
            (intermediate_bytes, "values between segments"),
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
        if self.need.state + self.need.constants < self.limit {
            f.write_str("; a smaller batch needs less")
        } else {
            f.write_str("; this model does not fit at any batch size")
        }
    }
}

/// Formats the position of an index as part of a sentence.
#[must_use]
pub fn describe_position(at: &[usize]) -> String {
    match at {
        [] => String::new(),
        [row] => format!(" in row {row}"),
        _ => format!(" at {at:?}"),
    }
}

/// Error of a run. A failed run commits nothing: the state equals the state before the run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// Index out of range: for example a class label, or a row of an embedding.
    #[error("{node}: index {index}{} is out of range for {bound} entries (0 to {})", describe_position(.at), .bound - 1)]
    IndexOutOfRange {
        /// Node.
        node: String,
        /// Position of the index in the index tensor, by axis.
        at: Vec<usize>,
        /// Index.
        index: i64,
        /// Number of entries.
        bound: i64,
    },
    /// A plane is missing or smaller than the program needs.
    #[error("plane {plane} has {found} bytes but the program needs {needed}")]
    Plane {
        /// Plane.
        plane: u32,
        /// Required bytes.
        needed: usize,
        /// Available bytes.
        found: usize,
    },
    /// The program writes a plane in borrowed read-only memory.
    #[error("plane {plane} must be writable, but its memory is read-only")]
    ReadOnly {
        /// Plane.
        plane: u32,
    },
    /// A borrowed plane starts at an address that does not align its elements.
    #[error("the address of plane {plane} is not a multiple of its element size")]
    Unaligned {
        /// Plane.
        plane: u32,
    },
    /// The memory of the plan is not available.
    #[error("the step needs more memory than is available: {0}; a smaller batch needs less")]
    Memory(AllocationError),
    /// The device of planes and values failed.
    #[error(transparent)]
    Device(DeviceError),
    /// The plan exceeds the memory limit of the run. Nothing was allocated.
    #[error("{0}")]
    OverLimit(Box<OverLimit>),
    /// A host function failed.
    #[error("{node}: {message}")]
    Host {
        /// Node.
        node: String,
        /// Message of the function.
        message: String,
    },
    /// A loop exceeded the iteration limit.
    #[error(
        "{node}: the loop still runs after {limit} iterations, the iteration_limit; raise the limit if the loop is \
         not endless"
    )]
    Iterations {
        /// Node.
        node: String,
        /// Limit.
        limit: u64,
    },
    /// A value in a loop grows from iteration to iteration beyond the limit.
    #[error(
        "{node}: {value:?} grows in every iteration and has {bytes} bytes in iteration {iteration}; \
         without memory_limit at most {max_bytes} bytes are allowed, so set memory_limit if it must be larger"
    )]
    Growing {
        /// Node.
        node: String,
        /// Value.
        value: String,
        /// Index of the iteration, from zero.
        iteration: u64,
        /// Bytes of the value.
        bytes: usize,
        /// Maximum bytes of the value.
        max_bytes: usize,
    },
    /// The caller interrupted the run.
    #[error("the run was interrupted; nothing has changed")]
    Interrupted,
    /// The gate of the run refused its changes: see [`CommitGate`](crate::CommitGate).
    #[error("{0}")]
    Refused(String),
    /// A run takes a branch that is invalid for its inputs.
    #[error("{node} takes its {branch}, which cannot be run on these inputs: {message}")]
    Branch {
        /// Node.
        node: String,
        /// Branch.
        branch: &'static str,
        /// Fault of the branch.
        message: String,
    },
    /// A program could not be specialised for the shapes of its inputs.
    #[error("{0}")]
    Specialise(String),
    /// A schedule with a yield was run as a whole.
    #[error(
        "{node} returns to the caller between the forward and the backward pass; run the two passes separately"
    )]
    Yield {
        /// Node.
        node: String,
    },
    /// A schedule without a yield was run in two parts.
    #[error(
        "no node of the model returns to the caller, so its forward and backward pass cannot run separately"
    )]
    NoYield,
}

impl RunError {
    /// Returns a function that turns messages of a host node into errors.
    pub(crate) fn host_error(node: &str) -> impl Fn(String) -> RunError + '_ {
        move |message| RunError::Host { node: node.to_owned(), message }
    }

    /// Converts a failed guard of an instruction into an error.
    #[must_use]
    pub fn out_of_range(scheduled: &ScheduledInstruction, failure: OutOfRange) -> RunError {
        let dims = scheduled.instruction.nest().map_or(&[][..], |nest| nest.dims.as_slice());
        let at = index_of(failure.point, dims);
        let node = scheduled.node.to_string();
        RunError::IndexOutOfRange { node, at, index: failure.index, bound: failure.bound }
    }
}

impl From<DeviceError> for RunError {
    /// Converts the error. A fault of an earlier run is an index out of range.
    fn from(error: DeviceError) -> RunError {
        match error.fault {
            Some(fault) => {
                let LateFault { node, at, index, bound } = *fault;
                RunError::IndexOutOfRange { node, at, index, bound }
            }
            None => RunError::Device(error),
        }
    }
}

impl From<AllocationError> for RunError {
    /// Converts the error. The failure of a device is not a lack of memory.
    fn from(error: AllocationError) -> RunError {
        match error {
            AllocationError::Device(failed) => failed.into(),
            lack => RunError::Memory(lack),
        }
    }
}

impl From<OutOfMemory> for RunError {
    fn from(error: OutOfMemory) -> RunError {
        RunError::Memory(error.into())
    }
}
