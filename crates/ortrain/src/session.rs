//! Running a model as it is.

use std::sync::Arc;

use ortrain_ops::Role;
use ortrain_ops::passes::infer::infer;
use ortrain_program::{Backend, Deliver, Entry, Given, Scalars, Workspace};

use crate::inputs::Signature;
use crate::module::graph_of;
use crate::runners::Runners;
use crate::{Error, ModelSource, Result, ValueInfo, default_backend};

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
}

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
    runners: Runners,
    work: Workspace,
    signature: Signature,
    outputs: Vec<ValueInfo>,
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
        let label = model.label("the model");
        let mut graph = graph_of(&label, &model.load()?)?;
        infer(&mut graph).map_err(|source| Error::model(&label, source))?;
        if graph.outputs.is_empty() {
            return Err(Error::WrongModel { model: label, reason: "it has no outputs".into() });
        }
        let info = |id: &_| ValueInfo::of(&label, &graph, *id);
        let inputs = graph.inputs.iter().map(info).collect::<Result<_>>()?;
        let outputs = graph.outputs.iter().map(info).collect::<Result<_>>()?;
        let roles = vec![Role::User; graph.inputs.len()];
        let backend = options.backend.unwrap_or_else(default_backend);
        Ok(InferenceSession {
            runners: Runners::new(graph, roles, backend),
            work: Workspace::limited(options.memory_limit, 0),
            signature: Signature::new(inputs),
            outputs,
        })
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
        &self.signature.infos
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
    /// When the inputs do not fit, or the run fails.
    pub fn run(&mut self, inputs: &[Given<'_>], deliver: &mut Deliver<'_>) -> Result<()> {
        self.signature.check(inputs)?;
        self.runners.run(&mut self.work, &[], Entry::Accumulate, Scalars::default(), inputs, deliver)
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
        let schedules: String =
            self.runners.schedules().map(|schedule| schedule.to_string() + "\n").collect();
        format!("{}\n{schedules}", self.runners.graph())
    }
}
