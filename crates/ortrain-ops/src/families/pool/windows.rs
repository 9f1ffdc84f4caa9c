//! Windows of a pooling.

use ortrain_expr::{BinaryOp, Builder, CompareOp, Reg, SlidingAxes, Type, WindowPass, WindowShape};
use ortrain_graph::{Attrs, DType, Dim, Node, Shape, Tensor};
use ortrain_program::BufferId;

use crate::OpError;
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::Definition;
use crate::sample::Sample;
use crate::sliding::{AutoPad, Sliding};

/// Windows of a pool: sliding windows, or one window over each plane.
pub(super) struct Windows {
    /// Parameters of the sliding windows; `None` for one window over each plane.
    pub(super) sliding: Option<Sliding>,
}

impl Windows {
    pub(super) fn read(node: &Node) -> Result<Windows, OpError> {
        let sliding = Sliding::read(&node.attrs)?;
        if sliding.kernel.is_none() {
            return Err(OpError::invalid("kernel_shape is missing: the size of the window"));
        }
        Ok(Windows { sliding: Some(sliding) })
    }

    /// Returns the shape of the pooled result of an input of shape `shape`.
    pub(super) fn infer_outputs(&self, cx: &Infer<'_>, shape: &Shape) -> Result<Shape, OpError> {
        let Some(sliding) = &self.sliding else {
            if shape.rank() < 3 {
                let message = format!(
                    "an input has shape {shape}, expected batch, channels and at least one spatial axis"
                );
                return Err(OpError::invalid(message));
            }
            let ones = (2..shape.rank()).map(|_| Dim::Known(1));
            return Ok(shape.iter().take(2).cloned().chain(ones).collect());
        };
        sliding.check(shape)?;
        let kernel: Vec<Dim> = self.kernel().into_iter().map(Dim::Known).collect();
        let spatial = sliding.output_sizes(&kernel, shape, |axis| cx.unknown_dim(0, axis))?;
        Ok(shape.iter().take(2).cloned().chain(spatial).collect())
    }

    /// Checks that a gradient has the shape of the pooled result of an input of shape `shape`.
    pub(super) fn check_gradient(
        &self,
        cx: &Infer<'_>,
        shape: &Shape,
        gradient: &Shape,
    ) -> Result<(), OpError> {
        let outputs = self.infer_outputs(cx, shape)?;
        if are_known_to_differ(&outputs, gradient) {
            return Err(OpError::invalid(format!(
                "the gradient has shape {gradient}, but {shape} is pooled to {outputs}"
            )));
        }
        Ok(())
    }

    pub(super) fn kernel(&self) -> Vec<usize> {
        let kernel = self.sliding.as_ref().and_then(|sliding| sliding.kernel.as_deref()).unwrap_or_default();
        // Sizes are at least 1. A size that does not fit `usize` is an error when the positions are computed.
        kernel.iter().map(|&size| usize::try_from(size).unwrap_or(usize::MAX)).collect()
    }

    /// Returns the spatial axes for an input of shape `dims`.
    pub(super) fn axes(&self, dims: &[usize]) -> Result<SlidingAxes, OpError> {
        let global_axis = |&size: &usize| ortrain_expr::SlidingAxis {
            input: size,
            output: 1,
            kernel: size,
            stride: 1,
            dilation: 1,
            padding_before: 0,
        };
        match &self.sliding {
            Some(sliding) => sliding.axes(&self.kernel(), dims),
            None => Ok(dims[2..].iter().map(global_axis).collect()),
        }
    }

    pub(super) fn window_shape(&self, pass: WindowPass, dims: &[usize]) -> Result<WindowShape, OpError> {
        let planes = dims[0].checked_mul(dims[1]).ok_or_else(|| {
            OpError::invalid(format!("{} images of {} channels are too many to count", dims[0], dims[1]))
        })?;
        Ok(WindowShape { pass, planes, axes: self.axes(dims)? })
    }
}

/// Returns attributes with a window along one axis.
pub(super) fn window_sample(_: &Definition) -> Sample {
    Sample::of(Attrs::new().with("kernel_shape", vec![2i64]))
}

/// Maximum number of windows per plane with element counts in a constant. For more windows, each step computes the
/// counts.
pub(super) const MAX_CONSTANT_COUNTS: usize = 1 << 20;

/// Returns the factor of the sum over a window of `count` elements; 0 for a window without elements.
pub(super) fn inverse_count(count: f64) -> f64 {
    if count > 0.0 { 1.0 / count } else { 0.0 }
}

/// Average under each window.
pub(super) struct AveragePool {
    pub(super) windows: Windows,
    pub(super) include_padding: bool,
}

impl AveragePool {
    /// Returns the number of elements along an axis that each window counts.
    pub(super) fn counts_along(&self, k: usize, axes: &SlidingAxes) -> Vec<f64> {
        let axis = axes[k];
        // Explicit padding counts up to its end, and a window of `ceil_mode` may extend beyond the end. With automatic
        // padding no window extends beyond the end.
        let end = i128::from(self.counted_end(k, axes).unwrap_or(i64::MAX));
        let count = |o: usize| -> f64 {
            if !self.include_padding {
                return axis.cells_over_input(o).len() as f64;
            }
            let start = (o * axis.stride) as i128 - axis.padding_before as i128;
            let step = axis.dilation as i128;
            // Counts the kernel elements that start before the end.
            ((end - start).max(0) as u128).div_ceil(step as u128).min(axis.kernel as u128) as f64
        };
        (0..axis.output).map(count).collect()
    }

    /// Returns the number of elements that each window counts, row-major over the output positions.
    pub(super) fn counts(&self, axes: &SlidingAxes) -> Vec<f64> {
        (0..axes.len()).fold(vec![1.0], |products, k| {
            let axis_counts = self.counts_along(k, axes);
            products.iter().flat_map(|outer| axis_counts.iter().map(move |inner| outer * inner)).collect()
        })
    }

    /// Returns the factor of each sum, if there are at most `limit` sums. Windows without elements have the factor 0.
    pub(super) fn factors(&self, axes: &SlidingAxes, limit: usize) -> Option<Vec<f64>> {
        let count = axes.iter().try_fold(1usize, |count, axis| count.checked_mul(axis.output));
        count.filter(|&count| count <= limit)?;
        Some(self.counts(axes).into_iter().map(inverse_count).collect())
    }

    /// Returns the end of the positions that count along an axis, if a window may extend beyond the end.
    pub(super) fn counted_end(&self, k: usize, axes: &SlidingAxes) -> Option<i64> {
        let input = axes[k].input as i64;
        match &self.windows.sliding {
            Some(sliding) if sliding.auto_pad == AutoPad::NotSet => {
                Some(input.saturating_add(sliding.padding(k, axes.len()).1))
            }
            Some(sliding) if sliding.auto_pad == AutoPad::Valid => Some(input),
            _ => None,
        }
    }

    /// Computes the factors in each step, because they are too many for a constant of the program.
    pub(super) fn emit_factors(
        &self,
        cx: &mut Lower<'_>,
        dtype: DType,
        axes: &SlidingAxes,
    ) -> Result<BufferId, OpError> {
        let outputs: Vec<usize> = axes.iter().map(|axis| axis.output).collect();
        let mut nest = cx.nest(&outputs, 0);
        let b = &mut nest.b;
        let mut count = b.constant(Type::F64, 1.0);
        for (k, axis) in axes.iter().enumerate() {
            let (zero, kernel) = (b.int(0), b.int(axis.kernel as i64));
            let (stride, before) = (b.int(axis.stride as i64), b.int(axis.padding_before as i64));
            let (step, carry) = (b.int(axis.dilation as i64), b.int(axis.dilation as i64 - 1));
            let position = b.coordinate(k);
            let moved = b.mul(position, stride);
            let start = b.sub(moved, before);
            // Index of the first kernel element at or after a position.
            let first_cell = |b: &mut Builder, position: Reg| {
                let distance = b.sub(position, start);
                let distance = b.binary(BinaryOp::Max, distance, zero);
                let carried = b.add(distance, carry);
                let cell = b.div(carried, step);
                b.binary(BinaryOp::Min, cell, kernel)
            };
            let cells = if !self.include_padding {
                let input = b.int(axis.input as i64);
                let (from, to) = (first_cell(b, zero), first_cell(b, input));
                b.sub(to, from)
            } else if let Some(end) = self.counted_end(k, axes) {
                let end = b.int(end);
                first_cell(b, end)
            } else {
                kernel
            };
            let cells = b.convert(cells, Type::F64);
            count = b.mul(count, cells);
        }
        let (zero, one) = (b.constant(Type::F64, 0.0), b.constant(Type::F64, 1.0));
        let is_positive = b.compare(CompareOp::Lt, zero, count);
        let inverse = b.div(one, count);
        let factor = b.select(is_positive, inverse, zero);
        let factor = b.convert(factor, Type::of(dtype));
        let table = cx.alloc_temp("one_over_count", dtype, outputs.iter().product());
        nest.store_contiguous(cx, table, factor);
        cx.emit(nest.instruction())?;
        Ok(table)
    }

    /// Multiplies a value over `dims` by the factors.
    pub(super) fn emit_scaled(
        &self,
        cx: &mut Lower<'_>,
        (source, target): (BufferId, BufferId),
        dims: &[usize],
        axes: &SlidingAxes,
    ) -> Result<(), OpError> {
        let dtype = cx.buffer_dtype(source);
        let exact = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let factors = self.factors(axes, MAX_CONSTANT_COUNTS);
        let computed = match &factors {
            Some(_) => None,
            None => Some(self.emit_factors(cx, exact, axes)?),
        };
        let mut nest = cx.nest(dims, 0);
        let access = cx.contiguous_access(source, dims);
        let value = nest.load(source, access);
        let ty = nest.b.ty(value);
        let factor = match (&factors, computed) {
            (Some(factors), _) if factors.windows(2).all(|pair| pair[0] == pair[1]) => {
                nest.b.constant(ty, factors.first().copied().unwrap_or(0.0))
            }
            (factors, computed) => {
                let table = computed.unwrap_or_else(|| {
                    let factors = factors.as_deref().unwrap_or_default();
                    cx.constant_buffer(
                        "one_over_count",
                        &Tensor::from_f64(exact, dims[2..].to_vec(), factors),
                    )
                });
                nest.load_broadcast(table, exact, &dims[2..])
            }
        };
        let scaled = nest.b.mul(value, factor);
        nest.store_contiguous(cx, target, scaled);
        cx.emit(nest.instruction())
    }
}

pub(super) fn read_average(node: &Node) -> Result<AveragePool, OpError> {
    let include_padding = node.attrs.int("count_include_pad")?.unwrap_or(0) != 0;
    Ok(AveragePool { windows: Windows::read(node)?, include_padding })
}

/// Returns the type of sums: float32, or float64 for float64.
pub(super) fn sum_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Returns true if two shapes are known to differ.
pub(super) fn are_known_to_differ(a: &Shape, b: &Shape) -> bool {
    let sizes = |(a, b): (&Dim, &Dim)| matches!((a.known(), b.known()), (Some(a), Some(b)) if a != b);
    a.rank() != b.rank() || a.iter().zip(b.iter()).any(sizes)
}
