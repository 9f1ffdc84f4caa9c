//! Models with a class label as their first output, as scikit-learn's classifiers are exported: a label, then the
//! probabilities, possibly as maps. This module chooses the default value for a loss.

use ortrain_graph::{DType, Graph, Node, Tensor, ValueId, tensor_to_proto};
use ortrain_onnx::proto::type_proto;
use ortrain_onnx::{GraphProto, NodeProto, ValueInfoProto};
use rustc_hash::FxHashSet;

use super::Loss;
use crate::Error;
use crate::class::{Class, Traits};
use crate::registry::{class_of, has_traits};
use crate::support::ml::ML_DOMAIN;

/// Returns true if a message declares a value as a tensor of a type other than float.
fn is_label_output(info: &ValueInfoProto) -> bool {
    match info.r#type.as_ref().and_then(|ty| ty.value.as_ref()) {
        Some(type_proto::Value::TensorType(tensor)) if tensor.elem_type != 0 => {
            !DType::from_onnx(tensor.elem_type).is_some_and(DType::is_float)
        }
        _ => false,
    }
}

/// Returns true if a message declares a value as a tensor of a non-numeric type.
fn is_string_output(info: &ValueInfoProto) -> bool {
    match info.r#type.as_ref().and_then(|ty| ty.value.as_ref()) {
        Some(type_proto::Value::TensorType(tensor)) => {
            tensor.elem_type != 0 && DType::from_onnx(tensor.elem_type).is_none()
        }
        _ => false,
    }
}

/// Returns the node that produces a value, if it produces maps.
fn map_producer<'a>(graph: &'a GraphProto, name: &str) -> Option<&'a NodeProto> {
    let is_map = |node: &&NodeProto| node.domain == ML_DOMAIN && node.op_type == "ZipMap";
    graph.node.iter().filter(is_map).find(|node| node.output.iter().any(|output| output == name))
}

/// Returns true if the first output of a model is a class label: integers, strings, or maps.
#[must_use]
pub fn starts_with_label(graph: &GraphProto) -> bool {
    graph
        .output
        .first()
        .is_some_and(|info| is_label_output(info) || map_producer(graph, &info.name).is_some())
}

/// Replaces the outputs of a model with a class label first by tensors of numbers: probabilities replace maps of them,
/// and strings are removed. The nodes are unchanged. Returns true for such a model: the loss then uses its single float
/// output.
pub fn replace_outputs_by_tensors(graph: &mut GraphProto) -> bool {
    if !starts_with_label(graph) {
        return false;
    }
    let (mut retained, mut replaced): (Vec<ValueInfoProto>, Vec<ValueInfoProto>) = (Vec::new(), Vec::new());
    for info in &graph.output {
        let of = map_producer(graph, &info.name).and_then(|node| node.input.first());
        match of {
            Some(name) => {
                if retained.iter().chain(&graph.output).all(|other| other.name != *name) {
                    let declared = graph.value_info.iter().find(|known| known.name == *name).cloned();
                    retained.push(
                        declared
                            .unwrap_or_else(|| ValueInfoProto { name: name.clone(), ..Default::default() }),
                    );
                }
                replaced.push(info.clone());
            }
            None if is_string_output(info) => replaced.push(info.clone()),
            None => retained.push(info.clone()),
        }
    }
    if retained.is_empty() {
        return false;
    }
    graph.value_info.retain(|info| retained.iter().all(|output| output.name != info.name));
    graph.value_info.extend(replaced);
    graph.output = retained;
    true
}

/// Source of probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Logits {
    /// Softmax of this value.
    Softmax(ValueId),
    /// Sigmoids of this value, one for each class.
    Sigmoids(ValueId),
    /// Sigmoid of this value for the second of two classes, and of its negative for the first.
    Binary(ValueId),
}

/// Class of the sigmoid of a binary classifier.
const SIGMOID: Class = Class::Sigmoid { hard: false };

fn producer(graph: &Graph, value: ValueId) -> Option<&Node> {
    graph.nodes.iter().rev().find(|node| node.present_outputs().any(|output| output == value))
}

fn input(node: &Node, k: usize) -> Option<ValueId> {
    node.inputs.get(k).copied().flatten()
}

/// Returns the first input of the node that produces a value, if the node has this class.
fn input_of_producer(graph: &Graph, value: ValueId, class: Class) -> Option<ValueId> {
    producer(graph, value).filter(|node| class_of(node) == class).and_then(|node| input(node, 0))
}

fn find_logits(graph: &Graph, mut value: ValueId) -> Option<Logits> {
    loop {
        let node = producer(graph, value)?;
        let first = input(node, 0)?;
        let by_sum = node.attrs.string("norm").ok().flatten() == Some("L1");
        match class_of(node) {
            Class::Cast | Class::Copy => value = first,
            // The probabilities have the sum 1 before the node, and sigmoids of one class each get this sum.
            Class::RowNorm if by_sum => value = first,
            Class::Softmax { log: false } => return Some(Logits::Softmax(first)),
            SIGMOID => {
                let both = producer(graph, first).filter(|node| class_of(node) == Class::Join);
                let positive = both.and_then(|both| match both.inputs[..] {
                    [Some(negative), Some(one)] => {
                        input_of_producer(graph, negative, Class::Negate).filter(|&negated| negated == one)
                    }
                    _ => None,
                });
                return Some(positive.map_or(Logits::Sigmoids(first), Logits::Binary));
            }
            Class::Join => {
                let [Some(rest), Some(probability)] = node.inputs[..] else { return None };
                let subtracted = producer(graph, rest).filter(|node| class_of(node) == Class::Subtract)?;
                let minuend = graph.value(input(subtracted, 0)?).constant.as_ref()?;
                let is_complement = minuend.to_f64().iter().all(|&number| number == 1.0)
                    && input(subtracted, 1)? == probability;
                return input_of_producer(graph, probability, SIGMOID)
                    .filter(|_| is_complement)
                    .map(Logits::Binary);
            }
            _ => return None,
        }
    }
}

/// Returns the single value that all `parts` are parts of, if any: probabilities with every class as an output.
#[must_use]
pub fn common_source(graph: &Graph, parts: &[ValueId]) -> Option<ValueId> {
    let source_of = |mut value: ValueId| {
        while let Some(node) = producer(graph, value) {
            let is_part = has_traits(node, Traits::TAKES_PARTS);
            match input(node, 0).filter(|_| is_part) {
                Some(before) => value = before,
                None => break,
            }
        }
        value
    };
    let first = source_of(*parts.first()?);
    parts.iter().all(|&part| source_of(part) == first).then_some(first)
}

/// Returns true if a value is a decision without bounds: weighted sums with added or multiplied terms, without a
/// softmax or sigmoid.
fn is_decision(graph: &Graph, value: ValueId) -> bool {
    let mut visited: FxHashSet<ValueId> = FxHashSet::default();
    let producers = graph.producers();
    let maker = |value: ValueId| producers[value.0 as usize].map(|index| &graph.nodes[index]);
    let mut rest = vec![value];
    while let Some(value) = rest.pop() {
        let Some(node) = maker(value) else { continue };
        match class_of(node) {
            Class::Convolution
            | Class::TransposedConvolution
            | Class::ScaledProduct
            | Class::AffineProduct
            | Class::MatrixProduct => return true,
            _ if has_traits(node, Traits::KEEPS_DECISION) => {
                let inputs = node.present_inputs().filter(|&id| graph.value(id).constant.is_none());
                rest.extend(inputs.filter(|&id| visited.insert(id)));
            }
            _ => {}
        }
    }
    false
}

/// Returns true if a value is divided by its own sum.
fn is_normalized(graph: &Graph, value: ValueId) -> bool {
    let Some(node) = producer(graph, value).filter(|node| class_of(node) == Class::Divide) else {
        return false;
    };
    let sum = input(node, 1).and_then(|sum| input_of_producer(graph, sum, Class::AxisSum));
    sum.is_some() && sum == input(node, 0)
}

/// Returns the name of the default value for a loss of a model with the output `scores`. For a loss on logits it is the
/// input of the softmax or sigmoid, otherwise `scores`. Cross-entropy of probabilities from sigmoids uses values with
/// these probabilities as their softmax, which are appended to the message.
///
/// # Errors
/// Returns an error if a loss needs logits, and they cannot be determined.
pub fn default_scores(
    message: &mut GraphProto,
    graph: &Graph,
    scores: ValueId,
    loss: Loss,
) -> Result<String, Error> {
    let name = |id: ValueId| graph.name_of(id).to_owned();
    if let Loss::MSELoss | Loss::L1Loss = loss {
        return Ok(name(scores));
    }
    Ok(match (find_logits(graph, scores), loss) {
        (None, _) if is_decision(graph, scores) || producer(graph, scores).is_none() => name(scores),
        // The softmax of the logarithms of normalized values is the normalized values.
        (None, Loss::CrossEntropyLoss) if is_normalized(graph, scores) => {
            append_node(message, graph, "Log", &[&name(scores)], &format!("{}/logarithms", name(scores)))
        }
        (None, _) => {
            let maker = producer(graph, scores).map_or_else(String::new, |node| graph.node_label(node));
            return Err(Error::Loss(format!(
                "{} takes logits, but {scores:?} is computed by {maker}, which may return probabilities; name the \
                 logits in loss_input_names ({scores:?} itself, if it contains logits)",
                loss.label(),
                scores = name(scores)
            )));
        }
        (Some(Logits::Softmax(value)), _)
        | (Some(Logits::Sigmoids(value) | Logits::Binary(value)), Loss::BCEWithLogitsLoss) => name(value),
        (Some(Logits::Binary(one)), _) => {
            // The softmax of -z/2 and z/2 is the sigmoids of -z and z.
            let dtype = graph.value(one).ty.dtype().unwrap_or(DType::F32);
            let halves = graph.unused_name(&format!("{}/halves", name(one))).to_string();
            let tensor = Tensor::from_f64(dtype, vec![2], &[-0.5, 0.5]);
            if message.initializer.iter().all(|known| known.name != halves) {
                message.initializer.push(tensor_to_proto(&halves, &tensor));
            }
            append_node(message, graph, "Mul", &[&name(one), &halves], &format!("{}/logits", name(one)))
        }
        (Some(Logits::Sigmoids(value)), _) => {
            // The softmax of the logarithms of sigmoids is the sigmoids divided by their sum.
            let of = name(value);
            let negative = append_node(message, graph, "Neg", &[&of], &format!("{of}/negative"));
            let softplus = append_node(message, graph, "Softplus", &[&negative], &format!("{of}/softplus"));
            append_node(message, graph, "Neg", &[&softplus], &format!("{of}/log_probabilities"))
        }
    })
}

/// Appends a node, unless an equal one was appended before. Returns the name of its output.
fn append_node(message: &mut GraphProto, graph: &Graph, op: &str, inputs: &[&str], hint: &str) -> String {
    let output = graph.unused_name(hint).to_string();
    if message.node.iter().all(|node| !node.output.contains(&output)) {
        message.node.push(NodeProto {
            name: output.clone(),
            op_type: op.to_owned(),
            input: inputs.iter().map(|&input| input.to_owned()).collect(),
            output: vec![output.clone()],
            ..NodeProto::default()
        });
    }
    output
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{Attrs, Node, ValueType};

    use super::*;

    /// Builds a graph of these nodes, each with its inputs and its output; `one` is a constant.
    fn graph(nodes: &[(&str, &str, &[&str], &str)]) -> Graph {
        let mut graph = Graph::new("classifier");
        let logits = graph.add_value("z", ValueType::tensor(DType::F32, &[4, 1]));
        graph.inputs = vec![logits];
        graph.add_constant("one", Tensor::scalar(DType::F32, 1.0));
        graph.add_constant("two", Tensor::scalar(DType::F32, 2.0));
        for (domain, op, inputs, output) in nodes {
            let inputs: Vec<Option<ValueId>> = inputs.iter().map(|name| graph.find(name)).collect();
            let output = graph.add_value(output, ValueType::Unknown);
            let norm = Attrs::new().with("norm", "L1");
            let attrs = if domain.is_empty() { Attrs::new() } else { norm };
            graph.nodes.push(Node::new(domain, op, &inputs, &[Some(output)], attrs));
        }
        graph
    }

    fn chosen_scores(nodes: &[(&str, &str, &[&str], &str)], loss: Loss) -> (String, Vec<String>) {
        let graph = graph(nodes);
        let scores = graph.find("p").expect("the last value is called so");
        let mut message = GraphProto::default();
        // Twice, as for two losses of a sum.
        let name = default_scores(&mut message, &graph, scores, loss).expect("they are known");
        assert_eq!(default_scores(&mut message, &graph, scores, loss).expect("they are known"), name);
        (name, message.node.into_iter().map(|node| node.op_type).collect())
    }

    #[test]
    fn logits_are_found_for_losses_that_take_them() {
        let softmax: &[(&str, &str, &[&str], &str)] = &[
            ("", "Softmax", &["z"], "s"),
            (ML_DOMAIN, "Normalizer", &["s"], "n"),
            ("", "Cast", &["n"], "p"),
        ];
        for (loss, name) in [
            (Loss::CrossEntropyLoss, "z"),
            (Loss::BCEWithLogitsLoss, "z"),
            (Loss::MSELoss, "p"),
            (Loss::L1Loss, "p"),
        ] {
            assert_eq!(chosen_scores(softmax, loss), (name.to_owned(), vec![]));
        }
    }

    #[test]
    fn two_classes_of_one_logit() {
        let networks: &[(&str, &str, &[&str], &str)] = &[
            ("", "Sigmoid", &["z"], "s"),
            ("", "Sub", &["one", "s"], "r"),
            ("", "Concat", &["r", "s"], "p"),
        ];
        let linear: &[(&str, &str, &[&str], &str)] =
            &[("", "Neg", &["z"], "n"), ("", "Concat", &["n", "z"], "b"), ("", "Sigmoid", &["b"], "p")];
        for nodes in [networks, linear] {
            assert_eq!(chosen_scores(nodes, Loss::BCEWithLogitsLoss), ("z".to_owned(), vec![]));
            let (name, ops) = chosen_scores(nodes, Loss::CrossEntropyLoss);
            assert_eq!((name.as_str(), ops), ("z/logits", vec!["Mul".to_owned()]));
        }
    }

    #[test]
    fn sigmoids_of_one_class_each() {
        let nodes: &[(&str, &str, &[&str], &str)] =
            &[("", "Sigmoid", &["z"], "s"), (ML_DOMAIN, "Normalizer", &["s"], "p")];
        assert_eq!(chosen_scores(nodes, Loss::BCEWithLogitsLoss), ("z".to_owned(), vec![]));
        let (name, ops) = chosen_scores(nodes, Loss::CrossEntropyLoss);
        assert_eq!(
            (name.as_str(), ops),
            ("z/log_probabilities", ["Neg", "Softplus", "Neg"].map(String::from).into())
        );
    }

    /// Returns the error for scores of unknown origin.
    fn error_message(nodes: &[(&str, &str, &[&str], &str)], loss: Loss) -> String {
        let graph = graph(nodes);
        let scores = graph.find("p").expect("the last value is called so");
        default_scores(&mut GraphProto::default(), &graph, scores, loss).expect_err("refused").to_string()
    }

    #[test]
    fn decisions_are_logits() {
        let svm: &[(&str, &str, &[&str], &str)] =
            &[("", "Gemm", &["z", "one"], "g"), ("", "Identity", &["g"], "p")];
        let perceptron: &[(&str, &str, &[&str], &str)] = &[
            ("", "MatMul", &["z", "one"], "m"),
            ("", "Add", &["m", "one"], "a"),
            ("", "Mul", &["a", "two"], "n"),
            ("", "Concat", &["n", "a"], "p"),
        ];
        for nodes in [svm, perceptron] {
            assert_eq!(chosen_scores(nodes, Loss::CrossEntropyLoss), ("p".to_owned(), vec![]));
            assert_eq!(chosen_scores(nodes, Loss::BCEWithLogitsLoss), ("p".to_owned(), vec![]));
        }
    }

    #[test]
    fn rejects_possible_probabilities() {
        let sentence = |loss: &str, node: &str| {
            format!(
                "{loss} takes logits, but \"p\" is computed by {node} -> \"p\", which may return probabilities; \
                 name the logits in loss_input_names (\"p\" itself, if it contains logits)"
            )
        };
        let squared: &[(&str, &str, &[&str], &str)] =
            &[("", "Softmax", &["z"], "s"), ("", "Mul", &["s", "s"], "p")];
        // Two minus a sigmoid is not the probability of the other class.
        let other: &[(&str, &str, &[&str], &str)] = &[
            ("", "Sigmoid", &["z"], "s"),
            ("", "Sub", &["two", "s"], "r"),
            ("", "Concat", &["r", "s"], "p"),
        ];
        for (nodes, op) in [(squared, "Mul"), (other, "Concat")] {
            assert_eq!(error_message(nodes, Loss::CrossEntropyLoss), sentence("the cross-entropy loss", op));
            assert_eq!(
                error_message(nodes, Loss::BCEWithLogitsLoss),
                sentence("the binary cross-entropy loss", op)
            );
            assert_eq!(chosen_scores(nodes, Loss::MSELoss), ("p".to_owned(), vec![]));
        }
        let shares: &[(&str, &str, &[&str], &str)] =
            &[("", "Sigmoid", &["z"], "s"), ("", "ReduceSum", &["s"], "t"), ("", "Div", &["s", "t"], "p")];
        assert_eq!(
            chosen_scores(shares, Loss::CrossEntropyLoss),
            ("p/logarithms".to_owned(), vec!["Log".to_owned()])
        );
        assert_eq!(
            error_message(shares, Loss::BCEWithLogitsLoss),
            sentence("the binary cross-entropy loss", "Div")
        );
    }

    #[test]
    fn columns_are_parts_of_one_value() {
        let graph = graph(&[
            ("", "Softmax", &["z"], "s"),
            ("", "Slice", &["s"], "a"),
            ("", "Reshape", &["a"], "b"),
            (ML_DOMAIN, "ArrayFeatureExtractor", &["s", "one"], "c"),
            ("", "Mul", &["s", "two"], "d"),
        ]);
        let find =
            |names: &[&str]| -> Vec<ValueId> { names.iter().filter_map(|name| graph.find(name)).collect() };
        assert_eq!(common_source(&graph, &find(&["b", "c"])), graph.find("s"));
        assert_eq!(common_source(&graph, &find(&["b", "d"])), None);
        assert_eq!(common_source(&graph, &[]), None);
    }
}
