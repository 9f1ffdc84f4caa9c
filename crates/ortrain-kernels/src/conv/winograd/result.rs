//! The output, and the gradient of the input: sixteen products of transformed weights and transformed tiles.
//!
//! If the filter is small, tasks are blocks of tiles, and all tasks share the transformed filter. If the filter is
//! large, tasks are channels of the result, and all tasks share a strip of tiles.

use std::sync::Arc;

use ortrain_expr::{ConvPass, ConvShape, DType};

use super::transform::{Images, ResultTransform, TileTransform, WeightTransform};
use crate::conv::desc::ConvDesc;
use crate::conv::engine::{ConvCandidate, Engine, EngineRun, Request, boxed};
use crate::conv::epilogue::Epilogue;
use crate::conv::implicit_gemm::{MAX_TASKS, PANEL_DEPTH};
use crate::conv::padding_fixup::RunSettings;
use crate::conv::partition::Partition;
use crate::conv::rect::Rect;
use crate::conv::winograd::shared::{Costs, LANES, POINTS, TAPS, is_supported, row_pitch, supported_axes};
use crate::gemm::levels::Real;
use crate::gemm::micro::Micro;
use crate::gemm::pack::{Block, pack};
use crate::isa::Isa;
use crate::tile::ALIGN;

/// Maximum number of tiles of a block with shared weights, and maximum bytes of its transformed tiles.
const MAX_BLOCK_TILES: usize = 112;
const MAX_BLOCK_TILE_BYTES: usize = 640 << 10;
/// Maximum bytes of transformed weights that are shared.
const MAX_SHARED_WEIGHT_BYTES: usize = 2 << 20;
/// Maximum bytes of the transformed tiles of a shared strip.
const MAX_SHARED_TILE_BYTES: usize = 4 << 20;
/// Maximum bytes of a task's sums, and of weights that only this task uses.
const MAX_TASK_BYTES: usize = 384 << 10;
/// Number of channels with weights that are packed at a time.
const PACKED_CHANNELS: usize = 32;
/// Costs of the transforms, with tiles of the channels of a sum.
const COSTS: Costs = Costs([10, 8, 14]);

pub(super) struct Results {
    epilogue: Arc<Epilogue>,
    micro: Micro<f32>,
    isa: Isa,
    /// Number of channels of the result, rows of a panel of these channels, and number of channels of a sum.
    m: usize,
    height: usize,
    channels: usize,
    /// The images that are read, and rows and columns of the result.
    images: Images,
    result: [usize; 2],
    /// Steps through the filter, from row to row and from channel to channel; true if its taps are reversed.
    filter: [usize; 2],
    reversed: bool,
    /// Rows of tiles of all images, divided into strips.
    strips: Partition,
    /// Channels of the result, divided into parts.
    rows: Partition,
    /// True if weights are shared and strips are tasks. Otherwise strips are shared and rows are tasks.
    shared_weights: bool,
    layout: Layout,
}

/// Layout of scratch memory: offsets in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Layout {
    lines: usize,
    tiles: usize,
    packed: usize,
    weights: usize,
    sums: usize,
    block: usize,
    each: usize,
    shared: usize,
    /// Elements from row to row of tiles and sums, of a panel of weights, and from row to row of a block.
    pitch: usize,
    panel: usize,
    line: usize,
}

/// Outputs and gradients of inputs, with windows of 3×3.
pub(crate) fn candidate<T: Real>() -> ConvCandidate {
    ConvCandidate {
        name: NAME,
        accepts: |request| is_supported::<T>(request) && request.desc.shape.pass != ConvPass::FilterGradient,
        preferences: &[has_less_work],
        build: |request| Results::new(request.desc, request.isa, request.epilogue).map(boxed),
    }
}

/// Name of the candidate.
pub(super) const NAME: &str = "conv.winograd";

/// Transforms must cost less than the multiplications that they save.
fn has_less_work(request: &Request<'_>) -> bool {
    let Some(Sizes { m, channels, result, .. }) = Sizes::new(request.desc) else { return false };
    let batch = request.desc.shape.batch;
    let tiles = batch * result.map(|size| size.div_ceil(2)).iter().product::<usize>();
    let positions = batch * result.iter().product::<usize>();
    COSTS.favour_tiles(tiles, positions, [channels, m], f32::micro(request.isa).nr)
}

/// Sizes of a convolution in the order of its sums.
struct Sizes {
    /// True for the gradient of the input.
    is_reversed: bool,
    /// Number of channels of the result, and number of channels of a sum.
    m: usize,
    channels: usize,
    /// Rows and columns of the planes that windows read, and of the planes of the result.
    source: [usize; 2],
    result: [usize; 2],
    /// Padding before the source.
    before: [isize; 2],
}

impl Sizes {
    fn new(desc: &ConvDesc) -> Option<Sizes> {
        let [rows, cols] = supported_axes(desc)?;
        let (inputs, outputs) = ([rows.input, cols.input], [rows.output, cols.output]);
        let before = [rows.padding_before, cols.padding_before];
        let ConvShape { pass, channels_in, channels_out, .. } = desc.shape;
        Some(if pass == ConvPass::InputGradient {
            let before = before.map(|before| 2 - before);
            let (m, channels) = (channels_in, channels_out);
            Sizes { is_reversed: true, m, channels, source: outputs, result: inputs, before }
        } else {
            let (m, channels) = (channels_out, channels_in);
            Sizes { is_reversed: false, m, channels, source: inputs, result: outputs, before }
        })
    }
}

impl Results {
    /// Returns `None` if there is nothing to sum.
    fn new(desc: &ConvDesc, isa: Isa, finish: &Arc<Epilogue>) -> Option<Results> {
        const BYTES: usize = size_of::<f32>();
        let shape = &desc.shape;
        let Sizes { is_reversed: reversed, m, channels, source, result, before } = Sizes::new(desc)?;
        let plane = shape.channels_in * TAPS;
        let filter = if reversed { [TAPS, plane] } else { [plane, TAPS] };
        let grid = result.map(|size| size.div_ceil(2));
        let tile_rows = shape.batch * grid[0];
        let tiles = tile_rows * grid[1];
        let micro = f32::micro(isa);
        let Micro { mr, nr, .. } = micro;
        if [m, channels, tiles].contains(&0) || source.contains(&0) {
            return None;
        }
        let height = m.div_ceil(m.div_ceil(mr));
        let panels = m.div_ceil(height);
        let panel = channels * mr + LANES;
        let shared_weights = POINTS * panels * panel * BYTES <= MAX_SHARED_WEIGHT_BYTES;
        let strips = if shared_weights {
            let max_tiles = MAX_BLOCK_TILES.min(MAX_BLOCK_TILE_BYTES / (POINTS * channels * BYTES));
            let strips = Partition::with_max_size(tile_rows, 1, max_tiles / grid[1]);
            Partition::new(tile_rows, 1, strips.parts.max(MAX_TASKS.min(tiles / nr)))
        } else {
            Partition::with_max_size(
                tile_rows,
                1,
                MAX_SHARED_TILE_BYTES / (POINTS * channels * grid[1] * BYTES),
            )
        };
        let pitch = row_pitch((strips.max_size() * grid[1]).next_multiple_of(nr) + LANES);
        let max_block_tiles = MAX_TASK_BYTES / (POINTS * pitch * BYTES);
        let rows = if shared_weights {
            Partition::with_max_size(m, height, max_block_tiles)
        } else {
            let rows = Partition::with_max_size(
                m,
                height,
                max_block_tiles.min(MAX_TASK_BYTES / (POINTS * channels * BYTES)),
            );
            Partition::new(m, height, rows.parts.max(MAX_TASKS))
        };

        let images = Images { size: source, before, grid, channels };
        let line = strips.max_size() * 2 * result[1] + 2 * LANES;
        let mut layout = Layout { each: finish.frame, pitch, panel, line, ..Layout::default() };
        let mut reserve = |elements: usize| {
            let at = layout.each;
            layout.each += (elements * BYTES).next_multiple_of(ALIGN);
            at
        };
        let tiles = POINTS * channels * pitch;
        let task_panels = rows.max_size().div_ceil(height) * POINTS * panel;
        layout.lines = reserve(images.working_elements());
        layout.packed = reserve(PACKED_CHANNELS.min(channels) * TAPS * mr + LANES);
        layout.sums = reserve(POINTS * rows.max_size() * pitch);
        layout.block = reserve(rows.max_size() * line);
        let shared = if shared_weights {
            layout.tiles = reserve(tiles);
            POINTS * panels * panel
        } else {
            layout.weights = reserve(task_panels);
            tiles
        };
        layout.shared = (shared * BYTES).next_multiple_of(ALIGN);
        Some(Results {
            epilogue: Arc::clone(finish),
            micro,
            isa,
            m,
            height,
            channels,
            images,
            result,
            filter,
            reversed,
            strips,
            rows,
            shared_weights,
            layout,
        })
    }

    /// Transforms the weights of some rows, panel by panel. Each panel has [`Layout::panel`] elements for each of the
    /// sixteen points.
    unsafe fn transform_weights(
        &self,
        filter: *const f32,
        (row, end): (usize, usize),
        packed: *mut f32,
        to: *mut f32,
    ) {
        let Micro { mr, .. } = self.micro;
        let [line, plane] = self.filter;
        for (panel, row) in (row..end).step_by(self.height).enumerate() {
            let lines = self.height.min(end - row);
            for first in (0..self.channels).step_by(PACKED_CHANNELS) {
                let channels = PACKED_CHANNELS.min(self.channels - first);
                let from = filter.wrapping_add(row * line + first * plane);
                let block = |from: *const f32, line: usize, depth: usize| Block {
                    at: from.cast(),
                    line_step: line as isize,
                    depth_step: 1,
                    lines,
                    depth,
                };
                // SAFETY: the filter has these elements (the caller's contract), and the layout has capacity for them.
                unsafe {
                    if self.reversed {
                        for channel in 0..channels {
                            let (from, to) = (from.add(channel * plane), packed.add(channel * TAPS * mr));
                            pack(self.isa, DType::F32, block(from, TAPS, TAPS), mr, to);
                        }
                    } else {
                        pack(self.isa, DType::F32, block(from, line, channels * TAPS), mr, packed);
                    }
                    self.isa.run(WeightTransform {
                        from: packed,
                        channels,
                        lines: mr,
                        reversed: self.reversed,
                        to: to.add(panel * POINTS * self.layout.panel + first * mr),
                        step: self.layout.panel,
                    });
                }
            }
        }
    }

    /// Runs one task: some channels of the result, for a strip of rows of tiles.
    unsafe fn task(
        &self,
        bases: &[*mut u8],
        settings: RunSettings,
        strip: (usize, usize),
        (row, end): (usize, usize),
        (weights, tiles): (*const f32, *const f32),
        scratch: *mut u8,
    ) {
        let Results { layout: Layout { pitch, panel, line, .. }, channels, height, .. } = *self;
        let Micro { mr, nr, run, half_width: half, .. } = self.micro;
        let columns = (strip.1 - strip.0) * self.images.grid[1];
        let step = (end - row) * pitch;
        // SAFETY: scratch memory has the layout that `new` computed, and the caller's contract.
        unsafe {
            let sums = scratch.add(self.layout.sums).cast::<f32>();
            for point in 0..POINTS {
                for depth in (0..channels).step_by(PANEL_DEPTH) {
                    let count = PANEL_DEPTH.min(channels - depth);
                    for column in (0..columns).step_by(nr) {
                        let panel_columns = nr.min(columns - column);
                        let run = half.filter(|_| panel_columns <= nr / 2).unwrap_or(run);
                        let b = tiles.add((point * channels + depth) * pitch + column);
                        for (i, first) in (row..end).step_by(height).enumerate() {
                            let a = weights.add((i * POINTS + point) * panel + depth * mr);
                            let c = sums.add(point * step + i * height * pitch + column);
                            let (b_row, c_row) = (pitch as isize, pitch as isize);
                            let run = run[height.min(end - first) - 1];
                            run(count, a, 1, mr as isize, b, b_row, c, c_row, depth > 0);
                        }
                    }
                }
            }
            let block = scratch.add(self.layout.block).cast::<f32>();
            self.isa.run(ResultTransform {
                from: sums,
                step,
                pitch,
                rows: end - row,
                strip,
                grid: self.images.grid,
                result: self.result,
                to: block,
                line,
            });
            let [height, width] = self.result;
            let first = self.first_result_row(strip.0);
            for image in strip.0 / self.images.grid[0]..strip.1.div_ceil(self.images.grid[0]) {
                let begin = first.max(image * height);
                let end_of_strip = if strip.1 >= (image + 1) * self.images.grid[0] {
                    (image + 1) * height
                } else {
                    self.first_result_row(strip.1)
                };
                let rect = Rect {
                    image,
                    channels: (row, end - row),
                    positions: ((begin - image * height) * width, (end_of_strip - begin) * width),
                };
                let from = block.add((begin - first) * width);
                self.epilogue.run(bases, settings, scratch, rect, from, line);
            }
        }
    }

    /// Returns the first row of the result that a row of tiles covers. Rows are counted over all images.
    fn first_result_row(&self, row: usize) -> usize {
        row / self.images.grid[0] * self.result[0] + row % self.images.grid[0] * 2
    }

    /// Transforms the elements of some channels that a strip of rows of tiles sees.
    unsafe fn transform_tiles(
        &self,
        source: *const f32,
        strip: (usize, usize),
        channels: (usize, usize),
        scratch: *mut u8,
        to: *mut f32,
    ) {
        // SAFETY: scratch memory has the layout that `new` computed, and the caller's contract.
        unsafe {
            self.isa.run(TileTransform {
                images: self.images,
                from: source,
                strip,
                channels,
                lines: scratch.add(self.layout.lines).cast(),
                to: to.add(channels.0 * self.layout.pitch),
                point: self.channels * self.layout.pitch,
                pitch: self.layout.pitch,
            });
        }
    }
}

impl Engine for Results {
    fn epilogue(&self) -> &Epilogue {
        &self.epilogue
    }

    fn needs_moderate_elements(&self) -> bool {
        true
    }

    fn scratch(&self) -> (usize, usize) {
        (self.layout.shared, self.layout.each)
    }

    unsafe fn run_tasks(&self, run: EngineRun<'_>) {
        let EngineRun { settings, parts, .. } = run;
        let Results { layout, strips, rows, channels, .. } = self;
        let source = |bases: &[*mut u8]| bases[0].cast::<f32>().cast_const();
        let filter = |bases: &[*mut u8]| bases[1].cast::<f32>().cast_const();
        let shared = move || parts.shared_part().cast::<f32>();
        if self.shared_weights {
            let panels = self.m.div_ceil(self.height);
            run.each(panels, |bases, panel, worker| {
                let rows = (panel * self.height, self.m.min((panel + 1) * self.height));
                // SAFETY: scratch memory has the layout that `new` computed, and tasks have separate blocks, panels
                // or channels.
                unsafe {
                    let packed = parts.worker_part(worker).add(layout.packed).cast();
                    self.transform_weights(
                        filter(bases),
                        rows,
                        packed,
                        shared().add(panel * POINTS * layout.panel),
                    );
                }
            });
            run.each(strips.parts, |bases, strip, worker| {
                let (strip, scratch) = (strips.part(strip), parts.worker_part(worker));
                // SAFETY: as said above.
                unsafe {
                    let tiles = scratch.add(layout.tiles).cast::<f32>();
                    self.transform_tiles(source(bases), strip, (0, *channels), scratch, tiles);
                    for i in 0..rows.parts {
                        let rows = rows.part(i);
                        let weights = shared().add(rows.0 / self.height * POINTS * layout.panel);
                        self.task(bases, settings, strip, rows, (weights, tiles), scratch);
                    }
                }
            });
        } else {
            for strip in 0..strips.parts {
                let strip = strips.part(strip);
                let some = Partition::new(*channels, 1, MAX_TASKS);
                run.each(some.parts, |bases, i, worker| {
                    // SAFETY: as said above.
                    unsafe {
                        self.transform_tiles(
                            source(bases),
                            strip,
                            some.part(i),
                            parts.worker_part(worker),
                            shared(),
                        );
                    };
                });
                run.each(rows.parts, |bases, i, worker| {
                    let (rows, scratch) = (rows.part(i), parts.worker_part(worker));
                    // SAFETY: as said above.
                    unsafe {
                        let weights = scratch.add(layout.weights).cast::<f32>();
                        self.transform_weights(
                            filter(bases),
                            rows,
                            scratch.add(layout.packed).cast(),
                            weights,
                        );
                        self.task(bases, settings, strip, rows, (weights, shared()), scratch);
                    }
                });
            }
        }
    }
}
