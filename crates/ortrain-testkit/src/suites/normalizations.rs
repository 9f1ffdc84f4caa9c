//! Suite of batch, layer and RMS normalizations with random sizes and attributes.

use std::sync::Arc;

use ortrain_graph::{Attrs, DType, Tensor};
use ortrain_program::Backend;
use proptest::prelude::*;

use super::{FLOATS, Report, samples};
use crate::{Case, CaseBuilder, Fill, check_backend};

/// Sizes and attributes of a batch normalization.
#[derive(Clone, Debug)]
pub struct Config {
    dims: Vec<usize>,
    epsilon: f32,
    momentum: f32,
    training: bool,
    /// True for the operator of training graphs, which also outputs the statistics of the batch.
    internal: bool,
    dynamic: bool,
}

/// Returns the strategy for configurations of a batch normalization.
pub fn config() -> impl Strategy<Value = Config> {
    let space = prop::collection::vec(1..4usize, 0..4);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (0..5usize, 1..5usize, any::<bool>(), space, 0.02..0.5f32, 0.0..1.0f32, flags).prop_map(
        |(batch, channels, vector, space, epsilon, momentum, (training, internal, dynamic))| Config {
            dims: if vector && space.is_empty() {
                vec![batch]
            } else {
                [vec![batch, channels], space].concat()
            },
            epsilon,
            momentum,
            training,
            internal,
            dynamic,
        },
    )
}

impl Config {
    /// Builds a case with one normalization. With `uses_all`, all its outputs are results. Otherwise, the result is
    /// the product of the batch and the normalized batch, so that the sums in its gradient do not cancel out.
    #[must_use]
    pub fn case(&self, dtype: DType, uses_all: bool) -> Case {
        let op = if self.internal { "BatchNormInternal" } else { "BatchNormalization" };
        let domain = if self.internal { "com.microsoft" } else { "" };
        let channels = [self.dims.get(1).copied().unwrap_or(1)];
        let mut b = CaseBuilder::new(op, &format!("{self:?}"));
        if self.dynamic {
            b = b.dynamic();
        }
        let x = b.input(dtype, &self.dims, &Fill::Positive);
        let mut b = b.fixed();
        let mut inputs = vec![x];
        inputs.extend((0..2).map(|_| b.input(dtype, &channels, &Fill::Signed)));
        for (fill, value) in [(Fill::Signed, 0.25), (Fill::Positive, 0.75)] {
            // In training, the running statistics get no gradient.
            inputs.push(if self.training {
                b.constant(Tensor::filled(dtype, &channels, value))
            } else {
                b.input(dtype, &channels, &fill)
            });
        }
        let attrs = Attrs::new()
            .with("epsilon", self.epsilon)
            .with("momentum", self.momentum)
            .with("training_mode", i64::from(self.training));
        let inputs: Vec<_> = inputs.into_iter().map(Some).collect();
        let outputs = match (self.training, self.internal) {
            (false, _) => 1,
            (true, false) => 3,
            (true, true) => 5,
        };
        let y = b.node_with(domain, op, &inputs, outputs, attrs);
        if uses_all {
            return b.outputs(&y);
        }
        let product = b.node("Mul", &[y[0], x], Attrs::new());
        b.outputs(&[product])
    }
}

/// Sizes and attributes of a layer normalization.
#[derive(Clone, Debug)]
pub struct LayerConfig {
    dims: Vec<usize>,
    axis: i64,
    epsilon: f32,
    /// True for RMS normalization, without a mean.
    rms: bool,
    /// True for the axes of scale and bias with one element.
    ones: [[bool; 4]; 2],
    /// Number of leading axes that scale and bias omit.
    lead: [usize; 2],
    bias: bool,
    /// True for statistics in bfloat16.
    narrow_statistics: bool,
    dynamic: bool,
}

/// Returns the strategy for configurations of a layer normalization.
pub fn layer_config() -> impl Strategy<Value = LayerConfig> {
    let dims = prop::collection::vec(1..5usize, 1..5);
    let ones = any::<[[bool; 4]; 2]>();
    let flags = any::<[bool; 6]>();
    (dims, any::<usize>(), 0.02..0.5f32, ones, any::<[u8; 2]>(), flags).prop_map(
        |(dims, axis, epsilon, ones, lead, [rms, bias, narrow_statistics, dynamic, usual, from_end])| {
            let rank = dims.len();
            let axis = axis % rank;
            // Usually, parameters have the normalized shape.
            let lead = if usual { [axis; 2] } else { lead.map(|lead| usize::from(lead) % (rank + 1)) };
            let ones = if usual { [[false; 4]; 2] } else { ones };
            let axis = if from_end { axis as i64 - rank as i64 } else { axis as i64 };
            LayerConfig { dims, axis, epsilon, rms, ones, lead, bias, narrow_statistics, dynamic }
        },
    )
}

impl LayerConfig {
    /// Builds a case with one normalization. The normalized data are multiplied with the data, so that the sums in
    /// the gradient do not cancel out. The statistics are additional results.
    #[must_use]
    pub fn case(&self, dtype: DType) -> Case {
        let op = if self.rms { "RMSNormalization" } else { "LayerNormalization" };
        let mut b = CaseBuilder::new(op, &format!("{self:?}"));
        if self.dynamic {
            b = b.dynamic();
        }
        let x = b.input(dtype, &self.dims, &Fill::Positive);
        let mut b = b.fixed();
        let mut inputs = vec![Some(x)];
        for k in 0..if self.bias && !self.rms { 2 } else { 1 } {
            let size = |(&dim, is_one): (&usize, bool)| if is_one { 1 } else { dim };
            let dims: Vec<usize> = self.dims.iter().zip(self.ones[k]).map(size).skip(self.lead[k]).collect();
            inputs.push(Some(b.input(dtype, &dims, &Fill::Signed)));
        }
        let stash = if self.narrow_statistics { DType::BF16 } else { DType::F32 };
        let attrs = Attrs::new()
            .with("axis", self.axis)
            .with("epsilon", self.epsilon)
            .with("stash_type", i64::from(stash.to_onnx()));
        let y = b.node_with("", op, &inputs, if self.rms { 1 } else { 3 }, attrs);
        let mut results = vec![b.node("Mul", &[y[0], x], Attrs::new())];
        // Statistics in bfloat16 have 8 bits, too few for derivatives by differences.
        if !self.narrow_statistics {
            let to = Attrs::new().with("to", i64::from(dtype.to_onnx()));
            results.extend(y[1..].iter().map(|&value| b.node("Cast", &[value], to.clone())));
        }
        b.outputs(&results)
    }

    /// Returns true if the gradient has a plain ONNX form. It has no such form if the batch size is symbolic and a
    /// parameter has a batch axis: the parameter may broadcast or not.
    #[must_use]
    pub fn has_plain_gradient(&self) -> bool {
        !self.dynamic || (0..2).all(|k| self.lead[k] > 0 || self.ones[k][0])
    }
}

/// Compares a backend with the reference evaluator on one configuration. Gradients are compared only in float32 and
/// float64.
///
/// # Errors
/// Returns the first result that differs, or the error of the backend.
pub fn check(backend: &Arc<dyn Backend>, config: &Config, dtype: DType) -> Result<(), String> {
    check_backend(&config.case(dtype, true), backend, false)?;
    match dtype {
        DType::F32 | DType::F64 => check_backend(&config.case(dtype, false), backend, true),
        _ => Ok(()),
    }
}

/// Runs the comparison of [`check`] on a layer normalization.
///
/// # Errors
/// Returns the errors of [`check`].
pub fn check_layer(backend: &Arc<dyn Backend>, config: &LayerConfig, dtype: DType) -> Result<(), String> {
    check_backend(&config.case(dtype), backend, matches!(dtype, DType::F32 | DType::F64))
}

/// Runs [`check`] and [`check_layer`] on `count` deterministic configurations each.
#[must_use]
pub fn agree(backend: &Arc<dyn Backend>, count: usize) -> Report {
    let batches = samples((config(), 0..FLOATS.len()), count)
        .map(|(config, dtype)| check(backend, &config, FLOATS[dtype]));
    let layers = samples((layer_config(), 0..FLOATS.len()), count)
        .map(|(config, dtype)| check_layer(backend, &config, FLOATS[dtype]));
    batches.chain(layers).collect()
}
