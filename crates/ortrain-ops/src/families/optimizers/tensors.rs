//! Optimizer formulas over whole tensors, for steps with more than element-wise operations and sums.

use std::collections::BTreeMap;

use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId, ValueType};

use crate::support::onnx_decomposition::NodeSink;

/// Builder of the step of one parameter from operators. Values have the type of the arithmetic.
pub struct TensorBuilder<'g> {
    pub(super) graph: &'g mut Graph,
    pub(super) element: DType,
    /// Parameter, gradient, slots and scalars of the step, by name.
    values: BTreeMap<String, ValueId>,
    /// Names of the scalars, which are float64 until they are cast.
    numbers: Vec<String>,
}

impl<'g> TensorBuilder<'g> {
    pub(super) fn new(
        graph: &'g mut Graph,
        element: DType,
        named: BTreeMap<String, ValueId>,
        numbers: Vec<String>,
    ) -> TensorBuilder<'g> {
        TensorBuilder { graph, element, values: named, numbers }
    }

    /// Casts the scalars of the step to the type of the arithmetic.
    pub(super) fn cast_numbers(&mut self) {
        for name in std::mem::take(&mut self.numbers) {
            let cast = self.cast(self.values[&name]);
            self.values.insert(name, cast);
        }
    }

    /// Returns `parameter`, `gradient`, a slot, or a scalar of the step.
    ///
    /// # Panics
    /// Panics if the row has no value with this name.
    #[must_use]
    pub fn get(&self, name: &str) -> ValueId {
        self.values[name]
    }

    /// Names a value, so that branches can use it.
    pub fn name_value(&mut self, name: &str, value: ValueId) {
        self.values.insert(name.to_owned(), value);
    }

    /// Adds an operator of `ai.onnx` 17.
    pub fn op(&mut self, op: &str, inputs: &[ValueId]) -> ValueId {
        self.op_with_attrs(op, inputs, Attrs::new())
    }

    /// Adds an operator with attributes.
    pub fn op_with_attrs(&mut self, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.graph.emit(op, &inputs, attrs)
    }

    /// Adds a constant.
    pub fn constant(&mut self, value: f64) -> ValueId {
        self.graph.emit_constant(Tensor::scalar(self.element, value))
    }

    /// Casts a value to the type of the arithmetic.
    pub fn cast(&mut self, x: ValueId) -> ValueId {
        let to = i64::from(self.element.to_onnx());
        self.op_with_attrs("Cast", &[x], Attrs::new().with("to", to))
    }

    /// Adds a constant integer.
    pub fn integer(&mut self, value: i64) -> ValueId {
        self.graph.emit_constant(Tensor::i64(&[], &[value]))
    }

    /// Adds the mean over one axis, which is kept with size 1.
    pub fn mean(&mut self, x: ValueId, axis: i64) -> ValueId {
        self.op_with_attrs("ReduceMean", &[x], Attrs::new().with("axes", vec![axis]).with("keepdims", 1i64))
    }

    /// Adds the L2 norm of all elements, a scalar.
    pub fn norm(&mut self, x: ValueId) -> ValueId {
        let square = self.op("Mul", &[x, x]);
        let sum = self.op_with_attrs("ReduceSum", &[square], Attrs::new().with("keepdims", 0i64));
        self.op("Sqrt", &[sum])
    }

    /// Adds a moving average, `old + share * (new - old)`.
    pub fn lerp(&mut self, old: ValueId, new: ValueId, share: ValueId) -> ValueId {
        let difference = self.op("Sub", &[new, old]);
        let moved = self.op("Mul", &[share, difference]);
        self.op("Add", &[old, moved])
    }

    /// Adds a boolean of one element: true if a tensor has this number of axes.
    pub fn has_rank(&mut self, x: ValueId, rank: i64) -> ValueId {
        let axes = self.rank(x);
        let expected = self.integer(rank);
        self.op("Equal", &[axes, expected])
    }

    /// Adds the number of axes of a tensor.
    pub fn rank(&mut self, x: ValueId) -> ValueId {
        let shape = self.op("Shape", &[x]);
        self.op("Size", &[shape])
    }

    /// Adds an `If` with two formulas and returns the results. Both formulas can use all named values.
    pub fn add_if(
        &mut self,
        condition: ValueId,
        outputs: usize,
        then: impl FnOnce(&mut TensorBuilder<'_>) -> Vec<ValueId>,
        otherwise: impl FnOnce(&mut TensorBuilder<'_>) -> Vec<ValueId>,
    ) -> Vec<ValueId> {
        let captured: Vec<(String, ValueId)> =
            self.values.iter().map(|(name, &id)| (name.clone(), id)).collect();
        let (then, otherwise) = (
            self.build_branch("then", &captured, then),
            self.build_branch("otherwise", &captured, otherwise),
        );
        let attrs = Attrs::new().with("then_branch", then).with("else_branch", otherwise);
        let mut ports = vec![Some(condition)];
        ports.extend(captured.iter().map(|&(_, id)| Some(id)));
        let label = format!("If_{}", self.graph.nodes.len());
        let (mut node, ids) = Node::labelled(&label, "", "If", &ports, outputs, attrs, |name| {
            self.graph.add_value(name, ValueType::Unknown)
        });
        node.captures = captured.len();
        self.graph.nodes.push(node);
        ids
    }

    fn build_branch(
        &self,
        name: &str,
        captured: &[(String, ValueId)],
        write: impl FnOnce(&mut TensorBuilder<'_>) -> Vec<ValueId>,
    ) -> Graph {
        let mut graph = Graph::new(name);
        let mut named = BTreeMap::new();
        for (known, id) in captured {
            // Captured values have the same names as outside.
            let inner = graph.add_value(self.graph.name_of(*id), ValueType::Unknown);
            graph.inputs.push(inner);
            named.insert(known.clone(), inner);
        }
        let results = write(&mut TensorBuilder::new(&mut graph, self.element, named, Vec::new()));
        // Each output is the result of its own node.
        let results = results.iter().map(|&id| graph.emit("Identity", &[Some(id)], Attrs::new())).collect();
        graph.outputs = results;
        graph
    }
}
