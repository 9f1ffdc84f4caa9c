//! Sources of models.

use std::collections::HashSet;
use std::convert::Infallible;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use ortrain_graph::{Graph, Tensor, aligned_copy};
use ortrain_onnx::{
    ExternalData, GraphProto, LoadedModel, Maps, ModelProto, Storage, TensorProto, encode, visit_tensors_mut,
};
use ortrain_ops::passes::functions::{inline_for_gradients, inline_functions};
use ortrain_ops::training::{adapter_stops, has_adapters, separate_initializers};
use ortrain_program::ALIGNMENT;

use crate::model::classifiers::attributes_to_initializers;
use crate::model::edits::{ModelChanges, replace_initializers};
use crate::model::origins::Origins;
use crate::model::stops::stop_gradients;
use crate::{Error, OperatorLibrary, Result};

/// A model: a file, or the bytes of one, optionally with custom operators and gradients.
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
    /// The bytes of a file; external data is found in this folder.
    BytesIn(Bytes, PathBuf),
    /// Another source with custom operators and gradients: [`ModelSource::with_operators`].
    WithOperators(Box<ModelSource>, OperatorLibrary),
    /// Another source with changes before its use: [`ModelSource::with_changes`].
    WithChanges(Box<ModelSource>, Box<ModelChanges>),
}

impl ModelSource {
    /// Adds custom operators and gradients, which apply when the model is read.
    #[must_use]
    pub fn with_operators(self, library: &OperatorLibrary) -> ModelSource {
        ModelSource::WithOperators(Box::new(self), library.clone())
    }

    /// Adds changes, which apply when the model is read.
    #[must_use]
    pub fn with_changes(self, changes: ModelChanges) -> ModelSource {
        ModelSource::WithChanges(Box::new(self), Box::new(changes))
    }

    /// Reads the model and inlines all functions, of the model and of the operator library.
    pub(crate) fn load(self) -> Result<LoadedModel> {
        self.load_as(inline_functions, Storage::Read)
    }

    /// Reads like [`ModelSource::load`], with mapped files: payloads in them take no memory of their own. The
    /// requirements of [`Storage::Mapped`] hold as long as the model or one of its payloads lives.
    pub(crate) fn load_mapped(self) -> Result<LoadedModel> {
        self.load_as(inline_functions, Storage::Mapped)
    }

    /// Reads a model for execution. Each tensor is copied into aligned memory, so that programs can read it
    /// in place and the file buffer is freed. Tensors that are equal in `known` share its memory.
    pub(crate) fn load_to_run(self, known: Option<&Graph>) -> Result<LoadedModel> {
        self.load_with_files(known, &mut FilesRead::default())
    }

    /// Reads like [`ModelSource::load_to_run`], and records the files of the external data. Files with checksums are
    /// compared with them.
    pub(crate) fn load_with_files(self, known: Option<&Graph>, files: &mut FilesRead) -> Result<LoadedModel> {
        let mut model = self.load()?;
        let mut proto = std::mem::take(&mut model.proto);
        let is_adapted = proto.graph.as_ref().is_some_and(has_adapters);
        if is_adapted {
            model = model.with_storage(Storage::MappedInPlace, &files.maps);
        }
        visit_tensors_mut(&mut proto, |tensor, _| {
            model.verify_external_file(tensor, &mut files.verified).map_err(Error::from)
        })?;
        let shared = |tensor: &TensorProto| {
            let graph = known?;
            let value = graph.value(graph.find(&tensor.name)?).constant.as_ref()?;
            let (known, data) = (value.data(), &tensor.raw_data);
            let is_one = known.as_ptr() == data.as_ptr() && known.len() == data.len();
            let same = value.dtype().to_onnx() == tensor.data_type && (is_one || known == data);
            same.then(|| known.clone())
        };
        let Ok(()) = visit_tensors_mut::<Infallible>(&mut proto, |tensor, _| {
            // One tensor at a time, so that shared data exists twice only briefly. The graph construction
            // reports unreadable tensors with their purpose.
            let mut origin = None;
            let mut is_own_memory = false;
            if !tensor.external_data.is_empty()
                && let Ok(payload) = model.tensor_payload(tensor)
            {
                origin = model.external_file(tensor).ok().flatten();
                is_own_memory = true;
                make_internal(tensor, payload);
            }
            if !tensor.raw_data.is_empty() {
                let aligned = || match is_own_memory && is_aligned(&tensor.raw_data) {
                    true => tensor.raw_data.clone(),
                    false => to_aligned(&tensor.raw_data),
                };
                tensor.raw_data = shared(tensor).unwrap_or_else(aligned);
            }
            match origin {
                Some((file, offset)) if is_adapted => files.origins.record(&tensor.raw_data, file, offset),
                Some((file, _)) => files.origins.record_file(file),
                None => {}
            }
            Ok(())
        });
        Ok(model.with_proto(proto))
    }

    /// Returns the initializers of the model's graph with their names, in its order. Subgraphs are excluded.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::ModelSource;
    ///
    /// let initializers = ModelSource::from(setup::MODEL).initializers()?;
    /// assert_eq!(initializers[0].0, "fc1.weight");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the model cannot be read.
    pub fn initializers(self) -> Result<Vec<(String, Tensor)>> {
        let label = self.label("the model");
        let (model, _) = self.read()?;
        let tensors = model.proto.graph.iter().flat_map(|graph| &graph.initializer);
        let read = |tensor: &TensorProto| {
            let value = Graph::tensor_from_proto(&model, tensor);
            Ok((tensor.name.clone(), value.map_err(|source| Error::graph(&label, source))?))
        };
        tensors.map(read).collect()
    }

    /// Returns the model with other values of some initializers. Their element types and shapes must match,
    /// and external data is embedded.
    ///
    /// A name may also belong to weights in attributes (for example the coefficients of a
    /// `LinearClassifier`), as [`ForwardBackward`](crate::ForwardBackward) names them. Then such nodes are
    /// decomposed.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::{ModelSource, Tensor};
    ///
    /// let zeros = Tensor::f32(&[10], &[0.0; 10]);
    /// let model = ModelSource::from(setup::MODEL).with_initializers(&[("fc2.bias".into(), zeros.clone())])?;
    /// let read = ModelSource::from_proto(&model)?.initializers()?;
    /// assert!(read.contains(&("fc2.bias".into(), zeros)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the model cannot be read, a name occurs twice or belongs to no initializer, or a value has another
    /// type or shape.
    pub fn with_initializers(self, values: &[(String, Tensor)]) -> Result<ModelProto> {
        let label = self.label("the model");
        let has = |model: &ModelProto, name: &str| {
            model.graph.iter().flat_map(|graph| &graph.initializer).any(|tensor| tensor.name == name)
        };
        let (mut model, library) = self.read()?;
        if values.iter().any(|(name, _)| !has(&model.proto, name)) {
            inline_for_gradients(&mut model.proto, library.inner())
                .map_err(|source| Error::model(&label, source))?;
            attributes_to_initializers(&label, &mut model)?;
        }
        let mut proto = embed_external_data(model)?.proto;
        match &mut proto.graph {
            Some(graph) => replace_initializers(&label, graph, values)?,
            None => replace_initializers(&label, &mut GraphProto::default(), values)?,
        }
        Ok(proto)
    }

    /// Reads a model for differentiation. Nodes with custom gradients keep them. Weights in attributes become
    /// initializers. Parameters and running statistics that share an initializer are separated.
    pub(crate) fn load_for_gradients(self) -> Result<LoadedModel> {
        let label = self.label("the model");
        let mut stops = self.stops();
        let mut model = self.load_as(inline_for_gradients, Storage::Read)?;
        stops.extend(model.proto.graph.iter().flat_map(adapter_stops));
        model.proto.graph.as_mut().map(separate_initializers);
        attributes_to_initializers(&label, &mut model)?;
        stop_gradients(&label, &mut model, &stops)?;
        Ok(model)
    }

    fn load_as(
        self,
        inline: fn(
            &mut ModelProto,
            &ortrain_ops::OperatorLibrary,
        ) -> std::result::Result<(), ortrain_ops::Error>,
        storage: Storage,
    ) -> Result<LoadedModel> {
        let label = self.label("the model");
        let (mut model, library) = self.read_with(storage)?;
        inline(&mut model.proto, library.inner()).map_err(|source| Error::model(&label, source))?;
        Ok(model)
    }

    /// Returns the names and patterns of values that pass no gradient.
    fn stops(&self) -> Vec<String> {
        match self {
            ModelSource::Path(_) | ModelSource::Bytes(_) | ModelSource::BytesIn(..) => Vec::new(),
            ModelSource::WithOperators(source, _) => source.stops(),
            ModelSource::WithChanges(source, changes) => {
                let mut stops = source.stops();
                stops.extend(changes.stops.iter().cloned());
                stops
            }
        }
    }

    /// Reads the model without changes to its functions; returns its operator library too.
    pub(crate) fn read(self) -> Result<(LoadedModel, OperatorLibrary)> {
        self.read_with(Storage::Read)
    }

    /// Works like [`ModelSource::read`] with another storage. A model with adapters uses its external data in place
    /// instead of reading it: the base is large, and several modules and processes share its memory.
    fn read_with(self, storage: Storage) -> Result<(LoadedModel, OperatorLibrary)> {
        let (model, library) = self.read_as(storage)?;
        let is_adapted = model.proto.graph.as_ref().is_some_and(has_adapters);
        let model = match is_adapted && storage == Storage::Read {
            true => model.with_storage(Storage::MappedInPlace, &Maps::default()),
            false => model,
        };
        Ok((model, library))
    }

    fn read_as(self, storage: Storage) -> Result<(LoadedModel, OperatorLibrary)> {
        Ok(match self {
            ModelSource::Path(path) => (LoadedModel::load_with(path, storage)?, OperatorLibrary::default()),
            ModelSource::Bytes(bytes) => {
                (LoadedModel::from_bytes(bytes, ExternalData::none())?, OperatorLibrary::default())
            }
            ModelSource::BytesIn(bytes, folder) => {
                let external = ExternalData::in_folder(folder, storage);
                (LoadedModel::from_bytes(bytes, external)?, OperatorLibrary::default())
            }
            // The outermost library counts.
            ModelSource::WithOperators(source, library) => (source.read_as(storage)?.0, library),
            ModelSource::WithChanges(source, changes) => {
                let label = source.label("the model");
                let (mut model, library) = source.read_as(storage)?;
                if let Some(graph) = &mut model.proto.graph {
                    changes.apply(&label, graph)?;
                }
                (model, library)
            }
        })
    }

    /// Returns the name in messages.
    pub(crate) fn label(&self, default_name: &str) -> String {
        match self {
            ModelSource::Path(path) => format!("{default_name} {}", path.display()),
            ModelSource::Bytes(_) | ModelSource::BytesIn(..) => default_name.to_owned(),
            ModelSource::WithOperators(source, _) | ModelSource::WithChanges(source, _) => {
                source.label(default_name)
            }
        }
    }

    /// Serializes a model in memory.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let artifacts = setup::artifacts()?;
    /// use ortrain::{InferenceSession, ModelSource, SessionOptions};
    ///
    /// let eval = ModelSource::from_proto(&artifacts.eval_model)?;
    /// let session = InferenceSession::new(eval, SessionOptions::default())?;
    /// assert_eq!(session.inputs()[0].name, "x");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the model is larger than 2 GiB: write it to a file instead.
    pub fn from_proto(proto: &ModelProto) -> Result<ModelSource> {
        Ok(ModelSource::Bytes(encode(proto).map_err(Error::from)?.into()))
    }
}

/// Embeds the external data of a tensor in the message.
pub(crate) fn make_internal(tensor: &mut TensorProto, payload: Bytes) {
    tensor.raw_data = payload;
    tensor.external_data.clear();
    tensor.data_location = 0;
}

/// Returns the model with embedded external data. The inputs remain, even if they have initializers.
pub(crate) fn embed_external_data(mut model: LoadedModel) -> Result<LoadedModel> {
    let mut proto = std::mem::take(&mut model.proto);
    visit_tensors_mut(&mut proto, |tensor, _| -> Result<()> {
        if !tensor.external_data.is_empty() {
            let payload = model.tensor_payload(tensor)?;
            make_internal(tensor, payload);
        }
        Ok(())
    })?;
    Ok(model.with_proto(proto))
}

/// Files that models were read from.
#[derive(Debug, Default)]
pub(crate) struct FilesRead {
    /// Files of external data. The payloads are recorded for models with adapters.
    pub(crate) origins: Origins,
    /// Maps of the files of a base.
    maps: Maps,
    /// Files with their checksums.
    verified: HashSet<(PathBuf, String)>,
}

fn is_aligned(bytes: &Bytes) -> bool {
    bytes.as_ptr().addr().is_multiple_of(ALIGNMENT)
}

/// Copies bytes to aligned memory of their own.
fn to_aligned(bytes: &Bytes) -> Bytes {
    if bytes.is_unique() && is_aligned(bytes) { bytes.clone() } else { aligned_copy(bytes, ALIGNMENT) }
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

#[cfg(test)]
mod tests {
    use ortrain_graph::{Tensor, tensor_to_proto};
    use ortrain_onnx::{GraphProto, encode};

    use super::*;
    use crate::model::graph::graph_of;

    fn tensors(model: &LoadedModel) -> &[TensorProto] {
        &model.proto.graph.as_ref().expect("there is one").initializer
    }

    #[test]
    fn loaded_model_releases_file_buffer() {
        let weight = |name: &str, value: f32| tensor_to_proto(name, &Tensor::f32(&[3], &[value; 3]));
        let source = |weights: &[TensorProto]| {
            let graph = GraphProto { initializer: weights.to_vec(), ..GraphProto::default() };
            let proto = ModelProto { graph: Some(graph), ..ModelProto::default() };
            Bytes::from(encode(&proto).expect("it is small"))
        };
        let file = source(&[weight("w", 1.0), weight("v", 2.0)]);
        let train = ModelSource::from(file.clone()).load_to_run(None).expect("it is a model");
        for tensor in tensors(&train) {
            assert_eq!(tensor.raw_data.as_ptr().addr() % ALIGNMENT, 0, "{}", tensor.name);
        }
        assert!(file.is_unique(), "nothing is a range of it any more");

        // Another model shares equal tensors of the same name.
        let graph = graph_of("the model", &train).expect("it is a graph");
        let other = source(&[weight("w", 1.0), weight("v", 3.0), weight("u", 1.0)]);
        let eval = ModelSource::from(other.clone()).load_to_run(Some(&graph)).expect("it is a model");
        let shared: Vec<bool> = tensors(&eval)
            .iter()
            .map(|tensor| tensors(&train).iter().any(|of| of.raw_data.as_ptr() == tensor.raw_data.as_ptr()))
            .collect();
        assert_eq!(shared, [true, false, false]);
        assert!(other.is_unique());
    }
}
