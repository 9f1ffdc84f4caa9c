//! Import and export of tensors by DLPack: <https://dmlc.github.io/dlpack/latest/>.
//!
//! A tensor is passed as a capsule with a C structure. The producer owns the structure and frees it when the
//! consumer calls its deleter. Both layouts are supported in both directions: the original one, and the one
//! with a version and flags.
#![expect(unsafe_code, reason = "DLPack is an interface of C")]

use std::ffi::{CStr, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use ortrain::cuda::{Cuda, SharedMemory, share_memory};
use ortrain::{DType, HostMemory, Memory};
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict, PyTuple};
use pyo3::{ffi, intern};

use crate::cuda_packages::search_packages_for;
use crate::error::{DeviceUnavailableError, InvalidArgumentError, UnsupportedError, device_exception};
use crate::lent::{Area, with_interpreter};
use crate::shapes::byte_length;

const PLAIN: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
/// Version of exported tensors. The layout of other major versions is unknown.
const VERSION: [u32; 2] = [1, 0];
const READ_ONLY: u64 = 1;
/// Maximum rank, larger than in any library.
const MAX_AXES: i32 = 64;

/// Device kind of CPU memory.
pub(crate) const CPU: i32 = 1;
/// Device kind of memory on devices of CUDA.
pub(crate) const CUDA: i32 = 2;
/// Device of memory of the CPU.
pub(crate) const CPU_DEVICE: (i32, i32) = (CPU, 0);
/// The default stream of CUDA. Producers that are asked for no stream are ordered in it.
const DEFAULT_STREAM: u64 = 1;
/// Argument for a consumer that does not want any order.
const NO_STREAM: i64 = -1;

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Kind {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Header {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    kind: Kind,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    header: Header,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct ManagedVersioned {
    version: [u32; 2],
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    header: Header,
}

/// Returns the type code of an element type.
fn type_code(dtype: DType) -> Kind {
    let code = match dtype {
        DType::I8 | DType::I16 | DType::I32 | DType::I64 => 0,
        DType::U8 | DType::U16 | DType::U32 | DType::U64 | DType::Small(_) => 1,
        DType::F16 | DType::F32 | DType::F64 => 2,
        DType::BF16 => 4,
        DType::Bool => 6,
    };
    Kind { code, bits: 8 * dtype.size() as u8, lanes: 1 }
}

fn dtype_of(kind: Kind) -> Option<DType> {
    const ALL: [DType; 13] = [
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::U8,
        DType::U16,
        DType::U32,
        DType::U64,
        DType::F16,
        DType::F32,
        DType::F64,
        DType::BF16,
        DType::Bool,
    ];
    let same = |dtype: &DType| {
        let code = type_code(*dtype);
        (code.code, code.bits, code.lanes) == (kind.code, kind.bits, kind.lanes)
    };
    ALL.into_iter().find(same)
}

/// A tensor of another library; dropping it calls its deleter.
#[derive(Debug)]
enum ImportedTensor {
    Plain(NonNull<Managed>),
    Versioned(NonNull<ManagedVersioned>),
}

// SAFETY: only the deleter is accessed through it, once, and DLPack allows any thread to call it.
unsafe impl Send for ImportedTensor {}
// SAFETY: as above: a shared `ImportedTensor` has no operations.
unsafe impl Sync for ImportedTensor {}

impl Drop for ImportedTensor {
    fn drop(&mut self) {
        // Deleters of Python libraries may access Python objects.
        with_interpreter(|_| match *self {
            ImportedTensor::Plain(managed) => {
                // SAFETY: the consumer of the tensor owns it, and this is the only call of its deleter.
                if let Some(deleter) = unsafe { managed.as_ref() }.deleter {
                    // SAFETY: as above.
                    unsafe { deleter(managed.as_ptr()) }
                }
            }
            ImportedTensor::Versioned(managed) => {
                // SAFETY: as above.
                if let Some(deleter) = unsafe { managed.as_ref() }.deleter {
                    // SAFETY: as above.
                    unsafe { deleter(managed.as_ptr()) }
                }
            }
        });
    }
}

/// Description of a tensor in a capsule.
struct TensorDescription {
    dtype: DType,
    dims: Vec<usize>,
    address: usize,
    bytes: usize,
}

/// Checks that a tensor can be shared: on the CPU or on a device of CUDA, of a known type, contiguous.
///
/// # Safety
/// The header belongs to a live tensor.
unsafe fn describe_header(header: &Header) -> PyResult<TensorDescription> {
    if ![CPU, CUDA].contains(&header.device.kind) {
        return Err(device_error(header.device.kind, header.device.id));
    }
    let Kind { code, bits, lanes } = header.kind;
    let dtype = dtype_of(header.kind).ok_or_else(|| {
        UnsupportedError::new_err(format!(
            "tensors of DLPack type code {code} with {bits} bits and {lanes} lanes are not supported"
        ))
    })?;
    let malformed = |problem: &str| InvalidArgumentError::new_err(format!("the DLPack tensor {problem}"));
    let rank = match header.ndim {
        rank @ 0..=MAX_AXES => rank as usize,
        rank => return Err(malformed(&format!("has {rank} axes"))),
    };
    let axes = |from: *mut i64| match NonNull::new(from) {
        // SAFETY: a live header has `rank` sizes, and `rank` strides if not null.
        Some(from) => (0..rank).map(|axis| unsafe { from.add(axis).read() }).collect(),
        None => Vec::new(),
    };
    let (shape, strides): (Vec<i64>, Vec<i64>) = (axes(header.shape), axes(header.strides));
    let dims: Vec<usize> = shape.iter().filter_map(|&size| usize::try_from(size).ok()).collect();
    if dims.len() != rank {
        return Err(malformed(&format!("has the invalid shape {shape:?}")));
    }
    let bytes = byte_length(dtype, &dims)?;
    let mut step = 1;
    for (&size, &stride) in dims.iter().zip(&strides).rev() {
        if bytes > 0 && size > 1 && stride != step {
            return Err(malformed(&format!(
                "has the shape {shape:?} and the strides {strides:?}, so it is not contiguous; make it contiguous"
            )));
        }
        step = step.wrapping_mul(size as i64);
    }
    let offset = usize::try_from(header.byte_offset).unwrap_or(usize::MAX);
    let address = header.data.expose_provenance().checked_add(offset);
    match address {
        Some(address) if bytes == 0 || !header.data.is_null() => {
            Ok(TensorDescription { dtype, dims, address, bytes })
        }
        _ => Err(malformed("has no valid data pointer")),
    }
}

/// Returns the error for a tensor on another device.
fn device_error(kind: i32, id: i32) -> PyErr {
    let name = match kind {
        8 => "Metal".to_owned(),
        10 => "ROCm".to_owned(),
        other => format!("DLPack type {other}"),
    };
    UnsupportedError::new_err(format!(
        "the tensor is on a device ({name}, number {id}), but ortrain shares only memory of the CPU and of CUDA; \
         copy it there first"
    ))
}

/// Imports a tensor of another library: element type, shape, and its memory, which is shared and kept alive.
/// `data` is a capsule, or an object with `__dlpack__`. With `is_bool`, a uint8 tensor is read as booleans.
pub(crate) fn import_tensor(
    data: &Bound<'_, PyAny>,
    is_bool: bool,
) -> PyResult<(DType, Vec<usize>, Arc<Memory>)> {
    let py = data.py();
    let description;
    let (capsule, is_ordered) = match data.cast::<PyCapsule>() {
        Ok(capsule) => (capsule, false),
        Err(_) => {
            description = request_capsule(data)?;
            (description.cast::<PyCapsule>()?, true)
        }
    };
    let (header, read_only, imported, used) = if capsule.is_valid_checked(Some(PLAIN)) {
        let managed = capsule.pointer_checked(Some(PLAIN))?.cast::<Managed>();
        // SAFETY: a capsule with this name has this structure, which is live while the capsule has the name.
        let header = unsafe { managed.as_ref() }.header;
        (header, false, ImportedTensor::Plain(managed), c"used_dltensor")
    } else if capsule.is_valid_checked(Some(VERSIONED)) {
        let managed = capsule.pointer_checked(Some(VERSIONED))?.cast::<ManagedVersioned>();
        // SAFETY: as above. For another major version, only the version field is read; its offset never
        // changes.
        let version = unsafe { (&raw const (*managed.as_ptr()).version).read() };
        if version[0] != VERSION[0] {
            return Err(UnsupportedError::new_err(format!(
                "the tensor has version {}.{} of DLPack; ortrain supports version {}",
                version[0], version[1], VERSION[0]
            )));
        }
        // SAFETY: as above.
        let versioned = unsafe { managed.as_ref() };
        (
            versioned.header,
            versioned.flags & READ_ONLY != 0,
            ImportedTensor::Versioned(managed),
            c"used_dltensor_versioned",
        )
    } else {
        let used = capsule.is_valid_checked(Some(c"used_dltensor"))
            || capsule.is_valid_checked(Some(c"used_dltensor_versioned"));
        return Err(PyTypeError::new_err(match used {
            true => "the DLPack capsule was used before; its tensor can be taken only once",
            false => "expected a DLPack capsule, got a capsule with another content",
        }));
    };
    // The capsule owns the tensor until the capsule is renamed.
    let tensor = std::mem::ManuallyDrop::new(imported);
    // SAFETY: the capsule still owns the tensor, which is live.
    let mut described = unsafe { describe_header(&header) }?;
    if is_bool {
        described.dtype = match described.dtype {
            DType::U8 | DType::Bool => DType::Bool,
            other => {
                return Err(InvalidArgumentError::new_err(format!(
                    "a tensor of booleans must be uint8 or bool, got {other}"
                )));
            }
        };
    }
    let device = match header.device.kind {
        CUDA => Some(cuda_device(py, header.device.id)?),
        _ => None,
    };
    // SAFETY: the object is a capsule, and the name is a constant.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
        return Err(PyErr::fetch(py));
    }
    let owned = std::mem::ManuallyDrop::into_inner(tensor);
    if let Some(device) = device {
        if !is_ordered {
            device.order_after(DEFAULT_STREAM).map_err(device_exception)?;
        }
        // SAFETY: the elements of a DLPack tensor are valid until its deleter is called. The check above found them
        // contiguous. The producer has ordered its work before the work of this process.
        let memory = unsafe { device.adopt(described.address as u64, described.bytes, Box::new(owned)) };
        return Ok((described.dtype, described.dims, Arc::new(memory)));
    }
    // SAFETY: the elements of a DLPack tensor are valid until its deleter is called. The check above found
    // them contiguous.
    let area = unsafe { Area::new(described.address, described.bytes, read_only, owned) };
    Ok((described.dtype, described.dims, Arc::new(Memory::borrowed(Arc::new(area)))))
}

/// Opens the device of CUDA with an index.
fn cuda_device(py: Python<'_>, index: i32) -> PyResult<Cuda> {
    let name = format!("cuda:{index}");
    search_packages_for(&name);
    let opened = py.detach(|| Cuda::open(&name));
    opened.map_err(|error| DeviceUnavailableError::new_err(error.to_string()))
}

/// Requests a capsule from an object.
fn request_capsule<'py>(data: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = data.py();
    let (name, device_method) = (intern!(py, "__dlpack__"), intern!(py, "__dlpack_device__"));
    if !data.hasattr(name)? {
        let kind = data.get_type().name()?;
        return Err(PyTypeError::new_err(format!(
            "expected a DLPack capsule, or an object with __dlpack__, got {kind}"
        )));
    }
    let options = PyDict::new(py);
    if data.hasattr(device_method)? {
        let (kind, id): (i32, i32) = data.call_method0(device_method)?.extract()?;
        match kind {
            CPU => {}
            // The producer orders its work before the work of this stream.
            CUDA => options.set_item(intern!(py, "stream"), cuda_device(py, id)?.stream())?,
            _ => return Err(device_error(kind, id)),
        }
    }
    options.set_item(intern!(py, "max_version"), (VERSION[0], VERSION[1]))?;
    match data.call_method(name, (), Some(&options)) {
        // Older libraries do not support the argument.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            options.del_item(intern!(py, "max_version"))?;
            data.call_method(name, (), Some(&options))
        }
        other => other,
    }
}

/// Returns the host memory, for access by address.
pub(crate) fn on_host(memory: &Memory) -> PyResult<&HostMemory> {
    memory.host().ok_or_else(|| {
        PyBufferError::new_err("the memory is on a device, without an address in this process; take a copy")
    })
}

/// Returns the DLPack device of a memory.
pub(crate) fn device_of(memory: &Memory) -> PyResult<(i32, i32)> {
    match share_memory(memory, None) {
        Some(shared) => Ok((CUDA, shared.map_err(device_exception)?.index)),
        None => Ok(CPU_DEVICE),
    }
}

/// Exports memory on a device of CUDA by the protocol, in the order of the consumer's stream.
pub(crate) fn export_shared<'py>(
    py: Python<'py>,
    dtype: DType,
    dims: &[usize],
    memory: Arc<Memory>,
    (stream, max_version): (Option<i64>, Option<(u32, u32)>),
) -> PyResult<Bound<'py, PyCapsule>> {
    let stream = match stream {
        None => Some(DEFAULT_STREAM),
        Some(NO_STREAM) => None,
        Some(stream) => Some(u64::try_from(stream).ok().filter(|&stream| stream != 0).ok_or_else(|| {
            InvalidArgumentError::new_err(format!(
                "{stream} is no stream of CUDA; expected a handle, 1 or 2 for the default streams, or -1 for none"
            ))
        })?),
    };
    let shared = py.detach(|| share_memory(&memory, stream));
    shared.transpose().map_err(device_exception)?;
    export_capsule(py, dtype, dims, memory, max_version.is_some_and(|(major, _)| major >= 1))
}

/// Returns the dictionary of the CUDA array interface, version 3.
pub(crate) fn cuda_array_interface<'py>(
    py: Python<'py>,
    dtype: DType,
    dims: &[usize],
    memory: &Memory,
    read_only: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let Some(shared) = share_memory(memory, None) else {
        return Err(PyAttributeError::new_err("the memory is not on a device of CUDA"));
    };
    let SharedMemory { address, stream, .. } = shared.map_err(device_exception)?;
    let kind = match type_code(dtype).code {
        0 => 'i',
        1 => 'u',
        2 => 'f',
        6 => 'b',
        _ => {
            return Err(PyAttributeError::new_err(format!(
                "the CUDA array interface has no type for {dtype}"
            )));
        }
    };
    let order = if dtype.size() == 1 { '|' } else { '<' };
    let interface = PyDict::new(py);
    interface.set_item("shape", PyTuple::new(py, dims)?)?;
    interface.set_item("typestr", format!("{order}{kind}{}", dtype.size()))?;
    interface.set_item("data", (address, read_only))?;
    interface.set_item("version", 3)?;
    interface.set_item("strides", py.None())?;
    interface.set_item("stream", stream)?;
    Ok(interface)
}

/// Storage of an exported tensor. The consumer's call of the deleter frees it.
struct ExportedTensor<M> {
    managed: M,
    _memory: Arc<Memory>,
    axes: Vec<i64>,
}

/// A layout for exported tensors.
trait Layout: Sized {
    const NAME: &'static CStr;

    fn new(header: Header, read_only: bool) -> Self;
    fn set_context(&mut self, context: *mut c_void);
    fn context(&self) -> *mut c_void;
    fn header(&mut self) -> &mut Header;
}

impl Layout for Managed {
    const NAME: &'static CStr = PLAIN;

    fn new(header: Header, _read_only: bool) -> Managed {
        Managed { header, context: null_mut(), deleter: Some(free_exported::<Managed>) }
    }

    fn set_context(&mut self, context: *mut c_void) {
        self.context = context;
    }

    fn context(&self) -> *mut c_void {
        self.context
    }

    fn header(&mut self) -> &mut Header {
        &mut self.header
    }
}

impl Layout for ManagedVersioned {
    const NAME: &'static CStr = VERSIONED;

    fn new(header: Header, read_only: bool) -> ManagedVersioned {
        let flags = if read_only { READ_ONLY } else { 0 };
        let deleter = Some(free_exported::<ManagedVersioned> as unsafe extern "C" fn(_));
        ManagedVersioned { version: VERSION, context: null_mut(), deleter, flags, header }
    }

    fn set_context(&mut self, context: *mut c_void) {
        self.context = context;
    }

    fn context(&self) -> *mut c_void {
        self.context
    }

    fn header(&mut self) -> &mut Header {
        &mut self.header
    }
}

/// Frees an exported tensor.
///
/// # Safety
/// [`export_capsule`] created the tensor, and it is no longer in use.
unsafe extern "C" fn free_exported<M: Layout>(managed: *mut M) {
    // It may own a Python object, which is released at once if the interpreter is attached.
    with_interpreter(|_| {
        // SAFETY: the context of an exported tensor is the box of `export_with_layout`.
        drop(unsafe { Box::from_raw((*managed).context().cast::<ExportedTensor<M>>()) });
    });
}

/// Frees a tensor that was never consumed.
///
/// # Safety
/// Python calls it for a capsule that [`export_capsule`] created.
unsafe extern "C" fn destroy_capsule<M: Layout>(capsule: *mut ffi::PyObject) {
    // SAFETY: the object is a capsule; with this name, it still owns a tensor from `export_with_layout`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) == 1 {
            free_exported::<M>(ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()).cast());
        }
    }
}

/// Exports a tensor as a capsule. The memory is kept alive until the consumer calls the deleter.
///
/// The layout with a version is used if `versioned`. The other layout cannot mark memory as read-only, so
/// read-only memory is then an error.
pub(crate) fn export_capsule<'py>(
    py: Python<'py>,
    dtype: DType,
    dims: &[usize],
    memory: Arc<Memory>,
    versioned: bool,
) -> PyResult<Bound<'py, PyCapsule>> {
    match versioned {
        true => export_with_layout::<ManagedVersioned>(py, dtype, dims, memory),
        false if memory.is_read_only() => Err(PyBufferError::new_err(
            "the memory is read-only, and a DLPack capsule without a version cannot express that; take a copy",
        )),
        false => export_with_layout::<Managed>(py, dtype, dims, memory),
    }
}

fn export_with_layout<'py, M: Layout>(
    py: Python<'py>,
    dtype: DType,
    dims: &[usize],
    memory: Arc<Memory>,
) -> PyResult<Bound<'py, PyCapsule>> {
    let mut strides = vec![1_i64; dims.len()];
    for axis in (1..dims.len()).rev() {
        strides[axis - 1] = strides[axis].saturating_mul(dims[axis].max(1) as i64);
    }
    let axes: Vec<i64> = dims.iter().map(|&size| size as i64).chain(strides).collect();
    let (data, device) = match share_memory(&memory, None) {
        Some(shared) => {
            let SharedMemory { address, index, .. } = shared.map_err(device_exception)?;
            (std::ptr::with_exposed_provenance_mut(address as usize), Device { kind: CUDA, id: index })
        }
        None => (on_host(&memory)?.as_ptr().cast(), Device { kind: CPU, id: 0 }),
    };
    let header = Header {
        data,
        device,
        ndim: dims.len() as i32,
        kind: type_code(dtype),
        shape: null_mut(),
        strides: null_mut(),
        byte_offset: 0,
    };
    let managed = M::new(header, memory.is_read_only());
    let exported = Box::into_raw(Box::new(ExportedTensor { managed, _memory: memory, axes }));
    // SAFETY: this function owns the box until the capsule owns it, and `ExportedTensor` outlives the pointers to its
    // contents.
    let managed = unsafe {
        let axes = (*exported).axes.as_mut_ptr();
        (*exported).managed.set_context(exported.cast());
        let header = (*exported).managed.header();
        header.shape = axes;
        header.strides = axes.add(dims.len());
        NonNull::from(&mut (*exported).managed)
    };
    // SAFETY: the pointer refers to a structure of the layout with this name, and the destructor frees an
    // unconsumed tensor.
    let capsule = unsafe {
        PyCapsule::new_with_pointer_and_destructor(py, managed.cast(), M::NAME, Some(destroy_capsule::<M>))
    };
    capsule.inspect_err(|_| {
        // SAFETY: no capsule owns the tensor.
        unsafe { free_exported::<M>(managed.as_ptr()) }
    })
}
