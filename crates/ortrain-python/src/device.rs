//! Devices, and device memory.

use std::sync::Arc;

use ortrain::{Backend, DType, Memory, ParameterView};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyDict};

use crate::cuda_packages::search_packages_for;
use crate::dlpack;
use crate::error::{InvalidArgumentError, device_exception, raise};
use crate::records::DeviceInfo;
use crate::shapes::shape_name;
use crate::value::{OrtValue, numpy_type, view};

/// Returns the devices of this machine.
#[pyfunction]
pub(crate) fn devices(py: Python<'_>) -> Vec<DeviceInfo> {
    search_packages_for("cuda");
    py.detach(ortrain::devices).into_iter().map(DeviceInfo::from).collect()
}

/// Returns the name of a backend in Python.
fn backend_name(backend: &dyn Backend) -> &str {
    if backend.device() == "cpu" { backend.name() } else { backend.device() }
}

/// Returns the canonical name of a device.
#[pyfunction]
pub(crate) fn device_name(py: Python<'_>, device: &str) -> PyResult<String> {
    search_packages_for(device);
    py.detach(|| Ok(backend_name(&*ortrain::backend(device, 0)?).to_owned())).map_err(raise)
}

/// A plane in device memory: all parameters, or all gradients, of one element type.
///
/// ``trainable_planes()``, ``frozen_planes()`` and ``gradient_planes()`` return it if the state is on a
/// device. This process cannot address its elements, so they are copied: from the device by ``numpy()``, to
/// the device by ``copy_from()``.
///
/// >>> state.to("vulkan").trainable_planes()
/// [DeviceArray(shape=(7296,), dtype=float32, device="vulkan")]
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct DeviceArray {
    memory: Arc<Memory>,
    dtype: DType,
    writeable: bool,
}

impl DeviceArray {
    fn len(&self) -> usize {
        self.memory.len() / self.dtype.size()
    }
}

#[pymethods]
impl DeviceArray {
    /// Returns the number of elements as a one-element tuple.
    ///
    /// >>> [plane.shape for plane in state.to("vulkan").trainable_planes()]
    /// [(7296,)]
    #[getter]
    fn shape(&self) -> (usize,) {
        (self.len(),)
    }

    /// Returns the element type as a NumPy type.
    ///
    /// >>> [plane.dtype for plane in state.to("vulkan").trainable_planes()]
    /// [dtype('float32')]
    #[getter]
    fn dtype<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("numpy")?.getattr("dtype")?.call1((numpy_type(py, self.dtype)?,))
    }

    /// Returns the name of the device.
    ///
    /// >>> [plane.device for plane in state.to("vulkan").trainable_planes()]
    /// ['vulkan']
    #[getter]
    fn device(&self) -> &str {
        self.memory.device()
    }

    /// Returns a read-only copy of the elements. Waits until the device has finished its pending work.
    ///
    /// >>> (before,) = state.trainable_planes()
    /// >>> (plane,) = state.to("vulkan").trainable_planes()
    /// >>> np.array_equal(plane.numpy(), before), plane.numpy().flags.writeable
    /// (True, False)
    fn numpy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (dtype, dims) = (self.dtype, vec![self.len()]);
        let (memory, name) = (self.memory.clone(), "".into());
        view(py, ParameterView { name, dtype, dims, requires_grad: false, memory, offset: 0 })
    }

    /// Works like :meth:`numpy`, or returns a writeable copy if a copy or another type is requested.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        &self,
        py: Python<'py>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if copy == Some(false) {
            let sentence =
                format!("the plane is on device {:?}, so an array of it must be a copy", self.device());
            return Err(PyValueError::new_err(sentence));
        }
        let array = self.numpy(py)?;
        match (dtype, copy) {
            (Some(dtype), _) => array.call_method1("astype", (dtype,)),
            (None, Some(true)) => array.call_method0("copy"),
            (None, _) => Ok(array),
        }
    }

    /// Copies an array, an ``OrtValue``, or a tensor of another library, of the same shape and type. A value on the same
    /// device of CUDA is copied there.
    ///
    /// Raises ``InvalidArgumentError`` for another shape or type, and for the plane of frozen parameters.
    ///
    /// >>> (plane,) = state.to("vulkan").trainable_planes()
    /// >>> plane.copy_from(np.zeros(plane.shape, plane.dtype))
    /// >>> float(np.abs(state.parameters["fc1.weight"].data).max())
    /// 0.0
    fn copy_from(&self, array: &Bound<'_, PyAny>) -> PyResult<()> {
        static NATIVE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let py = array.py();
        let native_value = NATIVE.import(py, "ortrain._inputs", "native_value")?.call1((array,))?;
        let array = native_value.cast::<OrtValue>()?.get();
        if !self.writeable {
            return Err(InvalidArgumentError::new_err(
                "the plane holds frozen parameters, and is read-only; state.parameters[name] = array sets one of them",
            ));
        }
        let (expected_dims, actual_dims) = ([self.len()], array.dims());
        // Without the package ``ml_dtypes``, bfloat16 arrays are arrays of their bits.
        let is_bits = self.dtype == DType::BF16 && array.dtype() == DType::U16;
        if (array.dtype() != self.dtype && !is_bits) || actual_dims != expected_dims {
            let (expected, found) =
                (shape_name(self.dtype, &expected_dims), shape_name(array.dtype(), actual_dims));
            return Err(InvalidArgumentError::new_err(format!("the plane is {expected}, got {found}")));
        }
        if let Some(memory) = array.shared_memory().filter(|memory| memory.host().is_none()) {
            return py
                .detach(|| self.memory.copy_from(0, &memory, self.memory.len()))
                .map_err(device_exception);
        }
        let tensor = array.tensor()?;
        py.detach(|| self.memory.write(0, tensor.data())).map_err(device_exception)
    }

    /// Exports a DLPack capsule, which shares the memory, in the order of the consumer's stream. Only memory of CUDA has
    /// addresses for other libraries.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let own = self.__dlpack_device__()?;
        if copy == Some(true) || dl_device.is_some_and(|device| device != own) {
            return Err(PyBufferError::new_err(
                "the consumer must copy the plane; numpy() copies it to the host",
            ));
        }
        if !self.writeable && max_version.is_none_or(|(major, _)| major < 1) {
            return Err(PyBufferError::new_err(
                "the plane is read-only, and a DLPack capsule without a version cannot express that; numpy() copies it",
            ));
        }
        dlpack::export_shared(py, self.dtype, &[self.len()], self.memory.clone(), (stream, max_version))
    }

    /// Returns the DLPack device: the kind of CUDA, and the index of the device.
    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        match dlpack::device_of(&self.memory)? {
            (dlpack::CPU, _) => Err(PyBufferError::new_err(format!(
                "memory of the device {:?} has no address for other libraries; numpy() copies it",
                self.device()
            ))),
            device => Ok(device),
        }
    }

    /// Returns the CUDA array interface, version 3. Memory of other devices does not have the attribute.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        dlpack::cuda_array_interface(py, self.dtype, &[self.len()], &self.memory, !self.writeable)
    }

    fn __len__(&self) -> usize {
        self.len()
    }

    fn __repr__(&self) -> String {
        format!("DeviceArray(shape=({},), dtype={}, device={:?})", self.len(), self.dtype, self.device())
    }
}

/// Wraps planes as vectors of their elements: live views of planes in this process, a [`DeviceArray`] for
/// each plane on a device.
pub(crate) fn wrap_planes<'py>(
    py: Python<'py>,
    parts: Vec<(DType, Arc<Memory>)>,
    writeable: bool,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let plane = |(dtype, memory): (DType, Arc<Memory>)| {
        if memory.host().is_none() {
            return Ok(Bound::new(py, DeviceArray { memory, dtype, writeable })?.into_any());
        }
        let dims = vec![memory.len() / dtype.size()];
        view(py, ParameterView { name: "".into(), dtype, dims, requires_grad: writeable, memory, offset: 0 })
    };
    parts.into_iter().map(plane).collect()
}
