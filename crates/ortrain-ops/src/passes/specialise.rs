//! From a graph to a schedule for concrete shapes.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use ortrain_graph::{DType, Graph, Node, Shape, Tensor, ValueId, ValueType};
use ortrain_program::{
    Branches, Code, PlaneId, PlanePlace, Program, ProgramBuilder, Schedule, Segment, SegmentNode, SlotId,
    SlotSpec, Specialise,
};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::lower::{Lower, PlanePart, Values};
use crate::op::Placement;
use crate::passes::fold::fold_node;
use crate::passes::infer::infer_node;
use crate::registry::build;
use crate::{Error, OpError};

/// How many specialisations are kept; the one not used for longest goes first.
const KEPT: usize = 32;

/// How an input of a graph is connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Given by the user at every run.
    User,
    /// A tensor of the state, at this byte of a plane.
    Plane(PlaneId, usize),
    /// A sequence: whole planes of the state, one for each element type.
    Planes(Vec<PlanePart>),
    /// The flag that says whether gradients overwrite or accumulate; it chooses the entry.
    ResetFlag,
}

/// What is known of a user input when a schedule is made.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct InputKey {
    dims: Vec<usize>,
    /// Its content, if it reaches a shape.
    value: Option<Tensor>,
}

type Cached = (Vec<InputKey>, Arc<Schedule>);

/// Makes schedules of one graph for the shapes that come along, and keeps them.
#[derive(Debug)]
pub struct Specialiser {
    graph: Graph,
    roles: Vec<Role>,
    /// Positions of user inputs whose values reach a shape.
    shape_inputs: Mutex<FxHashSet<usize>>,
    cache: Mutex<VecDeque<Cached>>,
}

impl Specialiser {
    /// For a graph in the newest version, with a role for each of its inputs.
    ///
    /// # Panics
    /// When there are more or fewer roles than inputs.
    #[must_use]
    pub fn new(graph: Graph, roles: Vec<Role>) -> Specialiser {
        assert_eq!(graph.inputs.len(), roles.len(), "a role for each input");
        Specialiser { graph, roles, shape_inputs: Mutex::default(), cache: Mutex::default() }
    }

    /// The graph.
    #[must_use]
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The inputs given by the user, in order.
    pub fn user_inputs(&self) -> impl Iterator<Item = ValueId> + '_ {
        let pairs = self.graph.inputs.iter().zip(&self.roles);
        pairs.filter(|(_, role)| **role == Role::User).map(|(&id, _)| id)
    }

    /// Whether the schedule for these shapes is kept already: `Some` without any allocation. `value` gives the bytes of
    /// a user input, for those whose values reach a shape.
    #[must_use]
    pub fn cached<'v>(&self, dims: &[&[usize]], value: &dyn Fn(usize) -> &'v [u8]) -> Option<Arc<Schedule>> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |key: &[InputKey]| {
            key.len() == dims.len()
                && key.iter().zip(dims).enumerate().all(|(k, (known, dims))| {
                    known.dims == *dims
                        && known.value.as_ref().is_none_or(|tensor| tensor.data()[..] == *value(k))
                })
        };
        let found = cache.iter().position(|(key, _)| fits(key))?;
        // Most recently used last.
        if found + 1 != cache.len() {
            let entry = cache.remove(found)?;
            cache.push_back(entry);
        }
        cache.back().map(|(_, schedule)| schedule.clone())
    }

    /// The schedule for these user inputs, made now or kept from before.
    ///
    /// # Errors
    /// When a node does not accept the shapes, or cannot be run.
    pub fn schedule(&self, inputs: &[Tensor]) -> Result<Arc<Schedule>, Error> {
        let dims: Vec<&[usize]> = inputs.iter().map(Tensor::dims).collect();
        if let Some(schedule) = self.cached(&dims, &|k| inputs[k].data()) {
            return Ok(schedule);
        }
        loop {
            let wanted = self.shape_inputs.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let key: Vec<InputKey> = inputs
                .iter()
                .enumerate()
                .map(|(k, tensor)| InputKey {
                    dims: tensor.dims().to_vec(),
                    value: wanted.contains(&k).then(|| tensor.clone()),
                })
                .collect();
            let known: Vec<Option<Known<'_>>> =
                key.iter().map(|key| Some(Known { dims: &key.dims, value: key.value.as_ref() })).collect();
            match compile(&self.graph, &self.roles, &known)? {
                Compiled::Schedule(schedule) => {
                    let schedule = Arc::new(schedule);
                    let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
                    if cache.len() == KEPT {
                        cache.pop_front();
                    }
                    cache.push_back((key, schedule.clone()));
                    return Ok(schedule);
                }
                Compiled::NeedsValues(more) => {
                    let mut wanted = self.shape_inputs.lock().unwrap_or_else(PoisonError::into_inner);
                    let before = wanted.len();
                    wanted.extend(more);
                    if wanted.len() == before {
                        return Err(Error::Graph("the shapes of the graph cannot be determined".into()));
                    }
                }
            }
        }
    }
}

/// A program whose shapes become known during a run.
impl Specialise for Specialiser {
    fn specialise(&self, inputs: &[Tensor]) -> Result<(Arc<Program>, Vec<Vec<usize>>), String> {
        let schedule = self.schedule(inputs).map_err(|error| error.to_string())?;
        let program = schedule.single().ok_or("a late program turned out to be several segments")?.clone();
        let shapes = schedule.outputs.iter().map(|slot| {
            let ty = &schedule.slots[slot.0 as usize].ty;
            ty.as_ref().map(|(_, dims)| dims.clone()).ok_or_else(|| "an output has no shape".to_owned())
        });
        Ok((program, shapes.collect::<Result<_, _>>()?))
    }

    fn describe(&self) -> String {
        self.graph.to_string()
    }
}

#[derive(Clone, Copy)]
struct Known<'a> {
    dims: &'a [usize],
    value: Option<&'a Tensor>,
}

enum Compiled {
    Schedule(Schedule),
    /// The schedule depends on the values of these user inputs.
    NeedsValues(Vec<usize>),
}

/// Where a node's work goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Folded,
    Program,
    Host,
    If,
}

/// Makes a schedule. `known` has, for each user input, its shape if that is known.
fn compile(source: &Graph, roles: &[Role], known: &[Option<Known<'_>>]) -> Result<Compiled, Error> {
    let mut graph = source.clone();
    let mut user = 0;
    for (&id, role) in source.inputs.iter().zip(roles) {
        if *role != Role::User {
            continue;
        }
        if let Some(input) = known[user] {
            let dtype = graph.value(id).ty.dtype().ok_or_else(|| {
                Error::Graph(format!("the type of input {:?} is not declared", graph.name_of(id)))
            })?;
            graph.value_mut(id).ty = ValueType::tensor(dtype, input.dims);
            graph.value_mut(id).constant = input.value.cloned();
        }
        user += 1;
    }
    // Shapes declared for intermediate values are symbolic at best; inference finds them anew.
    for node in &source.nodes {
        for output in node.present_outputs() {
            let value = graph.value_mut(output);
            if let ValueType::Tensor(dtype, _) = value.ty {
                value.ty = ValueType::Tensor(dtype, None);
            }
            value.sizes = None;
        }
    }

    // Values whose shapes come out only during a run, and what they come from.
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
    let mut kinds = Vec::with_capacity(graph.nodes.len());
    for index in 0..graph.nodes.len() {
        let node = graph.nodes[index].clone();
        let op = build(&graph, &node)?;
        let placement = op.placement();
        let any_late = node.present_inputs().any(|id| late.contains(&id));
        if !any_late {
            infer_node(&mut graph, index)?;
            fold_node(&mut graph, index)?;
        } else {
            // Types are needed all the same; shapes that depend on late ones are unknown.
            infer_node(&mut graph, index)?;
        }
        let outputs: Vec<ValueId> = node.present_outputs().collect();
        if !outputs.is_empty() && outputs.iter().all(|&id| graph.value(id).constant.is_some()) {
            kinds.push(Kind::Folded);
            continue;
        }
        let concrete = |id: ValueId| match &graph.value(id).ty {
            ValueType::Tensor(_, shape) => shape.as_ref().and_then(Shape::concrete).is_some(),
            ValueType::Sequence(_) => true,
            ValueType::Unknown => false,
        };
        let kind = match placement {
            Placement::Program => Kind::Program,
            Placement::Host(_) => Kind::Host,
            Placement::If { .. } => Kind::If,
        };
        if !outputs.iter().all(|&id| concrete(id)) {
            if kind == Kind::Program && !any_late {
                let wanted = values_behind(&graph, roles, index);
                if !wanted.is_empty() {
                    return Ok(Compiled::NeedsValues(wanted));
                }
            }
            late.extend(outputs);
        }
        kinds.push(kind);
    }
    segments(&graph, roles, &kinds, &late).map(Compiled::Schedule)
}

/// The user inputs (by position) whose values the integer inputs of a node come from.
fn values_behind(graph: &Graph, roles: &[Role], index: usize) -> Vec<usize> {
    let producers = graph.producers();
    let is_integer = |id: ValueId| graph.value(id).ty.dtype().is_some_and(|dtype| !dtype.is_float());
    let mut stack: Vec<ValueId> = graph.nodes[index].present_inputs().filter(|&id| is_integer(id)).collect();
    let mut seen: FxHashSet<ValueId> = FxHashSet::default();
    let mut positions = Vec::new();
    while let Some(id) = stack.pop() {
        if !seen.insert(id) || graph.value(id).constant.is_some() {
            continue;
        }
        match producers[id.0 as usize] {
            Some(maker) => stack.extend(graph.nodes[maker].present_inputs()),
            None => {
                let users = graph.inputs.iter().zip(roles).filter(|(_, role)| **role == Role::User);
                positions.extend(users.map(|(&input, _)| input).position(|input| input == id));
            }
        }
    }
    positions
}

/// Cuts the nodes into segments and compiles those whose shapes are known.
fn segments(
    graph: &Graph,
    roles: &[Role],
    kinds: &[Kind],
    late: &FxHashSet<ValueId>,
) -> Result<Schedule, Error> {
    let mut maker = SegmentMaker { graph, roles, schedule: Schedule::default(), slots: FxHashMap::default() };
    for (&id, role) in graph.inputs.iter().zip(roles) {
        if *role == Role::User {
            let slot = maker.slot(id);
            maker.schedule.inputs.push(slot);
        }
    }
    let node_is_late =
        |node: &Node| node.present_inputs().chain(node.present_outputs()).any(|id| late.contains(&id));
    let needed_outputs: FxHashSet<ValueId> = graph.outputs.iter().copied().collect();

    // Runs of nodes of one kind. Nodes that are ready go to the earliest program they can, so that one program
    // follows a host function and not several.
    let mut groups: Vec<(Kind, bool, Vec<usize>)> = Vec::new();
    let mut group_of: FxHashMap<ValueId, usize> = FxHashMap::default();
    for (index, node) in graph.nodes.iter().enumerate() {
        let kind = kinds[index];
        if kind == Kind::Folded {
            continue;
        }
        let is_late = node_is_late(node);
        let after = node.present_inputs().filter_map(|id| group_of.get(&id).copied()).max();
        let fits = |(k, (other, other_late, _)): (usize, &(Kind, bool, Vec<usize>))| {
            (kind == Kind::Program
                && *other == Kind::Program
                && *other_late == is_late
                && after.is_none_or(|a| k >= a))
            .then_some(k)
        };
        let found = groups.iter().enumerate().find_map(fits);
        let group = found.unwrap_or_else(|| {
            groups.push((kind, is_late, Vec::new()));
            groups.len() - 1
        });
        groups[group].2.push(index);
        for output in node.present_outputs() {
            group_of.insert(output, group);
        }
    }

    if groups.is_empty() && !graph.outputs.is_empty() {
        // Everything was folded or is passed through: still a program, which delivers the outputs.
        groups.push((Kind::Program, false, Vec::new()));
    }
    let last_program = groups.iter().rposition(|(kind, is_late, _)| *kind == Kind::Program && !is_late);
    for (g, (kind, is_late, members)) in groups.iter().enumerate() {
        let made: FxHashSet<ValueId> =
            members.iter().flat_map(|&index| graph.nodes[index].present_outputs()).collect();
        let used_later = |id: &ValueId| {
            needed_outputs.contains(id)
                || groups[g + 1..]
                    .iter()
                    .flat_map(|(_, _, later)| later)
                    .any(|&index| graph.nodes[index].present_inputs().any(|input| input == *id))
        };
        let mut inputs: Vec<ValueId> = Vec::new();
        let mut outputs: Vec<ValueId> = Vec::new();
        for &index in members {
            for id in graph.nodes[index].present_inputs() {
                let from_outside = !made.contains(&id) && graph.value(id).constant.is_none();
                if from_outside && !inputs.contains(&id) {
                    inputs.push(id);
                }
            }
            outputs.extend(graph.nodes[index].present_outputs().filter(used_later));
        }
        match kind {
            Kind::Folded => {}
            Kind::Program => {
                // Outputs that no node makes here: constants and inputs passed through.
                if Some(g) == last_program {
                    for &id in &graph.outputs {
                        if !group_of.contains_key(&id) && !outputs.contains(&id) {
                            outputs.push(id);
                            if graph.value(id).constant.is_none() && !inputs.contains(&id) {
                                inputs.push(id);
                            }
                        }
                    }
                }
                let single = groups.len() == 1;
                if single {
                    // The schedule is this program: every input and output of the graph, in order.
                    inputs = maker.user_inputs();
                    outputs.clone_from(&graph.outputs);
                }
                maker.program(members, &inputs, &outputs, *is_late)?;
            }
            Kind::Host | Kind::If => {
                for &index in members {
                    maker.outside(index)?;
                }
            }
        }
    }
    maker.schedule.outputs =
        graph.outputs.iter().map(|&id| maker.slots.get(&id).copied()).collect::<Option<_>>().ok_or_else(
            || Error::Graph("an output of the graph is a constant that no program delivers".into()),
        )?;
    Ok(maker.schedule)
}

struct SegmentMaker<'a> {
    graph: &'a Graph,
    roles: &'a [Role],
    schedule: Schedule,
    slots: FxHashMap<ValueId, SlotId>,
}

impl SegmentMaker<'_> {
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
            Some(Role::Plane(plane, offset)) => Some(PlanePlace { plane: *plane, offset: *offset }),
            _ => None,
        };
        let slot = SlotId(self.schedule.slots.len() as u32);
        self.schedule.slots.push(SlotSpec { label: value.name.clone(), ty, plane });
        self.slots.insert(id, slot);
        slot
    }

    /// A program segment of some nodes.
    fn program(
        &mut self,
        members: &[usize],
        inputs: &[ValueId],
        outputs: &[ValueId],
        late: bool,
    ) -> Result<(), Error> {
        // What lies in planes is reached there.
        let given: Vec<ValueId> =
            inputs.iter().copied().filter(|&id| matches!(self.role(id), None | Some(Role::User))).collect();
        let code = if late {
            Code::Late(Arc::new(self.late(members, inputs, outputs)))
        } else {
            let (program, shapes) = lower(self.graph, self.roles, members, &given, outputs)?;
            Code::Ready(Arc::new(program), shapes)
        };
        let inputs = given.into_iter().map(|id| self.slot(id)).collect();
        let outputs = outputs.iter().map(|&id| self.slot(id)).collect();
        self.schedule.segments.push(SegmentNode { inputs, outputs, segment: Segment::Program(code) });
        Ok(())
    }

    /// The specialiser of a program segment whose shapes are not known yet.
    fn late(&self, members: &[usize], inputs: &[ValueId], outputs: &[ValueId]) -> Specialiser {
        let mut graph = self.graph.clone();
        graph.nodes = members.iter().map(|&index| self.graph.nodes[index].clone()).collect();
        graph.inputs = inputs.to_vec();
        graph.outputs = outputs.to_vec();
        let roles = inputs.iter().map(|&id| self.role(id).cloned().unwrap_or(Role::User)).collect();
        Specialiser::new(graph, roles)
    }

    /// A segment of a node that runs outside programs.
    fn outside(&mut self, index: usize) -> Result<(), Error> {
        let node = &self.graph.nodes[index];
        let label: Arc<str> = self.graph.node_label(node).into();
        let op = build(self.graph, node)?;
        // Constants it takes are given to it as they are.
        let constants: Vec<ValueId> =
            node.present_inputs().filter(|&id| self.graph.value(id).constant.is_some()).collect();
        if !constants.is_empty() {
            self.program(&[], &[], &constants, false)?;
        }
        let inputs: Vec<SlotId> = node.present_inputs().map(|id| self.slot(id)).collect();
        let segment = match op.placement() {
            Placement::Host(function) => Segment::Host(function, label),
            Placement::If { then_branch, else_branch } => {
                let branch = |name: &str| -> Result<Arc<Schedule>, Error> {
                    let subgraph = node.attrs.graph(name).ok().flatten().ok_or_else(|| {
                        Error::at(self.graph, node, OpError::Invalid(format!("branch {name:?} is missing")))
                    })?;
                    self.branch(subgraph, node).map(Arc::new)
                };
                Segment::If(
                    Branches { then_branch: branch(then_branch)?, else_branch: branch(else_branch)? },
                    label,
                )
            }
            Placement::Program => unreachable!("programs are made of groups"),
        };
        let outputs: Vec<SlotId> = node.present_outputs().map(|id| self.slot(id)).collect();
        self.schedule.segments.push(SegmentNode { inputs, outputs, segment });
        Ok(())
    }

    /// The schedule of a branch; its inputs are the values its node captures.
    fn branch(&self, subgraph: &Graph, node: &Node) -> Result<Schedule, Error> {
        let captured = &node.inputs[node.inputs.len() - node.captures..];
        let mut graph = subgraph.clone();
        let mut known: Vec<Option<Vec<usize>>> = Vec::new();
        for (&inner, outer) in subgraph.inputs.iter().zip(captured.iter().flatten()) {
            let ty = self.graph.value(*outer).ty.clone();
            known.push(ty.shape().and_then(Shape::concrete));
            graph.value_mut(inner).ty = ty;
        }
        let known: Vec<Option<Known<'_>>> =
            known.iter().map(|dims| dims.as_ref().map(|dims| Known { dims, value: None })).collect();
        let roles = vec![Role::User; graph.inputs.len()];
        match compile(&graph, &roles, &known)? {
            Compiled::Schedule(schedule) => Ok(schedule),
            Compiled::NeedsValues(_) => {
                // Then nothing about the branch is known before it runs.
                let unknown = vec![None; graph.inputs.len()];
                match compile(&graph, &roles, &unknown)? {
                    Compiled::Schedule(schedule) => Ok(schedule),
                    Compiled::NeedsValues(_) => Err(Error::at(
                        self.graph,
                        node,
                        OpError::unsupported("the shapes inside its branches cannot be determined"),
                    )),
                }
            }
        }
    }
}

/// A program of some nodes, all of whose shapes are numbers.
fn lower(
    graph: &Graph,
    roles: &[Role],
    members: &[usize],
    inputs: &[ValueId],
    outputs: &[ValueId],
) -> Result<(Program, Vec<Vec<usize>>), Error> {
    let mut builder = ProgramBuilder::new();
    let mut values = Values::default();
    let dims_of = |id: ValueId| -> Result<Vec<usize>, Error> {
        graph.value(id).ty.shape().and_then(Shape::concrete).ok_or_else(|| {
            Error::Graph(format!("the shape of {:?} is not known: {}", graph.name_of(id), graph.value(id).ty))
        })
    };
    let dtype_of = |id: ValueId| -> Result<DType, Error> {
        let dtype = graph.value(id).ty.dtype();
        dtype.ok_or_else(|| Error::Graph(format!("the type of {:?} is not known", graph.name_of(id))))
    };
    let mut buffers = Vec::with_capacity(inputs.len());
    for &id in inputs {
        let len = ortrain_graph::byte_length(dtype_of(id)?, &dims_of(id)?)
            .map_err(|error| Error::Graph(format!("{:?}: {error}", graph.name_of(id))))?
            / dtype_of(id)?.size();
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
        for id in node.present_outputs() {
            // Sizes that overflow are refused here, before a lowering multiplies them.
            if let ValueType::Tensor(dtype, _) = graph.value(id).ty {
                ortrain_graph::byte_length(dtype, &dims_of(id)?).map_err(|error| {
                    Error::at(
                        graph,
                        node,
                        OpError::Invalid(format!("output {:?}: {error}", graph.name_of(id))),
                    )
                })?;
            }
        }
        let op = build(graph, node)?;
        let label: Arc<str> = graph.node_label(node).into();
        let mut cx = Lower { graph, node, builder: &mut builder, values: &mut values, label };
        op.lower(&mut cx).map_err(|source| Error::at(graph, node, source))?;
    }
    let mut results = Vec::with_capacity(outputs.len());
    let mut shapes = Vec::with_capacity(outputs.len());
    for &id in outputs {
        let buffer = match (values.buffers.get(&id), &graph.value(id).constant) {
            (Some(&buffer), _) => buffer,
            (None, Some(tensor)) => builder.constant(graph.name_of(id), tensor),
            (None, None) => {
                return Err(Error::Graph(format!("nothing makes output {:?}", graph.name_of(id))));
            }
        };
        results.push(buffer);
        shapes.push(dims_of(id)?);
    }
    Ok((builder.finish(buffers, results)?, shapes))
}
