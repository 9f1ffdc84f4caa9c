//! Fused operators of diffusion models and of T5, from ONNX Runtime's optimizer.
//!
//! `GroupNorm`, `SkipGroupNorm`, `BiasAdd`, `BiasSplitGelu`, `NhwcConv` and `RelativePositionBias` of `com.microsoft`,
//! version 1. All are compositions of operators of ONNX, so every float input has a gradient.
//!
//! If the attribute `channels_last` is not 0, the channels of an image are the last axis. For `NhwcConv` this is always
//! so, and its filter has the layout `[outputs, height, width, inputs]`, as ONNX Runtime's optimizer writes the filter.
//!
//! `RelativePositionBias` (Raffel et al. 2020, arXiv:1910.10683) puts distances of positions into buckets, exact for
//! small distances and logarithmic above. Its table has the declared shape `[buckets, heads]`, but its elements are in
//! the order of `[heads, buckets]`.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, ValueId};

use crate::OpError;
use crate::class::{Class, Traits};
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::{arithmetic_dtype, cast};
use crate::support::channels_last::Channels;
use crate::support::convolution::Conv;
use crate::support::quantization_grid::{emit, number, typed_input};
use crate::support::sizes::shape_of;

const MICROSOFT: &str = "com.microsoft";
const DEFAULT_EPSILON: f32 = 1e-5;

/// `GroupNorm` and `SkipGroupNorm`.
struct GroupNorm {
    is_channels_last: bool,
    groups: i64,
    epsilon: f32,
    applies_silu: bool,
    /// True for `SkipGroupNorm`.
    has_skip: bool,
}

const GAMMA: usize = 1;
const BETA: usize = 2;
const SKIP: usize = 3;
const BIAS: usize = 4;

impl GroupNorm {
    fn read(node: &Node) -> Result<GroupNorm, OpError> {
        let attrs = &node.attrs;
        let groups = Attrs::required("groups", attrs.int("groups")?)?;
        if groups < 1 {
            return Err(OpError::invalid(format!("groups must be positive, got {groups}")));
        }
        let applies_silu = match Attrs::required("activation", attrs.int("activation")?)? {
            0 => false,
            1 => true,
            other => return Err(OpError::invalid(format!("activation must be 0 or 1 (SiLU), got {other}"))),
        };
        Ok(GroupNorm {
            is_channels_last: attrs.int("channels_last")?.unwrap_or(1) != 0,
            groups,
            epsilon: attrs.float("epsilon")?.unwrap_or(DEFAULT_EPSILON),
            applies_silu,
            has_skip: &*node.op == "SkipGroupNorm",
        })
    }

    /// Returns the axis of the channels.
    fn channel_axis(&self, rank: usize) -> usize {
        if self.is_channels_last { rank - 1 } else { 1 }
    }
}

impl Op for GroupNorm {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let (least, most, outputs) = if self.has_skip { (4, 5, 2) } else { (3, 3, 1) };
        cx.check_arity(least, most, outputs)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype([0, SKIP, BIAS])?;
        cx.expect_dtype(GAMMA, "a float type", DType::is_float)?;
        cx.expect_same_dtype([GAMMA, BETA])?;
        if let Some(shape) = cx.shape(0) {
            if shape.rank() < 3 {
                return Err(OpError::invalid(format!(
                    "an input has shape {shape}, expected batch, channels and at least one spatial axis"
                )));
            }
            let channels = shape[self.channel_axis(shape.rank())].known();
            if channels.is_some_and(|channels| channels as i64 % self.groups != 0) {
                return Err(OpError::invalid(format!(
                    "an input of shape {shape} has {} channels, which cannot be divided into {} groups",
                    channels.unwrap_or_default(),
                    self.groups
                )));
            }
            for k in [GAMMA, BETA, BIAS] {
                if let (Some(own), Some(channels)) = (cx.shape(k), channels)
                    && own.concrete().is_some_and(|dims| dims != [channels])
                {
                    return Err(OpError::invalid(format!(
                        "input {k} has shape {own}, but [{channels}] is needed"
                    )));
                }
            }
        }
        cx.set_output(0, dtype, cx.shape(0).cloned());
        if self.has_skip {
            cx.set_output(1, dtype, cx.shape(0).cloned());
        }
        Ok(())
    }
}

fn decompose_group_norm(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = GroupNorm::read(rw.node())?;
    let (x, dtype) = typed_input(rw, 0)?;
    let rank = shape_of(rw, x, "the input")?.rank();
    let channel = op.channel_axis(rank);
    let mut sum = x;
    if op.has_skip {
        let skip = rw.required_input(SKIP)?;
        let flat = rw.shape(skip).map(Shape::rank) == Some(2);
        let spatial: Vec<i64> = (1..rank).filter(|&axis| axis != channel).map(|axis| axis as i64).collect();
        let skip = if flat {
            let axes = rw.ints("axes", &spatial);
            emit(rw, "Unsqueeze", &[skip, axes])
        } else {
            skip
        };
        sum = emit(rw, "Add", &[sum, skip]);
        if let Some(bias) = rw.input(BIAS) {
            let behind: Vec<i64> = (1..(rank - channel) as i64).collect();
            let bias = if behind.is_empty() {
                bias
            } else {
                let axes = rw.ints("axes", &behind);
                emit(rw, "Unsqueeze", &[bias, axes])
            };
            sum = emit(rw, "Add", &[sum, bias]);
        }
        if rw.has_output(1) {
            rw.replace_output(1, sum);
        }
    }
    // The scale may be wider than the image.
    let (gamma, of_gamma) = typed_input(rw, GAMMA)?;
    let (beta, _) = typed_input(rw, BETA)?;
    let wide = if of_gamma == dtype { dtype } else { arithmetic_dtype(dtype) };
    let mut value = cast(rw, sum, dtype, wide);
    let [gamma, beta] = [gamma, beta].map(|id| cast(rw, id, of_gamma, wide));
    if op.is_channels_last {
        value = Channels::ToSecondAxis.move_value(rw, value, rank);
    }
    let attrs = Attrs::new().with("num_groups", op.groups).with("epsilon", op.epsilon);
    value = rw.add("GroupNormalization", &[value, gamma, beta], attrs);
    if op.applies_silu {
        let share = emit(rw, "Sigmoid", &[value]);
        value = emit(rw, "Mul", &[value, share]);
    }
    if op.is_channels_last {
        value = Channels::ToLastAxis.move_value(rw, value, rank);
    }
    let value = cast(rw, value, wide, dtype);
    rw.replace_output(0, value);
    Ok(())
}

/// `BiasAdd`: `X + bias + skip`.
struct BiasAdd;

impl Op for BiasAdd {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 3, 1)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype(0..3)?;
        check_bias_of_last_axis(cx)?;
        let shape = cx.broadcast([0, 2])?;
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

/// Checks that input 1 has an element for each index of the last axis of input 0.
fn check_bias_of_last_axis(cx: &Infer<'_>) -> Result<(), OpError> {
    let (Some(x), Some(bias)) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    let differs =
        x.last().and_then(Dim::known).zip(bias.last().and_then(Dim::known)).is_some_and(|(a, b)| a != b);
    if x.rank() == 0 || bias.rank() != 1 || differs {
        return Err(OpError::invalid(format!(
            "the bias has shape {bias}, which does not fit an input of shape {x}"
        )));
    }
    Ok(())
}

fn decompose_bias_add(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let [x, bias, skip] = [rw.required_input(0)?, rw.required_input(1)?, rw.required_input(2)?];
    let sum = emit(rw, "Add", &[x, bias]);
    let sum = emit(rw, "Add", &[sum, skip]);
    rw.replace_output(0, sum);
    Ok(())
}

/// `BiasSplitGelu`: the left half of `X + bias` times the Gelu of the right half.
struct BiasSplitGelu;

impl Op for BiasSplitGelu {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype(0..2)?;
        check_bias_of_last_axis(cx)?;
        let mut shape = cx.shape(0).cloned();
        if let Some(shape) = &mut shape {
            let half = match shape.last().and_then(Dim::known) {
                Some(size) if size % 2 != 0 => {
                    return Err(OpError::invalid(format!("the last axis of shape {shape} cannot be halved")));
                }
                size => size.map_or_else(|| cx.unknown_dim(0, shape.rank() - 1), |size| Dim::Known(size / 2)),
            };
            *shape.0.last_mut().expect("checked with the bias") = half;
        }
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

fn decompose_split_gelu(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, bias) = (rw.required_input(0)?, rw.required_input(1)?);
    let sum = emit(rw, "Add", &[x, bias]);
    let attrs = Attrs::new().with("axis", -1i64).with("num_outputs", 2i64);
    let halves = rw.add_node("", "Split", &[Some(sum)], 2, attrs);
    let gate = emit(rw, "Gelu", &[halves[1]]);
    let result = emit(rw, "Mul", &[halves[0], gate]);
    rw.replace_output(0, result);
    Ok(())
}

/// `NhwcConv`: a convolution with the channels of image, filter and result behind.
struct NhwcConv(Conv);

impl Op for NhwcConv {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 3, 1)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype(0..3)?;
        let (Some(image), Some(filter)) = (cx.shape(0), cx.shape(1)) else {
            cx.set_output(0, dtype, None);
            return Ok(());
        };
        if image.rank() < 3 || image.rank() != filter.rank() {
            return Err(OpError::invalid(format!(
                "an image of shape {image} and a filter of shape {filter} must have the same number of axes, at least 3"
            )));
        }
        let [image, filter] = [image, filter].map(|shape| Channels::ToSecondAxis.move_shape(shape));
        let shape = self.0.shape_of_result(cx, &image, &filter)?;
        cx.set_output(0, dtype, Some(Channels::ToLastAxis.move_shape(&shape)));
        Ok(())
    }
}

fn decompose_nhwc(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (image, filter) = (rw.required_input(0)?, rw.required_input(1)?);
    let rank = shape_of(rw, image, "the image")?.rank();
    let factors = [image, filter].map(|value| Channels::ToSecondAxis.move_value(rw, value, rank));
    let mut inputs = factors.to_vec();
    inputs.extend(rw.input(2));
    let attrs = rw.attrs().clone();
    let result = rw.add("Conv", &inputs, attrs);
    let result = Channels::ToLastAxis.move_value(rw, result, rank);
    rw.replace_output(0, result);
    Ok(())
}

/// `RelativePositionBias`.
struct RelativePositionBias {
    max_distance: i64,
    is_bidirectional: bool,
}

impl RelativePositionBias {
    fn read(node: &Node) -> Result<RelativePositionBias, OpError> {
        let max_distance = Attrs::required("max_distance", node.attrs.int("max_distance")?)?;
        if max_distance < 2 {
            return Err(OpError::invalid(format!("max_distance must be at least 2, got {max_distance}")));
        }
        let is_bidirectional = node.attrs.int("is_bidirectional")?.unwrap_or(0) != 0;
        Ok(RelativePositionBias { max_distance, is_bidirectional })
    }
}

impl Op for RelativePositionBias {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 3, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        for k in [1, 2] {
            cx.expect_dtype(k, "int64", |dtype| dtype == DType::I64)?;
        }
        let heads = match cx.shape(0) {
            Some(table) if table.rank() != 2 => {
                return Err(OpError::invalid(format!(
                    "the table has shape {table}; [buckets, heads] is needed"
                )));
            }
            Some(table) => {
                let least = if self.is_bidirectional { 4 } else { 2 };
                if table[0].known().is_some_and(|buckets| buckets < least) {
                    return Err(OpError::invalid(format!(
                        "the table has shape {table}; at least {least} buckets are needed"
                    )));
                }
                table[1].clone()
            }
            None => cx.unknown_dim(0, 1),
        };
        let length = |cx: &Infer<'_>, k: usize| {
            let known =
                cx.ints(k).and_then(|ints| ints.first().copied()).and_then(|size| usize::try_from(size).ok());
            known.map_or_else(|| cx.unknown_dim(0, k + 1), Dim::Known)
        };
        let shape = [Dim::Known(1), heads, length(cx, 1), length(cx, 2)];
        cx.set_output(0, dtype, Some(shape.into_iter().collect()));
        Ok(())
    }
}

fn decompose_position_bias(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = RelativePositionBias::read(rw.node())?;
    let table = rw.required_input(0)?;
    let dims = rw.dims(table).ok_or_else(|| OpError::unsupported("the shape of the table must be known"))?;
    let (buckets, heads) = (dims[0], dims[1]);
    let transposed = rw.ints("transposed", &[heads as i64, buckets as i64]);
    let table = emit(rw, "Reshape", &[table, transposed]);
    let (zero, one) = (number(rw, DType::I64, 0.0), number(rw, DType::I64, 1.0));
    let positions = |rw: &mut Rewrite<'_>, k: usize, axis: i64| -> Result<ValueId, OpError> {
        let scalar = rw.ints("scalar", &[]);
        let length = rw.required_input(k)?;
        let length = emit(rw, "Reshape", &[length, scalar]);
        let positions = emit(rw, "Range", &[zero, length, one]);
        let axis = rw.ints("axis", &[axis]);
        Ok(emit(rw, "Unsqueeze", &[positions, axis]))
    };
    let (queries, keys) = (positions(rw, 1, 1)?, positions(rw, 2, 0)?);
    let distance = emit(rw, "Sub", &[keys, queries]);
    // Half of the buckets are for keys behind the query, or none.
    let sides = if op.is_bidirectional { buckets / 2 } else { buckets };
    let (offset, distance) = if op.is_bidirectional {
        let is_after = emit(rw, "Greater", &[distance, zero]);
        let half = number(rw, DType::I64, sides as f64);
        (Some(emit(rw, "Where", &[is_after, half, zero])), emit(rw, "Abs", &[distance]))
    } else {
        let backward = emit(rw, "Neg", &[distance]);
        (None, emit(rw, "Max", &[backward, zero]))
    };
    let exact = sides / 2;
    let limit = number(rw, DType::I64, exact as f64);
    let is_exact = emit(rw, "Less", &[distance, limit]);
    // exact + log(distance / exact) / log(max_distance / exact) * (sides - exact), truncated
    let far = emit(rw, "Max", &[distance, limit]);
    let far = cast(rw, far, DType::I64, DType::F32);
    let start = number(rw, DType::F32, exact as f64);
    let ratio = emit(rw, "Div", &[far, start]);
    let logarithm = emit(rw, "Log", &[ratio]);
    let span = number(rw, DType::F32, f64::from((op.max_distance as f32 / exact as f32).ln()));
    let share = emit(rw, "Div", &[logarithm, span]);
    let steps = number(rw, DType::F32, (sides - exact) as f64);
    let steps = emit(rw, "Mul", &[share, steps]);
    let steps = cast(rw, steps, DType::F32, DType::I64);
    let coarse = emit(rw, "Add", &[steps, limit]);
    let last = number(rw, DType::I64, sides as f64 - 1.0);
    let coarse = emit(rw, "Min", &[coarse, last]);
    let mut bucket = emit(rw, "Where", &[is_exact, distance, coarse]);
    if let Some(offset) = offset {
        bucket = emit(rw, "Add", &[bucket, offset]);
    }
    let chosen = rw.add("Gather", &[table, bucket], Attrs::new().with("axis", 1i64));
    let batch = rw.ints("batch", &[0]);
    let result = emit(rw, "Unsqueeze", &[chosen, batch]);
    rw.replace_output(0, result);
    Ok(())
}

fn build_group_norm(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(GroupNorm::read(node)?))
}

fn build_position_bias(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(RelativePositionBias::read(node)?))
}

type Inputs = &'static [(DType, &'static [usize])];

fn sample_group_norm(definition: &Definition) -> Sample {
    const IMAGE: (DType, &[usize]) = (DType::F32, &[1, 2, 2, 2]);
    const CHANNELS: (DType, &[usize]) = (DType::F32, &[2]);
    const INPUTS: Inputs = &[IMAGE, CHANNELS, CHANNELS, IMAGE];
    let inputs = if definition.name == "SkipGroupNorm" { INPUTS } else { &INPUTS[..3] };
    Sample::with_inputs(Attrs::new().with("groups", 1i64).with("activation", 0i64), inputs)
}

fn sample_bias(definition: &Definition) -> Sample {
    const INPUTS: Inputs = &[(DType::F32, &[2, 2, 2]), (DType::F32, &[2]), (DType::F32, &[2, 2, 2])];
    Sample::with_inputs(Attrs::new(), if definition.name == "BiasAdd" { INPUTS } else { &INPUTS[..2] })
}

fn sample_nhwc(_: &Definition) -> Sample {
    const INPUTS: Inputs = &[(DType::F32, &[1, 2, 2, 1]), (DType::F32, &[1, 2, 2, 1])];
    Sample::with_inputs(Attrs::new(), INPUTS)
}

fn sample_position_bias(_: &Definition) -> Sample {
    const INPUTS: Inputs = &[(DType::F32, &[4, 2]), (DType::I64, &[1]), (DType::I64, &[1])];
    Sample::with_inputs(Attrs::new().with("max_distance", 8i64), INPUTS)
}

pub(crate) fn definitions() -> Vec<Definition> {
    let new = |name: &'static str, build| Definition::new(MICROSOFT, name, &[1], build);
    let of_group_norm = |name: &'static str| {
        new(name, build_group_norm)
            .composition(decompose_group_norm)
            .sample(sample_group_norm)
            .class(Class::Normalization { scale: GAMMA, bias: Some(BETA), of_instances: false })
            .weights(&[GAMMA, BETA])
    };
    vec![
        of_group_norm("GroupNorm"),
        of_group_norm("SkipGroupNorm"),
        new("BiasAdd", |_, _| Ok(Box::new(BiasAdd)))
            .composition(decompose_bias_add)
            .sample(sample_bias)
            .weights(&[1]),
        new("BiasSplitGelu", |_, _| Ok(Box::new(BiasSplitGelu)))
            .composition(decompose_split_gelu)
            .sample(sample_bias)
            .weights(&[1]),
        new("NhwcConv", |_, node| Ok(Box::new(NhwcConv(Conv::read(node)?))))
            .composition(decompose_nhwc)
            .sample(sample_nhwc)
            .class(Class::Convolution)
            .traits(Traits::UNBOUNDED)
            .weights(&[1, 2]),
        new("RelativePositionBias", build_position_bias)
            .composition(decompose_position_bias)
            .sample(sample_position_bias)
            .weights(&[0]),
    ]
}
