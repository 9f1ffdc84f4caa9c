//! Products of bytes by AVX512-VNNI: servers since 2019 (Intel) and processors since 2022 (AMD).

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::job::{DEPTHS, Job, LINES, PanelFooter, QUADS, ROW, TILE, WIDE_PANELS};
use super::slice::{COLUMNS, ColumnSums, MAX_ROWS_IN_REGISTERS, MAX_SLICE_DEPTHS, SliceInPlace};
use crate::isa::prefetch;

/// Maximum number of rows of sums in registers.
const ROWS: usize = 8;

/// Rows of adjacent bytes that are packed into four panels.
pub(super) struct WideRows {
    pub(super) depth: usize,
    /// Bits that turn elements into bytes of a panel.
    pub(super) flip: u8,
    pub(super) has_signed_panels: bool,
    /// First panel, and the bytes from panel to panel.
    pub(super) to: *mut u8,
    pub(super) panel: usize,
}

/// Packs rows into panels of B, and returns the sums of the columns. `row` returns the address of the row of a depth.
///
/// # Safety
/// Each row has 64 bytes that are valid for reads. The panels have the capacity of all depths. The machine
/// has AVX-512 F, BW and VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) unsafe fn pack_wide_rows(
    rows: &WideRows,
    row: impl Fn(usize) -> *const u8,
) -> [[i32; LINES]; WIDE_PANELS] {
    let WideRows { depth, flip, has_signed_panels, to, panel } = *rows;
    let (flip, ones) = (_mm512_set1_epi8(flip.cast_signed()), _mm512_set1_epi8(1));
    let mut sums = [_mm512_setzero_si512(); WIDE_PANELS];
    for (q, p) in (0..depth).step_by(4).enumerate() {
        let mut bytes = [_mm512_setzero_si512(); 4];
        for (i, bytes) in bytes.iter_mut().enumerate().take(depth - p) {
            // SAFETY: the caller's contract.
            *bytes = unsafe { _mm512_xor_si512(_mm512_loadu_si512(row(p + i).cast()), flip) };
        }
        for (j, quads) in interleave_rows(bytes).into_iter().enumerate() {
            let (unsigned, signed) = if has_signed_panels { (ones, quads) } else { (quads, ones) };
            sums[j] = _mm512_dpbusd_epi32(sums[j], unsigned, signed);
            // SAFETY: the caller's contract.
            unsafe { _mm512_storeu_si512(to.add(j * panel + q * ROW).cast(), quads) };
        }
    }
    // SAFETY: a register has 16 numbers of 32 bits.
    sums.map(|sum| unsafe { std::mem::transmute::<__m512i, [i32; LINES]>(sum) })
}

/// Lines of a panel of A with adjacent depths.
pub(super) struct AdjacentLines {
    /// First line, and the bytes from line to line.
    pub(super) at: *const u8,
    pub(super) line_step: isize,
    /// Number of existing lines, and their depth.
    pub(super) lines: usize,
    pub(super) depth: usize,
    /// Bits that turn elements into bytes of a panel.
    pub(super) flip: u8,
    pub(super) has_signed_panels: bool,
    pub(super) to: *mut u8,
}

/// Packs a panel of A, and returns the sums of the lines.
///
/// # Safety
/// The lines are valid for reads. The panel has the capacity of all depths. The machine has AVX-512 F, BW and VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) unsafe fn pack_adjacent_lines(block: &AdjacentLines) -> [i32; LINES] {
    let AdjacentLines { at, line_step, lines, depth, flip, has_signed_panels, to } = *block;
    let (flip, ones) = (_mm512_set1_epi8(flip.cast_signed()), _mm512_set1_epi8(1));
    std::array::from_fn(|line| {
        let from = at.wrapping_offset(line as isize * line_step);
        let to = to.wrapping_add(line * ROW);
        let existing = if line < lines { depth } else { 0 };
        let mut sums = _mm512_setzero_si512();
        for (chunk, p) in (0..depth).step_by(ROW).enumerate() {
            let count = existing.saturating_sub(p).min(ROW);
            let mask = if count == 0 { 0 } else { u64::MAX >> (ROW - count) };
            // SAFETY: the caller's contract; the mask has the existing depths only.
            unsafe {
                let bytes = _mm512_maskz_loadu_epi8(mask, from.wrapping_add(p).cast());
                let bytes = _mm512_maskz_mov_epi8(mask, _mm512_xor_si512(bytes, flip));
                let (unsigned, signed) = if has_signed_panels { (ones, bytes) } else { (bytes, ones) };
                sums = _mm512_dpbusd_epi32(sums, unsigned, signed);
                _mm512_storeu_si512(to.wrapping_add(chunk * TILE).cast(), bytes);
            }
        }
        _mm512_reduce_add_epi32(sums)
    })
}

/// Returns four rows as quads, 16 columns in each register.
#[target_feature(enable = "avx512f,avx512bw")]
fn interleave_rows(rows: [__m512i; 4]) -> [__m512i; 4] {
    // Instructions that interleave work on each quarter of a register. So every quarter first gets four columns of each
    // group of 16 columns.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let [a, b, c, d] = rows.map(|row| _mm512_permutexvar_epi32(order, row));
    let (ab, cd) = (_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d));
    let (ab_high, cd_high) = (_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d));
    [
        _mm512_unpacklo_epi16(ab, cd),
        _mm512_unpackhi_epi16(ab, cd),
        _mm512_unpacklo_epi16(ab_high, cd_high),
        _mm512_unpackhi_epi16(ab_high, cd_high),
    ]
}

/// Registers of 16 numbers for [`COLUMNS`] columns.
type Columns = [__m512i; COLUMNS / LINES];

fn load_columns(from: &[i32; COLUMNS]) -> Columns {
    // SAFETY: the types have the same bits.
    unsafe { std::mem::transmute(*from) }
}

fn store_columns(from: Columns, to: &mut [i32; COLUMNS]) {
    // SAFETY: the types have the same bits.
    *to = unsafe { std::mem::transmute::<Columns, [i32; COLUMNS]>(from) };
}

/// Adds the products of some depths of A and of B in place.
///
/// # Safety
/// The slice is valid for reads. The machine has AVX-512 F, BW and VNNI.
pub(super) unsafe fn add_slice_in_place(slice: &SliceInPlace, sums: &mut ColumnSums) {
    // SAFETY: the caller's contract.
    unsafe {
        match (slice.rows, slice.a_is_signed) {
            (1, false) => add_rows_in_registers::<false, 1>(slice, sums),
            (1, true) => add_rows_in_registers::<true, 1>(slice, sums),
            (2..=MAX_ROWS_IN_REGISTERS, false) => {
                add_rows_in_registers::<false, MAX_ROWS_IN_REGISTERS>(slice, sums);
            }
            (2..=MAX_ROWS_IN_REGISTERS, true) => {
                add_rows_in_registers::<true, MAX_ROWS_IN_REGISTERS>(slice, sums);
            }
            (_, false) => add_rows::<false>(slice, sums),
            (_, true) => add_rows::<true>(slice, sums),
        }
    }
}

impl SliceInPlace {
    /// Returns four depths of B as quads.
    ///
    /// # Safety
    /// The slice is valid for reads. The machine has AVX-512 F and BW.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn quads(&self, p: usize, flip: __m512i) -> Columns {
        let mut rows = [_mm512_setzero_si512(); 4];
        for (i, row) in rows.iter_mut().enumerate().take(self.depths - p) {
            let from = self.b.wrapping_offset((p + i) as isize * self.b_step);
            prefetch(from.wrapping_offset(DEPTHS as isize * self.b_step));
            // SAFETY: the caller's contract.
            *row = unsafe { _mm512_xor_si512(_mm512_loadu_si512(from.cast()), flip) };
        }
        interleave_rows(rows)
    }
}

/// Adds to a sum the products of four depths of A and of B.
#[target_feature(enable = "avx512f,avx512vnni")]
fn dot<const A_IS_SIGNED: bool>(sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
    let (unsigned, signed) = if A_IS_SIGNED { (b, a) } else { (a, b) };
    _mm512_dpbusd_epi32(sum, unsigned, signed)
}

/// Adds the products of `R` rows, with all sums in registers. Rows of A that do not exist are zero.
///
/// # Safety
/// As [`add_slice_in_place`].
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn add_rows_in_registers<const A_IS_SIGNED: bool, const R: usize>(
    slice: &SliceInPlace,
    sums: &mut ColumnSums,
) {
    let (flip, ones) = (_mm512_set1_epi8(slice.flip.cast_signed()), _mm512_set1_epi8(1));
    let mut products: [Columns; R] = std::array::from_fn(|i| load_columns(&sums.products[i]));
    let mut columns = load_columns(&sums.columns);
    for p in (0..slice.depths).step_by(4) {
        // SAFETY: the caller's contract.
        let quads = unsafe { slice.quads(p, flip) };
        for (sum, &quad) in columns.iter_mut().zip(&quads) {
            *sum = dot::<A_IS_SIGNED>(*sum, ones, quad);
        }
        for (i, products) in products.iter_mut().enumerate() {
            // SAFETY: a tile has 16 rows of 64 depths.
            let x = unsafe { _mm512_set1_epi32(slice.a.add(i * ROW + p).cast::<i32>().read_unaligned()) };
            for (sum, &quad) in products.iter_mut().zip(&quads) {
                *sum = dot::<A_IS_SIGNED>(*sum, x, quad);
            }
        }
    }
    for (products, to) in products.into_iter().zip(&mut sums.products) {
        store_columns(products, to);
    }
    store_columns(columns, &mut sums.columns);
}

/// Quads of a slice, in the first-level cache.
#[repr(align(64))]
struct SliceQuads([MaybeUninit<Columns>; MAX_SLICE_DEPTHS / 4]);

/// Adds the products of all rows, some rows at a time.
///
/// # Safety
/// As [`add_slice_in_place`].
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn add_rows<const A_IS_SIGNED: bool>(slice: &SliceInPlace, sums: &mut ColumnSums) {
    let (flip, ones) = (_mm512_set1_epi8(slice.flip.cast_signed()), _mm512_set1_epi8(1));
    let mut quads = SliceQuads([const { MaybeUninit::uninit() }; MAX_SLICE_DEPTHS / 4]);
    let mut columns = load_columns(&sums.columns);
    for (p, to) in (0..slice.depths).step_by(4).zip(&mut quads.0) {
        // SAFETY: the caller's contract.
        let quads = unsafe { slice.quads(p, flip) };
        for (sum, &quad) in columns.iter_mut().zip(&quads) {
            *sum = dot::<A_IS_SIGNED>(*sum, ones, quad);
        }
        to.write(quads);
    }
    store_columns(columns, &mut sums.columns);
    let quads = quads.0.as_ptr().cast::<Columns>();
    for row in (0..slice.rows).step_by(ROWS) {
        let panel = slice.a.wrapping_add(row / LINES * slice.panel + row % LINES * ROW);
        for first in (0..COLUMNS).step_by(2 * LINES) {
            // SAFETY: the quads of all depths are initialised, and the panel has these rows and depths.
            unsafe {
                let mut products: [[__m512i; 2]; ROWS] = std::array::from_fn(|i| {
                    let from = sums.products[row + i].as_ptr().add(first);
                    from.cast::<[__m512i; 2]>().read_unaligned()
                });
                for q in 0..slice.depths.div_ceil(4) {
                    let x = panel.add(q / QUADS * TILE).cast::<i32>().add(q % QUADS);
                    let line =
                        quads.add(q).cast::<__m512i>().add(first / LINES).cast::<[__m512i; 2]>().read();
                    for (i, products) in products.iter_mut().enumerate() {
                        let x = _mm512_set1_epi32(x.add(i * QUADS).read_unaligned());
                        for (sum, quad) in products.iter_mut().zip(line) {
                            *sum = dot::<A_IS_SIGNED>(*sum, x, quad);
                        }
                    }
                }
                for (i, products) in products.into_iter().enumerate() {
                    let to = sums.products[row + i].as_mut_ptr().add(first);
                    to.cast::<[__m512i; 2]>().write_unaligned(products);
                }
            }
        }
    }
}

/// # Safety
/// The contract of [`Job::run`], and the machine must have AVX-512 F and VNNI.
pub(super) unsafe fn sums(job: Job, a_is_signed: bool) {
    // SAFETY: the caller's contract.
    unsafe { if a_is_signed { all_rows::<true>(&job) } else { all_rows::<false>(&job) } }
}

/// # Safety
/// As [`sums`].
unsafe fn all_rows<const A_IS_SIGNED: bool>(job: &Job) {
    for row in (0..job.rows).step_by(ROWS) {
        // SAFETY: the caller's contract.
        unsafe {
            match (job.across(), job.rows - row) {
                (2, 1) => rows::<A_IS_SIGNED, 1, 2>(job, row),
                (2, 2..=4) => rows::<A_IS_SIGNED, 4, 2>(job, row),
                (2, _) => rows::<A_IS_SIGNED, ROWS, 2>(job, row),
                (_, 1) => rows::<A_IS_SIGNED, 1, 1>(job, row),
                (_, 2..=4) => rows::<A_IS_SIGNED, 4, 1>(job, row),
                _ => rows::<A_IS_SIGNED, ROWS, 1>(job, row),
            }
        }
    }
}

/// Computes `R` rows of `V` panels.
///
/// # Safety
/// As [`sums`].
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn rows<const A_IS_SIGNED: bool, const R: usize, const V: usize>(job: &Job, row: usize) {
    let Job { to, to_row, .. } = *job;
    let (a, footer_of_a) = job.row_of_a(row);
    let panels: [(*const u8, *const PanelFooter); V] = std::array::from_fn(|v| job.panel_of_b(v));
    let mut sums = [[_mm512_setzero_si512(); V]; R];
    for chunk in 0..job.chunks() {
        let a = a.wrapping_add(chunk * TILE).cast::<i32>();
        for q in 0..job.quads_of(chunk) {
            // SAFETY: each row of a tile has `QUADS` quads of depths.
            unsafe {
                let mut line = [_mm512_setzero_si512(); V];
                for (line, (b, _)) in line.iter_mut().zip(panels) {
                    *line = _mm512_loadu_si512(b.wrapping_add(chunk * TILE + q * ROW).cast());
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let x = _mm512_set1_epi32(a.add(i * QUADS + q).read_unaligned());
                    for (sum, &y) in sums.iter_mut().zip(&line) {
                        let (unsigned, signed) = if A_IS_SIGNED { (y, x) } else { (x, y) };
                        *sum = _mm512_dpbusd_epi32(*sum, unsigned, signed);
                    }
                }
            }
        }
    }
    // SAFETY: panels end with a footer.
    let of_a = unsafe { footer_of_a.read_unaligned() };
    for (v, (_, footer)) in panels.into_iter().enumerate() {
        // SAFETY: as above; whole panels may be written.
        unsafe {
            let of_b = &raw const (*footer).sums;
            let column_sums = _mm512_loadu_si512(of_b.cast());
            let of_b = &raw const (*footer).zero_points;
            let column_zeros = _mm512_loadu_si512(of_b.cast());
            for (i, sums) in sums.iter().enumerate() {
                let line = (row + i) % LINES;
                let zero = _mm512_set1_epi32(of_a.zero_points[line]);
                let of_row = _mm512_mullo_epi32(zero, column_sums);
                let of_column = _mm512_mullo_epi32(_mm512_set1_epi32(of_a.sums[line]), column_zeros);
                let sum = _mm512_sub_epi32(sums[v], _mm512_add_epi32(of_row, of_column));
                let to = to.wrapping_offset((row + i) as isize * to_row).wrapping_add(v * LINES);
                _mm512_storeu_si512(to.cast(), sum);
            }
        }
    }
}
