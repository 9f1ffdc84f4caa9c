//! Import and export of parameters: checkpoints of other runs, and safetensors.

use std::path::Path;

use ortrain_checkpoint::{ModuleState, NamedTensor, load_safetensors, save_safetensors};
use ortrain_graph::{DType, Tensor};
use rustc_hash::FxHashMap;

use crate::model::file_kind::add_file_kind;
use crate::state::load_report::LoadReport;
use crate::{CheckpointState, Error, FileKind, Result};

impl CheckpointState {
    /// Loads the parameter values from another checkpoint. Optimizer state and properties remain unchanged.
    ///
    /// With `strict`, the file must have exactly the parameters of the state. This state determines which
    /// parameters are trained. Floats may be widened (float16 and bfloat16 to float32 or float64, float32 to
    /// float64): that is exact.
    ///
    /// A nominal state becomes a full one. Its parameters are loaded all at once, so the file must have all
    /// of them, even if not `strict`. Their shapes are determined by the training model if a
    /// [`crate::Module`] exists on the state, otherwise by the file.
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
    /// If the file cannot be read or has no values, or a tensor has another shape or an unsuitable type. If
    /// strict, and names are missing or unexpected. If the state is nominal, and names are missing or its
    /// training model does not have all parameters. Then nothing has changed.
    pub fn load_parameters(&mut self, path: impl AsRef<Path>, strict: bool) -> Result<LoadReport> {
        let path = path.as_ref();
        let tensors = match ortrain_checkpoint::load(path)
            .map_err(|error| add_file_kind(error, path, FileKind::Checkpoint))?
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
        self.load_tensors(path, tensors, strict, &FxHashMap::default())
    }

    /// Loads the parameter values from a safetensors file. `names` maps parameters to different names in the
    /// file. The rules of [`CheckpointState::load_parameters`] apply.
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
    /// As [`CheckpointState::load_parameters`]; also if a key of `names` is no parameter.
    pub fn load_safetensors(
        &mut self,
        path: impl AsRef<Path>,
        names: &FxHashMap<String, String>,
        strict: bool,
    ) -> Result<LoadReport> {
        let path = path.as_ref();
        self.check_names(names)?;
        let tensors =
            load_safetensors(path).map_err(|error| add_file_kind(error, path, FileKind::Safetensors))?;
        self.load_tensors(path, tensors, strict, names)
    }

    /// Writes all parameters, including frozen ones, as a safetensors file. `names` maps parameters to
    /// different names in the file. An existing file is replaced only after the new file is complete and on
    /// disk.
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
    /// If the state is nominal, a key of `names` is no parameter, two parameters have the same name in the
    /// file, or the file cannot be written.
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
            Some(name) => Err(self.unknown_parameter(name)),
            None => Ok(()),
        }
    }

    /// Sets the parameters in a file. Nothing changes unless the complete file fits.
    fn load_tensors(
        &mut self,
        path: &Path,
        tensors: Vec<NamedTensor>,
        strict: bool,
        names: &FxHashMap<String, String>,
    ) -> Result<LoadReport> {
        let mut file_tensors: FxHashMap<String, Tensor> =
            tensors.into_iter().map(|NamedTensor { name, tensor }| (name, tensor)).collect();
        let mut report = LoadReport::default();
        let mut values = Vec::new();
        let known: Vec<String> = self.names().map(str::to_owned).collect();
        for name in known {
            match file_tensors.remove(names.get(&name).unwrap_or(&name)) {
                None => report.missing.push(name),
                Some(tensor) => {
                    let value = widen(tensor, self.dtype_of(&name)?);
                    self.check_value(&name, &value)?;
                    values.push(value);
                    report.loaded.push(name);
                }
            }
        }
        report.unexpected = file_tensors.into_keys().collect();
        report.unexpected.sort_unstable();
        if strict && !report.is_complete() {
            return Err(Error::MismatchedNames { path: path.to_owned(), report: Box::new(report) });
        }
        if self.is_nominal() {
            if !report.missing.is_empty() {
                return Err(Error::NominalNames { path: path.to_owned(), report: Box::new(report) });
            }
            // In parameter order, since no parameter is missing.
            let mut dims = values.iter().map(|value| value.dims().to_vec());
            self.make_full(|| dims.next())?;
        }
        for (name, value) in report.loaded.iter().zip(&values) {
            self.set_parameter(name, value)?;
        }
        self.initialize_slots()?;
        Ok(report)
    }
}

/// Widens a tensor to a wider float type.
fn widen(tensor: Tensor, dtype: DType) -> Tensor {
    let exact = match tensor.dtype() {
        DType::F16 | DType::BF16 => matches!(dtype, DType::F32 | DType::F64),
        DType::F32 => dtype == DType::F64,
        _ => false,
    };
    if exact { tensor.converted(dtype) } else { tensor }
}
