//! Reductions along axes: sums, means, products, norms and extremes, and ONNX Runtime's operators for their gradients.
//!
//! ReduceSum-1, 11, 13, ReduceMean, ReduceProd, ReduceL1, ReduceL2, ReduceSumSquare-1, 11, 13, 18, ReduceLogSum,
//! ReduceLogSumExp-1, 11, 13, 18, 28 and ReduceMax, ReduceMin-1, 11, 12, 13, 18, 20 of ONNX. Of `com.microsoft`:
//! `ReduceSumTraining` (a sum with axes that may be computed), `Scale` (a tensor times or divided by one number of any
//! type) and `ReduceAllL2` (the norm of several tensors together). The axes are an attribute before opset 13 (sum) and
//! 18 (the others), and an input from this opset on; `noop_with_empty_axes` came with the input. Axes must be known
//! once all shapes are.
//!
//! Numbers:
//! - Narrow floats are summed in float32. Integers wrap, and the mean of integers is truncated. Roots and logarithms of
//!   integers are computed in float64 and truncated.
//! - Over zero elements the sum is 0 and the mean NaN (0 for integers). The maximum is then the lowest number of the
//!   type and the minimum the highest, infinity included.
//! - An extreme of elements with a NaN is NaN. Tied elements share the gradient of an extreme equally.
//! - The gradient of a product consists of exclusive products, so that a single zero factor gets the product of the
//!   others. The gradient of ReduceL2 is 0 if the norm is 0.

use ortrain_expr::{Access, BinaryOp, CompareOp, Inst, ReduceOp, Reg, Scalar, Strides, Type, UnaryOp};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};

use crate::OpError;
use crate::class::{Class, Traits};
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axes};
use crate::lower::{Lower, NestBuilder};
use crate::op::{BuildFn, Definition, Op};
use crate::rewrite::{Rewrite, ints_attribute_to_input, ints_input_to_attribute};
use crate::support::formula::formula;

/// Reduction operation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Sum,
    Mean,
    Max,
    Min,
    Prod,
    /// Sum of absolute values.
    L1,
    /// Square root of the sum of squares.
    L2,
    SumSquare,
    /// Logarithm of the sum.
    LogSum,
    /// Logarithm of the sum of exponentials.
    LogSumExp,
}

impl Kind {
    /// Returns true if the reduction of a single element is the element.
    fn is_identity_on_one_element(self) -> bool {
        matches!(self, Kind::Sum | Kind::Mean | Kind::Max | Kind::Min | Kind::Prod)
    }

    /// Returns true if results are computed as floats for every element type.
    fn computes_in_float(self) -> bool {
        matches!(self, Kind::L2 | Kind::LogSum | Kind::LogSumExp)
    }

    fn is_extreme(self) -> bool {
        matches!(self, Kind::Max | Kind::Min)
    }

    fn reduce_op(self) -> ReduceOp {
        match self {
            Kind::Max => ReduceOp::Max,
            Kind::Min => ReduceOp::Min,
            Kind::Prod => ReduceOp::Prod,
            _ => ReduceOp::Sum,
        }
    }
}

/// Returns the highest or lowest number of a type: the minimum or maximum of zero elements.
fn type_limit(dtype: DType, largest: bool) -> Scalar {
    let bits = 8 * dtype.size() as u32;
    match Type::of(dtype) {
        Type::Bool => Scalar::Bool(largest),
        Type::F32 if largest => Scalar::F32(f32::INFINITY),
        Type::F32 => Scalar::F32(f32::NEG_INFINITY),
        Type::F64 if largest => Scalar::F64(f64::INFINITY),
        Type::F64 => Scalar::F64(f64::NEG_INFINITY),
        Type::U32 => Scalar::U32(if largest { u32::MAX >> (32 - bits) } else { 0 }),
        Type::U64 => Scalar::U64(if largest { u64::MAX } else { 0 }),
        Type::I32 => Scalar::I32(if largest { i32::MAX >> (32 - bits) } else { i32::MIN >> (32 - bits) }),
        Type::I64 => Scalar::I64(if largest { i64::MAX } else { i64::MIN }),
    }
}

/// Reduction along axes.
struct Reduce {
    kind: Kind,
    keepdims: bool,
    noop_with_empty_axes: bool,
}

impl Reduce {
    /// Returns the reduced axes, ascending, from the `named` axes.
    fn resolve_axes(&self, named: &[i64], rank: usize) -> Result<Vec<usize>, OpError> {
        match named {
            [] if self.noop_with_empty_axes => Ok(Vec::new()),
            [] => Ok((0..rank).collect()),
            _ => normalize_axes(named, rank),
        }
    }

    /// Returns the shape of the result.
    fn result_shape(&self, cx: &Infer<'_>) -> Result<Option<Shape>, OpError> {
        let named = if cx.has_input(1) { cx.ints(1) } else { Some(Vec::new()) };
        let Some(shape) = cx.shape(0) else {
            let reduces_all = named.as_deref() == Some(&[]) && !self.noop_with_empty_axes && !self.keepdims;
            return Ok(reduces_all.then(Shape::scalar));
        };
        if let Some(named) = named {
            let axes = self.resolve_axes(&named, shape.rank())?;
            let remaining = shape.iter().enumerate().filter_map(|(axis, dim)| match axes.contains(&axis) {
                false => Some(dim.clone()),
                true => self.keepdims.then_some(Dim::Known(1)),
            });
            return Ok(Some(remaining.collect()));
        }
        if self.keepdims {
            // Every axis keeps its size or becomes 1.
            let dim =
                |axis: usize| if shape[axis].is_one() { Dim::Known(1) } else { cx.unknown_dim(0, axis) };
            return Ok(Some((0..shape.rank()).map(dim).collect()));
        }
        let count = cx.shape(1).and_then(|axes| axes.first().and_then(Dim::known));
        Ok(match count {
            Some(0) if self.noop_with_empty_axes => Some(shape.clone()),
            Some(0) => Some(Shape::scalar()),
            Some(count) if count <= shape.rank() => Some(cx.unknown_shape(0, shape.rank() - count)),
            Some(count) => {
                let message =
                    format!("cannot reduce {count} axes of {shape}, which has {} axes", shape.rank());
                return Err(OpError::invalid(message));
            }
            None => None,
        })
    }
}

impl Op for Reduce {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 2, 1)?;
        let dtype = if self.kind.is_extreme() {
            cx.dtype(0)?
        } else {
            cx.expect_dtype(0, "a number type", DType::is_number)?
        };
        if cx.has_input(1) {
            cx.expect_dtype(1, "int64", |dtype| dtype == DType::I64)?;
            if let Some(axes) = cx.shape(1)
                && axes.rank() != 1
            {
                return Err(OpError::invalid(format!("axes have shape {axes}, expected a vector")));
            }
        }
        let shape = self.result_shape(cx)?;
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let x = cx.input(0)?;
        let shape = cx.shape(x).cloned();
        let named = match cx.optional_input(1) {
            Some(axes) => cx.constant_of(axes).and_then(Tensor::to_i64),
            None => Some(Vec::new()),
        };
        let axes = match (&named, &shape) {
            (Some(named), Some(shape)) => Some(self.resolve_axes(named, shape.rank())?),
            _ => None,
        };
        if axes.as_deref() == Some(&[]) && self.kind.is_identity_on_one_element() {
            cx.set_grad(0, g);
            return Ok(());
        }
        // A scalar from all axes can be expanded directly.
        let to_scalar = named.as_deref() == Some(&[]) && !self.noop_with_empty_axes;
        let axes_value = match (&axes, cx.optional_input(1)) {
            _ if to_scalar => None,
            // Without a reduced axis the shape is unchanged.
            (Some(axes), _) if axes.is_empty() => None,
            (Some(axes), _) => {
                let axes: Vec<i64> = axes.iter().map(|&axis| axis as i64).collect();
                Some(cx.ints("axes", &axes))
            }
            (None, Some(axes)) => Some(axes),
            (None, None) => return Err(OpError::unsupported("the rank of its input must be known")),
        };
        if self.kind.is_extreme() {
            return self.extreme_gradient(cx, g, axes_value);
        }
        match self.kind {
            Kind::Prod => return self.product_gradient(cx, g, axes.as_deref(), axes_value),
            Kind::L1 | Kind::L2 | Kind::SumSquare | Kind::LogSum | Kind::LogSumExp => {
                return self.norm_gradient(cx, g, axes.as_deref() == Some(&[]), axes_value);
            }
            _ => {}
        }
        let mut gradient = self.restore_reduced_axes(cx, g, axes_value);
        if self.kind == Kind::Mean {
            let sizes = axes.zip(shape).and_then(|(axes, shape)| {
                axes.iter().map(|&axis| shape[axis].known()).collect::<Option<Vec<usize>>>()
            });
            gradient = match sizes.map(|sizes| sizes.iter().product::<usize>()) {
                Some(1) => gradient,
                Some(count) => divide_by_constant(cx, gradient, count)?,
                None => {
                    let (size, reduced) =
                        (cx.add("Size", &[x], Attrs::new()), cx.add("Size", &[g], Attrs::new()));
                    let count = cx.add("Div", &[size, reduced], Attrs::new());
                    let attrs = Attrs::new().with("scale_down", 1i64);
                    cx.add_in("com.microsoft", "Scale", &[gradient, count], attrs)
                }
            };
        }
        let shape = cx.shape_of(x);
        let gradient = cx.add("Expand", &[gradient, shape], Attrs::new());
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (dims, dtype) = (cx.dims(0), cx.dtype(0));
        let named = match (cx.has_input(1), cx.constant(1)) {
            (false, _) => Vec::new(),
            (true, Some(axes)) => axes.to_i64().unwrap_or_default(),
            // A scalar has no axes, and an empty list names no axes.
            (true, None) if dims.is_empty() || cx.dims(1).contains(&0) => Vec::new(),
            // One element: each choice of axes gives the same result.
            (true, None) if dims.iter().all(|&size| size == 1) => Vec::new(),
            (true, None) => {
                return Err(OpError::unsupported(
                    "the axes must not depend on values that the model computes",
                ));
            }
        };
        let axes = self.resolve_axes(&named, dims.len())?;
        let count: usize = axes.iter().map(|&axis| dims[axis]).product();
        if count == 1 && self.kind.is_identity_on_one_element() {
            cx.alias(0, 0);
            return Ok(());
        }
        if count == 0 && self.kind.is_extreme() {
            let output = cx.output(0);
            let mut nest = cx.nest(&cx.out_dims(0), 0);
            let end = nest.b.push(Inst::Const(type_limit(dtype, self.kind == Kind::Min)), Type::of(dtype));
            nest.store_contiguous(cx, output, end);
            return cx.emit(nest.instruction());
        }
        let input_access = Access::contiguous(dtype, &dims);
        // Unreduced axes come first, then the reduced ones; the order within each group is unchanged.
        let order: Vec<usize> =
            (0..dims.len()).filter(|axis| !axes.contains(axis)).chain(axes.iter().copied()).collect();
        let space: Vec<usize> = order.iter().map(|&axis| dims[axis]).collect();
        let strides: Strides = order.iter().map(|&axis| input_access.strides[axis]).collect();
        let (input, output) = (cx.input(0), cx.output(0));
        let mut nest = cx.nest(&space, axes.len());
        let mut value = nest.load_strided(cx, input, 0, &strides);
        if dtype == DType::Bool {
            // True is greater than false.
            value = nest.b.convert(value, Type::I32);
        }
        let reduces = !axes.is_empty();
        let result = self.emit_value(&mut nest, value, reduces, count);
        nest.store_outer(cx, output, result);
        cx.emit(nest.instruction())
    }
}

impl Reduce {
    /// Computes the result from an element. If `reduced` is false, applies only the element-wise part.
    fn emit_value(&self, nest: &mut NestBuilder, value: Reg, reduced: bool, count: usize) -> Reg {
        let reduce = |nest: &mut NestBuilder, op: ReduceOp, value: Reg| {
            if reduced { nest.reduce(op, value) } else { value }
        };
        let dtype = nest.b.ty(value);
        let value = match self.kind.computes_in_float() && !dtype.is_float() {
            true => nest.b.convert(value, Type::F64),
            false => value,
        };
        match self.kind {
            Kind::Sum | Kind::Max | Kind::Min | Kind::Prod => reduce(nest, self.kind.reduce_op(), value),
            Kind::Mean => {
                let sum = reduce(nest, ReduceOp::Sum, value);
                let count = nest.b.constant(dtype, count as f64);
                nest.b.div(sum, count)
            }
            Kind::L1 => {
                let size = nest.b.unary(UnaryOp::Abs, value);
                reduce(nest, ReduceOp::Sum, size)
            }
            Kind::SumSquare => {
                let square = nest.b.mul(value, value);
                reduce(nest, ReduceOp::Sum, square)
            }
            Kind::L2 => {
                let square = nest.b.mul(value, value);
                let sum = reduce(nest, ReduceOp::Sum, square);
                nest.b.unary(UnaryOp::Sqrt, sum)
            }
            Kind::LogSum => {
                let sum = reduce(nest, ReduceOp::Sum, value);
                nest.b.unary(UnaryOp::Log, sum)
            }
            Kind::LogSumExp => {
                let largest = reduce(nest, ReduceOp::Max, value);
                // An infinity is not subtracted from itself.
                let ty = nest.b.ty(largest);
                let (end, zero) = (nest.b.constant(ty, f64::INFINITY), nest.b.constant(ty, 0.0));
                let size = nest.b.unary(UnaryOp::Abs, largest);
                let endless = nest.b.compare(CompareOp::Eq, size, end);
                let base = nest.b.select(endless, zero, largest);
                let shifted = nest.b.sub(value, base);
                let power = nest.b.unary(UnaryOp::Exp, shifted);
                let sum = reduce(nest, ReduceOp::Sum, power);
                let log = nest.b.unary(UnaryOp::Log, sum);
                nest.b.add(log, base)
            }
        }
    }

    /// Computes the gradient of a norm or a logarithm: the incoming gradient with the reduced axes restored, times the
    /// slope at each element.
    fn norm_gradient(
        &self,
        cx: &mut Grad<'_>,
        g: ValueId,
        nothing_reduced: bool,
        axes: Option<ValueId>,
    ) -> Result<(), OpError> {
        let x = cx.input(0)?;
        let dtype = cx.dtype(x)?;
        let g = self.restore_reduced_axes(cx, g, axes);
        let scalar = |cx: &mut Grad<'_>, value: f64| cx.constant("number", Tensor::scalar(dtype, value));
        let gradient = match self.kind {
            Kind::L1 => formula(cx, [g, x], |[g, x]| g * x.sign()),
            Kind::SumSquare => {
                let two = scalar(cx, 2.0);
                formula(cx, [g, x, two], |[g, x, two]| g * (x * two))
            }
            Kind::L2 => {
                let y = cx.output(0, "y");
                let y = self.restore_reduced_axes(cx, y, axes);
                let zero = scalar(cx, 0.0);
                formula(cx, [g, x, y, zero], |[g, x, y, zero]| y.equals(zero).choose(zero, g / y) * x)
            }
            Kind::LogSumExp => {
                let y = cx.output(0, "y");
                let y = self.restore_reduced_axes(cx, y, axes);
                formula(cx, [g, x, y], |[g, x, y]| g * (x - y).exp())
            }
            _ if nothing_reduced => cx.add("Div", &[g, x], Attrs::new()),
            _ => {
                let keepdims = i64::from(self.keepdims || axes.is_some());
                let inputs: Vec<ValueId> = [x].into_iter().chain(axes).collect();
                let sum = cx.add("ReduceSum", &inputs, Attrs::new().with("keepdims", keepdims));
                let share = cx.add("Div", &[g, sum], Attrs::new());
                let shape = cx.shape_of(x);
                cx.add("Expand", &[share, shape], Attrs::new())
            }
        };
        cx.set_grad(0, gradient);
        Ok(())
    }

    /// Computes the gradient of a product: the product of the elements before each element, times the product of the
    /// elements after it.
    fn product_gradient(
        &self,
        cx: &mut Grad<'_>,
        g: ValueId,
        axes: Option<&[usize]>,
        axes_value: Option<ValueId>,
    ) -> Result<(), OpError> {
        let x = cx.input(0)?;
        let (Some(rank), Some(axes)) = (cx.shape(x).map(Shape::rank), axes) else {
            return Err(OpError::unsupported("the rank of its input and the axes must be known"));
        };
        // Merges the reduced axes into one last axis, along which the products run.
        let remaining_axes: Vec<usize> = (0..rank).filter(|axis| !axes.contains(axis)).collect();
        let order: Vec<usize> = remaining_axes.iter().chain(axes).copied().collect();
        let in_order = order.is_sorted();
        let perm = |order: &[usize]| {
            Attrs::new().with("perm", order.iter().map(|&axis| axis as i64).collect::<Vec<_>>())
        };
        let transposed = if in_order { x } else { cx.add("Transpose", &[x], perm(&order)) };
        let flat = if axes.len() == 1 {
            transposed
        } else {
            let rows: Vec<i64> = remaining_axes.iter().map(|_| 0).chain([-1]).collect();
            let rows = cx.ints("rows", &rows);
            cx.add("Reshape", &[transposed, rows], Attrs::new())
        };
        let last = cx.constant("last", Tensor::i64(&[], &[remaining_axes.len() as i64]));
        let exclusive = Attrs::new().with("exclusive", 1i64);
        let before = cx.add("CumProd", &[flat, last], exclusive.clone());
        let after = cx.add("CumProd", &[flat, last], exclusive.with("reverse", 1i64));
        let mut partial_products = cx.add("Mul", &[before, after], Attrs::new());
        if axes.len() != 1 {
            let shape = cx.add("Shape", &[transposed], Attrs::new());
            partial_products =
                cx.add("Reshape", &[partial_products, shape], Attrs::new().with("allowzero", 1i64));
        }
        if !in_order {
            let mut back = vec![0; rank];
            for (to, &from) in order.iter().enumerate() {
                back[from] = to;
            }
            partial_products = cx.add("Transpose", &[partial_products], perm(&back));
        }
        let g = self.restore_reduced_axes(cx, g, axes_value);
        let gradient = cx.add("Mul", &[g, partial_products], Attrs::new());
        cx.set_grad(0, gradient);
        Ok(())
    }
}

impl Reduce {
    /// Restores the reduced axes of a result as axes of size 1. `axes` is absent if all axes were reduced to a scalar.
    fn restore_reduced_axes(&self, cx: &mut Grad<'_>, value: ValueId, axes: Option<ValueId>) -> ValueId {
        match axes {
            Some(axes) if !self.keepdims => cx.add("Unsqueeze", &[value, axes], Attrs::new()),
            _ => value,
        }
    }

    /// Computes the gradient of an extreme: an equal share for each element that is equal to the extreme.
    fn extreme_gradient(&self, cx: &mut Grad<'_>, g: ValueId, axes: Option<ValueId>) -> Result<(), OpError> {
        let (x, y) = (cx.input(0)?, cx.output(0, "y"));
        let dtype = cx.dtype(x)?;
        let (g, y) = (self.restore_reduced_axes(cx, g, axes), self.restore_reduced_axes(cx, y, axes));
        let equal = cx.add("Equal", &[x, y], Attrs::new());
        // A narrow float may not represent large counts.
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let cast = |to: DType| Attrs::new().with("to", i64::from(to.to_onnx()));
        let ones = cx.add("Cast", &[equal], cast(wide));
        let mut attrs = Attrs::new().with("keepdims", i64::from(self.keepdims || axes.is_some()));
        if self.noop_with_empty_axes {
            attrs = attrs.with("noop_with_empty_axes", 1i64);
        }
        let inputs: Vec<ValueId> = [ones].into_iter().chain(axes).collect();
        let count = cx.add("ReduceSum", &inputs, attrs);
        let g = if dtype == wide { g } else { cx.add("Cast", &[g], cast(wide)) };
        let mut share = cx.add("Div", &[g, count], Attrs::new());
        if dtype != wide {
            share = cx.add("Cast", &[share], cast(dtype));
        }
        let zero = cx.constant("zero", Tensor::scalar(dtype, 0.0));
        let gradient = cx.add("Where", &[equal, share, zero], Attrs::new());
        cx.set_grad(0, gradient);
        Ok(())
    }
}

/// Computes `value / count` for a count that may be too large for a narrow float.
fn divide_by_constant(cx: &mut Grad<'_>, value: ValueId, count: usize) -> Result<ValueId, OpError> {
    let dtype = cx.dtype(cx.input(0)?)?;
    if matches!(dtype, DType::F32 | DType::F64) {
        let count = cx.constant("count", Tensor::scalar(dtype, count as f64));
        return Ok(cx.add("Div", &[value, count], Attrs::new()));
    }
    let count = cx.constant("count", Tensor::i64(&[], &[count as i64]));
    Ok(cx.add_in("com.microsoft", "Scale", &[value, count], Attrs::new().with("scale_down", 1i64)))
}

/// Product or quotient of a float tensor and a number of any type.
struct Scale {
    down: bool,
}

impl Op for Scale {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        cx.expect_dtype(1, "a number type", DType::is_number)?;
        if let Some(shape) = cx.shape(1)
            && shape.iter().any(|dim| dim.known().is_some_and(|size| size != 1))
        {
            return Err(OpError::invalid(format!("the scale has shape {shape}, expected one element")));
        }
        cx.set_output(0, dtype, cx.shape(0).cloned());
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (x, scale) = (cx.input(0)?, cx.input(1)?);
        if cx.needs_grad(0) {
            let attrs = Attrs::new().with("scale_down", i64::from(self.down));
            let gradient = cx.add_in("com.microsoft", "Scale", &[g, scale], attrs);
            cx.set_grad(0, gradient);
        }
        if cx.needs_grad(1) {
            // y = x s: sum(g x). y = x / s: -sum(g y) / s.
            let factor = if self.down { cx.output(0, "y") } else { x };
            let product = cx.add("Mul", &[g, factor], Attrs::new());
            let mut gradient = cx.add("ReduceSum", &[product], Attrs::new().with("keepdims", 0i64));
            let to = cx.dtype(scale)?;
            if to != cx.dtype(x)? {
                gradient = cx.add("Cast", &[gradient], Attrs::new().with("to", i64::from(to.to_onnx())));
            }
            if self.down {
                gradient = formula(cx, [gradient, scale], |[gradient, scale]| -(gradient / scale));
            }
            let shape = cx.shape_of(scale);
            let gradient = cx.add("Reshape", &[gradient, shape], Attrs::new());
            cx.set_grad(1, gradient);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.dims(0);
        let (input, scale, output) = (cx.input(0), cx.input(1), cx.output(0));
        let mut nest = cx.nest(&dims, 0);
        let x = nest.load_broadcast(input, cx.dtype(0), &dims);
        let s = nest.load_strided(cx, scale, 0, &vec![0; dims.len()]);
        let s = nest.b.convert(s, Type::of(cx.dtype(0)));
        let op = if self.down { BinaryOp::Div } else { BinaryOp::Mul };
        let y = nest.b.binary(op, x, s);
        nest.store_contiguous(cx, output, y);
        cx.emit(nest.instruction())
    }
}

fn build_reduce(node: &Node, kind: Kind) -> Result<Box<dyn Op>, OpError> {
    let flag = |name: &str, default: i64| Ok::<_, OpError>(node.attrs.int(name)?.unwrap_or(default) != 0);
    Ok(Box::new(Reduce {
        kind,
        keepdims: flag("keepdims", 1)?,
        noop_with_empty_axes: flag("noop_with_empty_axes", 0)?,
    }))
}

fn build_sum(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    build_reduce(node, Kind::Sum)
}

fn build_scale(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Scale { down: node.attrs.int("scale_down")?.unwrap_or(0) != 0 }))
}

fn upgrade_sum(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    ints_attribute_to_input(rw, "axes", 1)
}

fn upgrade_others(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 18 { upgrade_sum(rw) } else { Ok(()) }
}

/// Writes a reduction with axes as an attribute, for opsets older than `input_since`. These opsets have no
/// `noop_with_empty_axes`: if it has an effect, the node becomes an identity.
fn axes_to_attribute(rw: &mut Rewrite<'_>, input_since: i64) -> Result<(), OpError> {
    if rw.version() >= input_since {
        return Ok(());
    }
    let named = match rw.input(1) {
        Some(axes) => rw.constant_of(axes).and_then(Tensor::to_i64),
        None => Some(Vec::new()),
    };
    let noop = rw.attrs().int("noop_with_empty_axes")?.unwrap_or(0) != 0;
    if !noop && rw.input(1).is_none() && !rw.attrs().0.contains_key("noop_with_empty_axes") {
        return Ok(());
    }
    let Some(named) = named else { return ints_input_to_attribute(rw, "axes", 1) };
    let data = rw.required_input(0)?;
    if named.is_empty() && noop {
        rw.emit_op("", "Identity", &[Some(data)], Attrs::new());
        return Ok(());
    }
    let mut attrs = rw.attrs().clone();
    attrs.0.remove("noop_with_empty_axes");
    if !named.is_empty() {
        // Axes that count from the end came with opset 11.
        let named = match rw.shape(data).map(Shape::rank) {
            Some(rank) if rw.version() < 11 => {
                normalize_axes(&named, rank)?.into_iter().map(|axis| axis as i64).collect()
            }
            _ => named,
        };
        attrs = attrs.with("axes", named);
    }
    rw.emit_same_op(&[Some(data)], attrs);
    Ok(())
}

fn downgrade_sum(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    axes_to_attribute(rw, 13)
}

fn downgrade_others(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let bools = rw.input(0).and_then(|id| rw.dtype(id)) == Some(DType::Bool);
    if bools && rw.version() < 20 {
        return Err(OpError::unsupported("the maximum or minimum of bool elements needs opset 20 or newer"));
    }
    axes_to_attribute(rw, 18)
}

/// Rewrites the node to ReduceSum, which accepts computed axes from opset 13 on.
fn decompose_sum_training(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let inputs = rw.node().inputs.to_vec();
    rw.emit_op("", "ReduceSum", &inputs, rw.attrs().clone());
    Ok(())
}

/// Rewrites `Scale` to Cast, Reshape and a product or quotient.
fn decompose_scale(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (mut x, mut scale) = (rw.required_input(0)?, rw.required_input(1)?);
    let dtype = rw.dtype(x).ok_or_else(|| OpError::invalid("the type of input 0 is not known"))?;
    let cast = |to: DType| Attrs::new().with("to", i64::from(to.to_onnx()));
    // A count may be too large for a narrow float.
    let computed = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    if dtype != computed {
        x = rw.add("Cast", &[x], cast(computed));
    }
    let scalar = rw.shape(scale).is_some_and(|shape| shape.rank() == 0);
    if rw.dtype(scale) != Some(computed) {
        scale = rw.add("Cast", &[scale], cast(computed));
    }
    if !scalar {
        // A scale of shape [1] would add an axis to a scalar input.
        let shape = rw.ints("scalar", &[]);
        scale = rw.add("Reshape", &[scale, shape], Attrs::new());
    }
    let op = if rw.attrs().int("scale_down")?.unwrap_or(0) != 0 { "Div" } else { "Mul" };
    let mut result = rw.add(op, &[x, scale], Attrs::new());
    if dtype != computed {
        result = rw.add("Cast", &[result], cast(dtype));
    }
    rw.replace_output(0, result);
    Ok(())
}

/// Versions of reductions other than ReduceSum.
const PLAIN_VERSIONS: &[i64] = &[1, 11, 13, 18];
const LOGARITHM_VERSIONS: &[i64] = &[1, 11, 13, 18, 28];
const EXTREME_VERSIONS: &[i64] = &[1, 11, 12, 13, 18, 20];

fn define_reduction(name: &'static str, since: &'static [i64], build: BuildFn) -> Definition {
    Definition::new("", name, since, build).upgrade(upgrade_others).downgrade(downgrade_others)
}

/// L2 norm of all elements of several tensors of one float type, a scalar of this type. It runs as its decomposition.
struct ReduceAllL2;

impl Op for ReduceAllL2 {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, usize::MAX, 1)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype(0..cx.node().inputs.len())?;
        cx.set_output(0, dtype, Some(Shape::scalar()));
        Ok(())
    }
}

fn decompose_all_l2(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let dtype = rw
        .dtype(rw.required_input(0)?)
        .ok_or_else(|| OpError::invalid("the type of input 0 is not known"))?;
    // The squares of narrow floats are summed in float32.
    let computed = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let cast = |to: DType| Attrs::new().with("to", i64::from(to.to_onnx()));
    let scalar = || Attrs::new().with("keepdims", 0i64);
    let first = rw.ints("first", &[0]);
    let mut norms = Vec::new();
    for k in 0..rw.node().inputs.len() {
        let mut x = rw.required_input(k)?;
        if dtype != computed {
            x = rw.add("Cast", &[x], cast(computed));
        }
        let norm = rw.add("ReduceL2", &[x], scalar());
        norms.push(rw.add("Unsqueeze", &[norm, first], Attrs::new()));
    }
    // The norm of the norms has a gradient where it is zero.
    let norms = rw.add("Concat", &norms, Attrs::new().with("axis", 0i64));
    let mut norm = rw.add("ReduceL2", &[norms], scalar());
    if dtype != computed {
        norm = rw.add("Cast", &[norm], cast(dtype));
    }
    rw.replace_output(0, norm);
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "ReduceSum", &[1, 11, 13], build_sum)
            .class(Class::AxisSum)
            .inputs_without_gradient(&[1])
            .upgrade(upgrade_sum)
            .downgrade(downgrade_sum),
        define_reduction("ReduceMean", PLAIN_VERSIONS, |_, node| build_reduce(node, Kind::Mean))
            .traits(Traits::FOLLOWS_HEAD),
        define_reduction("ReduceProd", PLAIN_VERSIONS, |_, node| build_reduce(node, Kind::Prod)),
        define_reduction("ReduceL1", PLAIN_VERSIONS, |_, node| build_reduce(node, Kind::L1)),
        define_reduction("ReduceL2", PLAIN_VERSIONS, |_, node| build_reduce(node, Kind::L2)),
        define_reduction("ReduceSumSquare", PLAIN_VERSIONS, |_, node| build_reduce(node, Kind::SumSquare)),
        define_reduction("ReduceLogSum", LOGARITHM_VERSIONS, |_, node| build_reduce(node, Kind::LogSum)),
        define_reduction("ReduceLogSumExp", LOGARITHM_VERSIONS, |_, node| {
            build_reduce(node, Kind::LogSumExp)
        }),
        define_reduction("ReduceMax", EXTREME_VERSIONS, |_, node| build_reduce(node, Kind::Max)),
        define_reduction("ReduceMin", EXTREME_VERSIONS, |_, node| build_reduce(node, Kind::Min)),
        Definition::new("com.microsoft", "ReduceSumTraining", &[1], build_sum)
            .differentiated_as(decompose_sum_training),
        Definition::new("com.microsoft", "Scale", &[1], build_scale).decompose(decompose_scale),
        Definition::new("com.microsoft", "ReduceAllL2", &[1], |_, _| Ok(Box::new(ReduceAllL2)))
            .composition(decompose_all_l2),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes;
    use crate::testing::{
        Failure, assert_close, check_decomposition, check_downgrade, check_gradients, f64s, generic_tensor,
        gradient_graph, one_node_graph, run, run_node,
    };

    const SUM: (&str, &str) = ("", "ReduceSum");
    const MEAN: (&str, &str) = ("", "ReduceMean");
    const MAX: (&str, &str) = ("", "ReduceMax");
    const MIN: (&str, &str) = ("", "ReduceMin");
    const NEWEST: i64 = crate::registry::NEWEST_OPSET;

    fn axes(values: &[i64]) -> Tensor {
        Tensor::i64(&[values.len()], values)
    }

    fn attrs(keepdims: i64, noop: i64) -> Attrs {
        Attrs::new().with("keepdims", keepdims).with("noop_with_empty_axes", noop)
    }

    #[track_caller]
    fn forward(op: (&str, &str), data: &Tensor, named: Option<&[i64]>, attrs: Attrs) -> Tensor {
        let named = named.map(axes);
        run_node(op, &[Some(data), named.as_ref()], 1, attrs).expect("the graph runs").remove(0)
    }

    /// Builds a graph with constant axes, as files have them.
    fn constant_axes(op: (&str, &str), data: &Tensor, named: &[i64], attrs: Attrs) -> Graph {
        let mut graph = one_node_graph(NEWEST, op, &[Some(data), Some(&axes(named))], 1, attrs)
            .expect("the graph is valid");
        let id = graph.inputs.pop().expect("the axes");
        graph.value_mut(id).constant = Some(axes(named));
        let y = graph.outputs[0];
        graph.value_mut(y).ty = ortrain_graph::ValueType::Unknown;
        passes::infer::infer(&mut graph).expect("the graph is valid");
        graph
    }

    #[test]
    fn sums_along_axes() {
        let data = f64s(&[2, 3, 2], &(1..=12).map(f64::from).collect::<Vec<_>>());
        let case = |named: Option<&[i64]>, keep, dims: &[usize], expected: &[f64]| {
            assert_eq!(forward(SUM, &data, named, attrs(keep, 0)), f64s(dims, expected), "{named:?} {keep}");
        };
        case(None, 0, &[], &[78.0]);
        case(Some(&[]), 1, &[1, 1, 1], &[78.0]);
        case(Some(&[1]), 0, &[2, 2], &[9.0, 12.0, 27.0, 30.0]);
        case(Some(&[-2]), 1, &[2, 1, 2], &[9.0, 12.0, 27.0, 30.0]);
        case(Some(&[2, 0]), 0, &[3], &[18.0, 26.0, 34.0]);
        case(Some(&[0]), 0, &[3, 2], &[8.0, 10.0, 12.0, 14.0, 16.0, 18.0]);
        assert_eq!(forward(SUM, &data, Some(&[]), attrs(1, 1)), data);
        assert_eq!(forward(SUM, &data, None, attrs(0, 1)), data);
    }

    /// Axes that arrive with the inputs of a run, for an element that keeps its shape with each choice of axes.
    #[test]
    fn runtime_axes_of_one_element() {
        let data = f64s(&[1, 1], &[-3.0]);
        for (op, expected) in
            [("ReduceSum", -3.0), ("ReduceMean", -3.0), ("ReduceL1", 3.0), ("ReduceSumSquare", 9.0)]
        {
            for (noop, named) in [(0, &[][..]), (1, &[]), (0, &[1]), (1, &[0, 1])] {
                let result = forward(("", op), &data, Some(named), attrs(1, noop));
                assert_eq!(result, f64s(&[1, 1], &[expected]), "{op} {noop} {named:?}");
            }
        }
    }

    #[test]
    fn means_of_floats_and_integers() {
        let data = f64s(&[2, 2], &[1.0, 2.0, 4.0, 9.0]);
        assert_eq!(forward(MEAN, &data, Some(&[-1]), attrs(0, 0)), f64s(&[2], &[1.5, 6.5]));
        let integers = Tensor::i64(&[2, 2], &[1, 2, -4, -9]);
        assert_eq!(forward(MEAN, &integers, Some(&[1]), attrs(0, 0)), Tensor::i64(&[2], &[1, -6]));
        let bytes = Tensor::from_slice(DType::U8, &[3], &[200u8, 100, 3]);
        assert_eq!(forward(SUM, &bytes, None, attrs(0, 0)), Tensor::from_slice(DType::U8, &[], &[47u8]));
    }

    #[test]
    fn narrow_floats_are_summed_in_float32() {
        let ones = Tensor::filled(DType::F16, &[4096], 1.0);
        assert_eq!(forward(SUM, &ones, None, attrs(0, 0)).to_f64(), [4096.0]);
        let ones = Tensor::filled(DType::BF16, &[1000], 1.0);
        assert_eq!(forward(MEAN, &ones, None, attrs(0, 0)).to_f64(), [1.0]);
    }

    #[test]
    fn reductions_without_reduced_axes() {
        let empty = Tensor::f32(&[2, 0], &[]);
        assert_eq!(forward(SUM, &empty, Some(&[1]), attrs(0, 0)).to_f64(), [0.0, 0.0]);
        assert!(forward(MEAN, &empty, Some(&[1]), attrs(0, 0)).to_f64().iter().all(|x| x.is_nan()));
        assert!(forward(SUM, &empty, Some(&[0]), attrs(0, 0)).is_empty());
        let graph = constant_axes(MEAN, &empty, &[1], attrs(0, 0));
        let gradient = gradient_graph(&graph, &[Some(Tensor::f32(&[2], &[1.0, 1.0]))], &[0]);
        assert_eq!(run(&gradient, &[empty]).expect("the graph runs")[0].dims(), [2, 0]);
        let scalar = Tensor::f32(&[], &[7.0]);
        assert_eq!(forward(MEAN, &scalar, None, attrs(1, 0)), scalar);
    }

    #[test]
    fn extremes_of_every_type() {
        let data = f64s(&[2, 3], &[1.0, -5.0, 3.0, 7.0, 0.0, f64::NAN]);
        assert_eq!(forward(MAX, &data, Some(&[0]), attrs(0, 0)).to_f64()[..2], [7.0, 0.0]);
        assert_eq!(forward(MIN, &data, Some(&[0]), attrs(1, 0)).to_f64()[..2], [1.0, -5.0]);
        for op in [MAX, MIN] {
            assert!(forward(op, &data, Some(&[0]), attrs(0, 0)).to_f64()[2].is_nan());
            assert!(forward(op, &data, None, attrs(0, 0)).to_f64()[0].is_nan());
        }
        for dtype in DType::ALL {
            let data = Tensor::filled(dtype, &[2, 2], 1.0);
            for op in [MAX, MIN] {
                assert_eq!(forward(op, &data, Some(&[1]), attrs(0, 0)), Tensor::filled(dtype, &[2], 1.0));
            }
        }
        let flags = Tensor::from_slice(DType::Bool, &[2, 2], &[1u8, 0, 0, 0]);
        let got = |op| forward(op, &flags, Some(&[1]), attrs(0, 0)).to_f64();
        assert_eq!((got(MAX), got(MIN)), (vec![1.0, 0.0], vec![0.0, 0.0]));
        let wide = Tensor::i64(&[2], &[i64::MAX, i64::MAX - 1]);
        assert_eq!(forward(MIN, &wide, None, attrs(0, 0)), Tensor::i64(&[], &[i64::MAX - 1]));
    }

    #[test]
    fn extremes_of_zero_elements() {
        let ends: [(DType, f64, f64); 8] = [
            (DType::F32, f64::NEG_INFINITY, f64::INFINITY),
            (DType::F16, f64::NEG_INFINITY, f64::INFINITY),
            (DType::F64, f64::NEG_INFINITY, f64::INFINITY),
            (DType::I8, -128.0, 127.0),
            (DType::I16, -32768.0, 32767.0),
            (DType::I32, -2_147_483_648.0, 2_147_483_647.0),
            (DType::U8, 0.0, 255.0),
            (DType::Bool, 0.0, 1.0),
        ];
        for (dtype, low, high) in ends {
            let empty = Tensor::filled(dtype, &[2, 0], 0.0);
            assert_eq!(forward(MAX, &empty, Some(&[1]), attrs(0, 0)).to_f64(), [low, low], "{dtype}");
            assert_eq!(forward(MIN, &empty, None, attrs(1, 0)).to_f64(), [high], "{dtype}");
        }
        let empty = Tensor::f32(&[2, 0], &[]);
        let graph = constant_axes(MAX, &empty, &[1], attrs(0, 0));
        let gradient = gradient_graph(&graph, &[Some(Tensor::f32(&[2], &[1.0, 1.0]))], &[0]);
        assert_eq!(run(&gradient, &[empty]).expect("the graph runs")[0].dims(), [2, 0]);
    }

    #[test]
    fn ties_share_the_gradient_of_an_extreme() {
        let inf = f64::INFINITY;
        let data = f64s(&[3, 4], &[2.0, 5.0, 5.0, 1.0, -inf, -inf, -inf, -inf, 4.0, inf, 3.0, inf]);
        let graph = constant_axes(MAX, &data, &[1], attrs(0, 0));
        let gradient = gradient_graph(&graph, &[Some(f64s(&[3], &[6.0, 8.0, 1.0]))], &[0]);
        let got = run(&gradient, std::slice::from_ref(&data)).expect("the graph runs").remove(0);
        assert_eq!(got.to_f64(), [0.0, 3.0, 3.0, 0.0, 2.0, 2.0, 2.0, 2.0, 0.0, 0.5, 0.0, 0.5]);
        check_decomposition(&gradient, &[data], 0.0);
        // More ties than a narrow float can count.
        let zeros = Tensor::filled(DType::F16, &[100_000], 0.0);
        let graph = constant_axes(MIN, &zeros, &[0], attrs(0, 0));
        let gradient = gradient_graph(&graph, &[Some(Tensor::filled(DType::F16, &[], 1000.0))], &[0]);
        let got = run(&gradient, &[zeros]).expect("the graph runs").remove(0).to_f64();
        assert!(got.iter().all(|&x| (x - 0.01).abs() < 1e-5), "{}", got[0]);
    }

    #[test]
    fn norms_and_logarithms() {
        let data = f64s(&[2, 2], &[3.0, -4.0, 0.0, 0.0]);
        let inf = f64::INFINITY;
        for (name, expected) in [
            ("ReduceL1", [7.0, 0.0]),
            ("ReduceL2", [5.0, 0.0]),
            ("ReduceSumSquare", [25.0, 0.0]),
            ("ReduceProd", [-12.0, 0.0]),
            ("ReduceLogSumExp", [3.0 + f64::exp(-7.0).ln_1p(), 2f64.ln()]),
        ] {
            let got = forward(("", name), &data, Some(&[1]), attrs(0, 0));
            assert_close(&got, &f64s(&[2], &expected), 1e-15);
        }
        let logs = forward(("", "ReduceLogSum"), &f64s(&[3], &[1.0, 2.0, 5.0]), None, attrs(0, 0));
        assert_close(&logs, &f64s(&[], &[8f64.ln()]), 1e-15);
        // Infinities are not subtracted from each other, and a large number does not overflow.
        let rows = f64s(&[3, 2], &[-inf, -inf, inf, 1.0, 1000.0, 1000.0]);
        let got = forward(("", "ReduceLogSumExp"), &rows, Some(&[1]), attrs(0, 0));
        assert_close(&got, &f64s(&[3], &[-inf, inf, 1000.0 + 2f64.ln()]), 1e-15);
        let empty = Tensor::f32(&[2, 0], &[]);
        let of_nothing = |name: &str| forward(("", name), &empty, Some(&[1]), attrs(0, 0)).to_f64()[0];
        assert_eq!(
            ["ReduceProd", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"].map(of_nothing),
            [1.0, 0.0, -inf, -inf]
        );
        // Without axes each element is its own row.
        for (name, expected) in
            [("ReduceL1", 4.0), ("ReduceL2", 4.0), ("ReduceSumSquare", 16.0), ("ReduceProd", -4.0)]
        {
            assert_eq!(forward(("", name), &data, Some(&[]), attrs(0, 1)).to_f64()[1], expected, "{name}");
        }
        let integers = Tensor::i64(&[2], &[3, -4]);
        assert_eq!(forward(("", "ReduceL2"), &integers, None, attrs(0, 0)), Tensor::i64(&[], &[5]));
        assert_eq!(forward(("", "ReduceProd"), &integers, None, attrs(0, 0)), Tensor::i64(&[], &[-12]));
    }

    #[test]
    fn gradients_where_a_norm_or_factors_are_zero() {
        let slopes = |name: &str, data: &Tensor| {
            let graph = constant_axes(("", name), data, &[1], attrs(0, 0));
            let ones = Tensor::filled(DType::F64, &[data.dims()[0]], 1.0);
            run(&gradient_graph(&graph, &[Some(ones)], &[0]), std::slice::from_ref(data))
                .expect("the graph runs")
                .remove(0)
        };
        let data = f64s(&[2, 2], &[3.0, -4.0, 0.0, 0.0]);
        assert_close(&slopes("ReduceL2", &data), &f64s(&[2, 2], &[0.6, -0.8, 0.0, 0.0]), 1e-15);
        assert_close(&slopes("ReduceL1", &data), &f64s(&[2, 2], &[1.0, -1.0, 0.0, 0.0]), 0.0);
        let factors = f64s(&[3, 3], &[2.0, 3.0, 4.0, 2.0, 0.0, 4.0, 0.0, 3.0, 0.0]);
        let products = f64s(&[3, 3], &[12.0, 8.0, 6.0, 0.0, 8.0, 0.0, 0.0, 0.0, 0.0]);
        assert_close(&slopes("ReduceProd", &factors), &products, 0.0);
        let endless = f64s(&[1, 2], &[f64::NEG_INFINITY; 2]);
        assert!(slopes("ReduceLogSumExp", &endless).to_f64().iter().all(|x| x.is_nan()));
    }

    #[test]
    fn gradients_of_norms_and_products() {
        let data = f64s(
            &[2, 3, 2],
            &generic_tensor(&[12], 1).to_f64().iter().map(|x| x.abs() + 0.1).collect::<Vec<_>>(),
        );
        for name in
            ["ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"]
        {
            for named in [&[][..], &[1], &[-1, 0], &[0, 1, 2]] {
                for (keep, noop) in [(0, 0), (1, 0), (0, 1)] {
                    let graph = constant_axes(("", name), &data, named, attrs(keep, noop));
                    check_gradients(&graph, std::slice::from_ref(&data), &[0], &[0]);
                    if name == "ReduceProd" && noop == 0 {
                        let dims = graph.value(graph.outputs[0]).ty.shape().and_then(Shape::concrete);
                        let seed = generic_tensor(&dims.expect("known"), 3);
                        let mut gradient = gradient_graph(&graph, &[Some(seed)], &[0]);
                        passes::infer::infer(&mut gradient).expect("valid");
                        check_downgrade(&gradient, std::slice::from_ref(&data), 9);
                        check_downgrade(&gradient, std::slice::from_ref(&data), 17);
                    }
                }
            }
        }
    }

    #[test]
    fn bool_extremes_need_opset_20() {
        let flags = Tensor::filled(DType::Bool, &[2], 1.0);
        let graph = one_node_graph(NEWEST, MAX, &[Some(&flags)], 1, attrs(0, 0)).expect("valid");
        check_downgrade(&graph, std::slice::from_ref(&flags), 20);
        let error = passes::versions::downgrade(&mut graph.clone(), 19).expect_err("refused").to_string();
        assert!(error.contains("needs opset 20 or newer"), "{error}");
    }

    #[test]
    fn rejects_invalid_axes() {
        let data = Tensor::f32(&[2, 2], &[0.0; 4]);
        for (named, message) in [(&[2][..], "axis 2 is out of range for rank 2"), (&[0, -2], "twice")] {
            let failure =
                run_node(SUM, &[Some(&data), Some(&axes(named))], 1, Attrs::new()).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(message), "{error}");
        }
        let flags = Tensor::filled(DType::Bool, &[2], 1.0);
        assert!(run_node(SUM, &[Some(&flags)], 1, Attrs::new()).is_err());
    }

    #[test]
    fn gradients() {
        let data = generic_tensor(&[2, 3, 4], 1);
        for op in [SUM, MEAN, MAX, MIN, ("com.microsoft", "ReduceSumTraining")] {
            for named in [&[][..], &[1], &[-1, 0], &[0, 1, 2]] {
                for keep in [0, 1] {
                    let graph = constant_axes(op, &data, named, attrs(keep, 0));
                    check_gradients(&graph, std::slice::from_ref(&data), &[0], &[0]);
                }
            }
            check_gradients(
                &constant_axes(op, &data, &[], attrs(0, 1)),
                std::slice::from_ref(&data),
                &[0],
                &[0],
            );
            // Axes as a graph input, with values at run time.
            let named = axes(&[2, 0]);
            let graph =
                one_node_graph(NEWEST, op, &[Some(&data), Some(&named)], 1, attrs(0, 0)).expect("valid");
            check_gradients(&graph, &[data.clone(), named], &[0], &[0]);
        }
    }

    #[test]
    fn gradient_of_a_mean_of_unknown_count() {
        let data = generic_tensor(&[3, 2], 2);
        let mut graph = constant_axes(MEAN, &data, &[0], attrs(0, 0));
        let x = graph.inputs[0];
        let symbolic: Shape = [Dim::symbol("N"), Dim::Known(2)].into_iter().collect();
        graph.value_mut(x).ty = ortrain_graph::ValueType::Tensor(DType::F64, Some(symbolic));
        check_gradients(&graph, std::slice::from_ref(&data), &[0], &[0]);
        let gradient = gradient_graph(&graph, &[Some(f64s(&[2], &[1.0, 3.0]))], &[0]);
        assert!(gradient.nodes.iter().any(|node| &*node.op == "Scale"), "{gradient}");
        check_decomposition(&gradient, &[data], 1e-12);
    }

    #[test]
    fn narrow_gradients_divide_in_float32() {
        let data = Tensor::filled(DType::F16, &[100_000], 1.0);
        let graph = constant_axes(MEAN, &data, &[0], attrs(0, 0));
        let gradient = gradient_graph(&graph, &[Some(Tensor::filled(DType::F16, &[], 1000.0))], &[0]);
        let got = run(&gradient, &[data]).expect("the graph runs").remove(0).to_f64();
        assert!(got.iter().all(|&x| (x - 0.01).abs() < 1e-5), "{}", got[0]);
    }

    #[test]
    fn scale_and_its_gradient() {
        let x = generic_tensor(&[2, 2], 3);
        for down in [0i64, 1] {
            for dims in [&[][..], &[1]] {
                let scale = f64s(dims, &[1.7]);
                let attrs = Attrs::new().with("scale_down", down);
                let op = ("com.microsoft", "Scale");
                let graph = one_node_graph(NEWEST, op, &[Some(&x), Some(&scale)], 1, attrs).expect("valid");
                let inputs = [x.clone(), scale];
                check_gradients(&graph, &inputs, &[0, 1], &[0]);
                check_decomposition(&graph, &inputs, 0.0);
            }
        }
        let halves = Tensor::filled(DType::F16, &[2], 3.0);
        let count = Tensor::i64(&[], &[2]);
        let attrs = Attrs::new().with("scale_down", 1i64);
        let got = run_node(("com.microsoft", "Scale"), &[Some(&halves), Some(&count)], 1, attrs)
            .expect("the graph runs");
        assert_eq!(got[0], Tensor::filled(DType::F16, &[2], 1.5));
        let count = Tensor::i64(&[1], &[100_000]);
        let attrs = Attrs::new().with("scale_down", 1i64);
        let graph =
            one_node_graph(NEWEST, ("com.microsoft", "Scale"), &[Some(&halves), Some(&count)], 1, attrs)
                .expect("valid");
        check_decomposition(&graph, &[halves, count], 0.0);
    }

    #[test]
    fn older_versions() {
        let data = generic_tensor(&[2, 3], 4);
        for (op, opset) in [(SUM, 7), (SUM, 12), (MEAN, 8), (MEAN, 17), (MAX, 7), (MIN, 11), (MAX, 17)] {
            let old = Attrs::new().with("axes", vec![1i64]).with("keepdims", 0i64);
            let graph = one_node_graph(opset, op, &[Some(&data)], 1, old).expect("the graph can be read");
            let expected = forward(op, &data, Some(&[1]), attrs(0, 0));
            assert_close(
                &run(&graph, std::slice::from_ref(&data)).expect("the graph runs")[0],
                &expected,
                0.0,
            );

            let graph = constant_axes(op, &data, &[-1], attrs(0, 1));
            let written = check_downgrade(&graph, std::slice::from_ref(&data), opset);
            assert_eq!(written.nodes[0].inputs.len(), 1);
            assert!(!written.nodes[0].attrs.0.contains_key("noop_with_empty_axes"));

            let graph = constant_axes(op, &data, &[], attrs(0, 1));
            let written = check_downgrade(&graph, std::slice::from_ref(&data), opset);
            assert_eq!(&*written.nodes[0].op, "Identity");
        }
        let named = axes(&[0]);
        let mut graph =
            one_node_graph(NEWEST, SUM, &[Some(&data), Some(&named)], 1, attrs(0, 0)).expect("valid");
        assert!(passes::versions::downgrade(&mut graph.clone(), 13).is_ok());
        let error = passes::versions::downgrade(&mut graph, 12).expect_err("refused");
        assert!(error.to_string().contains("axes is computed at run time"), "{error}");
    }

    #[test]
    fn norm_of_several_tensors() {
        let op = ("com.microsoft", "ReduceAllL2");
        let inputs = [f64s(&[2], &[3.0, -4.0]), f64s(&[1, 1], &[12.0]), f64s(&[0], &[])];
        let ports = [Some(&inputs[0]), Some(&inputs[1]), Some(&inputs[2])];
        let got = run_node(op, &ports, 1, Attrs::new()).expect("the graph runs");
        assert_close(&got[0], &f64s(&[], &[13.0]), 0.0);
        let tensors = [generic_tensor(&[2, 3], 1), generic_tensor(&[4], 2)];
        let graph = one_node_graph(NEWEST, op, &[Some(&tensors[0]), Some(&tensors[1])], 1, Attrs::new())
            .expect("valid");
        check_gradients(&graph, &tensors, &[0, 1], &[0]);
        check_decomposition(&graph, &tensors, 1e-12);
        let zeros = [f64s(&[2], &[0.0; 2])];
        let graph = one_node_graph(NEWEST, op, &[Some(&zeros[0])], 1, Attrs::new()).expect("valid");
        let backward = gradient_graph(&graph, &[Some(f64s(&[], &[1.0]))], &[0]);
        assert_eq!(run(&backward, &zeros).expect("the graph runs")[0].to_f64(), [0.0, 0.0]);
        // float16 can represent the norm, but not the squares.
        let narrow = crate::testing::cast_tensor(&f64s(&[2], &[300.0, 400.0]), DType::F16);
        let got = run_node(op, &[Some(&narrow)], 1, Attrs::new()).expect("the graph runs");
        assert_eq!(got[0].to_f64(), [500.0]);
    }
}
