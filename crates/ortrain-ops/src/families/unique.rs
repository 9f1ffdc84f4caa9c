//! Compress and Unique: elements selected by a mask, and distinct elements.
//!
//! Compress-9, 11, 28 (<https://onnx.ai/onnx/operators/onnx__Compress.html>) and Unique-11, 28
//! (<https://onnx.ai/onnx/operators/onnx__Unique.html>) of ONNX. Compress is rewritten to the positions of true
//! elements (`NonZero`) and a Gather. The number of elements that Unique finds depends on values, so it runs on the
//! host. In Unique, NaN equals itself and is larger than every number. Its gradient flows to the first occurrence of
//! each element.

use std::cmp::Ordering;
use std::sync::Arc;

use ortrain_expr::{Scalar, Steps};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor};
use ortrain_program::HostFunction;

use crate::OpError;
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axis};
use crate::lower::split_at_axis;
use crate::op::{Definition, Op, Placement};
use crate::rewrite::Rewrite;
use crate::support::rewritten_on_read::build_rewritten_on_read;

/// Rewrites Compress to a Gather at the positions of true elements, along an axis or over all elements.
fn rewrite_compress(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (mut x, condition) = (rw.required_input(0)?, rw.required_input(1)?);
    let flat = rw.ints("flat", &[-1]);
    let positions = rw.add("NonZero", &[condition], Attrs::new());
    let positions = rw.add("Reshape", &[positions, flat], Attrs::new());
    let axis = match rw.attrs().int("axis")? {
        Some(axis) => axis,
        None => {
            x = rw.add("Reshape", &[x, flat], Attrs::new());
            0
        }
    };
    rw.emit_op("", "Gather", &[Some(x), Some(positions)], Attrs::new().with("axis", axis));
    Ok(())
}

/// Distinct elements, or slices along an axis. Outputs are the distinct elements, the index of their first occurrence,
/// the index of each element among them, and their counts.
#[derive(Clone, Copy, Debug)]
struct Unique {
    axis: Option<i64>,
    sorted: bool,
}

impl Op for Unique {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 4)?;
        let dtype = cx.dtype(0)?;
        let count = cx.unknown_dim(0, 0);
        let vector = |size: Dim| Some([size].into_iter().collect::<Shape>());
        let (shape, input_len) = match (cx.shape(0), self.axis) {
            (shape, None) => {
                let known_len = shape.and_then(Shape::concrete).map(|dims| Dim::Known(dims.iter().product()));
                (vector(count.clone()), known_len.unwrap_or_else(|| cx.unknown_dim(2, 0)))
            }
            (Some(shape), Some(axis)) => {
                let axis = normalize_axis(axis, shape.rank())?;
                let mut dims = shape.clone();
                dims.0[axis] = count.clone();
                (Some(dims), shape[axis].clone())
            }
            (None, Some(_)) => (None, cx.unknown_dim(2, 0)),
        };
        cx.set_output(0, dtype, shape);
        cx.set_output(1, DType::I64, vector(count.clone()));
        cx.set_output(2, DType::I64, vector(input_len));
        cx.set_output(3, DType::I64, vector(count));
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (x, first) = (cx.input(0)?, cx.output(1, "indices"));
        let shape = cx.add("Shape", &[x], Attrs::new());
        let gradient = match self.axis {
            Some(axis) => {
                let attrs = Attrs::new().with("axis", axis);
                cx.add_in("com.microsoft", "GatherGrad", &[shape, first, g], attrs)
            }
            None => {
                let (size, one) = (cx.add("Size", &[x], Attrs::new()), cx.ints("one", &[1]));
                let size = cx.add("Reshape", &[size, one], Attrs::new());
                let attrs = Attrs::new().with("axis", 0i64);
                let flat = cx.add_in("com.microsoft", "GatherGrad", &[size, first, g], attrs);
                cx.add("Reshape", &[flat, shape], Attrs::new().with("allowzero", 1i64))
            }
        };
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn placement(&self) -> Placement {
        Placement::Host(Arc::new(*self))
    }
}

/// Compares elements of one type: NaN comes last, and is equal to itself.
fn compare_elements(a: Scalar, b: Scalar) -> Ordering {
    let floats = |a: f64, b: f64| a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()));
    match (a, b) {
        (Scalar::I64(a), Scalar::I64(b)) => a.cmp(&b),
        (Scalar::U64(a), Scalar::U64(b)) => a.cmp(&b),
        (a, b) => floats(a.to_f64(), b.to_f64()),
    }
}

impl HostFunction for Unique {
    fn call(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>, String> {
        let [input] = inputs else {
            return Err(format!("expected one tensor, got {}", inputs.len()));
        };
        let (dtype, width) = (input.dtype(), input.dtype().size());
        let (dims, axis) = match self.axis {
            None => (vec![input.len()], 0),
            Some(axis) => {
                let axis = normalize_axis(axis, input.dims().len()).map_err(|error| error.to_string())?;
                (input.dims().to_vec(), axis)
            }
        };
        let (before, size, after) = split_at_axis(&dims, axis);
        let elements: Vec<Scalar> =
            input.data().chunks_exact(width).map(|bytes| Scalar::read(dtype, bytes)).collect();
        // Element `e` of slice `k`; slices are counted along the axis.
        let at = |k: usize, e: usize| (e / after.max(1) * size + k) * after + e % after.max(1);
        let steps = Steps::default();
        let compare = |a: &usize, b: &usize| {
            steps.step();
            (0..before * after)
                .map(|e| compare_elements(elements[at(*a, e)], elements[at(*b, e)]))
                .find(|&order| order != Ordering::Equal)
                .unwrap_or(Ordering::Equal)
        };
        let mut slices: Vec<usize> = (0..size).collect();
        // A stable sort: equal slices keep their order.
        slices.sort_by(compare);
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for k in slices {
            match groups.last_mut() {
                Some(group) if compare(&group[0], &k) == Ordering::Equal => group.push(k),
                _ => groups.push(vec![k]),
            }
        }
        if !self.sorted {
            groups.sort_by_key(|group| group[0]);
        }
        let mut inverse = vec![0i64; size];
        for (g, group) in groups.iter().enumerate() {
            for &k in group {
                inverse[k] = g as i64;
            }
        }
        let mut bytes = Vec::with_capacity(before * groups.len() * after * width);
        for o in 0..before {
            for group in &groups {
                let start = (o * size + group[0]) * after * width;
                bytes.extend_from_slice(&input.data()[start..start + after * width]);
            }
        }
        let mut result_dims = dims;
        result_dims[axis] = groups.len();
        let values = Tensor::new(dtype, result_dims, bytes.into()).map_err(|error| error.to_string())?;
        let list = |of: &dyn Fn(&Vec<usize>) -> usize| -> Tensor {
            let numbers: Vec<i64> = groups.iter().map(|group| of(group) as i64).collect();
            Tensor::i64(&[numbers.len()], &numbers)
        };
        Ok(vec![values, list(&|group| group[0]), Tensor::i64(&[size], &inverse), list(&Vec::len)])
    }
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let attrs = &node.attrs;
    Ok(Box::new(Unique { axis: attrs.int("axis")?, sorted: attrs.int("sorted")?.unwrap_or(1) != 0 }))
}

/// A version that no file has: every version of Compress is an old one, rewritten to other operators.
const UNUSED_VERSION: i64 = i64::MAX;

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "Compress", &[9, 11, 28, UNUSED_VERSION], build_rewritten_on_read)
            .always_rewritten(rewrite_compress),
        Definition::new("", "Unique", &[11, 28], build),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{Failure, check_gradients, f64s, generic_tensor, one_node_graph, run, run_node};

    #[test]
    fn compress_selects_true_elements() {
        let x = f64s(&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let get = |flags: &[u8], attrs: Attrs| {
            let flags = Tensor::from_slice(DType::Bool, &[flags.len()], flags);
            let got = run_node(("", "Compress"), &[Some(&x), Some(&flags)], 1, attrs)
                .expect("the graph runs")
                .remove(0);
            (got.dims().to_vec(), got.to_f64())
        };
        let along = |axis: i64| Attrs::new().with("axis", axis);
        assert_eq!(get(&[0, 1, 1], along(0)), (vec![2, 2], vec![3.0, 4.0, 5.0, 6.0]));
        assert_eq!(get(&[0, 1], along(-1)), (vec![3, 1], vec![2.0, 4.0, 6.0]));
        // A condition may be shorter than the data.
        assert_eq!(get(&[0, 1, 0, 0, 1], Attrs::new()), (vec![2], vec![2.0, 5.0]));
        assert_eq!(get(&[0, 0], along(0)), (vec![0, 2], vec![]));
        for opset in [9, 11, 28] {
            let inputs = [x.clone(), Tensor::from_slice(DType::Bool, &[3], &[1u8, 0, 1])];
            let ports = [Some(&inputs[0]), Some(&inputs[1])];
            let graph =
                one_node_graph(opset, ("", "Compress"), &ports, 1, along(0)).expect("the node is valid");
            check_gradients(&graph, &inputs, &[0], &[0]);
        }
    }

    #[test]
    fn distinct_elements_in_both_orders() {
        let x = Tensor::f32(&[6], &[2.0, 1.0, 1.0, 3.0, 4.0, 3.0]);
        let get = |sorted: i64| {
            let attrs = Attrs::new().with("sorted", sorted);
            let got = run_node(("", "Unique"), &[Some(&x)], 4, attrs).expect("the graph runs");
            let integers = |k: usize| got[k].to_i64().expect("integers");
            (got[0].to_f64(), integers(1), integers(2), integers(3))
        };
        let unsorted = (vec![2.0, 1.0, 3.0, 4.0], vec![0, 1, 3, 4], vec![0, 1, 1, 2, 3, 2], vec![1, 2, 2, 1]);
        assert_eq!(get(0), unsorted);
        let sorted = (vec![1.0, 2.0, 3.0, 4.0], vec![1, 0, 3, 4], vec![1, 0, 0, 2, 3, 2], vec![2, 1, 2, 1]);
        assert_eq!(get(1), sorted);
    }

    #[test]
    fn distinct_slices_and_nan() {
        let x = Tensor::i64(&[2, 3], &[1, 0, 1, i64::MAX, 2, i64::MAX]);
        let attrs = Attrs::new().with("axis", 1i64);
        let got = run_node(("", "Unique"), &[Some(&x)], 4, attrs).expect("the graph runs");
        assert_eq!(got[0], Tensor::i64(&[2, 2], &[0, 1, 2, i64::MAX]));
        assert_eq!(got[2].to_i64(), Some(vec![1, 0, 1]));
        let nan = f64::NAN;
        let got = run_node(("", "Unique"), &[Some(&f64s(&[4], &[nan, 1.0, nan, -0.0]))], 1, Attrs::new());
        let got = got.expect("the graph runs").remove(0).to_f64();
        assert!(got.len() == 3 && got[0] == 0.0 && got[2].is_nan(), "{got:?}");
        let none =
            run_node(("", "Unique"), &[Some(&f64s(&[0], &[]))], 1, Attrs::new()).expect("the graph runs");
        assert!(none[0].is_empty());
    }

    #[test]
    fn gradients_flow_to_first_occurrence() {
        let x = generic_tensor(&[4, 2], 1);
        for attrs in [Attrs::new(), Attrs::new().with("sorted", 0i64), Attrs::new().with("axis", 0i64)] {
            let graph = one_node_graph(NEWEST_OPSET, ("", "Unique"), &[Some(&x)], 1, attrs).expect("valid");
            check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
        }
        let twice = f64s(&[3], &[5.0, 1.0, 5.0]);
        let graph =
            one_node_graph(11, ("", "Unique"), &[Some(&twice)], 1, Attrs::new()).expect("the node is valid");
        let seed = f64s(&[2], &[7.0, 9.0]);
        let gradient = crate::testing::gradient_graph(&graph, &[Some(seed)], &[0]);
        assert_eq!(run(&gradient, &[twice]).expect("the graph runs")[0].to_f64(), [9.0, 7.0, 0.0]);
    }

    #[test]
    fn rejects_axis_out_of_range() {
        let attrs = Attrs::new().with("axis", 1i64);
        let failure =
            run_node(("", "Unique"), &[Some(&generic_tensor(&[3], 1))], 1, attrs).expect_err("refused");
        let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
        assert!(error.to_string().contains("axis 1 is out of range for rank 1"), "{error}");
    }
}
