//! Matrices that many products of few rows read are laid in panels, and results stay what they are.

use std::sync::Arc;

use ortrain_expr::{Access, Builder, DType, Precision, Reg, Type};
use ortrain_program::{
    BufferId, Entries, Entry, Instruction, Load, MatMul, Nest, Operand, PlaneId, Program, ProgramBuilder,
};
use ortrain_testkit::programs::{numbers, reference, run_program};
use ortrain_testkit::tolerance;

mod common;

/// A state that is multiplied with the same square matrix at every step.
#[derive(Clone, Copy, Debug)]
struct Net {
    rows: usize,
    columns: usize,
    steps: usize,
    /// The matrix is read on its side: by its strides, or through a map that turns it.
    turned: Turned,
    /// The step before which the matrix is changed.
    changed: Option<usize>,
    /// The epilogue asks where it is.
    looks: bool,
    precision: Precision,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Turned {
    No,
    ByStrides,
    ByMap,
}

const NET: Net = Net {
    rows: 16,
    columns: 96,
    steps: 9,
    turned: Turned::No,
    changed: None,
    looks: false,
    precision: Precision::F32,
};

impl Net {
    fn program(&self, fused: bool) -> Program {
        let &Net { rows, columns, steps, turned, changed, looks, precision } = self;
        let node: Arc<str> = "node".into();
        let mut b = ProgramBuilder::new().precision(precision);
        let weights = b.plane("weights", DType::F32, columns * columns, PlaneId(0), 0);
        let bias = b.plane("bias", DType::F32, columns, PlaneId(0), 4 * columns * columns);
        let first = b.work("state", DType::F32, rows * columns);
        let whole = |id: BufferId| Operand::whole(id, DType::F32, &[rows, columns]);
        let square = |id: BufferId| Operand::whole(id, DType::F32, &[columns, columns]);
        let side = |id: BufferId| {
            let mut side = square(id);
            side.access.strides.reverse();
            side
        };
        let map = |from: Operand, to: Operand, f: fn(&mut Builder, Reg) -> Reg| {
            let mut e = Builder::new();
            let x = e.load(0, Type::F32);
            let result = f(&mut e, x);
            Instruction::from(Nest {
                dims: [columns, columns].into_iter().collect(),
                inner: 0,
                segments: None,
                loads: vec![Load::Buffer(from)],
                expr: e.finish(&[result]),
                reductions: Vec::new(),
                stores: vec![to],
            })
        };
        let factor = match turned {
            Turned::No => square(weights),
            Turned::ByStrides => side(weights),
            Turned::ByMap => {
                let factor = b.work("turned", DType::F32, columns * columns);
                let step = map(square(weights), side(factor), |_, x| x);
                b.emit(step, Entries::ALL, &node).expect("it is sound");
                square(factor)
            }
        };
        let mut state = first;
        for step in 0..steps {
            if changed == Some(step) {
                let step = map(square(weights), square(weights), |b, x| b.mul(x, x));
                b.emit(step, Entries::ALL, &node).expect("it is sound");
            }
            let next = b.work("state", DType::F32, rows * columns);
            let mut e = Builder::new();
            let (product, bias_of) = (e.load(0, Type::F32), e.load(1, Type::F32));
            let small = e.constant(Type::F32, 0.1);
            let mut result = e.mul(product, small);
            result = e.add(result, bias_of);
            if looks {
                let column = e.coordinate(1);
                let column = e.convert(column, Type::F32);
                result = e.add(result, column);
            }
            let along = Access::broadcast(DType::F32, &[columns], &[rows, columns]);
            let bias = Load::Buffer(Operand { buffer: bias, access: along });
            let epilogue = Nest {
                dims: [rows, columns].into_iter().collect(),
                inner: 0,
                segments: None,
                loads: vec![Load::Accumulator(DType::F32), bias],
                expr: e.finish(&[result]),
                reductions: Vec::new(),
                stores: vec![whole(next)],
            };
            let product = MatMul {
                batch: [].into_iter().collect(),
                m: rows,
                n: columns,
                k: columns,
                a: whole(state),
                b: factor.clone(),
                rounded: [None; 2],
                precision: Precision::F32,
                epilogue,
            };
            b.emit(Instruction::from(product), Entries::ALL, &node).expect("it is sound");
            state = next;
        }
        let (inputs, outputs) = (vec![first], vec![state]);
        if fused { b.finish(inputs, outputs) } else { b.finish_unfused(inputs, outputs) }
            .expect("it is small")
    }
}

/// Maps that lay a matrix out, products that read panels, and other products.
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

/// Nets with what is to be counted in their programs.
fn nets() -> Vec<(Net, [usize; 3])> {
    let turned = [Turned::ByStrides, Turned::ByMap].map(|turned| (Net { turned, ..NET }, [1, 9, 0]));
    let others = [
        (NET, [1, 9, 0]),
        (Net { rows: 9, columns: 128, ..NET }, [1, 9, 0]),
        (Net { rows: 64, ..NET }, [1, 9, 0]),
        (Net { rows: 13, columns: 112, steps: 8, ..NET }, [1, 8, 0]),
        // What was read before a change is laid out apart from what is read after it.
        (Net { steps: 17, changed: Some(8), ..NET }, [2, 17, 0]),
        (Net { steps: 16, changed: Some(4), ..NET }, [1, 12, 4]),
        (Net { steps: 12, changed: Some(6), ..NET }, [0, 0, 12]),
        (Net { steps: 7, ..NET }, [0, 0, 7]),
        (Net { rows: 8, ..NET }, [0, 0, 9]),
        (Net { rows: 65, ..NET }, [0, 0, 9]),
        (Net { columns: 100, ..NET }, [0, 0, 9]),
        (Net { columns: 80, ..NET }, [0, 0, 9]),
        (Net { looks: true, ..NET }, [0, 0, 9]),
        (Net { rows: 17, precision: Precision::Bf16, ..NET }, [0, 0, 9]),
        (Net { rows: 16, precision: Precision::Bf16, ..NET }, [1, 9, 0]),
    ];
    turned.into_iter().chain(others).collect()
}

#[test]
fn what_many_products_read_lies_in_panels() {
    for (net, want) in nets() {
        let program = net.program(true);
        assert_eq!(counts(&program, net.columns), want, "{net:?}\n{program}");
        // A map that turned the matrix for these products alone is gone.
        let maps =
            program.instructions.iter().filter(|scheduled| scheduled.instruction.name() == "Map").count();
        assert_eq!(maps, want[0] + usize::from(net.changed.is_some()), "{net:?}\n{program}");
    }
}

/// By the reference evaluator bit for bit; on the CPU at every level, and there on any number of threads the same.
#[test]
fn panels_change_no_result() {
    let before = ortrain_cpu::Cpu::num_threads();
    for (net, _) in nets().into_iter().filter(|(net, _)| net.precision == Precision::F32) {
        let [plain, fused] = [false, true].map(|fused| Arc::new(net.program(fused)));
        let want = run_program(&plain, &reference(), 3, Entry::Accumulate);
        assert!(run_program(&fused, &reference(), 3, Entry::Accumulate) == want, "{net:?}");
        for backend in common::every_level() {
            let outcomes = [1, 2, 3].map(|threads| {
                ortrain_cpu::Cpu::set_num_threads(threads);
                run_program(&fused, &backend, 3, Entry::Accumulate)
            });
            assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{net:?}");
            let [got, want] = [&outcomes[0], &want].map(|results| numbers(&results[0]).collect::<Vec<_>>());
            let largest = want.iter().fold(0f64, |most, x| most.max(x.abs()));
            for (x, y) in got.iter().zip(&want) {
                assert!((x - y).abs() <= tolerance::FLOAT32 * largest, "{net:?}: {x} is not {y}");
            }
        }
    }
    ortrain_cpu::Cpu::set_num_threads(before);
}
