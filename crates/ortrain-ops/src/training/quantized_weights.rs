//! Weights of quantized models: integers that are trained as floats.
//!
//! A model from a quantizer has weights of integers. For training, each of them becomes a float weight, and
//! `QuantizeLinear` computes the integers from it. The values of the model stay the same, and the gradients are
//! straight through (`families/quantization/linear.rs`). An export computes the integers once, and has the nodes and
//! the names of the original model again.

use ortrain_graph::{Attr, Attrs, DType, Dim, Graph, GraphError, Node, Tensor, ValueId, tensor_to_proto};
use ortrain_onnx::{
    AttributeProto, AttributeType, GraphProto, LoadedModel, ModelProto, NodeProto, TensorProto,
};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::class::{Class, Traits};
use crate::op::{Axis, QuantizedInput, Scale};
use crate::registry::{Registry, class_of, class_of_message, definition_of, has_traits, normalize_domain};
use crate::support::quantization_grid::{Layout, QUANTIZE_LINEAR, integer_range};

/// Suffix of the names of the nodes that compute the integers of a trained weight.
const QUANTIZATION_SUFFIX: &str = "/quantization";
/// Suffix of the names that quantizers give to integers.
const INTEGERS_SUFFIX: &str = "_quantized";

/// Integers of a weight, with their grid.
pub(super) struct QuantizedWeight {
    pub(super) integers: String,
    pub(super) values: Tensor,
    pub(super) scale: ScaleSource,
    pub(super) zero_point: ZeroPoint,
    pub(super) attrs: Attrs,
}

impl QuantizedWeight {
    /// Returns the floats that the integers stand for.
    pub(super) fn dequantized(&self) -> Option<Tensor> {
        let scale = self.scale.tensor();
        let (numbers, scales) = (self.values.to_f64(), scale.to_f64());
        let zero_points = self.zero_point.tensor().to_f64();
        let at = scale_indices(&self.values, scale, &self.attrs)?;
        let of = |list: &[f64], at: usize| if list.len() == 1 { list[0] } else { list[at] };
        let floats: Vec<f64> = numbers
            .iter()
            .zip(at)
            .map(|(&number, at)| (number - of(&zero_points, at)) * of(&scales, at))
            .collect();
        Some(Tensor::from_f64(scale.dtype(), self.values.dims().to_vec(), &floats))
    }
}

/// Zero point of a weight: a constant of the model, or a number for each scale.
pub(super) enum ZeroPoint {
    Named(String, Tensor),
    Numbers(Tensor),
}

impl ZeroPoint {
    pub(super) fn tensor(&self) -> &Tensor {
        match self {
            ZeroPoint::Named(_, tensor) | ZeroPoint::Numbers(tensor) => tensor,
        }
    }
}

/// Scale of a weight: a constant of the model, or numbers that are computed from its constants.
pub(super) enum ScaleSource {
    Named(String, Tensor),
    Numbers(Tensor),
}

impl ScaleSource {
    pub(super) fn tensor(&self) -> &Tensor {
        match self {
            ScaleSource::Named(_, tensor) | ScaleSource::Numbers(tensor) => tensor,
        }
    }
}

/// Returns true if a graph has nodes with quantized inputs.
#[must_use]
pub fn has_quantized_inputs(graph: &GraphProto) -> bool {
    let is_quantized = |node: &NodeProto| {
        let definition = Registry::standard().find(normalize_domain(&node.domain), &node.op_type);
        definition.is_some_and(|definition| !definition.quantized.is_empty())
    };
    graph.node.iter().any(is_quantized)
}

/// Replaces the constant integers of a quantized model by float weights and nodes that quantize them. Returns the names
/// of the float weights. `typed` is the graph of the message with inferred types.
///
/// # Errors
/// Returns an error if the data of an initializer does not match its type.
pub fn add_float_weights(typed: &Graph, graph: &mut GraphProto) -> Result<Vec<String>, GraphError> {
    let initializers: FxHashSet<&str> = graph.initializer.iter().map(|tensor| tensor.name.as_str()).collect();
    let mut weights: Vec<QuantizedWeight> = Vec::new();
    for node in &typed.nodes {
        let Some(definition) = definition_of(node) else { continue };
        for input in definition.quantized {
            let Some(weight) = quantized_weight(typed, node, input) else { continue };
            let is_known = weights.iter().any(|known| known.integers == weight.integers);
            if initializers.contains(weight.integers.as_str()) && !is_known {
                weights.push(weight);
            }
        }
    }
    let mut used: FxHashSet<String> = typed.value_ids().map(|id| typed.name_of(id).to_owned()).collect();
    let (mut names, mut nodes) = (Vec::new(), Vec::new());
    for weight in weights {
        let Some(floats) = weight.dequantized() else { continue };
        let stem = weight.integers.strip_suffix(INTEGERS_SUFFIX).unwrap_or(&weight.integers).to_owned();
        let name =
            unused_name(&mut used, if stem == weight.integers { format!("{stem}_float") } else { stem });
        let constant = |graph: &mut GraphProto, used: &mut FxHashSet<String>, part: &str, tensor: &Tensor| {
            let name = unused_name(used, format!("{name}/{part}"));
            graph.initializer.push(tensor_to_proto(&name, tensor));
            name
        };
        let scale = match &weight.scale {
            ScaleSource::Named(name, _) => name.clone(),
            ScaleSource::Numbers(tensor) => constant(graph, &mut used, "scale", tensor),
        };
        let zero_point = match &weight.zero_point {
            ZeroPoint::Named(name, _) => name.clone(),
            ZeroPoint::Numbers(tensor) => constant(graph, &mut used, "zero_point", tensor),
        };
        nodes.push(quantization_node([&name, &scale, &zero_point], &weight.integers, &weight.attrs));
        graph.initializer.retain(|tensor| tensor.name != weight.integers);
        graph.input.retain(|info| info.name != weight.integers);
        graph.initializer.push(tensor_to_proto(&name, &floats));
        names.push(name);
    }
    graph.node.splice(0..0, nodes);
    Ok(names)
}

/// Returns a name that no value has, and marks it as used.
fn unused_name(used: &mut FxHashSet<String>, wanted: String) -> String {
    let mut name = wanted;
    while !used.insert(name.clone()) {
        name.push_str("_float");
    }
    name
}

/// Returns the integers of an input with their grid, if integers, scale and zero point are constants.
pub(super) fn quantized_weight(
    graph: &Graph,
    node: &Node,
    input: &QuantizedInput,
) -> Option<QuantizedWeight> {
    let port = |k: usize| node.inputs.get(k).copied().flatten();
    let named = |id: ValueId| Some((graph.name_of(id).to_owned(), graph.value(id).content()?.clone()));
    let source = port(input.tensor)?;
    let integers = source_constant(graph, source)?;
    let values = graph.value(integers).content()?.clone();
    let scale = match input.scale {
        Scale::Input(k) => {
            let (name, tensor) = named(port(k)?)?;
            ScaleSource::Named(name, tensor)
        }
        Scale::Product([a, b]) => {
            let [a, b] = [port(a)?, port(b)?].map(|id| graph.value(id).content().cloned());
            ScaleSource::Numbers(product(&a?, &b?)?)
        }
        Scale::Following => {
            let (name, tensor) = named(following_scale(graph, node)?)?;
            ScaleSource::Named(name, tensor)
        }
    };
    let same_number = |number: f64| Tensor::filled(values.dtype(), scale.tensor().dims(), number);
    let zero_point = match input.zero_point.and_then(port) {
        None => ZeroPoint::Numbers(same_number(0.0)),
        Some(id) => match named(id)? {
            (name, tensor) if tensor.len() == scale.tensor().len() => ZeroPoint::Named(name, tensor),
            (_, tensor) if tensor.len() == 1 => ZeroPoint::Numbers(same_number(*tensor.to_f64().first()?)),
            _ => return None,
        },
    };
    let rank = values.dims().len();
    let axis = |axis: usize| Attrs::new().with("axis", axis as i64);
    let attrs = match input.axis {
        Axis::Attributes => {
            let mut attrs = node.attrs.clone();
            attrs.0.retain(|name, _| matches!(&**name, "axis" | "block_size"));
            attrs
        }
        Axis::First | Axis::FirstAndLast => axis(0),
        Axis::Last => axis(rank.checked_sub(1)?),
        Axis::LastUnless(attribute) => {
            let is_transposed = node.attrs.int(attribute).ok().flatten().unwrap_or(0) != 0;
            axis(rank.checked_sub(if is_transposed { 2 } else { 1 })?)
        }
    };
    // Moved elements have another axis.
    if integers != source && scale.tensor().len() != 1 {
        return None;
    }
    let (scale, zero_point, attrs) = match (input.axis, values.dims(), scale.tensor().dims()) {
        (Axis::FirstAndLast, &[_, rows, _], &[count, columns]) => {
            // QuantizeLinear has scales along two axes only for blocks along the axis between them.
            let (dims, attrs) = if count == 1 {
                (vec![columns], axis(2))
            } else {
                (vec![count, 1, columns], axis(1).with("block_size", rows as i64))
            };
            let scale = scale.tensor().reshaped(dims.clone()).ok()?;
            let zero_point = zero_point.tensor().reshaped(dims).ok()?;
            (ScaleSource::Numbers(scale), ZeroPoint::Numbers(zero_point), attrs)
        }
        _ => (scale, zero_point, attrs),
    };
    // A scale for the whole tensor needs no axis, which may lie outside of the tensor.
    let attrs = if scale.tensor().len() == 1 { Attrs::new() } else { attrs };
    Some(QuantizedWeight { integers: graph.name_of(integers).to_owned(), values, scale, zero_point, attrs })
}

/// Returns the constant that a value was moved or looked up from.
fn source_constant(graph: &Graph, value: ValueId) -> Option<ValueId> {
    let mut value = value;
    // Nodes are in topological order.
    for node in graph.nodes.iter().rev() {
        if graph.value(value).content().is_some() {
            break;
        }
        if !node.present_outputs().any(|output| output == value) {
            continue;
        }
        let moves = has_traits(node, Traits::MOVES) || class_of(node) == Class::Lookup;
        value = node.inputs.first().copied().flatten().filter(|_| moves)?;
    }
    graph.value(value).content().map(|_| value)
}

/// Multiplies two scales, one of which holds one number.
fn product(a: &Tensor, b: &Tensor) -> Option<Tensor> {
    let (one, many) = if a.len() == 1 { (a, b) } else { (b, a) };
    let factor = *one.to_f64().first().filter(|_| one.len() == 1)? as f32;
    let products: Vec<f64> = many.to_f64().iter().map(|&scale| f64::from(scale as f32 * factor)).collect();
    Some(Tensor::from_f64(many.dtype(), many.dims().to_vec(), &products))
}

/// Returns the scale of the right factor of an integer product. Quantizers write `Cast` behind the product, then `Mul`
/// by the product of both scales, of which the scale of the weights is constant.
fn following_scale(graph: &Graph, node: &Node) -> Option<ValueId> {
    let reader = |value: ValueId, class: Class| {
        graph
            .nodes
            .iter()
            .find(|node| class_of(node) == class && node.present_inputs().any(|input| input == value))
    };
    let sums = node.present_outputs().next()?;
    let floats = reader(sums, Class::Cast)?.present_outputs().next()?;
    let scaled = reader(floats, Class::Multiply)?;
    let scale = scaled.present_inputs().find(|&input| input != floats)?;
    // The scale of a static quantizer of the other factor is constant, too.
    let is_of_activations = |id: ValueId| {
        let quantizes = |node: &&Node| class_of(node) == Class::Quantization;
        graph.nodes.iter().filter(quantizes).any(|node| node.present_inputs().any(|input| input == id))
    };
    let is_constant = |id: &ValueId| graph.value(*id).content().is_some() && !is_of_activations(*id);
    let maker = graph.nodes.iter().find(|node| node.present_outputs().any(|output| output == scale))?;
    (class_of(maker) == Class::Multiply).then(|| maker.present_inputs().find(is_constant))?
}

/// Returns the layout of scales, and the index of the scale of each element.
pub(super) fn scale_indices(values: &Tensor, scale: &Tensor, attrs: &Attrs) -> Option<Vec<usize>> {
    let shape = |tensor: &Tensor| tensor.dims().iter().map(|&size| Dim::Known(size)).collect();
    let layout = Layout::new(attrs, Some(&shape(values)), Some(&shape(scale))).ok().flatten()?;
    Some(layout.scale_indices(values.dims()))
}

fn quantization_node(inputs: [&String; 3], output: &str, attrs: &Attrs) -> NodeProto {
    let attribute = |(name, attr): (&String, &Attr)| match attr {
        Attr::Int(i) => Some(AttributeProto {
            name: name.clone(),
            r#type: AttributeType::Int as i32,
            i: *i,
            ..AttributeProto::default()
        }),
        _ => None,
    };
    NodeProto {
        op_type: QUANTIZE_LINEAR.into(),
        name: format!("{}{QUANTIZATION_SUFFIX}", inputs[0]),
        input: inputs.into_iter().cloned().collect(),
        output: vec![output.to_owned()],
        attribute: attrs.0.iter().filter_map(attribute).collect(),
        ..NodeProto::default()
    }
}

/// Reverts [`add_float_weights`] in a graph with initializer values: the integers become initializers again.
///
/// # Errors
/// Returns an error if the data of an initializer does not match its type.
pub fn remove_float_weights(graph: &mut GraphProto) -> Result<(), GraphError> {
    let is_of_weight = |node: &NodeProto| {
        class_of_message(node) == Class::Quantization
            && node.input.first().is_some_and(|weight| node.name == format!("{weight}{QUANTIZATION_SUFFIX}"))
    };
    let model = LoadedModel::from_proto(ModelProto::default(), Default::default());
    let mut tensors: FxHashMap<&str, &TensorProto> = FxHashMap::default();
    tensors.extend(graph.initializer.iter().map(|tensor| (tensor.name.as_str(), tensor)));
    let mut integers = Vec::new();
    let mut removed: FxHashSet<String> = FxHashSet::default();
    for node in graph.node.iter().filter(|node| is_of_weight(node)) {
        let parts: Vec<&TensorProto> =
            node.input.iter().filter_map(|name| tensors.get(name.as_str()).copied()).collect();
        let (&[weight, scale, zero_point], [output]) = (&parts[..], &node.output[..]) else { continue };
        let [values, scales, zero_points] =
            [weight, scale, zero_point].map(|tensor| Graph::tensor_from_proto(&model, tensor));
        let attrs = node.attribute.iter().fold(Attrs::new(), |attrs, found| attrs.with(&found.name, found.i));
        let Some(quantized) = quantized(&values?, &scales?, &zero_points?, &attrs) else { continue };
        integers.push(tensor_to_proto(output, &quantized));
        removed.extend([weight.name.clone(), output.clone()]);
        // Scales and zero points that were added for the weight.
        let own = |name: &String| name.starts_with(&format!("{}/", weight.name));
        removed.extend([&scale.name, &zero_point.name].into_iter().filter(|name| own(name)).cloned());
    }
    graph.node.retain(|node| !(is_of_weight(node) && node.output.iter().any(|name| removed.contains(name))));
    graph.initializer.retain(|tensor| !removed.contains(&tensor.name));
    graph.value_info.retain(|info| !removed.contains(&info.name));
    graph.initializer.extend(integers);
    Ok(())
}

/// Returns the integers of floats, rounded as `QuantizeLinear` rounds.
fn quantized(values: &Tensor, scale: &Tensor, zero_point: &Tensor, attrs: &Attrs) -> Option<Tensor> {
    let at = scale_indices(values, scale, attrs)?;
    let (low, high) = integer_range(zero_point.dtype())?;
    let (scales, zero_points) = (scale.to_f64(), zero_point.to_f64());
    let of = |list: &[f64], at: usize| if list.len() == 1 { list[0] } else { list[at] };
    let is_wide = scale.dtype() == DType::F64;
    let integer = |(value, at): (f64, usize)| {
        let (step, zero) = (of(&scales, at), of(&zero_points, at));
        let position = if is_wide {
            (value / step).round_ties_even() + zero
        } else {
            f64::from((value as f32 / step as f32).round_ties_even() + zero as f32)
        };
        position.clamp(low, high)
    };
    let integers: Vec<f64> = values.to_f64().into_iter().zip(at).map(integer).collect();
    Some(Tensor::from_f64(zero_point.dtype(), values.dims().to_vec(), &integers))
}
