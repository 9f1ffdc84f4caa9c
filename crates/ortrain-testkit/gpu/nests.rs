//! Programs of one nest that the device computes entirely, compared with the reference evaluator.

use std::sync::Arc;

use ortrain_codegen::{Wgsl, split_host_part};
use ortrain_expr::{Access, Builder, DType, ReduceOp, Reduction, Reg, Scalar, Segments, Type};
use ortrain_program::{BufferId, GradientModes, Instruction, Load, Nest, Operand, Program, ProgramBuilder};

use super::programs::{both, run};

/// Shape of a nest: rows of adjacent elements, or the segments of one row.
#[derive(Clone, Debug)]
pub(crate) struct Space {
    pub(crate) rows: usize,
    pub(crate) len: usize,
    pub(crate) segments: Option<Segments>,
}

impl Space {
    /// Returns one segment of `len` elements. The host prologue never takes a nest with segments.
    pub(crate) fn one_segment(len: usize) -> Space {
        Space { rows: 1, len, segments: Some(Segments::new(std::iter::once(0..len))) }
    }

    /// Returns the access to a buffer with an element at every point, or one for each row.
    fn access(&self, dtype: DType, by_row: bool) -> Access {
        let (strides, len) = match (by_row, &self.segments) {
            (true, _) => ([1, 0], self.rows),
            (false, Some(_)) => ([0, 1], self.len),
            (false, None) => ([self.len as isize, 1], self.rows * self.len),
        };
        Access { dtype, offset: 0, strides: strides.into_iter().collect(), len }
    }
}

/// Results of a nest: values at every point, values of each row, and reductions.
#[derive(Default)]
pub(crate) struct Results {
    pub(crate) each: Vec<(Reg, DType)>,
    pub(crate) by_row: Vec<(Reg, DType)>,
    pub(crate) reductions: Vec<(ReduceOp, Reg)>,
    /// Inputs that are read only by computed index.
    pub(crate) tables: Vec<usize>,
}

/// Builds a program of one nest over inputs of these types. The device computes all of it, without a host part.
pub(crate) fn program(
    space: &Space,
    inputs: &[DType],
    f: impl FnOnce(&mut Builder, &[Reg]) -> Results,
) -> Arc<Program> {
    let mut expr = Builder::new();
    let regs: Vec<Reg> = inputs.iter().enumerate().map(|(k, &d)| expr.load(k, Type::of(d))).collect();
    let Results { each, by_row, reductions, tables } = f(&mut expr, &regs);
    let results: Vec<(Reg, DType, bool)> = (each.iter().map(|&(reg, dtype)| (reg, dtype, false)))
        .chain(by_row.iter().map(|&(reg, dtype)| (reg, dtype, true)))
        .collect();
    let roots: Vec<Reg> = results.iter().map(|&(reg, ..)| reg).collect();
    let values: Vec<Reg> = reductions.iter().map(|&(_, value)| value).collect();
    let (expr, values) = expr.finish_keeping(&roots, &values);
    let mut b = ProgramBuilder::new();
    let mut operand = |dtype: DType, by_row: bool| {
        let access = space.access(dtype, by_row);
        Operand { buffer: b.work("x", dtype, access.len), access }
    };
    let mut loads: Vec<Operand> = inputs.iter().map(|&dtype| operand(dtype, false)).collect();
    for slot in tables {
        loads[slot].access.strides = [0, 0].into_iter().collect();
    }
    let stores: Vec<Operand> = results.iter().map(|&(_, dtype, by_row)| operand(dtype, by_row)).collect();
    let buffers =
        |operands: &[Operand]| operands.iter().map(|operand| operand.buffer).collect::<Vec<BufferId>>();
    let (loaded, stored) = (buffers(&loads), buffers(&stores));
    let nest = Nest {
        dims: [space.rows, space.len].into_iter().collect(),
        inner: usize::from(!reductions.is_empty()),
        segments: space.segments.clone(),
        loads: loads.into_iter().map(Load::Buffer).collect(),
        expr,
        reductions: reductions.iter().zip(values).map(|(&(op, _), value)| Reduction { op, value }).collect(),
        stores,
    };
    b.emit(Instruction::from(nest), GradientModes::ALL, &"node".into()).expect("the nest is valid");
    let program = b.finish(loaded, stored).expect("it can be planned");
    assert!(split_host_part(&program, &Wgsl).is_none(), "the host computes some of it");
    Arc::new(program)
}

/// Returns true if two elements have the same bits, or if both are NaN.
fn is_same(a: Scalar, b: Scalar) -> bool {
    let is_nan = |x: Scalar| x.ty().is_float() && x.to_f64().is_nan();
    a == b || is_nan(a) && is_nan(b)
}

/// Element of a result that differs from the reference evaluator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Difference {
    pub(crate) result: usize,
    pub(crate) at: usize,
    pub(crate) got: Scalar,
    pub(crate) expected: Scalar,
}

/// Returns all differences between the results of a program and the reference evaluator.
pub(crate) fn differences(program: &Arc<Program>, inputs: &[Vec<u8>]) -> Vec<Difference> {
    let [got, expected] = both().map(|backend| run(program, backend, inputs).expect("no guard fails"));
    let mut mismatches = Vec::new();
    for (result, (got, expected)) in got.iter().zip(&expected).enumerate() {
        let dtype = program.buffer(program.outputs[result]).dtype;
        let [got, expected] = [got, expected].map(|bytes| Scalar::read_all(dtype, bytes));
        let pairs = got.into_iter().zip(expected).enumerate();
        mismatches.extend(pairs.map(|(at, (got, expected))| Difference { result, at, got, expected }));
    }
    mismatches.retain(|difference| !is_same(difference.got, difference.expected));
    mismatches
}

/// Compares all results of a program with the reference evaluator; `named` describes an element for the message.
pub(crate) fn assert_agrees(
    program: &Arc<Program>,
    inputs: &[Vec<u8>],
    named: impl Fn(usize, usize) -> String,
) {
    let mismatches = differences(program, inputs);
    if let Some(&Difference { result, at, got, expected }) = mismatches.first() {
        panic!("{} is {got} and should be {expected}; {} differ", named(result, at), mismatches.len());
    }
}
