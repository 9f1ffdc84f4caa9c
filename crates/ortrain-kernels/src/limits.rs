//! Measured peak rates of this machine: multiply-adds per second and bytes per second.
//!
//! Rates are measured, not looked up, because clock rates change and other processes share the caches. Compare a
//! kernel's time only with limits that were measured in the same minutes.

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

/// Combined limits of all threads of a pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Floating-point operations per second in f32 on registers (a multiply-add counts as two).
    pub flops: f64,
    /// Memory bandwidth beyond the caches in bytes per second, for a loop with two loads and a store.
    pub bandwidth: f64,
}

/// Working set beyond the caches, in bytes. A larger set would take too much time and memory.
const MEMORY_WORKING_SET_BYTES: usize = 192 << 20;
/// Multiply-adds of a dependency chain in a round, which takes a tenth of a millisecond.
const ROUNDS: usize = 25_000;
/// Tile products of a dependency chain in a round. Each takes as long as sixteen vector operations.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
const AMX_ROUNDS: usize = ROUNDS / 16;
/// Duration of one measurement, of which the best round counts.
const MEASUREMENT_TIME: Duration = Duration::from_millis(40);
impl Limits {
    /// Measures the limits of an instruction-set level on the threads of a pool. Takes less than 0.3 s and temporarily
    /// allocates 192 MiB of memory.
    #[must_use]
    pub fn measure(isa: Isa, pool: &Pool) -> Limits {
        Limits {
            flops: measure_flops(isa, pool, MEASUREMENT_TIME),
            bandwidth: measure_bandwidth(isa, pool, MEMORY_WORKING_SET_BYTES),
        }
    }

    /// Returns the lower bound of the time for this work, in seconds: the longer of computing and of moving bytes.
    #[must_use]
    pub fn seconds(&self, flops: f64, bytes: f64) -> f64 {
        (flops / self.flops).max(bytes / self.bandwidth)
    }
}

/// Measures floating-point operations per second of multiply-adds on registers, on all threads of the pool. Returns the
/// best round within `patience`.
#[must_use]
pub fn measure_flops(isa: Isa, pool: &Pool, patience: Duration) -> f64 {
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
    work / best_time(patience, || pool.run(threads, threads, &|_, _| burst()))
}

/// Measures floating-point operations per second of bfloat16 products that are summed in f32 by a unit. Returns `None`
/// for the emulated unit, which has no rate of its own: its rate is at most [`flops`].
#[must_use]
pub fn measure_bf16_flops(unit: Bf16Unit, pool: &Pool, patience: Duration) -> Option<f64> {
    // Multiply-adds of a burst, and its function.
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
    Some(work / best_time(patience, || pool.run(threads, threads, &|_, _| burst())))
}

/// Measures the bandwidth of `a = b + c · s` in bytes per second over a working set of `bytes` bytes, on all threads of
/// the pool. Each thread has its share of the working set. Temporarily allocates the working set.
#[must_use]
pub fn measure_bandwidth(isa: Isa, pool: &Pool, bytes: usize) -> f64 {
    let threads = pool.num_threads();
    let share = (bytes / (3 * threads * size_of::<f32>())).max(1);
    // A round repeats small sets many times, so that the overhead of the pool is negligible.
    let times = ((1 << 20) / share).max(1);
    // The memory is filled, because untouched pages all map to the same page. Planes and arenas use large pages, too.
    let mut memory: Vec<f32> = Vec::with_capacity(3 * share * threads);
    prefer_large_pages(memory.as_mut_ptr().cast(), size_of::<f32>() * memory.capacity());
    memory.resize(3 * share * threads, 1.0);
    let start = AtomicPtr::new(memory.as_mut_ptr());
    let seconds = best_time(MEASUREMENT_TIME, || {
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

/// Returns the time of the fastest round in seconds: the others were disturbed.
fn best_time(patience: Duration, mut round: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    // The first round wakes up the threads and raises the clock rate.
    round();
    while best == f64::INFINITY || begin.elapsed() < patience {
        let start = Instant::now();
        round();
        best = best.min(start.elapsed().as_secs_f64());
    }
    // Avoids a division by zero if the clock is too coarse.
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
    fn limits_are_finite() {
        for isa in Isa::available() {
            let limits = Limits::measure(isa, &Pool::new(2));
            assert!(limits.flops.is_finite() && limits.flops > 1e6, "{isa}: {limits:?}");
            assert!(limits.bandwidth.is_finite() && limits.bandwidth > 1e6, "{isa}: {limits:?}");
            let flops_bound = limits.seconds(limits.flops, 0.0);
            assert!((flops_bound - 1.0).abs() < 1e-9, "a second of operations takes one second");
        }
    }

    #[test]
    fn only_the_emulated_unit_has_no_rate() {
        for unit in Bf16Unit::available() {
            let rate = measure_bf16_flops(unit, &Pool::new(2), Duration::from_millis(5));
            assert_eq!(rate.is_none(), unit == Bf16Unit::EMULATED, "{unit}");
            assert!(rate.is_none_or(|rate| rate.is_finite() && rate > 1e6), "{unit}: {rate:?}");
        }
    }
}
