//! The one door through the interpreter lock.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::ThreadId;

use pyo3::prelude::*;

use crate::error::{OrtrainError, raise};

/// A value that one thread at a time works on, with the interpreter released.
#[derive(Debug)]
pub(crate) struct Door<T> {
    value: Mutex<T>,
    inside: Mutex<Option<ThreadId>>,
}

impl<T: Send> Door<T> {
    pub(crate) fn new(value: T) -> Door<T> {
        Door { value: Mutex::new(value), inside: Mutex::new(None) }
    }

    /// Waits for whoever is inside, then runs `work`, all of it with the interpreter released.
    ///
    /// # Errors
    /// Those of `work`; when this thread is inside already; when a panic left the value half changed.
    pub(crate) fn pass<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut T) -> ortrain::Result<R> + Send,
    ) -> PyResult<R> {
        py.detach(|| {
            let mut value = self.enter()?;
            *self.inside() = Some(std::thread::current().id());
            let result = work(&mut value);
            *self.inside() = None;
            Ok(result)
        })
        .map_err(OrtrainError::new_err::<&str>)?
        .map_err(raise)
    }

    fn enter(&self) -> Result<MutexGuard<'_, T>, &'static str> {
        const BROKEN: &str =
            "an earlier call broke off inside ortrain and may have left this half changed; load it again";
        match self.value.try_lock() {
            Ok(value) => Ok(value),
            Err(TryLockError::Poisoned(_)) => Err(BROKEN),
            Err(TryLockError::WouldBlock) if *self.inside() == Some(std::thread::current().id()) => {
                Err("this is in use by a call that has not returned yet on this same thread")
            }
            Err(TryLockError::WouldBlock) => self.value.lock().map_err(|_| BROKEN),
        }
    }

    fn inside(&self) -> MutexGuard<'_, Option<ThreadId>> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
