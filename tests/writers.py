"""All public functions that write files, each with a call; checks their files after full disks and kills.

Run as a script: ``python writers.py full NAME FOLDER`` or ``python writers.py kills NAME FOLDER COUNT``. The name
``all`` selects every function.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import signal
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from ortrain import (
    History,
    InferenceSession,
    Model,
    OrtValue,
    SessionOptions,
    _bridges,
    artifacts,
    examples,
    lora,
    onnxblock,
)
from ortrain.api import CheckpointState, Module
from ortrain.gradient import OrtGradientForwardBackward
from ortrain.gradient.builder import GradientGraphBuilder
from ortrain.gradient.sgd_learning_rate import LearningRateSGD
from ortrain.session import TrainingSession
from ortrain.trainer import _checkpoint_storage, checkpoint, legacy

SIZES = 20
Call = Callable[[Path, int], object]


def perceptron(version: int) -> onnx.ModelProto:
    """Return the perceptron of the examples, with other weights for each version."""
    model = onnx.load(examples.perceptron())
    for entry in model.graph.initializer:
        entry.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(entry) + np.float32(version), entry.name))
    return model


_made: dict[str, Any] = {}


def once(name: str, make: Callable[[], Any]) -> Any:
    if name not in _made:
        _made[name] = make()
    return _made[name]


def folder_of_artifacts() -> Path:
    def make() -> Path:
        folder = Path("made")
        folder.mkdir(exist_ok=True)
        generate(folder, 0)
        return folder

    return once("artifacts", make)


def generate(folder: Path, version: int) -> None:
    artifacts.generate_artifacts(
        perceptron(version),
        requires_grad=["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
        nominal_checkpoint=True,
    )


def state_of(version: int) -> CheckpointState:
    state = once("state", lambda: CheckpointState.load_checkpoint(folder_of_artifacts() / "checkpoint"))
    for _, parameter in state.parameters:
        parameter.data[...] = version
    return state


def module_of(version: int) -> Module:
    folder = folder_of_artifacts()
    state = state_of(version)
    return once("module", lambda: Module(folder / "training_model.onnx", state, folder / "eval_model.onnx"))


def session_of(version: int) -> TrainingSession:
    folder = folder_of_artifacts()
    return TrainingSession(state_of(version), folder / "training_model.onnx", folder / "eval_model.onnx")


def batch() -> tuple[Any, Any]:
    return np.ones((4, 64), np.float32), np.zeros(4, np.int64)


def trainer_of(version: int) -> Any:
    from test_docstrings import legacy_trainer_of, model_with_loss, trainer_of

    def make() -> Any:
        made = trainer_of(model_with_loss()), legacy_trainer_of(model_with_loss())
        made[0].train_step(*batch())
        made[1].train_step(*batch(), np.array([0.01], np.float32))
        return made

    pair = once("trainers", make)
    pair[0].train_step(*batch())
    pair[1].train_step(*batch(), np.array([0.01], np.float32))
    return pair


def with_torch(trainer: Any, call: Callable[[Any], None]) -> None:
    """Call with a stub of PyTorch that has the required function `save`."""
    torch = types.ModuleType("torch")
    torch.save = lambda values, file: pickle.dump(values, file)  # type: ignore[attr-defined]
    torch.from_numpy = lambda array: array  # type: ignore[attr-defined]
    torch.Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]
    torch.nn = types.SimpleNamespace(Module=type("Module", (), {}))  # type: ignore[attr-defined]
    before = sys.modules.get("torch")
    sys.modules["torch"] = torch
    try:
        call(trainer)
    finally:
        del sys.modules["torch"]
        if before is not None:
            sys.modules["torch"] = before


def save_new(folder: Path, version: int) -> None:
    """Save a checkpoint of the trainer, which is always a new file."""
    trainer_of(version)[0].save_checkpoint(str(folder / f"state-{version}.ortcp"))


def profile(folder: Path, version: int) -> None:
    options = SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    session = InferenceSession(examples.perceptron(), options)
    session.run(None, {"x": batch()[0]})
    session.end_profiling()


def bridge(folder: Path, version: int) -> None:
    """Write as `to_onnx` of the bridges of PyTorch and JAX does."""
    weights = [numpy_helper.to_array(entry) for entry in perceptron(version).graph.initializer]
    names = [entry.name for entry in perceptron(0).graph.initializer]
    native = [OrtValue.ortvalue_from_numpy(weight)._ortvalue for weight in weights]
    source = perceptron(0).SerializeToString()
    _bridges.trained_model(source, list(zip(names, native, strict=True)), folder / "bridge.onnx")


def gradient(folder: Path, version: int) -> None:
    from test_docstrings import model_with_loss

    builder = GradientGraphBuilder(model_with_loss().SerializeToString(), {"loss"}, {"fc2.bias"}, "loss")
    builder.build()
    builder.save(str(folder / "gradient.onnx"))


def saved_gradient(folder: Path, version: int) -> None:
    from test_docstrings import model_with_loss

    from ortrain._estimators.optimizers import _save_gradient

    _save_gradient(model_with_loss(), ["fc2.bias"], "loss", folder / "saved.onnx")


def rate(folder: Path, version: int) -> None:
    from ortrain.gradient.utils.onnxruntime_helper import get_ort_device

    learning = LearningRateSGD()
    learning.build_onnx_function(15, get_ort_device("cpu"), 1)
    learning.save_onnx_graph(folder)


def forward_backward(folder: Path, version: int) -> None:
    both = OrtGradientForwardBackward(perceptron(version), weights_to_train=["fc2.bias"], class_name="Perceptron")
    both.cls_type_.save_onnx_graph(folder)


def blocks(folder: Path, version: int) -> None:
    onnxblock.save_checkpoint((list(perceptron(version).graph.initializer), []), str(folder / "blocks"))


def fitted(version: int) -> Model:
    def make() -> Model:
        model = Model(perceptron(version))
        model.fit(np.ones((8, 64), np.float32), np.arange(8), epochs=1)
        return model

    return once(f"fitted {min(version, 3)}", make)


def history_of(version: int) -> History:
    history = fitted(version).history
    assert history is not None
    return history


def adapted(version: int) -> onnx.ModelProto:
    """Return the perceptron with an adapter."""
    return lora.add(perceptron(version), seed=version)[0]


def loaded_adapter(folder: Path, version: int) -> None:
    def make() -> Path:
        lora.save_adapter(adapted(0), "adapter of PEFT")
        return Path("adapter of PEFT").absolute()

    adapter = once("adapter", make)
    lora.load_adapter(perceptron(version), adapter, check_base=False, output=folder / "loaded.onnx")


WRITERS: dict[str, Call] = {
    "api.checkpoint_state.CheckpointState.save_checkpoint": lambda folder, version: CheckpointState.save_checkpoint(
        state_of(version), folder / "checkpoint"
    ),
    "api.checkpoint_state.CheckpointState.save_safetensors": lambda folder, version: state_of(version).save_safetensors(
        folder / "state.safetensors"
    ),
    "api.module.Module.export_model_for_inferencing": lambda folder, version: module_of(
        version
    ).export_model_for_inferencing(folder / "exported.onnx", ["logits"]),
    "api.profile.Profile.chrome_trace": lambda folder, version: (
        module_of(version).profile(*batch(), steps=2).chrome_trace(folder / "trace.json")
    ),
    "artifacts.generate_artifacts": generate,
    "_estimators.functions.Parameters.save_onnx_graph": rate,
    "_fit.history.History.report": lambda folder, version: history_of(version).report(folder / "report.html"),
    "_fit.history.History.to_csv": lambda folder, version: history_of(version).to_csv(folder / "history.csv"),
    "_fit.model.Model.export": lambda folder, version: fitted(version).export(folder / "model.onnx"),
    "_fit.model.Model.save": lambda folder, version: fitted(version).save(folder),
    "gradient.builder.GradientGraphBuilder.save": gradient,
    "gradient.optimizers.OrtGradientOptimizer": saved_gradient,
    "gradient.ortgradient.OrtGradientForwardBackwardFunction.save_onnx_graph": forward_backward,
    "inference.InferenceSession.end_profiling": profile,
    "jax.OnnxFunction.to_onnx": bridge,
    "lora.activate": lambda folder, version: lora.activate(
        adapted(version), {"default": 0.5}, output=folder / "weighted.onnx"
    ),
    "lora.add": lambda folder, version: lora.add(perceptron(version), output=folder / "adapted.onnx"),
    "lora.load_adapter": loaded_adapter,
    "lora.merge": lambda folder, version: lora.merge(adapted(version), output=folder / "merged.onnx"),
    "lora.remove": lambda folder, version: lora.remove(adapted(version), output=folder / "base.onnx"),
    "lora.save_adapter": lambda folder, version: lora.save_adapter(adapted(version), folder),
    "lora.unmerge": lambda folder, version: lora.unmerge(
        lora.merge(adapted(version)), adapted(version), output=folder / "base.onnx"
    ),
    "lora.with_row_adapters": lambda folder, version: lora.with_row_adapters(
        adapted(version), output=folder / "rows.onnx"
    ),
    "onnxblock._checkpoint.save_checkpoint": blocks,
    "session.TrainingSession.export_model_for_inferencing": lambda folder, version: session_of(
        version
    ).export_model_for_inferencing(folder / "session.onnx", ["logits"]),
    "trainer._flat_checkpoint.experimental_save_checkpoint": lambda folder, version: with_torch(
        trainer_of(version)[0], lambda trainer: checkpoint.experimental_save_checkpoint(trainer, folder)
    ),
    "trainer.legacy.ORTTrainer.save_as_onnx": lambda folder, version: trainer_of(version)[1].save_as_onnx(
        str(folder / "legacy.onnx")
    ),
    "trainer.legacy.save_checkpoint": lambda folder, version: with_torch(
        trainer_of(version)[1], lambda trainer: legacy.save_checkpoint(trainer, folder)
    ),
    "trainer.orttrainer.ORTTrainer.save_as_onnx": lambda folder, version: trainer_of(version)[0].save_as_onnx(
        str(folder / "trainer.onnx")
    ),
    "trainer.orttrainer.ORTTrainer.save_checkpoint": save_new,
}
# Functions that make a new file with another name each time.
NEW = ("inference.InferenceSession.end_profiling", "trainer.orttrainer.ORTTrainer.save_checkpoint")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def full(name: str, folder: Path) -> None:
    """Write under 20 limits of the file size: existing files stay complete, and no others appear."""
    write = WRITERS[name]
    write(folder, 1)
    before = contents(folder)
    longest = max(map(len, before.values()))
    # Several files are written in sequence: each file is the old or the new one.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    failed = 0
    several = len(before) > 1
    for at in range(SIZES):
        resource.setrlimit(resource.RLIMIT_FSIZE, (longest * at // SIZES, resource.RLIM_INFINITY))
        try:
            write(folder, 2)
        except (OSError, RuntimeError):
            failed += 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        after = contents(folder)
        assert after.keys() == before.keys() or (name in NEW and after.keys() >= before.keys()), (at, after.keys())
        for key, value in after.items():
            assert value == before.get(key) or (several and is_sound(key, value)), (at, key, len(value))
    assert failed == SIZES or (several and failed > SIZES / 4), failed
    print(name, failed)


def is_sound(name: str, data: bytes) -> bool:
    """Read a file, which must be complete."""
    if name.endswith(".onnx"):
        assert onnx.load_from_string(data).graph.node
    elif name.endswith(".json"):
        json.loads(data)
    elif name.endswith(".html"):
        assert data.rstrip().endswith(b"</html>")
    elif name.endswith(".csv"):
        lines = data.decode().splitlines()
        assert len(lines) == 2
        assert lines[0].count(",") == lines[1].count(",")
    elif name.endswith(".ortcp"):
        Path("looked_at").write_bytes(data)
        _checkpoint_storage.load("looked_at")
    elif name.endswith((".pt", ".bin")) or "ORTTrainer" in name or "ort.pt" in name:
        pickle.loads(data)
    elif name.endswith(".safetensors"):
        header = int.from_bytes(data[:8], "little")
        offsets = [entry["data_offsets"][1] for entry in json.loads(data[8 : 8 + header]).values() if "dtype" in entry]
        assert len(data) == 8 + header + max(offsets)
    else:
        Path("looked_at").write_bytes(data)
        CheckpointState.load_checkpoint("looked_at")
    return True


def kills(name: str, folder: Path, count: int) -> None:
    """Kill children that write in a loop; all their files must be complete."""
    write = WRITERS[name]
    write(folder, 1)
    names = set(contents(folder))
    chance = random.Random(1)
    begin = time.monotonic()
    write(folder, 2 if name not in NEW else 10**6)
    taken = time.monotonic() - begin
    for at in range(count):
        child = os.fork()
        if child == 0:
            try:
                for version in range(10**9):
                    write(folder, 3 + at * 1000 + version)
            finally:
                os._exit(1)
        time.sleep(chance.uniform(0, 2 * taken + 0.02))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), status
        for key, value in contents(folder).items():
            if key.endswith(".tmp"):
                continue
            assert key in names or name in NEW, key
            assert is_sound(key, value), key
    write(folder, 10**7)
    left = [key for key in contents(folder) if key.endswith(".tmp")]
    assert not left, left
    print(name, count)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    what, which, place, *rest = sys.argv[1:]
    for writer in WRITERS if which == "all" else [which]:
        folder_of_one = Path(place) / writer
        folder_of_one.mkdir()
        try:
            full(writer, folder_of_one) if what == "full" else kills(writer, folder_of_one, int(rest[0]))
        except BaseException:
            print(writer, file=sys.stderr)
            raise
