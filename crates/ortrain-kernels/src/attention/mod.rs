//! Attention: `softmax(Q·Kᵀ)·V`, and the gradients of Q, K and V, without storing a complete intermediate.
//!
//! A task has all queries of a head, or some of them, and processes them block by block. Keys and values are packed
//! once for the task. The scores of a block stay in the second-level cache, from the product that computes them to the
//! product that consumes them (`run`). The gradients recompute the scores from the same operands in the same order, so
//! that only Q, K and V are saved for them. Products of a block skip the keys that a mask hides from all of its
//! queries, such as later keys in a causal network. The gradients of K and V are sums over queries, in order. If the
//! queries of a head are divided into parts, each part has its own sums, which are joined at the end.

mod product;
mod rows;
mod run;

use std::borrow::Cow;
use std::fmt;

use ortrain_expr::{Access, BinaryOp, DType, Inst, Load, Nest, Reg, Scalar, Type};

use crate::gemm::levels::Real;
use crate::gemm::micro::Micro;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::scratch::{RunScalars, Scratch, ScratchParts};
use crate::tile::number::Float;
use crate::tile::strided_iter::StridedIter;
use crate::tile::{ALIGN, Compiler, LoopOrder, LoopPlan, TileProgram};

/// Attention, or the gradients of its operands.
///
/// `scores`, `weights` and their gradients are nests over the space of the scores: batch axes, queries, keys. Each of
/// these nests has an accumulator, its input value, and one result without a store. All of these values, and all
/// operands, have the compute type (`F32` or `F64`).
#[derive(Clone, Debug)]
pub struct AttentionDesc {
    /// Number of elements of a query and of a key.
    pub size: usize,
    /// Number of elements of a value.
    pub width: usize,
    /// Queries, over the batch axes, queries and `size`.
    pub q: Access,
    /// Keys, over the batch axes, keys and `size`.
    pub k: Access,
    /// Values, over the batch axes, keys and `width`.
    pub v: Access,
    /// Epilogue of the product of a query and a key, before the softmax over the keys.
    pub scores: Nest,
    /// Epilogue of the softmax, before the product with the values: for example dropout.
    pub weights: Nest,
    /// Computed results.
    pub pass: AttentionPass,
}

/// Computed results of an attention.
#[derive(Clone, Debug)]
pub enum AttentionPass {
    /// Weighted sums of the values. The nest is their epilogue, over the batch axes, queries and `width`; its
    /// accumulator is the sum.
    Output(Box<Nest>),
    /// Gradients, from the gradient of the sums.
    Gradients(Box<AttentionGradients>),
}

/// Gradients of an attention.
#[derive(Clone, Debug)]
pub struct AttentionGradients {
    /// Gradient of the sums, over the batch axes, queries and `width`.
    pub output_gradient: Access,
    /// Gradient of the softmax, from the gradient of the weights (first accumulator) and the softmax (second
    /// accumulator).
    pub weights: Nest,
    /// Change of the softmax (a mask, a replacement of NaN) before its gradient uses it.
    pub softmax: Nest,
    /// Gradient of the product of a query and a key, from the gradient of the softmax's operand.
    pub scores: Nest,
    /// Epilogue of the gradient of the queries, if required, over their space; its accumulator is the gradient.
    pub q: Option<Nest>,
    /// Epilogue of the gradient of the keys, if required.
    pub k: Option<Nest>,
    /// Epilogue of the gradient of the values, if required.
    pub v: Option<Nest>,
}

/// Approximate number of elements of a block of scores: several such blocks stay in the second-level cache.
const BLOCK_SCORES: usize = 16 << 10;
/// Number of elements of a block of scores if a mask differs between queries. With fewer queries in a block, the mask
/// hides more keys from all of them.
const MASKED_BLOCK_SCORES: usize = 4 << 10;
/// Minimum number of multiplications of a task.
const MIN_TASK_WORK: usize = 1 << 19;
/// Maximum number of tasks: enough for any number of cores.
const MAX_TASKS: usize = 16;
/// Maximum number of buffers of a nest.
const MAX_BUFFERS: usize = 64;
/// Bias at or below which a key is masked, and at or above which it is visible. If the magnitudes of all scores without
/// bias are at most [`MAX_UNBIASED_SCORE`], a masked score is far below a visible one, and its exponential is zero.
const MASKED_BIAS: f64 = -1e4;
const VISIBLE_BIAS: f64 = -1e3;
const MAX_UNBIASED_SCORE: f64 = 4e3;

/// Compute type of an attention.
trait Computed: Real + Float {
    fn from_constant(value: f64) -> Self;
}

impl Computed for f32 {
    fn from_constant(value: f64) -> f32 {
        value as f32
    }
}

impl Computed for f64 {
    fn from_constant(value: f64) -> f64 {
        value
    }
}

/// Compiled [`AttentionDesc`].
pub struct AttentionKernel {
    engine: Box<dyn Engine>,
}

impl fmt::Debug for AttentionKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttentionKernel").finish_non_exhaustive()
    }
}

trait Engine: Send + Sync {
    fn partition(&self) -> &Partition;
    /// # Safety
    /// The contract of [`AttentionKernel::run`].
    unsafe fn run(&self, bases: &[*mut u8], scalars: RunScalars, pool: &Pool, parts: ScratchParts);
}

impl AttentionKernel {
    /// Compiles an attention.
    ///
    /// # Errors
    /// Returns an error if an access is out of bounds, if operands are not all `F32` or all `F64`, or if a size is
    /// zero. Nests must not reduce or fail, must be well typed, and must belong to the space.
    pub fn new<'a>(
        desc: &AttentionDesc,
        compiler: impl Into<Compiler<'a>>,
    ) -> Result<AttentionKernel, String> {
        let compiler = compiler.into();
        let engine: Box<dyn Engine> = match desc.q.dtype {
            DType::F32 => Box::new(Kernel::<f32>::new(desc, compiler)?),
            DType::F64 => Box::new(Kernel::<f64>::new(desc, compiler)?),
            other => return Err(format!("attention of {other} is not supported")),
        };
        Ok(AttentionKernel { engine })
    }

    /// Describes the algorithm.
    #[must_use]
    pub fn describe(&self) -> String {
        let Partition { heads, rows, parts, .. } = *self.engine.partition();
        format!("{heads} heads, each in {parts} parts, blocks of {rows} queries")
    }

    /// Returns the bytes of scratch memory for a run on `threads` threads.
    #[must_use]
    pub fn scratch_bytes(&self, threads: usize) -> usize {
        let partition = self.engine.partition();
        partition.shared + threads.max(1) * partition.bytes
    }

    /// Computes the attention or its gradients. Allocates nothing, and gives the same bits on any number of threads.
    ///
    /// `bases` contains the start of each buffer: Q, K, V, and for gradients the gradient of the sums. Then follow the
    /// loads and stores with buffers of each nest, in the order of the description.
    ///
    /// # Panics
    /// Panics if `bases` has the wrong length, or if `scratch` is too small or not aligned.
    ///
    /// # Safety
    /// The contract of [`crate::NestKernel::run`]. The operands are loads too, and no store overlaps them.
    pub unsafe fn run(&self, bases: &[*mut u8], scalars: RunScalars, pool: &Pool, scratch: Scratch) {
        let partition = self.engine.partition();
        assert_eq!(bases.len(), partition.buffers, "one pointer for each buffer");
        let parts = scratch.split(partition.shared, partition.bytes, pool);
        // SAFETY: the caller's contract.
        unsafe { self.engine.run(bases, scalars, pool, parts) }
    }
}

/// Partition of the work, and size of the scratch memory.
#[derive(Debug)]
struct Partition {
    /// Number of matrices of scores.
    heads: usize,
    queries: usize,
    keys: usize,
    size: usize,
    width: usize,
    /// Number of queries of a block.
    rows: usize,
    /// Number of parts of the queries of a head, and of queries of a part: whole blocks.
    parts: usize,
    part: usize,
    /// Number of parts of heads per task.
    group: usize,
    buffers: usize,
    /// Bytes of the shared scratch memory, and of a worker's scratch memory.
    shared: usize,
    bytes: usize,
}

impl Partition {
    /// Creates a partition with blocks of about `scores` scores.
    fn new(heads: usize, [queries, keys, size, width]: [usize; 4], scores: usize, mr: usize) -> Partition {
        let head_work = (queries * keys).saturating_mul(size + width);
        let target_tasks =
            (head_work.saturating_mul(heads) / MIN_TASK_WORK).clamp(1, MAX_TASKS).div_ceil(heads);
        let max_rows = (scores / keys).max(mr).min(queries.div_ceil(target_tasks).max(mr));
        // Whole blocks of the micro-kernel.
        let rows = queries.div_ceil(queries.div_ceil(max_rows)).next_multiple_of(mr).min(queries);
        let blocks = queries.div_ceil(rows);
        let part = blocks.div_ceil(target_tasks.min(blocks)) * rows;
        let parts = queries.div_ceil(part);
        let group = (MIN_TASK_WORK / 2 / (head_work / parts).max(1)).max(1);
        Partition {
            heads,
            queries,
            keys,
            size,
            width,
            rows,
            parts,
            part,
            group,
            buffers: 0,
            shared: 0,
            bytes: 0,
        }
    }

    /// Reserves `bytes` of a worker's scratch memory; returns the offset.
    fn reserve(&mut self, bytes: usize) -> usize {
        let at = self.bytes;
        self.bytes += bytes.next_multiple_of(ALIGN);
        at
    }
}

/// Q, K, V, or the gradient of the sums.
#[derive(Debug)]
struct Operand {
    /// Index of the buffer.
    buffer: usize,
    offset: isize,
    batch: StridedIter,
    /// Steps from query to query (or key to key) and from element to element.
    line: isize,
    step: isize,
}

/// Operation on each score.
#[derive(Debug)]
enum Pointwise {
    Identity,
    /// Multiplication by a constant.
    Scale(f64),
    /// Multiplication by a constant, then addition of an element of a buffer. Elements are adjacent.
    Added(f64, Operand),
    Program(Box<CompiledNest>),
}

/// Nest that runs over a block while the block is in cache.
#[derive(Debug)]
struct CompiledNest {
    program: TileProgram,
    /// Number of elements of a line of its space, and of all lines of a head.
    elements: usize,
    head_elements: usize,
    /// Number of loads, and the number of loads without a buffer, which are the first ones.
    loads: usize,
    num_accumulators: usize,
    /// True if the nest has no store, and its result goes to a block.
    to_block: bool,
    /// First buffer of the nest, and number of its buffers.
    buffer: usize,
    buffers: usize,
    /// Offset of its frame in scratch memory.
    frame: usize,
    /// Destination of its lines, if the nest only stores them, with adjacent elements.
    direct_store: Option<Operand>,
}

/// Offsets in a worker's scratch memory (or, for sums of parts, in the shared memory).
#[derive(Debug, Default)]
struct Layout {
    /// Kᵀ and Vᵀ as right factors, for scores and gradients of weights.
    k_transposed: usize,
    v_transposed: usize,
    /// K and V as right factors.
    k: usize,
    v: usize,
    /// Queries and gradients of the sums of a block, as right factors.
    q_block: usize,
    output_gradient_block: usize,
    /// Blocks of scores: the softmax, the weights of the values, and gradients.
    softmax: usize,
    weights: usize,
    gradients: usize,
    /// Block of a result.
    result: usize,
    corner: usize,
    /// Gradients of K and V; by head and part if they are in shared memory.
    k_sums: usize,
    v_sums: usize,
}

#[derive(Debug)]
struct Gradients {
    output_gradient: Operand,
    weights: Pointwise,
    softmax: Pointwise,
    scores: Pointwise,
    q: Option<CompiledNest>,
    k: Option<CompiledNest>,
    v: Option<CompiledNest>,
}

#[derive(Debug)]
enum Pass {
    Output(Box<CompiledNest>),
    Gradients(Box<Gradients>),
}

struct Kernel<T: 'static> {
    isa: Isa,
    micro: Micro<T>,
    partition: Partition,
    q: Operand,
    k: Operand,
    v: Operand,
    scores: Pointwise,
    weights: Pointwise,
    pass: Pass,
    layout: Layout,
}

/// Builder of a kernel.
struct KernelBuilder<'a> {
    compiler: Compiler<'a>,
    real: DType,
    batch: &'a [usize],
    cut: Partition,
}

impl KernelBuilder<'_> {
    fn add_operand(&mut self, access: &Access, lines: usize, elements: usize) -> Result<Operand, String> {
        let dims: Vec<usize> = self.batch.iter().copied().chain([lines, elements]).collect();
        if access.dtype != self.real || access.strides.len() != dims.len() {
            return Err(format!(
                "operand {access:?} does not fit an attention over {dims:?} of {}",
                self.real
            ));
        }
        if let Some((low, high)) = access.position_range(&dims)
            && (low < 0 || high >= access.len as isize)
        {
            return Err(format!("elements {low}..={high} of a buffer of {}", access.len));
        }
        let buffer = self.cut.buffers;
        self.cut.buffers += 1;
        self.operand_lines(access, buffer)
    }

    /// Returns an operand for the lines of an access.
    fn operand_lines(&self, access: &Access, buffer: usize) -> Result<Operand, String> {
        let axes = self.batch.len();
        let batch = self.batch.iter().copied().zip(access.strides.iter().copied());
        Ok(Operand {
            buffer,
            offset: access.offset as isize,
            batch: StridedIter::new(batch)?,
            line: access.strides[axes],
            step: access.strides[axes + 1],
        })
    }

    /// Compiles a nest with `accumulator_count` accumulators. Its result goes to its store, or to a block.
    fn compile_nest(
        &mut self,
        nest: &Nest,
        [lines, elements]: [usize; 2],
        accumulator_count: usize,
        to_block: bool,
    ) -> Result<CompiledNest, String> {
        let axes = self.batch.len();
        let dims = self.batch.iter().copied().chain([lines, elements]);
        if !dims.eq(nest.dims.iter().copied()) || nest.inner != 0 || nest.expr.can_fail() {
            return Err(format!("a nest over {:?} does not fit the attention", nest.dims));
        }
        let (loads, stores) = (nest.loads.len(), nest.stores.len());
        let accumulators =
            nest.loads.iter().take_while(|load| **load == Load::Accumulator(self.real)).count();
        if accumulators != accumulator_count || nest.num_accumulators() != accumulator_count {
            return Err(format!("a nest must have {accumulator_count} accumulators of type {}", self.real));
        }
        let mut nest = Cow::Borrowed(nest);
        if to_block {
            let contiguous = Access::contiguous(self.real, &nest.dims);
            nest.to_mut().stores.push(contiguous);
        }
        let nest = &*nest;
        if loads + stores.max(1) > MAX_BUFFERS {
            return Err(format!("more than {MAX_BUFFERS} buffers"));
        }
        let outside: Vec<usize> = (0..axes).collect();
        let plan =
            LoopPlan { nest, loop_order: LoopOrder::Map, outer_axes: &outside, tile_axes: &[axes, axes + 1] };
        let tape = TileProgram::new(&plan, self.compiler)?;
        let frame = self.cut.reserve(tape.frame);
        let (buffer, buffers) = (self.cut.buffers, loads - accumulator_count + stores);
        self.cut.buffers += buffers;
        let len = lines * elements;
        let plain = (loads, stores) == (1, 1)
            && nest.stores.iter().all(|store| store.dtype == self.real && store.strides[axes + 1] == 1);
        let destination = match plain.then(|| match_scale_and_add(nest, self.real)).flatten() {
            Some(ScaleAndAdd { factor: None, added: None }) => {
                Some(self.operand_lines(&nest.stores[0], buffer)?)
            }
            _ => None,
        };
        Ok(CompiledNest {
            program: tape,
            elements,
            head_elements: len,
            loads,
            num_accumulators: accumulator_count,
            to_block,
            buffer,
            buffers,
            frame,
            direct_store: destination,
        })
    }

    /// Compiles a nest over scores. It needs no tile program if it multiplies by a constant and is `scalable`, or if it
    /// adds a buffer and is `addable`.
    fn compile_pointwise(
        &mut self,
        nest: &Nest,
        accumulators: usize,
        [scalable, addable]: [bool; 2],
    ) -> Result<Pointwise, String> {
        if !nest.stores.is_empty() || nest.expr.outputs().len() != 1 {
            return Err("a nest over scores must have exactly 1 result and no stores".to_owned());
        }
        let compiled = self.compile_nest(nest, [self.cut.queries, self.cut.keys], accumulators, true)?;
        let side_by_side = |access: &Access| access.dtype == self.real && access.strides.last() == Some(&1);
        Ok(match match_scale_and_add(nest, self.real) {
            Some(ScaleAndAdd { factor: None, added: None }) => Pointwise::Identity,
            Some(ScaleAndAdd { factor: Some(factor), added: None }) if scalable => Pointwise::Scale(factor),
            Some(ScaleAndAdd { factor, added: Some(slot) }) if addable && slot == accumulators => {
                match &nest.loads[slot] {
                    Load::Buffer(access) if side_by_side(access) => {
                        Pointwise::Added(factor.unwrap_or(1.0), self.operand_lines(access, compiled.buffer)?)
                    }
                    _ => Pointwise::Program(Box::new(compiled)),
                }
            }
            _ => Pointwise::Program(Box::new(compiled)),
        })
    }
}

/// Operation of a simple nest on its accumulator: multiplication by a constant, then addition of another load.
struct ScaleAndAdd {
    factor: Option<f64>,
    added: Option<usize>,
}

fn match_scale_and_add(nest: &Nest, real: DType) -> Option<ScaleAndAdd> {
    let insts = nest.expr.insts();
    let inst = |reg: Reg| insts[usize::from(reg.0)];
    let is_accumulator = |reg: Reg| inst(reg) == (Inst::Load(0), Type::of(real));
    let constant = |reg: Reg| match inst(reg).0 {
        Inst::Const(Scalar::F32(value)) => Some(f64::from(value)),
        Inst::Const(Scalar::F64(value)) => Some(value),
        _ => None,
    };
    let scaled = |reg: Reg, added: Option<usize>| {
        if is_accumulator(reg) {
            return Some(ScaleAndAdd { factor: None, added });
        }
        let factor = match inst(reg).0 {
            Inst::Binary(BinaryOp::Mul, x, c) if is_accumulator(x) => constant(c),
            Inst::Binary(BinaryOp::Mul, c, x) if is_accumulator(x) => constant(c),
            // Division by a power of two equals multiplication by its reciprocal, bit for bit.
            Inst::Binary(BinaryOp::Div, x, c) if is_accumulator(x) => constant(c)
                .filter(|c| (1e-30..1e30).contains(&c.abs()) && libm::frexp(*c).0.abs() == 0.5)
                .map(|c| 1.0 / c),
            _ => None,
        };
        factor.map(|factor| ScaleAndAdd { factor: Some(factor), added })
    };
    let result = nest.expr.outputs()[0];
    let sum = |x: Reg, y: Reg| match inst(y) {
        (Inst::Load(slot), ty) if slot > 0 && ty == Type::of(real) => scaled(x, Some(usize::from(slot))),
        _ => None,
    };
    match inst(result).0 {
        Inst::Binary(BinaryOp::Add, x, y) => sum(x, y).or_else(|| sum(y, x)),
        _ => scaled(result, None),
    }
}

impl<T: Computed> Kernel<T> {
    fn new(desc: &AttentionDesc, compiler: Compiler<'_>) -> Result<Kernel<T>, String> {
        let isa = compiler.isa();
        let real = T::DTYPE;
        let dims = &desc.scores.dims;
        let Some(axes) = dims.len().checked_sub(2) else {
            return Err("scores need at least two axes".to_owned());
        };
        let (size, width) = (desc.size, desc.width);
        let (queries, keys) = (dims[axes], dims[axes + 1]);
        if dims.contains(&0) || size == 0 || width == 0 {
            return Err(format!("an attention must have elements, got {dims:?}, {size}, {width}"));
        }
        let micro = T::micro(isa);
        let Micro { mr, nr, .. } = micro;
        let heads = dims[..axes].iter().product();
        let differs = |mask: &Access| mask.strides.get(axes).is_some_and(|&stride| stride != 0);
        let masked = desc.scores.load_operands().any(differs);
        let scores = if masked { MASKED_BLOCK_SCORES } else { BLOCK_SCORES };
        let partition = Partition::new(heads, [queries, keys, size, width], scores, mr);
        let mut builder = KernelBuilder { compiler, real, batch: &dims[..axes], cut: partition };
        let q = builder.add_operand(&desc.q, queries, size)?;
        let k = builder.add_operand(&desc.k, keys, size)?;
        let v = builder.add_operand(&desc.v, keys, width)?;
        let gradient_operand = match &desc.pass {
            AttentionPass::Gradients(gradients) => {
                Some(builder.add_operand(&gradients.output_gradient, queries, width)?)
            }
            AttentionPass::Output(_) => None,
        };
        let scores = builder.compile_pointwise(&desc.scores, 1, [true, true])?;
        let weights = builder.compile_pointwise(&desc.weights, 1, [false, false])?;
        let pass = match (&desc.pass, gradient_operand) {
            (AttentionPass::Output(nest), _) => {
                Pass::Output(Box::new(builder.compile_nest(nest, [queries, width], 1, false)?))
            }
            (AttentionPass::Gradients(gradients), Some(output_gradient)) => {
                let AttentionGradients { weights, softmax, scores, q, k, v, .. } = &**gradients;
                let weights = builder.compile_pointwise(weights, 2, [false, false])?;
                let softmax = builder.compile_pointwise(softmax, 1, [false, false])?;
                let scores = builder.compile_pointwise(scores, 1, [true, false])?;
                let mut result = |nest: &Option<Nest>, lines, elements| {
                    nest.as_ref()
                        .map(|nest| builder.compile_nest(nest, [lines, elements], 1, false))
                        .transpose()
                };
                let (q, k, v) = (result(q, queries, size)?, result(k, keys, size)?, result(v, keys, width)?);
                Pass::Gradients(Box::new(Gradients { output_gradient, weights, softmax, scores, q, k, v }))
            }
            (AttentionPass::Gradients(_), None) => unreachable!("the output gradient was compiled above"),
        };

        let mut partition = builder.cut;
        let rows = partition.rows;
        let packed = |lines: usize, depth: usize| lines.next_multiple_of(nr) * depth * T::BYTES;
        let mut layout = Layout {
            k_transposed: partition.reserve(packed(keys, size)),
            softmax: partition.reserve(rows * keys * T::BYTES),
            result: partition.reserve(rows * size.max(width) * T::BYTES),
            corner: partition.reserve(mr * nr * T::BYTES),
            ..Layout::default()
        };
        // Without an operation on the softmax, the softmax is the weights of the values.
        layout.weights = layout.softmax;
        match &pass {
            Pass::Output(_) => layout.v = partition.reserve(packed(width, keys)),
            Pass::Gradients(gradients) => {
                layout.v_transposed = partition.reserve(packed(keys, width));
                layout.k = partition.reserve(packed(size, keys));
                layout.q_block = partition.reserve(packed(size, rows));
                layout.output_gradient_block = partition.reserve(packed(width, rows));
                layout.gradients = partition.reserve(rows * keys * T::BYTES);
                if !matches!(weights, Pointwise::Identity) {
                    layout.weights = partition.reserve(rows * keys * T::BYTES);
                }
                for (compiled, at, elements) in
                    [(&gradients.k, &mut layout.k_sums, size), (&gradients.v, &mut layout.v_sums, width)]
                {
                    let bytes = keys * elements * T::BYTES;
                    match compiled {
                        None => {}
                        Some(_) if partition.parts == 1 => *at = partition.reserve(bytes),
                        Some(_) => {
                            *at = partition.shared;
                            partition.shared += (heads * partition.parts * bytes).next_multiple_of(ALIGN);
                        }
                    }
                }
            }
        }
        Ok(Kernel { isa, micro, partition, q, k, v, scores, weights, pass, layout })
    }
}
