//! Train ONNX models where they run: the Rust interface of ortrain.
//!
//! - [`artifacts`]: from a forward model to the files of a training; [`artifact_parts`]: its building blocks.
//! - [`CheckpointState`]: parameters, optimizer state and properties; it owns their memory.
//! - [`Module`], [`Optimizer`], [`LrScheduler`] with a [`Schedule`], [`LinearLRScheduler`]: the training
//!   loop.
//! - [`TrainingSession`]: the same loop in one value, like onnxruntime-training's session in C, C++ and C#.
//! - [`distributed`]: training on several ranks.
//! - [`InferenceSession`]: runs any model.
//! - [`Module::profile`], [`Profile`]: the time of each instruction of a step.
//! - [`inspect`]: trained and frozen constants of a model, with the reasons.
//! - [`gradient`]: the gradients of a model as a model.
//! - [`OperatorLibrary`]: custom operators and gradients.
//! - [`dump`]: every compilation stage from a file to its instructions, as text.
//!
//! ```
//! use ortrain::artifacts::{ArtifactOptions, Loss, OptimizerKind, generate};
//! use ortrain::{CheckpointState, InputView, Module, ModuleOptions, Optimizer, Tensor, collect};
//!
//! # let files = tempfile::tempdir()?;
//! # let folder = files.path();
//! # let forward = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/perceptron.onnx");
//! // Once, from any ONNX model: what to train, which loss, which optimizer.
//! let options = ArtifactOptions {
//!     requires_grad: vec!["fc2.weight".into(), "fc2.bias".into()],
//!     losses: vec![Loss::CrossEntropyLoss.into()],
//!     optimizer: Some(OptimizerKind::AdamW.into()),
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
//! let inputs = [InputView::from(&x), InputView::from(&labels)];
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
//! This crate contains no operator names: `ortrain-ops` defines the operators.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

/// Examples of the pages under `docs/`.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../../docs/buffers.md")]
    mod buffers {}
    #[doc = include_str!("../../../docs/csharp-training-session.md")]
    mod csharp_training_session {}
    #[doc = include_str!("../../../docs/extending.md")]
    mod extending {}
    #[doc = include_str!("../../../docs/rust.md")]
    mod rust {}
}

pub mod artifacts;
pub mod distributed;
mod error;
mod exec;
mod face;
pub mod lora;
mod model;
mod state;
mod suggest;
mod train;

/// Memory on devices of CUDA, for other libraries in the same process.
#[cfg(feature = "cuda")]
pub mod cuda {
    /// The backend of a device, and the address of memory on it for another library, in the order of streams.
    ///
    /// ```
    /// let memory = ortrain::Memory::new(4);
    /// assert!(ortrain::cuda::share_memory(&memory, None).is_none(), "it is on the host");
    /// ```
    #[doc(inline)]
    pub use ortrain_cuda::{Cuda, SharedMemory, is_adopted, share_memory};
}
#[doc(inline)]
pub use artifacts::parts as artifact_parts;
pub use error::{Error, ErrorKind, Result};
#[cfg(feature = "cuda")]
pub use exec::backend::search_cuda_packages;
pub use exec::backend::{DeviceInfo, backend, default_backend, devices};
pub use exec::inputs::ValueInfo;
pub use exec::outputs::{OutputTarget, TargetBytes, collect};
pub use exec::profile::{InstructionProfile, Profile, ProfileOptions};
pub use exec::run_options::RunOptions;
pub use exec::value::Value;
pub use face::forward_backward::{ForwardBackward, LiveForward};
pub use face::gradient_options::{ForwardBackwardOptions, Weight};
pub use face::inference_session::InferenceSession;
pub use face::session_options::{ModelMeta, SessionOptions};
pub use face::training_session::{DetachedSession, TrainingSession};
#[doc(inline)]
pub use face::{classic, gradient};
pub use model::dump::{Stage, dump};
pub use model::edits::ModelChanges;
pub use model::file_kind::FileKind;
#[doc(hidden)]
pub use model::inspect::inspect_strictly;
pub use model::inspect::{inspect, inspect_with};
pub use model::inspection::{
    Confidence, GradientStop, InspectOptions, Inspection, NodeNote, ParameterInfo, ParameterRole, Scope,
    StepCost, StopCandidate,
};
pub use model::obstacle::Obstacle;
pub use model::operator_list::{OperatorInfo, operators};
pub use model::operators::OperatorLibrary;
pub use model::source::ModelSource;
pub use state::layout::{PlaneLayout, StateLayout, TensorLayout};
pub use state::load_report::LoadReport;
pub use state::{CheckpointState, OptimizerValues, ParameterView};
pub use train::lr_scheduler::LrScheduler;
pub use train::module::buffers::Norms;
pub use train::module::export::ExportOptions;
pub use train::module::{MemoryUse, Module, ModuleOptions};
pub use train::not_finite::{Anomaly, NotFinite};
#[doc(inline)]
pub use train::optim;
pub use train::optimizer::Optimizer;
pub use train::schedule::{Schedule, ScheduleInput, Setting};
pub use train::schedule_text::{curve_steps, draw_curve};
pub use train::scheduler::LinearLRScheduler;

// Types of values, backends and files.

/// Shared bytes of a model, a checkpoint, or a tensor. Clones are cheap.
///
/// ```
/// use ortrain::{Bytes, ModelSource};
///
/// let bytes = Bytes::from(vec![8, 8]);
/// assert_eq!(ModelSource::from(bytes.clone()), ModelSource::Bytes(bytes));
/// ```
#[doc(inline)]
pub use bytes::Bytes;

/// A quantized tensor of a model, and the numbers of a quantized weight: see [`Module::quantization`].
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// use ortrain::{QuantizedTensor, WeightNumbers};
///
/// let is_clipped = |tensor: &QuantizedTensor| {
///     tensor.weight.is_some_and(|WeightNumbers { clipped, .. }| clipped > 0.01)
/// };
/// assert!(!module.quantization(&state)?.iter().any(is_clipped), "the example has no quantized tensors");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_ops::training::{QuantizedTensor, WeightNumbers};

/// Content of a checkpoint file as plain data.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::CheckpointState;
///
/// let checkpoint = setup::artifacts()?.checkpoint;
/// assert!(checkpoint.optimizer_groups.is_empty() && checkpoint.properties.is_empty());
/// let state = CheckpointState::from_checkpoint(checkpoint)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_checkpoint::Checkpoint;

/// A custom value in a checkpoint.
///
/// ```
/// use ortrain::Property;
///
/// assert_eq!(Property::from(3), Property::Int(3));
/// assert_eq!(Property::from(0.5), Property::Float(0.5));
/// assert_eq!(Property::from("digits"), Property::String("digits".into()));
/// ```
#[doc(inline)]
pub use ortrain_checkpoint::Property;

/// Performance limits of this machine, for comparison in a [`Profile`].
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::InputView::from);
/// let limits = module.profile(&state, &inputs, Default::default(), &mut |_, _| Ok(()))?.limits;
/// assert!(limits.flops > 0.0 && limits.bandwidth > 0.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_program::Limits;

/// An element type.
///
/// ```
/// use ortrain::DType;
///
/// assert_eq!((DType::F32.size(), DType::I64.size()), (4, 8));
/// assert!(DType::BF16.is_float());
/// assert_eq!(DType::F16.to_string(), "float16");
/// ```
#[doc(inline)]
pub use ortrain_graph::DType;

/// An element type of at most eight bits, without arithmetic.
///
/// ```
/// use ortrain::{DType, SmallType};
///
/// assert_eq!(SmallType::F8E4M3Fn.decode(0x7E), 448.0);
/// assert_eq!(DType::Small(SmallType::I4).to_string(), "int4");
/// ```
#[doc(inline)]
pub use ortrain_graph::SmallType;

/// Size of an axis of an input or output: a number, or a name.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::InputView::from);
/// use ortrain::Dim;
///
/// let shape = module.inputs(true)[0].shape.as_ref().unwrap();
/// assert_eq!(shape, &[Dim::Symbol("batch".into()), Dim::Known(64)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_graph::Dim;

/// A tensor: input or output of a step, or value of a parameter.
///
/// ```
/// use ortrain::{DType, Tensor};
///
/// let x = Tensor::f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
/// assert_eq!((x.dtype(), x.dims(), x.len()), (DType::F32, &[2, 3][..], 6));
/// assert_eq!(x.to_vec::<f32>()[4], 5.0);
/// let half = x.converted(DType::BF16);
/// assert_eq!(half.data().len(), 12);
/// ```
#[doc(inline)]
pub use ortrain_graph::Tensor;
/// Gradient support of an operator.
///
/// ```
/// use ortrain::{Gradient, operators};
///
/// let of = |name| operators().into_iter().find(|operator| operator.name == name).unwrap().gradient;
/// assert_eq!(of("OneHot"), Gradient::Partial(vec![2]));
/// ```
#[doc(inline)]
pub use ortrain_ops::Gradient;
/// Kind of execution of an operator.
///
/// ```
/// use ortrain::{Runs, operators};
///
/// let hosts: Vec<&str> =
///     operators().iter().filter(|operator| operator.runs == Runs::Host).map(|operator| operator.name).collect();
/// assert!(hosts.contains(&"NonZero"));
/// ```
#[doc(inline)]
pub use ortrain_ops::Runs;

/// An attribute of a node, as its message.
///
/// ```
/// use ortrain::{AttributeProto, AttributeType};
///
/// let mut alpha = AttributeProto { name: "alpha".into(), f: 0.5, ..AttributeProto::default() };
/// alpha.set_type(AttributeType::Float);
/// ```
#[doc(inline)]
pub use ortrain_onnx::AttributeProto;

/// Type of an attribute's value.
///
/// ```
/// use ortrain::AttributeType;
///
/// assert_eq!(AttributeType::Ints.as_str_name(), "INTS");
/// ```
#[doc(inline)]
pub use ortrain_onnx::AttributeType;

/// A function of ONNX, as its message: an operator or a gradient in an [`OperatorLibrary`].
///
/// ```
/// use ortrain::FunctionProto;
///
/// let function = FunctionProto { name: "Double".into(), domain: "examples".into(), ..Default::default() };
/// # assert!(function.node.is_empty());
/// ```
#[doc(inline)]
pub use ortrain_onnx::FunctionProto;

/// A node of a graph or function, as its message.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::NodeProto;
///
/// let first: NodeProto = setup::artifacts()?.eval_model.graph.unwrap().node.remove(0);
/// assert_eq!(first.op_type, "Gemm");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_onnx::NodeProto;

/// A set of operators and its version, as its message.
///
/// ```
/// use ortrain::OperatorSetIdProto;
///
/// let standard = OperatorSetIdProto { domain: String::new(), version: 17 };
/// # assert_eq!(standard.version, 17);
/// ```
#[doc(inline)]
pub use ortrain_onnx::OperatorSetIdProto;

/// Decodes a function from the bytes of its message.
///
/// ```
/// // Field 1 is the name.
/// assert_eq!(ortrain::decode_function(b"\x0a\x06Double".to_vec())?.name, "Double");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_onnx::decode_function;

/// Decodes an ONNX model from the bytes of a file, for edits of its message. External data is not loaded.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// let model = ortrain::decode_model(std::fs::read(setup::MODEL)?)?;
/// assert_eq!(model.graph.unwrap().node.len(), 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_onnx::decode_model;

/// Graph of an ONNX model, as its message.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// let graph = setup::artifacts()?.eval_model.graph.unwrap();
/// assert_eq!(graph.output.len(), 1, "the loss");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_onnx::GraphProto;

/// An ONNX model, as its message.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// let model = setup::artifacts()?.training_model;
/// assert_eq!(model.opset_import[0].version, 17);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_onnx::ModelProto;

/// Encodes an ONNX model as the bytes of a file.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// let bytes = ortrain::encode_model(&setup::artifacts()?.eval_model)?;
/// let session = ortrain::InferenceSession::new(bytes.into(), Default::default())?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_onnx::encode as encode_model;

/// Alignment of tensors in a plane, in bytes.
///
/// ```
/// assert_eq!(ortrain::ALIGNMENT, 256);
/// ```
#[doc(inline)]
pub use ortrain_program::ALIGNMENT;

/// Default maximum number of iterations of a loop.
///
/// ```
/// assert_eq!(ortrain::ITERATION_LIMIT, 1_000_000);
/// ```
pub use ortrain_program::ITERATION_LIMIT;

/// Returns the number of bytes rounded up to the alignment of a plane.
///
/// ```
/// assert_eq!(ortrain::align(40), 256);
/// ```
#[doc(inline)]
pub use ortrain_program::align;

#[doc(hidden)]
pub use exec::executable_cache::interruptible;
/// Interrupt that ends a run early: see [`RunOptions::interrupt`].
///
/// ```
/// use ortrain::Interrupt;
///
/// let never = Interrupt::new(|| false);
/// assert_eq!(format!("{never:?}"), "Interrupt");
/// ```
#[doc(inline)]
pub use ortrain_program::Interrupt;

/// A backend that runs programs: see [`backend`].
///
/// ```
/// use std::sync::Arc;
///
/// let reference: Arc<dyn ortrain::Backend> = ortrain::backend("reference", 0)?;
/// assert_eq!(reference.name(), "reference");
/// # Ok::<(), ortrain::Error>(())
/// ```
#[doc(inline)]
pub use ortrain_program::Backend;

/// Alternative to AMX for bfloat16 products: see [`RunOptions::bf16_fallback`].
///
/// ```
/// use ortrain::Bf16Fallback;
///
/// assert_eq!(Bf16Fallback::default(), Bf16Fallback::None);
/// assert_eq!("emulated".parse(), Ok(Bf16Fallback::Emulated));
/// ```
#[doc(inline)]
pub use ortrain_program::Bf16Fallback;

/// Work of an instruction: operations and bytes.
///
/// ```
/// let mut sum = ortrain::Cost { flops: 100, bytes: 8 };
/// sum += ortrain::Cost { flops: 20, bytes: 4 };
/// assert_eq!((sum.flops, sum.bytes), (120, 12));
/// ```
#[doc(inline)]
pub use ortrain_program::Cost;

/// Callback that receives a result of a step and its index. An error ends the step.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::InputView::from);
/// use ortrain::OutputSink;
///
/// let mut shapes = Vec::new();
/// let deliver: &mut OutputSink<'_> = &mut |_, value| {
///     shapes.push(value.dims.to_vec());
///     Ok(())
/// };
/// module.train_step(&mut state, &inputs, deliver)?;
/// assert_eq!(shapes, [[0_usize; 0]], "a loss of rank 0");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_program::OutputSink;

/// Output of a step or run: element type, shape and elements. The elements are valid until the callback returns.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::InputView::from);
/// let mut loss = [0; 4];
/// module.eval_step(&state, &inputs, &mut |_, value: ortrain::OutputView<'_>| value.copy_to(&mut loss))?;
/// assert!(f32::from_le_bytes(loss) > 0.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_program::OutputView;

/// Input of a step or run: element type, shape and elements, which stay in memory of the caller.
///
/// ```
/// use ortrain::{DType, InputView, Tensor};
///
/// let x = Tensor::f32(&[2, 3], &[0.5; 6]);
/// assert_eq!(InputView::from(&x).dims, [2, 3]);
/// let labels: Vec<u8> = [3_i64, 4].iter().flat_map(|label| label.to_le_bytes()).collect();
/// let labels = InputView { dtype: DType::I64, dims: &[2], bytes: labels[..].into() };
/// ```
#[doc(inline)]
pub use ortrain_program::InputView;

/// Elements of an [`InputView`]: bytes of this process, a memory that others may write to, or a sequence of tensors.
///
/// ```
/// use std::sync::Arc;
///
/// use ortrain::{DType, InputBytes, InputView, Memory};
///
/// let memory = Arc::new(Memory::new(8)); // or memory on a device, which a run on this device does not copy to the host
/// let x = InputView { dtype: DType::F32, dims: &[2], bytes: InputBytes::Memory(&memory) };
/// assert_eq!(&*x.to_host()?, [0; 8]);
/// # Ok::<(), ortrain::DeviceError>(())
/// ```
#[doc(inline)]
pub use ortrain_program::InputBytes;

/// A buffer in an [`OverLimit`] error.
///
/// ```
/// use ortrain::{DType, LargeBuffer};
///
/// let buffer = LargeBuffer { label: "hidden".into(), dtype: DType::F32, elements: 768, bytes: 3072 };
/// assert_eq!(buffer.elements * buffer.dtype.size(), buffer.bytes);
/// ```
#[doc(inline)]
pub use ortrain_program::LargeBuffer;

/// A plane: memory in this process or on a device. It never moves, and several owners may read and write it.
///
/// ```
/// use ortrain::Memory;
///
/// let plane = Memory::try_new(1024)?;
/// plane.write(256, &1.5_f32.to_le_bytes())?;
/// assert_eq!(plane.to_vec(256, 8)?, [0, 0, 0xc0, 0x3f, 0, 0, 0, 0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_program::Memory;

/// Memory of this process, the default kind of [`Memory`].
///
/// ```
/// use ortrain::Memory;
///
/// let plane = Memory::try_new(1024)?;
/// let memory = plane.host().expect("it lies in this process");
/// assert!(memory.as_ptr().addr().is_multiple_of(ortrain::ALIGNMENT));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_program::HostMemory;

/// Name of the device that is the memory of this process.
///
/// ```
/// use ortrain::{HOST, Memory};
///
/// assert_eq!(Memory::new(64).device(), HOST);
/// ```
#[doc(inline)]
pub use ortrain_program::HOST;

/// Memory on a device. Its backend allocates it; this process accesses it by copies.
///
/// ```
/// use std::any::Any;
/// use std::sync::{Arc, Mutex};
///
/// use ortrain::{AllocationError, DeviceError, DeviceMemory, Memory};
///
/// /// Bytes behind a lock, as a device would keep them.
/// #[derive(Debug)]
/// struct Remote(Mutex<Vec<u8>>);
///
/// impl DeviceMemory for Remote {
///     fn device(&self) -> &str {
///         "remote"
///     }
///     fn size(&self) -> usize {
///         self.0.lock().unwrap().len()
///     }
///     fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError> {
///         self.0.lock().unwrap()[offset..offset + bytes.len()].copy_from_slice(bytes);
///         Ok(())
///     }
///     fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
///         bytes.copy_from_slice(&self.0.lock().unwrap()[offset..offset + bytes.len()]);
///         Ok(())
///     }
///     fn clear(&self) -> Result<(), DeviceError> {
///         self.0.lock().unwrap().fill(0);
///         Ok(())
///     }
///     fn copy(&self, offset: usize, bytes: usize) -> Result<Arc<dyn DeviceMemory>, AllocationError> {
///         let copy = self.0.lock().unwrap()[offset..offset + bytes].to_vec();
///         Ok(Arc::new(Remote(Mutex::new(copy))))
///     }
///     fn as_any(&self) -> &dyn Any {
///         self
///     }
/// }
///
/// let memory = Memory::Device(Arc::new(Remote(Mutex::new(vec![0; 8]))));
/// memory.write(2, &[7, 9])?;
/// assert_eq!(memory.to_vec(1, 4)?, [0, 7, 9, 0]);
/// assert_eq!(memory.copy(2, 2)?.to_vec(0, 2)?, [7, 9]);
/// assert!(memory.host().is_none(), "this process has no address for it");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_program::DeviceMemory;

/// An allocation error.
///
/// ```
/// use ortrain::AllocationError;
///
/// let error = AllocationError::OnDevice { device: "vulkan".into(), bytes: 1 << 40, max_bytes: None };
/// assert_eq!(error.to_string(), "the device \"vulkan\" cannot allocate 1099511627776 bytes of memory");
/// ```
#[doc(inline)]
pub use ortrain_program::AllocationError;

/// A failed call on a device.
///
/// ```
/// let error = ortrain::DeviceError::new("vulkan", "the device is lost");
/// assert_eq!(error.to_string(), "the device \"vulkan\" failed: the device is lost");
/// ```
#[doc(inline)]
pub use ortrain_program::DeviceError;

/// Memory of another owner: [`Memory::borrowed`] makes a plane of it and keeps the owner alive.
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU8, Ordering};
///
/// use ortrain::{BorrowedMemory, Memory};
///
/// #[derive(Debug)]
/// struct Counters([AtomicU8; 3]);
///
/// impl BorrowedMemory for Counters {
///     fn bytes(&self) -> &[AtomicU8] {
///         &self.0
///     }
///
///     fn is_read_only(&self) -> bool {
///         false
///     }
/// }
///
/// let counters = Arc::new(Counters([1, 2, 3].map(AtomicU8::new)));
/// let plane = Memory::borrowed(counters.clone());
/// plane.write(1, &[7])?;
/// assert_eq!(counters.0[1].load(Ordering::Relaxed), 7);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_program::BorrowedMemory;

/// Memory need of a step in bytes, known in advance: [`Module::memory_need`].
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::InputView::from);
/// let need = module.memory_need(&inputs, true)?;
/// assert_eq!(need.total(), need.state + need.constants + need.work + need.scratch + need.intermediates);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_program::MemoryNeed;

/// Details of a run that was rejected because it would exceed the memory limit.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let batch = setup::batch();
/// # let inputs = [ortrain::InputView::from(&batch[0])];
/// use ortrain::{Error, InferenceSession, RunOptions};
///
/// let options = RunOptions::default().memory_limit(1000).into();
/// let mut session = InferenceSession::new(setup::MODEL.into(), options)?;
/// let Err(Error::StepOverLimit { over, .. }) = session.run(&inputs, &mut |_, _| Ok(())) else {
///     panic!("1000 bytes are not enough")
/// };
/// assert_eq!((over.limit, over.largest[0].label.as_str()), (1000, "hidden"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_program::OverLimit;

/// Precision of inner products: see [`RunOptions::precision`].
///
/// ```
/// use ortrain::Precision;
///
/// assert_eq!("bf16x3".parse(), Ok(Precision::Bf16x3));
/// assert_eq!((Precision::Bf16x3.terms(), Precision::Bf16x3.products().len()), (2, 3));
/// let [first, second, _] = Precision::Bf16x3.split(1.003);
/// assert_eq!(first, 1.0);
/// assert!((first + second - 1.003).abs() < 1e-5);
/// ```
#[doc(inline)]
pub use ortrain_program::Precision;

/// Error of a run; the state is unchanged.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let artifacts = setup::artifacts()?;
/// # let mut state = ortrain::CheckpointState::from_bytes(artifacts.checkpoint_bytes()?)?;
/// # let train = ortrain::ModelSource::from_proto(&artifacts.training_model)?;
/// use ortrain::{Error, Module, RunError, RunOptions};
///
/// let result = Module::new(train, &mut state, None, RunOptions::default().memory_limit(1000).into());
/// let Err(Error::Run(RunError::OverLimit(over))) = result else { panic!("the parameters take more") };
/// assert!(over.need.total() > 1000);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_program::RunError;
