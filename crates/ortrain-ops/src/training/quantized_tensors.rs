//! Report of the quantized tensors of a model.

use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId};

use super::quantized_weights::{quantized_weight, scale_indices};
use crate::class::Class;
use crate::registry::{class_of, definition_of};
use crate::support::quantization_grid::number_range;

/// Tensor of a model that integers or narrow floats stand for.
#[derive(Clone, Debug)]
pub struct QuantizedTensor {
    /// Name of the float tensor. For integers that are not trained, the name of the integers.
    pub name: String,
    /// Node that quantizes the tensor, or that reads the integers.
    pub node: String,
    /// Element type of the integers.
    pub dtype: DType,
    /// Axis along which scales differ.
    pub axis: Option<i64>,
    /// Number of elements that share a scale along the axis.
    pub block_size: Option<i64>,
    /// Scales.
    pub scale: Tensor,
    /// Zero point of each scale.
    pub zero_point: Vec<f64>,
    /// Smallest and largest number that each scale can represent.
    pub range: Vec<(f64, f64)>,
    /// Numbers of a weight. An activation has numbers only during a step.
    pub weight: Option<WeightNumbers>,
}

/// Numbers of a quantized weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightNumbers {
    /// Smallest element.
    pub smallest: f64,
    /// Largest element.
    pub largest: f64,
    /// Share of the elements outside of the range of their scale. Integers that are not trained have the share 0.
    pub clipped: f64,
}

/// Returns the tensors that nodes of `QuantizeLinear` quantize, and the integer weights that are not trained, in the
/// order of the nodes. `parameter` returns the current value of a parameter.
#[must_use]
pub fn quantized_tensors(graph: &Graph, parameter: &dyn Fn(&str) -> Option<Tensor>) -> Vec<QuantizedTensor> {
    let value = |id: ValueId| parameter(graph.name_of(id)).or_else(|| graph.value(id).content().cloned());
    let mut found: Vec<QuantizedTensor> = Vec::new();
    for node in &graph.nodes {
        if class_of(node) == Class::Quantization {
            found.extend(quantized_by(graph, node, &value));
        }
        for input in definition_of(node).map_or(&[][..], |definition| definition.quantized) {
            let Some(weight) = quantized_weight(graph, node, input) else { continue };
            if found.iter().any(|known| known.name == weight.integers) {
                continue;
            }
            let (Some(floats), attrs) = (weight.dequantized(), &weight.attrs) else { continue };
            let (scale, zero_point) = (weight.scale.tensor().clone(), weight.zero_point.tensor().to_f64());
            let dtype = weight.values.dtype();
            let Some(grid) = Grid::new(dtype, scale, &zero_point, attrs) else { continue };
            let numbers = weight_numbers(&floats, |_| false);
            found.push(grid.tensor(weight.integers.clone(), graph.node_label(node), Some(numbers)));
        }
    }
    found
}

/// Element type, scales and zero points.
struct Grid {
    dtype: DType,
    scale: Tensor,
    zero_point: Vec<f64>,
    range: Vec<(f64, f64)>,
    attrs: Attrs,
}

impl Grid {
    fn new(dtype: DType, scale: Tensor, zero_point: &[f64], attrs: &Attrs) -> Option<Grid> {
        let (low, high) = number_range(dtype)?;
        let of = |at: usize| zero_point.get(if zero_point.len() == 1 { 0 } else { at }).copied();
        let zero_point: Vec<f64> = (0..scale.len()).map(|at| of(at).unwrap_or(0.0)).collect();
        let steps = scale.to_f64();
        let range =
            steps.iter().zip(&zero_point).map(|(step, zero)| ((low - zero) * step, (high - zero) * step));
        let range = range.collect();
        Some(Grid { dtype, scale, zero_point, range, attrs: attrs.clone() })
    }

    fn tensor(self, name: String, node: String, weight: Option<WeightNumbers>) -> QuantizedTensor {
        let attribute = |name: &str| self.attrs.int(name).ok().flatten();
        let is_single = self.scale.len() == 1;
        QuantizedTensor {
            name,
            node,
            dtype: self.dtype,
            axis: attribute("axis").or(Some(1)).filter(|_| !is_single),
            block_size: attribute("block_size").filter(|&size| size > 0),
            scale: self.scale,
            zero_point: self.zero_point,
            range: self.range,
            weight,
        }
    }
}

/// Returns the tensor that a node quantizes, if its scale is known before a step.
fn quantized_by(
    graph: &Graph,
    node: &Node,
    value: &dyn Fn(ValueId) -> Option<Tensor>,
) -> Option<QuantizedTensor> {
    let port = |k: usize| node.inputs.get(k).copied().flatten();
    let (x, scale) = (port(0)?, value(port(1)?)?);
    let result = node.present_outputs().next()?;
    let dtype = graph.value(result).ty.dtype()?;
    let zero_point = match port(2) {
        Some(id) => value(id)?.to_f64(),
        None => vec![0.0],
    };
    let grid = Grid::new(dtype, scale, &zero_point, &node.attrs)?;
    let weight = value(x).and_then(|weight| {
        let at = scale_indices(&weight, &grid.scale, &node.attrs)?;
        let numbers = weight.to_f64();
        Some(weight_numbers(&weight, |element| {
            let (low, high) = grid.range[at[element]];
            // A number up to half a step beyond the range is rounded into it.
            let half = (high - low).abs() / 2.0 / steps_of(dtype);
            !(low - half..=high + half).contains(&numbers[element])
        }))
    });
    Some(grid.tensor(graph.name_of(x).to_owned(), graph.node_label(node), weight))
}

/// Returns the number of steps between the smallest and the largest number of a type.
fn steps_of(dtype: DType) -> f64 {
    number_range(dtype).map_or(1.0, |(low, high)| high - low)
}

/// Returns the smallest and the largest element, and the share of elements for which `is_clipped` returns true.
fn weight_numbers(weight: &Tensor, is_clipped: impl Fn(usize) -> bool) -> WeightNumbers {
    let numbers = weight.to_f64();
    let clipped = (0..numbers.len()).filter(|&element| is_clipped(element)).count();
    WeightNumbers {
        smallest: numbers.iter().copied().fold(f64::INFINITY, f64::min),
        largest: numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        clipped: clipped as f64 / numbers.len().max(1) as f64,
    }
}
