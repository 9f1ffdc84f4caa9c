//! Interruption of runs, with a rollback of the state.
//!
//! Between instructions, and inside long instructions, a run checks for an interrupt a few times per second. Runs write
//! gradients as they proceed, so a long run saves the old bytes before its first write. A short run does not save them,
//! and runs to its end.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ortrain_expr::{StopQuestion, Stopped, stoppable};
use smallvec::SmallVec;

use crate::{Bindings, BufferLocation, DeviceError, Program, RunError};

/// Minimum time between two checks.
const POLL_PERIOD: Duration = Duration::from_millis(80);

/// Work after which the clock is read. [`ticks`] computes the work of an instruction.
const TICKS_PER_CLOCK_READ: u32 = 256;

/// Operations and bytes per tick.
const WORK_PER_TICK: u64 = 1 << 12;

/// Minimum operations and bytes of a long instruction, which takes at least a twentieth of a second.
const MIN_LONG_WORK: u64 = 1 << 29;

/// Maximum time until the first write to state of a short run, which is not interrupted after that write.
const MAX_SHORT_RUN: Duration = Duration::from_millis(20);

/// Callback that requests the end of a run, polled from time to time. Its own work (for example signal handlers) delays
/// the run.
#[derive(Clone)]
pub struct Interrupt(Arc<dyn Fn() -> bool + Send + Sync>);

impl Interrupt {
    /// Creates an interrupt. A run ends when `is_requested` returns true.
    #[must_use]
    pub fn new(is_requested: impl Fn() -> bool + Send + Sync + 'static) -> Interrupt {
        Interrupt(Arc::new(is_requested))
    }

    /// Returns a poll function for [`ortrain_expr::stoppable`], which calls the callback a few times per second.
    #[must_use]
    pub fn question(&self) -> StopQuestion {
        let (interrupt, mut last_poll) = (self.clone(), Instant::now());
        Box::new(move || {
            let now = Instant::now();
            if now.duration_since(last_poll) < POLL_PERIOD {
                return false;
            }
            last_poll = now;
            (interrupt.0)()
        })
    }
}

/// Runs `work`, and stops it when `question` (if present) returns true.
///
/// # Errors
/// [`RunError::Interrupted`], and the errors of the work.
pub fn interruptible<T, E: From<RunError>>(
    question: Option<StopQuestion>,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    match question {
        Some(question) => {
            stoppable(question, work).unwrap_or_else(|Stopped| Err(RunError::Interrupted.into()))
        }
        None => work(),
    }
}

/// Callback before the first write of a run to state, and before all later instructions.
pub trait CommitGate: Send {
    /// Allows or refuses the changes of the run.
    ///
    /// # Errors
    /// [`RunError::Refused`]. The run then ends, and no state has changed.
    fn before_commit(&mut self) -> Result<(), RunError>;

    /// Follows a run after its first write to state: all instructions before the position `at` have ended. On a device
    /// that runs instructions later, they have been submitted.
    fn follow(&mut self, at: usize, points: &InterruptPoints) {
        let _ = (at, points);
    }
}

/// Gate of the next run, and true if the run has passed the gate.
#[derive(Default)]
struct Gate {
    gate: Option<Box<dyn CommitGate>>,
    is_passed: bool,
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gate(is_passed: {})", self.is_passed)
    }
}

impl fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Interrupt")
    }
}

/// Properties of a program's instructions for interrupts, computed once.
#[derive(Debug)]
pub struct InterruptPoints(Vec<InterruptPoint>);

/// Work of an instruction, and the bytes of planes that it writes.
#[derive(Debug)]
struct InterruptPoint {
    ticks: u32,
    is_long: bool,
    writes: SmallVec<[(usize, Range<usize>); 1]>,
}

impl InterruptPoints {
    /// Computes the properties of a program's instructions.
    #[must_use]
    pub fn from_program(program: &Program) -> InterruptPoints {
        let marks = program.instructions.iter().map(|scheduled| {
            let cost = scheduled.instruction.cost(program);
            let writes = scheduled.instruction.writes().into_iter().filter_map(|id| {
                let buffer = program.buffer(id);
                match buffer.location {
                    BufferLocation::Plane(plane, offset) => {
                        Some((plane.0 as usize, offset..offset + buffer.bytes()))
                    }
                    BufferLocation::Work(_) | BufferLocation::Constant(_) => None,
                }
            });
            let is_long = cost.flops.saturating_add(cost.bytes) >= MIN_LONG_WORK;
            InterruptPoint { ticks: ticks(cost.flops, cost.bytes), is_long, writes: writes.collect() }
        });
        InterruptPoints(marks.collect())
    }

    /// Checks for an interrupt and saves the bytes that the instruction at `at` is about to write.
    ///
    /// # Errors
    /// [`RunError::Interrupted`], and [`RunError::Device`].
    pub fn check_before(
        &self,
        at: usize,
        bindings: &Bindings<'_>,
        watch: &mut Watch,
    ) -> Result<(), RunError> {
        let InterruptPoint { ticks, writes, .. } = &self.0[at];
        watch.check(*ticks)?;
        if !writes.is_empty() {
            watch.pass_gate()?;
        }
        if let Gate { gate: Some(gate), is_passed: true } = &mut watch.gate {
            gate.follow(at, self);
        }
        for (plane, bytes) in writes {
            watch.before_write(bindings, *plane, bytes.clone())?;
        }
        Ok(())
    }

    /// Returns the position of the last instruction that writes some of these bytes of a plane.
    #[must_use]
    pub fn last_write(&self, plane: usize, bytes: &Range<usize>) -> Option<usize> {
        let overlaps = |(other, written): &(usize, Range<usize>)| {
            *other == plane && written.start < bytes.end && bytes.start < written.end
        };
        self.0.iter().rposition(|point| point.writes.iter().any(overlaps))
    }

    /// Returns the poll function during the instruction at `at`; `None` for a short instruction, and for a run that can
    /// no longer be rolled back.
    #[must_use]
    pub fn question(&self, at: usize, watch: &Watch) -> Option<StopQuestion> {
        if self.0[at].is_long { watch.question() } else { None }
    }
}

/// Returns the work of an instruction in ticks.
fn ticks(flops: u64, bytes: u64) -> u32 {
    let parts = flops.saturating_add(bytes) / WORK_PER_TICK;
    u32::try_from(parts).unwrap_or(u32::MAX).clamp(1, TICKS_PER_CLOCK_READ)
}

/// Bytes of a plane before a run wrote them.
#[derive(Debug)]
struct SavedBytes {
    plane: usize,
    from: usize,
    len: usize,
    /// `None` if all bytes are zero.
    bytes: Option<Vec<u8>>,
}

/// Interrupt state of a run: it polls the callback and records changes for a rollback.
#[derive(Debug, Default)]
pub struct Watch {
    pub(crate) interrupt: Option<Interrupt>,
    /// Work since the clock was read.
    ticks: u32,
    last_poll: Option<Instant>,
    start: Option<Instant>,
    /// True if state was written that cannot be restored.
    is_committed: bool,
    saved: Vec<SavedBytes>,
    saved_bytes: usize,
    /// Maximum number of saved bytes, if limited.
    max_saved_bytes: Option<usize>,
    pub(crate) disposable: Range<usize>,
    wrote_disposable: bool,
    gate: Gate,
}

impl Watch {
    pub(crate) fn new(interrupt: Option<Interrupt>) -> Watch {
        Watch { interrupt, ..Watch::default() }
    }

    pub(crate) fn begin(&mut self, max_saved: Option<usize>) {
        (self.is_committed, self.wrote_disposable, self.saved_bytes, self.max_saved_bytes) =
            (false, false, 0, max_saved);
        self.saved.clear();
        self.start = self.interrupt.is_some().then(Instant::now);
    }

    /// Sets the gate of the next run.
    pub(crate) fn set_gate(&mut self, gate: Option<Box<dyn CommitGate>>) {
        self.gate = Gate { gate, is_passed: false };
    }

    /// Asks the gate once, before the first write to state. A run that has passed its gate is not interrupted.
    fn pass_gate(&mut self) -> Result<(), RunError> {
        let Gate { gate: Some(gate), is_passed: false } = &mut self.gate else { return Ok(()) };
        gate.before_commit()?;
        self.gate.is_passed = true;
        self.is_committed = true;
        Ok(())
    }

    /// Ends a run. Restores the planes if the run failed.
    pub(crate) fn end(&mut self, bindings: &Bindings<'_>, broke_off: bool) -> Result<(), DeviceError> {
        let saved = std::mem::take(&mut self.saved);
        let disposable = std::mem::take(&mut self.disposable);
        self.start = None;
        self.gate = Gate::default();
        if !broke_off || self.is_committed {
            return Ok(());
        }
        for SavedBytes { plane, from, len, bytes } in saved.into_iter().rev() {
            bindings.planes[plane].write(from, &bytes.unwrap_or_else(|| vec![0; len]))?;
        }
        for plane in disposable.filter(|_| self.wrote_disposable) {
            bindings.planes[plane].clear()?;
        }
        Ok(())
    }

    /// Returns the poll function for work without ticks; `None` for a run without an interrupt, and for a run that can
    /// no longer be rolled back.
    #[must_use]
    pub fn question(&self) -> Option<StopQuestion> {
        Some(self.interrupt.as_ref().filter(|_| !self.is_committed)?.question())
    }

    /// Checks for an interrupt, after `ticks` of work.
    ///
    /// # Errors
    /// [`RunError::Interrupted`].
    pub(crate) fn check(&mut self, ticks: u32) -> Result<(), RunError> {
        let Some(interrupt) = &self.interrupt else { return Ok(()) };
        self.ticks = self.ticks.saturating_add(ticks);
        if self.ticks < TICKS_PER_CLOCK_READ || self.is_committed {
            return Ok(());
        }
        self.ticks = 0;
        let now = Instant::now();
        if self.last_poll.is_some_and(|last_poll| now.duration_since(last_poll) < POLL_PERIOD) {
            return Ok(());
        }
        // The first check only starts the clock: a run that has just begun does not poll.
        let first = self.last_poll.replace(now).is_none();
        if !first && (interrupt.0)() { Err(RunError::Interrupted) } else { Ok(()) }
    }

    pub(crate) fn before_write(
        &mut self,
        bindings: &Bindings<'_>,
        plane: usize,
        bytes: Range<usize>,
    ) -> Result<(), DeviceError> {
        let Some(start) = self.start.filter(|_| !self.is_committed) else { return Ok(()) };
        if self.disposable.contains(&plane) {
            self.wrote_disposable = true;
            return Ok(());
        }
        let total = self.saved_bytes.saturating_add(bytes.len());
        if self.saved.is_empty() && start.elapsed() < MAX_SHORT_RUN
            || self.max_saved_bytes.is_some_and(|limit| total > limit)
        {
            self.is_committed = true;
            self.saved = Vec::new();
            return Ok(());
        }
        let before = bindings.planes[plane].to_vec(bytes.start, bytes.len())?;
        let is_zero = before.iter().all(|&byte| byte == 0);
        self.saved_bytes += if is_zero { 0 } else { before.len() };
        let (from, len, bytes) = (bytes.start, bytes.len(), (!is_zero).then_some(before));
        self.saved.push(SavedBytes { plane, from, len, bytes });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::Memory;

    fn watch() -> (Watch, Arc<AtomicBool>) {
        let flag = Arc::new(AtomicBool::new(false));
        let requested = flag.clone();
        (Watch::new(Some(Interrupt::new(move || requested.load(Ordering::Relaxed)))), flag)
    }

    /// Checks repeatedly until the run is interrupted or time is over.
    fn wait(watch: &mut Watch) -> Result<(), RunError> {
        let start = Instant::now();
        while start.elapsed() < 4 * POLL_PERIOD {
            watch.check(TICKS_PER_CLOCK_READ)?;
        }
        Ok(())
    }

    #[test]
    fn interrupted_run_ends() {
        let (mut watch, flag) = watch();
        watch.begin(None);
        assert_eq!(wait(&mut watch), Ok(()));
        flag.store(true, Ordering::Relaxed);
        assert_eq!(wait(&mut watch), Err(RunError::Interrupted));
        // Small instructions do not read the clock each time.
        watch.last_poll = Some(Instant::now() - 2 * POLL_PERIOD);
        assert_eq!((1..TICKS_PER_CLOCK_READ).find(|_| watch.check(1).is_err()), None);
        assert_eq!(watch.check(1), Err(RunError::Interrupted));
    }

    #[test]
    fn interrupted_run_restores_state() {
        let (mut watch, flag) = watch();
        let planes = [Memory::new(64), Memory::new(64)];
        planes[0].write(0, &[7; 32]).unwrap();
        planes[1].write(0, &[9; 64]).unwrap();
        let bindings = Bindings { planes: &[&planes[0], &planes[1]] };
        watch.begin(None);
        watch.start = Some(Instant::now() - MAX_SHORT_RUN);
        watch.disposable = 1..2;
        for (plane, range) in [(0, 0..16), (0, 8..40), (0, 40..64), (1, 0..8)] {
            watch.before_write(&bindings, plane, range.clone()).unwrap();
            planes[plane].write(range.start, &vec![1; range.len()]).unwrap();
        }
        assert_eq!(watch.saved_bytes, 16 + 32, "zeros are not kept");
        flag.store(true, Ordering::Relaxed);
        assert_eq!(wait(&mut watch), Err(RunError::Interrupted));
        watch.end(&bindings, true).unwrap();
        assert_eq!(planes[0].to_vec(0, 64).unwrap(), [[7; 32], [0; 32]].concat());
        assert_eq!(planes[1].to_vec(0, 64).unwrap(), [0; 64], "what nobody needs is zero");
    }

    /// A gate that refuses the first run.
    struct RefuseFirst(Arc<AtomicBool>);

    impl CommitGate for RefuseFirst {
        fn before_commit(&mut self) -> Result<(), RunError> {
            match self.0.swap(true, Ordering::Relaxed) {
                false => Err(RunError::Refused("another rank failed".into())),
                true => Ok(()),
            }
        }
    }

    #[test]
    fn gate_is_asked_once_and_ends_interrupts() {
        let (mut watch, flag) = watch();
        let was_asked = Arc::new(AtomicBool::new(false));
        watch.set_gate(Some(Box::new(RefuseFirst(was_asked.clone()))));
        watch.begin(None);
        assert_eq!(watch.pass_gate(), Err(RunError::Refused("another rank failed".into())));
        assert_eq!(watch.pass_gate(), Ok(()));
        was_asked.store(false, Ordering::Relaxed);
        assert_eq!(watch.pass_gate(), Ok(()), "a gate is passed once");
        flag.store(true, Ordering::Relaxed);
        assert_eq!(wait(&mut watch), Ok(()));
    }

    #[test]
    fn unsaved_run_is_not_interrupted() {
        let plane = Memory::new(64);
        plane.write(0, &[7; 64]).unwrap();
        let bindings = Bindings { planes: &[&plane] };
        // A short run, and a run that may not save enough bytes.
        for (seconds, max_saved) in [(0, None), (1, Some(63))] {
            let (mut watch, flag) = watch();
            flag.store(true, Ordering::Relaxed);
            watch.begin(max_saved);
            watch.start = watch.start.map(|start| start - Duration::from_secs(seconds));
            watch.before_write(&bindings, 0, 0..64).unwrap();
            assert!(watch.is_committed);
            assert_eq!(wait(&mut watch), Ok(()));
            watch.end(&bindings, false).unwrap();
            watch.begin(None);
            assert!(!watch.is_committed);
        }
    }
}
