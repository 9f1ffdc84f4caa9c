//! Loops are bit-identical with and without unrolling.

mod common;

use std::sync::Arc;

use common::every_level;
use ortrain_program::Backend;
use ortrain_testkit::Remote;
use ortrain_testkit::suites::loops;

#[test]
fn unrolled_and_iterated_loops_match() {
    let remote: Arc<dyn Backend> = Arc::new(Remote::new());
    for backend in every_level().into_iter().chain([remote]) {
        loops::agree(&backend).passes();
    }
}
