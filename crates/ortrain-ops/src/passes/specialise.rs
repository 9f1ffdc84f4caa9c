//! Specialisation: compiles a graph to a schedule for concrete shapes.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use ortrain_expr::{Precision, pause};
use ortrain_graph::{Attr, DType, Dim, Graph, Node, Shape, Tensor, Value, ValueId, ValueType};
use ortrain_program::{
    Branch, BranchSource, Branches, Count, PassLog, PlaneId, PlaneLocation, Program, ProgramBuilder, Repeat,
    ResultType, ScanAxis, Schedule, Segment, SegmentNode, SlotId, SlotSpec, Specialise, Specialised,
    StackedResult, Target, YieldSlots,
};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::lower::{Lower, POSITIONS, PlanePart, ValueBuffers};
use crate::op::{Op, Placement, Repetition, ValueRequirement};
use crate::passes::infer::infer_known;
use crate::passes::node::{
    LOWERING_PASSES, decompose_node, fold_node, forget_shapes, infer_node, infer_with_op,
};
use crate::passes::unroll::{
    MAX_UNROLLED_NODES, constant_condition, inline_branch, inline_run, remove_unused_nodes, subgraph_of,
    unroll,
};
use crate::passes::updates;
use crate::registry::build;
use crate::{Error, OpError};

/// Maximum number of cached specialisations; the least recently used one is dropped.
const MAX_CACHED_SCHEDULES: usize = 32;

/// Maximum number of values that are assumed for an input if shapes depend on them.
const MAX_ASSUMED_VALUES: usize = 1 << 16;

/// Maximum number of elements of a loop invariant that is passed to each iteration. Larger invariants get a plane,
/// which has a higher fixed cost.
const MAX_PASSED_ELEMENTS: usize = 16;

/// Binding of a graph input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Input of the user at every run.
    User,
    /// Tensor of the state, at this byte offset of a plane.
    Plane(PlaneId, usize),
    /// Sequence: complete planes of the state, one for each element type.
    Planes(Vec<PlanePart>),
    /// Flag that selects overwriting or accumulating gradients. It selects the gradient mode.
    ResetFlag,
}

/// Facts about a user input that a schedule depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct InputKey {
    dims: Vec<usize>,
    /// Content of the input, if it determines a shape.
    value: Option<Tensor>,
}

type Cached = (Vec<InputKey>, Arc<Specialised>);

/// Compiler and cache of schedules of one graph for different shapes.
#[derive(Debug)]
pub struct Specialiser {
    graph: Graph,
    roles: Vec<Role>,
    /// Positions of user inputs with values that determine a shape.
    shape_inputs: Mutex<FxHashSet<usize>>,
    cache: Mutex<VecDeque<Cached>>,
    settings: Settings,
}

/// Settings of a schedule besides its graph and its inputs.
#[derive(Clone, Debug)]
struct Settings {
    /// Maximum number of nodes of unrolled loops.
    unrolled_nodes: usize,
    /// Precision of inner products.
    precision: Precision,
    /// Target machine of the programs.
    target: Target,
    /// Log of the passes.
    log: Option<PassLog>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            unrolled_nodes: MAX_UNROLLED_NODES,
            precision: Precision::F32,
            target: Target::default(),
            log: None,
        }
    }
}

impl Specialiser {
    /// Creates a specialiser for a graph in the newest version, with a role for each of its inputs.
    ///
    /// # Panics
    /// Panics if the number of roles is not the number of inputs.
    #[must_use]
    pub fn new(mut graph: Graph, roles: Vec<Role>) -> Specialiser {
        assert_eq!(graph.inputs.len(), roles.len(), "each input has a role");
        let pairs = graph.inputs.iter().zip(&roles);
        let in_planes = pairs.filter(|(_, role)| matches!(role, Role::Plane(..))).map(|(&id, _)| id);
        let state: Vec<ValueId> = in_planes.collect();
        updates::move_updates_last(&mut graph, &state);
        fold_constants(&mut graph);
        Specialiser::from_prepared(graph, roles)
    }

    /// Creates a specialiser for a part of a graph that was prepared before.
    fn from_prepared(graph: Graph, roles: Vec<Role>) -> Specialiser {
        let (shape_inputs, cache) = (Mutex::default(), Mutex::default());
        Specialiser { graph, roles, shape_inputs, cache, settings: Settings::default() }
    }

    /// Returns a specialiser of the same graph, state and settings with other outputs.
    #[must_use]
    pub fn with_outputs(&self, outputs: Vec<ValueId>) -> Specialiser {
        let mut graph = self.graph.clone();
        graph.outputs = outputs;
        self.with_graph(graph)
    }

    /// Returns a specialiser of another graph with the same inputs, state and settings.
    #[must_use]
    pub fn with_graph(&self, graph: Graph) -> Specialiser {
        let mut other = Specialiser::from_prepared(graph, self.roles.clone());
        other.settings = self.settings.clone();
        other
    }

    /// Returns a specialiser with the subgraph of a node inlined, according to a run. `known` returns values of the
    /// run, such as the inputs and results of the node. Returns `None` if the node has no subgraph, or if the values do
    /// not determine the taken branch or the number of iterations.
    #[must_use]
    pub fn with_inlined_node(
        &self,
        node: usize,
        known: &dyn Fn(ValueId) -> Option<Tensor>,
    ) -> Option<Specialiser> {
        let mut graph = self.graph.clone();
        if !inline_run(&mut graph, node, known).ok()? {
            return None;
        }
        // Errors of inference are reported when the schedule is compiled.
        let _ = infer_known(&mut graph);
        Some(self.with_graph(graph))
    }

    /// Returns a specialiser with some user inputs bound to planes, by their positions among the user inputs and with
    /// these shapes. No node writes to them.
    #[must_use]
    pub fn with_planes<'d>(
        &self,
        planes: impl IntoIterator<Item = (usize, &'d [usize], PlaneId)>,
    ) -> Specialiser {
        let (mut graph, mut roles) = (self.graph.clone(), self.roles.clone());
        let user_inputs: Vec<usize> = (0..roles.len()).filter(|&k| roles[k] == Role::User).collect();
        for (at, dims, plane) in planes {
            let at = user_inputs[at];
            let value = graph.value_mut(graph.inputs[at]);
            if let Some(dtype) = value.ty.dtype() {
                value.ty = ValueType::tensor(dtype, dims);
            }
            roles[at] = Role::Plane(plane, 0);
        }
        let mut placed = Specialiser::from_prepared(graph, roles);
        placed.settings = self.settings.clone();
        placed
    }

    /// Sets the maximum total number of nodes of unrolled loops. Results do not depend on it.
    #[must_use]
    pub fn unrolled_nodes(mut self, nodes: usize) -> Specialiser {
        self.settings.unrolled_nodes = nodes;
        self
    }

    /// Sets the precision of inner products of `f32`, in matrix products and convolutions. Constants are folded in
    /// `f32` in any case.
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> Specialiser {
        self.settings.precision = precision;
        self
    }

    /// Sets the target machine; the default is a processor.
    #[must_use]
    pub fn target(mut self, target: Target) -> Specialiser {
        self.settings.target = target;
        self
    }

    /// Sets the log for passes of all programs that are compiled later.
    #[must_use]
    pub fn log(mut self, log: PassLog) -> Specialiser {
        self.settings.log = Some(log);
        self
    }

    /// Returns the graph.
    #[must_use]
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Returns the cached schedules, the most recently used one last.
    #[must_use]
    pub fn cached_schedules(&self) -> Vec<Arc<Specialised>> {
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.iter().map(|(_, schedule)| schedule.clone()).collect()
    }

    /// Returns the user inputs, in order.
    pub fn user_inputs(&self) -> impl Iterator<Item = ValueId> + '_ {
        let pairs = self.graph.inputs.iter().zip(&self.roles);
        pairs.filter(|(_, role)| **role == Role::User).map(|(&id, _)| id)
    }

    /// Returns the cached schedule for these shapes, without allocation. `value` returns the bytes of a user input with
    /// values that determine a shape.
    #[must_use]
    pub fn find_cached<'v>(
        &self,
        dims: &[&[usize]],
        value: &dyn Fn(usize) -> Cow<'v, [u8]>,
    ) -> Option<Arc<Specialised>> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |key: &[InputKey]| {
            key.len() == dims.len()
                && key.iter().zip(dims).enumerate().all(|(k, (known, dims))| {
                    known.dims == *dims
                        && known.value.as_ref().is_none_or(|tensor| tensor.data()[..] == *value(k))
                })
        };
        let position = cache.iter().position(|(key, _)| fits(key))?;
        // The most recently used schedule is last.
        if position + 1 != cache.len() {
            let entry = cache.remove(position)?;
            cache.push_back(entry);
        }
        cache.back().map(|(_, schedule)| schedule.clone())
    }

    /// Returns the schedule for these user inputs, from the cache or compiled now.
    ///
    /// # Errors
    /// Returns an error if a node does not accept the shapes, or cannot be run.
    pub fn schedule(&self, inputs: &[Tensor]) -> Result<Arc<Specialised>, Error> {
        let dims: Vec<&[usize]> = inputs.iter().map(Tensor::dims).collect();
        if let Some(schedule) = self.find_cached(&dims, &|k| Cow::Borrowed(inputs[k].data())) {
            return Ok(schedule);
        }
        self.compile_and_cache(&dims, &|k| Ok(inputs[k].clone()))
    }

    /// Compiles the schedule for user inputs of these shapes. `input` returns inputs with values that determine a
    /// shape.
    ///
    /// # Errors
    /// Returns the errors of [`Specialiser::schedule`].
    pub fn schedule_with(
        &self,
        dims: &[&[usize]],
        input: &dyn Fn(usize) -> Tensor,
    ) -> Result<Arc<Specialised>, Error> {
        self.compile_and_cache(dims, &|k| Ok(input(k)))
    }

    /// Returns the schedule for user inputs of these shapes, without their values: values that determine a shape are
    /// assumed to be zero.
    ///
    /// # Errors
    /// Returns the errors of [`Specialiser::schedule`], and an error if too many values would be assumed.
    pub fn schedule_of_shapes(&self, dims: &[&[usize]]) -> Result<Arc<Specialised>, Error> {
        if let Some(schedule) = self.find_cached(dims, &|_| Cow::default()) {
            return Ok(schedule);
        }
        self.compile_and_cache(dims, &|k| {
            let id = self.user_inputs().nth(k).expect("there is a shape for each input");
            let dtype = self.graph.value(id).ty.dtype().unwrap_or(DType::I64);
            let element_count = dims[k].iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
            let zeros = element_count
                .filter(|&count| count <= MAX_ASSUMED_VALUES)
                .map(|_| Tensor::zeros(dtype, dims[k].to_vec()));
            let message = || format!("the shapes depend on the values of input {:?}", self.graph.name_of(id));
            zeros.and_then(Result::ok).ok_or_else(|| Error::Graph(message()))
        })
    }

    /// Returns the positions of user inputs with values that determine shapes, in order. Only inputs of compiled
    /// schedules are known.
    #[must_use]
    pub fn shape_determining_inputs(&self) -> Vec<usize> {
        let known = self.shape_inputs.lock().unwrap_or_else(PoisonError::into_inner);
        let mut positions: Vec<usize> = known.iter().copied().collect();
        positions.sort_unstable();
        positions
    }

    fn compile_and_cache(
        &self,
        dims: &[&[usize]],
        input: &dyn Fn(usize) -> Result<Tensor, Error>,
    ) -> Result<Arc<Specialised>, Error> {
        let (key, schedule) = self.compile_with_settings(&self.settings, dims, input)?;
        let schedule = Arc::new(Specialised::new(schedule));
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.len() == MAX_CACHED_SCHEDULES {
            cache.pop_front();
        }
        cache.push_back((key, schedule.clone()));
        Ok(schedule)
    }

    /// Compiles a schedule without using the cache. The log records the passes.
    ///
    /// # Errors
    /// Returns the errors of [`Specialiser::schedule_with`].
    pub fn schedule_logged(
        &self,
        dims: &[&[usize]],
        input: &dyn Fn(usize) -> Tensor,
        log: PassLog,
    ) -> Result<Schedule, Error> {
        let settings = Settings { log: Some(log), ..self.settings.clone() };
        self.compile_with_settings(&settings, dims, &|k| Ok(input(k))).map(|(_, schedule)| schedule)
    }

    /// Compiles a schedule. Returns it with the shapes and values that it depends on.
    fn compile_with_settings(
        &self,
        settings: &Settings,
        dims: &[&[usize]],
        input: &dyn Fn(usize) -> Result<Tensor, Error>,
    ) -> Result<(Vec<InputKey>, Schedule), Error> {
        loop {
            let shape_inputs = self.shape_inputs.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let key: Vec<InputKey> = (dims.iter().enumerate())
                .map(|(k, dims)| {
                    let value = shape_inputs.contains(&k).then(|| input(k)).transpose()?;
                    Ok(InputKey { dims: dims.to_vec(), value })
                })
                .collect::<Result<_, Error>>()?;
            let known: Vec<Option<KnownInput<'_>>> = key
                .iter()
                .map(|key| Some(KnownInput { dims: &key.dims, value: key.value.as_ref() }))
                .collect();
            match compile(&self.graph, &self.roles, &known, settings)? {
                Compiled::Schedule(schedule) => return Ok((key, schedule)),
                Compiled::NeedsValues(more) => {
                    let mut known_inputs = self.shape_inputs.lock().unwrap_or_else(PoisonError::into_inner);
                    let before = known_inputs.len();
                    known_inputs.extend(more);
                    if known_inputs.len() == before {
                        return Err(Error::Graph("the shapes of the graph cannot be determined".into()));
                    }
                }
            }
        }
    }
}

/// Computes values that depend only on constants, once for all shapes. No other types are inferred. A failed
/// computation is reported when shapes are inferred, with the name of its node.
fn fold_constants(graph: &mut Graph) {
    for index in 0..graph.nodes.len() {
        let node = &graph.nodes[index];
        if !node.present_inputs().all(|id| graph.value(id).constant.is_some()) {
            continue;
        }
        let before: Vec<(ValueId, Value)> =
            node.present_outputs().map(|id| (id, graph.value(id).clone())).collect();
        let outcome = infer_node(graph, index).and_then(|()| fold_node(graph, index));
        let is_folded = before.iter().all(|&(id, _)| graph.value(id).constant.is_some());
        if outcome.is_err() || !is_folded {
            before.into_iter().for_each(|(id, value)| *graph.value_mut(id) = value);
        }
    }
}

/// Part of a graph with shapes that become known during a run.
impl Specialise for Specialiser {
    fn specialise(&self, inputs: &[Tensor]) -> Result<Arc<Specialised>, String> {
        let schedule = self.schedule(inputs).map_err(|error| error.to_string())?;
        // A part that does not change would be specialised endlessly.
        if let [SegmentNode { segment: Segment::Deferred(_), .. }] = schedule.segments.as_slice() {
            let node = &self.graph.nodes[0];
            let label = self.graph.node_label(node);
            return Err(format!(
                "{label}: the shape of its result cannot be computed from the shapes and values of its inputs"
            ));
        }
        Ok(schedule)
    }

    fn describe(&self) -> String {
        self.graph.to_string()
    }
}

#[derive(Clone, Copy)]
struct KnownInput<'a> {
    dims: &'a [usize],
    value: Option<&'a Tensor>,
}

enum Compiled {
    Schedule(Schedule),
    /// The schedule depends on the values of these user inputs.
    NeedsValues(Vec<usize>),
}

/// Place where a node runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NodeKind {
    Folded,
    Program,
    Host,
    Control,
    /// In a program if all nodes are in one program, otherwise outside.
    Yield,
}

/// Operator of a node with parsed attributes, and the place where it runs.
struct PlacedNode {
    op: Box<dyn Op>,
    kind: NodeKind,
}

/// Returns the graph with the types and values of the known user inputs, and without the shapes of other values.
fn with_known_inputs(
    source: &Graph,
    roles: &[Role],
    known: &[Option<KnownInput<'_>>],
) -> Result<Graph, Error> {
    let mut graph = source.clone();
    // Lowerings may assume that the first output is present, even if it is unused. Compositions have no lowering.
    for index in 0..graph.nodes.len() {
        let is_missing = graph.nodes[index].outputs.first().copied().flatten().is_none();
        if is_missing && !matches!(build(&graph, &graph.nodes[index])?.placement(), Placement::Composition) {
            let unused = graph.add_value("unused", ValueType::Unknown);
            let outputs = &mut graph.nodes[index].outputs;
            if outputs.is_empty() {
                outputs.push(None);
            }
            outputs[0] = Some(unused);
        }
    }
    let mut user = 0;
    for (&id, role) in source.inputs.iter().zip(roles) {
        if *role != Role::User {
            continue;
        }
        if let Some(input) = known[user] {
            let dtype = graph.value(id).ty.dtype().ok_or_else(|| {
                Error::Graph(format!("the type of input {:?} is not declared", graph.name_of(id)))
            })?;
            let value = graph.value_mut(id);
            value.ty = ValueType::tensor(dtype, input.dims);
            value.constant = input.value.cloned();
            value.sizes = None;
        }
        user += 1;
    }
    // Declared shapes of intermediate values are symbolic at best, and may be wrong; inference determines them again.
    forget_shapes(&mut graph);
    Ok(graph)
}

/// Compiles a schedule. `known` has the shape of each user input, if known.
fn compile(
    source: &Graph,
    roles: &[Role],
    known: &[Option<KnownInput<'_>>],
    settings: &Settings,
) -> Result<Compiled, Error> {
    let mut graph = with_known_inputs(source, roles, known)?;
    // Deferred values: their shapes become known only during a run.
    let mut late: FxHashSet<ValueId> = FxHashSet::default();
    let mut user = 0;
    for (&id, role) in source.inputs.iter().zip(roles) {
        if *role == Role::User {
            if known[user].is_none() {
                late.insert(id);
            }
            user += 1;
        }
    }
    let mut placed: Vec<PlacedNode> = Vec::with_capacity(graph.nodes.len());
    let mut budget = settings.unrolled_nodes;
    while placed.len() < graph.nodes.len() {
        pause();
        let index = placed.len();
        let op = build(&graph, &graph.nodes[index])?;
        let placement = op.placement();
        if let Placement::If { then_branch, else_branch } = placement
            && let Some(holds) = constant_condition(&graph, &graph.nodes[index])
        {
            inline_branch(&mut graph, index, if holds { then_branch } else { else_branch })?;
            continue;
        }
        if matches!(placement, Placement::Composition) {
            infer_with_op(&mut graph, index, op.as_ref())?;
            decompose_node(&mut graph, index)?.expect("a composition has nodes");
            continue;
        }
        if let Placement::Repeat(repetition) = &placement {
            // The types of carried and scanned values determine the number of iterations, so they are inferred first.
            infer_with_op(&mut graph, index, op.as_ref())?;
            if unroll(&mut graph, index, repetition, &mut budget)? {
                continue;
            }
        }
        let any_late = graph.nodes[index].present_inputs().any(|id| late.contains(&id));
        // Types are always required; shapes that depend on deferred values are unknown.
        infer_with_op(&mut graph, index, op.as_ref())?;
        if !any_late {
            fold_node(&mut graph, index)?;
        }
        let outputs = || graph.nodes[index].present_outputs();
        if outputs().next().is_some() && outputs().all(|id| graph.value(id).constant.is_some()) {
            placed.push(PlacedNode { op, kind: NodeKind::Folded });
            continue;
        }
        let concrete = |id: ValueId| match &graph.value(id).ty {
            ValueType::Tensor(_, shape) => shape.as_ref().and_then(Shape::concrete).is_some(),
            ValueType::Sequence(_) => true,
            ValueType::Unknown => false,
        };
        let kind = match placement {
            Placement::Program => NodeKind::Program,
            Placement::Host(_) => NodeKind::Host,
            Placement::If { .. } | Placement::Repeat(_) => NodeKind::Control,
            Placement::Yield => NodeKind::Yield,
            Placement::Composition => unreachable!("compositions are decomposed above"),
        };
        let mut open = !outputs().all(concrete);
        if kind == NodeKind::Program && !any_late {
            let mut determining = determining_inputs(&graph, roles, &placed, op.as_ref(), open);
            // A value of unknown shape defers the node.
            open |= !determining.is_empty();
            determining.retain(|&position| known[position].is_some());
            if !determining.is_empty() {
                return Ok(Compiled::NeedsValues(determining));
            }
        }
        if open {
            late.extend(outputs());
        }
        placed.push(PlacedNode { op, kind });
    }
    if budget < settings.unrolled_nodes {
        remove_unused_nodes(&mut graph, &mut placed);
    }
    if placed.iter().any(|node| node.kind == NodeKind::Yield) {
        let is_outside = |node: &PlacedNode| matches!(node.kind, NodeKind::Host | NodeKind::Control);
        let in_program = late.is_empty() && !placed.iter().any(is_outside);
        let kind = if in_program { NodeKind::Program } else { NodeKind::Control };
        placed.iter_mut().filter(|node| node.kind == NodeKind::Yield).for_each(|node| node.kind = kind);
    }
    partition_segments(&graph, roles, &placed, &late, settings).map(Compiled::Schedule)
}

/// Returns the positions of the user inputs with values that determine a value needed by the node.
///
/// `open` is true if the shapes of the node's outputs are unknown. The search from the needed values to the user inputs
/// distinguishes elements and shapes: `Shape` of a sum reads the shape of the sum, and an addend with a known shape
/// determines nothing.
fn determining_inputs(
    graph: &Graph,
    roles: &[Role],
    placed: &[PlacedNode],
    op: &dyn Op,
    open: bool,
) -> Vec<usize> {
    let is_needed = |op: &dyn Op, k: usize, id: ValueId, open: bool| {
        graph.value(id).ty.dtype().is_some_and(|dtype| match op.needs_value(k, dtype) {
            ValueRequirement::Never => false,
            ValueRequirement::ForShapes => open,
            ValueRequirement::Always => true,
        })
    };
    let ports = |node: &Node| -> Vec<(usize, ValueId)> {
        node.inputs.iter().enumerate().filter_map(|(k, port)| Some((k, (*port)?))).collect()
    };
    let needed = ports(&graph.nodes[placed.len()]).into_iter().filter(|&(k, id)| is_needed(op, k, id, open));
    let mut stack: Vec<(ValueId, Needed)> = needed.map(|(_, id)| (id, Needed::Elements)).collect();
    stack.retain(|&(id, _)| graph.value(id).constant.is_none());
    if stack.is_empty() {
        return Vec::new();
    }
    let is_open = |id: ValueId| match &graph.value(id).ty {
        ValueType::Tensor(_, shape) => shape.as_ref().and_then(Shape::concrete).is_none(),
        ValueType::Sequence(_) | ValueType::Unknown => true,
    };
    let producers = graph.producers();
    let mut visited: FxHashSet<(ValueId, Needed)> = FxHashSet::default();
    let mut positions = Vec::new();
    while let Some((id, part)) = stack.pop() {
        let is_known = graph.value(id).constant.is_some() || (part == Needed::Shape && !is_open(id));
        if is_known || !visited.insert((id, part)) {
            continue;
        }
        let Some(maker) = producers[id.0 as usize] else {
            let users = graph.inputs.iter().zip(roles).filter(|(_, role)| **role == Role::User);
            let position = users.map(|(&input, _)| input).position(|input| input == id);
            positions.extend(position.filter(|position| !positions.contains(position)));
            continue;
        };
        let node = &graph.nodes[maker];
        let op = Some(placed[maker].op.as_ref()).filter(|op| matches!(op.placement(), Placement::Program));
        stack.extend(ports(node).into_iter().map(|(k, input)| {
            let by_shape = op.is_some_and(|op| {
                op.depends_only_on_shapes() || (part == Needed::Shape && !is_needed(op, k, input, true))
            });
            (input, if by_shape { Needed::Shape } else { Needed::Elements })
        }));
    }
    positions
}

/// Part of a value that a later node needs before a program is built.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Needed {
    Elements,
    Shape,
}

/// Returns the nodes that must follow all others: nodes that write state, and program nodes that read their results. A
/// failed run then changes nothing. If a node outside of programs reads these results, the order is unchanged.
fn nodes_to_write_last(graph: &Graph, placed: &[PlacedNode]) -> Vec<bool> {
    let mut dependent: FxHashSet<ValueId> = FxHashSet::default();
    let mut last = vec![false; graph.nodes.len()];
    for (index, (node, PlacedNode { op, kind })) in graph.nodes.iter().zip(placed).enumerate() {
        if *kind == NodeKind::Folded {
            continue;
        }
        let sees = node.present_inputs().any(|id| dependent.contains(&id));
        if sees && *kind != NodeKind::Program {
            return vec![false; graph.nodes.len()];
        }
        last[index] = sees || op.writes_state();
        if last[index] {
            dependent.extend(node.present_outputs());
        }
    }
    last
}

/// Returns the nodes of a deferred program, together with nodes of other segments that determine the shapes of their
/// results. These nodes are recomputed here.
fn with_shape_producers(graph: &Graph, placed: &[PlacedNode], members: &[usize]) -> Vec<usize> {
    let mut extended = members.to_vec();
    for &index in members {
        let shaped_by = placed[index].op.shape_source_input();
        let Some(id) = shaped_by.and_then(|k| graph.nodes[index].inputs.get(k).copied().flatten()) else {
            continue;
        };
        extended.extend(
            graph.nodes[..index].iter().position(|maker| maker.present_outputs().any(|output| output == id)),
        );
    }
    extended.sort_unstable();
    extended.dedup();
    extended
}

/// Nodes that run in one segment.
struct NodeGroup {
    kind: NodeKind,
    /// True if shapes of the nodes become known only during a run.
    is_late: bool,
    /// Indices of the nodes.
    members: Vec<usize>,
}

/// Groups nodes of one kind. A node is added to the earliest possible program, so that a host function is followed by
/// one program and not by several.
fn group_nodes(graph: &Graph, placed: &[PlacedNode], late: &FxHashSet<ValueId>) -> Vec<NodeGroup> {
    let node_is_late =
        |node: &Node| node.present_inputs().chain(node.present_outputs()).any(|id| late.contains(&id));
    let mut groups: Vec<NodeGroup> = Vec::new();
    let mut group_of: FxHashMap<ValueId, usize> = FxHashMap::default();
    let last = nodes_to_write_last(graph, placed);
    for (index, node) in graph.nodes.iter().enumerate() {
        pause();
        let kind = placed[index].kind;
        if kind == NodeKind::Folded || last[index] {
            continue;
        }
        let is_late = node_is_late(node);
        let after = node.present_inputs().filter_map(|id| group_of.get(&id).copied()).max();
        let fits = |(k, other): (usize, &NodeGroup)| {
            (kind == NodeKind::Program
                && other.kind == NodeKind::Program
                && other.is_late == is_late
                && after.is_none_or(|a| k >= a))
            .then_some(k)
        };
        let position = groups.iter().enumerate().find_map(fits);
        let group = position.unwrap_or_else(|| {
            groups.push(NodeGroup { kind, is_late, members: Vec::new() });
            groups.len() - 1
        });
        groups[group].members.push(index);
        for output in node.present_outputs() {
            group_of.insert(output, group);
        }
    }
    for index in (0..graph.nodes.len()).filter(|&index| last[index]) {
        let is_late = node_is_late(&graph.nodes[index]);
        match groups.last_mut() {
            Some(group) if group.kind == NodeKind::Program && group.is_late == is_late => {
                group.members.push(index);
            }
            _ => groups.push(NodeGroup { kind: NodeKind::Program, is_late, members: vec![index] }),
        }
    }
    groups
}

/// Partitions the nodes into segments and compiles the segments with known shapes.
fn partition_segments(
    graph: &Graph,
    roles: &[Role],
    placed: &[PlacedNode],
    late: &FxHashSet<ValueId>,
    settings: &Settings,
) -> Result<Schedule, Error> {
    let (schedule, slots) = (Schedule::default(), FxHashMap::default());
    let mut maker = ScheduleBuilder { graph, roles, placed, schedule, slots, settings };
    maker.record_yield()?;
    for (&id, role) in graph.inputs.iter().zip(roles) {
        if *role == Role::User {
            let slot = maker.slot(id);
            maker.schedule.inputs.push(slot);
        }
    }
    let needed_outputs: FxHashSet<ValueId> = graph.outputs.iter().copied().collect();

    let mut groups = group_nodes(graph, placed, late);
    let is_concrete =
        |id: ValueId| graph.value(id).ty.shape().is_some_and(|shape| shape.concrete().is_some());
    let concrete_inputs = maker.user_inputs().into_iter().all(is_concrete);
    // Constant outputs are delivered by a program; inputs are passed through.
    let constants: Vec<ValueId> =
        graph.outputs.iter().copied().filter(|&id| graph.value(id).constant.is_some()).collect();
    let is_ready = |group: &NodeGroup| group.kind == NodeKind::Program && !group.is_late;
    if !constants.is_empty() && !groups.iter().any(is_ready) || groups.is_empty() && concrete_inputs {
        groups.push(NodeGroup { kind: NodeKind::Program, is_late: false, members: Vec::new() });
    }
    let last_program = groups.iter().rposition(is_ready);
    for group in groups.iter_mut().filter(|group| group.is_late) {
        group.members = with_shape_producers(graph, placed, &group.members);
    }
    let mut delivered: FxHashSet<ValueId> = FxHashSet::default();
    for (g, NodeGroup { kind, is_late, members }) in groups.iter().enumerate() {
        let produced: FxHashSet<ValueId> =
            members.iter().flat_map(|&index| graph.nodes[index].present_outputs()).collect();
        let used_later = |id: &ValueId| {
            needed_outputs.contains(id)
                || groups[g + 1..]
                    .iter()
                    .flat_map(|later| &later.members)
                    .any(|&index| graph.nodes[index].present_inputs().any(|input| input == *id))
        };
        let mut inputs: Vec<ValueId> = Vec::new();
        let mut outputs: Vec<ValueId> = Vec::new();
        for &index in members {
            for id in graph.nodes[index].present_inputs() {
                let from_outside = !produced.contains(&id) && graph.value(id).constant.is_none();
                if from_outside && !inputs.contains(&id) {
                    inputs.push(id);
                }
            }
            // Recomputed values were delivered before.
            let first = graph.nodes[index].present_outputs().filter(|id| !delivered.contains(id));
            outputs.extend(first.filter(used_later));
        }
        delivered.extend(&outputs);
        match kind {
            NodeKind::Folded => {}
            NodeKind::Program => {
                if Some(g) == last_program {
                    outputs.extend(&constants);
                }
                if groups.len() == 1 && !is_late && concrete_inputs {
                    // The schedule is this program: every input and output of the graph, in order.
                    inputs = maker.user_inputs();
                    outputs.clone_from(&graph.outputs);
                }
                maker.push_program(members, &inputs, &outputs, *is_late)?;
            }
            NodeKind::Host | NodeKind::Control | NodeKind::Yield => {
                for &index in members {
                    maker.push_outside(index)?;
                }
            }
        }
    }
    for &id in &graph.outputs {
        let passed_on = matches!(maker.role(id), Some(Role::Plane(..)));
        let slot = match maker.slots.get(&id) {
            Some(&slot) => slot,
            None if passed_on => maker.slot(id),
            None => return Err(Error::Graph(format!("no node computes output {:?}", graph.name_of(id)))),
        };
        maker.schedule.outputs.push(slot);
    }
    Ok(maker.schedule)
}

struct ScheduleBuilder<'a> {
    graph: &'a Graph,
    roles: &'a [Role],
    placed: &'a [PlacedNode],
    schedule: Schedule,
    slots: FxHashMap<ValueId, SlotId>,
    settings: &'a Settings,
}

impl ScheduleBuilder<'_> {
    fn role(&self, id: ValueId) -> Option<&Role> {
        self.graph.inputs.iter().position(|&input| input == id).map(|k| &self.roles[k])
    }

    fn user_inputs(&self) -> Vec<ValueId> {
        let pairs = self.graph.inputs.iter().zip(self.roles);
        pairs.filter(|(_, role)| **role == Role::User).map(|(&id, _)| id).collect()
    }

    fn slot(&mut self, id: ValueId) -> SlotId {
        if let Some(&slot) = self.slots.get(&id) {
            return slot;
        }
        let value = self.graph.value(id);
        let ty = match &value.ty {
            ValueType::Tensor(dtype, shape) => {
                shape.as_ref().and_then(Shape::concrete).map(|dims| (*dtype, dims))
            }
            _ => None,
        };
        let plane = match self.role(id) {
            Some(Role::Plane(plane, offset)) => Some(PlaneLocation { plane: *plane, offset: *offset }),
            _ => None,
        };
        let slot = SlotId(self.schedule.slots.len() as u32);
        self.schedule.slots.push(SlotSpec { label: value.name.clone(), ty, plane });
        self.slots.insert(id, slot);
        slot
    }

    /// Adds a program segment of some nodes.
    fn push_program(
        &mut self,
        members: &[usize],
        inputs: &[ValueId],
        outputs: &[ValueId],
        late: bool,
    ) -> Result<(), Error> {
        // Values in planes are accessed there.
        let user_inputs: Vec<ValueId> =
            inputs.iter().copied().filter(|&id| matches!(self.role(id), None | Some(Role::User))).collect();
        let segment = if late {
            Segment::Deferred(Arc::new(self.deferred_specialiser(members, inputs, outputs)))
        } else {
            let (program, types) = self.lower_program(members, &user_inputs, outputs)?;
            Segment::Program(Arc::new(program), types)
        };
        let inputs = user_inputs.into_iter().map(|id| self.slot(id)).collect();
        let outputs = outputs.iter().map(|&id| self.slot(id)).collect();
        self.schedule.segments.push(SegmentNode { inputs, outputs, segment });
        Ok(())
    }

    /// Compiles a program of nodes with concrete shapes.
    fn lower_program(
        &self,
        members: &[usize],
        inputs: &[ValueId],
        outputs: &[ValueId],
    ) -> Result<(Program, Vec<ResultType>), Error> {
        let ScheduleBuilder { graph, roles, placed, settings, .. } = *self;
        let mut builder = ProgramBuilder::new().with_precision(settings.precision);
        let mut values = ValueBuffers::default();
        let dims_of = |id: ValueId| -> Result<Vec<usize>, Error> {
            graph.value(id).ty.shape().and_then(Shape::concrete).ok_or_else(|| {
                Error::Graph(format!(
                    "the shape of {:?} is not known: {}",
                    graph.name_of(id),
                    graph.value(id).ty
                ))
            })
        };
        let element_type = |id: ValueId| -> Result<DType, Error> {
            let dtype = graph.value(id).ty.dtype();
            dtype.ok_or_else(|| Error::Graph(format!("the type of {:?} is not known", graph.name_of(id))))
        };
        let dtype_of = |id: ValueId| element_type(id).map(DType::stored);
        let mut buffers = Vec::with_capacity(inputs.len());
        for &id in inputs {
            let len = dims_of(id)?.iter().product();
            let buffer = builder.work(graph.name_of(id), dtype_of(id)?, len);
            values.buffers.insert(id, buffer);
            buffers.push(buffer);
        }
        for (&id, role) in graph.inputs.iter().zip(roles) {
            match role {
                Role::User => {}
                Role::Plane(plane, offset) => {
                    let len = dims_of(id)?.iter().product();
                    let buffer = builder.plane(graph.name_of(id), dtype_of(id)?, len, *plane, *offset);
                    values.buffers.insert(id, buffer);
                }
                Role::Planes(parts) => {
                    values.sequences.insert(id, parts.clone());
                }
                Role::ResetFlag => values.reset_flag = Some(id),
            }
        }
        for &index in members {
            let node = &graph.nodes[index];
            let label: Arc<str> = graph.node_label(node).into();
            let mut cx = Lower {
                passes: LOWERING_PASSES,
                graph,
                node,
                builder: &mut builder,
                values: &mut values,
                label,
            };
            pause();
            placed[index].op.lower(&mut cx).map_err(|source| Error::at(graph, node, source))?;
        }
        let mut results = Vec::with_capacity(outputs.len());
        let mut types = Vec::with_capacity(outputs.len());
        for &id in outputs {
            let buffer = match (values.buffers.get(&id), &graph.value(id).constant) {
                (Some(&buffer), _) => buffer,
                (None, Some(tensor)) => builder.constant(graph.name_of(id), &tensor.stored()),
                (None, None) => {
                    return Err(Error::Graph(format!("no node computes output {:?}", graph.name_of(id))));
                }
            };
            results.push(buffer);
            types.push((element_type(id)?, dims_of(id)?));
        }
        let program = builder.finish_for(&settings.target, buffers, results, settings.log.as_ref())?;
        Ok((program, types))
    }

    /// Creates the specialiser of a program segment with unknown shapes.
    fn deferred_specialiser(
        &self,
        members: &[usize],
        inputs: &[ValueId],
        outputs: &[ValueId],
    ) -> Specialiser {
        let mut graph = self.graph.clone();
        graph.nodes = members.iter().map(|&index| self.graph.nodes[index].clone()).collect();
        graph.inputs = inputs.to_vec();
        graph.outputs = outputs.to_vec();
        let roles = inputs.iter().map(|&id| self.role(id).cloned().unwrap_or(Role::User)).collect();
        Specialiser { settings: self.settings.clone(), ..Specialiser::from_prepared(graph, roles) }
    }

    /// Adds a segment of a node that runs outside of programs.
    fn push_outside(&mut self, index: usize) -> Result<(), Error> {
        let node = &self.graph.nodes[index];
        let label: Arc<str> = self.graph.node_label(node).into();
        let (inputs, outputs, segment) = match self.placed[index].op.placement() {
            Placement::Host(function) => {
                // Constant inputs are passed like other values.
                self.deliver_constants(node.present_inputs())?;
                let inputs: Vec<SlotId> = node.present_inputs().map(|id| self.slot(id)).collect();
                // Its results are delivered by position, including unused results.
                let mut outputs: Vec<SlotId> = Vec::with_capacity(node.outputs.len());
                for port in &node.outputs {
                    outputs.push(match *port {
                        Some(id) => self.slot(id),
                        None => self.add_unused_slot(),
                    });
                }
                (inputs, outputs, Segment::Host(function, label))
            }
            Placement::If { then_branch, else_branch } => {
                let (condition, captured) = node.inputs.split_at(node.inputs.len() - node.captures);
                // Constants and values in planes are accessed directly by the branches.
                let passed = captured.iter().flatten().filter(|&&id| self.is_passed(id));
                let inputs: Vec<ValueId> = condition.iter().flatten().chain(passed).copied().collect();
                let branches = Branches {
                    then_branch: Arc::new(self.build_branch(node, then_branch)?),
                    else_branch: Arc::new(self.build_branch(node, else_branch)?),
                };
                let inputs = inputs.into_iter().map(|id| self.slot(id)).collect();
                let outputs = node.present_outputs().map(|id| self.slot(id)).collect();
                (inputs, outputs, Segment::If(branches, label))
            }
            Placement::Repeat(repetition) => self.repeat_segment(node, &repetition, label)?,
            Placement::Yield => {
                self.deliver_constants(node.present_inputs())?;
                let (sources, results) = self.yield_slots(node);
                (sources, results, Segment::Yield(label))
            }
            Placement::Program | Placement::Composition => unreachable!("programs are compiled from groups"),
        };
        self.schedule.segments.push(SegmentNode { inputs, outputs, segment });
        Ok(())
    }

    /// Returns the slots of the values that a yield exchanges.
    fn yield_slots(&mut self, node: &Node) -> (Vec<SlotId>, Vec<SlotId>) {
        let sources = node.present_inputs().map(|id| self.slot(id)).collect();
        let mut results = Vec::with_capacity(node.outputs.len());
        for port in &node.outputs {
            results.push(match *port {
                Some(id) => self.slot(id),
                None => self.add_unused_slot(),
            });
        }
        (sources, results)
    }

    /// Records the values that a yield exchanges, if there is one.
    fn record_yield(&mut self) -> Result<(), Error> {
        let graph = self.graph;
        for (node, placed) in graph.nodes.iter().zip(self.placed) {
            if !matches!(placed.op.placement(), Placement::Yield) {
                continue;
            }
            if self.schedule.yield_slots.is_some() {
                let source =
                    OpError::unsupported("a graph can have only one YieldOp, and this is the second");
                return Err(Error::at(graph, node, source));
            }
            let (sources, results) = self.yield_slots(node);
            self.schedule.yield_slots = Some(YieldSlots { outputs: sources, inputs: results });
        }
        Ok(())
    }

    /// Adds a slot for an unused result.
    fn add_unused_slot(&mut self) -> SlotId {
        self.schedule.slots.push(SlotSpec { label: "".into(), ty: None, plane: None });
        SlotId(self.schedule.slots.len() as u32 - 1)
    }

    /// Delivers constants, for segments that receive them like any other value.
    fn deliver_constants(&mut self, values: impl Iterator<Item = ValueId>) -> Result<(), Error> {
        let is_constant = |id: &ValueId| self.graph.value(*id).constant.is_some();
        let mut constants: Vec<ValueId> = values.filter(is_constant).collect();
        constants.sort_unstable();
        constants.dedup();
        if constants.is_empty() { Ok(()) } else { self.push_program(&[], &[], &constants, false) }
    }

    /// Builds the segment of a node that repeats its body.
    fn repeat_segment(
        &mut self,
        node: &Node,
        r: &Repetition,
        label: Arc<str>,
    ) -> Result<(Vec<SlotId>, Vec<SlotId>, Segment), Error> {
        let mut body = subgraph_of(self.graph, node, r.body)?.clone();
        let input_count = node.inputs.len() - node.captures;
        let is_requested: Vec<bool> = (0..r.stacked.len())
            .map(|k| node.outputs.get(r.carried + k).copied().flatten().is_some())
            .collect();
        let results = body.outputs.split_off(r.leading_outputs() + r.carried);
        body.outputs.extend(
            results.iter().zip(&is_requested).filter(|(_, requested)| **requested).map(|(&id, _)| id),
        );

        // The values of an iteration come first. Its condition is true, because the iteration runs.
        let mut known: Vec<Option<Vec<usize>>> = Vec::new();
        let mut roles = Vec::new();
        let mut inputs: Vec<ValueId> = Vec::new();
        let fixed = body.inputs.split_off(r.formal_inputs());
        for (k, id) in std::mem::take(&mut body.inputs).into_iter().enumerate() {
            let dims = body.value(id).ty.shape().and_then(Shape::concrete);
            if r.conditional && k == 1 {
                let always_true = Tensor::filled(DType::Bool, &dims.unwrap_or_default(), 1.0);
                body.value_mut(id).ty = ValueType::tensor(DType::Bool, always_true.dims());
                body.value_mut(id).constant = Some(always_true);
                continue;
            }
            known.push(dims);
            roles.push(Role::User);
            inputs.push(id);
        }
        // Large loop invariants get additional planes after the existing ones.
        let first_plane = self.next_plane();
        let (mut passed, mut in_planes): (Vec<ValueId>, Vec<ValueId>) = Default::default();
        let captured = node.inputs[input_count..].iter().flatten().copied();
        for (inner, outer) in fixed.into_iter().zip(captured) {
            let value = self.graph.value(outer);
            if let Some(tensor) = &value.constant {
                body.value_mut(inner).ty = ValueType::tensor(tensor.dtype(), tensor.dims());
                body.value_mut(inner).constant = Some(tensor.clone());
                continue;
            }
            let mut role = self.role(outer).cloned().unwrap_or(Role::User);
            let dims = value.ty.shape().and_then(Shape::concrete);
            if role == Role::User {
                let is_float = value.ty.dtype().is_some_and(DType::is_float);
                match dims {
                    Some(dims) if is_float && dims.iter().product::<usize>() > MAX_PASSED_ELEMENTS => {
                        body.value_mut(inner).ty =
                            ValueType::tensor(value.ty.dtype().expect("it is a float"), &dims);
                        role = Role::Plane(PlaneId(first_plane + in_planes.len() as u32), 0);
                        in_planes.push(outer);
                    }
                    dims => {
                        known.push(dims);
                        passed.push(outer);
                    }
                }
            }
            inputs.push(inner);
            roles.push(role);
        }
        body.inputs = inputs;
        body.remove_unused();
        let child = SubgraphCompiler { graph: body, roles, known, settings: self.settings.clone() };
        let undetermined = || Error::at(self.graph, node, OpError::unsupported(UNDETERMINED_SHAPES));
        let schedule = child.compile_schedule()?.ok_or_else(undetermined)?;
        let body = child.graph;

        let arguments: Vec<Option<ValueId>> =
            (0..input_count).map(|k| Repetition::own_input(node, k)).collect();
        self.deliver_constants(arguments.iter().copied().flatten())?;
        let is_there = |k: usize| arguments.get(k).copied().flatten().is_some();
        let count = match r.conditional {
            true => Count::While { has_limit: is_there(0), has_condition: is_there(1) },
            false => Count::Scanned,
        };
        let inputs = arguments.into_iter().flatten().chain(passed).chain(in_planes.iter().copied());
        let inputs = inputs.map(|id| self.slot(id)).collect();
        let mut outputs: Vec<SlotId> = Vec::with_capacity(node.outputs.len());
        for k in 0..r.carried {
            outputs.push(match node.outputs.get(k).copied().flatten() {
                Some(id) => self.slot(id),
                None => self.add_unused_slot(),
            });
        }
        let mut stacked = Vec::new();
        for (k, &along) in r.stacked.iter().enumerate() {
            let Some(id) = node.outputs.get(r.carried + k).copied().flatten() else { continue };
            outputs.push(self.slot(id));
            stacked.push(self.stacked_result(node, id, along, &body.value(results[k]).ty)?);
        }
        let carried = (0..r.carried)
            .map(|j| {
                let inner = subgraph_of(self.graph, node, r.body)?.inputs[r.leading_inputs() + j];
                Ok(body.value(inner).name.clone())
            })
            .collect::<Result<_, Error>>()?;
        let positions = match node.attrs.0.get(POSITIONS) {
            Some(Attr::Ints(positions)) => positions.iter().map(|&at| at as u64).collect(),
            _ => Vec::new(),
        };
        let repeat = Repeat {
            body: Arc::new(schedule),
            count,
            carried,
            scanned: r.scanned.clone(),
            stacked,
            first_plane,
            in_planes: in_planes.len(),
            unrolled_positions: positions,
        };
        Ok((inputs, outputs, Segment::Repeat(Box::new(repeat), label)))
    }

    /// Returns the index of the first plane that no input has.
    fn next_plane(&self) -> u32 {
        let used = self.roles.iter().flat_map(|role| match role {
            Role::Plane(plane, _) => vec![plane.0],
            Role::Planes(parts) => parts.iter().map(|part| part.plane.0).collect(),
            Role::User | Role::ResetFlag => Vec::new(),
        });
        used.max().map_or(0, |last| last + 1)
    }

    /// Describes a result with elements of a type, stacked over the iterations.
    fn stacked_result(
        &self,
        node: &Node,
        id: ValueId,
        scan_axis: ScanAxis,
        element: &ValueType,
    ) -> Result<StackedResult, Error> {
        let dtype = element.dtype().or(self.graph.value(id).ty.dtype()).ok_or_else(|| {
            let message = format!("the type of {:?} is not known", self.graph.name_of(id));
            Error::at(self.graph, node, OpError::invalid(message))
        })?;
        let dims = element.shape().map(|shape| shape.iter().map(Dim::known).collect());
        Ok(StackedResult { label: self.graph.value(id).name.clone(), scan_axis, element: (dtype, dims) })
    }

    /// Returns true if a value that branches use is passed to them at run time.
    fn is_passed(&self, id: ValueId) -> bool {
        self.graph.value(id).constant.is_none() && matches!(self.role(id), None | Some(Role::User))
    }

    /// Creates a branch; its inputs are the captured values that are passed at run time. Its schedule is compiled when
    /// the branch is taken.
    fn build_branch(&self, node: &Node, attribute: &str) -> Result<Branch, Error> {
        let mut graph = subgraph_of(self.graph, node, attribute)?.clone();
        let captured = node.inputs[node.inputs.len() - node.captures..].iter().flatten();
        let mut roles = Vec::new();
        let mut known: Vec<Option<Vec<usize>>> = Vec::new();
        for (inner, &outer) in std::mem::take(&mut graph.inputs).into_iter().zip(captured) {
            let value = self.graph.value(outer);
            if let Some(tensor) = &value.constant {
                graph.value_mut(inner).ty = ValueType::tensor(tensor.dtype(), tensor.dims());
                graph.value_mut(inner).constant = Some(tensor.clone());
                continue;
            }
            let role = self.role(outer).cloned().unwrap_or(Role::User);
            if role == Role::User {
                known.push(value.ty.shape().and_then(Shape::concrete));
            }
            // A branch that contradicts the current shapes has types that were inferred without them.
            graph.value_mut(inner).ty = value.ty.clone();
            graph.inputs.push(inner);
            roles.push(role);
        }
        // Unused results are not computed.
        let is_requested: Vec<bool> = node.outputs.iter().map(Option::is_some).collect();
        let mut requested = is_requested.into_iter();
        graph.outputs.retain(|_| requested.next() == Some(true));
        graph.remove_unused();
        Ok(Branch::new(Box::new(SubgraphCompiler { graph, roles, known, settings: self.settings.clone() })))
    }
}

/// Subgraph with a schedule of its own.
#[derive(Debug)]
struct SubgraphCompiler {
    graph: Graph,
    roles: Vec<Role>,
    /// Shape of each input that is passed at run time, if known.
    known: Vec<Option<Vec<usize>>>,
    settings: Settings,
}

impl SubgraphCompiler {
    /// Compiles the schedule; `None` if the shapes of the subgraph cannot be determined.
    fn compile_schedule(&self) -> Result<Option<Schedule>, Error> {
        let mut known = self.known.clone();
        loop {
            let shapes: Vec<Option<KnownInput<'_>>> =
                known.iter().map(|dims| dims.as_ref().map(|dims| KnownInput { dims, value: None })).collect();
            match compile(&self.graph, &self.roles, &shapes, &self.settings)? {
                Compiled::Schedule(schedule) => return Ok(Some(schedule)),
                Compiled::NeedsValues(expected) => {
                    // Nodes that depend on these values are compiled when the values are known.
                    let mut fewer = false;
                    for position in expected {
                        fewer |= known[position].take().is_some();
                    }
                    if !fewer {
                        return Ok(None);
                    }
                }
            }
        }
    }
}

/// Message for a subgraph with unknown shapes.
const UNDETERMINED_SHAPES: &str = "the shapes inside its subgraphs cannot be determined";

impl BranchSource for SubgraphCompiler {
    fn schedule(&self) -> Result<Schedule, String> {
        let compiled = self.compile_schedule().map_err(|error| error.to_string())?;
        compiled.ok_or_else(|| UNDETERMINED_SHAPES.to_owned())
    }
}
