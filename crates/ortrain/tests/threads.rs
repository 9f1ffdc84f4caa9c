//! Training gives the same bits at every thread count and on every run.

mod common;

use ortrain::backend;

/// Rows of a batch: enough that every kernel has work for several threads.
const ROWS: usize = 20_000;

/// The bits of losses and parameters after some steps.
fn trained(threads: usize) -> Vec<u32> {
    backend("cpu", threads).expect("there is a CPU");
    let case = "mlp_adamw_ce";
    let mut state = common::state_of(case);
    let mut module = common::module_on(case, &mut state);
    let mut optimizer = common::optimizer_on(case, &mut state, &module);
    let mut bits = Vec::new();
    for step in 0..4 {
        bits.push(common::train(&mut module, &mut state, &common::batch(ROWS, step)).to_bits());
        optimizer.step(&mut state, &module).expect("the optimizer steps");
        module.lazy_reset_grad();
    }
    let parameters = module.copy_parameters_to_buffer(&state, false).expect("they are float32");
    bits.extend(parameters.into_iter().map(f32::to_bits));
    bits
}

#[test]
fn same_bits_at_every_thread_count() {
    let one = trained(1);
    assert_eq!(one, trained(1), "two runs differ");
    for threads in [2, 3] {
        assert_eq!(one, trained(threads), "{threads} threads differ from one");
    }
}
