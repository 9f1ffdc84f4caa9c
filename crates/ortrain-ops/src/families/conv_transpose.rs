//! Transposed convolution and its gradients.
//!
//! Sources: ONNX ConvTranspose-1, 11, 22 (the versions differ only in element types) and `ConvTransposeGrad` of
//! `com.microsoft`. The latter is read but not written, because ONNX Runtime has no CPU kernel for it. The gradient of
//! the input is a convolution of the gradient of the result. The gradient of the filter is the filter gradient of this
//! convolution.
//!
//! The result has the size of an image that a convolution with the same attributes would map to the input. Padding is
//! removed from its ends, and `output_padding` extends its end. With `output_shape`, or with `auto_pad`
//! (`input * stride` positions), the padding follows from the size. If the padding is odd, the extra position is
//! removed from the end for `SAME_UPPER`, and from the start otherwise. ONNX Runtime does the same; the standard's
//! formulas contradict its text here. If the requested size is larger than the result, zeros are appended.

use ortrain_expr::{ConvPass, ConvShape, SlidingAxes, SlidingAxis};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape};

use crate::OpError;
use crate::class::Class;
use crate::grad::Grad;
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sliding::{AutoPad, Sliding};
use crate::support::convolution::{
    SlidingWindow, check_bias, common_rank, conv_shape, emit_channel_sums, emit_conv, explicit_attrs,
    filter_gradient, infer_gradients, kernel_dims, read_groups, sum_over_channels,
};

/// Transposed convolution. Inputs: features `[N, G * M, ..]`, filter `[G * M, C, ..]` and an optional bias `[G * C]`.
/// The result is an image `[N, G * C, ..]`.
struct ConvTranspose {
    sliding: Sliding,
    groups: usize,
    output_padding: Option<Vec<i64>>,
    output_shape: Option<Vec<i64>>,
}

/// Gradients of a transposed convolution. Inputs: gradient of the result, features and filter. Outputs: gradients of
/// features, filter and bias.
struct ConvTransposeGrad(ConvTranspose);

/// Size of one spatial axis of a transposed convolution.
struct Extent {
    /// Number of positions of the result, if known.
    size: Option<i128>,
    /// Numbers of positions removed from the start and the end.
    before: i128,
    after: i128,
    /// Number of positions at the end, before any are removed, that no window reaches.
    untouched: i128,
}

/// Convolution that is the adjoint of a transposed convolution: the transposed convolution is its image gradient.
struct Adjoint {
    windows: Vec<SlidingWindow>,
    /// Number of positions at the end of each axis of the image that must be removed before the convolution.
    trimmed: Vec<i64>,
}

impl ConvTranspose {
    fn read(node: &Node) -> Result<ConvTranspose, OpError> {
        let list = |name: &str, min: i64| -> Result<Option<Vec<i64>>, OpError> {
            let Some(values) = node.attrs.ints(name)? else { return Ok(None) };
            if values.iter().any(|&value| value < min) {
                return Err(OpError::invalid(format!("{name} must be at least {min}, got {values:?}")));
            }
            Ok(Some(values.to_vec()))
        };
        Ok(ConvTranspose {
            sliding: Sliding::read(&node.attrs)?,
            groups: read_groups(&node.attrs)?,
            output_padding: list("output_padding", 0)?,
            output_shape: list("output_shape", 1)?,
        })
    }

    /// Checks the lengths of the attribute lists for an input of this shape.
    fn check(&self, shape: &Shape) -> Result<(), OpError> {
        self.sliding.check(shape)?;
        let axes = shape.rank() - 2;
        for (name, list) in [("output_padding", &self.output_padding), ("output_shape", &self.output_shape)] {
            if let Some(list) = list.as_ref().filter(|list| list.len() != axes) {
                return Err(OpError::invalid(format!(
                    "{name} must have {axes} elements for an input of shape {shape}, got {list:?}"
                )));
            }
        }
        Ok(())
    }

    /// Returns the size of spatial axis `k` of `axes`, for windows of `kernel` cells at `input` positions. `None` if
    /// the padding depends on the number of positions and this number is unknown.
    fn extent(&self, (k, axes): (usize, usize), kernel: usize, input: Option<usize>) -> Option<Extent> {
        // Each number is below 2^63, so nothing overflows here.
        let (stride, dilation) = (i128::from(self.sliding.stride(k)), i128::from(self.sliding.dilation(k)));
        let extra = self.output_padding.as_ref().map_or(0, |list| i128::from(list[k]));
        let reach = (kernel as i128 - 1) * dilation + 1;
        let input = input.map(|input| input as i128);
        let natural = |input: i128| (input - 1) * stride + reach + extra;
        let requested = self.output_shape.as_ref().map(|list| i128::from(list[k]));
        let is_same = matches!(self.sliding.auto_pad, AutoPad::SameUpper | AutoPad::SameLower);
        // Natural size minus the requested size.
        let excess = match requested {
            Some(size) => natural(input?) - size,
            None if is_same => reach + extra - stride,
            None => {
                let (before, end) = self.sliding.padding(k, axes);
                let (before, wide_end) = (i128::from(before), i128::from(end));
                let size = input.map(|input| natural(input) - before - wide_end);
                return Some(Extent { size, before, after: wide_end, untouched: extra });
            }
        };
        let total_padding = excess.max(0);
        let upper = self.sliding.auto_pad == AutoPad::SameUpper;
        let before = if upper { total_padding / 2 } else { total_padding - total_padding / 2 };
        let size = requested.or(input.map(|input| input * stride));
        Some(Extent {
            size,
            before,
            after: total_padding - before,
            untouched: extra + total_padding - excess,
        })
    }

    /// Returns the size of the result along an axis.
    fn size(&self, (k, axes): (usize, usize), kernel: usize, input: usize) -> Result<usize, OpError> {
        if input == 0 {
            return Err(OpError::invalid(format!("spatial axis {k} of the input is empty")));
        }
        let extent = self.extent((k, axes), kernel, Some(input)).expect("the size is known");
        let size = extent.size.expect("the size is known");
        match usize::try_from(size) {
            Ok(size) if size > 0 && isize::try_from(size).is_ok() => Ok(size),
            _ if size > 0 => Err(OpError::invalid(format!(
                "the result has {size} elements along spatial axis {k}, which cannot be addressed"
            ))),
            _ => Err(OpError::invalid(format!(
                "the result is empty along spatial axis {k}: windows of size {kernel} at {input} positions cover {} \
                 elements; padding removes {} at the start and {} at the end",
                size + extent.before + extent.after,
                extent.before,
                extent.after
            ))),
        }
    }

    /// Returns the spatial axes of the adjoint convolution.
    fn axes(&self, kernel: &[usize], features: &[usize]) -> Result<SlidingAxes, OpError> {
        let count = kernel.len();
        let axis = |k: usize| {
            let (cells, output) = (kernel[k], features[k + 2]);
            let input = self.size((k, count), cells, output)?;
            let before = self.extent((k, count), cells, Some(output)).expect("the size is known").before;
            let (stride, dilation) = (self.sliding.stride(k), self.sliding.dilation(k));
            let farthest =
                output as i128 * i128::from(stride) + cells as i128 * i128::from(dilation) + before;
            if isize::try_from(farthest + input as i128).is_err() {
                return Err(OpError::invalid(format!(
                    "spatial axis {k} of size {output} is too large to count with a window of size {cells}, stride \
                     {stride} and dilation {dilation}"
                )));
            }
            let (stride, dilation) = (stride as usize, dilation as usize);
            Ok(SlidingAxis {
                input,
                output,
                kernel: cells,
                stride,
                dilation,
                padding_before: before as isize,
            })
        };
        (0..count).map(axis).collect()
    }

    fn shape(&self, pass: ConvPass, features: &[usize], filter: &[usize]) -> Result<ConvShape, OpError> {
        let axes = self.axes(&filter[2..], features)?;
        Ok(conv_shape(pass, features[0], self.groups, filter, axes))
    }

    /// Returns the shape of the result for features `x` and filter `w`; `None` if its rank is unknown.
    fn result_shape(&self, cx: &Infer<'_>, x: usize, w: usize) -> Result<Option<Shape>, OpError> {
        let Some(rank) = common_rank(cx, x, w)? else { return Ok(None) };
        let (features, filter) = (cx.shape(x), cx.shape(w));
        self.check(features.or(filter).expect("the features or the filter have a shape"))?;
        let kernel = kernel_dims(&self.sliding, filter, rank)?;
        let groups = self.groups;
        let unknown = |axis: usize| cx.unknown_dim(0, axis);
        let mut channels = unknown(1);
        if let Some(filter) = filter {
            if let Some(features) = features
                && features[1].known().zip(filter[0].known()).is_some_and(|(actual, needed)| actual != needed)
            {
                return Err(OpError::invalid(format!(
                    "an input of shape {features} has {} channels, but a filter of shape {filter} takes {}",
                    features[1], filter[0]
                )));
            }
            if filter[0].known().is_some_and(|count| count % groups != 0) {
                return Err(OpError::invalid(format!(
                    "a filter of shape {filter}: {} input channels cannot be divided into {groups} groups",
                    filter[0]
                )));
            }
            match filter[1].known().map(|group_channels| group_channels.checked_mul(groups)) {
                Some(Some(count)) => channels = Dim::Known(count),
                Some(None) => {
                    return Err(OpError::invalid(format!(
                        "{groups} groups of {} channels are too many",
                        filter[1]
                    )));
                }
                None if groups == 1 => channels = filter[1].clone(),
                None => {}
            }
        }
        let mut dims = vec![features.map_or_else(|| unknown(0), |features| features[0].clone()), channels];
        for (k, cells) in kernel.iter().enumerate() {
            let axes = kernel.len();
            let requested = self.output_shape.as_ref().and_then(|list| usize::try_from(list[k]).ok());
            dims.push(match (features.map(|features| &features[k + 2]), cells) {
                (Some(Dim::Known(input)), Dim::Known(cells)) => {
                    Dim::Known(self.size((k, axes), *cells, *input)?)
                }
                (Some(input), _) if requested.is_none() && self.keeps_size((k, axes), cells) => input.clone(),
                _ => requested.map_or_else(|| unknown(k + 2), Dim::Known),
            });
        }
        Ok(Some(dims.into_iter().collect()))
    }

    /// Returns true if the result has the same size as the input along an axis, for every input size.
    fn keeps_size(&self, (k, axes): (usize, usize), cells: &Dim) -> bool {
        if self.sliding.stride(k) != 1 {
            return false;
        }
        // With stride 1 the difference of the two sizes is constant.
        match (self.sliding.auto_pad, cells.known()) {
            (AutoPad::SameUpper | AutoPad::SameLower, _) => true,
            (_, Some(cells)) => {
                self.extent((k, axes), cells, Some(1)).is_some_and(|extent| extent.size == Some(1))
            }
            (_, None) => false,
        }
    }

    /// Returns the convolution that computes the gradient of the features from the gradient of the result.
    fn adjoint(&self, features: Option<&Shape>, kernel: &[Dim]) -> Result<Adjoint, OpError> {
        let count = kernel.len();
        let mut adjoint = Adjoint { windows: Vec::with_capacity(count), trimmed: Vec::with_capacity(count) };
        for (k, cells) in kernel.iter().enumerate() {
            let input = features.and_then(|features| features[k + 2].known());
            let extent = cells.known().and_then(|cells| self.extent((k, count), cells, input)).ok_or_else(|| {
                OpError::unsupported(format!(
                    "the padding along spatial axis {k} depends on unknown sizes; declare them in the model or set pads"
                ))
            })?;
            let (stride, dilation) = (self.sliding.stride(k), self.sliding.dilation(k));
            // Untouched positions of a full stride would become additional positions of the features. They are
            // excluded.
            let spare = extent.untouched - extent.untouched % i128::from(stride);
            let end_padding = extent.after - spare;
            let checked = |value: i128| {
                i64::try_from(value)
                    .map_err(|_| OpError::invalid(format!("the padding {value} is too large")))
            };
            let (before, left_out) = (checked(extent.before)?, checked((-end_padding).max(0))?);
            let end = checked(end_padding.max(0))?;
            adjoint.windows.push(SlidingWindow { stride, dilation, before, after: end });
            adjoint.trimmed.push(left_out);
        }
        Ok(adjoint)
    }
}

impl Adjoint {
    /// Returns ends and axes of a slice that removes the positions that the convolution must not see. `None` if there
    /// are no such positions.
    fn slice(&self) -> Option<(Vec<i64>, Vec<i64>)> {
        let trimmed_axes: Vec<(usize, &i64)> =
            self.trimmed.iter().enumerate().filter(|(_, count)| **count > 0).collect();
        let axes: Vec<i64> = trimmed_axes.iter().map(|(k, _)| *k as i64 + 2).collect();
        (!trimmed_axes.is_empty()).then(|| (trimmed_axes.iter().map(|(_, count)| -**count).collect(), axes))
    }
}

impl Op for ConvTranspose {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 3, 1)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype([0, 1, 2])?;
        let shape = self.result_shape(cx, 0, 1)?;
        if let Some(shape) = &shape {
            check_bias(cx, 2, &shape[1])?;
        }
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(mut g) = cx.output_grad(0) else { return Ok(()) };
        let (x, w) = (cx.input(0)?, cx.input(1)?);
        let Some(rank) = cx.shape(x).or(cx.shape(w)).map(Shape::rank) else {
            return Err(OpError::unsupported("the rank of the input must be known"));
        };
        if cx.needs_grad(2) {
            let axes: Vec<i64> = (0..rank as i64).filter(|&axis| axis != 1).collect();
            let axes = cx.ints("axes", &axes);
            let gradient = cx.add("ReduceSum", &[g, axes], Attrs::new().with("keepdims", 0i64));
            cx.set_grad(2, gradient);
        }
        if !cx.needs_grad(0) && !cx.needs_grad(1) {
            return Ok(());
        }
        let kernel = kernel_dims(&self.sliding, cx.shape(w), rank)?;
        let adjoint = self.adjoint(cx.shape(x), &kernel)?;
        if let Some((ends, axes)) = adjoint.slice() {
            let starts = cx.ints("starts", &vec![0; ends.len()]);
            let (ends, axes) = (cx.ints("ends", &ends), cx.ints("axes", &axes));
            g = cx.add("Slice", &[g, starts, ends, axes], Attrs::new());
        }
        let attrs = explicit_attrs(self.groups, &adjoint.windows);
        if cx.needs_grad(0) {
            let gradient = cx.add("Conv", &[g, w], attrs.clone());
            cx.set_grad(0, gradient);
        }
        if cx.needs_grad(1) {
            // Features and image are swapped.
            let outputs = cx.add_node_with_optional_outputs(
                "com.microsoft",
                "ConvGrad",
                &[x, g, w].map(Some),
                &[false, true],
                attrs,
            );
            cx.set_grad(1, outputs[1].expect("the output was requested"));
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let shape = self.shape(ConvPass::InputGradient, &cx.dims(0), &cx.dims(1))?;
        let (features, filter) = (cx.input(0), cx.input(1));
        let bias = cx.has_input(2).then(|| cx.input(2));
        emit_conv(cx, 0, shape, features, filter, bias)
    }
}

impl Op for ConvTransposeGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 3, 3)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype([0, 1, 2])?;
        let result = self.0.result_shape(cx, 1, 2)?;
        infer_gradients(cx, dtype, result.as_ref())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (features, filter) = (cx.dims(1), cx.dims(2));
        let [dy, x, w] = [0, 1, 2].map(|k| cx.input(k));
        if cx.has_output(0) {
            emit_conv(cx, 0, self.0.shape(ConvPass::Output, &features, &filter)?, dy, w, None)?;
        }
        if cx.has_output(1) {
            emit_conv(cx, 1, self.0.shape(ConvPass::FilterGradient, &features, &filter)?, x, dy, None)?;
        }
        if cx.has_output(2) {
            emit_channel_sums(cx, 2, 0)?;
        }
        Ok(())
    }
}

/// Decomposes `ConvTransposeGrad` into Conv and ReduceSum.
fn decompose_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let transposed = ConvTranspose::read(rw.node())?;
    let (mut dy, x, w) = (rw.required_input(0)?, rw.required_input(1)?, rw.required_input(2)?);
    let (features, filter) = (rw.shape(x).cloned(), rw.shape(w).cloned());
    let filter = filter.ok_or_else(|| OpError::unsupported("the rank of the filter must be known"))?;
    let rank = filter.rank();
    if rw.has_output(2) {
        let gradient = sum_over_channels(rw, dy, rank);
        rw.replace_output(2, gradient);
    }
    let kernel = kernel_dims(&transposed.sliding, Some(&filter), rank)?;
    let adjoint = transposed.adjoint(features.as_ref(), &kernel)?;
    if let Some((ends, axes)) = adjoint.slice() {
        let starts = rw.ints("starts", &vec![0; ends.len()]);
        let (ends, axes) = (rw.ints("ends", &ends), rw.ints("axes", &axes));
        dy = rw.add("Slice", &[dy, starts, ends, axes], Attrs::new());
    }
    if rw.has_output(0) {
        let attrs = explicit_attrs(transposed.groups, &adjoint.windows);
        let gradient = rw.add("Conv", &[dy, w], attrs);
        rw.replace_output(0, gradient);
    }
    if rw.has_output(1) {
        let gradient = filter_gradient(rw, (x, dy), &filter, transposed.groups, &adjoint.windows)?;
        rw.replace_output(1, gradient);
    }
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(ConvTranspose::read(node)?))
}

fn build_grad(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(ConvTransposeGrad(ConvTranspose::read(node)?)))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "ConvTranspose", &[1, 11, 22], build)
            .class(Class::TransposedConvolution)
            .later_types(&[(22, &[DType::BF16])])
            .weights(&[1, 2]),
        Definition::new("com.microsoft", "ConvTransposeGrad", &[1], build_grad)
            .differentiated_as(decompose_grad),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::Tensor;

    use super::*;
    use crate::passes;
    use crate::testing::{
        assert_close, check_decomposition, check_downgrade, check_gradients, f64s, generic_tensor,
        gradient_graph, ints, one_node_graph, run, run_node, with_symbolic_sizes,
    };

    const TRANSPOSED: (&str, &str) = ("", "ConvTranspose");
    const GRAD: (&str, &str) = ("com.microsoft", "ConvTransposeGrad");

    fn node_graph(node: (&str, &str), inputs: &[&Tensor], outputs: usize, attrs: Attrs) -> Graph {
        let inputs: Vec<Option<&Tensor>> = inputs.iter().copied().map(Some).collect();
        one_node_graph(28, node, &inputs, outputs, attrs).expect("valid")
    }

    /// Returns the result for the features 1, 2, 3 and a filter of 1, 10, 100, ...
    fn digit_result(cells: usize, attrs: Attrs) -> Vec<f64> {
        let x = f64s(&[1, 1, 3], &[1.0, 2.0, 3.0]);
        let powers: Vec<f64> = (0..cells).map(|k| 10f64.powi(k as i32)).collect();
        let w = f64s(&[1, 1, cells], &powers);
        run_node(TRANSPOSED, &[Some(&x), Some(&w)], 1, attrs).expect("it runs").remove(0).to_f64()
    }

    /// Results of onnxruntime 1.31.
    #[test]
    fn sizes_and_padding() {
        let full = [1.0, 10.0, 100.0, 1002.0, 20.0, 200.0, 2003.0, 30.0, 300.0, 3000.0, 0.0, 0.0];
        let three = ints(&[("strides", &[3])]);
        let with = |name: &str, values: &[i64]| three.clone().with(name, values);
        let (upper, lower) = ("SAME_UPPER", "SAME_LOWER");
        for (attrs, from, to) in [
            (three.clone(), 0, 10),
            (with("output_padding", &[1]), 0, 11),
            (with("pads", &[1, 1]).with("output_padding", &[2i64][..]), 1, 11),
            (with("output_shape", &[9]), 1, 10),
            (with("output_shape", &[12]), 0, 12),
            (with("output_shape", &[8]).with("output_padding", &[1i64][..]), 2, 10),
            // Explicit padding is ignored if the size is set.
            (with("output_shape", &[9]).with("pads", &[1i64, 0][..]), 1, 10),
            (three.clone().with("auto_pad", "VALID"), 0, 10),
            (three.clone().with("auto_pad", upper), 0, 9),
            (three.clone().with("auto_pad", lower), 1, 10),
            (with("output_padding", &[1]).with("auto_pad", upper), 1, 10),
            (with("output_padding", &[1]).with("auto_pad", lower), 1, 10),
            (with("output_shape", &[8]).with("output_padding", &[1i64][..]).with("auto_pad", upper), 1, 9),
            (with("output_shape", &[9]).with("auto_pad", upper), 0, 9),
            (with("output_shape", &[9]).with("auto_pad", lower), 1, 10),
        ] {
            assert_eq!(digit_result(4, attrs.clone()), full[from..to], "{attrs:?}");
        }
        // Windows with gaps between them.
        let gaps = [1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 3.0, 0.0, 0.0];
        assert_eq!(digit_result(1, three.clone()), gaps[..7]);
        // The size follows the text of the standard. onnxruntime omits the last two positions.
        assert_eq!(digit_result(1, three.clone().with("auto_pad", upper)), gaps);
        assert_eq!(digit_result(2, ints(&[("dilations", &[2])])), [1.0, 2.0, 13.0, 20.0, 30.0]);
    }

    #[test]
    fn groups_and_bias() {
        let x = f64s(&[1, 2, 2], &[1.0, 2.0, 3.0, 4.0]);
        let w = f64s(&[2, 2, 1], &[1.0, 10.0, 100.0, 1000.0]);
        let b = f64s(&[4], &[0.1, 0.2, 0.3, 0.4]);
        let inputs = [Some(&x), Some(&w), Some(&b)];
        let y = run_node(TRANSPOSED, &inputs, 1, Attrs::new().with("group", 2i64)).expect("it runs");
        let expected = [1.1, 2.1, 10.2, 20.2, 300.3, 400.3, 3000.4, 4000.4];
        assert_close(&y[0], &f64s(&[1, 4, 2], &expected), 1e-15);
        let args = [Some(&x), Some(&w), None];
        let y = run_node(TRANSPOSED, &args, 1, Attrs::new()).expect("it runs");
        assert_close(&y[0], &f64s(&[1, 2, 2], &[301.0, 402.0, 3010.0, 4020.0]), 0.0);
    }

    /// Features, filter, groups and lists of integers.
    type Case = (&'static [usize], &'static [usize], i64, &'static [(&'static str, &'static [i64])]);

    const CASES: [Case; 10] = [
        (&[2, 1, 3], &[1, 1, 2], 1, &[]),
        (&[2, 3, 3], &[3, 2, 3], 1, &[("strides", &[2]), ("output_padding", &[1])]),
        (&[1, 4, 3], &[4, 1, 3], 2, &[("strides", &[3]), ("dilations", &[2]), ("pads", &[2, 1])]),
        (&[2, 2, 2, 3], &[2, 3, 3, 2], 1, &[("strides", &[2, 1]), ("pads", &[1, 0, 1, 1])]),
        (&[1, 2, 3, 2], &[2, 1, 2, 2], 2, &[("strides", &[2, 3]), ("output_shape", &[5, 4])]),
        // The result is larger than the range of the windows, by more than one stride.
        (&[1, 1, 3], &[1, 2, 2], 1, &[("strides", &[2]), ("output_shape", &[11])]),
        (&[1, 1, 3], &[1, 2, 2], 1, &[("dilations", &[4]), ("output_padding", &[3])]),
        (&[1, 1, 3], &[1, 2, 2], 1, &[("dilations", &[3]), ("output_padding", &[2]), ("pads", &[1, 1])]),
        (&[1, 2, 2, 3, 2], &[2, 1, 2, 1, 2], 1, &[("strides", &[1, 2, 1])]),
        (&[1, 2, 1, 1], &[2, 2, 3, 3], 1, &[("pads", &[1, 1, 1, 1])]),
    ];

    fn attrs_of(case: &Case) -> Attrs {
        ints(case.3).with("group", case.2)
    }

    fn sum_of_products(a: &Tensor, b: &Tensor) -> f64 {
        a.to_f64().iter().zip(b.to_f64()).map(|(a, b)| a * b).sum()
    }

    #[test]
    fn gradients_are_those_of_central_differences() {
        for case in CASES {
            let (x, w) = (generic_tensor(case.0, 1), generic_tensor(case.1, 2));
            let b = generic_tensor(&[case.1[1] * case.2 as usize], 3);
            let transposed = node_graph(TRANSPOSED, &[&x, &w, &b], 1, attrs_of(&case));
            check_gradients(&transposed, &[x, w, b], &[0, 1, 2], &[0]);
        }
        for (mode, cells, extra) in
            [("SAME_UPPER", 2, 0), ("SAME_LOWER", 5, 2), ("SAME_UPPER", 4, 0), ("VALID", 2, 1)]
        {
            let (x, w) = (generic_tensor(&[1, 1, 3], 1), generic_tensor(&[1, 2, cells], 2));
            let attrs = ints(&[("strides", &[3]), ("output_padding", &[extra])]).with("auto_pad", mode);
            check_gradients(&node_graph(TRANSPOSED, &[&x, &w], 1, attrs), &[x, w], &[0, 1], &[0]);
        }
    }

    /// A transposed convolution is linear in its features, so `<dy, y>` equals `<dx, x>` for any `dy`. The same holds
    /// for the filter.
    #[test]
    fn onnxruntime_gradient_operator() {
        for case in CASES {
            let (x, w) = (generic_tensor(case.0, 1), generic_tensor(case.1, 2));
            let attrs = attrs_of(&case);
            let y = run_node(TRANSPOSED, &[Some(&x), Some(&w)], 1, attrs.clone()).expect("it runs").remove(0);
            let dy = generic_tensor(y.dims(), 3);
            let args = [dy.clone(), x.clone(), w.clone()];
            let inputs: Vec<&Tensor> = args.iter().collect();
            let grad = node_graph(GRAD, &inputs, 3, attrs.clone());
            let result = run(&grad, &args).expect("it runs");
            let total = sum_of_products(&y, &dy);
            assert!((sum_of_products(&result[0], &x) - total).abs() < 1e-10, "{case:?}");
            assert!((sum_of_products(&result[1], &w) - total).abs() < 1e-10, "{case:?}");
            let biased = node_graph(TRANSPOSED, &[&x, &w, &generic_tensor(result[2].dims(), 4)], 1, attrs);
            let local = gradient_graph(&biased, &[Some(dy)], &[0, 1, 2]);
            let own_values = run(&local, &[x, w, generic_tensor(result[2].dims(), 4)]).expect("it runs");
            for (actual, own) in result.iter().zip(&own_values) {
                assert_close(actual, own, 1e-12);
            }
            check_decomposition(&grad, &args, 1e-12);
        }
    }

    #[test]
    fn symbolic_sizes() {
        for case in CASES {
            let (x, w) = (generic_tensor(case.0, 1), generic_tensor(case.1, 2));
            let transposed = node_graph(TRANSPOSED, &[&x, &w], 1, attrs_of(&case));
            let args = [x, w];
            let y = run(&transposed, &args).expect("it runs").remove(0);
            let seed = [Some(generic_tensor(y.dims(), 4))];
            let expected = run(&gradient_graph(&transposed, &seed, &[0, 1]), &args).expect("it runs");
            let all: Vec<usize> = (0..case.0.len()).filter(|&axis| axis != 1).collect();
            for axes in [&all[..1], &all] {
                let named = with_symbolic_sizes(&transposed, 0, axes);
                if axes.len() > 1 && case.3.iter().any(|(name, _)| *name == "output_shape") {
                    // The padding depends on the size: the graph runs, but has no gradient.
                    assert_close(&run(&named, &args).expect("it runs")[0], &y, 0.0);
                    let mut graph = named.clone();
                    let seed = graph.add_constant("seed", generic_tensor(y.dims(), 4));
                    let (output, target) = (graph.outputs[0], graph.inputs[0]);
                    let error =
                        passes::differentiate::backpropagate(&mut graph, &[(output, seed)], &[target]);
                    let message = error.expect_err("refused").to_string();
                    assert!(
                        message.contains("the padding along spatial axis 0 depends on unknown sizes"),
                        "{message}"
                    );
                    continue;
                }
                let mut plain = gradient_graph(&named, &seed, &[0, 1]);
                assert_eq!(run(&plain, &args).expect("it runs"), expected);
                passes::decompose::standardise(&mut plain).expect("it decomposes");
                for (got, expected) in run(&plain, &args).expect("plain runs").iter().zip(&expected) {
                    assert_close(got, expected, 1e-12);
                }
            }
        }
    }

    #[test]
    fn partially_known_shapes() {
        let (x, w) = (generic_tensor(&[2, 4, 5, 6], 1), generic_tensor(&[4, 2, 3, 3], 2));
        let attrs = ints(&[("pads", &[1, 0, 1, 0]), ("strides", &[1, 2])]).with("group", 2i64);
        let named = with_symbolic_sizes(&node_graph(TRANSPOSED, &[&x, &w], 1, attrs), 0, &[0, 2, 3]);
        let shape = |graph: &Graph| graph.value(graph.outputs[0]).ty.shape().expect("a rank").to_string();
        assert_eq!(shape(&named), "[s0, 4, s2, y.3]");
        let attrs = ints(&[("output_shape", &[7, 9])]).with("group", 2i64);
        let named = with_symbolic_sizes(&node_graph(TRANSPOSED, &[&x, &w], 1, attrs), 0, &[0, 2, 3]);
        assert_eq!(shape(&named), "[s0, 4, 7, 9]");
    }

    #[test]
    fn all_opsets_are_equivalent() {
        let (x, w) = (generic_tensor(&[1, 2, 5], 1), generic_tensor(&[2, 2, 3], 2));
        let transposed = node_graph(TRANSPOSED, &[&x, &w], 1, ints(&[("pads", &[1, 1])]));
        for opset in [7, 10, 11, 21] {
            let old = check_downgrade(&transposed, &[x.clone(), w.clone()], opset);
            assert_eq!(&*old.nodes[0].op, "ConvTranspose");
        }
    }

    #[test]
    fn rejects_invalid_shapes() {
        let (x, w) = (generic_tensor(&[1, 4, 5, 5], 1), generic_tensor(&[4, 3, 3, 3], 2));
        let refusal = |x: &Tensor, w: &Tensor, attrs: Attrs| {
            let result = one_node_graph(28, TRANSPOSED, &[Some(x), Some(w)], 1, attrs);
            result.expect_err("refused").to_string()
        };
        for (message, fragment) in [
            (refusal(&x, &generic_tensor(&[4, 3, 3], 2), Attrs::new()), "must have the same number of axes"),
            (
                refusal(&generic_tensor(&[4, 4], 1), &generic_tensor(&[4, 4], 2), Attrs::new()),
                "at least one spatial axis",
            ),
            (
                refusal(&x, &generic_tensor(&[3, 4, 3, 3], 2), Attrs::new()),
                "an input of shape [1, 4, 5, 5] has 4 channels, but a filter of shape [3, 4, 3, 3] takes 3",
            ),
            (
                refusal(&x, &w, Attrs::new().with("group", 3i64)),
                "4 input channels cannot be divided into 3 groups",
            ),
            (
                refusal(&x, &w, ints(&[("kernel_shape", &[2, 3])])),
                "kernel_shape [2, 3] does not match a filter of shape",
            ),
            (refusal(&x, &generic_tensor(&[4, 3, 0, 3], 2), Attrs::new()), "has no cells"),
            (
                refusal(&generic_tensor(&[1, 4, 0, 5], 1), &w, Attrs::new()),
                "spatial axis 0 of the input is empty",
            ),
            (refusal(&x, &w, ints(&[("output_padding", &[1])])), "output_padding must have 2 elements"),
            (refusal(&x, &w, ints(&[("output_padding", &[1, -1])])), "output_padding must be at least 0"),
            (refusal(&x, &w, ints(&[("output_shape", &[1, 3, 5, 5])])), "output_shape must have 2 elements"),
            (refusal(&x, &w, ints(&[("output_shape", &[5, 0])])), "output_shape must be at least 1"),
            (refusal(&x, &w, ints(&[("strides", &[0, 1])])), "strides must be at least 1"),
            (
                refusal(&x, &w, ints(&[("pads", &[3, 0, 4, 0])])),
                "the result is empty along spatial axis 0: windows of size 3 at 5 positions cover 7 elements; padding removes \
                 3 at the start and 4 at the end",
            ),
            (refusal(&x, &w, ints(&[("strides", &[i64::MAX, 1])])), "cannot be addressed"),
            (refusal(&x, &w, ints(&[("dilations", &[i64::MAX, 1])])), "cannot be addressed"),
            (refusal(&x, &w, ints(&[("strides", &[1 << 40, 1 << 40])])), "too large to address"),
            (refusal(&x, &w, ints(&[("output_shape", &[1 << 40, 1 << 40])])), "too large to address"),
        ] {
            assert!(message.contains(fragment), "{message}");
            assert!(message.starts_with("node \"y\""), "{message}");
        }
        // Each position of the window is addressable, but their common origin is not.
        let attrs = ints(&[("dilations", &[i64::MAX, 1]), ("output_shape", &[5, 5])]);
        let graph = node_graph(TRANSPOSED, &[&x, &w], 1, attrs);
        let message = format!("{:?}", run(&graph, &[x, w]).expect_err("refused"));
        assert!(message.contains("too large to count"), "{message}");
    }
}
