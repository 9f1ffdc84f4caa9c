//! The gradients of a model as a model.

use std::path::PathBuf;

use ortrain::Bytes;
use ortrain::gradient::{self, GradientOptions};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::error::{detached, raise};
use crate::forward_backward::encode_detached;
use crate::model::Source;

#[pyfunction]
pub(crate) fn grad(
    py: Python<'_>,
    model: Source,
    of: Vec<String>,
    wrt: Vec<String>,
    plain: bool,
) -> PyResult<Py<PyBytes>> {
    let options = GradientOptions { of, wrt, plain };
    encode_detached(py, move || gradient::grad(model.0, &options))
}

#[pyfunction]
pub(crate) fn vjp(
    py: Python<'_>,
    model: Source,
    of: Vec<String>,
    wrt: Vec<String>,
    plain: bool,
) -> PyResult<Py<PyBytes>> {
    let options = GradientOptions { of, wrt, plain };
    encode_detached(py, move || gradient::vjp(model.0, &options))
}

/// Adds the gradients of a loss to a model.
#[pyclass(module = "ortrain._ortrain")]
pub(crate) struct GradientGraph {
    graph: gradient::GradientGraph,
}

#[pymethods]
impl GradientGraph {
    #[new]
    fn new(
        py: Python<'_>,
        model: PyBackedBytes,
        y: Vec<String>,
        x: Vec<String>,
        loss: &str,
        plain: bool,
        stops: Vec<String>,
    ) -> PyResult<GradientGraph> {
        let model = Bytes::from_owner(model);
        let graph =
            detached(py, || gradient::GradientGraph::new(model, y, x, loss, plain)?.stop_gradients(stops))?;
        Ok(GradientGraph { graph })
    }

    fn build(&mut self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.graph.build())
    }

    fn get_model(&self, py: Python<'_>) -> Py<PyBytes> {
        PyBytes::new(py, self.graph.model()).unbind()
    }

    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| self.graph.save(path)).map_err(raise)
    }
}
