//! Running a model as it is.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use ortrain_graph::{DType, Graph, Tensor, ValueId};
use ortrain_onnx::ModelProto;
use ortrain_ops::passes::infer::infer;
use ortrain_ops::training::{check_sequences, sequence_input};
use ortrain_ops::{PartTensor, PlanePart, Role};
use ortrain_program::{
    Backend, Bf16Fallback, Deliver, Entry, Given, ITERATION_LIMIT, Interrupt, Memory, PlaneId, Precision,
    Scalars, Workspace, align,
};

use crate::inputs::Signature;
use crate::module::graph_to_run;
use crate::runners::Runners;
use crate::{Error, ModelSource, Result, ValueInfo, default_backend, over_limit};

/// How an [`InferenceSession`] is made.
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
    /// What runs it; [`default_backend`] unless given.
    pub backend: Option<Arc<dyn Backend>>,
    /// Most bytes that a run may take: constants, values, scratch of kernels. No limit unless given.
    pub memory_limit: Option<usize>,
    /// Most iterations of a loop; [`ITERATION_LIMIT`] unless given.
    pub iteration_limit: Option<u64>,
    /// How exactly inner products are computed: see [`SessionOptions::precision`].
    pub precision: Precision,
    /// What may multiply bfloat16 where there is no AMX: see [`SessionOptions::bf16_fallback`].
    pub bf16_fallback: Bf16Fallback,
    /// Who may end a run early: see [`SessionOptions::interrupt`].
    pub interrupt: Option<Interrupt>,
}

impl SessionOptions {
    /// With this backend.
    ///
    /// ```
    /// use ortrain::{SessionOptions, backend};
    ///
    /// let options = SessionOptions::default().backend(backend("reference", 0)?);
    /// # assert!(options.backend.is_some());
    /// # Ok::<(), ortrain::Error>(())
    /// ```
    #[must_use]
    pub fn backend(mut self, backend: Arc<dyn Backend>) -> SessionOptions {
        self.backend = Some(backend);
        self
    }

    /// With at most so many bytes. A run that would take more is refused before it allocates anything.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// use ortrain::{ErrorKind, InferenceSession, SessionOptions};
    ///
    /// let options = SessionOptions::default().memory_limit(1000);
    /// let mut session = InferenceSession::new(setup::MODEL.into(), options)?;
    /// let error = session.run(&inputs[..1], &mut |_, _, _, _| {}).unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::MemoryLimit);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn memory_limit(mut self, bytes: usize) -> SessionOptions {
        self.memory_limit = Some(bytes);
        self
    }

    /// With at most so many iterations of a loop ([`ITERATION_LIMIT`] unless given). A loop that still runs then is
    /// stopped by an error that names it.
    ///
    /// ```
    /// use ortrain::SessionOptions;
    ///
    /// let options = SessionOptions::default().iteration_limit(10_000);
    /// # assert_eq!(options.iteration_limit, Some(10_000));
    /// ```
    #[must_use]
    pub fn iteration_limit(mut self, iterations: u64) -> SessionOptions {
        self.iteration_limit = Some(iterations);
        self
    }

    /// With somebody who may end a run early: every tenth of a second, between two instructions, it is asked.
    ///
    /// ```
    /// use ortrain::{Interrupt, SessionOptions};
    ///
    /// let options = SessionOptions::default().interrupt(Interrupt::new(|| false));
    /// # assert!(options.interrupt.is_some());
    /// ```
    #[must_use]
    pub fn interrupt(mut self, interrupt: Interrupt) -> SessionOptions {
        self.interrupt = Some(interrupt);
        self
    }

    /// With inner products of this precision instead of [`Precision::F32`]; [`ModuleOptions::precision`] says what that is.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::{Bf16Fallback, InferenceSession, Precision, SessionOptions};
    ///
    /// let options = SessionOptions::default().precision(Precision::Bf16x3).bf16_fallback(Bf16Fallback::Emulated);
    /// let session = InferenceSession::new(setup::MODEL.into(), options)?;
    /// assert_eq!(session.precision(), Precision::Bf16x3);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// [`ModuleOptions::precision`]: crate::ModuleOptions::precision
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> SessionOptions {
        self.precision = precision;
        self
    }

    /// With this instead of AMX, where a precision needs one and the machine has none; without it that is an error.
    ///
    /// ```
    /// use ortrain::{Bf16Fallback, SessionOptions};
    ///
    /// let options = SessionOptions::default().bf16_fallback(Bf16Fallback::Emulated);
    /// # assert_eq!(options.bf16_fallback, Bf16Fallback::Emulated);
    /// ```
    #[must_use]
    pub fn bf16_fallback(mut self, fallback: Bf16Fallback) -> SessionOptions {
        self.bf16_fallback = fallback;
        self
    }
}

/// What goes into a model, or comes out of it.
///
/// ```
/// use ortrain::{Tensor, Value};
///
/// let rate = Value::from(Tensor::f32(&[1], &[0.1]));
/// let gradients = Value::Sequence(vec![Tensor::f32(&[2], &[3.0, 4.0]), Tensor::f32(&[1], &[12.0])]);
/// # assert_ne!(rate, gradients);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A tensor.
    Tensor(Tensor),
    /// A sequence of tensors, all of one element type.
    Sequence(Vec<Tensor>),
}

impl From<Tensor> for Value {
    fn from(tensor: Tensor) -> Value {
        Value::Tensor(tensor)
    }
}

/// Sequences of tensors, with the type of the elements.
type Sequences<'a> = Vec<(DType, &'a [Tensor])>;

/// How many ways of running a model (which outputs, sequences of which sizes) are kept.
const KEPT: usize = 8;

/// Any ONNX model, ready to run.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{Given, InferenceSession, SessionOptions, Tensor, collect};
///
/// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
/// let x = Tensor::f32(&[2, 64], &[0.5; 128]);
/// let results = collect(|deliver| session.run(&[Given::from(&x)], deliver))?;
/// assert_eq!(results[0].dims(), [2, 10]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct InferenceSession {
    label: String,
    graph: Graph,
    precision: Precision,
    backend: Arc<dyn Backend>,
    /// The one used last is last.
    prepared: Vec<Prepared>,
    work: Workspace,
    limits: Limits,
    inputs: Vec<ValueInfo>,
    /// Of those inputs that are tensors.
    signature: Signature,
    outputs: Vec<ValueInfo>,
    meta: ModelMeta,
}

/// What a run may take, and who may end it.
#[derive(Clone, Debug)]
struct Limits {
    memory: Option<usize>,
    iterations: u64,
    interrupt: Option<Interrupt>,
}

/// What a session runs, and how.
pub(crate) struct Parts<'a> {
    pub(crate) label: &'a str,
    pub(crate) graph: &'a Graph,
    pub(crate) backend: &'a Arc<dyn Backend>,
    pub(crate) precision: Precision,
    pub(crate) limit: Option<usize>,
    pub(crate) iterations: u64,
    pub(crate) interrupt: &'a Option<Interrupt>,
}

/// What a model says about itself.
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
    /// What made it.
    pub producer_name: String,
    /// The name of its graph.
    pub graph_name: String,
    /// The domain it belongs to, as a reversed host name.
    pub domain: String,
    /// A text about the model.
    pub description: String,
    /// A text about its graph.
    pub graph_description: String,
    /// The version of the model.
    pub version: i64,
    /// Further entries, by key. Of several with one key it is the last.
    pub custom: BTreeMap<String, String>,
}

impl ModelMeta {
    fn of(model: &ModelProto) -> ModelMeta {
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

/// The model prepared for some of its outputs, and for sequences of certain sizes.
#[derive(Debug)]
struct Prepared {
    /// All, if `None`.
    only: Option<Vec<usize>>,
    /// The shapes of the tensors of each sequence among the inputs.
    shapes: Vec<Vec<Vec<usize>>>,
    runners: Runners,
    /// Where the sequences lie, one after the other.
    planes: Vec<Memory>,
    /// Where each of the outputs comes from.
    origins: Vec<Origin>,
}

#[derive(Clone, Copy, Debug)]
enum Origin {
    /// It is delivered as the one with this number.
    Delivered(usize),
    /// It is what became of this sequence.
    Sequence(usize),
}

impl InferenceSession {
    /// A session of a model. Initializers are constants, also those listed as inputs.
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
    /// When the model cannot be read or run.
    pub fn new(model: ModelSource, options: SessionOptions) -> Result<InferenceSession> {
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
        let info = |id: &_| ValueInfo::of_any(&label, &graph, *id);
        let inputs: Vec<ValueInfo> = graph.inputs.iter().map(info).collect::<Result<_>>()?;
        let outputs = graph.outputs.iter().map(info).collect::<Result<_>>()?;
        let limits = Limits {
            memory: options.memory_limit,
            iterations: options.iteration_limit.unwrap_or(ITERATION_LIMIT),
            interrupt: options.interrupt,
        };
        Ok(InferenceSession {
            label,
            graph,
            precision: options.precision,
            backend,
            prepared: Vec::with_capacity(KEPT + 1),
            work: Workspace::limited(limits.memory, 0)
                .iteration_limit(limits.iterations)
                .interrupt(limits.interrupt.clone()),
            limits,
            signature: Signature::new(inputs.iter().filter(|info| !info.sequence).cloned().collect()),
            inputs,
            outputs,
            meta,
        })
    }

    /// What it runs, and how.
    pub(crate) fn parts(&self) -> Parts<'_> {
        let Limits { memory: limit, iterations, ref interrupt } = self.limits;
        let (graph, backend, precision) = (&self.graph, &self.backend, self.precision);
        Parts { label: &self.label, graph, backend, precision, limit, iterations, interrupt }
    }

    /// What the model says about itself.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # use ortrain::{InferenceSession, SessionOptions};
    /// let session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// assert_eq!(session.meta().version, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn meta(&self) -> &ModelMeta {
        &self.meta
    }

    /// How exactly inner products are computed: what [`SessionOptions::precision`] said.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # use ortrain::{InferenceSession, Precision, SessionOptions};
    /// let session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// assert_eq!(session.precision(), Precision::F32);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// What multiplies bfloat16 here, as [`Module::bf16_unit`] says it.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # use ortrain::{InferenceSession, SessionOptions};
    /// let session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// assert_eq!(session.bf16_unit(), None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// [`Module::bf16_unit`]: crate::Module::bf16_unit
    #[must_use]
    pub fn bf16_unit(&self) -> Option<&'static str> {
        self.backend.bf16_unit()
    }

    /// What a run must be given, in order.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # use ortrain::{InferenceSession, SessionOptions};
    /// let session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// assert_eq!(session.inputs()[0].name, "x");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn inputs(&self) -> &[ValueInfo] {
        &self.inputs
    }

    /// What a run delivers, in order.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # use ortrain::{InferenceSession, SessionOptions};
    /// let session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// assert_eq!(session.outputs()[0].to_string(), "float32[batch, 10]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn outputs(&self) -> &[ValueInfo] {
        &self.outputs
    }

    /// Computes the outputs; they come to `deliver` in the order of [`InferenceSession::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// # use ortrain::{InferenceSession, SessionOptions};
    /// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// let mut logits = vec![0; 2 * 10 * 4];
    /// session.run(&inputs[..1], &mut |_, _, _, value| value.copy_to(&mut logits))?;
    /// assert!(logits.iter().any(|byte| *byte != 0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the inputs do not fit, the run fails, or the model takes or makes sequences: then
    /// [`InferenceSession::run_values`] runs it.
    pub fn run(&mut self, inputs: &[Given<'_>], deliver: &mut Deliver<'_>) -> Result<()> {
        if let Some(info) = self.inputs.iter().chain(&self.outputs).find(|info| info.sequence) {
            return Err(Error::Argument(format!(
                "{:?} is {info}; run_values takes and gives sequences, run tensors alone",
                info.name
            )));
        }
        self.signature.check(inputs)?;
        let at = self.prepared(None, &[])?;
        let runners = &mut self.prepared[at].runners;
        let run = runners.run(&mut self.work, &[], Entry::Accumulate, Scalars::default(), inputs, deliver);
        run.map_err(|error| over_limit::explained(error, runners, &self.signature, &self.work, inputs))
    }

    /// Computes the outputs, or `only` those at these positions and nothing that they do not need, in this order.
    /// Inputs are given in the order of [`InferenceSession::inputs`] and stay as they are, also where the model changes
    /// sequences in place.
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
    /// When the inputs do not fit, there is no output at a position, or the run fails.
    pub fn run_values(&mut self, inputs: &[Value], only: Option<&[usize]>) -> Result<Vec<Value>> {
        if let Some(position) = only.iter().copied().flatten().find(|&&at| at >= self.outputs.len()) {
            let count = self.outputs.len();
            return Err(Error::Argument(format!("there is no output at {position}; there are {count}")));
        }
        let (tensors, sequences) = self.checked(inputs)?;
        let shapes: Vec<Vec<Vec<usize>>> = sequences
            .iter()
            .map(|(_, tensors)| tensors.iter().map(|tensor| tensor.dims().to_vec()).collect())
            .collect();
        let at = self.prepared(only, &shapes)?;
        let Prepared { runners, planes, origins, .. } = &mut self.prepared[at];
        let places: Vec<Vec<Range<usize>>> =
            sequences.iter().zip(&shapes).map(|((dtype, _), shapes)| places(*dtype, shapes)).collect();
        for ((plane, (_, tensors)), places) in planes.iter().zip(&sequences).zip(&places) {
            for (tensor, place) in tensors.iter().zip(places) {
                plane.write(place.start, tensor.data());
            }
        }
        let bound: Vec<&Memory> = planes.iter().collect();
        let mut delivered: Vec<Option<Tensor>> = vec![None; origins.len()];
        let run = runners.run(
            &mut self.work,
            &bound,
            Entry::Accumulate,
            Scalars::default(),
            &tensors,
            &mut |at, dtype, dims, value| {
                let mut bytes = vec![0; dims.iter().product::<usize>() * dtype.size()];
                value.copy_to(&mut bytes);
                delivered[at] = Tensor::new(dtype, dims.to_vec(), bytes.into()).ok();
            },
        );
        run.map_err(|error| over_limit::explained(error, runners, &self.signature, &self.work, &tensors))?;
        let value = |origin: &Origin| match *origin {
            Origin::Delivered(at) => {
                Value::Tensor(delivered[at].clone().expect("every output is delivered, whole"))
            }
            Origin::Sequence(at) => {
                let (dtype, tensors) = sequences[at];
                let read = |(tensor, place): (&Tensor, &Range<usize>)| {
                    let bytes = planes[at].to_vec(place.start, place.len());
                    Tensor::new(dtype, tensor.dims().to_vec(), bytes.into()).expect("it has the size it had")
                };
                Value::Sequence(tensors.iter().zip(&places[at]).map(read).collect())
            }
        };
        Ok(origins.iter().map(value).collect())
    }

    /// The inputs, tensors and sequences apart, of the right number, types and shapes.
    fn checked<'a>(&mut self, inputs: &'a [Value]) -> Result<(Vec<Given<'a>>, Sequences<'a>)> {
        if inputs.len() != self.inputs.len() {
            return Err(Error::InputCount {
                expected: self.inputs.len(),
                names: self.inputs.iter().map(|info| info.name.clone()).collect(),
                found: inputs.len(),
            });
        }
        let (mut tensors, mut sequences) = (Vec::new(), Vec::new());
        for (info, value) in self.inputs.iter().zip(inputs) {
            let refuse = |found: String, reason: &str| {
                let (name, expected) = (info.name.clone(), info.to_string());
                Err(Error::Input { name, expected, found, reason: reason.into() })
            };
            let described = |tensor: &Tensor| format!("{}{:?}", tensor.dtype(), tensor.dims());
            match value {
                Value::Tensor(tensor) if info.sequence => {
                    return refuse(described(tensor), "a tensor is no sequence");
                }
                Value::Tensor(tensor) => tensors.push(Given::from(tensor)),
                Value::Sequence(several) if !info.sequence => {
                    return refuse(format!("a sequence of {}", several.len()), "a sequence is no tensor");
                }
                Value::Sequence(several) => {
                    if let Some(other) = several.iter().find(|tensor| tensor.dtype() != info.dtype) {
                        return refuse(
                            format!("a sequence with {}", described(other)),
                            "the element types differ",
                        );
                    }
                    sequences.push((info.dtype, several.as_slice()));
                }
            }
        }
        self.signature.check(&tensors)?;
        Ok((tensors, sequences))
    }

    /// The position of what runs these outputs with sequences of these shapes.
    fn prepared(&mut self, only: Option<&[usize]>, shapes: &[Vec<Vec<usize>>]) -> Result<usize> {
        let is_it = |known: &Prepared| known.only.as_deref() == only && known.shapes == shapes;
        match self.prepared.iter().position(is_it) {
            Some(at) => self.prepared[at..].rotate_left(1),
            None => {
                let made = self.prepare(only, shapes)?;
                if self.prepared.len() == KEPT {
                    self.prepared.remove(0);
                }
                self.prepared.push(made);
            }
        }
        Ok(self.prepared.len() - 1)
    }

    fn prepare(&self, only: Option<&[usize]>, shapes: &[Vec<Vec<usize>>]) -> Result<Prepared> {
        let mut graph = self.graph.clone();
        if let Some(positions) = only {
            graph.outputs = positions.iter().map(|&at| self.graph.outputs[at]).collect();
            graph.remove_unused();
        }
        let sequences: Vec<ValueId> = (graph.inputs.iter().copied().zip(&self.inputs))
            .filter_map(|(id, info)| info.sequence.then_some(id))
            .collect();
        let mut origins = Vec::with_capacity(graph.outputs.len());
        let mut delivered = Vec::new();
        for &id in &graph.outputs {
            if !ValueInfo::of_any(&self.label, &graph, id)?.sequence {
                origins.push(Origin::Delivered(delivered.len()));
                delivered.push(id);
                continue;
            }
            let input = sequence_input(&graph, id).map_err(|source| Error::model(&self.label, source))?;
            let at = input.and_then(|input| sequences.iter().position(|&sequence| sequence == input));
            origins.push(Origin::Sequence(at.ok_or_else(|| Error::WrongModel {
                model: self.label.clone(),
                reason: format!(
                    "output {:?} is a sequence that was not given; only sequences that nodes change in place can \
                     be returned",
                    graph.name_of(id)
                ),
            })?));
        }
        graph.outputs = delivered;

        let mut planes = Vec::with_capacity(sequences.len());
        let mut roles = Vec::with_capacity(graph.inputs.len());
        for info in &self.inputs {
            if !info.sequence {
                roles.push(Role::User);
                continue;
            }
            let places = places(info.dtype, &shapes[planes.len()]);
            let bytes = places.last().map_or(0, |place| align(place.end));
            let plane = PlaneId(planes.len() as u32);
            let size = info.dtype.size();
            let tensors =
                places.iter().map(|place| PartTensor { start: place.start / size, len: place.len() / size });
            let tensors = tensors.collect();
            let part = PlanePart { dtype: info.dtype, plane, offset: 0, len: bytes / size, tensors };
            // Of an empty sequence there is nothing to compute.
            roles.push(Role::Planes(if bytes == 0 { Vec::new() } else { vec![part] }));
            planes.push(Memory::new(bytes));
        }
        let runners = Runners::new(graph, roles, self.backend.clone()).precision(self.precision);
        let only = only.map(<[usize]>::to_vec);
        Ok(Prepared { only, shapes: shapes.to_vec(), runners, planes, origins })
    }

    /// The graph and the programs made so far, as text.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # use ortrain::{InferenceSession, SessionOptions};
    /// let session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// assert!(session.dump().contains("Gemm"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn dump(&self) -> String {
        let schedules: String = self
            .prepared
            .iter()
            .flat_map(|prepared| prepared.runners.schedules())
            .map(|schedule| schedule.to_string() + "\n")
            .collect();
        format!("{}\n{schedules}", self.graph)
    }
}

/// Where the tensors of a sequence lie in its plane, in bytes.
fn places(dtype: DType, shapes: &[Vec<usize>]) -> Vec<Range<usize>> {
    let mut end = 0;
    let place = |dims: &Vec<usize>| {
        let start = align(end);
        end = start + dims.iter().product::<usize>() * dtype.size();
        start..end
    };
    shapes.iter().map(place).collect()
}
