//! Position of the largest or smallest element along an axis (`ArgMax`, `ArgMin`), and its one-hot vector (`Hardmax`).
//!
//! ArgMax, ArgMin-1, 11, 12, 13 (<https://onnx.ai/onnx/operators/onnx__ArgMax.html>) and Hardmax-1, 11, 13 of ONNX.
//! Among equal elements the first is selected, or the last with `select_last_index`. NaN counts as the extreme of any
//! elements. Hardmax selects the first. Before opset 13 Hardmax acts on all axes from the axis on, as Softmax does. Its
//! gradient is zero.

use ortrain_expr::{BinaryOp, CompareOp, ReduceOp, Reg, Strides, Type};
use ortrain_graph::{DType, Dim, Graph, Node};

use crate::OpError;
use crate::class::{Class, Traits};
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axis};
use crate::lower::{Lower, NestBuilder, split_at_axis};
use crate::op::{Definition, Op};
use crate::support::matrix_form::{downgrade, upgrade};

/// Position of the maximum or minimum along an axis.
struct ArgExtreme {
    smallest: bool,
    axis: i64,
    keepdims: bool,
    last: bool,
}

/// One at the first of the largest elements, zeros elsewhere.
struct Hardmax {
    axis: i64,
}

/// Returns the space of a nest over the rows along `axis`, and the strides of a tensor of shape `dims` in it. The last
/// axis of the nest is `axis`.
fn row_space_and_strides(dims: &[usize], axis: usize) -> ([usize; 3], Strides) {
    let (before, size, after) = split_at_axis(dims, axis);
    ([before, after, size], [(size * after) as isize, 1, after as isize].into_iter().collect())
}

/// Returns the position of the extreme of `x` along the third axis of a nest.
fn extreme_position(nest: &mut NestBuilder, x: Reg, size: usize, smallest: bool, last: bool) -> Reg {
    let extreme = nest.reduce(if smallest { ReduceOp::Min } else { ReduceOp::Max }, x);
    let b = &mut nest.b;
    let equal = b.compare(CompareOp::Eq, x, extreme);
    let is_extreme = if b.ty(x).is_float() {
        let same = b.compare(CompareOp::Eq, x, x);
        let nan = b.unary(ortrain_expr::UnaryOp::Not, same);
        b.binary(BinaryOp::Or, equal, nan)
    } else {
        equal
    };
    let (index, none) = (b.coordinate(2), b.int(if last { -1 } else { size as i64 }));
    let candidate = b.select(is_extreme, index, none);
    nest.reduce(if last { ReduceOp::Max } else { ReduceOp::Min }, candidate)
}

impl Op for ArgExtreme {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        cx.expect_dtype(0, "a number type", DType::is_number)?;
        let Some(shape) = cx.shape(0) else {
            cx.set_output(0, DType::I64, None);
            return Ok(());
        };
        let axis = normalize_axis(self.axis, shape.rank())?;
        if shape[axis] == Dim::Known(0) {
            return Err(OpError::invalid(format!("axis {axis} of shape {shape} must not be empty")));
        }
        let mut dims = shape.clone();
        if self.keepdims {
            dims.0[axis] = Dim::Known(1);
        } else {
            dims.0.remove(axis);
        }
        cx.set_output(0, DType::I64, Some(dims));
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.dims(0);
        let (space, strides) = row_space_and_strides(&dims, normalize_axis(self.axis, dims.len())?);
        let (input, output) = (cx.input(0), cx.output(0));
        let mut nest = cx.nest(&space, 1);
        let x = nest.load_strided(cx, input, 0, &strides);
        let at = extreme_position(&mut nest, x, space[2], self.smallest, self.last);
        nest.store_outer(cx, output, at);
        cx.emit(nest.instruction())
    }
}

impl Op for Hardmax {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        cx.shape(0).map(|shape| normalize_axis(self.axis, shape.rank())).transpose()?;
        cx.set_output(0, dtype, cx.shape(0).cloned());
        Ok(())
    }

    /// Sets no gradient: the derivative is zero almost everywhere.
    fn grad(&self, _: &mut Grad<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.dims(0);
        let (space, strides) = row_space_and_strides(&dims, normalize_axis(self.axis, dims.len())?);
        let (input, output) = (cx.input(0), cx.output(0));
        let mut nest = cx.nest(&space, 1);
        let x = nest.load_strided(cx, input, 0, &strides);
        let at = extreme_position(&mut nest, x, space[2], false, false);
        let column = nest.b.coordinate(2);
        let chosen = nest.b.compare(CompareOp::Eq, column, at);
        let one = nest.b.convert(chosen, Type::of(cx.dtype(0)));
        nest.store_strided(cx, output, 0, strides, one);
        cx.emit(nest.instruction())
    }
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(ArgExtreme {
        smallest: &*node.op == "ArgMin",
        axis: node.attrs.int("axis")?.unwrap_or(0),
        keepdims: node.attrs.int("keepdims")?.unwrap_or(1) != 0,
        last: node.attrs.int("select_last_index")?.unwrap_or(0) != 0,
    }))
}

fn build_hardmax(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Hardmax { axis: node.attrs.int("axis")?.unwrap_or(-1) }))
}

pub(crate) fn definitions() -> Vec<Definition> {
    let arg = |name| Definition::new("", name, &[1, 11, 12, 13], build).class(Class::Choice);
    vec![
        arg("ArgMax"),
        arg("ArgMin"),
        Definition::new("", "Hardmax", &[1, 11, 13], build_hardmax)
            .class(Class::Choice)
            .traits(Traits::ZERO_DERIVATIVE)
            .upgrade(upgrade)
            .downgrade(downgrade),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{Attrs, Tensor};

    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{check_downgrade, f64s, one_node_graph, run, run_node};

    fn positions(op: &str, x: &Tensor, attrs: Attrs) -> Tensor {
        run_node(("", op), &[Some(x)], 1, attrs).expect("it runs").remove(0)
    }

    #[test]
    fn first_and_last_and_nan() {
        let x = f64s(&[2, 4], &[1.0, 7.0, 7.0, -2.0, 3.0, f64::NAN, 9.0, f64::NAN]);
        let attrs = |last: i64| {
            Attrs::new().with("axis", -1i64).with("keepdims", 0i64).with("select_last_index", last)
        };
        assert_eq!(positions("ArgMax", &x, attrs(0)), Tensor::i64(&[2], &[1, 1]));
        assert_eq!(positions("ArgMax", &x, attrs(1)), Tensor::i64(&[2], &[2, 3]));
        assert_eq!(positions("ArgMin", &x, attrs(0)), Tensor::i64(&[2], &[3, 1]));
        let columns = positions("ArgMin", &x, Attrs::new());
        assert_eq!((columns.dims(), columns.to_i64()), (&[1, 4][..], Some(vec![0, 1, 0, 1])));
        let bytes = Tensor::from_slice(DType::U8, &[3], &[200u8, 3, 200]);
        assert_eq!(positions("ArgMax", &bytes, attrs(0)), Tensor::i64(&[], &[0]));
        let min = Tensor::i64(&[2], &[i64::MIN, i64::MIN]);
        assert_eq!(positions("ArgMax", &min, attrs(0)), Tensor::i64(&[], &[0]));
        assert_eq!(positions("Hardmax", &x, Attrs::new()).to_f64(), [0., 1., 0., 0., 0., 1., 0., 0.]);
    }

    #[test]
    fn rejects_empty_axis() {
        let error =
            run_node(("", "ArgMax"), &[Some(&Tensor::f32(&[2, 0], &[]))], 1, Attrs::new().with("axis", 1i64));
        assert!(
            format!("{:?}", error.expect_err("refused")).contains("axis 1 of shape [2, 0] must not be empty")
        );
    }

    /// Before opset 13 all axes from `axis` on form one row.
    #[test]
    fn older_forms_of_hardmax() {
        let x = f64s(&[2, 2, 2], &[1.0, 2.0, 4.0, 3.0, -1.0, -2.0, -4.0, -3.0]);
        let old = one_node_graph(11, ("", "Hardmax"), &[Some(&x)], 1, Attrs::new()).expect("it is read");
        let got = run(&old, std::slice::from_ref(&x)).expect("it runs").remove(0);
        assert_eq!(got.to_f64(), [0., 0., 1., 0., 1., 0., 0., 0.]);
        for axis in [0i64, 1, 2] {
            let attrs = Attrs::new().with("axis", axis);
            let graph = one_node_graph(NEWEST_OPSET, ("", "Hardmax"), &[Some(&x)], 1, attrs).expect("valid");
            check_downgrade(&graph, std::slice::from_ref(&x), 12);
            check_downgrade(&graph, std::slice::from_ref(&x), 13);
        }
    }
}
