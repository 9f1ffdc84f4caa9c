//! Attributes of nodes.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::{Graph, Tensor};

/// Value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Attr {
    /// Floating-point number.
    Float(f32),
    /// Integer.
    Int(i64),
    /// Text. The import refuses bytes that are not UTF-8.
    String(String),
    /// Tensor.
    Tensor(Tensor),
    /// Subgraph.
    Graph(Box<Graph>),
    /// List of floating-point numbers.
    Floats(Vec<f32>),
    /// List of integers.
    Ints(Vec<i64>),
    /// List of texts.
    Strings(Vec<String>),
}

impl Attr {
    /// Returns the kind of the value, by its ONNX name.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Attr::Float(_) => "FLOAT",
            Attr::Int(_) => "INT",
            Attr::String(_) => "STRING",
            Attr::Tensor(_) => "TENSOR",
            Attr::Graph(_) => "GRAPH",
            Attr::Floats(_) => "FLOATS",
            Attr::Ints(_) => "INTS",
            Attr::Strings(_) => "STRINGS",
        }
    }
}

/// Error of an attribute that is missing or has the wrong kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttrError {
    /// The attribute is missing.
    #[error("attribute {name:?} is missing")]
    Missing {
        /// Name of the attribute.
        name: String,
    },
    /// The attribute has another kind of value.
    #[error("attribute {name:?} must be {expected}, got {found}")]
    WrongKind {
        /// Name of the attribute.
        name: String,
        /// Required kind.
        expected: &'static str,
        /// Actual kind.
        found: &'static str,
    },
}

/// Attributes of a node, by name.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Attrs(pub AttrMap);

/// Map of attributes with copy-on-write. A graph is copied with all its nodes for each shape, and copies share their
/// attributes.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct AttrMap(Arc<BTreeMap<String, Attr>>);

impl Deref for AttrMap {
    type Target = BTreeMap<String, Attr>;

    fn deref(&self) -> &BTreeMap<String, Attr> {
        &self.0
    }
}

impl DerefMut for AttrMap {
    fn deref_mut(&mut self) -> &mut BTreeMap<String, Attr> {
        Arc::make_mut(&mut self.0)
    }
}

macro_rules! getter {
    ($(#[$doc:meta])* $name:ident, $variant:ident, $kind:literal, $ty:ty, $convert:expr) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// Fails if the attribute has another kind of value.
        pub fn $name(&self, name: &str) -> Result<Option<$ty>, AttrError> {
            match self.0.get(name) {
                None => Ok(None),
                Some(Attr::$variant(value)) => Ok(Some($convert(value))),
                Some(other) => {
                    Err(AttrError::WrongKind { name: name.to_owned(), expected: $kind, found: other.kind() })
                }
            }
        }
    };
}

impl Attrs {
    /// Creates an empty set of attributes.
    #[must_use]
    pub fn new() -> Attrs {
        Attrs::default()
    }

    /// Adds or replaces an attribute.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Attr>) -> Attrs {
        self.0.insert(name.to_owned(), value.into());
        self
    }

    getter!(/** Returns an integer attribute, if present. */ int, Int, "INT", i64, |v: &i64| *v);
    getter!(/** Returns a float attribute, if present. */ float, Float, "FLOAT", f32, |v: &f32| *v);
    getter!(/** Returns a text attribute, if present. */ string, String, "STRING", &str, String::as_str);
    getter!(/** Returns an integer list, if present. */ ints, Ints, "INTS", &[i64], Vec::as_slice);
    getter!(/** Returns a float list, if present. */ floats, Floats, "FLOATS", &[f32], Vec::as_slice);
    getter!(/** Returns a text list, if present. */ strings, Strings, "STRINGS", &[String], Vec::as_slice);
    getter!(/** Returns a tensor, if present. */ tensor, Tensor, "TENSOR", &Tensor, |v| v);
    getter!(/** Returns a subgraph, if present. */ graph, Graph, "GRAPH", &Graph, Box::as_ref);

    /// Returns the value of a mandatory attribute, from the result of a getter.
    ///
    /// # Errors
    /// Fails if the attribute is missing.
    pub fn required<T>(name: &str, value: Option<T>) -> Result<T, AttrError> {
        value.ok_or_else(|| AttrError::Missing { name: name.to_owned() })
    }
}

macro_rules! into_attr {
    ($($from:ty => $variant:ident, $convert:expr;)*) => {
        $(impl From<$from> for Attr {
            fn from(value: $from) -> Attr {
                Attr::$variant($convert(value))
            }
        })*
    };
}

into_attr! {
    i64 => Int, |v| v;
    f32 => Float, |v| v;
    &str => String, str::to_owned;
    String => String, |v| v;
    Tensor => Tensor, |v| v;
    Graph => Graph, Box::new;
    Vec<i64> => Ints, |v| v;
    &[i64] => Ints, <[i64]>::to_vec;
    Vec<f32> => Floats, |v| v;
}
