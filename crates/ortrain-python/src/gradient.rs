//! The gradients of a model as a model.

use std::path::PathBuf;

use ortrain::gradient::{self, GradientOptions};
use ortrain::{Bytes, Error, ModelProto, ModelSource, encode_model};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::error::raise;
use crate::tools::Source;

#[pyfunction]
pub(crate) fn grad(
    py: Python<'_>,
    model: Source,
    of: Vec<String>,
    wrt: Vec<String>,
    plain: bool,
) -> PyResult<Py<PyBytes>> {
    encoded(py, gradient::grad, model, GradientOptions { of, wrt, plain })
}

#[pyfunction]
pub(crate) fn vjp(
    py: Python<'_>,
    model: Source,
    of: Vec<String>,
    wrt: Vec<String>,
    plain: bool,
) -> PyResult<Py<PyBytes>> {
    encoded(py, gradient::vjp, model, GradientOptions { of, wrt, plain })
}

fn encoded(
    py: Python<'_>,
    make: fn(ModelSource, &GradientOptions) -> ortrain::Result<ModelProto>,
    Source(model): Source,
    options: GradientOptions,
) -> PyResult<Py<PyBytes>> {
    let bytes = py.detach(|| encode_model(&make(model, &options)?).map_err(Error::from)).map_err(raise)?;
    Ok(PyBytes::new(py, &bytes).unbind())
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
    ) -> PyResult<GradientGraph> {
        let model = Bytes::from_owner(model);
        let graph = py.detach(|| gradient::GradientGraph::new(model, y, x, loss, plain)).map_err(raise)?;
        Ok(GradientGraph { graph })
    }

    fn build(&mut self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.graph.build()).map_err(raise)
    }

    fn get_model(&self, py: Python<'_>) -> Py<PyBytes> {
        PyBytes::new(py, self.graph.model()).unbind()
    }

    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| self.graph.save(path)).map_err(raise)
    }
}
