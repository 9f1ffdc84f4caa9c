//! Range: numbers at equal distances.
//!
//! Range-11, 27 of ONNX (<https://onnx.ai/onnx/operators/onnx__Range.html>): `start + i * delta` up to, and not
//! including, `limit`. The length depends on all three inputs, so their values must be known when a program is built.
//! Narrow floats are computed in float32, as `stash_type` 1 specifies. No gradient flows through the range, as with
//! `arange` of PyTorch.

use ortrain_expr::{Inst, Scalar, Type};
use ortrain_graph::{DType, Dim, Graph, Node, Shape, Tensor};

use crate::OpError;
use crate::class::Class;
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::{Definition, Op, ValueRequirement};

struct Range;

/// Maximum number of elements of a range. A larger range does not fit in memory and is an error.
const MAX_ELEMENTS: f64 = 1e15;

/// Returns the element of a tensor with one element.
fn read_scalar(tensor: &Tensor) -> Option<Scalar> {
    let is_single = tensor.len() == 1;
    is_single.then(|| Scalar::read(tensor.dtype(), tensor.data()))
}

/// Returns the number of elements.
fn range_len([start, limit, delta]: [Scalar; 3]) -> Result<usize, OpError> {
    let message = || OpError::invalid(format!("cannot count from {start} to {limit} in steps of {delta}"));
    if let (Scalar::I64(start), Scalar::I64(limit), Scalar::I64(delta)) = (start, limit, delta) {
        if delta == 0 {
            return Err(message());
        }
        let (distance, step) = (i128::from(limit) - i128::from(start), i128::from(delta));
        // Rounds up for every combination of signs.
        let rounded = distance / step + i128::from(distance % step != 0 && (distance < 0) == (step < 0));
        return usize::try_from(rounded.max(0)).map_err(|_| message());
    }
    let steps = ((limit.to_f64() - start.to_f64()) / delta.to_f64()).ceil();
    if delta.to_f64() == 0.0 || steps.is_nan() || steps > MAX_ELEMENTS {
        return Err(message());
    }
    Ok(steps.max(0.0) as usize)
}

impl Op for Range {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 3, 1)?;
        let dtype = cx.expect_same_dtype(0..3)?;
        cx.expect_dtype(0, "a number type", DType::is_number)?;
        for k in 0..3 {
            if let Some(shape) = cx.shape(k)
                && shape.iter().any(|dim| dim.known().is_some_and(|size| size != 1))
            {
                return Err(OpError::invalid(format!("input {k} has shape {shape}, expected one element")));
            }
        }
        let known = [0, 1, 2].map(|k| cx.constant(k).and_then(read_scalar));
        let size = match known {
            [Some(start), Some(limit), Some(delta)] => Dim::Known(range_len([start, limit, delta])?),
            // From 0 in steps of 1 the number of elements is the limit, possibly a symbolic size.
            [Some(Scalar::I64(0)), None, Some(Scalar::I64(1))] => match cx.sizes(1).as_deref() {
                Some([size]) => size.clone(),
                _ => cx.unknown_dim(0, 0),
            },
            _ => cx.unknown_dim(0, 0),
        };
        cx.set_output(0, dtype, Some([size].into_iter().collect::<Shape>()));
        Ok(())
    }

    fn needs_value(&self, _: usize, _: DType) -> ValueRequirement {
        ValueRequirement::ForShapes
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (dims, dtype) = (cx.out_dims(0), cx.out_dtype(0));
        let output = cx.output(0);
        let ty = Type::of(dtype);
        let mut nest = cx.nest(&dims, 0);
        let [start, delta] = [0, 2].map(|k| match cx.constant(k).and_then(read_scalar) {
            Some(value) => nest.b.push(Inst::Const(value), ty),
            None => {
                let buffer = cx.input(k);
                nest.load_strided(cx, buffer, 0, &[0])
            }
        });
        let index = nest.b.coordinate(0);
        let index = nest.b.convert(index, ty);
        let moved = nest.b.mul(index, delta);
        let value = nest.b.add(start, moved);
        nest.store_contiguous(cx, output, value);
        cx.emit(nest.instruction())
    }
}

fn build(_: &Graph, _: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Range))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "Range", &[11, 27], build)
            .class(Class::Positions)
            .inputs_without_gradient(&[0, 1, 2]),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{Attrs, ValueType};

    use super::*;
    use crate::testing::{Failure, add, f64s, graph, run, run_node};

    fn range(numbers: [&Tensor; 3]) -> Result<Tensor, Failure> {
        run_node(("", "Range"), &numbers.map(Some), 1, Attrs::new()).map(|mut results| results.remove(0))
    }

    #[test]
    fn ranges_in_both_directions() {
        let int = |value: i64| Tensor::i64(&[], &[value]);
        let of =
            |a, b, c| range([&int(a), &int(b), &int(c)]).expect("the graph runs").to_i64().expect("integers");
        assert_eq!(of(3, 9, 3), [3, 6]);
        assert_eq!(of(10, 4, -2), [10, 8, 6]);
        assert_eq!(of(10, 3, -2), [10, 8, 6, 4]);
        assert_eq!(of(1, 1, 5), [0i64; 0]);
        assert_eq!(of(5, 1, 1), [0i64; 0]);
        let of = |a, b, c| {
            range([&f64s(&[], &[a]), &f64s(&[], &[b]), &f64s(&[], &[c])]).expect("the graph runs").to_f64()
        };
        assert_eq!(of(0.0, 1.0, 0.25), [0.0, 0.25, 0.5, 0.75]);
        assert_eq!(of(1.0, 0.0, -0.4), [1.0, 0.6, 1.0 - 0.8]);
    }

    #[test]
    fn rejects_invalid_ranges() {
        let int = |value: i64| Tensor::i64(&[], &[value]);
        for bad in [
            range([&int(0), &int(3), &int(0)]),
            range([&f64s(&[], &[0.0]), &f64s(&[], &[f64::NAN]), &f64s(&[], &[1.0])]),
            range([&f64s(&[], &[0.0]), &f64s(&[], &[f64::INFINITY]), &f64s(&[], &[1.0])]),
            range([&f64s(&[], &[0.0]), &f64s(&[], &[1.0]), &f64s(&[], &[0.0])]),
        ] {
            let Failure::Prepare(error) = bad.expect_err("refused") else { panic!("prepared") };
            assert!(error.to_string().contains("cannot count from"), "{error}");
        }
        assert!(range([&Tensor::i64(&[2], &[1, 2]), &int(3), &int(1)]).is_err());
    }

    /// Positions of a batch: the length is the symbol of the batch, and becomes known with it.
    #[test]
    fn length_from_symbolic_axis() {
        let x = Tensor::f32(&[4, 2], &[0.0; 8]);
        let (mut graph, ids) = graph(&[&x]);
        let symbolic = [Dim::symbol("N"), Dim::Known(2)].into_iter().collect();
        graph.value_mut(ids[0]).ty = ValueType::Tensor(DType::F32, Some(symbolic));
        let sizes = add(&mut graph, ("", "Shape"), "sizes", &[Some(ids[0])], 1, Attrs::new())[0];
        let [first, zero, one] = [0, 0, 1].map(|k| graph.add_constant("number", Tensor::i64(&[], &[k])));
        let rows = add(&mut graph, ("", "Gather"), "rows", &[Some(sizes), Some(first)], 1, Attrs::new())[0];
        let ports = [Some(zero), Some(rows), Some(one)];
        let range = add(&mut graph, ("", "Range"), "y", &ports, 1, Attrs::new())[0];
        graph.outputs = vec![range];
        crate::passes::infer::infer(&mut graph).expect("valid");
        assert_eq!(graph.value(range).ty.shape(), Some(&[Dim::symbol("N")].into_iter().collect::<Shape>()));
        assert_eq!(run(&graph, &[x]).expect("the graph runs")[0], Tensor::i64(&[4], &[0, 1, 2, 3]));
    }
}
