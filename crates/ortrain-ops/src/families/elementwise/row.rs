//! Row of the table of element-wise operators.

use ortrain_expr::{Builder, Reg};
use ortrain_graph::{Attrs, DType};

use crate::OpError;
use crate::class::{Class, Traits};

/// Element types that an element-wise operator accepts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TypeConstraint {
    Float,
    Number,
    Integer,
    Bool,
    Any,
}

impl TypeConstraint {
    pub(super) fn accepts(self, dtype: DType) -> bool {
        match self {
            TypeConstraint::Float => dtype.is_float(),
            TypeConstraint::Number => dtype.is_number(),
            TypeConstraint::Integer => dtype.is_integer(),
            TypeConstraint::Bool => dtype == DType::Bool,
            TypeConstraint::Any => !dtype.is_small(),
        }
    }

    pub(super) fn describe(self) -> &'static str {
        match self {
            TypeConstraint::Float => "a float type",
            TypeConstraint::Number => "a number type",
            TypeConstraint::Integer => "an integer type",
            TypeConstraint::Bool => "bool",
            TypeConstraint::Any => "any type",
        }
    }
}

/// Function that builds an expression of the inputs, which all have the same type.
pub(super) type ExprFn = fn(&mut Builder, &[Reg], &Attrs) -> Result<Reg, OpError>;

/// Function that builds the gradient of an operator with one input, from this input and the gradient of the result.
pub(super) type BackwardFn = fn(&mut Builder, Reg, Reg, &Attrs) -> Result<Reg, OpError>;

/// Gradient operator of ONNX Runtime, in the domain `com.microsoft`. The inputs are `dY`, followed by the input or the
/// output of the forward node.
pub(super) struct GradOp {
    pub(super) name: &'static str,
    pub(super) reads_output: bool,
    pub(super) attrs: Attrs,
}

impl GradOp {
    pub(super) fn of_input(name: &'static str) -> GradOp {
        GradOp { name, reads_output: false, attrs: Attrs::new() }
    }

    pub(super) fn of_output(name: &'static str) -> GradOp {
        GradOp { name, reads_output: true, attrs: Attrs::new() }
    }

    pub(super) fn with(mut self, attrs: Attrs) -> GradOp {
        self.attrs = attrs;
        self
    }
}

/// Function that returns the gradient operator for a node with these attributes, if there is an operator for them.
pub(super) type GradOpFn = fn(&Attrs) -> Result<Option<GradOp>, OpError>;

/// Row of the table: one element-wise operator.
pub(super) struct Row {
    pub(super) domain: &'static str,
    pub(super) name: &'static str,
    pub(super) since: &'static [i64],
    pub(super) inputs: usize,
    pub(super) accepted_types: TypeConstraint,
    /// True if the result is `bool` for all input types.
    pub(super) bool_output: bool,
    /// True if the other inputs broadcast to the first, which has the shape of the result.
    pub(super) broadcast_to_first: bool,
    pub(super) expr: ExprFn,
    pub(super) grad_op: Option<GradOpFn>,
    /// Gradient in closed form.
    pub(super) backward: Option<BackwardFn>,
    /// True if the result is one of the inputs (`Min`, `Max`). Inputs that equal the result share the gradient.
    pub(super) selects_input: bool,
    pub(super) class: Class,
    pub(super) traits: Traits,
    pub(super) inputs_without_gradient: &'static [usize],
}

pub(super) const fn row(
    name: &'static str,
    since: &'static [i64],
    inputs: usize,
    takes: TypeConstraint,
    expr: ExprFn,
) -> Row {
    Row {
        domain: "",
        name,
        since,
        inputs,
        accepted_types: takes,
        bool_output: false,
        broadcast_to_first: false,
        expr,
        grad_op: None,
        backward: None,
        selects_input: false,
        class: Class::Other,
        traits: Traits::NONE,
        inputs_without_gradient: &[],
    }
}

impl Row {
    pub(super) const fn grad_op(mut self, of: GradOpFn) -> Row {
        self.grad_op = Some(of);
        self
    }

    pub(super) const fn backward(mut self, gradient: BackwardFn) -> Row {
        self.backward = Some(gradient);
        self
    }

    pub(super) const fn bool_output(mut self) -> Row {
        self.bool_output = true;
        self.inputs_without_gradient = if self.inputs == 1 { &[0] } else { &[0, 1] };
        self.zero_gradient()
    }

    pub(super) const fn broadcast_to_first(mut self) -> Row {
        self.broadcast_to_first = true;
        self
    }

    pub(super) const fn zero_gradient(self) -> Row {
        self.traits(Traits::ZERO_DERIVATIVE)
    }

    pub(super) const fn selects(mut self) -> Row {
        self.selects_input = true;
        self
    }

    pub(super) const fn class(mut self, class: Class) -> Row {
        self.class = class;
        self
    }

    pub(super) const fn traits(mut self, traits: Traits) -> Row {
        self.traits = self.traits.and(traits);
        self
    }

    pub(super) const fn microsoft(mut self) -> Row {
        self.domain = "com.microsoft";
        self
    }
}

macro_rules! unary {
    ($op:ident) => {
        |b, x, _| Ok(b.unary(ortrain_expr::UnaryOp::$op, x[0]))
    };
}
pub(super) use unary;
