//! Parameters from other files, and for them: checkpoints of other runs, and safetensors.

use std::path::Path;

use ortrain_checkpoint::{ModuleState, NamedTensor, load_safetensors, save_safetensors};
use ortrain_graph::{DType, Tensor};
use rustc_hash::FxHashMap;

use crate::file_kind::with_file_kind;
use crate::{CheckpointState, Error, FileKind, Result};

/// What a file had for a state.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let mut state = setup::state()?;
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// let names = [("fc2.bias".into(), "classifier.bias".into())].into_iter().collect();
/// state.save_safetensors(&path, &names)?;
/// let report = state.load_safetensors(&path, &Default::default(), false)?;
/// assert_eq!(report.missing, ["fc2.bias"]);
/// assert_eq!(report.unexpected, ["classifier.bias"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Parameters that got their values from the file, by their names in the state, sorted.
    pub loaded: Vec<String>,
    /// Parameters that the file does not have, by their names in the state, sorted. They stay as they are.
    pub missing: Vec<String>,
    /// Tensors of the file that the state does not have, by their names in the file, sorted.
    pub unexpected: Vec<String>,
}

impl LoadReport {
    /// Whether the file has the parameters of the state and nothing else.
    ///
    /// ```
    /// use ortrain::LoadReport;
    ///
    /// let report = LoadReport { loaded: vec!["fc.weight".into()], ..LoadReport::default() };
    /// assert!(report.is_complete());
    /// ```
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty()
    }
}

impl CheckpointState {
    /// Takes the values of the parameters from another checkpoint. Optimizer state and properties stay as they are.
    ///
    /// With `strict` the file must have all parameters and no others. Whether a parameter is trained says this state, not
    /// the file. Floats may become wider (float16 and bfloat16 to float32 or float64, float32 to float64): that is exact.
    ///
    /// A nominal state becomes a full one. It takes all of its parameters or none, so the file must have them all, strict
    /// or not. Their shapes are those of the training model if a [`crate::Module`] was made on the state, and otherwise
    /// those of the file.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut state = setup::state()?;
    /// # let folder = tempfile::tempdir()?;
    /// let pretrained = folder.path().join("pretrained");
    /// setup::state()?.save(&pretrained, false)?;
    /// let report = state.load_parameters(&pretrained, true)?;
    /// assert_eq!(report.loaded.len(), 4);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the file cannot be read or holds no values, a tensor has another shape or a type that does not fit, or, if
    /// strict, names are missing or unexpected; when the state is nominal and names are missing, or its training model
    /// does not have all of its parameters. Then nothing has changed.
    pub fn load_parameters(&mut self, path: impl AsRef<Path>, strict: bool) -> Result<LoadReport> {
        let path = path.as_ref();
        let tensors = match ortrain_checkpoint::load(path)
            .map_err(|error| with_file_kind(error, path, FileKind::Checkpoint))?
            .module
        {
            ModuleState::Full { trainable, frozen } => [trainable, frozen].concat(),
            ModuleState::Nominal { .. } => {
                return Err(Error::Argument(format!(
                    "{} is a nominal checkpoint: it has the names of parameters but not their values",
                    path.display()
                )));
            }
        };
        self.take(path, tensors, strict, &FxHashMap::default())
    }

    /// Takes the values of the parameters from a safetensors file. `names` says what a parameter is called there, where
    /// it is called otherwise; all else is as in [`CheckpointState::load_parameters`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut state = setup::state()?;
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("model.safetensors");
    /// let names = [("fc2.weight".into(), "model.classifier.weight".into())].into_iter().collect();
    /// # state.save_safetensors(&path, &names)?;
    /// let report = state.load_safetensors(&path, &names, true)?;
    /// assert!(report.is_complete());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`CheckpointState::load_parameters`]; when a name of `names` is no parameter.
    pub fn load_safetensors(
        &mut self,
        path: impl AsRef<Path>,
        names: &FxHashMap<String, String>,
        strict: bool,
    ) -> Result<LoadReport> {
        let path = path.as_ref();
        self.check_names(names)?;
        let tensors =
            load_safetensors(path).map_err(|error| with_file_kind(error, path, FileKind::Safetensors))?;
        self.take(path, tensors, strict, names)
    }

    /// Writes all parameters, frozen ones too, as a safetensors file. `names` says what a parameter is to be called there,
    /// where it is to be called otherwise. A file that is there is replaced when the new one is complete and on disk.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut state = setup::state()?;
    /// # let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("model.safetensors");
    /// state.save_safetensors(&path, &Default::default())?;
    /// assert!(path.exists());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the state is nominal, a name of `names` is no parameter, two would have one name, or the file cannot be
    /// written.
    pub fn save_safetensors(&self, path: impl AsRef<Path>, names: &FxHashMap<String, String>) -> Result<()> {
        self.check_names(names)?;
        let tensor = |name: &str| {
            let outside = names.get(name).map_or(name, String::as_str);
            Ok(NamedTensor::new(outside, self.parameter(name)?.to_tensor()?))
        };
        let tensors: Vec<NamedTensor> = self.names().map(tensor).collect::<Result<_>>()?;
        Ok(save_safetensors(&tensors, path)?)
    }

    fn check_names(&self, names: &FxHashMap<String, String>) -> Result<()> {
        match names.keys().filter(|name| !self.contains(name)).min() {
            Some(name) => Err(self.unknown(name)),
            None => Ok(()),
        }
    }

    /// Sets the parameters that a file has. Nothing changes unless all of it fits.
    fn take(
        &mut self,
        path: &Path,
        tensors: Vec<NamedTensor>,
        strict: bool,
        names: &FxHashMap<String, String>,
    ) -> Result<LoadReport> {
        let mut there: FxHashMap<String, Tensor> =
            tensors.into_iter().map(|NamedTensor { name, tensor }| (name, tensor)).collect();
        let mut report = LoadReport::default();
        let mut values = Vec::new();
        let known: Vec<String> = self.names().map(str::to_owned).collect();
        for name in known {
            match there.remove(names.get(&name).unwrap_or(&name)) {
                None => report.missing.push(name),
                Some(tensor) => {
                    let value = widened(tensor, self.dtype_of(&name)?);
                    self.check_value(&name, &value)?;
                    values.push(value);
                    report.loaded.push(name);
                }
            }
        }
        report.unexpected = there.into_keys().collect();
        report.unexpected.sort_unstable();
        if strict && !report.is_complete() {
            return Err(Error::Names { path: path.to_owned(), report: Box::new(report) });
        }
        if self.is_nominal() {
            if !report.missing.is_empty() {
                return Err(Error::NominalNames { path: path.to_owned(), report: Box::new(report) });
            }
            // In the order of the parameters, for none is missing.
            let mut dims = values.iter().map(|value| value.dims().to_vec());
            self.complete_with(|| dims.next())?;
        }
        for (name, value) in report.loaded.iter().zip(&values) {
            self.set_parameter(name, value)?;
        }
        self.start_slots()?;
        Ok(report)
    }
}

/// A tensor of a wider float type, if it is of a narrower one.
fn widened(tensor: Tensor, dtype: DType) -> Tensor {
    let exact = match tensor.dtype() {
        DType::F16 | DType::BF16 => matches!(dtype, DType::F32 | DType::F64),
        DType::F32 => dtype == DType::F64,
        _ => false,
    };
    if exact { tensor.converted(dtype) } else { tensor }
}

/// Which names a file lacks and which it has too many, as the end of a sentence; the first few of each.
pub(crate) fn difference(report: &LoadReport) -> String {
    const SHOWN: usize = 5;
    let list = |names: &[String]| {
        let shown: Vec<String> = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect();
        let more = names.len().saturating_sub(SHOWN);
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        shown.join(", ") + &more
    };
    let mut parts = Vec::new();
    if !report.missing.is_empty() {
        parts.push(format!("it lacks {}", list(&report.missing)));
    }
    if !report.unexpected.is_empty() {
        parts.push(format!("it has {}, which the state has not", list(&report.unexpected)));
    }
    parts.join("; ")
}
