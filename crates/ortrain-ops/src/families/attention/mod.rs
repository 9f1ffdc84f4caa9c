//! Attention: `Attention` of ONNX, and `Attention`, `MultiHeadAttention` and `GroupQueryAttention` of `com.microsoft`.
//!
//! Sources: ONNX Attention-23, 24 and 25 (<https://onnx.ai/onnx/operators/onnx__Attention.html>): 24 adds
//! `nonpad_kv_seqlen`, 25 the windows; ONNX Runtime's contributed operators, version 1
//! (<https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md>), each in a file of this folder.
//!
//! All these operators are compositions:
//! - the products of queries and keys are scaled, and capped by `softcap`;
//! - a float mask is added to the products, and a bool mask selects the visible keys;
//! - Softmax computes the attention weights. For float16 and bfloat16 it runs in float32, unless `softmax_precision` is
//!   set;
//! - the result is the sum of the values, weighted by the attention weights.
//!
//! A query without any visible key gives 0, and so does its gradient. With grouped queries, the heads that share keys
//! and values get an axis of their own. The products broadcast along this axis, so keys and values are not copied.
//!
//! Limits: the ranks of queries, keys and values must be known. A mask of integers is added as numbers.

mod checks;
mod common;
mod decoding;
mod grouped_query;
mod microsoft;
mod multi_head;
mod quantized;
mod scores;
mod sparse;

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape};

use self::scores::{Heads, Offset, Scale, ScaledDotProduct, Window, merge_heads, or_conditions, pad_mask};
use crate::OpError;
use crate::families::attention::checks::{ATTENTION, check_mask, same_size, sizes_differ};
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::casts::cast;
use crate::support::sizes::{
    Size, as_vector, axis_positions, divide_sizes, dtype_of, multiply_sizes, reshape_to, shape_of, size_of,
};

const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const MASK: usize = 3;
const PAST_KEY: usize = 4;
const PAST_VALUE: usize = 5;
const NONPAD_KV_SEQLEN: usize = 6;

/// Stage of the computation that is returned as `qk_matmul_output`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum QkOutputStage {
    Products,
    Capped,
    Masked,
    Weights,
}

/// Attributes of `Attention` of ONNX.
struct Attention {
    causal: bool,
    heads: [Option<i64>; 2],
    scale: Option<f64>,
    softcap: Option<f64>,
    precision: Option<DType>,
    qk_output: QkOutputStage,
    window: [Option<i64>; 2],
}

impl Attention {
    fn read(node: &Node) -> Result<Attention, OpError> {
        let attrs = &node.attrs;
        let heads = |name: &str| match attrs.int(name)? {
            // Exporters write 0 if the shapes contain the number of heads.
            None | Some(0) => Ok(None),
            Some(count) if count > 0 => Ok(Some(count)),
            Some(count) => Err(OpError::invalid(format!("{name} must be positive, got {count}"))),
        };
        let window = |name: &str| match attrs.int(name)?.unwrap_or(-1) {
            -1 => Ok(None),
            size if size >= 0 => Ok(Some(size)),
            size => Err(OpError::invalid(format!("{name} must be at least 0, or -1 (no limit), got {size}"))),
        };
        let precision = attrs.int("softmax_precision")?.filter(|&number| number != 0);
        let precision = precision
            .map(|number| {
                let dtype = i32::try_from(number).ok().and_then(DType::from_onnx).filter(|dtype| dtype.is_float());
                dtype.ok_or_else(|| {
                    OpError::invalid(format!(
                        "softmax_precision must be 1 (FLOAT), 10 (FLOAT16), 11 (DOUBLE) or 16 (BFLOAT16), got {number}"
                    ))
                })
            })
            .transpose()?;
        let shown = match attrs.int("qk_matmul_output_mode")?.unwrap_or(0) {
            0 => QkOutputStage::Products,
            1 => QkOutputStage::Capped,
            2 => QkOutputStage::Masked,
            3 => QkOutputStage::Weights,
            mode => {
                return Err(OpError::invalid(format!(
                    "qk_matmul_output_mode must be from 0 to 3, got {mode}"
                )));
            }
        };
        Ok(Attention {
            causal: attrs.int("is_causal")?.unwrap_or(0) != 0,
            heads: [heads("q_num_heads")?, heads("kv_num_heads")?],
            scale: attrs.float("scale")?.map(f64::from),
            softcap: attrs.float("softcap")?.map(f64::from).filter(|&cap| cap > 0.0),
            precision,
            qk_output: shown,
            window: [window("left_window_size")?, window("right_window_size")?],
        })
    }

    /// Returns the attribute with the head count of input `k`: its name and value.
    fn head_count_attribute(&self, k: usize) -> (&'static str, Option<i64>) {
        if k == Q { ("q_num_heads", self.heads[0]) } else { ("kv_num_heads", self.heads[1]) }
    }

    /// Returns batch, head count, length and head size of input `k` of this shape.
    fn dims(&self, k: usize, shape: &Shape) -> Result<[Option<Dim>; 4], OpError> {
        let (name, declared) = self.head_count_attribute(k);
        match &shape[..] {
            [batch, heads, length, size] => {
                if let (Some(expected), Some(found)) = (declared, heads.known())
                    && expected != found as i64
                {
                    return Err(OpError::invalid(format!(
                        "input {k} has shape {shape} with {found} heads, but {name} is {expected}"
                    )));
                }
                Ok([batch, heads, length, size].map(|dim| Some(dim.clone())))
            }
            [batch, length, width] => {
                let heads = declared.ok_or_else(|| {
                    OpError::invalid(format!(
                        "input {k} has shape {shape}; an input with three axes needs {name}"
                    ))
                })? as usize;
                let size = match width.known() {
                    Some(width) if width % heads != 0 => {
                        return Err(OpError::invalid(format!(
                            "the last axis of input {k}, of shape {shape}, cannot be divided into {heads} heads"
                        )));
                    }
                    width => width.map(|width| Dim::Known(width / heads)),
                };
                Ok([Some(batch.clone()), Some(Dim::Known(heads)), Some(length.clone()), size])
            }
            _ => Err(OpError::invalid(format!("input {k} has shape {shape}; three or four axes are needed"))),
        }
    }
}

impl Op for Attention {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 7, 4)?;
        let float = |dtype: DType| dtype.is_float();
        let dtype = cx.expect_dtype(Q, "a float type", float)?;
        let of_values = cx.expect_dtype(V, "a float type", float)?;
        cx.expect_same_dtype([Q, K, PAST_KEY])?;
        cx.expect_same_dtype([V, PAST_VALUE])?;
        if cx.has_input(NONPAD_KV_SEQLEN) {
            cx.expect_dtype(NONPAD_KV_SEQLEN, "int64", |dtype| dtype == DType::I64)?;
        }
        check_presence(cx)?;
        let rank = cx.shape(Q).map(Shape::rank);
        let unknown = [const { None }; 4];
        let dims =
            |cx: &Infer<'_>, k: usize| cx.shape(k).map_or(Ok(unknown.clone()), |shape| self.dims(k, shape));
        let (q, k, v) = (dims(cx, Q)?, dims(cx, K)?, dims(cx, V)?);
        check_sizes(cx, &q, &k, &v)?;
        let total = |cx: &Infer<'_>, output: usize, axis: usize| match (
            cx.has_input(PAST_KEY),
            cx.shape(PAST_KEY),
            &k[2],
        ) {
            (false, _, length) => length.clone(),
            (true, Some(past), Some(length)) => match (past[2].known(), length.known()) {
                (Some(past), Some(length)) => Some(Dim::Known(past.saturating_add(length))),
                _ => Some(cx.unknown_dim(output, axis)),
            },
            _ => Some(cx.unknown_dim(output, axis)),
        };
        if let Some(mask) = cx.shape(MASK) {
            let keys = total(cx, 0, 3).filter(|dim| dim.known().is_some());
            check_mask(MASK, mask, &[q[0].clone(), q[1].clone(), q[2].clone(), keys])?;
        }
        let known = rank.is_some() && cx.shape(K).is_some() && cx.shape(V).is_some();
        let shape = |cx: &Infer<'_>, output: usize, dims: [Option<Dim>; 4]| -> Option<Shape> {
            let open =
                |(axis, dim): (usize, Option<Dim>)| dim.unwrap_or_else(|| cx.unknown_dim(output, axis));
            known.then(|| dims.into_iter().enumerate().map(open).collect())
        };
        let result = if rank == Some(3) {
            let width = match (q[1].as_ref().and_then(Dim::known), v[3].as_ref().and_then(Dim::known)) {
                (Some(heads), Some(size)) => Dim::Known(heads.saturating_mul(size)),
                _ => cx.unknown_dim(0, 2),
            };
            match (q[0].clone(), q[2].clone()) {
                (Some(batch), Some(length)) => Some([batch, length, width].into_iter().collect()),
                _ => None,
            }
        } else {
            shape(cx, 0, [q[0].clone(), q[1].clone(), q[2].clone(), v[3].clone()])
        };
        cx.set_output(0, dtype, result);
        for (output, dtype, new) in [(1, dtype, &k), (2, of_values, &v)] {
            let dims = [new[0].clone(), new[1].clone(), total(cx, output, 2), new[3].clone()];
            let present = shape(cx, output, dims);
            cx.set_output(output, dtype, present);
        }
        let keys = total(cx, 3, 3);
        let products = shape(cx, 3, [q[0].clone(), q[1].clone(), q[2].clone(), keys]);
        cx.set_output(3, dtype, products);
        Ok(())
    }
}

/// Checks which inputs are present, and that queries, keys and values have the same number of axes.
fn check_presence(cx: &Infer<'_>) -> Result<(), OpError> {
    if cx.has_input(PAST_KEY) != cx.has_input(PAST_VALUE) {
        return Err(OpError::invalid("past_key and past_value must both be present or both be absent"));
    }
    if cx.has_input(PAST_KEY) && cx.has_input(NONPAD_KV_SEQLEN) {
        return Err(OpError::invalid(
            "nonpad_kv_seqlen is for keys that include the past; it cannot be combined with past_key",
        ));
    }
    for other in [K, V] {
        if let (Some(rank), Some(other_shape)) = (cx.shape(Q).map(Shape::rank), cx.shape(other))
            && other_shape.rank() != rank
        {
            return Err(OpError::invalid(format!(
                "input {other} has shape {other_shape}, but the queries have {rank} axes"
            )));
        }
    }
    Ok(())
}

/// Sizes of queries, keys or values: batch, heads, length, head size.
type HeadSizes = [Option<Dim>; 4];

/// Checks that the known sizes of queries, keys, values and the past fit together.
fn check_sizes(cx: &Infer<'_>, q: &HeadSizes, k: &HeadSizes, v: &HeadSizes) -> Result<(), OpError> {
    for (what, a, b) in [
        ("batches", &q[0], &k[0]),
        ("batches", &q[0], &v[0]),
        ("numbers of heads", &k[1], &v[1]),
        ("lengths", &k[2], &v[2]),
    ] {
        if sizes_differ(a.as_ref(), b.as_ref()) {
            let [a, b] = [a, b].map(|dim| dim.as_ref().map_or(String::new(), ToString::to_string));
            return Err(OpError::invalid(format!("{what} of queries, keys and values differ: {a} and {b}")));
        }
    }
    if sizes_differ(q[3].as_ref(), k[3].as_ref()) {
        return Err(OpError::invalid(format!(
            "the queries have head size {}, but the keys {}",
            q[3].as_ref().map_or(0, |dim| dim.known().unwrap_or(0)),
            k[3].as_ref().map_or(0, |dim| dim.known().unwrap_or(0)),
        )));
    }
    if let (Some(of_queries), Some(of_keys)) =
        (q[1].as_ref().and_then(Dim::known), k[1].as_ref().and_then(Dim::known))
        && (of_keys == 0 || of_queries % of_keys != 0)
    {
        return Err(OpError::invalid(format!(
            "the number of query heads, {of_queries}, must be a multiple of the number of key heads, {of_keys}"
        )));
    }
    for (past, new) in [(PAST_KEY, k), (PAST_VALUE, v)] {
        let Some(shape) = cx.shape(past) else { continue };
        let fits = shape.rank() == 4
            && [0, 1, 3].iter().all(|&axis| !sizes_differ(Some(&shape[axis]), new[axis].as_ref()));
        if !fits {
            let text = |dim: &Option<Dim>| dim.as_ref().map_or("?".into(), ToString::to_string);
            return Err(OpError::invalid(format!(
                "input {past} has shape {shape}, but [{}, {}, length, {}] is needed",
                text(&new[0]),
                text(&new[1]),
                text(&new[3])
            )));
        }
    }
    let batch = q[0].as_ref().and_then(Dim::known);
    if let Some(filled) = cx.shape(NONPAD_KV_SEQLEN)
        && (filled.rank() != 1 || sizes_differ(filled.first(), q[0].as_ref()))
    {
        let expected = batch.map_or("batch".to_owned(), |batch| batch.to_string());
        return Err(OpError::invalid(format!(
            "nonpad_kv_seqlen has shape {filled}, but [{expected}] is needed"
        )));
    }
    Ok(())
}

/// Returns input `k`, split into heads. `alike` is another input with its heads. Sizes that are equal to its sizes are
/// reused.
fn read_heads(
    rw: &mut Rewrite<'_>,
    op: &Attention,
    k: usize,
    alike: Option<(usize, Heads)>,
) -> Result<Heads, OpError> {
    let value = rw.required_input(k)?;
    let shape = shape_of(rw, value, &format!("input {k}"))?;
    // Returns a size of the other input if both inputs have the same number or symbol there.
    let known_by = |rw: &Rewrite<'_>, axis: usize| {
        let (other, heads) = alike?;
        let other = rw.input(other).and_then(|id| rw.shape(id))?;
        let size = [None, Some(heads.heads), Some(heads.length), Some(heads.size)][axis];
        (other.get(axis) == shape.get(axis) && other.rank() == 4).then_some(size).flatten()
    };
    if shape.rank() == 4 {
        let [heads, length, size] = [1, 2, 3].map(|axis| match known_by(rw, axis) {
            Some(size) => size,
            None => size_of(rw, value, axis),
        });
        return Ok(Heads { value, heads, length, size });
    }
    let (name, declared) = op.head_count_attribute(k);
    let heads = declared.map(Size::Number).ok_or_else(|| OpError::invalid(format!("{name} is missing")))?;
    let (length, width) = (size_of(rw, value, 1), size_of(rw, value, 2));
    let size = divide_sizes(rw, width, heads);
    Ok(Heads::split(rw, value, heads, length, size))
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = Attention::read(rw.node())?;
    let (q_input, k_input) = (rw.required_input(Q)?, rw.required_input(K)?);
    let dtype = dtype_of(rw, q_input, "the queries")?;
    let of_values = dtype_of(rw, rw.required_input(V)?, "the values")?;
    let flat = shape_of(rw, q_input, "the queries")?.rank() == 3;
    let queries = read_heads(rw, &op, Q, None)?;
    let mut keys = read_heads(rw, &op, K, Some((Q, queries)))?;
    let mut values = read_heads(rw, &op, V, Some((K, keys)))?;
    let mut offset = Offset::Size(Size::Number(0));
    if let (Some(past_key), Some(past_value)) = (rw.input(PAST_KEY), rw.input(PAST_VALUE)) {
        let length = size_of(rw, past_key, 2);
        keys = keys.append_to_past(rw, past_key, length);
        values = values.append_to_past(rw, past_value, length);
        offset = Offset::Size(length);
    }
    rw.replace_output(1, keys.value);
    rw.replace_output(2, values.value);
    values.value = cast(rw.patch().1, values.value, of_values, dtype);

    let mut hidden = None;
    let mut added = Vec::new();
    if let Some(mask) = rw.input(MASK) {
        let rank = shape_of(rw, mask, "the mask")?.rank();
        if rank == 0 {
            return Err(OpError::invalid("the mask must have an axis for the keys, got a scalar"));
        }
        let of_mask = dtype_of(rw, mask, "the mask")?;
        let kind = if of_mask == DType::Bool { DType::Bool } else { dtype };
        let mut value = cast(rw.patch().1, mask, of_mask, kind);
        let fits = rw.input(PAST_KEY).is_none()
            && same_size(rw, (mask, rank - 1), (k_input, if flat { 1 } else { 2 }));
        if !fits {
            let length = size_of(rw, mask, rank - 1);
            value = pad_mask(rw, value, (rank, length), kind, keys.length);
        }
        if kind == DType::Bool {
            hidden = Some(rw.add("Not", &[value], Attrs::new()));
        } else {
            added.push(value);
        }
    }
    let filled = rw.input(NONPAD_KV_SEQLEN).map(|filled| {
        let every = [Size::Number(-1), Size::Number(1), Size::Number(1), Size::Number(1)];
        reshape_to(rw, filled, &every)
    });
    let right = if op.causal { Some(0) } else { op.window[1] };
    let window = Window { left: op.window[0], right };
    if let Some(filled) = filled {
        if window.left.is_some() || window.right.is_some() {
            let count = as_vector(rw, queries.length);
            offset = Offset::PerBatchItem(rw.add("Sub", &[filled, count], Attrs::new()));
        }
        let columns = axis_positions(rw, keys.length);
        let inside = rw.add("Less", &[columns, filled], Attrs::new());
        let after_end = rw.add("Not", &[inside], Attrs::new());
        hidden = or_conditions(rw, hidden, Some(after_end));
    }
    // A query with only the causal mask sees at least the first key.
    let may_be_blind = rw.input(MASK).is_some() || filled.is_some() || window.left.is_some();
    let outside = window.outside_mask(rw, queries.length, keys.length, offset);
    hidden = or_conditions(rw, hidden, outside);

    let scale = op.scale.map_or(Scale::InverseSqrt(queries.size), Scale::Factor);
    let scores = ScaledDotProduct {
        dtype,
        queries,
        keys,
        values,
        scale,
        scale_both: true,
        softcap: op.softcap,
        added,
        hidden,
        may_hide_all_keys: may_be_blind,
        precision: op.precision,
        sink: None,
    };
    let results = scores.build(rw);
    let shown = match op.qk_output {
        QkOutputStage::Products => results.products,
        QkOutputStage::Capped => results.capped,
        QkOutputStage::Masked => results.masked,
        QkOutputStage::Weights => results.weights,
    };
    rw.replace_output(3, shown);
    let result = if flat {
        let width = multiply_sizes(rw, queries.heads, values.size);
        merge_heads(rw, results.result, width)
    } else {
        results.result
    };
    rw.replace_output(0, result);
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Attention::read(node)?))
}

/// Decomposes the operator for opsets before 23, before 24 with `nonpad_kv_seqlen`, and before 25 with windows.
fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = Attention::read(rw.node())?;
    let min_opset = if op.window != [None, None] {
        25
    } else if rw.input(NONPAD_KV_SEQLEN).is_some() {
        24
    } else {
        23
    };
    if rw.version() < min_opset { decompose(rw) } else { Ok(()) }
}

pub(crate) fn definitions() -> Vec<Definition> {
    let mut definitions = vec![
        Definition::new("", ATTENTION, &[23, 24, 25], build).composition(decompose).downgrade(downgrade),
    ];
    definitions.extend(microsoft::definitions());
    definitions.extend(grouped_query::definitions());
    definitions.extend(decoding::definitions());
    definitions.extend(quantized::definitions());
    definitions.extend(sparse::definitions());
    definitions
}

#[cfg(test)]
mod tests;
