//! Decomposition of expressions into ONNX nodes: every primitive has one equivalent.

use ortrain_expr::{BinaryOp, CompareOp, DType, Expr, Inst, Reg, Type, UnaryOp};
use ortrain_graph::{Attrs, Graph, Node, Patch, Tensor, ValueId, ValueType};

use crate::OpError;

/// Sink for new nodes.
pub(crate) trait NodeSink {
    /// Adds a node of `ai.onnx` with one output.
    fn emit(&mut self, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> ValueId;
    /// Adds a constant.
    fn emit_constant(&mut self, tensor: Tensor) -> ValueId;
}

impl NodeSink for Patch {
    fn emit(&mut self, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> ValueId {
        self.node("", op, inputs, attrs)
    }

    fn emit_constant(&mut self, tensor: Tensor) -> ValueId {
        self.constant("constant", tensor)
    }
}

impl NodeSink for Graph {
    fn emit(&mut self, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> ValueId {
        let label = format!("{op}_{}", self.nodes.len());
        let (node, outputs) =
            Node::labelled(&label, "", op, inputs, 1, attrs, |name| self.add_value(name, ValueType::Unknown));
        self.nodes.push(node);
        outputs[0]
    }

    fn emit_constant(&mut self, tensor: Tensor) -> ValueId {
        self.add_constant("constant", tensor)
    }
}

/// Returns the element type of a compute type in an expression over tensors of `dtype`.
fn dtype_of(ty: Type, dtype: DType) -> DType {
    if Type::of(dtype) == ty { dtype } else { ty.storage() }
}

/// Emits the nodes that compute an expression with one result over tensors of `dtype`; `load` returns the value of a
/// load.
///
/// # Errors
/// Returns an error for instructions without an ONNX equivalent (computed indices, coordinates, random bits).
pub(crate) fn emit_as_onnx<E: NodeSink>(
    expr: &Expr,
    dtype: DType,
    patch: &mut E,
    load: impl FnMut(&mut E, usize) -> ValueId,
) -> Result<ValueId, OpError> {
    let values = emit_all_as_onnx(expr, &[], dtype, patch, load)?;
    Ok(values[usize::from(expr.outputs()[0].0)])
}

/// Emits an expression with any number of results, which may use the sums of `sums` over all elements. Returns the
/// value of each register.
///
/// # Errors
/// Returns the errors of [`emit_as_onnx`].
pub(crate) fn emit_all_as_onnx<E: NodeSink>(
    expr: &Expr,
    sums: &[Reg],
    dtype: DType,
    patch: &mut E,
    mut load: impl FnMut(&mut E, usize) -> ValueId,
) -> Result<Vec<ValueId>, OpError> {
    let mut values: Vec<ValueId> = Vec::with_capacity(expr.insts().len());
    for &(inst, ty) in expr.insts() {
        let at = |reg: Reg| Some(values[usize::from(reg.0)]);
        let value = match inst {
            Inst::Const(scalar) => patch.emit_constant(Tensor::scalar(dtype_of(ty, dtype), scalar.to_f64())),
            Inst::Load(slot) => load(patch, usize::from(slot)),
            // No single node computes it.
            Inst::Unary(UnaryOp::Rsqrt, a) => {
                let root = patch.emit("Sqrt", &[at(a)], Attrs::new());
                let one = patch.emit_constant(Tensor::scalar(dtype_of(ty, dtype), 1.0));
                patch.emit("Div", &[Some(one), Some(root)], Attrs::new())
            }
            Inst::Unary(op @ (UnaryOp::ToF16 | UnaryOp::ToBf16), a) => {
                let narrow = if op == UnaryOp::ToF16 { DType::F16 } else { DType::BF16 };
                [narrow, dtype_of(ty, dtype)].into_iter().fold(values[usize::from(a.0)], |value, to| {
                    let attrs = Attrs::new().with("to", i64::from(to.to_onnx()));
                    patch.emit("Cast", &[Some(value)], attrs)
                })
            }
            Inst::Unary(op, a) => {
                let name = match op {
                    UnaryOp::Neg => "Neg",
                    UnaryOp::Abs => "Abs",
                    UnaryOp::Sign => "Sign",
                    UnaryOp::Exp => "Exp",
                    UnaryOp::Log => "Log",
                    UnaryOp::Sqrt => "Sqrt",
                    UnaryOp::Sin => "Sin",
                    UnaryOp::Cos => "Cos",
                    UnaryOp::Atan => "Atan",
                    UnaryOp::Erf => "Erf",
                    UnaryOp::Tanh => "Tanh",
                    UnaryOp::Sigmoid => "Sigmoid",
                    UnaryOp::Floor => "Floor",
                    UnaryOp::Round => "Round",
                    UnaryOp::Not => "Not",
                    UnaryOp::Rsqrt | UnaryOp::ToF16 | UnaryOp::ToBf16 => unreachable!("spelled above"),
                };
                patch.emit(name, &[at(a)], Attrs::new())
            }
            Inst::Binary(op, a, b) => {
                let (name, attrs) = match op {
                    BinaryOp::Add => ("Add", Attrs::new()),
                    BinaryOp::Sub => ("Sub", Attrs::new()),
                    BinaryOp::Mul => ("Mul", Attrs::new()),
                    BinaryOp::Div => ("Div", Attrs::new()),
                    BinaryOp::Rem => ("Mod", Attrs::new().with("fmod", 1i64)),
                    BinaryOp::Pow => ("Pow", Attrs::new()),
                    BinaryOp::Min => ("Min", Attrs::new()),
                    BinaryOp::Max => ("Max", Attrs::new()),
                    BinaryOp::And if ty == Type::Bool => ("And", Attrs::new()),
                    BinaryOp::Or if ty == Type::Bool => ("Or", Attrs::new()),
                    BinaryOp::Xor if ty == Type::Bool => ("Xor", Attrs::new()),
                    BinaryOp::And => ("BitwiseAnd", Attrs::new()),
                    BinaryOp::Or => ("BitwiseOr", Attrs::new()),
                    BinaryOp::Xor => ("BitwiseXor", Attrs::new()),
                };
                patch.emit(name, &[at(a), at(b)], attrs)
            }
            Inst::Compare(op, a, b) => match op {
                CompareOp::Eq => patch.emit("Equal", &[at(a), at(b)], Attrs::new()),
                CompareOp::Lt => patch.emit("Less", &[at(a), at(b)], Attrs::new()),
                CompareOp::Le => patch.emit("LessOrEqual", &[at(a), at(b)], Attrs::new()),
            },
            Inst::Select(c, a, b) => patch.emit("Where", &[at(c), at(a), at(b)], Attrs::new()),
            Inst::Convert(a) => {
                let to = i64::from(dtype_of(ty, dtype).to_onnx());
                patch.emit("Cast", &[at(a)], Attrs::new().with("to", to))
            }
            Inst::Reduced(k) if usize::from(k) < sums.len() => {
                patch.emit("ReduceSum", &[at(sums[usize::from(k)])], Attrs::new().with("keepdims", 0i64))
            }
            Inst::LoadAt(..)
            | Inst::Coordinate(_)
            | Inst::Run(_)
            | Inst::Reduced(_)
            | Inst::Guard(..)
            | Inst::Random(..) => {
                return Err(OpError::unsupported(format!("{inst:?} has no equivalent ONNX operator")));
            }
        };
        values.push(value);
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use ortrain_expr::Builder;

    use super::*;

    /// Recorded nodes: operator and inputs.
    struct RecordedNodes(Vec<(String, Vec<u32>)>);

    impl NodeSink for RecordedNodes {
        fn emit(&mut self, op: &str, inputs: &[Option<ValueId>], _: Attrs) -> ValueId {
            let inputs = inputs.iter().flatten().map(|value| value.0).collect();
            self.0.push((op.to_owned(), inputs));
            ValueId(self.0.len() as u32 - 1)
        }

        fn emit_constant(&mut self, tensor: Tensor) -> ValueId {
            self.emit(&format!("{:?}", tensor.dtype()), &[], Attrs::new())
        }
    }

    #[test]
    fn rsqrt_decomposes_into_two_nodes() {
        let mut b = Builder::new();
        let x = b.load(0, Type::F32);
        let root = b.unary(UnaryOp::Rsqrt, x);
        let wave = b.unary(UnaryOp::Sin, root);
        let expr = b.finish(&[wave]);
        let mut written = RecordedNodes(Vec::new());
        emit_as_onnx(&expr, DType::F16, &mut written, |written, _| written.emit("Input", &[], Attrs::new()))
            .expect("every instruction has an equivalent");
        let nodes: Vec<(&str, &[u32])> =
            written.0.iter().map(|(op, inputs)| (op.as_str(), inputs.as_slice())).collect();
        let expected: [(&str, &[u32]); 5] =
            [("Input", &[]), ("Sqrt", &[0]), ("F16", &[]), ("Div", &[2, 1]), ("Sin", &[3])];
        assert_eq!(nodes, expected);
    }
}
