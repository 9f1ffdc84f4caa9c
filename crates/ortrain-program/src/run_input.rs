//! Inputs of a run.

use std::borrow::Cow;

use ortrain_expr::DType;
use ortrain_graph::{Tensor, byte_length};

use crate::{DeviceError, Memory};

/// Input of a run: element type, shape and little-endian bytes.
#[derive(Clone, Copy, Debug)]
pub struct RunInput<'a> {
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub dims: &'a [usize],
    /// Elements, row-major.
    pub bytes: InputBytes<'a>,
}

/// Bytes of an input.
#[derive(Clone, Copy, Debug)]
pub enum InputBytes<'a> {
    /// Bytes of this process.
    Host(&'a [u8]),
    /// The first bytes of memory on a device. A run on this device copies them there.
    Device(&'a Memory),
}

impl<'a> From<&'a [u8]> for InputBytes<'a> {
    fn from(bytes: &'a [u8]) -> InputBytes<'a> {
        InputBytes::Host(bytes)
    }
}

impl<'a> From<&'a Tensor> for RunInput<'a> {
    fn from(tensor: &'a Tensor) -> RunInput<'a> {
        RunInput { dtype: tensor.dtype(), dims: tensor.dims(), bytes: InputBytes::Host(tensor.data()) }
    }
}

impl<'a> RunInput<'a> {
    /// Returns the number of bytes. Of memory on a device, these are the bytes of the shape.
    #[must_use]
    pub fn byte_count(&self) -> usize {
        match self.bytes {
            InputBytes::Host(bytes) => bytes.len(),
            InputBytes::Device(memory) => {
                byte_length(self.dtype, self.dims).unwrap_or(usize::MAX).min(memory.len())
            }
        }
    }

    /// Returns the bytes in this process. Bytes on a device are copied.
    ///
    /// # Errors
    /// When the device fails.
    pub fn to_host(&self) -> Result<Cow<'a, [u8]>, DeviceError> {
        self.bytes.to_host(self.byte_count())
    }
}

impl<'a> InputBytes<'a> {
    /// Returns the bytes in this process. From a device, the first `count` bytes are copied.
    pub(crate) fn to_host(self, count: usize) -> Result<Cow<'a, [u8]>, DeviceError> {
        match self {
            InputBytes::Host(bytes) => Ok(Cow::Borrowed(bytes)),
            InputBytes::Device(memory) => Ok(Cow::Owned(memory.to_vec(0, count)?)),
        }
    }
}
