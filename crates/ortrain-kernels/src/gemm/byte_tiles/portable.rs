//! Products of bytes in plain code.

use super::job::{Job, LINES, QUADS, TILE};
use crate::isa::{Level, Work};

/// Number of rows of sums in registers.
const ROWS: usize = 4;

pub(super) struct Sums {
    pub(super) job: Job,
    pub(super) a_is_signed: bool,
}

impl Work for Sums {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let Job { rows, to, to_row, .. } = self.job;
        let number = |byte: u8, is_signed: bool| {
            if is_signed { i32::from(byte.cast_signed()) } else { i32::from(byte) }
        };
        for column in 0..self.job.across() {
            let (b, footer_of_b) = self.job.panel_of_b(column);
            for row in (0..rows).step_by(ROWS) {
                let (a, footer_of_a) = self.job.row_of_a(row);
                let mut sums = [[0i32; LINES]; ROWS];
                for chunk in 0..self.job.chunks() {
                    let a = a.wrapping_add(chunk * TILE).cast::<[u8; 4]>();
                    let b = b.wrapping_add(chunk * TILE).cast::<[[u8; 4]; LINES]>();
                    for q in 0..self.job.quads_of(chunk) {
                        // SAFETY: each row of a tile has `QUADS` quads, and tiles have whole rows of A.
                        let (line, quads) = unsafe {
                            let quads: [[u8; 4]; ROWS] =
                                std::array::from_fn(|i| a.add(i * QUADS + q).read_unaligned());
                            (b.add(q).read_unaligned(), quads)
                        };
                        for (sums, x) in sums.iter_mut().zip(quads) {
                            for (sum, y) in sums.iter_mut().zip(&line) {
                                for (&x, &y) in x.iter().zip(y) {
                                    let product = number(x, self.a_is_signed) * number(y, !self.a_is_signed);
                                    *sum = sum.wrapping_add(product);
                                }
                            }
                        }
                    }
                }
                // SAFETY: panels end with a footer.
                let (of_a, of_b) = unsafe { (footer_of_a.read_unaligned(), footer_of_b.read_unaligned()) };
                for (i, sums) in sums.iter_mut().enumerate() {
                    let line = (row + i) % LINES;
                    for (j, sum) in sums.iter_mut().enumerate() {
                        let of_row = of_a.zero_points[line].wrapping_mul(of_b.sums[j]);
                        let of_column = of_b.zero_points[j].wrapping_mul(of_a.sums[line]);
                        *sum = sum.wrapping_sub(of_row).wrapping_sub(of_column);
                    }
                    let to = to.wrapping_offset((row + i) as isize * to_row).wrapping_add(column * LINES);
                    // SAFETY: whole panels may be written.
                    unsafe { to.cast::<[i32; LINES]>().write_unaligned(*sums) };
                }
            }
        }
    }
}
