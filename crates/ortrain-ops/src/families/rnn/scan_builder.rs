//! Scans over the steps of a recurrent net: operators on matrices, and the builder of the body.

use ortrain_expr::{Builder, Reg, Type};
use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId, ValueType};

use super::activation::Clipped;
use crate::OpError;
use crate::families::rnn::net::Attributes;
use crate::rewrite::Rewrite;
use crate::support::onnx_decomposition::{NodeSink, emit_as_onnx};

/// Emitter of operators on matrices `[batch, columns]`, and on matrices of all steps, `[steps, batch, columns]`.
pub(super) struct MatrixEmitter<'a, E: NodeSink> {
    pub(super) emit: &'a mut E,
    pub(super) dtype: DType,
}

impl<E: NodeSink> MatrixEmitter<'_, E> {
    pub(super) fn node(&mut self, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.emit.emit(op, &inputs, attrs)
    }

    pub(super) fn ints(&mut self, values: &[i64]) -> ValueId {
        self.emit.emit_constant(Tensor::i64(&[values.len()], values))
    }

    pub(super) fn scalar_constant(&mut self, value: f64) -> ValueId {
        self.emit.emit_constant(Tensor::scalar(self.dtype, value))
    }

    pub(super) fn binary_node(&mut self, op: &str, a: ValueId, b: ValueId) -> ValueId {
        self.node(op, &[a, b], Attrs::new())
    }

    pub(super) fn add(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.binary_node("Add", a, b)
    }

    pub(super) fn sub(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.binary_node("Sub", a, b)
    }

    pub(super) fn mul(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.binary_node("Mul", a, b)
    }

    pub(super) fn matmul(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.binary_node("MatMul", a, b)
    }

    /// Emits `1 - a`.
    pub(super) fn one_minus(&mut self, a: ValueId) -> ValueId {
        let one = self.scalar_constant(1.0);
        self.sub(one, a)
    }

    pub(super) fn add_optional(&mut self, a: ValueId, b: Option<ValueId>) -> ValueId {
        b.map_or(a, |b| self.add(a, b))
    }

    /// Selects `yes` within the sequences and `no` after their ends; `yes` everywhere without lengths.
    pub(super) fn select_active(&mut self, active: Option<ValueId>, yes: ValueId, no: ValueId) -> ValueId {
        active.map_or(yes, |active| self.node("Where", &[active, yes, no], Attrs::new()))
    }

    pub(super) fn active_or_zero(&mut self, active: Option<ValueId>, value: ValueId) -> ValueId {
        if active.is_none() {
            return value;
        }
        let zero = self.scalar_constant(0.0);
        self.select_active(active, value, zero)
    }

    pub(super) fn zeros_like(&mut self, value: ValueId) -> ValueId {
        let shape = self.node("Shape", &[value], Attrs::new());
        let zero = Tensor::filled(self.dtype, &[1], 0.0);
        self.node("ConstantOfShape", &[shape], Attrs::new().with("value", zero))
    }

    pub(super) fn slice(&mut self, value: ValueId, axis: i64, from: i64, to: i64) -> ValueId {
        let [starts, ends, axes] = [from, to, axis].map(|number| self.ints(&[number]));
        self.node("Slice", &[value, starts, ends, axes], Attrs::new())
    }

    /// Slices part `index` of adjacent groups of columns.
    pub(super) fn column_group(&mut self, value: ValueId, index: usize, width: usize) -> ValueId {
        let from = (index * width) as i64;
        self.slice(value, -1, from, from + width as i64)
    }

    pub(super) fn column_groups<const N: usize>(&mut self, value: ValueId, width: usize) -> [ValueId; N] {
        std::array::from_fn(|index| self.column_group(value, index, width))
    }

    pub(super) fn concat(&mut self, parts: &[ValueId], axis: i64) -> ValueId {
        self.node("Concat", parts, Attrs::new().with("axis", axis))
    }

    pub(super) fn squeeze(&mut self, value: ValueId, axis: i64) -> ValueId {
        let axes = self.ints(&[axis]);
        self.binary_node("Squeeze", value, axes)
    }

    pub(super) fn unsqueeze(&mut self, value: ValueId, axis: i64) -> ValueId {
        let axes = self.ints(&[axis]);
        self.binary_node("Unsqueeze", value, axes)
    }

    pub(super) fn transposed(&mut self, matrix: ValueId) -> ValueId {
        self.node("Transpose", &[matrix], Attrs::new().with("perm", vec![1i64, 0]))
    }

    /// Concatenates the matrices of all steps along the rows.
    pub(super) fn flatten_steps(&mut self, value: ValueId, columns: usize) -> ValueId {
        let shape = self.ints(&[-1, columns as i64]);
        self.binary_node("Reshape", value, shape)
    }

    /// Sums over steps and batch.
    pub(super) fn sum_steps_and_batch(&mut self, value: ValueId) -> ValueId {
        let axes = self.ints(&[0, 1]);
        self.node("ReduceSum", &[value, axes], Attrs::new().with("keepdims", 0i64))
    }

    /// Emits a function of one number as nodes.
    pub(super) fn emit_function(
        &mut self,
        x: ValueId,
        f: impl FnOnce(&mut Builder, Reg) -> Reg,
    ) -> Result<ValueId, OpError> {
        let mut b = Builder::new();
        let input = b.load(0, Type::of(self.dtype));
        let result = f(&mut b, input);
        emit_as_onnx(&b.finish(&[result]), self.dtype, self.emit, |_, _| x)
    }

    pub(super) fn emit_activation(&mut self, activation: Clipped, x: ValueId) -> Result<ValueId, OpError> {
        let stored = self.dtype;
        self.emit_function(x, |b, x| activation.apply(b, x, stored))
    }

    /// Multiplies a gradient by the slope of an activation at the result `y`.
    pub(super) fn emit_activation_gradient(
        &mut self,
        g: ValueId,
        activation: Clipped,
        y: ValueId,
    ) -> Result<ValueId, OpError> {
        let stored = self.dtype;
        let slope = self.emit_function(y, |b, y| activation.slope(b, y, stored))?;
        Ok(self.mul(g, slope))
    }
}

/// The body of a Scan over the steps, with its inputs.
pub(super) struct ScanBuilder {
    body: Graph,
    /// Name of the Scan. Each Scan of a node has another name.
    name: &'static str,
    dtype: DType,
    carried: Vec<ValueId>,
    scanned: Vec<(ValueId, ValueId)>,
    captured: Vec<(ValueId, ValueId)>,
    /// True if the last step comes first.
    reversed: bool,
}

impl ScanBuilder {
    /// Creates a Scan from the first step to the last.
    pub(super) fn new(name: &'static str, dtype: DType) -> ScanBuilder {
        ScanBuilder {
            body: Graph::new("steps"),
            name,
            dtype,
            carried: Vec::new(),
            scanned: Vec::new(),
            captured: Vec::new(),
            reversed: false,
        }
    }

    /// Lets the Scan run from the last step to the first.
    pub(super) fn reversed(self) -> ScanBuilder {
        ScanBuilder { reversed: true, ..self }
    }

    pub(super) fn emitter(&mut self) -> MatrixEmitter<'_, Graph> {
        MatrixEmitter { emit: &mut self.body, dtype: self.dtype }
    }

    /// Adds a carried state with the initial value `outside`.
    pub(super) fn add_carried(&mut self, name: &str, outside: ValueId) -> ValueId {
        self.carried.push(outside);
        let inside = self.body.add_value(name, ValueType::Unknown);
        self.body.inputs.push(inside);
        inside
    }

    /// Adds a scanned value: each step reads its slice. All states must be added before.
    pub(super) fn add_scanned(&mut self, name: &str, outside: ValueId) -> ValueId {
        let inside = self.body.add_value(name, ValueType::Unknown);
        self.scanned.push((outside, inside));
        inside
    }

    /// Adds a value that is the same at all steps.
    pub(super) fn add_captured(&mut self, name: &str, outside: ValueId) -> ValueId {
        let inside = self.body.add_value(name, ValueType::Unknown);
        self.captured.push((outside, inside));
        inside
    }

    /// Adds a node with several outputs to the body.
    pub(super) fn add_node<const N: usize>(&mut self, op: &str, input: ValueId) -> [ValueId; N] {
        let label = format!("{op}_{}", self.body.nodes.len());
        let (node, outputs) = Node::labelled(&label, "", op, &[Some(input)], N, Attrs::new(), |name| {
            self.body.add_value(name, ValueType::Unknown)
        });
        self.body.nodes.push(node);
        std::array::from_fn(|k| outputs[k])
    }

    /// Adds the Scan; returns the last states, then the collected values.
    pub(super) fn finish(
        mut self,
        rw: &mut Rewrite<'_>,
        states: &[ValueId],
        collected: &[ValueId],
    ) -> Vec<ValueId> {
        let inner = self.scanned.iter().chain(&self.captured).map(|&(_, inside)| inside);
        self.body.inputs.extend(inner);
        self.body.outputs = states.iter().chain(collected).copied().collect();
        // An output must be a separate value: not an input, and not another output.
        let mut visited = self.body.inputs.clone();
        for k in 0..self.body.outputs.len() {
            let output = self.body.outputs[k];
            if visited.contains(&output) {
                let copy = self.body.emit("Identity", &[Some(output)], Attrs::new());
                self.body.outputs[k] = copy;
            }
            visited.push(self.body.outputs[k]);
        }
        let (_, patch) = rw.patch();
        let prefix = format!("{}{}/", patch.prefix(), self.name);
        self.body.name = prefix.clone();
        for id in self.body.value_ids() {
            let name = format!("{prefix}{}", self.body.name_of(id));
            self.body.rename(id, &name);
        }
        let direction = |count: usize| vec![i64::from(self.reversed); count];
        let attrs = Attrs::new()
            .with("num_scan_inputs", self.scanned.len() as i64)
            .with("scan_input_directions", direction(self.scanned.len()))
            .with("scan_output_directions", direction(collected.len()))
            .with("body", self.body);
        let outside = self.scanned.iter().chain(&self.captured).map(|&(outside, _)| outside);
        let inputs: Vec<Option<ValueId>> = self.carried.iter().copied().chain(outside).map(Some).collect();
        let results = patch.node_with_outputs("", "Scan", &inputs, states.len() + collected.len(), attrs);
        patch.nodes.last_mut().expect("just added").captures = self.captured.len();
        results
    }
}

/// Compares the index of each step with the lengths of the sequences. The result is `[steps, batch, 1]`.
pub(super) fn compare_with_lengths(
    rw: &mut Rewrite<'_>,
    comparison: &str,
    steps: ValueId,
    lengths: ValueId,
) -> ValueId {
    let mut out = MatrixEmitter { emit: rw.patch().1, dtype: DType::I64 };
    let lengths = out.node("Cast", &[lengths], Attrs::new().with("to", i64::from(DType::I64.to_onnx())));
    let steps = out.unsqueeze(steps, 1);
    let is_true = out.binary_node(comparison, steps, lengths);
    out.unsqueeze(is_true, 2)
}

/// Returns the indices of the steps of data `[steps, batch, input]`.
pub(super) fn step_indices(rw: &mut Rewrite<'_>, x: ValueId) -> ValueId {
    let count = rw.add("Shape", &[x], Attrs::new().with("end", 1i64));
    rw.count_up(count)
}

/// Results of a step of an LSTM.
pub(super) struct LstmStep {
    /// Gates, in the order of the weights.
    pub(super) gates: [ValueId; 4],
    /// Cell state.
    pub(super) cell: ValueId,
    /// Hidden state.
    pub(super) hidden: ValueId,
}

/// Emits a step of an LSTM from the sums of its products and biases, `[batch, 4 * hidden]`.
pub(super) fn emit_lstm_step<E: NodeSink>(
    step: &mut MatrixEmitter<'_, E>,
    attributes: &Attributes,
    hidden: usize,
    sums: ValueId,
    c: ValueId,
    peepholes: Option<ValueId>,
) -> Result<LstmStep, OpError> {
    let [mut i, mut o, mut f, g] = step.column_groups(sums, hidden);
    let peepholes: Option<[ValueId; 3]> = peepholes.map(|weights| step.column_groups(weights, hidden));
    if let Some([of_i, _, of_f]) = peepholes {
        let [by_i, by_f] = [of_i, of_f].map(|weights| step.mul(weights, c));
        (i, f) = (step.add(i, by_i), step.add(f, by_f));
    }
    let i = step.emit_activation(attributes.gate_activation(0), i)?;
    let f = if attributes.input_forget {
        step.one_minus(i)
    } else {
        step.emit_activation(attributes.gate_activation(0), f)?
    };
    let g = step.emit_activation(attributes.gate_activation(1), g)?;
    let (old, new) = (step.mul(f, c), step.mul(i, g));
    let cell = step.add(old, new);
    if let Some([_, of_o, _]) = peepholes {
        let by_o = step.mul(of_o, cell);
        o = step.add(o, by_o);
    }
    let o = step.emit_activation(attributes.gate_activation(0), o)?;
    let activated = step.emit_activation(attributes.cell_activation(), cell)?;
    let value = step.mul(o, activated);
    Ok(LstmStep { gates: [i, o, f, g], cell, hidden: value })
}
