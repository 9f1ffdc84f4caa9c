//! Pooling kernels: one invocation per written element, which gathers its inputs.

use ortrain_expr::{CompareOp, IndexKind, Scalar, SlidingAxis, Type, WindowPass, WindowShape};
use ortrain_program::{Window, WindowIndex};

use crate::context::Context;
use crate::conv::window_inputs;
use crate::expr::compare;
use crate::kernel::Kernel;
use crate::launch::Launch;
use crate::repr::{Repr, Value, repr_of};
use crate::thread_index::define_coordinates;
use crate::thread_reduction::combine;

pub(crate) fn launches(cx: &Context<'_>, w: &Window) -> Result<Vec<Launch>, String> {
    let WindowShape { pass, planes, ref axes } = w.shape;
    cx.float_repr(w.target.access.dtype)?;
    let by_output = matches!(pass, WindowPass::Max | WindowPass::Sum);
    let size = |axis: &SlidingAxis| if by_output { axis.output } else { axis.input };
    let dims: Vec<usize> = [planes].into_iter().chain(axes.iter().map(size)).collect();
    let mut kernel = cx.kernel();
    let at = define_coordinates(&mut kernel, "id", &dims);
    match pass {
        WindowPass::Max => print_max(&mut kernel, w, &at)?,
        WindowPass::Sum => print_sum(&mut kernel, w, &at)?,
        WindowPass::SumGradient => print_sum_gradient(&mut kernel, w, &at)?,
        WindowPass::MaxGradient => print_max_gradient(&mut kernel, w, &at)?,
    }
    Ok(vec![cx.finish(kernel, dims.iter().map(|&dim| dim as u64).product())?])
}

/// Returns the row-major index of an element over planes and axes.
fn element_index(plane: &str, at: &[String], sizes: impl Iterator<Item = usize>) -> String {
    at.iter().zip(sizes).fold(plane.to_owned(), |index, (at, size)| format!("({index} * {size} + {at})"))
}

/// Defines a variable of the type of computation.
fn define_total(kernel: &mut Kernel<'_>, w: &Window, value: Scalar) -> Result<Value, String> {
    let ty = Type::of(w.target.access.dtype);
    let value = kernel.constant(value.convert(ty), repr_of(ty));
    Ok(kernel.variable(&value))
}

/// Starts the loops over the elements of a window that are inside the input. Returns their indices in the window and
/// their input positions.
fn begin_window_loops(
    kernel: &mut Kernel<'_>,
    axes: &[SlidingAxis],
    outputs: &[String],
) -> (Vec<String>, Vec<String>) {
    let cells: Vec<String> =
        axes.iter().map(|axis| kernel.begin_loop("0", &axis.kernel.to_string())).collect();
    let inputs = window_inputs(kernel, axes, outputs, &cells);
    (cells, inputs)
}

fn print_max(kernel: &mut Kernel<'_>, w: &Window, at: &[String]) -> Result<(), String> {
    let (axes, dtype) = (&w.shape.axes, w.target.access.dtype);
    let ty = Type::of(dtype);
    let maximum = define_total(kernel, w, Scalar::lowest_value_of(dtype, ty))?;
    let is_cell = w.index.as_ref().is_some_and(|index| index.kind == IndexKind::Cell);
    let first = if is_cell { "0".to_owned() } else { format!("{} * {}", at[0], w.shape.plane_inputs()) };
    let index = kernel.variable(&Value::new(first, Repr::I32));
    let is_found = kernel.variable(&Value::new("false", Repr::Bool));
    let depth = kernel.depth();
    let (cells, inputs) = begin_window_loops(kernel, axes, &at[1..]);
    let input = element_index(&at[0], &inputs, axes.iter().map(|axis| axis.input));
    let input = kernel.define(Value::new(input, Repr::I32)).text;
    let new = kernel.load(w.source.buffer, &input);
    let new = kernel.define(new);
    let less = compare(kernel, CompareOp::Lt, ty, [maximum.clone(), new.clone()]).text;
    let larger = match ty {
        Type::F32 => format!("(!is_nan({}) && (is_nan({}) || {less}))", maximum.text, new.text),
        Type::F64 => format!("(!is_nan_f64({}) && (is_nan_f64({}) || {less}))", maximum.text, new.text),
        _ => less,
    };
    kernel.begin_if(&format!("!{} || {larger}", is_found.text));
    kernel.assign(&maximum, &new);
    let cell = if is_cell { element_index("0", &cells, axes.iter().map(|axis| axis.kernel)) } else { input };
    kernel.assign(&index, &Value::new(cell, Repr::I32));
    kernel.assign(&is_found, &Value::new("true", Repr::Bool));
    kernel.close_to(depth);
    let to = element_index(&at[0], &at[1..], axes.iter().map(|axis| axis.output));
    kernel.store(w.target.buffer, &to, &maximum);
    if let Some(WindowIndex { operand, .. }) = &w.index {
        kernel.store(operand.buffer, &to, &index);
    }
    Ok(())
}

fn print_sum(kernel: &mut Kernel<'_>, w: &Window, at: &[String]) -> Result<(), String> {
    let axes = &w.shape.axes;
    let total = define_total(kernel, w, Scalar::I32(0))?;
    let depth = kernel.depth();
    let (_, inputs) = begin_window_loops(kernel, axes, &at[1..]);
    add_element(kernel, w, &total, &element_index(&at[0], &inputs, axes.iter().map(|axis| axis.input)));
    kernel.close_to(depth);
    let to = element_index(&at[0], &at[1..], axes.iter().map(|axis| axis.output));
    kernel.store(w.target.buffer, &to, &total);
    Ok(())
}

/// Adds an element of the source to the total.
fn add_element(kernel: &mut Kernel<'_>, w: &Window, total: &Value, from: &str) {
    let value = kernel.load(w.source.buffer, from);
    let sum = combine(kernel, ortrain_expr::ReduceOp::Sum, total, &value);
    kernel.assign(total, &sum);
}

/// Starts the loops over the windows that cover an input position, in the order of the output. Returns their positions,
/// and the index of the covering window element along each axis.
fn begin_covering_loops(
    kernel: &mut Kernel<'_>,
    axes: &[SlidingAxis],
    at: &[String],
) -> (Vec<String>, Vec<String>) {
    let (mut outputs, mut cells, mut covered) = (Vec::new(), Vec::new(), Vec::new());
    for (axis, i) in axes.iter().zip(at) {
        let SlidingAxis { output, kernel: size, stride, dilation, padding_before: before, .. } = axis;
        let shifted = kernel.define(Value::new(format!("{i} + ({before})"), Repr::I32)).text;
        let reach = size.saturating_sub(1) * dilation;
        let from = format!("max(0, ({shifted} - {reach} + {}) / {stride})", stride - 1);
        let from = kernel.define(Value::new(from, Repr::I32)).text;
        let to = kernel.select(
            &format!("{shifted} < 0"),
            "0",
            &format!("min({output}, {shifted} / {stride} + 1)"),
        );
        let to = kernel.define(Value::new(to, Repr::I32)).text;
        let o = kernel.begin_loop(&from, &to);
        let rest = kernel.define(Value::new(format!("{shifted} - {o} * {stride}"), Repr::I32)).text;
        covered.push(format!("{rest} >= 0 && {rest} % {dilation} == 0 && {rest} / {dilation} < {size}"));
        cells.push(format!("{rest} / {dilation}"));
        outputs.push(o);
    }
    if !covered.is_empty() {
        kernel.begin_if(&covered.join(" && "));
    }
    (outputs, cells)
}

/// Prints the gradient of a sum: adds all windows that cover an input position, in the order of the output.
fn print_sum_gradient(kernel: &mut Kernel<'_>, w: &Window, at: &[String]) -> Result<(), String> {
    let axes = &w.shape.axes;
    let total = define_total(kernel, w, Scalar::I32(0))?;
    let depth = kernel.depth();
    let (outputs, _) = begin_covering_loops(kernel, axes, &at[1..]);
    add_element(kernel, w, &total, &element_index(&at[0], &outputs, axes.iter().map(|axis| axis.output)));
    kernel.close_to(depth);
    let to = element_index(&at[0], &at[1..], axes.iter().map(|axis| axis.input));
    kernel.store(w.target.buffer, &to, &total);
    Ok(())
}

/// Prints the gradient of a maximum: adds the windows with their maximum at an input position, in the order of the
/// output. With cell indices, only covering windows are visited; with element indices, all windows of the plane.
fn print_max_gradient(kernel: &mut Kernel<'_>, w: &Window, at: &[String]) -> Result<(), String> {
    let axes = &w.shape.axes;
    let Some(WindowIndex { kind, operand }) = &w.index else {
        return Err("the gradient of a maximum needs the positions".into());
    };
    let total = define_total(kernel, w, Scalar::I32(0))?;
    let to = element_index(&at[0], &at[1..], axes.iter().map(|axis| axis.input));
    let to = kernel.define(Value::new(to, Repr::I32)).text;
    let depth = kernel.depth();
    let (outputs, cells) = match kind {
        IndexKind::Element => {
            (axes.iter().map(|axis| kernel.begin_loop("0", &axis.output.to_string())).collect(), Vec::new())
        }
        IndexKind::Cell => begin_covering_loops(kernel, axes, &at[1..]),
    };
    let from = element_index(&at[0], &outputs, axes.iter().map(|axis| axis.output));
    let from = kernel.define(Value::new(from, Repr::I32)).text;
    let index = kernel.load(operand.buffer, &from);
    let index = kernel.define(index);
    let position = match kind {
        IndexKind::Element => {
            format!("eq_pair({}, pair_of_i32({to}))", kernel.as_repr(&index, Repr::I64).text)
        }
        IndexKind::Cell => {
            let cell = element_index("0", &cells, axes.iter().map(|axis| axis.kernel));
            format!("{} == {cell}", kernel.as_repr(&index, Repr::I32).text)
        }
    };
    kernel.begin_if(&position);
    add_element(kernel, w, &total, &from);
    kernel.close_to(depth);
    kernel.store(w.target.buffer, &to, &total);
    Ok(())
}
