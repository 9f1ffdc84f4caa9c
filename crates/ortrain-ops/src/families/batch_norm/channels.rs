//! Reductions to channels, and their inverse, in rewrites.

use ortrain_graph::{Attrs, Tensor, ValueId};

use crate::OpError;
use crate::support::onnx_decomposition::NodeSink;

/// Reshapes one element per channel so that it broadcasts to a batch of rank `rank`.
pub(super) fn unsqueeze_channels(to: &mut impl NodeSink, value: ValueId, rank: usize) -> ValueId {
    if rank <= 2 {
        return value;
    }
    let axes: Vec<i64> = (1..rank as i64 - 1).collect();
    let axes = to.emit_constant(Tensor::i64(&[axes.len()], &axes));
    to.emit("Unsqueeze", &[Some(value), Some(axes)], Attrs::new())
}

/// Returns every axis of a batch except the channel axis.
pub(super) fn reduced_axes(rank: usize) -> Vec<i64> {
    (0..rank as i64).filter(|&axis| axis != 1).collect()
}

/// Adds a reduction to one element for each channel.
pub(super) fn reduce_to_channels(
    to: &mut impl NodeSink,
    op: &str,
    value: ValueId,
    rank: usize,
    keep: bool,
) -> ValueId {
    let axes = reduced_axes(rank);
    let axes = to.emit_constant(Tensor::i64(&[axes.len()], &axes));
    // A vector has no channel axis, so the reduced axis is kept as one.
    let keepdims = i64::from(keep || rank == 1);
    to.emit(op, &[Some(value), Some(axes)], Attrs::new().with("keepdims", keepdims))
}

pub(super) fn sum_channels(to: &mut impl NodeSink, value: ValueId, rank: usize) -> ValueId {
    reduce_to_channels(to, "ReduceSum", value, rank, false)
}

pub(super) fn unknown_rank_error() -> OpError {
    OpError::unsupported("the rank of input 0 must be known; declare its shape in the model")
}

pub(super) const MICROSOFT: &str = "com.microsoft";

pub(super) const INTERNAL: &str = "BatchNormInternal";

pub(super) const GRADIENT: &str = "BatchNormalizationGrad";
