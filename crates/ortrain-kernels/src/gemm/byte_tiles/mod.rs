//! Products of bytes without their zero points, summed in `i32`.
//!
//! `Σ (a − p)(b − q) = Σ ab − p Σ (b − q) − q Σ a`, for the zero points `p` of a row of A and `q` of a column of B. All
//! sums wrap. Panels hold A as unsigned and B as signed bytes, because the machine multiplies such pairs: bytes of the
//! other kind are shifted by 128 together with their zero points.
//!
//! A panel has 16 lines. It consists of tiles of 1 KiB, one for each 64 depths, and of a [`PanelFooter`]. A tile of A has 16
//! lines of 64 depths. A tile of B has 16 quads of depths of 16 lines. Both therefore have rows of 64 bytes, in which 32
//! bits contain four depths. Lines and depths that do not exist are zero.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod pack;
mod portable;

use std::mem::MaybeUninit;

use ortrain_expr::DType;

use super::corner_copy::CornerCopy;
use super::tiles::Side;
use crate::isa::Isa;
use crate::isa::bytes::ByteUnit;
pub(crate) use pack::{ZeroPoints, interleave, sum_of_quad};

/// Lines of a panel.
pub(crate) const LINES: usize = 16;
/// Depths of a tile.
pub(crate) const DEPTHS: usize = 64;
/// Lines of both operands that are multiplied at a time: two panels by two.
pub(crate) const SIDE: usize = 2 * LINES;
/// Panels that [`ByteProducts::pack_wide_rows`] packs together.
const WIDE_PANELS: usize = 4;
/// Bytes of a tile, and of each of its rows.
const TILE: usize = 1024;
const ROW: usize = 64;
/// Quads of depths of a row of a tile of A, and rows of a tile of B.
const QUADS: usize = ROW / 4;

/// Numbers behind the tiles of a panel, for each line.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PanelFooter {
    /// Zero point of the shifted bytes.
    pub(crate) zero_points: [i32; LINES],
    /// Sum of the shifted bytes; for B, without the zero point of each.
    pub(crate) sums: [i32; LINES],
}

impl PanelFooter {
    /// Writes the footer of a panel.
    ///
    /// # Safety
    /// `panel` has the capacity of a panel of this depth.
    pub(crate) unsafe fn write(self, panel: *mut u8, depth: usize) {
        // SAFETY: the footer lies behind the tiles.
        unsafe { panel.add(depth.div_ceil(DEPTHS) * TILE).cast::<PanelFooter>().write_unaligned(self) };
    }
}

/// Returns the bytes of a packed panel. Each tile reserves the bytes of a footer, so that the panels of a sum in several
/// chunks need the bytes of a panel of the whole depth.
pub(crate) const fn panel_bytes(depth: usize) -> usize {
    depth.div_ceil(DEPTHS) * (TILE + size_of::<PanelFooter>())
}

/// Method of products of bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByteProducts {
    unit: ByteUnit,
    /// True if the panels of A have signed bytes and the panels of B unsigned bytes.
    a_is_signed: bool,
}

impl ByteProducts {
    /// Creates the method for operands of two types, `U8` or `I8`. Only one operand is shifted, if any.
    pub(crate) fn new(isa: Isa, dtypes: [DType; 2]) -> ByteProducts {
        ByteProducts { unit: ByteUnit::detect(isa), a_is_signed: dtypes == [DType::I8, DType::U8] }
    }

    /// Returns the method for operands of other types.
    pub(crate) fn for_types(self, dtypes: [DType; 2]) -> ByteProducts {
        ByteProducts { a_is_signed: dtypes == [DType::I8, DType::U8], ..self }
    }

    /// Returns true if the panels of an operand have signed bytes.
    pub(crate) fn has_signed_panels(&self, side: Side) -> bool {
        (side == Side::A) == self.a_is_signed
    }

    /// Returns the bits that turn bytes of a type into bytes of a panel, and the shift of their zero points.
    pub(crate) fn shift(&self, side: Side, dtype: DType) -> (u8, i32) {
        match (self.has_signed_panels(side), dtype == DType::I8) {
            (true, false) => (0x80, -128),
            (false, true) => (0x80, 128),
            _ => (0, 0),
        }
    }

    /// Returns the number of columns that [`ByteProducts::pack_wide_rows`] packs; zero if the machine has no method.
    pub(crate) fn wide_columns(&self) -> usize {
        match self.unit {
            #[cfg(target_arch = "x86_64")]
            ByteUnit::Avx512Vnni => WIDE_PANELS * LINES,
            _ => 0,
        }
    }

    /// Packs rows of adjacent bytes into panels of B, which are `panel` bytes apart, and returns the sum of each column.
    /// `row` returns the address of the row of a depth.
    ///
    /// # Safety
    /// Each row has [`ByteProducts::wide_columns`] bytes, which are valid for reads. `to` has the capacity of all depths.
    ///
    /// # Panics
    /// Panics if the machine has no method.
    #[inline(always)]
    pub(crate) unsafe fn pack_wide_rows(
        &self,
        depth: usize,
        dtype: DType,
        row: impl Fn(usize) -> *const u8,
        (to, panel): (*mut u8, usize),
    ) -> [[i32; LINES]; WIDE_PANELS] {
        #[cfg(target_arch = "x86_64")]
        if self.unit == ByteUnit::Avx512Vnni {
            let (flip, _) = self.shift(Side::B, dtype);
            let has_signed_panels = self.has_signed_panels(Side::B);
            let rows = avx512::WideRows { depth, flip, has_signed_panels, to, panel };
            // SAFETY: the caller's contract; the unit exists, and its level has the other features.
            return unsafe { avx512::pack_wide_rows(&rows, row) };
        }
        let _ = (depth, dtype, row, to, panel);
        unreachable!("the machine packs no wide rows")
    }

    /// Computes `C = A·B`, or `C += A·B`, of at most [`SIDE`] rows and columns. Panels are adjacent.
    ///
    /// # Safety
    /// The panels are valid for reads and packed for this depth, C is valid for writes, and the machine has the unit.
    pub(crate) unsafe fn multiply(
        &self,
        isa: Isa,
        (rows, cols): (usize, usize),
        depth: usize,
        (a, b): (*const u8, *const u8),
        c: *mut i32,
        c_row: isize,
        add: bool,
    ) {
        // Whole panels can be stored to C directly.
        let is_straight = !add && rows.is_multiple_of(LINES) && cols.is_multiple_of(LINES);
        let mut corner = Corner([const { MaybeUninit::uninit() }; SIDE * SIDE]);
        let corner = corner.0.as_mut_ptr().cast::<i32>();
        let (to, to_row) = if is_straight { (c, c_row) } else { (corner, SIDE as isize) };
        let (quads, panel) = (depth.div_ceil(4), panel_bytes(depth));
        // SAFETY: the caller's contract; all existing rows of the block are written, whole panels wide.
        unsafe {
            Job { quads, a, b, panel, rows, cols, to, to_row }.run(*self, isa);
            if !is_straight {
                let size = (rows, cols);
                isa.run(CornerCopy { from: corner, from_row: SIDE, to: c, to_row: c_row, size, add });
            }
        }
    }
}

/// Sums of two panels by two.
#[repr(align(64))]
struct Corner([MaybeUninit<i32>; SIDE * SIDE]);

/// Products of at most two panels of A and two panels of B.
#[derive(Clone, Copy)]
struct Job {
    /// Number of quads of depths.
    quads: usize,
    a: *const u8,
    b: *const u8,
    /// Bytes from panel to panel.
    panel: usize,
    /// Numbers of existing rows and columns.
    rows: usize,
    cols: usize,
    /// Destination. All existing rows are written, whole panels wide; further rows, up to a whole panel, may be written.
    to: *mut i32,
    to_row: isize,
}

impl Job {
    /// Returns the number of tiles along the depth.
    fn chunks(&self) -> usize {
        self.quads.div_ceil(QUADS)
    }

    /// Returns the number of quads of a tile.
    fn quads_of(&self, chunk: usize) -> usize {
        QUADS.min(self.quads - chunk * QUADS)
    }

    /// Returns the number of panels along the columns.
    fn across(&self) -> usize {
        self.cols.div_ceil(LINES)
    }

    /// Returns the address of a row of A inside its panel, and the footer of the panel.
    fn row_of_a(&self, row: usize) -> (*const u8, *const PanelFooter) {
        let panel = self.a.wrapping_add(row / LINES * self.panel);
        (panel.wrapping_add(row % LINES * ROW), panel.wrapping_add(self.chunks() * TILE).cast())
    }

    /// Returns the address of a panel of B, and its footer.
    fn panel_of_b(&self, index: usize) -> (*const u8, *const PanelFooter) {
        let panel = self.b.wrapping_add(index * self.panel);
        (panel, panel.wrapping_add(self.chunks() * TILE).cast())
    }

    /// # Safety
    /// The panels are valid for reads, the destination for writes, and the machine has the unit.
    unsafe fn run(self, products: ByteProducts, isa: Isa) {
        let ByteProducts { unit, a_is_signed } = products;
        // SAFETY: the caller's contract.
        unsafe {
            match unit {
                ByteUnit::Portable => isa.run(portable::Sums { job: self, a_is_signed }),
                #[cfg(target_arch = "x86_64")]
                ByteUnit::Avx2 => avx2::sums(self, a_is_signed),
                #[cfg(target_arch = "x86_64")]
                ByteUnit::AvxVnni => avx2::sums_vnni(self, a_is_signed),
                #[cfg(target_arch = "x86_64")]
                ByteUnit::Avx512Vnni => avx512::sums(self, a_is_signed),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::pack::Block;

    /// Matrix of random bytes: lines of `depth` elements, with their zero points.
    struct Lines {
        bytes: Vec<u8>,
        zero_points: Vec<u8>,
        is_signed: bool,
        count: usize,
        depth: usize,
    }

    impl Lines {
        fn random(state: &mut u32, count: usize, depth: usize, is_signed: bool) -> Lines {
            let mut random = || {
                *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // The extremes are the sums that overflow first.
                match *state >> 30 {
                    0 => [0, 0x7f, 0x80, 0xff][(*state >> 20 & 3) as usize],
                    _ => (*state >> 12) as u8,
                }
            };
            let bytes = (0..count * depth).map(|_| random()).collect();
            let zero_points = (0..count).map(|_| random()).collect();
            Lines { bytes, zero_points, is_signed, count, depth }
        }

        fn dtype(&self) -> DType {
            if self.is_signed { DType::I8 } else { DType::U8 }
        }

        fn number(&self, byte: u8) -> i32 {
            if self.is_signed { i32::from(byte.cast_signed()) } else { i32::from(byte) }
        }

        /// Returns an element without its zero point.
        fn distance(&self, line: usize, depth: usize) -> i32 {
            self.number(self.bytes[line * self.depth + depth]) - self.number(self.zero_points[line])
        }

        /// Returns the packed panels. If `is_transposed`, the elements of a depth are adjacent.
        fn packed(&self, (products, isa): (ByteProducts, Isa), side: Side, is_transposed: bool) -> Vec<u8> {
            let Lines { count, depth, .. } = *self;
            let mut transposed = vec![0; count * depth];
            for (at, &byte) in self.bytes.iter().enumerate() {
                transposed[at % depth * count + at / depth] = byte;
            }
            let (bytes, line_step, depth_step) =
                if is_transposed { (&transposed, 1, count) } else { (&self.bytes, depth, 1) };
            let block = Block {
                at: bytes.as_ptr(),
                line_step: line_step as isize,
                depth_step: depth_step as isize,
                lines: count,
                depth,
            };
            let zero_points = ZeroPoints { at: self.zero_points.as_ptr(), step: 1 };
            let dtype = self.dtype();
            let mut panels = vec![0xa5; count.div_ceil(LINES) * panel_bytes(depth)];
            // SAFETY: the block has these elements, and the panels have the capacity.
            unsafe { products.pack(isa, dtype, (block, zero_points), side, panels.as_mut_ptr()) };
            panels
        }
    }

    /// Every unit computes the sums, for all kinds of bytes and layouts.
    #[test]
    fn units_compute_exact_sums() {
        let mut state = 1;
        let sizes =
            [(1, 1, 1), (1, 32, 64), (2, 17, 65), (7, 16, 200), (16, 32, 63), (32, 32, 128), (23, 31, 300)];
        let signs = [(false, true), (true, true), (false, false), (true, false)];
        for ((rows, cols, depth), (sign_a, sign_b)) in
            sizes.into_iter().flat_map(|size| signs.map(|sign| (size, sign)))
        {
            let a = Lines::random(&mut state, rows, depth, sign_a);
            let b = Lines::random(&mut state, cols, depth, sign_b);
            let machines = Isa::available().into_iter().flat_map(|isa| {
                let units = ByteUnit::available(isa).into_iter();
                units.flat_map(move |unit| [(isa, unit, false), (isa, unit, true)])
            });
            for (isa, unit, transposed) in machines {
                let products = ByteProducts { unit, ..ByteProducts::new(isa, [a.dtype(), b.dtype()]) };
                let packed = |lines: &Lines, side| lines.packed((products, isa), side, transposed);
                let packed = (packed(&a, Side::A), packed(&b, Side::B));
                for add in [false, true] {
                    let mut c = vec![3; rows * cols];
                    let factors = (packed.0.as_ptr(), packed.1.as_ptr());
                    let (to, step) = (c.as_mut_ptr(), cols as isize);
                    // SAFETY: the panels are packed for this depth, and C has these elements.
                    unsafe { products.multiply(isa, (rows, cols), depth, factors, to, step, add) };
                    for (at, &got) in c.iter().enumerate() {
                        let term = |p: usize| a.distance(at / cols, p) * b.distance(at % cols, p);
                        let sum = (0..depth).map(term).sum::<i32>() + if add { 3 } else { 0 };
                        assert_eq!(got, sum, "{rows}x{cols}x{depth}, element {at}, {unit:?}, {isa}");
                    }
                }
            }
        }
    }
}
