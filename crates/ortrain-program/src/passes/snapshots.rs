//! Snapshots of the passes: for each pass a small program, as text before and after the pass.
//!
//! They document the effect of each pass. Each pass runs alone on a program that it changes. The test compares the
//! whole text, and runs both programs with the reference evaluator.

use std::sync::Arc;

use ortrain_expr::{
    Access, Builder, CompareOp, ConvPass, ConvShape, DType, IndexKind, Precision, ReduceOp, Reduction, Reg,
    SlidingAxis, Type, UnaryOp, WindowPass, WindowShape,
};
use ortrain_graph::Tensor;

use super::{Changed, PASSES};
use crate::draft::Draft;
use crate::target::{BatchTiles, Panels, Target};
use crate::versions::Versions;
use crate::{
    Backend, Bindings, Buffer, BufferId, BufferLocation, Conv, GradientMode, GradientModes, Instruction,
    Load, MatMul, Memory, Nest, Operand, PlaneId, Reference, Scalars, ScatterAdd, ScheduledInstruction,
    Window, WindowIndex, Workspace,
};

/// Maximum number of columns of a line. Longer lines are broken after a semicolon.
const COLUMNS: usize = 110;

/// Tolerance for results with different roundings, relative to the largest element: a few roundings of `f32`.
const ROUNDINGS: f32 = 4.0 * f32::EPSILON;

/// Program before and after a pass.
struct Example {
    draft: Draft,
    target: Target,
    promise: Promise,
    before: &'static str,
    after: &'static str,
}

/// Guarantee of a pass about the results.
#[derive(Clone, Copy)]
enum Promise {
    SameBits,
    /// The same values up to roundings at other positions.
    OtherRoundings,
    /// Different values, as the pass intends.
    OtherPrecision,
}

type MakeExample = fn() -> Example;

/// Examples for each pass.
const EXAMPLES: &[(&str, MakeExample)] = &[
    ("remove_unused", remove_unused),
    ("inline_constants", inline_constants),
    ("dead_elements", dead_elements),
    ("compact_pool_indices", compact_pool_indices),
    ("sink_scatter_add", sink_scatter_add),
    ("fuse_attention", fuse_attention),
    ("fuse_chains", fuse_chains),
    ("precompute_derivatives", precompute_derivatives),
    ("fusion", fusion),
    ("fusion", fusion_of_narrow_floats),
    ("choose_precision", choose_precision),
    ("weight_prepacking", weight_prepacking),
    ("fallible_first", fallible_first),
    ("mask_packing", mask_packing),
    ("batch_tiling", batch_tiling),
    ("horizontal_fusion", horizontal_fusion),
    ("memory_plan", memory_plan),
];

/// The programs before and after each pass equal the texts of its example, and compute the same results.
#[test]
fn each_pass_matches_its_example() {
    let mut differences = String::new();
    for pass in PASSES {
        let examples: Vec<_> = EXAMPLES.iter().filter(|(name, _)| *name == pass.name).collect();
        assert!(!examples.is_empty(), "the pass {} has no example here", pass.name);
        for (_, example) in examples {
            let Example { draft, target, promise, before, after } = example();
            draft.check().unwrap_or_else(|error| panic!("the example of {}: {error}", pass.name));
            let mut changed = draft.clone();
            let Changed(changes) = (pass.run)(&mut changed, &target).unwrap();
            assert!(changes > 0, "the pass {} changes nothing in its example", pass.name);
            changed.check().unwrap_or_else(|error| panic!("behind the pass {}: {error}", pass.name));
            for (when, draft, text) in [("before", &draft, before), ("behind", &changed, after)] {
                let actual = wrap_lines(&draft.to_string());
                if text.strip_prefix('\n') != Some(&actual) {
                    differences += &format!("--- {when} the pass {}:\n{actual}", pass.name);
                }
            }
            compare(pass.name, promise, &run_all_modes(&draft), &run_all_modes(&changed));
        }
    }
    assert!(differences.is_empty(), "programs are other ones than those of the examples:\n{differences}");
}

/// An example without a pass would never run.
#[test]
fn every_example_names_a_pass() {
    let names = |of: &mut dyn Iterator<Item = &'static str>| {
        let mut names: Vec<&str> = of.collect();
        names.sort_unstable();
        names.dedup();
        names
    };
    let examples = names(&mut EXAMPLES.iter().map(|(name, _)| *name));
    assert_eq!(examples, names(&mut PASSES.iter().map(|pass| pass.name)));
}

/// Breaks long lines after semicolons.
fn wrap_lines(text: &str) -> String {
    let mut result = String::new();
    for line in text.lines() {
        let mut column = 0;
        for part in line.split_inclusive("; ") {
            if column > 0 && column + part.trim_end().len() > COLUMNS {
                result.truncate(result.trim_end().len());
                result += "\n          ";
                column = 10;
            }
            result += part;
            column += part.len();
        }
        result += "\n";
    }
    result
}

/// Returns the bytes of the outputs and of all planes after a run of each gradient mode.
fn run_all_modes(draft: &Draft) -> Vec<Vec<u8>> {
    let mut draft = draft.clone();
    super::memory_plan::run(&mut draft, &Target::PLAIN).unwrap();
    let executable = Reference.compile(Arc::new(draft.into_program())).unwrap();
    let program = executable.program();
    let value = |k: usize| (k * 7919 % 1009) as f32 / 1009.0 - 0.5;
    let values = |len: usize| -> Vec<u8> { (0..len).flat_map(|k| value(k).to_le_bytes()).collect() };
    let planes: Vec<Memory> = program.planes.iter().map(|plane| Memory::new(plane.bytes)).collect();
    planes.iter().for_each(|plane| plane.write(0, &values(plane.len() / 4)).unwrap());
    let bound: Vec<&Memory> = planes.iter().collect();
    let mut work = Workspace::new(Arc::new(Reference));
    work.reserve(program.work_bytes, executable.scratch_bytes()).unwrap();
    let location = |id: &BufferId| match *program.buffer(*id) {
        Buffer { location: BufferLocation::Work(offset), ref dtype, len, .. } => (offset, len * dtype.size()),
        ref other => panic!("{other:?} lies in no arena"),
    };
    let mut results = Vec::new();
    for entry in [GradientMode::Overwrite, GradientMode::Accumulate] {
        for id in &program.inputs {
            assert_eq!(program.buffer(*id).dtype, DType::F32, "inputs of examples are floats");
            work.arena().write(location(id).0, &values(program.buffer(*id).len)).unwrap();
        }
        executable.run(&Bindings { planes: &bound }, &mut work, entry, Scalars::default()).unwrap();
        let outputs = program.outputs.iter().map(location);
        results.extend(outputs.map(|(offset, len)| work.arena().to_vec(offset, len).unwrap()));
        results.extend(planes.iter().map(|plane| plane.to_vec(0, plane.len()).unwrap()));
    }
    results
}

/// Compares results according to the guarantee of a pass.
fn compare(pass: &str, promise: Promise, before: &[Vec<u8>], after: &[Vec<u8>]) {
    let sizes = |buffers: &[Vec<u8>]| buffers.iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(sizes(before), sizes(after), "{pass}: sizes of results");
    match promise {
        Promise::SameBits => assert_eq!(before, after, "{pass}: bits of results"),
        Promise::OtherPrecision => assert_ne!(before, after, "{pass}: results of another precision"),
        Promise::OtherRoundings => {
            for (before, after) in before.iter().zip(after) {
                let [before, after] =
                    [before, after].map(|bytes| bytemuck::pod_collect_to_vec::<u8, f32>(bytes));
                let largest = before.iter().fold(0.0f32, |maximum, x| maximum.max(x.abs()));
                for (x, y) in before.iter().zip(&after) {
                    assert!((x - y).abs() <= largest * ROUNDINGS, "{pass}: {x} became {y}");
                }
            }
        }
    }
}

/// Manually built program.
#[derive(Default)]
struct Sketch {
    buffers: Vec<Buffer>,
    instructions: Vec<ScheduledInstruction>,
    constants: Vec<Tensor>,
    precision: Precision,
}

impl Sketch {
    fn push(&mut self, label: &str, dtype: DType, len: usize, location: BufferLocation) -> BufferId {
        self.buffers.push(Buffer { label: label.into(), dtype, len, location });
        BufferId(self.buffers.len() as u32 - 1)
    }

    fn work(&mut self, label: &str, dtype: DType, len: usize) -> BufferId {
        self.push(label, dtype, len, BufferLocation::Work(0))
    }

    /// Adds work buffers of floats, all of one length.
    fn floats<const N: usize>(&mut self, labels: [&str; N], len: usize) -> [BufferId; N] {
        labels.map(|label| self.work(label, DType::F32, len))
    }

    /// Adds a part of the only plane.
    fn plane(&mut self, label: &str, len: usize) -> BufferId {
        self.push(label, DType::F32, len, BufferLocation::Plane(PlaneId(0), 0))
    }

    fn constant(&mut self, label: &str, tensor: Tensor) -> BufferId {
        let (dtype, len) = (tensor.dtype(), tensor.len());
        self.constants.push(tensor);
        self.push(label, dtype, len, BufferLocation::Constant(self.constants.len() - 1))
    }

    /// Returns an operand that starts at the first element of a buffer.
    fn at(&self, id: BufferId, strides: &[isize]) -> Operand {
        let Buffer { dtype, len, .. } = self.buffers[id.0 as usize];
        let strides = strides.iter().copied().collect();
        Operand { buffer: id, access: Access { dtype, offset: 0, strides, len } }
    }

    fn emit(&mut self, node: &str, instruction: Instruction) {
        assert_eq!(instruction.validate(&self.buffers), None, "{node}");
        let (entries, node, versions) = (GradientModes::ALL, node.into(), Versions::default());
        self.instructions.push(ScheduledInstruction { instruction, gradient_modes: entries, node, versions });
    }

    /// Adds a nest over `dims` with `inner` reduced axes. The closure computes the results and the reduced values from
    /// the loads.
    fn nest(
        &mut self,
        node: &str,
        (dims, inner): (&[usize], usize),
        loads: &[Operand],
        stores: &[Operand],
        f: impl FnOnce(&mut Builder, &[Reg]) -> (Vec<Reg>, Vec<(ReduceOp, Reg)>),
    ) {
        let mut b = Builder::new();
        let load = |(slot, from): (usize, &Operand)| b.load(slot, Type::of(from.access.dtype));
        let regs: Vec<Reg> = loads.iter().enumerate().map(load).collect();
        let (results, reduced) = f(&mut b, &regs);
        let (ops, values): (Vec<ReduceOp>, Vec<Reg>) = reduced.into_iter().unzip();
        let (expr, values) = b.finish_keeping(&results, &values);
        let reductions = ops.into_iter().zip(values).map(|(op, value)| Reduction { op, value }).collect();
        let nest = Nest {
            dims: dims.iter().copied().collect(),
            inner,
            segments: None,
            loads: loads.iter().cloned().map(Load::Buffer).collect(),
            expr,
            reductions,
            stores: stores.to_vec(),
        };
        self.emit(node, Instruction::from(nest));
    }

    /// Adds a map over `dims`.
    fn map(
        &mut self,
        node: &str,
        dims: &[usize],
        loads: &[Operand],
        stores: &[Operand],
        f: impl FnOnce(&mut Builder, &[Reg]) -> Vec<Reg>,
    ) {
        self.nest(node, (dims, 0), loads, stores, |b, regs| (f(b, regs), Vec::new()));
    }

    /// Adds an element-wise map over whole buffers.
    fn flat(
        &mut self,
        node: &str,
        from: &[BufferId],
        to: &[BufferId],
        f: impl FnOnce(&mut Builder, &[Reg]) -> Vec<Reg>,
    ) {
        let element = |id: &BufferId| self.at(*id, &[1]);
        let (loads, stores): (Vec<_>, Vec<_>) =
            (from.iter().map(element).collect(), to.iter().map(element).collect());
        let len = self.buffers[to[0].0 as usize].len;
        self.map(node, &[len], &loads, &stores, f);
    }

    /// Adds `to = a · b` for row-major matrices.
    fn product(
        &mut self,
        node: &str,
        (m, n, k): (usize, usize, usize),
        a: Operand,
        b: Operand,
        to: BufferId,
    ) {
        let epilogue = epilogue(&[m, n], self.matrix(to, n));
        let precision = Precision::F32;
        let batch = [].into_iter().collect();
        let product = MatMul { batch, m, n, k, a, b, rounded: [None; 2], precision, epilogue };
        self.emit(node, Instruction::from(product));
    }

    /// Returns a row-major matrix.
    fn matrix(&self, id: BufferId, columns: usize) -> Operand {
        self.at(id, &[columns as isize, 1])
    }

    /// Returns a transposed row-major matrix.
    fn transposed(&self, id: BufferId, columns: usize) -> Operand {
        self.at(id, &[1, columns as isize])
    }

    fn example(self, inputs: &[BufferId], outputs: &[BufferId]) -> Example {
        let Sketch { buffers, instructions, constants, precision } = self;
        let ends = (inputs.to_vec(), outputs.to_vec());
        let draft = Draft::new(instructions, buffers, constants, ends, precision);
        let (target, promise) = (Target::PLAIN, Promise::SameBits);
        Example { draft, target, promise, before: "", after: "" }
    }
}

/// Returns an epilogue that stores its accumulator.
fn epilogue(dims: &[usize], to: Operand) -> Nest {
    let mut b = Builder::new();
    let value = b.load(0, Type::F32);
    Nest {
        dims: dims.iter().copied().collect(),
        inner: 0,
        segments: None,
        loads: vec![Load::Accumulator(DType::F32)],
        expr: b.finish(&[value]),
        reductions: Vec::new(),
        stores: vec![to],
    }
}

/// One result of a map is used; no result of the following map is used.
fn remove_unused() -> Example {
    let mut s = Sketch::default();
    let [x, y, unused, last] = s.floats(["x", "y", "unused", "last"], 4);
    s.flat("exp", &[x], &[y, unused], |b, x| vec![b.unary(UnaryOp::Exp, x[0]), b.add(x[0], x[0])]);
    s.flat("sqrt", &[unused], &[last], |b, x| vec![b.unary(UnaryOp::Sqrt, x[0])]);
    Example {
        before: r#"
draft: 2 instructions, 4 buffers
  b0: float32[4] work "x"  input
  b1: float32[4] work "y"  output
  b2: float32[4] work "unused"
  b3: float32[4] work "last"
    0 Map        b1, b2 <- b0  [4]  (8 flops, 48 bytes)  # exp
        %0:f32 = load 0; %1:f32 = Exp %0; %2:f32 = Add %0 %0 -> %1, %2
    1 Map        b3 <- b2  [4]  (4 flops, 32 bytes)  # sqrt
        %0:f32 = load 0; %1:f32 = Sqrt %0 -> %1
"#,
        after: r#"
draft: 1 instructions, 4 buffers
  b0: float32[4] work "x"  input
  b1: float32[4] work "y"  output
    0 Map        b1 <- b0  [4]  (4 flops, 32 bytes)  # exp
        %0:f32 = load 0; %1:f32 = Exp %0 -> %1
"#,
        ..s.example(&[x], &[y])
    }
}

/// A constant of one element is read at every point.
fn inline_constants() -> Example {
    let mut s = Sketch::default();
    let [x, y] = s.floats(["x", "y"], 4);
    let three = s.constant("three", Tensor::f32(&[1], &[3.0]));
    let (from, factor, to) = (s.at(x, &[1]), s.at(three, &[0]), s.at(y, &[1]));
    s.map("mul", &[4], &[from, factor], &[to], |b, x| vec![b.mul(x[0], x[1])]);
    Example {
        before: r#"
draft: 1 instructions, 3 buffers
  b0: float32[4] work "x"  input
  b1: float32[4] work "y"  output
  b2: float32[1] const0 "three"
    0 Map        b1 <- b0, b2  [4]  (4 flops, 36 bytes)  # mul
        %0:f32 = load 0; %1:f32 = load 1; %2:f32 = Mul %0 %1 -> %2
"#,
        after: r#"
draft: 1 instructions, 3 buffers
  b0: float32[4] work "x"  input
  b1: float32[4] work "y"  output
    0 Map        b1 <- b0  [4]  (4 flops, 32 bytes)  # mul
        %0:f32 = load 0; %1:f32 = 3.0; %2:f32 = Mul %0 %1 -> %2
"#,
        ..s.example(&[x], &[y])
    }
}

/// Only the second of four rows is read. A gradient that is zero in the other rows is a factor of a product over all
/// rows.
fn dead_elements() -> Example {
    let mut s = Sketch::default();
    let [x, y] = s.floats(["x", "y"], 16);
    let [row] = s.floats(["row"], 4);
    let [dy, dw] = s.floats(["dy", "dw"], 16);
    let second = |s: &Sketch, id: BufferId| {
        let mut second = s.at(id, &[1]);
        second.access.offset = 4;
        second
    };
    s.flat("exp", &[x], &[y], |b, x| vec![b.unary(UnaryOp::Exp, x[0])]);
    let (from, to) = (second(&s, y), s.at(row, &[1]));
    s.map("slice", &[4], &[from], &[to], |_, x| vec![x[0]]);
    s.flat("slice gradient", &[], &[dy], |b, _| vec![b.constant(Type::F32, 0.0)]);
    let (from, to) = (s.at(row, &[1]), second(&s, dy));
    s.map("slice gradient", &[4], &[from], &[to], |_, x| vec![x[0]]);
    let (a, b) = (s.transposed(dy, 4), s.matrix(y, 4));
    s.product("weight gradient", (4, 4, 4), a, b, dw);
    Example {
        before: r#"
draft: 5 instructions, 5 buffers
  b0: float32[16] work "x"  input
  b1: float32[16] work "y"
  b2: float32[4] work "row"  output
  b3: float32[16] work "dy"
  b4: float32[16] work "dw"  output
    0 Map        b1 <- b0  [16]  (16 flops, 128 bytes)  # exp
        %0:f32 = load 0; %1:f32 = Exp %0 -> %1
    1 Map        b2 <- b1  [4]  (0 flops, 32 bytes)  # slice
        %0:f32 = load 0 -> %0
    2 Map        b3 <-   [16]  (0 flops, 64 bytes)  # slice gradient
        %0:f32 = 0.0 -> %0
    3 Map        b3 <- b2  [4]  (0 flops, 32 bytes)  # slice gradient
        %0:f32 = load 0 -> %0
    4 MatMul     b4 <- b3, b1  [] 4x4x4  (128 flops, 192 bytes)  # weight gradient
        %0:f32 = load 0 -> %0
"#,
        after: r#"
draft: 4 instructions, 5 buffers
  b0: float32[16] work "x"  input
  b1: float32[4] work "y"
  b2: float32[4] work "row"  output
  b3: float32[4] work "dy"
  b4: float32[16] work "dw"  output
    0 Map        b1 <- b0  [4]  (4 flops, 32 bytes)  # exp
        %0:f32 = load 0; %1:f32 = Exp %0 -> %1
    1 Map        b2 <- b1  [4]  (0 flops, 32 bytes)  # slice
        %0:f32 = load 0 -> %0
    2 Map        b3 <- b2  [4]  (0 flops, 32 bytes)  # slice gradient
        %0:f32 = load 0 -> %0
    3 MatMul     b4 <- b3, b1  [] 4x4x1  (32 flops, 96 bytes)  # weight gradient
        %0:f32 = load 0 -> %0
"#,
        ..s.example(&[x], &[row, dw])
    }
}

/// Only the gradient reads the positions of the maxima.
fn compact_pool_indices() -> Example {
    let mut s = Sketch::default();
    let [x, dx] = s.floats(["x", "dx"], 16);
    let [y] = s.floats(["y"], 4);
    let index = s.work("index", DType::I64, 4);
    let axis = SlidingAxis { input: 4, output: 2, kernel: 2, stride: 2, dilation: 1, padding_before: 0 };
    for (node, pass, source, target) in
        [("pool", WindowPass::Max, x, y), ("pool gradient", WindowPass::MaxGradient, y, dx)]
    {
        let shape = WindowShape { pass, planes: 1, axes: [axis, axis].into_iter().collect() };
        let [source, index, target] = [source, index, target].map(|id| s.at(id, &[1]));
        let index = Some(WindowIndex { kind: IndexKind::Element, operand: index });
        s.emit(node, Instruction::from(Window { shape, source, index, target }));
    }
    Example {
        before: r#"
draft: 2 instructions, 4 buffers
  b0: float32[16] work "x"  input
  b1: float32[16] work "dx"  output
  b2: float32[4] work "y"  output
  b3: int64[4] work "index"
    0 Window     b2, b3 <- b0  Max 1 planes [4, 4], window [2, 2]  (16 flops, 112 bytes)  # pool
    1 Window     b1 <- b2, b3  MaxGradient 1 planes [4, 4], window [2, 2]  (4 flops, 112 bytes)  # pool gradient
"#,
        after: r#"
draft: 2 instructions, 4 buffers
  b0: float32[16] work "x"  input
  b1: float32[16] work "dx"  output
  b2: float32[4] work "y"  output
  b3: uint8[4] work "index"
    0 Window     b2, b3 <- b0  Max 1 planes [4, 4], window [2, 2]  (16 flops, 84 bytes)  # pool
    1 Window     b1 <- b2, b3  MaxGradient 1 planes [4, 4], window [2, 2]  (4 flops, 84 bytes)  # pool gradient
"#,
        ..s.example(&[x], &[y, dx])
    }
}

/// The gradient of an embedding: sums at rows of zeros, added to the state. One row is repeated, so the order of
/// additions affects the roundings.
fn sink_scatter_add() -> Example {
    let mut s = Sketch::default();
    let [source] = s.floats(["source"], 6);
    let index = s.constant("index", Tensor::i64(&[3], &[1, 3, 1]));
    let [gradient] = s.floats(["gradient"], 8);
    let total = s.plane("total", 8);
    s.flat("zeros", &[], &[gradient], |b, _| vec![b.constant(Type::F32, 0.0)]);
    let [from, at, to] = [source, index, gradient].map(|id| s.at(id, &[1]));
    let sums = ScatterAdd {
        outer: 1,
        rows: 4,
        count: 3,
        inner: 2,
        source: from,
        index: at,
        target: to,
        overwrites: false,
    };
    s.emit("gather gradient", Instruction::from(sums));
    s.flat("accumulate", &[total, gradient], &[total], |b, x| vec![b.add(x[0], x[1])]);
    Example {
        promise: Promise::OtherRoundings,
        before: r#"
draft: 3 instructions, 4 buffers
  b0: float32[6] work "source"  input
  b1: int64[3] const0 "index"
  b2: float32[8] work "gradient"
  b3: float32[8] plane0@0 "total"
    0 Map        b2 <-   [8]  (0 flops, 32 bytes)  # zeros
        %0:f32 = 0.0 -> %0
    1 ScatterAdd b2 <- b0, b1, b2  1x3x2 rows 4  (6 flops, 96 bytes)  # gather gradient
    2 Map        b3 <- b3, b2  [8]  (8 flops, 96 bytes)  # accumulate
        %0:f32 = load 0; %1:f32 = load 1; %2:f32 = Add %0 %1 -> %2
"#,
        after: r#"
draft: 2 instructions, 4 buffers
  b0: float32[6] work "source"  input
  b1: int64[3] const0 "index"
  b2: float32[8] work "gradient"
  b3: float32[8] plane0@0 "total"
    0 Map        b2 <-   [8]  (0 flops, 32 bytes)  # zeros
        %0:f32 = 0.0 -> %0
    1 ScatterAdd b3 <- b0, b1, b3  1x3x2 rows 4  (6 flops, 96 bytes)  # gather gradient
"#,
        ..s.example(&[source], &[])
    }
}

/// A softmax of scores between two products.
fn fuse_attention() -> Example {
    let mut s = Sketch::default();
    let [q, k, v, scores, weights, y] = s.floats(["q", "k", "v", "scores", "weights", "y"], 4);
    let (a, b) = (s.matrix(q, 2), s.transposed(k, 2));
    s.product("scores", (2, 2, 2), a, b, scores);
    let [from, to] = [scores, weights].map(|id| s.matrix(id, 2));
    s.nest("softmax", (&[2, 2], 1), &[from], &[to], |b, x| {
        let largest = b.reduced(0, Type::F32);
        let shifted = b.sub(x[0], largest);
        let power = b.unary(UnaryOp::Exp, shifted);
        let sum = b.reduced(1, Type::F32);
        (vec![b.div(power, sum)], vec![(ReduceOp::Max, x[0]), (ReduceOp::Sum, power)])
    });
    let [a, b] = [weights, v].map(|id| s.matrix(id, 2));
    s.product("output", (2, 2, 2), a, b, y);
    Example {
        before: r#"
draft: 3 instructions, 6 buffers
  b0: float32[4] work "q"  input
  b1: float32[4] work "k"  input
  b2: float32[4] work "v"  input
  b3: float32[4] work "scores"
  b4: float32[4] work "weights"
  b5: float32[4] work "y"  output
    0 MatMul     b3 <- b0, b1  [] 2x2x2  (16 flops, 48 bytes)  # scores
        %0:f32 = load 0 -> %0
    1 Reduce     b4 <- b3  [2] over [2]  (20 flops, 32 bytes)  # softmax
        reduce 0: Max of %0
        reduce 1: Sum of %3
        %0:f32 = load 0; %1:f32 = reduced 0; %2:f32 = Sub %0 %1; %3:f32 = Exp %2; %4:f32 = reduced 1;
          %5:f32 = Div %3 %4 -> %5
    2 MatMul     b5 <- b4, b2  [] 2x2x2  (16 flops, 48 bytes)  # output
        %0:f32 = load 0 -> %0
"#,
        after: r#"
draft: 1 instructions, 6 buffers
  b0: float32[4] work "q"  input
  b1: float32[4] work "k"  input
  b2: float32[4] work "v"  input
  b5: float32[4] work "y"  output
    0 Attention  b5 <- b0, b1, b2  [] 2x2 of 2 and 2  (52 flops, 64 bytes)  # scores + softmax + output
        scores: %0:f32 = load 0 -> %0
        weights: %0:f32 = load 0 -> %0
        output: %0:f32 = load 0 -> %0
"#,
        ..s.example(&[q, k, v], &[y])
    }
}

/// A chain of three maps.
fn fuse_chains() -> Example {
    let mut s = Sketch::default();
    let [x, a, b, y] = s.floats(["x", "a", "b", "y"], 4);
    s.flat("exp", &[x], &[a], |b, x| vec![b.unary(UnaryOp::Exp, x[0])]);
    s.flat("neg", &[a], &[b], |b, x| vec![b.unary(UnaryOp::Neg, x[0])]);
    s.flat("add", &[b, x], &[y], |b, x| vec![b.add(x[0], x[1])]);
    Example {
        before: r#"
draft: 3 instructions, 4 buffers
  b0: float32[4] work "x"  input
  b1: float32[4] work "a"
  b2: float32[4] work "b"
  b3: float32[4] work "y"  output
    0 Map        b1 <- b0  [4]  (4 flops, 32 bytes)  # exp
        %0:f32 = load 0; %1:f32 = Exp %0 -> %1
    1 Map        b2 <- b1  [4]  (4 flops, 32 bytes)  # neg
        %0:f32 = load 0; %1:f32 = Neg %0 -> %1
    2 Map        b3 <- b2, b0  [4]  (4 flops, 48 bytes)  # add
        %0:f32 = load 0; %1:f32 = load 1; %2:f32 = Add %0 %1 -> %2
"#,
        after: r#"
draft: 1 instructions, 4 buffers
  b0: float32[4] work "x"  input
  b3: float32[4] work "y"  output
    0 Map        b3 <- b0  [4]  (12 flops, 32 bytes)  # exp + neg + add
        %0:f32 = load 0; %1:f32 = Exp %0; %2:f32 = Neg %1; %3:f32 = Add %2 %0 -> %3
"#,
        ..s.example(&[x], &[y])
    }
}

/// A gradient is multiplied by two saved values: `g * a + g * b` becomes `g * (a + b)`, with different roundings, and
/// only the sum is saved.
fn precompute_derivatives() -> Example {
    let mut s = Sketch::default();
    let [x, a, b, y, g, dx] = s.floats(["x", "a", "b", "y", "g", "dx"], 64);
    s.flat("sin", &[x], &[a, b], |b, x| vec![b.unary(UnaryOp::Sin, x[0]), b.unary(UnaryOp::Cos, x[0])]);
    s.flat("mul", &[a, b], &[y], |b, x| vec![b.mul(x[0], x[1])]);
    s.flat("neg", &[y], &[g], |b, x| vec![b.unary(UnaryOp::Neg, x[0])]);
    s.flat("gradient", &[g, a, b], &[dx], |b, x| {
        let [first, other] = [1, 2].map(|k| b.mul(x[0], x[k]));
        vec![b.add(first, other)]
    });
    Example {
        promise: Promise::OtherRoundings,
        before: r#"
draft: 4 instructions, 6 buffers
  b0: float32[64] work "x"  input
  b1: float32[64] work "a"
  b2: float32[64] work "b"
  b3: float32[64] work "y"  output
  b4: float32[64] work "g"
  b5: float32[64] work "dx"  output
    0 Map        b1, b2 <- b0  [64]  (128 flops, 768 bytes)  # sin
        %0:f32 = load 0; %1:f32 = Sin %0; %2:f32 = Cos %0 -> %1, %2
    1 Map        b3 <- b1, b2  [64]  (64 flops, 768 bytes)  # mul
        %0:f32 = load 0; %1:f32 = load 1; %2:f32 = Mul %0 %1 -> %2
    2 Map        b4 <- b3  [64]  (64 flops, 512 bytes)  # neg
        %0:f32 = load 0; %1:f32 = Neg %0 -> %1
    3 Map        b5 <- b4, b1, b2  [64]  (192 flops, 1024 bytes)  # gradient
        %0:f32 = load 0; %1:f32 = load 1; %2:f32 = load 2; %3:f32 = Mul %0 %1; %4:f32 = Mul %0 %2;
          %5:f32 = Add %3 %4 -> %5
"#,
        after: r#"
draft: 5 instructions, 7 buffers
  b0: float32[64] work "x"  input
  b1: float32[64] work "a"
  b2: float32[64] work "b"
  b3: float32[64] work "y"  output
  b4: float32[64] work "g"
  b5: float32[64] work "dx"  output
  b6: float32[64] work "dx/slope"
    0 Map        b1, b2 <- b0  [64]  (128 flops, 768 bytes)  # sin
        %0:f32 = load 0; %1:f32 = Sin %0; %2:f32 = Cos %0 -> %1, %2
    1 Map        b6 <- b1, b2  [64]  (64 flops, 768 bytes)  # gradient
        %0:f32 = load 0; %1:f32 = load 1; %2:f32 = Add %0 %1 -> %2
    2 Map        b3 <- b1, b2  [64]  (64 flops, 768 bytes)  # mul
        %0:f32 = load 0; %1:f32 = load 1; %2:f32 = Mul %0 %1 -> %2
    3 Map        b4 <- b3  [64]  (64 flops, 512 bytes)  # neg
        %0:f32 = load 0; %1:f32 = Neg %0 -> %1
    4 Map        b5 <- b4, b6  [64]  (64 flops, 768 bytes)  # gradient
        %0:f32 = load 0; %1:f32 = load 1; %2:f32 = Mul %0 %1 -> %2
"#,
        ..s.example(&[x], &[y, dx])
    }
}

/// A product, then a bias and an activation.
fn fusion() -> Example {
    let mut s = Sketch::default();
    let [x, w] = s.floats(["x", "w"], 4);
    let [bias] = s.floats(["bias"], 2);
    let [xw, sum, y] = s.floats(["xw", "sum", "y"], 4);
    let [a, b] = [x, w].map(|id| s.matrix(id, 2));
    s.product("matmul", (2, 2, 2), a, b, xw);
    let (from, by_column, to) = (s.matrix(xw, 2), s.at(bias, &[0, 1]), s.matrix(sum, 2));
    s.map("bias", &[2, 2], &[from, by_column], &[to], |b, x| vec![b.add(x[0], x[1])]);
    s.flat("tanh", &[sum], &[y], |b, x| vec![b.unary(UnaryOp::Tanh, x[0])]);
    Example {
        before: r#"
draft: 3 instructions, 6 buffers
  b0: float32[4] work "x"  input
  b1: float32[4] work "w"  input
  b2: float32[2] work "bias"  input
  b3: float32[4] work "xw"
  b4: float32[4] work "sum"
  b5: float32[4] work "y"  output
    0 MatMul     b3 <- b0, b1  [] 2x2x2  (16 flops, 48 bytes)  # matmul
        %0:f32 = load 0 -> %0
    1 Map        b4 <- b3, b2  [2, 2]  (4 flops, 40 bytes)  # bias
        %0:f32 = load 0; %1:f32 = load 1; %2:f32 = Add %0 %1 -> %2
    2 Map        b5 <- b4  [4]  (4 flops, 32 bytes)  # tanh
        %0:f32 = load 0; %1:f32 = Tanh %0 -> %1
"#,
        after: r#"
draft: 1 instructions, 6 buffers
  b0: float32[4] work "x"  input
  b1: float32[4] work "w"  input
  b2: float32[2] work "bias"  input
  b5: float32[4] work "y"  output
    0 MatMul     b5 <- b0, b1, b2  [] 2x2x2  (24 flops, 56 bytes)  # matmul + bias + tanh
        %0:f32 = load 0; %1:f32 = load 1; %2:f32 = Add %0 %1; %3:f32 = Tanh %2 -> %3
"#,
        ..s.example(&[x, w, bias], &[y])
    }
}

/// A product in float16: its factors are rounded copies of floats, and its result is converted to float.
fn fusion_of_narrow_floats() -> Example {
    let mut s = Sketch::default();
    let [x, w, y] = s.floats(["x", "w", "y"], 4);
    let [x16, w16, xw, sum] = ["x16", "w16", "xw", "sum"].map(|label| s.work(label, DType::F16, 4));
    s.flat("x16", &[x], &[x16], |_, x| vec![x[0]]);
    let (from, to) = (s.matrix(w, 2), s.transposed(w16, 2));
    s.map("w16", &[2, 2], &[from], &[to], |_, x| vec![x[0]]);
    let [a, b] = [x16, w16].map(|id| s.matrix(id, 2));
    s.product("matmul", (2, 2, 2), a, b, xw);
    s.flat("twice", &[xw], &[sum], |b, x| vec![b.add(x[0], x[0])]);
    s.flat("y", &[sum], &[y], |_, x| vec![x[0]]);
    Example {
        before: r#"
draft: 5 instructions, 7 buffers
  b0: float32[4] work "x"  input
  b1: float32[4] work "w"  input
  b2: float32[4] work "y"  output
  b3: float16[4] work "x16"
  b4: float16[4] work "w16"
  b5: float16[4] work "xw"
  b6: float16[4] work "sum"
    0 Map        b3 <- b0  [4]  (0 flops, 24 bytes)  # x16
        %0:f32 = load 0 -> %0
    1 Map        b4 <- b1  [2, 2]  (0 flops, 24 bytes)  # w16
        %0:f32 = load 0 -> %0
    2 MatMul     b5 <- b3, b4  [] 2x2x2  (16 flops, 24 bytes)  # matmul
        %0:f32 = load 0 -> %0
    3 Map        b6 <- b5  [4]  (4 flops, 16 bytes)  # twice
        %0:f32 = load 0; %1:f32 = Add %0 %0 -> %1
    4 Map        b2 <- b6  [4]  (0 flops, 24 bytes)  # y
        %0:f32 = load 0 -> %0
"#,
        after: r#"
draft: 1 instructions, 7 buffers
  b0: float32[4] work "x"  input
  b1: float32[4] work "w"  input
  b2: float32[4] work "y"  output
    0 MatMul     b2 <- b0, b1  [] 2x2x2 of float16 x float16  (20 flops, 48 bytes)  # w16 + x16 + matmul + twice + …
        %0:f32 = load 0; %1:f32 = ToF16 %0; %2:f32 = Add %1 %1; %3:f32 = ToF16 %2 -> %3
"#,
        ..s.example(&[x, w], &[y])
    }
}

/// A product with reduced precision, and a product that is too small for it.
fn choose_precision() -> Example {
    let mut s = Sketch { precision: Precision::Bf16, ..Sketch::default() };
    let [x, w, hidden] = s.floats(["x", "w", "hidden"], 17 * 17);
    let [v, y] = s.floats(["v", "y"], 17);
    let [a, b] = [x, w].map(|id| s.matrix(id, 17));
    s.product("large", (17, 17, 17), a, b, hidden);
    let (a, b) = (s.matrix(hidden, 17), s.matrix(v, 1));
    s.product("small", (17, 1, 17), a, b, y);
    Example {
        promise: Promise::OtherPrecision,
        before: r#"
draft: 2 instructions, 5 buffers
  b0: float32[289] work "x"  input
  b1: float32[289] work "w"  input
  b2: float32[289] work "hidden"
  b3: float32[17] work "v"  input
  b4: float32[17] work "y"  output
    0 MatMul     b2 <- b0, b1  [] 17x17x17  (9826 flops, 3468 bytes)  # large
        %0:f32 = load 0 -> %0
    1 MatMul     b4 <- b2, b3  [] 17x1x17  (578 flops, 1292 bytes)  # small
        %0:f32 = load 0 -> %0
"#,
        after: r#"
draft: 2 instructions, 5 buffers
  b0: float32[289] work "x"  input
  b1: float32[289] work "w"  input
  b2: float32[289] work "hidden"
  b3: float32[17] work "v"  input
  b4: float32[17] work "y"  output
    0 MatMul     b2 <- b0, b1  [] 17x17x17 bf16  (9826 flops, 3468 bytes)  # large
        %0:f32 = load 0 -> %0
    1 MatMul     b4 <- b2, b3  [] 17x1x17  (578 flops, 1292 bytes)  # small
        %0:f32 = load 0 -> %0
"#,
        ..s.example(&[x, w, v], &[y])
    }
}

/// Two steps of a recurrence multiply by the same matrix.
fn weight_prepacking() -> Example {
    let mut s = Sketch::default();
    let [w] = s.floats(["w"], 16);
    let [h0, h1, h2] = s.floats(["h0", "h1", "h2"], 8);
    for (node, from, to) in [("step 1", h0, h1), ("step 2", h1, h2)] {
        let [a, b] = [from, w].map(|id| s.matrix(id, 4));
        s.product(node, (2, 4, 4), a, b, to);
    }
    let panels = Panels { columns: 2, rows: (2, 2), min_products: 2, min_elements: 16 };
    Example {
        target: Target { panels: Some(panels), ..Target::PLAIN },
        before: r#"
draft: 2 instructions, 4 buffers
  b0: float32[16] work "w"  input
  b1: float32[8] work "h0"  input
  b2: float32[8] work "h1"
  b3: float32[8] work "h2"  output
    0 MatMul     b2 <- b1, b0  [] 2x4x4  (64 flops, 128 bytes)  # step 1
        %0:f32 = load 0 -> %0
    1 MatMul     b3 <- b2, b0  [] 2x4x4  (64 flops, 128 bytes)  # step 2
        %0:f32 = load 0 -> %0
"#,
        after: r#"
draft: 3 instructions, 5 buffers
  b0: float32[16] work "w"  input
  b1: float32[8] work "h0"  input
  b2: float32[8] work "h1"
  b3: float32[8] work "h2"  output
  b4: float32[16] work "w in panels"
    0 Map        b4 <- b0  [2, 4, 2]  (0 flops, 128 bytes)  # step 1
        %0:f32 = load 0 -> %0
    1 MatMul     b2 <- b1, b4  [2] 2x2x4  (64 flops, 128 bytes)  # step 1
        %0:f32 = load 0 -> %0
    2 MatMul     b3 <- b2, b4  [2] 2x2x4  (64 flops, 128 bytes)  # step 2
        %0:f32 = load 0 -> %0
"#,
        ..s.example(&[w, h0], &[h2])
    }
}

/// A parameter is updated before a label is checked.
fn fallible_first() -> Example {
    let mut s = Sketch::default();
    let [g, table] = s.floats(["g", "table"], 4);
    let [flag] = s.floats(["found"], 2);
    let labels = s.constant("labels", Tensor::i64(&[2], &[3, 0]));
    let w = s.plane("w", 4);
    s.flat("update", &[w, g], &[w], |b, x| vec![b.sub(x[0], x[1])]);
    let (numbers, rows, to) = (s.at(labels, &[1]), s.at(table, &[0]), s.at(flag, &[1]));
    s.map("pick", &[2], &[numbers, rows], &[to], |b, x| {
        let label = b.guard(x[0], 4);
        vec![b.load_at(1, label, Type::F32)]
    });
    Example {
        before: r#"
draft: 2 instructions, 5 buffers
  b0: float32[4] work "g"  input
  b1: float32[4] work "table"  input
  b2: float32[2] work "found"  output
  b3: int64[2] const0 "labels"
  b4: float32[4] plane0@0 "w"
    0 Map        b4 <- b4, b0  [4]  (4 flops, 48 bytes)  # update
        %0:f32 = load 0; %1:f32 = load 1; %2:f32 = Sub %0 %1 -> %2
    1 Map        b2 <- b3, b1  [2]  (0 flops, 32 bytes)  # pick
        %0:i64 = load 0; %1:i64 = 4; %2:i64 = guard %0 < %1; %3:f32 = load 1[%2] -> %3
"#,
        after: r#"
draft: 2 instructions, 5 buffers
  b0: float32[4] work "g"  input
  b1: float32[4] work "table"  input
  b2: float32[2] work "found"  output
  b3: int64[2] const0 "labels"
  b4: float32[4] plane0@0 "w"
    0 Map        b2 <- b3, b1  [2]  (0 flops, 32 bytes)  # pick
        %0:i64 = load 0; %1:i64 = 4; %2:i64 = guard %0 < %1; %3:f32 = load 1[%2] -> %3
    1 Map        b4 <- b4, b0  [4]  (4 flops, 48 bytes)  # update
        %0:f32 = load 0; %1:f32 = load 1; %2:f32 = Sub %0 %1 -> %2
"#,
        ..s.example(&[g, table], &[flag])
    }
}

/// A mask is live across the peak.
fn mask_packing() -> Example {
    const LEN: usize = 1024;
    let mut s = Sketch::default();
    let [x, y] = s.floats(["x", "y"], LEN);
    let [large] = s.floats(["large"], 4 * LEN);
    let [dx] = s.floats(["dx"], LEN);
    let mask = s.work("mask", DType::Bool, LEN);
    s.flat("relu", &[x], &[y, mask], |b, x| {
        let zero = b.constant(Type::F32, 0.0);
        let is_positive = b.compare(CompareOp::Lt, zero, x[0]);
        vec![b.select(is_positive, x[0], zero), is_positive]
    });
    let (from, to) = (s.at(y, &[0, 1]), s.at(large, &[LEN as isize, 1]));
    s.map("expand", &[4, LEN], &[from], &[to], |_, x| vec![x[0]]);
    let (from, to) = (s.at(large, &[1, LEN as isize]), s.at(y, &[1, 0]));
    s.nest("sum", (&[LEN, 4], 1), &[from], &[to], |b, x| {
        (vec![b.reduced(0, Type::F32)], vec![(ReduceOp::Sum, x[0])])
    });
    s.flat("relu gradient", &[y, mask], &[dx], |b, x| {
        let zero = b.constant(Type::F32, 0.0);
        vec![b.select(x[1], x[0], zero)]
    });
    Example {
        target: Target { min_mask_elements: LEN, ..Target::PLAIN },
        before: r#"
draft: 4 instructions, 5 buffers
  b0: float32[1024] work "x"  input
  b1: float32[1024] work "y"
  b2: float32[4096] work "large"
  b3: float32[1024] work "dx"  output
  b4: bool[1024] work "mask"
    0 Map        b1, b4 <- b0  [1024]  (0 flops, 9216 bytes)  # relu
        %0:f32 = load 0; %1:f32 = 0.0; %2:bool = Lt %1 %0; %3:f32 = select %2 %0 %1 -> %3, %2
    1 Map        b2 <- b1  [4, 1024]  (0 flops, 20480 bytes)  # expand
        %0:f32 = load 0 -> %0
    2 Reduce     b1 <- b2  [1024] over [4]  (4096 flops, 20480 bytes)  # sum
        reduce 0: Sum of %0
        %0:f32 = load 0; %1:f32 = reduced 0 -> %1
    3 Map        b3 <- b1, b4  [1024]  (0 flops, 9216 bytes)  # relu gradient
        %0:f32 = load 0; %1:bool = load 1; %2:f32 = 0.0; %3:f32 = select %1 %0 %2 -> %3
"#,
        after: r#"
draft: 6 instructions, 7 buffers
  b0: float32[1024] work "x"  input
  b1: float32[1024] work "y"
  b2: float32[4096] work "large"
  b3: float32[1024] work "dx"  output
  b4: bool[1024] work "mask"
  b5: uint8[128] work "mask/bits"
  b6: bool[1024] work "mask"
    0 Map        b1, b4 <- b0  [1024]  (0 flops, 9216 bytes)  # relu
        %0:f32 = load 0; %1:f32 = 0.0; %2:bool = Lt %1 %0; %3:f32 = select %2 %0 %1 -> %3, %2
    1 Map        b5 <- b4, b4, b4, b4, b4, b4, b4, b4  [128]  (896 flops, 1152 bytes)  # relu
        %0:f32 = 0.0; %1:bool = load 0; %2:f32 = 1.0; %3:f32 = select %1 %2 %0; %4:bool = load 1;
          %5:f32 = 2.0; %6:f32 = select %4 %5 %0; %7:f32 = Add %3 %6; %8:bool = load 2; %9:f32 = 4.0;
          %10:f32 = select %8 %9 %0; %11:f32 = Add %7 %10; %12:bool = load 3; %13:f32 = 8.0;
          %14:f32 = select %12 %13 %0; %15:f32 = Add %11 %14; %16:bool = load 4; %17:f32 = 16.0;
          %18:f32 = select %16 %17 %0; %19:f32 = Add %15 %18; %20:bool = load 5; %21:f32 = 32.0;
          %22:f32 = select %20 %21 %0; %23:f32 = Add %19 %22; %24:bool = load 6; %25:f32 = 64.0;
          %26:f32 = select %24 %25 %0; %27:f32 = Add %23 %26; %28:bool = load 7; %29:f32 = 128.0;
          %30:f32 = select %28 %29 %0; %31:f32 = Add %27 %30; %32:i32 = convert %31;
          %33:u32 = convert %32 -> %33
    2 Map        b2 <- b1  [4, 1024]  (0 flops, 20480 bytes)  # expand
        %0:f32 = load 0 -> %0
    3 Reduce     b1 <- b2  [1024] over [4]  (4096 flops, 20480 bytes)  # sum
        reduce 0: Sum of %0
        %0:f32 = load 0; %1:f32 = reduced 0 -> %1
    4 Map        b6, b6, b6, b6, b6, b6, b6, b6 <- b5  [128]  (896 flops, 1152 bytes)  # relu gradient
        %0:f32 = 0.0; %1:f32 = load 0; %2:f32 = 128.0; %3:bool = Le %2 %1; %4:f32 = select %3 %2 %0;
          %5:f32 = Sub %1 %4; %6:f32 = 64.0; %7:bool = Le %6 %5; %8:f32 = select %7 %6 %0; %9:f32 = Sub %5 %8;
          %10:f32 = 32.0; %11:bool = Le %10 %9; %12:f32 = select %11 %10 %0; %13:f32 = Sub %9 %12;
          %14:f32 = 16.0; %15:bool = Le %14 %13; %16:f32 = select %15 %14 %0; %17:f32 = Sub %13 %16;
          %18:f32 = 8.0; %19:bool = Le %18 %17; %20:f32 = select %19 %18 %0; %21:f32 = Sub %17 %20;
          %22:f32 = 4.0; %23:bool = Le %22 %21; %24:f32 = select %23 %22 %0; %25:f32 = Sub %21 %24;
          %26:f32 = 2.0; %27:bool = Le %26 %25; %28:f32 = select %27 %26 %0; %29:f32 = Sub %25 %28;
          %30:f32 = 1.0; %31:bool = Le %30 %29 -> %31, %27, %23, %19, %15, %11, %7, %3
    5 Map        b3 <- b1, b6  [1024]  (0 flops, 9216 bytes)  # relu gradient
        %0:f32 = load 0; %1:bool = load 1; %2:f32 = 0.0; %3:f32 = select %1 %0 %2 -> %3
"#,
        ..s.example(&[x], &[dx])
    }
}

/// A bottleneck over two images: few channels, many, few.
fn batch_tiling() -> Example {
    const SIZE: usize = 8;
    let mut s = Sketch::default();
    let [x, y] = s.floats(["x", "y"], 2 * SIZE * SIZE);
    let [wide] = s.floats(["wide"], 2 * 4 * SIZE * SIZE);
    let [forward, back] = s.floats(["there", "back"], 4);
    let axis =
        SlidingAxis { input: SIZE, output: SIZE, kernel: 1, stride: 1, dilation: 1, padding_before: 0 };
    for (node, (from, to), channels, filter) in
        [("widen", (x, wide), (1, 4), forward), ("narrow", (wide, y), (4, 1), back)]
    {
        let shape = ConvShape {
            pass: ConvPass::Output,
            batch: 2,
            groups: 1,
            channels_in: channels.0,
            channels_out: channels.1,
            axes: [axis, axis].into_iter().collect(),
        };
        let [a, b, result] = shape.operands();
        let (a, b) = (Operand::contiguous(from, DType::F32, &a), Operand::contiguous(filter, DType::F32, &b));
        let (precision, epilogue) =
            (Precision::F32, epilogue(&result, Operand::contiguous(to, DType::F32, &result)));
        s.emit(node, Instruction::from(Conv { shape, a, b, precision, epilogue }));
    }
    let batch_tiles = BatchTiles {
        min_intermediate_bytes: 2048,
        min_part_bytes: 1024,
        filter_divisor: 1,
        saving_divisor: 16,
    };
    Example {
        target: Target { batch_tiles: Some(batch_tiles), ..Target::PLAIN },
        before: r#"
draft: 2 instructions, 5 buffers
  b0: float32[128] work "x"  input
  b1: float32[128] work "y"  output
  b2: float32[512] work "wide"
  b3: float32[4] work "there"  input
  b4: float32[4] work "back"  input
    0 Conv       b2 <- b0, b3  Output [2, 1, 8, 8] x [4, 1, 1, 1]  (1024 flops, 2576 bytes)  # widen
        %0:f32 = load 0 -> %0
    1 Conv       b1 <- b2, b4  Output [2, 4, 8, 8] x [1, 4, 1, 1]  (1024 flops, 2576 bytes)  # narrow
        %0:f32 = load 0 -> %0
"#,
        after: r#"
draft: 4 instructions, 6 buffers
  b0: float32[128] work "x"  input
  b1: float32[128] work "y"  output
  b3: float32[4] work "there"  input
  b4: float32[4] work "back"  input
  b5: float32[256] work "wide"
    0 Conv       b5 <- b0, b3  Output [1, 1, 8, 8] x [4, 1, 1, 1]  (512 flops, 1296 bytes)  # widen
        %0:f32 = load 0 -> %0
    1 Conv       b1 <- b5, b4  Output [1, 4, 8, 8] x [1, 4, 1, 1]  (512 flops, 1296 bytes)  # narrow
        %0:f32 = load 0 -> %0
    2 Conv       b5 <- b0, b3  Output [1, 1, 8, 8] x [4, 1, 1, 1]  (512 flops, 1296 bytes)  # widen
        %0:f32 = load 0 -> %0
    3 Conv       b1 <- b5, b4  Output [1, 4, 8, 8] x [1, 4, 1, 1]  (512 flops, 1296 bytes)  # narrow
        %0:f32 = load 0 -> %0
"#,
        ..s.example(&[x, forward, back], &[y])
    }
}

/// Two parameters, each with its own two steps.
fn horizontal_fusion() -> Example {
    let mut s = Sketch::default();
    let location = |at: usize| BufferLocation::Plane(PlaneId(0), at);
    let (v, w) = (s.push("v", DType::F32, 64, location(0)), s.push("w", DType::F32, 64, location(256)));
    for (of, dims, parameter) in [("v", [1, 64], v), ("w", [2, 32], w)] {
        let norms = s.work(&format!("norms of {of}"), DType::F32, dims[0]);
        let (matrix, rows) = (s.matrix(parameter, dims[1]), s.at(norms, &[1, 0]));
        s.nest(
            &format!("norms of {of}"),
            (&dims, 1),
            std::slice::from_ref(&matrix),
            std::slice::from_ref(&rows),
            |b, x| {
                let (norm, square) = (b.reduced(0, Type::F32), b.mul(x[0], x[0]));
                (vec![norm], vec![(ReduceOp::Sum, square)])
            },
        );
        s.map(&format!("step of {of}"), &dims, &[matrix.clone(), rows], &[matrix], |b, x| {
            vec![b.sub(x[0], x[1])]
        });
    }
    Example {
        before: r#"
draft: 4 instructions, 4 buffers
  b0: float32[64] plane0@0 "v"
  b1: float32[64] plane0@256 "w"
  b2: float32[1] work "norms of v"
  b3: float32[2] work "norms of w"
    0 Reduce     b2 <- b0  [1] over [64]  (128 flops, 260 bytes)  # norms of v
        reduce 0: Sum of %2
        %0:f32 = load 0; %1:f32 = reduced 0; %2:f32 = Mul %0 %0 -> %1
    1 Map        b0 <- b0, b2  [1, 64]  (64 flops, 516 bytes)  # step of v
        %0:f32 = load 0; %1:f32 = load 1; %2:f32 = Sub %0 %1 -> %2
    2 Reduce     b3 <- b1  [2] over [32]  (128 flops, 264 bytes)  # norms of w
        reduce 0: Sum of %2
        %0:f32 = load 0; %1:f32 = reduced 0; %2:f32 = Mul %0 %0 -> %1
    3 Map        b1 <- b1, b3  [2, 32]  (64 flops, 520 bytes)  # step of w
        %0:f32 = load 0; %1:f32 = load 1; %2:f32 = Sub %0 %1 -> %2
"#,
        after: r#"
draft: 2 instructions, 4 buffers
  b0: float32[64] plane0@0 "v"
  b1: float32[64] plane0@256 "w"
  b2: float32[1] work "norms of v"
  b3: float32[2] work "norms of w"
    0 NestGroup   2 nests  (256 flops, 524 bytes)  # norms of v + norms of w
      b2 <- b0  [1] over [64]
      b3 <- b1  [2] over [32]
        reduce 0: Sum of %2
        %0:f32 = load 0; %1:f32 = reduced 0; %2:f32 = Mul %0 %0 -> %1
    1 NestGroup   2 nests  (128 flops, 1036 bytes)  # step of v + step of w
      b0 <- b0, b2  [1, 64]
      b1 <- b1, b3  [2, 32]
        %0:f32 = load 0; %1:f32 = load 1; %2:f32 = Sub %0 %1 -> %2
"#,
        ..s.example(&[], &[])
    }
}

/// Live ranges of values: two values take the bytes of dead values, one of them within the instruction that defines it.
fn memory_plan() -> Example {
    let mut s = Sketch::default();
    let [x, a, b, c, y] = s.floats(["x", "a", "b", "c", "y"], 64);
    s.flat("exp", &[x], &[a], |b, x| vec![b.unary(UnaryOp::Exp, x[0])]);
    for (node, from, to) in [("reverse", a, b), ("reverse again", b, c)] {
        let (mut from, to) = (s.at(from, &[-1]), s.at(to, &[1]));
        from.access.offset = 63;
        s.map(node, &[64], &[from], &[to], |_, x| vec![x[0]]);
    }
    s.flat("sub", &[c, x], &[y], |b, x| vec![b.sub(x[0], x[1])]);
    Example {
        before: r#"
draft: 4 instructions, 5 buffers
  b0: float32[64] work "x"  input
  b1: float32[64] work "a"
  b2: float32[64] work "b"
  b3: float32[64] work "c"
  b4: float32[64] work "y"  output
    0 Map        b1 <- b0  [64]  (64 flops, 512 bytes)  # exp
        %0:f32 = load 0; %1:f32 = Exp %0 -> %1
    1 Map        b2 <- b1  [64]  (0 flops, 512 bytes)  # reverse
        %0:f32 = load 0 -> %0
    2 Map        b3 <- b2  [64]  (0 flops, 512 bytes)  # reverse again
        %0:f32 = load 0 -> %0
    3 Map        b4 <- b3, b0  [64]  (64 flops, 768 bytes)  # sub
        %0:f32 = load 0; %1:f32 = load 1; %2:f32 = Sub %0 %1 -> %2
"#,
        after: r#"
draft: 4 instructions, 5 buffers
  b0: float32[64] work@0 "x"  input
  b1: float32[64] work@256 "a"
  b2: float32[64] work@512 "b"
  b3: float32[64] work@256 "c"
  b4: float32[64] work@256 "y"  output
    0 Map        b1 <- b0  [64]  (64 flops, 512 bytes)  # exp
        %0:f32 = load 0; %1:f32 = Exp %0 -> %1
    1 Map        b2 <- b1  [64]  (0 flops, 512 bytes)  # reverse
        %0:f32 = load 0 -> %0
    2 Map        b3 <- b2  [64]  (0 flops, 512 bytes)  # reverse again
        %0:f32 = load 0 -> %0
    3 Map        b4 <- b3, b0  [64]  (64 flops, 768 bytes)  # sub
        %0:f32 = load 0; %1:f32 = load 1; %2:f32 = Sub %0 %1 -> %2
"#,
        ..s.example(&[x], &[y])
    }
}

#[test]
fn two_results_do_not_share_bytes() {
    let mut s = Sketch::default();
    let [x, a, b, y] = s.floats(["x", "a", "b", "y"], 64);
    s.flat("make b", &[x], &[b], |b, x| vec![b.unary(UnaryOp::Exp, x[0])]);
    // The update of b is never read.
    s.flat("both", &[x, b], &[a, b], |b, x| vec![b.mul(x[0], x[0]), b.add(x[0], x[1])]);
    s.flat("last", &[a, x], &[y], |b, x| vec![b.sub(x[0], x[1])]);
    let mut draft = s.example(&[x], &[y]).draft;
    super::memory_plan::run(&mut draft, &Target::PLAIN).unwrap();
    assert_ne!(draft.buffers[a.0 as usize].location, draft.buffers[b.0 as usize].location, "{draft}");
}
