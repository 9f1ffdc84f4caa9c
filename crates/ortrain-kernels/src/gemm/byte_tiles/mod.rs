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
mod job;
mod pack;
mod portable;
mod products;
mod slice;
mod small_m;

pub(crate) use job::{DEPTHS, LINES, PanelFooter, SIDE, panel_bytes};
pub(crate) use pack::{ZeroPoints, interleave, sum_of_quad};
pub(crate) use products::ByteProducts;
pub(crate) use slice::{COLUMNS as MIN_COLUMNS, MAX_ROWS};
pub(crate) use small_m::SmallM;

#[cfg(test)]
mod tests {
    use ortrain_expr::DType;

    use super::*;
    use crate::gemm::pack::Block;
    use crate::gemm::tiles::Side;
    use crate::isa::Isa;
    use crate::isa::bytes::ByteUnit;

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
                let products = ByteProducts::new(isa, [a.dtype(), b.dtype()]).with_unit(unit);
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
