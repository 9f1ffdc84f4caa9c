//! Stopping long work on a thread: a question that is asked from inside of the work.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// A question that is answered with true if the work shall stop.
pub type Question = Box<dyn FnMut() -> bool>;

thread_local! {
    /// The question of [`stoppable`], while it runs on this thread.
    static QUESTION: RefCell<Option<Question>> = const { RefCell::new(None) };
}

/// The work was stopped. Its results are missing or incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped;

/// Does work, and stops it when `question` answers true. Each [`pause`] of the work on this thread asks the question; work inside
/// of the question is not stopped.
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
/// When the work was stopped.
///
/// # Panics
/// With the panic of the work.
pub fn stoppable<T>(question: Question, work: impl FnOnce() -> T) -> Result<T, Stopped> {
    let before = QUESTION.replace(Some(question));
    let result = catch_unwind(AssertUnwindSafe(work));
    QUESTION.set(before);
    result.map_err(|panic| if panic.is::<Stopped>() { Stopped } else { resume_unwind(panic) })
}

/// Does work that is finished once it has begun: [`pause`] does nothing in it.
pub fn unstoppable<T>(work: impl FnOnce() -> T) -> T {
    /// The question comes back in a panic, too.
    struct Kept(Option<Question>);
    impl Drop for Kept {
        fn drop(&mut self) {
            QUESTION.set(self.0.take());
        }
    }
    let _kept = Kept(QUESTION.take());
    work()
}

/// Ends the work of this thread, by unwinding, if it is to be stopped. Long loops call this.
pub fn pause() {
    let Some(mut question) = QUESTION.take() else { return };
    let stops = question();
    QUESTION.set(Some(question));
    if stops {
        // Without the message of a panic.
        resume_unwind(Box::new(Stopped));
    }
}

/// Counts small steps of a long computation, and calls [`pause`] after many of them.
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
    /// Steps between two calls of [`pause`]: some ten microseconds of comparisons.
    const BETWEEN: u32 = 1 << 14;

    /// One step.
    pub fn step(&self) {
        let done = self.0.get() + 1;
        self.0.set(done % Steps::BETWEEN);
        if done == Steps::BETWEEN {
            pause();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_nested_and_come_back() {
        let inside = || stoppable(Box::new(|| true), pause);
        let outside = stoppable(Box::new(|| false), || {
            pause();
            let found = inside();
            pause();
            unstoppable(|| stoppable(Box::new(|| true), || unstoppable(pause))).map(|()| found)
        });
        assert_eq!(outside, Ok(Ok(Err(Stopped))));
        let panic = catch_unwind(|| stoppable(Box::new(|| true), || unstoppable(|| panic!("of the work"))));
        assert_eq!(panic.expect_err("it goes on").downcast_ref::<&str>(), Some(&"of the work"));
        assert!(QUESTION.take().is_none());
    }
}
