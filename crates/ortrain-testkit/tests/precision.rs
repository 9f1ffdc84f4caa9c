//! bfloat16 inner products: the CPU rounds like the reference evaluator, at every level, and everything else
//! is unchanged.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

use std::sync::Arc;

use ortrain_cpu::Cpu;
use ortrain_expr::Precision;
use ortrain_graph::{Attrs, DType, Tensor};
use ortrain_kernels::Isa;
use ortrain_program::{Backend, Bf16Fallback, GradientMode, Instruction, Program, Reference};
use ortrain_testkit::programs::{Kinds, RandomProgram, Size, numbers, reference, run_program};
use ortrain_testkit::suites::precision::{ROUNDED, agree, products};
use ortrain_testkit::{
    CaseBuilder, Fill, check_backend_at, compile_with_precision, gradient_graph, run_with_precision,
    tolerance,
};

const KINDS: Kinds = Kinds {
    jumps: false,
    narrow: false,
    windows: true,
    parts: false,
    updates: false,
    segments: false,
    size: Size::Middle,
};

/// Returns the CPU at a level, with any unit for a precision.
fn cpu(isa: Isa, precision: Precision) -> Arc<dyn Backend> {
    Cpu::with_isa(isa).with_precision(precision, Bf16Fallback::Emulated).unwrap()
}

/// Returns the number of a program's instructions that round factors.
fn rounded_instruction_count(program: &Program) -> usize {
    program
        .instructions
        .iter()
        .filter(|scheduled| scheduled.instruction.precision() != Precision::F32)
        .count()
}

/// Products and convolutions use the precision if it is worthwhile; all other instructions are the same as in
/// `f32`.
#[test]
fn nothing_else_changes() {
    let mut rounded_count = 0;
    for seed in 0..300 {
        let plain = RandomProgram::new(seed, KINDS).finish(true);
        let same = RandomProgram::new(seed, KINDS).precision(Precision::F32).finish(true);
        assert_eq!(plain.to_string(), same.to_string());
        for precision in ROUNDED {
            let rounded = RandomProgram::new(seed, KINDS).precision(precision).finish(true);
            for scheduled in &rounded.instructions {
                let expected = match &scheduled.instruction {
                    Instruction::MatMul(m) => precision.for_product([m.m, m.n, m.k]),
                    Instruction::QuantizedMatMul(m) => precision.for_product([m.m, m.n, m.k]),
                    Instruction::Conv(c) => precision.for_product(c.shape.product_sides()),
                    _ => Precision::F32,
                };
                assert_eq!(scheduled.instruction.precision(), expected, "{rounded}");
            }
            rounded_count += rounded_instruction_count(&rounded);
            let without = rounded.to_string().replace(&format!(" {precision}  ("), "  (");
            assert_eq!(without, plain.to_string());
        }
    }
    assert!(rounded_count > 300, "{rounded_count} instructions round");
}

/// Forward: the rounded factors are inputs, so both round the same numbers. With 8 bits, results differ from
/// `f32`.
#[test]
fn factors_are_rounded_as_the_reference_rounds_them() {
    for case in products() {
        for precision in ROUNDED {
            let program = compile_with_precision(case.graph.clone(), &case.inputs, precision).unwrap();
            assert_eq!(rounded_instruction_count(&program), 1, "{}\n{program}", case.name);
            for isa in Isa::available() {
                let backend = cpu(isa, precision);
                check_backend_at(&case, &backend, false, precision, tolerance::FLOAT32).unwrap();
                let narrow = case.inputs[0].dtype() != DType::F32;
                let at = |backend, precision| {
                    run_with_precision(&case.graph, &case.inputs, backend, precision).unwrap()
                };
                let exact = at(Arc::new(Cpu::with_isa(isa)) as Arc<dyn Backend>, Precision::F32);
                let differs = at(backend, precision) != exact;
                assert!(
                    differs || narrow || precision != Precision::Bf16,
                    "{}: nothing is rounded",
                    case.name
                );
            }
        }
    }
}

/// Backward: gradients of products are products.
#[test]
fn gradients_are_rounded_as_the_reference_rounds_them() {
    for case in products() {
        for precision in ROUNDED {
            let graph = gradient_graph(&case).unwrap();
            let program = compile_with_precision(graph, &case.inputs, precision).unwrap();
            assert!(rounded_instruction_count(&program) >= 2, "{}\n{program}", case.name);
        }
    }
    agree(&(Arc::new(Cpu::new().unwrap()) as Arc<dyn Backend>)).passes();
}

/// Fusion preserves every rounding, and the CPU agrees.
#[test]
fn random_programs_mean_the_same() {
    let mut rounded = 0;
    for precision in ROUNDED {
        let cpu = cpu(Isa::detect().unwrap(), precision);
        for seed in 0..60 {
            let plain = Arc::new(RandomProgram::new(seed, KINDS).precision(precision).finish(false));
            let fused = Arc::new(RandomProgram::new(seed, KINDS).precision(precision).finish(true));
            rounded += rounded_instruction_count(&fused);
            let expected = run_program(&plain, &reference(), seed, GradientMode::Overwrite);
            assert!(
                run_program(&fused, &reference(), seed, GradientMode::Overwrite) == expected,
                "seed {seed}\n{fused}"
            );
            let got = run_program(&fused, &cpu, seed, GradientMode::Overwrite);
            for (k, (got, expected)) in got.iter().zip(&expected).enumerate() {
                for (x, y) in numbers(got).zip(numbers(expected)) {
                    let close = (x - y).abs() <= tolerance::for_rounded_factors(precision) * y.abs().max(1.0);
                    assert!(close, "seed {seed}, {precision}, result {k}: {x} is not {y}\n{fused}");
                }
            }
        }
    }
    assert!(rounded > 60, "{rounded} instructions round");
}

/// On images that are split: bit-identical at every thread count.
#[test]
fn threads_change_no_bit() {
    let before = Cpu::num_threads();
    let mut rounded = 0;
    for precision in ROUNDED {
        let cpu = cpu(Isa::detect().unwrap(), precision);
        for seed in 0..40 {
            let kinds = Kinds { size: Size::Large, ..KINDS };
            let program = Arc::new(RandomProgram::new(seed, kinds).precision(precision).finish(true));
            rounded += rounded_instruction_count(&program);
            let outcomes = [1, 2, 3].map(|threads| {
                Cpu::set_num_threads(threads);
                run_program(&program, &cpu, seed, GradientMode::Accumulate)
            });
            assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "seed {seed}\n{program}");
        }
    }
    Cpu::set_num_threads(before);
    assert!(rounded > 10, "{rounded} instructions round");
}

/// Infinity and NaN pass through as in `f32`; only `bf16` turns the largest numbers into infinity.
#[test]
fn non_finite_values_pass_through() {
    let (rows, terms) = (17, 20);
    let mut b = CaseBuilder::new("MatMul", "not finite");
    let mut left = vec![1.0; rows * terms];
    let special = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 3.4e38, -3.4e38];
    for (row, value) in special.into_iter().enumerate() {
        left[row * terms + 3] = value;
    }
    // Infinities of both signs in one sum.
    (left[5 * terms], left[5 * terms + 1]) = (f64::INFINITY, f64::NEG_INFINITY);
    let x = b.float(&[rows, terms], &Fill::Exactly(left));
    let ones = b.constant(Tensor::filled(DType::F32, &[terms, rows], 1.0));
    let y = b.node("MatMul", &[x, ones], Attrs::new());
    let case = b.outputs(&[y]);
    for precision in ROUNDED {
        let mut backends = vec![Arc::new(Reference) as Arc<dyn Backend>];
        backends.extend(Isa::available().into_iter().map(|isa| cpu(isa, precision)));
        for backend in backends {
            let actual = run_with_precision(&case.graph, &case.inputs, backend, precision)
                .unwrap()
                .remove(0)
                .to_vec::<f32>();
            let first = |row: usize| actual[row * rows];
            assert_eq!(first(0), f32::INFINITY, "{precision}");
            assert_eq!(first(1), f32::NEG_INFINITY, "{precision}");
            assert!(first(2).is_nan() && first(5).is_nan(), "{precision}");
            match precision {
                Precision::Bf16 => assert_eq!([first(3), first(4)], [f32::INFINITY, f32::NEG_INFINITY]),
                _ => assert!(
                    first(3) > 3.39e38 && first(3).is_finite() && first(4) == -first(3),
                    "{precision}"
                ),
            }
            assert_eq!(first(6), terms as f32);
        }
    }
}

/// A program that rounds is rejected if no unit was selected for it.
#[test]
fn rounding_requires_selected_unit() {
    let program = (0..)
        .map(|seed| RandomProgram::new(seed, KINDS).precision(Precision::Bf16).finish(true))
        .find(|program| rounded_instruction_count(program) > 0)
        .unwrap();
    let refused = Cpu::new().unwrap().compile(Arc::new(program)).unwrap_err();
    assert_eq!(refused.reason, "its factors are bf16, but no bfloat16 unit was selected");
}
