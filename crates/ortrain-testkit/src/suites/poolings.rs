//! Tests of pooling operators with random shapes and attributes, on a backend and on the reference evaluator.

use std::sync::Arc;

use ortrain_graph::{Attrs, DType, Dim, Shape, ValueType};
use ortrain_program::Backend;
use proptest::prelude::*;
use proptest::sample::select;

use super::{Report, samples};
use crate::{Case, CaseBuilder, Fill, check_backend};

/// Max pooling operator.
pub const MAX: &str = "MaxPool";
/// Average pooling operator.
pub const AVERAGE: &str = "AveragePool";
/// Global pooling operators.
pub const GLOBAL: [&str; 2] = ["GlobalMaxPool", "GlobalAveragePool"];
const AUTO_PAD: [&str; 4] = ["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"];

/// Attributes of a spatial axis.
#[derive(Clone, Debug)]
struct Axis {
    kernel: usize,
    stride: usize,
    dilation: usize,
    pads: [usize; 2],
    /// Number of input elements in addition to the minimum for one window.
    more: usize,
}

/// Sizes and attributes of a pooling node.
#[derive(Clone, Debug)]
pub struct Config {
    /// Batch size and number of channels.
    lead: [usize; 2],
    axes: Vec<Axis>,
    /// Index in `AUTO_PAD`.
    auto_pad: usize,
    ceil: bool,
    /// `storage_order` of max pooling, `count_include_pad` of average pooling.
    other: bool,
    /// True for each axis, also of batch and channels, with a symbolic size.
    named: [bool; 5],
}

fn axis() -> impl Strategy<Value = Axis> {
    (1..4usize, 1..4usize, 1..3usize, [0..3usize, 0..3usize], 0..4usize)
        .prop_map(|(kernel, stride, dilation, pads, more)| Axis { kernel, stride, dilation, pads, more })
}

/// Returns a strategy for random configurations.
pub fn config() -> impl Strategy<Value = Config> {
    let named = prop_oneof![Just([false; 5]), any::<[bool; 5]>()];
    let lead = [1..3usize, 1..3usize];
    (lead, prop::collection::vec(axis(), 1..4), 0..6usize, any::<[bool; 2]>(), named).prop_map(
        |(lead, axes, auto_pad, [ceil, other], named)| Config {
            lead,
            axes,
            auto_pad: auto_pad.saturating_sub(2),
            ceil,
            other,
            named,
        },
    )
}

impl Config {
    /// Returns the number of spatial axes.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.axes.len()
    }

    /// Returns true if the sizes of all axes are known.
    #[must_use]
    pub fn has_known_sizes(&self) -> bool {
        self.named == [false; 5]
    }

    /// Returns the configuration with windows that cover at least one element each: an empty window has no
    /// maximum.
    fn covering(&self) -> Config {
        let mut config = self.clone();
        for axis in &mut config.axes {
            axis.pads = axis.pads.map(|pad| pad.min(axis.kernel - 1));
            if axis.dilation > 1 {
                axis.more += axis.kernel * axis.dilation;
            }
        }
        config
    }

    fn list(&self, value: impl Fn(&Axis) -> usize) -> Vec<i64> {
        self.axes.iter().map(|axis| value(axis) as i64).collect()
    }

    fn attrs(&self, op: &str) -> Attrs {
        if GLOBAL.contains(&op) {
            return Attrs::new();
        }
        let other = if op == MAX { "storage_order" } else { "count_include_pad" };
        let attrs = Attrs::new()
            .with("kernel_shape", self.list(|axis| axis.kernel))
            .with("strides", self.list(|axis| axis.stride))
            .with("dilations", self.list(|axis| axis.dilation))
            .with("auto_pad", AUTO_PAD[self.auto_pad])
            .with("ceil_mode", i64::from(self.ceil))
            .with(other, i64::from(self.other));
        if self.auto_pad > 0 {
            return attrs;
        }
        attrs.with("pads", [self.list(|axis| axis.pads[0]), self.list(|axis| axis.pads[1])].concat())
    }

    fn dims(&self) -> Vec<usize> {
        let size = |axis: &Axis| {
            let reach = (axis.kernel - 1) * axis.dilation + 1;
            let padding = if self.auto_pad == 0 { axis.pads[0] + axis.pads[1] } else { 0 };
            let min_input = if self.auto_pad > 1 { 1 } else { reach.saturating_sub(padding).max(1) };
            min_input + axis.more
        };
        self.lead.into_iter().chain(self.axes.iter().map(size)).collect()
    }

    /// Builds a case of one node; for MaxPool, `outputs` may be 2.
    #[must_use]
    pub fn case(&self, op: &str, dtype: DType, outputs: usize) -> Case {
        let config = if op == MAX { self.covering() } else { self.clone() };
        let dims = config.dims();
        let mut b = CaseBuilder::new(op, &format!("{config:?}"));
        let x = b.input(dtype, &dims, &distinct(dims.iter().product(), dtype));
        let y = b.node_with("", op, &[Some(x)], outputs, config.attrs(op));
        let mut case = b.outputs(&y);
        let shape: Shape = dims
            .iter()
            .zip(self.named)
            .enumerate()
            .map(
                |(axis, (&size, named))| {
                    if named { Dim::symbol(&format!("s{axis}")) } else { Dim::Known(size) }
                },
            )
            .collect();
        case.graph.value_mut(x).ty = ValueType::Tensor(dtype, Some(shape));
        case
    }

    /// Builds a case of `MaxPoolGrad`, the gradient operator in training graphs. The other cases test gradients
    /// through a loss, which in narrow floats would consist mostly of rounding errors.
    #[must_use]
    pub fn gradient_operator(&self, dtype: DType) -> Case {
        let config = Config { named: [false; 5], other: false, ..self.covering() };
        let dims = config.dims();
        let mut b = CaseBuilder::new("MaxPoolGrad", &format!("{config:?}"));
        let x = b.input(dtype, &dims, &distinct(dims.iter().product(), dtype));
        let pooled = b.node_with("", MAX, &[Some(x)], 2, config.attrs(MAX));
        // The pooled values serve as the incoming gradient.
        let inputs = [Some(pooled[0]), Some(pooled[1])];
        let y = b.node_with("", "MaxPoolGrad", &inputs, 1, config.attrs(MAX));
        b.outputs(&y)
    }
}

/// Returns pseudorandom numbers. If the type permits, they differ by more than the step of central differences:
/// a step does not move the maximum of a window.
fn distinct(count: usize, dtype: DType) -> Fill {
    const PRIME: usize = 8191;
    let scale = if dtype.is_float() { 4.0 } else { 100.0 };
    let value = |k: usize| scale * ((k * 2999 + 17) % PRIME) as f64 / PRIME as f64;
    Fill::Exactly((0..count).map(value).collect())
}

/// Compares a backend with the reference evaluator, forward and backward, on one configuration.
///
/// # Errors
/// Returns the first result that differs, or the error of the backend.
pub fn check(backend: &Arc<dyn Backend>, config: &Config, dtype: DType) -> Result<(), String> {
    if dtype != DType::Bool {
        check_backend(&config.case(MAX, dtype, 2), backend, false)?;
    }
    if !dtype.is_float() {
        return Ok(());
    }
    for op in [MAX, AVERAGE, GLOBAL[0], GLOBAL[1]] {
        let gradients = matches!(dtype, DType::F32 | DType::F64);
        check_backend(&config.case(op, dtype, 1), backend, gradients)?;
    }
    check_backend(&config.gradient_operator(dtype), backend, false)
}

/// Runs [`check`] on `count` deterministic configurations.
#[must_use]
pub fn agree(backend: &Arc<dyn Backend>, count: usize) -> Report {
    samples((config(), select(DType::ALL.to_vec())), count)
        .map(|(config, dtype)| check(backend, &config, dtype))
        .collect()
}
