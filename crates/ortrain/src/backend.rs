//! Which backend runs what.

use std::sync::Arc;

use ortrain_program::{Backend, Reference};

use crate::{Error, Result};

/// The backend that is used when none is given.
#[must_use]
pub fn default_backend() -> Arc<dyn Backend> {
    Arc::new(Reference)
}

/// The backend of a name: `cpu`, or `reference`, which says what is right and takes its time. `num_threads` is how many
/// threads a run may take, 0 for one per core; results do not depend on it.
///
/// # Errors
/// When there is none of this name.
pub fn backend(name: &str, _num_threads: usize) -> Result<Arc<dyn Backend>> {
    match name {
        "cpu" => Ok(default_backend()),
        "reference" => Ok(Arc::new(Reference)),
        _ => Err(Error::Argument(format!("there is no device {name:?} here; there are \"cpu\" and \"reference\""))),
    }
}
