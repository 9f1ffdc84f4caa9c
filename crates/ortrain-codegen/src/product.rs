//! Matrix products and convolutions: one invocation per element of the result, one loop per sum.

use ortrain_expr::{ConvPass, ConvShape, DType, Precision, SlidingAxis, UnaryOp};
use ortrain_program::{Conv, MatMul, Operand};

use crate::dialect::Repr;
use crate::expr::position;
use crate::kernel::{Kernel, Value, float64};
use crate::launch::Launch;
use crate::lower::Context;
use crate::nest;

/// An inner product while it is summed up.
pub(crate) struct InnerProduct {
    precision: Precision,
    total: Value,
    /// The products of first terms alone, where there are further ones.
    first: Option<Value>,
}

impl InnerProduct {
    pub(crate) fn new(kernel: &mut Kernel<'_>, precision: Precision) -> InnerProduct {
        let zero = Value::new("0.0f", Repr::F32);
        let total = kernel.variable(&zero);
        let first = (precision.terms() > 1).then(|| kernel.variable(&zero));
        InnerProduct { precision, total, first }
    }

    /// Adds a product.
    pub(crate) fn add(&self, kernel: &mut Kernel<'_>, a: Value, b: Value) {
        let factors = [a, b].map(|factor| {
            let names: &[&str] = match self.precision {
                Precision::F32 => return vec![factor],
                Precision::Bf16 => &["to_bf16"],
                Precision::Bf16x3 => &["first_term", "second_term"],
                Precision::Bf16x6 => &["first_term", "second_term", "third_term"],
            };
            let factor = kernel.define(factor).text;
            let term = |name: &&str| Value::new(format!("{name}({factor})"), Repr::F32);
            names.iter().map(term).map(|term| kernel.define(term)).collect::<Vec<_>>()
        });
        let product = |i: usize, j: usize| format!("{} * {}", factors[0][i].text, factors[1][j].text);
        if let Some(first) = &self.first {
            kernel.line(&format!("{0} = {0} + {1};", first.text, product(0, 0)));
        }
        for &(i, j) in self.precision.products() {
            kernel.line(&format!("{0} = {0} + {1};", self.total.text, product(i, j)));
        }
    }

    pub(crate) fn result(&self, kernel: &Kernel<'_>) -> Value {
        let total = &self.total.text;
        let text = match &self.first {
            None => total.clone(),
            Some(first) => kernel.select(&format!("is_nan({total})"), &first.text, total),
        };
        Value::new(text, Repr::F32)
    }
}

/// An element of a factor at a point of its space, rounded if it is to be.
fn factor(
    kernel: &mut Kernel<'_>,
    from: &Operand,
    at: &[String],
    to: Option<DType>,
) -> Result<Value, String> {
    let value = kernel.load(from.buffer, &position(from, at))?;
    Ok(match to.and_then(UnaryOp::rounding_to) {
        Some(UnaryOp::ToF16) => Value::new(format!("to_f16({})", value.text), Repr::F32),
        Some(_) => Value::new(format!("to_bf16({})", value.text), Repr::F32),
        None => value,
    })
}

fn refuse_doubles(factors: [&Operand; 2]) -> Result<(), String> {
    let is_double = |factor: &&Operand| factor.access.dtype == DType::F64;
    if factors.iter().any(is_double) { Err(float64()) } else { Ok(()) }
}

pub(crate) fn matmul(cx: &Context<'_>, m: &MatMul) -> Result<Vec<Launch>, String> {
    refuse_doubles([&m.a, &m.b])?;
    nest::launches(cx, &m.epilogue, &|kernel, at| {
        let (batch, place) = at.split_at(m.batch.len());
        let sum = InnerProduct::new(kernel, m.precision);
        let depth = kernel.depth();
        let l = kernel.counted("0", &m.k.to_string());
        let with =
            |i: &str, j: &str| batch.iter().cloned().chain([i.into(), j.into()]).collect::<Vec<String>>();
        let a = factor(kernel, &m.a, &with(&place[0], &l), m.rounded[0])?;
        let b = factor(kernel, &m.b, &with(&l, &place[1]), m.rounded[1])?;
        sum.add(kernel, a, b);
        kernel.close_to(depth);
        Ok(vec![sum.result(kernel)])
    })
}

pub(crate) fn conv(cx: &Context<'_>, c: &Conv) -> Result<Vec<Launch>, String> {
    refuse_doubles([&c.a, &c.b])?;
    nest::launches(cx, &c.epilogue, &|kernel, at| {
        let sum = InnerProduct::new(kernel, c.precision);
        let depth = kernel.depth();
        let [a, b] = places(kernel, &c.shape, at);
        let a = factor(kernel, &c.a, &a, None)?;
        let b = factor(kernel, &c.b, &b, None)?;
        sum.add(kernel, a, b);
        kernel.close_to(depth);
        Ok(vec![sum.result(kernel)])
    })
}

fn int(kernel: &mut Kernel<'_>, text: String) -> String {
    kernel.define(Value::new(text, Repr::I32)).text
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
    let mut inside = Vec::new();
    let mut found = Vec::new();
    for ((axis, o), k) in axes.iter().zip(outputs).zip(cells) {
        let SlidingAxis { input, stride, dilation, before, .. } = axis;
        let at = int(kernel, format!("{o} * {stride} + {k} * {dilation} - ({before})"));
        inside.push(format!("{at} >= 0i && {at} < {input}i"));
        found.push(at);
    }
    if !inside.is_empty() {
        kernel.when(&inside.join(" && "));
    }
    found
}

/// The windows whose cells lie over input positions; goes on where all exist.
pub(crate) fn over(
    kernel: &mut Kernel<'_>,
    axes: &[SlidingAxis],
    inputs: &[String],
    cells: &[String],
) -> Vec<String> {
    let mut exists = Vec::new();
    let mut found = Vec::new();
    for ((axis, i), k) in axes.iter().zip(inputs).zip(cells) {
        let SlidingAxis { output, stride, dilation, before, .. } = axis;
        let far = int(kernel, format!("{i} + ({before}) - {k} * {dilation}"));
        let at = int(kernel, format!("{far} / {stride}"));
        exists.push(format!("{far} >= 0i && {at} * {stride} == {far} && {at} < {output}i"));
        found.push(at);
    }
    if !exists.is_empty() {
        kernel.when(&exists.join(" && "));
    }
    found
}
