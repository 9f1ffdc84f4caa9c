//! `ReverseSequence`: reverses the order of each sequence of a batch.
//!
//! Source: ONNX ReverseSequence-10 (<https://onnx.ai/onnx/operators/onnx__ReverseSequence.html>), any element type.
//! Each sequence of the batch has its own length; elements after its end are unchanged. The operator is its own
//! inverse, so the gradient is reversed in the same way.

use ortrain_expr::{BinaryOp, CompareOp};
use ortrain_graph::{DType, Dim, Graph, Node, Shape};

use crate::OpError;
use crate::grad::Grad;
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::{Definition, Op};

/// `y[t, b] = x[length[b] - 1 - t, b]` if `t < length[b]`, else `x[t, b]`.
struct ReverseSequence {
    batch_axis: usize,
    time_axis: usize,
}

impl Op for ReverseSequence {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        let dtype = cx.dtype(0)?;
        cx.expect_dtype(1, "int64", |dtype| dtype == DType::I64)?;
        let shape = cx.shape(0).cloned();
        if let Some(shape) = &shape {
            if shape.rank() < 2 {
                return Err(OpError::invalid(format!(
                    "input 0 has shape {shape}, expected a batch axis and a time axis"
                )));
            }
            let lengths: Shape = [shape[self.batch_axis].clone()].into_iter().collect();
            let fits = |actual: &Shape| {
                let sizes = actual.iter().next().and_then(Dim::known).zip(lengths[0].known());
                actual.rank() == 1
                    && sizes.is_none_or(|(actual_len, expected_len)| actual_len == expected_len)
            };
            if let Some(actual) = cx.shape(1)
                && !fits(actual)
            {
                return Err(OpError::invalid(format!(
                    "input 1 has shape {actual}, expected a length for each sequence, {lengths}"
                )));
            }
        }
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (lengths, attrs) = (cx.input(1)?, cx.node().attrs.clone());
        let reversed = cx.add("ReverseSequence", &[g, lengths], attrs);
        cx.set_grad(0, reversed);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.dims(0);
        let (data, lengths) = (cx.input(0), cx.input(1));
        let steps = dims[self.time_axis];
        cx.guard_range(1, steps)?;

        let mut nest = cx.nest(&dims, 0);
        let along: Vec<isize> = (0..dims.len()).map(|axis| isize::from(axis == self.batch_axis)).collect();
        let length = nest.load_strided(cx, lengths, 0, &along);
        let strides = cx.contiguous_access(data, &dims).strides;
        let b = &mut nest.b;
        let step = b.coordinate(self.time_axis);
        let one = b.int(1);
        let last = b.sub(length, one);
        let reversed = b.sub(last, step);
        let inside = b.compare(CompareOp::Lt, step, length);
        let from = b.select(inside, reversed, step);
        let mut index = b.int(0);
        for (axis, &stride) in strides.iter().enumerate() {
            let position = if axis == self.time_axis { from } else { b.coordinate(axis) };
            let stride = b.int(stride as i64);
            let part = b.binary(BinaryOp::Mul, position, stride);
            index = b.add(index, part);
        }
        let value = nest.gather(cx, data, index);
        let output = cx.output(0);
        nest.store_contiguous(cx, output, value);
        cx.emit(nest.instruction())
    }
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let axis = |name: &str, default: i64| match node.attrs.int(name)?.unwrap_or(default) {
        0 => Ok(0),
        1 => Ok(1),
        other => Err(OpError::invalid(format!("{name} must be 0 or 1, got {other}"))),
    };
    let (batch_axis, time_axis) = (axis("batch_axis", 1)?, axis("time_axis", 0)?);
    if batch_axis == time_axis {
        return Err(OpError::invalid(format!("batch_axis and time_axis are both {batch_axis}")));
    }
    Ok(Box::new(ReverseSequence { batch_axis, time_axis }))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![Definition::new("", "ReverseSequence", &[10], build)]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{Attrs, Tensor};

    use crate::testing::{Failure, check_gradients, f64s, generic_tensor, one_node_graph, run_node};

    const OP: (&str, &str) = ("", "ReverseSequence");

    fn axes(batch: i64, time: i64) -> Attrs {
        Attrs::new().with("batch_axis", batch).with("time_axis", time)
    }

    #[test]
    fn reverses_sequences_up_to_their_lengths() {
        let x = f64s(&[3, 2], &[1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        let lengths = Tensor::i64(&[2], &[2, 3]);
        let reversed = run_node(OP, &[Some(&x), Some(&lengths)], 1, axes(1, 0)).expect("the graph runs");
        assert_eq!(reversed[0].to_f64(), [2.0, 6.0, 1.0, 5.0, 3.0, 4.0]);
        let lengths = Tensor::i64(&[3], &[0, 1, 2]);
        let reversed = run_node(OP, &[Some(&x), Some(&lengths)], 1, axes(0, 1)).expect("the graph runs");
        assert_eq!(reversed[0].to_f64(), [1.0, 4.0, 2.0, 5.0, 6.0, 3.0]);
    }

    #[test]
    fn gradients() {
        let (x, lengths) = (generic_tensor(&[2, 3, 2], 1), Tensor::i64(&[2], &[3, 2]));
        let inputs = [x, lengths];
        let graph =
            one_node_graph(10, OP, &[Some(&inputs[0]), Some(&inputs[1])], 1, axes(0, 1)).expect("valid");
        check_gradients(&graph, &inputs, &[0], &[0]);
    }

    #[test]
    fn rejects_mismatched_inputs() {
        let x = generic_tensor(&[3, 2], 1);
        for (lengths, attrs, expected) in [
            (Tensor::i64(&[2], &[4, 1]), axes(1, 0), "4"),
            (Tensor::i64(&[2], &[-1, 1]), axes(1, 0), "-1"),
            (Tensor::i64(&[3], &[1, 1, 1]), axes(1, 0), "expected a length for each sequence, [2]"),
            (Tensor::i64(&[2], &[1, 1]), axes(1, 1), "batch_axis and time_axis are both 1"),
            (Tensor::i64(&[2], &[1, 1]), axes(2, 0), "batch_axis must be 0 or 1, got 2"),
        ] {
            let message = match run_node(OP, &[Some(&x), Some(&lengths)], 1, attrs) {
                Err(Failure::Prepare(error)) => error.to_string(),
                Err(Failure::Run(error)) => error.to_string(),
                Ok(_) => panic!("the graph runs"),
            };
            assert!(message.contains(expected), "{message}");
        }
    }
}
