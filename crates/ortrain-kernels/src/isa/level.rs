//! Operations of a level, and work that is compiled for each level.

/// Number of sums in the `multiply_add` loops of the levels: more than the latency of a multiply-add times the number
/// of units.
pub(crate) const CHAINS: usize = 12;

/// Adjacent blocks of packed integers, of 2, 4 or 8 bits.
///
/// An element is `(numbers[q] - zero point) * scale` of its block. Integers of 8 bits stand for themselves, without
/// `numbers`; integers of 2 bits are the lowest two bits of an index of `numbers`, which repeats four times.
#[derive(Clone, Copy)]
pub(crate) struct PackedBlocks<'a> {
    pub(crate) bits: usize,
    /// True if the first of several integers in a byte has the highest bits.
    pub(crate) is_high_first: bool,
    pub(crate) bytes: *const u8,
    /// Number of blocks, and of elements of a block: a multiple of 16.
    pub(crate) blocks: usize,
    pub(crate) block: usize,
    pub(crate) numbers: &'a [f32; 16],
    pub(crate) scales: *const f32,
    /// Zero points, and the distance between the zero points of adjacent blocks: 0 or 1.
    pub(crate) zero_points: *const f32,
    pub(crate) zero_point_step: usize,
}

impl PackedBlocks<'_> {
    /// Returns the scale and the zero point of a block.
    ///
    /// # Safety
    /// The block exists, and the addresses are valid for reads.
    #[inline(always)]
    pub(crate) unsafe fn scale_and_zero_point(&self, block: usize) -> (f32, f32) {
        let zero_point = self.zero_points.wrapping_add(block * self.zero_point_step);
        // SAFETY: the caller's contract.
        unsafe { (self.scales.wrapping_add(block).read_unaligned(), zero_point.read_unaligned()) }
    }

    /// Returns the shift of each of 16 integers of two bits inside a word of four bytes.
    #[inline(always)]
    pub(crate) fn shifts_of_two_bits(&self) -> [i32; 16] {
        std::array::from_fn(|i| {
            let at = if self.is_high_first { 3 - i % 4 } else { i % 4 };
            (8 * (i / 4) + 2 * at) as i32
        })
    }

    /// Decodes element by element.
    ///
    /// # Safety
    /// As [`Level::decode_blocks`].
    #[inline(always)]
    pub(crate) unsafe fn decode_each(&self, to: *mut f32) {
        let &PackedBlocks { bits, is_high_first, bytes, blocks, block, numbers, .. } = self;
        let per_byte = 8 / bits;
        let mask = u8::MAX >> (8 - bits);
        for b in 0..blocks {
            // SAFETY: the caller's contract.
            unsafe {
                let (scale, zero_point) = self.scale_and_zero_point(b);
                let (bytes, to) = (bytes.wrapping_add(b * block / per_byte), to.wrapping_add(b * block));
                if bits == 8 {
                    for i in 0..block {
                        let number = f32::from(bytes.wrapping_add(i).read());
                        to.wrapping_add(i).write_unaligned((number - zero_point) * scale);
                    }
                    continue;
                }
                let table = numbers.map(|number| (number - zero_point) * scale);
                for i in 0..block {
                    let at = if is_high_first { per_byte - 1 - i % per_byte } else { i % per_byte };
                    let integer = (bytes.wrapping_add(i / per_byte).read() >> (bits * at)) & mask;
                    to.wrapping_add(i).write_unaligned(table[usize::from(integer & 15)]);
                }
            }
        }
    }
}

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
    /// Returns the nearest integer; of two, the even one.
    fn round(a: f32) -> f32;
    /// Returns the nearest integer; of two, the even one.
    fn round64(a: f64) -> f64;
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

    /// Decodes adjacent blocks of packed integers into adjacent floats.
    ///
    /// # Safety
    /// The addresses of `packed` are valid for reads of all its blocks, and `to` for writes of their elements.
    #[inline(always)]
    unsafe fn decode_blocks(packed: &PackedBlocks<'_>, to: *mut f32) {
        // SAFETY: the caller's contract.
        unsafe { packed.decode_each(to) }
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
