//! Arrays in and out.

use std::sync::Arc;

use ortrain::{Bytes, DType, Delivered, Destination, Dim, Given, Memory, ParameterView, Tensor, ValueInfo};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PyDict, PyList, PyString, PyTuple};
use pyo3::{IntoPyObjectExt, intern};

use crate::error::{InvalidArgumentError, UnsupportedError};

/// An immutable tensor.
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct OrtValue {
    pub(crate) tensor: Tensor,
}

#[pymethods]
impl OrtValue {
    #[staticmethod]
    #[pyo3(signature = (array, onnx_element_type=None))]
    fn from_numpy(array: &Bound<'_, PyAny>, onnx_element_type: Option<i32>) -> PyResult<OrtValue> {
        let tensor = tensor_of(array)?;
        let Some(number) = onnx_element_type else { return Ok(OrtValue { tensor }) };
        let dtype = DType::from_onnx(number).ok_or_else(|| {
            UnsupportedError::new_err(format!("tensors of ONNX element type {number} are not supported"))
        })?;
        let bits = tensor.dtype();
        let tensor = Tensor::new(dtype, tensor.dims().to_vec(), tensor.data().clone()).map_err(|_| {
            InvalidArgumentError::new_err(format!("the bits of {bits} cannot be read as {dtype}"))
        })?;
        Ok(OrtValue { tensor })
    }

    fn numpy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        static NDARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let shape = PyTuple::new(py, self.tensor.dims())?;
        let bytes = PyByteArray::new(py, self.tensor.data());
        NDARRAY.import(py, "numpy", "ndarray")?.call1((shape, numpy_type(py, self.tensor.dtype())?, bytes))
    }

    fn shape(&self) -> Vec<usize> {
        self.tensor.dims().to_vec()
    }

    fn data_type(&self) -> String {
        type_name(self.tensor.dtype())
    }

    fn element_type(&self) -> i32 {
        self.tensor.dtype().to_onnx()
    }
}

/// Inputs as the core takes them.
pub(crate) fn given(tensors: &[Tensor]) -> Vec<Given<'_>> {
    tensors.iter().map(Given::from).collect()
}

/// The tensors of some values; elements are shared.
pub(crate) fn tensors(values: &[Bound<'_, OrtValue>]) -> Vec<Tensor> {
    values.iter().map(|value| value.get().tensor.clone()).collect()
}

/// Takes the results of a step in the order they have in the model.
#[derive(Default)]
pub(crate) struct Results(Vec<Option<Tensor>>);

impl Results {
    pub(crate) fn take(&mut self, at: usize, dtype: DType, dims: &[usize], value: Delivered<'_>) {
        let mut bytes = vec![0; dims.iter().product::<usize>() * dtype.size()];
        value.copy_to(&mut bytes);
        if self.0.len() <= at {
            self.0.resize(at + 1, None);
        }
        self.0[at] = Tensor::new(dtype, dims.to_vec(), bytes.into()).ok();
    }

    pub(crate) fn values(self) -> Vec<OrtValue> {
        self.0.into_iter().flatten().map(|tensor| OrtValue { tensor }).collect()
    }
}

/// A copy of a NumPy array: any strides, any byte order.
pub(crate) fn tensor_of(array: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    static NDARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = array.py();
    if !array.is_instance(NDARRAY.import(py, "numpy", "ndarray")?)? {
        let name = array.get_type().name()?;
        return Err(InvalidArgumentError::new_err(format!("expected a NumPy array, not {name}")));
    }
    let numpy_type = array.getattr(intern!(py, "dtype"))?;
    let code = numpy_type.getattr(intern!(py, "str"))?;
    let code = code.cast::<PyString>()?.to_cow()?;
    let Some(dtype) = dtype_of(&numpy_type, &code)? else {
        return Err(UnsupportedError::new_err(format!("arrays of {numpy_type} are not supported")));
    };
    let foreign = if cfg!(target_endian = "little") { '>' } else { '<' };
    let array = if code.starts_with(foreign) {
        let native = numpy_type.call_method1(intern!(py, "newbyteorder"), ("=",))?;
        array.call_method1(intern!(py, "astype"), (native,))?
    } else {
        array.clone()
    };
    let dims = array.getattr(intern!(py, "shape"))?.extract()?;
    let bytes: PyBackedBytes = array.call_method0(intern!(py, "tobytes"))?.extract()?;
    Tensor::new(dtype, dims, Bytes::from_owner(bytes))
        .map_err(|error| InvalidArgumentError::new_err(error.to_string()))
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
        let tensor = Tensor::new(self.dtype, self.dims, self.bytes.into())
            .map_err(|error| InvalidArgumentError::new_err(error.to_string()))?;
        COPYTO.import(py, "numpy", "copyto")?.call1((array, OrtValue { tensor }.numpy(py)?))?;
        Ok(())
    }
}

/// The NumPy type of an array and the element type that it is.
fn type_of<'py>(array: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyAny>, Option<DType>)> {
    let py = array.py();
    let numpy_type = array.getattr(intern!(py, "dtype"))?;
    let code = numpy_type.getattr(intern!(py, "str"))?;
    let dtype = dtype_of(&numpy_type, &code.cast::<PyString>()?.to_cow()?)?;
    Ok((numpy_type, dtype))
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
fn numpy_type(py: Python<'_>, dtype: DType) -> PyResult<Bound<'_, PyAny>> {
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
        let address = view.memory.as_ptr() as usize + view.offset;
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", PyTuple::new(py, &view.dims)?)?;
        interface.set_item("typestr", format!("{order}{kind}{}", view.dtype.size()))?;
        interface.set_item("data", (address, !view.requires_grad))?;
        Ok(interface)
    }
}

/// A live view of part of a plane; read-only for frozen parameters.
pub(crate) fn view(py: Python<'_>, part: ParameterView) -> PyResult<Bound<'_, PyAny>> {
    static ASARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let dtype = part.dtype;
    let array = ASARRAY.import(py, "numpy", "asarray")?.call1((Plane(part),))?;
    match bfloat16(py) {
        Some(found) if dtype == DType::BF16 => array.call_method1(intern!(py, "view"), (found,)),
        _ => Ok(array),
    }
}

/// Live views of whole planes, each a vector of the plane's elements.
pub(crate) fn planes<'py>(
    py: Python<'py>,
    parts: Vec<(DType, Arc<Memory>)>,
    writeable: bool,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let plane = |(dtype, memory): (DType, Arc<Memory>)| {
        let dims = vec![memory.len() / dtype.size()];
        view(py, ParameterView { name: "".into(), dtype, dims, requires_grad: writeable, memory, offset: 0 })
    };
    parts.into_iter().map(plane).collect()
}

/// A float32 vector.
pub(crate) fn vector(elements: &[f32]) -> OrtValue {
    OrtValue { tensor: Tensor::f32(&[elements.len()], elements) }
}

/// The elements of a float32 tensor of any shape.
pub(crate) fn elements(value: &OrtValue) -> PyResult<Vec<f32>> {
    if value.tensor.dtype() == DType::F32 {
        return Ok(value.tensor.to_vec());
    }
    let found = value.tensor.dtype();
    Err(InvalidArgumentError::new_err(format!("the buffer should be float32, but it is {found}")))
}
