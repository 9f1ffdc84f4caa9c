//! Interpolation of a tensor at the points of a grid: `GridSample`.
//!
//! GridSample-16, 20, 22 of ONNX (<https://onnx.ai/onnx/operators/onnx__GridSample.html>). Opset 20 renamed the modes
//! and allows any number of axes; opset 22 added bfloat16. The grid has coordinates between -1 and 1; the coordinate of
//! the last axis is first. The arithmetic follows the reference implementation of the standard:
//!
//! - A coordinate beyond the border is clipped or reflected, if `padding_mode` is `border` or `reflection`.
//! - The result is the weighted sum of the elements around the coordinate. Elements out of range are zeros, the nearest
//!   elements, or reflected elements.
//! - For `cubic` with `border` the coordinate is not clipped. Each of the four elements of an axis is clipped
//!   separately, as in PyTorch and ONNX Runtime. So far outside the value is the border's, and near the border the
//!   kernel has all of its weights.
//! - Integers are interpolated in float64 and truncated. `nearest` rounds half to even.
//!
//! The operator is a composition: positions and weights of the elements around each point, products over the axes, one
//! GatherND and a sum. So both inputs have gradients. The gradient of the grid is
//!
//! - zero for `nearest`,
//! - zero with `border` where the coordinate is clipped, the edge included,
//! - negated with `reflection` where the coordinate is reflected,
//! - not zero with `zeros` across the outer half of the outer elements, where the value fades to zero.
//!
//! For a NaN coordinate `linear` and `cubic` return NaN.
//!
//! Limits: the rank of the input must be known.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};

use crate::OpError;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::casts::arithmetic_dtype;
use crate::support::formula::formula;
use crate::support::sizes::{
    Size, add_op, as_number, cast, dtype_of, insert_axes, multiply_sizes, permute_axes, reshape_to,
    scalar_constant, shape_of, size_of, subtract_sizes,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Nearest,
    Linear,
    Cubic,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Padding {
    Zeros,
    Border,
    Reflection,
}

#[derive(Clone, Copy, Debug)]
struct GridSample {
    mode: Mode,
    padding: Padding,
    /// True if -1 and 1 are the centers of the outer elements; false if they are the outer edges (`align_corners`).
    align_corners: bool,
}

impl GridSample {
    fn read(attrs: &Attrs) -> Result<GridSample, OpError> {
        let mode = match attrs.string("mode")?.unwrap_or("linear") {
            "nearest" => Mode::Nearest,
            "linear" => Mode::Linear,
            "cubic" => Mode::Cubic,
            other => {
                return Err(OpError::invalid(format!(
                    "mode must be \"nearest\", \"linear\" or \"cubic\", got {other:?}"
                )));
            }
        };
        let padding = match attrs.string("padding_mode")?.unwrap_or("zeros") {
            "zeros" => Padding::Zeros,
            "border" => Padding::Border,
            "reflection" => Padding::Reflection,
            other => {
                return Err(OpError::invalid(format!(
                    "padding_mode must be \"zeros\", \"border\" or \"reflection\", got {other:?}"
                )));
            }
        };
        Ok(GridSample { mode, padding, align_corners: attrs.int("align_corners")?.unwrap_or(0) != 0 })
    }
}

impl Op for GridSample {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        let dtype = cx.dtype(0)?;
        cx.expect_dtype(1, "a float type", DType::is_float)?;
        let (Some(x), Some(grid)) = (cx.shape(0), cx.shape(1)) else {
            cx.set_output(0, dtype, None);
            return Ok(());
        };
        let axes = x.rank().saturating_sub(2);
        let last = grid.iter().last().and_then(Dim::known);
        if axes == 0 || grid.rank() != x.rank() || last.is_some_and(|last| last != axes) {
            return Err(OpError::invalid(format!(
                "input 0 has shape {x} and input 1 {grid}; [N, C, D1, ..., Dr] and [N, E1, ..., Er, r] are needed"
            )));
        }
        if let (Some(a), Some(b)) = (x[0].known(), grid[0].known())
            && a != b
        {
            return Err(OpError::invalid(format!(
                "input 0 has batch size {a}, but input 1 has batch size {b}"
            )));
        }
        if x[2..].iter().any(|dim| dim.known() == Some(0)) {
            return Err(OpError::invalid(format!("input 0 of shape {x} has no elements to sample")));
        }
        let shape: Shape = x[..2].iter().chain(&grid[1..grid.rank() - 1]).cloned().collect();
        cx.set_output(0, dtype, Some(shape));
        Ok(())
    }
}

/// Elements that contribute to each point along one axis. Each value has the shape `[batch, points, taps]`.
struct Taps {
    /// Indices of the elements; all are in range.
    index: ValueId,
    /// True where the element exists. `None` if the padding makes all elements exist.
    inside: Option<ValueId>,
    weights: Option<ValueId>,
}

/// Coordinate system of one axis of the input.
struct Axis {
    ty: DType,
    zero: ValueId,
    /// Index of the last element.
    last: ValueId,
    /// Position of the lower border.
    lower_border: ValueId,
    /// Distance between the borders.
    span: ValueId,
}

impl Axis {
    fn new(rw: &mut Rewrite<'_>, size: Size, ty: DType, aligned: bool) -> Axis {
        let before = subtract_sizes(rw, size, Size::Number(1));
        let last = as_number(rw, before, ty);
        let span = if aligned { last } else { as_number(rw, size, ty) };
        let start = scalar_constant(rw, ty, if aligned { 0.0 } else { -0.5 });
        Axis { ty, zero: scalar_constant(rw, ty, 0.0), last, lower_border: start, span }
    }

    /// Converts coordinates between -1 and 1 to positions in units of elements.
    fn to_position(&self, rw: &mut Rewrite<'_>, coordinate: ValueId, aligned: bool) -> ValueId {
        let (one, half) = (scalar_constant(rw, self.ty, 1.0), scalar_constant(rw, self.ty, 0.5));
        let from_front = add_op(rw, "Add", &[coordinate, one]);
        if aligned {
            let halved = add_op(rw, "Mul", &[from_front, half]);
            return add_op(rw, "Mul", &[halved, self.span]);
        }
        let scaled = add_op(rw, "Mul", &[from_front, self.span]);
        formula(rw, [scaled, one, half], |[scaled, one, half]| (scaled - one) * half)
    }

    /// Returns the lower and the upper border.
    fn borders(&self, rw: &mut Rewrite<'_>) -> [ValueId; 2] {
        [self.lower_border, add_op(rw, "Add", &[self.lower_border, self.span])]
    }

    /// Reflects positions at both borders until they are between them.
    fn reflect(&self, rw: &mut Rewrite<'_>, x: ValueId) -> ValueId {
        let rest_of = |rw: &mut Rewrite<'_>, a: ValueId, b: ValueId| {
            rw.add("Mod", &[a, b], Attrs::new().with("fmod", 1i64))
        };
        let [min, max] = self.borders(rw);
        let (one, two) = (scalar_constant(rw, self.ty, 1.0), scalar_constant(rw, self.ty, 2.0));
        let from_front = add_op(rw, "Sub", &[x, min]);
        let away = add_op(rw, "Abs", &[from_front]);
        let rest = rest_of(rw, away, self.span);
        let spans = add_op(rw, "Div", &[away, self.span]);
        let flips = add_op(rw, "Floor", &[spans]);
        let parity = rest_of(rw, flips, two);
        let back = formula(rw, [parity, one, self.span, rest, min], |[parity, one, span, rest, min]| {
            parity.equals(one).choose(span - rest, rest) + min
        });
        let (before, after) = (add_op(rw, "Less", &[x, min]), add_op(rw, "Less", &[max, x]));
        let outside = add_op(rw, "Or", &[before, after]);
        add_op(rw, "Where", &[outside, back, x])
    }

    /// Clips or reflects positions beyond the border, by the padding mode.
    fn pad(&self, rw: &mut Rewrite<'_>, op: &GridSample, x: ValueId) -> ValueId {
        match op.padding {
            Padding::Zeros => x,
            // Each contributing element is clipped separately.
            Padding::Border if op.mode == Mode::Cubic => x,
            Padding::Reflection => self.reflect(rw, x),
            // The outer halves of the outer elements have constant values. So clipping to the centers changes the
            // gradient only.
            Padding::Border => {
                let before = add_op(rw, "LessOrEqual", &[x, self.zero]);
                let past_end = add_op(rw, "LessOrEqual", &[self.last, x]);
                let below = add_op(rw, "Where", &[past_end, self.last, x]);
                add_op(rw, "Where", &[before, self.zero, below])
            }
        }
    }

    /// Computes the contributing elements of positions `[batch, points, 1]`.
    fn compute_taps(&self, rw: &mut Rewrite<'_>, op: &GridSample, x: ValueId) -> Taps {
        // Weights are polynomials in the distance from the element before the position. Each row has the coefficients
        // of one power, one for each tap.
        let (first, powers): (f64, &[&[f64]]) = match op.mode {
            Mode::Nearest => (0.0, &[&[1.0]]),
            Mode::Linear => (0.0, &[&[1.0, 0.0], &[-1.0, 1.0]]),
            // Cubic convolution (Keys, 1981) with a slope of -0.75.
            Mode::Cubic => (
                -1.0,
                &[
                    &[0.0, 1.0, 0.0, 0.0],
                    &[-0.75, 0.0, 0.75, 0.0],
                    &[1.5, -2.25, 1.5, -0.75],
                    &[-0.75, 1.25, -1.25, 0.75],
                ],
            ),
        };
        let row = |rw: &mut Rewrite<'_>, numbers: &[f64]| {
            rw.constant("row", Tensor::from_f64(self.ty, vec![numbers.len()], numbers))
        };
        let base = if op.mode == Mode::Nearest { x } else { add_op(rw, "Floor", &[x]) };
        let offsets: Vec<f64> = (0..powers[0].len()).map(|k| first + k as f64).collect();
        let offsets = row(rw, &offsets);
        let mut at = add_op(rw, "Add", &[base, offsets]);
        let weights = (powers.len() > 1).then(|| {
            let fraction = add_op(rw, "Sub", &[x, base]);
            let mut sum = row(rw, powers[powers.len() - 1]);
            for power in powers[..powers.len() - 1].iter().rev() {
                let product = add_op(rw, "Mul", &[sum, fraction]);
                let coefficients = row(rw, power);
                sum = add_op(rw, "Add", &[product, coefficients]);
            }
            sum
        });
        if op.padding == Padding::Reflection {
            at = self.reflect(rw, at);
        }
        // For every position, NaN included, the index is in range.
        let from_front = add_op(rw, "LessOrEqual", &[self.zero, at]);
        let before_end = add_op(rw, "LessOrEqual", &[at, self.last]);
        let (inside, clipped) = if op.padding == Padding::Zeros {
            let inside = add_op(rw, "And", &[from_front, before_end]);
            (Some(inside), add_op(rw, "Where", &[inside, at, self.zero]))
        } else {
            let below = add_op(rw, "Where", &[before_end, at, self.last]);
            (None, add_op(rw, "Where", &[from_front, below, self.zero]))
        };
        let index = cast(rw, clipped, self.ty, DType::I64);
        Taps { index, inside, weights }
    }
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = GridSample::read(rw.attrs())?;
    let (x, grid) = (rw.required_input(0)?, rw.required_input(1)?);
    let rank = shape_of(rw, x, "input 0")?.rank();
    let dtype = dtype_of(rw, x, "input 0")?;
    let grid_dtype = dtype_of(rw, grid, "input 1")?;
    let axes = rank - 2;
    let position_ty = arithmetic_dtype(grid_dtype);
    let value_ty = match op.mode {
        Mode::Nearest => dtype,
        _ if dtype.is_float() => arithmetic_dtype(dtype),
        _ => DType::F64,
    };

    let grid_sizes: Vec<Size> = (1..=axes).map(|axis| size_of(rw, grid, axis)).collect();
    let sizes: Vec<Size> = (2..rank).map(|axis| size_of(rw, x, axis)).collect();
    let product = |rw: &mut Rewrite<'_>, sizes: &[Size]| {
        sizes.iter().fold(Size::Number(1), |total_size, &size| multiply_sizes(rw, total_size, size))
    };
    let (points, elements) = (product(rw, &grid_sizes), product(rw, &sizes));

    let coordinates = reshape_to(rw, grid, &[Size::SameAxis, points, Size::Number(axes as i64)]);
    let cast_coordinates = cast(rw, coordinates, grid_dtype, position_ty);
    let mut axis_coordinates = match axes {
        1 => vec![cast_coordinates],
        _ => {
            let attrs = Attrs::new().with("axis", 2i64).with("num_outputs", axes as i64);
            rw.add_node("", "Split", &[Some(cast_coordinates)], axes, attrs)
        }
    };
    // The grid has the coordinate of the last axis first.
    axis_coordinates.reverse();

    let mut combined: Option<Taps> = None;
    let mut taps = 1i64;
    for (&size, coordinate) in sizes.iter().zip(axis_coordinates) {
        let axis = Axis::new(rw, size, position_ty, op.align_corners);
        let mut position = axis.to_position(rw, coordinate, op.align_corners);
        if op.mode == Mode::Nearest {
            position = add_op(rw, "Round", &[position]);
        }
        let position = axis.pad(rw, &op, position);
        let axis_taps = axis.compute_taps(rw, &op, position);
        let Some(before) = combined else {
            taps = tap_count(&op);
            combined = Some(axis_taps);
            continue;
        };
        taps *= tap_count(&op);
        // Combines each tap of the previous axes with each tap of this axis.
        let combine = |rw: &mut Rewrite<'_>, op: &str, a: ValueId, b: ValueId| {
            let (a, b) = (insert_axes(rw, a, &[3]), insert_axes(rw, b, &[2]));
            let pairs = add_op(rw, op, &[a, b]);
            reshape_to(rw, pairs, &[Size::SameAxis, Size::SameAxis, Size::Number(taps)])
        };
        let size = match size {
            Size::Value(value) => value,
            other => {
                let count = other.scalar_constant().unwrap_or(1);
                rw.constant("size", Tensor::i64(&[], &[count]))
            }
        };
        let rows = add_op(rw, "Mul", &[before.index, size]);
        let index = combine(rw, "Add", rows, axis_taps.index);
        let inside = before.inside.zip(axis_taps.inside).map(|(a, b)| combine(rw, "And", a, b));
        let weights = before.weights.zip(axis_taps.weights).map(|(a, b)| combine(rw, "Mul", a, b));
        combined = Some(Taps { index, inside, weights });
    }
    let Some(total) = combined else { return Err(OpError::invalid("input 0 has no spatial axes")) };

    let data = reshape_to(rw, x, &[Size::SameAxis, Size::SameAxis, elements]);
    let data = cast(rw, data, dtype, value_ty);
    let data = permute_axes(rw, data, &[0, 2, 1]);
    let looked_at = multiply_sizes(rw, points, Size::Number(taps));
    let index = reshape_to(rw, total.index, &[Size::SameAxis, looked_at]);
    let index = insert_axes(rw, index, &[2]);
    let mut value = rw.add("GatherND", &[data, index], Attrs::new().with("batch_dims", 1i64));
    let mut inside = total.inside.map(|inside| insert_axes(rw, inside, &[3]));
    if total.weights.is_some() {
        let channels = size_of(rw, x, 1);
        value = reshape_to(rw, value, &[Size::SameAxis, points, Size::Number(taps), channels]);
    } else {
        // Removes the axis of the single tap.
        inside = total.inside;
    }
    if let Some(inside) = inside {
        let zero = scalar_constant(rw, value_ty, 0.0);
        value = add_op(rw, "Where", &[inside, value, zero]);
    }
    if let Some(weights) = total.weights {
        let weights = cast(rw, weights, position_ty, value_ty);
        let weights = insert_axes(rw, weights, &[3]);
        let weighed = add_op(rw, "Mul", &[value, weights]);
        value = crate::support::sizes::reduce_sum_axes(rw, weighed, &[2]);
    }
    let value = cast(rw, value, value_ty, dtype);
    let value = permute_axes(rw, value, &[0, 2, 1]);
    let shape: Vec<Size> = [Size::SameAxis, Size::SameAxis].into_iter().chain(grid_sizes).collect();
    let result = reshape_to(rw, value, &shape);
    rw.replace_output(0, result);
    Ok(())
}

/// Returns the number of contributing elements along one axis.
fn tap_count(op: &GridSample) -> i64 {
    match op.mode {
        Mode::Nearest => 1,
        Mode::Linear => 2,
        Mode::Cubic => 4,
    }
}

/// Names of the modes before opset 20.
const OLD_MODE_NAMES: [(&str, &str); 2] = [("bilinear", "linear"), ("bicubic", "cubic")];

fn upgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() >= 20 {
        return Ok(());
    }
    let old = rw.attrs().string("mode")?.unwrap_or("bilinear");
    let found = OLD_MODE_NAMES.iter().find(|(name, _)| *name == old).map(|&(_, name)| name);
    let mode = found.or((old == "nearest").then_some(old)).ok_or_else(|| {
        OpError::invalid(format!(
            "mode must be \"nearest\", \"bilinear\" or \"bicubic\" before opset 20, got {old:?}"
        ))
    })?;
    let inputs = rw.node().inputs.to_vec();
    rw.emit_same_op(&inputs, rw.attrs().clone().with("mode", mode));
    Ok(())
}

/// Renames the mode for opsets before 20, which allow two spatial axes only. Other ranks, and opsets before 16, get the
/// decomposition.
fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let version = rw.version();
    if version >= 20 {
        return Ok(());
    }
    let planes = rw.shape(rw.required_input(0)?).is_some_and(|shape| shape.rank() == 4);
    if version < 16 || !planes {
        // The decomposition uses GatherND with batch axes, which opset 12 added.
        return if version < 12 { Ok(()) } else { decompose(rw) };
    }
    let mode = rw.attrs().string("mode")?.unwrap_or("linear");
    let Some(&(old, _)) = OLD_MODE_NAMES.iter().find(|(_, name)| *name == mode) else { return Ok(()) };
    let inputs = rw.node().inputs.to_vec();
    rw.emit_same_op(&inputs, rw.attrs().clone().with("mode", old));
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(GridSample::read(&node.attrs)?))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "GridSample", &[16, 20, 22], build)
            .upgrade(upgrade)
            .downgrade(downgrade)
            .composition(decompose)
            .later_types(&[(22, &[DType::BF16])]),
    ]
}

#[cfg(test)]
mod tests;
