//! `Pad`: adds elements at the ends of axes, or removes them.
//!
//! Pad-2, 11, 13, 18, 19, 21, 23, 24, 25 of ONNX, with the modes `constant`, `reflect`, `edge` and `wrap` (19). Before
//! opset 11 pads and constant are attributes, afterwards inputs. Opset 18 added the input `axes`.
//!
//! Negative pads remove elements, before any element is copied. `reflect` cannot copy more elements than the axis has.
//! Pads and axes must be known when a program is compiled.
//!
//! The gradient of the constant mode is a Pad with negated pads; the gradient of the constant is the sum over the
//! border. In the other modes each padded axis is a gather, with `GatherGrad` of `com.microsoft` as gradient: gradients
//! of copies are added.

use ortrain_expr::{Access, Inst, Scalar, Strides, Type};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};

use crate::OpError;
use crate::axis_map::{AxisMap, MAX_TAPS, apply_axis_maps};
use crate::class::{Class, Traits};
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axis};
use crate::lower::{Lower, NestBuilder};
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;

const PADS: usize = 1;
const VALUE: usize = 2;
const AXES: usize = 3;

/// Padding of one axis by copies: its size, the number of removed elements in front, the number of remaining elements,
/// and the numbers of copies before and after them.
struct AxisCopies {
    size: usize,
    removed_front: usize,
    remaining: i64,
    before: i64,
    after: i64,
}

/// Source of the border elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Constant,
    Reflect,
    Edge,
    Wrap,
}

/// Pads of one axis: the numbers of elements before and after.
type AxisPads = (i64, i64);

struct Pad {
    mode: Mode,
    /// Constant, if it is an attribute.
    value: Option<f32>,
}

/// Returns the pads of every axis, from the pads and axes of the node.
fn pads_per_axis(pads: &[i64], axes: Option<&[i64]>, rank: usize) -> Result<Vec<AxisPads>, OpError> {
    let count = axes.map_or(rank, <[i64]>::len);
    if pads.len() != 2 * count {
        return Err(OpError::invalid(format!(
            "got {} pads for {count} axes, expected {} (one before and one after each axis)",
            pads.len(),
            2 * count
        )));
    }
    let mut ends = vec![None; rank];
    for k in 0..count {
        let axis = axes.map_or(Ok(k), |axes| normalize_axis(axes[k], rank))?;
        if ends[axis].replace((pads[k], pads[count + k])).is_some() {
            return Err(OpError::invalid(format!("axis {axis} is padded twice")));
        }
    }
    Ok(ends.into_iter().map(|ends| ends.unwrap_or((0, 0))).collect())
}

/// Returns the size of an axis with its pads.
fn padded_size(size: usize, (before, after): AxisPads, axis: usize) -> Result<usize, OpError> {
    let total = size as i128 + i128::from(before) + i128::from(after);
    if total < 0 {
        return Err(OpError::invalid(format!(
            "pads {before} and {after} remove more than the {size} elements of axis {axis}"
        )));
    }
    let message =
        || OpError::invalid(format!("pads {before} and {after} make axis {axis} too long to count"));
    usize::try_from(total).ok().filter(|&total| isize::try_from(total).is_ok()).ok_or_else(message)
}

impl Mode {
    /// Computes the padding of an axis by copies of its elements.
    fn axis_copies(self, size: usize, ends: AxisPads, axis: usize) -> Result<AxisCopies, OpError> {
        let (before, after) = ends;
        let total = padded_size(size, ends, axis)?;
        if total.max(size) > MAX_TAPS {
            return Err(OpError::unsupported(format!(
                "axis {axis} has {} elements, but this mode supports at most {MAX_TAPS}",
                total.max(size)
            )));
        }
        let (front, back) = (before.min(0).unsigned_abs() as usize, after.min(0).unsigned_abs() as usize);
        let left = size.saturating_sub(front.saturating_add(back)) as i64;
        let (before, after) = (before.max(0), after.max(0));
        let limit = match self {
            Mode::Reflect => (left - 1).max(0),
            _ if left > 0 => i64::MAX,
            _ => 0,
        };
        if before > limit || after > limit {
            let pad = if before > limit { before } else { after };
            return Err(OpError::invalid(format!(
                "mode {:?} pads axis {axis} by {pad} elements, but the axis has only {} elements to copy",
                self.name(),
                limit.min(left)
            )));
        }
        Ok(AxisCopies { size, removed_front: front, remaining: left, before, after })
    }

    /// Returns the index of the copied element for each position of a padded axis.
    fn axis_map(self, copies: &AxisCopies) -> AxisMap {
        let &AxisCopies { size, removed_front: front, remaining: left, before, after } = copies;
        let source = |position: i64| match self {
            Mode::Reflect if position < 0 => -position,
            Mode::Reflect if position >= left => 2 * (left - 1) - position,
            Mode::Wrap => position.rem_euclid(left),
            _ => position.clamp(0, left - 1),
        };
        AxisMap::from_copies(size, (-before..left + after).map(|position| front + source(position) as usize))
    }

    fn name(self) -> &'static str {
        match self {
            Mode::Constant => "constant",
            Mode::Reflect => "reflect",
            Mode::Edge => "edge",
            Mode::Wrap => "wrap",
        }
    }
}

/// Returns pads and axes, if they are known. The axes are `None` if the node has no axes, which means all axes.
fn constant_pads(
    ints: impl Fn(usize) -> Option<Vec<i64>>,
    has: impl Fn(usize) -> bool,
) -> Option<(Vec<i64>, Option<Vec<i64>>)> {
    let axes = if has(AXES) { Some(ints(AXES)?) } else { None };
    Some((ints(PADS)?, axes))
}

impl Op for Pad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 4, 1)?;
        let dtype = cx.expect_same_dtype([0, VALUE])?;
        cx.expect_dtype(PADS, "int64", |dtype| dtype == DType::I64)?;
        if cx.has_input(AXES) {
            cx.expect_dtype(AXES, "int32 or int64", |dtype| matches!(dtype, DType::I32 | DType::I64))?;
        }
        if let Some(shape) = cx.shape(VALUE)
            && (shape.rank() > 1 || shape.iter().any(|dim| dim.known().is_some_and(|size| size != 1)))
        {
            return Err(OpError::invalid(format!("the constant has shape {shape}, expected one element")));
        }
        let Some(shape) = cx.shape(0) else {
            cx.set_output(0, dtype, None);
            return Ok(());
        };
        let Some((pads, axes)) = constant_pads(|k| cx.ints(k), |k| cx.has_input(k)) else {
            let shape = cx.unknown_shape(0, shape.rank());
            cx.set_output(0, dtype, Some(shape));
            return Ok(());
        };
        let ends = pads_per_axis(&pads, axes.as_deref(), shape.rank())?;
        let dims: Result<Shape, OpError> = shape
            .iter()
            .zip(&ends)
            .enumerate()
            .map(|(axis, (dim, &ends))| match dim {
                dim if ends == (0, 0) => Ok(dim.clone()),
                Dim::Known(size) => {
                    if self.mode != Mode::Constant {
                        self.mode.axis_copies(*size, ends, axis)?;
                    }
                    padded_size(*size, ends, axis).map(Dim::Known)
                }
                Dim::Symbol(_) => Ok(cx.unknown_dim(0, axis)),
            })
            .collect();
        cx.set_output(0, dtype, Some(dims?));
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        if cx.needs_grad(0) {
            let gradient = match self.mode {
                Mode::Constant => add_crop(cx, g)?,
                _ => self.gradient_of_copies(cx, g)?,
            };
            cx.set_grad(0, gradient);
        }
        if cx.needs_grad(VALUE) && self.mode == Mode::Constant {
            // Zeros padded with ones mark the border.
            let (x, y) = (cx.input(0)?, cx.output(0, "y"));
            let (pads, axes, value) = (cx.input(PADS)?, cx.optional_input(AXES), cx.input(VALUE)?);
            let dtype = cx.dtype(x)?;
            let shape = cx.shape_of(x);
            let fill = Attrs::new().with("value", Tensor::filled(dtype, &[1], 0.0));
            let zeros = cx.add("ConstantOfShape", &[shape], fill);
            let one = cx.constant("one", Tensor::scalar(dtype, 1.0));
            let zero = cx.constant("zero", Tensor::scalar(dtype, 0.0));
            let mut inputs = vec![Some(zeros), Some(pads), Some(one)];
            inputs.extend(axes.map(Some));
            let marks = cx.add_node("", "Pad", &inputs, 1, Attrs::new())[0];
            let border = cx.add("Greater", &[marks, zero], Attrs::new());
            let parts = cx.add("Where", &[border, g, zero], Attrs::new());
            let gradient = cx.sum_to(parts, value, y)?;
            cx.set_grad(VALUE, gradient);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (dims, out_dims) = (cx.dims(0), cx.out_dims(0));
        if dims.is_empty() {
            cx.alias(0, 0);
            return Ok(());
        }
        let (pads, axes) = constant_pads(|k| cx.constant(k).and_then(Tensor::to_i64), |k| cx.has_input(k))
            .ok_or_else(|| OpError::unsupported("the pads must be known before compilation"))?;
        let ends = pads_per_axis(&pads, axes.as_deref(), dims.len())?;
        if ends.iter().all(|&ends| ends == (0, 0)) {
            cx.alias(0, 0);
            return Ok(());
        }
        if self.mode == Mode::Constant {
            return self.lower_constant(cx, &dims, &out_dims, &ends);
        }
        let mut maps = Vec::new();
        for (axis, &ends) in ends.iter().enumerate() {
            if ends != (0, 0) {
                maps.push((axis, self.mode.axis_map(&self.mode.axis_copies(dims[axis], ends, axis)?)));
            }
        }
        let (input, output) = (cx.input(0), cx.output(0));
        if maps.iter().all(|(_, map)| map.is_identity()) {
            cx.alias(0, 0);
            return Ok(());
        }
        apply_axis_maps(cx, (input, &dims), &maps, output)
    }
}

impl Pad {
    /// Copies the remaining elements and fills the border with the constant.
    ///
    /// The border has two regions for each axis, before and after the copied elements. Along the previous axes a region
    /// has the extent of the copied elements, along the following axes the extent of the result.
    fn lower_constant(
        &self,
        cx: &mut Lower<'_>,
        dims: &[usize],
        out_dims: &[usize],
        ends: &[AxisPads],
    ) -> Result<(), OpError> {
        // Region of the result with copied elements, and its start in the input.
        let (mut first, mut counts, mut source) = (Vec::new(), Vec::new(), Vec::new());
        for ((&size, &out), &(before, _)) in dims.iter().zip(out_dims).zip(ends) {
            let start = (before.max(0) as usize).min(out);
            let end = (size as i128 + i128::from(before)).clamp(start as i128, out as i128) as usize;
            first.push(start);
            counts.push(end - start);
            source.push((start as i128 - i128::from(before)) as usize);
        }
        let output = cx.output(0);
        let out_strides = Access::contiguous(DType::U8, out_dims).strides;
        let offset_of = |at: &[usize], strides: &Strides| -> usize {
            at.iter().zip(strides).map(|(&at, &stride)| at * stride as usize).sum()
        };
        let (mut begin, mut size) = (vec![0; dims.len()], out_dims.to_vec());
        for axis in 0..dims.len() {
            let end = first[axis] + counts[axis];
            for (from, count) in [(0, first[axis]), (end, out_dims[axis] - end)] {
                (begin[axis], size[axis]) = (from, count);
                if size.contains(&0) {
                    continue;
                }
                let mut nest = cx.nest(&size, 0);
                let value = self.load_constant(cx, &mut nest);
                let offset = offset_of(&begin, &out_strides);
                nest.store_strided(cx, output, offset, out_strides.clone(), value);
                cx.emit(nest.instruction())?;
            }
            (begin[axis], size[axis]) = (first[axis], counts[axis]);
        }
        if counts.contains(&0) {
            return Ok(());
        }
        let input = cx.input(0);
        let strides = Access::contiguous(DType::U8, dims).strides;
        let mut nest = cx.nest(&counts, 0);
        let value = nest.load_strided(cx, input, offset_of(&source, &strides), &strides);
        nest.store_strided(cx, output, offset_of(&first, &out_strides), out_strides, value);
        cx.emit(nest.instruction())
    }

    /// Loads the constant in a nest.
    fn load_constant(&self, cx: &mut Lower<'_>, nest: &mut NestBuilder) -> ortrain_expr::Reg {
        let dtype = cx.out_dtype(0);
        let ty = Type::of(dtype);
        if !cx.has_input(VALUE) {
            return nest.b.constant(ty, self.value.map_or(0.0, f64::from));
        }
        let known = cx.constant(VALUE);
        match known.and_then(|tensor| Scalar::read_all(dtype, tensor.data()).pop()) {
            Some(value) => nest.b.push(Inst::Const(value.convert(ty)), ty),
            None => {
                let (buffer, rank) = (cx.input(VALUE), nest.dims().len());
                nest.load_strided(cx, buffer, 0, &vec![0; rank])
            }
        }
    }

    /// Adds the gradient of a mode that copies: along each padded axis, the gradients of copies are added to their
    /// source.
    fn gradient_of_copies(&self, cx: &mut Grad<'_>, mut g: ValueId) -> Result<ValueId, OpError> {
        let (x, y) = (cx.input(0)?, cx.output(0, "y"));
        let Some(shape) = cx.shape(x).cloned() else {
            return Err(OpError::unsupported("the rank of its input must be known for the gradient"));
        };
        let rank = shape.rank();
        let ints = |cx: &Grad<'_>, k: usize| {
            cx.optional_input(k).and_then(|id| cx.constant_of(id)).and_then(Tensor::to_i64)
        };
        let constant_inputs = constant_pads(|k| ints(cx, k), |k| cx.optional_input(k).is_some());
        let ends =
            constant_inputs.map(|(pads, axes)| pads_per_axis(&pads, axes.as_deref(), rank)).transpose()?;
        if ends.is_none() && cx.optional_input(AXES).is_some() {
            return Err(OpError::unsupported(format!(
                "the gradient of mode {:?} needs axes and pads that are constant",
                self.mode.name()
            )));
        }
        let padded_axes: Vec<usize> =
            (0..rank).filter(|&axis| ends.as_ref().is_none_or(|ends| ends[axis] != (0, 0))).collect();
        if padded_axes.is_empty() {
            return Ok(g);
        }
        let (before, after) = (cx.shape_of(x), cx.shape_of(y));
        let sizes = cx.add("Concat", &[before, after], Attrs::new().with("axis", 0i64));
        for (n, &axis) in padded_axes.iter().enumerate() {
            let indices = match (&ends, shape[axis].known()) {
                (Some(ends), Some(size)) => {
                    let map = self.mode.axis_map(&self.mode.axis_copies(size, ends[axis], axis)?);
                    let indices: Vec<i64> = (0..map.len()).map(|k| map.row(k)[0].index as i64).collect();
                    cx.ints("indices", &indices)
                }
                _ => self.add_source_indices(cx, ends.as_ref().map(|ends| ends[axis]), axis, rank, before)?,
            };
            // After this step the processed axes have the size of the input, the others still the size of the result.
            let chosen: Vec<i64> = (0..rank)
                .map(|k| if padded_axes[n + 1..].contains(&k) { (rank + k) as i64 } else { k as i64 })
                .collect();
            let chosen = cx.ints("chosen", &chosen);
            let shape = cx.add("Gather", &[sizes, chosen], Attrs::new());
            let attrs = Attrs::new().with("axis", axis as i64);
            g = cx.add_in("com.microsoft", "GatherGrad", &[shape, indices, g], attrs);
        }
        Ok(g)
    }

    /// Adds the source indices of the positions of a padded axis: the positions 0, 1, ... of the axis, padded in the
    /// same mode. `shape` is the shape of the input.
    fn add_source_indices(
        &self,
        cx: &mut Grad<'_>,
        ends: Option<AxisPads>,
        axis: usize,
        rank: usize,
        shape: ValueId,
    ) -> Result<ValueId, OpError> {
        let pads = match ends {
            Some((before, after)) => cx.ints("pads", &[before, after]),
            None => {
                let pads = cx.input(PADS)?;
                let axis_ends = cx.ints("own", &[axis as i64, (rank + axis) as i64]);
                cx.add("Gather", &[pads, axis_ends], Attrs::new())
            }
        };
        let at = cx.ints("axis", &[axis as i64]);
        let count = cx.add("Gather", &[shape, at], Attrs::new());
        let fill = Attrs::new().with("value", Tensor::i64(&[1], &[1]));
        let ones = cx.add("ConstantOfShape", &[count], fill);
        let positions = cx.add("NonZero", &[ones], Attrs::new());
        let flat = cx.ints("flat", &[-1]);
        let positions = cx.add("Reshape", &[positions, flat], Attrs::new());
        Ok(cx.add("Pad", &[positions, pads], Attrs::new().with("mode", self.mode.name())))
    }
}

/// Removes the border by a Pad with negated pads.
fn add_crop(cx: &mut Grad<'_>, g: ValueId) -> Result<ValueId, OpError> {
    let pads = cx.input(PADS)?;
    let negative = match cx.constant_of(pads).and_then(Tensor::to_i64) {
        Some(pads) => {
            let pads: Vec<i64> = pads.iter().map(|pad| pad.saturating_neg()).collect();
            cx.ints("pads", &pads)
        }
        None => cx.add("Neg", &[pads], Attrs::new()),
    };
    let mut inputs = vec![Some(g), Some(negative)];
    if let Some(axes) = cx.optional_input(AXES) {
        inputs.extend([None, Some(axes)]);
    }
    Ok(cx.add_node("", "Pad", &inputs, 1, Attrs::new())[0])
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let mode = match node.attrs.string("mode")?.unwrap_or("constant") {
        "constant" => Mode::Constant,
        "reflect" => Mode::Reflect,
        "edge" => Mode::Edge,
        "wrap" => Mode::Wrap,
        other => {
            return Err(OpError::invalid(format!(
                "mode must be \"constant\", \"reflect\", \"edge\" or \"wrap\", got {other:?}"
            )));
        }
    };
    Ok(Box::new(Pad { mode, value: node.attrs.float("value")? }))
}

/// Upgrades a node from before opset 11: the pads become an input.
///
/// The constant stays an attribute, because its type as an input is unknown when a model is read.
fn upgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 11 {
        let pads = Attrs::required("pads", rw.attrs().ints("pads")?)?.to_vec();
        let mut attrs = rw.attrs().clone();
        attrs.0.remove("pads");
        let inputs = [Some(rw.required_input(0)?), Some(rw.ints("pads", &pads))];
        rw.emit_same_op(&inputs, attrs);
    }
    Ok(())
}

fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let x = rw.required_input(0)?;
    let version = rw.version();
    if version < 11 && rw.attrs().0.contains_key("pads") {
        // The node already has the old form.
        return Ok(());
    }
    let mode = rw.attrs().string("mode")?.unwrap_or("constant").to_owned();
    if version < 19 && mode == "wrap" {
        return Err(OpError::unsupported("mode \"wrap\" needs opset 19 or newer"));
    }
    let dtype = rw.dtype(x);
    let attribute = rw.attrs().float("value")?;
    let moved = version >= 11 && attribute.is_some();
    // The opset has an input for axes, or the node has no axes.
    if version >= 18 && !moved || version >= 11 && rw.input(AXES).is_none() && !moved {
        return cast_bool_inputs(rw, x, dtype);
    }
    let mut pads = rw.required_input(PADS)?;
    let mut axes = rw.input(AXES);
    if let Some(named) = axes
        && version < 18
    {
        let constant = |rw: &Rewrite<'_>, id: ValueId| rw.constant_of(id).and_then(Tensor::to_i64);
        let (Some(rank), Some(pad_values), Some(named)) =
            (rw.shape(x).map(Shape::rank), constant(rw, pads), constant(rw, named))
        else {
            return Err(OpError::unsupported("axes that are not constant need opset 18 or newer"));
        };
        let ends = pads_per_axis(&pad_values, Some(&named), rank)?;
        let all_pads: Vec<i64> =
            ends.iter().map(|ends| ends.0).chain(ends.iter().map(|ends| ends.1)).collect();
        pads = rw.ints("pads", &all_pads);
        axes = None;
    }
    let mut attrs = Attrs::new().with("mode", mode);
    if version >= 11 {
        let mut value = rw.input(VALUE);
        if let (None, Some(number)) = (value, attribute) {
            let dtype = dtype.ok_or_else(|| OpError::invalid("the type of input 0 is not known"))?;
            value = Some(rw.constant("value", Tensor::scalar(dtype, f64::from(number))));
        }
        let mut inputs = vec![Some(x), Some(pads), value, axes];
        while inputs.last() == Some(&None) {
            inputs.pop();
        }
        rw.emit_same_op(&inputs, attrs);
        return Ok(());
    }
    let message = "pads or a constant computed at run time need opset 11 or newer";
    let refused = || OpError::unsupported(message);
    attrs = attrs.with("pads", rw.constant_of(pads).and_then(Tensor::to_i64).ok_or_else(refused)?);
    let value = match rw.input(VALUE) {
        Some(id) => {
            let element = rw.constant_of(id).and_then(|tensor| tensor.to_f64().first().copied());
            Some(element.ok_or_else(refused)? as f32)
        }
        None => attribute,
    };
    if let Some(value) = value {
        attrs = attrs.with("value", value);
    }
    let integer_type = dtype.filter(|dtype| !dtype.is_float());
    match integer_type {
        None => rw.emit_same_op(&[Some(x)], attrs),
        // Before opset 11 Pad only accepts floats.
        Some(dtype) => {
            let cast = |to: DType| Attrs::new().with("to", i64::from(to.to_onnx()));
            let wide = rw.add("Cast", &[x], cast(DType::F64));
            let wide = rw.add_node("", "Pad", &[Some(wide)], 1, attrs)[0];
            let result = rw.add("Cast", &[wide], cast(dtype));
            rw.replace_output(0, result);
        }
    }
    Ok(())
}

/// Casts boolean inputs for opsets before 13, which cannot pad them.
fn cast_bool_inputs(rw: &mut Rewrite<'_>, x: ValueId, dtype: Option<DType>) -> Result<(), OpError> {
    if dtype != Some(DType::Bool) || rw.version() >= 13 {
        return Ok(());
    }
    let cast = |to: DType| Attrs::new().with("to", i64::from(to.to_onnx()));
    let mut inputs = rw.node().inputs.to_vec();
    for k in [0, VALUE] {
        if let Some(Some(id)) = inputs.get(k).copied() {
            inputs[k] = Some(rw.add("Cast", &[id], cast(DType::I32)));
        }
    }
    debug_assert_eq!(rw.input(0), Some(x));
    let padded = rw.add_node("", "Pad", &inputs, 1, rw.attrs().clone())[0];
    let result = rw.add("Cast", &[padded], cast(DType::Bool));
    rw.replace_output(0, result);
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "Pad", &[2, 11, 13, 18, 19, 21, 23, 24, 25], build)
            .class(Class::Pad)
            .traits(Traits::MOVES)
            .upgrade(upgrade)
            .downgrade(downgrade),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, check_decomposition, check_downgrade, check_gradients, f64s, generic_tensor, gradient_graph,
        one_node_graph, run, run_node,
    };

    const PAD: (&str, &str) = ("", "Pad");

    fn mode(name: &str) -> Attrs {
        Attrs::new().with("mode", name)
    }

    fn ints(values: &[i64]) -> Tensor {
        Tensor::i64(&[values.len()], values)
    }

    /// Returns a graph with constant pads and axes, as in most files. The padding value is an input.
    fn graph_of(x: &Tensor, pads: &[i64], value: Option<&Tensor>, axes: Option<&[i64]>, name: &str) -> Graph {
        let (pads, axes) = (ints(pads), axes.map(ints));
        let inputs = [Some(x), Some(&pads), value, axes.as_ref()];
        let mut graph = one_node_graph(NEWEST_OPSET, PAD, &inputs, 1, mode(name)).expect("valid");
        let mut runtime_inputs = Vec::new();
        for (id, tensor) in std::mem::take(&mut graph.inputs).into_iter().zip(inputs.iter().flatten()) {
            if tensor.dtype() == DType::I64 && *tensor != x {
                graph.value_mut(id).constant = Some((*tensor).clone());
            } else {
                runtime_inputs.push(id);
            }
        }
        graph.inputs = runtime_inputs;
        let y = graph.outputs[0];
        graph.value_mut(y).ty = ortrain_graph::ValueType::Unknown;
        passes::infer::infer(&mut graph).expect("valid");
        graph
    }

    #[track_caller]
    fn pad(x: &Tensor, pads: &[i64], value: Option<&Tensor>, name: &str) -> Tensor {
        let inputs = [Some(x), Some(&ints(pads)), value];
        run_node(PAD, &inputs, 1, mode(name)).expect("the graph runs").remove(0)
    }

    #[test]
    fn every_mode_along_one_axis() {
        let x = Tensor::i64(&[4], &[1, 2, 3, 4]);
        let minus = Tensor::i64(&[], &[-1]);
        for (name, pads, expected) in [
            ("constant", [2, 1], &[-1, -1, 1, 2, 3, 4, -1][..]),
            ("constant", [-1, 2], &[2, 3, 4, -1, -1]),
            ("constant", [-3, -1], &[]),
            ("constant", [-6, 6], &[-1, -1, -1, -1]),
            ("constant", [7, -6], &[-1, -1, -1, -1, -1]),
            ("reflect", [2, 3], &[3, 2, 1, 2, 3, 4, 3, 2, 1]),
            ("reflect", [-1, 2], &[2, 3, 4, 3, 2]),
            ("reflect", [2, -1], &[3, 2, 1, 2, 3]),
            ("edge", [2, 1], &[1, 1, 1, 2, 3, 4, 4]),
            ("edge", [3, -2], &[1, 1, 1, 1, 2]),
            ("wrap", [3, 6], &[2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2]),
            ("wrap", [-2, 3], &[3, 4, 3, 4, 3]),
        ] {
            let got = pad(&x, &pads, Some(&minus), name);
            assert_eq!(got.to_i64().expect("integers"), expected, "{name} {pads:?}");
        }
    }

    #[test]
    fn multiple_axes_and_dtypes() {
        for dtype in DType::ALL {
            let x = Tensor::filled(dtype, &[1, 2], 1.0);
            assert_eq!(
                pad(&x, &[1, 0, 0, 1], None, "constant").to_f64(),
                [0.0, 0.0, 0.0, 1.0, 1.0, 0.0],
                "{dtype}"
            );
            for name in ["edge", "wrap"] {
                assert_eq!(pad(&x, &[1, 2, 0, 1], None, name), Tensor::filled(dtype, &[2, 5], 1.0));
            }
        }
        let x = Tensor::i64(&[2, 3], &[1, 2, 3, 4, 5, 6]);
        let got = pad(&x, &[1, 1, 0, 2], None, "reflect");
        assert_eq!(got, Tensor::i64(&[3, 6], &[5, 4, 5, 6, 5, 4, 2, 1, 2, 3, 2, 1, 5, 4, 5, 6, 5, 4]));
        let axes = Some(&[-1i64][..]);
        let got = run(&graph_of(&x, &[1, -1], None, axes, "constant"), std::slice::from_ref(&x));
        assert_eq!(got.expect("the graph runs")[0], Tensor::i64(&[2, 3], &[0, 1, 2, 0, 4, 5]));
        let scalar = Tensor::f32(&[], &[3.0]);
        assert_eq!(pad(&scalar, &[], None, "reflect"), scalar);
        assert_eq!(pad(&x, &[0; 4], None, "wrap"), x);
        let empty = Tensor::f32(&[2, 0], &[]);
        assert_eq!(pad(&empty, &[0, 1, 0, 1], None, "constant"), Tensor::filled(DType::F32, &[2, 2], 0.0));
        assert_eq!(pad(&empty, &[1, 0, 0, 0], None, "edge").dims(), [3, 0]);
    }

    #[test]
    fn gradients() {
        let x = generic_tensor(&[3, 4, 2], 1);
        let value = f64s(&[], &[0.7]);
        for name in ["constant", "reflect", "edge", "wrap"] {
            for (pads, axes) in [
                (&[0, 1, 1, 2, 2, 0][..], None),
                (&[1, -1, 0, -1, 2, 1], None),
                (&[0, -2, 0, 0, -1, 0], None),
                (&[2, 1], Some(&[0i64][..])),
                (&[1, 0, 1, 2], Some(&[-1, 1])),
                (&[0; 6], None),
            ] {
                let graph = graph_of(&x, pads, None, axes, name);
                check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
                let y = run(&graph, std::slice::from_ref(&x)).expect("the graph runs").remove(0);
                let gradient = gradient_graph(&graph, &[Some(generic_tensor(y.dims(), 2))], &[0]);
                check_decomposition(&gradient, std::slice::from_ref(&x), 0.0);
                if name == "constant" {
                    for value in [&value, &f64s(&[1], &[-1.5])] {
                        let graph = graph_of(&x, pads, Some(value), axes, name);
                        check_gradients(&graph, &[x.clone(), value.clone()], &[0, 1], &[0]);
                    }
                }
            }
            // Pads that are only known at run time.
            let pads = ints(&[1, -1, 0, 0, 2, 1]);
            let inputs = [Some(&x), Some(&pads)];
            let graph = one_node_graph(NEWEST_OPSET, PAD, &inputs, 1, mode(name)).expect("valid");
            check_gradients(&graph, &[x.clone(), pads], &[0], &[0]);
        }
        // Wraps around several times.
        let x = generic_tensor(&[2, 3], 5);
        check_gradients(&graph_of(&x, &[0, 7, 0, 11], None, None, "wrap"), &[x], &[0], &[0]);
    }

    #[test]
    fn gradients_of_symbolic_sizes() {
        let x = generic_tensor(&[3, 4], 1);
        for name in ["constant", "reflect", "edge", "wrap"] {
            let mut graph = graph_of(&x, &[1, 2, 0, 1], None, None, name);
            let (id, y) = (graph.inputs[0], graph.outputs[0]);
            let symbolic: Shape = [Dim::symbol("N"), Dim::symbol("W")].into_iter().collect();
            graph.value_mut(id).ty = ortrain_graph::ValueType::Tensor(DType::F64, Some(symbolic));
            graph.value_mut(y).ty = ortrain_graph::ValueType::Unknown;
            passes::infer::infer(&mut graph).expect("valid");
            check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
        }
    }

    /// An infinity or NaN in the border does not reach the gradient of the inside, and vice versa.
    #[test]
    fn border_and_inside_gradients_are_independent() {
        let (x, value) = (f64s(&[2], &[1.0, 2.0]), f64s(&[], &[0.0]));
        let graph = graph_of(&x, &[1, 1], Some(&value), None, "constant");
        let seed = f64s(&[4], &[f64::INFINITY, 1.0, 2.0, 3.0]);
        let inputs = [x, value];
        let got = run(&gradient_graph(&graph, &[Some(seed)], &[0, 1]), &inputs).expect("the graph runs");
        assert_eq!(got[0].to_f64(), [1.0, 2.0]);
        let seed = f64s(&[4], &[5.0, f64::NAN, 2.0, 3.0]);
        let got = run(&gradient_graph(&graph, &[Some(seed)], &[0, 1]), &inputs).expect("the graph runs");
        assert_eq!(got[1].to_f64(), [8.0]);
    }

    #[test]
    fn older_versions() {
        let x = generic_tensor(&[2, 3], 1);
        let old = mode("constant").with("pads", vec![0i64, 1, 1, 0]).with("value", 1.5f32);
        for opset in [7, 10] {
            let graph =
                one_node_graph(opset, PAD, &[Some(&x)], 1, old.clone()).expect("the graph can be read");
            let expected = pad(&x, &[0, 1, 1, 0], Some(&f64s(&[], &[1.5])), "constant");
            assert_eq!(run(&graph, std::slice::from_ref(&x)).expect("the graph runs")[0], expected);
            for target in [opset, 11, 18] {
                check_downgrade(&graph, std::slice::from_ref(&x), target);
            }
            for name in ["constant", "reflect", "edge"] {
                let attrs = old.clone().with("mode", name);
                let graph = one_node_graph(opset, PAD, &[Some(&x)], 1, attrs).expect("the graph can be read");
                check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
                let mut gradient = gradient_graph(&graph, &[Some(generic_tensor(&[3, 4], 2))], &[0]);
                passes::infer::infer(&mut gradient).expect("valid");
                check_downgrade(&gradient, std::slice::from_ref(&x), opset);
            }
        }
        let named = graph_of(&x, &[1, 2], None, Some(&[-1]), "edge");
        assert_eq!(check_downgrade(&named, std::slice::from_ref(&x), 18).nodes[0].inputs.len(), 4);
        assert_eq!(check_downgrade(&named, std::slice::from_ref(&x), 17).nodes[0].inputs.len(), 2);
        let written = check_downgrade(&named, std::slice::from_ref(&x), 7);
        assert_eq!(written.nodes[0].attrs.ints("pads").expect("ints"), Some(&[0, 1, 0, 2][..]));
        let integers = Tensor::i64(&[2], &[1, -2]);
        check_downgrade(&graph_of(&integers, &[1, 1], None, None, "reflect"), &[integers], 9);
        let flags = Tensor::filled(DType::Bool, &[2], 1.0);
        for opset in [7, 12, 13] {
            let graph = graph_of(&flags, &[1, 1], None, None, "constant");
            check_downgrade(&graph, std::slice::from_ref(&flags), opset);
        }
        let round = graph_of(&x, &[1, 1, 0, 0], None, None, "wrap");
        let error = passes::versions::downgrade(&mut round.clone(), 18).expect_err("refused").to_string();
        assert!(error.contains("mode \"wrap\" needs opset 19 or newer"), "{error}");
    }

    #[test]
    fn rejects_invalid_pads() {
        let x = generic_tensor(&[2, 3], 1);
        for (pads, name, sentence) in [
            (
                &[1, 1, 1][..],
                "constant",
                "got 3 pads for 2 axes, expected 4 (one before and one after each axis)",
            ),
            (&[0, -2, 0, -2], "constant", "pads -2 and -2 remove more than the 3 elements of axis 1"),
            (
                &[0, 3, 0, 0],
                "reflect",
                "mode \"reflect\" pads axis 1 by 3 elements, but the axis has only 2 elements to copy",
            ),
            (
                &[0, 2, 0, -1],
                "reflect",
                "mode \"reflect\" pads axis 1 by 2 elements, but the axis has only 1 elements to copy",
            ),
            (
                &[0, -3, 0, 4],
                "edge",
                "mode \"edge\" pads axis 1 by 4 elements, but the axis has only 0 elements to copy",
            ),
            (&[0, i64::MAX, 0, i64::MAX], "constant", "make axis 1 too long to count"),
            (&[0, i64::MAX / 2, 0, 0], "constant", "too large to address"),
            (&[0, 1 << 40, 0, 0], "edge", "but this mode supports at most"),
            (&[0, 0, 0, 0], "mirror", "got \"mirror\""),
        ] {
            let failure = run_node(PAD, &[Some(&x), Some(&ints(pads))], 1, mode(name)).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(sentence), "{name} {pads:?}: {error}");
        }
        for (axes, sentence) in [(&[0, 0][..], "axis 0 is padded twice"), (&[0, 2], "axis 2 is out of range")]
        {
            let inputs = [Some(&x), Some(&ints(&[1; 4])), None, Some(&ints(axes))];
            let failure = run_node(PAD, &inputs, 1, Attrs::new()).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(sentence), "{error}");
        }
        let two = generic_tensor(&[2], 1);
        let inputs = [Some(&x), Some(&ints(&[1; 4])), Some(&two)];
        assert!(run_node(PAD, &inputs, 1, Attrs::new()).is_err());
    }
}
