//! Discrete Fourier transforms: `DFT`.
//!
//! DFT-17 and 20 of ONNX (<https://onnx.ai/onnx/operators/onnx__DFT.html>). The axis is an attribute in 17 and an input
//! from 20 on. The signal is cropped or zero-padded to `dft_length`. Only the inverse is divided by the length. With
//! `onesided` the result is the first half of the frequencies of a real signal. The inverse with `onesided` computes
//! the real signal from this half.
//!
//! The operator is a composition: products with matrices of cosines and sines. Their angles are computed in float64.
//! The gradient is the transform with the conjugate matrices. The cost is quadratic in the length, for every length.
//! Narrow floats are computed in float32.
//!
//! Limits: the rank of the input, the size of its last axis and the axis of the signal must be known.

use std::f64::consts::TAU;

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};

use crate::OpError;
use crate::infer::{Infer, normalize_axis};
use crate::op::{Definition, Op, ValueRequirement};
use crate::rewrite::Rewrite;
use crate::support::casts::arithmetic_dtype;
use crate::support::sizes::{
    Size, add_op, add_sizes, as_number, as_vector, cast, divide_sizes, dtype_of, insert_axes, multiply_sizes,
    permute_axes, range_positions, remove_axes, scalar_constant, shape_of, size_of, slice_axis,
    slice_between, subtract_sizes,
};

const LENGTH: usize = 1;
const AXIS: usize = 2;

#[derive(Clone, Copy, Debug)]
struct Dft {
    inverse: bool,
    onesided: bool,
}

impl Dft {
    fn read(attrs: &Attrs) -> Result<Dft, OpError> {
        let flag = |name: &str| Ok::<_, OpError>(attrs.int(name)?.unwrap_or(0) != 0);
        Ok(Dft { inverse: flag("inverse")?, onesided: flag("onesided")? })
    }

    /// Checks the number of parts of the input, 1 (real) or 2 (complex). Returns the numbers of parts of input and
    /// result.
    fn part_counts(self, shape: &Shape) -> Result<[usize; 2], OpError> {
        let parts = match shape.last().map(Dim::known) {
            Some(Some(parts @ (1 | 2))) if shape.rank() > 1 => parts,
            Some(None) if shape.rank() > 1 => {
                return Err(OpError::unsupported(
                    "the size of the last axis of input 0 must be known (1 if real, 2 if complex); declare it in the \
                     model",
                ));
            }
            _ => {
                return Err(OpError::invalid(format!(
                    "input 0 has shape {shape}; it must have a last axis of size 1 (real) or 2 (complex)"
                )));
            }
        };
        match (self.onesided, self.inverse, parts) {
            (true, false, 2) => Err(OpError::invalid("onesided needs a real signal, got a complex signal")),
            (true, true, 1) => {
                Err(OpError::invalid("onesided with inverse needs complex frequencies, got real numbers"))
            }
            (true, true, _) => Ok([parts, 1]),
            _ => Ok([parts, 2]),
        }
    }
}

/// Returns the axis of the signal. The last axis contains the real and imaginary parts.
fn signal_axis(axis: Option<i64>, rank: usize) -> Result<usize, OpError> {
    let axis = normalize_axis(axis.unwrap_or(-2), rank)?;
    if axis + 1 == rank {
        return Err(OpError::invalid(
            "the axis of the signal must not be the last axis, which contains real and imaginary parts",
        ));
    }
    Ok(axis)
}

/// Returns the only integer of a tensor; `None` if it has more or fewer elements.
fn single_int(tensor: &Tensor) -> Option<i64> {
    tensor.to_i64().filter(|list| list.len() == 1).map(|list| list[0])
}

impl Op for Dft {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 3, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        for k in [LENGTH, AXIS] {
            if cx.has_input(k) {
                cx.expect_dtype(k, "int32 or int64", |dtype| matches!(dtype, DType::I32 | DType::I64))?;
            }
            if let Some(shape) = cx.shape(k)
                && shape.iter().any(|dim| dim.known().is_some_and(|size| size != 1))
            {
                return Err(OpError::invalid(format!("input {k} has shape {shape}; one number is needed")));
            }
        }
        let length = cx.constant(LENGTH).and_then(single_int);
        if let Some(bad) = length.filter(|&length| length < 1) {
            return Err(OpError::invalid(format!("the length of the signal must be at least 1, got {bad}")));
        }
        let axis = cx.constant(AXIS).and_then(single_int);
        let (Some(shape), true) = (cx.shape(0), axis.is_some() || !cx.has_input(AXIS)) else {
            let shape = cx.shape(0).map(|shape| cx.unknown_shape(0, shape.rank()));
            cx.set_output(0, dtype, shape);
            return Ok(());
        };
        let [_, parts] = self.part_counts(shape)?;
        let axis = signal_axis(axis, shape.rank())?;
        let size = shape[axis].known();
        let length = match (length, size) {
            (Some(length), _) => Some(length as usize),
            (None, _) if cx.has_input(LENGTH) => None,
            (None, Some(size)) if self.inverse && self.onesided => Some(2 * size.saturating_sub(1)),
            (None, size) => size,
        };
        if length == Some(0) {
            return Err(OpError::invalid(format!(
                "the signal of input 0 of shape {shape} is empty along axis {axis}"
            )));
        }
        let mut result = shape.clone();
        let last = shape.rank() - 1;
        result.0[axis] = match length {
            Some(length) if self.onesided && !self.inverse => Dim::Known(length / 2 + 1),
            Some(length) => Dim::Known(length),
            None if !self.onesided && !cx.has_input(LENGTH) => shape[axis].clone(),
            None => cx.unknown_dim(0, axis),
        };
        result.0[last] = Dim::Known(parts);
        cx.set_output(0, dtype, Some(result));
        Ok(())
    }

    fn needs_value(&self, k: usize, _: DType) -> ValueRequirement {
        match k {
            0 => ValueRequirement::Never,
            LENGTH => ValueRequirement::ForShapes,
            _ => ValueRequirement::Always,
        }
    }
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = Dft::read(rw.attrs())?;
    let x = rw.required_input(0)?;
    let shape = shape_of(rw, x, "input 0")?;
    let rank = shape.rank();
    let dtype = dtype_of(rw, x, "input 0")?;
    let ty = arithmetic_dtype(dtype);
    let [parts, _] = op.part_counts(&shape)?;
    let axis = match rw.input(AXIS) {
        None => None,
        Some(axis) => Some(
            rw.constant_of(axis)
                .and_then(single_int)
                .ok_or_else(|| OpError::unsupported("the axis of the signal must be a constant"))?,
        ),
    };
    let axis = signal_axis(axis, rank)?;
    let size = size_of(rw, x, axis);
    let length = match rw.input(LENGTH) {
        Some(length) => match rw.constant_of(length).and_then(single_int) {
            Some(length) => Size::Number(length),
            None => {
                let dtype = dtype_of(rw, length, "dft_length")?;
                let length = cast(rw, length, dtype, DType::I64);
                let one = rw.ints("one", &[1]);
                Size::Value(add_op(rw, "Reshape", &[length, one]))
            }
        },
        None if op.inverse && op.onesided => {
            let less = subtract_sizes(rw, size, Size::Number(1));
            multiply_sizes(rw, less, Size::Number(2))
        }
        None => size,
    };
    let half = |rw: &mut Rewrite<'_>| {
        let half = divide_sizes(rw, length, Size::Number(2));
        add_sizes(rw, half, Size::Number(1))
    };
    // Numbers of elements along the axis, of the input and of the result.
    let limit = if op.onesided && op.inverse { half(rw) } else { length };
    let used_len = match (size, limit) {
        (Size::Number(size), Size::Number(max)) => Size::Number(size.min(max)),
        (size, max_size) => {
            let both = [as_vector(rw, size), as_vector(rw, max_size)];
            Size::Value(add_op(rw, "Min", &both))
        }
    };
    let output_len = if op.onesided && !op.inverse { half(rw) } else { length };

    let [cosines, sines] = rotations(rw, &op, (used_len, output_len), length, ty);

    // The signal's axis comes last, before the axis of the parts.
    let mut order: Vec<usize> = (0..rank - 1).filter(|&other| other != axis).collect();
    order.extend([axis, rank - 1]);
    let data = cast(rw, x, dtype, ty);
    let data = permute_axes(rw, data, &order);
    let data = slice_between(rw, data, rank as i64 - 2, Size::Number(0), used_len);
    let last = rank as i64 - 1;
    let pieces: Vec<ValueId> = (0..parts as i64)
        .map(|k| {
            let piece = slice_axis(rw, data, last, k, k + 1, 1);
            remove_axes(rw, piece, &[last])
        })
        .collect();
    let (real, imaginary) = rotate(rw, &op, &pieces, [cosines, sines]);
    let mut results = vec![insert_axes(rw, real, &[last])];
    if let Some(imaginary) = imaginary {
        results.push(insert_axes(rw, imaginary, &[last]));
    }
    let result = match results[..] {
        [only] => only,
        _ => rw.add("Concat", &results, Attrs::new().with("axis", last)),
    };
    let inverse_perm: Vec<usize> =
        (0..rank).filter_map(|axis| order.iter().position(|&other| other == axis)).collect();
    let result = permute_axes(rw, result, &inverse_perm);
    let result = cast(rw, result, ty, dtype);
    rw.replace_output(0, result);
    Ok(())
}

/// Returns the cosines and sines of the angles `[given, wanted]`, divided by the length for the inverse.
fn rotations(
    rw: &mut Rewrite<'_>,
    op: &Dft,
    (used_len, output_len): (Size, Size),
    length: Size,
    ty: DType,
) -> [ValueId; 2] {
    // Full turns are removed before any rounding.
    let (rows, columns) = (range_positions(rw, used_len), range_positions(rw, output_len));
    let rows_down = insert_axes(rw, rows, &[1]);
    let products = add_op(rw, "Mul", &[rows_down, columns]);
    let modulus = as_vector(rw, length);
    let turns = add_op(rw, "Mod", &[products, modulus]);
    let turns = cast(rw, turns, DType::I64, DType::F64);
    let length_value = as_number(rw, length, DType::F64);
    let turns = add_op(rw, "Div", &[turns, length_value]);
    let circle = scalar_constant(rw, DType::F64, TAU);
    let angles = add_op(rw, "Mul", &[turns, circle]);
    let scale = op.inverse.then(|| {
        if !op.onesided {
            return length_value;
        }
        // A frequency stands for itself and its conjugate, except the first, and the last of an even length.
        let twice = add_op(rw, "Add", &[rows_down, rows_down]);
        let first = rw.constant("first", Tensor::i64(&[], &[0]));
        let conditions = [add_op(rw, "Equal", &[rows_down, first]), add_op(rw, "Equal", &[twice, modulus])];
        let unpaired = add_op(rw, "Or", &conditions);
        let halved = scalar_constant(rw, DType::F64, 0.5);
        let half_length = add_op(rw, "Mul", &[length_value, halved]);
        add_op(rw, "Where", &[unpaired, length_value, half_length])
    });
    ["Cos", "Sin"].map(|function| {
        let mut matrix = add_op(rw, function, &[angles]);
        if let Some(scale) = scale {
            matrix = add_op(rw, "Div", &[matrix, scale]);
        }
        cast(rw, matrix, DType::F64, ty)
    })
}

/// Returns the real part and, if the result has one, the imaginary part of a signal times cosines and sines.
fn rotate(
    rw: &mut Rewrite<'_>,
    op: &Dft,
    pieces: &[ValueId],
    [cosines, sines]: [ValueId; 2],
) -> (ValueId, Option<ValueId>) {
    let times_matrix =
        |rw: &mut Rewrite<'_>, piece: ValueId, matrix: ValueId| add_op(rw, "MatMul", &[piece, matrix]);
    // (a + bi)(cos - i sin), or (a + bi)(cos + i sin) for the inverse.
    let mut real = times_matrix(rw, pieces[0], cosines);
    let mut imaginary = (!(op.inverse && op.onesided)).then(|| {
        let product = times_matrix(rw, pieces[0], sines);
        if op.inverse { product } else { add_op(rw, "Neg", &[product]) }
    });
    if let Some(&b) = pieces.get(1) {
        let crossed = times_matrix(rw, b, sines);
        real = add_op(rw, if op.inverse { "Sub" } else { "Add" }, &[real, crossed]);
        if let Some(before) = imaginary {
            let straight = times_matrix(rw, b, cosines);
            imaginary = Some(add_op(rw, "Add", &[before, straight]));
        }
    }
    (real, imaginary)
}

/// Upgrades a node from opset 17, which has the axis as an attribute, 1 by default.
fn upgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() >= 20 {
        return Ok(());
    }
    let axis = rw.attrs().int("axis")?.unwrap_or(1);
    let axis = rw.constant("axis", Tensor::i64(&[], &[axis]));
    let mut attrs = rw.attrs().clone();
    attrs.0.remove("axis");
    let inputs = [rw.input(0), rw.input(LENGTH), Some(axis)];
    rw.emit_same_op(&inputs, attrs);
    Ok(())
}

/// Decomposes the operator for opsets before 17, and makes the axis an attribute before 20. The decomposition needs the
/// Range of opset 11.
fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    match rw.version() {
        20.. | ..11 => Ok(()),
        11..17 => decompose(rw),
        _ => {
            let axis = match rw.input(AXIS) {
                None => -2,
                Some(axis) => rw.constant_of(axis).and_then(single_int).ok_or_else(|| {
                    OpError::unsupported("the axis is computed at run time, which needs opset 20 or newer")
                })?,
            };
            let inputs: Vec<Option<ValueId>> = [rw.input(0), rw.input(LENGTH)]
                .into_iter()
                .take(if rw.input(LENGTH).is_some() { 2 } else { 1 })
                .collect();
            rw.emit_same_op(&inputs, rw.attrs().clone().with("axis", axis));
            Ok(())
        }
    }
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Dft::read(&node.attrs)?))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "DFT", &[17, 20], build)
            .upgrade(upgrade)
            .downgrade(downgrade)
            .composition(decompose),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::ValueType;

    use super::*;
    use crate::testing::{
        Failure, add, assert_close, cast_tensor, check_decomposition, check_downgrade, check_gradients, f64s,
        generic_tensor, graph, one_node_graph, run, run_node,
    };

    const OP: (&str, &str) = ("", "DFT");

    struct Case {
        dims: &'static [usize],
        axis: i64,
        length: Option<i64>,
        inverse: bool,
        onesided: bool,
    }

    const fn case(
        dims: &'static [usize],
        axis: i64,
        length: Option<i64>,
        inverse: bool,
        onesided: bool,
    ) -> Case {
        Case { dims, axis, length, inverse, onesided }
    }

    const CASES: [Case; 14] = [
        case(&[2, 5, 1], 1, None, false, false),
        case(&[2, 5, 2], -2, None, false, false),
        case(&[4, 3, 2], 0, None, false, false),
        case(&[6, 2], 0, None, true, false),
        case(&[2, 5, 2], 1, Some(3), false, false),
        case(&[2, 3, 2], 1, Some(7), true, false),
        case(&[2, 5, 1], 1, None, false, true),
        case(&[2, 6, 1], 1, Some(8), false, true),
        case(&[2, 6, 1], 1, Some(3), false, true),
        case(&[2, 4, 2], 1, None, true, true),
        case(&[2, 4, 2], 1, Some(7), true, true),
        case(&[2, 4, 3, 2], 1, Some(5), true, true),
        case(&[2, 2, 2], 1, Some(8), true, true),
        case(&[3, 1, 1], 0, None, true, false),
    ];

    impl Case {
        fn attrs(&self) -> Attrs {
            Attrs::new().with("inverse", i64::from(self.inverse)).with("onesided", i64::from(self.onesided))
        }

        /// Computes the transform by the definition, with the other half of the frequencies restored first.
        fn expected(&self, x: &Tensor) -> Tensor {
            let dims = self.dims;
            let axis = signal_axis(Some(self.axis), dims.len()).expect("valid");
            let parts = dims[dims.len() - 1];
            let after: usize = dims[axis + 1..dims.len() - 1].iter().product();
            let before: usize = dims[..axis].iter().product();
            let size = dims[axis];
            let halved = self.inverse && self.onesided;
            let n = self.length.map_or(if halved { 2 * (size - 1) } else { size }, |length| length as usize);
            let values = x.to_f64();
            let number = |o: usize, k: usize, i: usize| {
                if k >= size {
                    return (0.0, 0.0);
                }
                let at = ((o * size + k) * after + i) * parts;
                (values[at], if parts == 2 { values[at + 1] } else { 0.0 })
            };
            let required = if self.onesided && !self.inverse { n / 2 + 1 } else { n };
            let out_parts = if halved { 1 } else { 2 };
            let mut result = vec![0.0; before * required * after * out_parts];
            for o in 0..before {
                for i in 0..after {
                    let signal: Vec<(f64, f64)> = (0..n)
                        .map(|k| match halved {
                            true if k > n / 2 => (number(o, n - k, i).0, -number(o, n - k, i).1),
                            true if k == 0 || 2 * k == n => (number(o, k, i).0, 0.0),
                            _ => number(o, k, i),
                        })
                        .collect();
                    for k in 0..required {
                        let sign = if self.inverse { 1.0 } else { -1.0 };
                        let factor = if self.inverse { 1.0 / n as f64 } else { 1.0 };
                        let mut sum = (0.0, 0.0);
                        for (t, (a, b)) in signal.iter().enumerate() {
                            let angle = sign * TAU * (k * t) as f64 / n as f64;
                            sum.0 += factor * (a * angle.cos() - b * angle.sin());
                            sum.1 += factor * (a * angle.sin() + b * angle.cos());
                        }
                        let at = ((o * required + k) * after + i) * out_parts;
                        result[at] = sum.0;
                        if out_parts == 2 {
                            result[at + 1] = sum.1;
                        }
                    }
                }
            }
            let mut shape = dims.to_vec();
            shape[axis] = required;
            shape[dims.len() - 1] = out_parts;
            f64s(&shape, &result)
        }

        /// Returns a graph with constant lengths. `symbolic`: the sizes of the data are unknown.
        fn graph(&self, x: &Tensor, symbolic: bool) -> Graph {
            let (mut graph, ids) = graph(&[x]);
            if symbolic {
                let last = self.dims.len() - 1;
                let dim = |axis: usize| match axis {
                    _ if axis == last => Dim::Known(self.dims[last]),
                    _ => Dim::symbol(&format!("d{axis}")),
                };
                let shape = (0..=last).map(dim).collect();
                graph.value_mut(ids[0]).ty = ValueType::Tensor(DType::F64, Some(shape));
            }
            let length = self.length.map(|length| graph.add_constant("length", Tensor::i64(&[], &[length])));
            let axis = graph.add_constant("axis", Tensor::i64(&[], &[self.axis]));
            add(&mut graph, OP, "y", &[Some(ids[0]), length, Some(axis)], 1, self.attrs());
            crate::passes::infer::infer(&mut graph).expect("valid");
            graph
        }
    }

    #[test]
    fn all_transforms() {
        for case in &CASES {
            let x = generic_tensor(case.dims, 1);
            let (inputs, expected) = ([x.clone()], case.expected(&x));
            for symbolic in [false, true] {
                let graph = case.graph(&x, symbolic);
                assert_close(&run(&graph, &inputs).expect("it runs")[0], &expected, 1e-13);
                check_gradients(&graph, &inputs, &[0], &[0]);
            }
            let graph = case.graph(&x, false);
            check_decomposition(&graph, &inputs, 0.0);
            for opset in [17, 20] {
                assert_eq!(check_downgrade(&graph, &inputs, opset).nodes.len(), 1);
            }
            check_downgrade(&graph, &inputs, 13);
        }
    }

    #[test]
    fn opset_17_and_length_inputs() {
        let x = generic_tensor(&[2, 5, 3, 1], 1);
        let case = case(&[2, 5, 3, 1], 1, Some(4), false, true);
        let length = Tensor::from_slice(DType::I32, &[], &[4i32]);
        let inputs = [x.clone(), length];
        let ports = [Some(&inputs[0]), Some(&inputs[1])];
        let graph = one_node_graph(17, OP, &ports, 1, case.attrs()).expect("it is read");
        assert_close(&run(&graph, &inputs).expect("it runs")[0], &case.expected(&x), 1e-13);
        check_gradients(&graph, &inputs, &[0], &[0]);
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F16, 4e-3), (DType::BF16, 3e-2)] {
            let narrow = cast_tensor(&x, dtype);
            let axis = Tensor::i64(&[], &[1]);
            let ports = [Some(&narrow), Some(&inputs[1]), Some(&axis)];
            let got = run_node(OP, &ports, 1, case.attrs()).expect("it runs").remove(0);
            assert_close(
                &got,
                &cast_tensor(&case.expected(&cast_tensor(&narrow, DType::F64)), dtype),
                tolerance,
            );
        }
    }

    #[test]
    fn rejects_lists_as_length_or_axis() {
        let (x, list) = (generic_tensor(&[2, 3, 2], 1), Tensor::i64(&[2], &[3, 3]));
        for ports in [[Some(&x), Some(&list), None], [Some(&x), None, Some(&list)]] {
            let failure = run_node(OP, &ports, 1, Attrs::new()).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains("has shape [2]; one number is needed"), "{error}");
        }
    }

    #[test]
    fn rejects_mismatched_inputs() {
        let flags =
            |inverse: i64, onesided: i64| Attrs::new().with("inverse", inverse).with("onesided", onesided);
        let number = |value: i64| Some(Tensor::i64(&[], &[value]));
        for (dims, length, axis, attrs, message) in [
            (
                vec![2, 3, 3],
                None,
                None,
                flags(0, 0),
                "it must have a last axis of size 1 (real) or 2 (complex)",
            ),
            (vec![2, 3, 2], None, number(2), flags(0, 0), "the axis of the signal must not be the last axis"),
            (vec![2, 3, 2], None, number(3), flags(0, 0), "axis 3 is out of range"),
            (vec![2, 3, 2], None, None, flags(0, 1), "onesided needs a real signal"),
            (vec![2, 3, 1], None, None, flags(1, 1), "onesided with inverse needs complex frequencies"),
            (
                vec![2, 3, 2],
                number(0),
                None,
                flags(0, 0),
                "the length of the signal must be at least 1, got 0",
            ),
            (vec![2, 1, 2], None, None, flags(1, 1), "is empty along axis 1"),
        ] {
            let x = generic_tensor(&dims, 1);
            let ports = [Some(&x), length.as_ref(), axis.as_ref()];
            let failure = run_node(OP, &ports, 1, attrs).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
