//! Inputs of a run.

use std::borrow::Cow;
use std::sync::Arc;

use ortrain_expr::DType;
use ortrain_graph::{Tensor, byte_length};

use crate::{DeviceError, Memory};

/// Input of a run: element type, shape and elements.
#[derive(Clone, Copy, Debug)]
pub struct InputView<'a> {
    /// Element type. Of a sequence, the element type of its tensors.
    pub dtype: DType,
    /// Shape. Empty for a sequence.
    pub dims: &'a [usize],
    /// Elements, row-major.
    pub bytes: InputBytes<'a>,
}

/// Elements of an input.
#[derive(Clone, Copy, Debug)]
pub enum InputBytes<'a> {
    /// Little-endian bytes of this process.
    Host(&'a [u8]),
    /// The first bytes of memory of this process or of a device. Others may write to this memory between runs.
    Memory(&'a Arc<Memory>),
    /// A sequence of tensors.
    Sequence(&'a [Tensor]),
}

impl<'a> From<&'a [u8]> for InputBytes<'a> {
    fn from(bytes: &'a [u8]) -> InputBytes<'a> {
        InputBytes::Host(bytes)
    }
}

impl<'a> From<&'a Tensor> for InputView<'a> {
    fn from(tensor: &'a Tensor) -> InputView<'a> {
        InputView { dtype: tensor.dtype(), dims: tensor.dims(), bytes: InputBytes::Host(tensor.data()) }
    }
}

/// A sequence of tensors. An empty sequence counts as a sequence of float32 tensors.
impl<'a> From<&'a [Tensor]> for InputView<'a> {
    fn from(tensors: &'a [Tensor]) -> InputView<'a> {
        let dtype = tensors.first().map_or(DType::F32, Tensor::dtype);
        InputView { dtype, dims: &[], bytes: InputBytes::Sequence(tensors) }
    }
}

impl<'a> InputView<'a> {
    /// Returns an input in a memory that others may write to between runs.
    #[must_use]
    pub fn in_memory(dtype: DType, dims: &'a [usize], memory: &'a Arc<Memory>) -> InputView<'a> {
        InputView { dtype, dims, bytes: InputBytes::Memory(memory) }
    }

    /// Returns the memory of the elements; `None` for bytes of this process and for sequences.
    #[must_use]
    pub fn memory(&self) -> Option<&'a Arc<Memory>> {
        match self.bytes {
            InputBytes::Memory(memory) => Some(memory),
            InputBytes::Host(_) | InputBytes::Sequence(_) => None,
        }
    }

    /// Returns true if the input is a sequence of tensors.
    #[must_use]
    pub fn is_sequence(&self) -> bool {
        matches!(self.bytes, InputBytes::Sequence(_))
    }

    /// Returns the number of bytes: in a memory, the bytes of the shape; of a sequence, the bytes of its tensors.
    #[must_use]
    pub fn byte_count(&self) -> usize {
        match self.bytes {
            InputBytes::Host(bytes) => bytes.len(),
            InputBytes::Memory(memory) => {
                byte_length(self.dtype, self.dims).unwrap_or(usize::MAX).min(memory.len())
            }
            InputBytes::Sequence(tensors) => tensors.iter().map(|tensor| tensor.data().len()).sum(),
        }
    }

    /// Returns the bytes in this process. Bytes on a device are copied.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When the input is a sequence.
    pub fn to_host(&self) -> Result<Cow<'a, [u8]>, DeviceError> {
        self.bytes.to_host(self.byte_count())
    }
}

impl<'a> InputBytes<'a> {
    /// Returns the bytes in this process. From a memory, the first `count` bytes are copied.
    ///
    /// # Panics
    /// When the input is a sequence.
    pub(crate) fn to_host(self, count: usize) -> Result<Cow<'a, [u8]>, DeviceError> {
        match self {
            InputBytes::Host(bytes) => Ok(Cow::Borrowed(bytes)),
            InputBytes::Memory(memory) => Ok(Cow::Owned(memory.to_vec(0, count)?)),
            InputBytes::Sequence(_) => panic!("programs have no sequences as inputs"),
        }
    }
}
