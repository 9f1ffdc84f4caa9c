//! Programs of matrix products.

use ortrain_expr::{Builder, DType, Dims, Precision, Type};
use ortrain_program::{GradientModes, Instruction, Load, MatMul, Nest, Operand, Program, ProgramBuilder};

/// Builds a program of float32 matrix products at a precision, each with its own right factor.
pub(crate) fn products(count: usize, [m, n, k]: [usize; 3], precision: Precision) -> Program {
    let mut b = ProgramBuilder::new().with_precision(precision);
    let a = b.work("a", DType::F32, m * k);
    let mut inputs = vec![a];
    let mut outputs = Vec::new();
    for _ in 0..count {
        let [right, to] = [k * n, m * n].map(|len| b.work("b", DType::F32, len));
        let mut expr = Builder::new();
        let sum = expr.load(0, Type::F32);
        let epilogue = Nest::elementwise(
            [m, n].into_iter().collect(),
            vec![Load::Accumulator(DType::F32)],
            expr.finish(&[sum]),
            vec![Operand::contiguous(to, DType::F32, &[m, n])],
        );
        let product = MatMul {
            batch: Dims::new(),
            m,
            n,
            k,
            a: Operand::contiguous(a, DType::F32, &[m, k]),
            b: Operand::contiguous(right, DType::F32, &[k, n]),
            rounded: [None; 2],
            precision,
            epilogue,
        };
        b.emit(Instruction::from(product), GradientModes::ALL, &"a layer".into())
            .expect("the product is valid");
        inputs.push(right);
        outputs.push(to);
    }
    b.finish_unfused(inputs, outputs).expect("it can be planned")
}
