//! Optimizers: the table, and descriptions of them with settings and groups of parameters.

/// An optimizer with its settings and groups; text in optimizer models and checkpoints.
///
/// ```
/// use ortrain::optim::OptimizerSpec;
///
/// let mut spec = OptimizerSpec::new("SGD")?;
/// spec.settings.insert("momentum".into(), 0.9);
/// let spec = spec.complete()?;
/// assert_eq!(spec.slots[0].name, "momentum0");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::OptimizerSpec;

/// A group of parameters with settings of its own.
///
/// ```
/// use ortrain::optim::Group;
///
/// let trunk = Group { parameters: vec!["encoder.0".into()], lr_factor: 0.1, frozen_steps: 500, ..Group::default() };
/// assert_eq!(trunk.lr, None);
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::Group;

/// A slot of an optimizer as its model declares it.
///
/// ```
/// use ortrain::optim::SlotSpec;
///
/// assert_eq!(SlotSpec::new("momentum0").start, "zero");
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::SlotSpec;

/// The rows of the table.
///
/// ```
/// use ortrain::optim::OPTIMIZERS;
///
/// let lion = OPTIMIZERS.iter().find(|row| row.name == "Lion").unwrap();
/// assert_eq!(lion.settings[1].default, 0.99);
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::OPTIMIZERS;

/// The optimizer model of a description in plain ONNX, for trained parameters of these element types.
///
/// ```
/// use ortrain::DType;
/// use ortrain::optim::{OptimizerSpec, optimizer_model};
///
/// let model = optimizer_model(&OptimizerSpec::new("Lion")?, &[DType::F32])?;
/// assert_eq!(model.graph.unwrap().node[0].op_type, "SequenceMap");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When the description does not fit its optimizer.
#[doc(inline)]
pub use ortrain_ops::optimizers::optimizer_model;
