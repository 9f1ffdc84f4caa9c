"""Scripts for onnxruntime-training run unchanged, whether or not onnxruntime is installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import RECORDS

import ortrain.compat

SCRIPT = """
import sys

import numpy as np
import onnx
import onnxruntime
import onnxruntime.training.onnxblock as onnxblock
from onnxruntime import OrtValue
from onnxruntime.training import artifacts
from onnxruntime.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from onnxruntime.training.api.checkpoint_state import Parameter, Parameters, Properties


class Twice(onnxblock.Block):
    def __init__(self):
        super().__init__()
        self.loss = onnxblock.loss.CrossEntropyLoss()
        self.add = onnxblock.blocks.Add()

    def build(self, scores):
        loss = self.loss(scores)
        return self.add(loss, loss)


model = onnx.load(sys.argv[1])
trained = [tensor.name for tensor in model.graph.initializer]
artifacts.generate_artifacts(
    model, requires_grad=trained, loss=Twice(), optimizer=artifacts.OptimType.AdamW, artifact_directory="."
)
state = CheckpointState.load_checkpoint("checkpoint")
module = Module("training_model.onnx", state, "eval_model.onnx", device="cpu")
optimizer = Optimizer("optimizer_model.onnx", module)
scheduler = LinearLRScheduler(optimizer, 2, 20, 0.05)
rng = np.random.default_rng(0)
shape = [size.dim_value or 8 for size in model.graph.input[0].type.tensor_type.shape.dim]
x = rng.standard_normal(shape).astype(np.float32)
labels = rng.integers(0, 2, shape[0])
for step in range(20):
    loss = module(OrtValue.ortvalue_from_numpy(x), OrtValue.ortvalue_from_numpy(labels)).numpy()
    optimizer.step()
    scheduler.step()
    module.lazy_reset_grad()
    print(float(loss))
assert isinstance(state.parameters[trained[0]], Parameter)
module.export_model_for_inferencing("trained.onnx", [model.graph.output[0].name])
session = onnxruntime.InferenceSession("trained.onnx", providers=["CPUExecutionProvider"])
print(len(session.run(None, {session.get_inputs()[0].name: x})[0]))
"""

HIDE = """
import importlib.abc, sys

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "onnxruntime":
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Hide())
"""


@pytest.mark.parametrize("before", ["", HIDE, "import onnxruntime\n"], ids=["installed", "hidden", "imported"])
def test_a_script(before: str, tmp_path: Path) -> None:
    script = f"{before}\nimport ortrain.compat\nortrain.compat.install()\n{SCRIPT}"
    arguments = [sys.executable, "-c", script, str(RECORDS / "mlp_adamw_ce" / "forward.onnx")]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *losses, rows = map(float, done.stdout.splitlines())
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert rows == 8


@pytest.fixture
def installed() -> Iterator[None]:
    ortrain.compat.install()
    yield
    ortrain.compat.uninstall()


PROVIDERS = """
import onnxruntime
from onnxruntime.capi import _pybind_state as C

options = onnxruntime.RunOptions()
options.log_severity_level = 3
assert isinstance(options, C.RunOptions)
print(C.get_available_providers(), onnxruntime.get_available_providers())
ortrain.compat.uninstall()
try:
    import onnxruntime.capi
except ModuleNotFoundError:
    print("gone")
"""


def test_what_stands_behind_onnxruntime() -> None:
    script = f"{HIDE}\nimport ortrain.compat\nortrain.compat.install()\n{PROVIDERS}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['CPUExecutionProvider'] ['CPUExecutionProvider']", "gone"]


@pytest.mark.usefixtures("installed")
def test_modules_are_the_same() -> None:
    import onnxruntime.training.api.checkpoint_state as theirs
    from onnxruntime.training import onnxblock
    from onnxruntime.training.onnxblock import blocks

    import ortrain.onnxblock

    assert theirs is ortrain.api.checkpoint_state
    assert onnxblock is ortrain.onnxblock
    assert blocks is ortrain.onnxblock.blocks
    assert onnxblock.__spec__.name == "ortrain.onnxblock"
    ortrain.compat.install()
    assert sys.modules["onnxruntime.training.api"] is ortrain.api


def test_uninstall() -> None:
    def found() -> dict[str, object]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "onnxruntime"}

    import onnxruntime

    before, attributes, finders = found(), set(vars(onnxruntime)), list(sys.meta_path)
    ortrain.compat.install()
    import onnxruntime.training.onnxblock

    ortrain.compat.uninstall()
    assert found() == before
    assert set(vars(onnxruntime)) == attributes
    assert sys.meta_path == finders
    ortrain.compat.uninstall()


def test_values_of_onnxruntime() -> None:
    """As inputs and as buffers, the Python object and the one inside of it."""
    import onnxruntime

    case = RECORDS / "mlp_adamw_ce"
    state = ortrain.api.CheckpointState.load_checkpoint(case / "checkpoint")
    module = ortrain.api.Module(case / "training_model.onnx", state)
    with np.load(case / "inputs.npz") as stored:
        arrays = [stored[f"batch0/{name}"] for name in module.input_names()]
    theirs = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in arrays]
    want = module(*arrays)
    ours = [ortrain.OrtValue.ortvalue_from_numpy(array) for array in arrays]
    native = [value._ortvalue for value in theirs]
    for given, kind in [
        (theirs, onnxruntime.OrtValue),
        (ours, ortrain.OrtValue),
        (native, ortrain.OrtValue),
        ([theirs[0], ours[1]], ortrain.OrtValue),
        ([theirs[0], arrays[1]], np.ndarray),
    ]:
        result = module(*given)
        assert isinstance(result, kind)
        assert (result if kind is np.ndarray else result.numpy()) == want
    # What is returned has memory of its own, which an array keeps.
    kept = [module(*theirs).numpy() for _ in range(20)]
    junk = [np.full_like(value, 7) for value in kept]
    assert kept == [want] * len(junk)
    packed = module.get_contiguous_parameters(True)
    module.copy_buffer_to_parameters(onnxruntime.OrtValue.ortvalue_from_numpy(packed.numpy() * 2), True)
    np.testing.assert_array_equal(module.get_contiguous_parameters(True).numpy(), packed.numpy() * 2)
