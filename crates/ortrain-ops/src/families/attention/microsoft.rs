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

use super::scores::Heads;
use crate::OpError;
use crate::families::attention::checks::{ATTENTION, check_mask, sizes_differ};
use crate::families::attention::common::{
    AttentionCore, CommonAttrs, MICROSOFT, MaskForm, check_mask_shape, total_length,
};
use crate::families::attention::multi_head::{
    MULTI_HEAD, PROJECTION_BIAS, build_multi_head, decompose_multi_head,
};
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::sizes::{Size, dtype_of, insert_axes, shape_of, size_of, slice_axis};

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
    let mut projected = rw.add("MatMul", &[input, weights], Attrs::new());
    if let Some(bias) = rw.input(BIAS) {
        projected = rw.add("Add", &[projected, bias], Attrs::new());
    }
    let optional = [MASK, PAST, ATTENTION_BIAS].map(|k| rw.input(k));
    attend_projection(rw, op.common, input, (projected, dtype), widths, optional)
}

/// Adds the attention of queries, keys and values that lie side by side in `projected`. `optional` are mask, past and
/// attention bias.
pub(super) fn attend_projection(
    rw: &mut Rewrite<'_>,
    common: CommonAttrs,
    input: ValueId,
    (projected, dtype): (ValueId, DType),
    widths: [usize; 3],
    [mask, past, bias]: [Option<ValueId>; 3],
) -> Result<(), OpError> {
    let (batch, length) = (size_of(rw, input, 0), size_of(rw, input, 1));
    let heads = Size::Number(common.heads);
    let mut from = 0;
    let [queries, mut keys, mut values] = widths.map(|width| {
        let width = width as i64;
        let slice = slice_axis(rw, projected, 2, from, from + width, 1);
        from += width;
        Heads::split(rw, slice, heads, length, Size::Number(width / common.heads))
    });
    let mut past_length = Size::Number(0);
    if let Some(past) = past {
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
    let mask = match mask {
        Some(mask) => {
            let of_input = shape_of(rw, input, "the input")?;
            Some((mask, MaskForm::from_shape(MASK, &shape_of(rw, mask, "the mask")?, of_input.first())?))
        }
        None => None,
    };
    AttentionCore { common, dtype, queries, keys, values, past: past_length, mask, batch, bias }.build(rw)
}

fn build_attention(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Attention::read(node)?))
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
