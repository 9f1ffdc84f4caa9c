//! Parts that the attention operators of com.microsoft share.

use ortrain_graph::{Attrs, DType, Dim, Node, Shape, Tensor, ValueId};

use crate::OpError;
use crate::families::attention::checks::sizes_differ;
use crate::families::attention::scores::{Heads, Offset, Scale, ScaledDotProduct, Window, merge_heads};
use crate::rewrite::Rewrite;
use crate::support::casts::cast;
use crate::support::sizes::{
    Size, axis_positions, dtype_of, insert_axes, multiply_sizes, reshape_to, slice_between,
};

pub(super) const MICROSOFT: &str = "com.microsoft";

/// Attributes that both operators have.
pub(super) struct CommonAttrs {
    pub(super) heads: i64,
    pub(super) causal: bool,
    pub(super) filter: f64,
    /// `None`: one over the square root of the head size.
    pub(super) scale: Option<f64>,
}

impl CommonAttrs {
    pub(super) fn read(node: &Node) -> Result<CommonAttrs, OpError> {
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
    pub(super) fn head_size(&self, what: &str, width: Option<&Dim>) -> Result<Option<usize>, OpError> {
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
pub(super) enum MaskForm {
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
    pub(super) fn from_shape(k: usize, mask: &Shape, batch: Option<&Dim>) -> Result<MaskForm, OpError> {
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
pub(super) fn check_mask_shape(
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
pub(super) fn additive_mask(
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
pub(super) struct AttentionCore {
    pub(super) common: CommonAttrs,
    pub(super) dtype: DType,
    pub(super) queries: Heads,
    pub(super) keys: Heads,
    pub(super) values: Heads,
    /// Length of the past.
    pub(super) past: Size,
    pub(super) mask: Option<(ValueId, MaskForm)>,
    pub(super) batch: Size,
    pub(super) bias: Option<ValueId>,
}

impl AttentionCore {
    pub(super) fn build(self, rw: &mut Rewrite<'_>) -> Result<(), OpError> {
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
            sink: None,
        };
        let result = scores.build(rw).result;
        let width = multiply_sizes(rw, self.queries.heads, self.values.size);
        let result = merge_heads(rw, result, width);
        rw.replace_output(0, result);
        Ok(())
    }
}

/// Returns the length of the past plus the new length, or `open()` if the sum is unknown.
pub(super) fn total_length(past: Option<&Dim>, new: Option<&Dim>, open: impl Fn() -> Dim) -> Dim {
    match (past, new.and_then(Dim::known)) {
        (None, _) => new.cloned().unwrap_or_else(open),
        (Some(Dim::Known(past)), Some(new)) => Dim::Known(past.saturating_add(new)),
        _ => open(),
    }
}
