//! Classification of the constants of a model: training changes weights, but not constants that were computed.
//!
//! A file does not record which of its constants were trained; the nodes that use a constant give evidence. Some
//! constants were computed from data or by a formula: a mean that is subtracted from an input, the frequencies of a
//! rotary embedding, a variance with a root that divides. An optimizer step would corrupt them.

mod attention_masks;
mod levels;
mod names;
mod roles;
mod uses;
mod values;

use ortrain_expr::pause;
use ortrain_graph::{DType, Dim, Graph, ValueId};
use rustc_hash::{FxHashMap, FxHashSet};

pub(super) use self::names::is_path;
pub use self::roles::{Confidence, Judgement, ParameterRole, about_guesses};
use self::values::element;
use crate::Definition;
use crate::class::{Class, Traits};
use crate::registry::{class_of, definition_of, has_traits};
use crate::training::parameters::levels::{DependencyLevel, has_weights, levels, values_before_weights};
use crate::training::parameters::uses::{Use, collect_uses};

/// Bound below which a score masks an element of a softmax; minus infinity is below it, too.
const MASK_SCORE: f64 = -1e4;

/// Uses of all values of a graph, for the classification of its constants.
pub struct ConstantUses<'g> {
    graph: &'g Graph,
    uses: FxHashMap<ValueId, Vec<Use>>,
    /// Nodes of the main graph that read a value, with the input index.
    readers: FxHashMap<ValueId, Vec<(usize, usize)>>,
    producers: Vec<Option<usize>>,
    levels: Vec<DependencyLevel>,
    /// Values with a path to a node with weights.
    weighted: FxHashSet<ValueId>,
    /// Values that are computed from the root of a constant, and other constants.
    roots: FxHashSet<ValueId>,
}

impl<'g> ConstantUses<'g> {
    /// Collects the uses in a graph with all known types.
    #[must_use]
    pub fn new(graph: &'g Graph) -> ConstantUses<'g> {
        let mut uses = FxHashMap::default();
        collect_uses(graph, false, &mut |id| Some(id), &mut uses);
        let mut readers: FxHashMap<ValueId, Vec<(usize, usize)>> = FxHashMap::default();
        for (index, node) in graph.nodes.iter().enumerate() {
            for (input, id) in node.inputs.iter().enumerate() {
                if let Some(id) = id {
                    readers.entry(*id).or_default().push((index, input));
                }
            }
        }
        let levels = levels(graph);
        let mut result = ConstantUses {
            graph,
            uses,
            readers,
            producers: graph.producers(),
            weighted: values_before_weights(graph, &levels),
            levels,
            roots: FxHashSet::default(),
        };
        result.find_roots();
        result
    }

    /// Classifies a constant of this type and shape.
    #[must_use]
    pub fn classify(&self, id: ValueId, dtype: DType, dims: &[usize]) -> Judgement {
        let uses = self.uses.get(&id).map_or(&[][..], Vec::as_slice);
        pause();
        let mut visited: FxHashSet<&str> = FxHashSet::default();
        let names = uses.iter().map(|used| used.name.as_str());
        let nodes: Vec<String> = names.filter(|name| visited.insert(name)).map(str::to_owned).collect();
        let (role, confidence, mut reason) = self.role(id, uses, dtype, dims);
        if role == ParameterRole::Trained && nodes.len() > 1 {
            reason += &self.sharing_reason(id, &nodes);
        }
        Judgement { role, confidence, reason, nodes }
    }

    fn role(
        &self,
        id: ValueId,
        uses: &[Use],
        dtype: DType,
        dims: &[usize],
    ) -> (ParameterRole, Confidence, String) {
        let of = |inputs_of: fn(&Definition) -> &'static [usize]| {
            uses.iter()
                .find(|used| used.definition.is_some_and(|known| inputs_of(known).contains(&used.input)))
        };
        if let Some(used) = of(|definition| definition.statistics) {
            let reason = format!("it is a running statistic of {}", used.label);
            return (ParameterRole::Statistic, Confidence::Certain, reason);
        }
        let constant = |confidence, reason| (ParameterRole::Constant, confidence, reason);
        if let Some(used) = of(|definition| definition.scales) {
            return constant(
                Confidence::Certain,
                format!("it is a scale of quantized numbers in {}", used.label),
            );
        }
        if uses.is_empty() {
            return constant(Confidence::Certain, "nothing uses it".into());
        }
        if !dtype.is_float() {
            return constant(Confidence::Certain, format!("it is {dtype}, and only floats are trained"));
        }
        let name = self.graph.name_of(id);
        let elements: usize = dims.iter().product();
        if let Some(reason) = self.filled_reason(id, uses) {
            return constant(Confidence::Likely, reason);
        }
        if elements > 1
            && let Some(reason) = self.computed_reason(id, uses, dims)
        {
            return constant(Confidence::Likely, reason);
        }
        if let Some(used) = of(|definition| definition.weights) {
            // A computed constant may be on either side of a product.
            let is_sure = !self.is_generated_constant(id) || !used.class().is_product();
            let confidence = if is_sure { Confidence::Certain } else { Confidence::Likely };
            return (ParameterRole::Trained, confidence, format!("it is a weight of {}", used.label));
        }
        // Uses are in the order of the nodes.
        let mut labels: Vec<&str> = uses.iter().map(|used| used.label.as_str()).collect();
        labels.dedup();
        let labels = match labels[..] {
            [only] => only.to_owned(),
            [first, ref rest @ ..] => format!("{first} and {} more", rest.len()),
            [] => String::new(),
        };
        if elements == 1 && !self.is_learned_number(id, uses, dims) {
            let is_sure = self.is_computed(id) || names::is_fixed(name);
            let confidence = if is_sure { Confidence::Certain } else { Confidence::Guess };
            return constant(confidence, format!("it is a single number in {labels}"));
        }
        let is_sure = !self.is_computed(id) || self.is_bias_of_layer(id);
        let confidence = if is_sure { Confidence::Likely } else { Confidence::Guess };
        (ParameterRole::Trained, confidence, format!("it is a float input of {labels}"))
    }

    /// Returns the end of a reason for a constant with several users. An exporter may have stored equal tensors once.
    fn sharing_reason(&self, id: ValueId, nodes: &[String]) -> String {
        let is_fresh = self.graph.value(id).content().is_some_and(values::is_constant);
        let why = if is_fresh { ", perhaps because an exporter stores equal tensors once" } else { "" };
        format!("; {} nodes share it{why}", nodes.len())
    }

    /// Returns the reason why a constant of one value was written by an exporter, or belongs to no layer.
    fn filled_reason(&self, id: ValueId, uses: &[Use]) -> Option<String> {
        if let Some(used) = self.neutral_use(id, uses) {
            return Some(format!("it has no effect in {}, which has no learned scale and bias", used.label));
        }
        if uses.iter().any(|used| used.inner) {
            return None;
        }
        let tensor = self.graph.value(id).content()?;
        if names::is_singular_vector(self.graph.name_of(id)) && values::is_unit_vector(tensor) {
            return Some(format!(
                "it is a vector of the power iteration of a spectral norm, in {}",
                uses[0].label
            ));
        }
        if !values::is_constant(tensor) {
            return None;
        }
        let name = self.graph.name_of(id);
        if element(tensor, 0).is_some_and(|value| value <= MASK_SCORE) {
            return Some(format!("its values are too low for a parameter, in {}", uses[0].label));
        }
        if tensor.len() > 1 && names::is_filler(name) && !uses.iter().any(Use::is_weight) {
            return Some(format!(
                "its values are all equal, as in a tensor that code fills, in {}",
                uses[0].label
            ));
        }
        if names::is_geometry(name) {
            return Some(format!(
                "its name is typical of a table of strides or points, in {}",
                uses[0].label
            ));
        }
        if let Some(node) = self.initial_state_node(id) {
            return Some(format!("it is an initial state with equal values, in {node}"));
        }
        self.canvas_node(id).map(|node| {
            format!(
                "its values are all equal, and {node} overwrites a part of it or writes it into another tensor"
            )
        })
    }

    /// Returns the reason why a constant was computed rather than trained, if any.
    fn computed_reason(&self, id: ValueId, uses: &[Use], dims: &[usize]) -> Option<String> {
        let content = self.graph.value(id).content();
        if content
            .is_some_and(|tensor| values::is_table_of_sines(tensor) || values::is_pairs_of_sines(tensor))
        {
            return Some("its columns are sines and cosines of positions".into());
        }
        if uses.iter().any(|used| used.inner) {
            return None;
        }
        let name = self.graph.name_of(id);
        if names::is_literal(name) {
            return Some(format!("it is a literal in the code of the network, in {}", uses[0].label));
        }
        if let Some(tensor) = content {
            if uses.iter().all(|used| used.class() == Class::Convolution) && values::is_fixed_filter(tensor) {
                return Some(format!("it is one filter for all channels, in {}", uses[0].label));
            }
            if uses.iter().any(Use::is_weight) {
                let is_position = |used: &Use| {
                    // The expected value of a distribution over bins weights consecutive numbers.
                    let weights = used.class().is_product() || used.class() == Class::Convolution;
                    used.is_weight() && weights || used.has(Traits::MOVES) || used.class() == Class::Shape
                };
                if uses.iter().all(is_position) && values::is_consecutive(tensor) {
                    return Some(format!("its elements are evenly spaced, in {}", uses[0].label));
                }
            } else if let Some(formula) =
                values::regular_formula(tensor, !self.is_computed(id) && !names::is_path(name))
                    .filter(|_| !self.is_bias(id, dims))
            {
                return Some(format!("{formula}, in {}", uses[0].label));
            } else if self.is_computed(id) && values::is_mask(tensor) {
                return Some(format!("it is a mask of zeros and ones, in {}", uses[0].label));
            } else if self.is_computed(id) && !names::is_path(name) && values::are_short_decimals(tensor) {
                return Some(format!(
                    "its elements have few decimals, like numbers in code, in {}",
                    uses[0].label
                ));
            }
            if let Some(node) = self.coordinate_product(id).filter(|_| values::repeats_values(tensor)) {
                return Some(format!(
                    "it is a table of coordinates that a weight is multiplied with, in {node}"
                ));
            }
        }
        if let Some(node) = self.masked_scores(id) {
            return Some(format!("it is a mask of the scores of an attention, in {node}"));
        }
        if self.ends_in_sines(id) {
            return Some(format!("it multiplies positions for sines and cosines, in {}", uses[0].label));
        }
        if self.ends_in_root(id) {
            return Some(format!(
                "only its square root is used, like that of a variance, in {}",
                uses[0].label
            ));
        }
        let meetings = self.data_meetings(id);
        let first = meetings.first().map(|&(index, _)| self.graph.node_label(&self.graph.nodes[index]))?;
        let all_meetings =
            |test: &dyn Fn(usize, usize) -> bool| meetings.iter().all(|&(node, input)| test(node, input));
        let of_normalization = |node, input| self.is_mean(node, input) || self.is_divisor(node, input);
        if all_meetings(&of_normalization) || self.is_scaled_mean(id) {
            return Some(format!(
                "it is a statistic of a normalization that is written as arithmetic, in {first}"
            ));
        }
        let arithmetic = |node: usize| self.class(node).is_arithmetic();
        // A table of parameters may be looked up and added to a mask before both are added to scores.
        let is_looked_up = |used: &Use| used.class() == Class::Lookup && used.input == 0;
        let is_table = names::is_path(name) && uses.iter().any(is_looked_up);
        if !is_table
            && all_meetings(&|node, _| {
                arithmetic(node) && self.result_level(node) == DependencyLevel::Position
            })
        {
            return Some(format!("it is combined only with integers, positions or masks, in {first}"));
        }
        let one_axis = dims.iter().filter(|&&size| size > 1).count() <= 1;
        let prepares = |node: usize, input: usize| {
            arithmetic(node)
                && self.result_level(node) == DependencyLevel::Input
                && (one_axis || (matches!(self.class(node), Class::Divide | Class::Subtract) && input == 1))
                && self.outputs(node).any(|output| self.weighted.contains(&output))
        };
        if all_meetings(&prepares) {
            return Some(format!("it prepares an input of the model, in {first}"));
        }
        None
    }

    /// Returns true if a single number was learned: a bias of one output, a slope, or a factor or term of data with the
    /// name of a parameter.
    fn is_learned_number(&self, id: ValueId, uses: &[Use], dims: &[usize]) -> bool {
        if uses.iter().any(|used| used.inner) {
            return false;
        }
        let meetings = self.data_meetings(id);
        let all_meetings = |test: &dyn Fn(usize, usize) -> bool| {
            !meetings.is_empty() && meetings.iter().all(|&(node, input)| test(node, input))
        };
        // Numbers in arithmetic usually have no axes, but parameters have.
        if !dims.is_empty() && all_meetings(&|node, input| self.is_bias_of_product(node, input, 1)) {
            return true;
        }
        let name = self.graph.name_of(id);
        if self.is_generated_constant(id) || names::is_fixed(name) || self.is_guard(id) {
            return false;
        }
        let is_learned = names::is_learned(name);
        if !is_learned && (dims.is_empty() || !self.is_factor_or_term(&meetings)) {
            return false;
        }
        // Without such a name a number may preprocess an input of the model.
        let min_level = if is_learned { DependencyLevel::Input } else { DependencyLevel::Data };
        all_meetings(&|node, input| {
            let weights =
                definition_of(&self.graph.nodes[node]).map_or(&[][..], |definition| definition.weights);
            weights.contains(&input)
                || (self.class(node).is_arithmetic() && self.result_level(node) >= min_level)
        })
    }

    /// Returns true if a number is added to data or multiplied with data at all their meetings.
    fn is_factor_or_term(&self, meetings: &[(usize, usize)]) -> bool {
        meetings.iter().all(|&(node, input)| {
            let class = self.class(node);
            matches!(class, Class::Add | Class::Multiply) || (class == Class::Subtract && input == 1)
        })
    }

    /// Returns true if a vector is added to the results of layers that have one output for each of its elements.
    fn is_bias(&self, id: ValueId, dims: &[usize]) -> bool {
        let [size] = *dims else { return false };
        let meetings = self.data_meetings(id);
        !meetings.is_empty()
            && meetings.iter().all(|&(node, input)| self.is_bias_of_product(node, input, size))
    }

    /// Returns true if a node adds a value to the result of a layer with this number of outputs.
    fn is_bias_of_product(&self, node: usize, input: usize, outputs: usize) -> bool {
        let inputs = &self.graph.nodes[node].inputs;
        let other = inputs.get(1 - input.min(1)).copied().flatten();
        let product = other.and_then(|other| Some((other, self.producers[other.0 as usize]?)));
        self.class(node) == Class::Add
            && product.is_some_and(|(value, maker)| {
                let last =
                    self.graph.value(value).ty.shape().and_then(|shape| shape.0.last().and_then(Dim::known));
                self.class(maker).is_product()
                    && has_weights(&self.graph.nodes[maker], &self.levels)
                    && last == Some(outputs)
            })
    }

    /// Returns true if a constant is a bias, or the shift of a normalization. It must be added only to results of
    /// layers, possibly after moves or scaling, or to the product of data and a vector.
    fn is_bias_of_layer(&self, id: ValueId) -> bool {
        let is_layer = |mut value: ValueId| {
            while let Some(maker) = self.producers[value.0 as usize] {
                let node = &self.graph.nodes[maker];
                if has_weights(node, &self.levels) {
                    return true;
                }
                let mut data = node.present_inputs().filter(|&id| self.level(id) > DependencyLevel::Shape);
                let class = self.class(maker);
                let scales = |&id: &ValueId| {
                    self.level(id) <= DependencyLevel::Shape
                        && self.graph.value(id).content().is_some_and(|tensor| tensor.len() > 1)
                };
                if class == Class::Multiply && node.present_inputs().any(|id| scales(&id)) {
                    return true;
                }
                match (data.next(), data.next()) {
                    (Some(only), None) if class.is_arithmetic() || self.moves(maker) => {
                        value = only;
                    }
                    _ => return false,
                }
            }
            false
        };
        let meetings = self.data_meetings(id);
        let other = |node: usize, input: usize| {
            self.graph.nodes[node].inputs.get(1 - input.min(1)).copied().flatten()
        };
        !meetings.is_empty()
            && meetings.iter().all(|&(node, input)| {
                self.class(node) == Class::Add && other(node, input).is_some_and(is_layer)
            })
    }

    /// Returns true if a node adds a number before a root, a logarithm or a division to keep them finite, or if the
    /// number masks scores of a softmax.
    fn is_guard(&self, id: ValueId) -> bool {
        let hides = self
            .graph
            .value(id)
            .content()
            .and_then(|tensor| element(tensor, 0))
            .is_some_and(|value| value <= MASK_SCORE);
        hides
            || self.readers_of(id).any(|(node, _)| {
                self.class(node) == Class::Add
                    && self.outputs(node).any(|output| {
                        self.readers_of(output).any(|(reader, at)| match self.class(reader) {
                            Class::Root | Class::Logarithm | Class::Reciprocal | Class::Power => true,
                            Class::Divide => at == 1,
                            _ => false,
                        })
                    })
            })
    }

    /// Returns the use as a scale of ones or a bias of zeros that an exporter wrote for a normalization without
    /// parameters.
    fn neutral_use<'a>(&self, id: ValueId, uses: &'a [Use]) -> Option<&'a Use> {
        let tensor = self.graph.value(id).content()?;
        let is_generated = self.is_generated_constant(id);
        let neutral = |used: &Use| {
            let Class::Normalization { scale, bias, .. } = used.class() else { return false };
            let is_neutral = (used.input == scale && values::is_filled_with(tensor, 1.0))
                || (Some(used.input) == bias && values::is_filled_with(tensor, 0.0));
            is_neutral
                && (is_generated || (self.normalizes_groups(id) && !names::is_path(self.graph.name_of(id))))
        };
        uses.iter().all(neutral).then(|| &uses[0])
    }

    /// Returns true if an exporter wrote the constant: a node computes it, or its name indicates this.
    fn is_generated_constant(&self, id: ValueId) -> bool {
        self.producers[id.0 as usize].is_some() || names::is_generated(self.graph.name_of(id))
    }

    /// Returns the node that uses a constant as its initial state, if only recurrent layers use the constant.
    fn initial_state_node(&self, id: ValueId) -> Option<String> {
        self.sole_meeting(
            id,
            |node, input| matches!(self.class(node), Class::Recurrent { states } if states.contains(&input)),
        )
    }

    /// Returns the node that writes into a constant of one value, joins it with other values, or selects between both.
    ///
    /// A parameter may be untrained. A constant with a name from the author counts only in a scatter, and only if the
    /// name is not a path of attributes.
    fn canvas_node(&self, id: ValueId) -> Option<String> {
        let name = self.graph.name_of(id);
        let is_computed = self.is_computed(id);
        if !is_computed && names::is_path(name) {
            return None;
        }
        // Inputs that exporters fill with one number.
        self.sole_reader(id, |node, input| match self.class(node) {
            Class::Write { filled } => filled.contains(&input),
            Class::Pad => is_computed && matches!(input, 0 | 2),
            Class::Join => is_computed,
            Class::Expand => is_computed && input == 0,
            Class::Selection => is_computed && matches!(input, 1 | 2),
            _ => false,
        })
    }

    /// Returns the first node that reads a constant or moves of it, if all these nodes pass a test of the node and the
    /// input. Nodes that read only the shape do not count.
    fn sole_reader(&self, id: ValueId, test: impl Fn(usize, usize) -> bool) -> Option<String> {
        let mut first: Option<usize> = None;
        let mut visited = FxHashSet::from_iter([id]);
        let mut rest = vec![id];
        while let Some(id) = rest.pop() {
            for (node, input) in self.readers_of(id) {
                if test(node, input) {
                    first = Some(first.map_or(node, |first| first.min(node)));
                } else if self.moves(node) && input == 0 && self.result_level(node) <= DependencyLevel::Shape
                {
                    rest.extend(self.outputs(node).filter(|output| visited.insert(*output)));
                } else if !matches!(self.class(node), Class::Shape | Class::Size) {
                    return None;
                }
            }
        }
        first.map(|node| self.graph.node_label(&self.graph.nodes[node]))
    }

    /// Returns the first node at which a constant meets data, if all these nodes pass a test of the node and the input.
    fn sole_meeting(&self, id: ValueId, test: impl Fn(usize, usize) -> bool) -> Option<String> {
        let meetings = self.data_meetings(id);
        let first = meetings.first().map(|&(node, _)| self.graph.node_label(&self.graph.nodes[node]))?;
        meetings.iter().all(|&(node, input)| test(node, input)).then_some(first)
    }

    /// Returns true if an exporter wrote the constant, or named it after the operator that computed it.
    fn is_computed(&self, id: ValueId) -> bool {
        self.is_generated_constant(id) || names::is_operator(self.graph.name_of(id))
    }

    /// Returns the first product of a constant, as its left operand, with another constant, if it has only such uses.
    fn coordinate_product(&self, id: ValueId) -> Option<String> {
        self.sole_reader(id, |node, input| {
            let class = self.class(node);
            input == 0
                && (class.is_product() || class == Class::Convolution)
                && self.result_level(node) <= DependencyLevel::Shape
        })
    }

    /// Returns true if all nodes that use a value normalize groups of channels: their input was reshaped for this.
    fn normalizes_groups(&self, id: ValueId) -> bool {
        self.readers_of(id).all(|(node, _)| {
            let data = self.graph.nodes[node].inputs.first().copied().flatten();
            let maker = data.and_then(|data| self.producers[data.0 as usize]);
            matches!(self.class(node), Class::Normalization { of_instances: true, .. })
                && maker.is_some_and(|maker| self.class(maker) == Class::Reshape)
        })
    }

    /// Returns the class of a node's operator.
    fn class(&self, node: usize) -> Class {
        class_of(&self.graph.nodes[node])
    }

    /// Returns true if a node passes the elements of its first input through.
    fn moves(&self, node: usize) -> bool {
        has_traits(&self.graph.nodes[node], Traits::MOVES)
    }

    fn outputs(&self, node: usize) -> impl Iterator<Item = ValueId> + '_ {
        self.graph.nodes[node].present_outputs()
    }

    fn readers_of(&self, id: ValueId) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.readers.get(&id).into_iter().flatten().copied()
    }

    fn level(&self, id: ValueId) -> DependencyLevel {
        self.levels[id.0 as usize]
    }

    /// Returns the level of a node's results.
    fn result_level(&self, node: usize) -> DependencyLevel {
        self.outputs(node).map(|output| self.level(output)).max().unwrap_or(DependencyLevel::Constant)
    }

    /// Returns the nodes, with the input index, at which a constant first meets a value that is neither constant nor a
    /// shape.
    fn data_meetings(&self, id: ValueId) -> Vec<(usize, usize)> {
        let mut meetings: Vec<(usize, usize)> = Vec::new();
        let mut visited = FxHashSet::from_iter([id]);
        let mut rest = vec![id];
        while let Some(id) = rest.pop() {
            for (node, input) in self.readers_of(id) {
                if self.result_level(node) > DependencyLevel::Shape {
                    meetings.push((node, input));
                } else {
                    rest.extend(self.outputs(node).filter(|output| visited.insert(*output)));
                }
            }
        }
        meetings.sort_unstable();
        meetings
    }

    /// Returns true if every path from a constant ends in sines or cosines of positions.
    fn ends_in_sines(&self, id: ValueId) -> bool {
        let mut has_sine = false;
        let mut visited = FxHashSet::from_iter([id]);
        let mut rest = vec![id];
        while let Some(id) = rest.pop() {
            for (node, _) in self.readers_of(id) {
                match self.class(node) {
                    Class::Sine => has_sine = true,
                    _ if self.result_level(node) > DependencyLevel::Position => return false,
                    _ => rest.extend(self.outputs(node).filter(|output| visited.insert(*output))),
                }
            }
        }
        has_sine
    }

    /// Returns true if the only use of a constant is its root.
    fn ends_in_root(&self, id: ValueId) -> bool {
        let mut has_root = false;
        let mut visited = FxHashSet::from_iter([id]);
        let mut rest = vec![id];
        while let Some(id) = rest.pop() {
            for (node, input) in self.readers_of(id) {
                if self.result_level(node) > DependencyLevel::Shape {
                    return false;
                }
                let other = self.graph.nodes[node].inputs.get(1 - input.min(1)).copied().flatten();
                match self.class(node) {
                    _ if self.is_root(node) => has_root = true,
                    _ if self.moves(node) => {
                        rest.extend(self.outputs(node).filter(|output| visited.insert(*output)));
                    }
                    Class::Add if other.is_some_and(|other| self.is_number(other)) => {
                        rest.extend(self.outputs(node).filter(|output| visited.insert(*output)));
                    }
                    _ => return false,
                }
            }
        }
        has_root
    }

    fn is_number(&self, id: ValueId) -> bool {
        self.graph.value(id).content().is_some_and(|tensor| tensor.len() == 1)
    }

    /// Returns true if a node computes a square root.
    fn is_root(&self, node: usize) -> bool {
        let exponent = || {
            let exponent = self.graph.nodes[node].inputs.get(1).copied().flatten()?;
            let tensor = self.graph.value(exponent).content()?;
            if tensor.len() == 1 { element(tensor, 0) } else { None }
        };
        match self.class(node) {
            Class::Root => true,
            Class::Power => exponent().is_some_and(|exponent| exponent.abs() == 0.5),
            _ => false,
        }
    }

    fn find_roots(&mut self) {
        for (index, node) in self.graph.nodes.iter().enumerate() {
            if self.result_level(index) > DependencyLevel::Shape {
                continue;
            }
            let class = class_of(node);
            let on = self.moves(index) || class.is_arithmetic() || class == Class::Reciprocal;
            if self.is_root(index) || (on && node.present_inputs().any(|id| self.roots.contains(&id))) {
                self.roots.extend(node.present_outputs());
            }
        }
    }

    /// Returns true if an input of a node is a mean: the node subtracts it, and a deviation divides the difference.
    fn is_mean(&self, node: usize, input: usize) -> bool {
        if (self.class(node), input) != (Class::Subtract, 1) {
            return false;
        }
        let inputs = &self.graph.nodes[node].inputs;
        // (x - mean) / deviation, (x - mean) * (scale / deviation)
        let divided = |output: ValueId| {
            self.readers_of(output).any(|(reader, at)| {
                let other = self.graph.nodes[reader].inputs.get(1 - at.min(1)).copied().flatten();
                other.is_some_and(|other| match self.class(reader) {
                    Class::Divide => at == 0 && self.level(other) <= DependencyLevel::Shape,
                    Class::Multiply => self.roots.contains(&other),
                    _ => false,
                })
            })
        };
        inputs.first().copied().flatten().is_some_and(|data| self.level(data) >= DependencyLevel::Input)
            && self.outputs(node).any(divided)
    }

    /// Returns true if a constant is a mean that is scaled and subtracted from a bias: bias - mean * (scale /
    /// deviation).
    fn is_scaled_mean(&self, id: ValueId) -> bool {
        let is_subtracted = |output: ValueId| {
            let mut readers = self.readers_of(output).peekable();
            readers.peek().is_some()
                && readers.all(|(reader, at)| (self.class(reader), at) == (Class::Subtract, 1))
        };
        let mut visited = FxHashSet::from_iter([id]);
        let mut rest = vec![id];
        while let Some(id) = rest.pop() {
            for (node, input) in self.readers_of(id) {
                let other = self.graph.nodes[node].inputs.get(1 - input.min(1)).copied().flatten();
                let is_scaled = self.class(node) == Class::Multiply
                    && other.is_some_and(|other| self.roots.contains(&other));
                if self.moves(node) && self.result_level(node) <= DependencyLevel::Shape {
                    rest.extend(self.outputs(node).filter(|output| visited.insert(*output)));
                } else if !is_scaled || !self.outputs(node).all(is_subtracted) {
                    return false;
                }
            }
        }
        true
    }

    /// Returns true if an input of a node divides a difference to a constant.
    fn is_divisor(&self, node: usize, input: usize) -> bool {
        if (self.class(node), input) != (Class::Divide, 1) {
            return false;
        }
        let data = self.graph.nodes[node].inputs.first().copied().flatten();
        let maker = data.and_then(|data| self.producers[data.0 as usize]);
        maker.is_some_and(|maker| {
            let mean = self.graph.nodes[maker].inputs.get(1).copied().flatten();
            self.class(maker) == Class::Subtract
                && mean.is_some_and(|mean| self.level(mean) <= DependencyLevel::Shape)
        })
    }

    /// Returns the layers of trained constants, counted from the end: 1 is the last.
    ///
    /// A layer is a node with its own weights, together with constants that are added to or multiplied with its
    /// results. Layers have the order of their nodes; a constant of several layers belongs to the last of them.
    #[must_use]
    pub fn layers(&self, trained: &[ValueId]) -> Vec<Option<usize>> {
        let mut inputs_by_layer: FxHashMap<usize, Vec<usize>> = FxHashMap::default();
        for (position, &id) in trained.iter().enumerate() {
            for (node, _) in self.data_meetings(id) {
                inputs_by_layer.entry(node).or_default().push(position);
            }
        }
        let mut count = 0;
        let mut layers: Vec<Option<usize>> = vec![None; trained.len()];
        // Layer that produced a value.
        let mut depth_of: FxHashMap<ValueId, usize> = FxHashMap::default();
        for (index, node) in self.graph.nodes.iter().enumerate() {
            let data = |id: &ValueId| self.level(*id) > DependencyLevel::Shape;
            let mut data_inputs = node.present_inputs().filter(data);
            let before = match (data_inputs.next(), data_inputs.next()) {
                (Some(only), None) => depth_of.get(&only).copied(),
                _ => None,
            };
            let goes_on = class_of(node).is_arithmetic() || self.moves(index);
            let layer = match inputs_by_layer.get(&index) {
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
                depth_of.extend(node.present_outputs().map(|output| (output, layer)));
            }
        }
        // Layers that are the last one for no constant have no number.
        let mut distinct: Vec<usize> = layers.iter().flatten().copied().collect();
        distinct.sort_unstable();
        distinct.dedup();
        let layer_number = |layer: usize| distinct.binary_search(&layer).map_or(0, |at| distinct.len() - at);
        layers.into_iter().map(|layer| layer.map(layer_number)).collect()
    }
}
