//! Custom operators and gradients.

use std::sync::Arc;

use ortrain_onnx::FunctionProto;

use crate::{Error, Result};

/// Custom operators and gradients, defined as ONNX functions.
/// [`ModelSource::with_operators`](crate::ModelSource::with_operators) applies them wherever a model is read.
/// Clones share their content.
///
/// A custom operator is inlined where it is called. A custom gradient becomes part of the generated training
/// model. Written artifacts and exported models therefore have plain nodes and do not need the library.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{FunctionProto, ModelSource, NodeProto, OperatorLibrary, OperatorSetIdProto, Stage, dump};
///
/// let texts = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
/// let identity = NodeProto {
///     op_type: "Identity".into(),
///     input: texts(&["dy"]),
///     output: texts(&["dx"]),
///     ..NodeProto::default()
/// };
/// // What comes from behind a Relu goes on as it is, also where the Relu is zero.
/// let straight = FunctionProto {
///     name: "Straight".into(),
///     domain: "examples".into(),
///     input: texts(&["x", "y", "dy"]),
///     output: texts(&["dx"]),
///     node: vec![identity],
///     opset_import: vec![OperatorSetIdProto { domain: String::new(), version: 17 }],
///     ..FunctionProto::default()
/// };
/// let mut library = OperatorLibrary::new();
/// library.add_gradient("", "Relu", straight)?;
/// let source = ModelSource::from(setup::MODEL).with_operators(&library);
/// let gradient = dump(source, Stage::Gradient, &[])?;
/// assert!(gradient.contains("fc1_grad: float32[batch, 96] = Identity(hidden_grad)"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct OperatorLibrary(Arc<ortrain_ops::OperatorLibrary>);

impl OperatorLibrary {
    /// Creates an empty library.
    ///
    /// ```
    /// let library = ortrain::OperatorLibrary::new();
    /// assert!(library.is_empty());
    /// ```
    #[must_use]
    pub fn new() -> OperatorLibrary {
        OperatorLibrary::default()
    }

    /// Returns true if the library is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds an operator. Nodes with the function's domain, name and overload call it, even if the model has
    /// its own definition.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::{FunctionProto, InferenceSession, ModelSource, NodeProto, OperatorLibrary, OperatorSetIdProto};
    ///
    /// let texts = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    /// let double = FunctionProto {
    ///     name: "Double".into(),
    ///     domain: "examples".into(),
    ///     input: texts(&["x"]),
    ///     output: texts(&["y"]),
    ///     node: vec![NodeProto {
    ///         op_type: "Add".into(),
    ///         input: texts(&["x", "x"]),
    ///         output: texts(&["y"]),
    ///         ..NodeProto::default()
    ///     }],
    ///     opset_import: vec![OperatorSetIdProto { domain: String::new(), version: 17 }],
    ///     ..FunctionProto::default()
    /// };
    /// let mut library = OperatorLibrary::new();
    /// library.add_function(double)?;
    ///
    /// let mut model = ortrain::decode_model(std::fs::read(setup::MODEL)?)?;
    /// let relu = &mut model.graph.as_mut().unwrap().node[1];
    /// relu.domain = "examples".into();
    /// relu.op_type = "Double".into();
    /// let source = ModelSource::from_proto(&model)?.with_operators(&library);
    /// let session = InferenceSession::new(source, Default::default())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the function is invalid, exists already, or has the name of a built-in operator.
    pub fn add_function(&mut self, function: FunctionProto) -> Result<()> {
        let outcome = Arc::make_mut(&mut self.0).add_function(function);
        outcome.map_err(|error| Error::Argument(error.to_string()))
    }

    /// Adds the gradient of a built-in or custom operator, which replaces the default one.
    ///
    /// The inputs of the function are all inputs x of the operator, all outputs y, then the gradients dy of
    /// all outputs, in this order. Its outputs are the gradients of all x. An output with an empty name means
    /// that the gradient does not exist. The gradient of an operator with one input and one output is
    /// therefore `(x, y, dy) -> (dx)`.
    ///
    /// If a node omits an optional value, the function receives no value for it. If no gradient arrives at an
    /// output, the function receives zeros. The attributes of the function are the attributes of the node
    /// that it declares.
    ///
    /// ```
    /// use ortrain::{FunctionProto, OperatorLibrary};
    ///
    /// let mut library = OperatorLibrary::new();
    /// let function = FunctionProto { input: vec!["x".into()], output: vec!["dx".into()], ..Default::default() };
    /// let error = library.add_gradient("", "Sign", function).unwrap_err();
    /// assert!(error.to_string().contains("has 1 inputs and 1 outputs, which does not fit"));
    /// ```
    ///
    /// # Errors
    /// If the function is invalid, its inputs do not fit, or a gradient exists already.
    pub fn add_gradient(&mut self, domain: &str, operator: &str, function: FunctionProto) -> Result<()> {
        self.add(domain, operator, None, function)
    }

    /// Adds a gradient for one node, by its name. It takes precedence over a gradient of the operator.
    /// Differentiating a model without this node is an error.
    ///
    /// ```
    /// use ortrain::{FunctionProto, OperatorLibrary};
    ///
    /// let mut library = OperatorLibrary::new();
    /// let error = library.add_node_gradient("fc1", "", "Gemm", FunctionProto::default()).unwrap_err();
    /// assert!(error.to_string().contains("has 0 inputs and 0 outputs"));
    /// ```
    ///
    /// # Errors
    /// As [`OperatorLibrary::add_gradient`].
    pub fn add_node_gradient(
        &mut self,
        node: &str,
        domain: &str,
        operator: &str,
        function: FunctionProto,
    ) -> Result<()> {
        self.add(domain, operator, Some(node), function)
    }

    fn add(
        &mut self,
        domain: &str,
        operator: &str,
        node: Option<&str>,
        function: FunctionProto,
    ) -> Result<()> {
        let outcome = Arc::make_mut(&mut self.0).add_gradient(domain, operator, node, function);
        outcome.map_err(|error| Error::Argument(error.to_string()))
    }

    pub(crate) fn inner(&self) -> &ortrain_ops::OperatorLibrary {
        &self.0
    }
}

/// True for clones of each other.
impl PartialEq for OperatorLibrary {
    fn eq(&self, other: &OperatorLibrary) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for OperatorLibrary {}
