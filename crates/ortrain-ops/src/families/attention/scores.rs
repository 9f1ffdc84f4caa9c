//! Common steps of all attention operators: products of queries and keys, masks, attention weights, and the weighted
//! sum of the values.

use ortrain_graph::{Attrs, DType, Tensor, ValueId};

use crate::rewrite::Rewrite;
use crate::support::casts::cast;
use crate::support::sizes::{
    Size, add_sizes, as_vector, axis_positions, divide_sizes, insert_axes, permute_axes, reshape_to,
    subtract_sizes,
};

/// Scale of the products of queries and keys.
#[derive(Clone, Copy)]
pub(super) enum Scale {
    /// A number.
    Factor(f64),
    /// One over the square root of the head size.
    InverseSqrt(Size),
}

/// Heads of shape `[batch, heads, length, size]`, with the sizes of all axes but the batch.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub(super) value: ValueId,
    pub(super) heads: Size,
    pub(super) length: Size,
    pub(super) size: Size,
}

impl Heads {
    /// Splits `[batch, length, heads * size]` into heads.
    pub(super) fn split(
        rw: &mut Rewrite<'_>,
        value: ValueId,
        heads: Size,
        length: Size,
        size: Size,
    ) -> Heads {
        let reshaped = reshape_to(rw, value, &[Size::SameAxis, Size::SameAxis, heads, size]);
        Heads { value: permute_axes(rw, reshaped, &[0, 2, 1, 3]), heads, length, size }
    }

    /// Appends these heads to a past of length `past_length`.
    pub(super) fn append_to_past(self, rw: &mut Rewrite<'_>, past: ValueId, past_length: Size) -> Heads {
        let value = rw.add("Concat", &[past, self.value], Attrs::new().with("axis", 2i64));
        Heads { value, length: add_sizes(rw, past_length, self.length), ..self }
    }
}

/// Range of keys that each query sees, relative to its position. Query `i` has position `i + offset`.
#[derive(Clone, Copy)]
pub(super) struct Window {
    /// Number of visible positions before the query's own; `None`: no limit.
    pub(super) left: Option<i64>,
    /// Number of visible positions after the query's own; 0 is causal, `None`: no limit.
    pub(super) right: Option<i64>,
}

/// Position of the first query among the keys.
#[derive(Clone, Copy)]
pub(super) enum Offset {
    /// One position for the whole batch.
    Size(Size),
    /// One position for each item of the batch: `[batch, 1, 1, 1]` of int64.
    PerBatchItem(ValueId),
}

impl Window {
    /// Returns a bool mask that is true for keys outside of the window. It broadcasts to
    /// `[batch, heads, queries, keys]`.
    pub(super) fn outside_mask(
        self,
        rw: &mut Rewrite<'_>,
        queries: Size,
        keys: Size,
        offset: Offset,
    ) -> Option<ValueId> {
        if self.left.is_none() && self.right.is_none() {
            return None;
        }
        let rows = axis_positions(rw, queries);
        let mut rows = insert_axes(rw, rows, &[1]);
        match offset {
            Offset::Size(Size::Number(0)) => {}
            Offset::Size(size) => {
                let size = as_vector(rw, size);
                rows = rw.add("Add", &[rows, size], Attrs::new());
            }
            Offset::PerBatchItem(offsets) => rows = rw.add("Add", &[rows, offsets], Attrs::new()),
        }
        let columns = axis_positions(rw, keys);
        let moved = |rw: &mut Rewrite<'_>, by: i64| match by {
            0 => rows,
            _ => {
                let by = rw.ints("window", &[by]);
                rw.add("Add", &[rows, by], Attrs::new())
            }
        };
        let after = self.right.map(|right| {
            let last = moved(rw, right);
            rw.add("Less", &[last, columns], Attrs::new())
        });
        let before = self.left.map(|left| {
            let first = moved(rw, left.saturating_neg());
            rw.add("Less", &[columns, first], Attrs::new())
        });
        or_conditions(rw, before, after)
    }
}

/// Returns the disjunction of two optional conditions.
pub(super) fn or_conditions(rw: &mut Rewrite<'_>, a: Option<ValueId>, b: Option<ValueId>) -> Option<ValueId> {
    match (a, b) {
        (Some(a), Some(b)) => Some(rw.add("Or", &[a, b], Attrs::new())),
        (one, other) => one.or(other),
    }
}

/// Attention of queries to keys and values. The number of heads of keys and values divides the number of heads of
/// queries.
pub(super) struct ScaledDotProduct {
    pub(super) dtype: DType,
    pub(super) queries: Heads,
    pub(super) keys: Heads,
    pub(super) values: Heads,
    pub(super) scale: Scale,
    /// True if queries and keys are each scaled by the square root of the scale, which avoids overflow. Otherwise only
    /// the queries are scaled.
    pub(super) scale_both: bool,
    /// Largest absolute value of capped products.
    pub(super) softcap: Option<f64>,
    /// Floats that are added to the products; they broadcast to `[batch, heads, queries, keys]`.
    pub(super) added: Vec<ValueId>,
    /// Bool mask that is true for hidden keys; it broadcasts to `[batch, heads, queries, keys]`.
    pub(super) hidden: Option<ValueId>,
    /// True if all keys of a query may be hidden. The result of this query is then 0.
    pub(super) may_hide_all_keys: bool,
    /// Type of the softmax, if it differs from `dtype`.
    pub(super) precision: Option<DType>,
    /// Logits of a further key without a value; they broadcast to `[batch, heads, queries, 1]`.
    pub(super) sink: Option<ValueId>,
}

/// Results of all stages: `[batch, heads, queries, keys]`; the final result is `[batch, heads, queries, size]`.
pub(super) struct Stages {
    pub(super) products: ValueId,
    pub(super) capped: ValueId,
    pub(super) masked: ValueId,
    pub(super) weights: ValueId,
    pub(super) result: ValueId,
}

impl ScaledDotProduct {
    pub(super) fn build(self, rw: &mut Rewrite<'_>) -> Stages {
        let none = Attrs::new;
        let (q, k) = self.scale_queries_and_keys(rw);
        let groups = divide_sizes(rw, self.queries.heads, self.keys.heads);
        let grouped = self.queries.heads != self.keys.heads && groups != Size::Number(1);
        let (heads, of_queries) = (self.keys.heads, self.queries.heads);
        // Heads that share keys and values get an axis of their own, along which the product broadcasts.
        let split_heads = |rw: &mut Rewrite<'_>, value: ValueId, length: Size, size: Size| match grouped {
            true => reshape_to(rw, value, &[Size::SameAxis, heads, groups, length, size]),
            false => value,
        };
        let together = |rw: &mut Rewrite<'_>, value: ValueId, length: Size, size: Size| match grouped {
            true => reshape_to(rw, value, &[Size::SameAxis, of_queries, length, size]),
            false => value,
        };
        let shared =
            |rw: &mut Rewrite<'_>, value: ValueId| if grouped { insert_axes(rw, value, &[2]) } else { value };
        let transposed = permute_axes(rw, k, &[0, 1, 3, 2]);
        let (left, right) =
            (split_heads(rw, q, self.queries.length, self.queries.size), shared(rw, transposed));
        let products = rw.add("MatMul", &[left, right], none());
        let products = together(rw, products, self.queries.length, self.keys.length);

        let capped = match self.softcap {
            Some(cap) => {
                let cap = rw.constant("softcap", Tensor::scalar(self.dtype, cap));
                let inner = rw.add("Div", &[products, cap], none());
                let bent = rw.add("Tanh", &[inner], none());
                rw.add("Mul", &[bent, cap], none())
            }
            None => products,
        };
        let mut masked = capped;
        for &mask in &self.added {
            masked = rw.add("Add", &[masked, mask], none());
        }
        if let Some(hidden) = self.hidden {
            let nothing = rw.constant("nothing", Tensor::scalar(self.dtype, f64::NEG_INFINITY));
            masked = rw.add("Where", &[hidden, nothing, masked], none());
        }
        let precision = self.precision.unwrap_or(self.dtype);
        let logits = cast(rw.patch().1, masked, self.dtype, precision);
        let shares = if self.may_hide_all_keys {
            // Rows in which every key is hidden are replaced by zeros first. NaN would otherwise reach the gradient.
            let last = rw.ints("last", &[-1]);
            let max = rw.add("ReduceMax", &[logits, last], Attrs::new().with("keepdims", 1i64));
            let nothing = rw.constant("nothing", Tensor::scalar(precision, f64::NEG_INFINITY));
            let blind = rw.add("Equal", &[max, nothing], none());
            let zero = rw.constant("zero", Tensor::scalar(precision, 0.0));
            let safe = rw.add("Where", &[blind, zero, logits], none());
            let shares = self.normalize_logits(rw, safe);
            rw.add("Where", &[blind, zero, shares], none())
        } else {
            self.normalize_logits(rw, logits)
        };
        let shares = cast(rw.patch().1, shares, precision, self.dtype);
        let left = split_heads(rw, shares, self.queries.length, self.keys.length);
        let right = shared(rw, self.values.value);
        let result = rw.add("MatMul", &[left, right], none());
        let result = together(rw, result, self.queries.length, self.values.size);
        Stages { products, capped, masked, weights: shares, result }
    }

    /// Returns the softmax of the logits, with the sink as a further logit.
    fn normalize_logits(&self, rw: &mut Rewrite<'_>, logits: ValueId) -> ValueId {
        let shares = rw.add("Softmax", &[logits], Attrs::new().with("axis", -1i64));
        let Some(sink) = self.sink else { return shares };
        // The share of all keys is sum(exp(logits)) / (sum(exp(logits)) + exp(sink)).
        let last = rw.ints("last", &[-1]);
        let sum = rw.add("ReduceLogSumExp", &[logits, last], Attrs::new().with("keepdims", 1i64));
        let sink = cast(rw.patch().1, sink, self.dtype, self.precision.unwrap_or(self.dtype));
        let excess = rw.add("Sub", &[sum, sink], Attrs::new());
        let left = rw.add("Sigmoid", &[excess], Attrs::new());
        rw.add("Mul", &[shares, left], Attrs::new())
    }

    /// Returns queries and keys, scaled so that their products have the scale.
    fn scale_queries_and_keys(&self, rw: &mut Rewrite<'_>) -> (ValueId, ValueId) {
        let (q, k) = (self.queries.value, self.keys.value);
        let scale = match self.scale {
            Scale::InverseSqrt(Size::Number(size)) => Scale::Factor(1.0 / (size.max(1) as f64).sqrt()),
            other => other,
        };
        let [of_queries, of_keys] = match scale {
            Scale::Factor(scale) => {
                // A negative scale has no square root: the queries get its sign.
                let root = scale.abs().sqrt();
                let numbers = if self.scale_both { [scale.signum() * root, root] } else { [scale, 1.0] };
                let constant = |rw: &mut Rewrite<'_>, number: f64| {
                    (number != 1.0).then(|| rw.constant("scale", Tensor::scalar(self.dtype, number)))
                };
                numbers.map(|number| constant(rw, number))
            }
            Scale::InverseSqrt(size) => {
                let size = as_vector(rw, size);
                let size = cast(rw.patch().1, size, DType::I64, self.dtype);
                let mut root = rw.add("Sqrt", &[size], Attrs::new());
                if self.scale_both {
                    root = rw.add("Sqrt", &[root], Attrs::new());
                }
                let one = rw.constant("one", Tensor::scalar(self.dtype, 1.0));
                let factor = rw.add("Div", &[one, root], Attrs::new());
                [Some(factor), self.scale_both.then_some(factor)]
            }
        };
        let by = |rw: &mut Rewrite<'_>, value: ValueId, factor: Option<ValueId>| match factor {
            Some(factor) => rw.add("Mul", &[value, factor], Attrs::new()),
            None => value,
        };
        (by(rw, q, of_queries), by(rw, k, of_keys))
    }
}

/// Merges the heads of `[batch, heads, length, size]` to `[batch, length, heads * size]`.
pub(super) fn merge_heads(rw: &mut Rewrite<'_>, value: ValueId, width: Size) -> ValueId {
    let transposed = permute_axes(rw, value, &[0, 2, 1, 3]);
    reshape_to(rw, transposed, &[Size::SameAxis, Size::SameAxis, width])
}

/// Pads the last axis of a mask from `length` elements to the number of keys. The mask has `rank` axes. Padded keys are
/// hidden.
pub(super) fn pad_mask(
    rw: &mut Rewrite<'_>,
    mask: ValueId,
    (rank, length): (usize, Size),
    dtype: DType,
    keys: Size,
) -> ValueId {
    let missing = match subtract_sizes(rw, keys, length) {
        Size::Number(0) => return mask,
        Size::Number(count) => rw.ints("missing", &[count]),
        missing => {
            // A mask that is too long fails where it is used.
            let (missing, zero) = (as_vector(rw, missing), rw.ints("none", &[0]));
            rw.add("Max", &[missing, zero], Attrs::new())
        }
    };
    let before = rw.ints("before", &vec![0; 2 * rank - 1]);
    let pads = rw.add("Concat", &[before, missing], Attrs::new().with("axis", 0i64));
    let mut inputs = vec![mask, pads];
    if dtype != DType::Bool {
        inputs.push(rw.constant("unseen", Tensor::scalar(dtype, f64::NEG_INFINITY)));
    }
    rw.add("Pad", &inputs, Attrs::new())
}
