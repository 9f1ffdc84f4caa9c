//! Sampling of a resized axis: the source coordinate of each position, and the weights of the neighbouring elements.

use ortrain_graph::{Attrs, Dim, Shape};

use crate::OpError;
use crate::axis_map::{AxisMap, MAX_TAPS, Tap};
use crate::infer::normalize_axis;

/// Choice of the nearest element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NearestMode {
    RoundPreferFloor,
    RoundPreferCeil,
    Floor,
    Ceil,
    /// Below; above along axes that shrink.
    Simple,
}

/// Interpolation method.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum InterpolationMethod {
    Nearest(NearestMode),
    Linear,
    /// Cubic with its coefficient.
    Cubic(f64),
}

/// Mapping of a position in the result to a coordinate in the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CoordinateMode {
    HalfPixel,
    HalfPixelSymmetric,
    PytorchHalfPixel,
    AlignCorners,
    Asymmetric,
    TfHalfPixelForNn,
    TfCropAndResize,
}

/// Treatment of sizes that change the aspect ratio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AspectRatioPolicy {
    Stretch,
    NotLarger,
    NotSmaller,
}

/// Attributes of the operator.
#[derive(Clone, Debug)]
pub(super) struct ResizeAttributes {
    pub(super) method: InterpolationMethod,
    pub(super) coordinates: CoordinateMode,
    pub(super) policy: AspectRatioPolicy,
    pub(super) antialias: bool,
    pub(super) exclude_outside: bool,
    pub(super) extrapolation: f64,
    pub(super) axes: Option<Vec<i64>>,
}

/// Parses an attribute with a fixed set of words.
pub(super) fn parse_word<T: Copy>(
    attrs: &Attrs,
    name: &str,
    default: &str,
    choices: &[(&str, T)],
) -> Result<T, OpError> {
    let value_name = attrs.string(name)?.unwrap_or(default);
    choices.iter().find(|(choice, _)| *choice == value_name).map(|&(_, value)| value).ok_or_else(|| {
        let known: Vec<&str> = choices.iter().map(|(choice, _)| *choice).collect();
        OpError::invalid(format!("{name} must be one of {}, got {value_name:?}", known.join(", ")))
    })
}

impl ResizeAttributes {
    pub(super) fn new(attrs: &Attrs) -> Result<ResizeAttributes, OpError> {
        let nearest = parse_word(
            attrs,
            "nearest_mode",
            "round_prefer_floor",
            &[
                ("round_prefer_floor", NearestMode::RoundPreferFloor),
                ("round_prefer_ceil", NearestMode::RoundPreferCeil),
                ("floor", NearestMode::Floor),
                ("ceil", NearestMode::Ceil),
                ("simple", NearestMode::Simple),
            ],
        )?;
        let cubic = f64::from(attrs.float("cubic_coeff_a")?.unwrap_or(-0.75));
        let methods = [
            ("nearest", InterpolationMethod::Nearest(nearest)),
            ("linear", InterpolationMethod::Linear),
            ("cubic", InterpolationMethod::Cubic(cubic)),
        ];
        let coordinates = [
            ("half_pixel", CoordinateMode::HalfPixel),
            ("half_pixel_symmetric", CoordinateMode::HalfPixelSymmetric),
            ("pytorch_half_pixel", CoordinateMode::PytorchHalfPixel),
            ("align_corners", CoordinateMode::AlignCorners),
            ("asymmetric", CoordinateMode::Asymmetric),
            ("tf_half_pixel_for_nn", CoordinateMode::TfHalfPixelForNn),
            ("tf_crop_and_resize", CoordinateMode::TfCropAndResize),
        ];
        let policies = [
            ("stretch", AspectRatioPolicy::Stretch),
            ("not_larger", AspectRatioPolicy::NotLarger),
            ("not_smaller", AspectRatioPolicy::NotSmaller),
        ];
        let flag = |name: &str| Ok::<_, OpError>(attrs.int(name)?.unwrap_or(0) != 0);
        let settings = ResizeAttributes {
            method: parse_word(attrs, "mode", "nearest", &methods)?,
            coordinates: parse_word(attrs, "coordinate_transformation_mode", "half_pixel", &coordinates)?,
            policy: parse_word(attrs, "keep_aspect_ratio_policy", "stretch", &policies)?,
            antialias: flag("antialias")?,
            exclude_outside: flag("exclude_outside")?,
            extrapolation: f64::from(attrs.float("extrapolation_value")?.unwrap_or(0.0)),
            axes: attrs.ints("axes")?.map(<[i64]>::to_vec),
        };
        if settings.antialias && matches!(settings.method, InterpolationMethod::Nearest(_)) {
            return Err(OpError::invalid("antialias requires mode \"linear\" or \"cubic\""));
        }
        Ok(settings)
    }

    /// Returns the axes of scales, sizes and roi, in their order.
    pub(super) fn axes(&self, rank: usize) -> Result<Vec<usize>, OpError> {
        let Some(named) = &self.axes else { return Ok((0..rank).collect()) };
        let axes = named.iter().map(|&axis| normalize_axis(axis, rank)).collect::<Result<Vec<_>, _>>()?;
        match (0..axes.len()).find(|&k| axes[..k].contains(&axes[k])) {
            Some(k) => Err(OpError::invalid(format!("axis {} is named twice", axes[k]))),
            None => Ok(axes),
        }
    }
}

/// Values of the inputs that are present.
#[derive(Clone, Debug, Default)]
pub(super) struct ResizeInputs {
    pub(super) roi: Option<Vec<f64>>,
    pub(super) scales: Option<Vec<f64>>,
    pub(super) sizes: Option<Vec<i64>>,
}

/// Resize parameters of one axis.
#[derive(Clone, Copy, Debug)]
pub(super) struct AxisPlan {
    pub(super) axis: usize,
    pub(super) source: usize,
    pub(super) target: usize,
    pub(super) scale: f64,
    /// Start and end of the sampled region, as fractions of the axis.
    pub(super) roi: (f64, f64),
}

/// Checks that a list has `each` numbers for each axis.
pub(super) fn check_list_length<T>(name: &str, list: &[T], axes: usize, each: usize) -> Result<(), OpError> {
    if list.len() == each * axes {
        return Ok(());
    }
    Err(OpError::invalid(format!(
        "{name} has {} elements for {axes} axes, expected {}",
        list.len(),
        each * axes
    )))
}

/// Returns the size of a scaled axis.
pub(super) fn scaled_size(axis: usize, size: usize, scale: f64) -> Result<usize, OpError> {
    if !(scale.is_finite() && scale > 0.0) {
        return Err(OpError::invalid(format!(
            "the scale of axis {axis} must be a number above 0, got {scale}"
        )));
    }
    // In float32, like the shape inference of the standard.
    let target = f64::from((size as f32 * scale as f32).floor());
    if target >= isize::MAX as f64 {
        return Err(OpError::invalid(format!("scale {scale} makes axis {axis} too long to count")));
    }
    Ok(target as usize)
}

/// Returns the element below a position of `half_pixel_symmetric`, and the distance of the position from this element,
/// in (0, 1].
///
/// At an integer coordinate, rounding decides which neighbour is used. This code reproduces the rounding of the
/// reference evaluator: the same order of additions, and a copy with one more element before the first.
pub(super) fn symmetric_neighbours(x: f64, plan: &AxisPlan) -> (f64, f64) {
    let AxisPlan { source, target, scale, .. } = *plan;
    let offset = source as f64 / 2.0 * (1.0 - target as f64 / (scale * source as f64));
    let coordinate = offset + (x + 0.5) / scale - 0.5;
    let padded = coordinate + 1.0;
    let ratio = if coordinate == coordinate.floor() { 1.0 } else { coordinate - coordinate.floor() };
    (padded.ceil() - 2.0, ratio)
}

impl ResizeAttributes {
    /// Returns the resize parameters of the axes of a tensor of sizes `dims`.
    pub(super) fn plan(&self, dims: &[usize], inputs: &ResizeInputs) -> Result<Vec<AxisPlan>, OpError> {
        let axes = self.axes(dims.len())?;
        let mut plans = Vec::with_capacity(axes.len());
        if let Some(scales) = &inputs.scales {
            check_list_length("scales", scales, axes.len(), 1)?;
            for (&axis, &scale) in axes.iter().zip(scales) {
                let (source, roi) = (dims[axis], (0.0, 1.0));
                plans.push(AxisPlan { axis, source, target: scaled_size(axis, source, scale)?, scale, roi });
            }
        } else if let Some(sizes) = &inputs.sizes {
            check_list_length("sizes", sizes, axes.len(), 1)?;
            for (&axis, &size) in axes.iter().zip(sizes) {
                let target = usize::try_from(size).map_err(|_| {
                    OpError::invalid(format!("the size of axis {axis} must be at least 0, got {size}"))
                })?;
                let source = dims[axis];
                let scale = if source == 0 { 1.0 } else { target as f64 / source as f64 };
                plans.push(AxisPlan { axis, source, target, scale, roi: (0.0, 1.0) });
            }
            self.keep_aspect_ratio(&mut plans)?;
        } else {
            return Err(OpError::invalid("neither scales nor sizes are given"));
        }
        if self.coordinates == CoordinateMode::TfCropAndResize {
            let roi = inputs
                .roi
                .as_ref()
                .ok_or_else(|| OpError::invalid("roi is missing, which \"tf_crop_and_resize\" requires"))?;
            check_list_length("roi", roi, axes.len(), 2)?;
            for (k, plan) in plans.iter_mut().enumerate() {
                plan.roi = (roi[k], roi[axes.len() + k]);
                if !(plan.roi.0.is_finite() && plan.roi.1.is_finite()) {
                    return Err(OpError::invalid(format!(
                        "roi of axis {} must have finite bounds, got {} and {}",
                        plan.axis, plan.roi.0, plan.roi.1
                    )));
                }
            }
        }
        for plan in &plans {
            if plan.source == 0 && plan.target > 0 {
                return Err(OpError::invalid(format!(
                    "axis {} has no elements and cannot be resized to {}",
                    plan.axis, plan.target
                )));
            }
        }
        Ok(plans)
    }

    /// Uses one scale for all axes if the aspect ratio is preserved.
    fn keep_aspect_ratio(&self, plans: &mut [AxisPlan]) -> Result<(), OpError> {
        let scales = plans.iter().map(|plan| plan.scale);
        let scale = match self.policy {
            AspectRatioPolicy::Stretch => return Ok(()),
            AspectRatioPolicy::NotLarger => scales.fold(f64::INFINITY, f64::min),
            AspectRatioPolicy::NotSmaller => scales.fold(0.0, f64::max),
        };
        for plan in plans {
            let target = (scale * plan.source as f64 + 0.5).floor();
            if target >= isize::MAX as f64 {
                return Err(OpError::invalid(format!("axis {} gets too long to count", plan.axis)));
            }
            (plan.scale, plan.target) = (scale, target as usize);
        }
        Ok(())
    }

    /// Returns the sampling of an axis, and a flag for each position that is outside of the input. Returns `None` for
    /// an identity.
    pub(super) fn sampling(&self, plan: &AxisPlan) -> Result<Option<(AxisMap, Vec<bool>)>, OpError> {
        let AxisPlan { axis, source, target, scale, roi } = *plan;
        let crops = self.coordinates == CoordinateMode::TfCropAndResize;
        if source == target && scale == 1.0 && !(crops && roi != (0.0, 1.0)) {
            return Ok(None);
        }
        // Number of input elements in each half of the kernel. It is wider if antialiasing must not skip elements.
        let squeezed = if self.antialias { scale.min(1.0) } else { 1.0 };
        let reach = match self.method {
            InterpolationMethod::Nearest(_) | InterpolationMethod::Linear => (1.0 / squeezed).ceil(),
            InterpolationMethod::Cubic(_) => (2.0 / squeezed).ceil(),
        };
        let tap_count = target as f64 * 2.0 * reach;
        if target.max(source) > MAX_TAPS || tap_count > MAX_TAPS as f64 {
            return Err(OpError::unsupported(format!(
                "axis {axis} cannot be resized from {source} to {target} elements, which needs more than \
                 {MAX_TAPS} weights"
            )));
        }
        let reach = reach as i64;
        let mut map = AxisMap::new(source);
        let mut outside = vec![false; target];
        let (mut taps, mut weights) = (Vec::new(), Vec::new());
        for (position, outside) in outside.iter_mut().enumerate() {
            let x = self.source_coordinate(position as f64, plan);
            if crops && !(x >= 0.0 && x <= (source - 1) as f64) {
                *outside = true;
                map.push(&[]);
                continue;
            }
            // The element below, and the distance of the position from it: in (0, 1].
            let (below, ratio) = match (self.method, self.coordinates) {
                (InterpolationMethod::Nearest(_), CoordinateMode::HalfPixelSymmetric) => {
                    symmetric_neighbours(position as f64, plan)
                }
                _ => (x.ceil() - 1.0, x - (x.ceil() - 1.0)),
            };
            let first = below as i64 + 1 - reach;
            weights.clear();
            weights.extend((1 - reach..=reach).map(|k| self.kernel_weight(squeezed * (k as f64 - ratio))));
            if let InterpolationMethod::Nearest(mode) = self.method {
                let above = match mode {
                    _ if ratio == 1.0 => true,
                    NearestMode::RoundPreferFloor => ratio > 0.5,
                    NearestMode::RoundPreferCeil => ratio >= 0.5,
                    NearestMode::Floor => false,
                    NearestMode::Ceil => true,
                    NearestMode::Simple => scale < 1.0,
                };
                weights.copy_from_slice(if above { &[0.0, 1.0] } else { &[1.0, 0.0] });
            }
            if self.exclude_outside {
                for (k, weight) in weights.iter_mut().enumerate() {
                    if !(0..source as i64).contains(&(first + k as i64)) {
                        *weight = 0.0;
                    }
                }
            }
            let total: f64 = weights.iter().sum();
            let divided = (self.antialias || self.exclude_outside) && total != 0.0;
            taps.clear();
            taps.extend(weights.iter().enumerate().map(|(k, &weight)| Tap {
                index: (first + k as i64).clamp(0, source as i64 - 1) as usize,
                weight: if divided { weight / total } else { weight },
            }));
            map.push(&taps);
        }
        Ok(Some((map, outside)))
    }

    /// Returns the coordinate in the input of a position in the result.
    fn source_coordinate(&self, x: f64, plan: &AxisPlan) -> f64 {
        let AxisPlan { source, target, scale, roi: (start, end), .. } = *plan;
        let (length, width) = (source as f64, source as f64 * scale);
        let half = (x + 0.5) / scale - 0.5;
        match self.coordinates {
            CoordinateMode::HalfPixel => half,
            CoordinateMode::HalfPixelSymmetric => length / 2.0 * (1.0 - target as f64 / width) + half,
            CoordinateMode::PytorchHalfPixel if width > 1.0 => half,
            CoordinateMode::AlignCorners if width != 1.0 => x * (length - 1.0) / (width - 1.0),
            CoordinateMode::PytorchHalfPixel | CoordinateMode::AlignCorners => 0.0,
            CoordinateMode::Asymmetric => x / scale,
            CoordinateMode::TfHalfPixelForNn => (x + 0.5) / scale,
            CoordinateMode::TfCropAndResize => {
                let within = match width == 1.0 {
                    true => (end - start) * (length - 1.0) / 2.0,
                    false => x * (end - start) * (length - 1.0) / (width - 1.0),
                };
                within + start * (length - 1.0)
            }
        }
    }

    /// Returns the kernel's weight at a distance.
    fn kernel_weight(&self, distance: f64) -> f64 {
        let x = distance.abs();
        match self.method {
            InterpolationMethod::Linear => (1.0 - x).max(0.0),
            InterpolationMethod::Cubic(a) if x <= 1.0 => ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0,
            InterpolationMethod::Cubic(a) if x < 2.0 => ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a,
            InterpolationMethod::Nearest(_) | InterpolationMethod::Cubic(_) => 0.0,
        }
    }
}

pub(super) const ROI: usize = 1;

pub(super) const SCALES: usize = 2;

pub(super) const SIZES: usize = 3;

/// Returns true for the shape of an empty list: exporters omit inputs this way.
pub(super) fn is_empty_list(shape: Option<&Shape>) -> bool {
    shape.is_some_and(|shape| shape.contains(&Dim::Known(0)))
}
