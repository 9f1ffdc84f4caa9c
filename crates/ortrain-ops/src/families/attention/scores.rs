//! What every kind of attention is made of: products of queries and keys, masks, shares, and the sum of the values by
//! their shares.

use ortrain_graph::{Attrs, DType, Tensor, ValueId};

use crate::families::norm::cast;
use crate::families::sizes::{Size, as_vector, over, permuted, plus, positions, reshaped, unsqueezed};
use crate::rewrite::Rewrite;

/// How products of queries and keys are scaled.
#[derive(Clone, Copy)]
pub(super) enum Scale {
    /// By this number.
    By(f64),
    /// By one over the root of the size of a head.
    OverRoot(Size),
}

/// Rows of heads: `[batch, heads, length, size]`, with the sizes of the axes but for the batch.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub(super) value: ValueId,
    pub(super) heads: Size,
    pub(super) length: Size,
    pub(super) size: Size,
}

impl Heads {
    /// From `[batch, length, heads * size]`.
    pub(super) fn split(
        rw: &mut Rewrite<'_>,
        value: ValueId,
        heads: Size,
        length: Size,
        size: Size,
    ) -> Heads {
        let apart = reshaped(rw, value, &[Size::Kept, Size::Kept, heads, size]);
        Heads { value: permuted(rw, apart, &[0, 2, 1, 3]), heads, length, size }
    }

    /// Behind those of a past of the given length.
    pub(super) fn behind(self, rw: &mut Rewrite<'_>, past: ValueId, past_length: Size) -> Heads {
        let value = rw.add("Concat", &[past, self.value], Attrs::new().with("axis", 2i64));
        Heads { value, length: plus(rw, past_length, self.length), ..self }
    }
}

/// Which key each query may not see, found out from positions. Queries come last: query `i` stands at `i + offset`.
#[derive(Clone, Copy)]
pub(super) struct Window {
    /// How many positions before its own a query sees; `None`: all of them.
    pub(super) left: Option<i64>,
    /// How many behind its own; 0 is causal.
    pub(super) right: Option<i64>,
}

/// The place of the first query among the keys.
#[derive(Clone, Copy)]
pub(super) enum Offset {
    /// The same for the whole batch.
    Size(Size),
    /// One for each of the batch: `[batch, 1, 1, 1]` of int64.
    Each(ValueId),
}

impl Window {
    /// Where a key lies outside of the window: bool that broadcasts to `[batch, heads, queries, keys]`.
    pub(super) fn outside(
        self,
        rw: &mut Rewrite<'_>,
        queries: Size,
        keys: Size,
        offset: Offset,
    ) -> Option<ValueId> {
        if self.left.is_none() && self.right.is_none() {
            return None;
        }
        let rows = positions(rw, queries);
        let mut rows = unsqueezed(rw, rows, &[1]);
        match offset {
            Offset::Size(Size::Number(0)) => {}
            Offset::Size(size) => {
                let size = as_vector(rw, size);
                rows = rw.add("Add", &[rows, size], Attrs::new());
            }
            Offset::Each(offsets) => rows = rw.add("Add", &[rows, offsets], Attrs::new()),
        }
        let columns = positions(rw, keys);
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
        either(rw, before, after)
    }
}

/// Where one of two conditions holds.
pub(super) fn either(rw: &mut Rewrite<'_>, a: Option<ValueId>, b: Option<ValueId>) -> Option<ValueId> {
    match (a, b) {
        (Some(a), Some(b)) => Some(rw.add("Or", &[a, b], Attrs::new())),
        (one, other) => one.or(other),
    }
}

/// Attention of queries to keys and values of the same number of heads or of fewer, by which it can be divided.
pub(super) struct Scores {
    pub(super) dtype: DType,
    pub(super) queries: Heads,
    pub(super) keys: Heads,
    pub(super) values: Heads,
    pub(super) scale: Scale,
    /// Whether queries and keys are scaled by the root each, against overflow; else the queries alone.
    pub(super) scale_both: bool,
    /// The largest absolute value that products are bent to.
    pub(super) softcap: Option<f64>,
    /// Floats that are added, as they broadcast to `[batch, heads, queries, keys]`.
    pub(super) added: Vec<ValueId>,
    /// Where a key is not seen, in bool that broadcasts likewise.
    pub(super) hidden: Option<ValueId>,
    /// Whether a query may see no key at all; its result is 0 then.
    pub(super) may_be_blind: bool,
    /// The type of the shares' computation, where it is another one.
    pub(super) precision: Option<DType>,
}

/// Values on the way, `[batch, heads, queries, keys]` but for the last, `[batch, heads, queries, size]`.
pub(super) struct Results {
    pub(super) products: ValueId,
    pub(super) capped: ValueId,
    pub(super) masked: ValueId,
    pub(super) shares: ValueId,
    pub(super) result: ValueId,
}

impl Scores {
    pub(super) fn build(self, rw: &mut Rewrite<'_>) -> Results {
        let none = Attrs::new;
        let (q, k) = self.scaled(rw);
        let groups = over(rw, self.queries.heads, self.keys.heads);
        let grouped = self.queries.heads != self.keys.heads && groups != Size::Number(1);
        let (heads, of_queries) = (self.keys.heads, self.queries.heads);
        // Heads that share keys and values get an axis of their own: the product then broadcasts.
        let apart = |rw: &mut Rewrite<'_>, value: ValueId, length: Size, size: Size| match grouped {
            true => reshaped(rw, value, &[Size::Kept, heads, groups, length, size]),
            false => value,
        };
        let together = |rw: &mut Rewrite<'_>, value: ValueId, length: Size, size: Size| match grouped {
            true => reshaped(rw, value, &[Size::Kept, of_queries, length, size]),
            false => value,
        };
        let shared =
            |rw: &mut Rewrite<'_>, value: ValueId| if grouped { unsqueezed(rw, value, &[2]) } else { value };
        let turned = permuted(rw, k, &[0, 1, 3, 2]);
        let (left, right) = (apart(rw, q, self.queries.length, self.queries.size), shared(rw, turned));
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
        let softmax = || Attrs::new().with("axis", -1i64);
        let shares = if self.may_be_blind {
            // Rows without anything are made rows of zeros first, so that no NaN arises that a gradient could meet.
            let last = rw.ints("last", &[-1]);
            let most = rw.add("ReduceMax", &[logits, last], Attrs::new().with("keepdims", 1i64));
            let nothing = rw.constant("nothing", Tensor::scalar(precision, f64::NEG_INFINITY));
            let blind = rw.add("Equal", &[most, nothing], none());
            let zero = rw.constant("zero", Tensor::scalar(precision, 0.0));
            let safe = rw.add("Where", &[blind, zero, logits], none());
            let shares = rw.add("Softmax", &[safe], softmax());
            rw.add("Where", &[blind, zero, shares], none())
        } else {
            rw.add("Softmax", &[logits], softmax())
        };
        let shares = cast(rw.patch().1, shares, precision, self.dtype);
        let left = apart(rw, shares, self.queries.length, self.keys.length);
        let right = shared(rw, self.values.value);
        let result = rw.add("MatMul", &[left, right], none());
        let result = together(rw, result, self.queries.length, self.values.size);
        Results { products, capped, masked, shares, result }
    }

    /// Queries and keys, of which the products are scaled.
    fn scaled(&self, rw: &mut Rewrite<'_>) -> (ValueId, ValueId) {
        let (q, k) = (self.queries.value, self.keys.value);
        let scale = match self.scale {
            Scale::OverRoot(Size::Number(size)) => Scale::By(1.0 / (size.max(1) as f64).sqrt()),
            other => other,
        };
        let [of_queries, of_keys] = match scale {
            Scale::By(scale) => {
                // A negative scale has no root: its sign goes to the queries.
                let root = scale.abs().sqrt();
                let numbers = if self.scale_both { [scale.signum() * root, root] } else { [scale, 1.0] };
                let constant = |rw: &mut Rewrite<'_>, number: f64| {
                    (number != 1.0).then(|| rw.constant("scale", Tensor::scalar(self.dtype, number)))
                };
                numbers.map(|number| constant(rw, number))
            }
            Scale::OverRoot(size) => {
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

/// `[batch, heads, length, size]` as `[batch, length, heads * size]`.
pub(super) fn merged(rw: &mut Rewrite<'_>, value: ValueId, width: Size) -> ValueId {
    let turned = permuted(rw, value, &[0, 2, 1, 3]);
    reshaped(rw, turned, &[Size::Kept, Size::Kept, width])
}
