//! Train ONNX models where they run: the Rust face of ortrain.
//!
//! - [`artifacts`]: from a forward model to the files of a training; [`blocks`]: the parts it is made of.
//! - [`CheckpointState`]: parameters, optimizer state and properties; it owns the memory they lie in.
//! - [`Module`], [`Optimizer`], [`LinearLRScheduler`]: the loop.
//! - [`TrainingSession`]: the same loop behind one value, as onnxruntime-training's session in C, C++ and C#.
//! - [`InferenceSession`]: runs any model.
//! - [`Module::profile`], [`Profile`]: where the time of a step goes.
//! - [`inspect`]: which values of a model would be trained, and why the others would not.
//! - [`dump`]: every stage between a file and its instructions, as text.
//!
//! ```no_run
//! use ortrain::{CheckpointState, DType, Given, Module, ModuleOptions, Optimizer};
//!
//! let mut state = CheckpointState::load("checkpoint")?;
//! let mut module = Module::new("training_model.onnx".into(), &mut state, None, ModuleOptions::default())?;
//! let mut optimizer = Optimizer::new("optimizer_model.onnx".into(), &mut state, &module)?;
//! # let (x, labels): (Vec<u8>, Vec<u8>) = Default::default();
//! for _ in 0..100 {
//!     let inputs = [
//!         Given { dtype: DType::F32, dims: &[32, 10], bytes: &x },
//!         Given { dtype: DType::I64, dims: &[32], bytes: &labels },
//!     ];
//!     module.train_step(&mut state, &inputs, &mut |_, _, _, value| {
//!         let mut loss = [0; 4];
//!         value.copy_to(&mut loss);
//!         println!("{}", f32::from_le_bytes(loss));
//!     })?;
//!     optimizer.step(&mut state, &module)?;
//!     module.lazy_reset_grad();
//! }
//! state.save("trained", true)?;
//! # Ok::<(), ortrain::Error>(())
//! ```
//!
//! No name of an operator appears in this crate: what operators are is said in `ortrain-ops`.
#![forbid(unsafe_code)]

pub mod artifacts;
mod backend;
mod binding;
pub mod blocks;
mod constants;
mod dump;
mod error;
mod exchange;
mod export;
mod inputs;
mod inspect;
mod module;
mod optimizer;
mod outputs;
mod profile;
mod runners;
mod scheduler;
mod session;
mod source;
mod state;
mod training_session;

pub use backend::{backend, default_backend};
pub use bytes::Bytes;
pub use dump::{Stage, dump};
pub use error::{Error, ErrorKind, Result};
pub use exchange::LoadReport;
pub use inputs::ValueInfo;
pub use inspect::{Inspection, ParameterInfo, ParameterRole, Scope, inspect};
pub use module::{MemoryUse, Module, ModuleOptions};
pub use optimizer::Optimizer;
pub use ortrain_checkpoint::{Checkpoint, Property};
pub use ortrain_cpu::Limits;
pub use ortrain_graph::{DType, Dim, Tensor};
pub use ortrain_onnx::{GraphProto, ModelProto, encode as encode_model};
pub use ortrain_program::{
    ALIGNMENT, Backend, Cost, Deliver, Delivered, Given, LargeBuffer, Memory, MemoryNeed, OverLimit, align,
};
pub use outputs::Destination;
pub use profile::{InstructionProfile, Profile, ProfileOptions};
pub use scheduler::LinearLRScheduler;
pub use session::{InferenceSession, SessionOptions};
pub use source::ModelSource;
pub use state::{CheckpointState, ParameterView, PlaneLayout, StateLayout, TensorLayout};
pub use training_session::{DetachedSession, TrainingSession};
