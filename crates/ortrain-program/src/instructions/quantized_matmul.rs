//! Instruction for matrix products with packed integers.

use ortrain_expr::{Access, DType, Precision, QuantizedMatrix, UnaryOp, product_of_sizes};

use super::body::{Body, nest_fault};
use crate::buffer::{Buffer, BufferId, BufferIds};
use crate::cost::{Traffic, nest_flops};
use crate::operand::{Nest, Operand, Use, nest_buffers_mut};

/// Right factor of packed integers. All buffers are whole and row-major.
#[derive(Clone, Debug)]
pub struct QuantizedFactor {
    /// Layout of the integers.
    pub matrix: QuantizedMatrix,
    /// True if lines of the matrix are columns of the factor, so that blocks lie along the sums. Otherwise lines are
    /// rows of the factor.
    pub has_lines_of_columns: bool,
    /// Integers: `U8`.
    pub bytes: BufferId,
    /// Scale of each block: `F32`.
    pub scales: BufferId,
    /// Zero point of each block: `F32`. Without it, the layout has the zero point.
    pub zero_points: Option<BufferId>,
    /// 16-bit float type that the elements are rounded to before the product.
    pub rounded: Option<DType>,
}

impl QuantizedFactor {
    /// Returns the decoded elements as an access over `[k, n]`.
    #[must_use]
    pub fn access(&self) -> Access {
        self.matrix.access(self.has_lines_of_columns)
    }

    /// Returns the buffers: integers, scales, zero points.
    pub fn buffers(&self) -> impl Iterator<Item = BufferId> + '_ {
        [self.bytes, self.scales].into_iter().chain(self.zero_points)
    }

    /// Returns the first fault of the factor over a space `[k, n]`.
    fn fault(&self, [k, n]: [usize; 2], buffers: &[Buffer]) -> Option<String> {
        let matrix = &self.matrix;
        if let Some(fault) = matrix.validate() {
            return Some(fault);
        }
        let (lines, elements) = if self.has_lines_of_columns { (n, k) } else { (k, n) };
        if lines > matrix.lines || elements > matrix.line_len() {
            return Some(format!(
                "a factor of {k} rows and {n} columns from {} lines of {} packed integers",
                matrix.lines,
                matrix.line_len()
            ));
        }
        let expected = [(DType::U8, matrix.num_bytes()), (DType::F32, matrix.num_blocks())];
        let fault =
            self.buffers().zip(expected.into_iter().chain([expected[1]])).find_map(|(id, expected)| {
                let Buffer { label, dtype, len, .. } = &buffers[id.0 as usize];
                let (needed, count) = expected;
                ((*dtype, *len) != expected).then(|| {
                    format!("{label:?} has {len} {dtype} elements, expected {count} of type {needed}")
                })
            });
        let cannot_round = |to: &DType| UnaryOp::rounding_to(*to).is_none();
        fault.or_else(|| {
            self.rounded.filter(cannot_round).map(|to| format!("a factor cannot be rounded to {to}"))
        })
    }
}

/// Matrix product with a matrix of packed integers, and an epilogue.
///
/// `product[i, j] = sum over l of a[i, l] * decoded[l, j]`, accumulated in `f32`. Kernels decode the integers as they
/// read them; the decoded matrix is never whole in memory. The epilogue is a map over `[m, n]`, as in
/// [`crate::MatMul`].
#[derive(Clone, Debug)]
pub struct QuantizedMatMul {
    /// Number of rows of the product.
    pub m: usize,
    /// Number of columns of the product.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// Left factor, over `[m, k]`: a float of at most 32 bits.
    pub a: Operand,
    /// Right factor.
    pub b: QuantizedFactor,
    /// Precision of the factors. [`crate::ProgramBuilder::precision`] sets it.
    pub precision: Precision,
    /// Epilogue of the product.
    pub epilogue: Nest,
}

impl Body for QuantizedMatMul {
    fn name(&self) -> &'static str {
        "QuantizedMatMul"
    }

    fn describe_sizes(&self) -> String {
        let QuantizedMatrix { bits, block, .. } = self.b.matrix;
        format!("{}x{}x{} of {bits} bits in blocks of {block}", self.m, self.n, self.k)
    }

    fn validate(&self, buffers: &[Buffer]) -> Option<String> {
        let QuantizedMatMul { m, n, k, a, b, epilogue, .. } = self;
        if epilogue.segments.is_some() {
            return Some("the epilogue of a product cannot have segments".into());
        }
        let (is_float, is_double) = (a.access.dtype.is_float(), a.access.dtype == DType::F64);
        if !is_float || is_double {
            return Some(format!("a left factor of type {} is not supported", a.access.dtype));
        }
        if a.validate(buffers).is_some() || a.access.strides.len() != 2 {
            return Some("a factor's access does not fit its buffer".into());
        }
        if epilogue.dims.as_slice() != [*m, *n] || epilogue.inner != 0 {
            return Some("the epilogue and the product have different spaces".into());
        }
        nest_fault(epilogue, &[DType::F32], buffers)
            .or_else(|| a.bounds_fault(&[*m, *k], "a factor"))
            .or_else(|| b.fault([*k, *n], buffers))
            .or_else(|| epilogue.validate())
    }

    fn traffic(&self, traffic: &mut Traffic<'_>) {
        traffic.add_read_over(&self.a, &[self.m, self.k]);
        self.b.buffers().for_each(|id| traffic.add_read(id, u64::MAX));
        traffic.add_nest(&self.epilogue);
    }

    fn flops(&self) -> u64 {
        let products = product_of_sizes([self.m, self.n, self.k]);
        products.saturating_mul(2).saturating_add(nest_flops(&self.epilogue))
    }

    fn nest(&self) -> Option<&Nest> {
        Some(&self.epilogue)
    }

    fn nest_mut(&mut self) -> Option<&mut Nest> {
        Some(&mut self.epilogue)
    }

    fn precision(&self) -> Precision {
        self.precision
    }

    fn factor_buffers(&self) -> Option<BufferIds> {
        Some([self.a.buffer].into_iter().chain(self.b.buffers()).collect())
    }

    fn buffers_mut(&mut self, each: &mut dyn FnMut(&mut BufferId, Use)) {
        let QuantizedFactor { bytes, scales, zero_points, .. } = &mut self.b;
        let factors = [&mut self.a.buffer, bytes, scales].into_iter().chain(zero_points);
        factors.for_each(|id| each(id, Use::Read));
        nest_buffers_mut(&mut self.epilogue, each);
    }
}
