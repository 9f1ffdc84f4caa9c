//! Operators that change or return the shape of a tensor, and constants.
//!
//! Reshape-5 to 25, Flatten-1 to 25, Transpose-1 to 25, Squeeze-1 to 25, Unsqueeze-1 to 25, Expand-8 and 13, Shape-1 to
//! 25, Size-1 to 25, Identity-1 to 25, Constant-1 to 25; ConstantOfShape-9 to 25 of ONNX.
//! `BroadcastGradientArgs` of ONNX Runtime. Axes of Squeeze and Unsqueeze are an attribute before opset 13 and an input
//! from this opset on. String constants and sparse constants are not supported. A value that depends only on shapes is
//! computed when a program is built, and is a constant of the program.

use ortrain_expr::Access;
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId, ValueType};

use crate::OpError;
use crate::class::{Class, Traits};
use crate::grad::Grad;
use crate::infer::{Infer, OPEN_SIZE, broadcast, normalize_axes, normalize_axis, to_sizes};
use crate::lower::Lower;
use crate::op::{Definition, Op};
use crate::rewrite::{Rewrite, ints_attribute_to_input, ints_input_to_attribute};
use crate::sample::Sample;

/// Same elements with another shape.
enum View {
    Reshape { allow_zero: bool },
    Flatten { axis: i64 },
    Squeeze,
    Unsqueeze,
}

/// Returns the number of elements of a shape: the product of its known sizes, and its symbols.
fn element_product(dims: &[Dim]) -> (usize, Vec<&Dim>) {
    let known = dims.iter().filter_map(Dim::known).fold(1usize, usize::saturating_mul);
    let mut symbols: Vec<&Dim> = dims.iter().filter(|dim| dim.known().is_none()).collect();
    symbols.sort();
    (known, symbols)
}

impl View {
    /// Returns the target shape of Reshape, or `None` if symbols leave a size unknown.
    fn reshape(&self, cx: &Infer<'_>, allow_zero: bool) -> Result<Option<Shape>, OpError> {
        let requested: Vec<Result<Dim, i64>> = if let Some(ints) = cx.ints(1) {
            ints.into_iter().map(|size| usize::try_from(size).map(Dim::Known).map_err(|_| size)).collect()
        } else if let Some(sizes) = cx.sizes(1) {
            sizes
                .into_iter()
                .map(|size| if size == Dim::symbol(OPEN_SIZE) { Err(-1) } else { Ok(size) })
                .collect()
        } else {
            let rank = cx.shape(1).and_then(|shape| shape.first().and_then(Dim::known));
            return Ok(rank.map(|rank| cx.unknown_shape(0, rank)));
        };
        let input = cx.shape(0);
        let mut dims: Vec<Option<Dim>> = Vec::with_capacity(requested.len());
        for (axis, size) in requested.iter().enumerate() {
            dims.push(match size {
                Ok(Dim::Known(0)) if !allow_zero => match input {
                    Some(shape) => Some(shape.get(axis).cloned().ok_or_else(|| {
                        OpError::invalid(format!(
                            "size 0 at position {axis} copies an axis that {shape} does not have"
                        ))
                    })?),
                    None => Some(cx.unknown_dim(0, axis)),
                },
                Ok(dim) => Some(dim.clone()),
                Err(-1) => None,
                Err(size) => return Err(OpError::invalid(format!("a size must be at least -1, got {size}"))),
            });
        }
        let open = dims.iter().filter(|dim| dim.is_none()).count();
        if open > 1 {
            return Err(OpError::invalid("at most one size can be -1"));
        }
        let known_dims: Vec<Dim> = dims.iter().flatten().cloned().collect();
        let (declared_known, declared_symbols) = element_product(&known_dims);
        if let Some(shape) = input {
            let (known, symbols) = element_product(shape);
            if symbols == declared_symbols {
                // An empty axis at the same position in both shapes does not constrain the open size.
                let empty_in_both = |axis: usize| {
                    shape.get(axis) == Some(&Dim::Known(0)) && dims.get(axis) == Some(&Some(Dim::Known(0)))
                };
                let (total, known_count) = if open == 1 {
                    let rest = |count: usize| (0..count).filter(|&axis| !empty_in_both(axis));
                    let all_dims: Vec<Dim> = rest(shape.rank()).map(|axis| shape[axis].clone()).collect();
                    let declared_sizes: Vec<Dim> =
                        rest(dims.len()).filter_map(|axis| dims[axis].clone()).collect();
                    (element_product(&all_dims).0, element_product(&declared_sizes).0)
                } else {
                    (known, declared_known)
                };
                let fits = if open == 1 {
                    known_count != 0 && total % known_count == 0
                } else {
                    total == known_count
                };
                if !fits && (symbols.is_empty() || (known != 0 && declared_known != 0)) {
                    return Err(OpError::invalid(format!(
                        "shape {shape} of {known} elements cannot be reshaped to {}",
                        dims.iter()
                            .map(|dim| dim.as_ref().map_or("-1".to_owned(), ToString::to_string))
                            .collect::<Vec<_>>()
                            .join("x"),
                    )));
                }
                let rest = if open == 1 { total.checked_div(known_count).unwrap_or(0) } else { 1 };
                return Ok(Some(dims.into_iter().map(|dim| dim.unwrap_or(Dim::Known(rest))).collect()));
            }
            // The input has one symbol more than the target: it is the open size, if the known sizes agree.
            if open == 1 && known == declared_known && symbols.len() == declared_symbols.len() + 1 {
                let mut rest = symbols.clone();
                for symbol in &declared_symbols {
                    if let Some(at) = rest.iter().position(|other| other == symbol) {
                        rest.remove(at);
                    }
                }
                if let [only] = rest.as_slice() {
                    return Ok(Some(dims.into_iter().map(|dim| dim.unwrap_or((*only).clone())).collect()));
                }
            }
        }
        let filled = dims.into_iter().enumerate().map(|(axis, dim)| dim.unwrap_or(cx.unknown_dim(0, axis)));
        Ok(Some(filled.collect()))
    }

    fn shape(&self, cx: &Infer<'_>) -> Result<Option<Shape>, OpError> {
        match self {
            View::Reshape { allow_zero } => self.reshape(cx, *allow_zero),
            View::Flatten { axis } => {
                let Some(shape) = cx.shape(0) else { return Ok(Some(cx.unknown_shape(0, 2))) };
                // Flatten accepts the rank itself as the axis: all axes before it, none after it.
                let at = if *axis == shape.rank() as i64 {
                    shape.rank()
                } else {
                    normalize_axis(*axis, shape.rank())?
                };
                let product = |dims: &[Dim], k: usize| match element_product(dims) {
                    (0, _) => Dim::Known(0),
                    (known, symbols) if symbols.is_empty() => Dim::Known(known),
                    (1, symbols) if symbols.len() == 1 => symbols[0].clone(),
                    _ => cx.unknown_dim(0, k),
                };
                Ok(Some([product(&shape[..at], 0), product(&shape[at..], 1)].into_iter().collect()))
            }
            View::Squeeze => {
                let Some(shape) = cx.shape(0) else { return Ok(None) };
                let axes = if !cx.has_input(1) {
                    if shape.iter().any(|dim| dim.known().is_none()) {
                        return Ok(None);
                    }
                    (0..shape.rank()).filter(|&axis| shape[axis].is_one()).collect()
                } else {
                    match cx.ints(1) {
                        Some(axes) => normalize_axes(&axes, shape.rank())?,
                        None => return Ok(None),
                    }
                };
                for &axis in &axes {
                    if shape[axis].known().is_some_and(|size| size != 1) {
                        return Err(OpError::invalid(format!("axis {axis} of {shape} must have size 1")));
                    }
                }
                let remaining = (0..shape.rank()).filter(|axis| !axes.contains(axis));
                Ok(Some(remaining.map(|axis| shape[axis].clone()).collect()))
            }
            View::Unsqueeze => {
                let (Some(shape), Some(axes)) = (cx.shape(0), cx.ints(1)) else { return Ok(None) };
                let rank = shape.rank() + axes.len();
                let axes = normalize_axes(&axes, rank)?;
                let mut rest = shape.iter();
                let dims = (0..rank).map(|axis| match axes.contains(&axis) {
                    true => Some(Dim::Known(1)),
                    false => rest.next().cloned(),
                });
                Ok(dims.collect::<Option<Vec<Dim>>>().map(|dims| dims.into_iter().collect()))
            }
        }
    }
}

impl Op for View {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        match self {
            View::Reshape { .. } | View::Unsqueeze => cx.check_arity(2, 2, 1)?,
            View::Flatten { .. } => cx.check_arity(1, 1, 1)?,
            View::Squeeze => cx.check_arity(1, 2, 1)?,
        }
        let dtype = cx.dtype(0)?;
        if cx.has_input(1) {
            cx.expect_dtype(1, "int64", |dtype| dtype == DType::I64)?;
        }
        let shape = self.shape(cx)?;
        let keeps_vector = shape.as_ref().is_some_and(|shape| shape.rank() <= 1);
        cx.set_output(0, dtype, shape);
        if dtype == DType::I64 && keeps_vector {
            cx.set_output_sizes(0, cx.sizes(0));
        }
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        if cx.needs_grad(0) {
            let x = cx.input(0)?;
            let shape = cx.shape_of(x);
            let gradient = cx.add("Reshape", &[g, shape], Attrs::new().with("allowzero", 1i64));
            cx.set_grad(0, gradient);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        cx.alias(0, 0);
        Ok(())
    }
}

/// Permutation of the axes.
struct Transpose {
    perm: Option<Vec<i64>>,
}

impl Transpose {
    fn perm(&self, rank: usize) -> Result<Vec<usize>, OpError> {
        let Some(perm) = &self.perm else { return Ok((0..rank).rev().collect()) };
        let order = perm.iter().map(|&axis| normalize_axis(axis, rank)).collect::<Result<Vec<_>, _>>()?;
        if order.len() != rank || normalize_axes(perm, rank).is_err() {
            return Err(OpError::invalid(format!(
                "perm {perm:?} is not a permutation of the axes of rank {rank}"
            )));
        }
        Ok(order)
    }
}

impl Op for Transpose {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        let dtype = cx.dtype(0)?;
        let shape = match (cx.shape(0), &self.perm) {
            (Some(shape), _) => {
                let perm = self.perm(shape.rank())?;
                Some(perm.iter().map(|&axis| shape[axis].clone()).collect())
            }
            (None, Some(perm)) => Some(cx.unknown_shape(0, perm.len())),
            (None, None) => None,
        };
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        if cx.needs_grad(0) {
            let attrs = match &self.perm {
                None => Attrs::new(),
                Some(perm) => {
                    let order = self.perm(perm.len())?;
                    let mut inverse = vec![0i64; order.len()];
                    for (to, &from) in order.iter().enumerate() {
                        inverse[from] = to as i64;
                    }
                    Attrs::new().with("perm", inverse)
                }
            };
            let gradient = cx.add("Transpose", &[g], attrs);
            cx.set_grad(0, gradient);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.dims(0);
        let perm = self.perm(dims.len())?;
        let input_strides = Access::contiguous(cx.dtype(0), &dims).strides;
        let strides: Vec<isize> = perm.iter().map(|&axis| input_strides[axis]).collect();
        let mut nest = cx.nest(&cx.out_dims(0), 0);
        let buffer = cx.input(0);
        let value = nest.load_strided(cx, buffer, 0, &strides);
        let output = cx.output(0);
        nest.store_contiguous(cx, output, value);
        cx.emit(nest.instruction())
    }
}

/// Broadcast to a shape.
struct Expand;

impl Op for Expand {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        let dtype = cx.dtype(0)?;
        cx.expect_dtype(1, "int64", |dtype| dtype == DType::I64)?;
        if let Some(bad) = cx.ints(1).and_then(|sizes| sizes.into_iter().find(|&size| size < 0)) {
            return Err(OpError::invalid(format!("a size must be at least 0, got {bad}")));
        }
        let shape = match (cx.shape(0), cx.sizes(1)) {
            (Some(shape), Some(sizes)) => Some(broadcast(shape, &sizes.into_iter().collect())?),
            (Some(shape), None) => {
                let rank = cx.shape(1).and_then(|shape| shape.first().and_then(Dim::known));
                rank.map(|rank| cx.unknown_shape(0, rank.max(shape.rank())))
            }
            _ => None,
        };
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        if cx.needs_grad(0) {
            let (x, y) = (cx.input(0)?, cx.output(0, "y"));
            let gradient = cx.sum_to(g, x, y)?;
            cx.set_grad(0, gradient);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let mut nest = cx.nest(&cx.out_dims(0), 0);
        let buffer = cx.input(0);
        let value = nest.load_broadcast(buffer, cx.dtype(0), &cx.dims(0));
        let output = cx.output(0);
        nest.store_contiguous(cx, output, value);
        cx.emit(nest.instruction())
    }
}

/// Sizes of the axes `start..end`.
struct ShapeOf {
    start: i64,
    end: Option<i64>,
}

impl ShapeOf {
    fn range(&self, rank: usize) -> (usize, usize) {
        let clamp = |axis: i64| {
            let axis = if axis < 0 { axis.saturating_add(rank as i64) } else { axis };
            axis.clamp(0, rank as i64) as usize
        };
        let (start, end) = (clamp(self.start), self.end.map_or(rank, clamp));
        (start, end.max(start))
    }
}

impl Op for ShapeOf {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        let Some(shape) = cx.shape(0) else {
            cx.set_output(0, DType::I64, Some(cx.unknown_shape(0, 1)));
            return Ok(());
        };
        let (start, end) = self.range(shape.rank());
        cx.set_output(0, DType::I64, Some(Shape::known(&[end - start])));
        cx.set_output_sizes(0, Some(shape[start..end].to_vec()));
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.dims(0);
        let (start, end) = self.range(dims.len());
        let sizes: Vec<i64> = dims[start..end].iter().map(|&dim| dim as i64).collect();
        let buffer = cx.constant_buffer("shape", &Tensor::i64(&[sizes.len()], &sizes));
        cx.alias_buffer(0, buffer);
        Ok(())
    }

    fn depends_only_on_shapes(&self) -> bool {
        true
    }
}

/// Number of elements.
struct Size;

impl Op for Size {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        cx.set_output(0, DType::I64, Some(Shape::scalar()));
        if let Some(dims) = cx.shape(0).and_then(Shape::concrete) {
            cx.set_output_sizes(0, Some(vec![Dim::Known(dims.iter().product())]));
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let count: usize = cx.dims(0).iter().product();
        let buffer = cx.constant_buffer("size", &Tensor::i64(&[], &[count as i64]));
        cx.alias_buffer(0, buffer);
        Ok(())
    }

    fn depends_only_on_shapes(&self) -> bool {
        true
    }
}

/// Same value.
struct Identity;

impl Op for Identity {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        if *cx.ty(0) == ValueType::Unknown {
            cx.dtype(0)?;
        }
        cx.set_output_type(0, cx.ty(0).clone());
        cx.set_output_sizes(0, cx.sizes(0));
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        if cx.needs_grad(0) {
            cx.set_grad(0, g);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        match cx.planes(0) {
            Ok(parts) => cx.set_planes(0, parts),
            Err(_) => cx.alias(0, 0),
        }
        Ok(())
    }
}

/// Tensor in an attribute of the graph.
struct Constant {
    value: Tensor,
}

impl Op for Constant {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(0, 0, 1)?;
        cx.set_output(0, self.value.dtype(), Some(Shape::known(self.value.dims())));
        cx.set_output_content(0, &self.value);
        if self.value.dtype() == DType::I64 && self.value.dims().len() <= 1 {
            cx.set_output_sizes(0, to_sizes(self.value.to_i64().unwrap_or_default()));
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let buffer = cx.constant_buffer("constant", &self.value);
        cx.alias_buffer(0, buffer);
        Ok(())
    }
}

/// Tensor with the same value everywhere.
struct ConstantOfShape {
    value: Tensor,
}

impl Op for ConstantOfShape {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        cx.expect_dtype(0, "int64", |dtype| dtype == DType::I64)?;
        if let Some(bad) = cx.ints(0).and_then(|sizes| sizes.into_iter().find(|&size| size < 0)) {
            return Err(OpError::invalid(format!("a size must be at least 0, got {bad}")));
        }
        let shape = match cx.sizes(0) {
            Some(sizes) => Some(sizes.into_iter().collect()),
            None => {
                let rank = cx.shape(0).and_then(|shape| shape.first().and_then(Dim::known));
                rank.map(|rank| cx.unknown_shape(0, rank))
            }
        };
        cx.set_output(0, self.value.dtype(), shape);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let buffer = cx.constant_buffer("value", &self.value);
        let mut nest = cx.nest(&cx.out_dims(0), 0);
        let value = nest.load_broadcast(buffer, self.value.dtype(), &[]);
        let output = cx.output(0);
        nest.store_contiguous(cx, output, value);
        cx.emit(nest.instruction())
    }
}

/// Axes over which the gradients of two broadcast operands are summed, last to first.
struct BroadcastGradientArgs;

/// Returns the axes of the common shape along which each operand was broadcast.
fn broadcast_axes(a: &[i64], b: &[i64]) -> Result<[Vec<i64>; 2], OpError> {
    let rank = a.len().max(b.len());
    let at = |shape: &[i64], axis: usize| {
        if axis + shape.len() < rank { 1 } else { shape[axis + shape.len() - rank] }
    };
    let mut axes = [Vec::new(), Vec::new()];
    for axis in (0..rank).rev() {
        let (x, y) = (at(a, axis), at(b, axis));
        if x != y && x != 1 && y != 1 {
            return Err(OpError::invalid(format!("shapes {a:?} and {b:?} do not broadcast")));
        }
        for (list, size, other, len) in [(0, x, y, a.len()), (1, y, x, b.len())] {
            if (size == 1 && other != 1) || axis + len < rank {
                axes[list].push(axis as i64);
            }
        }
    }
    Ok(axes)
}

impl Op for BroadcastGradientArgs {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 2)?;
        for k in 0..2 {
            cx.expect_dtype(k, "int64", |dtype| dtype == DType::I64)?;
        }
        let axes = match (cx.ints(0), cx.ints(1)) {
            (Some(a), Some(b)) => Some(broadcast_axes(&a, &b)?),
            _ => None,
        };
        for k in 0..2 {
            let shape = match &axes {
                Some(axes) => Shape::known(&[axes[k].len()]),
                None => cx.unknown_shape(k, 1),
            };
            cx.set_output(k, DType::I64, Some(shape));
            if let Some(axes) = &axes {
                cx.set_output_sizes(k, Some(axes[k].iter().map(|&axis| Dim::Known(axis as usize)).collect()));
            }
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let ints = |k: usize| cx.constant(k).and_then(Tensor::to_i64);
        let (Some(a), Some(b)) = (ints(0), ints(1)) else {
            return Err(OpError::unsupported("the shapes must be known before compilation"));
        };
        for (k, axes) in broadcast_axes(&a, &b)?.into_iter().enumerate() {
            let buffer = cx.constant_buffer("axes", &Tensor::i64(&[axes.len()], &axes));
            cx.alias_buffer(k, buffer);
        }
        Ok(())
    }
}

/// Emits the axes where one shape has 1 and the other does not, as a vector. Axes where both have 1 need no sum,
/// because the result is reshaped to the operand's shape.
fn decompose_broadcast_args(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let shapes = [rw.required_input(0)?, rw.required_input(1)?];
    let (one, flat) = (rw.ints("one", &[1]), rw.ints("flat", &[-1]));
    let mut padded = Vec::new();
    let lengths = shapes.map(|shape| rw.add("Shape", &[shape], Attrs::new()));
    let rank = rw.add("Max", &lengths, Attrs::new());
    for (shape, length) in shapes.into_iter().zip(lengths) {
        let missing = rw.add("Sub", &[rank, length], Attrs::new());
        let ones = rw.add("Expand", &[one, missing], Attrs::new());
        padded.push(rw.add("Concat", &[ones, shape], Attrs::new().with("axis", 0i64)));
    }
    let is_one = [0, 1].map(|k| rw.add("Equal", &[padded[k], one], Attrs::new()));
    for k in 0..2 {
        if !rw.has_output(k) {
            continue;
        }
        let other = rw.add("Not", &[is_one[1 - k]], Attrs::new());
        let is_reduced = rw.add("And", &[is_one[k], other], Attrs::new());
        let positions = rw.add("NonZero", &[is_reduced], Attrs::new());
        let axes = rw.add("Reshape", &[positions, flat], Attrs::new());
        rw.replace_output(k, axes);
    }
    Ok(())
}

fn build_constant(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let attrs = &node.attrs;
    let value = if let Some(value) = attrs.tensor("value")? {
        value.clone()
    } else if let Some(value) = attrs.float("value_float")? {
        Tensor::f32(&[], &[value])
    } else if let Some(values) = attrs.floats("value_floats")? {
        Tensor::f32(&[values.len()], values)
    } else if let Some(value) = attrs.int("value_int")? {
        Tensor::i64(&[], &[value])
    } else if let Some(values) = attrs.ints("value_ints")? {
        Tensor::i64(&[values.len()], values)
    } else {
        return Err(OpError::unsupported("its value must be a tensor or numbers; strings are not supported"));
    };
    Ok(Box::new(Constant { value }))
}

fn build_constant_of_shape(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let value = node.attrs.tensor("value")?.cloned().unwrap_or_else(|| Tensor::f32(&[1], &[0.0]));
    if value.len() != 1 {
        return Err(OpError::invalid(format!("value has {} elements, expected one", value.len())));
    }
    let value = value.reshaped(vec![1]).map_err(|error| OpError::invalid(error.to_string()))?;
    Ok(Box::new(ConstantOfShape { value }))
}

fn axes_to_input(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 13 { ints_attribute_to_input(rw, "axes", 1) } else { Ok(()) }
}

/// Moves the axes to an attribute. Axes that count from the end came with opset 11.
fn axes_to_attribute(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() >= 13 {
        return Ok(());
    }
    let x = rw.required_input(0)?;
    let named = rw.input(1).and_then(|axes| rw.constant_of(axes)).and_then(Tensor::to_i64);
    if let (Some(named), Some(rank), true) = (named, rw.shape(x).map(Shape::rank), rw.version() < 11) {
        let rank = rank + if &*rw.node().op == "Unsqueeze" { named.len() } else { 0 };
        let axes: Vec<i64> = normalize_axes(&named, rank)?.into_iter().map(|axis| axis as i64).collect();
        rw.emit_same_op(&[Some(x)], Attrs::new().with("axes", axes));
        return Ok(());
    }
    ints_input_to_attribute(rw, "axes", 1)
}

/// Emits zeros of a shape in operators of opset 7, if the shape is constant or the shape of a value.
fn zeros_of_shape(rw: &mut Rewrite<'_>, shape: ValueId, dtype: DType) -> Option<ValueId> {
    if let Some(dims) = rw.constant_of(shape).and_then(Tensor::to_i64) {
        let dims: Option<Vec<usize>> = dims.into_iter().map(|dim| usize::try_from(dim).ok()).collect();
        return Some(rw.constant("zeros", Tensor::zeros(dtype, dims?).ok()?));
    }
    let maker = rw.producer_of(shape).filter(|maker| &*maker.op == "Shape" && maker.attrs.0.is_empty())?;
    let like = maker.inputs.first().copied().flatten()?;
    // False everywhere, for any elements: NaN does not leak.
    let never = match rw.dtype(like)? {
        float if float.is_float() => rw.add("Less", &[like, like], Attrs::new()),
        DType::Bool | DType::I32 | DType::I64 => {
            let always = rw.add("Equal", &[like, like], Attrs::new());
            rw.add("Not", &[always], Attrs::new())
        }
        _ => return None,
    };
    Some(rw.add("Cast", &[never], Attrs::new().with("to", i64::from(dtype.to_onnx()))))
}

/// Replaces Expand before opset 8 by an addition of zeros of the shape.
fn downgrade_expand(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, shape) = (rw.required_input(0)?, rw.required_input(1)?);
    let Some(dtype) = rw.dtype(x).filter(|dtype| rw.version() < 8 && dtype.is_float()) else { return Ok(()) };
    if let Some(zeros) = zeros_of_shape(rw, shape, dtype) {
        let wide = rw.add("Add", &[x, zeros], Attrs::new());
        rw.replace_output(0, wide);
    }
    Ok(())
}

/// Replaces ConstantOfShape before opset 9: the constant is added to zeros of the shape.
fn downgrade_constant_of_shape(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let shape = rw.required_input(0)?;
    let value = rw.attrs().tensor("value")?.cloned().unwrap_or_else(|| Tensor::scalar(DType::F32, 0.0));
    let dtype = value.dtype();
    if rw.version() >= 9 || !dtype.is_float() {
        return Ok(());
    }
    if let Some(zeros) = zeros_of_shape(rw, shape, dtype) {
        let value =
            rw.constant("value", Tensor::scalar(dtype, value.to_f64().first().copied().unwrap_or(0.0)));
        let filled = rw.add("Add", &[zeros, value], Attrs::new());
        rw.replace_output(0, filled);
    }
    Ok(())
}

/// Removes `allowzero`: before opset 14 a size of 0 always copies the input's axis, which only matters for empty
/// tensors.
fn downgrade_reshape(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 14 && rw.attrs().0.contains_key("allowzero") {
        let inputs = rw.node().inputs.to_vec();
        rw.emit_same_op(&inputs, Attrs::new());
    }
    Ok(())
}

/// Slices the result of Shape before opset 15, which has no `start` and `end`.
fn downgrade_shape(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (start, end) = (rw.attrs().int("start")?, rw.attrs().int("end")?);
    if rw.version() >= 15 || (start.is_none() && end.is_none()) {
        return Ok(());
    }
    let x = rw.required_input(0)?;
    let full_shape = rw.add("Shape", &[x], Attrs::new());
    let starts = rw.ints("start", &[start.unwrap_or(0)]);
    let ends = rw.ints("end", &[end.unwrap_or(i64::MAX)]);
    let part = rw.add("Slice", &[full_shape, starts, ends], Attrs::new());
    rw.replace_output(0, part);
    Ok(())
}

/// Converts numbers to a tensor: the attributes for numbers came with opset 12.
fn downgrade_constant(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 12 && rw.attrs().tensor("value")?.is_none() {
        let attrs = rw.attrs();
        let value = match (attrs.float("value_float")?, attrs.floats("value_floats")?) {
            (Some(value), _) => Tensor::f32(&[], &[value]),
            (_, Some(values)) => Tensor::f32(&[values.len()], values),
            _ => match (attrs.int("value_int")?, attrs.ints("value_ints")?) {
                (Some(value), _) => Tensor::i64(&[], &[value]),
                (_, Some(values)) => Tensor::i64(&[values.len()], values),
                _ => return Ok(()),
            },
        };
        rw.emit_same_op(&[], Attrs::new().with("value", value));
    }
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    const AXES: &[i64] = &[1, 11, 13, 21, 23, 24, 25];
    vec![
        Definition::new("", "Reshape", &[5, 13, 14, 19, 21, 23, 24, 25], |_, node| {
            Ok(Box::new(View::Reshape { allow_zero: node.attrs.int("allowzero")?.unwrap_or(0) != 0 }))
        })
        .class(Class::Reshape)
        .traits(Traits::KEEPS_ELEMENTS.and(Traits::SHAPED_BY_INPUTS))
        .inputs_without_gradient(&[1])
        .downgrade(downgrade_reshape),
        Definition::new("", "Flatten", &[1, 9, 11, 13, 21, 23, 24, 25], |_, node| {
            Ok(Box::new(View::Flatten { axis: node.attrs.int("axis")?.unwrap_or(1) }))
        })
        .class(Class::Flatten)
        .traits(
            Traits::MOVES.and(Traits::KEEPS_SCORES).and(Traits::KEEPS_DECISION).and(Traits::FOLLOWS_HEAD),
        ),
        Definition::new("", "Squeeze", AXES, |_, _| Ok(Box::new(View::Squeeze)))
            .traits(Traits::KEEPS_ELEMENTS.and(Traits::SHAPED_BY_INPUTS))
            .inputs_without_gradient(&[1])
            .upgrade(axes_to_input)
            .downgrade(axes_to_attribute),
        Definition::new("", "Unsqueeze", AXES, |_, _| Ok(Box::new(View::Unsqueeze)))
            .class(Class::Unsqueeze)
            .traits(Traits::MOVES.and(Traits::SHAPED_BY_INPUTS).and(Traits::KEEPS_SCORES))
            .inputs_without_gradient(&[1])
            .upgrade(axes_to_input)
            .downgrade(axes_to_attribute),
        Definition::new("", "Transpose", &[1, 13, 21, 23, 24, 25], |_, node| {
            Ok(Box::new(Transpose { perm: node.attrs.ints("perm")?.map(<[i64]>::to_vec) }))
        })
        .class(Class::Transpose)
        .traits(Traits::MOVES.and(Traits::KEEPS_SCORES).and(Traits::KEEPS_DECISION)),
        Definition::new("", "Expand", &[8, 13], |_, _| Ok(Box::new(Expand)))
            .class(Class::Expand)
            .traits(Traits::MOVES.and(Traits::SHAPED_BY_INPUTS))
            .inputs_without_gradient(&[1])
            .downgrade(downgrade_expand),
        Definition::new("", "Shape", &[1, 13, 15, 19, 21, 23, 24, 25], |_, node| {
            let (start, end) = (node.attrs.int("start")?.unwrap_or(0), node.attrs.int("end")?);
            Ok(Box::new(ShapeOf { start, end }))
        })
        .class(Class::Shape)
        .inputs_without_gradient(&[0])
        .downgrade(downgrade_shape),
        Definition::new("", "Size", &[1, 13, 19, 21, 23, 24, 25], |_, _| Ok(Box::new(Size)))
            .class(Class::Size)
            .inputs_without_gradient(&[0]),
        Definition::new("", "Identity", &[1, 13, 14, 16, 19, 21, 23, 24, 25], |_, _| Ok(Box::new(Identity)))
            .class(Class::Copy)
            .traits(Traits::KEEPS_ELEMENTS),
        Definition::new("", "Constant", &[1, 9, 11, 12, 13, 19, 21, 23, 24, 25], build_constant)
            .class(Class::Constant)
            .sample(|_| Sample::of(Attrs::new().with("value_float", 1.0f32)))
            .downgrade(downgrade_constant),
        Definition::new("", "ConstantOfShape", &[9, 20, 21, 23, 24, 25], build_constant_of_shape)
            .class(Class::Fill)
            .inputs_without_gradient(&[0])
            .downgrade(downgrade_constant_of_shape),
        Definition::new("com.microsoft", "BroadcastGradientArgs", &[1], |_, _| {
            Ok(Box::new(BroadcastGradientArgs))
        })
        .decompose(decompose_broadcast_args),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::ValueId;

    use super::*;
    use crate::passes;
    use crate::testing::{add, generic_tensor, graph, run};

    /// Reshapes `x`, which has a symbolic first axis, to its first size followed by `rest`.
    fn split_first_axis(x: &Tensor, rest: &[i64]) -> (Graph, ValueId) {
        let (mut graph, ids) = graph(&[x]);
        let mut dims: Vec<Dim> = x.dims().iter().map(|&dim| Dim::Known(dim)).collect();
        dims[0] = Dim::symbol("N");
        graph.value_mut(ids[0]).ty = ValueType::Tensor(x.dtype(), Some(dims.into_iter().collect()));
        let sizes = add(&mut graph, ("", "Shape"), "sizes", &[Some(ids[0])], 1, Attrs::new())[0];
        let zero = graph.add_constant("zero", Tensor::i64(&[1], &[0]));
        let first = add(&mut graph, ("", "Gather"), "first", &[Some(sizes), Some(zero)], 1, Attrs::new())[0];
        let rest = graph.add_constant("rest", Tensor::i64(&[rest.len()], rest));
        let axis = Attrs::new().with("axis", 0i64);
        let shape = add(&mut graph, ("", "Concat"), "shape", &[Some(first), Some(rest)], 1, axis)[0];
        graph.outputs.clear();
        let y = add(&mut graph, ("", "Reshape"), "y", &[Some(ids[0]), Some(shape)], 1, Attrs::new())[0];
        passes::infer::infer(&mut graph).expect("valid");
        (graph, y)
    }

    #[test]
    fn infers_open_size_among_computed_sizes() {
        let (graph, y) = split_first_axis(&generic_tensor(&[5, 12], 1), &[-1, 3, 2]);
        let shape = [Dim::symbol("N"), Dim::Known(2), Dim::Known(3), Dim::Known(2)];
        assert_eq!(graph.value(y).ty.shape(), Some(&shape.into_iter().collect()));
        for batch in [5, 1, 0] {
            let got = run(&graph, &[generic_tensor(&[batch, 12], 1)]).expect("the graph runs");
            assert_eq!(got[0].dims(), [batch, 2, 3, 2]);
        }
    }

    #[test]
    fn rejects_open_size_with_empty_axis() {
        // 0 elements are a multiple of every size, if the empty axis is at another position.
        let (mut graph, ids) = graph(&[&generic_tensor(&[2, 0], 1)]);
        let shape = graph.add_constant("shape", Tensor::i64(&[3], &[0, 0, -1]));
        let allow = Attrs::new().with("allowzero", 1i64);
        add(&mut graph, ("", "Reshape"), "y", &[Some(ids[0]), Some(shape)], 1, allow);
        assert!(passes::infer::infer(&mut graph).is_err());
    }
}
