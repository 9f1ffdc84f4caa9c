//! Triangular parts of matrices (`Trilu`), and matrices with ones on a diagonal (`EyeLike`).
//!
//! Trilu-14 (<https://onnx.ai/onnx/operators/onnx__Trilu.html>), which ONNX Runtime also has in its own domain, and
//! EyeLike-9, 22 of ONNX. Diagonal `k` is `k` columns to the right of the main diagonal. For Trilu `k` is an input.

use ortrain_expr::{Builder, CompareOp, Reg, Type};
use ortrain_graph::{DType, Graph, Node};

use crate::OpError;
use crate::class::Traits;
use crate::grad::Grad;
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::{Definition, Op, ValueRequirement};
use crate::rewrite::Rewrite;

/// Upper or lower triangular part, with zeros elsewhere. The inputs are the matrices and an optional diagonal, 0 by
/// default.
struct Trilu {
    domain: &'static str,
    upper: bool,
}

/// Returns the column minus the row of a point of a nest.
fn column_minus_row(b: &mut Builder, rank: usize) -> Reg {
    let (row, column) = (b.coordinate(rank - 2), b.coordinate(rank - 1));
    b.sub(column, row)
}

impl Op for Trilu {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 2, 1)?;
        let dtype = cx.dtype(0)?;
        if let Some(shape) = cx.shape(0)
            && shape.rank() < 2
        {
            return Err(OpError::invalid(format!("input 0 must contain matrices, got shape {shape}")));
        }
        if cx.has_input(1) {
            cx.expect_dtype(1, "int64", |dtype| dtype == DType::I64)?;
            if let Some(shape) = cx.shape(1)
                && shape.iter().any(|dim| dim.known().is_some_and(|size| size != 1))
            {
                return Err(OpError::invalid(format!("k has shape {shape}; one number is needed")));
            }
        }
        cx.set_output(0, dtype, cx.shape(0).cloned());
        Ok(())
    }

    fn needs_value(&self, _: usize, _: DType) -> ValueRequirement {
        ValueRequirement::Never
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let inputs = [Some(g), cx.optional_input(1)];
        let present = if inputs[1].is_some() { 2 } else { 1 };
        let attrs = cx.node().attrs.clone();
        let gradient = cx.add_node(self.domain, "Trilu", &inputs[..present], 1, attrs)[0];
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.dims(0);
        let (input, output) = (cx.input(0), cx.output(0));
        let k = cx.has_input(1).then(|| cx.input(1));
        let mut nest = cx.nest(&dims, 0);
        let value = nest.load(input, cx.contiguous_access(input, &dims));
        let k = match k {
            Some(k) => nest.load_strided(cx, k, 0, &vec![0; dims.len()]),
            None => nest.b.int(0),
        };
        let offset = column_minus_row(&mut nest.b, dims.len());
        let (low, high) = if self.upper { (k, offset) } else { (offset, k) };
        let is_retained = nest.b.compare(CompareOp::Le, low, high);
        let zero = nest.b.constant(nest.b.ty(value), 0.0);
        let value = nest.b.select(is_retained, value, zero);
        nest.store_contiguous(cx, output, value);
        cx.emit(nest.instruction())
    }
}

/// Matrix of the input's shape with ones on a diagonal.
struct EyeLike {
    dtype: Option<DType>,
    k: i64,
}

impl Op for EyeLike {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        let dtype = cx.dtype(0)?;
        if let Some(shape) = cx.shape(0)
            && shape.rank() != 2
        {
            return Err(OpError::invalid(format!("input 0 must be a matrix, got shape {shape}")));
        }
        cx.set_output(
            0,
            self.dtype.unwrap_or(dtype),
            Some(cx.shape(0).cloned().unwrap_or_else(|| cx.unknown_shape(0, 2))),
        );
        Ok(())
    }

    fn needs_value(&self, _: usize, _: DType) -> ValueRequirement {
        ValueRequirement::Never
    }

    /// Sets no gradient: the result only depends on the shape of the input.
    fn grad(&self, _: &mut Grad<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (dims, dtype) = (cx.out_dims(0), cx.out_dtype(0));
        let output = cx.output(0);
        let mut nest = cx.nest(&dims, 0);
        let (offset, k) = (column_minus_row(&mut nest.b, 2), nest.b.int(self.k));
        let on_diagonal = nest.b.compare(CompareOp::Eq, offset, k);
        let one = nest.b.convert(on_diagonal, Type::of(dtype));
        nest.store_contiguous(cx, output, one);
        cx.emit(nest.instruction())
    }
}

fn build_trilu(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let domain = if node.domain.is_empty() { "" } else { "com.microsoft" };
    Ok(Box::new(Trilu { domain, upper: node.attrs.int("upper")?.unwrap_or(1) != 0 }))
}

fn build_eye(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let dtype = match node.attrs.int("dtype")? {
        None => None,
        Some(number) => {
            let parsed = i32::try_from(number).ok().and_then(DType::from_onnx);
            Some(
                parsed
                    .ok_or_else(|| OpError::unsupported(format!("element type {number} is not supported")))?,
            )
        }
    };
    Ok(Box::new(EyeLike { dtype, k: node.attrs.int("k")?.unwrap_or(0) }))
}

fn decompose_trilu(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let inputs = rw.node().inputs.to_vec();
    rw.emit_op("", "Trilu", &inputs, rw.attrs().clone());
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "Trilu", &[14], build_trilu),
        Definition::new("com.microsoft", "Trilu", &[1], build_trilu).decompose(decompose_trilu),
        Definition::new("", "EyeLike", &[9, 22], build_eye).traits(Traits::ZERO_DERIVATIVE),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{Attrs, Tensor};

    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        check_decomposition, check_gradients, f64s, generic_tensor, one_node_graph, run, run_node,
    };

    #[test]
    fn both_sides_of_every_diagonal() {
        let x = f64s(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, f64::INFINITY]);
        let get = |upper: i64, k: Option<i64>| {
            let k = k.map(|k| Tensor::i64(&[], &[k]));
            let attrs = Attrs::new().with("upper", upper);
            run_node(("", "Trilu"), &[Some(&x), k.as_ref()], 1, attrs).expect("it runs")[0].to_f64()
        };
        let end = f64::INFINITY;
        assert_eq!(get(1, None), [1.0, 2.0, 3.0, 0.0, 5.0, end]);
        assert_eq!(get(0, None), [1.0, 0.0, 0.0, 4.0, 5.0, 0.0]);
        assert_eq!(get(1, Some(1)), [0.0, 2.0, 3.0, 0.0, 0.0, end]);
        assert_eq!(get(0, Some(-1)), [0.0, 0.0, 0.0, 4.0, 0.0, 0.0]);
        assert_eq!(get(1, Some(9)), [0.0; 6]);
        assert_eq!(get(0, Some(i64::MAX)), [1.0, 2.0, 3.0, 4.0, 5.0, end]);
    }

    #[test]
    fn gradients_in_both_domains() {
        for domain in ["", "com.microsoft"] {
            for (upper, k) in [(1i64, 0), (0, 1), (1, -2)] {
                let inputs = [generic_tensor(&[2, 3, 4], 1), Tensor::i64(&[], &[k])];
                let ports = [Some(&inputs[0]), Some(&inputs[1])];
                let attrs = Attrs::new().with("upper", upper);
                let graph = one_node_graph(NEWEST_OPSET, (domain, "Trilu"), &ports, 1, attrs).expect("valid");
                check_gradients(&graph, &inputs, &[0], &[0]);
                check_decomposition(&graph, &inputs, 0.0);
            }
        }
    }

    /// The result is constant even if the input is trained.
    #[test]
    fn eye_like_has_no_gradient() {
        let x = generic_tensor(&[2, 3], 1);
        let (mut graph, ids) = crate::testing::graph(&[&x]);
        let eye = crate::testing::add(&mut graph, ("", "EyeLike"), "eye", &[Some(ids[0])], 1, Attrs::new());
        let ports = [Some(eye[0]), Some(ids[0])];
        let product = crate::testing::add(&mut graph, ("", "Mul"), "y", &ports, 1, Attrs::new());
        graph.outputs = product;
        crate::passes::infer::infer(&mut graph).expect("valid");
        check_gradients(&graph, &[x], &[0], &[0]);
    }

    #[test]
    fn eyes() {
        let x = Tensor::i64(&[2, 3], &[0; 6]);
        let get = |attrs: Attrs| {
            let graph = one_node_graph(NEWEST_OPSET, ("", "EyeLike"), &[Some(&x)], 1, attrs).expect("valid");
            run(&graph, std::slice::from_ref(&x)).expect("it runs").remove(0)
        };
        assert_eq!(get(Attrs::new()), Tensor::i64(&[2, 3], &[1, 0, 0, 0, 1, 0]));
        let attrs = Attrs::new().with("k", 1i64).with("dtype", i64::from(DType::F32.to_onnx()));
        assert_eq!(get(attrs), Tensor::f32(&[2, 3], &[0., 1., 0., 0., 0., 1.]));
        assert!(run_node(("", "EyeLike"), &[Some(&generic_tensor(&[2], 1))], 1, Attrs::new()).is_err());
        assert!(run_node(("", "Trilu"), &[Some(&generic_tensor(&[2], 1))], 1, Attrs::new()).is_err());
    }
}
