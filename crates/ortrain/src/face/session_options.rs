//! Options of sessions.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use ortrain_onnx::ModelProto;
use ortrain_program::{Backend, Bf16Fallback, Interrupt, Precision};

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
