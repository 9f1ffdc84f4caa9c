//! Shared code of convolution, transposed convolution and their gradients: shape checks, instructions, and gradients in
//! plain ONNX.

use ortrain_expr::{ConvPass, ConvShape, ReduceOp, SlidingAxes};
use ortrain_graph::{Attrs, DType, Dim, Node, Shape, ValueId};
use ortrain_program::BufferId;

use crate::OpError;
use crate::infer::Infer;
use crate::lower::Lower;
use crate::rewrite::Rewrite;
use crate::sliding::{AutoPad, Sliding};

/// Reads the attribute `group`.
pub(crate) fn read_groups(attrs: &Attrs) -> Result<usize, OpError> {
    let groups = attrs.int("group")?.unwrap_or(1);
    usize::try_from(groups)
        .ok()
        .filter(|&groups| groups > 0)
        .ok_or_else(|| OpError::invalid(format!("group must be at least 1, got {groups}")))
}

/// Checks that image (or features) `x` and filter `w` have the same number of axes, and returns this number.
pub(crate) fn common_rank(cx: &Infer<'_>, x: usize, w: usize) -> Result<Option<usize>, OpError> {
    match (cx.shape(x), cx.shape(w)) {
        (Some(x), Some(w)) if x.rank() != w.rank() => Err(OpError::invalid(format!(
            "an input of shape {x} and a filter of shape {w} must have the same number of axes"
        ))),
        (x, w) => Ok(x.or(w).map(Shape::rank)),
    }
}

/// Returns the kernel sizes of a filter of shape `filter` along the spatial axes, as far as they are known.
pub(crate) fn kernel_dims(
    sliding: &Sliding,
    filter: Option<&Shape>,
    rank: usize,
) -> Result<Vec<Dim>, OpError> {
    let axis_size = |k: usize| -> Result<Dim, OpError> {
        let declared = sliding.kernel.as_ref().and_then(|kernel| usize::try_from(*kernel.get(k)?).ok());
        let actual = filter.map(|filter| &filter[k + 2]);
        match (declared, actual, filter) {
            (_, Some(Dim::Known(0)), Some(filter)) => {
                Err(OpError::invalid(format!("a filter of shape {filter} has no cells")))
            }
            (Some(size), Some(Dim::Known(found)), Some(filter)) if size != *found => {
                let kernel = sliding.kernel.as_deref().unwrap_or_default();
                Err(OpError::invalid(format!(
                    "kernel_shape {kernel:?} does not match a filter of shape {filter}"
                )))
            }
            (Some(size), ..) => Ok(Dim::Known(size)),
            (None, Some(dim), _) => Ok(dim.clone()),
            (None, None, _) => Ok(Dim::symbol("?")),
        }
    };
    let kernel: Vec<Dim> = (0..rank.saturating_sub(2)).map(axis_size).collect::<Result<_, _>>()?;
    let cells = kernel.iter().filter_map(Dim::known).fold(1, usize::saturating_mul);
    if cells > MAX_KERNEL_CELLS {
        let shape = kernel.iter().cloned().collect::<Shape>();
        return Err(OpError::unsupported(format!(
            "a filter has {cells} cells for each channel, {shape}; at most {MAX_KERNEL_CELLS} are supported"
        )));
    }
    Ok(kernel)
}

/// Maximum number of cells of a filter per channel. Kernels keep tables of the cells.
pub(crate) const MAX_KERNEL_CELLS: usize = 1 << 20;

/// Checks that a bias, input `k`, has `channels` elements.
pub(crate) fn check_bias(cx: &Infer<'_>, k: usize, channels: &Dim) -> Result<(), OpError> {
    let Some(bias) = cx.shape(k) else { return Ok(()) };
    let fits = match &bias[..] {
        [size] => size.known().zip(channels.known()).is_none_or(|(size, channels)| size == channels),
        _ => false,
    };
    if fits {
        return Ok(());
    }
    Err(OpError::invalid(format!("the bias has shape {bias}, but the result has {channels} channels")))
}

/// Sets the types of outputs 0 to 2: the gradients of input 1, of the filter (input 2) and of the bias. Input 0 is the
/// gradient of the result, which has shape `result`.
pub(crate) fn infer_gradients(
    cx: &mut Infer<'_>,
    dtype: DType,
    result: Option<&Shape>,
) -> Result<(), OpError> {
    let gradient = cx.shape(0);
    if let (Some(gradient), Some(result)) = (gradient, result) {
        let differ = |(a, b): (&Dim, &Dim)| matches!((a.known(), b.known()), (Some(a), Some(b)) if a != b);
        if gradient.rank() != result.rank() || gradient.iter().zip(result.iter()).any(differ) {
            let message = format!("the gradient has shape {gradient}, but the result has shape {result}");
            return Err(OpError::invalid(message));
        }
    }
    let channels = result.or(gradient).and_then(|shape| shape.get(1).cloned());
    let channels = channels.unwrap_or_else(|| cx.unknown_dim(2, 0));
    cx.set_output(0, dtype, cx.shape(1).cloned());
    cx.set_output(1, dtype, cx.shape(2).cloned());
    cx.set_output(2, dtype, Some([channels].into_iter().collect()));
    Ok(())
}

/// Emits a convolution with an optional bias per channel. Its result is output `k`.
pub(crate) fn emit_conv(
    cx: &mut Lower<'_>,
    k: usize,
    shape: ConvShape,
    a: BufferId,
    b: BufferId,
    bias: Option<BufferId>,
) -> Result<(), OpError> {
    let [a_dims, b_dims, dims] = shape.operands();
    let dtype = cx.out_dtype(k);
    let accumulated = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let output = cx.output(k);
    let mut nest = cx.nest(&dims, 0);
    let mut value = nest.accumulator(accumulated);
    if let Some(bias) = bias {
        let mut per_channel = vec![1; dims.len() - 1];
        per_channel[0] = dims[1];
        let bias = nest.load_broadcast(bias, dtype, &per_channel);
        value = nest.b.add(value, bias);
    }
    nest.store_contiguous(cx, output, value);
    cx.emit(nest.conv(shape, cx.operand(a, &a_dims), cx.operand(b, &b_dims)))
}

/// Emits the sum of input `from` over all axes except the channels, as output `k`.
pub(crate) fn emit_channel_sums(cx: &mut Lower<'_>, k: usize, from: usize) -> Result<(), OpError> {
    let dims = cx.dims(from);
    let space: usize = dims[2..].iter().product();
    let (input, output) = (cx.input(from), cx.output(k));
    let mut nest = cx.nest(&[dims[1], dims[0], space], 2);
    let strides = [space as isize, (dims[1] * space) as isize, 1];
    let value = nest.load_strided(cx, input, 0, &strides);
    let sum = nest.reduce(ReduceOp::Sum, value);
    nest.store_outer(cx, output, sum);
    cx.emit(nest.instruction())
}

/// Returns the description of a convolution of `batch` images with a filter of shape `filter`.
pub(crate) fn conv_shape(
    pass: ConvPass,
    batch: usize,
    groups: usize,
    filter: &[usize],
    axes: SlidingAxes,
) -> ConvShape {
    ConvShape { pass, batch, groups, channels_in: filter[1], channels_out: filter[0] / groups, axes }
}

/// Sliding window along one axis, with explicit padding.
#[derive(Clone, Debug)]
pub(crate) struct SlidingWindow {
    pub(crate) stride: i64,
    pub(crate) dilation: i64,
    pub(crate) before: i64,
    pub(crate) after: i64,
}

/// Returns the attributes of a convolution with explicit padding.
pub(crate) fn explicit_attrs(groups: usize, windows: &[SlidingWindow]) -> Attrs {
    let list = |value: fn(&SlidingWindow) -> i64| windows.iter().map(value).collect::<Vec<i64>>();
    Attrs::new()
        .with("group", groups as i64)
        .with("strides", list(|window| window.stride))
        .with("dilations", list(|window| window.dilation))
        .with("pads", pads_attr(windows))
}

/// Returns the attribute `pads`: the padding before each axis, then the padding after each axis.
pub(crate) fn pads_attr(windows: &[SlidingWindow]) -> Vec<i64> {
    let before = windows.iter().map(|window| window.before);
    before.chain(windows.iter().map(|window| window.after)).collect()
}
/// Returns a shape, as a value: the leading sizes `lead`, then the spatial sizes of `value`. At most one leading size
/// may be -1.
pub(crate) fn shape_with_leading_axes(rw: &mut Rewrite<'_>, value: ValueId, lead: &[i64]) -> ValueId {
    let size = |dim: &Dim| dim.known().map(|size| size as i64);
    let space = rw.shape(value).and_then(|shape| shape[2..].iter().map(size).collect::<Option<Vec<i64>>>());
    if let Some(space) = space {
        return rw.ints("shape", &[lead, &space].concat());
    }
    let space = spatial_sizes(rw, value);
    let lead = rw.ints("lead", lead);
    rw.add("Concat", &[lead, space], Attrs::new().with("axis", 0i64))
}

/// Returns the sizes of a value's spatial axes, as a value.
pub(crate) fn spatial_sizes(rw: &mut Rewrite<'_>, value: ValueId) -> ValueId {
    let full_shape = rw.add("Shape", &[value], Attrs::new());
    let (start, end) = (rw.ints("start", &[2]), rw.ints("end", &[i64::MAX]));
    rw.add("Slice", &[full_shape, start, end], Attrs::new())
}

/// Crops the `count` spatial axes of a value to the first `sizes` elements.
pub(crate) fn crop_spatial(rw: &mut Rewrite<'_>, value: ValueId, sizes: ValueId, count: usize) -> ValueId {
    let starts = rw.ints("starts", &vec![0; count]);
    let axes: Vec<i64> = (2..count as i64 + 2).collect();
    let axes = rw.ints("axes", &axes);
    rw.add("Slice", &[value, starts, sizes, axes], Attrs::new())
}

/// Swaps the first two axes of a value.
pub(crate) fn swap_leading_axes(rw: &mut Rewrite<'_>, value: ValueId, rank: usize) -> ValueId {
    let mut perm: Vec<i64> = (0..rank as i64).collect();
    perm.swap(0, 1);
    rw.add("Transpose", &[value], Attrs::new().with("perm", perm))
}

/// Sums a gradient per channel, in plain ONNX: over all axes except axis 1.
pub(crate) fn sum_over_channels(rw: &mut Rewrite<'_>, gradient: ValueId, rank: usize) -> ValueId {
    let axes: Vec<i64> = (0..rank as i64).filter(|&axis| axis != 1).collect();
    let axes = rw.ints("axes", &axes);
    rw.add("ReduceSum", &[gradient, axes], Attrs::new().with("keepdims", 0i64))
}

/// Computes the gradient of a filter in plain ONNX: a convolution of the image with `dy`, the gradient of the result,
/// as its filter.
///
/// Batch and channels are swapped, and so are strides and dilations. The number of groups is the same: each group has
/// one channel for each image. If the windows do not reach the end of the image, the result is larger than the kernel
/// and is cropped.
pub(crate) fn filter_gradient(
    rw: &mut Rewrite<'_>,
    (dy, x): (ValueId, ValueId),
    filter: &Shape,
    groups: usize,
    windows: &[SlidingWindow],
) -> Result<ValueId, OpError> {
    let kernel =
        filter[2..].iter().map(|dim| dim.known().map(|size| size as i64)).collect::<Option<Vec<i64>>>();
    let (Some(kernel), Some(group_channels)) = (kernel, filter[1].known()) else {
        return Err(OpError::unsupported(
            "to write the gradient of a filter in plain ONNX, the filter's sizes must be known",
        ));
    };
    let (rank, count) = (filter.rank(), windows.len());
    let batch_of_channels = if groups == 1 {
        swap_leading_axes(rw, x, rank)
    } else {
        let (groups, channels_per_group) = (groups as i64, group_channels as i64);
        // Known sizes replace -1, which is ambiguous for an empty image.
        let batch = [x, dy].into_iter().find_map(|value| rw.shape(value)?[0].known());
        let batch = batch.map_or(-1, |batch| batch as i64);
        let channels = if batch < 0 { -1 } else { groups * batch };
        let exact = if batch < 0 { Attrs::new() } else { Attrs::new().with("allowzero", 1i64) };
        let split_shape = shape_with_leading_axes(rw, x, &[batch, groups, channels_per_group]);
        let split = rw.add("Reshape", &[x, split_shape], exact.clone());
        let mut perm: Vec<i64> = (0..=rank as i64).collect();
        perm.swap(0, 2);
        let transposed = rw.add("Transpose", &[split], Attrs::new().with("perm", perm));
        let together = shape_with_leading_axes(rw, x, &[channels_per_group, channels]);
        rw.add("Reshape", &[transposed, together], exact)
    };
    let filters = swap_leading_axes(rw, dy, rank);
    let swapped_windows: Vec<SlidingWindow> = windows
        .iter()
        .map(|window| SlidingWindow { stride: window.dilation, dilation: window.stride, ..window.clone() })
        .collect();
    let attrs = explicit_attrs(groups, &swapped_windows);
    let sums = rw.add("Conv", &[batch_of_channels, filters], attrs);
    let kernel = rw.ints("kernel", &kernel);
    let cells = crop_spatial(rw, sums, kernel, count);
    Ok(swap_leading_axes(rw, cells, rank))
}

/// Computes the gradient of an image in plain ONNX: a transposed convolution. Positions after the last window get
/// zeros.
pub(crate) fn image_gradient(
    rw: &mut Rewrite<'_>,
    (dy, x, w): (ValueId, ValueId, ValueId),
    kernel: &[Dim],
    groups: usize,
    windows: &[SlidingWindow],
) -> ValueId {
    let image = rw.shape(x).cloned();
    // Number of positions after the last window. If it is unknown, the largest possible number is used and the result
    // is cropped.
    let mut certain = true;
    let mut left_over = |k: usize| {
        let SlidingWindow { stride, dilation, before, after } = windows[k];
        match (image.as_ref().and_then(|image| image[k + 2].known()), kernel[k].known()) {
            _ if stride == 1 => 0,
            (Some(size), Some(cells)) => {
                (size as i64 + before + after - (cells as i64 - 1) * dilation - 1) % stride
            }
            _ => {
                certain = false;
                stride - 1
            }
        }
    };
    let left_over: Vec<i64> = (0..windows.len()).map(&mut left_over).collect();
    let attrs = explicit_attrs(groups, windows).with("output_padding", left_over);
    let gradient = rw.add("ConvTranspose", &[dy, w], attrs);
    if certain {
        return gradient;
    }
    let sizes = spatial_sizes(rw, x);
    crop_spatial(rw, gradient, sizes, windows.len())
}

/// Convolution. Inputs: image `[N, G * C, ..]`, filter `[G * M, C, ..]` and an optional bias `[G * M]`. Result:
/// `[N, G * M, ..]`.
pub(crate) struct Conv {
    pub(crate) sliding: Sliding,
    pub(crate) groups: usize,
}

impl Conv {
    pub(crate) fn read(node: &Node) -> Result<Conv, OpError> {
        Ok(Conv { sliding: Sliding::read(&node.attrs)?, groups: read_groups(&node.attrs)? })
    }

    /// Returns the shape of the result for image `x` and filter `w`; `None` if its rank is unknown.
    pub(crate) fn result_shape(&self, cx: &Infer<'_>, x: usize, w: usize) -> Result<Option<Shape>, OpError> {
        let Some(rank) = common_rank(cx, x, w)? else { return Ok(None) };
        self.shape_of_known(cx, rank, cx.shape(x), cx.shape(w)).map(Some)
    }

    /// Returns the shape of the result for shapes of image and filter.
    pub(crate) fn shape_of_result(
        &self,
        cx: &Infer<'_>,
        image: &Shape,
        filter: &Shape,
    ) -> Result<Shape, OpError> {
        self.shape_of_known(cx, image.rank(), Some(image), Some(filter))
    }

    /// Returns the shape of the result if image or filter has a known shape.
    fn shape_of_known(
        &self,
        cx: &Infer<'_>,
        rank: usize,
        image: Option<&Shape>,
        filter: Option<&Shape>,
    ) -> Result<Shape, OpError> {
        self.sliding.check(image.or(filter).expect("the image or the filter has a shape"))?;
        let kernel = kernel_dims(&self.sliding, filter, rank)?;
        let groups = self.groups;
        if let Some(filter) = filter {
            if filter[0].known().is_some_and(|count| count % groups != 0) {
                return Err(OpError::invalid(format!(
                    "a filter of shape {filter}: {} result channels cannot be divided into {groups} groups",
                    filter[0]
                )));
            }
            if let (Some(image), Some(group_channels)) = (image, filter[1].known())
                && let Some(channels) = image[1].known()
                && group_channels.checked_mul(groups) != Some(channels)
            {
                return Err(OpError::invalid(format!(
                    "an image of shape {image} has {channels} channels, but a filter of shape {filter} takes {group_channels} in \
                     each of {groups} group{}",
                    if groups == 1 { "" } else { "s" }
                )));
            }
        }
        let unknown = |axis: usize| cx.unknown_dim(0, axis);
        let mut dims = vec![
            image.map_or_else(|| unknown(0), |image| image[0].clone()),
            filter.map_or_else(|| unknown(1), |filter| filter[0].clone()),
        ];
        match image {
            Some(image) => dims.extend(self.sliding.output_sizes(&kernel, image, unknown)?),
            None => dims.extend((2..rank).map(unknown)),
        }
        Ok(dims.into_iter().collect())
    }

    /// Returns the type and shape of the result. The first inputs are image, filter and an optional bias.
    pub(crate) fn infer_result(&self, cx: &Infer<'_>) -> Result<(DType, Option<Shape>), OpError> {
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype([0, 1, 2])?;
        let shape = self.result_shape(cx, 0, 1)?;
        if let Some(shape) = &shape {
            check_bias(cx, 2, &shape[1])?;
        }
        Ok((dtype, shape))
    }

    /// Returns the window of each axis with explicit padding. `None` if `auto_pad` needs sizes that are unknown.
    pub(crate) fn explicit_windows(
        &self,
        image: Option<&Shape>,
        kernel: &[Dim],
    ) -> Option<Vec<SlidingWindow>> {
        let count = kernel.len();
        let window = |k: usize| {
            let (stride, dilation) = (self.sliding.stride(k), self.sliding.dilation(k));
            let (before, end) = match self.sliding.auto_pad {
                AutoPad::NotSet | AutoPad::Valid => self.sliding.padding(k, count),
                AutoPad::SameUpper | AutoPad::SameLower => {
                    let cells = kernel[k].known()?;
                    // With stride 1 the padding is the same for every size.
                    let size = match image.and_then(|image| image[k + 2].known()) {
                        Some(size) => size,
                        None if stride == 1 => cells,
                        None => return None,
                    };
                    let axis = self.sliding.axis((k, count), cells, size).ok()?;
                    let used_len =
                        axis.output.checked_sub(1)? * axis.stride + (cells - 1) * axis.dilation + 1;
                    let padding = used_len.saturating_sub(size) as i64;
                    (axis.padding_before as i64, padding - axis.padding_before as i64)
                }
            };
            Some(SlidingWindow { stride, dilation, before, after: end })
        };
        (0..count).map(window).collect()
    }

    /// Returns the attributes, with explicit padding if it can be computed.
    pub(crate) fn explicit_padding_attrs(
        &self,
        attrs: &Attrs,
        image: Option<&Shape>,
        filter: Option<&Shape>,
    ) -> Result<Attrs, OpError> {
        let Some(rank) = image.or(filter).map(Shape::rank) else { return Ok(attrs.clone()) };
        if self.sliding.auto_pad == AutoPad::NotSet {
            return Ok(attrs.clone());
        }
        let kernel = kernel_dims(&self.sliding, filter, rank)?;
        let Some(windows) = self.explicit_windows(image, &kernel) else { return Ok(attrs.clone()) };
        Ok(attrs.clone().with("auto_pad", "NOTSET").with("pads", pads_attr(&windows)))
    }

    /// Returns the sizes of a convolution of an image and a filter of these shapes.
    pub(crate) fn shape(
        &self,
        pass: ConvPass,
        image: &[usize],
        filter: &[usize],
    ) -> Result<ConvShape, OpError> {
        let axes = self.sliding.axes(&filter[2..], image)?;
        Ok(conv_shape(pass, image[0], self.groups, filter, axes))
    }
}
