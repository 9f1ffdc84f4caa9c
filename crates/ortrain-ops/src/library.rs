//! User-defined operators and gradients.

use std::collections::HashSet;

use ortrain_onnx::{FunctionProto, ModelProto, NodeProto, visit_tensors_mut};

use crate::Error;
use crate::registry::{Registry, normalize_domain};

/// Operators that are ONNX functions, and gradients that replace the derived gradients.
#[derive(Clone, Debug, Default)]
pub struct OperatorLibrary {
    functions: Vec<FunctionProto>,
    gradients: Vec<Gradient>,
}

/// Gradient of an operator, or of one node.
///
/// The inputs of its function are the inputs of the operator, its outputs, and the gradients of its outputs. The
/// outputs of the function are the gradients of the inputs, with an empty name for an input without a gradient.
#[derive(Clone, Debug)]
pub(crate) struct Gradient {
    pub(crate) domain: String,
    pub(crate) operator: String,
    /// Name of the node, if the gradient is for a single node.
    pub(crate) node: Option<String>,
    pub(crate) function: FunctionProto,
}

impl Gradient {
    /// Returns the maximum number of inputs of the operator.
    pub(crate) fn input_count(&self) -> usize {
        self.function.output.len()
    }

    /// Returns the maximum number of outputs of the operator.
    pub(crate) fn output_count(&self) -> usize {
        (self.function.input.len() - self.function.output.len()) / 2
    }

    /// Returns the name for messages.
    pub(crate) fn label(&self) -> String {
        let of = operator_label(&self.domain, &self.operator);
        format!("{}, the gradient of {of},", function_label(&self.function))
    }
}

pub(crate) fn operator_label(of_domain: &str, name: &str) -> String {
    match normalize_domain(of_domain) {
        "" => name.to_owned(),
        of_domain => format!("{of_domain}:{name}"),
    }
}

pub(crate) fn function_label(function: &FunctionProto) -> String {
    format!("function {:?} of domain {:?}", function.name, function.domain)
}

impl OperatorLibrary {
    /// Returns true if the library is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.functions.is_empty() && self.gradients.is_empty()
    }

    /// Adds an operator: nodes of its domain, name and overload are calls of the function.
    ///
    /// # Errors
    /// Returns an error if the function is invalid, or if an operator of this name exists.
    pub fn add_function(&mut self, function: FunctionProto) -> Result<(), Error> {
        let fault = |reason: &str| {
            Err(Error::Function { function: function_label(&function), reason: reason.to_owned() })
        };
        if Registry::standard().find(normalize_domain(&function.domain), &function.name).is_some() {
            return fault("has the name of a built-in operator; choose another domain or name");
        }
        let same = |other: &FunctionProto| {
            normalize_domain(&other.domain) == normalize_domain(&function.domain)
                && other.name == function.name
                && other.overload == function.overload
        };
        if self.functions.iter().any(same) {
            return fault("is in the operator library already");
        }
        check_function(&function)?;
        self.functions.push(function);
        Ok(())
    }

    /// Adds the gradient of an operator, or of the single node with the name `node`. The function's own name appears
    /// only in messages.
    ///
    /// # Errors
    /// Returns an error if the function is invalid, if a gradient exists already, or if its inputs cannot be the
    /// operator's inputs, outputs, and gradients of outputs.
    pub fn add_gradient(
        &mut self,
        of_domain: &str,
        operator: &str,
        node: Option<&str>,
        function: FunctionProto,
    ) -> Result<(), Error> {
        let gradient = Gradient {
            domain: normalize_domain(of_domain).to_owned(),
            operator: operator.to_owned(),
            node: node.map(str::to_owned),
            function,
        };
        let fault = |reason: String| Err(Error::Function { function: gradient.label(), reason });
        let (inputs, outputs) = (gradient.function.input.len(), gradient.function.output.len());
        if outputs == 0 || inputs <= outputs || (inputs - outputs) % 2 != 0 {
            return fault(format!(
                "has {inputs} inputs and {outputs} outputs, which does not fit. Inputs are the operator's inputs, \
                 outputs and gradients of outputs; outputs are the gradients of the operator's inputs (an empty \
                 name if there is none)"
            ));
        }
        let same = |other: &Gradient| {
            (&other.domain, &other.operator, &other.node)
                == (&gradient.domain, &gradient.operator, &gradient.node)
        };
        if self.gradients.iter().any(same) {
            let of = operator_label(&gradient.domain, &gradient.operator);
            let target = node.map_or_else(|| of.clone(), |node| format!("node {node:?} ({of})"));
            return fault(format!(
                "cannot be added: the operator library has a gradient of {target} already"
            ));
        }
        check_function(&gradient.function)?;
        self.gradients.push(gradient);
        Ok(())
    }

    pub(crate) fn functions(&self) -> &[FunctionProto] {
        &self.functions
    }

    pub(crate) fn gradients(&self) -> &[Gradient] {
        &self.gradients
    }

    /// Returns the gradient of a node. A gradient for this node has precedence over a gradient for its operator.
    pub(crate) fn gradient_of(&self, node: &NodeProto) -> Option<usize> {
        let fits = |gradient: &Gradient| {
            gradient.domain == normalize_domain(&node.domain) && gradient.operator == node.op_type
        };
        let of_node = |gradient: &Gradient| gradient.node.as_ref() == Some(&node.name);
        let find = |predicate: &dyn Fn(&Gradient) -> bool| self.gradients.iter().position(predicate);
        find(&|gradient| fits(gradient) && of_node(gradient))
            .or_else(|| find(&|gradient| fits(gradient) && gradient.node.is_none()))
    }
}

/// Checks a function on its own.
fn check_function(function: &FunctionProto) -> Result<(), Error> {
    let fault = |reason: String| Err(Error::Function { function: function_label(function), reason });
    if function.name.is_empty() {
        return fault("has no name".into());
    }
    if function.output.iter().all(String::is_empty) {
        return fault("has no outputs".into());
    }
    let mut inputs = HashSet::new();
    for name in &function.input {
        if name.is_empty() || !inputs.insert(name) {
            return fault(format!("has two inputs with the name {name:?}, or an input without a name"));
        }
    }
    let mut computed: HashSet<&String> = HashSet::new();
    for name in function.node.iter().flat_map(|node| &node.output).filter(|name| !name.is_empty()) {
        if inputs.contains(name) || !computed.insert(name) {
            return fault(format!("computes {name:?} twice"));
        }
    }
    let is_defined = |name: &String| name.is_empty() || computed.contains(name) || inputs.contains(name);
    if let Some(name) = function.output.iter().find(|name| !is_defined(name)) {
        return fault(format!("has the output {name:?}, which no node of the function computes"));
    }
    for node in &function.node {
        if let Some(name) = node.input.iter().find(|name| !is_defined(name)) {
            let op = operator_label(&node.domain, &node.op_type);
            return fault(format!("has a node ({op}) with the unknown input {name:?}"));
        }
    }
    let mut model = ModelProto { functions: vec![function.clone()], ..ModelProto::default() };
    visit_tensors_mut(&mut model, |tensor, _| match tensor.external_data.is_empty() {
        true => Ok(()),
        false => fault(format!(
            "stores the data of its tensor {:?} in another file; store the data in the function",
            tensor.name
        )),
    })
}
