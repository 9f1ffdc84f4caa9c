//! Memory of Python objects, shared with the core.
//!
//! An [`Area`] is the address range of an object's elements, with the owner that keeps it valid. There is
//! never a Rust reference to its plain bytes: the owner may write there at any time, from any thread, so the
//! core uses atomic bytes.
#![expect(unsafe_code, reason = "NumPy and DLPack say by an address where elements lie")]

use std::fmt::Debug;
use std::ptr::with_exposed_provenance;
use std::slice::from_raw_parts;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use ortrain::BorrowedMemory;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::error::InvalidArgumentError;

const WORD: usize = size_of::<AtomicU64>();

/// Byte range of an object.
#[derive(Debug)]
pub(crate) struct Area<O> {
    address: usize,
    len: usize,
    read_only: bool,
    /// Owner that keeps the bytes valid.
    _owner: O,
}

impl<O> Area<O> {
    /// Wraps the `len` bytes at an address.
    ///
    /// # Safety
    /// While the owner is alive, the bytes are valid for reads and, unless `read_only`, for writes. An area
    /// of no bytes may have any address.
    pub(crate) unsafe fn new(address: usize, len: usize, read_only: bool, owner: O) -> Area<O> {
        Area { address, len, read_only, _owner: owner }
    }
}

/// Splits bytes into unaligned prefix, aligned 8-byte words, and suffix.
fn split_words(bytes: &[AtomicU8]) -> (&[AtomicU8], &[AtomicU64], &[AtomicU8]) {
    // SAFETY: any eight bytes are a valid word, and both may change at any time. Other writers are no Rust
    // code, or use these atomic words and bytes.
    unsafe { bytes.align_to::<AtomicU64>() }
}

impl<O: Send + Sync + Debug> BorrowedMemory for Area<O> {
    fn bytes(&self) -> &[AtomicU8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the creator of the area guarantees valid bytes during the life of the owner, and the owner
        // lives as long as `self`. The owner exposed the address by passing it. Atomic bytes may have other
        // writers. `write` is not called for read-only bytes ([`BorrowedMemory::write`]), and kernels do not
        // write to them either.
        unsafe { from_raw_parts(with_exposed_provenance(self.address), self.len) }
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) {
        let (head, middle, tail) = split_words(&self.bytes()[offset..][..bytes.len()]);
        let (first, rest) = bytes.split_at_mut(head.len());
        let (between, last) = rest.split_at_mut(middle.len() * WORD);
        for (lent, bytes) in [(head, first), (tail, last)] {
            lent.iter().zip(bytes).for_each(|(lent, byte)| *byte = lent.load(Ordering::Relaxed));
        }
        for (lent, word) in middle.iter().zip(between.as_chunks_mut::<WORD>().0) {
            *word = lent.load(Ordering::Relaxed).to_ne_bytes();
        }
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        let (head, middle, tail) = split_words(&self.bytes()[offset..][..bytes.len()]);
        let (first, rest) = bytes.split_at(head.len());
        let (between, last) = rest.split_at(middle.len() * WORD);
        for (lent, bytes) in [(head, first), (tail, last)] {
            lent.iter().zip(bytes).for_each(|(lent, &byte)| lent.store(byte, Ordering::Relaxed));
        }
        for (lent, word) in middle.iter().zip(between.as_chunks::<WORD>().0) {
            lent.store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
    }
}

/// Owner of an array's elements.
#[derive(Debug)]
pub(crate) struct ArrayOwner {
    _array: Py<PyAny>,
    /// Weak references to the array and its base arrays: NumPy does not reallocate an array with weak
    /// references (`resize`).
    _pins: Vec<Py<PyAny>>,
}

/// Returns the area of a NumPy array's elements, `len` bytes, if they are contiguous in C order.
pub(crate) fn area_of_array(array: &Bound<'_, PyAny>, len: usize) -> PyResult<Option<Area<ArrayOwner>>> {
    static NDARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    static ASARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    static REF: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = array.py();
    let ndarray = NDARRAY.import(py, "numpy", "ndarray")?;
    // A subclass of ndarray may report wrong attributes; a plain ndarray reports its own correctly.
    let plain = match array.get_type().is(ndarray) {
        true => array.clone(),
        false => ASARRAY.import(py, "numpy", "asarray")?.call1((array,))?,
    };
    if !plain.get_type().is(ndarray) {
        return Err(InvalidArgumentError::new_err("expected a NumPy array"));
    }
    let flags = plain.getattr(intern!(py, "flags"))?;
    let is = |name| flags.getattr(name)?.is_truthy();
    let size: usize = plain.getattr(intern!(py, "nbytes"))?.extract()?;
    if size != len || !is(intern!(py, "c_contiguous"))? {
        return Ok(None);
    }
    let interface = plain.getattr(intern!(py, "__array_interface__"))?;
    let (address, read_only): (usize, bool) = interface.get_item(intern!(py, "data"))?.extract()?;
    let mut pins = Vec::new();
    for object in [array, &plain] {
        let mut pinned = object.clone();
        while pinned.is_instance(ndarray)? {
            pins.push(REF.import(py, "weakref", "ref")?.call1((&pinned,))?.unbind());
            pinned = pinned.getattr(intern!(py, "base"))?;
        }
    }
    let owner = ArrayOwner { _array: plain.unbind(), _pins: pins };
    // SAFETY: an ndarray keeps its elements at this address, contiguous by its flags, while it is alive, and
    // the area keeps it alive. Python code reaches the memory only through it, and NumPy does not move a
    // pinned array.
    Ok(Some(unsafe { Area::new(address, len, read_only, owner) }))
}

/// Wraps the bytes at an address from a script, with the object that keeps them valid. Without an object, the
/// script itself is responsible, as for a call of any C function with this address (`ctypes`).
pub(crate) fn area_at(address: usize, len: usize, owner: Option<Py<PyAny>>) -> Area<Option<Py<PyAny>>> {
    // SAFETY: it cannot be checked here: the documentation requires the guarantee from the script.
    unsafe { Area::new(address, len, false, owner) }
}

/// Runs the release of an object while the interpreter is attached; skips it after the interpreter has ended.
pub(crate) fn with_interpreter(work: impl FnOnce(Python<'_>)) {
    let _ = Python::try_attach(work);
}
