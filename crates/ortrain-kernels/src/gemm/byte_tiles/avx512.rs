//! Products of bytes by AVX512-VNNI: servers since 2019 (Intel) and processors since 2022 (AMD).

use std::arch::x86_64::*;

use super::job::{Job, LINES, PanelFooter, QUADS, ROW, TILE, WIDE_PANELS};

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

/// Returns four rows as quads, 16 columns in each register.
#[target_feature(enable = "avx512f,avx512bw")]
fn interleave_rows([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let (ab, cd) = (_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d));
    let (ab_high, cd_high) = (_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d));
    // Each register has four columns of every group of 16.
    let first = _mm512_unpacklo_epi16(ab, cd);
    let second = _mm512_unpackhi_epi16(ab, cd);
    let third = _mm512_unpacklo_epi16(ab_high, cd_high);
    let fourth = _mm512_unpackhi_epi16(ab_high, cd_high);
    let low = _mm512_shuffle_i32x4::<0b01_00_01_00>(first, second);
    let low_high = _mm512_shuffle_i32x4::<0b01_00_01_00>(third, fourth);
    let high = _mm512_shuffle_i32x4::<0b11_10_11_10>(first, second);
    let high_high = _mm512_shuffle_i32x4::<0b11_10_11_10>(third, fourth);
    [
        _mm512_shuffle_i32x4::<0b10_00_10_00>(low, low_high),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(low, low_high),
        _mm512_shuffle_i32x4::<0b10_00_10_00>(high, high_high),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(high, high_high),
    ]
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
