//! One-hot encoding: one value at an index along a new axis, another value everywhere else.
//!
//! OneHot-9, 11, 28 of ONNX (<https://onnx.ai/onnx/operators/onnx__OneHot.html>). `values` has the off value and the on
//! value. Negative indices count from the end; indices out of range select nothing. The depth must be known when a
//! program is compiled. Only `values` has a gradient: the sum of the output gradient at the indices, and the sum
//! elsewhere.

use ortrain_expr::{Access, CompareOp, Type};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Tensor, ValueId};

use crate::OpError;
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axis};
use crate::lower::Lower;
use crate::op::{Definition, Op, ValueRequirement};

struct OneHot {
    axis: i64,
}

impl Op for OneHot {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 3, 1)?;
        for k in 0..2 {
            cx.expect_dtype(k, "a number type", DType::is_number)?;
        }
        let dtype = cx.dtype(2)?;
        for (k, needed) in [(1, 1), (2, 2)] {
            if let Some(shape) = cx.shape(k)
                && shape.concrete().is_some_and(|dims| dims.iter().product::<usize>() != needed)
            {
                return Err(OpError::invalid(format!(
                    "input {k} must have {needed} element(s), got shape {shape}"
                )));
            }
        }
        let depth = match (cx.constant(1).map(Tensor::to_f64).as_deref(), cx.sizes(1).as_deref()) {
            (Some(&[depth]), _) => {
                if !(depth >= 1.0 && depth <= i64::MAX as f64) {
                    return Err(OpError::invalid(format!("the depth must be at least 1, got {depth}")));
                }
                Some(Dim::Known(depth as usize))
            }
            (None, Some([size])) => Some(size.clone()),
            _ => None,
        };
        let shape = match cx.shape(0) {
            Some(indices) => {
                let axis = normalize_axis(self.axis, indices.rank() + 1)?;
                let mut dims = indices.clone();
                dims.0.insert(axis, depth.unwrap_or_else(|| cx.unknown_dim(0, axis)));
                Some(dims)
            }
            None => None,
        };
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    fn needs_value(&self, k: usize, _: DType) -> ValueRequirement {
        if k == 1 { ValueRequirement::ForShapes } else { ValueRequirement::Never }
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        if !cx.needs_grad(2) {
            return Ok(());
        }
        let (indices, depth, values) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
        let dtype = cx.dtype(values)?;
        let marks = cx.constant("marks", Tensor::from_f64(dtype, vec![2], &[0.0, 1.0]));
        let attrs = cx.node().attrs.clone();
        let mask = cx.add("OneHot", &[indices, depth, marks], attrs);
        let mask = cx.add("Cast", &[mask], Attrs::new().with("to", i64::from(DType::Bool.to_onnx())));
        let zero = cx.constant("zero", Tensor::scalar(dtype, 0.0));
        let first = cx.ints("first", &[1]);
        let parts: Vec<ValueId> = [[zero, g], [g, zero]]
            .into_iter()
            .map(|[on, off]| {
                let part = cx.add("Where", &[mask, on, off], Attrs::new());
                let sum = cx.add("ReduceSum", &[part], Attrs::new().with("keepdims", 0i64));
                cx.add("Reshape", &[sum, first], Attrs::new())
            })
            .collect();
        let gradient = cx.add("Concat", &parts, Attrs::new().with("axis", 0i64));
        cx.set_grad(2, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (dims, out) = (cx.dims(0), cx.out_dims(0));
        let axis = normalize_axis(self.axis, out.len())?;
        let (indices, values, output) = (cx.input(0), cx.input(2), cx.output(0));
        let mut strides = Access::contiguous(cx.dtype(0), &dims).strides;
        strides.insert(axis, 0);
        let mut nest = cx.nest(&out, 0);
        let index = nest.load_strided(cx, indices, 0, &strides);
        let index = nest.b.convert(index, Type::I64);
        let zero_strides = vec![0; out.len()];
        let [off, on] = [0, 1].map(|k| nest.load_strided(cx, values, k, &zero_strides));
        let b = &mut nest.b;
        let (coordinate, zero, depth) = (b.coordinate(axis), b.int(0), b.int(out[axis] as i64));
        let negative = b.compare(CompareOp::Lt, index, zero);
        let wrapped = b.add(index, depth);
        let index = b.select(negative, wrapped, index);
        let hit = b.compare(CompareOp::Eq, coordinate, index);
        let value = b.select(hit, on, off);
        nest.store_contiguous(cx, output, value);
        cx.emit(nest.instruction())
    }
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(OneHot { axis: node.attrs.int("axis")?.unwrap_or(-1) }))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![Definition::new("", "OneHot", &[9, 11, 28], build).inputs_without_gradient(&[0, 1, 2])]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{Failure, check_gradients, f64s, generic_tensor, one_node_graph, run_node};

    const ONE_HOT: (&str, &str) = ("", "OneHot");

    #[test]
    fn indices_in_and_out_of_range() {
        let (indices, depth) = (Tensor::i64(&[4], &[1, -1, 3, -4]), Tensor::f32(&[1], &[3.0]));
        let values = Tensor::from_slice(DType::I32, &[2], &[5i32, 9]);
        let get = |axis: i64| {
            let ports = [Some(&indices), Some(&depth), Some(&values)];
            run_node(ONE_HOT, &ports, 1, Attrs::new().with("axis", axis)).expect("the graph runs").remove(0)
        };
        let rows = [5, 9, 5, 5, 5, 9, 5, 5, 5, 5, 5, 5];
        assert_eq!(get(-1).to_i64(), Some(rows.to_vec()));
        let columns = get(0);
        assert_eq!(
            (columns.dims(), columns.to_i64()),
            (&[3, 4][..], Some(vec![5, 5, 5, 5, 9, 5, 5, 5, 5, 9, 5, 5]))
        );
    }

    #[test]
    fn gradients_of_the_values() {
        for axis in [-1, 0, 1] {
            let inputs =
                [Tensor::i64(&[2, 3], &[0, 1, -1, 2, 5, 1]), Tensor::i64(&[], &[3]), generic_tensor(&[2], 1)];
            let ports = [Some(&inputs[0]), Some(&inputs[1]), Some(&inputs[2])];
            let attrs = Attrs::new().with("axis", axis);
            let graph = one_node_graph(NEWEST_OPSET, ONE_HOT, &ports, 1, attrs).expect("valid");
            check_gradients(&graph, &inputs, &[2], &[0]);
        }
    }

    #[test]
    fn rejects_invalid_inputs() {
        let (indices, values) = (Tensor::i64(&[2], &[0, 1]), f64s(&[2], &[0.0, 1.0]));
        for (depth, values, axis, message) in [
            (Tensor::i64(&[], &[0]), values.clone(), -1, "the depth must be at least 1, got 0"),
            (Tensor::i64(&[2], &[1, 2]), values.clone(), -1, "input 1 must have 1 element(s), got shape [2]"),
            (
                Tensor::i64(&[], &[2]),
                f64s(&[3], &[0.0; 3]),
                -1,
                "input 2 must have 2 element(s), got shape [3]",
            ),
            (Tensor::i64(&[], &[2]), values, 2, "axis 2 is out of range for rank 2"),
        ] {
            let ports = [Some(&indices), Some(&depth), Some(&values)];
            let failure = run_node(ONE_HOT, &ports, 1, Attrs::new().with("axis", axis)).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
