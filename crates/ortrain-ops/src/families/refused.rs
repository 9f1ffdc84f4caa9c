//! Operators that are unsupported for a reason.
//!
//! Operators of ai.onnx.ml compute results without a gradient, or results that are not tensors. Operators of
//! `com.microsoft` occur in graphs of onnxruntime-training 1.19.2 and have a purpose outside of the model. The domains of
//! layouts occur in models that onnxruntime saved after it had optimized them for one processor.

use crate::support::ml::ML_DOMAIN;

const MICROSOFT: &str = "com.microsoft";

/// Reason for decision trees.
const TREES_REASON: &str = "decision trees cannot be trained or run, because they have no gradient (their \
     results are constant between the thresholds); fit them in scikit-learn, or train a model with a gradient: \
     MLPClassifier, MLPRegressor, LogisticRegression, LinearRegression";

/// Reason for support vector machines.
const SVM_REASON: &str = "support vector machines with a kernel cannot be trained or run, because they are \
     fitted by a choice of samples, not by gradients; fit them in scikit-learn, or train a model with a gradient: \
     LinearSVC, LinearSVR, SGDClassifier, MLPClassifier";

/// Reason for sequences of maps.
const ZIPMAP_REASON: &str = "its result is a sequence of maps from class to probability, not a tensor; make \
     its input, the probabilities, an output of the model instead (skl2onnx: options={\"zipmap\": False}; for a \
     trained model: name it in export_model_for_inferencing)";

/// Reason for TensorBoard summaries.
const SUMMARY_REASON: &str = "its result is a text for TensorBoard, not a tensor; make its input an output of \
     the model and write it in the training loop with torch.utils.tensorboard or tensorboardX";

/// Reason for packed activations.
const PACKED_ACTIVATION_REASON: &str = "it stores activations for the gradient in fewer bits, which changes \
     the gradient; generate the artifacts without it, and set SessionOptions.memory_limit to keep fewer \
     activations with bitwise equal results";

/// Packers of activations: an encoder and a decoder of each.
const PACKERS: [&str; 5] = ["GistBinarize", "GistPack1", "GistPack8", "GistPack16", "GistPackMsfp15"];

/// Returns true for the name of a packer's encoder or decoder.
fn is_packer_operator(packer: &str, name: &str) -> bool {
    name.strip_prefix(packer).is_some_and(|half| matches!(half, "Encoder" | "Decoder"))
}

/// Reason for calls of PyTorch functions.
const PYTHON_OP_REASON: &str = "it calls a torch.autograd.Function of the process that exported it, which the \
     file does not contain; write it as an ONNX function, with its own gradient if needed (docs/extending.md)";

/// Reason for events between pipeline stages.
const EVENT_REASON: &str = "it synchronizes the stages of a pipeline, but a model runs as one stage; replace \
     its outputs with its inputs after the first";

/// Domains of operators on tensors in the layout of one processor.
const LAYOUT_DOMAINS: [&str; 2] = ["com.microsoft.nchwc", "com.ms.internal.nhwc"];

/// Reason for operators of these domains.
const LAYOUT_REASON: &str = "its tensors are in a layout that onnxruntime chose for one processor; save the \
     model at optimization level extended instead (SessionOptions.graph_optimization_level = \
     GraphOptimizationLevel.ORT_ENABLE_EXTENDED with optimized_model_filepath), or use the model before the \
     optimization";

/// Returns the reason why an operator is unsupported, as a part of a sentence. Returns `None` for supported and for
/// unknown operators.
pub(crate) fn unsupported_reason(domain: &str, name: &str) -> Option<&'static str> {
    match (domain, name) {
        (ML_DOMAIN, "TreeEnsemble" | "TreeEnsembleClassifier" | "TreeEnsembleRegressor") => {
            Some(TREES_REASON)
        }
        (ML_DOMAIN, "SVMClassifier" | "SVMRegressor") => Some(SVM_REASON),
        (ML_DOMAIN, "ZipMap") => Some(ZIPMAP_REASON),
        (MICROSOFT, "SummaryScalar" | "SummaryHistogram" | "SummaryText" | "SummaryMerge") => {
            Some(SUMMARY_REASON)
        }
        (MICROSOFT, name) if PACKERS.iter().any(|&packer| is_packer_operator(packer, name)) => {
            Some(PACKED_ACTIVATION_REASON)
        }
        (MICROSOFT, "PythonOp" | "PythonOpGrad") => Some(PYTHON_OP_REASON),
        (MICROSOFT, "RecordEvent" | "WaitEvent") => Some(EVENT_REASON),
        (domain, _) if LAYOUT_DOMAINS.contains(&domain) => Some(LAYOUT_REASON),
        _ => None,
    }
}
