//! Inspection of models, and the list of operators.

use std::collections::HashMap;

use ortrain::{DType, Gradient, InspectOptions, OperatorInfo, Runs, Scope, Stage, artifact_parts};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::cuda_packages::search_packages_for;
use crate::error::{detached, raise};
use crate::model::{Source, encode_graph};

/// Returns declarations of values with types inferred from the model, as a message.
#[pyfunction]
pub(crate) fn declarations<'py>(
    py: Python<'py>,
    model: Source,
    names: Vec<String>,
) -> PyResult<Bound<'py, PyBytes>> {
    encode_graph(py, detached(py, || artifact_parts::declarations(model.0, &names))?)
}

/// Inspects a model. Returns the report as JSON, as short text and as complete text. With `strict`, errors of
/// its operators are raised.
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
) -> PyResult<(String, String, String)> {
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
    Ok((inspection.to_json(), inspection.to_string(), format!("{inspection:#}")))
}

/// Returns every operator: domain, name, true for standard ONNX, versions, kind of execution, kind of
/// gradient. Then the inputs of a partial gradient, the types of its inputs, and true if the last input may
/// be repeated.
#[pyfunction]
#[allow(clippy::type_complexity, reason = "the fields of a record")]
pub(crate) fn operators(
    py: Python<'_>,
) -> Vec<(
    &'static str,
    &'static str,
    bool,
    &'static [i64],
    &'static str,
    (&'static str, Vec<usize>),
    Vec<Vec<&'static str>>,
    bool,
)> {
    let described = |info: OperatorInfo| {
        let runs = match info.runs {
            Runs::Row => "row",
            Runs::Instructions => "instructions",
            Runs::Decomposition => "decomposition",
            Runs::Host => "host",
            Runs::ControlFlow => "control flow",
        };
        let gradient = match info.gradient {
            Gradient::Full => ("full", Vec::new()),
            Gradient::Partial(inputs) => ("partial", inputs),
            Gradient::Zero => ("zero", Vec::new()),
            Gradient::None => ("none", Vec::new()),
        };
        let names = |types: Vec<DType>| types.into_iter().map(DType::name).collect();
        let types = info.types.into_iter().map(names).collect();
        (info.domain, info.name, info.standard, info.versions, runs, gradient, types, info.variadic)
    };
    py.detach(ortrain::operators).into_iter().map(described).collect()
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
