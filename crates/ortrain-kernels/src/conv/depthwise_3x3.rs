//! Windows of 3×3 with stride 1: elements that several rows of windows see are read once for all of them.
//!
//! Sums stay in registers: the sums of a few rows of the result for a convolution, and of the nine elements of a filter
//! for its gradient.

use std::any::TypeId;

use crate::gemm::levels::Real;
use crate::isa::Isa;

#[cfg(target_arch = "x86_64")]
use crate::isa::Kind;

/// Number of elements of a filter.
pub(super) const NINE: usize = 9;
/// Number of lanes of the sums of a filter's gradient.
pub(super) const LANES: usize = 8;

/// Kernels of an instruction-set level, for f32.
#[derive(Clone, Copy)]
pub(super) struct Kernels3x3 {
    pub(super) correlate: Correlate,
    pub(super) dots: Dots,
}

/// Arguments: weights, row by row; address of the first window, and step from row to row; rows and columns of the
/// result; the result, with adjacent rows. A sum is computed in the order of the weights.
///
/// # Safety
/// - The elements are valid for reads, and the elements of one more vector after them.
/// - The elements of the result are valid for writes.
/// - The machine has the instruction-set level.
pub(super) type Correlate = unsafe fn(&[f32; NINE], *const f32, usize, (usize, usize), *mut f32);

/// Arguments: for each element of the filter, the address of the elements that it sees in the first row; the step from
/// row to row; factors, with adjacent rows; rows and columns of the factors; the sums to which the products are added.
///
/// # Safety
/// The elements are valid for reads. The machine has the instruction-set level.
pub(super) type Dots =
    unsafe fn(&[*const f32; NINE], usize, *const f32, (usize, usize), &mut [[f32; LANES]; NINE]);

/// Elements that windows of 3×3 see.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    /// Offset of the first element, row by row.
    pub(super) offset: isize,
    /// For each element the index of its tap.
    pub(super) taps: [usize; NINE],
}

impl Grid {
    /// Returns the grid that the offsets form, if they form one.
    pub(super) fn new(offsets: &[isize], step: usize) -> Option<Grid> {
        let offset = *offsets.iter().min()?;
        let mut taps = [0; NINE];
        for (i, tap) in taps.iter_mut().enumerate() {
            let expected = offset + (i / 3 * step + i % 3) as isize;
            *tap = offsets.iter().position(|&other| other == expected)?;
        }
        (offsets.len() == NINE).then_some(Grid { offset, taps })
    }
}

impl Kernels3x3 {
    /// Returns the kernels of a level, or `None` if the level or the type has no kernels.
    pub(super) fn new<T: Real>(isa: Isa) -> Option<Kernels3x3> {
        if TypeId::of::<T>() != TypeId::of::<f32>() {
            return None;
        }
        match isa.kind() {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => Some(Kernels3x3 { correlate: x86::avx2, dots: x86::dots }),
            #[cfg(target_arch = "x86_64")]
            // AVX-512 machines support AVX2.
            Kind::Avx512 => Some(Kernels3x3 { correlate: x86::avx512, dots: x86::dots }),
            _ => None,
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use crate::conv::depthwise_3x3::{LANES, NINE};

    macro_rules! correlate {
        ($name:ident, $rows:ident, $features:literal, $lanes:literal, $v:ty, $zero:ident, $load:ident, $store:ident, $set:ident, $fma:ident) => {
            /// Computes `R` rows of a vector.
            ///
            /// # Safety
            /// The contract of [`super::Correlate`].
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn $rows<const R: usize>(weights: &[$v; NINE], from: *const f32, step: usize) -> [$v; R] {
                let mut sums = [$zero(); R];
                for i in 0..R + 2 {
                    for j in 0..3 {
                        // SAFETY: the caller's contract.
                        let window_values = unsafe { $load(from.add(i * step + j)) };
                        for (r, sum) in sums.iter_mut().enumerate() {
                            if r <= i && i < r + 3 {
                                *sum = $fma(weights[3 * (i - r) + j], window_values, *sum);
                            }
                        }
                    }
                }
                sums
            }

            /// # Safety
            /// The contract of [`super::Correlate`].
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $name(
                weights: &[f32; NINE],
                from: *const f32,
                step: usize,
                (rows, cols): (usize, usize),
                to: *mut f32,
            ) {
                const MANY: usize = 4;
                let weights = weights.map(|weight| $set(weight));
                let end = to.wrapping_add(rows * cols);
                // The last vector of a row ends with the row. In short rows it exceeds the row, and the next row
                // overwrites the excess.
                let last = cols.saturating_sub($lanes);
                macro_rules! some {
                    ($count:ident, $y:expr) => {
                        for x in (0..cols).step_by($lanes) {
                            let x = x.min(last);
                            // SAFETY: the caller's contract. Stores that would exceed the result are truncated.
                            unsafe {
                                let sums = $rows::<$count>(&weights, from.add($y * step + x), step);
                                for (r, sum) in sums.into_iter().enumerate() {
                                    let to = to.add(($y + r) * cols + x);
                                    if cols >= $lanes || to.wrapping_add($lanes) <= end {
                                        $store(to, sum);
                                    } else {
                                        let mut line = [0f32; $lanes];
                                        $store(line.as_mut_ptr(), sum);
                                        std::ptr::copy_nonoverlapping(line.as_ptr(), to, cols);
                                    }
                                }
                            }
                        }
                    };
                }
                let many = rows - rows % MANY;
                for y in (0..many).step_by(MANY) {
                    some!(MANY, y);
                }
                const ONE: usize = 1;
                const TWO: usize = 2;
                let two = rows - rows % TWO;
                for y in (many..two).step_by(TWO) {
                    some!(TWO, y);
                }
                for y in two..rows {
                    some!(ONE, y);
                }
            }
        };
    }

    correlate!(
        avx2,
        avx2_rows,
        "avx2,fma",
        8,
        __m256,
        _mm256_setzero_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_set1_ps,
        _mm256_fmadd_ps
    );
    correlate!(
        avx512,
        avx512_rows,
        "avx512f",
        16,
        __m512,
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_set1_ps,
        _mm512_fmadd_ps
    );

    /// Mask words: the `LANES` words from index `LANES - n` on select the first `n` lanes.
    static LANE_MASKS: [i32; 2 * LANES] = {
        let mut words = [0; 2 * LANES];
        let mut i = 0;
        while i < LANES {
            words[i] = -1;
            i += 1;
        }
        words
    };

    /// Adds the products of `R` rows of a grid, of a full vector or of the lanes of the mask.
    ///
    /// # Safety
    /// The contract of [`super::Dots`].
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn add_grid_rows<const R: usize, const CUT: bool>(
        from: *const f32,
        step: usize,
        scale: *const f32,
        cols: usize,
        mask: __m256i,
        sums: &mut [__m256; NINE],
    ) {
        // SAFETY: the caller's contract.
        let load =
            |at: *const f32| unsafe { if CUT { _mm256_maskload_ps(at, mask) } else { _mm256_loadu_ps(at) } };
        let mut factors = [_mm256_setzero_ps(); R];
        for (r, factor) in factors.iter_mut().enumerate() {
            *factor = load(scale.wrapping_add(r * cols));
        }
        for i in 0..R + 2 {
            for j in 0..3 {
                let input = load(from.wrapping_add(i * step + j));
                for (r, &factor) in factors.iter().enumerate() {
                    if r <= i && i < r + 3 {
                        let k = 3 * (i - r) + j;
                        sums[k] = _mm256_fmadd_ps(factor, input, sums[k]);
                    }
                }
            }
        }
    }

    /// Adds the products of one row of any nine elements.
    ///
    /// # Safety
    /// The contract of [`super::Dots`].
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn add_row<const CUT: bool>(
        from: &[*const f32; NINE],
        at: usize,
        scale: *const f32,
        mask: __m256i,
        sums: &mut [__m256; NINE],
    ) {
        // SAFETY: the caller's contract.
        let load =
            |at: *const f32| unsafe { if CUT { _mm256_maskload_ps(at, mask) } else { _mm256_loadu_ps(at) } };
        let factor = load(scale);
        for (sum, from) in sums.iter_mut().zip(from) {
            *sum = _mm256_fmadd_ps(factor, load(from.wrapping_add(at)), *sum);
        }
    }

    /// # Safety
    /// The contract of [`super::Dots`].
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn dots(
        from: &[*const f32; NINE],
        step: usize,
        scale: *const f32,
        (rows, cols): (usize, usize),
        totals: &mut [[f32; LANES]; NINE],
    ) {
        const TWO: usize = 2;
        let (full_cols, rest) = (cols - cols % LANES, cols % LANES);
        let mut sums = [_mm256_setzero_ps(); NINE];
        let is_grid = (0..NINE).all(|k| from[k] == from[0].wrapping_add(k / 3 * step + k % 3));
        // SAFETY: the caller's contract. Elements after a row are not read, because they may have any value.
        unsafe {
            let mask = _mm256_loadu_si256(LANE_MASKS.as_ptr().add(LANES - rest).cast());
            if is_grid {
                let (first, two) = (from[0], rows - rows % TWO);
                for y in (0..two).step_by(TWO) {
                    let (from, scale) = (first.add(y * step), scale.add(y * cols));
                    for x in (0..full_cols).step_by(LANES) {
                        add_grid_rows::<TWO, false>(from.add(x), step, scale.add(x), cols, mask, &mut sums);
                    }
                    if rest > 0 {
                        add_grid_rows::<TWO, true>(
                            from.add(full_cols),
                            step,
                            scale.add(full_cols),
                            cols,
                            mask,
                            &mut sums,
                        );
                    }
                }
                if two < rows {
                    let (from, scale) = (first.add(two * step), scale.add(two * cols));
                    for x in (0..full_cols).step_by(LANES) {
                        add_grid_rows::<1, false>(from.add(x), step, scale.add(x), cols, mask, &mut sums);
                    }
                    if rest > 0 {
                        add_grid_rows::<1, true>(
                            from.add(full_cols),
                            step,
                            scale.add(full_cols),
                            cols,
                            mask,
                            &mut sums,
                        );
                    }
                }
            } else {
                for y in 0..rows {
                    let (at, scale) = (y * step, scale.add(y * cols));
                    for x in (0..full_cols).step_by(LANES) {
                        add_row::<false>(from, at + x, scale.add(x), mask, &mut sums);
                    }
                    if rest > 0 {
                        add_row::<true>(from, at + full_cols, scale.add(full_cols), mask, &mut sums);
                    }
                }
            }
            for (total, sum) in totals.iter_mut().zip(sums) {
                let old = _mm256_loadu_ps(total.as_ptr());
                _mm256_storeu_ps(total.as_mut_ptr(), _mm256_add_ps(old, sum));
            }
        }
    }
}
