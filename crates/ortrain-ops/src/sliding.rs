//! Common attributes of convolutions and poolings: the sliding of a window along the spatial axes.
//!
//! Sources: ONNX Conv-22, ConvTranspose-22, MaxPool-22, AveragePool-22, LpPool-22. `auto_pad` becomes explicit padding,
//! computed from the sizes of the current run. An odd number of padding elements puts the additional one after the
//! input with `SAME_UPPER`, and before it with `SAME_LOWER`. Dilations affect this padding. `pads` is ignored if
//! `auto_pad` is set, as in ONNX Runtime. With `ceil_mode` the last window may extend beyond the end. It must start
//! inside the input or the padding before it (ONNX since 1.16).

use ortrain_expr::{SlidingAxes, SlidingAxis};
use ortrain_graph::{Attrs, Dim, Shape};

use crate::OpError;

/// Maximum padding at one end of an axis. Windows over padding alone give useless outputs, and their number would grow
/// with the padding.
const MAX_PADDING: i64 = 1 << 24;

/// Source of the padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AutoPad {
    /// The attribute `pads`.
    NotSet,
    /// No padding.
    Valid,
    /// Padding that gives one output for each stride; an odd additional element is after the input.
    SameUpper,
    /// Padding that gives one output for each stride; an odd additional element is before the input.
    SameLower,
}

/// Sliding of a window along the spatial axes, as in the attributes.
#[derive(Clone, Debug)]
pub(crate) struct Sliding {
    /// Attribute `kernel_shape`.
    pub(crate) kernel: Option<Vec<i64>>,
    /// Attribute `strides`; the default is ones.
    pub(crate) strides: Option<Vec<i64>>,
    /// Attribute `dilations`; the default is ones.
    pub(crate) dilations: Option<Vec<i64>>,
    /// Attribute `pads`: before each axis, then after each axis; the default is zeros.
    pub(crate) pads: Option<Vec<i64>>,
    /// Attribute `auto_pad`.
    pub(crate) auto_pad: AutoPad,
    /// Attribute `ceil_mode`.
    pub(crate) ceil: bool,
}

impl Sliding {
    /// Parses the attributes and checks their values. [`Sliding::check`] checks the lengths, once the number of axes is
    /// known.
    ///
    /// # Errors
    /// Returns an error for sizes and steps below 1, negative padding, an unknown `auto_pad`, and attributes of the
    /// wrong kind.
    pub(crate) fn read(attrs: &Attrs) -> Result<Sliding, OpError> {
        let list = |name: &str, min: i64| -> Result<Option<Vec<i64>>, OpError> {
            let Some(values) = attrs.ints(name)? else { return Ok(None) };
            if values.iter().any(|&value| value < min) {
                return Err(OpError::invalid(format!("{name} must be at least {min}, got {values:?}")));
            }
            Ok(Some(values.to_vec()))
        };
        let auto_pad = match attrs.string("auto_pad")?.unwrap_or("NOTSET") {
            "NOTSET" | "" => AutoPad::NotSet,
            "VALID" => AutoPad::Valid,
            "SAME_UPPER" => AutoPad::SameUpper,
            "SAME_LOWER" => AutoPad::SameLower,
            other => {
                return Err(OpError::invalid(format!(
                    "auto_pad must be one of NOTSET, VALID, SAME_UPPER, SAME_LOWER, got {other:?}"
                )));
            }
        };
        Ok(Sliding {
            kernel: list("kernel_shape", 1)?,
            strides: list("strides", 1)?,
            dilations: list("dilations", 1)?,
            pads: list("pads", 0)?,
            auto_pad,
            ceil: attrs.int("ceil_mode")?.unwrap_or(0) != 0,
        })
    }

    /// Checks that every list has the length for the spatial axes of an input of shape `shape`.
    ///
    /// # Errors
    /// Returns an error if there is no spatial axis, or if a list has another length.
    pub(crate) fn check(&self, shape: &Shape) -> Result<(), OpError> {
        let Some(axes) = shape.rank().checked_sub(2).filter(|&axes| axes > 0) else {
            return Err(OpError::invalid(format!(
                "an input has shape {shape}, expected batch, channels and at least one spatial axis"
            )));
        };
        let lists = [
            ("kernel_shape", &self.kernel, axes),
            ("strides", &self.strides, axes),
            ("dilations", &self.dilations, axes),
            ("pads", &self.pads, 2 * axes),
        ];
        for (name, list, needed) in lists {
            if let Some(list) = list.as_ref().filter(|list| list.len() != needed) {
                return Err(OpError::invalid(format!(
                    "{name} {list:?} for an input of shape {shape} must have {needed} elements ({axes} spatial axes)"
                )));
            }
        }
        Ok(())
    }

    /// Returns the stride along spatial axis `k`.
    pub(crate) fn stride(&self, k: usize) -> i64 {
        self.strides.as_ref().map_or(1, |list| list[k])
    }

    /// Returns the dilation along spatial axis `k`.
    pub(crate) fn dilation(&self, k: usize) -> i64 {
        self.dilations.as_ref().map_or(1, |list| list[k])
    }

    /// Returns a number for each of `count` spatial axes.
    pub(crate) fn per_axis(&self, count: usize, of: impl Fn(&Sliding, usize) -> i64) -> Vec<i64> {
        (0..count).map(|k| of(self, k)).collect()
    }

    /// Returns the explicit padding before and after spatial axis `k` of `axes`; zeros if `auto_pad` is set.
    pub(crate) fn padding(&self, k: usize, axes: usize) -> (i64, i64) {
        match (&self.pads, self.auto_pad) {
            (Some(pads), AutoPad::NotSet) => (pads[k], pads[k + axes]),
            _ => (0, 0),
        }
    }

    /// Returns spatial axis `k` of `axes` with all its sizes. The window has `kernel` elements, the input `input`
    /// positions.
    ///
    /// # Errors
    /// Returns an error if the window does not fit the padded input, or if sizes overflow.
    pub(crate) fn axis(
        &self,
        (k, axes): (usize, usize),
        kernel: usize,
        input: usize,
    ) -> Result<SlidingAxis, OpError> {
        // Each is below 2^63, so that the arithmetic does not overflow.
        let (stride, dilation) = (i128::from(self.stride(k)), i128::from(self.dilation(k)));
        let (size, cells) = (input as i128, kernel as i128);
        let (mut before, padding_after) = {
            let (before, padding_after) = self.padding(k, axes);
            (i128::from(before), i128::from(padding_after))
        };
        let reach = (cells - 1) * dilation + 1;
        let output = match self.auto_pad {
            AutoPad::SameUpper | AutoPad::SameLower => {
                let output = (size + stride - 1) / stride;
                let padding = ((output - 1) * stride + reach - size).max(0);
                before = if self.auto_pad == AutoPad::SameUpper { padding / 2 } else { (padding + 1) / 2 };
                output
            }
            AutoPad::NotSet | AutoPad::Valid => {
                let free = size + before + padding_after - reach;
                let mut steps = free.div_euclid(stride);
                if self.ceil && free.rem_euclid(stride) != 0 && (steps + 1) * stride < size + before {
                    steps += 1;
                }
                if steps < 0 {
                    let dilated =
                        if dilation > 1 { format!(", dilated by {dilation},") } else { String::new() };
                    return Err(OpError::invalid(format!(
                        "spatial axis {k}: a window of {kernel}{dilated} does not fit {input} elements with \
                         padding of {before} before and {padding_after} after"
                    )));
                }
                steps + 1
            }
        };
        let extent = output * stride + cells * dilation + before + padding_after + size;
        let (front, back) = self.padding(k, axes);
        if isize::try_from(extent).is_ok() && front.max(back) > MAX_PADDING {
            return Err(OpError::unsupported(format!(
                "spatial axis {k}: {input} elements with padding of {before} before and {padding_after} after are not \
                 supported; the padding is at most {MAX_PADDING} at each end"
            )));
        }
        let to_usize = |value: i128| usize::try_from(value).ok();
        match (isize::try_from(extent).is_ok(), to_usize(output), to_usize(stride), to_usize(dilation)) {
            (true, Some(output), Some(stride), Some(dilation)) => {
                Ok(SlidingAxis { input, output, kernel, stride, dilation, padding_before: before as isize })
            }
            _ => Err(OpError::invalid(format!(
                "spatial axis {k} is too large to count: {input} elements with padding of {before} before and \
                 {padding_after} after, and a window of {kernel} with stride {stride} and dilation {dilation}"
            ))),
        }
    }

    /// Returns all spatial axes with their sizes: windows of `kernel` elements over an input of shape `dims`, which
    /// includes batch and channels. Requires a successful [`Sliding::check`].
    ///
    /// # Errors
    /// Returns the errors of [`Sliding::axis`].
    pub(crate) fn axes(&self, kernel: &[usize], dims: &[usize]) -> Result<SlidingAxes, OpError> {
        let count = kernel.len();
        (0..count).map(|k| self.axis((k, count), kernel[k], dims[k + 2])).collect()
    }

    /// Returns the sizes of the output's spatial axes. `unknown` returns a symbol for an axis (counted with batch and
    /// channels) with an unknown size. A symbolic size is only propagated by windows that preserve every size. Requires
    /// a successful [`Sliding::check`].
    ///
    /// # Errors
    /// Returns the errors of [`Sliding::axis`].
    pub(crate) fn output_sizes(
        &self,
        kernel: &[Dim],
        shape: &Shape,
        unknown: impl Fn(usize) -> Dim,
    ) -> Result<Vec<Dim>, OpError> {
        let count = kernel.len();
        let size = |k: usize| -> Result<Dim, OpError> {
            let dim = &shape[k + 2];
            match (&kernel[k], dim) {
                (Dim::Known(kernel), Dim::Known(input)) => {
                    Ok(Dim::Known(self.axis((k, count), *kernel, *input)?.output))
                }
                (kernel, _) if self.preserves_size(k, count, kernel) => Ok(dim.clone()),
                _ => Ok(unknown(k + 2)),
            }
        };
        (0..count).map(size).collect()
    }

    /// Returns true if the output has the same number of positions along an axis as the input, for every input size.
    fn preserves_size(&self, k: usize, count: usize, kernel: &Dim) -> bool {
        if self.stride(k) != 1 {
            return false;
        }
        match (self.auto_pad, kernel) {
            (AutoPad::SameUpper | AutoPad::SameLower, _) => true,
            (_, Dim::Known(kernel)) => {
                let (before, after) = self.padding(k, count);
                let reach = (*kernel as i128 - 1) * i128::from(self.dilation(k));
                i128::from(before) + i128::from(after) == reach
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ints(name: &str, values: &[i64]) -> Attrs {
        Attrs::new().with(name, values)
    }

    fn axis(attrs: &Attrs, kernel: usize, input: usize) -> Result<SlidingAxis, String> {
        let sliding = Sliding::read(attrs).map_err(|error| error.to_string())?;
        sliding.axis((0, 1), kernel, input).map_err(|error| error.to_string())
    }

    #[test]
    fn same_padding_has_one_output_per_stride() {
        let attrs = ints("strides", &[2]);
        for (mode, before) in [("SAME_UPPER", 0), ("SAME_LOWER", 1)] {
            let result = axis(&attrs.clone().with("auto_pad", mode), 3, 6).expect("it fits");
            assert_eq!((result.output, result.padding_before), (3, before), "{mode}");
        }
        // The dilated window spans five positions.
        let attrs = ints("dilations", &[2]).with("auto_pad", "SAME_UPPER");
        let result = axis(&attrs, 3, 4).expect("it fits");
        assert_eq!((result.output, result.padding_before), (4, 2));
        // A stride longer than the window needs no padding.
        let attrs = ints("strides", &[3]).with("auto_pad", "SAME_LOWER");
        let result = axis(&attrs, 1, 5).expect("it fits");
        assert_eq!((result.output, result.padding_before), (2, 0));
        // Explicit padding is ignored.
        let result = axis(&ints("pads", &[9, 9]).with("auto_pad", "VALID"), 3, 6).expect("it fits");
        assert_eq!((result.output, result.padding_before), (4, 0));
    }

    #[test]
    fn ceil_mode_extends_last_window() {
        for (ceil, pads, input, output) in [
            (0, [0, 0], 4, 1),
            (1, [0, 0], 4, 2),
            (1, [0, 0], 2, 1),
            (0, [1, 1], 4, 2),
            // The window would start in the padding after the input.
            (1, [0, 2], 2, 1),
            (1, [1, 1], 3, 2),
            (0, [1, 1], 3, 2),
        ] {
            let attrs = ints("pads", &pads).with("strides", &[2i64][..]).with("ceil_mode", i64::from(ceil));
            let result = axis(&attrs, 3, input).expect("it fits");
            assert_eq!(result.output, output, "ceil_mode {ceil}, pads {pads:?}, input {input}");
        }
    }

    #[test]
    fn rejects_invalid_attributes() {
        for (attrs, needle) in [
            (ints("strides", &[0]), "strides must be at least 1, got [0]"),
            (ints("strides", &[-2]), "strides must be at least 1, got [-2]"),
            (ints("dilations", &[0]), "dilations must be at least 1, got [0]"),
            (ints("kernel_shape", &[0]), "kernel_shape must be at least 1, got [0]"),
            (ints("pads", &[0, -1]), "pads must be at least 0, got [0, -1]"),
            (Attrs::new().with("auto_pad", "SAME"), "got \"SAME\""),
            (ints("dilations", &[i64::MAX]), "does not fit 4 elements with padding of 0 before and 0 after"),
            (ints("dilations", &[i64::MAX]).with("auto_pad", "SAME_UPPER"), "too large to count"),
            (ints("pads", &[i64::MAX, i64::MAX]), "too large to count"),
        ] {
            let message = axis(&attrs, 5, 4).expect_err("refused");
            assert!(message.contains(needle), "{message}");
        }
        let message = axis(&Attrs::new(), 2, 1).expect_err("refused");
        assert_eq!(
            message,
            "spatial axis 0: a window of 2 does not fit 1 elements with padding of 0 before and 0 after"
        );
    }

    #[test]
    fn checks_list_lengths() {
        let two = Shape::known(&[1, 1, 4, 4]);
        for name in ["kernel_shape", "strides", "dilations", "pads"] {
            let sliding = Sliding::read(&ints(name, &[1])).expect("right values");
            let message = sliding.check(&two).expect_err("one is too few").to_string();
            assert!(
                message.starts_with(&format!("{name} [1] for an input of shape [1, 1, 4, 4]")),
                "{message}"
            );
        }
        let sliding = Sliding::read(&Attrs::new()).expect("nothing is wrong");
        sliding.check(&two).expect("two spatial axes");
        sliding.check(&Shape::known(&[1, 4])).expect_err("no spatial axis");
    }

    #[test]
    fn symbolic_sizes() {
        let shape: Shape =
            [Dim::symbol("N"), Dim::Known(3), Dim::symbol("H"), Dim::Known(5)].into_iter().collect();
        let outputs = |attrs: Attrs, kernel: usize| {
            let sliding = Sliding::read(&attrs).expect("right values");
            let kernel = [Dim::Known(kernel), Dim::Known(kernel)];
            sliding.output_sizes(&kernel, &shape, |axis| Dim::symbol(&format!("?{axis}"))).expect("it fits")
        };
        assert_eq!(outputs(ints("pads", &[1, 0, 1, 0]), 3), [Dim::symbol("H"), Dim::Known(3)]);
        assert_eq!(outputs(Attrs::new(), 3), [Dim::symbol("?2"), Dim::Known(3)]);
        let same = Attrs::new().with("auto_pad", "SAME_UPPER");
        assert_eq!(outputs(same.clone(), 2), [Dim::symbol("H"), Dim::Known(5)]);
        assert_eq!(outputs(same.with("strides", &[2i64, 2][..]), 2), [Dim::symbol("?2"), Dim::Known(3)]);
    }
}
