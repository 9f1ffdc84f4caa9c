//! `QAttention` of `com.microsoft`, version 1: `Attention` with a quantized input and quantized weights.
//!
//! The product of input and weights is the product of their integers, scaled to floats. Everything behind it is
//! `Attention`. Limits: as for `Attention`; input and weights have known shapes.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape};

use super::common::{CommonAttrs, MICROSOFT, check_mask_shape, total_length};
use super::microsoft::attend_projection;
use crate::OpError;
use crate::infer::Infer;
use crate::op::{Axis, Definition, Op, QuantizedInput};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::quantization_grid::{
    check_scale, check_single, check_zero_point_type, is_byte, typed_input,
};
use crate::support::sizes::shape_of;

const INPUT: usize = 0;
const WEIGHTS: usize = 1;
const BIAS: usize = 2;
const INPUT_SCALE: usize = 3;
const WEIGHT_SCALE: usize = 4;
const MASK: usize = 5;
const INPUT_ZERO_POINT: usize = 6;
const WEIGHT_ZERO_POINT: usize = 7;
const PAST: usize = 8;

struct QuantizedAttention {
    common: CommonAttrs,
}

impl QuantizedAttention {
    /// Returns the width of queries, of keys and of values.
    fn width(&self, weights: &Shape) -> Result<usize, OpError> {
        let width =
            (weights.rank() == 2).then(|| weights[1].known()).flatten().filter(|width| width % 3 == 0);
        let width = width.ok_or_else(|| {
            OpError::unsupported(format!(
                "the weights have shape {weights}; a matrix with a known number of columns for queries, keys and values \
                 is needed"
            ))
        })? / 3;
        self.common.head_size("queries, keys or values", Some(&Dim::Known(width)))?;
        Ok(width)
    }
}

impl Op for QuantizedAttention {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(5, 9, 2)?;
        for (k, zero_point) in [(INPUT, INPUT_ZERO_POINT), (WEIGHTS, WEIGHT_ZERO_POINT)] {
            let dtype = cx.expect_dtype(k, "int8 or uint8", is_byte)?;
            check_zero_point_type(cx, zero_point, dtype)?;
        }
        for scale in [INPUT_SCALE, WEIGHT_SCALE] {
            check_scale(cx, scale)?;
        }
        check_single(cx, INPUT_SCALE, "the scale of the input")?;
        check_single(cx, INPUT_ZERO_POINT, "the zero point of the input")?;
        cx.expect_dtype(BIAS, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype([BIAS, INPUT_SCALE, WEIGHT_SCALE, PAST])?;
        let Some(weights) = cx.shape(WEIGHTS) else {
            return Err(OpError::unsupported("the shape of the weights must be known"));
        };
        let width = self.width(weights)?;
        let input = cx.shape(INPUT).cloned();
        let [batch, length] = match input.as_deref() {
            Some([batch, length, of_input]) => {
                if of_input.known().zip(weights[0].known()).is_some_and(|(a, b)| a != b) {
                    return Err(OpError::invalid(format!(
                        "the input has a last axis of {of_input}, which cannot be multiplied by weights of shape {weights}"
                    )));
                }
                [Some(batch.clone()), Some(length.clone())]
            }
            None => [None, None],
            Some(other) => {
                return Err(OpError::invalid(format!(
                    "the input has {} axes; [batch, length, width] is needed",
                    other.len()
                )));
            }
        };
        let past = cx.shape(PAST).and_then(|past| past.get(3).cloned());
        let past = cx.has_input(PAST).then(|| past.unwrap_or_else(|| cx.unknown_dim(1, 3)));
        let keys = total_length(past.as_ref(), length.as_ref(), || cx.unknown_dim(1, 3));
        if cx.has_input(MASK) {
            cx.expect_dtype(MASK, "int32", |dtype| dtype == DType::I32)?;
            if let Some(mask) = cx.shape(MASK) {
                let known_keys = Some(&keys).filter(|keys| keys.known().is_some());
                check_mask_shape(MASK, mask, [batch.as_ref(), length.as_ref(), known_keys])?;
            }
        }
        let batch = batch.unwrap_or_else(|| cx.unknown_dim(0, 0));
        let length = length.unwrap_or_else(|| cx.unknown_dim(0, 1));
        let heads = self.common.heads as usize;
        let present = [Dim::Known(2), batch.clone(), Dim::Known(heads), keys, Dim::Known(width / heads)];
        cx.set_output(0, dtype, Some([batch, length, Dim::Known(width)].into_iter().collect()));
        cx.set_output(1, dtype, Some(present.into_iter().collect()));
        Ok(())
    }
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = QuantizedAttention { common: CommonAttrs::read(rw.node())? };
    let (input, weights) = (rw.required_input(INPUT)?, rw.required_input(WEIGHTS)?);
    let width = op.width(&shape_of(rw, weights, "the weights")?)?;
    let (_, dtype) = typed_input(rw, INPUT_SCALE)?;
    let order = [INPUT, WEIGHTS, INPUT_SCALE, WEIGHT_SCALE, INPUT_ZERO_POINT, WEIGHT_ZERO_POINT, BIAS];
    let inputs = order.map(|k| rw.input(k));
    let projected = rw.add_node(MICROSOFT, "MatMulIntegerToFloat", &inputs, 1, Attrs::new())[0];
    let optional = [rw.input(MASK), rw.input(PAST), None];
    attend_projection(rw, op.common, input, (projected, dtype), [width; 3], optional)
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(QuantizedAttention { common: CommonAttrs::read(node)? }))
}

pub(super) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new(MICROSOFT, "QAttention", &[1], build)
            .composition(decompose)
            .weights(&[BIAS])
            .scales(&[INPUT_SCALE, WEIGHT_SCALE])
            .quantized(
                const { &[QuantizedInput::new(WEIGHTS, WEIGHT_SCALE, Some(WEIGHT_ZERO_POINT), Axis::Last)] },
            )
            .sample(|_| {
                let inputs: [(DType, &[usize]); 5] = [
                    (DType::U8, &[1, 2, 2]),
                    (DType::U8, &[2, 6]),
                    (DType::F32, &[6]),
                    (DType::F32, &[]),
                    (DType::F32, &[]),
                ];
                Sample::with_inputs(Attrs::new().with("num_heads", 1i64), &inputs)
            }),
    ]
}
