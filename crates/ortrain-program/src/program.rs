//! Programs: instructions over buffers, with a memory plan.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use ortrain_expr::{
    Access, ConvShape, DType, Dims, Nest, Precision, Segments, SlidingAxis, WindowPass, WindowShape,
};
use ortrain_graph::Tensor;
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use crate::versions::{FinalVersions, Versions};
use crate::{Attention, Cost, RunError, fuse};

/// A buffer of a [`Program`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u32);

/// A plane of the state a program is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlaneId(pub u32);

/// Where a buffer lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// In the work arena, at this byte. The planner decides it.
    Work(usize),
    /// In a plane, at this byte.
    Plane(PlaneId, usize),
    /// The program's constant of this number.
    Constant(usize),
}

/// A contiguous run of elements.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// The name of the value it holds, for dumps and messages.
    pub label: Arc<str>,
    /// The element type.
    pub dtype: DType,
    /// The number of elements.
    pub len: usize,
    /// Where it lies.
    pub place: Place,
}

impl Buffer {
    /// Its size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }
}

/// Whether a buffer lies in the work arena.
pub(crate) fn is_work(buffers: &[Buffer], id: BufferId) -> bool {
    matches!(buffers[id.0 as usize].place, Place::Work(_))
}

/// A set of entries: ways to run a program that share its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Entries(u8);

/// One way to run a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Entry {
    /// Gradients are added to what the buffers hold. Also the entry of programs that have only one.
    Accumulate,
    /// Gradients replace what the buffers hold.
    Overwrite,
}

impl Entries {
    /// Every entry.
    pub const ALL: Entries = Entries(0b11);

    /// No entry.
    pub const NONE: Entries = Entries(0);

    /// One entry.
    #[must_use]
    pub fn only(entry: Entry) -> Entries {
        Entries(1 << entry as u8)
    }

    /// Whether an entry belongs to the set.
    #[must_use]
    pub fn contains(self, entry: Entry) -> bool {
        self.0 & (1 << entry as u8) != 0
    }

    /// The entries in both.
    #[must_use]
    pub fn and(self, other: Entries) -> Entries {
        Entries(self.0 & other.0)
    }

    /// The entries in either.
    #[must_use]
    pub fn or(self, other: Entries) -> Entries {
        Entries(self.0 | other.0)
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many there are.
    pub(crate) fn count(self) -> u64 {
        u64::from(self.0.count_ones())
    }
}

/// A nest with the buffers it reads and writes: `reads[k]` for load `k`, `writes[k]` for store `k`.
///
/// One with [`Segments`] is a whole [`Instruction::Nest`] and stays as it is: no pass makes another nest a part of it, or it a
/// part of another one.
#[derive(Clone, Debug)]
pub struct Loop {
    /// What is computed.
    pub nest: Nest,
    /// Buffers of the loads.
    pub reads: Vec<BufferId>,
    /// Buffers of the stores.
    pub writes: Vec<BufferId>,
}

impl Loop {
    /// True if no axis is reduced: results are computed element by element.
    #[must_use]
    pub fn is_map(&self) -> bool {
        self.nest.inner == 0
    }
}

/// Batched matrix product with an epilogue.
///
/// `product[batch.., i, j] = sum over l of a[batch.., i, l] * b[batch.., l, j]`, accumulated in `f32` for narrow
/// floats. The epilogue is a map over `batch + [m, n]` whose load 0 is the product (so `reads[0]` of the epilogue is
/// not used) and which stores the results: scaling, bias, activation and accumulation into an old value live there.
#[derive(Clone, Debug)]
pub struct MatMul {
    /// Sizes of the batch axes.
    pub batch: Dims,
    /// Rows of the product.
    pub m: usize,
    /// Columns of the product.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// The left factor.
    pub a: BufferId,
    /// Its access over `batch + [m, k]`.
    pub a_access: Access,
    /// The right factor.
    pub b: BufferId,
    /// Its access over `batch + [k, n]`.
    pub b_access: Access,
    /// How exactly factors are taken, `F32` for those of `F64`. [`crate::ProgramBuilder::precision`] says it.
    pub precision: Precision,
    /// What becomes of the product.
    pub epilogue: Loop,
}

/// Convolution, or the gradient of one, with an epilogue.
///
/// Sums are accumulated in `f32` for narrow floats. The epilogue is a map over the dimensions of the result
/// ([`ConvShape::operands`]) whose load 0 is the result before it (so `reads[0]` of the epilogue is not used).
#[derive(Clone, Debug)]
pub struct Conv {
    /// What is computed, and the sizes.
    pub shape: ConvShape,
    /// Operand A, row-major.
    pub a: BufferId,
    /// The element of that buffer with which it begins.
    pub a_offset: usize,
    /// Operand B, row-major.
    pub b: BufferId,
    /// How exactly operands are taken, `F32` for those of `F64`. [`crate::ProgramBuilder::precision`] says it.
    pub precision: Precision,
    /// What becomes of the result.
    pub epilogue: Loop,
}

/// Pooling, or the gradient of one.
#[derive(Clone, Debug)]
pub struct Window {
    /// What is computed, and the sizes.
    pub shape: WindowShape,
    /// What is read, row-major.
    pub source: BufferId,
    /// Positions of the maxima, one for each output element: written by the maximum if asked for, read by its gradient,
    /// absent for sums. The buffer's type says what they are ([`WindowShape`]); fusion makes numbers of cells of those that
    /// gradients alone read.
    pub index: Option<BufferId>,
    /// What is written, row-major, of the source's type.
    pub target: BufferId,
}

/// `target[o, index[j], i] += source[o, j, i]`; duplicates are added in the order of `j`. Or, with `last`,
/// `target[o, index[j], i] = source[o, j, i]`; of duplicates the last stays.
///
/// Indices count from the end where negative; those outside contribute nothing (whoever emits the instruction has
/// them checked where that is an error). The target holds something already: zeros, or a gradient to add to.
#[derive(Clone, Debug)]
pub struct ScatterAdd {
    /// Number of outer slices.
    pub outer: usize,
    /// Number of rows in each outer slice of the target.
    pub rows: usize,
    /// Number of indices.
    pub count: usize,
    /// Number of elements of a row.
    pub inner: usize,
    /// What is added: `[outer, count, inner]`.
    pub source: BufferId,
    /// Where to: `count` integers (`I32` or `I64`).
    pub index: BufferId,
    /// What it is added to: `[outer, rows, inner]`.
    pub target: BufferId,
    /// Whether the source is written over the target, not added to it.
    pub last: bool,
}

/// The point of a program at which its caller takes over: it is given some values, and the rest of the program begins
/// when it has handed others in.
///
/// A forward pass ends here and its backward pass begins, with the gradients of what was given. Data alone decides which
/// instructions come before: none of those that make what is given needs what is taken.
#[derive(Clone, Debug)]
pub struct HandOver {
    /// What the caller is given.
    pub given: Vec<BufferId>,
    /// What the caller hands in. Buffers of the arena that nothing else writes.
    pub taken: Vec<BufferId>,
}

/// The part of a program, or of a schedule, that a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// All of it. It has no [`HandOver`].
    Whole,
    /// Everything before its [`HandOver`].
    Before,
    /// Everything after its [`HandOver`], in the workspace of the run before.
    After,
}

/// An instruction. The set is closed: every backend matches on all of it.
#[derive(Clone, Debug)]
pub enum Instruction {
    /// Reductions over the inner axes of a nest, if it has some, then a map.
    Nest(Loop),
    /// Matrix product with an epilogue.
    MatMul(Box<MatMul>),
    /// Convolution with an epilogue.
    Conv(Box<Conv>),
    /// Attention or its gradients, with epilogues.
    Attention(Box<Attention>),
    /// Pooling.
    Window(Window),
    /// Sums at given rows.
    ScatterAdd(ScatterAdd),
    /// The end of one part of a run and the start of the other. It computes nothing.
    HandOver(HandOver),
}

impl Instruction {
    /// The name of the instruction.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Instruction::Nest(l) if l.is_map() => "Map",
            Instruction::Nest(_) => "Reduce",
            Instruction::MatMul(_) => "MatMul",
            Instruction::Conv(_) => "Conv",
            Instruction::Attention(_) => "Attention",
            Instruction::Window(_) => "Window",
            Instruction::ScatterAdd(_) => "ScatterAdd",
            Instruction::HandOver(_) => "HandOver",
        }
    }

    /// How exactly the factors of its inner products are taken.
    #[must_use]
    pub fn precision(&self) -> Precision {
        match self {
            Instruction::MatMul(m) => m.precision,
            Instruction::Conv(c) => c.precision,
            _ => Precision::F32,
        }
    }

    /// Its sizes, as text, and its precision if that is not `f32`.
    #[must_use]
    pub fn shapes(&self) -> String {
        let sizes = self.sizes();
        match self.precision() {
            Precision::F32 => sizes,
            precision => format!("{sizes} {precision}"),
        }
    }

    fn sizes(&self) -> String {
        if let Some((l, _)) = fuse::any_loop_of(self)
            && let Some(segments) = &l.nest.segments
        {
            return format!("{} segments of {}", segments.len(), l.nest.dims[1]);
        }
        match self {
            Instruction::Nest(l) if l.is_map() => format!("{:?}", l.nest.dims.as_slice()),
            Instruction::Nest(l) => {
                format!("{:?} over {:?}", l.nest.outer_dims(), l.nest.inner_dims())
            }
            Instruction::MatMul(m) => format!("{:?} {}x{}x{}", m.batch.as_slice(), m.m, m.n, m.k),
            Instruction::Conv(c) => {
                let [a, b, _] = c.shape.operands();
                format!("{:?} {:?} x {:?}", c.shape.pass, a.as_slice(), b.as_slice())
            }
            Instruction::Attention(a) => {
                let Attention { batch, queries, keys, size, width, .. } = &**a;
                format!("{:?} {queries}x{keys} of {size} and {width}", batch.as_slice())
            }
            Instruction::Window(w) => {
                let sizes =
                    |size: fn(&SlidingAxis) -> usize| w.shape.axes.iter().map(size).collect::<Vec<_>>();
                let (pass, planes) = (w.shape.pass, w.shape.planes);
                format!(
                    "{pass:?} {planes} planes {:?}, window {:?}",
                    sizes(|axis| axis.input),
                    sizes(|axis| axis.kernel)
                )
            }
            Instruction::ScatterAdd(s) => {
                let last = if s.last { " the last stays" } else { "" };
                format!("{}x{}x{} rows {}{last}", s.outer, s.count, s.inner, s.rows)
            }
            Instruction::HandOver(h) => format!("{} given, {} taken", h.given.len(), h.taken.len()),
        }
    }

    /// The buffers it reads.
    #[must_use]
    pub fn reads(&self) -> Vec<BufferId> {
        match self {
            Instruction::Nest(l) => l.reads.clone(),
            Instruction::MatMul(m) => {
                [m.a, m.b].into_iter().chain(m.epilogue.reads[1..].iter().copied()).collect()
            }
            Instruction::Conv(c) => {
                [c.a, c.b].into_iter().chain(c.epilogue.reads[1..].iter().copied()).collect()
            }
            Instruction::Attention(a) => a.reads(),
            Instruction::Window(w) => match w.shape.pass {
                WindowPass::MaxGradient => [w.source].into_iter().chain(w.index).collect(),
                WindowPass::Max | WindowPass::Sum | WindowPass::SumGradient => vec![w.source],
            },
            Instruction::ScatterAdd(s) => vec![s.source, s.index, s.target],
            Instruction::HandOver(h) => h.given.clone(),
        }
    }

    /// The buffers it writes.
    #[must_use]
    pub fn writes(&self) -> Vec<BufferId> {
        match self {
            Instruction::Nest(l) => l.writes.clone(),
            Instruction::MatMul(m) => m.epilogue.writes.clone(),
            Instruction::Conv(c) => c.epilogue.writes.clone(),
            Instruction::Attention(a) => a.writes(),
            Instruction::Window(w) => match w.shape.pass {
                WindowPass::Max => [w.target].into_iter().chain(w.index).collect(),
                WindowPass::MaxGradient | WindowPass::Sum | WindowPass::SumGradient => vec![w.target],
            },
            Instruction::ScatterAdd(s) => vec![s.target],
            Instruction::HandOver(h) => h.taken.clone(),
        }
    }

    /// Puts other buffers in place of those that it reads and of those that it writes.
    pub(crate) fn rename(
        &mut self,
        read: &impl Fn(BufferId) -> BufferId,
        write: &impl Fn(BufferId) -> BufferId,
    ) {
        let all = |l: &mut Loop| {
            l.reads.iter_mut().for_each(|id| *id = read(*id));
            l.writes.iter_mut().for_each(|id| *id = write(*id));
        };
        match self {
            Instruction::Nest(l) => all(l),
            Instruction::MatMul(m) => {
                (m.a, m.b) = (read(m.a), read(m.b));
                all(&mut m.epilogue);
            }
            Instruction::Conv(c) => {
                (c.a, c.b) = (read(c.a), read(c.b));
                all(&mut c.epilogue);
            }
            Instruction::Attention(a) => a.rename(read, write),
            Instruction::Window(w) => {
                (w.source, w.target) = (read(w.source), write(w.target));
                let reads_index = w.shape.pass == WindowPass::MaxGradient;
                w.index = w.index.map(|id| if reads_index { read(id) } else { write(id) });
            }
            Instruction::ScatterAdd(s) => {
                (s.source, s.index) = (read(s.source), read(s.index));
                // Read and written at once: no other buffer can take its place for one of both alone.
                s.target = read(write(s.target));
            }
            Instruction::HandOver(h) => {
                h.given.iter_mut().for_each(|id| *id = read(*id));
                h.taken.iter_mut().for_each(|id| *id = write(*id));
            }
        }
    }

    /// Its element-wise part, if it has one and not several.
    #[must_use]
    pub fn nest(&self) -> Option<&Nest> {
        match self {
            Instruction::Nest(l) => Some(&l.nest),
            Instruction::MatMul(m) => Some(&m.epilogue.nest),
            Instruction::Conv(c) => Some(&c.epilogue.nest),
            Instruction::Attention(_)
            | Instruction::Window(_)
            | Instruction::ScatterAdd(_)
            | Instruction::HandOver(_) => None,
        }
    }

    /// Whether it computes nothing at all: no outer point, no sum.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match self {
            Instruction::ScatterAdd(s) => s.outer * s.count * s.inner == 0,
            Instruction::Window(w) => w.shape.operands()[1] == 0,
            _ => self.nest().is_some_and(|nest| {
                let no_points = |segments: &Segments| nest.inner == 0 && segments.elements() == 0;
                nest.outer_dims().contains(&0) || nest.segments.as_ref().is_some_and(no_points)
            }),
        }
    }

    /// Whether it reduces axes of a nest.
    pub(crate) fn is_reduction(&self) -> bool {
        matches!(self, Instruction::Nest(l) if !l.is_map())
    }

    /// The nest that it is, if that reduces no axes.
    pub(crate) fn as_map(&self) -> Option<&Loop> {
        match self {
            Instruction::Nest(l) if l.is_map() => Some(l),
            _ => None,
        }
    }

    /// Whether it stays in a program whose results nobody needs.
    pub(crate) fn must_stay(&self) -> bool {
        self.can_fail() || matches!(self, Instruction::HandOver(_))
    }

    /// Whether a run of it can fail.
    #[must_use]
    pub fn can_fail(&self) -> bool {
        self.nest().is_some_and(|nest| nest.expr.can_fail())
    }
}

/// An instruction with the entries it belongs to and the node it came from.
#[derive(Clone, Debug)]
pub struct ScheduledInstruction {
    /// What to do.
    pub instruction: Instruction,
    /// When.
    pub entries: Entries,
    /// The node, as messages name it.
    pub node: Arc<str>,
    /// Which writes it sees of what it reads.
    pub(crate) versions: Versions,
}

/// What a program does with a plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaneUse {
    /// The plane.
    pub plane: PlaneId,
    /// How many of its bytes are needed.
    pub bytes: usize,
    /// The sizes of elements that are read and written there, and how far behind a multiple of the size they start.
    elements: SmallVec<[(usize, usize); 2]>,
    /// Whether instructions write to it.
    pub is_written: bool,
    /// Whether it is read or written before the caller takes over.
    pub is_early: bool,
}

impl PlaneUse {
    /// Adds to the uses of planes that of a buffer, if it lies in one.
    pub(crate) fn note(uses: &mut Vec<PlaneUse>, buffer: &Buffer, is_written: bool, is_early: bool) {
        let Place::Plane(plane, offset) = buffer.place else { return };
        let size = buffer.dtype.size();
        let at = uses.iter().position(|used| used.plane == plane).unwrap_or_else(|| {
            let elements = SmallVec::new();
            uses.push(PlaneUse { plane, bytes: 0, elements, is_written: false, is_early: false });
            uses.len() - 1
        });
        let used = &mut uses[at];
        used.bytes = used.bytes.max(offset + buffer.bytes());
        used.is_written |= is_written;
        used.is_early |= is_early;
        if !used.elements.contains(&(size, offset % size)) {
            used.elements.push((size, offset % size));
        }
    }

    /// Whether elements lie at multiples of their size if the plane starts at an address.
    pub(crate) fn fits(&self, address: usize) -> bool {
        self.elements.iter().all(|&(size, offset)| address.wrapping_add(offset).is_multiple_of(size))
    }
}

/// A compiled, immutable piece of work with a memory plan. Made by [`crate::ProgramBuilder`].
#[derive(Debug)]
pub struct Program {
    /// Its buffers.
    pub buffers: Vec<Buffer>,
    /// Its instructions, in order.
    pub instructions: Vec<ScheduledInstruction>,
    /// Its constants, the first element of each at a multiple of [`crate::ALIGNMENT`]. Those that nothing reads are empty.
    pub constants: Vec<Tensor>,
    /// Buffers to be filled before a run, in order.
    pub inputs: Vec<BufferId>,
    /// Buffers that hold the results after a run, in order.
    pub outputs: Vec<BufferId>,
    /// Bytes of the work arena: the peak.
    pub work_bytes: usize,
    /// For every plane that is used: how many bytes it must have.
    pub planes: Vec<PlaneUse>,
    /// What the buffers that are seen outside hold in the end.
    pub(crate) last_versions: FinalVersions,
}

impl Program {
    /// What the instructions of an entry cost together.
    #[must_use]
    pub fn cost(&self, entry: Entry) -> Cost {
        let mut total = Cost::default();
        self.entry(entry).for_each(|scheduled| total += scheduled.instruction.cost(self));
        total
    }

    /// Bytes of its constants.
    #[must_use]
    pub fn constant_bytes(&self) -> usize {
        self.constants.iter().map(|constant| constant.data().len()).sum()
    }

    /// A buffer.
    #[must_use]
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }

    /// Where the caller takes over, if it does: the place of the instruction, and what changes hands.
    #[must_use]
    pub fn hand_over(&self) -> Option<(usize, &HandOver)> {
        self.instructions.iter().enumerate().find_map(|(at, scheduled)| match &scheduled.instruction {
            Instruction::HandOver(hand_over) => Some((at, hand_over)),
            _ => None,
        })
    }

    /// The places of the instructions of a part.
    ///
    /// # Errors
    /// [`RunError::HandOver`] when the program cannot be run in this part.
    pub fn part(&self, part: Part) -> Result<Range<usize>, RunError> {
        let end = self.instructions.len();
        match (part, self.hand_over()) {
            (Part::Whole, None) => Ok(0..end),
            (Part::Before, Some((at, _))) => Ok(0..at),
            (Part::After, Some((at, _))) => Ok(at + 1..end),
            (Part::Whole, Some((at, _))) => {
                Err(RunError::HandOver { node: self.instructions[at].node.to_string() })
            }
            (Part::Before | Part::After, None) => Err(RunError::NoHandOver),
        }
    }

    /// The instructions of an entry.
    pub fn entry(&self, entry: Entry) -> impl Iterator<Item = &ScheduledInstruction> {
        self.instructions.iter().filter(move |scheduled| scheduled.entries.contains(entry))
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "program: {} instructions, {} buffers, work {} bytes, constants {} bytes",
            self.instructions.len(),
            self.buffers.len(),
            self.work_bytes,
            self.constant_bytes()
        )?;
        let Cost { flops, bytes } = self.cost(Entry::Accumulate);
        writeln!(f, "  a run takes {flops} flops and moves at least {bytes} bytes")?;
        for PlaneUse { plane, bytes, .. } in &self.planes {
            writeln!(f, "  plane {}: {bytes} bytes", plane.0)?;
        }
        let used: FxHashSet<BufferId> = self
            .instructions
            .iter()
            .flat_map(|i| i.instruction.reads().into_iter().chain(i.instruction.writes()))
            .chain(self.inputs.iter().chain(&self.outputs).copied())
            .collect();
        for (k, buffer) in self.buffers.iter().enumerate() {
            let id = BufferId(k as u32);
            if !used.contains(&id) {
                continue;
            }
            let place = match buffer.place {
                Place::Work(offset) => format!("work@{offset}"),
                Place::Plane(plane, offset) => format!("plane{}@{offset}", plane.0),
                Place::Constant(number) => format!("const{number}"),
            };
            let role = match (self.inputs.contains(&id), self.outputs.contains(&id)) {
                (true, _) => "  input",
                (_, true) => "  output",
                _ => "",
            };
            writeln!(f, "  b{k}: {}[{}] {place} {:?}{role}", buffer.dtype, buffer.len, buffer.label)?;
        }
        for (k, scheduled) in self.instructions.iter().enumerate() {
            let when = match scheduled.entries {
                Entries::ALL => "",
                other if other.contains(Entry::Overwrite) => " (overwrite)",
                _ => " (accumulate)",
            };
            let list =
                |ids: &[BufferId]| ids.iter().map(|id| format!("b{}", id.0)).collect::<Vec<_>>().join(", ");
            write!(
                f,
                "  {k:3} {:10} {} <- {}{when}",
                scheduled.instruction.name(),
                list(&scheduled.instruction.writes()),
                list(&scheduled.instruction.reads())
            )?;
            write!(f, "  {}", scheduled.instruction.shapes())?;
            let Cost { flops, bytes } = scheduled.instruction.cost(self);
            write!(f, "  ({flops} flops, {bytes} bytes)")?;
            writeln!(f, "  # {}", scheduled.node)?;
            if let Some(nest) = scheduled.instruction.nest() {
                for (i, reduction) in nest.reductions.iter().enumerate() {
                    writeln!(f, "        reduce {i}: {:?} of %{}", reduction.op, reduction.value.0)?;
                }
                writeln!(f, "        {}", nest.expr)?;
            }
            if let Instruction::Attention(attention) = &scheduled.instruction {
                for part in attention.parts() {
                    writeln!(f, "        {}: {}", part.name, part.part.nest.expr)?;
                }
            }
        }
        Ok(())
    }
}
