//! From any version of the operators to the newest, and back to an older one.

use std::collections::BTreeMap;

use ortrain_graph::{Attr, Graph};

use crate::registry::{NEWEST_OPSET, OLDEST_OPSET, Registry};
use crate::rewrite::Rewrite;
use crate::{Error, OpError};

/// Checks that every operator is known and brings every node to its newest version.
///
/// # Errors
/// All unknown operators at once; a set of operators that is too old or too new; a node that cannot be rewritten.
pub fn upgrade(graph: &mut Graph) -> Result<(), Error> {
    let opsets = graph.opsets.clone();
    match opsets.get("") {
        Some(&found) if !(OLDEST_OPSET..=NEWEST_OPSET).contains(&found) => {
            return Err(Error::Opset {
                domain: "ai.onnx".into(),
                found,
                least: OLDEST_OPSET,
                newest: NEWEST_OPSET,
            });
        }
        None if uses_standard(graph) => {
            let message = "it imports no version of operator set \"ai.onnx\", whose operators it uses";
            return Err(Error::Graph(message.into()));
        }
        _ => {}
    }
    let mut unknown = BTreeMap::new();
    collect_unknown(graph, &mut unknown);
    if !unknown.is_empty() {
        let list = unknown.into_iter().map(|(op, nodes): (String, Vec<String>)| {
            let shown: Vec<&str> = nodes.iter().take(5).map(String::as_str).collect();
            let rest = if nodes.len() > 5 { format!(" and {} more", nodes.len() - 5) } else { String::new() };
            format!("{op} ({}{rest})", shown.join(", "))
        });
        return Err(Error::UnknownOperators { list: list.collect() });
    }
    upgrade_nodes(graph, &opsets)?;
    graph.opsets.insert(String::new(), NEWEST_OPSET);
    Ok(())
}

/// Whether operators of `ai.onnx` are used, in subgraphs too.
fn uses_standard(graph: &Graph) -> bool {
    graph.nodes.iter().any(|node| {
        node.domain.is_empty() || Graph::subgraphs(node).any(|(_, subgraph)| uses_standard(subgraph))
    })
}

fn collect_unknown(graph: &Graph, unknown: &mut BTreeMap<String, Vec<String>>) {
    for node in &graph.nodes {
        if Registry::standard().find(&node.domain, &node.op).is_none() {
            let name = match node.present_outputs().next() {
                _ if !node.name.is_empty() => format!("{:?}", node.name),
                Some(output) => format!("the one that makes {:?}", graph.name_of(output)),
                None => "an unnamed one".into(),
            };
            unknown.entry(node.op_label()).or_default().push(name);
        }
        for (_, subgraph) in Graph::subgraphs(node) {
            collect_unknown(subgraph, unknown);
        }
    }
}

fn upgrade_nodes(graph: &mut Graph, opsets: &BTreeMap<String, i64>) -> Result<(), Error> {
    let mut index = 0;
    while index < graph.nodes.len() {
        for attr in graph.nodes[index].attrs.0.values_mut() {
            if let Attr::Graph(subgraph) = attr {
                upgrade_nodes(subgraph, opsets)?;
            }
        }
        let node = graph.nodes[index].clone();
        let definition =
            Registry::standard().find(&node.domain, &node.op).expect("unknown ones were refused");
        let version = opsets.get(&*node.domain).copied().unwrap_or(1);
        let Some(&since) = definition.since.iter().rev().find(|&&since| since <= version) else {
            let least = definition.since[0];
            let message =
                format!("the model uses opset {version}, but the operator exists from opset {least} on");
            return Err(Error::at(graph, &node, OpError::Invalid(message)));
        };
        let newest = *definition.since.last().expect("a definition has versions");
        match definition.upgrade {
            Some(rewrite) if since < newest => {
                let mut rw = Rewrite::new(graph, &node, since);
                rewrite(&mut rw).map_err(|source| Error::at(graph, &node, source))?;
                let patch = rw.into_patch();
                // An empty patch: the node is right as it stands.
                let count = patch.nodes.len();
                if count > 0 {
                    patch.apply(graph, &[index]);
                }
                index += count.max(1);
            }
            _ => index += 1,
        }
    }
    Ok(())
}

/// Writes every node for version `target` of `ai.onnx`. Types must have been inferred.
///
/// # Errors
/// A node that the older version cannot express, with the least version that can.
pub fn downgrade(graph: &mut Graph, target: i64) -> Result<(), Error> {
    let mut index = 0;
    let mut steps = 0usize;
    while index < graph.nodes.len() {
        for attr in graph.nodes[index].attrs.0.values_mut() {
            if let Attr::Graph(subgraph) = attr {
                downgrade(subgraph, target)?;
            }
        }
        let node = graph.nodes[index].clone();
        let definition = Registry::standard().find(&node.domain, &node.op).expect("the graph was read by us");
        if let Some(rewrite) = definition.downgrade {
            let mut rw = Rewrite::new(graph, &node, target);
            rewrite(&mut rw).map_err(|source| Error::at(graph, &node, source))?;
            let patch = rw.into_patch();
            // An empty patch: the node is right as it stands.
            if !patch.nodes.is_empty() {
                let count = patch.nodes.len();
                let same_op =
                    count == 1 && patch.nodes[0].op == node.op && patch.nodes[0].domain == node.domain;
                patch.apply(graph, &[index]);
                steps += 1;
                assert!(steps < 1_000_000, "rewrites to older versions end");
                if same_op {
                    index += 1;
                }
                // What came in its place may itself need an older spelling.
                continue;
            }
        }
        let node = &graph.nodes[index];
        if node.domain.is_empty() && definition.since[0] > target {
            return Err(Error::TooOld { node: graph.node_label(node), target, least: definition.since[0] });
        }
        index += 1;
    }
    graph.opsets.insert(String::new(), target);
    Ok(())
}
