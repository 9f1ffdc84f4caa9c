//! Training session.

use std::path::PathBuf;
use std::sync::Arc;

use ortrain::{DetachedSession, Error, OutputTarget};
use pyo3::prelude::*;

use crate::error::warn;
use crate::gil::Exclusive;
use crate::inputs::{copied_inputs, step_inputs, views};
use crate::model::Source;
use crate::optim::spec_of;
use crate::records::{Precision, Update, ValueDescription, describe_values};
use crate::run_options::RunOptions;
use crate::schedule::Schedule;
use crate::state::CheckpointState;
use crate::training::{StateGuarded, export_options};
use crate::value::{OrtValue, OutputBuffer, check_no_overlap, float_elements, to_vector};

/// Number of Python frames between a step and the line of the user.
const CALLER_OF_STEP: i32 = 3;

/// A session, reconnected to its state under the lock of the state. `None` after it is closed.
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct TrainingSession {
    state: Arc<Exclusive<ortrain::CheckpointState>>,
    session: StateGuarded<Option<DetachedSession>>,
}

impl TrainingSession {
    /// Runs `work` on the session, under the lock.
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut ortrain::TrainingSession<&mut ortrain::CheckpointState>) -> ortrain::Result<R>
        + Send,
    ) -> PyResult<R> {
        self.state.enter(py, |state| {
            self.session.with(|slot| {
                let closed =
                    || Error::State("the training session is closed; make another one on its state".into());
                let mut session = slot.take().ok_or_else(closed)?.attach(state);
                let result = work(&mut session);
                *slot = Some(session.detach().1);
                result
            })
        })
    }
}

#[pymethods]
impl TrainingSession {
    #[new]
    #[pyo3(signature = (state, train_model, eval_model, optimizer_model, *, options))]
    fn new(
        py: Python<'_>,
        state: &CheckpointState,
        train_model: Source,
        eval_model: Option<Source>,
        optimizer_model: Option<Source>,
        options: &RunOptions,
    ) -> PyResult<TrainingSession> {
        let options = options.of_module();
        let (eval, optimizer) = (eval_model.map(|source| source.0), optimizer_model.map(|source| source.0));
        let session = state.door.enter(py, |state| {
            let session = ortrain::TrainingSession::new(state, train_model.0, eval, optimizer, options)?;
            Ok(session.detach().1)
        })?;
        Ok(TrainingSession { state: state.door.clone(), session: StateGuarded::new(Some(session)) })
    }

    /// Closes the session after the current call has ended.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let session = self.state.enter(py, |_| Ok(self.session.with(Option::take)))?;
        py.detach(|| drop(session));
        Ok(())
    }

    fn check_open(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |_| Ok(()))
    }

    fn step(
        &self,
        py: Python<'_>,
        inputs: Vec<Bound<'_, OrtValue>>,
        training: bool,
    ) -> PyResult<Vec<OrtValue>> {
        let inputs = step_inputs(&inputs)?;
        let (outputs, notes) = self.with(py, |session| {
            let outputs = match training {
                true => session.train_step_bound(&views(&inputs)),
                false => session.eval_step_bound(&views(&inputs)),
            }?;
            Ok((outputs, session.take_notes()))
        })?;
        warn(py, &notes, CALLER_OF_STEP)?;
        Ok(outputs.into_iter().map(OrtValue::of).collect())
    }

    fn step_into(
        &self,
        py: Python<'_>,
        inputs: Vec<Bound<'_, OrtValue>>,
        outputs: Vec<Bound<'_, PyAny>>,
        training: bool,
    ) -> PyResult<()> {
        self.check_open(py)?;
        let inputs = copied_inputs(&inputs)?;
        let buffers = outputs.iter().enumerate().map(|(at, array)| OutputBuffer::of(array, at));
        let mut buffers = buffers.collect::<PyResult<Vec<OutputBuffer>>>()?;
        check_no_overlap(&buffers)?;
        let notes = self.with(py, |session| {
            let mut targets: Vec<OutputTarget<'_>> = buffers.iter_mut().map(OutputBuffer::target).collect();
            match training {
                true => session.train_step_into(&views(&inputs), &mut targets),
                false => session.eval_step_into(&views(&inputs), &mut targets),
            }?;
            Ok(session.take_notes())
        })?;
        warn(py, &notes, CALLER_OF_STEP)?;
        buffers.into_iter().zip(&outputs).try_for_each(|(buffer, array)| buffer.copy_to(array))
    }

    /// Returns name, type and shape of each input.
    fn inputs(&self, py: Python<'_>, training: bool) -> PyResult<Vec<ValueDescription>> {
        self.with(py, |session| Ok(describe_values(session.module().inputs(training))))
    }

    fn lazy_reset_grad(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |session| {
            session.lazy_reset_grad();
            Ok(())
        })
    }

    /// Runs a step. Returns the reason if the step is probably a mistake, and the norm of the gradients if
    /// they are clipped.
    fn optimizer_step(&self, py: Python<'_>) -> PyResult<Update> {
        self.with(py, |session| {
            let warning = session.module().gradient_warning();
            let norm = session.optimizer_step()?;
            Ok(Update { warning, norm })
        })
    }

    /// Returns the name of the precision and the unit that multiplies bfloat16.
    fn precision(&self, py: Python<'_>) -> PyResult<Precision> {
        self.with(py, |session| {
            let module = session.module();
            Ok(Precision { name: module.precision().name(), bf16_unit: module.bf16_unit() })
        })
    }

    fn learning_rate(&self, py: Python<'_>) -> PyResult<f32> {
        self.with(py, |session| session.learning_rate())
    }

    fn set_learning_rate(&self, py: Python<'_>, learning_rate: f32) -> PyResult<()> {
        self.with(py, |session| session.set_learning_rate(learning_rate))
    }

    fn register_linear_lr_scheduler(
        &self,
        py: Python<'_>,
        warmup_step_count: i64,
        total_step_count: i64,
        initial_lr: f32,
    ) -> PyResult<()> {
        self.with(py, |session| {
            session.register_linear_lr_scheduler(warmup_step_count, total_step_count, initial_lr)
        })
    }

    fn register_lr_scheduler(&self, py: Python<'_>, schedule: &Schedule, lr: f32) -> PyResult<()> {
        self.with(py, |session| session.register_lr_scheduler(schedule.0.clone(), lr))
    }

    /// Registers the schedule of the checkpoint, and returns it.
    fn resume_lr_scheduler(&self, py: Python<'_>) -> PyResult<Option<Schedule>> {
        self.with(py, |session| {
            session.resume_lr_scheduler()?;
            Ok(session.schedule().cloned().map(Schedule))
        })
    }

    /// Runs a step, with a metric or a factor if the schedule requires it.
    fn scheduler_step(&self, py: Python<'_>, value: Option<f64>) -> PyResult<()> {
        self.with(py, |session| match value {
            None => session.scheduler_step(),
            Some(value) => session.scheduler_step_with(value),
        })
    }

    /// Returns the current description of the optimizer.
    fn spec(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |session| Ok(session.optimizer_spec()?.to_text()))
    }

    /// Changes settings of the optimizer.
    fn change(&self, py: Python<'_>, text: &str) -> PyResult<()> {
        self.with(py, |session| {
            let changed = spec_of(text)?;
            session.change_optimizer(|spec| *spec = changed)
        })
    }

    fn step_count(&self, py: Python<'_>) -> PyResult<i64> {
        self.with(py, |session| Ok(session.state().optimizer_step_count()))
    }

    fn parameters_size(&self, py: Python<'_>, only_trainable: bool) -> PyResult<usize> {
        self.with(py, |session| Ok(session.parameters_size(only_trainable)))
    }

    fn to_buffer(&self, py: Python<'_>, only_trainable: bool) -> PyResult<OrtValue> {
        let packed = self.with(py, |session| session.to_buffer(only_trainable))?;
        Ok(to_vector(&packed))
    }

    #[pyo3(signature = (buffer, only_trainable))]
    #[expect(clippy::wrong_self_convention, reason = "the name it has in onnxruntime-training")]
    fn from_buffer(&self, py: Python<'_>, buffer: &OrtValue, only_trainable: Option<bool>) -> PyResult<()> {
        self.check_open(py)?;
        let packed = float_elements(buffer)?;
        self.with(py, |session| session.from_buffer(&packed, only_trainable))
    }

    fn input_names(&self, py: Python<'_>, training: bool) -> PyResult<Vec<String>> {
        self.with(py, |session| Ok(session.input_names(training).into_iter().map(str::to_owned).collect()))
    }

    fn output_names(&self, py: Python<'_>, training: bool) -> PyResult<Vec<String>> {
        self.with(py, |session| Ok(session.output_names(training).into_iter().map(str::to_owned).collect()))
    }

    /// Exports the model. Above `external_above` bytes, weights are stored in a separate file. The default is
    /// the limit of one file.
    #[pyo3(signature = (path, output_names, external_above=None, average=false, embed=false))]
    fn export_model_for_inferencing(
        &self,
        py: Python<'_>,
        path: PathBuf,
        output_names: Vec<String>,
        external_above: Option<u64>,
        average: bool,
        embed: bool,
    ) -> PyResult<()> {
        let options = export_options(external_above, embed);
        self.with(py, |session| {
            let names: Vec<&str> = output_names.iter().map(String::as_str).collect();
            if average {
                let averaged = session.state().averaged()?;
                return session.module().export_with(&averaged, path, &names, &options);
            }
            session.export_with(path, &names, &options)
        })
    }

    fn set_seed(&self, py: Python<'_>, seed: i64) -> PyResult<()> {
        self.with(py, |session| {
            session.set_seed(seed);
            Ok(())
        })
    }
}
