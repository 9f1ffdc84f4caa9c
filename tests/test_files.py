"""Written files: modes and links stay, only regular files are replaced, leftovers of killed processes are removed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import RECORDS, Run
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts, onnxblock
from ortrain.api import CheckpointState, Module
from ortrain.session import TrainingSession

CASE = RECORDS / "mlp_adamw_ce"
KILLS = 40
Writer = Callable[[Path], None]


@pytest.fixture(scope="module")
def run() -> Run:
    return Run(CASE)


def module_export(run: Run, path: Path, *, external: bool = False) -> None:
    outputs = [output.name for output in onnx.load(CASE / "forward.onnx").graph.output]
    run.module.export_model_for_inferencing(path, outputs, external_data=external)


def session_export(run: Run, path: Path) -> None:
    session = TrainingSession(
        CheckpointState.load_checkpoint(CASE / "checkpoint"), CASE / "training_model.onnx", CASE / "eval_model.onnx"
    )
    outputs = [output.name for output in onnx.load(CASE / "forward.onnx").graph.output]
    with session:
        session.export_model_for_inferencing(path, outputs)


def artifact(name: str, **arguments: bool) -> Callable[[Run, Path], None]:
    """Return a function that writes an artifact to a path; the name of the path gives the prefix."""

    def write(run: Run, path: Path) -> None:
        artifacts.generate_artifacts(
            CASE / "forward.onnx",
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=artifacts.OptimType.SGD,
            artifact_directory=path.parent,
            prefix=path.name.removesuffix(name),
            nominal_checkpoint=True,
            **arguments,
        )

    return write


WRITERS: dict[str, tuple[str, Callable[[Run, Path], None]]] = {
    "checkpoint": ("c", lambda run, path: CheckpointState.save_checkpoint(run.state, path, True)),
    "checkpoint of two files": ("c", lambda run, path: run.state._native.save(str(path), True, external_above=0)),
    "safetensors": ("c.safetensors", lambda run, path: run.state.save_safetensors(path)),
    "export": ("m.onnx", module_export),
    "export of two files": ("m.onnx", lambda run, path: module_export(run, path, external=True)),
    "export of a session": ("m.onnx", session_export),
    "training model": ("training_model.onnx", artifact("training_model.onnx")),
    "eval model": ("eval_model.onnx", artifact("eval_model.onnx", external_data=True)),
    "optimizer model": ("optimizer_model.onnx", artifact("optimizer_model.onnx")),
    "artifact": ("checkpoint", artifact("checkpoint")),
    "nominal checkpoint": ("nominal_checkpoint", artifact("nominal_checkpoint")),
    "checkpoint of blocks": (
        "c",
        lambda run, path: onnxblock.save_checkpoint(
            ([numpy_helper.from_array(np.ones(3, np.float32), "w")], []), os.fspath(path)
        ),
    ),
}


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def is_sound(path: Path) -> bool:
    """Return True if the file has new content."""
    return len(path.read_bytes()) > len("old")


@pytest.mark.parametrize("writer", WRITERS)
def test_modes_stay(writer: str, run: Run, tmp_path: Path) -> None:
    name, write = WRITERS[writer]
    path = tmp_path / name
    for wanted in (0o640, 0o600, 0o664):
        path.write_text("old")
        path.chmod(wanted)
        write(run, path)
        assert is_sound(path)
        assert mode(path) == oct(wanted)


@pytest.mark.parametrize("writer", WRITERS)
def test_links_are_followed(writer: str, run: Run, tmp_path: Path) -> None:
    name, write = WRITERS[writer]
    (tmp_path / "store").mkdir()
    (tmp_path / "made").mkdir()
    path = tmp_path / "made" / name
    path.symlink_to("../store/real")
    # The link has no target at first, then the written file.
    for _ in range(2):
        write(run, path)
        assert os.readlink(path) == "../store/real"  # noqa: PTH115  (as it was written)
        assert is_sound(tmp_path / "store" / "real")
    (tmp_path / "store" / "real").chmod(0o640)
    write(run, path)
    assert mode(tmp_path / "store" / "real") == oct(0o640)
    assert [entry.name for entry in (tmp_path / "store").iterdir()] == ["real"]

    path.unlink()
    path.symlink_to(name)
    with pytest.raises(ortrain.OrtrainError) as error:
        write(run, path)
    said = f"cannot write {path}: it is a symbolic link that leads back to itself; remove it or name another file"
    assert str(error.value) == said


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_special_files_are_an_error(writer: str, kind: str, run: Run, tmp_path: Path) -> None:
    name, write = WRITERS[writer]
    path = tmp_path / name
    if kind == "device":
        path.symlink_to("/dev/null")
    else:
        os.mkfifo(path)
    with pytest.raises(ortrain.OrtrainError) as error:
        write(run, path)
    said = f"cannot write {path}: it is a {kind}, and only regular files are replaced; name another file"
    assert str(error.value) == said
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize("writer", WRITERS)
def test_long_names(writer: str, run: Run, tmp_path: Path) -> None:
    name, write = WRITERS[writer]
    # Artifacts have a prefix, and several names.
    longest = 250 - len("nominal_checkpoint") + len(name) if "artifact" in writer or "model" in writer else 250
    path = tmp_path / ("x" * (longest - len(name)) + name)
    for _ in range(2):
        write(run, path)
        assert is_sound(path)
    assert not list(tmp_path.glob("*.tmp"))


FOREVER = """
import sys
from pathlib import Path

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module
from ortrain.session import TrainingSession

case, folder, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
if what == "export":
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
print("writing", flush=True)
number = 0
while True:
    number += 1
    if what == "export":
        for _, parameter in state.parameters:
            parameter.data[...] = number % 1000
        module.export_model_for_inferencing(folder / "m.onnx", ["y"], external_data=True)
    else:
        artifacts.generate_artifacts(
            case, requires_grad=["head"], loss=artifacts.LossType.MSELoss, artifact_directory=folder, external_data=True
        )
"""


def wide(value: float) -> onnx.ModelProto:
    """Return a model of a frozen layer and a head, each of some pages of memory."""
    values = {"base": np.full((64, 64), value, np.float32), "head": np.full((64, 64), value, np.float32)}
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "base"], ["h"]), helper.make_node("MatMul", ["h", "head"], ["y"])],
        "wide",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 64])],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("what", ["export", "artifacts"])
def test_killed_writers_leave_complete_files_without_leftovers(what: str, tmp_path: Path) -> None:
    """A model and its weights are two files, which fit together at every moment."""
    case = tmp_path / "forward.onnx"
    onnx.save(wide(1.0), case)
    folder = tmp_path / "made"
    folder.mkdir()
    settings = {"loss": artifacts.LossType.MSELoss, "artifact_directory": folder}
    artifacts.generate_artifacts(wide(1.0), requires_grad=["base", "head"], **settings)
    if what == "artifacts":
        artifacts.generate_artifacts(case, requires_grad=["head"], external_data=True, **settings)
    command = [sys.executable, "-c", FOREVER, str(case), str(folder), what]
    chance, leftovers = np.random.default_rng(1), 0
    for _ in range(KILLS // 8):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"writing\n"
            for _ in range(8):
                # The process is stopped at random moments for a check, and killed at last.
                time.sleep(chance.uniform(0.005, 0.03))
                child.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, child.pid, os.WSTOPPED)
                try:
                    check_pair(what, folder)
                except BaseException:
                    child.kill()
                    raise
                child.send_signal(signal.SIGCONT)
            child.kill()
        check_pair(what, folder)
        leftovers += len([path for path in folder.iterdir() if path.suffix == ".tmp" or ".data." in path.name])
    assert leftovers, "some processes reached a write"
    if what == "export":
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
        module.export_model_for_inferencing(folder / "m.onnx", ["y"], external_data=True)
    else:
        artifacts.generate_artifacts(case, requires_grad=["head"], external_data=True, **settings)
    made = ["checkpoint", "eval_model.onnx", "training_model.onnx"]
    others = ["m.onnx", "m.onnx.data"] if what == "export" else ["frozen.data"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(made + others)


def check_pair(what: str, folder: Path) -> None:
    names = ("training_model.onnx", "eval_model.onnx") if what == "artifacts" else ("m.onnx",)
    for path in (folder / name for name in names if (folder / name).exists()):
        values = []
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            found = {entry.key: entry.value for entry in tensor.external_data}
            if found:
                values.append(np.fromfile(folder / found["location"], np.float32, 64 * 64, offset=int(found["offset"])))
                assert len(values[-1]) == 64 * 64
        assert len({float(element) for value in values for element in value}) == 1
