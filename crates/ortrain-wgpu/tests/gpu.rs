//! Tests of every GPU backend on the software driver, and the objects and refusals of this one.

mod common;
#[path = "../../ortrain-testkit/gpu/mod.rs"]
mod gpu;

use ortrain::artifacts::OptimizerKind;
use ortrain::{InputView, ModelSource, Module, ModuleOptions, Optimizer, OutputView, RunOptions, collect};
use ortrain_expr::{BinaryOp, Builder, DType, Reg, UnaryOp};
use ortrain_program::UnsupportedOnBackend;
use ortrain_wgpu::DeviceCounts;

use common::{device, wgpu};
use gpu::example::{WEIGHTS, artifacts};
use gpu::nests::{Results, Space, program};
use gpu::training::{batches, state_of};

/// Bytes of the scalars of a step: seed and count, settings of the optimizer, the flag of guards.
const SCALARS: u64 = 2048;

/// A step copies the requested results and creates no buffer, kernel or bind group.
#[test]
fn warm_step_creates_no_objects() {
    let backend = device();
    let trained = artifacts("perceptron", &WEIGHTS, OptimizerKind::AdamW);
    let mut state = state_of(&trained);
    let source = |model| ModelSource::from_proto(model).expect("it fits in memory");
    let options = ModuleOptions::from(RunOptions::default().backend(backend.clone()));
    let mut module =
        Module::new(source(&trained.training_model), &mut state, None, options).expect("it can run");
    let model = trained.optimizer_model.as_ref().expect("it was requested");
    let mut optimizer = Optimizer::new(source(model), &mut state, &module).expect("it fits");
    let counts: Vec<_> = batches(&[16, 64], 8)
        .iter()
        .map(|batch| {
            let inputs = batch.each_ref().map(InputView::from);
            let mut loss = [0; 4];
            let mut deliver = |_: usize, value: OutputView<'_>| value.copy_to(&mut loss);
            module.train_step(&mut state, &inputs, &mut deliver).expect("it runs");
            optimizer.step(&mut state, &module).expect("it runs");
            module.lazy_reset_grad();
            assert!(f32::from_le_bytes(loss) > 0.0);
            wgpu().counts()
        })
        .collect();
    // The first step replaces gradients of zero, like the later steps.
    let objects =
        counts.iter().map(|count| DeviceCounts { uploaded: 0, downloaded: 0, ..*count }).collect::<Vec<_>>();
    assert_eq!(objects[1..], [objects[0]; 7]);
    let inputs: usize = batches(&[16, 64], 1)[0].iter().map(|input| input.data().len()).sum();
    for pair in counts.windows(2) {
        let uploaded = pair[1].uploaded - pair[0].uploaded;
        assert!(
            (inputs as u64..inputs as u64 + SCALARS).contains(&uploaded),
            "{uploaded} bytes for {inputs}"
        );
        assert_eq!(pair[1].downloaded - pair[0].downloaded, 4, "the loss alone is read");
    }
}

/// Bytes that a module does not count: staging, buffers of results, constants and tables of programs.
const OVERHEAD_BYTES: u64 = 16 << 20;

/// A device holds the bytes that the module counts plus a small overhead, and nothing after state and module are
/// dropped.
#[test]
fn device_memory_equals_the_module_count() {
    let before = wgpu().counts().buffer_bytes;
    let trained = artifacts("perceptron", &WEIGHTS, OptimizerKind::AdamW);
    let mut state = state_of(&trained);
    let source = |model| ModelSource::from_proto(model).expect("it fits in memory");
    let options = ModuleOptions::from(RunOptions::default().backend(device()));
    let mut module =
        Module::new(source(&trained.training_model), &mut state, None, options).expect("it can run");
    let model = trained.optimizer_model.as_ref().expect("it was requested");
    let mut optimizer = Optimizer::new(source(model), &mut state, &module).expect("it fits");
    for batch in batches(&[16, 64], 3) {
        let inputs = batch.each_ref().map(InputView::from);
        collect(|deliver| module.train_step(&mut state, &inputs, deliver)).expect("it runs");
        optimizer.step(&mut state, &module).expect("it runs");
    }
    let counted = module.memory(&state).total();
    let buffer_bytes = wgpu().counts().buffer_bytes - before;
    assert!(
        buffer_bytes >= counted as u64 && buffer_bytes <= counted as u64 + OVERHEAD_BYTES,
        "{buffer_bytes} bytes, but {counted} are counted"
    );
    drop((optimizer, module, state));
    let left = wgpu().counts().buffer_bytes - before;
    assert!(left <= OVERHEAD_BYTES, "{left} bytes are left");
}

/// Returns the error of a function of one 64-bit float.
fn refusal(op: impl FnOnce(&mut Builder, Reg) -> Reg) -> UnsupportedOnBackend {
    let program = program(&Space::one_segment(3), &[DType::F64], |e, regs| Results {
        each: vec![(op(e, regs[0]), DType::F64)],
        ..Results::default()
    });
    device().compile(program).expect_err("it needs a table")
}

/// The error names the function, and backends that support it.
#[test]
fn functions_with_tables_are_refused() {
    let unary = [
        (UnaryOp::Exp, "exp"),
        (UnaryOp::Log, "log"),
        (UnaryOp::Sin, "sin"),
        (UnaryOp::Cos, "cos"),
        (UnaryOp::Atan, "atan"),
        (UnaryOp::Erf, "erf"),
        (UnaryOp::Tanh, "tanh"),
        (UnaryOp::Sigmoid, "sigmoid"),
    ];
    let sentence = |name: &str| {
        format!(
            "it computes {name} in float64, which this device does not support; use float32 or the cpu backend"
        )
    };
    for (op, name) in unary {
        assert_eq!(refusal(|e, x| e.unary(op, x)).reason, sentence(name));
    }
    for (op, name) in [(BinaryOp::Rem, "rem"), (BinaryOp::Pow, "pow")] {
        assert_eq!(refusal(|e, x| e.binary(op, x, x)).reason, sentence(name));
    }
}
