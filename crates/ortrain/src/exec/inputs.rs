//! Inputs and outputs of a model, and checks of input values.

use std::fmt;
use std::sync::Arc;

use ortrain_graph::{DType, Dim, Graph, ValueId, ValueType, byte_length};
use ortrain_program::InputView;

use super::caller_memory::describe_input;
use crate::{Error, Result};

/// An input or output of a model.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{DType, InferenceSession, SessionOptions};
///
/// let session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
/// let x = &session.inputs()[0];
/// assert_eq!((x.name.as_str(), x.dtype), ("x", DType::F32));
/// assert_eq!(x.to_string(), "float32[batch, 64]");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValueInfo {
    /// The name.
    pub name: String,
    /// The element type.
    pub dtype: DType,
    /// Size of each axis; `None` if the rank is unknown.
    pub shape: Option<Vec<Dim>>,
    /// True for a sequence of tensors; their shapes are unknown.
    pub sequence: bool,
}

impl ValueInfo {
    /// Describes a value of a graph. The value must be a tensor.
    pub(crate) fn of(model: &str, graph: &Graph, id: ValueId) -> Result<ValueInfo> {
        let info = ValueInfo::of_tensor_or_sequence(model, graph, id)?;
        match info.sequence {
            false => Ok(info),
            true => Err(Error::WrongModel {
                model: model.to_owned(),
                reason: format!("{:?} is {info}, but only tensors can be inputs and outputs", info.name),
            }),
        }
    }

    /// Describes a value of a graph: a tensor or a sequence.
    pub(crate) fn of_tensor_or_sequence(model: &str, graph: &Graph, id: ValueId) -> Result<ValueInfo> {
        let name = graph.name_of(id).to_owned();
        match &graph.value(id).ty {
            ValueType::Tensor(dtype, shape) => {
                let shape = shape.as_ref().map(|shape| shape.to_vec());
                Ok(ValueInfo { name, dtype: *dtype, shape, sequence: false })
            }
            ValueType::Sequence(dtype) => Ok(ValueInfo { name, dtype: *dtype, shape: None, sequence: true }),
            ValueType::Unknown => Err(Error::WrongModel {
                model: model.to_owned(),
                reason: format!("the type of {name:?} is not known"),
            }),
        }
    }
}

/// The type: `float32[batch, 10]`.
impl fmt::Display for ValueInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.shape {
            None if self.sequence => write!(f, "a sequence of {} tensors", self.dtype),
            None => write!(f, "{} of any shape", self.dtype),
            Some(dims) => {
                let dims: Vec<String> = dims.iter().map(ToString::to_string).collect();
                write!(f, "{}[{}]", self.dtype, dims.join(", "))
            }
        }
    }
}

/// Returns the error of a sequence for an input that is a tensor.
pub(crate) fn sequence_error(info: &ValueInfo, input: &InputView<'_>) -> Error {
    let (name, expected) = (info.name.clone(), info.to_string());
    Error::Input { name, expected, found: describe_input(input), reason: "a sequence is no tensor".into() }
}

/// One axis of an input.
#[derive(Clone, Copy, Debug)]
enum Axis {
    Known(usize),
    Symbol(usize),
}

/// The inputs of a model, and the checks of their values.
#[derive(Debug)]
pub(crate) struct Signature {
    pub(crate) infos: Vec<ValueInfo>,
    axes: Vec<Option<Vec<Axis>>>,
    symbols: Vec<Arc<str>>,
    /// During a check: the size of each symbol, and the first input with this symbol.
    sizes: Vec<Option<(usize, usize)>>,
}

impl Signature {
    pub(crate) fn new(infos: Vec<ValueInfo>) -> Signature {
        let mut symbols: Vec<Arc<str>> = Vec::new();
        let axes = infos
            .iter()
            .map(|info| {
                let axis = |dim: &Dim| match dim {
                    Dim::Known(size) => Axis::Known(*size),
                    Dim::Symbol(name) => {
                        Axis::Symbol(symbols.iter().position(|known| known == name).unwrap_or_else(|| {
                            symbols.push(name.clone());
                            symbols.len() - 1
                        }))
                    }
                };
                info.shape.as_ref().map(|dims| dims.iter().map(axis).collect())
            })
            .collect();
        let sizes = vec![None; symbols.len()];
        Signature { infos, axes, symbols, sizes }
    }

    /// Returns the batch size: the size of the first axis of the first input, if that axis is symbolic.
    pub(crate) fn batch_size(&self, inputs: &[InputView<'_>]) -> Option<usize> {
        let first = self.axes.first()?.as_ref()?.first()?;
        matches!(first, Axis::Symbol(_)).then(|| inputs.first()?.dims.first().copied()).flatten()
    }

    /// Returns the shapes of the inputs with another batch size.
    pub(crate) fn shapes_with_batch(&self, inputs: &[InputView<'_>], size: usize) -> Vec<Vec<usize>> {
        let batch = match self.axes.first().and_then(|axes| axes.as_ref()?.first()) {
            Some(Axis::Symbol(symbol)) => Some(*symbol),
            _ => None,
        };
        let resized = |(value, axes): (&InputView<'_>, &Option<Vec<Axis>>)| {
            let is_batch = |at: usize| match axes.as_ref().and_then(|axes| axes.get(at)) {
                Some(Axis::Symbol(symbol)) => Some(*symbol) == batch,
                _ => false,
            };
            value.dims.iter().enumerate().map(|(at, &dim)| if is_batch(at) { size } else { dim }).collect()
        };
        inputs.iter().zip(&self.axes).map(resized).collect()
    }

    /// Checks number, types and shapes. Allocates only for an error.
    pub(crate) fn check(&mut self, inputs: &[InputView<'_>]) -> Result<()> {
        if let Some((info, input)) = self.infos.iter().zip(inputs).find(|(_, input)| input.is_sequence()) {
            return Err(sequence_error(info, input));
        }
        self.check_described(inputs.iter().map(|value| (value.dtype, value.dims, value.byte_count())))
    }

    /// Checks values of known element type, shape and number of bytes.
    pub(crate) fn check_described<'v>(
        &mut self,
        inputs: impl ExactSizeIterator<Item = (DType, &'v [usize], usize)>,
    ) -> Result<()> {
        if inputs.len() != self.infos.len() {
            return Err(Error::InputCount {
                expected: self.infos.len(),
                names: self.infos.iter().map(|info| info.name.clone()).collect(),
                found: inputs.len(),
            });
        }
        self.sizes.fill(None);
        for (k, ((dtype, dims, found_bytes), axes)) in inputs.zip(&self.axes).enumerate() {
            let info = &self.infos[k];
            let refuse = |reason: String| {
                let actual = format!("{dtype}{dims:?}");
                Err(Error::Input {
                    name: info.name.clone(),
                    expected: info.to_string(),
                    found: actual,
                    reason,
                })
            };
            if dtype != info.dtype {
                return refuse("the element types differ".into());
            }
            match byte_length(dtype, dims) {
                Ok(bytes) if bytes == found_bytes => {}
                Ok(bytes) => {
                    return refuse(format!("it should have {bytes} bytes but has {found_bytes}"));
                }
                Err(error) => return refuse(error.to_string()),
            }
            let Some(axes) = axes else { continue };
            if axes.len() != dims.len() {
                return refuse(format!("it should have {} axes but has {}", axes.len(), dims.len()));
            }
            for (at, (axis, &size)) in axes.iter().zip(dims).enumerate() {
                match *axis {
                    Axis::Known(expected) if expected != size => {
                        let opens = match at {
                            0 if axes.len() > 1 => {
                                "; if it is the batch, open_batch of ortrain.artifacts allows other sizes"
                            }
                            _ => "",
                        };
                        return refuse(format!("axis {at} should be {expected} but is {size}{opens}"));
                    }
                    Axis::Known(_) => {}
                    Axis::Symbol(symbol) => match self.sizes[symbol] {
                        Some((expected, first)) if expected != size => {
                            return refuse(format!(
                                "axis {at} is {size}, but {:?} is {expected} in input {:?}",
                                self.symbols[symbol], self.infos[first].name
                            ));
                        }
                        Some(_) => {}
                        None => self.sizes[symbol] = Some((size, k)),
                    },
                }
            }
        }
        Ok(())
    }
}
