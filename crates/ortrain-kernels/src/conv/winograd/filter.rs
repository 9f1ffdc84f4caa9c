//! The gradient of the filter: sixteen products of transformed gradients and transformed tiles, over tiles.
//!
//! A strip of tiles of the input is transformed and packed for all tasks. A task has some rows of the filter, which are
//! channels of the output, and transforms their gradients. If there are several strips, sums are accumulated in shared
//! memory.

use std::sync::Arc;

use ortrain_expr::{ConvPass, ConvShape, DType};

use super::transform::{FilterPlaneTransform, GradientTransform, Images, TileTransform};
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
use crate::scratch::ScratchParts;
use crate::tile::ALIGN;

/// Maximum bytes of the packed tiles of a strip.
const MAX_STRIP_BYTES: usize = 4 << 20;
/// Maximum bytes of a task's sums.
const MAX_SUM_BYTES: usize = 384 << 10;
/// Maximum number of rows of a task, in panels.
const MAX_TASK_PANELS: usize = 2;
/// Costs of the transforms, with tiles of the input's channels.
const COSTS: Costs = Costs([16, 10, 18]);

pub(super) struct FilterGradient {
    epilogue: Arc<Epilogue>,
    micro: Micro<f32>,
    isa: Isa,
    /// The input, and the gradient of the output.
    inputs: Images,
    outputs: Images,
    /// Number of rows of a panel.
    height: usize,
    /// Rows of tiles of all images, divided into strips.
    strips: Partition,
    /// Channels of the output, divided into tasks.
    rows: Partition,
    layout: Layout,
}

/// Layout of scratch memory: offsets in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Layout {
    lines: usize,
    /// Tiles of a panel of channels, and gradients of some rows.
    tiles: usize,
    gradients: usize,
    sums: usize,
    block: usize,
    each: usize,
    /// Sums of all rows, after the packed tiles, if there are several strips.
    shared_sums: usize,
    shared: usize,
    /// Elements from row to row of tiles and gradients, of sums, and of a block.
    pitch: usize,
    width: usize,
    line: usize,
}

/// Gradients of filters of 3×3.
pub(crate) fn candidate<T: Real>() -> ConvCandidate {
    ConvCandidate {
        name: NAME,
        accepts: |request| is_supported::<T>(request) && request.desc.shape.pass == ConvPass::FilterGradient,
        preferences: &[has_less_work],
        build: |request| FilterGradient::new(request.desc, request.isa, request.epilogue).map(boxed),
    }
}

/// Name of the candidate.
pub(super) const NAME: &str = "conv.winograd_filter_gradient";

/// Transforms must cost less than the multiplications that they save.
fn has_less_work(request: &Request<'_>) -> bool {
    let Some([rows, cols]) = supported_axes(request.desc) else { return false };
    let ConvShape { batch, channels_in, channels_out, .. } = request.desc.shape;
    let tiles = batch * rows.output.div_ceil(2) * cols.output.div_ceil(2);
    let positions = batch * rows.output * cols.output;
    COSTS.favour_tiles(tiles, positions, [channels_in, channels_out], f32::micro(request.isa).nr)
}

impl FilterGradient {
    /// Returns `None` if there is nothing to sum.
    fn new(desc: &ConvDesc, isa: Isa, finish: &Arc<Epilogue>) -> Option<FilterGradient> {
        const BYTES: usize = size_of::<f32>();
        let shape = &desc.shape;
        let [rows, cols] = supported_axes(desc)?;
        let (m, channels) = (shape.channels_out, shape.channels_in);
        let output = [rows.output, cols.output];
        let grid = output.map(|size| size.div_ceil(2));
        let tile_rows = shape.batch * grid[0];
        let micro = f32::micro(isa);
        let Micro { mr, nr, .. } = micro;
        if [m, channels, tile_rows, grid[1], rows.input, cols.input].contains(&0) {
            return None;
        }
        // An even number of panels: the few panels are divided among all threads.
        let height = m.div_ceil(m.div_ceil(mr).next_multiple_of(2));
        let width = channels.next_multiple_of(nr);
        let max_depth = PANEL_DEPTH.min(MAX_STRIP_BYTES / (POINTS * width * BYTES));
        let strips = Partition::with_max_size(tile_rows, 1, max_depth / grid[1]);
        let pitch = row_pitch(strips.max_size() * grid[1] + LANES);
        let max_columns = (MAX_SUM_BYTES / (POINTS * width * BYTES)).min(MAX_TASK_PANELS * height);
        let rows_of_tasks =
            Partition::new(m, height, Partition::with_max_size(m, height, max_columns).parts.max(MAX_TASKS));
        let inputs = Images {
            size: [rows.input, cols.input],
            before: [rows.padding_before, cols.padding_before],
            grid,
            channels,
        };
        let outputs = Images { size: output, before: [0, 0], grid, channels: m };

        let line = channels * TAPS + LANES * TAPS;
        let mut layout = Layout { each: finish.frame, pitch, width, line, ..Layout::default() };
        let mut reserve = |elements: usize| {
            let at = layout.each;
            layout.each += (elements * BYTES).next_multiple_of(ALIGN);
            at
        };
        let tall = rows_of_tasks.max_size();
        layout.lines = reserve(inputs.working_elements());
        layout.tiles = reserve(POINTS * nr * pitch);
        layout.gradients = reserve(POINTS * tall * pitch);
        layout.block = reserve(tall * line);
        let sums = POINTS * tall * width;
        layout.shared_sums = (POINTS * width * strips.max_size() * grid[1] * BYTES).next_multiple_of(ALIGN);
        layout.shared = layout.shared_sums;
        if strips.parts > 1 {
            layout.shared += (rows_of_tasks.parts * sums * BYTES).next_multiple_of(ALIGN);
        } else {
            layout.sums = reserve(sums);
        }
        Some(FilterGradient {
            epilogue: Arc::clone(finish),
            micro,
            isa,
            inputs,
            outputs,
            height,
            strips,
            rows: rows_of_tasks,
            layout,
        })
    }

    /// Transforms and packs a strip's tiles of a panel of channels.
    unsafe fn pack(
        &self,
        input: *const f32,
        strip: (usize, usize),
        panel: usize,
        scratch: *mut u8,
        packed: *mut f32,
    ) {
        let Layout { pitch, width, .. } = self.layout;
        let Micro { nr, .. } = self.micro;
        let channels = (panel * nr, self.inputs.channels.min((panel + 1) * nr));
        let tiles = (strip.1 - strip.0) * self.inputs.grid[1];
        // SAFETY: scratch memory has the layout that `new` computed, and the caller's contract.
        unsafe {
            let own_tiles = scratch.add(self.layout.tiles).cast::<f32>();
            let lines = scratch.add(self.layout.lines).cast();
            let (images, point) = (self.inputs, nr * pitch);
            self.isa.run(TileTransform {
                images,
                from: input,
                strip,
                channels,
                lines,
                to: own_tiles,
                point,
                pitch,
            });
            for point in 0..POINTS {
                let block = Block {
                    at: own_tiles.add(point * nr * pitch).cast_const().cast(),
                    line_step: pitch as isize,
                    depth_step: 1,
                    lines: channels.1 - channels.0,
                    depth: tiles,
                };
                pack(self.isa, DType::F32, block, nr, packed.add((point * width + panel * nr) * tiles));
            }
        }
    }

    /// Runs one task: the sums of some rows over a strip. After the last strip, also runs the epilogue.
    unsafe fn task(
        &self,
        bases: &[*mut u8],
        settings: RunSettings,
        strip: usize,
        task: usize,
        parts: ScratchParts,
        worker: usize,
    ) {
        let Layout { pitch, width, line, .. } = self.layout;
        let Micro { nr, run, .. } = self.micro;
        let (row, end) = self.rows.part(task);
        let (rows, scratch) = (end - row, parts.worker_part(worker));
        let has_several_strips = self.strips.parts > 1;
        let (first, last) = (strip == 0, strip + 1 == self.strips.parts);
        let strip = self.strips.part(strip);
        let tiles = (strip.1 - strip.0) * self.inputs.grid[1];
        // SAFETY: scratch memory has the layout that `new` computed, and the caller's contract.
        unsafe {
            let packed = parts.shared_part().cast::<f32>().cast_const();
            let gradients = scratch.add(self.layout.gradients).cast::<f32>();
            self.isa.run(GradientTransform {
                images: self.outputs,
                from: bases[0].cast::<f32>().cast_const(),
                strip,
                channels: (row, end),
                lines: scratch.add(self.layout.lines).cast(),
                to: gradients,
                point: rows * pitch,
                pitch,
            });
            let sums = if has_several_strips {
                let shared_sums = parts.shared_part().add(self.layout.shared_sums).cast::<f32>();
                shared_sums.add(task * POINTS * self.rows.max_size() * width)
            } else {
                scratch.add(self.layout.sums).cast::<f32>()
            };
            for point in 0..POINTS {
                for column in (0..width).step_by(nr) {
                    let b = packed.add((point * width + column) * tiles);
                    for i in (0..rows).step_by(self.height) {
                        let a = gradients.add((point * rows + i) * pitch);
                        let c = sums.add((point * rows + i) * width + column);
                        let run = run[self.height.min(rows - i) - 1];
                        run(tiles, a, pitch as isize, 1, b, nr as isize, c, width as isize, !first);
                    }
                }
            }
            if last {
                let block = scratch.add(self.layout.block).cast::<f32>();
                let channels = self.inputs.channels;
                self.isa.run(FilterPlaneTransform {
                    from: sums,
                    point: rows * width,
                    pitch: width,
                    rows,
                    channels,
                    to: block,
                    line,
                });
                let rect = Rect { image: 0, channels: (row, rows), positions: (0, channels * TAPS) };
                self.epilogue.run(bases, settings, scratch, rect, block, line);
            }
        }
    }
}

impl Engine for FilterGradient {
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
        for strip in 0..self.strips.parts {
            run.each(self.layout.width / self.micro.nr, |bases, panel, worker| {
                let input = bases[1].cast::<f32>().cast_const();
                let (packed, scratch) = (parts.shared_part().cast(), parts.worker_part(worker));
                // SAFETY: scratch memory has the layout that `new` computed, and tasks have separate panels or rows.
                unsafe { self.pack(input, self.strips.part(strip), panel, scratch, packed) };
            });
            run.each(self.rows.parts, |bases, task, worker| {
                // SAFETY: as said above; the strip is packed.
                unsafe { self.task(bases, settings, strip, task, parts, worker) };
            });
        }
    }
}
