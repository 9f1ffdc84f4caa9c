//! Suites on a backend without host pointers to its memory. Code above a backend must treat the memory as device
//! memory.

use std::sync::Arc;

use ortrain_program::Backend;
use ortrain_testkit::programs::Kinds;
use ortrain_testkit::{Remote, suites};

fn remote() -> Arc<dyn Backend> {
    Arc::new(Remote::new())
}

#[test]
fn cases() {
    suites::cases(&remote()).passes();
}

#[test]
fn planned_programs() {
    suites::random_programs(&remote(), Kinds::ALL, 0..100).passes();
}
