//! Operators and gradients of the user's own.

use std::sync::Arc;

use ortrain_onnx::FunctionProto;

use crate::{Error, Result};

/// Operators and gradients of the user's own, all of them functions of ONNX: nodes say what they compute. A model is read
/// with them by [`ModelSource::with_operators`](crate::ModelSource::with_operators), wherever models are read; clones
/// share what is in them.
///
/// An operator is written out where it is called. A gradient is part of the training model that is generated. So what is
/// written, be it artifacts or exported models, holds plain nodes and needs no library.
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
    /// An empty library.
    ///
    /// ```
    /// let library = ortrain::OperatorLibrary::new();
    /// assert!(library.is_empty());
    /// ```
    #[must_use]
    pub fn new() -> OperatorLibrary {
        OperatorLibrary::default()
    }

    /// Whether there is nothing in it.
    ///
    /// ```
    /// # use ortrain::{FunctionProto, OperatorLibrary};
    /// let mut library = OperatorLibrary::new();
    /// assert!(library.add_function(FunctionProto::default()).is_err(), "a function without a name");
    /// assert!(library.is_empty());
    /// ```
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds an operator: nodes of the function's domain, name and overload call it, whether or not the model brings the
    /// function along.
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
    /// When it is no sound function, is there already, or has the name of an operator that ortrain has itself.
    pub fn add_function(&mut self, function: FunctionProto) -> Result<()> {
        let outcome = Arc::make_mut(&mut self.0).add_function(function);
        outcome.map_err(|error| Error::Argument(error.to_string()))
    }

    /// Adds the gradient of an operator, one of ortrain's or of the user's: it takes the place of what would be found.
    ///
    /// With the operator's inputs x, outputs y and the gradients of the outputs dy, the inputs of the function are all x,
    /// all y and all dy, in this order, and its outputs are the gradients of all x. An output with an empty name says that
    /// there is none. An operator of one input and one output thus has a gradient `(x, y, dy) -> (dx)`. A node may leave
    /// out what is optional: the function is then given nothing. Where no gradient arrives at an output it is given zeros.
    /// The function's attributes are those of the node that it declares.
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
    /// When it is no sound function or not one of these inputs, or there is a gradient already.
    pub fn add_gradient(&mut self, domain: &str, operator: &str, function: FunctionProto) -> Result<()> {
        self.add(domain, operator, None, function)
    }

    /// Adds a gradient for one node, by its name: it goes before a gradient of the operator. Where a model that is
    /// differentiated has no such node, it is refused.
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
    /// As for [`OperatorLibrary::add_gradient`].
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

/// Whether they are clones of each other.
impl PartialEq for OperatorLibrary {
    fn eq(&self, other: &OperatorLibrary) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for OperatorLibrary {}
