//! Nodes of low-rank adapters: a layer with the weight `W` gets two small factors, and computes `W x + scale * B A x`.
//! (E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.)
//!
//! With magnitudes `m`, the layer computes `m / |W + scale * B A| * (W x + scale * B A x)`, without a gradient of the
//! lengths of the rows `|...|`. (S.-Y. Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024.)

use ortrain_graph::{Tensor, tensor_to_proto};
use ortrain_onnx::{AttributeProto, AttributeType, NodeProto};

/// Layer of an adapter.
#[derive(Clone, Debug)]
pub(crate) enum Layer {
    /// `x W` for a matrix `W`, which may have a bias.
    Linear,
    /// Rows of a table, by index.
    Embedding,
    /// Convolution with these attributes and a number of groups.
    Convolution { attributes: Vec<AttributeProto>, groups: usize },
    /// Weights of a recurrent layer, one matrix for each direction.
    Recurrent,
}

/// Values of an adapter at one node.
pub(crate) struct Site<'a> {
    /// Input of the layer.
    pub(crate) x: &'a str,
    /// Result of the layer alone, and with the adapter.
    pub(crate) base: &'a str,
    pub(crate) y: &'a str,
    /// Factors, and the scale of their product: a scalar.
    pub(crate) a: &'a str,
    pub(crate) b: &'a str,
    pub(crate) scale: &'a str,
    /// Ratio of the dropout of the input: a scalar. `None` for no dropout.
    pub(crate) dropout: Option<&'a str>,
    /// Magnitudes of the rows of the adapted weight. `None` for plain LoRA.
    pub(crate) magnitude: Option<Magnitude<'a>>,
    /// Begin of the names of all other values, and of the nodes.
    pub(crate) prefix: &'a str,
    /// Version of `ai.onnx`.
    pub(crate) opset: i64,
}

/// Magnitudes of the rows of an adapted weight: each output has a row.
pub(crate) struct Magnitude<'a> {
    /// One number for each output.
    pub(crate) lengths: &'a str,
    /// Weight as the layer reads it, and its sizes.
    pub(crate) weight: &'a str,
    pub(crate) dims: &'a [usize],
    pub(crate) has_outputs_last: bool,
    /// Bias that the layer adds to its result.
    pub(crate) bias: Option<&'a str>,
    pub(crate) rank: usize,
}

/// First version of `ai.onnx` in which the axes of a norm are an input.
const AXES_ARE_INPUTS: i64 = 18;

/// Ends of the names of the values between the factors and the sum.
pub(crate) const PARTS: [&str; 24] = [
    INPUT,
    DOWN_WEIGHT,
    DOWN,
    UP_WEIGHT,
    UP,
    DELTA,
    NORM,
    PRODUCT,
    SCALED_PRODUCT,
    CHANGE,
    ADAPTED_WEIGHT,
    AXES,
    RATIO,
    ROW_RATIO,
    ROW_BIAS,
    UNBIASED,
    ADAPTED,
    RESCALED,
    A_SIZES,
    A_MATRIX,
    B_SIZES,
    B_MATRIX,
    WEIGHT_SIZES,
    ROW_SIZES,
];
const INPUT: &str = "/input";
const DOWN_WEIGHT: &str = "/down_weight";
const DOWN: &str = "/down";
const UP_WEIGHT: &str = "/up_weight";
const UP: &str = "/up";
/// Result of the adapter.
pub(crate) const DELTA: &str = "/delta";
/// Lengths of the rows of the adapted weight, which have no gradient.
pub(crate) const NORM: &str = "/norm";
const PRODUCT: &str = "/product";
const SCALED_PRODUCT: &str = "/scaled_product";
const CHANGE: &str = "/change";
const ADAPTED_WEIGHT: &str = "/adapted_weight";
const AXES: &str = "/axes";
const RATIO: &str = "/ratio";
const ROW_RATIO: &str = "/row_ratio";
const ROW_BIAS: &str = "/row_bias";
const UNBIASED: &str = "/unbiased";
const ADAPTED: &str = "/adapted";
const RESCALED: &str = "/rescaled";
const A_SIZES: &str = "/a_sizes";
const A_MATRIX: &str = "/a_matrix";
const B_SIZES: &str = "/b_sizes";
const B_MATRIX: &str = "/b_matrix";
const WEIGHT_SIZES: &str = "/weight_sizes";
const ROW_SIZES: &str = "/row_sizes";

/// Returns the nodes of an adapter, in topological order.
pub(crate) fn adapter_nodes(layer: &Layer, site: &Site<'_>) -> Vec<NodeProto> {
    let mut nodes = Nodes::new(site.prefix);
    let x = match site.dropout {
        None => site.x.to_owned(),
        Some(ratio) => nodes.add("Dropout", &[site.x, ratio], INPUT, Vec::new()),
    };
    let up = match layer {
        Layer::Linear => {
            let down_weight = nodes.transpose(site.a, DOWN_WEIGHT);
            let down = nodes.add("MatMul", &[&x, &down_weight], DOWN, Vec::new());
            let up_weight = nodes.transpose(site.b, UP_WEIGHT);
            nodes.add("MatMul", &[&down, &up_weight], UP, Vec::new())
        }
        Layer::Recurrent => nodes.add("MatMul", &[site.b, site.a], UP, Vec::new()),
        Layer::Embedding => {
            let table = nodes.transpose(site.a, DOWN_WEIGHT);
            let down = nodes.add("Gather", &[&table, &x], DOWN, Vec::new());
            let up_weight = nodes.transpose(site.b, UP_WEIGHT);
            nodes.add("MatMul", &[&down, &up_weight], UP, Vec::new())
        }
        Layer::Convolution { attributes, groups } => {
            let of_down = attributes.iter().filter(|attribute| attribute.name != "group").cloned().collect();
            let down = nodes.add("Conv", &[&x, site.a], DOWN, of_down);
            nodes.add("Conv", &[&down, site.b], UP, vec![integer("group", *groups as i64)])
        }
    };
    let delta = nodes.add("Mul", &[&up, site.scale], DELTA, Vec::new());
    let Some(magnitude) = &site.magnitude else {
        nodes.finish("Add", &[site.base, &delta], site.y);
        return nodes.list;
    };
    let ratio = nodes.ratio(magnitude, site);
    let is_convolution = matches!(layer, Layer::Convolution { .. });
    let by_channel = |nodes: &mut Nodes<'_>, vector: &str, part: &str| {
        if !is_convolution {
            return vector.to_owned();
        }
        let mut sizes = vec![1; magnitude.dims.len()];
        sizes[1] = -1;
        let sizes = nodes.constant(ROW_SIZES, &sizes);
        nodes.add("Reshape", &[vector, &sizes], part, Vec::new())
    };
    let ratio = by_channel(&mut nodes, &ratio, ROW_RATIO);
    match magnitude.bias {
        None => {
            let adapted = nodes.add("Add", &[site.base, &delta], ADAPTED, Vec::new());
            nodes.finish("Mul", &[&adapted, &ratio], site.y);
        }
        Some(bias) => {
            let bias = by_channel(&mut nodes, bias, ROW_BIAS);
            let unbiased = nodes.add("Sub", &[site.base, &bias], UNBIASED, Vec::new());
            let adapted = nodes.add("Add", &[&unbiased, &delta], ADAPTED, Vec::new());
            let rescaled = nodes.add("Mul", &[&adapted, &ratio], RESCALED, Vec::new());
            nodes.finish("Add", &[&rescaled, &bias], site.y);
        }
    }
    nodes.list
}

/// Returns a node that copies a value.
pub(crate) fn copy_node(from: &str, to: &str) -> NodeProto {
    NodeProto {
        op_type: "Identity".into(),
        name: to.to_owned(),
        input: vec![from.to_owned()],
        output: vec![to.to_owned()],
        ..NodeProto::default()
    }
}

/// Returns true for the node of [`copy_node`] with this output.
pub(crate) fn is_copy_of(node: &NodeProto, to: &str) -> bool {
    node.op_type == "Identity" && node.output.first().is_some_and(|output| output == to)
}

/// List of nodes with one output each.
pub(super) struct Nodes<'a> {
    prefix: &'a str,
    list: Vec<NodeProto>,
}

impl<'a> Nodes<'a> {
    /// Returns an empty list. `prefix` is the begin of the names of all outputs.
    pub(super) fn new(prefix: &'a str) -> Nodes<'a> {
        Nodes { prefix, list: Vec::new() }
    }

    /// Returns the nodes.
    pub(super) fn into_list(self) -> Vec<NodeProto> {
        self.list
    }

    /// Appends a node, and returns the name of its output.
    pub(super) fn add(
        &mut self,
        op: &str,
        inputs: &[&str],
        output: &str,
        attribute: Vec<AttributeProto>,
    ) -> String {
        let output = format!("{}{output}", self.prefix);
        // A constant that two nodes read is added once.
        if self.list.iter().any(|node| node.output[0] == output) {
            return output;
        }
        self.list.push(NodeProto {
            op_type: op.into(),
            name: output.clone(),
            input: inputs.iter().map(|&input| input.to_owned()).collect(),
            output: vec![output.clone()],
            attribute,
            ..NodeProto::default()
        });
        output
    }

    /// Appends the node of the result of the layer.
    fn finish(&mut self, op: &str, inputs: &[&str], result: &str) {
        self.list.push(NodeProto {
            op_type: op.into(),
            name: format!("{}/sum", self.prefix),
            input: inputs.iter().map(|&input| input.to_owned()).collect(),
            output: vec![result.to_owned()],
            ..NodeProto::default()
        });
    }

    fn transpose(&mut self, matrix: &str, output: &str) -> String {
        self.add("Transpose", &[matrix], output, vec![integers("perm", vec![1, 0])])
    }

    pub(super) fn constant(&mut self, output: &str, elements: &[i64]) -> String {
        self.tensor(output, &Tensor::i64(&[elements.len()], elements))
    }

    /// Appends a constant, and returns its name.
    pub(super) fn tensor(&mut self, output: &str, tensor: &Tensor) -> String {
        let value = AttributeProto {
            name: "value".into(),
            t: Some(Box::new(tensor_to_proto("", tensor))),
            r#type: AttributeType::Tensor as i32,
            ..AttributeProto::default()
        };
        self.add("Constant", &[], output, vec![value])
    }

    /// Appends the nodes of the ratio of each magnitude to the length of its row.
    fn ratio(&mut self, magnitude: &Magnitude<'_>, site: &Site<'_>) -> String {
        let is_matrix = magnitude.dims.len() == 2;
        let (mut a, mut b) = (site.a.to_owned(), site.b.to_owned());
        if !is_matrix {
            let sizes = self.constant(A_SIZES, &[magnitude.rank as i64, -1]);
            a = self.add("Reshape", &[&a, &sizes], A_MATRIX, Vec::new());
            let sizes = self.constant(B_SIZES, &[-1, magnitude.rank as i64]);
            b = self.add("Reshape", &[&b, &sizes], B_MATRIX, Vec::new());
        }
        let product = self.add("MatMul", &[&b, &a], PRODUCT, Vec::new());
        let mut change = self.add("Mul", &[&product, site.scale], SCALED_PRODUCT, Vec::new());
        if !is_matrix {
            let sizes: Vec<i64> = magnitude.dims.iter().map(|&size| size as i64).collect();
            let sizes = self.constant(WEIGHT_SIZES, &sizes);
            change = self.add("Reshape", &[&change, &sizes], CHANGE, Vec::new());
        } else if magnitude.has_outputs_last {
            change = self.transpose(&change, CHANGE);
        }
        let adapted = self.add("Add", &[magnitude.weight, &change], ADAPTED_WEIGHT, Vec::new());
        let axes: Vec<i64> = match magnitude.has_outputs_last {
            true => vec![0],
            false => (1..magnitude.dims.len() as i64).collect(),
        };
        let keep = integer("keepdims", 0);
        let norm = if site.opset < AXES_ARE_INPUTS {
            self.add("ReduceL2", &[&adapted], NORM, vec![integers("axes", axes), keep])
        } else {
            let axes = self.constant(AXES, &axes);
            self.add("ReduceL2", &[&adapted, &axes], NORM, vec![keep])
        };
        self.add("Div", &[magnitude.lengths, &norm], RATIO, Vec::new())
    }
}

pub(super) fn integer(name: &str, number: i64) -> AttributeProto {
    AttributeProto {
        name: name.into(),
        i: number,
        r#type: AttributeType::Int as i32,
        ..AttributeProto::default()
    }
}

fn integers(name: &str, ints: Vec<i64>) -> AttributeProto {
    AttributeProto {
        name: name.into(),
        ints,
        r#type: AttributeType::Ints as i32,
        ..AttributeProto::default()
    }
}
