//! Test cases: a graph with inputs.

use ortrain_expr::{Scalar, philox4x32_10};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId, ValueType};

/// Content of an input.
#[derive(Clone, Debug)]
pub enum Fill {
    /// Numbers of both signs, with magnitudes from 0.25 to 1.75: away from kinks at zero.
    Signed,
    /// Numbers between 0.4 and 1.9.
    Positive,
    /// These numbers.
    Exactly(Vec<f64>),
    /// Integers from 0 to below this bound.
    Below(i64),
    /// Booleans.
    Bools,
}

/// A graph, its inputs, and the covered feature.
#[derive(Clone, Debug)]
pub struct Case {
    /// Operator under test.
    pub operator: String,
    /// Covered feature.
    pub name: String,
    /// Graph in the newest operator version; its outputs are the results to check.
    pub graph: Graph,
    /// Value of each input.
    pub inputs: Vec<Tensor>,
}

/// Builder of a [`Case`].
#[derive(Debug)]
pub struct CaseBuilder {
    operator: String,
    name: String,
    graph: Graph,
    inputs: Vec<Tensor>,
    dynamic: bool,
}

/// Returns a deterministic number in `0..1`, equal on every machine.
fn unit(seed: u64, index: usize) -> f64 {
    f64::from(philox4x32_10(seed, 0x7465_7374, index as u64)[0]) / 4_294_967_296.0
}

impl CaseBuilder {
    /// Starts a case for an operator.
    #[must_use]
    pub fn new(operator: &str, name: &str) -> CaseBuilder {
        let mut graph = Graph::new(name);
        graph.opsets.insert(String::new(), ortrain_ops::NEWEST_OPSET);
        CaseBuilder {
            operator: operator.into(),
            name: name.into(),
            graph,
            inputs: Vec::new(),
            dynamic: false,
        }
    }

    /// Declares the symbol `N` as the size of the first axis of each following input. Scalars have no axis.
    #[must_use]
    pub fn dynamic(mut self) -> CaseBuilder {
        self.dynamic = true;
        self
    }

    /// Declares numbers as the sizes of each following input.
    #[must_use]
    pub fn fixed(mut self) -> CaseBuilder {
        self.dynamic = false;
        self
    }

    /// Adds an input.
    pub fn input(&mut self, dtype: DType, dims: &[usize], fill: &Fill) -> ValueId {
        let seed = self.inputs.len() as u64 + 1;
        let len: usize = dims.iter().product();
        let values: Vec<f64> = (0..len)
            .map(|index| {
                let u = unit(seed, index);
                match fill {
                    Fill::Signed => (0.25 + 1.5 * u) * if unit(seed + 100, index) < 0.5 { -1.0 } else { 1.0 },
                    Fill::Positive => 0.4 + 1.5 * u,
                    Fill::Exactly(values) => values[index],
                    Fill::Below(bound) => (u * *bound as f64).floor(),
                    Fill::Bools => f64::from(u8::from(u < 0.5)),
                }
            })
            .collect();
        let tensor = tensor(dtype, dims, &values);
        let mut shape = Shape::known(dims);
        if self.dynamic && !dims.is_empty() {
            shape[0] = Dim::symbol("N");
        }
        let id =
            self.graph.add_value(&format!("x{}", self.inputs.len()), ValueType::Tensor(dtype, Some(shape)));
        self.graph.inputs.push(id);
        self.inputs.push(tensor);
        id
    }

    /// Adds a float32 input.
    pub fn float(&mut self, dims: &[usize], fill: &Fill) -> ValueId {
        self.input(DType::F32, dims, fill)
    }

    /// Adds a constant int64 vector.
    pub fn ints(&mut self, values: &[i64]) -> ValueId {
        self.graph.add_constant("ints", Tensor::i64(&[values.len()], values))
    }

    /// Adds a constant.
    pub fn constant(&mut self, tensor: Tensor) -> ValueId {
        self.graph.add_constant("constant", tensor)
    }

    /// Adds a node of `ai.onnx` with one output.
    pub fn node(&mut self, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.node_with("", op, &inputs, 1, attrs)[0]
    }

    /// Adds a node with optional inputs and several outputs.
    pub fn node_with(
        &mut self,
        domain: &str,
        op: &str,
        inputs: &[Option<ValueId>],
        outputs: usize,
        attrs: Attrs,
    ) -> Vec<ValueId> {
        let ids: Vec<ValueId> =
            (0..outputs).map(|k| self.graph.add_value(&format!("{op}_y{k}"), ValueType::Unknown)).collect();
        let ports: Vec<Option<ValueId>> = ids.iter().copied().map(Some).collect();
        let mut node = Node::new(domain, op, inputs, &ports, attrs);
        node.name = format!("{op}_{}", self.graph.nodes.len()).into();
        self.graph.nodes.push(node);
        ids
    }

    /// Returns the case with these results.
    #[must_use]
    pub fn outputs(mut self, outputs: &[ValueId]) -> Case {
        self.graph.outputs = outputs.to_vec();
        Case { operator: self.operator, name: self.name, graph: self.graph, inputs: self.inputs }
    }
}

/// Converts numbers to a tensor of any type.
pub(crate) fn tensor(dtype: DType, dims: &[usize], values: &[f64]) -> Tensor {
    let ty = ortrain_expr::Type::of(dtype);
    let scalars: Vec<_> = values.iter().map(|&value| ortrain_expr::Scalar::from_f64(ty, value)).collect();
    let bytes = Scalar::to_bytes(dtype, &scalars);
    Tensor::new(dtype, dims.to_vec(), bytes.into()).expect("as many values as elements")
}
