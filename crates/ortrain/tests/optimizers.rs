//! Programs of optimizers: their number of instructions is independent of the number of parameters.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/long.rs"]
mod long;

use ortrain::artifacts::{ArtifactOptions, Loss, generate};
use ortrain::optim::{OPTIMIZERS, OptimizerSpec};
use ortrain::{ModelSource, Optimizer};

/// Size of both axes of the matrices: the optimizer state is large relative to other values of a step.
const WIDTH: usize = 64;

/// Counts the instructions of a step for a number of layers, each with a matrix and a vector.
fn instructions(spec: OptimizerSpec, layers: usize) -> usize {
    let model = long::model("layers", 3 * layers, WIDTH);
    let weights = model.graph.as_ref().unwrap().initializer.iter().map(|weight| weight.name.clone());
    let options = ArtifactOptions {
        requires_grad: weights.collect(),
        losses: vec![Loss::MSELoss.into()],
        optimizer: Some(spec.into()),
        ..ArtifactOptions::default()
    };
    let artifacts = generate(ModelSource::from_proto(&model).unwrap(), options).unwrap();
    let (mut state, mut module) = long::module(&artifacts);
    let model = ModelSource::from_proto(artifacts.optimizer_model.as_ref().unwrap()).unwrap();
    let mut optimizer = Optimizer::new(model, &mut state, &module).unwrap();
    long::step(&mut state, &mut module, WIDTH);
    optimizer.step(&mut state, &module).unwrap();
    let dump = optimizer.dump();
    let count = dump.lines().find_map(|line| {
        line.trim().strip_prefix("program: ")?.split_once(" instructions").map(|(count, _)| count.to_owned())
    });
    count.unwrap_or_else(|| panic!("{dump}")).parse().unwrap()
}

/// Muon is excluded: its products are separate instructions.
#[test]
fn step_size_is_independent_of_parameter_count() {
    for row in OPTIMIZERS.iter().filter(|row| row.name != "Muon") {
        let [small, large] = [3, 40].map(|layers| instructions(OptimizerSpec::of_row(row), layers));
        assert!(large <= small, "{} takes {small} and {large}", row.name);
        let max_growth = if row.name == "Adafactor" { 16 } else { 2 };
        assert!(small <= max_growth, "{} takes {small}", row.name);
    }
}
