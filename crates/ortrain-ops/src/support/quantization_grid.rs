//! Grids of integers: the numbers that a quantized tensor can represent, and how its scales and zero points are laid out.

use ortrain_graph::{Attrs, DType, Shape, SmallType, Tensor, ValueId};

use crate::OpError;
use crate::broadcast::ShapedNodeSink;
use crate::infer::{Infer, normalize_axis};
use crate::rewrite::Rewrite;
use crate::support::casts::cast;
use crate::support::onnx_decomposition::NodeSink;
use crate::support::sizes::{MAX_CONSTANT_POSITIONS, reduce_sum_axes};

/// Operator that rounds floats to a grid.
pub(crate) const QUANTIZE_LINEAR: &str = "QuantizeLinear";

/// Default of the attribute `axis`.
const DEFAULT_AXIS: i64 = 1;

/// Returns the smallest and the largest number of an element type of quantized tensors.
pub(crate) fn number_range(dtype: DType) -> Option<(f64, f64)> {
    match dtype {
        DType::Small(small) if small.integer_range().is_none() && small != SmallType::F8E8M0 => {
            let largest = f64::from(small.decode(small.special_codes(true).overflow));
            Some((-largest, largest))
        }
        _ => integer_range(dtype),
    }
}

/// Returns the smallest and the largest integer of an element type of quantized tensors.
pub(crate) fn integer_range(dtype: DType) -> Option<(f64, f64)> {
    match dtype {
        DType::Small(small) => small.integer_range().map(|(low, high)| (f64::from(low), f64::from(high))),
        DType::U8 => Some((0.0, 255.0)),
        DType::I8 => Some((-128.0, 127.0)),
        DType::U16 => Some((0.0, 65535.0)),
        DType::I16 => Some((-32768.0, 32767.0)),
        // Biases of quantized models. The largest float32 below 2^31.
        DType::I32 => Some((-2_147_483_648.0, 2_147_483_520.0)),
        _ => None,
    }
}

/// Returns true for the 8-bit integers of operators on quantized tensors.
pub(crate) fn is_byte(dtype: DType) -> bool {
    matches!(dtype, DType::U8 | DType::I8)
}

/// Elements that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// All elements.
    PerTensor,
    /// The elements with the same index along an axis.
    PerAxis(usize),
    /// Blocks of adjacent elements along an axis. The last block may be shorter.
    Blocks {
        /// Axis with the blocks.
        axis: usize,
        /// Elements of a block.
        block: usize,
    },
}

impl Layout {
    /// Determines the layout from the attributes and shapes of a node.
    ///
    /// # Errors
    /// Returns an error if the shape of the scale fits no layout.
    pub(crate) fn new(
        attrs: &Attrs,
        x: Option<&Shape>,
        scale: Option<&Shape>,
    ) -> Result<Option<Layout>, OpError> {
        let block = attrs.int("block_size")?.unwrap_or(0);
        let block = usize::try_from(block)
            .map_err(|_| OpError::invalid(format!("block_size must not be negative, got {block}")))?;
        let axis = attrs.int("axis")?.unwrap_or(DEFAULT_AXIS);
        let (Some(x), Some(scale)) = (x, scale) else { return Ok(None) };
        if block == 0 && scale.iter().all(|dim| dim.known() == Some(1)) && scale.rank() <= 1 {
            return Ok(Some(Layout::PerTensor));
        }
        let axis = normalize_axis(axis, x.rank())?;
        if block == 0 {
            let differs = scale.rank() != 1
                || scale[0].known().zip(x[axis].known()).is_some_and(|(count, size)| count != size);
            if differs {
                return Err(OpError::invalid(format!(
                    "the scale has shape {scale}, but an input of shape {x} needs one number, or one for each index \
                     along axis {axis}; blocks need the attribute block_size"
                )));
            }
            return Ok(Some(Layout::PerAxis(axis)));
        }
        let fits = |k: usize| {
            let Some((count, size)) = scale[k].known().zip(x[k].known()) else { return true };
            count == if k == axis { size.div_ceil(block) } else { size }
        };
        if scale.rank() != x.rank() || !(0..x.rank()).all(fits) {
            return Err(OpError::invalid(format!(
                "the scale has shape {scale}, but an input of shape {x} in blocks of {block} along axis {axis} needs \
                 one number for each block"
            )));
        }
        Ok(Some(Layout::Blocks { axis, block }))
    }

    /// Returns the index of the scale of each element of a tensor with these sizes.
    pub(crate) fn scale_indices(self, dims: &[usize]) -> Vec<usize> {
        let count: usize = dims.iter().product();
        let behind = |axis: usize| dims[axis + 1..].iter().product::<usize>().max(1);
        match self {
            Layout::PerTensor => vec![0; count],
            Layout::PerAxis(axis) => (0..count).map(|at| at / behind(axis) % dims[axis]).collect(),
            Layout::Blocks { axis, block } => {
                let (inner, blocks) = (behind(axis), dims[axis].div_ceil(block));
                let index = |at: usize| {
                    let (outer, along) = (at / inner / dims[axis], at / inner % dims[axis]);
                    (outer * blocks + along / block) * inner + at % inner
                };
                (0..count).map(index).collect()
            }
        }
    }

    /// Broadcasts scales or zero points to a tensor of the quantized shape.
    ///
    /// # Errors
    /// Returns an error if the size of the axis with the blocks is unknown.
    pub(crate) fn broadcast(
        self,
        to: &mut impl ShapedNodeSink,
        value: ValueId,
        x: &Shape,
    ) -> Result<ValueId, OpError> {
        let rank = x.rank();
        match self {
            Layout::PerTensor => {
                // A scale of shape [1] would add an axis to a scalar.
                let has_axis = to.known_shape(value).is_none_or(|shape| shape.rank() > 0);
                if rank > 0 || !has_axis {
                    return Ok(value);
                }
                let scalar = to.emit_ints("scalar", &[]);
                Ok(to.emit("Reshape", &[Some(value), Some(scalar)], Attrs::new()))
            }
            Layout::PerAxis(axis) => {
                let axes: Vec<i64> = (1..(rank - axis) as i64).collect();
                if axes.is_empty() {
                    return Ok(value);
                }
                let axes = to.emit_ints("axes", &axes);
                Ok(to.emit("Unsqueeze", &[Some(value), Some(axes)], Attrs::new()))
            }
            Layout::Blocks { axis, block } => {
                let size = known_size(x, axis)?;
                if size as i64 > MAX_CONSTANT_POSITIONS {
                    return Err(OpError::unsupported(format!(
                        "axis {axis} of an input of shape {x} has more than {MAX_CONSTANT_POSITIONS} elements in blocks"
                    )));
                }
                let blocks: Vec<i64> = (0..size).map(|at| (at / block) as i64).collect();
                let blocks = to.emit_ints("block", &blocks);
                let attrs = Attrs::new().with("axis", axis as i64);
                Ok(to.emit("Gather", &[Some(value), Some(blocks)], attrs))
            }
        }
    }

    /// Sums a value of the quantized shape over the elements that share a scale, to the shape of the scale.
    ///
    /// # Errors
    /// Returns an error if the size of the axis with the blocks is unknown.
    pub(crate) fn sum_to_scale(
        self,
        to: &mut impl ShapedNodeSink,
        value: ValueId,
        x: &Shape,
        scale: &Shape,
    ) -> Result<ValueId, OpError> {
        let rank = x.rank();
        match self {
            Layout::PerTensor => {
                let total = reduce_sum_axes(to, value, &Vec::from_iter(0..rank as i64));
                let shape = to.emit_ints("shape", &vec![1; scale.rank()]);
                Ok(to.emit("Reshape", &[Some(total), Some(shape)], Attrs::new()))
            }
            Layout::PerAxis(axis) => {
                let others: Vec<i64> = (0..rank as i64).filter(|&other| other != axis as i64).collect();
                Ok(reduce_sum_axes(to, value, &others))
            }
            Layout::Blocks { axis, block } => {
                let size = known_size(x, axis)?;
                let block = block.min(size.max(1));
                let blocks = size.div_ceil(block);
                let missing = (blocks * block - size) as i64;
                let mut padded = value;
                if missing > 0 {
                    let mut pads = vec![0; 2 * rank];
                    pads[rank + axis] = missing;
                    let pads = to.emit_ints("pads", &pads);
                    padded = to.emit("Pad", &[Some(value), Some(pads)], Attrs::new());
                }
                // The axes before the blocks keep their sizes (0), the axes behind them too, but at another index.
                let mut sizes: Vec<i64> = vec![0; axis];
                sizes.extend([blocks as i64, block as i64]);
                for behind in axis + 1..rank {
                    sizes.push(known_size(x, behind)? as i64);
                }
                let shape = to.emit_ints("shape", &sizes);
                let split = to.emit("Reshape", &[Some(padded), Some(shape)], Attrs::new());
                Ok(reduce_sum_axes(to, split, &[axis as i64 + 1]))
            }
        }
    }
}

fn known_size(x: &Shape, axis: usize) -> Result<usize, OpError> {
    x[axis].known().ok_or_else(|| {
        OpError::unsupported(format!(
            "the size of axis {axis} of the input must be known for scales of blocks; its shape is {x}"
        ))
    })
}

/// Checks a constant scale: a scale of zero or NaN makes a grid without numbers.
///
/// # Errors
/// Returns an error that names the element.
pub(crate) fn check_scale(cx: &Infer<'_>, k: usize) -> Result<(), OpError> {
    let Some(scale) = cx.constant(k) else { return Ok(()) };
    let elements = scale.to_f64();
    match elements.iter().position(|&number| !number.is_finite() || number == 0.0) {
        None => Ok(()),
        Some(at) => Err(OpError::invalid(format!(
            "element {at} of the scale, input {k}, is {}; a scale must be finite and not zero",
            elements[at]
        ))),
    }
}

/// Checks that an optional zero point, input `k`, has the type of the quantized tensor.
///
/// # Errors
/// Returns an error that names both types.
pub(crate) fn check_zero_point_type(cx: &Infer<'_>, k: usize, dtype: DType) -> Result<(), OpError> {
    if cx.has_input(k) && cx.dtype(k)? != dtype {
        return Err(OpError::invalid(format!(
            "the zero point, input {k}, is of type {}, but the quantized tensor is of type {dtype}",
            cx.dtype(k)?
        )));
    }
    Ok(())
}

/// Checks scale `k` and the optional zero point behind it, each one number, for a quantized tensor of this type.
///
/// # Errors
/// Returns an error that names the input and its type, shape or number.
pub(crate) fn check_grid_of_tensor(cx: &Infer<'_>, k: usize, dtype: DType) -> Result<(), OpError> {
    cx.expect_dtype(k, "a float type", DType::is_float)?;
    check_scale(cx, k)?;
    check_single(cx, k, "the scale")?;
    check_single(cx, k + 1, "the zero point")?;
    check_zero_point_type(cx, k + 1, dtype)
}

/// Checks that an optional zero point has the type of the quantized tensor and the shape of the scale.
///
/// # Errors
/// Returns an error that names both types or shapes.
pub(crate) fn check_zero_point(
    cx: &Infer<'_>,
    zero_point: usize,
    dtype: DType,
    scale: usize,
) -> Result<(), OpError> {
    if !cx.has_input(zero_point) {
        return Ok(());
    }
    check_zero_point_type(cx, zero_point, dtype)?;
    let concrete = |k: usize| cx.shape(k).and_then(Shape::concrete);
    let (Some(own), Some(scale_dims)) = (concrete(zero_point), concrete(scale)) else { return Ok(()) };
    let count = |dims: &[usize]| dims.iter().product::<usize>();
    if own == scale_dims || (count(&own) == 1 && count(&scale_dims) == 1) {
        return Ok(());
    }
    Err(OpError::invalid(format!(
        "the zero point, input {zero_point}, has shape {own:?}, but the scale has shape {scale_dims:?}"
    )))
}

/// Type and sizes of an input of a sample.
pub(crate) type SampleInput = (DType, &'static [usize]);

/// Scale of a whole tensor, in a sample.
pub(crate) const SCALE_SAMPLE: SampleInput = (DType::F32, &[]);

/// Zero point of a whole tensor, in a sample.
pub(crate) const ZERO_POINT_SAMPLE: SampleInput = (DType::U8, &[]);

/// Input of a node with its element type.
pub(crate) type Typed = (ValueId, DType);

/// Returns a required input with its element type.
///
/// # Errors
/// Returns an error if the input is missing or its type is unknown.
pub(crate) fn typed_input(rw: &Rewrite<'_>, k: usize) -> Result<Typed, OpError> {
    let id = rw.required_input(k)?;
    let dtype =
        rw.dtype(id).ok_or_else(|| OpError::invalid(format!("the type of input {k} is not known")))?;
    Ok((id, dtype))
}

/// Returns an optional input with its element type.
///
/// # Errors
/// Returns an error if the type is unknown.
pub(crate) fn optional_typed_input(rw: &Rewrite<'_>, k: usize) -> Result<Option<Typed>, OpError> {
    if rw.input(k).is_some() { typed_input(rw, k).map(Some) } else { Ok(None) }
}

/// Returns the type in which sums of products of bytes are exact: float32 up to this number of terms.
pub(crate) fn exact_sum_dtype(terms: Option<usize>) -> DType {
    // A product of two differences of bytes is at most 255², and integers up to 2^24 are exact in float32.
    const MAX_TERMS: usize = (1 << 24) / (255 * 255);
    if terms.is_some_and(|terms| terms <= MAX_TERMS) { DType::F32 } else { DType::F64 }
}

/// Adds `QuantizeLinear` with a scale for the whole tensor.
pub(crate) fn quantize(
    rw: &mut Rewrite<'_>,
    x: ValueId,
    scale: ValueId,
    zero_point: Option<ValueId>,
    dtype: DType,
) -> ValueId {
    let attrs = Attrs::new();
    let attrs =
        if zero_point.is_some() { attrs } else { attrs.with("output_dtype", i64::from(dtype.to_onnx())) };
    rw.emit(QUANTIZE_LINEAR, &[Some(x), Some(scale), zero_point], attrs)
}

/// Adds `QuantizeLinear` for numbers in units of the grid.
pub(crate) fn quantize_positions(
    rw: &mut Rewrite<'_>,
    positions: Typed,
    zero_point: Option<ValueId>,
    dtype: DType,
) -> ValueId {
    let one = number(rw, positions.1, 1.0);
    quantize(rw, positions.0, one, zero_point, dtype)
}

/// Adds `DequantizeLinear` with a scale for the whole tensor.
pub(crate) fn dequantize(
    rw: &mut Rewrite<'_>,
    x: ValueId,
    scale: ValueId,
    zero_point: Option<ValueId>,
) -> ValueId {
    rw.emit("DequantizeLinear", &[Some(x), Some(scale), zero_point], Attrs::new())
}

/// Checks that input `k` holds one number.
///
/// # Errors
/// Returns an error that names the shape.
pub(crate) fn check_single(cx: &Infer<'_>, k: usize, name: &str) -> Result<(), OpError> {
    match cx.shape(k) {
        Some(shape) if !shape.iter().all(|dim| dim.known().is_none_or(|size| size == 1)) => {
            Err(OpError::invalid(format!("{name}, input {k}, has shape {shape}; one number is needed")))
        }
        _ => Ok(()),
    }
}

/// Adds a constant number.
pub(crate) fn number(to: &mut impl ShapedNodeSink, dtype: DType, value: f64) -> ValueId {
    to.emit_constant(Tensor::scalar(dtype, value))
}

/// Adds a node of `ai.onnx` without attributes.
pub(crate) fn emit(to: &mut impl ShapedNodeSink, op: &str, inputs: &[ValueId]) -> ValueId {
    let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
    to.emit(op, &inputs, Attrs::new())
}

/// Returns `x - zero_point` as floats of type `to_dtype`: exact for integers of up to 16 bits.
pub(crate) fn without_zero_point(
    to: &mut impl ShapedNodeSink,
    (x, dtype): (ValueId, DType),
    zero_point: Option<ValueId>,
    to_dtype: DType,
) -> ValueId {
    let Some(zero_point) = zero_point else { return cast(to, x, dtype, to_dtype) };
    if dtype == DType::I32 {
        // 32-bit integers are not exact in float32.
        let difference = emit(to, "Sub", &[x, zero_point]);
        return cast(to, difference, dtype, to_dtype);
    }
    let [x, zero_point] = [x, zero_point].map(|value| cast(to, value, dtype, to_dtype));
    emit(to, "Sub", &[x, zero_point])
}
