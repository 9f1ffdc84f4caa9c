//! Pooling: maximum or average under sliding windows or over whole planes, and the gradients.
//!
//! `pool/lp.rs` has the norms under windows.
//!
//! Sources: ONNX MaxPool-1, 8, 10, 11, 12, 22; AveragePool-7, 10, 11, 19, 22; GlobalAveragePool-1, 22; GlobalMaxPool-1,
//! 22; `MaxPoolGrad` and `AveragePoolGrad` as in training graphs of ONNX Runtime.
//!
//! Of several largest elements the first in row-major order is the maximum. NaN is larger than every number; padding is
//! never the maximum. An average divides by the number of input elements under the window. With `count_include_pad` it
//! divides by the number of elements of the padded input.

use ortrain_expr::{BinaryOp, Strides, Type, WindowPass, WindowShape};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, ValueId, ValueType};
use ortrain_program::{BufferId, Instruction, Window, WindowIndex};

use crate::OpError;
use crate::class::Traits;
use crate::families::pool::windows::{
    AveragePool, Windows, are_known_to_differ, read_average, sum_dtype, window_sample,
};
use crate::grad::{Grad, gradient_dtype, gradient_type};
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;

mod lp;
mod onnx_decomposition;
mod quantized;
mod windows;

/// Emits a pooling of `source` into `target`.
fn emit_window(
    cx: &mut Lower<'_>,
    shape: WindowShape,
    source: BufferId,
    index: Option<BufferId>,
    target: BufferId,
) -> Result<(), OpError> {
    let index = index.map(|index| WindowIndex::with_element_positions(cx.flat_operand(index)));
    let (source, target) = (cx.flat_operand(source), cx.flat_operand(target));
    cx.emit(Instruction::from(Window { shape, source, index, target }))
}

/// Fills a buffer with zeros, for a gradient without windows.
fn emit_zeros(cx: &mut Lower<'_>, target: BufferId, dims: &[usize]) -> Result<(), OpError> {
    let mut nest = cx.nest(dims, 0);
    let zero = nest.b.constant(Type::of(cx.buffer_dtype(target)), 0.0);
    nest.store_contiguous(cx, target, zero);
    cx.emit(nest.instruction())
}

/// Largest element of each window, and its index.
struct MaxPool {
    windows: Windows,
    /// True if indices are column-major (`storage_order` 1).
    is_column_major: bool,
}

impl MaxPool {
    /// Converts row-major indices to column-major indices within each plane.
    fn emit_column_major_indices(
        &self,
        cx: &mut Lower<'_>,
        rows: BufferId,
        spatial: &[usize],
    ) -> Result<(), OpError> {
        let dims = cx.out_dims(1);
        let target = cx.output(1);
        let mut nest = cx.nest(&dims, 0);
        let access = cx.contiguous_access(rows, &dims);
        let linear = nest.load(rows, access);
        let b = &mut nest.b;
        let plane = b.int(spatial.iter().product::<usize>() as i64);
        let mut rest = b.binary(BinaryOp::Rem, linear, plane);
        let mut position = b.sub(linear, rest);
        // In column-major order the last axis has the largest stride.
        for axis in (0..spatial.len()).rev() {
            let size = b.int(spatial[axis] as i64);
            let step = b.int(spatial[..axis].iter().product::<usize>() as i64);
            let coordinate = b.binary(BinaryOp::Rem, rest, size);
            rest = b.binary(BinaryOp::Div, rest, size);
            let moved = b.mul(coordinate, step);
            position = b.add(position, moved);
        }
        nest.store_contiguous(cx, target, position);
        cx.emit(nest.instruction())
    }
}

impl Op for MaxPool {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let outputs = if self.windows.sliding.is_some() { 2 } else { 1 };
        cx.check_arity(1, 1, outputs)?;
        let dtype = cx.expect_dtype(0, "a number type", DType::is_number)?;
        let shape = cx.shape(0).map(|shape| self.windows.infer_outputs(cx, shape)).transpose()?;
        cx.set_output(0, dtype, shape.clone());
        if outputs == 2 {
            cx.set_output(1, DType::I64, shape);
        }
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        if !cx.needs_grad(0) {
            return Ok(());
        }
        let x = cx.input(0)?;
        let (attrs, index) = if self.windows.sliding.is_none() {
            // The first of the largest elements gets the gradient, as in a pooling with a window over the whole plane.
            let spatial =
                cx.shape(x).map(|shape| shape.iter().skip(2).map(Dim::known).collect::<Option<Vec<_>>>());
            let Some(Some(spatial)) = spatial else {
                let (y, dtype) = (cx.output(0, "y"), gradient_dtype(cx.dtype(x)?));
                let gradient = onnx_decomposition::add_first_largest_gradient(cx, (g, dtype), (x, y));
                cx.set_grad(0, gradient);
                return Ok(());
            };
            let kernel: Vec<i64> = spatial.iter().map(|&size| size as i64).collect();
            let attrs = Attrs::new().with("kernel_shape", kernel);
            let index = cx.add_node("", "MaxPool", &[Some(x)], 2, attrs.clone())[1];
            (attrs, index)
        } else if self.is_column_major {
            let attrs = cx.node().attrs.clone().with("storage_order", 0i64);
            let index = cx.add_node("", "MaxPool", &[Some(x)], 2, attrs.clone())[1];
            (attrs, index)
        } else {
            (cx.node().attrs.clone(), cx.output(1, "mask"))
        };
        // The attributes do not determine the size of the input, so the type is set here.
        let gradient = cx.value("input_grad", gradient_type(cx.ty(x)));
        let mut node = Node::new("", "MaxPoolGrad", &[Some(g), Some(index)], &[Some(gradient)], attrs);
        node.name = cx.new_name("MaxPoolGrad").into();
        cx.push(node);
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.dims(0);
        let shape = self.windows.window_shape(WindowPass::Max, &dims)?;
        let source = cx.input(0);
        let target = if cx.has_output(0) {
            cx.output(0)
        } else {
            cx.alloc_temp("maximum", cx.dtype(0), shape.operands()[1])
        };
        if !cx.has_output(1) {
            return emit_window(cx, shape, source, None, target);
        }
        if !self.is_column_major {
            let index = cx.output(1);
            return emit_window(cx, shape, source, Some(index), target);
        }
        let index = cx.alloc_temp("index", DType::I64, shape.operands()[1]);
        emit_window(cx, shape, source, Some(index), target)?;
        self.emit_column_major_indices(cx, index, &dims[2..])
    }
}

/// Returns the declared shape with batch and channels of the gradient.
fn with_batch_from(gradient: Option<&Shape>, declared: &Shape) -> Shape {
    let at_hand = gradient.map_or(&[][..], |gradient| &gradient[..gradient.rank().min(2)]);
    at_hand.iter().chain(declared.iter().skip(at_hand.len())).cloned().collect()
}

/// Gradient of a maximum.
///
/// The inputs are the gradient of the result and the row-major indices. The result has the shape of the pooled tensor,
/// the input of the node that made the indices. If no node made them, the shape must be declared.
struct MaxPoolGrad {
    windows: Windows,
}

impl Op for MaxPoolGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        cx.expect_dtype(1, "int64", |dtype| dtype == DType::I64)?;
        if let (Some(gradient), Some(index)) = (cx.shape(0), cx.shape(1))
            && are_known_to_differ(gradient, index)
        {
            return Err(OpError::invalid(format!(
                "the gradient has shape {gradient}, but the indices have shape {index}"
            )));
        }
        let pooled = cx.producer_of(1).filter(|(node, k)| *k == 1 && node.inputs.len() == 1);
        let shape = match pooled {
            Some((node, _)) => node.inputs[0].and_then(|id| cx.shape_of(id)).cloned(),
            None => cx.declared_shape(0).map(|declared| with_batch_from(cx.shape(0), declared)),
        };
        if let (Some(shape), Some(gradient)) = (&shape, cx.shape(0)) {
            self.windows.check_gradient(cx, shape, gradient)?;
        }
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    fn shape_source_input(&self) -> Option<usize> {
        Some(1)
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.out_dims(0);
        let shape = self.windows.window_shape(WindowPass::MaxGradient, &dims)?;
        let (source, index, target) = (cx.input(0), cx.input(1), cx.output(0));
        if shape.operands()[0] == 0 {
            return emit_zeros(cx, target, &dims);
        }
        emit_window(cx, shape, source, Some(index), target)
    }
}

impl Op for AveragePool {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        let shape = cx.shape(0).map(|shape| self.windows.infer_outputs(cx, shape)).transpose()?;
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    /// Distributes each gradient by a transposed convolution with a filter of ones, plane by plane.
    ///
    /// ONNX Runtime's own gradient node is wrong for SAME padding, dilations, three axes or an unknown batch size.
    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        if !cx.needs_grad(0) {
            return Ok(());
        }
        let x = cx.input(0)?;
        let dtype = cx.dtype(x)?;
        let spatial =
            cx.shape(x).and_then(|shape| shape.iter().skip(2).map(Dim::known).collect::<Option<Vec<_>>>());
        let gradient = match spatial {
            Some(spatial) => {
                let shape = cx.shape_of(x);
                self.add_gradient(cx, (g, dtype), &spatial, shape)?
            }
            None => {
                let shape = cx.add("Shape", &[x], Attrs::new());
                self.add_gradient_at_run_time(cx, (g, dtype), shape)?
            }
        };
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let shape = self.windows.window_shape(WindowPass::Sum, &cx.dims(0))?;
        let axes = shape.axes.clone();
        let (source, target) = (cx.input(0), cx.output(0));
        let wide = sum_dtype(cx.dtype(0));
        let source = convert_to(cx, source, wide, shape.operands()[0])?;
        let sums = cx.alloc_temp("sum", wide, shape.operands()[1]);
        let dims = cx.out_dims(0);
        emit_window(cx, shape, source, None, sums)?;
        self.emit_scaled(cx, (sums, target), &dims, &axes)
    }
}

/// Converts a buffer to the type `wide`, if the types differ.
fn convert_to(cx: &mut Lower<'_>, source: BufferId, wide: DType, len: usize) -> Result<BufferId, OpError> {
    if cx.buffer_dtype(source) == wide {
        return Ok(source);
    }
    let target = cx.alloc_temp("wide", wide, len);
    emit_convert(cx, source, target, len)?;
    Ok(target)
}

fn emit_convert(cx: &mut Lower<'_>, source: BufferId, target: BufferId, len: usize) -> Result<(), OpError> {
    let mut nest = cx.nest(&[len], 0);
    let value = nest.load_strided(cx, source, 0, &[1]);
    nest.store_strided(cx, target, 0, Strides::from_slice(&[1]), value);
    cx.emit(nest.instruction())
}

/// Gradient of an average. The input is the gradient of the result; the shape of the averaged tensor must be declared.
struct AveragePoolGrad(AveragePool);

impl Op for AveragePoolGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        let Some(declared) = cx.declared_shape(0) else {
            return Err(OpError::unsupported(
                "the shape of the averaged input is unknown; declare the shape of its gradient",
            ));
        };
        let Some(gradient) = cx.shape(0) else {
            cx.set_output(0, dtype, Some(declared.clone()));
            return Ok(());
        };
        self.0.windows.check_gradient(cx, declared, gradient)?;
        cx.set_output(0, dtype, Some(with_batch_from(Some(gradient), declared)));
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.out_dims(0);
        let shape = self.0.windows.window_shape(WindowPass::SumGradient, &dims)?;
        let from = cx.dims(0);
        let (source, target) = (cx.input(0), cx.output(0));
        if shape.operands()[0] == 0 {
            return emit_zeros(cx, target, &dims);
        }
        let wide = sum_dtype(cx.dtype(0));
        let shares = cx.alloc_temp("share", wide, shape.operands()[0]);
        self.0.emit_scaled(cx, (source, shares), &from, &shape.axes)?;
        if cx.buffer_dtype(target) == wide {
            return emit_window(cx, shape, shares, None, target);
        }
        let len = shape.operands()[1];
        let sums = cx.alloc_temp("sum", wide, len);
        emit_window(cx, shape, shares, None, sums)?;
        emit_convert(cx, sums, target, len)
    }
}

fn build_max(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let column_major = match node.attrs.int("storage_order")?.unwrap_or(0) {
        0 => false,
        1 => true,
        other => return Err(OpError::invalid(format!("storage_order must be 0 or 1, got {other}"))),
    };
    Ok(Box::new(MaxPool { windows: Windows::read(node)?, is_column_major: column_major }))
}

fn build_global_max(_: &Graph, _: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(MaxPool { windows: Windows { sliding: None }, is_column_major: false }))
}

fn build_max_grad(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(MaxPoolGrad { windows: Windows::read(node)? }))
}

fn build_average(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(read_average(node)?))
}

fn build_average_grad(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(AveragePoolGrad(read_average(node)?)))
}

/// `GlobalAveragePool`, a mean over the spatial axes.
struct GlobalAveragePool;

impl Op for GlobalAveragePool {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        let windows = Windows { sliding: None };
        let shape = cx.shape(0).map(|shape| windows.infer_outputs(cx, shape)).transpose()?;
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

fn build_global_average(_: &Graph, _: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(GlobalAveragePool))
}

fn decompose_global_average(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let x = rw.required_input(0)?;
    let rank = rw.shape(x).map(Shape::rank);
    let rank = rank.ok_or_else(|| OpError::unsupported("the rank of its input must be known"))?;
    let axes: Vec<i64> = (2..rank as i64).collect();
    let axes: ValueId = rw.ints("axes", &axes);
    let mean = rw.add("ReduceMean", &[x, axes], Attrs::new().with("keepdims", 1i64));
    rw.replace_output(0, mean);
    Ok(())
}

/// Removes attributes that older opsets do not have. An attribute with an effect is an error that names the required
/// opset.
fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let average = &*rw.node().op == "AveragePool";
    let attrs = rw.attrs();
    let ceil = attrs.int("ceil_mode")?.unwrap_or(0) != 0;
    let dilated = attrs.ints("dilations")?.is_some_and(|list| list.iter().any(|&step| step != 1));
    let column_major = attrs.int("storage_order")?.unwrap_or(0) != 0;
    let used = [
        ("ceil_mode", 10, ceil),
        ("dilations", if average { 19 } else { 10 }, dilated),
        ("storage_order", 8, column_major),
    ];
    for (name, oldest, used) in used {
        if used && rw.version() < oldest {
            return Err(OpError::unsupported(format!("{name} needs opset {oldest} or newer")));
        }
    }
    if rw.has_output(1) && rw.version() < 8 {
        return Err(OpError::unsupported("the indices of the largest elements need opset 8 or newer"));
    }
    let mut left = attrs.clone();
    for (name, oldest, _) in used {
        if rw.version() < oldest {
            left.0.remove(name);
        }
    }
    if left != *attrs {
        rw.emit_same_op(&rw.node().inputs, left);
    }
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    const BFLOAT16: &[(i64, &[DType])] = &[(22, &[DType::BF16])];
    let [lp, global_lp] = lp::definitions().map(|definition| definition.later_types(BFLOAT16));
    let [average, global_average] = quantized::definitions();
    vec![
        lp,
        global_lp,
        average,
        global_average,
        Definition::new("", "MaxPool", &[1, 8, 10, 11, 12, 22], build_max)
            .sample(window_sample)
            .downgrade(downgrade)
            .later_types(&[(12, &[DType::I8, DType::U8]), (22, &[DType::BF16])]),
        Definition::new("", "AveragePool", &[7, 10, 11, 19, 22], build_average)
            .sample(window_sample)
            .downgrade(downgrade)
            .later_types(BFLOAT16),
        Definition::new("", "GlobalMaxPool", &[1, 22], build_global_max).later_types(BFLOAT16),
        Definition::new("", "GlobalAveragePool", &[1, 22], build_global_average)
            .traits(Traits::FOLLOWS_HEAD)
            .composition(decompose_global_average)
            .later_types(BFLOAT16),
        Definition::new("", "MaxPoolGrad", &[9], build_max_grad)
            .sample(window_sample)
            .extension()
            .declared_shape()
            .differentiated_as(onnx_decomposition::decompose_max_grad),
        Definition::new("", "AveragePoolGrad", &[9], build_average_grad)
            .sample(|definition| {
                let of = |size| ValueType::tensor(DType::F32, &[1, 1, size]);
                Sample { inputs: vec![Some(of(1))], output: Some(of(2)), ..window_sample(definition) }
            })
            .extension()
            .declared_shape()
            .differentiated_as(onnx_decomposition::decompose_average_grad),
    ]
}

#[cfg(test)]
mod tests;
