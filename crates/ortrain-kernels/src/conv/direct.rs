//! Direct convolution: computes the output, or the gradient of the input, without packing windows into panels.
//!
//! It is for results with few channels, where packing would take as long as the multiplications. A task computes some
//! rows of positions. It copies the elements under their windows into strips, one strip for each channel. For each tap,
//! it reads vectors of consecutive positions from the strips, and multiplies them by the weights of a few channels of
//! the result. If rows of positions would not fill vectors, a vector has the weights of several channels instead, and
//! is multiplied by the element of one position. Rows of a window in the padding are skipped.

use std::sync::Arc;

use ortrain_expr::{ConvPass, ConvShape, DType};

use super::copy::fill_strips;
use super::epilogue::Epilogue;
use super::im2col::Patches;
use super::implicit_gemm::{MAX_STRIP_ELEMENTS, MAX_TASKS};
use super::padding_fixup::RunSettings;
use super::partition::{BlockUnit, Blocks, Partition};
use super::tiles::{ChannelKernels, LATENCY_POSITIONS, MAX_VECTORS, PositionKernels};
use crate::conv::desc::ConvDesc;
use crate::conv::engine::{ConvCandidate, Engine, EngineRun, Request, boxed};
use crate::conv::rect::Rect;
use crate::gemm::levels::Real;
use crate::gemm::pack::transpose;
use crate::isa::{CACHE_LINE_BYTES, Isa};
use crate::scratch::ScratchParts;
use crate::tile::ALIGN;

/// Maximum number of elements of a block of the result.
const MAX_BLOCK_ELEMENTS: usize = 64 << 10;
/// Cost of packing a vector, in multiplications of a vector.
const PACKING_COST: usize = 8;
/// Minimum number of channels of the result for this engine.
const MIN_CHANNELS: usize = 4;
/// Maximum bytes of the elements that a micro-kernel call with vectors of positions reads. The elements stay in the
/// first-level cache for all channels of the result, while the weights stream through it.
const MAX_WINDOW_BYTES: usize = 12 << 10;
/// Maximum bytes of the weights that a micro-kernel call with vectors of channels reads. The weights stay in the
/// first-level cache for all positions of the block.
const MAX_WEIGHT_BYTES: usize = 12 << 10;
/// Divisor for the saving: vectors of channels must save more than their work divided by this number, because their
/// weights are read more often.
const MIN_SAVING: usize = 16;

/// Contents of a vector.
#[derive(Clone, Copy)]
enum VectorAxis {
    /// Consecutive positions of a row.
    Positions(PositionKernels),
    /// Weights of channels of the result.
    Channels(ChannelKernels),
}

impl VectorAxis {
    /// Returns the number of channels of the result that are computed together.
    fn height(self) -> usize {
        match self {
            VectorAxis::Positions(tiles) => tiles.rows,
            VectorAxis::Channels(tiles) => tiles.channels,
        }
    }

    /// Returns the number of products per term for `m` channels and a row of `cols` positions, including unused lanes.
    fn work(self, m: usize, cols: usize) -> usize {
        let each = match self {
            VectorAxis::Positions(tiles) => cols.next_multiple_of(tiles.lanes),
            VectorAxis::Channels(tiles) => {
                let parts = Partition::with_max_size(cols, 1, tiles.run.len());
                let part = |i| parts.part(i);
                (0..parts.parts).map(part).map(|(from, to)| (to - from).max(LATENCY_POSITIONS)).sum()
            }
        };
        m.next_multiple_of(self.height()).saturating_mul(each)
    }
}

/// Direct convolution without packing.
pub(super) struct Direct {
    epilogue: Arc<Epilogue>,
    isa: Isa,
    vector_axis: VectorAxis,
    patches: Patches,
    dtypes: [DType; 2],
    /// Number of channels of the result, and number of channels that a sum covers.
    m: usize,
    channels: usize,
    /// Strides of the filter, in elements: between channels of the result, and between channels of a sum.
    filter: [usize; 2],
    /// Blocks of an image's positions: whole rows.
    blocks: Blocks,
    /// Offset in the strips of each term of a sum.
    offsets: Vec<u32>,
    /// Channel and tap of each term, in the same order.
    terms: Vec<(usize, usize)>,
    /// For each range of channels, the rows of a window: offset from the row of the position, and index of the first
    /// term. An extra entry at the end of each list has the end of its terms.
    rows: Vec<Vec<(isize, usize)>>,
    layout: Layout,
}

/// Layout of scratch memory. Offsets are in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Layout {
    strips: usize,
    strip_bytes: usize,
    block: usize,
    /// Block with adjacent channels, if vectors have channels.
    transposed: usize,
    /// Bytes for each worker.
    each: usize,
    /// Bytes of the packed weights, which workers share.
    shared: usize,
    /// Elements from row to row of a block.
    pitch: usize,
}

/// Outputs and gradients of inputs, with weights packed once and windows read in place.
pub(super) fn candidate<T: Real>() -> ConvCandidate {
    ConvCandidate {
        name: "conv.direct",
        accepts: |request| {
            let ConvDesc { ref shape, b, .. } = *request.desc;
            let is_supported = shape.pass != ConvPass::FilterGradient && shape.groups == 1;
            T::BYTES == 4 && b == DType::F32 && is_supported && request.multiplies_unchanged::<f32>()
        },
        preferences: &[has_many_channels, fills_lanes],
        build: |request| Direct::new(request.desc, request.isa, request.epilogue).map(boxed),
    }
}

/// Returns the number of channels of the result, and the number of channels that a sum covers.
fn channels_of(shape: &ConvShape) -> (usize, usize) {
    match shape.pass {
        ConvPass::InputGradient => (shape.channels_in, shape.channels_out),
        ConvPass::Output | ConvPass::FilterGradient => (shape.channels_out, shape.channels_in),
    }
}

/// Few channels leave rows of a tile unused.
fn has_many_channels(request: &Request<'_>) -> bool {
    channels_of(&request.desc.shape).0 >= MIN_CHANNELS
}

/// Unused lanes must cost less than the packing of windows for a product.
fn fills_lanes(request: &Request<'_>) -> bool {
    let (m, _) = channels_of(&request.desc.shape);
    Patches::new(&request.desc.shape, false).is_some_and(|patches| {
        let cols = patches.cols.count;
        choose_vector_axis(request.isa, m, cols).1 <= (m + PACKING_COST).saturating_mul(cols)
    })
}

/// Returns the vector axis with less work for `m` channels and rows of `cols` positions, and the work of a term.
fn choose_vector_axis(isa: Isa, m: usize, cols: usize) -> (VectorAxis, usize) {
    let [positions, across] =
        [VectorAxis::Positions(PositionKernels::new(isa)), VectorAxis::Channels(ChannelKernels::new(isa, m))];
    let [spent, spent_across] = [positions, across].map(|lanes| lanes.work(m, cols));
    let spent_across = spent_across + spent_across / MIN_SAVING;
    if spent_across < spent { (across, spent_across) } else { (positions, spent) }
}

impl Direct {
    /// Returns `None` if the windows are unsupported, or if a strip or a block is too large.
    fn new(desc: &ConvDesc, isa: Isa, finish: &Arc<Epilogue>) -> Option<Direct> {
        const BYTES: usize = size_of::<f32>();
        let shape = &desc.shape;
        let mut patches = Patches::new(shape, false)?;
        let [phase] = patches.phases.as_slice() else { return None };
        let taps: usize = shape.axes.iter().map(|axis| axis.kernel).product();
        let plane = shape.channels_in * taps;
        let (m, channels) = channels_of(shape);
        let filter = if shape.pass == ConvPass::Output { [plane, taps] } else { [taps, plane] };
        let plain = patches.rows.spread * patches.cols.spread == 1 && patches.outer.is_empty();
        let has_several_taps = phase.taps.len() > 1;
        if !plain || !has_several_taps || [m, channels, patches.positions()].contains(&0) {
            return None;
        }
        let cols = patches.cols.count;
        let tiles = PositionKernels::new(isa);
        let (lanes, _) = choose_vector_axis(isa, m, cols);
        let height = lanes.height();
        if m.saturating_mul(cols) > 2 * MAX_BLOCK_ELEMENTS {
            return None;
        }

        let rows = (MAX_BLOCK_ELEMENTS / (m * cols)).max(1);
        let target_tasks = MAX_TASKS.div_ceil(patches.batch.max(1));
        let blocks = Blocks::new(patches.positions(), cols, BlockUnit::Rows(1), rows * cols, target_tasks);
        patches.plan_strip(blocks.max_positions, blocks.is_split_by_rows(), true);
        let elements = patches.strip.elements;
        if blocks.is_split_by_rows() || channels.saturating_mul(elements) > MAX_STRIP_ELEMENTS {
            return None;
        }

        // Terms are sorted by range of channels, then by row of the window. So rows of the window in the padding, at
        // either end, can be skipped.
        let phase = &patches.phases[0];
        let mut order: Vec<usize> = (0..phase.taps.len()).collect();
        order.sort_by_key(|&tap| phase.row_offset(tap));
        let lines = order.chunk_by(|&a, &b| phase.row_offset(a) == phase.row_offset(b));
        let line =
            (tiles.run.len() * tiles.lanes * BYTES).next_multiple_of(CACHE_LINE_BYTES) + CACHE_LINE_BYTES;
        let group_size = match lanes {
            VectorAxis::Positions(_) => MAX_WINDOW_BYTES / (lines.clone().count() * line),
            VectorAxis::Channels(_) => MAX_WEIGHT_BYTES / (phase.taps.len() * height * BYTES),
        };
        let chunks = Partition::with_max_size(channels, 1, group_size.max(1));
        let (mut offsets, mut terms, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for chunk in 0..chunks.parts {
            let (first, end) = chunks.part(chunk);
            let mut begins = Vec::new();
            for taps in lines.clone() {
                begins.push((phase.row_offset(taps[0]), offsets.len()));
                for channel in first..end {
                    for &tap in taps {
                        let offset = channel * elements + phase.offsets[tap] as usize;
                        offsets.push(u32::try_from(offset).ok()?);
                        terms.push((channel, phase.taps[tap]));
                    }
                }
            }
            begins.push((isize::MAX, offsets.len()));
            rows.push(begins);
        }

        let mut layout =
            Layout { each: finish.frame, pitch: blocks.max_positions + tiles.lanes, ..Layout::default() };
        let padded_rows = m.next_multiple_of(height);
        layout.strip_bytes = channels * elements * BYTES;
        let mut reserve = |bytes: usize| {
            let at = layout.each;
            layout.each += bytes.next_multiple_of(ALIGN);
            at
        };
        layout.strips = reserve(layout.strip_bytes);
        layout.block = reserve(padded_rows * layout.pitch * BYTES);
        if matches!(lanes, VectorAxis::Channels(_)) {
            layout.transposed = reserve(padded_rows * blocks.max_positions * BYTES);
        }
        let weights = padded_rows * offsets.len();
        layout.shared = (weights * BYTES).next_multiple_of(ALIGN);
        Some(Direct {
            epilogue: Arc::clone(finish),
            isa,
            vector_axis: lanes,
            patches,
            dtypes: [desc.a, desc.b],
            m,
            channels,
            filter,
            blocks,
            offsets,
            terms,
            rows,
            layout,
        })
    }

    /// Packs the weights of a tile of channels of the result. Channels after the last one get zeros.
    ///
    /// # Safety
    /// `filter` is valid for reads of all weights, and `to` for writes of the weights of a tile.
    unsafe fn pack(&self, filter: *const f32, tile: usize, to: *mut f32) {
        let height = self.vector_axis.height();
        let [line, plane] = self.filter;
        for (k, &(channel, tap)) in self.terms.iter().enumerate() {
            for i in 0..height {
                let row = tile * height + i;
                // SAFETY: the caller's contract: the filter has these elements, and `to` has capacity for a tile.
                unsafe {
                    let weight = if row < self.m {
                        filter.add(row * line + channel * plane + tap).read_unaligned()
                    } else {
                        0.0
                    };
                    to.add(k * height + i).write(weight);
                }
            }
        }
    }

    /// Returns the range of terms for which the row of the window is inside the image, for at least one row of
    /// positions in `first..=last`.
    fn visible_terms(&self, rows: &[(isize, usize)], first: usize, last: usize) -> (usize, usize) {
        let axis = &self.patches.rows;
        let [first, last] = [first, last].map(|row| (row * axis.step) as isize);
        let lines = &rows[..rows.len() - 1];
        let begin = lines.partition_point(|&(offset, _)| last + offset < 0);
        let end = lines.partition_point(|&(offset, _)| first + offset < axis.source as isize);
        (rows[begin].1, rows[end.max(begin)].1)
    }

    /// Runs one task: a block of positions of an image.
    unsafe fn task(
        &self,
        bases: &[*mut u8],
        settings: RunSettings,
        image: usize,
        (begin, end): (usize, usize),
        parts: ScratchParts,
        worker: usize,
    ) {
        let Direct { patches, layout, .. } = self;
        let start = image * patches.positions();
        let scratch = parts.worker_part(worker);
        // SAFETY: scratch memory has the layout that `new` computed, and the caller's contract.
        unsafe {
            let strips = scratch.add(layout.strips).cast::<f32>();
            strips.cast::<u8>().write_bytes(0, layout.strip_bytes);
            let from = bases[0].cast_const();
            fill_strips(
                self.isa,
                self.dtypes[0],
                patches,
                (start + begin, start + end),
                from,
                self.channels,
                strips,
            );
            let block = scratch.add(layout.block).cast::<f32>();
            let weights = parts.shared_part().cast::<f32>().cast_const();
            match &self.vector_axis {
                VectorAxis::Positions(tiles) => {
                    self.vectors_of_positions(tiles, bases, image, (begin, end), weights, strips, block);
                }
                VectorAxis::Channels(tiles) => {
                    let transposed = scratch.add(layout.transposed).cast::<f32>();
                    self.vectors_of_channels(tiles, (begin, end), weights, strips, transposed);
                    let pitch = self.m.next_multiple_of(tiles.channels);
                    transpose(self.isa, transposed, pitch, (end - begin, self.m), block, layout.pitch);
                }
            }
            let rect = Rect { image, channels: (0, self.m), positions: (begin, end - begin) };
            self.epilogue.run(bases, settings, scratch, rect, block, layout.pitch);
        }
    }

    /// Computes the block by vectors of positions.
    ///
    /// The last vector of a row may exceed the row. The next row overwrites its extra lanes; after the last row of a
    /// channel they are in unused capacity.
    ///
    /// # Safety
    /// Scratch memory has the layout that `new` computed, the weights are packed, and the strips are filled.
    unsafe fn vectors_of_positions(
        &self,
        tiles: &PositionKernels,
        bases: &[*mut u8],
        image: usize,
        (begin, end): (usize, usize),
        weights: *const f32,
        strips: *mut f32,
        block: *mut f32,
    ) {
        let Direct { patches, layout, .. } = self;
        let (cols, lanes) = (patches.cols.count, tiles.lanes);
        let (row, rows) = (begin / cols, (end - begin) / cols);
        // SAFETY: the caller's contract.
        unsafe {
            let across = cols.div_ceil(lanes);
            let vector = |i: usize| (i / across, i % across * lanes);
            for first in (0..rows * across).step_by(tiles.run.len()) {
                let count = tiles.run.len().min(rows * across - first);
                let (mut froms, mut position_indices) =
                    ([strips.cast_const(); MAX_VECTORS], [0; MAX_VECTORS]);
                for (v, (from, position)) in
                    froms.iter_mut().zip(&mut position_indices).take(count).enumerate()
                {
                    let (y, x) = vector(first + v);
                    *from = strips.add(y * patches.strip.row_step + x);
                    *position = y * cols + x;
                }
                let (top, bottom) = (row + vector(first).0, row + vector(first + count - 1).0);
                for (chunk, lines) in self.rows.iter().enumerate() {
                    let (low, high) = self.visible_terms(lines, top, bottom);
                    for tile in 0..self.m.div_ceil(tiles.rows) {
                        if chunk + 1 == self.rows.len() {
                            let channel = tile * tiles.rows;
                            let channels = (channel, tiles.rows.min(self.m - channel));
                            let rect = Rect { image, channels, positions: (begin + position_indices[0], 1) };
                            self.epilogue.prefetch_rect(bases, rect);
                        }
                        tiles.run[count - 1](
                            high - low,
                            self.offsets.as_ptr().add(low),
                            weights.add((tile * self.offsets.len() + low) * tiles.rows),
                            froms.as_ptr(),
                            position_indices.as_ptr(),
                            block.add(tile * tiles.rows * layout.pitch),
                            layout.pitch,
                            chunk > 0,
                        );
                    }
                }
            }
        }
    }

    /// Computes the block by vectors of channels, for a few neighbouring positions at a time. Channels are adjacent in
    /// the block.
    ///
    /// # Safety
    /// Scratch memory has the layout that `new` computed, the weights are packed, and the strips are filled.
    unsafe fn vectors_of_channels(
        &self,
        tiles: &ChannelKernels,
        (begin, end): (usize, usize),
        weights: *const f32,
        strips: *const f32,
        to: *mut f32,
    ) {
        let Direct { patches, .. } = self;
        let cols = patches.cols.count;
        let (row, rows) = (begin / cols, (end - begin) / cols);
        let parts = Partition::with_max_size(cols, 1, tiles.run.len());
        let pitch = self.m.next_multiple_of(tiles.channels);
        for (chunk, lines) in self.rows.iter().enumerate() {
            for tile in 0..self.m.div_ceil(tiles.channels) {
                for y in 0..rows {
                    let (low, high) = self.visible_terms(lines, row + y, row + y);
                    for (x, x_end) in (0..parts.parts).map(|i| parts.part(i)) {
                        // SAFETY: the caller's contract.
                        unsafe {
                            tiles.run[x_end - x - 1](
                                high - low,
                                self.offsets.as_ptr().add(low),
                                weights.add((tile * self.offsets.len() + low) * tiles.channels),
                                strips.add(y * patches.strip.row_step + x),
                                to.add((y * cols + x) * pitch + tile * tiles.channels),
                                pitch,
                                chunk > 0,
                            );
                        }
                    }
                }
            }
        }
    }
}

impl Engine for Direct {
    fn epilogue(&self) -> &Epilogue {
        &self.epilogue
    }

    fn scratch(&self) -> (usize, usize) {
        (self.layout.shared, self.layout.each)
    }

    unsafe fn run_tasks(&self, run: EngineRun<'_>) {
        let EngineRun { settings, parts, .. } = run;
        let height = self.vector_axis.height();
        run.each(self.m.div_ceil(height), |bases, tile, _| {
            let filter = bases[1].cast::<f32>().cast_const();
            // SAFETY: scratch memory has the layout that `new` computed, and tasks have separate blocks.
            unsafe {
                let to = parts.shared_part().cast::<f32>().add(tile * self.offsets.len() * height);
                self.pack(filter, tile, to);
            }
        });
        run.each(self.patches.batch * self.blocks.count, |bases, task, worker| {
            let (block, image) = (task % self.blocks.count, task / self.blocks.count);
            // SAFETY: as above; the weights are packed.
            unsafe { self.task(bases, settings, image, self.blocks.block(block), parts, worker) };
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vector_axis_follows_the_shape() {
        for isa in Isa::available() {
            let channels = ChannelKernels::new(isa, 32).channels;
            assert!(matches!(choose_vector_axis(isa, channels, 10).0, VectorAxis::Channels(_)), "{isa}");
            assert!(matches!(choose_vector_axis(isa, 18, 64).0, VectorAxis::Positions(_)), "{isa}");
            // Packing costs one hundredth of the multiplications here.
            assert!(choose_vector_axis(isa, 800, 10).1 > (800 + PACKING_COST) * 10, "{isa}");
        }
    }
}
