//! Conversion of linear models (`LinearClassifier` and `LinearRegressor` of `ai.onnx.ml`) to operators of `ai.onnx`,
//! before training. Their weights are attributes. They become initializers, which are trained, saved in checkpoints and
//! exported.
//!
//! A node `n` is replaced by its decomposition. The weight matrix is named `n/coefficients`, the bias `n/intercepts`,
//! and the weighted sums `n/scores`. A node without a name is named by its first output.
//!
//! A binary classifier with sigmoids may have two rows, the second the negative of the first. They become one row,
//! because training would not preserve their relation. String labels are looked up by a Gather, which the training
//! model does not contain.

use std::collections::HashSet;

use ortrain_graph::{Graph, Node, ValueId};
use ortrain_onnx::proto::TensorProto;
use ortrain_onnx::{GraphProto, ModelProto, NodeProto, OperatorSetIdProto};

use crate::families::linear_model::{CLASSIFIER, LinearModel, PostTransform, REGRESSOR};
use crate::passes::infer::infer;
use crate::passes::node::decompose_node;
use crate::passes::versions::downgrade;
use crate::registry::normalize_domain;
use crate::registry::{NEWEST_OPSET, Registry};
use crate::support::ml::ML_DOMAIN;
use crate::{Error, OpError};

/// Minimum version of `ai.onnx` for a converted model, so that every loss can be appended to it.
const MIN_OPSET: i64 = 13;

/// Number of the string type in ONNX messages (`TensorProto.STRING`).
const STRING_TYPE: i32 = 8;

fn is_linear(node: &NodeProto) -> bool {
    node.domain == ML_DOMAIN && [CLASSIFIER, REGRESSOR].contains(&node.op_type.as_str())
}

/// Returns the outputs of the linear models in a message.
#[must_use]
pub fn linear_outputs(model: &ModelProto) -> Vec<String> {
    let nodes = model.graph.iter().flat_map(|graph| &graph.node).filter(|node| is_linear(node));
    nodes.flat_map(|node| node.output.iter().filter(|name| !name.is_empty()).cloned()).collect()
}

/// Converts the linear models of a message to operators of `ai.onnx`. `typed` is the graph of the message, with all
/// known types.
///
/// # Errors
/// Returns an error if the attributes of a node contradict each other, or it needs an unsupported feature.
pub fn convert_linear_models(model: &mut ModelProto, typed: &Graph) -> Result<(), Error> {
    let opset = raise_opset(model);
    let Some(graph) = &mut model.graph else { return Ok(()) };
    let mut names = value_names(graph);
    let mut nodes = Vec::with_capacity(graph.node.len());
    for proto in std::mem::take(&mut graph.node) {
        let is_output = |node: &&Node| {
            node.present_outputs().any(|id| proto.output.iter().any(|name| *name == *typed.name_of(id)))
        };
        let node = typed.nodes.iter().find(is_output).filter(|_| is_linear(&proto));
        let Some(node) = node else {
            nodes.push(proto);
            continue;
        };
        let written = convert_node(typed, node, opset, &mut names)?;
        nodes.extend(written.node);
        graph.initializer.extend(written.initializer);
    }
    graph.node = nodes;
    Ok(())
}

/// Returns all names of values in a message.
fn value_names(graph: &GraphProto) -> HashSet<String> {
    let mut names: HashSet<String> = graph.input.iter().map(|info| info.name.clone()).collect();
    names.extend(graph.initializer.iter().map(|tensor| tensor.name.clone()));
    names.extend(graph.node.iter().flat_map(|node| node.output.iter().cloned()));
    for subgraph in
        graph.node.iter().flat_map(|node| &node.attribute).filter_map(|attribute| attribute.g.as_deref())
    {
        names.extend(value_names(subgraph));
    }
    names
}

/// Raises an old version of `ai.onnx` to [`MIN_OPSET`] if all nodes keep their meaning, and returns the version.
/// Exporters often declare an old version, because it suffices for their nodes.
fn raise_opset(model: &mut ModelProto) -> i64 {
    let means_the_same = |graph: &GraphProto, version: i64| have_same_meaning(graph, version, MIN_OPSET);
    let graph = model.graph.as_ref();
    // A message may list an operator set twice.
    let mut listed = HashSet::new();
    model.opset_import.retain(|set| listed.insert((normalize_domain(&set.domain).to_owned(), set.version)));
    let Some(set) = model.opset_import.iter_mut().find(|set| normalize_domain(&set.domain).is_empty()) else {
        model.opset_import.push(OperatorSetIdProto { domain: String::new(), version: MIN_OPSET });
        return MIN_OPSET;
    };
    if set.version < MIN_OPSET && graph.is_none_or(|graph| means_the_same(graph, set.version)) {
        set.version = MIN_OPSET;
    }
    set.version
}

fn have_same_meaning(graph: &GraphProto, version: i64, other: i64) -> bool {
    graph.node.iter().all(|node| {
        let standard = normalize_domain(&node.domain).is_empty();
        let subgraphs = node
            .attribute
            .iter()
            .flat_map(|attribute| attribute.g.as_deref().into_iter().chain(&attribute.graphs));
        (!standard || Registry::standard().has_same_meaning("", &node.op_type, version, other))
            && subgraphs.into_iter().all(|graph| have_same_meaning(graph, version, other))
    })
}

/// Converts a linear model to a message with the nodes that replace it. All values except the inputs and outputs of
/// `node` get new names.
fn convert_node(
    typed: &Graph,
    node: &Node,
    opset: i64,
    names: &mut HashSet<String>,
) -> Result<GraphProto, Error> {
    let fail = |source: OpError| Error::at(typed, node, source);
    let linear = LinearModel::from_node(node).map_err(fail)?;
    let mut attrs = node.attrs.clone();
    if let Some(row) = opposite_row(&linear) {
        attrs = attrs.with("coefficients", row.0).with("intercepts", row.1);
    }
    let mut single = Graph::new(&typed.name);
    single.opsets.insert(String::new(), NEWEST_OPSET);
    single.opsets.insert(ML_DOMAIN.into(), 1);
    let copied = |graph: &mut Graph, port: &Option<ValueId>, typed_too: bool| {
        port.map(|id| {
            let ty = if typed_too { typed.value(id).ty.clone() } else { Default::default() };
            graph.add_value(typed.name_of(id), ty)
        })
    };
    let inputs: Vec<Option<ValueId>> =
        node.inputs.iter().map(|port| copied(&mut single, port, true)).collect();
    single.inputs = inputs.iter().copied().flatten().collect();
    let mut outputs: Vec<Option<ValueId>> =
        node.outputs.iter().map(|port| copied(&mut single, port, false)).collect();

    let texts =
        attrs.strings("classlabels_strings").map_err(|error| fail(error.into()))?.map(<[String]>::to_vec);
    let mut looked_up = None;
    if let Some(texts) = texts.filter(|texts| !texts.is_empty()) {
        attrs.0.remove("classlabels_strings");
        attrs = attrs.with("classlabels_ints", (0..texts.len() as i64).collect::<Vec<_>>());
        if let Some(label) = outputs.first().copied().flatten() {
            let position = single.add_value("position", Default::default());
            outputs[0] = Some(position);
            looked_up = Some((texts, label, position));
        }
    }
    single.outputs = outputs.iter().copied().flatten().collect();
    let mut copy = Node::new(&node.domain, &node.op, &inputs, &outputs, attrs);
    copy.name = node.name.clone();
    if copy.name.is_empty() {
        copy.name = node.present_outputs().next().map_or("", |id| typed.name_of(id)).into();
    }
    let prefix = copy.name.clone();
    single.nodes.push(copy);
    infer(&mut single)?;
    decompose_node(&mut single, 0)?;
    infer(&mut single)?;
    downgrade(&mut single, opset)?;

    // Inputs and outputs keep their names; all others get new ones.
    let position = looked_up.as_ref().map(|(.., position)| *position);
    let mut known_values: HashSet<ValueId> = inputs.iter().chain(&outputs).copied().flatten().collect();
    known_values.extend(looked_up.as_ref().map(|(_, label, _)| *label));
    for id in single.value_ids().filter(|&id| !known_values.contains(&id) || Some(id) == position) {
        let is_position = Some(id) == position;
        let mut name = if is_position { format!("{prefix}/position") } else { single.name_of(id).to_owned() };
        while !names.insert(name.clone()) {
            name.push('_');
        }
        if name != single.name_of(id) {
            single.rename(id, &name);
        }
    }
    let mut message = single.to_proto();
    if let Some((texts, label, position)) = looked_up {
        let mut classes = format!("{prefix}/classes");
        while !names.insert(classes.clone()) {
            classes.push('_');
        }
        message.node.push(NodeProto {
            name: format!("{prefix}/Gather"),
            op_type: "Gather".into(),
            input: vec![classes.clone(), single.name_of(position).to_owned()],
            output: vec![single.name_of(label).to_owned()],
            ..NodeProto::default()
        });
        message.initializer.push(TensorProto {
            name: classes,
            data_type: STRING_TYPE,
            dims: vec![texts.len() as i64],
            string_data: texts.into_iter().map(|text| text.into_bytes().into()).collect(),
            ..TensorProto::default()
        });
    }
    Ok(message)
}

/// Returns the second of two rows (coefficients and intercept), if the first is its negative and both have a sigmoid.
fn opposite_row(linear: &LinearModel) -> Option<(Vec<f32>, Vec<f32>)> {
    if linear.score_count != 2 || linear.post_transform != PostTransform::Logistic {
        return None;
    }
    let (first, second) = linear.coefficients.split_at(linear.coefficients.len() / 2);
    let opposite = |(a, b): (&f32, &f32)| *a == -*b;
    let holds = first.iter().zip(second).all(opposite) && linear.intercepts[0] == -linear.intercepts[1];
    holds.then(|| (second.to_vec(), vec![linear.intercepts[1]]))
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{Attr, Attrs, DType, Shape, Tensor, ValueType};
    use ortrain_onnx::{ExternalData, LoadedModel};

    use super::*;
    use crate::passes::infer::infer_known;
    use crate::passes::versions::{upgrade, upgrade_known};
    use crate::testing::{assert_close, run};

    const X: [f32; 6] = [1.0, -2.0, 0.5, 0.0, 3.0, -0.25];

    fn classifier(rows: usize, post_transform: &str) -> Attrs {
        let weights: Vec<f32> = (0..3 * rows).map(|k| 0.7 * (1.0 + 2.4 * k as f32).sin()).collect();
        let intercepts: Vec<f32> = (0..rows).map(|k| 0.25 * k as f32 - 0.5).collect();
        let labels: Vec<i64> = (0..rows as i64).map(|k| 10 * k).collect();
        Attrs::new()
            .with("coefficients", weights)
            .with("intercepts", intercepts)
            .with("post_transform", post_transform)
            .with("classlabels_ints", labels)
    }

    /// Builds a model of classifiers, each with a name (possibly empty) and the names of its outputs.
    fn model(nodes: &[(&str, [&str; 2])], attrs: &Attrs, opset: Option<i64>) -> ModelProto {
        let mut graph = Graph::new("linear");
        let shape: Shape = [ortrain_graph::Dim::symbol("N"), 3.into()].into_iter().collect();
        let x = graph.add_value("x", ValueType::Tensor(DType::F32, Some(shape)));
        graph.inputs = vec![x];
        for (name, outputs) in nodes {
            let outputs = outputs.map(|output| Some(graph.add_value(output, ValueType::Unknown)));
            let mut node = Node::new(ML_DOMAIN, CLASSIFIER, &[Some(x)], &outputs, attrs.clone());
            node.name = (*name).into();
            graph.nodes.push(node);
            graph.outputs.extend(outputs.iter().flatten());
        }
        let set = |domain: &str, version| OperatorSetIdProto { domain: domain.into(), version };
        let mut opset_import = vec![set(ML_DOMAIN, 1)];
        opset_import.extend(opset.map(|version| set("", version)));
        ModelProto { graph: Some(graph.to_proto()), opset_import, ..ModelProto::default() }
    }

    fn graph_of(model: &ModelProto) -> Graph {
        Graph::from_model(&LoadedModel::from_proto(model.clone(), ExternalData::none()))
            .expect("it is a graph")
    }

    fn converted_model(model: &ModelProto) -> Result<ModelProto, Error> {
        let mut typed = graph_of(model);
        upgrade_known(&mut typed);
        infer_known(&mut typed);
        let mut model = model.clone();
        convert_linear_models(&mut model, &typed)?;
        Ok(model)
    }

    fn run_model(model: &ModelProto) -> Vec<Tensor> {
        let mut graph = graph_of(model);
        upgrade(&mut graph).expect("all is known");
        infer(&mut graph).expect("the graph is valid");
        run(&graph, &[Tensor::f32(&[2, 3], &X)]).expect("the graph runs")
    }

    fn initializers(model: &ModelProto) -> Vec<(String, Vec<i64>)> {
        let tensors = model.graph.iter().flat_map(|graph| &graph.initializer);
        tensors.map(|tensor| (tensor.name.clone(), tensor.dims.clone())).collect()
    }

    fn dims_of(model: &ModelProto, name: &str) -> Option<Vec<i64>> {
        initializers(model).into_iter().find(|(known, _)| known == name).map(|(_, dims)| dims)
    }

    fn opset_of(model: &ModelProto) -> Vec<i64> {
        let sets = model.opset_import.iter().filter(|set| set.domain.is_empty());
        sets.map(|set| set.version).collect()
    }

    #[test]
    fn converted_models_compute_the_same() {
        for post_transform in ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"] {
            for rows in [2, 3] {
                for opset in [None, Some(9), Some(13), Some(18), Some(NEWEST_OPSET)] {
                    let model = model(&[("n", ["label", "p"])], &classifier(rows, post_transform), opset);
                    let written = converted_model(&model).expect("the model is converted");
                    let nodes = written.graph.iter().flat_map(|graph| &graph.node);
                    assert!(nodes.into_iter().all(|node| node.domain.is_empty()));
                    assert_eq!(dims_of(&written, "n/coefficients"), Some(vec![rows as i64, 3]));
                    assert_eq!(dims_of(&written, "n/intercepts"), Some(vec![rows as i64]));
                    for (got, expected) in run_model(&written).iter().zip(run_model(&model)) {
                        assert_close(got, &expected, 1e-6);
                    }
                }
            }
        }
    }

    #[test]
    fn opposite_rows_become_one() {
        let opposite = |post_transform: &str, second: f32| {
            classifier(2, post_transform)
                .with("coefficients", vec![-0.5f32, 1.0, 0.0, 0.5, -1.0, second])
                .with("intercepts", vec![0.25f32, -0.25])
        };
        for (post_transform, second, rows) in
            [("LOGISTIC", 0.0, 1), ("LOGISTIC", 0.5, 2), ("SOFTMAX", 0.0, 2)]
        {
            let model = model(&[("n", ["label", "p"])], &opposite(post_transform, second), Some(15));
            let written = converted_model(&model).expect("the model is converted");
            assert_eq!(dims_of(&written, "n/coefficients"), Some(vec![rows, 3]), "{post_transform} {second}");
            for (got, expected) in run_model(&written).iter().zip(run_model(&model)) {
                assert_close(got, &expected, 1e-6);
            }
        }
    }

    #[test]
    fn weight_names_are_unique() {
        let nodes = [("n", ["a", "p"]), ("n", ["b", "q"]), ("", ["c", "r"])];
        let mut model = model(&nodes, &classifier(3, "NONE"), Some(15));
        let existing = Tensor::f32(&[1], &[1.0]);
        let graph = model.graph.as_mut().expect("it has one");
        graph.initializer.push(ortrain_graph::tensor_to_proto("n/intercepts", &existing));
        let written = converted_model(&model).expect("the model is converted");
        let names: HashSet<String> = initializers(&written).into_iter().map(|(name, _)| name).collect();
        for name in ["n/coefficients", "n/coefficients_", "n/intercepts_", "n/intercepts__", "c/coefficients"]
        {
            assert!(names.contains(name), "{name}: {names:?}");
        }
        assert_eq!(names.len(), initializers(&written).len());
        for (got, expected) in run_model(&written).iter().zip(run_model(&model)) {
            assert_close(got, &expected, 1e-6);
        }
    }

    #[test]
    fn raises_old_opset_if_meaning_is_equal() {
        let plain = |opset| model(&[("n", ["label", "p"])], &classifier(3, "SOFTMAX"), opset);
        for (declared, raised) in [(None, 13), (Some(9), 13), (Some(13), 13), (Some(17), 17)] {
            assert_eq!(
                opset_of(&converted_model(&plain(declared)).expect("the model is converted")),
                [raised]
            );
        }
        // A Softmax of opset 9 has another meaning in opset 13.
        let mut old = plain(Some(9));
        let graph = old.graph.as_mut().expect("it has one");
        graph.node.push(NodeProto {
            op_type: "Softmax".into(),
            input: vec!["p".into()],
            output: vec!["again".into()],
            ..NodeProto::default()
        });
        let written = converted_model(&old).expect("the model is converted");
        assert_eq!(opset_of(&written), [9]);
        assert_eq!(run_model(&written), run_model(&old));
        // Models of skl2onnx list operator sets twice.
        let mut twice = plain(Some(22));
        twice.opset_import.extend(plain(Some(22)).opset_import);
        assert_eq!(converted_model(&twice).expect("the model is converted").opset_import.len(), 2);
    }

    #[test]
    fn string_labels_are_looked_up_by_gather() {
        let mut attrs = classifier(3, "SOFTMAX");
        attrs.0.remove("classlabels_ints");
        let texts: Vec<String> = ["ash", "elm", "oak"].map(String::from).into();
        let model = model(
            &[("n", ["label", "p"])],
            &attrs.with("classlabels_strings", Attr::Strings(texts)),
            Some(15),
        );
        let mut written = converted_model(&model).expect("the model is converted");
        let graph = written.graph.as_mut().expect("it has one");
        let last = graph.node.last().expect("there are nodes");
        assert_eq!((last.op_type.as_str(), last.output.as_slice()), ("Gather", &["label".to_owned()][..]));
        assert_eq!(last.input, ["n/classes", "n/position"]);
        let classes =
            graph.initializer.iter().find(|tensor| tensor.name == "n/classes").expect("it is there");
        assert_eq!(
            classes.string_data,
            ["ash", "elm", "oak"].map(|text| bytes::Bytes::from_static(text.as_bytes()))
        );
    }

    #[test]
    fn rejects_contradictions() {
        let attrs = classifier(3, "SOFTMAX").with("intercepts", vec![0.0f32; 2]);
        let error = converted_model(&model(&[("n", ["label", "p"])], &attrs, Some(15)))
            .expect_err("refused")
            .to_string();
        assert_eq!(
            error,
            "node \"n\" (ai.onnx.ml:LinearClassifier) with inputs (x: float32[N, 3]): expected one label for \
             each score, or two labels for one score, got 3 labels for 2 scores"
        );
    }
}
