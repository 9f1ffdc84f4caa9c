//! Dependencies of the values of a graph: on constants, shapes, positions, inputs or data.

use ortrain_graph::{DType, Graph, Node, ValueId};
use rustc_hash::FxHashSet;

use crate::class::{Class, Traits};
use crate::registry::{class_of, definition_of, has_traits};

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
        let (op, class) = (&*node.op, class_of(node));
        // The other inputs are a type, axes or sizes.
        let read = if has_traits(node, Traits::SHAPED_BY_INPUTS) { 1 } else { node.inputs.len() };
        let highest = node.inputs[..read.min(node.inputs.len())]
            .iter()
            .flatten()
            .map(|&id| of(id))
            .max()
            .unwrap_or(DependencyLevel::Constant);
        let has_weights = has_weights(node, &levels);
        let leads_to_sines = node.present_outputs().any(|output| to_sines.contains(&output));
        let level = match class {
            Class::Shape | Class::Size => DependencyLevel::Shape,
            Class::Positions => highest.max(DependencyLevel::Position),
            _ if op.starts_with("Random") || op == "Bernoulli" => DependencyLevel::Data,
            // Captured values are among the inputs.
            _ if highest > DependencyLevel::Shape && Graph::subgraphs(node).next().is_some() => {
                DependencyLevel::Data
            }
            Class::Sine if highest > DependencyLevel::Shape => DependencyLevel::Data,
            _ if highest == DependencyLevel::Position && has_weights => {
                if class.is_product() && leads_to_sines {
                    DependencyLevel::Position
                } else {
                    DependencyLevel::Data
                }
            }
            _ if highest == DependencyLevel::Input => {
                let prepares = class.is_arithmetic()
                    || has_traits(node, Traits::MOVES)
                    || has_traits(node, Traits::PREPARES);
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
    definition_of(node).is_some_and(|known| known.weights.iter().any(|&at| is_constant(at)))
}

/// Returns the values that become sines and cosines only through arithmetic.
pub(super) fn values_to_sines(graph: &Graph) -> FxHashSet<ValueId> {
    let mut values = FxHashSet::default();
    for node in graph.nodes.iter().rev() {
        let class = class_of(node);
        let on = class.is_arithmetic() || has_traits(node, Traits::MOVES);
        if class == Class::Sine || (on && node.present_outputs().any(|output| values.contains(&output))) {
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
