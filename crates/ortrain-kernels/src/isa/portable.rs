//! Portable level of every machine: plain Rust, compiled for the target's baseline.

use std::hint::black_box;

use super::level::{CHAINS, Level, Work};

/// Number of f32 lanes of a register.
pub(crate) const LANES: usize = 4;

#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Level for Portable {
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }

    #[inline(always)]
    fn mul_add64(a: f64, b: f64, c: f64) -> f64 {
        a * b + c
    }

    // `f32::floor` is a library call on baseline x86-64. From 2^23 on every float is an integer.
    #[inline(always)]
    fn floor(a: f32) -> f32 {
        const INTEGERS: f32 = 8_388_608.0;
        let small = if a.abs() < INTEGERS { a } else { 0.0 };
        // SAFETY: `small` is finite and inside the range of i32.
        let truncated = unsafe { small.to_int_unchecked::<i32>() } as f32;
        let floor = truncated - if truncated > small { 1.0 } else { 0.0 };
        // Keeps the sign of zero.
        let floor = if floor == small { small } else { floor };
        if a.abs() < INTEGERS { floor } else { a }
    }

    #[inline(always)]
    fn floor64(a: f64) -> f64 {
        a.floor()
    }

    // `f32::round_ties_even` is a library call on baseline x86-64. The sum with 2^23 has no digits behind the point.
    #[inline(always)]
    fn round(a: f32) -> f32 {
        const INTEGERS: f32 = 8_388_608.0;
        let rounded = ((a.abs() + INTEGERS) - INTEGERS).copysign(a);
        if a.abs() < INTEGERS { rounded } else { a }
    }

    #[inline(always)]
    fn round64(a: f64) -> f64 {
        a.round_ties_even()
    }

    #[inline(always)]
    unsafe fn transpose_8x8(from: *const f32, from_step: isize, to: *mut f32, to_step: usize) {
        for p in 0..8 {
            for i in 0..8 {
                // SAFETY: the caller's contract.
                unsafe {
                    let value = from.wrapping_offset(i as isize * from_step).wrapping_add(p).read_unaligned();
                    to.wrapping_add(p * to_step + i).write(value);
                }
            }
        }
    }
}

#[inline(never)]
pub(crate) fn enter<W: Work>(work: W) -> W::Out {
    work.work::<Portable>()
}

/// Runs `rounds` rounds of multiply-adds on registers: [`CHAINS`] sums of [`LANES`] lanes, one multiply-add each per
/// round.
#[cfg(target_arch = "x86_64")]
pub(crate) fn multiply_add(rounds: usize) {
    use std::arch::x86_64::{_mm_add_ps, _mm_mul_ps, _mm_set1_ps};

    #[target_feature(enable = "sse")]
    fn burst(rounds: usize) {
        let (x, y) = black_box((_mm_set1_ps(0.5), _mm_set1_ps(0.25)));
        let mut sums = [x; CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm_add_ps(_mm_mul_ps(*sum, x), y);
            }
        }
        black_box(sums);
    }
    // SAFETY: every machine of the target has SSE.
    unsafe { burst(rounds) }
}

/// Runs `rounds` rounds of multiply-adds on registers: [`CHAINS`] sums of [`LANES`] lanes, one multiply-add each per
/// round.
#[cfg(not(target_arch = "x86_64"))]
#[inline(never)]
pub(crate) fn multiply_add(rounds: usize) {
    let (x, y) = black_box(([0.5f32; LANES], [0.25f32; LANES]));
    let mut sums = [x; CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            for lane in 0..LANES {
                sum[lane] = Portable::mul_add(sum[lane], x[lane], y[lane]);
            }
        }
    }
    black_box(sums);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_rounded_as_in_the_library() {
        let values = [
            0.0,
            -0.0,
            0.5,
            -0.5,
            1.0,
            -1.0,
            -1.5,
            2.5,
            0.499_999_97,
            8_388_607.5,
            -8_388_607.5,
            8_388_608.0,
            -1e30,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::MIN_POSITIVE,
            -f32::MIN_POSITIVE,
        ];
        for value in values {
            assert_eq!(Portable::floor(value).to_bits(), value.floor().to_bits(), "floor({value})");
            let nearest = value.round_ties_even();
            assert_eq!(Portable::round(value).to_bits(), nearest.to_bits(), "round({value})");
        }
        assert!(Portable::floor(f32::NAN).is_nan() && Portable::round(f32::NAN).is_nan());
    }
}
