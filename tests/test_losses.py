"""Losses with settings, alone and in sums: values and gradients against formulas."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer
from ortrain.artifacts import Loss, LossType
from ortrain.session import TrainingSession

# Tolerance of float32 sums of a few dozen terms, relative to the largest.
TOLERANCE = 2e-6
# Tolerance of central differences of a float64 formula, with gradients in float32.
GRADIENT_TOLERANCE = 1e-5
STEP = 1e-5

CROSS_ENTROPY, MSE, L1, BCE = (
    LossType.CrossEntropyLoss,
    LossType.MSELoss,
    LossType.L1Loss,
    LossType.BCEWithLogitsLoss,
)
WEIGHT = np.array([0.5, 2.0, 1.0], np.float32)


def model(shape: Sequence[int | str], opset: int = 17) -> onnx.ModelProto:
    """Return the model ``scores = x * w``, with one weight for each element of a sample of x."""
    declare = helper.make_tensor_value_info
    weight = numpy_helper.from_array(np.ones(tuple(shape[1:]), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["scores"])],
        "graph",
        [declare("x", TensorProto.FLOAT, shape)],
        [declare("scores", TensorProto.FLOAT, shape)],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def trained(proto: onnx.ModelProto, loss: Any, folder: Path, *inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss, and the gradient of the weights."""
    artifacts.generate_artifacts(proto, requires_grad=["w"], loss=loss, artifact_directory=folder)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    value = module(*inputs)
    gradient = state.parameters["w"].grad
    assert gradient is not None
    return np.asarray(value), gradient.copy()


def log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def cross_entropy(scores: np.ndarray, labels: np.ndarray, loss: Loss) -> float:
    """Compute the definition of PyTorch's documentation."""
    classes = scores.shape[1]
    weight = np.ones(classes) if loss.weight is None else np.asarray(loss.weight, np.float64)
    counted = labels != loss.ignore_index if loss.ignore_index is not None else np.ones(labels.shape, bool)
    known = np.where(counted, labels, 0)
    logs = log_softmax(scores)
    of_label = np.where(counted, weight[known], 0)
    own = -np.take_along_axis(logs, known[:, None], axis=1)[:, 0] * of_label
    per_class = weight.reshape([1, classes] + [1] * (scores.ndim - 2))
    alike = np.where(counted, -(logs * per_class).sum(axis=1), 0) / classes
    both = (1 - loss.label_smoothing) * own + loss.label_smoothing * alike
    total = both.sum()
    return float(total if loss.reduction == "sum" else total / of_label.sum())


def elementwise(scores: np.ndarray, target: np.ndarray, loss: Loss) -> float:
    difference = scores - target
    if loss.kind == MSE:
        losses = difference**2
    elif loss.kind == L1:
        losses = np.abs(difference)
    else:
        probability = 1 / (1 + np.exp(-scores))
        positive = 1.0 if loss.pos_weight is None else np.asarray(loss.pos_weight, np.float64)
        losses = -(positive * target * np.log(probability) + (1 - target) * np.log(1 - probability))
        if loss.weight is not None:
            losses = losses * np.asarray(loss.weight, np.float64)
    return float(losses.sum() if loss.reduction == "sum" else losses.mean())


def check(shape: Sequence[int], loss: Loss, target: np.ndarray, folder: Path, opset: int = 17) -> None:
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    formula = cross_entropy if loss.kind == CROSS_ENTROPY else elementwise
    value, gradient = trained(model(["n", *shape[1:]], opset), loss, folder, x, target)
    want = formula(x.astype(np.float64), target, loss)
    assert value.shape == ()
    assert abs(value - want) <= TOLERANCE * max(1, abs(want))
    weights = np.ones(shape[1:])
    for index in np.ndindex(*shape[1:]):
        shifted = []
        for sign in (1, -1):
            moved = weights.copy()
            moved[index] += sign * STEP
            shifted.append(formula(x * moved, target, loss))
        difference = (shifted[0] - shifted[1]) / (2 * STEP)
        assert abs(gradient[index] - difference) <= GRADIENT_TOLERANCE * max(1, np.abs(gradient).max())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("ignored", [None, -100, 1])
@pytest.mark.parametrize("shape", [[6, 3], [4, 3, 2, 2]])
def test_cross_entropy(
    reduction: Any, smoothing: float, weight: Any, ignored: int | None, shape: list[int], tmp_path: Path
) -> None:
    labels = np.random.default_rng(2).integers(0, 3, [shape[0], *shape[2:]])
    if ignored is not None:
        labels.flat[::3] = ignored
    loss = Loss(CROSS_ENTROPY, reduction, weight, ignore_index=ignored, label_smoothing=smoothing)
    check(shape, loss, labels, tmp_path)


@pytest.mark.parametrize("opset", [12, 13, 18])
def test_opsets(opset: int, tmp_path: Path) -> None:
    loss = Loss(CROSS_ENTROPY, weight=WEIGHT, ignore_index=0, label_smoothing=0.0 if opset < 13 else 0.2)
    check([5, 3], loss, np.array([0, 1, 2, 1, 0]), tmp_path, opset)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", [MSE, L1, BCE])
def test_reductions(kind: LossType, reduction: Any, tmp_path: Path) -> None:
    target = np.random.default_rng(3).random([5, 3], np.float32)
    check([5, 3], Loss(kind, reduction), target, tmp_path)


@pytest.mark.parametrize(
    ("weight", "positive"), [(WEIGHT, None), (None, WEIGHT), (WEIGHT, np.float32(3)), (np.full((5, 1), 0.5), WEIGHT)]
)
def test_weights_of_binary_cross_entropy(weight: Any, positive: Any, tmp_path: Path) -> None:
    target = np.random.default_rng(4).integers(0, 2, [5, 3]).astype(np.float32)
    check([5, 3], Loss(BCE, weight=weight, pos_weight=positive), target, tmp_path)


def test_a_sum_of_losses(tmp_path: Path) -> None:
    """Each loss has a target of its own, or all losses share one."""
    x, target, labels = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32), np.array([0, 2])
    terms = [Loss(MSE), Loss(L1, factor=0.5), Loss(CROSS_ENTROPY, factor=2)]
    value, gradient = trained(model(["n", 3]), terms, tmp_path, x, target, labels)
    assert abs(value - (1 + 0.5 + 2 * np.log(3))) < TOLERANCE
    alone = [
        trained(model(["n", 3]), term.kind, tmp_path, x, labels if term.kind == CROSS_ENTROPY else target)[1]
        for term in terms
    ]
    np.testing.assert_allclose(gradient, alone[0] + 0.5 * alone[1] + 2 * alone[2], atol=TOLERANCE)

    named = [Loss(MSE, scores="x", target="other"), Loss(MSE, scores="scores", target="x", factor=3)]
    other = np.full((2, 3), 3, np.float32)
    value, _ = trained(model(["n", 3]), named, tmp_path, x, other)
    assert value == 4


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (Loss(MSE, weight=WEIGHT), "the model: the squared error has no weight"),
        (Loss(L1, label_smoothing=0.1), "the model: the absolute error has no label_smoothing"),
        (Loss(CROSS_ENTROPY, pos_weight=WEIGHT), "the model: the cross-entropy loss has no pos_weight"),
        (Loss(BCE, ignore_index=1), "the model: the binary cross-entropy loss has no ignore_index"),
        (
            Loss(CROSS_ENTROPY, label_smoothing=1.5),
            "the model: label_smoothing must be from 0 to 1, got 1.5",
        ),
        (
            Loss(CROSS_ENTROPY, label_smoothing=float("nan")),
            "the model: label_smoothing must be from 0 to 1, got NaN",
        ),
        (
            Loss(CROSS_ENTROPY, weight=[1, 2]),
            'the model: weight has 2 elements, but "scores" has 3 classes',
        ),
        (
            Loss(CROSS_ENTROPY, weight=[[1, 2, 3]]),
            "the model: weight has shape [1, 3], expected a vector with one element for each class",
        ),
        (Loss(MSE, reduction="median"), 'there is no reduction "median"'),  # type: ignore[arg-type]
        (Loss(MSE, scores="nothing"), 'the model has no value "nothing" to use as an input of the loss'),
        (
            Loss(MSE, reduction="none"),  # type: ignore[arg-type]
            'the model: the loss must be one float, but "onnx::pow_output::4" is float32[n, 3]; reduce it with '
            "ReduceMean or ReduceSum (keepdims=0)",
        ),
    ],
)
def test_invalid_losses(loss: Loss, sentence: str, tmp_path: Path) -> None:
    with pytest.raises((ortrain.InvalidArgumentError, ortrain.InvalidModelError)) as error:
        artifacts.generate_artifacts(model(["n", 3]), ["w"], loss=loss, artifact_directory=tmp_path)
    assert str(error.value) == sentence
    assert not list(tmp_path.iterdir())


def two_heads() -> onnx.ModelProto:
    """Return a model of the scores ``a`` [b, 1] and ``c`` [b, 5] for one input."""
    declare = helper.make_tensor_value_info
    chance = np.random.default_rng(3)
    nodes = [helper.make_node("MatMul", ["x", f"w{name}"], [name]) for name in "ac"]
    graph = helper.make_graph(
        nodes,
        "graph",
        [declare("x", TensorProto.FLOAT, ["b", 4])],
        [declare("a", TensorProto.FLOAT, ["b", 1]), declare("c", TensorProto.FLOAT, ["b", 5])],
        [
            numpy_helper.from_array(chance.standard_normal((4, size)).astype(np.float32), f"w{name}")
            for name, size in (("a", 1), ("c", 5))
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_each_term_has_a_target_of_its_own(tmp_path: Path) -> None:
    losses = [Loss(LossType.MSELoss, scores="a"), Loss(LossType.BCEWithLogitsLoss, scores="c")]
    artifacts.generate_artifacts(two_heads(), loss=losses, artifact_directory=tmp_path)
    module = Module(tmp_path / "training_model.onnx", CheckpointState.load_checkpoint(tmp_path / "checkpoint"))
    assert module.input_names() == ["x", "target_a", "target_c"]
    x, a, c = np.ones((2, 4), np.float32), np.ones((2, 1), np.float32), np.ones((2, 5), np.float32)
    assert np.isfinite(module(x, a, c))
    with pytest.raises(ortrain.InvalidArgumentError, match="target_c"):
        module(x, a, a)
    # Terms that compare the same value, or name the same target, share an input.
    for again, names in [
        ([Loss(LossType.MSELoss, scores="c"), Loss(LossType.L1Loss, scores="c")], ["x", "target"]),
        ([Loss(LossType.MSELoss, scores="a", target="t"), Loss(LossType.L1Loss, scores="a", target="t")], ["x", "t"]),
        ([Loss(LossType.MSELoss, scores="a"), Loss(LossType.L1Loss, scores="c", target="t")], ["x", "target", "t"]),
    ]:
        artifacts.generate_artifacts(two_heads(), loss=again, artifact_directory=tmp_path)
        state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
        assert Module(tmp_path / "training_model.onnx", state).input_names() == names


def test_scores_and_targets_are_not_broadcast(tmp_path: Path) -> None:
    losses = [Loss(LossType.MSELoss, scores=name, target="t") for name in "ac"]
    with pytest.raises(ortrain.InvalidModelError) as error:
        artifacts.generate_artifacts(two_heads(), loss=losses, artifact_directory=tmp_path)
    assert str(error.value).endswith(
        'the squared error of "c" (float32[b, 5]) needs a target of type float32[b, 5], but "t" is float32[b, 1]; '
        "neither is broadcast: choose another target for this loss"
    )


@pytest.mark.parametrize(
    ("axis", "sentence"),
    [
        (0, 'class_axis is 0, which is the batch axis of "c" (float32[b, 5]); choose a later axis'),
        (-2, 'class_axis is -2, which is the batch axis of "c" (float32[b, 5]); choose a later axis'),
        (2, 'class_axis is 2, but "c" (float32[b, 5]) has axes 0 to 1'),
        (2**63 - 1, "has axes 0 to 1"),
    ],
)
def test_axes_that_are_no_classes(axis: int, sentence: str, tmp_path: Path) -> None:
    loss = Loss(LossType.CrossEntropyLoss, scores="c", class_axis=axis)
    with pytest.raises(ortrain.InvalidModelError) as error:
        artifacts.generate_artifacts(two_heads(), loss=loss, artifact_directory=tmp_path)
    assert sentence in str(error.value)
    with pytest.raises(ortrain.InvalidModelError, match="the squared error has no class_axis"):
        artifacts.generate_artifacts(
            two_heads(), loss=Loss(LossType.MSELoss, scores="c", class_axis=1), artifact_directory=tmp_path
        )


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.1, "weight": np.arange(1.0, 6.0)}, {"ignore_index": 2}])
def test_classes_on_the_last_axis(settings: dict[str, Any], tmp_path: Path) -> None:
    """Scores [b, s, classes] have the loss of scores [b * s, classes]."""
    declare = helper.make_tensor_value_info
    weight = numpy_helper.from_array(np.random.default_rng(4).standard_normal((4, 5)).astype(np.float32), "w")
    x = np.random.default_rng(5).standard_normal((2, 3, 4)).astype(np.float32)
    labels = np.array([[0, 2, 4], [1, 1, 3]])
    found = []
    for shape, axis in (([2, 3, 4], -1), ([6, 4], None)):
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            "graph",
            [declare("x", TensorProto.FLOAT, shape)],
            [declare("y", TensorProto.FLOAT, None)],
            [weight],
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        loss = Loss(LossType.CrossEntropyLoss, class_axis=axis, **settings)
        artifacts.generate_artifacts(made, loss=loss, artifact_directory=tmp_path)
        state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
        module = Module(tmp_path / "training_model.onnx", state)
        found.append((float(module(x.reshape(shape), labels.reshape(shape[:-1]))), state.parameters["w"].grad.copy()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-5, atol=1e-7)


TOKENS = (4, 7, 6)


def tokens() -> onnx.ModelProto:
    """Return scores [4, 7, 5] of fixed sizes, in a model without a hint at the axis of classes."""
    declare = helper.make_tensor_value_info
    weight = np.random.default_rng(4).standard_normal((TOKENS[-1], 5)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Tanh", ["h"], ["y"])],
        "graph",
        [declare("x", TensorProto.FLOAT, TOKENS)],
        [declare("y", TensorProto.FLOAT, [*TOKENS[:-1], 5])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def trained_tokens(folder: Path, loss: Any, labels: np.ndarray, face: str = "module") -> list[float]:
    """Return the losses of three steps and of an evaluation."""
    artifacts.generate_artifacts(tokens(), loss=loss, optimizer=artifacts.OptimType.AdamW, artifact_directory=folder)
    x = np.random.default_rng(5).standard_normal(TOKENS).astype(np.float32)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    models = [folder / f"{kind}_model.onnx" for kind in ("training", "eval", "optimizer")]
    losses = []
    if face == "session":
        session = TrainingSession(state, *models)
        for _ in range(3):
            losses.append(float(session.train_step([x, labels])[0]))
            session.optimizer_step()
            session.lazy_reset_grad()
        return [*losses, float(session.eval_step([x, labels])[0])]
    module = Module(*models[:1], state, models[1])
    optimizer = Optimizer(models[2], module)
    for _ in range(3):
        losses.append(float(module(x, labels)))
        optimizer.step()
        module.lazy_reset_grad()
    module.eval()
    losses.append(float(module(x, labels)))
    module.export_model_for_inferencing(folder / "exported.onnx", ["y"])
    exported = onnx.load(folder / "exported.onnx")
    assert [node.op_type for node in exported.graph.node] == ["MatMul", "Tanh"]
    assert not exported.metadata_props
    return losses


@pytest.mark.parametrize("face", ["module", "session"])
@pytest.mark.parametrize("settings", [{}, {"ignore_index": 2}, {"reduction": "sum"}])
def test_class_axis_follows_from_the_first_labels(settings: dict[str, Any], face: str, tmp_path: Path) -> None:
    labels = np.random.default_rng(6).integers(0, 5, TOKENS[:2])
    given = Loss(LossType.CrossEntropyLoss, class_axis=-1, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = trained_tokens(tmp_path, given, labels, face)
    with pytest.warns(ortrain.TrainingWarning) as warned:
        found = trained_tokens(tmp_path, Loss(LossType.CrossEntropyLoss, **settings), labels, face)
    assert found == wanted
    assert [str(one.message) for one in warned] == [
        'the class axis of "y" (float32[4, 7, 5]) is assumed to be 2, the last one, because "labels" has shape [4, '
        "7]; confirm it with class_axis=2 of the loss"
    ]
    assert warned[0].filename == __file__


def test_the_axis_of_classes_is_that_of_the_first_step(tmp_path: Path) -> None:
    artifacts.generate_artifacts(tokens(), loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path)
    module = Module(tmp_path / "training_model.onnx", CheckpointState.load_checkpoint(tmp_path / "checkpoint"))
    x = np.ones(TOKENS, np.float32)
    module(x, np.zeros((4, 5), np.int64))
    with pytest.raises(ortrain.InvalidArgumentError, match="axis 1 should be 5 but is 7"):
        module(x, np.zeros((4, 7), np.int64))


@pytest.mark.parametrize(
    ("settings", "labels", "axis", "other"),
    [
        ({"class_axis": 1}, (4, 7), 1, 2),
        ({"class_axis": 2}, (4, 5), 2, 1),
        ({"label_smoothing": 0.1}, (4, 7), 1, 2),
        ({}, (4, 9), 1, 2),
    ],
)
def test_labels_that_do_not_fit_are_refused_with_both_readings(
    settings: dict[str, Any], labels: tuple[int, int], axis: int, other: int, tmp_path: Path
) -> None:
    shapes = {1: "int64[4, 5]", 2: "int64[4, 7]"}
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        trained_tokens(tmp_path, Loss(LossType.CrossEntropyLoss, **settings), np.zeros(labels, np.int64))
    assert str(error.value).endswith(
        f'"y" (float32[4, 7, 5]) has its classes on axis {axis}, so labels are {shapes[axis]}. For classes on '
        f"axis {other} and labels {shapes[other]} set class_axis={other} of the loss"
    )


def test_class_axis_follows_from_the_class_weights(tmp_path: Path) -> None:
    labels = np.random.default_rng(6).integers(0, 5, TOKENS[:2])
    weight = np.arange(1.0, 6.0)
    given = Loss(LossType.CrossEntropyLoss, class_axis=-1, weight=weight)
    wanted = trained_tokens(tmp_path, given, labels)
    with pytest.warns(ortrain.TrainingWarning, match="because its size equals the size of the loss weight"):
        found = trained_tokens(tmp_path, Loss(LossType.CrossEntropyLoss, weight=weight), labels)
    assert found == wanted
