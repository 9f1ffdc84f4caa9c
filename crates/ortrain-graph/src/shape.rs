//! Symbolic shapes.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

/// The size of one axis.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dim {
    /// A number.
    Known(usize),
    /// A name: equal names are equal sizes; different names may or may not be.
    Symbol(Arc<str>),
}

impl Dim {
    /// The size, if it is a number.
    #[must_use]
    pub fn known(&self) -> Option<usize> {
        match self {
            Dim::Known(size) => Some(*size),
            Dim::Symbol(_) => None,
        }
    }

    /// A symbol.
    #[must_use]
    pub fn symbol(name: &str) -> Dim {
        Dim::Symbol(name.into())
    }

    /// Whether the size is certainly 1.
    #[must_use]
    pub fn is_one(&self) -> bool {
        *self == Dim::Known(1)
    }
}

impl From<usize> for Dim {
    fn from(size: usize) -> Dim {
        Dim::Known(size)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Known(size) => write!(f, "{size}"),
            Dim::Symbol(name) => f.write_str(name),
        }
    }
}

/// The sizes of all axes of a value whose rank is known.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Shape(pub SmallVec<[Dim; 6]>);

impl Shape {
    /// The shape of a scalar.
    #[must_use]
    pub fn scalar() -> Shape {
        Shape::default()
    }

    /// A shape of numbers.
    #[must_use]
    pub fn known(dims: &[usize]) -> Shape {
        dims.iter().map(|&dim| Dim::Known(dim)).collect()
    }

    /// The sizes as numbers, if all are.
    #[must_use]
    pub fn concrete(&self) -> Option<Vec<usize>> {
        self.0.iter().map(Dim::known).collect()
    }

    /// The number of axes.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.0.len()
    }
}

impl std::ops::Deref for Shape {
    type Target = [Dim];
    fn deref(&self) -> &[Dim] {
        &self.0
    }
}

impl std::ops::DerefMut for Shape {
    fn deref_mut(&mut self) -> &mut [Dim] {
        &mut self.0
    }
}

impl FromIterator<Dim> for Shape {
    fn from_iter<I: IntoIterator<Item = Dim>>(dims: I) -> Shape {
        Shape(dims.into_iter().collect())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, dim) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{dim}")?;
        }
        f.write_str("]")
    }
}
