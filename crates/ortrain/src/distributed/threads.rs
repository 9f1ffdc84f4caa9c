//! Ranks that are threads of one process.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use bytemuck::{Pod, Zeroable};
use ortrain_graph::DType;
use ortrain_program::HOST;

use super::communicator::{Collective, Communicator, Operand, Pending, Reduction};
use crate::{Error, Result};

/// Communicator of threads in one process. Reductions combine the ranks in rising order.
///
/// ```
/// use ortrain::distributed::{Communicator, ThreadCommunicator};
///
/// let ranks = ThreadCommunicator::create(3);
/// assert_eq!(ranks.iter().map(Communicator::rank).collect::<Vec<_>>(), [0, 1, 2]);
/// assert_eq!(ranks[1].size(), 3);
/// ```
#[derive(Clone)]
pub struct ThreadCommunicator {
    rank: usize,
    shared: Arc<Shared>,
    /// Numbers of this rank's next collective, next group, and next message to and from each rank.
    next: Arc<Mutex<Next>>,
}

#[derive(Debug, Default)]
struct Next {
    collective: u64,
    group: BTreeMap<Vec<usize>, u64>,
    message: BTreeMap<(usize, usize), u64>,
}

/// Identity of an operation that several ranks take part in.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Collective(u64),
    /// Sender, receiver, and number of the message.
    Message(usize, usize, u64),
}

/// Operation with the collectives of the ranks that have started it.
struct Meeting {
    collectives: Vec<(usize, Collective)>,
    /// Ranks that have not yet waited for the end.
    waiting: usize,
    outcome: Option<std::result::Result<(), String>>,
}

#[derive(Default)]
struct State {
    meetings: BTreeMap<Key, Meeting>,
    groups: BTreeMap<(Vec<usize>, u64), Arc<Shared>>,
    aborted: Option<String>,
}

struct Shared {
    size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn new(size: usize) -> Arc<Shared> {
        Arc::new(Shared { size, state: Mutex::default(), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for ThreadCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ThreadCommunicator(rank {} of {})", self.rank, self.shared.size)
    }
}

impl ThreadCommunicator {
    /// Creates the communicators of all ranks, one for each thread.
    ///
    /// ```
    /// use ortrain::distributed::ThreadCommunicator;
    ///
    /// assert_eq!(ThreadCommunicator::create(2).len(), 2);
    /// ```
    #[must_use]
    pub fn create(size: usize) -> Vec<ThreadCommunicator> {
        let shared = Shared::new(size);
        (0..size).map(|rank| ThreadCommunicator::of(rank, shared.clone())).collect()
    }

    fn of(rank: usize, shared: Arc<Shared>) -> ThreadCommunicator {
        ThreadCommunicator { rank, shared, next: Arc::default() }
    }

    /// Returns the identity of a collective, and the number of ranks that take part.
    fn key_of(&self, collective: &Collective) -> (Key, usize) {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let pair = match *collective {
            Collective::Send { to, .. } => (self.rank, to),
            Collective::Receive { from, .. } => (from, self.rank),
            _ => {
                next.collective += 1;
                return (Key::Collective(next.collective), self.shared.size);
            }
        };
        let number = next.message.entry(pair).or_default();
        *number += 1;
        (Key::Message(pair.0, pair.1, *number), 2)
    }
}

impl Communicator for ThreadCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.shared.size
    }

    fn reaches(&self, device: &str) -> bool {
        device == HOST
    }

    fn allows_threads(&self) -> bool {
        true
    }

    fn start(&self, collective: Collective) -> Result<Box<dyn Pending>> {
        collective.check(self.rank, self.shared.size)?;
        let device = collective.operand().memory().device();
        if !self.reaches(device) {
            return Err(Error::Communication(format!(
                "threads exchange elements of host memory only, not of {device}"
            )));
        }
        let (key, expected) = self.key_of(&collective);
        let mut state = self.shared.lock();
        let meeting = state.meetings.entry(key.clone()).or_insert_with(|| Meeting {
            collectives: Vec::new(),
            waiting: expected,
            outcome: None,
        });
        meeting.collectives.push((self.rank, collective));
        if meeting.collectives.len() == expected {
            meeting.collectives.sort_by_key(|(rank, _)| *rank);
            meeting.outcome = Some(combine(&meeting.collectives));
            self.shared.changed.notify_all();
        }
        Ok(Box::new(Waiting { shared: self.shared.clone(), key }))
    }

    fn group(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>> {
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        let position = ranks.iter().position(|&rank| rank == self.rank);
        let Some(position) = position.filter(|_| {
            sorted.len() == ranks.len() && sorted.last().is_some_and(|&last| last < self.shared.size)
        }) else {
            return Err(Error::Argument(format!(
                "a group must have rank {} and different ranks from 0 to {}, got {ranks:?}",
                self.rank,
                self.shared.size - 1
            )));
        };
        let number = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            let number = next.group.entry(ranks.to_vec()).or_default();
            *number += 1;
            *number
        };
        let mut state = self.shared.lock();
        let shared =
            state.groups.entry((ranks.to_vec(), number)).or_insert_with(|| Shared::new(ranks.len())).clone();
        Ok(Arc::new(ThreadCommunicator::of(position, shared)))
    }

    fn abort(&self, sentence: &str) {
        self.shared.lock().aborted = Some(sentence.to_owned());
        self.shared.changed.notify_all();
    }
}

/// Handle of a started collective.
struct Waiting {
    shared: Arc<Shared>,
    key: Key,
}

impl Pending for Waiting {
    fn wait(self: Box<Self>) -> Result<()> {
        let mut state = self.shared.lock();
        loop {
            let meeting =
                state.meetings.get_mut(&self.key).expect("a meeting exists until all ranks have left it");
            if let Some(outcome) = meeting.outcome.clone() {
                meeting.waiting -= 1;
                if meeting.waiting == 0 {
                    state.meetings.remove(&self.key);
                }
                return outcome.map_err(Error::Communication);
            }
            if let Some(sentence) = &state.aborted {
                return Err(Error::Communication(sentence.clone()));
            }
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

type Outcome<T> = std::result::Result<T, String>;

/// Runs an operation when all ranks have started it. The collectives are in the order of the ranks.
fn combine(collectives: &[(usize, Collective)]) -> Outcome<()> {
    let operands: Vec<&Operand> = collectives.iter().map(|(_, collective)| collective.operand()).collect();
    let (_, first) = &collectives[0];
    let same = |other: &Operand| other.len() == operands[0].len() && other.dtype() == operands[0].dtype();
    if let Some((rank, other)) =
        collectives.iter().find(|(_, other)| !same(other.operand()) || !are_partners(first, other))
    {
        return Err(format!(
            "rank {rank} runs {} of {} elements of {}, but rank {} runs {} of {} elements of {}",
            other.name(),
            other.operand().len(),
            other.operand().dtype(),
            collectives[0].0,
            first.name(),
            operands[0].len(),
            operands[0].dtype(),
        ));
    }
    match first {
        Collective::AllReduce { reduction, .. } => {
            let combined = reduce(&operands, *reduction)?;
            operands.iter().try_for_each(|operand| write(operand, 0, &combined))
        }
        Collective::ReduceScatter { counts, operand, .. } => {
            let combined = reduce(&operands, Reduction::Sum)?;
            let size = operand.dtype().size();
            let mut start = 0;
            for ((_, collective), count) in collectives.iter().zip(counts) {
                let Collective::ReduceScatter { result, .. } = collective else { continue };
                write(result, 0, &combined[start * size..(start + count) * size])?;
                start += count;
            }
            Ok(())
        }
        Collective::AllGather { counts, operand } => {
            let size = operand.dtype().size();
            let mut start = 0;
            for (from, count) in operands.iter().zip(counts) {
                let part = read(from)?[start * size..(start + count) * size].to_vec();
                operands.iter().try_for_each(|operand| write(operand, start * size, &part))?;
                start += count;
            }
            Ok(())
        }
        Collective::Broadcast { root, .. } => {
            let source = collectives.iter().find(|(rank, _)| rank == root).map(|(_, from)| from.operand());
            let bytes = source.map(read).transpose()?.unwrap_or_default();
            operands.iter().try_for_each(|operand| write(operand, 0, &bytes))
        }
        Collective::Send { .. } | Collective::Receive { .. } => {
            for (_, collective) in collectives {
                let Collective::Send { operand: from, .. } = collective else { continue };
                let bytes = read(from)?;
                for (_, other) in collectives {
                    if let Collective::Receive { operand, .. } = other {
                        write(operand, 0, &bytes)?;
                    }
                }
            }
            Ok(())
        }
    }
}

/// Returns true if two ranks take part in the same operation.
fn are_partners(a: &Collective, b: &Collective) -> bool {
    match (a, b) {
        (Collective::AllReduce { reduction: a, .. }, Collective::AllReduce { reduction: b, .. }) => a == b,
        (Collective::ReduceScatter { counts: a, .. }, Collective::ReduceScatter { counts: b, .. })
        | (Collective::AllGather { counts: a, .. }, Collective::AllGather { counts: b, .. }) => a == b,
        (Collective::Broadcast { root: a, .. }, Collective::Broadcast { root: b, .. }) => a == b,
        (
            Collective::Send { .. } | Collective::Receive { .. },
            Collective::Send { .. } | Collective::Receive { .. },
        ) => true,
        _ => false,
    }
}

fn read(operand: &Operand) -> Outcome<Vec<u8>> {
    operand.memory().to_vec(operand.offset(), operand.bytes()).map_err(|error| error.to_string())
}

/// Writes bytes at a byte of the operand.
fn write(operand: &Operand, at: usize, bytes: &[u8]) -> Outcome<()> {
    operand.memory().write(operand.offset() + at, bytes).map_err(|error| error.to_string())
}

/// Combines operands element by element.
fn reduce(operands: &[&Operand], reduction: Reduction) -> Outcome<Vec<u8>> {
    let bytes = operands.iter().map(|operand| read(operand)).collect::<Outcome<Vec<_>>>()?;
    match operands[0].dtype() {
        DType::F32 => Ok(fold::<f32>(&bytes, reduction, |a, b| a + b)),
        DType::F64 => Ok(fold::<f64>(&bytes, reduction, |a, b| a + b)),
        DType::I64 => Ok(fold::<i64>(&bytes, reduction, i64::wrapping_add)),
        dtype => Err(format!("threads cannot combine elements of {dtype}")),
    }
}

fn fold<T: Pod + Zeroable + PartialOrd>(
    bytes: &[Vec<u8>],
    reduction: Reduction,
    add: fn(T, T) -> T,
) -> Vec<u8> {
    let values = |bytes: &[u8]| -> Vec<T> { bytemuck::pod_collect_to_vec(bytes) };
    let mut result = values(&bytes[0]);
    for other in &bytes[1..] {
        for (a, b) in result.iter_mut().zip(values(other)) {
            *a = match reduction {
                Reduction::Sum => add(*a, b),
                Reduction::Max if b > *a => b,
                Reduction::Max => *a,
            };
        }
    }
    bytemuck::cast_slice(&result).to_vec()
}

#[cfg(test)]
mod tests {
    use ortrain_program::Memory;

    use super::*;

    /// Runs a function on each rank in a thread of its own.
    fn on_ranks<T: Send>(size: usize, work: impl Fn(&ThreadCommunicator) -> T + Sync) -> Vec<T> {
        let ranks = ThreadCommunicator::create(size);
        std::thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || work(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn operand(values: &[f32]) -> Operand {
        let memory = Arc::new(Memory::new(values.len() * 4 + 8));
        memory.write(8, bytemuck::cast_slice(values)).unwrap();
        Operand::new(&memory, DType::F32, 2..values.len() + 2).unwrap()
    }

    fn values(operand: &Operand) -> Vec<f32> {
        bytemuck::pod_collect_to_vec(&read(operand).unwrap())
    }

    #[test]
    fn all_reduce_combines_all_ranks() {
        let results = on_ranks(3, |rank| {
            let at = rank.rank() as f32;
            let [sum, max] = [operand(&[at, 1.0]), operand(&[at, -at])];
            rank.run(Collective::AllReduce { operand: sum.clone(), reduction: Reduction::Sum }).unwrap();
            rank.run(Collective::AllReduce { operand: max.clone(), reduction: Reduction::Max }).unwrap();
            (values(&sum), values(&max))
        });
        assert_eq!(results, vec![(vec![3.0, 3.0], vec![2.0, 0.0]); 3]);
    }

    #[test]
    fn parts_are_scattered_and_gathered() {
        let results = on_ranks(2, |rank| {
            let (all, counts) = (operand(&[1.0, 2.0, 3.0]), vec![1, 2]);
            let own = operand(&[0.0, 0.0][..counts[rank.rank()]]);
            let (source, result) = (all.clone(), own.clone());
            rank.run(Collective::ReduceScatter { operand: source, counts: counts.clone(), result }).unwrap();
            let gathered = operand(&[-1.0; 3]);
            let start = rank.rank();
            write(&gathered, start * 4, bytemuck::cast_slice(&values(&own))).unwrap();
            rank.run(Collective::AllGather { operand: gathered.clone(), counts }).unwrap();
            (values(&all), values(&gathered))
        });
        assert_eq!(results, vec![(vec![1.0, 2.0, 3.0], vec![2.0, 4.0, 6.0]); 2]);
    }

    #[test]
    fn messages_arrive_in_order() {
        let results = on_ranks(3, |rank| {
            let at = rank.rank();
            if at == 2 {
                return vec![];
            }
            let [first, second, received] = [operand(&[1.0]), operand(&[2.0]), operand(&[0.0])];
            if at == 0 {
                let pending: Vec<_> = [first, second]
                    .map(|operand| rank.start(Collective::Send { operand, to: 1 }).unwrap())
                    .into_iter()
                    .collect();
                pending.into_iter().for_each(|pending| pending.wait().unwrap());
                return vec![];
            }
            let mut seen = Vec::new();
            for _ in 0..2 {
                rank.run(Collective::Receive { operand: received.clone(), from: 0 }).unwrap();
                seen.extend(values(&received));
            }
            seen
        });
        assert_eq!(results[1], [1.0, 2.0]);
    }

    #[test]
    fn groups_have_ranks_of_their_own() {
        let results = on_ranks(4, |rank| {
            let ranks = if rank.rank() % 2 == 0 { [2, 0] } else { [1, 3] };
            let group = rank.group(&ranks).unwrap();
            let sum = operand(&[rank.rank() as f32]);
            group.run(Collective::AllReduce { operand: sum.clone(), reduction: Reduction::Sum }).unwrap();
            let root = operand(&[rank.rank() as f32]);
            group.run(Collective::Broadcast { operand: root.clone(), root: 0 }).unwrap();
            (group.rank(), group.size(), values(&sum), values(&root))
        });
        let expected = [(1, 2.0, 2.0), (0, 4.0, 1.0), (0, 2.0, 2.0), (1, 4.0, 1.0)];
        assert_eq!(results, expected.map(|(rank, sum, root)| (rank, 2, vec![sum], vec![root])));
    }

    #[test]
    fn different_collectives_and_aborts_are_errors() {
        let results = on_ranks(2, |rank| {
            let operand = operand(&vec![0.0; rank.rank() + 1]);
            let run = rank.run(Collective::AllReduce { operand, reduction: Reduction::Sum });
            run.unwrap_err().to_string()
        });
        let expected = "rank 1 runs all-reduce of 2 elements of float32, but rank 0 runs all-reduce of 1 elements of \
                        float32";
        assert!(results.iter().all(|error| error.contains(expected)), "{results:?}");
        let results = on_ranks(2, |rank| match rank.rank() {
            0 => {
                rank.run(Collective::Broadcast { operand: operand(&[0.0]), root: 1 }).unwrap_err().to_string()
            }
            _ => {
                rank.abort("rank 1 ended");
                "rank 1 ended".to_owned()
            }
        });
        assert!(results.iter().all(|error| error.contains("rank 1 ended")), "{results:?}");
    }

    #[test]
    fn invalid_collectives_are_refused() {
        let ranks = ThreadCommunicator::create(2);
        let refused = |collective: Collective| ranks[0].start(collective).err().unwrap().to_string();
        let counts = Collective::AllGather { operand: operand(&[0.0; 3]), counts: vec![1, 1] };
        assert!(refused(counts).contains("of 3 elements needs a count for each of 2 ranks"));
        let (counts, result) = (vec![2, 1], operand(&[0.0]));
        let short = Collective::ReduceScatter { operand: operand(&[0.0; 3]), counts, result };
        assert!(refused(short).contains("needs a result of 2 elements of float32, got 1"));
        let missing = Collective::Broadcast { operand: operand(&[0.0]), root: 2 };
        assert!(refused(missing).contains("needs a rank from 0 to 1, got 2"));
        for ranks_of_group in [&[0, 0][..], &[1], &[0, 2], &[]] {
            assert!(ranks[0].group(ranks_of_group).is_err(), "{ranks_of_group:?}");
        }
    }
}
