//! The epilogue over completed blocks of the result.

use ortrain_expr::{Access, ConvPass, DType, Inst, Load, OutOfRange, Type};

use super::copy::copy_lines;
use super::padding_fixup::{PaddingFixup, RunSettings};
use crate::conv::desc::ConvDesc;
use crate::conv::rect::Rect;
use crate::gemm::levels::Real;
use crate::isa::{CACHE_LINE_BYTES, prefetch_l2};
use crate::scratch::ScratchParts;
use crate::tile::{ALIGN, Compiler, ExecContext, Failure, LoopOrder, LoopPlan, TileProgram};

/// Minimum number of elements of a plane to run along single planes: a value per channel is then uniform. Shorter
/// planes are processed several channels at a time.
const MIN_LONG_PLANE: usize = 96;

/// Epilogue over the result as rows: `images × channels` planes of `plane` adjacent elements.
#[derive(Debug)]
pub(super) struct Epilogue {
    pub(super) program: TileProgram,
    /// Bytes of a worker's frame: the frame of the tile program, then a line of short planes.
    pub(super) frame: usize,
    /// True if the tile program runs along planes, not along the whole result.
    runs_along_planes: bool,
    /// The compute type.
    compute_dtype: DType,
    /// Channels of an image (or rows of a filter's gradient).
    pub(super) channels: usize,
    /// Elements of a plane (or of a row).
    pub(super) plane: usize,
    /// Buffers that the tile program loads and stores in the order of the result. For each: index of the buffer counted
    /// from A, offset of its first element, and bytes of an element.
    row_major_buffers: Vec<(usize, isize, usize)>,
    /// Offset of the result in the only store, if the result is stored unchanged.
    direct_offset: Option<isize>,
    store: usize,
    /// Correction of sums that padding may turn into NaN.
    pub(super) padding_fixup: Option<PaddingFixup>,
}

impl Epilogue {
    pub(super) fn new<T: Real>(desc: &ConvDesc, compiler: Compiler<'_>) -> Result<Epilogue, String> {
        let nest = &desc.epilogue;
        let [_, _, dims] = desc.shape.operands();
        if nest.dims != dims {
            return Err(format!(
                "the epilogue has the space {:?}, but the result has {:?}",
                nest.dims.as_slice(),
                dims.as_slice()
            ));
        }
        if nest.inner != 0 {
            return Err("an epilogue cannot reduce".to_owned());
        }
        let real = T::DTYPE;
        if nest.loads.first() != Some(&Load::Accumulator(real)) || nest.num_accumulators() != 1 {
            return Err(format!("the accumulator of the epilogue must be the result, of type {real}"));
        }
        let of_plane = match desc.shape.pass {
            ConvPass::Output | ConvPass::InputGradient => 2,
            ConvPass::FilterGradient => 1,
        };
        let (channels, plane) = (dims[of_plane - 1], dims[of_plane..].iter().product());
        let long = plane >= MIN_LONG_PLANE;
        let axes: Vec<usize> = (0..dims.len()).collect();
        let (outside, along) = axes.split_at(if long { of_plane } else { 0 });
        let edges = if real.is_float() { PaddingFixup::new(desc, compiler.isa()) } else { None };
        let plan = LoopPlan { nest, loop_order: LoopOrder::Map, outer_axes: outside, tile_axes: along };
        let tape = TileProgram::new(&plan, compiler)?;
        let row_major = |access: &Access| {
            let mut step = 1;
            dims.iter().zip(&access.strides).rev().all(|(&dim, &stride)| {
                let fits = dim == 1 || stride == step;
                step *= dim as isize;
                fits
            })
        };
        let accesses = nest.operands().enumerate();
        let row_major_loads = accesses.filter(|(_, access)| row_major(access));
        let row_major_operands =
            row_major_loads.map(|(i, access)| (2 + i, access.offset as isize, access.dtype.size())).collect();
        let mut direct = None;
        if let ([store], [_]) = (nest.stores.as_slice(), nest.loads.as_slice()) {
            let (inst, ty) = nest.expr.insts()[usize::from(nest.expr.outputs()[0].0)];
            let plain = inst == Inst::Load(0) && ty == Type::of(real) && store.dtype == real;
            if plain && row_major(store) && !nest.expr.can_fail() {
                direct = Some(store.offset as isize);
            }
        }
        let line = if long || direct.is_some() { 0 } else { tape.tile.max(MIN_LONG_PLANE) * T::BYTES };
        let frame = tape.frame + line.next_multiple_of(ALIGN);
        let store = 1 + nest.loads.len();
        Ok(Epilogue {
            program: tape,
            frame,
            runs_along_planes: long,
            compute_dtype: real,
            channels,
            plane,
            row_major_buffers: row_major_operands,
            direct_offset: direct,
            store,
            padding_fixup: edges,
        })
    }

    /// Returns true if the result is stored unchanged, so that no blocks are needed.
    pub(super) fn is_direct(&self) -> bool {
        self.direct_offset.is_some()
    }

    /// Returns the destination of the rectangle's first element if [`Epilogue::is_direct`]. The step from channel to
    /// channel is a plane.
    pub(super) fn target<T: Real>(&self, bases: &[*mut u8], rect: Rect) -> *mut T {
        let offset = self.direct_offset.unwrap_or(0);
        let first = self.linear_index(rect.image, rect.channels.0, rect.positions.0) as isize;
        bases[self.store].cast::<T>().wrapping_offset(offset + first)
    }

    /// Stores a rectangle unchanged, if [`Epilogue::is_direct`]. Otherwise see [`Epilogue::run`].
    ///
    /// # Safety
    /// As [`Epilogue::run`].
    pub(super) unsafe fn copy<T: Real>(&self, bases: &[*mut u8], rect: Rect, block: *const T, step: usize) {
        let to = self.target::<T>(bases, rect);
        for c in 0..rect.channels.1 {
            let (from, to) = (block.wrapping_add(c * step), to.wrapping_add(c * self.plane));
            // SAFETY: the caller's contract, for elements of the block and of the store.
            unsafe {
                std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast(), rect.positions.1 * T::BYTES);
            };
        }
    }

    fn linear_index(&self, image: usize, channel: usize, position: usize) -> usize {
        (image * self.channels + channel) * self.plane + position
    }

    /// Prefetches each channel's part of a rectangle that will run soon. If planes are large, every row of a block is
    /// on a separate page, which hardware prefetchers do not reach.
    #[inline]
    pub(super) fn prefetch_rect(&self, bases: &[*mut u8], rect: Rect) {
        let first = self.linear_index(rect.image, rect.channels.0, rect.positions.0);
        for &(buffer, offset, size) in &self.row_major_buffers {
            let at = bases[buffer].wrapping_offset((offset + first as isize) * size as isize);
            for line in 0..(rect.positions.1 * size).div_ceil(CACHE_LINE_BYTES) {
                let at = at.wrapping_add(line * CACHE_LINE_BYTES);
                (0..rect.channels.1).for_each(|c| prefetch_l2(at.wrapping_add(c * self.plane * size)));
            }
        }
    }

    /// Initialises the frames, before the first task of a run.
    ///
    /// # Safety
    /// The piece of each worker begins with a frame.
    pub(super) unsafe fn init_frames(&self, parts: ScratchParts) {
        for worker in 0..parts.workers {
            // SAFETY: a frame begins with a failure.
            unsafe { parts.worker_part(worker).cast::<Failure>().write(Failure::NONE) };
        }
    }

    /// Returns the first failure, after the last task of a run.
    ///
    /// # Safety
    /// As [`Epilogue::open`], and all tasks have finished.
    pub(super) unsafe fn first_failure(&self, parts: ScratchParts) -> Result<(), OutOfRange> {
        // SAFETY: the caller's contract.
        let failures =
            (0..parts.workers).map(|worker| unsafe { parts.worker_part(worker).cast::<Failure>().read() });
        failures.min().unwrap_or(Failure::NONE).result()
    }

    /// Runs the epilogue over a rectangle with its values at `block`, channel by channel, `step` elements apart.
    ///
    /// # Safety
    /// - The contract of [`super::ConvKernel::run`].
    /// - Only this worker uses `frame` and `block`.
    /// - The rectangle is inside of the result, is not empty, and no other task uses it.
    pub(super) unsafe fn run<T: Real>(
        &self,
        bases: &[*mut u8],
        settings: RunSettings,
        frame: *mut u8,
        rect: Rect,
        block: *mut T,
        step: usize,
    ) {
        let tape = &self.program;
        if self.is_direct() {
            // SAFETY: the caller's contract.
            unsafe { self.copy(bases, rect, block.cast_const(), step) };
            return;
        }
        if let Some(edges) = self.padding_fixup.as_ref().filter(|_| settings.may_need_fixup) {
            // SAFETY: the caller's contract.
            unsafe { edges.recompute(bases, rect, (self.channels, self.plane), block, step) };
        }
        let block = block.cast_const();
        let site = |product: *const T| ExecContext {
            program: tape,
            // Slot 0 is the accumulator and never read from `bases`, so that slots count from B on.
            bases: &bases[1..],
            scalars: settings.scalars,
            frame,
            product: product.cast(),
        };
        let run = |outside: usize, first: usize, count: usize, mut product: *const T| {
            let mut start = first;
            while start < first + count {
                let n = tape.tile.min(first + count - start);
                // SAFETY: the caller's contract.
                unsafe { site(product).run(&tape.stages[0].body, outside, start, n) };
                start += n;
                product = product.wrapping_add(n);
            }
        };
        // SAFETY: the caller's contract. These operations load from index zero only, and the iteration space has an
        // index zero.
        unsafe { site(std::ptr::null()).run(&tape.per_run, 0, 0, tape.tile) };
        let Rect { image, channels: (channel, channels), positions: (position, count) } = rect;
        let first = self.linear_index(image, channel, position);
        if self.runs_along_planes {
            for c in 0..channels {
                run(image * self.channels + channel + c, position, count, block.wrapping_add(c * step));
            }
        } else if count < self.plane {
            for c in 0..channels {
                run(0, first + c * self.plane, count, block.wrapping_add(c * step));
            }
        } else if step == count {
            run(0, first, channels * count, block);
        } else {
            let rows_per_run = (tape.tile / count).max(1);
            for c in (0..channels).step_by(rows_per_run) {
                let channels = rows_per_run.min(channels - c);
                // SAFETY: the caller's contract, and the frame has capacity for `rows_per_run` channels of `count` values.
                unsafe {
                    let line = frame.add(tape.frame).cast::<T>();
                    let from = block.wrapping_add(c * step).cast();
                    copy_lines(
                        tape.isa,
                        self.compute_dtype,
                        from,
                        (step, 0),
                        channels,
                        (0, count),
                        line,
                        count,
                    );
                    run(0, first + c * count, channels * count, line.cast_const());
                }
            }
        }
    }
}
