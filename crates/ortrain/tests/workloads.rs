//! Complete networks: bit-identical results at every thread count.

mod common;

use common::{Workload, gradient, train};
use ortrain::backend;

/// Trains two steps and returns the bits of losses, gradients and parameters (including running statistics).
fn trained(name: &str, rows: usize, threads: usize) -> Vec<u32> {
    backend("cpu", threads).expect("there is a CPU");
    let mut run = Workload::new(name, rows);
    let mut values = Vec::new();
    for step in 0..2 {
        let batch = run.batch(step);
        let loss = train(&mut run.module, &mut run.state, &batch);
        assert!(loss.is_finite(), "{name}: loss {loss}");
        values.push(loss);
        for parameter in &run.trained {
            let found = gradient(&run.module, parameter);
            assert!(found.iter().any(|&value| value != 0.0), "{name}: {parameter} has no gradient");
            values.extend(found);
        }
        run.optimizer.step(&mut run.state, &run.module).expect("the optimizer steps");
        run.module.lazy_reset_grad();
    }
    values.extend(run.module.copy_parameters_to_buffer(&run.state, false).expect("they are float32"));
    values.into_iter().map(f32::to_bits).collect()
}

/// Asserts that training has the same bits at each of these thread counts as on one thread.
fn same_bits(name: &str, rows: usize, threads: &[usize]) {
    let single_thread = trained(name, rows, 1);
    for &threads in threads {
        let many_threads = trained(name, rows, threads);
        let differing = single_thread.iter().zip(&many_threads).filter(|(a, b)| a != b).count();
        assert_eq!((single_thread.len(), differing), (many_threads.len(), 0), "{name} at {threads} threads");
    }
}

#[test]
fn mlp() {
    same_bits("mlp", 64, &[2, 3]);
}

#[test]
fn lenet() {
    same_bits("lenet", 64, &[2, 3]);
}

/// Max pooling stores the position of each maximum in one byte for its gradient.
#[test]
fn positions_of_maxima_are_bytes() {
    for (name, rows, poolings) in
        [("lenet", 64, vec![64 * 16 * 14 * 14, 64 * 32 * 5 * 5]), ("resnet18_224", 4, vec![4 * 64 * 56 * 56])]
    {
        let mut run = Workload::new(name, rows);
        let batch = run.batch(0);
        train(&mut run.module, &mut run.state, &batch);
        let dump = run.module.dump();
        for elements in poolings {
            assert!(dump.contains(&format!(": uint8[{elements}] work@")), "{name}\n{dump}");
        }
    }
}

#[test]
fn mobilenetv2() {
    same_bits("mobilenetv2_96", 8, &[2]);
}

#[test]
fn resnet18() {
    same_bits("resnet18_224", 4, &[2]);
}
