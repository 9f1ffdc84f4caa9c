//! Which backend runs what, when the user does not say.

use std::sync::Arc;

use ortrain_program::{Backend, Reference};

/// The backend that is used when none is given.
#[must_use]
pub fn default_backend() -> Arc<dyn Backend> {
    Arc::new(Reference)
}
