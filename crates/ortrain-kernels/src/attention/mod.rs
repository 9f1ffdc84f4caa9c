//! Attention: `softmax(Q·Kᵀ)·V`, and the gradients of Q, K and V, of which no intermediate is ever whole.
//!
//! A task has the queries of one head, or some of them, and goes through them a block at a time. Keys and values are
//! packed once for it; the scores of a block lie in the second-level cache, from the product that makes them to the one
//! that uses them up (`run`). The gradients make the scores again from the same operands in the same order, so nothing
//! but Q, K and V is kept for them. Keys that a mask hides from all queries of a block, as those behind them in a causal
//! net, are left out of its products. What the gradients of K and V sum up over queries is added in order: where the
//! queries of a head are parted, each part has sums of its own, which are joined at the end.

mod product;
mod rows;
mod run;

use std::borrow::Cow;
use std::fmt;

use ortrain_expr::{Access, BinaryOp, DType, Inst, Load, Nest, Reg, Scalar, Type};

use crate::gemm::micro::{Micro, Real};
use crate::isa::Isa;
use crate::pool::Pool;
use crate::scratch::{Parts, RunScalars, Scratch};
use crate::tile::number::Float;
use crate::tile::strided_iter::StridedIter;
use crate::tile::{ALIGN, Compiler, LoopOrder, Plan, TileProgram};

/// Attention, or the gradients of its operands.
///
/// The space of `scores`, `weights` and their gradients is that of the scores: batch axes, queries, keys. Each of these nests
/// has an accumulator, the value that it is given, and one result without a store. They are of the type that everything is
/// computed in (`F32` or `F64`), as are all operands.
#[derive(Clone, Debug)]
pub struct AttentionDesc {
    /// Elements of a query and of a key.
    pub size: usize,
    /// Elements of a value.
    pub width: usize,
    /// The queries, over the batch axes, queries and `size`.
    pub q: Access,
    /// The keys, over the batch axes, keys and `size`.
    pub k: Access,
    /// The values, over the batch axes, keys and `width`.
    pub v: Access,
    /// What becomes of a query's product with a key before the softmax over the keys.
    pub scores: Nest,
    /// What becomes of the softmax before it weighs the values.
    pub weights: Nest,
    /// What is computed.
    pub pass: AttentionPass,
}

/// What is computed of an attention.
#[derive(Clone, Debug)]
pub enum AttentionPass {
    /// The weighted sums of the values. The nest is their epilogue, over the batch axes, queries and `width`; its accumulator
    /// is the sums.
    Output(Box<Nest>),
    /// Gradients, of one given for the sums.
    Gradients(Box<AttentionGradients>),
}

/// The gradients of an attention.
#[derive(Clone, Debug)]
pub struct AttentionGradients {
    /// The gradient of the sums, over the batch axes, queries and `width`.
    pub given: Access,
    /// From the gradient of the weights that were used to that of the softmax, which is the second accumulator.
    pub weights: Nest,
    /// The change of the softmax (a mask, a replacement of NaN) before its gradient is taken with it.
    pub softmax: Nest,
    /// From the gradient of the softmax's operand to that of the product.
    pub scores: Nest,
    /// The epilogue of the gradient of the queries, if it is wanted, over their space; its accumulator is the gradient.
    pub q: Option<Nest>,
    /// That of the keys.
    pub k: Option<Nest>,
    /// That of the values.
    pub v: Option<Nest>,
}

/// Elements of a block of scores, about: several such blocks stay in the second-level cache.
const SCORES: usize = 16 << 10;
/// The same where a mask differs from query to query: the fewer queries a block has, the more keys it hides from all.
const MASKED_SCORES: usize = 4 << 10;
/// Multiplications that make a task worth while.
const MIN_TASK_WORK: usize = 1 << 19;
/// Tasks that are plenty for any number of cores.
const MAX_TASKS: usize = 16;
/// Buffers of a nest, at most.
const MAX_BUFFERS: usize = 64;
/// What is added to a score that has no weight, at most; and to one that has some, at least. Where no score's magnitude is
/// more than [`BOUND`] before that, those of the first kind lie so far below one of the second that their powers are zero.
const HIDDEN: f64 = -1e4;
const OPEN: f64 = -1e3;
const BOUND: f64 = 4e3;

/// A type that everything is computed in.
trait Computed: Real + Float {
    const DTYPE: DType;
    fn from_constant(value: f64) -> Self;
}

impl Computed for f32 {
    const DTYPE: DType = DType::F32;
    fn from_constant(value: f64) -> f32 {
        value as f32
    }
}

impl Computed for f64 {
    const DTYPE: DType = DType::F64;
    fn from_constant(value: f64) -> f64 {
        value
    }
}

/// A compiled [`AttentionDesc`].
pub struct AttentionKernel {
    engine: Box<dyn Engine>,
}

impl fmt::Debug for AttentionKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttentionKernel").finish_non_exhaustive()
    }
}

trait Engine: Send + Sync {
    fn cut(&self) -> &Cut;
    /// # Safety
    /// The contract of [`AttentionKernel::run`].
    unsafe fn run(&self, bases: &[*mut u8], scalars: RunScalars, pool: &Pool, parts: Parts);
}

impl AttentionKernel {
    /// Compiles an attention.
    ///
    /// # Errors
    /// What is wrong with the description: accesses out of bounds, operands that are not all `F32` or all `F64`, sizes
    /// of zero, nests that reduce, can fail, are not well typed or belong to another space.
    pub fn new<'a>(
        desc: &AttentionDesc,
        compiler: impl Into<Compiler<'a>>,
    ) -> Result<AttentionKernel, String> {
        let compiler = compiler.into();
        let engine: Box<dyn Engine> = match desc.q.dtype {
            DType::F32 => Box::new(Kernel::<f32>::new(desc, compiler)?),
            DType::F64 => Box::new(Kernel::<f64>::new(desc, compiler)?),
            other => return Err(format!("an attention of {other}")),
        };
        Ok(AttentionKernel { engine })
    }

    /// Bytes of scratch memory for a run on so many threads.
    #[must_use]
    pub fn scratch_bytes(&self, threads: usize) -> usize {
        let cut = self.engine.cut();
        cut.shared + threads.max(1) * cut.bytes
    }

    /// Computes what was described. Allocates nothing, and gives the same bits on any number of threads.
    ///
    /// `bases` holds the start of each buffer: Q, K, V, the given gradient if there is one; then for each nest, in the
    /// order of the description, its loads and stores that have buffers.
    ///
    /// # Panics
    /// When `bases` or `scratch` are not what the kernel asked for.
    ///
    /// # Safety
    /// As [`crate::NestKernel::run`], where the operands are loads too, which no store may overlap.
    pub unsafe fn run(&self, bases: &[*mut u8], scalars: RunScalars, pool: &Pool, scratch: Scratch) {
        let cut = self.engine.cut();
        assert_eq!(bases.len(), cut.buffers, "one pointer for each buffer");
        let parts = scratch.part(cut.shared, cut.bytes, pool);
        // SAFETY: the caller's contract.
        unsafe { self.engine.run(bases, scalars, pool, parts) }
    }
}

/// How the work is cut, and how much scratch memory it takes.
#[derive(Debug)]
struct Cut {
    /// Matrices of scores.
    heads: usize,
    queries: usize,
    keys: usize,
    size: usize,
    width: usize,
    /// Queries of a block.
    rows: usize,
    /// Parts of the queries of a head, and queries of a part: whole blocks.
    parts: usize,
    part: usize,
    /// Parts of heads that are one task.
    group: usize,
    buffers: usize,
    /// Shared scratch memory, and that of a worker, in bytes.
    shared: usize,
    bytes: usize,
}

impl Cut {
    /// With blocks of about so many scores.
    fn new(heads: usize, [queries, keys, size, width]: [usize; 4], scores: usize, mr: usize) -> Cut {
        let one = (queries * keys).saturating_mul(size + width);
        let wanted = (one.saturating_mul(heads) / MIN_TASK_WORK).clamp(1, MAX_TASKS).div_ceil(heads);
        let most = (scores / keys).max(mr).min(queries.div_ceil(wanted).max(mr));
        // Whole blocks of the micro-kernel.
        let rows = queries.div_ceil(queries.div_ceil(most)).next_multiple_of(mr).min(queries);
        let blocks = queries.div_ceil(rows);
        let part = blocks.div_ceil(wanted.min(blocks)) * rows;
        let parts = queries.div_ceil(part);
        let group = (MIN_TASK_WORK / 2 / (one / parts).max(1)).max(1);
        Cut { heads, queries, keys, size, width, rows, parts, part, group, buffers: 0, shared: 0, bytes: 0 }
    }

    /// Room in a worker's scratch memory.
    fn room(&mut self, bytes: usize) -> usize {
        let at = self.bytes;
        self.bytes += bytes.next_multiple_of(ALIGN);
        at
    }
}

/// Q, K, V or the gradient that is given.
#[derive(Debug)]
struct Operand {
    /// Which of the buffers it is.
    buffer: usize,
    offset: isize,
    batch: StridedIter,
    /// Steps from query to query (or key to key) and from element to element.
    line: isize,
    step: isize,
}

/// What is done with each score.
#[derive(Debug)]
enum Pointwise {
    Nothing,
    /// It is multiplied.
    Scale(f64),
    /// It is multiplied, and an element of a buffer is added. Elements lie side by side.
    Added(f64, Operand),
    Tape(Box<Taped>),
}

/// A nest that runs over a block while it is in the cache.
#[derive(Debug)]
struct Taped {
    tape: TileProgram,
    /// Elements of a line of its space, and of all lines of a head.
    elements: usize,
    whole: usize,
    /// Loads, and how many of the first ones have no buffer.
    loads: usize,
    given: usize,
    /// Whether the store has none either, but goes to a block.
    to_block: bool,
    /// Its first buffer, and how many it has.
    buffer: usize,
    buffers: usize,
    /// Where its frame lies in scratch memory.
    frame: usize,
    /// Where its lines go if it only stores them, and their elements lie side by side.
    place: Option<Operand>,
}

/// Where things lie in a worker's scratch memory (or, for sums of parts, in the shared one).
#[derive(Debug, Default)]
struct Layout {
    /// Kᵀ and Vᵀ as right factors, for scores and gradients of weights.
    k_turned: usize,
    v_turned: usize,
    /// K and V as right factors.
    k: usize,
    v: usize,
    /// Queries and gradients of a block as right factors.
    q_block: usize,
    given_block: usize,
    /// Blocks of scores: the softmax, what weighs the values, and gradients.
    softmax: usize,
    weights: usize,
    gradients: usize,
    /// A block of a result.
    result: usize,
    corner: usize,
    /// Gradients of K and V, by head and part if those are shared.
    k_sums: usize,
    v_sums: usize,
}

#[derive(Debug)]
struct Gradients {
    given: Operand,
    weights: Pointwise,
    softmax: Pointwise,
    scores: Pointwise,
    q: Option<Taped>,
    k: Option<Taped>,
    v: Option<Taped>,
}

#[derive(Debug)]
enum Pass {
    Output(Box<Taped>),
    Gradients(Box<Gradients>),
}

struct Kernel<T: 'static> {
    isa: Isa,
    micro: Micro<T>,
    cut: Cut,
    q: Operand,
    k: Operand,
    v: Operand,
    scores: Pointwise,
    weights: Pointwise,
    pass: Pass,
    layout: Layout,
}

/// A kernel in the making.
struct Making<'a> {
    compiler: Compiler<'a>,
    real: DType,
    batch: &'a [usize],
    cut: Cut,
}

impl Making<'_> {
    fn operand(&mut self, access: &Access, lines: usize, elements: usize) -> Result<Operand, String> {
        let dims: Vec<usize> = self.batch.iter().copied().chain([lines, elements]).collect();
        if access.dtype != self.real || access.strides.len() != dims.len() {
            return Err(format!("an operand {access:?} of an attention over {dims:?} of {}", self.real));
        }
        if let Some((low, high)) = access.reach(&dims)
            && (low < 0 || high >= access.len as isize)
        {
            return Err(format!("elements {low}..={high} of a buffer of {}", access.len));
        }
        let buffer = self.cut.buffers;
        self.cut.buffers += 1;
        self.lines(access, buffer)
    }

    /// How lines are reached.
    fn lines(&self, access: &Access, buffer: usize) -> Result<Operand, String> {
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

    /// A nest with so many accumulators. Its result goes where it stores it, or to a block.
    fn taped(
        &mut self,
        nest: &Nest,
        [lines, elements]: [usize; 2],
        given: usize,
        to_block: bool,
    ) -> Result<Taped, String> {
        let axes = self.batch.len();
        let dims = self.batch.iter().copied().chain([lines, elements]);
        if !dims.eq(nest.dims.iter().copied()) || nest.inner != 0 || nest.expr.can_fail() {
            return Err(format!("a nest over {:?} that does not fit an attention", nest.dims));
        }
        let (loads, stores) = (nest.loads.len(), nest.stores.len());
        let accumulators =
            nest.loads.iter().take_while(|load| **load == Load::Accumulator(self.real)).count();
        if accumulators != given || nest.accumulators() != given {
            return Err(format!("what a nest is given is not {given} times {}", self.real));
        }
        let mut nest = Cow::Borrowed(nest);
        if to_block {
            let whole = Access::contiguous(self.real, &nest.dims);
            nest.to_mut().stores.push(whole);
        }
        let nest = &*nest;
        if loads + stores.max(1) > MAX_BUFFERS {
            return Err(format!("more than {MAX_BUFFERS} buffers"));
        }
        let outside: Vec<usize> = (0..axes).collect();
        let plan = Plan { nest, drive: LoopOrder::Map, outside: &outside, along: &[axes, axes + 1] };
        let tape = TileProgram::new(&plan, self.compiler)?;
        let frame = self.cut.room(tape.frame);
        let (buffer, buffers) = (self.cut.buffers, loads - given + stores);
        self.cut.buffers += buffers;
        let whole = lines * elements;
        let plain = (loads, stores) == (1, 1)
            && nest.stores.iter().all(|store| store.dtype == self.real && store.strides[axes + 1] == 1);
        let place = match plain.then(|| simple(nest, self.real)).flatten() {
            Some(Simple { factor: None, added: None }) => Some(self.lines(&nest.stores[0], buffer)?),
            _ => None,
        };
        Ok(Taped { tape, elements, whole, loads, given, to_block, buffer, buffers, frame, place })
    }

    /// A nest over scores; multiplying them with a constant needs no tape where that is `scalable`, nor does adding a
    /// buffer where that is `addable`.
    fn pointwise(
        &mut self,
        nest: &Nest,
        given: usize,
        [scalable, addable]: [bool; 2],
    ) -> Result<Pointwise, String> {
        if !nest.stores.is_empty() || nest.expr.outputs().len() != 1 {
            return Err("scores that are not passed on one by one".to_owned());
        }
        let taped = self.taped(nest, [self.cut.queries, self.cut.keys], given, true)?;
        let side_by_side = |access: &Access| access.dtype == self.real && access.strides.last() == Some(&1);
        Ok(match simple(nest, self.real) {
            Some(Simple { factor: None, added: None }) => Pointwise::Nothing,
            Some(Simple { factor: Some(factor), added: None }) if scalable => Pointwise::Scale(factor),
            Some(Simple { factor, added: Some(slot) }) if addable && slot == given => match &nest.loads[slot]
            {
                Load::Buffer(access) if side_by_side(access) => {
                    Pointwise::Added(factor.unwrap_or(1.0), self.lines(access, taped.buffer)?)
                }
                _ => Pointwise::Tape(Box::new(taped)),
            },
            _ => Pointwise::Tape(Box::new(taped)),
        })
    }
}

/// What a simple nest does with its accumulator: it multiplies it with a constant, and then adds another load.
struct Simple {
    factor: Option<f64>,
    added: Option<usize>,
}

fn simple(nest: &Nest, real: DType) -> Option<Simple> {
    let insts = nest.expr.insts();
    let inst = |reg: Reg| insts[usize::from(reg.0)];
    let given = |reg: Reg| inst(reg) == (Inst::Load(0), Type::of(real));
    let constant = |reg: Reg| match inst(reg).0 {
        Inst::Const(Scalar::F32(value)) => Some(f64::from(value)),
        Inst::Const(Scalar::F64(value)) => Some(value),
        _ => None,
    };
    let scaled = |reg: Reg, added: Option<usize>| {
        if given(reg) {
            return Some(Simple { factor: None, added });
        }
        let factor = match inst(reg).0 {
            Inst::Binary(BinaryOp::Mul, x, c) if given(x) => constant(c),
            Inst::Binary(BinaryOp::Mul, c, x) if given(x) => constant(c),
            // Dividing by a power of two is multiplying by its reciprocal, bit for bit.
            Inst::Binary(BinaryOp::Div, x, c) if given(x) => constant(c)
                .filter(|c| (1e-30..1e30).contains(&c.abs()) && libm::frexp(*c).0.abs() == 0.5)
                .map(|c| 1.0 / c),
            _ => None,
        };
        factor.map(|factor| Simple { factor: Some(factor), added })
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
            return Err("scores have at least two axes".to_owned());
        };
        let (size, width) = (desc.size, desc.width);
        let (queries, keys) = (dims[axes], dims[axes + 1]);
        if dims.contains(&0) || size == 0 || width == 0 {
            return Err(format!("an attention of nothing: {dims:?}, {size}, {width}"));
        }
        let micro = T::micro(isa);
        let Micro { mr, nr, .. } = micro;
        let heads = dims[..axes].iter().product();
        let differs = |mask: &Access| mask.strides.get(axes).is_some_and(|&stride| stride != 0);
        let masked = desc.scores.loaded().any(differs);
        let scores = if masked { MASKED_SCORES } else { SCORES };
        let cut = Cut::new(heads, [queries, keys, size, width], scores, mr);
        let mut making = Making { compiler, real, batch: &dims[..axes], cut };
        let q = making.operand(&desc.q, queries, size)?;
        let k = making.operand(&desc.k, keys, size)?;
        let v = making.operand(&desc.v, keys, width)?;
        let given = match &desc.pass {
            AttentionPass::Gradients(gradients) => Some(making.operand(&gradients.given, queries, width)?),
            AttentionPass::Output(_) => None,
        };
        let scores = making.pointwise(&desc.scores, 1, [true, true])?;
        let weights = making.pointwise(&desc.weights, 1, [false, false])?;
        let pass = match (&desc.pass, given) {
            (AttentionPass::Output(nest), _) => {
                Pass::Output(Box::new(making.taped(nest, [queries, width], 1, false)?))
            }
            (AttentionPass::Gradients(gradients), Some(given)) => {
                let AttentionGradients { weights, softmax, scores, q, k, v, .. } = &**gradients;
                let weights = making.pointwise(weights, 2, [false, false])?;
                let softmax = making.pointwise(softmax, 1, [false, false])?;
                let scores = making.pointwise(scores, 1, [true, false])?;
                let mut result = |nest: &Option<Nest>, lines, elements| {
                    nest.as_ref().map(|nest| making.taped(nest, [lines, elements], 1, false)).transpose()
                };
                let (q, k, v) = (result(q, queries, size)?, result(k, keys, size)?, result(v, keys, width)?);
                Pass::Gradients(Box::new(Gradients { given, weights, softmax, scores, q, k, v }))
            }
            (AttentionPass::Gradients(_), None) => unreachable!("the given gradient was made above"),
        };

        let mut cut = making.cut;
        let rows = cut.rows;
        let packed = |lines: usize, depth: usize| lines.next_multiple_of(nr) * depth * T::BYTES;
        let mut layout = Layout {
            k_turned: cut.room(packed(keys, size)),
            softmax: cut.room(rows * keys * T::BYTES),
            result: cut.room(rows * size.max(width) * T::BYTES),
            corner: cut.room(mr * nr * T::BYTES),
            ..Layout::default()
        };
        // Where nothing is done to the softmax, it is what weighs the values.
        layout.weights = layout.softmax;
        match &pass {
            Pass::Output(_) => layout.v = cut.room(packed(width, keys)),
            Pass::Gradients(gradients) => {
                layout.v_turned = cut.room(packed(keys, width));
                layout.k = cut.room(packed(size, keys));
                layout.q_block = cut.room(packed(size, rows));
                layout.given_block = cut.room(packed(width, rows));
                layout.gradients = cut.room(rows * keys * T::BYTES);
                if !matches!(weights, Pointwise::Nothing) {
                    layout.weights = cut.room(rows * keys * T::BYTES);
                }
                for (taped, at, elements) in
                    [(&gradients.k, &mut layout.k_sums, size), (&gradients.v, &mut layout.v_sums, width)]
                {
                    let bytes = keys * elements * T::BYTES;
                    match taped {
                        None => {}
                        Some(_) if cut.parts == 1 => *at = cut.room(bytes),
                        Some(_) => {
                            *at = cut.shared;
                            cut.shared += (heads * cut.parts * bytes).next_multiple_of(ALIGN);
                        }
                    }
                }
            }
        }
        Ok(Kernel { isa, micro, cut, q, k, v, scores, weights, pass, layout })
    }
}
