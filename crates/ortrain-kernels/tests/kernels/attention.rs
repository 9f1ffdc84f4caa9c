//! Compares attention with sums in f64.

use ortrain_expr::{
    Access, Builder, CompareOp, DType, Evaluation, Inst, Load, Mode, Nest, Reg, RunScalar, Scalar, Strides,
    Type,
};
use ortrain_kernels::{AttentionDesc, AttentionGradients, AttentionKernel, AttentionPass, Isa, Pool};

use crate::common::*;

/// Sizes: batch, heads, queries, keys, elements of a query, elements of a value.
type Sizes = [usize; 6];

/// Epilogue of the scores.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scores {
    Plain,
    Scaled,
    /// A mask for each key of each batch element, with -inf at some keys.
    Keys,
    /// A mask for each pair, added after scaling, that hides all keys from some queries.
    Pairs,
    /// Later keys are hidden.
    Causal,
    /// A mask for each pair, added after scaling, that hides later keys: with an ordinary number, and with -inf.
    Later,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    sizes: Sizes,
    dtype: DType,
    scores: Scores,
    /// True if dropout is applied to the weights.
    has_dropout: bool,
    /// True if NaN in the softmax, for queries that see no key, is replaced by zero.
    replaces_nan: bool,
    /// True if the axis of heads is between positions and elements in memory.
    has_interleaved_heads: bool,
    /// True if all heads of a batch element have the same keys and values.
    has_shared_keys: bool,
}

/// Returns the access to a tensor `[batch, heads, lines, elements]`.
fn operand(case: Case, lines: usize, elements: usize, shared: bool) -> Access {
    let [batch, heads, ..] = case.sizes;
    let own_heads = if shared { 1 } else { heads };
    let strides: [usize; 4] = if case.has_interleaved_heads {
        [lines * own_heads * elements, elements, own_heads * elements, 1]
    } else {
        [own_heads * lines * elements, lines * elements, elements, 1]
    };
    let mut strides: Strides = strides.into_iter().map(|stride| stride as isize).collect();
    if shared {
        strides[1] = 0;
    }
    Access { dtype: case.dtype, offset: 0, strides, len: batch * own_heads * lines * elements }
}

/// Returns a nest over `dims` with some accumulators. Without a store, another computation takes its result.
fn nest(
    dtype: DType,
    dims: &[usize],
    accumulators: usize,
    loads: Vec<Access>,
    store: Option<Access>,
    f: impl FnOnce(&mut Builder, &[Reg]) -> Reg,
) -> Nest {
    let accumulators = vec![Load::Accumulator(dtype); accumulators];
    let loads: Vec<Load> = accumulators.into_iter().chain(loads.into_iter().map(Load::Buffer)).collect();
    let mut b = Builder::new();
    let regs: Vec<Reg> =
        loads.iter().enumerate().map(|(slot, load)| b.load(slot, Type::of(load.dtype()))).collect();
    let result = f(&mut b, &regs);
    Nest {
        dims: dims.iter().copied().collect(),
        inner: 0,
        segments: None,
        loads,
        expr: b.finish(&[result]),
        reductions: Vec::new(),
        stores: store.into_iter().collect(),
    }
}

/// Returns twice the value or zero, at random.
fn apply_dropout(b: &mut Builder, dims: &[usize], x: Reg) -> Reg {
    let ty = b.ty(x);
    let index = b.element_number(dims);
    let index = b.convert(index, Type::U64);
    let key = b.run_scalar(RunScalar::Seed);
    let stream = b.push(Inst::Const(Scalar::U64(7)), Type::U64);
    let bits = b.push(Inst::Random(key, stream, index), Type::U32);
    let half = b.push(Inst::Const(Scalar::U32(1 << 31)), Type::U32);
    let is_retained = b.compare(CompareOp::Lt, bits, half);
    let (two, zero) = (b.constant(ty, 2.0), b.constant(ty, 0.0));
    let doubled = b.mul(x, two);
    b.select(is_retained, doubled, zero)
}

/// Returns the value, or zero if the softmax is NaN.
fn replace_nan(b: &mut Builder, value: Reg, softmax: Reg) -> Reg {
    let zero = b.constant(b.ty(value), 0.0);
    let is_number = b.compare(CompareOp::Eq, softmax, softmax);
    b.select(is_number, value, zero)
}

impl Case {
    fn scores(self) -> Nest {
        let [batch, heads, queries, keys, size, _] = self.sizes;
        let dims = [batch, heads, queries, keys];
        let factor = 1.0 / (size as f64).sqrt();
        let ty = Type::of(self.dtype);
        let mask = match self.scores {
            Scores::Keys => vec![Access::broadcast(self.dtype, &[batch, 1, 1, keys], &dims)],
            Scores::Pairs | Scores::Later => vec![Access::broadcast(self.dtype, &[queries, keys], &dims)],
            _ => Vec::new(),
        };
        nest(self.dtype, &dims, 1, mask, None, |b, regs| {
            let c = b.constant(ty, factor);
            match self.scores {
                Scores::Plain => regs[0],
                Scores::Scaled => b.mul(regs[0], c),
                Scores::Keys | Scores::Pairs | Scores::Later => {
                    let scaled = b.mul(regs[0], c);
                    b.add(scaled, regs[1])
                }
                Scores::Causal => {
                    let (i, j) = (b.coordinate(2), b.coordinate(3));
                    let is_visible = b.compare(CompareOp::Le, j, i);
                    let never = b.constant(ty, f64::NEG_INFINITY);
                    b.select(is_visible, regs[0], never)
                }
            }
        })
    }

    fn scores_gradient(self) -> Nest {
        let [batch, heads, queries, keys, size, _] = self.sizes;
        let ty = Type::of(self.dtype);
        nest(self.dtype, &[batch, heads, queries, keys], 1, Vec::new(), None, |b, regs| {
            let c = b.constant(ty, 1.0 / (size as f64).sqrt());
            match self.scores {
                Scores::Plain => regs[0],
                Scores::Causal => {
                    let (i, j) = (b.coordinate(2), b.coordinate(3));
                    let is_visible = b.compare(CompareOp::Le, j, i);
                    let zero = b.constant(ty, 0.0);
                    b.select(is_visible, regs[0], zero)
                }
                _ => b.mul(regs[0], c),
            }
        })
    }

    fn weights(self, accumulators: usize) -> Nest {
        let [batch, heads, queries, keys, ..] = self.sizes;
        let dims = [batch, heads, queries, keys];
        nest(self.dtype, &dims, accumulators, Vec::new(), None, |b, regs| {
            let (mut value, softmax) = (regs[0], regs[accumulators - 1]);
            // Gradients pass the operations in reverse order: dropout first, then the replacement of NaN.
            if self.has_dropout && accumulators == 2 {
                value = apply_dropout(b, &dims, value);
            }
            if self.replaces_nan {
                value = replace_nan(b, value, softmax);
            }
            if self.has_dropout && accumulators == 1 {
                value = apply_dropout(b, &dims, value);
            }
            value
        })
    }

    fn softmax(self) -> Nest {
        let [batch, heads, queries, keys, ..] = self.sizes;
        nest(self.dtype, &[batch, heads, queries, keys], 1, Vec::new(), None, |b, regs| {
            if self.replaces_nan { replace_nan(b, regs[0], regs[0]) } else { regs[0] }
        })
    }

    /// Returns the epilogue of a result with the memory layout of the operands.
    fn result(self, lines: usize, elements: usize) -> Nest {
        let [batch, heads, ..] = self.sizes;
        let store = operand(self, lines, elements, false);
        nest(self.dtype, &[batch, heads, lines, elements], 1, Vec::new(), Some(store), |_, regs| regs[0])
    }

    fn desc(self, backward: bool) -> AttentionDesc {
        let [_, _, queries, keys, size, width] = self.sizes;
        let pass = if backward {
            AttentionPass::Gradients(Box::new(AttentionGradients {
                output_gradient: operand(self, queries, width, false),
                weights: self.weights(2),
                softmax: self.softmax(),
                scores: self.scores_gradient(),
                q: Some(self.result(queries, size)),
                k: Some(self.result(keys, size)),
                v: Some(self.result(keys, width)),
            }))
        } else {
            AttentionPass::Output(Box::new(self.result(queries, width)))
        };
        AttentionDesc {
            size,
            width,
            q: operand(self, queries, size, false),
            k: operand(self, keys, size, self.has_shared_keys),
            v: operand(self, keys, width, self.has_shared_keys),
            scores: self.scores(),
            weights: self.weights(1),
            pass,
        }
    }

    fn inputs(self, random: &mut Random) -> Vec<Vec<u8>> {
        let [batch, _, queries, keys, size, width] = self.sizes;
        let desc = self.desc(true);
        let output_gradient = operand(self, queries, width, false);
        let mut tensor = |len: usize, factor: f64| -> Vec<u8> {
            let mut bytes = vec![0; len * self.dtype.size()];
            (0..len).for_each(|i| put(&mut bytes, self.dtype, i, Scalar::F64(factor * random.unit())));
            bytes
        };
        // Without a scale, the softmax must not concentrate on one key.
        let mut inputs = vec![
            tensor(desc.q.len, (size as f64).powf(-0.25)),
            tensor(desc.k.len, 1.0),
            tensor(desc.v.len, 1.0),
            tensor(output_gradient.len, 1.0),
        ];
        if self.scores == Scores::Later {
            let mut mask = vec![0; queries * keys * self.dtype.size()];
            for (i, j) in (0..queries).flat_map(|i| (0..keys).map(move |j| (i, j))) {
                let value = match () {
                    () if j <= i => (j % 5) as f64 * 0.25,
                    () if (i + j) % 2 == 0 => -1e4,
                    () => f64::NEG_INFINITY,
                };
                put(&mut mask, self.dtype, i * keys + j, Scalar::F64(value));
            }
            inputs.push(mask);
        }
        let masked = |is_masked: &dyn Fn(usize) -> bool, len: usize| {
            let mut bytes = vec![0; len * self.dtype.size()];
            for i in 0..len {
                let value = if is_masked(i) { f64::NEG_INFINITY } else { (i % 5) as f64 * 0.25 };
                put(&mut bytes, self.dtype, i, Scalar::F64(value));
            }
            bytes
        };
        match self.scores {
            Scores::Keys => inputs.push(masked(&|i| keys > 1 && i % keys % 3 == 2, batch * keys)),
            Scores::Pairs => inputs.push(masked(
                &|i| i / keys % 4 == 3 || (i % keys + i / keys) % 3 == 1 && keys > 2,
                queries * keys,
            )),
            _ => {}
        }
        inputs
    }
}

/// One point of a nest over scores.
struct PointOfScores<'a> {
    nest: &'a Nest,
    output_gradient: &'a [f64],
    mask: Option<&'a Vec<u8>>,
    index: &'a [usize],
}

impl Evaluation for PointOfScores<'_> {
    fn load(&mut self, slot: usize) -> Scalar {
        let Some(access) = self.nest.loads[slot].access() else {
            return Scalar::F64(self.output_gradient[slot]);
        };
        let at: isize = access.strides.iter().zip(self.index).map(|(&s, &i)| s * i as isize).sum();
        get(self.mask.expect("there is a mask"), access.dtype, at as usize)
    }

    fn load_at(&mut self, _: usize, _: i64) -> Scalar {
        unreachable!("nothing is gathered")
    }

    fn coordinate(&mut self, axis: usize) -> i64 {
        self.index[axis] as i64
    }

    fn run_scalar(&mut self, scalar: RunScalar) -> u64 {
        match scalar {
            RunScalar::Seed => SCALARS.seed,
            RunScalar::TrainStep => SCALARS.train_step,
        }
    }

    fn reduced(&mut self, _: usize) -> Scalar {
        unreachable!("nothing is reduced")
    }
}

/// Computes the output and the gradients of Q, K and V in f64, with the memory layout of the operands.
fn expected(case: Case, inputs: &[Vec<u8>]) -> [Vec<f64>; 4] {
    let [batch, heads, queries, keys, size, width] = case.sizes;
    let desc = case.desc(true);
    let AttentionPass::Gradients(gradients) = &desc.pass else { unreachable!() };
    let AttentionGradients {
        output_gradient: gradient_input, weights, softmax: softmax_nest, scores, ..
    } = &**gradients;
    let element = |access: &Access, k: usize, index: [usize; 4]| {
        let at: isize = access.strides.iter().zip(index).map(|(&s, i)| s * i as isize).sum();
        get(&inputs[k], case.dtype, at as usize).to_f64()
    };
    let result = |lines, elements| operand(case, lines, elements, false);
    let index_of = |access: &Access, index: [usize; 4]| -> usize {
        access.strides.iter().zip(index).map(|(&s, i)| s as usize * i).sum()
    };
    let (o_at, q_at, k_at, v_at) =
        (result(queries, width), result(queries, size), result(keys, size), result(keys, width));
    let mut results = [vec![0.0; o_at.len], vec![0.0; q_at.len], vec![0.0; k_at.len], vec![0.0; v_at.len]];
    for b in 0..batch {
        for h in 0..heads {
            for i in 0..queries {
                let value = |nest: &Nest, accumulators: &[f64], j: usize| {
                    let mut at = PointOfScores {
                        nest,
                        output_gradient: accumulators,
                        mask: inputs.get(4),
                        index: &[b, h, i, j],
                    };
                    nest.expr.evaluate(Mode::Widened, &mut at).unwrap()[0].to_f64()
                };
                let dot = |j: usize| {
                    (0..size)
                        .map(|l| element(&desc.q, 0, [b, h, i, l]) * element(&desc.k, 1, [b, h, j, l]))
                        .sum()
                };
                let scored: Vec<f64> = (0..keys).map(|j| value(&desc.scores, &[dot(j)], j)).collect();
                let maximum = scored.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let powers: Vec<f64> = scored.iter().map(|score| (score - maximum).exp()).collect();
                let sum: f64 = powers.iter().sum();
                let softmax: Vec<f64> = powers.iter().map(|power| power / sum).collect();
                let used: Vec<f64> = (0..keys).map(|j| value(&desc.weights, &[softmax[j]], j)).collect();
                for d in 0..width {
                    let to = &mut results[0][index_of(&o_at, [b, h, i, d])];
                    *to = (0..keys).map(|j| used[j] * element(&desc.v, 2, [b, h, j, d])).sum();
                }
                let weight_gradients: Vec<f64> = (0..keys)
                    .map(|j| {
                        let terms = (0..width).map(|d| {
                            element(gradient_input, 3, [b, h, i, d]) * element(&desc.v, 2, [b, h, j, d])
                        });
                        value(weights, &[terms.sum(), softmax[j]], j)
                    })
                    .collect();
                let scaled: Vec<f64> = (0..keys).map(|j| value(softmax_nest, &[softmax[j]], j)).collect();
                let total: f64 = weight_gradients.iter().zip(&scaled).map(|(g, p)| g * p).sum();
                for j in 0..keys {
                    let score = value(scores, &[scaled[j] * (weight_gradients[j] - total)], j);
                    for l in 0..size {
                        results[1][index_of(&q_at, [b, h, i, l])] +=
                            score * element(&desc.k, 1, [b, h, j, l]);
                        results[2][index_of(&k_at, [b, h, j, l])] +=
                            score * element(&desc.q, 0, [b, h, i, l]);
                    }
                    for d in 0..width {
                        results[3][index_of(&v_at, [b, h, j, d])] +=
                            used[j] * element(gradient_input, 3, [b, h, i, d]);
                    }
                }
            }
        }
    }
    results
}

/// Runs a kernel on buffers in its order and returns the results, of `outs` bytes each.
fn run(desc: &AttentionDesc, isa: Isa, threads: usize, inputs: &[Vec<u8>], outs: &[usize]) -> Vec<Vec<u8>> {
    let kernel = AttentionKernel::new(desc, isa).unwrap();
    let pool = Pool::new(threads);
    let mut memory = Memory::new(kernel.scratch_bytes(threads));
    let mut inputs = inputs.to_vec();
    let mut outs: Vec<Vec<u8>> = outs.iter().map(|&bytes| vec![0xa5; bytes]).collect();
    let bases: Vec<*mut u8> = inputs.iter_mut().chain(&mut outs).map(Vec::as_mut_ptr).collect();
    // SAFETY: buffers have the lengths of the accesses, and belong to this test.
    unsafe { kernel.run(&bases, SCALARS, &pool, memory.scratch()) };
    outs
}

fn check(case: Case) {
    let mut random = Random(case.sizes.iter().fold(11, |sum, &size| sum * 31 + size as u64));
    let inputs = case.inputs(&mut random);
    let expected = expected(case, &inputs);
    let (relative, absolute) = if case.dtype == DType::F64 { (1e-11, 1e-12) } else { (2e-4, 2e-5) };
    let bytes = |values: &[f64]| {
        let mut bytes = vec![0; values.len() * 8];
        values.iter().enumerate().for_each(|(i, &value)| put(&mut bytes, DType::F64, i, Scalar::F64(value)));
        bytes
    };
    let widened = |got: &[u8]| -> Vec<u8> {
        let len = got.len() / case.dtype.size();
        bytes(&(0..len).map(|i| get(got, case.dtype, i).to_f64()).collect::<Vec<_>>())
    };
    let sizes: Vec<usize> = expected.iter().map(|values| values.len() * case.dtype.size()).collect();
    let (forward, backward) = (case.desc(false), case.desc(true));
    // The mask follows the operands; only the second pass has the gradient as an operand.
    let mut operands = inputs.clone();
    operands.remove(3);
    for isa in Isa::available() {
        let what = format!("{case:?} at {isa}");
        let output = run(&forward, isa, 1, &operands, &sizes[..1]);
        let gradients = run(&backward, isa, 1, &inputs, &sizes[1..]);
        assert_eq!(output, run(&forward, isa, 2, &operands, &sizes[..1]), "{what}: two threads");
        assert_eq!(gradients, run(&backward, isa, 2, &inputs, &sizes[1..]), "{what}: two threads");
        for (k, (got, expected)) in output.iter().chain(&gradients).zip(&expected).enumerate() {
            let what = format!("result {k} of {what}");
            assert_close(DType::F64, &widened(got), &bytes(expected), relative, absolute, &what);
        }
    }
}

const PLAIN: Case = Case {
    sizes: [1, 1, 1, 1, 1, 1],
    dtype: DType::F32,
    scores: Scores::Scaled,
    has_dropout: false,
    replaces_nan: false,
    has_interleaved_heads: true,
    has_shared_keys: false,
};

#[test]
fn irregular_sizes() {
    let lengths = [(1, 1), (7, 7), (33, 33), (129, 129), (1, 33), (33, 1), (7, 129), (129, 7)];
    for (queries, keys) in lengths {
        for (size, width) in [(3, 3), (16, 16), (64, 64), (80, 80), (16, 5), (33, 64)] {
            check(Case { sizes: [1, 2, queries, keys, size, width], ..PLAIN });
        }
    }
}

#[test]
fn masks_and_dropout() {
    for scores in [Scores::Plain, Scores::Scaled, Scores::Keys, Scores::Pairs, Scores::Causal] {
        for dropped in [false, true] {
            for (interleaved, shared) in [(true, false), (false, true)] {
                for dtype in [DType::F32, DType::F64] {
                    let sizes = [2, 3, 9, 35, 8, 12];
                    check(Case {
                        sizes,
                        dtype,
                        scores,
                        has_dropout: dropped,
                        replaces_nan: false,
                        has_interleaved_heads: interleaved,
                        has_shared_keys: shared,
                    });
                }
            }
        }
    }
}

/// The softmax of queries that see no key is NaN. If NaN is replaced by zero, all gradients are finite.
#[test]
fn queries_without_visible_keys() {
    for scores in [Scores::Pairs, Scores::Keys, Scores::Scaled] {
        for dropped in [false, true] {
            for dtype in [DType::F32, DType::F64] {
                for sizes in [[2, 3, 9, 35, 8, 12], [1, 2, 5, 1, 4, 4]] {
                    let case =
                        Case { sizes, dtype, scores, has_dropout: dropped, replaces_nan: true, ..PLAIN };
                    check(case);
                    let expected = expected(case, &case.inputs(&mut Random(3)));
                    assert!(expected.iter().flatten().all(|value| value.is_finite()), "{case:?}");
                }
            }
        }
    }
    // Several parts of queries.
    check(Case { sizes: [1, 1, 260, 130, 20, 36], scores: Scores::Pairs, replaces_nan: true, ..PLAIN });
}

/// With few heads, queries and the sums of the gradients of keys and values are divided into parts. Many heads are
/// grouped.
#[test]
fn heads_are_split_or_grouped() {
    for scores in [Scores::Scaled, Scores::Pairs] {
        check(Case { sizes: [1, 1, 500, 260, 20, 36], scores, ..PLAIN });
        check(Case { sizes: [1, 3, 130, 140, 64, 64], scores, has_dropout: true, ..PLAIN });
        check(Case { sizes: [30, 5, 5, 6, 4, 4], scores, has_dropout: true, ..PLAIN });
    }
    check(Case { sizes: [1, 1, 1, 2000, 8, 8], ..PLAIN });
}

#[test]
fn nan_affects_its_query_only() {
    let case = Case { sizes: [1, 2, 9, 40, 8, 8], scores: Scores::Scaled, ..PLAIN };
    let mut inputs = case.inputs(&mut Random(3));
    let desc = case.desc(false);
    let broken = 4 * desc.q.strides[2] as usize;
    put(&mut inputs[0], case.dtype, broken, Scalar::F64(f64::NAN));
    let reference = expected(case, &inputs);
    inputs.remove(3);
    for isa in Isa::available() {
        let output = run(&desc, isa, 1, &inputs, &[reference[0].len() * 4]);
        let nan: Vec<bool> = floats(&output[0]).iter().map(|value| value.is_nan()).collect();
        let expected: Vec<bool> = reference[0].iter().map(|value| value.is_nan()).collect();
        assert_eq!(nan, expected, "{isa}");
        assert_eq!(nan.iter().filter(|&&nan| nan).count(), 8);
    }
}

/// Blocks skip keys that a mask hides, with and without parts of heads.
#[test]
fn masked_keys_are_skipped() {
    let scores = Scores::Later;
    for sizes in
        [[2, 3, 40, 40, 8, 12], [1, 1, 500, 260, 20, 36], [1, 2, 150, 333, 8, 8], [9, 2, 260, 270, 8, 8]]
    {
        check(Case { sizes, scores, ..PLAIN });
    }
    check(Case { sizes: [1, 2, 300, 300, 8, 8], scores, dtype: DType::F64, ..PLAIN });
    check(Case { sizes: [1, 2, 150, 150, 8, 8], scores, has_dropout: true, ..PLAIN });
}

/// Zero times NaN or infinity is NaN, so keys are skipped only if all values are finite.
#[test]
fn masked_nonfinite_values_propagate() {
    let case = Case { sizes: [1, 1, 150, 150, 4, 4], scores: Scores::Later, ..PLAIN };
    let last = 149 * 4;
    for (operand, value) in
        [(2, f64::NAN), (2, f64::INFINITY), (3, f64::NEG_INFINITY), (1, f64::NAN), (0, 1e30)]
    {
        let mut inputs = case.inputs(&mut Random(3));
        put(&mut inputs[operand], case.dtype, last, Scalar::F64(value));
        let reference = expected(case, &inputs);
        let sizes: Vec<usize> = reference.iter().map(|values| values.len() * 4).collect();
        let mut operands = inputs.clone();
        operands.remove(3);
        for isa in Isa::available() {
            let mut got = run(&case.desc(false), isa, 1, &operands, &sizes[..1]);
            got.extend(run(&case.desc(true), isa, 1, &inputs, &sizes[1..]));
            for (k, (got, reference)) in got.iter().zip(&reference).enumerate() {
                let nan: Vec<bool> = floats(got).iter().map(|value| value.is_nan()).collect();
                let expected: Vec<bool> = reference.iter().map(|value| value.is_nan()).collect();
                assert_eq!(nan, expected, "result {k} with {value} in operand {operand} at {isa}");
            }
        }
    }
}

#[test]
fn only_required_gradients_are_computed() {
    let case = Case { sizes: [1, 2, 9, 40, 8, 8], has_dropout: true, ..PLAIN };
    let inputs = case.inputs(&mut Random(5));
    let full_desc = case.desc(true);
    let sizes: Vec<usize> = expected(case, &inputs)[1..].iter().map(|values| values.len() * 4).collect();
    for isa in Isa::available() {
        let full = run(&full_desc, isa, 1, &inputs, &sizes);
        for mask in 0..8 {
            let mut desc = full_desc.clone();
            let AttentionPass::Gradients(gradients) = &mut desc.pass else { unreachable!() };
            let AttentionGradients { q, k, v, .. } = &mut **gradients;
            let mut bytes = Vec::new();
            for (bit, result) in [q, k, v].into_iter().enumerate() {
                if mask >> bit & 1 == 0 {
                    *result = None;
                } else {
                    bytes.push(bit);
                }
            }
            let outs: Vec<usize> = bytes.iter().map(|&bit| sizes[bit]).collect();
            let some = run(&desc, isa, 1, &inputs, &outs);
            for (got, bit) in some.iter().zip(bytes) {
                assert_eq!(*got, full[bit], "gradient {bit} at {isa}");
            }
        }
    }
}

#[test]
fn invalid_descriptions_are_rejected() {
    let good = Case { sizes: [2, 3, 9, 35, 8, 12], ..PLAIN }.desc(true);
    let refused = |change: &dyn Fn(&mut AttentionDesc)| {
        let mut desc = good.clone();
        change(&mut desc);
        AttentionKernel::new(&desc, Isa::PORTABLE).unwrap_err()
    };
    assert!(AttentionKernel::new(&good, Isa::PORTABLE).is_ok());
    refused(&|desc| desc.q.dtype = DType::F16);
    refused(&|desc| desc.k.dtype = DType::F64);
    refused(&|desc| desc.size = 9);
    refused(&|desc| desc.width = 0);
    refused(&|desc| desc.v.offset = 1);
    refused(&|desc| desc.scores.inner = 1);
    refused(&|desc| desc.weights.dims[2] = 8);
    let scores = Access::contiguous(DType::F32, &[2, 3, 9, 35]);
    let stored = refused(&|desc| desc.scores.stores.push(scores.clone()));
    assert_eq!(stored, "a nest over scores must have exactly 1 result and no stores");
}

/// Each nest has one accumulator; the gradient of the weights has two.
#[test]
fn accumulator_counts_are_checked() {
    let case = Case { sizes: [2, 3, 9, 35, 8, 12], ..PLAIN };
    let (forward, backward) = (case.desc(false), case.desc(true));
    let refused = |desc: &AttentionDesc, change: &dyn Fn(&mut AttentionDesc)| {
        let mut desc = desc.clone();
        change(&mut desc);
        AttentionKernel::new(&desc, Isa::PORTABLE).unwrap_err()
    };
    let of_output = |desc: &mut AttentionDesc, loads: Vec<Load>| {
        let AttentionPass::Output(nest) = &mut desc.pass else { unreachable!("forward") };
        nest.loads = loads;
    };
    let of_weights = |desc: &mut AttentionDesc, loads: Vec<Load>| {
        let AttentionPass::Gradients(gradients) = &mut desc.pass else { unreachable!("backward") };
        gradients.weights.loads = loads;
    };
    let accumulator = Load::Accumulator(DType::F32);
    let [scores, output] =
        [35, 12].map(|elements| Load::Buffer(Access::contiguous(DType::F32, &[2, 3, 9, elements])));
    let not_one = "a nest must have 1 accumulators of type float32";
    let not_two = "a nest must have 2 accumulators of type float32";
    let message = "accumulators must precede the loads of buffers";
    for n in [0, 2] {
        let loads = vec![accumulator.clone(); n];
        assert_eq!(refused(&forward, &|desc| desc.scores.loads.clone_from(&loads)), not_one);
        assert_eq!(refused(&forward, &|desc| desc.weights.loads.clone_from(&loads)), not_one);
        assert_eq!(refused(&forward, &|desc| of_output(desc, loads.clone())), not_one);
    }
    for n in [1, 3] {
        let loads = vec![accumulator.clone(); n];
        assert_eq!(refused(&backward, &|desc| of_weights(desc, loads.clone())), not_two);
    }
    let doubles = vec![accumulator.clone(), Load::Accumulator(DType::F64)];
    assert_eq!(refused(&backward, &|desc| of_weights(desc, doubles.clone())), not_two);
    let loads = |buffer: &Load| vec![accumulator.clone(), buffer.clone(), accumulator.clone()];
    assert_eq!(refused(&forward, &|desc| desc.scores.loads = loads(&scores)), message);
    assert_eq!(refused(&forward, &|desc| of_output(desc, loads(&output))), message);
    assert_eq!(refused(&backward, &|desc| of_weights(desc, loads(&scores))), not_two);
}
