//! Loads and stores between callers' memory and tile registers. Callers' memory is accessed through raw pointers only.

use std::ops::Range;

use ortrain_expr::{Access, DType, Type};

use super::number::{Stored, with_stored};
use super::strided_iter::StridedIter;
use crate::isa::{Isa, Level, Work};

/// Access of a load or a store. Its axes are divided into axes along the tile and axes outside of the tile, which the
/// driver steps through.
#[derive(Clone, Debug)]
pub(crate) struct StridedView {
    pub(crate) dtype: DType,
    /// Element of index zero.
    pub(crate) offset: isize,
    /// Number of elements of the buffer.
    pub(crate) len: usize,
    /// The axes outside of the tile.
    pub(crate) outside: StridedIter,
    /// The axes along the tile.
    pub(crate) along: StridedIter,
}

impl StridedView {
    pub(crate) fn new(
        access: &Access,
        dims: &[usize],
        outside: &[usize],
        along: &[usize],
    ) -> Result<StridedView, String> {
        let walk =
            |axes: &[usize]| StridedIter::new(axes.iter().map(|&axis| (dims[axis], access.strides[axis])));
        let offset = isize::try_from(access.offset).map_err(|_| "an offset beyond memory".to_owned())?;
        Ok(StridedView {
            dtype: access.dtype,
            offset,
            len: access.len,
            outside: walk(outside)?,
            along: walk(along)?,
        })
    }

    /// Returns the address of the element at index (`outside`, 0).
    #[inline(always)]
    fn outer_address(&self, base: *const u8, outside: usize) -> *const u8 {
        // Wrapping arithmetic does not assume that the address is in bounds: along a reversed axis, index zero is not
        // the lowest address. Elements are read at valid indices only.
        base.wrapping_offset((self.offset + self.outside.offset(outside)) * self.dtype.size() as isize)
    }

    /// Returns the address of the element at index (`outside`, `start`), the first of contiguous elements.
    #[inline(always)]
    pub(crate) fn address(&self, base: *const u8, outside: usize, start: usize) -> *const u8 {
        let step = self.along.offset(start) * self.dtype.size() as isize;
        self.outer_address(base, outside).wrapping_offset(step)
    }

    /// Returns the length of the contiguous pieces along a tile, if the storage type is the compute type.
    pub(crate) fn contiguous_len(&self) -> Option<usize> {
        let as_computed =
            matches!(self.dtype, DType::F32 | DType::F64 | DType::I32 | DType::I64 | DType::U32 | DType::U64);
        self.along.contiguous_len().filter(|_| as_computed)
    }

    /// Returns the length of the contiguous pieces along a tile, if elements are bytes that are computed as integers.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "only generated machine code accesses bytes")
    )]
    pub(crate) fn contiguous_bytes_len(&self) -> Option<usize> {
        self.along.contiguous_len().filter(|_| matches!(self.dtype, DType::U8 | DType::I8))
    }

    /// Returns the bytes from an element to the element at the same position of the next piece. `None` if pieces do not
    /// have the length `piece`, or if all pieces are the same elements.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "only generated machine code prefetches")
    )]
    pub(crate) fn piece_stride_bytes(&self, piece: usize) -> Option<i32> {
        let step = self.along.piece_stride().filter(|_| self.contiguous_len() == Some(piece))?;
        i32::try_from(step * self.dtype.size() as isize).ok().filter(|&step| step != 0)
    }

    /// Loads the elements of the indices (`outside`, `start..start + n`), as `Type::of(dtype)`.
    ///
    /// # Safety
    /// `base` is the start of a buffer, and the access stays inside of that buffer at these indices. `d` is a register
    /// of `n` values.
    #[inline]
    pub(crate) unsafe fn load(
        &self,
        isa: Isa,
        base: *const u8,
        outside: usize,
        start: usize,
        d: *mut u8,
        n: usize,
    ) {
        let at = self.outer_address(base, outside);
        with_stored!(self.dtype, S => {
            let d = d.cast::<<S as Stored>::Computed>();
            isa.run(Load::<S> { walk: &self.along, at: at.cast(), start, d, n });
        });
    }

    /// Stores `n` values of type `Type::of(dtype)` to the elements of the indices (`outside`, `start..start + n`).
    ///
    /// # Safety
    /// - `base` is the start of a buffer, and the access stays inside of that buffer at these indices.
    /// - Nothing else reads or writes these elements during the call.
    /// - `a` is a register of `n` values.
    #[inline]
    pub(crate) unsafe fn store(
        &self,
        isa: Isa,
        base: *mut u8,
        outside: usize,
        start: usize,
        a: *const u8,
        n: usize,
    ) {
        let at = self.outer_address(base, outside).cast_mut();
        with_stored!(self.dtype, S => {
            let a = a.cast::<<S as Stored>::Computed>();
            isa.run(Store::<S> { walk: &self.along, at: at.cast(), start, a, n });
        });
    }

    /// Gathers elements: loads the element `offset + i` of the buffer for each index `i` of `n` indices. Loads zero for
    /// elements outside of `offset..len`.
    ///
    /// # Safety
    /// `base` is the start of a buffer of `len` elements. `index` and `d` are different registers of `n` values each.
    pub(crate) unsafe fn load_at(&self, isa: Isa, base: *const u8, index: *const u8, d: *mut u8, n: usize) {
        let count = self.len.saturating_sub(self.offset as usize) as u64;
        let at = base.wrapping_offset(self.offset * self.dtype.size() as isize);
        with_stored!(self.dtype, S => {
            let (d, index) = (d.cast::<<S as Stored>::Computed>(), index.cast::<i64>());
            isa.run(LoadAt::<S> { at: at.cast(), count, index, d, n });
        });
    }

    /// Loads `n` contiguous elements of the buffer, starting at the element `offset + first`. Loads zero for elements
    /// outside of `offset..len`.
    ///
    /// # Safety
    /// `base` is the start of a buffer of `len` elements. `d` is a register of `n` values.
    pub(crate) unsafe fn load_from(&self, isa: Isa, base: *const u8, first: i64, d: *mut u8, n: usize) {
        let count = self.len.saturating_sub(self.offset as usize) as i64;
        let at = base.wrapping_offset(self.offset * self.dtype.size() as isize);
        // Converts a bound on elements of the buffer into a bound on the `n` loaded elements.
        let inside = |index: i64| index.saturating_sub(first).clamp(0, n as i64) as usize;
        let (begin, end) = (inside(0), inside(count));
        with_stored!(self.dtype, S => {
            let d = d.cast::<<S as Stored>::Computed>();
            isa.run(LoadFrom::<S> { at: at.cast(), first, in_bounds: begin..end.max(begin), d, n });
        });
    }
}

/// Returns the bytes of one value of a compute type.
pub(crate) fn width(ty: Type) -> usize {
    match ty {
        Type::Bool => 1,
        Type::F32 | Type::I32 | Type::U32 => 4,
        Type::F64 | Type::I64 | Type::U64 => 8,
    }
}

struct Load<'a, S: Stored> {
    walk: &'a StridedIter,
    at: *const S,
    start: usize,
    d: *mut S::Computed,
    n: usize,
}

impl<S: Stored> Work for Load<'_, S> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        // If the access repeats, one period is read from the buffer, and copied to the rest of the register.
        let read = self.walk.period().map_or(self.n, |period| period.min(self.n));
        self.walk.for_each_piece(self.start, read, |position, offset, len, stride| {
            // SAFETY: by the contract of `StridedView::load` the elements are in the buffer, and `d` has capacity for
            // `n` values.
            unsafe {
                let from = self.at.wrapping_offset(offset);
                let to = self.d.add(position);
                match stride {
                    1 => copy(from, len, to, S::decode),
                    0 => fill(to, from.read_unaligned().decode(), len),
                    _ => {
                        for i in 0..len {
                            let from = from.wrapping_offset(i as isize * stride);
                            to.add(i).write(from.read_unaligned().decode());
                        }
                    }
                }
            }
        });
        let mut filled = read;
        while filled < self.n {
            let more = filled.min(self.n - filled);
            // SAFETY: `d` has capacity for `n` values. The first `filled` are initialised, and the next `more` do not
            // overlap them.
            unsafe { std::ptr::copy_nonoverlapping(self.d, self.d.add(filled), more) };
            filled += more;
        }
    }
}

/// Converts `len` contiguous values. Planes of small images are pieces of 36 or 49 values, so these lengths are fast.
///
/// # Safety
/// `from` is valid for reads of `len` values, and `to` for writes of `len` values. Both may have any alignment.
#[inline(always)]
unsafe fn copy<A: Copy, B: Copy>(from: *const A, len: usize, to: *mut B, convert: impl Fn(A) -> B) {
    const WIDE: usize = 8;
    const SHORT: usize = 64;
    // SAFETY: the caller's contract.
    unsafe {
        if !(WIDE..SHORT).contains(&len) {
            for i in 0..len {
                to.add(i).write_unaligned(convert(from.add(i).read_unaligned()));
            }
            return;
        }
        // The last vector ends with the piece, and may overlap the vector before it.
        for i in (0..len).step_by(WIDE) {
            let i = i.min(len - WIDE);
            let values = from.add(i).cast::<[A; WIDE]>().read_unaligned();
            to.add(i).cast::<[B; WIDE]>().write_unaligned(values.map(&convert));
        }
    }
}

/// Writes a value `len` times. Planes of a few elements are short pieces, so short lengths are fast.
///
/// # Safety
/// `to` is aligned, and valid for writes of `len` values.
#[inline(always)]
unsafe fn fill<T: Copy>(to: *mut T, value: T, len: usize) {
    const WIDE: usize = 8;
    // SAFETY: the caller's contract.
    unsafe {
        if len < WIDE {
            for i in 0..len {
                to.add(i).write(value);
            }
            return;
        }
        // The last vector ends with the piece, and may overlap the vector before it.
        for i in (0..len).step_by(WIDE) {
            to.add(i.min(len - WIDE)).cast::<[T; WIDE]>().write_unaligned([value; WIDE]);
        }
    }
}

struct Store<'a, S: Stored> {
    walk: &'a StridedIter,
    at: *mut S,
    start: usize,
    a: *const S::Computed,
    n: usize,
}

impl<S: Stored> Work for Store<'_, S> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        self.walk.for_each_piece(self.start, self.n, |position, offset, len, stride| {
            // SAFETY: by the contract of `StridedView::store` the elements are in the buffer, and `a` has their values.
            unsafe {
                let to = self.at.wrapping_offset(offset);
                let from = self.a.add(position);
                if stride == 1 {
                    copy(from, len, to, S::encode);
                } else {
                    for i in 0..len {
                        let to = to.wrapping_offset(i as isize * stride);
                        to.write_unaligned(S::encode(from.add(i).read()));
                    }
                }
            }
        });
    }
}

struct LoadAt<S: Stored> {
    at: *const S,
    count: u64,
    index: *const i64,
    d: *mut S::Computed,
    n: usize,
}

struct LoadFrom<S: Stored> {
    at: *const S,
    first: i64,
    /// Loaded elements (of `0..n`) that are inside of the buffer.
    in_bounds: Range<usize>,
    d: *mut S::Computed,
    n: usize,
}

impl<S: Stored> Work for LoadFrom<S> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let LoadFrom { at, first, in_bounds: Range { start, end }, d, n } = self;
        // SAFETY: by the contract of `StridedView::load_from` the register has `n` values, and the buffer has the
        // elements in `in_bounds`. All-zero bytes are a value of every compute type.
        unsafe {
            d.write_bytes(0, start);
            let from = at.wrapping_offset(first as isize).wrapping_add(start);
            copy(from, end - start, d.add(start), S::decode);
            d.add(end).write_bytes(0, n - end);
        }
    }
}

impl<S: Stored> Work for LoadAt<S> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        for i in 0..self.n {
            // SAFETY: by the contract of `StridedView::load_at` the registers have `n` values, and the buffer has
            // `count` elements from `at` on. All-zero bytes are a value of every compute type.
            unsafe {
                let index = self.index.add(i).read() as u64;
                let value = if index < self.count {
                    self.at.wrapping_add(index as usize).read_unaligned().decode()
                } else {
                    std::mem::zeroed()
                };
                self.d.add(i).write(value);
            }
        }
    }
}
