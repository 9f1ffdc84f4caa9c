//! Softmax operators before opset 13: the input is a matrix.

use ortrain_graph::{Attrs, Dim, Node, Shape, ValueId, ValueType};

use crate::OpError;
use crate::infer::normalize_axis;
use crate::rewrite::Rewrite;

/// Rewrites the form on a matrix: to the newest operator `op` if the row is the last axis, otherwise with Flatten
/// before it and Reshape after it.
pub(crate) fn upgrade_matrix_form(rw: &mut Rewrite<'_>, domain: &str, op: &str) -> Result<(), OpError> {
    let axis = rw.attrs().int("axis")?.unwrap_or(1);
    let inputs: Vec<ValueId> =
        (0..rw.node().inputs.len()).map(|k| rw.required_input(k)).collect::<Result<_, _>>()?;
    let last = *inputs.last().ok_or_else(|| OpError::invalid("it has no inputs"))?;
    let rank = inputs.iter().find_map(|&input| rw.shape(input)).map(Shape::rank);
    let normal = rank.map(|rank| normalize_axis(axis, rank)).transpose()?;
    let on_last_axis = axis == -1 || normal.is_some() && normal.map(|axis| axis + 1) == rank;
    if on_last_axis {
        let axis = normal.map_or(-1, |axis| axis as i64);
        let ports: Vec<Option<ValueId>> = inputs.into_iter().map(Some).collect();
        rw.emit_op(domain, op, &ports, Attrs::new().with("axis", axis));
        return Ok(());
    }
    let matrices: Vec<Option<ValueId>> = inputs
        .iter()
        .map(|&input| Some(rw.add("Flatten", &[input], Attrs::new().with("axis", axis))))
        .collect();
    let result = rw.add_node(domain, op, &matrices, 1, Attrs::new().with("axis", -1i64))[0];
    let shape = rw.add("Shape", &[last], Attrs::new());
    let result = rw.add("Reshape", &[result, shape], Attrs::new().with("allowzero", 1i64));
    rw.replace_output(0, result);
    Ok(())
}

/// Writes the form of opsets before 13, where all axes from `axis` on are one row: the axis is transposed to the end if
/// necessary.
pub(crate) fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() >= 13 {
        return Ok(());
    }
    let x = rw.required_input(0)?;
    let (dtype, shape) = (rw.dtype(x), rw.shape(x).cloned());
    let (Some(dtype), Some(shape)) = (dtype, shape) else {
        return Err(OpError::unsupported(
            "before opset 13 it can be written only if the rank of its input is known",
        ));
    };
    let written = rw.attrs().int("axis")?;
    let axis = normalize_axis(written.unwrap_or(-1), shape.rank())?;
    if shape[axis + 1..].iter().all(Dim::is_one) {
        if written != Some(axis as i64) {
            rw.emit_same_op(&[Some(x)], Attrs::new().with("axis", axis as i64));
        }
        return Ok(());
    }
    let last = shape.rank() - 1;
    let mut perm: Vec<i64> = (0..=last as i64).collect();
    perm.swap(axis, last);
    let perm = Attrs::new().with("perm", perm);
    let mut transposed = shape;
    transposed.0.swap(axis, last);
    // The value has a type, so that a second downgrade finds that the axis is the last one.
    let name = format!("{}turned", rw.patch().1.prefix());
    let patch = rw.patch().1;
    let value = patch.add_value(&name, ValueType::Tensor(dtype, Some(transposed)));
    patch.push(Node::new("", "Transpose", &[Some(x)], &[Some(value)], perm.clone()));
    let op = rw.node().op.clone();
    let result = rw.add(&op, &[value], Attrs::new().with("axis", last as i64));
    let result = rw.add("Transpose", &[result], perm);
    rw.replace_output(0, result);
    Ok(())
}

pub(crate) fn upgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = rw.node().op.clone();
    upgrade_matrix_form(rw, "", &op)
}
