//! Layers that can have adapters: their weights, inputs and results.

use ortrain_graph::{DType, Graph, Node, Tensor, ValueId};
use ortrain_onnx::NodeProto;
use rustc_hash::FxHashMap;

use super::names::{FactorName, root_of, split_base};
use super::recurrent;
use super::sites::AdaptedLayer;
use crate::Error;
use crate::class::{Class, Traits};
use crate::registry::{class_of, has_traits};
use crate::support::low_rank::Layer;

/// Kind of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Product with a matrix of weights.
    Linear,
    /// Rows of a table, by index.
    Embedding,
    /// Convolution.
    Convolution,
    /// Weights of a recurrent layer: one matrix for each direction.
    Recurrent,
}

impl LayerKind {
    /// Returns the name of the kind in reports.
    ///
    /// ```
    /// use ortrain_ops::training::LayerKind;
    ///
    /// assert_eq!(LayerKind::Linear.name(), "linear");
    /// ```
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            LayerKind::Linear => "linear",
            LayerKind::Embedding => "embedding",
            LayerKind::Convolution => "convolution",
            LayerKind::Recurrent => "recurrent",
        }
    }
}

/// Layer that can have an adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterTarget {
    /// Name of the weight: the constant before any nodes that move or convert its elements.
    pub weight: String,
    /// Name of the node, or of its result for a node without a name.
    pub node_name: String,
    /// Label of the node in messages.
    pub node: String,
    /// Path of the module of the layer, if a caller knows it from the exporter.
    pub module: Option<String>,
    /// Kind of the layer.
    pub kind: LayerKind,
    /// Input of the layer.
    pub input: String,
    /// Result of the layer.
    pub value: String,
    /// Element type of the factors.
    pub dtype: DType,
    /// Number of input features, or of rows of a table.
    pub inputs: usize,
    /// Number of output features, or of columns of a table.
    pub outputs: usize,
    /// Sizes of the window of a convolution; otherwise empty.
    pub window: Vec<usize>,
    /// Number of groups of a convolution; otherwise 1.
    pub groups: usize,
    /// Number of directions of a recurrent layer; otherwise 1.
    pub directions: usize,
    /// Index of the input with the weight.
    pub weight_input: usize,
    /// Weight as the layer reads it, and its sizes.
    pub(super) read: String,
    pub(super) dims: Vec<usize>,
    /// Bias that the layer adds to its result.
    pub(super) bias: Option<String>,
    /// True if the bias has a factor other than 1.
    pub(super) has_scaled_bias: bool,
    /// Changes from the constant to the weight that the layer reads, last one first.
    pub(super) changes: Vec<Change>,
    /// True if the layer reads the weight with the outputs as its last axis.
    pub(super) has_outputs_last: bool,
}

/// Change between a constant and the layer that reads it.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Change {
    /// The order of the axes: output axis `i` is input axis `order[i]`.
    Transpose(Vec<usize>),
    /// Other sizes; `from` are the sizes before.
    Reshape { from: Vec<usize> },
    /// Another element type.
    Cast,
    /// Integers of a grid as floats.
    Dequantize,
}

impl AdapterTarget {
    /// Returns the largest rank with an effect.
    #[must_use]
    pub fn max_rank(&self) -> usize {
        let cells: usize = self.window.iter().product();
        self.outputs.min(self.inputs.saturating_mul(cells.max(1)))
    }

    /// Returns true if another layer reads the same weight in the same form, so that both share an adapter.
    #[must_use]
    pub fn has_form_of(&self, other: &AdapterTarget) -> bool {
        self.weight == other.weight
            && (self.kind, self.inputs, self.outputs, self.groups)
                == (other.kind, other.inputs, other.outputs, other.groups)
            && self.stores_outputs_last() == other.stores_outputs_last()
            && self.directions == other.directions
    }

    /// Returns true if this is the layer of an adapter.
    #[must_use]
    pub fn is_layer_of(&self, adapted: &AdaptedLayer) -> bool {
        self.weight == adapted.weight && root_of(&self.value) == adapted.value
    }

    /// Returns the name of the result of the layer with all of its adapters.
    #[must_use]
    pub fn root(&self) -> &str {
        root_of(&self.value)
    }

    /// Returns the rank of a factor `A`.
    #[must_use]
    pub fn rank_of(&self, a: &Tensor) -> usize {
        let axis = usize::from(self.kind == LayerKind::Recurrent);
        a.dims().get(axis).copied().unwrap_or(0)
    }

    /// Returns true if the weight consists of integers.
    #[must_use]
    pub fn has_integers(&self) -> bool {
        self.changes.contains(&Change::Dequantize)
    }

    /// Returns the number of cells of the window of a convolution; otherwise 1.
    pub(super) fn cells(&self) -> usize {
        self.window.iter().product()
    }

    /// Returns true if the constant has the outputs as its last axis; `None` if it is reshaped, or no matrix.
    pub(super) fn stores_outputs_last(&self) -> Option<bool> {
        let mut is_last = self.has_outputs_last;
        for change in &self.changes {
            match change {
                Change::Transpose(order) if order.as_slice() == [1, 0] => is_last = !is_last,
                Change::Transpose(order) if order.as_slice() == [0, 1] => {}
                Change::Cast | Change::Dequantize => {}
                Change::Transpose(_) | Change::Reshape { .. } => return None,
            }
        }
        (self.dims.len() == 2).then_some(is_last)
    }

    /// Checks that the rows of the weight can have magnitudes.
    ///
    /// # Errors
    /// Returns an error if the weight consists of integers, if the layer has groups, or if its bias has a factor.
    pub fn check_magnitude(&self) -> Result<(), Error> {
        let reason = if self.has_integers() {
            "its weight consists of integers"
        } else if self.groups > 1 {
            "it has groups"
        } else if self.has_scaled_bias {
            "its bias has a factor (beta)"
        } else if self.kind == LayerKind::Recurrent {
            "it is recurrent"
        } else {
            return Ok(());
        };
        Err(Error::Adapter(format!("use_dora is not supported for {}: {reason}; exclude it", self.node)))
    }

    pub(super) fn layer(&self, node: &NodeProto) -> Layer {
        match self.kind {
            LayerKind::Linear => Layer::Linear,
            LayerKind::Embedding => Layer::Embedding,
            LayerKind::Recurrent => Layer::Recurrent,
            LayerKind::Convolution => {
                Layer::Convolution { attributes: node.attribute.clone(), groups: self.groups }
            }
        }
    }
}

/// Returns the layers of a graph with inferred types that can have adapters, in the order of the nodes. The factors of
/// existing adapters are no targets.
#[must_use]
pub fn find_adapter_targets(graph: &Graph) -> Vec<AdapterTarget> {
    let makers: FxHashMap<ValueId, &Node> =
        graph.nodes.iter().flat_map(|node| node.present_outputs().map(move |id| (id, node))).collect();
    let search = TargetSearch { graph, makers };
    let targets = |node| match recurrent::is_recurrent(node) {
        true => recurrent::WEIGHTS.iter().filter_map(|&port| search.recurrent_target(node, port)).collect(),
        false => Vec::from_iter(search.target(node)),
    };
    graph.nodes.iter().flat_map(targets).collect()
}

/// Returns the last layer before an output: only a bias, an adapter, or nodes such as a softmax may follow it.
#[must_use]
pub fn find_head_target(graph: &Graph, output: ValueId, targets: &[AdapterTarget]) -> Option<usize> {
    let mut value = output;
    loop {
        if let Some(at) = targets.iter().position(|target| target.value == graph.name_of(value)) {
            return Some(at);
        }
        let node = graph.nodes.iter().find(|node| node.present_outputs().any(|id| id == value))?;
        let input = |at: usize| node.inputs.get(at).copied().flatten();
        let is_constant = |id: ValueId| graph.value(id).content().is_some();
        let is_base = |id: ValueId| split_base(graph.name_of(id)).is_some();
        value = match (class_of(node), input(0)?, input(1)) {
            (Class::Add, base, _) if is_base(base) => base,
            (Class::Add, first, Some(second)) if is_constant(first) => second,
            (Class::Add, first, Some(second)) if is_constant(second) => first,
            (_, first, _) if has_traits(node, Traits::FOLLOWS_HEAD) => first,
            _ => return None,
        };
    }
}

/// Returns the results of all readers of a constant. Nodes such as Transpose and Cast are not readers: their readers are.
/// The result of a layer with adapters includes all of its adapters.
#[must_use]
pub fn weight_readers(graph: &Graph, weight: &str) -> Vec<String> {
    let mut values: Vec<ValueId> = graph.find(weight).into_iter().collect();
    let mut readers = Vec::new();
    let mut at = 0;
    while let Some(&value) = values.get(at) {
        at += 1;
        if graph.outputs.contains(&value) {
            readers.push(graph.name_of(value).to_owned());
        }
        for node in graph.nodes.iter().filter(|node| node.present_inputs().any(|input| input == value)) {
            let Some(output) = node.present_outputs().next() else { continue };
            if moves_elements(class_of(node)) {
                values.push(output);
            } else {
                readers.push(root_of(graph.name_of(output)).to_owned());
            }
        }
    }
    readers
}

/// Returns true for nodes that move or convert the elements of a weight.
fn moves_elements(class: Class) -> bool {
    matches!(
        class,
        Class::Transpose
            | Class::Reshape
            | Class::Flatten
            | Class::Unsqueeze
            | Class::Cast
            | Class::Dequantization
            | Class::Copy
    )
}

struct TargetSearch<'g> {
    graph: &'g Graph,
    makers: FxHashMap<ValueId, &'g Node>,
}

/// Form of a layer: where its weight is, and how it is read.
struct Form {
    kind: LayerKind,
    input: usize,
    weight: usize,
    has_outputs_last: bool,
    groups: usize,
    /// Input with the bias, if the operator has one.
    bias: Option<usize>,
    /// True if the bias has a factor other than 1.
    has_scaled_bias: bool,
    /// Outputs and inputs of packed weights: the sizes of their bytes differ.
    packed: Option<(usize, usize)>,
}

impl TargetSearch<'_> {
    fn target(&self, node: &Node) -> Option<AdapterTarget> {
        let Form { kind, input, weight: weight_at, has_outputs_last, groups, bias, has_scaled_bias, packed } =
            form_of(node)?;
        let port = |k: usize| node.inputs.get(k).copied().flatten();
        let (x, read) = (port(input)?, port(weight_at)?);
        let value = node.outputs.first().copied().flatten()?;
        let dims = self.dims(read)?;
        let (outputs, inputs, window) = match (kind, dims.as_slice()) {
            _ if packed.is_some() => {
                let (outputs, inputs) = packed?;
                (outputs, inputs, Vec::new())
            }
            (LayerKind::Convolution, [outputs, inputs, window @ ..]) => {
                (*outputs, inputs * groups, window.to_vec())
            }
            (_, &[first, last]) if has_outputs_last => (last, first, Vec::new()),
            (_, &[first, last]) => (first, last, Vec::new()),
            _ => return None,
        };
        let dtype = self.graph.value(value).ty.dtype().filter(|dtype| dtype.is_float())?;
        let (source, mut changes) = self.source(read)?;
        if packed.is_some() {
            changes.insert(0, Change::Dequantize);
        }
        let weight = self.graph.name_of(source).to_owned();
        if FactorName::split(&weight).is_some() || outputs == 0 || inputs == 0 {
            return None;
        }
        let name = |id: ValueId| self.graph.name_of(id).to_owned();
        let node_name = if node.name.is_empty() { name(value) } else { node.name.to_string() };
        Some(AdapterTarget {
            weight,
            node_name,
            node: self.graph.node_label(node),
            module: None,
            kind,
            input: name(x),
            value: name(value),
            dtype,
            inputs,
            outputs,
            window,
            groups,
            directions: 1,
            weight_input: weight_at,
            read: name(read),
            dims,
            bias: bias.and_then(port).map(name),
            has_scaled_bias: has_scaled_bias && bias.and_then(port).is_some(),
            changes,
            has_outputs_last,
        })
    }

    /// Returns a weight of a recurrent layer.
    fn recurrent_target(&self, node: &Node, (port, letter): (usize, &str)) -> Option<AdapterTarget> {
        let (x, outer) = (node.inputs.first().copied()??, node.inputs.get(port).copied()??);
        let result = node.present_outputs().next()?;
        let read = recurrent::innermost(self.graph, outer, |id| self.makers.get(&id).copied());
        let &[directions, outputs, inputs] = self.dims(read)?.as_slice() else { return None };
        let (source, changes) = self.source(read)?;
        let name = |id: ValueId| self.graph.name_of(id).to_owned();
        let is_base = split_base(self.graph.name_of(read)).is_some();
        let value =
            if is_base { name(read) } else { recurrent::adapted_weight(self.graph.name_of(result), letter) };
        let dtype = self.graph.value(read).ty.dtype().filter(|dtype| dtype.is_float())?;
        if directions * outputs * inputs == 0 {
            return None;
        }
        Some(AdapterTarget {
            weight: name(source),
            node_name: if node.name.is_empty() { name(result) } else { node.name.to_string() },
            node: self.graph.node_label(node),
            module: None,
            kind: LayerKind::Recurrent,
            input: name(x),
            value,
            dtype,
            inputs,
            outputs,
            window: Vec::new(),
            groups: 1,
            directions,
            weight_input: port,
            read: name(read),
            dims: vec![directions, outputs, inputs],
            bias: None,
            has_scaled_bias: false,
            changes,
            has_outputs_last: false,
        })
    }

    fn dims(&self, id: ValueId) -> Option<Vec<usize>> {
        self.graph.value(id).ty.shape()?.concrete()
    }

    /// Returns the constant that a weight comes from, with the changes in between.
    fn source(&self, mut id: ValueId) -> Option<(ValueId, Vec<Change>)> {
        let mut changes = Vec::new();
        while self.graph.value(id).content().is_none() {
            let node = self.makers.get(&id)?;
            let from = node.inputs.first().copied().flatten()?;
            let change = match class_of(node) {
                Class::Transpose => {
                    let rank = self.dims(from)?.len();
                    let order = match node.attrs.ints("perm").ok()? {
                        Some(order) => {
                            order.iter().map(|&axis| usize::try_from(axis).ok()).collect::<Option<_>>()?
                        }
                        None => (0..rank).rev().collect(),
                    };
                    Some(Change::Transpose(order))
                }
                Class::Reshape | Class::Flatten | Class::Unsqueeze => {
                    Some(Change::Reshape { from: self.dims(from)? })
                }
                Class::Cast => Some(Change::Cast),
                Class::Dequantization => Some(Change::Dequantize),
                Class::Copy => None,
                _ => return None,
            };
            changes.extend(change);
            id = from;
        }
        Some((id, changes))
    }
}

/// Returns the form of a layer with weights. Layers that scale their product, or transpose their input, have none.
fn form_of(node: &Node) -> Option<Form> {
    let int = |name: &str| node.attrs.int(name).ok().flatten().unwrap_or(0);
    let size = |name: &str| node.attrs.int(name).ok().flatten().and_then(|size| usize::try_from(size).ok());
    let is_one = |name: &str| node.attrs.float(name).ok().flatten().is_none_or(|number| number == 1.0);
    let product = |has_outputs_last| {
        Some(Form {
            kind: LayerKind::Linear,
            input: 0,
            weight: 1,
            has_outputs_last,
            groups: 1,
            bias: None,
            has_scaled_bias: false,
            packed: None,
        })
    };
    match class_of(node) {
        Class::MatrixProduct => product(true),
        Class::PackedProduct => {
            let packed = Some((size("N")?, size("K")?));
            product(false).map(|form| Form { packed, ..form })
        }
        Class::AffineProduct | Class::ScaledProduct
            if is_one("alpha")
                && ["transA", "transBatchA", "transBatchB"].iter().all(|&name| int(name) == 0) =>
        {
            let bias = (class_of(node) == Class::AffineProduct).then_some(2);
            let has_scaled_bias = !is_one("beta");
            product(int("transB") == 0).map(|form| Form { bias, has_scaled_bias, ..form })
        }
        Class::Lookup if int("axis") == 0 => {
            product(true).map(|form| Form { kind: LayerKind::Embedding, input: 1, weight: 0, ..form })
        }
        Class::Convolution => Some(Form {
            kind: LayerKind::Convolution,
            input: 0,
            weight: 1,
            has_outputs_last: false,
            groups: size("group").unwrap_or(1).max(1),
            bias: Some(2),
            has_scaled_bias: false,
            packed: None,
        }),
        _ => None,
    }
}
