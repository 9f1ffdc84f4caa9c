"""The estimators of `ortrain.gradient`, which train models of scikit-learn by gradient descent."""

from __future__ import annotations

import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import InferenceSession
from sklearn.base import clone
from sklearn.datasets import make_regression
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPRegressor

import ortrain
from ortrain import classic
from ortrain._ortrain import OrtValue
from ortrain.errors import InvalidArgumentError, UnsupportedError
from ortrain.gradient.excs import ConvergenceError, ConvergenceWarning, EvaluationError
from ortrain.gradient.optimizers import OrtGradientOptimizer
from ortrain.gradient.optimizers_partial import OrtGradientForwardBackwardOptimizer as Descent
from ortrain.gradient.sgd_learning_loss import AbsoluteLearningLoss, ElasticLearningLoss, NegLogLearningLoss
from ortrain.gradient.sgd_learning_penalty import ElasticLearningPenalty
from ortrain.gradient.sgd_learning_rate import LearningRateSGD, LearningRateSGDNesterov
from ortrain.gradient.utils.onnx_helper import onnx_rename_weights
from ortrain.gradient.utils.orttraining_helper import add_loss_output

WEIGHTS = ["coef", "intercept"]
# Rounding of a hundred steps in float32.
TRAINED = 1e-4
# Error of a hundred steps in float64 with a learning rate in float32.
RATED = 1e-6


@pytest.fixture(autouse=True)
def _seed() -> None:
    np.random.seed(0)  # noqa: NPY002  (what weights and batches are drawn by)


def line(columns: int = 1, features: int = 3, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """Return a linear model with zero weights."""
    array = helper.tensor_dtype_to_np_dtype(kind)
    zeros = [
        numpy_helper.from_array(np.zeros((features, columns), array), "coef"),
        numpy_helper.from_array(np.zeros(columns, array), "intercept"),
    ]
    given = helper.make_tensor_value_info("X", kind, [None, features])
    made = helper.make_tensor_value_info("Y", kind, [None, columns])
    nodes = [helper.make_node("MatMul", ["X", "coef"], ["Z"]), helper.make_node("Add", ["Z", "intercept"], ["Y"])]
    graph = helper.make_graph(nodes, "line", [given], [made], zeros)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)


def data(rows: int = 60, kind: Any = np.float32) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((rows, 3)).astype(kind)
    y = (x @ np.array([1, -2, 0.5]) + 0.25).astype(kind)
    return x, y, rng.uniform(0.5, 2, rows).astype(kind)


def converted(estimator: Any, x: Any) -> onnx.ModelProto:
    from skl2onnx import to_onnx

    # Linear estimators are converted to plain matrix products.
    options = {"black_op": {"LinearRegressor", "LinearClassifier"}}
    made: onnx.ModelProto = to_onnx(estimator, x[:1], target_opset=15, **options)
    return made


def by_hand(
    x: Any, y: Any, s: Any, w: Any, b: Any, *, passes: int, size: int, rates: Any, penalty: tuple[float, float]
) -> tuple[Any, Any, list[float]]:
    """Run gradient descent on the square loss in float64, with batches in order."""
    losses = []
    for _, rate in zip(range(passes), rates, strict=False):
        batches = []
        for start in range(0, len(x), size):
            rows = slice(start, start + size)
            d = x[rows] @ w + b - y[rows]
            loss = 0.5 * (s[rows] * d[:, 0] ** 2).sum()
            l1, l2 = penalty
            loss += sum(l1 * np.abs(one).sum() + l2 * (one**2).sum() for one in (w, b))
            g = s[rows, None] * d
            of_w, of_b = x[rows].T @ g, g.sum(axis=0)
            w, b = (one * (1 - 2 * l2) - l1 * np.sign(one) for one in (w, b))
            w, b = w - rate / size * of_w, b - rate / size * of_b
            batches.append(loss / size)
        losses.append(np.mean(batches))
    return w, b, losses


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("penalty", [None, (0.001, 0.002)])
def test_b14_descent_matches_its_formula(
    kind: Any, weighted: bool, penalty: tuple[float, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, s = data(kind=kind)
    model = line(kind=TensorProto.FLOAT if kind is np.float32 else TensorProto.DOUBLE)
    descent = Descent(
        model,
        max_iter=30,
        learning_rate=0.05,
        warm_start=True,
        weight_name="weight" if weighted else None,
        learning_penalty=None if penalty is None else ElasticLearningPenalty(*penalty),
    )
    # Batches in order make the steps predictable.
    monkeypatch.setattr("ortrain._estimators.data_loader._drawn", lambda last: starts.pop(0))
    starts = list(range(0, 60, 10)) * 30
    descent.fit(x, y, s if weighted else None)
    # A pass uses the rate computed after the previous pass; the first two passes have the same rate.
    rates = [0.05, *(0.05 / (t + 1) ** 0.25 for t in range(29))]
    w, b, losses = by_hand(
        x.astype(np.float64),
        y.astype(np.float64)[:, None],
        s.astype(np.float64) if weighted else np.ones(60),
        np.zeros((3, 1)),
        np.zeros(1),
        passes=30,
        size=10,
        rates=rates,
        penalty=penalty or (0.0, 0.0),
    )
    tolerance = TRAINED if kind is np.float32 else 1e-10
    found = {name: value.numpy() for name, value in descent.trained_coef_.items()}
    assert np.allclose(found["coef"], w, rtol=tolerance, atol=tolerance)
    assert np.allclose(found["intercept"], b, rtol=tolerance, atol=tolerance)
    assert np.allclose(descent.train_losses_, losses, rtol=tolerance, atol=tolerance)
    assert descent.validation_losses_ is None


def test_b14_b27_absurd_rates() -> None:
    x, y, _ = data()
    for rate in (1e9, LearningRateSGD(1e10)):
        descent = Descent(line(), learning_rate=rate)
        with pytest.raises(ConvergenceError, match=r"the loss is not finite at the learning rate .*; use"):
            descent.fit(x, y)
        assert len(descent.train_losses_) < 2
        assert [value.shape() for value in descent.get_state()] == [[3, 1], [1]]
        # No forward state waits for a backward pass that will never run.
        assert descent.train_function_.states_ == []
        quiet = Descent(line(), learning_rate=rate, exc=False, max_iter=2)
        with pytest.warns(ConvergenceWarning, match="the loss is not finite"):
            quiet.fit(x, y)
        assert np.isnan(quiet.train_losses_[-1])
        whole = OrtGradientOptimizer(add_loss_output(line()), WEIGHTS, learning_rate=rate)
        with pytest.raises(ConvergenceError, match="the loss is not finite"):
            whole.fit(x, y)
        assert sorted(whole.get_state()) == WEIGHTS
        assert all(np.isfinite(value).all() for value in whole.get_state().values())
        assert len(whole.train_losses_) < 2


LOSSES = {
    "square_error": None,
    "absolute": AbsoluteLearningLoss(),
    "elastic": ElasticLearningLoss(l1_weight=0.1, l2_weight=0.9),
}


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("penalty", [None, "elastic"])
@pytest.mark.parametrize("rate", ["SGD", "plain", "Nesterov"])
def test_b15_every_combination_learns(loss: str, weighted: bool, penalty: str | None, rate: str) -> None:
    x, y, s = data()
    rates = {
        "SGD": LearningRateSGD(0.05),
        "plain": LearningRateSGDNesterov(0.01, nesterov=False),
        "Nesterov": LearningRateSGDNesterov(0.01),
    }
    descent = Descent(
        line(),
        WEIGHTS,
        learning_rate=rates[rate],
        learning_loss=LOSSES[loss] or loss,
        learning_penalty=ElasticLearningPenalty(l1=1e-4, l2=1e-4) if penalty else None,
        weight_name="weight" if weighted else None,
        max_iter=60,
    )
    descent.fit(x, y, s if weighted else None)
    assert len(descent.train_losses_) == 60
    assert not np.isnan(descent.train_losses_).any()
    assert len(descent.get_state()) == 2
    found = descent.trained_coef_["coef"].numpy().ravel()
    # The absolute loss oscillates around the optimum; a penalty pulls weights to zero.
    assert np.abs(found - [1, -2, 0.5]).max() < 0.25
    assert descent.needs_grad == (rate != "SGD")
    if rate != "SGD":
        assert [value.shape() for value in descent.get_state("grad")] == [[3, 1], [1]]


def test_b16_before_fit_and_as_text() -> None:
    descent = Descent(line(), WEIGHTS)
    for ask in (descent.get_state, lambda: descent.trained_coef_, lambda: descent.losses(*data()[:2])):
        with pytest.raises(AttributeError, match="before fit"):
            ask()
    with pytest.raises(AttributeError, match="the state can be set only after fit"):
        descent.set_state([np.zeros((3, 1), np.float32), np.zeros(1, np.float32)])
    whole = OrtGradientOptimizer(add_loss_output(line()), WEIGHTS)
    with pytest.raises(AttributeError, match="there is no state before fit"):
        whole.get_state()
    with pytest.raises(AttributeError, match="the state can be set only after fit"):
        whole.set_state({})
    for estimator in (descent, whole):
        text = repr(estimator)
        assert text.startswith(f"{type(estimator).__name__}(model_onnx='ir_version...', weights_to_train=")
        assert (
            "learning_rate=LearningRateSGD(eta0=0.01, alpha=0.0001, power_t=0.25, learning_rate='invscaling')" in text
        )
        assert "device='cpu'" in text


def test_b17_pickled_before_and_after_fit() -> None:
    x, y, _ = data()
    whole = OrtGradientOptimizer(add_loss_output(line()), WEIGHTS, max_iter=5, learning_rate=1e-3)
    partial = Descent(line(), WEIGHTS, max_iter=5, learning_rate=LearningRateSGDNesterov(1e-3))
    for estimator in (whole, partial):
        first: Any = pickle.loads(pickle.dumps(estimator))
        assert repr(first) == repr(estimator)
        with pytest.raises(AttributeError):
            first.get_state()
        first.fit(x, y)
        second = pickle.loads(pickle.dumps(first))
        states = [kept.get_state() for kept in (first, second)]
        arrays = [
            list(state.values()) if isinstance(state, dict) else [value.numpy() for value in state] for state in states
        ]
        assert all((one == other).all() for one, other in zip(*arrays, strict=True))
        assert second.train_losses_ == first.train_losses_
        np.random.seed(5)  # noqa: NPY002
        losses = second.fit(x, y).train_losses_
        assert len(losses) == 5
        np.random.seed(5)  # noqa: NPY002
        assert first.fit(x, y).train_losses_ == losses
    kept = pickle.loads(pickle.dumps(partial.fit(x, y)))
    assert [value.numpy().tolist() for value in kept.get_state("grad")] == [
        value.numpy().tolist() for value in partial.get_state("grad")
    ]
    # A restored estimator predicts without another fit.
    assert kept.score(x, y) == partial.score(x, y)


def test_b18_evaluations() -> None:
    x, y, _ = data()
    descent = Descent(line(), WEIGHTS, learning_rate=0.05, max_iter=100).fit(x, y, X_val=x[:20], y_val=y[:20])
    assert descent.validation_losses_ is not None
    assert len(descent.validation_losses_) == 10
    d = x[:20] @ descent.trained_coef_["coef"].numpy() + descent.trained_coef_["intercept"].numpy() - y[:20, None]
    assert np.isclose(descent.validation_losses_[-1], 0.5 * (d**2).sum() / 20, rtol=1e-3, atol=1e-8)
    whole = OrtGradientOptimizer(add_loss_output(line()), WEIGHTS, max_iter=20, validation_every=5)
    whole.fit(x, y, X_val=x[:20], y_val=y[:20])
    assert len(whole.validation_losses_) == 4
    d = x[:20] @ whole.get_state()["coef"] + whole.get_state()["intercept"] - y[:20, None]
    assert np.isclose(whole.validation_losses_[-1], (d**2).sum() / 20, rtol=1e-4)
    assert OrtGradientOptimizer(add_loss_output(line()), WEIGHTS, max_iter=3).validation_every == 1
    with pytest.raises(ValueError, match="X_val and y_val must be given together"):
        descent.fit(x, y, X_val=x)
    with pytest.raises(EvaluationError, match="the loss of the validation data is nan"):
        whole.fit(x, y, X_val=np.full_like(x, np.nan), y_val=y)
    with pytest.raises(ConvergenceError, match="the loss of the validation data is not finite"):
        descent.fit(x, y, X_val=np.full_like(x, np.nan), y_val=y)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("schedule", ["constant", "invscaling", "optimal"])
def test_b20_descent_matches_its_formula(kind: Any, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is a run of SGDOptimizer with the learning rate of its pass, divided by the number of rows."""
    x, y, _ = data(kind=kind)
    model = add_loss_output(line(kind=TensorProto.FLOAT if kind is np.float32 else TensorProto.DOUBLE))
    rate = LearningRateSGD(0.02, alpha=0.1, learning_rate=schedule)
    descent = OrtGradientOptimizer(model, WEIGHTS, max_iter=30, learning_rate=rate, warm_start=True)
    monkeypatch.setattr("ortrain._estimators.data_loader._drawn", lambda last: starts.pop(0))
    starts = list(range(0, 60, 10)) * 30
    descent.fit(x, y)
    told = LearningRateSGD(0.02, alpha=0.1, learning_rate=schedule).init_learning_rate()
    rates = []
    for number in range(30):
        rates.append(told.value)
        told.update_learning_rate(number)
    # `by_hand` uses half of the squared error; twice the rate compensates for the factor.
    w, b, losses = by_hand(
        x.astype(np.float64),
        y.astype(np.float64)[:, None],
        np.ones(60),
        np.zeros((3, 1)),
        np.zeros(1),
        passes=30,
        size=10,
        rates=[2 * rate for rate in rates],
        penalty=(0.0, 0.0),
    )
    tolerance = TRAINED if kind is np.float32 else RATED
    state = descent.get_state()
    assert all(value.dtype == kind for value in state.values())
    assert np.allclose(state["coef"], w, rtol=tolerance, atol=tolerance)
    assert np.allclose(state["intercept"], b, rtol=tolerance, atol=tolerance)
    assert np.allclose(descent.train_losses_, 2 * np.array(losses), rtol=tolerance, atol=tolerance)


def test_b20_the_classic_session_trains() -> None:
    x, y, s = data()
    model = add_loss_output(line(), weight_name="weight")
    descent = OrtGradientOptimizer(model, WEIGHTS, max_iter=2).fit(x, y, s)
    session = descent.train_session_
    assert type(session) is classic.TrainingSession
    assert [value.name for value in session.get_inputs()] == descent.input_names_
    assert descent.input_names_ == ["X", "label", "weight", "Learning_Rate"]
    assert [value.name for value in session.get_outputs()] == descent.output_names_ == ["loss", "Y"]
    # A user can run the session after the fit.
    rate = np.array([1e-3], np.float32)
    feeds = {"X": x, "label": y[:, None], "weight": s, "Learning_Rate": rate}
    before = descent.get_state()
    first, second = (session.run(["loss"], feeds)[0].item() for _ in range(2))
    assert second < first
    assert all((descent.get_state()[name] != before[name]).all() for name in WEIGHTS)


@pytest.mark.parametrize("use_numpy", [False, True])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e30])
def test_b20_nonfinite_loss_keeps_the_weights(wrong: float, use_numpy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights equal the weights after the previous batch, bit for bit."""
    x, y, _ = data(40)
    monkeypatch.setattr("ortrain._estimators.data_loader._drawn", lambda last: starts.pop(0))
    descents = []
    for rows in (20, 40):
        starts = list(range(0, rows, 10))
        given = x.copy()
        given[25] = wrong
        descent = OrtGradientOptimizer(add_loss_output(line()), WEIGHTS, max_iter=1, warm_start=True)
        if rows == 20:
            descent.fit(given[:rows], y[:rows], use_numpy=use_numpy)
        else:
            with pytest.raises(ConvergenceError, match="the loss is not finite"):
                descent.fit(given, y, use_numpy=use_numpy)
        descents.append(descent)
    good, failed = (descent.get_state() for descent in descents)
    assert all(value.any() for value in good.values())
    assert all(failed[name].tobytes() == good[name].tobytes() for name in WEIGHTS)
    # The remaining weights can be exported, and training continues from them.
    assert descents[1].get_trained_onnx().graph.initializer[0].raw_data == good["coef"].tobytes()
    starts = list(range(0, 40, 10))
    assert len(descents[1].fit(x, y).train_losses_) == 1


def test_b20_running_statistics_are_put_back_with_the_weights() -> None:
    x, y, _ = data()
    model = line()
    names = {"scale": 1, "bias": 0, "mean": 0, "variance": 1}
    made = helper.make_node(
        "BatchNormalization", ["X", *names], ["normal", "new_mean", "new_variance"], training_mode=1, momentum=0.5
    )
    model.graph.node[0].input[0] = "normal"
    model.graph.node.insert(0, made)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.full(3, value, np.float32), name) for name, value in names.items()
    )
    descent = OrtGradientOptimizer(add_loss_output(model), WEIGHTS, max_iter=1, batch_size=60).fit(x, y)
    statistics = descent.train_session_._classic.running_statistics()
    assert set(statistics) == {"mean", "variance"}
    assert not np.allclose(statistics["mean"].numpy(), 0, atol=1e-3)
    wrong = OrtGradientOptimizer(add_loss_output(model), WEIGHTS, max_iter=1, batch_size=60)
    x[3] = np.nan
    with pytest.raises(ConvergenceError):
        wrong.fit(x, y)
    found = wrong.train_session_._classic.running_statistics()
    assert {name: value.numpy().tolist() for name, value in found.items()} == {"mean": [0] * 3, "variance": [1] * 3}


def test_b18_an_evaluation_changes_nothing_and_drops_nothing() -> None:
    x, y, _ = data()
    model = line()
    model.graph.node[0].input[0] = "dropped"
    model.graph.node.insert(0, helper.make_node("Dropout", ["X", "ratio", "training"], ["dropped"], seed=1))
    settings = {"ratio": np.array(0.5, np.float32), "training": np.array(True)}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in settings.items())
    states = []
    for validation in ({}, {"X_val": x, "y_val": y}):
        np.random.seed(0)  # noqa: NPY002
        descent = OrtGradientOptimizer(add_loss_output(model), WEIGHTS, max_iter=4, validation_every=1)
        states.append(descent.fit(x, y, **validation).get_state())
    assert all((states[0][name] == states[1][name]).all() for name in WEIGHTS)
    d = x @ states[1]["coef"] + states[1]["intercept"] - y[:, None]
    assert np.isclose(descent.validation_losses_[-1], (d**2).sum() / 60, rtol=1e-4)
    assert len(descent.validation_losses_) == 4


@pytest.mark.parametrize("score", ["squared_error", "l1", "elastic"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("use_numpy", [False, True])
def test_b20_a_model_with_its_loss(score: str, weighted: bool, use_numpy: bool) -> None:
    x, y, s = data()
    settings = {"l1_weight": 0.1, "l2_weight": 0.9} if score == "elastic" else {}
    model = add_loss_output(
        line(),
        score,
        weight_name="weight" if weighted else None,
        penalty={"coef": {"l1": 1e-3, "l2": 1e-3}, "intercept": 1e-3},
        **settings,
    )
    descent = OrtGradientOptimizer(model, ["intercept", "coef"], learning_rate=0.05, max_iter=100)
    descent.fit(x, y, s if weighted else None, use_numpy=use_numpy)
    assert len(descent.train_losses_) == 100
    assert not np.isnan(descent.train_losses_).any()
    assert np.abs(descent.get_state()["coef"].ravel() - [1, -2, 0.5]).max() < 0.25
    assert descent.output_names_[descent.loss_index_] == "loss"
    trained = descent.get_trained_onnx(line())
    session = InferenceSession(trained.SerializeToString(), providers=["CPUExecutionProvider"])
    assert np.abs(session.run(None, {"X": x})[0].ravel() - y).max() < 0.5
    state = descent.get_state()
    # The state is a copy: a change of the copy does not change the estimator.
    state["coef"][:] = 7
    assert (descent.get_state()["coef"] != 7).any()
    descent.set_state(state)
    assert (descent.get_state()["coef"] == 7).all()


def test_b20_the_numpy_way_has_the_same_numbers() -> None:
    x, y, _ = data()
    found = []
    for use_numpy in (False, True):
        np.random.seed(3)  # noqa: NPY002
        descent = OrtGradientOptimizer(add_loss_output(line()), WEIGHTS, learning_rate=0.02, max_iter=10)
        found.append(descent.fit(x, y, use_numpy=use_numpy).train_losses_)
    assert found[0] == found[1]


def test_b20_classes_by_the_log_loss() -> None:
    x, y, _ = data(100)
    y = (y > 0).astype(np.int64)
    model = line(columns=2)
    model.graph.node[-1].output[0] = "raw"
    model.graph.node.append(helper.make_node("Softmax", ["raw"], ["Y"], axis=1))
    with_loss = add_loss_output(model, "log")
    assert with_loss.graph.input[1].type.tensor_type.elem_type == TensorProto.INT64
    descent = OrtGradientOptimizer(with_loss, WEIGHTS, learning_rate=5.0, max_iter=50).fit(x, y)
    session = ortrain.InferenceSession(descent.get_trained_onnx(model))
    assert (session.run(None, {"X": x})[0].argmax(axis=1) == y).mean() > 0.9
    binary = Descent(line(), WEIGHTS, learning_rate=0.5, learning_loss=NegLogLearningLoss()).fit(x, y)
    session = ortrain.InferenceSession(binary.get_trained_onnx())
    assert ((session.run(None, {"X": x})[0].ravel() > 0) == y).mean() > 0.9


def test_b20_loss_output_name_is_heard() -> None:
    x, y, _ = data()
    model = add_loss_output(line(), loss_name="cost")
    descent = OrtGradientOptimizer(model, WEIGHTS, loss_output_name="cost", max_iter=3).fit(x, y)
    assert descent.output_names_ == ["cost", "Y"]
    with pytest.raises(RuntimeError, match=r"the model has no output 'loss'.*; it has cost, Y"):
        OrtGradientOptimizer(model, WEIGHTS).fit(x, y)


def test_b20_the_gradient_is_saved(tmp_path: Path) -> None:
    x, y, _ = data(10)
    model, path = add_loss_output(line()), tmp_path / "gradient.onnx"
    descent = OrtGradientOptimizer(
        model, WEIGHTS, learning_rate=1e-3, saved_gradient=path, warm_start=True, max_iter=1
    ).fit(x, y)
    feeds = {"X": x, "label": y[:, None]}
    runs = {}
    for name in (path, Path(f"{path}.training.onnx")):
        saved = onnx.load(name)
        onnx.checker.check_model(saved, full_check=True)
        session = InferenceSession(saved.SerializeToString(), providers=["CPUExecutionProvider"])
        more = {"Learning_Rate": np.array([1e-4], np.float32)} if "training" in str(name) else {}
        outputs = [entry.name for entry in session.get_outputs()]
        runs[name.name] = dict(zip(outputs, session.run(None, feeds | more), strict=True))
    assert {"coef_grad", "intercept_grad"} <= runs["gradient.onnx"].keys()
    # Only `fit` writes the files.
    path.unlink()
    pickle.loads(pickle.dumps(descent))
    assert not path.exists()
    # One step on all rows, with the rate divided by the number of rows, equals the step of fit.
    step = runs["gradient.onnx.training.onnx"]
    for name in WEIGHTS:
        assert np.allclose(step[f"{name}_updated"], descent.get_state()[name], rtol=1e-5, atol=1e-7)


def test_b20_refused() -> None:
    x, y, s = data()
    model = add_loss_output(line())
    with pytest.raises(NotImplementedError, match="LearningRateSGDNesterov has a velocity"):
        OrtGradientOptimizer(model, WEIGHTS, learning_rate=LearningRateSGDNesterov())
    with pytest.raises(NotImplementedError, match="training_optimizer_name must be 'SGDOptimizer', got 'Adam'"):
        OrtGradientOptimizer(model, WEIGHTS, training_optimizer_name="Adam").fit(x, y)
    with pytest.raises(RuntimeError, match=r"expected 2 inputs \(X, label\), got 3"):
        OrtGradientOptimizer(model, WEIGHTS).fit(x, y, s)
    with pytest.raises(RuntimeError, match=r"expected 3 inputs \(X, label, weight\), got 2"):
        OrtGradientOptimizer(add_loss_output(line(), weight_name="weight"), WEIGHTS).fit(x, y)
    with pytest.raises(InvalidArgumentError, match="koef"):
        OrtGradientOptimizer(model, ["koef"]).fit(x, y)
    with pytest.raises(InvalidArgumentError, match="weights_to_train must be a list of names"):
        OrtGradientOptimizer(model, "coef")
    with pytest.raises(InvalidArgumentError, match="weights_to_train is empty"):
        OrtGradientOptimizer(model, []).fit(x, y)
    with pytest.raises(InvalidArgumentError, match="weight 'coef' is named twice"):
        OrtGradientOptimizer(model, ["coef", "intercept", "coef"]).fit(x, y)
    for size in (0, -1):
        with pytest.raises(InvalidArgumentError, match=rf"batch_size must be at least 1, got {size}"):
            OrtGradientOptimizer(model, WEIGHTS, batch_size=size).fit(x, y)
    for rate in (-0.1, np.nan, np.inf, 1e40):
        with pytest.raises(InvalidArgumentError, match='the learning rate "Learning_Rate"'):
            OrtGradientOptimizer(model, WEIGHTS, learning_rate=float(rate)).fit(x, y)
    with pytest.raises(InvalidArgumentError, match=r'input "X" must be float32\[.*, got float64'):
        OrtGradientOptimizer(model, WEIGHTS).fit(x.astype(np.float64), y)
    with pytest.raises(UnsupportedError, match="cuda"):
        OrtGradientOptimizer(model, WEIGHTS, device="cuda").fit(x, y)
    with pytest.raises(TypeError, match=r"model_onnx must be an onnx\.ModelProto, got bytes; read it with onnx\.load"):
        OrtGradientOptimizer(model.SerializeToString(), WEIGHTS)  # type: ignore[arg-type]
    trained = OrtGradientOptimizer(model, WEIGHTS, max_iter=1).fit(x, y)
    with pytest.raises(InvalidArgumentError, match="'koef' is not a trained weight; did you mean 'coef'"):
        trained.set_state({"koef": x})
    with pytest.raises(InvalidArgumentError, match=r"weight 'coef' is float32\[3, 1\], but the value is"):
        trained.set_state({"coef": x})
    other = line()
    other.graph.initializer[0].name = other.graph.node[0].input[1] = "other"
    with pytest.raises(RuntimeError, match="weight 'coef' was trained, but the model has no initializer of this name"):
        trained.get_trained_onnx(other)


@pytest.mark.parametrize("weighted", [False, True])
def test_b22_score_losses_and_parameters(weighted: bool) -> None:
    x, y, s = data(23)
    rows = s if weighted else None
    descent = Descent(line(), WEIGHTS, weight_name="weight" if weighted else None, max_iter=5)
    descent.fit(x, y, rows)
    found = descent.losses(x, y, rows)
    d = x @ descent.trained_coef_["coef"].numpy() + descent.trained_coef_["intercept"].numpy() - y[:, None]
    wanted = d[:, 0] ** 2 * (s if weighted else 1)
    # Losses have the order of the rows, also in the last, smaller batch.
    assert np.allclose(found, wanted, rtol=1e-5)
    assert isinstance(descent.score(x, y, rows), float)
    assert np.isclose(descent.score(x, y, rows), -wanted.mean(), rtol=1e-5)
    parameters = descent.get_params()
    assert parameters["device"] == "cpu"
    assert set(parameters) == set(Descent._defaults())
    assert "learning_rate__eta0" in descent.get_params(deep=True)


def test_b22_scikit_learn_conventions() -> None:
    x, y, _ = data(30)
    descent = Descent(line(), WEIGHTS, learning_rate=LearningRateSGD(1e-4), max_iter=5, exc=False)
    twin = clone(descent)
    assert repr(twin) == repr(descent)
    assert twin.learning_rate is not descent.learning_rate
    assert descent.set_params(max_iter=7, learning_rate="Nesterov", learning_rate__momentum=0.5) is descent
    assert (descent.max_iter, type(descent.learning_rate)) == (7, LearningRateSGDNesterov)
    assert descent.learning_rate.get_params()["momentum"] == 0.5
    with pytest.raises(ValueError, match="has no parameter 'max_iters'; did you mean 'max_iter'"):
        descent.set_params(max_iters=7)
    rates = [LearningRateSGD(rate) for rate in (1e-6, 1e-2, 1e-1, 1e9)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grid = GridSearchCV(twin, {"learning_rate": rates}, cv=3).fit(x, y)
        assert grid.best_params_["learning_rate"].get_params()["eta0"] == 0.1
        grid = GridSearchCV(twin, {"learning_rate__eta0": [1e-6, 1e-2, 1e-1]}, cv=3).fit(x, y)
    assert grid.best_params_ == {"learning_rate__eta0": 0.1}
    assert grid.best_estimator_.learning_rate.eta0 == 0.1


def test_warm_start_goes_on() -> None:
    x, y, _ = data()
    for kind in (Descent, OrtGradientOptimizer):
        model = line() if kind is Descent else add_loss_output(line())
        warm = kind(model, WEIGHTS, learning_rate=0.01, max_iter=20, warm_start=True)
        # The weights of the model are zero, so the loss of the first batches is about the mean square of y.
        first = warm.fit(x, y).train_losses_[0]
        assert np.isclose(first, (y**2).mean() * (0.5 if kind is Descent else 1), rtol=0.5)
        again = warm.fit(x, y).train_losses_
        assert again[0] < first / 2
        cold = kind(model, WEIGHTS, learning_rate=0.01, max_iter=20).fit(x, y)
        assert not np.isclose(cold.train_losses_[0], first)


def test_b26_a_quantised_model_is_tuned() -> None:
    x, y, _ = data(100)
    # Weights are rounded to multiples of a half; gradients pass through the rounding unchanged.
    model = line()
    model.graph.node[0].input[1] = "rounded"
    attributes = {"quant_min": -4, "quant_max": 3, "domain": "com.microsoft"}
    fake = helper.make_node("FakeQuant", ["coef", "scale", "zero"], ["rounded", "mask"], **attributes)
    model.graph.node.insert(0, fake)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    for name, number in (("scale", 0.5), ("zero", 0.0)):
        model.graph.initializer.append(numpy_helper.from_array(np.array([number], np.float32), name))
    coef = np.array([[0.1], [-1.4], [0.9]], np.float32)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(coef, "coef"))

    def error(of: onnx.ModelProto) -> float:
        return float(np.abs(ortrain.InferenceSession(of).run(None, {"X": x})[0].ravel() - y).mean())

    tuned = Descent(model, WEIGHTS, learning_rate=0.05, warm_start=True).fit(x, y).get_trained_onnx()
    assert error(tuned) < 0.1 * error(model)


def test_b30_weights_in_order() -> None:
    x, y = make_regression(60, n_features=4, random_state=0)
    x, y = x.astype(np.float32), y.astype(np.float32)
    fitted = MLPRegressor(hidden_layer_sizes=(5, 5), max_iter=2, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted.fit(x, y)
    model = converted(fitted, x)
    names = [entry.name for entry in model.graph.initializer if entry.data_type == TensorProto.FLOAT]
    assert names != sorted(names)
    with pytest.raises(ValueError, match="weights_to_train must be a list in alphabetical order"):
        Descent(model, names).fit(x, y)
    with pytest.raises(ValueError, match="weights_to_train must have the order of the initializers"):
        Descent(model, sorted(names)).fit(x, y)
    with pytest.raises(ValueError, match="weight 'unknown' is not an initializer of the model"):
        Descent(model, ["unknown"]).fit(x, y)
    renamed = onnx_rename_weights(model)
    kept = [entry.name for entry in renamed.graph.initializer if entry.data_type == TensorProto.FLOAT]
    descent = Descent(renamed, kept, learning_rate=1e-5, max_iter=5, warm_start=True).fit(x, y)
    assert len(descent.get_state()) == 6
    assert all(isinstance(value, OrtValue) for value in descent.get_state())
    assert descent.train_losses_[-1] < descent.train_losses_[0]


def test_a_model_of_scikit_learn() -> None:
    x, y = make_regression(100, n_features=4, bias=2, random_state=0)
    x, y = x.astype(np.float32), y.astype(np.float32)
    fitted = LinearRegression().fit(x, y)
    descent = Descent(converted(fitted, x), WEIGHTS, learning_rate=0.5, max_iter=60).fit(x, y)
    session = ortrain.InferenceSession(descent.get_trained_onnx())
    # Training from random weights reaches the weights of the closed form.
    assert np.allclose(session.run(None, {"X": x})[0].ravel(), fitted.predict(x), atol=1)


def test_several_columns_and_row_weights_as_a_column() -> None:
    x, y, s = data()
    targets = np.stack([y, -y], axis=1)
    descent = Descent(line(columns=2), WEIGHTS, learning_rate=0.05, weight_name="weight").fit(x, targets, s[:, None])
    assert np.abs(descent.trained_coef_["coef"].numpy() - np.outer([1, -2, 0.5], [1, -1])).max() < 0.05
    assert descent.losses(x, targets, s).shape == (60,)


def test_outputs_and_states_that_do_not_fit() -> None:
    x, y, s = data()
    with pytest.raises(ValueError, match=r"y has rows of shape \[2\], but output 'Y' of the model has \[1\]"):
        Descent(line()).fit(x, np.stack([y, y], axis=1))
    with pytest.raises(ValueError, match="sample_weight requires weight_name, which is None; set it to 'weight'"):
        Descent(line()).fit(x, y, s)
    with pytest.raises(ValueError, match=r"X has 60 rows, but sample_weight has shape \(5,\)"):
        Descent(line(), weight_name="weight").fit(x, y, s[:5])
    with pytest.raises(
        UnsupportedError, match=r"expected a model with one input for the rows of X, got 2 inputs \(X, label\)"
    ):
        Descent(add_loss_output(line())).fit(x, y)
    with pytest.raises(NotImplementedError, match="training_optimizer_name must be 'SGDOptimizer'"):
        Descent(line(), training_optimizer_name="Adam").fit(x, y)
    nan = x.copy()
    nan[3, 1] = np.nan
    with pytest.raises(ConvergenceError, match="the loss is not finite"):
        Descent(line(), batch_size=60).fit(nan, y)
    descent = Descent(line(), max_iter=1).fit(x, y)
    weights = [np.ones((3, 1), np.float32), np.ones(1, np.float32)]
    descent.set_state([None, *weights])
    descent.set_state([OrtValue.from_numpy(array) for array in weights])
    # `set_state` copies arrays.
    weights[0][:] = 9
    assert descent.get_state()[0].numpy().tolist() == [[1], [1], [1]]
    descent.set_state(weights, zero=True)
    assert descent.get_state()[0].numpy().tolist() == [[0], [0], [0]]
    with pytest.raises(ValueError, match=r"expected one value for each of the 2 weights, .* got 1 values"):
        descent.set_state(weights[:1])
    with pytest.raises(ValueError, match=r"weight 'coef' is float32\[3, 1\], but the value is float32\[1\]"):
        descent.set_state([weights[1], weights[1]])
    with pytest.raises(TypeError, match="state 0 must be an array, an OrtValue or None, got str"):
        descent.set_state(["a", "b"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="unknown kind of state 'momentum'; expected one of 'weight', 'grad'"):
        descent.get_state("momentum")


def test_models_are_saved(tmp_path: Path) -> None:
    x, y, _ = data(20)
    descent = Descent(
        line(), WEIGHTS, max_iter=1, learning_rate=LearningRateSGDNesterov(1e-3), learning_penalty="elastic"
    )
    before = descent.save_onnx_graph(bytes)
    assert set(before) == {"learning_loss", "learning_penalty", "learning_rate", "model_onnx", "zero_onnx_"}
    assert set(before["learning_penalty"]) == {"penalty_onnx_", "penalty_grad_onnx_"}
    assert set(before["learning_rate"]) == {"axpyw_onnx_"}
    assert before["model_onnx"] == line().SerializeToString()
    saved = descent.fit(x, y).save_onnx_graph(tmp_path)
    assert set(saved["train_function_"]) == {"_trained_onnx", "_optimized_pre_grad_model"}
    assert saved["learning_loss"]["loss_grad_onnx_"] == str(tmp_path / "SquareLLoss.learning_loss.loss_grad_onnx_.onnx")
    assert saved["zero_onnx_"] == str(tmp_path / "GradFBOptimizer.zero_onnx_.onnx")
    assert all(onnx.load(path).graph.node for path in tmp_path.glob("*.onnx"))
    assert Descent(line()).save_onnx_graph(bytes)["learning_penalty"] == {}


def test_logging(caplog: pytest.LogCaptureFixture) -> None:
    x, y, _ = data(20)
    with caplog.at_level(logging.DEBUG, logger="onnxcustom"):
        Descent(line(), WEIGHTS, max_iter=1, enable_logging=True).fit(x, y)
    assert "[OrtGradientForwardBackwardOptimizer._iteration] batch 1" in caplog.text
    assert "[OrtGradientForwardBackwardOptimizer.fit] weights_to_train=['coef', 'intercept']" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="onnxcustom"):
        Descent(line(), WEIGHTS, max_iter=1).fit(x, y)
    assert caplog.text == ""
