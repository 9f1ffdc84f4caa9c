//! An application that fine-tunes a model where it runs: no Python, no other runtime, one binary.
//!
//! ```text
//! cargo run --release -p ortrain-embed-example -- examples/perceptron.onnx FOLDER
//! ```
//!
//! It generates the artifacts of a training, trains the last layer on its own examples, saves after each
//! round, then exports and runs the model. If it is started again on the same folder, it continues after the
//! last saved round.

#![allow(clippy::print_stdout, reason = "an application talks to its user")]

use std::error::Error;
use std::path::{Path, PathBuf};

use ortrain::artifacts::{ArtifactOptions, Loss, OptimizerKind, generate};
use ortrain::{
    CheckpointState, InferenceSession, InputView, ModuleOptions, Property, SessionOptions, Tensor,
    TrainingSession, collect,
};

const CLASSES: usize = 10;
const FEATURES: usize = 64;
const BATCH: usize = 20;
const ROUNDS: i64 = 5;
const STEPS: usize = 40;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1).map(PathBuf::from);
    let (Some(model), Some(folder)) = (arguments.next(), arguments.next()) else {
        return Err("usage: embed MODEL FOLDER".into());
    };
    std::fs::create_dir_all(&folder)?;
    let checkpoint = folder.join("checkpoint");
    if !checkpoint.exists() {
        prepare(&model, &folder)?;
    }

    let mut session = TrainingSession::new(
        CheckpointState::load(&checkpoint)?,
        folder.join("training_model.onnx").into(),
        Some(folder.join("eval_model.onnx").into()),
        Some(folder.join("optimizer_model.onnx").into()),
        ModuleOptions::default(),
    )?;
    session.set_learning_rate(0.01)?;
    let first = match session.state().properties().get("rounds") {
        Some(Property::Int(done)) => *done,
        _ => 0,
    };
    for round in first..ROUNDS {
        let mut loss = 0.0;
        for step in 0..STEPS {
            let (x, labels) = examples(round as u64 * STEPS as u64 + step as u64);
            loss =
                session.train_step(&[InputView::from(&x), InputView::from(&labels)])?[0].to_vec::<f32>()[0];
            session.optimizer_step()?;
            session.lazy_reset_grad();
        }
        // Written beside the old file, flushed, then renamed, because a power failure may happen at any time.
        session.state_mut().set_property("rounds", round + 1);
        session.state().save(&checkpoint, true)?;
        println!("round {round}: loss {loss:.4}");
    }

    let trained = folder.join("trained.onnx");
    session.export_model_for_inferencing(&trained, &["logits"])?;
    println!("{:.0} % right", 100.0 * accuracy(&trained)?);
    Ok(())
}

/// Generates the artifacts for training the last layer.
fn prepare(model: &Path, folder: &Path) -> Result<(), Box<dyn Error>> {
    let options = ArtifactOptions {
        requires_grad: vec!["fc2.weight".into(), "fc2.bias".into()],
        frozen_params: vec!["fc1.weight".into(), "fc1.bias".into()],
        losses: vec![Loss::CrossEntropyLoss.into()],
        optimizer: Some(OptimizerKind::AdamW.into()),
        ..ArtifactOptions::default()
    };
    generate(model.into(), options)?.write(folder, "")?;
    Ok(())
}

/// Data of an application: here noise with a bright spot; the position of the spot is the label.
fn examples(seed: u64) -> (Tensor, Tensor) {
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let (mut x, mut labels) = (Vec::new(), Vec::new());
    for _ in 0..BATCH {
        let label = next() as usize % CLASSES;
        let spot = label * FEATURES / CLASSES;
        x.extend((0..FEATURES).map(|i| {
            let noise = (next() >> 40) as f32 / (1u64 << 24) as f32;
            noise + if i / 6 == spot / 6 { 2.0 } else { 0.0 }
        }));
        labels.push(label as i64);
    }
    (Tensor::f32(&[BATCH, FEATURES], &x), Tensor::i64(&[BATCH], &labels))
}

/// Returns the fraction of new examples that a model classifies correctly.
fn accuracy(model: &Path) -> Result<f64, Box<dyn Error>> {
    const BATCHES: u64 = 10;
    let mut session = InferenceSession::new(model.into(), SessionOptions::default())?;
    let mut right = 0;
    for seed in 0..BATCHES {
        let (x, labels) = examples(u64::MAX - seed);
        let scores = collect(|deliver| session.run(&[InputView::from(&x)], deliver))?[0].to_vec::<f32>();
        for (row, label) in scores.chunks_exact(CLASSES).zip(labels.to_vec::<i64>()) {
            let best = (0..CLASSES).max_by(|&a, &b| row[a].total_cmp(&row[b]));
            right += usize::from(best == usize::try_from(label).ok());
        }
    }
    Ok(right as f64 / (BATCHES as usize * BATCH) as f64)
}
