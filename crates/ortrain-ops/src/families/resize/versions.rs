//! Conversion of Resize to older opsets, and Upsample.

use ortrain_graph::{Attrs, Tensor, ValueId};

use super::sampling::{
    AspectRatioPolicy, CoordinateMode, InterpolationMethod, NearestMode, ResizeAttributes, check_list_length,
};
use crate::OpError;
use crate::families::resize::sampling::{ROI, SCALES, SIZES, is_empty_list};
use crate::rewrite::Rewrite;

/// Returns the attributes that are equivalent to Upsample, and to Resize before opset 11.
fn opset_10_attrs(rw: &Rewrite<'_>) -> Result<Attrs, OpError> {
    let mode = rw.attrs().string("mode")?.unwrap_or("nearest");
    if !["nearest", "linear"].contains(&mode) {
        return Err(OpError::invalid(format!("mode must be nearest or linear, got {mode:?}")));
    }
    let attrs = Attrs::new().with("mode", mode).with("coordinate_transformation_mode", "asymmetric");
    Ok(attrs.with("nearest_mode", "simple"))
}

pub(super) fn upgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 11 {
        let attrs = opset_10_attrs(rw)?;
        rw.emit_same_op(&[Some(rw.required_input(0)?), None, Some(rw.required_input(1)?)], attrs);
    }
    Ok(())
}

pub(super) fn upgrade_upsample(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let scales = match rw.attrs().floats("scales")? {
        Some(scales) => {
            if let Some(scale) = scales.iter().find(|&&scale| scale.is_nan() || scale < 1.0) {
                return Err(OpError::invalid(format!("scales must be at least 1, got {scale}")));
            }
            let scales = Tensor::f32(&[scales.len()], scales);
            rw.constant("scales", scales)
        }
        None => rw.required_input(1)?,
    };
    rw.emit_op("", "Resize", &[Some(rw.required_input(0)?), None, Some(scales)], opset_10_attrs(rw)?);
    Ok(())
}

pub(super) fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let version = rw.version();
    let settings = ResizeAttributes::new(rw.attrs())?;
    let x = rw.required_input(0)?;
    let present = |rw: &Rewrite<'_>, k: usize| rw.input(k).filter(|&id| !is_empty_list(rw.shape(id)));
    let scales = present(rw, SCALES);
    let numbers = scales.and_then(|id| rw.constant_of(id)).map(Tensor::to_f64);
    let mut attrs = rw.attrs().clone();
    let needs =
        |feature: &str, opset: i64| OpError::unsupported(format!("{feature} needs opset {opset} or newer"));
    if version < 11 {
        let simple = match settings.method {
            InterpolationMethod::Linear => true,
            InterpolationMethod::Nearest(mode) => mode == NearestMode::Simple,
            InterpolationMethod::Cubic(_) => false,
        };
        let plain = simple && settings.coordinates == CoordinateMode::Asymmetric && !settings.antialias;
        let all_axes = settings.axes.is_none() && !settings.exclude_outside;
        let (Some(scales), true, true) = (scales, plain, all_axes) else {
            return Err(needs("a Resize with these attributes", 11));
        };
        let mode = Attrs::new().with("mode", rw.attrs().string("mode")?.unwrap_or("nearest"));
        if version >= 10 {
            if rw.node().inputs.len() != 2 {
                rw.emit_same_op(&[Some(x), Some(scales)], mode);
            }
        } else if version >= 9 {
            rw.emit_op("", "Upsample", &[Some(x), Some(scales)], mode);
        } else {
            let message = || OpError::unsupported("scales computed at run time need opset 9 or newer");
            let scales = numbers.ok_or_else(message)?.iter().map(|&scale| scale as f32).collect::<Vec<_>>();
            rw.emit_op("", "Upsample", &[Some(x)], mode.with("scales", scales));
        }
        return Ok(());
    }
    if settings.method == InterpolationMethod::Nearest(NearestMode::Simple) {
        let numbers = numbers.unwrap_or_default();
        let mode = match (numbers.iter().any(|&s| s < 1.0), numbers.iter().any(|&s| s > 1.0)) {
            (_, false) if !numbers.is_empty() => "ceil",
            (false, true) => "floor",
            _ => {
                return Err(OpError::unsupported(
                    "mode nearest of opset 10 needs constant scales that are all at least 1 or all at most 1",
                ));
            }
        };
        attrs = attrs.with("nearest_mode", mode);
    }
    if version < 19 && settings.coordinates == CoordinateMode::HalfPixelSymmetric {
        return Err(needs("coordinate_transformation_mode \"half_pixel_symmetric\"", 19));
    }
    let mut inputs: Vec<Option<ValueId>> = rw.node().inputs.to_vec();
    if version < 18 {
        for (name, set) in [
            ("antialias", settings.antialias),
            ("keep_aspect_ratio_policy", settings.policy != AspectRatioPolicy::Stretch),
        ] {
            if set {
                return Err(needs(name, 18));
            }
            attrs.0.remove(name);
        }
        if settings.axes.is_some() {
            extend_to_all_axes(rw, &settings, x, &mut inputs)?;
            attrs.0.remove("axes");
        }
    }
    if version < 13 {
        // Both inputs were required, at least as empty lists.
        inputs.resize(inputs.len().max(3), None);
        for k in [ROI, SCALES] {
            if inputs[k].is_none() {
                inputs[k] = Some(rw.constant("none", Tensor::f32(&[0], &[])));
            }
        }
    }
    if inputs.as_slice() != rw.node().inputs.as_slice() || attrs != *rw.attrs() {
        rw.emit_same_op(&inputs, attrs);
    }
    Ok(())
}

/// Extends roi, scales and sizes of some axes to all axes.
fn extend_to_all_axes(
    rw: &mut Rewrite<'_>,
    settings: &ResizeAttributes,
    x: ValueId,
    inputs: &mut [Option<ValueId>],
) -> Result<(), OpError> {
    let refused = "axes need opset 18 or newer, unless all other inputs and the shape are constant";
    let refused = || OpError::unsupported(refused);
    let shape = rw.shape(x).cloned().ok_or_else(refused)?;
    let (axes, rank) = (settings.axes(shape.rank())?, shape.rank());
    for (k, input) in inputs.iter_mut().enumerate().skip(ROI) {
        let Some(id) = input.filter(|&id| !is_empty_list(rw.shape(id))) else { continue };
        let values = rw.constant_of(id).cloned().ok_or_else(refused)?;
        let each = if k == ROI { 2 } else { 1 };
        check_list_length("the list", &values.to_f64(), axes.len(), each)?;
        let tensor = if let (SIZES, Some(sizes)) = (k, values.to_i64()) {
            let known: Option<Vec<i64>> =
                shape.iter().map(|dim| dim.known().map(|size| size as i64)).collect();
            let mut all_sizes = known.ok_or_else(refused)?;
            for (&axis, size) in axes.iter().zip(sizes) {
                all_sizes[axis] = size;
            }
            Tensor::i64(&[rank], &all_sizes)
        } else {
            let mut all_values = vec![1f32; each * rank];
            if k == ROI {
                all_values[..rank].fill(0.0);
            }
            for (n, value) in values.to_f64().into_iter().enumerate() {
                all_values[n / axes.len() * rank + axes[n % axes.len()]] = value as f32;
            }
            Tensor::f32(&[each * rank], &all_values)
        };
        *input = Some(rw.constant("all", tensor));
    }
    Ok(())
}
