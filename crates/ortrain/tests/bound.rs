//! Runs on named values in memory of the caller.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use common::numbers;
use ortrain::{
    DType, ErrorKind, InferenceSession, InputView, Memory, ModelProto, ModelSource, OperatorSetIdProto,
    OutputTarget, SessionOptions, TargetBytes, Tensor, Value, decode_model,
};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/perceptron.onnx");
/// Number of rows for which the values of a batch exceed a page.
const ROWS: usize = 48;

fn session() -> InferenceSession {
    InferenceSession::new(MODEL.into(), SessionOptions::default()).unwrap()
}

fn memory_of(values: &[f32]) -> Arc<Memory> {
    let memory = Arc::new(Memory::new(4 * values.len()));
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    memory.write(0, &bytes).unwrap();
    memory
}

fn input<'a>(memory: &'a Arc<Memory>, dims: &'a [usize]) -> InputView<'a> {
    InputView::in_memory(DType::F32, dims, memory)
}

fn target<'a>(memory: &'a Arc<Memory>, dims: &'a [usize]) -> OutputTarget<'a> {
    OutputTarget::in_memory(DType::F32, dims, memory)
}

#[test]
fn caller_memory_gives_identical_results() {
    let mut session = session();
    let x = numbers(ROWS * 64, 1);
    let tensor = Tensor::f32(&[ROWS, 64], &x);
    let expected = session.run_values(&[tensor.clone().into()], None).unwrap();
    let (inside, logits) = (memory_of(&x), Arc::new(Memory::new(4 * ROWS * 10)));
    let request = || (0, Some(target(&logits, &[ROWS, 10])));
    for _ in 0..2 {
        let x = input(&inside, &[ROWS, 64]);
        let results = session.run_bound(&[("x", x)], &mut [request()], false).unwrap();
        assert_eq!(results, [None]);
        let Value::Tensor(expected) = &expected[0] else { panic!("it is one tensor") };
        assert_eq!(logits.to_vec(0, logits.len()).unwrap(), expected.data().to_vec());
        logits.clear().unwrap();
    }
    // The same output as a separate value.
    let mut both = [(0, None), request()];
    let found = session.run_bound(&[("x", InputView::from(&tensor))], &mut both, true).unwrap();
    assert_eq!(found, [Some(expected[0].clone()), None]);
    // The memory is read at every run.
    inside.clear().unwrap();
    let x = input(&inside, &[ROWS, 64]);
    let found = session.run_bound(&[("x", x)], &mut both[..1], true).unwrap();
    assert_ne!(found[0].as_ref(), Some(&expected[0]));
}

/// Inputs, requested outputs, and the expected error message.
type Case<'a> = (&'a [(&'a str, InputView<'a>)], &'a mut [(usize, Option<OutputTarget<'a>>)], &'a str);

#[test]
fn rejects_invalid_inputs_and_targets() {
    let mut session = session();
    let x = memory_of(&numbers(ROWS * 64, 1));
    let logits = Arc::new(Memory::new(4 * ROWS * 10));
    let dims = [ROWS, 64];
    let feed = || input(&x, &dims);
    let request = |dims| (0, Some(target(&logits, dims)));
    let right = || request(&[ROWS, 10]);
    let cases: [Case<'_>; 8] = [
        (&[], &mut [right()], "no value was given for input \"x\""),
        (&[("x", feed()), ("y", feed())], &mut [right()], "the model has no input \"y\"; it has x"),
        (&[("x", feed()), ("x", feed())], &mut [right()], "input \"x\" is given twice"),
        (
            &[("x", feed())],
            &mut [(1, None)],
            "output index 1 is out of range: the model has 1 \
         outputs",
        ),
        (&[("x", feed())], &mut [right(), right()], "outputs \"logits\" and \"logits\" share memory"),
        (
            &[("x", feed())],
            &mut [request(&[ROWS, 9])],
            "output \"logits\" is float32[48, 10], but its buffer is float32[48, 9]",
        ),
        (
            &[("x", feed())],
            &mut [request(&[ROWS, 11])],
            "is declared as float32[48, 11] (2112 bytes), but it has 1920 bytes",
        ),
        (&[("x", InputView::from(&[] as &[Tensor]))], &mut [right()], "a sequence is no tensor"),
    ];
    for (inputs, requested, sentence) in cases {
        let error = session.run_bound(inputs, requested, true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.to_string().contains(sentence), "{error}");
        assert!(logits.is_zero().unwrap());
    }
    let short = memory_of(&[0.0; 64]);
    let error = session.run_bound(&[("x", input(&short, &dims))], &mut [right()], true).unwrap_err();
    assert!(error.to_string().contains("it should have 12288 bytes but has 256"), "{error}");
}

/// Positions of nonzero elements; their number is unknown before the run.
fn nonzero_positions_model() -> ModelProto {
    let mut model = decode_model(std::fs::read(MODEL).unwrap()).unwrap();
    let graph = model.graph.as_mut().unwrap();
    graph.initializer.clear();
    graph.node.truncate(1);
    let node = &mut graph.node[0];
    (node.op_type, node.attribute) = ("NonZero".into(), Vec::new());
    node.input = vec!["x".into()];
    node.output = vec!["places".into()];
    graph.output.truncate(1);
    (graph.output[0].name, graph.output[0].r#type) = ("places".into(), None);
    graph.value_info.clear();
    model.opset_import = vec![OperatorSetIdProto { domain: String::new(), version: 17 }];
    model
}

#[test]
fn unknown_shape_results_are_all_or_nothing() {
    let source = ModelSource::from_proto(&nonzero_positions_model()).unwrap();
    let mut session = InferenceSession::new(source, SessionOptions::default()).unwrap();
    let mut x = vec![0.0; 64];
    (x[3], x[60]) = (1.0, -1.0);
    let x = Tensor::f32(&[1, 64], &x);
    let mut found = [0_u8; 32];
    let mut run = |dims: &[usize], bytes: &mut [u8]| {
        session.run_into(
            &[InputView::from(&x)],
            &mut [OutputTarget { dtype: DType::I64, dims, bytes: TargetBytes::Host(bytes) }],
        )
    };
    run(&[2, 2], &mut found).unwrap();
    let read: Vec<i64> = found.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect();
    assert_eq!(read, [0, 0, 3, 60]);
    let mut buffer = [7_u8; 16];
    let error = run(&[2, 1], &mut buffer).unwrap_err();
    assert!(error.to_string().contains("is int64[2, 2], but its buffer is int64[2, 1]"), "{error}");
    assert_eq!(buffer, [7; 16]);
}
