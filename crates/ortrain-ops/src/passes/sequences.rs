//! Replacement of sequences of tensors by their tensors.
//!
//! A sequence with a length that is known before the model runs is replaced by its tensors. A producer becomes Split
//! (and Squeeze), a read at a constant position becomes Identity, and a concatenation becomes Concat (and Unsqueeze).
//! Thus exporters' `split` and `chunk` have gradients, and run as instructions of a program. Identity propagates
//! sequences, and subgraphs may capture them. Every other use is an error, which names the node and a remedy.
//!
//! SequenceAt-11, SequenceConstruct-11, SequenceEmpty-11, SequenceErase-11, SequenceInsert-11, SequenceLength-11,
//! SequenceMap-17, ConcatFromSequence-11 and SplitToSequence-11, 24 of ONNX.

use ortrain_graph::{Attr, Attrs, DType, Graph, Node, Tensor, ValueId, ValueType};
use ortrain_onnx::GraphProto;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::class::Class;
use crate::infer::normalize_axis;
use crate::op::{Placement, Repetition};
use crate::passes::node::{fold_node, infer_node};
use crate::registry::build;
use crate::registry::normalize_domain;
use crate::registry::{class_of, class_of_message};
use crate::sequence_operators::{OPERATORS, is_sequence_operator};
use crate::support::subgraphs::clear_folded;
use crate::type_merge::merge_advised;
use crate::{Error, OpError};

/// Version of `ai.onnx` that added the operators.
const SEQUENCES_SINCE: i64 = 11;

/// Maximum number of tensors in a sequence: each is a value of the graph.
const MAX_TENSORS: usize = 1 << 14;

/// Maximum number of rewrites of a loop body while the shapes of its carried values are inferred.
const MAX_ROUNDS: usize = 3;

/// Maximum nesting depth of loops with repeated rewrites: the number of rewrites multiplies.
const MAX_REWRITE_DEPTH: usize = 2;

/// Part of the message for unsupported sequences.
const LENGTH_MESSAGE: &str =
    "a sequence is supported only if its length and positions are known before the model runs";

/// Remedy for a sequence that is an output.
const OUTPUT_ADVICE: &str = "make each of its tensors an output";

/// Checks that a sequence is not an output of its graph.
fn check_not_output(graph: &Graph, id: ValueId) -> Result<(), OpError> {
    if graph.outputs.contains(&id) {
        let name = graph.name_of(id);
        return Err(OpError::unsupported(format!(
            "its result {name:?}, a sequence, is an output; {OUTPUT_ADVICE}"
        )));
    }
    Ok(())
}

/// Returns true if a node produces or reads a sequence.
fn uses_sequences(node: &Node) -> bool {
    is_sequence_operator(&node.domain, &node.op)
}

/// Returns a flag for each node of a message: true if it uses a sequence that depends on values computed at run time,
/// or that is an output. Such a node cannot be rewritten to tensors. Subgraphs are ignored.
#[must_use]
pub fn unsupported_sequence_nodes(graph: &GraphProto) -> Vec<bool> {
    if !graph.node.iter().any(|node| is_sequence_operator(normalize_domain(&node.domain), &node.op_type)) {
        return vec![false; graph.node.len()];
    }
    let mut fixed: FxHashSet<&str> = graph.initializer.iter().map(|tensor| tensor.name.as_str()).collect();
    let mut known: FxHashSet<&str> = FxHashSet::default();
    let outputs: FxHashSet<&str> = graph.output.iter().map(|info| info.name.as_str()).collect();
    let judged = graph.node.iter().map(|node| {
        let input = |k: usize| node.input.get(k).map_or("", String::as_str);
        let standard = normalize_domain(&node.domain).is_empty();
        let results = node.output.iter().map(String::as_str).filter(|name| !name.is_empty());
        if !standard || !OPERATORS.contains(&node.op_type.as_str()) {
            if class_of_message(node) == Class::Copy && known.contains(input(0)) {
                known.extend(results);
            } else if node.input.iter().all(|name| name.is_empty() || fixed.contains(name.as_str()))
                || matches!(class_of_message(node), Class::Shape | Class::Size)
            {
                fixed.extend(results);
            }
            return false;
        }
        // Input index of the sequence, and of the input that must be constant.
        let (sequence, constant) = match node.op_type.as_str() {
            "SequenceConstruct" | "SequenceEmpty" => (None, None),
            "SplitToSequence" => (None, Some(1)),
            "SequenceInsert" => (Some(0), Some(2)),
            _ => (Some(0), Some(1)),
        };
        let fits = sequence.is_none_or(|k| known.contains(input(k)))
            && constant.is_none_or(|k| input(k).is_empty() || fixed.contains(input(k)));
        let makes = !["ConcatFromSequence", "SequenceAt", "SequenceLength"].contains(&node.op_type.as_str());
        if makes && fits {
            known.extend(results.clone());
        } else if fits && node.op_type == "SequenceLength" {
            fixed.extend(results.clone());
        }
        !fits || makes && results.into_iter().any(|name| outputs.contains(name))
    });
    judged.collect()
}

/// Returns true if a graph or its subgraphs contain sequences.
fn has_sequences(graph: &Graph) -> bool {
    let inside = |node: &Node| Graph::subgraphs(node).any(|(_, subgraph)| has_sequences(subgraph));
    graph.nodes.iter().any(|node| uses_sequences(node) || inside(node))
}

/// Replaces the sequences of a graph and its subgraphs by their tensors. All other nodes have the newest version.
/// Returns an error for each sequence that cannot be replaced. Nodes that use it are unchanged; no later check has a
/// better error for them.
pub(crate) fn replace_sequences(graph: &mut Graph, version: i64) -> Vec<Error> {
    if !has_sequences(graph) {
        return Vec::new();
    }
    let mut writer = SequenceRewriter { version, errors: Vec::new(), depth: 0 };
    writer.rewrite_graph(graph, Sequences::default());
    writer.errors
}

/// Returns a flag for each node of a graph: true if an output needs the node.
fn needed_nodes(graph: &Graph) -> Vec<bool> {
    let mut values: FxHashSet<ValueId> = graph.outputs.iter().copied().collect();
    let mut needed = vec![false; graph.nodes.len()];
    for (index, node) in graph.nodes.iter().enumerate().rev() {
        if node.present_outputs().any(|id| values.contains(&id)) {
            needed[index] = true;
            values.extend(node.present_inputs());
        }
    }
    needed
}

/// Tensors of each sequence; `None` if they are unknown, which was reported.
type Sequences = FxHashMap<ValueId, Option<Vec<ValueId>>>;

struct SequenceRewriter {
    version: i64,
    errors: Vec<Error>,
    /// Nesting depth of the current subgraph.
    depth: usize,
}

/// Returns the integers of a constant, and true if it is a vector.
fn constant_ints(
    graph: &Graph,
    node: &Node,
    k: usize,
    label: &str,
) -> Result<Option<(Vec<i64>, bool)>, OpError> {
    let Some(id) = node.inputs.get(k).copied().flatten() else { return Ok(None) };
    let values =
        graph.value(id).content().and_then(|tensor| Some((tensor.to_i64()?, !tensor.dims().is_empty())));
    values.map(Some).ok_or_else(|| {
        let name = graph.name_of(id);
        OpError::unsupported(format!("{label}, {name:?}, is not constant; {LENGTH_MESSAGE}"))
    })
}

/// Returns a constant position in a sequence of `len` tensors, which must be below `position_count`: `len`, or one more for an
/// insertion.
fn constant_position(
    graph: &Graph,
    node: &Node,
    k: usize,
    len: usize,
    position_count: usize,
) -> Result<Option<usize>, OpError> {
    let Some((values, _)) = constant_ints(graph, node, k, "its position")? else { return Ok(None) };
    let &[at] = values.as_slice() else {
        return Err(OpError::invalid(format!("its position has {} elements, expected one", values.len())));
    };
    let from_front = if at < 0 { at.saturating_add(len as i64) } else { at };
    let position = usize::try_from(from_front).ok().filter(|&at| at < position_count);
    let message =
        || OpError::invalid(format!("position {at} is out of range for a sequence of {len} tensors"));
    position.map(Some).ok_or_else(message)
}

impl SequenceRewriter {
    /// Rewrites a graph; `sequences` contains its captured sequences.
    fn rewrite_graph(&mut self, graph: &mut Graph, mut sequences: Sequences) {
        let needed = needed_nodes(graph);
        let mut dropped: FxHashSet<ValueId> = FxHashSet::default();
        for (node, needed) in std::mem::take(&mut graph.nodes).into_iter().zip(needed) {
            // An unused node may use any sequence.
            if !needed && (uses_sequences(&node) || node.present_inputs().any(|id| dropped.contains(&id))) {
                dropped.extend(node.present_outputs());
                continue;
            }
            let done = graph.nodes.len();
            if let Err(source) = self.rewrite_node(graph, &mut sequences, &node) {
                self.errors.push(Error::at(graph, &node, source));
                graph.nodes.truncate(done);
                self.push_unchanged(graph, &mut sequences, &node);
            }
            // Errors of these nodes are reported when all types are inferred.
            for index in done..graph.nodes.len() {
                if !uses_sequences(&graph.nodes[index]) && infer_node(graph, index).is_ok() {
                    let _ = fold_node(graph, index);
                }
            }
        }
        for &id in &graph.outputs.clone() {
            // A sequence that a node of this graph produces was reported there.
            if let Some(Some(_)) = sequences.get(&id) {
                let name = graph.name_of(id);
                let message = format!("output {name:?} of a subgraph is a sequence; {OUTPUT_ADVICE}");
                self.errors.push(Error::Graph(message));
            }
        }
        clear_folded(graph);
    }

    /// Adds a node, or its replacement.
    fn rewrite_node(
        &mut self,
        graph: &mut Graph,
        sequences: &mut Sequences,
        node: &Node,
    ) -> Result<(), OpError> {
        if !uses_sequences(node) {
            return self.rewrite_other(graph, sequences, node);
        }
        if self.version < SEQUENCES_SINCE {
            let message = format!(
                "the model uses opset {}, but the operator needs opset {SEQUENCES_SINCE} or newer",
                self.version
            );
            return Err(OpError::Invalid(message));
        }
        let tensors = |k: usize| -> Result<Option<&Vec<ValueId>>, OpError> {
            let id = node.inputs.get(k).copied().flatten();
            let id = id.ok_or_else(|| OpError::invalid(format!("input {k} is missing")))?;
            match sequences.get(&id) {
                Some(known) => Ok(known.as_ref()),
                None => {
                    let (name, ty) = (graph.name_of(id), &graph.value(id).ty);
                    Err(match ty {
                        ValueType::Tensor(..) => {
                            OpError::invalid(format!("input {k}, {name:?}, is {ty}, expected a sequence"))
                        }
                        _ => OpError::unsupported(format!(
                            "the length of the sequence {name:?} is not known before the model runs; \
                             {LENGTH_MESSAGE}"
                        )),
                    })
                }
            }
        };
        if &*node.op == "SequenceMap" {
            return self.rewrite_map(graph, sequences, node);
        }
        let Some(output) = node.outputs.first().copied().flatten() else { return Ok(()) };
        let replacement = match &*node.op {
            "SequenceEmpty" => Some(Vec::new()),
            "SequenceConstruct" => Some(node.present_inputs().collect()),
            "SplitToSequence" => Some(split_tensor(graph, node)?),
            "SequenceInsert" => {
                let tensor = node.inputs.get(1).copied().flatten();
                let tensor = tensor.ok_or_else(|| OpError::invalid("input 1 is missing"))?;
                let Some(known) = tensors(0)? else {
                    self.push_unchanged(graph, sequences, node);
                    return Ok(());
                };
                let mut known = known.clone();
                let at =
                    constant_position(graph, node, 2, known.len(), known.len() + 1)?.unwrap_or(known.len());
                known.insert(at, tensor);
                Some(known)
            }
            "SequenceErase" => {
                let Some(known) = tensors(0)? else {
                    self.push_unchanged(graph, sequences, node);
                    return Ok(());
                };
                let mut known = known.clone();
                match constant_position(graph, node, 1, known.len(), known.len())? {
                    Some(at) => drop(known.remove(at)),
                    None if known.pop().is_some() => {}
                    None => return Err(OpError::invalid("the sequence is empty; nothing can be erased")),
                }
                Some(known)
            }
            "SequenceAt" => {
                let Some(known) = tensors(0)? else {
                    self.push_unchanged(graph, sequences, node);
                    return Ok(());
                };
                let at = constant_position(graph, node, 1, known.len(), known.len())?;
                let at = at.ok_or_else(|| OpError::invalid("input 1 is missing"))?;
                add_replacement(graph, node, "Identity", &[known[at]], Attrs::new(), &[output]);
                None
            }
            "SequenceLength" => {
                let Some(known) = tensors(0)? else {
                    self.push_unchanged(graph, sequences, node);
                    return Ok(());
                };
                let length = Tensor::i64(&[], &[known.len() as i64]);
                add_replacement(graph, node, "Constant", &[], Attrs::new().with("value", length), &[output]);
                None
            }
            _ => {
                let Some(known) = tensors(0)? else {
                    self.push_unchanged(graph, sequences, node);
                    return Ok(());
                };
                let known = known.clone();
                concat_tensors(graph, node, &known, output)?;
                None
            }
        };
        if let Some(tensors_of_result) = replacement {
            if tensors_of_result.len() > MAX_TENSORS {
                let message = format!(
                    "its sequence has {} tensors, at most {MAX_TENSORS} are supported",
                    tensors_of_result.len()
                );
                return Err(OpError::unsupported(message));
            }
            check_not_output(graph, output)?;
            sequences.insert(output, Some(tensors_of_result));
        }
        Ok(())
    }

    /// Adds the body of a `SequenceMap` for each tensor of its sequences, as a branch that is always taken.
    fn rewrite_map(
        &mut self,
        graph: &mut Graph,
        sequences: &mut Sequences,
        node: &Node,
    ) -> Result<(), OpError> {
        let input_count = node.inputs.len() - node.captures;
        let mut body =
            node.attrs.graph("body").and_then(|body_graph| Attrs::required("body", body_graph))?.clone();
        // The tensors of a sequence differ; declared types are valid for at most one of them.
        let formal_inputs = body.inputs[..body.inputs.len() - node.captures].to_vec();
        let produced: Vec<ValueId> = body.nodes.iter().flat_map(Node::present_outputs).collect();
        for id in formal_inputs.into_iter().chain(produced) {
            body.value_mut(id).ty = ValueType::Unknown;
        }
        let formal = body.inputs.len() - node.captures;
        if formal != input_count {
            return Err(OpError::invalid(format!(
                "it has {input_count} inputs, but its body takes {formal}"
            )));
        }
        let mut lists: Vec<Option<Vec<ValueId>>> = Vec::with_capacity(input_count);
        for id in &node.inputs[..input_count] {
            let known = id.map(|id| (sequences.get(&id), &graph.value(id).ty, graph.name_of(id)));
            lists.push(match known {
                Some((Some(None), ..)) => {
                    self.push_unchanged(graph, sequences, node);
                    return Ok(());
                }
                Some((Some(Some(tensors)), ..)) => Some(tensors.clone()),
                Some((None, ValueType::Sequence(_), name)) => {
                    return Err(OpError::unsupported(format!(
                        "the length of the sequence {name:?} is not known before the model runs; {LENGTH_MESSAGE}"
                    )));
                }
                _ => None,
            });
        }
        let Some(Some(leader)) = lists.first() else {
            return Err(OpError::invalid("input 0 must be a sequence"));
        };
        let count = leader.len();
        if let Some(k) = lists.iter().position(|list| list.as_ref().is_some_and(|list| list.len() != count)) {
            let actual_len = lists[k].as_ref().map_or(0, Vec::len);
            return Err(OpError::invalid(format!(
                "sequence {k} has {actual_len} tensors, but the first one has {count}"
            )));
        }
        if body.outputs.len() < node.outputs.len() {
            return Err(OpError::invalid(format!(
                "it has {} outputs, but its body has {}",
                node.outputs.len(),
                body.outputs.len()
            )));
        }
        for output in node.present_outputs() {
            check_not_output(graph, output)?;
        }
        let mut results: Vec<Vec<ValueId>> = vec![Vec::with_capacity(count); node.outputs.len()];
        for at in 0..count {
            let always = graph.add_constant("always", Tensor::filled(DType::Bool, &[], 1.0));
            let inputs_with_lists = node.inputs[..input_count].iter().zip(&lists);
            let arguments =
                inputs_with_lists.map(|(&id, list)| list.as_ref().map(|tensors| tensors[at]).or(id));
            let captured = node.inputs[input_count..].iter().copied();
            let ports: Vec<Option<ValueId>> =
                std::iter::once(Some(always)).chain(arguments).chain(captured).collect();
            let attrs = Attrs::new().with("then_branch", body.clone()).with("else_branch", body.clone());
            let mut outputs = Vec::with_capacity(results.len());
            for (of_all, output) in results.iter_mut().zip(&node.outputs) {
                let name = output.map_or("mapped", |id| graph.name_of(id));
                let id = graph.add_value(&format!("{name}[{at}]"), ValueType::Unknown);
                of_all.push(id);
                outputs.push(Some(id));
            }
            let mut branch = Node::new("", "If", &ports, &outputs, attrs);
            branch.captures = ports.len() - 1;
            branch.name = node.name.clone();
            self.rewrite_other(graph, sequences, &branch)?;
        }
        for (output, tensors) in node.outputs.iter().zip(results) {
            if let Some(output) = *output {
                sequences.insert(output, Some(tensors));
            }
        }
        Ok(())
    }

    /// Adds an unchanged node that uses a reported sequence.
    fn push_unchanged(&mut self, graph: &mut Graph, sequences: &mut Sequences, node: &Node) {
        sequences.extend(node.present_outputs().map(|id| (id, None)));
        graph.nodes.push(node.clone());
    }

    /// Adds a node that is not an operator on sequences.
    fn rewrite_other(
        &mut self,
        graph: &mut Graph,
        sequences: &mut Sequences,
        node: &Node,
    ) -> Result<(), OpError> {
        let input_count = node.inputs.len() - node.captures;
        if class_of(node) == Class::Copy
            && let (Some(Some(from)), Some(Some(to))) = (node.inputs.first(), node.outputs.first())
            && let Some(known) = sequences.get(from).cloned()
        {
            check_not_output(graph, *to)?;
            sequences.insert(*to, known);
            return Ok(());
        }
        for (k, id) in node.inputs[..input_count].iter().enumerate() {
            let Some(id) = id else { continue };
            match sequences.get(id) {
                Some(None) => {
                    self.push_unchanged(graph, sequences, node);
                    return Ok(());
                }
                Some(Some(_)) => {
                    let name = graph.name_of(*id);
                    return Err(OpError::unsupported(format!(
                        "input {k}, {name:?}, is a sequence, which it does not accept; pass the tensors one by one"
                    )));
                }
                None => {}
            }
        }
        let mut node = node.clone();
        let inside = node.captures > 0
            && node.inputs[input_count..].iter().flatten().any(|id| sequences.contains_key(id));
        if inside || Graph::subgraphs(&node).any(|(_, subgraph)| has_sequences(subgraph)) {
            let captured = expand_captures(graph, sequences, &mut node);
            self.rewrite_subgraphs(graph, &mut node, &captured);
        }
        graph.nodes.push(node);
        Ok(())
    }

    /// Rewrites the subgraphs of a node. `captured` contains the captured sequences of each subgraph.
    fn rewrite_subgraphs(
        &mut self,
        graph: &mut Graph,
        node: &mut Node,
        captured: &FxHashMap<String, Sequences>,
    ) {
        let names: Vec<String> = Graph::subgraphs(node).map(|(name, _)| name.to_owned()).collect();
        let repetition = match build(graph, node).map(|op| op.placement()) {
            Ok(Placement::Repeat(repetition)) => Some(repetition),
            _ => None,
        };
        let original = node.clone();
        // The carried values of a Loop get the types of their initial values, if these are the types in every
        // iteration. Otherwise they get types that cover all iterations, or only element types.
        let mut carried =
            repetition.as_ref().map(|r| initial_carried_types(graph, node, r)).unwrap_or_default();
        let changes = repetition.as_ref().filter(|r| r.conditional && r.carried > 0);
        let open = |carried: &[ValueType]| carried.iter().map(without_shape).collect::<Vec<ValueType>>();
        let rounds = if changes.is_some() && self.depth < MAX_REWRITE_DEPTH { MAX_ROUNDS } else { 1 };
        if changes.is_some() && rounds == 1 {
            carried = open(&carried);
        }
        for round in 1..=rounds {
            *node = original.clone();
            let before = self.errors.len();
            self.depth += 1;
            for name in &names {
                let Some(Attr::Graph(subgraph)) = node.attrs.0.get_mut(name) else { continue };
                let mut subgraph = std::mem::take(subgraph);
                set_input_types(graph, &original, &mut subgraph, repetition.as_ref(), &carried);
                self.rewrite_graph(&mut subgraph, captured.get(name).cloned().unwrap_or_default());
                node.attrs.0.insert(name.clone(), Attr::Graph(subgraph));
            }
            self.depth -= 1;
            let Some(r) = changes.filter(|_| round < rounds) else { return };
            graph.nodes.push(node.clone());
            let index = graph.nodes.len() - 1;
            let types = infer_node(graph, index).ok().and_then(|()| carried_types(&graph.nodes[index], r));
            graph.nodes.pop();
            match types {
                Some(found) if same_sizes(&found, &carried) => return,
                Some(found) if round + 1 < rounds => carried = found,
                _ => carried = open(&carried),
            }
            self.errors.truncate(before);
        }
    }
}

fn without_shape(ty: &ValueType) -> ValueType {
    match ty {
        ValueType::Tensor(dtype, _) => ValueType::Tensor(*dtype, None),
        other => other.clone(),
    }
}

/// Returns true if the known sizes of both sides are equal.
fn same_sizes(a: &[ValueType], b: &[ValueType]) -> bool {
    let sizes = |ty: &ValueType| {
        ty.shape().map(|shape| shape.iter().map(ortrain_graph::Dim::known).collect::<Vec<_>>())
    };
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| sizes(a) == sizes(b))
}

/// Returns the types of the initial carried values of a node.
fn initial_carried_types(graph: &Graph, node: &Node, r: &Repetition) -> Vec<ValueType> {
    let of =
        |j: usize| Repetition::own_input(node, r.leading_inputs() + j).map(|id| graph.value(id).ty.clone());
    (0..r.carried).map(|j| of(j).unwrap_or_default()).collect()
}

/// Returns the types of a node's carried values, inferred for all iterations.
fn carried_types(node: &Node, r: &Repetition) -> Option<Vec<ValueType>> {
    let body = node.attrs.graph(r.body).ok()??;
    let ids = body.inputs.get(r.leading_inputs()..r.leading_inputs() + r.carried)?;
    Some(ids.iter().map(|&id| body.value(id).ty.clone()).collect())
}

/// Replaces captured sequences by their tensors, at a node and in its subgraphs. Returns the sequences of each
/// subgraph.
fn expand_captures(graph: &Graph, sequences: &Sequences, node: &mut Node) -> FxHashMap<String, Sequences> {
    let input_count = node.inputs.len() - node.captures;
    let outer: Vec<Option<ValueId>> = node.inputs[input_count..].to_vec();
    let known = |id: &Option<ValueId>| id.and_then(|id| sequences.get(&id));
    let mut inputs: Vec<Option<ValueId>> = node.inputs[..input_count].to_vec();
    for id in &outer {
        match known(id) {
            Some(Some(tensors)) => inputs.extend(tensors.iter().copied().map(Some)),
            _ => inputs.push(*id),
        }
    }
    let mut sequences_by_name = FxHashMap::default();
    for (name, attr) in node.attrs.0.iter_mut() {
        let Attr::Graph(subgraph) = attr else { continue };
        let mut captured_sequences = Sequences::default();
        let Some(formal) = subgraph.inputs.len().checked_sub(outer.len()) else { continue };
        let inner = subgraph.inputs.split_off(formal);
        for (inner, id) in inner.into_iter().zip(&outer) {
            match known(id) {
                Some(Some(tensors)) => {
                    let hint = subgraph.name_of(inner).to_owned();
                    let add = |(k, &tensor): (usize, &ValueId)| {
                        subgraph.add_value(&format!("{hint}_{k}"), graph.value(tensor).ty.clone())
                    };
                    let added: Vec<ValueId> = tensors.iter().enumerate().map(add).collect();
                    subgraph.inputs.extend(&added);
                    captured_sequences.insert(inner, Some(added));
                }
                Some(None) => {
                    subgraph.inputs.push(inner);
                    captured_sequences.insert(inner, None);
                }
                None => subgraph.inputs.push(inner),
            }
        }
        sequences_by_name.insert(name.clone(), captured_sequences);
    }
    node.captures = inputs.len() - input_count;
    node.inputs = inputs.into_iter().collect();
    sequences_by_name
}

/// Sets the types of a subgraph's inputs from the corresponding outer values, if known.
fn set_input_types(
    graph: &Graph,
    node: &Node,
    subgraph: &mut Graph,
    repetition: Option<&Repetition>,
    carried: &[ValueType],
) {
    let give = |subgraph: &mut Graph, id: ValueId, ty: ValueType| {
        if let Ok(ty) = merge_advised(&subgraph.value(id).ty, ty) {
            subgraph.value_mut(id).ty = ty;
        }
    };
    let Some(formal) = subgraph.inputs.len().checked_sub(node.captures) else { return };
    let input_count = node.inputs.len() - node.captures;
    for (k, outer) in (formal..).zip(&node.inputs[input_count..]) {
        let (Some(outer), id) = (outer, subgraph.inputs[k]) else { continue };
        let value = graph.value(*outer);
        give(subgraph, id, value.ty.clone());
        subgraph.value_mut(id).constant = value.content().cloned();
        subgraph.value_mut(id).sizes = value.sizes.clone();
    }
    let Some(r) = repetition.filter(|r| r.formal_inputs() == formal) else { return };
    for (j, ty) in carried.iter().enumerate() {
        // A declared type may not hold in later iterations.
        let id = subgraph.inputs[r.leading_inputs() + j];
        subgraph.value_mut(id).ty = without_shape(&subgraph.value(id).ty);
        give(subgraph, id, ty.clone());
    }
    for (s, along) in r.scanned.iter().enumerate() {
        let k = r.leading_inputs() + r.carried + s;
        let Some(outer) = Repetition::own_input(node, k) else { continue };
        if let ValueType::Tensor(dtype, shape) = &graph.value(outer).ty {
            let rest = shape.as_ref().and_then(|shape| {
                let axis = normalize_axis(along.axis, shape.rank()).ok()?;
                let mut rest = shape.clone();
                rest.0.remove(axis);
                Some(rest)
            });
            give(subgraph, subgraph.inputs[k], ValueType::Tensor(*dtype, rest));
        }
    }
}

/// Adds a node in place of another one, with the same name.
fn add_replacement(
    graph: &mut Graph,
    old: &Node,
    op: &str,
    inputs: &[ValueId],
    attrs: Attrs,
    outputs: &[ValueId],
) {
    let ports = |ids: &[ValueId]| ids.iter().copied().map(Some).collect::<Vec<Option<ValueId>>>();
    let mut node = Node::new("", op, &ports(inputs), &ports(outputs), attrs);
    node.name = old.name.clone();
    graph.nodes.push(node);
}

/// Adds a constant vector, named after a node's output.
fn add_constant_vector(graph: &mut Graph, output: ValueId, label: &str, values: &[i64]) -> ValueId {
    let name = format!("{}_{label}", graph.name_of(output));
    graph.add_constant(&name, Tensor::i64(&[values.len()], values))
}

/// Splits a tensor; returns the parts.
fn split_tensor(graph: &mut Graph, node: &Node) -> Result<Vec<ValueId>, OpError> {
    let input = node.inputs.first().copied().flatten();
    let x = input.ok_or_else(|| OpError::invalid("input 0 is missing"))?;
    let output = node.outputs.first().copied().flatten();
    let output = output.ok_or_else(|| OpError::invalid("it has no outputs"))?;
    let axis = node.attrs.int("axis")?.unwrap_or(0);
    let ty = graph.value(x).ty.clone();
    let size = match ty.shape() {
        Some(shape) => shape[normalize_axis(axis, shape.rank())?].known(),
        None => None,
    };
    let size = size.ok_or_else(|| {
        let name = graph.name_of(x);
        OpError::unsupported(format!(
            "the number of parts of {name:?} depends on the size of axis {axis}, which is not known before the \
             model runs; declare the size, or make the sizes of the parts a constant vector"
        ))
    });
    let check_count = |count: usize| match count {
        0..=MAX_TENSORS => Ok(count),
        _ => Err(OpError::unsupported(format!(
            "its sequence has {count} tensors, at most {MAX_TENSORS} are supported"
        ))),
    };
    let lengths = constant_ints(graph, node, 1, "the sizes of its parts")?;
    // onnxruntime also removes the axis of parts of size one if a scalar gives this size.
    let single = lengths.as_ref().is_none_or(|(lengths, vector)| !vector && *lengths == [1]);
    let lengths: Vec<i64> = match lengths {
        None => vec![1; check_count(size?)?],
        Some((lengths, true)) => lengths,
        Some((lengths, false)) => {
            let each =
                lengths.first().copied().and_then(|each| usize::try_from(each).ok()).filter(|&each| each > 0);
            let each = each.ok_or_else(|| {
                OpError::invalid(format!("the size of its parts must be positive, got {lengths:?}"))
            })?;
            let size = size?;
            let part = |k: usize| each.min(size - k * each) as i64;
            (0..check_count(size.div_ceil(each))?).map(part).collect()
        }
    };
    if lengths.is_empty() {
        return Ok(Vec::new());
    }
    let name = graph.name_of(output).to_owned();
    let part_type = without_shape(&ty);
    let parts: Vec<ValueId> =
        (0..lengths.len()).map(|k| graph.add_value(&format!("{name}_{k}"), part_type.clone())).collect();
    let sizes = add_constant_vector(graph, output, "sizes", &lengths);
    add_replacement(graph, node, "Split", &[x, sizes], Attrs::new().with("axis", axis), &parts);
    if !single || node.attrs.int("keepdims")? != Some(0) {
        return Ok(parts);
    }
    let axes = add_constant_vector(graph, output, "axes", &[axis]);
    let squeezed = parts.into_iter().map(|part| {
        let name = format!("{}_squeezed", graph.name_of(part));
        let id = graph.add_value(&name, part_type.clone());
        let ports = [Some(part), Some(axes)];
        graph.nodes.push(Node::new("", "Squeeze", &ports, &[Some(id)], Attrs::new()));
        id
    });
    Ok(squeezed.collect())
}

/// Concatenates the tensors of a sequence.
fn concat_tensors(
    graph: &mut Graph,
    node: &Node,
    tensors: &[ValueId],
    output: ValueId,
) -> Result<(), OpError> {
    let axis = Attrs::required("axis", node.attrs.int("axis")?)?;
    if tensors.is_empty() {
        return Err(OpError::invalid("the sequence is empty, expected at least one tensor"));
    }
    let attrs = Attrs::new().with("axis", axis);
    if node.attrs.int("new_axis")?.unwrap_or(0) == 0 {
        add_replacement(graph, node, "Concat", tensors, attrs, &[output]);
        return Ok(());
    }
    let axes = add_constant_vector(graph, output, "axes", &[axis]);
    let mut parts = Vec::with_capacity(tensors.len());
    for &tensor in tensors {
        let name = format!("{}_unsqueezed", graph.name_of(tensor));
        let ty = graph.value(tensor).ty.dtype().map(|dtype: DType| ValueType::Tensor(dtype, None));
        let id = graph.add_value(&name, ty.unwrap_or_default());
        graph.nodes.push(Node::new("", "Unsqueeze", &[Some(tensor), Some(axes)], &[Some(id)], Attrs::new()));
        parts.push(id);
    }
    add_replacement(graph, node, "Concat", &parts, attrs, &[output]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::infer::infer;
    use crate::passes::versions::{upgrade, upgrade_known};
    use crate::testing::{add as add_node, assert_close, check_gradients, f64s, generic_tensor, graph, run};

    /// float64 sines may differ in their last bits.
    const ROUNDING: f64 = 1e-15;

    /// Adds a node with one output, which is not an output of the graph.
    fn add_hidden_node(graph: &mut Graph, op: &str, name: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        let ports: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        let value = add_node(graph, ("", op), name, &ports, 1, attrs)[0];
        graph.outputs.pop();
        value
    }

    fn sequence_at(graph: &mut Graph, name: &str, sequence: ValueId, position: i64) -> ValueId {
        let position = graph.add_constant(&format!("{name}_position"), Tensor::i64(&[], &[position]));
        add_hidden_node(graph, "SequenceAt", name, &[sequence, position], Attrs::new())
    }

    fn prepare(graph: &mut Graph, opset: i64) {
        graph.opsets.insert(String::new(), opset);
        upgrade(graph).expect("it is written out");
        assert!(!has_sequences(graph), "{graph}");
        infer(graph).expect("the graph is valid");
    }

    fn error_message(graph: &mut Graph) -> String {
        graph.opsets.insert(String::new(), 17);
        let known = upgrade_known(&mut graph.clone());
        let error = upgrade(graph).expect_err("refused").to_string();
        assert_eq!(known[0].to_string(), error, "the collected errors are the same");
        assert_eq!(known.len(), 1, "{known:?}");
        error
    }

    /// Splits ten rows by `lengths` along an axis and reorders the parts. Returns the graph and the input.
    fn reordered_parts(axis: i64, lengths: Option<Tensor>, order: &[i64]) -> (Graph, Tensor) {
        let x = generic_tensor(&[10, 3], 1);
        let (mut graph, ids) = graph(&[&x]);
        let mut inputs = ids.clone();
        inputs.extend(lengths.map(|lengths| graph.add_constant("lengths", lengths)));
        let parts =
            add_hidden_node(&mut graph, "SplitToSequence", "parts", &inputs, Attrs::new().with("axis", axis));
        let read: Vec<ValueId> = order
            .iter()
            .enumerate()
            .map(|(k, &from)| sequence_at(&mut graph, &format!("part{k}"), parts, from))
            .collect();
        let again = add_hidden_node(&mut graph, "SequenceConstruct", "again", &read, Attrs::new());
        let y =
            add_hidden_node(&mut graph, "ConcatFromSequence", "y", &[again], Attrs::new().with("axis", axis));
        graph.outputs = vec![y];
        (graph, x)
    }

    fn rows(x: &Tensor, rows: &[usize]) -> Tensor {
        let values = x.to_f64();
        let picked: Vec<f64> = rows.iter().flat_map(|&row| values[row * 3..][..3].to_vec()).collect();
        f64s(&[rows.len(), 3], &picked)
    }

    #[test]
    fn parts_of_constant_sizes() {
        let lengths = |values: &[i64]| Some(Tensor::i64(&[values.len()], values));
        let each = |size: i64| Some(Tensor::i64(&[], &[size]));
        let cases: [(Option<Tensor>, &[i64], &[usize]); 6] = [
            (lengths(&[2, 5, 3]), &[2, 0], &[7, 8, 9, 0, 1]),
            (lengths(&[10]), &[0, 0], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
            // The last part is the remainder.
            (each(4), &[2, -2], &[8, 9, 4, 5, 6, 7]),
            (each(5), &[1], &[5, 6, 7, 8, 9]),
            (each(20), &[0], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
            (None, &[-1, 3, -10], &[9, 3, 0]),
        ];
        for (lengths, order, expected) in cases {
            for opset in [11, 13, 17, 24] {
                for axis in [0, -2] {
                    let (mut graph, x) = reordered_parts(axis, lengths.clone(), order);
                    prepare(&mut graph, opset);
                    let got = run(&graph, std::slice::from_ref(&x)).expect("the graph runs");
                    assert_eq!(got[0], rows(&x, expected), "{lengths:?}");
                    check_gradients(&graph, &[x], &[0], &[0]);
                }
            }
        }
    }

    #[test]
    fn single_rows_lose_their_axis_without_keepdims() {
        let x = generic_tensor(&[2, 3], 1);
        for (axis, new_axis, dims) in [(0, 1, &[3, 2][..]), (1, 0, &[6])] {
            let (mut graph, ids) = graph(&[&x]);
            let attrs = Attrs::new().with("axis", axis).with("keepdims", 0i64);
            let parts = add_hidden_node(&mut graph, "SplitToSequence", "parts", &ids, attrs);
            let attrs =
                Attrs::new().with("axis", if new_axis == 1 { -1i64 } else { 0 }).with("new_axis", new_axis);
            let y = add_hidden_node(&mut graph, "ConcatFromSequence", "y", &[parts], attrs);
            graph.outputs = vec![y];
            prepare(&mut graph, 17);
            let got = run(&graph, std::slice::from_ref(&x)).expect("the graph runs");
            // In both cases the columns follow each other.
            let values = x.to_f64();
            let transposed: Vec<f64> = (0..6).map(|k| values[k % 2 * 3 + k / 2]).collect();
            assert_eq!(got[0], f64s(dims, &transposed));
            check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
        }
    }

    #[test]
    fn lists_that_are_built_step_by_step() {
        // [x] -> [x, y] -> [y, x, y] -> [y, y]: the sum of position 1 and the length.
        let (x, y) = (generic_tensor(&[2], 1), generic_tensor(&[2], 2));
        let (mut graph, ids) = graph(&[&x, &y]);
        let empty = add_hidden_node(&mut graph, "SequenceEmpty", "empty", &[], Attrs::new());
        let first = add_hidden_node(&mut graph, "SequenceInsert", "first", &[empty, ids[0]], Attrs::new());
        let second = add_hidden_node(&mut graph, "SequenceInsert", "second", &[first, ids[1]], Attrs::new());
        let begin = graph.add_constant("begin", Tensor::i64(&[], &[-2]));
        let third =
            add_hidden_node(&mut graph, "SequenceInsert", "third", &[second, ids[1], begin], Attrs::new());
        let passed = add_hidden_node(&mut graph, "Identity", "passed", &[third], Attrs::new());
        let middle = graph.add_constant("middle", Tensor::i64(&[], &[1]));
        let fourth = add_hidden_node(&mut graph, "SequenceErase", "fourth", &[passed, middle], Attrs::new());
        let length = add_hidden_node(&mut graph, "SequenceLength", "length", &[fourth], Attrs::new());
        let to = Attrs::new().with("to", i64::from(DType::F64.to_onnx()));
        let number = add_hidden_node(&mut graph, "Cast", "number", &[length], to);
        let read = sequence_at(&mut graph, "read", fourth, 1);
        let moved = sequence_at(&mut graph, "moved", third, 1);
        let sum = add_hidden_node(&mut graph, "Mul", "sum", &[read, moved], Attrs::new());
        let result = add_hidden_node(&mut graph, "Mul", "result", &[sum, number], Attrs::new());
        graph.outputs = vec![result];
        prepare(&mut graph, 17);
        let inputs = [x.clone(), y.clone()];
        let expected: Vec<f64> = x.to_f64().iter().zip(y.to_f64()).map(|(x, y)| 2.0 * x * y).collect();
        assert_eq!(run(&graph, &inputs).expect("the graph runs")[0], f64s(&[2], &expected));
        check_gradients(&graph, &inputs, &[0, 1], &[0]);
    }

    /// Builds a subgraph; `build` returns the outputs.
    fn build_subgraph(inputs: &[&str], build: impl FnOnce(&mut Graph, &[ValueId]) -> Vec<ValueId>) -> Graph {
        let mut graph = Graph::new("inner");
        let ids: Vec<ValueId> = inputs.iter().map(|name| graph.add_value(name, ValueType::Unknown)).collect();
        graph.inputs.clone_from(&ids);
        graph.outputs = build(&mut graph, &ids);
        graph
    }

    #[test]
    fn branches_read_outer_and_own_sequences() {
        let x = generic_tensor(&[6], 1);
        let flag = |value: f64| Tensor::filled(DType::Bool, &[], value);
        let (mut graph, ids) = graph(&[&flag(1.0), &x]);
        let each = graph.add_constant("each", Tensor::i64(&[], &[2]));
        let parts = add_hidden_node(&mut graph, "SplitToSequence", "parts", &[ids[1], each], Attrs::new());
        // Also captures x, which must keep its position among the captured values.
        let then_branch = build_subgraph(&["yes_parts", "yes_x"], |g, c| {
            let part = sequence_at(g, "part", c[0], -1);
            let sizes = g.add_constant("sizes", Tensor::i64(&[2], &[4, 2]));
            let split = add_hidden_node(g, "SplitToSequence", "own", &[c[1], sizes], Attrs::new());
            let last = sequence_at(g, "last", split, 1);
            vec![add_hidden_node(g, "Mul", "product", &[part, last], Attrs::new())]
        });
        let no = build_subgraph(&["no_parts", "no_x"], |g, c| {
            let part = sequence_at(g, "part", c[0], 0);
            vec![add_hidden_node(g, "Sin", "sine", &[part], Attrs::new())]
        });
        let attrs = Attrs::new().with("then_branch", then_branch).with("else_branch", no);
        let ports = [Some(ids[0]), Some(parts), Some(ids[1])];
        let y = add_node(&mut graph, ("", "If"), "y", &ports, 1, attrs)[0];
        graph.nodes.last_mut().expect("just added").captures = 2;
        graph.outputs = vec![y];
        prepare(&mut graph, 17);
        let values = x.to_f64();
        for (holds, expected) in
            [(1.0, [values[4] * values[4], values[5] * values[5]]), (0.0, [values[0].sin(), values[1].sin()])]
        {
            let inputs = [flag(holds), x.clone()];
            assert_close(&run(&graph, &inputs).expect("the graph runs")[0], &f64s(&[2], &expected), ROUNDING);
            check_gradients(&graph, &inputs, &[1], &[0]);
        }
    }

    /// Builds a Loop of three iterations that splits its carried value into parts of `each`. If `grow` is true, the
    /// value gets longer.
    fn loop_graph(x: &Tensor, grow: bool) -> Graph {
        let (mut graph, ids) = graph(&[x]);
        let count = graph.add_constant("count", Tensor::i64(&[], &[3]));
        let body = build_subgraph(&["i", "go", "v"], |g, c| {
            let each = g.add_constant("each", Tensor::i64(&[], &[2]));
            let parts = add_hidden_node(g, "SplitToSequence", "parts", &[c[2], each], Attrs::new());
            let (first, last) = (sequence_at(g, "first", parts, 0), sequence_at(g, "last", parts, -1));
            let swapped =
                add_hidden_node(g, "Concat", "turned", &[last, first], Attrs::new().with("axis", 0i64));
            let next = add_hidden_node(g, "Sin", "next", &[swapped], Attrs::new());
            let next = match grow {
                true => {
                    add_hidden_node(g, "Concat", "longer", &[next, next], Attrs::new().with("axis", 0i64))
                }
                false => next,
            };
            vec![add_hidden_node(g, "Identity", "on", &c[1..2], Attrs::new()), next]
        });
        let ports = [Some(count), None, Some(ids[0])];
        add_node(&mut graph, ("", "Loop"), "y", &ports, 1, Attrs::new().with("body", body));
        graph
    }

    #[test]
    fn bodies_split_carried_values_of_constant_shape() {
        let x = generic_tensor(&[3], 1);
        let mut graph = loop_graph(&x, false);
        prepare(&mut graph, 17);
        let mut expected = x.to_f64();
        for _ in 0..3 {
            expected = [expected[2], expected[0], expected[1]].iter().map(|x| x.sin()).collect();
        }
        let got = run(&graph, std::slice::from_ref(&x)).expect("the graph runs");
        assert_close(&got[0], &f64s(&[3], &expected), ROUNDING);
        check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
        // Two parts in the first iteration, more later: no number of parts is valid for all.
        let message = error_message(&mut loop_graph(&x, true));
        assert!(message.contains("node \"parts\" (SplitToSequence)"), "{message}");
        assert!(message.contains("the size of axis 0, which is not known"), "{message}");
    }

    #[test]
    fn rejects_unknown_lengths_with_the_node() {
        let x = generic_tensor(&[6], 1);
        let start = |lengths: Tensor| {
            let (mut graph, ids) = graph(&[&x, &Tensor::i64(&[], &[1]), &Tensor::i64(&[2], &[4, 2])]);
            let lengths = graph.add_constant("lengths", lengths);
            let parts =
                add_hidden_node(&mut graph, "SplitToSequence", "parts", &[ids[0], lengths], Attrs::new());
            (graph, ids, parts)
        };
        let two = || Tensor::i64(&[2], &[4, 2]);
        let (mut graph, ids, parts) = start(two());
        let y = add_hidden_node(&mut graph, "SequenceAt", "dynamic", &[parts, ids[1]], Attrs::new());
        graph.outputs = vec![y];
        assert_eq!(
            error_message(&mut graph),
            "node \"dynamic\" (SequenceAt) with inputs (parts: ?, x1: int64[]): its position, \"x1\", is not \
             constant; a sequence is supported only if its length and positions are known before the model runs"
        );
        let (mut graph, _, parts) = start(two());
        let y = sequence_at(&mut graph, "beyond", parts, 2);
        graph.outputs = vec![y];
        let message = error_message(&mut graph);
        assert!(message.ends_with("position 2 is out of range for a sequence of 2 tensors"), "{message}");

        let (mut graph, ids, _) = start(two());
        let parts =
            add_hidden_node(&mut graph, "SplitToSequence", "dynamic", &[ids[0], ids[2]], Attrs::new());
        let y = sequence_at(&mut graph, "first", parts, 0);
        graph.outputs = vec![y];
        let message = error_message(&mut graph);
        assert!(message.contains("the sizes of its parts, \"x2\", is not constant"), "{message}");

        let (mut graph, _, parts) = start(Tensor::i64(&[], &[0]));
        let y = sequence_at(&mut graph, "first", parts, 0);
        graph.outputs = vec![y];
        let message = error_message(&mut graph);
        assert!(message.ends_with("the size of its parts must be positive, got [0]"), "{message}");

        let (mut graph, _, parts) = start(two());
        graph.outputs = vec![parts];
        let message = error_message(&mut graph);
        assert!(
            message.ends_with(
                "its result \"parts\", a sequence, is an output; make each of its tensors an output"
            ),
            "{message}"
        );

        let (mut graph, _, parts) = start(two());
        let y = add_hidden_node(&mut graph, "Relu", "y", &[parts], Attrs::new());
        graph.outputs = vec![y];
        let message = error_message(&mut graph);
        assert!(message.contains("node \"y\" (Relu)"), "{message}");
        assert!(
            message.ends_with("is a sequence, which it does not accept; pass the tensors one by one"),
            "{message}"
        );
    }

    #[test]
    fn rejects_too_long_sequences_immediately() {
        let mut graph = Graph::new("long");
        let x = graph.add_value("x", ValueType::tensor(DType::F32, &[1 << 40]));
        graph.inputs.push(x);
        let parts = add_hidden_node(&mut graph, "SplitToSequence", "parts", &[x], Attrs::new());
        let y = sequence_at(&mut graph, "y", parts, 0);
        graph.outputs = vec![y];
        let message = error_message(&mut graph);
        assert!(
            message.ends_with("its sequence has 1099511627776 tensors, at most 16384 are supported"),
            "{message}"
        );
    }
}
