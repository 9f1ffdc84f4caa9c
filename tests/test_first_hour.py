"""The first hour of a user: output, messages and refusals before a training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ortrain
from ortrain import artifacts, optim
from ortrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from ortrain.gradient import grad

FULL = Path("/dev/full")
NAN = float("nan")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of a classifier for two optimizers of onnxruntime."""
    made = tmp_path_factory.mktemp("first_hour")
    for name in ("AdamW", "SGD"):
        artifacts.generate_artifacts(
            ortrain.examples.perceptron(),
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=artifacts.OptimType[name],
            artifact_directory=made,
            prefix=name,
        )
    return made


def trained(folder: Path) -> tuple[CheckpointState, Module, Optimizer]:
    """Return a state with moments of AdamW."""
    state = CheckpointState.load_checkpoint(folder / "AdamWcheckpoint")
    module = Module(folder / "AdamWtraining_model.onnx", state)
    optimizer = Optimizer(folder / "AdamWoptimizer_model.onnx", module)
    module(np.ones((2, 64), np.float32), np.array([1, 2]))
    optimizer.step()
    return state, module, optimizer


def test_devices_are_listed_in_silence() -> None:
    """Mesa prints a warning on the standard error if the environment has no XDG_RUNTIME_DIR."""
    environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    code = "import ortrain; print([device.name for device in ortrain.devices()])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"ORTRAIN_SOFTWARE_GPU": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert "'cpu', 'reference'" in done.stdout


@pytest.mark.parametrize("name", ["gpu", "GPU", "gpu:1"])
def test_a_device_that_is_called_gpu(name: str, folder: Path) -> None:
    state = CheckpointState.load_checkpoint(folder / "AdamWcheckpoint")
    with pytest.raises(ortrain.InvalidArgumentError, match='did you mean "auto", the best GPU'):
        Module(folder / "AdamWtraining_model.onnx", state, device=name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    """Opening the pipe in any of these calls would wait for a writer."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reads: list[Callable[[], object]] = [
        lambda: ortrain.InferenceSession(pipe),
        lambda: ortrain.inspect(pipe),
        lambda: ortrain.dump(pipe),
        lambda: artifacts.generate_artifacts(pipe, artifact_directory=tmp_path),
        lambda: artifacts.open_batch(pipe),
        lambda: artifacts.replace_head(pipe, 3),
        lambda: grad(pipe, of="y", wrt="w"),
        lambda: CheckpointState.load_checkpoint(pipe),
    ]
    for read in reads:
        with pytest.raises(ortrain.OrtrainError, match="not a regular file"):
            read()
    done = subprocess.run(
        [sys.executable, "-m", "ortrain", "inspect", str(pipe)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr == f"python -m ortrain: cannot read {pipe}: it is not a regular file\n"


@pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("command", [["operators"], ["inspect", "examples/convnet.onnx"]])
def test_commands_whose_output_is_closed_or_full(command: list[str]) -> None:
    root = Path(__file__).parent.parent
    call = [sys.executable, "-m", "ortrain", *command]
    with FULL.open("w") as full:
        done = subprocess.run(call, cwd=root, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        silent = subprocess.run(call, cwd=root, stdout=full, stderr=full, check=False)
    assert done.stderr == "python -m ortrain: the output cannot be written: No space left on device\n"
    assert (done.returncode, silent.returncode) == (1, 1)
    for closed in (1, 2):
        shell = ["bash", "-c", f'exec "$@" {closed}>&-', "bash", *call]
        done = subprocess.run(shell, cwd=root, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_moments_that_an_optimizer_would_drop(folder: Path) -> None:
    state, module, _ = trained(folder)
    before = state.to_bytes(True)
    with pytest.raises(ortrain.OrtrainError, match=r"optimizer AdamW with the slots .*replace"):
        Optimizer(folder / "SGDoptimizer_model.onnx", module)
    assert state.to_bytes(True) == before
    Optimizer(folder / "SGDoptimizer_model.onnx", module, replace=True)


SETTINGS: dict[str, Callable[[], object]] = {
    "lr must be in the range of float32, got 1e+39": lambda: optim.AdamW(lr=1e39),
    "weight_decay must be in the range of float32, got 1e+39": lambda: optim.SGD(weight_decay=1e39),
    "max_norm must be in the range of float32, got 1e+39": lambda: optim.SGD(max_norm=1e39),
    "lr is a number with more digits than a float can hold": lambda: optim.SGD(lr=10**400),
    "nesterov must be True or False, got nan": lambda: optim.SGD(momentum=0.9, nesterov=NAN),  # type: ignore[arg-type]
    "amsgrad must be True or False, got 2": lambda: optim.Adam(amsgrad=2),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("sentence", SETTINGS)
def test_settings_of_optimizers(sentence: str) -> None:
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        SETTINGS[sentence]()
    assert str(error.value) == sentence


def test_numbers_that_a_type_does_not_have(folder: Path) -> None:
    """The error is an OrtrainError and an OverflowError."""
    state, _, optimizer = trained(folder)
    before = state.to_bytes(True)

    def set_property(value: float) -> None:
        state.properties["p"] = value

    def seeded() -> None:
        state.seed = 2**70

    for act in (
        lambda: set_property(2**70),
        lambda: set_property(1e39),
        seeded,
        lambda: optimizer.set_learning_rate(10**400),
        lambda: LinearLRScheduler(optimizer, 2**70, 2**71, 0.1),
        lambda: LinearLRScheduler(optimizer, 1, 2**63, 0.1),
    ):
        with pytest.raises(ortrain.OutOfRangeError) as error:
            act()
        assert isinstance(error.value, ortrain.OrtrainError)
        assert isinstance(error.value, OverflowError)
    assert state.to_bytes(True) == before


def test_a_parameter_without_axes_is_scaled(tmp_path: Path) -> None:
    """Arithmetic on its data gives a NumPy scalar, which is float64 in some versions."""
    import onnx

    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        net (float[n] x) => (float[n] y) <float scale = {1.5}> { y = Mul (x, scale) }
    """)
    artifacts.generate_artifacts(
        model, requires_grad=["scale"], loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path
    )
    scale = CheckpointState.load_checkpoint(tmp_path / "checkpoint").parameters["scale"]
    assert scale.shape == ()
    for number in (scale.data * 0.9, np.float64(1.35), np.float16(1.35), np.array(1.35, np.float32)):
        scale.data = number
        assert scale.data == np.float32(number)
    with pytest.raises(ortrain.InvalidArgumentError):
        scale.data = np.array([1.0, 2.0], np.float32)
