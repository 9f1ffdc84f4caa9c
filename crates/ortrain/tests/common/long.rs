//! Networks with many nodes.
#![allow(dead_code, clippy::unwrap_used)]

use ortrain::artifacts::{ArtifactOptions, Artifacts, Loss, OptimizerKind, generate};
use ortrain::{Bytes, CheckpointState, DType, ModelSource, Module, ModuleOptions, Tensor, collect};
use ortrain_onnx::proto::{
    GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto, TypeProto,
    ValueInfoProto,
    tensor_shape_proto::{Dimension, dimension::Value},
    type_proto,
};

use super::common::run_input;

/// Kinds of [`model`].
pub(crate) const KINDS: [&str; 7] = ["maps", "relu", "product", "layers", "residual", "fan", "shapes"];

/// Builder of networks.
#[derive(Default)]
struct Long {
    graph: GraphProto,
}

impl Long {
    fn node(&mut self, op: &str, inputs: &[&str]) -> String {
        let output = format!("v{}", self.graph.node.len());
        self.graph.node.push(NodeProto {
            op_type: op.into(),
            input: inputs.iter().map(|&input| input.to_owned()).collect(),
            output: vec![output.clone()],
            ..NodeProto::default()
        });
        output
    }

    fn weight(&mut self, dims: &[usize], value: impl Fn(usize) -> f32) -> String {
        let name = format!("w{:06}", self.graph.initializer.len());
        let values: Vec<f32> = (0..dims.iter().product()).map(value).collect();
        self.graph.initializer.push(TensorProto {
            name: name.clone(),
            data_type: DType::F32.to_onnx(),
            dims: dims.iter().map(|&dim| dim as i64).collect(),
            raw_data: Bytes::from(bytemuck::cast_slice::<f32, u8>(&values).to_vec()),
            ..TensorProto::default()
        });
        name
    }
}

fn rows(name: &str, width: usize) -> ValueInfoProto {
    let dim = |value| Dimension { value: Some(value), ..Dimension::default() };
    let dims = vec![dim(Value::DimParam("n".into())), dim(Value::DimValue(width as i64))];
    let tensor =
        type_proto::Tensor { elem_type: DType::F32.to_onnx(), shape: Some(TensorShapeProto { dim: dims }) };
    let value = Some(type_proto::Value::TensorType(tensor));
    let r#type = Some(TypeProto { value, ..TypeProto::default() });
    ValueInfoProto { name: name.into(), r#type, ..ValueInfoProto::default() }
}

/// Builds a network with about `nodes` nodes. Values have rows of `width` elements:
///
/// - `maps`: a chain of element-wise functions; `relu`: of a cheap function;
/// - `product`: a chain of products with one matrix; `layers`: a perceptron with separate parameters per
///   layer;
/// - `residual`: sums with earlier values; `fan`: one value with many consumers, added one by one;
/// - `shapes`: a chain of Reshapes to the results of Shape.
pub(crate) fn model(kind: &str, nodes: usize, width: usize) -> ModelProto {
    let mut long = Long::default();
    let scale = long.weight(&[width], |_| 1.0);
    let identity = |at: usize| if at.is_multiple_of(width + 1) { 1.0 } else { 0.0 };
    let first = long.node("Mul", &["x", &scale]);
    let mut last = first.clone();
    match kind {
        "maps" => {
            for k in 0..nodes {
                last = long.node(["Sin", "Tanh", "Neg", "Cos"][k % 4], &[&last]);
            }
        }
        "relu" => {
            for _ in 0..nodes {
                last = long.node("Relu", &[&last]);
            }
        }
        "product" => {
            let matrix = long.weight(&[width, width], identity);
            for _ in 0..nodes {
                last = long.node("MatMul", &[&last, &matrix]);
            }
        }
        "layers" => {
            for _ in 0..nodes.div_ceil(3) {
                let matrix = long.weight(&[width, width], identity);
                let bias = long.weight(&[width], |_| 0.0);
                last = long.node("MatMul", &[&last, &matrix]);
                last = long.node("Add", &[&last, &bias]);
                last = long.node("Relu", &[&last]);
            }
        }
        "residual" => {
            let mut earlier = [first.clone(), first.clone(), first.clone()];
            for k in 0..nodes {
                let next = match k % 3 {
                    0 => long.node("Tanh", &[&last]),
                    1 => long.node("Add", &[&last, &first]),
                    _ => long.node("Add", &[&last, &earlier[k / 3 % 3]]),
                };
                earlier[k % 3] = std::mem::replace(&mut last, next);
            }
        }
        "fan" => {
            let read: Vec<String> =
                (0..nodes / 2).map(|k| long.node(["Sin", "Tanh"][k % 2], &[&first])).collect();
            for value in &read {
                last = long.node("Add", &[&last, value]);
            }
        }
        "shapes" => {
            for _ in 0..nodes / 2 {
                let shape = long.node("Shape", &[&last]);
                last = long.node("Reshape", &[&last, &shape]);
            }
        }
        other => panic!("there is no kind {other:?}"),
    }
    let mut graph = long.graph;
    graph.name = kind.into();
    graph.input = vec![rows("x", width)];
    graph.output = vec![rows(&last, width)];
    ModelProto {
        ir_version: 9,
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: 17 }],
        graph: Some(graph),
        ..ModelProto::default()
    }
}

/// Generates the artifacts of a model with all parameters trained.
pub(crate) fn artifacts(model: &ModelProto) -> Artifacts {
    let trained = model.graph.as_ref().unwrap().initializer.iter().map(|tensor| tensor.name.clone());
    let options = ArtifactOptions {
        requires_grad: trained.collect(),
        losses: vec![Loss::MSELoss.into()],
        optimizer: Some(OptimizerKind::AdamW.into()),
        ..ArtifactOptions::default()
    };
    generate(ModelSource::from_proto(model).unwrap(), options).unwrap()
}

/// Creates the state and the module of artifacts.
pub(crate) fn module(artifacts: &Artifacts) -> (CheckpointState, Module) {
    let mut state = CheckpointState::from_bytes(artifacts.checkpoint_bytes().unwrap()).unwrap();
    let train = ModelSource::from_proto(&artifacts.training_model).unwrap();
    let module = Module::new(train, &mut state, None, ModuleOptions::default()).unwrap();
    (state, module)
}

/// Runs a step and returns its loss.
pub(crate) fn step(state: &mut CheckpointState, module: &mut Module, width: usize) -> f32 {
    let [x, target] = [0.5f32, 0.25].map(|value| Tensor::f32(&[2, width], &vec![value; 2 * width]));
    let inputs = [run_input(&x), run_input(&target)];
    collect(|deliver| module.train_step(state, &inputs, deliver)).unwrap()[0].to_vec::<f32>()[0]
}
