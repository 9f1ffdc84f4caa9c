//! A warm step on the device allocates no memory of the host.

mod common;
#[path = "../../ortrain-testkit/gpu/example.rs"]
mod example;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::device;
use example::{WEIGHTS, artifacts};
use ortrain::artifacts::OptimizerKind;
use ortrain::{
    CheckpointState, InputView, ModelSource, Module, ModuleOptions, Optimizer, OutputView, RunOptions, Tensor,
};

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

/// Allocator that counts the requests of all threads.
struct Counting;

#[allow(unsafe_code, reason = "an allocator is unsafe")]
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

/// The only test of its process, since others would be counted, too.
#[test]
fn warm_step_allocates_nothing() {
    let trained = artifacts("perceptron", &WEIGHTS, OptimizerKind::AdamW);
    let source = |model| ModelSource::from_proto(model).expect("it fits in memory");
    let mut state = CheckpointState::from_checkpoint(trained.checkpoint.clone()).expect("it can be read");
    let options = ModuleOptions::from(RunOptions::default().backend(device()));
    let mut module =
        Module::new(source(&trained.training_model), &mut state, None, options).expect("it can run");
    let optimizer = trained.optimizer_model.as_ref().expect("it was requested");
    let mut optimizer = Optimizer::new(source(optimizer), &mut state, &module).expect("it fits");
    let (x, labels) = (Tensor::f32(&[16, 64], &[0.5; 1024]), Tensor::i64(&[16], &[1; 16]));
    let inputs = [InputView::from(&x), InputView::from(&labels)];
    let mut step = || {
        let mut loss = [0; 4];
        let read = &mut |_, value: OutputView<'_>| value.copy_to(&mut loss);
        module.train_step(&mut state, &inputs, read).expect("it runs");
        optimizer.step(&mut state, &module).expect("it runs");
        module.lazy_reset_grad();
        assert!(f32::from_le_bytes(loss).is_finite());
    };
    (0..4).for_each(|_| step());
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    step();
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 0);
}
