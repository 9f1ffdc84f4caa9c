//! Concatenation and splitting along an axis: `Concat`, and ONNX Runtime's `ConcatTraining` and `SplitTraining`.
//!
//! Sources: ONNX Concat-4, 11, 13; ConcatTraining (also returns the lengths) and SplitTraining (the lengths are an
//! input) of `com.microsoft`, version 1.

use ortrain_expr::Access;
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor};

use crate::OpError;
use crate::class::{Class, Traits};
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axis};
use crate::lower::Lower;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;

/// Concatenation of tensors along an axis. Output 1, if used, contains their lengths along this axis.
struct Concat {
    axis: i64,
}

impl Op for Concat {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let count = cx.node().inputs.len();
        cx.check_arity(count.max(1), count.max(1), 2)?;
        let dtype = cx.expect_same_dtype(0..count)?;
        cx.set_output(1, DType::I64, Some(Shape::known(&[count])));
        let shapes: Option<Vec<&Shape>> = (0..count).map(|k| cx.shape(k)).collect();
        let Some(shapes) = shapes else {
            let rank = (0..count).find_map(|k| cx.shape(k)).map(Shape::rank);
            cx.set_output(0, dtype, rank.map(|rank| cx.unknown_shape(0, rank)));
            return Ok(());
        };
        let mut shape = shapes[0].clone();
        let axis = normalize_axis(self.axis, shape.rank())?;
        let mut total = Some(0usize);
        for (k, other) in shapes.iter().enumerate() {
            if other.rank() != shape.rank() {
                return Err(OpError::invalid(format!(
                    "input {k} has shape {other}, but input 0 has shape {}: the ranks must be equal",
                    shapes[0]
                )));
            }
            for at in (0..shape.rank()).filter(|&at| at != axis) {
                match (&shape[at], &other[at]) {
                    (Dim::Known(x), Dim::Known(y)) if x != y => {
                        return Err(OpError::invalid(format!(
                            "input {k} has shape {other}, but input 0 has shape {}: the shapes may differ only along \
                             axis {axis}",
                            shapes[0]
                        )));
                    }
                    (Dim::Symbol(_), Dim::Known(y)) => shape[at] = Dim::Known(*y),
                    _ => {}
                }
            }
            total = match (total, other[axis].known()) {
                (Some(sum), Some(size)) => Some(
                    sum.checked_add(size)
                        .ok_or_else(|| OpError::invalid("the sum of the sizes is too large"))?,
                ),
                _ => None,
            };
        }
        shape[axis] = total.map_or_else(|| cx.unknown_dim(0, axis), Dim::Known);
        if count == 1 {
            shape[axis] = shapes[0][axis].clone();
        }
        let vector = shape.rank() == 1 && dtype == DType::I64;
        cx.set_output(0, dtype, Some(shape));
        let lengths = shapes.iter().map(|shape| shape[axis].clone()).collect();
        cx.set_output_sizes(1, Some(lengths));
        if vector {
            let parts: Option<Vec<Vec<Dim>>> = (0..count).map(|k| cx.sizes(k)).collect();
            cx.set_output_sizes(0, parts.map(|parts| parts.concat()));
        }
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let count = cx.node().inputs.len();
        let inputs: Vec<_> = (0..count).map(|k| cx.input(k)).collect::<Result<_, _>>()?;
        let rank = inputs.iter().find_map(|&id| cx.shape(id).map(Shape::rank));
        let rank = rank.ok_or_else(|| {
            OpError::unsupported("the gradient needs the rank of an input; declare its shape in the model")
        })?;
        let axis = normalize_axis(self.axis, rank)?;
        let known: Option<Vec<i64>> = inputs
            .iter()
            .map(|&id| cx.shape(id).and_then(|shape| shape[axis].known()).map(|size| size as i64))
            .collect();
        let lengths = match known {
            Some(lengths) => cx.ints("lengths", &lengths),
            None => {
                let at = cx.ints("axis", &[axis as i64]);
                let mut parts = Vec::with_capacity(count);
                for &input in &inputs {
                    let shape = cx.add("Shape", &[input], Attrs::new());
                    parts.push(cx.add("Gather", &[shape, at], Attrs::new().with("axis", 0i64)));
                }
                cx.add("Concat", &parts, Attrs::new().with("axis", 0i64))
            }
        };
        let attrs = Attrs::new().with("axis", axis as i64);
        let parts = cx.add_node("com.microsoft", "SplitTraining", &[Some(g), Some(lengths)], count, attrs);
        for (k, part) in parts.into_iter().enumerate() {
            if cx.needs_grad(k) {
                cx.set_grad(k, part);
            }
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let total_dims = cx.out_dims(0);
        let axis = normalize_axis(self.axis, total_dims.len())?;
        let output = cx.output(0);
        let strides = Access::contiguous(cx.out_dtype(0), &total_dims).strides;
        let mut start = 0;
        let mut lengths = Vec::new();
        for k in 0..cx.node().inputs.len() {
            let dims = cx.dims(k);
            let mut nest = cx.nest(&dims, 0);
            let buffer = cx.input(k);
            let value = nest.load_broadcast(buffer, cx.dtype(k), &dims);
            let offset = start * strides[axis] as usize;
            nest.store_strided(cx, output, offset, strides.clone(), value);
            if !dims.contains(&0) {
                cx.emit(nest.instruction())?;
            }
            start += dims[axis];
            lengths.push(dims[axis] as i64);
        }
        if cx.has_output(1) {
            let buffer = cx.constant_buffer("lengths", &Tensor::i64(&[lengths.len()], &lengths));
            cx.alias_buffer(1, buffer);
        }
        Ok(())
    }
}

/// Parts of a tensor along an axis; the lengths are input 1.
struct SplitTraining {
    axis: i64,
}

impl Op for SplitTraining {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let count = cx.node().outputs.len();
        cx.check_arity(2, 2, count)?;
        let dtype = cx.dtype(0)?;
        cx.expect_dtype(1, "int64", |dtype| dtype == DType::I64)?;
        let Some(shape) = cx.shape(0) else {
            for k in 0..count {
                cx.set_output(k, dtype, None);
            }
            return Ok(());
        };
        let axis = normalize_axis(self.axis, shape.rank())?;
        let lengths = cx.sizes(1);
        if let Some(lengths) = &lengths {
            if lengths.len() != count {
                return Err(OpError::invalid(format!(
                    "expected one length for each output, got {} lengths for {count} outputs",
                    lengths.len()
                )));
            }
            let total: Option<usize> = lengths.iter().map(Dim::known).sum();
            if let (Some(total), Some(size)) = (total, shape[axis].known())
                && total != size
            {
                return Err(OpError::invalid(format!(
                    "the lengths add up to {total}, but axis {axis} of {shape} has {size}"
                )));
            }
        }
        for k in 0..count {
            let mut part = shape.clone();
            part[axis] =
                lengths.as_ref().map_or_else(|| cx.unknown_dim(k, axis), |lengths| lengths[k].clone());
            cx.set_output(k, dtype, Some(part));
        }
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        if !cx.needs_grad(0) {
            return Ok(());
        }
        let mut parts = Vec::new();
        for k in 0..cx.node().outputs.len() {
            parts.push(match cx.output_grad(k) {
                Some(gradient) => gradient,
                None => {
                    let output = cx.output(k, "part");
                    let dtype = cx.dtype(output)?;
                    let shape = cx.shape_of(output);
                    let zero = Tensor::filled(dtype, &[1], 0.0);
                    cx.add("ConstantOfShape", &[shape], Attrs::new().with("value", zero))
                }
            });
        }
        let gradient = cx.add("Concat", &parts, Attrs::new().with("axis", self.axis));
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let total_dims = cx.dims(0);
        let axis = normalize_axis(self.axis, total_dims.len())?;
        let buffer = cx.input(0);
        let strides = Access::contiguous(cx.dtype(0), &total_dims).strides;
        let mut start = 0;
        for k in 0..cx.node().outputs.len() {
            if !cx.has_output(k) {
                // The length of an unused part is unknown, so every part must have an output.
                return Err(OpError::unsupported("every part must be used"));
            }
            let dims = cx.out_dims(k);
            let output = cx.output(k);
            if !dims.contains(&0) {
                let mut nest = cx.nest(&dims, 0);
                let value = nest.load_strided(cx, buffer, start * strides[axis] as usize, &strides);
                nest.store_contiguous(cx, output, value);
                cx.emit(nest.instruction())?;
            }
            start += dims[axis];
        }
        Ok(())
    }
}

fn read_axis(node: &Node) -> Result<i64, OpError> {
    Ok(node.attrs.int("axis")?.unwrap_or(0))
}

fn build_concat(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let axis = node.attrs.int("axis")?;
    Ok(Box::new(Concat { axis: Attrs::required("axis", axis)? }))
}

/// Replaces the node by one Slice per part, between cumulative sums of the lengths.
fn decompose_split(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, lengths) = (rw.required_input(0)?, rw.required_input(1)?);
    let axis = read_axis(rw.node())?;
    if let Some(known) = rw.sizes_of(lengths) {
        // Older opsets have a Split of known lengths, but no Slice between computed positions.
        let known = rw.ints("lengths", &known);
        let (inputs, outputs) = ([Some(x), Some(known)], rw.node().outputs.len());
        let parts = rw.add_node("", "Split", &inputs, outputs, Attrs::new().with("axis", axis));
        parts.into_iter().enumerate().for_each(|(k, part)| rw.replace_output(k, part));
        return Ok(());
    }
    let axes = rw.ints("axes", &[axis]);
    let mut start = rw.ints("start", &[0]);
    for k in 0..rw.node().outputs.len() {
        let at = rw.ints("part", &[k as i64]);
        let length = rw.add("Gather", &[lengths, at], Attrs::new());
        let end = rw.add("Add", &[start, length], Attrs::new());
        let part = rw.add("Slice", &[x, start, end, axes], Attrs::new());
        rw.replace_output(k, part);
        start = end;
    }
    Ok(())
}

fn decompose_concat(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let axis = read_axis(rw.node())?;
    let inputs: Vec<_> = rw.node().present_inputs().collect();
    let joined = rw.add("Concat", &inputs, Attrs::new().with("axis", axis));
    rw.replace_output(0, joined);
    if rw.has_output(1) {
        let at = rw.ints("axis", &[axis]);
        let mut lengths = Vec::new();
        for &input in &inputs {
            let shape = rw.add("Shape", &[input], Attrs::new());
            lengths.push(rw.add("Gather", &[shape, at], Attrs::new().with("axis", 0i64)));
        }
        let lengths = rw.add("Concat", &lengths, Attrs::new().with("axis", 0i64));
        rw.replace_output(1, lengths);
    }
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "Concat", &[4, 11, 13], build_concat)
            .class(Class::Join)
            .traits(Traits::MOVES.and(Traits::KEEPS_DECISION)),
        Definition::new("com.microsoft", "ConcatTraining", &[1], build_concat).decompose(decompose_concat),
        Definition::new("com.microsoft", "SplitTraining", &[1], |_, node| {
            Ok(Box::new(SplitTraining { axis: read_axis(node)? }))
        })
        .decompose(decompose_split),
    ]
}
