//! Attention subgraphs as different exporters write them.

use std::sync::Arc;

use ortrain_graph::{Attrs, DType, Tensor, ValueId};
use ortrain_program::Backend;

use super::Report;
use crate::{Case, CaseBuilder, Fill, check_backend};

/// An exporter's pattern for the operations on scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Spelling {
    /// Scores are scaled by a factor.
    Multiplied,
    /// Scores are divided, and a mask for each key of each batch element is added.
    DividedAndMasked,
    /// Queries and keys are scaled by the root of the factor beforehand, and a mask for each pair is added.
    /// NaN results of fully masked rows are replaced by zero.
    ScaledBefore,
    /// Masked scores are set to a low number.
    Chosen,
    /// Scores are scaled, and weights are dropped.
    Dropped,
    /// Left-padded sentences in a causal network: all keys of the first positions are masked. NaN is replaced
    /// by zero, then weights are dropped.
    Padded,
    /// Like `Padded`, but weights are dropped first.
    PaddedLate,
    /// Like `Padded`, but NaN is detected in another type.
    PaddedNarrow,
    /// Like `Padded`, but fully masked rows are detected by the scores: PyTorch's safe softmax, decomposed.
    PaddedSafe,
}

const SPELLINGS: [Spelling; 9] = [
    Spelling::Multiplied,
    Spelling::DividedAndMasked,
    Spelling::ScaledBefore,
    Spelling::Chosen,
    Spelling::Dropped,
    Spelling::Padded,
    Spelling::PaddedLate,
    Spelling::PaddedNarrow,
    Spelling::PaddedSafe,
];

/// Source of queries, keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    /// Heads are parts of the last axis of three tensors.
    Three,
    /// Heads are parts of the last axis of one tensor.
    Packed,
    /// Heads are an axis already, and all heads share keys and values.
    Shared,
}

/// Sizes, and the pattern of an exporter.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Pattern of the operations on scores.
    pub spelling: Spelling,
    /// Source of queries, keys and values.
    pub source: Source,
    /// Element type.
    pub dtype: DType,
    /// Number of queries.
    pub queries: usize,
    /// Number of keys.
    pub keys: usize,
    /// Number of heads.
    pub heads: usize,
    /// Elements of a query per head.
    pub size: usize,
    /// True if the softmax is an additional result.
    pub exposes_weights: bool,
}

/// Batch size.
pub const BATCH: usize = 2;

impl Config {
    fn heads_of(self, b: &mut CaseBuilder, x: ValueId, len: usize, perm: &[i64]) -> ValueId {
        let shape = b.ints(&[BATCH as i64, len as i64, self.heads as i64, self.size as i64]);
        let x = b.node("Reshape", &[x, shape], Attrs::new());
        b.node("Transpose", &[x], Attrs::new().with("perm", perm.to_vec()))
    }

    fn operands(self, b: &mut CaseBuilder) -> [ValueId; 3] {
        let Config { dtype, queries, keys, heads, size, .. } = self;
        let width = heads * size;
        let (identity, transposed) = ([0i64, 2, 1, 3], [0i64, 2, 3, 1]);
        match self.source {
            Source::Three => {
                let q = b.input(dtype, &[BATCH, queries, width], &Fill::Signed);
                let k = b.input(dtype, &[BATCH, keys, width], &Fill::Signed);
                let v = b.input(dtype, &[BATCH, keys, width], &Fill::Signed);
                [
                    self.heads_of(b, q, queries, &identity),
                    self.heads_of(b, k, keys, &transposed),
                    self.heads_of(b, v, keys, &identity),
                ]
            }
            Source::Packed => {
                assert_eq!(queries, keys);
                let x = b.input(dtype, &[BATCH, queries, 3 * width], &Fill::Signed);
                let sizes = b.ints(&[width as i64; 3]);
                let attrs = Attrs::new().with("axis", -1i64);
                let parts = b.node_with("", "Split", &[Some(x), Some(sizes)], 3, attrs);
                [
                    self.heads_of(b, parts[0], queries, &identity),
                    self.heads_of(b, parts[1], keys, &transposed),
                    self.heads_of(b, parts[2], keys, &identity),
                ]
            }
            Source::Shared => {
                let q = b.input(dtype, &[BATCH, heads, queries, size], &Fill::Signed);
                let shape = b.ints(&[BATCH as i64, heads as i64, keys as i64, size as i64]);
                let [k, v] = [(); 2].map(|()| {
                    let x = b.input(dtype, &[BATCH, 1, keys, size], &Fill::Signed);
                    b.node("Expand", &[x, shape], Attrs::new())
                });
                [q, b.node("Transpose", &[k], Attrs::new().with("perm", vec![0i64, 1, 3, 2])), v]
            }
        }
    }

    /// Builds the case.
    #[must_use]
    pub fn case(self) -> Case {
        let Config { dtype, queries, keys, heads, size, spelling, .. } = self;
        let mut b = CaseBuilder::new("Attention", &format!("{self:?}"));
        let [mut q, mut k, v] = self.operands(&mut b);
        let scalar = |b: &mut CaseBuilder, value: f64| b.constant(Tensor::filled(dtype, &[], value));
        let numbers = |dims: &[usize], value: &dyn Fn(usize) -> f64| {
            let values: Vec<f64> = (0..dims.iter().product()).map(value).collect();
            Tensor::from_f64(dtype, dims.to_vec(), &values)
        };
        let scale = 1.0 / (size as f64).sqrt();
        if spelling == Spelling::ScaledBefore {
            let root = scalar(&mut b, scale.sqrt());
            q = b.node("Mul", &[q, root], Attrs::new());
            k = b.node("Mul", &[k, root], Attrs::new());
        }
        let product = b.node("MatMul", &[q, k], Attrs::new());
        let scores = match spelling {
            Spelling::Padded | Spelling::PaddedLate | Spelling::PaddedNarrow | Spelling::PaddedSafe => {
                let scale = scalar(&mut b, scale);
                let scaled = b.node("Mul", &[product, scale], Attrs::new());
                let mask = numbers(&[BATCH, 1, queries, keys], &|i| {
                    let (sentence, i, j) = (i / (queries * keys), i / keys % queries, i % keys);
                    let padding = (sentence + 1) * keys / 3;
                    if j > i || j < padding { f64::NEG_INFINITY } else { (j % 3) as f64 * 0.25 }
                });
                let mask = b.constant(mask);
                b.node("Add", &[scaled, mask], Attrs::new())
            }
            Spelling::Multiplied | Spelling::Dropped => {
                let scale = scalar(&mut b, scale);
                b.node("Mul", &[product, scale], Attrs::new())
            }
            Spelling::DividedAndMasked => {
                let root = scalar(&mut b, 1.0 / scale);
                let mask = numbers(&[BATCH, 1, 1, keys], &|i| {
                    if keys > 1 && i % keys == keys - 1 { -10_000.0 } else { (i % 3) as f64 * 0.5 }
                });
                let mask = b.constant(mask);
                let scaled = b.node("Div", &[product, root], Attrs::new());
                b.node("Add", &[scaled, mask], Attrs::new())
            }
            Spelling::ScaledBefore => {
                // One query is fully masked.
                let is_masked = |i: usize| i / keys == 1 || i % keys > i / keys;
                let mask = numbers(&[queries, keys], &|i| if is_masked(i) { f64::NEG_INFINITY } else { 0.0 });
                let mask = b.constant(mask);
                b.node("Add", &[product, mask], Attrs::new())
            }
            Spelling::Chosen => {
                let shape = [1, 1, queries, keys];
                let visible_values: Vec<f64> =
                    (0..queries * keys).map(|i| f64::from(u8::from(i % keys <= i / keys))).collect();
                let visible_mask = Tensor::from_f64(DType::Bool, shape.to_vec(), &visible_values);
                let visible_constant = b.constant(visible_mask);
                let low = scalar(&mut b, -1e9);
                let scale = scalar(&mut b, scale);
                let scaled = b.node("Mul", &[product, scale], Attrs::new());
                b.node("Where", &[visible_constant, scaled, low], Attrs::new())
            }
        };
        let softmax = b.node("Softmax", &[scores], Attrs::new().with("axis", -1i64));
        let cast = |dtype: DType| Attrs::new().with("to", i64::from(dtype.to_onnx()));
        let dropped = |b: &mut CaseBuilder, x: ValueId| {
            let ratio = scalar(b, 0.25);
            let training = b.constant(Tensor::filled(DType::Bool, &[], 1.0));
            let inputs = [Some(x), Some(ratio), Some(training)];
            b.node_with("", "Dropout", &inputs, 2, Attrs::new().with("seed", 5i64))[0]
        };
        let cleared = |b: &mut CaseBuilder, visible: ValueId, x: ValueId| {
            let broken = b.node("IsNaN", &[visible], Attrs::new());
            let zero = scalar(b, 0.0);
            b.node("Where", &[broken, zero, x], Attrs::new())
        };
        let weights = match spelling {
            Spelling::ScaledBefore => cleared(&mut b, softmax, softmax),
            Spelling::Dropped => dropped(&mut b, softmax),
            Spelling::Padded => {
                let weights = cleared(&mut b, softmax, softmax);
                dropped(&mut b, weights)
            }
            Spelling::PaddedLate => {
                let weights = dropped(&mut b, softmax);
                cleared(&mut b, weights, weights)
            }
            Spelling::PaddedNarrow => {
                let narrow = b.node("Cast", &[softmax], cast(DType::F16));
                let weights = cleared(&mut b, narrow, softmax);
                dropped(&mut b, weights)
            }
            Spelling::PaddedSafe => {
                let never = scalar(&mut b, f64::NEG_INFINITY);
                let masked = b.node("Equal", &[scores, never], Attrs::new());
                let masked_ints = b.node("Cast", &[masked], cast(DType::I32));
                let axes = b.ints(&[-1]);
                let rows = b.node("ReduceMin", &[masked_ints, axes], Attrs::new());
                let rows = b.node("Cast", &[rows], cast(DType::Bool));
                let zero = scalar(&mut b, 0.0);
                let weights = b.node("Where", &[rows, zero, softmax], Attrs::new());
                dropped(&mut b, weights)
            }
            _ => softmax,
        };
        let sums = b.node("MatMul", &[weights, v], Attrs::new());
        let transposed = b.node("Transpose", &[sums], Attrs::new().with("perm", vec![0i64, 2, 1, 3]));
        let shape = b.ints(&[BATCH as i64, queries as i64, (heads * size) as i64]);
        let output = b.node("Reshape", &[transposed, shape], Attrs::new());
        b.outputs(&if self.exposes_weights { vec![output, softmax] } else { vec![output] })
    }
}

/// Returns all configurations.
#[must_use]
pub fn configs() -> Vec<Config> {
    let mut configs = Vec::new();
    for spelling in SPELLINGS {
        for source in [Source::Three, Source::Packed, Source::Shared] {
            for (queries, keys, heads, size) in [(1, 1, 1, 1), (7, 7, 3, 4), (5, 9, 2, 3), (33, 33, 2, 16)] {
                if source != Source::Packed || queries == keys {
                    let dtype = DType::F32;
                    let visible = false;
                    configs.push(Config {
                        spelling,
                        source,
                        dtype,
                        queries,
                        keys,
                        heads,
                        size,
                        exposes_weights: visible,
                    });
                }
            }
        }
    }
    configs
}

/// Returns configurations with long vectors, which a backend may be unable to keep on chip.
fn long() -> impl Iterator<Item = Config> {
    let (source, dtype, exposes_weights) = (Source::Three, DType::F32, false);
    let long = move |spelling| Config {
        spelling,
        source,
        dtype,
        queries: 5,
        keys: 9,
        heads: 2,
        size: 260,
        exposes_weights,
    };
    SPELLINGS.into_iter().map(long)
}

/// Compares a backend with the reference evaluator, forward and backward.
#[must_use]
pub fn agree(backend: &Arc<dyn Backend>) -> Report {
    configs().into_iter().chain(long()).map(|config| check_backend(&config.case(), backend, true)).collect()
}
