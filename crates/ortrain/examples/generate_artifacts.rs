//! Generates the artifacts of a training from a forward model.
//!
//! ```text
//! generate_artifacts MODEL --requires-grad a,b [--frozen c,d] [--loss cross_entropy|mse|bce_with_logits|l1]
//!     [--optimizer adamw|sgd] [--outputs e,f] [--loss-inputs g,h] [--nominal] [--prefix p] --out FOLDER
//! ```

use std::error::Error;
use std::io::Write as _;
use std::process::ExitCode;

use ortrain::artifacts::{ArtifactOptions, Loss, OptimizerKind, generate};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut model = None;
    let mut folder = None;
    let mut prefix = String::new();
    let mut options = ArtifactOptions::default();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        let list =
            |text: String| text.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
        match argument.as_str() {
            "--requires-grad" => options.requires_grad = list(value()?),
            "--frozen" => options.frozen_params = list(value()?),
            "--outputs" => options.additional_output_names = list(value()?),
            "--loss-inputs" => options.loss_input_names = list(value()?),
            "--nominal" => options.nominal_checkpoint = true,
            "--prefix" => prefix = value()?,
            "--out" => folder = Some(value()?),
            "--loss" => {
                let loss = match value()?.as_str() {
                    "cross_entropy" => Loss::CrossEntropyLoss,
                    "mse" => Loss::MSELoss,
                    "bce_with_logits" => Loss::BCEWithLogitsLoss,
                    "l1" => Loss::L1Loss,
                    other => return Err(format!("there is no loss {other:?}").into()),
                };
                options.losses.push(loss.into());
            }
            "--optimizer" => {
                let optimizer = match value()?.as_str() {
                    "adamw" => OptimizerKind::AdamW,
                    "sgd" => OptimizerKind::SGD,
                    other => return Err(format!("there is no optimizer {other:?}").into()),
                };
                options.optimizer = Some(optimizer.into());
            }
            _ if model.is_none() && !argument.starts_with("--") => model = Some(argument),
            _ => return Err(format!("unknown argument {argument:?}").into()),
        }
    }
    let model = model.ok_or("name a model")?;
    let artifacts = generate(model.as_str().into(), options)?;
    artifacts.write(folder.ok_or("expected a folder after --out")?, &prefix)?;
    Ok(())
}
