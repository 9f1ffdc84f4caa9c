use ortrain_graph::{Attrs, DType, Graph, Tensor};

use super::{B, C0, H0, LENGTHS, P, R, R_SCALE, R_ZERO_POINT, RESULT_COUNT, W, W_SCALE, W_ZERO_POINT, X};
use crate::NEWEST_OPSET;
use crate::testing::{
    assert_close, cast_tensor, check_decomposition, f64s, generic_tensor, gradient_graph, one_node_graph,
    run, with_symbolic_sizes,
};

const STEPS: usize = 4;
const BATCH: usize = 3;
const INPUT: usize = 2;
const HIDDEN: usize = 3;
const COLUMNS: usize = 4 * HIDDEN;
const OPERATOR: (&str, &str) = ("com.microsoft", "DynamicQuantizeLSTM");
/// Tolerance of sums of a few products in float64.
const ROUNDING: f64 = 1e-12;
/// Tolerance of gradients. The gradient of an integer is a float32.
const GRADIENT_TOLERANCE: f64 = 2e-6;
/// Step of central differences.
const STEP: f64 = 1e-5;
/// Step of central differences for scales, which are small numbers.
const SCALE_STEP: f64 = 1e-7;
/// Middle of the range of unsigned bytes.
const MIDDLE: f64 = 128.0;

/// Node with its inputs.
#[derive(Clone)]
struct Case {
    name: &'static str,
    attrs: Attrs,
    reversed: Vec<bool>,
    clip: f64,
    input_forget: bool,
    inputs: Vec<Option<Tensor>>,
    /// True if the node has the results of all steps.
    has_sequence: bool,
}

/// Integers of weights, between -60 and 60.
fn weights(dims: &[usize], seed: u32) -> Vec<f64> {
    generic_tensor(dims, seed).to_f64().iter().map(|x| (30.0 * x).round()).collect()
}

impl Case {
    /// Creates a case with signed weights, and with one scale for each direction.
    fn new(name: &'static str, direction: &str) -> Case {
        let reversed = match direction {
            "forward" => vec![false],
            "reverse" => vec![true],
            _ => vec![false, true],
        };
        let count = reversed.len();
        let bytes = |dims: &[usize], seed| Some(cast_tensor(&f64s(dims, &weights(dims, seed)), DType::I8));
        let zeros = Some(Tensor::filled(DType::I8, &[count], 0.0));
        let scale = |scale: f64| Some(f64s(&[count], &vec![scale; count]));
        let mut inputs = vec![None; super::INPUT_COUNT];
        inputs[X] = Some(generic_tensor(&[STEPS, BATCH, INPUT], 1));
        inputs[W] = bytes(&[count, INPUT, COLUMNS], 2);
        inputs[R] = bytes(&[count, HIDDEN, COLUMNS], 3);
        (inputs[W_SCALE], inputs[W_ZERO_POINT]) = (scale(0.01), zeros.clone());
        (inputs[R_SCALE], inputs[R_ZERO_POINT]) = (scale(0.02), zeros);
        let attrs = Attrs::new().with("hidden_size", HIDDEN as i64).with("direction", direction);
        Case { name, attrs, reversed, clip: f64::INFINITY, input_forget: false, inputs, has_sequence: true }
    }

    fn with_all_floats(mut self) -> Case {
        let count = self.reversed.len();
        self.inputs[B] = Some(generic_tensor(&[count, 2 * COLUMNS], 4));
        self.inputs[H0] = Some(generic_tensor(&[count, BATCH, HIDDEN], 5));
        self.inputs[C0] = Some(generic_tensor(&[count, BATCH, HIDDEN], 6));
        self.inputs[P] = Some(generic_tensor(&[count, 3 * HIDDEN], 7));
        self
    }

    fn with_lengths(mut self, lengths: [i64; BATCH]) -> Case {
        self.inputs[LENGTHS] = Some(cast_tensor(&Tensor::i64(&[BATCH], &lengths), DType::I32));
        self
    }

    /// Gives each column of the weights its own scale and zero point, and makes the weights unsigned.
    fn with_columns(mut self) -> Case {
        let dims = [self.reversed.len(), COLUMNS];
        for (k, scale, zero_point) in [(W, W_SCALE, W_ZERO_POINT), (R, R_SCALE, R_ZERO_POINT)] {
            let integers = self.values(k).iter().map(|x| x + MIDDLE).collect::<Vec<f64>>();
            self.inputs[k] = Some(cast_tensor(&f64s(self.dims(k), &integers), DType::U8));
            let scales = generic_tensor(&dims, k as u32)
                .to_f64()
                .iter()
                .map(|x| 0.005 * (x + 3.0))
                .collect::<Vec<f64>>();
            self.inputs[scale] = Some(f64s(&dims, &scales));
            let zero_points = weights(&dims, 9).iter().map(|x| x + MIDDLE).collect::<Vec<f64>>();
            self.inputs[zero_point] = Some(cast_tensor(&f64s(&dims, &zero_points), DType::U8));
        }
        self
    }

    fn with_clip(mut self, clip: f32) -> Case {
        self.clip = f64::from(clip);
        self.attrs = self.attrs.with("clip", clip);
        self
    }

    fn with_input_forget(mut self) -> Case {
        self.input_forget = true;
        self.attrs = self.attrs.with("input_forget", 1i64);
        self
    }

    fn dims(&self, k: usize) -> &[usize] {
        self.inputs[k].as_ref().expect("present").dims()
    }

    fn values(&self, k: usize) -> Vec<f64> {
        self.inputs[k].as_ref().expect("present").to_f64()
    }

    fn present(&self) -> Vec<Tensor> {
        self.inputs.iter().flatten().cloned().collect()
    }

    fn graph(&self) -> Graph {
        let inputs: Vec<Option<&Tensor>> = self.inputs.iter().map(Option::as_ref).collect();
        let attrs = self.attrs.clone();
        let mut graph = one_node_graph(NEWEST_OPSET, OPERATOR, &inputs, RESULT_COUNT, attrs).expect("valid");
        if !self.has_sequence {
            graph.nodes[0].outputs[0] = None;
            graph.outputs.remove(0);
        }
        graph
    }

    /// Returns the elements of all inputs; absent ones are empty.
    fn all_values(&self) -> Vec<Vec<f64>> {
        self.inputs.iter().map(|input| input.as_ref().map_or(Vec::new(), Tensor::to_f64)).collect()
    }

    fn length(&self, row: usize) -> usize {
        if self.inputs[LENGTHS].is_some() { self.values(LENGTHS)[row] as usize } else { STEPS }
    }

    /// Computes the results from the elements of the inputs.
    fn results(&self, values: &[Vec<f64>], grid: &mut Rounding) -> Vec<Vec<f64>> {
        let count = self.reversed.len();
        let mut all = vec![0.0; STEPS * count * BATCH * HIDDEN];
        let [mut last_h, mut last_c] = [(); 2].map(|()| vec![0.0; count * BATCH * HIDDEN]);
        let longest = (0..BATCH).map(|row| self.length(row)).max().expect("a batch");
        let x = grid.quantize(&values[X][..longest * BATCH * INPUT]);
        for direction in 0..count {
            let state = |k: usize| -> Vec<f64> {
                let from = direction * BATCH * HIDDEN;
                values[k].get(from..from + BATCH * HIDDEN).map_or(vec![0.0; BATCH * HIDDEN], <[f64]>::to_vec)
            };
            let (mut h, mut c) = (state(H0), state(C0));
            for step in 0..longest {
                if self.has_sequence {
                    for row in (0..BATCH).filter(|&row| step > self.length(row)) {
                        h[row * HIDDEN..(row + 1) * HIDDEN].fill(0.0);
                    }
                }
                let quantized_h = grid.quantize(&h);
                for row in (0..BATCH).filter(|&row| step < self.length(row)) {
                    let time = if self.reversed[direction] { self.length(row) - 1 - step } else { step };
                    let x = &x[(time * BATCH + row) * INPUT..][..INPUT];
                    let old_h = &quantized_h[row * HIDDEN..][..HIDDEN];
                    for j in 0..HIDDEN {
                        let sum = |gate: usize| self.sum(values, direction, gate * HIDDEN + j, x, old_h);
                        let at = row * HIDDEN + j;
                        let peephole = |k: usize, cell: f64| {
                            values[P]
                                .get((3 * direction + k) * HIDDEN + j)
                                .map_or(0.0, |weight| weight * cell)
                        };
                        let gate = |sum: f64| 1.0 / (1.0 + (-sum.clamp(-self.clip, self.clip)).exp());
                        let old = c[at];
                        let i = gate(sum(0) + peephole(0, old));
                        let f = if self.input_forget { 1.0 - i } else { gate(sum(2) + peephole(2, old)) };
                        let new = sum(3).clamp(-self.clip, self.clip).tanh();
                        let cell = f * old + i * new;
                        let o = gate(sum(1) + peephole(1, cell));
                        (c[at], h[at]) = (cell, o * cell.tanh());
                        all[((time * count + direction) * BATCH + row) * HIDDEN + j] = h[at];
                        let end = direction * BATCH * HIDDEN + at;
                        (last_h[end], last_c[end]) = (h[at], c[at]);
                    }
                }
            }
        }
        if self.has_sequence { vec![all, last_h, last_c] } else { vec![last_h, last_c] }
    }

    /// Returns the argument of a gate without peepholes.
    fn sum(&self, values: &[Vec<f64>], direction: usize, column: usize, x: &[f64], h: &[f64]) -> f64 {
        let mut sum = 0.0;
        for (data, [integers, scale, zero_point]) in
            [(x, [W, W_SCALE, W_ZERO_POINT]), (h, [R, R_SCALE, R_ZERO_POINT])]
        {
            let has_columns = self.dims(scale).len() == 2;
            let at = if has_columns { direction * COLUMNS + column } else { direction };
            for (row, number) in data.iter().enumerate() {
                let weight = values[integers][(direction * data.len() + row) * COLUMNS + column];
                sum += number * (weight - values[zero_point][at]) * values[scale][at];
            }
        }
        let biases = values[B].get(direction * 2 * COLUMNS..).unwrap_or_default();
        sum + biases.get(column).unwrap_or(&0.0) + biases.get(COLUMNS + column).unwrap_or(&0.0)
    }
}

/// Rounding of activations: to the grid, or by the same differences as before. The straight-through estimator is the
/// derivative of the second form.
enum Rounding {
    Grid(Vec<f64>),
    Differences(Vec<f64>, usize),
}

impl Rounding {
    fn quantize(&mut self, numbers: &[f64]) -> Vec<f64> {
        match self {
            Rounding::Grid(differences) => {
                let (low, high) =
                    numbers.iter().fold((0.0, 0.0), |(low, high), &x| (f64::min(low, x), f64::max(high, x)));
                let scale = if high == low { 1.0 } else { (high - low) / 255.0 };
                let zero_point = (-low / scale).clamp(0.0, 255.0).round_ties_even();
                let quantized = numbers.iter().map(|x| {
                    let position = ((x / scale).round_ties_even() + zero_point).clamp(0.0, 255.0);
                    (position - zero_point) * scale
                });
                let quantized: Vec<f64> = quantized.collect();
                differences.extend(numbers.iter().zip(&quantized).map(|(x, y)| y - x));
                quantized
            }
            Rounding::Differences(differences, at) => {
                *at += numbers.len();
                numbers.iter().zip(&differences[*at - numbers.len()..]).map(|(x, d)| x + d).collect()
            }
        }
    }
}

fn cases() -> Vec<Case> {
    let forward = |name| Case::new(name, "forward");
    let mut without_sequence = forward("final states").with_all_floats().with_lengths([1, 4, 2]);
    without_sequence.has_sequence = false;
    vec![
        forward("forward"),
        Case::new("reverse", "reverse").with_all_floats(),
        Case::new("both directions", "bidirectional").with_all_floats(),
        Case::new("columns", "bidirectional").with_columns(),
        forward("columns of one direction").with_columns().with_all_floats(),
        forward("lengths").with_all_floats().with_lengths([3, 1, 2]),
        Case::new("lengths of both directions", "bidirectional").with_all_floats().with_lengths([1, 4, 2]),
        Case::new("empty sequence", "reverse").with_all_floats().with_lengths([0, 2, 1]),
        without_sequence,
        forward("clip").with_all_floats().with_clip(0.8),
        forward("coupled gates").with_all_floats().with_input_forget(),
    ]
}

#[test]
fn results_equal_formulas() {
    for case in cases() {
        let results = run(&case.graph(), &case.present()).expect(case.name);
        let expected = case.results(&case.all_values(), &mut Rounding::Grid(Vec::new()));
        for (result, expected) in results.iter().zip(expected) {
            println!("{}", case.name);
            assert_close(result, &f64s(result.dims(), &expected), ROUNDING);
        }
    }
}

/// A sequence that has ended is part of the grids of later steps only if there are no results of all steps.
#[test]
fn results_of_all_steps_change_the_grid() {
    let with_sequence = Case::new("all results", "forward").with_all_floats().with_lengths([1, 4, 2]);
    let without_sequence = Case { has_sequence: false, ..with_sequence.clone() };
    let results =
        [with_sequence, without_sequence].map(|case| run(&case.graph(), &case.present()).expect("it runs"));
    assert_ne!(results[0][1], results[1][0]);
}

#[test]
fn symbolic_sizes_and_decomposition() {
    for case in cases() {
        let graph = with_symbolic_sizes(&case.graph(), X, &[0, 1]);
        check_decomposition(&graph, &case.present(), ROUNDING);
    }
}

/// Compares the gradients with central differences of the sum of the results, with generic factors for the results in
/// `through`.
fn check_gradients(case: &Case, through: &[usize]) {
    let (graph, values) = (case.graph(), case.all_values());
    let mut grid = Rounding::Grid(Vec::new());
    case.results(&values, &mut grid);
    let Rounding::Grid(differences) = grid else { unreachable!("recorded") };
    let factors: Vec<Option<Tensor>> = run(&graph, &case.present())
        .expect(case.name)
        .iter()
        .enumerate()
        .map(|(k, output)| through.contains(&k).then(|| generic_tensor(output.dims(), 11 + k as u32)))
        .collect();
    let total = |values: &[Vec<f64>]| -> f64 {
        let results = case.results(values, &mut Rounding::Differences(differences.clone(), 0));
        let term = |(result, factors): (Vec<f64>, &Option<Tensor>)| {
            let factors = factors.as_ref().map_or(Vec::new(), Tensor::to_f64);
            result.into_iter().zip(factors).map(|(x, factor)| x * factor).sum::<f64>()
        };
        results.into_iter().zip(&factors).map(term).sum()
    };
    let inputs: Vec<usize> = (0..case.inputs.len()).filter(|&k| case.inputs[k].is_some()).collect();
    let targets: Vec<usize> = (0..inputs.len())
        .filter(|&at| [X, W, R, B, H0, C0, P, W_SCALE, R_SCALE].contains(&inputs[at]))
        .collect();
    let gradients = run(&gradient_graph(&graph, &factors, &targets), &case.present()).expect(case.name);
    for (&target, gradient) in targets.iter().zip(gradients) {
        let k = inputs[target];
        println!("{}, input {k}, through {through:?}", case.name);
        let moved = |at: usize, by: f64| {
            let mut values = values.clone();
            values[k][at] += by;
            total(&values)
        };
        let step = if [W_SCALE, R_SCALE].contains(&k) { SCALE_STEP } else { STEP };
        let expected: Vec<f64> =
            (0..values[k].len()).map(|at| (moved(at, step) - moved(at, -step)) / (2.0 * step)).collect();
        let gradient = cast_tensor(&gradient, DType::F64);
        assert_close(&gradient, &f64s(case.dims(k), &expected), GRADIENT_TOLERANCE);
    }
}

#[test]
fn gradients_are_straight_through() {
    for case in cases() {
        check_gradients(&case, &[0, 1, 2]);
    }
}

/// The hidden state of a step reaches the next step through integers alone.
#[test]
fn gradients_pass_from_step_to_step() {
    for case in cases() {
        check_gradients(&case, &[0]);
    }
}

#[test]
fn rejects_mismatched_inputs() {
    let reject = |change: &dyn Fn(&mut Case), message: &str| {
        let mut case = Case::new("refused", "bidirectional").with_columns().with_all_floats();
        change(&mut case);
        let inputs: Vec<Option<&Tensor>> = case.inputs.iter().map(Option::as_ref).collect();
        let error = one_node_graph(NEWEST_OPSET, OPERATOR, &inputs, RESULT_COUNT, case.attrs.clone());
        let error = error.expect_err("it must be refused").to_string();
        assert!(error.contains(message), "{error:?} instead of {message:?}");
    };
    let zeros = |dtype: DType, dims: &[usize]| Some(Tensor::filled(dtype, dims, 0.0));
    reject(&|case| case.inputs[W_SCALE] = None, "input 8 is missing");
    reject(&|case| case.inputs.truncate(11), "input 11 is missing");
    reject(&|case| case.attrs = case.attrs.clone().with("layout", 1i64), "layout must be 0");
    reject(&|case| case.inputs[W] = zeros(DType::I32, &[2, INPUT, COLUMNS]), "int8 or uint8");
    reject(
        &|case| case.inputs[W] = zeros(DType::U8, &[2, COLUMNS, INPUT]),
        "input 1 has shape [2, 12, 2], expected [2, 2, 12]",
    );
    reject(
        &|case| case.inputs[R] = zeros(DType::U8, &[2, COLUMNS, HIDDEN]),
        "input 2 has shape [2, 12, 3], expected [2, 3, 12]",
    );
    reject(&|case| case.inputs[R_ZERO_POINT] = zeros(DType::I8, &[2, COLUMNS]), "is of type int8");
    reject(
        &|case| case.inputs[R_ZERO_POINT] = zeros(DType::U8, &[1]),
        "input 11 has shape [1], expected [2]",
    );
    reject(
        &|case| case.inputs[W_SCALE] = Some(f64s(&[2, 2], &[1.0; 4])),
        "input 8 has shape [2, 2], expected [2, 12]",
    );
    reject(&|case| case.inputs[H0] = zeros(DType::F32, &[2, BATCH, HIDDEN]), "insert a Cast");
}
