//! Fused layer normalization of ONNX Runtime's optimizer: `SkipLayerNormalization`, `SkipSimplifiedLayerNormalization`
//! and `EmbedLayerNormalization` of `com.microsoft`.
//!
//! Source: ONNX Runtime's contributed operators, version 1
//! (<https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md>). The first two normalize the sum of
//! data, a skip connection and an optional bias, and also return the sum. The skip connection may have a batch of 1 or
//! no batch axis. The third adds the embeddings of tokens, positions and optional segments, normalizes the sum, and
//! counts the ones of a mask.
//!
//! They are decomposed into sums, Gather, LayerNormalization and SimplifiedLayerNormalization. Every float has a
//! gradient, including the sum as a result.

use ortrain_graph::{Attrs, DType, Dim, Node, Shape, Tensor, ValueId, ValueType};

use crate::OpError;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::cast;
use crate::support::norms::check_broadcasts;
use crate::support::sizes::{Size, concat_sizes, dtype_of, reduce_sum_axes, size_of, slice_between};

const MICROSOFT: &str = "com.microsoft";
const SKIP: &str = "SkipLayerNormalization";
const SIMPLIFIED: &str = "SkipSimplifiedLayerNormalization";
const EMBED: &str = "EmbedLayerNormalization";

/// Default of the attribute `epsilon`.
const EPSILON: f32 = 1e-12;

/// Checks that a value is a vector with the length `width`.
fn check_vector(cx: &Infer<'_>, k: usize, width: Option<&Dim>) -> Result<(), OpError> {
    let Some(actual) = cx.shape(k) else { return Ok(()) };
    let differs = matches!((actual.first().and_then(Dim::known), width.and_then(Dim::known)), (Some(a), Some(b)) if a != b);
    if actual.rank() != 1 || differs {
        let width = width.map_or("width".to_owned(), ToString::to_string);
        return Err(OpError::invalid(format!("input {k} has shape {actual}, expected [{width}]")));
    }
    Ok(())
}

/// Returns epsilon in the form of the attribute of the normalization operators.
fn epsilon_attr(rw: &Rewrite<'_>) -> Result<f32, OpError> {
    Ok(rw.attrs().float("epsilon")?.unwrap_or(EPSILON))
}

/// Normalized sum of two inputs and a bias.
struct SkipLayerNorm {
    /// True if the mean is subtracted, and a shift is added after the scale.
    subtracts_mean: bool,
}

impl SkipLayerNorm {
    fn from_node(node: &Node) -> SkipLayerNorm {
        SkipLayerNorm { subtracts_mean: &*node.op == SKIP }
    }

    /// Returns the input indices of the shift and the bias.
    fn shift_and_bias(&self) -> (Option<usize>, usize) {
        if self.subtracts_mean { (Some(3), 4) } else { (None, 3) }
    }
}

impl Op for SkipLayerNorm {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let (_, bias) = self.shift_and_bias();
        cx.check_arity(3, bias + 1, 4)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        cx.expect_same_dtype(0..=bias)?;
        let shape = cx.shape(0).cloned();
        check_broadcasts(cx, 1, 0)?;
        let width = shape.as_ref().and_then(|shape| shape.last().cloned());
        if shape.as_ref().is_some_and(|shape| shape.rank() == 0) {
            return Err(OpError::invalid("input 0 is a scalar; there is no axis to normalize"));
        }
        for k in 2..=bias {
            check_vector(cx, k, width.as_ref())?;
        }
        let statistics = shape.clone().map(|mut shape| {
            if let Some(last) = shape.last_mut() {
                *last = Dim::Known(1);
            }
            shape
        });
        cx.set_output(0, dtype, shape.clone());
        cx.set_output(1, DType::F32, statistics.clone());
        cx.set_output(2, DType::F32, statistics);
        cx.set_output(3, dtype, shape);
        Ok(())
    }
}

fn decompose_skip(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = SkipLayerNorm::from_node(rw.node());
    if !op.subtracts_mean && rw.has_output(1) {
        return Err(OpError::unsupported(
            "its output mean is not defined, because the normalization subtracts no mean",
        ));
    }
    let (x, skip, scale) = (rw.required_input(0)?, rw.required_input(1)?, rw.required_input(2)?);
    let (shift, bias) = op.shift_and_bias();
    let mut sum = rw.add("Add", &[x, skip], Attrs::new());
    if let Some(bias) = rw.input(bias) {
        sum = rw.add("Add", &[sum, bias], Attrs::new());
    }
    let attrs = Attrs::new().with("axis", -1i64).with("epsilon", epsilon_attr(rw)?);
    let shift = shift.and_then(|k| rw.input(k));
    let inputs: Vec<Option<ValueId>> = [Some(sum), Some(scale)].into_iter().chain(shift.map(Some)).collect();
    let (name, max_outputs) =
        if op.subtracts_mean { ("LayerNormalization", 3) } else { ("SimplifiedLayerNormalization", 2) };
    let wants_statistics = rw.has_output(1) || rw.has_output(2);
    let outputs = rw.add_node("", name, &inputs, if wants_statistics { max_outputs } else { 1 }, attrs);
    rw.replace_output(0, outputs[0]);
    if wants_statistics {
        if op.subtracts_mean {
            rw.replace_output(1, outputs[1]);
        }
        rw.replace_output(2, outputs[max_outputs - 1]);
    }
    rw.replace_output(3, sum);
    Ok(())
}

const TOKENS: usize = 0;
const SEGMENTS: usize = 1;
const TOKEN_EMBEDDINGS: usize = 2;
const POSITION_EMBEDDINGS: usize = 3;
const SEGMENT_EMBEDDINGS: usize = 4;
const SCALE: usize = 5;
const SHIFT: usize = 6;
const MASK: usize = 7;
const POSITIONS: usize = 8;

/// Normalized sum of embeddings.
struct EmbedLayerNorm;

impl Op for EmbedLayerNorm {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 9, 3)?;
        if let Some(missing) =
            [TOKEN_EMBEDDINGS, POSITION_EMBEDDINGS, SCALE, SHIFT].into_iter().find(|&k| !cx.has_input(k))
        {
            return Err(OpError::invalid(format!("input {missing} is missing")));
        }
        for k in [TOKENS, SEGMENTS, MASK, POSITIONS] {
            if cx.has_input(k) {
                cx.expect_dtype(k, "int32", |dtype| matches!(dtype, DType::I32 | DType::I64))?;
            }
        }
        let dtype = cx.expect_dtype(TOKEN_EMBEDDINGS, "a float type", DType::is_float)?;
        cx.expect_same_dtype([TOKEN_EMBEDDINGS, POSITION_EMBEDDINGS, SEGMENT_EMBEDDINGS, SCALE, SHIFT])?;
        if cx.has_input(SEGMENTS) != cx.has_input(SEGMENT_EMBEDDINGS) {
            return Err(OpError::invalid(
                "segments need segment embeddings, and segment embeddings need segments",
            ));
        }
        let differ_in_size = |a: Option<&Dim>, b: Option<&Dim>| matches!((a.and_then(Dim::known), b.and_then(Dim::known)), (Some(a), Some(b)) if a != b);
        let tokens = cx.shape(TOKENS).cloned();
        if let Some(tokens) = &tokens {
            if tokens.rank() != 2 {
                return Err(OpError::invalid(format!(
                    "input {TOKENS} has shape {tokens}, expected [batch, length]"
                )));
            }
            for k in [SEGMENTS, MASK, POSITIONS] {
                let Some(actual) = cx.shape(k) else { continue };
                // Positions may be shared by the whole batch.
                let of_batch = !(k == POSITIONS && actual.first().is_some_and(Dim::is_one));
                let differ = (of_batch && differ_in_size(actual.first(), tokens.first()))
                    || differ_in_size(actual.get(1), tokens.get(1));
                if actual.rank() != 2 || differ {
                    return Err(OpError::invalid(format!("input {k} has shape {actual}, expected {tokens}")));
                }
            }
        }
        let width = [TOKEN_EMBEDDINGS, POSITION_EMBEDDINGS]
            .iter()
            .find_map(|&k| cx.shape(k).and_then(|shape| shape.get(1)))
            .cloned();
        for k in [TOKEN_EMBEDDINGS, POSITION_EMBEDDINGS, SEGMENT_EMBEDDINGS] {
            let Some(table_shape) = cx.shape(k) else { continue };
            if table_shape.rank() != 2 || differ_in_size(table_shape.get(1), width.as_ref()) {
                return Err(OpError::invalid(format!(
                    "input {k} has shape {table_shape}, expected [rows, {}] (one row for each index)",
                    width.map_or("width".to_owned(), |width| width.to_string())
                )));
            }
        }
        for k in [SCALE, SHIFT] {
            check_vector(cx, k, width.as_ref())?;
        }
        if let (Some(length), Some(rows), false) = (
            tokens.as_ref().and_then(|tokens| tokens[1].known()),
            cx.shape(POSITION_EMBEDDINGS).and_then(|shape| shape[0].known()),
            cx.has_input(POSITIONS),
        ) && length > rows
        {
            return Err(OpError::invalid(format!(
                "{length} positions need at least {length} position embeddings, got {rows}"
            )));
        }
        let sums = tokens.clone().map(|tokens| -> Shape {
            let width = width.clone().unwrap_or_else(|| cx.unknown_dim(0, 2));
            tokens.iter().cloned().chain([width]).collect()
        });
        cx.set_output(0, dtype, sums.clone());
        cx.set_output(1, DType::I32, tokens.map(|tokens| tokens[..1].iter().cloned().collect()));
        cx.set_output(2, dtype, sums);
        Ok(())
    }
}

fn decompose_embed(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let tokens = rw.required_input(TOKENS)?;
    let [of_tokens, of_positions, scale, shift] = [
        rw.required_input(TOKEN_EMBEDDINGS)?,
        rw.required_input(POSITION_EMBEDDINGS)?,
        rw.required_input(SCALE)?,
        rw.required_input(SHIFT)?,
    ];
    let looked_up = |rw: &mut Rewrite<'_>, table: ValueId, rows: ValueId| {
        rw.add("Gather", &[table, rows], Attrs::new().with("axis", 0i64))
    };
    let token_rows = looked_up(rw, of_tokens, tokens);
    let position_rows = match rw.input(POSITIONS) {
        Some(positions) => looked_up(rw, of_positions, positions),
        None => {
            let length = size_of(rw, tokens, 1);
            slice_between(rw, of_positions, 0, Size::Number(0), length)
        }
    };
    let mut sum = rw.add("Add", &[token_rows, position_rows], Attrs::new());
    if let (Some(segments), Some(table)) = (rw.input(SEGMENTS), rw.input(SEGMENT_EMBEDDINGS)) {
        let rows = looked_up(rw, table, segments);
        sum = rw.add("Add", &[sum, rows], Attrs::new());
    }
    let attrs = Attrs::new().with("axis", -1i64).with("epsilon", epsilon_attr(rw)?);
    let normal = rw.add("LayerNormalization", &[sum, scale, shift], attrs);
    rw.replace_output(0, normal);
    if rw.has_output(1) {
        let count = match rw.input(MASK) {
            Some(mask) => {
                let of_mask = dtype_of(rw, mask, "the mask")?;
                let one = rw.constant("one", Tensor::scalar(of_mask, 1.0));
                let ones = rw.add("Equal", &[mask, one], Attrs::new());
                let ones = cast(rw.patch().1, ones, DType::Bool, DType::I32);
                reduce_sum_axes(rw, ones, &[1])
            }
            None => {
                // Without a mask the counts are zero.
                let batch = size_of(rw, tokens, 0);
                let zero = rw.constant("zero", Tensor::filled(DType::I32, &[1], 0.0));
                let shape = concat_sizes(rw, &[batch]);
                rw.add("Expand", &[zero, shape], Attrs::new())
            }
        };
        rw.replace_output(1, count);
    }
    rw.replace_output(2, sum);
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    let skip = |name| {
        Definition::new(MICROSOFT, name, &[1], |_, node| Ok(Box::new(SkipLayerNorm::from_node(node))))
            .composition(decompose_skip)
    };
    vec![
        skip(SKIP).weights(&[2, 3, 4]),
        skip(SIMPLIFIED).weights(&[2, 3]),
        Definition::new(MICROSOFT, EMBED, &[1], |_, _| Ok(Box::new(EmbedLayerNorm)))
            .sample(|_| {
                let ty = |dtype, dims: &[usize]| Some(ValueType::tensor(dtype, dims));
                let mut inputs = vec![ty(DType::I32, &[2, 2]); TOKEN_EMBEDDINGS];
                inputs.resize(SCALE, ty(DType::F32, &[2, 2]));
                inputs.resize(SHIFT + 1, ty(DType::F32, &[2]));
                Sample { inputs, ..Sample::default() }
            })
            .composition(decompose_embed)
            .weights(&[TOKEN_EMBEDDINGS, POSITION_EMBEDDINGS, SEGMENT_EMBEDDINGS, SCALE, SHIFT]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{
        assert_close, check_decomposition, check_gradients, f64s, generic_tensor, one_node_graph, run,
        run_node,
    };

    /// Tolerance of a few sums in float64, in another order.
    const TOLERANCE: f64 = 1e-11;
    const WIDTH: usize = 5;

    /// Normalizes, scales and shifts rows of `WIDTH` numbers.
    fn normalized(sum: &[f64], scale: &[f64], shift: Option<&[f64]>, epsilon: f64) -> Vec<f64> {
        let row = |row: &[f64]| -> Vec<f64> {
            let mean = if shift.is_some() { row.iter().sum::<f64>() / WIDTH as f64 } else { 0.0 };
            let square = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / WIDTH as f64;
            let normalize = |(k, x): (usize, &f64)| {
                (x - mean) / (square + epsilon).sqrt() * scale[k] + shift.map_or(0.0, |shift| shift[k])
            };
            row.iter().enumerate().map(normalize).collect()
        };
        sum.chunks(WIDTH).flat_map(row).collect()
    }

    #[test]
    fn normalizes_sum() {
        for (name, centred) in [(SKIP, true), (SIMPLIFIED, false)] {
            for skip in [&[2, 3, WIDTH][..], &[1, 3, WIDTH], &[3, WIDTH]] {
                for with_bias in [false, true] {
                    let (x, skip) = (generic_tensor(&[2, 3, WIDTH], 1), generic_tensor(skip, 2));
                    let [scale, shift, bias] = [3, 4, 5].map(|seed| generic_tensor(&[WIDTH], seed));
                    let mut ports = vec![Some(&x), Some(&skip), Some(&scale)];
                    if centred {
                        ports.push(Some(&shift));
                    }
                    if with_bias {
                        ports.push(Some(&bias));
                    }
                    let attrs = Attrs::new().with("epsilon", 0.25f32);
                    let (x_numbers, skips, biases) = (x.to_f64(), skip.to_f64(), bias.to_f64());
                    let at = |k: usize| {
                        let bias = if with_bias { biases[k % WIDTH] } else { 0.0 };
                        x_numbers[k] + skips[k % skips.len()] + bias
                    };
                    let sum: Vec<f64> = (0..x_numbers.len()).map(at).collect();
                    let shifts = shift.to_f64();
                    let y = normalized(&sum, &scale.to_f64(), centred.then_some(shifts.as_slice()), 0.25);
                    // The normalized result and the sum.
                    let mut graph = one_node_graph(17, (MICROSOFT, name), &ports, 4, attrs).expect("valid");
                    graph.outputs = vec![graph.outputs[0], graph.outputs[3]];
                    for port in &mut graph.nodes[0].outputs[1..3] {
                        *port = None;
                    }
                    let inputs: Vec<Tensor> = ports.into_iter().flatten().cloned().collect();
                    let got = run(&graph, &inputs).expect("the graph runs");
                    assert_close(&got[0], &f64s(x.dims(), &y), TOLERANCE);
                    assert_close(&got[1], &f64s(x.dims(), &sum), TOLERANCE);
                    let targets: Vec<usize> = (0..inputs.len()).collect();
                    check_gradients(&graph, &inputs, &targets, &[0, 1]);
                    check_decomposition(&graph, &inputs, TOLERANCE);
                }
            }
        }
    }

    #[test]
    fn statistics() {
        let (x, skip, scale) =
            (generic_tensor(&[2, WIDTH], 1), generic_tensor(&[2, WIDTH], 2), generic_tensor(&[WIDTH], 3));
        let [x, skip, scale] = [x, skip, scale].map(|tensor| {
            let numbers: Vec<f32> = tensor.to_f64().into_iter().map(|x| x as f32).collect();
            Tensor::f32(tensor.dims(), &numbers)
        });
        let ports = [Some(&x), Some(&skip), Some(&scale)];
        let got = run_node((MICROSOFT, SKIP), &[ports[0], ports[1], ports[2], Some(&scale)], 4, Attrs::new());
        let got = got.expect("the graph runs");
        assert_eq!((got[1].dims(), got[2].dims()), (&[2, 1][..], &[2, 1][..]));
        let sums = got[3].to_f64();
        for row in 0..2 {
            let row_values = &sums[row * WIDTH..(row + 1) * WIDTH];
            let mean = row_values.iter().sum::<f64>() / WIDTH as f64;
            assert!((got[1].to_f64()[row] - mean).abs() < 1e-6);
        }
        let error = match run_node((MICROSOFT, SIMPLIFIED), &ports, 4, Attrs::new()) {
            Err(crate::testing::Failure::Prepare(error)) => error.to_string(),
            other => panic!("{other:?}"),
        };
        assert!(error.contains("its output mean is not defined"), "{error}");
    }

    /// Tables of 7 tokens, 4 positions and 2 segments.
    fn tables() -> [Tensor; 5] {
        [
            generic_tensor(&[7, WIDTH], 1),
            generic_tensor(&[4, WIDTH], 2),
            generic_tensor(&[2, WIDTH], 3),
            generic_tensor(&[WIDTH], 4),
            generic_tensor(&[WIDTH], 5),
        ]
    }

    #[test]
    fn embeddings_are_added_and_normalized() {
        let int = |dims: &[usize], numbers: &[i32]| Tensor::from_slice(DType::I32, dims, numbers);
        let tokens = int(&[2, 3], &[6, 0, 1, 1, 2, 6]);
        let segments = int(&[2, 3], &[0, 1, 1, 0, 0, 1]);
        let mask = int(&[2, 3], &[1, 1, 0, 1, 0, 0]);
        let each = int(&[2, 3], &[3, 2, 1, 0, 0, 2]);
        let shared = int(&[1, 3], &[3, 1, 1]);
        let [token_table, position_table, parts, scale, shift] = tables();
        for positions in [None, Some(&each), Some(&shared)] {
            for with_segments in [false, true] {
                let ports = [
                    Some(&tokens),
                    with_segments.then_some(&segments),
                    Some(&token_table),
                    Some(&position_table),
                    with_segments.then_some(&parts),
                    Some(&scale),
                    Some(&shift),
                    Some(&mask),
                    positions,
                ];
                let graph = one_node_graph(17, (MICROSOFT, EMBED), &ports, 3, Attrs::new()).expect("valid");
                let inputs: Vec<Tensor> = ports.into_iter().flatten().cloned().collect();
                let got = run(&graph, &inputs).expect("the graph runs");
                let int_at = |tensor: &Tensor, k: usize| tensor.to_f64()[k % tensor.len()] as usize;
                let mut sum = Vec::new();
                for k in 0..6 {
                    let position = positions.map_or(k % 3, |positions| int_at(positions, k));
                    for column in 0..WIDTH {
                        let at = |table: &Tensor, row: usize| table.to_f64()[row * WIDTH + column];
                        let part = if with_segments { at(&parts, int_at(&segments, k)) } else { 0.0 };
                        sum.push(at(&token_table, int_at(&tokens, k)) + at(&position_table, position) + part);
                    }
                }
                let y = normalized(&sum, &scale.to_f64(), Some(&shift.to_f64()), f64::from(EPSILON));
                assert_close(&got[0], &f64s(&[2, 3, WIDTH], &y), TOLERANCE);
                assert_eq!(got[1], int(&[2], &[2, 1]));
                assert_close(&got[2], &f64s(&[2, 3, WIDTH], &sum), TOLERANCE);
                let floats: Vec<usize> =
                    (0..inputs.len()).filter(|&k| inputs[k].dtype() == DType::F64).collect();
                check_gradients(&graph, &inputs, &floats, &[0, 2]);
                check_decomposition(&graph, &inputs, TOLERANCE);
            }
        }
        let ports = [
            Some(&tokens),
            None,
            Some(&token_table),
            Some(&position_table),
            None,
            Some(&scale),
            Some(&shift),
        ];
        let got = run_node((MICROSOFT, EMBED), &ports, 2, Attrs::new()).expect("the graph runs");
        assert_eq!(got[1], int(&[2], &[0, 0]), "nothing is counted without a mask");
    }

    #[test]
    fn rejects_invalid_inputs() {
        let (x, vector, short) =
            (generic_tensor(&[2, 3, WIDTH], 1), generic_tensor(&[WIDTH], 2), generic_tensor(&[WIDTH - 1], 3));
        let skip = |ports: &[Option<&Tensor>]| one_node_graph(17, (MICROSOFT, SKIP), ports, 1, Attrs::new());
        let wide = generic_tensor(&[4, 3, WIDTH], 4);
        for (ports, fragment) in [
            (
                vec![Some(&x), Some(&wide), Some(&vector)],
                "input 1 has shape [4, 3, 5], which does not broadcast to [2, 3, 5]",
            ),
            (vec![Some(&x), Some(&x), Some(&short)], "input 2 has shape [4], expected [5]"),
            (
                vec![Some(&x), Some(&x), Some(&vector), None, Some(&short)],
                "input 4 has shape [4], expected [5]",
            ),
            (vec![Some(&x), Some(&x)], "expected 3 to 5 inputs, got 2"),
        ] {
            let error = skip(&ports).expect_err("refused").to_string();
            assert!(error.contains(fragment), "{error}");
        }
        let tokens = Tensor::from_slice(DType::I32, &[2, 3], &[0i32; 6]);
        let six = Tensor::from_slice(DType::I32, &[1, 6], &[0i32; 6]);
        let [token_table, position_table, parts, scale, shift] = tables();
        let embed = |tokens, segments, table, parts, mask| {
            let ports = [
                Some(tokens),
                segments,
                Some(table),
                Some(&position_table),
                parts,
                Some(&scale),
                Some(&shift),
                mask,
            ];
            one_node_graph(17, (MICROSOFT, EMBED), &ports, 1, Attrs::new()).expect_err("refused").to_string()
        };
        for (error, expected) in [
            (embed(&tokens, Some(&tokens), &token_table, None, None), "segments need segment embeddings"),
            (
                embed(&tokens, None, &token_table, None, Some(&six)),
                "input 7 has shape [1, 6], expected [2, 3]",
            ),
            (
                embed(&six, None, &token_table, None, None),
                "6 positions need at least 6 position embeddings, got 4",
            ),
            (
                embed(&tokens, Some(&tokens), &generic_tensor(&[7, 2], 1), Some(&parts), None),
                "input 3 has shape [4, 5], expected [rows, 2]",
            ),
        ] {
            assert!(error.contains(expected), "{error}");
        }
    }
}
