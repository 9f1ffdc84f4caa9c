"""All public functions that write files leave the old or the new file complete, after a full disk or a kill."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import writers

import ortrain

SOURCES = Path(ortrain.__file__).parent
KILLS = 100 if "ORTRAIN_CONFORM" in os.environ else 2
# Public functions that have paths as arguments, or the name of a writer, and write no file of their own. Loggers add
# lines to a log; a checkpoint of a model is `Model.save`.
READERS = """
_options.SessionOptions.register_custom_ops_library _classic_core.TrainingSession.load_model
api.checkpoint_state.CheckpointState.load_checkpoint api.checkpoint_state.CheckpointState.load_parameters
api.checkpoint_state.CheckpointState.load_safetensors api.module.Module api.module.Module.__init__
api.module.Module.profile api.optimizer.Optimizer api.optimizer.Optimizer.__init__ classic.TrainingSession
classic.TrainingSession.__init__ gradient.grad_helper.onnx_derivative
gradient.ortgradient.OrtGradientForwardBackwardFunction.save_for_backward
gradient.utils.onnx_rewriter.onnx_rewrite_operator inference.InferenceSession inference.InferenceSession.__init__
inference.InferenceSession.get_profiling_start_time_ns onnxblock._checkpoint.load_checkpoint_to_model
onnxblock._model.base onnxblock._model.custom_op_library trainer._flat_checkpoint.experimental_load_checkpoint
trainer.checkpoint.aggregate_checkpoints trainer.legacy.ORTTrainer trainer.legacy.ORTTrainer.__init__
trainer.legacy.load_checkpoint trainer.orttrainer.ORTTrainer.load_checkpoint
gradient.utils.onnx_helper.replace_initializers_into_onnx sklearn._estimator.OnnxEstimator.to_onnx
_dump.dump _fit.history.History.read_csv data._open.open callbacks._progress.ProgressBar
callbacks._progress.ProgressBar.__init__ callbacks._loggers.CSVLogger callbacks._loggers.CSVLogger.__init__
callbacks._loggers.MLflow callbacks._loggers.MLflow.__init__ callbacks._loggers.TensorBoard
callbacks._loggers.TensorBoard.__init__ callbacks._checkpoint.ModelCheckpoint
callbacks._checkpoint.ModelCheckpoint.__init__ artifacts.replace_head
sklearn._classifier.OnnxClassifier sklearn._classifier.OnnxClassifier.__init__
sklearn._estimator.OnnxEstimator.__init__ sklearn._regressor.OnnxRegressor
""".split()
# Second names of the same function.
SAME = {
    "_classic_core.InferenceSession.end_profiling": "inference.InferenceSession.end_profiling",
    "_estimators.optimizers.OrtGradientOptimizer.__init__": "gradient.optimizers.OrtGradientOptimizer",
}
NAME = re.compile(r"save|export|write|dump|generate_artifacts|trace|profil|to_onnx")
ARGUMENT = re.compile(r"path|folder|(?<!temp_)file(?!_name)|_dir|uri|saved|^output$")


def run(*arguments: object, folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, writers.__file__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_full_disks(tmp_path: Path) -> None:
    lines = run("full", "all", tmp_path, folder=tmp_path).splitlines()
    assert [line.split()[0] for line in lines] == list(writers.WRITERS)
    assert all(int(line.split()[1]) > writers.SIZES / 4 for line in lines)


def test_kills(tmp_path: Path) -> None:
    lines = run("kills", "all", tmp_path, KILLS, folder=tmp_path).splitlines()
    assert lines == [f"{name} {KILLS}" for name in writers.WRITERS]


def public() -> Iterator[str]:
    """Yield public functions that may write, according to their names or the names of their arguments."""
    names = ["ortrain", *(module.name for module in pkgutil.walk_packages(ortrain.__path__, "ortrain."))]
    for module_name in names:
        if any(part.startswith("_") for part in module_name.split(".")[1:]) or module_name == "ortrain.torch":
            continue
        found = importlib.import_module(module_name)
        for name in getattr(found, "__all__", []):
            thing = getattr(found, name)
            members = [(name, thing)]
            if inspect.isclass(thing):
                members += [(key, getattr(thing, key)) for key in dir(thing) if key[0] != "_" or key == "__init__"]
            for key, member in members:
                if not callable(member):
                    continue
                try:
                    arguments = list(inspect.signature(member).parameters)
                except (TypeError, ValueError):
                    arguments = []
                full = f"{getattr(member, '__module__', '')}.{getattr(member, '__qualname__', key)}"
                if full.startswith("ortrain.") and (NAME.search(key) or any(map(ARGUMENT.search, arguments))):
                    yield full.removeprefix("ortrain.")


def test_all_writers_are_there() -> None:
    """Each public function that may write is in `writers.WRITERS`, or in `READERS` here."""
    found = set(public())
    known = {*writers.WRITERS, *READERS, *SAME}
    assert found - known == set()
    assert known - found == set(), "names that no longer exist"


def test_files_are_written_by_one_function() -> None:
    """Only the Python module `_files` opens files for writing, or calls functions that do."""
    called = {"write_bytes", "write_text", "save_model", "savez", "tofile", "copyfile", "copy2"}
    for path in sorted(SOURCES.rglob("*.py")):
        if path.name == "_files.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            on = (
                function.value.id
                if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
                else ""
            )
            modes = [argument.value for argument in ast.walk(node) if isinstance(argument, ast.Constant)]
            opens = name == "open" and any(isinstance(mode, str) and re.fullmatch("[wax]b?", mode) for mode in modes)
            assert not opens, f"{path}:{node.lineno}"
            assert name not in called, f"{path}:{node.lineno}"
            assert (on, name) not in [
                ("onnx", "save"),
                ("np", "save"),
                ("os", "rename"),
                ("os", "replace"),
                ("os", "link"),
            ], f"{path}:{node.lineno}"


WITHOUT_FCNTL = """
import sys
sys.modules["fcntl"] = None
import ortrain.trainer
from ortrain import _files
from ortrain.trainer import _checkpoint_storage
_checkpoint_storage.save({"a": 1}, "state")
assert _checkpoint_storage.load("state") == {"a": 1}
_files.write("file", b"old")
with open("file.77-0.tmp", "wb") as file:
    file.write(b"of somebody")
_files.write("file", b"new")
assert open("file", "rb").read() == b"new"
# Without a lock, the file may belong to a running writer, so it is not removed.
assert open("file.77-0.tmp", "rb").read() == b"of somebody"
try:
    _checkpoint_storage.save({"a": 2}, "state")
except FileExistsError:
    print("refused")
_files._OPEN_FILES_STAY = True
_files.write("file", b"as on Windows")
print(open("file", "rb").read().decode())
"""


def test_a_system_without_fcntl(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FCNTL], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["refused", "as on Windows"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "state"]


def test_left_files_of_counted_names(tmp_path: Path) -> None:
    """A save removes files of killed saves with other numbers, and no other files."""
    from ortrain import _files

    left = ["step-1.ortcp.77-0.tmp", "step-20.ortcp.4194304-12.tmp"]
    others = ["step-1.ortcp", "steps-1.ortcp.77-0.tmp", "step-1.ortcp.77.tmp", "step-.ortcp.77-0.tmp"]
    for name in left + others:
        (tmp_path / name).write_text(name)
    with _files.placed(tmp_path / "step-300.ortcp") as going:
        going.write(b"300")
        _files.write(tmp_path / "step-301.ortcp", b"301")
        assert Path(going.name).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "step-300.ortcp", "step-301.ortcp"])


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_special_files_are_not_replaced(kind: str, tmp_path: Path) -> None:
    from ortrain import _files

    path = tmp_path / "place"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/null")
    else:
        path.mkdir()
    with pytest.raises((ortrain.OrtrainError, IsADirectoryError), match=f"cannot write {path}: it is a {kind}"):
        _files.write(path, b"x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["place"]


def test_modes_and_links_stay(tmp_path: Path) -> None:
    from ortrain import _files

    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    _files.write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640
