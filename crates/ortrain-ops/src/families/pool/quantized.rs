//! Averages of quantized tensors: `QLinearAveragePool` and `QLinearGlobalAveragePool` of `com.microsoft`, version 1.
//!
//! They are a float average between `DequantizeLinear` and `QuantizeLinear`. With `channels_last` the channels are the
//! last axis.

use ortrain_graph::{Attrs, DType, Graph, Node};

use super::windows::Windows;
use crate::OpError;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::channels_last::Channels;
use crate::support::quantization_grid::{
    SCALE_SAMPLE, SampleInput, ZERO_POINT_SAMPLE, check_grid_of_tensor, dequantize, is_byte, quantize,
    typed_input,
};
use crate::support::sizes::shape_of;

const CHANNELS_LAST: &str = "channels_last";

/// Average of a quantized tensor. Inputs: tensor, scale, zero point, scale and zero point of the result.
struct QuantizedAverage {
    windows: Windows,
    is_channels_last: bool,
}

fn is_channels_last(attrs: &Attrs) -> Result<bool, OpError> {
    Ok(attrs.int(CHANNELS_LAST)?.unwrap_or(0) != 0)
}

impl Op for QuantizedAverage {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(4, 5, 1)?;
        let dtype = cx.expect_dtype(0, "int8 or uint8", is_byte)?;
        for scale in [1, 3] {
            check_grid_of_tensor(cx, scale, dtype)?;
        }
        let Some(shape) = cx.shape(0) else {
            cx.set_output(0, dtype, None);
            return Ok(());
        };
        if shape.rank() < 3 {
            return Err(OpError::invalid(format!(
                "an input has shape {shape}, expected batch, channels and at least one spatial axis"
            )));
        }
        let result = if self.is_channels_last {
            let planes = Channels::ToSecondAxis.move_shape(shape);
            Channels::ToLastAxis.move_shape(&self.windows.infer_outputs(cx, &planes)?)
        } else {
            self.windows.infer_outputs(cx, shape)?
        };
        cx.set_output(0, dtype, Some(result));
        Ok(())
    }
}

fn decompose(rw: &mut Rewrite<'_>, op: &str) -> Result<(), OpError> {
    let (x, dtype) = typed_input(rw, 0)?;
    let is_channels_last = is_channels_last(rw.attrs())?;
    let rank = shape_of(rw, x, "the input")?.rank();
    let (scale, zero_point) = (rw.required_input(1)?, rw.input(2));
    let mut value = dequantize(rw, x, scale, zero_point);
    if is_channels_last {
        value = Channels::ToSecondAxis.move_value(rw, value, rank);
    }
    let mut attrs = rw.attrs().clone();
    attrs.0.remove(CHANNELS_LAST);
    value = rw.add(op, &[value], attrs);
    if is_channels_last {
        value = Channels::ToLastAxis.move_value(rw, value, rank);
    }
    let (scale, zero_point) = (rw.required_input(3)?, rw.input(4));
    let result = quantize(rw, value, scale, zero_point, dtype);
    rw.replace_output(0, result);
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let is_channels_last = is_channels_last(&node.attrs)?;
    Ok(Box::new(QuantizedAverage { windows: Windows::read(node)?, is_channels_last }))
}

fn build_global(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let is_channels_last = is_channels_last(&node.attrs)?;
    Ok(Box::new(QuantizedAverage { windows: Windows { sliding: None }, is_channels_last }))
}

fn sample(_: &Definition) -> Sample {
    const TENSOR: SampleInput = (DType::U8, &[1, 1, 2]);
    let attrs = Attrs::new().with("kernel_shape", vec![1i64]);
    Sample::with_inputs(attrs, &[TENSOR, SCALE_SAMPLE, ZERO_POINT_SAMPLE, SCALE_SAMPLE, ZERO_POINT_SAMPLE])
}

pub(super) fn definitions() -> [Definition; 2] {
    let new = |name: &'static str, build| Definition::new("com.microsoft", name, &[1], build);
    [
        new("QLinearAveragePool", build)
            .composition(|rw| decompose(rw, "AveragePool"))
            .scales(&[1, 3])
            .sample(sample),
        new("QLinearGlobalAveragePool", build_global)
            .composition(|rw| decompose(rw, "GlobalAveragePool"))
            .sample(sample),
    ]
}
