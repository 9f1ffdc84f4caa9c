//! Normalizations that run as compositions: per channel, per group of channels, over axes, or by a norm.
//!
//! InstanceNormalization-6, 22 (<https://onnx.ai/onnx/operators/onnx__InstanceNormalization.html>),
//! GroupNormalization-18, 21 (<https://onnx.ai/onnx/operators/onnx__GroupNormalization.html>),
//! MeanVarianceNormalization-9, 13 (<https://onnx.ai/onnx/operators/onnx__MeanVarianceNormalization.html>) and
//! LpNormalization-1, 22 (<https://onnx.ai/onnx/operators/onnx__LpNormalization.html>) of ONNX.
//!
//! Variances are biased and computed from the centered elements. From opset 21 on, GroupNormalization has a scale and a
//! bias for each channel; before, for each group. A model with the older form is upgraded when it is read. An export to
//! an older opset contains the decomposition.
//!
//! float16 and bfloat16 are computed in float32. float64 is computed in float64 for every `stash_type`. Where a
//! deviation or a norm is 0, the result and its gradient are 0.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};

use crate::OpError;
use crate::class::Class;
use crate::infer::{Infer, normalize_axes, normalize_axis};
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::casts::{arithmetic_dtype, cast};
use crate::support::formula::formula;

/// Constant that MeanVarianceNormalization adds to the standard deviation.
const DEVIATION_EPSILON: f64 = 1e-9;

/// `InstanceNormalization` or `GroupNormalization`: normalizes each channel, or group of channels, of each sample.
struct ChannelNormalization {
    /// Number of groups; `None` if each channel is a group.
    groups: Option<i64>,
}

impl Op for ChannelNormalization {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 3, 1)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype(0..3)?;
        if let Some(shape) = cx.shape(0) {
            if shape.rank() < 2 {
                return Err(OpError::invalid(format!(
                    "input 0 has shape {shape}, expected a batch axis and a channel axis"
                )));
            }
            if let (Some(groups), Some(channels)) = (self.groups, shape[1].known())
                && channels as i64 % groups != 0
            {
                return Err(OpError::invalid(format!(
                    "{channels} channels cannot be split into {groups} equal groups"
                )));
            }
            for k in 1..3 {
                let differs =
                    |size: &Dim| matches!((size.known(), shape[1].known()), (Some(a), Some(b)) if a != b);
                if let Some(vector_shape) = cx.shape(k)
                    && (vector_shape.rank() != 1 || differs(&vector_shape[0]))
                {
                    return Err(OpError::invalid(format!(
                        "input {k} has shape {vector_shape}, expected one element for each of {} channels",
                        shape[1]
                    )));
                }
            }
        }
        cx.set_output(0, dtype, cx.shape(0).cloned());
        Ok(())
    }
}

/// Returns the element type of a value.
fn dtype_of(rw: &Rewrite<'_>, value: ValueId) -> Result<DType, OpError> {
    rw.dtype(value).ok_or_else(|| OpError::invalid("the type of input 0 is not known"))
}

fn add(rw: &mut Rewrite<'_>, op: &str, inputs: &[ValueId]) -> ValueId {
    rw.add(op, inputs, Attrs::new())
}

/// Reshapes `x` to constant sizes. A size of 0 copies the size of `x`, and -1 takes the rest, as in ONNX.
fn reshape(rw: &mut Rewrite<'_>, x: ValueId, sizes: &[i64]) -> ValueId {
    let sizes = rw.ints("sizes", sizes);
    add(rw, "Reshape", &[x, sizes])
}

/// Returns the elements minus their mean along `axes`, and their variance along `axes`.
fn center(rw: &mut Rewrite<'_>, x: ValueId, axes: &[i64]) -> (ValueId, ValueId) {
    let axes = rw.ints("axes", axes);
    let mean = add(rw, "ReduceMean", &[x, axes]);
    let centred = add(rw, "Sub", &[x, mean]);
    let square = add(rw, "Mul", &[centred, centred]);
    (centred, add(rw, "ReduceMean", &[square, axes]))
}

/// Normalizes `x` along the last of three axes to mean 0 and deviation 1.
fn normalize_rows(rw: &mut Rewrite<'_>, x: ValueId, dtype: DType, epsilon: f32) -> ValueId {
    let data = cast(rw.patch().1, x, dtype, arithmetic_dtype(dtype));
    let (centred, variance) = center(rw, data, &[2]);
    let epsilon = rw.constant("epsilon", Tensor::scalar(arithmetic_dtype(dtype), f64::from(epsilon)));
    let deviation = formula(rw, [variance, epsilon], |[variance, epsilon]| (variance + epsilon).sqrt());
    let normal = add(rw, "Div", &[centred, deviation]);
    cast(rw.patch().1, normal, arithmetic_dtype(dtype), dtype)
}

fn read_epsilon(attrs: &Attrs) -> Result<f32, OpError> {
    Ok(attrs.float("epsilon")?.unwrap_or(1e-5))
}

/// Applies the scale and the bias of each channel to normalized elements `[batch, channels, rest]`. The result becomes
/// output 0, in the shape of `x`.
fn apply_scale_and_bias(rw: &mut Rewrite<'_>, x: ValueId, normal: ValueId) -> Result<(), OpError> {
    let (scale, bias) = (rw.required_input(1)?, rw.required_input(2)?);
    let axis = rw.ints("axis", &[1]);
    let [scale, bias] = [scale, bias].map(|value| add(rw, "Unsqueeze", &[value, axis]));
    let sum = formula(rw, [normal, scale, bias], |[normal, scale, bias]| normal * scale + bias);
    let shape = add(rw, "Shape", &[x]);
    let result = rw.add("Reshape", &[sum, shape], Attrs::new().with("allowzero", 1i64));
    rw.replace_output(0, result);
    Ok(())
}

fn decompose_instance(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, epsilon) = (rw.required_input(0)?, read_epsilon(rw.attrs())?);
    let dtype = dtype_of(rw, x)?;
    let rows = reshape(rw, x, &[0, 0, -1]);
    let normal = normalize_rows(rw, rows, dtype, epsilon);
    apply_scale_and_bias(rw, x, normal)
}

fn read_num_groups(attrs: &Attrs) -> Result<i64, OpError> {
    let groups = Attrs::required("num_groups", attrs.int("num_groups")?)?;
    if groups < 1 {
        return Err(OpError::invalid(format!("num_groups must be at least 1, got {groups}")));
    }
    Ok(groups)
}

fn decompose_group(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, epsilon, groups) =
        (rw.required_input(0)?, read_epsilon(rw.attrs())?, read_num_groups(rw.attrs())?);
    let dtype = dtype_of(rw, x)?;
    let rows = reshape(rw, x, &[0, groups, -1]);
    let normal = normalize_rows(rw, rows, dtype, epsilon);
    let shape = add(rw, "Shape", &[x]);
    let restored = rw.add("Reshape", &[normal, shape], Attrs::new().with("allowzero", 1i64));
    let normal = reshape(rw, restored, &[0, 0, -1]);
    apply_scale_and_bias(rw, x, normal)
}

/// Upgrades GroupNormalization from before opset 21: expands the scale and the bias of each group to the channels of
/// the group.
fn upgrade_group(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, groups) = (rw.required_input(0)?, read_num_groups(rw.attrs())?);
    let sizes = add(rw, "Shape", &[x]);
    let (one, count) = (rw.ints("one", &[1]), rw.ints("groups", &[groups]));
    let channels = add(rw, "Gather", &[sizes, one]);
    let each = add(rw, "Div", &[channels, count]);
    let spread = rw.add("Concat", &[count, each], Attrs::new().with("axis", 0i64));
    let mut inputs = vec![Some(x)];
    for k in 1..3 {
        let value = rw.required_input(k)?;
        let column = reshape(rw, value, &[groups, 1]);
        let wide = add(rw, "Expand", &[column, spread]);
        inputs.push(Some(reshape(rw, wide, &[-1])));
    }
    rw.emit_same_op(&inputs, rw.attrs().clone());
    Ok(())
}

fn downgrade_group(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 21 { decompose_group(rw) } else { Ok(()) }
}

/// `MeanVarianceNormalization` or `LpNormalization`: the result has the type and shape of the input.
struct AxesNormalization {
    axes: Vec<i64>,
}

impl Op for AxesNormalization {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        cx.shape(0).map(|shape| normalize_axes(&self.axes, shape.rank())).transpose()?;
        cx.set_output(0, dtype, cx.shape(0).cloned());
        Ok(())
    }
}

fn read_axes(attrs: &Attrs) -> Result<Vec<i64>, OpError> {
    Ok(attrs.ints("axes")?.map_or_else(|| vec![0, 2, 3], <[i64]>::to_vec))
}

fn decompose_mean_variance(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, axes) = (rw.required_input(0)?, read_axes(rw.attrs())?);
    let dtype = dtype_of(rw, x)?;
    let data = cast(rw.patch().1, x, dtype, arithmetic_dtype(dtype));
    let (centred, variance) = center(rw, data, &axes);
    let number = |rw: &mut Rewrite<'_>, value: f64| {
        rw.constant("number", Tensor::scalar(arithmetic_dtype(dtype), value))
    };
    let (zero, one, epsilon) = (number(rw, 0.0), number(rw, 1.0), number(rw, DEVIATION_EPSILON));
    // The gradient of the root at 0 would be infinite.
    let is_zero = add(rw, "Equal", &[variance, zero]);
    let safe = add(rw, "Where", &[is_zero, one, variance]);
    let root = add(rw, "Sqrt", &[safe]);
    let deviation = add(rw, "Where", &[is_zero, zero, root]);
    let shifted = add(rw, "Add", &[deviation, epsilon]);
    let result = add(rw, "Div", &[centred, shifted]);
    let result = cast(rw.patch().1, result, arithmetic_dtype(dtype), dtype);
    rw.replace_output(0, result);
    Ok(())
}

/// Reads axis and order of LpNormalization.
fn read_lp(attrs: &Attrs) -> Result<(i64, i64), OpError> {
    let (axis, p) = (attrs.int("axis")?.unwrap_or(-1), attrs.int("p")?.unwrap_or(2));
    match p {
        1 | 2 => Ok((axis, p)),
        _ => Err(OpError::invalid(format!("p must be 1 or 2, got {p}"))),
    }
}

fn decompose_lp(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, (axis, p)) = (rw.required_input(0)?, read_lp(rw.attrs())?);
    let dtype = dtype_of(rw, x)?;
    let axis = match rw.shape(x).map(Shape::rank) {
        Some(rank) => normalize_axis(axis, rank)? as i64,
        None => axis,
    };
    let axes = rw.ints("axes", &[axis]);
    let norm = add(rw, if p == 1 { "ReduceL1" } else { "ReduceL2" }, &[x, axes]);
    let number = |rw: &mut Rewrite<'_>, value: f64| rw.constant("number", Tensor::scalar(dtype, value));
    let (zero, one) = (number(rw, 0.0), number(rw, 1.0));
    let is_zero = add(rw, "Equal", &[norm, zero]);
    let safe = add(rw, "Where", &[is_zero, one, norm]);
    let quotient = add(rw, "Div", &[x, safe]);
    let result = add(rw, "Where", &[is_zero, zero, quotient]);
    rw.replace_output(0, result);
    Ok(())
}

fn build_instance(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    read_epsilon(&node.attrs)?;
    Ok(Box::new(ChannelNormalization { groups: None }))
}

fn build_group(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    read_epsilon(&node.attrs)?;
    Ok(Box::new(ChannelNormalization { groups: Some(read_num_groups(&node.attrs)?) }))
}

fn build_mean_variance(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(AxesNormalization { axes: read_axes(&node.attrs)? }))
}

fn build_lp(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(AxesNormalization { axes: vec![read_lp(&node.attrs)?.0] }))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "InstanceNormalization", &[6, 22], build_instance)
            .class(Class::Normalization { scale: 1, bias: Some(2), of_instances: true })
            .composition(decompose_instance)
            .weights(&[1, 2]),
        Definition::new("", "GroupNormalization", &[18, 21], build_group)
            .class(Class::Normalization { scale: 1, bias: Some(2), of_instances: false })
            .upgrade(upgrade_group)
            .downgrade(downgrade_group)
            .composition(decompose_group)
            .weights(&[1, 2]),
        Definition::new("", "MeanVarianceNormalization", &[9, 13], build_mean_variance)
            .composition(decompose_mean_variance),
        Definition::new("", "LpNormalization", &[1, 22], build_lp).composition(decompose_lp),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, assert_close, check_downgrade, check_gradients, f64s, generic_tensor, gradient_graph,
        one_node_graph, run, run_node,
    };

    const GROUP: (&str, &str) = ("", "GroupNormalization");
    const INSTANCE: (&str, &str) = ("", "InstanceNormalization");
    const LP: (&str, &str) = ("", "LpNormalization");

    fn group_attrs(count: i64) -> Attrs {
        Attrs::new().with("num_groups", count).with("epsilon", 0.01f32)
    }

    /// Computes the result by the formula, over all elements of a group of channels.
    fn expected(x: &Tensor, groups: usize, scale: &[f64], bias: &[f64]) -> Vec<f64> {
        let (dims, values) = (x.dims(), x.to_f64());
        let space: usize = dims[2..].iter().product();
        let row = dims[1] / groups * space;
        let mut result = Vec::with_capacity(values.len());
        for (r, rows) in values.chunks(row).enumerate() {
            let mean = rows.iter().sum::<f64>() / row as f64;
            let variance = rows.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row as f64;
            for (k, x) in rows.iter().enumerate() {
                let c = (r % groups) * (dims[1] / groups) + k / space;
                result.push((x - mean) / (variance + f64::from(0.01f32)).sqrt() * scale[c] + bias[c]);
            }
        }
        result
    }

    #[test]
    fn group_and_instance_normalization() {
        let x = generic_tensor(&[2, 4, 3, 2], 1);
        let (scale, bias) = (generic_tensor(&[4], 2), generic_tensor(&[4], 3));
        let inputs = [x.clone(), scale.clone(), bias.clone()];
        let ports = [Some(&inputs[0]), Some(&inputs[1]), Some(&inputs[2])];
        for count in [1, 2, 4] {
            let graph = one_node_graph(NEWEST_OPSET, GROUP, &ports, 1, group_attrs(count)).expect("valid");
            let expected_output =
                f64s(x.dims(), &expected(&x, count as usize, &scale.to_f64(), &bias.to_f64()));
            assert_close(&run(&graph, &inputs).expect("the graph runs")[0], &expected_output, 1e-13);
            check_gradients(&graph, &inputs, &[0, 1, 2], &[0]);
            check_downgrade(&graph, &inputs, 18);
            check_downgrade(&graph, &inputs, 21);
        }
        let attrs = Attrs::new().with("epsilon", 0.01f32);
        let graph = one_node_graph(7, INSTANCE, &ports, 1, attrs).expect("the node is valid");
        let expected_output = f64s(x.dims(), &expected(&x, 4, &scale.to_f64(), &bias.to_f64()));
        assert_close(&run(&graph, &inputs).expect("the graph runs")[0], &expected_output, 1e-13);
        check_gradients(&graph, &inputs, &[0, 1, 2], &[0]);
    }

    /// One scale for each group, as in opset 18.
    #[test]
    fn group_scales_before_opset_21() {
        let x = generic_tensor(&[2, 4, 3], 4);
        let inputs = [x.clone(), f64s(&[2], &[0.5, 2.0]), f64s(&[2], &[1.0, -1.0])];
        let ports = [Some(&inputs[0]), Some(&inputs[1]), Some(&inputs[2])];
        for opset in [18, 20] {
            let graph = one_node_graph(opset, GROUP, &ports, 1, group_attrs(2)).expect("the node is valid");
            let expected_elements = expected(&x, 2, &[0.5, 0.5, 2.0, 2.0], &[1.0, 1.0, -1.0, -1.0]);
            assert_close(
                &run(&graph, &inputs).expect("the graph runs")[0],
                &f64s(x.dims(), &expected_elements),
                1e-13,
            );
            check_gradients(&graph, &inputs, &[0, 1, 2], &[0]);
            check_downgrade(&graph, &inputs, opset);
        }
    }

    #[test]
    fn float16_is_computed_in_float32() {
        let x = Tensor::from_f64(DType::F16, vec![1, 1, 4], &[1000.0, 1001.0, 1002.0, 1003.0]);
        let one = Tensor::filled(DType::F16, &[1], 1.0);
        let zero = Tensor::filled(DType::F16, &[1], 0.0);
        let got = run_node(INSTANCE, &[Some(&x), Some(&one), Some(&zero)], 1, Attrs::new())
            .expect("the graph runs");
        let expected_output =
            Tensor::from_f64(DType::F16, vec![1, 1, 4], &[-1.3416, -0.4472, 0.4472, 1.3416]);
        assert_close(&got[0], &expected_output, 1e-3);
    }

    #[test]
    fn mean_variance_normalization() {
        let x = generic_tensor(&[2, 3, 2, 2], 5);
        for attrs in [Attrs::new(), Attrs::new().with("axes", vec![1i64, -1])] {
            let op = ("", "MeanVarianceNormalization");
            let graph = one_node_graph(9, op, &[Some(&x)], 1, attrs).expect("the node is valid");
            check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
            let got = run(&graph, std::slice::from_ref(&x)).expect("the graph runs").remove(0).to_f64();
            assert!(got.iter().sum::<f64>().abs() < 1e-12);
            assert!((got.iter().map(|x| x * x).sum::<f64>() - 24.0).abs() < 1e-6);
        }
        // A constant input gives 0, and a gradient of 0.
        let flat = Tensor::filled(DType::F64, &[1, 1, 2, 2], 3.0);
        let op = ("", "MeanVarianceNormalization");
        let graph = one_node_graph(13, op, &[Some(&flat)], 1, Attrs::new()).expect("valid");
        let gradient = gradient_graph(&graph, &[Some(f64s(&[1, 1, 2, 2], &[1.0, 1.0, 1.0, 1.0]))], &[0]);
        assert_eq!(run(&gradient, &[flat]).expect("the graph runs")[0].to_f64(), [0.0; 4]);
    }

    #[test]
    fn lp_normalization() {
        let x = f64s(&[2, 2], &[3.0, -4.0, 0.0, 0.0]);
        for (p, expected_elements) in [(2i64, [0.6, -0.8, 0.0, 0.0]), (1, [3.0 / 7.0, -4.0 / 7.0, 0.0, 0.0])]
        {
            let attrs = Attrs::new().with("p", p);
            let graph = one_node_graph(NEWEST_OPSET, LP, &[Some(&x)], 1, attrs.clone()).expect("valid");
            assert_close(
                &run(&graph, std::slice::from_ref(&x)).expect("the graph runs")[0],
                &f64s(&[2, 2], &expected_elements),
                1e-15,
            );
            // Where the norm is 0, the gradient is 0.
            let gradient = gradient_graph(&graph, &[Some(f64s(&[2, 2], &[1.0, 2.0, 3.0, 4.0]))], &[0]);
            let got = run(&gradient, std::slice::from_ref(&x)).expect("the graph runs").remove(0).to_f64();
            assert!(got[2..] == [0.0, 0.0] && got[0] != 0.0, "{got:?}");
            for axis in [0i64, 1] {
                let x = generic_tensor(&[3, 4], 6);
                let graph = one_node_graph(7, LP, &[Some(&x)], 1, attrs.clone().with("axis", axis))
                    .expect("the node is valid");
                check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
            }
        }
    }

    #[test]
    fn rejects_invalid_inputs() {
        let (x, three, four) =
            (generic_tensor(&[2, 4, 2], 1), generic_tensor(&[3], 2), generic_tensor(&[4], 3));
        for (op, scale, attrs, message) in [
            (
                INSTANCE,
                &three,
                Attrs::new(),
                "input 1 has shape [3], expected one element for each of 4 channels",
            ),
            (GROUP, &four, group_attrs(3), "4 channels cannot be split into 3 equal groups"),
            (GROUP, &four, group_attrs(0), "num_groups must be at least 1, got 0"),
        ] {
            let failure = run_node(op, &[Some(&x), Some(scale), Some(&four)], 1, attrs).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(message), "{error}");
        }
        for (attrs, message) in [
            (Attrs::new().with("p", 3i64), "p must be 1 or 2, got 3"),
            (Attrs::new().with("axis", 3i64), "axis 3 is out of range for rank 3"),
        ] {
            let failure = run_node(LP, &[Some(&x)], 1, attrs).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
