//! Time to prepare a network of many nodes: `cargo bench -p ortrain --bench preparing [-- KIND NODES]`.
//!
//! Preparation is everything before the second step: generating the artifacts, reading them, and the first
//! step, which compiles the program. Its time is linear in the number of nodes. An inference session is measured
//! as well: reading of the model, with its nodes from last to first, and the first run. Without arguments, every
//! kind is prepared with 2 000 nodes and with ten times this number.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "printing is the purpose of this program")]

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/common/long.rs"]
mod long;

use std::time::Instant;

use long::KINDS;
use ortrain::{InferenceSession, InputView, ModelSource, SessionOptions, Tensor, collect};

/// Numbers of nodes without arguments.
const NODES: [usize; 2] = [2_000, 20_000];
/// Elements in a row of every value.
const WIDTH: usize = 4;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Cargo adds `--bench`.
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    match arguments.as_slice() {
        [] => KINDS.iter().for_each(|kind| NODES.into_iter().for_each(|nodes| prepare(kind, nodes))),
        [kind, nodes] => prepare(kind, nodes.parse()?),
        _ => return Err("usage: preparing [KIND NODES]".into()),
    }
    Ok(())
}

/// Prepares a network and prints the time of each part.
fn prepare(kind: &str, nodes: usize) {
    let model = long::model(kind, nodes, WIDTH);
    let start = Instant::now();
    let mut time = start;
    let mut lap = || {
        let lap = time.elapsed().as_secs_f64();
        time = Instant::now();
        lap
    };
    let generated = long::artifacts(&model);
    let artifacts = lap();
    let (mut state, mut module) = long::module(&generated);
    let reading = lap();
    long::step(&mut state, &mut module, WIDTH);
    let first = lap();
    println!(
        "{kind:9} {nodes:6} nodes: artifacts {artifacts:.3} s, reading {reading:.3} s, first step {first:.3} s, together {:.3} s",
        start.elapsed().as_secs_f64()
    );
    drop((generated, state, module));

    let mut reversed = model;
    reversed.graph.as_mut().unwrap().node.reverse();
    let source = ModelSource::from_proto(&reversed).unwrap();
    let x = Tensor::f32(&[2, WIDTH], &[0.5; 2 * WIDTH]);
    let start = Instant::now();
    let mut session = InferenceSession::new(source, SessionOptions::default()).unwrap();
    let reading = start.elapsed().as_secs_f64();
    let start = Instant::now();
    collect(|deliver| session.run(&[InputView::from(&x)], deliver)).unwrap();
    let first = start.elapsed().as_secs_f64();
    let per_node = |seconds: f64| seconds / nodes as f64 * 1e6;
    println!(
        "{kind:9} {nodes:6} nodes: session: reading {reading:.3} s ({:.1} us a node), first run {first:.3} s ({:.1} us a node)",
        per_node(reading),
        per_node(first)
    );
}
