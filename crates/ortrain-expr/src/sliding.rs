//! Geometry of convolutions and pooling: windows that slide along axes.

use std::ops::Range;

use smallvec::SmallVec;

use crate::{DType, Dims};

/// Axis along which a window slides.
///
/// Cell `k` of the window at output position `o` covers input position `o * stride + k * dilation - before`. Positions
/// outside of `0..input` are padding; the amount of padding after the input follows from `output`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlidingAxis {
    /// Number of input positions.
    pub input: usize,
    /// Number of output positions.
    pub output: usize,
    /// Number of cells of the window.
    pub kernel: usize,
    /// Input positions between adjacent output positions; at least 1.
    pub stride: usize,
    /// Input positions between adjacent cells; at least 1.
    pub dilation: usize,
    /// Padding before the first input position. If negative, `-before` input positions are skipped.
    pub padding_before: isize,
}

impl SlidingAxis {
    /// Returns the input position under cell `k` of the window at output position `o`; `None` in the padding.
    #[must_use]
    pub fn input_at(&self, o: usize, k: usize) -> Option<usize> {
        let at = (o * self.stride + k * self.dilation) as isize - self.padding_before;
        usize::try_from(at).ok().filter(|&at| at < self.input)
    }

    /// Returns the cells of the window at output position `o` that cover the input.
    #[must_use]
    pub fn cells_over_input(&self, o: usize) -> Range<usize> {
        let start = (o * self.stride) as isize - self.padding_before;
        let step = self.dilation as isize;
        let cell = |position: isize| (position - start).max(0).unsigned_abs().div_ceil(step.unsigned_abs());
        let end = cell(self.input as isize).min(self.kernel);
        cell(0).min(end)..end
    }

    /// Returns the number of pairs of a window position and a cell that cover the input, not padding.
    #[must_use]
    pub fn pairs_over_input(&self) -> u64 {
        // Number of positions over the input among `number` positions with a step of `step`, the first at `from`.
        let inside = |from: i128, step: usize, count: usize| {
            let step = step as i128;
            let before = |limit: i128| (limit - from + step - 1).div_euclid(step).clamp(0, count as i128);
            u64::try_from(before(self.input as i128) - before(0)).unwrap_or(0)
        };
        let position = |index: usize, step: usize| index as i128 * step as i128 - self.padding_before as i128;
        let (outputs, cells) = (self.output, self.kernel);
        if outputs.min(cells) > MAX_EXACT_COUNT {
            return (outputs as u64).saturating_mul(cells as u64);
        }
        if cells <= outputs {
            let of_cell = |k| inside(position(k, self.dilation), self.stride, outputs);
            (0..cells).map(of_cell).fold(0, u64::saturating_add)
        } else {
            let of_window = |o| inside(position(o, self.stride), self.dilation, cells);
            (0..outputs).map(of_window).fold(0, u64::saturating_add)
        }
    }

    /// Returns the element of a plane under cell `number` (row-major) of the window at an output position, if there is
    /// one.
    #[must_use]
    pub fn element_under_cell(axes: &[SlidingAxis], at: &[usize], mut index: usize) -> Option<usize> {
        let (mut element, mut stride) = (0, 1);
        for (axis, &o) in axes.iter().zip(at).rev() {
            let cell = index.checked_rem(axis.kernel)?;
            element += stride * ((o * axis.stride + cell * axis.dilation) as isize - axis.padding_before);
            index /= axis.kernel;
            stride *= axis.input as isize;
        }
        usize::try_from(element).ok().filter(|&element| index == 0 && (element as isize) < stride)
    }

    /// Returns the fault of the axis, if any.
    fn validate(&self) -> Option<String> {
        if self.stride == 0 || self.dilation == 0 {
            return Some(format!("stride {} and dilation {} must be at least 1", self.stride, self.dilation));
        }
        let end = self
            .output
            .checked_mul(self.stride)
            .and_then(|o| o.checked_add(self.kernel.checked_mul(self.dilation)?))
            .and_then(|end| end.checked_add(self.padding_before.unsigned_abs()))
            .and_then(|end| end.checked_add(self.input));
        match end {
            Some(end) if isize::try_from(end).is_ok() => None,
            _ => Some("the window positions are too large to count".to_owned()),
        }
    }
}

/// Maximum number of windows or cells counted one by one. If there are more of both, all pairs count as over the input.
const MAX_EXACT_COUNT: usize = 1 << 16;

/// Axes along which a window slides, outermost first.
pub type SlidingAxes = SmallVec<[SlidingAxis; 3]>;

/// Tensor of a convolution that is computed from the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConvPass {
    /// Output, from the input (A) and the filter (B).
    Output,
    /// Gradient of the input, from the gradient of the output (A) and the filter (B). A transposed convolution computes
    /// the same.
    InputGradient,
    /// Gradient of the filter, from the gradient of the output (A) and the input (B).
    FilterGradient,
}

/// Sizes of a convolution.
///
/// All tensors are row-major: the input `[batch, groups * channels_in, inputs..]`, the output
/// `[batch, groups * channels_out, outputs..]`, the filter `[groups * channels_out, channels_in, kernels..]`, with
///
/// `output[n, g*M + m, o] = sum over c, k of input[n, g*C + c, position(o, k)] * filter[g*M + m, c, k]`
///
/// where `C = channels_in`, `M = channels_out`, and padding is zero.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ConvShape {
    /// Computed tensor.
    pub pass: ConvPass,
    /// Number of images.
    pub batch: usize,
    /// Number of groups of channels.
    pub groups: usize,
    /// Number of input channels of a group.
    pub channels_in: usize,
    /// Number of output channels of a group.
    pub channels_out: usize,
    /// Spatial axes.
    pub axes: SlidingAxes,
}

impl ConvShape {
    fn dims(&self, lead: [usize; 2], size: impl Fn(&SlidingAxis) -> usize) -> Dims {
        lead.into_iter().chain(self.axes.iter().map(size)).collect()
    }

    /// Returns the shape of the input.
    #[must_use]
    pub fn input_dims(&self) -> Dims {
        self.dims([self.batch, self.groups * self.channels_in], |axis| axis.input)
    }

    /// Returns the shape of the output.
    #[must_use]
    pub fn output_dims(&self) -> Dims {
        self.dims([self.batch, self.groups * self.channels_out], |axis| axis.output)
    }

    /// Returns the shape of the filter.
    #[must_use]
    pub fn filter_dims(&self) -> Dims {
        self.dims([self.groups * self.channels_out, self.channels_in], |axis| axis.kernel)
    }

    /// Returns the shapes of A, B and the result.
    #[must_use]
    pub fn operands(&self) -> [Dims; 3] {
        let (input, output, filter) = (self.input_dims(), self.output_dims(), self.filter_dims());
        match self.pass {
            ConvPass::Output => [input, filter, output],
            ConvPass::InputGradient => [output, filter, input],
            ConvPass::FilterGradient => [output, input, filter],
        }
    }

    /// Returns the sides of the matrix product that computes the convolution of a group: rows, columns, terms of a sum.
    #[must_use]
    pub fn product_sides(&self) -> [usize; 3] {
        let ConvShape { batch, channels_in, channels_out, ref axes, .. } = *self;
        let positions =
            |along: fn(&SlidingAxis) -> usize| axes.iter().map(along).fold(1usize, usize::saturating_mul);
        let of_batch = |along: fn(&SlidingAxis) -> usize| batch.saturating_mul(positions(along));
        let taps = |channels: usize| channels.saturating_mul(positions(|axis| axis.kernel));
        match self.pass {
            ConvPass::Output => [channels_out, of_batch(|axis| axis.output), taps(channels_in)],
            ConvPass::InputGradient => [channels_in, of_batch(|axis| axis.input), taps(channels_out)],
            ConvPass::FilterGradient => [channels_out, taps(channels_in), of_batch(|axis| axis.output)],
        }
    }

    /// Returns the fault of the shape, if any: sizes or positions that are too large to count.
    #[must_use]
    pub fn validate(&self) -> Option<String> {
        let channels = [self.channels_in, self.channels_out].map(|c| self.groups.checked_mul(c));
        if channels.contains(&None) {
            return Some("the channels are too many to count".to_owned());
        }
        let too_large = |dims: &Dims| dims.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim)).is_none();
        if self.operands().iter().any(too_large) {
            return Some("the tensors are too large to count".to_owned());
        }
        self.axes.iter().find_map(SlidingAxis::validate)
    }
}

/// Function of the elements under a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WindowPass {
    /// Maximum, in which NaN wins, and optionally its position. Of equal elements (or several NaNs) the first one wins.
    /// Padding never wins. If a window covers only padding, the result is the least value of the type, with the
    /// position of the plane's start.
    Max,
    /// Gradient of [`WindowPass::Max`], from the gradient of its result and the positions. Gradients are added at their
    /// positions, in the order of the output. Positions outside of their plane receive nothing.
    MaxGradient,
    /// Sum of the elements, added in their order; padding is zero.
    Sum,
    /// Gradient of [`WindowPass::Sum`]: for each input position, the sum over the windows that cover it, added in the
    /// order of the output.
    SumGradient,
}

/// Encoding of the position of a maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IndexKind {
    /// Row-major number of the element in the whole tensor `[planes, inputs..]`: an `I64`.
    Element,
    /// Row-major number of the cell in its window: a `U8`, or a `U16` ([`WindowShape::cell_number_type`]). Maxima are over
    /// the input. A cell over padding has the position that follows from the row-major order, possibly outside of the
    /// plane. A number beyond the last cell is no position.
    Cell,
}

/// Sizes of a pooling of numbers: `planes` independent planes of the spatial axes.
///
/// Sums are accumulated in the compute type of the elements, and rounded once to the storage type.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WindowShape {
    /// Computed function.
    pub pass: WindowPass,
    /// Number of planes.
    pub planes: usize,
    /// Spatial axes.
    pub axes: SlidingAxes,
}

impl WindowShape {
    /// Returns the number of elements of an input plane.
    #[must_use]
    pub fn plane_inputs(&self) -> usize {
        self.axes.iter().map(|axis| axis.input).product()
    }

    /// Returns the number of elements of an output plane.
    #[must_use]
    pub fn plane_outputs(&self) -> usize {
        self.axes.iter().map(|axis| axis.output).product()
    }

    /// Returns the number of elements that are read and the number that are written, over all planes.
    #[must_use]
    pub fn operands(&self) -> [usize; 2] {
        let (inputs, outputs) = (self.planes * self.plane_inputs(), self.planes * self.plane_outputs());
        match self.pass {
            WindowPass::Max | WindowPass::Sum => [inputs, outputs],
            WindowPass::MaxGradient | WindowPass::SumGradient => [outputs, inputs],
        }
    }

    /// Returns the narrowest type that can number the cells of a window, `U8` or `U16`.
    ///
    /// Returns `None` if there are no cells or too many, or if a window may cover only padding: then a maximum has a
    /// position but no cell.
    #[must_use]
    pub fn cell_number_type(&self) -> Option<DType> {
        let covers = |axis: &SlidingAxis| {
            // Adjacent cells must not be further apart than the length of the input, so that they cannot skip it.
            let is_over_input = axis.kernel == 1 || axis.dilation <= axis.input;
            let at = |o: usize| !axis.cells_over_input(o).is_empty();
            is_over_input && (axis.output == 0 || (at(0) && at(axis.output - 1)))
        };
        let cells = self.axes.iter().try_fold(1usize, |n, axis| n.checked_mul(axis.kernel))?;
        match cells {
            1..=0x100 => Some(DType::U8),
            0x101..=0x1_0000 => Some(DType::U16),
            _ => None,
        }
        .filter(|_| self.axes.iter().all(covers))
    }

    /// Returns true if positions of maxima can be stored with this encoding in this type.
    #[must_use]
    pub fn has_positions(&self, kind: IndexKind, dtype: DType) -> bool {
        match (kind, dtype) {
            (IndexKind::Element, DType::I64) => true,
            (IndexKind::Cell, DType::U16) => self.cell_number_type().is_some(),
            (IndexKind::Cell, DType::U8) => self.cell_number_type() == Some(DType::U8),
            _ => false,
        }
    }

    /// Returns the fault of the shape, if any: sizes or positions that are too large to count.
    #[must_use]
    pub fn validate(&self) -> Option<String> {
        let count = |size: fn(&SlidingAxis) -> usize| {
            self.axes.iter().try_fold(self.planes, |n, axis| n.checked_mul(size(axis)))
        };
        if count(|axis| axis.input).is_none() || count(|axis| axis.output).is_none() {
            return Some("the tensors are too large to count".to_owned());
        }
        self.axes.iter().find_map(SlidingAxis::validate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AXIS: SlidingAxis =
        SlidingAxis { input: 5, output: 3, kernel: 3, stride: 2, dilation: 1, padding_before: 1 };

    #[test]
    fn padding_has_no_input_position() {
        assert_eq!(AXIS.input_at(0, 0), None);
        assert_eq!(AXIS.input_at(0, 1), Some(0));
        assert_eq!(AXIS.input_at(2, 1), Some(4));
        assert_eq!(AXIS.input_at(2, 2), None);
        let cropped = SlidingAxis { padding_before: -2, ..AXIS };
        assert_eq!(cropped.input_at(0, 0), Some(2));
    }

    #[test]
    fn cells_over_the_input() {
        for before in -7..=7 {
            for (kernel, stride, dilation, input) in
                [(3, 2, 1, 5), (3, 1, 2, 5), (4, 3, 3, 4), (1, 1, 1, 0), (5, 2, 1, 1)]
            {
                let axis = SlidingAxis { input, output: 6, kernel, stride, dilation, padding_before: before };
                for o in 0..axis.output {
                    let expected: Vec<usize> =
                        (0..kernel).filter(|&k| axis.input_at(o, k).is_some()).collect();
                    assert_eq!(axis.cells_over_input(o).collect::<Vec<_>>(), expected, "{axis:?} at {o}");
                }
            }
        }
    }

    #[test]
    fn cell_number_type_needs_windows_over_input() {
        let shape = |axes: &[SlidingAxis]| WindowShape {
            pass: WindowPass::Max,
            planes: 2,
            axes: axes.iter().copied().collect(),
        };
        let of = |axes: &[SlidingAxis]| shape(axes).cell_number_type();
        let long =
            |kernel: usize| SlidingAxis { input: kernel, output: 1, kernel, padding_before: 0, ..AXIS };
        assert_eq!(of(&[]), Some(DType::U8));
        assert_eq!(of(&[AXIS, AXIS]), Some(DType::U8));
        assert_eq!(of(&[long(16), long(16)]), Some(DType::U8));
        assert_eq!(of(&[long(257)]), Some(DType::U16));
        assert_eq!(of(&[long(256), long(256)]), Some(DType::U16));
        assert_eq!(of(&[long(256), long(257)]), None);
        assert_eq!(of(&[long(usize::MAX), long(2)]), None);
        assert_eq!(of(&[AXIS, SlidingAxis { kernel: 0, ..AXIS }]), None);
        let kinds =
            [(IndexKind::Cell, DType::U8), (IndexKind::Cell, DType::U16), (IndexKind::Element, DType::I64)];
        for (kind, dtype) in kinds {
            assert!(shape(&[AXIS]).has_positions(kind, dtype));
            assert_eq!(shape(&[long(257)]).has_positions(kind, dtype), dtype != DType::U8);
            assert_eq!(shape(&[long(65_537)]).has_positions(kind, dtype), dtype == DType::I64);
        }
        for (kind, dtype) in
            [(IndexKind::Element, DType::I32), (IndexKind::Element, DType::U8), (IndexKind::Cell, DType::I64)]
        {
            assert!(!shape(&[AXIS]).has_positions(kind, dtype));
        }
        // Compares with the definition, except for cells further apart than the input is long.
        for before in -6..=6 {
            for (kernel, stride, dilation, input) in [
                (3, 2, 1, 5),
                (3, 1, 2, 5),
                (4, 3, 3, 4),
                (1, 1, 1, 0),
                (5, 2, 1, 1),
                (1, 2, 9, 7),
                (2, 1, 3, 2),
            ] {
                let axis = SlidingAxis { input, output: 4, kernel, stride, dilation, padding_before: before };
                let every = (0..axis.output).all(|o| !axis.cells_over_input(o).is_empty());
                let is_some = of(&[AXIS, axis]).is_some();
                assert!(is_some == every || (!is_some && dilation > input), "{axis:?}");
            }
        }
    }

    #[test]
    fn sizes_that_overflow_are_faults() {
        let shape = |axis| ConvShape {
            pass: ConvPass::Output,
            batch: 1,
            groups: 1,
            channels_in: 1,
            channels_out: 1,
            axes: [axis].into_iter().collect(),
        };
        assert_eq!(shape(AXIS).validate(), None);
        assert!(shape(SlidingAxis { dilation: usize::MAX / 2, ..AXIS }).validate().is_some());
        assert!(shape(SlidingAxis { stride: 0, ..AXIS }).validate().is_some());
        assert!(ConvShape { batch: usize::MAX, ..shape(AXIS) }.validate().is_some());
        let window =
            |axis| WindowShape { pass: WindowPass::Max, planes: 2, axes: [axis].into_iter().collect() };
        assert_eq!(window(AXIS).validate(), None);
        assert!(window(SlidingAxis { input: usize::MAX, ..AXIS }).validate().is_some());
    }

    #[test]
    fn pairs_over_padding_are_not_counted() {
        for input in 0..6 {
            for kernel in 0..5 {
                for (stride, dilation, before) in [(1, 1, 1), (2, 1, 0), (1, 3, 2), (3, 2, 4), (2, 2, -1)] {
                    for output in 0..6 {
                        let axis =
                            SlidingAxis { input, output, kernel, stride, dilation, padding_before: before };
                        let pairs = (0..output).flat_map(|o| (0..kernel).map(move |k| (o, k)));
                        let over_input = pairs.filter(|&(o, k)| axis.input_at(o, k).is_some()).count();
                        assert_eq!(axis.pairs_over_input(), over_input as u64, "{axis:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn huge_windows_are_not_counted_one_by_one() {
        let axis = SlidingAxis {
            input: 1 << 40,
            output: 1 << 20,
            kernel: 1 << 30,
            stride: 1,
            dilation: 1,
            padding_before: 0,
        };
        assert_eq!(axis.pairs_over_input(), 1 << 50);
    }
}
