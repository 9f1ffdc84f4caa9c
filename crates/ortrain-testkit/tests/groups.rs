//! Updates of several matrices need only the instructions of one matrix, and compute the same.

mod common;

use std::sync::Arc;

use common::every_level;
use ortrain_program::{Backend, Instruction};
use ortrain_testkit::Remote;
use ortrain_testkit::programs::reference;
use ortrain_testkit::suites::groups;

#[test]
fn groups_compute_what_their_nests_compute() {
    let others: [Arc<dyn Backend>; 2] = [reference(), Arc::new(Remote::new())];
    for backend in every_level().into_iter().chain(others) {
        groups::agree(&backend).passes();
    }
}

#[test]
fn group_size_is_independent_of_matrix_count() {
    let shapes: Vec<[usize; 2]> = (0..40).map(|k| [2 + k % 5, 3 + k % 7]).collect();
    let program = groups::program(&shapes, true);
    let nests = program.instructions.iter().map(|scheduled| match &scheduled.instruction {
        Instruction::NestGroup(group) => group.nests.len(),
        _ => panic!("{program}"),
    });
    // Means of rows and of columns have the same form.
    assert_eq!(nests.collect::<Vec<_>>(), [2 * shapes.len(), shapes.len()]);
}
