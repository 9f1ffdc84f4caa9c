//! Cases of operators for tabular models, as exported from scikit-learn: feature preprocessing, linear
//! models.

use ortrain_graph::{Attrs, DType, Tensor};

use crate::{Case, CaseBuilder, Fill};

use Fill::Signed;

/// Domain of these operators.
const DOMAIN: &str = "ai.onnx.ml";

/// Creates a case with one node and its last result.
fn single(op: &str, name: &str, dims: &[usize], outputs: usize, attrs: Attrs) -> Case {
    let mut b = CaseBuilder::new(op, &format!("{name}, {dims:?}")).dynamic();
    let x = b.float(dims, &Signed);
    let y = b.node_with(DOMAIN, op, &[Some(x)], outputs, attrs);
    b.outputs(&y[outputs - 1..])
}

fn features(cases: &mut Vec<Case>) {
    for (name, offset, scale) in [
        ("each", vec![0.5f32, -1.0, 2.0], vec![2.0f32, 0.25, -1.5]),
        ("one for all", vec![0.5], vec![-0.75]),
        ("one offset", vec![0.5], vec![2.0, 0.25, -1.5]),
    ] {
        let attrs = Attrs::new().with("offset", offset).with("scale", scale);
        for dims in [&[4, 3][..], &[1, 3], &[0, 3]] {
            cases.push(single("Scaler", name, dims, 1, attrs.clone()));
        }
    }
    for norm in ["MAX", "L1", "L2"] {
        for dims in [&[4, 3][..], &[2, 1], &[0, 3]] {
            cases.push(single("Normalizer", norm, dims, 1, Attrs::new().with("norm", norm)));
        }
    }
    for dtype in [DType::F64, DType::I64, DType::I32] {
        for (op, attrs) in [
            ("Normalizer", Attrs::new().with("norm", "L2")),
            ("Scaler", Attrs::new().with("offset", vec![0.5f32]).with("scale", vec![2.0f32, 1.0, -1.0])),
        ] {
            let mut b = CaseBuilder::new(op, &format!("of {dtype}"));
            let x = b.input(dtype, &[2, 3], &Fill::Exactly(vec![3.0, -4.0, 1.0, 2.0, 0.0, -7.0]));
            let w = b.float(&[2, 3], &Signed);
            let y = b.node_with(DOMAIN, op, &[Some(x)], 1, attrs);
            let y = b.node("Mul", &[y[0], w], Attrs::new());
            cases.push(b.outputs(&[y]));
        }
    }
    // The result jumps at a replaced number; NaN remains NaN for any difference step.
    let holes = Fill::Exactly(vec![f64::NAN, 1.5, 2.5, -0.75, f64::NAN, 0.5]);
    for (replaced, fill) in [(f32::NAN, holes), (-9.0, Signed)] {
        for values in [vec![0.5f32, -1.0, 2.0], vec![0.75]] {
            let mut b =
                CaseBuilder::new("Imputer", &format!("{} numbers for {replaced}", values.len())).dynamic();
            let x = b.float(&[2, 3], &fill);
            let attrs =
                Attrs::new().with("imputed_value_floats", values).with("replaced_value_float", replaced);
            let y = b.node_with(DOMAIN, "Imputer", &[Some(x)], 1, attrs);
            cases.push(b.outputs(&y));
        }
    }
    for (dims, positions) in
        [(&[2, 4][..], &[2i64, 0, 2][..]), (&[4], &[1]), (&[2, 3, 4], &[3, 1]), (&[0, 4], &[1])]
    {
        for row in [false, true] {
            let mut b =
                CaseBuilder::new("ArrayFeatureExtractor", &format!("{dims:?}, {positions:?}, row {row}"));
            let x = b.float(dims, &Signed);
            let shape = if row { vec![1, positions.len()] } else { vec![positions.len()] };
            let positions = b.constant(Tensor::i64(&shape, positions));
            let y =
                b.node_with(DOMAIN, "ArrayFeatureExtractor", &[Some(x), Some(positions)], 1, Attrs::new());
            cases.push(b.outputs(&y));
        }
    }
    let mut b = CaseBuilder::new("LabelEncoder", "integers to floats, one of them twice, others unknown");
    let x = b.input(DType::I64, &[2, 3], &Fill::Exactly(vec![7.0, 3.0, 7.0, 5.0, -1.0, 3.0]));
    let w = b.float(&[2, 3], &Signed);
    let attrs = Attrs::new()
        .with("keys_int64s", vec![3i64, 7, 3])
        .with("values_floats", vec![0.5f32, 1.5, 2.5])
        .with("default_float", -2.0f32);
    let y = b.node_with(DOMAIN, "LabelEncoder", &[Some(x)], 1, attrs);
    let y = b.node("Mul", &[y[0], w], Attrs::new());
    cases.push(b.outputs(&[y]));
}

fn linear_models(cases: &mut Vec<Case>) {
    let weights =
        |rows: usize| -> Vec<f32> { (0..rows * 3).map(|k| 1.3 * (1.0 + 2.4 * k as f32).sin()).collect() };
    let intercepts = |rows: usize| -> Vec<f32> { (0..rows).map(|k| 0.4 * k as f32 - 0.3).collect() };
    for post in ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"] {
        for rows in [1usize, 2, 4] {
            let of = |attrs: Attrs| {
                attrs
                    .with("coefficients", weights(rows))
                    .with("intercepts", intercepts(rows))
                    .with("post_transform", post)
            };
            let labels: Vec<i64> = (0..rows.max(2) as i64).map(|k| 10 * k).collect();
            let classifier = of(Attrs::new().with("classlabels_ints", labels));
            let regressor = of(Attrs::new().with("targets", rows as i64));
            for dims in [&[5, 3][..], &[0, 3]] {
                let name = format!("{rows} scores, {post}");
                cases.push(single("LinearClassifier", &name, dims, 2, classifier.clone()));
                cases.push(single("LinearRegressor", &name, dims, 1, regressor.clone()));
            }
        }
    }
    let mut b = CaseBuilder::new("LinearRegressor", "one sample, without intercepts");
    let x = b.float(&[3], &Signed);
    let y =
        b.node_with(DOMAIN, "LinearRegressor", &[Some(x)], 1, Attrs::new().with("coefficients", weights(1)));
    cases.push(b.outputs(&y));
}

pub(crate) fn add(cases: &mut Vec<Case>) {
    features(cases);
    linear_models(cases);
}
