"""Use an ONNX network as a step of a scikit-learn pipeline: search a learning rate, and continue a training.

Run: python examples/sklearn_pipeline.py
"""

from __future__ import annotations

import warnings

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import ortrain
from ortrain.sklearn import OnnxClassifier

HIDDEN, SEED = 48, 0


def perceptron(n_features: int, n_classes: int) -> ModelProto:
    """Returns a network with one hidden layer for data of any width.

    Any other model works too, for example from a file.
    """
    rng = np.random.default_rng(SEED)
    tensors = []
    for layer, shape in (("1", (n_features, HIDDEN)), ("2", (HIDDEN, n_classes))):
        bound = np.sqrt(6 / sum(shape))
        tensors.append(numpy_helper.from_array(rng.uniform(-bound, bound, shape).astype(np.float32), "weight" + layer))
        tensors.append(numpy_helper.from_array(np.zeros(shape[1], np.float32), "bias" + layer))
    nodes = [
        helper.make_node("Gemm", ["x", "weight1", "bias1"], ["sums"]),
        helper.make_node("Relu", ["sums"], ["hidden"]),
        helper.make_node("Gemm", ["hidden", "weight2", "bias2"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probabilities"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", n_features])
    y = helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", n_classes])
    graph = helper.make_graph(nodes, "perceptron", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def main() -> None:
    """Searches a learning rate, then continues the training of a scikit-learn network."""
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.3, random_state=SEED, stratify=y)

    # The loss is inserted before the softmax; the pipeline scales the inputs of the network.
    network = OnnxClassifier(perceptron, max_iter=15, random_state=SEED)
    pipeline = make_pipeline(StandardScaler(), network)
    rates = {"onnxclassifier__learning_rate": [1e-4, 1e-3, 1e-2]}
    grid = GridSearchCV(pipeline, rates, cv=3).fit(x_train, y_train)
    for how, score in zip(grid.cv_results_["params"], grid.cv_results_["mean_test_score"], strict=True):
        print(f"learning rate {how['onnxclassifier__learning_rate']}: accuracy {score:.3f} in cross-validation")
    print(f"the best of them: accuracy {grid.score(x_test, y_test):.3f} on the rows that nobody has seen")

    # Continue the training of a scikit-learn network. Its scaler becomes a part of the model.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        little = make_pipeline(StandardScaler(), MLPClassifier((HIDDEN,), max_iter=3, random_state=SEED))
        little.fit(x_train, y_train)
    further = OnnxClassifier.from_estimator(little, max_iter=30, early_stopping=True, random_state=SEED)
    before = further.score(x_test, y_test)
    further.fit(x_train, y_train)
    print(f"fitted by scikit-learn: accuracy {before:.3f}, and {further.score(x_test, y_test):.3f} after more training")

    # The trained model is plain ONNX and runs in any runtime.
    session = ortrain.InferenceSession(further.to_onnx())
    (labels,) = session.run(["label"], {session.get_inputs()[0].name: x_test.astype(np.float32)})
    print(f"labels of the exported model: {(labels == further.predict(x_test)).mean():.0%} the same")


if __name__ == "__main__":
    main()
