//! Where a model comes from.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use ortrain_onnx::{ExternalData, LoadedModel, ModelProto, encode};
use ortrain_ops::passes::functions::{inline_for_gradients, inline_functions};

use crate::{Error, OperatorLibrary, Result};

/// A model: a file, or the bytes of one; perhaps with operators and gradients of the user's.
///
/// ```
/// use ortrain::ModelSource;
///
/// assert_eq!(ModelSource::from("model.onnx"), ModelSource::Path("model.onnx".into()));
/// assert_eq!(ModelSource::from(vec![8, 8]), ModelSource::Bytes(vec![8, 8].into()));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// A file; external data is found beside it.
    Path(PathBuf),
    /// The bytes of a file; there is no external data.
    Bytes(Bytes),
    /// One of the others, read with operators and gradients of the user's: [`ModelSource::with_operators`].
    WithOperators(Box<ModelSource>, OperatorLibrary),
}

impl ModelSource {
    /// The same model, read with operators and gradients of the user's.
    ///
    /// ```
    /// use ortrain::{ModelSource, OperatorLibrary};
    ///
    /// let library = OperatorLibrary::new();
    /// let source = ModelSource::from("model.onnx").with_operators(&library);
    /// assert_eq!(source, ModelSource::from("model.onnx").with_operators(&library));
    /// ```
    #[must_use]
    pub fn with_operators(self, library: &OperatorLibrary) -> ModelSource {
        ModelSource::WithOperators(Box::new(self), library.clone())
    }

    /// Reads the model; functions that it brings along, or that are the user's, are written out where they are called.
    pub(crate) fn load(self) -> Result<LoadedModel> {
        self.load_as(inline_functions)
    }

    /// Reads a model that is differentiated: nodes with a gradient of the user's are kept together with it.
    pub(crate) fn load_for_gradients(self) -> Result<LoadedModel> {
        self.load_as(inline_for_gradients)
    }

    fn load_as(
        self,
        inline: fn(
            &mut ModelProto,
            &ortrain_ops::OperatorLibrary,
        ) -> std::result::Result<(), ortrain_ops::Error>,
    ) -> Result<LoadedModel> {
        let label = self.label("the model");
        let (mut model, library) = self.read()?;
        inline(&mut model.proto, library.inner()).map_err(|source| Error::model(&label, source))?;
        Ok(model)
    }

    fn read(self) -> Result<(LoadedModel, OperatorLibrary)> {
        Ok(match self {
            ModelSource::Path(path) => (LoadedModel::load(path)?, OperatorLibrary::default()),
            ModelSource::Bytes(bytes) => {
                (LoadedModel::from_bytes(bytes, ExternalData::none())?, OperatorLibrary::default())
            }
            // The last library holds.
            ModelSource::WithOperators(source, library) => (source.read()?.0, library),
        })
    }

    /// How messages name it.
    pub(crate) fn label(&self, what: &str) -> String {
        match self {
            ModelSource::Path(path) => format!("{what} {}", path.display()),
            ModelSource::Bytes(_) => what.to_owned(),
            ModelSource::WithOperators(source, _) => source.label(what),
        }
    }

    /// A model made by the program.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let made = setup::artifacts()?;
    /// use ortrain::{InferenceSession, ModelSource, SessionOptions};
    ///
    /// let eval = ModelSource::from_proto(&made.eval_model)?;
    /// let session = InferenceSession::new(eval, SessionOptions::default())?;
    /// assert_eq!(session.inputs()[0].name, "x");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When it is larger than 2 GiB.
    pub fn from_proto(proto: &ModelProto) -> Result<ModelSource> {
        Ok(ModelSource::Bytes(encode(proto).map_err(Error::from)?.into()))
    }
}

impl From<&str> for ModelSource {
    fn from(path: &str) -> ModelSource {
        ModelSource::Path(path.into())
    }
}

impl From<&Path> for ModelSource {
    fn from(path: &Path) -> ModelSource {
        ModelSource::Path(path.to_owned())
    }
}

impl From<PathBuf> for ModelSource {
    fn from(path: PathBuf) -> ModelSource {
        ModelSource::Path(path)
    }
}

impl From<Bytes> for ModelSource {
    fn from(bytes: Bytes) -> ModelSource {
        ModelSource::Bytes(bytes)
    }
}

impl From<Vec<u8>> for ModelSource {
    fn from(bytes: Vec<u8>) -> ModelSource {
        ModelSource::Bytes(bytes.into())
    }
}
