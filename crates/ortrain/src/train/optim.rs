//! Optimizers: the table of known optimizers, and descriptions with settings and parameter groups.

/// An optimizer with its settings and groups; stored as text in optimizer models and checkpoints.
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

/// A group of parameters with its own settings.
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

/// Rows of the table of optimizers.
///
/// ```
/// use ortrain::optim::OPTIMIZERS;
///
/// let lion = OPTIMIZERS.iter().find(|row| row.name == "Lion").unwrap();
/// assert_eq!(lion.settings[1].default, 0.99);
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::OPTIMIZERS;

/// Builds an optimizer model in plain ONNX from a description, for trained parameters of these element types.
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
/// If the description does not fit its optimizer.
#[doc(inline)]
pub use ortrain_ops::optimizers::optimizer_model;

/// Builds the optimizer model of a custom row: an optimizer that is not in the table.
///
/// ```
/// use ortrain::DType;
/// use ortrain::optim::{Optimizer, OptimizerSpec, Range, Rule, Setting, Slot, SlotShape, Start, When, optimizer_model_of_row};
///
/// /// Signs of gradients with momentum.
/// static SIGNUM: Optimizer = Optimizer {
///     name: "Signum",
///     summary: "steps by the sign of a momentum",
///     source: "Bernstein et al., signSGD, 2018",
///     slots: &[Slot { name: "momentum0", shape: SlotShape::Same, start: Start::Zero, when: When::Always }],
///     settings: &[Setting { name: "beta", default: 0.9, range: Range::BelowOne, meaning: "decay rate of the momentum" }],
///     flags: &[],
///     learning_rate: 1e-4,
///     average: None,
///     update: Rule::Elements(|u| {
///         let momentum = u.average("momentum0", u.setting("beta"), u.gradient);
///         u.parameter - u.rate * momentum.sign()
///     }),
/// };
///
/// let model = optimizer_model_of_row(&SIGNUM, &OptimizerSpec::of_row(&SIGNUM), &[DType::F32])?;
/// assert_eq!(model.graph.unwrap().output[1].name, "updated_momentum0");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::optimizer_model_of_row;

/// A row: an optimizer of the table, or a custom one. [`optimizer_model_of_row`] shows an example.
///
/// ```
/// use ortrain::optim::Optimizer;
///
/// assert_eq!(Optimizer::find("Lion").unwrap().learning_rate, 1e-4);
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::Optimizer;

/// Formula of the step of one parameter.
///
/// ```
/// use ortrain::optim::Rule;
///
/// let rule = Rule::Elements(|u| u.parameter - u.rate * u.gradient);
/// assert!(matches!(rule, Rule::Elements(_)));
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::Rule;

/// Inputs of a formula: one step of one parameter.
///
/// ```
/// use ortrain::optim::{Rule, Update};
///
/// let rule = Rule::Elements(|u: &mut Update<'_>| u.parameter - u.rate / u.step.sqrt() * u.gradient);
/// assert!(matches!(rule, Rule::Elements(_)));
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::Update;

/// A number in a formula: one per element of a parameter, or one per parameter.
///
/// ```
/// use ortrain::optim::{Number, Rule};
///
/// fn sign_of<'a>(number: Number<'a>) -> Number<'a> {
///     number.sign()
/// }
/// let rule = Rule::Elements(|u| u.parameter - u.rate * sign_of(u.gradient));
/// assert!(matches!(rule, Rule::Elements(_)));
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::formula::Number;

/// A per-parameter value of an optimizer that persists between steps.
///
/// ```
/// use ortrain::optim::{Slot, SlotShape, Start, When};
///
/// let slot = Slot { name: "norm", shape: SlotShape::Scalar, start: Start::One, when: When::Always };
/// assert!(slot.shape.dims(&[2, 3], &|_| None).is_empty());
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::Slot;

/// Shape of a slot.
///
/// ```
/// use ortrain::optim::SlotShape;
///
/// assert_eq!(SlotShape::Rows.dims(&[4, 5], &|_| None), [4, 1]);
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::SlotShape;

/// Initial value of a slot.
///
/// ```
/// use ortrain::optim::{OPTIMIZERS, Start};
///
/// assert!(OPTIMIZERS.iter().flat_map(|row| row.slots).any(|slot| slot.start == Start::One));
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::Start;

/// Condition under which an optimizer has a slot.
///
/// ```
/// use ortrain::optim::{OPTIMIZERS, When};
///
/// assert!(OPTIMIZERS.iter().flat_map(|row| row.slots).any(|slot| slot.when == When::Flag("amsgrad")));
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::When;

/// A numeric setting of an optimizer.
///
/// ```
/// use ortrain::optim::{Range, Setting};
///
/// let eps = Setting { name: "eps", default: 1e-8, range: Range::NotNegative, meaning: "added to the root" };
/// assert!(!eps.range.contains(f64::NAN));
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::Setting;

/// Valid range of a setting.
///
/// ```
/// assert!(!ortrain::optim::Range::BelowOne.contains(1.0));
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::Range;

/// A Boolean option that selects a variant of a formula.
///
/// ```
/// use ortrain::optim::OPTIMIZERS;
///
/// let sgd = OPTIMIZERS.iter().find(|row| row.name == "SGD").unwrap();
/// assert_eq!((sgd.flags[0].name, sgd.flags[0].default), ("nesterov", false));
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::Flag;

/// A custom optimizer as an ONNX function: the step of one parameter.
///
/// ```
/// use ortrain::{FunctionProto, NodeProto, OperatorSetIdProto};
/// use ortrain::optim::OptimizerFunction;
///
/// let node = |op: &str, inputs: [&str; 2], output: &str| NodeProto {
///     op_type: op.into(),
///     input: inputs.map(String::from).to_vec(),
///     output: vec![output.into()],
///     ..NodeProto::default()
/// };
/// let function = FunctionProto {
///     name: "Descent".into(),
///     domain: "mine".into(),
///     input: ["parameter", "gradient", "rate"].map(String::from).to_vec(),
///     output: vec!["new_parameter".into()],
///     node: vec![node("Mul", ["rate", "gradient"], "step"), node("Sub", ["parameter", "step"], "new_parameter")],
///     opset_import: vec![OperatorSetIdProto { domain: String::new(), version: 17 }],
///     ..FunctionProto::default()
/// };
/// let descent = OptimizerFunction::new(function, Default::default(), 0.1, &Default::default())?;
/// assert_eq!(descent.spec().optimizer, "Descent");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::OptimizerFunction;

/// Builds the optimizer model of a function.
///
/// ```
/// # use ortrain::{FunctionProto, NodeProto, OperatorSetIdProto};
/// # use ortrain::optim::OptimizerFunction;
/// use ortrain::DType;
/// use ortrain::optim::optimizer_model_of_function;
///
/// # let function = FunctionProto {
/// #     name: "Still".into(),
/// #     domain: "mine".into(),
/// #     input: vec!["parameter".into()],
/// #     output: vec!["new_parameter".into()],
/// #     node: vec![NodeProto {
/// #         op_type: "Identity".into(),
/// #         input: vec!["parameter".into()],
/// #         output: vec!["new_parameter".into()],
/// #         ..NodeProto::default()
/// #     }],
/// #     opset_import: vec![OperatorSetIdProto { domain: String::new(), version: 17 }],
/// #     ..FunctionProto::default()
/// # };
/// # let still = OptimizerFunction::new(function, Default::default(), 0.1, &Default::default())?;
/// let model = optimizer_model_of_function(&still, &still.spec(), &[DType::F32])?;
/// assert_eq!(model.graph.unwrap().output[0].name, "updated_params");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::optimizer_model_of_function;
