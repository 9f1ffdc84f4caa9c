//! Rewriting one node.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Patch, Shape, Tensor, ValueId};

use crate::OpError;
use crate::broadcast::{self, ShapedEmit};
use crate::onnx_decomposition::NodeSink;

/// A node that is to be written in other words: the replacement is collected in a patch.
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

    /// When upgrading, the version the node is written in; when downgrading or decomposing, the version it shall be written
    /// for.
    #[must_use]
    pub fn version(&self) -> i64 {
        self.version
    }

    /// The node.
    #[must_use]
    pub fn node(&self) -> &'a Node {
        self.node
    }

    /// The node's attributes.
    #[must_use]
    pub fn attrs(&self) -> &'a Attrs {
        &self.node.attrs
    }

    /// Input `k`, if it is there.
    #[must_use]
    pub fn input(&self, k: usize) -> Option<ValueId> {
        self.node.inputs.get(k).copied().flatten()
    }

    /// Input `k`, which must be there.
    ///
    /// # Errors
    /// When it is not.
    pub fn required(&self, k: usize) -> Result<ValueId, OpError> {
        self.input(k).ok_or_else(|| OpError::invalid(format!("input {k} is missing")))
    }

    /// Whether output `k` has a name.
    #[must_use]
    pub fn has_output(&self, k: usize) -> bool {
        self.node.outputs.get(k).copied().flatten().is_some()
    }

    /// Whether a node or the graph's outputs use output `k`.
    #[must_use]
    pub fn is_output_used(&self, k: usize) -> bool {
        let Some(output) = self.node.outputs.get(k).copied().flatten() else { return false };
        self.graph.outputs.contains(&output)
            || self.graph.nodes.iter().any(|node| node.present_inputs().any(|input| input == output))
    }

    /// The element type of a value, if known.
    #[must_use]
    pub fn dtype(&self, value: ValueId) -> Option<DType> {
        self.patch.value(self.graph, value).ty.dtype()
    }

    /// The shape of a value, if at least its rank is known.
    #[must_use]
    pub fn shape(&self, value: ValueId) -> Option<&Shape> {
        self.patch.value(self.graph, value).ty.shape()
    }

    /// The content of a value, if it is constant.
    #[must_use]
    pub fn constant_of(&self, value: ValueId) -> Option<&Tensor> {
        self.patch.value(self.graph, value).content()
    }

    /// The node that makes a value, if one of the graph does.
    #[must_use]
    pub fn maker_of(&self, value: ValueId) -> Option<&'a Node> {
        self.graph.nodes.iter().find(|node| node.present_outputs().any(|output| output == value))
    }

    /// The sizes of a value's axes as numbers, if all are known.
    #[must_use]
    pub fn dims(&self, value: ValueId) -> Option<Vec<usize>> {
        self.shape(value)?.iter().map(Dim::known).collect()
    }

    /// The elements of a vector of sizes, if all are known: it is constant, or computed from shapes that are numbers.
    #[must_use]
    pub fn sizes_of(&self, value: ValueId) -> Option<Vec<i64>> {
        let entry = self.patch.value(self.graph, value);
        let computed =
            || entry.sizes.as_ref()?.iter().map(|dim| dim.known().map(|size| size as i64)).collect();
        entry.content().and_then(Tensor::to_i64).or_else(computed)
    }

    /// The size of an axis of a value, as a vector of one element: a constant if it is known.
    pub fn size_along(&mut self, value: ValueId, axis: usize) -> ValueId {
        if let Some(size) = self.shape(value).and_then(|shape| shape.get(axis)).and_then(Dim::known) {
            return self.ints("size", &[size as i64]);
        }
        let shape = self.add("Shape", &[value], Attrs::new());
        let axis = self.ints("axis", &[axis as i64]);
        self.add("Gather", &[shape, axis], Attrs::new().with("axis", 0i64))
    }

    /// A new constant.
    pub fn constant(&mut self, name: &str, tensor: Tensor) -> ValueId {
        self.patch.constant(name, tensor)
    }

    /// A new constant vector of int64.
    pub fn ints(&mut self, name: &str, values: &[i64]) -> ValueId {
        self.patch.constant(name, Tensor::i64(&[values.len()], values))
    }

    /// A new node of `ai.onnx` with one output.
    pub fn add(&mut self, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.patch.node("", op, &inputs, attrs)
    }

    /// The numbers 0, 1, ... up to (not including) the one element of `count`, a vector of int64: the positions of
    /// ones. (`Range` would say it in one node, but is younger than what this is used for.)
    pub fn count_up(&mut self, count: ValueId) -> ValueId {
        let ones = self.add("ConstantOfShape", &[count], Attrs::new().with("value", Tensor::i64(&[1], &[1])));
        let positions = self.add("NonZero", &[ones], Attrs::new());
        let flat = self.ints("flat", &[-1]);
        self.add("Reshape", &[positions, flat], Attrs::new())
    }

    /// A new node of any domain with several outputs.
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

    /// `value`, which has the shape of `output`, summed over the axes along which `input` was broadcast to it.
    ///
    /// # Errors
    /// When the declared shapes do not broadcast.
    pub fn sum_to(&mut self, value: ValueId, input: ValueId, output: ValueId) -> Result<ValueId, OpError> {
        broadcast::sum_to(self, value, input, output)
    }

    /// The nodes' patch, for helpers that work on patches.
    pub fn patch(&mut self) -> (&Graph, &mut Patch) {
        (self.graph, &mut self.patch)
    }

    /// Says that `value` is what output `k` was.
    pub fn output(&mut self, k: usize, value: ValueId) {
        let Some(old) = self.node.outputs.get(k).copied().flatten() else { return };
        let made_here =
            self.patch.nodes.iter().any(|node| node.present_outputs().any(|output| output == value));
        // A value that was there before cannot take over the name of the output.
        let value = if made_here { value } else { self.add("Identity", &[value], Attrs::new()) };
        self.patch.replace(old, value);
    }

    /// The same node with other inputs and attributes.
    pub fn same(&mut self, inputs: &[Option<ValueId>], attrs: Attrs) {
        self.renamed(&self.node.domain.clone(), &self.node.op.clone(), inputs, attrs);
    }

    /// Another operator with the same name and outputs.
    pub fn renamed(&mut self, domain: &str, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) {
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

impl ShapedEmit for Rewrite<'_> {
    fn shape_known(&self, value: ValueId) -> Option<Shape> {
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
/// When the attribute is of another kind.
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
    rw.same(&inputs, attrs);
    Ok(())
}

/// Moves a constant input of integers back to an attribute.
///
/// # Errors
/// When the input is not constant: then the older version cannot express the node.
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
    rw.same(&inputs, attrs);
    Ok(())
}
