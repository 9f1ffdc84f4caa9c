//! Parameters and running statistics that an exporter stores once, because all were equal in the exported file.
//!
//! An untrained BatchNormalization has a scale and a running variance of ones, a bias and a running mean of zeros.
//! Exporters of PyTorch store equal tensors once. Thus a statistic is the initializer of a scale, and the parameters of
//! another layer are an Identity of a first layer's parameters. Training changes each separately, so each becomes a
//! separate initializer again. Weights that two layers share intentionally are one tensor with one name, without an
//! Identity; they remain shared.

use ortrain_onnx::{GraphProto, TensorProto};
use rustc_hash::{FxHashMap, FxHashSet};

use super::parameters::is_path;
use crate::Registry;
use crate::class::Class;
use crate::registry::class_of_message;

/// Suffix of the name of a statistic that was stored as the scale or the bias of a layer.
const STATISTIC_SUFFIX: &str = "/statistic";

/// Adds separate initializers for running statistics that share one with a weight, and for parameters and statistics
/// that are an Identity of an initializer.
///
/// A parameter is such an Identity if its name and the name of its initializer are paths of attributes; the new
/// initializer has the parameter's own name. Returns the number of new initializers.
///
/// ```
/// use ortrain_onnx::{GraphProto, NodeProto, TensorProto};
/// use ortrain_ops::training::separate_initializers;
///
/// let texts = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();
/// let node = NodeProto {
///     op_type: "BatchNormalization".into(),
///     input: texts(&["x", "ones", "zeros", "zeros", "ones"]),
///     output: texts(&["y"]),
///     ..NodeProto::default()
/// };
/// let tensor = |name: &str| TensorProto { name: name.into(), ..TensorProto::default() };
/// let initializer = vec![tensor("ones"), tensor("zeros")];
/// let mut graph = GraphProto { node: vec![node], initializer, ..GraphProto::default() };
/// assert_eq!(separate_initializers(&mut graph), 2);
/// assert_eq!(graph.node[0].input, texts(&["x", "ones", "zeros", "zeros/statistic", "ones/statistic"]));
/// assert_eq!(separate_initializers(&mut graph), 0);
/// ```
pub fn separate_initializers(graph: &mut GraphProto) -> usize {
    let registry = Registry::standard();
    let inputs_of = |domain: &str, op: &str| {
        registry.find(domain, op).map_or((&[][..], &[][..]), |known| (known.weights, known.statistics))
    };
    let is_statistic: Vec<(usize, usize)> = (graph.node.iter().enumerate())
        .flat_map(|(at, node)| inputs_of(&node.domain, &node.op_type).1.iter().map(move |&input| (at, input)))
        .collect();
    let fed: FxHashSet<&str> = graph.input.iter().map(|info| info.name.as_str()).collect();
    let stored: FxHashMap<&str, usize> = (graph.initializer.iter().enumerate())
        .map(|(index, tensor)| (tensor.name.as_str(), index))
        .filter(|(name, _)| !fed.contains(name))
        .collect();
    let weights: FxHashSet<&str> = (graph.node.iter())
        .flat_map(|node| {
            let weights = inputs_of(&node.domain, &node.op_type).0;
            weights.iter().filter_map(|&input| node.input.get(input).map(String::as_str))
        })
        .collect();
    let copies: FxHashMap<&str, (usize, &str)> = (graph.node.iter().enumerate())
        .filter(|(_, node)| class_of_message(node) == Class::Copy)
        .filter_map(|(at, node)| Some((node.output.first()?.as_str(), (at, node.input.first()?.as_str()))))
        .collect();
    let results: FxHashSet<&str> = graph.output.iter().map(|info| info.name.as_str()).collect();
    let mut used_names: FxHashSet<String> = (graph.node.iter().flat_map(|node| &node.output))
        .chain(graph.initializer.iter().map(|tensor| &tensor.name))
        .chain(graph.input.iter().map(|info| &info.name))
        .cloned()
        .collect();
    let mut added: Vec<TensorProto> = Vec::new();
    let mut renamed: Vec<(usize, usize, String)> = Vec::new();
    let mut removed: FxHashSet<usize> = FxHashSet::default();
    let mut separated: FxHashSet<&str> = FxHashSet::default();
    for (at, input) in is_statistic {
        let Some(name) = graph.node[at].input.get(input).map(String::as_str) else { continue };
        if let Some(&index) = stored.get(name).filter(|_| weights.contains(name)) {
            let mut new_name = format!("{name}{STATISTIC_SUFFIX}");
            while !used_names.insert(new_name.clone()) {
                new_name.push('_');
            }
            added.push(TensorProto { name: new_name.clone(), ..graph.initializer[index].clone() });
            renamed.push((at, input, new_name));
            continue;
        }
        separated.insert(name);
    }
    separated.extend(
        copies.iter().filter(|(name, (_, source))| is_path(name) && is_path(source)).map(|(name, _)| *name),
    );
    for (at, node) in graph.node.iter().enumerate() {
        let Some(name) = node.output.first().map(String::as_str) else { continue };
        let Some(&(copy, mut source)) = copies.get(name).filter(|(copy, _)| *copy == at) else { continue };
        if results.contains(name) || !separated.contains(name) {
            continue;
        }
        // An Identity of an Identity. Nodes are in order, so each step reaches an earlier one.
        let mut bound = copy;
        while let Some(&(earlier, further)) = copies.get(source).filter(|(earlier, _)| *earlier < bound) {
            (bound, source) = (earlier, further);
        }
        if let Some(&index) = stored.get(source)
            && removed.insert(copy)
        {
            added.push(TensorProto { name: name.to_owned(), ..graph.initializer[index].clone() });
        }
    }
    let count = added.len();
    for (at, input, name) in renamed {
        graph.node[at].input[input] = name;
    }
    let mut at = 0..;
    graph.node.retain(|_| at.next().is_none_or(|at| !removed.contains(&at)));
    graph.initializer.extend(added);
    count
}

#[cfg(test)]
mod tests {
    use ortrain_onnx::NodeProto;

    use super::*;

    fn node(op: &str, inputs: &[&str], output: &str) -> NodeProto {
        let texts = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();
        NodeProto {
            op_type: op.into(),
            input: texts(inputs),
            output: texts(&[output]),
            ..NodeProto::default()
        }
    }

    #[test]
    fn identities_become_initializers() {
        let tensor = |name: &str| TensorProto { name: name.into(), ..TensorProto::default() };
        let mut graph = GraphProto {
            node: vec![
                node("Identity", &["a.var"], "var"),
                node("Identity", &["var"], "c.var"),
                node("Identity", &["a.weight"], "b.weight"),
                node("Identity", &["a.bias"], "out"),
                node("BatchNormalization", &["x", "a.weight", "a.bias", "a.mean", "a.var"], "y"),
                node("BatchNormalization", &["y", "b.weight", "b.bias", "a.mean", "c.var"], "z"),
            ],
            initializer: ["a.weight", "a.bias", "a.mean", "a.var", "b.bias"].map(tensor).to_vec(),
            ..GraphProto::default()
        };
        assert_eq!(separate_initializers(&mut graph), 2);
        let names: Vec<&str> = graph.initializer[5..].iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names, ["c.var", "b.weight"]);
        let nodes: Vec<&str> = graph.node.iter().map(|node| node.output[0].as_str()).collect();
        assert_eq!(nodes, ["var", "out", "y", "z"]);
        // One layer that is called twice has one mean.
        assert_eq!(graph.node[2].input[3], graph.node[3].input[3]);
    }
}
