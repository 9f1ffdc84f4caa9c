//! Sessions with sequence inputs, and with a selection of outputs.
#![allow(clippy::unwrap_used)]

mod common;

use common::{numbers, recorded};
use ortrain::artifacts::{ArtifactOptions, Loss, LossTerm, generate};
use ortrain::{
    Bytes, DType, ErrorKind, InferenceSession, ModelSource, SessionOptions, Tensor, Value, encode_model,
};
use ortrain_onnx::LoadedModel;

const CASE: &str = "mlp_adamw_ce";

fn floats(values: &[f32], dims: &[usize]) -> Tensor {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Tensor::new(DType::F32, dims.to_vec(), Bytes::from(bytes)).unwrap()
}

fn session(model: ModelSource) -> InferenceSession {
    InferenceSession::new(model, SessionOptions::default()).unwrap()
}

/// Returns the inputs of the recorded optimizer model for parameters of these shapes.
fn inputs(shapes: &[&[usize]]) -> Vec<Value> {
    let sequence = |seed| {
        let draw = |dims: &&[usize]| floats(&numbers(dims.iter().product(), seed), dims);
        Value::Sequence(shapes.iter().map(draw).collect())
    };
    let step = Tensor::new(DType::I64, vec![1], Bytes::from(1_i64.to_le_bytes().to_vec())).unwrap();
    let zeros = |value: Value| match value {
        Value::Sequence(tensors) => Value::Sequence(
            tensors.iter().map(|tensor| Tensor::filled(DType::F32, tensor.dims(), 0.0)).collect(),
        ),
        tensor @ Value::Tensor(_) => tensor,
    };
    vec![
        floats(&[0.5], &[1]).into(),
        step.into(),
        sequence(1),
        sequence(2),
        zeros(sequence(3)),
        zeros(sequence(4)),
    ]
}

#[test]
fn optimizer_model_takes_sequences() {
    let mut session = session(recorded(CASE, "optimizer_model.onnx").into());
    let kinds: Vec<bool> = session.inputs().iter().map(|info| info.sequence).collect();
    assert_eq!(kinds, [false, false, true, true, true, true]);
    assert_eq!(session.inputs()[2].to_string(), "a sequence of float32 tensors");
    let done = Value::Tensor(Tensor::filled(DType::Bool, &[1], 1.0));
    for shapes in [&[&[3, 2][..], &[70]][..], &[&[5]], &[], &[&[0]]] {
        assert_eq!(session.run_values(&inputs(shapes), None).unwrap(), std::slice::from_ref(&done));
    }
    let (kind, text) = {
        let error = session.run(&[], &mut |_, _| Ok(())).unwrap_err();
        (error.kind(), error.to_string())
    };
    assert_eq!(kind, ErrorKind::InvalidArgument);
    assert_eq!(
        text,
        "\"params\" is a sequence of float32 tensors; run supports only tensors; call run_values for sequences"
    );
}

#[test]
fn reports_invalid_inputs() {
    let mut session = session(recorded(CASE, "optimizer_model.onnx").into());
    let mut sentence = |change: &dyn Fn(&mut Vec<Value>), only: Option<&[usize]>| {
        let mut inputs = inputs(&[&[3]]);
        change(&mut inputs);
        session.run_values(&inputs, only).unwrap_err().to_string()
    };
    assert_eq!(
        sentence(&|inputs| inputs.truncate(4), None),
        "expected 6 inputs (learning_rate, step, params, gradients, first_order_moments, second_order_moments), got 4"
    );
    assert_eq!(
        sentence(&|inputs| inputs[2] = floats(&[1.0], &[1]).into(), None),
        "input \"params\" must be a sequence of float32 tensors, got float32[1]: a tensor is no sequence"
    );
    assert_eq!(
        sentence(&|inputs| inputs[0] = Value::Sequence(Vec::new()), None),
        "input \"learning_rate\" must be float32[1], got a sequence of 0: a sequence is no tensor"
    );
    assert_eq!(
        sentence(&|inputs| inputs[3] = Value::Sequence(vec![Tensor::filled(DType::F64, &[3], 0.0)]), None),
        "input \"gradients\" must be a sequence of float32 tensors, got a sequence with float64[3]: the element \
         types differ"
    );
    let differ = sentence(&|inputs| inputs[3] = Value::Sequence(vec![floats(&[0.0; 100], &[100])]), None);
    assert!(differ.contains("input sequences 2 and 3 have tensors of different sizes or types"), "{differ}");
    assert_eq!(sentence(&|_| (), Some(&[0, 4])), "output index 4 is out of range: the model has 1 outputs");
}

#[test]
fn some_outputs_in_any_order() {
    let model = recorded("mlp_adamw_clip_outputs", "eval_model.onnx");
    let mut session = session(model.into());
    let inputs: Vec<Value> = session
        .inputs()
        .iter()
        .map(|info| {
            let dims: Vec<usize> = info.shape.iter().flatten().map(|dim| dim.known().unwrap_or(4)).collect();
            match info.dtype {
                DType::F32 => floats(&numbers(dims.iter().product(), 7), &dims).into(),
                dtype => Tensor::filled(dtype, &dims, 1.0).into(),
            }
        })
        .collect();
    let expected = session.run_values(&inputs, None).unwrap();
    assert!(expected.len() > 2);
    let some = session.run_values(&inputs, Some(&[2, 0, 2])).unwrap();
    assert_eq!(some, [expected[2].clone(), expected[0].clone(), expected[2].clone()]);
}

#[test]
fn gradients_of_inputs() {
    let source = || ModelSource::from(recorded("mlp_sgd_mse", "forward.onnx"));
    let forward = LoadedModel::load(recorded("mlp_sgd_mse", "forward.onnx")).unwrap().proto.graph.unwrap();
    let input = forward.input[0].name.clone();
    let options = |name: &str| ArtifactOptions {
        input_gradients: vec![name.to_owned()],
        losses: vec![Loss::MSELoss.into()],
        ..ArtifactOptions::default()
    };
    let artifacts = generate(source(), options(&input)).unwrap();
    let session = session(encode_model(&artifacts.training_model).unwrap().into());
    let buffer = format!("{input}_grad.accumulation.buffer");
    let of = |name: &str| session.inputs().iter().find(|info| info.name == name).unwrap().shape.clone();
    assert_eq!(of(&buffer), of(&input));
    let error = generate(source(), options("fc1.weight")).unwrap_err().to_string();
    assert!(error.ends_with("has no input \"fc1.weight\", so it cannot return its gradient"), "{error}");
}

#[test]
fn named_loss_is_output() {
    let outputs = |names: [Option<&str>; 2], others: &[&str]| {
        let term = |loss: Loss, name: Option<&str>, factor| LossTerm {
            name: name.map(str::to_owned),
            factor,
            ..loss.into()
        };
        let losses = vec![term(Loss::MSELoss, names[0], 1.0), term(Loss::L1Loss, names[1], 0.5)];
        let options = ArtifactOptions {
            requires_grad: vec!["fc1.weight".into()],
            losses,
            additional_output_names: others.iter().map(|&name| name.to_owned()).collect(),
            ..ArtifactOptions::default()
        };
        let artifacts = generate(recorded("mlp_sgd_mse", "forward.onnx").into(), options)?;
        let of = |graph: Option<ortrain::GraphProto>| -> Vec<String> {
            graph.unwrap().output.into_iter().map(|info| info.name).collect()
        };
        let (training, eval) = (of(artifacts.training_model.graph), of(artifacts.eval_model.graph));
        assert_eq!(training[..eval.len()], eval);
        ortrain::Result::Ok(eval)
    };
    assert_eq!(outputs([None, None], &[]).unwrap().len(), 1);
    assert_eq!(outputs([Some("squares"), Some("size")], &[]).unwrap()[1..], ["squares", "size"]);
    assert_eq!(outputs([Some("squares"), None], &["fc1.weight"]).unwrap()[1..], ["squares", "fc1.weight"]);
    // If it is also an additional output, it has that position.
    assert_eq!(outputs([Some("a"), Some("b")], &["b", "a"]).unwrap()[1..], ["b", "a"]);
    for names in [[Some("twice"), Some("twice")], [Some("fc1.weight"), None], [Some(""), None]] {
        let error = outputs(names, &[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let name = names[0].unwrap();
        assert_eq!(
            error.to_string(),
            format!(
                "a loss cannot be named {name:?}: the name must not be empty or the name of another value"
            )
        );
    }
}
