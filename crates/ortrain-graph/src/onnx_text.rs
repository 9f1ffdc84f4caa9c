//! ONNX messages as text, in the text syntax of ONNX.

use std::fmt::Write as _;

use ortrain_onnx::proto::{
    AttributeProto, FunctionProto, GraphProto, NodeProto, OperatorSetIdProto, TensorProto, TypeProto,
    ValueInfoProto, tensor_shape_proto::dimension, type_proto,
};
use ortrain_onnx::{AttributeType, LoadedModel};

use crate::{DType, Graph, Tensor};

/// Maximum number of elements of a tensor that is printed with its values.
const MAX_VALUES: usize = 16;
const INDENT: &str = "  ";

/// Prints a model as it was read, in the text syntax of ONNX. Tensors of more than 16 elements are printed without their
/// values, and the types of intermediate values are omitted.
#[must_use]
pub fn onnx_text(model: &LoadedModel) -> String {
    let mut printer = Printer { model, text: String::new() };
    let proto = &model.proto;
    let mut header = vec![format!("ir_version: {}", proto.ir_version), opset_imports(&proto.opset_import)];
    if !proto.producer_name.is_empty() {
        header.push(format!("producer_name: {:?}", proto.producer_name));
    }
    printer.line("", &format!("<{}>", header.join(", ")));
    if let Some(graph) = &proto.graph {
        let text = printer.graph(graph, "");
        printer.line("", &text);
    }
    for function in &proto.functions {
        printer.function(function);
    }
    printer.text
}

/// Returns the imported opsets.
fn opset_imports(opsets: &[OperatorSetIdProto]) -> String {
    let each = opsets.iter().map(|opset| format!("{:?} : {}", opset.domain, opset.version));
    format!("opset_import: [{}]", each.collect::<Vec<_>>().join(", "))
}

/// Returns a name, in quotes unless it is an identifier.
fn quoted(name: &str) -> String {
    let is_identifier = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        && name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    if is_identifier || name.is_empty() { name.to_owned() } else { format!("{name:?}") }
}

/// Returns names, separated by commas.
fn names(list: &[String]) -> String {
    list.iter().map(|name| quoted(name)).collect::<Vec<_>>().join(", ")
}

/// Returns ONNX's name of an element type.
fn element_name(code: i32) -> &'static str {
    match DType::from_onnx(code) {
        Some(DType::F32) => "float",
        Some(DType::F64) => "double",
        Some(DType::Small(small)) => small.onnx_name(),
        Some(dtype) => dtype.name(),
        None => DType::unsupported_name(code).unwrap_or("undefined"),
    }
}

/// Returns an element type with fixed sizes.
fn tensor_type(code: i32, dims: &[i64]) -> String {
    let dims: Vec<String> = dims.iter().map(ToString::to_string).collect();
    let shape = if dims.is_empty() { String::new() } else { format!("[{}]", dims.join(", ")) };
    format!("{}{shape}", element_name(code))
}

/// Returns the type of a value.
fn value_type(proto: Option<&TypeProto>) -> String {
    let inner = |proto: &Option<Box<TypeProto>>| value_type(proto.as_deref());
    match proto.and_then(|proto| proto.value.as_ref()) {
        Some(type_proto::Value::TensorType(tensor)) => {
            let Some(shape) = &tensor.shape else { return format!("{}[]", element_name(tensor.elem_type)) };
            let dims = shape.dim.iter().map(|dim| match &dim.value {
                Some(dimension::Value::DimValue(size)) => size.to_string(),
                Some(dimension::Value::DimParam(name)) => name.clone(),
                None => "?".to_owned(),
            });
            let dims: Vec<String> = dims.collect();
            let dims = if dims.is_empty() { String::new() } else { format!("[{}]", dims.join(", ")) };
            format!("{}{dims}", element_name(tensor.elem_type))
        }
        Some(type_proto::Value::SparseTensorType(tensor)) => {
            format!("sparse_tensor({})", element_name(tensor.elem_type))
        }
        Some(type_proto::Value::SequenceType(sequence)) => format!("seq({})", inner(&sequence.elem_type)),
        Some(type_proto::Value::OptionalType(optional)) => {
            format!("optional({})", inner(&optional.elem_type))
        }
        Some(type_proto::Value::MapType(map)) => {
            format!("map({}, {})", element_name(map.key_type), inner(&map.value_type))
        }
        Some(type_proto::Value::OpaqueType(_)) | None => "undefined".to_owned(),
    }
}

/// Returns values with their types, separated by commas.
fn typed(values: &[ValueInfoProto]) -> String {
    let each =
        values.iter().map(|value| format!("{} {}", value_type(value.r#type.as_ref()), quoted(&value.name)));
    each.collect::<Vec<_>>().join(", ")
}

/// Returns the elements of a tensor, separated by commas.
fn elements(tensor: &Tensor) -> String {
    fn join<T>(list: &[T], print: impl Fn(&T) -> String) -> String {
        list.iter().map(print).collect::<Vec<_>>().join(", ")
    }
    match (tensor.dtype(), tensor.to_i64()) {
        (DType::F32, _) => join(&tensor.to_vec::<f32>(), |value| format!("{value:?}")),
        (DType::F64 | DType::F16 | DType::BF16, _) | (_, None) => {
            join(&tensor.to_f64(), |value| format!("{value:?}"))
        }
        (_, Some(values)) => join(&values, ToString::to_string),
    }
}

struct Printer<'a> {
    model: &'a LoadedModel,
    text: String,
}

impl Printer<'_> {
    fn line(&mut self, indent: &str, text: &str) {
        let _ = writeln!(self.text, "{indent}{text}");
    }

    /// Prints the signature, the initializers and the nodes of a graph.
    fn graph(&self, graph: &GraphProto, indent: &str) -> String {
        let mut text =
            format!("{} ({}) => ({})", quoted(&graph.name), typed(&graph.input), typed(&graph.output));
        if !graph.initializer.is_empty() {
            let each = graph.initializer.iter().map(|tensor| {
                let values = self.values(tensor).map_or_else(String::new, |values| format!(" = {values}"));
                let of_type = tensor_type(tensor.data_type, &tensor.dims);
                format!("\n{indent}{INDENT}{of_type} {}{values}", quoted(&tensor.name))
            });
            let each: Vec<String> = each.collect();
            let _ = write!(text, "\n{indent}<{}\n{indent}>", each.join(","));
        }
        let _ = write!(text, "\n{indent}{}", self.body(&graph.node, indent));
        text
    }

    /// Prints nodes in braces.
    fn body(&self, nodes: &[NodeProto], indent: &str) -> String {
        let inner = format!("{indent}{INDENT}");
        let mut text = String::from("{\n");
        for node in nodes {
            let _ = writeln!(text, "{inner}{}", self.node(node, &inner));
        }
        text + indent + "}"
    }

    fn node(&self, node: &NodeProto, indent: &str) -> String {
        let name = if node.name.is_empty() { String::new() } else { format!("[{}] ", quoted(&node.name)) };
        let domain = if node.domain.is_empty() { String::new() } else { format!("{}.", node.domain) };
        let overload = if node.overload.is_empty() { String::new() } else { format!(":{}", node.overload) };
        let attributes: Vec<String> =
            node.attribute.iter().map(|attribute| self.attribute(attribute, indent)).collect();
        let attributes =
            if attributes.is_empty() { String::new() } else { format!(" <{}>", attributes.join(", ")) };
        format!(
            "{name}{} = {domain}{}{overload}{attributes} ({})",
            names(&node.output),
            node.op_type,
            names(&node.input)
        )
    }

    fn attribute(&self, attribute: &AttributeProto, indent: &str) -> String {
        fn list<T>(items: &[T], print: impl Fn(&T) -> String) -> String {
            format!("[{}]", items.iter().map(print).collect::<Vec<_>>().join(", "))
        }
        let text = |bytes: &bytes::Bytes| format!("{:?}", String::from_utf8_lossy(bytes));
        let graph = |graph: &GraphProto| self.graph(graph, &format!("{indent}{INDENT}"));
        let kind = AttributeType::try_from(attribute.r#type).unwrap_or(AttributeType::Undefined);
        let value = match kind {
            _ if !attribute.ref_attr_name.is_empty() => format!("@{}", attribute.ref_attr_name),
            AttributeType::Float => format!("{:?}", attribute.f),
            AttributeType::Int => attribute.i.to_string(),
            AttributeType::String => text(&attribute.s),
            AttributeType::Tensor => {
                attribute.t.as_deref().map_or_else(String::new, |tensor| self.tensor(tensor))
            }
            AttributeType::Graph => attribute.g.as_deref().map_or_else(String::new, graph),
            AttributeType::TypeProto => value_type(attribute.tp.as_deref()),
            AttributeType::Floats => list(&attribute.floats, |value| format!("{value:?}")),
            AttributeType::Ints => list(&attribute.ints, ToString::to_string),
            AttributeType::Strings => list(&attribute.strings, text),
            AttributeType::Tensors => list(&attribute.tensors, |tensor| self.tensor(tensor)),
            AttributeType::Graphs => list(&attribute.graphs, graph),
            AttributeType::TypeProtos => list(&attribute.type_protos, |proto| value_type(Some(proto))),
            AttributeType::Undefined | AttributeType::SparseTensor | AttributeType::SparseTensors => {
                "...".to_owned()
            }
        };
        let kind = kind.as_str_name().to_lowercase();
        format!("{}: {kind} = {value}", quoted(&attribute.name))
    }

    /// Prints a tensor of an attribute, with its values if it is short.
    fn tensor(&self, tensor: &TensorProto) -> String {
        let of_type = tensor_type(tensor.data_type, &tensor.dims);
        let values = self.values(tensor).unwrap_or_else(|| "{...}".to_owned());
        format!("{of_type} {values}")
    }

    /// Prints the values of a short tensor of numbers.
    fn values(&self, tensor: &TensorProto) -> Option<String> {
        let count = tensor.dims.iter().try_fold(1i64, |count, &dim| count.checked_mul(dim))?;
        if usize::try_from(count).ok()? > MAX_VALUES {
            return None;
        }
        let tensor = Graph::tensor_from_proto(self.model, tensor).ok()?;
        Some(format!("{{{}}}", elements(&tensor)))
    }

    /// Prints a function of the model.
    fn function(&mut self, function: &FunctionProto) {
        let domain = format!("domain: {:?}", function.domain);
        self.line("", &format!("<{domain}, {}>", opset_imports(&function.opset_import)));
        let required = function.attribute.iter().map(|name| quoted(name));
        let defaults = function.attribute_proto.iter().map(|attribute| self.attribute(attribute, ""));
        let attributes: Vec<String> = required.chain(defaults).collect();
        let attributes =
            if attributes.is_empty() { String::new() } else { format!(" <{}>", attributes.join(", ")) };
        let (inputs, outputs) = (names(&function.input), names(&function.output));
        let body = self.body(&function.node, "");
        self.line("", &format!("{}{attributes} ({inputs}) => ({outputs})\n{body}", quoted(&function.name)));
    }
}

#[cfg(test)]
mod tests {
    use ortrain_onnx::proto::type_proto;
    use ortrain_onnx::{ExternalData, ModelProto, encode};

    use super::*;
    use crate::tensor_to_proto;

    #[test]
    fn model_is_printed_in_the_syntax_of_onnx() {
        let value = |name: &str| {
            let shape = Some(Default::default());
            let tensor = type_proto::Tensor { elem_type: 1, shape };
            let value = Some(type_proto::Value::TensorType(tensor));
            ValueInfoProto {
                name: name.into(),
                r#type: Some(TypeProto { value, ..TypeProto::default() }),
                ..ValueInfoProto::default()
            }
        };
        let axis = AttributeProto { name: "axis".into(), r#type: 2, i: 1, ..AttributeProto::default() };
        let node = NodeProto {
            name: "joined/1".into(),
            op_type: "Concat".into(),
            input: vec!["x".into(), "b.0".into()],
            output: vec!["y".into()],
            attribute: vec![axis],
            ..NodeProto::default()
        };
        let short = tensor_to_proto("b.0", &Tensor::f32(&[2], &[0.1, 2.0]));
        let long = tensor_to_proto("w", &Tensor::f32(&[17], &[0.0; 17]));
        let graph = GraphProto {
            name: "net".into(),
            node: vec![node],
            initializer: vec![short, long],
            input: vec![value("x")],
            output: vec![value("y")],
            ..GraphProto::default()
        };
        let opset = OperatorSetIdProto { domain: String::new(), version: 17 };
        let proto = ModelProto {
            ir_version: 8,
            opset_import: vec![opset],
            graph: Some(graph),
            ..ModelProto::default()
        };
        let bytes = encode(&proto).expect("it fits in memory");
        let model = LoadedModel::from_bytes(bytes, ExternalData::none()).expect("it is a model");
        let expected = [
            "<ir_version: 8, opset_import: [\"\" : 17]>",
            "net (float x) => (float y)",
            "<",
            "  float[2] \"b.0\" = {0.1, 2.0},",
            "  float[17] w",
            ">",
            "{",
            "  [\"joined/1\"] y = Concat <axis: int = 1> (x, \"b.0\")",
            "}",
            "",
        ];
        assert_eq!(onnx_text(&model), expected.join("\n"));
    }
}
