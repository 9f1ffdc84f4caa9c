//! Convolutions with random combinations of attributes.

use std::sync::Arc;

use ortrain_graph::{Attrs, DType};
use ortrain_program::{Backend, Reference};
use proptest::prelude::*;

use super::{FLOATS, Report, samples};
use crate::{Case, CaseBuilder, Fill, check_backend, run};

/// A spatial axis.
#[derive(Clone, Debug)]
struct Axis {
    kernel: usize,
    stride: usize,
    dilation: usize,
    pads: [usize; 2],
    /// Positions in addition to the minimum of a window; for a transposed convolution, number of positions.
    more: usize,
    output_padding: usize,
}

/// Sizes and attributes.
#[derive(Clone, Debug)]
pub struct Config {
    batch: usize,
    groups: usize,
    /// Channels per group, of image and features.
    channels: [usize; 2],
    axes: Vec<Axis>,
    auto_pad: usize,
    /// True if the output size of a transposed convolution is specified.
    output_shape: bool,
    bias: bool,
    dynamic: bool,
}

const AUTO_PAD: [&str; 4] = ["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"];

fn axis() -> impl Strategy<Value = Axis> {
    (1..4usize, 1..4usize, 1..3usize, [0..3usize, 0..3usize], 0..4usize, 0..3usize).prop_map(
        |(kernel, stride, dilation, pads, more, output_padding)| Axis {
            kernel,
            stride,
            dilation,
            pads,
            more,
            output_padding: output_padding.min(stride - 1),
        },
    )
}

/// Any configuration.
pub fn config() -> impl Strategy<Value = Config> {
    let channels = [1..4usize, 1..4usize];
    let axes = prop::collection::vec(axis(), 1..4);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (1..3usize, 1..4usize, channels, axes, 0..6usize, flags).prop_map(
        |(batch, groups, channels, axes, auto_pad, (output_shape, bias, dynamic))| Config {
            batch,
            // The reference evaluator is slow.
            groups: if axes.len() > 2 { groups.min(2) } else { groups },
            channels: if axes.len() > 2 { channels.map(|count| count.min(2)) } else { channels },
            axes,
            auto_pad: auto_pad.saturating_sub(2),
            output_shape: output_shape && auto_pad == 1,
            bias,
            dynamic,
        },
    )
}

impl Config {
    /// Returns the number of spatial axes.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.axes.len()
    }

    fn list(&self, value: impl Fn(&Axis) -> usize) -> Vec<i64> {
        self.axes.iter().map(|axis| value(axis) as i64).collect()
    }

    fn attrs(&self) -> Attrs {
        let attrs = Attrs::new()
            .with("group", self.groups as i64)
            .with("strides", self.list(|axis| axis.stride))
            .with("dilations", self.list(|axis| axis.dilation))
            .with("auto_pad", AUTO_PAD[self.auto_pad]);
        if self.auto_pad > 0 {
            return attrs;
        }
        attrs.with("pads", [self.list(|axis| axis.pads[0]), self.list(|axis| axis.pads[1])].concat())
    }

    fn dims(&self, lead: [usize; 2], size: impl Fn(&Axis) -> usize) -> Vec<usize> {
        lead.into_iter().chain(self.axes.iter().map(size)).collect()
    }

    fn case(
        &self,
        op: &str,
        dtype: DType,
        image: &[usize],
        filter: &[usize],
        bias: usize,
        attrs: Attrs,
    ) -> Case {
        let mut b = CaseBuilder::new(op, &format!("{self:?}"));
        if self.dynamic {
            b = b.dynamic();
        }
        let x = b.input(dtype, image, &Fill::Positive);
        let mut b = b.fixed();
        let mut inputs = vec![x, b.input(dtype, filter, &Fill::Positive)];
        if self.bias {
            inputs.push(b.input(dtype, &[bias], &Fill::Positive));
        }
        let y = b.node(op, &inputs, attrs);
        b.outputs(&[y])
    }

    /// Builds a convolution.
    #[must_use]
    pub fn conv(&self, dtype: DType) -> Case {
        let size = |axis: &Axis| {
            let reach = (axis.kernel - 1) * axis.dilation + 1;
            let padding = if self.auto_pad == 0 { axis.pads[0] + axis.pads[1] } else { 0 };
            let min_input = if self.auto_pad > 1 { 1 } else { reach.saturating_sub(padding).max(1) };
            min_input + axis.more
        };
        let [from, to] = self.channels.map(|count| count * self.groups);
        let image = self.dims([self.batch, from], size);
        let filter = self.dims([to, self.channels[0]], |axis| axis.kernel);
        self.case("Conv", dtype, &image, &filter, to, self.attrs())
    }

    /// Builds a transposed convolution.
    #[must_use]
    pub fn transposed(&self, dtype: DType) -> Case {
        let mut axes = self.axes.clone();
        for axis in &mut axes {
            let total = axis.stride * axis.more + (axis.kernel - 1) * axis.dilation + 1 + axis.output_padding;
            if axis.pads[0] + axis.pads[1] >= total {
                axis.pads = [0, 0];
            }
        }
        let config = Config { axes, ..self.clone() };
        let mut attrs = config.attrs().with("output_padding", config.list(|axis| axis.output_padding));
        if self.output_shape {
            attrs =
                attrs.with("output_shape", config.list(|axis| 1 + axis.kernel * (axis.more + axis.stride)));
        }
        let [to, from] = self.channels.map(|count| count * self.groups);
        let features = config.dims([self.batch, from], |axis| axis.more + 1);
        let filter = config.dims([from, self.channels[0]], |axis| axis.kernel);
        config.case("ConvTranspose", dtype, &features, &filter, to, attrs)
    }
}

/// Builds a case of the gradient operator of a case's only node: in narrow floats, a loss would be mostly
/// rounding errors.
fn gradient_operator(case: &Case) -> Case {
    let node = &case.graph.nodes[0];
    let result = run(&case.graph, &case.inputs, Arc::new(Reference)).expect("it runs").remove(0);
    let name = format!("{}Grad", node.op);
    let mut b = CaseBuilder::new(&name, &case.name);
    let mut input = |dims: &[usize]| Some(b.input(result.dtype(), dims, &Fill::Positive));
    let inputs = [result.dims(), case.inputs[0].dims(), case.inputs[1].dims()].map(&mut input);
    let outputs = b.node_with("com.microsoft", &name, &inputs, 3, node.attrs.clone());
    b.outputs(&outputs)
}

/// Compares a backend with the reference evaluator, forward and backward, on one configuration.
///
/// # Errors
/// The first result that differs, or the error of the backend.
pub fn check(backend: &Arc<dyn Backend>, config: &Config, dtype: DType) -> Result<(), String> {
    for case in [config.conv(dtype), config.transposed(dtype)] {
        check_backend(&case, backend, matches!(dtype, DType::F32 | DType::F64))?;
        check_backend(&gradient_operator(&case), backend, false)?;
    }
    Ok(())
}

/// Runs [`check`] on `count` deterministic configurations.
#[must_use]
pub fn agree(backend: &Arc<dyn Backend>, count: usize) -> Report {
    samples((config(), 0..FLOATS.len()), count)
        .map(|(config, dtype)| check(backend, &config, FLOATS[dtype]))
        .collect()
}
