//! A warm training step and optimizer step allocate no heap memory, on any thread.
#![allow(clippy::unwrap_used)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Workload, batch, module_on, optimizer_on, recorded, run_input, state_of};
use ortrain::{
    CheckpointState, DType, ForwardBackward, ForwardBackwardOptions, InputView, ModelSource, Module,
    ModuleOptions, OutputTarget, OutputView, RunOptions, Tensor, TrainingSession, backend,
};

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

/// Allocator that counts the requests of all threads.
struct Counting;

#[allow(unsafe_code)]
// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's guarantees are the requirements of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the number of allocations in the last of some rounds of `round`.
fn count_allocations(mut round: impl FnMut() -> f32) -> usize {
    let mut count = 0;
    for _ in 0..4 {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        let loss = round();
        count = ALLOCATIONS.load(Ordering::Relaxed) - before;
        assert!(loss.is_finite());
    }
    count
}

/// Runs a training step with a loss on the stack.
fn step(module: &mut Module, state: &mut CheckpointState, batch: &(Tensor, Tensor)) -> f32 {
    let mut loss = [0; 4];
    let inputs = [run_input(&batch.0), run_input(&batch.1)];
    module.train_step(state, &inputs, &mut |_, value| value.copy_to(&mut loss)).unwrap();
    f32::from_le_bytes(loss)
}

/// A Scan of sums over many rows, so that its iterations are not unrolled.
fn sums() -> ortrain::InferenceSession {
    use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, ValueType};
    let typed = |dims: &[Dim]| ValueType::Tensor(DType::F32, Some(dims.iter().cloned().collect::<Shape>()));
    let (rows, width) = (Dim::symbol("rows"), Dim::Known(64));
    let mut body = Graph::new("body");
    let vector_type = typed(std::slice::from_ref(&width));
    let ids = ["sum", "row", "next", "out"].map(|name| Some(body.add_value(name, vector_type.clone())));
    let [sum, row, next, out] = ids;
    body.nodes.push(Node::new("", "Add", &[sum, row], &[next], Attrs::new()));
    body.nodes.push(Node::new("", "Tanh", &[next], &[out], Attrs::new()));
    body.inputs = [sum, row].into_iter().flatten().collect();
    body.outputs = [next, out].into_iter().flatten().collect();
    let mut graph = Graph::new("graph");
    let matrix_type = typed(&[rows, width]);
    let start = Some(graph.add_value("start", vector_type.clone()));
    let steps = Some(graph.add_value("steps", matrix_type.clone()));
    let outputs = [Some(graph.add_value("last", vector_type)), Some(graph.add_value("all", matrix_type))];
    let attrs = Attrs::new().with("num_scan_inputs", 1i64).with("body", body);
    graph.nodes.push(Node::new("", "Scan", &[start, steps], &outputs, attrs));
    graph.inputs = [start, steps].into_iter().flatten().collect();
    graph.outputs = outputs.into_iter().flatten().collect();
    let opset = ortrain_onnx::OperatorSetIdProto { version: 17, ..Default::default() };
    let model = ortrain_onnx::ModelProto {
        ir_version: 8,
        graph: Some(graph.to_proto()),
        opset_import: vec![opset],
        ..Default::default()
    };
    let options =
        ortrain::SessionOptions::from(ortrain::RunOptions::default().backend(backend("cpu", 2).unwrap()));
    ortrain::InferenceSession::new(ModelSource::from_proto(&model).unwrap(), options).unwrap()
}

/// The only test of its process, since others would be counted, too. A perceptron runs with alternating
/// batches of two sizes; the larger one uses several threads. Complete convolution networks follow.
#[test]
fn warm_step_allocates_nothing() {
    let case = "mlp_adamw_ce";
    let mut state: CheckpointState = state_of(case);
    let options = ModuleOptions::from(RunOptions::default().backend(backend("cpu", 2).unwrap()));
    let source = recorded(case, "training_model.onnx").into();
    let mut module = Module::new(source, &mut state, None, options).unwrap();
    let mut optimizer = optimizer_on(case, &mut state, &module);
    let batches = [batch(4, 1), batch(20_000, 2)];
    let round = || {
        let loss = batches.iter().map(|batch| step(&mut module, &mut state, batch)).sum();
        optimizer.step(&mut state, &module).unwrap();
        module.lazy_reset_grad();
        loss
    };
    assert_eq!(count_allocations(round), 0);

    let train = recorded(case, "training_model.onnx").into();
    let optimizer = recorded(case, "optimizer_model.onnx").into();
    let mut session =
        TrainingSession::new(state, train, None, Some(optimizer), ModuleOptions::default()).unwrap();
    let round = || {
        let mut loss = [0.0];
        let inputs = [run_input(&batches[0].0), run_input(&batches[0].1)];
        session.train_step_into(&inputs, &mut [OutputTarget::f32(&[], &mut loss)]).unwrap();
        session.optimizer_step().unwrap();
        session.lazy_reset_grad();
        loss[0]
    };
    assert_eq!(count_allocations(round), 0, "a session");

    // Forward and backward as two calls, with weights and gradients of the caller.
    let mut state = state_of(case);
    let module = module_on(case, &mut state);
    let loss = module.outputs(true)[0].name.clone();
    let model = module.inference_model(&state, &[&loss]).unwrap().proto;
    let options = ForwardBackwardOptions::default()
        .run(ortrain::RunOptions::default().backend(backend("cpu", 2).unwrap()));
    let both = ForwardBackward::new(ModelSource::from_proto(&model).unwrap(), options).unwrap();
    let memories: Vec<_> = both.weights().iter().map(|weight| weight.to_memory().unwrap()).collect();
    let gradient_buffers: Vec<_> =
        both.weights().iter().map(|weight| weight.allocate_gradient().unwrap()).collect();
    let (weights, mut gradients) = (both.weight_views(&memories), both.gradient_targets(&gradient_buffers));
    let round = || {
        let mut sum = 0.0;
        for (x, labels) in &batches {
            let mut loss = [0; 4];
            let inputs = [run_input(x), run_input(labels)];
            let mut live = both.forward(&weights, &inputs, &mut |_, value| value.copy_to(&mut loss)).unwrap();
            let one = 1.0_f32.to_le_bytes();
            let seed = InputView { dtype: DType::F32, dims: &[], bytes: one[..].into() };
            both.backward(&mut live, &[seed], &mut gradients, &mut |_, _| Ok(())).unwrap();
            sum += f32::from_le_bytes(loss);
        }
        sum
    };
    assert_eq!(count_allocations(round), 0, "forward and backward");

    // Allocations of a Scan do not depend on its number of iterations.
    let mut session = sums();
    let start = Tensor::f32(&[64], &[0.0; 64]);
    let counts = [3000, 5000].map(|rows| {
        let steps = Tensor::f32(&[rows, 64], &vec![0.5; rows * 64]);
        let inputs = [run_input(&start), run_input(&steps)];
        count_allocations(|| {
            let mut first = [0; 4];
            let deliver = &mut |k, value: OutputView<'_>| {
                let mut bytes = vec![0; if k == 0 { 64 * 4 } else { rows * 64 * 4 }];
                value.copy_to(&mut bytes)?;
                first.copy_from_slice(&bytes[..4]);
                Ok(())
            };
            session.run(&inputs, deliver).unwrap();
            f32::from_le_bytes(first)
        })
    });
    assert_eq!(counts[0], counts[1], "iterations allocate");

    // Every optimizer of the table.
    let mut run = Workload::new("mlp", 16);
    let first = run.state.names().next().unwrap().to_owned();
    let batch = run.batch(1);
    for (name, model) in common::optimizers(&first) {
        let mut optimizer = ortrain::Optimizer::replacing(model, &mut run.state, &run.module).unwrap();
        let round = || {
            let loss = step(&mut run.module, &mut run.state, &batch);
            optimizer.step(&mut run.state, &run.module).unwrap();
            run.module.lazy_reset_grad();
            loss
        };
        assert_eq!(count_allocations(round), 0, "{name}");
    }

    let with_dropout = Workload::with_dropout("mlp", 256);
    let nets = [("lenet", 64), ("mobilenetv2_96", 2), ("resnet18_224", 1)];
    let nets = nets.map(|(name, rows)| (name, Workload::new(name, rows)));
    for (name, mut run) in nets.into_iter().chain([("mlp with Dropout", with_dropout)]) {
        let batch = run.batch(1);
        let round = || {
            let loss = step(&mut run.module, &mut run.state, &batch);
            run.optimizer.step(&mut run.state, &run.module).unwrap();
            run.module.lazy_reset_grad();
            loss
        };
        assert_eq!(count_allocations(round), 0, "{name}");
    }
}
