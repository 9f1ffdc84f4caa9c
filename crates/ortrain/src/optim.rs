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

/// The optimizer model of a row of the caller's own: an optimizer that is in no table.
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

/// A row: an optimizer of the table or of the caller's own. [`optimizer_model_of_row`] shows one.
///
/// ```
/// use ortrain::optim::Optimizer;
///
/// assert_eq!(Optimizer::find("Lion").unwrap().learning_rate, 1e-4);
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::Optimizer;

/// The formula of a step of one parameter.
///
/// ```
/// use ortrain::optim::Rule;
///
/// let rule = Rule::Elements(|u| u.parameter - u.rate * u.gradient);
/// assert!(matches!(rule, Rule::Elements(_)));
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::Rule;

/// One step of one parameter while its formula is written.
///
/// ```
/// use ortrain::optim::{Rule, Update};
///
/// let rule = Rule::Elements(|u: &mut Update<'_>| u.parameter - u.rate / u.step.sqrt() * u.gradient);
/// assert!(matches!(rule, Rule::Elements(_)));
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::Update;

/// A number of a formula: one for each element of a parameter, or one for the whole parameter.
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

/// A value that an optimizer keeps for each parameter between steps.
///
/// ```
/// use ortrain::optim::{Slot, SlotShape, Start, When};
///
/// let slot = Slot { name: "norm", shape: SlotShape::Scalar, start: Start::One, when: When::Always };
/// assert!(slot.shape.dims(&[2, 3], &|_| None).is_empty());
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::Slot;

/// The shape of a slot.
///
/// ```
/// use ortrain::optim::SlotShape;
///
/// assert_eq!(SlotShape::Rows.dims(&[4, 5], &|_| None), [4, 1]);
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::SlotShape;

/// The value of a slot before the first step.
///
/// ```
/// use ortrain::optim::{OPTIMIZERS, Start};
///
/// assert!(OPTIMIZERS.iter().flat_map(|row| row.slots).any(|slot| slot.start == Start::One));
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::Start;

/// The condition under which an optimizer has a slot.
///
/// ```
/// use ortrain::optim::{OPTIMIZERS, When};
///
/// assert!(OPTIMIZERS.iter().flat_map(|row| row.slots).any(|slot| slot.when == When::Flag("amsgrad")));
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::When;

/// A setting of an optimizer: a number.
///
/// ```
/// use ortrain::optim::{Range, Setting};
///
/// let eps = Setting { name: "eps", default: 1e-8, range: Range::NotNegative, meaning: "added to the root" };
/// assert!(!eps.range.contains(f64::NAN));
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::Setting;

/// The values that a setting may have.
///
/// ```
/// assert!(!ortrain::optim::Range::BelowOne.contains(1.0));
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::Range;

/// A choice that a formula is written for.
///
/// ```
/// use ortrain::optim::OPTIMIZERS;
///
/// let sgd = OPTIMIZERS.iter().find(|row| row.name == "SGD").unwrap();
/// assert_eq!((sgd.flags[0].name, sgd.flags[0].default), ("nesterov", false));
/// ```
#[doc(inline)]
pub use ortrain_ops::optimizers::Flag;

/// An optimizer of the caller's own as a function of ONNX: the step of one parameter.
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

/// The optimizer model of a function.
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
