//! Cases of further operators: functions, reductions, normalizations, indices, shapes, sampling and transforms.

use ortrain_graph::{Attrs, DType, Tensor};

use crate::cases::{single, with_ints};
use crate::{Case, CaseBuilder, Fill};

use Fill::{Positive, Signed};

/// Returns `count` points inside (-1, 1).
fn points_inside_unit(count: usize) -> Fill {
    Fill::Exactly((0..count).map(|k| 0.9 * (1.0 + k as f64 * 2.399_963).sin()).collect())
}

fn functions(cases: &mut Vec<Case>) {
    let dims = &[3, 4][..];
    for op in ["Reciprocal", "Atan", "Sinh", "Cosh", "Asinh", "Swish", "Shrink"] {
        cases.push(single(op, "a matrix", &[(dims, Signed)], Attrs::new()));
        cases.push(single(op, "a scalar", &[(&[], Positive)], Attrs::new()));
    }
    for op in ["Tan", "Asin", "Acos", "Atanh"] {
        cases.push(single(op, "inside (-1, 1)", &[(dims, points_inside_unit(12))], Attrs::new()));
    }
    let above = Fill::Exactly((0..12).map(|k| 1.2 + 0.37 * f64::from(k)).collect());
    cases.push(single("Acosh", "above 1", &[(dims, above)], Attrs::new()));
    cases.push(single("Swish", "a slope", &[(dims, Signed)], Attrs::new().with("alpha", -0.7f32)));
    let shrink = Attrs::new().with("bias", 0.3f32).with("lambd", 0.8f32);
    cases.push(single("Shrink", "bias and lambd", &[(dims, Signed)], shrink));
    let gated = [(dims, Signed), (dims, Signed)];
    cases.push(single("SwiGLU", "a slope", &gated, Attrs::new().with("alpha", 1.3f32)));
    for op in ["Max", "Min", "Mean"] {
        let three = [(&[2, 3][..], Signed), (&[3][..], Signed), (&[2, 1][..], Positive)];
        for count in 1..=3 {
            cases.push(single(op, &format!("{count} operands"), &three[..count], Attrs::new()));
        }
        let mut b = CaseBuilder::new(op, "one value three times, dynamic batch").dynamic();
        let x = b.float(&[2, 3], &Signed);
        let y = b.node(op, &[x, x, x], Attrs::new());
        cases.push(b.outputs(&[y]));
    }
    for fmod in [0i64, 1] {
        let operands = [(&[2, 3][..], Signed), (&[3][..], Positive)];
        let attrs = Attrs::new().with("fmod", fmod);
        cases.push(single("Mod", &format!("fmod {fmod}"), &operands, attrs));
    }
    for op in ["Floor", "Ceil", "Round"] {
        let mut b = CaseBuilder::new(op, "passes nothing back");
        let x = b.float(dims, &Signed);
        let result = b.node(op, &[x], Attrs::new());
        let y = b.node("Mul", &[result, x], Attrs::new());
        cases.push(b.outputs(&[y]));
    }
    let mut b = CaseBuilder::new("CastLike", "to float64 and back");
    let x = b.float(dims, &Signed);
    let wide = b.constant(Tensor::filled(DType::F64, &[1], 0.0));
    let wide = b.node("CastLike", &[x, wide], Attrs::new());
    let y = b.node("CastLike", &[wide, x], Attrs::new());
    let y = b.node("Mul", &[y, x], Attrs::new());
    cases.push(b.outputs(&[y]));
}

fn reductions(cases: &mut Vec<Case>) {
    for (op, fill) in [
        ("ReduceProd", Signed),
        ("ReduceL1", Signed),
        ("ReduceL2", Signed),
        ("ReduceSumSquare", Signed),
        ("ReduceLogSum", Positive),
        ("ReduceLogSumExp", Signed),
    ] {
        for keepdims in [0i64, 1] {
            let attrs = Attrs::new().with("keepdims", keepdims);
            for axes in [&[0i64][..], &[1], &[-1, 0], &[0, 1, 2]] {
                let mut b = CaseBuilder::new(op, &format!("axes {axes:?} keepdims {keepdims}"));
                let (x, axes) = (b.float(&[2, 3, 4], &fill), b.ints(axes));
                let y = b.node(op, &[x, axes], attrs.clone());
                cases.push(b.outputs(&[y]));
            }
            let label = format!("every axis, keepdims {keepdims}");
            cases.push(single(op, &label, &[(&[2, 3], fill.clone())], attrs.clone()));
            let mut b = CaseBuilder::new(op, &format!("dynamic batch, keepdims {keepdims}")).dynamic();
            let (x, axes) = (b.float(&[3, 5], &fill), b.ints(&[0]));
            let y = b.node(op, &[x, axes], attrs.clone());
            cases.push(b.outputs(&[y]));
        }
        let noop = Attrs::new().with("noop_with_empty_axes", 1i64);
        cases.push(single(op, "no axes, no reduction", &[(&[2, 3], fill.clone())], noop));
        let mut b = CaseBuilder::new(op, "size 1");
        let (x, axes) = (b.float(&[2, 1, 3], &fill), b.ints(&[1]));
        let y = b.node(op, &[x, axes], Attrs::new());
        cases.push(b.outputs(&[y]));
    }
    for op in ["CumSum", "CumProd"] {
        for (exclusive, reverse) in [(0i64, 0i64), (1, 0), (0, 1), (1, 1)] {
            for axis in [0, 1, -1] {
                let mut b = CaseBuilder::new(op, &format!("axis {axis} {exclusive} {reverse}")).dynamic();
                let x = b.float(&[3, 5, 2], &Signed);
                let axis = b.constant(Tensor::i64(&[], &[axis]));
                let attrs = Attrs::new().with("exclusive", exclusive).with("reverse", reverse);
                let y = b.node(op, &[x, axis], attrs);
                cases.push(b.outputs(&[y]));
            }
        }
    }
    for op in ["ArgMax", "ArgMin"] {
        let mut b = CaseBuilder::new(op, "what is taken there").dynamic();
        let x = b.float(&[3, 4], &Signed);
        let at = b.node(op, &[x], Attrs::new().with("axis", 1i64));
        let y = b.node("GatherElements", &[x, at], Attrs::new().with("axis", 1i64));
        cases.push(b.outputs(&[y, at]));
    }
    let mut b = CaseBuilder::new("Hardmax", "passes nothing back");
    let x = b.float(&[3, 4], &Signed);
    let mask = b.node("Hardmax", &[x], Attrs::new());
    let y = b.node("Mul", &[mask, x], Attrs::new());
    cases.push(b.outputs(&[y]));
}

fn normalizations(cases: &mut Vec<Case>) {
    for (op, attrs) in [
        ("InstanceNormalization", Attrs::new()),
        ("GroupNormalization", Attrs::new().with("num_groups", 2i64)),
    ] {
        for dims in [&[2, 4, 5][..], &[3, 4, 2, 3]] {
            let mut b = CaseBuilder::new(op, &format!("{dims:?}, dynamic batch")).dynamic();
            let x = b.float(dims, &Signed);
            let mut b = b.fixed();
            let (scale, bias) = (b.float(&[4], &Signed), b.float(&[4], &Signed));
            let y = b.node(op, &[x, scale, bias], attrs.clone());
            cases.push(b.outputs(&[y]));
        }
    }
    let axes = Attrs::new().with("axes", vec![1i64, 2]);
    cases.push(single("MeanVarianceNormalization", "two axes", &[(&[3, 2, 5], Signed)], axes));
    for p in [1i64, 2] {
        let attrs = Attrs::new().with("p", p).with("axis", 1i64);
        cases.push(single("LpNormalization", &format!("p {p}"), &[(&[2, 3, 2], Signed)], attrs));
    }
    for p in [1i64, 2, 3] {
        let attrs = Attrs::new().with("p", p);
        let dims = &[2, 2, 4, 3][..];
        cases.push(single("GlobalLpPool", &format!("p {p}"), &[(dims, Signed)], attrs.clone()));
        let window = attrs.with("kernel_shape", vec![2i64, 2]).with("pads", vec![1i64, 0, 0, 1]);
        cases.push(single("LpPool", &format!("p {p}"), &[(dims, Signed)], window));
    }
    for reduction in ["mean", "sum", "none"] {
        for ignore in [None, Some(1i64)] {
            for weighted in [false, true] {
                const OP: &str = "NegativeLogLikelihoodLoss";
                let name = format!("{reduction} ignore {ignore:?} weighted {weighted}");
                let mut b = CaseBuilder::new(OP, &name).dynamic();
                let x = b.float(&[4, 3], &Signed);
                let labels = b.input(DType::I64, &[4], &Fill::Exactly(vec![0.0, 2.0, 1.0, 2.0]));
                let weights = weighted.then(|| b.constant(Tensor::f32(&[3], &[0.5, 1.5, 1.0])));
                let mut attrs = Attrs::new().with("reduction", reduction);
                if let Some(ignore) = ignore {
                    attrs = attrs.with("ignore_index", ignore);
                }
                let inputs: Vec<_> = [x, labels].into_iter().chain(weights).collect();
                let y = b.node(OP, &inputs, attrs);
                cases.push(b.outputs(&[y]));
            }
        }
    }
}

fn indices(cases: &mut Vec<Case>) {
    let axis = |axis: i64| Attrs::new().with("axis", axis);
    for (at, indices) in [(0, vec![2.0, 0.0, -1.0, 1.0, 2.0, 2.0]), (1, vec![1.0, 0.0, 1.0, -2.0, 0.0, 1.0])]
    {
        let mut b = CaseBuilder::new("GatherElements", &format!("axis {at}"));
        let x = b.float(&[3, 2], &Signed);
        let i = b.input(DType::I64, &[3, 2], &Fill::Exactly(indices));
        let y = b.node("GatherElements", &[x, i], axis(at));
        cases.push(b.outputs(&[y]));
    }
    for (dims, values, batch) in [
        (&[2, 1][..], vec![1.0, -1.0], 0i64),
        (&[3, 2], vec![0.0, 1.0, 2.0, -1.0, 0.0, 1.0], 0),
        (&[3, 1], vec![1.0, 0.0, 1.0], 1),
    ] {
        let mut b = CaseBuilder::new("GatherND", &format!("{dims:?} batch_dims {batch}"));
        let x = b.float(&[3, 2, 2], &Signed);
        let i = b.input(DType::I64, dims, &Fill::Exactly(values));
        let y = b.node("GatherND", &[x, i], Attrs::new().with("batch_dims", batch));
        cases.push(b.outputs(&[y]));
    }
    for reduction in ["none", "add", "mul", "max", "min"] {
        let second = if reduction == "none" { 0.0 } else { 2.0 };
        let attrs = Attrs::new().with("reduction", reduction);
        let mut b = CaseBuilder::new("ScatterElements", reduction);
        let x = b.float(&[3, 3], &Signed);
        let i = b.input(DType::I64, &[2, 2], &Fill::Exactly(vec![-1.0, 1.0, second, 0.0]));
        let u = b.float(&[2, 2], &Signed);
        let y = b.node("ScatterElements", &[x, i, u], attrs.clone());
        cases.push(b.outputs(&[y]));
        let mut b = CaseBuilder::new("ScatterND", reduction);
        let x = b.float(&[3, 2], &Signed);
        let i = b.input(DType::I64, &[2, 1], &Fill::Exactly(vec![2.0, second]));
        let u = b.float(&[2, 2], &Signed);
        let y = b.node("ScatterND", &[x, i, u], attrs);
        cases.push(b.outputs(&[y]));
    }
    for (at, largest) in [(0i64, 1i64), (1, 0), (-1, 1)] {
        let mut b = CaseBuilder::new("TopK", &format!("axis {at} largest {largest}")).dynamic();
        let (x, k) = (b.float(&[3, 4, 5], &Signed), b.ints(&[2]));
        let y = b.node_with("", "TopK", &[Some(x), Some(k)], 2, axis(at).with("largest", largest));
        cases.push(b.outputs(&y));
    }
    let mut b = CaseBuilder::new("OneHot", "values");
    let i = b.input(DType::I64, &[4], &Fill::Exactly(vec![0.0, 2.0, -1.0, 5.0]));
    let depth = b.constant(Tensor::i64(&[], &[3]));
    let values = b.float(&[2], &Signed);
    let y = b.node("OneHot", &[i, depth, values], axis(0));
    cases.push(b.outputs(&[y]));
}

fn shapes(cases: &mut Vec<Case>) {
    for (dims, repeats) in [(&[2, 3][..], &[1i64, 3][..]), (&[3], &[2]), (&[2, 1, 2], &[2, 3, 1])] {
        cases.push(with_ints("Tile", &format!("{dims:?} {repeats:?}"), dims, &[repeats], Attrs::new()));
    }
    let mut b = CaseBuilder::new("Tile", "dynamic batch").dynamic();
    let (x, repeats) = (b.float(&[2, 3], &Signed), b.ints(&[2, 2]));
    let y = b.node("Tile", &[x, repeats], Attrs::new());
    cases.push(b.outputs(&[y]));
    for (upper, k) in [(1i64, None), (0, Some(1)), (1, Some(-1))] {
        for domain in ["", "com.microsoft"] {
            let mut b = CaseBuilder::new("Trilu", &format!("{domain:?} upper {upper} k {k:?}")).dynamic();
            let x = b.float(&[2, 3, 4], &Signed);
            let k = k.map(|k| b.constant(Tensor::i64(&[], &[k])));
            let inputs: Vec<_> = [Some(x)].into_iter().chain(k.map(Some)).collect();
            let y = b.node_with(domain, "Trilu", &inputs, 1, Attrs::new().with("upper", upper));
            cases.push(b.outputs(&y));
        }
    }
    for mode in ["DCR", "CRD"] {
        let attrs = Attrs::new().with("blocksize", 2i64).with("mode", mode);
        cases.push(single("SpaceToDepth", mode, &[(&[2, 3, 4, 2], Signed)], attrs.clone()));
        cases.push(single("DepthToSpace", mode, &[(&[2, 8, 1, 3], Signed)], attrs));
    }
    for used in [&[0usize, 1, 2][..], &[1]] {
        let mut b = CaseBuilder::new("Split", &format!("parts {used:?}")).dynamic();
        let (x, lengths) = (b.float(&[3, 6], &Signed), b.ints(&[1, 3, 2]));
        let parts = b.node_with("", "Split", &[Some(x), Some(lengths)], 3, Attrs::new().with("axis", 1i64));
        let parts: Vec<_> = used.iter().map(|&k| parts[k]).collect();
        cases.push(b.outputs(&parts));
    }
    let mut b = CaseBuilder::new("Split", "three parts, the last shorter");
    let x = b.float(&[5, 2], &Signed);
    let parts = b.node_with("", "Split", &[Some(x)], 3, Attrs::new().with("num_outputs", 3i64));
    cases.push(b.outputs(&parts));
    let mut b = CaseBuilder::new("Range", "positions added to rows").dynamic();
    let x = b.float(&[4, 1], &Signed);
    let shape = b.node("Shape", &[x], Attrs::new());
    let [zero, one] = [0, 1].map(|k| b.constant(Tensor::i64(&[], &[k])));
    let rows = b.node("Gather", &[shape, zero], Attrs::new());
    let range = b.node("Range", &[zero, rows, one], Attrs::new());
    let cast = Attrs::new().with("to", i64::from(DType::F32.to_onnx()));
    let positions = b.node("Cast", &[range], cast);
    let y = b.node("Mul", &[x, positions], Attrs::new());
    cases.push(b.outputs(&[y]));
}

fn position_cases(cases: &mut Vec<Case>) {
    for mode in ["linear", "cubic"] {
        for padding in ["zeros", "border", "reflection"] {
            for aligned in [0i64, 1] {
                let name = format!("{mode} {padding} {aligned}");
                let mut b = CaseBuilder::new("GridSample", &name).dynamic();
                let x = b.float(&[2, 2, 3, 4], &Signed);
                let spots = [0.11, -0.37, -0.83, 0.52, 1.21, -1.43, 0.71, 0.06, -0.29, 0.94, -1.17, 0.23];
                let grid = b.float(&[2, 3, 1, 2], &Fill::Exactly(spots.to_vec()));
                let attrs = Attrs::new()
                    .with("mode", mode)
                    .with("padding_mode", padding)
                    .with("align_corners", aligned);
                let y = b.node("GridSample", &[x, grid], attrs);
                cases.push(b.outputs(&[y]));
            }
        }
    }
    for aligned in [0i64, 1] {
        let mut b = CaseBuilder::new("AffineGrid", &format!("corners {aligned}"));
        let (theta, size) = (b.float(&[2, 2, 3], &Signed), b.ints(&[2, 1, 3, 2]));
        let y = b.node("AffineGrid", &[theta, size], Attrs::new().with("align_corners", aligned));
        cases.push(b.outputs(&[y]));
    }
    let mut b = CaseBuilder::new("Col2Im", "blocks that overlap, dynamic batch").dynamic();
    let (x, image, block) = (b.float(&[2, 8, 6], &Signed), b.ints(&[3, 4]), b.ints(&[2, 2]));
    let y = b.node("Col2Im", &[x, image, block], Attrs::new());
    cases.push(b.outputs(&[y]));
    for size in [1, 2, 4] {
        let mut b = CaseBuilder::new("Det", &format!("matrices of {size}, dynamic batch")).dynamic();
        let x = b.float(&[2, size, size], &Signed);
        let y = b.node("Det", &[x], Attrs::new());
        cases.push(b.outputs(&[y]));
    }
    for (parts, inverse, onesided) in [(1, 0i64, 0i64), (1, 0, 1), (2, 0, 0), (2, 1, 0), (2, 1, 1)] {
        let mut b = CaseBuilder::new("DFT", &format!("{parts} parts {inverse} {onesided}")).dynamic();
        let x = b.float(&[2, 5, parts], &Signed);
        let attrs = Attrs::new().with("inverse", inverse).with("onesided", onesided);
        let y = b.node("DFT", &[x], attrs);
        cases.push(b.outputs(&[y]));
    }
    for activation in ["none", "silu"] {
        let mut b = CaseBuilder::new("CausalConvWithState", activation);
        let (x, kernels) = (b.float(&[2, 3, 4], &Signed), b.float(&[3, 1, 3], &Signed));
        let (bias, past) = (b.float(&[3], &Signed), b.float(&[2, 3, 2], &Signed));
        let inputs = [x, kernels, bias, past].map(Some);
        let attrs = Attrs::new().with("activation", activation);
        let y = b.node_with("", "CausalConvWithState", &inputs, 2, attrs);
        cases.push(b.outputs(&y));
    }
}

/// Adds the cases of this file.
pub(crate) fn add(cases: &mut Vec<Case>) {
    functions(cases);
    reductions(cases);
    normalizations(cases);
    indices(cases);
    shapes(cases);
    position_cases(cases);
}
