//! Inference with a model as it is.

mod runs;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ortrain_graph::{DType, Graph, Tensor, ValueId, ValueType};
use ortrain_onnx::{GraphProto, LoadedModel, ModelProto, ValueInfoProto};
use ortrain_ops::passes::{infer::infer, updates::written_inputs};
use ortrain_ops::training::{check_sequences, sequence_input};
use ortrain_ops::{NEWEST_OPSET, PartTensor, PlanePart, Role};
use ortrain_program::{
    Backend, InputBytes, InputView, Memory, PlaneId, Precision, RunError, Workspace, align,
};
use rustc_hash::FxHashSet;

use crate::artifacts::training_model::training_message;
use crate::exec::caller_memory::{describe_input, describe_tensors, is_read_in_place};
use crate::exec::executable_cache::{ExecutableCache, interruptible};
use crate::exec::inputs::{Signature, sequence_error};
use crate::exec::outputs::{Targets, target_spans};
use crate::exec::run_options::RunOptions;
use crate::exec::trace::Trace;
use crate::face::session_options::{ModelMeta, SessionOptions};
use crate::model::graph::{graph_to_run, opset_of};
use crate::{Error, ModelSource, Result, ValueInfo};

/// Sequences of tensors with their element types.
type Sequences<'a> = Vec<(DType, &'a [Tensor])>;

/// Capacity of the cache of prepared runs. Its key consists of the requested outputs, the overridden
/// initializers, and the shapes of values in the caller's memory.
const MAX_PREPARED: usize = 32;

/// A session that runs any ONNX model.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{InputView, InferenceSession, SessionOptions, Tensor, collect};
///
/// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
/// let x = Tensor::f32(&[2, 64], &[0.5; 128]);
/// let results = collect(|deliver| session.run(&[InputView::from(&x)], deliver))?;
/// assert_eq!(results[0].dims(), [2, 10]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct InferenceSession {
    label: String,
    /// Model with its own initializers.
    base: Variant,
    /// Models with overridden initializers, the most recently used one last.
    variants: Vec<Variant>,
    run: RunOptions,
    backend: Arc<dyn Backend>,
    /// Prepared runs, the most recently used one last.
    prepared: Vec<Prepared>,
    work: Workspace,
    outputs: Vec<ValueInfo>,
    overridable: Vec<ValueInfo>,
    /// Model as it was read, if runs can override initializers.
    model: Option<LoadedModel>,
    meta: ModelMeta,
    trace: Option<Trace>,
}

/// A model with overridden initializers.
#[derive(Debug)]
struct Variant {
    /// Indices of these initializers among the overridable ones.
    overridden: Vec<usize>,
    graph: Graph,
    /// Required inputs, then the overridden initializers.
    inputs: Vec<ValueInfo>,
    /// Signature of the tensor inputs.
    signature: Signature,
    /// Inputs that nodes update in place; they are never read in place.
    written: FxHashSet<usize>,
}

impl Variant {
    fn new(label: &str, graph: Graph, overridden: Vec<usize>) -> Result<Variant> {
        let info = |id: &_| ValueInfo::of_tensor_or_sequence(label, &graph, *id);
        let inputs: Vec<ValueInfo> = graph.inputs.iter().map(info).collect::<Result<_>>()?;
        let signature = Signature::new(inputs.iter().filter(|info| !info.sequence).cloned().collect());
        Ok(Variant { overridden, graph, inputs, signature, written: FxHashSet::default() })
    }

    /// Returns true if a run must copy the value of the input at this position.
    fn needs_copy(&self, at: usize, input: &InputView<'_>, targets: &Targets<'_>) -> bool {
        self.written.contains(&at) || !is_read_in_place(input, target_spans(targets))
    }
}

/// Values of a run, in the order of a variant's inputs.
struct OrderedInputs<'a> {
    /// Indices of overridden initializers among the overridable ones.
    overridden: Vec<usize>,
    values: Vec<InputView<'a>>,
}

/// Cache key of a prepared run.
#[derive(Debug, Default, PartialEq, Eq)]
struct PreparedKey {
    /// Requested outputs; `None` for all.
    selected_outputs: Option<Vec<usize>>,
    /// Shapes of the tensors of each sequence among the inputs.
    shapes: Vec<Vec<Vec<usize>>>,
    /// Indices of overridden initializers.
    overridden: Vec<usize>,
    /// Positions and shapes of inputs that are read in place.
    in_place: Vec<(usize, Vec<usize>)>,
}

/// Model and settings of a session.
pub(crate) struct Parts<'a> {
    pub(crate) label: &'a str,
    pub(crate) graph: &'a Graph,
    pub(crate) backend: &'a Arc<dyn Backend>,
    pub(crate) run: &'a RunOptions,
}

/// The model prepared for some of its outputs, and for values of certain sizes.
#[derive(Debug)]
struct Prepared {
    key: PreparedKey,
    runners: ExecutableCache,
    /// Memory of the sequences, in order. Planes with higher ids are values in memory of the caller.
    planes: Vec<Memory>,
    /// Source of each output.
    origins: Vec<Origin>,
}

#[derive(Clone, Copy, Debug)]
enum Origin {
    /// Delivered by the program, at this index.
    Delivered(usize),
    /// Final content of this sequence input.
    Sequence(usize),
}

impl InferenceSession {
    /// Creates a session of a model. Initializers are constants; a run may override initializers that are
    /// also listed as inputs.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::{InferenceSession, SessionOptions};
    ///
    /// let bytes = std::fs::read(setup::MODEL)?;
    /// let session = InferenceSession::new(bytes.into(), SessionOptions::default())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the model cannot be read or run.
    pub fn new(model: ModelSource, options: SessionOptions) -> Result<InferenceSession> {
        let interrupt = options.run.interrupt.clone();
        interruptible(interrupt.as_ref(), || InferenceSession::build(model, options))
    }

    fn build(model: ModelSource, options: SessionOptions) -> Result<InferenceSession> {
        let SessionOptions { run, optimized_model } = options;
        let backend = run.open_backend()?;
        let label = model.label("the model");
        let model = model.load_to_run(None)?;
        let meta = ModelMeta::of(&model.proto);
        let mut graph = graph_to_run(&label, &model)?;
        infer(&mut graph).map_err(|source| Error::model(&label, source))?;
        check_sequences(&graph).map_err(|source| Error::model(&label, source))?;
        if graph.outputs.is_empty() {
            return Err(Error::WrongModel { model: label, reason: "it has no outputs".into() });
        }
        let info = |id: &_| ValueInfo::of_tensor_or_sequence(&label, &graph, *id);
        let outputs = graph.outputs.iter().map(info).collect::<Result<_>>()?;
        let overridable = overridable_infos(&label, &model)?;
        if let Some(path) = optimized_model {
            write_optimized(&label, &model, &graph, &path)?;
        }
        let work = run.workspace(&backend, 0);
        Ok(InferenceSession {
            base: Variant::new(&label, graph, Vec::new())?,
            variants: Vec::new(),
            label,
            run,
            backend,
            prepared: Vec::new(),
            work,
            outputs,
            model: (!overridable.is_empty()).then_some(model),
            overridable,
            meta,
            trace: None,
        })
    }

    /// Changes the backend. Prepared runs are discarded.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::{InferenceSession, SessionOptions, backend};
    ///
    /// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// session.set_backend(&backend("reference", 0)?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the backend does not support the precision of the session; then the session keeps its current
    /// backend.
    pub fn set_backend(&mut self, backend: &Arc<dyn Backend>) -> Result<()> {
        let backend = backend.with_precision(self.run.precision, self.run.bf16_fallback)?;
        self.work = self.run.workspace(&backend, 0);
        self.backend = backend;
        self.prepared.clear();
        Ok(())
    }

    /// Starts to record a trace of every call, until [`InferenceSession::end_trace`].
    pub fn begin_trace(&mut self) {
        self.trace = Some(Trace::new());
    }

    /// Stops recording and returns the trace as a list of events in the Chrome trace format (JSON).
    ///
    /// Returns `None` if no trace was recorded. The trace has at most the first million calls.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # use ortrain::{InferenceSession, SessionOptions};
    /// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// assert_eq!(session.end_trace(), None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn end_trace(&mut self) -> Option<String> {
        self.trace.take().map(|trace| trace.to_json())
    }

    /// Returns the initializers that runs may override: initializers that the model also lists as inputs.
    #[must_use]
    pub fn overridable_initializers(&self) -> &[ValueInfo] {
        &self.overridable
    }

    /// Returns the model and the settings of the session.
    pub(crate) fn session_parts(&self) -> Parts<'_> {
        Parts { label: &self.label, graph: &self.base.graph, backend: &self.backend, run: &self.run }
    }

    /// Returns the metadata of the model.
    #[must_use]
    pub fn meta(&self) -> &ModelMeta {
        &self.meta
    }

    /// Returns the precision of inner products, as set by [`RunOptions::precision`].
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.run.precision
    }

    /// Returns the unit that multiplies bfloat16, as [`Module::bf16_unit`] does.
    ///
    /// [`Module::bf16_unit`]: crate::Module::bf16_unit
    #[must_use]
    pub fn bf16_unit(&self) -> Option<&'static str> {
        self.backend.bf16_unit()
    }

    /// Returns the required inputs of a run, in order.
    #[must_use]
    pub fn inputs(&self) -> &[ValueInfo] {
        &self.base.inputs
    }

    /// Returns the outputs of a run, in order.
    #[must_use]
    pub fn outputs(&self) -> &[ValueInfo] {
        &self.outputs
    }

    /// Creates the model with certain overridden initializers, unless it exists.
    fn make_variant(&mut self, overridden: &[usize]) -> Result<()> {
        if overridden.is_empty() {
            return Ok(());
        }
        if let Some(at) = self.variants.iter().position(|variant| variant.overridden == overridden) {
            self.variants[at..].rotate_left(1);
            return Ok(());
        }
        let Some(model) = &self.model else { return Ok(()) };
        let names: Vec<&str> = overridden.iter().map(|&at| self.overridable[at].name.as_str()).collect();
        let mut proto = model.proto.clone();
        if let Some(graph) = &mut proto.graph {
            graph.initializer.retain(|tensor| !names.contains(&tensor.name.as_str()));
        }
        let mut graph = graph_to_run(&self.label, &model.with_proto(proto))?;
        let (mut required, mut last) = (Vec::new(), vec![None; names.len()]);
        for &id in &graph.inputs {
            match names.iter().position(|name| *name == graph.name_of(id)) {
                Some(at) => last[at] = Some(id),
                None => required.push(id),
            }
        }
        required.extend(last.into_iter().flatten());
        graph.inputs = required;
        infer(&mut graph).map_err(|source| Error::model(&self.label, source))?;
        if self.variants.len() == MAX_PREPARED {
            let gone = self.variants.remove(0);
            self.prepared.retain(|known| known.key.overridden != gone.overridden);
        }
        self.variants.push(Variant::new(&self.label, graph, overridden.to_vec())?);
        Ok(())
    }

    /// Returns the index of the prepared run for a key. If nodes update some of the inputs that should be
    /// read in place, the run is prepared for a key without them.
    fn prepared_index(&mut self, key: &PreparedKey) -> Result<usize> {
        match self.prepared.iter().position(|known| known.key == *key) {
            Some(at) => self.prepared[at..].rotate_left(1),
            None => {
                let prepared = self.prepare(key)?;
                if self.prepared.len() == MAX_PREPARED {
                    self.prepared.remove(0);
                }
                self.prepared.push(prepared);
            }
        }
        Ok(self.prepared.len() - 1)
    }

    fn prepare(&mut self, key: &PreparedKey) -> Result<Prepared> {
        let variant = variant_of(&mut self.base, &mut self.variants, &key.overridden);
        let mut graph = variant.graph.clone();
        if let Some(positions) = &key.selected_outputs {
            graph.outputs = positions.iter().map(|&at| variant.graph.outputs[at]).collect();
            graph.remove_unused();
        }
        let sequences: Vec<ValueId> = (graph.inputs.iter().copied().zip(&variant.inputs))
            .filter_map(|(id, info)| info.sequence.then_some(id))
            .collect();
        let mut origins = Vec::with_capacity(graph.outputs.len());
        let mut delivered = Vec::new();
        for &id in &graph.outputs {
            if !ValueInfo::of_tensor_or_sequence(&self.label, &graph, id)?.sequence {
                origins.push(Origin::Delivered(delivered.len()));
                delivered.push(id);
                continue;
            }
            let input = sequence_input(&graph, id).map_err(|source| Error::model(&self.label, source))?;
            let at = input.and_then(|input| sequences.iter().position(|&sequence| sequence == input));
            origins.push(Origin::Sequence(at.ok_or_else(|| Error::WrongModel {
                model: self.label.clone(),
                reason: format!(
                    "output {:?} is a new sequence; only input sequences that nodes change in place can be returned",
                    graph.name_of(id)
                ),
            })?));
        }
        graph.outputs = delivered;

        let mut planes = Vec::with_capacity(sequences.len());
        let mut roles = Vec::with_capacity(graph.inputs.len());
        for (k, info) in variant.inputs.iter().enumerate() {
            if let Some(position) = key.in_place.iter().position(|(at, _)| *at == k) {
                let id = graph.inputs[k];
                graph.value_mut(id).ty = ValueType::tensor(info.dtype, &key.in_place[position].1);
                roles.push(Role::Plane(PlaneId((sequences.len() + position) as u32), 0));
                continue;
            }
            if !info.sequence {
                roles.push(Role::User);
                continue;
            }
            let ranges = tensor_ranges(info.dtype, &key.shapes[planes.len()]);
            let bytes = ranges.last().map_or(0, |range| align(range.end));
            let plane = PlaneId(planes.len() as u32);
            let size = info.dtype.size();
            let tensors =
                ranges.iter().map(|range| PartTensor { start: range.start / size, len: range.len() / size });
            let tensors = tensors.collect();
            let part = PlanePart { dtype: info.dtype, plane, offset: 0, len: bytes / size, tensors };
            // An empty sequence requires no computation.
            roles.push(Role::Planes(if bytes == 0 { Vec::new() } else { vec![part] }));
            planes.push(self.backend.allocate(bytes, bytes).map_err(RunError::from)?);
        }
        let runners =
            ExecutableCache::new(graph, roles, self.backend.clone()).with_precision(self.run.precision);
        let mut key = PreparedKey {
            selected_outputs: key.selected_outputs.clone(),
            shapes: key.shapes.clone(),
            overridden: key.overridden.clone(),
            in_place: key.in_place.clone(),
        };
        if !key.in_place.is_empty() {
            let inputs = &runners.graph().inputs;
            let writes: FxHashSet<ValueId> = written_inputs(runners.graph()).into_iter().collect();
            let before = key.in_place.len();
            key.in_place.retain(|(at, _)| {
                let clean = !writes.contains(&inputs[*at]);
                if !clean {
                    variant.written.insert(*at);
                }
                clean
            });
            if key.in_place.len() != before {
                return self.prepare(&key);
            }
        }
        Ok(Prepared { key, runners, planes, origins })
    }

    /// Returns the graph and the programs compiled so far, as text.
    #[must_use]
    pub fn dump(&self) -> String {
        let schedules: String = self
            .prepared
            .iter()
            .flat_map(|prepared| prepared.runners.schedules())
            .map(|schedule| schedule.to_string() + "\n")
            .collect();
        format!("{}\n{schedules}", self.base.graph)
    }
}

/// Returns the existing variant with these overridden initializers.
fn variant_of<'a>(
    base: &'a mut Variant,
    variants: &'a mut [Variant],
    overridden: &[usize],
) -> &'a mut Variant {
    variants.iter_mut().find(|variant| variant.overridden == overridden).unwrap_or(base)
}

/// Returns the initializers that runs may override. Before IR version 4, every initializer was also an input,
/// without this meaning.
fn overridable_infos(label: &str, model: &LoadedModel) -> Result<Vec<ValueInfo>> {
    const FIRST_VERSION: i64 = 4;
    let Some(graph) = model.proto.graph.as_ref().filter(|_| model.proto.ir_version >= FIRST_VERSION) else {
        return Ok(Vec::new());
    };
    let initializers: FxHashSet<&str> = graph.initializer.iter().map(|tensor| tensor.name.as_str()).collect();
    let infos: Vec<ValueInfoProto> =
        graph.input.iter().filter(|info| initializers.contains(info.name.as_str())).cloned().collect();
    if infos.is_empty() {
        return Ok(Vec::new());
    }
    // A graph with inputs only.
    let proto = ModelProto {
        graph: Some(GraphProto { input: infos, ..GraphProto::default() }),
        ..ModelProto::default()
    };
    let declared =
        Graph::from_model(&model.with_proto(proto)).map_err(|source| Error::graph(label, source))?;
    declared.inputs.iter().map(|&id| ValueInfo::of_tensor_or_sequence(label, &declared, id)).collect()
}

/// Writes the optimized model, at the opset of the original model.
fn write_optimized(label: &str, model: &LoadedModel, graph: &Graph, path: &Path) -> Result<()> {
    let message = |opset| training_message(label, &model.proto, graph.clone(), opset);
    // An operator of another domain may have no equivalent in an old opset.
    let mut proto = message(opset_of(&model.proto)).or_else(|_| message(NEWEST_OPSET))?;
    proto.metadata_props.clone_from(&model.proto.metadata_props);
    if let (Some(output_graph), Some(read)) = (&mut proto.graph, &model.proto.graph) {
        output_graph.doc_string.clone_from(&read.doc_string);
        let is_listed =
            |info: &&ValueInfoProto| output_graph.initializer.iter().any(|tensor| tensor.name == info.name);
        let input_infos: Vec<ValueInfoProto> = read.input.iter().filter(is_listed).cloned().collect();
        output_graph.input.extend(input_infos);
    }
    Ok(model.with_proto(proto).save(path)?)
}

/// Checks that values fit the inputs.
fn check_inputs(variant: &mut Variant, inputs: &[InputView<'_>]) -> Result<()> {
    for (info, input) in variant.inputs.iter().zip(inputs) {
        let refuse = |found: String, reason: &str| {
            let (name, expected) = (info.name.clone(), info.to_string());
            Err(Error::Input { name, expected, found, reason: reason.into() })
        };
        match input.bytes {
            InputBytes::Sequence(_) if !info.sequence => return Err(sequence_error(info, input)),
            InputBytes::Sequence(tensors) => {
                if let Some(other) = tensors.iter().find(|tensor| tensor.dtype() != info.dtype) {
                    let other = format!("a sequence with {}{:?}", other.dtype(), other.dims());
                    return refuse(other, "the element types differ");
                }
            }
            InputBytes::Host(_) | InputBytes::Memory(_) if info.sequence => {
                return refuse(describe_input(input), "a tensor is no sequence");
            }
            InputBytes::Host(_) | InputBytes::Memory(_) => {}
        }
    }
    variant.signature.check_described(describe_tensors(inputs).into_iter())
}

/// Returns the byte ranges of the tensors of a sequence in its plane.
fn tensor_ranges(dtype: DType, shapes: &[Vec<usize>]) -> Vec<Range<usize>> {
    let mut end = 0;
    let next_range = |dims: &Vec<usize>| {
        let start = align(end);
        end = start + dims.iter().product::<usize>() * dtype.size();
        start..end
    };
    shapes.iter().map(next_range).collect()
}
