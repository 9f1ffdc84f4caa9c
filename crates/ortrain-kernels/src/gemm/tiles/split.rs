//! Conversion of f32 panels to tiles of bfloat16 terms.

use crate::gemm::pack::{self, Block, Elements};
use crate::gemm::tiles::job::{DEPTHS, LINE, LINES, TILE};
use crate::isa::{Isa, Level, Work};

/// Operand of a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    A,
    B,
}

/// Pairs of depths of a tile.
const PAIRS: usize = DEPTHS / 2;
/// Lines that are packed at a time: with all depths of a tile they take half of the smallest first-level cache.
const LINES_PER_PASS: usize = 4 * LINES;

/// Bits of the exponent: infinity and NaN have all of them.
const EXPONENT: u32 = 0x7f80_0000;
const SIGN: u32 = 0x8000_0000;

/// Rounds to the nearest bfloat16, ties to even, in the upper half of the bits; NaN stays NaN. If `capped`, a number
/// that would become infinite is truncated instead, so that the remainder is finite.
#[inline(always)]
fn round_to_bf16(x: f32, capped: bool) -> u32 {
    let bits = x.to_bits();
    let even = (bits >> 16) & 1;
    let rounded = bits.wrapping_add(0x7fff + even);
    let over = capped & (rounded & EXPONENT == EXPONENT);
    let special = bits & !SIGN >= EXPONENT;
    // Sets the bit of a quiet NaN, so that the number stays NaN without its lower half.
    let quiet = if bits & !SIGN > EXPONENT { 0x0040_0000 } else { 0 };
    let bits = if over | special { bits | quiet } else { rounded };
    bits & 0xffff_0000
}

/// Splits some depths of a panel of [`LINES`] lines into tiles, one for each term.
struct SplitPanel {
    /// Panel, and the distance between depths in elements.
    from: *const f32,
    pitch: usize,
    /// Number of depths, at most [`DEPTHS`].
    depths: usize,
    terms: usize,
    side: Side,
    to: *mut u8,
}

impl Work for SplitPanel {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let SplitPanel { from, pitch, depths, terms, side, to } = self;
        let mut rest = [[0f32; LINES]; DEPTHS];
        for (depth, line) in rest.iter_mut().take(depths).enumerate() {
            // SAFETY: the panel has `depths` depths.
            *line = unsafe { from.add(depth * pitch).cast::<[f32; LINES]>().read_unaligned() };
        }
        let capped = terms > 1;
        for term in 0..terms {
            let last = term + 1 == terms;
            let mut pairs = [[0u32; LINES]; PAIRS];
            for (pair, lines) in pairs.iter_mut().zip(rest.chunks_exact_mut(2)) {
                for l in 0..LINES {
                    let (even, odd) = (lines[0][l], lines[1][l]);
                    let (low, high) = (round_to_bf16(even, capped), round_to_bf16(odd, capped));
                    pair[l] = low >> 16 | high;
                    if !last {
                        // Infinity and NaN have no remainder.
                        let left = |x: f32, term: u32| {
                            if term & EXPONENT == EXPONENT { 0.0 } else { x - f32::from_bits(term) }
                        };
                        (lines[0][l], lines[1][l]) = (left(even, low), left(odd, high));
                    }
                }
            }
            // SAFETY: `to` has the capacity of `terms` tiles; a pair of depths has the size of an f32.
            unsafe {
                let to = to.add(term * TILE);
                match side {
                    Side::A => {
                        L::transpose_16(pairs.as_ptr().cast(), LINES as isize, to.cast(), LINE / 4, LINES);
                    }
                    Side::B => to.cast::<[[u32; LINES]; PAIRS]>().write_unaligned(pairs),
                }
            }
        }
    }
}

/// Converts an f32 panel of `lines` lines to tiles, in panels of [`LINES`] lines.
///
/// # Safety
/// The panel has `depth` lines of `pitch` elements, of which `lines`, rounded up to a whole panel, are valid for reads.
/// `to` has the capacity of the tiles.
pub(crate) unsafe fn pack_panel(
    isa: Isa,
    (side, terms): (Side, usize),
    from: *const f32,
    pitch: usize,
    (lines, depth): (usize, usize),
    to: *mut u8,
) {
    let chunks = depth.div_ceil(DEPTHS);
    for (panel, first) in (0..lines).step_by(LINES).enumerate() {
        for chunk in 0..chunks {
            let p = chunk * DEPTHS;
            // SAFETY: the caller's contract.
            unsafe {
                isa.run(SplitPanel {
                    from: from.add(p * pitch + first),
                    pitch,
                    depths: DEPTHS.min(depth - p),
                    terms,
                    side,
                    to: to.add((panel * chunks + chunk) * terms * TILE),
                });
            }
        }
    }
}

/// Packs a block into tiles.
///
/// # Safety
/// `at` and the steps address elements that are valid for reads, with the compute type f32. `to` has the capacity of
/// the tiles of all lines, rounded up to whole panels of [`LINES`], and of all depths.
pub(crate) unsafe fn pack(
    isa: Isa,
    elements: Elements,
    block: Block,
    (side, terms): (Side, usize),
    to: *mut u8,
) {
    let mut values = [0f32; LINES_PER_PASS * DEPTHS];
    let Block { at, line_step, depth_step, lines, depth } = block;
    let chunks = depth.div_ceil(DEPTHS);
    let size = elements.size() as isize;
    for first in (0..lines).step_by(LINES_PER_PASS) {
        let count = LINES_PER_PASS.min(lines - first);
        for chunk in 0..chunks {
            let (p, depths) = (chunk * DEPTHS, DEPTHS.min(depth - chunk * DEPTHS));
            let step = first as isize * line_step + p as isize * depth_step;
            let some = Block { at: at.wrapping_offset(step * size), lines: count, depth: depths, ..block };
            // SAFETY: the caller's contract; the buffer has the capacity of panels of `count` lines.
            unsafe {
                pack::pack::<f32>(isa, elements, some, LINES, values.as_mut_ptr());
                for panel in 0..count.div_ceil(LINES) {
                    let offset = (first / LINES + panel) * chunks + chunk;
                    isa.run(SplitPanel {
                        from: values.as_ptr().add(panel * LINES * depths),
                        pitch: LINES,
                        depths,
                        terms,
                        side,
                        to: to.add(offset * terms * TILE),
                    });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ortrain_expr::Precision;

    use super::*;

    /// Returns true for equal bits, or if both are NaN.
    fn equal_or_nan(a: f32, b: f32) -> bool {
        a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
    }

    #[test]
    fn rounding_is_to_nearest_even() {
        for bits in (0..=u32::MAX).step_by(0xfff1).chain([0x7f80_0001, 0xff80_0001, 0x7f7f_ffff, 0x3f80_8000])
        {
            let x = f32::from_bits(bits);
            for (precision, capped) in [(Precision::Bf16, false), (Precision::Bf16x3, true)] {
                let (got, expected) = (f32::from_bits(round_to_bf16(x, capped)), precision.split(x)[0]);
                assert!(
                    equal_or_nan(got, expected),
                    "{precision}: {x:e} is rounded to {got:e}, not {expected:e}"
                );
            }
        }
    }

    /// Decodes the element of a term, a line and a depth from tiles.
    fn decode(side: Side, tiles: &[u8], term: usize, line: usize, depth: usize) -> f32 {
        let pair = match side {
            Side::A => line * LINE + depth / 2 * 4,
            Side::B => depth / 2 * LINE + line * 4,
        };
        let at = term * TILE + pair + depth % 2 * 2;
        f32::from_bits(u32::from(u16::from_le_bytes([tiles[at], tiles[at + 1]])) << 16)
    }

    #[test]
    fn tiles_hold_the_terms_of_every_element() {
        const PITCH: usize = 20;
        let depths = DEPTHS - 3;
        let mut state = 7u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        let element = |i| match i {
            3 => f32::INFINITY,
            4 => f32::NAN,
            5 => f32::MAX,
            6 => 1e-40,
            _ => random(),
        };
        let panel: Vec<f32> = (0..depths * PITCH).map(element).collect();
        for (isa, side) in Isa::available().into_iter().flat_map(|isa| [(isa, Side::A), (isa, Side::B)]) {
            for precision in &Precision::ALL[1..] {
                let terms = precision.terms();
                let mut tiles = vec![0xa5; terms * TILE];
                let size = (LINES, depths);
                // SAFETY: the panel has `depths` lines of `PITCH` elements, and the tiles are valid for writes.
                unsafe { pack_panel(isa, (side, terms), panel.as_ptr(), PITCH, size, tiles.as_mut_ptr()) };
                for (line, depth) in (0..LINES).flat_map(|line| (0..DEPTHS).map(move |depth| (line, depth))) {
                    let element = if depth < depths { panel[depth * PITCH + line] } else { 0.0 };
                    for (term, expected) in precision.split(element).into_iter().enumerate().take(terms) {
                        let got = decode(side, &tiles, term, line, depth);
                        assert!(
                            equal_or_nan(got, expected),
                            "{isa} {side:?}: {got} is not term {term} of {element}"
                        );
                    }
                }
            }
        }
    }
}
