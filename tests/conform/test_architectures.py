"""Architectures of transformers and timm train as in PyTorch, from both of its exporters, optimized and not.

Losses of ten AdamW steps and all gradients of the first step are equal, or an error names the reason (see REFUSED). An
optimizing exporter may change weights: a BatchNormalization becomes part of a convolution, 1 + w and w / |w| are
computed. PyTorch then trains the changed weights (tests/in_torch/folded.py).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import environments
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import ortrain
from ortrain import artifacts, onnxblock
from ortrain.api import CheckpointState, Module, Optimizer

TESTS = Path(__file__).parent.parent
sys.path.append(str(TESTS / "in_torch"))
from elements import Elements  # noqa: E402

SCRIPT = TESTS / "in_torch" / "architectures.py"
# As in in_torch/architectures.py.
RATE, EPSILON = 1e-4, 1e-12
WAYS = ("script", "script-folded", "export", "export-optimized")
NAMES = re.findall(r'^    "([a-z0-9-]+)": (?:language|signals|of_timm)\(', SCRIPT.read_text(), re.MULTILINE)
# Tolerance relative to each loss; gradients relative to their largest element. Ortrain uses float32, PyTorch float64.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
# Minimum share of trained elements of parameters with a gradient; single numbers are not searched for.
MIN_TRAINED_SHARE = 0.99
# Architectures that an exporter of PyTorch rejects: beginning of its reason.
NOT_EXPORTED = {
    "fnet/script": "UnsupportedOperatorError: Exporting the operator 'aten::fft_fftn'",
    "fnet/script-folded": "UnsupportedOperatorError: Exporting the operator 'aten::fft_fftn'",
    "xlnet/export": "ConversionError: Failed to decompose the FX graph",
    "xlnet/export-optimized": "ConversionError: Failed to decompose the FX graph",
    "beit/export": "ConversionError: ",
    "beit/export-optimized": "ConversionError: ",
}
# Architectures that ortrain rejects, by name.
REFUSED: dict[str, str] = {}


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for the processes of torch, one for each architecture on demand."""
    return tmp_path_factory.mktemp("architectures")


def at(exported: Path, name: str) -> Path:
    if not (exported / name / "record.npz").exists():
        environments.in_environment(environments.torch(), SCRIPT, str(exported), name)
    return exported / name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_trains_as_torch(name: str, way: str, exported: Path, tmp_path: Path) -> None:
    folder, case = at(exported, name), f"{name}/{way}"
    reason = folder / f"{way}.txt"
    assert reason.exists() == (case in NOT_EXPORTED), reason.read_text() if reason.exists() else "it was exported"
    if case in NOT_EXPORTED:
        assert reason.read_text().startswith(NOT_EXPORTED[case]), reason.read_text()
        return
    if case in REFUSED:
        with pytest.raises(ortrain.UnsupportedError) as error:
            losses_like(folder, way, tmp_path)
        assert REFUSED[case] in str(error.value)
        return
    assert losses_like(folder, way, tmp_path) >= MIN_TRAINED_SHARE


def losses_like(folder: Path, way: str, made: Path) -> float:
    """Train ten steps with the artifacts of an export and check losses and gradients; returns the trained share."""
    # The optimizing exports have their own records, of the weights in the model.
    record_of = folder / f"{way}.npz"
    with np.load(record_of if record_of.exists() else folder / "record.npz") as stored:
        record = dict(stored)
    x, target, elements = record["x"], record["target"], Elements(record)
    model = onnx.load(folder / f"{way}.onnx")
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    # Unoptimized models of the new exporter have weights as initializers; the old exporter writes Constant nodes.
    trained = {name: value for name, value in constants.items() if elements.has(value)}
    artifacts.generate_artifacts(
        folder / f"{way}.onnx",
        requires_grad=list(trained),
        loss=artifacts.LossType.MSELoss,
        optimizer=onnxblock.optim.AdamW(eps=EPSILON, weight_decay=0.0),
        artifact_directory=made,
        batch_norm="freeze",
    )
    state = CheckpointState.load_checkpoint(made / "checkpoint")
    module = Module(made / "training_model.onnx", state)
    optimizer = Optimizer(made / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(RATE)
    losses, far, compared = [], 0.0, 0
    for step in range(len(record["losses"])):
        losses.append(float(module(x, target)))
        if step == 0:
            pairs = [(value, state.parameters[name].grad) for name, value in trained.items()]
            assert all(np.isfinite(gradient).all() for _, gradient in pairs)
            differences = np.abs(elements.summed(pairs) - elements.gradients)
            compared = elements.reached[np.isfinite(differences)].sum()
            far = float(np.nanmax(differences, initial=0.0))
        optimizer.step()
        module.lazy_reset_grad()
    apart = np.abs(np.asarray(losses) - record["losses"]) / np.abs(record["losses"])
    reached = int(record["reached"])
    found = compared / reached
    print(f"losses {apart.max():.1e}, {found:.1%} of {reached} gradients {far / elements.largest:.1e}")
    assert far <= GRADIENT_TOLERANCE * elements.largest
    assert apart.max() <= LOSS_TOLERANCE, (losses, record["losses"])
    return found
