//! A training session: state, module, optimizer and scheduler in one value.

use std::borrow::BorrowMut;
use std::path::Path;

use ortrain_graph::Tensor;
use ortrain_program::InputView;

use crate::train::optim::OptimizerSpec;
use crate::{
    CheckpointState, Error, ExportOptions, LinearLRScheduler, LrScheduler, ModelSource, Module,
    ModuleOptions, Optimizer, OutputTarget, Result, Schedule, ValueInfo, collect,
};

/// A state with its module, its optimizer and its scheduler: the training session of onnxruntime-training's
/// C, C++ and C# interfaces. `docs/csharp-training-session.md` has a table of its members and their
/// counterparts here.
///
/// `S` is the state itself, which the session then owns (and returns by [`TrainingSession::into_state`]), or
/// a `&mut` to it. If the state can only be borrowed for a short time (for example behind a lock), separate
/// the session between calls: [`TrainingSession::detach`].
///
/// ```
/// use ortrain::artifacts::{ArtifactOptions, Loss, OptimizerKind, generate};
/// use ortrain::{CheckpointState, InputView, ModelSource, ModuleOptions, Tensor, TrainingSession};
///
/// // Usually files; here they are made on the spot, of a perceptron with 64 inputs and 10 classes.
/// let artifacts = generate(
///     "../../examples/perceptron.onnx".into(),
///     ArtifactOptions {
///         requires_grad: ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"].map(String::from).into(),
///         losses: vec![Loss::CrossEntropyLoss.into()],
///         optimizer: Some(OptimizerKind::AdamW.into()),
///         ..ArtifactOptions::default()
///     },
/// )?;
/// let folder = std::env::temp_dir().join(format!("ortrain-session-{}", std::process::id()));
/// std::fs::create_dir_all(&folder)?;
/// artifacts.write(&folder, "")?;
///
/// let state = CheckpointState::load(folder.join("checkpoint"))?;
/// let mut session = TrainingSession::new(
///     state,
///     folder.join("training_model.onnx").into(),
///     Some(folder.join("eval_model.onnx").into()),
///     Some(folder.join("optimizer_model.onnx").into()),
///     ModuleOptions::default(),
/// )?;
/// assert_eq!(session.input_names(true), ["x", "labels"]);
///
/// let x = Tensor::f32(&[2, 64], &[0.5; 128]);
/// let labels = Tensor::i64(&[2], &[3, 4]);
/// let inputs = [InputView::from(&x), InputView::from(&labels)];
/// let mut losses = Vec::new();
/// for _ in 0..5 {
///     losses.push(session.train_step(&inputs)?[0].to_vec::<f32>()[0]);
///     session.optimizer_step()?;
///     session.lazy_reset_grad();
/// }
/// assert!(losses[4] < losses[0]);
///
/// session.export_model_for_inferencing(folder.join("trained.onnx"), &["logits"])?;
/// session.into_state().save(folder.join("trained"), true)?;
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TrainingSession<S = CheckpointState> {
    state: S,
    parts: DetachedSession,
}

/// The scheduler of a session.
#[derive(Debug)]
enum SessionScheduler {
    /// Linear scheduler of onnxruntime-training.
    Linear(LinearLRScheduler),
    /// Any schedule.
    Schedule(LrScheduler),
}

fn no_scheduler_error() -> Error {
    Error::State("no learning rate scheduler is registered; register one before a scheduler step".into())
}

/// A [`TrainingSession`] without its state, created by [`TrainingSession::detach`].
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let mut session = setup::session()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::InputView::from);
/// let (mut state, detached) = session.detach();
/// state.set_property("epoch", 1);
/// let mut session = detached.attach(state);
/// session.train_step(&inputs)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DetachedSession {
    module: Module,
    optimizer: Option<Optimizer>,
    scheduler: Option<SessionScheduler>,
}

impl DetachedSession {
    /// Reconnects the session to the state on which it was created.
    ///
    /// The state is not checked here: with another state, steps are an error.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::session()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// let (mut state, detached) = session.detach();
    /// let mut session = detached.attach(&mut state);
    /// session.train_step(&inputs)?;
    /// drop(session);
    /// assert_eq!(state.train_step_count(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn attach<S: BorrowMut<CheckpointState>>(self, state: S) -> TrainingSession<S> {
        TrainingSession { state, parts: self }
    }
}

impl<S: BorrowMut<CheckpointState>> TrainingSession<S> {
    /// Creates a session on a state. Each model is a file or bytes.
    ///
    /// The training model is required. [`TrainingSession::eval_step`] and
    /// [`TrainingSession::export_model_for_inferencing`] require the evaluation model; steps and learning
    /// rates require the optimizer model.
    ///
    /// Gradients start at zero, and become the current gradients of the state. The state owns moments, the
    /// number of optimizer steps and the learning rate.
    ///
    /// A session that borrows its state:
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let artifacts = setup::artifacts()?;
    /// use ortrain::{CheckpointState, ModelSource, ModuleOptions, TrainingSession};
    ///
    /// let mut state = CheckpointState::from_checkpoint(artifacts.checkpoint)?;
    /// let train = ModelSource::from_proto(&artifacts.training_model)?;
    /// let session = TrainingSession::new(&mut state, train, None, None, ModuleOptions::default())?;
    /// assert!(session.optimizer().is_none());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If a model cannot be read or run, or does not fit the state. Then the current gradients of the state
    /// remain.
    pub fn new(
        mut state: S,
        train: ModelSource,
        eval: Option<ModelSource>,
        optimizer: Option<ModelSource>,
        options: ModuleOptions,
    ) -> Result<TrainingSession<S>> {
        let on: &mut CheckpointState = state.borrow_mut();
        let newest = on.newest_gradients().to_vec();
        let module = Module::new(train, on, eval, options)?;
        let optimizer = match optimizer.map(|source| Optimizer::new(source, on, &module)).transpose() {
            Ok(optimizer) => optimizer,
            Err(error) => {
                on.set_gradients(newest);
                return Err(error);
            }
        };
        Ok(DetachedSession { module, optimizer, scheduler: None }.attach(state))
    }

    /// Computes the outputs and the gradients. Returns the outputs in the order of
    /// [`TrainingSession::output_names`].
    ///
    /// Gradients accumulate, except that the first step after [`TrainingSession::lazy_reset_grad`] replaces
    /// them. Trained parameters do not change.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::session()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// let loss = session.train_step(&inputs)?[0].to_vec::<f32>()[0];
    /// assert!(loss > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the inputs do not fit, the state is nominal, or the run fails; then nothing has changed.
    pub fn train_step(&mut self, inputs: &[InputView<'_>]) -> Result<Vec<Tensor>> {
        let (module, state) = (&mut self.parts.module, self.state.borrow_mut());
        collect(|deliver| module.train_step(state, inputs, deliver))
    }

    /// Runs [`TrainingSession::train_step`] on inputs that may lie on the session's device: see
    /// [`Module::train_step_bound`].
    ///
    /// # Errors
    /// As [`TrainingSession::train_step`].
    pub fn train_step_bound(&mut self, inputs: &[InputView<'_>]) -> Result<Vec<Tensor>> {
        let (module, state) = (&mut self.parts.module, self.state.borrow_mut());
        collect(|deliver| module.train_step_bound(state, inputs, deliver))
    }

    /// Returns sentences about automatic choices of the last steps: see [`Module::take_notes`].
    #[must_use]
    pub fn take_notes(&mut self) -> Vec<String> {
        self.parts.module.take_notes()
    }

    /// Runs [`TrainingSession::train_step`] with outputs in memory of the caller. A warm step allocates no
    /// memory.
    ///
    /// ```
    /// # use ortrain::artifacts::{ArtifactOptions, Loss, generate};
    /// # use ortrain::{CheckpointState, InputView, OutputTarget, ModelSource, ModuleOptions, Tensor, TrainingSession};
    /// # let artifacts = generate(
    /// #     "../../examples/perceptron.onnx".into(),
    /// #     ArtifactOptions {
    /// #         requires_grad: vec!["fc2.weight".into()],
    /// #         losses: vec![Loss::CrossEntropyLoss.into()],
    /// #         additional_output_names: vec!["logits".into()],
    /// #         ..ArtifactOptions::default()
    /// #     },
    /// # )?;
    /// # let state = CheckpointState::from_bytes(artifacts.checkpoint_bytes()?)?;
    /// # let train = ModelSource::from_proto(&artifacts.training_model)?;
    /// # let mut session = TrainingSession::new(state, train, None, None, ModuleOptions::default())?;
    /// # let (x, labels) = (Tensor::f32(&[2, 64], &[0.5; 128]), Tensor::i64(&[2], &[3, 4]));
    /// # let inputs = [InputView::from(&x), InputView::from(&labels)];
    /// assert_eq!(session.output_names(true)[1], "logits");
    /// let (mut loss, mut logits) = ([0.0], [0.0; 20]);
    /// session.train_step_into(
    ///     &inputs,
    ///     &mut [OutputTarget::f32(&[], &mut loss), OutputTarget::f32(&[2, 10], &mut logits)],
    /// )?;
    /// assert!(loss[0] > 0.0);
    /// # Ok::<(), ortrain::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`TrainingSession::train_step`]; also if number, types or shapes of `outputs` do not match the
    /// results.
    pub fn train_step_into(
        &mut self,
        inputs: &[InputView<'_>],
        outputs: &mut [OutputTarget<'_>],
    ) -> Result<()> {
        self.parts.module.train_step_into(self.state.borrow_mut(), inputs, outputs)
    }

    /// Computes the outputs of the evaluation model, in the order of [`TrainingSession::output_names`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::session()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// assert!(session.eval_step(&inputs)?[0].to_vec::<f32>()[0] > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If there is no evaluation model, the inputs do not fit, the state is nominal, or the run fails.
    pub fn eval_step(&mut self, inputs: &[InputView<'_>]) -> Result<Vec<Tensor>> {
        let (module, state) = (&mut self.parts.module, self.state.borrow());
        collect(|deliver| module.eval_step(state, inputs, deliver).map_err(to_session_error))
    }

    /// Runs [`TrainingSession::eval_step`] on inputs that may lie on the session's device: see
    /// [`Module::train_step_bound`].
    ///
    /// # Errors
    /// As [`TrainingSession::eval_step`].
    pub fn eval_step_bound(&mut self, inputs: &[InputView<'_>]) -> Result<Vec<Tensor>> {
        let (module, state) = (&mut self.parts.module, self.state.borrow());
        collect(|deliver| module.eval_step_bound(state, inputs, deliver).map_err(to_session_error))
    }

    /// Runs [`TrainingSession::eval_step`] with outputs in memory of the caller.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::session()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// use ortrain::OutputTarget;
    ///
    /// let mut loss = [0.0];
    /// session.eval_step_into(&inputs, &mut [OutputTarget::f32(&[], &mut loss)])?;
    /// assert!(loss[0] > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`TrainingSession::eval_step`]; also if number, types or shapes of `outputs` do not match the
    /// results.
    pub fn eval_step_into(
        &mut self,
        inputs: &[InputView<'_>],
        outputs: &mut [OutputTarget<'_>],
    ) -> Result<()> {
        self.parts.module.eval_step_into(self.state.borrow(), inputs, outputs).map_err(to_session_error)
    }

    /// Makes the next training step replace the gradients instead of accumulating. Until then they remain,
    /// and an optimizer step uses them.
    pub fn lazy_reset_grad(&mut self) {
        self.parts.module.lazy_reset_grad();
    }

    /// Updates the parameters with the gradients. Returns the L2 norm of all gradients together, if the model
    /// clips them by it.
    ///
    /// The gradients remain unchanged, except that ONNX Runtime's optimizers replace them by the clipped
    /// ones.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::session()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// session.train_step(&inputs)?;
    /// session.optimizer_step()?;
    /// assert_eq!(session.state().optimizer_step_count(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If there is no optimizer model, the state is nominal, or the run fails.
    pub fn optimizer_step(&mut self) -> Result<Option<f64>> {
        let optimizer = self.parts.optimizer.as_mut().ok_or(Error::NoOptimizer("an optimizer step"))?;
        optimizer.step(self.state.borrow_mut(), &self.parts.module)
    }

    /// Returns the learning rate of the next optimizer step; 0.001 unless it was set, scheduled or loaded.
    ///
    /// # Errors
    /// If there is no optimizer model.
    pub fn learning_rate(&self) -> Result<f32> {
        let optimizer = self.parts.optimizer.as_ref().ok_or(Error::NoOptimizer("a learning rate"))?;
        optimizer.learning_rate(self.state.borrow())
    }

    /// Sets the learning rate.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::session()?;
    /// session.set_learning_rate(0.5)?;
    /// assert_eq!(session.learning_rate()?, 0.5);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If there is no optimizer model, or a registered scheduler controls the learning rate.
    pub fn set_learning_rate(&mut self, learning_rate: f32) -> Result<()> {
        let optimizer = self.parts.optimizer.as_mut().ok_or(Error::NoOptimizer("a learning rate"))?;
        if self.parts.scheduler.is_some() {
            return Err(Error::State(
                "the learning rate cannot be set: a learning rate scheduler is registered, which sets it at every scheduler \
                 step"
                    .into(),
            ));
        }
        optimizer.set_learning_rate(self.state.borrow_mut(), learning_rate)
    }

    /// Registers a [`LinearLRScheduler`] for [`TrainingSession::scheduler_step`]. The rate rises from zero in
    /// `warmup_step_count` optimizer steps, then falls to zero at `total_step_count`. It is `initial_lr`
    /// before the first scheduler step.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::session()?;
    /// session.register_linear_lr_scheduler(2, 4, 0.1)?;
    /// let mut rates = vec![session.learning_rate()?];
    /// for _ in 0..5 {
    ///     session.scheduler_step()?;
    ///     rates.push(session.learning_rate()?);
    ///     session.optimizer_step()?;
    /// }
    /// assert_eq!(rates, [0.1, 0.0, 0.05, 0.1, 0.05, 0.0]);
    /// # Ok::<(), ortrain::Error>(())
    /// ```
    ///
    /// # Errors
    /// If there is no optimizer model, a scheduler is already registered, or a count is negative.
    pub fn register_linear_lr_scheduler(
        &mut self,
        warmup_step_count: i64,
        total_step_count: i64,
        initial_lr: f32,
    ) -> Result<()> {
        self.check_unscheduled()?;
        let state = self.state.borrow_mut();
        let scheduler = LinearLRScheduler::register(state, warmup_step_count, total_step_count, initial_lr)?;
        self.parts.scheduler = Some(SessionScheduler::Linear(scheduler));
        Ok(())
    }

    /// Registers a schedule for [`TrainingSession::scheduler_step`], and sets the rate for the current number
    /// of steps. The factors of the schedule multiply `lr`.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::session()?;
    /// session.register_lr_scheduler("Exponential(gamma=0.5)".parse()?, 1.0)?;
    /// session.optimizer_step()?;
    /// session.scheduler_step()?;
    /// assert_eq!(session.learning_rate()?, 0.5);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If there is no optimizer model, a scheduler is already registered, or the schedule or the rate is
    /// invalid.
    pub fn register_lr_scheduler(&mut self, schedule: Schedule, lr: f32) -> Result<()> {
        self.check_unscheduled()?;
        let scheduler = LrScheduler::new(self.state.borrow_mut(), schedule, lr)?;
        self.parts.scheduler = Some(SessionScheduler::Schedule(scheduler));
        Ok(())
    }

    /// Registers the schedule of the saved state, with its memory. The rate remains as saved.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::session()?;
    /// session.register_lr_scheduler("Exponential(gamma=0.5)".parse()?, 1.0)?;
    /// let bytes = session.state().to_bytes(true)?;
    /// # let mut later = setup::session_on(ortrain::CheckpointState::from_bytes(bytes)?)?;
    /// later.resume_lr_scheduler()?;
    /// later.scheduler_step()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If there is no optimizer model, a scheduler is already registered, or the state has no schedule.
    pub fn resume_lr_scheduler(&mut self) -> Result<()> {
        self.check_unscheduled()?;
        let scheduler = LrScheduler::resume(self.state.borrow())?;
        self.parts.scheduler = Some(SessionScheduler::Schedule(scheduler));
        Ok(())
    }

    fn check_unscheduled(&self) -> Result<()> {
        if self.parts.optimizer.is_none() {
            return Err(Error::NoOptimizer("a learning rate scheduler"));
        }
        if self.parts.scheduler.is_some() {
            return Err(Error::State(
                "a learning rate scheduler is registered already; a session has one, so make another session on the \
                 same state for another scheduler"
                    .into(),
            ));
        }
        Ok(())
    }

    /// Returns the registered schedule; `None` for the linear one of
    /// [`TrainingSession::register_linear_lr_scheduler`], and before registration.
    #[must_use]
    pub fn schedule(&self) -> Option<&Schedule> {
        match &self.parts.scheduler {
            Some(SessionScheduler::Schedule(scheduler)) => Some(scheduler.schedule()),
            _ => None,
        }
    }

    /// Sets the learning rate for the current number of optimizer steps; there is no other counter.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::session()?;
    /// session.register_linear_lr_scheduler(4, 8, 1.0)?;
    /// session.optimizer_step()?;
    /// session.scheduler_step()?;
    /// assert_eq!(session.learning_rate()?, 0.25);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If no scheduler is registered.
    pub fn scheduler_step(&mut self) -> Result<()> {
        match &mut self.parts.scheduler {
            Some(SessionScheduler::Linear(scheduler)) => scheduler.step(self.state.borrow_mut()),
            Some(SessionScheduler::Schedule(scheduler)) => scheduler.step(self.state.borrow_mut()),
            None => Err(no_scheduler_error()),
        }
    }

    /// Runs [`TrainingSession::scheduler_step`] for a schedule that requires a metric, or the factor of a
    /// function.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::session()?;
    /// session.register_lr_scheduler("ReduceOnPlateau(factor=0.5, patience=0)".parse()?, 1.0)?;
    /// session.scheduler_step_with(0.9)?;
    /// session.scheduler_step_with(0.9)?;
    /// assert_eq!(session.learning_rate()?, 0.5);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If no scheduler is registered, its schedule requires no value, or the value is invalid.
    pub fn scheduler_step_with(&mut self, value: f64) -> Result<()> {
        match &mut self.parts.scheduler {
            Some(SessionScheduler::Schedule(scheduler)) => {
                scheduler.step_with(self.state.borrow_mut(), value)
            }
            Some(SessionScheduler::Linear(_)) => {
                Err(Error::Argument("a step of the linear learning rate scheduler takes no metric".into()))
            }
            None => Err(no_scheduler_error()),
        }
    }

    /// Returns the current settings of the optimizer and its groups of parameters.
    ///
    /// # Errors
    /// If there is no optimizer model.
    pub fn optimizer_spec(&self) -> Result<&OptimizerSpec> {
        let optimizer =
            self.parts.optimizer.as_ref().ok_or(Error::NoOptimizer("access to optimizer settings"))?;
        optimizer.spec(self.state.borrow())
    }

    /// Changes settings of the optimizer from the next step on, like [`Optimizer::change`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::session()?;
    /// let error = session.change_optimizer(|spec| spec.groups.clear()).unwrap_err().to_string();
    /// assert!(error.contains("are in its optimizer model"), "{error}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Optimizer::change`]; also if there is no optimizer model.
    pub fn change_optimizer(&mut self, change: impl FnOnce(&mut OptimizerSpec)) -> Result<()> {
        let optimizer =
            self.parts.optimizer.as_mut().ok_or(Error::NoOptimizer("access to optimizer settings"))?;
        optimizer.change(self.state.borrow_mut(), change)
    }

    /// Returns the number of elements of all parameters of the training model, or of the trained ones.
    #[must_use]
    pub fn parameters_size(&self, only_trainable: bool) -> usize {
        self.parts.module.parameters_size(self.state.borrow(), only_trainable)
    }

    /// Copies the parameters into one buffer, in the order of the training model's inputs.
    ///
    /// # Errors
    /// If a parameter is not float32, or the state is nominal.
    pub fn to_buffer(&self, only_trainable: bool) -> Result<Vec<f32>> {
        self.parts.module.copy_parameters_to_buffer(self.state.borrow(), only_trainable)
    }

    /// Replaces the parameters by a buffer of [`TrainingSession::to_buffer`].
    ///
    /// If `only_trainable` is `None`, the length determines if the buffer has all parameters or the trained
    /// ones. A buffer of all parameters gives a nominal state its values.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::session()?;
    /// let halved: Vec<f32> = session.to_buffer(true)?.iter().map(|element| element / 2.0).collect();
    /// session.from_buffer(&halved, Some(true))?;
    /// assert_eq!(session.to_buffer(true)?, halved);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the buffer has another length or a parameter is not float32. If the state is nominal and the buffer
    /// has trained parameters only.
    pub fn from_buffer(&mut self, buffer: &[f32], only_trainable: Option<bool>) -> Result<()> {
        let only_trainable = match only_trainable {
            Some(only) => only,
            // Without frozen parameters, both have the same length and values.
            None if buffer.len() == self.parameters_size(false) => false,
            None if buffer.len() == self.parameters_size(true) => true,
            None => {
                return Err(Error::Argument(format!(
                    "the buffer should have {} elements (all parameters) or {} (trained parameters), but it has {}",
                    self.parameters_size(false),
                    self.parameters_size(true),
                    buffer.len(),
                )));
            }
        };
        self.parts.module.copy_buffer_to_parameters(self.state.borrow_mut(), buffer, only_trainable)
    }

    /// Writes the evaluation model with only these outputs and with the current parameter values as
    /// initializers: see [`Module::export_model_for_inferencing`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::session()?;
    /// # let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("trained.onnx");
    /// session.export_model_for_inferencing(&path, &["logits"])?;
    /// assert!(path.exists());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If there is no evaluation model, no output or an unknown one is named, the state is nominal, or the
    /// file cannot be written.
    pub fn export_model_for_inferencing(
        &self,
        path: impl AsRef<Path>,
        graph_output_names: &[&str],
    ) -> Result<()> {
        let (module, state) = (&self.parts.module, self.state.borrow());
        module.export_model_for_inferencing(state, path, graph_output_names).map_err(to_session_error)
    }

    /// Exports like [`TrainingSession::export_model_for_inferencing`] with another threshold: see
    /// [`Module::export_with_external_data`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::session()?;
    /// # let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("trained.onnx");
    /// session.export_with_external_data(&path, &["logits"], 0)?;
    /// assert!(folder.path().join("trained.onnx.data").exists());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`TrainingSession::export_model_for_inferencing`].
    pub fn export_with_external_data(
        &self,
        path: impl AsRef<Path>,
        graph_output_names: &[&str],
        above: u64,
    ) -> Result<()> {
        let options = ExportOptions { above, ..ExportOptions::default() };
        self.export_with(path, graph_output_names, &options)
    }

    /// Exports like [`TrainingSession::export_model_for_inferencing`] with options: see [`Module::export_with`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::session()?;
    /// use ortrain::ExportOptions;
    ///
    /// # let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("trained.onnx");
    /// session.export_with(&path, &["logits"], &ExportOptions { embed: true, ..ExportOptions::default() })?;
    /// assert!(path.exists());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`TrainingSession::export_model_for_inferencing`].
    pub fn export_with(
        &self,
        path: impl AsRef<Path>,
        graph_output_names: &[&str],
        options: &ExportOptions,
    ) -> Result<()> {
        let (module, state) = (&self.parts.module, self.state.borrow());
        module.export_with(state, path, graph_output_names, options).map_err(to_session_error)
    }

    /// Returns the inputs of a training or evaluation step, in order. Empty without an evaluation model if
    /// `training` is false.
    #[must_use]
    pub fn inputs(&self, training: bool) -> &[ValueInfo] {
        self.parts.module.inputs(training)
    }

    /// Returns the outputs of a training or evaluation step, in order. Empty without an evaluation model if
    /// `training` is false.
    #[must_use]
    pub fn outputs(&self, training: bool) -> &[ValueInfo] {
        self.parts.module.outputs(training)
    }

    /// Returns the names of [`TrainingSession::inputs`].
    #[must_use]
    pub fn input_names(&self, training: bool) -> Vec<&str> {
        self.parts.module.input_names(training)
    }

    /// Returns the names of [`TrainingSession::outputs`].
    #[must_use]
    pub fn output_names(&self, training: bool) -> Vec<&str> {
        self.parts.module.output_names(training)
    }

    /// Sets the random seed of the state. Together with the number of training steps, it determines all
    /// random numbers.
    pub fn set_seed(&mut self, seed: i64) {
        self.state.borrow_mut().set_seed(seed);
    }

    /// Returns the state: parameters, properties, step counters.
    #[must_use]
    pub fn state(&self) -> &CheckpointState {
        self.state.borrow()
    }

    /// Returns the state, for changes of parameters and properties.
    pub fn state_mut(&mut self) -> &mut CheckpointState {
        self.state.borrow_mut()
    }

    /// Returns the module: gradients, memory, programs.
    #[must_use]
    pub fn module(&self) -> &Module {
        &self.parts.module
    }

    /// Returns the optimizer, if any.
    #[must_use]
    pub fn optimizer(&self) -> Option<&Optimizer> {
        self.parts.optimizer.as_ref()
    }

    /// Ends the session and returns the state, which includes the moments of the optimizer.
    #[must_use]
    pub fn into_state(self) -> S {
        self.state
    }

    /// Separates the session into the state and the rest. [`DetachedSession::attach`] reconnects them, and
    /// training continues.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let session = setup::session()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// use std::sync::Mutex;
    ///
    /// let (state, mut rest) = session.detach();
    /// let shared = Mutex::new(state);
    /// for _ in 0..2 {
    ///     let mut locked = shared.lock().unwrap();
    ///     let mut session = rest.attach(&mut *locked);
    ///     session.train_step(&inputs)?;
    ///     (_, rest) = session.detach();
    /// }
    /// assert_eq!(shared.lock().unwrap().train_step_count(), 2);
    /// # Ok::<(), ortrain::Error>(())
    /// ```
    #[must_use]
    pub fn detach(self) -> (S, DetachedSession) {
        (self.state, self.parts)
    }
}

/// Rewrites an error of the module in terms of its session.
fn to_session_error(error: Error) -> Error {
    match error {
        Error::NoEvalModel { call, .. } => Error::NoEvalModel { object: "session", call },
        error => error,
    }
}
