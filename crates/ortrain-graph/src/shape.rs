//! Symbolic shapes.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

/// Size of one axis.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dim {
    /// Known size.
    Known(usize),
    /// Symbolic size. Equal names are equal sizes; different names may be equal or different sizes.
    Symbol(Arc<str>),
}

impl Dim {
    /// Returns the size, if it is known.
    #[must_use]
    pub fn known(&self) -> Option<usize> {
        match self {
            Dim::Known(size) => Some(*size),
            Dim::Symbol(_) => None,
        }
    }

    /// Creates a symbolic size.
    #[must_use]
    pub fn symbol(name: &str) -> Dim {
        Dim::Symbol(name.into())
    }

    /// Returns true if the size is known to be 1.
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

/// Sizes of all axes of a value with a known rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Shape(pub SmallVec<[Dim; 6]>);

impl Shape {
    /// Returns the shape of a scalar.
    #[must_use]
    pub fn scalar() -> Shape {
        Shape::default()
    }

    /// Creates a shape with known sizes.
    #[must_use]
    pub fn known(dims: &[usize]) -> Shape {
        dims.iter().map(|&dim| Dim::Known(dim)).collect()
    }

    /// Returns the sizes, if all of them are known.
    #[must_use]
    pub fn concrete(&self) -> Option<Vec<usize>> {
        self.0.iter().map(Dim::known).collect()
    }

    /// Returns the number of axes.
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
