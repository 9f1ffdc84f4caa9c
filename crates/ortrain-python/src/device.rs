//! Devices, and memory that lies there.

use std::sync::Arc;

use ortrain::{Backend, DType, DeviceInfo, Memory, ParameterView};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::error::{InvalidArgumentError, raise};
use crate::value::{OrtValue, failed, numpy_type, shape_name, view};

/// Name, kind, description, driver, bytes of memory, of a plane and of a tensor.
type Row = (String, &'static str, String, String, Option<u64>, Option<u64>, Option<u64>);

/// The devices of this machine.
#[pyfunction]
pub(crate) fn devices(py: Python<'_>) -> Vec<Row> {
    let row = |device: DeviceInfo| {
        let DeviceInfo { name, kind, description, driver, memory, plane_bytes, tensor_bytes, .. } = device;
        (name, kind, description, driver, memory, plane_bytes, tensor_bytes)
    };
    py.detach(ortrain::devices).into_iter().map(row).collect()
}

/// The name of a backend, by which Python asks for it.
fn name_of(backend: &dyn Backend) -> &str {
    if backend.device() == "cpu" { backend.name() } else { backend.device() }
}

/// The name by which a device is known, which may be asked for by another one.
#[pyfunction]
pub(crate) fn device_name(py: Python<'_>, device: &str) -> PyResult<String> {
    py.detach(|| Ok(name_of(&*ortrain::backend(device, 0)?).to_owned())).map_err(raise)
}

/// A plane that lies on a device: all parameters, or all gradients, of one element type.
///
/// It is what ``trainable_planes()``, ``frozen_planes()`` and ``gradient_planes()`` give where the state lies on a device. This
/// process has no address for its elements, so they are copied: out by ``numpy()``, in by ``copy_from()``.
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
    /// The number of elements, as a tuple of one.
    ///
    /// >>> [plane.shape for plane in state.to("vulkan").trainable_planes()]
    /// [(7296,)]
    #[getter]
    fn shape(&self) -> (usize,) {
        (self.len(),)
    }

    /// The type of the elements, as a NumPy type.
    ///
    /// >>> [plane.dtype for plane in state.to("vulkan").trainable_planes()]
    /// [dtype('float32')]
    #[getter]
    fn dtype<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("numpy")?.getattr("dtype")?.call1((numpy_type(py, self.dtype)?,))
    }

    /// The name of the device.
    ///
    /// >>> [plane.device for plane in state.to("vulkan").trainable_planes()]
    /// ['vulkan']
    #[getter]
    fn device(&self) -> &str {
        self.memory.device()
    }

    /// A copy of the elements, which is read-only. It waits until the device has done what it was given.
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

    /// As :meth:`numpy`, or a copy of its own where one, or another type, is asked for.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        &self,
        py: Python<'py>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if copy == Some(false) {
            let sentence =
                format!("the plane lies on the device {:?}, so that an array of it is a copy", self.device());
            return Err(PyValueError::new_err(sentence));
        }
        let array = self.numpy(py)?;
        match (dtype, copy) {
            (Some(dtype), _) => array.call_method1("astype", (dtype,)),
            (None, Some(true)) => array.call_method0("copy"),
            (None, _) => Ok(array),
        }
    }

    /// Copies an array, or an ``OrtValue``, of its shape and type to the device.
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
        let given = NATIVE.import(py, "ortrain._inputs", "native_value")?.call1((array,))?;
        let array = given.cast::<OrtValue>()?.get();
        if !self.writeable {
            return Err(InvalidArgumentError::new_err(
                "the plane holds frozen parameters, and is read-only; state.parameters[name] = array sets one of them",
            ));
        }
        let (wanted, found) = ([self.len()], array.dims());
        // Without the package for it, arrays of bfloat16 are arrays of their bits.
        let is_bits = self.dtype == DType::BF16 && array.dtype() == DType::U16;
        if (array.dtype() != self.dtype && !is_bits) || found != wanted {
            let (wanted, found) = (shape_name(self.dtype, &wanted), shape_name(array.dtype(), found));
            return Err(InvalidArgumentError::new_err(format!(
                "the plane is {wanted}, but {found} was given"
            )));
        }
        let tensor = array.tensor()?;
        py.detach(|| self.memory.write(0, tensor.data())).map_err(failed)
    }

    fn __len__(&self) -> usize {
        self.len()
    }

    fn __repr__(&self) -> String {
        format!("DeviceArray(shape=({},), dtype={}, device={:?})", self.len(), self.dtype, self.device())
    }
}

/// Whole planes, each a vector of its elements: live views of those of this process, a [`DeviceArray`] for each one of a device.
pub(crate) fn planes<'py>(
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
