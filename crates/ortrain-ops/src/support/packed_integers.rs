//! Integers of a few bits that share bytes, with scales and zero points.

use ortrain_expr::{QuantizedMatrix, product_of_sizes};
use ortrain_graph::{Attrs, DType, Shape, Tensor, ValueId};

use crate::OpError;
use crate::broadcast::ShapedNodeSink;
use crate::infer::Infer;
use crate::support::casts::cast;
use crate::support::quantization_grid::{Typed, emit};

/// Checks that input `k` has `count` elements, if its shape is known.
pub(crate) fn check_count(cx: &Infer<'_>, k: usize, count: usize, meaning: &str) -> Result<(), OpError> {
    let Some(dims) = cx.shape(k).and_then(Shape::concrete) else { return Ok(()) };
    if product_of_sizes(dims.iter().copied()) == count as u64 {
        return Ok(());
    }
    Err(OpError::invalid(format!(
        "{meaning}, input {k}, has shape {dims:?}, but {count} elements are needed"
    )))
}

/// Reads an attribute with the bits of packed integers.
///
/// # Errors
/// Returns an error if the bits are not 2, 4 or 8.
pub(crate) fn read_bits(attrs: &Attrs, name: &str, default: usize) -> Result<usize, OpError> {
    match attrs.int(name)? {
        None => Ok(default),
        Some(bits @ (2 | 4 | 8)) => Ok(bits as usize),
        Some(bits) => Err(OpError::invalid(format!("{name} must be 2, 4 or 8, got {bits}"))),
    }
}

/// Returns the shifts that move each integer of a byte to the lowest bits, for integers with the lowest bits first.
pub(crate) fn low_bits_first(bits: usize) -> Vec<u8> {
    (0..8 / bits).map(|at| (at * bits) as u8).collect()
}

/// Splits every byte into the integers that these shifts move to the lowest bits. They lie along a new last axis.
pub(crate) fn split_bytes(
    to: &mut impl ShapedNodeSink,
    bytes: ValueId,
    shifts: &[u8],
    bits: usize,
) -> ValueId {
    if bits == 8 {
        return bytes;
    }
    let axis = to.emit_ints("axis", &[-1]);
    let bytes = emit(to, "Unsqueeze", &[bytes, axis]);
    let shifts = to.emit_constant(Tensor::from_slice(DType::U8, &[shifts.len()], shifts));
    let right = Attrs::new().with("direction", "RIGHT");
    let moved = to.emit("BitShift", &[Some(bytes), Some(shifts)], right);
    // Older opsets have no BitwiseAnd.
    let count = to.emit_constant(Tensor::from_slice(DType::U8, &[], &[1u8 << bits]));
    emit(to, "Mod", &[moved, count])
}

/// Splits bytes into integers of `bits` bits, the lowest bits first. The result has type uint8 and the shape `dims`.
pub(crate) fn unpack(to: &mut impl ShapedNodeSink, bytes: ValueId, bits: usize, dims: &[usize]) -> ValueId {
    let integers = split_bytes(to, bytes, &low_bits_first(bits), bits);
    reshape(to, integers, dims)
}

pub(crate) fn reshape(to: &mut impl ShapedNodeSink, value: ValueId, dims: &[usize]) -> ValueId {
    let sizes: Vec<i64> = dims.iter().map(|&size| size as i64).collect();
    let shape = to.emit_ints("shape", &sizes);
    emit(to, "Reshape", &[value, shape])
}

/// Keeps the first `count` elements along the last axis, which has `size`.
pub(crate) fn keep_first(to: &mut impl ShapedNodeSink, value: ValueId, count: usize, size: usize) -> ValueId {
    if count == size {
        return value;
    }
    let [start, end, axis] =
        [("start", 0), ("end", count as i64), ("axis", -1)].map(|(name, at)| to.emit_ints(name, &[at]));
    emit(to, "Slice", &[value, start, end, axis])
}

/// Adds `(integers - zero_points) * scales`. The integers are of type uint8.
pub(crate) fn scaled_distance(
    to: &mut impl ShapedNodeSink,
    (integers, dtype): Typed,
    zero_points: ValueId,
    scales: ValueId,
) -> ValueId {
    let integers = cast(to, integers, DType::U8, dtype);
    let distance = emit(to, "Sub", &[integers, zero_points]);
    emit(to, "Mul", &[distance, scales])
}

/// Checks that a constant scale is finite. A block of zeros has the scale zero.
pub(crate) fn check_scale_is_finite(cx: &Infer<'_>, k: usize) -> Result<(), OpError> {
    let Some(scale) = cx.constant(k) else { return Ok(()) };
    match scale.first_not_finite() {
        None => Ok(()),
        Some((at, element)) => Err(OpError::invalid(format!(
            "element {at} of the scales, input {k}, is {element}; a scale must be finite"
        ))),
    }
}

/// Attribute of a product in the form that instructions compute. The value 0 means the product with the weights without
/// a transposition.
pub(crate) const TRANSPOSED: &str = "transB";

/// Weights of a `MatMulNBits` node: `columns` rows of `rows` integers, in blocks that share a scale.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedWeights {
    pub(crate) columns: usize,
    pub(crate) rows: usize,
    pub(crate) bits: usize,
    pub(crate) block: usize,
}

impl PackedWeights {
    /// Number of blocks of a column.
    pub(crate) fn blocks(&self) -> usize {
        self.rows.div_ceil(self.block)
    }

    /// Adds the product of `a` and the transposed weights, in the form that instructions compute. `bytes` are the packed
    /// integers. Scales and zero points are floats, one for each block.
    pub(crate) fn product(
        &self,
        to: &mut impl ShapedNodeSink,
        [a, bytes, scales]: [ValueId; 3],
        zero_points: Option<ValueId>,
    ) -> ValueId {
        let sizes = [("N", self.columns), ("K", self.rows), ("bits", self.bits), ("block_size", self.block)];
        let attrs = sizes.into_iter().fold(Attrs::new(), |attrs, (name, size)| attrs.with(name, size as i64));
        let inputs: Vec<ValueId> = [a, bytes, scales].into_iter().chain(zero_points).collect();
        to.emit_microsoft("MatMulNBits", &inputs, attrs.with(TRANSPOSED, 1i64))
    }
}

/// Smallest size of a block.
const MIN_BLOCK: i64 = QuantizedMatrix::GROUP as i64;
/// Largest number of rows or columns of a weight, and largest size of a block.
const MAX_SIZE: i64 = i32::MAX as i64;

/// Returns a positive attribute.
pub(crate) fn positive(attrs: &Attrs, name: &'static str) -> Result<usize, OpError> {
    let value = Attrs::required(name, attrs.int(name)?)?;
    if !(1..=MAX_SIZE).contains(&value) {
        return Err(OpError::invalid(format!("{name} must be from 1 to {MAX_SIZE}, got {value}")));
    }
    Ok(value as usize)
}

/// Returns the size of a block: a power of two.
pub(crate) fn read_block(attrs: &Attrs, default: Option<i64>) -> Result<usize, OpError> {
    let block = Attrs::required("block_size", attrs.int("block_size")?.or(default))?;
    let is_power = (MIN_BLOCK..=MAX_SIZE).contains(&block) && block & (block - 1) == 0;
    if !is_power {
        return Err(OpError::invalid(format!(
            "block_size must be a power of two from {MIN_BLOCK} on, got {block}"
        )));
    }
    Ok(block as usize)
}

/// Returns the size of a block for instructions: a multiple of the elements that kernels decode at once.
pub(crate) fn read_instruction_block(attrs: &Attrs) -> Result<usize, OpError> {
    let block = positive(attrs, "block_size")?;
    if !block.is_multiple_of(QuantizedMatrix::GROUP) {
        return Err(OpError::invalid(format!(
            "with the attribute {TRANSPOSED}, block_size must be a multiple of {MIN_BLOCK}, got {block}"
        )));
    }
    Ok(block)
}
