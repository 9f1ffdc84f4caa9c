//! Artifacts, and their files.

use std::path::{Path, PathBuf};

use ortrain_checkpoint::{Checkpoint, Layout, StagedCheckpoint};
use ortrain_onnx::{
    DataFile, EXTERNAL_FROM, ExternalData, LARGEST_MESSAGE, ModelProto, StagedModels, ToWrite, stage,
};

use crate::model::origins::Origins;
use crate::{Error, Result};

/// The artifacts of a training.
///
/// Writing them to files is optional: they can be trained from memory.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let artifacts = setup::artifacts()?;
/// use ortrain::{CheckpointState, ModelSource, Module, ModuleOptions};
///
/// let mut state = CheckpointState::from_bytes(artifacts.checkpoint_bytes()?)?;
/// let train = ModelSource::from_proto(&artifacts.training_model)?;
/// let module = Module::new(train, &mut state, None, ModuleOptions::default())?;
/// assert_eq!(module.input_names(true), ["x", "labels"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Artifacts {
    /// Forward pass, loss, gradients, and their accumulation.
    pub training_model: ModelProto,
    /// Forward pass and loss, as in inference.
    pub eval_model: ModelProto,
    /// Update of the parameters.
    pub optimizer_model: Option<ModelProto>,
    /// Values of the parameters.
    pub checkpoint: Checkpoint,
    /// Names and types of the parameters.
    pub nominal_checkpoint: Option<Checkpoint>,
    /// Possible mistakes, for example a loss for logits on probabilities. Each sentence names the correct
    /// value.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let artifacts = setup::artifacts()?;
    /// assert!(artifacts.warnings.is_empty(), "{:?}", artifacts.warnings);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub warnings: Vec<String>,
    /// Files and offsets of initializers in external data.
    pub(crate) origins: Origins,
    /// True if the forward model has adapters.
    pub(crate) is_adapted: bool,
}

/// Options of the files of artifacts.
///
/// ```
/// use ortrain::artifacts::FileOptions;
///
/// let options = FileOptions { prefix: "digits_".into(), ..FileOptions::default() };
/// assert!(!options.embed && options.data_folder.is_none());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileOptions {
    /// Begin of the name of each file.
    pub prefix: String,
    /// Number of bytes of a model above which its other initializers are written to `frozen.data`; at most
    /// 2 GiB, the limit of an ONNX file.
    pub external_above: u64,
    /// True to write all other initializers into the models, also initializers with external data.
    pub embed: bool,
    /// Folder in which the reader of the models will look for external data; `None` for the folder of the
    /// models. Data of other folders is then written into the models.
    pub data_folder: Option<PathBuf>,
}

impl Default for FileOptions {
    fn default() -> FileOptions {
        FileOptions {
            prefix: String::new(),
            external_above: LARGEST_MESSAGE as u64,
            embed: false,
            data_folder: None,
        }
    }
}

impl Artifacts {
    /// Writes the files to an existing folder: `training_model.onnx`, `eval_model.onnx`, `checkpoint`, and,
    /// if requested, `optimizer_model.onnx` and `nominal_checkpoint`. Each name begins with `prefix`.
    /// Existing files are replaced only after all new files are complete and on disk.
    ///
    /// Other initializers are in both models, or once in a file beside them:
    ///
    /// - External data of the forward model in this folder or below remains there, and the models refer to
    ///   these files.
    /// - External data in other folders is written to `frozen.data`, since ONNX readers do not accept files
    ///   outside the folder of a model. If a model would exceed 2 GiB, all other initializers are written
    ///   there, too.
    /// - Models with adapters have the SHA-1 of the files to which they refer. It is compared when they are loaded.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let artifacts = setup::artifacts()?;
    /// let folder = tempfile::tempdir()?;
    /// artifacts.write(folder.path(), "digits_")?;
    /// assert!(folder.path().join("digits_training_model.onnx").exists());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write(&self, folder: impl AsRef<Path>, prefix: &str) -> Result<()> {
        self.write_with(folder, &FileOptions { prefix: prefix.to_owned(), ..FileOptions::default() })
    }

    /// Writes like [`Artifacts::write`] with another threshold: if a model would exceed `above` bytes,
    /// initializers are stored in `frozen.data`, once for all models. (`write` uses 2 GiB, the limit of an
    /// ONNX file.)
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # use ortrain::artifacts::{ArtifactOptions, Loss, generate};
    /// let losses = vec![Loss::CrossEntropyLoss.into()];
    /// let options = ArtifactOptions { requires_grad: vec!["fc2.bias".into()], losses, ..Default::default() };
    /// let artifacts = generate(setup::MODEL.into(), options)?;
    /// let folder = tempfile::tempdir()?;
    /// artifacts.write_with_external_data(folder.path(), "digits_", 0)?;
    /// let frozen = std::fs::metadata(folder.path().join("digits_frozen.data"))?.len();
    /// assert!(frozen > std::fs::metadata(folder.path().join("digits_training_model.onnx"))?.len());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write_with_external_data(&self, folder: impl AsRef<Path>, prefix: &str, above: u64) -> Result<()> {
        let options =
            FileOptions { prefix: prefix.to_owned(), external_above: above, ..FileOptions::default() };
        self.write_with(folder, &options)
    }

    /// Writes like [`Artifacts::write`] with options.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let artifacts = setup::artifacts()?;
    /// use ortrain::artifacts::FileOptions;
    ///
    /// let folder = tempfile::tempdir()?;
    /// artifacts.write_with(folder.path(), &FileOptions { embed: true, ..FileOptions::default() })?;
    /// assert!(folder.path().join("training_model.onnx").exists());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub fn write_with(&self, folder: impl AsRef<Path>, options: &FileOptions) -> Result<()> {
        let folder = folder.as_ref();
        match std::fs::metadata(folder) {
            Ok(entry) if entry.is_dir() => {}
            Ok(_) => {
                let folder = folder.display();
                return Err(Error::Argument(format!(
                    "{folder} is a file, but artifacts are written to a folder"
                )));
            }
            Err(source) if source.kind() == std::io::ErrorKind::NotFound => {
                return Err(Error::NoFolder { path: folder.to_owned() });
            }
            Err(source) => return Err(Error::Write { path: folder.to_owned(), source }),
        }
        let at = |name: &str| folder.join(format!("{}{name}", options.prefix));
        // All files are staged before the first one is renamed: the disk may be full.
        let models = self.stage_models(&at, options)?;
        let checkpoint = ortrain_checkpoint::stage(&self.checkpoint, at("checkpoint"), Layout::Artifacts)?;
        let nominal = self.nominal_checkpoint.as_ref();
        let nominal = nominal
            .map(|nominal| ortrain_checkpoint::stage(nominal, at("nominal_checkpoint"), Layout::Artifacts))
            .transpose()?;
        models.persist()?;
        checkpoint.persist()?;
        Ok(nominal.map_or(Ok(()), StagedCheckpoint::persist)?)
    }

    /// Stages the models beside their destinations. `at` returns the destination of a file name.
    pub(crate) fn stage_models(
        &self,
        at: &dyn Fn(&str) -> PathBuf,
        options: &FileOptions,
    ) -> Result<StagedModels> {
        let stems = [
            ("training_model.onnx", Some(&self.training_model)),
            ("eval_model.onnx", Some(&self.eval_model)),
            ("optimizer_model.onnx", self.optimizer_model.as_ref()),
        ];
        let mut paths = Vec::new();
        let mut messages = Vec::new();
        for (name, model) in stems {
            if let Some(model) = model {
                paths.push(at(name));
                messages.push(model.clone());
            }
        }
        let mut written_paths = paths.iter().cloned().chain(["checkpoint", "checkpoint.data"].map(at));
        if let Some(path) = written_paths.find(|path| self.origins.reads_file(path)) {
            return Err(Error::Argument(format!(
                "{} cannot be written: the model has its data in that file; choose another prefix or another folder",
                path.display()
            )));
        }
        // If the forward model already refers to a `frozen.data` file, that file must remain.
        let mut names =
            std::iter::once("frozen.data".to_owned()).chain((2..).map(|n| format!("frozen_{n}.data")));
        let data = names.find_map(|name| Some(at(&name)).filter(|path| !self.origins.reads_file(path)));
        let data = data.expect("the sequence of names is infinite");
        // External data from other folders is written once, not into each model.
        let elsewhere = self.reference_data(&mut messages, ortrain_files::folder(&data), options)?;
        let above = if elsewhere { 0 } else { options.external_above.min(LARGEST_MESSAGE as u64) };
        let external = ExternalData::none();
        let models: Vec<ToWrite<'_>> = (messages.iter().zip(&paths))
            .map(|(model, path)| ToWrite { model, external: &external, path })
            .collect();
        Ok(stage(&models, &DataFile { path: &data, above, from: EXTERNAL_FROM, is_appended: true })?)
    }

    /// Makes initializers refer to the files from which they were read, as far as the options allow. Returns true if
    /// initializers of other files remain. These belong into a data file.
    fn reference_data(
        &self,
        messages: &mut [ModelProto],
        folder: &Path,
        options: &FileOptions,
    ) -> Result<bool> {
        if options.embed {
            return Ok(false);
        }
        let is_in_place = options.data_folder.is_none();
        let folder = options.data_folder.as_deref().unwrap_or(folder);
        let elsewhere = match self.is_adapted {
            true => self.origins.reference_base(messages, folder, None)?,
            false => self.origins.reference_files(messages, folder),
        };
        Ok(elsewhere && is_in_place)
    }

    /// Returns the bytes of the checkpoint file.
    ///
    /// # Errors
    /// If the checkpoint exceeds 2 GiB.
    pub fn checkpoint_bytes(&self) -> Result<Vec<u8>> {
        Ok(ortrain_checkpoint::encode(&self.checkpoint, Layout::Artifacts)?)
    }
}
