//! One error for everything.

use std::io;

use ortrain_graph::{DType, GraphError};
use ortrain_onnx::OnnxError;
use ortrain_ops::OpError;
use ortrain_program::{AllocationError, DeviceError, RunError, UnsupportedOnBackend, UnsupportedPrecision};

use crate::backend::UnknownIsa;

/// The result of everything here.
///
/// ```
/// fn names(path: &str) -> ortrain::Result<Vec<String>> {
///     let state = ortrain::CheckpointState::load(path)?;
///     Ok(state.names().map(String::from).collect())
/// }
/// assert!(names("no such file").is_err());
/// ```
pub type Result<T> = std::result::Result<T, Error>;

/// What sort of error it is: what a caller can do about it.
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
    /// A call had a wrong argument: another one helps.
    InvalidArgument,
    /// A file is not there.
    NoSuchFile,
    /// A model contradicts itself, its checkpoint, or the format: another file helps.
    InvalidModel,
    /// What is asked for is right but not supported.
    NotImplemented,
    /// A run would take more memory than it may, or than its device has: a smaller batch helps.
    MemoryLimit,
    /// A device is not there: the error says what would help.
    DeviceUnavailable,
    /// A device failed, and works no more: the state goes on from its last checkpoint, on the same device opened anew or on
    /// another one.
    DeviceLost,
    /// A step made NaN or infinities, and was to fail then: other data or a lower rate help.
    Anomaly,
    /// Something else failed: the disk, a damaged checkpoint, a call out of order.
    Fail,
}

/// Why something could not be done. The text is a sentence that names what is at fault and what was expected.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::Given::from);
/// use ortrain::{Error, Given, Tensor};
///
/// let narrow = Tensor::f32(&[2, 63], &[0.5; 126]);
/// let result = module.train_step(&mut state, &[Given::from(&narrow), inputs[1]], &mut |_, _, _, _| Ok(()));
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
    /// A model is not a sound graph.
    #[error("{model}: {source}")]
    Graph {
        /// The model.
        model: String,
        /// What is wrong with it.
        source: Box<GraphError>,
    },
    /// A model's operators cannot be understood, differentiated or written.
    #[error("{model}: {source}")]
    Model {
        /// The model.
        model: String,
        /// What is wrong with it.
        source: Box<ortrain_ops::Error>,
    },
    /// What keeps a model from being differentiated or written: everything at once.
    #[error("{model}: {}", crate::inspect::sentence(.obstacles))]
    Obstacles {
        /// The model.
        model: String,
        /// Each with its node and what helps.
        obstacles: Vec<crate::Obstacle>,
        /// What sort of error the first of them is.
        kind: ErrorKind,
    },
    /// The shapes of the inputs of a run do not fit the model.
    #[error("the model cannot run on inputs of these shapes: {0}")]
    Shapes(Box<ortrain_ops::Error>),
    /// A backend cannot run a program.
    #[error(transparent)]
    Unsupported(#[from] UnsupportedOnBackend),
    /// The environment asks for an instruction-set level that there is not.
    #[error(transparent)]
    Isa(#[from] UnknownIsa),
    /// The machine has nothing that computes in a precision and may be used.
    #[error(transparent)]
    Precision(#[from] UnsupportedPrecision),
    /// A run failed; the state is as it was.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A label that is no class; the state is as it was.
    #[error("{sentence}")]
    Label {
        /// The error as a sentence, which names the node, and the label that is left out.
        sentence: String,
        /// The position of the label among the labels, by axis.
        at: Vec<usize>,
        /// The label.
        label: i64,
        /// How many classes there are.
        classes: i64,
    },
    /// A step or a run would take more memory than it may; nothing was allocated.
    #[error("{}; {help}", .over.describe())]
    StepOverLimit {
        /// What it would take.
        over: Box<ortrain_program::OverLimit>,
        /// A limit that is enough, and the largest batch for the limit that was set, as the end of the sentence.
        help: String,
    },

    /// A step made NaN or infinities; the state is as it was.
    #[error("{0}")]
    Anomaly(Box<crate::Anomaly>),

    /// The state has no such parameter.
    #[error("there is no parameter {name:?} in the state{hint}")]
    UnknownParameter {
        /// The name.
        name: String,
        /// A name that may have been meant, as the end of the sentence; or nothing.
        hint: String,
    },
    /// The state has no such property.
    #[error("there is no property {name:?} in the state{hint}")]
    UnknownProperty {
        /// The name.
        name: String,
        /// A name that may have been meant, as the end of the sentence; or nothing.
        hint: String,
    },
    /// A value of another shape or type than its parameter.
    #[error(
        "parameter {name:?} is {expected_dtype}{expected_dims:?}, but a value of {found_dtype}{found_dims:?} was given"
    )]
    ParameterMismatch {
        /// The parameter.
        name: String,
        /// Its element type.
        expected_dtype: DType,
        /// Its shape.
        expected_dims: Vec<usize>,
        /// The type of the value.
        found_dtype: DType,
        /// The shape of the value.
        found_dims: Vec<usize>,
    },
    /// The model's results need operators that nobody here knows, although there are values that do not.
    #[error(
        "{source}; a loss of what is computed without them can be trained: name the values it compares ({}) in \
         loss_input_names",
        .values.join(", ")
    )]
    TrainableWithout {
        /// The error for the whole model.
        source: Box<Error>,
        /// Values that those operators take, in quotes.
        values: Vec<String>,
    },
    /// A file does not have the parameters of the state.
    #[error(
        "{} does not have the parameters of the state: {}; without strict, what fits is loaded", path.display(),
        crate::weights_io::difference(report)
    )]
    Names {
        /// The file.
        path: std::path::PathBuf,
        /// What it has and lacks.
        report: Box<crate::LoadReport>,
    },
    /// The values of a nominal state are not there yet.
    #[error(
        "the state is nominal: it has the names of its parameters but not their values; load all of them first \
         (load_parameters, load_safetensors), or copy a buffer of all parameters to it"
    )]
    NominalState,
    /// A file lacks parameters of a nominal state, which takes all of them at once or none.
    #[error(
        "the state is nominal and stays so: {} does not have all of its parameters: {}", path.display(),
        crate::weights_io::difference(report)
    )]
    NominalNames {
        /// The file.
        path: std::path::PathBuf,
        /// What it has and lacks.
        report: Box<crate::LoadReport>,
    },
    /// Model and checkpoint do not belong together.
    #[error("{model} does not fit the checkpoint: {reason}")]
    Mismatch {
        /// The model.
        model: String,
        /// Why not.
        reason: String,
    },
    /// A model lacks what its use asks for.
    #[error("{model} cannot be used here: {reason}")]
    WrongModel {
        /// The model.
        model: String,
        /// Why not.
        reason: String,
    },
    /// A file is something else than what it was given for.
    #[error("{file} is {found}, not {expected}; {help}")]
    WrongFile {
        /// The file.
        file: String,
        /// What it is.
        found: String,
        /// What was expected.
        expected: String,
        /// What helps.
        help: &'static str,
    },
    /// The state is not the one that a module or optimizer was made for.
    #[error("the state given does not have the parameters of the state this {what} was made for")]
    OtherState {
        /// What was made for another state.
        what: &'static str,
    },
    /// A wrong number of inputs.
    #[error("{expected} inputs are needed ({}), but {found} were given", .names.join(", "))]
    InputCount {
        /// How many are needed.
        expected: usize,
        /// Their names.
        names: Vec<String>,
        /// How many there were.
        found: usize,
    },
    /// An input of the wrong type or shape.
    #[error("input {name:?} should be {expected}, but {found} was given: {reason}")]
    Input {
        /// The input.
        name: String,
        /// What is expected.
        expected: String,
        /// What was given.
        found: String,
        /// Where the difference is.
        reason: String,
    },
    /// Room for a wrong number of outputs.
    #[error("{expected} outputs are made ({}), but room for {found} was given", .names.join(", "))]
    OutputCount {
        /// How many there are.
        expected: usize,
        /// Their names.
        names: Vec<String>,
        /// For how many there was room.
        found: usize,
    },
    /// Room for an output of another type or shape.
    #[error("output {name:?} is {expected}, but room for {found} was given")]
    Output {
        /// The output.
        name: String,
        /// What it is.
        expected: String,
        /// What there was room for.
        found: String,
        /// Its shape, where it is known.
        dims: Option<Vec<usize>>,
    },
    /// Room for an output whose shape no run knows beforehand.
    #[error(
        "the shape of output {name:?} depends on values, so no memory of the caller is known to fit; fetch it without memory of \
         its own"
    )]
    OutputOfUnknownShape {
        /// The output.
        name: String,
    },
    /// No evaluation model was given.
    #[error("no evaluation model was given when the {made} was made, and {call} needs one")]
    NoEvalModel {
        /// What was made without: a module or a session.
        made: &'static str,
        /// What needs one.
        call: &'static str,
    },
    /// No optimizer model was given.
    #[error("no optimizer model was given when the session was made, and {0} needs one")]
    NoOptimizer(&'static str),
    /// A buffer of another length.
    #[error("the buffer should have {expected} elements, but it has {found}")]
    BufferLength {
        /// Elements needed.
        expected: usize,
        /// Elements there are.
        found: usize,
    },
    /// There is no memory for the values of a state; it is where it was.
    #[error("the parameters do not fit: {0}")]
    NoRoom(AllocationError),
    /// A device is not there.
    #[error("there is no device {device:?} here: {reason}; {remedy}")]
    DeviceUnavailable {
        /// The name that was asked for.
        device: String,
        /// Why it is not there.
        reason: String,
        /// What would help.
        remedy: String,
    },
    /// An argument that makes no sense.
    #[error("{0}")]
    Argument(String),
    /// A call that comes too early or too late.
    #[error("{0}")]
    State(String),
    /// A folder to write to is not there.
    #[error("there is no folder {}, and none is made", .path.display())]
    NoFolder {
        /// The folder.
        path: std::path::PathBuf,
    },
    /// A file other than a model or a checkpoint cannot be written.
    #[error("cannot write {}: {source}", .path.display())]
    Write {
        /// The file or folder.
        path: std::path::PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
}

impl From<DeviceError> for Error {
    fn from(error: DeviceError) -> Error {
        Error::Run(error.into())
    }
}

impl Error {
    /// What sort of error it is.
    ///
    /// ```
    /// use ortrain::{ErrorKind, InferenceSession, SessionOptions};
    ///
    /// let error = InferenceSession::new(b"no model".to_vec().into(), SessionOptions::default()).unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::InvalidModel);
    /// ```
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
            | Error::NoOptimizer(_) => ErrorKind::Fail,
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
            Error::Unsupported(_) | Error::Precision(_) | Error::TrainableWithout { .. } => {
                ErrorKind::NotImplemented
            }
            Error::Onnx(_) | Error::Mismatch { .. } | Error::WrongModel { .. } => ErrorKind::InvalidModel,
            Error::Obstacles { kind, .. } => *kind,
            Error::Model { source, .. } => of_ops(source, ErrorKind::InvalidModel),
            Error::Shapes(source) => of_ops(source, ErrorKind::InvalidArgument),
            Error::Run(
                RunError::IndexOutOfRange { .. } | RunError::Specialise(_) | RunError::Branch { .. },
            )
            | Error::Label { .. }
            | Error::UnknownParameter { .. }
            | Error::UnknownProperty { .. }
            | Error::ParameterMismatch { .. }
            | Error::Names { .. }
            | Error::NominalNames { .. }
            | Error::OtherState { .. }
            | Error::Isa(_)
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
            | Error::NoRoom(AllocationError::OnDevice { .. })
            | Error::Run(
                RunError::OverLimit(_)
                | RunError::Growing { .. }
                | RunError::Memory(AllocationError::OnDevice { .. }),
            ) => ErrorKind::MemoryLimit,
            Error::DeviceUnavailable { .. } => ErrorKind::DeviceUnavailable,
            Error::Run(RunError::Device(_)) => ErrorKind::DeviceLost,
            Error::NoRoom(_) | Error::Run(_) | Error::Write { .. } => ErrorKind::Fail,
        }
    }

    /// What is wrong with the operators of a model.
    pub(crate) fn model(model: &str, source: ortrain_ops::Error) -> Error {
        Error::Model { model: model.to_owned(), source: Box::new(source) }
    }

    /// What is wrong with the graph of a model.
    pub(crate) fn graph(model: &str, source: GraphError) -> Error {
        Error::Graph { model: model.to_owned(), source: Box::new(source) }
    }
}

fn of_ops(error: &ortrain_ops::Error, otherwise: ErrorKind) -> ErrorKind {
    match error {
        ortrain_ops::Error::UnknownOperators { .. }
        | ortrain_ops::Error::Opset { .. }
        | ortrain_ops::Error::TooOld { .. }
        | ortrain_ops::Error::Node { source: OpError::Unsupported(_), .. } => ErrorKind::NotImplemented,
        ortrain_ops::Error::Node {
            source: OpError::Subgraph(inner) | OpError::Gradient { source: inner, .. },
            ..
        } => of_ops(inner, otherwise),
        ortrain_ops::Error::NoPath { .. } => ErrorKind::InvalidArgument,
        ortrain_ops::Error::Program(_) | ortrain_ops::Error::Node { source: OpError::Program(_), .. } => {
            ErrorKind::Fail
        }
        _ => otherwise,
    }
}
