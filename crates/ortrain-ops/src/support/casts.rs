//! Casts in rewrites.

use ortrain_graph::{Attrs, DType, ValueId};

use crate::support::onnx_decomposition::NodeSink;

/// Returns the type of the arithmetic and of intermediate buffers: float32, or float64 for float64.
pub(crate) fn arithmetic_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Casts a value to another type, if the types differ.
pub(crate) fn cast(to: &mut impl NodeSink, value: ValueId, from: DType, target: DType) -> ValueId {
    if from == target {
        return value;
    }
    to.emit("Cast", &[Some(value)], Attrs::new().with("to", i64::from(target.to_onnx())))
}
