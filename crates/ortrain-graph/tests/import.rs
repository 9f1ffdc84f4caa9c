//! Inconsistent models are refused with a message. Other models survive an import and an export.

use ortrain_graph::{Attr, Graph};
use ortrain_onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto,
    TypeProto, ValueInfoProto, tensor_shape_proto, type_proto,
};
use ortrain_onnx::{AttributeType, ExternalData, LoadedModel};

fn info(name: &str) -> ValueInfoProto {
    let tensor = type_proto::Tensor { elem_type: 1, shape: None };
    ValueInfoProto {
        name: name.into(),
        r#type: Some(TypeProto {
            value: Some(type_proto::Value::TensorType(tensor)),
            ..TypeProto::default()
        }),
        ..ValueInfoProto::default()
    }
}

fn node(name: &str, op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto {
        name: name.into(),
        op_type: op.into(),
        input: inputs.iter().map(ToString::to_string).collect(),
        output: outputs.iter().map(ToString::to_string).collect(),
        ..NodeProto::default()
    }
}

fn model(nodes: Vec<NodeProto>, inputs: &[&str], outputs: &[&str]) -> ModelProto {
    ModelProto {
        ir_version: 8,
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: 17 }],
        graph: Some(GraphProto {
            name: "g".into(),
            node: nodes,
            input: inputs.iter().map(|name| info(name)).collect(),
            output: outputs.iter().map(|name| info(name)).collect(),
            ..GraphProto::default()
        }),
        ..ModelProto::default()
    }
}

fn import(proto: ModelProto) -> Result<Graph, String> {
    let loaded = LoadedModel::from_proto(proto, ExternalData::none());
    Graph::from_model(&loaded).map_err(|error| error.to_string())
}

#[test]
fn a_cycle_is_named() {
    let nodes = vec![node("a", "Add", &["x", "q"], &["p"]), node("b", "Neg", &["p"], &["q"])];
    let message = import(model(nodes, &["x"], &["q"])).unwrap_err();
    assert_eq!(message, "the graph has a cycle through node \"a\" (Add), node \"b\" (Neg)");
}

#[test]
fn duplicate_value_is_named() {
    let nodes = vec![node("a", "Neg", &["x"], &["y"]), node("b", "Abs", &["x"], &["y"])];
    let message = import(model(nodes, &["x"], &["y"])).unwrap_err();
    assert_eq!(message, "\"y\" is defined twice, the second time by node \"b\" (Abs)");
}

/// The check covers two graphs, too, and graphs with different numbers of inputs.
#[test]
fn duplicate_attribute_is_named() {
    let body = |inputs: &[&str]| AttributeProto {
        name: "body".into(),
        r#type: AttributeType::Graph as i32,
        g: model(vec![node("b", "Neg", &["s"], &["t"])], inputs, &["t"]).graph.map(Box::new),
        ..AttributeProto::default()
    };
    for bodies in [[body(&["s"]), body(&[])], [body(&[]), body(&["s"])], [body(&["s"]), body(&["s"])]] {
        let mut scan = node("a", "Scan", &["s"], &["y"]);
        scan.attribute = bodies.to_vec();
        let message = import(model(vec![scan], &["s"], &["y"])).unwrap_err();
        assert_eq!(
            message,
            "attribute \"body\" of node \"a\" (Scan) occurs twice; a node can have each attribute only once"
        );
    }
}

#[test]
fn an_undefined_value_is_named() {
    let message = import(model(vec![node("", "Neg", &["z"], &["y"])], &["x"], &["y"])).unwrap_err();
    let expected =
        "Neg -> \"y\" uses \"z\", which is not an input, an initializer or an output of another node";
    assert_eq!(message, expected);
    let message = import(model(Vec::new(), &["x"], &["y"])).unwrap_err();
    let expected = "the list of the graph's outputs uses \"y\", which is not an input, an initializer or an output \
                    of another node";
    assert_eq!(message, expected);
}

#[test]
fn missing_graph_is_reported() {
    assert_eq!(import(ModelProto::default()).unwrap_err(), "the model has no graph");
}

#[test]
fn two_versions_of_one_set_are_refused() {
    let mut proto = model(vec![node("a", "Neg", &["x"], &["y"])], &["x"], &["y"]);
    proto.opset_import.push(OperatorSetIdProto { domain: "ai.onnx".into(), version: 9 });
    assert_eq!(import(proto).unwrap_err(), "the model imports operator set \"ai.onnx\" in versions 17 and 9");
}

#[test]
fn negative_sizes_are_refused() {
    let mut proto = model(vec![node("a", "Neg", &["x"], &["y"])], &["x"], &["y"]);
    let tensor = TensorProto { name: "w".into(), dims: vec![-3], data_type: 1, ..TensorProto::default() };
    proto.graph.as_mut().unwrap().initializer.push(tensor);
    let message = import(proto).unwrap_err();
    assert!(message.contains("`w`") && message.contains("-3"), "{message}");
}

#[test]
fn nodes_are_sorted() {
    let nodes = vec![node("second", "Neg", &["p"], &["y"]), node("first", "Abs", &["x"], &["p"])];
    let graph = import(model(nodes, &["x"], &["y"])).unwrap();
    let names: Vec<&str> = graph.nodes.iter().map(|node| &*node.name).collect();
    assert_eq!(names, ["first", "second"]);
}

#[test]
fn initializers_listed_as_inputs_are_constants() {
    let mut proto = model(vec![node("a", "Add", &["x", "w"], &["y"])], &["x", "w"], &["y"]);
    let tensor = TensorProto {
        name: "w".into(),
        dims: vec![1],
        data_type: 1,
        float_data: vec![2.0],
        ..TensorProto::default()
    };
    proto.graph.as_mut().unwrap().initializer.push(tensor);
    let graph = import(proto).unwrap();
    assert_eq!(graph.inputs.len(), 1);
    let weight = graph.value(graph.find("w").unwrap());
    assert_eq!(weight.constant.as_ref().map(ortrain_graph::Tensor::to_f64), Some(vec![2.0]));
}

/// Outer values that branches use become inputs of the node. The export restores their outer names.
#[test]
fn captured_values_become_inputs() {
    let branch = |op: &str, uses: &[&str]| GraphProto {
        name: op.into(),
        node: vec![node("", op, uses, &["r"])],
        output: vec![info("r")],
        ..GraphProto::default()
    };
    let attribute = |name: &str, graph: GraphProto| {
        let mut attribute =
            AttributeProto { name: name.into(), g: Some(Box::new(graph)), ..AttributeProto::default() };
        attribute.set_type(AttributeType::Graph);
        attribute
    };
    let mut chosen = node("if", "If", &["c"], &["y"]);
    chosen.attribute = vec![
        attribute("then_branch", branch("Neg", &["a"])),
        attribute("else_branch", branch("Add", &["b", "a"])),
    ];
    let proto = model(vec![chosen], &["c", "a", "b"], &["y"]);
    let graph = import(proto).unwrap();
    let node = &graph.nodes[0];
    assert_eq!(node.captures, 2);
    for name in ["then_branch", "else_branch"] {
        let Some(Attr::Graph(branch)) = node.attrs.0.get(name) else { panic!("{name} is a graph") };
        let outer: Vec<&str> = node.inputs[1..].iter().flatten().map(|&id| graph.name_of(id)).collect();
        let inner: Vec<&str> = branch.inputs.iter().map(|&id| branch.name_of(id)).collect();
        assert_eq!(inner, outer);
    }
    let written = graph.to_proto();
    assert_eq!(written.node[0].input, ["c"]);
    let second = ModelProto { graph: Some(written), ..model(Vec::new(), &[], &[]) };
    assert_eq!(import(second).unwrap().to_string(), graph.to_string());
}

#[test]
fn axes_of_no_size_are_open() {
    let size = |value: tensor_shape_proto::dimension::Value| tensor_shape_proto::Dimension {
        value: Some(value),
        ..tensor_shape_proto::Dimension::default()
    };
    let mut x = info("x");
    let mut ty = x.r#type.take().unwrap_or_default();
    let dims = [
        size(tensor_shape_proto::dimension::Value::DimValue(-1)),
        size(tensor_shape_proto::dimension::Value::DimValue(-7)),
        size(tensor_shape_proto::dimension::Value::DimParam("?".into())),
        size(tensor_shape_proto::dimension::Value::DimParam("?".into())),
        size(tensor_shape_proto::dimension::Value::DimParam(String::new())),
        tensor_shape_proto::Dimension::default(),
        size(tensor_shape_proto::dimension::Value::DimValue(0)),
        size(tensor_shape_proto::dimension::Value::DimParam("batch".into())),
    ];
    ty.value = Some(type_proto::Value::TensorType(type_proto::Tensor {
        elem_type: 1,
        shape: Some(TensorShapeProto { dim: dims.to_vec() }),
    }));
    x.r#type = Some(ty);
    let mut proto = model(vec![node("a", "Relu", &["x"], &["y"])], &["x"], &["y"]);
    proto.graph.as_mut().unwrap().input = vec![x];
    let graph = import(proto).unwrap();
    let shape = graph.value(graph.inputs[0]).ty.shape().unwrap().to_string();
    // Each open axis has its own symbol.
    assert_eq!(shape, "[x.0, x.1, x.2, x.3, x.4, x.5, 0, batch]");
}
