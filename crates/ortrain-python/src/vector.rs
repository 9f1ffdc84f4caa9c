//! Vectors of values, and devices, under the names of onnxruntime's extension module.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::{PyIndexError, PyMemoryError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyIterator, PyList};
use pyo3::{IntoPyObjectExt, intern};

use crate::error::{InvalidArgumentError, OrtrainError};
use crate::ort_device::OrtDevice;
use crate::shapes::shape_name;
use crate::value::OrtValue;

/// A list of values: inputs and outputs of a forward or backward pass.
///
/// The vector holds the values themselves, so an element shares its memory with the caller. An empty vector
/// is falsy.
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

    /// Returns the value at an index.
    fn at(&self, py: Python<'_>, index: &Bound<'_, PyAny>) -> PyResult<Py<OrtValue>> {
        let index: i64 = index
            .extract()
            .map_err(|_| PyTypeError::new_err("an index into an OrtValueVector must be an int"))?;
        let position = usize::try_from(index).map_err(|_| {
            PyTypeError::new_err(format!("an index into an OrtValueVector must be at least 0, got {index}"))
        })?;
        let values = self.values();
        let element = values.get(position).map(|value| value.clone_ref(py));
        element.ok_or_else(|| {
            PyIndexError::new_err(format!(
                "index {position} is out of range for an OrtValueVector of {}",
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

    /// Appends a value: an OrtValue, or a tensor with shared memory, as a DLPack capsule or an object with
    /// ``__dlpack__``. With ``is_bool_tensor``, a uint8 DLPack tensor is read as booleans.
    #[pyo3(signature = (ortvalue, is_bool_tensor=false))]
    fn push_back(&self, ortvalue: &Bound<'_, PyAny>, is_bool_tensor: bool) -> PyResult<()> {
        let value = value_of(ortvalue, is_bool_tensor)?;
        self.values().push(value);
        Ok(())
    }

    /// Appends a value for each tensor, which shares its memory.
    ///
    /// The arguments are the tensors (of PyTorch, for example, or arrays) and one list each of addresses of
    /// the first element, element types, shapes and devices. An element type is a NumPy type or a number of
    /// ``TensorProto``. All of these must match the tensors; otherwise nothing is appended.
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
            let (actual, declared) = (known.address()?, data_ptrs[at]);
            if (known.dtype(), known.dims()) != (dtype, &shapes[at]) {
                return Err(InvalidArgumentError::new_err(format!(
                    "tensor {at} is {}, but the argument says {}",
                    shape_name(known.dtype(), known.dims()),
                    shape_name(dtype, &shapes[at])
                )));
            }
            if actual != declared && !known.dims().contains(&0) {
                return Err(InvalidArgumentError::new_err(format!(
                    "the elements of tensor {at} are at {actual:#x}, but the argument says {declared:#x}"
                )));
            }
            values.push(value);
        }
        self.values().append(&mut values);
        Ok(())
    }

    /// Reserves memory for a total number of values; the length does not change.
    fn reserve(&self, count: usize) -> PyResult<()> {
        let mut values = self.values();
        let more = count.saturating_sub(values.len());
        values
            .try_reserve(more)
            .map_err(|_| PyMemoryError::new_err(format!("cannot allocate {count} values")))
    }

    /// Replaces all values.
    fn _fill(&self, values: Vec<Py<OrtValue>>) {
        let before = std::mem::replace(&mut *self.values(), values);
        // Dropping the old values may run foreign code, so no lock is held.
        drop(before);
    }

    /// Frees unused capacity.
    fn shrink_to_fit(&self) {
        self.values().shrink_to_fit();
    }

    /// Returns a value as a DLPack capsule, which shares its memory. Booleans become uint8.
    fn dlpack_at<'py>(&self, py: Python<'py>, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyCapsule>> {
        self.at(py, index)?.get().capsule(py)
    }

    /// Returns the result of ``to_tensor`` for the DLPack capsule of each value; by default, the capsules.
    /// Booleans become uint8.
    #[pyo3(signature = (to_tensor=None))]
    fn to_dlpacks<'py>(
        &self,
        py: Python<'py>,
        to_tensor: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let values: Vec<Py<OrtValue>> = self.values().iter().map(|value| value.clone_ref(py)).collect();
        let export = |value: Py<OrtValue>| {
            let capsule = value.get().capsule(py)?;
            match to_tensor {
                Some(make) => make.call1((capsule,)),
                None => capsule.into_bound_py_any(py),
            }
        };
        values.into_iter().map(export).collect()
    }

    /// Returns the ``TensorProto`` number of a value's element type.
    fn element_type_at(&self, py: Python<'_>, index: &Bound<'_, PyAny>) -> PyResult<i32> {
        Ok(self.at(py, index)?.get().dtype().to_onnx())
    }

    /// Returns the indices of boolean values, which become uint8 in DLPack capsules.
    fn bool_tensor_indices(&self) -> Vec<usize> {
        let is_bool = |value: &Py<OrtValue>| value.get().dtype() == ortrain::DType::Bool;
        let values = self.values();
        values.iter().enumerate().filter(|(_, value)| is_bool(value)).map(|(at, _)| at).collect()
    }
}

/// Extracts a value: a native one, the native one of `ortrain.OrtValue`, or a tensor by DLPack.
fn value_of(argument: &Bound<'_, PyAny>, is_bool: bool) -> PyResult<Py<OrtValue>> {
    let py = argument.py();
    if let Ok(value) = argument.cast::<OrtValue>() {
        return Ok(value.clone().unbind());
    }
    if let Ok(inside) = argument.getattr(intern!(py, "_ortvalue")) {
        return value_of(&inside, is_bool);
    }
    // onnxruntime's values also export booleans as uint8, and report the actual type.
    let parsed = match argument.get_type().name()? == "OrtValue" {
        true => argument.call_method0(intern!(py, "data_type"))?.extract::<String>()? == "tensor(bool)",
        false => false,
    };
    Py::new(py, OrtValue::of_dlpack(argument, is_bool || parsed)?)
}

/// Named values that persist between passes.
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

    /// Stores a value under a name, and replaces an existing one.
    fn insert(&self, name: String, ortvalue: &Bound<'_, PyAny>) -> PyResult<()> {
        let value = value_of(ortvalue, false)?;
        let before = self.values().insert(name, value);
        drop(before);
        Ok(())
    }

    /// Returns the names, sorted.
    fn keys(&self) -> Vec<String> {
        let mut names: Vec<String> = self.values().keys().cloned().collect();
        names.sort_unstable();
        names
    }

    /// Removes all values.
    fn clear(&self) {
        let values = std::mem::take(&mut *self.values());
        drop(values);
    }

    /// Returns the number of values with a name: 1 or 0.
    fn count(&self, name: &str) -> usize {
        usize::from(self.values().contains_key(name))
    }

    /// Removes a value. Raises ``RuntimeError`` if the name is unknown.
    fn remove(&self, name: &str) -> PyResult<()> {
        let removed = self.values().remove(name);
        removed.map(drop).ok_or_else(|| OrtrainError::new_err(format!("the cache has no value \"{name}\"")))
    }

    fn __len__(&self) -> usize {
        self.values().len()
    }

    fn __repr__(&self) -> String {
        format!("OrtValueCache({} values)", self.values().len())
    }
}
