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
//! ```
//! use ortrain::artifacts::{ArtifactOptions, Loss, OptimizerKind, generate};
//! use ortrain::{CheckpointState, Given, Module, ModuleOptions, Optimizer, Tensor, collect};
//!
//! # let files = tempfile::tempdir()?;
//! # let folder = files.path();
//! # let forward = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/perceptron.onnx");
//! // Once, from any ONNX model: what to train, which loss, which optimizer.
//! let options = ArtifactOptions {
//!     requires_grad: vec!["fc2.weight".into(), "fc2.bias".into()],
//!     losses: vec![Loss::CrossEntropyLoss.into()],
//!     optimizer: Some(OptimizerKind::AdamW),
//!     ..ArtifactOptions::default()
//! };
//! generate(forward.into(), options)?.write(folder, "")?;
//!
//! let mut state = CheckpointState::load(folder.join("checkpoint"))?;
//! let train = folder.join("training_model.onnx").into();
//! let eval = Some(folder.join("eval_model.onnx").into());
//! let mut module = Module::new(train, &mut state, eval, ModuleOptions::default())?;
//! let mut optimizer = Optimizer::new(folder.join("optimizer_model.onnx").into(), &mut state, &module)?;
//!
//! let (x, labels) = (Tensor::f32(&[2, 64], &[0.5; 128]), Tensor::i64(&[2], &[3, 4]));
//! let inputs = [Given::from(&x), Given::from(&labels)];
//! let mut losses = Vec::new();
//! for _ in 0..10 {
//!     let results = collect(|deliver| module.train_step(&mut state, &inputs, deliver))?;
//!     losses.push(results[0].to_vec::<f32>()[0]);
//!     optimizer.step(&mut state, &module)?;
//!     module.lazy_reset_grad();
//! }
//! assert!(losses[9] < losses[0]);
//!
//! state.save(folder.join("trained"), true)?;
//! module.export_model_for_inferencing(&state, folder.join("trained.onnx"), &["logits"])?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! No name of an operator appears in this crate: what operators are is said in `ortrain-ops`.
#![deny(missing_docs)]
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
pub use outputs::{Destination, collect};
pub use profile::{InstructionProfile, Profile, ProfileOptions};
pub use scheduler::LinearLRScheduler;
pub use session::{InferenceSession, SessionOptions};
pub use source::ModelSource;
pub use state::{CheckpointState, ParameterView, PlaneLayout, StateLayout, TensorLayout};
pub use training_session::{DetachedSession, TrainingSession};
