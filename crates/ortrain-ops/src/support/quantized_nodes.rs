//! Nodes of messages that read quantized weights, and nodes that onnxruntime's optimizer fused with an activation.

use ortrain_graph::{DType, Tensor, tensor_to_proto};
use ortrain_onnx::{AttributeProto, AttributeType, GraphProto, NodeProto};

/// Domain of the operators on packed weights.
pub(crate) const MICROSOFT: &str = "com.microsoft";
/// Code of 4-bit normal floats in the attribute `quant_type`.
const NF4_TYPE: i64 = 1;
/// Factor of the bias of a `Gemm`.
const BETA: &str = "beta";
/// Attribute with the activation of a fused product, and begin of the names of its parameters.
const ACTIVATION: &str = "activation";
/// First version of `ai.onnx` in which the bounds of a `Clip` are inputs.
const CLIP_BOUNDS_ARE_INPUTS: i64 = 11;

fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: name.into(),
        i: value,
        r#type: AttributeType::Int as i32,
        ..AttributeProto::default()
    }
}

/// Form of packed weights `[columns, rows]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedForm {
    pub(crate) columns: usize,
    pub(crate) rows: usize,
    pub(crate) block: usize,
    /// True for 4-bit normal floats, false for integers of 4 bits.
    pub(crate) has_normal_floats: bool,
}

/// Replaces the node at a position, a product with a matrix of floats, by a product with packed weights. The bias of a
/// `Gemm` is added by further nodes. Returns the name of the product, and the name and value of a factor of the bias, which becomes a constant.
pub(crate) fn replace_by_packed_product(
    graph: &mut GraphProto,
    at: usize,
    [codes, scales]: [&str; 2],
    form: PackedForm,
) -> (String, Option<(String, f32)>) {
    let node = &mut graph.node[at];
    let [op, kind] = match form.has_normal_floats {
        true => ["MatMulBnb4", "quant_type"],
        false => ["MatMulNBits", "bits"],
    };
    let old = std::mem::take(&mut node.attribute);
    node.attribute = vec![
        int("K", form.rows as i64),
        int("N", form.columns as i64),
        int(kind, if form.has_normal_floats { NF4_TYPE } else { 4 }),
        int("block_size", form.block as i64),
    ];
    let is_affine = node.op_type == "Gemm";
    let bias = node.input.get(2).filter(|bias| is_affine && !bias.is_empty()).cloned();
    node.op_type = op.into();
    node.domain = MICROSOFT.into();
    node.input.truncate(1);
    node.input.extend([codes.to_owned(), scales.to_owned()]);
    let result = node.output[0].clone();
    let beta = old.iter().find(|attribute| attribute.name == BETA).map_or(1.0, |attribute| attribute.f);
    let Some(mut bias) = bias.filter(|_| beta != 0.0) else { return (result, None) };
    let product = format!("{result}/product");
    node.output[0].clone_from(&product);
    let label = node.name.clone();
    let new_node = |op: &str, inputs: [&str; 2], output: &str| NodeProto {
        name: if label.is_empty() { String::new() } else { format!("{label}/{op}") },
        op_type: op.to_owned(),
        input: inputs.map(str::to_owned).to_vec(),
        output: vec![output.to_owned()],
        ..NodeProto::default()
    };
    let mut new = Vec::new();
    let factor = (beta != 1.0).then(|| (format!("{result}/{BETA}"), beta));
    if let Some((factor, _)) = &factor {
        let scaled = format!("{result}/scaled_bias");
        new.push(new_node("Mul", [&bias, factor], &scaled));
        bias = scaled;
    }
    new.push(new_node("Add", [&product, &bias], &result));
    graph.node.splice(at + 1..at + 1, new);
    (product, factor)
}

/// Returns the node that computes a weight of floats from integers with a scale for each index of an axis.
pub(crate) fn dequantization(
    [codes, scales, zero_points]: [&str; 3],
    axis: usize,
    weight: &str,
) -> NodeProto {
    NodeProto {
        name: format!("{weight}_DequantizeLinear"),
        op_type: "DequantizeLinear".into(),
        input: [codes, scales, zero_points].map(str::to_owned).to_vec(),
        output: vec![weight.to_owned()],
        attribute: vec![int("axis", axis as i64)],
        ..NodeProto::default()
    }
}

/// Splits each `FusedGemm` of a graph into the product and its activation, so that other summands can follow the product.
/// `opset` is the version of `ai.onnx`.
pub(crate) fn split_fused_products(graph: &mut GraphProto, opset: i64) {
    let nodes = std::mem::take(&mut graph.node);
    for mut node in nodes {
        if node.op_type != "FusedGemm" || node.domain != MICROSOFT {
            graph.node.push(node);
            continue;
        }
        let is_of_activation = |attribute: &AttributeProto| attribute.name.starts_with(ACTIVATION);
        let (of_activation, of_product) = node.attribute.drain(..).partition(is_of_activation);
        let of_activation: Vec<AttributeProto> = of_activation;
        node.attribute = of_product;
        node.op_type = "Gemm".into();
        node.domain = String::new();
        let named = |name: &str| of_activation.iter().find(|attribute| attribute.name == name);
        let op = named(ACTIVATION).map(|attribute| String::from_utf8_lossy(&attribute.s).into_owned());
        let Some(op) = op.filter(|op| !op.is_empty()) else {
            graph.node.push(node);
            continue;
        };
        let result = node.output[0].clone();
        let product = format!("{result}/product");
        node.output[0].clone_from(&product);
        let mut activation = NodeProto {
            name: if node.name.is_empty() { String::new() } else { format!("{}/{op}", node.name) },
            input: vec![product],
            output: vec![result.clone()],
            ..NodeProto::default()
        };
        if op == "Clip" && opset >= CLIP_BOUNDS_ARE_INPUTS {
            let weight = node.input.get(1).and_then(|weight| {
                graph.initializer.iter().find(|tensor| tensor.name == *weight).map(|tensor| tensor.data_type)
            });
            let dtype = weight.and_then(DType::from_onnx).unwrap_or(DType::F32);
            for name in ["min", "max"] {
                let bound = format!("{result}/{name}");
                let number = named(&format!("{ACTIVATION}_{name}")).map_or(0.0, |attribute| attribute.f);
                let number = Tensor::scalar(dtype, f64::from(number));
                graph.initializer.push(tensor_to_proto(&bound, &number));
                activation.input.push(bound);
            }
        } else {
            let attribute = |attribute: &AttributeProto| {
                let name = attribute.name.strip_prefix(ACTIVATION)?.strip_prefix('_')?;
                Some(AttributeProto { name: name.to_owned(), ..attribute.clone() })
            };
            activation.attribute = of_activation.iter().filter_map(attribute).collect();
        }
        activation.op_type = op;
        graph.node.extend([node, activation]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn float(name: &str, value: f32) -> AttributeProto {
        let r#type = AttributeType::Float as i32;
        AttributeProto { name: name.into(), f: value, r#type, ..AttributeProto::default() }
    }

    fn node(op: &str, domain: &str, attribute: Vec<AttributeProto>) -> NodeProto {
        NodeProto {
            name: "layer".into(),
            op_type: op.into(),
            domain: domain.into(),
            input: ["x", "w", "b"].map(str::to_owned).to_vec(),
            output: vec!["y".into()],
            attribute,
            ..NodeProto::default()
        }
    }

    #[test]
    fn bias_with_a_factor_follows_a_packed_product() {
        let mut graph =
            GraphProto { node: vec![node("Gemm", "", vec![float("beta", 0.5)])], ..GraphProto::default() };
        let form = PackedForm { columns: 3, rows: 4, block: 32, has_normal_floats: false };
        let (product, factor) = replace_by_packed_product(&mut graph, 0, ["q", "s"], form);
        assert_eq!((product.as_str(), factor), ("y/product", Some(("y/beta".to_owned(), 0.5))));
        let ops: Vec<&str> = graph.node.iter().map(|node| node.op_type.as_str()).collect();
        assert_eq!(ops, ["MatMulNBits", "Mul", "Add"]);
        assert_eq!(graph.node[0].input, ["x", "q", "s"]);
        assert_eq!(graph.node[2].output, ["y"]);
    }

    #[test]
    fn activation_follows_a_split_product() {
        let text = |name: &str, value: &str| AttributeProto {
            name: name.into(),
            s: value.as_bytes().to_vec().into(),
            r#type: AttributeType::String as i32,
            ..AttributeProto::default()
        };
        let leaky =
            vec![text("activation", "LeakyRelu"), float("activation_alpha", 0.25), float("alpha", 2.0)];
        let mut graph =
            GraphProto { node: vec![node("FusedGemm", MICROSOFT, leaky)], ..GraphProto::default() };
        split_fused_products(&mut graph, 17);
        let [product, activation] = graph.node.as_slice() else { panic!("two nodes") };
        assert_eq!((product.op_type.as_str(), product.attribute[0].f), ("Gemm", 2.0));
        assert_eq!((activation.op_type.as_str(), activation.attribute[0].f), ("LeakyRelu", 0.25));
        assert_eq!(activation.attribute[0].name, "alpha");
        assert_eq!((&activation.input[0], &activation.output[0]), (&product.output[0], &"y".to_owned()));
    }
}
