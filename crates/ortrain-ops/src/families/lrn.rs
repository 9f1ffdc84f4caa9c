//! Local response normalization across channels.
//!
//! Source: ONNX LRN-1 and 13 (<https://onnx.ai/onnx/operators/onnx__LRN.html>); LRN-13 adds bfloat16.
//! `y = x / (bias + alpha / size * sum)^beta`, where `sum` is the sum of squares in a window of `size` channels. The
//! window extends from `floor((size - 1) / 2)` channels before to `ceil((size - 1) / 2)` channels after the element's
//! channel. Channels out of range count as zero.
//!
//! The operator is a composition: the sum is an average pooling along the channels. float16 and bfloat16 are computed
//! in float32.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};

use crate::OpError;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::formula::formula;

struct Lrn;

impl Op for Lrn {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        let shape = cx.shape(0).cloned();
        if let Some(shape) = &shape
            && shape.rank() < 2
        {
            return Err(OpError::invalid(format!(
                "input 0 must have batch and channel axes, got shape {shape}"
            )));
        }
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

fn read_size(attrs: &Attrs) -> Result<i64, OpError> {
    let size = Attrs::required("size", attrs.int("size")?)?;
    if size < 1 {
        return Err(OpError::invalid(format!("size must be at least 1, got {size}")));
    }
    Ok(size)
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    read_size(&node.attrs)?;
    Ok(Box::new(Lrn))
}

/// Returns the shape `[batch, 1, channels, space]`, in which a pooling window slides along the channels, and the
/// original shape. A 0 in the shapes keeps the batch size.
fn plane_shapes(shape: &Shape) -> Option<[Vec<i64>; 2]> {
    let known: Option<Vec<i64>> = shape[1..].iter().map(|dim| dim.known().map(|size| size as i64)).collect();
    let known = known?;
    let space = known[1..].iter().try_fold(1i64, |product, &size| product.checked_mul(size))?;
    Some([vec![0, 1, known[0], space], [vec![0], known].concat()])
}

/// Adds the average over a window of channels at each element.
fn add_channel_average(
    rw: &mut Rewrite<'_>,
    value: ValueId,
    shape: &Shape,
    size: i64,
) -> Result<ValueId, OpError> {
    let (before, after) = ((size - 1) / 2, size / 2);
    let pool = |rw: &mut Rewrite<'_>, value: ValueId, rank: usize| {
        // The first axis is the channel axis; along the other axes the window has one element.
        let along = |first: i64, rest: i64| (0..rank).map(move |axis| if axis == 0 { first } else { rest });
        let kernel: Vec<i64> = along(size, 1).collect();
        let pads: Vec<i64> = along(before, 0).chain(along(after, 0)).collect();
        let attrs =
            Attrs::new().with("kernel_shape", kernel).with("pads", pads).with("count_include_pad", 1i64);
        rw.add("AveragePool", &[value], attrs)
    };
    if let Some([to, original]) = plane_shapes(shape) {
        let to = rw.ints("planes", &to);
        let flat = rw.add("Reshape", &[value, to], Attrs::new());
        let pooled = pool(rw, flat, 2);
        let original_shape = rw.ints("shape", &original);
        return Ok(rw.add("Reshape", &[pooled, original_shape], Attrs::new()));
    }
    if shape.rank() > 4 {
        return Err(OpError::unsupported(
            "the sizes of the channel and spatial axes must be known for an input with more than 4 axes; declare them \
             in the model",
        ));
    }
    let axis = rw.ints("axis", &[1]);
    let wide = rw.add("Unsqueeze", &[value, axis], Attrs::new());
    let pooled = pool(rw, wide, shape.rank() - 1);
    Ok(rw.add("Squeeze", &[pooled, axis], Attrs::new()))
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let x = rw.required_input(0)?;
    let missing =
        || OpError::unsupported("the type and rank of the input must be known; declare them in the model");
    let (dtype, shape) = (rw.dtype(x).ok_or_else(missing)?, rw.shape(x).cloned().ok_or_else(missing)?);
    if shape.contains(&Dim::Known(0)) {
        rw.replace_output(0, x);
        return Ok(());
    }
    let attrs = rw.attrs().clone();
    let float = |name: &str, default: f32| -> Result<f64, OpError> {
        Ok(f64::from(attrs.float(name)?.unwrap_or(default)))
    };
    let (alpha, beta, bias) = (float("alpha", 1e-4)?, float("beta", 0.75)?, float("bias", 1.0)?);
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let cast = |rw: &mut Rewrite<'_>, value: ValueId, to: DType| {
        if wide == dtype {
            return value;
        }
        rw.add("Cast", &[value], Attrs::new().with("to", i64::from(to.to_onnx())))
    };
    let input = cast(rw, x, wide);
    let square = rw.add("Mul", &[input, input], Attrs::new());
    let average = add_channel_average(rw, square, &shape, read_size(&attrs)?)?;
    let mut scalar = |name: &str, value: f64| rw.constant(name, Tensor::scalar(wide, value));
    let [alpha, beta, bias] =
        [("alpha", alpha), ("beta", beta), ("bias", bias)].map(|(name, v)| scalar(name, v));
    let values = [input, average, alpha, bias, beta];
    let result =
        formula(rw, values, |[x, average, alpha, bias, beta]| x / (average * alpha + bias).pow(beta));
    let result = cast(rw, result, dtype);
    rw.replace_output(0, result);
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![Definition::new("", "LRN", &[1, 13], build).composition(decompose)]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::ValueType;

    use super::*;
    use crate::testing::{
        add, assert_close, check_downgrade, check_gradients, f64s, generic_tensor, gradient_graph, graph,
        one_node_graph, run, run_node,
    };

    const LRN: (&str, &str) = ("", "LRN");

    fn attrs(size: i64) -> Attrs {
        Attrs::new().with("size", size).with("alpha", 0.5f32).with("beta", 0.6f32).with("bias", 1.5f32)
    }

    /// Computes the result by the definition.
    fn expected(x: &Tensor, size: usize) -> Tensor {
        let (dims, elements) = (x.dims(), x.to_f64());
        let space: usize = dims[2..].iter().product();
        let (alpha, beta, bias) = (0.5, f64::from(0.6f32), 1.5);
        let y: Vec<f64> = (0..elements.len())
            .map(|k| {
                let c = k / space % dims[1];
                let window = c.saturating_sub((size - 1) / 2)..(c + size / 2 + 1).min(dims[1]);
                let sum: f64 = window.map(|other| elements[k + other * space - c * space].powi(2)).sum();
                elements[k] / (bias + alpha / size as f64 * sum).powf(beta)
            })
            .collect();
        f64s(dims, &y)
    }

    #[test]
    fn all_window_sizes_and_ranks() {
        for dims in [&[2, 5][..], &[2, 4, 3], &[1, 5, 2, 2], &[2, 1, 2, 3], &[2, 3, 1, 2, 2]] {
            for size in [1, 2, 3, 4, 9] {
                let x = generic_tensor(dims, 1);
                let got = run_node(LRN, &[Some(&x)], 1, attrs(size)).expect("it runs");
                assert_close(&got[0], &expected(&x, size as usize), 1e-12);
            }
        }
    }

    /// Two nodes in one graph do not share intermediate values.
    #[test]
    fn two_nodes_in_one_graph() {
        let (x, z) = (generic_tensor(&[2, 5, 3], 1), generic_tensor(&[2, 5, 3], 7));
        let (mut both, ids) = graph(&[&x, &z]);
        add(&mut both, LRN, "a", &[Some(ids[0])], 1, attrs(3));
        add(&mut both, LRN, "b", &[Some(ids[1])], 1, attrs(1).with("alpha", 0.25f32));
        let second = run_node(LRN, &[Some(&z)], 1, attrs(1).with("alpha", 0.25f32)).expect("it runs");
        let got = run(&both, &[x.clone(), z]).expect("it runs");
        assert_close(&got[0], &expected(&x, 3), 1e-12);
        assert_eq!(got[1], second[0]);
    }

    #[test]
    fn gradients() {
        for dims in [&[2, 3][..], &[2, 4, 2], &[1, 5, 2, 2]] {
            for size in [1, 2, 3, 9] {
                let x = generic_tensor(dims, 2);
                let graph = one_node_graph(28, LRN, &[Some(&x)], 1, attrs(size)).expect("it is read");
                check_gradients(&graph, &[x], &[0], &[0]);
            }
        }
    }

    #[test]
    fn differentiates_decomposition() {
        let x = generic_tensor(&[2, 3, 4], 3);
        let graph = one_node_graph(28, LRN, &[Some(&x)], 1, attrs(3)).expect("it is read");
        let gradient = gradient_graph(&graph, &[Some(generic_tensor(&[2, 3, 4], 4))], &[0]);
        assert!(gradient.nodes.iter().all(|node| &*node.op != "LRN"), "{gradient}");
        let count = gradient.nodes.iter().filter(|node| &*node.op == "AveragePool").count();
        assert_eq!(count, 1, "the sums are computed once");
    }

    #[test]
    fn symbolic_sizes() {
        let x = generic_tensor(&[2, 5, 3], 4);
        let symbolic = |dims: [Dim; 3]| {
            let (mut graph, ids) = graph(&[&x]);
            graph.value_mut(ids[0]).ty = ValueType::Tensor(DType::F64, Some(dims.into_iter().collect()));
            add(&mut graph, LRN, "y", &[Some(ids[0])], 1, attrs(3));
            crate::passes::infer::infer(&mut graph).expect("valid");
            graph
        };
        let all = symbolic(["n", "c", "l"].map(Dim::symbol));
        assert_close(&run(&all, std::slice::from_ref(&x)).expect("it runs")[0], &expected(&x, 3), 1e-12);
        let mut plain = all.clone();
        let node = plain.nodes[0].clone();
        let mut rw = Rewrite::new(&plain, &node, 28);
        decompose(&mut rw).expect("three axes need no numbers");
        rw.into_patch().apply(&mut plain, &[0]);
        assert_close(&run(&plain, std::slice::from_ref(&x)).expect("it runs")[0], &expected(&x, 3), 1e-12);
        let batch = symbolic([Dim::symbol("n"), 5.into(), 3.into()]);
        check_gradients(&batch, std::slice::from_ref(&x), &[0], &[0]);
    }

    #[test]
    fn empty_tensors() {
        for dims in [&[0, 3, 2][..], &[2, 0, 2], &[2, 3, 0]] {
            let x = generic_tensor(dims, 5);
            let graph = one_node_graph(28, LRN, &[Some(&x)], 1, attrs(3)).expect("it is read");
            assert_eq!(run(&graph, std::slice::from_ref(&x)).expect("it runs")[0], x);
            let gradient = gradient_graph(&graph, &[Some(generic_tensor(dims, 1))], &[0]);
            assert_eq!(run(&gradient, std::slice::from_ref(&x)).expect("it runs")[0].dims(), dims);
        }
    }

    #[test]
    fn float16_intermediates_do_not_overflow() {
        let elements = [300.0f32, -400.0, 500.0].map(half::f16::from_f32);
        let x = Tensor::from_slice(DType::F16, &[1, 3], &elements);
        let got = run_node(LRN, &[Some(&x)], 1, attrs(3)).expect("it runs");
        let expected_elements = expected(&f64s(&[1, 3], &x.to_f64()), 3).to_f64();
        for (got, expected_element) in got[0].to_f64().into_iter().zip(expected_elements) {
            assert!(
                (got - expected_element).abs() <= 1e-3 * expected_element.abs(),
                "{got} for {expected_element}"
            );
        }
    }

    #[test]
    fn versions_and_invalid_attributes() {
        let x = generic_tensor(&[2, 3, 4], 6);
        let graph = one_node_graph(28, LRN, &[Some(&x)], 1, attrs(3)).expect("it is read");
        assert_eq!(check_downgrade(&graph, std::slice::from_ref(&x), 7).nodes.len(), 1);
        for (attrs, words) in
            [(Attrs::new(), "attribute \"size\" is missing"), (attrs(0), "size must be at least 1, got 0")]
        {
            let error = one_node_graph(28, LRN, &[Some(&x)], 1, attrs).expect_err("refused").to_string();
            assert!(error.contains(words), "{error}");
        }
        let error = one_node_graph(28, LRN, &[Some(&generic_tensor(&[3], 1))], 1, attrs(3))
            .expect_err("refused")
            .to_string();
        assert!(error.contains("input 0 must have batch and channel axes"), "{error}");
    }
}
