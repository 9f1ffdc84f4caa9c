//! A tensor looked at between its elements: `GridSample`.
//!
//! GridSample-16, 20, 22 of ONNX (<https://onnx.ai/onnx/operators/onnx__GridSample.html>). Opset 20 has other names for the
//! modes and any number of axes, 22 bfloat16. The grid holds coordinates between -1 and 1, that of the last axis first. They
//! follow the reference implementation of the standard: a coordinate beyond the border is clipped or reflected, where
//! `padding_mode` says so, then the elements around it are weighed, and those outside are zeros, the nearest ones or reflected
//! ones. For `cubic` with `border` the coordinate stays and each of the four elements of an axis is clipped on its own, as in
//! PyTorch and ONNX Runtime: far outside the border's value remains, and near the border the kernel has all of its weights. Integers are interpolated in float64 and truncated; `nearest` takes the even one of two neighbours.
//!
//! It is a composition: the positions and weights of the elements around every point, products over the axes, one GatherND
//! and a sum. So both inputs have gradients: that of the grid is zero for `nearest`, and outside and on the edge of
//! coordinates that `border` clips; `reflection` turns its sign; with `zeros` there is a slope across the last half of a cell. A coordinate that
//! is no number makes `linear` and `cubic` give none.
//!
//! Limits: the rank of the input must be known.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};

use super::norm::wide;
use super::sizes::{
    Size, apply, as_number, cast, dtype_of, minus, number, permuted, reshaped, shape_of, size_of, times,
    unsqueezed,
};
use crate::OpError;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;

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
    /// Whether -1 and 1 are the centers of the outer elements rather than their edges.
    aligned: bool,
}

impl GridSample {
    fn read(attrs: &Attrs) -> Result<GridSample, OpError> {
        let mode = match attrs.string("mode")?.unwrap_or("linear") {
            "nearest" => Mode::Nearest,
            "linear" => Mode::Linear,
            "cubic" => Mode::Cubic,
            other => {
                return Err(OpError::invalid(format!(
                    "mode {other:?} is not defined; nearest, linear and cubic are"
                )));
            }
        };
        let padding = match attrs.string("padding_mode")?.unwrap_or("zeros") {
            "zeros" => Padding::Zeros,
            "border" => Padding::Border,
            "reflection" => Padding::Reflection,
            other => {
                return Err(OpError::invalid(format!(
                    "padding_mode {other:?} is not defined; zeros, border and reflection are"
                )));
            }
        };
        Ok(GridSample { mode, padding, aligned: attrs.int("align_corners")?.unwrap_or(0) != 0 })
    }
}

impl Op for GridSample {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.arity(2, 2, 1)?;
        let dtype = cx.dtype(0)?;
        cx.dtype_where(1, "a float type", DType::is_float)?;
        let (Some(x), Some(grid)) = (cx.shape(0), cx.shape(1)) else {
            cx.output(0, dtype, None);
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
            return Err(OpError::invalid(format!("input 0 is a batch of {a}, but input 1 is one of {b}")));
        }
        if x[2..].iter().any(|dim| dim.known() == Some(0)) {
            return Err(OpError::invalid(format!("input 0 of shape {x} has no elements to look at")));
        }
        let shape: Shape = x[..2].iter().chain(&grid[1..grid.rank() - 1]).cloned().collect();
        cx.output(0, dtype, Some(shape));
        Ok(())
    }
}

/// What is looked at along one axis, for every point: `[batch, points, taps]` each.
struct Taps {
    /// Indices of elements, all of them inside.
    index: ValueId,
    /// Whether the element is there at all.
    inside: Option<ValueId>,
    weights: Option<ValueId>,
}

/// One axis of the input.
struct Axis {
    ty: DType,
    zero: ValueId,
    /// The index of the last element.
    last: ValueId,
    /// Where the axis begins.
    least: ValueId,
    /// How far it reaches.
    span: ValueId,
}

impl Axis {
    fn new(rw: &mut Rewrite<'_>, size: Size, ty: DType, aligned: bool) -> Axis {
        let before = minus(rw, size, Size::Number(1));
        let last = as_number(rw, before, ty);
        let span = if aligned { last } else { as_number(rw, size, ty) };
        let least = number(rw, ty, if aligned { 0.0 } else { -0.5 });
        Axis { ty, zero: number(rw, ty, 0.0), last, least, span }
    }

    /// From -1 to 1 to positions of elements.
    fn position(&self, rw: &mut Rewrite<'_>, place: ValueId, aligned: bool) -> ValueId {
        let (one, half) = (number(rw, self.ty, 1.0), number(rw, self.ty, 0.5));
        let from_front = apply(rw, "Add", &[place, one]);
        if aligned {
            let halved = apply(rw, "Mul", &[from_front, half]);
            return apply(rw, "Mul", &[halved, self.span]);
        }
        let scaled = apply(rw, "Mul", &[from_front, self.span]);
        let shifted = apply(rw, "Sub", &[scaled, one]);
        apply(rw, "Mul", &[shifted, half])
    }

    /// `[least, most]` of the axis.
    fn ends(&self, rw: &mut Rewrite<'_>) -> [ValueId; 2] {
        [self.least, apply(rw, "Add", &[self.least, self.span])]
    }

    /// Thrown back by both ends until it lies between them.
    fn reflected(&self, rw: &mut Rewrite<'_>, x: ValueId) -> ValueId {
        let rest_of = |rw: &mut Rewrite<'_>, a: ValueId, b: ValueId| {
            rw.add("Mod", &[a, b], Attrs::new().with("fmod", 1i64))
        };
        let [least, most] = self.ends(rw);
        let (one, two) = (number(rw, self.ty, 1.0), number(rw, self.ty, 2.0));
        let from_front = apply(rw, "Sub", &[x, least]);
        let away = apply(rw, "Abs", &[from_front]);
        let rest = rest_of(rw, away, self.span);
        let spans = apply(rw, "Div", &[away, self.span]);
        let flips = apply(rw, "Floor", &[spans]);
        let parity = rest_of(rw, flips, two);
        let odd = apply(rw, "Equal", &[parity, one]);
        let other = apply(rw, "Sub", &[self.span, rest]);
        let inside = apply(rw, "Where", &[odd, other, rest]);
        let back = apply(rw, "Add", &[inside, least]);
        let (before, behind) = (apply(rw, "Less", &[x, least]), apply(rw, "Less", &[most, x]));
        let outside = apply(rw, "Or", &[before, behind]);
        apply(rw, "Where", &[outside, back, x])
    }

    /// The position that is looked at instead of one beyond the border.
    fn padded(&self, rw: &mut Rewrite<'_>, op: &GridSample, x: ValueId) -> ValueId {
        match op.padding {
            Padding::Zeros => x,
            // Each of the elements that count is clipped on its own.
            Padding::Border if op.mode == Mode::Cubic => x,
            Padding::Reflection => self.reflected(rw, x),
            // The outer halves of the outer cells have the values of the outer elements, so clipping them changes slopes alone.
            Padding::Border => {
                let before = apply(rw, "LessOrEqual", &[x, self.zero]);
                let behind = apply(rw, "LessOrEqual", &[self.last, x]);
                let below = apply(rw, "Where", &[behind, self.last, x]);
                apply(rw, "Where", &[before, self.zero, below])
            }
        }
    }

    /// The elements that count for a position `[batch, points, 1]`.
    fn taps(&self, rw: &mut Rewrite<'_>, op: &GridSample, x: ValueId) -> Taps {
        // Weights are polynomials of how far the position is behind an element; by power, one coefficient for each tap.
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
        let base = if op.mode == Mode::Nearest { x } else { apply(rw, "Floor", &[x]) };
        let offsets: Vec<f64> = (0..powers[0].len()).map(|k| first + k as f64).collect();
        let offsets = row(rw, &offsets);
        let mut at = apply(rw, "Add", &[base, offsets]);
        let weights = (powers.len() > 1).then(|| {
            let behind = apply(rw, "Sub", &[x, base]);
            let mut sum = row(rw, powers[powers.len() - 1]);
            for power in powers[..powers.len() - 1].iter().rev() {
                let product = apply(rw, "Mul", &[sum, behind]);
                let coefficients = row(rw, power);
                sum = apply(rw, "Add", &[product, coefficients]);
            }
            sum
        });
        if op.padding == Padding::Reflection {
            at = self.reflected(rw, at);
        }
        // Whatever the position is, no number even, an element that is there is looked at.
        let from_front = apply(rw, "LessOrEqual", &[self.zero, at]);
        let before_end = apply(rw, "LessOrEqual", &[at, self.last]);
        let (inside, clipped) = if op.padding == Padding::Zeros {
            let inside = apply(rw, "And", &[from_front, before_end]);
            (Some(inside), apply(rw, "Where", &[inside, at, self.zero]))
        } else {
            let below = apply(rw, "Where", &[before_end, at, self.last]);
            (None, apply(rw, "Where", &[from_front, below, self.zero]))
        };
        let index = cast(rw, clipped, self.ty, DType::I64);
        Taps { index, inside, weights }
    }
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = GridSample::read(rw.attrs())?;
    let (x, grid) = (rw.required(0)?, rw.required(1)?);
    let rank = shape_of(rw, x, "its input 0")?.rank();
    let dtype = dtype_of(rw, x, "its input 0")?;
    let grid_dtype = dtype_of(rw, grid, "its input 1")?;
    let axes = rank - 2;
    let place_ty = wide(grid_dtype);
    let value_ty = match op.mode {
        Mode::Nearest => dtype,
        _ if dtype.is_float() => wide(dtype),
        _ => DType::F64,
    };

    let wanted: Vec<Size> = (1..=axes).map(|axis| size_of(rw, grid, axis)).collect();
    let sizes: Vec<Size> = (2..rank).map(|axis| size_of(rw, x, axis)).collect();
    let product = |rw: &mut Rewrite<'_>, sizes: &[Size]| {
        sizes.iter().fold(Size::Number(1), |all, &size| times(rw, all, size))
    };
    let (points, elements) = (product(rw, &wanted), product(rw, &sizes));

    let places = reshaped(rw, grid, &[Size::Kept, points, Size::Number(axes as i64)]);
    let places = cast(rw, places, grid_dtype, place_ty);
    let mut places = match axes {
        1 => vec![places],
        _ => {
            let attrs = Attrs::new().with("axis", 2i64).with("num_outputs", axes as i64);
            rw.add_node("", "Split", &[Some(places)], axes, attrs)
        }
    };
    // The last axis comes first in the grid.
    places.reverse();

    let mut all: Option<Taps> = None;
    let mut taps = 1i64;
    for (&size, place) in sizes.iter().zip(places) {
        let axis = Axis::new(rw, size, place_ty, op.aligned);
        let mut position = axis.position(rw, place, op.aligned);
        if op.mode == Mode::Nearest {
            position = apply(rw, "Round", &[position]);
        }
        let position = axis.padded(rw, &op, position);
        let own = axis.taps(rw, &op, position);
        let Some(before) = all else {
            taps = own_taps(&op);
            all = Some(own);
            continue;
        };
        taps *= own_taps(&op);
        // Every tap of the axes before with every one of this axis.
        let both = |rw: &mut Rewrite<'_>, op: &str, a: ValueId, b: ValueId| {
            let (a, b) = (unsqueezed(rw, a, &[3]), unsqueezed(rw, b, &[2]));
            let pairs = apply(rw, op, &[a, b]);
            reshaped(rw, pairs, &[Size::Kept, Size::Kept, Size::Number(taps)])
        };
        let size = match size {
            Size::Value(value) => value,
            other => {
                let count = other.number().unwrap_or(1);
                rw.constant("size", Tensor::i64(&[], &[count]))
            }
        };
        let rows = apply(rw, "Mul", &[before.index, size]);
        let index = both(rw, "Add", rows, own.index);
        let inside = before.inside.zip(own.inside).map(|(a, b)| both(rw, "And", a, b));
        let weights = before.weights.zip(own.weights).map(|(a, b)| both(rw, "Mul", a, b));
        all = Some(Taps { index, inside, weights });
    }
    let Some(all) = all else { return Err(OpError::invalid("its input 0 has no axes to look along")) };

    let data = reshaped(rw, x, &[Size::Kept, Size::Kept, elements]);
    let data = cast(rw, data, dtype, value_ty);
    let data = permuted(rw, data, &[0, 2, 1]);
    let looked_at = times(rw, points, Size::Number(taps));
    let index = reshaped(rw, all.index, &[Size::Kept, looked_at]);
    let index = unsqueezed(rw, index, &[2]);
    let mut value = rw.add("GatherND", &[data, index], Attrs::new().with("batch_dims", 1i64));
    let mut inside = all.inside.map(|inside| unsqueezed(rw, inside, &[3]));
    if all.weights.is_some() {
        let channels = size_of(rw, x, 1);
        value = reshaped(rw, value, &[Size::Kept, points, Size::Number(taps), channels]);
    } else {
        // One tap: its axis goes.
        inside = all.inside;
    }
    if let Some(inside) = inside {
        let zero = number(rw, value_ty, 0.0);
        value = apply(rw, "Where", &[inside, value, zero]);
    }
    if let Some(weights) = all.weights {
        let weights = cast(rw, weights, place_ty, value_ty);
        let weights = unsqueezed(rw, weights, &[3]);
        let weighed = apply(rw, "Mul", &[value, weights]);
        value = super::sizes::summed(rw, weighed, &[2]);
    }
    let value = cast(rw, value, value_ty, dtype);
    let value = permuted(rw, value, &[0, 2, 1]);
    let shape: Vec<Size> = [Size::Kept, Size::Kept].into_iter().chain(wanted).collect();
    let result = reshaped(rw, value, &shape);
    rw.output(0, result);
    Ok(())
}

/// How many elements count along one axis.
fn own_taps(op: &GridSample) -> i64 {
    match op.mode {
        Mode::Nearest => 1,
        Mode::Linear => 2,
        Mode::Cubic => 4,
    }
}

/// The names of the modes before opset 20.
const OLD_NAMES: [(&str, &str); 2] = [("bilinear", "linear"), ("bicubic", "cubic")];

fn upgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() >= 20 {
        return Ok(());
    }
    let old = rw.attrs().string("mode")?.unwrap_or("bilinear");
    let found = OLD_NAMES.iter().find(|(name, _)| *name == old).map(|&(_, name)| name);
    let mode = found.or((old == "nearest").then_some(old)).ok_or_else(|| {
        OpError::invalid(format!(
            "mode {old:?} is not defined before opset 20; nearest, bilinear and bicubic are"
        ))
    })?;
    let inputs = rw.node().inputs.to_vec();
    rw.same(&inputs, rw.attrs().clone().with("mode", mode));
    Ok(())
}

/// Before opset 20 the modes have other names and there are two axes; before 16 it is written as what it is made of.
fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let version = rw.version();
    if version >= 20 {
        return Ok(());
    }
    let planes = rw.shape(rw.required(0)?).is_some_and(|shape| shape.rank() == 4);
    if version < 16 || !planes {
        // What is gathered from is a batch, which GatherND knows since 12.
        return if version < 12 { Ok(()) } else { decompose(rw) };
    }
    let mode = rw.attrs().string("mode")?.unwrap_or("linear");
    let Some(&(old, _)) = OLD_NAMES.iter().find(|(_, name)| *name == mode) else { return Ok(()) };
    let inputs = rw.node().inputs.to_vec();
    rw.same(&inputs, rw.attrs().clone().with("mode", old));
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
