//! Matrix products.

use ortrain_expr::{DType, Precision, UnaryOp};
use ortrain_program::{MatMul, Operand};

use crate::context::Context;
use crate::expr::position;
use crate::inner_product::{InnerProduct, LEFT, MatmulOperands, are_terms_adjacent};
use crate::kernel::Kernel;
use crate::launch::Launch;
use crate::repr::{Repr, Value};
use crate::{matmul_strategy, nest};

pub(crate) fn launches(cx: &Context<'_>, m: &MatMul) -> Result<Vec<Launch>, String> {
    let repr = cx.float_repr(m.a.access.dtype)?;
    let plain = |kernel: &mut Kernel<'_>, at: &[String]| {
        let (batch, position) = at.split_at(m.batch.len());
        let sum = InnerProduct::with_repr(kernel, m.precision, repr);
        let depth = kernel.depth();
        let l = kernel.begin_loop("0", &m.k.to_string());
        let with =
            |i: &str, j: &str| batch.iter().cloned().chain([i.into(), j.into()]).collect::<Vec<String>>();
        let a = factor_element(kernel, &m.a, &with(&position[0], &l), m.rounded[0])?;
        let b = factor_element(kernel, &m.b, &with(&l, &position[1]), m.rounded[1])?;
        sum.add(kernel, a, b);
        kernel.close_to(depth);
        Ok(vec![sum.result(kernel)])
    };
    match repr {
        Repr::F64 => nest::launches(cx, &m.epilogue, &plain),
        _ => matmul_strategy::launches(cx, &StridedFactors(m), &m.epilogue, &plain),
    }
}

/// Prints an element of a factor at a point of its space, rounded if required.
fn factor_element(
    kernel: &mut Kernel<'_>,
    from: &Operand,
    at: &[String],
    to: Option<DType>,
) -> Result<Value, String> {
    Ok(rounded(kernel.load(from.buffer, &position(from, at)), to))
}

/// Rounds a 32-bit float to a 16-bit type. Other values stay as they are.
pub(crate) fn rounded(value: Value, to: Option<DType>) -> Value {
    let to = to.filter(|_| value.repr == Repr::F32);
    match to.and_then(UnaryOp::rounding_to) {
        Some(UnaryOp::ToF16) => Value::new(format!("to_f16({})", value.text), Repr::F32),
        Some(_) => Value::new(format!("to_bf16({})", value.text), Repr::F32),
        None => value,
    }
}

/// Factors of a matrix product: strided accesses.
struct StridedFactors<'m>(&'m MatMul);

impl MatmulOperands for StridedFactors<'_> {
    fn batch(&self) -> Vec<usize> {
        self.0.batch.to_vec()
    }

    fn sides(&self) -> [usize; 3] {
        [self.0.m, self.0.n, self.0.k]
    }

    fn precision(&self) -> Precision {
        self.0.precision
    }

    fn runs_along_terms(&self, side: usize) -> bool {
        let axes = self.0.batch.len();
        let stride = |axis: usize| [&self.0.a, &self.0.b][side].access.strides[axes + axis];
        let (lines, terms) = if side == LEFT { (0, 1) } else { (1, 0) };
        are_terms_adjacent(stride(lines), stride(terms))
    }

    fn element(
        &self,
        kernel: &mut Kernel<'_>,
        side: usize,
        line: &[String],
        term: &[String],
    ) -> Result<Value, String> {
        let mut at = line.to_vec();
        let last = if side == LEFT { at.len() } else { at.len() - 1 };
        at.insert(last, term[0].clone());
        factor_element(kernel, [&self.0.a, &self.0.b][side], &at, self.0.rounded[side])
    }
}
