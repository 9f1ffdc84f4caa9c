//! Rows of a table of packed integers: `GatherBlockQuantized` of `com.microsoft`, version 1.
//!
//! Bytes hold several integers, the lowest bits first. A block of adjacent elements of a row shares a scale. The
//! operator is a composition of a selection, the unpacking and the scaling, so gradients reach the scales; the integers
//! stay fixed.
//!
//! Limits: the shape of the table is known, and blocks lie along its last axis.

use ortrain_expr::product_of_sizes;
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, SmallType, ValueId};

use crate::OpError;
use crate::infer::{Infer, normalize_axis};
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::{arithmetic_dtype, cast};
use crate::support::packed_integers::{
    check_count, check_scale_is_finite, keep_first, low_bits_first, read_bits, read_block, reshape,
    split_bytes,
};
use crate::support::quantization_grid::{emit, number, typed_input};
use crate::support::sizes::MAX_CONSTANT_POSITIONS;

const MICROSOFT: &str = "com.microsoft";
/// Bits of an integer without the attribute `bits`.
const DEFAULT_BITS: usize = 4;
const SCALES: usize = 2;
const ZERO_POINTS: usize = 3;
/// Elements of a block of `GatherBlockQuantized` without the attribute.
const DEFAULT_BLOCK: i64 = 128;

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

fn build_gather(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(GatherBlockQuantized::read(node)?))
}

fn sample_gather(_: &Definition) -> Sample {
    let attrs = Attrs::new().with("block_size", 16i64);
    Sample::with_inputs(attrs, &[(DType::U8, &[2, 8]), (DType::I64, &[1]), (DType::F32, &[2, 1])])
}

pub(super) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new(MICROSOFT, "GatherBlockQuantized", &[1], build_gather)
            .composition(decompose_gather)
            .scales(&[SCALES])
            .weights(&[0])
            .sample(sample_gather),
    ]
}
