//! Attributes of nodes.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::{Graph, Tensor};

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Attr {
    /// A number.
    Float(f32),
    /// An integer.
    Int(i64),
    /// A text. Bytes that are not UTF-8 are refused when a model is read.
    String(String),
    /// A tensor.
    Tensor(Tensor),
    /// A subgraph.
    Graph(Box<Graph>),
    /// Numbers.
    Floats(Vec<f32>),
    /// Integers.
    Ints(Vec<i64>),
    /// Texts.
    Strings(Vec<String>),
}

impl Attr {
    /// What kind of value it is, as ONNX names it.
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

/// An attribute that is absent or of the wrong kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttrError {
    /// It is not there.
    #[error("attribute {name:?} is missing")]
    Missing {
        /// Its name.
        name: String,
    },
    /// It holds something else.
    #[error("attribute {name:?} should be {expected} but is {found}")]
    WrongKind {
        /// Its name.
        name: String,
        /// What it should hold.
        expected: &'static str,
        /// What it holds.
        found: &'static str,
    },
}

/// The attributes of a node, by name.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Attrs(pub AttrMap);

/// A map of attributes that copies share until one of them is changed: graphs are copied for each shape, with all of their
/// nodes.
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
        /// When it holds another kind of value.
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
    /// No attributes.
    #[must_use]
    pub fn new() -> Attrs {
        Attrs::default()
    }

    /// The same with one more, or one replaced.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Attr>) -> Attrs {
        self.0.insert(name.to_owned(), value.into());
        self
    }

    getter!(/** An integer attribute, if present. */ int, Int, "INT", i64, |v: &i64| *v);
    getter!(/** A float attribute, if present. */ float, Float, "FLOAT", f32, |v: &f32| *v);
    getter!(/** A text attribute, if present. */ string, String, "STRING", &str, String::as_str);
    getter!(/** A list of integers, if present. */ ints, Ints, "INTS", &[i64], Vec::as_slice);
    getter!(/** A list of floats, if present. */ floats, Floats, "FLOATS", &[f32], Vec::as_slice);
    getter!(/** A list of texts, if present. */ strings, Strings, "STRINGS", &[String], Vec::as_slice);
    getter!(/** A tensor, if present. */ tensor, Tensor, "TENSOR", &Tensor, |v| v);
    getter!(/** A subgraph, if present. */ graph, Graph, "GRAPH", &Graph, Box::as_ref);

    /// An attribute that must be there, as one of the getters found it.
    ///
    /// # Errors
    /// When it is absent.
    pub fn required<T>(name: &str, found: Option<T>) -> Result<T, AttrError> {
        found.ok_or_else(|| AttrError::Missing { name: name.to_owned() })
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
