//! `Resize`, its predecessor `Upsample`, and ONNX Runtime's `ResizeGrad`.
//!
//! Resize-10, 11, 13, 18, 19 and Upsample-7, 9 of ONNX (rewritten as Resize when a model is read); `ResizeGrad` of
//! `com.microsoft`, inputs `dY, X, roi?, scales?, sizes?` with the attributes of Resize. The input `sizes` is an
//! extension of this project, written only for `keep_aspect_ratio_policy`.
//!
//! Every axis is resized separately: an element of the result is a weighted sum of elements of the input. Indices and
//! weights follow the formulas of the standard and of its reference implementation, in float64. Scales, sizes and roi
//! must be known when a program is built; values of graph inputs are read at this time. Integers are interpolated as
//! floats and truncated, with saturation at the limits of the type. All modes are supported, including `antialias`,
//! `exclude_outside` and `tf_half_pixel_for_nn` of opset 11.
//!
//! The formulas and the text of the standard differ in places from each other or from onnxruntime. The choices here:
//! - The size of the result is `floor(size * scale)`, both float32.
//! - `length_resized` is `size * scale`, not rounded down.
//! - `pytorch_half_pixel` reads coordinate 0 if the length is 1.
//! - Before opset 11 the nearest element is the one below, or the one above along axes that shrink, as in onnxruntime.
//!   `nearest_mode` is then `simple`, a value that only files of this project contain.
//!
//! The gradient is the transposed sampling, weight by weight. If the sizes of the resized axes are known, it is written
//! in operators of `ai.onnx`: a sum over copies, or a product with the matrix of weights. Otherwise it is written as
//! `ResizeGrad`.

mod onnx_decomposition;
mod sampling;
#[cfg(test)]
mod tests;
mod versions;

use ortrain_expr::{Access, BinaryOp};
use ortrain_graph::{DType, Dim, Graph, Node, Shape, Tensor};

use onnx_decomposition::{ListInput, OnnxDecomposition};
use sampling::{
    AspectRatioPolicy, CoordinateMode, ResizeAttributes, ResizeInputs, check_list_length, scaled_size,
};
use versions::{downgrade, upgrade, upgrade_upsample};

use crate::OpError;
use crate::axis_map::apply_axis_maps;
use crate::class::Traits;
use crate::families::resize::sampling::{ROI, SCALES, SIZES, is_empty_list};
use crate::grad::Grad;
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::{Definition, Op, ValueRequirement};
use crate::rewrite::Rewrite;

/// Reads roi, scales and sizes. Returns `None` if a required input is unknown. `present` returns true if an input is
/// present; `numbers` and `integers` return its elements.
fn read_inputs(
    settings: &ResizeAttributes,
    present: impl Fn(usize) -> bool,
    numbers: impl Fn(usize) -> Option<Vec<f64>>,
    integers: impl Fn(usize) -> Option<Vec<i64>>,
) -> Option<ResizeInputs> {
    let mut inputs = ResizeInputs::default();
    if settings.coordinates == CoordinateMode::TfCropAndResize && present(ROI) {
        inputs.roi = Some(numbers(ROI)?);
    }
    if present(SCALES) {
        inputs.scales = Some(numbers(SCALES)?);
    }
    if present(SIZES) {
        inputs.sizes = Some(integers(SIZES)?);
    }
    Some(inputs)
}

/// Checks the types of roi, scales and sizes.
fn check_types(cx: &Infer<'_>) -> Result<(), OpError> {
    if cx.has_input(ROI) {
        cx.expect_dtype(ROI, "a float type", DType::is_float)?;
    }
    if cx.has_input(SCALES) {
        cx.expect_dtype(SCALES, "float32", |dtype| dtype == DType::F32)?;
    }
    if cx.has_input(SIZES) {
        cx.expect_dtype(SIZES, "int64", |dtype| dtype == DType::I64)?;
    }
    Ok(())
}

/// Operator that resizes a tensor.
struct Resize {
    settings: ResizeAttributes,
}

impl Resize {
    /// Returns the shape of the result for an input shape.
    fn result_shape(&self, cx: &Infer<'_>, shape: &Shape) -> Result<Shape, OpError> {
        let settings = &self.settings;
        let axes = settings.axes(shape.rank())?;
        let present = |k: usize| cx.has_input(k) && !is_empty_list(cx.shape(k));
        match (present(SCALES), present(SIZES)) {
            (true, true) => return Err(OpError::invalid("both scales and sizes are given")),
            (false, false) => return Err(OpError::invalid("neither scales nor sizes are given")),
            _ => {}
        }
        let mut result = shape.clone();
        let numbers = |k: usize| cx.constant(k).map(Tensor::to_f64);
        let known = read_inputs(settings, present, numbers, |k| cx.ints(k));
        // Axes that are not resized may have unknown sizes.
        let open = axes.iter().any(|&axis| shape[axis].known().is_none());
        if let (Some(inputs), false) = (&known, open) {
            let dims: Vec<usize> = shape.iter().map(|dim| dim.known().unwrap_or(1)).collect();
            for plan in settings.plan(&dims, inputs)? {
                result[plan.axis] = Dim::Known(plan.target);
            }
            return Ok(result);
        }
        if let Some(scales) = cx.constant(SCALES).filter(|_| present(SCALES)) {
            let scales = scales.to_f64();
            check_list_length("scales", &scales, axes.len(), 1)?;
            for (&axis, &scale) in axes.iter().zip(&scales) {
                result[axis] = match shape[axis].known() {
                    Some(size) => Dim::Known(scaled_size(axis, size, scale)?),
                    None if scale == 1.0 => shape[axis].clone(),
                    None => cx.unknown_dim(0, axis),
                };
            }
        } else if let (Some(sizes), AspectRatioPolicy::Stretch) = (cx.sizes(SIZES), settings.policy) {
            check_list_length("sizes", &sizes, axes.len(), 1)?;
            for (&axis, size) in axes.iter().zip(sizes) {
                result[axis] = size;
            }
        } else {
            for axis in axes {
                result[axis] = cx.unknown_dim(0, axis);
            }
        }
        Ok(result)
    }
}

impl Op for Resize {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 4, 1)?;
        let dtype = cx.dtype(0)?;
        check_types(cx)?;
        let shape = cx.shape(0).map(|shape| self.result_shape(cx, shape)).transpose()?;
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    fn needs_value(&self, k: usize, _: DType) -> ValueRequirement {
        if k == 0 { ValueRequirement::Never } else { ValueRequirement::Always }
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        if !cx.needs_grad(0) {
            return Ok(());
        }
        let (x, y) = (cx.input(0)?, cx.output(0, "y"));
        let settings = &self.settings;
        let nonempty_input =
            |cx: &Grad<'_>, k: usize| cx.optional_input(k).filter(|&id| !is_empty_list(cx.shape(id)));
        let list = |k: usize| match nonempty_input(cx, k) {
            None => ListInput::Absent,
            Some(id) => cx.constant_of(id).map_or(ListInput::Unknown, ListInput::Known),
        };
        if let (Some(before), Some(after)) = (cx.shape(x), cx.shape(y))
            && let Some(spelling) = OnnxDecomposition::new(settings, [before, after], list)?
        {
            let dtype = cx.dtype(x)?;
            let gradient = spelling.emit(cx, g, dtype);
            cx.set_grad(0, gradient);
            return Ok(());
        }
        let mut inputs = vec![Some(g), Some(x), nonempty_input(cx, ROI), nonempty_input(cx, SCALES)];
        if settings.policy != AspectRatioPolicy::Stretch {
            inputs.push(nonempty_input(cx, SIZES));
        }
        while inputs.last() == Some(&None) {
            inputs.pop();
        }
        let attrs = cx.node().attrs.clone();
        let gradient = cx.add_node("com.microsoft", "ResizeGrad", &inputs, 1, attrs)[0];
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.dims(0);
        let plans = self.settings.plan(&dims, &read_constant_inputs(cx, &self.settings, 0)?)?;
        let (mut maps, mut outsides) = (Vec::new(), Vec::new());
        for plan in &plans {
            let Some((map, outside)) = self.settings.sampling(plan)? else { continue };
            maps.push((plan.axis, map));
            if outside.contains(&true) {
                outsides.push((plan.axis, outside));
            }
        }
        if maps.iter().all(|(_, map)| map.is_identity()) {
            cx.alias(0, 0);
            return Ok(());
        }
        let (input, output) = (cx.input(0), cx.output(0));
        if outsides.is_empty() {
            return apply_axis_maps(cx, (input, &dims), &maps, output);
        }
        let (dtype, out_dims) = (cx.out_dtype(0), cx.out_dims(0));
        let inside = cx.alloc_temp("inside", dtype, out_dims.iter().product());
        apply_axis_maps(cx, (input, &dims), &maps, inside)?;
        let mut nest = cx.nest(&out_dims, 0);
        let value = nest.load_strided(cx, inside, 0, &Access::contiguous(dtype, &out_dims).strides);
        let mut any = None;
        for (axis, outside) in outsides {
            let flags: Vec<u8> = outside.into_iter().map(u8::from).collect();
            let flags = Tensor::from_slice(DType::Bool, &[flags.len()], &flags);
            let flags = cx.constant_buffer("outside", &flags);
            let mut strides = vec![0; out_dims.len()];
            strides[axis] = 1;
            let flag = nest.load_strided(cx, flags, 0, &strides);
            any = Some(any.map_or(flag, |any| nest.b.binary(BinaryOp::Or, any, flag)));
        }
        let ty = nest.b.ty(value);
        let other = nest.b.constant(ty, self.settings.extrapolation);
        let chosen = any.map_or(value, |any| nest.b.select(any, other, value));
        nest.store_contiguous(cx, output, chosen);
        cx.emit(nest.instruction())
    }
}

/// Reads roi, scales and sizes during lowering; `first` is the number of inputs before the resized input.
fn read_constant_inputs(
    cx: &Lower<'_>,
    settings: &ResizeAttributes,
    first: usize,
) -> Result<ResizeInputs, OpError> {
    let constant = |k: usize| cx.constant(first + k);
    let present = |k: usize| cx.has_input(first + k) && !cx.dims(first + k).contains(&0);
    let integers = |k: usize| constant(k).and_then(Tensor::to_i64);
    read_inputs(settings, present, |k| constant(k).map(Tensor::to_f64), integers)
        .ok_or_else(|| OpError::unsupported("scales, sizes and roi must be known before compilation"))
}

/// Gradient of [`Resize`]: inputs `dY`, `X` (for its shape), roi, scales, sizes.
struct ResizeGrad {
    settings: ResizeAttributes,
}

/// Returns `inputs`, with the sizes of the result if both scales and sizes are missing.
fn with_default_sizes(
    settings: &ResizeAttributes,
    mut inputs: ResizeInputs,
    out_dims: &[usize],
) -> Result<ResizeInputs, OpError> {
    if inputs.scales.is_none() && inputs.sizes.is_none() {
        let axes = settings.axes(out_dims.len())?;
        inputs.sizes = Some(axes.iter().map(|&axis| out_dims[axis] as i64).collect());
    }
    Ok(inputs)
}

impl Op for ResizeGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 5, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        cx.expect_same_dtype([0, 1])?;
        cx.set_output(0, dtype, cx.shape(1).cloned());
        Ok(())
    }

    fn needs_value(&self, k: usize, _: DType) -> ValueRequirement {
        if k < 2 { ValueRequirement::Never } else { ValueRequirement::Always }
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (dims, out_dims) = (cx.dims(1), cx.dims(0));
        let inputs =
            with_default_sizes(&self.settings, read_constant_inputs(cx, &self.settings, 1)?, &out_dims)?;
        let plans = self.settings.plan(&dims, &inputs)?;
        let mut expected = dims.clone();
        for plan in &plans {
            expected[plan.axis] = plan.target;
        }
        if expected != out_dims {
            return Err(OpError::invalid(format!(
                "the gradient has shape {out_dims:?}, but {dims:?} is resized to {expected:?}"
            )));
        }
        let mut maps = Vec::new();
        for plan in &plans {
            if let Some((map, _)) = self.settings.sampling(plan)? {
                maps.push((plan.axis, map.transposed()));
            }
        }
        if maps.iter().all(|(_, map)| map.is_identity()) {
            cx.alias(0, 0);
            return Ok(());
        }
        let (input, output) = (cx.input(0), cx.output(0));
        apply_axis_maps(cx, (input, &out_dims), &maps, output)
    }
}

/// Decomposes `ResizeGrad` into operators of `ai.onnx`.
fn decompose_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let settings = ResizeAttributes::new(rw.attrs())?;
    let (g, x) = (rw.required_input(0)?, rw.required_input(1)?);
    let refused = "it can be written in operators of ai.onnx only if sizes, scales and roi are constant";
    let refused = || OpError::unsupported(refused);
    let list = |k: usize| match rw.input(1 + k).filter(|&id| !is_empty_list(rw.shape(id))) {
        None => ListInput::Absent,
        Some(id) => rw.constant_of(id).map_or(ListInput::Unknown, ListInput::Known),
    };
    let (Some(before), Some(after)) = (rw.shape(x), rw.shape(g)) else { return Err(refused()) };
    let spelling = OnnxDecomposition::new(&settings, [before, after], list)?.ok_or_else(refused)?;
    let dtype = rw.dtype(g).ok_or_else(|| OpError::invalid("the type of the gradient is not known"))?;
    let result = spelling.emit(rw.patch().1, g, dtype);
    rw.replace_output(0, result);
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Resize { settings: ResizeAttributes::new(&node.attrs)? }))
}

fn build_grad(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(ResizeGrad { settings: ResizeAttributes::new(&node.attrs)? }))
}

fn build_upsample(_: &Graph, _: &Node) -> Result<Box<dyn Op>, OpError> {
    Err(OpError::invalid("Upsample was removed in opset 10; use Resize"))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "Resize", &[10, 11, 13, 18, 19], build)
            .traits(Traits::PREPARES)
            .kept_inputs(&[1, 2])
            .upgrade(upgrade)
            .downgrade(downgrade),
        Definition::new("", "Upsample", &[7, 9, 10], build_upsample)
            .kept_inputs(&[1])
            .always_rewritten(upgrade_upsample),
        Definition::new("com.microsoft", "ResizeGrad", &[1], build_grad).differentiated_as(decompose_grad),
    ]
}
