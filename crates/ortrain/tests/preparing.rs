//! Networks with many nodes are prepared and run. `cargo bench --bench preparing` measures the time.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/long.rs"]
mod long;

/// Nodes of each network.
const NODES: usize = 2_000;
/// Elements in a row of every value.
const WIDTH: usize = 4;

#[test]
fn networks_of_many_nodes_are_prepared() {
    for kind in long::KINDS {
        let artifacts = long::artifacts(&long::model(kind, NODES, WIDTH));
        let (mut state, mut module) = long::module(&artifacts);
        let loss = long::step(&mut state, &mut module, WIDTH);
        assert!(loss.is_finite(), "{kind}: {loss}");
    }
}

/// One weight with more uses than the maximum number of inputs of a Sum.
#[test]
fn gradients_of_many_uses_are_summed_in_parts() {
    let artifacts = long::artifacts(&long::model("product", 2_100, WIDTH));
    let sums = |name: &str| {
        let graph = artifacts.training_model.graph.as_ref().unwrap();
        let nodes = graph.node.iter().filter(|node| node.name.starts_with(name));
        nodes.map(|node| node.input.len()).collect::<Vec<_>>()
    };
    assert_eq!(sums("AccumulateGrad_w000001_grad"), [1024, 1024, 54]);
    let (mut state, mut module) = long::module(&artifacts);
    assert!((long::step(&mut state, &mut module, WIDTH) - 0.0625).abs() < 1e-6);
    // The product of identities: the gradient of each use is the row gradient times the rows.
    let gradient = common::gradient(&module, "w000001");
    let each = 2.0 * 0.25 / 8.0 * 0.5 * 2.0;
    assert!(gradient.iter().all(|&found| (found / 2_100.0 - each).abs() < 1e-4), "{gradient:?}");
}
