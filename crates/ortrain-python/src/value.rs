//! Arrays in and out.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ortrain::{
    Bytes, DType, Delivered, Destination, DeviceError, Dim, Given, HostMemory, Memory, ParameterView, Tensor,
    ValueInfo,
};
use pyo3::exceptions::{PyBufferError, PyMemoryError, PyTypeError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PyCapsule, PyDict, PyList, PyString, PyTuple};
use pyo3::{IntoPyObjectExt, intern};

use crate::dlpack;
use crate::error::{InvalidArgumentError, UnsupportedError, raise};
use crate::lent::{area_at, area_of_array};
use crate::vector::{DLPACK_DEVICE, OrtDevice};

/// A tensor in memory of the CPU, which it may share with a NumPy array or with another library. The result of a run on a
/// device lies there, until somebody asks for its elements.
///
/// This is what onnxruntime's extension module calls so, and what an :class:`ortrain.OrtValue` has inside.
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

/// Where the elements are.
enum Contents {
    /// Nobody else has them, so they never change. They become shared when somebody asks for their memory.
    Own(Tensor),
    /// Others may write to them at any time.
    Shared(Arc<Memory>),
}

impl OrtValue {
    /// A tensor that nobody else has.
    pub(crate) fn of(tensor: Tensor) -> OrtValue {
        let (dtype, dims) = (tensor.dtype(), tensor.dims().to_vec());
        OrtValue { dtype, dims, contents: Mutex::new(Contents::Own(tensor)) }
    }

    /// A tensor whose elements are a memory of as many bytes, or the first ones of it.
    pub(crate) fn shared(dtype: DType, dims: Vec<usize>, memory: Arc<Memory>) -> OrtValue {
        OrtValue { dtype, dims, contents: Mutex::new(Contents::Shared(memory)) }
    }

    /// What a DLPack capsule has, or an object that makes one.
    pub(crate) fn of_dlpack(data: &Bound<'_, PyAny>, is_bool: bool) -> PyResult<OrtValue> {
        let (dtype, dims, memory) = dlpack::take(data, is_bool)?;
        Ok(OrtValue::shared(dtype, dims, memory))
    }

    /// What an array has: shared if its elements lie in a row in the order of the machine, else a copy.
    fn of_array(array: &Bound<'_, PyAny>) -> PyResult<OrtValue> {
        let (dtype, foreign) = supported(array)?;
        let dims: Vec<usize> = array.getattr(intern!(array.py(), "shape"))?.extract()?;
        let bytes = byte_length(dtype, &dims)?;
        let area = if foreign { None } else { area_of_array(array, bytes)? };
        match area {
            Some(area) => Ok(OrtValue::shared(dtype, dims, Arc::new(Memory::lent(Arc::new(area))))),
            None => tensor_of(array).map(OrtValue::of),
        }
    }

    /// With the same bits read as another type of the same size.
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

    /// The tensor as it is now: a copy if others may write to it, so that what is checked of it stays true.
    pub(crate) fn tensor(&self) -> PyResult<Tensor> {
        let memory = match &*self.contents() {
            Contents::Own(tensor) => return Ok(tensor.clone()),
            Contents::Shared(memory) => memory.clone(),
        };
        let len = self.bytes()?;
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(len)
            .map_err(|_| PyMemoryError::new_err(format!("there is no room for a copy of {len} bytes")))?;
        bytes.resize(len, 0);
        memory.read(0, &mut bytes).map_err(failed)?;
        tensor_from(self.dtype, self.dims.clone(), bytes.into())
    }

    /// The memory, which the value shares from now on with whoever asks for it. What lies on a device comes here first.
    pub(crate) fn memory(&self) -> PyResult<Arc<Memory>> {
        let mut contents = self.contents();
        let memory = match &*contents {
            Contents::Shared(memory) if memory.host().is_some() => return Ok(memory.clone()),
            Contents::Shared(memory) => {
                let bytes = memory.to_vec(0, self.bytes()?).map_err(failed)?;
                let memory = zeroed(bytes.len())?;
                memory.write(0, &bytes).map_err(failed)?;
                memory
            }
            Contents::Own(tensor) => {
                let memory = zeroed(tensor.data().len())?;
                memory.write(0, tensor.data()).map_err(failed)?;
                memory
            }
        };
        let memory = Arc::new(memory);
        *contents = Contents::Shared(memory.clone());
        Ok(memory)
    }

    /// The memory, if others may have it, too, or it lies on a device.
    pub(crate) fn shared_memory(&self) -> Option<Arc<Memory>> {
        match &*self.contents() {
            Contents::Shared(memory) => Some(memory.clone()),
            Contents::Own(_) => None,
        }
    }

    /// The address of the first element; 0 if there is none.
    pub(crate) fn address(&self) -> PyResult<usize> {
        Ok(if self.bytes()? == 0 { 0 } else { on_host(&*self.memory()?)?.as_ptr() as usize })
    }

    /// A DLPack capsule without a version, for everybody: booleans go as uint8, as onnxruntime gives them.
    pub(crate) fn capsule<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let dtype = if self.dtype == DType::Bool { DType::U8 } else { self.dtype };
        dlpack::give(py, dtype, &self.dims, self.memory()?, false)
    }

    /// A live view of the memory; of bfloat16 its bits, unless `named`.
    fn view<'py>(&self, py: Python<'py>, named: bool) -> PyResult<Bound<'py, PyAny>> {
        let memory = self.memory()?;
        let dtype = if self.dtype == DType::BF16 && !named { DType::U16 } else { self.dtype };
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
    /// A copy of an array, whatever its strides and byte order, that nobody else can change.
    #[staticmethod]
    fn from_numpy(array: &Bound<'_, PyAny>) -> PyResult<OrtValue> {
        Ok(OrtValue::of(tensor_of(array)?))
    }

    /// The elements of a NumPy array: shared and kept, if they lie in a row in the byte order of the machine; else a copy.
    #[staticmethod]
    fn ortvalue_from_numpy(array: &Bound<'_, PyAny>, device: OrtDevice) -> PyResult<OrtValue> {
        device.check()?;
        OrtValue::of_array(array)
    }

    /// As :meth:`ortvalue_from_numpy`, where the bits mean an element type of ``TensorProto`` of the same size.
    #[staticmethod]
    fn ortvalue_from_numpy_with_onnx_type(
        array: &Bound<'_, PyAny>,
        onnx_element_type: i32,
    ) -> PyResult<OrtValue> {
        OrtValue::of_array(array)?.read_as(onnx_element_type)
    }

    /// The elements at an address: a NumPy type or a number of ``TensorProto``, a shape, and a device. The owner keeps them
    /// there as long as it lives; without one, whoever gives the address does, as long as the value, or an array of it, lives.
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
        let refuse = |what: String| {
            let shape = shape_name(dtype, &dims);
            InvalidArgumentError::new_err(format!("{pointer:#x} is no address of {shape}: {what}"))
        };
        if pointer == 0 && bytes > 0 {
            return Err(refuse("it is null".into()));
        }
        if !pointer.is_multiple_of(dtype.size()) {
            let size = dtype.size();
            return Err(refuse(format!("it is no multiple of {size} bytes, the size of an element")));
        }
        if pointer.checked_add(bytes).is_none() {
            return Err(refuse(format!("no {bytes} bytes are there")));
        }
        Ok(OrtValue::shared(dtype, dims, Arc::new(Memory::lent(Arc::new(area_at(pointer, bytes, owner))))))
    }

    /// Zeros: a shape, a NumPy type or a number of ``TensorProto``, and a device.
    #[staticmethod]
    fn ortvalue_from_shape_and_type(
        shape: Vec<Bound<'_, PyAny>>,
        element_type: &Bound<'_, PyAny>,
        device: OrtDevice,
    ) -> PyResult<OrtValue> {
        device.check()?;
        let dims = shape.iter().map(size).collect::<PyResult<Vec<usize>>>()?;
        let dtype = self::element_type(element_type)?;
        let memory = zeroed(byte_length(dtype, &dims)?)?;
        Ok(OrtValue::shared(dtype, dims, Arc::new(memory)))
    }

    /// A tensor of another library, whose memory is shared and kept: a DLPack capsule, or an object that has
    /// ``__dlpack__``. With ``is_bool_tensor`` a tensor of uint8 is one of booleans.
    #[staticmethod]
    #[pyo3(signature = (data, is_bool_tensor=false))]
    fn from_dlpack(data: &Bound<'_, PyAny>, is_bool_tensor: bool) -> PyResult<OrtValue> {
        OrtValue::of_dlpack(data, is_bool_tensor)
    }

    /// The value as an array that shares its memory; read-only if that is.
    fn numpy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.view(py, true)
    }

    /// A copy as an array of its own.
    fn array<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        static NDARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let shape = PyTuple::new(py, &self.dims)?;
        let memory = match &*self.contents() {
            Contents::Own(tensor) => Err(PyByteArray::new(py, tensor.data())),
            Contents::Shared(memory) => Ok(memory.clone()),
        };
        let bytes = match memory {
            Err(bytes) => bytes,
            Ok(memory) => {
                PyByteArray::new_with(py, self.bytes()?, |bytes| memory.read(0, bytes).map_err(failed))?
            }
        };
        NDARRAY.import(py, "numpy", "ndarray")?.call1((shape, numpy_type(py, self.dtype)?, bytes))
    }

    /// The sizes of the axes.
    fn shape(&self) -> Vec<usize> {
        self.dims.clone()
    }

    /// The type as onnxruntime spells it.
    fn data_type(&self) -> String {
        type_name(self.dtype)
    }

    /// The number of the element type in ``TensorProto.DataType``.
    fn element_type(&self) -> i32 {
        self.dtype.to_onnx()
    }

    /// The number of the element type, under its older name.
    fn proto_type(&self) -> i32 {
        self.dtype.to_onnx()
    }

    /// The device that it lies on: ``Cpu``, or the name of another one.
    fn device_name(&self) -> String {
        match &*self.contents() {
            Contents::Shared(memory) if memory.host().is_none() => memory.device().to_owned(),
            _ => "Cpu".to_owned(),
        }
    }

    /// The address of the first element, 0 if there is none. It stays what it is.
    fn data_ptr(&self) -> PyResult<usize> {
        self.address()
    }

    /// True: it always is a tensor.
    fn is_tensor(&self) -> bool {
        true
    }

    /// True: there always is a value.
    fn has_value(&self) -> bool {
        true
    }

    /// False: it is one tensor.
    fn is_tensor_sequence(&self) -> bool {
        false
    }

    /// False: it is a dense tensor.
    fn is_sparse_tensor(&self) -> bool {
        false
    }

    /// Copies an array, or another value, of its type and shape into its memory.
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
                    "an OrtValue is updated from a NumPy array or an OrtValue, not {kind}"
                )));
            }
            let dtype = supported(data)?.0;
            let dims: Vec<usize> = data.getattr(intern!(py, "shape"))?.extract()?;
            let bits = (dtype == DType::BF16).then(|| data.call_method1(intern!(py, "view"), ("uint16",)));
            (bits.transpose()?.unwrap_or_else(|| data.clone()), dtype, dims)
        };
        // Where NumPy has no bfloat16, arrays of it are arrays of their bits.
        let bits = self.dtype == DType::BF16 && dtype == DType::U16;
        if (dtype != self.dtype && !bits) || dims != self.dims {
            return Err(InvalidArgumentError::new_err(format!(
                "the OrtValue is {}, but {} was given",
                shape_name(self.dtype, &self.dims),
                shape_name(dtype, &dims)
            )));
        }
        if self.memory()?.is_read_only() {
            return Err(InvalidArgumentError::new_err(
                "the OrtValue shares the memory of a read-only array, so it cannot be updated; make it of a copy",
            ));
        }
        COPYTO.import(py, "numpy", "copyto")?.call1((self.view(py, false)?, source, "equiv"))?;
        Ok(())
    }

    /// Whether arrays, tensors of other libraries or other values have the memory, too, that this one gave them.
    fn is_shared(&self) -> bool {
        match &*self.contents() {
            Contents::Own(_) => false,
            Contents::Shared(memory) => Arc::strong_count(memory) > 1,
        }
    }

    /// A DLPack capsule, which shares the memory. Booleans go as uint8.
    fn to_dlpack<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        self.capsule(py)
    }

    /// A DLPack capsule for another library, as its protocol asks for it. Booleans are booleans.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        if stream.is_some() {
            return Err(PyBufferError::new_err("a tensor in memory of the CPU has no stream"));
        }
        if dl_device.is_some_and(|device| device != DLPACK_DEVICE) {
            return Err(PyBufferError::new_err(
                "the tensor lies in memory of the CPU; copy it to other devices there",
            ));
        }
        let memory = match copy {
            Some(true) => {
                let copy = zeroed(self.bytes()?)?;
                copy.write(0, self.tensor()?.data()).map_err(failed)?;
                Arc::new(copy)
            }
            Some(false) | None => self.memory()?,
        };
        dlpack::give(py, self.dtype, &self.dims, memory, max_version.is_some_and(|(major, _)| major >= 1))
    }

    /// Where it lies, as DLPack numbers it: the CPU.
    fn __dlpack_device__(&self) -> (i32, i32) {
        DLPACK_DEVICE
    }
}

/// Inputs as the core takes them.
pub(crate) fn given(tensors: &[Tensor]) -> Vec<Given<'_>> {
    tensors.iter().map(Given::from).collect()
}

/// The tensors of some values. What others may write to is copied, before anything is checked of it.
pub(crate) fn tensors(values: &[Bound<'_, OrtValue>]) -> PyResult<Vec<Tensor>> {
    values.iter().map(|value| value.get().tensor()).collect()
}

/// Takes the results of a step in the order they have in the model. On a device they stay there.
#[derive(Default)]
pub(crate) struct Results(Vec<Option<OrtValue>>);

impl Results {
    pub(crate) fn take(
        &mut self,
        at: usize,
        dtype: DType,
        dims: &[usize],
        value: Delivered<'_>,
    ) -> Result<(), DeviceError> {
        let bytes = dims.iter().product::<usize>() * dtype.size();
        // A device that has no room for the result leaves it to this process.
        let kept = if value.is_on_device() { value.copy(bytes).ok() } else { None };
        let result = match kept {
            Some(memory) => OrtValue::shared(dtype, dims.to_vec(), Arc::new(memory)),
            None => OrtValue::of(value.to_tensor(dtype, dims)?),
        };
        if self.0.len() <= at {
            self.0.resize_with(at + 1, || None);
        }
        self.0[at] = Some(result);
        Ok(())
    }

    /// The results by their places, as many as the last one needs.
    pub(crate) fn by_place(self) -> Vec<Option<OrtValue>> {
        self.0
    }

    pub(crate) fn values(self) -> Vec<OrtValue> {
        self.0.into_iter().flatten().collect()
    }
}

/// Whether something is a NumPy array.
fn is_array(array: &Bound<'_, PyAny>) -> PyResult<bool> {
    static NDARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    array.is_instance(NDARRAY.import(array.py(), "numpy", "ndarray")?)
}

/// The element type of a NumPy array, and whether its bytes have the order of other machines.
fn supported(array: &Bound<'_, PyAny>) -> PyResult<(DType, bool)> {
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

/// A copy of a NumPy array: any strides, any byte order.
pub(crate) fn tensor_of(array: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    let py = array.py();
    let (dtype, foreign) = supported(array)?;
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

/// The exception for a device that fails.
pub(crate) fn failed(error: DeviceError) -> PyErr {
    raise(error.into())
}

/// Memory that others are to reach by its address.
pub(crate) fn on_host(memory: &Memory) -> PyResult<&HostMemory> {
    memory.host().ok_or_else(|| {
        PyBufferError::new_err(
            "the memory lies on a device, where this process has no address for it; take a copy",
        )
    })
}

/// Memory of our own.
fn zeroed(bytes: usize) -> PyResult<Memory> {
    Memory::try_new(bytes).map_err(|error| PyMemoryError::new_err(error.to_string()))
}

/// The bytes of a tensor.
pub(crate) fn byte_length(dtype: DType, dims: &[usize]) -> PyResult<usize> {
    // Zeros are left out of the product, so that a shape with one is not absurd otherwise.
    let sizes = dims.iter().filter(|&&size| size != 0);
    let bytes = sizes.copied().try_fold(dtype.size(), usize::checked_mul);
    let bytes = bytes.filter(|&bytes| isize::try_from(bytes).is_ok()).ok_or_else(|| {
        InvalidArgumentError::new_err(format!("{} is too large to address", shape_name(dtype, dims)))
    })?;
    Ok(if dims.contains(&0) { 0 } else { bytes })
}

/// A size in a shape that somebody gives.
fn size(size: &Bound<'_, PyAny>) -> PyResult<usize> {
    size.extract::<usize>()
        .map_err(|_| InvalidArgumentError::new_err(format!("a shape is a list of sizes, and {size} is none")))
}

/// A type with a shape, as errors have it.
pub(crate) fn shape_name(dtype: DType, dims: &[usize]) -> String {
    format!("{dtype}{dims:?}")
}

pub(crate) fn element_type_of_onnx(number: i32) -> PyResult<DType> {
    DType::from_onnx(number).ok_or_else(|| {
        UnsupportedError::new_err(format!("tensors of ONNX element type {number} are not supported"))
    })
}

/// An element type that somebody names: a number of `TensorProto`, or whatever NumPy takes for a type.
pub(crate) fn element_type(named: &Bound<'_, PyAny>) -> PyResult<DType> {
    static DTYPE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if let Ok(number) = named.extract::<i32>() {
        return element_type_of_onnx(number);
    }
    let numpy_type = DTYPE.import(named.py(), "numpy", "dtype")?.call1((named,))?;
    dtype_and_order(&numpy_type)?
        .0
        .ok_or_else(|| UnsupportedError::new_err(format!("tensors of {numpy_type} are not supported")))
}

/// Where the elements of an array lie.
struct Places {
    /// The lowest address.
    start: usize,
    /// Of each axis that goes anywhere: how many elements, and how far apart. The narrowest first.
    axes: Vec<(usize, usize)>,
    /// Bytes of an element.
    size: usize,
}

impl Places {
    /// Those of a NumPy array with these dimensions. `None` if it has no elements.
    fn of(array: &Bound<'_, PyAny>, dims: &[usize], size: usize) -> PyResult<Option<Places>> {
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
        Ok(Some(Places { start, axes, size }))
    }

    /// One after the last byte.
    fn end(&self) -> usize {
        let reach = |end: usize, &(count, stride): &(usize, usize)| {
            end.saturating_add((count - 1).saturating_mul(stride))
        };
        self.axes.iter().fold(self.start.saturating_add(self.size), reach)
    }

    /// Bytes of all elements.
    fn bytes(&self) -> usize {
        self.axes.iter().fold(self.size, |bytes, &(count, _)| bytes.saturating_mul(count))
    }

    /// The address of each element.
    fn addresses(&self) -> Vec<usize> {
        self.axes.iter().fold(vec![self.start], |found, &(count, stride)| {
            found.iter().flat_map(|&at| (0..count).map(move |k| at + k * stride)).collect()
        })
    }

    /// Whether two elements share a byte.
    fn overlap_themselves(&self) -> bool {
        let mut reach = self.size;
        let spread = self.axes.iter().all(|&(count, stride)| {
            let clear = stride >= reach;
            reach = reach.saturating_add((count - 1).saturating_mul(stride));
            clear
        });
        // From here on there are no more elements than the memory has room for.
        !spread && (self.bytes() > self.end() - self.start || touch([(self.addresses(), self.size)]))
    }

    /// Whether an element of one shares a byte with one of the other.
    fn overlap(&self, other: &Places) -> bool {
        let dense = |places: &Places| places.bytes() == places.end() - places.start;
        self.start < other.end()
            && other.start < self.end()
            && (dense(self) && dense(other)
                || touch([self, other].map(|places| (places.addresses(), places.size))))
    }
}

/// Whether two of these elements, addresses and a size each, share a byte.
fn touch<const N: usize>(elements: [(Vec<usize>, usize); N]) -> bool {
    let of = |(addresses, size): (Vec<usize>, usize)| addresses.into_iter().map(move |at| (at, at + size));
    let mut ranges: Vec<(usize, usize)> = elements.into_iter().flat_map(of).collect();
    ranges.sort_unstable();
    ranges.windows(2).any(|pair| pair[1].0 < pair[0].1)
}

/// That no two results go to the same memory.
pub(crate) fn check_apart(rooms: &[Room]) -> PyResult<()> {
    for (at, room) in rooms.iter().enumerate() {
        let Some(places) = &room.places else { continue };
        let other = rooms[..at]
            .iter()
            .position(|other| other.places.as_ref().is_some_and(|other| places.overlap(other)));
        if let Some(other) = other {
            return Err(InvalidArgumentError::new_err(format!(
                "outputs[{other}] and outputs[{at}] share memory, so that one result would overwrite the other; give \
                 each output an array of its own"
            )));
        }
    }
    Ok(())
}

/// What a NumPy array has room for, whatever its strides and byte order.
pub(crate) struct Room {
    dtype: DType,
    dims: Vec<usize>,
    bytes: Vec<u8>,
    /// Where that is; `None` if it has no elements.
    places: Option<Places>,
}

impl Room {
    /// Room like that of an array. The `at`th of a call, for errors.
    pub(crate) fn of(array: &Bound<'_, PyAny>, at: usize) -> PyResult<Room> {
        let py = array.py();
        let writeable = array.getattr(intern!(py, "flags"))?.getattr(intern!(py, "writeable"))?;
        if !writeable.is_truthy()? {
            return Err(InvalidArgumentError::new_err(format!("outputs[{at}] is a read-only array")));
        }
        let (numpy_type, dtype) = type_of(array)?;
        let dtype = dtype.ok_or_else(|| {
            UnsupportedError::new_err(format!(
                "outputs[{at}] is an array of {numpy_type}, which no output is"
            ))
        })?;
        let dims: Vec<usize> = array.getattr(intern!(py, "shape"))?.extract()?;
        let places = Places::of(array, &dims, dtype.size())?;
        if places.as_ref().is_some_and(Places::overlap_themselves) {
            return Err(InvalidArgumentError::new_err(format!(
                "elements of outputs[{at}] share memory, so that results would overwrite each other; give the output \
                 an array of its own"
            )));
        }
        let bytes = vec![0; dims.iter().product::<usize>() * dtype.size()];
        Ok(Room { dtype, dims, bytes, places })
    }

    pub(crate) fn destination(&mut self) -> Destination<'_> {
        Destination { dtype: self.dtype, dims: &self.dims, bytes: &mut self.bytes }
    }

    /// Copies what is in the room to the array that it is like.
    pub(crate) fn copy_to(self, array: &Bound<'_, PyAny>) -> PyResult<()> {
        static COPYTO: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let py = array.py();
        let value = OrtValue::of(tensor_from(self.dtype, self.dims, self.bytes.into())?);
        COPYTO.import(py, "numpy", "copyto")?.call1((array, value.array(py)?))?;
        Ok(())
    }
}

/// The NumPy type of an array and the element type that it is.
fn type_of<'py>(array: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyAny>, Option<DType>)> {
    let numpy_type = array.getattr(intern!(array.py(), "dtype"))?;
    let dtype = dtype_and_order(&numpy_type)?.0;
    Ok((numpy_type, dtype))
}

/// The element type of a NumPy type, and whether its bytes have the order of other machines.
fn dtype_and_order(numpy_type: &Bound<'_, PyAny>) -> PyResult<(Option<DType>, bool)> {
    let code = numpy_type.getattr(intern!(numpy_type.py(), "str"))?;
    let code = code.cast::<PyString>()?.to_cow()?;
    let foreign = if cfg!(target_endian = "little") { '>' } else { '<' };
    Ok((dtype_of(numpy_type, &code)?, code.starts_with(foreign)))
}

/// The element type of a NumPy type such as `<f4`.
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
        _ if numpy_type.getattr("name")?.extract::<String>()? == DType::BF16.name() => DType::BF16,
        _ => return Ok(None),
    }))
}

/// `ml_dtypes.bfloat16`, or nothing if that package is not installed.
fn bfloat16(py: Python<'_>) -> Option<&Bound<'_, PyAny>> {
    static BFLOAT16: PyOnceLock<Option<Py<PyAny>>> = PyOnceLock::new();
    let find =
        || py.import("ml_dtypes").and_then(|module| module.getattr("bfloat16")).ok().map(Bound::unbind);
    BFLOAT16.get_or_init(py, find).as_ref().map(|found| found.bind(py))
}

/// The NumPy type of an element type, by name or as an object.
pub(crate) fn numpy_type(py: Python<'_>, dtype: DType) -> PyResult<Bound<'_, PyAny>> {
    if dtype != DType::BF16 {
        return PyString::intern(py, dtype.name()).into_bound_py_any(py);
    }
    match bfloat16(py) {
        Some(found) => Ok(found.clone()),
        None => intern!(py, "uint16").into_bound_py_any(py),
    }
}

/// The type of a tensor as onnxruntime spells it.
fn type_name(dtype: DType) -> String {
    let name = match dtype {
        DType::F32 => "float",
        DType::F64 => "double",
        other => other.name(),
    };
    format!("tensor({name})")
}

/// Name, type and shape of an input or output.
pub(crate) fn described<'py>(py: Python<'py>, info: &ValueInfo) -> PyResult<Bound<'py, PyTuple>> {
    let shape = PyList::empty(py);
    for dim in info.shape.iter().flatten() {
        match dim {
            Dim::Known(size) => shape.append(size)?,
            Dim::Symbol(name) => shape.append(&**name)?,
        }
    }
    let mut name = type_name(info.dtype);
    if info.sequence {
        name = format!("seq({name})");
    }
    (&info.name, name, shape).into_pyobject(py)
}

/// Part of a plane, as NumPy's array interface describes memory. NumPy keeps this object as the base of its array, and
/// this object keeps the plane; nobody makes a Rust reference into a plane, so writing through the array at any time is
/// as sound as a kernel's own writing.
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
            DType::U8 | DType::U16 | DType::U32 | DType::U64 | DType::BF16 => 'u',
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

/// A copy, for reading, of part of a plane that lies on a device.
fn copied(part: &ParameterView) -> PyResult<ParameterView> {
    let (tensor, memory) = (part.to_tensor().map_err(raise)?, zeroed(part.byte_len())?);
    memory.write(0, tensor.data()).map_err(failed)?;
    Ok(ParameterView { memory: Arc::new(memory), offset: 0, requires_grad: false, ..part.clone() })
}

/// A live view of part of a plane, read-only for frozen parameters; of one that lies on a device a copy, which is read-only.
pub(crate) fn view(py: Python<'_>, part: ParameterView) -> PyResult<Bound<'_, PyAny>> {
    static ASARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let part = if part.memory.host().is_some() { part } else { py.detach(|| copied(&part))? };
    let dtype = part.dtype;
    let array = ASARRAY.import(py, "numpy", "asarray")?.call1((Plane(part),))?;
    match bfloat16(py) {
        Some(found) if dtype == DType::BF16 => array.call_method1(intern!(py, "view"), (found,)),
        _ => Ok(array),
    }
}

/// A float32 vector.
pub(crate) fn vector(elements: &[f32]) -> OrtValue {
    OrtValue::of(Tensor::f32(&[elements.len()], elements))
}

/// The elements of a float32 tensor of any shape.
pub(crate) fn elements(value: &OrtValue) -> PyResult<Vec<f32>> {
    if value.dtype == DType::F32 {
        return Ok(value.tensor()?.to_vec());
    }
    let found = value.dtype;
    Err(InvalidArgumentError::new_err(format!("the buffer should be float32, but it is {found}")))
}
