//! Kernels of loop nests: maps, and reductions along rows or down columns, also over segments.

mod segment_tasks;

use ortrain_expr::{Access, Nest, OutOfRange};

use crate::pool::{Pool, pause};
use crate::row_norms::RowSquareSums;
use crate::scratch::{BaseAddresses, RunScalars, Scratch, ScratchParts};
use crate::tile::memory::width;
use crate::tile::strided_iter::StridedIter;
use crate::tile::{
    ALIGN, Compiler, ExecContext, Failure, FrameHeader, LoopOrder, LoopPlan, PairwiseSum, Stage,
    StageReduction, TileProgram, counted, ops,
};
use crate::transpose::TransposingCopy;
use segment_tasks::{LongSegment, MIN_TASK_WORK, Piece, SegmentTasks, Task, Wave};

/// Number of tiles, or of blocks of rows, between two calls of `pause` in a long run.
const TILES_PER_PAUSE: usize = 1024;

/// Maximum number of tasks: enough for any number of cores.
const MAX_TASKS: usize = 16;
/// Maximum number of parts of one reduction.
const MAX_SPLITS: usize = 64;
/// Number of rows that `Col` sums in a block before it adds the block to the total. Two short sums are more exact than
/// one long sum.
const ROWS_PER_BLOCK: usize = 64;

/// Order of the loops over the reduced axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Chosen by the memory layout.
    Auto,
    /// Tiles along the reduced axes, for one outer index after the other.
    Row,
    /// Tiles along the outer axes, for one reduced index after the other.
    Col,
}

/// Compiled [`Nest`].
#[derive(Debug)]
pub struct NestKernel {
    program: TileProgram,
    partition: TaskPartition,
    buffers: usize,
    reductions: usize,
}

/// Partition of the space into tasks. Depends on the nest only.
#[derive(Debug)]
enum TaskPartition {
    Map {
        count: usize,
        chunk: usize,
    },
    Transpose(Box<TransposingCopy>),
    RowSquareSums(RowSquareSums),
    /// Either `rows` rows per task, or every row in pieces of `piece` elements.
    Row {
        outer: usize,
        inner: usize,
        rows: usize,
        piece: Option<usize>,
    },
    /// Tiles of `tile` columns; the rows in one piece or in several.
    Col {
        columns: usize,
        reduced_len: usize,
        tile: usize,
        piece: Option<usize>,
    },
    /// Rows of any length, each at some range of one axis.
    Segments(Box<SegmentTasks>),
}

impl NestKernel {
    /// Compiles a nest.
    ///
    /// # Errors
    /// Returns an error if the nest has a fault ([`Nest::validate`]), if an expression is not well typed, or if a store
    /// puts several results into one element.
    pub fn new<'a>(nest: &Nest, compiler: impl Into<Compiler<'a>>) -> Result<NestKernel, String> {
        NestKernel::with_order(nest, compiler, Order::Auto)
    }

    /// Compiles a nest with a given order of the loops over the reduced axes.
    ///
    /// # Errors
    /// Returns the errors of [`NestKernel::new`].
    pub fn with_order<'a>(
        nest: &Nest,
        compiler: impl Into<Compiler<'a>>,
        order: Order,
    ) -> Result<NestKernel, String> {
        NestKernel::compile(nest, compiler.into(), order, &|_, _| true)
    }

    /// Compiles a nest. `overlaps(store, load)` returns true if the store and the load with these indices may share
    /// elements. Without this function every load may share elements with every store.
    ///
    /// # Errors
    /// Returns the errors of [`NestKernel::new`].
    pub fn in_place<'a>(
        nest: &Nest,
        compiler: impl Into<Compiler<'a>>,
        overlaps: &dyn Fn(usize, usize) -> bool,
    ) -> Result<NestKernel, String> {
        NestKernel::compile(nest, compiler.into(), Order::Auto, overlaps)
    }

    fn compile(
        nest: &Nest,
        compiler: Compiler<'_>,
        order: Order,
        overlaps: &dyn Fn(usize, usize) -> bool,
    ) -> Result<NestKernel, String> {
        if let Some(fault) = nest.validate() {
            return Err(fault);
        }
        if nest.num_accumulators() > 0 {
            return Err("a nest without a product cannot have accumulators".to_owned());
        }
        let outer_rank = nest.dims.len() - nest.inner;
        let mut outer_axes: Vec<usize> = (0..outer_rank).collect();
        let inner_axes: Vec<usize> = (outer_rank..nest.dims.len()).collect();
        let outer: usize = nest.outer_dims().iter().product();
        let inner: usize = nest.inner_dims().iter().product();
        let (tape, shape) = if let Some(segments) = &nest.segments {
            let plan = LoopPlan { nest, loop_order: LoopOrder::Row, outer_axes: &[0], tile_axes: &[1] };
            let tape = TileProgram::with_overlaps(&plan, compiler, overlaps)?;
            let segment_tasks = SegmentTasks::new(segments, nest, &tape);
            (tape, TaskPartition::Segments(Box::new(segment_tasks)))
        } else if let Some(first) = first_row_axis(nest) {
            // A map, executed row by row.
            let (outside, along) = outer_axes.split_at(first);
            let plan = LoopPlan { nest, loop_order: LoopOrder::Row, outer_axes: outside, tile_axes: along };
            let tape = TileProgram::new(&plan, compiler)?;
            let count = |axes: &[usize]| axes.iter().map(|&axis| nest.dims[axis]).product::<usize>();
            let (outer, inner) = (count(outside), count(along));
            let rows = (MIN_TASK_WORK / inner.saturating_mul(tape.cost)).max(1);
            (tape, TaskPartition::Row { outer, inner, rows, piece: None })
        } else if nest.inner == 0 {
            let plan = LoopPlan { nest, loop_order: LoopOrder::Map, outer_axes: &[], tile_axes: &outer_axes };
            let tape = TileProgram::new(&plan, compiler)?;
            let shape = TransposingCopy::from_nest(nest).map_or_else(
                || {
                    let chunk = (MIN_TASK_WORK / tape.cost).max(1).next_multiple_of(tape.tile);
                    TaskPartition::Map { count: outer, chunk }
                },
                |transpose| TaskPartition::Transpose(Box::new(transpose)),
            );
            (tape, shape)
        } else if order == Order::Row || order == Order::Auto && !prefers_columns(nest, outer, inner) {
            let plan = LoopPlan {
                nest,
                loop_order: LoopOrder::Row,
                outer_axes: &outer_axes,
                tile_axes: &inner_axes,
            };
            let tape = TileProgram::new(&plan, compiler)?;
            let work = inner.saturating_mul(tape.cost);
            let rows = (MIN_TASK_WORK / work.max(1)).max(1);
            let splits = (work / MIN_TASK_WORK).min(MAX_SPLITS);
            let piece = (outer < MAX_TASKS && splits >= 4 && inner > tape.tile)
                .then(|| inner.div_ceil(splits).next_multiple_of(tape.tile));
            let squares = if order == Order::Auto { RowSquareSums::from_nest(nest) } else { None };
            (
                tape,
                squares
                    .map_or(TaskPartition::Row { outer, inner, rows, piece }, TaskPartition::RowSquareSums),
            )
        } else {
            // The axis along which memory is contiguous becomes the innermost one; the order of outer indices is free.
            if let Some(axis) = outer_axes.iter().copied().min_by_key(|&axis| min_stride(nest, axis)) {
                outer_axes.retain(|&other| other != axis);
                outer_axes.push(axis);
            }
            let plan = LoopPlan {
                nest,
                loop_order: LoopOrder::Col,
                outer_axes: &inner_axes,
                tile_axes: &outer_axes,
            };
            let tape = TileProgram::new(&plan, compiler)?;
            let work = outer.saturating_mul(inner).saturating_mul(tape.cost);
            let (mut tile, mut piece) = (tape.tile, None);
            if work > MIN_TASK_WORK {
                let target_tasks = (work / MIN_TASK_WORK).min(MAX_TASKS);
                let splits = (work / MIN_TASK_WORK).min(inner / (2 * ROWS_PER_BLOCK)).min(MAX_SPLITS / 2);
                let splits = if splits >= 2 && outer.div_ceil(tile) < MAX_TASKS { splits } else { 1 };
                if splits > 1 {
                    piece = Some(inner.div_ceil(splits).next_multiple_of(ROWS_PER_BLOCK));
                }
                // If rows are cut instead of columns, memory is read in long pieces.
                tile = (outer / target_tasks.div_ceil(splits)).next_multiple_of(64).max(128).min(tile);
            }
            (tape, TaskPartition::Col { columns: outer, reduced_len: inner, tile, piece })
        };
        Ok(NestKernel {
            program: tape,
            partition: shape,
            buffers: nest.loads.len() + nest.stores.len(),
            reductions: nest.reductions.len(),
        })
    }

    /// Describes the algorithm: the loops, the number of tasks, and the operations of a tile.
    #[must_use]
    pub fn describe(&self) -> String {
        let loops = match &self.partition {
            TaskPartition::Map { count, chunk } => {
                format!("map in {}", counted(count.div_ceil(*chunk), "task"))
            }
            TaskPartition::Transpose(_) => "transposing copy".to_owned(),
            TaskPartition::RowSquareSums(_) => "sums of squares of rows".to_owned(),
            TaskPartition::Row { outer, rows, piece: None, .. } => {
                format!("rows in {}", counted(outer.div_ceil(*rows), "task"))
            }
            TaskPartition::Row { piece: Some(piece), .. } => format!("rows in pieces of {piece} elements"),
            TaskPartition::Col { columns, tile, piece: None, .. } => {
                format!("columns in {}", counted(columns.div_ceil(*tile), "task"))
            }
            TaskPartition::Col { piece: Some(piece), .. } => format!("columns in pieces of {piece} rows"),
            TaskPartition::Segments(_) => "segments".to_owned(),
        };
        format!("{loops}, {}", self.program.describe())
    }

    /// Returns true if a run can fail (the expression contains a guard).
    #[must_use]
    pub fn can_fail(&self) -> bool {
        self.program.can_fail
    }

    /// Returns the selected order; `Row` for a map.
    #[must_use]
    pub fn order(&self) -> Order {
        match self.partition {
            TaskPartition::Map { .. }
            | TaskPartition::Transpose(_)
            | TaskPartition::RowSquareSums(_)
            | TaskPartition::Row { .. }
            | TaskPartition::Segments(_) => Order::Row,
            TaskPartition::Col { .. } => Order::Col,
        }
    }

    /// Returns the bytes of scratch memory for a run on `threads` threads.
    #[must_use]
    pub fn scratch_bytes(&self, threads: usize) -> usize {
        self.shared_bytes() + threads.max(1) * self.worker_bytes()
    }

    /// Returns the private bytes of each worker: its frame, and if stages save values, its table of buffers and the
    /// saved values of a segment that is not cut.
    fn worker_bytes(&self) -> usize {
        self.program.frame + self.table_bytes() + self.saved_bytes(|tasks| tasks.max_undivided_segment)
    }

    /// Returns the bytes of a table of buffers, including the buffers of saved values; 0 if no values are saved.
    fn table_bytes(&self) -> usize {
        match self.program.num_saved {
            0 => 0,
            saved => ((self.buffers + 2 * saved) * size_of::<*mut u8>()).next_multiple_of(ALIGN),
        }
    }

    /// Returns the bytes of the saved values of `elements` elements.
    fn saved_bytes(&self, elements: impl Fn(&SegmentTasks) -> usize) -> usize {
        match &self.partition {
            TaskPartition::Segments(cut) => {
                self.program.num_saved * (elements(cut) * size_of::<f32>()).next_multiple_of(ALIGN)
            }
            _ => 0,
        }
    }

    /// Returns the maximum number of reductions of a stage.
    fn max_stage_reductions(&self) -> usize {
        self.program.stages.iter().map(|stage| stage.reductions.len()).max().unwrap_or(0)
    }

    /// Returns the numbers of partial results and of final results, if rows are cut.
    fn num_shared_values(&self) -> (usize, usize) {
        match self.partition {
            TaskPartition::Row { outer, inner, piece: Some(piece), .. } => {
                (outer * inner.div_ceil(piece) * self.max_stage_reductions(), outer * self.reductions)
            }
            TaskPartition::Col { columns, reduced_len: reduced, piece: Some(piece), .. } => {
                (reduced.div_ceil(piece) * self.max_stage_reductions() * columns, self.reductions * columns)
            }
            TaskPartition::Segments(ref cut) => {
                (cut.pieces.len() * self.max_stage_reductions(), cut.long_segments.len() * self.reductions)
            }
            _ => (0, 0),
        }
    }

    fn shared_bytes(&self) -> usize {
        self.results_bytes() + self.saved_bytes(|tasks| tasks.max_wave_elements)
    }

    /// Returns the bytes of partial and of final results.
    fn results_bytes(&self) -> usize {
        let (partial, complete) = self.num_shared_values();
        ((partial + complete) * 8).next_multiple_of(ALIGN)
    }

    /// Runs the nest. Allocates nothing, and gives the same bits on any number of threads.
    ///
    /// `bases` contains the start of each buffer: first the loads, then the stores.
    ///
    /// # Errors
    /// Returns the first guard that fails, in index order. Stores are executed nevertheless: the caller must discard their
    /// results.
    ///
    /// # Panics
    /// Panics if `bases` has the wrong length, or if `scratch` is too small or not aligned.
    ///
    /// # Safety
    /// - Each base is the start of a buffer of `len` elements of its access, with any alignment. The buffer is valid
    ///   for reads (loads) or writes (stores) until the run is over.
    /// - No other thread writes to elements that are loaded, or accesses elements that are stored. No Rust reference to
    ///   stored elements exists during the run.
    /// - A stored buffer overlaps another buffer of the run only if the other one is loaded through an equal access.
    /// - Each element is stored by one index at most (an element of a row: by one row at most).
    /// - `scratch` overlaps no buffer, and no other code uses it during the run.
    pub unsafe fn run(
        &self,
        bases: &[*mut u8],
        scalars: RunScalars,
        pool: &Pool,
        scratch: Scratch,
    ) -> Result<(), OutOfRange> {
        assert_eq!(bases.len(), self.buffers, "one pointer for each load and each store");
        let parts = scratch.split(self.shared_bytes(), self.worker_bytes(), pool);
        let run = Run { kernel: self, bases: BaseAddresses(bases), scalars, parts };
        // SAFETY: the caller's contract.
        unsafe {
            for worker in 0..parts.workers {
                parts.worker_part(worker).cast::<FrameHeader>().write(FrameHeader::default());
                run.fill_table(worker);
            }
            match self.partition {
                TaskPartition::Map { count, chunk } => run.run_map(pool, count, chunk),
                TaskPartition::Transpose(ref transpose) => {
                    transpose.run(self.program.isa, run.bases, pool, parts.workers);
                }
                TaskPartition::RowSquareSums(ref squares) => {
                    squares.run(self.program.isa, run.bases, pool, parts.workers);
                }
                TaskPartition::Row { outer, inner, rows, piece: None } => {
                    run.run_rows(pool, outer, inner, rows);
                }
                TaskPartition::Row { outer, inner, piece: Some(piece), .. } => {
                    run.run_split_rows(pool, outer, inner, piece);
                }
                TaskPartition::Col { columns, reduced_len: reduced, tile, piece: None } => {
                    run.run_columns(pool, columns, reduced, tile);
                }
                TaskPartition::Col { columns, reduced_len: reduced, tile, piece: Some(piece) } => {
                    run.run_split_columns(pool, columns, reduced, tile, piece);
                }
                TaskPartition::Segments(ref cut) => run.run_segments(pool, cut),
            }
            let failures =
                (0..parts.workers).map(|worker| parts.worker_part(worker).cast::<Failure>().read());
            failures.min().unwrap_or(Failure::NONE).result()
        }
    }
}

/// Returns the first of the axes along which the tiles of a map run, if the other axes should be outer loops. Values
/// that are constant along a row, for example a channel's scale, are then one value instead of a tile.
fn first_row_axis(nest: &Nest) -> Option<usize> {
    /// Minimum row length. Shorter rows cost more in calls than they save.
    const MIN_ROW_LEN: usize = 96;
    if nest.inner > 0 {
        return None;
    }
    let moves = |load: &Access, axes: std::ops::Range<usize>| {
        axes.into_iter().any(|axis| nest.dims[axis] > 1 && load.strides[axis] != 0)
    };
    let rank = nest.dims.len();
    let gain = |first: usize| {
        let is_constant = |load: &&Access| moves(load, 0..first) && !moves(load, first..rank);
        nest.load_operands().filter(is_constant).count()
    };
    let outer = |first: usize| nest.dims[..first].iter().product::<usize>();
    let inner = |first: usize| nest.dims[first..].iter().product::<usize>();
    let best = (1..rank).filter(|&first| inner(first) >= MIN_ROW_LEN && outer(first) >= MAX_TASKS);
    // Of equal gains, the longest rows win.
    best.map(|first| (gain(first), std::cmp::Reverse(first)))
        .max()
        .filter(|best| best.0 > 0)
        .map(|best| best.1.0)
}

/// Returns the smallest nonzero stride of the loads along an axis.
fn min_stride(nest: &Nest, axis: usize) -> usize {
    let steps = nest.load_operands().map(|load| load.strides[axis].unsigned_abs());
    match steps.filter(|&step| step > 0).min() {
        Some(step) if nest.dims[axis] > 1 => step,
        _ => usize::MAX,
    }
}

/// Returns true if memory is contiguous along the outer axes rather than along the reduced ones, or if rows are too
/// short.
fn prefers_columns(nest: &Nest, outer: usize, inner: usize) -> bool {
    /// Maximum length of a short row in one piece.
    const MAX_SHORT_ROW: usize = 32;
    /// Maximum length of a short row in many small pieces (a channel of many small images).
    const SHORT_IN_PIECES: usize = 128;
    const SMALL_PIECE: usize = 64;
    let outer_rank = nest.dims.len() - nest.inner;
    let axes = || (outer_rank..nest.dims.len()).filter(|&axis| nest.dims[axis] > 1);
    let in_pieces = nest.load_operands().any(|load| {
        let walk = StridedIter::new(axes().map(|axis| (nest.dims[axis], load.strides[axis])));
        walk.is_ok_and(|walk| walk.contiguous_len().is_some_and(|piece| piece < SMALL_PIECE))
    });
    let short = if in_pieces { SHORT_IN_PIECES } else { MAX_SHORT_ROW };
    if inner <= short && outer >= inner {
        return true;
    }
    let (mut rows, mut cols) = (0usize, 0usize);
    for load in nest.load_operands() {
        let moving = || (0..nest.dims.len()).filter(|&axis| nest.dims[axis] > 1 && load.strides[axis] != 0);
        if let Some(innermost) = moving().min_by_key(|&axis| load.strides[axis].unsigned_abs()) {
            let elements = moving().map(|axis| nest.dims[axis]).fold(1, usize::saturating_mul);
            let votes = if innermost < outer_rank { &mut cols } else { &mut rows };
            *votes = votes.saturating_add(elements);
        }
    }
    cols > rows
}

/// One run of a kernel. Its functions have the contract of [`NestKernel::run`].
struct Run<'a> {
    kernel: &'a NestKernel,
    bases: BaseAddresses<'a>,
    scalars: RunScalars,
    parts: ScratchParts,
}

/// Address of values that are shared between threads.
#[derive(Clone, Copy)]
struct SharedValues(*mut u64);

// SAFETY: an address into shared scratch memory; tasks write to distinct parts of it.
unsafe impl Sync for SharedValues {}

impl SharedValues {
    fn at(self, i: usize) -> *mut u64 {
        self.0.wrapping_add(i)
    }
}

impl<'a> Run<'a> {
    fn program(&self) -> &'a TileProgram {
        &self.kernel.program
    }

    fn context(&self, worker: usize) -> ExecContext<'_> {
        let saved = self.program().num_saved;
        ExecContext {
            program: self.program(),
            bases: match saved {
                0 => self.bases.0,
                // SAFETY: the worker's table is filled, and is not changed while an execution context of the worker is
                // in use.
                _ => unsafe {
                    std::slice::from_raw_parts(self.buffer_table(worker), self.bases.0.len() + 2 * saved)
                },
            },
            scalars: self.scalars,
            frame: self.parts.worker_part(worker),
            product: std::ptr::null(),
        }
    }

    /// Returns the table of buffers of a worker that saves values: loads, loads of saved values, stores, stores of
    /// saved values.
    fn buffer_table(&self, worker: usize) -> *mut *mut u8 {
        self.parts.worker_part(worker).wrapping_add(self.program().frame).cast()
    }

    /// Fills a worker's table, except for the saved values.
    ///
    /// # Safety
    /// No other code uses the worker's memory.
    unsafe fn fill_table(&self, worker: usize) {
        let saved = self.program().num_saved;
        if saved == 0 {
            return;
        }
        let (loads, stores) = self.bases.0.split_at(self.program().num_loads());
        let table = self.buffer_table(worker);
        // SAFETY: the table has entries for all of these addresses.
        unsafe {
            table.copy_from_nonoverlapping(loads.as_ptr(), loads.len());
            table.add(loads.len()).write_bytes(0, saved);
            let table = table.add(loads.len() + saved);
            table.copy_from_nonoverlapping(stores.as_ptr(), stores.len());
            table.add(stores.len()).write_bytes(0, saved);
        }
    }

    /// Sets the addresses of a worker's saved values: `each` bytes per value from `at` on, for the elements of the
    /// plane from `begin` on.
    ///
    /// # Safety
    /// The worker has no execution context in use, and no other code uses the worker's memory.
    unsafe fn set_saved_addresses(&self, worker: usize, at: *mut u8, begin: usize, each: usize) {
        let (loads, stores) = (self.program().num_loads(), self.bases.0.len() - self.program().num_loads());
        let saved = self.program().num_saved;
        for k in 0..saved {
            // Elements before `begin` are never accessed.
            let base = at.wrapping_add(k * each).wrapping_sub(begin * size_of::<f32>());
            // SAFETY: these are entries of the table.
            unsafe {
                self.buffer_table(worker).add(loads + k).write(base);
                self.buffer_table(worker).add(loads + saved + stores + k).write(base);
            }
        }
    }

    /// Sets the addresses of a worker's saved values for a segment that is not cut.
    ///
    /// # Safety
    /// As [`Run::keep`].
    unsafe fn set_saved_addresses_of_segment(&self, worker: usize, tasks: &SegmentTasks, begin: usize) {
        let at = self.buffer_table(worker).cast::<u8>().wrapping_add(self.kernel.table_bytes());
        let each = (tasks.max_undivided_segment * size_of::<f32>()).next_multiple_of(ALIGN);
        // SAFETY: the caller's contract.
        unsafe { self.set_saved_addresses(worker, at, begin, each) };
    }

    /// Sets the addresses of a worker's saved values for a segment that is cut.
    ///
    /// # Safety
    /// As [`Run::keep`].
    unsafe fn set_saved_addresses_of_long_segment(&self, worker: usize, tasks: &SegmentTasks, long: usize) {
        let LongSegment { segment, elements_before: before, .. } = tasks.long_segments[long];
        let at =
            self.parts.shared_part().wrapping_add(self.kernel.results_bytes() + before * size_of::<f32>());
        let each = (tasks.max_wave_elements * size_of::<f32>()).next_multiple_of(ALIGN);
        // SAFETY: the caller's contract.
        unsafe { self.set_saved_addresses(worker, at, tasks.segments.range(segment).start, each) };
    }

    /// Returns an execution context in which the operations that run once per task have run.
    unsafe fn start_task(&self, worker: usize) -> ExecContext<'_> {
        let site = self.context(worker);
        // SAFETY: the worker's own frame. These operations load from index zero only, and the space has this index.
        unsafe { site.run(&self.program().per_run, 0, 0, self.program().tile) };
        site
    }

    unsafe fn run_map(&self, pool: &Pool, count: usize, chunk: usize) {
        let tape = self.program();
        pool.run(count.div_ceil(chunk), self.parts.workers, &|task, worker| {
            let begin = task * chunk;
            let end = count.min(begin + chunk);
            // SAFETY: tasks have distinct indices, and each worker has its own frame.
            unsafe {
                let site = self.start_task(worker);
                for (start, n) in tape.tiles(begin, end) {
                    site.run(&tape.stages[0].body, 0, start, n);
                }
            }
        });
    }

    /// Runs a stage of one row, or of a piece of a row. Leaves the partial results in the pairwise sums.
    unsafe fn run_row_stage(
        &self,
        site: &ExecContext<'_>,
        stage: &Stage,
        row: usize,
        begin: usize,
        end: usize,
    ) {
        // SAFETY: the caller's contract; the pairwise sums are initialised before values are pushed.
        unsafe {
            for total in &stage.reductions {
                (*site.register_ptr::<PairwiseSum>(total.state)).reset();
            }
            if !stage.body.is_empty() {
                for (index, (start, n)) in self.program().tiles(begin, end).enumerate() {
                    if index % TILES_PER_PAUSE == TILES_PER_PAUSE - 1 {
                        pause();
                    }
                    site.run(&stage.body, row, start, n);
                }
            }
        }
    }

    unsafe fn run_rows(&self, pool: &Pool, outer: usize, inner: usize, rows: usize) {
        pool.run(outer.div_ceil(rows), self.parts.workers, &|task, worker| {
            // SAFETY: tasks have distinct rows, and each worker has its own frame.
            unsafe {
                let site = self.start_task(worker);
                for row in task * rows..outer.min((task + 1) * rows) {
                    self.run_row(&site, row, 0, inner);
                }
            }
        });
    }

    /// Runs all stages of one row.
    #[inline]
    unsafe fn run_row(&self, site: &ExecContext<'_>, row: usize, begin: usize, end: usize) {
        let tape = self.program();
        // SAFETY: the caller's contract; the results of a stage are complete when the next stage begins.
        unsafe {
            for stage in &tape.stages {
                site.run(&stage.pre, row, 0, tape.tile.min(end - begin));
                self.run_row_stage(site, stage, row, begin, end);
                for total in &stage.reductions {
                    *site.register_ptr(total.result) =
                        (*site.register_ptr::<PairwiseSum>(total.state)).result(total.op, total.ty);
                }
            }
            site.run(&tape.post, row, 0, 1);
        }
    }

    unsafe fn run_segments(&self, pool: &Pool, segment_tasks: &SegmentTasks) {
        for wave in &segment_tasks.waves {
            // SAFETY: the caller's contract.
            unsafe { self.run_wave(pool, segment_tasks, wave) };
        }
    }

    /// Runs all stages of the segments of a wave.
    unsafe fn run_wave(&self, pool: &Pool, segment_tasks: &SegmentTasks, wave: &Wave) {
        let tape = self.program();
        let width = self.kernel.max_stage_reductions();
        let (partial, complete) = self.shared_results();
        // Runs everything before the body of stage `stage`, in tiles of up to `n` elements.
        let before = |worker: usize, long: usize, stage: usize, n: usize| {
            // SAFETY: final results of earlier stages are complete.
            unsafe {
                let site = self.start_task(worker);
                for (s, earlier) in tape.stages[..=stage].iter().enumerate() {
                    site.run(&earlier.pre, segment_tasks.long_segments[long].segment, 0, n);
                    if s < stage {
                        for total in &earlier.reductions {
                            *site.register_ptr(total.result) =
                                *complete.at(long * self.kernel.reductions + total.reduction_index);
                        }
                    }
                }
                site
            }
        };
        // The pieces of a segment have the same values before their bodies. A worker's frame keeps these values between
        // pieces.
        let frame_of = |worker: usize| self.parts.worker_part(worker).cast::<FrameHeader>();
        let piece = |worker: usize, k: usize, stage: usize| {
            let Piece { long_segment: long, begin, end } = segment_tasks.pieces[k];
            // SAFETY: tasks have distinct pieces, and each piece has its own entries for partial results.
            unsafe {
                self.set_saved_addresses_of_long_segment(worker, segment_tasks, long);
                let frame = frame_of(worker);
                let context_key = (stage, long);
                let site = match (*frame).prepared == Some(context_key) {
                    true => self.context(worker),
                    false => before(worker, long, stage, tape.tile),
                };
                (*frame).prepared = Some(context_key);
                let stage = &tape.stages[stage];
                self.run_row_stage(&site, stage, segment_tasks.long_segments[long].segment, begin, end);
                for (i, total) in stage.reductions.iter().enumerate() {
                    *partial.at(k * width + i) =
                        (*site.register_ptr::<PairwiseSum>(total.state)).result(total.op, total.ty);
                }
            }
        };
        let tasks = &segment_tasks.tasks[wave.tasks.clone()];
        pool.run(tasks.len(), self.parts.workers, &|task, worker| match tasks[task] {
            Task::Piece(k) => piece(worker, k, 0),
            Task::Whole { first, last } => {
                // SAFETY: tasks have distinct segments, and each worker has its own frame.
                unsafe {
                    self.start_task(worker);
                    (*frame_of(worker)).prepared = None;
                    for segment in first..last {
                        let range = segment_tasks.segments.range(segment);
                        // A map computes nothing once per segment, so empty segments need no work.
                        if !(segment_tasks.is_map && range.is_empty()) {
                            self.set_saved_addresses_of_segment(worker, segment_tasks, range.start);
                            let site = self.context(worker);
                            self.run_row(&site, segment, range.start, range.end);
                        }
                    }
                }
            }
        });
        if wave.long_segments.is_empty() {
            return;
        }
        for (s, stage) in tape.stages.iter().enumerate() {
            if s > 0 && !stage.body.is_empty() {
                let (count, workers) = (wave.pieces.len(), self.parts.workers);
                let body = |task, worker| piece(worker, wave.pieces.start + task, s);
                // Every second stage runs backwards: the data that was read last is still in a cache.
                if s % 2 == 1 {
                    pool.run_backwards(count, workers, &body);
                } else {
                    pool.run(count, workers, &body);
                }
            }
            let site = self.context(0);
            for long in wave.long_segments.clone() {
                let of = &segment_tasks.long_segments[long];
                for (i, total) in stage.reductions.iter().enumerate() {
                    // SAFETY: all tasks are done; this thread is worker 0.
                    unsafe {
                        let chain = &mut *site.register_ptr::<PairwiseSum>(total.state);
                        chain.reset();
                        for k in of.first..of.last {
                            chain.push(total.op, total.ty, *partial.at(k * width + i));
                        }
                        *complete.at(long * self.kernel.reductions + total.reduction_index) =
                            chain.result(total.op, total.ty);
                    }
                }
            }
        }
        if !tape.post.is_empty() {
            pool.run(wave.long_segments.len(), self.parts.workers, &|task, worker| {
                let long = wave.long_segments.start + task;
                let site = before(worker, long, tape.stages.len() - 1, 1);
                // SAFETY: all inputs of the segment's results are complete, tasks have distinct segments, and each
                // worker has its own frame.
                unsafe {
                    (*frame_of(worker)).prepared = None;
                    site.run(&tape.post, segment_tasks.long_segments[long].segment, 0, 1);
                }
            });
        }
    }

    /// Returns the addresses of partial and final results.
    fn shared_results(&self) -> (SharedValues, SharedValues) {
        let partial = SharedValues(self.parts.shared_part().cast());
        (partial, SharedValues(partial.at(self.kernel.num_shared_values().0)))
    }

    unsafe fn run_split_rows(&self, pool: &Pool, outer: usize, inner: usize, piece: usize) {
        let tape = self.program();
        let splits = inner.div_ceil(piece);
        let width = self.kernel.max_stage_reductions();
        let (partial, complete) = self.shared_results();
        let results = |row: usize, k: usize| complete.at(row * self.kernel.reductions + k);
        // Runs everything before the body of stage `stage`.
        let before = |worker: usize, row: usize, stage: usize| {
            // SAFETY: final results of earlier stages are complete.
            unsafe {
                let site = self.start_task(worker);
                for (s, earlier) in tape.stages[..=stage].iter().enumerate() {
                    site.run(&earlier.pre, row, 0, tape.tile.min(inner));
                    if s < stage {
                        for total in &earlier.reductions {
                            *site.register_ptr(total.result) = *results(row, total.reduction_index);
                        }
                    }
                }
                site
            }
        };
        for (s, stage) in tape.stages.iter().enumerate() {
            if stage.body.is_empty() {
                continue;
            }
            pool.run(outer * splits, self.parts.workers, &|task, worker| {
                let (row, split) = (task / splits, task % splits);
                // SAFETY: tasks have distinct pieces, and each piece has its own entries for partial results.
                unsafe {
                    let site = before(worker, row, s);
                    self.run_row_stage(&site, stage, row, split * piece, inner.min((split + 1) * piece));
                    for (i, total) in stage.reductions.iter().enumerate() {
                        *partial.at(task * width + i) =
                            (*site.register_ptr::<PairwiseSum>(total.state)).result(total.op, total.ty);
                    }
                }
            });
            let site = self.context(0);
            for row in 0..outer {
                for (i, total) in stage.reductions.iter().enumerate() {
                    // SAFETY: all tasks are done; this thread is worker 0.
                    unsafe {
                        let chain = &mut *site.register_ptr::<PairwiseSum>(total.state);
                        chain.reset();
                        for split in 0..splits {
                            chain.push(total.op, total.ty, *partial.at((row * splits + split) * width + i));
                        }
                        *results(row, total.reduction_index) = chain.result(total.op, total.ty);
                    }
                }
            }
        }
        if !tape.post.is_empty() {
            for row in 0..outer {
                let site = before(0, row, tape.stages.len() - 1);
                // SAFETY: all inputs of the row's results are complete.
                unsafe { site.run(&tape.post, row, 0, 1) };
            }
        }
    }

    /// Runs a stage of some columns over the reduced indices `begin..end`. Leaves the results in their registers.
    unsafe fn run_column_stage(
        &self,
        site: &ExecContext<'_>,
        stage: &Stage,
        (start, n): (usize, usize),
        begin: usize,
        end: usize,
    ) {
        let isa = self.program().isa;
        let each = |f: &dyn Fn(&StageReduction, *mut u8, *mut u8)| {
            for total in &stage.reductions {
                // SAFETY: offsets inside of the frame.
                unsafe { f(total, site.register_ptr(total.state), site.register_ptr(total.result)) };
            }
        };
        // SAFETY: both are registers of `n` values of the reduction's type.
        each(&|total, block, sum| unsafe {
            ops::neutral(total.op, total.ty, block, n);
            ops::neutral(total.op, total.ty, sum, n);
        });
        if stage.body.is_empty() {
            return;
        }
        for block in (begin..end).step_by(ROWS_PER_BLOCK) {
            if (block - begin) % (TILES_PER_PAUSE * ROWS_PER_BLOCK) == (TILES_PER_PAUSE - 1) * ROWS_PER_BLOCK
            {
                pause();
            }
            for index in block..end.min(block + ROWS_PER_BLOCK) {
                // SAFETY: the caller's contract.
                unsafe { site.run(&stage.body, index, start, n) };
            }
            // SAFETY: as above; the registers do not overlap.
            each(&|total, block, sum| unsafe {
                ops::accumulate(isa, total.op, total.ty, block, sum, n);
                ops::neutral(total.op, total.ty, block, n);
            });
        }
    }

    unsafe fn run_columns(&self, pool: &Pool, saved: usize, reduced: usize, tile: usize) {
        let tape = self.program();
        pool.run(saved.div_ceil(tile), self.parts.workers, &|task, worker| {
            let start = task * tile;
            let n = tile.min(saved - start);
            // SAFETY: tasks have distinct columns, and each worker has its own frame.
            unsafe {
                let site = self.start_task(worker);
                for stage in &tape.stages {
                    site.run(&stage.pre, 0, start, n);
                    self.run_column_stage(&site, stage, (start, n), 0, reduced);
                }
                site.run(&tape.post, 0, start, n);
            }
        });
    }

    unsafe fn run_split_columns(&self, pool: &Pool, saved: usize, reduced: usize, tile: usize, piece: usize) {
        let tape = self.program();
        let splits = reduced.div_ceil(piece);
        let tiles = saved.div_ceil(tile);
        let width_of = |total: &StageReduction| width(total.ty);
        let totals = self.kernel.max_stage_reductions();
        let (partial, complete) = self.shared_results();
        let columns = |task: usize| (task * tile, tile.min(saved - task * tile));
        let part_address = |values: SharedValues, line: usize, start: usize, total: &StageReduction| {
            values.at(line * saved).cast::<u8>().wrapping_add(start * width_of(total))
        };
        // Runs everything before the body of stage `stage`.
        let before = |worker: usize, (start, n): (usize, usize), stage: usize| {
            // SAFETY: final results of earlier stages are complete.
            unsafe {
                let site = self.start_task(worker);
                for (s, earlier) in tape.stages[..=stage].iter().enumerate() {
                    site.run(&earlier.pre, 0, start, n);
                    if s < stage {
                        for total in &earlier.reductions {
                            let from = part_address(complete, total.reduction_index, start, total);
                            std::ptr::copy_nonoverlapping(
                                from,
                                site.register_ptr(total.result),
                                n * width_of(total),
                            );
                        }
                    }
                }
                site
            }
        };
        for (s, stage) in tape.stages.iter().enumerate() {
            if stage.body.is_empty() {
                continue;
            }
            pool.run(tiles * splits, self.parts.workers, &|task, worker| {
                let (split, (start, n)) = (task / tiles, columns(task % tiles));
                // SAFETY: tasks have distinct pieces, and each piece has its own entries for partial results.
                unsafe {
                    let site = before(worker, (start, n), s);
                    self.run_column_stage(
                        &site,
                        stage,
                        (start, n),
                        split * piece,
                        reduced.min((split + 1) * piece),
                    );
                    for (i, total) in stage.reductions.iter().enumerate() {
                        let to = part_address(partial, split * totals + i, start, total);
                        std::ptr::copy_nonoverlapping(
                            site.register_ptr::<u8>(total.result),
                            to,
                            n * width_of(total),
                        );
                    }
                }
            });
            if stage.reductions.is_empty() {
                continue;
            }
            pool.run(tiles, self.parts.workers, &|task, worker| {
                let (start, n) = columns(task);
                let site = self.context(worker);
                for (i, total) in stage.reductions.iter().enumerate() {
                    let bytes = n * width_of(total);
                    // SAFETY: tasks have distinct columns; the registers are in the worker's own frame.
                    unsafe {
                        let (value, sum) =
                            (site.register_ptr::<u8>(total.state), site.register_ptr::<u8>(total.result));
                        ops::neutral(total.op, total.ty, sum, n);
                        for split in 0..splits {
                            let from = part_address(partial, split * totals + i, start, total);
                            std::ptr::copy_nonoverlapping(from, value, bytes);
                            ops::accumulate(tape.isa, total.op, total.ty, value, sum, n);
                        }
                        std::ptr::copy_nonoverlapping(
                            sum,
                            part_address(complete, total.reduction_index, start, total),
                            bytes,
                        );
                    }
                }
            });
        }
        if !tape.post.is_empty() {
            pool.run(tiles, self.parts.workers, &|task, worker| {
                let (start, n) = columns(task);
                let site = before(worker, (start, n), tape.stages.len() - 1);
                // SAFETY: all inputs of the results are complete, and tasks have distinct columns.
                unsafe { site.run(&tape.post, 0, start, n) };
            });
        }
    }
}
