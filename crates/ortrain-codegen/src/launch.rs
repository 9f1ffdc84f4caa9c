//! Launches: kernels with their memory.

use std::sync::Arc;

use ortrain_program::PlaneId;

/// Kernel in a language, without the library functions that it calls.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelSource {
    /// Name: `k`, and 16 hexadecimal digits that depend on the text. Equal kernels have equal names.
    pub name: Arc<str>,
    /// Text.
    pub text: Arc<str>,
}

impl KernelSource {
    /// Creates a kernel from a function that prints its text for a name.
    pub(crate) fn new(print: impl Fn(&str) -> String) -> KernelSource {
        let name = format!("k{:016x}", fnv1a(print("").as_bytes()));
        KernelSource { text: print(&name).into(), name: name.into() }
    }
}

/// Returns the 64-bit hash FNV-1a (Fowler, Noll and Vo), which is the same on every machine.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Kernel with its bindings. An instruction can have several launches, which run in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Kernel.
    pub kernel: KernelSource,
    /// Number of groups, by axis.
    pub groups: [u32; 3],
    /// Memory of the kernel: item `k` is binding `k` of the source.
    pub bindings: Vec<Binding>,
    /// Position of the instruction in its program.
    pub instruction: u32,
}

/// Memory that a launch reads and writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Binding {
    /// Bytes of a memory, with a start aligned to [`ortrain_program::ALIGNMENT`]. The bindings of a launch are
    /// disjoint.
    Bytes {
        /// Memory.
        memory: MemoryId,
        /// Offset of the first byte.
        start: usize,
        /// Number of bytes.
        len: usize,
    },
    /// Scalars of the run, in words: seed, then number of train steps, each with its low word first; then the number of
    /// the run, which a fault repeats.
    Run,
    /// Words of [`Fault`].
    Fault,
    /// Constant words.
    Table(Arc<[u32]>),
}

/// Memory that launches access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MemoryId {
    /// Work arena.
    Work,
    /// Plane.
    Plane(PlaneId),
    /// Constant of the program with this index.
    Constant(usize),
    /// Values that launches of an instruction pass to its later launches.
    Scratch,
}

/// First failed guard of a run, which launches record in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Number of the run.
    pub run: u32,
    /// Position of the instruction.
    pub instruction: usize,
    /// Point of its nest, as a row-major index.
    pub point: usize,
    /// Index.
    pub index: i64,
    /// Exclusive upper bound of the index.
    pub bound: i64,
}

impl Fault {
    /// Words before a run: no failed instruction, and the maximum as smallest failed point.
    pub const NONE: [u32; 8] = [0, u32::MAX, 0, 0, 0, 0, 0, 0];

    /// Reads the fault from the words after a run.
    #[must_use]
    pub fn read(words: [u32; 8]) -> Option<Fault> {
        let [launch, point, index, index_high, bound, bound_high, run, _] = words;
        let pair = |low: u32, high: u32| (u64::from(high) << 32 | u64::from(low)) as i64;
        (launch != 0).then(|| Fault {
            run,
            instruction: launch as usize - 1,
            point: point as usize,
            index: pair(index, index_high),
            bound: pair(bound, bound_high),
        })
    }
}

/// Limits of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Maximum bytes of one binding.
    pub binding_bytes: u64,
    /// Maximum number of bindings of one kernel.
    pub bindings: u32,
    /// Maximum number of groups along an axis.
    pub groups: u32,
    /// True if a run can begin before the fault of an earlier run is read: all launches that write planes then do
    /// nothing after a fault.
    pub has_late_faults: bool,
}

/// Number of words of [`Binding::Run`].
pub const RUN_WORDS: usize = 5;

impl Caps {
    /// Minimum limits of every device: the defaults of WebGPU, section 3.6.2 of its specification.
    pub const GUARANTEED: Caps =
        Caps { binding_bytes: 128 << 20, bindings: 8, groups: 65_535, has_late_faults: false };
}

/// Program as launches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lowered {
    /// Launches, in order.
    pub launches: Vec<Launch>,
    /// Bytes of [`MemoryId::Scratch`].
    pub scratch: usize,
}

/// Error for an instruction without a kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{node}: this {instruction} instruction has no kernel: {reason}")]
pub struct Unsupported {
    /// Node.
    pub node: String,
    /// Name of the instruction.
    pub instruction: &'static str,
    /// Reason.
    pub reason: String,
}
