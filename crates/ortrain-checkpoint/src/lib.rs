//! Reads, checks and writes ONNX Runtime's checkpoint file and safetensors.
//!
//! [`load`] and [`save`] work on files, [`read`] and [`encode`] on bytes. All of them use [`Checkpoint`], plain data
//! that owns only names and reference-counted byte ranges.
//!
//! # Checks
//!
//! A broken file is refused with an [`Error`], never with a panic. The memory that a file can allocate is bounded by a
//! multiple of its length. A file that this crate wrote also carries checksums, which detect every flipped byte in the
//! file, its trailer or its `.data` file.
//!
//! # Layout on disk
//!
//! ```text
//! <path>       `FlatBuffers` buffer, identifier ODTC, `extras.has_trailer` set
//!              trailer: magic (8 bytes), length of the buffer (u64), CRC-32 of all bytes before it (u32)
//! <path>.data  tensors of a large checkpoint, each at a multiple of 4; its length and CRC-32 are in `extras`
//! ```
#![deny(unsafe_code)]

mod checkpoint;
mod disk;
mod error;
#[path = "generated/checkpoint.rs"]
#[allow(
    unsafe_code,
    unreachable_pub,
    dead_code,
    missing_docs,
    rust_2018_idioms,
    clippy::all,
    clippy::pedantic
)]
#[allow(clippy::undocumented_unsafe_blocks, clippy::unwrap_used)]
mod generated;
mod read;
mod safetensors;
#[cfg(test)]
mod tests;
mod trailer;
mod write;

pub use checkpoint::{
    Checkpoint, Extras, ModuleState, NamedTensor, NominalTensor, OptimizerGroup, ParameterState, Property,
    Scheduler,
};
pub use error::Error;
pub use read::{load, read};
pub use safetensors::{
    load_safetensors, load_safetensors_metadata, read_safetensors, save_safetensors, save_safetensors_with,
    write_safetensors,
};
pub use write::{EXTERNAL_ABOVE, Layout, SaveOptions, StagedCheckpoint, encode, save, stage};

/// Result of reading or writing.
pub type Result<T> = std::result::Result<T, Error>;
