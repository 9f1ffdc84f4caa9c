//! Convolutions with one input channel per group: windows are applied to planes directly, without a matrix product.
//!
//! A plane, with its padding and sorted by the stride, is copied into a strip. In the strip, the elements that a tap
//! sees at consecutive positions are adjacent, so a result is a sum of scaled rows. For the filter's gradient each tap
//! has a separate sum, over all images.

use std::marker::PhantomData;
use std::sync::Arc;

use ortrain_expr::{ConvPass, DType};

use super::copy::{copy_lines, fill_strips};
use super::depthwise_3x3::{self, Grid, Kernels3x3, NINE};
use super::epilogue::Epilogue;
use super::im2col::Patches;
use super::implicit_gemm::MAX_TASKS;
use super::interleave::{PhaseInterleaver, PhaseTable};
use super::padding_fixup::RunSettings;
use super::partition::{BlockUnit, Blocks, Partition};
use crate::conv::desc::ConvDesc;
use crate::conv::engine::{ConvCandidate, Engine, EngineRun, Request, boxed};
use crate::conv::rect::Rect;
use crate::gemm::levels::Real;
use crate::isa::{Isa, Level, Work};
use crate::tile::ALIGN;

/// Maximum number of output channels per group: more of them fill the rows of a product.
const MAX_OUTPUTS_OF_GROUP: usize = 4;
/// Maximum number of positions of a block, and of elements of a block of several planes. A block and its strips fit
/// into the first-level cache.
const BLOCK_POSITIONS: usize = 16 << 10;
const BLOCK_ELEMENTS: usize = 4 << 10;
/// Minimum number of elements of a task.
const MIN_TASK_WORK: usize = 16 << 10;

/// Outputs and gradients of inputs with one input channel per group.
pub(super) fn candidate<T: Real + Send + Sync>() -> ConvCandidate {
    ConvCandidate {
        name: "conv.depthwise",
        accepts: |request| is_depthwise::<T>(request) && request.desc.shape.pass != ConvPass::FilterGradient,
        preferences: &[has_small_groups],
        build: |request| Depthwise::<T>::new(request.desc, request.isa, request.epilogue).map(boxed),
    }
}

/// Gradients of filters with one input channel per group.
pub(super) fn filter_gradient_candidate<T: Real + Send + Sync>() -> ConvCandidate {
    ConvCandidate {
        name: "conv.depthwise_filter_gradient",
        accepts: |request| is_depthwise::<T>(request) && request.desc.shape.pass == ConvPass::FilterGradient,
        preferences: &[has_small_groups],
        build: |request| {
            DepthwiseFilterGradient::<T>::new(request.desc, request.isa, request.epilogue).map(boxed)
        },
    }
}

fn is_depthwise<T: Real>(request: &Request<'_>) -> bool {
    request.multiplies_unchanged::<T>() && request.desc.shape.channels_in == 1
}

/// With many outputs per group, a matrix product reads each input once for all of them.
fn has_small_groups(request: &Request<'_>) -> bool {
    request.desc.shape.channels_out <= MAX_OUTPUTS_OF_GROUP
}

/// Returns true if the patches have elements, along at most two axes.
fn are_planar(patches: &Patches) -> bool {
    patches.outer.is_empty() && patches.positions() > 0
}

/// A tap: index of its weight, and its offset in the strips.
type Tap = (usize, isize);

/// The output, or the gradient of the input.
pub(super) struct Depthwise<T> {
    epilogue: Arc<Epilogue>,
    isa: Isa,
    patches: Patches,
    phase_table: PhaseTable,
    dtypes: [DType; 2],
    /// Number of planes that contribute to a channel of the result, and number of channels that share a plane.
    planes_per_channel: usize,
    channels_per_plane: usize,
    /// Number of filter elements for one plane.
    taps: usize,
    /// For each phase: its taps.
    phases: Vec<Vec<Tap>>,
    /// Blocks of positions of an image; parts of the channels; number of planes of a block.
    blocks: Blocks,
    parts: Partition,
    planes: usize,
    has_single_phase: bool,
    /// Faster kernels, for windows of 3×3 with stride 1.
    kernels_3x3: Option<(Kernels3x3, Grid)>,
    layout: Layout,
    real: PhantomData<fn() -> T>,
}

/// Layout of scratch memory: offsets in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Layout {
    strips: usize,
    weights: usize,
    block: usize,
    line: usize,
    each: usize,
}

impl Layout {
    fn reserve<T: Real>(&mut self, elements: usize) -> usize {
        let at = self.each;
        self.each += (elements * T::BYTES).next_multiple_of(ALIGN);
        at
    }
}

impl<T: Real> Depthwise<T> {
    /// Returns `None` if windows slide along too many axes.
    fn new(desc: &ConvDesc, isa: Isa, finish: &Arc<Epilogue>) -> Option<Depthwise<T>> {
        let shape = &desc.shape;
        let mut patches = Patches::new(shape, false)?;
        if !are_planar(&patches) {
            return None;
        }
        let (groups, outputs_per_group) = (shape.groups, shape.channels_out);
        let is_gradient = shape.pass == ConvPass::InputGradient;
        let (channels, sources, sharing) = if is_gradient {
            (groups, outputs_per_group, 1)
        } else {
            (groups * outputs_per_group, 1, outputs_per_group)
        };
        if sources == 0 {
            patches.phases.clear();
        }
        let taps = shape.axes.iter().map(|axis| axis.kernel).product();
        let positions = patches.positions();
        let blocks = Blocks::new(positions, patches.cols.count, BlockUnit::Rows(16), BLOCK_POSITIONS, 1);
        patches.plan_strip(blocks.max_positions, blocks.is_split_by_rows(), true);
        let count = patches.phases.len();
        let spread = patches.rows.spread * patches.cols.spread;
        let single = count == 1 && spread == 1;
        let grid =
            (single && sources == 1).then(|| Grid::new(&patches.phases[0].offsets, patches.strip.row_step));
        let three = Kernels3x3::new::<T>(isa).zip(grid.flatten());
        let copies = if single { 1 } else { count + spread };
        let elements = patches.strip.elements as isize;
        let phases = patches.phases.iter().map(|phase| {
            let of = |source: usize| {
                let tap = move |(&tap, &offset): (&usize, &isize)| {
                    (source * taps + tap, source as isize * elements + offset)
                };
                phase.taps.iter().zip(&phase.offsets).map(tap)
            };
            (0..sources).flat_map(of).collect()
        });
        let phases: Vec<Vec<Tap>> = phases.collect();
        let sizes = (blocks.max_positions * copies).max(patches.strip.elements * sources.max(1));
        let planes = (BLOCK_ELEMENTS / sizes).clamp(1, channels.max(1));
        let total_elements = shape.batch.saturating_mul(channels).saturating_mul(positions);
        let target_tasks = (total_elements / MIN_TASK_WORK)
            .clamp(1, MAX_TASKS)
            .div_ceil((shape.batch * blocks.count).max(1));
        let parts = Partition::new(channels, 1, target_tasks);
        let mut layout = Layout { each: finish.frame, ..Layout::default() };
        layout.strips = layout.reserve::<T>(patches.strip.elements * sources * planes);
        layout.weights = layout.reserve::<T>(taps * sources * parts.max_size());
        layout.block = layout.reserve::<T>(planes * blocks.max_positions * count + NARROW);
        layout.line = layout.reserve::<T>(if single { 0 } else { planes * blocks.max_positions * spread });
        Some(Depthwise {
            epilogue: Arc::clone(finish),
            isa,
            phase_table: PhaseTable::new(&patches),
            patches,
            dtypes: [desc.a, desc.b],
            planes_per_channel: sources,
            channels_per_plane: sharing,
            taps,
            phases,
            blocks,
            parts,
            planes,
            has_single_phase: single,
            kernels_3x3: three,
            layout,
            real: PhantomData,
        })
    }

    /// Runs one task: some channels of an image, for a block of its positions.
    unsafe fn task(
        &self,
        bases: &[*mut u8],
        settings: RunSettings,
        image: usize,
        (channel, channel_end): (usize, usize),
        (begin, end): (usize, usize),
        scratch: *mut u8,
    ) {
        let Depthwise { patches, layout, .. } = self;
        let size = end - begin;
        let start = image * patches.positions();
        let positions = (start + begin, start + end);
        let split = self.blocks.is_split_by_rows();
        let (rows, cols) = if split { (1, size) } else { (size / patches.cols.count, patches.cols.count) };
        // SAFETY: scratch memory has the layout that `new` computed, and the caller's contract.
        unsafe {
            let at = |offset: usize| scratch.add(offset).cast::<T>();
            let (strips, weights) = (at(layout.strips), at(layout.weights));
            let each = self.taps * self.planes_per_channel;
            let filter = bases[1].wrapping_add(channel * each * self.dtypes[1].size()).cast_const();
            let len = (channel_end - channel) * each;
            copy_lines(self.isa, self.dtypes[1], filter, (len, 0), 1, (0, len), weights, len);
            let strip = patches.strip.elements * self.planes_per_channel;
            scratch.add(layout.strips).write_bytes(0, self.planes * strip * T::BYTES);
            for first in (channel..channel_end).step_by(self.planes) {
                let count = self.planes.min(channel_end - first);
                let rect = Rect { image, channels: (first, count), positions: (begin, size) };
                let straight = self.has_single_phase && self.epilogue.is_direct();
                let (block, step) = if straight {
                    (self.epilogue.target::<T>(bases, rect), self.epilogue.plane)
                } else {
                    (at(layout.block), size)
                };
                let (source, last) =
                    (first / self.channels_per_plane, (first + count - 1) / self.channels_per_plane);
                let from = source * self.planes_per_channel * patches.plane * self.dtypes[0].size();
                let from = bases[0].wrapping_add(from).cast_const();
                let sources = (last + 1 - source) * self.planes_per_channel;
                fill_strips(self.isa, self.dtypes[0], patches, positions, from, sources, strips);
                for (phase, taps) in self.phases.iter().enumerate() {
                    let plane = |i: usize| {
                        let from =
                            strips.add(((first + i) / self.channels_per_plane - source) * strip).cast_const();
                        let weights = weights.add((first + i - channel) * each).cast_const();
                        (weights, from, block.wrapping_add((phase * count + i) * step))
                    };
                    let step = patches.strip.row_step;
                    if let Some((three, grid)) = &self.kernels_3x3 {
                        for i in 0..count {
                            let (weights, from, to) = plane(i);
                            let weights = weights.cast::<f32>();
                            let weights = grid.taps.map(|tap| weights.add(taps[tap].0).read());
                            let from = from.cast::<f32>().wrapping_offset(grid.offset);
                            (three.correlate)(&weights, from, step, (rows, cols), to.cast());
                        }
                        continue;
                    }
                    self.isa.run(Correlate { taps, plane: &plane, count, step, rows, cols });
                }
                if straight {
                    continue;
                }
                if self.has_single_phase {
                    self.epilogue.run(bases, settings, scratch, rect, block, size);
                    continue;
                }
                let weave = PhaseInterleaver {
                    patches,
                    phase_table: &self.phase_table,
                    epilogue: &self.epilogue,
                    is_split_by_rows: split,
                    phase: count * size,
                    pitch: size,
                };
                let (block, line) = (block.cast_const(), at(layout.line));
                weave.run(bases, settings, (first, count), positions, block, line, scratch);
            }
        }
    }
}

const WIDE: usize = 16;
const NARROW: usize = 8;

/// Sums of scaled rows of strips. Row `y` of a plane of the result is a sum over the taps: the weight times the `cols`
/// elements from the tap's offset plus `y * step` on.
struct Correlate<'a, F> {
    taps: &'a [Tap],
    /// Returns for each plane its weights, its strips, and the result, with adjacent rows.
    plane: &'a F,
    count: usize,
    step: usize,
    rows: usize,
    cols: usize,
}

/// Sums of scaled rows for one plane.
#[derive(Clone, Copy)]
struct Plane<'a, T> {
    taps: &'a [Tap],
    weights: *const T,
    from: *const T,
    step: usize,
    rows: usize,
    cols: usize,
    to: *mut T,
}

impl<T: Real> Plane<'_, T> {
    /// Computes `V` elements of `R` rows.
    #[inline(always)]
    unsafe fn sums<L: Level, const V: usize, const R: usize>(&self, y: usize, x: usize) -> [[T; V]; R] {
        let mut sums = [[T::ZERO; V]; R];
        let from = self.from.wrapping_add(y * self.step + x);
        for &(weight, offset) in self.taps {
            // SAFETY: weights and strips have the elements of all taps, and strips have capacity for one more vector at
            // their end.
            unsafe {
                let weight = self.weights.add(weight).read();
                let from = from.wrapping_offset(offset);
                for (r, sums) in sums.iter_mut().enumerate() {
                    let input = from.wrapping_add(r * self.step).cast::<[T; V]>().read_unaligned();
                    for (sum, input) in sums.iter_mut().zip(input) {
                        *sum = T::mul_add_at::<L>(weight, input, *sum);
                    }
                }
            }
        }
        sums
    }

    /// Computes `R` rows from `y` on.
    #[inline(always)]
    unsafe fn rows<L: Level, const R: usize>(&self, y: usize) {
        let cols = self.cols;
        let to = self.to.wrapping_add(y * cols);
        macro_rules! vector {
            ($v:ident, $x:expr) => {{
                let x = $x;
                // SAFETY: the result has these elements.
                unsafe {
                    for (r, sums) in self.sums::<L, $v, R>(y, x).into_iter().enumerate() {
                        to.add(r * cols + x).cast::<[T; $v]>().write_unaligned(sums);
                    }
                }
            }};
        }
        // The last vector of a row ends with the row.
        if cols >= NARROW {
            let wide_cols = cols - cols % WIDE;
            for x in (0..wide_cols).step_by(WIDE) {
                vector!(WIDE, x);
            }
            match cols - wide_cols {
                0 => {}
                rest if rest <= NARROW => vector!(NARROW, cols - NARROW),
                _ if cols >= WIDE => vector!(WIDE, cols - WIDE),
                _ => {
                    vector!(NARROW, 0);
                    vector!(NARROW, cols - NARROW);
                }
            }
        } else {
            // SAFETY: as above. Elements that are written after a row are overwritten by the next row.
            unsafe {
                for (r, sums) in self.sums::<L, NARROW, R>(y, 0).into_iter().enumerate() {
                    let to = to.add(r * cols);
                    if (y + r) * cols + NARROW <= self.rows * cols {
                        to.cast::<[T; NARROW]>().write_unaligned(sums);
                    } else {
                        std::ptr::copy_nonoverlapping(sums.as_ptr().cast::<u8>(), to.cast(), cols * T::BYTES);
                    }
                }
            }
        }
    }
}

impl<T: Real, F: Fn(usize) -> (*const T, *const T, *mut T)> Work for Correlate<'_, F> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        const ROWS_8: usize = 8;
        const ROWS_4: usize = 4;
        let Correlate { taps, plane, count, step, rows, cols } = self;
        let (rows_8, rows_4) = (rows - rows % ROWS_8, rows - rows % ROWS_4);
        for i in 0..count {
            let (weights, from, to) = plane(i);
            let plane = Plane { taps, weights, from, step, rows, cols, to };
            // SAFETY: `Depthwise::task` has filled the struct's fields as their comments require.
            unsafe {
                for y in (0..rows_8).step_by(ROWS_8) {
                    plane.rows::<L, ROWS_8>(y);
                }
                for y in (rows_8..rows_4).step_by(ROWS_4) {
                    plane.rows::<L, ROWS_4>(y);
                }
                for y in rows_4..rows {
                    plane.rows::<L, 1>(y);
                }
            }
        }
    }
}

impl<T: Real + Send + Sync> Engine for Depthwise<T> {
    fn epilogue(&self) -> &Epilogue {
        &self.epilogue
    }

    fn scratch(&self) -> (usize, usize) {
        (0, self.layout.each)
    }

    unsafe fn run_tasks(&self, run: EngineRun<'_>) {
        let EngineRun { settings, parts, .. } = run;
        let tasks = self.patches.batch * self.parts.parts * self.blocks.count;
        run.each(tasks, |bases, task, worker| {
            let (block, rest) = (task % self.blocks.count, task / self.blocks.count);
            let (part, image) = (rest % self.parts.parts, rest / self.parts.parts);
            let (channels, positions) = (self.parts.part(part), self.blocks.block(block));
            // SAFETY: scratch memory has the layout that `new` computed, and tasks have separate blocks.
            unsafe { self.task(bases, settings, image, channels, positions, parts.worker_part(worker)) };
        });
    }
}

/// Number of independent partial sums.
const LANES: usize = depthwise_3x3::LANES;
/// Number of channels with a common run of the epilogue.
const EPILOGUE_CHANNELS: usize = 64;

/// The gradient of the filter.
pub(super) struct DepthwiseFilterGradient<T> {
    epilogue: Arc<Epilogue>,
    isa: Isa,
    patches: Patches,
    dtypes: [DType; 2],
    groups: usize,
    /// Number of output channels of a group.
    outputs_per_group: usize,
    taps: usize,
    blocks: Blocks,
    parts: Partition,
    /// True if the output's gradient is read in place.
    in_place: bool,
    /// Faster kernels for nine taps. They read the gradient in place, for rows of any length.
    kernels_3x3: Option<Kernels3x3>,
    layout: Layout,
    real: PhantomData<fn() -> T>,
}

impl<T: Real> DepthwiseFilterGradient<T> {
    /// Returns `None` if windows slide along too many axes.
    fn new(desc: &ConvDesc, isa: Isa, finish: &Arc<Epilogue>) -> Option<DepthwiseFilterGradient<T>> {
        let shape = &desc.shape;
        let mut patches = Patches::new(shape, false)?;
        if !are_planar(&patches) {
            return None;
        }
        let (groups, channels_per_group) = (shape.groups, shape.channels_out);
        let taps = shape.axes.iter().map(|axis| axis.kernel).product();
        let blocks =
            Blocks::new(patches.positions(), patches.cols.count, BlockUnit::Rows(16), BLOCK_POSITIONS, 1);
        patches.plan_strip(blocks.max_positions, blocks.is_split_by_rows(), true);
        let elements =
            shape.batch.saturating_mul(groups * channels_per_group).saturating_mul(patches.positions());
        let parts = Partition::new(groups, 1, (elements / MIN_TASK_WORK).clamp(1, MAX_TASKS));
        let cols = if blocks.is_split_by_rows() { blocks.max_positions } else { patches.cols.count };
        let real = T::DTYPE;
        let nine = Kernels3x3::new::<T>(isa).filter(|_| {
            desc.a == real && patches.phases.first().is_some_and(|phase| phase.taps.len() == NINE)
        });
        let in_place = cols.is_multiple_of(LANES) && !blocks.is_split_by_rows() && desc.a == real;
        let mut layout = Layout { each: finish.frame, ..Layout::default() };
        layout.strips = layout.reserve::<T>(patches.strip.elements);
        layout.block = layout.reserve::<T>(blocks.max_positions / cols * cols.next_multiple_of(LANES));
        let filters = EPILOGUE_CHANNELS.min(parts.max_size()) * channels_per_group * taps;
        layout.weights = layout.reserve::<T>(filters * LANES);
        layout.line = layout.reserve::<T>(filters);
        Some(DepthwiseFilterGradient {
            epilogue: Arc::clone(finish),
            isa,
            patches,
            dtypes: [desc.a, desc.b],
            groups,
            outputs_per_group: channels_per_group,
            taps,
            blocks,
            parts,
            in_place,
            kernels_3x3: nine,
            layout,
            real: PhantomData,
        })
    }

    /// Runs one task: some groups, in all images.
    unsafe fn task(
        &self,
        bases: &[*mut u8],
        settings: RunSettings,
        (group, group_end): (usize, usize),
        scratch: *mut u8,
    ) {
        let &DepthwiseFilterGradient { ref layout, outputs_per_group: channels_per_group, taps, .. } = self;
        let phase = self.patches.phases.first();
        // SAFETY: scratch memory has the layout that `new` computed, and the caller's contract.
        unsafe {
            let at = |offset: usize| scratch.add(offset).cast::<T>();
            for first in (group..group_end).step_by(EPILOGUE_CHANNELS) {
                let count = EPILOGUE_CHANNELS.min(group_end - first);
                let line = at(layout.line);
                (0..count * channels_per_group * taps).for_each(|i| line.add(i).write(T::ZERO));
                if let Some(phase) = phase {
                    let alive = phase.taps.len();
                    let sums = at(layout.weights).cast::<[T; LANES]>();
                    (0..count * channels_per_group * alive).for_each(|i| sums.add(i).write([T::ZERO; LANES]));
                    scratch.add(layout.strips).write_bytes(0, self.patches.strip.elements * T::BYTES);
                    // In memory order.
                    for image in 0..self.patches.batch {
                        for i in 0..count {
                            let sums = sums.add(i * channels_per_group * alive);
                            self.sum(bases, (image, first + i), &phase.offsets, scratch, sums);
                        }
                    }
                    for i in 0..count {
                        let sums = sums.add(i * channels_per_group * alive);
                        for m in 0..channels_per_group {
                            for (tap, &to) in phase.taps.iter().enumerate() {
                                let mut lanes = sums.add(m * alive + tap).read();
                                let mut width = LANES / 2;
                                while width > 0 {
                                    for l in 0..width {
                                        lanes[l] = lanes[l].add(lanes[l + width]);
                                    }
                                    width /= 2;
                                }
                                line.add((i * channels_per_group + m) * taps + to).write(lanes[0]);
                            }
                        }
                    }
                }
                let channels = (first * channels_per_group, count * channels_per_group);
                let rect = Rect { image: 0, channels, positions: (0, taps) };
                self.epilogue.run(bases, settings, scratch, rect, line, taps);
            }
        }
    }

    /// Adds the products of one group of an image.
    unsafe fn sum(
        &self,
        bases: &[*mut u8],
        (image, group): (usize, usize),
        offsets: &[isize],
        scratch: *mut u8,
        sums: *mut [T; LANES],
    ) {
        let DepthwiseFilterGradient { patches, layout, .. } = self;
        let plane = patches.positions();
        // SAFETY: scratch memory has the layout that `new` computed, and the caller's contract.
        unsafe {
            let at = |offset: usize| scratch.add(offset).cast::<T>();
            for block in 0..self.blocks.count {
                let (begin, end) = self.blocks.block(block);
                let split = self.blocks.is_split_by_rows();
                let cols = if split { end - begin } else { patches.cols.count };
                let rows = (end - begin) / cols;
                let from = group * patches.plane * self.dtypes[1].size();
                let from = bases[1].wrapping_add(from).cast_const();
                let positions = (image * plane + begin, image * plane + end);
                if self.blocks.count > 1 {
                    scratch.add(layout.strips).write_bytes(0, patches.strip.elements * T::BYTES);
                }
                fill_strips(self.isa, self.dtypes[1], patches, positions, from, 1, at(layout.strips));
                for m in 0..self.outputs_per_group {
                    let channel = (image * self.groups + group) * self.outputs_per_group + m;
                    let from = (channel * plane + begin) * self.dtypes[0].size();
                    let from = bases[0].wrapping_add(from).cast_const();
                    let sums = sums.add(m * offsets.len());
                    if let Some(nine) = &self.kernels_3x3 {
                        let strip = at(layout.strips).cast_const().cast::<f32>();
                        let see = std::array::from_fn(|tap| strip.wrapping_offset(offsets[tap]));
                        let sums = &mut *sums.cast::<[[f32; LANES]; NINE]>();
                        (nine.dots)(&see, patches.strip.row_step, from.cast(), (rows, cols), sums);
                        continue;
                    }
                    let pitch = cols.next_multiple_of(LANES);
                    let scale = if self.in_place {
                        from.cast::<T>()
                    } else {
                        let to = at(layout.block);
                        copy_lines(self.isa, self.dtypes[0], from, (cols, 0), rows, (0, cols), to, pitch);
                        to.cast_const()
                    };
                    self.isa.run(Dots {
                        offsets,
                        from: at(layout.strips),
                        step: patches.strip.row_step,
                        scale,
                        pitch,
                        rows,
                        cols,
                        sums,
                    });
                }
            }
        }
    }
}

/// Adds the products of the elements that each tap sees with a plane to a sum for each tap.
struct Dots<'a, T> {
    offsets: &'a [isize],
    from: *const T,
    step: usize,
    /// The plane: rows of `cols` elements, `pitch` elements apart. `pitch` is a multiple of [`LANES`].
    scale: *const T,
    pitch: usize,
    rows: usize,
    cols: usize,
    sums: *mut [T; LANES],
}

impl<T: Real> Dots<'_, T> {
    /// Adds the products of `N` taps from `tap` on.
    #[inline(always)]
    unsafe fn taps<L: Level, const N: usize>(&self, tap: usize) {
        let offsets: [isize; N] = std::array::from_fn(|i| self.offsets[tap + i]);
        let mut sums = [[T::ZERO; LANES]; N];
        let (full_cols, rest) = (self.cols - self.cols % LANES, self.cols % LANES);
        // SAFETY: planes and strips have these elements, and strips have capacity for one more vector at their end.
        unsafe {
            for y in 0..self.rows {
                let (from, scale) = (self.from.add(y * self.step), self.scale.add(y * self.pitch));
                for x in (0..full_cols).step_by(LANES) {
                    let scale = scale.add(x).cast::<[T; LANES]>().read_unaligned();
                    for (sums, offset) in sums.iter_mut().zip(offsets) {
                        let input = from.add(x).wrapping_offset(offset).cast::<[T; LANES]>().read_unaligned();
                        for l in 0..LANES {
                            sums[l] = T::mul_add_at::<L>(scale[l], input[l], sums[l]);
                        }
                    }
                }
                if rest > 0 {
                    let scale = scale.add(full_cols).cast::<[T; LANES]>().read_unaligned();
                    for (sums, offset) in sums.iter_mut().zip(offsets) {
                        let address = from.add(full_cols).wrapping_offset(offset).cast::<[T; LANES]>();
                        let loaded = address.read_unaligned();
                        for l in 0..LANES {
                            // Elements after the row may have any value.
                            let masked = if l < rest { loaded[l] } else { T::ZERO };
                            sums[l] = T::mul_add_at::<L>(scale[l], masked, sums[l]);
                        }
                    }
                }
            }
            for (i, sums) in sums.into_iter().enumerate() {
                let to = self.sums.add(tap + i);
                let old = to.read();
                to.write(std::array::from_fn(|l| old[l].add(sums[l])));
            }
        }
    }
}

impl<T: Real> Work for Dots<'_, T> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let mut tap = 0;
        while tap < self.offsets.len() {
            // SAFETY: `DepthwiseFilterGradient::sum` has filled the struct's fields as their comments require.
            unsafe {
                match self.offsets.len() - tap {
                    1 | 2 => {
                        self.taps::<L, 1>(tap);
                        tap += 1;
                    }
                    3 | 4 => {
                        self.taps::<L, 3>(tap);
                        tap += 3;
                    }
                    5..9 => {
                        self.taps::<L, 5>(tap);
                        tap += 5;
                    }
                    _ => {
                        self.taps::<L, 9>(tap);
                        tap += 9;
                    }
                }
            }
        }
    }
}

impl<T: Real + Send + Sync> Engine for DepthwiseFilterGradient<T> {
    fn epilogue(&self) -> &Epilogue {
        &self.epilogue
    }

    fn scratch(&self) -> (usize, usize) {
        (0, self.layout.each)
    }

    unsafe fn run_tasks(&self, run: EngineRun<'_>) {
        let EngineRun { settings, parts, .. } = run;
        run.each(self.parts.parts, |bases, task, worker| {
            // SAFETY: scratch memory has the layout that `new` computed, and tasks have separate groups.
            unsafe { self.task(bases, settings, self.parts.part(task), parts.worker_part(worker)) };
        });
    }
}
