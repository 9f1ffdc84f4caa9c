//! Instruction for convolutions.

use ortrain_expr::{Access, ConvShape, Precision, SlidingAxis, product_of_sizes};

use super::body::{Body, product_fault};
use crate::buffer::Buffer;
use crate::cost::{Traffic, nest_flops};
use crate::operand::{Nest, Operand};

/// Convolution, or a gradient of a convolution, with an epilogue.
///
/// Sums are accumulated in `f32` for narrow floats. The epilogue is a map over the dimensions of the result
/// ([`ConvShape::operands`]). Its accumulator is the result of the convolution.
#[derive(Clone, Debug)]
pub struct Conv {
    /// Pass (output or a gradient) and sizes.
    pub shape: ConvShape,
    /// Operand A: row-major, at any offset in its buffer.
    pub a: Operand,
    /// Operand B: row-major, at offset 0 of its buffer.
    pub b: Operand,
    /// Precision of the operands; always `F32` for operands of type `F64`. [`crate::ProgramBuilder::precision`] sets
    /// it.
    pub precision: Precision,
    /// Epilogue of the result.
    pub epilogue: Nest,
}

impl Body for Conv {
    fn name(&self) -> &'static str {
        "Conv"
    }

    fn describe_sizes(&self) -> String {
        let [a, b, _] = self.shape.operands();
        format!("{:?} {:?} x {:?}", self.shape.pass, a.as_slice(), b.as_slice())
    }

    fn validate(&self, buffers: &[Buffer]) -> Option<String> {
        let Conv { a, b, epilogue, shape, .. } = self;
        if let Some(fault) = product_fault(self, buffers).or_else(|| shape.validate()) {
            return Some(fault);
        }
        let [a_dims, b_dims, result] = shape.operands();
        for (operand, dims) in [(a, &a_dims), (b, &b_dims)] {
            let (Operand { access, .. }, buffer) = (operand, &buffers[operand.buffer.0 as usize]);
            let needed = dims.iter().product::<usize>().saturating_add(access.offset);
            if buffer.len < needed || !buffer.dtype.is_float() {
                return Some(format!("operand {:?} must hold floats of shape {dims:?}", buffer.label));
            }
            let row_major = Access::contiguous(access.dtype, dims);
            if operand.validate(buffers).is_some() || access.strides != row_major.strides {
                return Some(format!("an operand's access does not fit {:?}", buffer.label));
            }
        }
        if b.access.offset != 0 {
            return Some("operand B must start at the first element of its buffer".into());
        }
        if epilogue.dims != result || epilogue.inner != 0 {
            return Some("the epilogue and the result have different spaces".into());
        }
        epilogue.validate()
    }

    fn traffic(&self, traffic: &mut Traffic<'_>) {
        let [a, ..] = self.shape.operands();
        traffic.add_read(self.a.buffer, product_of_sizes(a));
        traffic.add_read(self.b.buffer, u64::MAX);
        traffic.add_nest(&self.epilogue);
    }

    fn flops(&self) -> u64 {
        let ConvShape { batch, groups, channels_in, channels_out, axes, .. } = &self.shape;
        let channels = product_of_sizes([*batch, *groups, *channels_in, *channels_out]);
        let products = axes.iter().map(SlidingAxis::pairs_over_input).fold(channels, u64::saturating_mul);
        products.saturating_mul(2).saturating_add(nest_flops(&self.epilogue))
    }

    fn product(&self) -> Option<([&Operand; 2], Precision, &Nest)> {
        Some(([&self.a, &self.b], self.precision, &self.epilogue))
    }

    fn product_mut(&mut self) -> Option<([&mut Operand; 2], &mut Nest)> {
        Some(([&mut self.a, &mut self.b], &mut self.epilogue))
    }
}
