//! Products with weights of a few bits in blocks: `MatMulNBits` and `MatMulBnb4` of `com.microsoft`, version 1.
//!
//! Bytes hold several integers. `MatMulNBits` takes the lowest bits of a byte first. `MatMulBnb4` takes the highest
//! first, and its integers select a number from a table (QLoRA, Dettmers et al. 2023, arXiv:2305.14314). A block of
//! adjacent weights shares a scale. Instructions decode the integers as they read them. Gradients reach the input, the
//! bias and the scales; the integers stay fixed.
//!
//! A `MatMulNBits` of a file is rewritten: zero points become floats, and an `Add` for the bias follows. The rewritten
//! node has the attribute `transB` of `MatMulBnb4`. The value 0 means the product with the weights `[N, K]` without a
//! transposition, which computes the gradient of the input. In a rewritten node, scales and zero points can have another
//! float type than the input, and blocks can have any multiple of 16 elements.
//!
//! Limits: the inputs with integers have known shapes; weights that are packed for one GPU (`weight_prepacked`) are
//! refused. With `g_idx`, with float64, or if a block of `MatMulBnb4` belongs to several columns, the weights are
//! unpacked whole.

use ortrain_expr::{Precision, QuantizedMatrix, QuantizedNumbers, product_of_sizes};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};
use ortrain_program::{BufferId, Instruction, QuantizedFactor, QuantizedMatMul};

use crate::OpError;
use crate::class::Class;
use crate::grad::Grad;
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::{Definition, NO_GRADIENT, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::{arithmetic_dtype, cast};
use crate::support::packed_integers::{
    PackedWeights, TRANSPOSED, check_count, check_scale_is_finite, keep_first, low_bits_first, positive,
    read_bits, read_block, read_instruction_block, reshape, scaled_distance, split_bytes, unpack,
};
use crate::support::quantization_grid::{emit, number, typed_input};
use crate::support::weight_grids::{FP4, NF4};

const MICROSOFT: &str = "com.microsoft";
/// Bits of an integer without the attribute `bits`.
const DEFAULT_BITS: usize = 4;

/// `MatMulNBits`.
struct MatMulNBits {
    weights: PackedWeights,
    /// True if the product is with the transposed weights, as in every model of a file.
    transposed: bool,
    /// True for a node in the form that instructions compute.
    is_prepared: bool,
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
        let is_prepared = is_prepared(node);
        let weights = PackedWeights {
            columns: positive(attrs, "N")?,
            rows: positive(attrs, "K")?,
            bits: read_bits(attrs, "bits", DEFAULT_BITS)?,
            block: if is_prepared { read_instruction_block(attrs)? } else { read_block(attrs, None)? },
        };
        Ok(MatMulNBits { weights, transposed: attrs.int(TRANSPOSED)?.unwrap_or(1) != 0, is_prepared })
    }

    /// Returns the layout of the weights.
    fn matrix(&self) -> QuantizedMatrix {
        let PackedWeights { columns, bits, block, .. } = self.weights;
        let zero_point = f32::from(1u16 << (bits - 1));
        QuantizedMatrix {
            bits,
            is_high_first: false,
            block,
            blocks: self.weights.blocks(),
            lines: columns,
            numbers: QuantizedNumbers::Distances { zero_point },
        }
    }

    /// Bytes of the zero points of a column.
    fn zero_point_bytes(&self) -> usize {
        (self.weights.blocks() * self.weights.bits).div_ceil(8)
    }

    /// Adds the zero point of each block as a float, of shape `[N, blocks]`.
    fn zero_points(&self, rw: &mut Rewrite<'_>, dtype: DType) -> Result<ValueId, OpError> {
        let PackedWeights { columns, bits, .. } = self.weights;
        let blocks = self.weights.blocks();
        let (id, own) = typed_input(rw, ZERO_POINTS)?;
        let numbers = if own == DType::U8 {
            let size = self.zero_point_bytes();
            let packed = reshape(rw, id, &[columns, size]);
            let unpacked = unpack(rw, packed, bits, &[columns, size * 8 / bits]);
            keep_first(rw, unpacked, blocks, size * 8 / bits)
        } else {
            reshape(rw, id, &[columns, blocks])
        };
        Ok(cast(rw, numbers, own, dtype))
    }

    /// Adds the weights, of shape `[N, K]` and type `dtype`.
    fn weights(&self, rw: &mut Rewrite<'_>, dtype: DType) -> Result<ValueId, OpError> {
        let PackedWeights { columns, rows, bits, block } = self.weights;
        let blocks = self.weights.blocks();
        let wide = arithmetic_dtype(dtype);
        let bytes = rw.required_input(1)?;
        let bytes = reshape(rw, bytes, &[columns, blocks, block * bits / 8]);
        let scales = typed_input(rw, SCALES)?;
        let scales = cast(rw, scales.0, scales.1, wide);
        let zero_points = match rw.input(ZERO_POINTS) {
            None => number(rw, wide, f64::from(1u32 << (bits - 1))),
            Some(_) => self.zero_points(rw, wide)?,
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
        cx.expect_same_dtype([0, BIAS])?;
        if self.is_prepared {
            cx.expect_dtype(SCALES, "a float type", DType::is_float)?;
        } else {
            cx.expect_same_dtype([0, SCALES])?;
        }
        check_scale_is_finite(cx, SCALES)?;
        let PackedWeights { columns, rows, bits, block } = self.weights;
        let blocks = self.weights.blocks();
        let layout = format!("{columns} columns of {rows} weights, in blocks of {block} with {bits} bits");
        let size = |parts: [usize; 2]| parts[0].saturating_mul(parts[1]);
        let bytes = size([columns, blocks * block * bits / 8]);
        check_count(cx, 1, bytes, &format!("the packed weights ({layout})"))?;
        check_count(cx, SCALES, size([columns, blocks]), &format!("the scale of each block ({layout})"))?;
        if cx.has_input(ZERO_POINTS) {
            let own = cx.dtype(ZERO_POINTS)?;
            let count = if own == DType::U8 {
                size([columns, self.zero_point_bytes()])
            } else if own == dtype || self.is_prepared && own.is_float() {
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
            check_count(cx, GROUPS, rows, "the group of each weight of a column (g_idx)")?;
            if let Some(groups) = cx.ints(GROUPS)
                && let Some(group) = groups.iter().find(|&&group| group < 0 || group >= blocks as i64)
            {
                return Err(OpError::invalid(format!(
                    "g_idx contains {group}, but there are {blocks} blocks"
                )));
            }
        }
        check_count(cx, BIAS, columns, "the bias")?;
        if self.is_prepared
            && (cx.has_input(GROUPS)
                || cx.has_input(BIAS)
                || cx.has_input(ZERO_POINTS) && cx.dtype(ZERO_POINTS)? == DType::U8)
        {
            return Err(OpError::invalid(format!(
                "with the attribute {TRANSPOSED}, zero points must be floats, and g_idx and bias must be absent"
            )));
        }
        let (from, to) = if self.transposed { (rows, columns) } else { (columns, rows) };
        let weights = format!("a weight of shape [{from}, {to}]");
        let shape = cx.shape(0).map(|a| with_last_axis(a, from, to, &weights)).transpose()?;
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        differentiate(cx, &self.matrix(), self.transposed, self.weights.rows)
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        if !self.is_prepared || cx.dtype(0) == DType::F64 {
            return cx.lower_decomposition();
        }
        emit_product(cx, self.matrix(), self.transposed, self.weights.rows)
    }
}

/// Returns true if a node has the form that instructions compute: zero points are floats, and there are neither `g_idx`
/// nor a bias.
fn is_prepared(node: &Node) -> bool {
    node.attrs.int(TRANSPOSED).is_ok_and(|value| value.is_some())
}

fn decompose_n_bits(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = MatMulNBits::read(rw.node())?;
    let (a, dtype) = typed_input(rw, 0)?;
    let has_instruction = dtype != DType::F64 && rw.input(GROUPS).is_none();
    let mut result = if op.is_prepared || !has_instruction {
        let weights = op.weights(rw, dtype)?;
        let attrs = Attrs::new().with("transB", i64::from(op.transposed));
        rw.add_node(MICROSOFT, "FusedMatMul", &[Some(a), Some(weights)], 1, attrs)[0]
    } else {
        let zero_points = match rw.input(ZERO_POINTS) {
            Some(_) => Some(op.zero_points(rw, dtype)?),
            None => None,
        };
        let (bytes, scales) = (rw.required_input(1)?, rw.required_input(SCALES)?);
        op.weights.product(rw, [a, bytes, scales], zero_points)
    };
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

    /// Returns the layout of the weights, if every block belongs to one column.
    fn matrix(&self) -> Option<QuantizedMatrix> {
        self.rows.is_multiple_of(self.block).then(|| QuantizedMatrix {
            bits: 4,
            is_high_first: true,
            block: self.block,
            blocks: self.rows / self.block,
            lines: self.columns,
            numbers: QuantizedNumbers::Table(self.table.map(|number| number as f32)),
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

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(matrix) = self.matrix() else { return Err(OpError::unsupported(NO_GRADIENT)) };
        differentiate(cx, &matrix, self.transposed, self.rows)
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        match self.matrix().filter(|_| cx.dtype(0) != DType::F64) {
            Some(matrix) => emit_product(cx, matrix, self.transposed, self.rows),
            None => cx.lower_decomposition(),
        }
    }
}

/// Returns true if a block belongs to more than one column.
fn has_shared_blocks(node: &Node) -> bool {
    MatMulBnb4::read(node).is_ok_and(|op| op.matrix().is_none())
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

/// Returns input `k` as float32, converted if necessary.
fn float32_input(cx: &mut Lower<'_>, k: usize, name: &str) -> Result<BufferId, OpError> {
    let input = cx.input(k);
    if cx.buffer_dtype(input) == DType::F32 {
        return Ok(input);
    }
    let len = cx.buffer_len(input);
    let converted = cx.alloc_temp(name, DType::F32, len);
    let mut nest = cx.nest(&[len], 0);
    let value = nest.load_broadcast(input, cx.buffer_dtype(input), &[len]);
    nest.store_contiguous(cx, converted, value);
    cx.emit(nest.instruction())?;
    Ok(converted)
}

/// Emits the product of input 0 and the packed weights, of shape `[lines, rows]`.
fn emit_product(
    cx: &mut Lower<'_>,
    matrix: QuantizedMatrix,
    transposed: bool,
    rows: usize,
) -> Result<(), OpError> {
    let dtype = cx.dtype(0);
    let dims = cx.dims(0);
    let (_, lead) = dims.split_last().expect("checked by inference");
    let m = product_of_sizes(lead.iter().copied()) as usize;
    let (k, n) = if transposed { (rows, matrix.lines) } else { (matrix.lines, rows) };
    let (bytes, scales) = (cx.input(1), float32_input(cx, SCALES, "scales")?);
    let zero_points = match cx.has_input(ZERO_POINTS) {
        true => Some(float32_input(cx, ZERO_POINTS, "zero_points")?),
        false => None,
    };
    let a = cx.input(0);
    let a = cx.operand(a, &[m, k]);
    let b = QuantizedFactor {
        matrix,
        has_lines_of_columns: transposed,
        bytes,
        scales,
        zero_points,
        rounded: Some(dtype).filter(|&dtype| dtype != DType::F32),
    };
    let mut nest = cx.nest(&[m, n], 0);
    let value = nest.accumulator(DType::F32);
    let output = cx.output(0);
    nest.store_contiguous(cx, output, value);
    let (precision, epilogue) = (Precision::F32, nest.finish());
    cx.emit(Instruction::from(QuantizedMatMul { m, n, k, a, b, precision, epilogue }))
}

/// Adds the gradients of a product with packed weights, of shape `[lines, rows]`.
fn differentiate(
    cx: &mut Grad<'_>,
    matrix: &QuantizedMatrix,
    transposed: bool,
    rows: usize,
) -> Result<(), OpError> {
    let Some(g) = cx.output_grad(0) else { return Ok(()) };
    let (a, bytes, scales) = (cx.input(0)?, cx.input(1)?, cx.input(SCALES)?);
    let zero_points = cx.optional_input(ZERO_POINTS);
    if cx.needs_grad(0) {
        let attrs = cx.node().attrs.clone().with(TRANSPOSED, i64::from(!transposed));
        let inputs: Vec<ValueId> = [g, bytes, scales].into_iter().chain(zero_points).collect();
        let op = cx.node().op.to_string();
        let gradient = cx.add_in(MICROSOFT, &op, &inputs, attrs);
        cx.set_grad(0, gradient);
    }
    if !cx.needs_grad(SCALES) && !cx.needs_grad(ZERO_POINTS) {
        return Ok(());
    }
    let dtype = cx.dtype(a)?;
    let wide = arithmetic_dtype(dtype);
    let &QuantizedMatrix { bits, block, blocks, lines, .. } = matrix;
    let (inner, outer) = if transposed { (rows, lines) } else { (lines, rows) };
    let matrix_of = |cx: &mut Grad<'_>, value: ValueId, size: usize| {
        let value = cast(cx, value, dtype, wide);
        let shape = cx.ints("rows", &[-1, size as i64]);
        emit(cx, "Reshape", &[value, shape])
    };
    let (a, g) = (matrix_of(cx, a, inner), matrix_of(cx, g, outer));
    let factors = if transposed { [g, a] } else { [a, g] };
    let mut of_weights = cx.add("Gemm", &factors, Attrs::new().with("transA", 1i64));
    if rows < matrix.line_len() {
        let pads = cx.ints("pads", &[0, 0, 0, (matrix.line_len() - rows) as i64]);
        of_weights = emit(cx, "Pad", &[of_weights, pads]);
    }
    let of_weights = reshape(cx, of_weights, &[lines, blocks, block]);
    let axis = cx.ints("axis", &[-1]);
    let sum_of_blocks = |cx: &mut Grad<'_>, values: ValueId| {
        cx.add("ReduceSum", &[values, axis], Attrs::new().with("keepdims", 0i64))
    };
    let finish = |cx: &mut Grad<'_>, k: usize, gradient: ValueId| -> Result<(), OpError> {
        let input = cx.input(k)?;
        let shape = cx.shape_of(input);
        let gradient = emit(cx, "Reshape", &[gradient, shape]);
        let own = cx.dtype(input)?;
        let gradient = cast(cx, gradient, wide, own);
        cx.set_grad(k, gradient);
        Ok(())
    };
    if cx.needs_grad(SCALES) {
        let mut shifts = low_bits_first(bits);
        if matrix.is_high_first {
            shifts.reverse();
        }
        let flat = reshape(cx, bytes, &[matrix.num_bytes()]);
        let integers = split_bytes(cx, flat, &shifts, bits);
        let integers = reshape(cx, integers, &[lines, blocks, block]);
        let numbers = match &matrix.numbers {
            QuantizedNumbers::Table(numbers) => {
                let numbers: Vec<f64> = numbers.iter().map(|&number| f64::from(number)).collect();
                let table = cx.constant("table", Tensor::from_f64(wide, vec![numbers.len()], &numbers));
                let at = cast(cx, integers, DType::U8, DType::I32);
                cx.add("Gather", &[table, at], Attrs::new().with("axis", 0i64))
            }
            QuantizedNumbers::Distances { zero_point } => {
                let own = match zero_points {
                    Some(id) => {
                        let of_zero_points = cx.dtype(id)?;
                        let own = reshape(cx, id, &[lines, blocks, 1]);
                        cast(cx, own, of_zero_points, wide)
                    }
                    None => number(cx, wide, f64::from(*zero_point)),
                };
                let integers = cast(cx, integers, DType::U8, wide);
                emit(cx, "Sub", &[integers, own])
            }
        };
        let each = emit(cx, "Mul", &[of_weights, numbers]);
        let total = sum_of_blocks(cx, each);
        finish(cx, SCALES, total)?;
    }
    if cx.needs_grad(ZERO_POINTS) {
        let total = sum_of_blocks(cx, of_weights);
        let of_scales = cx.dtype(scales)?;
        let scales = reshape(cx, scales, &[lines, blocks]);
        let scales = cast(cx, scales, of_scales, wide);
        let gradient = emit(cx, "Mul", &[total, scales]);
        let gradient = emit(cx, "Neg", &[gradient]);
        finish(cx, ZERO_POINTS, gradient)?;
    }
    Ok(())
}

fn build_n_bits(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(MatMulNBits::read(node)?))
}

fn build_bnb4(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(MatMulBnb4::read(node)?))
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

pub(super) fn definitions() -> Vec<Definition> {
    let new = |name: &'static str, build| Definition::new(MICROSOFT, name, &[1], build);
    vec![
        new("MatMulNBits", build_n_bits)
            .class(Class::PackedProduct)
            .decompose(decompose_n_bits)
            .composition_where(|node| !is_prepared(node))
            .scales(&[SCALES, ZERO_POINTS])
            .weights(&[1, BIAS])
            .sample(sample_n_bits),
        new("MatMulBnb4", build_bnb4)
            .class(Class::PackedProduct)
            .decompose(decompose_bnb4)
            .composition_where(has_shared_blocks)
            .scales(&[2])
            .weights(&[1])
            .sample(sample_bnb4),
    ]
}
