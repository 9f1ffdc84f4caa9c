//! Module, optimizer, scheduler. Each is used only under the lock of its state.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use ortrain::{ExportOptions, MemoryUse, OutputView, ProfileOptions};
use pyo3::prelude::*;

use crate::device::wrap_planes;
use crate::error::{raise, warn};
use crate::gil::Exclusive;
use crate::inputs::{step_inputs, views};
use crate::model::Source;
use crate::optim::spec_of;
use crate::records::{
    Instruction, MemoryBytes, ParameterNorms, Precision, QuantizedTensor, Update, ValueDescription,
    describe_values,
};
use crate::run_options::RunOptions;
use crate::state::CheckpointState;
use crate::value::{OrtValue, Results, float_elements, tensor_views, tensors, to_vector};

/// A value that is only accessed under the lock of a state, so its own lock is never contended.
#[derive(Debug)]
pub(crate) struct StateGuarded<T>(Mutex<T>);

impl<T> StateGuarded<T> {
    pub(crate) fn new(value: T) -> StateGuarded<T> {
        StateGuarded(Mutex::new(value))
    }

    /// Runs `work` on the value, under the lock of the state. After a panic, the lock of the state rejects
    /// all calls.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A training model on a state.
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct Module {
    state: Arc<Exclusive<ortrain::CheckpointState>>,
    module: Arc<StateGuarded<ortrain::Module>>,
}

impl Module {
    /// Runs `work` on the module and the state, under the lock.
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut ortrain::Module, &mut ortrain::CheckpointState) -> ortrain::Result<R> + Send,
    ) -> PyResult<R> {
        self.state.enter(py, |state| self.module.with(|module| work(module, state)))
    }
}

#[pymethods]
impl Module {
    #[new]
    #[pyo3(signature = (train_model, state, eval_model, *, options))]
    fn new(
        py: Python<'_>,
        train_model: Source,
        state: &CheckpointState,
        eval_model: Option<Source>,
        options: &RunOptions,
    ) -> PyResult<Module> {
        let options = options.of_module();
        let eval = eval_model.map(|source| source.0);
        let module =
            state.door.enter(py, |state| ortrain::Module::new(train_model.0, state, eval, options))?;
        Ok(Module { state: state.door.clone(), module: Arc::new(StateGuarded::new(module)) })
    }

    fn step(
        &self,
        py: Python<'_>,
        inputs: Vec<Bound<'_, OrtValue>>,
        training: bool,
    ) -> PyResult<Vec<OrtValue>> {
        let inputs = step_inputs(&inputs)?;
        let (results, notes) = self.with(py, |module, state| {
            let mut results = Results::default();
            let mut deliver = |at, value: OutputView<'_>| results.store(at, value);
            let inputs = views(&inputs);
            if training {
                module.train_step_bound(state, &inputs, &mut deliver)?;
            } else {
                module.eval_step_bound(state, &inputs, &mut deliver)?;
            }
            Ok((results.values(), module.take_notes()))
        })?;
        warn(py, &notes, CALLER_OF_STEP)?;
        Ok(results)
    }

    fn profile(
        &self,
        py: Python<'_>,
        inputs: Vec<Bound<'_, OrtValue>>,
        training: bool,
        steps: usize,
        warmup: usize,
    ) -> PyResult<Profile> {
        let inputs = tensors(&inputs)?;
        let options = ProfileOptions::default().steps(steps).warmup(warmup).training(training);
        let profile = self.with(py, |module, state| {
            module.profile(state, &tensor_views(&inputs), options, &mut |_, _| Ok(()))
        })?;
        Ok(Profile(profile))
    }

    /// Returns the name of the precision and the unit that multiplies bfloat16.
    fn precision(&self, py: Python<'_>) -> PyResult<Precision> {
        self.with(py, |module, _| {
            Ok(Precision { name: module.precision().name(), bf16_unit: module.bf16_unit() })
        })
    }

    /// Returns the memory use.
    fn memory(&self, py: Python<'_>) -> PyResult<MemoryBytes> {
        self.with(py, |module, state| Ok(module.memory(state).into()))
    }

    /// Returns the memory need of a step on these inputs, without running it.
    fn memory_of(
        &self,
        py: Python<'_>,
        inputs: Vec<Bound<'_, OrtValue>>,
        training: bool,
    ) -> PyResult<MemoryBytes> {
        let inputs = tensors(&inputs)?;
        self.with(py, |module, state| {
            let need = module.memory_need(&tensor_views(&inputs), training)?;
            let memory = MemoryUse { work: need.work, scratch: need.scratch, ..module.memory(state) };
            Ok(memory.into())
        })
    }

    /// Returns name, type and shape of each input.
    fn inputs(&self, py: Python<'_>, training: bool) -> PyResult<Vec<ValueDescription>> {
        self.with(py, |module, _| Ok(describe_values(module.inputs(training))))
    }

    fn lazy_reset_grad(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |module, _| {
            module.lazy_reset_grad();
            Ok(())
        })
    }

    fn input_names(&self, py: Python<'_>, training: bool) -> PyResult<Vec<String>> {
        self.with(py, |module, _| Ok(module.input_names(training).into_iter().map(str::to_owned).collect()))
    }

    fn output_names(&self, py: Python<'_>, training: bool) -> PyResult<Vec<String>> {
        self.with(py, |module, _| Ok(module.output_names(training).into_iter().map(str::to_owned).collect()))
    }

    fn parameters_size(&self, py: Python<'_>, trainable_only: bool) -> PyResult<usize> {
        self.with(py, |module, state| Ok(module.parameters_size(state, trainable_only)))
    }

    fn copy_parameters_to_buffer(&self, py: Python<'_>, trainable_only: bool) -> PyResult<OrtValue> {
        let packed =
            self.with(py, |module, state| module.copy_parameters_to_buffer(state, trainable_only))?;
        Ok(to_vector(&packed))
    }

    fn copy_buffer_to_parameters(
        &self,
        py: Python<'_>,
        buffer: &OrtValue,
        trainable_only: bool,
    ) -> PyResult<()> {
        let packed = float_elements(buffer)?;
        self.with(py, |module, state| module.copy_buffer_to_parameters(state, &packed, trainable_only))
    }

    fn copy_gradients_to_buffer(&self, py: Python<'_>) -> PyResult<OrtValue> {
        let packed = self.with(py, |module, state| module.copy_gradients_to_buffer(state))?;
        Ok(to_vector(&packed))
    }

    fn copy_buffer_to_gradients(&self, py: Python<'_>, buffer: &OrtValue) -> PyResult<()> {
        let packed = float_elements(buffer)?;
        self.with(py, |module, state| module.copy_buffer_to_gradients(state, &packed))
    }

    /// Returns the norms of each trained parameter.
    fn norms(&self, py: Python<'_>) -> PyResult<Vec<ParameterNorms>> {
        let norms = self.with(py, |module, state| module.norms(state))?;
        Ok(norms.into_iter().map(ParameterNorms::from).collect())
    }

    /// Returns the quantized tensors.
    fn quantization(&self, py: Python<'_>) -> PyResult<Vec<QuantizedTensor>> {
        let tensors = self.with(py, |module, state| module.quantization(state))?;
        Ok(tensors.into_iter().map(QuantizedTensor::from).collect())
    }

    /// Returns live views of the gradient planes.
    fn gradient_planes<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let parts = self.with(py, |module, state| {
            let layouts = state.layout()?.trainable.iter();
            let parts = layouts.zip(module.gradient_planes());
            Ok(parts.map(|(layout, memory)| (layout.dtype, memory.clone())).collect())
        })?;
        wrap_planes(py, parts, true)
    }

    /// Exports the model. Above `external_above` bytes, weights are stored in a separate file. The default is
    /// the limit of one file.
    #[pyo3(signature = (path, output_names, external_above=None, average=false, embed=false, data_folder=None))]
    fn export_model_for_inferencing(
        &self,
        py: Python<'_>,
        path: PathBuf,
        output_names: Vec<String>,
        external_above: Option<u64>,
        average: bool,
        embed: bool,
        data_folder: Option<PathBuf>,
    ) -> PyResult<()> {
        let options = ExportOptions { data_folder, ..export_options(external_above, embed) };
        self.with(py, |module, state| {
            let names: Vec<&str> = output_names.iter().map(String::as_str).collect();
            let averaged = average.then(|| state.averaged()).transpose()?;
            let state = averaged.as_ref().unwrap_or(state);
            module.export_with(state, path, &names, &options)
        })
    }
}

/// Returns the options of the file of an exported model.
pub(crate) fn export_options(external_above: Option<u64>, embed: bool) -> ExportOptions {
    let defaults = ExportOptions::default();
    ExportOptions { above: external_above.unwrap_or(defaults.above), embed, ..defaults }
}

/// Profile of some steps.
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct Profile(ortrain::Profile);

#[pymethods]
impl Profile {
    fn instructions(&self) -> Vec<Instruction> {
        self.0.instructions.iter().map(Instruction::from).collect()
    }

    /// Returns the seconds of each step.
    fn steps(&self) -> Vec<f64> {
        self.0.steps.iter().map(std::time::Duration::as_secs_f64).collect()
    }

    /// Returns the peak floating-point operations per second of the machine.
    fn flops_limit(&self) -> f64 {
        self.0.limits.flops
    }

    /// Returns the peak bytes per second of the machine.
    fn bandwidth_limit(&self) -> f64 {
        self.0.limits.bandwidth
    }

    /// Returns the memory need of a step in bytes.
    fn memory(&self) -> usize {
        self.0.memory.total()
    }

    /// Returns the parts of planning for new shapes, in order, with their seconds.
    fn planning(&self) -> Vec<(&'static str, f64)> {
        self.0.planning.iter().map(|&(part, time)| (part, time.as_secs_f64())).collect()
    }

    fn table(&self) -> String {
        self.0.to_string()
    }

    fn chrome_trace(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| self.0.chrome_trace(path)).map_err(raise)
    }
}

/// Number of Python frames between a step of [`Module`] and the line of the user.
const CALLER_OF_STEP: i32 = 2;

/// An optimizer model on the state of a module.
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct Optimizer {
    pub(crate) state: Arc<Exclusive<ortrain::CheckpointState>>,
    module: Arc<StateGuarded<ortrain::Module>>,
    optimizer: StateGuarded<ortrain::Optimizer>,
}

#[pymethods]
impl Optimizer {
    #[new]
    #[pyo3(signature = (model, module, *, replace=false))]
    fn new(py: Python<'_>, model: Source, module: &Module, replace: bool) -> PyResult<Optimizer> {
        let optimizer = module.with(py, |module, state| match replace {
            false => ortrain::Optimizer::new(model.0, state, module),
            true => ortrain::Optimizer::replacing(model.0, state, module),
        })?;
        let optimizer = StateGuarded::new(optimizer);
        Ok(Optimizer { state: module.state.clone(), module: module.module.clone(), optimizer })
    }

    /// Runs a step.
    fn step(&self, py: Python<'_>) -> PyResult<Update> {
        self.state.enter(py, |state| {
            self.module.with(|module| {
                let warning = module.gradient_warning();
                let norm = self.optimizer.with(|optimizer| optimizer.step(state, module))?;
                Ok(Update { warning, norm })
            })
        })
    }

    fn learning_rate(&self, py: Python<'_>) -> PyResult<f32> {
        self.state.enter(py, |state| self.optimizer.with(|optimizer| optimizer.learning_rate(state)))
    }

    /// Returns the current description of the optimizer.
    fn spec(&self, py: Python<'_>) -> PyResult<String> {
        self.state.enter(py, |state| self.optimizer.with(|optimizer| Ok(optimizer.spec(state)?.to_text())))
    }

    /// Changes settings.
    fn change(&self, py: Python<'_>, text: &str) -> PyResult<()> {
        self.state.enter(py, |state| {
            let changed = spec_of(text)?;
            self.optimizer.with(|optimizer| optimizer.change(state, |spec| *spec = changed))
        })
    }

    fn step_count(&self, py: Python<'_>) -> PyResult<i64> {
        self.state.enter(py, |state| self.optimizer.with(|optimizer| optimizer.step_count(state)))
    }

    fn set_learning_rate(&self, py: Python<'_>, learning_rate: f32) -> PyResult<()> {
        self.state.enter(py, |state| {
            self.optimizer.with(|optimizer| optimizer.set_learning_rate(state, learning_rate))
        })
    }
}

/// Linear warm-up and decay of the learning rate.
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct LinearLRScheduler {
    state: Arc<Exclusive<ortrain::CheckpointState>>,
    scheduler: ortrain::LinearLRScheduler,
}

#[pymethods]
impl LinearLRScheduler {
    #[new]
    fn new(
        py: Python<'_>,
        optimizer: &Optimizer,
        warmup_step_count: i64,
        total_step_count: i64,
        initial_lr: f32,
    ) -> PyResult<LinearLRScheduler> {
        let state = optimizer.state.clone();
        let scheduler = state.enter(py, |state| {
            ortrain::LinearLRScheduler::new(state, warmup_step_count, total_step_count, initial_lr)
        })?;
        Ok(LinearLRScheduler { state, scheduler })
    }

    fn step(&self, py: Python<'_>) -> PyResult<()> {
        self.state.enter(py, |state| self.scheduler.step(state))
    }
}
