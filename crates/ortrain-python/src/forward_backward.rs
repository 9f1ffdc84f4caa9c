//! Forward and backward pass of a model as two calls.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ortrain::{Error, ForwardBackwardOptions, InputView, Memory, encode_model};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::artifacts::batch_norm_of;
use crate::error::{detached, raise};
use crate::inference::InferenceSession;
use crate::inputs::{ValueMemory, copied_inputs, views};
use crate::model::Source;
use crate::records::{ValueDescription, describe_values};
use crate::run_options::RunOptions;
use crate::value::{OrtValue, Results};

/// A forward pass that waits for its backward pass.
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct LiveForward(Mutex<ortrain::LiveForward>);

impl LiveForward {
    fn pass(&self) -> MutexGuard<'_, ortrain::LiveForward> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl LiveForward {
    /// Returns the bytes of its activations.
    fn bytes(&self, py: Python<'_>) -> usize {
        // The end of a backward pass releases arrays and needs the interpreter.
        py.detach(|| self.pass().bytes())
    }
}

/// Returns the memory of some values, for passes on a device.
fn value_memories(values: &[Bound<'_, OrtValue>], device: &str) -> PyResult<Vec<ValueMemory>> {
    values.iter().map(|value| ValueMemory::on_device(value.get(), device)).collect()
}

fn weight_views(weights: &[ValueMemory]) -> Vec<InputView<'_>> {
    weights.iter().map(ValueMemory::input).collect()
}

/// A model with its two passes as two calls.
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct ForwardBackward(ortrain::ForwardBackward);

#[pymethods]
impl ForwardBackward {
    #[new]
    #[pyo3(signature = (model, weights=None, inputs=None, *, training, seed, options))]
    fn new(
        py: Python<'_>,
        model: Source,
        weights: Option<Vec<String>>,
        inputs: Option<Vec<String>>,
        training: Option<&str>,
        seed: i64,
        options: &RunOptions,
    ) -> PyResult<ForwardBackward> {
        let mut options = ForwardBackwardOptions::default().seed(seed).run(options.run.clone());
        options.training = training.map(batch_norm_of).transpose()?;
        (options.weights, options.inputs) = (weights, inputs);
        py.detach(|| ortrain::ForwardBackward::new(model.0, options)).map(ForwardBackward).map_err(raise)
    }

    /// Creates the passes of the training graph of a session.
    #[staticmethod]
    fn of_session(py: Python<'_>, session: &InferenceSession) -> PyResult<ForwardBackward> {
        session.with(py, |session| ortrain::ForwardBackward::of_session(session)).map(ForwardBackward)
    }

    /// Returns name, type and shape of each input.
    fn inputs(&self) -> Vec<ValueDescription> {
        describe_values(self.0.inputs())
    }

    /// Returns name, type and shape of each output.
    fn outputs(&self) -> Vec<ValueDescription> {
        describe_values(self.0.outputs())
    }

    /// Returns the names of the outputs with gradients as inputs of a backward pass.
    fn differentiable_outputs(&self) -> Vec<String> {
        self.0.differentiable_outputs().map(|info| info.name.clone()).collect()
    }

    /// Returns the names of the inputs with gradients that a backward pass computes.
    fn differentiable_inputs(&self) -> Vec<String> {
        self.0.differentiable_inputs().map(|info| info.name.clone()).collect()
    }

    fn weight_names(&self) -> Vec<String> {
        self.0.weights().iter().map(|weight| weight.name.clone()).collect()
    }

    /// Returns the weights in the model.
    fn initial_weights(&self) -> Vec<OrtValue> {
        self.0.weights().iter().map(|weight| OrtValue::of(weight.initial.clone())).collect()
    }

    /// Returns names and values of the running statistics that forward passes update. The values share their
    /// memory.
    fn statistics(&self) -> Vec<(String, OrtValue)> {
        let value = |(weight, memory): (&ortrain::Weight, &Arc<Memory>)| {
            let (dtype, dims) = (weight.initial.dtype(), weight.initial.dims().to_vec());
            (weight.name.clone(), OrtValue::shared(dtype, dims, memory.clone()))
        };
        self.0.statistics().map(value).collect()
    }

    /// Returns the names of all gradients: first of inputs, then of weights.
    fn gradient_names(&self) -> Vec<String> {
        self.0.gradient_names().into_iter().map(str::to_owned).collect()
    }

    /// Returns the bytes of the activations of live forward passes.
    fn live_bytes(&self) -> usize {
        self.0.live_bytes()
    }

    fn training_model(&self, py: Python<'_>) -> PyResult<Py<PyBytes>> {
        encode_detached(py, || self.0.training_model())
    }

    fn evaluation_model(&self, py: Python<'_>) -> PyResult<Py<PyBytes>> {
        encode_detached(py, || self.0.evaluation_model())
    }

    /// Returns the nodes that draw random numbers in a forward pass, as messages name them.
    fn random_nodes(&self) -> Vec<String> {
        self.0.random_nodes().to_vec()
    }

    fn dump(&self) -> String {
        self.0.dump()
    }

    /// Runs the model forward. Weights are read in place.
    fn forward(
        &self,
        py: Python<'_>,
        inputs: Vec<Bound<'_, OrtValue>>,
        weights: Vec<Bound<'_, OrtValue>>,
    ) -> PyResult<(LiveForward, Vec<OrtValue>)> {
        let (inputs, weights) = (copied_inputs(&inputs)?, value_memories(&weights, self.0.device())?);
        let mut results = Results::default();
        let live = py.detach(|| {
            self.0
                .forward(&weight_views(&weights), &views(&inputs), &mut |at, value| results.store(at, value))
        });
        Ok((LiveForward(Mutex::new(live.map_err(raise)?)), results.values()))
    }

    /// Runs the model backward. Returns the gradients of inputs, then of weights. Gradients of weights are
    /// written to `into`, or to new memory.
    #[pyo3(signature = (live, gradients, into=None))]
    fn backward(
        &self,
        py: Python<'_>,
        live: &LiveForward,
        gradients: Vec<Bound<'_, OrtValue>>,
        into: Option<Vec<Bound<'_, OrtValue>>>,
    ) -> PyResult<Vec<OrtValue>> {
        let gradients = copied_inputs(&gradients)?;
        let buffers = match &into {
            Some(values) => value_memories(values, self.0.device())?,
            None => {
                let allocate = |weight: &ortrain::Weight| {
                    let (dtype, dims) = (weight.initial.dtype(), weight.initial.dims().to_vec());
                    Ok(ValueMemory {
                        dtype,
                        dims,
                        memory: self.0.allocate_gradient_on_device(weight).map_err(raise)?,
                    })
                };
                self.0.weights().iter().map(allocate).collect::<PyResult<_>>()?
            }
        };
        let mut results = Results::default();
        py.detach(|| {
            // A second thread with the same pass waits, then gets an error that the pass has ended.
            let mut pass = live.pass();
            self.0.backward(
                &mut pass,
                &views(&gradients),
                &mut buffers.iter().map(ValueMemory::target).collect::<Vec<_>>(),
                &mut |at, value| results.store(at, value),
            )
        })
        .map_err(raise)?;
        let mut values = results.values();
        values.extend(
            buffers.into_iter().map(|buffer| OrtValue::shared(buffer.dtype, buffer.dims, buffer.memory)),
        );
        Ok(values)
    }

    /// Runs the evaluation graph.
    fn evaluate(
        &self,
        py: Python<'_>,
        inputs: Vec<Bound<'_, OrtValue>>,
        weights: Vec<Bound<'_, OrtValue>>,
    ) -> PyResult<Vec<OrtValue>> {
        let (inputs, weights) = (copied_inputs(&inputs)?, value_memories(&weights, self.0.device())?);
        let mut results = Results::default();
        py.detach(|| {
            self.0
                .evaluate(&weight_views(&weights), &views(&inputs), &mut |at, value| results.store(at, value))
        })
        .map_err(raise)?;
        Ok(results.values())
    }
}

/// Returns the initializers of a model's graph with their names, in its order.
#[pyfunction]
pub(crate) fn initializers(py: Python<'_>, model: Source) -> PyResult<Vec<(String, OrtValue)>> {
    let tensors = py.detach(|| model.0.initializers()).map_err(raise)?;
    Ok(tensors.into_iter().map(|(name, tensor)| (name, OrtValue::of(tensor))).collect())
}

/// Returns the model with other values of some initializers.
#[pyfunction]
pub(crate) fn with_initializers(
    py: Python<'_>,
    model: Source,
    values: Vec<(String, Bound<'_, OrtValue>)>,
) -> PyResult<Py<PyBytes>> {
    let values = values.into_iter().map(|(name, value)| Ok((name, value.get().tensor()?)));
    let values = values.collect::<PyResult<Vec<_>>>()?;
    encode_detached(py, move || model.0.with_initializers(&values))
}

/// Returns the bytes of a model. The interpreter is released while the model is generated.
pub(crate) fn encode_detached(
    py: Python<'_>,
    make: impl FnOnce() -> ortrain::Result<ortrain::ModelProto> + Send,
) -> PyResult<Py<PyBytes>> {
    let bytes = detached(py, || encode_model(&make()?).map_err(Error::from))?;
    Ok(PyBytes::new(py, &bytes).unbind())
}
