//! What passes know of the machine that a program is for.

/// What a backend says of its machine to the passes that make a program for it.
///
/// What is fused, and in which order, is the same for every target that has the same [`FusionWeights`]: a target chooses
/// layouts, packing and sizes. Numbers depend on the kind of machine and never on the one at hand, so a program depends on
/// shapes alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Target {
    /// Which weights are laid in panels before products read them; `None` where products read them as they lie.
    pub panels: Option<Panels>,
    /// When batches go through two convolutions in parts; `None` where intermediate results do not become cheaper by that.
    pub batch_tiles: Option<BatchTiles>,
    /// Elements of a mask, at least, that is packed into bits: two more instructions cost more than a smaller one takes.
    pub least_mask: usize,
    /// By what fusion decides.
    pub weights: FusionWeights,
    /// By what rematerialization decides.
    pub speed: Speed,
}

/// Which matrices are laid in panels: those that many products of few rows read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Panels {
    /// Columns of a panel: those of a block that is summed up in registers.
    pub columns: usize,
    /// Rows of the products, from and to: fewer are multiplied without such blocks, with more it pays to pack each time.
    pub rows: (usize, usize),
    /// Products that a matrix is laid out for, at least: that takes about as long as one of them.
    pub products: usize,
    /// Elements of a matrix that is laid out, at least: a smaller one stays in the first-level cache.
    pub elements: usize,
}

/// When a batch goes through two convolutions a few images at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchTiles {
    /// Bytes of a result in between, at least: smaller ones fit a cache as they are.
    pub least: usize,
    /// Bytes of a part, at least.
    pub part: usize,
    /// A filter, which every part packs anew, is at most this share of a part.
    pub filter: usize,
    /// The arena must become smaller by one part in so many.
    pub worth: usize,
}

/// Weights of what an instruction does, in bytes of memory traffic: what else takes time is said as the number of bytes
/// that could be moved meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusionWeights {
    /// Starting an instruction.
    pub start: u64,
    /// One step from an evenly spaced run of elements to the next, for each load and store.
    pub run: u64,
    /// A step weighs one part in so many where the run is of one element.
    pub same: u64,
    /// Bytes of the loads of a row that stay in the second-level cache, so that a later pass over it finds them there.
    pub row_in_cache: u64,
    /// With fewer rows than this the rows themselves are split between threads, and a pass is over all of them.
    pub few_rows: u64,
    /// Reading a byte of a row again from the cache weighs one part in so many of reading it from memory.
    pub cached: u64,
}

/// What a machine does in a second, roughly: only the ratio of the two decides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes read or written.
    pub bytes: f64,
}

impl FusionWeights {
    /// An ordinary core with its share of the memory. Targets that are to fuse the same have these.
    pub const ORDINARY: FusionWeights = FusionWeights {
        start: 8 << 10,
        run: 64,
        same: 4,
        row_in_cache: 1 << 20,
        few_rows: 16,
        cached: 4,
    };
}

impl Target {
    /// A processor with vector registers and a cache for each core.
    pub const CPU: Target = Target {
        panels: Some(Panels { columns: 16, rows: (9, 64), products: 8, elements: 1 << 13 }),
        batch_tiles: Some(BatchTiles { least: 4 << 20, part: 1 << 20, filter: 4, worth: 16 }),
        ..Target::PLAIN
    };

    /// A machine that reads weights and batches as they lie.
    pub const PLAIN: Target = Target {
        panels: None,
        batch_tiles: None,
        least_mask: 4096,
        weights: FusionWeights::ORDINARY,
        speed: Speed { flops: 1e11, bytes: 2e10 },
    };
}

impl Default for Target {
    /// [`Target::CPU`]: most programs run there.
    fn default() -> Target {
        Target::CPU
    }
}
