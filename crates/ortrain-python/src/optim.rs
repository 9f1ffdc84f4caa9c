//! Table of optimizers, and descriptions of optimizers.

use std::collections::BTreeMap;

use ortrain::DType;
use ortrain::artifacts::{NameGenerator, optimizer_model_of_spec};
use ortrain::optim::{OPTIMIZERS, OptimizerFunction, OptimizerSpec, optimizer_model_of_function};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::raise;
use crate::records::OptimizerRow;
use crate::value::element_type_of_onnx;

/// Parses a description.
pub(crate) fn spec_of(text: &str) -> ortrain::Result<OptimizerSpec> {
    OptimizerSpec::from_text(text).map_err(|source| ortrain::Error::Argument(source.to_string()))
}

/// Returns all rows of the table of optimizers.
#[pyfunction]
pub(crate) fn optimizer_table() -> Vec<OptimizerRow> {
    OPTIMIZERS.iter().copied().map(OptimizerRow::from).collect()
}

/// Returns the optimizer model of a description as a message, and the last number in a generated name.
/// `dtypes` are the element types of the trained parameters (ONNX numbers).
#[pyfunction]
pub(crate) fn described_optimizer<'py>(
    py: Python<'py>,
    spec: &str,
    own: Option<OwnOptimizer>,
    dtypes: Vec<i32>,
    opset: i64,
    last: u64,
) -> PyResult<(Bound<'py, PyBytes>, u64)> {
    let dtypes = dtypes.into_iter().map(element_type_of_onnx).collect::<PyResult<Vec<DType>>>()?;
    let argument = |text: String| raise(ortrain::Error::Argument(text));
    let spec = spec_of(spec).map_err(raise)?;
    let mut names = NameGenerator::starting_after(last);
    let model = match own {
        Some(own) => optimizer_model_of_function(&own.0, &spec, &dtypes),
        None => optimizer_model_of_spec(&spec, &dtypes, &mut names, opset),
    };
    let model = model.map_err(|source| argument(source.to_string()))?;
    let bytes = ortrain::encode_model(&model).map_err(|source| raise(source.into()))?;
    Ok((PyBytes::new(py, &bytes), names.last()))
}

/// Returns a description of an optimizer of the table, checked and with all defaults.
#[pyfunction]
pub(crate) fn optimizer_spec(text: &str) -> PyResult<String> {
    let completed =
        |spec: OptimizerSpec| spec.complete().map_err(|source| ortrain::Error::Argument(source.to_string()));
    Ok(spec_of(text).and_then(completed).map_err(raise)?.to_text())
}

/// A custom optimizer.
#[pyclass(frozen, from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct OwnOptimizer(pub(crate) OptimizerFunction);

#[pymethods]
impl OwnOptimizer {
    /// Creates the optimizer from the bytes of an ONNX function.
    #[new]
    fn new(
        function: Vec<u8>,
        settings: BTreeMap<String, f64>,
        learning_rate: f64,
        starts: BTreeMap<String, String>,
    ) -> PyResult<OwnOptimizer> {
        let function = ortrain::decode_function(function).map_err(|source| raise(source.into()))?;
        let parsed = OptimizerFunction::new(function, settings, learning_rate, &starts);
        parsed.map(OwnOptimizer).map_err(|source| raise(ortrain::Error::Argument(source.to_string())))
    }

    /// Returns a description of the optimizer, checked and with all defaults.
    fn spec(&self, text: &str) -> PyResult<String> {
        let completed = |spec: OptimizerSpec| {
            self.0.complete(&spec).map_err(|source| ortrain::Error::Argument(source.to_string()))
        };
        Ok(spec_of(text).and_then(completed).map_err(raise)?.to_text())
    }
}
