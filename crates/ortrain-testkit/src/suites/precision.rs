//! Products and convolutions with rounded factors.

use std::sync::Arc;

use ortrain_expr::Precision;
use ortrain_graph::{Attrs, DType, ValueId};
use ortrain_program::{Backend, Bf16Fallback};

use super::Report;
use crate::{Case, CaseBuilder, Fill, check_backend_at, tolerance};

/// Precisions that round factors.
pub const ROUNDED: [Precision; 3] = [Precision::Bf16, Precision::Bf16x3, Precision::Bf16x6];

/// Builds a case of one node with two inputs.
fn node(op: &str, name: &str, dtype: DType, dims: [&[usize]; 2], attrs: &[(&str, Vec<i64>)]) -> Case {
    let mut b = CaseBuilder::new(op, name);
    let inputs: Vec<ValueId> = dims.into_iter().map(|dims| b.input(dtype, dims, &Fill::Signed)).collect();
    let attrs = attrs.iter().fold(Attrs::new(), |attrs, (name, values)| match values[..] {
        [value] => attrs.with(name, value),
        _ => attrs.with(name, values.clone()),
    });
    let y = b.node(op, &inputs, attrs);
    b.outputs(&[y])
}

/// Returns products and convolutions that use a reduced precision: all sides have more than 16 elements.
#[must_use]
pub fn products() -> Vec<Case> {
    let float = DType::F32;
    let transposed = [("transA", vec![1]), ("transB", vec![1])];
    let options = [("strides", vec![2, 1]), ("dilations", vec![1, 2]), ("pads", vec![1, 0, 2, 1])];
    vec![
        node("MatMul", "odd sizes", float, [&[19, 37], &[37, 23]], &[]),
        node("MatMul", "stacks", float, [&[3, 1, 33, 40], &[2, 40, 17]], &[]),
        node("MatMul", "long sums", float, [&[17, 700], &[700, 18]], &[]),
        node("MatMul", "float16", DType::F16, [&[20, 24], &[24, 18]], &[]),
        node("MatMul", "bfloat16", DType::BF16, [&[20, 24], &[24, 18]], &[]),
        node("Gemm", "transposed", float, [&[34, 21], &[50, 34]], &transposed),
        node("Conv", "plain", float, [&[2, 19, 6, 5], &[18, 19, 3, 3]], &[]),
        node("Conv", "pointwise", float, [&[2, 21, 5, 5], &[17, 21, 1, 1]], &[]),
        node("Conv", "moved", float, [&[2, 18, 9, 8], &[20, 18, 3, 2]], &options),
        node("Conv", "groups", float, [&[1, 36, 7, 6], &[34, 18, 3, 3]], &[("group", vec![2])]),
        node("Conv", "one axis", float, [&[3, 17, 11], &[17, 17, 3]], &[]),
        node("ConvTranspose", "plain", float, [&[2, 19, 5, 4], &[19, 18, 3, 3]], &[]),
    ]
}

/// Compares a backend, with any unit for the precision, with the reference evaluator. In the forward pass,
/// both round the same numbers. In the backward pass, computed numbers are rounded.
#[must_use]
pub fn agree(backend: &Arc<dyn Backend>) -> Report {
    let cases = products().into_iter().flat_map(|case| ROUNDED.map(|precision| (case.clone(), precision)));
    cases
        .map(|(case, precision)| {
            let chosen = backend.with_precision(precision, Bf16Fallback::Emulated);
            let chosen = chosen.map_err(|error| error.to_string())?;
            check_backend_at(&case, &chosen, false, precision, tolerance::FLOAT32)?;
            check_backend_at(&case, &chosen, true, precision, tolerance::for_rounded_factors(precision))
        })
        .collect()
}
