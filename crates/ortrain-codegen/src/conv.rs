//! Convolutions.

use ortrain_expr::{ConvPass, ConvShape, Precision, SlidingAxis};
use ortrain_program::{Conv, Operand};

use crate::context::Context;
use crate::expr::position;
use crate::inner_product::{InnerProduct, LEFT, MatmulOperands};
use crate::kernel::Kernel;
use crate::launch::Launch;
use crate::matmul_strategy;
use crate::nest;
use crate::repr::{Repr, Value};
use crate::thread_index::define_coordinates;

/// Maximum number of channels per group for the plain kernel: with few channels, shared loads are reused too rarely.
const MAX_PLAIN_CHANNELS: usize = 4;

pub(crate) fn launches(cx: &Context<'_>, c: &Conv) -> Result<Vec<Launch>, String> {
    let repr = cx.float_repr(c.a.access.dtype)?;
    let plain = |kernel: &mut Kernel<'_>, at: &[String]| Ok(vec![direct_element(kernel, c, repr, at)?]);
    let ConvShape { pass, groups, channels_in, channels_out, .. } = c.shape;
    // The gradient of a filter has long sums in any case.
    let is_narrow = groups > 1 && channels_in.max(channels_out) <= MAX_PLAIN_CHANNELS;
    if repr == Repr::F64 || (is_narrow && pass != ConvPass::FilterGradient) {
        return nest::launches(cx, &c.epilogue, &plain);
    }
    matmul_strategy::launches(cx, &ConvOperands(c), &c.epilogue, &plain)
}

/// Prints a single element of the result. Products with elements outside of the input are skipped.
fn direct_element(kernel: &mut Kernel<'_>, c: &Conv, repr: Repr, at: &[String]) -> Result<Value, String> {
    let sum = InnerProduct::with_repr(kernel, c.precision, repr);
    let depth = kernel.depth();
    let [a, b] = start_product_loops(kernel, &c.shape, at);
    let a = element(kernel, &c.a, &a)?;
    let b = element(kernel, &c.b, &b)?;
    sum.add(kernel, a, b);
    kernel.close_to(depth);
    Ok(sum.result(kernel))
}

/// Returns true if the loads insert zeros for elements outside of the input.
fn gathers_zeros(shape: &ConvShape) -> bool {
    let reaches = |axis: &SlidingAxis| {
        let last = (axis.output.max(1) - 1) * axis.stride + (axis.kernel.max(1) - 1) * axis.dilation;
        axis.padding_before != 0 || last >= axis.input
    };
    shape.pass == ConvPass::InputGradient || shape.axes.iter().any(reaches)
}

fn element(kernel: &mut Kernel<'_>, from: &Operand, at: &[String]) -> Result<Value, String> {
    Ok(kernel.load(from.buffer, &position(from, at)))
}

/// Factors of a convolution as matrix products, one per group of channels (implicit GEMM). Rows are output channels,
/// columns are output positions in all images. For the gradient of the filter, columns are input channels and filter
/// elements.
struct ConvOperands<'c>(&'c Conv);

impl ConvOperands<'_> {
    fn sizes(&self, size: impl Fn(&SlidingAxis) -> usize) -> impl Iterator<Item = usize> {
        self.0.shape.axes.iter().map(size)
    }

    /// Returns the number of elements of a window.
    fn cells(&self) -> usize {
        self.sizes(|axis| axis.kernel).product()
    }

    /// Splits a linear index into indices along a leading axis and along each window axis.
    fn split(
        &self,
        kernel: &mut Kernel<'_>,
        index: &str,
        lead: usize,
        size: impl Fn(&SlidingAxis) -> usize,
    ) -> Vec<String> {
        let dims: Vec<usize> = [lead].into_iter().chain(self.sizes(size)).collect();
        let index_bits = kernel.define(Value::new(format!("bits_of_int({index})"), Repr::U32)).text;
        define_coordinates(kernel, &index_bits, &dims)
    }

    /// Maps the window indices after the leading index to start positions.
    fn window_starts(
        &self,
        kernel: &mut Kernel<'_>,
        index: &[String],
        from: impl Fn(&SlidingAxis, &str) -> String,
    ) -> Vec<String> {
        let (lead, positions) = index.split_first().expect("the index has a first axis");
        let starts = self.0.shape.axes.iter().zip(positions).map(|(axis, at)| kernel.int(from(axis, at)));
        [lead.clone()].into_iter().chain(starts.collect::<Vec<_>>()).collect()
    }

    /// Prints the index of a channel, from its group and its index in the group.
    fn channel(kernel: &mut Kernel<'_>, group: &str, channels: usize, of_group: &str) -> String {
        kernel.int(format!("{group} * {channels} + {of_group}"))
    }

    /// Prints an element of the filter: the left factor.
    fn filter_element(
        &self,
        kernel: &mut Kernel<'_>,
        line: &[String],
        term: &[String],
    ) -> Result<Value, String> {
        let ConvShape { pass, channels_in, channels_out, .. } = self.0.shape;
        let (cells, [group, row]) = (self.cells(), [&line[0], &line[1]]);
        let at = match pass {
            ConvPass::Output => {
                format!("({group} * {channels_out} + {row}) * {} + {}", channels_in * cells, term[0])
            }
            _ => {
                let channel = format!("({group} * {channels_out} + {}) * {channels_in} + {row}", term[0]);
                format!("({channel}) * {cells} + {}", term[1])
            }
        };
        Ok(kernel.load(self.0.b.buffer, &at))
    }

    /// Prints an element of the right factor: an input element in a window, or the output element of a window that
    /// covers a position.
    fn gathered_element(
        &self,
        kernel: &mut Kernel<'_>,
        line: &[String],
        term: &[String],
    ) -> Result<Value, String> {
        let ConvShape { pass, channels_in, channels_out, ref axes, .. } = self.0.shape;
        let (group, line) = line.split_first().expect("the line starts with the group");
        let (from, image, channel, channels) = match pass {
            ConvPass::Output => (&self.0.a, &line[0], &term[0], channels_in),
            ConvPass::InputGradient => (&self.0.a, &line[0], &term[0], channels_out),
            ConvPass::FilterGradient => (&self.0.b, &term[0], &line[0], channels_in),
        };
        let sums = |sign: &str| -> Vec<String> {
            line[1..].iter().zip(&term[1..]).map(|(start, step)| format!("{start} {sign} {step}")).collect()
        };
        let positions = match pass {
            ConvPass::InputGradient => when_existing(kernel, axes, sums("-")),
            _ => when_inside(kernel, axes, sums("+")),
        };
        let channel = ConvOperands::channel(kernel, group, channels, channel);
        let at: Vec<String> = [image.clone(), channel].into_iter().chain(positions).collect();
        element(kernel, from, &at)
    }
}

impl MatmulOperands for ConvOperands<'_> {
    fn batch(&self) -> Vec<usize> {
        vec![self.0.shape.groups]
    }

    fn sides(&self) -> [usize; 3] {
        self.0.shape.product_sides()
    }

    fn precision(&self) -> Precision {
        self.0.precision
    }

    fn runs_along_terms(&self, side: usize) -> bool {
        match self.0.shape.pass {
            ConvPass::Output => side == LEFT,
            ConvPass::InputGradient => side == LEFT && self.cells() > 1,
            ConvPass::FilterGradient => true,
        }
    }

    fn define_line(&self, kernel: &mut Kernel<'_>, side: usize, batch: &[String], line: &str) -> Vec<String> {
        let ConvShape { pass, batch: images, channels_in, .. } = self.0.shape;
        let rest = match (side, pass) {
            (LEFT, _) => vec![line.to_owned()],
            (_, ConvPass::Output) => {
                let index = self.split(kernel, line, images, |axis| axis.output);
                self.window_starts(kernel, &index, |axis, at| {
                    format!("{at} * {} - ({})", axis.stride, axis.padding_before)
                })
            }
            (_, ConvPass::InputGradient) => {
                let index = self.split(kernel, line, images, |axis| axis.input);
                self.window_starts(kernel, &index, |axis, at| format!("{at} + ({})", axis.padding_before))
            }
            (_, ConvPass::FilterGradient) => {
                let index = self.split(kernel, line, channels_in, |axis| axis.kernel);
                self.window_starts(kernel, &index, |axis, at| format!("{at} * {}", axis.dilation))
            }
        };
        batch.iter().cloned().chain(rest).collect()
    }

    fn define_term(&self, kernel: &mut Kernel<'_>, side: usize, term: &str) -> Vec<String> {
        let ConvShape { pass, batch: images, channels_in, channels_out, .. } = self.0.shape;
        let channels = if pass == ConvPass::Output { channels_in } else { channels_out };
        match (side, pass) {
            (LEFT, ConvPass::Output) => vec![term.to_owned()],
            (LEFT, ConvPass::InputGradient) => {
                let cells = self.cells();
                vec![kernel.int(format!("{term} / {cells}")), kernel.int(format!("{term} % {cells}"))]
            }
            (LEFT, ConvPass::FilterGradient) => {
                let position_count: usize = self.sizes(|axis| axis.output).product();
                vec![
                    kernel.int(format!("{term} / {position_count}")),
                    kernel.int(format!("{term} % {position_count}")),
                ]
            }
            (_, ConvPass::FilterGradient) => {
                let index = self.split(kernel, term, images, |axis| axis.output);
                self.window_starts(kernel, &index, |axis, at| {
                    format!("{at} * {} - ({})", axis.stride, axis.padding_before)
                })
            }
            _ => {
                let index = self.split(kernel, term, channels, |axis| axis.kernel);
                self.window_starts(kernel, &index, |axis, at| format!("{at} * {}", axis.dilation))
            }
        }
    }

    fn element(
        &self,
        kernel: &mut Kernel<'_>,
        side: usize,
        line: &[String],
        term: &[String],
    ) -> Result<Value, String> {
        let ConvShape { pass, groups, channels_out, .. } = self.0.shape;
        match (side, pass) {
            (LEFT, ConvPass::FilterGradient) => {
                let position_count: usize = self.sizes(|axis| axis.output).product();
                let (image, position) = (&term[0], &term[1]);
                let channel = format!("{} * {channels_out} + {}", line[0], line[1]);
                let plane = format!("{image} * {} + {channel}", groups * channels_out);
                let at = format!("{} + ({plane}) * {position_count} + {position}", self.0.a.access.offset);
                Ok(kernel.load(self.0.a.buffer, &at))
            }
            (LEFT, _) => self.filter_element(kernel, line, term),
            _ => self.gathered_element(kernel, line, term),
        }
    }

    /// Inserted zeros times infinite factors give NaN. A NaN sum is therefore recomputed without them.
    fn finish_value(&self, kernel: &mut Kernel<'_>, at: &[String], product: Value) -> Result<Value, String> {
        if !gathers_zeros(&self.0.shape) {
            return Ok(product);
        }
        let product = kernel.variable(&product);
        let depth = kernel.depth();
        kernel.begin_if(&format!("is_nan({})", product.text));
        let direct_value = direct_element(kernel, self.0, Repr::F32, at)?;
        kernel.assign(&product, &direct_value);
        kernel.close_to(depth);
        Ok(product)
    }

    fn point(&self, kernel: &mut Kernel<'_>, batch: &[String], [i, j]: [&str; 2]) -> Vec<String> {
        let ConvShape { pass, batch: images, channels_in, channels_out, .. } = self.0.shape;
        let group = &batch[0];
        if pass == ConvPass::FilterGradient {
            let channel = ConvOperands::channel(kernel, group, channels_out, i);
            let cells = self.split(kernel, j, channels_in, |axis| axis.kernel);
            return [channel].into_iter().chain(cells).collect();
        }
        let (channels, index) = match pass {
            ConvPass::Output => (channels_out, self.split(kernel, j, images, |axis| axis.output)),
            _ => (channels_in, self.split(kernel, j, images, |axis| axis.input)),
        };
        let channel = ConvOperands::channel(kernel, group, channels, i);
        [index[0].clone(), channel].into_iter().chain(index[1..].iter().cloned()).collect()
    }
}

/// Defines input positions, and starts a block for positions inside of the input.
fn when_inside(kernel: &mut Kernel<'_>, axes: &[SlidingAxis], positions: Vec<String>) -> Vec<String> {
    let defined: Vec<String> = positions.into_iter().map(|position| kernel.int(position)).collect();
    let inside = axes.iter().zip(&defined).map(|(axis, at)| format!("{at} >= 0 && {at} < {}", axis.input));
    let inside: Vec<String> = inside.collect();
    if !inside.is_empty() {
        kernel.begin_if(&inside.join(" && "));
    }
    defined
}

/// Defines the windows with these start offsets, and starts a block for existing windows.
fn when_existing(kernel: &mut Kernel<'_>, axes: &[SlidingAxis], starts: Vec<String>) -> Vec<String> {
    let mut exists = Vec::new();
    let mut indices = Vec::new();
    for (SlidingAxis { output, stride, .. }, start) in axes.iter().zip(starts) {
        let shifted = kernel.int(start);
        let at = kernel.int(format!("{shifted} / {stride}"));
        exists.push(format!("{shifted} >= 0 && {at} * {stride} == {shifted} && {at} < {output}"));
        indices.push(at);
    }
    if !exists.is_empty() {
        kernel.begin_if(&exists.join(" && "));
    }
    indices
}

/// Starts the loops over the products of a result element, and returns the indices of both factors.
fn start_product_loops(kernel: &mut Kernel<'_>, shape: &ConvShape, at: &[String]) -> [Vec<String>; 2] {
    let ConvShape { pass, batch, channels_in, channels_out, ref axes, .. } = *shape;
    let (lead, position) = at.split_at(2);
    match pass {
        ConvPass::Output => {
            let group = kernel.int(format!("{} / {channels_out}", lead[1]));
            let c = kernel.begin_loop("0", &channels_in.to_string());
            let cells: Vec<String> =
                axes.iter().map(|axis| kernel.begin_loop("0", &axis.kernel.to_string())).collect();
            let inputs = window_inputs(kernel, axes, position, &cells);
            let channel = kernel.int(format!("{group} * {channels_in} + {c}"));
            let input = [lead[0].clone(), channel].into_iter().chain(inputs).collect();
            [input, [lead[1].clone(), c].into_iter().chain(cells).collect()]
        }
        ConvPass::InputGradient => {
            let group = kernel.int(format!("{} / {channels_in}", lead[1]));
            let c = kernel.int(format!("{} % {channels_in}", lead[1]));
            let m = kernel.begin_loop("0", &channels_out.to_string());
            let cells: Vec<String> =
                axes.iter().map(|axis| kernel.begin_loop("0", &axis.kernel.to_string())).collect();
            let outputs = covering_windows(kernel, axes, position, &cells);
            let channel = kernel.int(format!("{group} * {channels_out} + {m}"));
            let output = [lead[0].clone(), channel.clone()].into_iter().chain(outputs).collect();
            [output, [channel, c].into_iter().chain(cells).collect()]
        }
        ConvPass::FilterGradient => {
            let group = kernel.int(format!("{} / {channels_out}", lead[0]));
            let n = kernel.begin_loop("0", &batch.to_string());
            let outputs: Vec<String> =
                axes.iter().map(|axis| kernel.begin_loop("0", &axis.output.to_string())).collect();
            let inputs = window_inputs(kernel, axes, &outputs, position);
            let channel = kernel.int(format!("{group} * {channels_in} + {}", lead[1]));
            let output = [n.clone(), lead[0].clone()].into_iter().chain(outputs).collect();
            [output, [n, channel].into_iter().chain(inputs).collect()]
        }
    }
}

/// Defines the input positions of window elements, and starts a block for positions inside of the input.
pub(crate) fn window_inputs(
    kernel: &mut Kernel<'_>,
    axes: &[SlidingAxis],
    outputs: &[String],
    cells: &[String],
) -> Vec<String> {
    let positions = axes.iter().zip(outputs).zip(cells).map(|((axis, o), k)| {
        let SlidingAxis { stride, dilation, padding_before: before, .. } = axis;
        format!("{o} * {stride} + {k} * {dilation} - ({before})")
    });
    when_inside(kernel, axes, positions.collect())
}

/// Defines the windows with given elements over input positions, and starts a block for existing windows.
fn covering_windows(
    kernel: &mut Kernel<'_>,
    axes: &[SlidingAxis],
    inputs: &[String],
    cells: &[String],
) -> Vec<String> {
    let starts = axes.iter().zip(inputs).zip(cells).map(|((axis, i), k)| {
        let SlidingAxis { dilation, padding_before: before, .. } = axis;
        format!("{i} + ({before}) - {k} * {dilation}")
    });
    when_existing(kernel, axes, starts.collect())
}
