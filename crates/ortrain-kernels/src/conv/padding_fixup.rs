//! Corrects sums that padding has turned into NaN.
//!
//! Engines multiply padding as zeros, which change no finite sum. But zero times infinity, or times NaN, is NaN, while
//! the definition has no product in the padding, and neither has the reference evaluator. So NaN sums are checked again
//! if their windows reach over an edge. Sums that are NaN only because of padding are recomputed by the definition, in
//! `f64`. The same holds for the positions between strides in the gradient of the input.
//!
//! The check costs almost nothing. Sums are checked only if the unpadded operand has a nonfinite element, or if there
//! are fewer sums than elements of that operand.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use ortrain_expr::{ConvPass, ConvShape, DType, Dims, Precision, SlidingAxis, Type};

use crate::conv::desc::ConvDesc;
use crate::conv::rect::Rect;
use crate::gemm::levels::Real;
use crate::isa::{Isa, Level, Work};
use crate::pool::Pool;
use crate::scratch::{BaseAddresses, RunScalars};
use crate::tile::number::{Bf16, F16, Stored};

/// Number of elements that are scanned at a time.
pub(super) const SCAN_PIECE: usize = 1 << 15;

/// Settings of a run of an engine, in addition to buffers and memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunSettings {
    pub(super) scalars: RunScalars,
    /// True if padding may have turned sums into NaN.
    pub(super) may_need_fixup: bool,
}

/// The sums of a convolution with windows that reach over an edge.
#[derive(Debug)]
pub(super) struct PaddingFixup {
    shape: ConvShape,
    dtypes: [DType; 2],
    precision: Precision,
    isa: Isa,
    /// Index of the operand without padding, and the number of its elements.
    unpadded: (usize, usize),
    /// Number of elements of the result.
    results: usize,
}

/// The sum for an element of the result. It multiplies `outer × inner` elements of the unpadded operand with the
/// elements of the other operand that they meet.
struct Sum {
    outer: usize,
    inner: usize,
    /// First element of the unpadded operand, and the step from one outer index to the next.
    unpadded: (usize, usize),
    /// The same for the padded operand.
    padded: (usize, usize),
}

/// Slices of the unpadded operand, from the first nonfinite one to the last, for sums over the same slices.
/// Neighbouring sums share their slices.
#[derive(Clone, Copy, Default)]
struct NonfiniteSlices {
    /// First element of the slices.
    of: Option<usize>,
    range: (usize, usize),
}

impl PaddingFixup {
    /// Returns `None` if no window reaches over an edge.
    pub(super) fn new(desc: &ConvDesc, isa: Isa) -> Option<PaddingFixup> {
        let shape = &desc.shape;
        let [a, b, results] = shape.operands().map(|dims| dims.iter().product());
        let bare = if shape.pass == ConvPass::FilterGradient { (0, a) } else { (1, b) };
        let inside = shape.axes.iter().all(|axis| has_no_padding(axis, shape.pass));
        let shape = shape.clone();
        (!inside && bare.1 > 0).then_some(PaddingFixup {
            shape,
            dtypes: [desc.a, desc.b],
            precision: desc.products.precision,
            isa,
            unpadded: bare,
            results,
        })
    }

    /// Returns true if padding may turn sums into NaN: the unpadded operand has a nonfinite element. Also returns true
    /// if the operand has more elements than there are sums, because then the sums are checked directly.
    pub(super) fn may_be_nonfinite(&self, bases: &[*mut u8], pool: &Pool, workers: usize) -> bool {
        let (operand, len) = self.unpadded;
        let dtype = self.dtypes[operand];
        if len > self.results || dtype != DType::F32 {
            return true;
        }
        let bases = BaseAddresses(bases);
        let odd = AtomicBool::new(false);
        pool.run(len.div_ceil(SCAN_PIECE), workers, &|piece, _| {
            let bases = &{ bases };
            let from = bases.0[operand].cast::<f32>().wrapping_add(piece * SCAN_PIECE).cast_const();
            if self.isa.run(MagnitudeScan {
                from,
                len: SCAN_PIECE.min(len - piece * SCAN_PIECE),
                threshold_bits: self.nonfinite_bits(),
            }) {
                odd.store(true, Ordering::Relaxed);
            }
        });
        odd.into_inner()
    }

    /// Returns the bits of the smallest magnitude that is infinite as a factor.
    fn nonfinite_bits(&self) -> u32 {
        if self.precision == Precision::Bf16 { ROUNDED_TO_INFINITY } else { INFINITE }
    }

    /// Recomputes the spoiled sums of a rectangle of the result. Its lines are at `block`, `step` elements apart.
    ///
    /// # Safety
    /// The contract of [`super::ConvKernel::run`]. The elements of the rectangle are valid for reads and writes.
    pub(super) unsafe fn recompute<T: Real>(
        &self,
        bases: &[*mut u8],
        rect: Rect,
        (channels, plane): (usize, usize),
        block: *mut T,
        step: usize,
    ) {
        let mut known = NonfiniteSlices::default();
        for c in 0..rect.channels.1 {
            let line = block.wrapping_add(c * step);
            let len = rect.positions.1;
            // SAFETY: the caller's contract.
            if !unsafe { may_have_nan(self.isa, line, len) } {
                continue;
            }
            let first = (rect.image * channels + rect.channels.0 + c) * plane + rect.positions.0;
            for i in 0..len {
                // SAFETY: as above.
                unsafe {
                    let at = line.add(i);
                    if at.read_unaligned().is_nan_value()
                        && let Some(sum) = self.recompute_sum(bases, first + i, &mut known)
                    {
                        at.write_unaligned(T::round_from_f64(sum));
                    }
                }
            }
        }
    }

    /// Recomputes the spoiled sums of a result that is stored unchanged, from `result` on.
    ///
    /// # Safety
    /// As [`PaddingFixup::recompute`], for all elements of the result.
    pub(super) unsafe fn recompute_all<T: Real>(
        &self,
        bases: &[*mut u8],
        result: *mut T,
        pool: &Pool,
        workers: usize,
    ) {
        let shared = BaseAddresses(bases);
        let to = BaseAddresses(&[result.cast()]);
        pool.run(self.results.div_ceil(SCAN_PIECE), workers, &|piece, _| {
            let (shared, to) = (&{ shared }, &{ to });
            let first = piece * SCAN_PIECE;
            let rect =
                Rect { image: 0, channels: (0, 1), positions: (first, SCAN_PIECE.min(self.results - first)) };
            let block = to.0[0].cast::<T>().wrapping_add(first);
            // SAFETY: the caller's contract; pieces share no elements.
            unsafe { self.recompute(shared.0, rect, (1, self.results), block, 0) };
        });
    }

    /// Returns the sum for an element of the result, by the definition, if padding has spoiled that sum.
    unsafe fn recompute_sum(
        &self,
        bases: &[*mut u8],
        element: usize,
        known: &mut NonfiniteSlices,
    ) -> Option<f64> {
        let (sum, coordinates) = self.sum_of(element);
        let is_inside = |(i, axis)| self.inside_range(i, coordinates[i]) == (0..self.sizes(axis).0);
        if !self.has_gaps() && self.shape.axes.iter().enumerate().all(is_inside) {
            return None;
        }
        let slice = |s: usize| sum.unpadded.0 + s * sum.unpadded.1;
        if known.of != Some(sum.unpadded.0) {
            // SAFETY: elements of the unpadded operand.
            let is_odd = |&s: &usize| unsafe { self.has_nonfinite(bases, slice(s), sum.inner) };
            let first = (0..sum.outer).find(is_odd).unwrap_or(sum.outer);
            let end = (first..sum.outer).rfind(is_odd).map_or(first, |last| last + 1);
            *known = NonfiniteSlices { of: Some(sum.unpadded.0), range: (first, end) };
        }
        // SAFETY: as above.
        let is_nonfinite = |&s: &usize| unsafe {
            if self.has_gaps() {
                let mut positions = MeetingPositions::new(self, &coordinates);
                (0..sum.inner)
                    .any(|t| positions.next().is_none() && self.has_nonfinite(bases, slice(s) + t, 1))
            } else {
                self.has_nonfinite_in_padding(bases, slice(s), 0, &coordinates)
            }
        };
        // Nonfinite elements are often neighbours, so a product that makes the true sum NaN is often near the first
        // spoiled one.
        let first = (known.range.0..known.range.1).find(is_nonfinite)?;
        let mut total = 0.0;
        for s in (first..sum.outer).chain(0..first) {
            let mut positions = MeetingPositions::new(self, &coordinates);
            for t in 0..sum.inner {
                if let Some(position) = positions.next() {
                    let at = sum.padded.0 + s * sum.padded.1 + position;
                    // SAFETY: elements of the operands.
                    total += unsafe {
                        self.read(bases, self.unpadded.0, slice(s) + t)
                            * self.read(bases, 1 - self.unpadded.0, at)
                    };
                    if total.is_nan() {
                        return None;
                    }
                }
            }
        }
        Some(total)
    }

    /// Returns true if some elements of the unpadded operand are not finite as factors.
    unsafe fn has_nonfinite(&self, bases: &[*mut u8], at: usize, len: usize) -> bool {
        if len == 0 {
            return false;
        }
        if self.dtypes[self.unpadded.0] == DType::F32 {
            let from = bases[self.unpadded.0].cast::<f32>().wrapping_add(at).cast_const();
            return self.isa.run(MagnitudeScan { from, len, threshold_bits: self.nonfinite_bits() });
        }
        // SAFETY: the caller's contract.
        (at..at + len).any(|at| unsafe { !self.read(bases, self.unpadded.0, at).is_finite() })
    }

    /// Returns true if an element of a block is not finite and meets padding. The block covers the axes from `axis` on,
    /// and begins at `at`.
    unsafe fn has_nonfinite_in_padding(
        &self,
        bases: &[*mut u8],
        at: usize,
        axis: usize,
        coordinates: &Dims,
    ) -> bool {
        let Some((first, rest)) = self.shape.axes[axis..].split_first() else { return false };
        let block: usize = rest.iter().map(|axis| self.sizes(axis).0).product();
        let (inside, size) = (self.inside_range(axis, coordinates[axis]), self.sizes(first).0);
        let after = at + inside.end * block;
        // SAFETY: the caller's contract, for parts of the block.
        unsafe {
            self.has_nonfinite(bases, at, inside.start * block)
                || self.has_nonfinite(bases, after, (size - inside.end) * block)
                || inside
                    .into_iter()
                    .any(|k| self.has_nonfinite_in_padding(bases, at + k * block, axis + 1, coordinates))
        }
    }

    /// Returns the sizes of an axis: in the unpadded operand, and in the other operand.
    fn sizes(&self, axis: &SlidingAxis) -> (usize, usize) {
        match self.shape.pass {
            ConvPass::Output => (axis.kernel, axis.input),
            ConvPass::InputGradient => (axis.kernel, axis.output),
            ConvPass::FilterGradient => (axis.output, axis.input),
        }
    }

    /// Returns true if elements that meet an element of the other operand are not adjacent, because of positions
    /// between strides.
    fn has_gaps(&self) -> bool {
        self.shape.pass == ConvPass::InputGradient && self.shape.axes.iter().any(|axis| axis.stride > 1)
    }

    /// Returns the elements along an axis that meet an element of the other operand, for a position of the result.
    /// Requires an axis without gaps.
    fn inside_range(&self, i: usize, coordinate: usize) -> Range<usize> {
        let axis = &self.shape.axes[i];
        let (size, other) = self.sizes(axis);
        let coordinate = coordinate as isize;
        // Position that element zero meets. The position advances by `step` from element to element.
        let (start, step) = match self.shape.pass {
            ConvPass::Output => {
                (coordinate * axis.stride as isize - axis.padding_before, axis.dilation as isize)
            }
            ConvPass::FilterGradient => {
                (coordinate * axis.dilation as isize - axis.padding_before, axis.stride as isize)
            }
            // Backwards: positions are counted from the end.
            ConvPass::InputGradient => {
                (other as isize - 1 - coordinate - axis.padding_before, axis.dilation as isize)
            }
        };
        let reach = |position: isize| ((position - start).max(0) as usize).div_ceil(step as usize).min(size);
        let (from, to) = (reach(0), reach(other as isize));
        from..to.max(from)
    }

    /// Returns the offsets of the products of an element of the result, and its positions along the axes.
    fn sum_of(&self, mut element: usize) -> (Sum, Dims) {
        let ConvShape { pass, batch, groups, channels_in, channels_out, ref axes } = self.shape;
        let mut coordinates = zeros(&self.shape);
        for (coordinate, axis) in coordinates.iter_mut().zip(axes).rev() {
            let size = match pass {
                ConvPass::Output => axis.output,
                ConvPass::InputGradient => axis.input,
                ConvPass::FilterGradient => axis.kernel,
            };
            *coordinate = element % size;
            element /= size;
        }
        let sizes = |size: fn(&SlidingAxis) -> usize| axes.iter().map(size).product::<usize>();
        let (inputs, outputs, taps) =
            (sizes(|axis| axis.input), sizes(|axis| axis.output), sizes(|axis| axis.kernel));
        let sum = match pass {
            ConvPass::Output => {
                let (image, row) = (element / (groups * channels_out), element % (groups * channels_out));
                let input = (image * groups + row / channels_out) * channels_in;
                Sum {
                    outer: channels_in,
                    inner: taps,
                    unpadded: (row * channels_in * taps, taps),
                    padded: (input * inputs, inputs),
                }
            }
            ConvPass::InputGradient => {
                let (image, row) = (element / (groups * channels_in), element % (groups * channels_in));
                let (group, channel) = (row / channels_in, row % channels_in);
                let output = (image * groups + group) * channels_out;
                Sum {
                    outer: channels_out,
                    inner: taps,
                    unpadded: ((group * channels_out * channels_in + channel) * taps, channels_in * taps),
                    padded: (output * outputs, outputs),
                }
            }
            ConvPass::FilterGradient => {
                let (row, channel) = (element / channels_in, element % channels_in);
                let input = row / channels_out * channels_in + channel;
                Sum {
                    outer: batch,
                    inner: outputs,
                    unpadded: (row * outputs, groups * channels_out * outputs),
                    padded: (input * inputs, groups * channels_in * inputs),
                }
            }
        };
        (sum, coordinates)
    }

    unsafe fn read(&self, bases: &[*mut u8], operand: usize, element: usize) -> f64 {
        let base = bases[operand].cast_const();
        macro_rules! go {
            ($s:ty) => {
                // SAFETY: the caller's contract.
                unsafe { base.cast::<$s>().add(element).read_unaligned().decode().into() }
            };
        }
        let dtype = self.dtypes[operand];
        let factor: f64 = match dtype {
            DType::F32 => go!(f32),
            DType::F64 => go!(f64),
            DType::F16 => go!(F16),
            DType::BF16 => go!(Bf16),
            other => unreachable!("a convolution of {other}: rejected at compile time"),
        };
        // With several terms, their sum differs from the factor by less than the error of a sum.
        match self.precision {
            Precision::Bf16 if Type::of(dtype) == Type::F32 => self.precision.split(factor as f32)[0].into(),
            _ => factor,
        }
    }
}

/// Returns true if every element of the unpadded operand along an axis meets an element of the other operand, for each
/// element of the result.
fn has_no_padding(axis: &SlidingAxis, pass: ConvPass) -> bool {
    if axis.kernel == 0 || axis.output == 0 || axis.input == 0 {
        return true;
    }
    match pass {
        ConvPass::Output | ConvPass::FilterGradient => {
            axis.input_at(0, 0).is_some() && axis.input_at(axis.output - 1, axis.kernel - 1).is_some()
        }
        ConvPass::InputGradient => {
            axis.stride == 1
                && output_at(axis, 0, axis.kernel - 1).is_some()
                && output_at(axis, axis.input - 1, 0).is_some()
        }
    }
}

fn zeros(shape: &ConvShape) -> Dims {
    Dims::from_elem(0, shape.axes.len())
}

/// Returns the output position of the window that has `cell` over an input position.
fn output_at(axis: &SlidingAxis, input: usize, cell: usize) -> Option<usize> {
    let at = input as isize + axis.padding_before - (cell * axis.dilation) as isize;
    let at = usize::try_from(at).ok()?;
    (at.is_multiple_of(axis.stride) && at / axis.stride < axis.output).then_some(at / axis.stride)
}

/// Iterator over the elements of the unpadded operand, each with the position that it meets in the other operand.
struct MeetingPositions<'a> {
    edges: &'a PaddingFixup,
    coordinates: &'a Dims,
    index: Dims,
    /// Linear position along all axes but the last, if it is inside.
    outside: Option<usize>,
}

impl<'a> MeetingPositions<'a> {
    fn new(edges: &'a PaddingFixup, coordinates: &'a Dims) -> MeetingPositions<'a> {
        let mut positions =
            MeetingPositions { edges, coordinates, index: zeros(&edges.shape), outside: None };
        positions.outside = positions.linear_position(edges.shape.axes.len().saturating_sub(1));
        positions
    }

    fn sizes(&self, axis: &SlidingAxis) -> (usize, usize) {
        self.edges.sizes(axis)
    }

    /// Returns the linear position along the first axes, if it is inside.
    fn linear_position(&self, axes: usize) -> Option<usize> {
        (0..axes)
            .try_fold(0, |linear, i| Some(linear * self.sizes(&self.edges.shape.axes[i]).1 + self.along(i)?))
    }

    fn along(&self, i: usize) -> Option<usize> {
        let (axis, coordinate, at) = (&self.edges.shape.axes[i], self.coordinates[i], self.index[i]);
        match self.edges.shape.pass {
            ConvPass::Output => axis.input_at(coordinate, at),
            ConvPass::InputGradient => output_at(axis, coordinate, at),
            ConvPass::FilterGradient => axis.input_at(at, coordinate),
        }
    }

    /// Returns the position that the next element meets, or `None` if it meets padding.
    #[inline]
    fn next(&mut self) -> Option<usize> {
        let axes = &self.edges.shape.axes;
        let Some(last) = axes.len().checked_sub(1) else { return Some(0) };
        let (size, other) = self.sizes(&axes[last]);
        let position = self.outside.and_then(|outside| Some(outside * other + self.along(last)?));
        self.index[last] += 1;
        if self.index[last] == size {
            self.index[last] = 0;
            for i in (0..last).rev() {
                self.index[i] += 1;
                if self.index[i] < self.sizes(&axes[i]).0 {
                    break;
                }
                self.index[i] = 0;
            }
            self.outside = self.linear_position(last);
        }
        position
    }
}

/// Bits of the smallest magnitude that is infinite or NaN.
const INFINITE: u32 = f32::INFINITY.to_bits();
/// Bits of the smallest magnitude with an infinite nearest bfloat16: half a last bit above the largest bfloat16.
const ROUNDED_TO_INFINITY: u32 = 0x7f7f_8000;

/// Test if a number has a magnitude of these bits or more. Infinities and NaN have larger bits than every finite
/// number.
pub(super) struct MagnitudeScan {
    pub(super) from: *const f32,
    pub(super) len: usize,
    pub(super) threshold_bits: u32,
}

impl Work for MagnitudeScan {
    type Out = bool;
    #[inline(always)]
    fn work<L: Level>(self) -> bool {
        let max_bits = (0..self.len).fold(0, |maximum: u32, i| {
            // SAFETY: an element of an operand (the contract of a run), read without a reference to it.
            let value = unsafe { self.from.add(i).read_unaligned() };
            maximum.max(value.to_bits() & !(1 << 31))
        });
        max_bits >= self.threshold_bits
    }
}

/// Returns true if some of the sums may be NaN.
unsafe fn may_have_nan<T: Real>(isa: Isa, from: *const T, len: usize) -> bool {
    // SAFETY: the caller's contract.
    T::BYTES != 4 || isa.run(MagnitudeScan { from: from.cast(), len, threshold_bits: INFINITE + 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `PaddingFixup::inside` returns exactly the elements that meet an element of the other operand.
    #[test]
    fn inside_range_matches_meeting_positions() {
        for (kernel, stride, dilation, before) in [
            (3, 1, 1, 1),
            (3, 1, 2, 3),
            (1, 1, 1, 2),
            (5, 1, 1, -1),
            (3, 2, 1, 1),
            (2, 3, 2, 0),
            (4, 1, 1, 9),
        ] {
            for pass in [ConvPass::Output, ConvPass::InputGradient, ConvPass::FilterGradient] {
                if pass == ConvPass::InputGradient && stride > 1 {
                    continue;
                }
                let axis =
                    SlidingAxis { input: 6, output: 5, kernel, stride, dilation, padding_before: before };
                let axes = std::iter::once(axis).collect();
                let shape = ConvShape { pass, batch: 1, groups: 1, channels_in: 1, channels_out: 1, axes };
                let edges = PaddingFixup {
                    shape,
                    dtypes: [DType::F32; 2],
                    precision: Precision::F32,
                    isa: Isa::detect().expect("the level of the machine"),
                    unpadded: (1, 1),
                    results: 1,
                };
                let coordinates = match pass {
                    ConvPass::Output => axis.output,
                    ConvPass::InputGradient => axis.input,
                    ConvPass::FilterGradient => axis.kernel,
                };
                for coordinate in 0..coordinates {
                    let at = Dims::from_elem(coordinate, 1);
                    let mut positions = MeetingPositions::new(&edges, &at);
                    let inside = edges.inside_range(0, coordinate);
                    for k in 0..edges.sizes(&axis).0 {
                        assert_eq!(
                            inside.contains(&k),
                            positions.next().is_some(),
                            "{pass:?} {axis:?}: place {coordinate}, element {k}, {inside:?}"
                        );
                    }
                }
            }
        }
    }
}
