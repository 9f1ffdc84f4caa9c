//! Reversed sequences that are only partly used, and recurrent layers with lengths.

use std::sync::Arc;

use ortrain_graph::{Attrs, DType, Tensor, ValueId};
use ortrain_program::Backend;

use super::Report;
use crate::{Case, CaseBuilder, Fill, check_backend, run};

const STEPS: usize = 5;
const BATCH: usize = 3;
const INPUT: usize = 2;
const HIDDEN: usize = 4;

/// Sequences of every length, including zero and all steps.
pub const LENGTHS: [&[f64]; 3] = [&[3.0, 5.0, 1.0], &[0.0, 4.0, 2.0], &[5.0, 5.0, 5.0]];

/// Ranges of an axis: start, end, step.
pub const PARTS: [(i64, i64, i64); 4] = [(2, 4, 1), (0, 1, 1), (4, 5, 1), (0, 5, 2)];

fn slice(b: &mut CaseBuilder, x: ValueId, axis: i64, (from, to, step): (i64, i64, i64)) -> ValueId {
    let bounds = [from, to, axis, step].map(|value| b.ints(&[value]));
    b.node("Slice", &[x, bounds[0], bounds[1], bounds[2], bounds[3]], Attrs::new())
}

/// Builds `ReverseSequence` and a slice of its result.
#[must_use]
pub fn reversed_slice(lengths: &[f64], part: (i64, i64, i64), time_axis: usize, sliced: i64) -> Case {
    let mut b = CaseBuilder::new("ReverseSequence", &format!("{lengths:?} {part:?} {time_axis} {sliced}"));
    let mut dims = [BATCH, BATCH, 2];
    dims[time_axis] = STEPS;
    let x = b.float(&dims, &Fill::Signed);
    let lengths = b.input(DType::I64, &[BATCH], &Fill::Exactly(lengths.to_vec()));
    let axes = Attrs::new().with("time_axis", time_axis as i64).with("batch_axis", 1 - time_axis as i64);
    let y = b.node("ReverseSequence", &[x, lengths], axes);
    let y = slice(&mut b, y, sliced, part);
    b.outputs(&[y])
}

/// Builds a recurrent layer with lengths and a partly used result. Its sequences are an input, or a constant
/// of the model.
fn recurrent(
    op: &str,
    direction: &str,
    lengths: &[f64],
    part: Option<(i64, i64, i64)>,
    has_state: bool,
) -> Case {
    let mut b = CaseBuilder::new(op, &format!("{direction} {lengths:?} {part:?} given: {has_state}"));
    let directions = if direction == "bidirectional" { 2 } else { 1 };
    let gates = match op {
        "LSTM" => 4,
        "GRU" => 3,
        _ => 1,
    };
    let x = if has_state {
        b.float(&[STEPS, BATCH, INPUT], &Fill::Signed)
    } else {
        let values: Vec<f32> = (0..STEPS * BATCH * INPUT).map(|k| (k * 7 % 13) as f32 * 0.25 - 1.5).collect();
        b.constant(Tensor::f32(&[STEPS, BATCH, INPUT], &values))
    };
    let mut small = |dims: &[usize]| {
        let len: usize = dims.iter().product();
        let values = (0..len).map(|k| ((k * 11 + len) % 17) as f64 * 0.05 - 0.4).collect();
        b.float(dims, &Fill::Exactly(values))
    };
    let w = small(&[directions, gates * HIDDEN, INPUT]);
    let r = small(&[directions, gates * HIDDEN, HIDDEN]);
    let bias = small(&[directions, 2 * gates * HIDDEN]);
    let lengths = b.input(DType::I32, &[BATCH], &Fill::Exactly(lengths.to_vec()));
    let attrs = Attrs::new().with("hidden_size", HIDDEN as i64).with("direction", direction);
    let outputs = if op == "LSTM" { 3 } else { 2 };
    let inputs = [x, w, r, bias, lengths].map(Some);
    let results = b.node_with("", op, &inputs, outputs, attrs);
    match part {
        Some(part) => {
            let selected = slice(&mut b, results[0], 0, part);
            b.outputs(&[selected])
        }
        None => b.outputs(&results[1..]),
    }
}

/// Returns layers of every kind and direction, with partly used results or only the last state.
#[must_use]
pub fn recurrent_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for op in ["RNN", "GRU", "LSTM"] {
        for direction in ["forward", "reverse", "bidirectional"] {
            for lengths in LENGTHS {
                for has_state in [false, true] {
                    cases.push(recurrent(op, direction, lengths, None, has_state));
                    cases.push(recurrent(op, direction, lengths, Some(PARTS[0]), has_state));
                }
            }
        }
    }
    cases
}

/// Computes the elements of a part of reversed sequences, by definition.
fn elements(x: &[f64], lengths: &[f64], (from, to, step): (i64, i64, i64)) -> Vec<f64> {
    let mut elements = Vec::new();
    for t in (from..to).step_by(step as usize) {
        for (b, &length) in lengths.iter().enumerate() {
            let (t, length) = (t as usize, length as usize);
            let from = if t < length { length - 1 - t } else { t };
            elements.extend_from_slice(&x[(from * BATCH + b) * 2..][..2]);
        }
    }
    elements
}

/// Checks parts of reversed sequences against the definition, and recurrent layers against the reference
/// evaluator, forward and backward.
#[must_use]
pub fn agree(backend: &Arc<dyn Backend>) -> Report {
    let parts = LENGTHS.into_iter().flat_map(|lengths| PARTS.map(|part| (lengths, part)));
    let reversed = parts.map(|(lengths, part)| {
        let case = reversed_slice(lengths, part, 0, 0);
        let expected = elements(&case.inputs[0].to_f64(), lengths, part);
        let got = run(&case.graph, &case.inputs, backend.clone())?[0].to_f64();
        if got == expected { Ok(()) } else { Err(format!("{}: {got:?} is not {expected:?}", case.name)) }
    });
    let recurrent = recurrent_cases().into_iter().map(|case| check_backend(&case, backend, true));
    reversed.chain(recurrent).collect()
}
