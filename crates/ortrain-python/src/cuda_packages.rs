//! Folders of Python packages with libraries of CUDA.

use std::path::PathBuf;
use std::sync::Once;

use pyo3::intern;
use pyo3::prelude::*;

/// Adds the folders of Python packages to the search for CUDA's libraries, if a device may need them.
pub(crate) fn search_packages_for(device: &str) {
    static SEARCHED: Once = Once::new();
    let may_need_cuda = device.starts_with("cuda") || device == "auto";
    if !may_need_cuda || SEARCHED.is_completed() {
        return;
    }
    let folders = Python::attach(|py| -> PyResult<Vec<PathBuf>> {
        py.import(intern!(py, "sys"))?.getattr(intern!(py, "path"))?.extract()
    });
    // A path that is no text names no folder of packages.
    SEARCHED.call_once(|| ortrain::search_cuda_packages(folders.unwrap_or_default()));
}
