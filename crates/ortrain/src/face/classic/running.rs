//! Runs of a session.

use std::time::Instant;

use ortrain_graph::{DType, Tensor};
use ortrain_ops::training::LOSS_SCALE;
use ortrain_program::{InputView, OutputSink, OutputView};

use super::ranks::train_once;
use super::{
    CallOptions, FetchSource, TrainingSession, check_shapes, copy_planes, order_inputs, restore_planes,
};
use crate::distributed::StepKind;
use crate::exec::caller_memory::describe_input;
use crate::exec::outputs::{Targets, target_spans};
use crate::exec::step_inputs::{StepInputs, split_inputs};
use crate::suggest::hint;
use crate::train::learning_rate::check_rate;
use crate::{Error, Result};

impl TrainingSession {
    /// Returns the indices of these outputs; without names, of all outputs.
    pub(super) fn fetch_indices(&self, fetches: &[&str]) -> Result<Vec<usize>> {
        if fetches.is_empty() {
            return Ok((0..self.outputs.len()).collect());
        }
        let position = |name: &&str| {
            self.outputs.iter().position(|output| output.name == **name).ok_or_else(|| {
                let known = self.outputs.iter().map(|output| output.name.as_str());
                Error::Argument(format!(
                    "the model has no output {name:?}; it has {}{}",
                    known.clone().collect::<Vec<_>>().join(", "),
                    hint(name, known)
                ))
            })
        };
        fetches.iter().map(position).collect()
    }

    /// Returns the number of outputs of the model itself. The outputs of the training follow.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let session = setup::classic()?;
    /// let names: Vec<&str> = session.outputs().iter().map(|output| output.name.as_str()).collect();
    /// assert_eq!(names[..session.model_output_count()], ["loss", "logits"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn model_output_count(&self) -> usize {
        self.fetch_sources.iter().filter(|fetch| matches!(fetch, FetchSource::Output(_))).count()
    }

    /// Checks the names of the inputs.
    pub(super) fn check_feeds(&self, feeds: &[(&str, InputView<'_>)]) -> Result<()> {
        let is_fed = |name: &str| feeds.iter().any(|(known, _)| *known == name);
        let missing: Vec<&str> =
            self.inputs.iter().map(|input| input.name.as_str()).filter(|name| !is_fed(name)).collect();
        let known = || self.inputs.iter().chain(&self.overridable).map(|input| input.name.as_str());
        if !missing.is_empty() {
            let names: Vec<&str> = feeds.iter().map(|(name, _)| *name).collect();
            return Err(Error::Argument(format!(
                "inputs are missing: {}; got {}",
                missing.join(", "),
                if names.is_empty() { "none".to_owned() } else { names.join(", ") }
            )));
        }
        if let Some((name, _)) = feeds.iter().find(|(_, input)| input.is_sequence()) {
            return Err(Error::Argument(format!("input {name:?} must be a tensor, got a sequence")));
        }
        match feeds.iter().find(|(name, _)| !known().any(|known| known == *name)) {
            None => Ok(()),
            Some((name, _)) => Err(Error::Argument(format!(
                "the model has no input {name:?}; it has {}{}",
                known().collect::<Vec<_>>().join(", "),
                hint(name, known())
            ))),
        }
    }

    /// Returns the value of a scalar input.
    pub(super) fn scalar_input(feeds: &[(&str, InputView<'_>)], name: &str) -> Result<f32> {
        let input = feeds.iter().find(|(known, _)| *known == name).map(|(_, input)| input);
        let input = input.ok_or_else(|| Error::Argument(format!("no value was given for input {name:?}")))?;
        let is_number = !input.is_sequence() && input.dtype == DType::F32 && input.dims == [1];
        let bytes = if is_number { input.to_host()?.into_owned() } else { Vec::new() };
        <[u8; 4]>::try_from(&bytes[..]).map(f32::from_le_bytes).map_err(|_| Error::Input {
            name: name.into(),
            expected: "float32[1]".into(),
            found: describe_input(input),
            reason: "it must be one number".into(),
        })
    }

    /// Runs on named inputs. Results go to the memory of `targets` at the same position, or else to `deliver`.
    pub(super) fn run_fetches(
        &mut self,
        feeds: &[(&str, InputView<'_>)],
        targets: &mut Targets<'_>,
        output_indices: &[usize],
        options: CallOptions,
        deliver: &mut OutputSink<'_>,
    ) -> Result<()> {
        let start = Instant::now();
        self.compute(feeds, targets, output_indices, options, deliver)?;
        if let Some(trace) = &mut self.module.trace {
            trace.record_run(start, Instant::now());
        }
        Ok(())
    }

    /// Returns the learning rate and the loss scale: inputs of sessions with an optimizer and with narrow floats.
    fn read_rates(&self, feeds: &[(&str, InputView<'_>)]) -> Result<(f32, f32)> {
        let rate = match &self.optimizer {
            Some(_) => {
                let rate = Self::scalar_input(feeds, &self.learning_rate_name)?;
                check_rate(&format!("the learning rate {:?}", self.learning_rate_name), rate)?;
                rate
            }
            None => 0.0,
        };
        let loss_scale = match self.low_precision {
            Some(_) => {
                let scale = Self::scalar_input(feeds, LOSS_SCALE)?;
                if !(scale.is_finite() && scale > 0.0) {
                    return Err(Error::Argument(format!(
                        "{LOSS_SCALE:?} must be a finite number above 0, got {scale}"
                    )));
                }
                scale
            }
            None => 1.0,
        };
        Ok((rate, loss_scale))
    }

    pub(super) fn compute(
        &mut self,
        feeds: &[(&str, InputView<'_>)],
        targets: &mut Targets<'_>,
        output_indices: &[usize],
        options: CallOptions,
        deliver: &mut OutputSink<'_>,
    ) -> Result<()> {
        self.check_feeds(feeds)?;
        let (rate, loss_scale) = self.read_rates(feeds)?;
        let fetches: Vec<FetchSource> =
            output_indices.iter().map(|&at| self.fetch_sources[at].clone()).collect();
        let of_model = self.model_output_count();
        let restricted = options.only_execute_path_to_fetches;
        let trains = !(restricted && fetches.iter().all(|fetch| matches!(fetch, FetchSource::Output(_))));
        let inputs = order_inputs(self.module.inputs(trains), &self.defaults, feeds, options)?;
        let output_memory: Vec<(usize, usize)> = target_spans(targets).collect();
        let copies = self.module.copy_inputs(&self.checkpoint, &inputs, &output_memory, trains)?;
        let (copied, in_place) = split_inputs(&inputs, &copies);
        let inputs = StepInputs { copied_values: &copied, in_place: &in_place };
        if targets.iter().any(|(_, target)| target.is_some()) {
            let shapes = self.module.output_shapes(inputs, trains)?;
            check_shapes(targets, &self.outputs, &self.fetch_sources, of_model, &shapes)?;
        }
        let mut put = |k: usize, value: OutputView<'_>| match targets.get_mut(k) {
            Some((_, Some(target))) => target.write(value),
            _ => deliver(k, value),
        };
        // A result of the module may be requested several times.
        let mut give = |at: usize, value: OutputView<'_>| {
            for (k, fetch) in fetches.iter().enumerate() {
                let wants = match *fetch {
                    FetchSource::Output(output) => output == at,
                    FetchSource::Gradient(weight) => of_model + weight == at,
                    _ => false,
                };
                if wants {
                    put(k, value)?;
                }
            }
            Ok(())
        };
        if !trains {
            return self.module.eval_step_on(&self.checkpoint, inputs, &mut give);
        }
        // Gradients that are fetched from a single run are not accumulated.
        let is_separate_run = restricted
            && self.runs_per_update > 1
            && fetches.iter().all(|fetch| matches!(fetch, FetchSource::Output(_) | FetchSource::Gradient(_)));
        if is_separate_run {
            let sums = match self.in_window {
                true => copy_planes(self.module.gradient_planes())?,
                false => Vec::new(),
            };
            let parts = (&mut self.module, &mut self.checkpoint);
            let call = (StepKind::Separate, rate, loss_scale);
            let run = train_once(
                (self.ranks.as_ref(), &mut self.loads, self.sums.as_ref()),
                parts,
                inputs,
                &mut give,
                call,
            );
            restore_planes(self.module.gradient_planes(), &sums)?;
            return run;
        }
        let begins = !self.in_window;
        if begins {
            self.module.lazy_reset_grad();
            self.frozen_before_window =
                self.low_precision.map(|_| copy_planes(self.checkpoint.frozen_planes())).transpose()?;
        }
        let updates = !restricted && self.optimizer.is_some();
        let kind = if updates { StepKind::Update } else { StepKind::Accumulate };
        let parts = (&mut self.module, &mut self.checkpoint);
        train_once(
            (self.ranks.as_ref(), &mut self.loads, self.sums.as_ref()),
            parts,
            inputs,
            &mut give,
            (kind, rate, loss_scale),
        )?;
        let (norm, finite) = if !updates {
            self.in_window = self.runs_per_update > 1;
            let wants_norm =
                fetches.iter().any(|fetch| matches!(fetch, FetchSource::Norm | FetchSource::AllFinite));
            let norm = wants_norm.then(|| self.module.gradient_norm(&self.checkpoint)).transpose()?;
            let norm = norm.map(|norm| norm / self.runs_per_update as f64);
            (norm, norm.is_none_or(f64::is_finite))
        } else {
            self.in_window = false;
            self.update(rate, loss_scale)?
        };
        let scalar = |value: f64, dtype: DType| Tensor::scalar(dtype, value);
        for (k, fetch) in fetches.iter().enumerate() {
            let value = match fetch {
                FetchSource::Output(_) | FetchSource::Gradient(_) => continue,
                FetchSource::Accumulated => scalar(1.0, DType::Bool),
                FetchSource::Norm => scalar(norm.unwrap_or(f64::NAN), DType::F32),
                FetchSource::AllFinite => scalar(f64::from(u8::from(finite)), DType::Bool),
            };
            put(k, OutputView::from(&value))?;
        }
        Ok(())
    }
}
