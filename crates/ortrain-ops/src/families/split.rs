//! Split of a tensor into parts along an axis.
//!
//! Split-2, 11, 13, 18 of ONNX (<https://onnx.ai/onnx/operators/onnx__Split.html>). The lengths are an attribute before
//! opset 13 and an input from this opset on; without lengths the parts are equal. From opset 18 on `num_outputs` is the
//! number of parts, and the last part may be shorter. Parts that do not contribute to the loss count as zeros in the
//! gradient.

use ortrain_expr::Access;
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Tensor, ValueId};

use crate::OpError;
use crate::class::Traits;
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axis};
use crate::lower::Lower;
use crate::op::{Definition, Op, ValueRequirement};
use crate::rewrite::{Rewrite, ints_attribute_to_input, ints_input_to_attribute};

struct Split {
    axis: i64,
    parts: usize,
}

impl Split {
    /// Returns the lengths of the parts of an axis: `lengths_input`, or equal lengths.
    fn part_lengths(&self, size: usize, lengths_input: Option<&[i64]>) -> Result<Vec<usize>, OpError> {
        let Some(sizes) = lengths_input else {
            let each = size.div_ceil(self.parts.max(1));
            return Ok((0..self.parts)
                .map(|k| each.min(size.saturating_sub(k.saturating_mul(each))))
                .collect());
        };
        if sizes.len() != self.parts {
            let message = format!("split {sizes:?} has {} sizes for {} outputs", sizes.len(), self.parts);
            return Err(OpError::invalid(message));
        }
        let lengths: Option<Vec<usize>> = sizes.iter().map(|&length| usize::try_from(length).ok()).collect();
        let covers_axis = |lengths: &Vec<usize>| {
            lengths.iter().try_fold(0usize, |sum, &length| sum.checked_add(length)) == Some(size)
        };
        lengths
            .filter(covers_axis)
            .ok_or_else(|| OpError::invalid(format!("split {sizes:?} does not sum to the axis size {size}")))
    }
}

impl Op for Split {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 2, self.parts)?;
        let dtype = cx.dtype(0)?;
        if cx.has_input(1) {
            cx.expect_dtype(1, "int64", |dtype| dtype == DType::I64)?;
        }
        let Some(shape) = cx.shape(0) else {
            for k in 0..self.parts {
                cx.set_output(k, dtype, None);
            }
            return Ok(());
        };
        let axis = normalize_axis(self.axis, shape.rank())?;
        let known_sizes = cx.ints(1);
        let lengths: Vec<Dim> = match (shape[axis].known(), &known_sizes) {
            (Some(size), _) if known_sizes.is_some() || !cx.has_input(1) => {
                let lengths = self.part_lengths(size, known_sizes.as_deref())?;
                lengths.into_iter().map(Dim::Known).collect()
            }
            (None, Some(part_sizes))
                if part_sizes.len() == self.parts && part_sizes.iter().all(|&length| length >= 0) =>
            {
                part_sizes.iter().map(|&length| Dim::Known(length as usize)).collect()
            }
            (None, Some(part_sizes)) => {
                return Err(OpError::invalid(format!(
                    "split {part_sizes:?} does not fit {} outputs",
                    self.parts
                )));
            }
            _ => (0..self.parts).map(|k| cx.unknown_dim(k, axis)).collect(),
        };
        for (k, length) in lengths.into_iter().enumerate() {
            let mut part = shape.clone();
            part.0[axis] = length;
            cx.set_output(k, dtype, Some(part));
        }
        if let (DType::I64, 1, Some(sizes)) = (dtype, shape.rank(), cx.sizes(0))
            && let Ok(lengths) = self.part_lengths(sizes.len(), known_sizes.as_deref())
        {
            let mut start = 0;
            for (k, length) in lengths.into_iter().enumerate() {
                cx.set_output_sizes(k, Some(sizes[start..start + length].to_vec()));
                start += length;
            }
        }
        Ok(())
    }

    fn needs_value(&self, k: usize, _: DType) -> ValueRequirement {
        if k == 1 { ValueRequirement::Always } else { ValueRequirement::Never }
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let dtype = cx.dtype(cx.input(0)?)?;
        let parts: Vec<ValueId> = (0..self.parts)
            .map(|k| {
                cx.output_grad(k).unwrap_or_else(|| {
                    let part = cx.output(k, "part");
                    let shape = cx.shape_of(part);
                    let zero = Attrs::new().with("value", Tensor::filled(dtype, &[1], 0.0));
                    cx.add("ConstantOfShape", &[shape], zero)
                })
            })
            .collect();
        let gradient = match parts.as_slice() {
            [one] => *one,
            parts => cx.add("Concat", parts, Attrs::new().with("axis", self.axis)),
        };
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let input_dims = cx.dims(0);
        let axis = normalize_axis(self.axis, input_dims.len())?;
        let known_sizes = cx.constant(1).and_then(Tensor::to_i64);
        if cx.has_input(1) && known_sizes.is_none() {
            return Err(OpError::unsupported(
                "the lengths must not depend on values that the model computes",
            ));
        }
        let lengths = self.part_lengths(input_dims[axis], known_sizes.as_deref())?;
        let buffer = cx.input(0);
        let strides = Access::contiguous(cx.dtype(0), &input_dims).strides;
        let mut start = 0;
        for (k, length) in lengths.into_iter().enumerate() {
            if cx.has_output(k) && cx.out_dims(k) == input_dims {
                cx.alias(k, 0);
            } else if cx.has_output(k) {
                let dims = cx.out_dims(k);
                let output = cx.output(k);
                // An empty part may begin after the end.
                let offset = if dims.contains(&0) { 0 } else { start * strides[axis] as usize };
                let mut nest = cx.nest(&dims, 0);
                let value = nest.load_strided(cx, buffer, offset, &strides);
                nest.store_contiguous(cx, output, value);
                cx.emit(nest.instruction())?;
            }
            start += length;
        }
        Ok(())
    }
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let parts = node.outputs.len();
    if parts == 0 {
        return Err(OpError::invalid("it has no outputs"));
    }
    if let Some(named) = node.attrs.int("num_outputs")?
        && usize::try_from(named) != Ok(parts)
    {
        return Err(OpError::invalid(format!("num_outputs is {named}, but the node has {parts} outputs")));
    }
    Ok(Box::new(Split { axis: node.attrs.int("axis")?.unwrap_or(0), parts }))
}

/// Converts older nodes: before opset 13 the lengths are an attribute, and before 18 only the outputs determine the
/// number of parts.
fn upgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 13 && rw.attrs().ints("split")?.is_some() {
        return ints_attribute_to_input(rw, "split", 1);
    }
    if rw.version() < 18 && rw.input(1).is_none() {
        let attrs = rw.attrs().clone().with("num_outputs", rw.node().outputs.len() as i64);
        let inputs = rw.node().inputs.to_vec();
        rw.emit_same_op(&inputs, attrs);
    }
    Ok(())
}

fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let version = rw.version();
    if version >= 18 {
        return Ok(());
    }
    let named = rw.attrs().0.contains_key("num_outputs");
    let mut attrs = rw.attrs().clone();
    attrs.0.remove("num_outputs");
    if named && rw.input(1).is_none() {
        let (x, parts) = (rw.required_input(0)?, rw.node().outputs.len());
        let size = rw.shape(x).and_then(|shape| {
            let axis = normalize_axis(rw.attrs().int("axis").ok()?.unwrap_or(0), shape.rank()).ok()?;
            shape[axis].known()
        });
        match size {
            // The last part is shorter: the lengths are written explicitly.
            Some(size) if size % parts != 0 => {
                let lengths = Split { axis: 0, parts }.part_lengths(size, None)?;
                let lengths: Vec<i64> = lengths.into_iter().map(|length| length as i64).collect();
                let lengths = rw.ints("split", &lengths);
                rw.emit_same_op(&[Some(x), Some(lengths)], attrs);
            }
            _ => rw.emit_same_op(&[Some(x)], attrs),
        }
        return Ok(());
    }
    if version < 13 && rw.input(1).is_some() {
        return ints_input_to_attribute(rw, "split", 1);
    }
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "Split", &[2, 11, 13, 18], build)
            .traits(Traits::MOVES)
            .inputs_without_gradient(&[1])
            .upgrade(upgrade)
            .downgrade(downgrade),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        add, assert_close, check_downgrade, check_gradients, f64s, generic_tensor, graph, one_node_graph, run,
    };

    fn split_graph(x: &Tensor, lengths: Option<&[i64]>, parts: usize, attrs: Attrs) -> Graph {
        let (mut graph, ids) = graph(&[x]);
        let lengths =
            lengths.map(|lengths| graph.add_constant("split", Tensor::i64(&[lengths.len()], lengths)));
        add(&mut graph, ("", "Split"), "y", &[Some(ids[0]), lengths], parts, attrs);
        crate::passes::infer::infer(&mut graph).expect("valid");
        graph
    }

    #[test]
    fn equal_and_unequal_parts() {
        let x = f64s(&[5], &[1.0, 2.0, 3.0, 4.0, 5.0]);
        let sizes = |graph: &Graph| -> Vec<usize> {
            run(graph, std::slice::from_ref(&x)).expect("the graph runs").iter().map(Tensor::len).collect()
        };
        assert_eq!(sizes(&split_graph(&x, None, 3, Attrs::new().with("num_outputs", 3i64))), [2, 2, 1]);
        assert_eq!(sizes(&split_graph(&x, None, 4, Attrs::new().with("num_outputs", 4i64))), [2, 2, 1, 0]);
        assert_eq!(sizes(&split_graph(&x, Some(&[0, 5]), 2, Attrs::new())), [0, 5]);
        let got = run(&split_graph(&x, Some(&[1, 3, 1]), 3, Attrs::new()), std::slice::from_ref(&x))
            .expect("the graph runs");
        assert_close(&got[1], &f64s(&[3], &[2.0, 3.0, 4.0]), 0.0);
    }

    #[test]
    fn gradients_of_all_and_some_parts() {
        let x = generic_tensor(&[2, 5, 3], 1);
        let graph = split_graph(&x, Some(&[2, 0, 3]), 3, Attrs::new().with("axis", 1i64));
        for through in [&[0, 1, 2][..], &[0], &[2]] {
            check_gradients(&graph, std::slice::from_ref(&x), &[0], through);
        }
    }

    #[test]
    fn every_version() {
        let x = generic_tensor(&[6, 2], 2);
        for opset in [7, 11] {
            let attrs = Attrs::new().with("split", vec![1i64, 5]);
            let old = one_node_graph(opset, ("", "Split"), &[Some(&x)], 2, attrs).expect("the node is valid");
            assert_eq!(run(&old, std::slice::from_ref(&x)).expect("the graph runs")[0].dims(), [1, 2]);
            let even = one_node_graph(opset, ("", "Split"), &[Some(&x)], 3, Attrs::new())
                .expect("the node is valid");
            assert_eq!(run(&even, std::slice::from_ref(&x)).expect("the graph runs")[2].dims(), [2, 2]);
            check_downgrade(&even, std::slice::from_ref(&x), opset);
        }
        let uneven = split_graph(&x, None, 4, Attrs::new().with("num_outputs", 4i64));
        let named = split_graph(&x, Some(&[4, 2]), 2, Attrs::new());
        for opset in [7, 13, 17, 18, NEWEST_OPSET] {
            check_downgrade(&uneven, std::slice::from_ref(&x), opset);
            check_downgrade(&named, std::slice::from_ref(&x), opset);
        }
    }

    #[test]
    fn rejects_mismatched_lengths() {
        let x = generic_tensor(&[6], 3);
        for (lengths, attrs, message) in [
            (Some(&[4, 3][..]), Attrs::new(), "split [4, 3] does not sum to the axis size 6"),
            (Some(&[2, 2, 2]), Attrs::new(), "has 3 sizes for 2 outputs"),
            (Some(&[-1, 7]), Attrs::new(), "does not sum to"),
            (None, Attrs::new().with("num_outputs", 3i64), "num_outputs is 3, but the node has 2 outputs"),
            (None, Attrs::new().with("axis", 1i64), "axis 1 is out of range for rank 1"),
        ] {
            let (mut graph, ids) = graph(&[&x]);
            let lengths =
                lengths.map(|lengths| graph.add_constant("split", Tensor::i64(&[lengths.len()], lengths)));
            add(&mut graph, ("", "Split"), "y", &[Some(ids[0]), lengths], 2, attrs);
            let error = crate::passes::infer::infer(&mut graph).expect_err("refused").to_string();
            assert!(error.contains(message) && error.contains("Split"), "{error}");
        }
    }
}
