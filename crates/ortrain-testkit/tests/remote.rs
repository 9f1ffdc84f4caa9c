//! Suites over memory that hands out no pointer: nothing above a backend takes it for memory of this process.

use std::sync::Arc;

use ortrain_program::Backend;
use ortrain_testkit::programs::{Kinds, Size};
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
    let kinds = Kinds {
        jumps: true,
        narrow: true,
        windows: true,
        parts: true,
        updates: true,
        segments: true,
        size: Size::Small,
    };
    suites::random_programs(&remote(), kinds, 0..100).passes();
}
