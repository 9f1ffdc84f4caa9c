//! Thread that runs collectives while the backward pass computes.

use std::fmt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::communicator::{Collective, Communicator};
use crate::{Error, Result};

/// Time of the communication of a session.
///
/// ```
/// use ortrain::distributed::CommunicationTime;
///
/// let time = CommunicationTime::default();
/// assert_eq!(time.hidden_share(), 0.0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommunicationTime {
    /// Number of updates.
    pub updates: u64,
    /// Time of the sums of gradients, without waiting for other ranks to be ready for a step.
    pub total: Duration,
    /// Time that the session waited for these sums, and computed nothing.
    pub waited: Duration,
}

impl CommunicationTime {
    /// Returns the share of the time that computations hide, from 0 to 1.
    #[must_use]
    pub fn hidden_share(&self) -> f64 {
        if self.total.is_zero() {
            return 0.0;
        }
        (1.0 - self.waited.as_secs_f64() / self.total.as_secs_f64()).max(0.0)
    }
}

/// Queue of collectives, which one thread runs in order.
pub(crate) struct CommunicationQueue {
    state: Mutex<QueueState>,
}

struct QueueState {
    collectives: Sender<Collective>,
    results: Receiver<Result<Duration>>,
    /// Number of collectives without a received result.
    pending: usize,
}

impl fmt::Debug for CommunicationQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CommunicationQueue({} pending)", self.lock().pending)
    }
}

impl CommunicationQueue {
    /// Starts the thread. It ends when the queue is dropped.
    pub(crate) fn new(communicator: Arc<dyn Communicator>) -> Result<CommunicationQueue> {
        let (collectives, received) = channel::<Collective>();
        let (sender, results) = channel();
        let run = move || {
            for collective in received {
                let start = Instant::now();
                let result = communicator.run(collective).map(|()| start.elapsed());
                if sender.send(result).is_err() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("ortrain communication".into()).spawn(run);
        thread.map_err(|error| Error::Communication(format!("no thread can be started: {error}")))?;
        Ok(CommunicationQueue { state: Mutex::new(QueueState { collectives, results, pending: 0 }) })
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends a collective.
    pub(crate) fn start(&self, collective: Collective) -> Result<()> {
        let mut state = self.lock();
        state.collectives.send(collective).map_err(|_| thread_ended())?;
        state.pending += 1;
        Ok(())
    }

    /// Waits for all collectives, and returns the time that they took.
    pub(crate) fn wait(&self) -> Result<Duration> {
        let mut state = self.lock();
        let (mut total, mut failure) = (Duration::ZERO, Ok(()));
        while state.pending > 0 {
            state.pending -= 1;
            match state.results.recv().map_err(|_| thread_ended())? {
                Ok(elapsed) => total += elapsed,
                Err(error) if failure.is_ok() => failure = Err(error),
                Err(_) => {}
            }
        }
        failure.map(|()| total)
    }
}

fn thread_ended() -> Error {
    Error::Communication("the thread of the communication has ended".into())
}
