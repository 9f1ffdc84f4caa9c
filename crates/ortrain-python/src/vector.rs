//! Values in numbers, and devices, under the names that onnxruntime's extension module has for them.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::{PyIndexError, PyMemoryError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyIterator, PyList};
use pyo3::{IntoPyObjectExt, intern};

use crate::dlpack::CPU;
use crate::error::{InvalidArgumentError, OrtrainError, UnsupportedError};
use crate::value::{OrtValue, shape_name};

/// A device, as onnxruntime numbers them: the kind (``0`` the CPU, ``1`` CUDA), the kind of memory, and which one.
///
/// Any device can be named; values are made on the CPU alone.
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

/// Numbers of devices.
const KINDS: [&str; 2] = ["cpu", "cuda"];

impl OrtDevice {
    /// Checks that values can be made there.
    pub(crate) fn check(self) -> PyResult<()> {
        if self.kind == 0 {
            return Ok(());
        }
        let named = KINDS.get(self.kind as usize).map_or_else(String::new, |name| format!(" ({name})"));
        Err(UnsupportedError::new_err(format!(
            "device type {}{named} is not supported: ortrain keeps values in memory of the CPU, device type 0",
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

    /// The number of the CPU: 0.
    #[staticmethod]
    fn cpu() -> i32 {
        0
    }

    /// The number of CUDA: 1.
    #[staticmethod]
    fn cuda() -> i32 {
        1
    }

    /// The number of a device's usual memory: 0.
    #[staticmethod]
    fn default_memory() -> i32 {
        0
    }

    /// The number of the kind of device.
    fn device_type(&self) -> i32 {
        self.kind
    }

    /// Which of the devices of its kind it is.
    fn device_id(&self) -> i32 {
        self.id
    }

    /// The number of the kind of memory.
    fn mem_type(&self) -> i32 {
        self.memory
    }

    fn __repr__(&self) -> String {
        format!("OrtDevice({}, {}, {})", self.kind, self.memory, self.id)
    }
}

/// Several values, in order: what goes into a forward or backward pass, and what comes out.
///
/// It holds the values themselves, so whoever takes one out shares its memory. An empty one is falsy.
///
/// >>> from ortrain.capi import OrtDevice, OrtValue, OrtValueVector
/// >>> values = OrtValueVector()
/// >>> bool(values)
/// False
/// >>> values.push_back(OrtValue.ortvalue_from_numpy(np.zeros((2, 3), np.float32), OrtDevice(0, 0, 0)))
/// >>> len(values), values[0].shape()
/// (1, [2, 3])
/// >>> [value.data_type() for value in values]
/// ['tensor(float)']
#[pyclass(frozen, module = "ortrain._ortrain")]
#[derive(Default)]
pub(crate) struct OrtValueVector(Mutex<Vec<Py<OrtValue>>>);

impl OrtValueVector {
    fn values(&self) -> MutexGuard<'_, Vec<Py<OrtValue>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value at a place.
    fn at(&self, py: Python<'_>, index: &Bound<'_, PyAny>) -> PyResult<Py<OrtValue>> {
        let index: i64 =
            index.extract().map_err(|_| PyTypeError::new_err("a place in an OrtValueVector is an int"))?;
        let place = usize::try_from(index).map_err(|_| {
            PyTypeError::new_err(format!("places in an OrtValueVector count from 0, and this is {index}"))
        })?;
        let values = self.values();
        let found = values.get(place).map(|value| value.clone_ref(py));
        found.ok_or_else(|| {
            PyIndexError::new_err(format!(
                "there is no value {place} in an OrtValueVector of {}",
                values.len()
            ))
        })
    }
}

#[pymethods]
impl OrtValueVector {
    #[new]
    fn new() -> OrtValueVector {
        OrtValueVector::default()
    }

    fn __len__(&self) -> usize {
        self.values().len()
    }

    fn __bool__(&self) -> bool {
        !self.values().is_empty()
    }

    fn __getitem__(&self, py: Python<'_>, index: &Bound<'_, PyAny>) -> PyResult<Py<OrtValue>> {
        self.at(py, index)
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        let values: Vec<Py<OrtValue>> = self.values().iter().map(|value| value.clone_ref(py)).collect();
        PyList::new(py, values)?.try_iter()
    }

    fn __repr__(&self) -> String {
        format!("OrtValueVector({} values)", self.values().len())
    }

    /// Appends a value: an OrtValue, or a tensor as a DLPack capsule or an object that has ``__dlpack__``, whose memory is
    /// shared. With ``is_bool_tensor`` a DLPack tensor of uint8 is one of booleans.
    #[pyo3(signature = (ortvalue, is_bool_tensor=false))]
    fn push_back(&self, ortvalue: &Bound<'_, PyAny>, is_bool_tensor: bool) -> PyResult<()> {
        let value = value_of(ortvalue, is_bool_tensor)?;
        self.values().push(value);
        Ok(())
    }

    /// Appends a value for each tensor, which shares its memory: tensors (of PyTorch, say, or arrays), and for each the
    /// address of its first element, its element type (a NumPy type, or a number of ``TensorProto``), its shape and its
    /// device, which all have to be those of the tensor. Nothing is appended where one of them is not.
    fn push_back_batch(
        &self,
        tensors: Vec<Bound<'_, PyAny>>,
        data_ptrs: Vec<usize>,
        element_types: Vec<Bound<'_, PyAny>>,
        shapes: Vec<Vec<usize>>,
        devices: Vec<OrtDevice>,
    ) -> PyResult<()> {
        let counts = [data_ptrs.len(), element_types.len(), shapes.len(), devices.len()];
        if counts.iter().any(|&count| count != tensors.len()) {
            return Err(InvalidArgumentError::new_err(format!(
                "there are {} tensors, but {} addresses, {} element types, {} shapes and {} devices",
                tensors.len(),
                counts[0],
                counts[1],
                counts[2],
                counts[3]
            )));
        }
        let mut values = Vec::with_capacity(tensors.len());
        for (at, tensor) in tensors.iter().enumerate() {
            devices[at].check()?;
            let dtype = crate::value::element_type(&element_types[at])?;
            let value = value_of(tensor, dtype == ortrain::DType::Bool)?;
            let known = value.get();
            let (found, said) = (known.address()?, data_ptrs[at]);
            if (known.dtype(), known.dims()) != (dtype, &shapes[at]) {
                return Err(InvalidArgumentError::new_err(format!(
                    "tensor {at} is {}, but {} was said of it",
                    shape_name(known.dtype(), known.dims()),
                    shape_name(dtype, &shapes[at])
                )));
            }
            if found != said && !known.dims().contains(&0) {
                return Err(InvalidArgumentError::new_err(format!(
                    "the elements of tensor {at} lie at {found:#x}, but {said:#x} was said of them"
                )));
            }
            values.push(value);
        }
        self.values().append(&mut values);
        Ok(())
    }

    /// Makes room for as many values in all; the number of values stays.
    fn reserve(&self, count: usize) -> PyResult<()> {
        let mut values = self.values();
        let more = count.saturating_sub(values.len());
        values
            .try_reserve(more)
            .map_err(|_| PyMemoryError::new_err(format!("there is no room for {count} values")))
    }

    /// Puts other values in the place of those there are.
    fn _fill(&self, values: Vec<Py<OrtValue>>) {
        let before = std::mem::replace(&mut *self.values(), values);
        // Those that go may run code of others: nothing is locked any more.
        drop(before);
    }

    /// Gives back room that no value needs.
    fn shrink_to_fit(&self) {
        self.values().shrink_to_fit();
    }

    /// A value as a DLPack capsule, which shares its memory. Booleans go as uint8.
    fn dlpack_at<'py>(&self, py: Python<'py>, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyCapsule>> {
        self.at(py, index)?.get().capsule(py)
    }

    /// What ``to_tensor`` makes of the DLPack capsule of each value; without it the capsules. Booleans go as uint8.
    #[pyo3(signature = (to_tensor=None))]
    fn to_dlpacks<'py>(
        &self,
        py: Python<'py>,
        to_tensor: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let values: Vec<Py<OrtValue>> = self.values().iter().map(|value| value.clone_ref(py)).collect();
        let given = |value: Py<OrtValue>| {
            let capsule = value.get().capsule(py)?;
            match to_tensor {
                Some(make) => make.call1((capsule,)),
                None => capsule.into_bound_py_any(py),
            }
        };
        values.into_iter().map(given).collect()
    }

    /// The number that ``TensorProto`` has for the element type of a value.
    fn element_type_at(&self, py: Python<'_>, index: &Bound<'_, PyAny>) -> PyResult<i32> {
        Ok(self.at(py, index)?.get().dtype().to_onnx())
    }

    /// The places of the values that are booleans, which DLPack capsules have as uint8.
    fn bool_tensor_indices(&self) -> Vec<usize> {
        let is_bool = |value: &Py<OrtValue>| value.get().dtype() == ortrain::DType::Bool;
        let values = self.values();
        values.iter().enumerate().filter(|(_, value)| is_bool(value)).map(|(at, _)| at).collect()
    }
}

/// A value that somebody passes: ours, the native one of `ortrain.OrtValue`, or a tensor by DLPack.
fn value_of(given: &Bound<'_, PyAny>, is_bool: bool) -> PyResult<Py<OrtValue>> {
    let py = given.py();
    if let Ok(value) = given.cast::<OrtValue>() {
        return Ok(value.clone().unbind());
    }
    if let Ok(inside) = given.getattr(intern!(py, "_ortvalue")) {
        return value_of(&inside, is_bool);
    }
    // The values of onnxruntime give booleans as uint8, too, and say what they are.
    let said = match given.get_type().name()? == "OrtValue" {
        true => given.call_method0(intern!(py, "data_type"))?.extract::<String>()? == "tensor(bool)",
        false => false,
    };
    Py::new(py, OrtValue::of_dlpack(given, is_bool || said)?)
}

/// Values by name, that are kept from one pass to another.
///
/// >>> from ortrain.capi import OrtDevice, OrtValue, OrtValueCache
/// >>> cache = OrtValueCache()
/// >>> cache.insert("mask", OrtValue.ortvalue_from_numpy(np.ones(3, bool), OrtDevice(0, 0, 0)))
/// >>> cache.keys(), cache.count("mask")
/// (['mask'], 1)
/// >>> cache.remove("mask")
/// >>> cache.remove("mask")
/// Traceback (most recent call last):
/// ortrain.errors.OrtrainError: the cache has no value "mask"
#[pyclass(frozen, module = "ortrain._ortrain")]
#[derive(Default)]
pub(crate) struct OrtValueCache(Mutex<HashMap<String, Py<OrtValue>>>);

impl OrtValueCache {
    fn values(&self) -> MutexGuard<'_, HashMap<String, Py<OrtValue>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl OrtValueCache {
    #[new]
    fn new() -> OrtValueCache {
        OrtValueCache::default()
    }

    /// Keeps a value under a name, instead of the one that was there.
    fn insert(&self, name: String, ortvalue: &Bound<'_, PyAny>) -> PyResult<()> {
        let value = value_of(ortvalue, false)?;
        let before = self.values().insert(name, value);
        drop(before);
        Ok(())
    }

    /// The names, sorted.
    fn keys(&self) -> Vec<String> {
        let mut names: Vec<String> = self.values().keys().cloned().collect();
        names.sort_unstable();
        names
    }

    /// Forgets all values.
    fn clear(&self) {
        let values = std::mem::take(&mut *self.values());
        drop(values);
    }

    /// How many values have a name: 1 or 0.
    fn count(&self, name: &str) -> usize {
        usize::from(self.values().contains_key(name))
    }

    /// Forgets a value. Raises ``RuntimeError`` where there is none of the name.
    fn remove(&self, name: &str) -> PyResult<()> {
        let found = self.values().remove(name);
        found.map(drop).ok_or_else(|| OrtrainError::new_err(format!("the cache has no value \"{name}\"")))
    }

    fn __len__(&self) -> usize {
        self.values().len()
    }

    fn __repr__(&self) -> String {
        format!("OrtValueCache({} values)", self.values().len())
    }
}

/// Where values lie, as DLPack numbers it.
pub(crate) const DLPACK_DEVICE: (i32, i32) = (CPU, 0);
