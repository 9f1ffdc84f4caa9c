//! Adapted models that refer to the files of their base, which is neither copied nor written again.
//!
//! These functions map the files of the base. While they run, and while a model with adapters is used, no process may
//! write to these files or truncate them. Replacing them by new files of the same names is fine.

use std::path::Path;

use ortrain_onnx::{ExternalData, LARGEST_MESSAGE, LoadedModel, encode};
use ortrain_ops::training::has_adapters;

use super::{Description, LoraOptions, Prepared, add_to, peft};
use crate::model::origins::write_with_references;
use crate::{ModelSource, Result};

impl Prepared {
    /// Writes the model. Its unchanged constants refer to their files, unless they are embedded.
    fn write(self, path: &Path, embed: bool) -> Result<()> {
        if embed {
            let model = LoadedModel::from_proto(self.model.proto, ExternalData::none());
            return Ok(model.save_above(path, LARGEST_MESSAGE as u64)?);
        }
        write_with_references(self.model.proto, &self.origins, path, None)
    }

    /// Returns the model as a message that refers to the files of its base, with their folder.
    fn into_source(self) -> Result<ModelSource> {
        let Some(folder) = self.origins.folder() else { return ModelSource::from_proto(&self.model.proto) };
        let mut models = [self.model.proto];
        self.origins.reference_base(&mut models, folder, None)?;
        Ok(ModelSource::BytesIn(encode(&models[0])?.into(), folder.to_owned()))
    }
}

/// Works like [`add`](super::add), and writes the model to a file. Unchanged constants refer to the files of the base
/// if these are in the folder of the new file or below. Otherwise, and with `embed`, the new file has the base, too: ONNX
/// readers do not accept files outside the folder of a model.
///
/// The base is mapped: until the function returns, no process may write to its files or truncate them.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::lora::{LoraOptions, adapters, add_to_file};
///
/// let folder = tempfile::tempdir()?;
/// let [base, output] = ["model.onnx", "adapted.onnx"].map(|name| folder.path().join(name));
/// std::fs::copy(setup::MODEL, &base)?;
/// let description = add_to_file(base.as_path().into(), &LoraOptions::default(), &output, false)?;
/// assert!(std::fs::metadata(&output)?.len() < std::fs::metadata(&base)?.len());
/// assert_eq!(adapters(output.as_path().into())?, description);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`add`](super::add), and if the file cannot be written.
pub fn add_to_file(
    model: ModelSource,
    options: &LoraOptions,
    output: impl AsRef<Path>,
    embed: bool,
) -> Result<Description> {
    let (prepared, description) = added(model, options)?;
    prepared.write(output.as_ref(), embed)?;
    Ok(description)
}

/// Works like [`add`](super::add), and leaves unchanged constants in the files of the base. The result is a small message
/// and the folder of the files. A model of bytes stays a model of bytes.
///
/// While the result is used, no process may write to the files of the base or truncate them.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::ModelSource;
/// use ortrain::lora::{LoraOptions, add_by_reference};
///
/// let (model, _) = add_by_reference(setup::MODEL.into(), &LoraOptions::default())?;
/// let ModelSource::BytesIn(message, _) = model else { panic!("it refers to a file") };
/// assert!((message.len() as u64) < std::fs::metadata(setup::MODEL)?.len());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`add`](super::add).
pub fn add_by_reference(model: ModelSource, options: &LoraOptions) -> Result<(ModelSource, Description)> {
    let (prepared, description) = added(model, options)?;
    Ok((prepared.into_source()?, description))
}

/// Returns a model with adapters as [`add_by_reference`] does; `None` for a model without adapters.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::lora::base_by_reference;
///
/// assert!(base_by_reference(setup::MODEL.into())?.is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read.
pub fn base_by_reference(model: ModelSource) -> Result<Option<ModelSource>> {
    let label = model.label("the model");
    let model = model.load_mapped()?;
    if !model.proto.graph.as_ref().is_some_and(has_adapters) {
        return Ok(None);
    }
    Ok(Some(Prepared::of(label, model)?.into_source()?))
}

/// Works like [`load_adapter`](super::load_adapter), and writes the model as [`add_to_file`] does.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::ModelSource;
/// use ortrain::lora::{LoraOptions, adapters, add, load_adapter_to_file, save_adapter};
///
/// let folder = tempfile::tempdir()?;
/// let (model, description) = add(setup::MODEL.into(), &LoraOptions::default())?;
/// save_adapter(ModelSource::from_proto(&model)?, folder.path(), "default", &[])?;
/// let output = folder.path().join("adapted.onnx");
/// load_adapter_to_file(setup::MODEL.into(), folder.path(), "default", &[], true, &output, true)?;
/// assert_eq!(adapters(output.as_path().into())?, description);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`load_adapter`](super::load_adapter), and if the file cannot be written.
pub fn load_adapter_to_file(
    model: ModelSource,
    folder: impl AsRef<Path>,
    name: &str,
    modules: &[(String, String)],
    check_base: bool,
    output: impl AsRef<Path>,
    embed: bool,
) -> Result<()> {
    let mut prepared = Prepared::mapped(model)?;
    peft::load_into(&mut prepared, folder.as_ref(), name, modules, check_base)?;
    prepared.write(output.as_ref(), embed)
}

fn added(model: ModelSource, options: &LoraOptions) -> Result<(Prepared, Description)> {
    options.check()?;
    let mut prepared = Prepared::mapped(model)?;
    let description = add_to(&mut prepared, options)?;
    Ok((prepared, description))
}
