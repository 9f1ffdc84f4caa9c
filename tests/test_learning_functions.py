"""Learning rates, losses and penalties of `ortrain.gradient`, compared with their formulas in NumPy."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import numpy as np
import onnx
import pytest

from ortrain._ortrain import OrtValue
from ortrain.errors import InvalidArgumentError, OrtrainError
from ortrain.gradient.sgd_learning_loss import (
    AbsoluteLearningLoss,
    BaseLearningLoss,
    ElasticLearningLoss,
    NegLogLearningLoss,
    SquareLearningLoss,
)
from ortrain.gradient.sgd_learning_penalty import BaseLearningPenalty, ElasticLearningPenalty, NoLearningPenalty
from ortrain.gradient.sgd_learning_rate import BaseLearningRate, LearningRateSGD, LearningRateSGDNesterov
from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, numpy_to_ort_value

CPU = get_ort_device("cpu")
# Rounding of a few operations.
CLOSE = {np.float32: 1e-5, np.float64: 1e-12}
TYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])
LOSSES: dict[str, BaseLearningLoss] = {
    "square": SquareLearningLoss(),
    "absolute": AbsoluteLearningLoss(),
    "elastic": ElasticLearningLoss(0.3, 0.6),
    "log": NegLogLearningLoss(),
}


def value(array: Any, dtype: Any = np.float32) -> OrtValue:
    return numpy_to_ort_value(np.array(array, dtype))


def scores(name: str, y: Any, z: Any) -> Any:
    """Return the loss of each element by its formula."""
    d = y - z
    if name == "square":
        return d**2
    if name == "absolute":
        return np.abs(d)
    if name == "elastic":
        return 0.3 * np.abs(d) + 0.6 * d**2
    p = np.clip(1 / (1 + np.exp(-z)), 1e-5, 1 - 1e-5)
    return -((1 - y) * np.log(1 - p) + y * np.log(p))


def test_b19_rates_fall_or_stay() -> None:
    falling = list(LearningRateSGD().loop())
    assert len(falling) == 1000
    assert falling[0] == 0.01
    assert all(later < earlier for earlier, later in itertools.pairwise(falling))
    assert falling[-1] > 0.001
    optimal = list(LearningRateSGD(learning_rate="optimal").loop())
    assert all(later < earlier for earlier, later in itertools.pairwise(optimal))
    assert optimal[0] == 0.01
    assert optimal[-1] > 0.009
    assert set(LearningRateSGD(learning_rate="constant").loop()) == {0.01}
    with pytest.raises(ValueError, match="unknown schedule 'CST'; expected one of invscaling, optimal, constant"):
        LearningRateSGD(learning_rate="CST")


def test_b29_rates_have_the_numbers_of_the_reference() -> None:
    assert np.allclose(
        list(LearningRateSGD().loop(5)), [0.01, 0.0084090, 0.0075984, 0.0070711, 0.0066874], rtol=0, atol=5e-8
    )
    optimal = list(LearningRateSGD(learning_rate="optimal").loop(3))
    assert np.allclose(optimal, [0.01, 0.0099995455, 0.0099990910], rtol=0, atol=5e-11)
    # The first update does not change the rate, because `fit` counts passes from 0.
    assert LearningRateSGD().init_learning_rate().update_learning_rate(0).value == 0.01


@TYPES
def test_descent_moves_weights_where_they_lie(dtype: Any) -> None:
    rate = LearningRateSGD(0.5)
    rate.init_learning_rate().build_onnx_function(15, CPU, 1)
    array = np.array([[1.0, 2.0]], dtype)
    weight = numpy_to_ort_value(array)
    assert rate.update_weights(0, CPU, weight, value([[1, -1]], dtype), batch_size=4) is weight
    # The weight shares the memory of the array.
    assert np.allclose(array, [[0.875, 2.125]], rtol=0, atol=CLOSE[dtype])
    with pytest.raises(OrtrainError, match="LearningRateSGD has no velocity"):
        rate.update_weights(0, CPU, weight, weight, 4, velocity=weight)


@TYPES
@pytest.mark.parametrize(("nesterov", "moved"), [(True, [1.386, 2.424]), (False, [1.44, 2.46])])
def test_b29_momentum(dtype: Any, nesterov: bool, moved: list[float]) -> None:
    rate = LearningRateSGDNesterov(0.1, momentum=0.9, nesterov=nesterov)
    rate.init_learning_rate().build_onnx_function(15, CPU, 1)
    weight, velocity = value([1, 2], dtype), value([0.5, 0.5], dtype)
    assert rate.update_weights(0, CPU, weight, value([1, -1], dtype), 10, velocity) is weight
    assert np.allclose(velocity.numpy(), [0.44, 0.46], rtol=0, atol=CLOSE[dtype])
    assert np.allclose(weight.numpy(), moved, rtol=0, atol=CLOSE[dtype])
    with pytest.raises(OrtrainError, match="LearningRateSGDNesterov requires a velocity"):
        rate.update_weights(0, CPU, weight, weight, 10)


def test_rates_by_name() -> None:
    rate = LearningRateSGD(0.5)
    assert BaseLearningRate.select(rate) is rate
    assert BaseLearningRate.select(0.25).get_params()["eta0"] == 0.25
    for name, kind in (("SGD", LearningRateSGD), ("SGDNesterov", LearningRateSGDNesterov)):
        assert type(BaseLearningRate.select(name)) is kind
        assert type(BaseLearningRate.select(kind.__name__)) is kind
    assert BaseLearningRate.select("Nesterov", momentum=0.5).get_params()["momentum"] == 0.5
    for wrong in (1, None, "sgd", [1.0]):
        with pytest.raises(ValueError, match="unknown learning rate"):
            BaseLearningRate.select(wrong)  # type: ignore[arg-type]


def test_rates_before_use() -> None:
    rate = LearningRateSGD()
    with pytest.raises(RuntimeError, match="the learning rate has no value yet; call init_learning_rate first"):
        _ = rate.value
    rate.init_learning_rate()
    with pytest.raises(RuntimeError, match="LearningRateSGD has no functions yet; call build_onnx_function first"):
        rate.update_weights(0, CPU, value([1]), value([1]), 1)
    assert repr(rate).endswith("learning_rate='invscaling'), value=0.01")


@TYPES
@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("columns", [1, 3])
def test_b29_losses_and_their_gradients(name: str, weighted: bool, columns: int, dtype: Any) -> None:
    loss = LOSSES[name]
    loss.build_onnx_function(15, CPU, "weight" if weighted else None)
    rng = np.random.default_rng(3)
    z = rng.standard_normal((6, columns)).astype(dtype)
    y = rng.integers(0, 2, (6, columns)) if name == "log" else rng.standard_normal((6, columns)).astype(dtype)
    s = rng.uniform(0.5, 2, 6).astype(dtype)
    weights = s[:, None] if weighted else np.ones((1, 1))
    given = numpy_to_ort_value(s) if weighted else None
    expected, predicted = numpy_to_ort_value(y), numpy_to_ort_value(z)
    total, gradient = loss.loss_gradient(CPU, expected, predicted, weight=given)
    factor = 0.5 if name == "square" else 1
    whole = (weights * scores(name, y.astype(np.float64), z.astype(np.float64))).astype(np.float64)
    assert total.shape() == [1]
    assert np.allclose(total.numpy(), factor * whole.sum(), rtol=10 * CLOSE[dtype], atol=0)
    found = loss.loss_scores(CPU, expected, predicted, given).numpy()
    assert found.shape == (6, columns)
    assert np.allclose(found, whole, rtol=10 * CLOSE[dtype], atol=CLOSE[dtype])
    # The gradient by central differences of the formula, which would reveal a wrong sign.
    step = 1e-6

    def at(change: float) -> Any:
        return factor * weights * scores(name, y.astype(np.float64), z.astype(np.float64) + change)

    wanted = (at(step) - at(-step)) / (2 * step)
    assert np.allclose(gradient.numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_b29_losses_have_the_numbers_of_the_reference() -> None:
    y, z = value([[1], [2], [4]]), value([[1.5], [1], [1]])
    rows = numpy_to_ort_value(np.array([1, 2, 0.5], np.float32))
    square = SquareLearningLoss()
    square.build_onnx_function(15, CPU, "weight")
    loss, gradient = square.loss_gradient(CPU, y, z)
    assert (loss.numpy().tolist(), gradient.numpy().ravel().tolist()) == ([5.125], [0.5, -1, -3])
    assert square.loss_scores(CPU, y, z).numpy().ravel().tolist() == [0.25, 1, 9]
    loss, gradient = square.loss_gradient(CPU, y, z, rows)
    assert (loss.numpy().tolist(), gradient.numpy().ravel().tolist()) == ([3.375], [0.5, -2, -1.5])
    assert square.loss_scores(CPU, y, z, rows).numpy().ravel().tolist() == [0.25, 2, 4.5]
    for loss_of, wanted in ((AbsoluteLearningLoss(), 4.5), (ElasticLearningLoss(0.5, 0.5), 7.375)):
        loss_of.build_onnx_function(15, CPU, None)
        assert loss_of.loss_gradient(CPU, y, z)[0].numpy().tolist() == [wanted]
    log = NegLogLearningLoss()
    log.build_onnx_function(15, CPU, None)
    labels, raw = numpy_to_ort_value(np.array([[0], [1], [1]])), value([[-1], [2], [-30]])
    loss, gradient = log.loss_gradient(CPU, labels, raw)
    assert math.isclose(loss.numpy()[0], 11.9531145, rel_tol=1e-6)
    assert np.allclose(gradient.numpy().ravel(), [0.26894, -0.11920, -0.99999], rtol=0, atol=5e-6)


def test_losses_by_name_and_their_errors() -> None:
    kinds = {
        SquareLearningLoss: ("square_error", "square"),
        AbsoluteLearningLoss: ("absolute_error", "absolute"),
        ElasticLearningLoss: ("elastic_error", "elastic"),
        NegLogLearningLoss: ("log", "neglog", "logloss"),
    }
    for kind, names in kinds.items():
        for name in (*names, kind.__name__):
            assert type(BaseLearningLoss.select(name)) is kind
    with pytest.raises(ValueError, match="unknown loss 'hinge'; expected one of 'square_error'"):
        BaseLearningLoss.select("hinge")
    loss = SquareLearningLoss()
    with pytest.raises(RuntimeError, match="SquareLearningLoss has no functions yet"):
        loss.loss_gradient(CPU, value([[1]]), value([[1]]))
    with pytest.raises(RuntimeError, match="SquareLearningLoss has no functions yet"):
        loss.loss_scores(CPU, value([[1]]), value([[1]]))
    loss.build_onnx_function(15, CPU, None)
    with pytest.raises(
        InvalidArgumentError, match="the loss was built without row weights; build it with a weight_name"
    ):
        loss.loss_gradient(CPU, value([[1]]), value([[1]]), weight=value([1]))
    with pytest.raises(InvalidArgumentError, match='input "X1"'):
        loss.loss_gradient(CPU, value([[1]], np.float64), value([[1]]))
    log = NegLogLearningLoss(probability_function="softmax")
    with pytest.raises(ValueError, match="unknown function of probabilities 'softmax'; expected one of 'sigmoid'"):
        log.build_onnx_function(15, CPU, None)
    log = NegLogLearningLoss()
    log.build_onnx_function(15, CPU, None)
    with pytest.raises(InvalidArgumentError, match='input "X1"'):
        log.loss_gradient(CPU, value([[1.0]]), value([[1]]))


@TYPES
def test_b29_penalties(dtype: Any) -> None:
    penalty = ElasticLearningPenalty(l1=0.1, l2=0.2)
    penalty.build_onnx_function(15, CPU, 2)
    first, second, loss = value([1, -2, 0], dtype), value([[3]], dtype), value([10], dtype)
    assert penalty.penalty_loss(CPU, loss, first, second) is loss
    assert np.allclose(loss.numpy(), [13.4], rtol=CLOSE[dtype], atol=0)
    assert penalty.update_weights(0, CPU, first) is first
    assert np.allclose(first.numpy(), [0.5, -1.1, 0], rtol=0, atol=CLOSE[dtype])
    with pytest.raises(RuntimeError, match="the penalty was built for 2 weights, got 1"):
        penalty.penalty_loss(CPU, loss, first)
    with pytest.raises(RuntimeError, match="ElasticLearningPenalty has no functions yet"):
        ElasticLearningPenalty().update_weights(0, CPU, first)


def test_penalties_by_name() -> None:
    for name in (None, "", "NoLearningPenalty"):
        assert type(BaseLearningPenalty.select(name)) is NoLearningPenalty
    for name in ("elastic", "l1l2", "ElasticLearningPenalty"):
        assert type(BaseLearningPenalty.select(name, l1=0.25)) is ElasticLearningPenalty
    with pytest.raises(ValueError, match="unknown penalty 'penalty'"):
        BaseLearningPenalty.select("penalty")
    none, weight = NoLearningPenalty(), value([1])
    none.build_onnx_function(15, CPU, 1)
    assert none.penalty_loss(CPU, weight, weight) is weight
    assert none.update_weights(0, CPU, weight) is weight


@pytest.mark.parametrize(("l1", "l2"), [(0.25, 0.125), (0.0, 0.125), (0.25, 0.0)])
def test_b28_penalties_hold_their_coefficients(l1: float, l2: float) -> None:
    penalty = ElasticLearningPenalty(l1=l1, l2=l2)
    penalty.build_onnx_function(15, CPU, 1)

    def constants(model: onnx.ModelProto) -> list[float]:
        found = [onnx.numpy_helper.to_array(entry) for entry in model.graph.initializer]
        return [float(array.reshape(-1)[0]) for array in found if array.dtype == np.float32 and array.size == 1]

    held = constants(penalty.penalty_onnx_)
    assert l1 in held
    assert l2 in held
    update = constants(penalty.penalty_grad_onnx_)
    assert l1 in update
    assert 1 - 2 * l2 in update


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda kept: pickle.loads(pickle.dumps(kept))])
def test_b17_built_functions_are_copied(copied: Any) -> None:
    rate = LearningRateSGD(0.5)
    rate.init_learning_rate().build_onnx_function(15, CPU, 1)
    weight = value([1, 1])
    rate.update_weights(0, CPU, weight, value([1, 1]), 1)
    again = copied(rate)
    assert repr(again) == repr(rate)
    again.update_weights(0, CPU, weight, value([1, 1]), 1)
    assert weight.numpy().tolist() == [0, 0]
    loss = ElasticLearningLoss(0.25, 0.5)
    loss.build_onnx_function(15, CPU, "weight")
    twin = copied(loss)
    rows = [value([[1], [2]]), value([[2], [2]]), value([1, 3])]
    assert twin.loss_gradient(CPU, *rows)[0].numpy().tolist() == loss.loss_gradient(CPU, *rows)[0].numpy().tolist()


def test_parameters_are_set_and_saved(tmp_path: Any) -> None:
    loss = ElasticLearningLoss(0.25, 0.5)
    assert loss.get_params() == {"l1_weight": 0.25, "l2_weight": 0.5}
    assert loss.set_params(l2_weight=1.0) is loss
    with pytest.raises(ValueError, match="ElasticLearningLoss has no parameter 'l3_weight'; did you mean 'l2_weight'"):
        loss.set_params(l3_weight=1.0)
    loss.build_onnx_function(15, CPU, None)
    saved = loss.save_onnx_graph(tmp_path, prefix="a-", suffix="-b")
    assert saved == {
        name: str(tmp_path / f"a-ElasticLLoss-b.{name}.onnx") for name in ("loss_grad_onnx_", "loss_score_onnx_")
    }
    assert loss.save_onnx_graph(bytes)["loss_grad_onnx_"] == loss.loss_grad_onnx_.SerializeToString()
    with pytest.warns(UserWarning, match="is overwritten"):
        loss.save_onnx_graph(tmp_path, prefix="a-", suffix="-b")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        loss.save_onnx_graph(tmp_path / "nowhere")
