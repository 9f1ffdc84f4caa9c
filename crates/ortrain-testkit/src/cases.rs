//! List of cases: every operator, its attributes, broadcasting, every axis, sizes 1 and 0, values used twice,
//! shared weights, dynamic batches.

use ortrain_graph::{Attrs, DType, Tensor, ValueId};

use crate::{Case, CaseBuilder, Fill};

const F: DType = DType::F32;

/// Creates a case with one node of `ai.onnx` and one result.
pub(crate) fn single(op: &str, name: &str, inputs: &[(&[usize], Fill)], attrs: Attrs) -> Case {
    let mut b = CaseBuilder::new(op, name);
    let ids: Vec<ValueId> = inputs.iter().map(|(dims, fill)| b.float(dims, fill)).collect();
    let y = b.node(op, &ids, attrs);
    b.outputs(&[y])
}

/// Creates a case with one node. Its further inputs are constant int64 vectors.
pub(crate) fn with_ints(op: &str, name: &str, dims: &[usize], ints: &[&[i64]], attrs: Attrs) -> Case {
    let mut b = CaseBuilder::new(op, name);
    let mut ids = vec![b.float(dims, &Fill::Signed)];
    ids.extend(ints.iter().map(|values| b.ints(values)).collect::<Vec<_>>());
    let y = b.node(op, &ids, attrs);
    b.outputs(&[y])
}

fn unary(cases: &mut Vec<Case>) {
    use Fill::{Positive, Signed};
    for (op, fill) in [
        ("Neg", Signed),
        ("Abs", Signed),
        ("Exp", Signed),
        ("Log", Positive),
        ("Sqrt", Positive),
        ("Sin", Signed),
        ("Cos", Signed),
        ("Erf", Signed),
        ("Relu", Signed),
        ("Sigmoid", Signed),
        ("Tanh", Signed),
        ("Gelu", Signed),
        ("Identity", Signed),
        ("LeakyRelu", Signed),
        ("Elu", Signed),
        ("Selu", Signed),
        ("Celu", Signed),
        ("Softplus", Signed),
        ("Softsign", Signed),
        ("HardSigmoid", Signed),
        ("HardSwish", Signed),
        ("Mish", Signed),
        ("ThresholdedRelu", Signed),
    ] {
        for dims in [&[2, 3][..], &[], &[1], &[5, 0], &[2, 1, 7]] {
            cases.push(single(op, &format!("{dims:?}"), &[(dims, fill.clone())], Attrs::new()));
        }
        let mut b = CaseBuilder::new(op, "dynamic batch, result used twice").dynamic();
        let x = b.float(&[3, 4], &fill);
        let y = b.node(op, &[x], Attrs::new());
        let z = b.node("Mul", &[y, y], Attrs::new());
        cases.push(b.outputs(&[z, y]));
    }
    let tanh = Attrs::new().with("approximate", "tanh");
    cases.push(single("Gelu", "tanh form", &[(&[3, 5], Signed)], tanh));
    let mut b = CaseBuilder::new("QuickGelu", "two slopes").dynamic();
    let x = b.float(&[3, 5], &Signed);
    let y = b.node_with("com.microsoft", "QuickGelu", &[Some(x)], 1, Attrs::new());
    let steep = Attrs::new().with("alpha", 2.5f32);
    let z = b.node_with("com.microsoft", "QuickGelu", &[Some(x)], 1, steep);
    cases.push(b.outputs(&[y[0], z[0]]));
    let mut b = CaseBuilder::new("Sign", "passes nothing back");
    let x = b.float(&[2, 3], &Signed);
    let sign = b.node("Sign", &[x], Attrs::new());
    let y = b.node("Mul", &[sign, x], Attrs::new());
    cases.push(b.outputs(&[y]));
}

fn binary(cases: &mut Vec<Case>) {
    use Fill::{Positive, Signed};
    for (op, left, right) in [
        ("Add", Signed, Signed),
        ("Sub", Signed, Signed),
        ("Mul", Signed, Signed),
        ("Div", Signed, Positive),
        ("Pow", Positive, Signed),
        ("Sum", Signed, Signed),
    ] {
        for (a, b) in [
            (&[2, 3][..], &[2, 3][..]),
            (&[2, 3], &[3]),
            (&[3], &[2, 3]),
            (&[2, 1, 4], &[3, 1]),
            (&[2, 3], &[]),
            (&[], &[2, 3]),
            (&[1], &[1, 1]),
            (&[0, 3], &[3]),
            (&[4, 1], &[1, 5]),
        ] {
            let inputs = [(a, left.clone()), (b, right.clone())];
            cases.push(single(op, &format!("{a:?} and {b:?}"), &inputs, Attrs::new()));
        }
        let mut b = CaseBuilder::new(op, "one value as both operands");
        let x = b.float(&[2, 3], &Positive);
        let y = b.node(op, &[x, x], Attrs::new());
        cases.push(b.outputs(&[y]));
        let mut b = CaseBuilder::new(op, "dynamic batch").dynamic();
        let x = b.float(&[3, 4], &left);
        let z = b.float(&[3, 4], &right);
        let y = b.node(op, &[x, z], Attrs::new());
        cases.push(b.outputs(&[y]));
    }
    let three = [(&[2, 3][..], Signed), (&[3][..], Signed), (&[2, 1][..], Signed)];
    cases.push(single("Sum", "three operands", &three, Attrs::new()));
    cases.push(single("Sum", "one operand", &three[..1], Attrs::new()));
    let mut b = CaseBuilder::new("Pow", "constant exponent 2, negative base");
    let x = b.float(&[2, 3], &Signed);
    let two = b.constant(Tensor::f32(&[], &[2.0]));
    let y = b.node("Pow", &[x, two], Attrs::new());
    cases.push(b.outputs(&[y]));
    let mut b = CaseBuilder::new("Pow", "integer exponents");
    let x = b.float(&[4], &Signed);
    let e = b.constant(Tensor::i64(&[4], &[0, 1, 2, 3]));
    let y = b.node("Pow", &[x, e], Attrs::new());
    cases.push(b.outputs(&[y]));
    // Without declared sizes, the axes to sum are determined when the program is compiled.
    for (a, z) in [(&[2, 3][..], &[1, 3][..]), (&[2, 1], &[2, 3]), (&[2, 3], &[2, 3])] {
        let mut b = CaseBuilder::new("Mul", &format!("undeclared sizes {a:?} and {z:?}"));
        let x = b.float(a, &Signed);
        let w = b.float(z, &Signed);
        let y = b.node("Mul", &[x, w], Attrs::new());
        let mut case = b.outputs(&[y]);
        for (k, &id) in case.graph.inputs.clone().iter().enumerate() {
            let symbols = (0..2).map(|axis| ortrain_graph::Dim::symbol(&format!("s{k}{axis}"))).collect();
            case.graph.value_mut(id).ty = ortrain_graph::ValueType::Tensor(F, Some(symbols));
        }
        cases.push(case);
    }
}

fn matmul(cases: &mut Vec<Case>) {
    use Fill::Signed;
    for (a, b) in [
        (&[2, 3][..], &[3, 4][..]),
        (&[3], &[3, 4]),
        (&[2, 3], &[3]),
        (&[3], &[3]),
        (&[2, 3, 4], &[4, 5]),
        (&[2, 3, 4], &[2, 4, 5]),
        (&[2, 1, 3, 4], &[5, 4, 2]),
        (&[4, 5], &[2, 5, 3]),
        (&[1, 1], &[1, 1]),
        (&[0, 3], &[3, 2]),
        (&[2, 0], &[0, 3]),
        (&[2, 3, 4], &[4]),
        (&[4], &[2, 4, 3]),
    ] {
        let inputs = [(a, Signed), (b, Signed)];
        cases.push(single("MatMul", &format!("{a:?} and {b:?}"), &inputs, Attrs::new()));
    }
    let mut b = CaseBuilder::new("MatMul", "dynamic batch, shared weight").dynamic();
    let x = b.float(&[3, 4], &Signed);
    let w = b.constant(Tensor::f32(&[4, 4], &(0..16).map(|k| 0.1 * k as f32 - 0.7).collect::<Vec<_>>()));
    let h = b.node("MatMul", &[x, w], Attrs::new());
    let y = b.node("MatMul", &[h, w], Attrs::new());
    cases.push(b.outputs(&[y]));
    let mut b = CaseBuilder::new("MatMul", "one weight used twice");
    let x = b.float(&[2, 3], &Signed);
    let w = b.float(&[3, 3], &Signed);
    let h = b.node("MatMul", &[x, w], Attrs::new());
    let y = b.node("MatMul", &[h, w], Attrs::new());
    cases.push(b.outputs(&[y]));

    // Every memory layout of the factors: transposed, first axis after the stack axes, or both.
    for flags in 0..16i64 {
        let [ta, tb, moved_a, moved_b] = [0, 1, 2, 3].map(|k| flags >> k & 1);
        let lie = |dims: &[usize], transposed: i64, axes: i64| {
            let (mut dims, last) = (dims.to_vec(), dims.len() - 1);
            if transposed == 1 {
                dims.swap(last - 1, last);
            }
            if axes == 1 {
                dims[..last].rotate_right(1);
            }
            dims
        };
        for (a, z) in [
            (&[2, 3, 4, 5][..], &[2, 3, 5, 2][..]),
            (&[2, 3, 4, 5], &[2, 1, 5, 2]),
            (&[3, 4, 5], &[2, 3, 5, 2]),
        ] {
            let mut b = CaseBuilder::new("FusedMatMul", &format!("{a:?} and {z:?}, flags {flags:04b}"));
            let inputs = [b.float(&lie(a, ta, moved_a), &Signed), b.float(&lie(z, tb, moved_b), &Signed)];
            let attrs = Attrs::new()
                .with("transA", ta)
                .with("transB", tb)
                .with("transBatchA", moved_a)
                .with("transBatchB", moved_b)
                .with("alpha", 0.7f32);
            let y = b.node_with("com.microsoft", "FusedMatMul", &inputs.map(Some), 1, attrs);
            cases.push(b.outputs(&y));
        }
    }

    for ta in [0i64, 1] {
        for tb in [0i64, 1] {
            for c in
                [None, Some(&[2, 4][..]), Some(&[4][..]), Some(&[2, 1][..]), Some(&[][..]), Some(&[1][..])]
            {
                let mut b = CaseBuilder::new("Gemm", &format!("transA={ta} transB={tb} C={c:?}"));
                let mut ids = vec![
                    b.float(if ta == 1 { &[3, 2] } else { &[2, 3] }, &Signed),
                    b.float(if tb == 1 { &[4, 3] } else { &[3, 4] }, &Signed),
                ];
                if let Some(dims) = c {
                    ids.push(b.float(dims, &Signed));
                }
                let attrs = Attrs::new()
                    .with("transA", ta)
                    .with("transB", tb)
                    .with("alpha", 0.5f32)
                    .with("beta", if tb == 1 { 1.0f32 } else { -1.5 });
                let y = b.node("Gemm", &ids, attrs);
                cases.push(b.outputs(&[y]));
            }
        }
    }
}

fn shapes(cases: &mut Vec<Case>) {
    use Fill::Signed;
    for (from, to) in [
        (&[2, 6][..], &[3, 4][..]),
        (&[2, 6], &[-1]),
        (&[2, 3, 4], &[0, -1]),
        (&[1], &[]),
        (&[0, 3], &[3, 0]),
    ] {
        let attrs = if from.contains(&0) { Attrs::new().with("allowzero", 1i64) } else { Attrs::new() };
        cases.push(with_ints("Reshape", &format!("{from:?} to {to:?}"), from, &[to], attrs));
    }
    for axis in -3i64..=3 {
        let attrs = Attrs::new().with("axis", axis);
        cases.push(single("Flatten", &format!("axis {axis}"), &[(&[2, 3, 4], Signed)], attrs));
    }
    for perm in [vec![0i64, 1, 2], vec![2, 1, 0], vec![1, 2, 0], vec![0, 2, 1]] {
        let attrs = Attrs::new().with("perm", perm.clone());
        cases.push(single("Transpose", &format!("{perm:?}"), &[(&[2, 3, 4], Signed)], attrs));
    }
    cases.push(single("Transpose", "reversed", &[(&[2, 3], Signed)], Attrs::new()));
    cases.push(with_ints("Squeeze", "axes 0 and -1", &[1, 3, 1], &[&[0, -1]], Attrs::new()));
    cases.push(single("Squeeze", "every axis of size 1", &[(&[1, 3, 1], Signed)], Attrs::new()));
    cases.push(with_ints("Unsqueeze", "axes 0 and -1", &[2, 3], &[&[0, -1]], Attrs::new()));
    cases.push(with_ints("Expand", "[3, 1] to [2, 3, 4]", &[3, 1], &[&[2, 3, 4]], Attrs::new()));
    cases.push(with_ints("Expand", "to a smaller shape", &[3, 4], &[&[1, 1]], Attrs::new()));
    for axis in [0i64, 1, -1] {
        let mut dims = [[2usize, 3, 4], [2, 3, 4]];
        let at = axis.rem_euclid(3) as usize;
        dims[1][at] = 1;
        let inputs = [(&dims[0][..], Signed), (&dims[1][..], Signed), (&dims[0][..], Signed)];
        cases.push(single("Concat", &format!("axis {axis}"), &inputs, Attrs::new().with("axis", axis)));
    }
    cases.push(single(
        "Concat",
        "one empty",
        &[(&[2, 0], Signed), (&[2, 3], Signed)],
        Attrs::new().with("axis", 1i64),
    ));
    let mut b = CaseBuilder::new("Concat", "dynamic batch, one value twice").dynamic();
    let x = b.float(&[2, 3], &Signed);
    let y = b.node("Concat", &[x, x], Attrs::new().with("axis", 0i64));
    cases.push(b.outputs(&[y]));
    for (name, bounds) in [
        ("both axes", [&[0i64, 1][..], &[2, 3], &[0, 1], &[1, 1]]),
        ("negative bounds", [&[-3], &[-1], &[1], &[1]]),
        ("steps", [&[0, 0], &[3, 4], &[0, 1], &[2, 3]]),
        ("negative steps", [&[-1, 3], &[i64::MIN, 0], &[0, 1], &[-1, -2]]),
        ("beyond the ends", [&[-100], &[100], &[0], &[1]]),
        ("nothing", [&[2], &[1], &[0], &[1]]),
    ] {
        cases.push(with_ints("Slice", name, &[3, 4], &bounds, Attrs::new()));
    }
    // Shape computations are folded when the program is compiled.
    let mut b = CaseBuilder::new("Reshape", "to a shape computed from the input's").dynamic();
    let x = b.float(&[4, 6], &Signed);
    let shape = b.node("Shape", &[x], Attrs::new());
    let zero = b.ints(&[0]);
    let n = b.node("Gather", &[shape, zero], Attrs::new());
    let rest = b.ints(&[2, 3]);
    let to = b.node("Concat", &[n, rest], Attrs::new().with("axis", 0i64));
    let y = b.node("Reshape", &[x, to], Attrs::new());
    cases.push(b.outputs(&[y]));
}

fn reductions(cases: &mut Vec<Case>) {
    use Fill::Signed;
    for op in ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"] {
        for keepdims in [0i64, 1] {
            let attrs = Attrs::new().with("keepdims", keepdims);
            for axes in [&[0i64][..], &[1], &[-1], &[0, 2], &[0, 1, 2], &[1, 2]] {
                let name = format!("axes {axes:?} keepdims {keepdims}");
                cases.push(with_ints(op, &name, &[2, 3, 4], &[axes], attrs.clone()));
            }
            cases.push(single(
                op,
                &format!("every axis, keepdims {keepdims}"),
                &[(&[2, 3], Signed)],
                attrs.clone(),
            ));
            cases.push(single(op, &format!("scalar, keepdims {keepdims}"), &[(&[], Signed)], attrs.clone()));
            let mut b = CaseBuilder::new(op, &format!("dynamic batch, keepdims {keepdims}")).dynamic();
            let x = b.float(&[3, 5], &Signed);
            let axes = b.ints(&[0]);
            let y = b.node(op, &[x, axes], attrs.clone());
            cases.push(b.outputs(&[y]));
        }
        let attrs = Attrs::new().with("noop_with_empty_axes", 1i64);
        cases.push(single(op, "no axes, no reduction", &[(&[2, 3], Signed)], attrs));
        cases.push(with_ints(op, "size 1", &[2, 1, 3], &[&[1]], Attrs::new()));
    }
    for op in ["ReduceSum", "ReduceMax"] {
        cases.push(with_ints(op, "empty axis", &[2, 0], &[&[1]], Attrs::new()));
    }
    for op in ["Softmax", "LogSoftmax"] {
        for axis in [-1i64, 0, 1, 2] {
            let attrs = Attrs::new().with("axis", axis);
            cases.push(single(op, &format!("axis {axis}"), &[(&[2, 3, 4], Signed)], attrs));
        }
        cases.push(single(op, "size 1", &[(&[3, 1], Signed)], Attrs::new()));
        cases.push(single(op, "no rows", &[(&[0, 3], Signed)], Attrs::new()));
        let mut b = CaseBuilder::new(op, "dynamic batch").dynamic();
        let x = b.float(&[3, 5], &Signed);
        let y = b.node(op, &[x], Attrs::new());
        cases.push(b.outputs(&[y]));
    }
}

fn losses(cases: &mut Vec<Case>) {
    const OP: &str = "SoftmaxCrossEntropyLoss";
    for reduction in ["mean", "sum", "none"] {
        for (scores, labels) in [(&[4, 3][..], &[4][..]), (&[2, 3, 2], &[2, 2]), (&[2, 3, 2, 2], &[2, 2, 2])]
        {
            for weighted in [false, true] {
                for ignore in [None, Some(1i64), Some(-1)] {
                    let name = format!("{reduction} {scores:?} weighted {weighted} ignore {ignore:?}");
                    let mut b = CaseBuilder::new(OP, &name);
                    let x = b.float(scores, &Fill::Signed);
                    let count: usize = labels.iter().product();
                    let values: Vec<f64> = (0..count)
                        .map(|k| if k == 1 && ignore == Some(-1) { -1.0 } else { (k * 2 % 3) as f64 })
                        .collect();
                    let t = b.input(DType::I64, labels, &Fill::Exactly(values));
                    let w = weighted.then(|| b.constant(Tensor::f32(&[3], &[0.5, 1.5, 1.0])));
                    let mut attrs = Attrs::new().with("reduction", reduction);
                    if let Some(ignore) = ignore {
                        attrs = attrs.with("ignore_index", ignore);
                    }
                    let inputs = [vec![Some(x), Some(t)], w.map(Some).into_iter().collect()].concat();
                    let y = b.node_with("", OP, &inputs, 2, attrs);
                    // The log-probabilities are an ordinary result: they have a gradient, too.
                    let results = if weighted { vec![y[0], y[1]] } else { vec![y[0]] };
                    cases.push(b.outputs(&results));
                }
            }
        }
    }
    let mut b = CaseBuilder::new(OP, "dynamic batch, int32 labels").dynamic();
    let x = b.float(&[4, 3], &Fill::Signed);
    let t = b.input(DType::I32, &[4], &Fill::Below(3));
    let y = b.node(OP, &[x, t], Attrs::new());
    cases.push(b.outputs(&[y]));
}

fn indexing(cases: &mut Vec<Case>) {
    for axis in [0i64, 1, -1] {
        for (dims, values) in
            [(&[][..], vec![1.0]), (&[4], vec![0.0, 1.0, 0.0, -1.0]), (&[2, 2], vec![1.0, 1.0, -2.0, 0.0])]
        {
            let mut b = CaseBuilder::new("Gather", &format!("axis {axis}, indices {dims:?}"));
            let x = b.float(&[3, 2, 3], &Fill::Signed);
            let i = b.input(DType::I64, dims, &Fill::Exactly(values));
            let y = b.node("Gather", &[x, i], Attrs::new().with("axis", axis));
            cases.push(b.outputs(&[y]));
        }
    }
    let mut b = CaseBuilder::new("Gather", "no indices");
    let x = b.float(&[3, 2], &Fill::Signed);
    let i = b.input(DType::I32, &[0], &Fill::Below(3));
    let y = b.node("Gather", &[x, i], Attrs::new());
    cases.push(b.outputs(&[y]));
    for (c, a, z) in [
        (&[2, 3][..], &[2, 3][..], &[2, 3][..]),
        (&[2, 3], &[1], &[2, 3]),
        (&[3], &[2, 3], &[]),
        (&[2, 1], &[3], &[2, 3]),
    ] {
        let mut b = CaseBuilder::new("Where", &format!("{c:?} {a:?} {z:?}"));
        let c = b.input(DType::Bool, c, &Fill::Bools);
        let x = b.float(a, &Fill::Signed);
        let w = b.float(z, &Fill::Signed);
        let y = b.node("Where", &[c, x, w], Attrs::new());
        cases.push(b.outputs(&[y]));
    }
    let mut b = CaseBuilder::new("Where", "infinity in the branch not taken");
    let x = b.float(&[4], &Fill::Exactly(vec![0.5, -0.5, 1.5, -2.0]));
    let zero = b.constant(Tensor::f32(&[], &[0.0]));
    let wall = b.constant(Tensor::f32(&[], &[f32::INFINITY]));
    let below = b.node("Less", &[x, wall], Attrs::new());
    let beyond = b.node("Add", &[x, wall], Attrs::new());
    let y = b.node("Where", &[below, x, beyond], Attrs::new());
    let y = b.node("Sub", &[y, zero], Attrs::new());
    cases.push(b.outputs(&[y]));
    let mut b = CaseBuilder::new("Cast", "to float64 and back");
    let x = b.float(&[2, 3], &Fill::Signed);
    let wide = b.node("Cast", &[x], Attrs::new().with("to", i64::from(DType::F64.to_onnx())));
    let square = b.node("Mul", &[wide, wide], Attrs::new());
    let y = b.node("Cast", &[square], Attrs::new().with("to", i64::from(F.to_onnx())));
    cases.push(b.outputs(&[y]));
}

fn dropout(cases: &mut Vec<Case>) {
    for (name, ratio, training) in
        [("training", 0.4f32, true), ("ratio 0", 0.0, true), ("inference", 0.4, false)]
    {
        let mut b = CaseBuilder::new("Dropout", name);
        let x = b.float(&[4, 6], &Fill::Signed);
        let ratio = b.constant(Tensor::f32(&[], &[ratio]));
        let flag = b.constant(Tensor::filled(DType::Bool, &[], f64::from(u8::from(training))));
        let y = b.node("Dropout", &[x, ratio, flag], Attrs::new());
        cases.push(b.outputs(&[y]));
    }
}

fn convolution(cases: &mut Vec<Case>) {
    // Name, image, filter, bias, attributes.
    type Row<'a> = (&'a str, &'a [usize], &'a [usize], usize, Attrs);
    let ints = |attrs: Attrs, name: &str, values: &[i64]| attrs.with(name, values);
    let none = Attrs::new;
    let rows: [Row<'_>; 12] = [
        ("one axis", &[2, 3, 7], &[4, 3, 3], 4, none()),
        ("two axes, padded", &[2, 3, 5, 6], &[4, 3, 3, 3], 4, ints(none(), "pads", &[1, 1, 1, 1])),
        ("three axes", &[1, 2, 3, 4, 3], &[2, 2, 2, 2, 2], 0, none()),
        ("strides", &[2, 2, 7, 6], &[3, 2, 3, 2], 3, ints(none(), "strides", &[2, 3])),
        ("dilations", &[1, 2, 7, 6], &[3, 2, 3, 2], 0, ints(none(), "dilations", &[2, 3])),
        ("two groups", &[2, 4, 4, 4], &[6, 2, 3, 3], 6, none().with("group", 2i64)),
        ("depthwise", &[2, 5, 5, 5], &[5, 1, 3, 3], 5, none().with("group", 5i64)),
        ("depthwise, two for each", &[2, 3, 5, 5], &[6, 1, 3, 3], 0, none().with("group", 3i64)),
        ("pointwise", &[2, 5, 3, 4], &[7, 5, 1, 1], 7, none()),
        ("one pixel", &[2, 3, 1, 1], &[2, 3, 3, 3], 2, ints(none(), "pads", &[1, 1, 1, 1])),
        ("SAME_UPPER", &[1, 2, 5, 4], &[2, 2, 2, 3], 0, {
            ints(none(), "strides", &[2, 1]).with("auto_pad", "SAME_UPPER")
        }),
        ("SAME_LOWER", &[1, 2, 5, 4], &[2, 2, 2, 3], 0, {
            ints(none(), "strides", &[1, 3]).with("auto_pad", "SAME_LOWER")
        }),
    ];
    for (name, image, filter, bias, attrs) in &rows {
        for op in ["Conv", "ConvTranspose"] {
            let groups = attrs.int("group").ok().flatten().unwrap_or(1) as usize;
            let (image, bias) = match (op, *bias) {
                ("Conv", bias) => (image.to_vec(), bias),
                (_, bias) => {
                    let mut features = image.to_vec();
                    features[1] = filter[0];
                    (features, if bias > 0 { filter[1] * groups } else { 0 })
                }
            };
            let mut b = CaseBuilder::new(op, name).dynamic();
            let x = b.float(&image, &Fill::Signed);
            let mut b = b.fixed();
            let mut inputs = vec![x, b.float(filter, &Fill::Signed)];
            if bias > 0 {
                inputs.push(b.float(&[bias], &Fill::Signed));
            }
            let y = b.node(op, &inputs, attrs.clone());
            cases.push(b.outputs(&[y]));
        }
    }
    for (name, attrs) in [
        ("output_padding", ints(ints(none(), "strides", &[2, 3]), "output_padding", &[1, 2])),
        ("output_shape", ints(ints(none(), "strides", &[2, 2]), "output_shape", &[6, 5])),
        ("output_shape beyond the windows", ints(ints(none(), "strides", &[2, 2]), "output_shape", &[11, 7])),
    ] {
        let inputs = [(&[2, 2, 3, 3][..], Fill::Signed), (&[2, 3, 2, 2], Fill::Signed)];
        cases.push(single("ConvTranspose", name, &inputs, attrs));
    }
    // The following nodes are fused into the convolution; the filter is used twice.
    let mut b = CaseBuilder::new("Conv", "one filter twice, Relu, a sum with the image");
    let x = b.float(&[2, 3, 4, 5], &Fill::Signed);
    let w = b.float(&[3, 3, 3, 3], &Fill::Signed);
    let padded = ints(none(), "pads", &[1, 1, 1, 1]);
    let first = b.node("Conv", &[x, w], padded.clone());
    let first = b.node("Relu", &[first], none());
    let second = b.node("Conv", &[first, w], padded);
    let y = b.node("Add", &[second, x], none());
    cases.push(b.outputs(&[y]));
}

fn pooling(cases: &mut Vec<Case>) {
    let kernel = |sizes: &[i64]| Attrs::new().with("kernel_shape", sizes);
    let padded = |attrs: Attrs| attrs.with("pads", &[1i64, 0, 1, 1][..]).with("strides", &[2i64, 1][..]);
    for (name, dims, attrs) in [
        ("windows side by side", &[2, 3, 4, 6][..], kernel(&[2, 2]).with("strides", &[2i64, 2][..])),
        ("overlapping windows over padding", &[2, 3, 5, 4], padded(kernel(&[3, 2]))),
        ("a last window over the end", &[1, 2, 6, 5], padded(kernel(&[3, 3])).with("ceil_mode", 1i64)),
        ("gaps in windows", &[2, 1, 7, 6], kernel(&[3, 2]).with("dilations", &[2i64, 3][..])),
        ("padding that keeps sizes", &[2, 2, 5, 4], kernel(&[2, 3]).with("auto_pad", "SAME_LOWER")),
        ("one axis", &[3, 2, 9], kernel(&[4]).with("strides", &[3i64][..])),
        ("three axes", &[1, 2, 3, 4, 3], kernel(&[2, 3, 2])),
        ("one pixel", &[2, 2, 1, 1], kernel(&[1, 1])),
        ("an empty batch", &[0, 2, 4, 4], kernel(&[2, 2])),
    ] {
        for op in ["MaxPool", "AveragePool"] {
            let mut b = CaseBuilder::new(op, name).dynamic();
            let x = b.float(dims, &Fill::Signed);
            let y = b.node(op, &[x], attrs.clone());
            cases.push(b.outputs(&[y]));
        }
        for op in ["GlobalMaxPool", "GlobalAveragePool"] {
            cases.push(single(op, name, &[(dims, Fill::Signed)], Attrs::new()));
        }
    }
    let counted = padded(kernel(&[3, 3])).with("count_include_pad", 1i64).with("ceil_mode", 1i64);
    cases.push(single("AveragePool", "padding counts", &[(&[2, 2, 6, 5], Fill::Signed)], counted));
    let columns = padded(kernel(&[2, 2])).with("storage_order", 1i64);
    cases.push(single("MaxPool", "positions down the columns", &[(&[2, 2, 5, 4], Fill::Signed)], columns));
    // A convolution computes the input of the pooling, and a sum consumes the output.
    let mut b = CaseBuilder::new("MaxPool", "of a convolution, used twice").dynamic();
    let x = b.float(&[2, 2, 5, 5], &Fill::Signed);
    let mut b = b.fixed();
    let w = b.float(&[3, 2, 3, 3], &Fill::Signed);
    let y = b.node("Conv", &[x, w], Attrs::new().with("pads", &[1i64; 4][..]));
    let largest = b.node("MaxPool", &[y], kernel(&[3, 3]).with("strides", &[2i64, 2][..]));
    let average = b.node("AveragePool", &[y], kernel(&[3, 3]).with("strides", &[2i64, 2][..]));
    let z = b.node("Add", &[largest, average], Attrs::new());
    cases.push(b.outputs(&[z]));
}

fn normalization(cases: &mut Vec<Case>) {
    const OP: &str = "BatchNormalization";
    let momentum = |attrs: Attrs| attrs.with("momentum", 0.8f32).with("epsilon", 0.01f32);
    for dims in
        [&[5][..], &[4, 3], &[2, 3, 4], &[3, 2, 2, 3], &[2, 1, 2, 2], &[1, 3, 1, 1], &[0, 2, 3], &[2, 3, 0]]
    {
        let channels = [dims.get(1).copied().unwrap_or(1)];
        let mut b = CaseBuilder::new(OP, &format!("statistics given, {dims:?}")).dynamic();
        let x = b.float(dims, &Fill::Signed);
        let mut b = b.fixed();
        let parameters = [Fill::Signed, Fill::Signed, Fill::Signed, Fill::Positive];
        let parameters = parameters.map(|fill| b.float(&channels, &fill));
        let y = b.node(OP, &[&[x][..], &parameters].concat(), momentum(Attrs::new()));
        cases.push(b.outputs(&[y]));

        let mut b = CaseBuilder::new(OP, &format!("statistics of the batch, {dims:?}")).dynamic();
        let x = b.float(dims, &Fill::Signed);
        let mut b = b.fixed();
        let inputs = [x, b.float(&channels, &Fill::Signed), b.float(&channels, &Fill::Signed)].map(Some);
        let [mean, var] = [0.5, 2.0].map(|value| Some(b.constant(Tensor::filled(F, &channels, value))));
        let inputs = [&inputs[..], &[mean, var]].concat();
        let y = b.node_with("", OP, &inputs, 3, momentum(Attrs::new().with("training_mode", 1i64)));
        cases.push(b.outputs(&y[..1]));
    }
    for (dims, size) in [
        (&[2, 5][..], 3i64),
        (&[2, 4, 3], 2),
        (&[1, 5, 2, 2], 3),
        (&[2, 3, 1, 2, 2], 4),
        (&[2, 2, 3], 7),
        (&[0, 3, 2], 3),
    ] {
        let attrs = Attrs::new().with("alpha", 0.7f32).with("bias", 1.2f32).with("size", size);
        cases.push(single("LRN", &format!("{dims:?}, {size} channels"), &[(dims, Fill::Signed)], attrs));
    }
    for (dims, axis) in [
        (&[5][..], 0i64),
        (&[3, 4], -1),
        (&[2, 3, 4], 1),
        (&[2, 3, 4], -1),
        (&[2, 3, 2, 2], -3),
        (&[3, 1], -1),
        (&[0, 3], -1),
        (&[2, 0], -1),
    ] {
        for op in ["LayerNormalization", "RMSNormalization"] {
            let first = axis.rem_euclid(dims.len() as i64) as usize;
            let mut b = CaseBuilder::new(op, &format!("{dims:?} from axis {axis} on"));
            if first > 0 {
                b = b.dynamic();
            }
            let x = b.float(dims, &Fill::Signed);
            let mut b = b.fixed();
            let mut inputs = vec![Some(x), Some(b.float(&dims[first..], &Fill::Signed))];
            let outputs = if op == "LayerNormalization" {
                inputs.push(Some(b.float(&dims[first..], &Fill::Signed)));
                3
            } else {
                1
            };
            let attrs = Attrs::new().with("axis", axis).with("epsilon", 0.05f32);
            // Mean and inverse standard deviation are ordinary results: they have a gradient, too.
            let y = b.node_with("", op, &inputs, outputs, attrs);
            cases.push(b.outputs(&y));
        }
    }
    for (scale, bias) in [(&[][..], &[4][..]), (&[3, 1], &[]), (&[2, 1, 4], &[1, 3, 4])] {
        let inputs = [(&[2, 3, 4][..], Fill::Signed), (scale, Fill::Signed), (bias, Fill::Signed)];
        let name = format!("parameters of shapes {scale:?} and {bias:?}");
        cases.push(single("LayerNormalization", &name, &inputs, Attrs::new().with("epsilon", 0.05f32)));
    }
    // Nodes before and after it are fused into the instructions.
    let mut b = CaseBuilder::new("LayerNormalization", "between others");
    let x = b.float(&[3, 5, 4], &Fill::Signed);
    let mask = b.float(&[5, 4], &Fill::Signed);
    let masked = b.node("Mul", &[x, mask], Attrs::new());
    let (scale, bias) = (b.float(&[4], &Fill::Signed), b.float(&[4], &Fill::Signed));
    let y = b.node("LayerNormalization", &[masked, scale, bias], Attrs::new());
    let active = b.node("Gelu", &[y], Attrs::new());
    let sum = b.node("Add", &[active, x], Attrs::new());
    cases.push(b.outputs(&[sum]));
    for training in [0i64, 1] {
        let mut b = CaseBuilder::new(OP, &format!("between others, training_mode {training}"));
        let x = b.float(&[3, 4, 2, 2], &Fill::Signed);
        let mask = b.float(&[2, 2], &Fill::Signed);
        let masked = b.node("Mul", &[x, mask], Attrs::new());
        let scale = b.float(&[4], &Fill::Signed);
        let bias = b.float(&[4], &Fill::Signed);
        let [mean, var] = [0.5, 2.0].map(|value| b.constant(Tensor::filled(F, &[4], value)));
        let attrs = Attrs::new().with("training_mode", training).with("epsilon", 0.01f32);
        let y = b.node(OP, &[masked, scale, bias, mean, var], attrs);
        let active = b.node("Tanh", &[y], Attrs::new());
        let sum = b.node("Add", &[active, x], Attrs::new());
        cases.push(b.outputs(&[sum]));
    }
}

fn bounded(cases: &mut Vec<Case>) {
    for (dims, slope) in [(&[2, 3][..], &[3][..]), (&[2, 3, 4], &[3, 1]), (&[5], &[]), (&[0, 3], &[3])] {
        let inputs = [(dims, Fill::Signed), (slope, Fill::Positive)];
        cases.push(single("PRelu", &format!("{dims:?} and {slope:?}"), &inputs, Attrs::new()));
    }
    for [low, high] in [[None, None], [Some(-0.6), None], [None, Some(0.7)], [Some(-0.6), Some(0.7)]] {
        for constant in [false, true] {
            let mut b =
                CaseBuilder::new("Clip", &format!("{low:?} to {high:?}, constant {constant}")).dynamic();
            let x = b.float(&[3, 4], &Fill::Signed);
            let mut bound = |bound: Option<f64>| {
                bound.map(|bound| match constant {
                    true => b.constant(Tensor::f32(&[], &[bound as f32])),
                    false => b.float(&[], &Fill::Exactly(vec![bound])),
                })
            };
            let inputs = [Some(x), bound(low), bound(high)];
            let y = b.node_with("", "Clip", &inputs, 1, Attrs::new());
            cases.push(b.outputs(&y));
        }
    }
}

fn images(cases: &mut Vec<Case>) {
    for mode in ["constant", "reflect", "edge", "wrap"] {
        let attrs = Attrs::new().with("mode", mode);
        for (name, pads) in [
            ("spatial axes", [0i64, 0, 1, 2, 0, 0, 2, 1]),
            ("negative pads", [0, 0, -1, 1, 0, 0, 1, -2]),
            ("every axis", [1, 1, 1, 1, 0, 1, 0, 2]),
            ("nothing", [0; 8]),
        ] {
            cases.push(with_ints("Pad", &format!("{mode}, {name}"), &[2, 3, 4, 5], &[&pads], attrs.clone()));
        }
        let mut b = CaseBuilder::new("Pad", &format!("{mode}, dynamic batch, its axes named")).dynamic();
        let x = b.float(&[2, 3, 4], &Fill::Signed);
        let (pads, axes) = (b.ints(&[2, 1]), b.ints(&[-1]));
        let inputs = [Some(x), Some(pads), None, Some(axes)];
        let y = b.node_with("", "Pad", &inputs, 1, attrs);
        cases.push(b.outputs(&y));
    }
    let mut b = CaseBuilder::new("Pad", "a constant that is trained");
    let x = b.float(&[2, 3], &Fill::Signed);
    let (pads, value) = (b.ints(&[0, 1, 1, 2]), b.float(&[], &Fill::Positive));
    let y = b.node("Pad", &[x, pads, value], Attrs::new());
    cases.push(b.outputs(&[y]));

    for mode in ["nearest", "linear", "cubic"] {
        for (name, scales) in [
            ("doubled", [1f32, 1.0, 2.0, 2.0]),
            ("halved", [1.0, 1.0, 0.5, 0.5]),
            ("odd", [1.0, 1.0, 1.3, 0.7]),
        ] {
            let mut b = CaseBuilder::new("Resize", &format!("{mode}, {name}, dynamic batch")).dynamic();
            let x = b.float(&[2, 2, 4, 6], &Fill::Signed);
            let scales = b.constant(Tensor::f32(&[4], &scales));
            let inputs = [Some(x), None, Some(scales)];
            let y = b.node_with("", "Resize", &inputs, 1, Attrs::new().with("mode", mode));
            cases.push(b.outputs(&y));
        }
    }
}

/// Returns every case.
#[must_use]
pub fn cases() -> Vec<Case> {
    let mut all_cases = Vec::new();
    for list in [
        unary,
        binary,
        matmul,
        shapes,
        reductions,
        losses,
        indexing,
        dropout,
        convolution,
        pooling,
        normalization,
        bounded,
        images,
    ] {
        list(&mut all_cases);
    }
    crate::breadth::add(&mut all_cases);
    crate::tables::add(&mut all_cases);
    crate::training::add(&mut all_cases);
    all_cases
}
