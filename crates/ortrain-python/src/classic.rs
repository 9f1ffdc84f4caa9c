//! Training in one session.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;

use ortrain::classic::{CallOptions, StatesByWeight, TrainingParameters};
use ortrain::{DType, Tensor};
use pyo3::prelude::*;

use crate::error::{detached, raise};
use crate::gil::Exclusive;
use crate::inputs::{Requested, SessionInput, named_views};
use crate::model::Source;
use crate::ranks::{Ranks, data_parallel};
use crate::records::{
    CommunicationTime, MemoryBytes, ModelMetadata, Precision, ValueDescription, describe_values,
};
use crate::run_options::RunOptions;
use crate::value::OrtValue;

/// Output values by weight, then by name.
type States = HashMap<String, HashMap<String, OrtValue>>;
/// Input values by weight, then by name.
type InputStates = HashMap<String, HashMap<String, Py<OrtValue>>>;

/// Settings of a training, as Python passes them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Parameters {
    loss_output_name: String,
    weights_to_train: BTreeSet<String>,
    weights_not_to_train: BTreeSet<String>,
    immutable_weights: BTreeMap<String, Vec<(i64, f32)>>,
    training_optimizer_name: String,
    lr_params_feed_name: String,
    optimizer_attributes_map: BTreeMap<String, BTreeMap<String, f32>>,
    optimizer_int_attributes_map: BTreeMap<String, BTreeMap<String, i64>>,
    use_mixed_precision: bool,
    mixed_precision_dtype: String,
    gradient_accumulation_steps: i64,
    enable_grad_norm_clip: bool,
    set_gradients_as_graph_outputs: bool,
    model_after_graph_transforms_path: Option<PathBuf>,
    model_with_gradient_graph_path: Option<PathBuf>,
    model_with_training_graph_path: Option<PathBuf>,
    initial_optimizer_state: InputStates,
}

impl Parameters {
    fn read(self) -> PyResult<TrainingParameters> {
        let mut states = StatesByWeight::new();
        for (weight, state) in self.initial_optimizer_state {
            let state = state.into_iter().map(|(name, value)| Ok((name, value.get().tensor()?)));
            states.insert(weight, state.collect::<PyResult<_>>()?);
        }
        let narrow = match self.mixed_precision_dtype.as_str() {
            "float16" => DType::F16,
            "bfloat16" => DType::BF16,
            other => {
                return Err(raise(ortrain::Error::Argument(format!(
                    "mixed_precision_dtype must be \"float16\" or \"bfloat16\", got {other:?}"
                ))));
            }
        };
        Ok(TrainingParameters {
            loss_output_name: self.loss_output_name,
            weights_to_train: self.weights_to_train,
            weights_not_to_train: self.weights_not_to_train,
            immutable_weights: self.immutable_weights,
            training_optimizer_name: self.training_optimizer_name,
            lr_params_feed_name: self.lr_params_feed_name,
            optimizer_attributes_map: self.optimizer_attributes_map,
            optimizer_int_attributes_map: self.optimizer_int_attributes_map,
            mixed_precision: self.use_mixed_precision.then_some(narrow),
            gradient_accumulation_steps: self.gradient_accumulation_steps,
            enable_grad_norm_clip: self.enable_grad_norm_clip,
            set_gradients_as_graph_outputs: self.set_gradients_as_graph_outputs,
            model_after_graph_transforms_path: self.model_after_graph_transforms_path,
            model_with_gradient_graph_path: self.model_with_gradient_graph_path,
            model_with_training_graph_path: self.model_with_training_graph_path,
            initial_optimizer_state: states,
        })
    }
}

fn to_values(state: BTreeMap<String, Tensor>) -> HashMap<String, OrtValue> {
    state.into_iter().map(|(name, tensor)| (name, OrtValue::of(tensor))).collect()
}

fn to_states(states: StatesByWeight) -> States {
    states.into_iter().map(|(outer, state)| (outer, to_values(state))).collect()
}

/// Extracts the inputs of a run.
fn to_inputs(feeds: &HashMap<String, Py<OrtValue>>) -> PyResult<Vec<(&str, SessionInput)>> {
    feeds.iter().map(|(name, value)| Ok((name.as_str(), SessionInput::of_value(value.get())?))).collect()
}

/// Converts named values to tensors.
fn to_tensors(values: &HashMap<String, Py<OrtValue>>) -> PyResult<BTreeMap<String, Tensor>> {
    values.iter().map(|(name, value)| Ok((name.clone(), value.get().tensor()?))).collect()
}

/// A model, its gradients and its optimizer.
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct ClassicSession {
    session: Exclusive<ortrain::classic::TrainingSession>,
}

#[pymethods]
impl ClassicSession {
    #[new]
    #[pyo3(signature = (model, parameters, seed, *, options, ranks))]
    fn new(
        py: Python<'_>,
        model: Source,
        parameters: Parameters,
        seed: Option<i64>,
        options: &RunOptions,
        ranks: Option<Ranks<'_>>,
    ) -> PyResult<ClassicSession> {
        let options = options.of_module();
        let parameters = parameters.read()?;
        let ranks = ranks.map(data_parallel).transpose()?;
        let session = detached(py, || {
            let mut session =
                ortrain::classic::TrainingSession::on_ranks(model.0, &parameters, options, ranks)?;
            if let Some(seed) = seed {
                session.set_seed(seed);
            }
            Ok(session)
        })?;
        Ok(ClassicSession { session: Exclusive::new(session) })
    }

    /// Returns the name of the precision and the unit that multiplies bfloat16.
    fn precision(&self, py: Python<'_>) -> PyResult<Precision> {
        self.session.enter(py, |session| {
            Ok(Precision {
                name: session.module().precision().name(),
                bf16_unit: session.module().bf16_unit(),
            })
        })
    }

    fn inputs(&self, py: Python<'_>) -> PyResult<Vec<ValueDescription>> {
        self.session.enter(py, |session| Ok(describe_values(session.inputs())))
    }

    fn outputs(&self, py: Python<'_>) -> PyResult<Vec<ValueDescription>> {
        self.session.enter(py, |session| Ok(describe_values(session.outputs())))
    }

    fn overridable(&self, py: Python<'_>) -> PyResult<Vec<ValueDescription>> {
        self.session.enter(py, |session| Ok(describe_values(session.overridable_initializers())))
    }

    fn meta(&self, py: Python<'_>) -> PyResult<ModelMetadata> {
        self.session.enter(py, |session| Ok(session.meta().clone().into()))
    }

    fn loss_scale_input_name(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        self.session.enter(py, |session| Ok(session.loss_scale_input_name()))
    }

    fn is_output_fp32_node(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        self.session.enter(py, |session| session.is_output_fp32_node(name))
    }

    /// Runs the model. Outputs with a value are written to its memory; the others are returned.
    #[pyo3(signature = (feeds, outputs, *, restricted, training_mode))]
    fn run(
        &self,
        py: Python<'_>,
        feeds: HashMap<String, Py<OrtValue>>,
        outputs: Vec<(usize, Option<Bound<'_, OrtValue>>)>,
        restricted: bool,
        training_mode: Option<bool>,
    ) -> PyResult<Vec<Option<OrtValue>>> {
        let owned_feeds = to_inputs(&feeds)?;
        let requested = Requested::new(&outputs)?;
        let options = CallOptions { only_execute_path_to_fetches: restricted, training_mode };
        let results = self.session.enter(py, |session| {
            session.run_bound_unreported(&named_views(&owned_feeds), &mut requested.targets(), options)
        })?;
        Ok(results.into_iter().map(|tensor| tensor.map(OrtValue::of)).collect())
    }

    fn state(&self, py: Python<'_>) -> PyResult<HashMap<String, OrtValue>> {
        self.session.enter(py, |session| session.state()).map(to_values)
    }

    /// Returns the gradients accumulated so far for the next update, by weight.
    fn gathered(&self, py: Python<'_>) -> PyResult<HashMap<String, OrtValue>> {
        self.session.enter(py, |session| session.accumulated_gradients()).map(to_values)
    }

    fn load_gathered(&self, py: Python<'_>, sums: HashMap<String, Py<OrtValue>>) -> PyResult<()> {
        let sums = to_tensors(&sums)?;
        self.session.enter(py, |session| session.load_accumulated_gradients(&sums))
    }

    fn running_statistics(&self, py: Python<'_>) -> PyResult<HashMap<String, OrtValue>> {
        self.session.enter(py, |session| session.running_statistics()).map(to_values)
    }

    fn load_running_statistics(
        &self,
        py: Python<'_>,
        given_values: HashMap<String, Py<OrtValue>>,
    ) -> PyResult<()> {
        let values = to_tensors(&given_values)?;
        self.session.enter(py, |session| session.load_running_statistics(&values))
    }

    /// Returns the number of runs that computed gradients.
    fn train_steps(&self, py: Python<'_>) -> PyResult<u64> {
        self.session.enter(py, |session| Ok(session.train_steps()))
    }

    fn set_train_steps(&self, py: Python<'_>, count: u64) -> PyResult<()> {
        self.session.enter(py, |session| {
            session.set_train_steps(count);
            Ok(())
        })
    }

    fn model_state(&self, py: Python<'_>, include_mixed_precision_weights: bool) -> PyResult<States> {
        self.session.enter(py, |session| session.model_state(include_mixed_precision_weights)).map(to_states)
    }

    /// Returns the number of outputs of the model itself.
    fn model_output_count(&self, py: Python<'_>) -> PyResult<usize> {
        self.session.enter(py, |session| Ok(session.model_output_count()))
    }

    /// Returns the memory use.
    fn memory(&self, py: Python<'_>) -> PyResult<MemoryBytes> {
        self.session.enter(py, |session| Ok(session.memory().into()))
    }

    /// Returns the time of the sums of gradients.
    fn communication_time(&self, py: Python<'_>) -> PyResult<CommunicationTime> {
        let time = self.session.enter(py, |session| Ok(session.communication_time()))?;
        let (total, waited) = (time.total.as_secs_f64(), time.waited.as_secs_f64());
        Ok(CommunicationTime { updates: time.updates, total, waited })
    }

    /// Returns the shapes of weights with an optimizer state on several ranks.
    fn shared_weights(&self, py: Python<'_>) -> PyResult<BTreeMap<String, Vec<usize>>> {
        self.session.enter(py, |session| session.shared_weights())
    }

    /// Returns the range of elements of a weight that this rank updates.
    fn updated_elements(&self, py: Python<'_>, weight: &str) -> PyResult<(usize, usize)> {
        let range = self.session.enter(py, |session| Ok(session.updated_elements(weight)))?;
        Ok((range.start, range.end))
    }

    fn optimizer_state(&self, py: Python<'_>) -> PyResult<States> {
        self.session.enter(py, |session| session.optimizer_states()).map(to_states)
    }

    fn load_state(&self, py: Python<'_>, state: HashMap<String, Py<OrtValue>>, strict: bool) -> PyResult<()> {
        let state = to_tensors(&state)?;
        self.session.enter(py, |session| session.load_state(&state, strict))
    }

    fn set_seed(&self, py: Python<'_>, seed: i64) -> PyResult<()> {
        self.session.enter(py, |session| {
            session.set_seed(seed);
            Ok(())
        })
    }

    fn begin_trace(&self, py: Python<'_>) -> PyResult<()> {
        self.session.enter(py, |session| {
            session.begin_trace();
            Ok(())
        })
    }

    /// Returns the trace of runs as JSON.
    fn end_trace(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.session.enter(py, |session| Ok(session.end_trace()))
    }

    fn dump(&self, py: Python<'_>) -> PyResult<String> {
        self.session.enter(py, |session| Ok(session.dump()))
    }
}
