//! Training is bit-identical at every thread count and in every run.

mod common;

use ortrain::backend;

/// Rows of a batch, sufficient for several threads in every kernel.
const ROWS: usize = 20_000;

/// Returns the bits of losses and parameters after some steps.
fn train_bits(threads: usize) -> Vec<u32> {
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
    let expected = train_bits(1);
    assert_eq!(expected, train_bits(1), "two runs differ");
    for threads in [2, 3] {
        assert_eq!(expected, train_bits(threads), "{threads} threads differ from one");
    }
}

/// Returns the bits of losses and parameters of a network with stored masks, and a dump of its program.
fn trained_with_dropout(threads: usize) -> (Vec<u32>, String) {
    backend("cpu", threads).expect("there is a CPU");
    let mut run = common::Workload::with_dropout("mlp", 300);
    let mut bits = Vec::new();
    for step in 0..3 {
        let batch = run.batch(step);
        bits.push(common::train(&mut run.module, &mut run.state, &batch).to_bits());
        run.optimizer.step(&mut run.state, &run.module).expect("the optimizer steps");
        run.module.lazy_reset_grad();
    }
    let parameters = run.module.copy_parameters_to_buffer(&run.state, false).expect("they are float32");
    bits.extend(parameters.into_iter().map(f32::to_bits));
    (bits, run.module.dump())
}

#[test]
fn same_bits_with_bit_masks() {
    let (expected, dump) = trained_with_dropout(1);
    // 300 rows of 512.
    assert!(dump.contains("uint8[19200] work@"), "{dump}");
    for threads in [2, 3] {
        assert_eq!(expected, trained_with_dropout(threads).0, "{threads} threads differ from one");
    }
}

/// Returns the bits of parameters and slots after some optimizer steps.
fn optimizer_bits(optimizer: &ortrain::ModelSource, threads: usize) -> Vec<Vec<u8>> {
    backend("cpu", threads).expect("there is a CPU");
    let mut run = common::Workload::new("mlp", 16);
    let mut optimizer = ortrain::Optimizer::replacing(optimizer.clone(), &mut run.state, &run.module)
        .expect("it is an optimizer model");
    for step in 0..3 {
        let batch = run.batch(step);
        common::train(&mut run.module, &mut run.state, &batch);
        optimizer.step(&mut run.state, &run.module).expect("the optimizer steps");
        run.module.lazy_reset_grad();
    }
    let names: Vec<String> = run.state.names().map(str::to_owned).collect();
    let mut bits = Vec::new();
    for name in names {
        bits.push(
            run.state
                .parameter(&name)
                .expect("it is there")
                .to_tensor()
                .expect("it is on the host")
                .data()
                .to_vec(),
        );
        let slots = run.state.slots(&name).expect("it is there");
        bits.extend(slots.values().map(|slot| slot.data().to_vec()));
    }
    bits
}

#[test]
fn same_bits_of_every_optimizer() {
    let run = common::Workload::new("mlp", 16);
    let first = run.state.names().next().expect("there is one").to_owned();
    for (name, optimizer) in common::optimizers(&first) {
        let expected = optimizer_bits(&optimizer, 1);
        for threads in [2, 4] {
            assert!(
                expected == optimizer_bits(&optimizer, threads),
                "{name}: {threads} threads differ from one"
            );
        }
    }
}
