//! The central part of a tensor, or a tensor centered in zeros: `CenterCropPad`.
//!
//! CenterCropPad-18 of ONNX (<https://onnx.ai/onnx/operators/onnx__CenterCropPad.html>). Each axis is cropped or padded
//! to its requested size. If the difference is odd, the extra element is cropped or padded at the end. The operator is
//! a composition: a Pad with pads that are computed from both shapes. The pads are negative where the tensor is
//! cropped.

use ortrain_graph::{Attrs, DType, Graph, Node, Shape};

use crate::OpError;
use crate::infer::{Infer, normalize_axis};
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;

struct CenterCropPad {
    axes: Option<Vec<i64>>,
}

impl CenterCropPad {
    /// Returns the axes, counted from the front.
    fn axes(&self, rank: usize) -> Result<Vec<usize>, OpError> {
        match &self.axes {
            Some(axes) => axes.iter().map(|&axis| normalize_axis(axis, rank)).collect(),
            None => Ok((0..rank).collect()),
        }
    }
}

impl Op for CenterCropPad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        let dtype = cx.dtype(0)?;
        cx.expect_dtype(1, "int32 or int64", |dtype| matches!(dtype, DType::I32 | DType::I64))?;
        if let Some(bad) = cx.ints(1).and_then(|sizes| sizes.into_iter().find(|&size| size < 0)) {
            return Err(OpError::invalid(format!("sizes must be at least 0, got {bad}")));
        }
        let Some(shape) = cx.shape(0) else {
            cx.set_output(0, dtype, None);
            return Ok(());
        };
        let axes = self.axes(shape.rank())?;
        let sizes = cx.sizes(1);
        if let Some(sizes) = sizes.as_ref().filter(|sizes| sizes.len() != axes.len()) {
            return Err(OpError::invalid(format!(
                "got {} sizes for {} axes of shape {shape}",
                sizes.len(),
                axes.len()
            )));
        }
        let mut dims: Shape = shape.clone();
        for (k, &axis) in axes.iter().enumerate() {
            let size = sizes.as_ref().map(|sizes| sizes[k].clone());
            dims.0[axis] = size.unwrap_or_else(|| cx.unknown_dim(0, axis));
        }
        cx.set_output(0, dtype, Some(dims));
        Ok(())
    }
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, target) = (rw.required_input(0)?, rw.required_input(1)?);
    let Some(rank) = rw.shape(x).map(Shape::rank) else {
        return Err(OpError::unsupported(
            "the rank of the input must be known; declare its shape in the model",
        ));
    };
    let axes = rw.attrs().ints("axes")?.map(<[i64]>::to_vec);
    let axes: Vec<i64> = CenterCropPad { axes }.axes(rank)?.into_iter().map(|axis| axis as i64).collect();
    let axes = rw.ints("axes", &axes);
    let two = rw.ints("two", &[2]);
    let shape = rw.add("Shape", &[x], Attrs::new());
    let sizes = rw.add("Gather", &[shape, axes], Attrs::new());
    let cast = Attrs::new().with("to", i64::from(DType::I64.to_onnx()));
    let new_sizes = rw.add("Cast", &[target], cast);
    let difference = rw.add("Sub", &[new_sizes, sizes], Attrs::new());
    // Division rounds towards zero, so the smaller half is at the begin for crops and pads.
    let before = rw.add("Div", &[difference, two], Attrs::new());
    let after = rw.add("Sub", &[difference, before], Attrs::new());
    let pads = rw.add("Concat", &[before, after], Attrs::new().with("axis", 0i64));
    let inputs = [Some(x), Some(pads), None, Some(axes)];
    let result = rw.add_node("", "Pad", &inputs, 1, Attrs::new())[0];
    rw.replace_output(0, result);
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(CenterCropPad { axes: node.attrs.ints("axes")?.map(<[i64]>::to_vec) }))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![Definition::new("", "CenterCropPad", &[18], build).composition(decompose)]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::Tensor;

    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, assert_close, check_gradients, f64s, generic_tensor, one_node_graph, run_node,
    };

    const OP: (&str, &str) = ("", "CenterCropPad");

    #[test]
    fn extra_element_is_at_the_end() {
        let x = f64s(&[1, 4], &[1.0, 2.0, 3.0, 4.0]);
        let get = |size: i64| {
            let sizes = Tensor::i64(&[1], &[size]);
            let attrs = Attrs::new().with("axes", vec![-1i64]);
            run_node(OP, &[Some(&x), Some(&sizes)], 1, attrs).expect("it runs").remove(0)
        };
        assert_close(&get(1), &f64s(&[1, 1], &[2.0]), 0.0);
        assert_close(&get(2), &f64s(&[1, 2], &[2.0, 3.0]), 0.0);
        assert_close(&get(4), &x, 0.0);
        assert_close(&get(7), &f64s(&[1, 7], &[0.0, 1.0, 2.0, 3.0, 4.0, 0.0, 0.0]), 0.0);
    }

    #[test]
    fn gradients() {
        let inputs = [generic_tensor(&[3, 4, 2], 1), Tensor::from_slice(DType::I32, &[3], &[4i32, 1, 2])];
        let ports = [Some(&inputs[0]), Some(&inputs[1])];
        let graph = one_node_graph(NEWEST_OPSET, OP, &ports, 1, Attrs::new()).expect("valid");
        check_gradients(&graph, &inputs, &[0], &[0]);
    }

    #[test]
    fn rejects_invalid_sizes() {
        for (sizes, message) in [
            (&[2i64][..], "got 1 sizes for 2 axes of shape [2, 2]"),
            (&[2, -1], "sizes must be at least 0, got -1"),
        ] {
            let sizes = Tensor::i64(&[sizes.len()], sizes);
            let failure = run_node(OP, &[Some(&generic_tensor(&[2, 2], 1)), Some(&sizes)], 1, Attrs::new());
            let Failure::Prepare(error) = failure.expect_err("refused") else { panic!("prepared") };
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
