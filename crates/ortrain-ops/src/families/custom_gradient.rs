//! Nodes with a user-defined gradient.
//!
//! While a model is differentiated, a `CustomGradient` node replaces one node, or the nodes of a function. Its subgraph
//! `forward` contains these nodes, and its subgraph `gradient` computes their gradients. The node is created when a
//! model is read with an operator library. It is replaced by its nodes before a model is written, so no file that
//! ortrain writes contains it.
//!
//! Own inputs and outputs are the inputs and outputs of the replaced nodes. `forward` has only captured inputs; its
//! outputs are the present outputs of the node. The inputs of `gradient` are all inputs (the attribute `inputs` is
//! their number), all outputs, and the gradients of all outputs. Its outputs are the gradients of the inputs that the
//! attribute `of` lists.

use ortrain_graph::{Attrs, Graph, Node, Shape, Tensor, ValueId, ValueType};
use ortrain_onnx::{AttributeProto, NodeProto};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::OpError;
use crate::grad::Grad;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::subgraphs::{clear_folded, is_used, set_capture_types, subgraph, subgraph_error};
use crate::type_merge::merge_types;

pub(crate) const DOMAIN: &str = "ai.ortrain";
pub(crate) const NAME: &str = "CustomGradient";
pub(crate) const FORWARD: &str = "forward";
pub(crate) const GRADIENT: &str = "gradient";
/// Attribute with the maximum number of inputs.
pub(crate) const INPUTS: &str = "inputs";
/// Attribute with the indices of the inputs that the outputs of `gradient` belong to.
pub(crate) const GRADIENT_INPUTS: &str = "of";
/// Attribute with the name of the gradient in messages.
pub(crate) const LABEL: &str = "label";
/// Label of the empty gradient, which stops gradients.
pub(crate) const STOP_LABEL: &str = "stop_gradients";
/// Name of the function that stops gradients, for a model that contains this function.
pub(crate) const STOP_FUNCTION: &str = "StopGradient";

/// Returns true for a node that stops gradients: its gradient is empty.
pub(crate) fn is_stop(node: &Node) -> bool {
    *node.domain == *DOMAIN
        && *node.op == *NAME
        && node.attrs.string(LABEL).is_ok_and(|label| label == Some(STOP_LABEL))
}

/// Returns true for the message of a node that stops gradients, as [`is_stop`] does for a node.
pub(crate) fn is_stop_message(node: &NodeProto) -> bool {
    let stops = |attr: &AttributeProto| attr.name == LABEL && *attr.s == *STOP_LABEL.as_bytes();
    node.domain == DOMAIN && node.op_type == NAME && node.attribute.iter().any(stops)
}

struct CustomGradient {
    inputs: usize,
    of: Vec<usize>,
    label: String,
}

/// Maximum number of inputs that a model may declare.
const MAX_INPUTS: i64 = 1 << 16;

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let count = Attrs::required(INPUTS, node.attrs.int(INPUTS)?)?;
    let inputs = usize::try_from(count).ok().filter(|_| count <= MAX_INPUTS);
    let inputs = inputs.ok_or_else(|| {
        OpError::invalid(format!("{INPUTS} is {count}, which is not a valid number of inputs"))
    })?;
    let of: Vec<usize> = Attrs::required(GRADIENT_INPUTS, node.attrs.ints(GRADIENT_INPUTS)?)?
        .iter()
        .map(|&k| usize::try_from(k).ok().filter(|&k| k < inputs))
        .collect::<Option<_>>()
        .ok_or_else(|| OpError::invalid(format!("{GRADIENT_INPUTS} lists an input that does not exist")))?;
    let label = Attrs::required(LABEL, node.attrs.string(LABEL)?)?.to_owned();
    Ok(Box::new(CustomGradient { inputs, of, label }))
}

/// Returns the forward subgraph, after a check of its inputs and outputs.
fn checked_forward(node: &Node) -> Result<&Graph, OpError> {
    let forward = subgraph(node, FORWARD)?;
    let outputs = node.present_outputs().count();
    if forward.inputs.len() != node.captures || forward.outputs.len() != outputs {
        return Err(OpError::invalid(format!(
            "{FORWARD} has {} inputs and {} outputs; expected 0 inputs and {outputs} outputs",
            forward.inputs.len().saturating_sub(node.captures),
            forward.outputs.len()
        )));
    }
    Ok(forward)
}

/// Gradient of a node, as a graph that is copied to the end of the gradient graph.
struct GradientRule {
    graph: Graph,
    /// Inputs of the graph, with their values in the outer graph; `None` for inputs that the node leaves out.
    bindings: Vec<(ValueId, Option<ValueId>)>,
    /// For each output of the graph, the index of the input that it is the gradient of.
    targets: Vec<usize>,
}

impl CustomGradient {
    /// Returns the required part of the gradient, with the values of its inputs.
    fn build_rule(&self, cx: &mut Grad<'_>) -> Result<GradientRule, OpError> {
        let node = cx.node().clone();
        let mut graph = subgraph(&node, GRADIENT)?.clone();
        let explicit_count = node.inputs.len() - node.captures;
        let remaining =
            graph.inputs.len().checked_sub(node.captures + self.inputs).filter(|count| count % 2 == 0);
        let fits = |outputs: &usize| {
            explicit_count <= self.inputs
                && node.outputs.len() <= *outputs
                && graph.outputs.len() == self.of.len()
        };
        let outputs = remaining.map(|gradient_inputs| gradient_inputs / 2).filter(fits).ok_or_else(|| {
            OpError::invalid(format!("{} does not match the inputs and outputs of the node", self.label))
        })?;

        let required: Vec<usize> = (0..self.of.len())
            .filter(|&j| self.of[j] < explicit_count && cx.needs_grad(self.of[j]))
            .collect();
        graph.outputs = required.iter().map(|&j| graph.outputs[j]).collect();
        let of = required.into_iter().map(|j| self.of[j]).collect();
        graph.remove_unused();

        let port = |ports: &[Option<ValueId>], k: usize| ports.get(k).copied().flatten();
        let mut outer_values: Vec<Option<ValueId>> =
            (0..self.inputs).map(|k| port(&node.inputs[..explicit_count], k)).collect();
        outer_values.extend((0..outputs).map(|k| port(&node.outputs, k)));
        for k in 0..outputs {
            let used = is_used(&graph, graph.inputs[outer_values.len()]);
            let gradient = match (cx.output_grad(k), port(&node.outputs, k)) {
                // A missing gradient of an output is zero.
                (None, Some(output)) if used => Some(zeros_like(cx, output)?),
                (gradient, _) => gradient,
            };
            outer_values.push(gradient);
        }
        outer_values.extend_from_slice(&node.inputs[explicit_count..]);
        for (k, &outer) in outer_values.iter().enumerate() {
            // A gradient has the type of its value. Its own type may be unknown at this point.
            let is_gradient = (self.inputs + outputs..self.inputs + 2 * outputs).contains(&k);
            let like = if is_gradient { outer_values[k - outputs] } else { outer };
            let (Some(outer), Some(like)) = (outer, like) else { continue };
            let inner = graph.value_mut(graph.inputs[k]);
            inner.ty = cx.ty(like).clone();
            inner.constant = cx.constant_of(outer).cloned();
            inner.sizes.clone_from(&cx.graph.value(outer).sizes);
        }
        let pairs = graph.inputs.iter().copied().zip(outer_values).collect();
        Ok(GradientRule { graph, bindings: pairs, targets: of })
    }
}

/// Returns the sizes of a shape in sorted order.
fn sorted_sizes(shape: &Shape) -> Vec<String> {
    let mut sizes: Vec<String> = shape.iter().map(ToString::to_string).collect();
    sizes.sort_unstable();
    sizes
}

/// Returns zeros of the type and shape of a value.
fn zeros_like(cx: &mut Grad<'_>, like: ValueId) -> Result<ValueId, OpError> {
    let value = Tensor::filled(cx.dtype(like)?, &[1], 0.0);
    let shape = cx.shape_of(like);
    Ok(cx.add("ConstantOfShape", &[shape], Attrs::new().with("value", value)))
}

impl GradientRule {
    /// Removes the inputs that the node leaves out: nodes of the gradient get an absent input in their place.
    fn remove_absent_inputs(&mut self, label: &str) -> Result<(), OpError> {
        let absent: FxHashSet<ValueId> =
            self.bindings.iter().filter(|(_, outer)| outer.is_none()).map(|&(inner, _)| inner).collect();
        for node in &mut self.graph.nodes {
            let explicit_count = node.inputs.len() - node.captures;
            for (k, port) in node.inputs.iter_mut().enumerate() {
                if let Some(id) = port.filter(|id| absent.contains(id)) {
                    if k >= explicit_count {
                        let name = self.graph.name_of(id);
                        let message =
                            format!("{label} uses {name:?} in a subgraph, but the node omits this value");
                        return Err(OpError::invalid(message));
                    }
                    *port = None;
                }
            }
        }
        if let Some(&id) = self.graph.outputs.iter().find(|id| absent.contains(id)) {
            let name = self.graph.name_of(id);
            return Err(OpError::invalid(format!("{label} returns {name:?}, but the node omits this value")));
        }
        Ok(())
    }

    /// Checks that the gradients have the types of the inputs, as far as types are known. Returns true for each
    /// gradient with a shape that is known to be right.
    fn check_types(&self, label: &str, cx: &Grad<'_>) -> Result<Vec<bool>, OpError> {
        let mut certain = Vec::with_capacity(self.targets.len());
        for (&gradient, &k) in self.graph.outputs.iter().zip(&self.targets) {
            let input = cx.input(k)?;
            let (expected, found) = (cx.ty(input), &self.graph.value(gradient).ty);
            let same = expected.shape().is_some() && expected.shape() == found.shape();
            certain.push(same);
            let transposed = !same && expected.shape().map(sorted_sizes) == found.shape().map(sorted_sizes);
            let differ =
                transposed && expected.shape().is_some() || merge_types(expected, found.clone()).is_err();
            if differ {
                return Err(OpError::invalid(format!(
                    "{label} returns {found} for input {k}, {:?}, of type {expected}; a gradient must have the type and \
                     shape of its input",
                    cx.name_of(input)
                )));
            }
        }
        Ok(certain)
    }

    /// Adds the nodes to the gradient graph. A gradient with a shape that is not `certain` is reshaped to the shape of
    /// its input, so its size is checked at run time.
    fn add_nodes(self, cx: &mut Grad<'_>, certain: &[bool]) -> Result<(), OpError> {
        let mut outer: FxHashMap<ValueId, ValueId> =
            self.bindings.iter().filter_map(|&(inner, outer)| Some((inner, outer?))).collect();
        let graph = &self.graph;
        let mut at = |cx: &mut Grad<'_>, id: ValueId| {
            *outer.entry(id).or_insert_with(|| {
                let value = graph.value(id);
                match &value.constant {
                    Some(tensor) => cx.constant(&value.name, tensor.clone()),
                    None => cx.value(&value.name, ValueType::Unknown),
                }
            })
        };
        for node in &graph.nodes {
            let mut node = node.clone();
            for id in node.inputs.iter_mut().chain(&mut node.outputs).flatten() {
                *id = at(cx, *id);
            }
            cx.push(node);
        }
        for ((&gradient, &k), certain) in graph.outputs.iter().zip(&self.targets).zip(certain) {
            let mut gradient = at(cx, gradient);
            if !certain {
                let input = cx.input(k)?;
                let shape = cx.shape_of(input);
                gradient = cx.add("Reshape", &[gradient, shape], Attrs::new());
            }
            cx.set_grad(k, gradient);
        }
        Ok(())
    }
}

impl Op for CustomGradient {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let node = cx.node();
        let mut graph = checked_forward(node)?.clone();
        set_capture_types(cx, FORWARD, &mut graph)?;
        (cx.passes.infer)(&mut graph).map_err(subgraph_error)?;
        let ports = (0..node.outputs.len()).filter(|&k| node.outputs[k].is_some());
        for (k, &id) in ports.zip(&graph.outputs) {
            cx.set_output_type(k, graph.value(id).ty.clone());
            cx.set_output_sizes(k, graph.value(id).sizes.clone());
        }
        clear_folded(&mut graph);
        cx.set_output_subgraph(FORWARD, graph);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let mut rule = self.build_rule(cx)?;
        rule.remove_absent_inputs(&self.label)?;
        (cx.passes.infer)(&mut rule.graph)
            .map_err(|error| OpError::Gradient { rule: self.label.clone(), source: Box::new(error) })?;
        let certain = rule.check_types(&self.label, cx)?;
        clear_folded(&mut rule.graph);
        rule.add_nodes(cx, &certain)
    }
}

/// Replaces the node by the nodes of its forward subgraph.
fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let node = rw.node();
    let forward = checked_forward(node)?;
    let explicit_count = node.inputs.len() - node.captures;
    let mut outer: FxHashMap<ValueId, ValueId> = FxHashMap::default();
    for (&inner, port) in forward.inputs.iter().zip(&node.inputs[explicit_count..]) {
        outer.insert(inner, port.ok_or_else(|| OpError::invalid("a captured value is missing"))?);
    }
    let mut at = |rw: &mut Rewrite<'_>, id: ValueId| {
        *outer.entry(id).or_insert_with(|| {
            let value = forward.value(id);
            match &value.constant {
                Some(tensor) => rw.constant(&value.name, tensor.clone()),
                None => rw.patch().1.add_value(&value.name, ValueType::Unknown),
            }
        })
    };
    for node in &forward.nodes {
        let mut node = node.clone();
        for id in node.inputs.iter_mut().chain(&mut node.outputs).flatten() {
            *id = at(rw, *id);
        }
        rw.patch().1.push(node);
    }
    let ports = (0..node.outputs.len()).filter(|&k| node.outputs[k].is_some());
    for (k, &id) in ports.zip(&forward.outputs) {
        let copy = at(rw, id);
        rw.replace_output(k, copy);
    }
    Ok(())
}

/// Returns true if the node defines a gradient of `input`. `None`: the node is a different operator.
pub(crate) fn has_gradient_of(node: &Node, input: ValueId) -> Option<bool> {
    if *node.domain != *DOMAIN || *node.op != *NAME {
        return None;
    }
    let of = node.attrs.ints(GRADIENT_INPUTS).ok().flatten().unwrap_or_default();
    let explicit_inputs = &node.inputs[..node.inputs.len() - node.captures];
    Some(of.iter().any(|&k| usize::try_from(k).is_ok_and(|k| explicit_inputs.get(k) == Some(&Some(input)))))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![Definition::new(DOMAIN, NAME, &[1], build).decompose(decompose)]
}

#[cfg(test)]
mod tests {
    use ortrain_onnx::{
        FunctionProto, GraphProto, LoadedModel, ModelProto, OperatorSetIdProto, ValueInfoProto,
    };

    use ortrain_graph::Attr;

    use super::*;
    use crate::OperatorLibrary;
    use crate::passes::differentiate::backpropagate;
    use crate::passes::functions::restore_nodes;
    use crate::passes::functions::{has_wrapped_nodes, inline_for_gradients, unwrap_nodes};
    use crate::passes::infer::infer;
    use crate::testing::{check_decomposition, check_gradients, generic_tensor, gradient_graph, run};

    fn texts(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
        NodeProto { op_type: op.into(), input: texts(inputs), output: texts(outputs), ..NodeProto::default() }
    }

    /// Returns a model of `z = x tanh(x w)`, in which the Tanh has the user-defined gradient `dy - dy y y`.
    fn tanh_model() -> ModelProto {
        let tanh = FunctionProto {
            name: "OfTanh".into(),
            domain: "own".into(),
            input: texts(&["x", "y", "dy"]),
            output: texts(&["dx"]),
            node: vec![
                node("Sub", &["dy", "less"], &["dx"]),
                node("Mul", &["square", "dy"], &["less"]),
                node("Mul", &["y", "y"], &["square"]),
            ],
            opset_import: vec![OperatorSetIdProto { domain: String::new(), version: 14 }],
            ..FunctionProto::default()
        };
        let mut library = OperatorLibrary::default();
        library.add_gradient("", "Tanh", None, tanh).expect("it fits");
        let info = |name: &str| {
            let mut graph = Graph::new("");
            let id = graph.add_value(name, ValueType::tensor(ortrain_graph::DType::F64, &[3]));
            graph.value_info(id)
        };
        let mut model = ModelProto {
            graph: Some(GraphProto {
                node: vec![
                    node("Mul", &["x", "w"], &["p"]),
                    node("Tanh", &["p"], &["y"]),
                    node("Mul", &["x", "y"], &["z"]),
                ],
                input: vec![info("x"), info("w")],
                output: vec![ValueInfoProto { name: "z".into(), ..ValueInfoProto::default() }],
                ..GraphProto::default()
            }),
            opset_import: vec![OperatorSetIdProto { domain: String::new(), version: 17 }],
            ..ModelProto::default()
        };
        inline_for_gradients(&mut model, &library).expect("it fits");
        model
    }

    fn graph() -> Graph {
        let model = LoadedModel::from_proto(tanh_model(), Default::default());
        let mut graph = Graph::from_model(&model).expect("a graph");
        crate::passes::versions::upgrade(&mut graph).expect("known operators");
        infer(&mut graph).expect("it fits");
        graph
    }

    #[test]
    fn custom_gradient_is_used_and_differentiable() {
        let (graph, inputs) = (graph(), [generic_tensor(&[3], 1), generic_tensor(&[3], 2)]);
        assert_eq!(&*graph.nodes[1].op, NAME);
        check_gradients(&graph, &inputs, &[0, 1], &[0]);
        check_decomposition(&graph, &inputs, 0.0);
        let weights = generic_tensor(&[3], 3);
        let gradient = gradient_graph(&graph, &[Some(weights)], &[0, 1]);
        assert!(gradient.nodes.iter().any(|node| &*node.op == "Sub"), "{gradient}");
        check_gradients(&gradient, &inputs, &[0, 1], &[0, 1]);
    }

    #[test]
    fn restores_original_nodes() {
        let inputs = [generic_tensor(&[3], 1), generic_tensor(&[3], 2)];
        let mut graph = graph();
        let expected = run(&graph, &inputs).expect("it runs");
        restore_nodes(&mut graph).expect("it can be");
        infer(&mut graph).expect("it fits");
        assert_eq!(&*graph.nodes[1].op, "Tanh");
        assert_eq!(graph.name_of(graph.nodes[1].outputs[0].expect("one")), "y");
        assert_eq!(run(&graph, &inputs).expect("it runs"), expected);

        let mut message = tanh_model().graph.expect("a graph");
        assert!(has_wrapped_nodes(&message));
        unwrap_nodes(&mut message);
        assert!(!has_wrapped_nodes(&message));
        assert_eq!(message.node[1], node("Tanh", &["p"], &["y"]));
    }

    /// ortrain does not write such nodes to files, but files of other programs may contain them.
    #[test]
    fn rejects_malformed_nodes() {
        let outcome = |change: &dyn Fn(&mut Node)| {
            let mut graph = graph();
            change(&mut graph.nodes[1]);
            infer(&mut graph)?;
            let (z, x) = (graph.outputs[0], graph.inputs[0]);
            let seed = graph.add_value("seed", graph.value(z).ty.clone());
            graph.inputs.push(seed);
            backpropagate(&mut graph, &[(z, seed)], &[x])?;
            restore_nodes(&mut graph)
        };
        outcome(&|_| {}).expect("it is sound");
        let inner = |node: &mut Node, name: &str, change: &dyn Fn(&mut Graph)| {
            let Some(Attr::Graph(graph)) = node.attrs.0.get_mut(name) else { panic!("it is there") };
            change(graph);
        };
        let set = |node: &mut Node, name: &str, value: Attr| drop(node.attrs.0.insert(name.into(), value));
        let changes: [&dyn Fn(&mut Node); 11] = [
            &|node| drop(node.attrs.0.remove(FORWARD)),
            &|node| drop(node.attrs.0.remove(GRADIENT)),
            &|node| drop(node.attrs.0.remove(LABEL)),
            &|node| set(node, INPUTS, Attr::Int(-1)),
            &|node| set(node, INPUTS, Attr::Int(i64::MAX)),
            &|node| set(node, INPUTS, Attr::Int(2)),
            &|node| set(node, GRADIENT_INPUTS, Attr::Ints(vec![1])),
            &|node| set(node, GRADIENT_INPUTS, Attr::Ints(vec![0, 0])),
            &|node| inner(node, FORWARD, &|graph| graph.outputs.clear()),
            &|node| {
                inner(node, FORWARD, &|graph| {
                    let extra = graph.add_value("more", ValueType::Unknown);
                    graph.inputs.push(extra);
                });
            },
            &|node| inner(node, GRADIENT, &|graph| graph.inputs.truncate(2)),
        ];
        for (k, change) in changes.into_iter().enumerate() {
            assert!(outcome(change).is_err(), "change {k}");
        }
    }
}
