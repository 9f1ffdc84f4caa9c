//! `YieldOp` of `com.microsoft`: the point at which a training graph yields its results to the caller, who returns
//! their gradients.
//!
//! Inputs are the results of a forward pass; outputs are the gradients of the differentiable results, in the same
//! order. `non_differentiable_outputs` contains the positions of inputs without a gradient. The gradient of a result
//! has the type and the shape of the result. This holds even if `full_shape_outputs` does not list the result: the
//! attribute lists results for which ONNX Runtime must not substitute a scalar. The node occurs at most once, in the
//! main graph and not in a subgraph. It has no decomposition, because no operator of `ai.onnx` waits.

use ortrain_graph::{Graph, Node};
use ortrain_program::{Instruction, Yield};

use crate::OpError;
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::{Definition, Op, Placement};

struct YieldOp {
    /// Positions of the inputs with gradients, which are the outputs.
    differentiable: Vec<usize>,
}

impl Op for YieldOp {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, usize::MAX, self.differentiable.len())?;
        for (output, &input) in self.differentiable.iter().enumerate() {
            let dtype = cx.expect_dtype(input, "a float type", ortrain_graph::DType::is_float)?;
            cx.set_output(output, dtype, cx.shape(input).cloned());
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let sources = (0..cx.node().inputs.len()).map(|k| cx.input(k)).collect();
        let mut results = Vec::with_capacity(self.differentiable.len());
        for (output, &input) in self.differentiable.iter().enumerate() {
            results.push(if cx.has_output(output) {
                cx.output(output)
            } else {
                let (dtype, len) = (cx.dtype(input), cx.dims(input).iter().product());
                cx.alloc_temp(&format!("gradient {output}"), dtype, len)
            });
        }
        cx.emit(Instruction::Yield(Yield { outputs: sources, inputs: results }))
    }

    fn placement(&self) -> Placement {
        Placement::Yield
    }
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let count = node.inputs.len();
    let mut differs = vec![true; count];
    for &position in node.attrs.ints("non_differentiable_outputs")?.unwrap_or_default() {
        let index = usize::try_from(position).ok().filter(|&index| index < count).ok_or_else(|| {
            OpError::invalid(format!(
                "non_differentiable_outputs names input {position}, but the node has {count} inputs"
            ))
        })?;
        differs[index] = false;
    }
    Ok(Box::new(YieldOp { differentiable: (0..count).filter(|&k| differs[k]).collect() }))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![Definition::new("com.microsoft", "YieldOp", &[1], build)]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{Attrs, DType, Tensor};

    use crate::registry::NEWEST_OPSET;
    use crate::testing::{Failure, f64s, one_node_graph, run_node};

    const OP: (&str, &str) = ("com.microsoft", "YieldOp");

    #[test]
    fn gradients_have_types_and_shapes_of_outputs() {
        let (x, labels) = (f64s(&[2, 3], &[0.5; 6]), Tensor::i64(&[2], &[0, 1]));
        let attrs = Attrs::new().with("non_differentiable_outputs", vec![0i64]);
        let graph = one_node_graph(NEWEST_OPSET, OP, &[Some(&labels), Some(&x)], 1, attrs).expect("valid");
        assert_eq!(graph.value(graph.outputs[0]).ty.to_string(), "float64[2, 3]");
        let error = one_node_graph(NEWEST_OPSET, OP, &[Some(&labels)], 1, Attrs::new()).expect_err("refused");
        assert!(error.to_string().contains("a float type"), "{error}");
        let attrs = Attrs::new().with("non_differentiable_outputs", vec![2i64]);
        let error =
            one_node_graph(NEWEST_OPSET, OP, &[Some(&labels), Some(&x)], 1, attrs).expect_err("refused");
        assert!(error.to_string().contains("names input 2, but the node has 2 inputs"), "{error}");
    }

    #[test]
    fn rejects_yield_without_caller() {
        let x = Tensor::filled(DType::F32, &[2], 1.0);
        let Err(Failure::Run(error)) = run_node(OP, &[Some(&x)], 1, Attrs::new()) else { panic!("it ran") };
        assert!(error.to_string().contains("returns to the caller"), "{error}");
    }
}
