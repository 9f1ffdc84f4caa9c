//! Import of graphs from ONNX messages.

use std::sync::Arc;

use indexmap::IndexMap;
use ortrain_expr::pause;
use ortrain_onnx::proto::{
    AttributeProto, GraphProto, NodeProto, TensorProto, TypeProto, ValueInfoProto,
    tensor_shape_proto::dimension, type_proto,
};
use ortrain_onnx::{AttributeType, LoadedModel, tensor_dims};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::{Attr, Attrs, DType, Dim, Graph, GraphError, Node, Tensor, ValueId, ValueType};

/// Maximum size in bytes of a sparse initializer after its conversion to a dense tensor. Dense initializers need no
/// limit, because they share the bytes of the loaded file.
const SPARSE_LIMIT: usize = 1 << 30;

impl Graph {
    /// Imports the graph of a model.
    ///
    /// Nodes are sorted topologically. Initializers become constants, even if they are listed as inputs. Outer values
    /// that a subgraph uses become inputs of its node ([`Node::captures`]).
    ///
    /// # Errors
    /// Fails if the model is inconsistent: undefined values, values with two producers, or cycles. Supported
    /// types are tensors of numbers, and sequences of these tensors.
    pub fn from_model(model: &LoadedModel) -> Result<Graph, GraphError> {
        let proto = model.proto.graph.as_ref().ok_or(GraphError::NoGraph)?;
        let mut graph = import(model, proto, &FxHashMap::default())?;
        for opset in &model.proto.opset_import {
            let domain = if opset.domain == "ai.onnx" { "" } else { opset.domain.as_str() };
            let before = graph.opsets.insert(domain.to_owned(), opset.version);
            if let Some(before) = before.filter(|&before| before != opset.version) {
                return Err(GraphError::TwoVersions {
                    domain: if domain.is_empty() { "ai.onnx".into() } else { domain.to_owned() },
                    versions: (before, opset.version),
                });
            }
        }
        Ok(graph)
    }

    /// Imports a tensor of a model.
    ///
    /// # Errors
    /// Fails if the payload cannot be read, or contradicts shape and type.
    pub fn tensor_from_proto(model: &LoadedModel, proto: &TensorProto) -> Result<Tensor, GraphError> {
        let dtype = DType::from_onnx(proto.data_type).ok_or_else(|| GraphError::UnsupportedType {
            value: proto.name.clone(),
            found: format!("{}{:?}", type_name(proto.data_type), proto.dims),
            users: Vec::new(),
        })?;
        let dims = tensor_dims(proto)?;
        let data = model.tensor_payload(proto)?;
        Tensor::from_packed(dtype, dims, data)
            .map_err(|source| GraphError::Tensor { name: proto.name.clone(), source })
    }
}

/// Types of the outer values that a subgraph may capture, by name.
type Outer = FxHashMap<String, ValueType>;

fn import(model: &LoadedModel, proto: &GraphProto, outer: &Outer) -> Result<Graph, GraphError> {
    let mut graph = Graph::new(&proto.name);
    let constants = import_initializers(model, proto)?;
    for info in &proto.input {
        if constants.contains_key(&info.name) {
            continue;
        }
        let ty = declared_value_type(info).map_err(|error| with_users(error, proto))?;
        let id = define(&mut graph, &info.name, ty, "the graph's inputs")?;
        graph.inputs.push(id);
    }
    for (name, tensor) in constants {
        let ty = ValueType::tensor(tensor.dtype(), tensor.dims());
        let id = define(&mut graph, &name, ty, "an initializer")?;
        graph.value_mut(id).constant = Some(tensor);
    }
    let mut declared: FxHashMap<&str, ValueType> = FxHashMap::default();
    for info in proto.value_info.iter().chain(&proto.output) {
        // An unsupported type counts as unknown. Type inference reports the value if it is used.
        declared.insert(&info.name, declared_value_type(info).unwrap_or_default());
    }

    // All outputs are defined first, because the nodes are not sorted yet.
    for node in &proto.node {
        for name in node.output.iter().filter(|name| !name.is_empty()) {
            let ty = declared.get(name.as_str()).cloned().unwrap_or_default();
            define(&mut graph, name, ty, &label(node))?;
        }
    }
    // Outer values for the subgraphs of this graph.
    let mut visible = outer.clone();
    for id in graph.value_ids() {
        visible.insert(graph.name_of(id).to_owned(), graph.value(id).ty.clone());
    }

    let mut captured: Vec<ValueId> = Vec::new();
    for node in &proto.node {
        pause();
        let (attrs, free) = import_attributes(model, node, &visible)?;
        let mut inputs: Vec<&str> = node.input.iter().map(String::as_str).collect();
        while inputs.last() == Some(&"") {
            inputs.pop();
        }
        if !free.is_empty() {
            inputs.extend(free.iter().map(String::as_str));
        }
        let mut resolved = Vec::with_capacity(inputs.len());
        for name in inputs {
            resolved.push(match name {
                "" => None,
                name => Some(find_or_capture(&mut graph, name, outer, &mut captured, || label(node))?),
            });
        }
        let mut outputs: Vec<Option<ValueId>> = node.output.iter().map(|name| graph.find(name)).collect();
        while outputs.last() == Some(&None) {
            outputs.pop();
        }
        let domain = if node.domain == "ai.onnx" { "" } else { node.domain.as_str() };
        let mut new_node = Node::new(domain, &node.op_type, &resolved, &outputs, attrs);
        new_node.name = Arc::from(node.name.as_str());
        new_node.captures = free.len();
        graph.nodes.push(new_node);
    }

    for info in &proto.output {
        let reader = || "the list of the graph's outputs".to_owned();
        let id = find_or_capture(&mut graph, &info.name, outer, &mut captured, reader)?;
        graph.outputs.push(id);
    }
    graph.inputs.extend(captured);
    sort(&mut graph)?;
    Ok(graph)
}

/// Returns the initializers of a graph, in their order. Sparse ones become dense.
fn import_initializers(
    model: &LoadedModel,
    proto: &GraphProto,
) -> Result<IndexMap<String, Tensor>, GraphError> {
    let mut constants: IndexMap<String, Tensor> = IndexMap::new();
    for tensor in &proto.initializer {
        let value = Graph::tensor_from_proto(model, tensor).map_err(|error| with_users(error, proto))?;
        if constants.insert(tensor.name.clone(), value).is_some() {
            return Err(GraphError::DuplicateValue {
                value: tensor.name.clone(),
                second: "an initializer".into(),
            });
        }
    }
    for sparse in &proto.sparse_initializer {
        let dense = model.densify(sparse, SPARSE_LIMIT)?;
        constants.insert(dense.name.clone(), Graph::tensor_from_proto(model, &dense)?);
    }
    Ok(constants)
}

/// Returns the attributes of a node, and the sorted names of the outer values that its subgraphs read.
fn import_attributes(
    model: &LoadedModel,
    node: &NodeProto,
    visible: &Outer,
) -> Result<(Attrs, Vec<String>), GraphError> {
    let mut attrs = Attrs::new();
    let mut free: Vec<String> = Vec::new();
    for attribute in &node.attribute {
        let value = attr(model, node, attribute, visible)?;
        if let Attr::Graph(subgraph) = &value {
            let names = subgraph.inputs[formal_inputs(attribute)..].iter().map(|&id| subgraph.name_of(id));
            for name in names {
                if !free.iter().any(|known| known == name) {
                    free.push(name.to_owned());
                }
            }
        }
        if attrs.0.insert(attribute.name.clone(), value).is_some() {
            return Err(GraphError::DuplicateAttribute {
                attribute: attribute.name.clone(),
                node: label(node),
            });
        }
    }
    // Sorted, so that the order does not depend on the order of the attributes.
    free.sort();
    align_captures(&mut attrs, node, &free, visible);
    Ok((attrs, free))
}

/// Returns a value of the graph by name. A value of an outer graph becomes a captured value.
fn find_or_capture(
    graph: &mut Graph,
    name: &str,
    outer: &Outer,
    captured: &mut Vec<ValueId>,
    reader: impl Fn() -> String,
) -> Result<ValueId, GraphError> {
    if let Some(id) = graph.find(name) {
        return Ok(id);
    }
    let undefined = || GraphError::UndefinedValue { node: reader(), value: name.to_owned() };
    let id = graph.add_value(name, outer.get(name).ok_or_else(undefined)?.clone());
    captured.push(id);
    Ok(id)
}

/// Returns the number of inputs that a subgraph declares itself.
fn formal_inputs(attribute: &AttributeProto) -> usize {
    attribute.g.as_ref().map_or(0, |graph| {
        let constants: FxHashSet<&str> =
            graph.initializer.iter().map(|tensor| tensor.name.as_str()).collect();
        graph.input.iter().filter(|info| !constants.contains(info.name.as_str())).count()
    })
}

/// Gives every subgraph of a node the same captured inputs in the same order.
fn align_captures(attrs: &mut Attrs, node: &NodeProto, free: &[String], visible: &Outer) {
    for attribute in &node.attribute {
        let Some(Attr::Graph(subgraph)) = attrs.0.get_mut(&attribute.name) else { continue };
        let formal: Vec<ValueId> = subgraph.inputs[..formal_inputs(attribute)].to_vec();
        let mut inputs = formal;
        for name in free {
            let known = subgraph.inputs.iter().copied().find(|&id| subgraph.name_of(id) == name);
            let id = known.unwrap_or_else(|| {
                // This branch does not use the value. One of the branch's own values may have its name.
                let ty = visible.get(name).cloned().unwrap_or_default();
                subgraph.add_value(name, ty)
            });
            inputs.push(id);
        }
        subgraph.inputs = inputs;
    }
}

fn label(node: &NodeProto) -> String {
    if node.name.is_empty() {
        let output = node.output.iter().find(|name| !name.is_empty()).map_or("nothing", String::as_str);
        format!("{} -> {output:?}", node.op_type)
    } else {
        format!("node {:?} ({})", node.name, node.op_type)
    }
}

fn define(graph: &mut Graph, name: &str, ty: ValueType, maker: &str) -> Result<ValueId, GraphError> {
    if graph.find(name).is_some() {
        return Err(GraphError::DuplicateValue { value: name.to_owned(), second: maker.to_owned() });
    }
    Ok(graph.add_value(name, ty))
}

/// Adds the nodes that use a value to an error about its type.
fn with_users(mut error: GraphError, graph: &GraphProto) -> GraphError {
    if let GraphError::UnsupportedType { value, users, .. } = &mut error {
        let users_of_value = graph.node.iter().filter(|node| node.input.contains(value));
        users.extend(users_of_value.map(label));
    }
    error
}

/// Returns the name of an unsupported element type.
fn type_name(code: i32) -> String {
    DType::unsupported_name(code).map_or_else(|| format!("number {code}"), str::to_owned)
}

/// Returns the declared type and shape of a tensor, for a message.
fn declared_type(info: &ValueInfoProto, code: i32) -> String {
    let name = type_name(code);
    let Some(type_proto::Value::TensorType(tensor)) = info.r#type.as_ref().and_then(|ty| ty.value.as_ref())
    else {
        return name;
    };
    let Some(shape) = &tensor.shape else { return name };
    let sizes: Vec<String> = shape
        .dim
        .iter()
        .map(|dim| match &dim.value {
            Some(dimension::Value::DimValue(size)) => size.to_string(),
            Some(dimension::Value::DimParam(symbol)) => symbol.clone(),
            None => "?".into(),
        })
        .collect();
    format!("{name}[{}]", sizes.join(", "))
}

/// Returns the declared type of a value; `Unknown` without a declaration.
///
/// # Errors
/// Fails if the type is not supported.
pub fn declared_value_type(info: &ValueInfoProto) -> Result<ValueType, GraphError> {
    let Some(ty) = &info.r#type else { return Ok(ValueType::Unknown) };
    let unsupported = |actual: &str| GraphError::UnsupportedType {
        value: info.name.clone(),
        found: actual.to_owned(),
        users: Vec::new(),
    };
    let tensor_dtype =
        |code: i32| DType::from_onnx(code).ok_or_else(|| unsupported(&declared_type(info, code)));
    match &ty.value {
        None => Ok(ValueType::Unknown),
        Some(type_proto::Value::TensorType(tensor)) => {
            if tensor.elem_type == 0 {
                return Ok(ValueType::Unknown);
            }
            let dtype = tensor_dtype(tensor.elem_type)?;
            let Some(shape) = &tensor.shape else { return Ok(ValueType::Tensor(dtype, None)) };
            // Exporters write -1, or a name like "?", for an open axis. Two open axes may have different sizes.
            let known = |dim: &dimension::Value| match dim {
                dimension::Value::DimValue(size) => usize::try_from(*size).ok().map(Dim::Known),
                dimension::Value::DimParam(name) => {
                    name.contains(char::is_alphabetic).then(|| Dim::symbol(name))
                }
            };
            let open = |axis: usize| Dim::symbol(&format!("{}.{axis}", info.name));
            let dims = shape.dim.iter().enumerate();
            let dims =
                dims.map(|(axis, dim)| dim.value.as_ref().and_then(known).unwrap_or_else(|| open(axis)));
            Ok(ValueType::Tensor(dtype, Some(dims.collect())))
        }
        Some(type_proto::Value::SequenceType(sequence)) => match sequence.elem_type.as_deref() {
            Some(TypeProto { value: Some(type_proto::Value::TensorType(tensor)), .. }) => {
                Ok(ValueType::Sequence(tensor_dtype(tensor.elem_type)?))
            }
            _ => Err(unsupported("sequence of something other than tensors")),
        },
        Some(type_proto::Value::MapType(_)) => Err(unsupported("map")),
        Some(type_proto::Value::OptionalType(_)) => Err(unsupported("optional")),
        Some(type_proto::Value::SparseTensorType(_)) => Err(unsupported("sparse tensor")),
        Some(type_proto::Value::OpaqueType(_)) => Err(unsupported("opaque")),
    }
}

fn attr(
    model: &LoadedModel,
    node: &NodeProto,
    attribute: &AttributeProto,
    visible: &Outer,
) -> Result<Attr, GraphError> {
    let unsupported = |kind: &str| GraphError::UnsupportedAttribute {
        node: label(node),
        attribute: attribute.name.clone(),
        kind: kind.to_owned(),
    };
    let text = |bytes: &[u8]| {
        String::from_utf8(bytes.to_vec()).map_err(|_| unsupported("a string that is not UTF-8"))
    };
    if !attribute.ref_attr_name.is_empty() {
        return Err(unsupported("a reference to an attribute of a function"));
    }
    Ok(match attribute.r#type() {
        AttributeType::Float => Attr::Float(attribute.f),
        AttributeType::Int => Attr::Int(attribute.i),
        AttributeType::String => Attr::String(text(&attribute.s)?),
        AttributeType::Tensor => {
            let tensor = attribute.t.as_ref().ok_or_else(|| unsupported("a missing tensor"))?;
            Attr::Tensor(Graph::tensor_from_proto(model, tensor)?)
        }
        AttributeType::Graph => {
            let graph = attribute.g.as_ref().ok_or_else(|| unsupported("a missing graph"))?;
            Attr::Graph(Box::new(import(model, graph, visible)?))
        }
        AttributeType::Floats => Attr::Floats(attribute.floats.clone()),
        AttributeType::Ints => Attr::Ints(attribute.ints.clone()),
        AttributeType::Strings => {
            Attr::Strings(attribute.strings.iter().map(|bytes| text(bytes)).collect::<Result<_, _>>()?)
        }
        other => return Err(unsupported(other.as_str_name())),
    })
}

/// Sorts the nodes topologically. Of all nodes that are ready, the first one in the old order comes next.
fn sort(graph: &mut Graph) -> Result<(), GraphError> {
    let producers = graph.producers();
    let mut waiting: Vec<usize> = Vec::with_capacity(graph.nodes.len());
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); graph.nodes.len()];
    for (index, node) in graph.nodes.iter().enumerate() {
        let sources: FxHashSet<usize> =
            node.present_inputs().filter_map(|input| producers[input.0 as usize]).collect();
        waiting.push(sources.len());
        for source in sources {
            users[source].push(index);
        }
    }
    let mut ready: std::collections::BTreeSet<usize> =
        waiting.iter().enumerate().filter(|&(_, &count)| count == 0).map(|(index, _)| index).collect();
    let mut order = Vec::with_capacity(graph.nodes.len());
    while let Some(index) = ready.pop_first() {
        order.push(index);
        for &user in &users[index] {
            waiting[user] -= 1;
            if waiting[user] == 0 {
                ready.insert(user);
            }
        }
    }
    if order.len() < graph.nodes.len() {
        let stuck = (0..graph.nodes.len()).filter(|&index| waiting[index] > 0);
        let nodes = stuck.map(|index| graph.node_label(&graph.nodes[index])).collect();
        return Err(GraphError::Cycle { nodes });
    }
    let mut nodes: Vec<Option<Node>> = std::mem::take(&mut graph.nodes).into_iter().map(Some).collect();
    graph.nodes = order.into_iter().map(|index| nodes[index].take().expect("each index once")).collect();
    Ok(())
}
