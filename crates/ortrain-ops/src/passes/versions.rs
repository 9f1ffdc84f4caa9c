//! Conversion between versions of the operators: upgrade to the newest version, and downgrade to an older one.

use std::collections::BTreeMap;

use ortrain_expr::pause;
use ortrain_graph::{Attr, DType, Graph, Node, listed};

use crate::families::refused;
use crate::op::Definition;
use crate::passes::decompose::{RejectHandler, RejectedNode, collect_rejected};
use crate::passes::sequences;
use crate::registry::{NEWEST_OPSET, OLDEST_OPSET, Registry};
use crate::rewrite::Rewrite;
use crate::{Error, OpError};

/// Checks that every operator is known, and upgrades every node to its newest version.
///
/// # Errors
/// Returns an error with all unknown operators, for an operator set that is too old or too new, or for a node that
/// cannot be rewritten.
pub fn upgrade(graph: &mut Graph) -> Result<(), Error> {
    check_opset(graph)?;
    let unknown = unknown_operators(graph);
    if !unknown.is_empty() {
        return Err(Error::UnknownOperators { list: unknown });
    }
    if let Some(error) = unsupported_errors(graph).into_iter().next() {
        return Err(error);
    }
    upgrade_all(graph, Vec::new()).into_iter().next().map_or(Ok(()), Err)
}

/// Runs [`upgrade`] as far as possible: unknown nodes, and nodes that cannot be rewritten, are unchanged. Returns all
/// errors: one for each unknown operator and for each node that cannot be rewritten.
pub fn upgrade_known(graph: &mut Graph) -> Vec<Error> {
    if let Err(error) = check_opset(graph) {
        return vec![error];
    }
    let unknown_operator = |operator| Error::UnknownOperators { list: vec![operator] };
    let mut errors: Vec<Error> = unknown_operators(graph).into_iter().map(unknown_operator).collect();
    errors.extend(unsupported_errors(graph));
    upgrade_all(graph, errors)
}

/// Upgrades every known node to its newest version, and replaces sequences by their tensors. Appends to the errors.
fn upgrade_all(graph: &mut Graph, mut errors: Vec<Error>) -> Vec<Error> {
    let opsets = graph.opsets.clone();
    upgrade_nodes(graph, &opsets, &mut errors);
    graph.opsets.insert(String::new(), NEWEST_OPSET);
    errors.extend(sequences::replace_sequences(graph, opsets.get("").copied().unwrap_or(1)));
    errors
}

fn check_opset(graph: &Graph) -> Result<(), Error> {
    match graph.opsets.get("") {
        Some(&found) if !(OLDEST_OPSET..=NEWEST_OPSET).contains(&found) => {
            Err(Error::Opset { domain: "ai.onnx".into(), found, oldest: OLDEST_OPSET, newest: NEWEST_OPSET })
        }
        None if uses_standard(graph) => {
            let message = "it uses operators of \"ai.onnx\", but imports no version of this operator set";
            Err(Error::Graph(message.into()))
        }
        _ => Ok(()),
    }
}

/// Returns an error for each node with an operator that is unsupported for a reason, including subgraphs.
fn unsupported_errors(graph: &Graph) -> Vec<Error> {
    let mut errors = Vec::new();
    for node in &graph.nodes {
        if let Some(reason) = refused::unsupported_reason(&node.domain, &node.op) {
            errors.push(Error::at(graph, node, OpError::unsupported(reason)));
        }
        errors.extend(Graph::subgraphs(node).flat_map(|(_, subgraph)| unsupported_errors(subgraph)));
    }
    errors
}

/// Returns the unknown operators, with the nodes that use them.
fn unknown_operators(graph: &Graph) -> Vec<String> {
    let mut unknown = BTreeMap::new();
    collect_unknown(graph, &mut unknown);
    let list = unknown.into_iter().map(|(op, nodes): (String, Vec<String>)| match nodes.as_slice() {
        [output] if output.starts_with("->") => format!("{op} {output}"),
        _ => format!("{op} ({})", listed(&nodes)),
    });
    list.collect()
}

/// Returns true if a graph or its subgraphs use operators of `ai.onnx`.
fn uses_standard(graph: &Graph) -> bool {
    graph.nodes.iter().any(|node| {
        node.domain.is_empty() || Graph::subgraphs(node).any(|(_, subgraph)| uses_standard(subgraph))
    })
}

fn collect_unknown(graph: &Graph, unknown: &mut BTreeMap<String, Vec<String>>) {
    for node in &graph.nodes {
        // Unsupported uses of sequences are reported separately.
        let known = Registry::standard().is_known(&node.domain, &node.op);
        if !known && refused::unsupported_reason(&node.domain, &node.op).is_none() {
            let name = match node.present_outputs().next() {
                _ if !node.name.is_empty() => format!("{:?}", node.name),
                Some(output) => format!("-> {:?}", graph.name_of(output)),
                None => "an unnamed node".into(),
            };
            unknown.entry(node.op_label()).or_default().push(name);
        }
        for (_, subgraph) in Graph::subgraphs(node) {
            collect_unknown(subgraph, unknown);
        }
    }
}

fn upgrade_nodes(graph: &mut Graph, opsets: &BTreeMap<String, i64>, errors: &mut Vec<Error>) {
    let mut index = 0;
    while index < graph.nodes.len() {
        for attr in graph.nodes[index].attrs.0.values_mut() {
            if let Attr::Graph(subgraph) = attr {
                upgrade_nodes(subgraph, opsets, errors);
            }
        }
        pause();
        let node = graph.nodes[index].clone();
        // Unknown operators were reported before.
        let Some(definition) = Registry::standard().find(&node.domain, &node.op) else {
            index += 1;
            continue;
        };
        let version = opsets.get(&*node.domain).copied().unwrap_or(1);
        let Some(&since) = definition.since.iter().rev().find(|&&since| since <= version) else {
            let oldest = definition.since[0];
            let message =
                format!("the model uses opset {version}, but the operator needs opset {oldest} or newer");
            errors.push(Error::at(graph, &node, OpError::Invalid(message)));
            index += 1;
            continue;
        };
        let newest = *definition.since.last().expect("a definition has at least one version");
        match definition.upgrade {
            Some(rewrite) if since < newest => {
                let mut rw = Rewrite::new(graph, &node, since);
                if let Err(source) = rewrite(&mut rw) {
                    errors.push(Error::at(graph, &node, source));
                    index += 1;
                    continue;
                }
                let patch = rw.into_patch();
                // An empty patch: the node is valid without changes.
                let count = patch.nodes.len();
                if count > 0 {
                    patch.apply(graph, &[index]);
                }
                index += count.max(1);
            }
            _ => index += 1,
        }
    }
}

/// Downgrades every node to version `target` of `ai.onnx`. Types must have been inferred.
///
/// # Errors
/// Returns an error for a node that the older version cannot express, with the oldest sufficient version.
pub fn downgrade(graph: &mut Graph, target: i64) -> Result<(), Error> {
    downgrade_or(graph, target, &mut |_, _, error| Err(error))
}

/// Runs [`downgrade`] as far as possible: nodes that the older version cannot express are unchanged. Returns each of
/// these nodes with the reason.
pub fn downgrade_known(graph: &mut Graph, target: i64) -> Vec<RejectedNode> {
    collect_rejected(|refuse| downgrade_or(graph, target, refuse))
}

fn downgrade_or(graph: &mut Graph, target: i64, refuse: &mut RejectHandler<'_>) -> Result<(), Error> {
    let mut index = 0;
    let mut steps = 0usize;
    while index < graph.nodes.len() {
        let subgraphs = graph.nodes[index].attrs.0.values_mut();
        let mut subgraphs = subgraphs.filter_map(|attr| match attr {
            Attr::Graph(subgraph) => Some(subgraph),
            _ => None,
        });
        let outcome = subgraphs.try_for_each(|subgraph| downgrade(subgraph, target));
        if let Err(error) = outcome {
            refuse(graph, &graph.nodes[index], error)?;
        }
        let node = graph.nodes[index].clone();
        let definition =
            Registry::standard().find(&node.domain, &node.op).expect("the operators of the graph are known");
        if let Some(rewrite) = definition.downgrade {
            let mut rw = Rewrite::new(graph, &node, target);
            if let Err(source) = rewrite(&mut rw) {
                refuse(graph, &node, Error::at(graph, &node, source))?;
                index += 1;
                continue;
            }
            let patch = rw.into_patch();
            // An empty patch: the node is valid without changes.
            if !patch.nodes.is_empty() {
                let count = patch.nodes.len();
                let same_op =
                    count == 1 && patch.nodes[0].op == node.op && patch.nodes[0].domain == node.domain;
                patch.apply(graph, &[index]);
                steps += 1;
                assert!(steps < 1_000_000, "downgrades terminate");
                if !same_op {
                    // The replacement may need a downgrade itself.
                    continue;
                }
            }
        }
        let node = &graph.nodes[index];
        let later = newest_type(graph, node, definition).filter(|&(_, since)| since > target);
        let error = if node.domain.is_empty() && definition.since[0] > target {
            Some(Error::TooOld { node: graph.node_label(node), target, oldest: definition.since[0] })
        } else {
            later.map(|(dtype, since)| {
                let message = format!("its elements of type {dtype} need opset {since} or newer");
                Error::at(graph, node, OpError::Unsupported(message))
            })
        };
        if let Some(error) = error {
            refuse(graph, node, error)?;
        }
        index += 1;
    }
    graph.opsets.insert(String::new(), target);
    Ok(())
}

/// First opset with operators on bfloat16.
const BFLOAT16_SINCE: i64 = 13;

/// Returns the newest element type of a node's inputs and outputs, and the version since which the operator accepts it.
/// Returns `None` if the operator has always accepted all of them.
fn newest_type(graph: &Graph, node: &Node, definition: &Definition) -> Option<(DType, i64)> {
    if !definition.is_standard() {
        return None;
    }
    let since = |dtype: DType| {
        let later_type = definition.later_types.iter().find(|(_, types)| types.contains(&dtype));
        later_type.map(|&(since, _)| since).or((dtype == DType::BF16).then_some(BFLOAT16_SINCE))
    };
    let dtypes =
        node.present_inputs().chain(node.present_outputs()).filter_map(|id| graph.value(id).ty.dtype());
    dtypes.filter_map(|dtype| Some((dtype, since(dtype)?))).max_by_key(|&(_, since)| since)
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{Attrs, DType, Tensor};

    use super::*;
    use crate::testing::{add, check_downgrade, f64s, generic_tensor, graph, one_node_graph};

    const NAN: f64 = f64::NAN;

    /// The minimum opset is the opset of the schema that first contains the type.
    #[test]
    fn rejects_later_element_types() {
        let window = || Attrs::new().with("kernel_shape", vec![1i64]);
        let none = Attrs::new;
        for (op, dtype, inputs, attrs, oldest) in [
            ("MaxPool", DType::I8, 1, window(), 12),
            ("MaxPool", DType::U8, 1, window(), 12),
            ("MaxPool", DType::BF16, 1, window().with("strides", vec![1i64]), 22),
            ("AveragePool", DType::BF16, 1, window(), 22),
            ("GlobalMaxPool", DType::BF16, 1, none(), 22),
            ("GlobalAveragePool", DType::BF16, 1, none(), 22),
            ("Conv", DType::BF16, 2, none(), 22),
            ("ConvTranspose", DType::BF16, 2, none(), 22),
            ("MatMul", DType::BF16, 2, none(), 13),
            ("Transpose", DType::BF16, 1, none(), 13),
        ] {
            let x = Tensor::filled(dtype, &[1, 1, 1], 1.0);
            let tensors = vec![x.clone(); inputs];
            let ports: Vec<Option<&Tensor>> = tensors.iter().map(Some).collect();
            let graph = one_node_graph(28, ("", op), &ports, 1, attrs).expect("valid");
            check_downgrade(&graph, &tensors, oldest);
            let error = downgrade(&mut graph.clone(), oldest - 1).expect_err("refused").to_string();
            let sentence = format!("its elements of type {dtype} need opset {oldest} or newer");
            assert!(error.contains(op) && error.contains(&sentence), "{error}");
        }
        let x = Tensor::filled(DType::F16, &[1, 1, 1], 1.0);
        let pool = one_node_graph(28, ("", "MaxPool"), &[Some(&x)], 1, window()).expect("valid");
        check_downgrade(&pool, &[x], 7);
    }

    fn op_names(graph: &Graph) -> Vec<&str> {
        graph.nodes.iter().map(|node| &*node.op).collect()
    }

    #[test]
    fn rejects_model_without_version() {
        let x = generic_tensor(&[2], 1);
        let (mut nameless, ids) = graph(&[&x]);
        add(&mut nameless, ("", "Relu"), "y", &[Some(ids[0])], 1, Attrs::new());
        nameless.opsets.remove("");
        let error = upgrade(&mut nameless).expect_err("refused").to_string();
        assert_eq!(error, r#"it uses operators of "ai.onnx", but imports no version of this operator set"#);
    }

    #[test]
    fn compares_float_equality_by_order() {
        let a = f64s(&[8], &[1.0, 1.0, NAN, NAN, 0.0, f64::INFINITY, f64::NEG_INFINITY, 5.0]);
        let b = f64s(&[8], &[1.0, 2.0, NAN, 1.0, -0.0, f64::INFINITY, f64::INFINITY, NAN]);
        let equal = one_node_graph(28, ("", "Equal"), &[Some(&a), Some(&b)], 1, Attrs::new()).expect("valid");
        let inputs = [a, b];
        assert_eq!(op_names(&check_downgrade(&equal, &inputs, 11)), ["Equal"]);
        assert!(!op_names(&check_downgrade(&equal, &inputs, 10)).contains(&"Equal"));
        assert!(!op_names(&check_downgrade(&equal, &inputs, 7)).contains(&"Equal"));
    }

    #[test]
    fn compares_integers_as_floats() {
        let (a, b) = (Tensor::i64(&[3], &[1, -2, 3]), Tensor::i64(&[1], &[1]));
        for op in ["Less", "Greater"] {
            let compared =
                one_node_graph(28, ("", op), &[Some(&a), Some(&b)], 1, Attrs::new()).expect("valid");
            let inputs = [a.clone(), b.clone()];
            assert_eq!(op_names(&check_downgrade(&compared, &inputs, 9)), [op]);
            assert_eq!(op_names(&check_downgrade(&compared, &inputs, 8)), ["Cast", "Cast", op]);
        }
    }

    #[test]
    fn downgrades_sign() {
        let x = f64s(&[5], &[-3.0, 0.0, -0.0, 2.0, f64::INFINITY]);
        let sign = one_node_graph(28, ("", "Sign"), &[Some(&x)], 1, Attrs::new()).expect("valid");
        assert_eq!(op_names(&check_downgrade(&sign, std::slice::from_ref(&x), 9)), ["Sign"]);
        assert!(!op_names(&check_downgrade(&sign, &[x], 8)).contains(&"Sign"));
    }

    /// Expand and ConstantOfShape, with the shape of a value and with a constant shape.
    #[test]
    fn fills_shapes_without_expand() {
        let (x, floats) = (generic_tensor(&[3, 1], 1), f64s(&[2, 3, 2], &[NAN; 12]));
        let integers = Tensor::i64(&[2, 3, 2], &[7; 12]);
        for like in [Some(&floats), Some(&integers), None] {
            let (mut filled, ids) = graph(&[&x, like.unwrap_or(&x)]);
            let shape = match like {
                Some(_) => add(&mut filled, ("", "Shape"), "s", &[Some(ids[1])], 1, Attrs::new())[0],
                None => filled.add_constant("s", Tensor::i64(&[3], &[2, 3, 2])),
            };
            filled.outputs.clear();
            add(&mut filled, ("", "Expand"), "y", &[Some(ids[0]), Some(shape)], 1, Attrs::new());
            let value = Attrs::new().with("value", Tensor::filled(DType::F32, &[1], 2.5));
            add(&mut filled, ("", "ConstantOfShape"), "z", &[Some(shape)], 1, value);
            upgrade(&mut filled).expect("known");
            crate::passes::infer::infer(&mut filled).expect("valid");
            let inputs = [x.clone(), like.unwrap_or(&x).clone()];
            assert!(op_names(&check_downgrade(&filled, &inputs, 9)).contains(&"ConstantOfShape"));
            let old = check_downgrade(&filled, &inputs, 7);
            assert!(
                !op_names(&old).contains(&"Expand") && !op_names(&old).contains(&"ConstantOfShape"),
                "{old}"
            );
        }
    }

    #[test]
    fn computed_shapes_need_expand() {
        let (x, shape) = (generic_tensor(&[3, 1], 1), Tensor::i64(&[2], &[3, 4]));
        let expand =
            one_node_graph(28, ("", "Expand"), &[Some(&x), Some(&shape)], 1, Attrs::new()).expect("valid");
        check_downgrade(&expand, &[x, shape], 8);
        let error = downgrade(&mut expand.clone(), 7).expect_err("refused").to_string();
        assert_eq!(error, r#"node "y" (Expand) cannot be written at opset 7: it needs opset 8 or newer"#);
    }

    #[test]
    fn axes_count_from_the_front_before_opset_11() {
        let (wide, flat) = (generic_tensor(&[2, 1, 3, 1], 1), generic_tensor(&[2, 3], 2));
        for (op, x, axes, front) in
            [("Squeeze", &wide, [-1, 1], [1, 3]), ("Unsqueeze", &flat, [-1, 0], [0, 3])]
        {
            let axes = Tensor::i64(&[2], &axes);
            let (mut view, ids) = graph(&[x]);
            let named = view.add_constant("axes", axes);
            add(&mut view, ("", op), "y", &[Some(ids[0]), Some(named)], 1, Attrs::new());
            crate::passes::infer::infer(&mut view).expect("valid");
            for opset in [12, 11, 10, 7] {
                let old = check_downgrade(&view, std::slice::from_ref(x), opset);
                let written = old.nodes[0].attrs.ints("axes").expect("ints").expect("there");
                assert_eq!(written == front, opset < 11, "{op} at {opset}: {written:?}");
            }
        }
    }
}
