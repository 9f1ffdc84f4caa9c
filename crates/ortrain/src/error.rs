//! The error type of the crate.

use std::io;

use ortrain_cpu::UnknownSetting;
use ortrain_graph::{DType, GraphError};
use ortrain_onnx::OnnxError;
use ortrain_ops::OpError;
use ortrain_program::{AllocationError, DeviceError, RunError, UnsupportedOnBackend, UnsupportedPrecision};

/// Result type of this crate.
///
/// ```
/// fn names(path: &str) -> ortrain::Result<Vec<String>> {
///     let state = ortrain::CheckpointState::load(path)?;
///     Ok(state.names().map(String::from).collect())
/// }
/// assert!(names("no such file").is_err());
/// ```
pub type Result<T> = std::result::Result<T, Error>;

/// Category of an error, by the remedy of the caller.
///
/// ```
/// use ortrain::{CheckpointState, ErrorKind};
///
/// let error = CheckpointState::load("no such file").unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::NoSuchFile);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A call had an invalid argument.
    InvalidArgument,
    /// A file does not exist.
    NoSuchFile,
    /// A model contradicts itself, its checkpoint, or the format.
    InvalidModel,
    /// The request is valid but not supported.
    NotImplemented,
    /// A run would exceed the memory limit or the memory of its device. A smaller batch helps.
    MemoryLimit,
    /// A device is not available: the error names the remedy.
    DeviceUnavailable,
    /// A device failed and is no longer usable. Training can continue from the last checkpoint, on the same
    /// device opened anew or on another one.
    DeviceLost,
    /// A step produced NaN or infinities, and `detect_anomaly` was set. Other data or a lower learning rate
    /// help.
    Anomaly,
    /// Another rank of a distributed training has failed or left, or the ranks do not make the same step.
    Rank,
    /// Another failure: the disk, a damaged checkpoint, a call out of order.
    Fail,
}

/// Error of this crate. The text is a sentence that names the faulty item and the expectation.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::InputView::from);
/// use ortrain::{Error, InputView, Tensor};
///
/// let narrow = Tensor::f32(&[2, 63], &[0.5; 126]);
/// let result = module.train_step(&mut state, &[InputView::from(&narrow), inputs[1]], &mut |_, _| Ok(()));
/// let Err(Error::Input { name, expected, .. }) = result else { panic!("63 columns for 64") };
/// assert_eq!((name.as_str(), expected.as_str()), ("x", "float32[batch, 64]"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A model file cannot be read or written.
    #[error(transparent)]
    Onnx(#[from] OnnxError),
    /// A checkpoint cannot be read or written.
    #[error(transparent)]
    Checkpoint(#[from] ortrain_checkpoint::Error),
    /// A model is no valid graph.
    #[error("{model}: {source}")]
    Graph {
        /// Name of the model.
        model: String,
        /// Error in the graph.
        source: Box<GraphError>,
    },
    /// A model has operators that are unsupported, not differentiable, or cannot be serialized.
    #[error("{model}: {source}")]
    Model {
        /// Name of the model.
        model: String,
        /// Error in the operators.
        source: Box<ortrain_ops::Error>,
    },
    /// All obstacles to differentiating or serializing a model at once.
    #[error("{model}: {}", crate::model::obstacle::join_obstacles(.obstacles))]
    Obstacles {
        /// Name of the model.
        model: String,
        /// The obstacles, each with its node and remedy.
        obstacles: Vec<crate::Obstacle>,
        /// Kind of the first obstacle.
        kind: ErrorKind,
    },
    /// The shapes of the inputs of a run do not fit the model.
    #[error("the model cannot run on inputs of these shapes: {0}")]
    Shapes(Box<ortrain_ops::Error>),
    /// A backend cannot run a program.
    #[error(transparent)]
    Unsupported(#[from] UnsupportedOnBackend),
    /// An environment variable has an unknown value.
    #[error(transparent)]
    Setting(#[from] UnknownSetting),
    /// The machine has no permitted unit that computes in the requested precision.
    #[error(transparent)]
    Precision(#[from] UnsupportedPrecision),
    /// A run failed; the state is unchanged.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A label is out of range; the state is unchanged.
    #[error("{sentence}")]
    Label {
        /// The error as a sentence with the node and the `ignore_index` of the loss.
        sentence: String,
        /// Index of the label among the labels, by axis.
        at: Vec<usize>,
        /// Value of the label.
        label: i64,
        /// Number of classes.
        classes: i64,
    },
    /// A step or a run would exceed the memory limit; nothing was allocated.
    #[error("{}; {help}", .over.describe())]
    StepOverLimit {
        /// Memory need of the step, and the limit.
        over: Box<ortrain_program::OverLimit>,
        /// A sufficient limit, and the largest batch for the current limit, as the end of the sentence.
        help: String,
    },

    /// A step produced NaN or infinities; the state is unchanged.
    #[error("{0}")]
    Anomaly(Box<crate::Anomaly>),

    /// The state has no such parameter.
    #[error("there is no parameter {name:?} in the state{hint}")]
    UnknownParameter {
        /// Unknown name.
        name: String,
        /// A similar name, as the end of the sentence; may be empty.
        hint: String,
    },
    /// The state has no such property.
    #[error("there is no property {name:?} in the state{hint}")]
    UnknownProperty {
        /// Unknown name.
        name: String,
        /// A similar name, as the end of the sentence; may be empty.
        hint: String,
    },
    /// A value has another shape or type than its parameter.
    #[error(
        "parameter {name:?} is {expected_dtype}{expected_dims:?}, but a value of {found_dtype}{found_dims:?} was given"
    )]
    ParameterMismatch {
        /// Name of the parameter.
        name: String,
        /// Element type of the parameter.
        expected_dtype: DType,
        /// Shape of the parameter.
        expected_dims: Vec<usize>,
        /// Element type of the value.
        found_dtype: DType,
        /// Shape of the value.
        found_dims: Vec<usize>,
    },
    /// The outputs of the model need unknown operators, but some values do not depend on them.
    #[error(
        "{source}; a loss of values that do not need them can be trained: name its inputs ({}) in loss_input_names",
        .values.join(", ")
    )]
    TrainableWithout {
        /// Error for the complete model.
        source: Box<Error>,
        /// Quoted names of the values that are inputs of the unknown operators.
        values: Vec<String>,
    },
    /// The parameters of a file differ from the parameters of the state.
    #[error(
        "{} does not have the parameters of the state: {}; without strict, the matching parameters are loaded", path.display(),
        crate::state::load_report::describe_difference(report)
    )]
    MismatchedNames {
        /// Path of the file.
        path: std::path::PathBuf,
        /// Missing and unexpected names.
        report: Box<crate::LoadReport>,
    },
    /// The values of a nominal state have not been loaded.
    #[error(
        "the state is nominal: it has the names of its parameters but not their values; load all of them first \
         (load_parameters, load_safetensors), or copy a buffer of all parameters to it"
    )]
    NominalState,
    /// A file lacks parameters of a nominal state, which requires all of them at once.
    #[error(
        "the state stays nominal: {} does not have all of its parameters: {}", path.display(),
        crate::state::load_report::describe_difference(report)
    )]
    NominalNames {
        /// Path of the file.
        path: std::path::PathBuf,
        /// Missing and unexpected names.
        report: Box<crate::LoadReport>,
    },
    /// Model and checkpoint do not belong together.
    #[error("{model} does not fit the checkpoint: {reason}")]
    Mismatch {
        /// Name of the model.
        model: String,
        /// Reason of the mismatch.
        reason: String,
    },
    /// A model lacks a property that its use requires.
    #[error("{model} cannot be used here: {reason}")]
    WrongModel {
        /// Name of the model.
        model: String,
        /// Reason why the model is unsuitable.
        reason: String,
    },
    /// A file has another kind than the call requires.
    #[error("{file} is {found}, not {expected}; {help}")]
    WrongFile {
        /// Name of the file.
        file: String,
        /// Actual kind of the file.
        found: String,
        /// Expected kind.
        expected: String,
        /// Remedy.
        help: &'static str,
    },
    /// A module or optimizer was called with another state than the one of its construction.
    #[error("the state has other parameters than the state of this {what}")]
    OtherState {
        /// The object that belongs to another state.
        what: &'static str,
    },
    /// The number of inputs is wrong.
    #[error("expected {expected} inputs ({}), got {found}", .names.join(", "))]
    InputCount {
        /// Number of required inputs.
        expected: usize,
        /// Names of the required inputs.
        names: Vec<String>,
        /// Number of inputs in the call.
        found: usize,
    },
    /// An input has the wrong type or shape.
    #[error("input {name:?} must be {expected}, got {found}: {reason}")]
    Input {
        /// Name of the input.
        name: String,
        /// Expected type.
        expected: String,
        /// Type of the argument.
        found: String,
        /// Description of the difference.
        reason: String,
    },
    /// The number of output buffers is wrong.
    #[error("expected {expected} output buffers ({}), got {found}", .names.join(", "))]
    OutputCount {
        /// Number of outputs.
        expected: usize,
        /// Names of the outputs.
        names: Vec<String>,
        /// Number of buffers.
        found: usize,
    },
    /// An output buffer has another type or shape than the output.
    #[error("output {name:?} is {expected}, but its buffer is {found}")]
    Output {
        /// Name of the output.
        name: String,
        /// Type of the output.
        expected: String,
        /// Type of the buffer.
        found: String,
        /// Shape of the output, if known.
        dims: Option<Vec<usize>>,
    },
    /// An output buffer was passed for an output with a data-dependent shape.
    #[error(
        "the shape of output {name:?} depends on values, so it cannot have a buffer of the caller; fetch it without \
         a buffer"
    )]
    OutputOfUnknownShape {
        /// Name of the output.
        name: String,
    },
    /// The call requires an evaluation model, and the module or session has no evaluation model.
    #[error("{call} needs an evaluation model, but the {object} was made without one")]
    NoEvalModel {
        /// The object without evaluation model: a module or a session.
        object: &'static str,
        /// The call that requires an evaluation model.
        call: &'static str,
    },
    /// The call requires an optimizer model, and the session has no optimizer model.
    #[error("{0} needs an optimizer model, but the session was made without one")]
    NoOptimizer(&'static str),
    /// A buffer has the wrong length.
    #[error("the buffer should have {expected} elements, but it has {found}")]
    BufferLength {
        /// Required number of elements.
        expected: usize,
        /// Actual number of elements.
        found: usize,
    },
    /// Another rank has failed in a step of a distributed training; no rank has changed.
    #[error("rank {rank} of {size} failed in this step, so no rank has changed: {sentence}")]
    OtherRank {
        /// Index of the failed rank.
        rank: usize,
        /// Number of ranks.
        size: usize,
        /// Error of the failed rank.
        sentence: String,
    },
    /// A rank of a distributed training has ended, and this rank still trains.
    #[error(
        "rank {rank} of {size} has left the training: its script has ended, so the other ranks cannot continue"
    )]
    RankLeft {
        /// Index of the rank that has ended.
        rank: usize,
        /// Number of ranks.
        size: usize,
    },
    /// The ranks of a distributed training do not make the same step; no rank has changed.
    #[error("{0}")]
    RanksDiffer(String),
    /// The library for messages between ranks has failed.
    #[error("the ranks cannot communicate: {0}")]
    Communication(String),
    /// Several ranks train on a device that their communicator does not reach.
    #[error(
        "{size} ranks cannot train on {device}: they exchange gradients in host memory only; train on the CPU, or \
         start one process"
    )]
    Unreachable {
        /// Device of the planes.
        device: String,
        /// Number of ranks.
        size: usize,
    },
    /// Memory for the values of a state cannot be allocated; the state remains on its device.
    #[error(
        "the parameters do not fit into memory: {0}; end other programs that use the memory, or choose another device"
    )]
    StateAllocation(AllocationError),
    /// A device is not available.
    #[error("there is no device {device:?} here: {reason}; {remedy}")]
    DeviceUnavailable {
        /// Requested name.
        device: String,
        /// Reason why the device is not available.
        reason: String,
        /// Remedy.
        remedy: String,
    },
    /// An argument is invalid.
    #[error("{0}")]
    Argument(String),
    /// A call is out of order.
    #[error("{0}")]
    State(String),
    /// The folder of an output file does not exist.
    #[error("there is no folder {}; create it first", .path.display())]
    NoFolder {
        /// Path of the folder.
        path: std::path::PathBuf,
    },
    /// A file other than a model or a checkpoint cannot be written.
    #[error("cannot write {}: {source}", .path.display())]
    Write {
        /// Path of the file or folder.
        path: std::path::PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

impl From<DeviceError> for Error {
    fn from(error: DeviceError) -> Error {
        Error::Run(error.into())
    }
}

impl Error {
    /// Returns the category of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Onnx(OnnxError::Read { error, .. } | OnnxError::Write { error, .. })
                if error.kind() == io::ErrorKind::NotFound =>
            {
                ErrorKind::NoSuchFile
            }
            Error::Onnx(
                OnnxError::Read { .. }
                | OnnxError::Write { .. }
                | OnnxError::OutOfMemory { .. }
                | OnnxError::Unwritable(_),
            )
            | Error::State(_)
            | Error::NominalState
            | Error::NoEvalModel { .. }
            | Error::WrongFile { .. }
            | Error::Communication(_)
            | Error::NoOptimizer(_) => ErrorKind::Fail,
            Error::OtherRank { .. } | Error::RankLeft { .. } | Error::RanksDiffer(_) => ErrorKind::Rank,
            Error::Checkpoint(error) => match error.content() {
                ortrain_checkpoint::Error::Missing { .. }
                | ortrain_checkpoint::Error::ExternalMissing { .. } => ErrorKind::NoSuchFile,
                ortrain_checkpoint::Error::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                    ErrorKind::NoSuchFile
                }
                ortrain_checkpoint::Error::NoName { .. } => ErrorKind::InvalidArgument,
                _ => ErrorKind::Fail,
            },
            Error::Graph { source, .. } => match **source {
                GraphError::UnsupportedType { .. } | GraphError::UnsupportedAttribute { .. } => {
                    ErrorKind::NotImplemented
                }
                _ => ErrorKind::InvalidModel,
            },
            Error::Unsupported(_)
            | Error::Precision(_)
            | Error::Unreachable { .. }
            | Error::TrainableWithout { .. } => ErrorKind::NotImplemented,
            Error::Onnx(_) | Error::Mismatch { .. } | Error::WrongModel { .. } => ErrorKind::InvalidModel,
            Error::Obstacles { kind, .. } => *kind,
            Error::Model { source, .. } => kind_of_op_error(source, ErrorKind::InvalidModel),
            Error::Shapes(source) => kind_of_op_error(source, ErrorKind::InvalidArgument),
            Error::Run(
                RunError::IndexOutOfRange { .. } | RunError::Specialise(_) | RunError::Branch { .. },
            )
            | Error::Label { .. }
            | Error::UnknownParameter { .. }
            | Error::UnknownProperty { .. }
            | Error::ParameterMismatch { .. }
            | Error::MismatchedNames { .. }
            | Error::NominalNames { .. }
            | Error::OtherState { .. }
            | Error::Setting(_)
            | Error::InputCount { .. }
            | Error::Input { .. }
            | Error::OutputCount { .. }
            | Error::Output { .. }
            | Error::OutputOfUnknownShape { .. }
            | Error::BufferLength { .. }
            | Error::Argument(_) => ErrorKind::InvalidArgument,
            Error::Anomaly(_) => ErrorKind::Anomaly,
            Error::NoFolder { .. } => ErrorKind::NoSuchFile,
            Error::Write { source, .. } if source.kind() == io::ErrorKind::NotFound => ErrorKind::NoSuchFile,
            Error::StepOverLimit { .. }
            | Error::StateAllocation(AllocationError::OnDevice { .. })
            | Error::Run(
                RunError::OverLimit(_)
                | RunError::Growing { .. }
                | RunError::Memory(AllocationError::OnDevice { .. }),
            ) => ErrorKind::MemoryLimit,
            Error::DeviceUnavailable { .. } => ErrorKind::DeviceUnavailable,
            Error::Run(RunError::Device(_)) => ErrorKind::DeviceLost,
            Error::StateAllocation(_) | Error::Run(_) | Error::Write { .. } => ErrorKind::Fail,
        }
    }

    /// Wraps an error in the operators of a model.
    pub(crate) fn model(model: &str, source: ortrain_ops::Error) -> Error {
        Error::Model { model: model.to_owned(), source: Box::new(source) }
    }

    /// Wraps an error in the graph of a model.
    pub(crate) fn graph(model: &str, source: GraphError) -> Error {
        Error::Graph { model: model.to_owned(), source: Box::new(source) }
    }
}

fn kind_of_op_error(error: &ortrain_ops::Error, otherwise: ErrorKind) -> ErrorKind {
    match error {
        ortrain_ops::Error::UnknownOperators { .. }
        | ortrain_ops::Error::Opset { .. }
        | ortrain_ops::Error::TooOld { .. }
        | ortrain_ops::Error::Node { source: OpError::Unsupported(_), .. } => ErrorKind::NotImplemented,
        ortrain_ops::Error::Node {
            source: OpError::Subgraph(inner) | OpError::Gradient { source: inner, .. },
            ..
        } => kind_of_op_error(inner, otherwise),
        ortrain_ops::Error::NoPath { .. } => ErrorKind::InvalidArgument,
        ortrain_ops::Error::Program(_) | ortrain_ops::Error::Node { source: OpError::Program(_), .. } => {
            ErrorKind::Fail
        }
        _ => otherwise,
    }
}
