//! Nodes of low-rank adapters: a layer with the weight `W` gets two small factors, and computes `W x + scale * B A x`.
//! (E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.)

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
    /// Begin of the names of all other values, and of the nodes.
    pub(crate) prefix: &'a str,
}

/// Ends of the names of the values between the factors and the sum.
pub(crate) const PARTS: [&str; 6] = ["/input", "/down_weight", "/down", "/up_weight", "/up", "/delta"];
const INPUT: &str = PARTS[0];
const DOWN_WEIGHT: &str = PARTS[1];
const DOWN: &str = PARTS[2];
const UP_WEIGHT: &str = PARTS[3];
const UP: &str = PARTS[4];
const DELTA: &str = PARTS[5];

/// Returns the nodes of an adapter, in topological order.
pub(crate) fn adapter_nodes(layer: &Layer, site: &Site<'_>) -> Vec<NodeProto> {
    let mut nodes = Nodes { prefix: site.prefix, list: Vec::new() };
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
        Layer::Embedding => {
            let table = nodes.transpose(site.a, DOWN_WEIGHT);
            let down = nodes.add("Gather", &[&table, &x], DOWN, Vec::new());
            let up_weight = nodes.transpose(site.b, UP_WEIGHT);
            nodes.add("MatMul", &[&down, &up_weight], UP, Vec::new())
        }
        Layer::Convolution { attributes, groups } => {
            let of_down = attributes.iter().filter(|attribute| attribute.name != "group").cloned().collect();
            let down = nodes.add("Conv", &[&x, site.a], DOWN, of_down);
            let group = AttributeProto {
                name: "group".into(),
                i: *groups as i64,
                r#type: AttributeType::Int as i32,
                ..AttributeProto::default()
            };
            nodes.add("Conv", &[&down, site.b], UP, vec![group])
        }
    };
    let delta = nodes.add("Mul", &[&up, site.scale], DELTA, Vec::new());
    nodes.list.push(NodeProto {
        op_type: "Add".into(),
        name: format!("{}/sum", site.prefix),
        input: vec![site.base.to_owned(), delta],
        output: vec![site.y.to_owned()],
        ..NodeProto::default()
    });
    nodes.list
}

/// List of nodes with one output each.
struct Nodes<'a> {
    prefix: &'a str,
    list: Vec<NodeProto>,
}

impl Nodes<'_> {
    /// Appends a node, and returns the name of its output.
    fn add(&mut self, op: &str, inputs: &[&str], output: &str, attribute: Vec<AttributeProto>) -> String {
        let output = format!("{}{output}", self.prefix);
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

    fn transpose(&mut self, matrix: &str, output: &str) -> String {
        let perm = AttributeProto {
            name: "perm".into(),
            ints: vec![1, 0],
            r#type: AttributeType::Ints as i32,
            ..AttributeProto::default()
        };
        self.add("Transpose", &[matrix], output, vec![perm])
    }
}
