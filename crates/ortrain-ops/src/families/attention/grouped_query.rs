//! `GroupQueryAttention` of `com.microsoft`, version 1: the attention of decoders.
//!
//! Queries, keys and values are separate inputs, or packed in the first one. Several query heads share a head of keys
//! and values. With `do_rotary`, queries and keys are rotated by their positions.
//!
//! Item `b` of the batch has `seqlens_k[b] + 1` keys in total. If the number of queries equals `total_sequence_length`,
//! the queries are a prompt: all keys are new, and the past is not read. Otherwise the new keys follow the keys of the
//! past. The past may be longer than its used part, and its used part may differ between items. The presents contain
//! the used part of the past, then the new keys; their other rows are unspecified.
//!
//! Queries see no later keys, unless `causal` is 0. `local_window_size` is the number of visible keys including the
//! query's own. `head_sink` adds one exponential per head to the denominator of the attention weights, and
//! `smooth_softmax` adds the exponential of 0.
//!
//! The operator is a composition, so every float input has a gradient.
//!
//! Limits: quantized caches and `sliding_window_cache` are for generation and are not supported. The ranks of the inputs
//! must be known.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId, ValueType};

use super::scores::{Heads, Offset, Scale, ScaledDotProduct, Window, merge_heads, or_conditions, pad_mask};
use crate::OpError;
use crate::families::attention::checks::{check_mask, same_size, sizes_differ};
use crate::families::attention::common::MICROSOFT;
use crate::infer::Infer;
use crate::op::{Definition, Op, ValueRequirement};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::sizes::{
    Size, add_op, add_sizes, as_vector, axis_positions, cast, concat_sizes, divide_sizes, dtype_of,
    insert_axes, multiply_sizes, reshape_to, shape_of, size_of, slice_between,
};

const GROUP_QUERY: &str = "GroupQueryAttention";

const QUERY: usize = 0;
const KEY: usize = 1;
const VALUE: usize = 2;
const PAST_KEY: usize = 3;
const PAST_VALUE: usize = 4;
const LAST_KEYS: usize = 5;
const TOTAL_LENGTH: usize = 6;
const COSINES: usize = 7;
const SINES: usize = 8;
const POSITIONS: usize = 9;
const ATTENTION_BIAS: usize = 10;
const HEAD_SINK: usize = 11;
const KEY_SCALE: usize = 12;
const VALUE_SCALE: usize = 13;
const QUERY_NORM: usize = 14;
const KEY_NORM: usize = 15;
const INPUT_COUNT: usize = 16;

const DEFAULT_NORM_EPSILON: f32 = 1e-6;

/// Scores that are returned as `output_qk`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ScoreOutput {
    Nothing,
    BeforeSoftmax,
    AfterSoftmax,
}

struct GroupedQuery {
    heads: i64,
    of_keys: i64,
    /// `None`: one over the square root of the head size.
    scale: Option<f64>,
    softcap: Option<f64>,
    causal: bool,
    /// Number of visible keys up to the query's own; `None`: all.
    window: Option<i64>,
    rotary: bool,
    interleaved: bool,
    smooth_softmax: bool,
    score_output: ScoreOutput,
    norm_epsilon: f32,
    has_past: bool,
}

impl GroupedQuery {
    fn read(node: &Node) -> Result<GroupedQuery, OpError> {
        let attrs = &node.attrs;
        let positive = |name: &'static str| {
            let count = Attrs::required(name, attrs.int(name)?)?;
            if count < 1 {
                return Err(OpError::invalid(format!("{name} must be positive, got {count}")));
            }
            Ok(count)
        };
        let (heads, of_keys) = (positive("num_heads")?, positive("kv_num_heads")?);
        if heads % of_keys != 0 {
            return Err(OpError::invalid(format!(
                "num_heads, {heads}, must be a multiple of kv_num_heads, {of_keys}"
            )));
        }
        let flag = |name: &str| Ok::<bool, OpError>(attrs.int(name)?.unwrap_or(0) != 0);
        if flag("sliding_window_cache")? {
            return Err(OpError::unsupported(
                "sliding_window_cache (a cache that drops old keys) is for text generation and cannot be trained; \
                 export the model without it",
            ));
        }
        for name in ["k_quant_type", "v_quant_type"] {
            let kind = attrs.string(name)?.unwrap_or("NONE");
            if kind != "NONE" {
                return Err(OpError::unsupported(format!(
                    "{name} is {kind:?}, but caches of quantized keys and values are not supported; export the model \
                     with caches of floats"
                )));
            }
        }
        let causal = attrs.int("causal")?.unwrap_or(1) != 0;
        let window = match attrs.int("local_window_size")?.unwrap_or(-1) {
            -1 => None,
            size if size > 0 && causal => Some(size),
            size if size > 0 => {
                return Err(OpError::invalid(format!(
                    "local_window_size is {size}, but causal is 0; a window needs causal attention"
                )));
            }
            size => {
                return Err(OpError::invalid(format!(
                    "local_window_size must be positive, or -1 (no window), got {size}"
                )));
            }
        };
        let score_output = match attrs.int("qk_output")?.unwrap_or(0) {
            0 => ScoreOutput::Nothing,
            1 => ScoreOutput::BeforeSoftmax,
            2 => ScoreOutput::AfterSoftmax,
            other => return Err(OpError::invalid(format!("qk_output must be from 0 to 2, got {other}"))),
        };
        let nonzero = |name: &str| {
            Ok::<Option<f64>, OpError>(attrs.float(name)?.map(f64::from).filter(|&number| number != 0.0))
        };
        Ok(GroupedQuery {
            heads,
            of_keys,
            scale: nonzero("scale")?,
            softcap: nonzero("softcap")?.filter(|&cap| cap > 0.0),
            causal,
            window,
            rotary: flag("do_rotary")?,
            interleaved: flag("rotary_interleaved")?,
            smooth_softmax: flag("smooth_softmax")?,
            score_output,
            norm_epsilon: attrs.float("qk_norm_epsilon")?.unwrap_or(DEFAULT_NORM_EPSILON),
            has_past: node.inputs.get(PAST_KEY).copied().flatten().is_some(),
        })
    }

    /// Returns the head size for a last axis with this number of heads.
    fn head_size(k: usize, shape: &Shape, heads: i64) -> Result<Option<usize>, OpError> {
        if shape.rank() != 3 {
            return Err(OpError::invalid(format!(
                "input {k} has shape {shape}; [batch, length, width] is needed"
            )));
        }
        let Some(width) = shape[2].known() else { return Ok(None) };
        if width % heads as usize != 0 {
            return Err(OpError::invalid(format!(
                "the last axis of input {k}, of shape {shape}, cannot be divided into {heads} heads"
            )));
        }
        Ok(Some(width / heads as usize))
    }

    /// Returns the number of heads in the first input: of queries, or of everything if everything is packed.
    fn heads_of_query_input(&self, is_packed: bool) -> i64 {
        if is_packed { self.heads.saturating_add(self.of_keys.saturating_mul(2)) } else { self.heads }
    }
}

/// Checks that an input has the shape `expected`, where `None` is any size.
fn check_shape(cx: &Infer<'_>, k: usize, expected: &[Option<Dim>], layout: &str) -> Result<(), OpError> {
    let Some(shape) = cx.shape(k) else { return Ok(()) };
    let differs = |(dim, expected): (&Dim, &Option<Dim>)| sizes_differ(Some(dim), expected.as_ref());
    if shape.rank() == expected.len() && !shape.iter().zip(expected).any(differs) {
        return Ok(());
    }
    let text = |(dim, name): (&Option<Dim>, &str)| {
        dim.as_ref().and_then(Dim::known).map_or_else(|| name.to_owned(), |size| size.to_string())
    };
    let sizes: Vec<String> = expected.iter().zip(layout.split(' ')).map(text).collect();
    Err(OpError::invalid(format!("input {k} has shape {shape}, but [{}] is needed", sizes.join(", "))))
}

impl GroupedQuery {
    /// Checks which inputs are present, and their types. Returns the type of the queries.
    fn check_inputs(&self, cx: &Infer<'_>) -> Result<DType, OpError> {
        for k in [KEY_SCALE, VALUE_SCALE] {
            if cx.has_input(k) {
                return Err(OpError::unsupported(format!(
                    "input {k} is the scale of a quantized cache, which is not supported; export the model with \
                     caches of floats"
                )));
            }
        }
        let dtype = cx.expect_dtype(QUERY, "a float type", DType::is_float)?;
        cx.expect_same_dtype([
            QUERY,
            KEY,
            VALUE,
            PAST_KEY,
            PAST_VALUE,
            COSINES,
            SINES,
            ATTENTION_BIAS,
            HEAD_SINK,
            QUERY_NORM,
            KEY_NORM,
        ])?;
        for k in [LAST_KEYS, TOTAL_LENGTH] {
            cx.expect_dtype(k, "int32", |dtype| dtype == DType::I32)?;
        }
        if cx.has_input(POSITIONS) {
            cx.expect_dtype(POSITIONS, "int64", |dtype| dtype == DType::I64)?;
        }
        for (a, b, what) in [
            (KEY, VALUE, "keys and values"),
            (PAST_KEY, PAST_VALUE, "past_key and past_value"),
            (COSINES, SINES, "cos_cache and sin_cache"),
            (QUERY_NORM, KEY_NORM, "q_norm_weight and k_norm_weight"),
        ] {
            if cx.has_input(a) != cx.has_input(b) {
                return Err(OpError::invalid(format!("{what} must both be present or both be absent")));
            }
        }
        if self.rotary && !cx.has_input(COSINES) {
            return Err(OpError::invalid("do_rotary needs cos_cache and sin_cache (inputs 7 and 8)"));
        }
        Ok(dtype)
    }
}

/// Returns the number of rows of the presents, if known: of the past, or `total_sequence_length` if it is larger.
fn present_length(cx: &Infer<'_>, length: Option<&Dim>) -> Option<Dim> {
    if !cx.has_input(PAST_KEY) {
        return length.cloned();
    }
    match cx.shape(PAST_KEY)?[2].known()? {
        0 => length.cloned(),
        past => {
            let total = usize::try_from(*cx.ints(TOTAL_LENGTH)?.first()?).ok()?;
            Some(Dim::Known(past.max(total)))
        }
    }
}

impl Op for GroupedQuery {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(TOTAL_LENGTH + 1, INPUT_COUNT, 4).or_else(|error| {
            // Keys and values may be missing before the required inputs.
            let node = cx.node();
            let required = [QUERY, LAST_KEYS, TOTAL_LENGTH];
            let has_all = required.iter().all(|&k| cx.has_input(k));
            if has_all && node.inputs.len() <= INPUT_COUNT && node.outputs.len() <= 4 {
                Ok(())
            } else {
                Err(error)
            }
        })?;
        let dtype = self.check_inputs(cx)?;
        let is_packed = !cx.has_input(KEY);
        let mut size = None;
        for (k, heads) in
            [(QUERY, self.heads_of_query_input(is_packed)), (KEY, self.of_keys), (VALUE, self.of_keys)]
        {
            let Some(shape) = cx.shape(k) else { continue };
            let found = Self::head_size(k, shape, heads)?;
            if let (Some(expected), Some(found)) = (size, found)
                && expected != found
            {
                return Err(OpError::invalid(format!(
                    "the queries have head size {expected}, but input {k} has head size {found}"
                )));
            }
            size = size.or(found);
        }
        let query = cx.shape(QUERY).cloned();
        let axis = |axis: usize| query.as_ref().map(|shape| shape[axis].clone());
        let (batch, length) = (axis(0), axis(1));
        for k in [KEY, VALUE] {
            check_shape(cx, k, &[batch.clone(), length.clone(), None], "batch length width")?;
        }
        let (heads, of_keys) = (Dim::Known(self.heads as usize), Dim::Known(self.of_keys as usize));
        let head_size = size.map(Dim::Known);
        for k in [PAST_KEY, PAST_VALUE] {
            let expected = [batch.clone(), Some(of_keys.clone()), None, head_size.clone()];
            check_shape(cx, k, &expected, "batch heads length size")?;
        }
        if let (Some(past_key), Some(past_value)) = (cx.shape(PAST_KEY), cx.shape(PAST_VALUE))
            && sizes_differ(past_key.get(2), past_value.get(2))
        {
            return Err(OpError::invalid(format!(
                "past_key of shape {past_key} and past_value of shape {past_value} have different lengths"
            )));
        }
        if cx.shape(LAST_KEYS).is_some_and(|shape| shape.rank() == 2) {
            check_shape(cx, LAST_KEYS, &[batch.clone(), Some(Dim::Known(1))], "batch 1")?;
        } else {
            check_shape(cx, LAST_KEYS, std::slice::from_ref(&batch), "batch")?;
        }
        for k in [COSINES, SINES] {
            check_shape(cx, k, &[None, None], "positions half")?;
            let half = cx.shape(k).and_then(|shape| shape[1].known());
            if let (Some(half), Some(size), Some(shape)) = (half, size, cx.shape(k))
                && 2 * half > size
            {
                return Err(OpError::invalid(format!(
                    "input {k} has shape {shape}, but heads of size {size} have only {} pairs",
                    size / 2
                )));
            }
        }
        check_shape(cx, POSITIONS, &[batch.clone(), length.clone()], "batch length")?;
        check_shape(cx, HEAD_SINK, &[Some(heads.clone())], "heads")?;
        for k in [QUERY_NORM, KEY_NORM] {
            check_shape(cx, k, std::slice::from_ref(&head_size), "size")?;
        }
        if let Some(added) = cx.shape(ATTENTION_BIAS) {
            check_mask(ATTENTION_BIAS, added, &[batch.clone(), Some(heads.clone()), length.clone(), None])?;
        }
        let open = |cx: &Infer<'_>, output: usize, axis: usize, dim: Option<Dim>| {
            dim.unwrap_or_else(|| cx.unknown_dim(output, axis))
        };
        let keys = present_length(cx, length.as_ref());
        let width = size.map(|size| Dim::Known(size.saturating_mul(self.heads as usize)));
        let result = [(0, batch.clone()), (1, length.clone()), (2, width)];
        let result = result.map(|(axis, dim)| open(cx, 0, axis, dim));
        cx.set_output(0, dtype, Some(result.into_iter().collect()));
        for output in [1, 2] {
            let present = [batch.clone(), Some(of_keys.clone()), keys.clone(), head_size.clone()];
            let present: Vec<Dim> =
                present.into_iter().enumerate().map(|(axis, dim)| open(cx, output, axis, dim)).collect();
            cx.set_output(output, dtype, Some(present.into_iter().collect()));
        }
        let scores = [batch, Some(heads), length, keys];
        let scores: Vec<Dim> =
            scores.into_iter().enumerate().map(|(axis, dim)| open(cx, 3, axis, dim)).collect();
        cx.set_output(3, dtype, Some(scores.into_iter().collect()));
        Ok(())
    }

    fn needs_value(&self, k: usize, dtype: DType) -> ValueRequirement {
        match k {
            // The number of keys is the length of the past, or the total length.
            TOTAL_LENGTH if self.has_past => ValueRequirement::Always,
            _ if dtype.is_float() => ValueRequirement::Never,
            _ => ValueRequirement::ForShapes,
        }
    }
}

/// Positions of the queries of each item, and the keys of the past.
struct Lengths {
    /// Number of all keys of each item, `[batch, 1, 1, 1]`.
    totals: ValueId,
    /// Number of keys of each item before its first query.
    before: Offset,
    /// True, as a scalar, if the queries are a prompt. `None` without a past: then the queries are always a prompt.
    is_prompt: Option<ValueId>,
    /// Number of rows of the presents.
    rows: Size,
}

impl Lengths {
    fn read(rw: &mut Rewrite<'_>, queries: Size, past: Option<Size>) -> Result<Lengths, OpError> {
        let last_keys = rw.required_input(LAST_KEYS)?;
        let total = rw.required_input(TOTAL_LENGTH)?;
        let (zero, one) = (rw.ints("zero", &[0]), rw.ints("one", &[1]));
        let total = cast(rw, total, DType::I32, DType::I64);
        let total = reshape_to(rw, total, &[Size::Number(1)]);
        let rows = match past {
            None => queries,
            Some(past) => {
                let past = as_vector(rw, past);
                Size::Value(add_op(rw, "Max", &[past, total]))
            }
        };
        // A length that exceeds the rows becomes an index that is out of range, which is an error.
        let last_keys = cast(rw, last_keys, DType::I32, DType::I64);
        let (rows_vector, positions) = (as_vector(rw, rows), axis_positions(rw, rows));
        let is_negative = add_op(rw, "Less", &[last_keys, zero]);
        let last_keys = add_op(rw, "Where", &[is_negative, rows_vector, last_keys]);
        let last_keys = rw.add("Gather", &[positions, last_keys], Attrs::new().with("axis", 0i64));
        let every = [Size::Number(-1), Size::Number(1), Size::Number(1), Size::Number(1)];
        let last_keys = reshape_to(rw, last_keys, &every);
        let totals = add_op(rw, "Add", &[last_keys, one]);
        if past.is_none() {
            return Ok(Lengths { totals, before: Offset::Size(Size::Number(0)), is_prompt: None, rows });
        }
        let count = as_vector(rw, queries);
        let is_prompt = add_op(rw, "Equal", &[count, total]);
        let before = add_op(rw, "Sub", &[totals, count]);
        let before = add_op(rw, "Where", &[is_prompt, zero, before]);
        Ok(Lengths { totals, before: Offset::PerBatchItem(before), is_prompt: Some(is_prompt), rows })
    }

    /// Returns the positions of the queries: the first one of a prompt (`[1]`), or all (`[batch, length]`).
    fn positions(&self, rw: &mut Rewrite<'_>, queries: Size) -> ValueId {
        let given = rw.input(POSITIONS);
        // The first element is the first position of a prompt, for all items.
        let first = given.map(|positions| {
            let flat = reshape_to(rw, positions, &[Size::Number(-1)]);
            slice_between(rw, flat, 0, Size::Number(0), Size::Number(1))
        });
        let zero = rw.ints("zero", &[0]);
        let first = first.unwrap_or(zero);
        let (Some(is_prompt), Offset::PerBatchItem(before)) = (self.is_prompt, self.before) else {
            return first;
        };
        let along = axis_positions(rw, queries);
        let in_prompt = add_op(rw, "Add", &[along, first]);
        let later = match given {
            Some(positions) => positions,
            None => {
                let before = reshape_to(rw, before, &[Size::Number(-1), Size::Number(1)]);
                add_op(rw, "Add", &[along, before])
            }
        };
        add_op(rw, "Where", &[is_prompt, in_prompt, later])
    }

    /// Appends new heads to the used part of the past.
    fn present(&self, rw: &mut Rewrite<'_>, new: Heads, past: Option<(ValueId, Size)>, batch: Size) -> Heads {
        let (Some((past, past_length)), Offset::PerBatchItem(before)) = (past, self.before) else {
            return new;
        };
        // Row j is row j of the past, or row j - before of the new heads. Later rows repeat the last new head.
        let both = rw.add("Concat", &[past, new.value], Attrs::new().with("axis", 2i64));
        let rows = axis_positions(rw, self.rows);
        let one = rw.ints("one", &[1]);
        let is_past = add_op(rw, "Less", &[rows, before]);
        let (moved, count) = (as_vector(rw, past_length), as_vector(rw, new.length));
        let end = add_op(rw, "Add", &[moved, count]);
        let last = add_op(rw, "Sub", &[end, one]);
        let shift = add_op(rw, "Sub", &[moved, before]);
        let of_new = add_op(rw, "Add", &[rows, shift]);
        let of_new = add_op(rw, "Min", &[of_new, last]);
        let source = add_op(rw, "Where", &[is_past, rows, of_new]);
        // GatherND reads one list of rows for each item and head.
        let items = multiply_sizes(rw, batch, new.heads);
        let shape = [batch, new.heads, Size::Number(1), self.rows];
        let shape = concat_sizes(rw, &shape);
        let source = add_op(rw, "Expand", &[source, shape]);
        let source = reshape_to(rw, source, &[items, Size::Number(-1)]);
        let source = insert_axes(rw, source, &[2]);
        let both_length = add_sizes(rw, past_length, new.length);
        let both = reshape_to(rw, both, &[items, both_length, new.size]);
        let value = rw.add("GatherND", &[both, source], Attrs::new().with("batch_dims", 1i64));
        let value = reshape_to(rw, value, &[batch, new.heads, Size::Number(-1), new.size]);
        Heads { value, length: self.rows, ..new }
    }
}

/// Divides elements of each head by the root of their mean square, and multiplies them by a weight.
fn normalize_heads(rw: &mut Rewrite<'_>, heads: Heads, weight: ValueId, epsilon: f32, dtype: DType) -> Heads {
    let square = add_op(rw, "Mul", &[heads.value, heads.value]);
    let axes = rw.ints("axes", &[-1]);
    let mean = rw.add("ReduceMean", &[square, axes], Attrs::new().with("keepdims", 1i64));
    let epsilon = rw.constant("epsilon", Tensor::scalar(dtype, f64::from(epsilon)));
    let mean = add_op(rw, "Add", &[mean, epsilon]);
    let root = add_op(rw, "Sqrt", &[mean]);
    let normalized = add_op(rw, "Div", &[heads.value, root]);
    Heads { value: add_op(rw, "Mul", &[normalized, weight]), ..heads }
}

impl GroupedQuery {
    /// Returns the heads of queries, keys and values.
    fn split_inputs(&self, rw: &mut Rewrite<'_>) -> Result<[Heads; 3], OpError> {
        let query = rw.required_input(QUERY)?;
        let length = size_of(rw, query, 1);
        let width = size_of(rw, query, 2);
        let (heads, of_keys) = (Size::Number(self.heads), Size::Number(self.of_keys));
        let is_packed = rw.input(KEY).is_none();
        let size = divide_sizes(rw, width, Size::Number(self.heads_of_query_input(is_packed)));
        if let (Some(key), Some(value)) = (rw.input(KEY), rw.input(VALUE)) {
            let lengths = [key, value].map(|input| {
                if same_size(rw, (input, 1), (query, 1)) { length } else { size_of(rw, input, 1) }
            });
            return Ok([
                Heads::split(rw, query, heads, length, size),
                Heads::split(rw, key, of_keys, lengths[0], size),
                Heads::split(rw, value, of_keys, lengths[1], size),
            ]);
        }
        let of_queries = multiply_sizes(rw, heads, size);
        let width = multiply_sizes(rw, of_keys, size);
        let first_value = add_sizes(rw, of_queries, width);
        let ends = [Size::Number(0), of_queries, first_value, Size::Number(i64::MAX)];
        let part = |rw: &mut Rewrite<'_>, k: usize, heads: Size| {
            let part = slice_between(rw, query, 2, ends[k], ends[k + 1]);
            Heads::split(rw, part, heads, length, size)
        };
        Ok([part(rw, 0, heads), part(rw, 1, of_keys), part(rw, 2, of_keys)])
    }

    /// Rotates queries or keys by their positions.
    fn rotate(&self, rw: &mut Rewrite<'_>, heads: Heads, positions: ValueId) -> Result<Heads, OpError> {
        let (cosines, sines) = (rw.required_input(COSINES)?, rw.required_input(SINES)?);
        let half = shape_of(rw, cosines, "cos_cache")?[1].known();
        let rotated = match (half, heads.size) {
            (Some(half), Size::Number(size)) if 2 * half as i64 != size => 2 * half as i64,
            _ => 0,
        };
        let mut attrs = Attrs::new().with("interleaved", i64::from(self.interleaved));
        if rotated != 0 {
            let Size::Number(count) = heads.heads else {
                unreachable!("the number of heads is an attribute")
            };
            attrs = attrs.with("rotary_embedding_dim", rotated).with("num_heads", count);
        }
        let inputs = [heads.value, positions, cosines, sines].map(Some);
        let value = rw.add_node(MICROSOFT, "RotaryEmbedding", &inputs, 1, attrs)[0];
        Ok(Heads { value, ..heads })
    }

    /// Returns a mask of the keys that each query does not see, and true if a query may see no key.
    fn hidden_keys(
        &self,
        rw: &mut Rewrite<'_>,
        lengths: &Lengths,
        queries: Size,
        keys: Size,
    ) -> (Option<ValueId>, bool) {
        let right = self.causal.then_some(0);
        let window = Window { left: self.window.map(|size| size - 1), right };
        let outside = window.outside_mask(rw, queries, keys, lengths.before);
        let columns = axis_positions(rw, keys);
        let inside = add_op(rw, "Less", &[columns, lengths.totals]);
        let after_end = add_op(rw, "Not", &[inside]);
        (or_conditions(rw, outside, Some(after_end)), self.window.is_some())
    }
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = GroupedQuery::read(rw.node())?;
    let query = rw.required_input(QUERY)?;
    let dtype = dtype_of(rw, query, "the queries")?;
    shape_of(rw, query, "the queries")?;
    let batch = size_of(rw, query, 0);
    let [mut queries, mut keys, values] = op.split_inputs(rw)?;
    if let (Some(of_queries), Some(of_keys)) = (rw.input(QUERY_NORM), rw.input(KEY_NORM)) {
        queries = normalize_heads(rw, queries, of_queries, op.norm_epsilon, dtype);
        keys = normalize_heads(rw, keys, of_keys, op.norm_epsilon, dtype);
    }
    let mut past_length = None;
    if let Some(past) = rw.input(PAST_KEY) {
        past_length = Some(size_of(rw, past, 2)).filter(|&length| length != Size::Number(0));
    }
    let lengths = Lengths::read(rw, queries.length, past_length)?;
    if op.rotary {
        let positions = lengths.positions(rw, queries.length);
        queries = op.rotate(rw, queries, positions)?;
        keys = op.rotate(rw, keys, positions)?;
    }
    let [past_key, past_value] = [PAST_KEY, PAST_VALUE].map(|k| rw.input(k).zip(past_length));
    let keys = lengths.present(rw, keys, past_key, batch);
    let values = lengths.present(rw, values, past_value, batch);
    rw.replace_output(1, keys.value);
    rw.replace_output(2, values.value);

    let (hidden, may_hide_all_keys) = op.hidden_keys(rw, &lengths, queries.length, keys.length);
    let mut added = Vec::new();
    if let Some(bias) = rw.input(ATTENTION_BIAS) {
        let rank = shape_of(rw, bias, "attention_bias")?.rank();
        let columns = size_of(rw, bias, rank - 1);
        added.push(pad_mask(rw, bias, (rank, columns), dtype, keys.length));
    }
    let sink = match rw.input(HEAD_SINK) {
        Some(sink) => Some(reshape_to(rw, sink, &[Size::Number(op.heads), Size::Number(1), Size::Number(1)])),
        None if op.smooth_softmax => Some(rw.constant("sink", Tensor::scalar(dtype, 0.0))),
        None => None,
    };
    let scores = ScaledDotProduct {
        dtype,
        queries,
        keys,
        values,
        scale: op.scale.map_or(Scale::InverseSqrt(queries.size), Scale::Factor),
        scale_both: false,
        softcap: op.softcap,
        added,
        hidden,
        may_hide_all_keys,
        precision: None,
        sink,
    };
    let results = scores.build(rw);
    match op.score_output {
        ScoreOutput::Nothing => {}
        ScoreOutput::BeforeSoftmax => rw.replace_output(3, results.masked),
        ScoreOutput::AfterSoftmax => rw.replace_output(3, results.weights),
    }
    let width = multiply_sizes(rw, queries.heads, values.size);
    let result = merge_heads(rw, results.result, width);
    rw.replace_output(0, result);
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(GroupedQuery::read(node)?))
}

pub(super) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new(MICROSOFT, GROUP_QUERY, &[1], build)
            .sample(|_| {
                let floats = |dims: &[usize]| Some(ValueType::tensor(DType::F32, dims));
                let ints = |dims: &[usize]| Some(ValueType::tensor(DType::I32, dims));
                let mut inputs = vec![floats(&[2, 2, 4]), floats(&[2, 2, 2]), floats(&[2, 2, 2]), None, None];
                inputs.extend([ints(&[2]), ints(&[1])]);
                let attrs = Attrs::new().with("num_heads", 2i64).with("kv_num_heads", 1i64);
                Sample { inputs, ..Sample::of(attrs) }
            })
            .composition(decompose)
            .weights(&[HEAD_SINK, QUERY_NORM, KEY_NORM]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_decomposition, check_gradients, generic_tensor, one_node_graph};

    const BATCH: usize = 2;
    const LENGTH: usize = 3;
    const SIZE: usize = 4;
    /// Rounding of float64 in sums of a few products and exponentials.
    const TOLERANCE: f64 = 1e-12;

    /// Queries of four heads, keys and values of two heads, lengths, caches of positions, bias and sinks.
    fn inputs(packed: bool, last_keys: [i64; BATCH]) -> Vec<Option<Tensor>> {
        let heads = |count: usize, seed| Some(generic_tensor(&[BATCH, LENGTH, count * SIZE], seed));
        let ints = |values: &[i64]| {
            let values: Vec<i32> = values.iter().map(|&value| value as i32).collect();
            Some(Tensor::from_slice(DType::I32, &[values.len()], &values))
        };
        let mut inputs = match packed {
            true => vec![heads(8, 1), None, None],
            false => vec![heads(4, 1), heads(2, 2), heads(2, 3)],
        };
        inputs.extend([None, None, ints(&last_keys), ints(&[LENGTH as i64])]);
        inputs.extend([5, 6].map(|seed| Some(generic_tensor(&[LENGTH, SIZE / 2], seed))));
        inputs.push(None);
        inputs.push(Some(generic_tensor(&[1, 4, LENGTH, LENGTH], 7)));
        inputs.push(Some(generic_tensor(&[4], 8)));
        inputs
    }

    #[test]
    fn gradients_of_all_forms() {
        let attrs =
            || Attrs::new().with("num_heads", 4i64).with("kv_num_heads", 2i64).with("do_rotary", 1i64);
        for (attrs, packed, last_keys) in [
            (attrs(), false, [2, 2]),
            (attrs().with("rotary_interleaved", 1i64).with("softcap", 0.7f32), true, [2, 1]),
            (attrs().with("local_window_size", 2i64).with("scale", 0.4f32), false, [2, 2]),
            (attrs().with("causal", 0i64), true, [1, 2]),
        ] {
            let inputs = inputs(packed, last_keys);
            let ports: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
            let graph = one_node_graph(17, (MICROSOFT, GROUP_QUERY), &ports, 1, attrs).expect("valid");
            let present: Vec<Tensor> = inputs.iter().flatten().cloned().collect();
            let floats: Vec<usize> =
                (0..present.len()).filter(|&k| present[k].dtype() == DType::F64).collect();
            check_decomposition(&graph, &present, TOLERANCE);
            check_gradients(&graph, &present, &floats, &[0]);
        }
    }
}
