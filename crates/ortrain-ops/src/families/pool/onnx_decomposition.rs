//! Gradients of pooling in plain ONNX.

use ortrain_expr::SlidingAxes;
use ortrain_graph::{Attrs, DType, Shape, Tensor, ValueId};

use crate::OpError;
use crate::families::pool::windows::{AveragePool, Windows, inverse_count, read_average, sum_dtype};
use crate::rewrite::Rewrite;
use crate::sliding::{AutoPad, Sliding};
use crate::support::formula::formula;
use crate::support::onnx_decomposition::NodeSink;

/// Maximum number of window elements for a gradient with a filter, and of windows for a table of factors.
const MAX_WINDOW_ELEMENTS: usize = 1 << 20;

/// Maximum number of windows along an axis.
const MAX_WINDOWS_PER_AXIS: usize = 1 << 22;

fn add(to: &mut impl NodeSink, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
    let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
    to.emit(op, &inputs, attrs)
}

fn ints(to: &mut impl NodeSink, values: &[i64]) -> ValueId {
    to.emit_constant(Tensor::i64(&[values.len()], values))
}

fn cast(to: &mut impl NodeSink, value: ValueId, dtype: DType) -> ValueId {
    add(to, "Cast", &[value], Attrs::new().with("to", i64::from(dtype.to_onnx())))
}

/// Adds a filter of ones for one channel.
fn add_ones_filter(to: &mut impl NodeSink, dtype: DType, kernel: &[usize]) -> Result<ValueId, OpError> {
    let cells = kernel.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
    let Some(cells) = cells.filter(|&cells| cells <= MAX_WINDOW_ELEMENTS) else {
        return Err(OpError::unsupported(format!(
            "its gradient needs a filter of the window's size, and {kernel:?} is too large"
        )));
    };
    let dims = [1, 1].into_iter().chain(kernel.iter().copied()).collect();
    Ok(to.emit_constant(Tensor::from_f64(dtype, dims, &vec![1.0; cells])))
}

/// Returns the attributes of the transposed convolution from the output positions to all input positions.
fn transposed_convolution_attrs(axes: &SlidingAxes) -> Attrs {
    let list = |of: &dyn Fn(&ortrain_expr::SlidingAxis) -> i64| axes.iter().map(of).collect::<Vec<i64>>();
    // Number of positions by which windows extend beyond the input; negative if they end before the end of the input.
    let after = |axis: &ortrain_expr::SlidingAxis| {
        let reach = axis.output.saturating_sub(1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1;
        reach as i64 - axis.padding_before as i64 - axis.input as i64
    };
    let before = list(&|axis| axis.padding_before as i64);
    let pads: Vec<i64> = before.into_iter().chain(list(&|axis| after(axis).max(0))).collect();
    Attrs::new()
        .with("kernel_shape", list(&|axis| axis.kernel as i64))
        .with("strides", list(&|axis| axis.stride as i64))
        .with("dilations", list(&|axis| axis.dilation as i64))
        .with("pads", pads)
        .with("output_padding", list(&|axis| (-after(axis)).max(0)))
}

impl AveragePool {
    /// Adds the gradient of the averaged input, from the gradient `g` of the averages. The input has the shape `shape`
    /// (a vector of int64) with the spatial sizes `spatial`.
    pub(super) fn add_gradient(
        &self,
        to: &mut impl NodeSink,
        (g, dtype): (ValueId, DType),
        spatial: &[usize],
        shape: ValueId,
    ) -> Result<ValueId, OpError> {
        let dims: Vec<usize> = [1, 1].into_iter().chain(spatial.iter().copied()).collect();
        let axes = self.windows.axes(&dims)?;
        let outputs: Vec<usize> = axes.iter().map(|axis| axis.output).collect();
        let shared = self.add_divided_gradient(to, (g, dtype), &axes)?;
        let planes: Vec<i64> = [-1, 1].into_iter().chain(outputs.iter().map(|&size| size as i64)).collect();
        let planes = ints(to, &planes);
        let by_plane = add(to, "Reshape", &[shared, planes], Attrs::new());
        let filter = add_ones_filter(to, dtype, &self.windows.kernel())?;
        let gradient = add(to, "ConvTranspose", &[by_plane, filter], transposed_convolution_attrs(&axes));
        Ok(add(to, "Reshape", &[gradient, shape], Attrs::new()))
    }

    /// Divides the gradient of averages by the number of elements under each window. The factor is a number or a table;
    /// for many windows it is one vector for each axis.
    fn add_divided_gradient(
        &self,
        to: &mut impl NodeSink,
        (g, dtype): (ValueId, DType),
        axes: &SlidingAxes,
    ) -> Result<ValueId, OpError> {
        let outputs: Vec<usize> = axes.iter().map(|axis| axis.output).collect();
        let all_alike = |factors: &[f64]| factors.windows(2).all(|pair| pair[0] == pair[1]);
        let mut tables: Vec<(Vec<usize>, Vec<f64>)> = Vec::new();
        match self.factors(axes, MAX_WINDOW_ELEMENTS) {
            Some(factors) => tables.push((outputs, factors)),
            None => {
                for (k, &size) in outputs.iter().enumerate() {
                    if size > MAX_WINDOWS_PER_AXIS {
                        return Err(OpError::unsupported(format!(
                            "its gradient needs the number of elements in each window, and {outputs:?} windows are \
                             too many; use smaller pads or larger strides"
                        )));
                    }
                    let mut dims = vec![1; outputs.len()];
                    dims[k] = size;
                    tables.push((dims, self.counts_along(k, axes).into_iter().map(inverse_count).collect()));
                }
            }
        }
        let mut divided = g;
        for (dims, factors) in tables {
            let share = if all_alike(&factors) {
                Tensor::scalar(dtype, factors.first().copied().unwrap_or(0.0))
            } else {
                Tensor::from_f64(dtype, dims, &factors)
            };
            let share = to.emit_constant(share);
            divided = add(to, "Mul", &[divided, share], Attrs::new());
        }
        Ok(divided)
    }

    /// Adds the gradient of the averaged input for spatial sizes that are only known at run time, from `shape`.
    pub(super) fn add_gradient_at_run_time(
        &self,
        to: &mut impl NodeSink,
        (g, dtype): (ValueId, DType),
        shape: ValueId,
    ) -> Result<ValueId, OpError> {
        let Some(sliding) = &self.windows.sliding else {
            return Err(OpError::unsupported("the window of a global pooling has no known size"));
        };
        let kernel = self.windows.kernel();
        let cells: Vec<i64> = kernel.iter().map(|&size| size as i64).collect();
        let filter = add_ones_filter(to, dtype, &kernel)?;
        let inputs = add_spatial_sizes(to, shape, kernel.len());
        let outputs = add(to, "Shape", &[g], Attrs::new());
        let outputs = add_spatial_sizes(to, outputs, kernel.len());

        let factor = self.add_factor_at_run_time(to, dtype, inputs, outputs)?;
        let shared = add(to, "Mul", &[g, factor], Attrs::new());
        // A size of 0 copies the size of the axis with the same index.
        let planes: Vec<i64> = [-1, 1].into_iter().chain(kernel.iter().map(|_| 0)).collect();
        let planes = ints(to, &planes);
        let by_plane = add(to, "Reshape", &[shared, planes], Attrs::new());
        // The transposed convolution covers all positions that windows can reach: the padding before the input, and up
        // to a stride minus one after the input. The input is a slice of these positions.
        let steps = sliding.per_axis(kernel.len(), Sliding::stride);
        let attrs = Attrs::new()
            .with("kernel_shape", cells)
            .with("output_padding", steps.iter().map(|step| step - 1).collect::<Vec<i64>>())
            .with("strides", steps)
            .with("dilations", sliding.per_axis(kernel.len(), Sliding::dilation));
        let reached = add(to, "ConvTranspose", &[by_plane, filter], attrs);
        let before = add_padding_before(to, sliding, &kernel, inputs, outputs);
        let end = add(to, "Add", &[before, inputs], Attrs::new());
        let axes: Vec<i64> = (2..kernel.len() as i64 + 2).collect();
        let axes = ints(to, &axes);
        let gradient = add(to, "Slice", &[reached, before, end, axes], Attrs::new());
        Ok(add(to, "Reshape", &[gradient, shape], Attrs::new()))
    }

    /// Adds one over the number of elements that each window counts: a number, or a tensor of `outputs` elements.
    fn add_factor_at_run_time(
        &self,
        to: &mut impl NodeSink,
        dtype: DType,
        inputs: ValueId,
        outputs: ValueId,
    ) -> Result<ValueId, OpError> {
        let kernel = self.windows.kernel();
        let count = kernel.len();
        let cells: f64 = kernel.iter().map(|&size| size as f64).product();
        let sliding = self.windows.sliding.as_ref();
        let Some(sliding) = sliding else { return Ok(to.emit_constant(Tensor::scalar(dtype, 1.0 / cells))) };
        let same = !matches!(sliding.auto_pad, AutoPad::NotSet | AutoPad::Valid);
        let ceil = sliding.ceil && !same;
        let pads: Vec<(i64, i64)> = (0..count).map(|k| sliding.padding(k, count)).collect();
        let padded = same || pads.iter().any(|&ends| ends != (0, 0));
        if !ceil && (self.include_padding || !padded) {
            return Ok(to.emit_constant(Tensor::scalar(dtype, 1.0 / cells)));
        }
        // Counts are sums of ones, or averages of ones and zeros. They may overflow float16, so their type is at least
        // float32.
        let wide = sum_dtype(dtype);
        let steps = sliding.per_axis(count, Sliding::stride);
        let dilations = sliding.per_axis(count, Sliding::dilation);
        let attrs = Attrs::new()
            .with("kernel_shape", kernel.iter().map(|&size| size as i64).collect::<Vec<i64>>())
            .with("strides", steps.clone())
            .with("dilations", dilations);
        let counted = if self.include_padding && !same {
            let ends: Vec<i64> = pads.iter().map(|&(before, after)| before.saturating_add(after)).collect();
            let ends = ints(to, &ends);
            add(to, "Add", &[inputs, ends], Attrs::new())
        } else {
            inputs
        };
        let lead = ints(to, &[1, 1]);
        let shape = add(to, "Concat", &[lead, counted], Attrs::new().with("axis", 0i64));
        let value = Attrs::new().with("value", Tensor::filled(wide, &[1], 1.0));
        let plane = add(to, "ConstantOfShape", &[shape], value);
        let one = to.emit_constant(Tensor::scalar(wide, 1.0));
        let mut counts = if same {
            let name = if sliding.auto_pad == AutoPad::SameUpper { "SAME_UPPER" } else { "SAME_LOWER" };
            let attrs = attrs.with("auto_pad", name).with("count_include_pad", 1i64);
            let share = add(to, "AveragePool", &[plane], attrs);
            let cells = to.emit_constant(Tensor::scalar(wide, cells));
            add(to, "Mul", &[share, cells], Attrs::new())
        } else {
            // The last window may extend beyond the end by less than a stride.
            let hanging = |k: usize| if ceil { steps[k] - 1 } else { 0 };
            let counted_padding = |ends: i64| if self.include_padding { 0 } else { ends };
            let front = (0..count).map(|k| counted_padding(pads[k].0));
            let back = (0..count).map(|k| counted_padding(pads[k].1).saturating_add(hanging(k)));
            let attrs = attrs.with("pads", front.chain(back).collect::<Vec<i64>>());
            let filter = add_ones_filter(to, wide, &kernel)?;
            add(to, "Conv", &[plane, filter], attrs)
        };
        if ceil {
            // Crops the counts to the windows: not every stride that begins inside the input has a window.
            let starts = ints(to, &vec![0; count]);
            let axes: Vec<i64> = (2..count as i64 + 2).collect();
            let axes = ints(to, &axes);
            counts = add(to, "Slice", &[counts, starts, outputs, axes], Attrs::new());
        }
        if padded {
            // Windows without elements have a gradient of zero, but their factor must be finite.
            let is_positive = cast(to, counts, DType::Bool);
            let none = add(to, "Not", &[is_positive], Attrs::new());
            let none = cast(to, none, wide);
            counts = add(to, "Add", &[counts, none], Attrs::new());
        }
        let factor = add(to, "Div", &[one, counts], Attrs::new());
        Ok(if dtype == wide { factor } else { cast(to, factor, dtype) })
    }
}

/// Returns the spatial sizes in a shape with `count` spatial axes.
fn add_spatial_sizes(to: &mut impl NodeSink, shape: ValueId, count: usize) -> ValueId {
    let (start, end) = (ints(to, &[2]), ints(to, &[count as i64 + 2]));
    let first = ints(to, &[0]);
    add(to, "Slice", &[shape, start, end, first], Attrs::new())
}

/// Adds the padding before each spatial axis.
fn add_padding_before(
    to: &mut impl NodeSink,
    sliding: &Sliding,
    kernel: &[usize],
    inputs: ValueId,
    outputs: ValueId,
) -> ValueId {
    let count = kernel.len();
    if matches!(sliding.auto_pad, AutoPad::NotSet | AutoPad::Valid) {
        return ints(to, &(0..count).map(|k| sliding.padding(k, count).0).collect::<Vec<i64>>());
    }
    // max(0, (outputs - 1) * stride + reach - inputs)
    let steps = sliding.per_axis(count, Sliding::stride);
    let reach = |k: usize| (kernel[k] as i64 - 1).saturating_mul(sliding.dilation(k)).saturating_add(1);
    let over: Vec<i64> = (0..count).map(|k| reach(k).saturating_sub(steps[k])).collect();
    let (steps, over, two) = (ints(to, &steps), ints(to, &over), ints(to, &[2]));
    let reached = formula(to, [outputs, steps, over], |[outputs, steps, over]| outputs * steps + over);
    let padding = add(to, "Sub", &[reached, inputs], Attrs::new());
    let size = add(to, "Abs", &[padding], Attrs::new());
    let twice = add(to, "Add", &[padding, size], Attrs::new());
    let mut padding = add(to, "Div", &[twice, two], Attrs::new());
    if sliding.auto_pad == AutoPad::SameLower {
        let one = ints(to, &[1]);
        padding = add(to, "Add", &[padding, one], Attrs::new());
    }
    add(to, "Div", &[padding, two], Attrs::new())
}

/// Adds the gradient of a maximum over each plane of `x`: the largest element gets the gradient of the maximum, the
/// others get zeros.
///
/// Of equal elements the first is the largest. NaN is larger than all numbers.
pub(super) fn add_first_largest_gradient(
    to: &mut impl NodeSink,
    (g, dtype): (ValueId, DType),
    (x, y): (ValueId, ValueId),
) -> ValueId {
    let none = Attrs::new;
    let flat = ints(to, &[0, 0, -1]);
    let [x_flat, y_flat, g_flat] = [x, y, g].map(|value| add(to, "Reshape", &[value, flat], none()));
    // If the maximum is NaN, the candidates are the NaN elements, because NaN equals nothing.
    let largest = add(to, "Equal", &[x_flat, y_flat], none());
    let smaller = add(to, "Not", &[largest], none());
    let is_not_nan = add(to, "Equal", &[x_flat, x_flat], none());
    let smaller = add(to, "And", &[smaller, is_not_nan], none());
    // Positions in a plane, and the position after the last one.
    let sizes = add(to, "Shape", &[x_flat], none());
    let (two, three, first) = (ints(to, &[2]), ints(to, &[3]), ints(to, &[0]));
    let trailing_sizes = add(to, "Slice", &[sizes, two, three, first], none());
    let every = Attrs::new().with("value", Tensor::i64(&[1], &[1]));
    let every = add(to, "ConstantOfShape", &[trailing_sizes], every);
    let positions = add(to, "NonZero", &[every], none());
    let line = ints(to, &[-1]);
    let positions = add(to, "Reshape", &[positions, line], none());
    let candidates = add(to, "Where", &[smaller, trailing_sizes, positions], none());
    let chosen = add(to, "ReduceMin", &[candidates, two], Attrs::new().with("keepdims", 1i64));
    let hit = add(to, "Equal", &[candidates, chosen], none());
    let zero = to.emit_constant(Tensor::scalar(dtype, 0.0));
    let gradient = add(to, "Where", &[hit, g_flat, zero], none());
    let shape = add(to, "Shape", &[x], none());
    add(to, "Reshape", &[gradient, shape], none())
}

/// Decomposes `MaxPoolGrad` into a scatter. The indices are flat over the whole pooled tensor.
pub(super) fn decompose_max_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (g, index) = (rw.required_input(0)?, rw.required_input(1)?);
    let dtype = rw.dtype(g).ok_or_else(|| OpError::unsupported("the type of the gradient must be known"))?;
    let dims = result_shape(rw).and_then(Shape::concrete);
    let pooled = rw.producer_of(index).filter(|node| node.inputs.len() == 1).and_then(|node| node.inputs[0]);
    let shape = match (&dims, pooled) {
        (Some(dims), _) => rw.ints("shape", &dims.iter().map(|&size| size as i64).collect::<Vec<i64>>()),
        (None, Some(pooled)) => rw.add("Shape", &[pooled], Attrs::new()),
        (None, None) => {
            return Err(OpError::unsupported(
                "the shape of the pooled input is unknown: no node of the graph computes the indices. Declare the \
                 sizes of the gradient as numbers",
            ));
        }
    };
    let zeros = Attrs::new().with("value", Tensor::filled(dtype, &[1], 0.0));
    let zeros = rw.add("ConstantOfShape", &[shape], zeros);
    if dims.is_some_and(|dims| dims.contains(&0)) {
        // Without elements there are no indices.
        rw.replace_output(0, zeros);
        return Ok(());
    }
    let line = rw.ints("line", &[-1]);
    if rw.version() < SCATTER_ADD_OPSET {
        let zeros = rw.add("Reshape", &[zeros, line], Attrs::new());
        let scattered = scatter_by_groups(rw, zeros, index, g)?;
        let result = rw.add("Reshape", &[scattered, shape], Attrs::new());
        rw.replace_output(0, result);
        return Ok(());
    }
    let [zeros, index, g] = [zeros, index, g].map(|value| rw.add("Reshape", &[value, line], Attrs::new()));
    let attrs = Attrs::new().with("axis", 0i64).with("reduction", "add");
    let scattered = rw.add("ScatterElements", &[zeros, index, g], attrs);
    let result = rw.add("Reshape", &[scattered, shape], Attrs::new());
    rw.replace_output(0, result);
    Ok(())
}

/// First opset with the scatter reduction `add`.
const SCATTER_ADD_OPSET: i64 = 16;

/// Maximum number of groups of windows.
const MAX_GROUPS: i64 = 256;

/// Scatters `g` to `index` for opsets without a scatter reduction.
///
/// Windows that do not overlap have distinct indices. So the windows are split into groups without overlap, and the
/// results of the groups are added.
fn scatter_by_groups(
    rw: &mut Rewrite<'_>,
    zeros: ValueId,
    index: ValueId,
    g: ValueId,
) -> Result<ValueId, OpError> {
    let windows = Windows::read(rw.node())?;
    let kernel = windows.kernel();
    let sliding = windows.sliding.as_ref();
    // Maximum number of windows along each axis that cover one position.
    let over = |k: usize| -> i64 {
        let (step, dilation) = sliding.map_or((1, 1), |sliding| (sliding.stride(k), sliding.dilation(k)));
        let reach = (kernel[k] as i64 - 1).saturating_mul(dilation).saturating_add(1);
        let along = rw.shape(index).and_then(|shape| shape.get(k + 2)).and_then(ortrain_graph::Dim::known);
        let overlapping = reach.div_euclid(step) + i64::from(reach.rem_euclid(step) != 0);
        along.map_or(overlapping, |along| overlapping.min(along as i64)).max(1)
    };
    let over: Vec<i64> = (0..kernel.len()).map(over).collect();
    let groups = over.iter().try_fold(1i64, |n, &size| n.checked_mul(size));
    let Some(groups) = groups.filter(|&groups| groups <= MAX_GROUPS) else {
        return Err(OpError::unsupported(format!(
            "before opset {SCATTER_ADD_OPSET} its gradient needs nodes for each group of windows that do not \
             overlap, and {over:?} groups are too many"
        )));
    };
    let line = rw.ints("line", &[-1]);
    let axes: Vec<i64> = (2..kernel.len() as i64 + 2).collect();
    let mut parts = Vec::new();
    for group in 0..groups {
        let mut rest = group;
        let starts: Vec<i64> = over
            .iter()
            .map(|&size| {
                let start = rest % size;
                rest /= size;
                start
            })
            .collect();
        let [index, g] = if groups == 1 {
            [index, g]
        } else if let Some(rows) = group_windows(rw, index, &starts, &over) {
            let mut flattened = [index, g];
            for (k, rows) in rows.iter().enumerate() {
                let rows = rw.ints("rows", rows);
                let along = Attrs::new().with("axis", k as i64 + 2);
                flattened = flattened.map(|value| rw.add("Gather", &[value, rows], along.clone()));
            }
            flattened
        } else {
            let ends = rw.ints("ends", &vec![i64::from(i32::MAX); axes.len()]);
            let (starts, axes, steps) =
                (rw.ints("starts", &starts), rw.ints("axes", &axes), rw.ints("steps", &over));
            [index, g].map(|value| rw.add("Slice", &[value, starts, ends, axes, steps], Attrs::new()))
        };
        let [index, g] = [index, g].map(|value| rw.add("Reshape", &[value, line], Attrs::new()));
        parts.push(rw.add("ScatterElements", &[zeros, index, g], Attrs::new().with("axis", 0i64)));
    }
    Ok(match parts[..] {
        [one] => one,
        _ => rw.add("Sum", &parts, Attrs::new()),
    })
}

/// First opset with steps in Slice.
const SLICE_STEPS_OPSET: i64 = 10;

/// Returns the windows of a group along each axis, for opsets without steps in Slice, if the sizes are known.
fn group_windows(rw: &Rewrite<'_>, index: ValueId, starts: &[i64], steps: &[i64]) -> Option<Vec<Vec<i64>>> {
    let sizes: Option<Vec<usize>> = rw.shape(index)?.iter().skip(2).map(ortrain_graph::Dim::known).collect();
    let rows = |((&start, &step), size): ((&i64, &i64), usize)| -> Vec<i64> {
        (0..size as i64).skip(start as usize).step_by(step as usize).collect()
    };
    let sizes = sizes.filter(|_| rw.version() < SLICE_STEPS_OPSET)?;
    Some(starts.iter().zip(steps).zip(sizes).map(rows).collect())
}

/// Decomposes `AveragePoolGrad` into a transposed convolution with ones. The spatial sizes must be declared.
pub(super) fn decompose_average_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let average = read_average(rw.node())?;
    let g = rw.required_input(0)?;
    let dtype = rw.dtype(g).ok_or_else(|| OpError::unsupported("the type of the gradient must be known"))?;
    let Some(declared) = result_shape(rw).cloned() else {
        return Err(OpError::unsupported("the shape of the averaged input must be declared"));
    };
    let spatial: Option<Vec<usize>> = declared.iter().skip(2).map(ortrain_graph::Dim::known).collect();
    let Some(spatial) = spatial else {
        return Err(OpError::unsupported(format!(
            "the averaged input is declared as {declared}; the sizes of its spatial axes must be numbers"
        )));
    };
    let rest: Vec<i64> = spatial.iter().map(|&size| size as i64).collect();
    let shape = if let Some(dims) = declared.concrete() {
        rw.ints("shape", &dims.iter().map(|&size| size as i64).collect::<Vec<i64>>())
    } else {
        let sizes = rw.add("Shape", &[g], Attrs::new());
        let (from, to) = (rw.ints("from", &[0]), rw.ints("to", &[2]));
        let lead = rw.add("Slice", &[sizes, from, to], Attrs::new());
        let rest = rw.ints("spatial", &rest);
        rw.add("Concat", &[lead, rest], Attrs::new().with("axis", 0i64))
    };
    let (_, patch) = rw.patch();
    let gradient = average.add_gradient(patch, (g, dtype), &spatial, shape)?;
    rw.replace_output(0, gradient);
    Ok(())
}

/// Returns the known shape of the node's result.
fn result_shape<'a>(rw: &'a Rewrite<'_>) -> Option<&'a Shape> {
    rw.shape(rw.node().outputs.first().copied().flatten()?)
}
