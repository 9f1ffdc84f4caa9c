//! Options of sessions.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ortrain_onnx::ModelProto;

use crate::exec::run_options::RunOptions;

/// Options of an [`InferenceSession`]: the options of its runs, and a file for the optimized model.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{InferenceSession, RunOptions, SessionOptions, backend};
///
/// let run = RunOptions::default().backend(backend("cpu", 2)?).memory_limit(64 << 20);
/// let session = InferenceSession::new(setup::MODEL.into(), SessionOptions::from(run))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct SessionOptions {
    /// Options of the runs.
    pub run: RunOptions,
    /// Output file of the optimized model: see [`SessionOptions::optimized_model`].
    pub optimized_model: Option<PathBuf>,
}

impl From<RunOptions> for SessionOptions {
    fn from(run: RunOptions) -> SessionOptions {
        SessionOptions { run, ..SessionOptions::default() }
    }
}

impl SessionOptions {
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
