//! Gather of single elements by index or of slices by coordinates, and the gradients.
//!
//! GatherElements-11, 13 (<https://onnx.ai/onnx/operators/onnx__GatherElements.html>) and GatherND-11, 12, 13
//! (<https://onnx.ai/onnx/operators/onnx__GatherND.html>) of ONNX; `GatherElementsGrad` and `GatherNDGrad` of
//! `com.microsoft`. The inputs of `GatherElementsGrad` are the gradient, the shape of the data, and the indices. The
//! inputs of `GatherNDGrad` are the shape, the indices, and the gradient.
//!
//! Negative indices count from the end. Any other index out of range is an error of the run, which then commits
//! nothing. Gradients of equal indices are added; float16 and bfloat16 are summed in float32.

use ortrain_expr::Type;
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, ValueId};

use crate::OpError;
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axis};
use crate::lower::Lower;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::element_indices::{
    add_elements_gradient, check_compatible_shape, check_elements, compute_element_indices,
    compute_slice_indices, flat_index, infer_slices_shape,
};
use crate::support::rows::{check_indices, emit_scatter_sum, guard_indices, wrap_negative_index};

const MICROSOFT: &str = "com.microsoft";

/// GatherElements: elements of one tensor at the indices in another, along an axis.
struct GatherElements {
    axis: i64,
}

impl Op for GatherElements {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        let dtype = cx.dtype(0)?;
        let axis = cx.shape(0).map(|data| check_elements(data, cx.shape(1), self.axis)).transpose()?;
        check_indices(cx, 1, axis.and_then(|axis| cx.shape(0).map(|data| &data[axis])))?;
        cx.set_output(0, dtype, cx.shape(1).cloned());
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (data, indices) = (cx.input(0)?, cx.input(1)?);
        let gradient = add_elements_gradient(cx, g, data, indices, self.axis);
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (dims, index_dims) = (cx.dims(0), cx.dims(1));
        let axis = normalize_axis(self.axis, dims.len())?;
        guard_indices(cx, 1, dims[axis])?;
        let (data, indices, output) = (cx.input(0), cx.input(1), cx.output(0));
        let mut nest = cx.nest(&index_dims, 0);
        let loaded = nest.load(indices, cx.contiguous_access(indices, &index_dims));
        let index = nest.b.convert(loaded, Type::I64);
        let row = wrap_negative_index(&mut nest.b, index, dims[axis]);
        let at = flat_index(&mut nest, &dims, axis, row);
        let value = nest.gather(cx, data, at);
        nest.store_contiguous(cx, output, value);
        cx.emit(nest.instruction())
    }
}

/// Gradient of [`GatherElements`].
struct GatherElementsGrad {
    axis: i64,
}

impl Op for GatherElementsGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 3, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        cx.expect_dtype(1, "int64", |dtype| dtype == DType::I64)?;
        let shape = shape_from_input(cx, 1);
        let axis = shape.as_ref().map(|data| check_elements(data, cx.shape(2), self.axis)).transpose()?;
        check_indices(cx, 2, axis.and_then(|axis| shape.as_ref().map(|data| &data[axis])))?;
        check_compatible_shape(cx, 0, cx.shape(2))?;
        let rank = cx.shape(2).map(Shape::rank);
        cx.set_output(0, dtype, shape.or_else(|| rank.map(|rank| cx.unknown_shape(0, rank))));
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.out_dims(0);
        let axis = normalize_axis(self.axis, dims.len())?;
        let index_buffer = compute_element_indices(cx, 2, &dims, axis)?;
        let (source, target) = (cx.input(0), cx.output(0));
        emit_scatter_sum(cx, &index_buffer, source, None, target)
    }
}

/// Returns the shape that input `k` contains, if it is known.
fn shape_from_input(cx: &Infer<'_>, k: usize) -> Option<Shape> {
    cx.sizes(k).map(|sizes| sizes.into_iter().collect())
}

/// GatherND: the last axis of the indices has the coordinates of a slice along the axes after the first `batch` axes.
struct GatherNd {
    batch_dims: i64,
}

impl Op for GatherNd {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        let dtype = cx.dtype(0)?;
        cx.expect_dtype(1, "int64", |dtype| dtype == DType::I64)?;
        let shape = match (cx.shape(0), cx.shape(1)) {
            (Some(data), Some(indices)) => Some(infer_slices_shape(data, indices, self.batch_dims)?),
            _ => None,
        };
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (data, indices) = (cx.input(0)?, cx.input(1)?);
        let shape = cx.shape_of(data);
        let attrs = Attrs::new().with("batch_dims", self.batch_dims);
        let gradient = cx.add_in(MICROSOFT, "GatherNDGrad", &[shape, indices, g], attrs);
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.dims(0);
        let batch = usize::try_from(self.batch_dims).unwrap_or(0);
        let index_buffer = compute_slice_indices(cx, 1, &dims, batch)?;
        let (data, output) = (cx.input(0), cx.output(0));
        let mut nest = cx.nest(&[index_buffer.count, index_buffer.inner], 0);
        let row = nest.load_strided(cx, index_buffer.row_indices, 0, &[1, 0]);
        let inner = nest.b.int(index_buffer.inner as i64);
        let start = nest.b.mul(row, inner);
        let inner_index = nest.b.coordinate(1);
        let at = nest.b.add(start, inner_index);
        let value = nest.gather(cx, data, at);
        nest.store_contiguous(cx, output, value);
        cx.emit(nest.instruction())
    }
}

/// Gradient of [`GatherNd`].
struct GatherNdGrad {
    batch_dims: i64,
}

impl Op for GatherNdGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 3, 1)?;
        cx.expect_dtype(0, "int64", |dtype| dtype == DType::I64)?;
        cx.expect_dtype(1, "int64", |dtype| dtype == DType::I64)?;
        let dtype = cx.expect_dtype(2, "a float type", DType::is_float)?;
        let shape = shape_from_input(cx, 0);
        if let (Some(data), Some(indices)) = (&shape, cx.shape(1)) {
            let expected = infer_slices_shape(data, indices, self.batch_dims)?;
            check_compatible_shape(cx, 2, Some(&expected))?;
        }
        let rank = cx.shape(0).and_then(|shape| shape.first().and_then(Dim::known));
        cx.set_output(0, dtype, shape.or_else(|| rank.map(|rank| cx.unknown_shape(0, rank))));
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.out_dims(0);
        let index_buffer =
            compute_slice_indices(cx, 1, &dims, usize::try_from(self.batch_dims).unwrap_or(0))?;
        let (source, target) = (cx.input(2), cx.output(0));
        emit_scatter_sum(cx, &index_buffer, source, None, target)
    }
}

/// Adds zeros of a shape, with the type of the gradient `g`.
fn add_zeros(rw: &mut Rewrite<'_>, shape: ValueId, g: ValueId) -> Result<ValueId, OpError> {
    let dtype = rw.dtype(g).ok_or_else(|| OpError::invalid("the type of the gradient is not known"))?;
    let zero = Attrs::new().with("value", ortrain_graph::Tensor::filled(dtype, &[1], 0.0));
    Ok(rw.add("ConstantOfShape", &[shape], zero))
}

fn decompose_elements(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (g, shape, indices) = (rw.required_input(0)?, rw.required_input(1)?, rw.required_input(2)?);
    let zeros = add_zeros(rw, shape, g)?;
    let axis = rw.attrs().int("axis")?.unwrap_or(0);
    let attrs = Attrs::new().with("axis", axis).with("reduction", "add");
    let result = rw.add("ScatterElements", &[zeros, indices, g], attrs);
    rw.replace_output(0, result);
    Ok(())
}

/// Decomposes into ScatterND, which has no batch axes: the batch coordinates are inserted before the others.
fn decompose_slices(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (shape, mut indices, g) = (rw.required_input(0)?, rw.required_input(1)?, rw.required_input(2)?);
    let zeros = add_zeros(rw, shape, g)?;
    let batch = usize::try_from(rw.attrs().int("batch_dims")?.unwrap_or(0)).unwrap_or(0);
    if batch > 0 {
        let Some(rank) = rw.shape(indices).map(Shape::rank) else {
            return Err(OpError::unsupported("the rank of the indices must be known"));
        };
        let one = rw.ints("one", &[1]);
        let sizes = rw.add("Shape", &[indices], Attrs::new());
        let (start, end) = (rw.ints("start", &[0]), rw.ints("end", &[rank as i64 - 1]));
        let leading_sizes = rw.add("Slice", &[sizes, start, end], Attrs::new());
        let column = rw.add("Concat", &[leading_sizes, one], Attrs::new().with("axis", 0i64));
        let mut parts = Vec::with_capacity(batch + 1);
        for axis in 0..batch {
            let at = rw.ints("axis", &[axis as i64]);
            let size = rw.add("Gather", &[sizes, at], Attrs::new());
            let numbers = rw.count_up(size);
            let mut lying = vec![1i64; rank];
            lying[axis] = -1;
            let lying = rw.ints("lying", &lying);
            let numbers = rw.add("Reshape", &[numbers, lying], Attrs::new());
            parts.push(rw.add("Expand", &[numbers, column], Attrs::new()));
        }
        parts.push(indices);
        indices = rw.add("Concat", &parts, Attrs::new().with("axis", rank as i64 - 1));
    }
    let result = rw.add("ScatterND", &[zeros, indices, g], Attrs::new().with("reduction", "add"));
    rw.replace_output(0, result);
    Ok(())
}

fn read_axis(node: &Node) -> Result<i64, OpError> {
    Ok(node.attrs.int("axis")?.unwrap_or(0))
}

fn read_batch_dims(node: &Node) -> Result<i64, OpError> {
    Ok(node.attrs.int("batch_dims")?.unwrap_or(0))
}

fn build_elements(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(GatherElements { axis: read_axis(node)? }))
}

fn build_elements_grad(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(GatherElementsGrad { axis: read_axis(node)? }))
}

fn build_nd(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(GatherNd { batch_dims: read_batch_dims(node)? }))
}

fn build_nd_grad(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(GatherNdGrad { batch_dims: read_batch_dims(node)? }))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "GatherElements", &[11, 13], build_elements).inputs_without_gradient(&[1]),
        Definition::new("", "GatherND", &[11, 12, 13], build_nd).inputs_without_gradient(&[1]),
        Definition::new(MICROSOFT, "GatherElementsGrad", &[1], build_elements_grad)
            .differentiated_as(decompose_elements),
        Definition::new(MICROSOFT, "GatherNDGrad", &[1], build_nd_grad).differentiated_as(decompose_slices),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::Tensor;
    use ortrain_program::RunError;

    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, check_decomposition, check_gradients, f64s, generic_tensor, gradient_graph, one_node_graph,
        run_node,
    };

    const ELEMENTS: (&str, &str) = ("", "GatherElements");
    const ND: (&str, &str) = ("", "GatherND");

    /// Checks the gradients, and the decomposition of the gradient graph into plain ONNX.
    #[track_caller]
    fn check_gradient(op: (&str, &str), data: &[usize], indices: Tensor, attrs: Attrs) {
        let inputs = [generic_tensor(data, 1), indices];
        let ports = [Some(&inputs[0]), Some(&inputs[1])];
        let graph = one_node_graph(NEWEST_OPSET, op, &ports, 1, attrs).expect("valid");
        check_gradients(&graph, &inputs, &[0], &[0]);
        let y = graph.value(graph.outputs[0]).ty.shape().and_then(Shape::concrete).expect("known");
        let gradient = gradient_graph(&graph, &[Some(generic_tensor(&y, 2))], &[0]);
        // The gradient only uses the indices.
        let args: Vec<Tensor> = inputs.to_vec();
        check_decomposition(&gradient, &args, 1e-12);
    }

    #[test]
    fn gathers_elements() {
        let x = f64s(&[2, 3], &[0.0, 1.0, 2.0, 10.0, 11.0, 12.0]);
        let indices = Tensor::from_slice(DType::I32, &[2, 2], &[-1i32, 0, 1, 1]);
        let got = run_node(ELEMENTS, &[Some(&x), Some(&indices)], 1, Attrs::new().with("axis", 1i64));
        assert_eq!(got.expect("it runs")[0].to_f64(), [2.0, 0.0, 11.0, 11.0]);
        check_gradient(ELEMENTS, &[2, 3], Tensor::i64(&[4, 2], &[0, 1, -1, -2, 1, 1, 0, 0]), Attrs::new());
        check_gradient(
            ELEMENTS,
            &[2, 3, 2],
            Tensor::i64(&[1, 2, 2], &[2, 0, -1, 0]),
            Attrs::new().with("axis", -2i64),
        );
    }

    #[test]
    fn gathers_slices() {
        let x = f64s(&[2, 2, 2], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        let get = |indices: Tensor, batch: i64| {
            let attrs = Attrs::new().with("batch_dims", batch);
            let got = run_node(ND, &[Some(&x), Some(&indices)], 1, attrs).expect("it runs").remove(0);
            (got.dims().to_vec(), got.to_f64())
        };
        assert_eq!(
            get(Tensor::i64(&[2, 1], &[1, -2]), 0),
            (vec![2, 2, 2], vec![4., 5., 6., 7., 0., 1., 2., 3.])
        );
        assert_eq!(get(Tensor::i64(&[2, 3], &[0, 0, -1, 1, 1, 0]), 0), (vec![2], vec![1.0, 6.0]));
        assert_eq!(get(Tensor::i64(&[2, 1], &[1, 0]), 1), (vec![2, 2], vec![2.0, 3.0, 4.0, 5.0]));
        check_gradient(ND, &[3, 2, 2], Tensor::i64(&[3, 1], &[2, 0, 2]), Attrs::new());
        check_gradient(ND, &[3, 2, 2], Tensor::i64(&[2, 2, 2], &[2, 1, 0, 0, 2, 1, -1, -1]), Attrs::new());
        check_gradient(
            ND,
            &[2, 3, 2],
            Tensor::i64(&[2, 2, 1], &[2, 0, 1, -2]),
            Attrs::new().with("batch_dims", 1i64),
        );
        check_gradient(
            ND,
            &[2, 2, 3],
            Tensor::i64(&[2, 2, 1], &[2, 0, 0, -1]),
            Attrs::new().with("batch_dims", 2i64),
        );
    }

    #[test]
    fn rejects_mismatched_shapes_and_indices() {
        let x = generic_tensor(&[2, 3], 1);
        for (op, indices, attrs, message) in [
            (
                ELEMENTS,
                Tensor::i64(&[3, 1], &[0; 3]),
                Attrs::new().with("axis", 1i64),
                "do not fit data of shape [2, 3]",
            ),
            (ELEMENTS, Tensor::i64(&[2], &[0; 2]), Attrs::new(), "do not fit"),
            (
                ELEMENTS,
                Tensor::i64(&[2, 1], &[0; 2]),
                Attrs::new().with("axis", 2i64),
                "axis 2 is out of range",
            ),
            (ND, Tensor::i64(&[1, 3], &[0; 3]), Attrs::new(), "one coordinate for each indexed axis"),
            (
                ND,
                Tensor::i64(&[3, 1], &[0; 3]),
                Attrs::new().with("batch_dims", 1i64),
                "the batch axes differ",
            ),
            (
                ND,
                Tensor::i64(&[2, 1], &[0; 2]),
                Attrs::new().with("batch_dims", 2i64),
                "both must have more axes",
            ),
        ] {
            let failure = run_node(op, &[Some(&x), Some(&indices)], 1, attrs).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(message), "{error}");
        }
        for (op, indices) in [(ELEMENTS, Tensor::i64(&[1, 1], &[2])), (ND, Tensor::i64(&[1, 2], &[1, -4]))] {
            let failure = run_node(op, &[Some(&x), Some(&indices)], 1, Attrs::new()).expect_err("outside");
            assert!(matches!(failure, Failure::Run(RunError::IndexOutOfRange { .. })), "{failure:?}");
        }
    }
}
