use std::sync::Arc;

use ortrain_graph::{Attrs, DType, Graph, Tensor, ValueType};
use ortrain_program::{BufferLocation, Instruction, Program};

use crate::Role;
use crate::passes::specialise::Specialiser;
use crate::registry::NEWEST_OPSET;
use crate::testing::{
    assert_close, cast_tensor, check_decomposition, check_gradients, generic_tensor, gradient_graph,
    one_node_graph, run, with_symbolic_sizes,
};

const QUANTIZED: (&str, &str) = ("com.microsoft", "QMoE");
const FLOAT: (&str, &str) = ("com.microsoft", "MoE");
/// Input of the packed weights of layer 1 of `QMoE`.
const PACKED: usize = 2;

/// Sizes and format of two layers of experts: `width` columns, `2 * hidden` rows with a SwiGLU, then `width` rows.
#[derive(Clone, Copy, Debug)]
struct Experts {
    tokens: usize,
    experts: usize,
    width: usize,
    hidden: usize,
    bits: usize,
    block: Option<usize>,
    has_zero_points: bool,
}

const SMALL_MODEL: Experts =
    Experts { tokens: 3, experts: 3, width: 32, hidden: 16, bits: 4, block: Some(16), has_zero_points: true };
/// Experts that are computed only for the tokens that select them.
const GENERATION: Experts = Experts { tokens: 2, experts: 12, ..SMALL_MODEL };

impl Experts {
    fn attrs(&self, is_quantized: bool) -> Attrs {
        let attrs = Attrs::new()
            .with("k", 2i64)
            .with("activation_type", "swiglu")
            .with("swiglu_fusion", 1i64)
            .with("normalize_routing_weights", 1i64);
        match (is_quantized, self.block) {
            (false, _) => attrs,
            (true, None) => attrs.with("expert_weight_bits", self.bits as i64),
            (true, Some(block)) => {
                attrs.with("expert_weight_bits", self.bits as i64).with("block_size", block as i64)
            }
        }
    }

    /// Returns packed weights, scales, packed zero points, and the float64 weights of a layer.
    fn layer(&self, rows: usize, columns: usize, seed: usize) -> [Tensor; 4] {
        let Experts { experts, bits, block, .. } = *self;
        let blocks = block.map_or(1, |block| columns / block);
        let integer = |at: usize, seed: usize| (at * 7 + at / 5 + seed) % (1 << bits);
        let pack = |integers: &[usize]| -> Vec<u8> {
            let byte = |codes: &[usize]| codes.iter().rev().fold(0, |byte, &code| byte << bits | code) as u8;
            integers.chunks(8 / bits).map(byte).collect()
        };
        let codes: Vec<usize> = (0..experts * rows * columns).map(|at| integer(at, seed)).collect();
        let scales: Vec<f64> =
            (0..experts * rows * blocks).map(|at| 0.02 + 0.01 * ((at + seed) as f64).sin()).collect();
        // Bytes hold the zero points of the blocks of a row, or of the rows of an expert.
        let zero_points: Vec<usize> = (0..experts * rows * blocks)
            .map(|at| if self.has_zero_points { integer(at, seed + 3) } else { 1 << (bits - 1) })
            .collect();
        let line = if block.is_some() { blocks } else { rows };
        let packed_zero_points: Vec<u8> = zero_points.chunks(line).flat_map(pack).collect();
        let weights: Vec<f64> = codes
            .iter()
            .enumerate()
            .map(|(at, &code)| {
                let block = at / (columns / blocks);
                (code as f64 - zero_points[block] as f64) * scales[block]
            })
            .collect();
        [
            Tensor::from_slice(DType::U8, &[experts, rows, columns * bits / 8], &pack(&codes)),
            Tensor::from_f64(DType::F64, vec![experts, rows, blocks], &scales),
            Tensor::from_slice(DType::U8, &[packed_zero_points.len()], &packed_zero_points),
            Tensor::from_f64(DType::F64, vec![experts, rows, columns], &weights),
        ]
    }

    /// Returns the inputs of `QMoE` and the inputs of the equal `MoE`, as floats of type `dtype`.
    fn inputs(&self, dtype: DType) -> [Vec<Option<Tensor>>; 2] {
        let Experts { tokens, experts, width, hidden, .. } = *self;
        let float = |tensor: &Tensor| Some(cast_tensor(tensor, dtype));
        let [w1, s1, z1, f1] = self.layer(2 * hidden, width, 1);
        let [w2, s2, z2, f2] = self.layer(width, hidden, 4);
        let x = float(&generic_tensor(&[tokens, width], 5));
        let router = float(&generic_tensor(&[tokens, experts], 6));
        let b1 = float(&generic_tensor(&[experts, 2 * hidden], 7));
        let b2 = float(&generic_tensor(&[experts, width], 8));
        let of_moe = vec![x.clone(), router.clone(), float(&f1), b1.clone(), float(&f2), b2.clone()];
        let mut quantized = vec![x, router, Some(w1), float(&s1), b1, Some(w2), float(&s2), b2];
        if self.has_zero_points {
            quantized.extend([None, None, None, Some(z1), Some(z2)]);
        }
        [quantized, of_moe]
    }

    fn graph(&self, op: (&str, &str), inputs: &[Option<Tensor>]) -> (Graph, Vec<Tensor>) {
        let ports: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
        let graph = one_node_graph(NEWEST_OPSET, op, &ports, 1, self.attrs(op == QUANTIZED));
        (graph.expect("the node is valid"), inputs.iter().flatten().cloned().collect())
    }

    fn quantized(&self, dtype: DType) -> (Graph, Vec<Tensor>) {
        self.graph(QUANTIZED, &self.inputs(dtype)[0])
    }

    fn float(&self, dtype: DType) -> (Graph, Vec<Tensor>) {
        self.graph(FLOAT, &self.inputs(dtype)[1])
    }
}

/// Returns the result of a graph with one output.
fn result((graph, inputs): &(Graph, Vec<Tensor>)) -> Tensor {
    run(graph, inputs).expect("the graph runs").remove(0)
}

/// Returns the only program of a graph.
fn program((graph, inputs): &(Graph, Vec<Tensor>)) -> Arc<Program> {
    let specialiser = Specialiser::new(graph.clone(), vec![Role::User; inputs.len()]);
    let schedule = specialiser.schedule(inputs).expect("the graph can be lowered");
    schedule.single_program().expect("one program").clone()
}

/// Returns the sizes of the products with packed integers.
fn packed_products(program: &Program) -> Vec<[usize; 3]> {
    let sizes = |instruction: &Instruction| match instruction {
        Instruction::QuantizedMatMul(product) => Some([product.m, product.n, product.k]),
        _ => None,
    };
    program.instructions.iter().filter_map(|scheduled| sizes(&scheduled.instruction)).collect()
}

#[test]
fn packed_experts_equal_float_experts() {
    for sizes in [SMALL_MODEL, GENERATION] {
        let formats = [(2, Some(16)), (4, Some(16)), (8, Some(16)), (4, None), (8, None)];
        for (bits, block) in formats {
            for has_zero_points in [false, true] {
                let case = Experts { bits, block, has_zero_points, ..sizes };
                let expected = result(&case.float(DType::F64));
                assert_close(&result(&case.quantized(DType::F64)), &expected, 1e-12);
                let narrow = cast_tensor(&result(&case.quantized(DType::F32)), DType::F64);
                assert_close(&narrow, &expected, 1e-4);
            }
        }
    }
}

#[test]
fn rows_of_any_length_are_one_block() {
    for sizes in [SMALL_MODEL, GENERATION] {
        let case = Experts { width: 24, hidden: 6, block: None, ..sizes };
        let found = case.quantized(DType::F32);
        assert!(!packed_products(&program(&found)).is_empty());
        let expected = result(&case.float(DType::F64));
        assert_close(&cast_tensor(&result(&found), DType::F64), &expected, 1e-5);
    }
}

#[test]
fn scales_of_half_precision_tokens_keep_their_type() {
    let inputs = SMALL_MODEL.inputs(DType::F32)[0].clone();
    let mut halves = inputs.clone();
    for k in [0, 1, 4, 7] {
        halves[k] = inputs[k].as_ref().map(|tensor| cast_tensor(tensor, DType::F16));
    }
    let found = SMALL_MODEL.graph(QUANTIZED, &halves);
    assert!(!packed_products(&program(&found)).is_empty());
    let expected = result(&SMALL_MODEL.graph(QUANTIZED, &inputs));
    assert_close(&cast_tensor(&result(&found), DType::F32), &expected, 2e-2);
}

#[test]
fn gradients_equal_central_differences() {
    let every = Experts { tokens: 2, experts: 2, width: 16, hidden: 16, bits: 2, ..SMALL_MODEL };
    let selected = Experts { tokens: 1, experts: 6, width: 8, hidden: 4, block: None, ..every };
    for case in [every, selected] {
        let (graph, inputs) = case.quantized(DType::F64);
        check_gradients(&graph, &inputs, &[0, 1, 3, 4, 6, 7], &[0]);
        let small = Experts { width: 4, hidden: 2, bits: 4, block: None, ..case };
        let (graph, inputs) = small.float(DType::F64);
        check_gradients(&graph, &inputs, &[0, 1, 2, 3, 4, 5], &[0]);
    }
}

#[test]
fn decompositions_are_equal() {
    for case in [SMALL_MODEL, GENERATION] {
        for (graph, inputs) in [case.quantized(DType::F64), case.float(DType::F64)] {
            check_decomposition(&graph, &inputs, 1e-12);
        }
    }
}

#[test]
fn generation_computes_selected_experts() {
    let case = GENERATION;
    let (graph, inputs) = case.quantized(DType::F32);
    // Two layers of two experts for each of two tokens.
    let (first, second) = ([1, 2 * case.hidden, case.width], [1, case.width, case.hidden]);
    let mut products = packed_products(&program(&(graph, inputs)));
    products.sort_unstable();
    assert_eq!(products, [[second; 4], [first; 4]].concat());
    // A gradient graph does not know the number of tokens.
    for (graph, inputs) in [case.quantized(DType::F64), case.float(DType::F64)] {
        let symbolic = with_symbolic_sizes(&with_symbolic_sizes(&graph, 0, &[0]), 1, &[0]);
        let weights = [Some(generic_tensor(&[case.tokens, case.width], 11))];
        let gradient = |graph: &Graph| result(&(gradient_graph(graph, &weights, &[0]), inputs.clone()));
        assert_close(&gradient(&symbolic), &gradient(&graph), 1e-12);
    }
}

/// The program decodes packed integers as it reads them: no buffer of floats is as large as the weights of one expert.
#[test]
fn no_float_buffer_holds_weights() {
    for sizes in [SMALL_MODEL, GENERATION] {
        let case = Experts { width: 64, hidden: 64, block: Some(64), ..sizes };
        let (graph, inputs) = case.quantized(DType::F32);
        let weights = [Some(cast_tensor(&generic_tensor(&[case.tokens, case.width], 11), DType::F32))];
        let gradient = gradient_graph(&graph, &weights, &[0, 1, 4, 7]);
        for graph in [graph, gradient] {
            let program = program(&(graph, inputs.clone()));
            assert!(!packed_products(&program).is_empty());
            let limit = case.width * case.hidden;
            let whole = program.buffers.iter().find(|buffer| buffer.dtype.is_float() && buffer.len >= limit);
            assert!(whole.is_none(), "{whole:?}\n{program}");
        }
    }
}

/// Constant weights are not copied: the factors of the products share their bytes.
#[test]
fn constant_weights_are_shared() {
    let (mut graph, mut inputs) = SMALL_MODEL.quantized(DType::F32);
    let id = graph.inputs.remove(PACKED);
    let weights = inputs.remove(PACKED).aligned(256);
    let value = graph.value_mut(id);
    value.ty = ValueType::tensor(weights.dtype(), weights.dims());
    value.constant = Some(weights.clone());
    let program = program(&(graph, inputs));
    let bytes = weights.data().as_ptr_range();
    let parts = program.buffers.iter().filter(|buffer| match buffer.location {
        BufferLocation::Constant(number) => bytes.contains(&program.constants[number].data().as_ptr()),
        _ => false,
    });
    let lengths: Vec<usize> = parts.map(|buffer| buffer.len).collect();
    assert_eq!(lengths, [weights.len() / SMALL_MODEL.experts; SMALL_MODEL.experts]);
}
