//! A warm train step and optimizer step take no memory from the heap, on no thread.
#![allow(clippy::unwrap_used)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{batch, given, optimizer_on, recorded, state_of};
use ortrain::{CheckpointState, Module, ModuleOptions, backend};

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

/// The only test of its process: others would be counted too. Batches of two sizes take turns, one of them large enough
/// for several threads.
#[test]
fn a_warm_step_allocates_nothing() {
    let case = "mlp_adamw_ce";
    let mut state: CheckpointState = state_of(case);
    let options = ModuleOptions::default().backend(backend("cpu", 2).unwrap());
    let source = recorded(case, "training_model.onnx").into();
    let mut module = Module::new(source, &mut state, None, options).unwrap();
    let mut optimizer = optimizer_on(case, &mut state, &module);
    let batches = [batch(4, 1), batch(20_000, 2)];
    let mut counted = 0;
    for _ in 0..4 {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        let mut losses = [[0_u8; 4]; 2];
        for (data, loss) in batches.iter().zip(&mut losses) {
            let inputs = [given(&data.0), given(&data.1)];
            module.train_step(&mut state, &inputs, &mut |_, _, _, value| value.copy_to(loss)).unwrap();
        }
        optimizer.step(&mut state, &module).unwrap();
        module.lazy_reset_grad();
        counted = ALLOCATIONS.load(Ordering::Relaxed) - before;
        assert!(losses.iter().all(|&loss| f32::from_le_bytes(loss).is_finite()));
    }
    assert_eq!(counted, 0);
}
