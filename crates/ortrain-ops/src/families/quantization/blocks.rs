//! Weights of a few bits in blocks: `MatMulNBits`, `MatMulBnb4` and `GatherBlockQuantized` of `com.microsoft`,
//! version 1.
//!
//! Bytes hold several integers. `MatMulNBits` and `GatherBlockQuantized` take the lowest bits of a byte first;
//! `MatMulBnb4` takes the highest first, and its integers select a number from a table (QLoRA, Dettmers et al. 2023,
//! arXiv:2305.14314). A block of adjacent weights shares a scale. The operators are compositions of the unpacking, the
//! scaling and a product or a selection, so gradients reach the input, the bias and the scales; the integers stay fixed.
//!
//! Limits: the inputs with integers have known shapes; weights that are packed for one GPU (`weight_prepacked`) are
//! refused.

use ortrain_expr::product_of_sizes;
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, SmallType, Tensor, ValueId};

use crate::OpError;
use crate::infer::{Infer, normalize_axis};
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::{arithmetic_dtype, cast};
use crate::support::packed_integers::{
    check_count, check_scale_is_finite, keep_first, low_bits_first, read_bits, reshape, scaled_distance,
    split_bytes, unpack,
};
use crate::support::quantization_grid::{emit, number, typed_input};
use crate::support::sizes::MAX_CONSTANT_POSITIONS;

const MICROSOFT: &str = "com.microsoft";
/// Bits of an integer without the attribute `bits`.
const DEFAULT_BITS: usize = 4;
/// Elements of a block of `GatherBlockQuantized` without the attribute.
const DEFAULT_BLOCK: i64 = 128;
/// Smallest size of a block.
const MIN_BLOCK: i64 = 16;

/// Numbers of the 4-bit floats of bitsandbytes: sign, two bits of an exponent, one bit of a fraction.
const FP4: [f64; 16] = [
    0.0,
    5.208_333e-3,
    0.666_666_67,
    1.0,
    0.333_333_33,
    0.5,
    0.166_666_67,
    0.25,
    -0.0,
    -5.208_333e-3,
    -0.666_666_67,
    -1.0,
    -0.333_333_33,
    -0.5,
    -0.166_666_67,
    -0.25,
];

/// Numbers of 4-bit normal floats: quantiles of a normal distribution.
const NF4: [f64; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Largest number of rows or columns of a weight, and largest size of a block.
const MAX_SIZE: i64 = i32::MAX as i64;

/// Returns a positive attribute.
fn positive(attrs: &Attrs, name: &'static str) -> Result<usize, OpError> {
    let value = Attrs::required(name, attrs.int(name)?)?;
    if !(1..=MAX_SIZE).contains(&value) {
        return Err(OpError::invalid(format!("{name} must be from 1 to {MAX_SIZE}, got {value}")));
    }
    Ok(value as usize)
}

/// Returns the size of a block: a power of two.
fn read_block(attrs: &Attrs, default: Option<i64>) -> Result<usize, OpError> {
    let block = Attrs::required("block_size", attrs.int("block_size")?.or(default))?;
    let is_power = (MIN_BLOCK..=MAX_SIZE).contains(&block) && block & (block - 1) == 0;
    if !is_power {
        return Err(OpError::invalid(format!(
            "block_size must be a power of two from {MIN_BLOCK} on, got {block}"
        )));
    }
    Ok(block as usize)
}

/// `MatMulNBits`.
struct MatMulNBits {
    columns: usize,
    rows: usize,
    bits: usize,
    block: usize,
}

const SCALES: usize = 2;
const ZERO_POINTS: usize = 3;
const GROUPS: usize = 4;
const BIAS: usize = 5;

impl MatMulNBits {
    fn read(node: &Node) -> Result<MatMulNBits, OpError> {
        let attrs = &node.attrs;
        if attrs.int("weight_prepacked")?.unwrap_or(0) != 0 {
            return Err(OpError::unsupported(
                "weight_prepacked: the weights are in the layout of one GPU; export the model without it",
            ));
        }
        Ok(MatMulNBits {
            columns: positive(attrs, "N")?,
            rows: positive(attrs, "K")?,
            bits: read_bits(attrs, "bits", DEFAULT_BITS)?,
            block: read_block(attrs, None)?,
        })
    }

    /// Number of blocks of a column of weights.
    fn blocks(&self) -> usize {
        self.rows.div_ceil(self.block)
    }

    /// Bytes of the zero points of a column.
    fn zero_point_bytes(&self) -> usize {
        (self.blocks() * self.bits).div_ceil(8)
    }

    /// Adds the weights, of shape `[N, K]` and type `dtype`.
    fn weights(&self, rw: &mut Rewrite<'_>, dtype: DType) -> Result<ValueId, OpError> {
        let &MatMulNBits { columns, rows, bits, block } = self;
        let blocks = self.blocks();
        let wide = arithmetic_dtype(dtype);
        let bytes = rw.required_input(1)?;
        let bytes = reshape(rw, bytes, &[columns, blocks, block * bits / 8]);
        let scales = typed_input(rw, SCALES)?;
        let scales = cast(rw, scales.0, scales.1, wide);
        let zero_points = match rw.input(ZERO_POINTS) {
            None => number(rw, wide, f64::from(1u32 << (bits - 1))),
            Some(id) => {
                let own = typed_input(rw, ZERO_POINTS)?.1;
                let numbers = if own == DType::U8 {
                    let size = self.zero_point_bytes();
                    let packed = reshape(rw, id, &[columns, size]);
                    let unpacked = unpack(rw, packed, bits, &[columns, size * 8 / bits]);
                    keep_first(rw, unpacked, blocks, size * 8 / bits)
                } else {
                    reshape(rw, id, &[columns, blocks])
                };
                cast(rw, numbers, own, wide)
            }
        };
        let has_zero_points = rw.input(ZERO_POINTS).is_some();
        let weights = if let Some(groups) = rw.input(GROUPS) {
            // The group of each row selects its scale and its zero point.
            let integers = unpack(rw, bytes, bits, &[columns, blocks * block]);
            let integers = keep_first(rw, integers, rows, blocks * block);
            let of_rows = |rw: &mut Rewrite<'_>, values: ValueId| {
                let values = reshape(rw, values, &[columns, blocks]);
                rw.add("Gather", &[values, groups], Attrs::new().with("axis", 1i64))
            };
            let scales = of_rows(rw, scales);
            let zero_points = if has_zero_points { of_rows(rw, zero_points) } else { zero_points };
            scaled_distance(rw, (integers, wide), zero_points, scales)
        } else {
            let integers = unpack(rw, bytes, bits, &[columns, blocks, block]);
            let of_blocks =
                |rw: &mut Rewrite<'_>, values: ValueId| reshape(rw, values, &[columns, blocks, 1]);
            let scales = of_blocks(rw, scales);
            let zero_points = if has_zero_points { of_blocks(rw, zero_points) } else { zero_points };
            let weights = scaled_distance(rw, (integers, wide), zero_points, scales);
            let weights = reshape(rw, weights, &[columns, blocks * block]);
            keep_first(rw, weights, rows, blocks * block)
        };
        Ok(cast(rw, weights, wide, dtype))
    }
}

/// Returns the shape of `a` with another last axis, which must have the size `from`.
fn with_last_axis(a: &Shape, from: usize, to: usize, weights: &str) -> Result<Shape, OpError> {
    let Some(last) = a.last() else {
        return Err(OpError::invalid("the input is a scalar; a matrix is needed"));
    };
    if last.known().is_some_and(|size| size != from) {
        return Err(OpError::invalid(format!(
            "the input has shape {a}, but {weights} needs a last axis of size {from}"
        )));
    }
    let mut result = a.clone();
    *result.0.last_mut().expect("checked above") = Dim::Known(to);
    Ok(result)
}

impl Op for MatMulNBits {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 6, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        cx.expect_dtype(1, "uint8", |dtype| dtype == DType::U8)?;
        cx.expect_same_dtype([0, SCALES, BIAS])?;
        check_scale_is_finite(cx, SCALES)?;
        let (columns, blocks) = (self.columns, self.blocks());
        let layout = format!(
            "{} columns of {} weights, in blocks of {} with {} bits",
            columns, self.rows, self.block, self.bits
        );
        let size = |parts: [usize; 2]| parts[0].saturating_mul(parts[1]);
        let bytes = size([columns, blocks * self.block * self.bits / 8]);
        check_count(cx, 1, bytes, &format!("the packed weights ({layout})"))?;
        check_count(cx, SCALES, size([columns, blocks]), &format!("the scale of each block ({layout})"))?;
        if cx.has_input(ZERO_POINTS) {
            let own = cx.dtype(ZERO_POINTS)?;
            let count = if own == DType::U8 {
                size([columns, self.zero_point_bytes()])
            } else if own == dtype {
                size([columns, blocks])
            } else {
                return Err(OpError::invalid(format!(
                    "the zero points, input {ZERO_POINTS}, are of type {own}, expected uint8 or {dtype}"
                )));
            };
            check_count(cx, ZERO_POINTS, count, &format!("the zero points ({layout})"))?;
        }
        if cx.has_input(GROUPS) {
            cx.expect_dtype(GROUPS, "int32", |dtype| dtype == DType::I32)?;
            check_count(cx, GROUPS, self.rows, "the group of each weight of a column (g_idx)")?;
            if let Some(groups) = cx.ints(GROUPS)
                && let Some(group) = groups.iter().find(|&&group| group < 0 || group >= blocks as i64)
            {
                return Err(OpError::invalid(format!(
                    "g_idx contains {group}, but there are {blocks} blocks"
                )));
            }
        }
        check_count(cx, BIAS, columns, "the bias")?;
        let weights = format!("a weight of shape [{}, {columns}]", self.rows);
        let shape = cx.shape(0).map(|a| with_last_axis(a, self.rows, columns, &weights)).transpose()?;
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

fn decompose_n_bits(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = MatMulNBits::read(rw.node())?;
    let (a, dtype) = typed_input(rw, 0)?;
    let weights = op.weights(rw, dtype)?;
    let attrs = Attrs::new().with("transB", 1i64);
    let mut result = rw.add_node(MICROSOFT, "FusedMatMul", &[Some(a), Some(weights)], 1, attrs)[0];
    if let Some(bias) = rw.input(BIAS) {
        result = emit(rw, "Add", &[result, bias]);
    }
    rw.replace_output(0, result);
    Ok(())
}

/// `MatMulBnb4`.
struct MatMulBnb4 {
    columns: usize,
    rows: usize,
    block: usize,
    table: [f64; 16],
    /// True if the product is with the transposed weights.
    transposed: bool,
}

impl MatMulBnb4 {
    fn read(node: &Node) -> Result<MatMulBnb4, OpError> {
        let attrs = &node.attrs;
        let table = match Attrs::required("quant_type", attrs.int("quant_type")?)? {
            0 => FP4,
            1 => NF4,
            other => {
                return Err(OpError::invalid(format!("quant_type must be 0 (FP4) or 1 (NF4), got {other}")));
            }
        };
        Ok(MatMulBnb4 {
            columns: positive(attrs, "N")?,
            rows: positive(attrs, "K")?,
            block: read_block(attrs, None)?,
            table,
            transposed: attrs.int("transB")?.unwrap_or(1) != 0,
        })
    }

    /// Number of weights.
    fn count(&self) -> usize {
        self.columns.saturating_mul(self.rows)
    }

    /// Adds the weights, of shape `[N, K]` and type `dtype`.
    fn weights(&self, rw: &mut Rewrite<'_>, dtype: DType) -> Result<ValueId, OpError> {
        let (count, wide) = (self.count(), arithmetic_dtype(dtype));
        let bytes = rw.required_input(1)?;
        let flat = reshape(rw, bytes, &[count.div_ceil(2)]);
        let integers = split_bytes(rw, flat, &[4, 0], 4);
        let integers = reshape(rw, integers, &[count.div_ceil(2) * 2]);
        let integers = keep_first(rw, integers, count, count.div_ceil(2) * 2);
        let at = cast(rw, integers, DType::U8, DType::I32);
        let table = rw.constant("table", Tensor::from_f64(wide, vec![self.table.len()], &self.table));
        let mut numbers = rw.add("Gather", &[table, at], Attrs::new().with("axis", 0i64));
        let blocks = count.div_ceil(self.block);
        let missing = blocks * self.block - count;
        if missing > 0 {
            let pads = rw.ints("pads", &[0, missing as i64]);
            numbers = emit(rw, "Pad", &[numbers, pads]);
        }
        let numbers = reshape(rw, numbers, &[blocks, self.block]);
        let scales = typed_input(rw, 2)?;
        let scales = cast(rw, scales.0, scales.1, wide);
        let scales = reshape(rw, scales, &[blocks, 1]);
        let scaled = emit(rw, "Mul", &[numbers, scales]);
        let flat = reshape(rw, scaled, &[blocks * self.block]);
        let flat = keep_first(rw, flat, count, blocks * self.block);
        let weights = reshape(rw, flat, &[self.columns, self.rows]);
        Ok(cast(rw, weights, wide, dtype))
    }
}

impl Op for MatMulBnb4 {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 3, 1)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype([0, 2])?;
        cx.expect_dtype(1, "uint8", |dtype| dtype == DType::U8)?;
        check_scale_is_finite(cx, 2)?;
        let (count, block) = (self.count(), self.block);
        let layout = format!("{} columns of {} weights with 4 bits", self.columns, self.rows);
        check_count(cx, 1, count.div_ceil(2), &format!("the packed weights ({layout})"))?;
        let blocks = count.div_ceil(block);
        check_count(cx, 2, blocks, &format!("the scale of each block of {block} ({layout})"))?;
        let (from, to) = if self.transposed { (self.rows, self.columns) } else { (self.columns, self.rows) };
        let weights = format!("a weight of shape [{from}, {to}]");
        let shape = cx.shape(0).map(|a| with_last_axis(a, from, to, &weights)).transpose()?;
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

fn decompose_bnb4(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = MatMulBnb4::read(rw.node())?;
    let (a, dtype) = typed_input(rw, 0)?;
    let weights = op.weights(rw, dtype)?;
    let attrs = Attrs::new().with("transB", i64::from(op.transposed));
    let result = rw.add_node(MICROSOFT, "FusedMatMul", &[Some(a), Some(weights)], 1, attrs)[0];
    rw.replace_output(0, result);
    Ok(())
}

/// Returns true for the types of tables.
fn is_table(dtype: DType) -> bool {
    dtype == DType::U8 || matches!(dtype, DType::Small(SmallType::U4 | SmallType::I4))
}

/// `GatherBlockQuantized`: rows of a table of packed integers, scaled. An index out of range gives zeros.
struct GatherBlockQuantized {
    bits: usize,
    block: usize,
    gather_axis: i64,
    quantize_axis: i64,
}

const INDICES: usize = 1;

impl GatherBlockQuantized {
    fn read(node: &Node) -> Result<GatherBlockQuantized, OpError> {
        let attrs = &node.attrs;
        Ok(GatherBlockQuantized {
            bits: read_bits(attrs, "bits", DEFAULT_BITS)?,
            block: read_block(attrs, Some(DEFAULT_BLOCK))?,
            gather_axis: attrs.int("gather_axis")?.unwrap_or(0),
            quantize_axis: attrs.int("quantize_axis")?.unwrap_or(1),
        })
    }

    /// Returns the bits of an integer in a table of this type: bytes hold several, 4-bit integers are elements.
    fn bits_in(&self, dtype: DType) -> usize {
        if dtype.is_small() { 8 } else { self.bits }
    }

    /// Returns the sizes of the table with one element for each integer.
    fn table_dims(&self, data: &Shape, dtype: DType) -> Result<Vec<usize>, OpError> {
        let Some(mut dims) = data.concrete() else {
            return Err(OpError::unsupported(format!(
                "the table has shape {data}, but its sizes must be known"
            )));
        };
        let rank = dims.len();
        if rank < 2
            || normalize_axis(self.gather_axis, rank)? != 0
            || normalize_axis(self.quantize_axis, rank)? != rank - 1
        {
            return Err(OpError::unsupported(format!(
                "a table of shape {data} with gather_axis {} and quantize_axis {} is not supported: rows must be \
                 selected along the first axis, and blocks must lie along the last axis",
                self.gather_axis, self.quantize_axis
            )));
        }
        dims[rank - 1] = dims[rank - 1].saturating_mul(8 / self.bits_in(dtype));
        if dims[rank - 1] as i64 > MAX_CONSTANT_POSITIONS {
            return Err(OpError::unsupported(format!(
                "a table of shape {data} has rows of more than {MAX_CONSTANT_POSITIONS} elements"
            )));
        }
        Ok(dims)
    }
}

impl Op for GatherBlockQuantized {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 4, 1)?;
        let of_data = cx.expect_dtype(0, "uint8, uint4 or int4", is_table)?;
        cx.expect_dtype(INDICES, "int32 or int64", |dtype| matches!(dtype, DType::I32 | DType::I64))?;
        let dtype = cx.expect_dtype(SCALES, "a float type", DType::is_float)?;
        check_scale_is_finite(cx, SCALES)?;
        let Some(data) = cx.shape(0) else {
            return Err(OpError::unsupported("the shape of the table must be known"));
        };
        let dims = self.table_dims(data, of_data)?;
        let (last, lead) = dims.split_last().expect("the table has two axes");
        let (rows, blocks) = (product_of_sizes(lead.iter().copied()) as usize, last.div_ceil(self.block));
        check_count(cx, SCALES, rows.saturating_mul(blocks), "the scale of each block")?;
        if cx.has_input(ZERO_POINTS) {
            cx.expect_same_dtype([0, ZERO_POINTS])?;
            let count = rows.saturating_mul((blocks * self.bits_in(of_data)).div_ceil(8));
            check_count(cx, ZERO_POINTS, count, "the zero points")?;
        }
        let shape = cx.shape(INDICES).map(|indices| {
            indices.iter().cloned().chain(dims[1..].iter().map(|&size| Dim::Known(size))).collect::<Shape>()
        });
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

fn decompose_gather(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = GatherBlockQuantized::read(rw.node())?;
    let ((data, of_data), indices) = (typed_input(rw, 0)?, typed_input(rw, INDICES)?);
    let bits = op.bits_in(of_data);
    let (scales, dtype) = typed_input(rw, SCALES)?;
    let shape = rw
        .shape(data)
        .cloned()
        .ok_or_else(|| OpError::unsupported("the shape of the table must be known"))?;
    let dims = op.table_dims(&shape, of_data)?;
    let wide = arithmetic_dtype(dtype);
    let (rank, rows, last) = (dims.len(), dims[0], dims[dims.len() - 1]);
    let blocks = last.div_ceil(op.block);
    // An index out of range selects row 0; zeros replace the row at the end.
    let limits = [-(rows as f64), rows as f64, 0.0].map(|at| number(rw, indices.1, at));
    let above = emit(rw, "GreaterOrEqual", &[indices.0, limits[0]]);
    let below = emit(rw, "Less", &[indices.0, limits[1]]);
    let inside = emit(rw, "And", &[above, below]);
    let chosen = emit(rw, "Where", &[inside, indices.0, limits[2]]);
    let select = |rw: &mut Rewrite<'_>, table: ValueId| {
        rw.add("Gather", &[table, chosen], Attrs::new().with("axis", 0i64))
    };
    // Selected rows have the axes of the indices, then these axes, the last one divided into blocks.
    let tail = |last: &[usize]| -> Vec<i64> {
        dims[1..rank - 1].iter().chain(last).map(|&size| size as i64).collect()
    };
    let index_sizes = emit(rw, "Shape", &[indices.0]);
    let to_tail = |rw: &mut Rewrite<'_>, value: ValueId, last: &[usize]| {
        let tail = rw.ints("tail", &tail(last));
        let shape = rw.add("Concat", &[index_sizes, tail], Attrs::new().with("axis", 0i64));
        emit(rw, "Reshape", &[value, shape])
    };
    let unpacked = |rw: &mut Rewrite<'_>, bytes: ValueId, count: usize| {
        let integers = split_bytes(rw, bytes, &low_bits_first(bits), bits);
        to_tail(rw, integers, &[count])
    };
    let bytes = select(rw, data);
    let integers = unpacked(rw, bytes, last);
    // Each element of the last axis reads the scale of its block.
    let block_of: Vec<i64> = (0..last).map(|at| (at / op.block) as i64).collect();
    let block_of = rw.ints("block", &block_of);
    let of_elements = |rw: &mut Rewrite<'_>, values: ValueId| {
        rw.add("Gather", &[values, block_of], Attrs::new().with("axis", -1i64))
    };
    let scales = reshape(rw, scales, &[&dims[..rank - 1], &[blocks]].concat());
    let scales = select(rw, scales);
    let scales = cast(rw, scales, dtype, wide);
    let scales = of_elements(rw, scales);
    let zero_points = match rw.input(ZERO_POINTS) {
        None if of_data.is_small() => number(rw, wide, 0.0),
        None => number(rw, wide, f64::from(1u32 << (bits - 1))),
        Some(id) => {
            let size = (blocks * bits).div_ceil(8);
            let packed = reshape(rw, id, &[&dims[..rank - 1], &[size]].concat());
            let packed = select(rw, packed);
            let all = unpacked(rw, packed, size * 8 / bits);
            let all = keep_first(rw, all, blocks, size * 8 / bits);
            let all = cast(rw, all, of_data, wide);
            of_elements(rw, all)
        }
    };
    let integers = cast(rw, integers, of_data, wide);
    let distance = emit(rw, "Sub", &[integers, zero_points]);
    let result = emit(rw, "Mul", &[distance, scales]);
    let axes: Vec<i64> = (1..rank as i64).map(|back| -back).collect();
    let axes = rw.ints("axes", &axes);
    let inside = emit(rw, "Unsqueeze", &[inside, axes]);
    let zero = number(rw, wide, 0.0);
    let result = emit(rw, "Where", &[inside, result, zero]);
    let result = cast(rw, result, wide, dtype);
    rw.replace_output(0, result);
    Ok(())
}

fn build_n_bits(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(MatMulNBits::read(node)?))
}

fn build_bnb4(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(MatMulBnb4::read(node)?))
}

fn build_gather(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(GatherBlockQuantized::read(node)?))
}

fn sample_n_bits(_: &Definition) -> Sample {
    let attrs = Attrs::new().with("N", 1i64).with("K", 16i64).with("block_size", 16i64);
    Sample::with_inputs(attrs, &[(DType::F32, &[2, 16]), (DType::U8, &[1, 1, 8]), (DType::F32, &[1])])
}

fn sample_bnb4(_: &Definition) -> Sample {
    let attrs =
        Attrs::new().with("N", 1i64).with("K", 16i64).with("block_size", 16i64).with("quant_type", 1i64);
    Sample::with_inputs(attrs, &[(DType::F32, &[2, 16]), (DType::U8, &[8]), (DType::F32, &[1])])
}

fn sample_gather(_: &Definition) -> Sample {
    let attrs = Attrs::new().with("block_size", 16i64);
    Sample::with_inputs(attrs, &[(DType::U8, &[2, 8]), (DType::I64, &[1]), (DType::F32, &[2, 1])])
}

pub(super) fn definitions() -> Vec<Definition> {
    let new = |name: &'static str, build| Definition::new(MICROSOFT, name, &[1], build);
    vec![
        new("MatMulNBits", build_n_bits)
            .composition(decompose_n_bits)
            .scales(&[SCALES, ZERO_POINTS])
            .weights(&[BIAS])
            .sample(sample_n_bits),
        new("MatMulBnb4", build_bnb4).composition(decompose_bnb4).scales(&[2]).sample(sample_bnb4),
        new("GatherBlockQuantized", build_gather)
            .composition(decompose_gather)
            .scales(&[SCALES])
            .sample(sample_gather),
    ]
}
