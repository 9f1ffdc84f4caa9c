//! Operations of a level, and work that is compiled for each level.

/// Number of sums in the `multiply_add` loops of the levels: more than the latency of a multiply-add times the number
/// of units.
pub(crate) const CHAINS: usize = 12;

/// Operations that differ between levels in otherwise equal code. Every method must be `#[inline(always)]`, as must
/// every function that is generic over a level: only code inlined into the shim is compiled for the level.
pub(crate) trait Level: Copy {
    /// Computes `a * b + c`, with one rounding if the level has this instruction, else with two. Never calls a library
    /// function.
    fn mul_add(a: f32, b: f32, c: f32) -> f32;
    /// Computes `a * b + c`, as [`Level::mul_add`].
    fn mul_add64(a: f64, b: f64, c: f64) -> f64;
    /// Returns the largest integer that is not greater.
    fn floor(a: f32) -> f32;
    /// Returns the largest integer that is not greater.
    fn floor64(a: f64) -> f64;
    /// Transposes a square of 8×8. `from_step` and `to_step` are the distances between lines.
    ///
    /// # Safety
    /// The elements of `from` are valid for reads, and the elements of `to` for writes.
    unsafe fn transpose_8x8(from: *const f32, from_step: isize, to: *mut f32, to_step: usize);
    /// Transposes `lines` lines of 16 elements, 1 to 16 lines. `from_step` and `to_step` are the distances between
    /// lines. Only the first `lines` elements of each line of `to` are written.
    ///
    /// # Safety
    /// As [`Level::transpose_8x8`].
    #[inline(always)]
    unsafe fn transpose_16(from: *const f32, from_step: isize, to: *mut f32, to_step: usize, lines: usize) {
        let line = |i: usize| from.wrapping_offset(i as isize * from_step);
        // SAFETY: the caller's contract; the last squares may overlap.
        unsafe {
            if lines >= 8 {
                for p in [0, 8] {
                    for i in [0, lines - 8] {
                        Self::transpose_8x8(
                            line(i).wrapping_add(p),
                            from_step,
                            to.add(p * to_step + i),
                            to_step,
                        );
                    }
                }
            } else {
                for i in 0..lines {
                    (0..16).for_each(|p| to.add(p * to_step + i).write(line(i).add(p).read_unaligned()));
                }
            }
        }
    }

    /// Transposes six lines of 8 elements into adjacent lines of six. `from_step` is the distance between lines.
    ///
    /// # Safety
    /// As [`Level::transpose_8x8`].
    #[inline(always)]
    unsafe fn transpose_6(from: *const f32, from_step: isize, to: *mut f32) {
        for i in 0..6 {
            let line = from.wrapping_offset(i as isize * from_step);
            // SAFETY: the caller's contract.
            (0..8).for_each(|p| unsafe { to.add(6 * p + i).write(line.add(p).read_unaligned()) });
        }
    }

    /// True if [`Level::pick`] is faster than copies piece by piece.
    const HAS_FAST_SELECT: bool = false;
    /// Copies sixteen of the thirty-two elements at `from`.
    ///
    /// # Safety
    /// The thirty-two elements are valid for reads, indices are less than thirty-two, and sixteen elements at `to` are
    /// valid for writes.
    #[inline(always)]
    unsafe fn select_16_of_32(from: *const f32, index: &[u32; 16], to: *mut f32) {
        for (i, &index) in index.iter().enumerate() {
            // SAFETY: the caller's contract.
            unsafe { to.add(i).write_unaligned(from.add(index as usize).read_unaligned()) };
        }
    }
}

/// Work that is compiled for each level. `work` must be `#[inline(always)]`.
pub(crate) trait Work {
    type Out;
    fn work<L: Level>(self) -> Self::Out;
}
