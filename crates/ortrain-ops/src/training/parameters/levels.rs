//! Dependencies of the values of a graph: on constants, shapes, positions, inputs or data.

use ortrain_graph::{DType, Graph, Node, ValueId};
use rustc_hash::FxHashSet;

use crate::Registry;

/// Element-wise arithmetic of two values.
pub(super) const ARITHMETIC: [&str; 4] = ["Add", "Div", "Mul", "Sub"];

/// Operators that pass the elements of their first input through, possibly with another shape, type or order, or only
/// some of them.
pub(super) const MOVE_OPERATORS: [&str; 15] = [
    "Cast",
    "CastLike",
    "Concat",
    "DequantizeLinear",
    "Expand",
    "Flatten",
    "Identity",
    "Pad",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
];

/// Operators that change the type or shape of their first input; further inputs determine the change.
pub(super) const RESHAPE_OPERATORS: [&str; 6] =
    ["CastLike", "Expand", "Reshape", "Squeeze", "Tile", "Unsqueeze"];

/// Preprocessing operators on an input before the first layer, in addition to [`ARITHMETIC`] and [`MOVE_OPERATORS`].
pub(super) const PREPROCESSING_OPERATORS: [&str; 8] =
    ["Abs", "Clip", "Exp", "Gather", "Log", "Neg", "Resize", "Sqrt"];

/// Dependencies of a value, from constants to data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DependencyLevel {
    /// Only constants.
    Constant,
    /// Shapes.
    Shape,
    /// Integers: positions, masks, tokens.
    Position,
    /// Input, preprocessed element by element.
    Input,
    /// Output of a layer.
    Data,
}

/// Returns the level of each value.
pub(super) fn levels(graph: &Graph) -> Vec<DependencyLevel> {
    let to_sines = values_to_sines(graph);
    let mut levels = vec![DependencyLevel::Constant; graph.value_count()];
    for &id in &graph.inputs {
        let is_float = graph.value(id).ty.dtype().is_some_and(DType::is_float);
        levels[id.0 as usize] = if is_float { DependencyLevel::Input } else { DependencyLevel::Position };
    }
    for node in &graph.nodes {
        let of = |id: ValueId| levels[id.0 as usize];
        let op = &*node.op;
        // The other inputs are a type, axes or sizes.
        let read = if RESHAPE_OPERATORS.contains(&op) { 1 } else { node.inputs.len() };
        let highest = node.inputs[..read.min(node.inputs.len())]
            .iter()
            .flatten()
            .map(|&id| of(id))
            .max()
            .unwrap_or(DependencyLevel::Constant);
        let has_weights = has_weights(node, &levels);
        let leads_to_sines = node.present_outputs().any(|output| to_sines.contains(&output));
        let level = match op {
            "Shape" | "Size" => DependencyLevel::Shape,
            "Range" => highest.max(DependencyLevel::Position),
            _ if op.starts_with("Random") || op == "Bernoulli" => DependencyLevel::Data,
            // Captured values are among the inputs.
            _ if highest > DependencyLevel::Shape && Graph::subgraphs(node).next().is_some() => {
                DependencyLevel::Data
            }
            "Sin" | "Cos" if highest > DependencyLevel::Shape => DependencyLevel::Data,
            _ if highest == DependencyLevel::Position && has_weights => {
                if PRODUCT_OPERATORS.contains(&op) && leads_to_sines {
                    DependencyLevel::Position
                } else {
                    DependencyLevel::Data
                }
            }
            _ if highest == DependencyLevel::Input => {
                let prepares = ARITHMETIC.contains(&op)
                    || MOVE_OPERATORS.contains(&op)
                    || PREPROCESSING_OPERATORS.contains(&op);
                if prepares && !has_weights { DependencyLevel::Input } else { DependencyLevel::Data }
            }
            _ => highest,
        };
        for output in node.present_outputs() {
            levels[output.0 as usize] = level;
        }
    }
    levels
}

/// Returns true if a node has constants as its weights.
pub(super) fn has_weights(node: &Node, levels: &[DependencyLevel]) -> bool {
    let is_constant = |at: usize| {
        node.inputs
            .get(at)
            .copied()
            .flatten()
            .is_some_and(|id| levels[id.0 as usize] <= DependencyLevel::Shape)
    };
    let definition = Registry::standard().find(&node.domain, &node.op);
    definition.is_some_and(|known| known.weights.iter().any(|&at| is_constant(at)))
}

/// Returns the values that become sines and cosines only through arithmetic.
pub(super) fn values_to_sines(graph: &Graph) -> FxHashSet<ValueId> {
    let mut values = FxHashSet::default();
    for node in graph.nodes.iter().rev() {
        let op = &*node.op;
        let on = ARITHMETIC.contains(&op) || MOVE_OPERATORS.contains(&op);
        if matches!(op, "Sin" | "Cos")
            || (on && node.present_outputs().any(|output| values.contains(&output)))
        {
            values.extend(node.present_inputs());
        }
    }
    values
}

/// Returns the values with a path to a node with weights.
pub(super) fn values_before_weights(graph: &Graph, levels: &[DependencyLevel]) -> FxHashSet<ValueId> {
    let mut values = FxHashSet::default();
    for node in graph.nodes.iter().rev() {
        if has_weights(node, levels) || node.present_outputs().any(|output| values.contains(&output)) {
            values.extend(node.present_inputs());
        }
    }
    values
}

/// Products of a constant with values that may be positions.
pub(super) const PRODUCT_OPERATORS: [&str; 4] = ["Einsum", "FusedMatMul", "Gemm", "MatMul"];
