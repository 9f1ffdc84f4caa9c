//! State of a training.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use ortrain::{Bytes, OptimizerValues, ParameterView, PlaneLayout, Property};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyFloat, PyInt, PyString};

use crate::device::wrap_planes;
use crate::error::{OutOfRangeError, raise};
use crate::gil::Exclusive;
use crate::records::{LoadReport, Plane, StateLayout};
use crate::run_options::backend;
use crate::value::{OrtValue, view};

/// A state with its lock.
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct CheckpointState {
    pub(crate) door: Arc<Exclusive<ortrain::CheckpointState>>,
}

#[pymethods]
impl CheckpointState {
    #[staticmethod]
    fn load(py: Python<'_>, path: PathBuf) -> PyResult<CheckpointState> {
        let state = py.detach(|| ortrain::CheckpointState::load(path)).map_err(raise)?;
        Ok(CheckpointState { door: Arc::new(Exclusive::new(state)) })
    }

    #[staticmethod]
    fn from_bytes(py: Python<'_>, content: PyBackedBytes) -> PyResult<CheckpointState> {
        let content = Bytes::from_owner(content);
        let state = py.detach(|| ortrain::CheckpointState::from_bytes(content)).map_err(raise)?;
        Ok(CheckpointState { door: Arc::new(Exclusive::new(state)) })
    }

    /// Creates a state from values: name, value, and true for a trained parameter; slots by parameter, then
    /// by name.
    #[staticmethod]
    #[pyo3(signature = (parameters, slots, *, step, train_step, learning_rate))]
    fn of_values(
        py: Python<'_>,
        parameters: Vec<(String, Py<OrtValue>, bool)>,
        slots: HashMap<String, HashMap<String, Py<OrtValue>>>,
        step: i64,
        train_step: u64,
        learning_rate: Option<f32>,
    ) -> PyResult<CheckpointState> {
        let parameters = parameters
            .into_iter()
            .map(|(name, value, is_trained)| Ok((name, value.get().tensor()?, is_trained)))
            .collect::<PyResult<Vec<_>>>()?;
        let of_parameter = |(parameter, slots): (String, HashMap<String, Py<OrtValue>>)| {
            let slot = |(name, value): (String, Py<OrtValue>)| Ok((name, value.get().tensor()?));
            Ok((parameter, slots.into_iter().map(slot).collect::<PyResult<BTreeMap<_, _>>>()?))
        };
        let slots = slots.into_iter().map(of_parameter).collect::<PyResult<BTreeMap<_, _>>>()?;
        let optimizer = OptimizerValues { step, train_step, learning_rate, slots };
        let state =
            py.detach(|| ortrain::CheckpointState::from_values(parameters, optimizer)).map_err(raise)?;
        Ok(CheckpointState { door: Arc::new(Exclusive::new(state)) })
    }

    fn to_bytes<'py>(&self, py: Python<'py>, include_optimizer_state: bool) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.door.enter(py, |state| state.to_bytes(include_optimizer_state))?;
        Ok(PyBytes::new(py, &bytes))
    }

    #[pyo3(signature = (path, include_optimizer_state, external_above=None))]
    fn save(
        &self,
        py: Python<'_>,
        path: PathBuf,
        include_optimizer_state: bool,
        external_above: Option<u64>,
    ) -> PyResult<()> {
        self.door.enter(py, |state| match external_above {
            None => state.save(path, include_optimizer_state),
            Some(above) => state.save_with_external_data(path, include_optimizer_state, above),
        })
    }

    fn load_parameters(&self, py: Python<'_>, path: PathBuf, strict: bool) -> PyResult<LoadReport> {
        self.door.enter(py, |state| Ok(state.load_parameters(path, strict)?.into()))
    }

    fn load_safetensors(
        &self,
        py: Python<'_>,
        path: PathBuf,
        names: HashMap<String, String>,
        strict: bool,
    ) -> PyResult<LoadReport> {
        let names = names.into_iter().collect();
        self.door.enter(py, |state| Ok(state.load_safetensors(path, &names, strict)?.into()))
    }

    fn save_safetensors(
        &self,
        py: Python<'_>,
        path: PathBuf,
        names: HashMap<String, String>,
    ) -> PyResult<()> {
        let names = names.into_iter().collect();
        self.door.enter(py, |state| state.save_safetensors(path, &names))
    }

    fn require_values(&self, py: Python<'_>) -> PyResult<()> {
        self.door
            .enter(py, |state| if state.is_nominal() { Err(ortrain::Error::NominalState) } else { Ok(()) })
    }

    fn parameter_names(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.door.enter(py, |state| Ok(state.names().map(str::to_owned).collect()))
    }

    fn has_parameter(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        self.door.enter(py, |state| Ok(state.contains(name)))
    }

    fn requires_grad(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        self.door.enter(py, |state| state.requires_grad(name))
    }

    /// Returns the element type of a parameter, and its shape if known.
    fn type_of(&self, py: Python<'_>, name: &str) -> PyResult<(&'static str, Option<Vec<usize>>)> {
        self.door.enter(py, |state| {
            let (dtype, dims) = state.type_of(name)?;
            Ok((dtype.name(), dims.map(<[usize]>::to_vec)))
        })
    }

    fn device(&self, py: Python<'_>) -> PyResult<String> {
        self.door.enter(py, |state| Ok(state.device().to_owned()))
    }

    fn to(&self, py: Python<'_>, device: &str) -> PyResult<()> {
        let backend = py.detach(|| backend(device, 0))?;
        self.door.enter(py, |state| state.to(&backend))
    }

    fn is_nominal(&self, py: Python<'_>) -> PyResult<bool> {
        self.door.enter(py, |state| Ok(state.is_nominal()))
    }

    fn seed(&self, py: Python<'_>) -> PyResult<i64> {
        self.door.enter(py, |state| Ok(state.seed()))
    }

    fn set_seed(&self, py: Python<'_>, seed: i64) -> PyResult<()> {
        self.door.enter(py, |state| {
            state.set_seed(seed);
            Ok(())
        })
    }

    /// Returns the numbers of training steps and optimizer steps.
    fn steps(&self, py: Python<'_>) -> PyResult<(u64, i64)> {
        self.door.enter(py, |state| Ok((state.train_step_count(), state.optimizer_step_count())))
    }

    /// Returns the learning-rate scheduler as text.
    fn scheduler(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.door.enter(py, |state| Ok(state.scheduler_text()))
    }

    fn learning_rate(&self, py: Python<'_>) -> PyResult<Option<f32>> {
        self.door.enter(py, |state| Ok(state.learning_rate()))
    }

    fn parameter<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let part: ParameterView = self.door.enter(py, |state| state.parameter(name))?;
        view(py, part)
    }

    fn set_parameter(&self, py: Python<'_>, name: &str, value: &OrtValue) -> PyResult<()> {
        let tensor = value.tensor()?;
        self.door.enter(py, |state| state.set_parameter(name, &tensor))
    }

    fn gradient<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        let part = self.door.enter(py, |state| state.gradient(name))?;
        part.map(|part| view(py, part)).transpose()
    }

    /// Copies the optimizer slots of a parameter.
    fn slots(&self, py: Python<'_>, name: &str) -> PyResult<Vec<(String, OrtValue)>> {
        let slots = self.door.enter(py, |state| state.slots(name))?;
        Ok(slots.into_iter().map(|(name, tensor)| (name, OrtValue::of(tensor))).collect())
    }

    /// Copies the averaged weights of a parameter.
    fn average(&self, py: Python<'_>, name: &str) -> PyResult<OrtValue> {
        Ok(OrtValue::of(self.door.enter(py, |state| state.average(name))?))
    }

    /// Returns a state with the averages instead of the weights.
    fn averaged(&self, py: Python<'_>) -> PyResult<CheckpointState> {
        let state = self.door.enter(py, |state| state.averaged())?;
        Ok(CheckpointState { door: Arc::new(Exclusive::new(state)) })
    }

    /// Returns the positions of all parameters in the planes.
    fn layout(&self, py: Python<'_>) -> PyResult<StateLayout> {
        self.door.enter(py, |state| {
            let layout = state.layout()?;
            let planes = |layouts: &[PlaneLayout]| layouts.iter().map(Plane::from).collect();
            Ok(StateLayout { trainable: planes(&layout.trainable), frozen: planes(&layout.frozen) })
        })
    }

    /// Returns live views of the planes of trained, or of frozen, parameters.
    fn planes<'py>(&self, py: Python<'py>, trainable: bool) -> PyResult<Vec<Bound<'py, PyAny>>> {
        self.require_values(py)?;
        let parts = self.door.enter(py, |state| {
            let layout = state.layout()?;
            let (layouts, memories) = match trainable {
                true => (&layout.trainable, state.trainable_planes()),
                false => (&layout.frozen, state.frozen_planes()),
            };
            let parts = layouts.iter().zip(memories).map(|(layout, memory)| (layout.dtype, memory.clone()));
            Ok(parts.collect())
        })?;
        wrap_planes(py, parts, trainable)
    }

    fn property_names(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.door.enter(py, |state| Ok(state.properties().keys().cloned().collect()))
    }

    fn property<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.door.enter(py, |state| Ok(state.properties().get(name).cloned()))? {
            None => Ok(None),
            Some(Property::Int(value)) => value.into_bound_py_any(py).map(Some),
            Some(Property::Float(value)) => f64::from(value).into_bound_py_any(py).map(Some),
            Some(Property::String(value)) => value.into_bound_py_any(py).map(Some),
        }
    }

    fn set_property(&self, py: Python<'_>, name: String, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let too_large = |kind: &str| {
            OutOfRangeError::new_err(format!("property {name:?} is {value}, but checkpoints store {kind}"))
        };
        let value = if value.is_instance_of::<PyInt>() {
            Property::Int(value.extract().map_err(|_| too_large("int64"))?)
        } else if value.is_instance_of::<PyFloat>() {
            let wide: f64 = value.extract()?;
            let narrow = wide as f32;
            if narrow.is_infinite() && wide.is_finite() {
                return Err(too_large("float32"));
            }
            Property::Float(narrow)
        } else {
            Property::String(value.cast::<PyString>()?.to_cow()?.into_owned())
        };
        self.door.enter(py, |state| {
            state.set_property(name, value);
            Ok(())
        })
    }
}
