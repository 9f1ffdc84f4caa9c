//! Models as arguments: where they are, their changes and custom operators.

use std::path::PathBuf;

use ortrain::{Bytes, FunctionProto, ModelSource};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyTuple};

use crate::error::{InvalidArgumentError, raise};
use crate::value::OrtValue;

/// Custom operators and gradients.
#[pyclass(module = "ortrain._ortrain")]
pub(crate) struct OperatorLibrary {
    library: ortrain::OperatorLibrary,
}

#[pymethods]
impl OperatorLibrary {
    #[new]
    fn new() -> OperatorLibrary {
        OperatorLibrary { library: ortrain::OperatorLibrary::new() }
    }

    fn add_function(&mut self, function: &[u8]) -> PyResult<()> {
        self.library.add_function(decode_function(function)?).map_err(raise)
    }

    #[pyo3(signature = (domain, operator, node, function))]
    fn add_gradient(
        &mut self,
        domain: &str,
        operator: &str,
        node: Option<&str>,
        function: &[u8],
    ) -> PyResult<()> {
        let function = decode_function(function)?;
        let outcome = match node {
            Some(node) => self.library.add_node_gradient(node, domain, operator, function),
            None => self.library.add_gradient(domain, operator, function),
        };
        outcome.map_err(raise)
    }
}

fn decode_function(function: &[u8]) -> PyResult<FunctionProto> {
    ortrain::decode_function(function.to_vec())
        .map_err(|source| InvalidArgumentError::new_err(source.to_string()))
}

/// Changes of a model before its use.
#[pyclass(module = "ortrain._ortrain")]
pub(crate) struct ModelChanges {
    changes: ortrain::ModelChanges,
}

#[pymethods]
impl ModelChanges {
    #[new]
    fn new() -> ModelChanges {
        ModelChanges { changes: ortrain::ModelChanges::default() }
    }

    fn initializer(&mut self, name: String, value: &Bound<'_, OrtValue>) -> PyResult<()> {
        self.changes.initializers.push((name, value.get().tensor()?));
        Ok(())
    }

    fn size(&mut self, name: String, size: usize) {
        self.changes.sizes.push((name, size));
    }

    fn stop_gradients(&mut self, values: Vec<String>) {
        self.changes.stops.extend(values);
    }

    fn size_of_denotation(&mut self, denotation: String, size: usize) {
        self.changes.sizes_by_denotation.push((denotation, size));
    }
}

/// A path, the bytes of a model, or a pair of bytes and the folder of external data. It may be paired with
/// custom operators or changes.
pub(crate) struct Source(pub(crate) ModelSource);

impl<'py> FromPyObject<'_, 'py> for Source {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Source> {
        if let Ok((bytes, folder)) = object.extract::<(PyBackedBytes, PathBuf)>() {
            return Ok(Source(ModelSource::BytesIn(Bytes::from_owner(bytes), folder)));
        }
        if let Ok((Source(model), changed)) = object.extract::<(Source, PyRef<'_, ModelChanges>)>() {
            return Ok(Source(model.with_changes(changed.changes.clone())));
        }
        if let Ok(pair) = object.cast::<PyTuple>() {
            let (Source(model), operators) = pair.extract::<(Source, PyRef<'_, OperatorLibrary>)>()?;
            return Ok(Source(model.with_operators(&operators.library)));
        }
        Ok(Source(if object.is_instance_of::<PyBytes>() {
            ModelSource::Bytes(Bytes::from_owner(object.extract::<PyBackedBytes>()?))
        } else {
            ModelSource::Path(object.extract::<PathBuf>()?)
        }))
    }
}

/// Encodes a graph as the bytes of a model message.
pub(crate) fn encode_graph(py: Python<'_>, graph: ortrain::GraphProto) -> PyResult<Bound<'_, PyBytes>> {
    let model = ortrain::ModelProto { graph: Some(graph), ..ortrain::ModelProto::default() };
    Ok(PyBytes::new(py, &ortrain::encode_model(&model).map_err(|source| raise(source.into()))?))
}
