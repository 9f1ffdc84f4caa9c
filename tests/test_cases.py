"""Recorded cases: models from PyTorch, with the parameter names, losses and gradients of PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ortrain
from ortrain import artifacts, optim
from ortrain.api import CheckpointState, Module, Optimizer

CASES = Path(__file__).parent / "data" / "cases"
# Tolerance of losses, and of gradients relative to the largest: both sides compute in float32.
TOLERANCE = 1e-5
RATE = 0.05
# Label that PyTorch ignores.
IGNORED = -100


def recorded(name: str) -> dict[str, np.ndarray]:
    with np.load(CASES / name / "case.npz") as stored:
        return dict(stored)


@pytest.mark.parametrize("name", ["graph-network", "group-norm", "detector-loss"])
def test_parameters_of_torch_are_trained(name: str) -> None:
    found = ortrain.inspect(CASES / name / "model.onnx")
    assert sorted(found.names("trained")) == sorted(recorded(name)["trained"])
    assert not [info for info in found.parameters if info.role == "trained" and info.confidence == "guess"]


def losses(name: str, loss: artifacts.LossType | artifacts.Loss, folder: Path) -> list[float]:
    """Return the losses of four steps of SGD with the default choice of parameters."""
    case = recorded(name)
    artifacts.generate_artifacts(
        CASES / name / "model.onnx", loss=loss, optimizer=optim.SGD(lr=RATE), artifact_directory=folder
    )
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    inputs = [case[key] for key in module.input_names()[:-1]]
    found = []
    for _ in range(4):
        found.append(float(module(*inputs, case["labels"])))
        optimizer.step()
        module.lazy_reset_grad()
    return found


@pytest.mark.parametrize("name", ["graph-network", "group-norm"])
def test_losses_of_torch(name: str, tmp_path: Path) -> None:
    found = losses(name, artifacts.LossType.CrossEntropyLoss, tmp_path)
    np.testing.assert_allclose(found, recorded(name)["losses"], rtol=TOLERANCE)


@pytest.mark.parametrize("axis", [None, -1, 2])
def test_losses_of_tokens(axis: int | None, tmp_path: Path) -> None:
    """Scores have the shape [batch, sequence, classes], labels [batch, sequence]: the classes are on the last axis."""
    loss = artifacts.Loss(artifacts.LossType.CrossEntropyLoss, ignore_index=IGNORED, class_axis=axis)
    if axis is None:
        with pytest.warns(ortrain.TrainingWarning) as warned:
            found = losses("token-classes", loss, tmp_path)
        assert [str(one.message) for one in warned] == [
            'the class axis of "logits" (float32[b, s, 20]) is assumed to be 2, the last one, because axis 1 has '
            "no fixed size; confirm it with class_axis=2, or set class_axis=1"
        ]
    else:
        found = losses("token-classes", loss, tmp_path)
    np.testing.assert_allclose(found, recorded("token-classes")["losses"], rtol=TOLERANCE)
