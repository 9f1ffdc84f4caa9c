"""Files of both PyTorch exporters (tests/in_torch) train with the losses and gradients of PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path

import environments
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import ortrain
from ortrain import artifacts, onnxblock
from ortrain.api import CheckpointState, Module, Optimizer

TESTS = Path(__file__).parent.parent
sys.path.append(str(TESTS / "in_torch"))
import cases  # noqa: E402
from elements import Elements  # noqa: E402

# As in in_torch/train.py.
RATES = {"SGD": 0.02, "AdamW": 2e-3}
OPTIMIZERS = {"SGD": artifacts.OptimType.SGD, "AdamW": onnxblock.optim.AdamW(eps=1e-12, weight_decay=0.0)}
# Tolerance relative to each loss; gradients relative to their largest element. Ortrain uses float32, PyTorch float64.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
# Minimum share of trained elements, among the elements with a gradient.
MIN_TRAINED_SHARE = 0.99
# Tolerance of outputs, relative to the largest.
TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that a process of torch writes within some minutes."""
    folder = tmp_path_factory.mktemp("torch")
    environments.in_environment(environments.torch(), TESTS / "in_torch" / "train.py", str(folder))
    return folder


@pytest.mark.parametrize("case", cases.cases(), ids=str)
def test_trains_as_torch(case: cases.Case, exported: Path, tmp_path: Path) -> None:
    """Losses of all steps and gradients of the first are equal; onnxruntime and ortrain run the trained model.

    If the exporter changed weights of the network, torch trained the changed weights.
    """
    folder = exported / str(case)
    assert not (folder / "error.txt").exists(), (folder / "error.txt").read_text()
    with np.load(folder / "record.npz" if case.changed else exported / f"{case.net}.npz") as stored:
        record = dict(stored)
    x, target, elements = record["x"], record["target"], Elements(record)
    model = onnx.load(folder / "model.onnx")
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    trained = {name: value for name, value in constants.items() if elements.has(value)}
    artifacts.generate_artifacts(
        folder / "model.onnx",
        requires_grad=list(trained),
        loss=artifacts.LossType.MSELoss,
        optimizer=OPTIMIZERS[case.optimizer],
        artifact_directory=tmp_path,
        batch_norm="freeze" if case.changed else "auto",
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(RATES[case.optimizer])
    losses, far, compared = [], 0.0, 0
    for step in range(len(record["losses"])):
        losses.append(float(module(x, target)))
        if step == 0:
            pairs = [(value, state.parameters[name].grad) for name, value in trained.items()]
            assert all(np.isfinite(gradient).all() for _, gradient in pairs)
            differences = np.abs(elements.summed(pairs) - elements.gradients)
            compared = int(elements.reached[np.isfinite(differences)].sum())
            far = float(np.nanmax(differences, initial=0.0))
        optimizer.step()
        module.lazy_reset_grad()
    apart = np.abs(np.asarray(losses) - record["losses"]) / np.abs(record["losses"])
    found, largest = compared / int(record["reached"]), elements.largest
    print(f"{case}: losses {apart.max():.1e}, {found:.1%} of {record['reached']} gradients {far / largest:.1e}")
    assert apart.max() <= LOSS_TOLERANCE, (losses, record["losses"])
    assert far <= GRADIENT_TOLERANCE * largest
    assert found >= MIN_TRAINED_SHARE

    module.export_model_for_inferencing(tmp_path / "trained.onnx", ["y"])
    feeds = {model.graph.input[0].name: x}
    theirs = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    (want,) = theirs.run(None, feeds)
    (got,) = ortrain.InferenceSession(tmp_path / "trained.onnx").run(None, feeds)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()
