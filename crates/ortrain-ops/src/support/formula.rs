//! Formulas: arithmetic of values that becomes nodes.

use std::cell::RefCell;
use std::ops::{Add, Div, Mul, Neg, Sub};

use ortrain_graph::{Attrs, DType, ValueId};

use crate::support::onnx_decomposition::NodeSink;

/// Value in a formula. Each operation adds the node of `ai.onnx` that computes it, in the order of evaluation.
#[derive(Clone, Copy)]
pub(crate) struct Term<'s> {
    nodes: &'s dyn Nodes,
    id: ValueId,
}

/// Destination of the nodes that all terms of a formula share.
trait Nodes {
    fn add(&self, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId;
}

impl Nodes for RefCell<&mut dyn NodeSink> {
    fn add(&self, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.borrow_mut().emit(op, &inputs, attrs)
    }
}

/// Adds the nodes of a formula, and returns its value: `formula(rw, [x, scale, bias], |[x, scale, bias]| x * scale + bias)`.
pub(crate) fn formula<const N: usize>(
    to: &mut dyn NodeSink,
    values: [ValueId; N],
    compute: impl for<'s> FnOnce([Term<'s>; N]) -> Term<'s>,
) -> ValueId {
    let nodes = RefCell::new(to);
    compute(values.map(|id| Term { nodes: &nodes, id })).id
}

impl Term<'_> {
    fn apply(self, op: &str, others: &[Self], attrs: Attrs) -> Self {
        let inputs: Vec<ValueId> = [self.id].into_iter().chain(others.iter().map(|other| other.id)).collect();
        Term { nodes: self.nodes, id: self.nodes.add(op, &inputs, attrs) }
    }

    /// Returns the square root.
    pub(crate) fn sqrt(self) -> Self {
        self.apply("Sqrt", &[], Attrs::new())
    }

    /// Returns the exponential.
    pub(crate) fn exp(self) -> Self {
        self.apply("Exp", &[], Attrs::new())
    }

    /// Returns the term to the power of another.
    pub(crate) fn pow(self, exponent: Self) -> Self {
        self.apply("Pow", &[exponent], Attrs::new())
    }

    /// Returns -1, 0 or 1.
    pub(crate) fn sign(self) -> Self {
        self.apply("Sign", &[], Attrs::new())
    }

    /// Returns true where the terms are equal.
    pub(crate) fn equals(self, other: Self) -> Self {
        self.apply("Equal", &[other], Attrs::new())
    }

    /// Returns true where the term is less than another.
    pub(crate) fn is_less(self, other: Self) -> Self {
        self.apply("Less", &[other], Attrs::new())
    }

    /// Returns the larger of two terms.
    pub(crate) fn max(self, other: Self) -> Self {
        self.apply("Max", &[other], Attrs::new())
    }

    /// Returns the smaller of two terms.
    pub(crate) fn min(self, other: Self) -> Self {
        self.apply("Min", &[other], Attrs::new())
    }

    /// Returns `yes` where a condition is true, and `no` elsewhere.
    pub(crate) fn choose(self, yes: Self, no: Self) -> Self {
        self.apply("Where", &[yes, no], Attrs::new())
    }

    /// Returns the term in another element type.
    pub(crate) fn cast(self, to: DType) -> Self {
        self.apply("Cast", &[], Attrs::new().with("to", i64::from(to.to_onnx())))
    }
}

impl Add for Term<'_> {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.apply("Add", &[other], Attrs::new())
    }
}

impl Sub for Term<'_> {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self.apply("Sub", &[other], Attrs::new())
    }
}

impl Mul for Term<'_> {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        self.apply("Mul", &[other], Attrs::new())
    }
}

impl Div for Term<'_> {
    type Output = Self;

    fn div(self, other: Self) -> Self {
        self.apply("Div", &[other], Attrs::new())
    }
}

impl Neg for Term<'_> {
    type Output = Self;

    fn neg(self) -> Self {
        self.apply("Neg", &[], Attrs::new())
    }
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{Graph, ValueType};

    use super::*;

    #[test]
    fn nodes_follow_order_of_evaluation() {
        let mut graph = Graph::default();
        let [x, scale, bias] = ["x", "scale", "bias"].map(|name| graph.add_value(name, ValueType::Unknown));
        let y = formula(&mut graph, [x, scale, bias], |[x, scale, bias]| -(x * scale + bias / scale));
        let ops: Vec<&str> = graph.nodes.iter().map(|node| &*node.op).collect();
        assert_eq!(ops, ["Mul", "Div", "Add", "Neg"]);
        assert_eq!(graph.nodes[0].inputs.as_slice(), [Some(x), Some(scale)]);
        assert_eq!(graph.nodes[1].inputs.as_slice(), [Some(bias), Some(scale)]);
        assert_eq!(graph.nodes[3].outputs.as_slice(), [Some(y)]);
    }
}
