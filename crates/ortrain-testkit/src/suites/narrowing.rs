//! Layers with results that are only partly used.

use std::sync::Arc;

use ortrain_graph::{Attrs, DType, Tensor, ValueId};
use ortrain_program::Backend;

use super::Report;
use crate::{Case, CaseBuilder, Fill, check_backend};

/// Sentences of the batch.
pub const BATCH: usize = 3;
/// Tokens of a sentence.
pub const TOKENS: usize = 10;
const HEADS: usize = 2;
const WIDTH: usize = 8;
/// Elements of the inner layer.
pub const INNER: usize = 12;

/// Selected tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum Selection {
    /// One token, by a scalar index, without the token axis.
    One(i64),
    /// These tokens, by a list of indices.
    Some(Vec<i64>),
    /// Tokens from one index to before another.
    Slice(i64, i64),
    /// All tokens of a sentence.
    Sentence(i64),
    /// All tokens.
    All,
}

/// Selected part of a layer.
#[derive(Clone, Debug)]
pub struct Config {
    /// Selected tokens.
    pub selection: Selection,
    /// True if there is dropout.
    pub dropped: bool,
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

    /// Builds a transformer layer with a classifier on the selected results.
    #[must_use]
    pub fn case(&self) -> Case {
        let mut b = CaseBuilder::new("Gather", &format!("{self:?}"));
        let x = b.float(&[BATCH, TOKENS, WIDTH], &Fill::Signed);
        let unbiased = |b: &mut CaseBuilder, x: ValueId, [from, to]: [usize; 2]| {
            let weight = b.float(&[to, from], &Fill::Signed);
            let transposed = b.node("Transpose", &[weight], Attrs::new().with("perm", vec![1i64, 0]));
            b.node("MatMul", &[x, transposed], Attrs::new())
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
            // A bias of keys changes no weight: its gradient would be rounding errors only.
            let x = unbiased(&mut b, x, [WIDTH, WIDTH]);
            heads(&mut b, x, perm)
        });
        let scores = b.node("MatMul", &[q, k], Attrs::new());
        let scale = b.constant(Tensor::filled(DType::F32, &[], 0.05));
        let scores = b.node("Mul", &[scores, scale], Attrs::new());
        let weights = b.node("Softmax", &[scores], Attrs::new().with("axis", -1i64));
        let weights = self.drop(&mut b, weights, 7);
        let sums = b.node("MatMul", &[weights, v], Attrs::new());
        let moved_sums = b.node("Transpose", &[sums], Attrs::new().with("perm", vec![0i64, 2, 1, 3]));
        let shape = b.ints(&[BATCH as i64, TOKENS as i64, WIDTH as i64]);
        let attended = b.node("Reshape", &[moved_sums, shape], Attrs::new());
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
        let normalized = normalize(&mut b, added);
        let gather = |b: &mut CaseBuilder, indices: Tensor, axis: i64| {
            let indices = b.constant(indices);
            b.node("Gather", &[normalized, indices], Attrs::new().with("axis", axis))
        };
        let selected = match &self.selection {
            Selection::One(index) => gather(&mut b, Tensor::i64(&[], &[*index]), 1),
            Selection::Sentence(index) => gather(&mut b, Tensor::i64(&[], &[*index]), 0),
            Selection::Some(indices) => gather(&mut b, Tensor::i64(&[indices.len()], indices), 1),
            &Selection::Slice(from, to) => {
                let bounds = [[from], [to], [1]].map(|value| b.ints(&value));
                b.node("Slice", &[normalized, bounds[0], bounds[1], bounds[2]], Attrs::new())
            }
            Selection::All => normalized,
        };
        let logits = linear(&mut b, selected, [WIDTH, 2]);
        b.outputs(&[logits])
    }
}

/// Returns all configurations.
#[must_use]
pub fn configs() -> Vec<Config> {
    let selections = [
        Selection::One(0),
        Selection::One(-1),
        Selection::One(5),
        Selection::Some(vec![0]),
        Selection::Some(vec![2, 3, 4]),
        Selection::Some(vec![9, 8, 7]),
        Selection::Some(vec![1, 1]),
        Selection::Slice(0, 6),
        Selection::Slice(-2, 1 << 40),
        Selection::Sentence(1),
        Selection::All,
    ];
    selections
        .iter()
        .flat_map(|selection| [false, true].map(|dropped| Config { selection: selection.clone(), dropped }))
        .collect()
}

/// Compares a backend with the reference evaluator, forward and backward.
#[must_use]
pub fn agree(backend: &Arc<dyn Backend>) -> Report {
    configs().into_iter().map(|config| check_backend(&config.case(), backend, true)).collect()
}
