//! A warm train step and optimizer step take no memory from the heap.
#![allow(clippy::unwrap_used)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use common::{batch, given, optimizer_on, recorded, state_of};
use ortrain::{Backend, CheckpointState, Module, ModuleOptions, default_backend};
use ortrain_program::{
    Bindings, Entry, Executable, Program, RunError, Scalars, UnsupportedOnBackend, Workspace,
};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// Counts what this thread asks for.
struct Counting;

#[allow(unsafe_code)]
// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
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

/// Runs nothing, so that only what is around the programs is counted.
#[derive(Debug)]
struct Idle;

#[derive(Debug)]
struct IdleProgram(Arc<Program>);

impl Backend for Idle {
    fn name(&self) -> &'static str {
        "idle"
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>, UnsupportedOnBackend> {
        Ok(Box::new(IdleProgram(program)))
    }
}

impl Executable for IdleProgram {
    fn program(&self) -> &Program {
        &self.0
    }

    fn scratch_bytes(&self) -> usize {
        0
    }

    fn run(&self, bindings: &Bindings<'_>, _: &mut Workspace, _: Entry, _: Scalars) -> Result<(), RunError> {
        self.0.check_bindings(bindings)
    }
}

/// Allocations of the third round of two train steps and an optimizer step.
fn allocations(backend: Arc<dyn Backend>) -> usize {
    let case = "mlp_adamw_ce";
    let mut state: CheckpointState = state_of(case);
    let options = ModuleOptions::default().backend(backend);
    let source = recorded(case, "training_model.onnx").into();
    let mut module = Module::new(source, &mut state, None, options).unwrap();
    let mut optimizer = optimizer_on(case, &mut state, &module);
    let batches = [batch(4, 1), batch(7, 2)];
    let mut last = 0;
    for _ in 0..3 {
        let before = ALLOCATIONS.get();
        let mut losses = [[0_u8; 4]; 2];
        for (data, loss) in batches.iter().zip(&mut losses) {
            let inputs = [given(&data.0), given(&data.1)];
            module.train_step(&mut state, &inputs, &mut |_, _, _, value| value.copy_to(loss)).unwrap();
        }
        optimizer.step(&mut state, &module).unwrap();
        module.lazy_reset_grad();
        last = ALLOCATIONS.get() - before;
    }
    last
}

#[test]
fn nothing_is_allocated_around_the_programs() {
    assert_eq!(allocations(Arc::new(Idle)), 0);
}

#[test]
fn nothing_is_allocated_by_the_default_backend() {
    assert_eq!(allocations(default_backend()), 0);
}
