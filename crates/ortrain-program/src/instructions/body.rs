//! Common interface of instructions for passes, checks and dumps.

use ortrain_expr::{Access, DType, Precision};
use smallvec::SmallVec;

use crate::buffer::{Buffer, BufferId, BufferIds};
use crate::cost::{Traffic, nest_flops};
use crate::operand::{Load, Nest, Operand, Use, nest_buffers, nest_buffers_mut};

/// Body of an instruction, with the queries of passes, checks and dumps.
pub(crate) trait Body {
    /// Returns the name of the instruction.
    fn name(&self) -> &'static str;

    /// Returns the sizes as text.
    fn describe_sizes(&self) -> String;

    /// Returns the first fault: an access outside a buffer, or parts that contradict each other.
    fn validate(&self, buffers: &[Buffer]) -> Option<String>;

    /// Records the elements that the instruction reads and writes.
    fn traffic(&self, traffic: &mut Traffic<'_>) {
        self.nest().into_iter().for_each(|nest| traffic.add_nest(nest));
    }

    /// Returns the number of operations.
    fn flops(&self) -> u64 {
        self.nest().map_or(0, nest_flops)
    }

    /// Returns the factors of the inner products, their precision, and the epilogue nest. Returns `None` if the
    /// instruction computes no products.
    fn product(&self) -> Option<([&Operand; 2], Precision, &Nest)> {
        None
    }

    /// Returns the mutable factors and the mutable epilogue of a product.
    fn product_mut(&mut self) -> Option<([&mut Operand; 2], &mut Nest)> {
        None
    }

    /// Returns the nest of the instruction, or its epilogue. Returns `None` if it has several epilogues.
    fn nest(&self) -> Option<&Nest> {
        self.product().map(|(_, _, epilogue)| epilogue)
    }

    /// Returns the mutable nest of the instruction, or its mutable epilogue.
    fn nest_mut(&mut self) -> Option<&mut Nest> {
        self.product_mut().map(|(_, epilogue)| epilogue)
    }

    /// Returns the precision of the factors of inner products.
    fn precision(&self) -> Precision {
        self.product().map_or(Precision::F32, |(_, precision, _)| precision)
    }

    /// Returns the buffers of the factors of inner products. Returns `None` if the instruction computes no products.
    fn factor_buffers(&self) -> Option<BufferIds> {
        self.product().map(|(factors, ..)| factors.into_iter().map(|factor| factor.buffer).collect())
    }

    /// Calls `each` with each buffer and its use: operands first, then results.
    fn buffers(&self, each: &mut dyn FnMut(BufferId, Use)) {
        self.factor_buffers().into_iter().flatten().for_each(|factor| each(factor, Use::Read));
        self.nest().into_iter().for_each(|nest| nest_buffers(nest, each));
    }

    /// Calls `each` with each mutable buffer and its use.
    fn buffers_mut(&mut self, each: &mut dyn FnMut(&mut BufferId, Use)) {
        let factors = self.product_mut().into_iter().flat_map(|(factors, _)| factors);
        factors.for_each(|factor| each(&mut factor.buffer, Use::Read));
        self.nest_mut().into_iter().for_each(|nest| nest_buffers_mut(nest, each));
    }

    /// Returns true if the instruction computes nothing: no outer point, no sum.
    fn is_empty(&self) -> bool {
        self.nest().is_some_and(|nest| nest.outer_dims().contains(&0))
    }
}

/// Returns a fault if an access of a nest does not fit its buffer, or if the accumulators differ from `accumulators`.
pub(super) fn nest_fault(nest: &Nest, accumulators: &[DType], buffers: &[Buffer]) -> Option<String> {
    let wrong_operand = || nest.operands().find_map(|operand| operand.validate(buffers));
    let actual: SmallVec<[DType; 2]> =
        nest.loads[..nest.num_accumulators()].iter().map(Load::dtype).collect();
    let wrong_accumulators = || {
        (actual.as_slice() != accumulators).then(|| {
            let list = |types: &[DType]| types.iter().map(DType::to_string).collect::<Vec<_>>().join(", ");
            format!("accumulators [{}], expected [{}]", list(&actual), list(accumulators))
        })
    };
    wrong_operand().or_else(wrong_accumulators)
}

/// Returns a fault if the precision is below the type of the factors, or if the epilogue does not fit the products.
pub(super) fn product_fault(product: &dyn Body, buffers: &[Buffer]) -> Option<String> {
    let (factors, precision, epilogue) = product.product()?;
    if epilogue.segments.is_some() {
        return Some(format!(
            "the epilogue of a product cannot have segments ({} reduced axes)",
            epilogue.inner
        ));
    }
    let double = factors.map(|factor| factor.access.dtype == DType::F64);
    let accumulator = if double == [true, true] { DType::F64 } else { DType::F32 };
    nest_fault(epilogue, &[accumulator], buffers).or_else(|| {
        (precision != Precision::F32 && double.contains(&true))
            .then(|| format!("float64 factors cannot have the precision {precision}"))
    })
}

/// Returns a fault if an operand is not a whole buffer, row-major.
pub(super) fn contiguous_fault<'a>(
    operands: impl IntoIterator<Item = &'a Operand>,
    buffers: &[Buffer],
) -> Option<String> {
    operands.into_iter().find_map(|operand| {
        let Buffer { label, dtype, len, .. } = &buffers[operand.buffer.0 as usize];
        (operand.access != Access::contiguous(*dtype, &[*len]))
            .then(|| format!("the access to {label:?} must be contiguous and cover the whole buffer"))
    })
}
