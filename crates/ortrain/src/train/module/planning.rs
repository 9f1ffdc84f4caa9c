//! Memory and profiles of steps.

use std::sync::Arc;
use std::time::Instant;

use ortrain_program::{
    Bindings, GradientMode as ProgramEntry, InputView, MemoryNeed, OutputSink, OutputView, RunContext,
    Schedule,
};

use super::{Module, no_eval_model, scalars};
use crate::exec::backend::limits_of;
use crate::exec::over_limit;
use crate::exec::profile::{Collector, ProductMode};
use crate::exec::step_inputs::StepInputs;
use crate::state::binding::{self};
use crate::state::placement::Placement;
use crate::{CheckpointState, Error, Profile, ProfileOptions, Result};

impl Module {
    /// Returns the memory need of a step on these inputs, without allocating it. Programs that are
    /// specialized during a run (after functions on the host) do not count.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// use ortrain::{InputView, Tensor};
    ///
    /// let mut of = |rows: usize| {
    ///     let (x, labels) = (Tensor::f32(&[rows, 64], &vec![0.0; rows * 64]), Tensor::i64(&[rows], &vec![0; rows]));
    ///     module.memory_need(&[InputView::from(&x), InputView::from(&labels)], true)
    /// };
    /// assert!(of(64)?.work > of(8)?.work);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Module::train_step`] or [`Module::eval_step`], without the errors of the run.
    pub fn memory_need(&mut self, inputs: &[InputView<'_>], training: bool) -> Result<MemoryNeed> {
        let phase = match training {
            true => &mut self.train,
            false => self.eval.as_mut().ok_or_else(|| no_eval_model("an evaluation step"))?,
        };
        phase.check(inputs)?;
        Ok(phase.executables.executor(&self.work, inputs)?.memory_need(&self.work))
    }

    /// Returns the schedule and the memory need of a step on inputs of these shapes, without running it.
    pub(crate) fn plan(&self, dims: &[&[usize]], training: bool) -> Result<(Arc<Schedule>, MemoryNeed)> {
        let phase = match training {
            true => &self.train,
            false => self.eval.as_ref().ok_or_else(|| no_eval_model("an evaluation step"))?,
        };
        phase.executables.plan(&self.work, dims)
    }

    /// Returns the inputs with values that decide shapes, as far as [`Module::planned`] has found them.
    pub(crate) fn shape_deciding_inputs(&self, training: bool) -> Vec<String> {
        let phase = if training { Some(&self.train) } else { self.eval.as_ref() };
        let positions = phase.map(|phase| phase.executables.shape_deciding_inputs()).unwrap_or_default();
        let names = self.input_names(training);
        positions.into_iter().filter_map(|k| names.get(k).map(|name| (*name).to_owned())).collect()
    }

    /// Profiles steps: the time of each instruction, beside the limit of the machine. The results of the last
    /// step are passed to `deliver`; they are bit-identical to a step without profile.
    ///
    /// These are real steps, but they change nothing: outputs of a step in place (gradients, running
    /// statistics) are written to copies, which take memory during the profile. Parameters, gradients,
    /// running statistics, the number of training steps and a pending [`Module::lazy_reset_grad`] remain
    /// unchanged.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// use ortrain::ProfileOptions;
    ///
    /// let options = ProfileOptions::default().steps(2);
    /// let profile = module.profile(&state, &inputs, options, &mut |_, _| Ok(()))?;
    /// assert_eq!(profile.steps.len(), 2);
    /// assert!(profile.instructions.iter().any(|instruction| instruction.kind == "MatMul"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Module::train_step`] or [`Module::eval_step`].
    pub fn profile(
        &mut self,
        state: &CheckpointState,
        inputs: &[InputView<'_>],
        options: ProfileOptions,
        deliver: &mut OutputSink<'_>,
    ) -> Result<Profile> {
        self.check_state(state)?;
        let real = binding::planes(state, &self.gradients);
        let phase = match options.training {
            true => &mut self.train,
            false => self.eval.as_mut().ok_or_else(|| no_eval_model("an evaluation step"))?,
        };
        phase.check(inputs)?;
        let entry = if self.accumulate || !options.training {
            ProgramEntry::Accumulate
        } else {
            ProgramEntry::Overwrite
        };
        // Gradients are written, and so are frozen planes with running statistics.
        let trainable = self.layout.trainable.len();
        let written_range = if options.training { trainable..real.len() } else { 0..0 };
        let placement = Placement::of(&self.backend);
        let copies =
            written_range.clone().map(|k| placement.copy_plane(real[k])).collect::<Result<Vec<_>>>()?;
        let mut planes: binding::Planes<'_> = real.iter().copied().collect();
        for (k, copy) in written_range.zip(&copies) {
            planes[k] = copy;
        }
        let bindings = Bindings { planes: &planes };
        let runner = phase.executables.executor(&self.work, inputs)?;
        let scalars = scalars(state, self.rank);
        for _ in 0..options.warmup {
            let turn = RunContext::new(&bindings, &mut self.work, entry, scalars);
            runner.run(turn, inputs, &mut |_, _| Ok(()))?;
        }
        let mut collector = Collector::new();
        for step in 0..options.steps {
            let start = Instant::now();
            let last = step + 1 == options.steps;
            let mut results = |at: usize, value: OutputView<'_>| {
                if last { deliver(at, value) } else { Ok(()) }
            };
            let turn =
                RunContext::new(&bindings, &mut self.work, entry, scalars).observed(Some(&mut collector));
            runner.run(turn, inputs, &mut results)?;
            collector.step(start, Instant::now());
        }
        let limits = limits_of(&*self.backend)?;
        let products = ProductMode { precision: self.precision, bf16_unit: self.backend.bf16_unit() };
        let planning = phase.executables.profile_planning(&self.work, inputs)?;
        Ok(collector.finish(limits, runner.memory_need(&self.work), planning, products))
    }

    /// Returns the shape of each result on inputs that [`Module::copies`] has checked; `None` for a
    /// data-dependent shape.
    pub(crate) fn output_shapes(
        &mut self,
        inputs: StepInputs<'_>,
        training: bool,
    ) -> Result<Vec<Option<Vec<usize>>>> {
        let planes = self.layout.trainable.len() + self.layout.frozen.len() + self.gradients.len();
        let phase = match training {
            true => &mut self.train,
            false => self.eval.as_mut().ok_or_else(|| no_eval_model("an evaluation step"))?,
        };
        let runners = phase.executables_for(inputs, planes, &self.backend);
        let runner = runners.executor(&self.work, inputs.copied_values)?;
        let schedule = runner.schedule();
        let shape = |slot: &ortrain_program::SlotId| {
            schedule.slots[slot.0 as usize].ty.as_ref().map(|(_, dims)| dims.clone())
        };
        Ok(schedule.outputs.iter().map(shape).collect())
    }

    /// Adds a sufficient limit to a memory-limit error of a step.
    pub(super) fn add_sufficient_limit(
        &self,
        error: Error,
        inputs: &[InputView<'_>],
        training: bool,
    ) -> Error {
        let Some(phase) = self.phase(training) else { return error };
        over_limit::explain(error, &phase.executables, &phase.signature, &self.work, inputs)
    }
}
