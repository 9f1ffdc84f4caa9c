//! Products with few rows: B is read once, in place, because packing it would cost more than multiplying.

use ortrain_expr::DType;

use super::arithmetic::Arithmetic;
use super::pack::Elements;
use crate::isa::{Isa, Level, Work};
use crate::tile::number::{Bf16, F16, Number, RoundedF32, Stored};

/// Maximum number of rows of a product with few rows.
pub(super) const MAX_ROWS: usize = 8;

/// Block of a product with few rows.
#[derive(Clone, Copy)]
pub(super) struct SmallMBlock<T> {
    /// A: `rows` rows of `k` adjacent elements.
    pub(super) a: *const T,
    /// B, as stored: steps along n and along k, one of which is 1.
    pub(super) b: *const u8,
    pub(super) line: isize,
    pub(super) depth: isize,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) k: usize,
    /// C: `rows` rows of `cols` adjacent elements.
    pub(super) c: *mut T,
}

/// Independent chains of a sum along k.
const LANES: usize = 16;
/// Rows, or depths, that share a load of B or of C.
const GROUP_SIZE: usize = 4;

struct MultiplySmallM<S: Stored>(SmallMBlock<S::Computed>);

impl<S: Stored<Computed: Arithmetic>> MultiplySmallM<S> {
    /// Computes `M` rows from row `i` on, if elements of B are adjacent along k: sums in [`LANES`] chains, joined as a
    /// tree.
    #[inline(always)]
    fn dot_products<L: Level, const M: usize>(&self, i: usize) {
        let SmallMBlock { a, b, line, cols, k, c, .. } = self.0;
        let zero = <S::Computed as Number>::ZERO;
        for j in 0..cols {
            let b = b.cast::<S>().wrapping_offset(j as isize * line);
            let mut sums = [[zero; LANES]; M];
            let vector_len = k - k % LANES;
            // SAFETY: each row of A and each column of B has `k` elements, and C has these elements.
            unsafe {
                for p in (0..vector_len).step_by(LANES) {
                    let y: [S; LANES] = b.add(p).cast::<[S; LANES]>().read_unaligned();
                    for (m, sums) in sums.iter_mut().enumerate() {
                        let x = a.add((i + m) * k + p).cast::<[S::Computed; LANES]>().read_unaligned();
                        for l in 0..LANES {
                            sums[l] = Arithmetic::mul_add_at::<L>(x[l], y[l].decode(), sums[l]);
                        }
                    }
                }
                for p in vector_len..k {
                    let y = b.add(p).read_unaligned().decode();
                    for (m, sums) in sums.iter_mut().enumerate() {
                        let x = a.add((i + m) * k + p).read_unaligned();
                        sums[p - vector_len] = Arithmetic::mul_add_at::<L>(x, y, sums[p - vector_len]);
                    }
                }
                for (m, sums) in sums.iter_mut().enumerate() {
                    let mut width = LANES / 2;
                    while width > 0 {
                        for l in 0..width {
                            sums[l] = sums[l].add(sums[l + width]);
                        }
                        width /= 2;
                    }
                    c.add((i + m) * cols + j).write(sums[0]);
                }
            }
        }
    }

    /// Computes all rows, if elements of B are adjacent along n: scaled rows of B are added to rows of C in order.
    #[inline(always)]
    fn add_scaled_rows<L: Level>(&self) {
        let SmallMBlock { a, b, depth, rows, cols, k, c, .. } = self.0;
        let zero = <S::Computed as Number>::ZERO;
        // SAFETY: C is scratch memory of this worker, with capacity for these elements.
        let c = unsafe { std::slice::from_raw_parts_mut(c, rows * cols) };
        c.fill(zero);
        let row = |p: usize| b.cast::<S>().wrapping_offset(p as isize * depth);
        let group_len = k - k % GROUP_SIZE;
        for p in (0..group_len).step_by(GROUP_SIZE) {
            let b: [*const S; GROUP_SIZE] = std::array::from_fn(|g| row(p + g));
            for (i, c) in c.chunks_exact_mut(cols).enumerate() {
                // SAFETY: each row of A has `k` elements, each row of B has `cols`.
                unsafe {
                    let x: [S::Computed; GROUP_SIZE] =
                        a.add(i * k + p).cast::<[S::Computed; GROUP_SIZE]>().read_unaligned();
                    for (j, c) in c.iter_mut().enumerate() {
                        let mut sum = *c;
                        for g in 0..GROUP_SIZE {
                            sum =
                                Arithmetic::mul_add_at::<L>(x[g], b[g].add(j).read_unaligned().decode(), sum);
                        }
                        *c = sum;
                    }
                }
            }
        }
        for p in group_len..k {
            for (i, c) in c.chunks_exact_mut(cols).enumerate() {
                // SAFETY: as above.
                unsafe {
                    let x = a.add(i * k + p).read_unaligned();
                    for (j, c) in c.iter_mut().enumerate() {
                        *c = Arithmetic::mul_add_at::<L>(x, row(p).add(j).read_unaligned().decode(), *c);
                    }
                }
            }
        }
    }
}

impl<S: Stored<Computed: Arithmetic>> Work for MultiplySmallM<S> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        if self.0.depth != 1 {
            return self.add_scaled_rows::<L>();
        }
        for i in (0..self.0.rows).step_by(GROUP_SIZE) {
            match self.0.rows - i {
                1 => self.dot_products::<L, 1>(i),
                2 => self.dot_products::<L, 2>(i),
                3 => self.dot_products::<L, 3>(i),
                _ => self.dot_products::<L, GROUP_SIZE>(i),
            }
        }
    }
}

/// Computes a block of a product with few rows.
///
/// # Safety
/// A and B are valid for reads, and C for writes, of the elements that sizes and steps address. No other thread
/// accesses C. `elements` describes B, and its compute type is `T`.
pub(super) unsafe fn multiply<T: Arithmetic>(isa: Isa, elements: Elements, small_block: SmallMBlock<T>) {
    macro_rules! go {
        ($s:ty, $t:ty) => {{
            let SmallMBlock { a, b, line, depth, rows, cols, k, c } = small_block;
            isa.run(MultiplySmallM::<$s>(SmallMBlock::<$t> {
                a: a.cast(),
                b,
                line,
                depth,
                rows,
                cols,
                k,
                c: c.cast(),
            }))
        }};
    }
    match (elements.stored, elements.rounded) {
        (DType::F32, None) => go!(f32, f32),
        (DType::F32, Some(DType::F16)) => go!(RoundedF32<F16>, f32),
        (DType::F32, Some(DType::BF16)) => go!(RoundedF32<Bf16>, f32),
        (DType::F64, None) => go!(f64, f64),
        (DType::F16, None) => go!(F16, f32),
        (DType::BF16, None) => go!(Bf16, f32),
        other => unreachable!("a matrix of {other:?}: rejected at compile time"),
    }
}
