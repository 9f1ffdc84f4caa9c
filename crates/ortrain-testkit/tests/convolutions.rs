//! Convolutions over random combinations of attributes: gradients against central differences, every backend against
//! the reference evaluator, gradients in plain ONNX.

mod common;
#[path = "common/outcome.rs"]
mod outcome;

use std::sync::Arc;

use common::every_level;
use ortrain_graph::{Attrs, DType, Tensor};
use ortrain_ops::{Role, Specialiser};
use ortrain_program::Reference;
use ortrain_testkit::{Case, CaseBuilder, Fill, check_backend, check_gradient, check_standard, run};
use outcome::passes;
use proptest::prelude::*;

/// One spatial axis.
#[derive(Clone, Debug)]
struct Axis {
    kernel: usize,
    stride: usize,
    dilation: usize,
    pads: [usize; 2],
    /// Positions beyond the fewest that a window needs; for a transposed convolution, positions.
    more: usize,
    output_padding: usize,
}

/// Sizes and attributes.
#[derive(Clone, Debug)]
struct Config {
    batch: usize,
    groups: usize,
    /// Channels of a group, of image and features.
    channels: [usize; 2],
    axes: Vec<Axis>,
    auto_pad: usize,
    /// Whether a transposed convolution is told the size of its result.
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

fn config() -> impl Strategy<Value = Config> {
    let channels = [1..4usize, 1..4usize];
    let axes = prop::collection::vec(axis(), 1..4);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (1..3usize, 1..4usize, channels, axes, 0..6usize, flags).prop_map(
        |(batch, groups, channels, axes, auto_pad, (output_shape, bias, dynamic))| Config {
            batch,
            // The reference evaluator takes its time.
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

    fn conv(&self, dtype: DType) -> Case {
        let size = |axis: &Axis| {
            let reach = (axis.kernel - 1) * axis.dilation + 1;
            let padding = if self.auto_pad == 0 { axis.pads[0] + axis.pads[1] } else { 0 };
            let least = if self.auto_pad > 1 { 1 } else { reach.saturating_sub(padding).max(1) };
            least + axis.more
        };
        let [from, to] = self.channels.map(|count| count * self.groups);
        let image = self.dims([self.batch, from], size);
        let filter = self.dims([to, self.channels[0]], |axis| axis.kernel);
        self.case("Conv", dtype, &image, &filter, to, self.attrs())
    }

    fn transposed(&self, dtype: DType) -> Case {
        let mut axes = self.axes.clone();
        for axis in &mut axes {
            let whole = axis.stride * axis.more + (axis.kernel - 1) * axis.dilation + 1 + axis.output_padding;
            if axis.pads[0] + axis.pads[1] >= whole {
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

/// The gradient operator of a case's one node, on its own: in narrow floats a loss would be mostly rounding.
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gradients_are_those_of_central_differences(config in config()) {
        for case in [config.conv(DType::F32), config.transposed(DType::F32)] {
            passes(check_gradient(&case).map(|points| assert!(points > 0)))?;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gradients_in_plain_onnx_are_the_same(config in config()) {
        for case in [config.conv(DType::F32), config.transposed(DType::F32)] {
            passes(check_standard(&case))?;
        }
    }

    #[test]
    fn every_backend_agrees(config in config(), dtype in 0..4usize) {
        let dtype = [DType::F32, DType::F64, DType::F16, DType::BF16][dtype];
        for case in [config.conv(dtype), config.transposed(dtype)] {
            for backend in every_level() {
                passes(check_backend(&case, &backend, matches!(dtype, DType::F32 | DType::F64)))?;
                passes(check_backend(&gradient_operator(&case), &backend, false))?;
            }
        }
    }
}

/// Numbers for attributes, of which some are far out.
const WILD: [i64; 18] =
    [-1, 0, 0, 1, 1, 1, 1, 2, 2, 3, 5, 7, 1 << 20, 1 << 31, 1 << 40, 1 << 62, i64::MAX, i64::MIN];

/// Lists of attributes, and numbers to put into them.
fn changes() -> impl Strategy<Value = Vec<(usize, Vec<i64>)>> {
    prop::collection::vec(
        (0..LISTS.len(), prop::collection::vec(prop::sample::select(&WILD[..]), 1..7)),
        0..3,
    )
}

const LISTS: [&str; 7] =
    ["strides", "dilations", "pads", "kernel_shape", "output_padding", "output_shape", "group"];

/// More elements than this are not made for a test.
const MOST: usize = 1 << 16;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the attributes say, there is an answer or a sentence: for shapes, instructions, gradients, and those
    /// in plain ONNX.
    #[test]
    fn wild_attributes_are_answered(config in config(), changes in changes(), transposed: bool, like_axes: bool) {
        let mut case = if transposed { config.transposed(DType::F32) } else { config.conv(DType::F32) };
        for (k, mut list) in changes {
            let name = LISTS[k];
            if like_axes {
                let fitting = config.axes.len() * if name == "pads" { 2 } else { 1 };
                list = list.iter().copied().cycle().take(fitting).collect();
            }
            let attrs = &mut case.graph.nodes[0].attrs;
            *attrs = match name {
                "group" => attrs.clone().with(name, list[0]),
                _ => attrs.clone().with(name, list),
            };
        }
        let mut graph = case.graph.clone();
        if ortrain_ops::passes::infer::infer(&mut graph).is_err() {
            return Ok(());
        }
        let roles = |graph: &ortrain_graph::Graph| vec![Role::User; graph.inputs.len()];
        let forward = Specialiser::new(graph.clone(), roles(&graph)).schedule(&case.inputs);
        let Ok(forward) = forward else { return Ok(()) };
        let program = forward.single().expect("one program");
        let dims: Vec<usize> = forward.slots[forward.outputs[0].0 as usize].ty.as_ref().expect("known").1.clone();
        prop_assert!(program.instructions.len() <= 1);
        if dims.iter().product::<usize>() > MOST {
            return Ok(());
        }
        let seed = graph.add_value("seed", ortrain_graph::ValueType::tensor(DType::F32, &dims));
        graph.inputs.push(seed);
        let (output, targets) = (graph.outputs[0], graph.inputs[..2].to_vec());
        let found = ortrain_ops::passes::differentiate::backpropagate(&mut graph, &[(output, seed)], &targets);
        let Ok(found) = found else { return Ok(()) };
        graph.outputs = found.into_iter().flatten().collect();
        let mut given = case.inputs.clone();
        given.push(Tensor::zeros(DType::F32, dims).expect("not too many"));
        let made = Specialiser::new(graph.clone(), roles(&graph)).schedule(&given);
        prop_assert!(made.is_ok(), "{:?}", made.err());
        if ortrain_ops::passes::decompose::standardise(&mut graph).is_ok() {
            let made = Specialiser::new(graph.clone(), roles(&graph)).schedule(&given);
            prop_assert!(made.is_ok(), "{:?}", made.err());
        }
    }
}
