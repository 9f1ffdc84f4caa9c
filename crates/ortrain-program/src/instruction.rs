//! The closed set of instructions.

use ortrain_expr::{
    Access, ConvShape, DType, Dims, IndexKind, Precision, Segments, SlidingAxis, WindowPass, WindowShape,
};
use smallvec::SmallVec;

use crate::attention::Attention;
use crate::buffer::{Buffer, BufferId, BufferIds, Place, is_work, share_bytes};
use crate::operand::{Load, Nest, Operand, Use, nest_buffers, nest_buffers_mut};

/// Batched matrix product with an epilogue.
///
/// `product[batch.., i, j] = sum over l of a[batch.., i, l] * b[batch.., l, j]`, accumulated in `f32` for narrow
/// floats. The epilogue is a map over `batch + [m, n]` whose accumulator is the product and which stores the results:
/// scaling, bias, activation and accumulation into an old value live there.
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
    /// The left factor, over `batch + [m, k]`.
    pub a: Operand,
    /// The right factor, over `batch + [k, n]`.
    pub b: Operand,
    /// How exactly factors are taken, `F32` for those of `F64`. [`crate::ProgramBuilder::precision`] says it.
    pub precision: Precision,
    /// What becomes of the product.
    pub epilogue: Nest,
}

/// Convolution, or the gradient of one, with an epilogue.
///
/// Sums are accumulated in `f32` for narrow floats. The epilogue is a map over the dimensions of the result
/// ([`ConvShape::operands`]) whose accumulator is the result before it.
#[derive(Clone, Debug)]
pub struct Conv {
    /// What is computed, and the sizes.
    pub shape: ConvShape,
    /// Operand A: row-major, from some element of its buffer on.
    pub a: Operand,
    /// Operand B: row-major, from the first element of its buffer on.
    pub b: Operand,
    /// How exactly operands are taken, `F32` for those of `F64`. [`crate::ProgramBuilder::precision`] says it.
    pub precision: Precision,
    /// What becomes of the result.
    pub epilogue: Nest,
}

/// Pooling, or the gradient of one. Its operands are whole buffers, row-major.
#[derive(Clone, Debug)]
pub struct Window {
    /// What is computed, and the sizes.
    pub shape: WindowShape,
    /// What is read.
    pub source: Operand,
    /// Positions of the maxima, one for each output element: written by the maximum if asked for, read by its gradient,
    /// absent for sums.
    pub index: Option<WindowIndex>,
    /// What is written, of the source's type.
    pub target: Operand,
}

/// Positions of the maxima of a [`Window`].
#[derive(Clone, Debug)]
pub struct WindowIndex {
    /// How they are said. A pass makes numbers of cells of those that gradients alone read.
    pub kind: IndexKind,
    /// Where they lie.
    pub operand: Operand,
}

impl WindowIndex {
    /// Positions said by elements.
    #[must_use]
    pub fn elements(operand: Operand) -> WindowIndex {
        WindowIndex { kind: IndexKind::Element, operand }
    }
}

/// `target[o, index[j], i] += source[o, j, i]`; duplicates are added in the order of `j`. Or, with `last`,
/// `target[o, index[j], i] = source[o, j, i]`; of duplicates the last stays. Its operands are whole buffers, row-major.
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
    pub source: Operand,
    /// Where to: `count` integers (`I32` or `I64`).
    pub index: Operand,
    /// What it is added to: `[outer, rows, inner]`.
    pub target: Operand,
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

/// An instruction. The set is closed: every backend matches on all of it.
#[derive(Clone, Debug)]
pub enum Instruction {
    /// Reductions over the inner axes of a nest, if it has some, then a map. One with [`Segments`] stays as it is: no pass
    /// makes another nest a part of it, or it a part of another one.
    Nest(Nest),
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

// --- What each instruction says of itself ----------------------------------------------------------------------------

/// The fault of a nest whose accesses are not those of its buffers, or whose accumulators are not the given ones.
fn nest_fault(nest: &Nest, accumulators: &[DType], buffers: &[Buffer]) -> Option<String> {
    let wrong_operand = || nest.operands().find_map(|operand| operand.fault(buffers));
    let found: SmallVec<[DType; 2]> = nest.loads[..nest.accumulators()].iter().map(Load::dtype).collect();
    let wrong_accumulators = || {
        (found.as_slice() != accumulators).then(|| {
            let list = |types: &[DType]| types.iter().map(DType::to_string).collect::<Vec<_>>().join(", ");
            format!("accumulators [{}] where [{}] are needed", list(&found), list(accumulators))
        })
    };
    wrong_operand().or_else(wrong_accumulators)
}

/// The fault of factors that are taken with less than they are.
fn precision_fault(precision: Precision, factors: [&Operand; 2]) -> Option<String> {
    (precision != Precision::F32 && factors.iter().any(|factor| factor.access.dtype == DType::F64))
        .then(|| format!("factors of float64 in {precision}"))
}

impl MatMul {
    /// The spaces of the factors: `batch + [m, k]` and `batch + [k, n]`.
    pub(crate) fn spaces(&self) -> [Dims; 2] {
        [self.with([self.m, self.k]), self.with([self.k, self.n])]
    }

    fn with(&self, sizes: [usize; 2]) -> Dims {
        self.batch.iter().copied().chain(sizes).collect()
    }

    fn fault(&self, buffers: &[Buffer]) -> Option<String> {
        let nest = &self.epilogue;
        if let Some(fault) = epilogue_fault(nest, [&self.a, &self.b], buffers) {
            return Some(fault);
        }
        if let Some(fault) = precision_fault(self.precision, [&self.a, &self.b]) {
            return Some(fault);
        }
        for (factor, dims) in [&self.a, &self.b].into_iter().zip(self.spaces()) {
            if factor.fault(buffers).is_some() || factor.access.strides.len() != dims.len() {
                return Some("a factor's access does not fit its buffer".into());
            }
            if let Some((low, high)) = factor.access.reach(&dims)
                && (low < 0 || high >= factor.access.len as isize)
            {
                return Some(format!("elements {low}..={high} of a factor of {}", factor.access.len));
            }
        }
        if nest.dims != self.with([self.m, self.n]) || nest.inner != 0 {
            return Some("an epilogue over another space than the product".into());
        }
        nest.fault()
    }
}

/// The fault of an epilogue by itself, behind sums of products of these factors.
fn epilogue_fault(nest: &Nest, factors: [&Operand; 2], buffers: &[Buffer]) -> Option<String> {
    if nest.segments.is_some() {
        return Some(format!("segments with {} reduced axes", nest.inner));
    }
    let is_double = factors.iter().all(|factor| factor.access.dtype == DType::F64);
    nest_fault(nest, &[if is_double { DType::F64 } else { DType::F32 }], buffers)
}

impl Conv {
    fn fault(&self, buffers: &[Buffer]) -> Option<String> {
        let nest = &self.epilogue;
        if let Some(fault) = epilogue_fault(nest, [&self.a, &self.b], buffers) {
            return Some(fault);
        }
        if let Some(fault) = precision_fault(self.precision, [&self.a, &self.b]) {
            return Some(fault);
        }
        if let Some(fault) = self.shape.fault() {
            return Some(fault);
        }
        let [a, b, result] = self.shape.operands();
        for (operand, dims) in [(&self.a, &a), (&self.b, &b)] {
            let (Operand { access, .. }, buffer) = (operand, &buffers[operand.buffer.0 as usize]);
            let needed = dims.iter().product::<usize>().saturating_add(access.offset);
            if buffer.len < needed || !buffer.dtype.is_float() {
                return Some(format!("an operand {:?} that is not floats {dims:?}", buffer.label));
            }
            let row_major = Access::contiguous(access.dtype, dims);
            if operand.fault(buffers).is_some() || access.strides != row_major.strides {
                return Some(format!("an access of an operand that does not fit {:?}", buffer.label));
            }
        }
        if self.b.access.offset != 0 {
            return Some("an operand B behind the first element of its buffer".into());
        }
        if nest.dims != result || nest.inner != 0 {
            return Some("an epilogue over another space than the result".into());
        }
        nest.fault()
    }
}

impl Window {
    /// Calls a function with each buffer, and how it is used.
    pub(crate) fn buffers(&self, each: &mut dyn FnMut(BufferId, Use)) {
        each(self.source.buffer, Use::Read);
        if self.index_use().reads() {
            self.index.iter().for_each(|index| each(index.operand.buffer, Use::Read));
        }
        each(self.target.buffer, Use::Write);
        if self.index_use().writes() {
            self.index.iter().for_each(|index| each(index.operand.buffer, Use::Write));
        }
    }

    fn buffers_mut(&mut self, each: &mut dyn FnMut(&mut BufferId, Use)) {
        let index_use = self.index_use();
        each(&mut self.source.buffer, Use::Read);
        each(&mut self.target.buffer, Use::Write);
        self.index.iter_mut().for_each(|index| each(&mut index.operand.buffer, index_use));
    }

    fn index_use(&self) -> Use {
        if self.shape.pass == WindowPass::MaxGradient { Use::Read } else { Use::Write }
    }

    fn fault(&self, buffers: &[Buffer]) -> Option<String> {
        if let Some(fault) = self.shape.fault() {
            return Some(fault);
        }
        let buffer = |operand: &Operand| &buffers[operand.buffer.0 as usize];
        let [source, target] = self.shape.operands().map(Some);
        let (from, to) = (buffer(&self.source), buffer(&self.target));
        if from.dtype == DType::Bool {
            return Some(format!("numbers are needed, {:?} is of type {}", from.label, from.dtype));
        }
        if (Some(from.len), Some(to.len)) != (source, target) || from.dtype != to.dtype {
            return Some(format!(
                "{} {} to {} {} where {source:?} to {target:?} are needed",
                from.len, from.dtype, to.len, to.dtype
            ));
        }
        let outputs = self.shape.planes * self.shape.outputs();
        let fits = |index: &WindowIndex| {
            let Buffer { len, dtype, .. } = buffer(&index.operand);
            *len == outputs && self.shape.has_positions(index.kind, *dtype)
        };
        let index_fits = match self.shape.pass {
            WindowPass::Max => self.index.as_ref().is_none_or(fits),
            WindowPass::MaxGradient => self.index.as_ref().is_some_and(fits),
            WindowPass::Sum | WindowPass::SumGradient => self.index.is_none(),
        };
        if !index_fits {
            return Some("positions that do not fit".into());
        }
        whole_fault(
            [&self.source, &self.target].into_iter().chain(self.index.iter().map(|index| &index.operand)),
            buffers,
        )
    }
}

/// The fault of an operand that is not a whole buffer, row-major.
fn whole_fault<'a>(operands: impl IntoIterator<Item = &'a Operand>, buffers: &[Buffer]) -> Option<String> {
    operands.into_iter().find_map(|operand| {
        let Buffer { label, dtype, len, .. } = &buffers[operand.buffer.0 as usize];
        (operand.access != Access::contiguous(*dtype, &[*len]))
            .then(|| format!("an access to {label:?} that is not all of it, in order"))
    })
}

impl ScatterAdd {
    fn fault(&self, buffers: &[Buffer]) -> Option<String> {
        let buffer = |operand: &Operand| &buffers[operand.buffer.0 as usize];
        let need = |operand: &Operand, len: usize| {
            let found = buffer(operand).len;
            (found != len).then(|| format!("{found} elements where {len} are needed"))
        };
        need(&self.source, self.outer * self.count * self.inner)
            .or_else(|| need(&self.index, self.count))
            .or_else(|| need(&self.target, self.outer * self.rows * self.inner))
            .or_else(|| {
                let dtype = buffer(&self.index).dtype;
                (!matches!(dtype, DType::I32 | DType::I64)).then(|| format!("indices of type {dtype}"))
            })
            .or_else(|| {
                let [from, to] = [&self.source, &self.target].map(|operand| buffer(operand).dtype);
                (from != to).then(|| format!("rows of {from} for rows of {to}"))
            })
            .or_else(|| whole_fault([&self.source, &self.index, &self.target], buffers))
    }
}

impl HandOver {
    /// The fault of a hand-over that takes a value which is not the caller's to give.
    fn fault(&self, buffers: &[Buffer]) -> Option<String> {
        let elsewhere = self.taken.iter().find(|id| !is_work(buffers, **id));
        elsewhere.map(|&id| {
            let label = &buffers[id.0 as usize].label;
            format!("{label:?} cannot be handed in: it is no value of the arena")
        })
    }
}

/// The fault of a nest with segments that stores elements which it stores or loads elsewhere, too.
fn segments_fault(nest: &Nest, buffers: &[Buffer]) -> Option<String> {
    let segments = nest.segments.as_ref()?;
    let buffer = |operand: &Operand| &buffers[operand.buffer.0 as usize];
    for (k, to) in nest.stores.iter().enumerate() {
        let mut again = nest.stores[..k].iter().filter(|other| {
            share_bytes(buffer(to), buffer(other))
                && !(to.buffer == other.buffer && are_apart(&to.access, &other.access, segments))
        });
        if let Some(other) = again.next() {
            return Some(format!(
                "stores to {:?} that may reach elements of {:?}",
                buffer(to).label,
                buffer(other).label
            ));
        }
        let mut loads = nest.loads.iter().enumerate().filter_map(|(slot, load)| {
            let from = load.operand()?;
            let apart = to.buffer == from.buffer
                && !nest.is_gathered(slot)
                && (from.access == to.access || are_apart(&to.access, &from.access, segments));
            (share_bytes(buffer(to), buffer(from)) && !apart).then_some((slot, from))
        });
        if let Some((slot, from)) = loads.next() {
            return Some(format!(
                "load {slot} of {:?} that may see what is stored to {:?}: the same access is needed",
                buffer(from).label,
                buffer(to).label
            ));
        }
    }
    None
}

/// True if two accesses to one buffer surely reach no element in common over segments.
fn are_apart(a: &Access, b: &Access, segments: &Segments) -> bool {
    if let (&[step, 0], &[other, 0]) = (a.strides.as_slice(), b.strides.as_slice())
        && step == other
        && step != 0
    {
        // Columns of one table.
        return !a.offset.abs_diff(b.offset).is_multiple_of(step.unsigned_abs());
    }
    // Wholly before or behind each other.
    let dims = [segments.len(), segments.iter().last().map_or(0, |range| range.end)];
    match (a.reach(&dims), b.reach(&dims)) {
        (Some(a), Some(b)) => a.1 < b.0 || b.1 < a.0,
        _ => false,
    }
}

// --- What passes ask of any instruction ------------------------------------------------------------------------------

impl Instruction {
    /// The name of the instruction.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Instruction::Nest(nest) if nest.is_map() => "Map",
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
        match self {
            Instruction::Nest(Nest { segments: Some(segments), dims, .. }) => {
                format!("{} segments of {}", segments.len(), dims[1])
            }
            Instruction::Nest(nest) if nest.is_map() => format!("{:?}", nest.dims.as_slice()),
            Instruction::Nest(nest) => format!("{:?} over {:?}", nest.outer_dims(), nest.inner_dims()),
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

    /// Calls a function with each buffer, and how the instruction uses it: operands first, then results.
    pub fn buffers(&self, each: &mut dyn FnMut(BufferId, Use)) {
        match self {
            Instruction::Nest(nest) => nest_buffers(nest, each),
            Instruction::MatMul(_) | Instruction::Conv(_) => {
                self.factors().into_iter().for_each(|id| each(id, Use::Read));
                self.nest().into_iter().for_each(|nest| nest_buffers(nest, each));
            }
            Instruction::Attention(a) => a.each_buffer(each),
            Instruction::Window(w) => w.buffers(each),
            Instruction::ScatterAdd(s) => {
                [&s.source, &s.index].into_iter().for_each(|operand| each(operand.buffer, Use::Read));
                each(s.target.buffer, Use::Update);
            }
            Instruction::HandOver(h) => {
                h.given.iter().for_each(|&id| each(id, Use::Read));
                h.taken.iter().for_each(|&id| each(id, Use::Write));
            }
        }
    }

    /// Calls a function with each buffer, to be changed, and how the instruction uses it.
    pub(crate) fn buffers_mut(&mut self, each: &mut dyn FnMut(&mut BufferId, Use)) {
        match self {
            Instruction::Nest(nest) => nest_buffers_mut(nest, each),
            Instruction::MatMul(m) => {
                let MatMul { a, b, epilogue, .. } = &mut **m;
                [a, b].into_iter().for_each(|factor| each(&mut factor.buffer, Use::Read));
                nest_buffers_mut(epilogue, each);
            }
            Instruction::Conv(c) => {
                let Conv { a, b, epilogue, .. } = &mut **c;
                [a, b].into_iter().for_each(|factor| each(&mut factor.buffer, Use::Read));
                nest_buffers_mut(epilogue, each);
            }
            Instruction::Attention(a) => a.each_buffer_mut(each),
            Instruction::Window(w) => w.buffers_mut(each),
            Instruction::ScatterAdd(ScatterAdd { source, index, target, .. }) => {
                [source, index].into_iter().for_each(|operand| each(&mut operand.buffer, Use::Read));
                each(&mut target.buffer, Use::Update);
            }
            Instruction::HandOver(h) => {
                h.given.iter_mut().for_each(|id| each(id, Use::Read));
                h.taken.iter_mut().for_each(|id| each(id, Use::Write));
            }
        }
    }

    /// The buffers it reads.
    #[must_use]
    pub fn reads(&self) -> BufferIds {
        let mut found = BufferIds::new();
        self.buffers(&mut |id, used| found.extend(used.reads().then_some(id)));
        found
    }

    /// The buffers it writes.
    #[must_use]
    pub fn writes(&self) -> BufferIds {
        let mut found = BufferIds::new();
        self.buffers(&mut |id, used| found.extend(used.writes().then_some(id)));
        found
    }

    /// Puts other buffers in place of those that it reads and of those that it writes. No other buffer can take the place of
    /// one that is updated for one of both alone.
    pub(crate) fn rename(
        &mut self,
        read: &impl Fn(BufferId) -> BufferId,
        write: &impl Fn(BufferId) -> BufferId,
    ) {
        self.buffers_mut(&mut |id, used| {
            *id = match used {
                Use::Read => read(*id),
                Use::Write => write(*id),
                Use::Update => read(write(*id)),
            }
        });
    }

    /// The nest that it is, or its epilogue, if it has one and not several.
    #[must_use]
    pub fn nest(&self) -> Option<&Nest> {
        match self {
            Instruction::Nest(nest) => Some(nest),
            Instruction::MatMul(m) => Some(&m.epilogue),
            Instruction::Conv(c) => Some(&c.epilogue),
            Instruction::Attention(_)
            | Instruction::Window(_)
            | Instruction::ScatterAdd(_)
            | Instruction::HandOver(_) => None,
        }
    }

    /// The same, to be changed.
    pub(crate) fn nest_mut(&mut self) -> Option<&mut Nest> {
        match self {
            Instruction::Nest(nest) => Some(nest),
            Instruction::MatMul(m) => Some(&mut m.epilogue),
            Instruction::Conv(c) => Some(&mut c.epilogue),
            Instruction::Attention(_)
            | Instruction::Window(_)
            | Instruction::ScatterAdd(_)
            | Instruction::HandOver(_) => None,
        }
    }

    /// The nest whose space passes may change. What is done to spaces does not know segments: to passes an instruction with
    /// these is one without a nest.
    pub(crate) fn flexible_nest(&self) -> Option<&Nest> {
        self.nest().filter(|nest| nest.segments.is_none())
    }

    /// The instruction with another [nest](Instruction::nest).
    pub(crate) fn with_nest(&self, nest: Nest) -> Instruction {
        let mut changed = match self {
            Instruction::Nest(_) => return Instruction::Nest(nest),
            other => other.clone(),
        };
        if let Some(old) = changed.nest_mut() {
            *old = nest;
        }
        changed
    }

    /// Buffers that it reads other than through its [nest](Instruction::flexible_nest).
    pub(crate) fn factors(&self) -> BufferIds {
        match self {
            Instruction::MatMul(m) => SmallVec::from_slice(&[m.a.buffer, m.b.buffer]),
            Instruction::Conv(c) => SmallVec::from_slice(&[c.a.buffer, c.b.buffer]),
            other if other.flexible_nest().is_some() => SmallVec::new(),
            other => other.reads(),
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
        matches!(self, Instruction::Nest(nest) if !nest.is_map())
    }

    /// The nest that it is, if that reduces no axes.
    pub(crate) fn as_map(&self) -> Option<&Nest> {
        match self {
            Instruction::Nest(nest) if nest.is_map() => Some(nest),
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

    /// What would take it outside its buffers, or contradicts itself, if anything.
    pub(crate) fn fault(&self, buffers: &[Buffer]) -> Option<String> {
        let is_constant = |id: &&BufferId| matches!(buffers[id.0 as usize].place, Place::Constant(_));
        if let Some(id) = self.writes().iter().find(is_constant) {
            return Some(format!("a result that is the constant {:?}", buffers[id.0 as usize].label));
        }
        match self {
            Instruction::Nest(nest) => nest_fault(nest, &[], buffers)
                .or_else(|| nest.fault())
                .or_else(|| segments_fault(nest, buffers)),
            Instruction::MatMul(m) => m.fault(buffers),
            Instruction::Conv(c) => c.fault(buffers),
            Instruction::Attention(a) => a.fault(buffers),
            Instruction::Window(w) => w.fault(buffers),
            Instruction::ScatterAdd(s) => s.fault(buffers),
            Instruction::HandOver(h) => h.fault(buffers),
        }
    }
}
