//! Suite of activations, Pad and Resize with random combinations of attributes.

use std::sync::Arc;

use ortrain_graph::{Attrs, DType, Dim, Shape, Tensor, ValueType};
use ortrain_program::Backend;
use proptest::prelude::*;
use proptest::sample::select;

use super::{Report, samples};
use crate::{Case, CaseBuilder, Fill, check_backend};

/// Replaces every size of the first input by a symbol.
///
/// # Panics
/// If the rank of the first input is not declared.
#[must_use]
pub fn without_sizes(mut case: Case) -> Case {
    let id = case.graph.inputs[0];
    let value = case.graph.value_mut(id);
    let rank = value.ty.shape().expect("declared").rank();
    let symbols: Shape = (0..rank).map(|axis| Dim::symbol(&format!("s{axis}"))).collect();
    value.ty = ValueType::Tensor(case.inputs[0].dtype(), Some(symbols));
    case
}

/// Returns a strategy for the sizes of 1 to `max_size` axes.
pub fn dims(max_size: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(1..6usize, 1..=max_size)
}

/// Returns a strategy for activations with attributes. No activation has a kink near a test input.
pub fn activation() -> impl Strategy<Value = (&'static str, Attrs)> {
    let alpha = |ops: &'static [&'static str]| {
        (select(ops), select(vec![-0.83f32, 0.17, 1.0, 2.31]))
            .prop_map(|(op, alpha)| (op, Attrs::new().with("alpha", alpha)))
    };
    prop_oneof![
        select(&["Softplus", "Softsign", "HardSwish", "Mish", "Selu", "Gelu"][..])
            .prop_map(|op| (op, Attrs::new())),
        alpha(&["LeakyRelu", "Elu", "Celu", "Selu", "HardSigmoid", "ThresholdedRelu"]),
        select(vec![0.21f32, -1.6]).prop_map(|gamma| ("Selu", Attrs::new().with("gamma", gamma))),
        select(vec![0.11f32, 0.93]).prop_map(|beta| ("HardSigmoid", Attrs::new().with("beta", beta))),
        select(&["none", "tanh"][..]).prop_map(|form| ("Gelu", Attrs::new().with("approximate", form))),
    ]
}

/// Random case of the operator Pad.
#[derive(Clone, Debug)]
pub struct Padding {
    /// Sizes of the input.
    pub dims: Vec<usize>,
    /// Padding mode.
    pub mode: &'static str,
    /// Pads before and after each axis; zeros if the mode does not allow the random pads.
    ends: Vec<[i64; 2]>,
    /// True if input `axes` lists only the axes with pads, the last one first.
    named: bool,
    /// True if the value of the padding is an input, in mode `constant`.
    value: bool,
    /// True if sizes are symbolic.
    unknown: bool,
}

/// Returns a strategy for cases of Pad.
pub fn padding() -> impl Strategy<Value = Padding> {
    let mode = select(&["constant", "reflect", "edge", "wrap"][..]);
    let ends = prop::collection::vec([-2..4i64, -2..4i64], 4);
    (dims(4), mode, ends, any::<[bool; 3]>()).prop_map(|(dims, mode, mut ends, [named, value, unknown])| {
        ends.truncate(dims.len());
        for (ends, &size) in ends.iter_mut().zip(&dims) {
            let left = size as i64 + ends[0].min(0) + ends[1].min(0);
            let limit = if mode == "reflect" { left - 1 } else { i64::MAX };
            if left < 1 || ends[0] > limit || ends[1] > limit {
                *ends = [0, 0];
            }
        }
        Padding { dims, mode, ends, named, value, unknown }
    })
}

impl Padding {
    /// Builds the case.
    #[must_use]
    pub fn case(&self, dtype: DType) -> Case {
        let mut b = CaseBuilder::new("Pad", &format!("{self:?}"));
        let x = b.input(dtype, &self.dims, &Fill::Signed);
        let chosen: Vec<usize> = match self.named {
            true => (0..self.dims.len()).rev().filter(|&axis| self.ends[axis] != [0, 0]).collect(),
            false => (0..self.dims.len()).collect(),
        };
        let end = |k: usize| chosen.iter().map(move |&axis| self.ends[axis][k]);
        let pads = b.ints(&end(0).chain(end(1)).collect::<Vec<_>>());
        let mut inputs = vec![Some(x), Some(pads)];
        let value = (self.value && self.mode == "constant").then(|| b.input(dtype, &[1], &Fill::Positive));
        inputs.push(value);
        if self.named {
            let negative_axes: Vec<i64> =
                chosen.iter().map(|&axis| axis as i64 - self.dims.len() as i64).collect();
            inputs.push(Some(b.ints(&negative_axes)));
        }
        let y = b.node_with("", "Pad", &inputs, 1, Attrs::new().with("mode", self.mode));
        let case = b.outputs(&y);
        if self.unknown { without_sizes(case) } else { case }
    }
}

/// Random case of the operator Resize.
#[derive(Clone, Debug)]
pub struct Resizing {
    /// Sizes of the input.
    pub dims: Vec<usize>,
    /// Attributes.
    pub attrs: Attrs,
    /// Resized axes with their scales.
    pub axes: Vec<(usize, f32)>,
    /// True if the node has output sizes as an input instead of scales.
    by_sizes: bool,
    /// True if sizes are symbolic.
    pub unknown: bool,
}

/// Returns a strategy for cases of Resize.
pub fn resizing() -> impl Strategy<Value = Resizing> {
    let mode = select(&["nearest", "linear", "cubic"][..]);
    let nearest_mode = select(&["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"][..]);
    let coordinates = select(
        &[
            "half_pixel",
            "half_pixel_symmetric",
            "pytorch_half_pixel",
            "align_corners",
            "asymmetric",
            "tf_half_pixel_for_nn",
            "tf_crop_and_resize",
        ][..],
    );
    let policy = select(&["stretch", "stretch", "not_larger", "not_smaller"][..]);
    let scales = prop::collection::vec(select(vec![1.0f32, 1.0, 2.0, 3.0, 0.5, 1.3, 0.6, 2.7]), 4);
    let cubic = select(vec![-0.75f32, -0.5]);
    (dims(4), (mode, nearest_mode, coordinates, policy, cubic), scales, any::<[bool; 5]>()).prop_map(
        |(dims, (mode, nearest_mode, coordinates, policy, cubic), scales, flags)| {
            let [antialias, exclude_outside, by_sizes, unknown, backwards] = flags;
            let antialias = antialias && mode != "nearest";
            let mut axes: Vec<(usize, f32)> = scales.into_iter().enumerate().take(dims.len()).collect();
            if backwards {
                // At most two axes, the last one first.
                axes.reverse();
                axes.truncate(2);
            }
            let mut attrs = Attrs::new()
                .with("mode", mode)
                .with("nearest_mode", nearest_mode)
                .with("coordinate_transformation_mode", coordinates)
                .with("keep_aspect_ratio_policy", policy)
                .with("cubic_coeff_a", cubic)
                .with("antialias", i64::from(antialias))
                .with("exclude_outside", i64::from(exclude_outside))
                .with("extrapolation_value", 0.7f32);
            if backwards {
                attrs = attrs.with("axes", axes.iter().map(|&(axis, _)| axis as i64).collect::<Vec<_>>());
            }
            Resizing { dims, attrs, axes, by_sizes, unknown }
        },
    )
}

impl Resizing {
    /// Builds the case.
    #[must_use]
    pub fn case(&self, dtype: DType) -> Case {
        let mut b = CaseBuilder::new("Resize", &format!("{self:?}"));
        let x = b.input(dtype, &self.dims, &Fill::Signed);
        let count = self.axes.len();
        let ends: Vec<f32> = (0..2 * count).map(|k| if k < count { -0.1 } else { 0.9 }).collect();
        let roi = b.constant(Tensor::f32(&[2 * count], &ends));
        let mut inputs = vec![Some(x), Some(roi)];
        if self.by_sizes {
            let size = |&(axis, scale): &(usize, f32)| (self.dims[axis] as f32 * scale).max(1.0) as i64;
            let sizes = b.ints(&self.axes.iter().map(size).collect::<Vec<_>>());
            inputs.extend([None, Some(sizes)]);
        } else {
            let scales: Vec<f32> = self.axes.iter().map(|&(_, scale)| scale).collect();
            inputs.push(Some(b.constant(Tensor::f32(&[count], &scales))));
        }
        let y = b.node_with("", "Resize", &inputs, 1, self.attrs.clone());
        let case = b.outputs(&y);
        if self.unknown { without_sizes(case) } else { case }
    }
}

/// Builds the case of an activation.
#[must_use]
pub fn activation_case(op: &str, attrs: Attrs, dims: &[usize]) -> Case {
    let mut b = CaseBuilder::new(op, &format!("{attrs:?} {dims:?}")).dynamic();
    let x = b.float(dims, &Fill::Signed);
    let y = b.node(op, &[x], attrs);
    b.outputs(&[y])
}

/// Checks Pad and Resize with element type `dtype`, without gradients.
///
/// # Errors
/// Returns the first result that differs from the reference evaluator, or the error of the backend.
pub fn check_other_types(
    backend: &Arc<dyn Backend>,
    padding: &Padding,
    mut resizing: Resizing,
    dtype: DType,
) -> Result<(), String> {
    if !dtype.is_float() {
        // Integer results are truncated, so a rounding error of a weighted sum could change them by 1.
        resizing.attrs = resizing.attrs.with("mode", "nearest").with("antialias", 0i64);
    }
    check_backend(&padding.case(dtype), backend, false)?;
    check_backend(&resizing.case(dtype), backend, false)
}

/// Compares a backend with the reference evaluator, forward and backward, on `count` deterministic samples of
/// each kind.
#[must_use]
pub fn agree(backend: &Arc<dyn Backend>, count: usize) -> Report {
    let activations = samples((activation(), dims(3)), count)
        .map(|((op, attrs), dims)| check_backend(&activation_case(op, attrs, &dims), backend, true));
    let paddings =
        samples(padding(), count).map(|padding| check_backend(&padding.case(DType::F32), backend, true));
    let resizings =
        samples(resizing(), count).map(|resizing| check_backend(&resizing.case(DType::F32), backend, true));
    let others = samples((padding(), resizing(), select(DType::ALL.to_vec())), count)
        .map(|(padding, resizing, dtype)| check_other_types(backend, &padding, resizing, dtype));
    activations.chain(paddings).chain(resizings).chain(others).collect()
}
