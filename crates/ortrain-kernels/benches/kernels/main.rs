//! Benchmarks all kernels at the shapes of common networks, relative to the peak rates of the machine.
//!
//! `cargo bench -p ortrain-kernels --bench kernels -- [WORD...]` prints a line for each case with all of the words in
//! its name. The line has the time of the best run, and the share of the bound that the case reaches. The bound is the
//! longer of two times: the arithmetic at the measured rate of multiply-adds, and the minimum traffic at the measured
//! bandwidth of a working set of this size (see [`ortrain_kernels::limits`]). Both rates are measured in the same
//! process. `ORTRAIN_ISA` caps the level, `THREADS=1,2` selects numbers of threads.
//!
//! A family of kernels adds its list of [`Case`]s to [`cases`].
#![allow(clippy::print_stdout, reason = "it is what the program is for")]

mod attention;
mod bytes;
mod case;
mod conv;
mod gemm;
mod nests;
mod rows;
mod window;

use std::time::{Duration, Instant};

use case::Case;
use ortrain_expr::Precision;
use ortrain_kernels::{Bf16Unit, Isa, Pool, limits};

/// Duration of a case.
const CASE_TIME: Duration = Duration::from_millis(150);
/// Duration of a round. The best time of a case in a round is compared with the rate of multiply-adds in the same
/// round.
const ROUND_TIME: Duration = Duration::from_millis(6);
/// Working sets for the measurement of bandwidth, in bytes.
const WORKING_SETS: [usize; 6] = [256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 192 << 20];

fn cases() -> Vec<Case> {
    [
        gemm::cases(),
        bytes::cases(),
        attention::cases(),
        conv::cases(),
        window::cases(),
        nests::cases(),
        rows::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn main() {
    // Cargo passes its own flags.
    let words: Vec<String> = std::env::args().skip(1).filter(|pattern| !pattern.starts_with('-')).collect();
    let isa = Isa::detect().expect("ORTRAIN_ISA is a level or not set");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = match std::env::var("THREADS") {
        Ok(list) => list.split(',').filter_map(|n| n.parse().ok()).collect(),
        Err(_) if cores > 1 => vec![1, cores],
        Err(_) => vec![1],
    };
    let cases = cases();
    for threads in threads {
        let pool = Pool::new(threads);
        let bandwidth = WORKING_SETS.map(|bytes| limits::measure_bandwidth(isa, &pool, bytes));
        let rate = limits::measure_flops(isa, &pool, CASE_TIME);
        let sets = WORKING_SETS.iter().zip(bandwidth).map(|(bytes, rate)| {
            let size = if *bytes < 1 << 20 {
                format!("{} KiB", bytes >> 10)
            } else {
                format!("{} MiB", bytes >> 20)
            };
            format!("{:.0} GB/s in {size}", rate / 1e9)
        });
        println!(
            "\n{isa}, {threads} thread(s): {:.0} GFLOP/s; {}",
            rate / 1e9,
            sets.collect::<Vec<_>>().join(", ")
        );
        println!("{:56} {:>10} {:>9} {:>8} {:>8}", "kernel", "time µs", "GFLOP/s", "GB/s", "share");
        for case in &cases {
            let line = case.name.to_lowercase();
            if words.iter().any(|pattern| !line.contains(&pattern.to_lowercase())) {
                continue;
            }
            let set = WORKING_SETS
                .iter()
                .position(|&bytes| case.bytes <= bytes as f64)
                .unwrap_or(WORKING_SETS.len() - 1);
            let memory = case.bytes / bandwidth[set];
            let Measure { seconds, share, compute } = measure(case, isa, &pool, memory);
            println!(
                "{:56} {:>10.1} {:>9.1} {:>8.1} {:>6.0} % {}",
                case.name,
                seconds * 1e6,
                case.flops / seconds / 1e9,
                case.bytes / seconds / 1e9,
                share * 100.0,
                if compute { "of the multiply-adds" } else { "of the bandwidth" }
            );
        }
    }
}

/// Result of a case.
struct Measure {
    /// Time of the fastest run in seconds.
    seconds: f64,
    /// Median over the rounds of the share of the bound.
    share: f64,
    /// True if the bound is arithmetic.
    compute: bool,
}

/// Returns the peak rate of the operations of a case on registers: in f32, or in the best bfloat16 unit, which computes
/// several products of terms for each operation.
fn peak_rate(case: &Case, isa: Isa, pool: &Pool) -> f64 {
    let rounded = case.precision != Precision::F32;
    let unit =
        rounded.then(|| limits::measure_bf16_flops(Bf16Unit::detect(isa), pool, ROUND_TIME / 8)).flatten();
    let rate = unit.unwrap_or_else(|| limits::measure_flops(isa, pool, ROUND_TIME / 8));
    case.rate * rate / case.precision.products().len() as f64
}

/// Runs a case in rounds. Clock rates change, so each round measures the rate of multiply-adds again. `memory` is the
/// minimum time of the case's traffic in seconds.
fn measure(case: &Case, isa: Isa, pool: &Pool, memory: f64) -> Measure {
    let mut run = (case.compile)(isa, pool.num_threads());
    run(pool);
    let begin = Instant::now();
    let mut rounds = Vec::new();
    while rounds.len() < 3 || begin.elapsed() < CASE_TIME {
        let compute = case.flops / peak_rate(case, isa, pool);
        let round = Instant::now();
        let mut best = f64::INFINITY;
        while best == f64::INFINITY || round.elapsed() < ROUND_TIME {
            let start = Instant::now();
            run(pool);
            best = best.min(start.elapsed().as_secs_f64());
        }
        rounds.push((compute.max(memory) / best, best, compute > memory));
    }
    rounds.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (share, _, compute) = rounds[rounds.len() / 2];
    let seconds = rounds.iter().map(|round| round.1).fold(f64::INFINITY, f64::min);
    Measure { seconds, share, compute }
}
