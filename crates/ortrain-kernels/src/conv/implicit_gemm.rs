//! The output, and the gradient of the input: products of the filter with a tensor seen through windows.
//!
//! Rows are channels of the result. Columns are positions of the result, image after image. Sums run over the channels
//! of the tensor and the taps of a window. A task computes a block of columns (or of rows, if there are few columns)
//! over the whole sum, some channels at a time. It copies the elements that its columns see into strips, packs panels
//! from the strips, and multiplies all rows with each panel while the panel is in the first-level cache.
//!
//! The gradient of the input of a convolution with a stride is a product for each phase. Elements of the result that
//! are equal modulo the stride see the gradient of the output through the same taps. The phases of a block are
//! interleaved before the epilogue.

use std::sync::Arc;

use ortrain_expr::{ConvPass, DType};

use super::copy::{RowCopy, copy_rows, fill_strips};
use super::epilogue::Epilogue;
use super::im2col::{Patches, SLACK, Segment};
use super::interleave::{PhaseInterleaver, PhaseTable};
use super::padding_fixup::RunSettings;
use super::partition::{BlockUnit, Blocks, Partition};
use crate::conv::desc::ConvDesc;
use crate::conv::engine::{ConvCandidate, Engine, EngineRun, boxed, choose_micro_kernel};
use crate::conv::rect::Rect;
use crate::gemm::levels::Real;
use crate::gemm::micro::{Factor, Micro, Target};
use crate::gemm::pack::{Block, pack};
use crate::gemm::tiles::Side;
use crate::isa::Isa;
use crate::scratch::ScratchParts;
use crate::tile::ALIGN;

/// Depth of a panel, which stays in the first-level cache.
pub(super) const PANEL_DEPTH: usize = 256;
/// Number of columns of a block.
const BLOCK_COLUMNS: usize = 256;
/// Maximum number of elements of a block's packed panels, if it has more columns than [`COLUMNS`].
const MAX_PANEL_ELEMENTS: usize = 64 << 10;
/// Minimum number of images for blocks of whole images.
const MIN_IMAGES_PER_BLOCK: usize = 8;
/// Maximum number of elements of a block of the result, with all phases and their interleaved form.
const MAX_BLOCK_ELEMENTS: usize = 256 << 10;
/// Maximum number of elements of the strips that are filled at a time.
pub(super) const MAX_STRIP_ELEMENTS: usize = 96 << 10;
/// Minimum number of multiplications of a task.
pub(super) const MIN_TASK_WORK: usize = 1 << 19;
/// Maximum number of tasks.
pub(super) const MAX_TASKS: usize = 16;
/// Maximum bytes of packed weights, and of packed windows, that all tasks share.
const MAX_SHARED_WEIGHT_BYTES: usize = 4 << 20;
const MAX_SHARED_WINDOW_BYTES: usize = 8 << 20;
/// Maximum bytes of windows, and minimum number of rows of a task, to share many columns. All rows of a task pass over
/// all windows, which should be in the second-level cache.
const MAX_CACHED_WINDOW_BYTES: usize = 512 << 10;
const MIN_TASK_ROWS: usize = 24;
/// Maximum number of columns that one task packs.
const MAX_PACKED_COLUMNS: usize = 128;

/// Access to the elements of the filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weights {
    /// Read directly: the elements of a row are adjacent.
    InPlace,
    /// Packed once for all tasks.
    Shared,
    /// Packed by each task.
    Local,
}

/// A part of the sums of one phase.
#[derive(Clone, Copy, Debug)]
struct Step {
    phase: usize,
    channel: usize,
    channels: usize,
    tap: usize,
    taps: usize,
    /// True for the first step of its phase.
    first: bool,
    /// Offsets of its panels of windows, and of its weights, in shared memory.
    panels: usize,
    weights: usize,
}

impl Step {
    fn depth(&self) -> usize {
        self.channels * self.taps
    }
}

pub(super) struct ImplicitGemm<T: 'static> {
    epilogue: Arc<Epilogue>,
    micro: Micro<T>,
    isa: Isa,
    patches: Patches,
    dtypes: [DType; 2],
    groups: usize,
    /// Number of rows, and rows of a panel.
    m: usize,
    height: usize,
    /// Number of channels of a sum.
    channels: usize,
    /// Steps through the filter: from row to row, from channel to channel, from group to group.
    filter: [usize; 3],
    /// True if the depths of a phase follow the order of the filter.
    is_filter_order: bool,
    weights: Weights,
    blocks: Blocks,
    rows: Partition,
    /// True if windows are packed once for all tasks.
    shares_windows: bool,
    /// For each range of channels: its steps.
    steps: Vec<Vec<Step>>,
    phase_table: PhaseTable,
    /// True if the result has one phase, in order.
    has_single_phase: bool,
    /// True if blocks are written directly to the result.
    stores_directly: bool,
    layout: Layout,
}

/// Layout of scratch memory: offsets in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Layout {
    segments: usize,
    strips: usize,
    strip_bytes: usize,
    /// Panels of windows, and tiles made from them; panels of weights, and a plain panel from which tiles are made.
    windows: usize,
    tiles: usize,
    weights: usize,
    plain: usize,
    block: usize,
    line: usize,
    each: usize,
    shared: usize,
    /// Elements from row to row of a block, and from phase to phase.
    pitch: usize,
    phase: usize,
}

/// Returns the number of elements from panel to panel of windows.
fn panel_elements<T: Real>(micro: &Micro<T>, depth: usize) -> usize {
    let slack = if micro.tiles.is_some() { 0 } else { SLACK };
    micro.packed_len(Side::B, micro.nr, depth) + slack
}

/// Outputs and gradients of inputs, with panels of windows that are packed on demand.
pub(super) fn candidate<T: Real + Send + Sync>() -> ConvCandidate {
    ConvCandidate {
        name: "conv.implicit_gemm",
        accepts: |request| request.desc.shape.pass != ConvPass::FilterGradient,
        preferences: &[],
        build: |request| ImplicitGemm::<T>::new(request.desc, request.isa, request.epilogue).map(boxed),
    }
}

/// Returns the number of offsets of all phases along all axes.
fn spread(patches: &Patches) -> usize {
    patches.outer.iter().chain([&patches.rows, &patches.cols]).map(|axis| axis.spread).product()
}

/// Returns true if the result has one phase, in order.
fn has_single_phase(patches: &Patches) -> bool {
    patches.phases.len() == 1 && spread(patches) == 1
}

/// Division of the work into tasks: rows of the result, and blocks of positions.
struct Division {
    rows: Partition,
    blocks: Blocks,
    /// True if windows are packed once for all tasks.
    shares_windows: bool,
}

impl Division {
    /// Divides a product of `m` rows, with sums over `channels` channels.
    fn new<T: Real>(
        micro: &Micro<T>,
        patches: &Patches,
        groups: usize,
        (m, channels): (usize, usize),
    ) -> Division {
        let Micro { mr, nr, .. } = *micro;
        let single = has_single_phase(patches);
        let height = micro.panel_rows(m);
        let n = patches.batch * patches.positions();
        let depth: usize = patches.phases.iter().map(|phase| phase.taps.len() * channels).sum();
        let work = n.saturating_mul(m).saturating_mul(depth).saturating_mul(groups);
        let target_tasks = (work / MIN_TASK_WORK).clamp(1, MAX_TASKS);
        let copies = if single { 1 } else { patches.phases.len() + spread(patches) };
        let windows = micro.packed_len(Side::B, n.next_multiple_of(nr), depth).saturating_mul(T::BYTES);
        let is_cached = single && windows <= MAX_CACHED_WINDOW_BYTES && m >= MIN_TASK_ROWS * target_tasks;
        let is_small = is_cached || n <= MAX_TASKS * nr && (single || patches.cols.count <= BLOCK_COLUMNS);
        let is_shareable = groups == 1 && is_small && m >= 2 * mr && target_tasks > 1;
        if is_shareable && windows <= MAX_SHARED_WINDOW_BYTES {
            let max_columns = (MAX_BLOCK_ELEMENTS / (copies * n.next_multiple_of(nr))).max(1);
            let parts = Partition::with_max_size(m, height, max_columns).parts.max(target_tasks);
            let blocks = Blocks::new(n, n, BlockUnit::Any(n), n, 1);
            return Division { rows: Partition::new(m, height, parts), blocks, shares_windows: true };
        }
        let min_columns = (2 * nr).max(if single { 0 } else { patches.cols.count.min(BLOCK_COLUMNS) });
        let rows =
            Partition::with_max_size(m, height, (MAX_BLOCK_ELEMENTS / copies / min_columns).max(height));
        let deepest = patches.phases.iter().map(|phase| phase.taps.len() * channels).max();
        let columns = (MAX_PANEL_ELEMENTS / deepest.unwrap_or(1).clamp(1, PANEL_DEPTH))
            .clamp(BLOCK_COLUMNS, 4 * BLOCK_COLUMNS);
        let max_columns = (MAX_BLOCK_ELEMENTS / copies / rows.max_size().max(1)).clamp(nr, columns) / nr * nr;
        // Whole images: contiguous elements are read and written at once.
        let images = single && patches.batch >= MIN_IMAGES_PER_BLOCK && patches.positions() <= max_columns;
        let unit = match (single, patches.is_aligned) {
            _ if images => BlockUnit::Any(patches.positions().max(1)),
            (true, true) => BlockUnit::Any(nr),
            (true, false) => BlockUnit::Within(nr),
            (false, _) => BlockUnit::Rows(nr),
        };
        let target_parts = target_tasks.div_ceil(groups.max(1)).min(n.div_ceil(2 * nr).max(1));
        let blocks = Blocks::new(n, patches.cols.count, unit, max_columns, target_parts);
        Division { rows, blocks, shares_windows: false }
    }
}

/// All steps, and the memory that they need.
#[derive(Default)]
struct Steps {
    /// For each range of channels: its steps.
    steps: Vec<Vec<Step>>,
    /// Maximum number of channels of a range, and maximum depth of a step.
    max_channels: usize,
    deepest: usize,
    /// Number of elements of the packed windows of a block, and of all packed weights.
    panels: usize,
    weights: usize,
}

impl Steps {
    /// Divides the sums over `channels` channels. Blocks have `cols` columns, and weights `row_panels` panels.
    fn new<T: Real>(
        micro: &Micro<T>,
        patches: &Patches,
        channels: usize,
        (row_panels, cols): (usize, usize),
    ) -> Steps {
        let max_taps = patches.phases.iter().map(|phase| phase.taps.len()).max().unwrap_or(1);
        let max_channels =
            (PANEL_DEPTH / max_taps).min(MAX_STRIP_ELEMENTS / patches.strip.elements.max(1)).max(1);
        let channels = if patches.phases.is_empty() { 0 } else { channels };
        let chunks = Partition::with_max_size(channels, 1, max_channels);
        let mut all = Steps { max_channels: chunks.max_size(), ..Steps::default() };
        for i in 0..chunks.parts {
            let (begin, end) = chunks.part(i);
            let mut group = Vec::new();
            for (index, phase) in patches.phases.iter().enumerate() {
                let ranges = Partition::with_max_size(phase.taps.len(), 1, PANEL_DEPTH / (end - begin));
                for range in 0..ranges.parts {
                    let (from, to) = ranges.part(range);
                    let step = Step {
                        phase: index,
                        channel: begin,
                        channels: end - begin,
                        tap: from,
                        taps: to - from,
                        first: begin == 0 && from == 0,
                        panels: all.panels,
                        weights: all.weights,
                    };
                    all.deepest = all.deepest.max(step.depth());
                    all.panels += cols / micro.nr * panel_elements(micro, step.depth());
                    all.weights = row_panels
                        .saturating_mul(micro.packed_len(Side::A, micro.mr, step.depth()))
                        .saturating_add(all.weights);
                    group.push(step);
                }
            }
            all.steps.push(group);
        }
        all
    }
}

impl<T: Real> ImplicitGemm<T> {
    /// Returns `None` if the windows have too many phases.
    fn new(desc: &ConvDesc, isa: Isa, finish: &Arc<Epilogue>) -> Option<ImplicitGemm<T>> {
        let shape = &desc.shape;
        let micro: Micro<T> = choose_micro_kernel(desc, isa, [desc.b, desc.a]);
        let real = T::DTYPE;
        let mut patches = Patches::new(shape, desc.a == real)?;
        let taps: usize = shape.axes.iter().map(|axis| axis.kernel).product();
        let (groups, plane) = (shape.groups, shape.channels_in * taps);
        let is_gradient = shape.pass == ConvPass::InputGradient;
        let (m, channels) = if is_gradient {
            (shape.channels_in, shape.channels_out)
        } else {
            (shape.channels_out, shape.channels_in)
        };
        let filter = if is_gradient { [taps, plane, channels * plane] } else { [plane, taps, m * plane] };
        if channels == 0 {
            patches.phases.clear();
        }
        let has_single_phase = has_single_phase(&patches);
        let is_filter_order =
            !is_gradient && patches.phases.len() == 1 && patches.phases[0].taps.len() == taps;
        let height = micro.panel_rows(m);
        let Division { rows, blocks, shares_windows } =
            Division::new(&micro, &patches, groups, (m, channels));
        patches.plan_strip(blocks.max_positions, blocks.is_split_by_rows(), false);
        let cols = blocks.max_positions.next_multiple_of(micro.nr);
        let all = Steps::new(&micro, &patches, channels, (m.div_ceil(height), cols));
        let weights = if is_filter_order && desc.b == real && micro.tiles.is_none() {
            Weights::InPlace
        } else if groups == 1
            && blocks.count > 1
            && all.weights.saturating_mul(T::BYTES) <= MAX_SHARED_WEIGHT_BYTES
        {
            Weights::Shared
        } else {
            Weights::Local
        };
        let is_one_step = all.steps.len() == 1 && all.steps[0].len() == 1;
        let mut engine = ImplicitGemm {
            epilogue: Arc::clone(finish),
            micro,
            isa,
            phase_table: PhaseTable::new(&patches),
            patches,
            dtypes: [desc.a, desc.b],
            groups,
            m,
            height,
            channels,
            filter,
            is_filter_order,
            weights,
            blocks,
            rows,
            shares_windows,
            steps: Vec::new(),
            has_single_phase,
            stores_directly: has_single_phase && is_one_step && finish.is_direct(),
            layout: Layout::default(),
        };
        engine.layout = engine.lay_out(&all);
        engine.steps = all.steps;
        Some(engine)
    }

    /// Lays out scratch memory.
    fn lay_out(&self, all: &Steps) -> Layout {
        let ImplicitGemm { micro, patches, height, weights, blocks, rows, shares_windows, epilogue, .. } =
            self;
        let (Micro { mr, nr, .. }, shared) = (*micro, *shares_windows);
        let tiled = micro.tiles.is_some();
        let cols = blocks.max_positions.next_multiple_of(nr);
        let pitch = cols + 16;
        let phase = rows.max_size() * pitch;
        let mut layout = Layout { pitch, phase, each: epilogue.frame, ..Layout::default() };
        let mut reserve = |bytes: usize| {
            let at = layout.each;
            layout.each += bytes.next_multiple_of(ALIGN);
            at
        };
        layout.segments = reserve(patches.max_segments(blocks.max_positions, nr) * size_of::<Segment>());
        let strip_bytes = patches.strip.elements * all.max_channels * T::BYTES;
        layout.strips = reserve(strip_bytes);
        let panels_of = |each: usize| cols / nr * each * T::BYTES;
        let deepest = all.deepest;
        layout.windows = reserve(if shared && !tiled { 0 } else { panels_of(deepest * nr + SLACK) });
        layout.tiles = reserve(if tiled && !shared { panels_of(panel_elements(micro, deepest)) } else { 0 });
        let local = if *weights == Weights::Local { rows.max_size().div_ceil(*height) } else { 0 };
        layout.weights = reserve(local * micro.packed_len(Side::A, mr, deepest) * T::BYTES);
        layout.plain = reserve(if tiled { mr * deepest * T::BYTES } else { 0 });
        let block = if self.stores_directly { mr * nr } else { phase * patches.phases.len() };
        layout.block = reserve(block * T::BYTES);
        let has_lines = !self.has_single_phase && !epilogue.is_direct();
        let line = if has_lines { blocks.max_positions * spread(patches) * rows.max_size() } else { 0 };
        layout.line = reserve(line * T::BYTES);
        let bytes = match (shared, weights) {
            (true, _) => all.panels * T::BYTES,
            (false, Weights::Shared) => all.weights.saturating_mul(T::BYTES),
            (false, _) => 0,
        };
        layout.shared = bytes.next_multiple_of(ALIGN);
        layout.strip_bytes = strip_bytes;
        layout
    }

    /// Returns the address of the filter element of a row, a channel and a tap.
    fn weight_address(
        &self,
        base: *const u8,
        group: usize,
        row: usize,
        channel: usize,
        tap: usize,
    ) -> *const u8 {
        let [line, plane, filter_len] = self.filter;
        base.wrapping_add((group * filter_len + row * line + channel * plane + tap) * self.dtypes[1].size())
    }

    /// Packs the weights of some rows, at most one panel, for one step.
    unsafe fn pack_weights(
        &self,
        base: *const u8,
        group: usize,
        step: &Step,
        (row, end): (usize, usize),
        scratch: *mut u8,
        to: *mut T,
    ) {
        let taps = &self.patches.phases[step.phase].taps;
        let [line, plane, _] = self.filter.map(|step| step as isize);
        let (isa, dtype, micro) = (self.isa, self.dtypes[1], self.micro);
        let block = |tap: usize, depth_step: isize, depth: usize| Block {
            at: self.weight_address(base, group, row, step.channel, taps[tap]),
            line_step: line,
            depth_step,
            lines: end - row,
            depth,
        };
        // SAFETY: the filter has these elements, and the caller has capacity for the panel.
        unsafe {
            if self.is_filter_order {
                micro.pack(isa, dtype, block(step.tap, 1, step.depth()), Side::A, to);
                return;
            }
            let plain = if micro.tiles.is_some() { scratch.add(self.layout.plain).cast::<T>() } else { to };
            for tap in 0..step.taps {
                let to = plain.add(tap * step.channels * micro.mr);
                pack(isa, dtype, block(step.tap + tap, plane, step.channels), micro.mr, to);
            }
            micro.pack_from_panel(isa, Side::A, plain, micro.mr, (end - row, step.depth()), to);
        }
    }

    /// Writes the segments of a block, and returns their number.
    unsafe fn list_segments(&self, positions: (usize, usize), depth: usize, to: *mut Segment) -> usize {
        let nr = self.micro.nr;
        let mut count = 0;
        self.patches.for_each_segment(positions, nr, depth * nr + SLACK, |segment| {
            // SAFETY: `max_segments` is the maximum number of segments.
            unsafe { to.add(count).write(segment) };
            count += 1;
        });
        count
    }

    /// Zeroes the strips.
    unsafe fn clear(&self, strips: *mut T) {
        // SAFETY: the strips have `strip_bytes` bytes, and all-zero bits are the number zero.
        unsafe { strips.cast::<u8>().write_bytes(0, self.layout.strip_bytes) };
    }

    /// Fills the strips for a range of channels.
    unsafe fn fill(&self, base: *const u8, group: usize, step: &Step, positions: (usize, usize), to: *mut T) {
        if self.patches.is_aligned {
            return;
        }
        let first = (group * self.channels + step.channel) * self.patches.plane;
        let from = base.wrapping_add(first * self.dtypes[0].size());
        // SAFETY: the planes are parts of the tensor, and the layout has capacity for the strips.
        unsafe { fill_strips(self.isa, self.dtypes[0], &self.patches, positions, from, step.channels, to) };
    }

    /// Packs the panels of a step for a block of columns.
    unsafe fn pack_windows(
        &self,
        base: *const u8,
        group: usize,
        step: &Step,
        (begin, end): (usize, usize),
        scratch: *mut u8,
        to: *mut T,
    ) {
        let ImplicitGemm { patches, layout, .. } = self;
        let nr = self.micro.nr;
        // SAFETY: scratch memory has the layout that `new` computed.
        unsafe {
            let segments = scratch.add(layout.segments).cast::<Segment>();
            let count = self.list_segments((begin, end), step.depth(), segments);
            let first = (group * self.channels + step.channel) * patches.plane;
            let (from, limit, channel) = if patches.is_aligned {
                let image_elements = patches.batch * patches.image;
                (base.cast::<T>().wrapping_add(first), image_elements - first, patches.plane)
            } else {
                let strips = scratch.add(layout.strips).cast::<T>();
                (strips.cast_const(), usize::MAX, patches.strip.elements)
            };
            let depth = step.depth();
            let last = (end - begin) % nr;
            let tail = (end - begin) / nr * (depth * nr + SLACK) + last;
            let tiled = self.micro.tiles.is_some();
            let plain = if tiled { scratch.add(layout.windows).cast::<T>() } else { to };
            copy_rows(
                self.isa,
                RowCopy {
                    from,
                    limit,
                    channel,
                    channels: step.channels,
                    taps: &patches.phases[step.phase].offsets[step.tap..step.tap + step.taps],
                    taps_are_inner: self.is_filter_order,
                    segments: std::slice::from_raw_parts(segments, count),
                    tail: (tail, if last == 0 { 0 } else { nr - last }),
                    pitch: nr,
                    to: plain,
                },
            );
            if tiled {
                for (p, col) in (begin..end).step_by(nr).enumerate() {
                    let from = plain.add(p * (depth * nr + SLACK));
                    let to = to.add(p * panel_elements(&self.micro, depth));
                    self.micro.pack_from_panel(self.isa, Side::B, from, nr, (nr.min(end - col), depth), to);
                }
            }
        }
    }

    /// Runs one task: a block of columns, for a range of rows.
    unsafe fn run_task(
        &self,
        bases: &[*mut u8],
        settings: RunSettings,
        group: usize,
        positions: (usize, usize),
        rows: (usize, usize),
        parts: ScratchParts,
        worker: usize,
    ) {
        let layout = &self.layout;
        let scratch = parts.worker_part(worker);
        let (a, b) = (bases[0].cast_const(), bases[1].cast_const());
        // SAFETY: scratch memory has the layout that `new` computed, and the caller's contract.
        unsafe {
            let strips = scratch.add(layout.strips).cast::<T>();
            if !self.shares_windows {
                self.clear(strips);
            }
            for steps in &self.steps {
                if !self.shares_windows {
                    self.fill(a, group, &steps[0], positions, strips);
                }
                for step in steps {
                    let windows = if self.shares_windows {
                        parts.shared_part().cast::<T>().add(step.panels)
                    } else {
                        let tiled = self.micro.tiles.is_some();
                        let at = if tiled { layout.tiles } else { layout.windows };
                        let to = scratch.add(at).cast::<T>();
                        self.pack_windows(a, group, step, positions, scratch, to);
                        to
                    };
                    self.multiply(bases, b, group, step, positions, rows, windows, parts, worker);
                }
            }
            if self.has_single_phase && !self.stores_directly {
                self.store(bases, settings, group, positions, rows, scratch);
            } else if !self.stores_directly {
                let weave = PhaseInterleaver {
                    patches: &self.patches,
                    phase_table: &self.phase_table,
                    epilogue: &self.epilogue,
                    is_split_by_rows: self.blocks.is_split_by_rows(),
                    phase: layout.phase,
                    pitch: layout.pitch,
                };
                let channels = (group * self.m + rows.0, rows.1 - rows.0);
                let block = scratch.add(layout.block).cast::<T>();
                let line = scratch.add(layout.line).cast::<T>();
                weave.run(bases, settings, channels, positions, block, line, scratch);
            }
        }
    }

    /// Multiplies the weights of some rows with the panels of a block.
    unsafe fn multiply(
        &self,
        bases: &[*mut u8],
        filter: *const u8,
        group: usize,
        step: &Step,
        (begin, end): (usize, usize),
        (row, row_end): (usize, usize),
        windows: *const T,
        parts: ScratchParts,
        worker: usize,
    ) {
        let &ImplicitGemm { layout: Layout { pitch, .. }, height, .. } = self;
        let (isa, micro) = (self.isa, self.micro);
        let Micro { mr, nr, .. } = micro;
        let scratch = parts.worker_part(worker);
        let depth = step.depth();
        let plane = self.epilogue.plane;
        // SAFETY: scratch memory has the layout that `new` computed. Weights and windows are packed for all depths of
        // the step.
        unsafe {
            let each = micro.packed_len(Side::A, mr, depth);
            let packed =
                |at: *mut T| (Factor { at: at.cast_const(), line: 1, depth: mr as isize }, each as isize);
            let (weights, next) = match self.weights {
                Weights::InPlace => {
                    let at = self.weight_address(filter, group, row, step.channel, step.tap).cast::<T>();
                    let line = self.filter[0] as isize;
                    (Factor { at, line, depth: 1 }, height as isize * line)
                }
                Weights::Shared => {
                    packed(parts.shared_part().cast::<T>().add(step.weights + row / height * each))
                }
                Weights::Local => {
                    let to = scratch.add(self.layout.weights).cast::<T>();
                    for (i, row) in (row..row_end).step_by(height).enumerate() {
                        let rows = (row, row_end.min(row + height));
                        self.pack_weights(filter, group, step, rows, scratch, to.add(i * each));
                    }
                    packed(to)
                }
            };
            let block = scratch.add(self.layout.block).cast::<T>();
            let last = self.steps.last().and_then(|steps| steps.last());
            let finishes = self.has_single_phase
                && !self.stores_directly
                && last.is_some_and(|last| std::ptr::eq(last, step));
            for (p, col) in (begin..end).step_by(nr).enumerate() {
                let b = Factor {
                    at: windows.add(p * panel_elements(&micro, depth)),
                    line: 1,
                    depth: nr as isize,
                };
                let columns = nr.min(end - col);
                let (image, position) = (col / plane.max(1), col % plane.max(1));
                let is_full = columns == nr && position + nr <= plane;
                for (i, row) in (row..row_end).step_by(height).enumerate() {
                    let count = height.min(row_end - row);
                    let a = Factor { at: weights.at.wrapping_offset(i as isize * next), ..weights };
                    let multiply = |at: *mut T, row: usize, add: bool| {
                        let c = Target { at, row: row as isize };
                        micro.multiply(isa, (count, columns), depth, a, b, c, add);
                    };
                    if finishes {
                        let channels = (group * self.m + row, count);
                        self.epilogue
                            .prefetch_rect(bases, Rect { image, channels, positions: (position, columns) });
                    }
                    if !self.stores_directly {
                        let block = block.add(step.phase * self.layout.phase);
                        multiply(block.add(i * height * pitch + p * nr), pitch, !step.first);
                        continue;
                    }
                    let channels = (group * self.m + row, count);
                    if is_full {
                        let rect = Rect { image, channels, positions: (position, nr) };
                        multiply(self.epilogue.target::<T>(bases, rect), plane, false);
                        continue;
                    }
                    multiply(block, nr, false);
                    let mut done = 0;
                    while done < columns {
                        let (image, position) = ((col + done) / plane, (col + done) % plane);
                        let now = (plane - position).min(columns - done);
                        let rect = Rect { image, channels, positions: (position, now) };
                        self.epilogue.copy(bases, rect, block.add(done), nr);
                        done += now;
                    }
                }
            }
        }
    }

    /// Runs the epilogue over a block that has the columns of the result.
    unsafe fn store(
        &self,
        bases: &[*mut u8],
        settings: RunSettings,
        group: usize,
        (begin, end): (usize, usize),
        (row, row_end): (usize, usize),
        scratch: *mut u8,
    ) {
        let plane = self.epilogue.plane;
        let mut col = begin;
        while col < end {
            let (image, position) = (col / plane, col % plane);
            let now = (plane - position).min(end - col);
            let rect =
                Rect { image, channels: (group * self.m + row, row_end - row), positions: (position, now) };
            // SAFETY: the caller's contract; the block is complete.
            unsafe {
                let block = scratch.add(self.layout.block).cast::<T>().add(col - begin);
                self.epilogue.run(bases, settings, scratch, rect, block, self.layout.pitch);
            }
            col += now;
        }
    }
}

impl<T: Real + Send + Sync> Engine for ImplicitGemm<T> {
    fn epilogue(&self) -> &Epilogue {
        &self.epilogue
    }

    fn scratch(&self) -> (usize, usize) {
        (self.layout.shared, self.layout.each)
    }

    unsafe fn run_tasks(&self, run: EngineRun<'_>) {
        let EngineRun { settings, parts, .. } = run;
        if self.shares_windows {
            let (begin, end) = self.blocks.block(0);
            let nr = self.micro.nr;
            let partition = Partition::with_max_size(end - begin, nr, MAX_PACKED_COLUMNS);
            run.each(self.steps.len() * partition.parts, |bases, task, worker| {
                let a = bases[0].cast_const();
                let scratch = parts.worker_part(worker);
                let (steps, positions) =
                    (&self.steps[task / partition.parts], partition.part(task % partition.parts));
                // SAFETY: scratch memory has the layout that `new` computed. Tasks have separate blocks; parts are
                // whole panels.
                unsafe {
                    let strips = scratch.add(self.layout.strips).cast::<T>();
                    self.clear(strips);
                    self.fill(a, 0, &steps[0], positions, strips);
                    for step in steps {
                        let panels = positions.0 / nr * panel_elements(&self.micro, step.depth());
                        let to = parts.shared_part().cast::<T>().add(step.panels + panels);
                        self.pack_windows(a, 0, step, positions, scratch, to);
                    }
                }
            });
        } else if self.weights == Weights::Shared {
            run.each(self.m.div_ceil(self.height), |bases, task, worker| {
                let filter = bases[1].cast_const();
                let rows = (task * self.height, self.m.min((task + 1) * self.height));
                for step in self.steps.iter().flatten() {
                    let at =
                        step.weights + task * self.micro.packed_len(Side::A, self.micro.mr, step.depth());
                    // SAFETY: as above.
                    unsafe {
                        let to = parts.shared_part().cast::<T>().add(at);
                        self.pack_weights(filter, 0, step, rows, parts.worker_part(worker), to);
                    }
                }
            });
        }
        let row_parts = self.rows.parts;
        run.each(self.groups * self.blocks.count * row_parts, |bases, task, worker| {
            let _session = self.micro.open_session();
            let (row, rest) = (task % row_parts, task / row_parts);
            let (block, group) = (rest % self.blocks.count, rest / self.blocks.count);
            let (positions, rows) = (self.blocks.block(block), self.rows.part(row));
            // SAFETY: as above.
            unsafe { self.run_task(bases, settings, group, positions, rows, parts, worker) };
        });
    }
}
