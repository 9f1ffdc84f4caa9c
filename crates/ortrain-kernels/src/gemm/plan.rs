//! Partition of a product into tasks, and packing of its operands. Depends on the description only.

use ortrain_expr::{Access, DType, Inst, Load, Nest, QuantizedMatrix, Type};

use super::byte_tiles::ByteProducts;
use super::desc::{GemmDesc, QuantizedRight};
use super::levels::Real;
use super::micro::{Micro, TileProducts};
use super::operand::{MAX_REUSED_BLOCK_BYTES, Operand, Packing, has_page_stride};
use super::quantized::QuantizedSlots;
use super::strategies::{MAX_CHUNK_DEPTH, MIN_SPLIT_K_DEPTH, Request, Strategy, candidates};
use super::tiles::Side;
use crate::candidates::choose;
use crate::isa::CACHE_LINE_BYTES;
use crate::tile::strided_iter::StridedIter;
use crate::tile::{ALIGN, Compiler, LoopOrder, LoopPlan, TileProgram};

/// Maximum depth of a chunk of dot products.
const MAX_DOT_CHUNK_DEPTH: usize = 512;
/// Maximum number of lines of one operand that dot products multiply together.
const MAX_DOT_WIDTH: usize = 4;
/// Minimum and maximum depth of a chunk of few long sums.
const SPLIT_K_CHUNK_DEPTHS: (usize, usize) = (64, 256);
/// Panels of A in a block: together with a panel of B they stay in the second-level cache.
const BLOCK_ROW_PANELS: usize = 16;
/// Columns of a block.
const BLOCK_COLUMNS: usize = 256;
/// Columns of a block if A is too long to be kept packed: each further block of columns would pack A again.
const WIDE_BLOCK_COLUMNS: usize = 1024;
/// Bytes of B that are packed at a time for all threads.
const SHARED_STRIP_BYTES: usize = 8 << 20;
/// Minimum number of multiplications of a task.
const MIN_TASK_WORK: usize = 1 << 18;
/// Maximum number of tasks: enough for any number of cores.
const MAX_TASKS: usize = 16;
/// Number of tasks below which even blocks with more operand traffic are split.
const MIN_TASKS: usize = 4;
/// Maximum number of panels of B for which A is read in place with any strides.
const MAX_B_PANELS_FOR_UNPACKED_A: usize = 2;
/// Maximum number of panels of A for which B is read in place, if columns are adjacent. The second constant is the
/// number of bytes of a row of a panel (two cache lines) from which B is read in place for any number of panels.
const MAX_A_PANELS_FOR_UNPACKED_B: usize = 10;
const MIN_UNPACKED_ROW_BYTES: usize = 2 * CACHE_LINE_BYTES;
/// Maximum number of bytes of results for a separate pass of the epilogue over all results, if blocks are narrow.
const MAX_SEPARATE_EPILOGUE_BYTES: usize = 1 << 20;
/// Number of columns below which an epilogue is inefficient, because it processes one piece of a row at a time.
const NARROW_COLUMNS: usize = 512;
/// Bytes of chunks that stay in the first-level cache beside sums.
const L1_CHUNK_BYTES: usize = 32 << 10;
/// Maximum number of elements of all partial results of split-K.
const MAX_PARTIAL_ELEMENTS: usize = 1 << 19;

/// Partition of the product, and layout of scratch memory.
#[derive(Debug)]
pub(super) struct ProductPlan {
    /// Name of the kernel.
    name: &'static str,
    pub(super) strategy: Strategy,
    pub(super) batch: usize,
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// Rows and columns of a block.
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Depth of a chunk.
    pub(super) depth: usize,
    /// Number of parts of k (split-K), each with its own tasks, and the depth of a part: whole chunks.
    pub(super) parts: usize,
    pub(super) part: usize,
    /// True if blocks are first stored in shared memory, to be summed or finished in a separate pass.
    pub(super) has_separate_epilogue: bool,
    /// Columns that are processed together: B is packed for all threads for these columns.
    pub(super) strip: usize,
    /// Axes of the blocks from the slowest to the fastest: 0 is the batch, 1 rows, 2 columns.
    pub(super) order: [usize; 3],
    /// Number of blocks of a task.
    pub(super) group: usize,
    pub(super) a: Operand,
    pub(super) b: Operand,
    pub(super) buffers: usize,
    pub(super) epilogue: TileProgram,
    /// Destination of the micro-kernel, if the epilogue only stores the product, and columns are adjacent.
    pub(super) direct: Option<DirectStore>,
    /// Bytes of shared scratch memory, and the offset of the partial results of split-K.
    pub(super) shared: usize,
    pub(super) partial_at: usize,
    /// Offsets in a worker's scratch memory of the finished block, of the block of a swapped product, and of a narrow
    /// block; and its bytes.
    pub(super) block_at: usize,
    pub(super) swapped_at: usize,
    pub(super) corner_at: usize,
    /// Offset of the decoded piece of a quantized operand.
    pub(super) decoded_at: usize,
    pub(super) bytes: usize,
}

/// Axes of the epilogue: outer axes, and the axes of the rows and columns of one product.
///
/// If results are adjacent along m, the product is transposed: `Cᵀ = Bᵀ·Aᵀ`. Batch axes that only one operand has
/// become additional lines of it, if their step continues the step of its lines.
struct Axes {
    is_transposed: bool,
    outside: Vec<usize>,
    rows: Vec<usize>,
    cols: Vec<usize>,
}

impl Axes {
    fn new(desc: &GemmDesc) -> Axes {
        let nest = &desc.epilogue;
        let axes = nest.dims.len() - 2;
        let (m, n) = (axes, axes + 1);
        let adjacent = |store: &Access, along: usize, other: usize| {
            store.strides.get(along) == Some(&1) && store.strides.get(other) != Some(&1)
        };
        let is_swapped = nest.dims[m] > 1
            && !nest.stores.is_empty()
            && nest.stores.iter().all(|store| adjacent(store, m, n));
        let mut dims_by_operand =
            Axes { is_transposed: is_swapped, outside: (0..axes).collect(), rows: vec![m], cols: vec![n] };
        while let Some(&axis) = dims_by_operand.outside.last() {
            // Tests the strides along the axis: constant, or equal to the step that continues the lines.
            let is_constant = |access: &Access| access.strides.get(axis) == Some(&0);
            let evenly = |access: &Access, lines: &[usize]| {
                let (first, dims) = (lines[0], &nest.dims[lines[0]..]);
                let even = access.strides.get(first).map(|&step| step * dims[0] as isize);
                even.is_some() && access.strides.get(axis).copied() == even
            };
            let grows = |own_access: &Access, other: &Access, lines: &[usize]| {
                is_constant(other)
                    && evenly(own_access, lines)
                    && nest.stores.iter().all(|store| evenly(store, lines))
            };
            if grows(&desc.a, &desc.b, &dims_by_operand.rows) {
                dims_by_operand.rows.insert(0, axis);
            } else if grows(&desc.b, &desc.a, &dims_by_operand.cols) {
                dims_by_operand.cols.insert(0, axis);
            } else {
                break;
            }
            dims_by_operand.outside.pop();
        }
        if is_swapped {
            std::mem::swap(&mut dims_by_operand.rows, &mut dims_by_operand.cols);
        }
        dims_by_operand
    }
}

#[derive(Debug)]
pub(super) struct DirectStore {
    pub(super) offset: isize,
    pub(super) batch: StridedIter,
    pub(super) row: isize,
}

/// Sizes of a product in the order of its panels, and the micro-kernel.
struct Sizes<T: 'static> {
    strategy: Strategy,
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
    micro: Micro<T>,
    /// True if an operand consists of packed integers.
    is_quantized: bool,
}

/// Blocks of the result, and chunks and parts of k.
struct Blocks {
    rows: usize,
    cols: usize,
    depth: usize,
    part: usize,
    parts: usize,
}

/// Offsets and bytes of scratch memory.
struct Layout {
    shared: usize,
    partial_at: usize,
    block_at: usize,
    swapped_at: usize,
    corner_at: usize,
    decoded_at: usize,
    bytes: usize,
}

impl<T: Real> Sizes<T> {
    fn is_swapped(&self) -> bool {
        self.strategy == Strategy::SwappedPanels
    }

    /// Returns true if a packed block of an operand can be kept.
    fn keeps(&self, side: Side, lines: usize, depths: usize) -> bool {
        self.micro.packed_len(side, lines, depths).saturating_mul(T::BYTES) <= MAX_REUSED_BLOCK_BYTES
    }

    /// Divides the result into blocks, and k into chunks and parts.
    fn divide(&self, splits_k: bool) -> Blocks {
        let Sizes { strategy, batch, m, n, k, micro, is_quantized } = *self;
        let (row_unit, mut depth_unit) = micro.block_units();
        if is_quantized {
            // Chunks begin with a whole group of integers.
            depth_unit = depth_unit.next_multiple_of(QuantizedMatrix::GROUP);
        }
        // All panels of the larger operand are full, except for the last one.
        let row_unit = if self.is_swapped() { micro.mr } else { row_unit };
        let mut partition = BlockPartition::new(batch, m, n, k, (micro.mr, micro.nr), row_unit);
        if splits_k && partition.tasks() < partition.target_tasks {
            partition.parts = (partition.target_tasks / partition.tasks().max(1))
                .min(k / MIN_SPLIT_K_DEPTH)
                .min(MAX_PARTIAL_ELEMENTS / (batch * m * n).max(1))
                .max(1);
        }
        if strategy == Strategy::FewRows && micro.tiles.is_some() {
            // Each row of B is on another page for every block.
            partition.target_tasks = partition.target_tasks.min(MIN_TASKS);
            partition.cols = even_block_size(n, WIDE_BLOCK_COLUMNS, micro.nr);
        }
        if partition.parts == 1 {
            if self.is_swapped() {
                partition.refine(true, false);
            } else if strategy == Strategy::Panels && !self.keeps(Side::A, partition.rows.div_ceil(2), k) {
                partition.cols = even_block_size(n, WIDE_BLOCK_COLUMNS, micro.nr);
                partition.refine(true, false);
            } else {
                let keeps_rows = matches!(strategy, Strategy::FewRows | Strategy::DotsOfRows);
                partition.refine(!keeps_rows, strategy != Strategy::DotsOfColumns);
            }
        }
        // With few long sums, a chunk of both operands stays in the first-level cache.
        let max_depth = if strategy.is_dots() {
            MAX_DOT_CHUNK_DEPTH
        } else if partition.parts > 1 {
            (L1_CHUNK_BYTES / ((m + n) * T::BYTES).max(1))
                .clamp(SPLIT_K_CHUNK_DEPTHS.0, SPLIT_K_CHUNK_DEPTHS.1)
        } else {
            MAX_CHUNK_DEPTH * T::BYTES / micro.element_bytes()
        };
        let chunks = k.div_ceil(max_depth).max(1);
        let depth = k.div_ceil(chunks).next_multiple_of(depth_unit).max(depth_unit);
        let chunks = k.div_ceil(depth).max(1);
        let part = chunks.div_ceil(partition.parts) * depth;
        let BlockPartition { rows, cols, .. } = partition;
        Blocks { rows, cols, depth, part, parts: k.div_ceil(part).max(1) }
    }

    /// Returns true if a separate pass finishes the results: after a split of k, or because blocks have short rows.
    fn needs_separate_epilogue(&self, blocks: &Blocks, is_direct: bool) -> bool {
        let Sizes { strategy, batch, m, n, .. } = *self;
        let small = (batch * m * n).saturating_mul(T::BYTES) <= MAX_SEPARATE_EPILOGUE_BYTES;
        // Length of a piece of a row of results, and of the row.
        let (piece, row) = if self.is_swapped() { (blocks.rows, m) } else { (blocks.cols, n) };
        let is_narrow = piece < row.min(NARROW_COLUMNS) && small;
        blocks.parts > 1 || !is_direct && strategy != Strategy::FewRows && is_narrow
    }

    /// Chooses the storage of both operands. Returns the number of columns of a strip.
    fn choose_packing(&self, blocks: &Blocks, a: &mut Operand, b: &mut Operand) -> usize {
        let Sizes { strategy, batch, m, n, k, micro, .. } = *self;
        let &Blocks { rows, cols, part, .. } = blocks;
        let all_columns = n.next_multiple_of(cols).max(cols);
        match strategy {
            Strategy::FewRows => all_columns,
            Strategy::DotsOfRows | Strategy::DotsOfColumns => {
                let operand = if strategy == Strategy::DotsOfRows { a } else { b };
                if !operand.is_stored_as(T::DTYPE) || operand.depth != 1 {
                    operand.packing = Packing::PerTask { full_depth: true };
                }
                all_columns
            }
            Strategy::SwappedPanels | Strategy::Panels => {
                let sizes = BlockSizes { m, n, k, batch, rows, cols, bytes: T::BYTES };
                let part = part.min(k);
                let keeps = (self.keeps(Side::A, rows, part), self.keeps(Side::B, cols, part));
                sizes.choose_packing(micro, T::DTYPE, (a, keeps.0), (b, keeps.1))
            }
        }
    }

    /// Lays out scratch memory, and assigns the operands their offsets. `tape` is the epilogue.
    fn lay_out(
        &self,
        blocks: &Blocks,
        strip: usize,
        operands: (&mut Operand, &mut Operand),
        tape: &TileProgram,
        (is_direct, is_separate): (bool, bool),
    ) -> Layout {
        let Sizes { strategy, batch, m, n, k, micro, .. } = *self;
        let &Blocks { rows, cols, depth, part, parts } = blocks;
        let mut shared = 0;
        let mut reserve_shared = |elements: usize| {
            let at = shared;
            shared += (elements * T::BYTES).next_multiple_of(ALIGN);
            at
        };
        let mut bytes = tape.frame + size_of::<PackedBlocks>().next_multiple_of(ALIGN);
        let mut reserve = |elements: usize| {
            let at = bytes;
            bytes += (elements * T::BYTES).next_multiple_of(ALIGN);
            at
        };
        let (a, b) = operands;
        // A piece of panels covers a chunk. A piece of dot products has few lines, possibly over all of k.
        let decoded_len = |operand: &Operand, panel: usize| match operand.quantized {
            Some(_) if strategy == Strategy::FewRows => 0,
            None => 0,
            Some(_) if strategy.is_dots() => operand.decoded_lines(MAX_DOT_WIDTH) * k,
            Some(_) => operand.decoded_lines(panel) * depth.min(k),
        };
        let decoded_len = decoded_len(a, micro.mr).max(decoded_len(b, micro.nr));
        if let (Strategy::FewRows, Some(TileProducts::Bytes(_))) = (strategy, micro.tiles) {
            a.at = reserve(micro.packed_len(Side::A, micro.mr, k));
            b.at = reserve(ByteProducts::small_m_scratch(cols, k).div_ceil(T::BYTES));
        } else if strategy == Strategy::FewRows {
            a.at = reserve(m * k);
            b.at = reserve(if b.quantized.is_some() { m * k } else { 0 });
        } else {
            let (rows, cols) = (rows.next_multiple_of(micro.mr), cols.next_multiple_of(micro.nr));
            for (operand, side, lines) in [(a, Side::A, rows), (b, Side::B, cols)] {
                operand.at = match operand.packing {
                    Packing::PerTask { full_depth: true } => {
                        reserve(micro.packed_len(side, lines, part.min(k)))
                    }
                    Packing::PerTask { full_depth: false } => {
                        reserve(micro.packed_len(side, lines, depth.min(k)))
                    }
                    // Even if B is read in place, its last, narrow panel is packed.
                    Packing::InPlace => reserve(micro.nr * depth.min(k)),
                    Packing::Shared => {
                        let copies = if operand.batch.is_constant() { 1 } else { batch };
                        reserve_shared(copies * micro.packed_len(side, strip, k))
                    }
                };
            }
        }
        let partial_at = reserve_shared(if is_separate { parts * batch * m * n } else { 0 });
        let block = if is_direct && strategy != Strategy::FewRows { 0 } else { rows * cols };
        let block_at = reserve(if is_separate { tape.tile } else { block });
        let swapped_at = reserve(if self.is_swapped() { rows * cols } else { 0 });
        let corner_at = reserve(micro.mr * micro.nr);
        let decoded_at = reserve(decoded_len);
        Layout { shared, partial_at, block_at, swapped_at, corner_at, decoded_at, bytes }
    }
}

/// Returns the order of the axes of blocks. An operand that tasks pack for themselves has its axis in an outer loop: each
/// packed block is then used by all blocks of the other operand.
fn order_axes(a: &Operand, b: &Operand) -> [usize; 3] {
    match (a.packing, b.packing) {
        (_, Packing::PerTask { .. }) if b.batch.is_constant() => [2, 0, 1],
        (_, Packing::PerTask { .. }) => [0, 2, 1],
        (Packing::PerTask { .. }, _) if a.batch.is_constant() => [1, 0, 2],
        _ => [0, 1, 2],
    }
}

/// Returns the number of axes before rows and columns, if the epilogue has the form that products need.
fn count_outer_axes(nest: &Nest, real: DType) -> Result<usize, String> {
    let Some(axes) = nest.dims.len().checked_sub(2) else {
        return Err("a product needs at least two axes".to_owned());
    };
    if nest.inner != 0 {
        return Err("an epilogue cannot reduce".to_owned());
    }
    if nest.loads.first() != Some(&Load::Accumulator(real)) || nest.num_accumulators() != 1 {
        return Err(format!("the accumulator of the epilogue must be the product, of type {real}"));
    }
    Ok(axes)
}

impl ProductPlan {
    pub(super) fn new<T: Real>(
        desc: &GemmDesc,
        compiler: Compiler<'_>,
    ) -> Result<(ProductPlan, Micro<T>), String> {
        let (isa, nest) = (compiler.isa(), &desc.epilogue);
        let axes = count_outer_axes(nest, T::DTYPE)?;
        let Axes { is_transposed, outside, rows, cols } = Axes::new(desc);
        let k = desc.k;
        let size = |list: &[usize]| list.iter().map(|&axis| nest.dims[axis]).product::<usize>();
        let (batch, m, n) = (size(&outside), size(&rows), size(&cols));
        let along = [rows.as_slice(), &cols].concat();
        let plan = LoopPlan { nest, loop_order: LoopOrder::Map, outer_axes: &outside, tile_axes: &along };
        let tape = TileProgram::new(&plan, compiler)?;
        let mut of_a = Operand::new((&desc.a, desc.rounded_to[0], 0), nest, k, &outside, (axes, axes + 1))?;
        let mut of_b = Operand::new((&desc.b, desc.rounded_to[1], 1), nest, k, &outside, (axes + 1, axes))?;
        let buffers = 1 + nest.loads.len() + nest.stores.len();
        let quantized_buffers =
            desc.quantized.map_or(0, |quantized| 1 + usize::from(quantized.has_zero_points));
        of_b.quantized = desc.quantized.map(|QuantizedRight { matrix, has_zero_points }| QuantizedSlots {
            matrix,
            scales: buffers,
            zero_points: has_zero_points.then_some(buffers + 1),
        });
        let mut next = buffers + quantized_buffers;
        let operands = [(&mut of_a, (axes, axes + 1)), (&mut of_b, (axes + 1, axes))];
        for ((operand, axes), access) in operands.into_iter().zip(&desc.zero_points) {
            if let Some(access) = access {
                operand.set_zero_points((access, next), nest, k, &outside, axes)?;
                next += 1;
            }
        }
        let (mut a, mut b) = if is_transposed { (of_b, of_a) } else { (of_a, of_b) };
        let micro: Micro<T> =
            Micro::select(isa, desc.products, [&a, &b].map(|operand| operand.elements.loaded_dtype()));

        let request = Request { batch, m, n, k, a: &a, b: &b, micro, isa };
        let (name, strategy) = choose(&candidates::<T>(), &request, compiler.kernels())?;
        let splits_k = strategy != Strategy::FewRows && request.may_split_k();
        let is_quantized = desc.quantized.is_some();
        let mut sizes = Sizes { strategy, batch, m, n, k, micro, is_quantized };
        let mut direct =
            direct_store(nest, &outside, if is_transposed { (axes + 1, axes) } else { (axes, axes + 1) })?;
        if sizes.is_swapped() {
            std::mem::swap(&mut a, &mut b);
            std::mem::swap(&mut sizes.m, &mut sizes.n);
            direct = None;
        }
        let blocks = sizes.divide(splits_k);
        let is_separate = sizes.needs_separate_epilogue(&blocks, direct.is_some());
        if is_separate {
            direct = None;
        }
        let strip = sizes.choose_packing(&blocks, &mut a, &mut b);
        let uses = (direct.is_some(), is_separate);
        let layout = sizes.lay_out(&blocks, strip, (&mut a, &mut b), &tape, uses);
        let Sizes { m, n, .. } = sizes;
        let Blocks { rows, cols, depth, part, parts } = blocks;
        let Layout { shared, partial_at, block_at, swapped_at, corner_at, decoded_at, bytes } = layout;
        let work = (rows.min(m) * cols.min(n)).saturating_mul(part.min(k)).max(1);
        let plan = ProductPlan {
            name,
            strategy,
            batch,
            m,
            n,
            k,
            rows,
            cols,
            depth,
            parts,
            part,
            has_separate_epilogue: is_separate,
            strip,
            order: order_axes(&a, &b),
            group: (MIN_TASK_WORK / 2 / work).max(1),
            a,
            b,
            buffers: next,
            epilogue: tape,
            direct,
            shared,
            partial_at,
            block_at,
            swapped_at,
            corner_at,
            decoded_at,
            bytes,
        };
        Ok((plan, micro))
    }
}

impl ProductPlan {
    /// Describes the kernel: its name, the micro-kernel, the packing of the operands, the split of k, and the epilogue.
    pub(super) fn describe<T>(&self, micro: &Micro<T>) -> String {
        let mut text = self.name.to_owned();
        if self.strategy.is_panels() {
            let [a, b] = [&self.a, &self.b].map(|operand| operand.packing.describe());
            text += &format!(", {}x{}, A {a}, B {b}", micro.mr, micro.nr);
        }
        if self.parts > 1 {
            text += &format!(", split-K in {} parts", self.parts);
        }
        text + match (&self.direct, self.has_separate_epilogue) {
            (Some(_), _) => ", sums stored directly",
            (None, true) => ", epilogue after all blocks",
            (None, false) => ", epilogue after each block",
        }
    }
}

/// A product of panels, and its blocks.
struct BlockSizes {
    m: usize,
    n: usize,
    k: usize,
    batch: usize,
    rows: usize,
    cols: usize,
    /// Bytes of an element.
    bytes: usize,
}

impl BlockSizes {
    /// Chooses the storage of A and B for the micro-kernels. The flags are true if a packed block of the operand can be
    /// kept. Returns the number of columns of a strip.
    fn choose_packing<T: Real>(
        &self,
        micro: Micro<T>,
        real: DType,
        (a, a_full_depth): (&mut Operand, bool),
        (b, b_full_depth): (&mut Operand, bool),
    ) -> usize {
        let &BlockSizes { m, n, k, batch, rows, cols, bytes } = self;
        let Micro { mr, nr, tiles, .. } = micro;
        let packs = |operand: &Operand| !operand.is_stored_as(real) || tiles.is_some();
        if packs(a) || n.div_ceil(nr) > MAX_B_PANELS_FOR_UNPACKED_A && !a.is_adjacent_along_k(real) {
            a.packing = Packing::PerTask { full_depth: a_full_depth };
        }
        let mut strip = n.next_multiple_of(cols).max(cols);
        let many_rows = m.div_ceil(mr) > MAX_A_PANELS_FOR_UNPACKED_B && nr * bytes < MIN_UNPACKED_ROW_BYTES
            || m > mr && has_page_stride(b.depth, bytes, 8192);
        if packs(b) || b.line != 1 || many_rows {
            let repacks = m.div_ceil(rows) > 1 || batch > 1 && b.batch.is_constant();
            let copies = if b.batch.is_constant() { 1 } else { batch };
            let column = micro.packed_len(Side::B, 1, k).saturating_mul(copies * bytes);
            let strip_len = SHARED_STRIP_BYTES / column.max(1) / cols * cols;
            b.packing = Packing::PerTask { full_depth: b_full_depth };
            if repacks
                && b.quantized.is_none()
                && (strip_len >= n || copies == 1 && strip_len >= 2 * BLOCK_COLUMNS)
            {
                b.packing = Packing::Shared;
                strip = strip.min(strip_len.max(cols));
            }
        }
        strip
    }
}

/// Partition of the product into blocks.
struct BlockPartition {
    sizes: [usize; 3],
    units: (usize, usize),
    /// The number of rows of a block is a multiple of this.
    row_unit: usize,
    rows: usize,
    cols: usize,
    parts: usize,
    target_tasks: usize,
}

impl BlockPartition {
    /// Creates the partition into the largest blocks.
    fn new(
        batch: usize,
        m: usize,
        n: usize,
        k: usize,
        (mr, nr): (usize, usize),
        row_unit: usize,
    ) -> BlockPartition {
        let work = (batch * m * n).saturating_mul(k);
        BlockPartition {
            sizes: [batch, m, n],
            units: (mr, nr),
            row_unit,
            rows: even_block_size(m, mr * BLOCK_ROW_PANELS, row_unit),
            cols: even_block_size(n, BLOCK_COLUMNS, nr),
            parts: 1,
            target_tasks: (work / MIN_TASK_WORK).clamp(1, MAX_TASKS),
        }
    }

    fn tasks(&self) -> usize {
        let [batch, m, n] = self.sizes;
        batch * m.div_ceil(self.rows) * n.div_ceil(self.cols)
    }

    /// Halves blocks until there are enough tasks. Blocks stay so large that the traffic of their operands is small,
    /// unless there are very few tasks. Rows of a block are not whole panels: equal work matters more than a short
    /// panel.
    fn refine(&mut self, along_rows: bool, along_cols: bool) {
        let ([_, m, n], (mr, nr)) = (self.sizes, self.units);
        while self.tasks() < self.target_tasks {
            let is_below_min_tasks = self.tasks() < self.target_tasks.min(MIN_TASKS);
            let (rows, cols) = (
                even_block_size(m, self.rows.div_ceil(2), self.row_unit),
                even_block_size(n, self.cols.div_ceil(2), nr),
            );
            let split_rows =
                along_rows && rows < self.rows && (rows >= 4 * mr || is_below_min_tasks && 2 * rows >= mr);
            let split_cols = along_cols && cols < self.cols && (cols >= 2 * nr || is_below_min_tasks);
            // If there are few rows, each task packs its own block of columns.
            if split_cols && (self.cols > 2 * self.rows || !split_rows || rows < 4 * mr) {
                self.cols = cols;
            } else if split_rows {
                self.rows = rows;
            } else {
                break;
            }
        }
    }
}

/// Returns the size of blocks of whole units, about equal and about `max_size` each, that cover `size`.
fn even_block_size(size: usize, max_size: usize, unit: usize) -> usize {
    let blocks = size.div_ceil(max_size.max(unit)).max(1);
    size.div_ceil(blocks).next_multiple_of(unit).max(unit)
}

/// Blocks that a worker has packed, for reuse by its next task: matrix, first line, first depth.
#[repr(C)]
pub(super) struct PackedBlocks {
    pub(super) a: BlockKey,
    pub(super) b: BlockKey,
}

pub(super) type BlockKey = (isize, usize, usize);

impl PackedBlocks {
    /// Keys that match no block.
    pub(super) const NONE: PackedBlocks = PackedBlocks { a: (0, usize::MAX, 0), b: (0, usize::MAX, 0) };
}

/// Returns the destination of the micro-kernel, if the epilogue only stores the product.
fn direct_store(
    nest: &Nest,
    outside: &[usize],
    (row, col): (usize, usize),
) -> Result<Option<DirectStore>, String> {
    let [store] = nest.stores.as_slice() else { return Ok(None) };
    let product = nest.expr.outputs()[0];
    let (inst, ty) = nest.expr.insts()[usize::from(product.0)];
    let plain = inst == Inst::Load(0)
        && ty == Type::of(nest.loads[0].dtype())
        && store.dtype == nest.loads[0].dtype()
        && (store.strides[col] == 1 || nest.dims[col] == 1)
        && nest.loads.len() == 1
        && !nest.expr.can_fail();
    if !plain {
        return Ok(None);
    }
    let batch = outside.iter().map(|&axis| (nest.dims[axis], store.strides[axis]));
    Ok(Some(DirectStore {
        offset: store.offset as isize,
        batch: StridedIter::new(batch)?,
        row: store.strides[row],
    }))
}
