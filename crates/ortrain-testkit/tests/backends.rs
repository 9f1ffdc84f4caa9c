//! Every case on every backend, forward and backward, against the reference evaluator in float64.

use std::sync::Arc;

use ortrain_program::{Backend, Reference};
use ortrain_testkit::suites::cases;

#[test]
fn reference() {
    cases(&(Arc::new(Reference) as Arc<dyn Backend>)).passes();
}

#[test]
fn cpu_at_every_level() {
    for isa in ortrain_kernels::Isa::available() {
        cases(&(Arc::new(ortrain_cpu::Cpu::with_isa(isa)) as Arc<dyn Backend>)).passes();
    }
}
