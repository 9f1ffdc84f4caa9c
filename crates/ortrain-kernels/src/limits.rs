//! What this machine can do at most: multiplications and additions per second, and bytes per second.
//!
//! They are measured, not looked up: clocks change, neighbours share caches. A kernel's share of the bound means
//! something only beside limits that were measured in the same minutes.

use std::hint::black_box;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use crate::gemm::tiles::amx;
use crate::huge_pages::prefer_large_pages;
use crate::isa::bf16::{Bf16Unit, Unit};
use crate::isa::{CHAINS, Isa, Kind, Level, Work, portable};
#[cfg(target_arch = "x86_64")]
use crate::isa::{avx2, avx512};
use crate::pool::Pool;

/// The limits of all threads of a pool together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Floating-point operations per second in f32 (a multiplication and an addition are two), from registers.
    pub flops: f64,
    /// Bytes per second that a loop of two loads and a store moves to and from memory beyond the caches.
    pub bandwidth: f64,
}

/// Working set that counts as beyond the caches: more would take too long to measure and too much memory to ask for.
const FAR: usize = 192 << 20;
/// Multiply-adds of a chain in a round, which takes a tenth of a millisecond.
const ROUNDS: usize = 25_000;
/// The same of tiles, of which each takes as long as sixteen vectors.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
const AMX_ROUNDS: usize = ROUNDS / 16;
/// Time that one measurement goes on for, after which the best round counts.
const PATIENCE: Duration = Duration::from_millis(40);
impl Limits {
    /// Measures the limits of an instruction-set level on the threads of a pool. Takes less than 0.3 s and asks for
    /// 192 MiB of memory, which it gives back.
    #[must_use]
    pub fn measure(isa: Isa, pool: &Pool) -> Limits {
        Limits { flops: flops(isa, pool, PATIENCE), bandwidth: bandwidth(isa, pool, FAR) }
    }

    /// The least seconds in which so much work can be done: the longer of computing and of moving bytes.
    #[must_use]
    pub fn seconds(&self, flops: f64, bytes: f64) -> f64 {
        (flops / self.flops).max(bytes / self.bandwidth)
    }
}

/// Floating-point operations per second of multiply-adds on registers, all threads of the pool together: the best
/// round, after so much time.
#[must_use]
pub fn flops(isa: Isa, pool: &Pool, patience: Duration) -> f64 {
    let threads = pool.num_threads();
    let (lanes, burst): (usize, fn()) = match isa.kind() {
        Kind::Portable => (portable::LANES, || portable::multiply_add(ROUNDS)),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the token exists, so the machine has the level.
        Kind::Avx2 => (avx2::LANES, || unsafe { avx2::multiply_add(ROUNDS) }),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Kind::Avx512 => (avx512::LANES, || unsafe { avx512::multiply_add(ROUNDS) }),
    };
    let work = (2 * ROUNDS * CHAINS * lanes * threads) as f64;
    work / best(patience, || pool.run(threads, threads, &|_, _| burst()))
}

/// The same of products of bfloat16 that are summed in f32, by a unit; `None` of the emulated one, which has no rate of its
/// own: it is at most [`flops`].
#[must_use]
pub fn bf16_flops(unit: Bf16Unit, pool: &Pool, patience: Duration) -> Option<f64> {
    // Multiply-adds of a burst.
    let (count, burst): (usize, fn()) = match unit.unit() {
        Unit::Emulated => return None,
        #[cfg(target_arch = "x86_64")]
        Unit::Avx512 => {
            // SAFETY: the token exists, so the machine has the unit.
            let burst: fn() = || unsafe { avx512::multiply_add_bf16(ROUNDS) };
            (ROUNDS * CHAINS * 2 * avx512::LANES, burst)
        }
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        Unit::Amx => {
            // SAFETY: as above.
            let burst: fn() = || unsafe { amx::multiply_add(AMX_ROUNDS) };
            (AMX_ROUNDS * amx::BURST, burst)
        }
    };
    let threads = pool.num_threads();
    let work = (2 * count * threads) as f64;
    Some(work / best(patience, || pool.run(threads, threads, &|_, _| burst())))
}

/// Bytes per second of `a = b + c · s` over a working set of so many bytes, all threads of the pool together: each
/// has its share of the working set. Asks for that much memory, and gives it back.
#[must_use]
pub fn bandwidth(isa: Isa, pool: &Pool, bytes: usize) -> f64 {
    let threads = pool.num_threads();
    let share = (bytes / (3 * threads * size_of::<f32>())).max(1);
    // Small sets are gone through many times in a round, so that the pool's own time does not count.
    let times = ((1 << 20) / share).max(1);
    // Filled, since untouched pages are all one page. Planes and arenas lie in large pages as well.
    let mut memory: Vec<f32> = Vec::with_capacity(3 * share * threads);
    prefer_large_pages(memory.as_mut_ptr().cast(), size_of::<f32>() * memory.capacity());
    memory.resize(3 * share * threads, 1.0);
    let start = AtomicPtr::new(memory.as_mut_ptr());
    let seconds = best(PATIENCE, || {
        pool.run(threads, threads, &|task, _| {
            // SAFETY: tasks have distinct parts of the memory, which lives until the run is over.
            let part = unsafe {
                let at = start.load(Ordering::Relaxed).add(3 * share * task);
                std::slice::from_raw_parts_mut(at, 3 * share)
            };
            let (a, rest) = part.split_at_mut(share);
            let (b, c) = rest.split_at(share);
            for _ in 0..times {
                isa.run(Triad { a, b, c, scale: black_box(0.5) });
                black_box(&mut *a);
            }
        });
    });
    (3 * size_of::<f32>() * share * threads * times) as f64 / seconds
}

/// Seconds of the fastest round: others were disturbed.
fn best(patience: Duration, mut round: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    // The first round wakes threads and clocks up.
    round();
    while best == f64::INFINITY || begin.elapsed() < patience {
        let start = Instant::now();
        round();
        best = best.min(start.elapsed().as_secs_f64());
    }
    // A clock that stands still measures nothing.
    best.max(1e-9)
}

struct Triad<'a> {
    a: &'a mut [f32],
    b: &'a [f32],
    c: &'a [f32],
    scale: f32,
}

impl Work for Triad<'_> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        for ((a, &b), &c) in self.a.iter_mut().zip(self.b).zip(self.c) {
            *a = L::mul_add(c, self.scale, b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_numbers() {
        for isa in Isa::available() {
            let limits = Limits::measure(isa, &Pool::new(2));
            assert!(limits.flops.is_finite() && limits.flops > 1e6, "{isa}: {limits:?}");
            assert!(limits.bandwidth.is_finite() && limits.bandwidth > 1e6, "{isa}: {limits:?}");
            let flops_bound = limits.seconds(limits.flops, 0.0);
            assert!((flops_bound - 1.0).abs() < 1e-9, "as many operations as in one second take one");
        }
    }

    #[test]
    fn bfloat16_is_no_slower_than_nothing() {
        for unit in Bf16Unit::available() {
            let rate = bf16_flops(unit, &Pool::new(2), Duration::from_millis(5));
            assert_eq!(rate.is_none(), unit == Bf16Unit::EMULATED, "{unit}");
            assert!(rate.is_none_or(|rate| rate.is_finite() && rate > 1e6), "{unit}: {rate:?}");
        }
    }
}
