//! Mixtures of experts: `MoE` and `QMoE` of `com.microsoft`, version 1.
//!
//! A router gives each token a logit for each expert. The `k` experts with the largest logits are selected. Each of them
//! is a small network of two layers, or of three with a gate. The result is the sum of their results, weighted by the
//! softmax of the logits. With `normalize_routing_weights` the weights of the selected experts are divided by their sum.
//! `QMoE` has weights of 2, 4 or 8 bits. A scale belongs to a row of a weight, or to a block of a row.
//!
//! Both are compositions: the gradients of router, tokens, weights, biases and scales follow. Sources: the operators'
//! schemas in ONNX Runtime 1.32 (SwiGLU as there); Shazeer et al. 2017, arXiv:1701.06538.
//!
//! # Computed experts
//!
//! For few tokens, as in text generation, a gather copies the weights of the selected experts, and only these experts
//! are computed. Otherwise every expert computes every token, and experts that were not selected have weight 0.
//!
//! The number of tokens that select an expert depends on the logits, but an instruction has fixed sizes. A product of
//! only these tokens would be a deferred segment, which is compiled again for each number of tokens. A step would then
//! consist of a segment for each expert, without a common memory plan.
//!
//! # Packed weights
//!
//! `QMoE` computes each layer of each expert as a product with packed integers (`MatMulNBits`). The product decodes the
//! integers as it reads them. With float64, the weights of one expert are unpacked at a time.
//!
//! Limits: `use_sparse_mixer`, weights that are packed for one device, and the float formats of `QMoE` (`quant_type`)
//! are refused. Weights have known shapes.

use ortrain_expr::QuantizedMatrix;
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, ValueId};

use crate::OpError;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::{arithmetic_dtype, cast};
use crate::support::packed_integers::{
    PackedWeights, check_scale_is_finite, keep_first, read_bits, read_block, reshape, unpack,
};
use crate::support::quantization_grid::{emit, number, typed_input};

/// Bits of the weights of `QMoE` without the attribute `expert_weight_bits`.
const DEFAULT_BITS: usize = 4;
const MICROSOFT: &str = "com.microsoft";
const INPUT: usize = 0;
const ROUTER: usize = 1;
/// Cost of the weights of a selected expert, relative to the cost of the weights of an expert without a gather: a gather
/// reads them, writes a copy, and the product reads the copy.
const GATHER_COST: usize = 3;

/// Activation of the hidden layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Activation {
    Relu,
    Gelu,
    Silu,
    Identity,
    Swiglu(Gate),
}

/// Place of the two halves of a SwiGLU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    /// The linear half comes from the third layer.
    ThirdLayer,
    /// The halves alternate in the first layer.
    Interleaved,
    /// The halves follow each other in the first layer.
    Concatenated,
}

/// Positions of the inputs of a layer.
struct Layer {
    weights: usize,
    bias: usize,
    scales: Option<usize>,
    zero_points: Option<usize>,
}

const fn float_layer(weights: usize) -> Layer {
    Layer { weights, bias: weights + 1, scales: None, zero_points: None }
}

const fn quantized_layer(weights: usize, zero_points: usize) -> Layer {
    Layer { weights, bias: weights + 2, scales: Some(weights + 1), zero_points: Some(zero_points) }
}

const FLOAT_LAYERS: [Layer; 3] = [float_layer(2), float_layer(4), float_layer(6)];
const QUANTIZED_LAYERS: [Layer; 3] = [quantized_layer(2, 11), quantized_layer(5, 12), quantized_layer(8, 13)];
/// Weights of the selected experts of `QMoE`, in place of the logits.
const ROUTER_WEIGHTS: usize = 14;

/// Attributes of both operators.
struct Mixture {
    selected: i64,
    activation: Activation,
    normalizes: bool,
    alpha: f32,
    beta: f32,
    limit: Option<f32>,
    layers: &'static [Layer; 3],
    /// Bits of the weights of each layer; `None` for floats.
    bits: Option<[usize; 3]>,
    /// Weights of a row that share a scale; `None`: all.
    block: Option<usize>,
}

impl Mixture {
    fn read(node: &Node) -> Result<Mixture, OpError> {
        let attrs = &node.attrs;
        let is_quantized = &*node.op == "QMoE";
        if attrs.int("use_sparse_mixer")?.unwrap_or(0) != 0 {
            return Err(OpError::unsupported(
                "use_sparse_mixer (thresholds of the router) is not supported; export the model without it",
            ));
        }
        let selected = attrs.int("k")?.unwrap_or(1);
        if selected < 1 {
            return Err(OpError::invalid(format!(
                "k, the number of selected experts, must be positive, got {selected}"
            )));
        }
        let gate = match attrs.int("swiglu_fusion")?.unwrap_or(0) {
            0 => Gate::ThirdLayer,
            1 => Gate::Interleaved,
            2 => Gate::Concatenated,
            other => return Err(OpError::invalid(format!("swiglu_fusion must be from 0 to 2, got {other}"))),
        };
        let activation = match attrs.string("activation_type")?.unwrap_or("relu") {
            "relu" => Activation::Relu,
            "gelu" => Activation::Gelu,
            "silu" => Activation::Silu,
            "identity" => Activation::Identity,
            "swiglu" => Activation::Swiglu(gate),
            other => {
                return Err(OpError::invalid(format!(
                    "activation_type must be relu, gelu, silu, swiglu or identity, got {other:?}"
                )));
            }
        };
        // -1 and 0 leave files as they are written.
        let has_blocks = is_quantized && attrs.int("block_size")?.is_some_and(|block| block > 0);
        Ok(Mixture {
            selected,
            activation,
            normalizes: attrs.int("normalize_routing_weights")?.unwrap_or(0) != 0,
            alpha: attrs.float("activation_alpha")?.unwrap_or(1.0),
            beta: attrs.float("activation_beta")?.unwrap_or(0.0),
            limit: attrs.float("swiglu_limit")?.filter(|limit| limit.is_finite()),
            layers: if is_quantized { &QUANTIZED_LAYERS } else { &FLOAT_LAYERS },
            bits: is_quantized.then(|| read_layer_bits(attrs)).transpose()?,
            block: has_blocks.then(|| read_block(attrs, None)).transpose()?,
        })
    }

    /// Returns the logical sizes of the weights of a layer: experts, rows, columns.
    fn weight_dims(&self, layer: usize, shape: Option<&Shape>) -> Result<[usize; 3], OpError> {
        let k = self.layers[layer].weights;
        let dims = shape.and_then(Shape::concrete).and_then(|dims| <[usize; 3]>::try_from(dims).ok());
        let Some([experts, rows, columns]) = dims else {
            let found = shape.map_or("an unknown shape".to_owned(), |shape| format!("shape {shape}"));
            return Err(OpError::unsupported(format!(
                "input {k}, the weights of layer {}, has {found}; [experts, rows, columns] is needed",
                layer + 1
            )));
        };
        let columns = self.bits.map_or(columns, |bits| columns.saturating_mul(8 / bits[layer]));
        Ok([experts, rows, columns])
    }

    /// Returns true if a layer is present.
    fn has_layer(&self, node: &Node, layer: usize) -> bool {
        node.inputs.get(self.layers[layer].weights).copied().flatten().is_some()
    }
}

/// Reads the bits of the weights of the layers of `QMoE`.
fn read_layer_bits(attrs: &Attrs) -> Result<[usize; 3], OpError> {
    let format = attrs.string("quant_type")?.unwrap_or("int");
    if format != "int" {
        return Err(OpError::unsupported(format!(
            "quant_type is {format:?}, but only integers (\"int\") are supported; quantize the experts to 4 or 8 bits"
        )));
    }
    // -1 and 0 leave files as they are written.
    if attrs.int("weights_prepacked")?.unwrap_or(0) > 0 {
        return Err(OpError::unsupported(
            "weights_prepacked: the weights are in the layout of one device; export the model without it",
        ));
    }
    let common = read_bits(attrs, "expert_weight_bits", DEFAULT_BITS)?;
    let own = |name: &str| read_bits(attrs, name, common);
    Ok([own("fc1_expert_weight_bits")?, own("fc2_expert_weight_bits")?, own("fc3_expert_weight_bits")?])
}

/// Checks that input `k` has the shape `[experts, rows]`.
fn check_rows(cx: &Infer<'_>, k: usize, [experts, rows]: [usize; 2], name: &str) -> Result<(), OpError> {
    match cx.shape(k).and_then(Shape::concrete) {
        Some(dims) if dims != [experts, rows] => Err(OpError::invalid(format!(
            "{name}, input {k}, has shape {dims:?}, but [{experts}, {rows}] is needed"
        ))),
        _ => Ok(()),
    }
}

impl Mixture {
    /// Checks the inputs of a layer, and returns the sizes of its weights.
    fn check_layer(&self, cx: &Infer<'_>, layer: usize) -> Result<[usize; 3], OpError> {
        let Layer { weights, bias, scales, zero_points } = &self.layers[layer];
        let name = format!("layer {}", layer + 1);
        let dims = self.weight_dims(layer, cx.shape(*weights))?;
        let [experts, rows, columns] = dims;
        check_rows(cx, *bias, [experts, rows], &format!("the bias of {name}"))?;
        let (Some(scales), Some(zero_points), Some(bits)) = (*scales, *zero_points, self.bits) else {
            return Ok(dims);
        };
        cx.expect_dtype(*weights, "uint8", |dtype| dtype == DType::U8)?;
        if !cx.has_input(scales) {
            return Err(OpError::invalid(format!("input {scales}, the scales of {name}, is missing")));
        }
        check_scale_is_finite(cx, scales)?;
        let blocks = self.block.map_or(1, |block| columns.div_ceil(block));
        if self.block.is_some_and(|block| !columns.is_multiple_of(block)) {
            return Err(OpError::invalid(format!(
                "the weights of {name} have {columns} columns, which cannot be divided into blocks of {}",
                self.block.unwrap_or_default()
            )));
        }
        let packed = |count: usize| count.saturating_mul(bits[layer]).div_ceil(8);
        let all = |sizes: &[usize]| sizes.iter().copied().fold(1, usize::saturating_mul);
        let of_zero_points = match self.block {
            Some(_) => all(&[experts, rows, packed(blocks)]),
            None => all(&[experts, packed(rows)]),
        };
        let counts = [
            (scales, all(&[experts, rows, blocks]), "the scales"),
            (zero_points, of_zero_points, "the zero points"),
        ];
        for (k, count, what) in counts {
            if let Some(found) = cx.shape(k).and_then(Shape::concrete)
                && all(&found) != count
            {
                return Err(OpError::invalid(format!(
                    "{what} of {name}, input {k}, has shape {found:?}, but {count} elements are needed for weights of \
                     shape {dims:?} with {} bits",
                    bits[layer]
                )));
            }
        }
        Ok(dims)
    }
}

impl Op for Mixture {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let inputs = cx.node().inputs.len();
        cx.check_arity(3, if self.bits.is_some() { 21 } else { 8 }, 1)?;
        let dtype = cx.expect_dtype(INPUT, "a float type", DType::is_float)?;
        cx.expect_dtype(ROUTER, "a float type", DType::is_float)?;
        if let Some(k) = (ROUTER_WEIGHTS + 1..inputs).find(|&k| cx.has_input(k)) {
            return Err(OpError::unsupported(format!("input {k} belongs to a float format of the weights")));
        }
        let first = self.check_layer(cx, 0)?;
        let second = self.check_layer(cx, 1)?;
        let has_third = self.has_layer(cx.node(), 2);
        let gate = match self.activation {
            Activation::Swiglu(gate) => Some(gate),
            _ => None,
        };
        if has_third {
            let third = self.check_layer(cx, 2)?;
            if third != first {
                return Err(OpError::invalid(format!(
                    "the weights of layer 3 have shape {third:?}, but those of layer 1 {first:?}"
                )));
            }
        }
        if gate.is_some_and(|gate| (gate == Gate::ThirdLayer) != has_third) {
            return Err(OpError::invalid(
                "swiglu needs the weights of layer 3 if swiglu_fusion is 0, and must not have them otherwise",
            ));
        }
        let halves = if matches!(gate, Some(Gate::Interleaved | Gate::Concatenated)) { 2 } else { 1 };
        if second[0] != first[0] || second[2].saturating_mul(halves) != first[1] || second[1] != first[2] {
            return Err(OpError::invalid(format!(
                "the weights of layer 1, of shape {first:?}, do not fit the weights of layer 2, of shape {second:?}"
            )));
        }
        let experts = first[0];
        if self.selected as usize > experts {
            return Err(OpError::invalid(format!("k is {}, but there are {experts} experts", self.selected)));
        }
        if let Some(shape) = cx.shape(INPUT)
            && (!matches!(shape.rank(), 2 | 3)
                || shape.last().and_then(Dim::known).is_some_and(|size| size != first[2]))
        {
            return Err(OpError::invalid(format!(
                "the tokens have shape {shape}, but experts of shape {first:?} need [tokens, {0}] or [batch, length, {0}]",
                first[2]
            )));
        }
        for k in [ROUTER, ROUTER_WEIGHTS] {
            if let Some(shape) = cx.shape(k)
                && (shape.rank() != 2 || shape[1].known().is_some_and(|count| count != experts))
            {
                return Err(OpError::invalid(format!(
                    "the logits of the router, input {k}, have shape {shape}, but [tokens, {experts}] is needed"
                )));
            }
        }
        cx.set_output(0, dtype, cx.shape(INPUT).cloned());
        Ok(())
    }
}

/// Selected experts of each token.
struct Routing {
    /// Indices of the selected experts, `[tokens, k]`.
    selected: ValueId,
    /// Weights of the selected experts, `[tokens, k]`.
    shares: ValueId,
    /// Number of tokens, if only the selected experts are computed.
    gathered_tokens: Option<usize>,
}

impl Mixture {
    /// Adds the selection of the experts.
    fn routing(&self, rw: &mut Rewrite<'_>, experts: usize, dtype: DType) -> Result<Routing, OpError> {
        let (logits, of_logits) = typed_input(rw, ROUTER)?;
        let count = rw.ints("k", &[self.selected]);
        let selected =
            rw.add_node("", "TopK", &[Some(logits), Some(count)], 2, Attrs::new().with("axis", -1i64))[1];
        let (shares, of_shares) = match rw.input(ROUTER_WEIGHTS).filter(|_| self.bits.is_some()) {
            Some(_) => typed_input(rw, ROUTER_WEIGHTS)?,
            None => (rw.add("Softmax", &[logits], Attrs::new().with("axis", -1i64)), of_logits),
        };
        let shares = cast(rw, shares, of_shares, dtype);
        let attrs = Attrs::new().with("axis", 1i64);
        let mut shares = rw.add("GatherElements", &[shares, selected], attrs);
        if self.normalizes {
            let axes = rw.ints("axes", &[1]);
            let total = rw.add("ReduceSum", &[shares, axes], Attrs::new().with("keepdims", 1i64));
            shares = emit(rw, "Div", &[shares, total]);
        }
        let tokens = rw.shape(logits).and_then(|shape| shape.first()).and_then(Dim::known);
        let cost = |tokens: usize| tokens.saturating_mul(self.selected as usize).saturating_mul(GATHER_COST);
        let gathered_tokens = tokens.filter(|&tokens| tokens > 0 && cost(tokens) <= experts);
        Ok(Routing { selected, shares, gathered_tokens })
    }

    /// Adds the hidden layer. `product` adds a layer without its activation.
    fn hidden(
        &self,
        rw: &mut Rewrite<'_>,
        dtype: DType,
        product: &dyn Fn(&mut Rewrite<'_>, usize) -> Result<ValueId, OpError>,
    ) -> Result<ValueId, OpError> {
        let hidden = product(rw, 0)?;
        let (hidden, linear) = match self.activation {
            Activation::Swiglu(gate @ (Gate::Interleaved | Gate::Concatenated)) => {
                let weights = rw.required_input(self.layers[0].weights)?;
                let [_, rows, _] = self.weight_dims(0, rw.shape(weights))?;
                let [gate, linear] = self.halves(rw, hidden, gate, rows);
                (gate, Some(linear))
            }
            _ if self.has_layer(rw.node(), 2) => (hidden, Some(product(rw, 2)?)),
            _ => (hidden, None),
        };
        Ok(self.activate(rw, hidden, linear, dtype))
    }

    /// Adds the activation of the hidden layer.
    fn activate(
        &self,
        rw: &mut Rewrite<'_>,
        hidden: ValueId,
        linear: Option<ValueId>,
        dtype: DType,
    ) -> ValueId {
        let silu = |rw: &mut Rewrite<'_>, x: ValueId| {
            let share = emit(rw, "Sigmoid", &[x]);
            emit(rw, "Mul", &[x, share])
        };
        let activated = match self.activation {
            Activation::Relu => emit(rw, "Relu", &[hidden]),
            Activation::Gelu => rw.add("Gelu", &[hidden], Attrs::new().with("approximate", "tanh")),
            Activation::Silu => silu(rw, hidden),
            Activation::Identity => hidden,
            Activation::Swiglu(_) => {
                return self.swiglu(rw, hidden, linear.unwrap_or(hidden), dtype);
            }
        };
        match linear {
            Some(linear) => emit(rw, "Mul", &[activated, linear]),
            None => activated,
        }
    }

    /// Adds `g * sigmoid(alpha * g) * (l + beta)`, with `g` below the limit and `l` between the limits.
    fn swiglu(&self, rw: &mut Rewrite<'_>, gate: ValueId, linear: ValueId, dtype: DType) -> ValueId {
        let (mut gate, mut linear) = (gate, linear);
        if let Some(limit) = self.limit {
            let (low, high) = (number(rw, dtype, -f64::from(limit)), number(rw, dtype, f64::from(limit)));
            gate = emit(rw, "Min", &[gate, high]);
            linear = emit(rw, "Clip", &[linear, low, high]);
        }
        let scaled = |rw: &mut Rewrite<'_>, op: &str, value: ValueId, by: f32, neutral: f32| {
            if by == neutral {
                return value;
            }
            let by = number(rw, dtype, f64::from(by));
            emit(rw, op, &[value, by])
        };
        let steep = scaled(rw, "Mul", gate, self.alpha, 1.0);
        let share = emit(rw, "Sigmoid", &[steep]);
        let gate = emit(rw, "Mul", &[gate, share]);
        let linear = scaled(rw, "Add", linear, self.beta, 0.0);
        emit(rw, "Mul", &[gate, linear])
    }

    /// Splits the fused first layer into the gate and the linear half.
    fn halves(&self, rw: &mut Rewrite<'_>, hidden: ValueId, gate: Gate, rows: usize) -> [ValueId; 2] {
        let (starts, ends, step) = match gate {
            Gate::Interleaved => ([0, 1], [i64::MAX; 2], 2),
            _ => ([0, rows as i64 / 2], [rows as i64 / 2, i64::MAX], 1),
        };
        [0, 1].map(|half| {
            let numbers = [("start", starts[half]), ("end", ends[half]), ("axis", -1), ("step", step)];
            let [start, end, axis, step] = numbers.map(|(name, at)| rw.ints(name, &[at]));
            emit(rw, "Slice", &[hidden, start, end, axis, step])
        })
    }
}

impl Routing {
    /// Adds the weights of all experts, `[tokens, experts]`: zero for experts that were not selected.
    fn all_shares(&self, rw: &mut Rewrite<'_>, dtype: DType) -> Result<ValueId, OpError> {
        let logits = rw.required_input(ROUTER)?;
        let shape = emit(rw, "Shape", &[logits]);
        let zero = number(rw, dtype, 0.0);
        let zeros = emit(rw, "Expand", &[zero, shape]);
        let attrs = Attrs::new().with("axis", 1i64);
        Ok(rw.add("ScatterElements", &[zeros, self.selected, self.shares], attrs))
    }
}

/// Experts with float weights.
impl Mixture {
    /// Adds the result for tokens of shape `[tokens, columns]`. All experts are computed in one product per layer.
    fn float_result(
        &self,
        rw: &mut Rewrite<'_>,
        routing: &Routing,
        tokens: ValueId,
        dtype: DType,
    ) -> Result<ValueId, OpError> {
        // Results of a layer have shape [experts, tokens, rows] or [tokens, k, 1, rows].
        let is_gathered = routing.gathered_tokens.is_some();
        let unsqueeze = |rw: &mut Rewrite<'_>, value: ValueId, axes: &[i64]| {
            let axes = rw.ints("axes", axes);
            emit(rw, "Unsqueeze", &[value, axes])
        };
        let of_experts = |rw: &mut Rewrite<'_>, value: ValueId| {
            if !is_gathered {
                return value;
            }
            rw.add("Gather", &[value, routing.selected], Attrs::new().with("axis", 0i64))
        };
        let layer = |rw: &mut Rewrite<'_>, layer: usize, x: ValueId| {
            let weights = rw.required_input(self.layers[layer].weights)?;
            let weights = of_experts(rw, weights);
            let attrs = Attrs::new().with("transB", 1i64);
            let product = rw.add_node(MICROSOFT, "FusedMatMul", &[Some(x), Some(weights)], 1, attrs)[0];
            let Some(bias) = rw.input(self.layers[layer].bias) else { return Ok(product) };
            let bias = of_experts(rw, bias);
            let bias = unsqueeze(rw, bias, &[-2]);
            Ok(emit(rw, "Add", &[product, bias]))
        };
        let x = if is_gathered { unsqueeze(rw, tokens, &[1, 2]) } else { tokens };
        let hidden = self.hidden(rw, dtype, &|rw, k| layer(rw, k, x))?;
        let results = layer(rw, 1, hidden)?;
        let (shares, summed): (ValueId, &[i64]) = if is_gathered {
            (unsqueeze(rw, routing.shares, &[2, 3]), &[1, 2])
        } else {
            let shares = routing.all_shares(rw, dtype)?;
            let shares = rw.add("Transpose", &[shares], Attrs::new().with("perm", vec![1i64, 0]));
            (unsqueeze(rw, shares, &[2]), &[0])
        };
        let weighted = emit(rw, "Mul", &[results, shares]);
        let axes = rw.ints("experts", summed);
        Ok(rw.add("ReduceSum", &[weighted, axes], Attrs::new().with("keepdims", 0i64)))
    }
}

/// Computations of one expert each: of every expert for all tokens, or of each selected expert for its token.
struct ExpertCalls {
    count: usize,
    /// Vector of one element with the index of the expert of each computation. `None`: the experts in order.
    gathered: Option<Vec<ValueId>>,
}

impl ExpertCalls {
    /// Returns the parts of a tensor `[experts, ..]` for all computations, each with a first axis of size 1.
    fn parts(&self, rw: &mut Rewrite<'_>, value: ValueId) -> Vec<ValueId> {
        match &self.gathered {
            Some(experts) => experts
                .iter()
                .map(|&expert| rw.add("Gather", &[value, expert], Attrs::new().with("axis", 0i64)))
                .collect(),
            None => split(rw, value, 0, self.count),
        }
    }

    /// Returns the packed weights of computation `call` from weights of shape `[experts, rows, bytes]`. Slices of
    /// constants share the bytes of the constants.
    fn packed_part(&self, rw: &mut Rewrite<'_>, weights: ValueId, call: usize) -> ValueId {
        if let Some(experts) = &self.gathered {
            return rw.add("Gather", &[weights, experts[call]], Attrs::new().with("axis", 0i64));
        }
        let bounds = [("start", call as i64), ("end", call as i64 + 1), ("axis", 0)];
        let [start, end, axis] = bounds.map(|(name, at)| rw.ints(name, &[at]));
        emit(rw, "Slice", &[weights, start, end, axis])
    }
}

/// Splits a value into `count` parts of size 1 along an axis.
fn split(rw: &mut Rewrite<'_>, value: ValueId, axis: i64, count: usize) -> Vec<ValueId> {
    let attrs = Attrs::new().with("axis", axis).with("num_outputs", count as i64);
    rw.add_node("", "Split", &[Some(value)], count, attrs)
}

/// Layer with packed weights.
struct PackedLayer {
    weights: PackedWeights,
    /// Packed integers of all experts.
    bytes: ValueId,
    /// Scales of each computation.
    scales: Vec<ValueId>,
    zero_points: Option<Vec<ValueId>>,
    bias: Option<Vec<ValueId>>,
}

impl PackedLayer {
    /// Adds layer `call` of one expert: `[tokens, columns]` becomes `[tokens, rows]`.
    fn emit(&self, rw: &mut Rewrite<'_>, calls: &ExpertCalls, call: usize, x: ValueId) -> ValueId {
        let PackedWeights { columns: rows, rows: columns, bits, block } = self.weights;
        let mut bytes = calls.packed_part(rw, self.bytes, call);
        let missing = (self.weights.blocks() * block - columns) * bits / 8;
        if missing > 0 {
            let pads = rw.ints("pads", &[0, 0, 0, 0, 0, missing as i64]);
            bytes = emit(rw, "Pad", &[bytes, pads]);
        }
        let bytes = reshape(rw, bytes, &[rows, self.weights.blocks(), block * bits / 8]);
        let zero_points = self.zero_points.as_ref().map(|parts| parts[call]);
        let product = self.weights.product(rw, [x, bytes, self.scales[call]], zero_points);
        match &self.bias {
            Some(parts) => emit(rw, "Add", &[product, parts[call]]),
            None => product,
        }
    }
}

/// Experts with packed weights.
impl Mixture {
    /// Prepares a layer with weights of these bits for all computations.
    fn packed_layer(
        &self,
        rw: &mut Rewrite<'_>,
        layer: usize,
        bits: usize,
        calls: &ExpertCalls,
        dtype: DType,
    ) -> Result<PackedLayer, OpError> {
        let inputs = &self.layers[layer];
        let bytes = rw.required_input(inputs.weights)?;
        let [experts, rows, columns] = self.weight_dims(layer, rw.shape(bytes))?;
        // Without blocks, a row is one block. Its size is rounded up to the size that instructions support.
        let block = self.block.unwrap_or(columns.next_multiple_of(QuantizedMatrix::GROUP));
        let weights = PackedWeights { columns: rows, rows: columns, bits, block };
        let (wide, blocks) = (arithmetic_dtype(dtype), weights.blocks());
        let (Some(scales), Some(zero_points)) = (inputs.scales, inputs.zero_points) else {
            return Err(OpError::invalid("packed weights need scales"));
        };
        let (scales, of_scales) = typed_input(rw, scales)?;
        let scales = cast(rw, scales, of_scales, wide);
        let scales = reshape(rw, scales, &[experts, rows, blocks]);
        let scales = calls.parts(rw, scales);
        let zero_points = rw.input(zero_points).map(|packed| {
            // Integers of a row of zero points: one for each block, or one for each row of the weights.
            let (lead, count) = if self.block.is_some() { (experts * rows, blocks) } else { (experts, rows) };
            let padded = (count * bits).div_ceil(8) * 8 / bits;
            let packed = reshape(rw, packed, &[lead, padded * bits / 8]);
            let unpacked = unpack(rw, packed, bits, &[lead, padded]);
            let unpacked = keep_first(rw, unpacked, count, padded);
            let unpacked = reshape(rw, unpacked, &[experts, rows, blocks]);
            let floats = cast(rw, unpacked, DType::U8, wide);
            calls.parts(rw, floats)
        });
        let bias = rw.input(inputs.bias).map(|bias| calls.parts(rw, bias));
        Ok(PackedLayer { weights, bytes, scales, zero_points, bias })
    }

    /// Adds the result for tokens of shape `[tokens, columns]`, expert by expert.
    fn packed_result(
        &self,
        rw: &mut Rewrite<'_>,
        bits: [usize; 3],
        routing: &Routing,
        tokens: ValueId,
        dtype: DType,
    ) -> Result<ValueId, OpError> {
        let weights = rw.required_input(self.layers[0].weights)?;
        let [experts, ..] = self.weight_dims(0, rw.shape(weights))?;
        let selected = self.selected as usize;
        let (calls, rows_of_tokens, shares) = match routing.gathered_tokens {
            Some(count) => {
                let column = |rw: &mut Rewrite<'_>, value: ValueId, dims: &[usize]| {
                    let value = reshape(rw, value, dims);
                    split(rw, value, 0, count * selected)
                };
                let gathered = column(rw, routing.selected, &[count * selected]);
                let calls = ExpertCalls { count: count * selected, gathered: Some(gathered) };
                let shares = column(rw, routing.shares, &[count * selected, 1]);
                (calls, split(rw, tokens, 0, count), shares)
            }
            None => {
                let shares = routing.all_shares(rw, dtype)?;
                let shares = split(rw, shares, 1, experts);
                (ExpertCalls { count: experts, gathered: None }, vec![tokens], shares)
            }
        };
        let mut layers = Vec::with_capacity(bits.len());
        for (layer, bits) in bits.into_iter().enumerate() {
            if self.has_layer(rw.node(), layer) {
                layers.push(self.packed_layer(rw, layer, bits, &calls, dtype)?);
            }
        }
        let wide = arithmetic_dtype(dtype);
        let calls_of_row = calls.count / rows_of_tokens.len();
        let mut totals: Vec<Option<ValueId>> = vec![None; rows_of_tokens.len()];
        for (call, share) in shares.into_iter().enumerate() {
            let row = call / calls_of_row;
            let x = rows_of_tokens[row];
            let hidden = self.hidden(rw, dtype, &|rw, k| Ok(layers[k].emit(rw, &calls, call, x)))?;
            let result = layers[1].emit(rw, &calls, call, hidden);
            let weighted = emit(rw, "Mul", &[result, share]);
            let weighted = cast(rw, weighted, dtype, wide);
            totals[row] = Some(totals[row].map_or(weighted, |total| emit(rw, "Add", &[total, weighted])));
        }
        let results: Vec<ValueId> = totals.into_iter().flatten().collect();
        let result = match results.as_slice() {
            [one] => *one,
            rows => rw.add("Concat", rows, Attrs::new().with("axis", 0i64)),
        };
        Ok(cast(rw, result, wide, dtype))
    }
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = Mixture::read(rw.node())?;
    let (input, dtype) = typed_input(rw, INPUT)?;
    let first = rw.required_input(op.layers[0].weights)?;
    let [experts, _, columns] = op.weight_dims(0, rw.shape(first))?;
    let flat = rw.ints("tokens", &[-1, columns as i64]);
    let tokens = emit(rw, "Reshape", &[input, flat]);
    let routing = op.routing(rw, experts, dtype)?;
    let total = match op.bits {
        Some(bits) => op.packed_result(rw, bits, &routing, tokens, dtype)?,
        None => op.float_result(rw, &routing, tokens, dtype)?,
    };
    let shape = emit(rw, "Shape", &[input]);
    let result = emit(rw, "Reshape", &[total, shape]);
    rw.replace_output(0, result);
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Mixture::read(node)?))
}

fn sample(_: &Definition) -> Sample {
    let weights: (DType, &[usize]) = (DType::F32, &[2, 2, 2]);
    let bias: (DType, &[usize]) = (DType::F32, &[2, 2]);
    Sample::with_inputs(Attrs::new(), &[bias, bias, weights, bias, weights])
}

fn sample_quantized(_: &Definition) -> Sample {
    let rows: (DType, &[usize]) = (DType::F32, &[2, 2]);
    let weights: (DType, &[usize]) = (DType::U8, &[2, 2, 1]);
    Sample::with_inputs(Attrs::new(), &[rows, rows, weights, rows, rows, weights, rows])
}

pub(crate) fn definitions() -> Vec<Definition> {
    let new = |name: &'static str| Definition::new(MICROSOFT, name, &[1], build).composition(decompose);
    vec![
        new("MoE").weights(&[2, 3, 4, 5, 6, 7]).sample(sample),
        new("QMoE").weights(&[4, 7, 10]).scales(&[3, 6, 9]).sample(sample_quantized),
    ]
}

#[cfg(test)]
mod tests;
