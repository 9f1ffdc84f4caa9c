//! Matrices that many products with few rows read are packed into panels, and the results remain the same.

use std::sync::Arc;

use ortrain_expr::Precision;
use ortrain_program::{GradientMode, Instruction, Program};
use ortrain_testkit::programs::{reference, run_program};
use ortrain_testkit::suites::panels::{self, nets};

mod common;

/// Counts packing maps, products with panels, and other products.
fn counts(program: &Program, columns: usize) -> [usize; 3] {
    let mut counts = [0; 3];
    for scheduled in &program.instructions {
        match &scheduled.instruction {
            Instruction::Nest(nest) if nest.dims.as_slice() == [columns / 16, columns, 16] => counts[0] += 1,
            Instruction::MatMul(m) if m.batch.as_slice() == [columns / 16] && m.n == 16 => counts[1] += 1,
            Instruction::MatMul(_) => counts[2] += 1,
            _ => {}
        }
    }
    counts
}

#[test]
fn shared_matrices_are_packed() {
    for (net, expected) in nets() {
        let program = net.program(true);
        assert_eq!(counts(&program, net.columns), expected, "{net:?}\n{program}");
        // A map that transposed the matrix for these products only is removed.
        let maps =
            program.instructions.iter().filter(|scheduled| scheduled.instruction.name() == "Map").count();
        assert_eq!(maps, expected[0] + usize::from(net.changed.is_some()), "{net:?}\n{program}");
    }
}

/// Bit-identical on the reference evaluator; on the CPU at every level, and there at every thread count.
#[test]
fn panels_change_no_result() {
    let before = ortrain_cpu::Cpu::num_threads();
    for (net, _) in nets().into_iter().filter(|(net, _)| net.precision == Precision::F32) {
        let [plain, fused] = [false, true].map(|fused| Arc::new(net.program(fused)));
        let expected = run_program(&plain, &reference(), 3, GradientMode::Accumulate);
        assert!(run_program(&fused, &reference(), 3, GradientMode::Accumulate) == expected, "{net:?}");
        for backend in common::every_level() {
            let outcomes = [1, 2, 3].map(|threads| {
                ortrain_cpu::Cpu::set_num_threads(threads);
                run_program(&fused, &backend, 3, GradientMode::Accumulate)
            });
            assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{net:?}");
        }
    }
    ortrain_cpu::Cpu::set_num_threads(before);
    common::every_level().iter().for_each(|backend| panels::agree(backend).passes());
}
