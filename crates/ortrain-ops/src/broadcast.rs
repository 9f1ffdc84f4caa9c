//! Gradient of a broadcast operand: a gradient of the common shape, summed over the broadcast axes.

use ortrain_graph::{Attrs, Dim, Shape, ValueId};

use crate::OpError;
use crate::support::onnx_decomposition::NodeSink;

/// Sink for nodes of a graph with known shapes.
pub(crate) trait ShapedNodeSink: NodeSink {
    /// Returns the shape of a value, if at least its rank is known.
    fn known_shape(&self, value: ValueId) -> Option<Shape>;
    /// Adds a node of `com.microsoft` with one output.
    fn emit_microsoft(&mut self, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId;
    /// Adds a constant vector of int64.
    fn emit_ints(&mut self, name: &str, values: &[i64]) -> ValueId;
}

/// Sums `gradient`, which has the shape of `output`, over the axes along which `input` was broadcast to this shape.
///
/// If symbolic sizes do not show which axes were broadcast, the axes are determined at run time.
///
/// # Errors
/// Returns an error if the declared shapes do not broadcast.
pub(crate) fn sum_to(
    to: &mut impl ShapedNodeSink,
    gradient: ValueId,
    input: ValueId,
    output: ValueId,
) -> Result<ValueId, OpError> {
    let add_op = |to: &mut _, op: &str, inputs: &[ValueId], attrs: Attrs| {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        NodeSink::emit(to, op, &inputs, attrs)
    };
    if let (Some(from), Some(small)) = (to.known_shape(output), to.known_shape(input)) {
        let lead = from.rank().checked_sub(small.rank()).ok_or_else(|| {
            OpError::invalid(format!(
                "a value of shape {small} cannot be broadcast to the declared shape {from}"
            ))
        })?;
        let certain = (0..small.rank()).all(|axis| {
            let (small_dim, common) = (&small[axis], &from[axis + lead]);
            small_dim == common || small_dim.is_one() || matches!(small_dim, Dim::Known(_))
        });
        if certain {
            let axes: Vec<i64> = (0..from.rank())
                .filter(|&axis| axis < lead || (small[axis - lead].is_one() && !from[axis].is_one()))
                .map(|axis| axis as i64)
                .collect();
            if axes.is_empty() {
                return Ok(gradient);
            }
            // Only leading axes: the sum can remove them directly.
            let only_lead = axes.iter().all(|&axis| (axis as usize) < lead) && axes.len() == lead;
            let axes = to.emit_ints("axes", &axes);
            let attrs = Attrs::new().with("keepdims", i64::from(!only_lead));
            let summed = add_op(to, "ReduceSum", &[gradient, axes], attrs);
            if only_lead || lead == 0 {
                return Ok(summed);
            }
            let shape = match small.concrete() {
                Some(dims) => {
                    let dims: Vec<i64> = dims.iter().map(|&dim| dim as i64).collect();
                    to.emit_ints("shape", &dims)
                }
                None => add_op(to, "Shape", &[input], Attrs::new()),
            };
            return Ok(add_op(to, "Reshape", &[summed, shape], Attrs::new()));
        }
    }
    let large = add_op(to, "Shape", &[output], Attrs::new());
    let small = add_op(to, "Shape", &[input], Attrs::new());
    let axes = to.emit_microsoft("BroadcastGradientArgs", &[small, large], Attrs::new());
    let attrs = Attrs::new().with("noop_with_empty_axes", 1i64).with("keepdims", 1i64);
    let summed = to.emit_microsoft("ReduceSumTraining", &[gradient, axes], attrs);
    Ok(add_op(to, "Reshape", &[summed, small], Attrs::new()))
}
