//! Functions that a model brings along, written out where they are called.

use std::collections::{HashMap, HashSet};

use ortrain_onnx::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, visit_tensors_mut,
};
use prost::Message as _;

use crate::Error;
use crate::registry::Registry;

/// How many nodes a model may have when its functions are written out. Functions that call functions can describe far
/// more than any machine holds.
const MOST_NODES: usize = 1 << 18;
/// How many bytes of names and attributes may be repeated, payloads of tensors (which are shared) aside.
const MOST_BYTES: usize = 1 << 30;

/// Domain, name and overload of a function.
type Key = (String, String, String);

/// Writes the model's functions out where they are called, in the graph and its subgraphs, and removes them.
///
/// Values and nodes of a call are named after the call's node. A function takes precedence over an operator of the same
/// name. Sets of operators that functions alone import are imported by the model afterwards; a body may be written in
/// another version of a set than the model where its operators are the same in both.
///
/// # Errors
///
/// Functions that call themselves, calls that do not fit, bodies that repeat more than a machine holds, operators that
/// mean something else in the model's version of their set.
pub fn inline_functions(model: &mut ModelProto) -> Result<(), Error> {
    if model.functions.is_empty() {
        return Ok(());
    }
    let functions = std::mem::take(&mut model.functions);
    let mut found: HashMap<Key, (&FunctionProto, usize)> = HashMap::new();
    for function in &functions {
        let weight = function.encoded_len() - payload_bytes(function);
        let key = key(&function.domain, &function.name, &function.overload);
        if found.insert(key, (function, weight)).is_some() {
            return Err(Error::Function { function: label(function), reason: "is defined twice".into() });
        }
    }
    let Some(mut graph) = model.graph.take() else { return Ok(()) };
    let mut inliner = Inliner {
        functions: found,
        opsets: model.opset_import.iter().map(|set| (domain(&set.domain).to_owned(), set.version)).collect(),
        imported: Vec::new(),
        names: HashSet::new(),
        calls: Vec::new(),
        nodes: 0,
        bytes: 0,
    };
    inliner.collect_names(&graph);
    inliner.in_graph(&mut graph)?;
    let imported = inliner.imported;
    model.graph = Some(graph);
    model.opset_import.extend(imported);
    Ok(())
}

fn key(of_domain: &str, name: &str, overload: &str) -> Key {
    (domain(of_domain).to_owned(), name.to_owned(), overload.to_owned())
}

/// The domain of ONNX has two names.
fn domain(name: &str) -> &str {
    if name == "ai.onnx" { "" } else { name }
}

fn label(function: &FunctionProto) -> String {
    format!("function {:?} of domain {:?}", function.name, function.domain)
}

fn call_label(node: &NodeProto) -> String {
    let output = node.output.iter().find(|name| !name.is_empty()).map_or("nothing", String::as_str);
    if node.name.is_empty() {
        format!("the node that makes {:?} ({})", output, node.op_type)
    } else {
        format!("node {:?} ({})", node.name, node.op_type)
    }
}

struct Inliner<'a> {
    /// Functions, and how many bytes a copy of each takes.
    functions: HashMap<Key, (&'a FunctionProto, usize)>,
    opsets: HashMap<String, i64>,
    imported: Vec<OperatorSetIdProto>,
    /// Names of values that are taken.
    names: HashSet<String>,
    /// The calls that are being written out.
    calls: Vec<Key>,
    nodes: usize,
    bytes: usize,
}

impl<'a> Inliner<'a> {
    fn collect_names(&mut self, graph: &GraphProto) {
        let values = graph.input.iter().map(|info| &info.name);
        let tensors = graph.initializer.iter().map(|tensor| &tensor.name);
        let sparse = graph.sparse_initializer.iter().flat_map(|t| t.values.iter().map(|t| &t.name));
        let made = graph.node.iter().flat_map(|node| &node.output);
        self.names.extend(values.chain(tensors).chain(sparse).chain(made).cloned());
        for attribute in graph.node.iter().flat_map(|node| &node.attribute) {
            for graph in attribute.g.iter().map(AsRef::as_ref).chain(&attribute.graphs) {
                self.collect_names(graph);
            }
        }
    }

    fn in_graph(&mut self, graph: &mut GraphProto) -> Result<(), Error> {
        let nodes = std::mem::take(&mut graph.node);
        graph.node = self.expanded(nodes)?;
        Ok(())
    }

    /// Nodes with the calls among them written out.
    fn expanded(&mut self, nodes: Vec<NodeProto>) -> Result<Vec<NodeProto>, Error> {
        let mut result = Vec::with_capacity(nodes.len());
        for mut node in nodes {
            for attribute in &mut node.attribute {
                for graph in attribute.g.iter_mut().map(AsMut::as_mut).chain(&mut attribute.graphs) {
                    self.in_graph(graph)?;
                }
            }
            let key = key(&node.domain, &node.op_type, &node.overload);
            let Some(&(function, weight)) = self.functions.get(&key) else {
                self.nodes += 1;
                self.check_size(&node)?;
                result.push(node);
                continue;
            };
            if self.calls.contains(&key) {
                return Err(Error::Function {
                    function: label(function),
                    reason: "calls itself; functions cannot be recursive".into(),
                });
            }
            self.bytes = self.bytes.saturating_add(weight);
            self.check_size(&node)?;
            let body = self.body(function, &node)?;
            self.calls.push(key);
            result.extend(self.expanded(body)?);
            self.calls.pop();
        }
        Ok(result)
    }

    fn check_size(&self, node: &NodeProto) -> Result<(), Error> {
        if self.nodes <= MOST_NODES && self.bytes <= MOST_BYTES {
            return Ok(());
        }
        Err(Error::Call {
            node: call_label(node),
            reason: format!(
                "the model's functions, written out, have more than {MOST_NODES} nodes or take more than {MOST_BYTES} bytes"
            ),
        })
    }

    /// The nodes of a call.
    fn body(&mut self, function: &'a FunctionProto, call: &NodeProto) -> Result<Vec<NodeProto>, Error> {
        let fault = |reason: String| Error::Call { node: call_label(call), reason };
        for (what, given, declared) in [
            ("inputs", call.input.len(), function.input.len()),
            ("outputs", call.output.len(), function.output.len()),
        ] {
            if given > declared {
                let function = label(function);
                return Err(fault(format!("it has {given} {what}, but {function} declares {declared}")));
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
        self.import(function)?;

        let prefix = if call.name.is_empty() {
            call.output.iter().find(|name| !name.is_empty()).unwrap_or(&call.op_type)
        } else {
            &call.name
        };
        let mut copy = Copy { names: &mut self.names, prefix, arguments, scopes: vec![HashMap::new()] };
        for (k, name) in function.input.iter().enumerate() {
            let given = call.input.get(k).cloned().unwrap_or_default();
            copy.scopes[0].insert(name.clone(), given);
        }
        let mut passed = Vec::new();
        for (k, name) in function.output.iter().enumerate() {
            let Some(given) = call.output.get(k).filter(|given| !given.is_empty()) else { continue };
            if function.input.contains(name) {
                // What goes out as it came in needs a node that gives it its second name.
                passed.push(NodeProto {
                    name: format!("{prefix}/{name}"),
                    op_type: "Identity".into(),
                    input: vec![copy.scopes[0][name].clone()],
                    output: vec![given.clone()],
                    ..Default::default()
                });
            } else {
                copy.scopes[0].insert(name.clone(), given.clone());
            }
        }
        let mut nodes: Vec<NodeProto> = function.node.iter().map(|node| copy.node(node)).collect();
        nodes.extend(passed);
        Ok(nodes)
    }

    /// Makes sure that the operators of a body mean what they mean in the model.
    fn import(&mut self, function: &FunctionProto) -> Result<(), Error> {
        let versions: HashMap<&str, i64> =
            function.opset_import.iter().map(|set| (domain(&set.domain), set.version)).collect();
        for (&of_domain, &version) in &versions {
            if !self.opsets.contains_key(of_domain) {
                self.opsets.insert(of_domain.to_owned(), version);
                let set = OperatorSetIdProto { domain: of_domain.to_owned(), version };
                self.imported.push(set);
            }
        }
        each_node(&function.node, &mut |node| {
            let of_domain = domain(&node.domain);
            let is_call = self.functions.contains_key(&key(&node.domain, &node.op_type, &node.overload));
            let Some(&own) = versions.get(of_domain).filter(|_| !is_call) else { return Ok(()) };
            let ours = self.opsets[of_domain];
            if own == ours || Registry::standard().means_the_same(of_domain, &node.op_type, own, ours) {
                return Ok(());
            }
            Err(Error::Function {
                function: label(function),
                reason: format!(
                    "uses {} of version {own} of its operator set, but the model uses version {ours}, where it means \
                     something else; convert the model to one version",
                    node.op_type
                ),
            })
        })
    }
}

/// Bytes of payloads that are shared when a message is copied.
fn payload_bytes(function: &FunctionProto) -> usize {
    let mut sum = 0;
    let mut model = ModelProto { functions: vec![function.clone()], ..Default::default() };
    let outcome: Result<(), ()> = visit_tensors_mut(&mut model, |tensor, _| {
        sum += tensor.raw_data.len();
        Ok(())
    });
    debug_assert_eq!(outcome, Ok(()), "the visit gives no error");
    sum
}

/// Calls `visit` with the nodes of a body and its subgraphs, in order.
fn each_node<'a>(
    nodes: &'a [NodeProto],
    visit: &mut dyn FnMut(&'a NodeProto) -> Result<(), Error>,
) -> Result<(), Error> {
    for node in nodes {
        visit(node)?;
        for attribute in &node.attribute {
            for graph in attribute.g.iter().map(AsRef::as_ref).chain(&attribute.graphs) {
                each_node(&graph.node, visit)?;
            }
        }
    }
    Ok(())
}

/// A copy of a body for one call.
struct Copy<'a> {
    names: &'a mut HashSet<String>,
    prefix: &'a str,
    arguments: HashMap<&'a str, &'a AttributeProto>,
    /// Names in the body and what they are called in the copy, innermost subgraph last.
    scopes: Vec<HashMap<String, String>>,
}

impl Copy<'_> {
    fn node(&mut self, node: &NodeProto) -> NodeProto {
        let mut copy = NodeProto { attribute: Vec::new(), ..node.clone() };
        if !node.name.is_empty() {
            copy.name = format!("{}/{}", self.prefix, node.name);
        }
        copy.input = node.input.iter().map(|name| self.used(name)).collect();
        copy.attribute = node.attribute.iter().filter_map(|attribute| self.attribute(attribute)).collect();
        copy.output = node.output.iter().map(|name| self.made(name)).collect();
        copy
    }

    /// A value that is used: one of the copy's, or (an error that the graph's import names) of nobody's.
    fn used(&mut self, name: &str) -> String {
        let known = self.scopes.iter().rev().find_map(|scope| scope.get(name));
        match known {
            Some(known) => known.clone(),
            // Nodes of a body may come in any order.
            None => self.made(name),
        }
    }

    /// A value that is made in the innermost scope.
    fn made(&mut self, name: &str) -> String {
        if name.is_empty() {
            return String::new();
        }
        let last = self.scopes.last_mut().expect("there is one");
        if let Some(known) = last.get(name) {
            return known.clone();
        }
        let wanted = format!("{}/{name}", self.prefix);
        let mut unused = wanted.clone();
        let mut number = 1usize;
        while !self.names.insert(unused.clone()) {
            unused = format!("{wanted}_{number}");
            number += 1;
        }
        last.insert(name.to_owned(), unused.clone());
        unused
    }

    /// An attribute; one that refers to an attribute of the call becomes that, or nothing.
    fn attribute(&mut self, attribute: &AttributeProto) -> Option<AttributeProto> {
        if !attribute.ref_attr_name.is_empty() {
            let given = *self.arguments.get(attribute.ref_attr_name.as_str())?;
            return Some(AttributeProto { name: attribute.name.clone(), ..given.clone() });
        }
        let mut copy = attribute.clone();
        for graph in copy.g.iter_mut().map(AsMut::as_mut).chain(&mut copy.graphs) {
            self.graph(graph);
        }
        Some(copy)
    }

    /// A subgraph, whose own values are named anew as well.
    fn graph(&mut self, graph: &mut GraphProto) {
        self.scopes.push(HashMap::new());
        for info in &mut graph.input {
            info.name = self.made(&info.name);
        }
        for tensor in &mut graph.initializer {
            tensor.name = self.made(&tensor.name);
        }
        for tensor in graph.sparse_initializer.iter_mut().flat_map(|sparse| &mut sparse.values) {
            tensor.name = self.made(&tensor.name);
        }
        // Values that the subgraph makes hide outer ones of their names, also where they are used before.
        for name in graph.node.iter().flat_map(|node| &node.output) {
            self.made(name);
        }
        let nodes = std::mem::take(&mut graph.node);
        graph.node = nodes.iter().map(|node| self.node(node)).collect();
        for info in graph.output.iter_mut().chain(&mut graph.value_info) {
            info.name = self.used(&info.name);
        }
        self.scopes.pop();
    }
}

#[cfg(test)]
mod tests {
    use ortrain_onnx::{AttributeType, ValueInfoProto};

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

    /// The graph's nodes after inlining, as `outputs = op(inputs)`.
    fn inlined(mut model: ModelProto) -> Result<Vec<String>, String> {
        inline_functions(&mut model).map_err(|error| error.to_string())?;
        assert!(model.functions.is_empty());
        let nodes = model.graph.expect("a graph").node;
        Ok(nodes
            .iter()
            .map(|n| format!("{}={}({})", n.output.join(","), n.op_type, n.input.join(",")))
            .collect())
    }

    #[test]
    fn a_call_becomes_its_nodes() {
        let body = vec![
            with(node("Elu", "", &["x"], &["t"]), reference("alpha", "slope")),
            node("Add", "", &["t", "b"], &["y"]),
        ];
        let mut own = function("Step", &["x", "b"], &["y"], body);
        own.attribute_proto.push(float("slope", 0.5));
        let mut second = with(node("Step", "own", &["h", ""], &["z"]), float("slope", 2.0));
        second.name = "second".into();
        let mut made = model(vec![node("Step", "own", &["a", "c"], &["h"]), second], vec![own]);
        inline_functions(&mut made).expect("it fits");
        let nodes = made.graph.expect("a graph").node;
        let alphas: Vec<f32> = nodes.iter().flat_map(|node| &node.attribute).map(|a| a.f).collect();
        assert_eq!(alphas, [0.5, 2.0]);
        let shown: Vec<String> = nodes.iter().map(|n| format!("{:?}->{:?}", n.input, n.output)).collect();
        assert_eq!(
            shown,
            [
                r#"["a"]->["h/t"]"#,
                r#"["h/t", "c"]->["h"]"#,
                r#"["h"]->["second/t"]"#,
                r#"["second/t", ""]->["z"]"#
            ]
        );
    }

    #[test]
    fn functions_call_functions() {
        let inner = function("Inner", &["x"], &["y"], vec![node("Relu", "", &["x"], &["y"])]);
        let outer = function(
            "Outer",
            &["x"],
            &["y", "x"],
            vec![node("Inner", "own", &["x"], &["h"]), node("Inner", "own", &["h"], &["y"])],
        );
        let made = model(vec![node("Outer", "own", &["a"], &["b", "c"])], vec![outer, inner]);
        assert_eq!(inlined(made).expect("it fits"), ["b/h=Relu(a)", "b=Relu(b/h)", "c=Identity(a)"]);
    }

    #[test]
    fn names_that_are_taken_are_not_taken_again() {
        let own = function(
            "F",
            &["x"],
            &["y"],
            vec![node("Relu", "", &["x"], &["t"]), node("Relu", "", &["t"], &["y"])],
        );
        let made =
            model(vec![node("Neg", "", &["a"], &["b/t"]), node("F", "own", &["b/t"], &["b"])], vec![own]);
        assert_eq!(inlined(made).expect("it fits"), ["b/t=Neg(a)", "b/t_1=Relu(b/t)", "b=Relu(b/t_1)"]);
    }

    #[test]
    fn subgraphs_call_and_are_called() {
        let branch = GraphProto {
            node: vec![node("Add", "", &["x", "t"], &["r"]), node("Relu", "", &["r"], &["t2"])],
            output: vec![ValueInfoProto { name: "t2".into(), ..Default::default() }],
            ..Default::default()
        };
        let mut attribute = AttributeProto { name: "then_branch".into(), ..Default::default() };
        attribute.set_type(AttributeType::Graph);
        attribute.g = Some(Box::new(branch));
        let own = function(
            "F",
            &["c", "x"],
            &["y"],
            vec![node("Neg", "", &["x"], &["t"]), with(node("If", "", &["c"], &["y"]), attribute)],
        );
        let mut made = model(vec![node("F", "own", &["flag", "a"], &["b"])], vec![own]);
        inline_functions(&mut made).expect("it fits");
        let nodes = made.graph.expect("a graph").node;
        let branch = nodes[1].attribute[0].g.as_ref().expect("a branch");
        assert_eq!(branch.node[0].input, ["a", "b/t"]);
        assert_eq!(branch.node[0].output, ["b/r"]);
        assert_eq!(branch.output[0].name, branch.node[1].output[0]);
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let relu = || vec![node("Relu", "", &["x"], &["y"])];
        let call = |inputs: &[&str], outputs: &[&str]| node("F", "own", inputs, outputs);
        let one = |call: NodeProto| inlined(model(vec![call], vec![function("F", &["x"], &["y"], relu())]));
        let message = one(call(&["a", "b"], &["c"])).expect_err("two inputs");
        assert_eq!(
            message,
            r#"the node that makes "c" (F): it has 2 inputs, but function "F" of domain "own" declares 1"#
        );
        let message = one(with(call(&["a"], &["c"]), float("slope", 1.0))).expect_err("an attribute");
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
    fn repetition_has_an_end() {
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
}
