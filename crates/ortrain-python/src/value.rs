//! Conversion between arrays and tensors.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ortrain::cuda::is_adopted;
use ortrain::{
    Bytes, DType, DeviceError, InputView, Memory, OutputTarget, OutputView, ParameterView, SmallType,
    TargetBytes, Tensor,
};
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyMemoryError, PyTypeError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PyCapsule, PyDict, PyString, PyTuple};
use pyo3::{IntoPyObjectExt, intern};

use crate::dlpack;
use crate::dlpack::{CPU_DEVICE, on_host};
use crate::error::{InvalidArgumentError, UnsupportedError, device_exception, raise};
use crate::lent::{area_at, area_of_array};
use crate::ort_device::OrtDevice;
use crate::shapes::{byte_length, shape_name};

/// A tensor in CPU memory, possibly shared with a NumPy array or with another library. The result of a run on
/// a device stays there until its elements are requested.
///
/// It has the name of the class in onnxruntime's extension module; an :class:`ortrain.OrtValue` contains it.
///
/// >>> from ortrain.capi import OrtDevice, OrtValue
/// >>> array = np.zeros((2, 3), np.float32)
/// >>> value = OrtValue.ortvalue_from_numpy(array, OrtDevice(0, 0, 0))
/// >>> array[1, 2] = 7
/// >>> value.numpy()[1, 2]
/// np.float32(7.0)
/// >>> value.shape(), value.data_type(), value.device_name()
/// ([2, 3], 'tensor(float)', 'Cpu')
#[pyclass(frozen, weakref, module = "ortrain._ortrain")]
pub(crate) struct OrtValue {
    dtype: DType,
    dims: Vec<usize>,
    contents: Mutex<Contents>,
}

/// Storage of the elements.
enum Contents {
    /// Exclusive storage: the elements never change. A request for their memory makes them shared.
    Own(Tensor),
    /// Shared storage: others may write to it at any time.
    Shared(Arc<Memory>),
}

impl OrtValue {
    /// Creates a value with exclusive storage.
    pub(crate) fn of(tensor: Tensor) -> OrtValue {
        let (dtype, dims) = (tensor.dtype(), tensor.dims().to_vec());
        OrtValue { dtype, dims, contents: Mutex::new(Contents::Own(tensor)) }
    }

    /// Creates a value in the first bytes of a memory.
    pub(crate) fn shared(dtype: DType, dims: Vec<usize>, memory: Arc<Memory>) -> OrtValue {
        OrtValue { dtype, dims, contents: Mutex::new(Contents::Shared(memory)) }
    }

    /// Imports a DLPack capsule, or an object with `__dlpack__`.
    pub(crate) fn of_dlpack(data: &Bound<'_, PyAny>, is_bool: bool) -> PyResult<OrtValue> {
        let (dtype, dims, memory) = dlpack::import_tensor(data, is_bool)?;
        Ok(OrtValue::shared(dtype, dims, memory))
    }

    /// Imports an array: shares its memory if it is contiguous and in native byte order, otherwise copies it.
    fn of_array(array: &Bound<'_, PyAny>) -> PyResult<OrtValue> {
        let (dtype, foreign) = supported_type(array)?;
        let dims: Vec<usize> = array.getattr(intern!(array.py(), "shape"))?.extract()?;
        let bytes = byte_length(dtype, &dims)?;
        let area = if foreign { None } else { area_of_array(array, bytes)? };
        match area {
            Some(area) => Ok(OrtValue::shared(dtype, dims, Arc::new(Memory::borrowed(Arc::new(area))))),
            None => tensor_of(array).map(OrtValue::of),
        }
    }

    /// Reinterprets the bits as another type of the same size.
    fn read_as(self, onnx_element_type: i32) -> PyResult<OrtValue> {
        let dtype = element_type_of_onnx(onnx_element_type)?;
        if dtype.size() != self.dtype.size() {
            let bits = self.dtype;
            return Err(InvalidArgumentError::new_err(format!(
                "the bits of {bits} cannot be read as {dtype}"
            )));
        }
        let contents = match self.contents.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Contents::Own(tensor) => {
                Contents::Own(tensor_from(dtype, self.dims.clone(), tensor.data().clone())?)
            }
            shared @ Contents::Shared(_) => shared,
        };
        Ok(OrtValue { dtype, dims: self.dims, contents: Mutex::new(contents) })
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn dims(&self) -> &[usize] {
        &self.dims
    }

    fn bytes(&self) -> PyResult<usize> {
        byte_length(self.dtype, &self.dims)
    }

    /// Returns the current tensor. Shared storage is copied, so that checks of its content remain valid.
    pub(crate) fn tensor(&self) -> PyResult<Tensor> {
        let memory = match &*self.contents() {
            Contents::Own(tensor) => return Ok(tensor.clone()),
            Contents::Shared(memory) => memory.clone(),
        };
        let len = self.bytes()?;
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(len)
            .map_err(|_| PyMemoryError::new_err(format!("cannot allocate {len} bytes for a copy")))?;
        bytes.resize(len, 0);
        memory.read(0, &mut bytes).map_err(device_exception)?;
        tensor_from(self.dtype, self.dims.clone(), bytes.into())
    }

    /// Returns the memory, which is shared from now on. Elements on a device move to the host first. Memory that another
    /// library owns stays where it is, and a copy is returned.
    pub(crate) fn memory(&self) -> PyResult<Arc<Memory>> {
        let mut contents = self.contents();
        let memory = match &*contents {
            Contents::Shared(memory) if memory.host().is_some() => return Ok(memory.clone()),
            Contents::Shared(memory) => {
                let bytes = memory.to_vec(0, self.bytes()?).map_err(device_exception)?;
                let copy = allocate_zeroed(bytes.len())?;
                copy.write(0, &bytes).map_err(device_exception)?;
                if is_adopted(memory) {
                    return Ok(Arc::new(copy));
                }
                copy
            }
            Contents::Own(tensor) => {
                let memory = allocate_zeroed(tensor.data().len())?;
                memory.write(0, tensor.data()).map_err(device_exception)?;
                memory
            }
        };
        let memory = Arc::new(memory);
        *contents = Contents::Shared(memory.clone());
        Ok(memory)
    }

    /// Returns the memory if it is shared or on a device.
    pub(crate) fn shared_memory(&self) -> Option<Arc<Memory>> {
        match &*self.contents() {
            Contents::Shared(memory) => Some(memory.clone()),
            Contents::Own(_) => None,
        }
    }

    /// Returns the address of the first element; 0 for an empty tensor.
    pub(crate) fn address(&self) -> PyResult<usize> {
        if let Some(memory) = self.shared_memory()
            && let Memory::Device(memory) = &*memory
            && let Some(address) = memory.address()
        {
            return Ok(if self.bytes()? == 0 { 0 } else { address });
        }
        Ok(if self.bytes()? == 0 { 0 } else { on_host(&*self.memory()?)?.as_ptr() as usize })
    }

    /// Exports a DLPack capsule without a version, for any library: booleans become uint8, as in onnxruntime.
    pub(crate) fn capsule<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let dtype = if self.dtype == DType::Bool { DType::U8 } else { self.dtype };
        dlpack::export_capsule(py, dtype, &self.dims, self.memory()?, false)
    }

    /// Returns a live view of the memory. bfloat16 becomes uint16, unless `named`.
    fn view<'py>(&self, py: Python<'py>, named: bool) -> PyResult<Bound<'py, PyAny>> {
        self.view_of(py, self.memory()?, named)
    }

    /// Returns a view of memory with the elements of this value.
    fn view_of<'py>(&self, py: Python<'py>, memory: Arc<Memory>, named: bool) -> PyResult<Bound<'py, PyAny>> {
        let dtype = if named { self.dtype } else { bits_of(self.dtype) };
        let requires_grad = !memory.is_read_only();
        view(
            py,
            ParameterView {
                name: "".into(),
                dtype,
                dims: self.dims.clone(),
                requires_grad,
                memory,
                offset: 0,
            },
        )
    }
}

#[pymethods]
impl OrtValue {
    /// Copies an array, with any strides and byte order. The copy is immutable.
    #[staticmethod]
    fn from_numpy(array: &Bound<'_, PyAny>) -> PyResult<OrtValue> {
        Ok(OrtValue::of(tensor_of(array)?))
    }

    /// Creates a value from a NumPy array: shares and keeps its memory if it is contiguous and in native byte
    /// order, otherwise copies it.
    #[staticmethod]
    fn ortvalue_from_numpy(array: &Bound<'_, PyAny>, device: OrtDevice) -> PyResult<OrtValue> {
        device.check()?;
        OrtValue::of_array(array)
    }

    /// Works like :meth:`ortvalue_from_numpy`, with the bits reinterpreted as an element type of
    /// ``TensorProto`` of the same size.
    #[staticmethod]
    fn ortvalue_from_numpy_with_onnx_type(
        array: &Bound<'_, PyAny>,
        onnx_element_type: i32,
    ) -> PyResult<OrtValue> {
        OrtValue::of_array(array)?.read_as(onnx_element_type)
    }

    /// Creates a value from the elements at an address: a NumPy type or a number of ``TensorProto``, a shape,
    /// and a device.
    ///
    /// The owner keeps the memory valid while the owner lives. Without an owner, the caller must keep it
    /// valid while the value, or an array of it, lives.
    #[staticmethod]
    #[pyo3(signature = (pointer, element_type, shape, device, owner=None))]
    fn ortvalue_from_pointer(
        pointer: usize,
        element_type: &Bound<'_, PyAny>,
        shape: Vec<Bound<'_, PyAny>>,
        device: OrtDevice,
        owner: Option<Py<PyAny>>,
    ) -> PyResult<OrtValue> {
        device.check()?;
        let dims = shape.iter().map(size).collect::<PyResult<Vec<usize>>>()?;
        let dtype = self::element_type(element_type)?;
        let bytes = byte_length(dtype, &dims)?;
        let refuse = |problem: String| {
            let shape = shape_name(dtype, &dims);
            InvalidArgumentError::new_err(format!("{pointer:#x} is no address of {shape}: {problem}"))
        };
        if pointer == 0 && bytes > 0 {
            return Err(refuse("it is null".into()));
        }
        if !pointer.is_multiple_of(dtype.size()) {
            let size = dtype.size();
            return Err(refuse(format!("it is not a multiple of {size} bytes, the element size")));
        }
        if pointer.checked_add(bytes).is_none() {
            return Err(refuse(format!("it has no valid range of {bytes} bytes")));
        }
        Ok(OrtValue::shared(
            dtype,
            dims,
            Arc::new(Memory::borrowed(Arc::new(area_at(pointer, bytes, owner)))),
        ))
    }

    /// Creates a value of zeros: a shape, a NumPy type or a number of ``TensorProto``, and a device.
    #[staticmethod]
    fn ortvalue_from_shape_and_type(
        shape: Vec<Bound<'_, PyAny>>,
        element_type: &Bound<'_, PyAny>,
        device: OrtDevice,
    ) -> PyResult<OrtValue> {
        device.check()?;
        let dims = shape.iter().map(size).collect::<PyResult<Vec<usize>>>()?;
        let dtype = self::element_type(element_type)?;
        let memory = allocate_zeroed(byte_length(dtype, &dims)?)?;
        Ok(OrtValue::shared(dtype, dims, Arc::new(memory)))
    }

    /// Creates a value from a tensor of another library, which shares and keeps its memory: a DLPack capsule,
    /// or an object with ``__dlpack__``. With ``is_bool_tensor``, a uint8 tensor is read as booleans.
    #[staticmethod]
    #[pyo3(signature = (data, is_bool_tensor=false))]
    fn from_dlpack(data: &Bound<'_, PyAny>, is_bool_tensor: bool) -> PyResult<OrtValue> {
        OrtValue::of_dlpack(data, is_bool_tensor)
    }

    /// Returns an array that shares the memory; it is read-only if the memory is.
    fn numpy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.view(py, true)
    }

    /// Returns a copy as a new array.
    fn array<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        static NDARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let shape = PyTuple::new(py, &self.dims)?;
        let memory = match &*self.contents() {
            Contents::Own(tensor) => Err(PyByteArray::new(py, tensor.data())),
            Contents::Shared(memory) => Ok(memory.clone()),
        };
        let bytes = match memory {
            Err(bytes) => bytes,
            Ok(memory) => PyByteArray::new_with(py, self.bytes()?, |bytes| {
                memory.read(0, bytes).map_err(device_exception)
            })?,
        };
        NDARRAY.import(py, "numpy", "ndarray")?.call1((shape, numpy_type(py, self.dtype)?, bytes))
    }

    /// Returns a writable array of a result that nothing else refers to: a large result shares its memory with the
    /// array, a small one is copied.
    fn result_array<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self.shared_memory() {
            Some(memory) if memory.host().is_some() => self.view_of(py, memory, true),
            _ => self.array(py),
        }
    }

    /// Returns the sizes of the axes.
    fn shape(&self) -> Vec<usize> {
        self.dims.clone()
    }

    /// Returns the type in onnxruntime's notation.
    fn data_type(&self) -> String {
        type_name(self.dtype)
    }

    /// Returns the number of the element type in ``TensorProto.DataType``.
    fn element_type(&self) -> i32 {
        self.dtype.to_onnx()
    }

    /// Returns the number of the element type; older name of :meth:`element_type`.
    fn proto_type(&self) -> i32 {
        self.dtype.to_onnx()
    }

    /// Returns the name of the device: ``Cpu``, or another one.
    fn device_name(&self) -> String {
        match &*self.contents() {
            Contents::Shared(memory) if memory.host().is_none() => memory.device().to_owned(),
            _ => "Cpu".to_owned(),
        }
    }

    /// Returns the address of the first element; 0 for an empty tensor. It never changes.
    fn data_ptr(&self) -> PyResult<usize> {
        self.address()
    }

    /// Returns True: the value is always a tensor.
    fn is_tensor(&self) -> bool {
        true
    }

    /// Returns True: a value always exists.
    fn has_value(&self) -> bool {
        true
    }

    /// Returns False: the value is a single tensor.
    fn is_tensor_sequence(&self) -> bool {
        false
    }

    /// Returns False: the value is a dense tensor.
    fn is_sparse_tensor(&self) -> bool {
        false
    }

    /// Copies an array, or another value, of the same type and shape into its memory.
    fn update_inplace(&self, data: &Bound<'_, PyAny>) -> PyResult<()> {
        static COPYTO: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let py = data.py();
        let (source, dtype, dims) = if let Ok(value) = data.cast::<OrtValue>() {
            let value = value.get();
            (value.view(py, false)?, value.dtype, value.dims.clone())
        } else {
            if !is_array(data)? {
                let kind = data.get_type().name()?;
                return Err(PyTypeError::new_err(format!(
                    "an OrtValue can be updated from a NumPy array or an OrtValue, not {kind}"
                )));
            }
            let dtype = supported_type(data)?.0;
            let dims: Vec<usize> = data.getattr(intern!(py, "shape"))?.extract()?;
            let bits = is_of_ml_dtypes(dtype)
                .then(|| data.call_method1(intern!(py, "view"), (bits_of(dtype).name(),)));
            (bits.transpose()?.unwrap_or_else(|| data.clone()), dtype, dims)
        };
        // Without a bfloat16 type in NumPy, such arrays are arrays of their bits.
        let bits = is_of_ml_dtypes(self.dtype) && dtype == bits_of(self.dtype);
        if (dtype != self.dtype && !bits) || dims != self.dims {
            return Err(InvalidArgumentError::new_err(format!(
                "the OrtValue is {}, got {}",
                shape_name(self.dtype, &self.dims),
                shape_name(dtype, &dims)
            )));
        }
        let memory = self.memory()?;
        if memory.is_read_only() {
            return Err(InvalidArgumentError::new_err(
                "the OrtValue shares the memory of a read-only array, so it cannot be updated; make it from a copy",
            ));
        }
        let target = self.view_of(py, memory.clone(), false)?;
        COPYTO.import(py, "numpy", "copyto")?.call1((target, source, "equiv"))?;
        match self.shared_memory().filter(|shared| is_adopted(shared)) {
            Some(adopted) => {
                let bytes = memory.to_vec(0, self.bytes()?).map_err(device_exception)?;
                adopted.write(0, &bytes).map_err(device_exception)
            }
            None => Ok(()),
        }
    }

    /// Returns True if arrays, tensors of other libraries or other values share the memory of this value.
    fn is_shared(&self) -> bool {
        match &*self.contents() {
            Contents::Own(_) => false,
            Contents::Shared(memory) => Arc::strong_count(memory) > 1,
        }
    }

    /// Exports a DLPack capsule, which shares the memory. Booleans become uint8.
    fn to_dlpack<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        self.capsule(py)
    }

    /// Exports a DLPack capsule for another library, by the protocol. Booleans remain booleans.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let shared = self.shared_memory().filter(|memory| memory.host().is_none());
        if let Some(memory) = shared.filter(|_| copy != Some(true))
            && let own @ (dlpack::CUDA, _) = dlpack::device_of(&memory)?
            && dl_device.is_none_or(|device| device == own)
        {
            let stream = stream.map(PyAnyMethods::extract).transpose()?;
            return dlpack::export_shared(py, self.dtype, &self.dims, memory, (stream, max_version));
        }
        if stream.is_some() {
            return Err(PyBufferError::new_err("a tensor in CPU memory has no stream"));
        }
        if dl_device.is_some_and(|device| device != CPU_DEVICE) {
            return Err(PyBufferError::new_err(
                "the tensor is in CPU memory; the consumer must copy it to the device",
            ));
        }
        let memory = match copy {
            Some(true) => {
                let copy = allocate_zeroed(self.bytes()?)?;
                copy.write(0, self.tensor()?.data()).map_err(device_exception)?;
                Arc::new(copy)
            }
            Some(false) | None => self.memory()?,
        };
        dlpack::export_capsule(
            py,
            self.dtype,
            &self.dims,
            memory,
            max_version.is_some_and(|(major, _)| major >= 1),
        )
    }

    /// Returns the DLPack device: a device of CUDA for a value in its memory, or the CPU.
    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        self.shared_memory().map_or(Ok(CPU_DEVICE), |memory| dlpack::device_of(&memory))
    }

    /// Returns the CUDA array interface, version 3. Values in other memory do not have the attribute.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let memory = self
            .shared_memory()
            .ok_or_else(|| PyAttributeError::new_err("the value is not on a device of CUDA"))?;
        dlpack::cuda_array_interface(py, self.dtype, &self.dims, &memory, false)
    }
}

/// Wraps tensors as inputs of the core.
pub(crate) fn tensor_views(tensors: &[Tensor]) -> Vec<InputView<'_>> {
    tensors.iter().map(InputView::from).collect()
}

/// Returns the tensors of some values. Shared storage is copied before any check.
pub(crate) fn tensors(values: &[Bound<'_, OrtValue>]) -> PyResult<Vec<Tensor>> {
    values.iter().map(|value| value.get().tensor()).collect()
}

/// Size in bytes from which a result has memory that its array can share. A view of a smaller result takes longer than
/// a copy.
const SHARED_RESULT_BYTES: usize = 64 << 10;

/// Collector of the results of a step, in model order. Results remain on a device.
#[derive(Default)]
pub(crate) struct Results(Vec<Option<OrtValue>>);

impl Results {
    pub(crate) fn store(&mut self, at: usize, value: OutputView<'_>) -> Result<(), DeviceError> {
        // If the device has no memory for the result, it is copied to this process.
        let is_shareable = value.is_on_device() || value.byte_count() >= SHARED_RESULT_BYTES;
        let copy = if is_shareable { value.copy().ok() } else { None };
        let result = match copy {
            Some(memory) => OrtValue::shared(value.dtype, value.dims.to_vec(), Arc::new(memory)),
            None => OrtValue::of(value.to_tensor()?),
        };
        if self.0.len() <= at {
            self.0.resize_with(at + 1, || None);
        }
        self.0[at] = Some(result);
        Ok(())
    }

    /// Returns the results by index, up to the last one.
    pub(crate) fn by_index(self) -> Vec<Option<OrtValue>> {
        self.0
    }

    pub(crate) fn values(self) -> Vec<OrtValue> {
        self.0.into_iter().flatten().collect()
    }
}

/// Returns true if an object is a NumPy array.
fn is_array(array: &Bound<'_, PyAny>) -> PyResult<bool> {
    static NDARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    array.is_instance(NDARRAY.import(array.py(), "numpy", "ndarray")?)
}

/// Returns the element type of a NumPy array, and true if its byte order is not native.
fn supported_type(array: &Bound<'_, PyAny>) -> PyResult<(DType, bool)> {
    if !is_array(array)? {
        let name = array.get_type().name()?;
        return Err(InvalidArgumentError::new_err(format!("expected a NumPy array, not {name}")));
    }
    let numpy_type = array.getattr(intern!(array.py(), "dtype"))?;
    let (dtype, foreign) = dtype_and_order(&numpy_type)?;
    let dtype = dtype
        .ok_or_else(|| UnsupportedError::new_err(format!("arrays of {numpy_type} are not supported")))?;
    Ok((dtype, foreign))
}

/// Copies a NumPy array with any strides and any byte order.
pub(crate) fn tensor_of(array: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    let py = array.py();
    let (dtype, foreign) = supported_type(array)?;
    let array = if foreign {
        let native =
            array.getattr(intern!(py, "dtype"))?.call_method1(intern!(py, "newbyteorder"), ("=",))?;
        array.call_method1(intern!(py, "astype"), (native,))?
    } else {
        array.clone()
    };
    let dims = array.getattr(intern!(py, "shape"))?.extract()?;
    let bytes: PyBackedBytes = array.call_method0(intern!(py, "tobytes"))?.extract()?;
    tensor_from(dtype, dims, Bytes::from_owner(bytes))
}

fn tensor_from(dtype: DType, dims: Vec<usize>, bytes: Bytes) -> PyResult<Tensor> {
    Tensor::new(dtype, dims, bytes).map_err(|error| InvalidArgumentError::new_err(error.to_string()))
}

/// Allocates zeroed memory.
fn allocate_zeroed(bytes: usize) -> PyResult<Memory> {
    Memory::try_new(bytes).map_err(|error| PyMemoryError::new_err(error.to_string()))
}

/// Extracts a size of a shape.
fn size(size: &Bound<'_, PyAny>) -> PyResult<usize> {
    size.extract::<usize>()
        .map_err(|_| InvalidArgumentError::new_err(format!("a shape must be a list of sizes, got {size}")))
}

pub(crate) fn element_type_of_onnx(code: i32) -> PyResult<DType> {
    DType::from_onnx(code).ok_or_else(|| {
        UnsupportedError::new_err(format!("tensors of ONNX element type {code} are not supported"))
    })
}

/// Parses an element type: a number of `TensorProto`, or any NumPy type.
pub(crate) fn element_type(type_or_name: &Bound<'_, PyAny>) -> PyResult<DType> {
    static DTYPE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if let Ok(number) = type_or_name.extract::<i32>() {
        return element_type_of_onnx(number);
    }
    let numpy_type = DTYPE.import(type_or_name.py(), "numpy", "dtype")?.call1((type_or_name,))?;
    dtype_and_order(&numpy_type)?
        .0
        .ok_or_else(|| UnsupportedError::new_err(format!("tensors of {numpy_type} are not supported")))
}

/// Addresses of the elements of an array.
struct ElementAddresses {
    /// Lowest address.
    start: usize,
    /// Element count and stride of each axis with more than one element, sorted by stride.
    axes: Vec<(usize, usize)>,
    /// Bytes of an element.
    size: usize,
}

impl ElementAddresses {
    /// Returns the addresses of a NumPy array with these dimensions; `None` if it is empty.
    fn of(array: &Bound<'_, PyAny>, dims: &[usize], size: usize) -> PyResult<Option<ElementAddresses>> {
        let py = array.py();
        let interface = array.getattr(intern!(py, "__array_interface__"))?;
        let (mut start, _): (usize, bool) = interface.get_item(intern!(py, "data"))?.extract()?;
        let strides: Vec<isize> = array.getattr(intern!(py, "strides"))?.extract()?;
        if dims.contains(&0) {
            return Ok(None);
        }
        let mut axes = Vec::new();
        for (&count, stride) in dims.iter().zip(strides).filter(|&(&count, _)| count > 1) {
            if stride < 0 {
                start = start.wrapping_sub(stride.unsigned_abs().wrapping_mul(count - 1));
            }
            axes.push((count, stride.unsigned_abs()));
        }
        axes.sort_unstable_by_key(|&(_, stride)| stride);
        Ok(Some(ElementAddresses { start, axes, size }))
    }

    /// Returns the address after the last byte.
    fn end(&self) -> usize {
        let reach = |end: usize, &(count, stride): &(usize, usize)| {
            end.saturating_add((count - 1).saturating_mul(stride))
        };
        self.axes.iter().fold(self.start.saturating_add(self.size), reach)
    }

    /// Returns the bytes of all elements.
    fn bytes(&self) -> usize {
        self.axes.iter().fold(self.size, |bytes, &(count, _)| bytes.saturating_mul(count))
    }

    /// Returns the address of each element.
    fn addresses(&self) -> Vec<usize> {
        self.axes.iter().fold(vec![self.start], |offsets, &(count, stride)| {
            offsets.iter().flat_map(|&at| (0..count).map(move |k| at + k * stride)).collect()
        })
    }

    /// Returns true if two elements share a byte.
    fn overlap_themselves(&self) -> bool {
        let mut reach = self.size;
        let spread = self.axes.iter().all(|&(count, stride)| {
            let clear = stride >= reach;
            reach = reach.saturating_add((count - 1).saturating_mul(stride));
            clear
        });
        // From here on, the number of elements is bounded by the size of the memory.
        !spread && (self.bytes() > self.end() - self.start || ranges_overlap([(self.addresses(), self.size)]))
    }

    /// Returns true if an element of one array shares a byte with an element of the other.
    fn overlap(&self, other: &ElementAddresses) -> bool {
        let dense = |array: &ElementAddresses| array.bytes() == array.end() - array.start;
        self.start < other.end()
            && other.start < self.end()
            && (dense(self) && dense(other)
                || ranges_overlap([self, other].map(|array| (array.addresses(), array.size))))
    }
}

/// Returns true if two elements (addresses and a common size each) share a byte.
fn ranges_overlap<const N: usize>(elements: [(Vec<usize>, usize); N]) -> bool {
    let of = |(addresses, size): (Vec<usize>, usize)| addresses.into_iter().map(move |at| (at, at + size));
    let mut ranges: Vec<(usize, usize)> = elements.into_iter().flat_map(of).collect();
    ranges.sort_unstable();
    ranges.windows(2).any(|pair| pair[1].0 < pair[0].1)
}

/// Checks that no two results share memory.
pub(crate) fn check_no_overlap(buffers: &[OutputBuffer]) -> PyResult<()> {
    for (at, buffer) in buffers.iter().enumerate() {
        let Some(element_addresses) = &buffer.addresses else { continue };
        let other = buffers[..at]
            .iter()
            .position(|other| other.addresses.as_ref().is_some_and(|other| element_addresses.overlap(other)));
        if let Some(other) = other {
            return Err(InvalidArgumentError::new_err(format!(
                "outputs[{other}] and outputs[{at}] share memory, so one result would overwrite the other; give \
                 each output its own array"
            )));
        }
    }
    Ok(())
}

/// Output buffer for a NumPy array with any strides and byte order.
pub(crate) struct OutputBuffer {
    dtype: DType,
    dims: Vec<usize>,
    bytes: Vec<u8>,
    /// Addresses of the array; `None` if it is empty.
    addresses: Option<ElementAddresses>,
}

impl OutputBuffer {
    /// Creates a buffer for an array. `at` is its index in the call, for errors.
    pub(crate) fn of(array: &Bound<'_, PyAny>, at: usize) -> PyResult<OutputBuffer> {
        let py = array.py();
        let writeable = array.getattr(intern!(py, "flags"))?.getattr(intern!(py, "writeable"))?;
        if !writeable.is_truthy()? {
            return Err(InvalidArgumentError::new_err(format!("outputs[{at}] is a read-only array")));
        }
        let (numpy_type, dtype) = type_of(array)?;
        let dtype = dtype.ok_or_else(|| {
            UnsupportedError::new_err(format!(
                "outputs[{at}] is an array of {numpy_type}, but no output has this type"
            ))
        })?;
        let dims: Vec<usize> = array.getattr(intern!(py, "shape"))?.extract()?;
        let element_addresses = ElementAddresses::of(array, &dims, dtype.size())?;
        if element_addresses.as_ref().is_some_and(ElementAddresses::overlap_themselves) {
            return Err(InvalidArgumentError::new_err(format!(
                "elements of outputs[{at}] share memory, so results would overwrite each other; give the output its \
                 own array"
            )));
        }
        let bytes = vec![0; dims.iter().product::<usize>() * dtype.size()];
        Ok(OutputBuffer { dtype, dims, bytes, addresses: element_addresses })
    }

    pub(crate) fn target(&mut self) -> OutputTarget<'_> {
        OutputTarget { dtype: self.dtype, dims: &self.dims, bytes: TargetBytes::Host(&mut self.bytes) }
    }

    /// Copies the buffer to its array.
    pub(crate) fn copy_to(self, array: &Bound<'_, PyAny>) -> PyResult<()> {
        static COPYTO: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let py = array.py();
        let value = OrtValue::of(tensor_from(self.dtype, self.dims, self.bytes.into())?);
        COPYTO.import(py, "numpy", "copyto")?.call1((array, value.array(py)?))?;
        Ok(())
    }
}

/// Returns the NumPy type of an array, and its element type.
fn type_of<'py>(array: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyAny>, Option<DType>)> {
    let numpy_type = array.getattr(intern!(array.py(), "dtype"))?;
    let dtype = dtype_and_order(&numpy_type)?.0;
    Ok((numpy_type, dtype))
}

/// Returns the element type of a NumPy type, and true if its byte order is not native.
fn dtype_and_order(numpy_type: &Bound<'_, PyAny>) -> PyResult<(Option<DType>, bool)> {
    let code = numpy_type.getattr(intern!(numpy_type.py(), "str"))?;
    let code = code.cast::<PyString>()?.to_cow()?;
    let foreign = if cfg!(target_endian = "little") { '>' } else { '<' };
    Ok((dtype_of(numpy_type, &code)?, code.starts_with(foreign)))
}

/// Returns the element type of a NumPy type such as `<f4`.
fn dtype_of(numpy_type: &Bound<'_, PyAny>, code: &str) -> PyResult<Option<DType>> {
    Ok(Some(match code.get(1..).unwrap_or_default() {
        "f4" => DType::F32,
        "f8" => DType::F64,
        "f2" => DType::F16,
        "b1" => DType::Bool,
        "i1" => DType::I8,
        "i2" => DType::I16,
        "i4" => DType::I32,
        "i8" => DType::I64,
        "u1" => DType::U8,
        "u2" => DType::U16,
        "u4" => DType::U32,
        "u8" => DType::U64,
        _ => {
            let name = numpy_type.getattr("name")?.extract::<String>()?;
            let small = SmallType::ALL.into_iter().map(DType::Small);
            return Ok([DType::BF16].into_iter().chain(small).find(|dtype| dtype.name() == name));
        }
    }))
}

/// Returns true for types that the package `ml_dtypes` adds to NumPy.
fn is_of_ml_dtypes(dtype: DType) -> bool {
    dtype == DType::BF16 || dtype.is_small()
}

/// Returns the type of the bits of a type of `ml_dtypes`.
fn bits_of(dtype: DType) -> DType {
    if dtype == DType::BF16 { DType::U16 } else { dtype.stored() }
}

/// Returns the NumPy type of a type of `ml_dtypes`, or `None` if the package is not installed.
fn type_of_ml_dtypes(py: Python<'_>, dtype: DType) -> Option<Bound<'_, PyAny>> {
    static PACKAGE: PyOnceLock<Option<Py<PyAny>>> = PyOnceLock::new();
    let find = || py.import("ml_dtypes").ok().map(|module| module.into_any().unbind());
    let package = PACKAGE.get_or_init(py, find).as_ref()?;
    package.bind(py).getattr(dtype.name()).ok()
}

/// Returns the NumPy type of an element type, by name or as an object.
pub(crate) fn numpy_type(py: Python<'_>, dtype: DType) -> PyResult<Bound<'_, PyAny>> {
    if !is_of_ml_dtypes(dtype) {
        return PyString::intern(py, dtype.name()).into_bound_py_any(py);
    }
    match type_of_ml_dtypes(py, dtype) {
        Some(found) => Ok(found),
        None => PyString::intern(py, bits_of(dtype).name()).into_bound_py_any(py),
    }
}

/// Returns the type of a tensor in onnxruntime's notation.
pub(crate) fn type_name(dtype: DType) -> String {
    let name = match dtype {
        DType::F32 => "float",
        DType::F64 => "double",
        DType::Small(small) => small.onnx_name(),
        other => other.name(),
    };
    format!("tensor({name})")
}

/// Part of a plane, exposed through NumPy's array interface. NumPy keeps this object as the base of its
/// array, and this object keeps the plane alive. There is never a Rust reference into a plane, so a write
/// through the array is as sound as a kernel's own write, at any time.
#[pyclass(frozen, module = "ortrain._ortrain")]
struct Plane(ParameterView);

#[pymethods]
impl Plane {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let view = &self.0;
        let kind = match view.dtype {
            DType::Bool => 'b',
            DType::F16 | DType::F32 | DType::F64 => 'f',
            DType::I8 | DType::I16 | DType::I32 | DType::I64 => 'i',
            DType::U8 | DType::U16 | DType::U32 | DType::U64 | DType::BF16 | DType::Small(_) => 'u',
        };
        let order = if cfg!(target_endian = "little") { '<' } else { '>' };
        let order = if view.dtype.size() == 1 { '|' } else { order };
        let address = on_host(&view.memory)?.as_ptr() as usize + view.offset;
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", PyTuple::new(py, &view.dims)?)?;
        interface.set_item("typestr", format!("{order}{kind}{}", view.dtype.size()))?;
        interface.set_item("data", (address, !view.requires_grad))?;
        Ok(interface)
    }
}

/// Copies part of a plane on a device, for reading.
fn copy_to_host(part: &ParameterView) -> PyResult<ParameterView> {
    let (tensor, memory) = (part.to_tensor().map_err(raise)?, allocate_zeroed(part.byte_len())?);
    memory.write(0, tensor.data()).map_err(device_exception)?;
    Ok(ParameterView { memory: Arc::new(memory), offset: 0, requires_grad: false, ..part.clone() })
}

/// Returns a live view of part of a plane, read-only for frozen parameters. For a plane on a device, it is a
/// read-only copy.
pub(crate) fn view(py: Python<'_>, part: ParameterView) -> PyResult<Bound<'_, PyAny>> {
    static ASARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let part = if part.memory.host().is_some() { part } else { py.detach(|| copy_to_host(&part))? };
    let dtype = part.dtype;
    let array = ASARRAY.import(py, "numpy", "asarray")?.call1((Plane(part),))?;
    match is_of_ml_dtypes(dtype).then(|| type_of_ml_dtypes(py, dtype)).flatten() {
        Some(found) => array.call_method1(intern!(py, "view"), (found,)),
        None => Ok(array),
    }
}

/// Creates a float32 vector.
pub(crate) fn to_vector(elements: &[f32]) -> OrtValue {
    OrtValue::of(Tensor::f32(&[elements.len()], elements))
}

/// Returns the elements of a float32 tensor of any shape.
pub(crate) fn float_elements(value: &OrtValue) -> PyResult<Vec<f32>> {
    if value.dtype == DType::F32 {
        return Ok(value.tensor()?.to_vec());
    }
    let actual = value.dtype;
    Err(InvalidArgumentError::new_err(format!("the buffer must be float32, got {actual}")))
}
