//! Time of a complete training step without Python: `cargo bench -p ortrain --bench steps [-- NAME ROWS]`.
//!
//! A step is forward, loss, backward, AdamW, and a reset of the gradients, on a network of
//! `benches/workloads` with `ROWS` rows in a batch. The default is `mlp_tiny` with 16 rows, which shows the
//! overhead of a step. `THREADS=1,2` lists thread counts.
#![allow(clippy::print_stdout, reason = "printing is the purpose of this program")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::{Duration, Instant};

use common::{Workload, run_input};
use ortrain::backend;

/// Minimum total time of the measured steps.
const MEASUREMENT_TIME: Duration = Duration::from_secs(2);
/// Number of steps before the measurement. They plan programs and map memory.
const WARMUP_STEPS: usize = 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Cargo adds `--bench`.
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let (name, rows) = match arguments.as_slice() {
        [] => ("mlp_tiny", 16),
        [name, rows] => (name.as_str(), rows.parse()?),
        _ => return Err("usage: steps [NAME ROWS]".into()),
    };
    let threads = std::env::var("THREADS").unwrap_or_else(|_| "1,2".into());
    for threads in threads.split(',') {
        let threads = threads.parse()?;
        backend("cpu", threads)?;
        let mut times = steps(name, rows)?;
        times.sort_unstable();
        let [minimum, median] = [times[0], times[times.len() / 2]].map(|time| time.as_secs_f64() * 1e6);
        println!("{name}, {rows} rows, {threads} thread(s): median {median:.1} µs, minimum {minimum:.1} µs");
    }
    Ok(())
}

/// Returns the time of each step after the warm-up.
fn steps(name: &str, rows: usize) -> ortrain::Result<Vec<Duration>> {
    let mut run = Workload::new(name, rows);
    let batch = run.batch(0);
    let inputs = [run_input(&batch.0), run_input(&batch.1)];
    let mut times = Vec::new();
    let mut spent = Duration::ZERO;
    for count in 0.. {
        let start = Instant::now();
        run.module.train_step(&mut run.state, &inputs, &mut |_, _| Ok(()))?;
        run.optimizer.step(&mut run.state, &run.module)?;
        run.module.lazy_reset_grad();
        let time = start.elapsed();
        if count >= WARMUP_STEPS {
            times.push(time);
            spent += time;
        }
        if spent >= MEASUREMENT_TIME {
            break;
        }
    }
    Ok(times)
}
