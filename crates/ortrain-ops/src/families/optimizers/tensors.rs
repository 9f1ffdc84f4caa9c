//! Formulas that combine the elements of a parameter by more than sums: operators over whole tensors.

use std::collections::BTreeMap;

use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId, ValueType};

use super::function::{ELEMENT_TYPE, OptimizerFunction};
use crate::onnx_decomposition::NodeSink;

/// The step of one parameter while its operators are added to a graph. Values have the type that is computed with.
pub struct Tensors<'g> {
    graph: &'g mut Graph,
    element: DType,
    /// Parameter, gradient, slots and numbers of the step.
    named: BTreeMap<String, ValueId>,
    /// Names of the numbers among them, which are float64 until they are cast.
    numbers: Vec<String>,
}

impl<'g> Tensors<'g> {
    pub(super) fn new(
        graph: &'g mut Graph,
        element: DType,
        named: BTreeMap<String, ValueId>,
        numbers: Vec<String>,
    ) -> Tensors<'g> {
        Tensors { graph, element, named, numbers }
    }

    /// Casts the numbers of the step to the type that is computed with.
    pub(super) fn cast_numbers(&mut self) {
        for name in std::mem::take(&mut self.numbers) {
            let cast = self.cast(self.named[&name]);
            self.named.insert(name, cast);
        }
    }

    /// The results of a function.
    pub(super) fn call(&mut self, function: &OptimizerFunction, inputs: &[ValueId]) -> Vec<ValueId> {
        let proto = &function.proto;
        let attrs = match function.has_element_type() {
            true => Attrs::new().with(ELEMENT_TYPE, i64::from(self.element.to_onnx())),
            false => Attrs::new(),
        };
        let ports: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        let (node, ids) = Node::labelled(
            &proto.name,
            &proto.domain,
            &proto.name,
            &ports,
            proto.output.len(),
            attrs,
            |name| self.graph.add_value(name, ValueType::Unknown),
        );
        self.graph.nodes.push(node);
        ids
    }

    /// `parameter`, `gradient`, a slot, or a number of the step.
    ///
    /// # Panics
    /// When the row has no such value.
    #[must_use]
    pub fn get(&self, name: &str) -> ValueId {
        self.named[name]
    }

    /// Gives a value a name, by which branches have it, too.
    pub fn named(&mut self, name: &str, value: ValueId) {
        self.named.insert(name.to_owned(), value);
    }

    /// The result of an operator of `ai.onnx` 17.
    pub fn op(&mut self, op: &str, inputs: &[ValueId]) -> ValueId {
        self.with(op, inputs, Attrs::new())
    }

    /// The result of an operator with attributes.
    pub fn with(&mut self, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.graph.emit(op, &inputs, attrs)
    }

    /// A constant.
    pub fn number(&mut self, value: f64) -> ValueId {
        self.graph.emit_constant(Tensor::scalar(self.element, value))
    }

    /// A value in the type that is computed with.
    pub fn cast(&mut self, x: ValueId) -> ValueId {
        let to = i64::from(self.element.to_onnx());
        self.with("Cast", &[x], Attrs::new().with("to", to))
    }

    /// A constant integer.
    pub fn integer(&mut self, value: i64) -> ValueId {
        self.graph.emit_constant(Tensor::i64(&[], &[value]))
    }

    /// The mean over one axis, which stays with size 1.
    pub fn mean(&mut self, x: ValueId, axis: i64) -> ValueId {
        self.with("ReduceMean", &[x], Attrs::new().with("axes", vec![axis]).with("keepdims", 1i64))
    }

    /// The root of the sum of all squares, a scalar.
    pub fn norm(&mut self, x: ValueId) -> ValueId {
        let square = self.op("Mul", &[x, x]);
        let sum = self.with("ReduceSum", &[square], Attrs::new().with("keepdims", 0i64));
        self.op("Sqrt", &[sum])
    }

    /// A moving average: `old + share * (new - old)`.
    pub fn lerp(&mut self, old: ValueId, new: ValueId, share: ValueId) -> ValueId {
        let apart = self.op("Sub", &[new, old]);
        let moved = self.op("Mul", &[share, apart]);
        self.op("Add", &[old, moved])
    }

    /// True (one element) if a tensor has this number of axes.
    pub fn has_rank(&mut self, x: ValueId, rank: i64) -> ValueId {
        let axes = self.rank(x);
        let wanted = self.integer(rank);
        self.op("Equal", &[axes, wanted])
    }

    /// The number of axes of a tensor.
    pub fn rank(&mut self, x: ValueId) -> ValueId {
        let shape = self.op("Shape", &[x]);
        self.op("Size", &[shape])
    }

    /// The results of one of two formulas. Both are given all named values.
    pub fn choose(
        &mut self,
        condition: ValueId,
        outputs: usize,
        then: impl FnOnce(&mut Tensors<'_>) -> Vec<ValueId>,
        otherwise: impl FnOnce(&mut Tensors<'_>) -> Vec<ValueId>,
    ) -> Vec<ValueId> {
        let captured: Vec<(String, ValueId)> =
            self.named.iter().map(|(name, &id)| (name.clone(), id)).collect();
        let (then, otherwise) =
            (self.branch("then", &captured, then), self.branch("otherwise", &captured, otherwise));
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

    fn branch(
        &self,
        name: &str,
        captured: &[(String, ValueId)],
        write: impl FnOnce(&mut Tensors<'_>) -> Vec<ValueId>,
    ) -> Graph {
        let mut graph = Graph::new(name);
        let mut named = BTreeMap::new();
        for (known, id) in captured {
            // Captured values have the names that they have outside.
            let inner = graph.add_value(self.graph.name_of(*id), ValueType::Unknown);
            graph.inputs.push(inner);
            named.insert(known.clone(), inner);
        }
        let results = write(&mut Tensors::new(&mut graph, self.element, named, Vec::new()));
        // An output is made by a node of its own.
        let results = results.iter().map(|&id| graph.emit("Identity", &[Some(id)], Attrs::new())).collect();
        graph.outputs = results;
        graph
    }
}
