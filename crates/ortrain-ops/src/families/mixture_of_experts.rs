//! Mixtures of experts: `MoE` and `QMoE` of `com.microsoft`, version 1.
//!
//! A router gives each token a logit for each expert. The `k` experts with the largest logits are selected. Each of them
//! is a small network of two layers, or of three with a gate. The result is the sum of their results, weighted by the
//! softmax of the logits. With `normalize_routing_weights` the weights of the selected experts are divided by their sum.
//! `QMoE` has weights of 2, 4 or 8 bits. A scale belongs to a row of a weight, or to a block of a row.
//!
//! Both are compositions. Every expert computes every token, and experts that were not selected have weight 0: the
//! gradients of router, tokens, weights, biases and scales follow. Sources: the operators' schemas in ONNX Runtime 1.32
//! (SwiGLU as there); Shazeer et al. 2017, arXiv:1701.06538.
//!
//! Limits: `use_sparse_mixer`, weights that are packed for one device, and the float formats of `QMoE` (`quant_type`)
//! are refused. Weights have known shapes.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, ValueId};

use crate::OpError;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::{arithmetic_dtype, cast};
use crate::support::packed_integers::{
    check_scale_is_finite, keep_first, read_bits, reshape, scaled_distance, unpack,
};
use crate::support::quantization_grid::{emit, number, typed_input};

/// Bits of the weights of `QMoE` without the attribute `expert_weight_bits`.
const DEFAULT_BITS: usize = 4;
const MICROSOFT: &str = "com.microsoft";
const INPUT: usize = 0;
const ROUTER: usize = 1;

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
        let block = attrs.int("block_size")?.filter(|&block| block > 0);
        Ok(Mixture {
            selected,
            activation,
            normalizes: attrs.int("normalize_routing_weights")?.unwrap_or(0) != 0,
            alpha: attrs.float("activation_alpha")?.unwrap_or(1.0),
            beta: attrs.float("activation_beta")?.unwrap_or(0.0),
            limit: attrs.float("swiglu_limit")?.filter(|limit| limit.is_finite()),
            layers: if is_quantized { &QUANTIZED_LAYERS } else { &FLOAT_LAYERS },
            bits: is_quantized.then(|| read_layer_bits(attrs)).transpose()?,
            block: block.map(|block| block as usize),
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

impl Mixture {
    /// Adds the weights of a layer, of shape `[experts, rows, columns]` and type `dtype`.
    fn weights(&self, rw: &mut Rewrite<'_>, layer: usize, dtype: DType) -> Result<ValueId, OpError> {
        let inputs = &self.layers[layer];
        let weights = rw.required_input(inputs.weights)?;
        let shape = rw.shape(weights).cloned();
        let dims @ [experts, rows, columns] = self.weight_dims(layer, shape.as_ref())?;
        let (Some(bits), Some(scales), Some(zero_points)) = (self.bits, inputs.scales, inputs.zero_points)
        else {
            return Ok(weights);
        };
        let bits = bits[layer];
        let wide = arithmetic_dtype(dtype);
        let blocks = self.block.map_or(1, |block| columns / block);
        let in_blocks = [experts, rows, blocks, columns / blocks];
        let integers = unpack(rw, weights, bits, &in_blocks);
        let (scales, of_scales) = typed_input(rw, scales)?;
        let scales = cast(rw, scales, of_scales, wide);
        let scales = reshape(rw, scales, &[experts, rows, blocks, 1]);
        let zero_points = match rw.input(zero_points) {
            None => number(rw, wide, f64::from(1u32 << (bits - 1))),
            Some(packed) => {
                // Integers of a row of zero points: one for each block, or one for each row of the weights.
                let (lead, count) =
                    if self.block.is_some() { (experts * rows, blocks) } else { (experts, rows) };
                let padded = (count * bits).div_ceil(8) * 8 / bits;
                let packed = reshape(rw, packed, &[lead, padded * bits / 8]);
                let unpacked = unpack(rw, packed, bits, &[lead, padded]);
                let unpacked = keep_first(rw, unpacked, count, padded);
                let unpacked = reshape(rw, unpacked, &[experts, rows, blocks, 1]);
                cast(rw, unpacked, DType::U8, wide)
            }
        };
        let weights = scaled_distance(rw, (integers, wide), zero_points, scales);
        let weights = reshape(rw, weights, &dims);
        Ok(cast(rw, weights, wide, dtype))
    }

    /// Adds a layer of all experts: `[.., tokens, columns]` becomes `[experts, tokens, rows]`.
    fn layer(
        &self,
        rw: &mut Rewrite<'_>,
        layer: usize,
        x: ValueId,
        dtype: DType,
    ) -> Result<ValueId, OpError> {
        let weights = self.weights(rw, layer, dtype)?;
        let attrs = Attrs::new().with("transB", 1i64);
        let product = rw.add_node(MICROSOFT, "FusedMatMul", &[Some(x), Some(weights)], 1, attrs)[0];
        let Some(bias) = rw.input(self.layers[layer].bias) else { return Ok(product) };
        let axis = rw.ints("axis", &[1]);
        let bias = emit(rw, "Unsqueeze", &[bias, axis]);
        Ok(emit(rw, "Add", &[product, bias]))
    }

    /// Adds the weights of the experts for each token, `[tokens, experts]`: zero for experts that were not selected.
    fn routing(&self, rw: &mut Rewrite<'_>, dtype: DType) -> Result<ValueId, OpError> {
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
        let mut chosen = rw.add("GatherElements", &[shares, selected], attrs.clone());
        if self.normalizes {
            let axes = rw.ints("axes", &[1]);
            let total = rw.add("ReduceSum", &[chosen, axes], Attrs::new().with("keepdims", 1i64));
            chosen = emit(rw, "Div", &[chosen, total]);
        }
        let shape = emit(rw, "Shape", &[logits]);
        let zero = number(rw, dtype, 0.0);
        let zeros = emit(rw, "Expand", &[zero, shape]);
        Ok(rw.add("ScatterElements", &[zeros, selected, chosen], attrs))
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
            let numbers = [("start", starts[half]), ("end", ends[half]), ("axis", 2), ("step", step)];
            let [start, end, axis, step] = numbers.map(|(name, at)| rw.ints(name, &[at]));
            emit(rw, "Slice", &[hidden, start, end, axis, step])
        })
    }
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = Mixture::read(rw.node())?;
    let (input, dtype) = typed_input(rw, INPUT)?;
    let first = rw.required_input(op.layers[0].weights)?;
    let first = rw.shape(first).cloned();
    let [_, rows, columns] = op.weight_dims(0, first.as_ref())?;
    let flat = rw.ints("tokens", &[-1, columns as i64]);
    let tokens = emit(rw, "Reshape", &[input, flat]);
    let hidden = op.layer(rw, 0, tokens, dtype)?;
    let (hidden, linear) = match op.activation {
        Activation::Swiglu(gate @ (Gate::Interleaved | Gate::Concatenated)) => {
            let [gate, linear] = op.halves(rw, hidden, gate, rows);
            (gate, Some(linear))
        }
        _ if op.has_layer(rw.node(), 2) => (hidden, Some(op.layer(rw, 2, tokens, dtype)?)),
        _ => (hidden, None),
    };
    let hidden = op.activate(rw, hidden, linear, dtype);
    let results = op.layer(rw, 1, hidden, dtype)?;
    let shares = op.routing(rw, dtype)?;
    let shares = rw.add("Transpose", &[shares], Attrs::new().with("perm", vec![1i64, 0]));
    let axis = rw.ints("axis", &[2]);
    let shares = emit(rw, "Unsqueeze", &[shares, axis]);
    let weighted = emit(rw, "Mul", &[results, shares]);
    let experts = rw.ints("experts", &[0]);
    let total = rw.add("ReduceSum", &[weighted, experts], Attrs::new().with("keepdims", 0i64));
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
