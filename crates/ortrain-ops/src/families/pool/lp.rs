//! Lp pooling: the Lp norm of each window, or of each plane.
//!
//! LpPool-2, 11, 18, 22 and GlobalLpPool-2, 22 of ONNX. Both are compositions: the powers of the elements, their sums,
//! and the root of each sum. The sum over a window is an average that counts padding, times the number of cells.
//!
//! AveragePool has dilations from opset 19 on, but LpPool from 18 on. So sums over dilated windows are convolutions of
//! each plane with ones. Where the norm is 0, the gradient is 0. float16 and bfloat16 are computed in float32. With
//! `ceil_mode` the spatial sizes must be known when the operator is differentiated.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};

use crate::OpError;
use crate::families::pool::windows::{Windows, window_sample};
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::casts::{arithmetic_dtype, cast};

struct LpPool {
    windows: Windows,
}

impl Op for LpPool {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        let shape = cx.shape(0).map(|shape| self.windows.infer_outputs(cx, shape)).transpose()?;
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

/// Reads the order of the norm, attribute `p`.
fn read_order(attrs: &Attrs) -> Result<i64, OpError> {
    match attrs.int("p")?.unwrap_or(2) {
        p if p >= 1 => Ok(p),
        p => Err(OpError::invalid(format!("p must be at least 1, got {p}"))),
    }
}

fn insert_node(rw: &mut Rewrite<'_>, op: &str, inputs: &[ValueId]) -> ValueId {
    rw.add(op, inputs, Attrs::new())
}

/// Inserts nodes for the power `p` of the absolute value of each element, in the arithmetic type.
fn add_powers(rw: &mut Rewrite<'_>, x: ValueId, dtype: DType, p: i64) -> ValueId {
    let data = cast(rw.patch().1, x, dtype, arithmetic_dtype(dtype));
    match p {
        1 => insert_node(rw, "Abs", &[data]),
        2 => insert_node(rw, "Mul", &[data, data]),
        _ => {
            let magnitude = insert_node(rw, "Abs", &[data]);
            let exponent = rw.constant("p", Tensor::scalar(arithmetic_dtype(dtype), p as f64));
            insert_node(rw, "Pow", &[magnitude, exponent])
        }
    }
}

/// Inserts nodes for the norm, which is the root of the sum of the powers, and replaces output 0.
fn output_root(rw: &mut Rewrite<'_>, sum: ValueId, dtype: DType, p: i64) {
    let wide = arithmetic_dtype(dtype);
    let result = if p == 1 {
        sum
    } else {
        let number = |rw: &mut Rewrite<'_>, value: f64| rw.constant("number", Tensor::scalar(wide, value));
        let (zero, one) = (number(rw, 0.0), number(rw, 1.0));
        // The gradient of the root at 0 would be infinite, so the root of 1 is computed there and dropped.
        let is_zero = insert_node(rw, "Equal", &[sum, zero]);
        let safe = insert_node(rw, "Where", &[is_zero, one, sum]);
        let root = if p == 2 {
            insert_node(rw, "Sqrt", &[safe])
        } else {
            let exponent = number(rw, 1.0 / p as f64);
            insert_node(rw, "Pow", &[safe, exponent])
        };
        insert_node(rw, "Where", &[is_zero, zero, root])
    };
    let result = cast(rw.patch().1, result, wide, dtype);
    rw.replace_output(0, result);
}

/// Returns the attributes of an average over the same windows that counts padding.
fn average_attrs(windows: &Windows, attrs: &Attrs, shape: Option<&Shape>) -> Result<Attrs, OpError> {
    let mut attrs = attrs.clone();
    attrs.0.remove("p");
    let ceil = attrs.0.remove("ceil_mode").is_some();
    let attrs = attrs.with("count_include_pad", 1i64);
    if !ceil || !windows.sliding.as_ref().is_some_and(|sliding| sliding.ceil) {
        return Ok(attrs);
    }
    // Explicit padding, so that windows that extend beyond the end are counted completely.
    let spatial =
        shape.and_then(|shape| shape.iter().skip(2).map(Dim::known).collect::<Option<Vec<usize>>>());
    let spatial = spatial.ok_or_else(|| {
        OpError::unsupported("with ceil_mode the spatial sizes of its input must be known; declare them")
    })?;
    let dims: Vec<usize> = [1, 1].into_iter().chain(spatial).collect();
    let axes = windows.axes(&dims)?;
    let after = axes.iter().map(|axis| {
        let reach = axis.output.saturating_sub(1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1;
        (reach as i64 - axis.padding_before as i64 - axis.input as i64).max(0)
    });
    let pads: Vec<i64> = axes.iter().map(|axis| axis.padding_before as i64).chain(after).collect();
    let mut attrs = attrs;
    attrs.0.remove("auto_pad");
    Ok(attrs.with("pads", pads))
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, p) = (rw.required_input(0)?, read_order(rw.attrs())?);
    let dtype = rw.dtype(x).ok_or_else(|| OpError::invalid("the type of input 0 is not known"))?;
    let windows = Windows::read(rw.node())?;
    let attrs = average_attrs(&windows, rw.attrs(), rw.shape(x))?;
    let cells: f64 = windows.kernel().iter().map(|&size| size as f64).product();
    let powers = add_powers(rw, x, dtype, p);
    let dilated =
        rw.attrs().ints("dilations")?.is_some_and(|dilations| dilations.iter().any(|&size| size != 1));
    let sum = if dilated {
        add_dilated_sum(rw, powers, arithmetic_dtype(dtype), &windows.kernel(), attrs)
    } else {
        let average = rw.add("AveragePool", &[powers], attrs);
        let cells = rw.constant("cells", Tensor::scalar(arithmetic_dtype(dtype), cells));
        insert_node(rw, "Mul", &[average, cells])
    };
    output_root(rw, sum, dtype, p);
    Ok(())
}

/// Inserts nodes for the sums over dilated windows: a convolution with ones. `x` has shape `[n, c, ...]`, and each of
/// its `n * c` planes is one image.
fn add_dilated_sum(
    rw: &mut Rewrite<'_>,
    x: ValueId,
    dtype: DType,
    kernel: &[usize],
    mut attrs: Attrs,
) -> ValueId {
    attrs.0.remove("count_include_pad");
    let shape = insert_node(rw, "Shape", &[x]);
    let [zero, one, two, end] =
        [("zero", 0), ("one", 1), ("two", 2), ("end", i64::MAX)].map(|(name, value)| rw.ints(name, &[value]));
    let axis = || Attrs::new().with("axis", 0i64);
    let outer = insert_node(rw, "Slice", &[shape, zero, two]);
    let spatial = insert_node(rw, "Slice", &[shape, two, end]);
    let planes = rw.add("ReduceProd", &[outer], Attrs::new().with("keepdims", 1i64));
    let flat = rw.add("Concat", &[planes, one, spatial], axis());
    let flat = insert_node(rw, "Reshape", &[x, flat]);
    let dims: Vec<usize> = [1, 1].into_iter().chain(kernel.iter().copied()).collect();
    let ones = rw.constant("ones", Tensor::filled(dtype, &dims, 1.0));
    let sums = rw.add("Conv", &[flat, ones], attrs);
    let shape = insert_node(rw, "Shape", &[sums]);
    let spatial = insert_node(rw, "Slice", &[shape, two, end]);
    let shape = rw.add("Concat", &[outer, spatial], axis());
    insert_node(rw, "Reshape", &[sums, shape])
}

fn decompose_global(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, p) = (rw.required_input(0)?, read_order(rw.attrs())?);
    let dtype = rw.dtype(x).ok_or_else(|| OpError::invalid("the type of input 0 is not known"))?;
    let Some(rank) = rw.shape(x).map(Shape::rank) else {
        return Err(OpError::unsupported("the rank of its input must be known; declare its shape"));
    };
    let powers = add_powers(rw, x, dtype, p);
    let axes = rw.ints("axes", &(2..rank as i64).collect::<Vec<_>>());
    let sum = insert_node(rw, "ReduceSum", &[powers, axes]);
    output_root(rw, sum, dtype, p);
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    read_order(&node.attrs)?;
    Ok(Box::new(LpPool { windows: Windows::read(node)? }))
}

fn build_global(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    read_order(&node.attrs)?;
    Ok(Box::new(LpPool { windows: Windows { sliding: None } }))
}

pub(super) fn definitions() -> [Definition; 2] {
    [
        Definition::new("", "LpPool", &[2, 11, 18, 22], build).sample(window_sample).composition(decompose),
        Definition::new("", "GlobalLpPool", &[2, 22], build_global).composition(decompose_global),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, assert_close, check_downgrade, check_gradients, f64s, generic_tensor, gradient_graph,
        one_node_graph, run, run_node,
    };

    fn window(kernel: &[i64]) -> Attrs {
        Attrs::new().with("kernel_shape", kernel.to_vec())
    }

    #[test]
    fn windows_beyond_the_end() {
        let x = f64s(&[1, 1, 5], &[3.0, -4.0, 0.0, 1.0, 2.0]);
        let get =
            |attrs: Attrs| run_node(("", "LpPool"), &[Some(&x)], 1, attrs).expect("it runs")[0].to_f64();
        let by = |step: i64| window(&[2]).with("strides", vec![step]);
        assert_eq!(get(by(2)), [5.0, 1.0]);
        assert_eq!(get(by(2).with("ceil_mode", 1i64)), [5.0, 1.0, 2.0]);
        assert_eq!(get(by(3).with("p", 1i64).with("pads", vec![1i64, 1])), [3.0, 1.0]);
    }

    #[test]
    fn gradients() {
        let x = generic_tensor(&[2, 2, 5, 4], 1);
        for p in [1i64, 2, 3] {
            for attrs in [
                window(&[2, 2]),
                window(&[3, 2]).with("strides", vec![2i64, 2]).with("pads", vec![1i64, 0, 1, 1]),
                window(&[2, 3]).with("strides", vec![2i64, 2]).with("ceil_mode", 1i64),
                window(&[2, 2]).with("dilations", vec![2i64, 1]).with("auto_pad", "SAME_LOWER"),
            ] {
                let attrs = attrs.with("p", p);
                let graph =
                    one_node_graph(NEWEST_OPSET, ("", "LpPool"), &[Some(&x)], 1, attrs).expect("valid");
                check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
            }
            let attrs = Attrs::new().with("p", p);
            let graph =
                one_node_graph(7, ("", "GlobalLpPool"), &[Some(&x)], 1, attrs).expect("the node is valid");
            check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
            let total: f64 = x.to_f64()[..20].iter().map(|x| x.abs().powi(p as i32)).sum();
            let got = run(&graph, std::slice::from_ref(&x)).expect("the graph runs").remove(0).to_f64()[0];
            assert!((got - total.powf(1.0 / p as f64)).abs() < 1e-12);
        }
    }

    /// LpPool has dilations from opset 18 on, AveragePool from 19 on.
    #[test]
    fn dilations_in_opset_18() {
        let x = generic_tensor(&[2, 3, 6, 5], 2);
        let attrs =
            window(&[2, 2]).with("dilations", vec![2i64, 3]).with("strides", vec![1i64, 2]).with("p", 2i64);
        let graph = one_node_graph(18, ("", "LpPool"), &[Some(&x)], 1, attrs).expect("valid");
        let got = run(&graph, std::slice::from_ref(&x)).expect("the graph runs").remove(0);
        let at = |n: usize, y: usize, x_at: usize| x.to_f64()[(n * 6 + y) * 5 + x_at];
        let expected: Vec<f64> = (0..6)
            .flat_map(|plane| (0..4).map(move |row| (plane, row)))
            .map(|(plane, row)| {
                let cells =
                    [at(plane, row, 0), at(plane, row, 3), at(plane, row + 2, 0), at(plane, row + 2, 3)];
                cells.iter().map(|cell| cell * cell).sum::<f64>().sqrt()
            })
            .collect();
        assert_close(&got, &f64s(&[2, 3, 4, 1], &expected), 1e-12);
        let gradient = gradient_graph(&graph, &[Some(generic_tensor(got.dims(), 3))], &[0]);
        check_downgrade(&gradient, std::slice::from_ref(&x), 18);
    }

    /// A window of zeros has norm 0 and gradient 0.
    #[test]
    fn zero_norm_has_zero_gradient() {
        let x = f64s(&[1, 1, 4], &[0.0, 0.0, 3.0, 4.0]);
        for p in [2i64, 3] {
            let attrs = window(&[2]).with("strides", vec![2i64]).with("p", p);
            let graph = one_node_graph(NEWEST_OPSET, ("", "LpPool"), &[Some(&x)], 1, attrs).expect("valid");
            let gradient = gradient_graph(&graph, &[Some(f64s(&[1, 1, 2], &[1.0, 1.0]))], &[0]);
            let got = run(&gradient, std::slice::from_ref(&x)).expect("the graph runs").remove(0);
            assert_eq!(got.to_f64()[..2], [0.0, 0.0]);
            if p == 2 {
                assert_close(&got, &f64s(&[1, 1, 4], &[0.0, 0.0, 0.6, 0.8]), 1e-12);
            }
        }
    }

    #[test]
    fn rejects_invalid_attributes() {
        let x = generic_tensor(&[1, 1, 4], 1);
        for (attrs, message) in [
            (window(&[2]).with("p", 0i64), "p must be at least 1, got 0"),
            (Attrs::new(), "kernel_shape is missing"),
        ] {
            let failure = run_node(("", "LpPool"), &[Some(&x)], 1, attrs).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
