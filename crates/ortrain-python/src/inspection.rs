//! Inspection of models, and the list of operators.

use std::collections::HashMap;

use ortrain::optim::OptimizerSpec;
use ortrain::{InspectOptions, Scope, Stage, artifact_parts};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::cuda_packages::search_packages_for;
use crate::error::{detached, raise};
use crate::model::{Source, encode_graph};
use crate::records::{
    GradientStop, NodeNote, Obstacle, OperatorInfo, ParameterInfo, StepCost, StopCandidate,
};

/// Returns declarations of values with types inferred from the model, as a message.
#[pyfunction]
pub(crate) fn declarations<'py>(
    py: Python<'py>,
    model: Source,
    names: Vec<String>,
) -> PyResult<Bound<'py, PyBytes>> {
    encode_graph(py, detached(py, || artifact_parts::declarations(model.0, &names))?)
}

/// Inspects a model. With `strict`, errors of its operators are raised.
#[pyfunction]
#[pyo3(signature = (model, values, first_output, *, strict, batch_size, shapes))]
pub(crate) fn inspect(
    py: Python<'_>,
    model: Source,
    values: Vec<String>,
    first_output: bool,
    strict: bool,
    batch_size: Option<usize>,
    shapes: Vec<(String, Vec<usize>)>,
) -> PyResult<Inspection> {
    let scope = match (values.is_empty(), first_output) {
        (false, _) => Scope::Values(values),
        (true, true) => Scope::FirstOutput,
        (true, false) => Scope::Outputs,
    };
    let mut options = InspectOptions::default();
    options.batch_size = batch_size;
    options.shapes = shapes;
    let inspection = detached(py, || match strict {
        true => ortrain::inspect_strictly(model.0, &scope),
        false => ortrain::inspect_with(model.0, &scope, &options),
    })?;
    Ok(Inspection(inspection))
}

/// Findings about a model.
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct Inspection(ortrain::Inspection);

#[pymethods]
impl Inspection {
    fn kind(&self) -> &'static str {
        self.0.kind.name()
    }

    /// Returns the inputs of a run with their types.
    fn inputs(&self) -> Vec<(String, String)> {
        self.0.inputs.clone()
    }

    fn parameters(&self) -> Vec<ParameterInfo> {
        self.0.parameters.iter().map(ParameterInfo::from).collect()
    }

    fn obstacle(&self) -> Option<&str> {
        self.0.obstacle.as_deref()
    }

    fn obstacles(&self) -> Vec<Obstacle> {
        self.0.obstacles.iter().map(Obstacle::from).collect()
    }

    fn stops(&self) -> Vec<GradientStop> {
        self.0.stops.iter().map(GradientStop::from).collect()
    }

    fn stop_candidates(&self) -> Vec<StopCandidate> {
        self.0.stop_candidates.iter().map(StopCandidate::from).collect()
    }

    fn warnings(&self) -> Vec<String> {
        self.0.warnings.clone()
    }

    fn about_guesses(&self) -> Option<&str> {
        self.0.about_guesses.as_deref()
    }

    fn host_steps(&self) -> Vec<NodeNote> {
        self.0.host_steps.iter().map(NodeNote::from).collect()
    }

    fn control_flow(&self) -> Vec<NodeNote> {
        self.0.control_flow.iter().map(NodeNote::from).collect()
    }

    /// Returns the inputs with unknown shapes, with their types.
    fn open_inputs(&self) -> Vec<(String, String)> {
        self.0.open_inputs.clone()
    }

    fn value_inputs(&self) -> Vec<String> {
        self.0.value_inputs.clone()
    }

    fn step(&self) -> Option<StepCost> {
        self.0.step.as_ref().map(StepCost::from)
    }

    /// Returns the description of the optimizer, as the text that checkpoints store.
    fn optimizer(&self) -> Option<String> {
        self.0.optimizer.as_ref().map(OptimizerSpec::to_text)
    }

    fn text(&self) -> String {
        self.0.to_string()
    }

    fn complete_text(&self) -> String {
        format!("{:#}", self.0)
    }

    fn to_json(&self) -> String {
        self.0.to_json()
    }
}

/// Returns every operator.
#[pyfunction]
pub(crate) fn operators(py: Python<'_>) -> Vec<OperatorInfo> {
    py.detach(ortrain::operators).into_iter().map(OperatorInfo::from).collect()
}

/// Returns one stage of a model as text.
#[pyfunction]
pub(crate) fn dump(
    py: Python<'_>,
    model: Source,
    stage: &str,
    shapes: HashMap<String, Vec<usize>>,
) -> PyResult<String> {
    let stage = Stage::from_name(stage).map_err(raise)?;
    if stage == Stage::CudaKernels {
        search_packages_for("cuda");
    }
    let shapes: Vec<(String, Vec<usize>)> = shapes.into_iter().collect();
    detached(py, || ortrain::dump(model.0, stage, &shapes))
}
