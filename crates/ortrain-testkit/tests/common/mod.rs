//! Shared utilities of tests on the CPU backend.

use std::sync::Arc;

use ortrain_program::Backend;

/// Returns the CPU backend at every level of this machine.
pub(crate) fn every_level() -> Vec<Arc<dyn Backend>> {
    ortrain_kernels::Isa::available()
        .into_iter()
        .map(|isa| Arc::new(ortrain_cpu::Cpu::with_isa(isa)) as Arc<dyn Backend>)
        .collect()
}
