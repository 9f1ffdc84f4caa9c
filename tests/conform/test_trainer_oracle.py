"""ORTTrainer of onnxruntime-training 1.15.0 with PyTorch 2.0.1, in its own environment, and ortrain on the same script.

Both train the same ONNX models and the same PyTorch module, and each continues from checkpoints of the other.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import environments
import numpy as np
import onnx
import pytest
from classic_models import Net, classifier
from test_torch_bridge import in_torch
from trainer_nets import block, description_of

SCRIPT = Path(__file__).parent.parent / "trainer_oracle" / "train.py"
THEIRS, OURS = "onnxruntime.training", "ortrain.trainer"
# Required tolerance of float32 on both sides: losses relative to their value, states to their largest element.
CLOSE = 1e-5
STEPS, SAVED = 10, 5
# The release cannot train weights of eight elements or fewer.
NETS = {"perceptron": classifier(), "block": block(width=16, classes=12)}
NAMES = (*NETS, "module")
OPTIMIZERS = ("adam", "sgd")
EACH = [(name, optimizer) for name in NAMES for optimizer in OPTIMIZERS]
MODULE = {
    "inputs": [("x", ["N", 12]), ("labels", ["N"])],
    "outputs": [("loss", [], True), ("logits", ["N", 10])],
}


def weights_of_module() -> dict[str, np.ndarray]:
    """Return the initial values of the module."""
    rng = np.random.default_rng(29)
    shapes = {
        "fc1.weight": (16, 12),
        "fc1.bias": (16,),
        "fc2.weight": (10, 16),
        "fc2.bias": (10,),
        "norm.weight": (16,),
        "norm.bias": (16,),
        "scale": (16,),
    }
    return {name: (0.3 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def complete(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with all outputs of LayerNormalizations, which the release needs for their gradient."""
    made = copy.deepcopy(model)
    for node in made.graph.node:
        if node.op_type == "LayerNormalization":
            node.output.extend(f"{node.output[0]}.{name}" for name in ("mean", "inverse_deviation"))
    return made


def put(folder: Path, name: str, net: Net, description: dict[str, Any]) -> None:
    """Write the description and the batches of a model."""
    (folder / f"model-{name}.json").write_text(json.dumps(description))
    batches = {f"{k}/{key}": value for k in range(STEPS) for key, value in net.batch(k).items()}
    np.savez(folder / f"{name}-batches.npz", **batches)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the results of both packages, by run and package: trainings, and continuations from checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    for name, net in NETS.items():
        onnx.save(complete(net.model), folder / f"{name}.onnx")
        put(folder, name, net, description_of(net))
    np.savez(folder / "module-weights.npz", **weights_of_module())
    put(folder, "module", NETS["perceptron"], MODULE)
    found: dict[tuple[str, str], dict[str, Any]] = {}

    def train(package: str, prefix: str, run: str) -> None:
        if package == THEIRS:
            environments.in_environment(environments.trainer_oracle(), SCRIPT, package, str(folder), prefix)
        else:
            in_torch(SCRIPT, package, str(folder), prefix, folder=folder)
        found[run, package] = json.loads((folder / f"{prefix}-by-{package}.json").read_text())

    train(THEIRS, "theirs", "theirs")
    train(OURS, "ours", "ours")
    # The checkpoints exist now: each package continues from its own checkpoints and from the other's.
    for prefix in ("theirs", "ours"):
        for package in (THEIRS, OURS):
            train(package, prefix, f"{prefix} resumed")
    return found


@pytest.mark.parametrize(("name", "optimizer"), EACH)
def test_losses_of_ten_steps(name: str, optimizer: str, runs: dict[tuple[str, str], dict[str, Any]]) -> None:
    theirs, ours = runs["theirs", THEIRS], runs["ours", OURS]
    expected = theirs[f"{name}/{optimizer}/losses"]
    assert len(expected) == STEPS
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(ours[f"{name}/{optimizer}/losses"], expected, rtol=CLOSE)
    loss, kind = theirs[f"{name}/{optimizer}/evaluated"]
    np.testing.assert_allclose(ours[f"{name}/{optimizer}/evaluated"][0], loss, rtol=CLOSE)
    assert ours[f"{name}/{optimizer}/evaluated"][1] == kind
    assert ours[f"{name}/{optimizer}/steps"] == theirs[f"{name}/{optimizer}/steps"] == [STEPS, STEPS]


@pytest.mark.parametrize(("name", "optimizer"), EACH)
def test_states_have_the_same_layout(name: str, optimizer: str, runs: dict[tuple[str, str], dict[str, Any]]) -> None:
    """States have the same keys, kinds, shapes and values."""
    theirs, ours = (runs[key][f"{name}/{optimizer}/state"] for key in (("theirs", THEIRS), ("ours", OURS)))
    assert {key: value[:2] for key, value in ours.items()} == {key: value[:2] for key, value in theirs.items()}
    weights = NETS[name].weights if name in NETS else weights_of_module()
    assert sum(key.startswith("model/") for key in theirs) == len(weights)
    for key, (kind, _, expected) in theirs.items():
        found = ours[key][2]
        if kind.startswith("float"):
            np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE * np.abs(expected).max(), err_msg=key)
        else:
            assert found == expected, key


def continued() -> Iterator[tuple[str, str, str, str]]:
    for name, optimizer in EACH:
        for prefix in ("theirs", "ours"):
            for package in (THEIRS, OURS):
                yield name, optimizer, prefix, package


@pytest.mark.parametrize(("name", "optimizer", "prefix", "package"), list(continued()))
def test_a_checkpoint_goes_on(
    name: str, optimizer: str, prefix: str, package: str, runs: dict[tuple[str, str], dict[str, Any]]
) -> None:
    """Each package continues from each checkpoint: the losses equal the training that wrote the checkpoint."""
    whole = runs[prefix, THEIRS if prefix == "theirs" else OURS]
    resumed = runs[f"{prefix} resumed", package]
    losses = resumed[f"{name}/{optimizer}/losses"]
    assert len(losses) == STEPS - SAVED
    np.testing.assert_allclose(losses, whole[f"{name}/{optimizer}/losses"][SAVED:], rtol=CLOSE)
    # The release forgets the steps of a state that is loaded before a module is exported. Ortrain keeps the steps.
    forgets = name == "module" and package == THEIRS
    assert resumed[f"{name}/{optimizer}/steps"] == ([STEPS - SAVED] * 2 if forgets else [STEPS] * 2)


def test_the_release_is_the_release() -> None:
    """The environment has the stated versions."""
    python = environments.trainer_oracle()
    script = "import onnxruntime, torch; print(onnxruntime.__version__, torch.__version__.partition('+')[0])"
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run([python, "-c", script], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1.15.0", "2.0.1"]
