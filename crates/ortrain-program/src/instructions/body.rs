//! The answers of an instruction to passes, checks and dumps.

use ortrain_expr::{Access, DType, Precision};
use smallvec::SmallVec;

use crate::buffer::{Buffer, BufferId};
use crate::cost::{Traffic, nest_flops};
use crate::operand::{Load, Nest, Operand, Use, nest_buffers, nest_buffers_mut};

/// The body of an instruction: it answers what passes, checks and dumps ask of any of them.
pub(crate) trait Body {
    /// The name of the instruction.
    fn name(&self) -> &'static str;

    /// Its sizes, as text.
    fn sizes(&self) -> String;

    /// The first fault: an access outside a buffer, or parts that contradict each other.
    fn validate(&self, buffers: &[Buffer]) -> Option<String>;

    /// Takes down which elements it reads and writes.
    fn traffic(&self, traffic: &mut Traffic<'_>) {
        self.nest().into_iter().for_each(|nest| traffic.nest(nest));
    }

    /// The number of its operations.
    fn flops(&self) -> u64 {
        self.nest().map_or(0, nest_flops)
    }

    /// The factors of its inner products, how exactly they are taken, and the nest that finishes the products, if that is what
    /// it computes.
    fn product(&self) -> Option<([&Operand; 2], Precision, &Nest)> {
        None
    }

    /// The factors and the nest of a product, to be changed.
    fn product_mut(&mut self) -> Option<([&mut Operand; 2], &mut Nest)> {
        None
    }

    /// The nest that it is, or its epilogue, if it has one and not several.
    fn nest(&self) -> Option<&Nest> {
        self.product().map(|(_, _, epilogue)| epilogue)
    }

    /// The same, to be changed.
    fn nest_mut(&mut self) -> Option<&mut Nest> {
        self.product_mut().map(|(_, epilogue)| epilogue)
    }

    /// The factors of its inner products, and how exactly they are taken.
    fn factors(&self) -> Option<([&Operand; 2], Precision)> {
        self.product().map(|(factors, precision, _)| (factors, precision))
    }

    /// Calls a function with each buffer, and how it is used: operands first, then results.
    fn buffers(&self, each: &mut dyn FnMut(BufferId, Use)) {
        let factors = self.factors().into_iter().flat_map(|(factors, _)| factors);
        factors.for_each(|factor| each(factor.buffer, Use::Read));
        self.nest().into_iter().for_each(|nest| nest_buffers(nest, each));
    }

    /// Calls a function with each buffer, to be changed, and how it is used.
    fn buffers_mut(&mut self, each: &mut dyn FnMut(&mut BufferId, Use)) {
        let factors = self.product_mut().into_iter().flat_map(|(factors, _)| factors);
        factors.for_each(|factor| each(&mut factor.buffer, Use::Read));
        self.nest_mut().into_iter().for_each(|nest| nest_buffers_mut(nest, each));
    }

    /// Whether it computes nothing at all: no outer point, no sum.
    fn is_empty(&self) -> bool {
        self.nest().is_some_and(|nest| nest.outer_dims().contains(&0))
    }
}

/// The fault of a nest whose accesses are not those of its buffers, or whose accumulators are not the given ones.
pub(super) fn nest_fault(nest: &Nest, accumulators: &[DType], buffers: &[Buffer]) -> Option<String> {
    let wrong_operand = || nest.operands().find_map(|operand| operand.validate(buffers));
    let found: SmallVec<[DType; 2]> = nest.loads[..nest.accumulators()].iter().map(Load::dtype).collect();
    let wrong_accumulators = || {
        (found.as_slice() != accumulators).then(|| {
            let list = |types: &[DType]| types.iter().map(DType::to_string).collect::<Vec<_>>().join(", ");
            format!("accumulators [{}] where [{}] are needed", list(&found), list(accumulators))
        })
    };
    wrong_operand().or_else(wrong_accumulators)
}

/// The fault of factors that are taken with less than they are, or of an epilogue that does not fit behind their products.
pub(super) fn product_fault(product: &dyn Body, buffers: &[Buffer]) -> Option<String> {
    let (factors, precision, epilogue) = product.product()?;
    if epilogue.segments.is_some() {
        return Some(format!("segments with {} reduced axes", epilogue.inner));
    }
    let double = factors.map(|factor| factor.access.dtype == DType::F64);
    let accumulator = if double == [true, true] { DType::F64 } else { DType::F32 };
    nest_fault(epilogue, &[accumulator], buffers).or_else(|| {
        (precision != Precision::F32 && double.contains(&true))
            .then(|| format!("factors of float64 in {precision}"))
    })
}

/// The fault of an operand that is not a whole buffer, row-major.
pub(super) fn whole_fault<'a>(
    operands: impl IntoIterator<Item = &'a Operand>,
    buffers: &[Buffer],
) -> Option<String> {
    operands.into_iter().find_map(|operand| {
        let Buffer { label, dtype, len, .. } = &buffers[operand.buffer.0 as usize];
        (operand.access != Access::contiguous(*dtype, &[*len]))
            .then(|| format!("an access to {label:?} that is not all of it, in order"))
    })
}
