"""Networks of Keras through tf2onnx: the default choice of parameters gives the losses of Keras."""

from __future__ import annotations

import warnings
from pathlib import Path

import environments
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import ortrain
from ortrain import artifacts, optim
from ortrain.api import CheckpointState, Module, Optimizer

SCRIPT = Path(__file__).parent.parent / "in_keras" / "networks.py"
NETWORKS = ("channels-last", "lstm", "gru", "attention", "attention-layers", "conv-lstm", "time-distributed")
RATE = 0.05
# tf2onnx writes zeros for the missing biases of these networks; nothing in the file prevents their training.
WITHOUT_BIASES = ("lstm", "time-distributed")
# Constants with names that raise doubts: the offset of a normalization, folded by the exporter.
GUESSES = {"channels-last": 1}
# Tolerance of losses: both sides compute in float32, and later steps depend on earlier ones.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("keras")
    assert environments.in_environment(environments.keras(), SCRIPT, str(made)).split() == list(NETWORKS)
    return made


@pytest.mark.parametrize("name", NETWORKS)
def test_losses_are_those_of_keras(name: str, folder: Path, tmp_path: Path) -> None:
    path = folder / f"{name}.onnx"
    found = ortrain.inspect(path)
    assert found.obstacle is None
    with np.load(folder / f"{name}.npz") as stored:
        x, target, wanted, count = stored["x"], stored["target"], stored["losses"], int(stored["count"])
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    zeros = [key for key in found.names("trained") if not values[key].any()]
    assert bool(zeros) == (name in WITHOUT_BIASES)
    guesses = [info for info in found.parameters if info.role == "trained" and info.confidence == "guess"]
    assert len(guesses) == GUESSES.get(name, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ortrain.TrainingWarning)
        artifacts.generate_artifacts(
            path,
            frozen_params=zeros,
            loss=artifacts.LossType.MSELoss,
            optimizer=optim.SGD(lr=RATE),
            artifact_directory=tmp_path,
        )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert sum(value.data.size for _, value in state.parameters if value.requires_grad) == count
    module = Module(tmp_path / "training_model.onnx", state)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    losses = []
    for _ in wanted:
        losses.append(float(module(x, target)))
        optimizer.step()
        module.lazy_reset_grad()
    print(f"{name}: {count} numbers, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    np.testing.assert_allclose(losses, wanted, rtol=TOLERANCE)
