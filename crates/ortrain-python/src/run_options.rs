//! Options of runs as an argument.

use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

use ortrain::{Backend, ModuleOptions};
use pyo3::prelude::*;

use crate::cuda_packages::search_packages_for;
use crate::error::{InvalidArgumentError, raise, signal_interrupt};

/// Options of the runs of a module, a session, or a forward and backward pass.
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct RunOptions {
    pub(crate) run: ortrain::RunOptions,
    detect_anomaly: bool,
}

#[pymethods]
impl RunOptions {
    #[new]
    #[pyo3(signature = (
        *, device="cpu", num_threads=0, memory_limit=None, iteration_limit=None, precision="f32",
        bf16_fallback="none", detect_anomaly=false
    ))]
    fn new(
        device: &str,
        num_threads: usize,
        memory_limit: Option<usize>,
        iteration_limit: Option<u64>,
        precision: &str,
        bf16_fallback: &str,
        detect_anomaly: bool,
    ) -> PyResult<RunOptions> {
        let mut run = ortrain::RunOptions::default().backend(backend(device, num_threads)?);
        (run.memory_limit, run.iteration_limit) = (memory_limit, iteration_limit);
        (run.precision, run.bf16_fallback) = (parse_name(precision)?, parse_name(bf16_fallback)?);
        run.interrupt = Some(signal_interrupt());
        Ok(RunOptions { run, detect_anomaly })
    }
}

impl RunOptions {
    /// Returns the options of a module.
    pub(crate) fn of_module(&self) -> ModuleOptions {
        ModuleOptions::from(self.run.clone()).detect_anomaly(self.detect_anomaly)
    }
}

/// Returns the backend of a device name.
pub(crate) fn backend(device: &str, num_threads: usize) -> PyResult<Arc<dyn Backend>> {
    search_packages_for(device);
    ortrain::backend(device, num_threads).map_err(raise)
}

/// Parses a name.
fn parse_name<T: FromStr<Err: Display>>(name: &str) -> PyResult<T> {
    name.parse().map_err(|unknown: T::Err| InvalidArgumentError::new_err(unknown.to_string()))
}
