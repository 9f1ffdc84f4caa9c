//! Shared utilities of tests with random attributes.

use proptest::test_runner::TestCaseError;

/// Converts the outcome of a check to the outcome of a test.
pub(crate) fn to_test_result(outcome: Result<(), String>) -> Result<(), TestCaseError> {
    outcome.map_err(TestCaseError::fail)
}
