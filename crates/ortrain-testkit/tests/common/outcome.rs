//! What the tests over random attributes share.

use proptest::test_runner::TestCaseError;

/// The outcome of a check as that of a test.
pub(crate) fn passes(outcome: Result<(), String>) -> Result<(), TestCaseError> {
    outcome.map_err(TestCaseError::fail)
}
