//! Export of an inference model.

use std::path::{Path, PathBuf};

use ortrain_onnx::{LARGEST_MESSAGE, LoadedModel};
use ortrain_ops::training::has_adapters;

use super::{Module, no_eval_model};
use crate::model::export;
use crate::model::origins::write_with_references;
use crate::{CheckpointState, Error, Result};

/// Options of the file of an exported model.
///
/// ```
/// use ortrain::ExportOptions;
///
/// let options = ExportOptions { embed: true, ..ExportOptions::default() };
/// assert_eq!((options.above, options.data_folder), (i32::MAX as u64, None));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// Number of bytes of a model above which its weights are written to `<path>.data`; at most 2 GiB, the
    /// limit of an ONNX file. With 0, all weights are written there.
    pub above: u64,
    /// True to write the base of a model with adapters into the model. Otherwise, the model refers to its file.
    pub embed: bool,
    /// Folder in which the reader of a model with adapters will look for its base; `None` for the folder of the model.
    pub data_folder: Option<PathBuf>,
}

impl Default for ExportOptions {
    fn default() -> ExportOptions {
        ExportOptions { above: LARGEST_MESSAGE as u64, embed: false, data_folder: None }
    }
}

impl Module {
    /// Writes the evaluation model with only these outputs and with the current parameter values as
    /// initializers.
    ///
    /// Everything else remains as in the evaluation model: names, operator sets, metadata, order. Any value
    /// of the graph can be an output, also an intermediate one. Unused inputs are removed.
    ///
    /// A model of more than 2 GiB stores its weights, also the weights of a frozen base, in `<path>.data`
    /// beside it. A model with adapters refers to the file of its base, if the file is in the folder of
    /// the model or below.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// use ortrain::{InferenceSession, SessionOptions};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("trained.onnx");
    /// module.export_model_for_inferencing(&state, &path, &["logits"])?;
    /// let session = InferenceSession::new(path.into(), SessionOptions::default())?;
    /// assert_eq!(session.outputs()[0].name, "logits");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If there is no evaluation model, no output or an unknown one is named, or the file cannot be written.
    pub fn export_model_for_inferencing(
        &self,
        state: &CheckpointState,
        path: impl AsRef<Path>,
        graph_output_names: &[&str],
    ) -> Result<()> {
        self.export_with_external_data(state, path, graph_output_names, LARGEST_MESSAGE as u64)
    }

    /// Exports like [`Module::export_model_for_inferencing`] with another threshold: a model of more than
    /// `above` bytes stores its weights in `<path>.data`, which belongs to it. (An ONNX file has at most 2
    /// GiB.)
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// use ortrain::{InferenceSession, SessionOptions};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("trained.onnx");
    /// module.export_with_external_data(&state, &path, &["logits"], 0)?;
    /// assert!(folder.path().join("trained.onnx.data").exists());
    /// let session = InferenceSession::new(path.into(), SessionOptions::default())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Module::export_model_for_inferencing`].
    pub fn export_with_external_data(
        &self,
        state: &CheckpointState,
        path: impl AsRef<Path>,
        graph_output_names: &[&str],
        above: u64,
    ) -> Result<()> {
        self.export_with(
            state,
            path,
            graph_output_names,
            &ExportOptions { above, ..ExportOptions::default() },
        )
    }

    /// Exports like [`Module::export_model_for_inferencing`] with options.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// use ortrain::ExportOptions;
    ///
    /// # let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("trained.onnx");
    /// module.export_with(&state, &path, &["logits"], &ExportOptions { embed: true, ..Default::default() })?;
    /// assert!(path.exists());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Module::export_model_for_inferencing`].
    pub fn export_with(
        &self,
        state: &CheckpointState,
        path: impl AsRef<Path>,
        graph_output_names: &[&str],
        options: &ExportOptions,
    ) -> Result<()> {
        let (model, path) = (self.inference_model(state, graph_output_names)?, path.as_ref());
        if !options.embed && options.above > 0 && model.proto.graph.as_ref().is_some_and(has_adapters) {
            return write_with_references(model.proto, &self.origins, path, options.data_folder.as_deref());
        }
        let above = options.above;
        let Some(data) = model.data_file_above(path, above)? else {
            return Ok(model.save_above(path, above)?);
        };
        let data_path = ortrain_files::resolved(&data);
        if let Some(file) = self.origins.file_at(&data_path) {
            return Err(Error::Argument(format!(
                "the model cannot be exported to {}: its weights would replace {}, which has the weights of the \
                 training models; export it under another name, or to another folder",
                path.display(),
                file.display()
            )));
        }
        Ok(model.save_above(path, above)?)
    }

    /// Returns the model that [`Module::export_model_for_inferencing`] writes.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// let model = module.inference_model(&state, &["hidden"])?;
    /// let graph = model.proto.graph.unwrap();
    /// assert_eq!(graph.node.len(), 2, "the second layer is gone");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Module::export_model_for_inferencing`], without the errors of the file.
    pub fn inference_model(
        &self,
        state: &CheckpointState,
        graph_output_names: &[&str],
    ) -> Result<LoadedModel> {
        self.check_state(state)?;
        let message = self.eval_message.as_ref().ok_or_else(|| no_eval_model("an export"))?;
        let eval = self.eval.as_ref().ok_or_else(|| no_eval_model("an export"))?;
        export::inference_model(message, eval.executables.graph(), state, graph_output_names)
    }
}
