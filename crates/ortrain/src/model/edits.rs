//! Changes of a model before its use.

use ortrain_graph::{DType, Tensor, tensor_to_proto};
use ortrain_onnx::proto::tensor_shape_proto::dimension;
use ortrain_onnx::proto::{TensorShapeProto, type_proto};
use ortrain_onnx::{GraphProto, ValueInfoProto};

use crate::suggest::hint;
use crate::{Error, Result};

/// Changes of a model before its use: values of initializers, sizes of symbolic axes, and stops of gradients.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{InferenceSession, ModelChanges, ModelSource, SessionOptions, Tensor};
///
/// let changes = ModelChanges::default().size("batch", 2).initializer("fc2.bias", Tensor::f32(&[10], &[0.0; 10]));
/// let source = ModelSource::from(setup::MODEL).with_changes(changes);
/// let session = InferenceSession::new(source, SessionOptions::default())?;
/// assert_eq!(session.inputs()[0].to_string(), "float32[2, 64]");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelChanges {
    /// New values of initializers, by name: see [`ModelChanges::initializer`].
    pub initializers: Vec<(String, Tensor)>,
    /// Sizes of axes, by name: see [`ModelChanges::size`].
    pub sizes: Vec<(String, usize)>,
    /// Sizes of axes, by denotation: see [`ModelChanges::size_of_denotation`].
    pub sizes_by_denotation: Vec<(String, usize)>,
    /// Values that pass no gradient: see [`ModelChanges::stop_gradients`].
    pub stops: Vec<String>,
}

impl ModelChanges {
    /// Sets the value of an initializer, with the same element type and shape. The old value is not read: its
    /// external file may be missing.
    #[must_use]
    pub fn initializer(mut self, name: impl Into<String>, value: Tensor) -> ModelChanges {
        self.initializers.push((name.into(), value));
        self
    }

    /// Sets the size of every axis of this name, for example for a fixed batch.
    #[must_use]
    pub fn size(mut self, name: impl Into<String>, size: usize) -> ModelChanges {
        self.sizes.push((name.into(), size));
        self
    }

    /// Sets the size of every input axis with this denotation, such as `DATA_BATCH`. Other axes with the same
    /// name get the same size.
    #[must_use]
    pub fn size_of_denotation(mut self, denotation: impl Into<String>, size: usize) -> ModelChanges {
        self.sizes_by_denotation.push((denotation.into(), size));
        self
    }

    /// Stops the gradient at values, like `detach` or `no_grad` in PyTorch.
    ///
    /// The values are float outputs of nodes, of the graph or of subgraphs, by name or by pattern (`*`, `?`,
    /// `[...]`). Generated models show this only in their gradients.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::{ModelChanges, ModelSource, ParameterRole, Scope, inspect};
    ///
    /// let changes = ModelChanges::default().stop_gradients(["hidden"]);
    /// let found = inspect(ModelSource::from(setup::MODEL).with_changes(changes), &Scope::Outputs)?;
    /// let trained: Vec<&str> = found.names(ParameterRole::Trained).collect();
    /// assert_eq!(trained, ["fc2.weight", "fc2.bias"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn stop_gradients<S: Into<String>>(mut self, values: impl IntoIterator<Item = S>) -> ModelChanges {
        self.stops.extend(values.into_iter().map(Into::into));
        self
    }

    /// Applies the changes of initializers and sizes.
    pub(crate) fn apply(&self, label: &str, graph: &mut GraphProto) -> Result<()> {
        self.set_sizes(label, graph)?;
        replace_initializers(label, graph, &self.initializers)
    }

    fn set_sizes(&self, label: &str, graph: &mut GraphProto) -> Result<()> {
        let mut sizes: Vec<(String, usize)> = Vec::new();
        let note = |sizes: &mut Vec<(String, usize)>, name: &str, size: usize| match sizes
            .iter()
            .find(|(known, _)| known == name)
        {
            Some(&(_, other)) if other != size => Err(Error::Argument(format!(
                "axis {name:?} of {label} is set to two sizes: {other} and {size}"
            ))),
            Some(_) => Ok(()),
            None => {
                sizes.push((name.to_owned(), size));
                Ok(())
            }
        };
        let symbols: Vec<String> = graph.input.iter().flat_map(axes).filter_map(name_of).collect();
        for (name, size) in &self.sizes {
            if !symbols.contains(name) {
                let suggestion = hint(name, symbols.iter().map(String::as_str));
                return Err(Error::Argument(format!(
                    "no input of {label} has an axis {name:?}, whose size is given{suggestion}"
                )));
            }
            note(&mut sizes, name, *size)?;
        }
        for (denotation, size) in &self.sizes_by_denotation {
            let mut is_found = false;
            for info in &mut graph.input {
                let input = info.name.clone();
                for dim in shape_of(info).into_iter().flat_map(|shape| &mut shape.dim) {
                    if dim.denotation != *denotation {
                        continue;
                    }
                    is_found = true;
                    match &dim.value {
                        Some(dimension::Value::DimParam(name)) => note(&mut sizes, name, *size)?,
                        Some(dimension::Value::DimValue(known)) if *known != *size as i64 => {
                            return Err(Error::Argument(format!(
                                "the axis with the denotation {denotation:?} of input {input:?} is {known}, so it \
                                 cannot be {size}"
                            )));
                        }
                        Some(dimension::Value::DimValue(_)) => {}
                        None => dim.value = Some(dimension::Value::DimValue(*size as i64)),
                    }
                }
            }
            if !is_found {
                return Err(Error::Argument(format!(
                    "no input of {label} has an axis with the denotation {denotation:?}, whose size is given"
                )));
            }
        }
        let infos = graph.input.iter_mut().chain(&mut graph.output).chain(&mut graph.value_info);
        for dim in infos.filter_map(shape_of).flat_map(|shape| &mut shape.dim) {
            if let Some(dimension::Value::DimParam(name)) = &dim.value
                && let Some((_, size)) = sizes.iter().find(|(known, _)| known == name)
            {
                dim.value = Some(dimension::Value::DimValue(*size as i64));
            }
        }
        Ok(())
    }
}

/// Replaces values of initializers. Their element types and shapes must match.
pub(crate) fn replace_initializers(
    label: &str,
    graph: &mut GraphProto,
    values: &[(String, Tensor)],
) -> Result<()> {
    let initializers = &mut graph.initializer[..];
    let mut replaced = vec![false; initializers.len()];
    for (name, value) in values {
        let Some(at) = initializers.iter().position(|tensor| tensor.name == *name) else {
            let suggestion = hint(name, initializers.iter().map(|tensor| tensor.name.as_str()));
            return Err(Error::Argument(format!("{label} has no initializer {name:?}{suggestion}")));
        };
        if std::mem::replace(&mut replaced[at], true) {
            return Err(Error::Argument(format!("initializer {name:?} is given twice")));
        }
        let tensor = &mut initializers[at];
        let dims = tensor.dims.iter().map(|&size| usize::try_from(size).unwrap_or(usize::MAX));
        let dims: Vec<usize> = dims.collect();
        let expected_dtype = DType::from_onnx(tensor.data_type);
        if expected_dtype != Some(value.dtype()) || dims != value.dims() {
            let expected_name =
                expected_dtype.map_or_else(|| "of an unknown type".to_owned(), |dtype| dtype.to_string());
            return Err(Error::Argument(format!(
                "initializer {name:?} is {expected_name}{dims:?}, but the value is {}{:?}",
                value.dtype(),
                value.dims()
            )));
        }
        *tensor = tensor_to_proto(name, value);
    }
    Ok(())
}

fn shape_of(info: &mut ValueInfoProto) -> Option<&mut TensorShapeProto> {
    match info.r#type.as_mut()?.value.as_mut()? {
        type_proto::Value::TensorType(tensor) => tensor.shape.as_mut(),
        _ => None,
    }
}

fn axes(info: &ValueInfoProto) -> Vec<dimension::Value> {
    let shape = match info.r#type.as_ref().and_then(|ty| ty.value.as_ref()) {
        Some(type_proto::Value::TensorType(tensor)) => tensor.shape.as_ref(),
        _ => None,
    };
    shape.iter().flat_map(|shape| &shape.dim).filter_map(|dim| dim.value.clone()).collect()
}

fn name_of(dim: dimension::Value) -> Option<String> {
    match dim {
        dimension::Value::DimParam(name) if !name.is_empty() => Some(name),
        _ => None,
    }
}
