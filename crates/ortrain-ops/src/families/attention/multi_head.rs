//! MultiHeadAttention of com.microsoft.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};

use crate::OpError;
use crate::families::attention::checks::{check_mask, same_size, sizes_differ};
use crate::families::attention::common::{
    AttentionCore, CommonAttrs, MaskForm, check_mask_shape, total_length,
};
use crate::families::attention::scores::Heads;
use crate::infer::Infer;
use crate::op::Op;
use crate::rewrite::Rewrite;
use crate::support::sizes::{
    Size, add_sizes, divide_sizes, dtype_of, multiply_sizes, permute_axes, reshape_to, shape_of, size_of,
    slice_between,
};

pub(super) const MULTI_HEAD: &str = "MultiHeadAttention";

/// `MultiHeadAttention`: queries, keys and values in up to three inputs.
struct MultiHead {
    common: CommonAttrs,
}

const QUERY: usize = 0;

const KEY: usize = 1;

const VALUE: usize = 2;

pub(super) const PROJECTION_BIAS: usize = 3;

const KEY_MASK: usize = 4;

const MULTI_HEAD_ATTENTION_BIAS: usize = 5;

const PAST_KEY: usize = 6;

const PAST_VALUE: usize = 7;

const INPUT_COUNT: usize = 10;

/// Layout of the inputs of `MultiHeadAttention`.
#[derive(Clone, Copy, PartialEq)]
enum Layout {
    /// `[batch, length, width]` for each of the three.
    Separate,
    /// Keys and values are already split into heads.
    AsHeads,
    /// Keys and values are packed in the second input.
    PackedKeysValues,
    /// Queries, keys and values are packed in the first input.
    Packed,
}

impl Layout {
    fn from_shapes(query: &Shape, key: Option<&Shape>, has_value: bool) -> Result<Layout, OpError> {
        match (query.rank(), key.map(Shape::rank), has_value) {
            (3, Some(3), true) => Ok(Layout::Separate),
            (3, Some(4), true) => Ok(Layout::AsHeads),
            (3, Some(5), false) => Ok(Layout::PackedKeysValues),
            (5, None, false) => Ok(Layout::Packed),
            _ => {
                let key = key.map_or("no keys".to_owned(), |key| format!("keys of shape {key}"));
                let value = if has_value { "values" } else { "no values" };
                Err(OpError::invalid(format!(
                    "queries of shape {query}, {key} and {value} are not supported; expected [batch, length, width] \
                     for each; keys and values of shape [batch, heads, length, size]; keys of shape [batch, length, \
                     heads, 2, size] without values; or only queries of shape [batch, length, heads, 3, size]"
                )))
            }
        }
    }
}

/// Sizes of queries, keys and values, as far as they are known.
struct InputSizes {
    layout: Layout,
    batch: Dim,
    length: Dim,
    /// Length of the keys without the past.
    keys: Dim,
    /// Head size of queries and keys, and head size of values.
    sizes: [Option<usize>; 2],
    /// Width of the result, if it is known as a number or symbol.
    width: Option<Dim>,
}

impl MultiHead {
    fn input_sizes(
        &self,
        query: &Shape,
        key: Option<&Shape>,
        value: Option<&Shape>,
        has_value: bool,
    ) -> Result<InputSizes, OpError> {
        let layout = Layout::from_shapes(query, key, has_value)?;
        let heads = self.common.heads as usize;
        let check = |what: &str, shape: &Shape, axis: usize, expected: usize| match shape[axis].known() {
            Some(actual) if actual != expected => {
                Err(OpError::invalid(format!("axis {axis} of {what} of shape {shape} must be {expected}")))
            }
            _ => Ok(()),
        };
        let (batch, length) = (query[0].clone(), query[1].clone());
        let total_width = |size: Option<usize>| size.map(|size| Dim::Known(size.saturating_mul(heads)));
        let known = match (layout, key) {
            (Layout::Packed, _) => {
                check("packed queries", query, 2, heads)?;
                check("packed queries", query, 3, 3)?;
                let size = query[4].known();
                InputSizes {
                    layout,
                    batch,
                    keys: length.clone(),
                    length,
                    sizes: [size; 2],
                    width: total_width(size),
                }
            }
            (Layout::PackedKeysValues, Some(key)) => {
                check("packed keys", key, 2, heads)?;
                check("packed keys", key, 3, 2)?;
                let size = key[4].known();
                let keys = key[1].clone();
                InputSizes { layout, batch, length, keys, sizes: [size; 2], width: total_width(size) }
            }
            (Layout::AsHeads, Some(key)) => {
                check("keys", key, 1, heads)?;
                let size = value.and_then(|value| value.get(3)).and_then(Dim::known);
                let keys = key[2].clone();
                InputSizes {
                    layout,
                    batch,
                    length,
                    keys,
                    sizes: [key[3].known(), size],
                    width: total_width(size),
                }
            }
            _ => {
                let key = key.unwrap_or(query);
                let size = self.common.head_size("keys", key.get(2))?;
                let width = value.and_then(|value| value.get(2)).cloned();
                let of_values = self.common.head_size("values", width.as_ref())?;
                InputSizes { layout, batch, length, keys: key[1].clone(), sizes: [size, of_values], width }
            }
        };
        if query.rank() == 3 {
            let size = self.common.head_size("queries", query.get(2))?;
            if let (Some(a), Some(b)) = (size, known.sizes[0])
                && a != b
            {
                return Err(OpError::invalid(format!("the queries have head size {a}, but the keys {b}")));
            }
        }
        if let (Some(key), Some(value)) = (key, value) {
            let lengths = if value.rank() == 4 { 2 } else { 1 };
            if key.rank() != value.rank()
                || sizes_differ(key.get(lengths), value.get(lengths))
                || sizes_differ(key.first(), value.first())
            {
                return Err(OpError::invalid(format!(
                    "keys of shape {key} do not match values of shape {value}"
                )));
            }
        }
        if let Some(key) = key
            && sizes_differ(key.first(), query.first())
        {
            return Err(OpError::invalid(format!(
                "queries of shape {query} do not match keys of shape {key}"
            )));
        }
        Ok(known)
    }
}

impl Op for MultiHead {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, INPUT_COUNT, 3)?;
        for k in [8, 9] {
            if cx.has_input(k) {
                return Err(OpError::unsupported(format!(
                    "input {k} is for a cache shared by past and present, which cannot be trained"
                )));
            }
        }
        let dtype = cx.expect_dtype(QUERY, "a float type", DType::is_float)?;
        cx.expect_same_dtype([
            QUERY,
            KEY,
            VALUE,
            PROJECTION_BIAS,
            MULTI_HEAD_ATTENTION_BIAS,
            PAST_KEY,
            PAST_VALUE,
        ])?;
        if cx.has_input(KEY_MASK) {
            cx.expect_dtype(KEY_MASK, "int32", |dtype| dtype == DType::I32)?;
        }
        if cx.has_input(PAST_KEY) != cx.has_input(PAST_VALUE) {
            return Err(OpError::invalid("past_key and past_value must both be present or both be absent"));
        }
        let (Some(query), true, true) = (
            cx.shape(QUERY),
            cx.has_input(KEY) == cx.shape(KEY).is_some(),
            cx.has_input(VALUE) == cx.shape(VALUE).is_some(),
        ) else {
            for k in 0..3 {
                cx.set_output(k, dtype, None);
            }
            return Ok(());
        };
        let known = self.input_sizes(query, cx.shape(KEY), cx.shape(VALUE), cx.has_input(VALUE))?;
        let heads = Dim::Known(self.common.heads as usize);
        if let (Some(bias), [Some(size), Some(of_values)]) = (cx.shape(PROJECTION_BIAS), known.sizes) {
            let bias_len = Dim::Known(self.common.heads as usize * (2 * size + of_values));
            if bias.rank() != 1 || sizes_differ(bias.first(), Some(&bias_len)) {
                return Err(OpError::invalid(format!(
                    "input {PROJECTION_BIAS} has shape {bias}, but [{bias_len}] is needed"
                )));
            }
        }
        for (k, size) in [(PAST_KEY, known.sizes[0]), (PAST_VALUE, known.sizes[1])] {
            let Some(past) = cx.shape(k) else { continue };
            let size = size.map(Dim::Known);
            let expected = [Some(&known.batch), Some(&heads), None, size.as_ref()];
            if past.rank() != 4
                || past
                    .iter()
                    .zip(expected)
                    .any(|(actual, expected_dim)| sizes_differ(Some(actual), expected_dim))
            {
                return Err(OpError::invalid(format!(
                    "input {k} has shape {past}, but [{}, {heads}, length, {}] is needed",
                    known.batch,
                    size.map_or("size".into(), |size| size.to_string())
                )));
            }
        }
        let keys = |cx: &Infer<'_>, output: usize| {
            let past = cx
                .has_input(PAST_KEY)
                .then(|| cx.shape(PAST_KEY).map_or_else(|| cx.unknown_dim(1, 2), |past| past[2].clone()));
            total_length(past.as_ref(), Some(&known.keys), || cx.unknown_dim(output, 2))
        };
        let known_keys = Some(keys(cx, 1)).filter(|dim| dim.known().is_some() || !cx.has_input(PAST_KEY));
        if let Some(mask) = cx.shape(KEY_MASK) {
            check_mask_shape(KEY_MASK, mask, [Some(&known.batch), Some(&known.length), known_keys.as_ref()])?;
        }
        if let Some(added) = cx.shape(MULTI_HEAD_ATTENTION_BIAS) {
            let to = [Some(known.batch.clone()), Some(heads.clone()), Some(known.length.clone()), known_keys];
            check_mask(MULTI_HEAD_ATTENTION_BIAS, added, &to)?;
        }
        let width = known.width.clone().unwrap_or_else(|| cx.unknown_dim(0, 2));
        let result = [known.batch.clone(), known.length.clone(), width];
        for k in [1, 2] {
            let size = known.sizes[k - 1].map_or_else(|| cx.unknown_dim(k, 3), Dim::Known);
            let present = [known.batch.clone(), heads.clone(), keys(cx, k), size];
            cx.set_output(k, dtype, Some(present.into_iter().collect()));
        }
        cx.set_output(0, dtype, Some(result.into_iter().collect()));
        Ok(())
    }
}

/// Splits the bias into the parts of queries, keys and values. Keys and values that are already split into heads get no
/// bias.
fn split_bias(rw: &mut Rewrite<'_>, bias: ValueId, width: Size, layout: Layout) -> [Option<ValueId>; 3] {
    let second = add_sizes(rw, width, width);
    let ends = [Size::Number(0), width, second, Size::Number(i64::MAX)];
    let part = |rw: &mut Rewrite<'_>, k: usize| Some(slice_between(rw, bias, 0, ends[k], ends[k + 1]));
    let of_queries = part(rw, 0);
    if layout == Layout::AsHeads { [of_queries, None, None] } else { [of_queries, part(rw, 1), part(rw, 2)] }
}

pub(super) fn decompose_multi_head(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = MultiHead { common: CommonAttrs::read(rw.node())? };
    let query = rw.required_input(QUERY)?;
    let dtype = dtype_of(rw, query, "the queries")?;
    let query_shape = shape_of(rw, query, "the queries")?;
    let shape =
        |rw: &Rewrite<'_>, k: usize, what: &str| rw.input(k).map(|id| shape_of(rw, id, what)).transpose();
    let (key_shape, value_shape) = (shape(rw, KEY, "the keys")?, shape(rw, VALUE, "the values")?);
    let known =
        op.input_sizes(&query_shape, key_shape.as_ref(), value_shape.as_ref(), rw.input(VALUE).is_some())?;
    let heads = Size::Number(op.common.heads);
    let (batch, length) = (size_of(rw, query, 0), size_of(rw, query, 1));

    // `of_queries` and `of_values` are pairs: width and head size. Keys have the sizes of the queries.
    let packed = |rw: &mut Rewrite<'_>, value: ValueId| {
        let size = size_of(rw, value, 4);
        (multiply_sizes(rw, heads, size), size)
    };
    let flat = |rw: &mut Rewrite<'_>, value: ValueId| {
        let width = size_of(rw, value, 2);
        (width, divide_sizes(rw, width, heads))
    };
    let (key, value) = (rw.input(KEY), rw.input(VALUE));
    let of_queries = if known.layout == Layout::Packed { packed(rw, query) } else { flat(rw, query) };
    let of_values = match (known.layout, value) {
        (Layout::Separate, Some(value)) => flat(rw, value),
        (Layout::AsHeads, Some(value)) => {
            let size = size_of(rw, value, 3);
            (multiply_sizes(rw, heads, size), size)
        }
        _ => of_queries,
    };
    let key_length = match (known.layout, key) {
        (Layout::Packed, _) | (_, None) => length,
        (Layout::AsHeads, Some(key)) => size_of(rw, key, 2),
        (_, Some(key)) if same_size(rw, (key, 1), (query, 1)) => length,
        (_, Some(key)) => size_of(rw, key, 1),
    };
    let biases = match rw.input(PROJECTION_BIAS) {
        Some(bias) => split_bias(rw, bias, of_queries.0, known.layout),
        None => [None; 3],
    };
    let split_heads =
        |rw: &mut Rewrite<'_>, value: ValueId, bias: Option<ValueId>, length: Size, size: Size| {
            let value = match bias {
                Some(bias) => rw.add("Add", &[value, bias], Attrs::new()),
                None => value,
            };
            Heads::split(rw, value, heads, length, size)
        };
    // Takes element `index` of axis 3 of a packed tensor, `[batch, length, heads, size]`, and adds the bias.
    let unpacked = |rw: &mut Rewrite<'_>, value: ValueId, index: i64, bias: Option<ValueId>, length: Size| {
        let size = of_queries.1;
        let index = rw.constant("index", Tensor::i64(&[], &[index]));
        let mut value = rw.add("Gather", &[value, index], Attrs::new().with("axis", 3i64));
        if let Some(bias) = bias {
            let bias = reshape_to(rw, bias, &[heads, size]);
            value = rw.add("Add", &[value, bias], Attrs::new());
        }
        Heads { value: permute_axes(rw, value, &[0, 2, 1, 3]), heads, length, size }
    };
    let missing = || OpError::invalid("keys and values are missing");
    let (queries, mut keys, mut values) = match known.layout {
        Layout::Packed => (
            unpacked(rw, query, 0, biases[0], length),
            unpacked(rw, query, 1, biases[1], length),
            unpacked(rw, query, 2, biases[2], length),
        ),
        Layout::PackedKeysValues => {
            let key = key.ok_or_else(missing)?;
            (
                split_heads(rw, query, biases[0], length, of_queries.1),
                unpacked(rw, key, 0, biases[1], key_length),
                unpacked(rw, key, 1, biases[2], key_length),
            )
        }
        Layout::Separate | Layout::AsHeads => {
            let (key, value) = (key.ok_or_else(missing)?, value.ok_or_else(missing)?);
            let queries = split_heads(rw, query, biases[0], length, of_queries.1);
            if known.layout == Layout::Separate {
                (
                    queries,
                    split_heads(rw, key, biases[1], key_length, of_queries.1),
                    split_heads(rw, value, biases[2], key_length, of_values.1),
                )
            } else {
                (
                    queries,
                    Heads { value: key, heads, length: key_length, size: of_queries.1 },
                    Heads { value, heads, length: key_length, size: of_values.1 },
                )
            }
        }
    };
    let mut past_length = Size::Number(0);
    if let (Some(past_key), Some(past_value)) = (rw.input(PAST_KEY), rw.input(PAST_VALUE)) {
        past_length = size_of(rw, past_key, 2);
        keys = keys.append_to_past(rw, past_key, past_length);
        values = values.append_to_past(rw, past_value, past_length);
    }
    rw.replace_output(1, keys.value);
    rw.replace_output(2, values.value);
    let mask = match rw.input(KEY_MASK) {
        Some(mask) => Some((
            mask,
            MaskForm::from_shape(KEY_MASK, &shape_of(rw, mask, "the mask")?, Some(&known.batch))?,
        )),
        None => None,
    };
    let bias = rw.input(MULTI_HEAD_ATTENTION_BIAS);
    AttentionCore { common: op.common, dtype, queries, keys, values, past: past_length, mask, batch, bias }
        .build(rw)
}

pub(super) fn build_multi_head(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(MultiHead { common: CommonAttrs::read(node)? }))
}
