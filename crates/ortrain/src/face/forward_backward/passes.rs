//! Forward and backward passes.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use ortrain_program::{
    Bindings, ForwardState, GradientMode, InputView, Memory, OutputSink, RunContext, RunError, Scalars,
    ScheduleExecutor,
};
use smallvec::SmallVec;

use super::{ForwardBackward, INLINE_PLANES, LiveForward, PassState, Planes, Prepared, lock_prepared};
use crate::exec::caller_memory::memory_span;
use crate::exec::over_limit;
use crate::{Error, OutputTarget, Result, TargetBytes};

impl ForwardBackward {
    /// Runs the model forward, and passes its outputs to `deliver`, in order.
    ///
    /// The returned [`LiveForward`] owns the activations for the backward pass. It refers to the weights,
    /// which must not change until then.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let batch = setup::batch();
    /// # let both = ortrain::ForwardBackward::new(setup::MODEL.into(), Default::default())?;
    /// # let memories = both.weights().iter().map(|weight| weight.to_memory()).collect::<Result<Vec<_>, _>>()?;
    /// let x = [ortrain::InputView::from(&batch[0])];
    /// let live = both.forward(&both.weight_views(&memories), &x, &mut |at, value| {
    ///     assert_eq!((at, value.dims), (0, &[2, 10][..]));
    ///     Ok(())
    /// })?;
    /// # drop(live);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If weights or inputs do not fit, the memory limit is too small, or the run fails.
    pub fn forward(
        &self,
        weights: &[InputView<'_>],
        inputs: &[InputView<'_>],
        deliver: &mut OutputSink<'_>,
    ) -> Result<LiveForward> {
        self.check_weights(weights)?;
        let runner = lock_prepared(&self.training).executor(inputs)?;
        let train_step = self.passes.fetch_add(1, Ordering::Relaxed);
        let scalars = Scalars { seed: self.seed, train_step };
        let mut live = self.begin_pass(weights)?;
        let pass = live.pass.as_mut().expect("the pass has just begun");
        pass.scalars = scalars;
        let planes = self.planes(&pass.weights, &[]);
        let bindings = Bindings { planes: &planes };
        let suspended = runner.run_before_yield(
            RunContext::new(&bindings, &mut pass.work, GradientMode::Overwrite, scalars),
            inputs,
            deliver,
        );
        drop(planes);
        pass.forward_state = suspended.map_err(|error| self.explain(&self.training, error, inputs))?;
        pass.executor = Some(runner);
        pass.bytes = pass.work.arena().len() + pass.work.scratch().len() + pass.forward_state.bytes();
        self.pool.live.fetch_add(pass.bytes, Ordering::Relaxed);
        Ok(live)
    }

    /// Runs the model backward. `output_gradients` are the gradients of the float outputs, in order.
    ///
    /// Writes the gradients of the weights to `gradients`, and passes the gradients of inputs to `deliver`,
    /// in the order of [`ForwardBackward::differentiable_inputs`]. Then frees the activations.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # use ortrain::{InputView, Tensor, collect};
    /// # let batch = setup::batch();
    /// # let both = ortrain::ForwardBackward::new(setup::MODEL.into(), Default::default())?;
    /// # let memories = both.weights().iter().map(|weight| weight.to_memory()).collect::<Result<Vec<_>, _>>()?;
    /// # let rooms = both.weights().iter().map(|weight| weight.allocate_gradient()).collect::<Result<Vec<_>, _>>()?;
    /// # let x = [InputView::from(&batch[0])];
    /// let mut live = both.forward(&both.weight_views(&memories), &x, &mut |_, _| Ok(()))?;
    /// let of_logits = Tensor::f32(&[2, 10], &[1.0; 20]);
    /// let seeds = [InputView::from(&of_logits)];
    /// let of_x = collect(|deliver| both.backward(&mut live, &seeds, &mut both.gradient_targets(&rooms), deliver))?;
    /// assert_eq!(of_x[0].dims(), [2, 64]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If a gradient has another type or shape than its output, or a gradient buffer does not fit its weight;
    /// then nothing has changed. If the forward pass was used before, or belongs to another model. If the run
    /// fails; then the forward pass cannot be used again.
    pub fn backward(
        &self,
        live: &mut LiveForward,
        output_gradients: &[InputView<'_>],
        gradients: &mut [OutputTarget<'_>],
        deliver: &mut OutputSink<'_>,
    ) -> Result<()> {
        if !Arc::ptr_eq(&live.pool, &self.pool) {
            return Err(Error::OtherState { what: "forward pass" });
        }
        self.check_targets(gradients)?;
        let Some(pass) = &live.pass else {
            return Err(Error::State(
                "the backward pass of this forward pass has run already; run the model forward again".into(),
            ));
        };
        // Slices of the caller receive copies.
        let copied = gradients.iter().filter(|target| matches!(target.bytes, TargetBytes::Host(_)));
        let copied: Vec<Memory> = copied
            .map(|target| Memory::try_new(target.dims.iter().product::<usize>() * target.dtype.size()))
            .collect::<std::result::Result<_, _>>()
            .map_err(RunError::from)?;
        let mut of_slices = copied.iter();
        let gradient_planes: Planes<'_> = gradients
            .iter()
            .map(|target| match target.bytes {
                TargetBytes::Host(_) => of_slices.next().expect("each slice has a copy"),
                TargetBytes::Memory(memory) => &**memory,
            })
            .collect();
        self.check_no_overlap(&pass.weights, &gradient_planes)?;
        let runner = pass.executor.clone().expect("a live pass has run");
        self.check_gradients(&runner, &pass.forward_state, output_gradients)?;
        let mut pass = live.pass.take().expect("the pass is live");
        let planes = self.planes(&pass.weights, &gradient_planes);
        let bindings = Bindings { planes: &planes };
        let suspended = std::mem::take(&mut pass.forward_state);
        let scalars = pass.scalars;
        let turn = RunContext::new(&bindings, &mut pass.work, GradientMode::Overwrite, scalars);
        let outcome = runner.run_after_yield(suspended, turn, output_gradients, deliver);
        drop((planes, gradient_planes));
        self.pool.recycle(pass);
        outcome?;
        let mut copied = copied.iter();
        for target in gradients {
            if let TargetBytes::Host(bytes) = &mut target.bytes {
                let memory = copied.next().expect("each slice has a copy");
                memory.read(0, bytes)?;
            }
        }
        Ok(())
    }

    /// Runs the evaluation graph, and passes its outputs to `deliver`, in order. Keeps no activations.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let batch = setup::batch();
    /// use ortrain::{ForwardBackward, ForwardBackwardOptions, InputView, collect};
    ///
    /// let both = ForwardBackward::new(setup::MODEL.into(), ForwardBackwardOptions::default())?;
    /// let memories = both.weights().iter().map(|weight| weight.to_memory()).collect::<Result<Vec<_>, _>>()?;
    /// let x = [InputView::from(&batch[0])];
    /// let logits = collect(|deliver| both.evaluate(&both.weight_views(&memories), &x, deliver))?;
    /// assert_eq!(logits[0].dims(), [2, 10]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`ForwardBackward::forward`].
    pub fn evaluate(
        &self,
        weights: &[InputView<'_>],
        inputs: &[InputView<'_>],
        deliver: &mut OutputSink<'_>,
    ) -> Result<()> {
        self.check_weights(weights)?;
        let evaluation = self.evaluation.as_ref().ok_or_else(|| self.no_model_error())?;
        let runner = lock_prepared(evaluation).executor(inputs)?;
        let mut live = self.begin_pass(weights)?;
        let pass = live.pass.as_mut().expect("the pass has just begun");
        let planes = self.planes(&pass.weights, &[]);
        let (bindings, scalars) = (Bindings { planes: &planes }, Scalars::default());
        let turn = RunContext::new(&bindings, &mut pass.work, GradientMode::Overwrite, scalars);
        let outcome = runner.run(turn, inputs, deliver);
        outcome.map_err(|error| self.explain(evaluation, error, inputs))
    }

    /// Starts a pass with these weights and a workspace of the size of the last one.
    pub(super) fn begin_pass(&self, weights: &[InputView<'_>]) -> Result<LiveForward> {
        let idle = self.pool.lock_idle().pop();
        let mut pass = idle.unwrap_or_else(|| {
            let work = self.run.workspace(&self.backend, self.parameter_bytes);
            let weights = Vec::with_capacity(self.weights.len());
            let (suspended, scalars) = (ForwardState::default(), Scalars::default());
            PassState { work, weights, forward_state: suspended, executor: None, scalars, bytes: 0 }
        });
        for weight in weights {
            pass.weights.push(match weight.memory() {
                Some(memory) => memory.clone(),
                None => {
                    let bytes = weight.to_host()?;
                    let memory = Memory::try_new(bytes.len()).map_err(RunError::from)?;
                    memory.write(0, &bytes)?;
                    Arc::new(memory)
                }
            });
        }
        pass.work.set_outside_bytes(self.parameter_bytes + self.live_bytes());
        self.pool.passes.fetch_add(1, Ordering::Relaxed);
        Ok(LiveForward { pass: Some(pass), pool: self.pool.clone() })
    }

    /// Returns the planes: weights, statistics and, in a backward pass, gradients.
    pub(super) fn planes<'a>(&'a self, weights: &'a [Arc<Memory>], gradients: &[&'a Memory]) -> Planes<'a> {
        let mut planes: Planes<'a> = weights.iter().map(|memory| &**memory).collect();
        planes.extend(self.statistics.iter().map(|(_, memory)| &**memory));
        planes.extend_from_slice(gradients);
        planes
    }

    pub(super) fn check_weights(&self, weights: &[InputView<'_>]) -> Result<()> {
        self.check_count(weights.len())?;
        for (weight, view) in self.weights.iter().zip(weights) {
            let memory = view.memory().map(|memory| &**memory);
            let bytes = memory.map_or_else(|| view.byte_count(), Memory::len);
            weight.check((view.dtype, view.dims), bytes, memory, "weight ")?;
        }
        Ok(())
    }

    /// Checks that there is a target for the gradient of each weight, with its type, shape and size.
    fn check_targets(&self, targets: &[OutputTarget<'_>]) -> Result<()> {
        self.check_count(targets.len())?;
        for (weight, target) in self.weights.iter().zip(targets) {
            let (bytes, memory) = match &target.bytes {
                TargetBytes::Host(bytes) => (bytes.len(), None),
                TargetBytes::Memory(memory) => (memory.len(), Some(&***memory)),
            };
            weight.check((target.dtype, target.dims), bytes, memory, "the gradient of ")?;
        }
        Ok(())
    }

    fn check_count(&self, count: usize) -> Result<()> {
        if count == self.weights.len() {
            return Ok(());
        }
        let names: Vec<&str> = self.weights.iter().map(|weight| weight.name.as_str()).collect();
        Err(Error::Argument(format!(
            "expected {} tensors, one for each weight ({}), got {count}",
            names.len(),
            names.join(", ")
        )))
    }

    /// Checks that gradient buffers are writable, and overlap neither a weight nor another gradient.
    pub(super) fn check_no_overlap(&self, weights: &[Arc<Memory>], gradients: &[&Memory]) -> Result<()> {
        let name = |k: usize| &self.weights[k].name;
        // Start, end, true if written, and index of the weight.
        let mut ranges: SmallVec<[(usize, usize, bool, usize); INLINE_PLANES]> = SmallVec::new();
        for (k, (weight, gradient)) in weights.iter().zip(gradients).enumerate() {
            if gradient.is_read_only() {
                return Err(Error::Argument(format!(
                    "the gradient of {:?} cannot be written: its memory is read-only; give it writable memory",
                    name(k)
                )));
            }
            let bytes = self.weights[k].initial.data().len();
            for (memory, is_written) in [(&**weight, false), (*gradient, true)] {
                let (start, end) = memory_span(memory, bytes);
                if start < end {
                    ranges.push((start, end, is_written, k));
                }
            }
        }
        ranges.sort_unstable();
        // Last end so far, of all spans and of the written ones, with the index of the weight.
        let mut last_end: Option<(usize, usize)> = None;
        let mut last_written = None;
        for (start, end, is_written, k) in ranges {
            let before = if is_written { last_end } else { last_written };
            if let Some((_, other)) = before.filter(|&(end, _)| start < end) {
                return Err(Error::Argument(format!(
                    "the gradient of {:?} would overwrite {:?} or its gradient, because they share memory; give \
                     each gradient its own memory",
                    name(k),
                    name(other)
                )));
            }
            last_end = last_end.max(Some((end, k)));
            last_written = if is_written { last_written.max(Some((end, k))) } else { last_written };
        }
        Ok(())
    }

    /// Checks that the gradients have the types and shapes of the outputs of the forward pass.
    pub(super) fn check_gradients(
        &self,
        runner: &ScheduleExecutor,
        suspended: &ForwardState,
        gradients: &[InputView<'_>],
    ) -> Result<()> {
        if gradients.len() != self.differentiable.len() {
            let names: Vec<&str> = self.differentiable_outputs().map(|info| info.name.as_str()).collect();
            return Err(Error::Argument(format!(
                "expected {} gradients, one for each float output ({}), got {}",
                names.len(),
                names.join(", "),
                gradients.len()
            )));
        }
        for (&k, gradient) in self.differentiable.iter().zip(gradients) {
            let info = &self.outputs[k];
            let (dtype, dims) = runner.yielded_type(suspended, k);
            let bytes = dims.iter().product::<usize>() * dtype.size();
            if gradient.dtype != dtype || gradient.dims != dims || gradient.byte_count() != bytes {
                return Err(Error::Argument(format!(
                    "the gradient of output {:?} is {}{:?}, but the output is {dtype}{dims:?}",
                    info.name, gradient.dtype, gradient.dims
                )));
            }
        }
        Ok(())
    }

    /// Rewrites the error of a run in terms of the model. Reports other live forward passes if they use the
    /// memory.
    pub(super) fn explain(
        &self,
        prepared: &Mutex<Prepared>,
        error: RunError,
        inputs: &[InputView<'_>],
    ) -> Error {
        let Prepared { executables: runners, signature, planning_workspace: plan } =
            &*lock_prepared(prepared);
        if let RunError::OverLimit(over) = &error
            && over.need.state > self.parameter_bytes
        {
            // The failing pass is counted, too.
            let other_passes = self.pool.passes.load(Ordering::Relaxed).saturating_sub(1);
            let bytes = over.need.state - self.parameter_bytes;
            let help = format!(
                "{bytes} of them belong to {other_passes} forward passes without a backward pass; run it, or drop them"
            );
            return Error::StepOverLimit { over: over.clone(), help };
        }
        over_limit::explain(runners.explain(error), runners, signature, plan, inputs)
    }
}
