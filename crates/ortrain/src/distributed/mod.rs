//! Training on several ranks, with one process or thread for each.
//!
//! - [`Communicator`]: interface to a library for messages between ranks, for example MPI. This crate contains no such
//!   library.
//! - [`ThreadCommunicator`]: ranks that are threads of one process.
//! - [`Control`]: agreement of all ranks before each step.
//! - [`DataParallel`]: ranks with a copy of the model and a part of each batch, for
//!   [`classic::TrainingSession`](crate::face::classic::TrainingSession).

mod adasum;
mod buckets;
mod communicator;
mod control;
mod data_parallel;
mod queue;
mod threads;
mod zero;

pub(crate) use adasum::{adasum_in_place, combine_planes};
pub(crate) use buckets::{Bucket, buckets};
pub use communicator::{Collective, Communicator, Operand, Pending, Reduction};
pub use control::{Control, StepCall, StepKind};
pub use data_parallel::{DataParallel, Strategy};
pub(crate) use queue::CommunicationQueue;
pub use queue::CommunicationTime;
pub use threads::ThreadCommunicator;
pub(crate) use zero::{owned_planes, zero_ranges};
