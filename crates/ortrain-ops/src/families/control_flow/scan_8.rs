//! `Scan` of opset 8, which scans each item of a batch separately.
//!
//! The states have a leading batch axis, and the scanned values have a batch axis followed by a time axis. A newer Scan
//! has no batch axis. Therefore the node becomes a Scan over the batch with a Scan over time in its body.
//! `sequence_lens` gives an error.

use ortrain_graph::{Attrs, Graph, Node, ValueId, ValueType};

use crate::OpError;
use crate::rewrite::Rewrite;
use crate::support::subgraphs::{BODY, subgraph};

/// Returns the type of one item of a batch.
fn item_type(ty: &ValueType) -> ValueType {
    match ty {
        ValueType::Tensor(dtype, Some(shape)) if shape.rank() > 0 => {
            ValueType::Tensor(*dtype, Some(shape.iter().skip(1).cloned().collect()))
        }
        other => other.dtype().map_or(ValueType::Unknown, |dtype| ValueType::Tensor(dtype, None)),
    }
}

pub(super) fn upgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() > 8 {
        return Ok(());
    }
    let node = rw.node();
    let body = subgraph(node, BODY)?;
    let explicit_count = node.inputs.len() - node.captures;
    if explicit_count == 0 || node.inputs[0].is_some() {
        return Err(OpError::unsupported(
            "sequence_lens is not supported; use a Scan of opset 9 that masks the elements after the end of each \
             sequence",
        ));
    }
    let operands: Vec<ValueId> =
        (1..explicit_count).map(|k| rw.required_input(k)).collect::<Result<_, _>>()?;
    let scanned = Attrs::required("num_scan_inputs", node.attrs.int("num_scan_inputs")?)?;

    // Inner Scan: over time, for one item of the batch.
    let mut over_time = Attrs::new().with("num_scan_inputs", scanned).with(BODY, body.clone());
    if let Some(directions) = node.attrs.ints("directions")? {
        over_time = over_time.with("scan_input_directions", directions);
    }
    let (graph, _) = rw.patch();
    let mut member = Graph::new(&format!("{}_member", body.name));
    let mut inputs: Vec<ValueId> = Vec::with_capacity(node.inputs.len() - 1);
    for &id in &operands {
        let ty = item_type(&graph.value(id).ty);
        inputs.push(member.add_value(&format!("{}_member", graph.name_of(id)), ty));
    }
    for id in node.inputs[explicit_count..].iter().flatten() {
        inputs.push(member.add_value(graph.name_of(*id), graph.value(*id).ty.clone()));
    }
    let names: Vec<String> = (node.outputs.iter().enumerate())
        .map(|(k, port)| port.map_or_else(|| format!("unused_{k}"), |id| graph.name_of(id).to_owned()))
        .collect();
    let outputs: Vec<ValueId> =
        names.iter().map(|name| member.add_value(&format!("{name}_member"), ValueType::Unknown)).collect();
    let ports = |ids: &[ValueId]| ids.iter().copied().map(Some).collect::<Vec<Option<ValueId>>>();
    let mut inner = Node::new("", "Scan", &ports(&inputs), &ports(&outputs), over_time);
    inner.name = format!("{}_member", node.name).into();
    inner.captures = node.captures;
    member.nodes.push(inner);
    (member.inputs, member.outputs) = (inputs, outputs);

    // Outer Scan: over the batch. It collects the final states and all other results.
    let over_batch = Attrs::new().with("num_scan_inputs", operands.len() as i64).with(BODY, member);
    let mut outer = Node::new("", "Scan", &ports(&operands), &node.outputs, over_batch);
    outer.inputs.extend(node.inputs[explicit_count..].iter().copied());
    outer.name = node.name.clone();
    outer.captures = node.captures;
    rw.patch().1.push(outer);
    Ok(())
}
