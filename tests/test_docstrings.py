"""The examples in docstrings, run as they stand."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ortrain.session
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, PlaneLayout, StateLayout, TensorLayout
from ortrain.session import TrainingSession

PERCEPTRON = Path(__file__).parent.parent / "examples" / "perceptron.onnx"
# Modules whose every public name has an example that runs.
MODULES = [ortrain.session]


def public(module: ModuleType) -> dict[str, Any]:
    """The module, its public names, and their public members."""
    found: dict[str, Any] = {module.__name__: module}
    for name in module.__all__:
        member = getattr(module, name)
        found[f"{module.__name__}.{name}"] = member
        if inspect.isclass(member):
            own = {key: value for key, value in vars(member).items() if not key.startswith("_")}
            found |= {f"{module.__name__}.{name}.{key}": value for key, value in own.items()}
    return found


NAMES = {name: thing for module in MODULES for name, thing in public(module).items()}
for thing in (
    StateLayout,
    PlaneLayout,
    TensorLayout,
    CheckpointState.layout,
    CheckpointState.trainable_planes,
    CheckpointState.frozen_planes,
    Module.get_contiguous_gradients,
    Module.copy_buffer_to_gradients,
    Module.gradient_planes,
):
    NAMES[thing.__qualname__] = thing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of the perceptron of the examples."""
    folder = tmp_path_factory.mktemp("docstrings")
    artifacts.generate_artifacts(
        PERCEPTRON,
        requires_grad=["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_example(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one, and it gives what it says, in a folder of artifacts, with a batch and a fresh session."""
    monkeypatch.chdir(folder)
    rng = np.random.default_rng(0)
    state = CheckpointState.load_checkpoint("checkpoint")
    given = {
        "np": np,
        "x": rng.random((8, 64), np.float32),
        "labels": rng.integers(0, 10, 8),
        "CheckpointState": CheckpointState,
        "TrainingSession": TrainingSession,
        "state": state,
        "module": Module("training_model.onnx", state),
        "session": TrainingSession(
            CheckpointState.load_checkpoint("checkpoint"),
            "training_model.onnx",
            "eval_model.onnx",
            "optimizer_model.onnx",
        ),
    }
    docstring = inspect.getdoc(NAMES[name]) or ""
    test = doctest.DocTestParser().get_doctest(docstring, given, name, None, 0)
    assert test.examples, f"{name} has no example"
    assert not any(doctest.SKIP in example.options for example in test.examples)
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert not report, "".join(report)
