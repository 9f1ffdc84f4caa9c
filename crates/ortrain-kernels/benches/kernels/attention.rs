//! Cases of attention and its gradients. In memory, the axis of heads is between positions and elements, as projections
//! store it.

use ortrain_expr::{Access, Builder, DType, Load, Nest, Precision, Reg, Type};
use ortrain_kernels::{AttentionDesc, AttentionGradients, AttentionKernel, AttentionPass};

use crate::case::{Buffers, Case, SCALARS};

const F32: DType = DType::F32;

/// Epilogue of the scores, after scaling.
#[derive(Clone, Copy, PartialEq)]
enum Scores {
    Plain,
    /// Adds a number for each key.
    Masked,
    /// Adds a number for each pair, which hides later keys.
    Causal,
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let shapes = [
        ("bert_mini", [8, 4, 128, 64], [Scores::Plain, Scores::Masked]),
        ("gpt2_small6", [4, 6, 256, 64], [Scores::Plain, Scores::Causal]),
        ("odd", [2, 3, 197, 80], [Scores::Plain, Scores::Causal]),
    ];
    for (what, sizes, kinds) in shapes {
        for scores in kinds {
            for backward in [false, true] {
                cases.push(case(what, sizes, scores, backward));
            }
        }
    }
    cases
}

/// Returns a case; `sizes` are batch, heads, positions, elements of a query, key or value.
fn case(what: &str, sizes: [usize; 4], scores: Scores, backward: bool) -> Case {
    let [batch, heads, length, size] = sizes;
    let desc = desc(sizes, scores, backward);
    let (inputs, outputs) = if backward { (4, 3) } else { (3, 1) };
    let mut bytes = vec![desc.q.len * 4; inputs];
    bytes.extend(desc.scores.load_operands().map(|mask| mask.len * 4));
    bytes.resize(bytes.len() + outputs, desc.q.len * 4);
    let kind = match scores {
        Scores::Plain => "plain",
        Scores::Masked => "masked",
        Scores::Causal => "causal",
    };
    // Products of all scores, also of hidden ones.
    let products = if backward { 5 } else { 2 };
    Case {
        name: format!(
            "attention {what} {kind} {} {batch}x{heads}x{length}x{size}",
            if backward { "backward" } else { "forward" },
        ),
        flops: (2 * products * batch * heads * length * length * size) as f64,
        rate: 1.0,
        precision: Precision::F32,
        bytes: bytes.iter().sum::<usize>() as f64,
        compile: Box::new(move |isa, threads| {
            let kernel = AttentionKernel::new(&desc, isa).expect("valid description");
            let mut buffers = Buffers::new(&bytes, kernel.scratch_bytes(threads));
            if scores == Scores::Causal {
                let mask = buffers.bases()[inputs].cast::<f32>();
                for (i, j) in (0..length).flat_map(|i| (0..length).map(move |j| (i, j))) {
                    // SAFETY: the mask is the first buffer after the operands, and has a number for each pair.
                    unsafe { mask.add(i * length + j).write(if j > i { -1e10 } else { 0.0 }) };
                }
            }
            Box::new(move |pool| {
                // SAFETY: buffers have the lengths of the accesses, and belong to this case.
                unsafe { kernel.run(&buffers.bases(), SCALARS, pool, buffers.scratch()) };
            })
        }),
    }
}

fn desc(sizes: [usize; 4], scores: Scores, backward: bool) -> AttentionDesc {
    let [batch, heads, length, size] = sizes;
    let operand = Access {
        dtype: F32,
        offset: 0,
        strides: [length * heads * size, size, heads * size, 1]
            .into_iter()
            .map(|step| step as isize)
            .collect(),
        len: batch * heads * length * size,
    };
    let square = [batch, heads, length, length];
    let result = || {
        let nest = nest(&[batch, heads, length, size], 1, None, |_, x| x[0]);
        Nest { stores: vec![operand.clone()], ..nest }
    };
    let factor = 1.0 / (size as f64).sqrt();
    let mask = match scores {
        Scores::Plain => None,
        Scores::Masked => Some(Access::broadcast(F32, &[batch, 1, 1, length], &square)),
        Scores::Causal => Some(Access::broadcast(F32, &[length, length], &square)),
    };
    let of_scores = nest(&square, 1, mask, |b, x| {
        let factor = b.constant(Type::F32, factor);
        let scaled = b.mul(x[0], factor);
        x.get(1).map_or(scaled, |&mask| b.add(scaled, mask))
    });
    let gradients = nest(&square, 1, None, |b, x| {
        let factor = b.constant(Type::F32, factor);
        b.mul(x[0], factor)
    });
    let pass = if backward {
        AttentionPass::Gradients(Box::new(AttentionGradients {
            output_gradient: operand.clone(),
            weights: nest(&square, 2, None, |_, x| x[0]),
            softmax: nest(&square, 1, None, |_, x| x[0]),
            scores: gradients,
            q: Some(result()),
            k: Some(result()),
            v: Some(result()),
        }))
    } else {
        AttentionPass::Output(Box::new(result()))
    };
    AttentionDesc {
        size,
        width: size,
        q: operand.clone(),
        k: operand.clone(),
        v: operand.clone(),
        scores: of_scores,
        weights: nest(&square, 1, None, |_, x| x[0]),
        pass,
    }
}

/// Returns a nest over `dims` with some accumulators. It has no store, because another computation takes the result.
fn nest(
    dims: &[usize],
    accumulators: usize,
    more: Option<Access>,
    f: impl FnOnce(&mut Builder, &[Reg]) -> Reg,
) -> Nest {
    let accumulators = std::iter::repeat_n(Load::Accumulator(F32), accumulators);
    let loads: Vec<Load> = accumulators.chain(more.map(Load::Buffer)).collect();
    let mut b = Builder::new();
    let x: Vec<Reg> = (0..loads.len()).map(|slot| b.load(slot, Type::F32)).collect();
    let result = f(&mut b, &x);
    Nest {
        dims: dims.iter().copied().collect(),
        inner: 0,
        segments: None,
        loads,
        expr: b.finish(&[result]),
        reductions: Vec::new(),
        stores: Vec::new(),
    }
}
