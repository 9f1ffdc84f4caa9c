//! Inner products of bfloat16: f32 operands as sums of one, two or three bfloat16 numbers, multiplied term by term.
//!
//! An f32 number is the sum of three bfloat16 numbers, but for the smallest (`split`). Of the products of the terms of
//! two numbers, those are made that matter: `a₁b₁` alone (bf16), with `a₁b₂ + a₂b₁` (bf16x3), with
//! `a₂b₂ + a₁b₃ + a₃b₁` (bf16x6). All are summed in f32.
//!
//! Packed operands are tiles of 1 KiB, those of AMX: one of A has 16 lines of 32 depths, one of B 16 pairs of depths of 16
//! lines, so that both have lines of 64 bytes, and a number of 32 bits holds a pair of depths. Panels have 16 lines: for
//! each 32 depths a tile for each term. What is beyond the last line or depth is zero in both operands.
//!
//! Infinity is no sum of finite terms: its further terms are zero, and zero times infinity is no number. So sums that
//! come out as NaN are made again, of the first terms alone.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod emulated;
mod split;

use std::mem::MaybeUninit;

use ortrain_expr::{DType, Precision};

use super::run::Spill;
use crate::isa::bf16::{Bf16Unit, Unit};
use crate::isa::{Isa, Level, Work};

pub(crate) use split::{Side, pack, settle};

/// Lines of a tile, and its depths.
pub(crate) const LINES: usize = 16;
pub(crate) const DEPTHS: usize = 32;
/// Bytes of a tile, and of each of its lines.
const TILE: usize = 1024;
const LINE: usize = 64;
/// Lines of both operands that are multiplied at a time: two tiles by two.
pub(crate) const SIDE: usize = 2 * LINES;
/// Products of terms, at most.
const PRODUCTS: usize = 6;

/// How products of bfloat16 are made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiles {
    unit: Bf16Unit,
    /// Terms of the elements of A and B.
    terms: [usize; 2],
    /// Terms that are multiplied, the smallest products first.
    products: [[usize; 2]; PRODUCTS],
    count: usize,
}

impl Tiles {
    /// Products of elements of two types.
    pub(crate) fn new(precision: Precision, unit: Bf16Unit, dtypes: [DType; 2]) -> Tiles {
        let most = precision.terms();
        // Of narrow floats fewer terms are everything: 8 and 11 bits of the 8 that each term has.
        let terms = dtypes.map(|dtype| match dtype {
            DType::BF16 => 1,
            DType::F16 => most.min(2),
            _ => most,
        });
        let mut products = [[0; 2]; PRODUCTS];
        let mut count = 0;
        for &(a, b) in precision.products().iter().rev() {
            if a < terms[0] && b < terms[1] {
                products[count] = [a, b];
                count += 1;
            }
        }
        Tiles { unit, terms, products, count }
    }

    /// Terms of A's elements, or of B's.
    pub(crate) fn terms(&self, side: Side) -> usize {
        match side {
            Side::A => self.terms[0],
            Side::B => self.terms[1],
        }
    }

    /// Bytes of a packed panel of either operand.
    fn panel(&self, side: Side, depth: usize) -> usize {
        depth.div_ceil(DEPTHS) * self.terms(side) * TILE
    }

    /// `C = A·B`, or `C += A·B`: `rows` rows and `cols` columns, at most [`SIDE`] of each, of panels that follow each
    /// other. Sums are made from zero, and then added.
    ///
    /// # Safety
    /// The panels are there, packed for this depth, and C may be written; a [`Session`] of this unit is open.
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
        let mut offsets = [[0; 2]; PRODUCTS];
        for (offsets, terms) in offsets.iter_mut().zip(self.products) {
            *offsets = terms.map(|term| term * TILE);
        }
        // Whole tiles may go straight to C.
        let straight = !add && rows.is_multiple_of(LINES) && cols.is_multiple_of(LINES);
        let mut room = Room([const { MaybeUninit::uninit() }; SIDE * SIDE]);
        let block = room.0.as_mut_ptr().cast::<f32>();
        let (to, to_row) = if straight { (c, c_row) } else { (block, SIDE as isize) };
        let job = Job {
            chunks: depth.div_ceil(DEPTHS),
            a,
            b,
            panels: [self.panel(Side::A, depth), self.panel(Side::B, depth)],
            steps: terms.map(|terms| terms * TILE),
            rows,
            cols,
            products: &offsets[..count],
            to,
            to_row,
        };
        // SAFETY: the caller's contract; of the block all rows that are there are written, whole tiles wide.
        unsafe {
            job.run(self.unit, isa);
            let size = (rows, cols.next_multiple_of(LINES));
            if count > 1 && isa.run(Faulty { at: to, row: to_row, size }) {
                let mut plain = Room([const { MaybeUninit::uninit() }; SIDE * SIDE]);
                let first = plain.0.as_mut_ptr().cast::<f32>();
                let again = Job { products: &[[0; 2]], to: first, to_row: SIDE as isize, ..job };
                again.run(self.unit, isa);
                isa.run(Mend { at: to, row: to_row, from: first, size });
            }
            if !straight {
                let size = (rows, cols);
                isa.run(Spill { from: block, from_row: SIDE, to: c, to_row: c_row, size, add });
            }
        }
    }
}

/// Sums of two tiles by two.
#[repr(align(64))]
struct Room([MaybeUninit<f32>; SIDE * SIDE]);

/// Sums of some products of terms over all depths of two panels by two, or fewer.
#[derive(Clone, Copy)]
struct Job<'a> {
    /// Tiles along the depth.
    chunks: usize,
    a: *const u8,
    b: *const u8,
    /// Bytes from panel to panel of A and of B, and from chunk to chunk.
    panels: [usize; 2],
    steps: [usize; 2],
    /// Rows and columns that are there.
    rows: usize,
    cols: usize,
    /// Where in a chunk the terms lie that are multiplied, in bytes.
    products: &'a [[usize; 2]],
    /// All rows that are there are written, whole tiles wide; rows beyond, up to a whole tile, may be.
    to: *mut f32,
    to_row: isize,
}

impl Job<'_> {
    /// # Safety
    /// The panels are there, the sums may be written, the machine has the unit, and a [`Session`] of it is open.
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

    /// Tiles along the rows and along the columns.
    fn tiles(&self) -> (usize, usize) {
        (self.rows.div_ceil(LINES), self.cols.div_ceil(LINES))
    }
}

/// What a thread does with a unit between opening and dropping this. AMX has its tiles configured meanwhile, and nothing
/// of it is left behind.
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

/// Whether any of some sums is NaN.
struct Faulty {
    at: *const f32,
    row: isize,
    size: (usize, usize),
}

impl Work for Faulty {
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

/// Replaces sums that are NaN.
struct Mend {
    at: *mut f32,
    row: isize,
    /// Lines of [`SIDE`].
    from: *const f32,
    size: (usize, usize),
}

impl Work for Mend {
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
