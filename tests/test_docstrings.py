"""Every public name is described, and the examples in docstrings run as they stand."""

from __future__ import annotations

import ast
import doctest
import enum
import functools
import importlib
import inspect
import pkgutil
import shutil
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import onnx
import pytest

import ortrain
from ortrain import artifacts, capi, classic, onnxblock, session
from ortrain.api import CheckpointState, Module, Optimizer
from ortrain.session import TrainingSession
from ortrain.trainer import ORTTrainer, ORTTrainerOptions, legacy
from ortrain.trainer.optim import AdamConfig

EXAMPLES = Path(__file__).parent.parent / "examples"


def modules() -> list[ModuleType]:
    """The package and all that is public below it."""
    found = [ortrain]
    for info in pkgutil.walk_packages(ortrain.__path__, "ortrain."):
        if not any(part.startswith("_") for part in info.name.split(".")):
            found.append(importlib.import_module(info.name))
    return found


PACKAGE = str(Path(ortrain.__file__).parent)


def function_of(member: object) -> FunctionType | None:
    """The function behind a method or a property."""
    if isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    elif isinstance(member, property):
        member = member.fget
    elif isinstance(member, functools.cached_property):
        member = member.func
    return member if isinstance(member, FunctionType) else None


def members(kind: type) -> Iterator[tuple[str, object]]:
    """Public methods and properties of a class, also those of private bases; special methods that are described."""
    for base in kind.__mro__:
        if not base.__module__.startswith("ortrain"):
            continue
        for name, member in vars(base).items():
            function = function_of(member)
            # What a dataclass or a named tuple writes itself is in no file of ours.
            if function is None or not function.__code__.co_filename.startswith(PACKAGE):
                continue
            if not name.startswith("_") or (name.startswith("__") and function.__doc__):
                yield name, member


def public() -> dict[str, Any]:
    """Modules, their public names, and the members of these, each once."""
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def add(name: str, thing: Any) -> None:
        if id(thing) not in seen:
            seen.add(id(thing))
            found[name] = thing

    for module in modules():
        add(module.__name__, module)
        for name in module.__all__:
            thing = getattr(module, name)
            # A constant (the version, say) has no docstring: its module describes it.
            if not isinstance(thing, (type, FunctionType, ModuleType)):
                continue
            add(f"{module.__name__}.{name}", thing)
            if isinstance(thing, type):
                for key, member in members(thing):
                    add(f"{module.__name__}.{name}.{key}", member)
    return found


NAMES = public()
# Of native classes there is no source; `test_ortvalue` looks at their methods.
CLASSES = {
    name: thing for name, thing in NAMES.items() if isinstance(thing, type) and thing.__module__ != "ortrain._ortrain"
}


def test_all_kinds_of_names_are_found() -> None:
    assert {
        "ortrain.InferenceSession.run",
        "ortrain.OrtValue.ortvalue_from_numpy",
        "ortrain.inspect",
        "ortrain.CheckpointState.load_checkpoint",
        "ortrain.Module.__call__",
        "ortrain.api.checkpoint_state.Parameter.data",
        "ortrain.api.lr_scheduler",
        "ortrain.LossType",
        "ortrain.compat.install",
        "ortrain.errors",
        "ortrain.onnxblock.blocks.Add.build",
        "ortrain.onnxblock.optim.AdamW",
        "ortrain.TrainingSession.close",
    } <= set(NAMES)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of the perceptron of the examples."""
    folder = tmp_path_factory.mktemp("docstrings")
    artifacts.generate_artifacts(
        EXAMPLES / "perceptron.onnx",
        requires_grad=["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
        nominal_checkpoint=True,
    )
    return folder


def model_with_loss() -> onnx.ModelProto:
    """The perceptron with its loss: inputs x and labels, outputs loss and logits."""
    model = onnx.load(EXAMPLES / "perceptron.onnx")
    make = onnx.helper.make_tensor_value_info
    model.graph.node.append(onnx.helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "labels"], ["loss"]))
    model.graph.input.append(make("labels", onnx.TensorProto.INT64, ["batch"]))
    model.graph.output.insert(0, make("loss", onnx.TensorProto.FLOAT, []))
    return model


def trainer_of(model: onnx.ModelProto) -> ORTTrainer:
    """A trainer by Adam on the CPU; a step gives loss and logits."""
    description = {
        "inputs": [("x", ["batch", 64]), ("labels", ["batch"])],
        "outputs": [("loss", [], True), ("logits", ["batch", 10])],
    }
    options = ORTTrainerOptions({"device": {"id": "cpu"}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return ORTTrainer(model, description, AdamConfig(), options=options)


def legacy_trainer_of(model: onnx.ModelProto) -> legacy.ORTTrainer:
    """The older trainer by Adam on the CPU; a step takes a learning rate, and gives loss and logits."""
    describe = legacy.IODescription
    inputs = [describe("x", ["batch", 64]), describe("labels", ["batch"])]
    outputs = [describe("loss", []), describe("logits", ["batch", 10])]
    description = legacy.ModelDescription(inputs, outputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        rate = describe("Learning_Rate", [1])
        return legacy.ORTTrainer(model, None, description, "AdamOptimizer", None, rate, "cpu")


class Given(dict[str, Any]):
    """What the examples find there: artifacts loaded, a batch, and the usual imports.

    What takes time is made when an example asks for it.
    """

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        super().__init__(
            {name: getattr(module, name) for module in (ortrain, ortrain.api, session) for name in module.__all__},
            np=np,
            onnx=onnx,
            ortrain=ortrain,
            onnxblock=onnxblock,
            x=rng.random((8, 64), np.float32),
            labels=rng.integers(0, 10, 8),
        )

    def complete(self, names: set[str]) -> None:
        if "model" in names:
            self["model"] = onnx.load(EXAMPLES / "perceptron.onnx")
        if names & {"model_with_loss", "classic_session", "core_session", "trainer", "legacy_trainer"}:
            self["model_with_loss"] = model_with_loss()
        if "trainer" in names:
            self["trainer"] = trainer_of(self["model_with_loss"])
        if "legacy_trainer" in names:
            self["legacy_trainer"] = legacy_trainer_of(self["model_with_loss"])
        if names & {"classic_session", "core_session"}:
            parameters = classic.TrainingParameters()
            parameters.loss_output_name, parameters.training_optimizer_name = "loss", "AdamOptimizer"
            parameters.weights_to_train = {"fc2.bias"}
            parameters.optimizer_attributes_map = {"fc2.bias": {}}
            parameters.optimizer_int_attributes_map = {"fc2.bias": {}}
            model = self["model_with_loss"].SerializeToString()
            self["classic_session"] = classic.TrainingSession(model, parameters)
            self["core_session"] = capi.TrainingSession()
            self["core_session"].read_bytes(model, parameters, [], [])
        if names & {"state", "module", "optimizer"}:
            self["state"] = CheckpointState.load_checkpoint("checkpoint")
        if names & {"module", "optimizer"}:
            self["module"] = Module("training_model.onnx", self["state"], "eval_model.onnx")
        if "optimizer" in names:
            self["optimizer"] = Optimizer("optimizer_model.onnx", self["module"])
        if "session" in names:
            self["session"] = TrainingSession(
                CheckpointState.load_checkpoint("checkpoint"),
                "training_model.onnx",
                "eval_model.onnx",
                "optimizer_model.onnx",
            )


def names_in(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("name", NAMES)
def test_example(name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one, and it gives what it says, in a folder of artifacts, with a batch and a fresh state."""
    folder = tmp_path / "folder"
    shutil.copytree(made, folder, symlinks=True)
    monkeypatch.chdir(folder)
    docstring = inspect.getdoc(NAMES[name]) or ""
    given = Given()
    test = doctest.DocTestParser().get_doctest(docstring, given, name, None, 0)
    assert test.examples, f"{name} has no example"
    assert not any(doctest.SKIP in example.options for example in test.examples)
    given.complete(set().union(*(names_in(example.source) for example in test.examples)))
    test.globs = given
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert not report, "".join(report)


@pytest.mark.parametrize("name", CLASSES)
def test_fields_are_described(name: str) -> None:
    """A sentence stands behind each member of an enumeration and each field of a class."""
    kind = CLASSES[name]
    (body,) = (
        node.body for node in ast.parse(textwrap.dedent(inspect.getsource(kind))).body if isinstance(node, ast.ClassDef)
    )
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            field = node.target.id
        elif issubclass(kind, enum.Enum) and isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            field = node.targets[0].id
        else:
            continue
        if field.startswith("_"):
            continue
        described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        assert described, f"{name}.{field} has no description"
        assert str(after.value.value).rstrip().endswith(".")
