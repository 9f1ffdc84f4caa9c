//! Measures the peak rates of the machine: `cargo bench -p ortrain-kernels --bench limits`.
//!
//! Measures with one thread and with one thread per core: multiply-adds in f32 at every instruction-set level,
//! multiply-adds in bfloat16 with every unit of the processor, and the bandwidth of working sets from the second-level
//! cache to memory. All threads share a working set. `THREADS=1,2` selects other numbers of threads. Each rate is the
//! best of its rounds.
#![allow(clippy::print_stdout, reason = "it is what the program is for")]

use std::time::Duration;

use ortrain_kernels::{Bf16Unit, Isa, Pool, limits};

/// Duration of one measurement.
const MEASUREMENT_TIME: Duration = Duration::from_millis(300);
/// Sizes of the working sets, in KiB.
const WORKING_SETS_KIB: [usize; 7] = [256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 192 << 10, 512 << 10];

fn main() {
    let best = Isa::detect().expect("ORTRAIN_ISA is a level or not set");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = match std::env::var("THREADS") {
        Ok(list) => list.split(',').filter_map(|n| n.parse().ok()).collect(),
        Err(_) if cores > 1 => vec![1, cores],
        Err(_) => vec![1],
    };
    for threads in threads {
        let pool = Pool::new(threads);
        println!("{threads} thread(s)");
        for isa in Isa::available() {
            let rate = limits::measure_flops(isa, &pool, MEASUREMENT_TIME);
            println!("  f32 multiply-adds, {:8} {:>10.0} GFLOP/s", isa.name(), rate / 1e9);
        }
        for unit in Bf16Unit::available() {
            if let Some(rate) = limits::measure_bf16_flops(unit, &pool, MEASUREMENT_TIME) {
                println!("  bfloat16 multiply-adds, {:11} {:>10.0} GFLOP/s", unit.name(), rate / 1e9);
            }
        }
        for kibibytes in WORKING_SETS_KIB {
            let rate = limits::measure_bandwidth(best, &pool, kibibytes << 10);
            println!("  bandwidth in {kibibytes:>6} KiB    {:>12.1} GB/s", rate / 1e9);
        }
    }
}
