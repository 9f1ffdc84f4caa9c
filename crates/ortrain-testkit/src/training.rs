//! Cases of operators in onnxruntime-training's training graphs that no gradient rule here emits.

use ortrain_graph::{Attrs, DType, Dim, Tensor, ValueType};

use crate::{Case, CaseBuilder, Fill};

use Fill::{Positive, Signed};

/// Domain of most of these operators.
const DOMAIN: &str = "com.microsoft";

const REDUCTIONS: [&str; 3] = ["none", "sum", "mean"];

fn quotients(cases: &mut Vec<Case>) {
    for (a, b) in [
        (&[2, 3][..], &[2, 3][..]),
        (&[2, 3], &[3]),
        (&[3], &[2, 3]),
        (&[2, 3], &[]),
        (&[2, 1], &[1, 3]),
        (&[2, 3], &[2, 1]),
        (&[0, 3], &[3]),
    ] {
        let common: Vec<usize> = if a.contains(&0) { vec![0, 3] } else { vec![2, 3] };
        for declared in [true, false] {
            let name = format!("{a:?} by {b:?}{}", if declared { "" } else { ", undeclared sizes" });
            let mut builder = CaseBuilder::new("DivGrad", &name);
            let inputs =
                [builder.float(&common, &Signed), builder.float(a, &Signed), builder.float(b, &Positive)];
            let y = builder.node_with(DOMAIN, "DivGrad", &inputs.map(Some), 2, Attrs::new());
            let mut case = builder.outputs(&y);
            if !declared {
                for (k, &id) in case.graph.inputs.clone().iter().enumerate() {
                    let rank = case.inputs[k].dims().len();
                    let symbols = (0..rank).map(|axis| Dim::symbol(&format!("s{k}{axis}"))).collect();
                    case.graph.value_mut(id).ty = ValueType::Tensor(DType::F32, Some(symbols));
                }
            }
            cases.push(case);
        }
    }
}

fn losses(cases: &mut Vec<Case>) {
    for reduction in REDUCTIONS {
        let attrs = || Attrs::new().with("reduction", reduction);
        let of_loss: &[usize] = if reduction == "none" { &[2, 3] } else { &[] };
        for dims in [&[2, 3, 4][..], &[0, 3, 4]] {
            let of_loss: &[usize] = if reduction == "none" { &dims[..2] } else { of_loss };
            let name = format!("{reduction}, {dims:?}");
            let mut b = CaseBuilder::new("SoftmaxCrossEntropy", &name).dynamic();
            let inputs = [b.float(dims, &Signed), b.float(dims, &Positive)];
            let y = b.node_with(DOMAIN, "SoftmaxCrossEntropy", &inputs.map(Some), 2, attrs());
            cases.push(b.outputs(&y));
            // The mean of no elements is NaN, and so are all values that depend on it.
            let has_gradient = reduction != "mean" || !dims.contains(&0);
            if has_gradient {
                let mut b = CaseBuilder::new("SoftmaxCrossEntropyGrad", &name).dynamic();
                let inputs = [b.float(of_loss, &Signed), b.float(dims, &Signed), b.float(dims, &Positive)];
                let y = b.node_with(DOMAIN, "SoftmaxCrossEntropyGrad", &inputs.map(Some), 1, attrs());
                cases.push(b.outputs(&y));
            }
            for (label, weighted) in [(DType::I32, false), (DType::I64, false), (DType::I64, true)] {
                let name = format!("{name}, {label}, weights {weighted}");
                let classes = Fill::Below(4);
                let mut b = CaseBuilder::new("SparseSoftmaxCrossEntropy", &name).dynamic();
                let mut inputs = vec![b.float(dims, &Signed), b.input(label, &dims[..2], &classes)];
                inputs.extend(weighted.then(|| b.float(&dims[..2], &Positive)));
                let inputs: Vec<_> = inputs.into_iter().map(Some).collect();
                let y = b.node_with("", "SparseSoftmaxCrossEntropy", &inputs, 2, attrs());
                cases.push(b.outputs(&y));
                if !has_gradient {
                    continue;
                }
                let mut b = CaseBuilder::new("SparseSoftmaxCrossEntropyGrad", &name).dynamic();
                let mut inputs = vec![b.float(of_loss, &Signed), b.float(dims, &Signed)];
                inputs.push(b.input(label, &dims[..2], &classes));
                inputs.extend(weighted.then(|| b.float(&dims[..2], &Positive)));
                let inputs: Vec<_> = inputs.into_iter().map(Some).collect();
                let y = b.node_with("", "SparseSoftmaxCrossEntropyGrad", &inputs, 1, attrs());
                cases.push(b.outputs(&y));
            }
        }
        for op in [
            "NegativeLogLikelihoodLossInternal",
            "NegativeLogLikelihoodLossInternal2",
            "SoftmaxCrossEntropyLossInternal",
        ] {
            let outputs = if op.starts_with("Softmax") { 2 } else { 1 };
            for (weighted, ignored) in [(false, false), (false, true), (true, false), (true, true)] {
                let name = format!("{reduction}, weights {weighted}, one ignored {ignored}");
                let mut b = CaseBuilder::new(op, &name).dynamic();
                let x = b.float(&[3, 4, 2], &Signed);
                let labels = Fill::Exactly(vec![1.0, 0.0, 3.0, 2.0, 2.0, 1.0]);
                let labels = b.input(DType::I64, &[3, 2], &labels);
                let mut b = b.fixed();
                // Class weights of a loss get no gradient; with a computed label to ignore, they are factors.
                let weights = weighted.then(|| match ignored && outputs == 1 {
                    true => b.float(&[4], &Positive),
                    false => b.constant(Tensor::f32(&[4], &[0.5, 2.0, 1.25, 0.75])),
                });
                let ignore = ignored.then(|| b.input(DType::I64, &[], &Fill::Exactly(vec![2.0])));
                let y = b.node_with(DOMAIN, op, &[Some(x), Some(labels), weights, ignore], outputs, attrs());
                cases.push(b.outputs(&y));
            }
        }
    }
}

fn others(cases: &mut Vec<Case>) {
    let mut b = CaseBuilder::new("FakeQuantGrad", "a mask that is given").dynamic();
    let inputs = [b.float(&[2, 5], &Signed), b.input(DType::Bool, &[2, 5], &Fill::Bools)];
    let y = b.node_with(DOMAIN, "FakeQuantGrad", &inputs.map(Some), 1, Attrs::new());
    cases.push(b.outputs(&y));
    for shapes in [&[&[2, 3][..], &[4], &[]][..], &[&[2, 3]], &[&[0, 3], &[2]]] {
        let mut b = CaseBuilder::new("ReduceAllL2", &format!("{shapes:?}"));
        let inputs: Vec<_> = shapes.iter().map(|dims| Some(b.float(dims, &Signed))).collect();
        let y = b.node_with(DOMAIN, "ReduceAllL2", &inputs, 1, Attrs::new());
        cases.push(b.outputs(&y));
    }
    for axis in [0i64, -1] {
        let mut b = CaseBuilder::new("ShrunkenGather", &format!("axis {axis}"));
        let x = b.float(&[4, 3], &Signed);
        let indices = b.ints(&[2, -1]);
        let attrs = Attrs::new().with("axis", axis);
        let y = b.node_with(DOMAIN, "ShrunkenGather", &[Some(x), Some(indices)], 1, attrs);
        cases.push(b.outputs(&y));
    }
    for (axis, rest, expected) in [(-1i64, &[2, 3, 1][..], &[4][..]), (1, &[2, 1, 1], &[3, 4])] {
        let op = "InvertibleLayerNormalizationGrad";
        let mut b = CaseBuilder::new(op, &format!("axis {axis}"));
        let inputs = [
            b.float(&[2, 3, 4], &Signed),
            b.float(&[2, 3, 4], &Signed),
            b.float(expected, &Positive),
            b.float(expected, &Signed),
            b.float(rest, &Positive),
        ];
        let y = b.node_with(DOMAIN, op, &inputs.map(Some), 3, Attrs::new().with("axis", axis));
        cases.push(b.outputs(&y));
    }
}

pub(crate) fn add(cases: &mut Vec<Case>) {
    quotients(cases);
    losses(cases);
    others(cases);
}
