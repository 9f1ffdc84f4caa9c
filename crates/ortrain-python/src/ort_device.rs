//! Devices under the names of onnxruntime's extension module.

use pyo3::prelude::*;

use crate::error::UnsupportedError;

/// A device in onnxruntime's numbering: device kind (``0`` for CPU, ``1`` for CUDA), memory kind, and index.
///
/// Any device can be named; values can be created on the CPU only.
///
/// >>> from ortrain.capi import OrtDevice
/// >>> device = OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)
/// >>> device.device_type(), device.device_id()
/// (0, 0)
#[pyclass(frozen, eq, hash, from_py_object, module = "ortrain._ortrain")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct OrtDevice {
    kind: i32,
    memory: i32,
    id: i32,
}

/// Names of device kinds, by number.
const KINDS: [&str; 2] = ["cpu", "cuda"];

impl OrtDevice {
    /// Checks that values can be created on this device.
    pub(crate) fn check(self) -> PyResult<()> {
        if self.kind == 0 {
            return Ok(());
        }
        let kind_name = KINDS.get(self.kind as usize).map_or_else(String::new, |name| format!(" ({name})"));
        Err(UnsupportedError::new_err(format!(
            "device type {}{kind_name} is not supported: ortrain keeps values in memory of the CPU, device type 0",
            self.kind
        )))
    }
}

#[pymethods]
impl OrtDevice {
    #[new]
    fn new(device_type: i32, memory: i32, device_id: i32) -> OrtDevice {
        OrtDevice { kind: device_type, memory, id: device_id }
    }

    /// Returns the number of the CPU: 0.
    #[staticmethod]
    fn cpu() -> i32 {
        0
    }

    /// Returns the number of CUDA: 1.
    #[staticmethod]
    fn cuda() -> i32 {
        1
    }

    /// Returns the number of a device's default memory: 0.
    #[staticmethod]
    fn default_memory() -> i32 {
        0
    }

    /// Returns the number of the device kind.
    fn device_type(&self) -> i32 {
        self.kind
    }

    /// Returns the index among the devices of its kind.
    fn device_id(&self) -> i32 {
        self.id
    }

    /// Returns the number of the memory kind.
    fn mem_type(&self) -> i32 {
        self.memory
    }

    fn __repr__(&self) -> String {
        format!("OrtDevice({}, {}, {})", self.kind, self.memory, self.id)
    }
}
