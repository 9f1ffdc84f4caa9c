//! Input and output values of models.

use ortrain_graph::Tensor;

/// Input or output value of a model.
///
/// ```
/// use ortrain::{Tensor, Value};
///
/// let rate = Value::from(Tensor::f32(&[1], &[0.1]));
/// let gradients = Value::Sequence(vec![Tensor::f32(&[2], &[3.0, 4.0]), Tensor::f32(&[1], &[12.0])]);
/// # assert_ne!(rate, gradients);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A tensor.
    Tensor(Tensor),
    /// A sequence of tensors, all of one element type.
    Sequence(Vec<Tensor>),
}

impl From<Tensor> for Value {
    fn from(tensor: Tensor) -> Value {
        Value::Tensor(tensor)
    }
}
