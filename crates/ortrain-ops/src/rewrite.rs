//! Context for the rewrite of one node.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Patch, Shape, Tensor, ValueId};

use crate::OpError;
use crate::broadcast::{self, ShapedNodeSink};
use crate::support::onnx_decomposition::NodeSink;

/// A node that is being rewritten. The replacement is collected in a patch.
pub struct Rewrite<'a> {
    graph: &'a Graph,
    node: &'a Node,
    patch: Patch,
    version: i64,
}

impl<'a> Rewrite<'a> {
    pub(crate) fn new(graph: &'a Graph, node: &'a Node, version: i64) -> Rewrite<'a> {
        let name = if node.name.is_empty() {
            node.present_outputs().next().map_or(String::new(), |id| graph.name_of(id).to_owned())
        } else {
            node.name.to_string()
        };
        Rewrite { graph, node, patch: Patch::new(graph, &format!("{name}/")), version }
    }

    pub(crate) fn into_patch(self) -> Patch {
        self.patch
    }

    /// Returns the version of the node for an upgrade, and the target version for a downgrade or a decomposition.
    #[must_use]
    pub fn version(&self) -> i64 {
        self.version
    }

    /// Returns the node.
    #[must_use]
    pub fn node(&self) -> &'a Node {
        self.node
    }

    /// Returns the node's attributes.
    #[must_use]
    pub fn attrs(&self) -> &'a Attrs {
        &self.node.attrs
    }

    /// Returns input `k`, if it is present.
    #[must_use]
    pub fn input(&self, k: usize) -> Option<ValueId> {
        self.node.inputs.get(k).copied().flatten()
    }

    /// Returns input `k`, which must be present.
    ///
    /// # Errors
    /// Returns an error if the input is missing.
    pub fn required_input(&self, k: usize) -> Result<ValueId, OpError> {
        self.input(k).ok_or_else(|| OpError::invalid(format!("input {k} is missing")))
    }

    /// Returns true if output `k` has a name.
    #[must_use]
    pub fn has_output(&self, k: usize) -> bool {
        self.node.outputs.get(k).copied().flatten().is_some()
    }

    /// Returns true if a node or the graph's outputs use output `k`.
    #[must_use]
    pub fn is_output_used(&self, k: usize) -> bool {
        let Some(output) = self.node.outputs.get(k).copied().flatten() else { return false };
        self.graph.outputs.contains(&output)
            || self.graph.nodes.iter().any(|node| node.present_inputs().any(|input| input == output))
    }

    /// Returns the element type of a value, if known.
    #[must_use]
    pub fn dtype(&self, value: ValueId) -> Option<DType> {
        self.patch.value(self.graph, value).ty.dtype()
    }

    /// Returns the shape of a value, if at least its rank is known.
    #[must_use]
    pub fn shape(&self, value: ValueId) -> Option<&Shape> {
        self.patch.value(self.graph, value).ty.shape()
    }

    /// Returns the content of a value, if it is constant.
    #[must_use]
    pub fn constant_of(&self, value: ValueId) -> Option<&Tensor> {
        self.patch.value(self.graph, value).content()
    }

    /// Returns the node of the graph that produces a value, if any.
    #[must_use]
    pub fn producer_of(&self, value: ValueId) -> Option<&'a Node> {
        self.graph.nodes.iter().find(|node| node.present_outputs().any(|output| output == value))
    }

    /// Returns the sizes of a value's axes as numbers, if all are known.
    #[must_use]
    pub fn dims(&self, value: ValueId) -> Option<Vec<usize>> {
        self.shape(value)?.iter().map(Dim::known).collect()
    }

    /// Returns the elements of a vector of sizes, if all are known: it is constant, or computed from concrete shapes.
    #[must_use]
    pub fn sizes_of(&self, value: ValueId) -> Option<Vec<i64>> {
        let entry = self.patch.value(self.graph, value);
        let computed =
            || entry.sizes.as_ref()?.iter().map(|dim| dim.known().map(|size| size as i64)).collect();
        entry.content().and_then(Tensor::to_i64).or_else(computed)
    }

    /// Returns the size of an axis of a value, as a vector of one element: a constant if the size is known.
    pub fn size_along(&mut self, value: ValueId, axis: usize) -> ValueId {
        if let Some(size) = self.shape(value).and_then(|shape| shape.get(axis)).and_then(Dim::known) {
            return self.ints("size", &[size as i64]);
        }
        let shape = self.add("Shape", &[value], Attrs::new());
        let axis = self.ints("axis", &[axis as i64]);
        self.add("Gather", &[shape, axis], Attrs::new().with("axis", 0i64))
    }

    /// Adds a constant.
    pub fn constant(&mut self, name: &str, tensor: Tensor) -> ValueId {
        self.patch.constant(name, tensor)
    }

    /// Adds a constant vector of int64.
    pub fn ints(&mut self, name: &str, values: &[i64]) -> ValueId {
        self.patch.constant(name, Tensor::i64(&[values.len()], values))
    }

    /// Adds a node of `ai.onnx` with one output.
    pub fn add(&mut self, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.patch.node("", op, &inputs, attrs)
    }

    /// Counts from 0 to the element of `count`, exclusive. `count` is a vector of int64 with one element. The nodes
    /// compute the positions of ones, because `Range` is newer than some target versions.
    pub fn count_up(&mut self, count: ValueId) -> ValueId {
        let ones = self.add("ConstantOfShape", &[count], Attrs::new().with("value", Tensor::i64(&[1], &[1])));
        let positions = self.add("NonZero", &[ones], Attrs::new());
        let flat = self.ints("flat", &[-1]);
        self.add("Reshape", &[positions, flat], Attrs::new())
    }

    /// Adds a node of any domain with several outputs.
    pub fn add_node(
        &mut self,
        domain: &str,
        op: &str,
        inputs: &[Option<ValueId>],
        outputs: usize,
        attrs: Attrs,
    ) -> Vec<ValueId> {
        self.patch.node_with_outputs(domain, op, inputs, outputs, attrs)
    }

    /// Sums `value`, which has the shape of `output`, over the axes along which `input` was broadcast to this shape.
    ///
    /// # Errors
    /// Returns an error if the declared shapes do not broadcast.
    pub fn sum_to(&mut self, value: ValueId, input: ValueId, output: ValueId) -> Result<ValueId, OpError> {
        broadcast::sum_to(self, value, input, output)
    }

    /// Returns the graph and the patch, for helpers that work on patches.
    pub fn patch(&mut self) -> (&Graph, &mut Patch) {
        (self.graph, &mut self.patch)
    }

    /// Replaces output `k` by `value`.
    pub fn replace_output(&mut self, k: usize, value: ValueId) {
        let Some(old) = self.node.outputs.get(k).copied().flatten() else { return };
        let is_new = self.patch.nodes.iter().any(|node| node.present_outputs().any(|output| output == value));
        // A value that existed before cannot take over the name of the output.
        let value = if is_new { value } else { self.add("Identity", &[value], Attrs::new()) };
        self.patch.replace(old, value);
    }

    /// Emits the same node with other inputs and attributes.
    pub fn emit_same_op(&mut self, inputs: &[Option<ValueId>], attrs: Attrs) {
        self.emit_op(&self.node.domain.clone(), &self.node.op.clone(), inputs, attrs);
    }

    /// Emits another operator with the node's name and outputs.
    pub fn emit_op(&mut self, domain: &str, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) {
        let mut node = Node::new(domain, op, inputs, &self.node.outputs, attrs);
        node.name = self.node.name.clone();
        self.patch.push(node);
    }
}

impl NodeSink for Rewrite<'_> {
    fn emit(&mut self, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> ValueId {
        self.patch().1.emit(op, inputs, attrs)
    }

    fn emit_constant(&mut self, tensor: Tensor) -> ValueId {
        self.patch().1.emit_constant(tensor)
    }
}

impl ShapedNodeSink for Rewrite<'_> {
    fn known_shape(&self, value: ValueId) -> Option<Shape> {
        self.shape(value).cloned()
    }

    fn emit_microsoft(&mut self, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.add_node("com.microsoft", op, &inputs, 1, attrs)[0]
    }

    fn emit_ints(&mut self, name: &str, values: &[i64]) -> ValueId {
        self.ints(name, values)
    }
}

/// Moves an attribute of integers to an input (as ONNX did for the axes of reductions and of Squeeze).
///
/// # Errors
/// Returns an error if the attribute is of another kind.
pub fn ints_attribute_to_input(
    rw: &mut Rewrite<'_>,
    attribute: &str,
    position: usize,
) -> Result<(), OpError> {
    let Some(values) = rw.attrs().ints(attribute)?.map(<[i64]>::to_vec) else { return Ok(()) };
    let mut inputs = rw.node().inputs.to_vec();
    inputs.resize(position, None);
    inputs.push(Some(rw.ints(attribute, &values)));
    let mut attrs = rw.attrs().clone();
    attrs.0.remove(attribute);
    rw.emit_same_op(&inputs, attrs);
    Ok(())
}

/// Moves a constant input of integers back to an attribute.
///
/// # Errors
/// Returns an error if the input is not constant: the older version cannot express the node.
pub fn ints_input_to_attribute(
    rw: &mut Rewrite<'_>,
    attribute: &str,
    position: usize,
) -> Result<(), OpError> {
    let mut inputs = rw.node().inputs.to_vec();
    let mut attrs = rw.attrs().clone();
    if let Some(id) = rw.input(position) {
        let values = rw.constant_of(id).and_then(Tensor::to_i64).ok_or_else(|| {
            OpError::unsupported(format!(
                "{attribute} is computed at run time, which this opset cannot express"
            ))
        })?;
        attrs = attrs.with(attribute, values);
    }
    inputs.truncate(position);
    rw.emit_same_op(&inputs, attrs);
    Ok(())
}
