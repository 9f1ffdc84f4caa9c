//! Export of graphs to ONNX messages.

use ortrain_onnx::AttributeType;
use ortrain_onnx::proto::{
    AttributeProto, GraphProto, NodeProto, TensorProto, TensorShapeProto, TypeProto, ValueInfoProto,
    tensor_shape_proto, tensor_shape_proto::dimension, type_proto,
};

use crate::{Attr, DType, Dim, Graph, Node, Shape, Tensor, ValueId, ValueType};

impl Graph {
    /// Returns the ONNX message of this graph. Constants become initializers, and subgraphs refer to captured values by
    /// their outer names.
    #[must_use]
    pub fn to_proto(&self) -> GraphProto {
        self.to_proto_without(0)
    }

    fn to_proto_without(&self, captures: usize) -> GraphProto {
        let used: std::collections::BTreeSet<ValueId> = self
            .nodes
            .iter()
            .flat_map(|node| node.inputs.iter().copied().flatten())
            .chain(self.outputs.iter().copied())
            .collect();
        let results = self.nodes.iter().flat_map(|node| node.outputs.iter().copied().flatten());
        GraphProto {
            name: self.name.clone(),
            node: self.nodes.iter().map(|node| self.node_to_proto(node)).collect(),
            initializer: used
                .iter()
                .filter_map(|&id| {
                    self.value(id).constant.as_ref().map(|tensor| tensor_to_proto(self.name_of(id), tensor))
                })
                .collect(),
            input: self.inputs[..self.inputs.len() - captures]
                .iter()
                .map(|&id| self.value_info(id))
                .collect(),
            output: self.outputs.iter().map(|&id| self.value_info(id)).collect(),
            value_info: results
                .filter(|id| !self.outputs.contains(id) && self.value(*id).ty.dtype().is_some())
                .map(|id| self.value_info(id))
                .collect(),
            ..GraphProto::default()
        }
    }

    fn node_to_proto(&self, node: &Node) -> NodeProto {
        let formal_inputs = node.inputs.len() - node.captures;
        let name = |port: &Option<ValueId>| port.map_or(String::new(), |id| self.name_of(id).to_owned());
        let captured: Vec<&str> =
            node.inputs[formal_inputs..].iter().flatten().map(|&id| self.name_of(id)).collect();
        NodeProto {
            name: node.name.to_string(),
            domain: node.domain.to_string(),
            op_type: node.op.to_string(),
            input: node.inputs[..formal_inputs].iter().map(name).collect(),
            output: node.outputs.iter().map(name).collect(),
            attribute: node
                .attrs
                .0
                .iter()
                .map(|(name, value)| attr_to_proto(name, value, &captured))
                .collect(),
            ..NodeProto::default()
        }
    }

    /// Returns the declaration of a value.
    #[must_use]
    pub fn value_info(&self, id: ValueId) -> ValueInfoProto {
        let value = self.value(id);
        let tensor = |dtype: DType, shape: Option<&Shape>| {
            type_proto::Value::TensorType(type_proto::Tensor {
                elem_type: dtype.to_onnx(),
                shape: shape.map(shape_to_proto),
            })
        };
        let ty = match &value.ty {
            ValueType::Unknown => None,
            ValueType::Tensor(dtype, shape) => Some(tensor(*dtype, shape.as_ref())),
            ValueType::Sequence(dtype) => {
                let element = TypeProto { value: Some(tensor(*dtype, None)), ..TypeProto::default() };
                Some(type_proto::Value::SequenceType(Box::new(type_proto::Sequence {
                    elem_type: Some(Box::new(element)),
                })))
            }
        };
        ValueInfoProto {
            name: value.name.to_string(),
            r#type: ty.map(|value| TypeProto { value: Some(value), ..TypeProto::default() }),
            ..ValueInfoProto::default()
        }
    }
}

fn shape_to_proto(shape: &Shape) -> TensorShapeProto {
    let dim = |dim: &Dim| tensor_shape_proto::Dimension {
        value: Some(match dim {
            Dim::Known(size) => dimension::Value::DimValue(*size as i64),
            Dim::Symbol(name) => dimension::Value::DimParam(name.to_string()),
        }),
        ..tensor_shape_proto::Dimension::default()
    };
    TensorShapeProto { dim: shape.iter().map(dim).collect() }
}

/// Returns the ONNX message of a tensor.
#[must_use]
pub fn tensor_to_proto(name: &str, tensor: &Tensor) -> TensorProto {
    TensorProto {
        name: name.to_owned(),
        dims: tensor.dims().iter().map(|&dim| dim as i64).collect(),
        data_type: tensor.dtype().to_onnx(),
        raw_data: tensor.packed_data(),
        ..TensorProto::default()
    }
}

fn attr_to_proto(name: &str, value: &Attr, captured: &[&str]) -> AttributeProto {
    let mut proto = AttributeProto { name: name.to_owned(), ..AttributeProto::default() };
    let kind = match value {
        Attr::Float(v) => {
            proto.f = *v;
            AttributeType::Float
        }
        Attr::Int(v) => {
            proto.i = *v;
            AttributeType::Int
        }
        Attr::String(v) => {
            proto.s = v.clone().into_bytes().into();
            AttributeType::String
        }
        Attr::Tensor(v) => {
            proto.t = Some(Box::new(tensor_to_proto("", v)));
            AttributeType::Tensor
        }
        Attr::Graph(graph) => {
            // Captured values get their outer names. A value of the branch with this name is renamed.
            let mut graph = graph.as_ref().clone();
            let first = graph.inputs.len() - captured.len();
            for (k, outer) in captured.iter().enumerate() {
                let inner = graph.inputs[first + k];
                match graph.find(outer) {
                    Some(other) if other != inner => graph.swap_names(other, inner),
                    _ => graph.rename(inner, outer),
                }
            }
            proto.g = Some(Box::new(graph.to_proto_without(captured.len())));
            AttributeType::Graph
        }
        Attr::Floats(v) => {
            proto.floats.clone_from(v);
            AttributeType::Floats
        }
        Attr::Ints(v) => {
            proto.ints.clone_from(v);
            AttributeType::Ints
        }
        Attr::Strings(v) => {
            proto.strings = v.iter().map(|text| text.clone().into_bytes().into()).collect();
            AttributeType::Strings
        }
    };
    proto.set_type(kind);
    proto
}
