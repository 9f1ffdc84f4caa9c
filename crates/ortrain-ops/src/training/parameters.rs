//! Which constants of a model training changes: weights are trained, constants that somebody computed are not.
//!
//! A file does not say which of its constants were trained: what the nodes do with a constant does. A mean that is
//! subtracted from an input, the frequencies of a rotary embedding, a variance whose root divides were computed from data
//! or by a formula, and a step of an optimizer would spoil them.

use ortrain_graph::{DType, Graph, Node, Tensor, ValueId};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::{Definition, Registry};

/// What becomes of a constant of a model in training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParameterRole {
    /// It is trained.
    Trained,
    /// It is a running statistic: in the checkpoint, but not trained.
    Statistic,
    /// It stays in the models as it is.
    Constant,
}

impl ParameterRole {
    /// Its name, as reports have it.
    ///
    /// ```
    /// use ortrain_ops::training::ParameterRole;
    ///
    /// assert_eq!(ParameterRole::Trained.name(), "trained");
    /// ```
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ParameterRole::Trained => "trained",
            ParameterRole::Statistic => "statistic",
            ParameterRole::Constant => "constant",
        }
    }
}

/// Element-wise arithmetic of two values.
const ARITHMETIC: [&str; 4] = ["Add", "Div", "Mul", "Sub"];

/// Layers that go on step by step, with the inputs that are their first states.
const RECURRENT: [(&str, &[usize]); 3] = [("GRU", &[5]), ("LSTM", &[5, 6]), ("RNN", &[5])];

/// A score that hides what it belongs to from a softmax is below this, or minus infinity.
const HIDDEN: f64 = -1e4;

/// Operators that hand the elements of their first input on, in another shape, type or order, or some of them.
const MOVES: [&str; 15] = [
    "Cast",
    "CastLike",
    "Concat",
    "DequantizeLinear",
    "Expand",
    "Flatten",
    "Identity",
    "Pad",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
];

/// What people do to an input before the first layer, beside [`ARITHMETIC`] and [`MOVES`].
const PREPARATION: [&str; 8] = ["Abs", "Clip", "Exp", "Gather", "Log", "Neg", "Resize", "Sqrt"];

/// Products of a constant with what may be positions.
const PRODUCTS: [&str; 4] = ["Einsum", "FusedMatMul", "Gemm", "MatMul"];

/// Normalizations with the inputs that are their scale and their bias.
const NORMALIZATIONS: [(&str, usize, usize); 5] = [
    ("BatchNormalization", 1, 2),
    ("GroupNormalization", 1, 2),
    ("InstanceNormalization", 1, 2),
    ("LayerNormalization", 1, 2),
    ("RMSNormalization", 1, usize::MAX),
];

/// Parts of names that exporters and optimizers of graphs give to constants of theirs.
const GENERATED: [&str; 12] = [
    "Constant",
    "const_fold",
    "Const:",
    "Const_",
    "onnx::",
    "ortshared",
    "lifted_tensor",
    "tensor_constant",
    "_to_copy",
    "scalar_tensor",
    "/x:0",
    "/y:0",
];

/// Words that a name of a learned number has as its last part.
const LEARNED: [&str; 14] = [
    "alpha",
    "beta",
    "bias",
    "gain",
    "gamma",
    "kernel",
    "log_temperature",
    "logit_bias",
    "logit_scale",
    "scale",
    "shift",
    "slope",
    "temperature",
    "weight",
];

/// How far, as a share of a column's largest element, sines may be from what their neighbours say. Tables are stored in
/// types as narrow as bfloat16, with eight bits; the elements of other tables differ by about their size.
const SINE_TOLERANCE: f64 = 0.02;
/// Twice the cosine of the angle between neighbours below which a column turns fast enough to be told from a line.
const TURNING: f64 = 1.9;
/// Rows of a table that are read before all of them are.
const FIRST_ROWS: usize = 64;
/// Equations that columns of sines must fulfil beyond the unknowns that these have: below, chance might.
const LEAST_EVIDENCE: usize = 16;

/// What a value depends on, from nothing to everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    /// Constants alone.
    Constant,
    /// Shapes.
    Shape,
    /// Integers: positions, masks, tokens.
    Position,
    /// An input, prepared element by element.
    Input,
    /// What a layer made.
    Data,
}

/// A node that uses a value.
struct Use {
    /// The node, as messages name it.
    label: String,
    /// Its name in the model; where it has none, that of its first result.
    name: String,
    definition: Option<&'static Definition>,
    /// At which input.
    input: usize,
    /// Whether it lies in a subgraph.
    inner: bool,
}

/// What becomes of one constant, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// What becomes of it.
    pub role: ParameterRole,
    /// Why, as a part of a sentence.
    pub reason: String,
    /// The nodes that use it, by their names; a node without one by that of its first result.
    pub nodes: Vec<String>,
}

/// The uses of all values of a graph, for judging its constants.
pub struct ConstantUses<'g> {
    graph: &'g Graph,
    uses: FxHashMap<ValueId, Vec<Use>>,
    /// Nodes of the main graph that read a value, each with the input.
    readers: FxHashMap<ValueId, Vec<(usize, usize)>>,
    producers: Vec<Option<usize>>,
    levels: Vec<Level>,
    /// Values behind which there is a node with weights.
    weighted: FxHashSet<ValueId>,
    /// Values that are computed from the root of a constant, and other constants.
    roots: FxHashSet<ValueId>,
}

impl<'g> ConstantUses<'g> {
    /// The uses of a graph whose types are known, as far as they can be.
    #[must_use]
    pub fn new(graph: &'g Graph) -> ConstantUses<'g> {
        let mut uses = FxHashMap::default();
        find_uses(graph, false, &mut |id| Some(id), &mut uses);
        let mut readers: FxHashMap<ValueId, Vec<(usize, usize)>> = FxHashMap::default();
        for (index, node) in graph.nodes.iter().enumerate() {
            for (input, id) in node.inputs.iter().enumerate() {
                if let Some(id) = id {
                    readers.entry(*id).or_default().push((index, input));
                }
            }
        }
        let levels = levels(graph);
        let mut found = ConstantUses {
            graph,
            uses,
            readers,
            producers: graph.producers(),
            weighted: weighted(graph, &levels),
            levels,
            roots: FxHashSet::default(),
        };
        found.find_roots();
        found
    }

    /// Judges a constant of this type and shape.
    #[must_use]
    pub fn judge(&self, id: ValueId, dtype: DType, dims: &[usize]) -> Judgement {
        let uses = self.uses.get(&id).map_or(&[][..], Vec::as_slice);
        let mut nodes: Vec<String> = Vec::new();
        for used in uses {
            if !nodes.contains(&used.name) {
                nodes.push(used.name.clone());
            }
        }
        let (role, reason) = self.role(id, uses, dtype, dims);
        Judgement { role, reason, nodes }
    }

    fn role(&self, id: ValueId, uses: &[Use], dtype: DType, dims: &[usize]) -> (ParameterRole, String) {
        let of = |found: fn(&Definition) -> &'static [usize]| {
            uses.iter().find(|used| used.definition.is_some_and(|known| found(known).contains(&used.input)))
        };
        if let Some(used) = of(|definition| definition.statistics) {
            return (ParameterRole::Statistic, format!("it is a running statistic of {}", used.label));
        }
        let constant = |reason: String| (ParameterRole::Constant, reason);
        if uses.is_empty() {
            return constant("nothing uses it".into());
        }
        if !dtype.is_float() {
            return constant(format!("it is {dtype}; floats are trained"));
        }
        let elements: usize = dims.iter().product();
        if elements > 1
            && let Some(reason) = self.computed(id, uses, dims)
        {
            return constant(reason);
        }
        if let Some(used) = of(|definition| definition.weights) {
            return (ParameterRole::Trained, format!("it is a weight of {}", used.label));
        }
        let names = || {
            // Uses are in the order of the nodes.
            let mut nodes: Vec<&str> = uses.iter().map(|used| used.label.as_str()).collect();
            nodes.dedup();
            let rest = nodes.len() - 1;
            if rest == 0 { nodes[0].to_owned() } else { format!("{} and {rest} more", nodes[0]) }
        };
        if elements == 1 && !self.is_learned_number(id, uses, dims) {
            return constant(format!("it is a single number in {}", names()));
        }
        (ParameterRole::Trained, format!("its floats go into {}", names()))
    }

    /// Why a constant was computed rather than trained, if it was.
    fn computed(&self, id: ValueId, uses: &[Use], dims: &[usize]) -> Option<String> {
        let content = self.graph.value(id).content();
        if content.is_some_and(is_table_of_sines) {
            return Some("its columns are sines and cosines of positions".into());
        }
        if let Some(used) = self.neutral_use(id, uses) {
            return Some(format!(
                "it changes nothing in {}: that has no scale and bias of its own",
                used.label
            ));
        }
        if uses.iter().any(|used| used.inner) {
            return None;
        }
        if let Some(node) = self.first_state(id) {
            return Some(format!("it is a first state of zeros, in {node}"));
        }
        if let Some(node) = self.masked_scores(id) {
            return Some(format!("it is a mask of the scores of an attention, in {node}"));
        }
        if self.ends_in_sines(id) {
            return Some(format!(
                "it is what positions are multiplied by for sines and cosines, in {}",
                uses[0].label
            ));
        }
        if self.ends_in_root(id) {
            return Some(format!("only its root is used, as that of a variance, in {}", uses[0].label));
        }
        let meetings = self.meetings(id);
        let first = meetings.first().map(|&(index, _)| self.graph.node_label(&self.graph.nodes[index]))?;
        let all =
            |test: &dyn Fn(usize, usize) -> bool| meetings.iter().all(|&(node, input)| test(node, input));
        let of_normalization = |node, input| self.is_mean(node, input) || self.is_divisor(node, input);
        if all(&of_normalization) || self.is_scaled_mean(id) {
            return Some(format!(
                "it is a statistic of a normalization that is written as arithmetic, in {first}"
            ));
        }
        let arithmetic = |node: usize| ARITHMETIC.contains(&self.op(node));
        if all(&|node, _| arithmetic(node) && self.level_behind(node) == Level::Position) {
            return Some(format!("it meets nothing but integers, positions or masks, in {first}"));
        }
        let one_axis = dims.iter().filter(|&&size| size > 1).count() <= 1;
        let prepares = |node: usize, input: usize| {
            arithmetic(node)
                && self.level_behind(node) == Level::Input
                && (one_axis || (["Div", "Sub"].contains(&self.op(node)) && input == 1))
                && self.outputs(node).any(|output| self.weighted.contains(&output))
        };
        if all(&prepares) {
            return Some(format!("it prepares an input of the model, in {first}"));
        }
        None
    }

    /// Whether a single number was learned: an initializer whose name a person chose, which data are added to or
    /// multiplied by.
    fn is_learned_number(&self, id: ValueId, uses: &[Use], dims: &[usize]) -> bool {
        let name = self.graph.name_of(id);
        let has_maker = self.producers[id.0 as usize].is_some();
        if has_maker || is_generated(name) || uses.iter().any(|used| used.inner) {
            return false;
        }
        let last = name.rsplit(['.', '/', ':']).find(|part| !part.is_empty() && *part != "0").unwrap_or(name);
        // Numbers of arithmetic have no axes as a rule, and parameters have.
        if dims.is_empty() && !LEARNED.iter().any(|word| last.eq_ignore_ascii_case(word)) {
            return false;
        }
        let meetings = self.meetings(id);
        !meetings.is_empty()
            && meetings.iter().all(|&(node, input)| {
                let op = self.op(node);
                let learned = matches!(op, "Add" | "Mul") || (op == "Sub" && input == 1);
                // What is added before a root, a logarithm or a division keeps that from being infinite.
                let guards = self.outputs(node).any(|output| {
                    self.readers_of(output).any(|(reader, at)| match self.op(reader) {
                        "Sqrt" | "Log" | "Reciprocal" | "Pow" => true,
                        "Div" => at == 1,
                        _ => false,
                    })
                });
                learned && !guards && self.level_behind(node) == Level::Data
            })
    }

    /// The use as a scale of ones, or a bias of zeros, that an exporter wrote for a normalization without any.
    fn neutral_use<'a>(&self, id: ValueId, uses: &'a [Use]) -> Option<&'a Use> {
        let tensor = self.graph.value(id).content()?;
        let made = self.is_made_up(id);
        let all_are = |wanted: f64| (0..tensor.len()).all(|k| element(tensor, k) == Some(wanted));
        let neutral = |used: &Use| {
            let Some(definition) = used.definition else { return false };
            let known = NORMALIZATIONS.iter().find(|(name, ..)| *name == definition.name);
            let Some(&(_, scale, bias)) = known else { return false };
            let is_neutral = (used.input == scale && all_are(1.0)) || (used.input == bias && all_are(0.0));
            is_neutral && (made || self.normalizes_groups(id))
        };
        uses.iter().all(neutral).then(|| &uses[0])
    }

    /// True for a constant that an exporter wrote: a node makes it, or its name says so.
    fn is_made_up(&self, id: ValueId) -> bool {
        self.producers[id.0 as usize].is_some() || is_generated(self.graph.name_of(id))
    }

    /// The node that has a constant as its first state, if that is zeros that an exporter wrote.
    fn first_state(&self, id: ValueId) -> Option<String> {
        let tensor = self.graph.value(id).content()?;
        let is_zero = self.is_made_up(id) && (0..tensor.len()).all(|k| element(tensor, k) == Some(0.0));
        let is_state = |node: usize, input: usize| {
            RECURRENT.iter().any(|(op, states)| *op == self.op(node) && states.contains(&input))
        };
        let meetings = if is_zero { self.meetings(id) } else { Vec::new() };
        let first = meetings.first().map(|&(node, _)| self.graph.node_label(&self.graph.nodes[node]))?;
        meetings.iter().all(|&(node, input)| is_state(node, input)).then_some(first)
    }

    /// The node that adds a constant to the scores of an attention, if that hides some of them, or hides none and was
    /// written by an exporter.
    fn masked_scores(&self, id: ValueId) -> Option<String> {
        let tensor = self.graph.value(id).content()?;
        let (mut hides, mut all) = (false, true);
        for score in (0..tensor.len()).map(|k| element(tensor, k)) {
            hides |= score.is_some_and(|score| score <= HIDDEN);
            all &= score.is_some_and(|score| score == 0.0 || score <= HIDDEN);
        }
        if !all || !(hides || self.is_made_up(id) || is_named_by_operator(self.graph.name_of(id))) {
            return None;
        }
        let meetings = self.meetings(id);
        let first = meetings.first().map(|&(node, _)| self.graph.node_label(&self.graph.nodes[node]))?;
        let is_added = |node: usize, input: usize| {
            let other = self.graph.nodes[node].inputs.get(1 - input.min(1)).copied().flatten();
            let compared = other.is_some_and(|other| self.compares_data(other));
            let softmax = |output| self.readers_of(output).any(|(reader, _)| self.op(reader) == "Softmax");
            self.op(node) == "Add" && compared && self.outputs(node).any(softmax)
        };
        meetings.iter().all(|&(node, input)| is_added(node, input)).then_some(first)
    }

    /// True for a product of two values that both depend on data, perhaps moved and scaled.
    fn compares_data(&self, mut id: ValueId) -> bool {
        while let Some(maker) = self.producers[id.0 as usize] {
            let node = &self.graph.nodes[maker];
            let mut data = node.present_inputs().filter(|&id| self.level(id) > Level::Shape);
            id = match (self.op(maker), data.next(), data.next()) {
                ("MatMul" | "FusedMatMul" | "Einsum", Some(_), Some(_)) => return true,
                (op, Some(only), None) if ARITHMETIC.contains(&op) || MOVES.contains(&op) => only,
                _ => return false,
            };
        }
        false
    }

    /// Whether all nodes that use a value normalize groups of channels: what they are given was reshaped for it.
    fn normalizes_groups(&self, id: ValueId) -> bool {
        self.readers_of(id).all(|(node, _)| {
            let data = self.graph.nodes[node].inputs.first().copied().flatten();
            let maker = data.and_then(|data| self.producers[data.0 as usize]);
            self.op(node) == "InstanceNormalization" && maker.is_some_and(|maker| self.op(maker) == "Reshape")
        })
    }

    /// The operator of a node, if it is one of ONNX or of ONNX Runtime.
    fn op(&self, node: usize) -> &str {
        &self.graph.nodes[node].op
    }

    fn outputs(&self, node: usize) -> impl Iterator<Item = ValueId> + '_ {
        self.graph.nodes[node].present_outputs()
    }

    fn readers_of(&self, id: ValueId) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.readers.get(&id).into_iter().flatten().copied()
    }

    fn level(&self, id: ValueId) -> Level {
        self.levels[id.0 as usize]
    }

    /// What the results of a node depend on.
    fn level_behind(&self, node: usize) -> Level {
        self.outputs(node).map(|output| self.level(output)).max().unwrap_or(Level::Constant)
    }

    /// The nodes, each with the input, at which a constant first meets a value that is neither constant nor a shape.
    fn meetings(&self, id: ValueId) -> Vec<(usize, usize)> {
        let mut found: Vec<(usize, usize)> = Vec::new();
        let mut seen = FxHashSet::from_iter([id]);
        let mut rest = vec![id];
        while let Some(id) = rest.pop() {
            for (node, input) in self.readers_of(id) {
                if self.level_behind(node) > Level::Shape {
                    found.push((node, input));
                } else {
                    rest.extend(self.outputs(node).filter(|output| seen.insert(*output)));
                }
            }
        }
        found.sort_unstable();
        found
    }

    /// Whether every way from a constant ends in sines or cosines of positions.
    fn ends_in_sines(&self, id: ValueId) -> bool {
        let mut found = false;
        let mut seen = FxHashSet::from_iter([id]);
        let mut rest = vec![id];
        while let Some(id) = rest.pop() {
            for (node, _) in self.readers_of(id) {
                match self.op(node) {
                    "Sin" | "Cos" => found = true,
                    _ if self.level_behind(node) > Level::Position => return false,
                    _ => rest.extend(self.outputs(node).filter(|output| seen.insert(*output))),
                }
            }
        }
        found
    }

    /// Whether a root is taken of a constant, and nothing else is done with it.
    fn ends_in_root(&self, id: ValueId) -> bool {
        let mut found = false;
        let mut seen = FxHashSet::from_iter([id]);
        let mut rest = vec![id];
        while let Some(id) = rest.pop() {
            for (node, input) in self.readers_of(id) {
                if self.level_behind(node) > Level::Shape {
                    return false;
                }
                let other = self.graph.nodes[node].inputs.get(1 - input.min(1)).copied().flatten();
                match self.op(node) {
                    _ if self.is_root(node) => found = true,
                    op if MOVES.contains(&op) => {
                        rest.extend(self.outputs(node).filter(|output| seen.insert(*output)));
                    }
                    "Add" if other.is_some_and(|other| self.is_number(other)) => {
                        rest.extend(self.outputs(node).filter(|output| seen.insert(*output)));
                    }
                    _ => return false,
                }
            }
        }
        found
    }

    fn is_number(&self, id: ValueId) -> bool {
        self.graph.value(id).content().is_some_and(|tensor| tensor.len() == 1)
    }

    /// Whether a node takes a square root.
    fn is_root(&self, node: usize) -> bool {
        let exponent = || {
            let exponent = self.graph.nodes[node].inputs.get(1).copied().flatten()?;
            let tensor = self.graph.value(exponent).content()?;
            if tensor.len() == 1 { element(tensor, 0) } else { None }
        };
        match self.op(node) {
            "Sqrt" => true,
            "Pow" => exponent().is_some_and(|exponent| exponent.abs() == 0.5),
            _ => false,
        }
    }

    fn find_roots(&mut self) {
        for (index, node) in self.graph.nodes.iter().enumerate() {
            if self.level_behind(index) > Level::Shape {
                continue;
            }
            let on =
                MOVES.contains(&&*node.op) || ARITHMETIC.contains(&&*node.op) || &*node.op == "Reciprocal";
            if self.is_root(index) || (on && node.present_inputs().any(|id| self.roots.contains(&id))) {
                self.roots.extend(node.present_outputs());
            }
        }
    }

    /// Whether what a node is given at an input is a mean: it is subtracted, and a deviation divides the difference.
    fn is_mean(&self, node: usize, input: usize) -> bool {
        if (self.op(node), input) != ("Sub", 1) {
            return false;
        }
        let inputs = &self.graph.nodes[node].inputs;
        // (x - mean) / deviation, (x - mean) * (scale / deviation)
        let divided = |output: ValueId| {
            self.readers_of(output).any(|(reader, at)| {
                let other = self.graph.nodes[reader].inputs.get(1 - at.min(1)).copied().flatten();
                other.is_some_and(|other| match self.op(reader) {
                    "Div" => at == 0 && self.level(other) <= Level::Shape,
                    "Mul" => self.roots.contains(&other),
                    _ => false,
                })
            })
        };
        inputs.first().copied().flatten().is_some_and(|data| self.level(data) >= Level::Input)
            && self.outputs(node).any(divided)
    }

    /// Whether a constant is a mean that is scaled and subtracted from a bias: bias - mean * (scale / deviation).
    fn is_scaled_mean(&self, id: ValueId) -> bool {
        let is_subtracted = |output: ValueId| {
            let mut readers = self.readers_of(output).peekable();
            readers.peek().is_some() && readers.all(|(reader, at)| (self.op(reader), at) == ("Sub", 1))
        };
        let mut seen = FxHashSet::from_iter([id]);
        let mut rest = vec![id];
        while let Some(id) = rest.pop() {
            for (node, input) in self.readers_of(id) {
                let other = self.graph.nodes[node].inputs.get(1 - input.min(1)).copied().flatten();
                let is_scaled =
                    self.op(node) == "Mul" && other.is_some_and(|other| self.roots.contains(&other));
                if MOVES.contains(&self.op(node)) && self.level_behind(node) <= Level::Shape {
                    rest.extend(self.outputs(node).filter(|output| seen.insert(*output)));
                } else if !is_scaled || !self.outputs(node).all(is_subtracted) {
                    return false;
                }
            }
        }
        true
    }

    /// Whether what a node is given at an input divides a difference to a constant.
    fn is_divisor(&self, node: usize, input: usize) -> bool {
        if (self.op(node), input) != ("Div", 1) {
            return false;
        }
        let data = self.graph.nodes[node].inputs.first().copied().flatten();
        let maker = data.and_then(|data| self.producers[data.0 as usize]);
        maker.is_some_and(|maker| {
            let mean = self.graph.nodes[maker].inputs.get(1).copied().flatten();
            self.op(maker) == "Sub" && mean.is_some_and(|mean| self.level(mean) <= Level::Shape)
        })
    }

    /// The layers of constants that are trained, from the end: 1 is the last.
    ///
    /// A layer is a node with weights of its own, together with constants that its results are added to or multiplied
    /// by. Layers are in the order of their nodes; a constant of several is one of the last of them.
    #[must_use]
    pub fn layers(&self, trained: &[ValueId]) -> Vec<Option<usize>> {
        let mut met: FxHashMap<usize, Vec<usize>> = FxHashMap::default();
        for (position, &id) in trained.iter().enumerate() {
            for (node, _) in self.meetings(id) {
                met.entry(node).or_default().push(position);
            }
        }
        let mut count = 0;
        let mut layers: Vec<Option<usize>> = vec![None; trained.len()];
        // The layer that made a value.
        let mut made: FxHashMap<ValueId, usize> = FxHashMap::default();
        for (index, node) in self.graph.nodes.iter().enumerate() {
            let data = |id: &ValueId| self.level(*id) > Level::Shape;
            let mut given = node.present_inputs().filter(data);
            let before = match (given.next(), given.next()) {
                (Some(only), None) => made.get(&only).copied(),
                _ => None,
            };
            let goes_on = ARITHMETIC.contains(&&*node.op) || MOVES.contains(&&*node.op);
            let layer = match met.get(&index) {
                None => before.filter(|_| goes_on),
                Some(positions) => {
                    let layer = before.filter(|_| goes_on).unwrap_or_else(|| {
                        count += 1;
                        count - 1
                    });
                    for &position in positions {
                        layers[position] = layers[position].max(Some(layer));
                    }
                    Some(layer)
                }
            };
            if let Some(layer) = layer {
                made.extend(node.present_outputs().map(|output| (output, layer)));
            }
        }
        // Layers none of whose constants is last there have no number.
        let mut there: Vec<usize> = layers.iter().flatten().copied().collect();
        there.sort_unstable();
        there.dedup();
        let number = |layer: usize| there.binary_search(&layer).map_or(0, |at| there.len() - at);
        layers.into_iter().map(|layer| layer.map(number)).collect()
    }
}

/// Whether an exporter or an optimizer of graphs made a name up.
fn is_generated(name: &str) -> bool {
    let number = name.strip_prefix("val_").or_else(|| name.strip_prefix("scalar_")).unwrap_or(name);
    GENERATED.iter().any(|part| name.contains(part)) || number.bytes().all(|byte| byte.is_ascii_digit())
}

/// Whether a name is that of an operator of PyTorch that makes constants, with a number or without, as an exporter names what
/// it has computed.
fn is_named_by_operator(name: &str) -> bool {
    let stem = name.trim_end_matches(|letter: char| letter.is_ascii_digit()).trim_end_matches('_');
    ["expand", "full", "masked_fill", "mul", "new_zeros", "where", "zeros", "zeros_like"].contains(&stem)
}

/// Finds who uses the values of a graph, in its subgraphs too. `outer` says which value of the main graph one of this graph
/// is.
fn find_uses(
    graph: &Graph,
    inner: bool,
    outer: &mut dyn FnMut(ValueId) -> Option<ValueId>,
    uses: &mut FxHashMap<ValueId, Vec<Use>>,
) {
    for node in &graph.nodes {
        let subgraphs: Vec<&Graph> = Graph::subgraphs(node).map(|(_, subgraph)| subgraph).collect();
        let own = if subgraphs.is_empty() { node.inputs.len() } else { node.inputs.len() - node.captures };
        for (input, id) in node.inputs[..own].iter().enumerate() {
            if let Some(id) = id.and_then(&mut *outer) {
                uses.entry(id).or_default().push(Use {
                    label: graph.node_label(node),
                    name: name_of_node(graph, node),
                    definition: Registry::standard().find(&node.domain, &node.op),
                    input,
                    inner,
                });
            }
        }
        for subgraph in subgraphs {
            // What is captured comes last on both sides.
            let Some(formal) = subgraph.inputs.len().checked_sub(node.captures) else { continue };
            let captured: FxHashMap<ValueId, ValueId> = (subgraph.inputs[formal..].iter())
                .zip(&node.inputs[own..])
                .filter_map(|(&inside, port)| Some((inside, outer((*port)?)?)))
                .collect();
            find_uses(subgraph, true, &mut |id| captured.get(&id).copied(), uses);
        }
    }
}

/// The name of a node, or that of its first result.
fn name_of_node(graph: &Graph, node: &Node) -> String {
    match node.present_outputs().next() {
        Some(output) if node.name.is_empty() => graph.name_of(output).to_owned(),
        _ => node.name.to_string(),
    }
}

/// What each value depends on.
fn levels(graph: &Graph) -> Vec<Level> {
    let to_sines = to_sines(graph);
    let mut levels = vec![Level::Constant; graph.value_count()];
    for &id in &graph.inputs {
        let is_float = graph.value(id).ty.dtype().is_some_and(DType::is_float);
        levels[id.0 as usize] = if is_float { Level::Input } else { Level::Position };
    }
    for node in &graph.nodes {
        let of = |id: ValueId| levels[id.0 as usize];
        let highest = node.present_inputs().map(of).max().unwrap_or(Level::Constant);
        let has_weights = has_weights(node, &levels);
        let op = &*node.op;
        let leads_to_sines = node.present_outputs().any(|output| to_sines.contains(&output));
        let level =
            match op {
                "Shape" | "Size" => Level::Shape,
                "Range" => highest.max(Level::Position),
                _ if op.starts_with("Random") || op == "Bernoulli" => Level::Data,
                // Their captured values are among the inputs.
                _ if highest > Level::Shape && Graph::subgraphs(node).next().is_some() => Level::Data,
                "Sin" | "Cos" if highest > Level::Shape => Level::Data,
                _ if highest == Level::Position && has_weights => {
                    if PRODUCTS.contains(&op) && leads_to_sines { Level::Position } else { Level::Data }
                }
                _ if highest == Level::Input => {
                    let prepares =
                        ARITHMETIC.contains(&op) || MOVES.contains(&op) || PREPARATION.contains(&op);
                    if prepares && !has_weights { Level::Input } else { Level::Data }
                }
                _ => highest,
            };
        for output in node.present_outputs() {
            levels[output.0 as usize] = level;
        }
    }
    levels
}

/// Whether a node is given constants where it has its weights.
fn has_weights(node: &Node, levels: &[Level]) -> bool {
    let is_constant = |at: usize| {
        node.inputs.get(at).copied().flatten().is_some_and(|id| levels[id.0 as usize] <= Level::Shape)
    };
    let definition = Registry::standard().find(&node.domain, &node.op);
    definition.is_some_and(|known| known.weights.iter().any(|&at| is_constant(at)))
}

/// The values that become sines and cosines by arithmetic alone.
fn to_sines(graph: &Graph) -> FxHashSet<ValueId> {
    let mut found = FxHashSet::default();
    for node in graph.nodes.iter().rev() {
        let op = &*node.op;
        let on = ARITHMETIC.contains(&op) || MOVES.contains(&op);
        if matches!(op, "Sin" | "Cos") || (on && node.present_outputs().any(|output| found.contains(&output)))
        {
            found.extend(node.present_inputs());
        }
    }
    found
}

/// The values behind which there is a node with weights.
fn weighted(graph: &Graph, levels: &[Level]) -> FxHashSet<ValueId> {
    let mut found = FxHashSet::default();
    for node in graph.nodes.iter().rev() {
        if has_weights(node, levels) || node.present_outputs().any(|output| found.contains(&output)) {
            found.extend(node.present_inputs());
        }
    }
    found
}

/// One element of a tensor of floats.
fn element(tensor: &Tensor, at: usize) -> Option<f64> {
    let size = tensor.dtype().size();
    let bytes = tensor.data().get(at * size..(at + 1) * size)?;
    Some(match tensor.dtype() {
        DType::F32 => f32::from_le_bytes(bytes.try_into().ok()?).into(),
        DType::F64 => f64::from_le_bytes(bytes.try_into().ok()?),
        DType::F16 => half::f16::from_le_bytes(bytes.try_into().ok()?).into(),
        DType::BF16 => half::bf16::from_le_bytes(bytes.try_into().ok()?).into(),
        _ => return None,
    })
}

/// Whether the columns of a table are sines and cosines of the number of the row: in each, the sum of the neighbours of an
/// element is the element times twice the cosine of one angle.
fn is_table_of_sines(tensor: &Tensor) -> bool {
    let dims: Vec<usize> = tensor.dims().iter().copied().filter(|&size| size != 1).collect();
    let [rows, columns] = dims[..] else { return false };
    if columns.saturating_mul(rows.saturating_sub(3)) < LEAST_EVIDENCE {
        return false;
    }
    let mut turns = false;
    let mut fits = |rows: usize| {
        (0..columns).all(|column| {
            let at = |row: usize| element(tensor, row * columns + column).unwrap_or(f64::NAN);
            let (mut product, mut square, mut largest) = (0.0, 0.0, 0.0_f64);
            for row in 1..rows - 1 {
                product += at(row) * (at(row - 1) + at(row + 1));
                square += at(row) * at(row);
                largest = largest.max(at(row).abs());
            }
            let twice_cosine = if square > 0.0 { product / square } else { 2.0 };
            turns |= twice_cosine.abs() < TURNING && largest > 0.0;
            let distance = |row: usize| (at(row - 1) + at(row + 1) - twice_cosine * at(row)).abs();
            // Comparisons with NaN are false.
            (1..rows - 1).all(|row| distance(row) <= SINE_TOLERANCE * largest)
        })
    };
    fits(rows.min(FIRST_ROWS)) && fits(rows) && turns
}
