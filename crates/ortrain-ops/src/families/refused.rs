//! Operators of ai.onnx.ml that are refused with a reason: what they compute has no gradient, or is no tensor.

use super::features::DOMAIN;

/// Why trees are not trained.
const TREES: &str = "decision trees have no gradient (their results are constant between the thresholds), so no step of an \
                     optimizer trains them, and they are not run here either; fit them in scikit-learn, or train a model that \
                     has a gradient: MLPClassifier, MLPRegressor, LogisticRegression, LinearRegression";

/// Why support vectors are not trained.
const VECTORS: &str = "support vector machines with a kernel are fitted by choosing among samples, not by gradients, and are not \
                       run here either; fit them in scikit-learn, or train a model that has a gradient: LinearSVC, LinearSVR, \
                       SGDClassifier, MLPClassifier";

/// Why maps are not made.
const MAPS: &str = "its result is a sequence of maps, one from class to probability for each row, which is no tensor; the \
                    probabilities are its input: make that an output of the model instead (skl2onnx: \
                    options={\"zipmap\": False}; of a trained model: name it in export_model_for_inferencing)";

/// Why an operator is refused, as a part of a sentence; `None` of an operator that is known, or that nobody knows.
pub(crate) fn reason(domain: &str, name: &str) -> Option<&'static str> {
    match name {
        _ if domain != DOMAIN => None,
        "TreeEnsemble" | "TreeEnsembleClassifier" | "TreeEnsembleRegressor" => Some(TREES),
        "SVMClassifier" | "SVMRegressor" => Some(VECTORS),
        "ZipMap" => Some(MAPS),
        _ => None,
    }
}
