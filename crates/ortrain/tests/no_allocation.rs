//! A warm train step and optimizer step take no memory from the heap, on no thread.
#![allow(clippy::unwrap_used)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Workload, batch, given, optimizer_on, recorded, state_of};
use ortrain::{CheckpointState, Destination, Module, ModuleOptions, Tensor, TrainingSession, backend};

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

/// Counts what any thread asks for.
struct Counting;

#[allow(unsafe_code)]
// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are those the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How much is asked for by the last of some rounds of `round`.
fn counted(mut round: impl FnMut() -> f32) -> usize {
    let mut count = 0;
    for _ in 0..4 {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        let loss = round();
        count = ALLOCATIONS.load(Ordering::Relaxed) - before;
        assert!(loss.is_finite());
    }
    count
}

/// A train step whose loss goes where it takes no memory.
fn step(module: &mut Module, state: &mut CheckpointState, batch: &(Tensor, Tensor)) -> f32 {
    let mut loss = [0; 4];
    let inputs = [given(&batch.0), given(&batch.1)];
    module.train_step(state, &inputs, &mut |_, _, _, value| value.copy_to(&mut loss)).unwrap();
    f32::from_le_bytes(loss)
}

/// The only test of its process: others would be counted too. A perceptron with batches of two sizes that take turns, one
/// of them large enough for several threads; then whole convolution networks.
#[test]
fn a_warm_step_allocates_nothing() {
    let case = "mlp_adamw_ce";
    let mut state: CheckpointState = state_of(case);
    let options = ModuleOptions::default().backend(backend("cpu", 2).unwrap());
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
    assert_eq!(counted(round), 0);

    let train = recorded(case, "training_model.onnx").into();
    let optimizer = recorded(case, "optimizer_model.onnx").into();
    let mut session =
        TrainingSession::new(state, train, None, Some(optimizer), ModuleOptions::default()).unwrap();
    let round = || {
        let mut loss = [0.0];
        let inputs = [given(&batches[0].0), given(&batches[0].1)];
        session.train_step_into(&inputs, &mut [Destination::f32(&[], &mut loss)]).unwrap();
        session.optimizer_step().unwrap();
        session.lazy_reset_grad();
        loss[0]
    };
    assert_eq!(counted(round), 0, "a session");

    for (name, rows) in [("lenet", 64), ("mobilenetv2_96", 2), ("resnet18_224", 1)] {
        let mut run = Workload::new(name, rows);
        let batch = run.batch(1);
        let round = || {
            let loss = step(&mut run.module, &mut run.state, &batch);
            run.optimizer.step(&mut run.state, &run.module).unwrap();
            run.module.lazy_reset_grad();
            loss
        };
        assert_eq!(counted(round), 0, "{name}");
    }
}
