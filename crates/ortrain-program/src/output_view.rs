//! Outputs of a run.

use ortrain_graph::{DType, Tensor};

use crate::{AllocationError, DeviceError, Memory};

/// Bytes of a copy between two memories per chunk.
const COPY_CHUNK_BYTES: usize = 4 << 10;

/// Element type and shape of a result.
pub type ResultType = (DType, Vec<usize>);

/// Output of a run: element type, shape and elements. The elements are valid until the callback returns.
#[derive(Clone, Copy, Debug)]
pub struct OutputView<'a> {
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub dims: &'a [usize],
    elements: Elements<'a>,
}

/// Callback that receives an output of a run and its index. An error ends the run.
pub type OutputSink<'a> = dyn FnMut(usize, OutputView<'_>) -> Result<(), DeviceError> + 'a;

/// Elements of an output, row-major.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Elements<'a> {
    /// Bytes of the arena or of a plane, from an offset.
    Memory(&'a Memory, usize),
    /// Elements of a tensor.
    Tensor(&'a Tensor),
}

impl<'a> From<&'a Tensor> for OutputView<'a> {
    fn from(tensor: &'a Tensor) -> OutputView<'a> {
        OutputView { dtype: tensor.dtype(), dims: tensor.dims(), elements: Elements::Tensor(tensor) }
    }
}

impl<'a> OutputView<'a> {
    pub(crate) fn new(dtype: DType, dims: &'a [usize], elements: Elements<'a>) -> OutputView<'a> {
        OutputView { dtype, dims, elements }
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn byte_count(&self) -> usize {
        self.dims.iter().product::<usize>() * self.dtype.size()
    }

    /// Copies the elements into `bytes`, which has their length.
    ///
    /// # Errors
    /// When the elements are on a device, and the device fails.
    pub fn copy_to(&self, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.elements.copy_to(bytes)
    }

    /// Copies the elements to the beginning of a memory that is possibly shared.
    ///
    /// # Errors
    /// When one of the memories is on a device, and the device fails.
    ///
    /// # Panics
    /// When the elements do not fit, or the memory is read-only.
    pub fn write_to(&self, memory: &Memory) -> Result<(), DeviceError> {
        let bytes = self.byte_count();
        match self.elements {
            Elements::Tensor(tensor) => memory.write(0, &tensor.data()[..bytes]),
            Elements::Memory(..) => {
                // Chunks fit into a cache. No Rust reference to either memory exists.
                let mut piece = [0; COPY_CHUNK_BYTES];
                for from in (0..bytes).step_by(COPY_CHUNK_BYTES) {
                    let piece = &mut piece[..COPY_CHUNK_BYTES.min(bytes - from)];
                    self.elements.copy_part(from, piece)?;
                    memory.write(from, piece)?;
                }
                Ok(())
            }
        }
    }

    /// Copies the elements to a tensor in host memory.
    ///
    /// # Errors
    /// When the elements are on a device, and the device fails.
    ///
    /// # Panics
    /// Never: a run gives each output the elements of its shape.
    pub fn to_tensor(&self) -> Result<Tensor, DeviceError> {
        let mut bytes = vec![0; self.byte_count()];
        self.copy_to(&mut bytes)?;
        Ok(Tensor::new(self.dtype, self.dims.to_vec(), bytes.into())
            .expect("the bytes are those of the shape"))
    }

    /// Copies the elements within their memory; a copy on a device is asynchronous.
    ///
    /// # Errors
    /// When memory for the copy is not available, or the device fails.
    pub fn copy(&self) -> Result<Memory, AllocationError> {
        let bytes = self.byte_count();
        match self.elements {
            Elements::Memory(memory, offset) => memory.copy(offset, bytes),
            Elements::Tensor(tensor) => {
                let copy = Memory::try_new(bytes)?;
                copy.write(0, &tensor.data()[..bytes])?;
                Ok(copy)
            }
        }
    }

    /// Returns true if the elements are on a device, so that a read waits for the device.
    #[must_use]
    pub fn is_on_device(&self) -> bool {
        matches!(self.elements, Elements::Memory(memory, _) if memory.host().is_none())
    }
}

impl Elements<'_> {
    /// Copies the elements into `bytes`, which has their length.
    pub(crate) fn copy_to(&self, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.copy_part(0, bytes)
    }

    /// Copies part of the elements, from byte `from`.
    pub(crate) fn copy_part(&self, from: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        match self {
            Elements::Memory(memory, offset) => memory.read(offset + from, bytes),
            Elements::Tensor(tensor) => {
                bytes.copy_from_slice(&tensor.data()[from..from + bytes.len()]);
                Ok(())
            }
        }
    }
}
