"""Inputs of a step: lists, lossless conversions, labels outside of the classes; messages about memory limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module

X = np.linspace(-1, 1, 3 * 64).astype(np.float32).reshape(3, 64)
LABELS = np.array([3, 0, 9])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    artifacts.generate_artifacts(
        ortrain.examples.perceptron(), loss=artifacts.LossType.CrossEntropyLoss, artifact_directory=folder
    )
    return folder


@pytest.fixture
def module(folder: Path) -> Module:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")


@pytest.mark.parametrize(
    "labels",
    [
        LABELS.astype(np.int32),
        LABELS.astype(np.uint8),
        LABELS.astype(np.uint64),
        LABELS.tolist(),
        tuple(LABELS),
        list(LABELS),
    ],
    ids=["int32", "uint8", "uint64", "list", "tuple", "list of scalars"],
)
def test_labels_of_other_types(labels: Any, module: Module) -> None:
    expected = module(X, LABELS)
    assert module(X, labels).tobytes() == expected.tobytes()


def test_of_a_training_session(folder: Path) -> None:
    names = [folder / name for name in ("training_model.onnx", "eval_model.onnx")]
    session = ortrain.TrainingSession(CheckpointState.load_checkpoint(folder / "checkpoint"), *names)
    (expected,) = session.train_step([X, LABELS])
    (loss,) = session.train_step([X.astype(np.float64), LABELS.astype(np.int32)])
    assert loss.tobytes() == expected.tobytes()
    with pytest.raises(ortrain.InvalidArgumentError, match="64 of 192 elements would be rounded"):
        session.train_step([np.where(np.arange(3)[:, None] == 1, np.float64(0.1), X), LABELS])


@pytest.mark.parametrize(
    "x",
    [X.astype(np.float64), X.tolist(), [list(map(float, row)) for row in X], [list(row) for row in X]],
    ids=["float64", "list", "list of floats", "list of scalars"],
)
def test_floats_of_other_types(x: Any, module: Module) -> None:
    expected = module(X, LABELS)
    assert module(x, LABELS).tobytes() == expected.tobytes()
    inference = ortrain.InferenceSession(ortrain.examples.perceptron())
    assert inference.run(None, {"x": x})[0].tobytes() == inference.run(None, {"x": X})[0].tobytes()


def test_nan_in_an_input_gives_a_nan_loss(module: Module) -> None:
    x = X.astype(np.float64)
    x[0, 0], x[1, 1] = np.nan, np.inf
    assert np.isnan(module(x, LABELS))


@pytest.mark.parametrize(
    ("x", "labels", "sentence"),
    [
        (
            X.astype(np.float64) + 1e-12,
            LABELS,
            'input "x" must be float32[batch, 64], got float64[3, 64]: 192 of 192 elements would be '
            "rounded; to accept this, pass .astype(np.float32)",
        ),
        (
            np.full((3, 64), 1e300),
            LABELS,
            'input "x" must be float32[batch, 64], got float64[3, 64]: 192 of 192 elements would be '
            "rounded; to accept this, pass .astype(np.float32)",
        ),
        (
            X,
            np.array([1, 2, 2**63], np.uint64),
            'input "labels" must be int64[batch], got uint64[3]: 1 of 3 elements would change; to '
            "accept this, pass .astype(np.int64)",
        ),
        (
            X,
            [1.0, 2.0, 3.0],
            'input "labels" must be int64[batch], got float64[3]: the element types differ',
        ),
        (
            (X > 0),
            LABELS,
            'input "x" must be float32[batch, 64], got bool[3, 64]: the element types differ',
        ),
        (
            [[1.0] * 64, [2.0] * 64, [3.0] * 63],
            LABELS,
            "input 'x': nested lists have different lengths; pad the short lists (",
        ),
    ],
)
def test_inputs_that_a_cast_would_change(x: Any, labels: Any, sentence: str, module: Module) -> None:
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        module(x, labels)
    assert str(error.value).startswith(sentence)


def test_labels_that_are_no_classes(tmp_path: Path) -> None:
    """The error names the label, its row, the classes, and the ignored label."""
    artifacts.generate_artifacts(
        ortrain.examples.perceptron(),
        loss=artifacts.Loss(artifacts.LossType.CrossEntropyLoss, ignore_index=-100),
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    for mode in (module.train, module.eval):
        mode()
        assert np.isfinite(module(X, [3, -100, 9]))
        with pytest.raises(ortrain.InvalidArgumentError) as error:
            module(X, [3, 10, -100])
        assert str(error.value).endswith(
            "(SoftmaxCrossEntropyLoss): label 10 in row 1 is not one of the 10 classes (0 to 9) and is not the "
            "ignore_index, -100"
        )


@pytest.mark.parametrize("training", [True, False])
def test_limits_that_help(training: bool, folder: Path) -> None:
    """The named limit is sufficient, and the named batch fits; one row more is too much."""

    def limited(limit: int) -> Module:
        options = ortrain.SessionOptions()
        options.memory_limit = limit
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", session_options=options)
        return module.train(training)

    def step(module: Module, rows: int) -> None:
        module(np.zeros((rows, 64), np.float32), np.zeros(rows, np.int64))

    limit = 200_000
    tight = limited(limit)
    with pytest.raises(ortrain.MemoryLimitError) as error:
        step(tight, 1000)
    found = re.search(
        r"^this takes \d+ bytes .*, but memory_limit is 200000; .*; memory_limit = (\d+) is enough; "
        r"within the limit a batch of (\d+) fits$",
        str(error.value),
    )
    assert found is not None, str(error.value)
    enough, rows = map(int, found.groups())
    step(limited(enough), 1000)
    step(tight, rows)
    with pytest.raises(ortrain.MemoryLimitError):
        step(tight, rows + 1)
    # A limit that is too small for a single row.
    fixed = int(re.findall(r"\((\d+) parameters and gradients", str(error.value))[0])
    with pytest.raises(ortrain.MemoryLimitError, match=r"\d+ is enough; even a batch of 1 exceeds the limit$"):
        step(limited(fixed + 64), 8)


def test_limits_that_help_a_session(folder: Path) -> None:
    """An inference session names a sufficient limit and a batch that fits, as a training step does."""

    def limited(limit: int) -> ortrain.InferenceSession:
        options = ortrain.SessionOptions()
        options.memory_limit = limit
        return ortrain.InferenceSession(folder / "eval_model.onnx", options)

    def run(session: ortrain.InferenceSession, rows: int) -> None:
        given = {"x": np.zeros((rows, 64), np.float32), "labels": np.zeros(rows, np.int64)}
        session.run(None, {**given, **weights})

    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    weights = {name: np.asarray(parameter) for name, parameter in state.parameters}
    tight = limited(200_000)
    with pytest.raises(ortrain.MemoryLimitError) as error:
        run(tight, 1000)
    found = re.search(r"; memory_limit = (\d+) is enough; within the limit a batch of (\d+) fits$", str(error.value))
    assert found is not None, str(error.value)
    enough, rows = map(int, found.groups())
    run(limited(enough), 1000)
    run(tight, rows)
    with pytest.raises(ortrain.MemoryLimitError):
        run(tight, rows + 1)
