//! `SequenceMap` over the parameters of a state: one graph applied to every tensor of a plane.
//!
//! An optimizer model applies the step of one parameter to each parameter. A step of element-wise operations and sums
//! over a parameter becomes one nest over the plane, with a segment for each parameter.

use std::sync::Arc;

use ortrain_expr::{Access, Builder, Expr, Inst, ReduceOp, Reg, Segments, Type};
use ortrain_graph::{Attr, Attrs, DType, Dim, Graph, Node, Shape, ValueId, ValueType};
use ortrain_program::{BufferId, BufferLocation, Instruction, Nest, Operand, ProgramBuilder};
use rustc_hash::FxHashMap;

use crate::infer::Infer;
use crate::lower::{Lower, LoweringPasses, PlanePart, ValueBuffers};
use crate::op::{Definition, Op};
use crate::{Error, OpError};

/// Domain of internal operators, which no file contains.
pub(crate) const DOMAIN: &str = "ortrain.optimizer";
pub(super) const MAP: &str = "MapTensors";
const CONCAT: &str = "ConcatScalars";
const SNAPSHOT: &str = "Snapshot";
/// Attribute with the graph of one tensor.
const BODY: &str = "body";
/// Attribute with the column of each input in the settings table, or -1.
const SETTING_COLUMNS: &str = "columns";
/// Attribute with the index of the input that each output overwrites, or -1.
const OVERWRITTEN_INPUTS: &str = "places";
/// Name of the input with the settings table, which has a row for each parameter.
pub(super) const SETTINGS: &str = "settings";

/// Tensor lengths that a body is compiled for. Both results must be equal: the step must not depend on the length.
const PROBE_LENGTHS: [usize; 2] = [448, 320];

/// Inputs of an optimizer model after [`bind`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BoundInputs {
    /// Names of the sequences that the model updates, in the order of its inputs: the slots of the optimizer.
    pub slots: Vec<String>,
    /// Names of the columns of the settings table.
    pub columns: Vec<String>,
}

fn is_sequence(graph: &Graph, id: ValueId) -> bool {
    matches!(graph.value(id).ty, ValueType::Sequence(_))
}

/// Maps each output sequence to the input sequence that it overwrites.
pub(super) fn overwritten_inputs(graph: &Graph) -> Result<FxHashMap<ValueId, ValueId>, Error> {
    let mut overwritten: FxHashMap<ValueId, ValueId> = FxHashMap::default();
    for &output in graph.outputs.iter().filter(|&&output| is_sequence(graph, output)) {
        let name = graph.name_of(output);
        let named_input = name.strip_prefix("updated_").and_then(|name| graph.find(name));
        let candidate = named_input.filter(|id| graph.inputs.contains(id) && is_sequence(graph, *id));
        let Some(input) = candidate else {
            return Err(Error::Graph(format!(
                "its output {name:?} is a sequence that updates no input; name it \"updated_\" followed by the \
                 name of the input (for example \"updated_params\")"
            )));
        };
        overwritten.insert(output, input);
    }
    Ok(overwritten)
}

/// Returns the slots and settings of an optimizer model: its input sequences except `params` and `gradients`.
///
/// # Errors
/// Returns an error if an output sequence does not overwrite an input.
pub fn bound_inputs(graph: &Graph) -> Result<BoundInputs, Error> {
    bound_inputs_with_slots(graph, &[])
}

/// Returns the slots and settings of an optimizer model. The sequences in `read_slots` are slots too, even if the model
/// does not update them.
fn bound_inputs_with_slots(graph: &Graph, read_slots: &[&str]) -> Result<BoundInputs, Error> {
    let overwritten = overwritten_inputs(graph)?;
    let mut bound = BoundInputs::default();
    for &id in graph.inputs.iter().filter(|&&id| is_sequence(graph, id)) {
        let name = graph.name_of(id).to_owned();
        if name == "params" || name == "gradients" {
            continue;
        }
        let is_slot = overwritten.values().any(|&input| input == id) || read_slots.contains(&name.as_str());
        if is_slot { bound.slots.push(name) } else { bound.columns.push(name) }
    }
    Ok(bound)
}

/// Type and extent of an input of a body.
#[derive(Clone, Copy)]
pub(super) enum ValueKind {
    Element(DType),
    PerTensor(DType),
    Global(DType),
}

impl ValueKind {
    pub(super) fn setting() -> ValueKind {
        ValueKind::PerTensor(DType::F64)
    }
}

/// Binds an optimizer model to planes of a state. Returns `None` if the graph has no `SequenceMap`.
///
/// Afterwards the inputs are the graph's own tensors, the sequences `params`, `gradients` and slots, and the table
/// `settings` (`f64`, a row for each parameter). Output sequences overwrite the inputs that they are named after, and
/// are no longer outputs.
///
/// # Errors
/// Returns an error if an output sequence does not overwrite an input, or an input is read after it was overwritten.
pub fn bind(graph: &mut Graph) -> Result<Option<BoundInputs>, Error> {
    bind_with_slots(graph, &[])
}

/// Binds a model as [`bind`]. The sequences in `read_slots` are slots too, even if the model does not update them.
///
/// # Errors
/// As [`bind`].
pub fn bind_with_slots(graph: &mut Graph, read_slots: &[&str]) -> Result<Option<BoundInputs>, Error> {
    let is_map = |node: &Node| node.domain.is_empty() && &*node.op == "SequenceMap";
    if !graph.nodes.iter().any(is_map) {
        return Ok(None);
    }
    let overwritten = overwritten_inputs(graph)?;
    let bound = bound_inputs_with_slots(graph, read_slots)?;
    let columns: FxHashMap<ValueId, usize> = (bound.columns.iter().enumerate())
        .filter_map(|(column, name)| Some((graph.find(name)?, column)))
        .collect();
    let table = ValueType::Tensor(
        DType::F64,
        Some([Dim::symbol("parameters"), bound.columns.len().into()].into_iter().collect()),
    );
    let settings = graph.add_value(SETTINGS, table);
    let mut scalars: Vec<ValueId> = Vec::new();
    for at in 0..graph.nodes.len() {
        if is_map(&graph.nodes[at]) {
            bind_map(graph, at, &overwritten, &columns, settings)?;
            scalars.extend(graph.nodes[at].present_outputs());
            continue;
        }
        let node = &mut graph.nodes[at];
        let first = node.inputs.first().copied().flatten();
        if node.domain.is_empty()
            && &*node.op == "ConcatFromSequence"
            && first.is_some_and(|id| scalars.contains(&id))
        {
            let int = |name: &str| node.attrs.int(name).ok().flatten().unwrap_or(0);
            if (int("axis"), int("new_axis")) != (0, 1) {
                let source = OpError::unsupported("for scalars only axis 0 and new_axis 1 are supported");
                return Err(Error::at(graph, &graph.nodes[at], source));
            }
            (node.domain, node.op) = (DOMAIN.into(), CONCAT.into());
            // The table has one row for each scalar.
            node.inputs.push(Some(settings));
        }
    }
    graph.inputs.retain(|id| !columns.contains_key(id));
    graph.inputs.push(settings);
    graph.outputs.retain(|id| !overwritten.contains_key(id));
    Ok(Some(bound))
}

/// Converts a `SequenceMap` to the internal operator `MapTensors`.
fn bind_map(
    graph: &mut Graph,
    at: usize,
    overwritten: &FxHashMap<ValueId, ValueId>,
    columns: &FxHashMap<ValueId, usize>,
    settings: ValueId,
) -> Result<(), Error> {
    let mut node = graph.nodes[at].clone();
    let fail = |text: String| Err(Error::at(graph, &graph.nodes[at], OpError::unsupported(text)));
    let mut ports = Vec::with_capacity(node.outputs.len());
    for output in &node.outputs {
        let known = output.and_then(|id| overwritten.get(&id)).copied();
        let Some(state_input) = known else {
            ports.push(-1);
            continue;
        };
        let name = graph.name_of(state_input);
        let reads = |node: &Node| node.present_inputs().any(|id| id == state_input);
        if graph.nodes[at + 1..].iter().any(reads) {
            return fail(format!(
                "it updates {name:?}, which a later node reads; read {name:?} before the update"
            ));
        }
        let Some(port) = node.inputs.iter().position(|&input| input == Some(state_input)) else {
            return fail(format!("it updates {name:?} but does not read {name:?}; make it an input"));
        };
        ports.push(port as i64);
    }
    let which: Vec<i64> = (node.inputs.iter())
        .map(|input| input.and_then(|id| columns.get(&id)).map_or(-1, |&column| column as i64))
        .collect();
    for input in &mut node.inputs {
        if input.is_some_and(|id| columns.contains_key(&id)) {
            *input = Some(settings);
        }
    }
    (node.domain, node.op) = (DOMAIN.into(), MAP.into());
    node.attrs.0.insert(SETTING_COLUMNS.into(), Attr::Ints(which));
    node.attrs.0.insert(OVERWRITTEN_INPUTS.into(), Attr::Ints(ports));
    graph.nodes[at] = node;
    Ok(())
}

/// Application of one graph to every tensor of a sequence.
pub(super) struct MapTensors {
    body: Graph,
    columns: Vec<i64>,
    overwritten: Vec<i64>,
}

impl MapTensors {
    pub(super) fn column(&self, k: usize) -> Option<usize> {
        self.columns.get(k).and_then(|&column| usize::try_from(column).ok())
    }

    /// Returns the index of the input that output `k` overwrites.
    fn overwritten_input(&self, k: usize) -> Option<usize> {
        self.overwritten.get(k).and_then(|&port| usize::try_from(port).ok())
    }

    /// Returns the body with inputs of these types, with inferred types and folded constants.
    fn typed_body(
        &self,
        types: Vec<ValueType>,
        infer: fn(&mut Graph) -> Result<bool, Error>,
    ) -> Result<Graph, OpError> {
        let mut body = self.body.clone();
        if types.len() != body.inputs.len() {
            let (formal, input_count) = (body.inputs.len(), types.len());
            return Err(OpError::invalid(format!("it has {input_count} inputs, but {BODY} takes {formal}")));
        }
        for (id, ty) in body.inputs.clone().into_iter().zip(types) {
            body.value_mut(id).ty = ty;
        }
        // Types that the file declares for inner values may not fit these input types.
        let produced: Vec<ValueId> = body.nodes.iter().flat_map(Node::present_outputs).collect();
        produced.into_iter().for_each(|id| body.value_mut(id).ty = ValueType::Unknown);
        let nested = |error: Error| OpError::Subgraph(Box::new(error));
        infer(&mut body).map_err(nested)?;
        Ok(body)
    }
}

impl Op for MapTensors {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let types = (0..cx.node().inputs.len())
            .map(|k| match cx.ty(k) {
                _ if self.column(k).is_some() => ValueType::tensor(DType::F64, &[]),
                ValueType::Sequence(dtype) => ValueType::Tensor(*dtype, None),
                other => other.clone(),
            })
            .collect();
        let body = self.typed_body(types, cx.passes.infer)?;
        for (k, &id) in body.outputs.iter().enumerate().take(cx.node().outputs.len()) {
            let dtype = body.value(id).ty.dtype();
            let dtype =
                dtype.ok_or_else(|| OpError::invalid(format!("the type of output {k} is not known")))?;
            cx.set_output_type(k, ValueType::Sequence(dtype));
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let count = cx.node().inputs.len();
        let mut sequences: Vec<Option<Vec<PlanePart>>> = Vec::with_capacity(count);
        for k in 0..count {
            let bound = self.column(k).is_none() && cx.is_sequence(k);
            sequences.push(if bound { Some(cx.planes(k)?) } else { None });
        }
        let planes = sequences.iter().flatten().next().map_or(0, Vec::len);
        if sequences.iter().flatten().any(|parts| parts.len() != planes) {
            return Err(OpError::invalid("its sequences have tensors of different types"));
        }
        let mut first_row = 0;
        let tensors: usize =
            sequences.iter().flatten().next().into_iter().flatten().map(|part| part.tensors.len()).sum();
        let tables: Vec<Option<BufferId>> = (0..cx.node().outputs.len())
            .map(|k| match self.overwritten_input(k) {
                Some(_) => None,
                None => cx.has_output(k).then(|| cx.alloc_scalars(k, tensors)),
            })
            .collect();
        for plane in 0..planes {
            let parts: Vec<Option<&PlanePart>> =
                sequences.iter().map(|parts| parts.as_ref().and_then(|parts| parts.get(plane))).collect();
            self.lower_plane(cx, &parts, &tables, first_row)?;
            first_row += parts.iter().flatten().next().map_or(0, |part| part.tensors.len());
        }
        for k in 0..cx.node().outputs.len() {
            if let Some(port) = self.overwritten_input(k) {
                let parts = cx.planes(port)?;
                cx.set_planes(k, parts);
            }
        }
        Ok(())
    }

    fn writes_state(&self) -> bool {
        self.overwritten.iter().any(|&port| port >= 0)
    }
}

/// Access to an input of the body in a nest over a plane.
#[derive(Clone, Copy)]
enum InputAccess {
    /// One value for each element.
    Element(DType),
    /// One value for each tensor.
    PerTensor(DType),
    /// Column of the settings table.
    Setting(usize),
    /// One value for all tensors.
    Global,
}

impl MapTensors {
    /// Emits the instruction for one plane. The tensors of the plane use the rows of the settings table from
    /// `first_row` on.
    fn lower_plane(
        &self,
        cx: &mut Lower<'_>,
        parts: &[Option<&PlanePart>],
        tables: &[Option<BufferId>],
        first_row: usize,
    ) -> Result<(), OpError> {
        let Some(&leader) =
            parts.iter().flatten().find(|part| !part.is_dense()).or_else(|| parts.iter().flatten().next())
        else {
            return Ok(());
        };
        let kinds = (0..parts.len())
            .map(|k| match (self.column(k), parts[k]) {
                (Some(column), _) => Ok(InputAccess::Setting(column)),
                (None, Some(part)) if part.has_same_layout(leader) => Ok(InputAccess::Element(part.dtype)),
                (None, Some(part)) if part.is_dense() && part.tensors.len() == leader.tensors.len() => {
                    Ok(InputAccess::PerTensor(part.dtype))
                }
                (None, Some(_)) => Err(OpError::invalid(format!(
                    "sequence {k} and the first sequence have tensors of different sizes"
                ))),
                (None, None) if cx.dims(k).iter().product::<usize>() == 1 => Ok(InputAccess::Global),
                (None, None) => Err(OpError::unsupported(format!(
                    "input {k} has shape {:?}, expected a sequence or one element",
                    cx.dims(k)
                ))),
            })
            .collect::<Result<Vec<InputAccess>, OpError>>()?;
        let lifted = self.compile_body(cx, &kinds)?;
        let segments =
            Segments::new(leader.tensors.iter().map(|tensor| tensor.start..tensor.start + tensor.len));
        let per_tensor =
            !lifted.reductions.is_empty() || (0..lifted.outputs).any(|k| !lifted.is_per_element[k]);
        let mut nest = cx.nest_of_segments(segments, leader.len, usize::from(per_tensor));
        let buffers: Vec<BufferId> = (0..kinds.len())
            .map(|k| match parts[k] {
                Some(part) => cx.plane_buffer(part, &self.input_label(k)),
                None => cx.input(k),
            })
            .collect();
        let columns = (0..kinds.len()).find(|&k| self.column(k).is_some()).map_or(0, |k| cx.dims(k)[1]);
        let values = {
            let mut loaded: Vec<Option<Reg>> = vec![None; kinds.len()];
            for slot in lifted.loads() {
                let (offset, strides) = match kinds[slot] {
                    InputAccess::Element(_) => (0, [0, 1]),
                    InputAccess::PerTensor(_) => (0, [1, 0]),
                    InputAccess::Setting(column) => (first_row * columns + column, [columns as isize, 0]),
                    InputAccess::Global => (0, [0, 0]),
                };
                loaded[slot] = Some(nest.load_strided(cx, buffers[slot], offset, &strides));
            }
            nest.b.inline(&lifted.expr, |_, slot, _| loaded[slot].expect("every load has a value"))
        };
        let (results, sums) = values.split_at(lifted.outputs);
        for (&(op, _), &value) in lifted.reductions.iter().zip(sums) {
            nest.reduce(op, value);
        }
        for (k, &value) in results.iter().enumerate().take(cx.node().outputs.len()) {
            if !cx.has_output(k) {
                continue;
            }
            let (buffer, offset, kind) = match (self.overwritten_input(k), tables[k]) {
                (Some(port), _) => (buffers[port], 0, kinds[port]),
                (None, Some(table)) => (table, first_row, InputAccess::PerTensor(cx.buffer_dtype(table))),
                (None, None) => continue,
            };
            let strides = match kind {
                InputAccess::Element(_) => [0, 1],
                InputAccess::PerTensor(_) if !lifted.is_per_element[k] => [1, 0],
                _ => {
                    return Err(OpError::unsupported(format!(
                        "output {k} has a value for each element, but the sequence that it updates has one for \
                         each tensor"
                    )));
                }
            };
            nest.store_strided(cx, buffer, offset, strides.into_iter().collect(), value);
        }
        cx.emit(nest.instruction())
    }

    fn input_label(&self, k: usize) -> String {
        self.body.inputs.get(k).map_or_else(String::new, |&id| self.body.name_of(id).to_owned())
    }

    /// Compiles the body to one expression.
    fn compile_body(&self, cx: &Lower<'_>, kinds: &[InputAccess]) -> Result<CompiledBody, OpError> {
        let kinds: Vec<ValueKind> = (kinds.iter().enumerate())
            .map(|(k, kind)| match *kind {
                InputAccess::Element(dtype) => ValueKind::Element(dtype),
                InputAccess::PerTensor(dtype) => ValueKind::PerTensor(dtype),
                InputAccess::Setting(_) => ValueKind::setting(),
                InputAccess::Global => ValueKind::Global(cx.dtype(k)),
            })
            .collect();
        self.compile_for(cx.passes, &kinds)
    }

    pub(super) fn compile_for(
        &self,
        passes: LoweringPasses,
        kinds: &[ValueKind],
    ) -> Result<CompiledBody, OpError> {
        let [first, other] = PROBE_LENGTHS.map(|length| {
            let types = kinds.iter().map(|kind| match *kind {
                ValueKind::Element(dtype) => ValueType::tensor(dtype, &[length]),
                ValueKind::PerTensor(dtype) => ValueType::tensor(dtype, &[]),
                ValueKind::Global(dtype) => ValueType::tensor(dtype, &[1]),
            });
            compile(passes, &self.typed_body(types.collect(), passes.infer)?, length)
        });
        let (first, other) = (first?, other?);
        if first != other {
            return Err(OpError::unsupported("its formula depends on the sizes of tensors"));
        }
        Ok(first)
    }
}

/// Graph of one tensor as an expression of its elements.
#[derive(Debug, PartialEq)]
pub(super) struct CompiledBody {
    /// Expression with the outputs, then the values to reduce. Load `k` is input `k`.
    expr: Expr,
    /// Number of outputs.
    outputs: usize,
    /// Reductions over the tensor: the operation and the reduced value.
    reductions: Vec<(ReduceOp, Reg)>,
    /// True for each output that has a value for each element.
    is_per_element: Vec<bool>,
}

impl CompiledBody {
    /// Returns the inputs that the expression reads.
    fn loads(&self) -> Vec<usize> {
        let slot = |&(inst, _): &(Inst, Type)| match inst {
            Inst::Load(slot) => Some(usize::from(slot)),
            _ => None,
        };
        let mut loads: Vec<usize> = self.expr.insts().iter().filter_map(slot).collect();
        loads.sort_unstable();
        loads.dedup();
        loads
    }
}

/// Value of the body.
#[derive(Clone, Copy)]
struct Value {
    reg: Reg,
    /// True if there is a value for each element.
    is_per_element: bool,
    /// True if the value was rounded to a narrower type, which the expression cannot reproduce.
    is_rounded: bool,
}

/// Compiles a body to an expression, for tensors of `length` elements.
fn compile(passes: LoweringPasses, body: &Graph, length: usize) -> Result<CompiledBody, OpError> {
    let nested = |error: Error| OpError::Subgraph(Box::new(error));
    let mut builder = ProgramBuilder::new();
    let mut values = ValueBuffers::default();
    let mut b = Builder::new();
    let mut known: FxHashMap<BufferId, Value> = FxHashMap::default();
    let len_of = |id: ValueId| {
        body.value(id).ty.shape().and_then(Shape::concrete).map(|dims| dims.iter().product::<usize>())
    };
    for (k, &id) in body.inputs.iter().enumerate() {
        let dtype = body.value(id).ty.dtype().expect("inputs have types");
        let len = len_of(id).expect("inputs have shapes");
        let buffer = builder.work(body.name_of(id), dtype, len);
        values.buffers.insert(id, buffer);
        known.insert(
            buffer,
            Value { reg: b.load(k, Type::of(dtype)), is_per_element: len == length, is_rounded: false },
        );
    }
    let mut sums = Vec::new();
    let mut done = 0;
    for node in &body.nodes {
        if node.present_outputs().all(|id| body.value(id).constant.is_some()) {
            continue;
        }
        let label: Arc<str> = body.node_label(node).into();
        let mut cx = Lower { passes, graph: body, node, builder: &mut builder, values: &mut values, label };
        (passes.lower_node)(&mut cx).map_err(|source| nested(Error::at(body, node, source)))?;
        while let Some(instruction) = builder.instructions().nth(done).cloned() {
            append_instruction(&instruction, length, &builder, &mut b, &mut known, &mut sums)
                .map_err(|source| nested(Error::at(body, node, source)))?;
            done += 1;
        }
    }
    let mut results = Vec::with_capacity(body.outputs.len());
    for &id in &body.outputs {
        let buffer = match values.buffers.get(&id) {
            Some(&buffer) => buffer,
            None => builder.constant(
                body.name_of(id),
                body.value(id)
                    .constant
                    .as_ref()
                    .ok_or_else(|| OpError::invalid("no node computes an output"))?,
            ),
        };
        results.push(buffer_value(buffer, &builder, &mut b, &known)?);
    }
    let varies = results.iter().map(|value| value.is_per_element).collect();
    let outputs = results.len();
    let regs: Vec<Reg> =
        results.iter().map(|value| value.reg).chain(sums.iter().map(|&(_, reg)| reg)).collect();
    let expr = b.finish(&regs);
    let sums = sums.iter().zip(&expr.outputs()[outputs..]).map(|(&(op, _), &reg)| (op, reg)).collect();
    Ok(CompiledBody { outputs, reductions: sums, is_per_element: varies, expr })
}

/// Returns the value of a buffer that was written before, or that is a constant of one element.
fn buffer_value(
    buffer: BufferId,
    builder: &ProgramBuilder,
    b: &mut Builder,
    known: &FxHashMap<BufferId, Value>,
) -> Result<Value, OpError> {
    if let Some(&value) = known.get(&buffer) {
        return Ok(value);
    }
    let tensor = builder.constant_of(buffer).filter(|tensor| tensor.len() == 1);
    let tensor = tensor.ok_or_else(|| OpError::unsupported("it reads a constant of several elements"))?;
    let ty = Type::of(tensor.dtype());
    Ok(Value { reg: b.constant(ty, tensor.to_f64()[0]), is_per_element: false, is_rounded: false })
}

fn not_elementwise_error() -> OpError {
    OpError::unsupported(
        "it is not element-wise; the step of an optimizer may combine the elements of a parameter at the same \
         position, and sum all of them",
    )
}

/// Appends the computation of an instruction to the expression.
fn append_instruction(
    instruction: &Instruction,
    length: usize,
    builder: &ProgramBuilder,
    b: &mut Builder,
    known: &mut FxHashMap<BufferId, Value>,
    sums: &mut Vec<(ReduceOp, Reg)>,
) -> Result<(), OpError> {
    let Instruction::Nest(nest) = instruction else {
        return Err(not_elementwise_error());
    };
    let points: usize = nest.dims.iter().product();
    let outer: usize = nest.outer_dims().iter().product();
    if points != 1 && points != length || nest.inner > 0 && outer != 1 {
        return Err(not_elementwise_error());
    }
    let mut loads = Vec::with_capacity(nest.loads.len());
    for Operand { buffer, access } in nest.load_operands() {
        let value = buffer_value(*buffer, builder, b, known)?;
        if value.is_rounded || !accesses_own_element(access, nest, value.is_per_element) {
            return Err(not_elementwise_error());
        }
        loads.push(value);
    }
    let base = sums.len();
    let mut computed: Vec<(Reg, bool)> = Vec::with_capacity(nest.expr.insts().len());
    for &(inst, ty) in nest.expr.insts() {
        let varies = inst.operands().any(|reg| computed[usize::from(reg.0)].1);
        let at = |reg: Reg| computed[usize::from(reg.0)].0;
        let value = match inst {
            Inst::Load(slot) => {
                let load = loads[usize::from(slot)];
                (b.convert(load.reg, ty), load.is_per_element)
            }
            Inst::Reduced(k) => {
                let k = u8::try_from(base + usize::from(k))
                    .map_err(|_| OpError::unsupported("it has too many sums"))?;
                (b.reduced(usize::from(k), ty), false)
            }
            Inst::LoadAt(..) | Inst::Coordinate(_) | Inst::Run(_) | Inst::Guard(..) | Inst::Random(..) => {
                return Err(not_elementwise_error());
            }
            Inst::Unary(op, x) => (b.unary(op, at(x)), varies),
            Inst::Binary(op, x, y) => (b.binary(op, at(x), at(y)), varies),
            Inst::Compare(op, x, y) => (b.compare(op, at(x), at(y)), varies),
            Inst::Select(x, y, z) => (b.select(at(x), at(y), at(z)), varies),
            Inst::Convert(x) => (b.convert(at(x), ty), varies),
            other @ Inst::Const(_) => (b.push(other, ty), false),
        };
        computed.push(value);
    }
    for reduction in &nest.reductions {
        sums.push((reduction.op, computed[usize::from(reduction.value.0)].0));
    }
    for (&Operand { buffer, ref access }, reg) in nest.stores.iter().zip(nest.expr.outputs()) {
        let (reg, varies) = computed[usize::from(reg.0)];
        let narrow = access.dtype.size() < 4 && access.dtype != DType::Bool;
        let covers_buffer = builder.buffer(buffer).len == length;
        if narrow && !access.dtype.is_float()
            || !accesses_own_element(access, nest, covers_buffer)
            || known.contains_key(&buffer)
        {
            return Err(not_elementwise_error());
        }
        known.insert(buffer, Value { reg, is_per_element: varies, is_rounded: narrow });
    }
    Ok(())
}

/// Returns true if the access touches, at each point of the nest, the element with the point's index, or always the
/// only element.
fn accesses_own_element(access: &Access, nest: &Nest, varies: bool) -> bool {
    let strides = &access.strides;
    let fits = if varies {
        let contiguous_access = Access::contiguous(access.dtype, &nest.dims);
        (nest.dims.iter().zip(strides).zip(&contiguous_access.strides))
            .all(|((&dim, stride), expected)| dim == 1 || stride == expected)
    } else {
        nest.dims.iter().zip(strides).all(|(&dim, &stride)| dim == 1 || stride == 0)
    };
    fits && access.offset == 0
}

/// Conversion of a sequence of scalars to a tensor.
struct ConcatScalars;

impl Op for ConcatScalars {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        let ValueType::Sequence(dtype) = cx.ty(0) else {
            return Err(OpError::invalid(format!("input 0 is {}, expected a sequence", cx.ty(0))));
        };
        let count = cx.shape(1).map(|table| [table[0].clone()].into_iter().collect());
        cx.set_output(0, *dtype, count);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        cx.alias(0, 0);
        Ok(())
    }
}

/// Copy of a tensor in a plane, which may be overwritten before the tensor is read. Other tensors are aliased.
struct Snapshot;

impl Op for Snapshot {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        cx.set_output_type(0, cx.ty(0).clone());
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let buffer = cx.input(0);
        if !matches!(cx.builder.buffer(buffer).location, BufferLocation::Plane(..)) {
            cx.alias(0, 0);
            return Ok(());
        }
        let (dims, dtype) = (cx.dims(0), cx.dtype(0));
        let copy = cx.output(0);
        let mut nest = cx.nest(&dims, 0);
        let value = nest.load_broadcast(buffer, dtype, &dims);
        nest.store_contiguous(cx, copy, value);
        cx.emit(nest.instruction())
    }
}

/// Adds a node that copies a tensor if it is in a plane.
pub(super) fn add_snapshot(graph: &mut Graph, value: ValueId) -> ValueId {
    let name = format!("{}_new", graph.name_of(value));
    let copy = graph.add_value(&name, graph.value(value).ty.clone());
    graph.nodes.push(Node::new(DOMAIN, SNAPSHOT, &[Some(value)], &[Some(copy)], Attrs::new()));
    copy
}

pub(super) fn read_map(node: &Node) -> Result<MapTensors, OpError> {
    let body = match node.attrs.0.get(BODY) {
        Some(Attr::Graph(body)) => (**body).clone(),
        _ => return Err(OpError::invalid("it has no body")),
    };
    let ints = |name: &str| node.attrs.ints(name).map(Option::unwrap_or_default);
    Ok(MapTensors {
        body,
        columns: ints(SETTING_COLUMNS)?.to_vec(),
        overwritten: ints(OVERWRITTEN_INPUTS)?.to_vec(),
    })
}

fn build_map(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(read_map(node)?))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new(DOMAIN, MAP, &[1], build_map),
        Definition::new(DOMAIN, CONCAT, &[1], |_, _| Ok(Box::new(ConcatScalars))),
        Definition::new(DOMAIN, SNAPSHOT, &[1], |_, _| Ok(Box::new(Snapshot))),
    ]
}
