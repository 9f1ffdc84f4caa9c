//! The closed set of instructions.

use std::sync::Arc;

use ortrain_expr::Precision;

use crate::buffer::{Buffer, BufferId, BufferIds, Place, Renaming};
use crate::cost::{Cost, Traffic};
use crate::instructions::{Attention, Body, Conv, MatMul, NestGroup, ScatterAdd, Window, Yield};
use crate::operand::{Nest, Use};

/// An instruction. The set is closed: every backend matches on all of it. Copies share their body until one of them changes it.
#[derive(Clone, Debug)]
pub enum Instruction {
    /// Reductions over the inner axes of a nest, if it has some, then a map. One with [segments](ortrain_expr::Segments) stays
    /// as it is: no pass makes another nest a part of it, or it a part of another one.
    Nest(Arc<Nest>),
    /// Nests that need nothing of each other.
    NestGroup(Arc<NestGroup>),
    /// Matrix product with an epilogue.
    MatMul(Arc<MatMul>),
    /// Convolution with an epilogue.
    Conv(Arc<Conv>),
    /// Attention or its gradients, with epilogues.
    Attention(Arc<Attention>),
    /// Pooling.
    Window(Arc<Window>),
    /// Sums at given rows.
    ScatterAdd(Arc<ScatterAdd>),
    /// The end of one part of a run and the start of the other. It computes nothing.
    Yield(Yield),
}

macro_rules! from_bodies {
    ($($Body:ident),*) => {
        $(impl From<$Body> for Instruction {
            fn from(body: $Body) -> Instruction {
                Instruction::$Body(Arc::new(body))
            }
        })*
    };
}

from_bodies!(Nest, NestGroup, MatMul, Conv, Attention, Window, ScatterAdd);

impl Instruction {
    /// The body of the instruction.
    fn body(&self) -> &dyn Body {
        match self {
            Instruction::Nest(nest) => &**nest,
            Instruction::NestGroup(group) => &**group,
            Instruction::MatMul(product) => &**product,
            Instruction::Conv(conv) => &**conv,
            Instruction::Attention(attention) => &**attention,
            Instruction::Window(window) => &**window,
            Instruction::ScatterAdd(sums) => &**sums,
            Instruction::Yield(yielded) => yielded,
        }
    }

    /// The same, to be changed: a body of its own, if others share it.
    fn body_mut(&mut self) -> &mut dyn Body {
        match self {
            Instruction::Nest(nest) => &mut *Arc::make_mut(nest),
            Instruction::NestGroup(group) => &mut *Arc::make_mut(group),
            Instruction::MatMul(product) => &mut *Arc::make_mut(product),
            Instruction::Conv(conv) => &mut *Arc::make_mut(conv),
            Instruction::Attention(attention) => &mut *Arc::make_mut(attention),
            Instruction::Window(window) => &mut *Arc::make_mut(window),
            Instruction::ScatterAdd(sums) => &mut *Arc::make_mut(sums),
            Instruction::Yield(yielded) => yielded,
        }
    }

    /// The name of the instruction.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.body().name()
    }

    /// How exactly the factors of its inner products are taken.
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.body().factors().map_or(Precision::F32, |(_, precision)| precision)
    }

    /// Its sizes, as text, and its precision if that is not `f32`.
    #[must_use]
    pub fn shapes(&self) -> String {
        let sizes = self.body().sizes();
        match self.precision() {
            Precision::F32 => sizes,
            precision => format!("{sizes} {precision}"),
        }
    }

    /// Calls a function with each buffer, and how the instruction uses it: operands first, then results.
    pub fn buffers(&self, each: &mut dyn FnMut(BufferId, Use)) {
        self.body().buffers(each);
    }

    /// The buffers it reads.
    #[must_use]
    pub fn reads(&self) -> BufferIds {
        self.used(Use::reads)
    }

    /// The buffers it writes.
    #[must_use]
    pub fn writes(&self) -> BufferIds {
        self.used(Use::writes)
    }

    /// The buffers that it uses in a way.
    fn used(&self, is_it: fn(Use) -> bool) -> BufferIds {
        let mut found = BufferIds::new();
        self.buffers(&mut |id, used| {
            if is_it(used) {
                found.push(id);
            }
        });
        found
    }

    /// Puts other buffers in place of those that it reads and of those that it writes. No other buffer can take the place of
    /// one that is updated for one of both alone.
    pub(crate) fn rename(&mut self, read: Renaming<'_>, write: Renaming<'_>) {
        self.body_mut().buffers_mut(&mut |id, used| {
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
        self.body().nest()
    }

    /// The same, to be changed.
    pub(crate) fn nest_mut(&mut self) -> Option<&mut Nest> {
        self.body_mut().nest_mut()
    }

    /// The nest whose space passes may change. What is done to spaces does not know segments: to passes an instruction with
    /// these is one without a nest.
    pub(crate) fn flexible_nest(&self) -> Option<&Nest> {
        self.nest().filter(|nest| nest.segments.is_none())
    }

    /// The instruction with another [nest](Instruction::nest).
    #[must_use]
    pub fn with_nest(&self, nest: Nest) -> Instruction {
        if let Instruction::Nest(_) = self {
            return Instruction::from(nest);
        }
        let mut changed = self.clone();
        if let Some(old) = changed.nest_mut() {
            *old = nest;
        }
        changed
    }

    /// Buffers that it reads other than through its [nest](Instruction::flexible_nest).
    pub(crate) fn factors(&self) -> BufferIds {
        match self.body().factors() {
            Some((factors, _)) => factors.into_iter().map(|factor| factor.buffer).collect(),
            None if self.flexible_nest().is_some() => BufferIds::new(),
            None => self.reads(),
        }
    }

    /// Whether it computes nothing at all: no outer point, no sum.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.body().is_empty()
    }

    /// The cost over these buffers.
    pub(crate) fn cost_over(&self, buffers: &[Buffer]) -> Cost {
        Cost { flops: self.body().flops(), bytes: self.bytes_over(buffers) }
    }

    /// The bytes that it reads and writes of these buffers.
    pub(crate) fn bytes_over(&self, buffers: &[Buffer]) -> u64 {
        let mut traffic = Traffic::new(buffers);
        self.body().traffic(&mut traffic);
        traffic.bytes()
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
        self.can_fail() || matches!(self, Instruction::Yield(_))
    }

    /// Whether a run of it can fail.
    #[must_use]
    pub fn can_fail(&self) -> bool {
        self.nest().is_some_and(|nest| nest.expr.can_fail())
    }

    /// The first fault: an access outside a buffer, or parts that contradict each other.
    pub(crate) fn validate(&self, buffers: &[Buffer]) -> Option<String> {
        let is_constant = |id: &&BufferId| matches!(buffers[id.0 as usize].place, Place::Constant(_));
        if let Some(id) = self.writes().iter().find(is_constant) {
            return Some(format!("a result that is the constant {:?}", buffers[id.0 as usize].label));
        }
        self.body().validate(buffers)
    }
}
