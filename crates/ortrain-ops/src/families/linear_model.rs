//! Linear models as scikit-learn exports them: weighted sums of features, with labels and probabilities of classifiers.
//!
//! LinearClassifier-1 (<https://onnx.ai/onnx/operators/onnx_aionnxml_LinearClassifier.html>) and LinearRegressor-1
//! (<https://onnx.ai/onnx/operators/onnx_aionnxml_LinearRegressor.html>) of ai.onnx.ml, compositions of a Gemm. Their
//! weights are attributes. Before training, `passes::linear_models` decomposes them, and the weights become
//! initializers.
//!
//! The semantics are onnxruntime's:
//!
//! - Scores are float32 for every input type.
//! - A single score with two labels is the score of the second label. The score of the first label is `1 - score`; with
//!   `LOGISTIC` it is the sigmoid of `-score`.
//! - A single score without labels has no `post_transform`. Its label is 1 if the score is positive, else 0.
//! - `SOFTMAX_ZERO` excludes scores that are 0 from the softmax.
//! - `PROBIT` is an error: no operator of ONNX computes it.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId, ValueType};

use crate::OpError;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::cast;
use crate::support::formula::formula;
use crate::support::ml::{ML_DOMAIN, feature_count};

/// Name of the classifier. Its results are the labels and the scores.
pub(crate) const CLASSIFIER: &str = "LinearClassifier";
/// Name of the regressor.
pub(crate) const REGRESSOR: &str = "LinearRegressor";

/// Magnitude up to which `SOFTMAX_ZERO` treats a score as 0.
const SOFTMAX_ZERO_THRESHOLD: f64 = 1e-7;

/// Function of the scores (`post_transform`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PostTransform {
    None,
    Softmax,
    Logistic,
    SoftmaxZero,
}

/// Linear model, read from the attributes of a node.
#[derive(Clone, Debug)]
pub(crate) struct LinearModel {
    /// Matrix of coefficients, one row for each score.
    pub(crate) coefficients: Vec<f32>,
    pub(crate) intercepts: Vec<f32>,
    /// Number of scores.
    pub(crate) score_count: usize,
    /// Labels of the classes; `None` for a regressor.
    labels: Option<Labels>,
    pub(crate) post_transform: PostTransform,
}

/// Labels of the classes. String labels are only counted.
#[derive(Clone, Debug)]
enum Labels {
    Integers(Vec<i64>),
    Strings(usize),
}

impl Labels {
    fn len(&self) -> usize {
        match self {
            Labels::Integers(numbers) => numbers.len(),
            Labels::Strings(count) => *count,
        }
    }
}

impl LinearModel {
    pub(crate) fn from_node(node: &Node) -> Result<LinearModel, OpError> {
        let attrs = &node.attrs;
        let coefficients = Attrs::required("coefficients", attrs.floats("coefficients")?)?.to_vec();
        let mut intercepts = attrs.floats("intercepts")?.unwrap_or(&[]).to_vec();
        let post_transform = match attrs.string("post_transform")?.unwrap_or("NONE") {
            "NONE" => PostTransform::None,
            "SOFTMAX" => PostTransform::Softmax,
            "LOGISTIC" => PostTransform::Logistic,
            "SOFTMAX_ZERO" => PostTransform::SoftmaxZero,
            "PROBIT" => {
                return Err(OpError::unsupported(
                    "post_transform PROBIT is not supported, because ONNX has no operator for it; fit a model with \
                     NONE, SOFTMAX, LOGISTIC or SOFTMAX_ZERO",
                ));
            }
            other => {
                return Err(OpError::invalid(format!(
                    "post_transform must be NONE, SOFTMAX, LOGISTIC, SOFTMAX_ZERO or PROBIT, got {other:?}"
                )));
            }
        };
        let mut labels = None;
        let rows = if &*node.op == CLASSIFIER {
            let numbers = attrs.ints("classlabels_ints")?.unwrap_or(&[]);
            let texts = attrs.strings("classlabels_strings")?.unwrap_or(&[]).len();
            let parsed = if texts > 0 { Labels::Strings(texts) } else { Labels::Integers(numbers.to_vec()) };
            let rows = if intercepts.is_empty() { parsed.len().max(1) } else { intercepts.len() };
            let count = parsed.len();
            if count != rows && !(rows == 1 && (count == 0 || count == 2)) {
                return Err(OpError::invalid(format!(
                    "expected one label for each score, or two labels for one score, got {count} labels for {rows} \
                     scores"
                )));
            }
            if rows == 1 && count == 1 {
                return Err(OpError::invalid("one score needs two labels or none, got one label"));
            }
            labels = Some(parsed);
            rows
        } else {
            let targets = attrs.int("targets")?.unwrap_or(1);
            usize::try_from(targets)
                .ok()
                .filter(|&rows| rows > 0)
                .ok_or_else(|| OpError::invalid(format!("targets must be at least 1, got {targets}")))?
        };
        let intercept_count = if intercepts.is_empty() { rows } else { intercepts.len() };
        if intercept_count != rows || coefficients.is_empty() || !coefficients.len().is_multiple_of(rows) {
            return Err(OpError::invalid(format!(
                "got {} coefficients and {} intercepts for {rows} scores; each score needs one row of coefficients \
                 and one intercept",
                coefficients.len(),
                intercepts.len()
            )));
        }
        intercepts.resize(rows, 0.0);
        Ok(LinearModel { coefficients, intercepts, score_count: rows, labels, post_transform })
    }

    fn feature_count(&self) -> usize {
        self.coefficients.len() / self.score_count
    }

    /// Returns true if one score represents two classes.
    fn is_binary(&self) -> bool {
        self.score_count == 1 && self.labels.as_ref().is_some_and(|labels| labels.len() == 2)
    }
}

impl Op for LinearModel {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let outputs = if self.labels.is_some() { 2 } else { 1 };
        cx.check_arity(1, 1, outputs)?;
        cx.expect_dtype(0, "a number", DType::is_number)?;
        if let Some(actual) = feature_count(cx)?.filter(|&count| count != self.feature_count()) {
            let (rows, width) = (self.score_count, self.feature_count());
            return Err(OpError::invalid(format!(
                "input 0 has {actual} features, but the model has {rows} rows of {width} coefficients"
            )));
        }
        let batch = cx.shape(0).map(|shape| if shape.rank() == 1 { Dim::Known(1) } else { shape[0].clone() });
        let of = |dims: &[Dim]| Some(dims.iter().cloned().collect::<Shape>());
        let columns = if self.is_binary() { 2 } else { self.score_count };
        if let Some(labels) = &self.labels {
            if let (Labels::Strings(_), true) = (labels, cx.has_output(0)) {
                return Err(OpError::unsupported(
                    "string labels (classlabels_strings) are not supported; use only the output of probabilities, or \
                     fit the classifier with integer classes",
                ));
            }
            cx.set_output(0, DType::I64, batch.clone().and_then(|batch| of(&[batch])));
        }
        let shape = batch.and_then(|batch| of(&[batch, Dim::Known(columns)]));
        cx.set_output(outputs - 1, DType::F32, shape);
        Ok(())
    }
}

fn add(rw: &mut Rewrite<'_>, op: &str, inputs: &[ValueId]) -> ValueId {
    rw.add(op, inputs, Attrs::new())
}

/// Adds the weighted sums, as a value named `scores`.
fn add_scores(rw: &mut Rewrite<'_>, linear: &LinearModel) -> Result<ValueId, OpError> {
    let x = rw.required_input(0)?;
    let dtype = rw.dtype(x).ok_or_else(|| OpError::invalid("the type of input 0 is not known"))?;
    let mut x = cast(rw.patch().1, x, dtype, DType::F32);
    if rw.shape(rw.required_input(0)?).map(Shape::rank) == Some(1) {
        let row = rw.ints("row", &[1, -1]);
        x = add(rw, "Reshape", &[x, row]);
    }
    let dims = [linear.score_count, linear.feature_count()];
    let coefficients = rw.constant("coefficients", Tensor::f32(&dims, &linear.coefficients));
    let intercepts = rw.constant("intercepts", Tensor::f32(&[linear.score_count], &linear.intercepts));
    let (_, patch) = rw.patch();
    let prefix = patch.prefix().to_owned();
    let scores = patch.add_value(&format!("{prefix}scores"), ValueType::Unknown);
    let inputs = [Some(x), Some(coefficients), Some(intercepts)];
    let mut node = Node::new("", "Gemm", &inputs, &[Some(scores)], Attrs::new().with("transB", 1i64));
    node.name = format!("{prefix}Gemm").into();
    patch.push(node);
    Ok(scores)
}

/// Applies `post_transform` to the scores.
fn apply_post_transform(rw: &mut Rewrite<'_>, linear: &LinearModel, scores: ValueId) -> ValueId {
    let along = || Attrs::new().with("axis", 1i64);
    if linear.is_binary() {
        let (first, second) = if linear.post_transform == PostTransform::Logistic {
            (add(rw, "Neg", &[scores]), scores)
        } else {
            let one = rw.constant("one", Tensor::scalar(DType::F32, 1.0));
            (add(rw, "Sub", &[one, scores]), scores)
        };
        let both = rw.add("Concat", &[first, second], along());
        return if linear.post_transform == PostTransform::Logistic {
            add(rw, "Sigmoid", &[both])
        } else {
            both
        };
    }
    match linear.post_transform {
        _ if linear.score_count == 1 => scores,
        PostTransform::None => scores,
        PostTransform::Softmax => rw.add("Softmax", &[scores], along()),
        PostTransform::Logistic => add(rw, "Sigmoid", &[scores]),
        PostTransform::SoftmaxZero => {
            let axis = rw.ints("axis", &[1]);
            let largest = add(rw, "ReduceMax", &[scores, axis]);
            let power = formula(rw, [scores, largest], |[scores, largest]| (scores - largest).exp());
            let magnitude = add(rw, "Abs", &[scores]);
            let threshold = rw.constant("next_to_zero", Tensor::scalar(DType::F32, SOFTMAX_ZERO_THRESHOLD));
            let counts = add(rw, "Greater", &[magnitude, threshold]);
            let zero = rw.constant("zero", Tensor::scalar(DType::F32, 0.0));
            let counted = add(rw, "Where", &[counts, power, zero]);
            let sum = add(rw, "ReduceSum", &[counted, axis]);
            add(rw, "Div", &[counted, sum])
        }
    }
}

/// Adds the label of the largest score; for a single score, the label by its sign.
fn add_label(rw: &mut Rewrite<'_>, linear: &LinearModel, scores: ValueId) -> ValueId {
    let position = if linear.score_count == 1 {
        let zero = rw.constant("zero", Tensor::scalar(DType::F32, 0.0));
        let positive = add(rw, "Greater", &[scores, zero]);
        let positive = cast(rw.patch().1, positive, DType::Bool, DType::I64);
        let flat = rw.ints("flat", &[-1]);
        add(rw, "Reshape", &[positive, flat])
    } else {
        rw.add("ArgMax", &[scores], Attrs::new().with("axis", 1i64).with("keepdims", 0i64))
    };
    match &linear.labels {
        Some(Labels::Integers(numbers)) if !numbers.is_empty() => {
            let numbers = rw.ints("labels", numbers);
            add(rw, "Gather", &[numbers, position])
        }
        _ => position,
    }
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let linear = LinearModel::from_node(rw.node())?;
    let scores = add_scores(rw, &linear)?;
    let result = apply_post_transform(rw, &linear, scores);
    if linear.labels.is_none() {
        rw.replace_output(0, result);
        return Ok(());
    }
    if rw.has_output(0) {
        let label = add_label(rw, &linear, scores);
        rw.replace_output(0, label);
    }
    rw.replace_output(1, result);
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(LinearModel::from_node(node)?))
}

fn sample(definition: &Definition) -> Sample {
    let mut attrs = Attrs::new().with("coefficients", vec![1.0f32; 8]).with("intercepts", vec![0.0f32; 2]);
    attrs = if definition.name == CLASSIFIER {
        attrs.with("classlabels_ints", vec![0i64, 1])
    } else {
        attrs.with("targets", 2i64)
    };
    Sample { attrs, inputs: vec![Some(ValueType::tensor(DType::F32, &[2, 4]))], ..Sample::default() }
}

pub(crate) fn definitions() -> Vec<Definition> {
    [CLASSIFIER, REGRESSOR]
        .map(|name| Definition::new(ML_DOMAIN, name, &[1], build).composition(decompose).sample(sample))
        .into()
}
