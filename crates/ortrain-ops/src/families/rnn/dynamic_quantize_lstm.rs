//! `DynamicQuantizeLSTM` of `com.microsoft`: an LSTM with integer weights.
//!
//! Both products of a step multiply bytes minus a zero point; the sums are scaled to floats. The data of all steps have
//! one grid. The hidden state of the batch has a new grid at each step:
//!
//! ```text
//! gates = s_x s_W (X - z_x)(W - z_W) + s_h s_R (h - z_h)(R - z_R) + biases
//! ```
//!
//! The operator is a composition: `DynamicQuantizeLinear` and `MatMulInteger` for the data, and a Scan over the steps
//! with the same operators for the hidden state. The gradients are straight-through estimators.
//!
//! Weights are `[directions, input, 4 * hidden]` and `[directions, hidden, 4 * hidden]`: the gates are along the last
//! axis, and not along the second as in `LSTM`. Scales and zero points are `[directions]` or `[directions, 4 * hidden]`.
//!
//! Lengths of sequences have the meaning of ONNX Runtime. Data after the end of the longest sequence do not change the
//! grid of the data. If the node has the output of all steps, a sequence that has ended does not change the grid of the
//! hidden state. Without this output, the final state of the sequence does. The final states of an empty sequence are
//! zero, but not in `LSTM`.
//!
//! Source: the operator of `com.microsoft`, version 1, of ONNX Runtime.
//!
//! Limit: with several threads, ONNX Runtime splits the batch, and each part has its own grid of the hidden state. Here
//! the batch has one grid, as in ONNX Runtime with one thread.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, ValueId, ValueType};

use super::direction::{reverse_results, reverse_sequences, zero_state};
use super::net::{
    Attributes, B, C0, DYNAMIC_QUANTIZE_LSTM, Direction, H0, InferredSizes, LENGTHS, P, R, W, X, check_shape,
};
use super::scan_builder::{
    LstmStep, MatrixEmitter, ScanBuilder, compare_with_lengths, emit_lstm_step, step_indices,
};
use crate::OpError;
use crate::class::Class;
use crate::infer::Infer;
use crate::op::{Axis, Definition, Op, Placement, QuantizedInput};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::{arithmetic_dtype, cast};
use crate::support::onnx_decomposition::NodeSink;
use crate::support::quantization_grid::{check_scale, check_zero_point_type, is_byte, typed_input};
use crate::support::sizes::slice_axis;

const W_SCALE: usize = 8;
const W_ZERO_POINT: usize = 9;
const R_SCALE: usize = 10;
const R_ZERO_POINT: usize = 11;
const INPUT_COUNT: usize = 12;

/// Number of results: of all steps, the last hidden state, the last cell state.
const RESULT_COUNT: usize = 3;

/// `DynamicQuantizeLSTM`.
struct DynamicQuantizeLstm {
    attributes: Attributes,
}

impl Op for DynamicQuantizeLstm {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, INPUT_COUNT, RESULT_COUNT)?;
        if let Some(missing) = (W_SCALE..INPUT_COUNT).find(|&k| !cx.has_input(k)) {
            return Err(OpError::invalid(format!("input {missing} is missing")));
        }
        if self.attributes.batch_first {
            return Err(OpError::invalid("layout must be 0, because the operator has no other layout"));
        }
        let dtype = cx.expect_same_dtype([X, B, H0, C0, P, W_SCALE, R_SCALE])?;
        let sizes = self.attributes.infer_sizes(cx, X, W, R)?;
        for (weights, scale, zero_point) in [(W, W_SCALE, W_ZERO_POINT), (R, R_SCALE, R_ZERO_POINT)] {
            let of_weights = cx.expect_dtype(weights, "int8 or uint8", is_byte)?;
            check_scale(cx, scale)?;
            check_zero_point_type(cx, zero_point, of_weights)?;
            self.check_grid_shape(cx, scale, &sizes)?;
            self.check_grid_shape(cx, zero_point, &sizes)?;
        }
        self.attributes.infer_results(cx, dtype, &sizes)
    }

    fn placement(&self) -> Placement {
        Placement::Composition
    }
}

impl DynamicQuantizeLstm {
    /// Checks that a scale or zero point has one number for each direction, or one for each column of the weights.
    fn check_grid_shape(&self, cx: &Infer<'_>, k: usize, sizes: &InferredSizes) -> Result<(), OpError> {
        let directions = Dim::from(self.attributes.directions.len());
        match cx.shape(k) {
            Some(shape) if shape.rank() < 2 => check_shape(cx, k, &[directions]),
            _ => check_shape(cx, k, &[directions, (4 * sizes.hidden).into()]),
        }
    }
}

/// Integers with their scale and zero point.
#[derive(Clone, Copy)]
struct Quantized {
    integers: ValueId,
    scale: ValueId,
    zero_point: ValueId,
}

impl Quantized {
    fn new([integers, scale, zero_point]: [ValueId; 3]) -> Quantized {
        Quantized { integers, scale, zero_point }
    }
}

/// Emits the product of quantized matrices as floats.
fn emit_scaled_product<E: NodeSink>(out: &mut MatrixEmitter<'_, E>, a: Quantized, b: Quantized) -> ValueId {
    let factors = [a.integers, b.integers, a.zero_point, b.zero_point];
    let sums = out.node("MatMulInteger", &factors, Attrs::new());
    let sums = cast(out.emit, sums, DType::I32, out.dtype);
    let scale = out.mul(a.scale, b.scale);
    out.mul(sums, scale)
}

/// Masks of steps and sequences, if the sequences have lengths.
#[derive(Clone, Copy)]
struct Masks {
    /// True for the steps of each sequence, `[steps, batch, 1]`.
    active: ValueId,
    /// True if the state before the step takes part in the grid of the step, `[steps, batch, 1]`.
    in_grid: Option<ValueId>,
    /// True for sequences that are not empty, `[batch, 1]`.
    nonempty: ValueId,
    /// True up to the end of the longest sequence, `[steps, 1, 1]`.
    in_longest: ValueId,
}

impl Masks {
    /// Emits the masks from the lengths as int64.
    fn new(rw: &mut Rewrite<'_>, x: ValueId, lengths: ValueId) -> Masks {
        let steps = step_indices(rw, x);
        let active = compare_with_lengths(rw, "Less", steps, lengths);
        let in_grid = rw.has_output(0).then(|| compare_with_lengths(rw, "LessOrEqual", steps, lengths));
        let mut out = MatrixEmitter { emit: rw.patch().1, dtype: DType::I64 };
        // An empty batch has no longest sequence.
        let zero = out.ints(&[0]);
        let candidates = out.concat(&[lengths, zero], 0);
        let longest = out.node("ReduceMax", &[candidates], Attrs::new().with("keepdims", 0i64));
        let in_longest = out.binary_node("Less", steps, longest);
        let axes = out.ints(&[1, 2]);
        let in_longest = out.binary_node("Unsqueeze", in_longest, axes);
        let nonempty = out.binary_node("Less", zero, lengths);
        let nonempty = out.unsqueeze(nonempty, 1);
        Masks { active, in_grid, nonempty, in_longest }
    }
}

/// Inputs that all directions share.
struct SharedInputs {
    attributes: Attributes,
    hidden: usize,
    /// Type of the arithmetic.
    dtype: DType,
    /// Data of all steps.
    x: ValueId,
    quantized_x: Quantized,
    /// Lengths of the sequences as int64.
    lengths: Option<ValueId>,
    masks: Option<Masks>,
}

impl SharedInputs {
    fn new(rw: &mut Rewrite<'_>) -> Result<SharedInputs, OpError> {
        let attributes = Attributes::read(rw.node())?;
        let (x, r) = (typed_input(rw, X)?, rw.required_input(R)?);
        let hidden = attributes.hidden_size(rw.shape(r))?;
        let dtype = arithmetic_dtype(x.1);
        let x_floats = cast(rw, x.0, x.1, dtype);
        let lengths = rw.input(LENGTHS).map(|lengths| {
            rw.add("Cast", &[lengths], Attrs::new().with("to", i64::from(DType::I64.to_onnx())))
        });
        let masks = lengths.map(|lengths| Masks::new(rw, x.0, lengths));
        // Zeros are part of every grid.
        let mut out = MatrixEmitter { emit: rw.patch().1, dtype };
        let data = out.active_or_zero(masks.map(|masks| masks.in_longest), x_floats);
        let parts = rw.add_node("", "DynamicQuantizeLinear", &[Some(data)], 3, Attrs::new());
        let quantized_x = Quantized::new([parts[0], parts[1], parts[2]]);
        Ok(SharedInputs { attributes, hidden, dtype, x: x.0, quantized_x, lengths, masks })
    }

    /// Returns the part of input `k` that belongs to the direction at `index`, without the axis of directions. Floats
    /// have the type of the arithmetic.
    fn of_direction(&self, rw: &mut Rewrite<'_>, k: usize, index: usize) -> Result<ValueId, OpError> {
        let (mut value, dtype) = typed_input(rw, k)?;
        if self.attributes.directions.len() > 1 {
            let index = index as i64;
            value = slice_axis(rw, value, 0, index, index + 1, 1);
        }
        let value = MatrixEmitter { emit: rw.patch().1, dtype }.squeeze(value, 0);
        Ok(if dtype.is_float() { cast(rw, value, dtype, self.dtype) } else { value })
    }

    /// Returns an optional input as [`SharedInputs::of_direction`] does.
    fn optional_of_direction(
        &self,
        rw: &mut Rewrite<'_>,
        k: usize,
        index: usize,
    ) -> Result<Option<ValueId>, OpError> {
        if rw.input(k).is_some() { self.of_direction(rw, k, index).map(Some) } else { Ok(None) }
    }

    /// Returns the weights of a direction from their inputs: integers, scale, zero point.
    fn weights_of_direction(
        &self,
        rw: &mut Rewrite<'_>,
        inputs: [usize; 3],
        index: usize,
    ) -> Result<Quantized, OpError> {
        let [integers, scale, zero_point] = inputs.map(|k| self.of_direction(rw, k, index));
        Ok(Quantized { integers: integers?, scale: scale?, zero_point: zero_point? })
    }

    /// Emits one direction. Returns the results of all steps, `[steps, 1, batch, hidden]`, and the final states, `[1,
    /// batch, hidden]`.
    fn emit_direction(&self, rw: &mut Rewrite<'_>, index: usize) -> Result<Vec<ValueId>, OpError> {
        let (dtype, hidden) = (self.dtype, self.hidden);
        let attributes = self.attributes.of_direction(index);
        let is_reversed = attributes.directions == [Direction::Reverse];
        let mut data = self.quantized_x;
        if is_reversed {
            data.integers = reverse_sequences(rw, data.integers, self.lengths);
        }
        let [w, r] = [[W, W_SCALE, W_ZERO_POINT], [R, R_SCALE, R_ZERO_POINT]]
            .map(|inputs| self.weights_of_direction(rw, inputs, index));
        let (w, r) = (w?, r?);
        let biases = self.optional_of_direction(rw, B, index)?;
        let peepholes = self.optional_of_direction(rw, P, index)?;
        let mut states = Vec::new();
        for k in [H0, C0] {
            states.push(match self.optional_of_direction(rw, k, index)? {
                Some(state) => state,
                None => {
                    let state = zero_state(rw, self.x, hidden, dtype);
                    MatrixEmitter { emit: rw.patch().1, dtype }.squeeze(state, 0)
                }
            });
        }

        let mut out = MatrixEmitter { emit: rw.patch().1, dtype };
        let mut products = emit_scaled_product(&mut out, data, w);
        if let Some(biases) = biases {
            let [of_data, of_state] = out.column_groups(biases, 4 * hidden);
            let bias = out.add(of_data, of_state);
            products = out.add(products, bias);
        }

        let mut steps = ScanBuilder::new(if is_reversed { "backward" } else { "forward" }, dtype);
        let [h, c] = [("h", states[0]), ("c", states[1])].map(|(name, first)| steps.add_carried(name, first));
        let products = steps.add_scanned("x", products);
        let active = self.masks.map(|masks| steps.add_scanned("active", masks.active));
        let in_grid = self.masks.and_then(|masks| masks.in_grid);
        let in_grid = in_grid.map(|mask| steps.add_scanned("in_grid", mask));
        let r = Quantized {
            integers: steps.add_captured("r", r.integers),
            scale: steps.add_captured("r_scale", r.scale),
            zero_point: steps.add_captured("r_zero_point", r.zero_point),
        };
        let peepholes = peepholes.map(|weights| steps.add_captured("p", weights));
        let state = steps.emitter().active_or_zero(in_grid, h);
        let state = Quantized::new(steps.add_node("DynamicQuantizeLinear", state));
        let mut step = steps.emitter();
        let from_state = emit_scaled_product(&mut step, state, r);
        let sums = step.add(products, from_state);
        let LstmStep { cell, hidden: value, .. } =
            emit_lstm_step(&mut step, &attributes, hidden, sums, c, peepholes)?;
        let next = [step.select_active(active, value, h), step.select_active(active, cell, c)];
        let value = step.active_or_zero(active, value);
        let results = steps.finish(rw, &next, &[value]);

        let mut out = MatrixEmitter { emit: rw.patch().1, dtype };
        let all = out.unsqueeze(results[2], 1);
        let nonempty = self.masks.map(|masks| masks.nonempty);
        let last = [results[0], results[1]].map(|state| {
            let state = out.active_or_zero(nonempty, state);
            out.unsqueeze(state, 0)
        });
        let all = if is_reversed { reverse_results(rw, all, self.lengths) } else { all };
        Ok(vec![all, last[0], last[1]])
    }
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let inputs = SharedInputs::new(rw)?;
    let (_, stored) = typed_input(rw, X)?;
    let directions = 0..inputs.attributes.directions.len();
    let results: Vec<Vec<ValueId>> =
        directions.map(|index| inputs.emit_direction(rw, index)).collect::<Result<_, _>>()?;
    for k in 0..RESULT_COUNT {
        if !rw.has_output(k) {
            continue;
        }
        let parts: Vec<ValueId> = results.iter().map(|of_direction| of_direction[k]).collect();
        let value = match parts[..] {
            [only] => only,
            _ => rw.add("Concat", &parts, Attrs::new().with("axis", i64::from(k == 0))),
        };
        let value = cast(rw, value, inputs.dtype, stored);
        rw.replace_output(k, value);
    }
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(DynamicQuantizeLstm { attributes: Attributes::read(node)? }))
}

/// Sample with one step, one sequence, input size 1 and hidden size 2.
fn sample(_: &Definition) -> Sample {
    let dims: [(usize, DType, &[usize]); 7] = [
        (X, DType::F32, &[1, 1, 1]),
        (W, DType::U8, &[1, 1, 8]),
        (R, DType::U8, &[1, 2, 8]),
        (W_SCALE, DType::F32, &[1]),
        (W_ZERO_POINT, DType::U8, &[1]),
        (R_SCALE, DType::F32, &[1]),
        (R_ZERO_POINT, DType::U8, &[1]),
    ];
    let mut inputs = vec![None; INPUT_COUNT];
    for (k, dtype, dims) in dims {
        inputs[k] = Some(ValueType::tensor(dtype, dims));
    }
    Sample { inputs, ..Sample::of(Attrs::new().with("hidden_size", 2i64)) }
}

pub(super) fn definition() -> Definition {
    const INTEGER_WEIGHTS: &[QuantizedInput] = &[
        QuantizedInput::new(W, W_SCALE, Some(W_ZERO_POINT), Axis::FirstAndLast),
        QuantizedInput::new(R, R_SCALE, Some(R_ZERO_POINT), Axis::FirstAndLast),
    ];
    Definition::new("com.microsoft", DYNAMIC_QUANTIZE_LSTM, &[1], build)
        .class(Class::Recurrent { states: &[H0, C0] })
        .composition(decompose)
        .weights(&[B, P])
        .scales(&[W_SCALE, R_SCALE])
        .quantized(INTEGER_WEIGHTS)
        .sample(sample)
}

#[cfg(test)]
mod tests;
