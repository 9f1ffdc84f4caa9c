//! Fake quantization for quantization-aware training: `FakeQuant` and `FakeQuantGrad` of `com.microsoft`.
//!
//! With `q = round_half_to_even(x / scale) + zero_point`, the first output is
//! `(clamp(q, quant_min, quant_max) - zero_point) * scale`. The second output, the mask, is true where
//! `quant_min <= q <= quant_max`.
//!
//! `FakeQuantGrad` is the straight-through estimator (Bengio, Léonard, Courville 2013, arXiv:1308.3432). The gradient
//! of `x` is the gradient of the first output where the mask is true, and zero elsewhere. The scale and the zero point
//! have no gradient. Both operators run as their decompositions.

use ortrain_graph::{Attrs, DType, Graph, Node, Shape, Tensor};

use crate::OpError;
use crate::grad::Grad;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::formula::formula;

/// Default of the attribute `quant_max`.
const QUANT_MAX: i64 = 255;

struct FakeQuant;

impl Op for FakeQuant {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 3, 2)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype(0..3)?;
        for (k, name) in [(1, "the scale"), (2, "the zero point")] {
            if let Some(shape) = cx.shape(k)
                && !shape.iter().all(|dim| dim.known().is_none_or(|size| size == 1))
            {
                return Err(OpError::invalid(format!("{name} has shape {shape}; one number is needed")));
            }
        }
        cx.set_output(0, dtype, cx.shape(0).cloned());
        cx.set_output(1, DType::Bool, cx.shape(0).cloned());
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        if let (Some(g), true) = (cx.output_grad(0), cx.needs_grad(0)) {
            let mask = cx.output(1, "mask");
            let gradient = cx.add_in("com.microsoft", "FakeQuantGrad", &[g, mask], Attrs::new());
            cx.set_grad(0, gradient);
        }
        Ok(())
    }
}

/// Gradient of [`FakeQuant`]. The inputs are the gradient of the first output, and the mask.
struct FakeQuantGrad;

impl Op for FakeQuantGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        cx.expect_dtype(1, "bool", |dtype| dtype == DType::Bool)?;
        if let (Some(g), Some(mask)) =
            (cx.shape(0).and_then(Shape::concrete), cx.shape(1).and_then(Shape::concrete))
            && g != mask
        {
            return Err(OpError::invalid(format!("the gradient has shape {g:?}, the mask {mask:?}")));
        }
        cx.set_output(0, dtype, cx.shape(0).cloned());
        Ok(())
    }
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, mut scale, mut zero_point) =
        (rw.required_input(0)?, rw.required_input(1)?, rw.required_input(2)?);
    let dtype = rw.dtype(x).ok_or_else(|| OpError::invalid("the type of input 0 is not known"))?;
    let bound = |name: &str, default: i64| Ok(rw.attrs().int(name)?.unwrap_or(default) as f64);
    let (min, max): (Result<f64, OpError>, Result<f64, OpError>) =
        (bound("quant_min", 0), bound("quant_max", QUANT_MAX));
    // A scale or zero point of shape [1] would add an axis to a scalar input.
    let scalar = rw.ints("scalar", &[]);
    for number in [&mut scale, &mut zero_point] {
        if rw.shape(*number).is_none_or(|shape| shape.rank() > 0) {
            *number = rw.add("Reshape", &[*number, scalar], Attrs::new());
        }
    }
    let low = rw.constant("quant_min", Tensor::scalar(dtype, min?));
    let high = rw.constant("quant_max", Tensor::scalar(dtype, max?));
    let quotient = rw.add("Div", &[x, scale], Attrs::new());
    let rounded = rw.add("Round", &[quotient], Attrs::new());
    let moved = rw.add("Add", &[rounded, zero_point], Attrs::new());
    if rw.has_output(0) {
        let clamped = rw.add("Clip", &[moved, low, high], Attrs::new());
        let values = [clamped, zero_point, scale];
        let result = formula(rw, values, |[clamped, zero_point, scale]| (clamped - zero_point) * scale);
        rw.replace_output(0, result);
    }
    if rw.has_output(1) {
        let above = rw.add("GreaterOrEqual", &[moved, low], Attrs::new());
        let below = rw.add("LessOrEqual", &[moved, high], Attrs::new());
        let mask = rw.add("And", &[above, below], Attrs::new());
        rw.replace_output(1, mask);
    }
    Ok(())
}

fn decompose_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (g, mask) = (rw.required_input(0)?, rw.required_input(1)?);
    let dtype = rw.dtype(g).ok_or_else(|| OpError::invalid("the type of input 0 is not known"))?;
    let zero = rw.constant("zero", Tensor::scalar(dtype, 0.0));
    let gradient = rw.add("Where", &[mask, g, zero], Attrs::new());
    rw.replace_output(0, gradient);
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let (min, max) =
        (node.attrs.int("quant_min")?.unwrap_or(0), node.attrs.int("quant_max")?.unwrap_or(QUANT_MAX));
    if min > max {
        return Err(OpError::invalid(format!("quant_min must not exceed quant_max, got {min} and {max}")));
    }
    Ok(Box::new(FakeQuant))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("com.microsoft", "FakeQuant", &[1], build).runs_as(decompose),
        Definition::new("com.microsoft", "FakeQuantGrad", &[1], |_, _| Ok(Box::new(FakeQuantGrad)))
            .composition(decompose_grad),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, assert_close, check_decomposition, f64s, gradient_graph, one_node_graph, run, run_node,
    };

    const OP: (&str, &str) = ("com.microsoft", "FakeQuant");

    /// Inputs with rounded values below `quant_min`, halfway between integers, at the bounds and above `quant_max`.
    fn inputs() -> [Tensor; 3] {
        [f64s(&[6], &[-3.0, 0.25, 0.75, 126.0, 126.5, 200.0]), f64s(&[], &[0.5]), f64s(&[], &[3.0])]
    }

    #[test]
    fn rounds_and_clamps() {
        let [x, scale, zero_point] = inputs();
        let ports = [Some(&x), Some(&scale), Some(&zero_point)];
        let got = run_node(OP, &ports, 2, Attrs::new()).expect("it runs");
        assert_close(&got[0], &f64s(&[6], &[-1.5, 0.0, 1.0, 126.0, 126.0, 126.0]), 0.0);
        assert_eq!(got[1].to_f64(), [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]);
        let attrs = Attrs::new().with("quant_min", -8i64).with("quant_max", 7i64);
        let got = run_node(OP, &ports, 2, attrs).expect("it runs");
        assert_close(&got[0], &f64s(&[6], &[-3.0, 0.0, 1.0, 2.0, 2.0, 2.0]), 0.0);
    }

    #[test]
    fn gradient_is_straight_through() {
        let [x, scale, zero_point] = inputs();
        let ports = [Some(&x), Some(&scale), Some(&zero_point)];
        let graph = one_node_graph(NEWEST_OPSET, OP, &ports, 1, Attrs::new()).expect("valid");
        let backward = gradient_graph(&graph, &[Some(f64s(&[6], &[1.0; 6]))], &[0]);
        let got = run(&backward, &inputs()).expect("it runs");
        assert_eq!(got.last().expect("a gradient").to_f64(), [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn decomposes_into_plain_onnx() {
        let [x, scale, zero_point] = inputs();
        let graph =
            one_node_graph(NEWEST_OPSET, OP, &[Some(&x), Some(&scale), Some(&zero_point)], 2, Attrs::new())
                .expect("valid");
        check_decomposition(&graph, &inputs(), 0.0);
        let (g, mask) = (f64s(&[2], &[3.0, 4.0]), Tensor::from_slice(DType::Bool, &[2], &[1u8, 0]));
        let op = ("com.microsoft", "FakeQuantGrad");
        let graph =
            one_node_graph(NEWEST_OPSET, op, &[Some(&g), Some(&mask)], 1, Attrs::new()).expect("valid");
        check_decomposition(&graph, &[g, mask], 0.0);
    }

    #[test]
    fn rejects_invalid_inputs() {
        let [x, scale, zero_point] = inputs();
        let bounds = Attrs::new().with("quant_min", 9i64).with("quant_max", 7i64);
        for (scale, attrs, message) in [
            (scale, bounds, "quant_min must not exceed quant_max, got 9 and 7"),
            (x.clone(), Attrs::new(), "the scale has shape [6]; one number is needed"),
        ] {
            let failure = run_node(OP, &[Some(&x), Some(&scale), Some(&zero_point)], 1, attrs);
            let Failure::Prepare(error) = failure.expect_err("refused") else { panic!("prepared") };
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
