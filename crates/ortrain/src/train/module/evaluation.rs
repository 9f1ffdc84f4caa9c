//! Evaluation steps.

use ortrain_program::{GradientMode as ProgramEntry, InputView, OutputSink};

use super::{Module, no_eval_model, scalars};
use crate::exec::outputs::OutputWriter;
use crate::exec::step_inputs::{StepInputs, split_inputs};
use crate::state::binding::{self};
use crate::train::anomaly::{self, Replay};
use crate::train::not_finite::Anomaly;
use crate::{CheckpointState, Error, OutputTarget, Result};

impl Module {
    /// Computes the outputs of the evaluation model, and passes them to `deliver` in the order of
    /// [`Module::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// let results = ortrain::collect(|deliver| module.eval_step(&state, &inputs, deliver))?;
    /// assert!(results[0].dims().is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If there is no evaluation model, the inputs do not fit, or the run fails.
    pub fn eval_step(
        &mut self,
        state: &CheckpointState,
        inputs: &[InputView<'_>],
        deliver: &mut OutputSink<'_>,
    ) -> Result<()> {
        self.check_state(state)?;
        self.phase_mut(false)?.check(inputs)?;
        self.eval_step_on(state, StepInputs::all_copied(inputs), deliver)
    }

    /// Runs [`Module::eval_step`] on inputs that may lie on the module's device: see [`Module::train_step_bound`].
    ///
    /// # Errors
    /// As [`Module::eval_step`].
    pub fn eval_step_bound(
        &mut self,
        state: &CheckpointState,
        inputs: &[InputView<'_>],
        deliver: &mut OutputSink<'_>,
    ) -> Result<()> {
        let copies = self.copy_inputs(state, inputs, &[], false)?;
        let (copied, in_place) = split_inputs(inputs, &copies);
        self.eval_step_on(state, StepInputs { copied_values: &copied, in_place: &in_place }, deliver)
    }

    /// Runs an evaluation step on inputs that [`Module::copy_inputs`] has checked.
    pub(crate) fn eval_step_on(
        &mut self,
        state: &CheckpointState,
        inputs: StepInputs<'_>,
        deliver: &mut OutputSink<'_>,
    ) -> Result<()> {
        let eval = self.eval.as_mut().ok_or_else(|| no_eval_model("an evaluation step"))?;
        let mut planes = binding::planes(state, &self.gradients);
        let (entry, scalars) = (ProgramEntry::Accumulate, scalars(state, self.rank));
        if !self.detect_anomaly {
            let (how, trace) = ((entry, scalars), self.trace.as_mut());
            let runners = eval.executables_for(inputs, planes.len(), &self.backend);
            planes.extend(inputs.in_place_memories());
            let run = runners.run_traced(&mut self.work, &planes, how, trace, inputs.copied_values, deliver);
            drop(planes);
            return run.map_err(|error| self.explain_with_copies(error, inputs, false));
        }
        let inputs = inputs.copied_values;
        let mut finding = None;
        let outputs = &eval.outputs;
        let run = eval.executables.run_traced(
            &mut self.work,
            &planes,
            (entry, scalars),
            self.trace.as_mut(),
            inputs,
            &mut |k, value| {
                if finding.is_none() {
                    finding = anomaly::check_result(k, &outputs[k].name, value)?;
                }
                deliver(k, value)
            },
        );
        if let Err(error) = run {
            drop(planes);
            return Err(self.add_sufficient_limit(error, inputs, false));
        }
        let Some(eval) = &self.eval else { return Ok(()) };
        let Some(finding) = finding else { return Ok(()) };
        let (runners, backend, layout) = (&eval.executables, &self.backend, &*self.layout);
        let again = Replay {
            executables: runners,
            backend,
            planes: &planes,
            gradient_mode: entry,
            scalars,
            inputs,
            layout,
        };
        Err(Error::Anomaly(Box::new(Anomaly { finding, path: again.trace_origin()? })))
    }

    /// Runs an evaluation step and writes the results to memory of the caller, in the order of
    /// [`Module::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// use ortrain::OutputTarget;
    ///
    /// let mut loss = [0.0];
    /// module.eval_step_into(&state, &inputs, &mut [OutputTarget::f32(&[], &mut loss)])?;
    /// assert!(loss[0] > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Module::eval_step`]; also if number, types or shapes of `outputs` do not match the results.
    pub fn eval_step_into(
        &mut self,
        state: &CheckpointState,
        inputs: &[InputView<'_>],
        outputs: &mut [OutputTarget<'_>],
    ) -> Result<()> {
        self.check_state(state)?;
        let eval = self.eval.as_mut().ok_or_else(|| no_eval_model("an evaluation step"))?;
        eval.check(inputs)?;
        eval.check_outputs(&self.work, inputs, outputs)?;
        let mut fill = OutputWriter::new(outputs);
        self.eval_step(state, inputs, &mut |k, value| fill.write(k, value))?;
        fill.finish(self.outputs(false))
    }
}
