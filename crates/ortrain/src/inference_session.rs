//! Inference with a model as it is.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use ortrain_graph::{DType, Graph, Tensor, ValueId, ValueType, byte_length};
use ortrain_onnx::{GraphProto, LoadedModel, ModelProto, ValueInfoProto};
use ortrain_ops::passes::{infer::infer, updates::written_inputs};
use ortrain_ops::training::{check_sequences, sequence_input};
use ortrain_ops::{NEWEST_OPSET, PartTensor, PlanePart, Role};
use ortrain_program::{
    Backend, Bf16Fallback, Deliver, GradientMode, ITERATION_LIMIT, Interrupt, Memory, PlaneId, Precision,
    RunError, RunInput, Scalars, SlotId, Workspace, align,
};
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use crate::artifacts::training_message;
use crate::executable_cache::{ExecutableCache, interruptible};
use crate::inputs::Signature;
use crate::io_binding::{
    copy_tensor, describe_feeds, is_read_in_place, memory_span, output_spans, spans_overlap,
};
use crate::model_graph::{graph_to_run, opset_of};
use crate::outputs::{OutputWriter, check_destinations};
use crate::trace::Trace;
use crate::value::Value;
use crate::{
    Destination, Error, Feed, Fetch, Lent, ModelSource, Result, ValueInfo, collect, default_backend,
    over_limit,
};

/// Options of an [`InferenceSession`].
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{InferenceSession, SessionOptions, backend};
///
/// let options = SessionOptions::default().backend(backend("cpu", 2)?).memory_limit(64 << 20);
/// let session = InferenceSession::new(setup::MODEL.into(), options)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct SessionOptions {
    /// Backend; the default is [`default_backend`].
    pub backend: Option<Arc<dyn Backend>>,
    /// Memory limit of a run in bytes: constants, values, scratch of kernels. The default is no limit.
    pub memory_limit: Option<usize>,
    /// Maximum iterations of a loop; the default is [`ITERATION_LIMIT`].
    pub iteration_limit: Option<u64>,
    /// Precision of inner products: see [`SessionOptions::precision`].
    pub precision: Precision,
    /// Alternative to AMX for bfloat16 products: see [`SessionOptions::bf16_fallback`].
    pub bf16_fallback: Bf16Fallback,
    /// Interrupt that can end a run early: see [`SessionOptions::interrupt`].
    pub interrupt: Option<Interrupt>,
    /// Output file of the optimized model: see [`SessionOptions::optimized_model`].
    pub optimized_model: Option<PathBuf>,
}

impl SessionOptions {
    /// Sets the backend.
    #[must_use]
    pub fn backend(mut self, backend: Arc<dyn Backend>) -> SessionOptions {
        self.backend = Some(backend);
        self
    }

    /// Sets the memory limit in bytes. A run that would exceed it is rejected before it allocates memory.
    #[must_use]
    pub fn memory_limit(mut self, bytes: usize) -> SessionOptions {
        self.memory_limit = Some(bytes);
        self
    }

    /// Sets the maximum iterations of a loop (default: [`ITERATION_LIMIT`]). A loop that exceeds it stops
    /// with an error that names the loop.
    #[must_use]
    pub fn iteration_limit(mut self, iterations: u64) -> SessionOptions {
        self.iteration_limit = Some(iterations);
        self
    }

    /// Sets an interrupt that can end a run early. It is polled every tenth of a second, between two
    /// instructions.
    #[must_use]
    pub fn interrupt(mut self, interrupt: Interrupt) -> SessionOptions {
        self.interrupt = Some(interrupt);
        self
    }

    /// Sets the precision of inner products (default: [`Precision::F32`]); see [`ModuleOptions::precision`].
    ///
    /// [`ModuleOptions::precision`]: crate::ModuleOptions::precision
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> SessionOptions {
        self.precision = precision;
        self
    }

    /// Sets the alternative to AMX for a precision that needs AMX on a machine without it. The default is an
    /// error.
    #[must_use]
    pub fn bf16_fallback(mut self, fallback: Bf16Fallback) -> SessionOptions {
        self.bf16_fallback = fallback;
        self
    }

    /// Sets a file for the optimized model, before shapes are known: functions are inlined, and every value
    /// has its inferred type.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let folder = tempfile::tempdir()?;
    /// use ortrain::{InferenceSession, SessionOptions};
    ///
    /// let path = folder.path().join("optimized.onnx");
    /// InferenceSession::new(setup::MODEL.into(), SessionOptions::default().optimized_model(&path))?;
    /// let again = InferenceSession::new(path.into(), SessionOptions::default())?;
    /// assert_eq!(again.inputs()[0].name, "x");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn optimized_model(mut self, path: impl Into<PathBuf>) -> SessionOptions {
        self.optimized_model = Some(path.into());
        self
    }
}

/// Sequences of tensors with their element types.
type Sequences<'a> = Vec<(DType, &'a [Tensor])>;

/// Capacity of the cache of prepared runs. Its key consists of the requested outputs, the overridden
/// initializers, and the shapes of values in the caller's memory.
const MAX_PREPARED: usize = 32;

/// A session that runs any ONNX model.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{RunInput, InferenceSession, SessionOptions, Tensor, collect};
///
/// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
/// let x = Tensor::f32(&[2, 64], &[0.5; 128]);
/// let results = collect(|deliver| session.run(&[RunInput::from(&x)], deliver))?;
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
    precision: Precision,
    bf16_fallback: Bf16Fallback,
    backend: Arc<dyn Backend>,
    /// Prepared runs, the most recently used one last.
    prepared: Vec<Prepared>,
    work: Workspace,
    limits: Limits,
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
    fn needs_copy(&self, at: usize, lent: &Lent<'_>, fetches: &[Fetch<'_>]) -> bool {
        self.written.contains(&at) || !is_read_in_place(lent, output_spans(fetches))
    }
}

/// Values of a run, in the order of a variant's inputs.
struct OrderedFeeds<'a> {
    /// Indices of overridden initializers among the overridable ones.
    overridden: Vec<usize>,
    feeds: Vec<Feed<'a>>,
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
    lent: Vec<(usize, Vec<usize>)>,
}

/// Resource limits of runs, and their interrupt.
#[derive(Clone, Debug)]
struct Limits {
    memory: Option<usize>,
    iterations: u64,
    interrupt: Option<Interrupt>,
}

impl Limits {
    /// Creates a workspace on a backend.
    fn workspace(&self, backend: &Arc<dyn Backend>) -> Workspace {
        Workspace::with_limit(backend.clone(), self.memory, 0)
            .iteration_limit(self.iterations)
            .interrupt(self.interrupt.clone())
    }
}

/// Model and settings of a session.
pub(crate) struct Parts<'a> {
    pub(crate) label: &'a str,
    pub(crate) graph: &'a Graph,
    pub(crate) backend: &'a Arc<dyn Backend>,
    pub(crate) precision: Precision,
    pub(crate) limit: Option<usize>,
    pub(crate) iterations: u64,
    pub(crate) interrupt: &'a Option<Interrupt>,
}

/// Metadata of a model.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{InferenceSession, SessionOptions};
///
/// let session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
/// assert_eq!(session.meta().graph_name, "perceptron");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelMeta {
    /// Name of the producer.
    pub producer_name: String,
    /// Name of the graph.
    pub graph_name: String,
    /// Domain of the model, as a reversed host name.
    pub domain: String,
    /// Description of the model.
    pub description: String,
    /// Description of the graph.
    pub graph_description: String,
    /// Version of the model.
    pub version: i64,
    /// Custom entries by key. The last entry with a key counts.
    pub custom: BTreeMap<String, String>,
}

impl ModelMeta {
    pub(crate) fn of(model: &ModelProto) -> ModelMeta {
        let graph = model.graph.as_ref();
        ModelMeta {
            producer_name: model.producer_name.clone(),
            graph_name: graph.map(|graph| graph.name.clone()).unwrap_or_default(),
            domain: model.domain.clone(),
            description: model.doc_string.clone(),
            graph_description: graph.map(|graph| graph.doc_string.clone()).unwrap_or_default(),
            version: model.model_version,
            custom: model
                .metadata_props
                .iter()
                .map(|entry| (entry.key.clone(), entry.value.clone()))
                .collect(),
        }
    }
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
        let interrupt = options.interrupt.clone();
        interruptible(interrupt.as_ref(), || InferenceSession::build(model, options))
    }

    fn build(model: ModelSource, options: SessionOptions) -> Result<InferenceSession> {
        let backend = options.backend.map_or_else(default_backend, Ok)?;
        let backend = backend.with_precision(options.precision, options.bf16_fallback)?;
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
        if let Some(path) = options.optimized_model {
            write_optimized(&label, &model, &graph, &path)?;
        }
        let limits = Limits {
            memory: options.memory_limit,
            iterations: options.iteration_limit.unwrap_or(ITERATION_LIMIT),
            interrupt: options.interrupt,
        };
        let work = limits.workspace(&backend);
        Ok(InferenceSession {
            base: Variant::new(&label, graph, Vec::new())?,
            variants: Vec::new(),
            label,
            precision: options.precision,
            bf16_fallback: options.bf16_fallback,
            backend,
            prepared: Vec::new(),
            work,
            limits,
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
        let backend = backend.with_precision(self.precision, self.bf16_fallback)?;
        self.work = self.limits.workspace(&backend);
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
        let Limits { memory: limit, iterations, ref interrupt } = self.limits;
        let (graph, backend, precision) = (&self.base.graph, &self.backend, self.precision);
        Parts { label: &self.label, graph, backend, precision, limit, iterations, interrupt }
    }

    /// Returns the metadata of the model.
    #[must_use]
    pub fn meta(&self) -> &ModelMeta {
        &self.meta
    }

    /// Returns the precision of inner products, as set by [`SessionOptions::precision`].
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.precision
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

    /// Computes the outputs, and passes them to `deliver` in the order of [`InferenceSession::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
    /// # use ortrain::{InferenceSession, SessionOptions};
    /// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// let mut logits = vec![0; 2 * 10 * 4];
    /// session.run(&inputs[..1], &mut |_, _, _, value| value.copy_to(&mut logits))?;
    /// assert!(logits.iter().any(|byte| *byte != 0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the inputs do not fit, the run fails, or the model has sequence inputs or outputs: use
    /// [`InferenceSession::run_values`] for sequences.
    pub fn run(&mut self, inputs: &[RunInput<'_>], deliver: &mut Deliver<'_>) -> Result<()> {
        self.check_tensors_only("run supports only tensors; call run_values for sequences")?;
        self.base.signature.check(inputs)?;
        let at = self.prepared_index(&PreparedKey::default())?;
        self.execute(at, inputs, &[], deliver)
    }

    /// Computes the outputs and writes them to memory of the caller, in the order of
    /// [`InferenceSession::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
    /// use ortrain::{Destination, InferenceSession, SessionOptions};
    ///
    /// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// let mut logits = [0.0; 20];
    /// session.run_into(&inputs[..1], &mut [Destination::f32(&[2, 10], &mut logits)])?;
    /// assert!(logits.iter().any(|&logit| logit != 0.0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`InferenceSession::run`]; also if number, types or shapes of `outputs` do not match the results.
    /// Then nothing has been written.
    pub fn run_into(&mut self, inputs: &[RunInput<'_>], outputs: &mut [Destination<'_>]) -> Result<()> {
        self.check_tensors_only("run_into supports only tensors; call run_values for sequences")?;
        self.base.signature.check(inputs)?;
        check_destinations(&self.outputs, outputs)?;
        let at = self.prepared_index(&PreparedKey::default())?;
        let known = self.known_output_shapes(at, inputs)?;
        for (info, (output, known)) in self.outputs.iter().zip(outputs.iter().zip(&known)) {
            if let Some(dims) = known {
                output.check(info, info.dtype, dims)?;
            }
        }
        if known.iter().all(Option::is_some) {
            let mut fill = OutputWriter::new(outputs);
            self.execute(at, inputs, &[], &mut |k, dtype, dims, value| fill.write(k, dtype, dims, value))?;
            return fill.finish(&self.outputs);
        }
        // Data-dependent shapes are known after the run.
        let results = collect(|deliver| self.execute(at, inputs, &[], deliver))?;
        for (info, (output, result)) in self.outputs.iter().zip(outputs.iter().zip(&results)) {
            output.check(info, result.dtype(), result.dims())?;
        }
        outputs
            .iter_mut()
            .zip(&results)
            .for_each(|(output, result)| output.bytes.copy_from_slice(result.data()));
        Ok(())
    }

    fn check_tensors_only(&self, help: &str) -> Result<()> {
        match self.base.inputs.iter().chain(&self.outputs).find(|info| info.sequence) {
            Some(info) => Err(Error::Argument(format!("{:?} is {info}; {help}", info.name))),
            None => Ok(()),
        }
    }

    /// Computes all outputs, or only the outputs at the positions `only`, in this order.
    ///
    /// With `only`, values that these outputs do not need are not computed. Inputs are in the order of
    /// [`InferenceSession::inputs`] and remain unchanged, even if the model updates sequences in place.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::{InferenceSession, ModelSource, SessionOptions, Tensor, Value};
    ///
    /// let model = setup::artifacts()?.optimizer_model.expect("it was asked for");
    /// let mut session = InferenceSession::new(ModelSource::from_proto(&model)?, SessionOptions::default())?;
    /// let sequence = |value| Value::Sequence(vec![Tensor::f32(&[2], &[value; 2])]);
    /// let (rate, step) = (Tensor::f32(&[1], &[0.1]), Tensor::i64(&[1], &[1]));
    /// let inputs = [rate.into(), step.into(), sequence(1.0), sequence(0.5), sequence(0.0), sequence(0.0)];
    /// let updated = session.run_values(&inputs, Some(&[0]))?;
    /// assert_eq!(updated.len(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the inputs do not fit, a position has no output, or the run fails.
    pub fn run_values(&mut self, inputs: &[Value], only: Option<&[usize]>) -> Result<Vec<Value>> {
        if inputs.len() != self.base.inputs.len() {
            return Err(Error::InputCount {
                expected: self.base.inputs.len(),
                names: self.base.inputs.iter().map(|info| info.name.clone()).collect(),
                found: inputs.len(),
            });
        }
        let feeds = inputs.iter().map(Feed::from).collect();
        let all_outputs: Vec<usize> = (0..self.outputs.len()).collect();
        let fetch = |&output: &usize| Fetch { output, into: None };
        let fetches: Vec<Fetch<'_>> = only.unwrap_or(&all_outputs).iter().map(fetch).collect();
        let results =
            self.run_ordered(OrderedFeeds { overridden: Vec::new(), feeds }, &fetches, only.is_some(), None)?;
        Ok(results.into_iter().flatten().collect())
    }

    /// Computes outputs from inputs by name. Values in memory of the caller are read and written in place
    /// where possible.
    ///
    /// Besides inputs, `feeds` may name [`InferenceSession::overridable_initializers`], to override them for
    /// this run. With `restricted`, only the values for `fetches` are computed; otherwise every output is
    /// computed.
    ///
    /// Returns a value for each of `fetches`, or `None` if it was written into memory. An output may
    /// overwrite the memory of an input.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use std::sync::Arc;
    ///
    /// use ortrain::{DType, Feed, Fetch, InferenceSession, Lent, Memory, SessionOptions};
    ///
    /// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// let (x, logits) = (Arc::new(Memory::new(2 * 64 * 4)), Arc::new(Memory::new(2 * 10 * 4)));
    /// x.write(0, &1_f32.to_le_bytes())?;
    /// let feed = Feed::from(Lent { dtype: DType::F32, dims: &[2, 64], memory: &x });
    /// let into = Some(Lent { dtype: DType::F32, dims: &[2, 10], memory: &logits });
    /// session.run_bound(&[("x", feed)], &[Fetch { output: 0, into }], true)?;
    /// assert!(!logits.is_zero()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If a name is unknown, missing or occurs twice; a value does not fit; memory is too small, read-only,
    /// or shared by two outputs; or the run fails. Then nothing has been written.
    pub fn run_bound(
        &mut self,
        feeds: &[(&str, Feed<'_>)],
        fetches: &[Fetch<'_>],
        restricted: bool,
    ) -> Result<Vec<Option<Value>>> {
        let ordered = self.order_feeds(feeds)?;
        self.run_ordered(ordered, fetches, restricted, None)
    }

    /// Runs like [`InferenceSession::run_bound`], but passes tensors to `deliver` like
    /// [`InferenceSession::run`].
    ///
    /// Tensors are delivered with their index in `fetches`, on the device of the session. Tensors that are
    /// written into memory are not delivered; sequences are returned.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::{Feed, Fetch, InferenceSession, SessionOptions, Tensor};
    ///
    /// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// let x = Tensor::f32(&[2, 64], &[0.5; 128]);
    /// let (feeds, fetches) = ([("x", Feed::from(ortrain::RunInput::from(&x)))], [Fetch { output: 0, into: None }]);
    /// let mut logits = None;
    /// session.run_delivered(&feeds, &fetches, true, &mut |_, dtype, dims, value| {
    ///     logits = Some(value.to_tensor(dtype, dims)?);
    ///     Ok(())
    /// })?;
    /// assert_eq!(logits.expect("it was delivered").dims(), [2, 10]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`InferenceSession::run_bound`], and the errors of `deliver`.
    pub fn run_delivered(
        &mut self,
        feeds: &[(&str, Feed<'_>)],
        fetches: &[Fetch<'_>],
        restricted: bool,
        deliver: &mut Deliver<'_>,
    ) -> Result<Vec<Option<Value>>> {
        let ordered = self.order_feeds(feeds)?;
        self.run_ordered(ordered, fetches, restricted, Some(deliver))
    }

    /// Sorts the values of a run into the order of the inputs.
    fn order_feeds<'v>(&self, feeds: &[(&str, Feed<'v>)]) -> Result<OrderedFeeds<'v>> {
        let find_feed = |name: &str| feeds.iter().find(|(known, _)| *known == name).map(|(_, feed)| *feed);
        let mut ordered = OrderedFeeds { overridden: Vec::new(), feeds: Vec::with_capacity(feeds.len()) };
        for info in &self.base.inputs {
            let missing = || Error::Argument(format!("no value was given for input {:?}", info.name));
            ordered.feeds.push(find_feed(&info.name).ok_or_else(missing)?);
        }
        for (at, info) in self.overridable.iter().enumerate() {
            if let Some(feed) = find_feed(&info.name) {
                ordered.overridden.push(at);
                ordered.feeds.push(feed);
            }
        }
        if ordered.feeds.len() != feeds.len() {
            return Err(self.name_error(feeds));
        }
        Ok(ordered)
    }

    /// Returns the error for an unknown or duplicate name.
    fn name_error(&self, feeds: &[(&str, Feed<'_>)]) -> Error {
        let known: Vec<&str> =
            self.base.inputs.iter().chain(&self.overridable).map(|info| info.name.as_str()).collect();
        let mut names: Vec<&str> = feeds.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        match names.iter().find(|name| !known.contains(name)) {
            Some(name) => {
                Error::Argument(format!("the model has no input {name:?}; it has {}", known.join(", ")))
            }
            None => {
                let twice = names.windows(2).find(|pair| pair[0] == pair[1]).map_or("", |pair| pair[0]);
                Error::Argument(format!("input {twice:?} is given twice"))
            }
        }
    }

    fn run_ordered(
        &mut self,
        ordered: OrderedFeeds<'_>,
        fetches: &[Fetch<'_>],
        restricted: bool,
        deliver: Option<&mut Deliver<'_>>,
    ) -> Result<Vec<Option<Value>>> {
        let count = self.outputs.len();
        if let Some(fetch) = fetches.iter().find(|fetch| fetch.output >= count) {
            let position = fetch.output;
            return Err(Error::Argument(format!(
                "output index {position} is out of range: the model has {count} outputs"
            )));
        }
        check_output_buffers(&self.outputs, fetches)?;
        let OrderedFeeds { overridden, feeds } = ordered;
        self.make_variant(&overridden)?;
        let variant = variant_of(&mut self.base, &mut self.variants, &overridden);
        check_feeds(variant, &feeds)?;

        // Split into values to read in place, values to copy first, and sequences.
        let device = self.backend.device();
        let is_elsewhere = |lent: &Lent<'_>| lent.memory.device() != device;
        let copy = |(k, feed): (usize, &Feed<'_>)| match feed {
            Feed::Lent(lent) if is_elsewhere(lent) || variant.needs_copy(k, lent, fetches) => {
                copy_tensor(feed)
            }
            _ => Ok(None),
        };
        let copies: Vec<Option<Tensor>> = feeds.iter().enumerate().map(copy).collect::<Result<_>>()?;
        let (mut tensors, mut sequences, mut lent) = (Vec::new(), Sequences::new(), Vec::new());
        let mut key = PreparedKey {
            selected_outputs: restricted.then(|| fetches.iter().map(|fetch| fetch.output).collect()),
            ..PreparedKey::default()
        };
        for (k, (feed, copy)) in feeds.iter().zip(&copies).enumerate() {
            match (feed, copy) {
                (_, Some(tensor)) => tensors.push(RunInput::from(tensor)),
                (Feed::Tensor(input), None) => tensors.push(*input),
                (Feed::Lent(value), None) => {
                    key.lent.push((k, value.dims.to_vec()));
                    lent.push(&**value.memory);
                }
                (Feed::Sequence(several), None) => {
                    key.shapes.push(several.iter().map(|tensor| tensor.dims().to_vec()).collect());
                    sequences.push((variant.inputs[k].dtype, *several));
                }
            }
        }
        key.overridden = overridden;
        let at = self.prepared_index(&key)?;
        // Preparation found that nodes update some of these values in place: such values are copied after
        // all.
        if self.prepared[at].key != key {
            let PreparedKey { overridden, .. } = key;
            return self.run_ordered(OrderedFeeds { overridden, feeds }, fetches, restricted, deliver);
        }
        let values = (&tensors[..], &sequences, &lent[..]);
        self.run_prepared(at, values, fetches, deliver).map_err(|error| match lent.is_empty() {
            true => error,
            false => self.explain_with_copies(error, &feeds, &key),
        })
    }

    fn run_prepared(
        &mut self,
        at: usize,
        (tensors, sequences, lent): (&[RunInput<'_>], &Sequences<'_>, &[&Memory]),
        fetches: &[Fetch<'_>],
        mut deliver: Option<&mut Deliver<'_>>,
    ) -> Result<Vec<Option<Value>>> {
        let Prepared { key, planes, origins, .. } = &self.prepared[at];
        let restricted = key.selected_outputs.is_some();
        let sequence_ranges: Vec<Vec<Range<usize>>> = sequences
            .iter()
            .zip(&key.shapes)
            .map(|((dtype, _), shapes)| tensor_ranges(*dtype, shapes))
            .collect();
        for ((plane, (_, several)), ranges) in planes.iter().zip(sequences).zip(&sequence_ranges) {
            for (tensor, tensor_range) in several.iter().zip(ranges) {
                plane.write(tensor_range.start, tensor.data())?;
            }
        }
        let origin = |k: usize, fetch: &Fetch<'_>| origins[if restricted { k } else { fetch.output }];
        let sources: Vec<Origin> = fetches.iter().enumerate().map(|(k, fetch)| origin(k, fetch)).collect();
        let mut sure = true;
        if fetches.iter().any(|fetch| fetch.into.is_some()) {
            let known = self.known_output_shapes(at, tensors)?;
            for (fetch, source) in fetches.iter().zip(&sources) {
                let (Some(into), &Origin::Delivered(position)) = (&fetch.into, source) else { continue };
                match &known[position] {
                    Some(dims) => check_output_buffer(&self.outputs[fetch.output], into, dims)?,
                    None => sure = false,
                }
            }
        }
        let mut delivered: Vec<Option<Tensor>> = vec![None; fetches.len()];
        self.execute(at, tensors, lent, &mut |result_index, dtype, dims, value| {
            let bytes = dims.iter().product::<usize>() * dtype.size();
            for (k, fetch) in fetches.iter().enumerate() {
                match (&sources[k], &fetch.into) {
                    (Origin::Delivered(of), Some(into)) if *of == result_index && sure => {
                        value.write_to(into.memory, bytes)?;
                    }
                    (Origin::Delivered(of), into) if *of == result_index => match &mut deliver {
                        Some(deliver) if into.is_none() => deliver(k, dtype, dims, value)?,
                        _ => delivered[k] = Some(value.to_tensor(dtype, dims)?),
                    },
                    _ => {}
                }
            }
            Ok(())
        })?;
        if !sure {
            for (fetch, result) in fetches.iter().zip(&delivered) {
                if let (Some(into), Some(result)) = (&fetch.into, result) {
                    check_output_buffer(&self.outputs[fetch.output], into, result.dims())?;
                }
            }
            for (fetch, result) in fetches.iter().zip(&mut delivered) {
                if let (Some(into), Some(result)) = (&fetch.into, result.take_if(|_| fetch.into.is_some())) {
                    into.memory.write(0, result.data())?;
                }
            }
        }
        let planes = &self.prepared[at].planes;
        let value = |(k, source): (usize, &Origin)| match *source {
            Origin::Delivered(_) => Ok(delivered[k].take().map(Value::Tensor)),
            Origin::Sequence(at) => {
                let (dtype, several) = sequences[at];
                let read = |(tensor, source_range): (&Tensor, &Range<usize>)| {
                    let bytes = planes[at].to_vec(source_range.start, source_range.len())?;
                    let read = Tensor::new(dtype, tensor.dims().to_vec(), bytes.into());
                    Ok(read.expect("the size is unchanged"))
                };
                let read = several.iter().zip(&sequence_ranges[at]).map(read).collect::<Result<_>>()?;
                Ok(Some(Value::Sequence(read)))
            }
        };
        sources.iter().enumerate().map(value).collect()
    }

    /// Runs a prepared executable on checked values.
    fn execute(
        &mut self,
        at: usize,
        tensors: &[RunInput<'_>],
        lent: &[&Memory],
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        let Prepared { key, runners, planes, .. } = &mut self.prepared[at];
        let bound: SmallVec<[&Memory; 32]> = planes.iter().chain(lent.iter().copied()).collect();
        let how = (GradientMode::Accumulate, Scalars::default());
        let start = Instant::now();
        let run = runners.run_traced(&mut self.work, &bound, how, self.trace.as_mut(), tensors, deliver);
        if let (Some(trace), Ok(())) = (&mut self.trace, &run) {
            trace.record_run(start, Instant::now());
        }
        run.map_err(|error| match key.lent.is_empty() {
            true => {
                let variant = variant_of(&mut self.base, &mut self.variants, &key.overridden);
                over_limit::explain(error, runners, &variant.signature, &self.work, tensors)
            }
            false => error,
        })
    }

    /// Explains an error of a run on values in the caller's memory. The advice for a memory-limit error
    /// assumes a run on copies.
    fn explain_with_copies(&mut self, error: Error, feeds: &[Feed<'_>], key: &PreparedKey) -> Error {
        let Error::Run(RunError::OverLimit(_)) = &error else { return error };
        let copies: Vec<Tensor> = feeds.iter().filter_map(|feed| copy_tensor(feed).ok()?).collect();
        let tensors: Vec<RunInput<'_>> = copies.iter().map(RunInput::from).collect();
        let (only, shapes, overridden) =
            (key.selected_outputs.clone(), key.shapes.clone(), key.overridden.clone());
        let Ok(at) = self.prepared_index(&PreparedKey {
            selected_outputs: only,
            shapes,
            overridden,
            lent: Vec::new(),
        }) else {
            return error;
        };
        let variant = variant_of(&mut self.base, &mut self.variants, &key.overridden);
        over_limit::explain(error, &self.prepared[at].runners, &variant.signature, &self.work, &tensors)
    }

    /// Returns the shapes of the delivered results; `None` for shapes that are unknown before a run.
    fn known_output_shapes(
        &mut self,
        at: usize,
        tensors: &[RunInput<'_>],
    ) -> Result<Vec<Option<Vec<usize>>>> {
        let Prepared { key, runners, .. } = &mut self.prepared[at];
        let shapes = runners.executor(&self.work, tensors).map(|runner| {
            let schedule = runner.schedule();
            let dims =
                |slot: &SlotId| schedule.slots[slot.0 as usize].ty.as_ref().map(|(_, dims)| dims.clone());
            schedule.outputs.iter().map(dims).collect()
        });
        shapes.map_err(|error| match key.lent.is_empty() {
            true => {
                let variant = variant_of(&mut self.base, &mut self.variants, &key.overridden);
                over_limit::explain(error, runners, &variant.signature, &self.work, tensors)
            }
            false => error,
        })
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
            if let Some(position) = key.lent.iter().position(|(at, _)| *at == k) {
                let id = graph.inputs[k];
                graph.value_mut(id).ty = ValueType::tensor(info.dtype, &key.lent[position].1);
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
        let runners = ExecutableCache::new(graph, roles, self.backend.clone()).with_precision(self.precision);
        let mut key = PreparedKey {
            selected_outputs: key.selected_outputs.clone(),
            shapes: key.shapes.clone(),
            overridden: key.overridden.clone(),
            lent: key.lent.clone(),
        };
        if !key.lent.is_empty() {
            let inputs = &runners.graph().inputs;
            let writes: FxHashSet<ValueId> = written_inputs(runners.graph()).into_iter().collect();
            let before = key.lent.len();
            key.lent.retain(|(at, _)| {
                let clean = !writes.contains(&inputs[*at]);
                if !clean {
                    variant.written.insert(*at);
                }
                clean
            });
            if key.lent.len() != before {
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
fn check_feeds(variant: &mut Variant, feeds: &[Feed<'_>]) -> Result<()> {
    for (info, feed) in variant.inputs.iter().zip(feeds) {
        let refuse = |actual: String, reason: &str| {
            let (name, expected) = (info.name.clone(), info.to_string());
            Err(Error::Input { name, expected, found: actual, reason: reason.into() })
        };
        match feed {
            Feed::Sequence(_) if !info.sequence => {
                return refuse(feed.describe(), "a sequence is no tensor");
            }
            Feed::Sequence(several) => {
                if let Some(other) = several.iter().find(|tensor| tensor.dtype() != info.dtype) {
                    let other = format!("a sequence with {}{:?}", other.dtype(), other.dims());
                    return refuse(other, "the element types differ");
                }
            }
            _ if info.sequence => return refuse(feed.describe(), "a tensor is no sequence"),
            Feed::Tensor(_) | Feed::Lent(_) => {}
        }
    }
    variant.signature.check_described(describe_feeds(feeds).into_iter())
}

/// Checks the output buffers against the types that are known before a run.
pub(crate) fn check_output_buffers(outputs: &[ValueInfo], fetches: &[Fetch<'_>]) -> Result<()> {
    let mut spans: Vec<(&str, (usize, usize))> = Vec::new();
    for fetch in fetches {
        let (info, Some(into)) = (&outputs[fetch.output], &fetch.into) else { continue };
        let name = &info.name;
        if info.sequence {
            return Err(Error::Argument(format!(
                "output {name:?} is {info}, and only a tensor can have a buffer"
            )));
        }
        let actual = || format!("{}{:?}", into.dtype, into.dims);
        if into.dtype != info.dtype {
            let (name, expected) = (name.clone(), info.to_string());
            return Err(Error::Output { name, expected, found: actual(), dims: None });
        }
        let buffer_error = |error: String| Error::Argument(format!("the buffer of output {name:?}: {error}"));
        let bytes = byte_length(into.dtype, into.dims).map_err(|error| buffer_error(error.to_string()))?;
        if bytes > into.memory.len() {
            let have = into.memory.len();
            return Err(Error::Argument(format!(
                "the buffer of output {name:?} is declared as {} ({bytes} bytes), but it has {have} bytes",
                actual()
            )));
        }
        if into.memory.is_read_only() {
            return Err(buffer_error("it is read-only; give a writable buffer".into()));
        }
        let buffer_span = memory_span(into.memory, bytes);
        if let Some((other, _)) = spans.iter().find(|(_, other)| spans_overlap(buffer_span, *other)) {
            return Err(Error::Argument(format!(
                "outputs {other:?} and {name:?} share memory, so one result would overwrite the other; give each \
                 output its own memory"
            )));
        }
        spans.push((name, buffer_span));
    }
    Ok(())
}

/// Checks that an output buffer has the shape of the result.
pub(crate) fn check_output_buffer(info: &ValueInfo, into: &Lent<'_>, dims: &[usize]) -> Result<()> {
    if into.dims == dims {
        return Ok(());
    }
    let (name, expected) = (info.name.clone(), format!("{}{dims:?}", info.dtype));
    let actual = format!("{}{:?}", into.dtype, into.dims);
    Err(Error::Output { name, expected, found: actual, dims: Some(dims.to_vec()) })
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
