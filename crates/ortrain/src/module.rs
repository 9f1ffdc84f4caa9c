//! A model in training.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use ortrain_graph::{DType, Graph};
use ortrain_onnx::LoadedModel;
use ortrain_ops::Role;
use ortrain_ops::passes::{infer::infer, updates::written, versions::upgrade};
use ortrain_program::{Backend, Deliver, Entry as ProgramEntry, Given, Memory, Scalars};

use crate::binding::{self, bind, parameter_of_gradient};
use crate::inputs::Signature;
use crate::runners::Runners;
use crate::state::{Entry, StateLayout, view_in, zeroed};
use crate::{CheckpointState, Error, ModelSource, ParameterView, Result, ValueInfo, default_backend, export};

/// How a [`Module`] is made.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ModuleOptions {
    /// What runs it; [`default_backend`] unless given.
    pub backend: Option<Arc<dyn Backend>>,
}

impl ModuleOptions {
    /// With this backend.
    #[must_use]
    pub fn backend(mut self, backend: Arc<dyn Backend>) -> ModuleOptions {
        self.backend = Some(backend);
        self
    }
}

/// A model that runs: its programs, what it takes, what it gives.
#[derive(Debug)]
struct Phase {
    runners: Runners,
    signature: Signature,
    outputs: Vec<ValueInfo>,
}

/// A training model, and perhaps the evaluation model of the same parameters, bound to a [`CheckpointState`].
///
/// The parameters lie in the state, which every call is given; the module owns the accumulated gradients and its
/// compiled programs. Several modules may be made on one state.
#[derive(Debug)]
pub struct Module {
    layout: Arc<StateLayout>,
    gradients: Vec<Arc<Memory>>,
    /// Parameters in the order of the training model's inputs.
    parameters: Vec<Arc<str>>,
    train: Phase,
    eval: Option<Phase>,
    eval_message: Option<LoadedModel>,
    backend: Arc<dyn Backend>,
    accumulate: bool,
    /// Whether a train step changes frozen parameters: running statistics.
    updates_frozen: bool,
}

/// Reads a model into a graph of the newest versions.
pub(crate) fn graph_of(label: &str, model: &LoadedModel) -> Result<Graph> {
    let mut graph = Graph::from_model(model).map_err(|source| Error::graph(label, source))?;
    upgrade(&mut graph).map_err(|source| Error::model(label, source))?;
    Ok(graph)
}

impl Phase {
    fn new(
        label: &str,
        mut graph: Graph,
        roles: Vec<Role>,
        training: bool,
        backend: &Arc<dyn Backend>,
    ) -> Result<Phase> {
        infer(&mut graph).map_err(|source| Error::model(label, source))?;
        if training {
            // Gradients and flags are not results.
            let hidden = |graph: &Graph, id| parameter_of_gradient(graph.name_of(id)).is_some();
            let kept = graph.outputs.iter().copied().filter(|&id| !hidden(&graph, id)).collect();
            graph.outputs = kept;
        }
        if graph.outputs.is_empty() {
            let reason = "it has no outputs, not even a loss".to_owned();
            return Err(Error::WrongModel { model: label.to_owned(), reason });
        }
        let info = |id| ValueInfo::of(label, &graph, id);
        let outputs = graph.outputs.iter().copied().map(info).collect::<Result<_>>()?;
        let given = graph.inputs.iter().zip(&roles).filter(|(_, role)| **role == Role::User);
        let inputs = given.map(|(&id, _)| info(id)).collect::<Result<_>>()?;
        let signature = Signature::new(inputs);
        Ok(Phase { runners: Runners::new(graph, roles, backend.clone()), signature, outputs })
    }
}

impl Module {
    /// A module of a training model on a state. `eval`, the evaluation model, is needed for [`Module::eval_step`] and
    /// [`Module::export_model_for_inferencing`].
    ///
    /// The inputs of the models are told apart by their names: parameters of the state; `<p>_grad.accumulation.buffer`
    /// (also `<p>_grad` and `<p>_grad.accumulation.out`), the gradient of parameter `p`; `lazy_reset_grad`; all others
    /// are given at each step, in the model's order.
    ///
    /// The gradients start at zero, and become those the state knows as the newest.
    ///
    /// # Errors
    /// When a model cannot be read or run, or does not fit the state.
    pub fn new(
        train: ModelSource,
        state: &mut CheckpointState,
        eval: Option<ModelSource>,
        options: ModuleOptions,
    ) -> Result<Module> {
        let backend = options.backend.unwrap_or_else(default_backend);
        let label = train.label("the training model");
        let mut graph = graph_of(&label, &train.load()?)?;
        binding::shapes_from(&graph, state)?;
        let bound = bind(&label, &mut graph, state, true)?;
        let train = Phase::new(&label, graph, bound.roles, true, &backend)?;

        let mut eval_message = None;
        let eval = match eval {
            None => None,
            Some(source) => {
                let label = source.label("the evaluation model");
                let message = source.load()?;
                let mut graph = graph_of(&label, &message)?;
                let bound = bind(&label, &mut graph, state, false)?;
                eval_message = Some(message);
                Some(Phase::new(&label, graph, bound.roles, false, &backend)?)
            }
        };
        let layout = state.shared_layout().cloned().ok_or(Error::NominalState)?;
        let is_frozen = |name| state.entry(name).is_some_and(|entry| !entry.requires_grad);
        let graph = train.runners.graph();
        let updates_frozen = written(graph).into_iter().any(|id| is_frozen(graph.name_of(id)));
        let gradients = zeroed(&layout.trainable)?;
        state.set_gradients(gradients.clone());
        Ok(Module {
            layout,
            gradients,
            parameters: bound.parameters,
            train,
            eval,
            eval_message,
            backend,
            accumulate: true,
            updates_frozen,
        })
    }

    /// Computes the outputs and the gradients. Gradients are added to those there are, or replace them in the first step
    /// after [`Module::lazy_reset_grad`]. Results come to `deliver` in the order of [`Module::outputs`].
    ///
    /// # Errors
    /// When the inputs do not fit, or the run fails; nothing has changed then.
    pub fn train_step(
        &mut self,
        state: &mut CheckpointState,
        inputs: &[Given<'_>],
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        self.check_state(state)?;
        self.train.signature.check(inputs)?;
        let entry = if self.accumulate { ProgramEntry::Accumulate } else { ProgramEntry::Overwrite };
        let planes = binding::planes(state, &self.gradients);
        self.train.runners.run(&planes, entry, scalars(state), inputs, deliver)?;
        drop(planes);
        self.accumulate = true;
        state.advance_train_step();
        if self.updates_frozen {
            state.bump_generation();
        }
        Ok(())
    }

    /// Computes the outputs of the evaluation model. Results come to `deliver` in the order of [`Module::outputs`].
    ///
    /// # Errors
    /// When there is no evaluation model, the inputs do not fit, or the run fails.
    pub fn eval_step(
        &mut self,
        state: &CheckpointState,
        inputs: &[Given<'_>],
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        self.check_state(state)?;
        let eval = self.eval.as_mut().ok_or(Error::NoEvalModel("an evaluation step"))?;
        eval.signature.check(inputs)?;
        let planes = binding::planes(state, &self.gradients);
        eval.runners.run(&planes, ProgramEntry::Accumulate, scalars(state), inputs, deliver)
    }

    /// Says that the next train step shall replace the gradients and not add to them. Until then they stay as they are.
    pub fn lazy_reset_grad(&mut self) {
        self.accumulate = false;
    }

    fn phase(&self, training: bool) -> Option<&Phase> {
        if training { Some(&self.train) } else { self.eval.as_ref() }
    }

    /// Whether there is an evaluation model.
    #[must_use]
    pub fn has_eval_model(&self) -> bool {
        self.eval.is_some()
    }

    /// What a step must be given, in order. Empty for an evaluation model that is not there.
    #[must_use]
    pub fn inputs(&self, training: bool) -> &[ValueInfo] {
        self.phase(training).map_or(&[], |phase| &phase.signature.infos)
    }

    /// What a step delivers, in order. Empty for an evaluation model that is not there.
    #[must_use]
    pub fn outputs(&self, training: bool) -> &[ValueInfo] {
        self.phase(training).map_or(&[], |phase| &phase.outputs)
    }

    /// The names of [`Module::inputs`].
    #[must_use]
    pub fn input_names(&self, training: bool) -> Vec<&str> {
        self.inputs(training).iter().map(|info| info.name.as_str()).collect()
    }

    /// The names of [`Module::outputs`].
    #[must_use]
    pub fn output_names(&self, training: bool) -> Vec<&str> {
        self.outputs(training).iter().map(|info| info.name.as_str()).collect()
    }

    /// The accumulated gradient of a parameter in this module; `None` if it is frozen or there is none of this name.
    #[must_use]
    pub fn gradient(&self, name: &str) -> Option<ParameterView> {
        self.layout.trainable.iter().zip(&self.gradients).find_map(|(plane, memory)| {
            let at = plane.tensors.binary_search_by(|tensor| (*tensor.name).cmp(name)).ok()?;
            let tensor = &plane.tensors[at];
            Some(ParameterView {
                name: tensor.name.clone(),
                dtype: plane.dtype,
                dims: tensor.dims.clone(),
                requires_grad: true,
                memory: memory.clone(),
                offset: tensor.offset,
            })
        })
    }

    /// The planes of the gradients, which mirror those of the parameters that are trained.
    #[must_use]
    pub fn gradient_planes(&self) -> &[Arc<Memory>] {
        &self.gradients
    }

    pub(crate) fn layout(&self) -> &Arc<StateLayout> {
        &self.layout
    }

    pub(crate) fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// The parameters of the training model, in the order of its inputs.
    fn packed<'a>(
        &'a self,
        state: &'a CheckpointState,
        trainable_only: bool,
    ) -> impl Iterator<Item = &'a Entry> {
        let known = self.parameters.iter().filter_map(|name| state.entry(name));
        known.filter(move |entry| entry.requires_grad || !trainable_only)
    }

    /// The number of elements of all parameters of the training model, or of those that are trained.
    #[must_use]
    pub fn parameters_size(&self, state: &CheckpointState, trainable_only: bool) -> usize {
        self.packed(state, trainable_only).map(Entry::elements).sum()
    }

    /// The parameters one after the other, without gaps, in the order of the training model's inputs.
    ///
    /// # Errors
    /// When a parameter is not float32, or the state is nominal.
    pub fn copy_parameters_to_buffer(
        &self,
        state: &CheckpointState,
        trainable_only: bool,
    ) -> Result<Vec<f32>> {
        self.check_state(state)?;
        let mut buffer = vec![0.0_f32; self.parameters_size(state, trainable_only)];
        let mut rest = buffer.as_mut_slice();
        for entry in self.packed(state, trainable_only) {
            packable(entry)?;
            let (part, after) = rest.split_at_mut(entry.elements());
            view_in(entry, state.memory_of(entry)).memory.read(entry.offset, bytemuck::cast_slice_mut(part));
            rest = after;
        }
        Ok(buffer)
    }

    /// Replaces the parameters by what [`Module::copy_parameters_to_buffer`] returned. With all parameters given, this is
    /// also how a nominal state gets its values.
    ///
    /// # Errors
    /// When the buffer has another length or a parameter is not float32; when the state is nominal, and only the
    /// parameters that are trained are given, or the model does not have all of its parameters.
    pub fn copy_buffer_to_parameters(
        &self,
        state: &mut CheckpointState,
        buffer: &[f32],
        trainable_only: bool,
    ) -> Result<()> {
        self.check_layout(state)?;
        if trainable_only {
            state.complete()?;
        }
        let expected = self.parameters_size(state, trainable_only);
        if buffer.len() != expected {
            return Err(Error::BufferLength { expected, found: buffer.len() });
        }
        self.packed(state, trainable_only).try_for_each(packable)?;
        if state.is_nominal() {
            if let Some(entry) = state.entries().iter().find(|entry| !self.parameters.contains(&entry.name)) {
                return Err(Error::State(format!(
                    "the state is nominal and stays so: the training model has no parameter {:?}, so the buffer has no \
                     value for it",
                    entry.name
                )));
            }
            state.finish_nominal()?;
        }
        let mut rest = buffer;
        for entry in self.packed(state, trainable_only) {
            let (part, after) = rest.split_at(entry.elements());
            state.memory_of(entry).write(entry.offset, bytemuck::cast_slice(part));
            rest = after;
        }
        if !trainable_only {
            state.bump_generation();
        }
        Ok(())
    }

    /// Writes the evaluation model, cut down to the given outputs and with the parameters' current values inside.
    ///
    /// Everything else stays as it is in the evaluation model: names, operator sets, metadata, order. Any value of the
    /// graph can be an output, also an intermediate one. Inputs that nothing needs any more go.
    ///
    /// # Errors
    /// When there is no evaluation model, no output or an unknown one is named, or the file cannot be written.
    pub fn export_model_for_inferencing(
        &self,
        state: &CheckpointState,
        path: impl AsRef<Path>,
        graph_output_names: &[&str],
    ) -> Result<()> {
        self.inference_model(state, graph_output_names)?.save(path)?;
        Ok(())
    }

    /// The model that [`Module::export_model_for_inferencing`] writes.
    ///
    /// # Errors
    /// As there, but for the file.
    pub fn inference_model(
        &self,
        state: &CheckpointState,
        graph_output_names: &[&str],
    ) -> Result<LoadedModel> {
        self.check_state(state)?;
        let message = self.eval_message.as_ref().ok_or(Error::NoEvalModel("an export"))?;
        let eval = self.eval.as_ref().ok_or(Error::NoEvalModel("an export"))?;
        export::inference_model(message, eval.runners.graph(), state, graph_output_names)
    }

    /// The graphs and the programs made so far, as text.
    #[must_use]
    pub fn dump(&self) -> String {
        let mut out = String::new();
        for (name, phase) in [("training", Some(&self.train)), ("evaluation", self.eval.as_ref())] {
            let Some(phase) = phase else { continue };
            let _ = writeln!(out, "{name} {}", phase.runners.graph());
            for schedule in phase.runners.schedules() {
                let _ = writeln!(out, "{name} {schedule}");
            }
        }
        out
    }

    /// An error if the state is nominal or has other parameters than the one the module was made on.
    pub(crate) fn check_state(&self, state: &CheckpointState) -> Result<()> {
        state.complete()?;
        self.check_layout(state)
    }

    fn check_layout(&self, state: &CheckpointState) -> Result<()> {
        match state.shared_layout() {
            Some(layout) if *layout == self.layout => Ok(()),
            _ => Err(Error::OtherState { what: "module" }),
        }
    }
}

fn packable(entry: &Entry) -> Result<()> {
    if entry.dtype == DType::F32 {
        return Ok(());
    }
    Err(Error::Argument(format!(
        "parameter {:?} is {}, but a packed buffer holds float32 only; read the parameter itself",
        entry.name, entry.dtype
    )))
}

fn scalars(state: &CheckpointState) -> Scalars {
    Scalars { seed: state.seed().cast_unsigned(), train_step: state.train_step_count() }
}
