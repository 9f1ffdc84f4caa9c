//! `Slice` and ONNX Runtime's `SliceGrad`.
//!
//! Sources: ONNX Slice-1 (attributes), 10, 11, 13 (inputs: starts, ends, axes?, steps?); `com.microsoft` SliceGrad-1.
//! Negative starts and ends count from the end; both are clamped. Steps may be negative. The bounds must be known when
//! a program is built: they come from constants and shapes, or from graph inputs that determine a shape.

use ortrain_expr::{Access, Strides};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor};

use crate::OpError;
use crate::class::Traits;
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axis};
use crate::lower::Lower;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::rows::emit_fill;

/// Start, step and number of elements along one axis of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    start: usize,
    step: isize,
    count: usize,
}

/// Start, end and step of an axis as in the node; `None` if the axis is not sliced.
type AxisBounds = Option<(i64, i64, i64)>;

/// Bounds as in the node.
struct Bounds {
    starts: Vec<i64>,
    ends: Vec<i64>,
    axes: Option<Vec<i64>>,
    steps: Option<Vec<i64>>,
}

impl Bounds {
    /// Returns start, end and step of each sliced axis, for a tensor of rank `rank`.
    fn per_axis(&self, rank: usize) -> Result<Vec<AxisBounds>, OpError> {
        let count = self.starts.len();
        let fits = |list: &Option<Vec<i64>>| list.as_ref().is_none_or(|list| list.len() == count);
        if self.ends.len() != count || !fits(&self.axes) || !fits(&self.steps) {
            return Err(OpError::invalid("starts, ends, axes and steps differ in length"));
        }
        let mut axis_bounds = vec![None; rank];
        for k in 0..count {
            let axis = normalize_axis(self.axes.as_ref().map_or(k as i64, |axes| axes[k]), rank)?;
            let step = self.steps.as_ref().map_or(1, |steps| steps[k]);
            if step == 0 {
                return Err(OpError::invalid("steps must not be 0"));
            }
            if axis_bounds[axis].is_some() {
                return Err(OpError::invalid(format!("axis {axis} occurs twice in axes")));
            }
            axis_bounds[axis] = Some((self.starts[k], self.ends[k], step));
        }
        Ok(axis_bounds)
    }
}

fn axis_span(size: usize, (start, end, step): (i64, i64, i64)) -> Span {
    let size = size as i64;
    let from_front = |at: i64| if at < 0 { at.saturating_add(size) } else { at };
    let (low, high) = if step > 0 { (0, size) } else { (-1, size - 1) };
    let start = from_front(start).clamp(low.max(0), high.max(0));
    let end = from_front(end).clamp(low, high);
    let distance = if step > 0 { end - start } else { start - end };
    let count = if size == 0 || distance <= 0 { 0 } else { (distance as u64 - 1) / step.unsigned_abs() + 1 };
    Span { start: start.max(0) as usize, step: step as isize, count: count as usize }
}

fn axis_spans(dims: &[usize], bounds: &Bounds) -> Result<Vec<Span>, OpError> {
    let bounds_of_axes = bounds.per_axis(dims.len())?;
    let full_span = |size: usize| Span { start: 0, step: 1, count: size };
    Ok(dims
        .iter()
        .zip(bounds_of_axes)
        .map(|(&size, axis_bounds)| axis_bounds.map_or(full_span(size), |bound| axis_span(size, bound)))
        .collect())
}

/// Returns offset and strides of a slice in a row-major tensor.
fn offset_and_strides(dims: &[usize], spans: &[Span]) -> (usize, Strides) {
    let strides_of_input = Access::contiguous(DType::U8, dims).strides;
    let offset =
        spans.iter().zip(&strides_of_input).map(|(span, &stride)| span.start * stride as usize).sum();
    // With one element or none, the stride is not used.
    let strides = spans
        .iter()
        .zip(&strides_of_input)
        .map(|(s, &stride)| if s.count > 1 { stride * s.step } else { 0 })
        .collect();
    (offset, strides)
}

/// Returns the bounds, if they are known. The inputs `first..` of the node are starts, ends, axes and steps.
fn known_bounds(
    ints: impl Fn(usize) -> Option<Vec<i64>>,
    has: impl Fn(usize) -> bool,
    first: usize,
) -> Option<Bounds> {
    let optional = |k: usize| if has(k) { ints(k).map(Some) } else { Some(None) };
    Some(Bounds {
        starts: ints(first)?,
        ends: ints(first + 1)?,
        axes: optional(first + 2)?,
        steps: optional(first + 3)?,
    })
}

fn check_bound_types(cx: &Infer<'_>, first: usize) -> Result<(), OpError> {
    for k in first..first + 4 {
        if cx.has_input(k) {
            cx.expect_dtype(k, "int32 or int64", |dtype| matches!(dtype, DType::I32 | DType::I64))?;
        }
    }
    Ok(())
}

/// Part of a tensor.
struct Slice;

impl Op for Slice {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 5, 1)?;
        let dtype = cx.dtype(0)?;
        check_bound_types(cx, 1)?;
        let Some(shape) = cx.shape(0) else {
            cx.set_output(0, dtype, None);
            return Ok(());
        };
        let Some(bounds) = known_bounds(|k| cx.ints(k), |k| cx.has_input(k), 1) else {
            let axes = if cx.has_input(3) { cx.ints(3) } else { None };
            let dims = (0..shape.rank()).map(|axis| match &axes {
                Some(axes)
                    if !axes.iter().any(|&a| normalize_axis(a, shape.rank()).is_ok_and(|a| a == axis)) =>
                {
                    shape[axis].clone()
                }
                _ => cx.unknown_dim(0, axis),
            });
            let dims = dims.collect();
            cx.set_output(0, dtype, Some(dims));
            return Ok(());
        };
        let axis_bounds = bounds.per_axis(shape.rank())?;
        let dims: Shape = (0..shape.rank())
            .map(|axis| match (axis_bounds[axis], &shape[axis]) {
                (None | Some((0, i64::MAX.., 1)), dim) => dim.clone(),
                (Some(cut), Dim::Known(size)) => Dim::Known(axis_span(*size, cut).count),
                (Some(_), Dim::Symbol(_)) => cx.unknown_dim(0, axis),
            })
            .collect();
        cx.set_output(0, dtype, Some(dims));
        if let (1, DType::I64, Some(sizes)) = (shape.rank(), dtype, cx.sizes(0)) {
            let Span { start, step, count } = axis_spans(&[sizes.len()], &bounds)?[0];
            let at = |k: usize| (start as isize + k as isize * step) as usize;
            cx.set_output_sizes(0, Some((0..count).map(|k| sizes[at(k)].clone()).collect()));
        }
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        if cx.needs_grad(0) {
            let x = cx.input(0)?;
            let shape = cx.shape_of(x);
            let mut inputs = vec![Some(g), Some(shape)];
            inputs.extend((1..cx.node().inputs.len()).map(|k| cx.optional_input(k)));
            let gradient = cx.add_node("com.microsoft", "SliceGrad", &inputs, 1, Attrs::new())[0];
            cx.set_grad(0, gradient);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.dims(0);
        let bounds = constant_bounds(cx, 1)?;
        let (offset, strides) = offset_and_strides(&dims, &axis_spans(&dims, &bounds)?);
        let out_dims = cx.out_dims(0);
        let output = cx.output(0);
        if out_dims.contains(&0) {
            return Ok(());
        }
        let buffer = cx.input(0);
        let mut nest = cx.nest(&out_dims, 0);
        let value = nest.load_strided(cx, buffer, offset, &strides);
        nest.store_contiguous(cx, output, value);
        cx.emit(nest.instruction())
    }
}

fn constant_bounds(cx: &Lower<'_>, first: usize) -> Result<Bounds, OpError> {
    let ints = |k: usize| cx.constant(k).and_then(Tensor::to_i64);
    known_bounds(ints, |k| cx.has_input(k), first)
        .ok_or_else(|| OpError::unsupported("the bounds must be known before compilation"))
}

/// Zeros of a shape, with a gradient written at the position of a slice.
struct SliceGrad;

impl Op for SliceGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(4, 6, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        cx.expect_dtype(1, "int64", |dtype| dtype == DType::I64)?;
        check_bound_types(cx, 2)?;
        let shape = match cx.sizes(1) {
            Some(sizes) => Some(sizes.into_iter().collect()),
            None => cx.shape(0).map(|shape| cx.unknown_shape(0, shape.rank())),
        };
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (dims, part) = (cx.out_dims(0), cx.dims(0));
        let bounds = constant_bounds(cx, 2)?;
        let spans = axis_spans(&dims, &bounds)?;
        let counts: Vec<usize> = spans.iter().map(|span| span.count).collect();
        if counts != part {
            return Err(OpError::invalid(format!(
                "the gradient has shape {part:?}, but the slice of {dims:?} has shape {counts:?}"
            )));
        }
        let output = cx.output(0);
        emit_fill(cx, output, 0.0)?;
        if part.contains(&0) {
            return Ok(());
        }
        let (offset, strides) = offset_and_strides(&dims, &spans);
        let buffer = cx.input(0);
        let mut nest = cx.nest(&part, 0);
        let value = nest.load_broadcast(buffer, cx.dtype(0), &part);
        nest.store_strided(cx, output, offset, strides, value);
        cx.emit(nest.instruction())
    }
}

/// Converts the attributes of opsets before 10 to inputs.
fn upgrade_slice(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() >= 10 {
        return Ok(());
    }
    let mut inputs = vec![Some(rw.required_input(0)?)];
    for name in ["starts", "ends", "axes"] {
        match rw.attrs().ints(name)?.map(<[i64]>::to_vec) {
            Some(values) => inputs.push(Some(rw.ints(name, &values))),
            None if name == "axes" => {}
            None => return Err(OpError::invalid(format!("attribute {name:?} is missing"))),
        }
    }
    rw.emit_same_op(&inputs, Attrs::new());
    Ok(())
}

fn downgrade_slice(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() >= 10 {
        return Ok(());
    }
    let mut attrs = Attrs::new();
    for (k, name) in [(1, "starts"), (2, "ends"), (3, "axes"), (4, "steps")] {
        let Some(id) = rw.input(k) else { continue };
        let values = rw.constant_of(id).and_then(Tensor::to_i64).ok_or_else(|| {
            OpError::unsupported(format!("{name} is computed at run time, which needs opset 10 or newer"))
        })?;
        if k < 4 {
            attrs = attrs.with(name, values);
        } else if values.iter().any(|&step| step != 1) {
            return Err(OpError::unsupported("steps other than 1 need opset 10 or newer"));
        }
    }
    rw.emit_same_op(&[rw.input(0)], attrs);
    Ok(())
}

/// Writes the gradient into zeros with ScatterElements. The positions are a slice of a tensor that contains its own
/// positions.
fn decompose_slice_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (g, shape) = (rw.required_input(0)?, rw.required_input(1)?);
    let dtype = rw.dtype(g).ok_or_else(|| OpError::invalid("the type of the gradient is not known"))?;
    if rw.version() < SCATTER_SINCE
        && let Some(pads) = restoring_padding(rw)
    {
        let pads = rw.ints("pads", &pads);
        let zero = rw.constant("zero", Tensor::scalar(dtype, 0.0));
        let padded = rw.add("Pad", &[g, pads, zero], Attrs::new());
        rw.replace_output(0, padded);
        return Ok(());
    }
    let flat = rw.ints("flat", &[-1]);
    let value = Tensor::filled(dtype, &[1], 0.0);
    let zeros = rw.add("ConstantOfShape", &[shape], Attrs::new().with("value", value));
    let zeros = rw.add("Reshape", &[zeros, flat], Attrs::new());
    let count = rw.add("Shape", &[zeros], Attrs::new());
    let positions = rw.count_up(count);
    let positions = rw.add("Reshape", &[positions, shape], Attrs::new().with("allowzero", 1i64));
    let mut inputs = vec![Some(positions)];
    inputs.extend((2..rw.node().inputs.len()).map(|k| rw.input(k)));
    let sliced = rw.add_node("", "Slice", &inputs, 1, Attrs::new())[0];
    let flat_positions = rw.add("Reshape", &[sliced, flat], Attrs::new());
    let updates = rw.add("Reshape", &[g, flat], Attrs::new());
    let written =
        rw.add("ScatterElements", &[zeros, flat_positions, updates], Attrs::new().with("axis", 0i64));
    let result = rw.add("Reshape", &[written, shape], Attrs::new().with("allowzero", 1i64));
    rw.replace_output(0, result);
    Ok(())
}

/// First opset with an operator that writes at positions.
const SCATTER_SINCE: i64 = 9;

/// Returns the padding that restores a slice with step 1 from axes of known sizes: before each axis, then after each
/// axis.
fn restoring_padding(rw: &Rewrite<'_>) -> Option<Vec<i64>> {
    let ints = |k: usize| rw.input(k).and_then(|id| rw.constant_of(id)).and_then(Tensor::to_i64);
    let sizes: Vec<Option<i64>> = {
        let output = rw.node().present_outputs().next()?;
        rw.shape(output)?.iter().map(|dim| dim.known().map(|size| size as i64)).collect()
    };
    let rank = sizes.len();
    let (starts, ends) = (ints(2)?, ints(3)?);
    let axes = if rw.input(4).is_some() { ints(4)? } else { (0..starts.len() as i64).collect() };
    let steps = if rw.input(5).is_some() { ints(5)? } else { vec![1; starts.len()] };
    let mut pads = vec![0; 2 * rank];
    for (((&start, &end), &axis), &step) in starts.iter().zip(&ends).zip(&axes).zip(&steps) {
        let axis = normalize_axis(axis, rank).ok()?;
        let size = sizes[axis]?;
        let bounded = |at: i64| if at < 0 { at.saturating_add(size).max(0) } else { at.min(size) };
        if step != 1 {
            return None;
        }
        pads[axis] = bounded(start);
        pads[axis + rank] = size - bounded(end).max(bounded(start));
    }
    Some(pads)
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(if &*node.op == "Slice" { Box::new(Slice) } else { Box::new(SliceGrad) })
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "Slice", &[1, 10, 11, 13], build)
            .traits(Traits::MOVES.and(Traits::TAKES_PARTS))
            .inputs_without_gradient(&[1, 2, 3, 4])
            .upgrade(upgrade_slice)
            .downgrade(downgrade_slice),
        Definition::new("com.microsoft", "SliceGrad", &[1], build).differentiated_as(decompose_slice_grad),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::ValueType;

    use super::*;
    use crate::passes::infer::infer;
    use crate::testing::{add, check_decomposed_gradients, generic_tensor, graph};

    /// Without an operator that writes at positions, the slice is padded with zeros.
    #[test]
    fn gradients_by_padding() {
        let x = generic_tensor(&[5, 3], 1);
        for (starts, ends) in [([1, 0], [4, 3]), ([-4, 1], [-1, 9]), ([3, -9], [2, -1])] {
            let (mut part, ids) = graph(&[&x]);
            let starts = part.add_constant("starts", Tensor::i64(&[2], &starts));
            let ends = part.add_constant("ends", Tensor::i64(&[2], &ends));
            let axes = part.add_constant("axes", Tensor::i64(&[2], &[0, -1]));
            let ports = [Some(ids[0]), Some(starts), Some(ends), Some(axes)];
            add(&mut part, ("", "Slice"), "y", &ports, 1, Attrs::new());
            infer(&mut part).expect("valid");
            for opset in [15, 9, 8, 7] {
                check_decomposed_gradients(&part, std::slice::from_ref(&x), &[0], opset);
            }
        }
    }

    /// Bounds in Constant nodes, as PyTorch's exporter writes them, including -1.
    #[test]
    fn bounds_of_constant_nodes_are_known() {
        let x = generic_tensor(&[5, 3], 1);
        let (mut part, ids) = graph(&[&x]);
        let mut ports = vec![Some(ids[0])];
        for (name, value) in [("starts", -4), ("ends", -1), ("axes", -2), ("steps", 2)] {
            let value = Attrs::new().with("value", Tensor::i64(&[1], &[value]));
            ports.push(Some(add(&mut part, ("", "Constant"), name, &[], 1, value)[0]));
        }
        part.outputs.clear();
        let y = add(&mut part, ("", "Slice"), "y", &ports, 1, Attrs::new())[0];
        infer(&mut part).expect("valid");
        assert_eq!(part.value(y).ty, ValueType::tensor(DType::F64, &[2, 3]));
        // A node computes them: they are not initializers.
        assert!(part.to_proto().initializer.is_empty());
    }

    /// The results of Python's slicing for the same bounds.
    #[test]
    fn spans_match_python_slicing() {
        let cases = [
            ((5, 0, 5, 1), (0, 5)),
            ((5, 1, 4, 2), (1, 2)),
            ((5, -3, 100, 1), (2, 3)),
            ((5, 4, i64::MIN, -1), (4, 5)),
            ((5, 100, 0, -2), (4, 2)),
            ((5, 3, 1, 1), (3, 0)),
            ((5, 0, 5, i64::MAX), (0, 1)),
            ((5, -1, -6, -4), (4, 2)),
            ((0, 0, 10, 1), (0, 0)),
        ];
        for ((size, start, end, step), (first, count)) in cases {
            let span = axis_span(size, (start, end, step));
            assert_eq!(span.count, count, "{size}[{start}:{end}:{step}]");
            if count > 0 {
                assert_eq!(span.start, first, "{size}[{start}:{end}:{step}]");
            }
        }
    }
}
