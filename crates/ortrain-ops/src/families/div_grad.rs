//! Gradients of a quotient: `DivGrad` of `com.microsoft`, from training graphs of ONNX Runtime.
//!
//! The inputs are the gradient `dY` of `A / B`, `A` and `B`. The outputs are the gradients `dY / B` of `A` and
//! `-dY * A / B^2` of `B`. Each is summed over the axes along which its operand was broadcast. Either output may be
//! absent. The operator is a composition.

use ortrain_graph::{Attrs, DType, Graph, Node};

use crate::OpError;
use crate::infer::{Infer, broadcast};
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::formula::formula;

struct DivGrad;

impl Op for DivGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 3, 2)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype(0..3)?;
        if let (Some(a), Some(b), Some(g)) = (cx.shape(1), cx.shape(2), cx.shape(0)) {
            let common = broadcast(a, b)?;
            let differs = |(x, y): (Option<usize>, Option<usize>)| x.zip(y).is_some_and(|(x, y)| x != y);
            let sizes = common.iter().zip(g.iter()).map(|(x, y)| (x.known(), y.known()));
            if common.rank() != g.rank() || sizes.into_iter().any(differs) {
                return Err(OpError::invalid(format!(
                    "the gradient has shape {g}; the quotient of {a} and {b} has shape {common}"
                )));
            }
        }
        for k in 0..2 {
            cx.set_output(k, dtype, cx.shape(k + 1).cloned());
        }
        Ok(())
    }
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (g, a, b) = (rw.required_input(0)?, rw.required_input(1)?, rw.required_input(2)?);
    // The gradient of `A` before its summation is a factor of the gradient of `B`.
    let share = rw.add("Div", &[g, b], Attrs::new());
    if rw.has_output(0) {
        let of_a = rw.sum_to(share, a, g)?;
        rw.replace_output(0, of_a);
    }
    if rw.has_output(1) {
        let each = formula(rw, [share, a, b], |[share, a, b]| -(share * (a / b)));
        let of_b = rw.sum_to(each, b, g)?;
        rw.replace_output(1, of_b);
    }
    Ok(())
}

fn build(_: &Graph, _: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(DivGrad))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![Definition::new("com.microsoft", "DivGrad", &[1], build).composition(decompose)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, assert_close, check_decomposition, f64s, generic_tensor, one_node_graph, run_node,
    };

    const OP: (&str, &str) = ("com.microsoft", "DivGrad");

    #[test]
    fn gradients_with_broadcast_operands() {
        let (wide, row) = (f64s(&[2, 2], &[1.0, 2.0, 3.0, 4.0]), f64s(&[2], &[2.0, -4.0]));
        let g = f64s(&[2, 2], &[1.0, 1.0, 2.0, 0.5]);
        let got = run_node(OP, &[Some(&g), Some(&wide), Some(&row)], 2, Attrs::new()).expect("it runs");
        assert_close(&got[0], &f64s(&[2, 2], &[0.5, -0.25, 1.0, -0.125]), 0.0);
        // -(1 * 1 + 2 * 3) / 4 and -(1 * 2 + 0.5 * 4) / 16.
        assert_close(&got[1], &f64s(&[2], &[-1.75, -0.25]), 0.0);
        let got = run_node(OP, &[Some(&g), Some(&row), Some(&wide)], 2, Attrs::new()).expect("it runs");
        assert_close(&got[0], &f64s(&[2], &[1.0 + 2.0 / 3.0, 0.5 + 0.125]), 1e-15);
        assert_close(&got[1], &f64s(&[2, 2], &[-2.0, 1.0, -4.0 / 9.0, 0.125]), 1e-15);
    }

    #[test]
    fn decomposes_into_plain_onnx() {
        for dims in [&[3, 4][..], &[4], &[3, 1], &[1, 1, 1]] {
            let inputs = [generic_tensor(&[3, 4], 1), generic_tensor(&[3, 4], 2), generic_tensor(dims, 3)];
            let inputs = if dims.len() == 3 {
                [generic_tensor(&[1, 3, 4], 1), generic_tensor(&[3, 4], 2), generic_tensor(dims, 3)]
            } else {
                inputs
            };
            let ports = [Some(&inputs[0]), Some(&inputs[1]), Some(&inputs[2])];
            let graph = one_node_graph(NEWEST_OPSET, OP, &ports, 2, Attrs::new()).expect("valid");
            check_decomposition(&graph, &inputs, 0.0);
        }
    }

    #[test]
    fn rejects_mismatched_gradient_shape() {
        let (wide, row) = (generic_tensor(&[2, 2], 1), generic_tensor(&[2], 2));
        let failure = run_node(OP, &[Some(&row), Some(&wide), Some(&row)], 2, Attrs::new());
        let Failure::Prepare(error) = failure.expect_err("refused") else { panic!("prepared") };
        let message = "the gradient has shape [2]; the quotient of [2, 2] and [2] has shape [2, 2]";
        assert!(error.to_string().contains(message), "{error}");
    }
}
