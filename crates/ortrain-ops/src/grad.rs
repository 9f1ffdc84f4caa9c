//! What an operator sees when it is differentiated.

use ortrain_expr::Expr;
use ortrain_graph::{Attrs, DType, Graph, Node, Shape, Tensor, ValueId, ValueType};

use crate::OpError;
use crate::broadcast::{self, ShapedEmit};
use crate::onnx_decomposition::{NodeSink, emit_as_onnx};

/// One node while the gradient graph is built. New nodes go behind the forward nodes.
pub struct Grad<'a> {
    pub(crate) graph: &'a mut Graph,
    pub(crate) node_index: usize,
    /// New nodes, in order.
    pub(crate) nodes: &'a mut Vec<Node>,
    /// What new names begin with.
    pub(crate) prefix: String,
    pub(crate) output_grads: Vec<Option<ValueId>>,
    pub(crate) wanted: Vec<bool>,
    pub(crate) input_grads: Vec<Option<ValueId>>,
}

impl Grad<'_> {
    /// The node.
    #[must_use]
    pub fn node(&self) -> &Node {
        &self.graph.nodes[self.node_index]
    }

    /// Input `k`.
    ///
    /// # Errors
    /// When it is left out.
    pub fn input(&self, k: usize) -> Result<ValueId, OpError> {
        let found = self.node().inputs.get(k).copied().flatten();
        found.ok_or_else(|| OpError::invalid(format!("input {k} is missing")))
    }

    /// Input `k`, if it is there.
    #[must_use]
    pub fn optional_input(&self, k: usize) -> Option<ValueId> {
        self.node().inputs.get(k).copied().flatten()
    }

    /// Output `k` of the forward node; made now if the model did not ask for it. `name` is what it is called then.
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

    /// Makes another operator of the node, one that computes the same outputs (and further ones, perhaps). `change` is
    /// given the graph and the node's index in it.
    pub fn change_node(&mut self, change: impl FnOnce(&mut Graph, usize)) {
        change(self.graph, self.node_index);
    }

    /// The gradient that arrives at output `k`; `None` stands for zeros.
    #[must_use]
    pub fn output_grad(&self, k: usize) -> Option<ValueId> {
        self.output_grads.get(k).copied().flatten()
    }

    /// Whether a gradient of input `k` is wanted.
    #[must_use]
    pub fn wants(&self, k: usize) -> bool {
        self.wanted.get(k).copied().unwrap_or(false)
    }

    /// Gives the gradient of input `k`: a value of the input's shape and element type.
    pub fn give(&mut self, k: usize, gradient: ValueId) {
        self.input_grads[k] = Some(gradient);
    }

    /// The type of a value, forward or new.
    #[must_use]
    pub fn ty(&self, value: ValueId) -> &ValueType {
        &self.graph.value(value).ty
    }

    /// The element type of a value.
    ///
    /// # Errors
    /// When it is not known.
    pub fn dtype(&self, value: ValueId) -> Result<DType, OpError> {
        self.ty(value).dtype().ok_or_else(|| OpError::invalid("the type of a value is not known"))
    }

    /// The name of a value.
    #[must_use]
    pub fn name_of(&self, value: ValueId) -> &str {
        self.graph.name_of(value)
    }

    /// The shape of a value, if at least its rank is known.
    #[must_use]
    pub fn shape(&self, value: ValueId) -> Option<&Shape> {
        self.ty(value).shape()
    }

    /// The content of a value, if it is constant.
    #[must_use]
    pub fn constant_of(&self, value: ValueId) -> Option<&Tensor> {
        self.graph.value(value).content()
    }

    /// A new constant.
    pub fn constant(&mut self, name: &str, tensor: Tensor) -> ValueId {
        let name = format!("{}{name}", self.prefix);
        self.graph.add_constant(&name, tensor)
    }

    /// A new constant vector of int64.
    pub fn ints(&mut self, name: &str, values: &[i64]) -> ValueId {
        self.constant(name, Tensor::i64(&[values.len()], values))
    }

    /// A new node of `ai.onnx` with one output.
    pub fn add(&mut self, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        self.add_in("", op, inputs, attrs)
    }

    /// A new node of any domain with one output.
    pub fn add_in(&mut self, domain: &str, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.add_node(domain, op, &inputs, 1, attrs)[0]
    }

    /// A new node with optional inputs and several outputs.
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

    /// A new node of which only the `wanted` outputs are made.
    pub fn add_wanted(
        &mut self,
        domain: &str,
        op: &str,
        inputs: &[Option<ValueId>],
        wanted: &[bool],
        attrs: Attrs,
    ) -> Vec<Option<ValueId>> {
        let label = format!("{}{op}_{}", self.prefix, self.nodes.len());
        let name = |k: usize| if k == 0 { format!("{label}_out") } else { format!("{label}_out{k}") };
        let outputs: Vec<Option<ValueId>> = (0..wanted.len())
            .map(|k| wanted[k].then(|| self.graph.add_value(&name(k), ValueType::Unknown)))
            .collect();
        let last = wanted.iter().rposition(|&wanted| wanted).map_or(0, |last| last + 1);
        let mut node = Node::new(domain, op, inputs, &outputs[..last], attrs);
        node.name = label.into();
        self.nodes.push(node);
        outputs
    }

    /// A name for a node that is to be pushed.
    #[must_use]
    pub fn new_name(&self, op: &str) -> String {
        format!("{}{op}_{}", self.prefix, self.nodes.len())
    }

    /// Adds a node as it is.
    pub fn push(&mut self, node: Node) {
        self.nodes.push(node);
    }

    /// A new value of the given type, to be made by a node that is pushed.
    pub fn value(&mut self, name: &str, ty: ValueType) -> ValueId {
        self.graph.add_value(name, ty)
    }

    /// The shape of a value as a value: a constant if it is known, else a `Shape` node.
    pub fn shape_of(&mut self, value: ValueId) -> ValueId {
        match self.shape(value).and_then(Shape::concrete) {
            Some(dims) => {
                let dims: Vec<i64> = dims.iter().map(|&dim| dim as i64).collect();
                self.ints("shape", &dims)
            }
            None => self.add("Shape", &[value], Attrs::new()),
        }
    }

    /// An expression as nodes; load `k` is `loads[k]`.
    ///
    /// # Errors
    /// When a primitive has no spelling for the element type.
    pub fn emit_as_onnx(&mut self, expr: &Expr, loads: &[ValueId], dtype: DType) -> Result<ValueId, OpError> {
        emit_as_onnx(expr, dtype, self, |_, slot| loads[slot])
    }

    /// `gradient`, which has the shape of `output`, summed over the axes along which `input` was broadcast to it.
    ///
    /// Where symbolic sizes leave open whether an axis was broadcast, the axes are found at run time.
    ///
    /// # Errors
    /// When the element type is not known.
    pub fn sum_to(&mut self, gradient: ValueId, input: ValueId, output: ValueId) -> Result<ValueId, OpError> {
        broadcast::sum_to(self, gradient, input, output)
    }
}

impl ShapedEmit for Grad<'_> {
    fn shape_known(&self, value: ValueId) -> Option<Shape> {
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
