//! Locks that release the interpreter lock of Python while a call works.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::ThreadId;

use pyo3::prelude::*;

use crate::error::{OrtrainError, raise};

/// Value with a lock: one thread at a time works on it, without the interpreter lock.
#[derive(Debug)]
pub(crate) struct Exclusive<T> {
    value: Mutex<T>,
    /// Thread that holds the lock, to report a second call of the same thread instead of waiting forever.
    owner: Mutex<Option<ThreadId>>,
}

impl<T: Send> Exclusive<T> {
    pub(crate) fn new(value: T) -> Exclusive<T> {
        Exclusive { value: Mutex::new(value), owner: Mutex::new(None) }
    }

    /// Waits for the lock, then runs `work`. The interpreter lock is released from the start of the wait to
    /// the end of `work`.
    ///
    /// # Errors
    /// Errors of `work`; an error if this thread holds the lock already, or if an earlier call panicked.
    pub(crate) fn enter<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut T) -> ortrain::Result<R> + Send,
    ) -> PyResult<R> {
        py.detach(|| {
            let mut value = self.lock()?;
            *self.owner() = Some(std::thread::current().id());
            let result = work(&mut value);
            *self.owner() = None;
            Ok(result)
        })
        .map_err(OrtrainError::new_err::<&str>)?
        .map_err(raise)
    }

    fn lock(&self) -> Result<MutexGuard<'_, T>, &'static str> {
        const BROKEN: &str =
            "an earlier call failed inside ortrain and may have left this object half changed; load it again";
        match self.value.try_lock() {
            Ok(value) => Ok(value),
            Err(TryLockError::Poisoned(_)) => Err(BROKEN),
            Err(TryLockError::WouldBlock) if *self.owner() == Some(std::thread::current().id()) => {
                Err("this object is in use by an unfinished call on the same thread")
            }
            Err(TryLockError::WouldBlock) => self.value.lock().map_err(|_| BROKEN),
        }
    }

    fn owner(&self) -> MutexGuard<'_, Option<ThreadId>> {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
