//! What the tests over random attributes share.

use std::sync::Arc;

use ortrain_program::Backend;
use proptest::test_runner::TestCaseError;

/// The CPU backend at every level of this machine.
pub(crate) fn every_level() -> Vec<Arc<dyn Backend>> {
    ortrain_kernels::Isa::available()
        .into_iter()
        .map(|isa| Arc::new(ortrain_cpu::Cpu::with_isa(isa)) as Arc<dyn Backend>)
        .collect()
}

/// The outcome of a check as that of a test.
pub(crate) fn passes(outcome: Result<(), String>) -> Result<(), TestCaseError> {
    outcome.map_err(TestCaseError::fail)
}
