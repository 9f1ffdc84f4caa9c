//! Memory of Python objects, lent to the core.
//!
//! An [`Area`] is where the elements of an object lie, with what keeps them there. Nobody makes a Rust reference to plain
//! bytes of it: the owner may write there at any time, from any thread, so the core sees atomic ones.
#![expect(unsafe_code, reason = "NumPy and DLPack say by an address where elements lie")]

use std::fmt::Debug;
use std::ptr::with_exposed_provenance;
use std::slice::from_raw_parts;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use ortrain::LentMemory;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::error::InvalidArgumentError;

const WORD: usize = size_of::<AtomicU64>();

/// Bytes of an object.
#[derive(Debug)]
pub(crate) struct Area<O> {
    address: usize,
    len: usize,
    read_only: bool,
    /// What keeps them.
    _owner: O,
}

impl<O> Area<O> {
    /// The `len` bytes from an address on.
    ///
    /// # Safety
    /// As long as the owner lives they are there, valid for reads and, unless `read_only`, for writes. An area of no bytes
    /// may have any address.
    pub(crate) unsafe fn new(address: usize, len: usize, read_only: bool, owner: O) -> Area<O> {
        Area { address, len, read_only, _owner: owner }
    }
}

/// Bytes before the first whole word, whole words, and bytes behind them.
fn words(bytes: &[AtomicU8]) -> (&[AtomicU8], &[AtomicU64], &[AtomicU8]) {
    // SAFETY: any eight bytes are a word, and both may change at any time. Whoever else writes there is no Rust code, or
    // writes by these words and bytes.
    unsafe { bytes.align_to::<AtomicU64>() }
}

impl<O: Send + Sync + Debug> LentMemory for Area<O> {
    fn bytes(&self) -> &[AtomicU8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: whoever made the area promised that the bytes are there as long as the owner, which lives as long as
        // `self`. The address comes from the owner, who exposed it by handing it out. Atomic bytes may be written to by
        // others; of read-only ones `write` is not called ([`LentMemory::write`]), and kernels do not write there either.
        unsafe { from_raw_parts(with_exposed_provenance(self.address), self.len) }
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) {
        let (head, middle, tail) = words(&self.bytes()[offset..][..bytes.len()]);
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
        let (head, middle, tail) = words(&self.bytes()[offset..][..bytes.len()]);
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

/// What keeps the elements of an array where they are.
#[derive(Debug)]
pub(crate) struct Array {
    _array: Py<PyAny>,
    /// Weak references to it and to those that it is a view of: NumPy gives such an array no other memory (`resize`).
    _pins: Vec<Py<PyAny>>,
}

/// Where the elements of a NumPy array lie, all `len` bytes in a row, if they do: in C order, one after the other.
pub(crate) fn area_of_array(array: &Bound<'_, PyAny>, len: usize) -> PyResult<Option<Area<Array>>> {
    static NDARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    static ASARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    static REF: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = array.py();
    let ndarray = NDARRAY.import(py, "numpy", "ndarray")?;
    // A class made of ndarray may say anything of itself; of this one NumPy says it.
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
    for seen in [array, &plain] {
        let mut pinned = seen.clone();
        while pinned.is_instance(ndarray)? {
            pins.push(REF.import(py, "weakref", "ref")?.call1((&pinned,))?.unbind());
            pinned = pinned.getattr(intern!(py, "base"))?;
        }
    }
    let owner = Array { _array: plain.unbind(), _pins: pins };
    // SAFETY: an ndarray has its elements at that address, in a row as its flags say, as long as it lives, and it is kept:
    // no code of Python reaches the elements' memory but through it, and NumPy does not move what is pinned.
    Ok(Some(unsafe { Area::new(address, len, read_only, owner) }))
}

/// Bytes at an address that a script names, and the object that keeps them. Without one the script keeps them, as it would
/// for any function of C that it calls with that address (`ctypes`).
pub(crate) fn area_at(address: usize, len: usize, owner: Option<Py<PyAny>>) -> Area<Option<Py<PyAny>>> {
    // SAFETY: none that could be checked here; it is the script's promise, and documented as such where scripts say addresses.
    unsafe { Area::new(address, len, false, owner) }
}

/// What is left of an object is given back while the interpreter is attached; if there is none any more, never.
pub(crate) fn with_interpreter(work: impl FnOnce(Python<'_>)) {
    let _ = Python::try_attach(work);
}
