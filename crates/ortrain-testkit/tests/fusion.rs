//! Fusion and the planner change no result, on random programs.

use std::sync::Arc;

use ortrain_program::{Backend, Entry, Reference};
use ortrain_testkit::programs::{Kinds, RandomProgram, run_program};
use ortrain_testkit::tolerance;

const ALL: Kinds = Kinds { jumps: true, narrow: true, windows: true, large: false };
const ENTRIES: [Entry; 2] = [Entry::Accumulate, Entry::Overwrite];

/// By the reference evaluator, which gives every buffer memory of its own: bit for bit.
#[test]
fn fused_programs_mean_the_same() {
    let (mut instructions, mut fewer) = (0, 0);
    for seed in 0..1500 {
        let plain = Arc::new(RandomProgram::new(seed, ALL).finish(false));
        let fused = Arc::new(RandomProgram::new(seed, ALL).finish(true));
        for entry in ENTRIES {
            let want = run_program(&plain, &Reference, seed, entry);
            let got = run_program(&fused, &Reference, seed, entry);
            assert!(got == want, "seed {seed}, {entry:?}\n{plain}\n{fused}");
        }
        instructions += plain.instructions.len();
        fewer += plain.instructions.len() - fused.instructions.len();
    }
    // That there was something to see.
    assert!(5 * fewer > instructions, "{fewer} of {instructions} instructions were fused");
}

/// On the CPU, where buffers share bytes as the plan says.
#[test]
fn planned_programs_mean_the_same() {
    let kinds = Kinds { jumps: false, narrow: false, ..ALL };
    let cpu: Arc<dyn Backend> = Arc::new(ortrain_cpu::Cpu::new());
    for seed in 0..1500 {
        let plain = Arc::new(RandomProgram::new(seed, kinds).finish(false));
        let fused = Arc::new(RandomProgram::new(seed, kinds).finish(true));
        for entry in ENTRIES {
            let want = run_program(&plain, &Reference, seed, entry);
            let got = run_program(&fused, &*cpu, seed, entry);
            for (k, (got, want)) in got.iter().zip(&want).enumerate() {
                let numbers = |bytes: &[u8]| -> Vec<f64> {
                    bytes
                        .chunks_exact(4)
                        .map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
                        .collect()
                };
                for (x, y) in numbers(got).into_iter().zip(numbers(want)) {
                    let close = (x - y).abs() <= tolerance::FLOAT32 * y.abs().max(1.0);
                    assert!(close, "seed {seed}, {entry:?}, result {k}: {x} is not {y}\n{plain}\n{fused}");
                }
            }
        }
    }
}

/// On the CPU, with images that are split: the same bits on any number of threads.
#[test]
fn threads_change_no_bit() {
    let kinds = Kinds { large: true, ..ALL };
    let cpu = ortrain_cpu::Cpu::new();
    let before = ortrain_cpu::Cpu::num_threads();
    let (mut convolutions, mut windows) = (0, 0);
    for seed in 0..120 {
        let program = Arc::new(RandomProgram::new(seed, kinds).finish(true));
        let count = |name: &str| program.instructions.iter().filter(|i| i.step.name() == name).count();
        convolutions += count("Conv");
        windows += count("Window");
        let outcomes = [1, 2, 3].map(|threads| {
            ortrain_cpu::Cpu::set_num_threads(threads);
            run_program(&program, &cpu, seed, Entry::Accumulate)
        });
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "seed {seed}\n{program}");
    }
    ortrain_cpu::Cpu::set_num_threads(before);
    // That there was something to split.
    assert!(convolutions > 20 && windows > 20, "{convolutions} convolutions, {windows} windows");
}
