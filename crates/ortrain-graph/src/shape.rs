//! Symbolic shapes.

use std::fmt;
use std::hash::{Hash as _, Hasher as _};
use std::sync::Arc;

use rustc_hash::FxHasher;
use smallvec::SmallVec;

/// Maximum length of the formula of a symbolic size, in bytes.
const LONGEST_FORMULA: usize = 256;

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

    /// Creates a symbolic size with a formula of other sizes as its name. Equal formulas are equal sizes. A long formula is
    /// replaced by its hash: formulas of formulas would double their length with each layer of a network.
    ///
    /// ```
    /// use ortrain_graph::Dim;
    ///
    /// assert_eq!(Dim::formula("(a+b)".into()), Dim::symbol("(a+b)"));
    /// assert!(Dim::formula("(a+b)".repeat(1000)).to_string().len() < 40);
    /// ```
    #[must_use]
    pub fn formula(text: String) -> Dim {
        if text.len() <= LONGEST_FORMULA {
            return Dim::Symbol(text.into());
        }
        let mut hasher = FxHasher::default();
        text.hash(&mut hasher);
        Dim::symbol(&format!("size#{:016x}", hasher.finish()))
    }

    /// Returns the symbolic size of an axis to which two symbolic sizes broadcast. Order and repetition of sizes do not
    /// matter.
    ///
    /// ```
    /// use ortrain_graph::Dim;
    ///
    /// let both = Dim::broadcast_of("b", "a");
    /// assert_eq!(both.to_string(), "max(a,b)");
    /// assert_eq!(Dim::broadcast_of("a", "max(a,b)"), both);
    /// ```
    #[must_use]
    pub fn broadcast_of(x: &str, y: &str) -> Dim {
        let mut sizes: Vec<&str> = arguments_of_max(x).into_iter().chain(arguments_of_max(y)).collect();
        sizes.sort_unstable();
        sizes.dedup();
        match sizes[..] {
            [only] => Dim::symbol(only),
            _ => Dim::formula(format!("max({})", sizes.join(","))),
        }
    }

    /// Returns true if the size is known to be 1.
    #[must_use]
    pub fn is_one(&self) -> bool {
        *self == Dim::Known(1)
    }
}

/// Returns the arguments of a formula that [`Dim::broadcast_of`] wrote, or the size itself for any other text.
fn arguments_of_max(size: &str) -> Vec<&str> {
    let Some(inside) = size.strip_prefix("max(").and_then(|rest| rest.strip_suffix(')')) else {
        return vec![size];
    };
    let (mut depth, mut start, mut arguments) = (0_usize, 0, Vec::new());
    for (at, sign) in inside.char_indices() {
        match sign {
            '(' => depth += 1,
            ')' if depth == 0 => return vec![size],
            ')' => depth -= 1,
            ',' if depth == 0 => {
                arguments.push(&inside[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    arguments.push(&inside[start..]);
    arguments
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas_of_many_layers_are_short() {
        let mut size = Dim::symbol("batch");
        for layer in 0..1000 {
            let (Dim::Symbol(x), other) = (&size, format!("layer{layer}.0")) else {
                panic!("it is symbolic")
            };
            let both = Dim::broadcast_of(x, &other);
            let Dim::Symbol(y) = &both else { panic!("it is symbolic") };
            size = Dim::broadcast_of(y, x);
            assert!(size.to_string().len() <= LONGEST_FORMULA);
        }
    }

    #[test]
    fn broadcast_is_independent_of_order() {
        for (x, y) in [("a", "b"), ("max(a,(b*max(c,d)))", "e"), ("max(a,b", "b)"), ("max(a)b)", "a")] {
            assert_eq!(Dim::broadcast_of(x, y), Dim::broadcast_of(y, x));
        }
        assert_eq!(Dim::broadcast_of("a", "a"), Dim::symbol("a"));
        assert_eq!(Dim::broadcast_of("max(a,(b*max(c,d)))", "e").to_string(), "max((b*max(c,d)),a,e)");
    }
}
