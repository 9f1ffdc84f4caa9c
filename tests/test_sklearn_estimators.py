"""`ortrain.sklearn`: scikit-learn's checks, losses by formula, weights as repetitions, and fitted estimators.

An estimator that scikit-learn fitted continues from its state.
"""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import SkipTest

import joblib
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.exceptions import NotFittedError
from sklearn.impute import SimpleImputer
from sklearn.linear_model import (
    ElasticNet,
    HuberRegressor,
    LinearRegression,
    LogisticRegression,
    Perceptron,
    PoissonRegressor,
    Ridge,
    RidgeClassifier,
    SGDClassifier,
    SGDRegressor,
)
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.multiclass import OneVsRestClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.svm import SVR, LinearSVC, LinearSVR
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks

import ortrain
from ortrain.gradient.excs import ConvergenceError
from ortrain.sklearn import OnnxClassifier, OnnxRegressor

# Tolerance of float32 sums in another order, and of scikit-learn's float64 results.
TOLERANCE = 1e-5
# Tolerance of float64 sums in another order, after some steps.
EXACT = 1e-12
# Learning rate of a step without a visible change.
STILL = 1e-30
HIDDEN = 8
ROWS, FEATURES, CLASSES = 60, 4, 3


def network(
    n_features: int,
    n_outputs: int,
    behind: tuple[tuple[str, dict[str, Any]], ...] = (),
    dtype: type = np.float32,
    opset: int = 17,
    batch: int | str = "batch",
) -> ModelProto:
    """Return a perceptron with one hidden layer, an output `scores`, and further nodes after it."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (n_features, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, n_outputs), "b2": (n_outputs,)}
    weights = {name: rng.standard_normal(shape) / np.sqrt(shape[0]) for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["sums"], "first"),
        helper.make_node("Tanh", ["sums"], ["hidden"], "tanh"),
        helper.make_node("Gemm", ["hidden", "w2", "b2"], ["scores"], "second"),
    ]
    last = "scores"
    for at, (op, attributes) in enumerate(behind):
        nodes.append(helper.make_node(op, [last], [f"y{at}"], **attributes))
        last = f"y{at}"
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "perceptron",
        [helper.make_tensor_value_info("x", element, [batch, n_features])],
        [helper.make_tensor_value_info(last, element, [batch, n_outputs] if last == "scores" else None)],
        [numpy_helper.from_array(value.astype(dtype), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8 if opset > 11 else 4)


class Network:
    """The network in a float type. Names of checks contain its text, so the text has no address."""

    def __init__(self, dtype: type) -> None:
        self.dtype = dtype

    def __call__(self, *arguments: Any, **settings: Any) -> ModelProto:
        return network(*arguments, dtype=self.dtype, **settings)

    def __repr__(self) -> str:
        return f"Network({self.dtype.__name__})"


singles, doubles = Network(np.float32), Network(np.float64)


def run(model: bytes, x: np.ndarray) -> list[Any]:
    """Return the results of onnxruntime."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    dtype = {"tensor(float)": np.float32, "tensor(double)": np.float64}[given.type]
    results: list[Any] = session.run(None, {given.name: x.astype(dtype)})
    return results


def cross_entropy(y: np.ndarray, found: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Compute the cross-entropy of the probabilities of sorted labels."""
    right = found.astype(np.float64)[np.arange(len(y)), np.searchsorted(np.unique(y), y)]
    return float(np.average(-np.log(right), weights=weights))


def weights_in(model: bytes) -> dict[str, np.ndarray]:
    graph = ModelProto.FromString(model).graph
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


class Data:
    """Rows with labels and regression targets, which depend on the rows and on noise."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.x = rng.standard_normal((ROWS, FEATURES)).astype(np.float32)
        signs = self.x @ rng.standard_normal((FEATURES, CLASSES)) + rng.standard_normal((ROWS, CLASSES))
        self.classes = signs.argmax(axis=1)
        self.names = np.array(["ash", "elm", "oak"])[self.classes]
        noise = 0.3 * rng.standard_normal((ROWS, 2))
        self.values = self.x @ rng.standard_normal((FEATURES, 2)) + noise
        self.weights = rng.integers(0, 4, ROWS)


DATA = Data()

# Scikit-learn's checks.

CHECKED = {"learning_rate": 0.02, "max_iter": 20, "random_state": 0}
# Checks that fail with several batches. With all rows in one batch and a float64 model every check passes.
IN_BATCHES = {
    "check_sample_weight_equivalence_on_dense_data": "a row with a weight of k is in one batch, the row k times may be "
    "in several: another step after another one",
}
MULTIOUTPUT = {
    "check_regressor_multioutput": "it wants predictions of float64; the model computes float32, and what it computes "
    "is handed on"
}
# Checks with requirements that the test environment lacks; scikit-learn skips them after their start.
NEEDS = {
    "check_array_api_input": "SCIPY_ARRAY_API is not set",
    "check_classifier_data_not_an_array": "pandas is not installed",
    "check_regressor_data_not_an_array": "pandas is not installed",
    "check_sample_weights_pandas_series": "pandas is not installed",
}
ESTIMATORS = {
    OnnxClassifier(doubles, batch_size=None, **CHECKED): {},
    OnnxRegressor(doubles, batch_size=None, **CHECKED): {},
    OnnxClassifier(singles, batch_size=8, **CHECKED): IN_BATCHES,
    OnnxRegressor(singles, batch_size=8, **CHECKED): IN_BATCHES | MULTIOUTPUT,
}


@parametrize_with_checks(list(ESTIMATORS), expected_failed_checks=ESTIMATORS.__getitem__, xfail_strict=True)
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    try:
        check(estimator)
    except SkipTest as skipped:
        assert NEEDS[check.func.__name__] in str(skipped)  # noqa: PT017


# Choice of the loss for an output.


def probabilities(name: str, y: np.ndarray) -> np.ndarray:
    """Compute the probabilities that a model's output represents."""
    y = y.reshape(len(y), -1).astype(np.float64)
    if y.shape[1] == 1:
        p = y if "Sigmoid" in name else 1 / (1 + np.exp(-y))
        return np.hstack([1 - p, p])
    if "LogSoftmax" in name:
        return np.exp(y)
    positive = y if "Softmax" in name or "Sigmoid" in name else np.exp(y)
    return positive / positive.sum(axis=1, keepdims=True)


ENDINGS: dict[str, tuple[int, tuple[tuple[str, dict[str, Any]], ...]]] = {
    "scores": (3, ()),
    "two scores": (2, ()),
    "Softmax": (3, (("Softmax", {"axis": 1}),)),
    "LogSoftmax": (3, (("LogSoftmax", {"axis": 1}),)),
    "Softmax and Identity": (3, (("Softmax", {}), ("Identity", {}))),
    "one score": (1, ()),
    "one score twice handed on": (1, (("Identity", {}), ("Flatten", {"axis": 1}))),
    "Sigmoid of one": (1, (("Sigmoid", {}),)),
    "Sigmoid of three": (3, (("Sigmoid", {}),)),
    "clipped scores": (3, (("Relu", {}),)),
}


@pytest.mark.parametrize("opset", [9, 17, 21])
@pytest.mark.parametrize("name", ENDINGS)
def test_the_loss_fits_the_output(name: str, opset: int) -> None:
    """The loss is the weighted negative logarithm of the probability of the correct class."""
    columns, behind = ENDINGS[name]
    model = network(FEATURES, columns, behind, opset=opset)
    y = np.minimum(DATA.classes, max(columns, 2) - 1)
    (output,) = run(model.SerializeToString(), DATA.x)
    wanted = probabilities(name, output)
    classifier = OnnxClassifier(model, learning_rate=STILL, max_iter=1, optimizer="sgd")
    classifier.fit(DATA.x, y, sample_weight=DATA.weights)
    by_hand = cross_entropy(y, wanted, DATA.weights)
    assert classifier.loss_curve_ == [pytest.approx(by_hand, rel=TOLERANCE)]
    np.testing.assert_allclose(classifier.predict_proba(DATA.x), wanted, atol=TOLERANCE)
    np.testing.assert_array_equal(classifier.predict(DATA.x), wanted.argmax(axis=1))
    np.testing.assert_allclose(run(classifier.to_onnx(), DATA.x)[0], output, atol=TOLERANCE)
    classifier.set_params(learning_rate=0.01, max_iter=10, optimizer="adamw").fit(DATA.x, y)
    assert classifier.loss_curve_[-1] < classifier.loss_curve_[0]
    (trained,) = run(classifier.to_onnx(), DATA.x)
    np.testing.assert_allclose(probabilities(name, trained), classifier.predict_proba(DATA.x), atol=TOLERANCE)


REGRESSIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "squared_error": np.square,
    "absolute_error": np.abs,
    "huber": lambda gap: np.where(np.abs(gap) < 1, gap**2 / 2, np.abs(gap) - 0.5),
}


@pytest.mark.parametrize("loss", REGRESSIONS)
@pytest.mark.parametrize("opset", [7, 17])
def test_losses_of_regression(loss: str, opset: int) -> None:
    """Losses match their formulas, and gradients match slopes; the batches average to the mean."""
    model = network(FEATURES, 2, dtype=np.float64, opset=opset)
    start = {"loss": loss, "optimizer": "sgd", "shuffle": False}

    def mean(x: np.ndarray) -> float:
        rows = REGRESSIONS[loss](x - DATA.values).mean(axis=1)
        return float(np.average(rows, weights=DATA.weights))

    still = OnnxRegressor(model, learning_rate=STILL, max_iter=1, batch_size=7, **start)
    still.fit(DATA.x, DATA.values, sample_weight=DATA.weights)
    (output,) = run(model.SerializeToString(), DATA.x)
    assert still.loss_curve_ == [pytest.approx(mean(output), rel=EXACT)]
    np.testing.assert_allclose(still.predict(DATA.x), output, rtol=0, atol=EXACT)

    rate = 1e-6
    moved = OnnxRegressor(model, learning_rate=rate, max_iter=1, batch_size=None, **start)
    moved.fit(DATA.x, DATA.values, sample_weight=DATA.weights)
    before, after = weights_in(model.SerializeToString()), weights_in(moved.to_onnx())
    length = sum(float(np.square((after[name] - before[name]) / rate).sum()) for name in before)
    slope = (mean(moved.predict(DATA.x)) - mean(output)) / rate
    assert slope == pytest.approx(-length, rel=1e-4)


def test_losses_have_the_names_of_artifacts() -> None:
    for kind, name in ((ortrain.LossType.L1Loss, "absolute_error"), (ortrain.LossType.MSELoss, "squared_error")):
        pair = [
            OnnxRegressor(network, loss=loss, max_iter=3, random_state=1).fit(DATA.x, DATA.values)
            for loss in (kind, name)
        ]
        assert pair[0].to_onnx() == pair[1].to_onnx()
    named = OnnxClassifier(network, loss=ortrain.LossType.CrossEntropyLoss, max_iter=3, random_state=1)
    auto = OnnxClassifier(network, max_iter=3, random_state=1)
    assert named.fit(DATA.x, DATA.names).to_onnx() == auto.fit(DATA.x, DATA.names).to_onnx()


def test_a_named_output() -> None:
    """An intermediate value may be a regressor's output; the trained model keeps its other outputs."""
    model = network(FEATURES, CLASSES, (("Softmax", {}),))
    regressor = OnnxRegressor(model, output="hidden", max_iter=5)
    wanted = np.tanh(np.tile(DATA.values, HIDDEN // 2))
    regressor.fit(DATA.x, wanted)
    assert regressor.predict(DATA.x).shape == wanted.shape
    assert regressor.loss_curve_[-1] < regressor.loss_curve_[0]
    assert run(regressor.to_onnx(), DATA.x)[0].shape == (ROWS, CLASSES)


# Weights.


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_weight_is_so_many_repetitions(optimizer: str) -> None:
    """A weight equals repetitions if all rows are in one batch. Rows of weight 0 have no effect in any batch size."""
    for estimator, y in (
        (OnnxClassifier(doubles, classes=range(CLASSES)), DATA.classes),
        (OnnxRegressor(doubles), DATA.values),
    ):
        estimator.set_params(optimizer=optimizer, learning_rate=0.01, max_iter=10, batch_size=None, random_state=0)
        repeated = clone(estimator).fit(np.repeat(DATA.x, DATA.weights, axis=0), np.repeat(y, DATA.weights, axis=0))
        weighted = clone(estimator).fit(DATA.x, y, sample_weight=DATA.weights)
        assert weighted.loss_curve_ == pytest.approx(repeated.loss_curve_, rel=EXACT)
        for name, value in weights_in(weighted.to_onnx()).items():
            np.testing.assert_allclose(value, weights_in(repeated.to_onnx())[name], rtol=0, atol=1e-9)

        estimator.set_params(batch_size=16)
        there = DATA.weights > 0
        fewer = clone(estimator).fit(DATA.x[there], y[there], sample_weight=DATA.weights[there])
        assert clone(estimator).fit(DATA.x, y, sample_weight=DATA.weights).to_onnx() == fewer.to_onnx()


def test_weights_reach_a_step_of_a_pipeline() -> None:
    alone = OnnxClassifier(network, max_iter=3, random_state=0)
    scaled = StandardScaler().fit(DATA.x).transform(DATA.x)
    alone.fit(scaled, DATA.names, sample_weight=DATA.weights)
    pipeline = make_pipeline(StandardScaler(), OnnxClassifier(network, max_iter=3, random_state=0))
    pipeline.fit(DATA.x, DATA.names, onnxclassifier__sample_weight=DATA.weights)
    assert pipeline[-1].to_onnx() == alone.to_onnx()


# Estimators that scikit-learn fitted.

MLP = {"hidden_layer_sizes": (6, 5), "max_iter": 30, "random_state": 0}
HOLES = np.where(np.random.default_rng(1).random(DATA.x.shape) < 0.1, np.float32("nan"), DATA.x)
FITTED_CLASSIFIERS: dict[str, tuple[Any, np.ndarray]] = {
    "mlp": (MLPClassifier(**MLP), DATA.classes),
    "mlp of two": (MLPClassifier(**MLP), DATA.classes > 0),
    "scaled mlp": (make_pipeline(StandardScaler(), MLPClassifier(**MLP)), DATA.names),
    "logistic": (LogisticRegression(), DATA.classes + 4),
    "logistic of two": (make_pipeline(StandardScaler(), LogisticRegression()), DATA.classes > 0),
    "logistic of names": (LogisticRegression(), DATA.names),
    "imputed": (make_pipeline(SimpleImputer(), LogisticRegression()), DATA.names),
    "principal components": (make_pipeline(PCA(3), LogisticRegression()), DATA.classes),
    "sgd": (SGDClassifier(loss="log_loss", random_state=0), DATA.classes),
    "sgd of two": (SGDClassifier(loss="log_loss", random_state=0), DATA.classes > 1),
    "hinge": (SGDClassifier(random_state=0), DATA.names),
    "svc": (LinearSVC(), DATA.classes),
    "svc of two": (LinearSVC(), DATA.names == "elm"),
    "ridge": (RidgeClassifier(), DATA.classes),
    "perceptron": (Perceptron(), DATA.classes > 0),
    "one against rest": (OneVsRestClassifier(LogisticRegression()), DATA.classes),
    "discriminants": (LinearDiscriminantAnalysis(), DATA.names),
    "bayes": (GaussianNB(), DATA.classes),
}
FITTED_REGRESSORS: dict[str, tuple[Any, np.ndarray]] = {
    "mlp": (MLPRegressor(**MLP), DATA.values),
    "mlp of one": (MLPRegressor(**MLP), DATA.values[:, 0]),
    "linear": (LinearRegression(), DATA.values),
    "linear of a column": (LinearRegression(), DATA.values[:, :1]),
    "scaled ridge": (make_pipeline(MinMaxScaler(), Ridge()), DATA.values),
    "sgd": (SGDRegressor(random_state=0), DATA.values[:, 0]),
    "elastic net": (ElasticNet(0.01), DATA.values),
    "svr": (LinearSVR(random_state=0), DATA.values[:, 0]),
    "huber": (HuberRegressor(), DATA.values[:, 1]),
    "poisson": (PoissonRegressor(), np.abs(DATA.values[:, 0])),
}


def fitted(estimator: Any, x: np.ndarray, y: np.ndarray) -> Any:
    with warnings.catch_warnings():
        # Networks with few passes warn about convergence.
        warnings.simplefilter("ignore")
        return clone(estimator).fit(x, y)


@pytest.mark.parametrize("name", FITTED_CLASSIFIERS)
def test_a_fitted_classifier_goes_on(name: str) -> None:
    """Predictions equal scikit-learn's, then the loss falls; onnxruntime gives our predicted labels."""
    estimator, y = FITTED_CLASSIFIERS[name]
    x = HOLES if name == "imputed" else DATA.x
    old = fitted(estimator, x, y)
    new = OnnxClassifier.from_estimator(old, learning_rate=1e-3, max_iter=15, random_state=0)
    np.testing.assert_array_equal(new.classes_, old.classes_)
    assert new.n_features_in_ == FEATURES
    np.testing.assert_array_equal(new.predict(x), old.predict(x))
    assert new.predict(x).dtype == old.predict(x).dtype
    if hasattr(old, "predict_proba"):
        np.testing.assert_allclose(new.predict_proba(x), old.predict_proba(x), atol=TOLERANCE)
    before = new.predict_proba(x)
    still = clone(new).set_params(learning_rate=STILL, max_iter=1, optimizer="sgd").fit(x, y)
    if before.min() > 0:  # the decisions of "hinge" are so large that probabilities round to 0
        assert still.loss_curve_[0] == pytest.approx(cross_entropy(y, before), rel=1e-4)
    losses = clone(new).fit(x, y).loss_curve_
    assert losses[-1] < losses[0]
    new.partial_fit(x, y)
    assert (new.predict_proba(x) != before).any()
    label = run(new.to_onnx(), x)[0]
    np.testing.assert_array_equal(label.astype(new.classes_.dtype), new.predict(x))


@pytest.mark.parametrize("name", FITTED_REGRESSORS)
def test_a_fitted_regressor_goes_on(name: str) -> None:
    estimator, y = FITTED_REGRESSORS[name]
    old = fitted(estimator, DATA.x, y)
    new = OnnxRegressor.from_estimator(old, learning_rate=1e-3, max_iter=15, random_state=0)
    wanted = old.predict(DATA.x)
    assert new.predict(DATA.x).shape == wanted.shape
    np.testing.assert_allclose(new.predict(DATA.x), wanted, rtol=TOLERANCE, atol=TOLERANCE)
    still = clone(new).set_params(learning_rate=STILL, max_iter=1, optimizer="sgd").fit(DATA.x, y)
    assert still.loss_curve_[0] == pytest.approx(float(np.mean((wanted - y) ** 2)), rel=1e-4)
    new.fit(DATA.x, y)
    assert new.loss_curve_[-1] < new.loss_curve_[0]
    assert new.predict(DATA.x).shape == wanted.shape
    (output,) = run(new.to_onnx(), DATA.x)
    np.testing.assert_allclose(output.reshape(wanted.shape), new.predict(DATA.x), rtol=TOLERANCE, atol=TOLERANCE)


def test_scaler_is_not_trained() -> None:
    """Only the network is trained; the scaler's values do not change."""
    old = fitted(FITTED_CLASSIFIERS["scaled mlp"][0], 3 * DATA.x + 7, DATA.names)
    new = OnnxClassifier.from_estimator(old, max_iter=3).fit(3 * DATA.x + 7, DATA.names)
    before, after = (ModelProto.FromString(model).graph for model in (new.model, new.to_onnx()))
    (scaler,) = (node for node in before.node if node.op_type == "Scaler")
    assert scaler in list(after.node)
    changed = {
        name for name, value in weights_in(new.to_onnx()).items() if (value != weights_in(new.model)[name]).any()
    }
    assert changed == {f"{kind}{layer}" for kind in ("coefficient", "intercepts") for layer in ("", "1", "2")}


def test_the_type_of_rows_is_that_of_the_model() -> None:
    old = fitted(LinearRegression(), DATA.x.astype(np.float64), DATA.values)
    new = OnnxRegressor.from_estimator(old, X=DATA.x.astype(np.float64))
    assert new.predict(DATA.x).dtype == np.float64
    np.testing.assert_allclose(new.predict(DATA.x), old.predict(DATA.x.astype(np.float64)), rtol=0, atol=EXACT)
    whole = np.rint(10 * DATA.x).astype(np.int64)
    of_integers = OnnxClassifier.from_estimator(fitted(LogisticRegression(), whole, DATA.names), X=whole)
    assert of_integers.fit(whole, DATA.names).predict(whole.astype(np.float64)).dtype == DATA.names.dtype


def test_names_of_columns_go_on() -> None:
    old = fitted(LogisticRegression(), DATA.x, DATA.names)
    # Imitate a fit to a table.
    old.feature_names_in_ = np.array(["a", "b", "c", "d"], object)
    new = OnnxClassifier.from_estimator(old)
    assert new.feature_names_in_.tolist() == ["a", "b", "c", "d"]
    with pytest.warns(UserWarning, match="X does not have valid feature names"):
        new.predict(DATA.x)


def test_a_fitted_estimator_goes_on_again() -> None:
    """With a warm start each fit continues; otherwise each fit starts from scikit-learn's weights."""
    old = fitted(LogisticRegression(), DATA.x, DATA.names)
    how = {"optimizer": "sgd", "learning_rate": 0.1, "batch_size": None, "max_iter": 3}
    again = OnnxClassifier.from_estimator(old, **how)
    first = again.fit(DATA.x, DATA.names).loss_curve_
    assert again.fit(DATA.x, DATA.names).loss_curve_ == first
    warm = OnnxClassifier.from_estimator(old, warm_start=True, **how)
    assert warm.fit(DATA.x, DATA.names).loss_curve_ == first
    assert warm.fit(DATA.x, DATA.names).loss_curve_[0] < first[-1]


def test_estimators_that_cannot_continue() -> None:
    tree = DecisionTreeClassifier().fit(DATA.x, DATA.classes)
    with pytest.raises(ortrain.UnsupportedError, match="decision trees cannot be trained or run"):
        OnnxClassifier.from_estimator(tree)
    with pytest.raises(ortrain.UnsupportedError, match="support vector machines with a kernel"):
        OnnxRegressor.from_estimator(SVR().fit(DATA.x, DATA.values[:, 0]))
    with pytest.raises(ortrain.UnsupportedError, match=r"^KNeighborsClassifier cannot be trained: the model has no"):
        OnnxClassifier.from_estimator(KNeighborsClassifier().fit(DATA.x, DATA.classes))
    several = fitted(MLPClassifier(**MLP), DATA.x, np.eye(CLASSES, dtype=int)[DATA.classes])
    with pytest.raises(ortrain.UnsupportedError) as refused:
        OnnxClassifier.from_estimator(several)
    assert (
        str(refused.value) == "MLPClassifier predicts 3 labels for each row; only one label for each row is supported"
    )
    with pytest.raises(ortrain.InvalidArgumentError) as invalid:
        OnnxClassifier.from_estimator(LinearRegression().fit(DATA.x, DATA.values))
    assert str(invalid.value) == "OnnxClassifier.from_estimator requires a classifier, got LinearRegression"
    with pytest.raises(
        ortrain.InvalidArgumentError, match=r"OnnxRegressor\.from_estimator requires a regressor, got Logistic"
    ):
        OnnxRegressor.from_estimator(LogisticRegression().fit(DATA.x, DATA.classes))
    with pytest.raises(NotFittedError):
        OnnxClassifier.from_estimator(LogisticRegression())
    with pytest.raises(ortrain.InvalidArgumentError, match=r"^classes cannot be passed here: the fitted estimator"):
        OnnxClassifier.from_estimator(LogisticRegression().fit(DATA.x, DATA.classes), classes=[1, 2, 3])
    with pytest.raises(ortrain.InvalidArgumentError) as invalid:
        OnnxRegressor.from_estimator(LinearRegression().fit(DATA.x, DATA.values), X=DATA.x[:, :2])
    assert str(invalid.value) == "X is float32[60, 2], but the estimator was fitted to rows of 4 numbers"


# Training.


def test_digits_are_learned_as_well_as_by_scikit_learn() -> None:
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 16, y, random_state=0, stratify=y)
    how = {"learning_rate_init": 0.01, "batch_size": 64, "max_iter": 15, "random_state": 0}
    theirs = fitted(MLPClassifier((64,), **how), x_train, y_train).score(x_test, y_test)
    ours = OnnxClassifier(digits_network(), learning_rate=0.01, batch_size=64, max_iter=15, random_state=0)
    assert ours.fit(x_train, y_train).score(x_test, y_test) >= theirs - 0.01
    assert theirs > 0.95


def digits_network() -> ModelProto:
    """Return a perceptron with scikit-learn's weight initialization."""
    rng = np.random.default_rng(0)
    tensors = []
    for name, shape in (("1", (64, 64)), ("2", (64, 10))):
        bound = np.sqrt(6 / sum(shape))
        tensors.append(numpy_helper.from_array(rng.uniform(-bound, bound, shape).astype(np.float32), "w" + name))
        tensors.append(numpy_helper.from_array(rng.uniform(-bound, bound, shape[1]).astype(np.float32), "b" + name))
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["sums"]),
        helper.make_node("Relu", ["sums"], ["hidden"]),
        helper.make_node("Gemm", ["hidden", "w2", "b2"], ["scores"]),
    ]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])
    made = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 10])
    graph = helper.make_graph(nodes, "digits", [given], [made], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_the_same_seed_gives_the_same_bits() -> None:
    made = [
        OnnxClassifier(network, max_iter=4, random_state=seed, num_threads=threads).fit(DATA.x, DATA.names)
        for seed, threads in ((3, 1), (3, 2), (4, 1))
    ]
    assert made[0].to_onnx() == made[1].to_onnx() != made[2].to_onnx()
    again = made[0].to_onnx()
    assert made[0].fit(DATA.x, DATA.names).to_onnx() == again
    ordered = [OnnxClassifier(network, max_iter=4, shuffle=False, random_state=seed) for seed in (3, 4)]
    first, second = (classifier.fit(DATA.x, DATA.names).to_onnx() for classifier in ordered)
    assert first == second != again


def test_warm_start_goes_on() -> None:
    """Two halves of plain gradient descent equal the whole; without a warm start each fit starts from the model."""
    how = {"optimizer": "sgd", "learning_rate": 0.05, "batch_size": None, "random_state": 0}
    whole = OnnxRegressor(network, max_iter=10, **how).fit(DATA.x, DATA.values)
    halves = OnnxRegressor(network, max_iter=5, warm_start=True, **how)
    halves.fit(DATA.x, DATA.values).fit(DATA.x, DATA.values)
    assert halves.n_iter_ == 5
    assert halves.loss_curve_ == whole.loss_curve_[5:]
    np.testing.assert_array_equal(halves.predict(DATA.x), whole.predict(DATA.x))
    classifier = OnnxClassifier(network, max_iter=2, warm_start=True, random_state=0).fit(DATA.x, DATA.names)
    two = DATA.names != "oak"
    assert classifier.fit(DATA.x[two], DATA.names[two]).classes_.tolist() == ["ash", "elm", "oak"]


def test_partial_fit_is_a_pass() -> None:
    """Passes without shuffling equal fit; the optimizer's moments persist, also in a pickle."""
    whole = OnnxClassifier(network, max_iter=4, shuffle=False, random_state=0).fit(DATA.x, DATA.names)
    parts = OnnxClassifier(network, shuffle=False, random_state=0)
    for _ in range(4):
        parts.partial_fit(DATA.x, DATA.names, classes=["oak", "elm", "ash"])
        parts = pickle.loads(pickle.dumps(parts))
    assert parts.to_onnx() == whole.to_onnx()
    assert parts.loss_curve_ == whole.loss_curve_
    assert (parts.n_iter_, whole.n_iter_) == (4, 4)
    parts.partial_fit(DATA.x[:5], np.array(["oak"] * 5))
    assert parts.classes_.tolist() == ["ash", "elm", "oak"]


def test_early_stopping() -> None:
    """Training stops without an improvement, and the weights of the best score remain."""
    seen: list[bytes] = []
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 2, ROWS)
    classifier = OnnxClassifier(
        network,
        early_stopping=True,
        validation_fraction=0.25,
        n_iter_no_change=6,
        learning_rate=0.05,
        max_iter=500,
        random_state=0,
        on_epoch=lambda estimator: seen.append(estimator.to_onnx()),
    )
    classifier.fit(DATA.x, noise)
    scores = classifier.validation_scores_
    assert classifier.n_iter_ == len(seen) == len(scores) == len(classifier.loss_curve_) < 500
    best = int(np.argmax(scores))
    assert classifier.best_validation_score_ == scores[best]
    assert classifier.to_onnx() == seen[best]
    assert best == classifier.n_iter_ - 1 - 6
    assert all(score * 15 == pytest.approx(round(score * 15)) for score in scores)

    regressor = OnnxRegressor(network, early_stopping=True, max_iter=5, random_state=0)
    regressor.fit(DATA.x, DATA.values)
    assert len(regressor.validation_scores_) == 5
    assert regressor.best_validation_score_ == max(regressor.validation_scores_) <= 1
    without = OnnxRegressor(network, max_iter=5, random_state=0).fit(DATA.x, DATA.values)
    assert without.validation_scores_ is None
    assert without.best_validation_score_ is None


def test_training_ends_without_a_gain() -> None:
    still = OnnxRegressor(network, learning_rate=STILL, n_iter_no_change=3, max_iter=50, batch_size=None)
    assert still.fit(DATA.x, DATA.values).n_iter_ == 4
    told = OnnxRegressor(network, max_iter=50, on_epoch=lambda estimator: estimator.n_iter_ == 2)
    assert told.fit(DATA.x, DATA.values).n_iter_ == 2


@pytest.mark.parametrize("train", [1, ["w2", "b2"], ["second*"], ["*2"], lambda info: info.layer == 1])
def test_train_selects_the_weights(train: Any) -> None:
    model = network(FEATURES, CLASSES)
    after = weights_in(OnnxClassifier(model, train=train, max_iter=2).fit(DATA.x, DATA.names).to_onnx())
    before = weights_in(model.SerializeToString())
    assert {name for name in before if (before[name] != after[name]).any()} == {"w2", "b2"}


# Models.


def test_images() -> None:
    """Rows are images or flat pixels; the fixed batch axis of a model is opened."""
    images = np.random.default_rng(0).random((40, 1, 8, 8), np.float32)
    y = images.mean(axis=(1, 3)).argmax(axis=1)
    how = {"classes": range(10), "max_iter": 3, "random_state": 0}
    convnet = onnx.load(ortrain.examples.convnet())
    a, b = (OnnxClassifier(convnet, **how).fit(x, y) for x in (images, images.reshape(40, 64)))
    assert a.to_onnx() == b.to_onnx()
    found = a.predict_proba(images)
    assert found.shape == (40, 10)
    # The running statistics were updated, and the exported model contains them.
    np.testing.assert_allclose(probabilities("", run(a.to_onnx(), images)[0]), found, atol=TOLERANCE)
    with pytest.raises(ortrain.InvalidArgumentError, match=r"^X has rows of shape \[1, 8, 7\]"):
        a.predict(images[..., :7])
    fixed = network(FEATURES, CLASSES, batch=1)
    open_ = network(FEATURES, CLASSES)
    c, d = (OnnxClassifier(model, max_iter=3, random_state=0).fit(DATA.x, DATA.names) for model in (fixed, open_))
    np.testing.assert_array_equal(c.predict_proba(DATA.x), d.predict_proba(DATA.x))


def test_models_may_be_paths_and_bytes(tmp_path: Path) -> None:
    model = network(FEATURES, CLASSES)
    # `save_model` changes the model that it saves, so save a copy.
    copy = network(FEATURES, CLASSES)
    onnx.save_model(copy, tmp_path / "outside.onnx", save_as_external_data=True, location="data", size_threshold=0)
    (tmp_path / "whole.onnx").write_bytes(model.SerializeToString())
    ways = [model, model.SerializeToString(), tmp_path / "outside.onnx", str(tmp_path / "whole.onnx")]
    trained = {
        OnnxClassifier(way, max_iter=2, random_state=0).fit(DATA.x, DATA.names).predict_proba(DATA.x).tobytes()
        for way in ways
    }
    assert len(trained) == 1


def words(count: int, opset: int = 17) -> ModelProto:
    """Return a model of word indices: the mean of their vectors, and a linear layer."""
    rng = np.random.default_rng(0)
    tensors = [
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        for name, shape in (("vectors", (20, 6)), ("w", (6, 2)))
    ]
    nodes = [
        helper.make_node("Gather", ["vectors", "x"], ["found"]),
        helper.make_node("ReduceMean", ["found"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["mean", "w"], ["scores"]),
    ]
    given = helper.make_tensor_value_info("x", TensorProto.INT64, ["batch", count])
    made = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 2])
    graph = helper.make_graph(nodes, "words", [given], [made], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def test_inputs_of_integers() -> None:
    x = np.random.default_rng(0).integers(0, 20, (30, 5))
    classifier = OnnxClassifier(words(5), max_iter=30, learning_rate=0.05, random_state=0)
    y = (x < 10).mean(axis=1) > 0.5
    assert classifier.fit(x, y).score(x, y) > 0.9
    np.testing.assert_array_equal(classifier.predict(x.astype(np.float32)), classifier.predict(x))
    broken = x.astype(np.float64)
    broken[3, 1] = 0.5
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        classifier.predict(broken)
    assert str(error.value) == (
        'X has 0.5 at [3, 1], which cannot be represented in int64, the element type of the input "x" of the model'
    )


# Use inside of scikit-learn.


def test_grid_search_and_cross_validation() -> None:
    pipeline = make_pipeline(StandardScaler(), OnnxClassifier(network, max_iter=5, random_state=0))
    grid = GridSearchCV(pipeline, {"onnxclassifier__learning_rate": [1e-6, 0.05]}, cv=3).fit(DATA.x, DATA.names)
    assert grid.best_params_ == {"onnxclassifier__learning_rate": 0.05}
    assert grid.predict(DATA.x).shape == (ROWS,)
    model = network(FEATURES, CLASSES)
    scores = cross_val_score(OnnxClassifier(model, max_iter=5), DATA.x, DATA.names, cv=3, scoring="neg_log_loss")
    assert np.isfinite(scores).all()


def test_the_example() -> None:
    script = Path(__file__).parent.parent / "examples" / "sklearn_pipeline.py"
    done = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    low, _, high, best, before = (float(re.findall(r"accuracy (\d\.\d+)", line)[0]) for line in lines[:5])
    after = float(re.findall(r"and (\d\.\d+) after more training", lines[4])[0])
    assert low < high <= best + 0.05
    assert before < 0.6
    assert after > 0.93
    assert lines[5:] == ["labels of the exported model: 100% the same"]


def test_pickles_and_copies(tmp_path: Path) -> None:
    for estimator, y in (
        (OnnxClassifier(network(FEATURES, CLASSES), max_iter=2, random_state=0), DATA.names),
        (OnnxRegressor(network, max_iter=2, random_state=0), DATA.values),
    ):
        before = pickle.loads(pickle.dumps(estimator)).fit(DATA.x, y)
        estimator.fit(DATA.x, y)
        assert before.to_onnx() == estimator.to_onnx()
        joblib.dump(estimator, tmp_path / "estimator")
        loaded = joblib.load(tmp_path / "estimator")
        np.testing.assert_array_equal(loaded.predict(DATA.x), estimator.predict(DATA.x))
        assert loaded.partial_fit(DATA.x, y).to_onnx() == estimator.partial_fit(DATA.x, y).to_onnx()
        with pytest.raises(NotFittedError):
            clone(loaded).predict(DATA.x)


def test_printing_shows_no_bytes() -> None:
    model = network(FEATURES, CLASSES)
    for given in (model, model.SerializeToString()):
        text = repr(OnnxClassifier(given, max_iter=3))
        assert text == f"OnnxClassifier(max_iter=3, model=<ONNX model of {model.ByteSize()} bytes>)"
    assert repr(OnnxRegressor("model.onnx")) == "OnnxRegressor(model='model.onnx')"


def test_targets_of_each_shape() -> None:
    for y in (DATA.values[:, 0], DATA.values[:, :1], DATA.values):
        regressor = OnnxRegressor(network, max_iter=2).fit(DATA.x, y)
        assert regressor.predict(DATA.x).shape == y.shape
        assert np.isfinite(regressor.score(DATA.x, y))


def test_classes_name_the_columns() -> None:
    """`classes` has the order of the columns; predictions have the order of the sorted labels."""
    model = network(FEATURES, CLASSES)
    (scores,) = run(model.SerializeToString(), DATA.x)
    classifier = OnnxClassifier(model, classes=["oak", "ash", "elm"], max_iter=1, learning_rate=STILL)
    two = DATA.names != "elm"
    classifier.fit(DATA.x[two], DATA.names[two])
    assert classifier.classes_.tolist() == ["ash", "elm", "oak"]
    np.testing.assert_array_equal(classifier.predict(DATA.x), np.array(["oak", "ash", "elm"])[scores.argmax(axis=1)])
    wanted = probabilities("", scores)[:, [1, 2, 0]]
    np.testing.assert_allclose(classifier.predict_proba(DATA.x), wanted, atol=TOLERANCE)
    of_two = wanted[two][:, [0, 2]]
    assert classifier.loss_curve_[0] == pytest.approx(cross_entropy(DATA.names[two], of_two), rel=TOLERANCE)


# Errors.


def _with(index: tuple[int, int], value: float) -> np.ndarray:
    x = DATA.x.astype(np.float64)
    x[index] = value
    return x


WEIGHTS = {
    "sample_weight has the shape [3], but X has 60 rows; pass one weight for each row": np.ones(3),
    "sample_weight has the shape [60, 1], but X has 60 rows; pass one weight for each row": np.ones((ROWS, 1)),
    "the sample_weight of row 2 is -1.0; each weight must be at least 0": [1, 1, -1] + [1] * (ROWS - 3),
    "the sample_weight of row 1 is nan; each weight must be a finite number": [1, float("nan")] + [1] * (ROWS - 2),
    "the sample_weight of row 0 is inf; each weight must be a finite number": [float("inf")] + [1] * (ROWS - 1),
    "every sample_weight is zero, so there is no row to train on": np.zeros(ROWS),
}


@pytest.mark.parametrize("sentence", WEIGHTS)
@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_weights_that_are_none(sentence: str, method: str) -> None:
    for estimator, y in (
        (OnnxClassifier(network, classes=range(CLASSES)), DATA.classes),
        (OnnxRegressor(network), DATA.values),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            getattr(estimator, method)(DATA.x, y, sample_weight=WEIGHTS[sentence])
        assert str(error.value) == sentence
        assert isinstance(error.value, ortrain.InvalidArgumentError)


PARAMETERS: dict[str, dict[str, Any]] = {
    "learning_rate must be a positive float32, got 0": {"learning_rate": 0},
    "learning_rate must be a positive float32, got 1e+40": {"learning_rate": 1e40},
    "learning_rate must be a positive float32, got nan": {"learning_rate": float("nan")},
    "max_iter must be an integer of at least 1, got 0": {"max_iter": 0},
    "n_iter_no_change must be an integer of at least 1, got 2.5": {"n_iter_no_change": 2.5},
    "batch_size must be an integer of at least 1, or None for all rows, got 0": {"batch_size": 0},
    "validation_fraction must be a number between 0 and 1, got 1.0": {"validation_fraction": 1.0},
    "tol must be a number of at least 0, got -1": {"tol": -1},
    "on_epoch must be a callable or None, got 3": {"on_epoch": 3},
    "weight_decay must be a number of at least 0, got -0.1": {"weight_decay": -0.1},
    "optimizer must be 'adamw', 'sgd', an artifacts.AdamW or an artifacts.SGD, got 'adam'; did you mean 'adamw'?": {
        "optimizer": "adam"
    },
    "weight_decay=0.1 is a setting of optimizer='adamw' and has no effect on 'sgd'; an artifacts.AdamW has its own "
    "weight_decay": {"optimizer": "sgd", "weight_decay": 0.1},
    "train must be 'all', a number of layers, a list of names or a callable, got 'w2'; a single name or pattern "
    "must be a list: ['w2']": {"train": "w2"},
    "train must be 'all', a number of layers, a list of names or a callable, got []": {"train": []},
    "train: the pattern 'w9*' matches no parameter of the model and no node that uses a parameter; similar names: "
    "'w2', 'w1'": {"train": ["w9*"]},
    "train must be from 1 to 2, the number of layers that can be trained, got 7": {"train": 7},
    "the model has no value \"score\"; did you mean 'scores'?": {"output": "score"},
    "loss='hinge' does not fit the output \"scores\" of shape [batch, 2]; the losses of OnnxRegressor are 'auto', "
    "'squared_error', 'absolute_error', 'huber'": {"loss": "hinge"},
    "loss='cross_entropy' does not fit the output \"scores\" of shape [batch, 2]; the losses of OnnxRegressor are "
    "'auto', 'squared_error', 'absolute_error', 'huber'": {"loss": "cross_entropy"},
}


@pytest.mark.parametrize("sentence", PARAMETERS)
def test_parameters_that_nothing_can_be(sentence: str) -> None:
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        OnnxRegressor(network, **PARAMETERS[sentence]).fit(DATA.x, DATA.values)
    assert str(error.value) == sentence


def test_losses_that_do_not_fit() -> None:
    for columns, loss, sentence in (
        (
            1,
            "cross_entropy",
            "loss='cross_entropy' requires a column for each class, but the output \"scores\" has the shape [batch, "
            "1]; use 'binary_cross_entropy'",
        ),
        (
            2,
            "binary_cross_entropy",
            "loss='binary_cross_entropy' requires one column, the logit of the second class, but the output "
            "\"scores\" has the shape [batch, 2]; use 'cross_entropy'",
        ),
        (
            2,
            "squared_error",
            "loss='squared_error' does not fit the output \"scores\" of shape [batch, 2]; the losses of "
            "OnnxClassifier are 'auto', 'cross_entropy', 'binary_cross_entropy'",
        ),
    ):
        with pytest.raises(ortrain.InvalidArgumentError) as error:
            OnnxClassifier(network(FEATURES, columns), loss=loss).fit(DATA.x, DATA.classes > 0)
        assert str(error.value) == sentence


def test_classes_that_were_not_announced() -> None:
    classifier = OnnxClassifier(network)
    with pytest.raises(ValueError, match=r"^the first call of partial_fit requires classes"):
        classifier.partial_fit(DATA.x, DATA.names)
    classifier.partial_fit(DATA.x, DATA.names, classes=["ash", "elm", "oak"])
    before = classifier.to_onnx()
    with pytest.raises(ValueError) as error:  # noqa: PT011
        classifier.partial_fit(DATA.x[:2], np.array(["oak", "yew"]))
    assert str(error.value) == "y has the label 'yew', which is not among the classes 'ash', 'elm', 'oak'"
    with pytest.raises(ValueError) as error:  # noqa: PT011
        classifier.partial_fit(DATA.x, DATA.names, classes=["ash", "elm", "yew"])
    assert (
        str(error.value) == "classes must not change: they are 'ash', 'elm', 'yew' here, but 'ash', 'elm', 'oak' before"
    )
    assert classifier.to_onnx() == before
    for classes, sentence in (
        (["ash"], "classes must be two labels or more, got ['ash']"),
        (["ash", "ash"], "classes must be different labels, got 'ash', 'ash'"),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            OnnxClassifier(network).partial_fit(DATA.x, DATA.names, classes=classes)
        assert str(error.value) == sentence
    with pytest.raises(ValueError, match="here, but 1, 2, 3 in the constructor"):
        OnnxClassifier(network, classes=[1, 2, 3]).partial_fit(DATA.x, DATA.classes, classes=[0, 1, 2])


def test_a_fit_that_is_refused_leaves_the_estimator_as_it_was() -> None:
    classifier = OnnxClassifier(network(FEATURES, CLASSES), max_iter=2, random_state=0).fit(DATA.x, DATA.names)
    before = classifier.predict(DATA.x)
    for x, y, changes in (
        (DATA.x, np.arange(ROWS) % 5, {}),
        (DATA.x, np.zeros(ROWS), {}),
        (DATA.x, DATA.names, {"classes": ["ash", "elm", "yew"]}),
        (DATA.x, DATA.names, {"loss": "hinge"}),
        (DATA.x[:, :2], DATA.names, {}),
        (DATA.x[[0, 1, 2, 3]], DATA.names[[0, 1, 2, 3]], {"early_stopping": True}),
    ):
        classifier.set_params(**changes)
        with pytest.raises(ValueError):  # noqa: PT011
            classifier.fit(x, y)
        classifier.set_params(classes=None, loss="auto", early_stopping=False)
        np.testing.assert_array_equal(classifier.predict(DATA.x), before)
        assert (classifier.n_iter_, classifier.n_features_in_) == (2, FEATURES)
    fresh = OnnxClassifier(network)
    with pytest.raises(ortrain.InvalidArgumentError):
        fresh.partial_fit(DATA.x, DATA.classes, classes=[0, 1, 2], sample_weight=np.zeros(ROWS))
    assert fresh.fit(DATA.x, DATA.classes > 0).classes_.tolist() == [False, True]
    regressor = OnnxRegressor(network, max_iter=2).fit(DATA.x, DATA.values)
    with pytest.raises(ortrain.InvalidArgumentError, match=r"^y has 1 number for each row, but the output"):
        regressor.partial_fit(DATA.x, DATA.values[:, 0])
    assert regressor.predict(DATA.x).shape == (ROWS, 2)


def test_classes_that_do_not_fit_the_model() -> None:
    alone = "a classifier requires at least two (pass classes for labels that y does not have)"
    for y, weights in ((np.full(ROWS, 7), None), (DATA.classes, DATA.classes == 1)):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            OnnxClassifier(network).fit(DATA.x, y, sample_weight=weights)
        assert str(error.value) == f"y has only one class, {y[1] if weights is None else 1}; {alone}"
    with pytest.raises(ValueError) as error:  # noqa: PT011
        OnnxClassifier(network(FEATURES, 5)).fit(DATA.x, DATA.names)
    assert str(error.value) == (
        "there are 3 classes, 'ash', 'elm', 'oak', but the output \"scores\" has the shape [batch, 5]; name the "
        "class of each column in classes, or replace the head: artifacts.replace_head(model, 3)"
    )
    with pytest.raises(ValueError) as error:  # noqa: PT011
        OnnxRegressor(network(FEATURES, 5)).fit(DATA.x, DATA.values)
    assert str(error.value) == 'y has 2 numbers for each row, but the output "scores" has the shape [batch, 5]'


def test_rows_that_scikit_learn_refuses() -> None:
    classifier = OnnxClassifier(network, max_iter=1).fit(DATA.x, DATA.names)
    for call in (lambda x: classifier.fit(x, DATA.names), classifier.predict, classifier.predict_proba):
        with pytest.raises(ValueError, match="Input X contains NaN"):
            call(_with((0, 0), float("nan")))
        with pytest.raises(ValueError, match="Input X contains infinity"):
            call(_with((3, 1), float("inf")))
        with pytest.raises(TypeError, match="Sparse data was passed"):
            call(csr_matrix(DATA.x))
        with pytest.raises(ValueError, match="Reshape your data"):
            call(DATA.x[0])
    with pytest.raises(ValueError) as error:  # noqa: PT011
        classifier.predict(_with((1, 2), 1e300))
    assert str(error.value) == (
        'X has 1e+300 at [1, 2], which is too large for float32, the element type of the input "x" of the model'
    )
    with pytest.raises(ValueError, match="X has 3 features, but OnnxClassifier is expecting 4 features as input"):
        classifier.predict(DATA.x[:, :3])
    with pytest.raises(ValueError, match="X has 3 features, but OnnxClassifier is expecting 4 features as input"):
        classifier.partial_fit(DATA.x[:, :3], DATA.names)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        OnnxClassifier(network(FEATURES, CLASSES)).fit(DATA.x[:, :3], DATA.names)
    assert str(error.value) == (
        'X has rows of shape [3], but the input "x" of the model has rows of shape [4]; pass rows of that shape, '
        "or flat rows of equal size"
    )
    for y, sentence in (
        (np.full(ROWS, float("nan")), "Input y contains NaN"),
        (DATA.values[:3], "inconsistent numbers"),
    ):
        with pytest.raises(ValueError, match=sentence):
            OnnxRegressor(network).fit(DATA.x, y)
    with pytest.raises(ValueError, match="y has a value that is too large for float32"):
        OnnxRegressor(network).fit(DATA.x, np.full(ROWS, 1e300))
    with pytest.raises(ValueError, match="Found array with dim 3, while dim <= 2 is required"):
        OnnxRegressor(network).fit(DATA.x, DATA.values[:, :, None])


def test_estimators_that_were_not_fitted() -> None:
    for estimator in (OnnxClassifier(network), OnnxRegressor(network)):
        for method in ("predict", "predict_proba", "to_onnx", "score"):
            if not hasattr(estimator, method):
                continue
            arguments: tuple[Any, ...] = {"to_onnx": (), "score": (DATA.x, DATA.classes)}.get(method, (DATA.x,))
            with pytest.raises(NotFittedError):
                getattr(estimator, method)(*arguments)


@pytest.mark.parametrize(
    ("optimizer", "rate", "what"),
    [
        ("sgd", 1e30, "the loss of a batch is (nan|inf)"),
        ("adamw", 1e30, "the loss of a batch is (nan|inf)"),
        ("adamw", 1e4, "the loss is [0-9.e+]+, but was at most"),
    ],
)
def test_a_learning_rate_that_is_absurd(optimizer: str, rate: float, what: str) -> None:
    """The estimator remains usable: it has the previous weights, and trains at another rate."""
    model = network(FEATURES, 2)
    regressor = OnnxRegressor(model, optimizer=optimizer, learning_rate=rate, random_state=0)
    with pytest.raises(ConvergenceError, match=what) as error:
        regressor.fit(DATA.x, DATA.values)
    assert f"at a learning rate of {rate:g}: use a smaller one" in str(error.value)
    assert isinstance(error.value, RuntimeError)
    assert (regressor.n_iter_, regressor.loss_curve_) == (0, [])
    np.testing.assert_allclose(
        regressor.predict(DATA.x), run(model.SerializeToString(), DATA.x)[0], rtol=TOLERANCE, atol=TOLERANCE
    )
    regressor.set_params(learning_rate=0.01)
    for _ in range(5):
        regressor.partial_fit(DATA.x, DATA.values)
    assert regressor.loss_curve_[-1] < regressor.loss_curve_[0]
    again = OnnxClassifier(network, max_iter=3, random_state=0).fit(DATA.x, DATA.names)
    before, passes = again.to_onnx(), again.loss_curve_[:]
    with pytest.raises(ConvergenceError):
        again.set_params(learning_rate=1e30).partial_fit(DATA.x, DATA.names)
    assert (again.to_onnx(), again.loss_curve_) == (before, passes)


def test_scores_that_are_infinite() -> None:
    """Infinite scores have no validation score; the next pass has no finite loss."""
    model = network(FEATURES, 1, (("Exp", {}),))
    how = {"loss": "absolute_error", "optimizer": "sgd", "learning_rate": 1e3, "batch_size": None, "random_state": 0}
    regressor = OnnxRegressor(model, early_stopping=True, **how)
    with pytest.raises(ConvergenceError, match="the loss of a batch is inf"):
        regressor.fit(DATA.x, DATA.values[:, 0])
    assert regressor.validation_scores_ == [-np.inf]
    assert regressor.n_iter_ == 1


def test_early_stopping_needs_rows() -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        OnnxRegressor(network, early_stopping=True).fit(DATA.x[:5], DATA.values[:5])
    assert str(error.value) == (
        "early stopping requires at least 2 validation rows, got 1 of 5; pass more rows, or a larger "
        "validation_fraction"
    )
    with pytest.raises(ValueError, match=r"^partial_fit does not support early_stopping"):
        OnnxRegressor(network, early_stopping=True).partial_fit(DATA.x, DATA.values)


def test_models_that_do_not_fit_an_estimator(tmp_path: Path) -> None:
    def refused(model: Any, error: type[Exception], sentence: str, y: np.ndarray = DATA.values) -> None:
        with pytest.raises(error) as found:
            OnnxRegressor(model).fit(DATA.x, y)
        assert str(found.value) == sentence

    refused(tmp_path / "none.onnx", ortrain.NoSuchFileError, f"there is no file {tmp_path / 'none.onnx'}")
    refused(
        helper.make_model(helper.make_graph([], "empty", [], [])),
        ortrain.InvalidModelError,
        "the model has no nodes, so there is nothing to train",
    )
    refused(7, TypeError, "a model must be a path, bytes or an onnx.ModelProto, got int")
    refused(None, TypeError, "a model must be a path, bytes or an onnx.ModelProto, got NoneType")
    two = network(FEATURES, 2)
    two.graph.input.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["batch", 1]))
    refused(
        two,
        ortrain.InvalidArgumentError,
        'expected a model with one input, the matrix X, got 2: "x", "mask"',
    )
    label = network(FEATURES, 2)
    label.graph.node.append(helper.make_node("ArgMax", ["scores"], ["label"], axis=1))
    label.graph.output.insert(0, helper.make_tensor_value_info("label", TensorProto.INT64, None))
    refused(
        label,
        ortrain.InvalidArgumentError,
        'a regressor requires a float output, but the output "label" is not float; name one of "scores" in output',
    )
    flat = network(FEATURES, 2, (("Flatten", {"axis": 0}), ("Transpose", {})))
    refused(
        flat,
        ortrain.InvalidArgumentError,
        'the output "y1" has 2 rows for 1 rows of X: its first axis must be the batch',
        DATA.values[:, 0],
    )
    with pytest.raises(ortrain.InvalidModelError, match=r"^the model is not an ONNX model"):
        OnnxRegressor(b"not a model").fit(DATA.x, DATA.values)


def test_logits_that_are_not_known() -> None:
    """Values that may be no logits can be named."""
    model = network(FEATURES, 2, (("Exp", {}), ("Identity", {})))
    parts = network(FEATURES, 2)
    parts.graph.node.extend(
        [
            helper.make_node("Exp", ["scores"], ["powers"]),
            helper.make_node("ReduceMax", ["powers"], ["largest"], axes=[1]),
            helper.make_node("Div", ["powers", "largest"], ["shares"]),
        ]
    )
    del parts.graph.output[:]
    parts.graph.output.append(helper.make_tensor_value_info("shares", TensorProto.FLOAT, ["batch", 2]))
    with pytest.raises(ortrain.InvalidArgumentError, match=r'^the loss requires the logits of the output "shares"'):
        OnnxClassifier(parts).fit(DATA.x, DATA.classes > 0)
    named = OnnxClassifier(parts, output="scores", max_iter=3).fit(DATA.x, DATA.classes > 0)
    assert named.loss_curve_[-1] < named.loss_curve_[0]
    assert OnnxClassifier(model, max_iter=3).fit(DATA.x, DATA.classes > 0).n_iter_ == 3
