//! Pooling over random combinations of attributes: gradients against central differences, every backend against the
//! reference evaluator, gradients in plain ONNX, and absurd attributes.

mod common;
#[path = "common/outcome.rs"]
mod outcome;

use common::every_level;
use ortrain_graph::{Attrs, DType, Dim, Shape, Tensor, ValueType};
use ortrain_ops::{Role, Specialiser};
use ortrain_testkit::{Case, CaseBuilder, Fill, check_backend, check_gradient, check_standard};
use outcome::passes;
use proptest::prelude::*;
use proptest::sample::select;

const MAX: &str = "MaxPool";
const AVERAGE: &str = "AveragePool";
const GLOBAL: [&str; 2] = ["GlobalMaxPool", "GlobalAveragePool"];
const AUTO_PAD: [&str; 4] = ["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"];

/// One spatial axis.
#[derive(Clone, Debug)]
struct Axis {
    kernel: usize,
    stride: usize,
    dilation: usize,
    pads: [usize; 2],
    /// Positions beyond the fewest that a window needs.
    more: usize,
}

/// Sizes and attributes.
#[derive(Clone, Debug)]
struct Config {
    lead: [usize; 2],
    axes: Vec<Axis>,
    auto_pad: usize,
    ceil: bool,
    /// `count_include_pad`, or `storage_order`.
    other: bool,
    /// Axes whose sizes are named instead of given.
    named: [bool; 5],
}

fn axis() -> impl Strategy<Value = Axis> {
    (1..4usize, 1..4usize, 1..3usize, [0..3usize, 0..3usize], 0..4usize)
        .prop_map(|(kernel, stride, dilation, pads, more)| Axis { kernel, stride, dilation, pads, more })
}

fn config() -> impl Strategy<Value = Config> {
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
    /// The same with windows that cover at least one element each: of none there is no largest.
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
            let least = if self.auto_pad > 1 { 1 } else { reach.saturating_sub(padding).max(1) };
            least + axis.more
        };
        self.lead.into_iter().chain(self.axes.iter().map(size)).collect()
    }

    /// One node; of MaxPool `outputs` may be 2.
    fn case(&self, op: &str, dtype: DType, outputs: usize) -> Case {
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

    /// The gradient operator that training graphs have, on its own: in narrow floats a loss would be mostly rounding.
    fn gradient_operator(&self, dtype: DType) -> Case {
        let config = Config { named: [false; 5], other: false, ..self.covering() };
        let dims = config.dims();
        let mut b = CaseBuilder::new("MaxPoolGrad", &format!("{config:?}"));
        let x = b.input(dtype, &dims, &distinct(dims.iter().product(), dtype));
        let pooled = b.node_with("", MAX, &[Some(x)], 2, config.attrs(MAX));
        // What arrives is the result itself.
        let inputs = [Some(pooled[0]), Some(pooled[1])];
        let y = b.node_with("", "MaxPoolGrad", &inputs, 1, config.attrs(MAX));
        b.outputs(&y)
    }
}

/// Numbers that differ by more than the steps of central differences (in types that have room for it), without a
/// pattern.
fn distinct(count: usize, dtype: DType) -> Fill {
    const PRIME: usize = 8191;
    let scale = if dtype.is_float() { 4.0 } else { 100.0 };
    let value = |k: usize| scale * ((k * 2999 + 17) % PRIME) as f64 / PRIME as f64;
    Fill::Exactly((0..count).map(value).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gradients_are_those_of_central_differences(config in config()) {
        for op in [MAX, AVERAGE, GLOBAL[0], GLOBAL[1]] {
            passes(check_gradient(&config.case(op, DType::F32, 1)).map(|points| assert!(points > 0)))?;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gradients_in_plain_onnx_are_the_same(config in config()) {
        for op in [MAX, AVERAGE, GLOBAL[0], GLOBAL[1]] {
            passes(check_standard(&config.case(op, DType::F32, 1)))?;
        }
    }

    #[test]
    fn every_backend_agrees(config in config(), dtype in select(DType::ALL.to_vec())) {
        for backend in every_level() {
            if dtype != DType::Bool {
                passes(check_backend(&config.case(MAX, dtype, 2), &backend, false))?;
            }
            if !dtype.is_float() {
                continue;
            }
            for op in [MAX, AVERAGE, GLOBAL[0], GLOBAL[1]] {
                let gradients = matches!(dtype, DType::F32 | DType::F64);
                passes(check_backend(&config.case(op, dtype, 1), &backend, gradients))?;
            }
            passes(check_backend(&config.gradient_operator(dtype), &backend, false))?;
        }
    }
}

/// Numbers for attributes, of which some are far out.
const WILD: [i64; 18] =
    [-1, 0, 0, 1, 1, 1, 1, 2, 2, 3, 5, 7, 1 << 20, 1 << 31, 1 << 40, 1 << 62, i64::MAX, i64::MIN];

const LISTS: [&str; 4] = ["strides", "dilations", "pads", "kernel_shape"];

/// More elements than this are not made for a test.
const MOST: usize = 1 << 16;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the attributes say, there is an answer or a sentence: for shapes, instructions, gradients, and those
    /// in plain ONNX.
    #[test]
    fn wild_attributes_are_answered(
        config in config(),
        max: bool,
        changes in prop::collection::vec((0..LISTS.len(), prop::collection::vec(select(&WILD[..]), 1..7)), 0..3),
        like_axes: bool,
    ) {
        let mut case = config.case(if max { MAX } else { AVERAGE }, DType::F32, 1);
        for (k, mut list) in changes {
            let name = LISTS[k];
            if like_axes {
                let fitting = config.axes.len() * if name == "pads" { 2 } else { 1 };
                list = list.iter().copied().cycle().take(fitting).collect();
            }
            let attrs = &mut case.graph.nodes[0].attrs;
            *attrs = attrs.clone().with(name, list);
        }
        let mut graph = case.graph.clone();
        if ortrain_ops::passes::infer::infer(&mut graph).is_err() {
            return Ok(());
        }
        // The size of the result, were all sizes given.
        let mut given = case.graph.clone();
        given.value_mut(given.inputs[0]).ty = ValueType::tensor(DType::F32, case.inputs[0].dims());
        if ortrain_ops::passes::infer::infer(&mut given).is_err() {
            return Ok(());
        }
        let dims = given.value(given.outputs[0]).ty.shape().and_then(Shape::concrete).expect("all are given");
        if dims.iter().product::<usize>() > MOST {
            return Ok(());
        }
        let roles = |graph: &ortrain_graph::Graph| vec![Role::User; graph.inputs.len()];
        let forward = Specialiser::new(graph.clone(), roles(&graph)).schedule(&case.inputs);
        prop_assert!(forward.is_ok(), "{:?}", forward.err());
        let seed = graph.add_value("seed", ValueType::tensor(DType::F32, &dims));
        graph.inputs.push(seed);
        let (output, targets) = (graph.outputs[0], [graph.inputs[0]]);
        let found = ortrain_ops::passes::differentiate::backpropagate(&mut graph, &[(output, seed)], &targets);
        let Ok(found) = found else { return Ok(()) };
        graph.outputs = found.into_iter().flatten().collect();
        let mut given = case.inputs.clone();
        given.push(Tensor::zeros(DType::F32, dims).expect("not too many"));
        // Where sizes are known, what was promised is kept; where they are not, sizes may turn out too large.
        let all_known = config.named == [false; 5];
        let made = Specialiser::new(graph.clone(), roles(&graph)).schedule(&given);
        prop_assert!(made.is_ok() || !all_known, "{:?}", made.err());
        if ortrain_ops::passes::decompose::standardise(&mut graph).is_ok() {
            let made = Specialiser::new(graph.clone(), roles(&graph)).schedule(&given);
            prop_assert!(made.is_ok() || !all_known, "{:?}", made.err());
        }
    }
}
