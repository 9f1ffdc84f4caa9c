//! Cooperative cancellation of long work on a thread: a callback that the work calls regularly.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Callback that returns true if the work must stop.
pub type StopQuestion = Box<dyn FnMut() -> bool>;

thread_local! {
    /// The callback of [`stoppable`] while its work runs on this thread.
    static QUESTION: RefCell<Option<StopQuestion>> = const { RefCell::new(None) };
}

/// Error: the work was stopped. Its results are missing or incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped;

/// Runs `work`, and stops it as soon as `question` returns true. Each [`pause`] of the work on this thread calls the
/// question. Code that the question itself runs cannot be stopped.
///
/// ```
/// use ortrain_expr::{Stopped, pause, stoppable};
///
/// let mut asked = 0;
/// let question = move || {
///     asked += 1;
///     asked > 5
/// };
/// assert_eq!(stoppable(Box::new(question), || loop { pause() }), Err::<(), _>(Stopped));
/// assert_eq!(stoppable(Box::new(|| false), || 7), Ok(7));
/// ```
///
/// # Errors
/// The work was stopped.
///
/// # Panics
/// A panic of the work is propagated.
pub fn stoppable<T>(question: StopQuestion, work: impl FnOnce() -> T) -> Result<T, Stopped> {
    let before = QUESTION.replace(Some(question));
    let result = catch_unwind(AssertUnwindSafe(work));
    QUESTION.set(before);
    result.map_err(|panic| if panic.is::<Stopped>() { Stopped } else { resume_unwind(panic) })
}

/// Runs work that must finish once it has begun: [`pause`] has no effect inside of it.
pub fn unstoppable<T>(work: impl FnOnce() -> T) -> T {
    /// Restores the question when it is dropped, also during a panic.
    struct RestoreQuestion(Option<StopQuestion>);
    impl Drop for RestoreQuestion {
        fn drop(&mut self) {
            QUESTION.set(self.0.take());
        }
    }
    let _kept = RestoreQuestion(QUESTION.take());
    work()
}

/// Stops the work of this thread, by unwinding, if the question of [`stoppable`] returns true. Long loops call this
/// function.
pub fn pause() {
    let Some(mut question) = QUESTION.take() else { return };
    let stops = question();
    QUESTION.set(Some(question));
    if stops {
        // `resume_unwind` prints no panic message.
        resume_unwind(Box::new(Stopped));
    }
}

/// Counter of the small steps of a long computation: calls [`pause`] once in many steps.
///
/// ```
/// use ortrain_expr::{Steps, Stopped, stoppable};
///
/// let steps = Steps::default();
/// assert_eq!(stoppable(Box::new(|| true), || loop { steps.step() }), Err::<(), _>(Stopped));
/// ```
#[derive(Debug, Default)]
pub struct Steps(Cell<u32>);

impl Steps {
    /// Number of steps between two calls of [`pause`]: about ten microseconds of comparisons.
    const STEPS_PER_PAUSE: u32 = 1 << 14;

    /// Counts one step.
    pub fn step(&self) {
        let done = self.0.get() + 1;
        self.0.set(done % Steps::STEPS_PER_PAUSE);
        if done == Steps::STEPS_PER_PAUSE {
            pause();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_nest_and_are_restored() {
        let inside = || stoppable(Box::new(|| true), pause);
        let outside = stoppable(Box::new(|| false), || {
            pause();
            let answer = inside();
            pause();
            unstoppable(|| stoppable(Box::new(|| true), || unstoppable(pause))).map(|()| answer)
        });
        assert_eq!(outside, Ok(Ok(Err(Stopped))));
        let panic = catch_unwind(|| stoppable(Box::new(|| true), || unstoppable(|| panic!("of the work"))));
        assert_eq!(panic.expect_err("it goes on").downcast_ref::<&str>(), Some(&"of the work"));
        assert!(QUESTION.take().is_none());
    }
}
