//! Training steps.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ortrain_graph::Tensor;
use ortrain_program::{CommitGate, GradientMode as ProgramEntry, InputView, Memory, OutputSink, RunError};

use super::{Module, scalars};
use crate::exec::caller_memory::{copy_tensor, describe_tensors, is_read_in_place, memory_span};
use crate::exec::outputs::OutputWriter;
use crate::exec::step_inputs::{StepInputs, split_inputs};
use crate::state::binding::{self};
use crate::state::placement::Placement;
use crate::train::anomaly::{self, Replay};
use crate::train::not_finite::Anomaly;
use crate::{CheckpointState, Error, OutputTarget, Result};

impl Module {
    /// Computes the outputs and the gradients. Gradients accumulate, except that the first step after
    /// [`Module::lazy_reset_grad`] replaces them. Results are passed to `deliver` in the order of
    /// [`Module::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// let mut loss = [0; 4];
    /// module.train_step(&mut state, &inputs, &mut |at, value| {
    ///     assert_eq!((at, value.dtype, value.dims.len()), (0, ortrain::DType::F32, 0));
    ///     value.copy_to(&mut loss)
    /// })?;
    /// assert!(f32::from_le_bytes(loss) > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the inputs do not fit, or the run fails; then nothing has changed.
    pub fn train_step(
        &mut self,
        state: &mut CheckpointState,
        inputs: &[InputView<'_>],
        deliver: &mut OutputSink<'_>,
    ) -> Result<()> {
        self.check_state(state)?;
        self.train.check(inputs)?;
        self.run_train(state, StepInputs::all_copied(inputs), deliver)
            .map_err(|error| self.add_sufficient_limit(error, inputs, true))?;
        self.count_train_step(state);
        Ok(())
    }

    /// Runs [`Module::train_step`] on inputs that may lie on the module's device, where large floats are read in place.
    ///
    /// A program that is recorded on a device is recorded for each set of addresses, and the last four are kept. So give
    /// batches in few memories, in turn.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// use std::sync::Arc;
    ///
    /// use ortrain::{DType, InputView, Memory, Tensor};
    ///
    /// let (x, labels) = (Arc::new(Memory::new(16 * 64 * 4)), Tensor::i64(&[16], &[0; 16]));
    /// let inputs = [InputView::in_memory(DType::F32, &[16, 64], &x), InputView::from(&labels)];
    /// let results = ortrain::collect(|deliver| module.train_step_bound(&mut state, &inputs, deliver))?;
    /// assert!(results[0].to_vec::<f32>()[0] > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Module::train_step`].
    pub fn train_step_bound(
        &mut self,
        state: &mut CheckpointState,
        inputs: &[InputView<'_>],
        deliver: &mut OutputSink<'_>,
    ) -> Result<()> {
        let copies = self.copy_inputs(state, inputs, &[], true)?;
        let (copied, in_place) = split_inputs(inputs, &copies);
        self.train_step_on(state, StepInputs { copied_values: &copied, in_place: &in_place }, deliver)
    }

    /// Checks the inputs of a step, and copies the inputs that the step cannot read in place. `output_spans` are the
    /// addresses of memory that is written during the step.
    pub(crate) fn copy_inputs(
        &mut self,
        state: &CheckpointState,
        inputs: &[InputView<'_>],
        output_spans: &[(usize, usize)],
        training: bool,
    ) -> Result<Vec<Option<Tensor>>> {
        self.check_state(state)?;
        // Anomaly detection repeats the step on the same values.
        let stays_in_place = !self.detect_anomaly;
        let backend = self.backend.clone();
        let planes: Vec<(usize, usize)> = binding::planes(state, &self.gradients)
            .into_iter()
            .map(|plane| memory_span(plane, plane.len()))
            .collect();
        let phase = self.phase_mut(training)?;
        phase.check_described(&describe_tensors(inputs))?;
        let copy = |(k, input): (usize, &InputView<'_>)| {
            let Some(memory) = input.memory() else { return Ok(None) };
            let written_spans = planes.iter().chain(output_spans).copied();
            let is_in_place = stays_in_place
                && memory.device() == backend.device()
                && !phase.written_inputs.contains(&k)
                && is_read_in_place(input, written_spans);
            if is_in_place { Ok(None) } else { copy_tensor(input) }
        };
        inputs.iter().enumerate().map(copy).collect()
    }

    /// Runs a training step on inputs that [`Module::copy_inputs`] has checked.
    pub(crate) fn train_step_on(
        &mut self,
        state: &mut CheckpointState,
        inputs: StepInputs<'_>,
        deliver: &mut OutputSink<'_>,
    ) -> Result<()> {
        self.run_train(state, inputs, deliver)
            .map_err(|error| self.explain_with_copies(error, inputs, true))?;
        self.count_train_step(state);
        Ok(())
    }

    /// Runs [`Module::train_step_on`]. The gate is asked before the step changes state. If it refuses, nothing has changed.
    pub(crate) fn train_step_gated(
        &mut self,
        state: &mut CheckpointState,
        inputs: StepInputs<'_>,
        deliver: &mut OutputSink<'_>,
        mut gate: Box<dyn CommitGate>,
    ) -> Result<()> {
        if self.commits_within_run(inputs)? {
            self.work.set_gate(Some(gate));
            let run = self.train_step_on(state, inputs, deliver);
            self.work.set_gate(None);
            return run;
        }
        // Later segments of the run may fail, so the gate is asked after the run.
        let before = self.copy_written_planes(state)?;
        let run = self
            .run_train(state, inputs, deliver)
            .map_err(|error| self.explain_with_copies(error, inputs, true))
            .and_then(|()| Ok(gate.before_commit()?));
        if run.is_err() {
            before.iter().try_for_each(|(plane, bytes)| plane.write(0, bytes))?;
            return run;
        }
        self.count_train_step(state);
        Ok(())
    }

    /// Copies the planes that a training step writes: gradients and frozen parameters.
    pub(super) fn copy_written_planes(&self, state: &CheckpointState) -> Result<Vec<(Arc<Memory>, Vec<u8>)>> {
        let copy = |plane: &Arc<Memory>| Ok((plane.clone(), plane.to_vec(0, plane.len())?));
        self.gradients.iter().chain(state.frozen_planes()).map(copy).collect()
    }

    /// Returns true if nothing can fail in a step after its first write to state.
    pub(super) fn commits_within_run(&mut self, inputs: StepInputs<'_>) -> Result<bool> {
        if self.detect_anomaly {
            return Ok(false);
        }
        let planes = self.layout.trainable.len() + self.layout.frozen.len() + self.gradients.len();
        let runners = self.train.executables_for(inputs, planes, &self.backend);
        let executor = runners.executor(&self.work, inputs.copied_values);
        let executor = executor.map_err(|error| self.explain_with_copies(error, inputs, true))?;
        Ok(executor.schedule().single_program().is_some())
    }

    /// Explains an error of a step. The advice for a memory-limit error assumes that all inputs were copied.
    pub(super) fn explain_with_copies(&self, error: Error, inputs: StepInputs<'_>, training: bool) -> Error {
        let Error::Run(RunError::OverLimit(_)) = &error else { return error };
        if inputs.in_place.is_empty() {
            return self.add_sufficient_limit(error, inputs.copied_values, training);
        }
        let copy = |(at, input): &(usize, InputView<'_>)| Some((*at, copy_tensor(input).ok()??));
        let copies: Vec<(usize, Tensor)> = inputs.in_place.iter().filter_map(copy).collect();
        let mut all_inputs: Vec<InputView<'_>> = inputs.copied_values.to_vec();
        copies.iter().for_each(|(at, tensor)| all_inputs.insert(*at, InputView::from(tensor)));
        self.add_sufficient_limit(error, &all_inputs, training)
    }

    /// Runs a training step and writes the results to memory of the caller, in the order of
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
    /// module.train_step_into(&mut state, &inputs, &mut [OutputTarget::f32(&[], &mut loss)])?;
    /// assert!(loss[0] > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Module::train_step`]; also if number, types or shapes of `outputs` do not match the results. Then
    /// nothing has changed, except possibly the contents of `outputs`.
    pub fn train_step_into(
        &mut self,
        state: &mut CheckpointState,
        inputs: &[InputView<'_>],
        outputs: &mut [OutputTarget<'_>],
    ) -> Result<()> {
        self.check_state(state)?;
        self.train.check(inputs)?;
        let sure = (self.train.check_outputs(&self.work, inputs, outputs))
            .map_err(|error| self.add_sufficient_limit(error, inputs, true))?;
        // Data-dependent shapes are known after the step; if they do not fit, written memory is restored.
        let before = if sure { Vec::new() } else { self.copy_written_planes(state)? };
        let mut fill = OutputWriter::new(outputs);
        self.run_train(state, StepInputs::all_copied(inputs), &mut |k, value| fill.write(k, value))
            .map_err(|error| self.add_sufficient_limit(error, inputs, true))?;
        if let Err(error) = fill.finish(&self.train.outputs) {
            before.iter().try_for_each(|(plane, bytes)| plane.write(0, bytes))?;
            return Err(error);
        }
        self.count_train_step(state);
        Ok(())
    }

    /// Runs a training step without counting it.
    pub(super) fn run_train(
        &mut self,
        state: &CheckpointState,
        inputs: StepInputs<'_>,
        deliver: &mut OutputSink<'_>,
    ) -> Result<()> {
        // The first step overwrites zero gradients, so that resumed and uninterrupted training are
        // bit-identical.
        let accumulates = self.accumulate && !(self.is_new && self.gradients_are_zero()?);
        let entry = if accumulates { ProgramEntry::Accumulate } else { ProgramEntry::Overwrite };
        let mut planes = binding::planes(state, &self.gradients);
        let gradients = planes.len() - self.gradients.len()..planes.len();
        self.work.disposable_planes(if accumulates { 0..0 } else { gradients });
        let scalars = scalars(state, self.rank);
        if !self.detect_anomaly {
            let (how, trace) = ((entry, scalars), self.trace.as_mut());
            let runners = self.train.executables_for(inputs, planes.len(), &self.backend);
            planes.extend(inputs.in_place_memories());
            return runners.run_traced(&mut self.work, &planes, how, trace, inputs.copied_values, deliver);
        }
        let inputs = inputs.copied_values;
        // Frozen planes include running statistics.
        let written_range = self.layout.trainable.len()..planes.len();
        let placement = Placement::of(&self.backend);
        let copies = written_range
            .clone()
            .map(|k| placement.copy_plane(planes[k]))
            .collect::<Result<Vec<Memory>>>()?;
        let mut finding = None;
        let outputs = &self.train.outputs;
        self.train.executables.run(&mut self.work, &planes, entry, scalars, inputs, &mut |k, value| {
            if finding.is_none() {
                finding = anomaly::check_result(k, &outputs[k].name, value)?;
            }
            deliver(k, value)
        })?;
        let finding = match finding {
            Some(finding) => Some(finding),
            None => anomaly::check_planes(&self.layout, &planes)?,
        };
        let Some(finding) = finding else { return Ok(()) };
        for (k, copy) in written_range.clone().zip(&copies) {
            planes[k].write(0, &copy.to_vec(0, copy.len())?)?;
        }
        let first = written_range.start;
        let again: binding::Planes<'_> = planes[..first].iter().copied().chain(&copies).collect();
        let (runners, backend, layout) = (&self.train.executables, &self.backend, &*self.layout);
        let again = Replay {
            executables: runners,
            backend,
            planes: &again,
            gradient_mode: entry,
            scalars,
            inputs,
            layout,
        };
        Err(Error::Anomaly(Box::new(Anomaly { finding, path: again.trace_origin()? })))
    }

    pub(super) fn gradients_are_zero(&self) -> Result<bool> {
        for plane in &self.gradients {
            if !plane.is_zero()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Checks that the gradients have not been discarded by [`Module::lazy_reset_grad`].
    pub(crate) fn check_gradients(&self) -> Result<()> {
        if self.accumulate || self.is_new {
            return Ok(());
        }
        Err(Error::State(
            "there are no gradients to step with: the module ran no training step since its gradients were reset; call \
             it in training mode before each step of the optimizer"
                .into(),
        ))
    }

    /// Returns the number of training steps in the accumulated gradients.
    pub(crate) fn accumulated_step_count(&self) -> i64 {
        self.accumulated_steps
    }

    /// Records that an optimizer has stepped with the current gradients.
    pub(crate) fn mark_gradients_used(&self) {
        self.gradients_are_used.store(true, Ordering::Relaxed);
    }

    /// Returns the reason if an optimizer step would probably be a mistake. Either all gradients are zero
    /// since no training step has run, or the previous step used the same gradients.
    #[must_use]
    pub fn gradient_warning(&self) -> Option<&'static str> {
        // The step itself reports a device failure.
        if self.is_new && self.gradients_are_zero().unwrap_or_default() {
            return Some("the module ran no training step yet, so all gradients are zero");
        }
        let used = self.gradients_are_used.load(Ordering::Relaxed);
        used.then_some("the previous step used the same gradients")
    }

    pub(super) fn count_train_step(&mut self, state: &mut CheckpointState) {
        self.accumulated_steps = if self.accumulate { self.accumulated_steps.saturating_add(1) } else { 1 };
        (self.accumulate, self.is_new) = (true, false);
        self.gradients_are_used.store(false, Ordering::Relaxed);
        state.advance_train_step();
        if self.updates_frozen {
            state.bump_generation();
        }
    }
}
