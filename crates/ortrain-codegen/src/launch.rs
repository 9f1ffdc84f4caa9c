//! Launches: kernels, and the memory that they work on.

use std::sync::Arc;

use ortrain_program::PlaneId;

/// A kernel and what it runs on. Several launches may belong to one instruction; they run in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The source of the kernel. Equal sources are one kernel.
    pub source: Arc<str>,
    /// The number of groups, by axis.
    pub groups: [u32; 3],
    /// The memory of the kernel: binding `k` of the source is the one at `k`.
    pub bindings: Vec<Binding>,
    /// The place of the instruction in its program.
    pub instruction: u32,
}

/// Memory that a launch reads and writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Binding {
    /// Bytes of a memory; the first one is at a multiple of [`ortrain_program::ALIGNMENT`]. No two of a launch share bytes.
    Bytes {
        /// The memory.
        home: Home,
        /// The first byte.
        start: usize,
        /// The number of bytes.
        len: usize,
    },
    /// The scalars of the run, in words: the seed, the number of train steps, the low word of each first.
    Run,
    /// The words of [`Fault`].
    Fault,
    /// These words.
    Table(Arc<[u32]>),
}

/// A memory that launches work on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Home {
    /// The work arena.
    Work,
    /// A plane.
    Plane(PlaneId),
    /// The program's constant of this number.
    Constant(usize),
    /// Values that launches of an instruction hand to later ones of it.
    Scratch,
}

/// The first guard of a run that failed, as launches leave it in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The place of the instruction.
    pub instruction: usize,
    /// The point of its nest, counted row-major.
    pub point: usize,
    /// The index.
    pub index: i64,
    /// Its exclusive upper bound.
    pub bound: i64,
}

impl Fault {
    /// The words before a run: no instruction has failed, and no point is the least that has.
    pub const NONE: [u32; 8] = [0, u32::MAX, 0, 0, 0, 0, 0, 0];

    /// The fault that the words hold after a run.
    #[must_use]
    pub fn read(words: [u32; 8]) -> Option<Fault> {
        let [number, point, index, index_high, bound, bound_high, ..] = words;
        let pair = |low: u32, high: u32| (u64::from(high) << 32 | u64::from(low)) as i64;
        (number != 0).then(|| Fault {
            instruction: number as usize - 1,
            point: point as usize,
            index: pair(index, index_high),
            bound: pair(bound, bound_high),
        })
    }
}

/// The limits of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Bytes of one binding, at most.
    pub binding_bytes: u64,
    /// Bindings of one kernel, at most.
    pub bindings: u32,
    /// Groups along an axis, at most.
    pub groups: u32,
}

impl Caps {
    /// The limits that every device has at least: the defaults of WebGPU, section 3.6.2 of its specification.
    pub const GUARANTEED: Caps = Caps { binding_bytes: 128 << 20, bindings: 8, groups: 65_535 };
}

/// A program as launches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lowered {
    /// The launches, in order.
    pub launches: Vec<Launch>,
    /// Bytes of [`Home::Scratch`].
    pub scratch: usize,
}

/// An instruction that cannot be printed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{node}: this {instruction} instruction has no kernel: {reason}")]
pub struct Unsupported {
    /// The node.
    pub node: String,
    /// The instruction.
    pub instruction: &'static str,
    /// Why not.
    pub reason: String,
}
