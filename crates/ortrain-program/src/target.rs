//! Description of the target machine for passes.

/// Properties of the target machine, which a backend passes to the compiler.
///
/// Targets with equal [`FusionWeights`] have the same fusion and order of instructions: the other fields choose
/// layouts, packing and sizes only. The numbers describe a kind of machine and never the current machine, so a program
/// depends on shapes alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Target {
    /// Conditions for packing weights into panels before products read them; `None` if weights are never packed.
    pub panels: Option<Panels>,
    /// Conditions for running two convolutions on parts of a batch; `None` if smaller intermediate results are not
    /// cheaper.
    pub batch_tiles: Option<BatchTiles>,
    /// Minimum number of elements of a mask that is packed into bits. A smaller mask costs less than the two additional
    /// instructions.
    pub min_mask_elements: usize,
    /// Weights for fusion decisions.
    pub weights: FusionWeights,
    /// Speeds for rematerialization decisions.
    pub speed: Speed,
}

/// Conditions for packing a matrix into panels: many products of few rows read the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Panels {
    /// Columns of a panel, equal to the columns of a register block.
    pub columns: usize,
    /// Minimum and maximum number of rows of the products. Products with fewer rows use no register blocks. Products
    /// with more rows are long enough to pack the matrix each time.
    pub rows: (usize, usize),
    /// Minimum number of products that read a packed matrix. Packing takes about as long as one product.
    pub min_products: usize,
    /// Minimum number of elements of a packed matrix. A smaller matrix stays in the first-level cache.
    pub min_elements: usize,
}

/// Conditions for running two convolutions on a few images of a batch at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchTiles {
    /// Minimum bytes of the intermediate result. A smaller result fits a cache as it is.
    pub min_intermediate_bytes: usize,
    /// Minimum bytes of a part.
    pub min_part_bytes: usize,
    /// Divisor for the size of a filter: its bytes are at most the bytes of a part divided by this number. Every part
    /// packs the filter again.
    pub filter_divisor: usize,
    /// Divisor for the saving: the arena must shrink by at least its size divided by this number.
    pub saving_divisor: usize,
}

/// Weights of the work of an instruction, in bytes of memory traffic. Other work counts as the bytes that memory could
/// move in the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusionWeights {
    /// Start of an instruction.
    pub instruction_start: u64,
    /// Step from one evenly strided run of elements to the next, for each load and store.
    pub run_step: u64,
    /// Divisor for the weight of a step between runs of a single element.
    pub single_element_divisor: u64,
    /// Maximum bytes of a row's loads that stay in the second-level cache for a later pass over the row.
    pub max_cached_row_bytes: u64,
    /// Minimum number of rows for parallelism over rows. With fewer rows, threads split each row, and a pass covers all
    /// rows.
    pub min_parallel_rows: u64,
    /// Divisor for the weight of a byte that is read again from the cache.
    pub cached_read_divisor: u64,
}

/// Approximate speeds of the machine. Only their ratio matters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Floating-point operations per second.
    pub flops_per_second: f64,
    /// Bytes read or written per second.
    pub bytes_per_second: f64,
}

impl FusionWeights {
    /// Weights of a typical core with its share of the memory bandwidth. Targets with equal fusion share these weights.
    pub const CPU_CORE: FusionWeights = FusionWeights {
        instruction_start: 8 << 10,
        run_step: 64,
        single_element_divisor: 4,
        max_cached_row_bytes: 1 << 20,
        min_parallel_rows: 16,
        cached_read_divisor: 4,
    };
}

impl Target {
    /// Processor with vector registers and a cache for each core.
    pub const CPU: Target = Target {
        panels: Some(Panels { columns: 16, rows: (9, 64), min_products: 8, min_elements: 1 << 13 }),
        batch_tiles: Some(BatchTiles {
            min_intermediate_bytes: 4 << 20,
            min_part_bytes: 1 << 20,
            filter_divisor: 4,
            saving_divisor: 16,
        }),
        ..Target::PLAIN
    };

    /// Machine that reads weights and batches without repacking.
    pub const PLAIN: Target = Target {
        panels: None,
        batch_tiles: None,
        min_mask_elements: 4096,
        weights: FusionWeights::CPU_CORE,
        speed: Speed { flops_per_second: 1e11, bytes_per_second: 2e10 },
    };
}

impl Default for Target {
    /// Returns [`Target::CPU`], the most common target.
    fn default() -> Target {
        Target::CPU
    }
}
