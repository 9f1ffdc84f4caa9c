//! A state that is multiplied with the same matrix at every step: the matrix is packed into panels on targets
//! with panels.

use std::sync::Arc;

use ortrain_expr::{Access, Builder, DType, Precision, Reg, Type};
use ortrain_program::{
    Backend, BufferId, GradientMode, GradientModes, Instruction, Load, MatMul, Nest, Operand, PlaneId,
    Program, ProgramBuilder,
};

use super::Report;
use crate::programs::{numbers, reference, run_program};
use crate::tolerance;

/// A state that is multiplied with the same square matrix at every step.
#[derive(Clone, Copy, Debug)]
pub struct Net {
    rows: usize,
    /// Columns of the state: the size of the matrix.
    pub columns: usize,
    steps: usize,
    /// Transposition of the matrix: by its strides, or through a map that transposes it.
    transposition: Transposition,
    /// Step before which the matrix is updated.
    pub changed: Option<usize>,
    /// True if the epilogue reads its coordinates.
    looks: bool,
    /// Precision of the products.
    pub precision: Precision,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Transposition {
    No,
    ByStrides,
    ByMap,
}

const NET: Net = Net {
    rows: 16,
    columns: 96,
    steps: 9,
    transposition: Transposition::No,
    changed: None,
    looks: false,
    precision: Precision::F32,
};

impl Net {
    /// Builds the planned program of the steps, with or without fusion.
    ///
    /// # Panics
    /// Never: the program is valid and small.
    #[must_use]
    pub fn program(&self, fused: bool) -> Program {
        let &Net { rows, columns, steps, transposition, changed, looks, precision } = self;
        let node: Arc<str> = "node".into();
        let mut b = ProgramBuilder::new().with_precision(precision);
        let weights = b.plane("weights", DType::F32, columns * columns, PlaneId(0), 0);
        let bias = b.plane("bias", DType::F32, columns, PlaneId(0), 4 * columns * columns);
        let first = b.work("state", DType::F32, rows * columns);
        let contiguous = |id: BufferId| Operand::contiguous(id, DType::F32, &[rows, columns]);
        let square = |id: BufferId| Operand::contiguous(id, DType::F32, &[columns, columns]);
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
        let factor = match transposition {
            Transposition::No => square(weights),
            Transposition::ByStrides => side(weights),
            Transposition::ByMap => {
                let factor = b.work("turned", DType::F32, columns * columns);
                let step = map(square(weights), side(factor), |_, x| x);
                b.emit(step, GradientModes::ALL, &node).expect("it is valid");
                square(factor)
            }
        };
        let mut state = first;
        for step in 0..steps {
            if changed == Some(step) {
                let step = map(square(weights), square(weights), |b, x| b.mul(x, x));
                b.emit(step, GradientModes::ALL, &node).expect("it is valid");
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
                stores: vec![contiguous(next)],
            };
            let product = MatMul {
                batch: [].into_iter().collect(),
                m: rows,
                n: columns,
                k: columns,
                a: contiguous(state),
                b: factor.clone(),
                rounded: [None; 2],
                precision: Precision::F32,
                epilogue,
            };
            b.emit(Instruction::from(product), GradientModes::ALL, &node).expect("it is valid");
            state = next;
        }
        let (inputs, outputs) = (vec![first], vec![state]);
        if fused { b.finish(inputs, outputs) } else { b.finish_unfused(inputs, outputs) }
            .expect("it fits in memory")
    }
}

/// Returns nets with the expected counts in their programs on a target with panels: packing maps, products
/// with panels, and other products.
#[must_use]
pub fn nets() -> Vec<(Net, [usize; 3])> {
    let transposed_nets = [Transposition::ByStrides, Transposition::ByMap]
        .map(|transposition| (Net { transposition, ..NET }, [1, 9, 0]));
    let others = [
        (NET, [1, 9, 0]),
        (Net { rows: 9, columns: 128, ..NET }, [1, 9, 0]),
        (Net { rows: 64, ..NET }, [1, 9, 0]),
        (Net { rows: 13, columns: 112, steps: 8, ..NET }, [1, 8, 0]),
        // Reads before and after an update use separate panels.
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
    transposed_nets.into_iter().chain(others).collect()
}

/// Compares the float32 nets with their unfused programs on the reference evaluator; two runs must be
/// bit-identical.
#[must_use]
pub fn agree(backend: &Arc<dyn Backend>) -> Report {
    let nets = nets().into_iter().filter(|(net, _)| net.precision == Precision::F32);
    nets.map(|(net, _)| {
        let [plain, fused] = [false, true].map(|fused| Arc::new(net.program(fused)));
        let expected = run_program(&plain, &reference(), 3, GradientMode::Accumulate);
        let [got, second] = [(); 2].map(|()| run_program(&fused, backend, 3, GradientMode::Accumulate));
        if got != second {
            return Err(format!("{net:?}: two runs differ"));
        }
        let [got, expected] = [&got, &expected].map(|results| numbers(&results[0]).collect::<Vec<_>>());
        let largest = expected.iter().fold(0f64, |maximum, x| maximum.max(x.abs()));
        let close = |(x, y): (&f64, &f64)| (x - y).abs() <= tolerance::FLOAT32 * largest;
        if got.iter().zip(&expected).all(close) {
            Ok(())
        } else {
            Err(format!("{net:?}: {got:?} is not {expected:?}"))
        }
    })
    .collect()
}
