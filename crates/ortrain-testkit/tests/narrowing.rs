//! What is computed where a part of a result is all that anybody reads.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

mod common;

use std::sync::Arc;

use common::every_level;
use ortrain_graph::{Attrs, DType, Graph, Tensor, ValueId};
use ortrain_program::{Entry, Instruction, Precision, Program, Reference};
use ortrain_testkit::{
    Case, CaseBuilder, Fill, check_backend, check_gradient, check_second_order, gradient_graph, program_at,
    run, tolerance,
};

const BATCH: usize = 3;
const TOKENS: usize = 10;
const HEADS: usize = 2;
const WIDTH: usize = 8;
const INNER: usize = 12;

/// What is taken of the tokens.
#[derive(Clone, Debug, PartialEq)]
enum Taken {
    /// One, by a single index, and the axis is gone.
    One(i64),
    /// These, by a list of indices.
    Some(Vec<i64>),
    /// From one to before another.
    Slice(i64, i64),
    /// Of a sentence all tokens.
    Sentence(i64),
    All,
}

#[derive(Clone, Debug)]
struct Config {
    taken: Taken,
    dropped: bool,
}

/// Whether the layer before what is taken is computed for few tokens.
fn are_few(taken: &Taken) -> bool {
    !matches!(taken, Taken::All | Taken::Slice(0, 6))
}

impl Config {
    fn drop(&self, b: &mut CaseBuilder, x: ValueId, seed: i64) -> ValueId {
        if !self.dropped {
            return x;
        }
        let ratio = b.constant(Tensor::filled(DType::F32, &[], 0.25));
        let training = b.constant(Tensor::filled(DType::Bool, &[], 1.0));
        let inputs = [Some(x), Some(ratio), Some(training)];
        b.node_with("", "Dropout", &inputs, 2, Attrs::new().with("seed", seed))[0]
    }

    /// A layer of a transformer, and a classifier that sees what is taken of its results.
    fn case(&self) -> Case {
        let mut b = CaseBuilder::new("Gather", &format!("{self:?}"));
        let x = b.float(&[BATCH, TOKENS, WIDTH], &Fill::Signed);
        let unbiased = |b: &mut CaseBuilder, x: ValueId, [from, to]: [usize; 2]| {
            let weight = b.float(&[to, from], &Fill::Signed);
            let turned = b.node("Transpose", &[weight], Attrs::new().with("perm", vec![1i64, 0]));
            b.node("MatMul", &[x, turned], Attrs::new())
        };
        let linear = |b: &mut CaseBuilder, x: ValueId, [from, to]: [usize; 2]| {
            let product = unbiased(b, x, [from, to]);
            let bias = b.float(&[to], &Fill::Signed);
            b.node("Add", &[product, bias], Attrs::new())
        };
        let heads = |b: &mut CaseBuilder, x: ValueId, perm: [i64; 4]| {
            let shape = b.ints(&[BATCH as i64, TOKENS as i64, HEADS as i64, (WIDTH / HEADS) as i64]);
            let x = b.node("Reshape", &[x, shape], Attrs::new());
            b.node("Transpose", &[x], Attrs::new().with("perm", perm.to_vec()))
        };
        let [q, k, v] = [[0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]].map(|perm| {
            // A bias of keys changes no weight: its gradient would be rounding.
            let x = unbiased(&mut b, x, [WIDTH, WIDTH]);
            heads(&mut b, x, perm)
        });
        let scores = b.node("MatMul", &[q, k], Attrs::new());
        let scale = b.constant(Tensor::filled(DType::F32, &[], 0.05));
        let scores = b.node("Mul", &[scores, scale], Attrs::new());
        let weights = b.node("Softmax", &[scores], Attrs::new().with("axis", -1i64));
        let weights = self.drop(&mut b, weights, 7);
        let sums = b.node("MatMul", &[weights, v], Attrs::new());
        let moved = b.node("Transpose", &[sums], Attrs::new().with("perm", vec![0i64, 2, 1, 3]));
        let shape = b.ints(&[BATCH as i64, TOKENS as i64, WIDTH as i64]);
        let attended = b.node("Reshape", &[moved, shape], Attrs::new());
        let attended = linear(&mut b, attended, [WIDTH, WIDTH]);
        let added = b.node("Add", &[x, attended], Attrs::new());
        let normalize = |b: &mut CaseBuilder, x: ValueId| {
            let (scale, bias) = (b.float(&[WIDTH], &Fill::Signed), b.float(&[WIDTH], &Fill::Signed));
            b.node("LayerNormalization", &[x, scale, bias], Attrs::new())
        };
        let normal = normalize(&mut b, added);
        let up = linear(&mut b, normal, [WIDTH, INNER]);
        let mut up = b.node("Gelu", &[up], Attrs::new());
        up = self.drop(&mut b, up, 5);
        let down = linear(&mut b, up, [INNER, WIDTH]);
        let added = b.node("Add", &[normal, down], Attrs::new());
        let hidden = normalize(&mut b, added);
        let gather = |b: &mut CaseBuilder, indices: Tensor, axis: i64| {
            let indices = b.constant(indices);
            b.node("Gather", &[hidden, indices], Attrs::new().with("axis", axis))
        };
        let taken = match &self.taken {
            Taken::One(index) => gather(&mut b, Tensor::i64(&[], &[*index]), 1),
            Taken::Sentence(index) => gather(&mut b, Tensor::i64(&[], &[*index]), 0),
            Taken::Some(indices) => gather(&mut b, Tensor::i64(&[indices.len()], indices), 1),
            &Taken::Slice(from, to) => {
                let bounds = [[from], [to], [1]].map(|value| b.ints(&value));
                b.node("Slice", &[hidden, bounds[0], bounds[1], bounds[2]], Attrs::new())
            }
            Taken::All => hidden,
        };
        let logits = linear(&mut b, taken, [WIDTH, 2]);
        b.outputs(&[logits])
    }
}

fn configs() -> Vec<Config> {
    let taken = [
        Taken::One(0),
        Taken::One(-1),
        Taken::One(5),
        Taken::Some(vec![0]),
        Taken::Some(vec![2, 3, 4]),
        Taken::Some(vec![9, 8, 7]),
        Taken::Some(vec![1, 1]),
        Taken::Slice(0, 6),
        Taken::Slice(-2, 1 << 40),
        Taken::Sentence(1),
        Taken::All,
    ];
    taken
        .iter()
        .flat_map(|taken| [false, true].map(|dropped| Config { taken: taken.clone(), dropped }))
        .collect()
}

fn program(graph: Graph, inputs: &[Tensor]) -> Arc<Program> {
    program_at(graph, inputs, Precision::F32).unwrap()
}

/// Floating-point operations of a case, forward and backward.
fn flops(config: &Config) -> [u64; 2] {
    let case = config.case();
    let programs =
        [program(case.graph.clone(), &case.inputs), program(gradient_graph(&case).unwrap(), &case.inputs)];
    programs.map(|program| program.cost(Entry::Accumulate).flops)
}

#[test]
fn a_layer_is_computed_for_what_is_taken_of_it() {
    let whole = flops(&Config { taken: Taken::All, dropped: true });
    for config in configs().into_iter().filter(|config| config.taken != Taken::All && config.dropped) {
        let some = flops(&config);
        // Gradients of rows that are taken twice are sums at rows, of which nobody knows that the others are zero.
        let passes = if config.taken == Taken::Some(vec![1, 1]) { 1 } else { 2 };
        for (some, whole) in some.into_iter().zip(whole).take(passes) {
            // Keys and values are computed for all tokens: a third of the products' operations at most.
            let few = some * 2 < whole;
            assert_eq!(few, are_few(&config.taken), "{config:?}: {some} of {whole}");
        }
    }
}

/// Attention is an instruction still, for the queries that are wanted, and no buffer holds other tokens.
#[test]
fn attention_has_the_queries_that_are_wanted() {
    let few = [(Taken::One(0), 1), (Taken::One(-1), 1), (Taken::Slice(4, 7), 3)];
    for ((taken, wanted), dropped) in few.into_iter().flat_map(|few| [(few.clone(), false), (few, true)]) {
        let config = Config { taken, dropped };
        let case = config.case();
        let backward = program(gradient_graph(&case).unwrap(), &case.inputs);
        let queries: Vec<usize> = backward
            .instructions
            .iter()
            .filter_map(|i| match &i.instruction {
                Instruction::Attention(a) => Some(a.queries),
                _ => None,
            })
            .collect();
        assert_eq!(queries, [wanted; 2], "{config:?}\n{backward}");
        let inner = backward
            .instructions
            .iter()
            .flat_map(|i| i.instruction.writes())
            .map(|id| backward.buffer(id).len);
        assert_eq!(inner.filter(|&len| len == BATCH * TOKENS * INNER).count(), 0, "{config:?}\n{backward}");
    }
}

/// Gradients in float64 against central differences.
#[test]
fn gradients_are_those_of_differences() {
    for taken in [Taken::One(-1), Taken::Some(vec![2, 3, 4]), Taken::Sentence(1)] {
        check_gradient(&Config { taken, dropped: true }.case()).unwrap();
    }
    check_second_order(&Config { taken: Taken::One(0), dropped: false }.case()).unwrap();
}

/// Every level of kernels against the reference evaluator, forward and backward.
#[test]
fn backends_agree() {
    for config in configs() {
        for backend in every_level() {
            check_backend(&config.case(), &backend, true).unwrap();
        }
    }
}

/// Results are those of the same graph in which everything is a result.
#[test]
fn nothing_else_changes() {
    for config in configs() {
        let case = config.case();
        let mut graph = gradient_graph(&case).unwrap();
        let reference = || Arc::new(Reference) as Arc<dyn ortrain_program::Backend>;
        let got = run(&graph, &case.inputs, reference()).unwrap();
        let all: Vec<ValueId> =
            graph.nodes.iter().flat_map(|node| node.outputs.iter().flatten().copied()).collect();
        for id in all {
            if !graph.outputs.contains(&id) {
                graph.outputs.push(id);
            }
        }
        let want = run(&graph, &case.inputs, reference()).unwrap();
        for (k, (got, want)) in got.iter().zip(&want).enumerate() {
            let (got, want) = (got.to_f64(), want.to_f64());
            let scale = want.iter().fold(1e-3f64, |scale, value| scale.max(value.abs()));
            for (got, want) in got.iter().zip(&want) {
                assert!(
                    (got - want).abs() <= tolerance::FLOAT32 * scale,
                    "{config:?}: result {k}: {got}, not {want}"
                );
            }
        }
    }
}
