//! `Attention` and `MultiHeadAttention` of `com.microsoft`, version 1. ONNX Runtime's optimizer fuses attention blocks
//! into these operators.
//!
//! `Attention` first multiplies its input by the merged weights of queries, keys and values.
//!
//! `MultiHeadAttention` accepts these layouts:
//! - separate queries, keys and values (`[batch, length, width]`);
//! - keys and values of a cross attention as heads (`[batch, heads, length, size]`);
//! - packed keys and values (`[batch, length, heads, 2, size]`);
//! - everything packed (`[batch, length, heads, 3, size]`).
//!
//! The mask adds `mask_filter_value` to the scores of hidden keys. If all keys of a row are hidden, all scores change
//! by the same number. The weights of the row are then the same as without a mask. `unidirectional` hides later keys
//! completely.
//!
//! A mask of shape `[batch, keys]` or `[batch, queries, keys]` is 1 for visible keys. A mask of shape `[batch]` has the
//! end of the visible keys of each sequence. A mask of shape `[2 * batch]` has the ends, followed by the starts.
//!
//! Unsupported nodes give an error:
//! - masks of four axes, and masks of `3 * batch + 2` numbers: no documentation defines them, and the CPU kernels of
//!   ONNX Runtime do not accept them;
//! - rotary embeddings inside of the operator;
//! - caches that past and present share, which are for generation.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId, ValueType};

use super::scores::{Heads, Offset, Scale, ScaledDotProduct, Window, merge_heads};
use crate::OpError;
use crate::families::attention::checks::{ATTENTION, check_mask, same_size, sizes_differ};
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::cast;
use crate::support::sizes::{
    Size, add_sizes, axis_positions, divide_sizes, dtype_of, insert_axes, multiply_sizes, permute_axes,
    reshape_to, shape_of, size_of, slice_axis, slice_between,
};

const MICROSOFT: &str = "com.microsoft";
const MULTI_HEAD: &str = "MultiHeadAttention";

/// Attributes that both operators have.
struct CommonAttrs {
    heads: i64,
    causal: bool,
    filter: f64,
    /// `None`: one over the square root of the head size.
    scale: Option<f64>,
}

impl CommonAttrs {
    fn read(node: &Node) -> Result<CommonAttrs, OpError> {
        let attrs = &node.attrs;
        let heads = Attrs::required("num_heads", attrs.int("num_heads")?)?;
        if heads < 1 {
            return Err(OpError::invalid(format!("num_heads must be positive, got {heads}")));
        }
        for (name, what) in [
            ("do_rotary", "rotation of queries and keys inside the operator"),
            ("past_present_share_buffer", "one buffer for past and present"),
        ] {
            if attrs.int(name)?.unwrap_or(0) != 0 {
                return Err(OpError::unsupported(format!(
                    "{name} ({what}) is for text generation and cannot be trained; export the model without it"
                )));
            }
        }
        Ok(CommonAttrs {
            heads,
            causal: attrs.int("unidirectional")?.unwrap_or(0) != 0,
            filter: f64::from(attrs.float("mask_filter_value")?.unwrap_or(-10_000.0)),
            scale: attrs.float("scale")?.map(f64::from).filter(|&scale| scale != 0.0),
        })
    }

    /// Returns the head size for an axis of this width.
    fn head_size(&self, what: &str, width: Option<&Dim>) -> Result<Option<usize>, OpError> {
        let Some(width) = width.and_then(Dim::known) else { return Ok(None) };
        if width % self.heads as usize != 0 {
            return Err(OpError::invalid(format!(
                "{what} of width {width} cannot be divided into {} heads",
                self.heads
            )));
        }
        Ok(Some(width / self.heads as usize))
    }
}

/// Form of the mask input.
#[derive(Clone, Copy, Debug, PartialEq)]
enum MaskForm {
    /// Ends of the visible keys: `[batch]`.
    Ends,
    /// Ends of the visible keys, followed by their starts: `[2 * batch]`.
    EndsAndStarts,
    /// 1 for a visible key: `[batch, keys]`.
    Keys,
    /// 1 for a key that is visible to a query: `[batch, queries, keys]`.
    Pairs,
}

impl MaskForm {
    fn from_shape(k: usize, mask: &Shape, batch: Option<&Dim>) -> Result<MaskForm, OpError> {
        match &mask[..] {
            [count] => match (count.known(), batch.and_then(Dim::known)) {
                _ if Some(count) == batch => Ok(MaskForm::Ends),
                (Some(count), Some(batch)) if count == 2 * batch => Ok(MaskForm::EndsAndStarts),
                (Some(count), Some(batch)) => {
                    let what = if count == 3 * batch + 2 { " (lengths with offsets)" } else { "" };
                    Err(OpError::unsupported(format!(
                        "input {k} (mask) has shape {mask}{what} for batch size {batch}; supported shapes are \
                         [{batch}] (ends), [{}] (ends and starts), [batch, keys] and [batch, queries, keys]",
                        2 * batch
                    )))
                }
                _ => Err(OpError::unsupported(format!(
                    "input {k} (mask) has the ambiguous shape {mask}: ends of the keys, or ends and starts; name its \
                     axis like the batch axis in the model"
                ))),
            },
            [_, _] => Ok(MaskForm::Keys),
            [_, _, _] => Ok(MaskForm::Pairs),
            _ => Err(OpError::unsupported(format!(
                "input {k} (mask) must have shape [batch], [2 * batch], [batch, keys] or [batch, queries, keys], got \
                 {mask}"
            ))),
        }
    }
}

/// Checks the shape of the mask, which is input `k`. The sizes are `[batch, queries, keys]`.
fn check_mask_shape(
    k: usize,
    mask: &Shape,
    [batch, queries, keys]: [Option<&Dim>; 3],
) -> Result<(), OpError> {
    let expected = match MaskForm::from_shape(k, mask, batch)? {
        MaskForm::Ends | MaskForm::EndsAndStarts => return Ok(()),
        MaskForm::Keys => vec![batch, keys],
        MaskForm::Pairs => vec![batch, queries, keys],
    };
    let differs = |(dim, size): (&Dim, &Option<&Dim>)| !dim.is_one() && sizes_differ(Some(dim), *size);
    if mask.iter().zip(&expected).any(differs) {
        let expected_sizes: Vec<String> =
            expected.iter().map(|dim| dim.map_or("?".into(), ToString::to_string)).collect();
        return Err(OpError::invalid(format!(
            "input {k} (mask) has shape {mask}, but [{}] is needed",
            expected_sizes.join(", ")
        )));
    }
    Ok(())
}

/// Returns a mask as floats that are added to the scores. They broadcast to `[batch, heads, queries, keys]`.
fn additive_mask(
    rw: &mut Rewrite<'_>,
    mask: ValueId,
    form: MaskForm,
    batch: Size,
    keys: Size,
    (dtype, filter): (DType, f64),
) -> Result<ValueId, OpError> {
    let of_mask = dtype_of(rw, mask, "the mask")?;
    let hidden = match form {
        MaskForm::Ends | MaskForm::EndsAndStarts => {
            let columns = axis_positions(rw, keys);
            let long = cast(rw.patch().1, mask, of_mask, DType::I64);
            let each = |rw: &mut Rewrite<'_>, value: ValueId| {
                let one = Size::Number(1);
                reshape_to(rw, value, &[Size::Number(-1), one, one, one])
            };
            let ends = match form {
                MaskForm::Ends => long,
                _ => slice_between(rw, long, 0, Size::Number(0), batch),
            };
            let ends = each(rw, ends);
            let inside = rw.add("Less", &[columns, ends], Attrs::new());
            let after_end = rw.add("Not", &[inside], Attrs::new());
            if form == MaskForm::Ends {
                after_end
            } else {
                let starts = slice_between(rw, long, 0, batch, Size::Number(i64::MAX));
                let starts = each(rw, starts);
                let before = rw.add("Less", &[columns, starts], Attrs::new());
                rw.add("Or", &[after_end, before], Attrs::new())
            }
        }
        MaskForm::Keys | MaskForm::Pairs => {
            let one = rw.constant("seen", Tensor::scalar(of_mask, 1.0));
            let hidden = rw.add("Less", &[mask, one], Attrs::new());
            insert_axes(rw, hidden, if form == MaskForm::Keys { &[1, 2] } else { &[1] })
        }
    };
    let filter = rw.constant("filter", Tensor::scalar(dtype, filter));
    let zero = rw.constant("zero", Tensor::scalar(dtype, 0.0));
    Ok(rw.add("Where", &[hidden, filter, zero], Attrs::new()))
}

/// Common part of both operators: computes the attention of queries, keys and values, as `[batch, length, width]`.
struct AttentionCore {
    common: CommonAttrs,
    dtype: DType,
    queries: Heads,
    keys: Heads,
    values: Heads,
    /// Length of the past.
    past: Size,
    mask: Option<(ValueId, MaskForm)>,
    batch: Size,
    bias: Option<ValueId>,
}

impl AttentionCore {
    fn build(self, rw: &mut Rewrite<'_>) -> Result<(), OpError> {
        let mut added = Vec::new();
        if let Some((mask, form)) = self.mask {
            let numbers = (self.dtype, self.common.filter);
            added.push(additive_mask(rw, mask, form, self.batch, self.keys.length, numbers)?);
        }
        added.extend(self.bias);
        let window = Window { left: None, right: self.common.causal.then_some(0) };
        let offset = Offset::Size(self.past);
        let hidden = window.outside_mask(rw, self.queries.length, self.keys.length, offset);
        let scores = ScaledDotProduct {
            dtype: self.dtype,
            queries: self.queries,
            keys: self.keys,
            values: self.values,
            scale: self.common.scale.map_or(Scale::InverseSqrt(self.queries.size), Scale::Factor),
            scale_both: false,
            softcap: None,
            added,
            hidden,
            may_hide_all_keys: false,
            precision: None,
        };
        let result = scores.build(rw).result;
        let width = multiply_sizes(rw, self.queries.heads, self.values.size);
        let result = merge_heads(rw, result, width);
        rw.replace_output(0, result);
        Ok(())
    }
}

/// `Attention`: queries, keys and values are projections of one input.
struct Attention {
    common: CommonAttrs,
    widths: Option<[usize; 3]>,
}

const INPUT: usize = 0;
const WEIGHTS: usize = 1;
const BIAS: usize = 2;
const MASK: usize = 3;
const PAST: usize = 4;
const ATTENTION_BIAS: usize = 5;
const PAST_LENGTH: usize = 6;

impl Attention {
    fn read(node: &Node) -> Result<Attention, OpError> {
        let common = CommonAttrs::read(node)?;
        let widths = node.attrs.ints("qkv_hidden_sizes")?.filter(|sizes| !sizes.is_empty());
        let widths = widths.map(|sizes| {
            let widths: Option<Vec<usize>> = sizes.iter().map(|&size| usize::try_from(size).ok()).collect();
            let widths = widths.and_then(|widths| <[usize; 3]>::try_from(widths).ok());
            let widths = widths.filter(|[q, k, _]| q == k);
            widths.ok_or_else(|| {
                OpError::invalid(format!(
                    "qkv_hidden_sizes must be the widths of queries, keys (same width) and values, got {sizes:?}"
                ))
            })
        });
        Ok(Attention { common, widths: widths.transpose()? })
    }

    /// Returns the widths of queries, keys and values for weights of this shape.
    fn widths(&self, weights: &Shape) -> Result<Option<[usize; 3]>, OpError> {
        let [_, width_dim] = &weights[..] else {
            return Err(OpError::invalid(format!(
                "input {WEIGHTS} (weights) must be a matrix (width of the input by widths of queries, keys and \
                 values), got shape {weights}"
            )));
        };
        let total = width_dim.known();
        let widths = match (self.widths, total) {
            (Some(widths), Some(width_total)) if widths.iter().sum::<usize>() != width_total => {
                return Err(OpError::invalid(format!(
                    "input {WEIGHTS} has shape {weights}, but qkv_hidden_sizes, {widths:?}, do not add up to {width_total}"
                )));
            }
            (Some(widths), _) => Some(widths),
            (None, Some(width_total)) if width_total % 3 != 0 => {
                return Err(OpError::invalid(format!(
                    "the last axis of input {WEIGHTS}, of shape {weights}, cannot be divided into queries, keys and \
                     values; set qkv_hidden_sizes"
                )));
            }
            (None, known_total) => known_total.map(|combined| [combined / 3; 3]),
        };
        for width in widths.iter().flatten() {
            self.common.head_size("queries, keys or values", Some(&Dim::Known(*width)))?;
        }
        Ok(widths)
    }
}

/// Returns the length of the past plus the new length, or `open()` if the sum is unknown.
fn total_length(past: Option<&Dim>, new: Option<&Dim>, open: impl Fn() -> Dim) -> Dim {
    match (past, new.and_then(Dim::known)) {
        (None, _) => new.cloned().unwrap_or_else(open),
        (Some(Dim::Known(past)), Some(new)) => Dim::Known(past.saturating_add(new)),
        _ => open(),
    }
}

impl Op for Attention {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 7, 2)?;
        if cx.has_input(PAST_LENGTH) {
            return Err(OpError::unsupported(
                "past_sequence_length is for a buffer shared by past and present, which cannot be trained",
            ));
        }
        let dtype = cx.expect_dtype(INPUT, "a float type", DType::is_float)?;
        cx.expect_same_dtype([INPUT, WEIGHTS, BIAS, PAST, ATTENTION_BIAS])?;
        if cx.has_input(MASK) {
            cx.expect_dtype(MASK, "int32", |dtype| dtype == DType::I32)?;
        }
        let widths = cx.shape(WEIGHTS).map(|weights| self.widths(weights)).transpose()?.flatten();
        let input = cx.shape(INPUT).cloned();
        let dims = match input.as_deref() {
            None => [None, None, None],
            Some([batch, length, width]) => [Some(batch), Some(length), Some(width)],
            Some(_) => {
                return Err(OpError::invalid(format!(
                    "input {INPUT} has shape {}; [batch, length, width] is needed",
                    input.unwrap_or_default()
                )));
            }
        };
        let [batch, length, width] = dims;
        if let Some(weights) = cx.shape(WEIGHTS)
            && sizes_differ(width, weights.first())
        {
            return Err(OpError::invalid(format!(
                "input {INPUT} has shape {}, which cannot be multiplied by weights of shape {weights}",
                input.clone().unwrap_or_default()
            )));
        }
        if let (Some(bias), Some(widths)) = (cx.shape(BIAS), widths) {
            let total_width = Dim::Known(widths.iter().sum());
            if bias.rank() != 1 || sizes_differ(bias.first(), Some(&total_width)) {
                return Err(OpError::invalid(format!(
                    "input {BIAS} has shape {bias}, but [{total_width}] is needed"
                )));
            }
        }
        let heads = Dim::Known(self.common.heads as usize);
        let sizes = widths.map(|widths| widths.map(|width| Dim::Known(width / self.common.heads as usize)));
        let past = cx.shape(PAST).cloned();
        if let Some(past) = &past {
            let size = sizes.as_ref().map(|[_, size, _]| size);
            let expected = [Some(&Dim::Known(2)), batch, Some(&heads), None, size];
            if past.rank() != 5
                || past
                    .iter()
                    .zip(expected)
                    .any(|(actual, expected_dim)| sizes_differ(Some(actual), expected_dim))
            {
                let batch = batch.map_or("batch".into(), ToString::to_string);
                let size = size.map_or("size".into(), ToString::to_string);
                return Err(OpError::invalid(format!(
                    "input {PAST} has shape {past}, but [2, {batch}, {heads}, length, {size}] is needed"
                )));
            }
        }
        if (cx.has_input(PAST) || cx.has_output(1))
            && let Some([_, of_keys, of_values]) = &sizes
            && of_keys != of_values
        {
            return Err(OpError::invalid(format!(
                "with a past or present, the head sizes of keys and values must be equal, got {of_keys} and {of_values}"
            )));
        }
        let keys = |cx: &Infer<'_>, output: usize, axis: usize| {
            let past = cx
                .has_input(PAST)
                .then(|| past.as_ref().map_or_else(|| cx.unknown_dim(1, 3), |past| past[3].clone()));
            total_length(past.as_ref(), length, || cx.unknown_dim(output, axis))
        };
        let known_keys = Some(keys(cx, 1, 3)).filter(|dim| dim.known().is_some() || !cx.has_input(PAST));
        if let Some(mask) = cx.shape(MASK) {
            check_mask_shape(MASK, mask, [batch, length, known_keys.as_ref()])?;
        }
        if let Some(added) = cx.shape(ATTENTION_BIAS) {
            let to = [batch.cloned(), Some(heads.clone()), length.cloned(), known_keys];
            check_mask(ATTENTION_BIAS, added, &to)?;
        }
        let open = |cx: &Infer<'_>, dim: Option<&Dim>, axis: usize| {
            dim.cloned().unwrap_or_else(|| cx.unknown_dim(0, axis))
        };
        let width = widths.map_or_else(|| cx.unknown_dim(0, 2), |[_, _, width]| Dim::Known(width));
        let (batch, length) = (open(cx, batch, 0), open(cx, length, 1));
        let present = [
            Dim::Known(2),
            batch.clone(),
            heads,
            keys(cx, 1, 3),
            sizes.map_or_else(|| cx.unknown_dim(1, 4), |[_, size, _]| size),
        ];
        cx.set_output(0, dtype, Some([batch, length, width].into_iter().collect()));
        cx.set_output(1, dtype, Some(present.into_iter().collect()));
        Ok(())
    }
}

fn decompose_attention(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = Attention::read(rw.node())?;
    let (input, weights) = (rw.required_input(INPUT)?, rw.required_input(WEIGHTS)?);
    let dtype = dtype_of(rw, input, "the input")?;
    let widths = op.widths(&shape_of(rw, weights, "the weights")?)?.ok_or_else(|| {
        OpError::unsupported(
            "the shape of the weights must be known; declare it in the model or set qkv_hidden_sizes",
        )
    })?;
    let (batch, length) = (size_of(rw, input, 0), size_of(rw, input, 1));
    let mut projected = rw.add("MatMul", &[input, weights], Attrs::new());
    if let Some(bias) = rw.input(BIAS) {
        projected = rw.add("Add", &[projected, bias], Attrs::new());
    }
    let heads = Size::Number(op.common.heads);
    let mut from = 0;
    let [queries, mut keys, mut values] = widths.map(|width| {
        let width = width as i64;
        let slice = slice_axis(rw, projected, 2, from, from + width, 1);
        from += width;
        Heads::split(rw, slice, heads, length, Size::Number(width / op.common.heads))
    });
    let mut past_length = Size::Number(0);
    if let Some(past) = rw.input(PAST) {
        past_length = size_of(rw, past, 3);
        let [past_keys, past_values] = [0i64, 1].map(|index| {
            let index = rw.constant("index", Tensor::i64(&[], &[index]));
            rw.add("Gather", &[past, index], Attrs::new().with("axis", 0i64))
        });
        keys = keys.append_to_past(rw, past_keys, past_length);
        values = values.append_to_past(rw, past_values, past_length);
    }
    if rw.has_output(1) {
        let parts = [keys, values].map(|heads| insert_axes(rw, heads.value, &[0]));
        let present = rw.add("Concat", &parts, Attrs::new().with("axis", 0i64));
        rw.replace_output(1, present);
    }
    let mask = match rw.input(MASK) {
        Some(mask) => {
            let of_input = shape_of(rw, input, "the input")?;
            Some((mask, MaskForm::from_shape(MASK, &shape_of(rw, mask, "the mask")?, of_input.first())?))
        }
        None => None,
    };
    let bias = rw.input(ATTENTION_BIAS);
    AttentionCore { common: op.common, dtype, queries, keys, values, past: past_length, mask, batch, bias }
        .build(rw)
}

/// `MultiHeadAttention`: queries, keys and values in up to three inputs.
struct MultiHead {
    common: CommonAttrs,
}

const QUERY: usize = 0;
const KEY: usize = 1;
const VALUE: usize = 2;
const PROJECTION_BIAS: usize = 3;
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

fn decompose_multi_head(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
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
    // The bias consists of parts for queries, keys and values. Keys and values that are already split into heads get no
    // bias.
    let biases = match rw.input(PROJECTION_BIAS) {
        Some(bias) => {
            let (first, second) = (of_queries.0, add_sizes(rw, of_queries.0, of_queries.0));
            let ends = [Size::Number(0), first, second, Size::Number(i64::MAX)];
            let part =
                |rw: &mut Rewrite<'_>, k: usize| Some(slice_between(rw, bias, 0, ends[k], ends[k + 1]));
            let of_queries = part(rw, 0);
            if known.layout == Layout::AsHeads {
                [of_queries, None, None]
            } else {
                [of_queries, part(rw, 1), part(rw, 2)]
            }
        }
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

fn build_attention(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Attention::read(node)?))
}

fn build_multi_head(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(MultiHead { common: CommonAttrs::read(node)? }))
}

pub(super) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new(MICROSOFT, ATTENTION, &[1], build_attention)
            .sample(|_| {
                let [input, weights, bias] =
                    [&[2, 2, 2][..], &[2, 6], &[6]].map(|dims| Some(ValueType::tensor(DType::F32, dims)));
                let attrs = Attrs::new().with("num_heads", 1i64);
                Sample { inputs: vec![input, weights, bias], ..Sample::of(attrs) }
            })
            .composition(decompose_attention)
            .weights(&[WEIGHTS, BIAS]),
        Definition::new(MICROSOFT, MULTI_HEAD, &[1], build_multi_head)
            .sample(|_| {
                let matrices = Some(ValueType::tensor(DType::F32, &[2, 2, 2]));
                Sample { inputs: vec![matrices; 3], ..Sample::of(Attrs::new().with("num_heads", 1i64)) }
            })
            .composition(decompose_multi_head)
            .weights(&[PROJECTION_BIAS]),
    ]
}
