//! Interface to libraries for messages between ranks.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use ortrain_graph::DType;
use ortrain_program::Memory;

use crate::{Error, Result};

/// Elements of a memory that a [`Collective`] reads and writes.
///
/// ```
/// use std::sync::Arc;
///
/// use ortrain::distributed::Operand;
/// use ortrain::{DType, Memory};
///
/// let memory = Arc::new(Memory::new(64));
/// let operand = Operand::new(&memory, DType::F32, 4..16)?;
/// assert_eq!((operand.len(), operand.offset()), (12, 16));
/// assert!(Operand::new(&memory, DType::F32, 4..17).is_err(), "the memory has 16 elements");
/// # Ok::<(), ortrain::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Operand {
    memory: Arc<Memory>,
    dtype: DType,
    elements: Range<usize>,
}

impl Operand {
    /// Creates an operand of a range of elements.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use ortrain::distributed::Operand;
    /// use ortrain::{DType, Memory};
    ///
    /// let operand = Operand::new(&Arc::new(Memory::new(64)), DType::F64, 0..8)?;
    /// assert_eq!(operand.bytes(), 64);
    /// # Ok::<(), ortrain::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the range is not inside the memory.
    pub fn new(memory: &Arc<Memory>, dtype: DType, elements: Range<usize>) -> Result<Operand> {
        let end = elements.end.checked_mul(dtype.size());
        if elements.start > elements.end || end.is_none_or(|end| end > memory.len()) {
            return Err(Error::Argument(format!(
                "elements {elements:?} of {dtype} are not inside a memory of {} bytes",
                memory.len()
            )));
        }
        Ok(Operand { memory: memory.clone(), dtype, elements })
    }

    /// Returns the memory.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Returns the element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.elements.len()
    }

    /// Returns true if the operand has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.elements.is_empty()
    }

    /// Returns the offset of the first element in bytes.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.elements.start * self.dtype.size()
    }

    /// Returns the size of the elements in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }
}

/// Function that combines the elements of all ranks.
///
/// ```
/// use ortrain::distributed::Reduction;
///
/// assert_ne!(Reduction::Sum, Reduction::Max);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Sum.
    Sum,
    /// Maximum.
    Max,
}

/// Operation of a [`Communicator`]. All ranks start the same collectives in the same order, with operands of the same
/// length and type.
///
/// ```
/// use std::sync::Arc;
///
/// use ortrain::distributed::{Collective, Operand, Reduction};
/// use ortrain::{DType, Memory};
///
/// let memory = Arc::new(Memory::new(8));
/// let operand = Operand::new(&memory, DType::F64, 0..1)?;
/// let collective = Collective::AllReduce { operand, reduction: Reduction::Sum };
/// assert_eq!(collective.name(), "all-reduce");
/// # Ok::<(), ortrain::Error>(())
/// ```
#[derive(Clone, Debug)]
pub enum Collective {
    /// Combines the elements of all ranks. Each rank receives all of the result, in place.
    AllReduce {
        /// Elements, and then the result.
        operand: Operand,
        /// Function that combines them.
        reduction: Reduction,
    },
    /// Sums the elements of all ranks. Each rank receives its part of the sum.
    ReduceScatter {
        /// Elements: the parts of rank 0, rank 1, and so on. They remain unchanged.
        operand: Operand,
        /// Number of elements of each rank's part.
        counts: Vec<usize>,
        /// Part of the sum for this rank. It does not overlap with the elements.
        result: Operand,
    },
    /// Collects a part from each rank. Each rank receives all parts, in place.
    AllGather {
        /// Parts of rank 0, rank 1, and so on; at first only the part of this rank is defined.
        operand: Operand,
        /// Number of elements of each rank's part.
        counts: Vec<usize>,
    },
    /// Copies the elements of one rank to all ranks.
    Broadcast {
        /// Elements of the root, and then of all ranks.
        operand: Operand,
        /// Rank that has the elements.
        root: usize,
    },
    /// Sends elements to one rank, which receives them.
    Send {
        /// Elements.
        operand: Operand,
        /// Rank that receives them.
        to: usize,
    },
    /// Receives elements that one rank sends.
    Receive {
        /// Memory for the elements.
        operand: Operand,
        /// Rank that sends them.
        from: usize,
    },
}

impl Collective {
    /// Returns the name in error messages.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Collective::AllReduce { .. } => "all-reduce",
            Collective::ReduceScatter { .. } => "reduce-scatter",
            Collective::AllGather { .. } => "all-gather",
            Collective::Broadcast { .. } => "broadcast",
            Collective::Send { .. } => "send",
            Collective::Receive { .. } => "receive",
        }
    }

    /// Returns the operand that all kinds of collectives have.
    #[must_use]
    pub fn operand(&self) -> &Operand {
        match self {
            Collective::AllReduce { operand, .. }
            | Collective::ReduceScatter { operand, .. }
            | Collective::AllGather { operand, .. }
            | Collective::Broadcast { operand, .. }
            | Collective::Send { operand, .. }
            | Collective::Receive { operand, .. } => operand,
        }
    }

    /// Checks counts and ranks for a communicator of this size.
    ///
    /// # Errors
    /// - If there is not one count for each rank, or the counts do not sum to the number of elements.
    /// - If the result has another length, or a rank does not exist.
    pub fn check(&self, rank: usize, size: usize) -> Result<()> {
        let wrong = |reason: String| Err(Error::Argument(format!("the {} {reason}", self.name())));
        match self {
            Collective::ReduceScatter { operand, counts, .. } | Collective::AllGather { operand, counts } => {
                if counts.len() != size || counts.iter().sum::<usize>() != operand.len() {
                    return wrong(format!(
                        "of {} elements needs a count for each of {size} ranks with this sum, got {counts:?}",
                        operand.len()
                    ));
                }
            }
            Collective::Broadcast { root: other, .. }
            | Collective::Send { to: other, .. }
            | Collective::Receive { from: other, .. } => {
                if *other >= size {
                    return wrong(format!("needs a rank from 0 to {}, got {other}", size - 1));
                }
            }
            Collective::AllReduce { .. } => {}
        }
        match self {
            Collective::ReduceScatter { counts, result, operand } => {
                if result.len() != counts[rank] || result.dtype() != operand.dtype() {
                    return wrong(format!(
                        "needs a result of {} elements of {}, got {} of {}",
                        counts[rank],
                        operand.dtype(),
                        result.len(),
                        result.dtype()
                    ));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Handle of a started collective.
///
/// ```
/// use ortrain::distributed::Pending;
///
/// /// Handle of a collective that has already ended.
/// struct Ended;
///
/// impl Pending for Ended {
///     fn wait(self: Box<Self>) -> ortrain::Result<()> {
///         Ok(())
///     }
/// }
/// Box::new(Ended).wait()?;
/// # Ok::<(), ortrain::Error>(())
/// ```
pub trait Pending: Send {
    /// Waits until the collective has ended. Its operands may be read and written again afterwards.
    ///
    /// # Errors
    /// If the library for messages fails, or a rank aborts.
    fn wait(self: Box<Self>) -> Result<()>;
}

/// Group of ranks that exchange the elements of [`Memory`].
///
/// ```
/// # use std::sync::Arc;
/// use ortrain::distributed::{Collective, Communicator, Operand, Reduction, ThreadCommunicator};
/// use ortrain::{DType, Memory};
///
/// let sum = |communicator: &dyn Communicator| {
///     let memory = Arc::new(Memory::new(8));
///     memory.write(0, &(communicator.rank() as f64 + 1.0).to_le_bytes())?;
///     let operand = Operand::new(&memory, DType::F64, 0..1)?;
///     communicator.run(Collective::AllReduce { operand, reduction: Reduction::Sum })?;
///     let bytes = memory.to_vec(0, 8)?;
///     Ok::<f64, ortrain::Error>(f64::from_le_bytes(bytes.try_into().unwrap()))
/// };
/// let ranks = ThreadCommunicator::create(2);
/// std::thread::scope(|scope| {
///     let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || sum(rank))).collect();
///     for thread in threads {
///         assert_eq!(thread.join().unwrap().unwrap(), 3.0);
///     }
/// });
/// ```
pub trait Communicator: Send + Sync + Debug {
    /// Returns the index of this rank.
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn size(&self) -> usize;

    /// Returns true if collectives can read and write memory of this device, by the name of
    /// [`Memory::device`].
    fn reaches(&self, device: &str) -> bool;

    /// Returns true if collectives may run on another thread than the thread of the caller, one at a time.
    fn allows_threads(&self) -> bool;

    /// Starts a collective. Its operands may not be read or written before [`Pending::wait`] returns.
    ///
    /// # Errors
    /// As [`Collective::check`]; also if an operand is on a device that the communicator does not reach, or has a type
    /// that its library cannot combine.
    fn start(&self, collective: Collective) -> Result<Box<dyn Pending>>;

    /// Creates a communicator of some ranks, in this order. Exactly these ranks call the function.
    ///
    /// # Errors
    /// If a rank does not exist or occurs twice, or this rank is missing.
    fn group(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>>;

    /// Ends all ranks, and shows a sentence with the reason.
    fn abort(&self, sentence: &str);

    /// Runs a collective: starts it, and waits for its end.
    ///
    /// # Errors
    /// As [`Communicator::start`] and [`Pending::wait`].
    fn run(&self, collective: Collective) -> Result<()> {
        self.start(collective)?.wait()
    }
}
