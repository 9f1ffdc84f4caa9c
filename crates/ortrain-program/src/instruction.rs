//! The closed set of instructions.

use std::sync::Arc;

use ortrain_expr::Precision;

use crate::buffer::{Buffer, BufferId, BufferIds, BufferLocation, BufferSubstitution};
use crate::cost::{Cost, Traffic};
use crate::instructions::{
    Attention, Body, Conv, IntegerProduct, MatMul, NestGroup, QuantizedMatMul, ScatterAdd, Window, Yield,
};
use crate::operand::{Nest, Use};

/// Instruction. The set is closed: every backend matches all variants. Clones share their body until one of them
/// changes it.
#[derive(Clone, Debug)]
pub enum Instruction {
    /// Reductions over the inner axes of a nest, if it has inner axes, then a map. Passes neither merge a nest with
    /// [segments](ortrain_expr::Segments) into another nest nor another nest into it.
    Nest(Arc<Nest>),
    /// Nests that are independent of each other.
    NestGroup(Arc<NestGroup>),
    /// Matrix product with an epilogue.
    MatMul(Arc<MatMul>),
    /// Matrix product with a matrix of packed integers, with an epilogue.
    QuantizedMatMul(Arc<QuantizedMatMul>),
    /// Convolution with an epilogue.
    Conv(Arc<Conv>),
    /// Matrix product or convolution of bytes, with an epilogue.
    IntegerProduct(Arc<IntegerProduct>),
    /// Attention or its gradients, with epilogues.
    Attention(Arc<Attention>),
    /// Pooling.
    Window(Arc<Window>),
    /// Sums of values per row index.
    ScatterAdd(Arc<ScatterAdd>),
    /// End of the first part of a run and start of the second part. It computes nothing.
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

from_bodies!(Nest, NestGroup, MatMul, QuantizedMatMul, Conv, IntegerProduct, Attention, Window, ScatterAdd);

impl Instruction {
    /// Returns the body of the instruction.
    fn body(&self) -> &dyn Body {
        match self {
            Instruction::Nest(nest) => &**nest,
            Instruction::NestGroup(group) => &**group,
            Instruction::MatMul(product) => &**product,
            Instruction::QuantizedMatMul(product) => &**product,
            Instruction::Conv(conv) => &**conv,
            Instruction::IntegerProduct(product) => &**product,
            Instruction::Attention(attention) => &**attention,
            Instruction::Window(window) => &**window,
            Instruction::ScatterAdd(sums) => &**sums,
            Instruction::Yield(yielded) => yielded,
        }
    }

    /// Returns the mutable body of the instruction; a shared body is cloned first.
    fn body_mut(&mut self) -> &mut dyn Body {
        match self {
            Instruction::Nest(nest) => &mut *Arc::make_mut(nest),
            Instruction::NestGroup(group) => &mut *Arc::make_mut(group),
            Instruction::MatMul(product) => &mut *Arc::make_mut(product),
            Instruction::QuantizedMatMul(product) => &mut *Arc::make_mut(product),
            Instruction::Conv(conv) => &mut *Arc::make_mut(conv),
            Instruction::IntegerProduct(product) => &mut *Arc::make_mut(product),
            Instruction::Attention(attention) => &mut *Arc::make_mut(attention),
            Instruction::Window(window) => &mut *Arc::make_mut(window),
            Instruction::ScatterAdd(sums) => &mut *Arc::make_mut(sums),
            Instruction::Yield(yielded) => yielded,
        }
    }

    /// Returns the name of the instruction.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.body().name()
    }

    /// Returns the precision of the factors of its inner products.
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.body().precision()
    }

    /// Returns the sizes as text, followed by the precision unless that is `f32`.
    #[must_use]
    pub fn describe_sizes(&self) -> String {
        let sizes = self.body().describe_sizes();
        match self.precision() {
            Precision::F32 => sizes,
            precision => format!("{sizes} {precision}"),
        }
    }

    /// Calls `each` with each buffer and its use: operands first, then results.
    pub fn buffers(&self, each: &mut dyn FnMut(BufferId, Use)) {
        self.body().buffers(each);
    }

    /// Returns the buffers that the instruction reads.
    #[must_use]
    pub fn reads(&self) -> BufferIds {
        self.buffers_with_use(Use::reads)
    }

    /// Returns the buffers that the instruction writes.
    #[must_use]
    pub fn writes(&self) -> BufferIds {
        self.buffers_with_use(Use::writes)
    }

    /// Returns the buffers with a use for which `selects` returns true.
    fn buffers_with_use(&self, selects: fn(Use) -> bool) -> BufferIds {
        let mut ids = BufferIds::new();
        self.buffers(&mut |id, used| {
            if selects(used) {
                ids.push(id);
            }
        });
        ids
    }

    /// Replaces the buffers that the instruction reads and the buffers that it writes. An updated buffer is both read
    /// and written: both substitutions must replace it alike.
    pub(crate) fn substitute_buffers(&mut self, read: BufferSubstitution<'_>, write: BufferSubstitution<'_>) {
        self.body_mut().buffers_mut(&mut |id, used| {
            *id = match used {
                Use::Read => read(*id),
                Use::Write => write(*id),
                Use::Update => read(write(*id)),
            }
        });
    }

    /// Returns the nest of the instruction, or its epilogue. Returns `None` if it has several epilogues.
    #[must_use]
    pub fn nest(&self) -> Option<&Nest> {
        self.body().nest()
    }

    /// Returns the mutable nest of the instruction, or its mutable epilogue.
    pub(crate) fn nest_mut(&mut self) -> Option<&mut Nest> {
        self.body_mut().nest_mut()
    }

    /// Returns the nest if passes may change its index space. Rewrites of index spaces do not support segments, so
    /// passes treat an instruction with segments as one without a nest.
    pub(crate) fn flexible_nest(&self) -> Option<&Nest> {
        self.nest().filter(|nest| nest.segments.is_none())
    }

    /// Returns the instruction with another [nest](Instruction::nest).
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

    /// Returns the buffers that the instruction reads other than through its [nest](Instruction::flexible_nest).
    pub(crate) fn factor_buffers(&self) -> BufferIds {
        match self.body().factor_buffers() {
            Some(factors) => factors,
            None if self.flexible_nest().is_some() => BufferIds::new(),
            None => self.reads(),
        }
    }

    /// Returns true if the instruction computes nothing: no outer point, no sum.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.body().is_empty()
    }

    /// Returns the cost over these buffers.
    pub(crate) fn cost_over(&self, buffers: &[Buffer]) -> Cost {
        Cost { flops: self.body().flops(), bytes: self.bytes_over(buffers) }
    }

    /// Returns the number of bytes of these buffers that the instruction reads and writes.
    pub(crate) fn bytes_over(&self, buffers: &[Buffer]) -> u64 {
        let mut traffic = Traffic::new(buffers);
        self.body().traffic(&mut traffic);
        traffic.bytes()
    }

    /// Returns true if the instruction is a nest that reduces axes.
    pub(crate) fn is_reduction(&self) -> bool {
        matches!(self, Instruction::Nest(nest) if !nest.is_map())
    }

    /// Returns the nest of the instruction, if the nest reduces no axes.
    pub(crate) fn as_map(&self) -> Option<&Nest> {
        match self {
            Instruction::Nest(nest) if nest.is_map() => Some(nest),
            _ => None,
        }
    }

    /// Returns true if the instruction must stay in a program even if its results are unused.
    pub(crate) fn has_side_effects(&self) -> bool {
        self.can_fail() || matches!(self, Instruction::Yield(_))
    }

    /// Returns true if the instruction can fail at run time.
    #[must_use]
    pub fn can_fail(&self) -> bool {
        self.nest().is_some_and(|nest| nest.expr.can_fail())
    }

    /// Returns the first fault: an access outside a buffer, or parts that contradict each other.
    pub(crate) fn validate(&self, buffers: &[Buffer]) -> Option<String> {
        let is_constant =
            |id: &&BufferId| matches!(buffers[id.0 as usize].location, BufferLocation::Constant(_));
        if let Some(id) = self.writes().iter().find(is_constant) {
            return Some(format!("it writes the constant {:?}", buffers[id.0 as usize].label));
        }
        self.body().validate(buffers)
    }
}
