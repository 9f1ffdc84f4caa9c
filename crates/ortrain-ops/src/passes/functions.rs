//! Inlining of functions of a model or a library at their calls; and insertion of the gradients of a library.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use ortrain_graph::{Attr, Graph};
use ortrain_onnx::{
    AttributeProto, AttributeType, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    ValueInfoProto, visit_tensors_mut,
};
use prost::Message as _;

use crate::Error;
use crate::families::custom_gradient;
use crate::library::{OperatorLibrary, function_label as label, operator_label};
use crate::passes::node::decompose_node;
use crate::registry::Registry;
use crate::registry::normalize_domain;

/// Maximum number of nodes of a model after inlining. Nested functions can expand beyond the memory of any machine.
const MAX_NODES: usize = 1 << 18;
/// Maximum number of repeated bytes of names and attributes, without payloads of tensors (which are shared).
const MAX_BYTES: usize = 1 << 30;

/// Maximum nesting depth of calls and subgraphs.
const MAX_DEPTH: usize = 100;

/// Domain, name and overload of a function.
type Key = (String, String, String);

/// Inlines the functions of the model and of a library at their calls, in the graph and its subgraphs, and removes
/// them. Gradients of the library are ignored; [`inline_for_gradients`] uses them.
///
/// The names of values and nodes of a call begin with the name of the call's node. A function of the model takes
/// precedence over an operator of the same name. Operator sets that only functions import are imported by the model
/// afterwards. A body may use an older or newer version of an operator set than the model, if its operators have the
/// same meaning in both.
///
/// # Errors
///
/// Returns an error for recursive functions, invalid calls, and bodies that expand beyond the limits. It is also an
/// error if an operator has another meaning in the model's version of its set, or if model and library define a
/// function differently.
pub fn inline_functions(model: &mut ModelProto, library: &OperatorLibrary) -> Result<(), Error> {
    inline(model, library, false)
}

/// Inlines functions for a model that will be differentiated: nodes with a gradient in the library are wrapped in a
/// node that contains both. [`unwrap_nodes`] and [`unwrap_gradients`] unwrap these nodes again.
///
/// # Errors
///
/// Returns the errors of [`inline_functions`], and errors for gradients that do not fit their nodes, use unknown
/// operators, or belong to missing nodes.
pub fn inline_for_gradients(model: &mut ModelProto, library: &OperatorLibrary) -> Result<(), Error> {
    inline(model, library, true)
}

/// Returns true if a graph contains nodes that are wrapped with their gradient.
#[must_use]
pub fn has_wrapped_nodes(graph: &GraphProto) -> bool {
    graph.node.iter().any(|node| {
        let graphs =
            node.attribute.iter().flat_map(|attr| attr.g.iter().map(AsRef::as_ref).chain(&attr.graphs));
        is_custom_gradient(node) || graphs.into_iter().any(has_wrapped_nodes)
    })
}

/// Replaces nodes that are wrapped with their gradient by the original nodes.
pub fn unwrap_nodes(graph: &mut GraphProto) {
    let mut nodes = Vec::with_capacity(graph.node.len());
    for mut node in std::mem::take(&mut graph.node) {
        if is_custom_gradient(&node) {
            let forward = node.attribute.into_iter().find(|attr| attr.name == custom_gradient::FORWARD);
            nodes.extend(forward.and_then(|attr| attr.g).map(|graph| graph.node).into_iter().flatten());
            continue;
        }
        for attribute in &mut node.attribute {
            for graph in attribute.g.iter_mut().map(AsMut::as_mut).chain(&mut attribute.graphs) {
                unwrap_nodes(graph);
            }
        }
        nodes.push(node);
    }
    graph.node = nodes;
}

/// Replaces nodes that are wrapped with their gradient by the original nodes, after differentiation. Types must be
/// inferred again.
///
/// # Errors
///
/// Returns an error if a wrapping node is malformed.
pub fn unwrap_gradients(graph: &mut Graph) -> Result<(), Error> {
    restore_nodes(graph)
}

/// Returns true if a node wraps other nodes with a user-defined gradient.
#[must_use]
pub fn is_custom_gradient(node: &NodeProto) -> bool {
    node.domain == custom_gradient::DOMAIN && node.op_type == custom_gradient::NAME
}

/// Wraps the nodes of `call` together with their gradient. The inputs of the gradient graph are the `inputs` inputs of
/// the call, its outputs, and the gradients of its outputs. The outputs of the gradient graph are the gradients of the
/// inputs in the list `of`.
fn wrap_with_gradient(
    call: &NodeProto,
    forward: Vec<NodeProto>,
    gradient: GraphProto,
    (inputs, of): (usize, Vec<i64>),
    label: String,
) -> NodeProto {
    let is_named = |name: &&String| !name.is_empty();
    let forward = GraphProto {
        name: custom_gradient::FORWARD.into(),
        node: forward,
        output: call.output.iter().filter(is_named).cloned().map(untyped_info).collect(),
        ..GraphProto::default()
    };
    let attribute = |name: &str, kind: AttributeType| {
        let mut attribute = AttributeProto { name: name.into(), ..AttributeProto::default() };
        attribute.set_type(kind);
        attribute
    };
    let graph = |name: &str, graph: GraphProto| AttributeProto {
        g: Some(Box::new(graph)),
        ..attribute(name, AttributeType::Graph)
    };
    NodeProto {
        name: call.name.clone(),
        domain: custom_gradient::DOMAIN.into(),
        op_type: custom_gradient::NAME.into(),
        input: call.input.clone(),
        output: call.output.clone(),
        attribute: vec![
            graph(custom_gradient::FORWARD, forward),
            graph(custom_gradient::GRADIENT, gradient),
            AttributeProto { i: inputs as i64, ..attribute(custom_gradient::INPUTS, AttributeType::Int) },
            AttributeProto { ints: of, ..attribute(custom_gradient::GRADIENT_INPUTS, AttributeType::Ints) },
            AttributeProto {
                s: label.into_bytes().into(),
                ..attribute(custom_gradient::LABEL, AttributeType::String)
            },
        ],
        ..NodeProto::default()
    }
}

/// Returns true for a call of the function that blocks gradients.
fn is_stop_function(node: &NodeProto) -> bool {
    node.domain == custom_gradient::DOMAIN && node.op_type == custom_gradient::STOP_FUNCTION
}

/// Wraps a node with an empty gradient: no gradient flows back through it.
pub(crate) fn wrap_without_gradient(node: NodeProto) -> NodeProto {
    let (inputs, outputs) = (node.input.len(), node.output.len());
    let first = node.output.iter().find(|name| !name.is_empty()).map_or("", String::as_str);
    let names = (0..inputs + 2 * outputs)
        .map(|k| untyped_info(format!("{first}/{}/{k}", custom_gradient::STOP_LABEL)));
    let gradient = GraphProto {
        name: custom_gradient::GRADIENT.into(),
        input: names.collect(),
        ..GraphProto::default()
    };
    let call = NodeProto {
        name: node.name.clone(),
        input: node.input.clone(),
        output: node.output.clone(),
        ..NodeProto::default()
    };
    wrap_with_gradient(
        &call,
        vec![node],
        gradient,
        (inputs, Vec::new()),
        custom_gradient::STOP_LABEL.to_owned(),
    )
}

fn inline(model: &mut ModelProto, library: &OperatorLibrary, differentiated: bool) -> Result<(), Error> {
    let gradients = differentiated && !library.gradients().is_empty();
    if model.functions.is_empty() && library.functions().is_empty() && !gradients {
        return Ok(());
    }
    let functions = std::mem::take(&mut model.functions);
    let mut by_key: HashMap<Key, (&FunctionProto, usize)> = HashMap::new();
    let weigh = |function: &FunctionProto| function.encoded_len() - payload_bytes(function);
    for function in &functions {
        let key = function_key(&function.domain, &function.name, &function.overload);
        if by_key.insert(key, (function, weigh(function))).is_some() {
            return Err(Error::Function { function: label(function), reason: "is defined twice".into() });
        }
    }
    for function in library.functions() {
        match by_key.entry(function_key(&function.domain, &function.name, &function.overload)) {
            Entry::Occupied(there) if there.get().0 != function => {
                let reason =
                    "has different definitions in the model and in the operator library; remove one of them";
                return Err(Error::Function { function: label(function), reason: reason.into() });
            }
            Entry::Occupied(_) => {}
            Entry::Vacant(free) => drop(free.insert((function, weigh(function)))),
        }
    }
    let Some(mut graph) = model.graph.take() else { return Ok(()) };
    let mut inliner = Inliner {
        functions: by_key,
        library,
        differentiated,
        gradients,
        used: HashSet::new(),
        opsets: model
            .opset_import
            .iter()
            .map(|set| (normalize_domain(&set.domain).to_owned(), set.version))
            .collect(),
        imported: Vec::new(),
        names: HashSet::new(),
        calls: Vec::new(),
        depth: 0,
        nodes: 0,
        bytes: 0,
    };
    inliner.check_expanded_size(&graph)?;
    inliner.collect_names(&graph);
    inliner.inline_graph(&mut graph)?;
    if gradients {
        inliner.check_used()?;
    }
    let imported = inliner.imported;
    model.graph = Some(graph);
    model.opset_import.extend(imported);
    Ok(())
}

fn function_key(of_domain: &str, name: &str, overload: &str) -> Key {
    (normalize_domain(of_domain).to_owned(), name.to_owned(), overload.to_owned())
}

fn call_label(node: &NodeProto) -> String {
    let output = node.output.iter().find(|name| !name.is_empty()).map_or("nothing", String::as_str);
    if node.name.is_empty() {
        format!("{} -> {output:?}", node.op_type)
    } else {
        format!("node {:?} ({})", node.name, node.op_type)
    }
}

/// Returns the prefix of names inside of a call.
fn name_prefix(call: &NodeProto) -> &str {
    if call.name.is_empty() {
        call.output.iter().find(|name| !name.is_empty()).unwrap_or(&call.op_type)
    } else {
        &call.name
    }
}

fn untyped_info(name: String) -> ValueInfoProto {
    ValueInfoProto { name, ..ValueInfoProto::default() }
}

/// Size of calls after inlining.
#[derive(Clone, Copy, Default)]
struct ExpandedSize {
    nodes: usize,
    /// Repeated names and attributes.
    bytes: usize,
}

impl ExpandedSize {
    fn plus(self, other: ExpandedSize) -> ExpandedSize {
        ExpandedSize {
            nodes: self.nodes.saturating_add(other.nodes),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }

    fn is_too_large(self) -> bool {
        self.nodes > MAX_NODES || self.bytes > MAX_BYTES
    }
}

/// Returns the error for a node that expands the model beyond the limits; `own` is the node's own size, if known.
fn too_large_error(node: &NodeProto, call_size: Option<ExpandedSize>) -> Error {
    let size_note = call_size.map_or_else(String::new, |size| {
        format!("; this call alone has {} nodes and repeats {} bytes", size.nodes, size.bytes)
    });
    Error::Call {
        node: call_label(node),
        reason: format!(
            "the inlined functions of the model have more than {MAX_NODES} nodes or take more than {MAX_BYTES} \
             bytes{size_note}; a Loop repeats nodes without copies"
        ),
    }
}

struct Inliner<'a> {
    /// Functions, and the number of bytes of a copy of each.
    functions: HashMap<Key, (&'a FunctionProto, usize)>,
    library: &'a OperatorLibrary,
    /// True if the model will be differentiated.
    differentiated: bool,
    /// True if gradients of the library are inserted at the current position.
    gradients: bool,
    /// Indices of the inserted gradients.
    used: HashSet<usize>,
    opsets: HashMap<String, i64>,
    imported: Vec<OperatorSetIdProto>,
    /// Used names of values.
    names: HashSet<String>,
    /// Stack of the calls that are being inlined.
    calls: Vec<Key>,
    /// Nesting depth of the current node.
    depth: usize,
    nodes: usize,
    bytes: usize,
}

impl<'a> Inliner<'a> {
    fn collect_names(&mut self, graph: &GraphProto) {
        let values = graph.input.iter().map(|info| &info.name);
        let tensors = graph.initializer.iter().map(|tensor| &tensor.name);
        let sparse = graph.sparse_initializer.iter().flat_map(|t| t.values.iter().map(|t| &t.name));
        let outputs = graph.node.iter().flat_map(|node| &node.output);
        self.names.extend(values.chain(tensors).chain(sparse).chain(outputs).cloned());
        for attribute in graph.node.iter().flat_map(|node| &node.attribute) {
            for graph in attribute.g.iter().map(AsRef::as_ref).chain(&attribute.graphs) {
                self.collect_names(graph);
            }
        }
    }

    fn inline_graph(&mut self, graph: &mut GraphProto) -> Result<(), Error> {
        let nodes = std::mem::take(&mut graph.node);
        graph.node = self.inline_nodes(nodes)?;
        Ok(())
    }

    /// Inlines the calls among nodes.
    fn inline_nodes(&mut self, nodes: Vec<NodeProto>) -> Result<Vec<NodeProto>, Error> {
        let mut result = Vec::with_capacity(nodes.len());
        for node in nodes {
            if self.differentiated && is_stop_function(&node) {
                let nodes = self.inline_node(node)?;
                result.extend(nodes.into_iter().map(wrap_without_gradient));
                continue;
            }
            let gradient = if self.gradients { self.library.gradient_of(&node) } else { None };
            let Some(gradient) = gradient else {
                result.extend(self.inline_node(node)?);
                continue;
            };
            // Nodes inside of a node with a gradient get no other gradients.
            self.gradients = false;
            let call = NodeProto { attribute: node.attribute.clone(), ..node.clone() };
            let nodes = self.inline_node(node)?;
            result.push(self.wrap_call(&call, nodes, gradient)?);
            self.gradients = true;
        }
        Ok(result)
    }

    /// Returns a node, or the nodes of its call.
    fn inline_node(&mut self, node: NodeProto) -> Result<Vec<NodeProto>, Error> {
        if self.depth == MAX_DEPTH {
            let reason = format!("its functions and subgraphs are nested more than {MAX_DEPTH} deep");
            return Err(Error::Call { node: call_label(&node), reason });
        }
        self.depth += 1;
        let nodes = self.inline_node_at_depth(node)?;
        self.depth -= 1;
        Ok(nodes)
    }

    fn inline_node_at_depth(&mut self, mut node: NodeProto) -> Result<Vec<NodeProto>, Error> {
        for attribute in &mut node.attribute {
            for graph in attribute.g.iter_mut().map(AsMut::as_mut).chain(&mut attribute.graphs) {
                self.inline_graph(graph)?;
            }
        }
        let key = function_key(&node.domain, &node.op_type, &node.overload);
        let Some(&(function, weight)) = self.functions.get(&key) else {
            self.nodes += 1;
            self.check_size(&node)?;
            return Ok(vec![node]);
        };
        if self.calls.contains(&key) {
            return Err(Error::Function {
                function: label(function),
                reason: "calls itself; functions cannot be recursive".into(),
            });
        }
        self.bytes = self.bytes.saturating_add(weight);
        self.check_size(&node)?;
        let body = self.function_body(function, &node)?;
        self.calls.push(key);
        let nodes = self.inline_nodes(body)?;
        self.calls.pop();
        Ok(nodes)
    }

    /// Wraps the nodes of `call` together with their gradient.
    fn wrap_call(
        &mut self,
        call: &NodeProto,
        forward: Vec<NodeProto>,
        index: usize,
    ) -> Result<NodeProto, Error> {
        let library = self.library;
        let rule = &library.gradients()[index];
        self.used.insert(index);
        let called =
            self.functions.get(&function_key(&call.domain, &call.op_type, &call.overload)).map(|&(f, _)| f);
        let (inputs, outputs) = (rule.input_count(), rule.output_count());
        if let Some(function) = called
            && (function.input.len(), function.output.len()) != (inputs, outputs)
        {
            return Err(Error::Function {
                function: rule.label(),
                reason: format!(
                    "is for {inputs} inputs and {outputs} outputs, but {} has {} and {}",
                    label(function),
                    function.input.len(),
                    function.output.len()
                ),
            });
        }
        for (port_kind, ports, limit) in [("inputs", &call.input, inputs), ("outputs", &call.output, outputs)]
        {
            let port_count = ports.iter().rposition(|name| !name.is_empty()).map_or(0, |last| last + 1);
            if port_count > limit {
                let reason = format!("it has {port_count} {port_kind}, but {} is for {limit}", rule.label());
                return Err(Error::Call { node: call_label(call), reason });
            }
        }

        // Gradients may call functions, including the function that they are the gradient of.
        let calls = std::mem::take(&mut self.calls);
        let gradient = self.gradient_graph(call, &rule.function, called)?;
        self.calls = calls;
        let known =
            |node: &NodeProto| Registry::standard().is_known(normalize_domain(&node.domain), &node.op_type);
        visit_nodes(&gradient.node, &mut |node| match known(node) {
            true => Ok(()),
            false => Err(Error::Function {
                function: rule.label(),
                reason: format!(
                    "uses {}, which is not a supported operator; it can be added as an ONNX function, too",
                    operator_label(&node.domain, &node.op_type)
                ),
            }),
        })?;

        let of = (0i64..).zip(&rule.function.output).filter(|(_, name)| !name.is_empty()).map(|(k, _)| k);
        Ok(wrap_with_gradient(call, forward, gradient, (inputs, of.collect()), rule.label()))
    }

    /// Builds the gradient of a call as a separate graph, with the attributes of the call.
    fn gradient_graph(
        &mut self,
        call: &NodeProto,
        gradient: &'a FunctionProto,
        called: Option<&'a FunctionProto>,
    ) -> Result<GraphProto, Error> {
        self.bytes = self.bytes.saturating_add(gradient.encoded_len() - payload_bytes(gradient));
        self.check_size(call)?;
        self.import_opsets(gradient)?;
        // Attributes of the call override the function's defaults, which override the gradient's.
        let defaults =
            gradient.attribute_proto.iter().chain(called.into_iter().flat_map(|f| &f.attribute_proto));
        let arguments = defaults.chain(&call.attribute).map(|attr| (attr.name.as_str(), attr)).collect();
        let prefix = format!("{}_Grad", name_prefix(call));
        let mut copy =
            BodyCopier { names: &mut self.names, prefix: &prefix, arguments, scopes: vec![HashMap::new()] };
        let inputs: Vec<String> = gradient.input.iter().map(|name| copy.define_name(name)).collect();
        let nodes: Vec<NodeProto> = gradient.node.iter().map(|node| copy.copy_node(node)).collect();
        let outputs = gradient.output.iter().filter(|name| !name.is_empty());
        let outputs: Vec<String> = outputs.map(|name| copy.copied_name(name)).collect();
        Ok(GraphProto {
            name: custom_gradient::GRADIENT.into(),
            node: self.inline_nodes(nodes)?,
            input: inputs.into_iter().map(untyped_info).collect(),
            output: outputs.into_iter().map(untyped_info).collect(),
            ..GraphProto::default()
        })
    }

    /// Checks that every gradient of a single node has found its node.
    fn check_used(&self) -> Result<(), Error> {
        for (index, gradient) in self.library.gradients().iter().enumerate() {
            if let Some(node) = gradient.node.as_ref().filter(|_| !self.used.contains(&index)) {
                let op = operator_label(&gradient.domain, &gradient.operator);
                return Err(Error::Function {
                    function: gradient.label(),
                    reason: format!("is for the node {node:?} ({op}), which the model does not have"),
                });
            }
        }
        Ok(())
    }

    /// Checks the size of a graph before inlining: exponentially nested calls are an error immediately, independent of
    /// their number of nodes.
    fn check_expanded_size(&self, graph: &GraphProto) -> Result<(), Error> {
        let mut known = HashMap::new();
        let mut sum = ExpandedSize::default();
        for node in &graph.node {
            let node_size = self.expanded_size(node, &mut known, MAX_DEPTH);
            sum = sum.plus(node_size);
            if sum.is_too_large() {
                return Err(too_large_error(node, Some(node_size)));
            }
        }
        Ok(())
    }

    /// Returns the size of a node after inlining, up to a nesting depth of `depth`. Deeper calls are an error when they
    /// are reached. `known` caches the sizes of functions.
    fn expanded_size(
        &self,
        node: &NodeProto,
        known: &mut HashMap<Key, ExpandedSize>,
        depth: usize,
    ) -> ExpandedSize {
        let Some(depth) = depth.checked_sub(1) else { return ExpandedSize::default() };
        let graphs =
            node.attribute.iter().flat_map(|attr| attr.g.iter().map(AsRef::as_ref).chain(&attr.graphs));
        let inside = graphs.flat_map(|graph| &graph.node);
        let inside = inside
            .fold(ExpandedSize::default(), |sum, node| sum.plus(self.expanded_size(node, known, depth)));
        let key = function_key(&node.domain, &node.op_type, &node.overload);
        let Some(&(function, bytes)) = self.functions.get(&key) else {
            return inside.plus(ExpandedSize { nodes: 1, bytes: 0 });
        };
        let called = known.get(&key).copied().unwrap_or_else(|| {
            // A recursive function is an error when it is reached.
            known.insert(key.clone(), ExpandedSize::default());
            let start = ExpandedSize { nodes: 0, bytes };
            let called = function
                .node
                .iter()
                .fold(start, |sum, node| sum.plus(self.expanded_size(node, known, depth)));
            known.insert(key, called);
            called
        });
        inside.plus(called)
    }

    fn check_size(&self, node: &NodeProto) -> Result<(), Error> {
        let extent = ExpandedSize { nodes: self.nodes, bytes: self.bytes };
        if extent.is_too_large() { Err(too_large_error(node, None)) } else { Ok(()) }
    }

    /// Returns the nodes of a call.
    fn function_body(
        &mut self,
        function: &'a FunctionProto,
        call: &NodeProto,
    ) -> Result<Vec<NodeProto>, Error> {
        let fault = |reason: String| Error::Call { node: call_label(call), reason };
        for (port_kind, actual, declared) in [
            ("inputs", call.input.len(), function.input.len()),
            ("outputs", call.output.len(), function.output.len()),
        ] {
            if actual > declared {
                let function = label(function);
                return Err(fault(format!(
                    "it has {actual} {port_kind}, but {function} declares {declared}"
                )));
            }
        }
        let mut arguments: HashMap<&str, &AttributeProto> =
            function.attribute_proto.iter().map(|attribute| (attribute.name.as_str(), attribute)).collect();
        for attribute in &call.attribute {
            let declared = function.attribute.contains(&attribute.name)
                || arguments.contains_key(attribute.name.as_str());
            if !declared {
                return Err(fault(format!(
                    "it has the attribute {:?}, which {} does not declare",
                    attribute.name,
                    label(function)
                )));
            }
            arguments.insert(&attribute.name, attribute);
        }
        self.import_opsets(function)?;

        let prefix = name_prefix(call);
        let mut copy = BodyCopier { names: &mut self.names, prefix, arguments, scopes: vec![HashMap::new()] };
        for (k, name) in function.input.iter().enumerate() {
            let argument = call.input.get(k).cloned().unwrap_or_default();
            copy.scopes[0].insert(name.clone(), argument);
        }
        let mut passed = Vec::new();
        for (k, name) in function.output.iter().enumerate() {
            let Some(result) = call.output.get(k).filter(|output| !output.is_empty()) else { continue };
            if function.input.contains(name) {
                // An input that is also an output needs a node that gives it its second name.
                passed.push(NodeProto {
                    name: format!("{prefix}/{name}"),
                    op_type: "Identity".into(),
                    input: vec![copy.scopes[0][name].clone()],
                    output: vec![result.clone()],
                    ..Default::default()
                });
            } else {
                copy.scopes[0].insert(name.clone(), result.clone());
            }
        }
        let mut nodes: Vec<NodeProto> = function.node.iter().map(|node| copy.copy_node(node)).collect();
        nodes.extend(passed);
        Ok(nodes)
    }

    /// Checks that the operators of a body have the same meaning in the model.
    fn import_opsets(&mut self, function: &FunctionProto) -> Result<(), Error> {
        let versions: HashMap<&str, i64> =
            function.opset_import.iter().map(|set| (normalize_domain(&set.domain), set.version)).collect();
        for (&of_domain, &version) in &versions {
            if !self.opsets.contains_key(of_domain) {
                self.opsets.insert(of_domain.to_owned(), version);
                let set = OperatorSetIdProto { domain: of_domain.to_owned(), version };
                self.imported.push(set);
            }
        }
        visit_nodes(&function.node, &mut |node| {
            let of_domain = normalize_domain(&node.domain);
            let is_call =
                self.functions.contains_key(&function_key(&node.domain, &node.op_type, &node.overload));
            let Some(&function_version) = versions.get(of_domain).filter(|_| !is_call) else { return Ok(()) };
            let model_version = self.opsets[of_domain];
            if function_version == model_version
                || Registry::standard().has_same_meaning(
                    of_domain,
                    &node.op_type,
                    function_version,
                    model_version,
                )
            {
                return Ok(());
            }
            Err(Error::Function {
                function: label(function),
                reason: format!(
                    "uses {} of version {function_version} of its operator set, but the model uses version {model_version}, where it means \
                     something else; convert the model to one version",
                    node.op_type
                ),
            })
        })
    }
}

/// Returns the bytes of payloads that are shared when a message is copied.
fn payload_bytes(function: &FunctionProto) -> usize {
    let mut sum = 0;
    let mut model = ModelProto { functions: vec![function.clone()], ..Default::default() };
    let outcome: Result<(), ()> = visit_tensors_mut(&mut model, |tensor, _| {
        sum += tensor.raw_data.len();
        Ok(())
    });
    debug_assert_eq!(outcome, Ok(()), "the visitor returns no error");
    sum
}

/// Calls `visit` with the nodes of a body and its subgraphs, in order.
fn visit_nodes<'a>(
    nodes: &'a [NodeProto],
    visit: &mut dyn FnMut(&'a NodeProto) -> Result<(), Error>,
) -> Result<(), Error> {
    for node in nodes {
        visit(node)?;
        for attribute in &node.attribute {
            for graph in attribute.g.iter().map(AsRef::as_ref).chain(&attribute.graphs) {
                visit_nodes(&graph.node, visit)?;
            }
        }
    }
    Ok(())
}

/// Copier of a function body for one call.
struct BodyCopier<'a> {
    names: &'a mut HashSet<String>,
    prefix: &'a str,
    arguments: HashMap<&'a str, &'a AttributeProto>,
    /// Names in the body with their names in the copy, the innermost subgraph last.
    scopes: Vec<HashMap<String, String>>,
}

impl BodyCopier<'_> {
    fn copy_node(&mut self, node: &NodeProto) -> NodeProto {
        let mut copy = NodeProto { attribute: Vec::new(), ..node.clone() };
        if !node.name.is_empty() {
            copy.name = format!("{}/{}", self.prefix, node.name);
        }
        copy.input = node.input.iter().map(|name| self.copied_name(name)).collect();
        copy.attribute =
            node.attribute.iter().filter_map(|attribute| self.copy_attribute(attribute)).collect();
        copy.output = node.output.iter().map(|name| self.define_name(name)).collect();
        copy
    }

    /// Returns the copy's name of a used value. A value without a producer gets a new name; the import of the graph
    /// reports it.
    fn copied_name(&mut self, name: &str) -> String {
        let known = self.scopes.iter().rev().find_map(|scope| scope.get(name));
        match known {
            Some(known) => known.clone(),
            // Nodes of a body may be in any order.
            None => self.define_name(name),
        }
    }

    /// Returns the copy's name of a value that is defined in the innermost scope.
    fn define_name(&mut self, name: &str) -> String {
        if name.is_empty() {
            return String::new();
        }
        let last = self.scopes.last_mut().expect("there is one");
        if let Some(known) = last.get(name) {
            return known.clone();
        }
        let preferred = format!("{}/{name}", self.prefix);
        let mut unused = preferred.clone();
        let mut suffix = 1usize;
        while !self.names.insert(unused.clone()) {
            unused = format!("{preferred}_{suffix}");
            suffix += 1;
        }
        last.insert(name.to_owned(), unused.clone());
        unused
    }

    /// Copies an attribute. A reference to an attribute of the call becomes this attribute, or `None` if the call does
    /// not have it.
    fn copy_attribute(&mut self, attribute: &AttributeProto) -> Option<AttributeProto> {
        if !attribute.ref_attr_name.is_empty() {
            let argument = *self.arguments.get(attribute.ref_attr_name.as_str())?;
            return Some(AttributeProto { name: attribute.name.clone(), ..argument.clone() });
        }
        let mut copy = attribute.clone();
        for graph in copy.g.iter_mut().map(AsMut::as_mut).chain(&mut copy.graphs) {
            self.rename_subgraph(graph);
        }
        Some(copy)
    }

    /// Renames a subgraph, including its own values.
    fn rename_subgraph(&mut self, graph: &mut GraphProto) {
        self.scopes.push(HashMap::new());
        for info in &mut graph.input {
            info.name = self.define_name(&info.name);
        }
        for tensor in &mut graph.initializer {
            tensor.name = self.define_name(&tensor.name);
        }
        for tensor in graph.sparse_initializer.iter_mut().flat_map(|sparse| &mut sparse.values) {
            tensor.name = self.define_name(&tensor.name);
        }
        // Values that the subgraph defines shadow outer values of the same names, even before their definition.
        for name in graph.node.iter().flat_map(|node| &node.output) {
            self.define_name(name);
        }
        let nodes = std::mem::take(&mut graph.node);
        graph.node = nodes.iter().map(|node| self.copy_node(node)).collect();
        for info in graph.output.iter_mut().chain(&mut graph.value_info) {
            info.name = self.copied_name(&info.name);
        }
        self.scopes.pop();
    }
}

/// Replaces each node with a user-defined gradient by its original nodes. Their values have no types afterwards.
///
/// # Errors
/// Returns an error if such a node is malformed.
pub(crate) fn restore_nodes(graph: &mut Graph) -> Result<(), Error> {
    let mut index = 0;
    while index < graph.nodes.len() {
        if *graph.nodes[index].domain == *custom_gradient::DOMAIN
            && *graph.nodes[index].op == *custom_gradient::NAME
        {
            decompose_node(graph, index)?;
            continue;
        }
        for attr in graph.nodes[index].attrs.0.values_mut() {
            if let Attr::Graph(subgraph) = attr {
                restore_nodes(subgraph)?;
            }
        }
        index += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(op: &str, domain: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        NodeProto {
            op_type: op.into(),
            domain: domain.into(),
            input: owned(inputs),
            output: owned(outputs),
            ..Default::default()
        }
    }

    fn with(mut node: NodeProto, attribute: AttributeProto) -> NodeProto {
        node.attribute.push(attribute);
        node
    }

    fn float(name: &str, value: f32) -> AttributeProto {
        let mut attribute = AttributeProto { name: name.into(), f: value, ..Default::default() };
        attribute.set_type(AttributeType::Float);
        attribute
    }

    fn reference(name: &str, to: &str) -> AttributeProto {
        AttributeProto { ref_attr_name: to.into(), ..float(name, 0.0) }
    }

    fn function(name: &str, inputs: &[&str], outputs: &[&str], nodes: Vec<NodeProto>) -> FunctionProto {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        FunctionProto {
            name: name.into(),
            domain: "own".into(),
            input: owned(inputs),
            output: owned(outputs),
            node: nodes,
            opset_import: vec![OperatorSetIdProto { domain: String::new(), version: 17 }],
            ..Default::default()
        }
    }

    fn model(nodes: Vec<NodeProto>, functions: Vec<FunctionProto>) -> ModelProto {
        ModelProto {
            graph: Some(GraphProto { node: nodes, ..Default::default() }),
            functions,
            opset_import: vec![
                OperatorSetIdProto { domain: String::new(), version: 17 },
                OperatorSetIdProto { domain: "own".into(), version: 1 },
            ],
            ..Default::default()
        }
    }

    /// Returns the graph's nodes after inlining, as `outputs = op(inputs)`.
    fn inlined(mut model: ModelProto) -> Result<Vec<String>, String> {
        inline_functions(&mut model, &OperatorLibrary::default()).map_err(|error| error.to_string())?;
        assert!(model.functions.is_empty());
        let nodes = model.graph.expect("a graph").node;
        Ok(nodes
            .iter()
            .map(|n| format!("{}={}({})", n.output.join(","), n.op_type, n.input.join(",")))
            .collect())
    }

    #[test]
    fn inlines_calls() {
        let body = vec![
            with(node("Elu", "", &["x"], &["t"]), reference("alpha", "slope")),
            node("Add", "", &["t", "b"], &["y"]),
        ];
        let mut step = function("Step", &["x", "b"], &["y"], body);
        step.attribute_proto.push(float("slope", 0.5));
        let mut second = with(node("Step", "own", &["h", ""], &["z"]), float("slope", 2.0));
        second.name = "second".into();
        let mut called = model(vec![node("Step", "own", &["a", "c"], &["h"]), second], vec![step]);
        inline_functions(&mut called, &OperatorLibrary::default()).expect("it fits");
        let nodes = called.graph.expect("a graph").node;
        let alphas: Vec<f32> = nodes.iter().flat_map(|node| &node.attribute).map(|a| a.f).collect();
        assert_eq!(alphas, [0.5, 2.0]);
        let ports: Vec<String> = nodes.iter().map(|n| format!("{:?}->{:?}", n.input, n.output)).collect();
        assert_eq!(
            ports,
            [
                r#"["a"]->["h/t"]"#,
                r#"["h/t", "c"]->["h"]"#,
                r#"["h"]->["second/t"]"#,
                r#"["second/t", ""]->["z"]"#
            ]
        );
    }

    #[test]
    fn inlines_nested_calls() {
        let inner = function("Inner", &["x"], &["y"], vec![node("Relu", "", &["x"], &["y"])]);
        let outer = function(
            "Outer",
            &["x"],
            &["y", "x"],
            vec![node("Inner", "own", &["x"], &["h"]), node("Inner", "own", &["h"], &["y"])],
        );
        let called = model(vec![node("Outer", "own", &["a"], &["b", "c"])], vec![outer, inner]);
        assert_eq!(inlined(called).expect("it fits"), ["b/h=Relu(a)", "b=Relu(b/h)", "c=Identity(a)"]);
    }

    #[test]
    fn generated_names_are_unique() {
        let f = function(
            "F",
            &["x"],
            &["y"],
            vec![node("Relu", "", &["x"], &["t"]), node("Relu", "", &["t"], &["y"])],
        );
        let called =
            model(vec![node("Neg", "", &["a"], &["b/t"]), node("F", "own", &["b/t"], &["b"])], vec![f]);
        assert_eq!(inlined(called).expect("it fits"), ["b/t=Neg(a)", "b/t_1=Relu(b/t)", "b=Relu(b/t_1)"]);
    }

    #[test]
    fn inlines_in_subgraphs() {
        let branch = GraphProto {
            node: vec![node("Add", "", &["x", "t"], &["r"]), node("Relu", "", &["r"], &["t2"])],
            output: vec![ValueInfoProto { name: "t2".into(), ..Default::default() }],
            ..Default::default()
        };
        let mut attribute = AttributeProto { name: "then_branch".into(), ..Default::default() };
        attribute.set_type(AttributeType::Graph);
        attribute.g = Some(Box::new(branch));
        let f = function(
            "F",
            &["c", "x"],
            &["y"],
            vec![node("Neg", "", &["x"], &["t"]), with(node("If", "", &["c"], &["y"]), attribute)],
        );
        let mut called = model(vec![node("F", "own", &["flag", "a"], &["b"])], vec![f]);
        inline_functions(&mut called, &OperatorLibrary::default()).expect("it fits");
        let nodes = called.graph.expect("a graph").node;
        let branch = nodes[1].attribute[0].g.as_ref().expect("a branch");
        assert_eq!(branch.node[0].input, ["a", "b/t"]);
        assert_eq!(branch.node[0].output, ["b/r"]);
        assert_eq!(branch.output[0].name, branch.node[1].output[0]);
    }

    #[test]
    fn rejects_invalid_calls() {
        let relu = || vec![node("Relu", "", &["x"], &["y"])];
        let call = |inputs: &[&str], outputs: &[&str]| node("F", "own", inputs, outputs);
        let inlined_call =
            |call: NodeProto| inlined(model(vec![call], vec![function("F", &["x"], &["y"], relu())]));
        let message = inlined_call(call(&["a", "b"], &["c"])).expect_err("two inputs");
        assert_eq!(message, r#"F -> "c": it has 2 inputs, but function "F" of domain "own" declares 1"#);
        let message =
            inlined_call(with(call(&["a"], &["c"]), float("slope", 1.0))).expect_err("an attribute");
        assert!(message.contains("\"slope\", which function \"F\""), "{message}");
        let twice = vec![function("F", &["x"], &["y"], relu()), function("F", &["x"], &["y"], relu())];
        let message = inlined(model(vec![call(&["a"], &["c"])], twice)).expect_err("twice");
        assert_eq!(message, r#"function "F" of domain "own" is defined twice"#);
        let itself = function("F", &["x"], &["y"], vec![call(&["x"], &["y"])]);
        let message = inlined(model(vec![call(&["a"], &["c"])], vec![itself])).expect_err("recursive");
        assert!(message.contains("calls itself"), "{message}");
        let mut older = function("F", &["x"], &["y"], vec![node("Softmax", "", &["x"], &["y"])]);
        older.opset_import[0].version = 11;
        let message = inlined(model(vec![call(&["a"], &["c"])], vec![older])).expect_err("another version");
        assert!(message.contains("uses Softmax of version 11"), "{message}");
    }

    #[test]
    fn limits_depth() {
        let chain = |length: usize| {
            let functions = (0..length).map(|k| {
                let next = format!("F{}", k + 1);
                let last = node("Relu", "", &["x"], &["y"]);
                let call = if k + 1 == length { last } else { node(&next, "own", &["x"], &["y"]) };
                function(&format!("F{k}"), &["x"], &["y"], vec![call])
            });
            inlined(model(vec![node("F0", "own", &["a"], &["b"])], functions.collect()))
        };
        assert_eq!(chain(99).expect("not too deep"), ["b=Relu(a)"]);
        let message = chain(20_000).expect_err("too deep");
        assert!(message.contains("more than 100 deep"), "{message}");
    }

    #[test]
    fn limits_repetition() {
        // Each function calls the next one ten times.
        let functions = (0..12).map(|k| {
            let next = format!("F{}", k + 1);
            let mut nodes: Vec<NodeProto> =
                (0..10).map(|i| node(&next, "own", &["x"], &[&format!("t{i}")])).collect();
            if k == 11 {
                nodes = vec![node("Relu", "", &["x"], &["y"])];
            }
            nodes.push(node("Relu", "", &["x"], &["y"]));
            function(&format!("F{k}"), &["x"], &["y"], nodes)
        });
        let message = inlined(model(vec![node("F0", "own", &["a"], &["b"])], functions.collect()));
        let message = message.expect_err("too many");
        assert!(message.contains("more than 262144 nodes"), "{message}");
    }

    /// Checked before inlining: the expanded nodes would exceed time and memory.
    #[test]
    fn rejects_exponential_functions_immediately() {
        let doubling = |levels: usize| {
            let functions = (0..levels).map(|k| {
                let next = format!("F{}", k + 1);
                let (op, domain) = if k + 1 == levels { ("Relu", "") } else { (next.as_str(), "own") };
                let nodes = vec![node(op, domain, &["x"], &["t"]), node(op, domain, &["t"], &["y"])];
                function(&format!("F{k}"), &["x"], &["y"], nodes)
            });
            inlined(model(vec![node("F0", "own", &["a"], &["b"])], functions.collect()))
        };
        assert_eq!(doubling(5).expect("few nodes").len(), 32);
        assert_eq!(
            doubling(30).expect_err("2^30 nodes"),
            "F0 -> \"b\": the inlined functions of the model have more than 262144 nodes or take more than \
             1073741824 bytes; this call alone has 1073741824 nodes and repeats 55834572747 bytes; a Loop repeats \
             nodes without copies"
        );
        let message = doubling(90).expect_err("more than can be counted");
        assert!(message.contains("this call alone has 18446744073709551615 nodes"), "{message}");
    }
}
