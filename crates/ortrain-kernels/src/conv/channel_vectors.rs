//! Depthwise convolutions of small planes: each lane of a vector is a channel.
//!
//! The planes of some channels are transposed, so that elements at the same position of all channels are adjacent. A
//! convolution is then a list of products of whole vectors, for any sizes of the plane, strides and padding.

use std::marker::PhantomData;
use std::sync::Arc;

use ortrain_expr::{ConvPass, ConvShape, DType, SlidingAxis};

use super::copy::{add_parts, copy_lines};
use super::depthwise_3x3::Kernels3x3;
use super::epilogue::Epilogue;
use super::implicit_gemm::{MAX_TASKS, MIN_TASK_WORK};
use super::padding_fixup::RunSettings;
use super::partition::Partition;
use crate::conv::desc::ConvDesc;
use crate::conv::engine::{ConvCandidate, Engine, EngineRun, Request, boxed};
use crate::conv::rect::Rect;
use crate::gemm::levels::Real;
use crate::gemm::pack::transpose;
use crate::isa::{Isa, Level, Work};
use crate::tile::ALIGN;

/// Number of channels that are computed together.
const LANES: usize = 32;
/// Maximum number of positions of a plane for this engine: with stride 1, and with larger strides.
const MAX_POSITIONS: [usize; 2] = [256, 2400];
/// The same maximum, if another engine has kernels for the windows.
const MAX_POSITIONS_3X3: usize = 100;
/// Maximum number of listed products of a plane.
const MAX_PRODUCTS: usize = 1 << 14;
/// Minimum number of channels that fills the lanes well enough.
const MIN_CHANNELS: usize = 12;

pub(super) struct ChannelVectors<T> {
    epilogue: Arc<Epilogue>,
    isa: Isa,
    dtypes: [DType; 2],
    batch: usize,
    channels: usize,
    /// True if the result is the gradient of the filter, a sum over the images.
    is_filter_gradient: bool,
    /// Number of positions in the planes of A, B and the result.
    positions: [usize; 3],
    /// For each position of the result, the end of its products in the list.
    ends: Vec<u32>,
    /// Positions in A and B.
    products: Vec<(u32, u32)>,
    /// Parts of the images, if several tasks compute parts of the sums.
    parts: Partition,
    layout: Layout,
    real: PhantomData<fn() -> T>,
}

/// Layout of scratch memory: offsets in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Layout {
    planes: [usize; 3],
    /// A plane of each channel, one after the other.
    lines: usize,
    each: usize,
    shared: usize,
}

/// Lists every product of an input and a filter element, with its output element, as positions in their planes. Returns
/// `None` if there are too many products.
fn list_products(shape: &ConvShape) -> Option<Vec<[usize; 3]>> {
    let mut list = vec![[0; 3]];
    for axis in &shape.axes {
        let mut along = Vec::new();
        for output in 0..axis.output {
            for tap in 0..axis.kernel {
                if let Some(input) = axis.input_at(output, tap) {
                    along.push([input, tap, output]);
                }
            }
            if along.len() > MAX_PRODUCTS {
                return None;
            }
        }
        if list.len() * along.len() > MAX_PRODUCTS {
            return None;
        }
        let sizes = [axis.input, axis.kernel, axis.output];
        let inside = |outer: [usize; 3]| {
            along.iter().map(move |inner| std::array::from_fn(|i| outer[i] * sizes[i] + inner[i]))
        };
        list = list.into_iter().flat_map(inside).collect();
    }
    Some(list)
}

/// Depthwise convolutions of many channels with small planes.
pub(super) fn candidate<T: Real + Send + Sync>() -> ConvCandidate {
    ConvCandidate {
        name: "conv.channel_vectors",
        accepts: |request| request.multiplies_unchanged::<T>() && is_depthwise(&request.desc.shape),
        preferences: &[has_many_channels, has_small_planes::<T>],
        build: |request| ChannelVectors::<T>::new(request.desc, request.isa, request.epilogue).map(boxed),
    }
}

/// Returns true if each group has one channel, and all positions of a plane fit into 16 bits.
fn is_depthwise(shape: &ConvShape) -> bool {
    let is_small = |count| count <= usize::from(u16::MAX);
    shape.channels_in == 1 && shape.channels_out == 1 && position_counts(shape).into_iter().all(is_small)
}

/// Returns the number of positions in the planes of A, B and the result.
fn position_counts(shape: &ConvShape) -> [usize; 3] {
    shape.operands().each_ref().map(|dims| dims[2..].iter().product::<usize>())
}

/// Few channels leave lanes unused.
fn has_many_channels(request: &Request<'_>) -> bool {
    request.desc.shape.groups >= MIN_CHANNELS
}

/// Transposed planes must stay in the cache. Other engines have faster kernels for windows of 3×3, even for smaller
/// planes.
fn has_small_planes<T: Real>(request: &Request<'_>) -> bool {
    let shape = &request.desc.shape;
    let moves = usize::from(shape.axes.iter().any(|axis| axis.stride > 1));
    let by_three = |axis: &SlidingAxis| axis.kernel == 3 && axis.stride == 1 && axis.dilation == 1;
    let three = shape.axes.len() == 2
        && shape.axes.iter().all(by_three)
        && Kernels3x3::new::<T>(request.isa).is_some();
    let max_positions = if three { MAX_POSITIONS_3X3 } else { MAX_POSITIONS[moves] };
    position_counts(shape).into_iter().all(|count| count <= max_positions)
}

impl<T: Real> ChannelVectors<T> {
    /// Returns `None` if a plane has too many products.
    fn new(desc: &ConvDesc, isa: Isa, finish: &Arc<Epilogue>) -> Option<ChannelVectors<T>> {
        let shape = &desc.shape;
        let position_counts = position_counts(shape);
        // From (input, filter, output) to (result, A, B).
        let order = match shape.pass {
            ConvPass::Output => [2, 0, 1],
            ConvPass::InputGradient => [0, 2, 1],
            ConvPass::FilterGradient => [1, 2, 0],
        };
        // Positions fit into 16 bits, so one number encodes all three, and numbers are sorted quickly.
        let key =
            |product: [usize; 3]| order.iter().fold(0u64, |packed, &i| packed << 16 | product[i] as u64);
        let mut list: Vec<u64> = list_products(shape)?.into_iter().map(key).collect();
        list.sort_unstable();
        let ends = (0..position_counts[2] as u64)
            .map(|position| list.partition_point(|packed_indices| packed_indices >> 32 <= position) as u32);
        let ends = ends.collect();
        let products = list
            .iter()
            .map(|&packed_indices| {
                (u32::from((packed_indices >> 16) as u16), u32::from(packed_indices as u16))
            })
            .collect();
        let mut layout = Layout { each: finish.frame, ..Layout::default() };
        let mut reserve = |positions: usize| {
            let at = layout.each;
            layout.each += (positions * LANES * T::BYTES).next_multiple_of(ALIGN);
            at
        };
        layout.planes = position_counts.map(&mut reserve);
        layout.lines = reserve(position_counts.into_iter().max().unwrap_or(0));
        let filter = shape.pass == ConvPass::FilterGradient;
        let blocks = shape.groups.div_ceil(LANES);
        let work = list.len() * LANES;
        let target_tasks =
            (work.saturating_mul(shape.batch * blocks) / MIN_TASK_WORK).clamp(1, MAX_TASKS).div_ceil(blocks);
        let parts = Partition::new(shape.batch, 1, if filter { target_tasks } else { MAX_TASKS });
        if filter && parts.parts > 1 {
            let sums = parts.parts * blocks * position_counts[2] * LANES * T::BYTES;
            layout.shared = sums.next_multiple_of(ALIGN);
        }
        Some(ChannelVectors {
            epilogue: Arc::clone(finish),
            isa,
            dtypes: [desc.a, desc.b],
            batch: shape.batch,
            channels: shape.groups,
            is_filter_gradient: filter,
            positions: position_counts,
            ends,
            products,
            parts,
            layout,
            real: PhantomData,
        })
    }

    /// Transposes the planes of some channels of operand `i`.
    unsafe fn transpose_operand(
        &self,
        bases: &[*mut u8],
        i: usize,
        first: usize,
        count: usize,
        scratch: *mut u8,
    ) {
        let (positions, dtype) = (self.positions[i], self.dtypes[i]);
        let real = T::DTYPE;
        let from = bases[i].wrapping_add(first * positions * dtype.size()).cast_const();
        // SAFETY: the planes belong to the operand, and the layout that `new` computed has capacity for them.
        unsafe {
            let to = scratch.add(self.layout.planes[i]).cast::<T>();
            let mut from = from.cast::<T>();
            if dtype != real {
                let decoded = scratch.add(self.layout.lines).cast::<T>();
                let len = count * positions;
                copy_lines(self.isa, dtype, from.cast(), (len, 0), 1, (0, len), decoded, len);
                from = decoded;
            }
            transpose(self.isa, from, positions, (count, positions), to, LANES);
        }
    }

    /// Computes the result of some channels of an image, before the epilogue.
    unsafe fn compute_image(
        &self,
        bases: &[*mut u8],
        block: usize,
        image: usize,
        to: *mut T,
        scratch: *mut u8,
    ) {
        let &ChannelVectors { ref layout, channels, .. } = self;
        let (first, count) = self.block_channels(block);
        // SAFETY: scratch memory has the layout that `new` computed, and the caller's contract.
        unsafe {
            let plane = |i: usize| scratch.add(layout.planes[i]).cast::<T>();
            self.transpose_operand(bases, 0, image * channels + first, count, scratch);
            self.transpose_operand(
                bases,
                1,
                if self.is_filter_gradient { image * channels } else { 0 } + first,
                count,
                scratch,
            );
            let (ends, products) = (&self.ends, &self.products);
            self.isa.run(Sums { ends, products, a: plane(0), b: plane(1), to, add: self.is_filter_gradient });
        }
    }

    /// Zeroes the planes if a task has fewer channels than lanes. The unused lanes are computed too, and arbitrary
    /// values could make that slow.
    unsafe fn clear(&self, block: usize, scratch: *mut u8) {
        let [first, ..] = self.layout.planes;
        if self.block_channels(block).1 < LANES {
            // SAFETY: the planes are stored between `first` and `layout.lines`.
            unsafe { scratch.add(first).write_bytes(0, self.layout.lines - first) };
        }
    }

    /// Runs the epilogue over the result of some channels of an image.
    unsafe fn store_image(
        &self,
        bases: &[*mut u8],
        settings: RunSettings,
        (block, image): (usize, usize),
        from: *const T,
        scratch: *mut u8,
    ) {
        let position_count = self.positions[2];
        let channels = self.block_channels(block);
        let rect = Rect { image, channels, positions: (0, position_count) };
        // SAFETY: scratch memory has the layout that `new` computed, and the caller's contract.
        unsafe {
            if self.epilogue.is_direct() {
                let to = self.epilogue.target::<T>(bases, rect);
                transpose(self.isa, from, LANES, (position_count, channels.1), to, position_count);
                return;
            }
            let to = scratch.add(self.layout.lines).cast::<T>();
            transpose(self.isa, from, LANES, (position_count, channels.1), to, position_count);
            self.epilogue.run(bases, settings, scratch, rect, to, position_count);
        }
    }

    /// Returns the first channel of a block, and the number of its channels.
    fn block_channels(&self, block: usize) -> (usize, usize) {
        let first = block * LANES;
        (first, LANES.min(self.channels - first))
    }
}

/// Sums of products of vectors.
#[derive(Clone, Copy)]
struct Sums<'a, T> {
    ends: &'a [u32],
    products: &'a [(u32, u32)],
    a: *const T,
    b: *const T,
    to: *mut T,
    /// True if the sums are added to the values at `to`.
    add: bool,
}

impl<T: Real> Work for Sums<'_, T> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let mut begin = 0;
        for (position, &end) in self.ends.iter().enumerate() {
            let mut sums = [T::ZERO; LANES];
            // SAFETY: the ends are in order, and the last one is the length of the list of products. Products are
            // positions in the planes.
            unsafe {
                for &(a, b) in self.products.get_unchecked(begin..end as usize) {
                    let a = self.a.add(a as usize * LANES).cast::<[T; LANES]>().read();
                    let b = self.b.add(b as usize * LANES).cast::<[T; LANES]>().read();
                    for l in 0..LANES {
                        sums[l] = T::mul_add_at::<L>(a[l], b[l], sums[l]);
                    }
                }
                let to = self.to.add(position * LANES).cast::<[T; LANES]>();
                if self.add {
                    let old = to.read();
                    for l in 0..LANES {
                        sums[l] = old[l].add(sums[l]);
                    }
                }
                to.write(sums);
            }
            begin = end as usize;
        }
    }
}

impl<T: Real + Send + Sync> Engine for ChannelVectors<T> {
    fn epilogue(&self) -> &Epilogue {
        &self.epilogue
    }

    fn scratch(&self) -> (usize, usize) {
        (self.layout.shared, self.layout.each)
    }

    unsafe fn run_tasks(&self, run: EngineRun<'_>) {
        let EngineRun { settings, parts, .. } = run;
        let Layout { planes: [.., result], shared, .. } = self.layout;
        let blocks = self.channels.div_ceil(LANES);
        let elements = self.positions[2] * LANES;
        if !self.is_filter_gradient {
            run.each(blocks * self.batch, |bases, task, worker| {
                let (block, image) = (task % blocks, task / blocks);
                let scratch = parts.worker_part(worker);
                // SAFETY: scratch memory has the layout that `new` computed. Tasks have separate channels, images
                // and sums.
                unsafe {
                    let to = scratch.add(result).cast::<T>();
                    self.clear(block, scratch);
                    self.compute_image(bases, block, image, to, scratch);
                    self.store_image(bases, settings, (block, image), to, scratch);
                }
            });
        } else {
            let count = self.parts.parts.max(1);
            run.each(blocks * count, |bases, task, worker| {
                let (block, part) = (task % blocks, task / blocks);
                let (begin, end) = if self.parts.parts == 0 { (0, 0) } else { self.parts.part(part) };
                let scratch = parts.worker_part(worker);
                // SAFETY: as above.
                unsafe {
                    let to = if shared > 0 {
                        parts.shared_part().cast::<T>().add(task * elements)
                    } else {
                        scratch.add(result).cast::<T>()
                    };
                    self.clear(block, scratch);
                    to.cast::<u8>().write_bytes(0, elements * T::BYTES);
                    for image in begin..end {
                        self.compute_image(bases, block, image, to, scratch);
                    }
                    if shared == 0 {
                        self.store_image(bases, settings, (block, 0), to, scratch);
                    }
                }
            });
            if shared > 0 {
                run.each(blocks, |bases, block, worker| {
                    let scratch = parts.worker_part(worker);
                    // SAFETY: as above; all sums are complete.
                    unsafe {
                        let from = parts.shared_part().cast::<T>().add(block * elements).cast_const();
                        let to = scratch.add(result).cast::<T>();
                        let sums = (count, blocks * elements);
                        add_parts(self.isa, from, LANES, sums, (self.positions[2], LANES), to, LANES);
                        self.store_image(bases, settings, (block, 0), to, scratch);
                    }
                });
            }
        }
    }
}
