//! Convolutions of bytes: products of the filter with windows of the image, summed in `i32`.
//!
//! A copy of the image has the zero point in its padding. An axis with a stride is split into phases: positions that are
//! equal modulo the stride are adjacent. A cell of the window then reads adjacent bytes for adjacent positions of the
//! result, and a panel of windows consists of short reads at constant offsets. Positions are counted along whole lines
//! of the copy. The positions that no result has are removed from a finished block.

use std::sync::Arc;

use ortrain_expr::{DType, SlidingAxis};

use super::desc::ConvDesc;
use super::engine::{ConvCandidate, Engine, EngineRun, boxed};
use super::epilogue::Epilogue;
use super::padding_fixup::RunSettings;
use super::partition::Partition;
use super::rect::Rect;
use crate::gemm::byte_tiles::{
    ByteProducts, LINES, PanelFooter, SIDE, ZeroPoints, interleave, panel_bytes, sum_of_quad,
};
use crate::gemm::pack::Block;
use crate::gemm::tiles::Side;
use crate::isa::{Isa, Level, Work};
use crate::scratch::ScratchParts;
use crate::tile::ALIGN;

/// Bytes of the packed windows of a block.
const MAX_WINDOW_BYTES: usize = 256 << 10;
/// Maximum number of columns of a block.
const MAX_BLOCK_COLUMNS: usize = 512;
/// Maximum number of sums of a block between two runs of the epilogue.
const MAX_BLOCK_ELEMENTS: usize = 64 << 10;
/// Maximum number of positions that are packed together.
const MAX_WINDOW_COLUMNS: usize = 64;
/// Minimum number of multiplications of a task, and maximum number of tasks that split the rows or columns further.
const MIN_TASK_WORK: usize = 1 << 20;
const MAX_TASKS: usize = 16;

/// Spatial axis of the copied image.
#[derive(Clone, Copy, Debug)]
struct Axis {
    sliding: SlidingAxis,
    /// Number of positions of a phase.
    len: usize,
}

impl Axis {
    fn new(sliding: SlidingAxis) -> Axis {
        let reach = (0..sliding.kernel).map(|k| k * sliding.dilation / sliding.stride).max().unwrap_or(0);
        Axis { sliding, len: sliding.output + reach }
    }

    /// Returns the phase of a cell of the window, and the offset of its bytes in the phase.
    fn phase_of(&self, cell: usize) -> (usize, usize) {
        let at = cell * self.sliding.dilation;
        (at % self.sliding.stride, at / self.sliding.stride)
    }
}

/// Sizes of the copies, and the offsets of the terms of a sum.
#[derive(Debug)]
struct Windows {
    axes: Vec<Axis>,
    /// Phases that windows read, each with its phase along every axis.
    phases: Vec<Vec<usize>>,
    /// Bytes of a phase, and of all phases of a channel.
    phase_len: usize,
    channel_len: usize,
    /// Offset of each term of a sum, from the first channel on.
    offsets: Vec<usize>,
    /// Number of positions, counted along whole lines of the copy.
    positions: usize,
    /// Number of positions of the result.
    results: usize,
}

/// Returns the axes, as a single one if all of them have windows of one element, no stride and no padding.
fn merge_plain_axes(axes: &[SlidingAxis]) -> Vec<SlidingAxis> {
    let is_plain = |axis: &SlidingAxis| {
        axis.kernel == 1 && axis.stride == 1 && axis.padding_before == 0 && axis.input == axis.output
    };
    match axes {
        [first, rest @ ..] if axes.iter().all(is_plain) => {
            let size = axes.iter().map(|axis| axis.input).product();
            let merged = SlidingAxis { input: size, output: size, ..*first };
            if rest.is_empty() { axes.to_vec() } else { vec![merged] }
        }
        _ => axes.to_vec(),
    }
}

impl Windows {
    fn new(axes: &[SlidingAxis], channels: usize) -> Windows {
        let axes: Vec<Axis> = axes.iter().copied().map(Axis::new).collect();
        let phase_len = axes.iter().map(|axis| axis.len).product();
        let cells: usize = axes.iter().map(|axis| axis.sliding.kernel).product();
        let mut phases: Vec<Vec<usize>> = Vec::new();
        let mut offset_of_cell = Vec::new();
        for mut cell in 0..cells {
            let (mut phase, mut offset, mut step) = (vec![0; axes.len()], 0, 1);
            for (i, axis) in axes.iter().enumerate().rev() {
                let along = axis.phase_of(cell % axis.sliding.kernel);
                cell /= axis.sliding.kernel;
                (phase[i], offset) = (along.0, offset + along.1 * step);
                step *= axis.len;
            }
            let index = phases.iter().position(|other| *other == phase).unwrap_or_else(|| {
                phases.push(phase);
                phases.len() - 1
            });
            offset_of_cell.push(index * phase_len + offset);
        }
        let channel_len = phases.len() * phase_len;
        let offsets = (0..channels)
            .flat_map(|channel| offset_of_cell.iter().map(move |offset| channel * channel_len + offset))
            .collect();
        let mut step = 1;
        let mut positions = 1;
        for axis in axes.iter().rev() {
            positions += axis.sliding.output.saturating_sub(1) * step;
            step *= axis.len;
        }
        let results = axes.iter().map(|axis| axis.sliding.output).product();
        Windows { phases, phase_len, channel_len, offsets, positions, results, axes }
    }

    /// Calls `each` for the runs of positions in a range that the result has: the first position relative to the range,
    /// the length, and the position in the result.
    fn for_each_run(&self, (begin, end): (usize, usize), mut each: impl FnMut(usize, usize, usize)) {
        let Some(last) = self.axes.last() else {
            return each(0, end - begin, 0);
        };
        let mut at = begin;
        while at < end {
            let (line, along) = (at / last.len, at % last.len);
            let next = end.min((line + 1) * last.len);
            let (mut rest, mut result, mut step, mut exists) = (line, 0, last.sliding.output, true);
            for axis in self.axes.iter().rev().skip(1) {
                let index = rest % axis.len;
                rest /= axis.len;
                exists &= index < axis.sliding.output;
                result += index * step;
                step *= axis.sliding.output;
            }
            if exists && along < last.sliding.output {
                let len = (last.sliding.output - along).min(next - at);
                each(at - begin, len, result + along);
            }
            at = next;
        }
    }
}

/// Offsets in scratch memory, and bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Layout {
    /// Copies of all images, in shared memory behind the filter.
    images: usize,
    shared: usize,
    windows: usize,
    block: usize,
    each: usize,
}

pub(super) struct ByteConv {
    epilogue: Arc<Epilogue>,
    isa: Isa,
    products: ByteProducts,
    dtypes: [DType; 2],
    batch: usize,
    groups: usize,
    channels: usize,
    /// Number of rows of a group: channels of the result.
    m: usize,
    windows: Windows,
    /// Index of the buffer of the zero points of the image and of the filter, and the step from channel to channel.
    zero_points: [Option<(usize, usize)>; 2],
    rows: Partition,
    columns: Partition,
    /// True if windows are packed once for all parts of the rows.
    shares_windows: bool,
    /// Maximum number of rows of a block.
    block_rows: usize,
    layout: Layout,
}

/// Returns the bytes of a panel, which has a footer even for empty sums.
fn reserved_panel_bytes(depth: usize) -> usize {
    panel_bytes(depth.max(1))
}

/// Convolutions of bytes.
pub(super) fn candidate() -> ConvCandidate {
    ConvCandidate {
        name: "conv.byte_tiles",
        accepts: |_| true,
        preferences: &[],
        build: |request| Some(boxed(ByteConv::new(request.desc, request.isa, request.epilogue))),
    }
}

impl ByteConv {
    fn new(desc: &ConvDesc, isa: Isa, epilogue: &Arc<Epilogue>) -> ByteConv {
        let shape = &desc.shape;
        let windows = Windows::new(&merge_plain_axes(&shape.axes), shape.channels_in);
        let (m, depth) = (shape.channels_out, windows.offsets.len());
        let panel = reserved_panel_bytes(depth);
        let images = shape.batch * shape.groups;
        let work = m.saturating_mul(windows.positions).saturating_mul(depth).saturating_mul(images);
        let target_tasks = (work / MIN_TASK_WORK).clamp(1, MAX_TASKS);
        let each = target_tasks.div_ceil(images.max(1));
        let max_columns = (MAX_WINDOW_BYTES / panel * LINES).clamp(SIDE, MAX_BLOCK_COLUMNS);
        let most = windows.positions.div_ceil(each).next_multiple_of(SIDE).min(max_columns);
        let columns = Partition::with_max_size(windows.positions, SIDE, most);
        let rows = Partition::new(m, SIDE, each.div_ceil(columns.parts.max(1)));
        let pitch = columns.max_size().next_multiple_of(SIDE);
        let block_rows = (MAX_BLOCK_ELEMENTS / pitch.max(1) / SIDE * SIDE).max(SIDE);
        let shares_windows = rows.parts > 1;
        let mut next = 1 + desc.epilogue.loads.len() + desc.epilogue.stores.len();
        let zero_points = desc.zero_points.map(|count| {
            let count = count?;
            next += 1;
            Some((next - 1, usize::from(count > 1)))
        });
        let mut layout = Layout { each: epilogue.frame, ..Layout::default() };
        let mut reserve = |bytes: usize| {
            let at = layout.each;
            layout.each += bytes.next_multiple_of(ALIGN);
            at
        };
        let windows_of_block = pitch / LINES * panel;
        layout.windows = reserve(if shares_windows { 0 } else { windows_of_block });
        layout.block = reserve(pitch * block_rows.min(m.next_multiple_of(SIDE)) * size_of::<i32>());
        layout.images = (shape.groups * m.div_ceil(SIDE) * 2 * panel).next_multiple_of(ALIGN);
        let copies = images.saturating_mul(shape.channels_in).saturating_mul(windows.channel_len);
        // The last panel of a channel reads beyond its last position.
        layout.shared = (layout.images + copies + MAX_WINDOW_COLUMNS).next_multiple_of(ALIGN);
        if shares_windows {
            layout.windows = layout.shared;
            layout.shared += images.saturating_mul(columns.parts).saturating_mul(windows_of_block);
        }
        ByteConv {
            epilogue: Arc::clone(epilogue),
            isa,
            products: ByteProducts::new(isa, [desc.b, desc.a]),
            dtypes: [desc.a, desc.b],
            batch: shape.batch,
            groups: shape.groups,
            channels: shape.channels_in,
            m,
            windows,
            zero_points,
            rows,
            columns,
            shares_windows,
            block_rows,
            layout,
        }
    }

    fn depth(&self) -> usize {
        self.windows.offsets.len()
    }

    /// Returns the bytes of a panel.
    fn panel(&self) -> usize {
        reserved_panel_bytes(self.depth())
    }

    /// Returns the number of panels of the filter of a group: a whole number of pairs.
    fn panels(&self) -> usize {
        2 * self.m.div_ceil(SIDE)
    }

    /// Returns a zero point of an operand as a number, after its shift.
    unsafe fn zero_point(&self, bases: &[*mut u8], operand: usize, channel: usize) -> i32 {
        let (side, dtype) = ([Side::B, Side::A][operand], self.dtypes[operand]);
        let (_, shift) = self.products.shift(side, dtype);
        let Some((buffer, step)) = self.zero_points[operand] else { return shift };
        // SAFETY: the buffer has a zero point, or one for each channel.
        let byte = unsafe { bases[buffer].add(channel * step).read() };
        shift + if dtype == DType::I8 { i32::from(byte.cast_signed()) } else { i32::from(byte) }
    }

    /// Packs a pair of panels of the filter.
    unsafe fn pack_filter(&self, bases: &[*mut u8], task: usize, to: *mut u8) {
        let pairs = self.panels() / 2;
        let (group, row) = (task / pairs, task % pairs * SIDE);
        let depth = self.depth();
        let channel = group * self.m + row;
        let block = Block {
            at: bases[1].wrapping_add(channel * depth).cast_const(),
            line_step: depth as isize,
            depth_step: 1,
            lines: SIDE.min(self.m - row),
            depth,
        };
        let zero_points = self.zero_points[1].map_or(ZeroPoints::ZEROS, |(buffer, step)| ZeroPoints {
            at: bases[buffer].wrapping_add(channel * step).cast_const(),
            step: step as isize,
        });
        let to = to.wrapping_add((group * self.panels() + row / LINES) * self.panel());
        // SAFETY: the filter has these elements, and shared memory has room for whole pairs of panels.
        unsafe { self.products.pack(self.isa, self.dtypes[1], (block, zero_points), Side::A, to) };
    }

    /// Copies all phases of a channel of an image.
    unsafe fn copy_channel(&self, bases: &[*mut u8], channel: usize, to: *mut u8) {
        let Windows { axes, phases, phase_len, channel_len, .. } = &self.windows;
        let plane: usize = axes.iter().map(|axis| axis.sliding.input).product();
        let (flip, _) = self.products.shift(Side::B, self.dtypes[0]);
        // SAFETY: the image has a zero point.
        let padding = unsafe { self.zero_point(bases, 0, 0) };
        for (k, phase) in phases.iter().enumerate() {
            self.isa.run(CopyPhase {
                axes,
                phase,
                from: bases[0].wrapping_add(channel * plane).cast_const(),
                to: to.wrapping_add(channel * channel_len + k * phase_len),
                flip,
                padding: padding as u8,
            });
        }
    }

    /// Packs the windows of a block of columns.
    unsafe fn pack_windows(
        &self,
        bases: &[*mut u8],
        (image, group): (usize, usize),
        (begin, end): (usize, usize),
        parts: ScratchParts,
        to: *mut u8,
    ) {
        // SAFETY: scratch memory has the layout that `new` computed, and the caller's contract.
        unsafe {
            let first = (image * self.groups + group) * self.channels * self.windows.channel_len;
            let from = parts.shared_part().add(self.layout.images).add(first + begin);
            let mut rows_of_group = group * self.m..(group + 1) * self.m;
            let needs_sums = rows_of_group.any(|channel| self.zero_point(bases, 1, channel) != 0);
            self.isa.run(PackWindows {
                products: self.products,
                from,
                offsets: &self.windows.offsets,
                columns: (end - begin).next_multiple_of(SIDE),
                needs_sums,
                zero_point: self.zero_point(bases, 0, 0),
                to,
            });
        }
    }

    /// Returns the address of the windows of a block, if they are shared.
    fn shared_windows(&self, (image, group): (usize, usize), block: usize, parts: ScratchParts) -> *mut u8 {
        let pitch = self.columns.max_size().next_multiple_of(SIDE);
        let index = (image * self.groups + group) * self.columns.parts + block;
        let offset = self.layout.windows + index * (pitch / LINES) * self.panel();
        parts.shared_part().wrapping_add(offset)
    }

    /// Computes a block of columns for a range of rows.
    unsafe fn run_task(
        &self,
        bases: &[*mut u8],
        settings: RunSettings,
        (image, group): (usize, usize),
        block: usize,
        (row, row_end): (usize, usize),
        parts: ScratchParts,
        scratch: *mut u8,
    ) {
        let (begin, end) = self.columns.part(block);
        let (depth, cols) = (self.depth(), end - begin);
        let (panel, pitch) = (self.panel(), cols.next_multiple_of(SIDE));
        // SAFETY: scratch memory has the layout that `new` computed, and the caller's contract.
        unsafe {
            let windows = if self.shares_windows {
                self.shared_windows((image, group), block, parts)
            } else {
                let windows = scratch.add(self.layout.windows);
                self.pack_windows(bases, (image, group), (begin, end), parts, windows);
                windows
            };
            let filter = parts.shared_part().add(group * self.panels() * panel);
            let block = scratch.add(self.layout.block).cast::<i32>();
            for first in (row..row_end).step_by(self.block_rows) {
                let rows = self.block_rows.min(row_end - first);
                for j in (0..cols).step_by(SIDE) {
                    let columns = SIDE.min((cols - j).next_multiple_of(LINES));
                    for i in (0..rows).step_by(SIDE) {
                        let a = filter.add((first + i) / LINES * panel).cast_const();
                        let b = windows.add(j / LINES * panel).cast_const();
                        let (size, to) = ((SIDE.min(rows - i), columns), block.add(i * pitch + j));
                        self.products.multiply(self.isa, size, depth, (a, b), to, pitch as isize, false);
                    }
                }
                let (mut count, mut position) = (0, 0);
                self.windows.for_each_run((begin, end), |from, len, result| {
                    if count == 0 {
                        position = result;
                    }
                    if from != count {
                        for line in (0..rows).map(|i| block.add(i * pitch)) {
                            std::ptr::copy(line.add(from), line.add(count), len);
                        }
                    }
                    count += len;
                });
                if count > 0 {
                    let channels = (group * self.m + first, rows);
                    let rect = Rect { image, channels, positions: (position, count) };
                    self.epilogue.run(bases, settings, scratch, rect, block, pitch);
                }
            }
        }
    }
}

impl Engine for ByteConv {
    fn epilogue(&self) -> &Epilogue {
        &self.epilogue
    }

    fn scratch(&self) -> (usize, usize) {
        (self.layout.shared, self.layout.each)
    }

    unsafe fn run_tasks(&self, run: EngineRun<'_>) {
        let EngineRun { settings, parts, .. } = run;
        let pairs = self.groups * self.panels() / 2;
        // Copies of a plane are short.
        let channels = self.batch * self.groups * self.channels;
        let copies = Partition::new(channels, 1, MAX_TASKS);
        run.each(pairs + copies.parts, |bases, task, _| {
            let shared = parts.shared_part();
            // SAFETY: the caller's contract; tasks write separate parts of shared memory.
            unsafe {
                if task < pairs {
                    self.pack_filter(bases, task, shared);
                } else {
                    let (begin, end) = copies.part(task - pairs);
                    let to = shared.add(self.layout.images);
                    (begin..end).for_each(|channel| self.copy_channel(bases, channel, to));
                }
            }
        });
        let (blocks, row_parts) = (self.columns.parts, self.rows.parts);
        if self.windows.results == 0 {
            return;
        }
        let image_of = |index: usize| (index / self.groups, index % self.groups);
        if self.shares_windows {
            run.each(self.batch * self.groups * blocks, |bases, task, _| {
                let (block, image) = (task % blocks, image_of(task / blocks));
                let to = self.shared_windows(image, block, parts);
                // SAFETY: as above.
                unsafe { self.pack_windows(bases, image, self.columns.part(block), parts, to) };
            });
        }
        run.each(self.batch * self.groups * blocks * row_parts, |bases, task, worker| {
            let (row, rest) = (task % row_parts, task / row_parts);
            let (block, image) = (rest % blocks, image_of(rest / blocks));
            let (scratch, rows) = (parts.worker_part(worker), self.rows.part(row));
            // SAFETY: as above.
            unsafe { self.run_task(bases, settings, image, block, rows, parts, scratch) };
        });
    }
}

/// Copies one phase of a channel.
struct CopyPhase<'a> {
    axes: &'a [Axis],
    phase: &'a [usize],
    from: *const u8,
    to: *mut u8,
    /// Bits that turn elements into bytes of a panel.
    flip: u8,
    /// Byte of a panel in the padding.
    padding: u8,
}

impl CopyPhase<'_> {
    /// Returns the positions of a phase that lie over the input, and the input position of the first one.
    fn inside(axis: &Axis, phase: usize) -> (usize, usize, usize) {
        let SlidingAxis { input, stride, padding_before, .. } = axis.sliding;
        let start = phase as isize - padding_before;
        let number = |limit: isize| {
            usize::try_from(limit - start).map_or(0, |distance| distance.div_ceil(stride)).min(axis.len)
        };
        let (first, end) = (number(0), number(input as isize));
        (first, end.max(first), (start + (first * stride) as isize).max(0).unsigned_abs())
    }
}

impl Work for CopyPhase<'_> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let CopyPhase { axes, phase, from, to, flip, padding } = self;
        let Some((last, outer)) = axes.split_last() else {
            // SAFETY: a plane without axes has one element.
            unsafe { to.write(from.read() ^ flip) };
            return;
        };
        let (first, end, start) = CopyPhase::inside(last, phase[axes.len() - 1]);
        let lines: usize = outer.iter().map(|axis| axis.len).product();
        let stride = last.sliding.stride;
        for line in 0..lines {
            let (mut rest, mut source, mut step, mut exists) = (line, 0, last.sliding.input, true);
            for (axis, &phase) in outer.iter().zip(phase).rev() {
                let index = rest % axis.len;
                rest /= axis.len;
                let (first, end, start) = CopyPhase::inside(axis, phase);
                exists &= (first..end).contains(&index);
                source += (start + index.saturating_sub(first) * axis.sliding.stride) * step;
                step *= axis.sliding.input;
            }
            // SAFETY: a phase has `lines` lines, and the positions inside are elements of the plane.
            unsafe {
                let to = std::slice::from_raw_parts_mut(to.add(line * last.len), last.len);
                if !exists {
                    to.fill(padding);
                    continue;
                }
                to[..first].fill(padding);
                to[end..].fill(padding);
                let from = from.wrapping_add(source + start);
                let to = &mut to[first..end];
                if stride == 1 {
                    let from = std::slice::from_raw_parts(from, to.len());
                    to.iter_mut().zip(from).for_each(|(to, from)| *to = from ^ flip);
                } else {
                    to.iter_mut().enumerate().for_each(|(i, to)| *to = from.add(i * stride).read() ^ flip);
                }
            }
        }
    }
}

/// Packs panels of windows.
struct PackWindows<'a> {
    products: ByteProducts,
    /// First position, in the first channel.
    from: *const u8,
    offsets: &'a [usize],
    /// Number of positions: whole panels.
    columns: usize,
    /// True if the filter has zero points other than zero, so that the sums matter.
    needs_sums: bool,
    zero_point: i32,
    to: *mut u8,
}

impl PackWindows<'_> {
    /// Writes the footer of a panel.
    ///
    /// # Safety
    /// The panel has the capacity of all depths.
    unsafe fn finish_panel(&self, panel: *mut u8, mut sums: [i32; LINES]) {
        let (depth, zero_point) = (self.offsets.len(), self.zero_point);
        for sum in &mut sums {
            *sum = sum.wrapping_sub(zero_point.wrapping_mul(depth as i32));
        }
        // SAFETY: the caller's contract.
        unsafe { PanelFooter { zero_points: [zero_point; LINES], sums }.write(panel, depth) };
    }
}

impl Work for PackWindows<'_> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let PackWindows { products, offsets, columns, needs_sums, .. } = self;
        let (depth, is_signed) = (offsets.len(), products.has_signed_panels(Side::B));
        let each = reserved_panel_bytes(depth);
        // Copies have the bytes of a panel already.
        let dtype = if is_signed { DType::I8 } else { DType::U8 };
        let mut column = 0;
        while column < columns {
            let from = self.from.wrapping_add(column);
            let panel = self.to.wrapping_add(column / LINES * each);
            let wide = products.wide_columns();
            if wide > 0 && columns - column >= wide {
                // SAFETY: copies have the bytes of all positions, and some more bytes behind the last one.
                unsafe {
                    let row = |p: usize| from.wrapping_add(*offsets.get_unchecked(p));
                    let sums = products.pack_wide_rows(depth, dtype, row, (panel, each));
                    for (j, sums) in sums.into_iter().enumerate() {
                        self.finish_panel(panel.wrapping_add(j * each), sums);
                    }
                }
                column += wide;
                continue;
            }
            let mut sums = [0i32; LINES];
            for (q, offsets) in offsets.chunks(4).enumerate() {
                let rows: [[u8; LINES]; 4] = std::array::from_fn(|i| match offsets.get(i) {
                    // SAFETY: as above.
                    Some(&offset) => unsafe {
                        from.wrapping_add(offset).cast::<[u8; LINES]>().read_unaligned()
                    },
                    None => [0; LINES],
                });
                let quads = interleave(&rows, [0; 4]);
                if needs_sums {
                    for (sum, &quad) in sums.iter_mut().zip(&quads) {
                        *sum = sum.wrapping_add(sum_of_quad(quad, is_signed));
                    }
                }
                // SAFETY: the panel has these quads.
                unsafe { panel.cast::<[u32; LINES]>().add(q).write_unaligned(quads) };
            }
            // SAFETY: as above.
            unsafe { self.finish_panel(panel, sums) };
            column += LINES;
        }
    }
}
