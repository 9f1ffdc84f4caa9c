//! Packing: copies a block of a matrix, converted to the compute type, into the order in which a micro-kernel reads it.

use std::any::TypeId;

use ortrain_expr::DType;

use super::arithmetic::Arithmetic;
use crate::isa::{CACHE_LINE_BYTES, Isa, Level, Work, prefetch};
use crate::tile::number::{Bf16, F16, RoundedF32, Stored};

/// Storage type of the elements of a matrix, and the 16-bit float to which they are rounded when they are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Elements {
    pub(crate) stored: DType,
    pub(crate) rounded: Option<DType>,
}

impl Elements {
    /// Returns true if elements are read as stored, in type `real`.
    pub(crate) fn are_stored_as(self, real: DType) -> bool {
        self == Elements::from(real)
    }

    /// Returns the type of the numbers after reading.
    pub(crate) fn loaded_dtype(self) -> DType {
        self.rounded.unwrap_or(self.stored)
    }

    /// Returns the storage size of an element in bytes.
    pub(crate) fn size(self) -> usize {
        self.stored.size()
    }
}

impl From<DType> for Elements {
    fn from(stored: DType) -> Elements {
        Elements { stored, rounded: None }
    }
}

/// Block of a matrix for packing: `lines` run across the panels (rows of A, columns of B), `depth` is k.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    pub(crate) at: *const u8,
    pub(crate) line_step: isize,
    pub(crate) depth_step: isize,
    pub(crate) lines: usize,
    pub(crate) depth: usize,
}

struct PackPanels<S: Stored> {
    block: Block,
    /// Number of lines of a panel.
    panel: usize,
    to: *mut S::Computed,
    zero: S::Computed,
}

/// Number of depths for which adjacent lines are copied into all panels before the next depths: whole cache lines are
/// read in order.
const SLICE_DEPTHS: usize = 8;
/// Prefetch distance along a line, in elements.
const PREFETCH_ELEMENTS: usize = 64;

impl<S: Stored> PackPanels<S> {
    /// Returns the address of line `first` at depth `p`.
    #[inline(always)]
    fn element_ptr(&self, first: usize, p: usize) -> *const S {
        let Block { at, line_step, depth_step, .. } = self.block;
        at.cast::<S>().wrapping_offset(first as isize * line_step + p as isize * depth_step)
    }

    #[inline(always)]
    fn pack_panels<L: Level, const PANEL: usize>(&self) {
        let Block { line_step, depth_step, lines, depth, .. } = self.block;
        let full_lines = lines - lines % PANEL;
        let to = |first: usize, p: usize| self.to.wrapping_add(first * depth + p * PANEL);
        if line_step == 1 {
            let rest = lines - full_lines;
            for slice in (0..depth).step_by(SLICE_DEPTHS) {
                let depths = slice..depth.min(slice + SLICE_DEPTHS);
                // Prefetches lines of the next slice: they are a page apart, and the hardware does not predict them.
                let ask_ahead = |first: usize, p: usize| {
                    let ahead = self.element_ptr(first, p + SLICE_DEPTHS);
                    (0..PANEL)
                        .step_by(CACHE_LINE_BYTES / size_of::<S>())
                        .for_each(|i| prefetch(ahead.wrapping_add(i)));
                };
                for first in (0..full_lines).step_by(PANEL) {
                    for p in depths.clone() {
                        ask_ahead(first, p);
                        // SAFETY: lines before `lines` and depths before `depth` are elements of the matrix; `to` has
                        // the capacity of whole panels (contract of `pack`).
                        unsafe { copy_adjacent::<S, PANEL>(self.element_ptr(first, p), to(first, p)) };
                    }
                }
                if rest == 0 {
                    continue;
                }
                for p in depths {
                    ask_ahead(full_lines, p);
                    // SAFETY: as above.
                    unsafe {
                        to(full_lines, p).cast::<[S::Computed; PANEL]>().write([self.zero; PANEL]);
                        copy_any_number(self.element_ptr(full_lines, p), rest, to(full_lines, p));
                    }
                }
            }
            return;
        }
        for first in (0..full_lines).step_by(PANEL) {
            let transpose = if depth_step == 1 {
                self.pack_by_transposition::<L, PANEL>((first, PANEL), to(first, 0))
            } else {
                0
            };
            for p in transpose..depth {
                for i in 0..PANEL {
                    // SAFETY: as above.
                    unsafe {
                        let from = self.element_ptr(first + i, p).read_unaligned().decode();
                        to(first, p).add(i).write(from);
                    }
                }
            }
        }
        if full_lines < lines {
            for p in 0..depth {
                // SAFETY: as above.
                unsafe { to(full_lines, p).cast::<[S::Computed; PANEL]>().write([self.zero; PANEL]) };
            }
            let rest = lines - full_lines;
            let copy_one = |i: usize, p: usize| {
                // SAFETY: as above.
                unsafe {
                    to(full_lines, p)
                        .add(i)
                        .write(self.element_ptr(full_lines + i, p).read_unaligned().decode());
                };
            };
            let transpose = if depth_step == 1 {
                self.pack_by_transposition::<L, PANEL>((full_lines, rest), to(full_lines, 0))
            } else {
                0
            };
            (0..rest).for_each(|i| (transpose..depth).for_each(|p| copy_one(i, p)));
        }
    }

    /// Packs lines with adjacent depths into a panel by transposing small squares. Returns the number of packed depths.
    #[inline(always)]
    fn pack_by_transposition<L: Level, const PANEL: usize>(
        &self,
        (first, lines): (usize, usize),
        to: *mut S::Computed,
    ) -> usize {
        let Block { line_step, depth, .. } = self.block;
        // SAFETY: as in `panels`: the squares are inside of the block and of the panel; the last ones of a panel may
        // overlap.
        unsafe {
            let is_f32 =
                size_of::<S>() == size_of::<f32>() && TypeId::of::<S::Computed>() == TypeId::of::<f32>();
            // Rounded elements are transposed as stored, and rounded afterwards, in place.
            let read = |p: usize, depths: usize| {
                if TypeId::of::<S>() != TypeId::of::<S::Computed>() {
                    for at in (p * PANEL..(p + depths) * PANEL).map(|i| to.add(i)) {
                        at.write(at.cast::<S>().read().decode());
                    }
                }
            };
            if is_f32 && PANEL == 6 && lines == 6 {
                let full_depth = depth - depth % 8;
                for p in (0..full_depth).step_by(8) {
                    (first..first + lines)
                        .for_each(|line| prefetch(self.element_ptr(line, p + PREFETCH_ELEMENTS)));
                    L::transpose_6(self.element_ptr(first, p).cast(), line_step, to.add(p * PANEL).cast());
                    read(p, 8);
                }
                return full_depth;
            }
            if is_f32 && PANEL >= 8 {
                let full_depth = depth - depth % 16;
                for p in (0..full_depth).step_by(16) {
                    for i in (0..lines).step_by(16) {
                        let to = to.add(p * PANEL + i).cast::<f32>();
                        let count = (lines - i).min(16);
                        for line in i..i + count {
                            prefetch(self.element_ptr(first + line, p + PREFETCH_ELEMENTS));
                        }
                        L::transpose_16(self.element_ptr(first + i, p).cast(), line_step, to, PANEL, count);
                    }
                    read(p, 16);
                }
                return full_depth;
            }
            if lines < 4 {
                return 0;
            }
            let full_depth = depth - depth % 4;
            for p in (0..full_depth).step_by(4) {
                for i in (0..lines).step_by(4) {
                    let i = i.min(lines - 4);
                    transpose_4x4(self.element_ptr(first + i, p), line_step, to.add(p * PANEL + i), PANEL);
                }
            }
            full_depth
        }
    }
}

/// Copies adjacent elements.
///
/// # Safety
/// `from` is valid for reads of `COUNT` elements, and `to` for writes.
#[inline(always)]
unsafe fn copy_adjacent<S: Stored, const COUNT: usize>(from: *const S, to: *mut S::Computed) {
    // SAFETY: the caller's contract.
    unsafe {
        let from = from.cast::<[S; COUNT]>().read_unaligned();
        to.cast::<[S::Computed; COUNT]>().write_unaligned(from.map(S::decode));
    }
}

/// Copies any number of adjacent elements, in the largest possible pieces. The last two pieces may overlap.
///
/// # Safety
/// As [`copy_adjacent`], for `count` elements.
#[inline(always)]
unsafe fn copy_any_number<S: Stored>(from: *const S, count: usize, to: *mut S::Computed) {
    let pieces = |size: usize| (0..count).step_by(size).map(move |i| i.min(count - size));
    // SAFETY: the caller's contract; pieces are inside of `count` elements.
    unsafe {
        match count {
            16.. => pieces(16).for_each(|i| copy_adjacent::<S, 16>(from.add(i), to.add(i))),
            8.. => pieces(8).for_each(|i| copy_adjacent::<S, 8>(from.add(i), to.add(i))),
            4.. => pieces(4).for_each(|i| copy_adjacent::<S, 4>(from.add(i), to.add(i))),
            _ => (0..count).for_each(|i| copy_adjacent::<S, 1>(from.add(i), to.add(i))),
        }
    }
}

/// Transposes a square of 4×4. `from_step` and `to_step` are the distances between lines.
///
/// # Safety
/// The elements of `from` are valid for reads, and the elements of `to` for writes.
#[inline(always)]
unsafe fn transpose_4x4<S: Stored>(from: *const S, from_step: isize, to: *mut S::Computed, to_step: usize) {
    // SAFETY: the caller's contract.
    unsafe {
        let lines: [[S; 4]; 4] = std::array::from_fn(|i| {
            from.wrapping_offset(i as isize * from_step).cast::<[S; 4]>().read_unaligned()
        });
        let transposed: [[S::Computed; 4]; 4] =
            std::array::from_fn(|p| std::array::from_fn(|i| lines[i][p].decode()));
        for (p, line) in transposed.into_iter().enumerate() {
            to.add(p * to_step).cast::<[S::Computed; 4]>().write_unaligned(line);
        }
    }
}

impl<S: Stored> Work for PackPanels<S> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        match self.panel {
            1 => self.pack_panels::<L, 1>(),
            4 => self.pack_panels::<L, 4>(),
            6 => self.pack_panels::<L, 6>(),
            8 => self.pack_panels::<L, 8>(),
            14 => self.pack_panels::<L, 14>(),
            16 => self.pack_panels::<L, 16>(),
            32 => self.pack_panels::<L, 32>(),
            other => unreachable!("no micro-kernel has panels of {other} rows"),
        }
    }
}

/// Packs a block into panels of `panel` lines: within a panel, the lines of each depth are adjacent.
///
/// # Safety
/// `at` and the steps address elements that are valid for reads. `to` is valid for writes of `lines`, rounded up to
/// whole panels, times `depth` elements. The compute type of the elements is `T`.
pub(crate) unsafe fn pack<T: Arithmetic>(
    isa: Isa,
    elements: impl Into<Elements>,
    block: Block,
    panel: usize,
    to: *mut T,
) {
    macro_rules! go {
        ($s:ty, $zero:literal) => {
            isa.run(PackPanels::<$s> { block, panel, to: to.cast(), zero: $zero })
        };
    }
    let Elements { stored, rounded } = elements.into();
    match (stored, rounded) {
        (DType::F32, None) => go!(f32, 0.0),
        (DType::F32, Some(DType::F16)) => go!(RoundedF32<F16>, 0.0),
        (DType::F32, Some(DType::BF16)) => go!(RoundedF32<Bf16>, 0.0),
        (DType::F64, None) => go!(f64, 0.0),
        (DType::F16, None) => go!(F16, 0.0),
        (DType::BF16, None) => go!(Bf16, 0.0),
        other => unreachable!("a matrix of {other:?}: rejected at compile time"),
    }
}

struct TransposeTask<T> {
    from: *const T,
    from_step: usize,
    lines: usize,
    len: usize,
    to: *mut T,
    to_step: usize,
}

impl<T: Arithmetic> Work for TransposeTask<T> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        const SIDE: usize = 8;
        let TransposeTask { from, from_step, lines, len, to, to_step } = self;
        let squares = TypeId::of::<T>() == TypeId::of::<f32>() && lines >= SIDE && len >= SIDE;
        // Cache lines of results are filled one after the other, because lines of results may be a page apart.
        const TWO: usize = 2 * SIDE;
        for pair in (0..lines).step_by(TWO) {
            for start in (0..len).step_by(SIDE) {
                for first in (pair..lines.min(pair + TWO)).step_by(SIDE) {
                    // SAFETY: the contract of `transpose`.
                    unsafe {
                        if squares {
                            // The last squares may overlap earlier ones.
                            let (first, start) = (first.min(lines - SIDE), start.min(len - SIDE));
                            let (from, to) =
                                (from.add(first * from_step + start), to.add(start * to_step + first));
                            L::transpose_8x8(from.cast(), from_step as isize, to.cast(), to_step);
                            continue;
                        }
                        for line in first..lines.min(first + SIDE) {
                            for i in start..len.min(start + SIDE) {
                                let value = from.add(line * from_step + i).read_unaligned();
                                to.add(i * to_step + line).write_unaligned(value);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Transposes a matrix of `lines` lines of `len` elements: element `i` of line `j` becomes element `j` of line `i`.
///
/// # Safety
/// The elements of `from` are valid for reads, and the elements of `to` for writes.
pub(crate) unsafe fn transpose<T: Arithmetic>(
    isa: Isa,
    from: *const T,
    from_step: usize,
    (lines, len): (usize, usize),
    to: *mut T,
    to_step: usize,
) {
    isa.run(TransposeTask { from, from_step, lines, len, to, to_step });
}
