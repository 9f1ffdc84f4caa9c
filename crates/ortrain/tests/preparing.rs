//! Networks of many nodes are prepared in time that grows as they do.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/long.rs"]
mod long;

use std::time::{Duration, Instant};

/// What a small network may take at least: less cannot be compared.
const LEAST: Duration = Duration::from_millis(100);

/// Nodes of the small network, and how many times as many the large one has.
const SMALL: usize = 400;
const TIMES: u32 = 8;

/// How much longer the large one may take than so many small ones: machines have other work. What is quadratic takes
/// eight times as long.
const SLACK: u32 = 3;

fn prepared(kind: &str, nodes: usize) -> (f32, Duration) {
    let start = Instant::now();
    let made = long::artifacts(&long::model(kind, nodes));
    let (mut state, mut module) = long::module(&made);
    (long::step(&mut state, &mut module), start.elapsed())
}

#[test]
fn preparing_is_linear() {
    for kind in long::KINDS {
        let (loss, small) = prepared(kind, SMALL);
        let (larger, large) = prepared(kind, SMALL * TIMES as usize);
        assert!(loss.is_finite() && larger.is_finite(), "{kind}: {loss}, {larger}");
        assert!(large < small.max(LEAST) * TIMES * SLACK, "{kind}: {small:?}, then {large:?}");
    }
}

/// One weight that is used more often than a Sum has inputs.
#[test]
fn gradients_of_many_uses_are_added_up_in_parts() {
    let made = long::artifacts(&long::model("product", 2_100));
    let sums = |name: &str| {
        let graph = made.training_model.graph.as_ref().unwrap();
        let nodes = graph.node.iter().filter(|node| node.name.starts_with(name));
        nodes.map(|node| node.input.len()).collect::<Vec<_>>()
    };
    assert_eq!(sums("AccumulateGrad_w000001_grad"), [1024, 1024, 54]);
    let (mut state, mut module) = long::module(&made);
    assert!((long::step(&mut state, &mut module) - 0.0625).abs() < 1e-6);
    // The product of identities: each use passes back the gradient of the rows times the rows.
    let gradient = common::gradient(&module, "w000001");
    let each = 2.0 * 0.25 / 8.0 * 0.5 * 2.0;
    assert!(gradient.iter().all(|&found| (found / 2_100.0 - each).abs() < 1e-4), "{gradient:?}");
}
