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
    #[must_use]
    pub fn backend(mut self, backend: Arc<dyn Backend>) -> SessionOptions {
        self.backend = Some(backend);
        self
    }

    /// With at most so many bytes. A run that would take more is refused before it allocates anything.
    #[must_use]
    pub fn memory_limit(mut self, bytes: usize) -> SessionOptions {
        self.memory_limit = Some(bytes);
        self
    }
}

/// Any ONNX model, ready to run.
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
    #[must_use]
    pub fn inputs(&self) -> &[ValueInfo] {
        &self.signature.infos
    }

    /// What a run delivers, in order.
    #[must_use]
    pub fn outputs(&self) -> &[ValueInfo] {
        &self.outputs
    }

    /// Computes the outputs; they come to `deliver` in the order of [`InferenceSession::outputs`].
    ///
    /// # Errors
    /// When the inputs do not fit, or the run fails.
    pub fn run(&mut self, inputs: &[Given<'_>], deliver: &mut Deliver<'_>) -> Result<()> {
        self.signature.check(inputs)?;
        self.runners.run(&mut self.work, &[], Entry::Accumulate, Scalars::default(), inputs, deliver)
    }

    /// The graph and the programs made so far, as text.
    #[must_use]
    pub fn dump(&self) -> String {
        let schedules: String =
            self.runners.schedules().map(|schedule| schedule.to_string() + "\n").collect();
        format!("{}\n{schedules}", self.runners.graph())
    }
}
