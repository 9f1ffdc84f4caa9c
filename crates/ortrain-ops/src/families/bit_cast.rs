//! Reinterpretation of the bits of one type as another type: `BitCast`.
//!
//! BitCast-26 of ONNX (<https://onnx.ai/onnx/operators/onnx__BitCast.html>), between types of the same width. No
//! instruction accesses bits, so the operator runs on the host and copies the bytes. A byte that is read as bool is
//! true if it is not zero. The operator has no gradient.
//!
//! Limits: element types that ortrain has.

use std::sync::Arc;

use ortrain_graph::{DType, Graph, Node, Tensor};
use ortrain_program::HostFunction;

use crate::OpError;
use crate::grad::Grad;
use crate::infer::Infer;
use crate::op::{Definition, Op, Placement};

#[derive(Clone, Copy, Debug)]
struct BitCast {
    to: DType,
}

/// Returns the number of bits of an element.
fn bits_of(dtype: DType) -> usize {
    match dtype {
        DType::Small(small) => small.bits(),
        other => 8 * other.size(),
    }
}

impl Op for BitCast {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        let from = cx.dtype(0)?;
        if bits_of(from) != bits_of(self.to) {
            return Err(OpError::invalid(format!(
                "input 0 is of type {from} with {} bits per element, but {} has {}",
                bits_of(from),
                self.to,
                bits_of(self.to)
            )));
        }
        cx.set_output(0, self.to, cx.shape(0).cloned());
        Ok(())
    }

    /// Sets no gradient: bits have no derivative.
    fn grad(&self, _: &mut Grad<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn placement(&self) -> Placement {
        Placement::Host(Arc::new(*self))
    }
}

impl HostFunction for BitCast {
    fn call(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>, String> {
        let [input] = inputs else {
            return Err(format!("expected 1 tensor, got {}", inputs.len()));
        };
        let bytes = match self.to {
            DType::Bool => input.data().iter().map(|&byte| u8::from(byte != 0)).collect(),
            _ => input.data().to_vec(),
        };
        let result = Tensor::new(self.to, input.dims().to_vec(), bytes.into());
        Ok(vec![result.map_err(|error| error.to_string())?])
    }
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let attrs = &node.attrs;
    let to = ortrain_graph::Attrs::required("to", attrs.int("to")?)?;
    let to = i32::try_from(to)
        .ok()
        .and_then(DType::from_onnx)
        .ok_or_else(|| OpError::unsupported(format!("element type {to} is not supported")))?;
    Ok(Box::new(BitCast { to }))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![Definition::new("", "BitCast", &[26], build)]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::Attrs;

    use super::*;
    use crate::testing::{Failure, f64s, run_node};

    const OP: (&str, &str) = ("", "BitCast");

    fn to(dtype: DType) -> Attrs {
        Attrs::new().with("to", i64::from(dtype.to_onnx()))
    }

    #[test]
    fn bits_are_preserved() {
        let x = Tensor::f32(&[2, 2], &[1.0, -0.0, f32::NAN, f32::MIN_POSITIVE / 2.0]);
        let bits = run_node(OP, &[Some(&x)], 1, to(DType::U32)).expect("it runs").remove(0);
        assert_eq!((bits.dtype(), bits.dims(), bits.data()), (DType::U32, x.dims(), x.data()));
        let restored = run_node(OP, &[Some(&bits)], 1, to(DType::F32)).expect("it runs").remove(0);
        assert_eq!(restored.data(), x.data());
        let flags = Tensor::from_slice(DType::I8, &[3], &[0i8, 1, -3]);
        let truth = run_node(OP, &[Some(&flags)], 1, to(DType::Bool)).expect("it runs").remove(0);
        assert_eq!(truth, Tensor::from_slice(DType::Bool, &[3], &[0u8, 1, 1]));
    }

    #[test]
    fn rejects_other_widths_and_types() {
        let x = f64s(&[1], &[1.0]);
        for (attrs, message) in [
            (to(DType::F32), "64 bits per element, but float32 has 32"),
            (Attrs::new().with("to", 22i64), "64 bits per element, but int4 has 4"),
            (Attrs::new().with("to", 14i64), "element type 14 is not supported"),
            (Attrs::new(), "to"),
        ] {
            let failure = run_node(OP, &[Some(&x)], 1, attrs).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
