//! Attention and its gradients, built manually like lowered operators.

use std::sync::Arc;

use ortrain_expr::{Access, Builder, DType, Precision, ReduceOp, Reduction, Reg, Strides, Type, UnaryOp};

use crate::{
    AttentionPass, BufferId, GradientModes, Instruction, Load, MatMul, Nest, Operand, Program, ProgramBuilder,
};

const BATCH: usize = 2;
const HEADS: usize = 3;
const SEQ: usize = 8;
const SIZE: usize = 4;

struct AttentionBuilder {
    b: ProgramBuilder,
    node: Arc<str>,
}

fn operand(buffer: BufferId, strides: &[usize], len: usize) -> Operand {
    let strides: Strides = strides.iter().map(|&stride| stride as isize).collect();
    Operand { buffer, access: Access { dtype: DType::F32, offset: 0, strides, len } }
}

impl AttentionBuilder {
    fn buffer(&mut self, name: &str, len: usize) -> BufferId {
        self.b.work(name, DType::F32, len)
    }

    fn emit(&mut self, instruction: Instruction) {
        self.b.emit(instruction, GradientModes::ALL, &self.node).unwrap();
    }

    /// Adds a map over `dims` with a row-major result.
    fn map(
        &mut self,
        dims: &[usize],
        loads: &[(BufferId, &[usize])],
        f: impl FnOnce(&mut Builder, &[Reg]) -> Reg,
    ) -> BufferId {
        let len = dims.iter().product();
        let to = self.buffer("map", len);
        let mut b = Builder::new();
        let regs: Vec<Reg> = (0..loads.len()).map(|slot| b.load(slot, Type::F32)).collect();
        let result = f(&mut b, &regs);
        let load =
            |&(id, strides): &(BufferId, &[usize])| Load::Buffer(operand(id, strides, self.b.buffer(id).len));
        let nest = Nest {
            dims: dims.iter().copied().collect(),
            inner: 0,
            segments: None,
            loads: loads.iter().map(load).collect(),
            expr: b.finish(&[result]),
            reductions: Vec::new(),
            stores: vec![Operand::contiguous(to, DType::F32, dims)],
        };
        self.emit(Instruction::from(nest));
        to
    }

    /// Adds a product with result `[BATCH, HEADS, m, n]`. Each factor may be transposed.
    fn product(
        &mut self,
        (m, n, k): (usize, usize, usize),
        (a, ta): (BufferId, bool),
        (b, tb): (BufferId, bool),
    ) -> BufferId {
        let factor = |id: BufferId, rows: usize, columns: usize, is_transposed: bool| {
            let (row, column) = if is_transposed { (1, rows) } else { (columns, 1) };
            let strides = [HEADS * rows * columns, rows * columns, row, column];
            operand(id, &strides, BATCH * HEADS * rows * columns)
        };
        let dims = [BATCH, HEADS, m, n];
        let to = self.buffer("product", dims.iter().product());
        let mut e = Builder::new();
        let value = e.load(0, Type::F32);
        let epilogue = Nest {
            dims: dims.into_iter().collect(),
            inner: 0,
            segments: None,
            loads: vec![Load::Accumulator(DType::F32)],
            expr: e.finish(&[value]),
            reductions: Vec::new(),
            stores: vec![Operand::contiguous(to, DType::F32, &dims)],
        };
        self.emit(Instruction::from(MatMul {
            batch: [BATCH, HEADS].into_iter().collect(),
            m,
            n,
            k,
            a: factor(a, m, k, ta),
            b: factor(b, k, n, tb),
            rounded: [None; 2],
            precision: Precision::F32,
            epilogue,
        }));
        to
    }

    /// Adds a nest over rows of scores.
    fn rows(
        &mut self,
        reads: &[BufferId],
        f: impl FnOnce(&mut Builder, &[Reg]) -> (Vec<(ReduceOp, Reg)>, Reg),
    ) -> BufferId {
        let rows = BATCH * HEADS * SEQ;
        let to = self.buffer("rows", rows * SEQ);
        let mut b = Builder::new();
        let regs: Vec<Reg> = (0..reads.len()).map(|slot| b.load(slot, Type::F32)).collect();
        let (reductions, result) = f(&mut b, &regs);
        let values: Vec<Reg> = reductions.iter().map(|&(_, value)| value).collect();
        let (expr, values) = b.finish_keeping(&[result], &values);
        let reductions =
            reductions.into_iter().zip(values).map(|((op, _), value)| Reduction { op, value }).collect();
        let line = |id: BufferId| operand(id, &[SEQ, 1, 1], rows * SEQ);
        let dims = [rows, 1, SEQ].into_iter().collect();
        let loads = reads.iter().map(|&id| Load::Buffer(line(id))).collect();
        let nest = Nest { dims, inner: 1, segments: None, loads, expr, reductions, stores: vec![line(to)] };
        self.emit(Instruction::from(nest));
        to
    }

    fn scaled(&mut self, x: BufferId) -> BufferId {
        let len = BATCH * HEADS * SEQ * SEQ;
        self.map(&[len], &[(x, &[1])], |b, regs| {
            let c = b.constant(Type::F32, 0.5);
            b.mul(regs[0], c)
        })
    }
}

/// Strides from `[BATCH, SEQ, HEADS, SIZE]` to `[BATCH, HEADS, SEQ, SIZE]`.
const TO_HEADS: [usize; 4] = [SEQ * HEADS * SIZE, SIZE, HEADS * SIZE, 1];
/// Strides from `[BATCH, HEADS, SEQ, SIZE]` to `[BATCH, SEQ, HEADS, SIZE]`.
const FROM_HEADS: [usize; 4] = [SEQ * HEADS * SIZE, SIZE, SEQ * SIZE, 1];

/// Additional output of the program.
#[derive(Clone, Copy, PartialEq)]
enum ExtraOutput {
    Nothing,
    Softmax,
    ScoresGradient,
}

fn program(backward: bool, extra_output: ExtraOutput) -> Program {
    let mut m = AttentionBuilder { b: ProgramBuilder::new(), node: "node".into() };
    let len = BATCH * HEADS * SEQ * SIZE;
    let [q0, k0, v0, g0] = ["q", "k", "v", "g"].map(|name| m.buffer(name, len));
    let heads = [BATCH, HEADS, SEQ, SIZE];
    let [q, k, v] = [q0, k0, v0].map(|id| m.map(&heads, &[(id, &TO_HEADS)], |_, regs| regs[0]));
    let scores = m.product((SEQ, SEQ, SIZE), (q, false), (k, true));
    let scores = m.scaled(scores);
    let softmax = m.rows(&[scores], |b, regs| {
        let largest = b.reduced(0, Type::F32);
        let shifted = b.sub(regs[0], largest);
        let power = b.unary(UnaryOp::Exp, shifted);
        let sum = b.reduced(1, Type::F32);
        let result = b.div(power, sum);
        (vec![(ReduceOp::Max, regs[0]), (ReduceOp::Sum, power)], result)
    });
    let sums = m.product((SEQ, SIZE, SEQ), (softmax, false), (v, false));
    let output = m.map(&[BATCH, SEQ, HEADS, SIZE], &[(sums, &FROM_HEADS)], |_, regs| regs[0]);
    let mut outputs = vec![output];
    if extra_output == ExtraOutput::Softmax {
        outputs.push(softmax);
    }
    let mut inputs = vec![q0, k0, v0];
    if backward {
        inputs.push(g0);
        // Computed after the scores.
        let loss = m.map(&[len], &[(g0, &[1]), (output, &[1])], |b, regs| b.add(regs[0], regs[1]));
        let g = m.map(&heads, &[(loss, &TO_HEADS)], |_, regs| regs[0]);
        let of_weights = m.product((SEQ, SEQ, SIZE), (g, false), (v, true));
        let of_v = m.product((SEQ, SIZE, SEQ), (softmax, true), (g, false));
        let of_scores = m.rows(&[of_weights, softmax], |b, regs| {
            let product = b.mul(regs[0], regs[1]);
            let sum = b.reduced(0, Type::F32);
            let rest = b.sub(regs[0], sum);
            let result = b.mul(regs[1], rest);
            (vec![(ReduceOp::Sum, product)], result)
        });
        let of_scores = m.scaled(of_scores);
        if extra_output == ExtraOutput::ScoresGradient {
            outputs.push(of_scores);
        }
        let of_q = m.product((SEQ, SIZE, SEQ), (of_scores, false), (k, false));
        // The transposed product, as if the keys were transposed before.
        let of_k = m.product((SIZE, SEQ, SEQ), (q, true), (of_scores, false));
        for id in [of_q, of_v] {
            outputs.push(m.map(&[BATCH, SEQ, HEADS, SIZE], &[(id, &FROM_HEADS)], |_, regs| regs[0]));
        }
        let strides = [HEADS * SIZE * SEQ, 1, SIZE * SEQ, SEQ];
        outputs.push(m.map(&[BATCH, SEQ, HEADS, SIZE], &[(of_k, &strides)], |_, regs| regs[0]));
    }
    m.b.finish(inputs, outputs).unwrap()
}

fn names(program: &Program) -> Vec<&'static str> {
    program.instructions.iter().map(|scheduled| scheduled.instruction.name()).collect()
}

#[test]
fn forward_fuses_to_one_instruction() {
    let program = program(false, ExtraOutput::Nothing);
    assert_eq!(names(&program), ["Attention"], "{program}");
}

#[test]
fn backward_fuses_to_one_instruction() {
    let program = program(true, ExtraOutput::Nothing);
    assert_eq!(names(&program), ["Attention", "Map", "Attention"], "{program}");
    let Instruction::Attention(attention) = &program.instructions[2].instruction else { unreachable!() };
    let AttentionPass::Gradients(gradients) = &attention.pass else { unreachable!() };
    assert!(gradients.q.is_some() && gradients.k.is_some() && gradients.v.is_some(), "{program}");
    // Operands and results are transposed through strides.
    assert_eq!(attention.q.access.strides.as_slice(), TO_HEADS.map(|stride| stride as isize), "{program}");
    let mut used: Vec<BufferId> = program
        .instructions
        .iter()
        .flat_map(|i| [i.instruction.reads(), i.instruction.writes()].concat())
        .collect();
    used.sort_unstable();
    used.dedup();
    // One more buffer: the incoming gradient.
    assert_eq!(used.len(), program.inputs.len() + program.outputs.len() + 1, "{program}");
}

#[test]
fn visible_intermediates_prevent_fusion() {
    for extra_output in [ExtraOutput::Softmax, ExtraOutput::ScoresGradient] {
        let program = program(true, extra_output);
        assert!(!names(&program).contains(&"Attention"), "{program}");
    }
}
