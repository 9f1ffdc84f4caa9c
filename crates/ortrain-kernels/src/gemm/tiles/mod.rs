//! Inner products in bfloat16: f32 operands are sums of one, two or three bfloat16 numbers, multiplied term by term.
//!
//! An f32 number is the sum of three bfloat16 numbers, except for the smallest numbers (`split`). Only the significant
//! products of terms are computed: `a₁b₁` (bf16), with `a₁b₂ + a₂b₁` (bf16x3), with `a₂b₂ + a₁b₃ + a₃b₁` (bf16x6). All
//! products are summed in f32.
//!
//! Packed operands consist of tiles of 1 KiB, as for AMX. A tile of A has 16 lines of 32 depths. A tile of B has 16
//! pairs of depths of 16 lines. Both therefore have lines of 64 bytes, in which 32 bits contain a pair of depths.
//! Panels have 16 lines: for each 32 depths one tile for each term. Both operands are padded with zeros after the last
//! line and depth.
//!
//! Infinity is no sum of finite terms: its further terms are zero, and zero times infinity is NaN. Sums that are NaN
//! are therefore computed again from the first terms only.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod emulated;
mod job;
mod split;

use std::mem::MaybeUninit;

use ortrain_expr::{DType, Precision};

use super::corner_copy::write_panels;
use crate::isa::bf16::{Bf16Unit, Unit};
use crate::isa::{Isa, Level, Work};
pub(crate) use job::{DEPTHS, LINES, SIDE};
use job::{Job, TILE};

pub(crate) use split::{Side, pack, pack_panel};

/// Maximum number of products of terms.
const MAX_PRODUCTS: usize = 6;

/// Method of bfloat16 products: unit, terms and products.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiles {
    unit: Bf16Unit,
    /// Number of terms of the elements of A and of B.
    terms: [usize; 2],
    /// Pairs of terms that are multiplied, the smallest products first.
    products: [[usize; 2]; MAX_PRODUCTS],
    count: usize,
}

impl Tiles {
    /// Creates the method for elements of two types.
    pub(crate) fn new(precision: Precision, unit: Bf16Unit, dtypes: [DType; 2]) -> Tiles {
        let max_terms = precision.terms();
        // Narrow floats need fewer terms: they have 8 and 11 bits, and each term has 8.
        let terms = dtypes.map(|dtype| match dtype {
            DType::BF16 => 1,
            DType::F16 => max_terms.min(2),
            _ => max_terms,
        });
        let mut products = [[0; 2]; MAX_PRODUCTS];
        let mut count = 0;
        for &(a, b) in precision.products().iter().rev() {
            if a < terms[0] && b < terms[1] {
                products[count] = [a, b];
                count += 1;
            }
        }
        Tiles { unit, terms, products, count }
    }

    /// Returns the number of terms of the elements of A or of B.
    pub(crate) fn terms(&self, side: Side) -> usize {
        match side {
            Side::A => self.terms[0],
            Side::B => self.terms[1],
        }
    }

    /// Returns the bytes of a packed panel of an operand.
    fn panel_bytes(&self, side: Side, depth: usize) -> usize {
        depth.div_ceil(DEPTHS) * self.terms(side) * TILE
    }

    /// Computes `C = A·B`, or `C += A·B`, of `rows` rows and `cols` columns, at most [`SIDE`] of each. Panels are
    /// adjacent. Sums start at zero, and are then added.
    ///
    /// # Safety
    /// The panels are valid for reads and packed for this depth, C is valid for writes, and a [`Session`] of this unit
    /// is open.
    pub(crate) unsafe fn multiply(
        &self,
        isa: Isa,
        (rows, cols): (usize, usize),
        depth: usize,
        (a, b): (*const u8, *const u8),
        c: *mut f32,
        c_row: isize,
        add: bool,
    ) {
        let Tiles { terms, count, .. } = *self;
        let mut offsets = [[0; 2]; MAX_PRODUCTS];
        for (offsets, terms) in offsets.iter_mut().zip(self.products) {
            *offsets = terms.map(|term| term * TILE);
        }
        let panels = [self.panel_bytes(Side::A, depth), self.panel_bytes(Side::B, depth)];
        let (chunks, steps) = (depth.div_ceil(DEPTHS), terms.map(|terms| terms * TILE));
        let products = &offsets[..count];
        // SAFETY: the caller's contract; all existing rows of the block are written, whole tiles wide.
        let compute = |to: *mut f32, to_row: isize| unsafe {
            let job = Job { chunks, a, b, panels, steps, rows, cols, products, to, to_row };
            job.run(self.unit, isa);
            let size = (rows, cols.next_multiple_of(LINES));
            if count > 1 && isa.run(ContainsNan { at: to, row: to_row, size }) {
                let mut plain = TileBlock([const { MaybeUninit::uninit() }; SIDE * SIDE]);
                let first = plain.0.as_mut_ptr().cast::<f32>();
                let next_job = Job { products: &[[0; 2]], to: first, to_row: SIDE as isize, ..job };
                next_job.run(self.unit, isa);
                isa.run(ReplaceNan { at: to, row: to_row, from: first, size });
            }
        };
        // SAFETY: the caller's contract.
        unsafe { write_panels(isa, (rows, cols), (c, c_row), add, compute) };
    }
}

/// Sums of two tiles by two.
#[repr(align(64))]
struct TileBlock([MaybeUninit<f32>; SIDE * SIDE]);

impl Job<'_> {
    /// # Safety
    /// The panels are valid for reads, the sums for writes, the machine has the unit, and a [`Session`] of it is open.
    unsafe fn run(self, unit: Bf16Unit, isa: Isa) {
        // SAFETY: the caller's contract.
        unsafe {
            match unit.unit() {
                Unit::Emulated => isa.run(emulated::Sums(self)),
                #[cfg(target_arch = "x86_64")]
                Unit::Avx512 => avx512::sums(self),
                #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
                Unit::Amx => amx::sums(self),
            }
        }
    }
}

/// Guard of a thread's use of a unit. For AMX, the tiles are configured while it exists, and released when it is
/// dropped.
pub(crate) struct Session {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    tiles: bool,
}

impl Session {
    pub(crate) fn open(tiles: Option<&Tiles>) -> Session {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        {
            let tiles = tiles.is_some_and(|tiles| tiles.unit.unit() == Unit::Amx);
            if tiles {
                // SAFETY: the token exists, so the machine has AMX and the process may use it.
                unsafe { amx::open() };
            }
            Session { tiles }
        }
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        {
            let _ = tiles;
            Session {}
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
impl Drop for Session {
    fn drop(&mut self) {
        if self.tiles {
            // SAFETY: as above.
            unsafe { amx::close() };
        }
    }
}

/// Test for NaN among sums.
struct ContainsNan {
    at: *const f32,
    row: isize,
    size: (usize, usize),
}

impl Work for ContainsNan {
    type Out = bool;
    #[inline(always)]
    fn work<L: Level>(self) -> bool {
        let mut faulty = [0u32; LINES];
        for i in 0..self.size.0 {
            for j in (0..self.size.1).step_by(LINES) {
                // SAFETY: the block has whole tiles.
                let line = unsafe {
                    let line = self.at.wrapping_offset(i as isize * self.row).wrapping_add(j);
                    line.cast::<[f32; LINES]>().read_unaligned()
                };
                for (faulty, sum) in faulty.iter_mut().zip(line) {
                    *faulty |= u32::from(sum.is_nan());
                }
            }
        }
        faulty.iter().any(|&faulty| faulty != 0)
    }
}

/// Replacement of sums that are NaN by the sums of `from`.
struct ReplaceNan {
    at: *mut f32,
    row: isize,
    /// Lines have [`SIDE`] elements.
    from: *const f32,
    size: (usize, usize),
}

impl Work for ReplaceNan {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        for i in 0..self.size.0 {
            for j in 0..self.size.1 {
                // SAFETY: both blocks have whole tiles.
                unsafe {
                    let at = self.at.wrapping_offset(i as isize * self.row).wrapping_add(j);
                    if at.read_unaligned().is_nan() {
                        at.write_unaligned(self.from.add(i * SIDE + j).read());
                    }
                }
            }
        }
    }
}
