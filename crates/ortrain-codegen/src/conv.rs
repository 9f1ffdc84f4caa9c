//! Convolutions.

use ortrain_expr::{ConvPass, ConvShape, SlidingAxis};
use ortrain_program::{Conv, Operand};

use crate::expr::position;
use crate::kernel::{Kernel, Value};
use crate::launch::Launch;
use crate::lower::Context;
use crate::nest;
use crate::product::{InnerProduct, int, refuse_doubles};

pub(crate) fn launches(cx: &Context<'_>, c: &Conv) -> Result<Vec<Launch>, String> {
    refuse_doubles([&c.a, &c.b])?;
    let plain = |kernel: &mut Kernel<'_>, at: &[String]| {
        let sum = InnerProduct::new(kernel, c.precision);
        let depth = kernel.depth();
        let [a, b] = places(kernel, &c.shape, at);
        let a = element(kernel, &c.a, &a)?;
        let b = element(kernel, &c.b, &b)?;
        sum.add(kernel, a, b);
        kernel.close_to(depth);
        Ok(vec![sum.result(kernel)])
    };
    nest::launches(cx, &c.epilogue, &plain)
}

fn element(kernel: &mut Kernel<'_>, from: &Operand, at: &[String]) -> Result<Value, String> {
    kernel.load(from.buffer, &position(from, at))
}

/// Positions of the input; goes on where all lie inside.
fn inside(kernel: &mut Kernel<'_>, axes: &[SlidingAxis], places: Vec<String>) -> Vec<String> {
    let found: Vec<String> = places.into_iter().map(|place| int(kernel, place)).collect();
    let inside = axes.iter().zip(&found).map(|(axis, at)| format!("{at} >= 0i && {at} < {}i", axis.input));
    let inside: Vec<String> = inside.collect();
    if !inside.is_empty() {
        kernel.when(&inside.join(" && "));
    }
    found
}

/// The windows that begin so far from the start; goes on where all exist.
fn exist(kernel: &mut Kernel<'_>, axes: &[SlidingAxis], starts: Vec<String>) -> Vec<String> {
    let mut exists = Vec::new();
    let mut found = Vec::new();
    for (SlidingAxis { output, stride, .. }, start) in axes.iter().zip(starts) {
        let far = int(kernel, start);
        let at = int(kernel, format!("{far} / {stride}"));
        exists.push(format!("{far} >= 0i && {at} * {stride} == {far} && {at} < {output}i"));
        found.push(at);
    }
    if !exists.is_empty() {
        kernel.when(&exists.join(" && "));
    }
    found
}

/// Starts the loops over the products of an element of the result; the places of both factors.
fn places(kernel: &mut Kernel<'_>, shape: &ConvShape, at: &[String]) -> [Vec<String>; 2] {
    let ConvShape { pass, batch, channels_in, channels_out, ref axes, .. } = *shape;
    let (lead, place) = at.split_at(2);
    match pass {
        ConvPass::Output => {
            let group = int(kernel, format!("{} / {channels_out}", lead[1]));
            let c = kernel.counted("0", &channels_in.to_string());
            let cells: Vec<String> =
                axes.iter().map(|axis| kernel.counted("0", &axis.kernel.to_string())).collect();
            let inputs = under(kernel, axes, place, &cells);
            let channel = int(kernel, format!("{group} * {channels_in} + {c}"));
            let input = [lead[0].clone(), channel].into_iter().chain(inputs).collect();
            [input, [lead[1].clone(), c].into_iter().chain(cells).collect()]
        }
        ConvPass::InputGradient => {
            let group = int(kernel, format!("{} / {channels_in}", lead[1]));
            let c = int(kernel, format!("{} % {channels_in}", lead[1]));
            let m = kernel.counted("0", &channels_out.to_string());
            let cells: Vec<String> =
                axes.iter().map(|axis| kernel.counted("0", &axis.kernel.to_string())).collect();
            let outputs = over(kernel, axes, place, &cells);
            let channel = int(kernel, format!("{group} * {channels_out} + {m}"));
            let output = [lead[0].clone(), channel.clone()].into_iter().chain(outputs).collect();
            [output, [channel, c].into_iter().chain(cells).collect()]
        }
        ConvPass::FilterGradient => {
            let group = int(kernel, format!("{} / {channels_out}", lead[0]));
            let n = kernel.counted("0", &batch.to_string());
            let outputs: Vec<String> =
                axes.iter().map(|axis| kernel.counted("0", &axis.output.to_string())).collect();
            let inputs = under(kernel, axes, &outputs, place);
            let channel = int(kernel, format!("{group} * {channels_in} + {}", lead[1]));
            let output = [n.clone(), lead[0].clone()].into_iter().chain(outputs).collect();
            [output, [n, channel].into_iter().chain(inputs).collect()]
        }
    }
}

/// The input positions under cells of windows; goes on where all lie inside.
pub(crate) fn under(
    kernel: &mut Kernel<'_>,
    axes: &[SlidingAxis],
    outputs: &[String],
    cells: &[String],
) -> Vec<String> {
    let places = axes.iter().zip(outputs).zip(cells).map(|((axis, o), k)| {
        let SlidingAxis { stride, dilation, before, .. } = axis;
        format!("{o} * {stride} + {k} * {dilation} - ({before})")
    });
    inside(kernel, axes, places.collect())
}

/// The windows whose cells lie over input positions; goes on where all exist.
fn over(kernel: &mut Kernel<'_>, axes: &[SlidingAxis], inputs: &[String], cells: &[String]) -> Vec<String> {
    let starts = axes.iter().zip(inputs).zip(cells).map(|((axis, i), k)| {
        let SlidingAxis { dilation, before, .. } = axis;
        format!("{i} + ({before}) - {k} * {dilation}")
    });
    exist(kernel, axes, starts.collect())
}
