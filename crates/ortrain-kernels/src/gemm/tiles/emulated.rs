//! bfloat16 products by f32 multiply-adds.

use crate::gemm::tiles::job::{Job, LINE, LINES};
use crate::isa::{Level, Work};

/// Number of rows of sums in registers.
const ROWS: usize = 4;
/// Pairs of depths of a tile.
const PAIRS: usize = LINE / 4;

pub(super) struct Sums<'a>(pub(super) Job<'a>);

/// Decodes the two numbers of a pair of depths.
#[inline(always)]
fn pair(bits: u32) -> [f32; 2] {
    [f32::from_bits(bits << 16), f32::from_bits(bits & 0xffff_0000)]
}

impl Work for Sums<'_> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let Job { chunks, a, b, panels, steps, rows, products, to, to_row, .. } = self.0;
        let (_, across) = self.0.num_tiles();
        for column in 0..across {
            let b = b.wrapping_add(column * panels[1]);
            for row in (0..rows).step_by(ROWS) {
                let a = a.wrapping_add(row / LINES * panels[0] + row % LINES * LINE);
                let mut sums = [[0f32; LINES]; ROWS];
                for chunk in 0..chunks {
                    for product in products {
                        let a = a.wrapping_add(chunk * steps[0] + product[0]).cast::<u32>();
                        let b = b.wrapping_add(chunk * steps[1] + product[1]).cast::<[u32; LINES]>();
                        for q in 0..PAIRS {
                            // SAFETY: each line of a tile has `PAIRS` pairs.
                            let (line, lines) = unsafe {
                                let pairs: [u32; ROWS] =
                                    std::array::from_fn(|i| a.add(i * PAIRS + q).read_unaligned());
                                (b.add(q).read_unaligned(), pairs)
                            };
                            for (sums, x) in sums.iter_mut().zip(lines) {
                                let [even, odd] = pair(x);
                                for (sum, y) in sums.iter_mut().zip(line) {
                                    let y = pair(y);
                                    *sum = L::mul_add(odd, y[1], L::mul_add(even, y[0], *sum));
                                }
                            }
                        }
                    }
                }
                for (i, sums) in sums.into_iter().enumerate() {
                    let to = to.wrapping_offset((row + i) as isize * to_row).wrapping_add(column * LINES);
                    // SAFETY: whole tiles may be written.
                    unsafe { to.cast::<[f32; LINES]>().write_unaligned(sums) };
                }
            }
        }
    }
}
