//! Agreement of all ranks before each step.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ortrain_graph::DType;
use ortrain_program::Memory;

use super::communicator::{Collective, Communicator, Operand, Reduction};
use crate::{Error, Result};

/// Maximum bytes of the sentence that a failed rank sends to the others.
const MAX_SENTENCE_BYTES: usize = 1 << 16;

/// Effect of a training step on the weights.
///
/// ```
/// use ortrain::distributed::StepKind;
///
/// assert_ne!(StepKind::Accumulate, StepKind::Update);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// Gradients are accumulated.
    Accumulate,
    /// Gradients are accumulated, and then the weights are updated.
    Update,
    /// Gradients are results, and are not accumulated.
    Separate,
    /// A session starts; no gradients are computed.
    Start,
}

/// Properties of a training step that must be equal on all ranks.
///
/// ```
/// use ortrain::distributed::{StepCall, StepKind};
///
/// let call = StepCall { session: 0, kind: StepKind::Update, train_step: 3, learning_rate: 0.1, loss_scale: 1.0, loads: 0 };
/// assert_ne!(call, StepCall { learning_rate: 0.2, ..call });
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCall {
    /// Number of the session in the order of creation.
    pub session: u32,
    /// Effect on the weights.
    pub kind: StepKind,
    /// Number of completed training steps.
    pub train_step: u64,
    /// Learning rate of an update; 0 without an update.
    pub learning_rate: f32,
    /// Loss scale; 1 without mixed precision.
    pub loss_scale: f32,
    /// Number of states that the session has loaded.
    pub loads: u64,
}

/// State of a rank in an exchange. Larger numbers take precedence.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum RankState {
    Ready = 0,
    Failed = 1,
    Left = 2,
}

/// Numbers of a [`StepCall`] that ranks compare.
const COMPARED: usize = 6;
/// Numbers of a word: the most severe state with its rank, the smallest state, and the largest and smallest value of
/// each compared number.
const WORD: usize = 2 + 2 * COMPARED;

/// Number that does not change a maximum, and has a negative.
const NEUTRAL: i64 = -i64::MAX;

impl StepCall {
    fn numbers(&self) -> [i64; COMPARED] {
        let bits = |value: f32| i64::from(value.to_bits());
        [
            i64::from(self.session),
            self.kind as i64,
            self.train_step as i64,
            bits(self.learning_rate),
            bits(self.loss_scale),
            self.loads as i64,
        ]
    }

    /// Describes a compared number.
    fn describe(field: usize, number: i64) -> String {
        let float = || f32::from_bits(number as u32);
        match field {
            0 => format!("trains with session {number}"),
            1 if number == StepKind::Update as i64 => "updates the weights".into(),
            1 if number == StepKind::Accumulate as i64 => "accumulates gradients".into(),
            1 if number == StepKind::Separate as i64 => "computes gradients as results".into(),
            1 => "creates a session".into(),
            2 => format!("has completed {number} training steps"),
            3 => format!("has the learning rate {}", float()),
            4 => format!("has the loss scale {}", float()),
            _ => format!("has loaded {number} states"),
        }
    }
}

/// Exchange of one word per rank before each training step, so that all ranks make the step or none.
///
/// Each rank calls exactly one of [`Control::ready`] and [`Control::failed`] for each step, and [`Control::leave`] at the
/// end.
///
/// ```
/// use std::sync::Arc;
///
/// use ortrain::distributed::{Communicator, Control, StepCall, StepKind, ThreadCommunicator};
///
/// let call = StepCall { session: 0, kind: StepKind::Update, train_step: 0, learning_rate: 0.1, loss_scale: 1.0, loads: 0 };
/// std::thread::scope(|scope| {
///     let [first, second] = <[ThreadCommunicator; 2]>::try_from(ThreadCommunicator::create(2)).unwrap();
///     scope.spawn(move || {
///         let control = Control::new(Arc::new(first));
///         assert!(control.ready(&call).unwrap_err().to_string().contains("rank 1 of 2 failed in this step"));
///         control.leave()
///     });
///     scope.spawn(move || {
///         let control = Control::new(Arc::new(second));
///         control.failed("the batch is empty")?;
///         control.leave()
///     });
/// });
/// ```
pub struct Control {
    communicator: Arc<dyn Communicator>,
    /// Memory of the word, and the lock of an exchange.
    word: Mutex<Arc<Memory>>,
    exchanges: AtomicU64,
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Control({:?})", self.communicator)
    }
}

/// Result of an exchange.
struct Exchanged {
    worst: RankState,
    /// First rank with the worst state.
    rank: usize,
    have_all_left: bool,
    /// First compared number with different values, if all ranks are ready.
    difference: Option<usize>,
}

impl Control {
    /// Creates the control of a communicator, which must not be used for anything else.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use ortrain::distributed::{Control, ThreadCommunicator};
    ///
    /// let control = Control::new(Arc::new(ThreadCommunicator::create(4).remove(3)));
    /// assert_eq!((control.rank(), control.size(), control.exchange_count()), (3, 4, 0));
    /// ```
    #[must_use]
    pub fn new(communicator: Arc<dyn Communicator>) -> Control {
        let word = Mutex::new(Arc::new(Memory::new(WORD * size_of::<i64>())));
        Control { communicator, word, exchanges: AtomicU64::new(0) }
    }

    /// Returns the index of this rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.communicator.size()
    }

    /// Returns the number of exchanges that this rank has taken part in.
    #[must_use]
    pub fn exchange_count(&self) -> u64 {
        self.exchanges.load(Ordering::Relaxed)
    }

    /// Waits until all ranks are ready for the same step.
    ///
    /// # Errors
    /// If a rank has failed or left, or makes another step. The error names this rank, and all ranks receive an error.
    pub fn ready(&self, call: &StepCall) -> Result<()> {
        let numbers = call.numbers();
        let exchanged = self.exchange(RankState::Ready, Some(&numbers))?;
        let (rank, size) = (exchanged.rank, self.size());
        match exchanged.worst {
            RankState::Failed => {
                Err(Error::OtherRank { rank, size, sentence: self.share_sentence(rank, None)? })
            }
            RankState::Left => Err(Error::RankLeft { rank, size }),
            RankState::Ready => match exchanged.difference {
                Some(field) => Err(Error::RanksDiffer(self.describe_difference(field, &numbers)?)),
                None => Ok(()),
            },
        }
    }

    /// Tells all ranks that this rank has failed in the current step, with the reason.
    ///
    /// # Errors
    /// If the communicator fails.
    pub fn failed(&self, sentence: &str) -> Result<()> {
        let exchanged = self.exchange(RankState::Failed, None)?;
        if exchanged.worst == RankState::Failed {
            self.share_sentence(exchanged.rank, Some(sentence))?;
        }
        Ok(())
    }

    /// Tells all ranks that this rank trains no more, and waits until all ranks have left. There is no time limit: another
    /// rank may still evaluate.
    ///
    /// # Errors
    /// If the communicator fails.
    pub fn leave(&self) -> Result<()> {
        while !self.exchange(RankState::Left, None)?.have_all_left {}
        Ok(())
    }

    /// Exchanges a word with all ranks.
    fn exchange(&self, state: RankState, numbers: Option<&[i64; COMPARED]>) -> Result<Exchanged> {
        let size = self.size() as i64;
        // Of several ranks with a state, the first one has the largest number.
        let mut word = vec![state as i64 * size + (size - 1 - self.rank() as i64), -(state as i64)];
        for k in 0..COMPARED {
            let number = numbers.map_or([NEUTRAL; 2], |numbers| [numbers[k], -numbers[k]]);
            word.extend(number);
        }
        let memory = self.word.lock().unwrap_or_else(PoisonError::into_inner);
        memory.write(0, bytemuck::cast_slice(&word))?;
        let operand = Operand::new(&memory, DType::I64, 0..WORD)?;
        self.communicator.run(Collective::AllReduce { operand, reduction: Reduction::Max })?;
        let word: Vec<i64> = bytemuck::pod_collect_to_vec(&memory.to_vec(0, memory.len())?);
        drop(memory);
        self.exchanges.fetch_add(1, Ordering::Relaxed);
        let worst = match word[0] / size {
            0 => RankState::Ready,
            1 => RankState::Failed,
            _ => RankState::Left,
        };
        let differs = |k: &usize| word[2 + 2 * k] != -word[3 + 2 * k];
        Ok(Exchanged {
            worst,
            rank: (size - 1 - word[0] % size) as usize,
            have_all_left: -word[1] == RankState::Left as i64,
            difference: (0..COMPARED).find(differs).filter(|_| worst == RankState::Ready),
        })
    }

    /// Sends the sentence of a failed rank to all ranks, and returns it.
    fn share_sentence(&self, root: usize, sentence: Option<&str>) -> Result<String> {
        let own = sentence.filter(|_| self.rank() == root);
        let mut bytes = own.map_or_else(Vec::new, |sentence| sentence.as_bytes().to_vec());
        bytes.truncate(MAX_SENTENCE_BYTES);
        let length = Arc::new(Memory::new(size_of::<i64>()));
        length.write(0, &(bytes.len() as i64).to_le_bytes())?;
        let operand = Operand::new(&length, DType::I64, 0..1)?;
        self.communicator.run(Collective::Broadcast { operand, root })?;
        let length: Vec<i64> = bytemuck::pod_collect_to_vec(&length.to_vec(0, size_of::<i64>())?);
        let length = usize::try_from(length[0]).unwrap_or(0).min(MAX_SENTENCE_BYTES);
        bytes.resize(length, b' ');
        let text = Arc::new(Memory::new(length));
        text.write(0, &bytes)?;
        let operand = Operand::new(&text, DType::U8, 0..length)?;
        self.communicator.run(Collective::Broadcast { operand, root })?;
        Ok(String::from_utf8_lossy(&text.to_vec(0, length)?).into_owned())
    }

    /// Describes a number that differs between ranks.
    fn describe_difference(&self, field: usize, numbers: &[i64; COMPARED]) -> Result<String> {
        let values = self.gather(&[numbers[field]])?;
        let other = values.iter().position(|value| *value != values[0]).unwrap_or(0);
        Ok(format!(
            "rank {other} {}, but rank 0 {}; all ranks must make the same training steps",
            StepCall::describe(field, values[other][0]),
            StepCall::describe(field, values[0][0])
        ))
    }

    /// Checks that named numbers are equal on all ranks: fingerprints of the parts of a training. All ranks pass the same
    /// names.
    ///
    /// # Errors
    /// If a number differs. The error names the rank and the part, and all ranks receive it.
    pub fn check_equal(&self, parts: &[(&str, u64)]) -> Result<()> {
        let numbers: Vec<i64> = parts.iter().map(|(_, number)| number.cast_signed()).collect();
        let values = self.gather(&numbers)?;
        for (k, (name, _)) in parts.iter().enumerate() {
            if let Some(other) = values.iter().position(|value| value[k] != values[0][k]) {
                return Err(Error::RanksDiffer(format!(
                    "the {name} of rank {other} differ from the {name} of rank 0; all ranks must start with the same \
                     model, options, optimizer and weights"
                )));
            }
        }
        Ok(())
    }

    /// Collects the same number of integers from each rank.
    fn gather(&self, own: &[i64]) -> Result<Vec<Vec<i64>>> {
        let (rank, size) = (self.rank(), self.size());
        let memory = Arc::new(Memory::new(size * size_of_val(own)));
        memory.write(rank * size_of_val(own), bytemuck::cast_slice(own))?;
        let operand = Operand::new(&memory, DType::I64, 0..size * own.len())?;
        self.communicator.run(Collective::AllGather { operand, counts: vec![own.len(); size] })?;
        let values: Vec<i64> = bytemuck::pod_collect_to_vec(&memory.to_vec(0, memory.len())?);
        Ok(values.chunks(own.len().max(1)).map(<[i64]>::to_vec).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distributed::ThreadCommunicator;

    /// Runs a function on each rank in a thread of its own, and leaves afterwards.
    fn on_ranks<T: Send>(size: usize, work: impl Fn(&Control) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> = ThreadCommunicator::create(size)
                .into_iter()
                .map(|rank| {
                    scope.spawn(move || {
                        let control = Control::new(Arc::new(rank));
                        let result = work(&control);
                        control.leave().unwrap();
                        result
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn call(train_step: u64) -> StepCall {
        StepCall {
            session: 0,
            kind: StepKind::Update,
            train_step,
            learning_rate: 0.1,
            loss_scale: 1.0,
            loads: 0,
        }
    }

    #[test]
    fn ranks_agree_on_equal_steps() {
        let counts = on_ranks(3, |control| {
            (0..4).for_each(|step| control.ready(&call(step)).unwrap());
            control.exchange_count()
        });
        assert_eq!(counts, [4; 3]);
    }

    #[test]
    fn all_ranks_receive_the_sentence_of_the_first_failed_rank() {
        let errors = on_ranks(4, |control| match control.rank() {
            1 | 3 => {
                control.failed(&format!("label {} is too large", control.rank())).unwrap();
                String::new()
            }
            _ => control.ready(&call(0)).unwrap_err().to_string(),
        });
        let expected = "rank 1 of 4 failed in this step, so no rank has changed: label 1 is too large";
        assert_eq!(errors, [expected, "", expected, ""]);
    }

    #[test]
    fn long_sentences_are_cut() {
        let errors = on_ranks(2, |control| match control.rank() {
            0 => {
                control.failed(&"x".repeat(MAX_SENTENCE_BYTES + 5)).unwrap();
                0
            }
            _ => match control.ready(&call(0)).unwrap_err() {
                Error::OtherRank { sentence, .. } => sentence.len(),
                other => panic!("{other}"),
            },
        });
        assert_eq!(errors, [0, MAX_SENTENCE_BYTES]);
    }

    #[test]
    fn ranks_continue_after_a_failed_step() {
        on_ranks(2, |control| {
            match control.rank() {
                0 => control.failed("a bad batch").unwrap(),
                _ => assert!(control.ready(&call(0)).is_err()),
            }
            control.ready(&call(0)).unwrap();
        });
    }

    #[test]
    fn step_after_a_rank_has_left_is_an_error() {
        let errors = on_ranks(3, |control| {
            control.ready(&call(0)).unwrap();
            match control.rank() {
                2 => vec![],
                _ => (0..2).map(|_| control.ready(&call(1)).unwrap_err().to_string()).collect(),
            }
        });
        let expected =
            "rank 2 of 3 has left the training: its script has ended, so the other ranks cannot continue";
        assert_eq!(errors[..2], [[expected; 2]; 2]);
    }

    #[test]
    fn different_steps_are_errors_on_all_ranks() {
        type Change = fn(&mut StepCall);
        let changes: [(Change, &str); 7] = [
            (|call| call.loads = 2, "rank 2 has loaded 2 states, but rank 0 has loaded 0 states"),
            (|call| call.kind = StepKind::Start, "rank 2 creates a session, but rank 0 updates the weights"),
            (|call| call.session = 1, "rank 2 trains with session 1, but rank 0 trains with session 0"),
            (
                |call| call.kind = StepKind::Accumulate,
                "rank 2 accumulates gradients, but rank 0 updates the weights",
            ),
            (
                |call| call.train_step = 7,
                "rank 2 has completed 7 training steps, but rank 0 has completed 0 training steps",
            ),
            (
                |call| call.learning_rate = 0.2,
                "rank 2 has the learning rate 0.2, but rank 0 has the learning rate 0.1",
            ),
            (|call| call.loss_scale = 4.0, "rank 2 has the loss scale 4, but rank 0 has the loss scale 1"),
        ];
        for (change, expected) in changes {
            let errors = on_ranks(4, |control| {
                let mut call = call(0);
                if control.rank() >= 2 {
                    change(&mut call);
                }
                control.ready(&call).unwrap_err().to_string()
            });
            assert!(errors.iter().all(|error| error.contains(expected)), "{errors:?}");
        }
    }

    #[test]
    fn different_parts_are_named() {
        let errors = on_ranks(3, |control| {
            control.check_equal(&[("weights", 7), ("options", 1)]).unwrap();
            let options = if control.rank() == 1 { u64::MAX } else { 1 };
            control.check_equal(&[("weights", 7), ("options", options)]).unwrap_err().to_string()
        });
        let expected = "the options of rank 1 differ from the options of rank 0";
        assert!(errors.iter().all(|error| error.starts_with(expected)), "{errors:?}");
    }
}
