//! Values of a graph.

use std::sync::Arc;

use crate::{DType, Dim, Shape, Tensor};

/// Identifier of a value in a [`Graph`](crate::Graph).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

/// Type of a value, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum ValueType {
    /// Unknown type.
    #[default]
    Unknown,
    /// Tensor. The shape is `None` if the rank is unknown.
    Tensor(DType, Option<Shape>),
    /// Sequence of tensors with one element type. Bound to a training state, a sequence is a complete plane.
    Sequence(DType),
}

impl ValueType {
    /// Returns the type of a tensor with known sizes.
    #[must_use]
    pub fn tensor(dtype: DType, dims: &[usize]) -> ValueType {
        ValueType::Tensor(dtype, Some(Shape::known(dims)))
    }

    /// Returns the element type, if it is known.
    #[must_use]
    pub fn dtype(&self) -> Option<DType> {
        match self {
            ValueType::Unknown => None,
            ValueType::Tensor(dtype, _) | ValueType::Sequence(dtype) => Some(*dtype),
        }
    }

    /// Returns the shape, if at least the rank is known.
    #[must_use]
    pub fn shape(&self) -> Option<&Shape> {
        match self {
            ValueType::Tensor(_, shape) => shape.as_ref(),
            _ => None,
        }
    }
}

/// Value with a name, a type and, if constant, its content.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Name, unique in the graph.
    pub name: Arc<str>,
    /// Type, as far as it is known.
    pub ty: ValueType,
    /// Content of an initializer or a folded value.
    pub constant: Option<Tensor>,
    /// Elements, if they are sizes of axes: an int64 vector or scalar computed from shapes.
    pub sizes: Option<Vec<Dim>>,
    /// Content, if a node without inputs produces it, or if it is a captured constant of an outer graph. It is not
    /// exported as an initializer.
    pub derived_constant: Option<Tensor>,
}

impl Value {
    /// Returns the content, if it is known.
    #[must_use]
    pub fn content(&self) -> Option<&Tensor> {
        self.constant.as_ref().or(self.derived_constant.as_ref())
    }
}
