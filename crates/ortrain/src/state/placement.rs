//! Location of the planes of a state: in this process, or on a device.

use std::sync::Arc;

use ortrain_program::{AllocationError, Backend, HOST, Memory};

use crate::exec::backend::host_memory;
use crate::state::layout::PlaneLayout;
use crate::{Error, Result};

/// Chunk size of a copy between memories, in bytes.
const COPY_CHUNK_BYTES: usize = 1 << 20;

/// Location of planes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Placement {
    /// Backend that allocates there; `None` for this process, which needs no backend.
    backend: Option<Arc<dyn Backend>>,
}

/// Converts an allocation error for values of a state.
fn allocation_error(error: AllocationError) -> Error {
    match error {
        AllocationError::Device(failed) => failed.into(),
        lack => Error::StateAllocation(lack),
    }
}

impl Placement {
    /// Returns the location of the planes of a backend.
    pub(crate) fn of(backend: &Arc<dyn Backend>) -> Placement {
        Placement { backend: (backend.device() != HOST).then(|| backend.clone()) }
    }

    /// Returns the name of the device.
    pub(crate) fn device(&self) -> &str {
        self.backend.as_ref().map_or(HOST, |backend| backend.device())
    }

    /// Allocates zeroed memory.
    pub(crate) fn allocate(&self, bytes: usize) -> std::result::Result<Memory, AllocationError> {
        match &self.backend {
            Some(backend) => backend.allocate(bytes, bytes),
            None => Ok(host_memory(bytes)?),
        }
    }

    /// Allocates zeroed planes of a layout.
    pub(crate) fn allocate_planes(&self, planes: &[PlaneLayout]) -> Result<Vec<Arc<Memory>>> {
        let zeros = |plane: &PlaneLayout| {
            // Sizes may come from an untrusted model: a failed allocation is an error and must not abort the
            // process.
            Ok(Arc::new(self.allocate_state(plane.bytes)?))
        };
        planes.iter().map(zeros).collect()
    }

    /// Allocates memory for values of a state.
    fn allocate_state(&self, bytes: usize) -> Result<Memory> {
        self.allocate(bytes).map_err(allocation_error)
    }

    /// Copies planes to this location.
    pub(crate) fn copy_planes(&self, planes: &[Arc<Memory>]) -> Result<Vec<Arc<Memory>>> {
        planes.iter().map(|plane| self.copy_plane(plane).map(Arc::new)).collect()
    }

    /// Copies a plane to this location.
    pub(crate) fn copy_plane(&self, plane: &Memory) -> Result<Memory> {
        if plane.device() == self.device() && plane.host().is_none() {
            return plane.copy(0, plane.len()).map_err(allocation_error);
        }
        let copy = self.allocate_state(plane.len())?;
        let mut piece = vec![0; COPY_CHUNK_BYTES.min(plane.len())];
        for from in (0..plane.len()).step_by(COPY_CHUNK_BYTES) {
            let piece = &mut piece[..COPY_CHUNK_BYTES.min(plane.len() - from)];
            plane.read(from, piece)?;
            copy.write(from, piece)?;
        }
        Ok(copy)
    }
}
