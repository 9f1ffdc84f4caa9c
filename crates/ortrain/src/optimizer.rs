//! Updating the parameters.

use std::sync::Arc;

use ortrain_graph::{DType, ValueType};
use ortrain_ops::Role;
use ortrain_ops::passes::infer::infer;
use ortrain_ops::training::{check_sequences, clips_gradients, moments_of_optimizer};
use ortrain_program::{Entry, Given, Scalars, Workspace};

use crate::binding::{Planes, sequence};
use crate::module::graph_of;
use crate::runners::Runners;
use crate::state::{Group, StateLayout};
use crate::{CheckpointState, Error, FileKind, ModelSource, Module, Result};

/// The inputs of an optimizer model: two scalars, then sequences.
const SCALARS: [&str; 2] = ["learning_rate", "step"];
const SEQUENCES: [&str; 4] = ["params", "gradients", "first_order_moments", "second_order_moments"];

/// An optimizer model bound to a [`CheckpointState`].
///
/// Learning rate, step counter and moments lie in the state: a second optimizer on it continues where this one is.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::Given::from);
/// let before = state.parameter("fc2.bias")?.to_tensor();
/// module.train_step(&mut state, &inputs, &mut |_, _, _, _| {})?;
/// optimizer.step(&mut state, &module)?;
/// assert_ne!(state.parameter("fc2.bias")?.to_tensor(), before);
/// assert_eq!(state.optimizer_step_count(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Optimizer {
    layout: Arc<StateLayout>,
    runners: Runners,
    work: Workspace,
    moments: usize,
    /// Whether the model clips the gradients by their norm.
    clips: bool,
}

impl Optimizer {
    /// An optimizer on a state. Moments that the state does not have yet are made, all zero.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let made = setup::artifacts()?;
    /// use ortrain::{ModelSource, Optimizer};
    ///
    /// let model = ModelSource::from_proto(&made.optimizer_model.unwrap())?;
    /// let optimizer = Optimizer::new(model, &mut state, &module)?;
    /// assert_eq!(optimizer.learning_rate(&state)?, 0.001);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the model cannot be read, is no optimizer model, or the state has moments of another kind of optimizer.
    pub fn new(model: ModelSource, state: &mut CheckpointState, module: &Module) -> Result<Optimizer> {
        let label = model.label("the optimizer model");
        let wrong = |reason: String| Error::WrongModel { model: label.clone(), reason };
        let mut graph = graph_of(&label, &model.load()?)?;
        let moments = moments_of_optimizer(&graph).map_err(|source| match FileKind::of(&graph) {
            FileKind::OptimizerModel => Error::model(&label, source),
            kind => wrong(format!(
                "it is {}, and {source}; give the optimizer model that was made together with the checkpoint \
                 (optimizer_model.onnx)",
                kind.a_name()
            )),
        })?;
        let expected: Vec<&str> =
            SCALARS.into_iter().chain(SEQUENCES[..2 + moments].iter().copied()).collect();
        let actual: Vec<&str> = graph.inputs.iter().map(|&id| graph.name_of(id)).collect();
        if expected != actual {
            let (expected, actual) = (expected.join(", "), actual.join(", "));
            return Err(wrong(format!("its inputs should be {expected}, in this order, but are {actual}")));
        }
        for (k, &id) in graph.inputs.iter().enumerate() {
            let ty = &graph.value(id).ty;
            let fits = match k {
                0 => ty.dtype() == Some(DType::F32) && ty.shape().is_none_or(|shape| shape.rank() == 1),
                1 => ty.dtype() == Some(DType::I64) && ty.shape().is_none_or(|shape| shape.rank() == 1),
                _ => matches!(ty, ValueType::Sequence(_)),
            };
            if !fits {
                let wanted = ["float32[1]", "int64[1]"].get(k).unwrap_or(&"a sequence of tensors");
                return Err(wrong(format!("input {:?} should be {wanted} but is {ty}", graph.name_of(id))));
            }
        }
        infer(&mut graph).map_err(|source| Error::model(&label, source))?;
        check_sequences(&graph).map_err(|source| Error::model(&label, source))?;
        if graph.outputs.is_empty() {
            return Err(wrong("it has no output that says whether it updated the parameters".into()));
        }

        let layout = module.layout().clone();
        if state.shared_layout().is_none_or(|own| *own != layout) {
            return Err(Error::OtherState { what: "module" });
        }
        state.prepare_moments(moments)?;
        let clips = clips_gradients(&graph);
        // Planes: parameters, gradients, then each moment.
        let count = layout.trainable.len();
        let mut roles = vec![Role::User, Role::User];
        roles.extend((0..2 + moments).map(|k| sequence(&layout.trainable, k * count)));
        let runners = Runners::new(graph, roles, module.backend().clone());
        // An update is over soon, and what it overwrites would have to be kept to put it back: it is not interrupted.
        let work = Workspace::new();
        Ok(Optimizer { layout, runners, work, moments, clips })
    }

    /// Updates the parameters with the gradients of a module. These stay as they are, unless the optimizer model clips them:
    /// then they are the clipped ones. Returns the L2 norm that they had together, if the model clips them by it.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// module.train_step(&mut state, &inputs, &mut |_, _, _, _| {})?;
    /// optimizer.step(&mut state, &module)?;
    /// assert_eq!(state.optimizer_step_count(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the state is nominal or not the one the optimizer was made on, when no train step ran since
    /// [`Module::lazy_reset_grad`], or the run fails. Other steps that may not be meant so are told by
    /// [`Module::doubt_of_gradients`] before.
    pub fn step(&mut self, state: &mut CheckpointState, module: &Module) -> Result<Option<f64>> {
        module.check_state(state)?;
        if *module.layout() != self.layout {
            return Err(Error::OtherState { what: "optimizer" });
        }
        module.check_gradients()?;
        if state.group().is_none_or(|group| group.moment_planes(self.moments - 1).is_empty()) {
            state.prepare_moments(self.moments)?;
        }
        let norm = self.clips.then(|| module.gradient_norm(state));
        let group = known(state)?;
        let rate = group.learning_rate.to_le_bytes();
        let step = group.step.saturating_add(1).to_le_bytes();
        let given = [
            Given { dtype: DType::F32, dims: &[1], bytes: &rate },
            Given { dtype: DType::I64, dims: &[1], bytes: &step },
        ];
        let moments = (0..self.moments).flat_map(|k| group.moment_planes(k));
        let planes: Planes<'_> = state
            .trainable_planes()
            .iter()
            .chain(module.gradient_planes())
            .chain(moments)
            .map(|plane| &**plane)
            .collect();
        let mut updated = [0_u8];
        self.runners.run(
            &mut self.work,
            &planes,
            Entry::Accumulate,
            Scalars::default(),
            &given,
            &mut |k, dtype, _, value| {
                if k == 0 && dtype == DType::Bool {
                    value.copy_to(&mut updated);
                }
            },
        )?;
        drop(planes);
        module.use_gradients();
        if let (Some(group), true) = (state.group_mut(), updated[0] != 0) {
            group.step = group.step.saturating_add(1);
        }
        Ok(norm)
    }

    /// The learning rate of the next step; 0.001 unless it was set or loaded.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// assert_eq!(optimizer.learning_rate(&state)?, 0.001);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the state is not the one the optimizer was made on.
    pub fn learning_rate(&self, state: &CheckpointState) -> Result<f32> {
        known(state).map(|group| group.learning_rate)
    }

    /// The number of steps done, those before the state was saved and loaded among them.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// assert_eq!(optimizer.step_count(&state)?, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the state is not the one the optimizer was made on.
    pub fn step_count(&self, state: &CheckpointState) -> Result<i64> {
        known(state).map(|group| group.step)
    }

    /// Sets the learning rate. Schedulers set it again.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// optimizer.set_learning_rate(&mut state, 0.5)?;
    /// assert_eq!(optimizer.learning_rate(&state)?, 0.5);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the state is not the one the optimizer was made on, or the rate is negative, infinite or no number.
    pub fn set_learning_rate(&mut self, state: &mut CheckpointState, learning_rate: f32) -> Result<()> {
        check_rate("the learning rate", learning_rate)?;
        state.group_mut().ok_or(Error::OtherState { what: "optimizer" })?.learning_rate = learning_rate;
        Ok(())
    }

    /// The programs made so far, as text.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// assert!(optimizer.dump().contains("AdamWOptimizer"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn dump(&self) -> String {
        let schedules: String =
            self.runners.schedules().map(|schedule| schedule.to_string() + "\n").collect();
        format!("{}\n{schedules}", self.runners.graph())
    }
}

/// Checks that a learning rate is one.
///
/// # Errors
/// When it is negative, infinite or no number: a step would go uphill, or leave nothing of the parameters.
pub(crate) fn check_rate(what: &str, rate: f32) -> Result<()> {
    if rate.is_finite() && rate >= 0.0 {
        return Ok(());
    }
    Err(Error::Argument(format!("{what} is {rate}, but a rate is a finite number that is not negative")))
}

fn known(state: &CheckpointState) -> Result<&Group> {
    state.group().ok_or(Error::OtherState { what: "optimizer" })
}
