//! Graphs of nodes, and their attributes, which may be graphs.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use crate::{Tensor, Value, ValueId, ValueType};

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

/// Inputs or outputs of a node; `None` is an omitted optional one.
pub type Ports = SmallVec<[Option<ValueId>; 4]>;

/// Node: one application of an operator.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Name; may be empty.
    pub name: Arc<str>,
    /// Domain of the operator; empty for `ai.onnx`.
    pub domain: Arc<str>,
    /// Name of the operator.
    pub op: Arc<str>,
    /// Inputs. Outer values that subgraphs use follow the operator's own inputs.
    pub inputs: Ports,
    /// Outputs.
    pub outputs: Ports,
    /// Attributes.
    pub attrs: Attrs,
    /// Number of trailing inputs that subgraphs capture. The last inputs of every subgraph correspond to them.
    pub captures: usize,
}

impl Node {
    /// Creates a node without a name.
    #[must_use]
    pub fn new(
        domain: &str,
        op: &str,
        inputs: &[Option<ValueId>],
        outputs: &[Option<ValueId>],
        attrs: Attrs,
    ) -> Node {
        Node {
            name: "".into(),
            domain: domain.into(),
            op: op.into(),
            inputs: inputs.iter().copied().collect(),
            outputs: outputs.iter().copied().collect(),
            attrs,
            captures: 0,
        }
    }

    /// Creates a node and its outputs, with names derived from `label`. `value` creates a value with a name.
    pub fn labelled(
        label: &str,
        domain: &str,
        op: &str,
        inputs: &[Option<ValueId>],
        outputs: usize,
        attrs: Attrs,
        mut value: impl FnMut(&str) -> ValueId,
    ) -> (Node, Vec<ValueId>) {
        let name = |k: usize| if k == 0 { format!("{label}_out") } else { format!("{label}_out{k}") };
        let ids: Vec<ValueId> = (0..outputs).map(|k| value(&name(k))).collect();
        let ports: Vec<Option<ValueId>> = ids.iter().copied().map(Some).collect();
        let mut node = Node::new(domain, op, inputs, &ports, attrs);
        node.name = label.into();
        (node, ids)
    }

    /// Returns the operator with its domain, as messages show it.
    #[must_use]
    pub fn op_label(&self) -> String {
        let mut label = String::with_capacity(self.domain.len() + self.op.len() + 1);
        if !self.domain.is_empty() {
            label.extend([&*self.domain, ":"]);
        }
        label + &self.op
    }

    /// Iterates over the inputs that are not omitted.
    pub fn present_inputs(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.inputs.iter().copied().flatten()
    }

    /// Iterates over the outputs that are not omitted.
    pub fn present_outputs(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.outputs.iter().copied().flatten()
    }
}

/// Graph of values and nodes, in topological order.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Graph {
    /// Name of the graph.
    pub name: String,
    /// Operator-set version of the nodes, by domain.
    pub opsets: BTreeMap<String, i64>,
    values: Vec<Value>,
    /// Nodes in topological order.
    pub nodes: Vec<Node>,
    /// Inputs, in order.
    pub inputs: Vec<ValueId>,
    /// Outputs, in order.
    pub outputs: Vec<ValueId>,
    names: FxHashMap<Arc<str>, ValueId>,
    numbers: Numbers,
}

/// Lower bound of the free suffixes, by name without suffix.
///
/// Without this cache, each of many values with one name would try the suffixes of all others. The cache is derived
/// from the names, so that comparisons ignore it.
#[derive(Clone, Debug, Default)]
struct Numbers(FxHashMap<Arc<str>, u32>);

impl PartialEq for Numbers {
    fn eq(&self, _: &Numbers) -> bool {
        true
    }
}

impl Numbers {
    fn first(&self, hint: &str) -> u32 {
        self.0.get(hint).copied().unwrap_or(2)
    }

    /// Marks a name as free again.
    fn forget(&mut self, name: &str) {
        if let Some((hint, suffix)) = name.rsplit_once('_')
            && let Some(first) = self.0.get_mut(hint)
            && let Ok(suffix) = suffix.parse::<u32>()
        {
            *first = (*first).min(suffix.max(2));
        }
    }
}

impl Graph {
    /// Creates an empty graph.
    #[must_use]
    pub fn new(name: &str) -> Graph {
        Graph { name: name.to_owned(), ..Graph::default() }
    }

    /// Returns a value.
    #[must_use]
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// Returns a value for changes. [`Graph::rename`] changes its name.
    pub fn value_mut(&mut self, id: ValueId) -> &mut Value {
        &mut self.values[id.0 as usize]
    }

    /// Returns the number of values ever created.
    #[must_use]
    pub fn value_count(&self) -> usize {
        self.values.len()
    }

    /// Iterates over all values.
    pub fn value_ids(&self) -> impl Iterator<Item = ValueId> + use<> {
        (0..self.values.len() as u32).map(ValueId)
    }

    /// Returns the name of a value.
    #[must_use]
    pub fn name_of(&self, id: ValueId) -> &str {
        &self.value(id).name
    }

    /// Returns the value with this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.names.get(name).copied()
    }

    /// Aligns the elements of all constants to multiples of `alignment`, except in subgraphs: see [`Tensor::aligned`].
    ///
    /// # Panics
    /// Panics if `alignment` is not a power of two.
    pub fn align_constants(&mut self, alignment: usize) {
        for constant in self.values.iter_mut().filter_map(|value| value.constant.as_mut()) {
            *constant = constant.aligned(alignment);
        }
    }

    /// Returns an unused name: `hint`, or `hint_2`, `hint_3`, ...
    #[must_use]
    pub fn unused_name(&self, hint: &str) -> Arc<str> {
        self.unused(hint).0
    }

    /// Like [`Graph::unused_name`], with the suffix, if the name has one.
    fn unused(&self, hint: &str) -> (Arc<str>, Option<u32>) {
        if !hint.is_empty() && !self.names.contains_key(hint) {
            return (hint.into(), None);
        }
        (self.numbers.first(hint)..)
            .map(|n| (Arc::<str>::from(format!("{hint}_{n}")), Some(n)))
            .find(|(name, _)| !self.names.contains_key(name))
            .expect("one of the numbers is free")
    }

    /// Like [`Graph::unused_name`], but also reserves the suffix, so that the next call returns another name.
    fn take_name(&mut self, hint: &str) -> Arc<str> {
        let (name, suffix) = self.unused(hint);
        if let Some(suffix) = suffix {
            self.numbers.0.insert(hint.into(), suffix + 1);
        }
        name
    }

    /// Adds a value. Its name is `hint`, or `hint` with an unused suffix.
    pub fn add_value(&mut self, hint: &str, ty: ValueType) -> ValueId {
        let name = self.take_name(hint);
        let id = ValueId(self.values.len() as u32);
        self.names.insert(name.clone(), id);
        self.values.push(Value { name, ty, constant: None, sizes: None, derived_constant: None });
        id
    }

    /// Adds a constant. Its name is `hint`, or `hint` with an unused suffix.
    pub fn add_constant(&mut self, hint: &str, tensor: Tensor) -> ValueId {
        let id = self.add_value(hint, ValueType::tensor(tensor.dtype(), tensor.dims()));
        self.value_mut(id).constant = Some(tensor);
        id
    }

    /// Renames a value to `hint`, or to `hint` with an unused suffix.
    pub fn rename(&mut self, id: ValueId, hint: &str) {
        if self.name_of(id) == hint {
            return;
        }
        let name = self.take_name(hint);
        let old = std::mem::replace(&mut self.value_mut(id).name, name.clone());
        self.names.remove(&old);
        self.numbers.forget(&old);
        self.names.insert(name, id);
    }

    /// Exchanges the names of two values.
    pub fn swap_names(&mut self, a: ValueId, b: ValueId) {
        let (name_a, name_b) = (self.value(a).name.clone(), self.value(b).name.clone());
        self.value_mut(a).name = name_b.clone();
        self.value_mut(b).name = name_a.clone();
        self.names.insert(name_b, a);
        self.names.insert(name_a, b);
    }

    /// Returns the index of the node that produces each value, if a node does.
    #[must_use]
    pub fn producers(&self) -> Vec<Option<usize>> {
        let mut producers = vec![None; self.values.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            for output in node.present_outputs() {
                producers[output.0 as usize] = Some(index);
            }
        }
        producers
    }

    /// Replaces every use of a value, by nodes and as a graph output, by another value.
    pub fn replace_uses(&mut self, from: ValueId, to: ValueId) {
        let swap = |id: &mut ValueId| {
            if *id == from {
                *id = to;
            }
        };
        self.nodes.iter_mut().flat_map(|node| node.inputs.iter_mut().flatten()).for_each(swap);
        self.outputs.iter_mut().for_each(swap);
    }

    /// Removes the nodes that no output needs.
    pub fn remove_unused(&mut self) {
        let mut needed: FxHashSet<ValueId> = self.outputs.iter().copied().collect();
        let mut is_used = vec![false; self.nodes.len()];
        for (index, node) in self.nodes.iter().enumerate().rev() {
            if node.present_outputs().any(|output| needed.contains(&output)) {
                is_used[index] = true;
                needed.extend(node.present_inputs());
            }
        }
        let mut used = is_used.into_iter();
        self.nodes.retain(|_| used.next() == Some(true));
    }

    /// Returns the label of a node in a message: `node "fc" (MatMul)`. A node without a name is shown with its first
    /// output: `MatMul -> "fc_y"`.
    #[must_use]
    pub fn node_label(&self, node: &Node) -> String {
        let op = node.op_label();
        if !node.name.is_empty() {
            return ["node ", &quoted(&node.name), " (", &op, ")"].concat();
        }
        match node.present_outputs().next() {
            Some(output) => [&op, " -> ", &quoted(self.name_of(output))].concat(),
            None => format!("an unnamed node ({op})"),
        }
    }

    /// Iterates over the subgraphs of a node, with the names of their attributes.
    pub fn subgraphs(node: &Node) -> impl Iterator<Item = (&str, &Graph)> {
        node.attrs.0.iter().filter_map(|(name, attr)| match attr {
            Attr::Graph(graph) => Some((name.as_str(), graph.as_ref())),
            _ => None,
        })
    }
}

/// Result of a rewrite: nodes and values to be inserted into a graph.
///
/// A patch refers to values of its graph and to its own new values. The graph changes only when the patch is applied.
#[derive(Debug)]
pub struct Patch {
    base: u32,
    /// New values.
    values: Vec<Value>,
    /// New nodes, in order.
    pub nodes: Vec<Node>,
    /// Pairs `(old, new)`: every use of `old` becomes a use of `new`.
    replaced: Vec<(ValueId, ValueId)>,
    /// Prefix of new names.
    prefix: String,
}

impl Patch {
    /// Creates a patch for a graph. Names of new values and nodes begin with `prefix`.
    #[must_use]
    pub fn new(graph: &Graph, prefix: &str) -> Patch {
        Patch {
            base: graph.values.len() as u32,
            values: Vec::new(),
            nodes: Vec::new(),
            replaced: Vec::new(),
            prefix: prefix.to_owned(),
        }
    }

    /// Returns a value of this patch or of the graph.
    #[must_use]
    pub fn value<'a>(&'a self, graph: &'a Graph, id: ValueId) -> &'a Value {
        if id.0 < self.base { graph.value(id) } else { &self.values[(id.0 - self.base) as usize] }
    }

    /// Adds a value. `name` is a hint that does not get the patch's prefix.
    pub fn add_value(&mut self, name: &str, ty: ValueType) -> ValueId {
        let id = ValueId(self.base + self.values.len() as u32);
        self.values.push(Value {
            name: name.into(),
            ty,
            constant: None,
            sizes: None,
            derived_constant: None,
        });
        id
    }

    /// Adds a constant, named with the patch's prefix.
    pub fn constant(&mut self, name: &str, tensor: Tensor) -> ValueId {
        let id = self
            .add_value(&format!("{}{name}", self.prefix), ValueType::tensor(tensor.dtype(), tensor.dims()));
        self.values.last_mut().expect("just added").constant = Some(tensor);
        id
    }

    /// Adds a node with one output, and returns the output. Both names begin with the patch's prefix.
    pub fn node(&mut self, domain: &str, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> ValueId {
        self.node_with_outputs(domain, op, inputs, 1, attrs)[0]
    }

    /// Adds a node with `outputs` outputs, and returns them.
    pub fn node_with_outputs(
        &mut self,
        domain: &str,
        op: &str,
        inputs: &[Option<ValueId>],
        outputs: usize,
        attrs: Attrs,
    ) -> Vec<ValueId> {
        let label = format!("{}{op}_{}", self.prefix, self.nodes.len());
        let (node, ids) = Node::labelled(&label, domain, op, inputs, outputs, attrs, |name| {
            self.add_value(name, ValueType::Unknown)
        });
        self.nodes.push(node);
        ids
    }

    /// Adds a node unchanged. Its values belong to the graph or to this patch.
    pub fn push(&mut self, node: Node) {
        self.nodes.push(node);
    }

    /// Replaces every use of `old` by `new` when the patch is applied.
    ///
    /// If a node of this patch produces `new`, the value takes over the name of `old`. Otherwise `old` must not be an
    /// output of the graph, because the output would change its name.
    pub fn replace(&mut self, old: ValueId, new: ValueId) {
        self.replaced.push((old, new));
    }

    /// Applies the patch in place of the nodes `remove` (ascending indices).
    ///
    /// The new nodes are inserted at the first removed node, or at the end if no node is removed. Replaced values keep
    /// their identity: the new node produces them.
    pub fn apply(mut self, graph: &mut Graph, remove: &[usize]) {
        // A value produced here that replaces an old one *becomes* the old one, so that its name, uses and role as an
        // output stay.
        let mut becomes: FxHashMap<ValueId, ValueId> = FxHashMap::default();
        let mut pass_through = Vec::new();
        for &(old, new) in &self.replaced {
            let has_producer =
                self.nodes.iter().any(|node| node.present_outputs().any(|output| output == new));
            if has_producer && !becomes.contains_key(&new) {
                becomes.insert(new, old);
            } else {
                pass_through.push((old, new));
            }
        }
        let mut ids: Vec<ValueId> = Vec::with_capacity(self.values.len());
        for (k, value) in self.values.into_iter().enumerate() {
            let id = ValueId(self.base + k as u32);
            ids.push(match becomes.get(&id) {
                Some(&old) => old,
                None => {
                    let fresh = graph.add_value(&value.name, value.ty);
                    let entry = graph.value_mut(fresh);
                    entry.constant = value.constant;
                    entry.sizes = value.sizes;
                    fresh
                }
            });
        }
        let base = self.base;
        let real = |id: ValueId| if id.0 < base { id } else { ids[(id.0 - base) as usize] };
        for node in &mut self.nodes {
            for port in node.inputs.iter_mut().chain(&mut node.outputs).flatten() {
                *port = real(*port);
            }
        }
        for &(old, new) in &pass_through {
            graph.replace_uses(old, real(new));
        }
        let at = remove.first().copied().unwrap_or(graph.nodes.len());
        for &index in remove.iter().rev() {
            graph.nodes.remove(index);
        }
        graph.nodes.splice(at..at, self.nodes);
    }

    /// Returns the prefix of new names.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.prefix
    }
}

/// Quotes a name like `{name:?}`. Most names need no escapes, so that a check of their bytes replaces the slower
/// formatting of characters.
fn quoted(name: &str) -> String {
    let is_printable = |byte: u8| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\';
    if name.bytes().all(is_printable) { ["\"", name, "\""].concat() } else { format!("{name:?}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_as_rust_writes_them() {
        for name in
            ["", "/conv1/Conv_output_0", "two words", "a \"b\"", "back\\slash", "tab\t", "é", "\u{7f}", "'"]
        {
            assert_eq!(quoted(name), format!("{name:?}"));
        }
    }

    /// The suffix is the smallest free number, as if all numbers were tried.
    #[test]
    fn fresh_names_use_the_smallest_free_number() {
        let mut graph = Graph::new("names");
        let add = |graph: &mut Graph, hint: &str| {
            let id = graph.add_value(hint, ValueType::Unknown);
            let name = graph.name_of(id).to_owned();
            (id, name)
        };
        let (first, name) = add(&mut graph, "x");
        assert_eq!(name, "x");
        let (second, name) = add(&mut graph, "x");
        assert_eq!(name, "x_2");
        assert_eq!(add(&mut graph, "x_3").1, "x_3");
        assert_eq!(add(&mut graph, "x").1, "x_4");
        assert_eq!(add(&mut graph, "x_3").1, "x_3_2");
        // Names that become free are reused.
        graph.rename(second, "y");
        graph.rename(first, "y");
        assert_eq!(["x", "x", "x"].map(|hint| add(&mut graph, hint).1), ["x", "x_2", "x_5"]);
        assert_eq!(graph.name_of(first), "y_2");
        assert_eq!(&*graph.unused_name(""), "_2");
    }

    /// Quadratic search for free names would take minutes.
    #[test]
    fn many_values_of_one_name() {
        const COUNT: usize = 200_000;
        let mut graph = Graph::new("names");
        for _ in 0..COUNT {
            graph.add_value("axes", ValueType::Unknown);
        }
        assert_eq!(&*graph.unused_name("axes"), format!("axes_{}", COUNT + 1));
    }
}
