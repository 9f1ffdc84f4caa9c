//! Matrix products and convolutions that ONNX Runtime's optimizer fused with an activation: `FusedGemm` and `FusedConv`
//! of `com.microsoft`.
//!
//! Source: ONNX Runtime's contributed operators, version 1
//! (<https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md>). The attribute `activation` names
//! the activation. Its parameters are `activation_alpha`, `activation_beta` and `activation_gamma` in `FusedGemm`, and
//! the list `activation_params` in `FusedConv`. `FusedConv` adds its fourth input before the activation. Both are
//! compositions.

use ortrain_graph::{Attrs, Graph, Node, Tensor, ValueId};

use crate::OpError;
use crate::infer::{Infer, broadcast};
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::convolution::Conv;
use crate::support::gemm::Gemm;

const MICROSOFT: &str = "com.microsoft";

/// Supported activations with their attributes.
const ACTIVATIONS: [(&str, &[&str]); 10] = [
    ("Elu", &["alpha"]),
    ("HardSigmoid", &["alpha", "beta"]),
    ("LeakyRelu", &["alpha"]),
    ("Relu", &[]),
    ("Selu", &["alpha", "gamma"]),
    ("Sigmoid", &[]),
    ("Softplus", &[]),
    ("Softsign", &[]),
    ("Tanh", &[]),
    ("ThresholdedRelu", &["alpha"]),
];

/// Activation after the product or convolution.
#[derive(Clone, Debug, PartialEq)]
enum Activation {
    Identity,
    /// An ONNX operator with its attributes.
    Operator(&'static str, Attrs),
    Clip {
        low: f32,
        high: f32,
    },
}

impl Activation {
    /// Reads the activation of a node. `number` receives the index (0 or 1) and the name of a parameter of the
    /// activation, and returns its value if the node sets it.
    fn read(
        node: &Node,
        number: impl Fn(usize, &str) -> Result<Option<f32>, OpError>,
    ) -> Result<Activation, OpError> {
        let name = match node.attrs.string("activation")? {
            None | Some("") => return Ok(Activation::Identity),
            Some("Clip") => {
                let bound = |k: usize, name: &str| {
                    number(k, name)?.ok_or_else(|| OpError::invalid("the bounds of the Clip are missing"))
                };
                return Ok(Activation::Clip { low: bound(0, "min")?, high: bound(1, "max")? });
            }
            Some(name) => name,
        };
        let Some(&(known, attributes)) = ACTIVATIONS.iter().find(|(known, _)| *known == name) else {
            let names: Vec<&str> = ACTIVATIONS.iter().map(|(name, _)| *name).chain(["Clip"]).collect();
            return Err(OpError::unsupported(format!(
                "activation {name:?} is unknown; supported: {}",
                names.join(", ")
            )));
        };
        let mut attrs = Attrs::new();
        for (k, attribute) in attributes.iter().enumerate() {
            if let Some(value) = number(k, attribute)? {
                attrs = attrs.with(attribute, value);
            }
        }
        Ok(Activation::Operator(known, attrs))
    }

    fn read_gemm(node: &Node) -> Result<Activation, OpError> {
        Activation::read(node, |_, name| Ok(node.attrs.float(&format!("activation_{name}"))?))
    }

    fn read_conv(node: &Node) -> Result<Activation, OpError> {
        let numbers = node.attrs.floats("activation_params")?.unwrap_or_default();
        Activation::read(node, |k, _| Ok(numbers.get(k).copied()))
    }

    fn apply(self, rw: &mut Rewrite<'_>, value: ValueId) -> Result<ValueId, OpError> {
        Ok(match self {
            Activation::Identity => value,
            Activation::Operator(name, attrs) => rw.add(name, &[value], attrs),
            Activation::Clip { low, high } => {
                let dtype = rw.required_input(0).ok().and_then(|x| rw.dtype(x));
                let dtype = dtype.ok_or_else(|| OpError::invalid("the type of input 0 is not known"))?;
                let [low, high] = [("low", low), ("high", high)]
                    .map(|(name, bound)| rw.constant(name, Tensor::scalar(dtype, f64::from(bound))));
                rw.add("Clip", &[value, low, high], Attrs::new())
            }
        })
    }
}

/// Returns the attributes of a node without the attributes of its activation.
fn without_activation(node: &Node) -> Attrs {
    let mut attrs = node.attrs.clone();
    attrs.0.retain(|name, _| !name.starts_with("activation"));
    attrs
}

/// A convolution, an addition and an activation.
struct FusedConv {
    conv: Conv,
}

impl Op for FusedConv {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 4, 1)?;
        let (dtype, shape) = self.conv.infer_result(cx)?;
        cx.expect_same_dtype([0, 3])?;
        if let (Some(shape), Some(summand)) = (&shape, cx.shape(3))
            && broadcast(shape, summand)?.rank() != shape.rank()
        {
            return Err(OpError::invalid(format!(
                "input 3 has shape {summand}, which cannot be added to a result of shape {shape}"
            )));
        }
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

fn decompose_conv(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let inputs: Vec<Option<ValueId>> = (0..3).map(|k| rw.input(k)).collect();
    let attrs = without_activation(rw.node());
    let mut result = rw.add_node("", "Conv", &inputs, 1, attrs)[0];
    if let Some(summand) = rw.input(3) {
        result = rw.add("Add", &[result, summand], Attrs::new());
    }
    let result = Activation::read_conv(rw.node())?.apply(rw, result)?;
    rw.replace_output(0, result);
    Ok(())
}

/// A matrix product and an activation.
struct FusedGemm {
    gemm: Gemm,
}

impl Op for FusedGemm {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        self.gemm.infer(cx)
    }
}

fn decompose_gemm(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let inputs: Vec<Option<ValueId>> = (0..3).map(|k| rw.input(k)).collect();
    let attrs = without_activation(rw.node());
    let product = rw.add_node("", "Gemm", &inputs, 1, attrs)[0];
    let result = Activation::read_gemm(rw.node())?.apply(rw, product)?;
    rw.replace_output(0, result);
    Ok(())
}

fn build_fused_conv(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Activation::read_conv(node)?;
    Ok(Box::new(FusedConv { conv: Conv::read(node)? }))
}

fn build_fused_gemm(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Activation::read_gemm(node)?;
    Ok(Box::new(FusedGemm { gemm: Gemm::read(node)? }))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new(MICROSOFT, "FusedConv", &[1], build_fused_conv)
            .composition(decompose_conv)
            .weights(&[1, 2]),
        Definition::new(MICROSOFT, "FusedGemm", &[1], build_fused_gemm)
            .composition(decompose_gemm)
            .weights(&[0, 1, 2]),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::Attr;

    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, assert_close, check_decomposition, check_gradients, generic_tensor, one_node_graph, run,
        run_node,
    };

    const CONV: (&str, &str) = (MICROSOFT, "FusedConv");
    const GEMM: (&str, &str) = (MICROSOFT, "FusedGemm");

    fn floats(values: &[f32]) -> Attr {
        Attr::Floats(values.to_vec())
    }

    #[test]
    fn fused_gemm_equals_gemm_then_activation() {
        let (x, w, b) = (generic_tensor(&[2, 3], 1), generic_tensor(&[4, 3], 2), generic_tensor(&[4], 3));
        for (name, attribute_names) in ACTIVATIONS {
            let numbers: Vec<(&str, f32)> = attribute_names.iter().copied().zip([0.3, 0.4]).collect();
            let plain = numbers.iter().fold(Attrs::new(), |attrs, &(name, value)| attrs.with(name, value));
            let gemm = Attrs::new().with("transB", 1i64).with("alpha", 0.5f32).with("beta", 2.0f32);
            let product = run_node(("", "Gemm"), &[Some(&x), Some(&w), Some(&b)], 1, gemm.clone());
            let product = product.expect("it runs").remove(0);
            let expected = run_node(("", name), &[Some(&product)], 1, plain).expect("it runs").remove(0);
            let named =
                |attrs: Attrs, &(name, value): &(&str, f32)| attrs.with(&format!("activation_{name}"), value);
            let attrs = numbers.iter().fold(gemm.with("activation", name), named);
            let graph = one_node_graph(NEWEST_OPSET, GEMM, &[Some(&x), Some(&w), Some(&b)], 1, attrs);
            let graph = graph.expect("it is read");
            let inputs = [x.clone(), w.clone(), b.clone()];
            assert_close(&run(&graph, &inputs).expect("it runs")[0], &expected, 1e-12);
            check_gradients(&graph, &inputs, &[0, 1, 2], &[0]);
            check_decomposition(&graph, &inputs, 1e-12);
        }
    }

    #[test]
    fn fused_conv_adds_before_activation() {
        let inputs = [
            generic_tensor(&[2, 2, 4, 4], 1),
            generic_tensor(&[3, 2, 3, 3], 2),
            generic_tensor(&[3], 3),
            generic_tensor(&[2, 3, 2, 2], 4),
        ];
        for (name, numbers) in
            [("Relu", &[][..]), ("LeakyRelu", &[0.1]), ("HardSigmoid", &[0.3, 0.4]), ("Clip", &[-0.7, 1.2])]
        {
            let attrs = Attrs::new().with("activation", name).with("activation_params", floats(numbers));
            let ports: Vec<_> = inputs.iter().map(Some).collect();
            let graph = one_node_graph(NEWEST_OPSET, CONV, &ports, 1, attrs).expect("it is read");
            let got = run(&graph, &inputs).expect("it runs");
            let conv = run_node(("", "Conv"), &ports[..3], 1, Attrs::new()).expect("it runs");
            let sum = run_node(("", "Add"), &[Some(&conv[0]), Some(&inputs[3])], 1, Attrs::new());
            let sum = &sum.expect("it runs")[0];
            let expected = match name {
                "Clip" => {
                    let [low, high] = [numbers[0], numbers[1]].map(f64::from);
                    let clipped: Vec<f64> = sum.to_f64().iter().map(|x| x.clamp(low, high)).collect();
                    crate::testing::f64s(sum.dims(), &clipped)
                }
                _ => {
                    let attribute_values = ["alpha", "beta"].into_iter().zip(numbers);
                    let attrs =
                        attribute_values.fold(Attrs::new(), |attrs, (name, &value)| attrs.with(name, value));
                    run_node(("", name), &[Some(sum)], 1, attrs).expect("it runs").remove(0)
                }
            };
            assert_close(&got[0], &expected, 1e-12);
            check_gradients(&graph, &inputs, &[0, 1, 2, 3], &[0]);
            check_decomposition(&graph, &inputs, 1e-12);
        }
        // Without a bias, and without an activation.
        let ports = [Some(&inputs[0]), Some(&inputs[1]), None, Some(&inputs[3])];
        let got = run_node(CONV, &ports, 1, Attrs::new()).expect("it runs");
        let conv = run_node(("", "Conv"), &ports[..2], 1, Attrs::new()).expect("it runs");
        let sum = run_node(("", "Add"), &[Some(&conv[0]), Some(&inputs[3])], 1, Attrs::new());
        assert_close(&got[0], &sum.expect("it runs")[0], 1e-12);
    }

    #[test]
    fn rejects_invalid_nodes() {
        let (x, w) = (generic_tensor(&[1, 2, 4, 4], 1), generic_tensor(&[3, 2, 3, 3], 2));
        let message = |op, ports: &[Option<&Tensor>], attrs: Attrs| match run_node(op, ports, 1, attrs) {
            Err(Failure::Prepare(error)) => error.to_string(),
            other => panic!("{other:?}"),
        };
        let named = |name: &str| Attrs::new().with("activation", name);
        let refusal = message(CONV, &[Some(&x), Some(&w)], named("Swish"));
        assert!(refusal.contains("activation \"Swish\" is unknown; supported: Elu"), "{refusal}");
        let refusal = message(CONV, &[Some(&x), Some(&w)], named("Clip"));
        assert!(refusal.contains("the bounds of the Clip are missing"), "{refusal}");
        let summand = generic_tensor(&[5], 3);
        let refusal = message(CONV, &[Some(&x), Some(&w), None, Some(&summand)], named("Relu"));
        assert!(refusal.contains("[5]") && refusal.contains("[1, 3, 2, 2]"), "{refusal}");
        let refusal = message(GEMM, &[Some(&x), Some(&w)], named("Relu"));
        assert!(refusal.contains("expected a matrix"), "{refusal}");
    }
}
