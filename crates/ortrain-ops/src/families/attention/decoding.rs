//! Variants of `MultiHeadAttention`: `DecoderMaskedMultiHeadAttention` and `PackedMultiHeadAttention` of
//! `com.microsoft`, version 1.
//!
//! `DecoderMaskedMultiHeadAttention` has one query for each item: the newest token of a generated text. Its inputs are
//! the inputs of `MultiHeadAttention` in another order. `PackedMultiHeadAttention` has the tokens of all items behind
//! each other, without padding. `token_offset` has the place of each token in the padded batch, and
//! `cumulative_sequence_length` has the ends of the items.
//!
//! Both are compositions around `MultiHeadAttention`. Limits: caches that past and present share, beams, and the output
//! `qk` are for text generation and are refused.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId, ValueType};

use super::common::{CommonAttrs, MICROSOFT};
use super::multi_head::MULTI_HEAD;
use crate::OpError;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::cast;
use crate::support::quantization_grid::{emit, typed_input};
use crate::support::sizes::{
    Size, as_vector, concat_sizes, divide_sizes, insert_axes, multiply_sizes, reshape_to, shape_of, size_of,
    slice_between,
};

/// Attributes that `MultiHeadAttention` has too.
fn shared_attrs(attrs: &Attrs) -> Attrs {
    let mut shared = attrs.clone();
    for name in ["output_qk", "past_present_share_buffer"] {
        shared.0.remove(name);
    }
    shared
}

/// `DecoderMaskedMultiHeadAttention`.
struct MaskedDecoder {
    common: CommonAttrs,
}

/// Inputs of [`MaskedDecoder`] in the order of `MultiHeadAttention`: queries, keys, values, bias, mask, attention bias,
/// past keys, past values.
const MULTI_HEAD_ORDER: [usize; 8] = [0, 1, 2, 10, 3, 4, 5, 6];
const DECODER_INPUTS: usize = 11;

impl Op for MaskedDecoder {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, DECODER_INPUTS, 4)?;
        for (k, what) in [(7, "past_sequence_length"), (8, "beam_width"), (9, "cache_indirection")] {
            if cx.has_input(k) {
                return Err(OpError::unsupported(format!(
                    "input {k} ({what}) is for text generation and cannot be trained; export the model without it"
                )));
            }
        }
        if cx.has_output(3) {
            return Err(OpError::unsupported(
                "output 3 (qk) is for text generation; export the model without it",
            ));
        }
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        cx.expect_same_dtype([0, 1, 2, 4, 5, 6, 10])?;
        let Some(query) = cx.shape(0) else {
            (0..3).for_each(|k| cx.set_output(k, dtype, None));
            return Ok(());
        };
        if query.rank() != 3 || query[1].known().is_some_and(|length| length != 1) {
            return Err(OpError::invalid(format!(
                "the queries have shape {query}; [batch, 1, width] is needed"
            )));
        }
        let is_packed = !cx.has_input(1);
        let parts: usize = if is_packed { 3 } else { 1 };
        let width = query[2].known();
        if width.is_some_and(|width| width % parts.saturating_mul(self.common.heads as usize) != 0) {
            return Err(OpError::invalid(format!(
                "the last axis of the queries, of shape {query}, cannot be divided into {} heads",
                self.common.heads
            )));
        }
        let heads = Dim::Known(self.common.heads as usize);
        let size = width.map(|width| Dim::Known(width / parts / self.common.heads as usize));
        let of_values = match cx.shape(2) {
            Some(value) if value.rank() == 3 => {
                value[2].known().map(|width| Dim::Known(width / self.common.heads as usize))
            }
            Some(value) if value.rank() == 4 => Some(value[3].clone()),
            _ => size.clone(),
        };
        let result = of_values
            .as_ref()
            .and_then(Dim::known)
            .map(|size| Dim::Known(size.saturating_mul(self.common.heads as usize)));
        let result = [query[0].clone(), query[1].clone(), result.unwrap_or_else(|| cx.unknown_dim(0, 2))];
        for (k, size) in [(1, size), (2, of_values)] {
            let past = cx.shape(4 + k).and_then(|past| past.get(2)).and_then(Dim::known);
            let length = match (cx.shape(k), past) {
                (Some(key), _) if key.rank() == 4 => key[2].clone(),
                (_, Some(past)) => Dim::Known(past.saturating_add(1)),
                (_, None) if !cx.has_input(4 + k) => Dim::Known(1),
                _ => cx.unknown_dim(k, 2),
            };
            let size = size.unwrap_or_else(|| cx.unknown_dim(k, 3));
            let present = [query[0].clone(), heads.clone(), length, size];
            cx.set_output(k, dtype, Some(present.into_iter().collect()));
        }
        cx.set_output(0, dtype, Some(result.into_iter().collect()));
        Ok(())
    }
}

fn decompose_masked_decoder(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let mut inputs = MULTI_HEAD_ORDER.map(|k| rw.input(k));
    if inputs[1].is_none() {
        let query = rw.required_input(0)?;
        let width = size_of(rw, query, 2);
        let part = divide_sizes(rw, width, Size::Number(3));
        let second = multiply_sizes(rw, part, Size::Number(2));
        let ends = [Size::Number(0), part, second, Size::Number(i64::MAX)];
        for k in 0..3 {
            inputs[k] = Some(slice_between(rw, query, 2, ends[k], ends[k + 1]));
        }
    }
    let attrs = shared_attrs(rw.attrs());
    let results = rw.add_node(MICROSOFT, MULTI_HEAD, &inputs, 3, attrs);
    for (k, value) in results.into_iter().enumerate() {
        if rw.has_output(k) {
            rw.replace_output(k, value);
        }
    }
    Ok(())
}

/// `PackedMultiHeadAttention`.
struct PackedMultiHead {
    common: CommonAttrs,
}

const QUERY: usize = 0;
const KEY: usize = 1;
const VALUE: usize = 2;
const BIAS: usize = 3;
const TOKEN_OFFSET: usize = 4;
const CUMULATIVE: usize = 5;
const ATTENTION_BIAS: usize = 6;

impl Op for PackedMultiHead {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let has_required = [QUERY, TOKEN_OFFSET, CUMULATIVE].iter().all(|&k| cx.has_input(k));
        if !has_required || cx.node().inputs.len() > ATTENTION_BIAS + 1 || cx.node().outputs.len() > 1 {
            return Err(OpError::invalid("queries, token_offset and cumulative_sequence_length are needed"));
        }
        let dtype = cx.expect_dtype(QUERY, "a float type", DType::is_float)?;
        cx.expect_same_dtype([QUERY, KEY, VALUE, BIAS, ATTENTION_BIAS])?;
        for k in [TOKEN_OFFSET, CUMULATIVE] {
            cx.expect_dtype(k, "int32", |dtype| dtype == DType::I32)?;
        }
        if let Some(offsets) = cx.shape(TOKEN_OFFSET)
            && offsets.rank() != 2
        {
            return Err(OpError::invalid(format!(
                "token_offset has shape {offsets}; [batch, length] is needed"
            )));
        }
        if cx.has_input(KEY) != cx.has_input(VALUE) {
            return Err(OpError::invalid("keys and values must both be present or both be absent"));
        }
        let heads = self.common.heads as usize;
        let shape = match (cx.shape(QUERY), cx.shape(VALUE)) {
            (Some(query), None) if query.rank() == 4 && !cx.has_input(VALUE) => {
                let expected = [(1, heads), (2, 3)];
                if expected.iter().any(|&(axis, size)| query[axis].known().is_some_and(|found| found != size))
                {
                    return Err(OpError::invalid(format!(
                        "packed queries have shape {query}, but [tokens, {heads}, 3, size] is needed"
                    )));
                }
                let width = query[3]
                    .known()
                    .map_or_else(|| cx.unknown_dim(0, 1), |size| Dim::Known(size.saturating_mul(heads)));
                Some([query[0].clone(), width].into_iter().collect::<Shape>())
            }
            (Some(query), Some(value)) if query.rank() == 2 && value.rank() == 2 => {
                for (what, shape) in [("queries", query), ("values", value)] {
                    self.common.head_size(what, shape.get(1))?;
                }
                Some([query[0].clone(), value[1].clone()].into_iter().collect())
            }
            (Some(query), _) if !(query.rank() == 2 && cx.has_input(VALUE)) => {
                return Err(OpError::invalid(format!(
                    "queries of shape {query} are not supported; expected [tokens, width] with keys and values, or \
                     [tokens, heads, 3, size] alone"
                )));
            }
            _ => None,
        };
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

/// Puts the rows of tokens, `[tokens, ..]`, into a padded batch, `[batch, length, ..]`.
fn pad_tokens(
    rw: &mut Rewrite<'_>,
    (tokens, dtype): (ValueId, DType),
    places: ValueId,
    [batch, length]: [Size; 2],
    tail: &[Size],
) -> ValueId {
    let rows = multiply_sizes(rw, batch, length);
    let shape: Vec<Size> = [rows].into_iter().chain(tail.iter().copied()).collect();
    let shape = concat_sizes(rw, &shape);
    let zeros =
        rw.add("ConstantOfShape", &[shape], Attrs::new().with("value", Tensor::filled(dtype, &[1], 0.0)));
    let padded = emit(rw, "ScatterND", &[zeros, places, tokens]);
    let shape: Vec<Size> = [batch, length].into_iter().chain(tail.iter().copied()).collect();
    reshape_to(rw, padded, &shape)
}

fn decompose_packed(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let query = typed_input(rw, QUERY)?;
    let offsets = rw.required_input(TOKEN_OFFSET)?;
    let sizes = [size_of(rw, offsets, 0), size_of(rw, offsets, 1)];
    let count = size_of(rw, query.0, 0);
    let every = reshape_to(rw, offsets, &[Size::Number(-1)]);
    let every = cast(rw, every, DType::I32, DType::I64);
    let rows = slice_between(rw, every, 0, Size::Number(0), count);
    let places = insert_axes(rw, rows, &[1]);
    // The lengths of the items are the ends of their visible keys.
    let cumulative = rw.required_input(CUMULATIVE)?;
    let ends = slice_between(rw, cumulative, 0, Size::Number(1), Size::Number(i64::MAX));
    let starts = slice_between(rw, cumulative, 0, Size::Number(0), Size::Number(-1));
    let lengths = emit(rw, "Sub", &[ends, starts]);
    let batch = as_vector(rw, sizes[0]);
    let lengths = emit(rw, "Reshape", &[lengths, batch]);
    let rank = shape_of(rw, query.0, "the queries")?.rank();
    let mut inputs = [None; 6];
    if rank == 4 {
        let tail = [1, 2, 3].map(|axis| size_of(rw, query.0, axis));
        inputs[0] = Some(pad_tokens(rw, query, places, sizes, &tail));
    } else {
        for k in [QUERY, KEY, VALUE] {
            let tokens = typed_input(rw, k)?;
            let width = size_of(rw, tokens.0, 1);
            inputs[k] = Some(pad_tokens(rw, tokens, places, sizes, &[width]));
        }
    }
    inputs[3] = rw.input(BIAS);
    inputs[4] = Some(lengths);
    inputs[5] = rw.input(ATTENTION_BIAS);
    let attrs = rw.attrs().clone();
    let padded = rw.add_node(MICROSOFT, MULTI_HEAD, &inputs, 1, attrs)[0];
    let width = match rank {
        4 => {
            let parts = [1, 3].map(|axis| size_of(rw, query.0, axis));
            multiply_sizes(rw, parts[0], parts[1])
        }
        _ => {
            let value = rw.required_input(VALUE)?;
            size_of(rw, value, 1)
        }
    };
    let flat = reshape_to(rw, padded, &[Size::Number(-1), width]);
    let result = rw.add("Gather", &[flat, rows], Attrs::new().with("axis", 0i64));
    rw.replace_output(0, result);
    Ok(())
}

fn build_masked_decoder(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(MaskedDecoder { common: CommonAttrs::read(node)? }))
}

fn build_packed(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(PackedMultiHead { common: CommonAttrs::read(node)? }))
}

pub(super) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new(MICROSOFT, "DecoderMaskedMultiHeadAttention", &[1], build_masked_decoder)
            .composition(decompose_masked_decoder)
            .weights(&[10])
            .sample(|_| {
                let token: (DType, &[usize]) = (DType::F32, &[2, 1, 2]);
                Sample::with_inputs(Attrs::new().with("num_heads", 1i64), &[token; 3])
            }),
        Definition::new(MICROSOFT, "PackedMultiHeadAttention", &[1], build_packed)
            .composition(decompose_packed)
            .weights(&[BIAS])
            .sample(|_| {
                let floats = Some(ValueType::tensor(DType::F32, &[2, 2]));
                let [offsets, ends] =
                    [&[1, 2][..], &[2]].map(|dims| Some(ValueType::tensor(DType::I32, dims)));
                let inputs = vec![floats.clone(), floats.clone(), floats, None, offsets, ends];
                Sample { inputs, ..Sample::of(Attrs::new().with("num_heads", 1i64)) }
            }),
    ]
}
