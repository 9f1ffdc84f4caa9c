//! Arithmetic of losses as nodes.

use ortrain_graph::{DType, Tensor};

use super::{GraphAppender, int_attribute};

impl GraphAppender<'_> {
    pub(super) fn add(&mut self, a: &str, b: &str) -> String {
        self.node("Add", &[a, b], vec![])
    }

    pub(super) fn subtract(&mut self, a: &str, b: &str) -> String {
        self.node("Sub", &[a, b], vec![])
    }

    pub(super) fn multiply(&mut self, a: &str, b: &str) -> String {
        self.node("Mul", &[a, b], vec![])
    }

    pub(super) fn divide(&mut self, a: &str, b: &str) -> String {
        self.node("Div", &[a, b], vec![])
    }

    pub(super) fn negate(&mut self, value: &str) -> String {
        self.node("Neg", &[value], vec![])
    }

    pub(super) fn select(&mut self, condition: &str, yes: &str, no: &str) -> String {
        self.node("Where", &[condition, yes, no], vec![])
    }

    pub(super) fn log_softmax(&mut self, scores: &str, axis: usize) -> String {
        self.node("LogSoftmax", &[scores], vec![int_attribute("axis", axis as i64)])
    }

    pub(super) fn cast(&mut self, value: &str, dtype: DType) -> String {
        self.node("Cast", &[value], vec![int_attribute("to", i64::from(dtype.to_onnx()))])
    }

    /// Appends the sum over the axis of the classes, which is removed. Needs opset 13.
    pub(super) fn sum_axis(&mut self, value: &str, axis: usize) -> String {
        let axes = self.constant("classes", &Tensor::i64(&[1], &[axis as i64]));
        self.node("ReduceSum", &[value, &axes], vec![int_attribute("keepdims", 0)])
    }
}
