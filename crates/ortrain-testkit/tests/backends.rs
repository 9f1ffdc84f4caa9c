//! Every case, forward and backward, on every backend, against the reference evaluator in float64.

use std::sync::Arc;

use ortrain_program::{Backend, Reference};
use ortrain_testkit::{cases, check_backend};

fn every_case_agrees(backend: &Arc<dyn Backend>) {
    let failures: Vec<String> =
        cases().iter().filter_map(|case| check_backend(case, backend, true).err()).collect();
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn reference() {
    every_case_agrees(&(Arc::new(Reference) as Arc<dyn Backend>));
}

#[test]
fn cpu_at_every_level() {
    for isa in ortrain_kernels::Isa::available() {
        every_case_agrees(&(Arc::new(ortrain_cpu::Cpu::with_isa(isa)) as Arc<dyn Backend>));
    }
}
