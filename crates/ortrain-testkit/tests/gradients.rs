//! Gradients of every operator against central differences in float64.

use std::collections::BTreeMap;

use ortrain_graph::Attrs;
use ortrain_testkit::{Case, CaseBuilder, Fill, cases, check_gradient, check_second_order};

/// Operators with a gradient that the cases must cover.
const COVERED: [&str; 133] = [
    "Abs",
    "Acos",
    "Acosh",
    "Add",
    "ArgMax",
    "ArrayFeatureExtractor",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "AveragePool",
    "BatchNormalization",
    "Cast",
    "CastLike",
    "Celu",
    "Clip",
    "Concat",
    "Conv",
    "ConvTranspose",
    "Cos",
    "Cosh",
    "CumProd",
    "CumSum",
    "DepthToSpace",
    "Div",
    "DivGrad",
    "Dropout",
    "Elu",
    "Erf",
    "Exp",
    "Expand",
    "FakeQuantGrad",
    "Flatten",
    "FusedMatMul",
    "Gather",
    "GatherElements",
    "GatherND",
    "Gelu",
    "Gemm",
    "GlobalAveragePool",
    "GlobalLpPool",
    "GlobalMaxPool",
    "GroupNormalization",
    "HardSigmoid",
    "HardSwish",
    "Hardmax",
    "Identity",
    "Imputer",
    "InstanceNormalization",
    "InvertibleLayerNormalizationGrad",
    "LRN",
    "LabelEncoder",
    "LayerNormalization",
    "LeakyRelu",
    "LinearClassifier",
    "LinearRegressor",
    "Log",
    "LogSoftmax",
    "LpNormalization",
    "LpPool",
    "MatMul",
    "Max",
    "MaxPool",
    "Mean",
    "MeanVarianceNormalization",
    "Min",
    "Mish",
    "Mod",
    "Mul",
    "Neg",
    "NegativeLogLikelihoodLoss",
    "NegativeLogLikelihoodLossInternal",
    "NegativeLogLikelihoodLossInternal2",
    "Normalizer",
    "OneHot",
    "PRelu",
    "Pad",
    "Pow",
    "QuickGelu",
    "RMSNormalization",
    "Range",
    "Reciprocal",
    "ReduceAllL2",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
    "Relu",
    "Reshape",
    "Resize",
    "Round",
    "Scaler",
    "ScatterElements",
    "ScatterND",
    "Selu",
    "Shrink",
    "ShrunkenGather",
    "Sigmoid",
    "Sign",
    "Sin",
    "Sinh",
    "Slice",
    "Softmax",
    "SoftmaxCrossEntropy",
    "SoftmaxCrossEntropyGrad",
    "SoftmaxCrossEntropyLoss",
    "Softplus",
    "Softsign",
    "SpaceToDepth",
    "SparseSoftmaxCrossEntropy",
    "SparseSoftmaxCrossEntropyGrad",
    "Split",
    "Sqrt",
    "Squeeze",
    "Sub",
    "Sum",
    "SwiGLU",
    "Swish",
    "Tan",
    "Tanh",
    "ThresholdedRelu",
    "Tile",
    "TopK",
    "Transpose",
    "Trilu",
    "Unsqueeze",
    "Where",
];

#[test]
fn gradients_are_those_of_central_differences() {
    let mut points: BTreeMap<String, usize> = BTreeMap::new();
    let mut failures = Vec::new();
    for case in cases() {
        match check_gradient(&case) {
            Ok(count) => *points.entry(case.operator).or_default() += count,
            Err(failure) => failures.push(failure),
        }
    }
    for (operator, count) in &points {
        println!("{operator:26} {count:6} points");
    }
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
    for operator in COVERED {
        assert!(points.get(operator).is_some_and(|&count| count > 0), "{operator} was checked at no point");
    }
}

/// Gradients of gradient graphs are correct, too, for all operators in them.
#[test]
fn gradients_of_gradients_are_those_of_central_differences() {
    let mut failures = Vec::new();
    // The statistics of no elements are NaN, and so are all values that depend on them.
    let of_nothing = |case: &Case| case.inputs.iter().any(ortrain_graph::Tensor::is_empty);
    for case in cases().into_iter().filter(|case| !of_nothing(case)) {
        if let Err(failure) = check_second_order(&case) {
            failures.push(failure);
        }
    }
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
}

/// The check can fail: it detects the gradient operator of another function.
#[test]
fn detects_wrong_sign() {
    let mut b = CaseBuilder::new("Sub", "as if it were Add");
    let x = b.float(&[2, 3], &Fill::Signed);
    let z = b.float(&[2, 3], &Fill::Signed);
    let y = b.node("Sub", &[x, z], Attrs::new());
    let case = b.outputs(&[y]);
    check_gradient(&case).expect("the true gradient passes");
    let outcome = ortrain_testkit::check_gradient_after(&case, |graph| {
        // The gradient of the subtrahend is Neg of the incoming gradient; drop the sign.
        let node =
            graph.nodes.iter_mut().find(|node| &*node.op == "Neg").expect("Sub passes back a negation");
        node.op = "Identity".into();
    });
    let message = outcome.expect_err("a wrong sign is a failure");
    assert!(message.contains("the gradient of input 1"), "{message}");
}
