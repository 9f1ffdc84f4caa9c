//! Reference evaluator: runs a program slowly and simply. It is the oracle for every backend, for fusion, and for the
//! memory plan, which it ignores: every buffer has its own memory. It also folds constants.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use ortrain_expr::{
    Access, BinaryOp, ConvPass, ConvShape, DType, Dims, Evaluation, IndexKind, InnerProduct, Mode,
    OutOfRange, Precision, QuantizedNumbers, ReduceOp, RunScalar, Scalar, SlidingAxis, Type, UnaryOp,
    WindowPass, WindowShape, flat_index_of,
};

use rustc_hash::FxHashSet;

use crate::buffer::distinct;
use crate::{
    Attention, AttentionPass, Backend, Bf16Fallback, Bindings, Buffer, BufferId, BufferLocation, Conv,
    Executable, GradientMode, Instruction, InterruptPoints, Load, MatMul, Nest, Observer, Operand,
    OutOfMemory, Program, QuantizedMatMul, RunError, RunPart, Scalars, ScatterAdd, Target,
    UnsupportedOnBackend, UnsupportedPrecision, Window, Workspace,
};

/// Backend with the reference semantics ([`Mode::Exact`]).
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

impl Backend for Reference {
    fn name(&self) -> &'static str {
        "reference"
    }

    /// Supports every precision on every machine.
    fn with_precision(
        &self,
        _: Precision,
        _: Bf16Fallback,
    ) -> Result<Arc<dyn Backend>, UnsupportedPrecision> {
        Ok(Arc::new(*self))
    }

    fn bf16_unit(&self) -> Option<&'static str> {
        None
    }

    /// Returns the processor target, because this backend is the oracle of programs for processors.
    fn target(&self) -> Target {
        Target::CPU
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>, UnsupportedOnBackend> {
        let marks = InterruptPoints::from_program(&program);
        Ok(Box::new(ReferenceExecutable(program, marks)))
    }
}

#[derive(Debug)]
struct ReferenceExecutable(Arc<Program>, InterruptPoints);

impl Executable for ReferenceExecutable {
    fn program(&self) -> &Program {
        &self.0
    }

    fn scratch_bytes(&self) -> usize {
        0
    }

    fn run_observed(
        &self,
        bindings: &Bindings<'_>,
        work: &mut Workspace,
        entry: GradientMode,
        part: RunPart,
        scalars: Scalars,
        observer: Option<&mut dyn Observer>,
    ) -> Result<(), RunError> {
        let program = &*self.0;
        let positions = program.part_positions(part)?;
        program.check_bindings(bindings, part)?;
        let mut run = Evaluator::new(program, Mode::Exact, scalars)?;
        for (k, buffer) in program.buffers.iter().enumerate() {
            // This part does not use unbound planes.
            if let BufferLocation::Plane(plane, offset) = buffer.location
                && let Some(memory) = bindings.planes.get(plane.0 as usize)
                && memory.len() >= offset + buffer.bytes()
            {
                run.buffers[k] = Scalar::read_all(buffer.dtype, &memory.to_vec(offset, buffer.bytes())?);
            }
        }
        let [before, after] = initialized_buffers(program, part)?;
        for &input in &before {
            let buffer = program.buffer(input);
            if let BufferLocation::Work(offset) = buffer.location {
                run.buffers[input.0 as usize] =
                    Scalar::read_all(buffer.dtype, &work.arena().to_vec(offset, buffer.bytes())?);
            }
        }
        let mut watch = work.take_watch();
        let outcome = run.execute(entry, positions.clone(), observer, &mut |index| {
            self.1.check_before(index, bindings, &mut watch)
        });
        work.restore_watch(watch);
        outcome?;
        let ran = program.instructions[positions]
            .iter()
            .filter(|scheduled| scheduled.gradient_modes.contains(entry));
        let written = ran.flat_map(|i| i.instruction.writes());
        let state = written.filter(|&id| matches!(program.buffer(id).location, BufferLocation::Plane(..)));
        for id in state.chain(after) {
            let buffer = program.buffer(id);
            let bytes = Scalar::to_bytes(buffer.dtype, &run.buffers[id.0 as usize]);
            match buffer.location {
                BufferLocation::Work(offset) => work.arena().write(offset, &bytes)?,
                BufferLocation::Plane(plane, offset) => {
                    bindings.planes[plane.0 as usize].write(offset, &bytes)?;
                }
                BufferLocation::Constant(_) => {}
            }
        }
        Ok(())
    }
}

/// Returns the buffers with content when a part begins, and the buffers with content when it ends.
fn initialized_buffers(program: &Program, part: RunPart) -> Result<[Vec<BufferId>; 2], RunError> {
    let mut touched = program.inputs_and_outputs(part)?.map(<[BufferId]>::to_vec);
    let Some((at, _)) = program.find_yield() else { return Ok(touched) };
    let (before, after) = program.instructions.split_at(at);
    let written = before.iter().flat_map(|scheduled| scheduled.instruction.writes());
    let initialized: FxHashSet<BufferId> = program.inputs.iter().copied().chain(written).collect();
    let used = after[1..].iter().flat_map(|scheduled| scheduled.instruction.reads());
    let required = used.chain(program.outputs.iter().copied());
    // The first part leaves these buffers in the workspace for the second part.
    touched[usize::from(part == RunPart::BeforeYield)]
        .extend(distinct(required.filter(|id| initialized.contains(id))));
    Ok(touched)
}

/// Runs a program without planes on inputs, given element by element in the order of [`Program::inputs`], and returns
/// its outputs. [`Mode::Widened`] computes every 32-bit or narrower float as `f64`.
///
/// # Errors
/// When a guard fails.
///
/// # Panics
/// When an input has the wrong number of elements, or the program uses planes: a bug of the caller.
pub fn evaluate(
    program: &Program,
    mode: Mode,
    inputs: &[Vec<Scalar>],
    scalars: Scalars,
) -> Result<Vec<Vec<Scalar>>, RunError> {
    assert!(program.planes.is_empty(), "a program with planes needs them bound");
    assert_eq!(inputs.len(), program.inputs.len(), "one list of elements per input");
    let mut run = Evaluator::new(program, mode, scalars)?;
    for (&id, elements) in program.inputs.iter().zip(inputs) {
        assert_eq!(elements.len(), program.buffer(id).len, "elements of {:?}", program.buffer(id).label);
        run.buffers[id.0 as usize].clone_from(elements);
    }
    run.execute(GradientMode::Overwrite, program.part_positions(RunPart::Full)?, None, &mut |_| Ok(()))?;
    Ok(program.outputs.iter().map(|id| run.buffers[id.0 as usize].clone()).collect())
}

struct Evaluator<'a> {
    program: &'a Program,
    mode: Mode,
    scalars: Scalars,
    buffers: Vec<Vec<Scalar>>,
}

/// Point of a nest.
struct Point<'a> {
    run: &'a Evaluator<'a>,
    nest: &'a Nest,
    /// Values of the accumulators.
    accumulators: &'a [Scalar],
    index: &'a [usize],
    reduced: &'a [Scalar],
}

impl Evaluation for Point<'_> {
    fn load(&mut self, slot: usize) -> Scalar {
        match &self.nest.loads[slot] {
            Load::Accumulator(_) => self.accumulators[slot],
            Load::Buffer(from) => self.run.buffers[from.buffer.0 as usize][from.access.position(self.index)],
        }
    }

    fn load_at(&mut self, slot: usize, index: i64) -> Scalar {
        let Load::Buffer(Operand { buffer, access }) = &self.nest.loads[slot] else {
            unreachable!("no accumulator is read by computed index")
        };
        let at = usize::try_from(index).ok().and_then(|index| access.offset.checked_add(index));
        let elements = &self.run.buffers[buffer.0 as usize];
        match at.filter(|&at| at < access.len).map(|at| elements[at]) {
            Some(element) => element,
            None => Scalar::from_f64(Type::of(access.dtype), 0.0),
        }
    }

    fn coordinate(&mut self, axis: usize) -> i64 {
        self.index[axis] as i64
    }

    fn run_scalar(&mut self, scalar: RunScalar) -> u64 {
        match scalar {
            RunScalar::Seed => self.run.scalars.seed,
            RunScalar::TrainStep => self.run.scalars.train_step,
        }
    }

    fn reduced(&mut self, k: usize) -> Scalar {
        self.reduced[k]
    }
}

/// Iterates over the indices of a box, row-major. Along each axis they start at `first` and stop before `end`.
fn box_indices(first: Vec<usize>, end: Vec<usize>) -> impl Iterator<Item = Vec<usize>> {
    let start = first.iter().zip(&end).all(|(first, end)| first < end).then(|| first.clone());
    std::iter::successors(start, move |index| {
        let mut next = index.clone();
        for axis in (0..next.len()).rev() {
            next[axis] += 1;
            if next[axis] < end[axis] {
                return Some(next);
            }
            next[axis] = first[axis];
        }
        None
    })
}

/// Iterates over the indices of a space, row-major.
fn space_indices(dims: &[usize]) -> impl Iterator<Item = Vec<usize>> {
    box_indices(vec![0; dims.len()], dims.to_vec())
}

/// Iterates over the rows of a nest as boxes: first index, and exclusive end of each axis. A row has one index along
/// the outer axes.
fn row_boxes(nest: &Nest) -> Box<dyn Iterator<Item = [Vec<usize>; 2]> + '_> {
    let point = |index: Vec<usize>| {
        let end = index.iter().map(|at| at + 1).collect();
        [index, end]
    };
    let Some(segments) = &nest.segments else {
        return Box::new(space_indices(nest.outer_dims()).map(point).map(|[mut first, mut end]| {
            first.resize(nest.dims.len(), 0);
            end.extend(nest.inner_dims());
            [first, end]
        }));
    };
    let segments = segments.iter().enumerate();
    let rows = segments.map(|(k, range)| [vec![k, range.start], vec![k + 1, range.end]]);
    if nest.is_map() {
        Box::new(rows.flat_map(move |[first, end]| box_indices(first, end).map(point)))
    } else {
        Box::new(rows)
    }
}

impl<'a> Evaluator<'a> {
    fn new(program: &'a Program, mode: Mode, scalars: Scalars) -> Result<Evaluator<'a>, RunError> {
        let elements = |buffer: &Buffer| -> Result<Vec<Scalar>, RunError> {
            if let BufferLocation::Constant(index) = buffer.location {
                return Ok(Scalar::read_all(buffer.dtype, program.constants[index].data()));
            }
            let mut zeros = Vec::new();
            let bytes = buffer.len.saturating_mul(size_of::<Scalar>());
            zeros.try_reserve_exact(buffer.len).map_err(|_| OutOfMemory { bytes })?;
            zeros.resize(buffer.len, Scalar::from_f64(Type::of(buffer.dtype), 0.0));
            Ok(zeros)
        };
        let buffers = program.buffers.iter().map(elements).collect::<Result<_, _>>()?;
        Ok(Evaluator { program, mode, scalars, buffers })
    }

    /// Runs instructions. `before` is called before each instruction.
    fn execute(
        &mut self,
        entry: GradientMode,
        positions: Range<usize>,
        mut observer: Option<&mut dyn Observer>,
        before: &mut dyn FnMut(usize) -> Result<(), RunError>,
    ) -> Result<(), RunError> {
        for index in positions {
            let scheduled = &self.program.instructions[index];
            if !scheduled.gradient_modes.contains(entry) {
                continue;
            }
            before(index)?;
            let start = Instant::now();
            let outcome = match &scheduled.instruction {
                Instruction::Nest(nest) => self.nest(nest, |_, _| None),
                Instruction::NestGroup(group) => {
                    group.nests.iter().try_for_each(|nest| self.nest(nest, |_, _| None))
                }
                Instruction::MatMul(m) => self.matmul(m),
                Instruction::QuantizedMatMul(m) => self.quantized_matmul(m),
                Instruction::Conv(c) => self.conv(c),
                Instruction::IntegerProduct(p) => self.nest(&p.as_nest(), |_, _| None),
                Instruction::Attention(a) => self.attention(a),
                Instruction::Window(w) => self.window(w),
                Instruction::ScatterAdd(s) => self.scatter(s),
                Instruction::Yield(_) => Ok(()),
            };
            outcome.map_err(|failure| RunError::out_of_range(scheduled, failure))?;
            if let Some(observer) = &mut observer {
                observer.instruction(self.program, index, start, Instant::now());
            }
        }
        Ok(())
    }

    fn nest(
        &mut self,
        nest: &Nest,
        product: impl Fn(&Evaluator<'_>, &[usize]) -> Option<Scalar>,
    ) -> Result<(), OutOfRange> {
        // Stores happen after all loads. A store may only alias a load with an equal access, so the result is the same.
        let mut pending: Vec<(usize, usize, Scalar)> = Vec::new();
        let mut regs = Vec::new();
        let evaluate = |index: &[usize], reduced: &[Scalar], needed: &[bool], regs: &mut Vec<Scalar>| {
            let product_values = product(self, index);
            let mut point =
                Point { run: self, nest, accumulators: product_values.as_slice(), index, reduced };
            let outcome = nest.expr.evaluate_into(self.mode, needed, &mut point, regs);
            outcome.map_err(|failure| OutOfRange { point: flat_index_of(&nest.dims, index), ..failure })
        };
        let outer = nest.outer_dims().len();
        let is_per_row = |store: &Operand| store.access.strides[outer..].iter().all(|&stride| stride == 0);
        let per_row: Vec<bool> = nest.stores.iter().map(is_per_row).collect();
        for [first, end] in row_boxes(nest) {
            let is_empty = first.iter().zip(&end).any(|(first, end)| first >= end);
            let mut reduced: Vec<Scalar> = Vec::new();
            for reduction in &nest.reductions {
                let needed = nest.expr.dependencies_of(&[reduction.value]);
                let ty = self.sum_type(nest.expr.ty(reduction.value));
                let mut total = reduction.op.neutral(ty);
                for index in box_indices(first.clone(), end.clone()) {
                    evaluate(&index, &reduced, &needed, &mut regs)?;
                    total = reduction.op.combine(total, regs[usize::from(reduction.value.0)]);
                }
                reduced.push(total);
            }
            // With an empty inner space, only stores per outer point are executed.
            for index in std::iter::once(first.clone()).chain(box_indices(first.clone(), end).skip(1)) {
                let is_stored = |store: &usize| if per_row[*store] { index == first } else { !is_empty };
                let stored: Vec<usize> = (0..per_row.len()).filter(is_stored).collect();
                let results = stored.iter().map(|&store| nest.expr.outputs()[store]);
                let guards = nest.expr.guards().filter(|_| !is_empty);
                let needed = nest.expr.dependencies_of(&results.chain(guards).collect::<Vec<_>>());
                evaluate(&index, &reduced, &needed, &mut regs)?;
                for store in stored {
                    let Operand { buffer, access } = &nest.stores[store];
                    let value =
                        regs[usize::from(nest.expr.outputs()[store].0)].rounded_to(access.dtype, self.mode);
                    pending.push((buffer.0 as usize, access.position(&index), value));
                }
            }
        }
        for (buffer, at, value) in pending {
            self.buffers[buffer][at] = value;
        }
        Ok(())
    }

    /// Returns the type of sums of values of type `ty`.
    fn sum_type(&self, ty: Type) -> Type {
        if ty == Type::F32 && self.mode == Mode::Widened { Type::F64 } else { ty }
    }

    /// Returns the value of a nest without reductions at a point, with `accumulator_values` in its accumulators.
    fn evaluate_nest_at(
        &self,
        nest: &Nest,
        index: &[usize],
        accumulator_values: &[Scalar],
    ) -> Result<Scalar, OutOfRange> {
        let mut point = Point { run: self, nest, accumulators: accumulator_values, index, reduced: &[] };
        Ok(nest.expr.evaluate(self.mode, &mut point)?[0])
    }

    /// Returns an element of an operand, converted to the type of the computation.
    fn load_element(
        &self,
        operand: &Operand,
        index: &[usize],
        [line, element]: [usize; 2],
        ty: Type,
    ) -> Scalar {
        let index: Vec<usize> = index.iter().copied().chain([line, element]).collect();
        self.buffers[operand.buffer.0 as usize][operand.access.position(&index)].convert(ty)
    }

    fn attention(&mut self, a: &Attention) -> Result<(), OutOfRange> {
        let &Attention { queries, keys, size, width, .. } = a;
        let ty = self.sum_type(Type::of(a.q.access.dtype));
        let zero = Scalar::from_f64(ty, 0.0);
        let mul = |x: Scalar, y: Scalar| Scalar::binary(BinaryOp::Mul, x, y);
        let sub = |x: Scalar, y: Scalar| Scalar::binary(BinaryOp::Sub, x, y);
        let sum = |terms: &mut dyn Iterator<Item = Scalar>| {
            terms.fold(zero, |total, term| ReduceOp::Sum.combine(total, term))
        };
        let heads: usize = a.batch.iter().product();
        let mut output = vec![zero; heads * queries * width];
        let (mut of_q, mut of_k) = (vec![zero; heads * queries * size], vec![zero; heads * keys * size]);
        let mut of_v = vec![zero; heads * keys * width];
        for (head, index) in space_indices(&a.batch).enumerate() {
            for i in 0..queries {
                let at = |j: usize| index.iter().copied().chain([i, j]).collect::<Vec<usize>>();
                let dot = |j: usize| {
                    let q = |l: usize| self.load_element(&a.q, &index, [i, l], ty);
                    sum(&mut (0..size).map(|l| mul(q(l), self.load_element(&a.k, &index, [j, l], ty))))
                };
                let row = |nest: &Nest, accumulator_values: &dyn Fn(usize) -> Vec<Scalar>| {
                    (0..keys)
                        .map(|j| self.evaluate_nest_at(nest, &at(j), &accumulator_values(j)))
                        .collect::<Result<Vec<Scalar>, _>>()
                };
                let scores = row(&a.scores, &|j| vec![dot(j)])?;
                let largest = ReduceOp::Max.neutral(ty);
                let largest =
                    scores.iter().fold(largest, |maximum, &score| ReduceOp::Max.combine(maximum, score));
                let power = |&score: &Scalar| Scalar::unary(UnaryOp::Exp, sub(score, largest));
                let powers: Vec<Scalar> = scores.iter().map(power).collect();
                let total = sum(&mut powers.iter().copied());
                let share = |&power: &Scalar| Scalar::binary(BinaryOp::Div, power, total);
                let softmax: Vec<Scalar> = powers.iter().map(share).collect();
                let weights = row(&a.weights, &|j| vec![softmax[j]])?;
                let value = |j: usize, d: usize| self.load_element(&a.v, &index, [j, d], ty);
                let AttentionPass::Gradients(gradients) = &a.pass else {
                    for d in 0..width {
                        output[(head * queries + i) * width + d] =
                            sum(&mut (0..keys).map(|j| mul(weights[j], value(j, d))));
                    }
                    continue;
                };
                let output_gradient =
                    |d: usize| self.load_element(&gradients.output_gradient, &index, [i, d], ty);
                let of_weight = |j: usize| sum(&mut (0..width).map(|d| mul(output_gradient(d), value(j, d))));
                let weight_gradients = row(&gradients.weights, &|j| vec![of_weight(j), softmax[j]])?;
                let scaled = row(&gradients.softmax, &|j| vec![softmax[j]])?;
                let total = sum(&mut (0..keys).map(|j| mul(weight_gradients[j], scaled[j])));
                for j in 0..keys {
                    let of_score = mul(scaled[j], sub(weight_gradients[j], total));
                    let of_product = self.evaluate_nest_at(&gradients.scores, &at(j), &[of_score])?;
                    let add = |to: &mut Scalar, x, y| *to = ReduceOp::Sum.combine(*to, mul(x, y));
                    for l in 0..size {
                        let (q, k) = ((head * queries + i) * size + l, (head * keys + j) * size + l);
                        add(&mut of_q[q], of_product, self.load_element(&a.k, &index, [j, l], ty));
                        add(&mut of_k[k], of_product, self.load_element(&a.q, &index, [i, l], ty));
                    }
                    for d in 0..width {
                        add(&mut of_v[(head * keys + j) * width + d], weights[j], output_gradient(d));
                    }
                }
            }
        }
        let mut finish = |nest: &Nest, sums: &[Scalar]| {
            self.nest(nest, |_, index| Some(sums[flat_index_of(&nest.dims, index)]))
        };
        match &a.pass {
            AttentionPass::Output(nest) => finish(nest, &output),
            AttentionPass::Gradients(gradients) => {
                let results = [(&gradients.q, of_q), (&gradients.k, of_k), (&gradients.v, of_v)];
                results
                    .iter()
                    .try_for_each(|(nest, sums)| nest.as_ref().map_or(Ok(()), |nest| finish(nest, sums)))
            }
        }
    }

    fn matmul(&mut self, m: &MatMul) -> Result<(), OutOfRange> {
        let rounded = |factor, to: Option<DType>| {
            to.and_then(UnaryOp::rounding_to).map_or(factor, |op| Scalar::unary(op, factor))
        };
        let ty = self.sum_type(Type::of(m.a.access.dtype));
        let product = |run: &Evaluator<'_>, index: &[usize]| {
            let (batch, at) = index.split_at(m.batch.len());
            let mut sum = InnerProduct::new(ty);
            for l in 0..m.k {
                let (a, b) = ([at[0], l], [l, at[1]]);
                let [a, b] = [(&m.a, a), (&m.b, b)].map(|(from, at)| run.load_element(from, batch, at, ty));
                sum.add(m.precision, rounded(a, m.rounded[0]), rounded(b, m.rounded[1]));
            }
            Some(sum.result(m.precision))
        };
        self.nest(&m.epilogue, product)
    }

    fn quantized_matmul(&mut self, m: &QuantizedMatMul) -> Result<(), OutOfRange> {
        let ty = self.sum_type(Type::F32);
        let access = m.b.access();
        let decoded = |run: &Evaluator<'_>, position: usize| {
            let matrix = &m.b.matrix;
            let of = |id: BufferId, at: usize| run.buffers[id.0 as usize][at];
            let byte = of(m.b.bytes, position / matrix.integers_per_byte()).to_f64() as u8;
            let integer = matrix.integer(byte, position);
            let block = position / matrix.block;
            let number = match (matrix.numbers, m.b.zero_points) {
                (QuantizedNumbers::Table(numbers), _) => {
                    Scalar::from_f64(ty, f64::from(numbers[usize::from(integer)]))
                }
                (QuantizedNumbers::Distances { zero_point }, zero_points) => {
                    let own = Scalar::from_f64(ty, f64::from(zero_point));
                    let zero_point = zero_points.map_or(own, |id| of(id, block).convert(ty));
                    Scalar::binary(BinaryOp::Sub, Scalar::from_f64(ty, f64::from(integer)), zero_point)
                }
            };
            let element = Scalar::binary(BinaryOp::Mul, number, of(m.b.scales, block).convert(ty));
            m.b.rounded.and_then(UnaryOp::rounding_to).map_or(element, |op| Scalar::unary(op, element))
        };
        let product = |run: &Evaluator<'_>, index: &[usize]| {
            let mut sum = InnerProduct::new(ty);
            for l in 0..m.k {
                let a = run.load_element(&m.a, &[], [index[0], l], ty);
                sum.add(m.precision, a, decoded(run, access.position(&[l, index[1]])));
            }
            Some(sum.result(m.precision))
        };
        self.nest(&m.epilogue, product)
    }

    fn conv(&mut self, c: &Conv) -> Result<(), OutOfRange> {
        let ConvShape { pass, batch, groups, channels_in, channels_out, ref axes } = c.shape;
        let ty = self.sum_type(Type::of(c.a.access.dtype));
        let [a_dims, b_dims, dims] = c.shape.operands();
        let (a, b) = (&self.buffers[c.a.buffer.0 as usize], &self.buffers[c.b.buffer.0 as usize]);
        let a = &a[c.a.access.offset..];
        let mut sums = vec![InnerProduct::new(ty); dims.iter().product()];
        let sizes = |size: fn(&SlidingAxis) -> usize| axes.iter().map(size).collect::<Vec<_>>();
        // Every product of an input element and a filter element in the definition, once.
        let mut space = vec![batch, groups, channels_in, channels_out];
        space.extend(sizes(|axis| axis.output));
        let cells: Vec<Vec<usize>> = space_indices(&sizes(|axis| axis.kernel)).collect();
        let (mut input, mut output, mut filter) = (a_dims.to_vec(), a_dims.to_vec(), a_dims.to_vec());
        for index in space_indices(&space) {
            let ([n, g, i, m], at) = ([index[0], index[1], index[2], index[3]], &index[4..]);
            (input[0], input[1]) = (n, g * channels_in + i);
            (output[0], output[1]) = (n, g * channels_out + m);
            (filter[0], filter[1]) = (g * channels_out + m, i);
            output[2..].copy_from_slice(at);
            for cell in &cells {
                let positions = axes.iter().zip(at).zip(cell).map(|((axis, &o), &k)| axis.input_at(o, k));
                let Some(positions) = positions.collect::<Option<Dims>>() else { continue };
                input[2..].copy_from_slice(&positions);
                filter[2..].copy_from_slice(cell);
                let (x, y, to) = match pass {
                    ConvPass::Output => (&input, &filter, &output),
                    ConvPass::InputGradient => (&output, &filter, &input),
                    ConvPass::FilterGradient => (&output, &input, &filter),
                };
                let (x, y) = (a[flat_index_of(&a_dims, x)], b[flat_index_of(&b_dims, y)]);
                sums[flat_index_of(&dims, to)].add(c.precision, x, y);
            }
        }
        self.nest(&c.epilogue, |_, index| Some(sums[flat_index_of(&dims, index)].result(c.precision)))
    }

    fn window(&mut self, w: &Window) -> Result<(), OutOfRange> {
        let WindowShape { pass, planes, ref axes } = w.shape;
        let dtype = w.target.access.dtype;
        let sizes = |size: fn(&SlidingAxis) -> usize| axes.iter().map(size).collect::<Vec<_>>();
        let (outputs, kernels) = (sizes(|axis| axis.output), sizes(|axis| axis.kernel));
        let (per_input, per_output) = (w.shape.plane_inputs(), w.shape.plane_outputs());
        let ty = self.sum_type(Type::of(dtype));
        let start = if pass == WindowPass::Max {
            Scalar::lowest_value_of(dtype, ty)
        } else {
            Scalar::from_f64(ty, 0.0)
        };
        let mut target = vec![start; w.shape.operands()[1]];
        let numbered = w.index.as_ref().is_some_and(|index| index.kind == IndexKind::Cell);
        let mut index: Vec<i64> = match (pass, &w.index) {
            (WindowPass::MaxGradient, Some(index)) => self.buffers[index.operand.buffer.0 as usize]
                .iter()
                .map(|position| position.to_i64())
                .collect(),
            _ if numbered => vec![0; planes * per_output],
            _ => (0..planes * per_output).map(|o| (o / per_output * per_input) as i64).collect(),
        };
        let source = &self.buffers[w.source.buffer.0 as usize];
        for plane in 0..planes {
            let first = plane * per_input;
            for (o, at) in (plane * per_output..).zip(space_indices(&outputs)) {
                let under = |cell_position| {
                    SlidingAxis::element_under_cell(axes, &at, cell_position).map(|i| first + i)
                };
                if pass == WindowPass::MaxGradient {
                    let within = if numbered {
                        under(index[o].unsigned_abs() as usize)
                    } else {
                        usize::try_from(index[o]).ok().filter(|&i| i >= first && i < first + per_input)
                    };
                    if let Some(i) = within {
                        target[i] = ReduceOp::Sum.combine(target[i], source[o].convert(ty));
                    }
                    continue;
                }
                let cells = axes.iter().zip(&at).map(|(axis, &o)| axis.cells_over_input(o));
                let (from, to) = cells.map(|cells| (cells.start, cells.end)).unzip();
                let mut is_first_found = false;
                for cell in box_indices(from, to) {
                    let cell_index = flat_index_of(&kernels, &cell);
                    let i = under(cell_index).expect("the cell lies over the input");
                    match pass {
                        WindowPass::Max => {
                            let (old, new) = (target[o], source[i].convert(ty));
                            let larger = ReduceOp::Max.combine(old, new);
                            let nan = |value: Scalar| value.to_f64().is_nan();
                            if !is_first_found || (!nan(old) && (nan(new) || larger != old)) {
                                let position = if numbered { cell_index } else { i };
                                (target[o], index[o], is_first_found) = (new, position as i64, true);
                            }
                        }
                        WindowPass::Sum => {
                            target[o] = ReduceOp::Sum.combine(target[o], source[i].convert(ty));
                        }
                        WindowPass::SumGradient => {
                            target[i] = ReduceOp::Sum.combine(target[i], source[o].convert(ty));
                        }
                        WindowPass::MaxGradient => unreachable!("has no windows"),
                    }
                }
            }
        }
        let target = target.into_iter().map(|value| value.rounded_to(dtype, self.mode)).collect();
        self.buffers[w.target.buffer.0 as usize] = target;
        if let (WindowPass::Max, Some(index_of)) = (pass, &w.index) {
            let Operand { buffer: id, access: Access { dtype, .. } } = index_of.operand;
            let position = |position| Scalar::I64(position).rounded_to(dtype, self.mode);
            self.buffers[id.0 as usize] = index.into_iter().map(position).collect();
        }
        Ok(())
    }

    fn scatter(&mut self, s: &ScatterAdd) -> Result<(), OutOfRange> {
        let dtype = s.target.access.dtype;
        for outer in 0..s.outer {
            for j in 0..s.count {
                let index = self.buffers[s.index.buffer.0 as usize][j].to_i64();
                let row = if index < 0 { index + s.rows as i64 } else { index };
                let Some(row) = usize::try_from(row).ok().filter(|&row| row < s.rows) else { continue };
                for i in 0..s.inner {
                    let from = self.buffers[s.source.buffer.0 as usize][(outer * s.count + j) * s.inner + i];
                    let to =
                        &mut self.buffers[s.target.buffer.0 as usize][(outer * s.rows + row) * s.inner + i];
                    let from = from.convert(to.ty());
                    *to = if s.overwrites {
                        from
                    } else {
                        ReduceOp::Sum.combine(*to, from).rounded_to(dtype, self.mode)
                    };
                }
            }
        }
        Ok(())
    }
}
