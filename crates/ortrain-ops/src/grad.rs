//! Context of an operator during differentiation.

use ortrain_expr::Expr;
use ortrain_graph::{Attrs, DType, Graph, Node, Shape, Tensor, ValueId, ValueType};

use crate::broadcast::{self, ShapedNodeSink};
use crate::support::onnx_decomposition::{NodeSink, emit_as_onnx};
use crate::{Error, OpError};

/// Returns the element type of the gradient of a value: the type of floats, and float32 for quantized integers.
pub(crate) fn gradient_dtype(dtype: DType) -> DType {
    if dtype.is_float() { dtype } else { DType::F32 }
}

/// Returns the type of the gradient of a value of this type.
pub(crate) fn gradient_type(ty: &ValueType) -> ValueType {
    match ty {
        ValueType::Tensor(dtype, shape) => ValueType::Tensor(gradient_dtype(*dtype), shape.clone()),
        other => other.clone(),
    }
}

/// Values with known gradients, each with its gradient.
pub(crate) type Seeds<'a> = &'a [(ValueId, ValueId)];

/// Pass that adds the gradients of targets. A target that no gradient reaches has `None`.
type Backpropagate = fn(&mut Graph, Seeds<'_>, &[ValueId]) -> Result<Vec<Option<ValueId>>, Error>;

/// Passes that operators apply to their subgraphs for a gradient. Passes call operators, so the caller of an operator
/// hands them over.
#[derive(Clone, Copy)]
pub(crate) struct GradientPasses {
    /// Infers the types of a subgraph with typed inputs, and folds constants.
    pub(crate) infer: fn(&mut Graph) -> Result<bool, Error>,
    /// Infers the types of a graph with correct declared shapes.
    pub(crate) infer_added: fn(&mut Graph) -> Result<(), Error>,
    /// Replaces nodes that update state by nodes without updates.
    pub(crate) remove_updates: fn(&mut Graph) -> Result<(), Error>,
    /// Decomposes the compositions between targets and seeds.
    pub(crate) decompose_on_path: fn(&mut Graph, Seeds<'_>, &[ValueId]) -> Result<(), Error>,
    /// Adds the gradients of targets.
    pub(crate) backpropagate: Backpropagate,
}

/// One node while the gradient graph is built. New nodes follow the forward nodes.
pub struct Grad<'a> {
    /// Passes for subgraphs of the node.
    pub(crate) passes: GradientPasses,
    pub(crate) graph: &'a mut Graph,
    pub(crate) node_index: usize,
    /// New nodes, in order.
    pub(crate) nodes: &'a mut Vec<Node>,
    /// Prefix of new names.
    pub(crate) prefix: String,
    pub(crate) output_grads: Vec<Option<ValueId>>,
    pub(crate) input_needs_grad: Vec<bool>,
    pub(crate) input_grads: Vec<Option<ValueId>>,
}

impl Grad<'_> {
    /// Returns the node.
    #[must_use]
    pub fn node(&self) -> &Node {
        &self.graph.nodes[self.node_index]
    }

    /// Returns input `k`.
    ///
    /// # Errors
    /// Returns an error if the input is missing.
    pub fn input(&self, k: usize) -> Result<ValueId, OpError> {
        let port = self.node().inputs.get(k).copied().flatten();
        port.ok_or_else(|| OpError::invalid(format!("input {k} is missing")))
    }

    /// Returns input `k`, if it is present.
    #[must_use]
    pub fn optional_input(&self, k: usize) -> Option<ValueId> {
        self.node().inputs.get(k).copied().flatten()
    }

    /// Returns output `k` of the forward node. If the model does not use the output, it is created with the suffix
    /// `name`.
    pub fn output(&mut self, k: usize, name: &str) -> ValueId {
        if let Some(id) = self.node().outputs.get(k).copied().flatten() {
            return id;
        }
        let base = self.node().present_outputs().next().map_or("", |id| self.graph.name_of(id)).to_owned();
        let id = self.graph.add_value(&format!("{base}_{name}"), ValueType::Unknown);
        let node = &mut self.graph.nodes[self.node_index];
        if node.outputs.len() <= k {
            node.outputs.resize(k + 1, None);
        }
        node.outputs[k] = Some(id);
        id
    }

    /// Replaces the node by another operator that computes the same outputs, and possibly further ones. `change` gets
    /// the graph and the node's index in it.
    pub fn replace_node(&mut self, change: impl FnOnce(&mut Graph, usize)) {
        change(self.graph, self.node_index);
    }

    /// Returns the gradient of output `k`; `None` is a zero gradient.
    #[must_use]
    pub fn output_grad(&self, k: usize) -> Option<ValueId> {
        self.output_grads.get(k).copied().flatten()
    }

    /// Returns true if input `k` needs a gradient.
    #[must_use]
    pub fn needs_grad(&self, k: usize) -> bool {
        self.input_needs_grad.get(k).copied().unwrap_or(false)
    }

    /// Sets the gradient of input `k`, which has the input's shape. Its element type is the input's, or float32 for
    /// quantized integers.
    pub fn set_grad(&mut self, k: usize, gradient: ValueId) {
        self.input_grads[k] = Some(gradient);
    }

    /// Returns the type of a value, forward or new.
    #[must_use]
    pub fn ty(&self, value: ValueId) -> &ValueType {
        &self.graph.value(value).ty
    }

    /// Returns the element type of a value.
    ///
    /// # Errors
    /// Returns an error if the element type is unknown.
    pub fn dtype(&self, value: ValueId) -> Result<DType, OpError> {
        self.ty(value).dtype().ok_or_else(|| OpError::invalid("the type of a value is not known"))
    }

    /// Returns the name of a value.
    #[must_use]
    pub fn name_of(&self, value: ValueId) -> &str {
        self.graph.name_of(value)
    }

    /// Returns the shape of a value, if at least its rank is known.
    #[must_use]
    pub fn shape(&self, value: ValueId) -> Option<&Shape> {
        self.ty(value).shape()
    }

    /// Returns the content of a value, if it is constant.
    #[must_use]
    pub fn constant_of(&self, value: ValueId) -> Option<&Tensor> {
        self.graph.value(value).content()
    }

    /// Adds a constant.
    pub fn constant(&mut self, name: &str, tensor: Tensor) -> ValueId {
        let name = format!("{}{name}", self.prefix);
        self.graph.add_constant(&name, tensor)
    }

    /// Adds a constant vector of int64.
    pub fn ints(&mut self, name: &str, values: &[i64]) -> ValueId {
        self.constant(name, Tensor::i64(&[values.len()], values))
    }

    /// Adds a node of `ai.onnx` with one output.
    pub fn add(&mut self, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        self.add_in("", op, inputs, attrs)
    }

    /// Adds a node of any domain with one output.
    pub fn add_in(&mut self, domain: &str, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.add_node(domain, op, &inputs, 1, attrs)[0]
    }

    /// Adds a node with optional inputs and several outputs.
    pub fn add_node(
        &mut self,
        domain: &str,
        op: &str,
        inputs: &[Option<ValueId>],
        outputs: usize,
        attrs: Attrs,
    ) -> Vec<ValueId> {
        let label = format!("{}{op}_{}", self.prefix, self.nodes.len());
        let (node, ids) = Node::labelled(&label, domain, op, inputs, outputs, attrs, |name| {
            self.graph.add_value(name, ValueType::Unknown)
        });
        self.nodes.push(node);
        ids
    }

    /// Adds a node with the outputs that are true in `needed`.
    pub fn add_node_with_optional_outputs(
        &mut self,
        domain: &str,
        op: &str,
        inputs: &[Option<ValueId>],
        needed: &[bool],
        attrs: Attrs,
    ) -> Vec<Option<ValueId>> {
        let label = format!("{}{op}_{}", self.prefix, self.nodes.len());
        let name = |k: usize| if k == 0 { format!("{label}_out") } else { format!("{label}_out{k}") };
        let outputs: Vec<Option<ValueId>> = (0..needed.len())
            .map(|k| needed[k].then(|| self.graph.add_value(&name(k), ValueType::Unknown)))
            .collect();
        let last = needed.iter().rposition(|&is_needed| is_needed).map_or(0, |last| last + 1);
        let mut node = Node::new(domain, op, inputs, &outputs[..last], attrs);
        node.name = label.into();
        self.nodes.push(node);
        outputs
    }

    /// Returns a name for a node that is pushed next.
    #[must_use]
    pub fn new_name(&self, op: &str) -> String {
        format!("{}{op}_{}", self.prefix, self.nodes.len())
    }

    /// Adds a complete node.
    pub fn push(&mut self, node: Node) {
        self.nodes.push(node);
    }

    /// Adds a value of type `ty`, for a node that is pushed later.
    pub fn value(&mut self, name: &str, ty: ValueType) -> ValueId {
        self.graph.add_value(name, ty)
    }

    /// Returns the shape of a value as a tensor: a constant if the shape is known, otherwise the result of a `Shape`
    /// node.
    pub fn shape_of(&mut self, value: ValueId) -> ValueId {
        match self.shape(value).and_then(Shape::concrete) {
            Some(dims) => {
                let dims: Vec<i64> = dims.iter().map(|&dim| dim as i64).collect();
                self.ints("shape", &dims)
            }
            None => self.add("Shape", &[value], Attrs::new()),
        }
    }

    /// Emits an expression as nodes; load `k` is `loads[k]`.
    ///
    /// # Errors
    /// Returns an error if a primitive has no ONNX equivalent for the element type.
    pub fn emit_as_onnx(&mut self, expr: &Expr, loads: &[ValueId], dtype: DType) -> Result<ValueId, OpError> {
        emit_as_onnx(expr, dtype, self, |_, slot| loads[slot])
    }

    /// Sums `gradient`, which has the shape of `output`, over the axes along which `input` was broadcast to this shape.
    ///
    /// If symbolic sizes do not show which axes were broadcast, the axes are determined at run time.
    ///
    /// # Errors
    /// Returns an error if the element type is unknown.
    pub fn sum_to(&mut self, gradient: ValueId, input: ValueId, output: ValueId) -> Result<ValueId, OpError> {
        broadcast::sum_to(self, gradient, input, output)
    }
}

impl ShapedNodeSink for Grad<'_> {
    fn known_shape(&self, value: ValueId) -> Option<Shape> {
        self.shape(value).cloned()
    }

    fn emit_microsoft(&mut self, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        self.add_in("com.microsoft", op, inputs, attrs)
    }

    fn emit_ints(&mut self, name: &str, values: &[i64]) -> ValueId {
        self.ints(name, values)
    }
}

impl NodeSink for Grad<'_> {
    fn emit(&mut self, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> ValueId {
        self.add_node("", op, inputs, 1, attrs)[0]
    }

    fn emit_constant(&mut self, tensor: Tensor) -> ValueId {
        self.constant("constant", tensor)
    }
}
