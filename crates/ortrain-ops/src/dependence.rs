//! Dependence of values on other values.

use ortrain_graph::{DType, Graph, ValueId};
use rustc_hash::FxHashSet;

use crate::class::{Class, Traits};
use crate::registry::{class_of, has_traits};

/// Values that can have a gradient: floats, and the integers of quantized tensors.
pub(crate) struct GradientValues {
    quantized: FxHashSet<ValueId>,
}

impl GradientValues {
    /// Finds the quantized tensors of a graph: the integers of a quantization, and integers that are computed from them
    /// with a derivative.
    pub(crate) fn new(graph: &Graph) -> GradientValues {
        GradientValues::with_targets(graph, &[])
    }

    /// Finds the quantized tensors of a graph. Integers among the targets are quantized tensors: inputs of a subgraph
    /// that are quantized outside.
    pub(crate) fn with_targets(graph: &Graph, targets: &[ValueId]) -> GradientValues {
        // Types of indices (int64) and of conditions are not among them.
        let is_grid = |id: ValueId| {
            let dtype = graph.value(id).ty.dtype();
            dtype.is_some_and(|dtype| dtype.is_small() || (dtype.is_integer() && dtype != DType::I64))
        };
        let mut quantized: FxHashSet<ValueId> =
            targets.iter().copied().filter(|&target| is_grid(target)).collect();
        for node in &graph.nodes {
            let is_start = class_of(node) == Class::Quantization;
            let follows = || {
                node.present_inputs().any(|input| quantized.contains(&input))
                    && !has_traits(node, Traits::ZERO_DERIVATIVE)
            };
            if is_start || (!quantized.is_empty() && follows()) {
                quantized.extend(node.present_outputs().filter(|&output| is_grid(output)));
            }
        }
        GradientValues { quantized }
    }

    /// Returns true if a value can have a gradient.
    pub(crate) fn contains(&self, graph: &Graph, value: ValueId) -> bool {
        graph.value(value).ty.dtype().is_some_and(DType::is_float) || self.quantized.contains(&value)
    }
}

/// Returns the values that depend on the values `on` through floats and quantized tensors, including these values.
#[must_use]
pub fn dependent_values(graph: &Graph, on: &[ValueId]) -> FxHashSet<ValueId> {
    let values = GradientValues::with_targets(graph, on);
    let mut dependent: FxHashSet<ValueId> = on.iter().copied().collect();
    for node in &graph.nodes {
        if node.present_inputs().any(|input| dependent.contains(&input)) {
            dependent.extend(node.present_outputs().filter(|&output| values.contains(graph, output)));
        }
    }
    dependent
}
