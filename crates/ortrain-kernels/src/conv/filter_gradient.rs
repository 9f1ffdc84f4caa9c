//! The gradient of the filter: products of the output's gradient with the input seen through windows.
//!
//! Sums run over the positions of all images, some positions at a time. The rows of the input's channels and taps are
//! copied on demand, and the rows of the output's gradient are packed into panels. The roles are swapped if that wastes
//! less work. If sums are long and the filter is small, several tasks compute parts of the sums, and the parts are
//! added in order.

use std::sync::Arc;

use ortrain_expr::{ConvPass, DType};

use super::copy::{RowCopy, add_parts, copy_lines, copy_rows, fill_strips};
use super::epilogue::Epilogue;
use super::im2col::{Patches, SLACK, Segment};
use super::implicit_gemm::{MAX_STRIP_ELEMENTS, MAX_TASKS, MIN_TASK_WORK, PANEL_DEPTH};
use super::padding_fixup::RunSettings;
use super::partition::{BlockUnit, Blocks, Partition};
use crate::conv::desc::ConvDesc;
use crate::conv::engine::{ConvCandidate, Engine, EngineRun, boxed, choose_micro_kernel};
use crate::conv::rect::Rect;
use crate::gemm::levels::Real;
use crate::gemm::micro::{Factor, Micro, Target};
use crate::gemm::pack::{Block, transpose};
use crate::gemm::tiles::Side;
use crate::isa::Isa;
use crate::scratch::ScratchParts;
use crate::tile::ALIGN;

/// Maximum number of elements of a task's sums.
const MAX_SUM_ELEMENTS: usize = 256 << 10;
/// Maximum number of elements of all parts of the sums.
const MAX_PARTIAL_ELEMENTS: usize = 1 << 20;
/// Maximum number of rows of windows that are copied at a time: as rows of the product, and as its columns.
const MAX_WINDOW_ROWS: usize = 128;
const MAX_WINDOW_COLUMNS: usize = 512;
/// Number of output channels that are transposed at a time: a cache line.
const TRANSPOSED_CHANNELS: usize = 16;

/// Some rows of windows: all taps of some channels, or some taps of one channel.
#[derive(Clone, Copy, Debug)]
struct Step {
    channel: usize,
    channels: usize,
    tap: usize,
    taps: usize,
}

impl Step {
    fn rows(&self) -> usize {
        self.channels * self.taps
    }
}

pub(super) struct FilterGradient<T: 'static> {
    epilogue: Arc<Epilogue>,
    micro: Micro<T>,
    isa: Isa,
    patches: Patches,
    dtypes: [DType; 2],
    groups: usize,
    /// Number of channels of the output and of the input, and of taps of the filter.
    m: usize,
    channels_in: usize,
    taps: usize,
    /// Number of positions of an image.
    plane: usize,
    /// True if the product's columns are output channels, and its rows are input channels and taps. Otherwise the roles
    /// are swapped.
    columns_are_outputs: bool,
    blocks: Blocks,
    /// Parts of the sums, of the output's channels, and of the input's channels.
    parts: Partition,
    outs: Partition,
    ins: Partition,
    layout: Layout,
}

/// Layout of scratch memory: offsets in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Layout {
    segments: usize,
    strips: usize,
    strip_bytes: usize,
    rows: usize,
    lines: usize,
    lefts: usize,
    panels: usize,
    sums: usize,
    tile: usize,
    line: usize,
    each: usize,
    shared: usize,
    /// Elements of a task's sums, and elements from row to row.
    size: usize,
    pitch: usize,
    /// Maximum number of rows and of channels of a step.
    step_rows: usize,
    step_channels: usize,
}

/// Gradients of filters, with panels of windows that are packed on demand.
pub(super) fn candidate<T: Real + Send + Sync>() -> ConvCandidate {
    ConvCandidate {
        name: "conv.filter_gradient",
        accepts: |request| request.desc.shape.pass == ConvPass::FilterGradient,
        preferences: &[],
        build: |request| FilterGradient::<T>::new(request.desc, request.isa, request.epilogue).map(boxed),
    }
}

/// Division of the work: parts of the sums, of the output's channels, and of the input's channels.
struct Division {
    parts: Partition,
    outs: Partition,
    ins: Partition,
}

impl Division {
    /// Divides a product of `m` output channels and `ct` columns of windows, of `channels` input channels, over `n`
    /// positions in `blocks` blocks. `units` are the units of `ct` and of `m`.
    fn new(
        groups: usize,
        [m, ct, n]: [usize; 3],
        channels: usize,
        blocks: usize,
        (ct_unit, m_unit): (usize, usize),
    ) -> Division {
        let work = n.saturating_mul(m).saturating_mul(ct).saturating_mul(groups);
        let target_tasks = (work / MIN_TASK_WORK).clamp(1, MAX_TASKS).div_ceil(groups);
        let padded = m.next_multiple_of(m_unit) * ct.next_multiple_of(ct_unit);
        let ins = padded.div_ceil(MAX_SUM_ELEMENTS).min(channels);
        let outs = padded.div_ceil(ins).div_ceil(MAX_SUM_ELEMENTS);
        let max_parts = (MAX_PARTIAL_ELEMENTS / (groups * padded)).min(n / PANEL_DEPTH).max(1);
        let parts = Partition::new(blocks, 1, target_tasks.div_ceil(ins * outs).min(max_parts));
        let left = target_tasks.div_ceil(parts.parts);
        let ins = Partition::new(channels, 1, ins.max(left.min(ct / MAX_WINDOW_ROWS)));
        let left = left.div_ceil(ins.parts);
        let outs = Partition::new(m, m_unit, outs.max(left.min(m / (4 * m_unit))));
        Division { parts, outs, ins }
    }
}

/// Positions that are multiplied together: a block of an image, or of several images.
#[derive(Clone, Copy)]
struct Positions {
    begin: usize,
    end: usize,
    /// Image and position of the first one.
    image: usize,
    position: usize,
    is_one_image: bool,
}

impl<T: Real> FilterGradient<T> {
    /// Returns `None` if the windows have too many phases, or if there is nothing to sum.
    fn new(desc: &ConvDesc, isa: Isa, finish: &Arc<Epilogue>) -> Option<FilterGradient<T>> {
        let shape = &desc.shape;
        let micro: Micro<T> = choose_micro_kernel(desc, isa, [desc.a, desc.b]);
        let Micro { mr, nr, .. } = micro;
        let real = T::DTYPE;
        let mut patches = Patches::new(shape, desc.b == real)?;
        let (groups, m, c) = (shape.groups, shape.channels_out, shape.channels_in);
        let taps: usize = shape.axes.iter().map(|axis| axis.kernel).product();
        let plane = patches.positions();
        let n = plane * shape.batch;
        if patches.phases.is_empty() || groups * m * c * n == 0 {
            return None;
        }
        let alive = patches.phases[0].taps.len();
        let narrow = micro.column_unit();
        let cost =
            |rows: usize, columns: usize| 10 * rows * columns.div_ceil(narrow) * narrow / nr + 4 * columns;
        let wide = cost(c * alive, m) <= cost(m, c * alive);
        let micro = if wide { choose_micro_kernel(desc, isa, [desc.b, desc.a]) } else { micro };

        // Positions that are processed at a time.
        let row = patches.cols.count;
        let unit =
            if patches.is_aligned && row < PANEL_DEPTH / 3 { BlockUnit::Any(1) } else { BlockUnit::Rows(8) };
        let max_rows =
            if patches.is_aligned && row >= PANEL_DEPTH / 3 { row.min(PANEL_DEPTH) } else { PANEL_DEPTH };
        let blocks = Blocks::new(n, row, unit, max_rows, 1);
        patches.plan_strip(blocks.max_positions, blocks.is_split_by_rows(), false);

        let units = if wide { (mr, nr) } else { (nr, mr) };
        let Division { parts, outs, ins } = Division::new(groups, [m, c * alive, n], c, blocks.count, units);
        let mut engine = FilterGradient {
            epilogue: Arc::clone(finish),
            micro,
            isa,
            patches,
            dtypes: [desc.a, desc.b],
            groups,
            m,
            channels_in: c,
            taps,
            plane,
            columns_are_outputs: wide,
            blocks,
            parts,
            outs,
            ins,
            layout: Layout::default(),
        };
        engine.layout = engine.lay_out();
        Some(engine)
    }

    /// Lays out scratch memory.
    fn lay_out(&self) -> Layout {
        let &FilterGradient { micro, ref patches, groups, taps, blocks, parts, outs, ins, .. } = self;
        let Micro { mr, nr, .. } = micro;
        let wide = self.columns_are_outputs;
        let alive = patches.phases[0].taps.len();
        let (in_rows, out_rows) = (ins.max_size() * alive, outs.max_size());
        // A pitch that is no power of two avoids cache conflicts between columns.
        let (sum_rows, pitch) = if wide {
            (in_rows, out_rows.next_multiple_of(nr) + 16)
        } else {
            // The columns of every step are padded.
            let steps = divide_into_steps(ins.max_size(), alive, MAX_WINDOW_COLUMNS, patches).count();
            (out_rows, in_rows + steps * nr + 16)
        };
        let max_rows_per_step = if wide { MAX_WINDOW_ROWS } else { MAX_WINDOW_COLUMNS };
        // Fewer channels may have fewer, but larger steps.
        let (mut max_step_rows, mut max_step_channels) = (0, 0);
        for channels in ins.sizes() {
            for step in divide_into_steps(channels, alive, max_rows_per_step, patches) {
                max_step_rows = max_step_rows.max(step.rows());
                max_step_channels = max_step_channels.max(step.channels);
            }
        }
        let columns = if wide { out_rows } else { max_step_rows };
        let size = sum_rows * pitch;
        let mut layout = Layout {
            size,
            pitch,
            step_rows: max_step_rows,
            step_channels: max_step_channels,
            each: self.epilogue.frame,
            ..Layout::default()
        };
        let mut reserve = |elements: usize| {
            let at = layout.each;
            layout.each += (elements * T::BYTES).next_multiple_of(ALIGN);
            at
        };
        let segment = size_of::<Segment>().div_ceil(T::BYTES);
        layout.segments = reserve(patches.max_segments(blocks.max_positions, blocks.max_positions) * segment);
        let strips = patches.strip.elements * max_step_channels;
        layout.strips = reserve(strips);
        layout.rows = reserve(max_step_rows * blocks.max_positions + SLACK);
        layout.lines = reserve(out_rows * blocks.max_positions);
        let lefts = if wide { max_step_rows } else { out_rows }.next_multiple_of(mr);
        layout.lefts = reserve(if micro.tiles.is_some() {
            micro.packed_len(Side::A, lefts, blocks.max_positions)
        } else {
            0
        });
        layout.panels =
            reserve(micro.packed_len(Side::B, columns.next_multiple_of(nr), blocks.max_positions));
        layout.sums = if parts.parts > 1 { 0 } else { reserve(size) };
        layout.tile = if parts.parts > 1 {
            reserve(if wide { in_rows * TRANSPOSED_CHANNELS } else { TRANSPOSED_CHANNELS * pitch })
        } else {
            0
        };
        layout.line = reserve(TRANSPOSED_CHANNELS * ins.max_size() * taps);
        layout.strip_bytes = strips * T::BYTES;
        if parts.parts > 1 {
            let tasks = parts.parts * groups * ins.parts * outs.parts;
            layout.shared = (tasks * size * T::BYTES).next_multiple_of(ALIGN);
        }
        layout
    }

    fn steps(&self, channels: usize) -> impl Iterator<Item = Step> {
        let alive = self.patches.phases[0].taps.len();
        divide_into_steps(
            channels,
            alive,
            if self.columns_are_outputs { MAX_WINDOW_ROWS } else { MAX_WINDOW_COLUMNS },
            &self.patches,
        )
    }

    /// Returns the lines of the output's gradient, in place if possible, and their type.
    unsafe fn output_lines(
        &self,
        bases: &[*mut u8],
        group: usize,
        outs: (usize, usize),
        positions: Positions,
        scratch: *mut u8,
    ) -> (Block, DType) {
        let &FilterGradient { ref layout, isa, plane, m, groups, dtypes: [dtype, _], .. } = self;
        let Positions { begin, end, image, position, is_one_image } = positions;
        let (lines, depth) = (outs.1 - outs.0, end - begin);
        let real = T::DTYPE;
        if is_one_image && (self.columns_are_outputs || dtype == real) {
            let channel = (image * groups + group) * m + outs.0;
            let at = bases[0].wrapping_add((channel * plane + position) * dtype.size()).cast_const();
            return (Block { at, line_step: plane as isize, depth_step: 1, lines, depth }, dtype);
        }
        let image = groups * m * plane;
        let from = bases[0].wrapping_add((group * m + outs.0) * plane * dtype.size());
        let to = scratch.wrapping_add(layout.lines).cast::<T>();
        // SAFETY: scratch memory has the layout that `new` computed, and the caller's contract.
        unsafe { copy_lines(isa, dtype, from, (plane, image), lines, (begin, end), to, depth) };
        let at = to.cast::<u8>().cast_const();
        (Block { at, line_step: depth as isize, depth_step: 1, lines, depth }, real)
    }

    /// Returns the windows of a step: their address, and the elements from row to row. They are in place if possible.
    unsafe fn windows(
        &self,
        source: *const u8,
        (first_channel, step): (usize, &Step),
        positions: Positions,
        segments: &[Segment],
        scratch: *mut u8,
    ) -> (*const T, usize) {
        let &FilterGradient { ref layout, ref patches, isa, dtypes: [_, dtype], .. } = self;
        let Positions { begin, end, image, position, is_one_image } = positions;
        let source = source.wrapping_add(first_channel * dtype.size());
        if patches.is_aligned && is_one_image {
            let at = source.cast::<T>().wrapping_add(image * patches.image + position);
            return (at, patches.plane);
        }
        // SAFETY: scratch memory has the layout that `new` computed, and the caller's contract.
        unsafe {
            let at = |offset: usize| scratch.add(offset).cast::<T>();
            let strips = at(layout.strips);
            let (from, limit, channel) = if patches.is_aligned {
                (source.cast(), patches.batch * patches.image - first_channel, patches.plane)
            } else {
                if step.tap == 0 {
                    fill_strips(isa, dtype, patches, (begin, end), source, step.channels, strips);
                }
                (strips.cast_const(), usize::MAX, patches.strip.elements)
            };
            let copy = RowCopy {
                from,
                limit,
                channel,
                channels: step.channels,
                taps: &patches.phases[0].offsets[step.tap..step.tap + step.taps],
                taps_are_inner: true,
                segments,
                tail: (0, 0),
                pitch: end - begin,
                to: at(layout.rows),
            };
            copy_rows(isa, copy);
            (at(layout.rows).cast_const(), end - begin)
        }
    }

    /// Multiplies the positions of some blocks, and stores the sums in `sums`.
    unsafe fn sum_blocks(
        &self,
        bases: &[*mut u8],
        group: usize,
        (part, part_end): (usize, usize),
        outs: (usize, usize),
        ins: (usize, usize),
        scratch: *mut u8,
        sums: *mut T,
    ) {
        let &FilterGradient { ref layout, ref patches, micro, isa, columns_are_outputs: wide, plane, .. } =
            self;
        let out_rows = outs.1 - outs.0;
        let real = T::DTYPE;
        // SAFETY: scratch memory has the layout that `new` computed, and the caller's contract.
        unsafe {
            let at = |offset: usize| scratch.add(offset).cast::<T>();
            let panels = at(layout.panels);
            for block in part..part_end {
                let (begin, end) = self.blocks.block(block);
                let depth = end - begin;
                let first = block == part;
                let (image, position) = (begin / plane, begin % plane);
                let is_one_image = position + depth <= plane;
                let positions = Positions { begin, end, image, position, is_one_image };
                // Lines are multiplied in place, unless they are packed into tiles.
                let left = |dtype: DType, lines: Block| {
                    if micro.tiles.is_none() {
                        return Factor { at: lines.at.cast(), line: lines.line_step, depth: 1 };
                    }
                    let to = at(layout.lefts);
                    micro.pack(isa, dtype, lines, Side::A, to);
                    Factor { at: to.cast_const(), line: 1, depth: 1 }
                };
                let (out, dtype) = self.output_lines(bases, group, outs, positions, scratch);
                let out_left = if wide { None } else { Some(left(dtype, out)) };
                if wide {
                    micro.pack(isa, dtype, out, Side::B, panels);
                }

                // Padding has the same positions for all channels.
                scratch.add(layout.strips).write_bytes(0, layout.strip_bytes);
                let segments = scratch.add(layout.segments).cast::<Segment>();
                let mut count = 0;
                patches.for_each_segment((begin, end), depth, 0, |segment| {
                    segments.add(count).write(segment);
                    count += 1;
                });
                let segments = std::slice::from_raw_parts(segments, count);
                let mut column = 0;
                for step in self.steps(ins.1 - ins.0) {
                    let lines = step.rows();
                    debug_assert!(lines <= layout.step_rows && step.channels <= layout.step_channels);
                    let first_channel = (group * self.channels_in + ins.0 + step.channel) * patches.plane;
                    let (windows, line_step) = self.windows(
                        bases[1].cast_const(),
                        (first_channel, &step),
                        positions,
                        segments,
                        scratch,
                    );
                    let line_step = line_step as isize;
                    let windows = Block { at: windows.cast(), line_step, depth_step: 1, lines, depth };
                    if let Some(out) = out_left {
                        micro.pack(isa, real, windows, Side::B, panels);
                        self.multiply(out, out_rows, panels, lines, depth, sums.add(column), !first);
                        column += lines.next_multiple_of(micro.nr);
                    } else {
                        let to = sums.add(column * layout.pitch);
                        self.multiply(left(real, windows), lines, panels, out_rows, depth, to, !first);
                        column += lines;
                    }
                }
            }
        }
    }

    /// Multiplies lines, or tiles of lines, with panels.
    unsafe fn multiply(
        &self,
        a: Factor<T>,
        m: usize,
        panels: *const T,
        n: usize,
        depth: usize,
        to: *mut T,
        add: bool,
    ) {
        let (isa, micro, pitch) = (self.isa, self.micro, self.layout.pitch);
        let (nr, height) = (micro.nr, micro.panel_rows(m));
        for j in (0..n).step_by(nr) {
            // SAFETY: the caller's contract: lines and panels are valid for reads, and sums have capacity for whole
            // panels.
            let at = unsafe { panels.add(micro.packed_len(Side::B, j, depth)) };
            let b = Factor { at, line: 1, depth: nr as isize };
            for i in (0..m).step_by(height) {
                let size = (height.min(m - i), nr.min(n - j));
                let a = micro.at_line(a, Side::A, i, depth);
                // SAFETY: as above.
                unsafe {
                    let c = Target { at: to.add(i * pitch + j), row: pitch as isize };
                    micro.multiply(isa, size, depth, a, b, c, add);
                }
            }
        }
    }

    /// Runs the epilogue over completed sums of some output channels.
    ///
    /// `sums` has the sums of these channels only: rows of channels and taps if [`FilterGradient::wide`], otherwise a
    /// row for each channel.
    unsafe fn run_epilogue(
        &self,
        bases: &[*mut u8],
        settings: RunSettings,
        group: usize,
        (out, out_end): (usize, usize),
        ins: (usize, usize),
        sums: *const T,
        pitch: usize,
        scratch: *mut u8,
    ) {
        let phase = &self.patches.phases[0];
        let alive = phase.taps.len();
        let (channels, width) = (ins.1 - ins.0, (ins.1 - ins.0) * self.taps);
        let nr = self.micro.nr;
        // With every tap present, rows have the order of the filter's elements.
        let in_order = alive == self.taps;
        let columns = |step: &Step| {
            if self.columns_are_outputs { step.rows() } else { step.rows().next_multiple_of(nr) }
        };
        // True if there is no gap between the columns of two steps.
        let adjacent_steps = || {
            self.steps(channels).scan(0, |end, step| {
                let begin = std::mem::replace(end, *end + columns(&step));
                Some(begin == step.channel * self.taps + step.tap)
            })
        };
        let can_skip = !self.columns_are_outputs && in_order && adjacent_steps().all(|is_full| is_full);
        // SAFETY: scratch memory has the layout that `new` computed, and the caller's contract.
        unsafe {
            let line = scratch.add(self.layout.line).cast::<T>();
            for tile in (out..out_end).step_by(TRANSPOSED_CHANNELS) {
                let count = TRANSPOSED_CHANNELS.min(out_end - tile);
                let mut block = (line, width);
                if can_skip {
                    block = (sums.add((tile - out) * pitch).cast_mut(), pitch);
                } else if self.columns_are_outputs && in_order {
                    transpose(self.isa, sums.add(tile - out), pitch, (width, count), line, width);
                } else if in_order {
                    let mut column = 0;
                    for step in self.steps(channels) {
                        for row in 0..count {
                            let from = sums.add((tile - out + row) * pitch + column);
                            let to = line.add(row * width + step.channel * self.taps + step.tap);
                            from.copy_to_nonoverlapping(to, step.rows());
                        }
                        column += columns(&step);
                    }
                } else {
                    (0..count * width).for_each(|i| line.add(i).write(T::ZERO));
                    let mut column = 0;
                    for step in self.steps(channels) {
                        for i in 0..step.rows() {
                            let (channel, tap) = (step.channel + i / step.taps, step.tap + i % step.taps);
                            let to = line.add(channel * self.taps + phase.taps[tap]);
                            for row in 0..count {
                                let from = if self.columns_are_outputs {
                                    sums.add((column + i) * pitch + tile - out + row)
                                } else {
                                    sums.add((tile - out + row) * pitch + column + i)
                                };
                                to.add(row * width).write(from.read());
                            }
                        }
                        column += columns(&step);
                    }
                }
                let rect = Rect {
                    image: 0,
                    channels: (group * self.m + tile, count),
                    positions: (ins.0 * self.taps, width),
                };
                self.epilogue.run(bases, settings, scratch, rect, block.0, block.1);
            }
        }
    }

    /// Adds the parts of the sums of some output channels, and runs the epilogue.
    unsafe fn add_parts(
        &self,
        bases: &[*mut u8],
        settings: RunSettings,
        (group, out, in_): (usize, usize, usize),
        tile: usize,
        parts: ScratchParts,
        worker: usize,
    ) {
        let (outs, ins) = (self.outs.part(out), self.ins.part(in_));
        let (begin, end) =
            (outs.0 + tile * TRANSPOSED_CHANNELS, outs.1.min(outs.0 + (tile + 1) * TRANSPOSED_CHANNELS));
        if begin >= end {
            return;
        }
        let Layout { size, pitch, .. } = self.layout;
        let alive = self.patches.phases[0].taps.len();
        let scratch = parts.worker_part(worker);
        let (first, rows, width, to_pitch) = if self.columns_are_outputs {
            (begin - outs.0, (ins.1 - ins.0) * alive, end - begin, TRANSPOSED_CHANNELS)
        } else {
            ((begin - outs.0) * pitch, end - begin, pitch, pitch)
        };
        // SAFETY: scratch memory has the layout that `new` computed, and all parts are complete.
        unsafe {
            let to = scratch.add(self.layout.tile).cast::<T>();
            let from =
                parts.shared_part().cast::<T>().add(self.task_index(0, group, out, in_) * size + first);
            let step = self.task_index(1, 0, 0, 0) * size;
            add_parts(self.isa, from, pitch, (self.parts.parts, step), (rows, width), to, to_pitch);
            self.run_epilogue(bases, settings, group, (begin, end), ins, to, to_pitch, scratch);
        }
    }

    /// Returns the index of a task.
    fn task_index(&self, part: usize, group: usize, out: usize, in_: usize) -> usize {
        ((part * self.groups + group) * self.outs.parts + out) * self.ins.parts + in_
    }
}

/// Divides some channels into steps of about `max_size` rows each.
fn divide_into_steps(
    channels: usize,
    taps: usize,
    max_size: usize,
    patches: &Patches,
) -> impl Iterator<Item = Step> + use<> {
    let at_once = (max_size / taps).min(MAX_STRIP_ELEMENTS / patches.strip.elements.max(1)).max(1);
    let partition = Partition::with_max_size(channels, 1, at_once);
    let ranges = Partition::with_max_size(taps, 1, if taps > max_size { max_size } else { taps });
    (0..partition.parts).flat_map(move |i| {
        let (begin, end) = partition.part(i);
        (0..ranges.parts).map(move |range| {
            let (from, to) = ranges.part(range);
            Step { channel: begin, channels: end - begin, tap: from, taps: to - from }
        })
    })
}

impl<T: Real + Send + Sync> Engine for FilterGradient<T> {
    fn epilogue(&self) -> &Epilogue {
        &self.epilogue
    }

    fn scratch(&self) -> (usize, usize) {
        (self.layout.shared, self.layout.each)
    }

    unsafe fn run_tasks(&self, run: EngineRun<'_>) {
        let EngineRun { settings, parts, .. } = run;
        let layout = &self.layout;
        let split = self.parts.parts > 1;
        let tasks = self.task_index(self.parts.parts, 0, 0, 0);
        run.each(tasks, |bases, task, worker| {
            let _session = self.micro.open_session();
            let (in_, rest) = (task % self.ins.parts, task / self.ins.parts);
            let (out, rest) = (rest % self.outs.parts, rest / self.outs.parts);
            let (group, part) = (rest % self.groups, rest / self.groups);
            let (outs, ins) = (self.outs.part(out), self.ins.part(in_));
            let scratch = parts.worker_part(worker);
            // SAFETY: scratch memory has the layout that `new` computed, and tasks have separate sums.
            unsafe {
                let sums = if split {
                    parts.shared_part().cast::<T>().add(task * layout.size)
                } else {
                    scratch.add(layout.sums).cast::<T>()
                };
                self.sum_blocks(bases, group, self.parts.part(part), outs, ins, scratch, sums);
                if !split {
                    self.run_epilogue(bases, settings, group, outs, ins, sums, layout.pitch, scratch);
                }
            }
        });
        if split {
            let tiles = self.outs.max_size().div_ceil(TRANSPOSED_CHANNELS);
            run.each(self.task_index(1, 0, 0, 0) * tiles, |bases, task, worker| {
                let (tile, rest) = (task % tiles, task / tiles);
                let (in_, rest) = (rest % self.ins.parts, rest / self.ins.parts);
                let (out, group) = (rest % self.outs.parts, rest / self.outs.parts);
                // SAFETY: as above.
                unsafe { self.add_parts(bases, settings, (group, out, in_), tile, parts, worker) };
            });
        }
    }
}
