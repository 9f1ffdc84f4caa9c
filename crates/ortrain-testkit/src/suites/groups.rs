//! Updates of several matrices, with nests that are merged into groups.

use std::sync::Arc;

use ortrain_expr::{Access, Builder, DType, ReduceOp, Reduction, Reg, Strides, Type, UnaryOp};
use ortrain_program::{
    Backend, BufferId, GradientMode, GradientModes, Instruction, Load, Nest, Operand, PlaneId, Program,
    ProgramBuilder, align,
};

use super::Report;
use crate::programs::{numbers, reference, run_program};
use crate::tolerance;

/// Rows and columns of the matrices of a program.
type Shapes = &'static [[usize; 2]];

/// Equal and different shapes, short and long rows, and more matrices than a device has bindings.
const PROGRAMS: &[Shapes] = &[
    &[[3, 5], [3, 5]],
    &[[1, 1], [1, 40], [40, 1], [1, 1]],
    &[[2, 7], [9, 4], [2, 7], [16, 16], [33, 2], [2, 7], [5, 64], [64, 5], [2, 7], [1, 3]],
    &[[130, 70], [4, 4], [70, 130], [130, 70]],
];

/// A matrix in the plane, with its state there.
struct Matrix {
    dims: [usize; 2],
    data: BufferId,
    rows: BufferId,
    columns: BufferId,
}

/// Builder of a program.
struct GroupBuilder {
    b: ProgramBuilder,
    end: usize,
    node: Arc<str>,
}

impl GroupBuilder {
    /// Allocates a part of the plane.
    fn part(&mut self, label: &str, len: usize) -> BufferId {
        let at = self.end;
        self.end = align(at + 4 * len);
        self.b.plane(label, DType::F32, len, PlaneId(0), at)
    }

    fn matrix(&mut self, dims: [usize; 2]) -> Matrix {
        let [rows, columns] = dims;
        let matrix_id = self.part("matrix", rows * columns);
        Matrix {
            dims,
            data: matrix_id,
            rows: self.part("rows", rows),
            columns: self.part("columns", columns),
        }
    }

    /// Emits a nest over the axes of a matrix in some order, with the strides of each operand.
    fn nest(
        &mut self,
        (dims, inner): ([usize; 2], usize),
        loads: &[(BufferId, [isize; 2])],
        to: (BufferId, [isize; 2]),
        f: impl FnOnce(&mut Builder, &[Reg]) -> (Reg, Vec<Reg>),
    ) {
        let operand = |&(buffer, strides): &(BufferId, [isize; 2])| {
            let len = self.b.buffer(buffer).len;
            let strides = Strides::from_slice(&strides);
            Operand { buffer, access: Access { dtype: DType::F32, offset: 0, strides, len } }
        };
        let mut e = Builder::new();
        let regs: Vec<Reg> = (0..loads.len()).map(|slot| e.load(slot, Type::F32)).collect();
        let (result, sums) = f(&mut e, &regs);
        let (expr, sums) = e.finish_keeping(&[result], &sums);
        let nest = Nest {
            dims: dims.into_iter().collect(),
            inner,
            segments: None,
            loads: loads.iter().map(|load| Load::Buffer(operand(load))).collect(),
            expr,
            reductions: sums.into_iter().map(|value| Reduction { op: ReduceOp::Sum, value }).collect(),
            stores: vec![operand(&to)],
        };
        self.b.emit(Instruction::from(nest), GradientModes::ALL, &self.node).expect("it is valid");
    }

    /// Emits the means of squares of rows and of columns, and an update of the matrix with both.
    fn steps(&mut self, matrix: &Matrix) {
        let &Matrix { dims: [rows, columns], data, rows: of_rows, columns: of_columns } = matrix;
        let by_row = [columns as isize, 1];
        let mean = |count: usize| {
            move |e: &mut Builder, x: &[Reg]| {
                let (sum, square) = (e.reduced(0, Type::F32), e.mul(x[0], x[0]));
                let share = e.constant(Type::F32, 1.0 / count as f64);
                (e.mul(sum, share), vec![square])
            }
        };
        self.nest(([rows, columns], 1), &[(data, by_row)], (of_rows, [1, 0]), mean(columns));
        self.nest(([columns, rows], 1), &[(data, [1, columns as isize])], (of_columns, [1, 0]), mean(rows));
        let loads = [(data, by_row), (of_rows, [1, 0]), (of_columns, [0, 1])];
        self.nest(([rows, columns], 2), &loads, (data, by_row), |e, x| {
            let product = e.mul(x[1], x[2]);
            let one = e.constant(Type::F32, 1.0);
            let size = e.add(product, one);
            let root = e.unary(UnaryOp::Sqrt, size);
            let direction = e.binary(ortrain_expr::BinaryOp::Div, x[0], root);
            let (sum, square) = (e.reduced(0, Type::F32), e.mul(direction, direction));
            let size = e.add(sum, one);
            let step = e.binary(ortrain_expr::BinaryOp::Div, direction, size);
            (e.sub(x[0], step), vec![square])
        });
    }
}

/// Builds the planned program of some matrices, with or without fusion.
///
/// # Panics
/// Never: the program is valid and small.
#[must_use]
pub fn program(shapes: &[[usize; 2]], fused: bool) -> Program {
    let mut builder = GroupBuilder { b: ProgramBuilder::new(), end: 0, node: "node".into() };
    let matrices: Vec<Matrix> = shapes.iter().map(|&dims| builder.matrix(dims)).collect();
    matrices.iter().for_each(|matrix| builder.steps(matrix));
    let finished = match fused {
        true => builder.b.finish(Vec::new(), Vec::new()),
        false => builder.b.finish_unfused(Vec::new(), Vec::new()),
    };
    finished.expect("it fits in memory")
}

/// Compares the fused programs with the unfused ones on the reference evaluator; two runs must be
/// bit-identical.
#[must_use]
pub fn agree(backend: &Arc<dyn Backend>) -> Report {
    let runs = PROGRAMS.iter().map(|shapes| {
        let [plain, fused] = [false, true].map(|fused| Arc::new(program(shapes, fused)));
        let expected = run_program(&plain, &reference(), 7, GradientMode::Accumulate);
        let [got, second] = [(); 2].map(|()| run_program(&fused, backend, 7, GradientMode::Accumulate));
        if got != second {
            return Err(format!("{shapes:?}: two runs differ"));
        }
        let close = |(x, y): (f64, f64)| (x - y).abs() <= tolerance::FLOAT32 * y.abs().max(1.0);
        match numbers(&got[0]).zip(numbers(&expected[0])).position(|pair| !close(pair)) {
            Some(at) => Err(format!("{shapes:?}: element {at} differs\n{fused}")),
            None => Ok(()),
        }
    });
    runs.collect()
}
