//! A training behind one value.

use std::borrow::BorrowMut;
use std::path::Path;

use ortrain_graph::Tensor;
use ortrain_program::{Deliver, Given};

use crate::{
    CheckpointState, Destination, Error, LinearLRScheduler, ModelSource, Module, ModuleOptions, Optimizer,
    Result, ValueInfo,
};

/// A state with its module, its optimizer and its scheduler: the training session of onnxruntime-training's C, C++ and
/// C# interfaces. `docs/csharp-training-session.md` has a table from each of its members to these.
///
/// `S` is the state itself, which the session then owns (and gives back by [`TrainingSession::into_state`]), or a
/// `&mut` to it. A session that lives where its state cannot be borrowed for long, behind a lock, say, is taken apart
/// between calls: [`TrainingSession::detach`].
///
/// ```
/// use ortrain::artifacts::{ArtifactOptions, Loss, OptimizerKind, generate};
/// use ortrain::{CheckpointState, Given, ModelSource, ModuleOptions, Tensor, TrainingSession};
///
/// // Usually files; here they are made on the spot, of a perceptron with 64 inputs and 10 classes.
/// let made = generate(
///     "../../examples/perceptron.onnx".into(),
///     ArtifactOptions {
///         requires_grad: ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"].map(String::from).into(),
///         losses: vec![Loss::CrossEntropyLoss.into()],
///         optimizer: Some(OptimizerKind::AdamW),
///         ..ArtifactOptions::default()
///     },
/// )?;
/// let folder = std::env::temp_dir().join(format!("ortrain-session-{}", std::process::id()));
/// std::fs::create_dir_all(&folder)?;
/// made.write(&folder, "")?;
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
/// let inputs = [Given::from(&x), Given::from(&labels)];
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

/// A [`TrainingSession`] without its state, made by [`TrainingSession::detach`].
#[derive(Debug)]
pub struct DetachedSession {
    module: Module,
    optimizer: Option<Optimizer>,
    scheduler: Option<LinearLRScheduler>,
}

impl DetachedSession {
    /// A session again, on the state that it was made on.
    ///
    /// Nothing is checked here: with another state, steps are an error.
    #[must_use]
    pub fn attach<S: BorrowMut<CheckpointState>>(self, state: S) -> TrainingSession<S> {
        TrainingSession { state, parts: self }
    }
}

impl<S: BorrowMut<CheckpointState>> TrainingSession<S> {
    /// A session on a state. The training model is needed; the evaluation model for [`TrainingSession::eval_step`] and
    /// [`TrainingSession::export_model_for_inferencing`], the optimizer model for steps and learning rates. Each is a
    /// file or bytes.
    ///
    /// Gradients start at zero, and become those the state knows as the newest. Moments, the count of optimizer steps
    /// and the learning rate are the state's.
    ///
    /// # Errors
    /// When a model cannot be read or run, or does not fit the state. The state's newest gradients are then those that
    /// they were.
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

    /// Computes the outputs and the gradients; the outputs in the order of [`TrainingSession::output_names`].
    ///
    /// Gradients are added to those there are, or replace them in the first step after
    /// [`TrainingSession::lazy_reset_grad`]. No parameter that is trained changes.
    ///
    /// # Errors
    /// When the inputs do not fit, the state is nominal, or the run fails; nothing has changed then.
    pub fn train_step(&mut self, inputs: &[Given<'_>]) -> Result<Vec<Tensor>> {
        let (module, state) = (&mut self.parts.module, self.state.borrow_mut());
        collect(|deliver| module.train_step(state, inputs, deliver))
    }

    /// [`TrainingSession::train_step`] with outputs that go to memory of the caller. A warm step takes no other.
    ///
    /// ```
    /// # use ortrain::artifacts::{ArtifactOptions, Loss, generate};
    /// # use ortrain::{CheckpointState, Destination, Given, ModelSource, ModuleOptions, Tensor, TrainingSession};
    /// # let made = generate(
    /// #     "../../examples/perceptron.onnx".into(),
    /// #     ArtifactOptions {
    /// #         requires_grad: vec!["fc2.weight".into()],
    /// #         losses: vec![Loss::CrossEntropyLoss.into()],
    /// #         additional_output_names: vec!["logits".into()],
    /// #         ..ArtifactOptions::default()
    /// #     },
    /// # )?;
    /// # let state = CheckpointState::from_bytes(made.checkpoint_bytes()?)?;
    /// # let train = ModelSource::from_proto(&made.training_model)?;
    /// # let mut session = TrainingSession::new(state, train, None, None, ModuleOptions::default())?;
    /// # let (x, labels) = (Tensor::f32(&[2, 64], &[0.5; 128]), Tensor::i64(&[2], &[3, 4]));
    /// # let inputs = [Given::from(&x), Given::from(&labels)];
    /// assert_eq!(session.output_names(true)[1], "logits");
    /// let (mut loss, mut logits) = ([0.0], [0.0; 20]);
    /// session.train_step_into(
    ///     &inputs,
    ///     &mut [Destination::f32(&[], &mut loss), Destination::f32(&[2, 10], &mut logits)],
    /// )?;
    /// assert!(loss[0] > 0.0);
    /// # Ok::<(), ortrain::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`TrainingSession::train_step`]; when the number, the types or the shapes of `outputs` are not those of the
    /// results.
    pub fn train_step_into(&mut self, inputs: &[Given<'_>], outputs: &mut [Destination<'_>]) -> Result<()> {
        self.parts.module.train_step_into(self.state.borrow_mut(), inputs, outputs)
    }

    /// Computes the outputs of the evaluation model, in the order of [`TrainingSession::output_names`].
    ///
    /// # Errors
    /// When there is no evaluation model, the inputs do not fit, the state is nominal, or the run fails.
    pub fn eval_step(&mut self, inputs: &[Given<'_>]) -> Result<Vec<Tensor>> {
        let (module, state) = (&mut self.parts.module, self.state.borrow());
        collect(|deliver| module.eval_step(state, inputs, deliver))
    }

    /// [`TrainingSession::eval_step`] with outputs that go to memory of the caller.
    ///
    /// # Errors
    /// As there; when the number, the types or the shapes of `outputs` are not those of the results.
    pub fn eval_step_into(&mut self, inputs: &[Given<'_>], outputs: &mut [Destination<'_>]) -> Result<()> {
        self.parts.module.eval_step_into(self.state.borrow(), inputs, outputs)
    }

    /// Says that the next train step shall replace the gradients and not add to them. Until then they stay as they are,
    /// and an optimizer step uses them.
    pub fn lazy_reset_grad(&mut self) {
        self.parts.module.lazy_reset_grad();
    }

    /// Updates the parameters with the gradients, which stay as they are.
    ///
    /// # Errors
    /// When there is no optimizer model, the state is nominal, or the run fails.
    pub fn optimizer_step(&mut self) -> Result<()> {
        let optimizer = self.parts.optimizer.as_mut().ok_or(Error::NoOptimizer("an optimizer step"))?;
        optimizer.step(self.state.borrow_mut(), &self.parts.module)
    }

    /// The learning rate of the next optimizer step; 0.001 unless it was set, scheduled or loaded.
    ///
    /// # Errors
    /// When there is no optimizer model.
    pub fn learning_rate(&self) -> Result<f32> {
        let optimizer = self.parts.optimizer.as_ref().ok_or(Error::NoOptimizer("a learning rate"))?;
        optimizer.learning_rate(self.state.borrow())
    }

    /// Sets the learning rate.
    ///
    /// # Errors
    /// When there is no optimizer model, or a scheduler is registered, which decides the learning rate.
    pub fn set_learning_rate(&mut self, learning_rate: f32) -> Result<()> {
        let optimizer = self.parts.optimizer.as_mut().ok_or(Error::NoOptimizer("a learning rate"))?;
        if self.parts.scheduler.is_some() {
            return Err(Error::State(
                "the learning rate cannot be set: a linear learning rate scheduler is registered, which sets it at \
                 every scheduler step"
                    .into(),
            ));
        }
        optimizer.set_learning_rate(self.state.borrow_mut(), learning_rate)
    }

    /// Lets [`TrainingSession::scheduler_step`] decide the learning rate, by the rule of [`LinearLRScheduler`]: up from
    /// zero in `warmup_step_count` optimizer steps, then down to zero until `total_step_count`. Until the first
    /// scheduler step the learning rate is `initial_lr`.
    ///
    /// ```
    /// # use ortrain::artifacts::{ArtifactOptions, Loss, OptimizerKind, generate};
    /// # use ortrain::{CheckpointState, ModelSource, ModuleOptions, TrainingSession};
    /// # let made = generate(
    /// #     "../../examples/perceptron.onnx".into(),
    /// #     ArtifactOptions {
    /// #         requires_grad: vec!["fc2.weight".into()],
    /// #         losses: vec![Loss::CrossEntropyLoss.into()],
    /// #         optimizer: Some(OptimizerKind::SGD),
    /// #         ..ArtifactOptions::default()
    /// #     },
    /// # )?;
    /// # let state = CheckpointState::from_bytes(made.checkpoint_bytes()?)?;
    /// # let train = ModelSource::from_proto(&made.training_model)?;
    /// # let optimizer = ModelSource::from_proto(&made.optimizer_model.unwrap())?;
    /// # let mut session = TrainingSession::new(state, train, None, Some(optimizer), ModuleOptions::default())?;
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
    /// When there is no optimizer model, or a scheduler is registered already.
    pub fn register_linear_lr_scheduler(
        &mut self,
        warmup_step_count: i64,
        total_step_count: i64,
        initial_lr: f32,
    ) -> Result<()> {
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
        let state = self.state.borrow_mut();
        let scheduler = LinearLRScheduler::register(state, warmup_step_count, total_step_count, initial_lr)?;
        self.parts.scheduler = Some(scheduler);
        Ok(())
    }

    /// Sets the learning rate for the number of optimizer steps done so far; there is no other counter.
    ///
    /// # Errors
    /// When no scheduler is registered.
    pub fn scheduler_step(&mut self) -> Result<()> {
        match &self.parts.scheduler {
            Some(scheduler) => scheduler.step(self.state.borrow_mut()),
            None => Err(Error::State(
                "no learning rate scheduler is registered; register a linear one before a scheduler step"
                    .into(),
            )),
        }
    }

    /// The number of elements of all parameters of the training model, or of those that are trained.
    #[must_use]
    pub fn parameters_size(&self, only_trainable: bool) -> usize {
        self.parts.module.parameters_size(self.state.borrow(), only_trainable)
    }

    /// The parameters one after the other, without gaps, in the order of the training model's inputs: a copy.
    ///
    /// # Errors
    /// When a parameter is not float32, or the state is nominal.
    pub fn to_buffer(&self, only_trainable: bool) -> Result<Vec<f32>> {
        self.parts.module.copy_parameters_to_buffer(self.state.borrow(), only_trainable)
    }

    /// Replaces the parameters by what [`TrainingSession::to_buffer`] returned. Without `only_trainable` the length says
    /// whether these are all parameters or those that are trained. All of them give a nominal state its values.
    ///
    /// # Errors
    /// When the buffer has another length or a parameter is not float32; when the state is nominal and only the
    /// parameters that are trained are given.
    pub fn from_buffer(&mut self, buffer: &[f32], only_trainable: Option<bool>) -> Result<()> {
        let only_trainable = match only_trainable {
            Some(only) => only,
            // Where nothing is frozen the two are one length, and the same values.
            None if buffer.len() == self.parameters_size(false) => false,
            None if buffer.len() == self.parameters_size(true) => true,
            None => {
                return Err(Error::Argument(format!(
                    "the buffer should have {} elements, all parameters, or {}, those that are trained, but it has {}",
                    self.parameters_size(false),
                    self.parameters_size(true),
                    buffer.len(),
                )));
            }
        };
        self.parts.module.copy_buffer_to_parameters(self.state.borrow_mut(), buffer, only_trainable)
    }

    /// Writes the evaluation model, cut down to the given outputs and with the parameters' current values inside: see
    /// [`Module::export_model_for_inferencing`].
    ///
    /// # Errors
    /// When there is no evaluation model, no output or an unknown one is named, the state is nominal, or the file cannot
    /// be written.
    pub fn export_model_for_inferencing(
        &self,
        path: impl AsRef<Path>,
        graph_output_names: &[&str],
    ) -> Result<()> {
        self.parts.module.export_model_for_inferencing(self.state.borrow(), path, graph_output_names)
    }

    /// What a train step, or an evaluation step, must be given, in order. Empty for an evaluation model that is not
    /// there.
    #[must_use]
    pub fn inputs(&self, training: bool) -> &[ValueInfo] {
        self.parts.module.inputs(training)
    }

    /// What a train step, or an evaluation step, makes, in order. Empty for an evaluation model that is not there.
    #[must_use]
    pub fn outputs(&self, training: bool) -> &[ValueInfo] {
        self.parts.module.outputs(training)
    }

    /// The names of [`TrainingSession::inputs`].
    #[must_use]
    pub fn input_names(&self, training: bool) -> Vec<&str> {
        self.parts.module.input_names(training)
    }

    /// The names of [`TrainingSession::outputs`].
    #[must_use]
    pub fn output_names(&self, training: bool) -> Vec<&str> {
        self.parts.module.output_names(training)
    }

    /// Sets the seed of random numbers, which is the state's: with it and the count of train steps, all are determined.
    pub fn set_seed(&mut self, seed: i64) {
        self.state.borrow_mut().set_seed(seed);
    }

    /// The state: parameters, properties, counts of steps.
    #[must_use]
    pub fn state(&self) -> &CheckpointState {
        self.state.borrow()
    }

    /// The state, to change parameters and properties.
    pub fn state_mut(&mut self) -> &mut CheckpointState {
        self.state.borrow_mut()
    }

    /// The module: gradients, memory, what runs.
    #[must_use]
    pub fn module(&self) -> &Module {
        &self.parts.module
    }

    /// The optimizer, if there is one.
    #[must_use]
    pub fn optimizer(&self) -> Option<&Optimizer> {
        self.parts.optimizer.as_ref()
    }

    /// Ends the session and gives the state back, with the optimizer's moments in it.
    #[must_use]
    pub fn into_state(self) -> S {
        self.state
    }

    /// Takes the session apart into the state and the rest, which goes on where it was when it is put together again.
    ///
    /// ```
    /// # use ortrain::artifacts::{ArtifactOptions, Loss, generate};
    /// # use ortrain::{CheckpointState, Given, ModelSource, ModuleOptions, Tensor, TrainingSession};
    /// # let made = generate(
    /// #     "../../examples/perceptron.onnx".into(),
    /// #     ArtifactOptions {
    /// #         requires_grad: vec!["fc2.weight".into()],
    /// #         losses: vec![Loss::CrossEntropyLoss.into()],
    /// #         ..ArtifactOptions::default()
    /// #     },
    /// # )?;
    /// # let state = CheckpointState::from_bytes(made.checkpoint_bytes()?)?;
    /// # let train = ModelSource::from_proto(&made.training_model)?;
    /// # let (x, labels) = (Tensor::f32(&[2, 64], &[0.5; 128]), Tensor::i64(&[2], &[3, 4]));
    /// # let inputs = [Given::from(&x), Given::from(&labels)];
    /// use std::sync::Mutex;
    ///
    /// let session = TrainingSession::new(state, train, None, None, ModuleOptions::default())?;
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

/// The results of a step as tensors.
fn collect(step: impl FnOnce(&mut Deliver<'_>) -> Result<()>) -> Result<Vec<Tensor>> {
    let mut results = Vec::new();
    step(&mut |_, dtype, dims, value| {
        let mut bytes = vec![0; dims.iter().product::<usize>() * dtype.size()];
        value.copy_to(&mut bytes);
        results
            .push(Tensor::new(dtype, dims.to_vec(), bytes.into()).expect("results have the bytes they need"));
    })?;
    Ok(results)
}
