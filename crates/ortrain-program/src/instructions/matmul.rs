//! Instruction for matrix products.

use ortrain_expr::{DType, Dims, Precision, UnaryOp, product_of_sizes};

use super::body::{Body, product_fault};
use crate::buffer::Buffer;
use crate::cost::{Traffic, nest_flops};
use crate::operand::{Nest, Operand, batched_matrix_dims};

/// Batched matrix product with an epilogue.
///
/// `product[batch.., i, j] = sum over l of a[batch.., i, l] * b[batch.., l, j]`, accumulated in `f32` for narrow
/// floats. The epilogue is a map over `batch + [m, n]` that stores the results. Its accumulator is the product. It
/// contains scaling, bias, activation and accumulation into an old value.
#[derive(Clone, Debug)]
pub struct MatMul {
    /// Sizes of the batch axes.
    pub batch: Dims,
    /// Number of rows of the product.
    pub m: usize,
    /// Number of columns of the product.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// Left factor, over `batch + [m, k]`.
    pub a: Operand,
    /// Right factor, over `batch + [k, n]`.
    pub b: Operand,
    /// 16-bit float type that the elements of each `F32` factor are rounded to before the product. The result equals
    /// the result of a factor stored in the 16-bit type.
    pub rounded: [Option<DType>; 2],
    /// Precision of the factors; always `F32` for factors of type `F64`. [`crate::ProgramBuilder::precision`] sets it.
    pub precision: Precision,
    /// Epilogue of the product.
    pub epilogue: Nest,
}

impl MatMul {
    /// Returns the spaces of the factors: `batch + [m, k]` and `batch + [k, n]`.
    pub(crate) fn spaces(&self) -> [Dims; 2] {
        [[self.m, self.k], [self.k, self.n]].map(|sizes| batched_matrix_dims(&self.batch, sizes))
    }

    /// Returns the factors, each with the type that it is rounded to.
    fn rounded_factors(&self) -> impl Iterator<Item = (&Operand, Option<DType>)> {
        [&self.a, &self.b].into_iter().zip(self.rounded)
    }
}

impl Body for MatMul {
    fn name(&self) -> &'static str {
        "MatMul"
    }

    fn describe_sizes(&self) -> String {
        let multiplied = |(factor, to): (&Operand, Option<DType>)| to.unwrap_or(factor.access.dtype);
        let types: Vec<String> =
            self.rounded_factors().map(multiplied).map(|dtype| dtype.to_string()).collect();
        let types =
            if self.rounded == [None; 2] { String::new() } else { format!(" of {}", types.join(" x ")) };
        format!("{:?} {}x{}x{}{types}", self.batch.as_slice(), self.m, self.n, self.k)
    }

    fn validate(&self, buffers: &[Buffer]) -> Option<String> {
        let MatMul { a, b, epilogue, .. } = self;
        if let Some(fault) = product_fault(self, buffers) {
            return Some(fault);
        }
        for (factor, to) in self.rounded_factors() {
            let fits = |to| factor.access.dtype == DType::F32 && UnaryOp::rounding_to(to).is_some();
            if let Some(to) = to.filter(|&to| !fits(to)) {
                return Some(format!("a factor of type {} cannot be rounded to {to}", factor.access.dtype));
            }
        }
        for (factor, dims) in [a, b].into_iter().zip(self.spaces()) {
            if factor.validate(buffers).is_some() || factor.access.strides.len() != dims.len() {
                return Some("a factor's access does not fit its buffer".into());
            }
            if let Some(fault) = factor.bounds_fault(&dims, "a factor") {
                return Some(fault);
            }
        }
        if epilogue.dims != batched_matrix_dims(&self.batch, [self.m, self.n]) || epilogue.inner != 0 {
            return Some("the epilogue and the product have different spaces".into());
        }
        epilogue.validate()
    }

    fn traffic(&self, traffic: &mut Traffic<'_>) {
        for (factor, dims) in [&self.a, &self.b].into_iter().zip(self.spaces()) {
            traffic.add_read_over(factor, &dims);
        }
        traffic.add_nest(&self.epilogue);
    }

    fn flops(&self) -> u64 {
        let products =
            product_of_sizes(batched_matrix_dims(&self.batch, [self.m, self.n]).into_iter().chain([self.k]));
        products.saturating_mul(2).saturating_add(nest_flops(&self.epilogue))
    }

    fn product(&self) -> Option<([&Operand; 2], Precision, &Nest)> {
        Some(([&self.a, &self.b], self.precision, &self.epilogue))
    }

    fn product_mut(&mut self) -> Option<([&mut Operand; 2], &mut Nest)> {
        Some(([&mut self.a, &mut self.b], &mut self.epilogue))
    }
}
