"""Crashes, silent errors and unclear messages of onnxruntime-training 1.19.2, and the answers of ortrain.

The rows follow the two pages of facts about 1.19.2, `on-device-api` ("api") and `artifacts`, section by section.
Mistakes with files and disks follow. Each row is an action and its answer: an error, quoted in full, or a correct
result. ELSEWHERE names the rows that other tests cover.
"""

from __future__ import annotations

import ast
import functools
import gc
import json
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import RECORDS, Run
from onnx import ModelProto, TensorProto, helper, numpy_helper

import ortrain
from ortrain import OrtValue, artifacts, onnxblock
from ortrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from ortrain.artifacts import LossType, OptimType
from ortrain.session import TrainingSession

TESTS = Path(__file__).parent
CASE = RECORDS / "mlp_adamw_ce"
X, LABELS = np.ones((4, 10), np.float32), np.arange(4)
WEIGHTS = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
TRAIN, EVAL, OPTIMIZER = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"


@dataclass
class Desk:
    """Resources of a row: the classifier's artifacts, other artifacts, and an empty folder."""

    ours: Callable[[str], Path]
    folder: Path

    @functools.cached_property
    def mlp(self) -> Path:
        """Artifacts of a perceptron that trains all its parameters."""
        return self.ours("mlp_adamw_ce")

    @functools.cached_property
    def run(self) -> Run:
        """State, module with both models, and optimizer."""
        return Run(self.mlp)

    def state(self, case: str = "mlp_adamw_ce", checkpoint: str = "checkpoint") -> CheckpointState:
        return CheckpointState.load_checkpoint(self.ours(case) / checkpoint)

    def module(self, train: Any = None, evaluation: Any = None, state: CheckpointState | None = None) -> Module:
        """Return a module of the perceptron; arguments replace its files."""
        return Module(train or self.mlp / TRAIN, state or self.state(), evaluation)

    def session(self, **models: Any) -> TrainingSession:
        """Return a session of the perceptron with the training model and the models of the arguments."""
        return TrainingSession(self.state(), self.mlp / TRAIN, **models)

    @functools.cached_property
    def nominal(self) -> Run:
        """A run on a state without values."""
        onnxblock.save_checkpoint((parameters(self.state()), []), self.folder / "nominal", nominal_checkpoint=True)
        for name in (TRAIN, EVAL, OPTIMIZER):
            (self.folder / name).write_bytes((self.mlp / name).read_bytes())
        return Run(self.folder, "nominal")

    def edited(self, change: Callable[[ModelProto], object], file: str = TRAIN) -> ModelProto:
        """Return one of the perceptron's models after a change."""
        model = onnx.load(self.mlp / file)
        change(model)
        return model

    def checkpoint(self, trainable: list[TensorProto], frozen: list[TensorProto]) -> CheckpointState:
        onnxblock.save_checkpoint((trainable, frozen), self.folder / "edited")
        return CheckpointState.load_checkpoint(self.folder / "edited")

    def generate(self, model: Any = None, **arguments: Any) -> Path:
        """Generate artifacts of the perceptron's forward model, or of another model, in a separate folder."""
        folder = self.folder / "made"
        folder.mkdir(exist_ok=True)
        given = {"requires_grad": WEIGHTS, "loss": LossType.CrossEntropyLoss, "optimizer": OptimType.AdamW}
        arguments = given | {"artifact_directory": folder} | arguments
        artifacts.generate_artifacts(forward() if model is None else model, **arguments)
        return folder


@pytest.fixture
def desk(ours: Callable[[str], Path], tmp_path: Path) -> Desk:
    return Desk(ours, tmp_path)


def forward(change: Callable[[ModelProto], object] = lambda model: None) -> ModelProto:
    """Return the perceptron without a loss, after a change."""
    model = onnx.load(CASE / "forward.onnx")
    change(model)
    return model


def parameters(state: CheckpointState) -> list[TensorProto]:
    return [numpy_helper.from_array(np.array(parameter.data), name) for name, parameter in state.parameters]


def renamed(old: str, new: str) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        graph = model.graph
        for value in [*graph.input, *graph.output, *graph.value_info]:
            if value.name == old:
                value.name = new
        for node in graph.node:
            for names in (node.input, node.output):
                for at, name in enumerate(names):
                    if name == old:
                        names[at] = new

    return change


def without_input(name: str) -> Callable[[ModelProto], None]:
    """Remove the input, and the nodes and outputs that depend on the input."""

    def change(model: ModelProto) -> None:
        graph, gone = model.graph, {name}
        for node in list(graph.node):
            if gone & set(node.input):
                gone |= set(node.output)
                graph.node.remove(node)
        for values in (graph.input, graph.output):
            for value in [value for value in values if value.name in gone]:
                values.remove(value)

    return change


def without_flag(model: ModelProto) -> None:
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            if name == "lazy_reset_grad":
                node.input[at] = ""
    without_input("lazy_reset_grad")(model)


def reversed_inputs(model: ModelProto) -> None:
    values = list(model.graph.input)[::-1]
    del model.graph.input[:]
    model.graph.input.extend(values)


def second_optimizer(model: ModelProto) -> None:
    again = model.graph.node.add()
    again.CopyFrom(model.graph.node[0])
    again.name, again.output[0] = "again", "again"


def no_optimizer(model: ModelProto) -> None:
    flag = model.graph.output[0].name
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("Greater", ["learning_rate", "learning_rate"], [flag], "idle"))


def another_input(model: ModelProto) -> None:
    """Add an unused initializer."""
    model.graph.initializer.append(numpy_helper.from_array(np.ones(2, np.float32), "alone"))


def hidden_output(model: ModelProto) -> None:
    model.graph.output.append(helper.make_tensor_value_info("a1", TensorProto.FLOAT, ["batch", 24]))


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


NOMINAL = (
    "the state is nominal: it has the names of its parameters but not their values; load all of them first "
    "(load_parameters, load_safetensors), or copy a buffer of all parameters to it"
)
NO_EVAL = "{} needs an evaluation model, but the {} was made without one"
NO_OPTIMIZER = "{} needs an optimizer model, but the session was made without one"
UNFIT = "the {} model {} does not fit the checkpoint: {}"
NOT_A_CHECKPOINT = (
    "{folder}/c: this is not a checkpoint: bytes 4 to 7 are not the identifier ODTC; generate_artifacts and "
    "save_checkpoint write checkpoints"
)
NOT_TOGETHER = "of the training model; give the one that was made together with the training model"

ARGUMENT, MODEL, NO_FILE = ortrain.InvalidArgumentError, ortrain.InvalidModelError, ortrain.NoSuchFileError
ERROR, UNSUPPORTED = ortrain.OrtrainError, ortrain.UnsupportedError

# Actions of a user, with the type and the words of the error. {folder} is the row's folder, {ours} the artifacts'
# folder.
REFUSED: dict[str, tuple[Callable[[Desk], object], type[Exception], str]] = {
    # api 2: CheckpointState. 1.19.2: "invalid fd", "checkpoint verification failed", "only 0/N bytes could be read".
    "api 2: a state from anything but load_checkpoint": (
        lambda desk: CheckpointState("checkpoint"),
        TypeError,
        "CheckpointState.load_checkpoint(path) creates a CheckpointState; the constructor does not accept str",
    ),
    "api 2: load, no such file": (
        lambda desk: CheckpointState.load_checkpoint(desk.folder / "c"),
        NO_FILE,
        "there is no file {folder}/c",
    ),
    "api 2: load, a folder": (
        lambda desk: CheckpointState.load_checkpoint(desk.folder),
        ERROR,
        "{folder} is a folder, but a checkpoint is a file",
    ),
    "api 2: load, an empty path": (
        lambda desk: CheckpointState.load_checkpoint(""),
        ARGUMENT,
        '"" is not the path of a file',
    ),
    "api 2: load, neither path nor bytes": (
        lambda desk: CheckpointState.load_checkpoint(3),
        TypeError,
        "a checkpoint must be a path or bytes, got int",
    ),
    "api 2: load, an empty file": (
        lambda desk: CheckpointState.load_checkpoint(written(desk.folder / "c", b"")),
        ERROR,
        "{folder}/c: the checkpoint is empty",
    ),
    "api 2: load, garbage": (
        lambda desk: CheckpointState.load_checkpoint(written(desk.folder / "c", b"\xff" * 100)),
        ERROR,
        NOT_A_CHECKPOINT,
    ),
    "api 2: load, another identifier": (
        lambda desk: CheckpointState.load_checkpoint(
            written(desk.folder / "c", (CASE / "checkpoint").read_bytes().replace(b"ODTC", b"ODTD", 1))
        ),
        ERROR,
        NOT_A_CHECKPOINT,
    ),
    "api 2: load, their checkpoint cut short": (
        lambda desk: CheckpointState.load_checkpoint(
            written(desk.folder / "c", (CASE / "checkpoint").read_bytes()[:1000])
        ),
        ERROR,
        "{folder}/c: the checkpoint is cut short or damaged: an offset points past its end (*)",
    ),
    "api 2: load, our checkpoint cut short": (
        lambda desk: CheckpointState.load_checkpoint(
            written(desk.folder / "c", (desk.mlp / "checkpoint").read_bytes()[:1000])
        ),
        ERROR,
        "{folder}/c: the checkpoint is cut short, extended or damaged: the checksum at its end is missing",
    ),
    "api 2: load, safetensors": (
        lambda desk: (
            desk.state().save_safetensors(desk.folder / "c"),
            CheckpointState.load_checkpoint(desk.folder / "c"),
        ),
        ERROR,
        "{folder}/c: this looks like a safetensors file, not a checkpoint; load it with load_safetensors",
    ),
    "api 2: save, no such folder": (
        lambda desk: CheckpointState.save_checkpoint(desk.state(), desk.folder / "no" / "c"),
        NO_FILE,
        "cannot write {folder}/no/c: there is no folder {folder}/no; create it first",
    ),
    "api 2: save, arguments swapped": (
        lambda desk: CheckpointState.save_checkpoint(desk.folder / "c", desk.state()),  # type: ignore[arg-type]
        TypeError,
        "state must be a CheckpointState, got PosixPath",
    ),
    # Parameters. 1.19.2 gives only hints such as "type mismatch", "only from non-string numpy arrays".
    "api 2: an unknown parameter": (
        lambda desk: desk.state().parameters["fc3.weight"],
        KeyError,
        "\"Parameter fc3.weight not found. Did you mean 'fc2.weight'?\"",
    ),
    "api 2: a parameter of another shape": (
        lambda desk: desk.state().parameters.__setitem__("fc2.bias", np.zeros(3, np.float32)),
        ARGUMENT,
        'parameter "fc2.bias" is float32[5], but a value of float32[3] was given',
    ),
    "api 2: a parameter of another type": (
        lambda desk: setattr(desk.state().parameters["fc2.bias"], "data", np.zeros(5)),
        ARGUMENT,
        'parameter "fc2.bias" is float32[5], but a value of float64[5] was given',
    ),
    "api 2: a parameter from a list": (
        lambda desk: desk.state().parameters.__setitem__("fc2.bias", [0.0] * 5),
        ARGUMENT,
        "the value of parameter 'fc2.bias' must be an array or an OrtValue, got list",
    ),
    "api 2: writing into a frozen parameter": (
        lambda desk: desk.state("frozen_params").parameters["fc1.weight"].data.fill(0),
        ValueError,
        "assignment destination is read-only",
    ),
    # Properties. 1.19.2 rounds an integer outside int64 to float32, and turns a large float into infinity.
    "api 2: an integer outside int64": (
        lambda desk: desk.state().properties.__setitem__("big", 2**63),
        ortrain.OutOfRangeError,
        'property "big" is 9223372036854775808, but checkpoints store int64',
    ),
    "api 2: a float outside float32": (
        lambda desk: desk.state().properties.__setitem__("big", 1e300),
        ortrain.OutOfRangeError,
        'property "big" is 1e+300, but checkpoints store float32',
    ),
    "api 2: a property that is a list": (
        lambda desk: desk.state().properties.__setitem__("list", [1]),  # type: ignore[call-overload]
        TypeError,
        "a property must be an int, a float or a str, got list",
    ),
    "api 2: a property that is None": (
        lambda desk: desk.state().properties.__setitem__("none", None),  # type: ignore[call-overload]
        TypeError,
        "a property must be an int, a float or a str, got NoneType",
    ),
    "api 2: an unknown property": (
        lambda desk: desk.state().properties["none"],
        KeyError,
        "'Property none not found.'",
    ),
    # Nominal states.
    "api 2: nominal, a parameter": (lambda desk: desk.nominal.state.parameters["fc1.bias"], ERROR, NOMINAL),
    "api 2: nominal, all parameters": (lambda desk: list(desk.nominal.state.parameters), ERROR, NOMINAL),
    "api 2: nominal, setting a parameter": (
        lambda desk: desk.nominal.state.parameters.__setitem__("fc2.bias", np.zeros(5, np.float32)),
        ERROR,
        NOMINAL,
    ),
    "api 2: nominal, a train step": (lambda desk: desk.nominal.module(X, LABELS), ERROR, NOMINAL),
    "api 2: nominal, an eval step": (lambda desk: desk.nominal.module.eval()(X, LABELS), ERROR, NOMINAL),
    "api 2: nominal, contiguous parameters": (
        lambda desk: desk.nominal.module.get_contiguous_parameters(),
        ERROR,
        NOMINAL,
    ),
    "api 2: nominal, an export": (
        lambda desk: desk.nominal.module.export_model_for_inferencing(desk.folder / "e.onnx", ["logits"]),
        ERROR,
        NOMINAL,
    ),
    "api 2: nominal, some of the parameters": (
        lambda desk: desk.nominal.module.copy_buffer_to_parameters(np.zeros(389, np.float32)),
        ERROR,
        NOMINAL,
    ),
    "api 4: nominal, an optimizer step": (lambda desk: desk.nominal.optimizer.step(), ERROR, NOMINAL),
    # api 3: Module.
    "api 3: a device that is not there": (
        lambda desk: Module(desk.mlp / TRAIN, desk.state(), device="tpu"),
        ARGUMENT,
        'there is no device "tpu" here; there are "cpu", "reference", "auto", and for GPUs "cuda", "webgpu", "vulkan", '
        '"metal" and "dx12"'
        '; did you mean "cpu"?',
    ),
    "api 3: no such model": (
        lambda desk: desk.module(desk.folder / "m.onnx"),
        NO_FILE,
        "cannot read {folder}/m.onnx: No such file or directory (os error 2)",
    ),
    "api 3, artifacts 8: a model in the ORT format": (
        lambda desk: desk.module(written(desk.folder / "m.ort", b"\x18\0\0\0ORTM" + bytes(100))),
        MODEL,
        "{folder}/m.ort is not an ONNX model: it is in the ORT format; use the ONNX model it was made from",
    ),
    "api 3.3, artifacts 8: an eval model in the ORT format": (
        lambda desk: desk.module(None, written(desk.folder / "m.ort", b"\x18\0\0\0ORTM" + bytes(100))),
        MODEL,
        "{folder}/m.ort is not an ONNX model: it is in the ORT format; use the ONNX model it was made from",
    ),
    "api 3.1: too few inputs": (
        lambda desk: desk.run.module(X),
        ARGUMENT,
        "expected 2 inputs (x, labels), got 1",
    ),
    "api 3.1: too many inputs": (
        lambda desk: desk.run.module(X, LABELS, X),
        ARGUMENT,
        "expected 2 inputs (x, labels), got 3",
    ),
    "api 3.1: an input of another type": (
        lambda desk: desk.run.module(X, LABELS.astype(np.float32)),
        ARGUMENT,
        'input "labels" must be int64[batch], got float32[4]: the element types differ; to convert it, '
        "pass .astype(np.int64)",
    ),
    "api 3.1: an input of another rank": (
        lambda desk: desk.run.module(X[0], LABELS),
        ARGUMENT,
        'input "x" must be float32[batch, 10], got float32[10]: it should have 2 axes but has 1',
    ),
    "api 3.1: an input of another size": (
        lambda desk: desk.run.module(X[:, :9], LABELS),
        ARGUMENT,
        'input "x" must be float32[batch, 10], got float32[4, 9]: axis 1 should be 10 but is 9',
    ),
    "api 3.1: a label out of range (read out of bounds there)": (
        lambda desk: desk.run.module(X, LABELS + 2),
        ARGUMENT,
        'node "onnx::SoftmaxCrossEntropyLoss::4" (SoftmaxCrossEntropyLoss): label 5 in row 3 is not one of the 5 '
        "classes (0 to 4)",
    ),
    "api 3.1: eval without an eval model, arrays (SIGSEGV there)": (
        lambda desk: desk.module().eval()(X, LABELS),
        ERROR,
        NO_EVAL.format("an evaluation step", "module"),
    ),
    "api 3.1: eval without an eval model, OrtValues": (
        lambda desk: desk.module().eval()(*map(OrtValue.ortvalue_from_numpy, (X, LABELS))),
        ERROR,
        NO_EVAL.format("an evaluation step", "module"),
    ),
    "api 3.1: an input whose name belongs to a gradient": (
        lambda desk: desk.generate(forward(renamed("x", "x_grad"))),
        ARGUMENT,
        'input "x_grad" of the model has a name that training models use for gradients; rename it',
    ),
    "api 3.1: an output whose name belongs to a gradient (vanishes there)": (
        lambda desk: desk.generate(forward(renamed("logits", "logits_grad")), additional_output_names=["logits_grad"]),
        ARGUMENT,
        '"logits_grad" cannot be an output: names with this ending are reserved for gradients',
    ),
    "api 3.3: an export without an eval model": (
        lambda desk: desk.module().export_model_for_inferencing(desk.folder / "e.onnx", ["logits"]),
        ERROR,
        NO_EVAL.format("an export", "module"),
    ),
    "api 3.3: an export of no outputs": (
        lambda desk: desk.run.module.export_model_for_inferencing(desk.folder / "e.onnx", []),
        ARGUMENT,
        "an inference model needs at least one output; name it",
    ),
    "api 3.3: an export of an unknown output": (
        lambda desk: desk.run.module.export_model_for_inferencing(desk.folder / "e.onnx", ["logits", "nothing"]),
        ARGUMENT,
        'the evaluation model has no value "nothing" that could be an output',
    ),
    "api 6: an export of an empty name": (
        lambda desk: desk.run.module.export_model_for_inferencing(desk.folder / "e.onnx", [""]),
        ARGUMENT,
        'the evaluation model has no value "" that could be an output',
    ),
    "api 3.3: an export of a text": (
        lambda desk: desk.run.module.export_model_for_inferencing(desk.folder / "e.onnx", "logits"),
        TypeError,
        "graph_output_names must be a list of names, got one name",
    ),
    "api 3.4: a buffer of another length": (
        lambda desk: desk.run.module.copy_buffer_to_parameters(np.zeros(5, np.float32)),
        ARGUMENT,
        "the buffer should have 389 elements, but it has 5",
    ),
    "api 3.4: a buffer of another type": (
        lambda desk: desk.run.module.copy_buffer_to_parameters(np.zeros(389)),
        ARGUMENT,
        "the buffer must be float32, got float64",
    ),
    # api 4 and artifacts 6: Optimizer.
    "api 4: an optimizer model without an optimizer": (
        lambda desk: Optimizer(desk.edited(no_optimizer, OPTIMIZER), desk.run.module),
        MODEL,
        "the optimizer model cannot be used here: it updates no parameters: it has neither an optimizer of ONNX "
        'Runtime nor a sequence output "updated_params"',
    ),
    "api 4: an optimizer model with two optimizers": (
        lambda desk: Optimizer(desk.edited(second_optimizer, OPTIMIZER), desk.run.module),
        MODEL,
        'the optimizer model: an optimizer model needs one optimizer, but it has node "onnx::AdamWOptimizer::6" '
        '(com.microsoft:AdamWOptimizer), node "again" (com.microsoft:AdamWOptimizer)',
    ),
    "artifacts 6: inputs of the optimizer model in another order": (
        lambda desk: Optimizer(desk.edited(reversed_inputs, OPTIMIZER), desk.run.module),
        MODEL,
        "the optimizer model cannot be used here: its inputs should be learning_rate, step, params, gradients, "
        "first_order_moments, second_order_moments, in this order, but are second_order_moments, first_order_moments, "
        "gradients, params, step, learning_rate",
    ),
    "api 4: a learning rate that is a text": (
        lambda desk: desk.run.optimizer.set_learning_rate("fast"),
        TypeError,
        "must be real number, not str",
    ),
    "api 5: counts that are no integers": (
        lambda desk: LinearLRScheduler(desk.run.optimizer, 2.5, 10, 0.1),
        TypeError,
        "'float' object cannot be interpreted as an integer",
    ),
    "api 5: counts below zero": (
        lambda desk: LinearLRScheduler(desk.run.optimizer, -1, 10, 0.1),
        ARGUMENT,
        "warmup_step_count and total_step_count must be at least 0, got -1 and 10",
    ),
    # api 6 to 8: the session.
    "api 6: a checkpoint of two files from a buffer": (
        lambda desk: CheckpointState.load_checkpoint(in_two_files(desk).read_bytes()),
        ERROR,
        "the tensors of the checkpoint are in a .data file beside it; load the checkpoint from its path, "
        "not from a buffer",
    ),
    "artifacts 7: a checkpoint whose second file is missing": (
        lambda desk: (
            Path(f"{in_two_files(desk)}.data").unlink(),
            CheckpointState.load_checkpoint(desk.folder / "c"),
        ),
        NO_FILE,
        "{folder}/c: the tensors of the checkpoint are in {folder}/c.data, but this file does not exist",
    ),
    "artifacts 7: a checkpoint with the second file of another": (
        lambda desk: (
            written(Path(f"{in_two_files(desk)}.data"), bytes(389 * 4)),
            CheckpointState.load_checkpoint(desk.folder / "c"),
        ),
        ERROR,
        "{folder}/c: {folder}/c.data is damaged or belongs to another checkpoint: its checksum does not match",
    ),
    "api 6: an optimizer step without an optimizer model": (
        lambda desk: desk.session().optimizer_step(),
        ERROR,
        NO_OPTIMIZER.format("an optimizer step"),
    ),
    "api 6: a learning rate without an optimizer model": (
        lambda desk: desk.session().get_learning_rate(),
        ERROR,
        NO_OPTIMIZER.format("a learning rate"),
    ),
    "api 6: an eval step without an eval model": (
        lambda desk: desk.session().eval_step([X, LABELS]),
        ERROR,
        NO_EVAL.format("an evaluation step", "session"),
    ),
    "api 6: an export without an eval model": (
        lambda desk: desk.session().export_model_for_inferencing(desk.folder / "e.onnx", ["logits"]),
        ERROR,
        NO_EVAL.format("an export", "session"),
    ),
    "api 6: a scheduler step without a scheduler": (
        lambda desk: desk.session(optimizer_model=desk.mlp / OPTIMIZER).scheduler_step(),
        ERROR,
        "no learning rate scheduler is registered; register one before a scheduler step",
    ),
    # api 9: generate_artifacts.
    "api 9: a model of another kind": (
        lambda desk: desk.generate(3),
        TypeError,
        "a model must be a path, bytes or an onnx.ModelProto, got int",
    ),
    "api 9: training what is not there": (
        lambda desk: desk.generate(requires_grad=["zz"]),
        ARGUMENT,
        'the model has no initializer "zz"',
    ),
    "api 9: training what the loss does not depend on": (
        lambda desk: desk.generate(forward(another_input), requires_grad=["alone"]),
        ARGUMENT,
        'the model: "alone" cannot be trained: no node on a path to "onnx::loss::2" uses it',
    ),
    "api 9: training nothing (unusable models there)": (
        lambda desk: desk.generate(requires_grad=[]),
        ARGUMENT,
        "there are no parameters to train; name them in requires_grad",
    ),
    "api 9: freezing what is not there (ignored there)": (
        lambda desk: desk.generate(frozen_params=["zz"]),
        ARGUMENT,
        'the model has no initializer "zz"',
    ),
    "api 9: training and freezing the same": (
        lambda desk: desk.generate(frozen_params=["fc1.bias"]),
        ARGUMENT,
        'parameter "fc1.bias" cannot be both trained and frozen',
    ),
    "api 9: another loss": (
        lambda desk: desk.generate(loss="mse"),
        TypeError,
        "loss must be one of LossType.MSELoss, LossType.CrossEntropyLoss, LossType.BCEWithLogitsLoss, "
        "LossType.L1Loss, a block of ortrain.onnxblock or None, got str",
    ),
    "api 9: another optimizer (raised there when other files were written)": (
        lambda desk: desk.generate(optimizer="adamw"),
        TypeError,
        "optimizer must be one of OptimType.AdamW, OptimType.SGD, a block of ortrain.onnxblock or None, got str",
    ),
    "api 9: no such folder": (
        lambda desk: desk.generate(artifact_directory=desk.folder / "no"),
        NO_FILE,
        "there is no folder {folder}/no; create it first",
    ),
    "api 9: a file for a folder": (
        lambda desk: desk.generate(artifact_directory=written(desk.folder / "c", b"")),
        ARGUMENT,
        "{folder}/c is a file, but artifacts are written to a folder",
    ),
    "api 9: the ORT format": (
        lambda desk: desk.generate(ort_format=True),
        UNSUPPORTED,
        "ort_format=True is not supported: ortrain writes and reads .onnx files",
    ),
    "api 9: a library of operators": (
        lambda desk: desk.generate(custom_op_library="operators.so"),
        NO_FILE,
        "there is no file operators.so",
    ),
    "api 9: an additional output that is not there": (
        lambda desk: desk.generate(additional_output_names=["zz"]),
        ARGUMENT,
        'the model has no value "zz" to use as an output',
    ),
    "api 9: additional outputs that are a text": (
        lambda desk: desk.generate(additional_output_names="logits"),
        TypeError,
        "additional_output_names must be a list of names, got one name",
    ),
    "api 9: two outputs and a loss of one": (
        lambda desk: desk.generate(forward(hidden_output)),
        ARGUMENT,
        'the model: node "onnx::SoftmaxCrossEntropyLoss::4" (SoftmaxCrossEntropyLoss) with inputs (logits: '
        "float32[batch, 5], a1: float32[batch, 24]): input 1 is of type float32, expected int32 or int64; the "
        "loss gets all outputs of the model (logits, a1), so select its inputs with"
        " loss_input_names",
    ),
    "api 9: an output that is no loss": (
        lambda desk: desk.generate(loss=None),
        MODEL,
        'the model: the loss must be one float, but "logits" is float32[batch, 5]; reduce it with ReduceMean or '
        "ReduceSum (keepdims=0)",
    ),
    # artifacts 3.5: requirements of the loader. 1.19.2 finds most violations at the first step, from the number of
    # feeds.
    "artifacts 3.5: no lazy_reset_grad": (
        lambda desk: desk.module(desk.edited(without_flag)),
        MODEL,
        'the training model cannot be used here: it accumulates gradients but has no input "lazy_reset_grad" (bool[1])',
    ),
    "artifacts 3.5: a checkpoint that lacks a trained parameter": (
        lambda desk: desk.module(
            None, None, desk.checkpoint([t for t in parameters(desk.state()) if t.name != "fc2.bias"], [])
        ),
        MODEL,
        UNFIT.format(
            "training",
            "{ours}/training_model.onnx",
            'input "fc2.bias_grad.accumulation.buffer" holds the gradient of "fc2.bias", but the checkpoint has no '
            "such parameter",
        ),
    ),
    "artifacts 3.5: a checkpoint that lacks a frozen parameter": (
        lambda desk: Module(
            desk.ours("frozen_params") / TRAIN,
            desk.checkpoint([t for t in parameters(desk.state("frozen_params")) if t.name != "fc1.weight"], []),
        )(X, LABELS),
        ARGUMENT,
        "expected 3 inputs (x, labels, fc1.weight), got 2",
    ),
    "artifacts 3.5: a checkpoint with another trained parameter": (
        lambda desk: desk.module(
            None,
            None,
            desk.checkpoint([*parameters(desk.state()), numpy_helper.from_array(np.ones(2, np.float32), "more")], []),
        ),
        MODEL,
        UNFIT.format(
            "training",
            "{ours}/training_model.onnx",
            'the checkpoint trains parameter "more", but the model has no input of this name',
        ),
    ),
    "artifacts 3.5: frozen in the checkpoint, trained in the model": (
        lambda desk: desk.module(None, None, desk.checkpoint([], parameters(desk.state()))),
        MODEL,
        UNFIT.format(
            "training",
            "{ours}/training_model.onnx",
            'input "fc1.weight_grad.accumulation.buffer" holds the gradient of "fc1.weight", but that parameter is '
            "frozen in the checkpoint",
        ),
    ),
    "artifacts 3.5: trained in the checkpoint, frozen in the model": (
        lambda desk: desk.module(desk.edited(without_input("fc2.bias_grad.accumulation.buffer"))),
        MODEL,
        'the training model does not fit the checkpoint: the checkpoint trains parameter "fc2.bias", but '
        'the model has no input "fc2.bias_grad.accumulation.buffer" for its gradient',
    ),
    "artifacts 3.5: another shape in the checkpoint": (
        lambda desk: desk.module(
            None,
            None,
            desk.checkpoint(
                [
                    numpy_helper.from_array(np.ones(6, np.float32), "fc2.bias") if t.name == "fc2.bias" else t
                    for t in parameters(desk.state())
                ],
                [],
            ),
        ),
        MODEL,
        UNFIT.format(
            "training",
            "{ours}/training_model.onnx",
            '"fc2.bias" is float32[5] in the model, but float32[6] in the checkpoint; give the checkpoint that '
            "was made "
            "together with the model",
        ),
    ),
    # Artifacts that do not belong together.
    "mixed: a training model and the checkpoint of another": (
        lambda desk: desk.module(None, None, desk.state("cnn_bn_adamw_ce")),
        MODEL,
        UNFIT.format(
            "training",
            "{ours}/training_model.onnx",
            'the model trains "fc1.weight", "fc1.bias", "fc2.weight" and 1 more, but the checkpoint trains'
            ' "bn1.bias", "bn1.weight", "conv1.bias" and 3 more; give the checkpoint that was made together '
            "with the model",
        ),
    ),
    "mixed: the same model, trained otherwise": (
        lambda desk: desk.module(None, None, desk.state("frozen_params")),
        MODEL,
        UNFIT.format(
            "training",
            "{ours}/training_model.onnx",
            'input "fc1.weight_grad.accumulation.buffer" holds the gradient of "fc1.weight", but that parameter is '
            "frozen in the checkpoint",
        ),
    ),
    "mixed: the eval model of another (values that were never trained there)": (
        lambda desk: desk.module(None, desk.ours("cnn_bn_adamw_ce") / EVAL),
        MODEL,
        UNFIT.format(
            "evaluation", "{cnn}/eval_model.onnx", f'it has no input for parameter "fc1.weight" {NOT_TOGETHER}'
        ),
    ),
    "mixed: AdamW on the moments of SGD": (
        lambda desk: adamw_on_sgd(desk),
        ERROR,
        'the optimizer state of the checkpoint lacks "momentum1" of parameter "fc1.bias"; it was made by another '
        "optimizer, whose slots are momentum0",
    ),
    # Artifacts in a wrong order.
    "order: a training model for a checkpoint": (
        lambda desk: CheckpointState.load_checkpoint(written(desk.folder / "c", (desk.mlp / TRAIN).read_bytes())),
        ERROR,
        "{folder}/c is a training model, not a checkpoint; give the file that generate_artifacts wrote beside it "
        "(checkpoint), or one that save_checkpoint wrote",
    ),
    "order: a checkpoint for a training model": (
        lambda desk: desk.module(desk.mlp / "checkpoint"),
        MODEL,
        "{ours}/checkpoint is not an ONNX model: it is a training checkpoint, not a model",
    ),
    "order: the eval model for the training model": (
        lambda desk: desk.module(desk.mlp / EVAL, desk.mlp / TRAIN),
        MODEL,
        "the training model {ours}/eval_model.onnx cannot be used here: it is an evaluation model, which computes no "
        "gradients; give the training model that was made together with it (training_model.onnx)",
    ),
    "order: the training model for the eval model": (
        lambda desk: desk.module(None, desk.mlp / TRAIN),
        MODEL,
        "the evaluation model {ours}/training_model.onnx cannot be used here: it is a training model, with an input "
        '"fc1.weight_grad.accumulation.buffer" for a gradient; give the evaluation model that was made together with '
        "it",
    ),
    "order: the optimizer model for the training model": (
        lambda desk: desk.module(desk.mlp / OPTIMIZER),
        MODEL,
        "the training model {ours}/optimizer_model.onnx cannot be used here: it is an optimizer model, which "
        "computes no "
        "gradients; give the training model that was made together with it (training_model.onnx)",
    ),
    "order: the optimizer model for the eval model": (
        lambda desk: desk.module(None, desk.mlp / OPTIMIZER),
        MODEL,
        UNFIT.format(
            "evaluation",
            "{ours}/optimizer_model.onnx",
            "it is an optimizer model, which does not run the forward pass; give the evaluation model that was made "
            "together with the training model (eval_model.onnx)",
        ),
    ),
    "order: the training model for the optimizer model": (
        lambda desk: Optimizer(desk.mlp / TRAIN, desk.run.module),
        MODEL,
        "the optimizer model {ours}/training_model.onnx cannot be used here: it is a training model, and an optimizer "
        "model needs a node that updates the parameters (AdamWOptimizer or SGDOptimizerV2), but it has none; give the "
        "optimizer model that was made together with the checkpoint (optimizer_model.onnx)",
    ),
    "order: the forward model for the eval model (its own values)": (
        lambda desk: desk.module(None, CASE / "forward.onnx"),
        MODEL,
        UNFIT.format(
            "evaluation",
            f"{CASE}/forward.onnx",
            'it is a forward model, with its own value of parameter "fc1.weight"; give the evaluation model that '
            "was made together with the training model (eval_model.onnx)",
        ),
    ),
    "order: arguments of Module": (
        lambda desk: Module(desk.state(), desk.mlp / TRAIN),  # type: ignore[arg-type]
        TypeError,
        "a model must be a path, bytes or an onnx.ModelProto, got CheckpointState",
    ),
    "order: a path for the state": (
        lambda desk: Module(desk.mlp / TRAIN, desk.mlp / "checkpoint"),  # type: ignore[arg-type]
        TypeError,
        "state must be a CheckpointState, got PosixPath",
    ),
    "order: a state for the module": (
        lambda desk: Optimizer(desk.mlp / OPTIMIZER, desk.state()),  # type: ignore[arg-type]
        TypeError,
        "module must be a Module, got CheckpointState",
    ),
    "order: a module for the optimizer": (
        lambda desk: LinearLRScheduler(desk.run.module, 1, 2, 0.1),  # type: ignore[arg-type]
        TypeError,
        "optimizer must be an Optimizer, got Module",
    ),
    # Files that no user can write: below a file, and in a file system without files.
    "unwritable: a checkpoint below a file": (
        lambda desk: CheckpointState.save_checkpoint(desk.state(), written(desk.folder / "c", b"") / "d"),
        ERROR,
        "cannot write {folder}/c/d: Not a directory (os error 20)",
    ),
    "unwritable: a checkpoint in /proc": (
        lambda desk: CheckpointState.save_checkpoint(desk.state(), "/proc/c"),
        NO_FILE,
        "cannot write /proc/c: No such file or directory (os error 2)",
    ),
    "unwritable: a checkpoint for a folder": (
        lambda desk: CheckpointState.save_checkpoint(desk.state(), desk.folder),
        ERROR,
        "{folder} is a folder, but a checkpoint is a file",
    ),
    "unwritable: safetensors below a file": (
        lambda desk: desk.state().save_safetensors(written(desk.folder / "c", b"") / "d"),
        ERROR,
        "cannot write {folder}/c/d: Not a directory (os error 20)",
    ),
    "unwritable: an export below a file": (
        lambda desk: desk.run.module.export_model_for_inferencing(written(desk.folder / "c", b"") / "d", ["logits"]),
        ERROR,
        "cannot write {folder}/c/d: Not a directory (os error 20)",
    ),
    "unwritable: an export without a folder": (
        lambda desk: desk.run.module.export_model_for_inferencing(desk.folder / "no" / "e.onnx", ["logits"]),
        NO_FILE,
        "cannot write {folder}/no/e.onnx: there is no folder {folder}/no; create it first",
    ),
    "unwritable: artifacts in /proc": (
        lambda desk: desk.generate(artifact_directory="/proc"),
        NO_FILE,
        "cannot write /proc/training_model.onnx: No such file or directory (os error 2)",
    ),
}


def in_two_files(desk: Desk) -> Path:
    """Save a checkpoint in two files, the form of checkpoints above 1800 MiB."""
    desk.state()._native.save(str(desk.folder / "c"), False, external_above=0)
    return desk.folder / "c"


def adamw_on_sgd(desk: Desk) -> None:
    sgd = Run(desk.ours("mlp_sgd_mse"))
    CheckpointState.save_checkpoint(sgd.state, desk.folder / "c", include_optimizer_state=True)
    state = CheckpointState.load_checkpoint(desk.folder / "c")
    Optimizer(desk.mlp / OPTIMIZER, Module(desk.ours("mlp_sgd_mse") / TRAIN, state))


@pytest.mark.parametrize("row", REFUSED)
def test_refused(row: str, desk: Desk) -> None:
    """The full message is correct, and no file remains."""
    does, kind, sentence = REFUSED[row]
    with pytest.raises(kind) as error:
        does(desk)
    assert type(error.value) is kind
    for name, value in (("folder", desk.folder), ("ours", desk.mlp), ("cnn", desk.ours("cnn_bn_adamw_ce"))):
        sentence = sentence.replace(f"{{{name}}}", str(value))
    # Libraries that read the format word their own errors about damage.
    pattern = re.escape(sentence).replace(re.escape("(*)"), r"\(.+\)")
    assert re.fullmatch(pattern, str(error.value)), f"\n{error.value}\n{sentence}"
    assert not list((desk.folder / "made").glob("*")), "an error writes no file"
    assert not [path for path in desk.folder.rglob("*") if path.suffix == ".tmp" or path.name == "e.onnx"]


Row = Callable[[Desk], None]
RIGHT: dict[str, Row] = {}


def right(row: str) -> Callable[[Row], Row]:
    """Register an action with a correct result."""

    def register(does: Row) -> Row:
        assert row not in RIGHT
        RIGHT[row] = does
        return does

    return register


# Float16 weights are trained in their type; a warning states the loss of precision.
@pytest.mark.filterwarnings("ignore:.* which loses steps that change a weight:ortrain.TrainingWarning")
@pytest.mark.parametrize("row", RIGHT)
def test_right(row: str, desk: Desk) -> None:
    RIGHT[row](desk)


@right("api 1: without PyTorch (ModuleNotFoundError there)")
def _(desk: Desk) -> None:
    script = """
        import sys
        sys.modules["torch"] = None
        import ortrain.compat
        ortrain.compat.install()
        import onnxruntime.training
        from onnxruntime.training.api import CheckpointState
        from onnxruntime.training import artifacts, onnxblock
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


@right("api 2: repr of parameters and properties (TypeError there)")
def _(desk: Desk) -> None:
    state = desk.state()
    state.properties["epoch"] = 3
    assert repr(state.parameters) == "Parameters(fc1.bias, fc1.weight, fc2.bias, fc2.weight)"
    assert repr(state.properties) == "Properties(epoch=3)"


@right("api 2: writing before a module was made (SIGSEGV there)")
def _(desk: Desk) -> None:
    state = desk.state()
    state.parameters["fc2.bias"] = np.full(5, 2, np.float32)
    state.parameters["fc1.bias"].data = np.full(24, 3, np.float32)
    state.parameters["fc1.weight"].data[:] = 4
    module = desk.module(state=state)
    values = np.concatenate([np.full(240, 4), np.full(24, 3)])
    np.testing.assert_array_equal(module.get_contiguous_parameters().numpy()[:264], values)
    np.testing.assert_array_equal(module.get_contiguous_parameters().numpy()[-5:], np.full(5, 2))


@right("api 2: writing after the module is gone (RuntimeError there)")
def _(desk: Desk) -> None:
    state = desk.state()
    module = desk.module(state=state)
    del module
    gc.collect()
    state.parameters["fc2.bias"] = np.full(5, 2, np.float32)
    np.testing.assert_array_equal(state.parameters["fc2.bias"].data, np.full(5, 2))


@right("api 2: floats of NumPy as properties (truncated there)")
def _(desk: Desk) -> None:
    properties = desk.state().properties
    for value in (np.float32(1.5), np.float64(1.5), np.float16(1.5)):
        properties["half"] = value
        assert properties["half"] == 1.5


@right("api 2, 4: the learning rate of a nominal state (SIGSEGV there)")
def _(desk: Desk) -> None:
    optimizer = desk.nominal.optimizer
    assert optimizer.get_learning_rate() == float(np.float32(0.001))
    optimizer.set_learning_rate(0.5)
    assert optimizer.get_learning_rate() == 0.5


@right("api 2: a nominal state with moments and steps from a file")
def _(desk: Desk) -> None:
    run, other = desk.nominal, desk.run
    assert run.state.load_parameters(desk.mlp / "checkpoint").loaded == sorted(WEIGHTS)
    for one in (run, other):
        for _ in range(3):
            one.module(X, LABELS)
            one.optimizer.step()
            one.module.lazy_reset_grad()
        CheckpointState.save_checkpoint(one.state, desk.folder / f"of {one is run}", include_optimizer_state=True)
    assert (desk.folder / "of True").read_bytes() == (desk.folder / "of False").read_bytes()


@right("api 3: session options are the caller's (changed there, and refused if they say otherwise)")
def _(desk: Desk) -> None:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "0")
    Module(desk.mlp / TRAIN, desk.state(), session_options=options)(X, LABELS)
    assert options.get_session_config_entry("session.disable_prepacking") == "0"


@right("api 3: inputs by name (TypeError there)")
def _(desk: Desk) -> None:
    assert desk.run.module(labels=LABELS, x=X) == desk.run.module(X, LABELS)


@right("api 3.1: inputs without an array among them (AttributeError there)")
def _(desk: Desk) -> None:
    module = desk.run.module
    assert np.asarray(module(OrtValue.ortvalue_from_numpy(X), LABELS.tolist())) == module(X, LABELS)


@right("api 3.1: an input named like a gradient of nothing (vanishes there)")
def _(desk: Desk) -> None:
    loss = desk.run.module(X, LABELS)
    for name in ("x_grad", "x_grad.accumulation.out"):
        module = desk.module(desk.edited(renamed("x", name)))
        assert module.input_names() == [name, "labels"]
        assert module(X, LABELS) == loss
    # Results may have these names as well.
    (name,) = desk.run.module.output_names()
    module = desk.module(desk.edited(renamed(name, "my_grad")))
    assert module.output_names() == ["my_grad"]
    assert module(X, LABELS) == loss


@right("api 3.1, artifacts 4.1: an empty batch (SIGFPE there)")
def _(desk: Desk) -> None:
    for case, shape in (("mlp_adamw_ce", (0, 10)), ("cnn_bn_adamw_ce", (0, 2, 8, 8))):
        run = Run(desk.ours(case))
        assert np.isnan(run.module(np.zeros(shape, np.float32), np.zeros(0, np.int64)))
        assert all(not parameter.grad.any() for _, parameter in run.state.parameters if parameter.grad is not None)


@right("api 3.1: arrays of another byte order (misread there)")
def _(desk: Desk) -> None:
    assert desk.run.module(X.astype(">f4"), LABELS.astype(">i8")) == desk.run.module(X, LABELS)


@right("api 3.3: an export when the eval model's file is gone, and of one from bytes")
def _(desk: Desk) -> None:
    path = written(desk.folder / "eval.onnx", (desk.mlp / EVAL).read_bytes())
    found = set()
    for evaluation in (path, path.read_bytes()):
        module = desk.module(None, evaluation)
        path.unlink(missing_ok=True)
        module.export_model_for_inferencing(desk.folder / "e.onnx", ["logits"])
        found.add((desk.folder / "e.onnx").read_bytes())
    assert len(found) == 1


@right("api 3.4: a buffer that is the wrapper, or an array (TypeError there)")
def _(desk: Desk) -> None:
    module = desk.run.module
    packed = module.get_contiguous_parameters()
    for buffer in (packed, packed._ortvalue, packed.numpy(), packed.numpy().reshape(1, 389)):
        module.copy_buffer_to_parameters(np.zeros(389, np.float32))
        module.copy_buffer_to_parameters(buffer)
        np.testing.assert_array_equal(module.get_contiguous_parameters().numpy(), packed.numpy())


@right("api 4: the learning rate is restored (0.001 there)")
def _(desk: Desk) -> None:
    desk.run.optimizer.set_learning_rate(0.25)
    CheckpointState.save_checkpoint(desk.run.state, desk.folder / "checkpoint", include_optimizer_state=True)
    state = CheckpointState.load_checkpoint(desk.folder / "checkpoint")
    assert Optimizer(desk.mlp / OPTIMIZER, desk.module(state=state)).get_learning_rate() == 0.25


@right("api 5: warm-up and total mean what they say (swapped there)")
def _(desk: Desk) -> None:
    scheduler = LinearLRScheduler(desk.run.optimizer, 2, 10, 1.0)
    rates = [desk.run.optimizer.get_learning_rate()]
    for _ in range(3):
        desk.run.module(X, LABELS)
        desk.run.optimizer.step()
        scheduler.step()
        rates.append(desk.run.optimizer.get_learning_rate())
    assert rates == [0, 0.5, 1, 0.875]


@right("api 6: parameters without a session")
def _(desk: Desk) -> None:
    state = desk.state()
    state.parameters["fc2.bias"] = OrtValue.ortvalue_from_numpy(np.ones(5, np.float32))
    np.testing.assert_array_equal(state.parameters["fc2.bias"].data, np.ones(5))


@right("api 9: a model as a path object or as bytes (RuntimeError there)")
def _(desk: Desk) -> None:
    found = set()
    for model in (CASE / "forward.onnx", (CASE / "forward.onnx").read_bytes(), str(CASE / "forward.onnx")):
        found.add((desk.generate(model) / TRAIN).read_bytes())
    assert len(found) == 1


@right("api 9: additional outputs in a tuple (RuntimeError there)")
def _(desk: Desk) -> None:
    folder = desk.generate(additional_output_names=("logits",))
    module = Module(folder / TRAIN, CheckpointState.load_checkpoint(folder / "checkpoint"))
    assert module.output_names()[1:] == ["logits"]


@right("api 9: nothing is said about what trains (unusable models there)")
def _(desk: Desk) -> None:
    folder = desk.generate(requires_grad=None)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    assert all(parameter.requires_grad for _, parameter in state.parameters)
    assert len(state.parameters) == len(WEIGHTS)


@right("api 9: initializers that are inputs, too ('duplicate definition-site' there)")
def _(desk: Desk) -> None:
    def listed(model: ModelProto) -> None:
        for tensor in model.graph.initializer:
            model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))

    folder = desk.generate(forward(listed))
    module = Module(folder / TRAIN, CheckpointState.load_checkpoint(folder / "checkpoint"))
    assert module.input_names() == ["x", "labels"]
    assert module(X, LABELS) == desk.run.module(X, LABELS)


@right("api 9: models that are not float32 (every loss fails there)")
def _(desk: Desk) -> None:
    for number, dtype in ((TensorProto.DOUBLE, np.float64), (TensorProto.FLOAT16, np.float16)):
        for loss in LossType:
            folder = desk.generate(scores_of(number), requires_grad=["w"], loss=loss)
            state = CheckpointState.load_checkpoint(folder / "checkpoint")
            module = Module(folder / TRAIN, state)
            target = LABELS if loss == LossType.CrossEntropyLoss else np.full((4, 5), 0.5, dtype)
            value = module(np.ones((4, 3), dtype), target)
            assert value.dtype == dtype
            assert np.isfinite(value)
            before = np.array(state.parameters["w"].data)
            Optimizer(folder / OPTIMIZER, module).step()
            assert (state.parameters["w"].data != before).all()


def scores_of(number: int) -> ModelProto:
    """Return a linear model of another float type."""
    weight = np.random.default_rng(0).standard_normal((3, 5))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["scores"])],
        "linear",
        [helper.make_tensor_value_info("x", number, ["n", 3])],
        [helper.make_tensor_value_info("scores", number, ["n", 5])],
        [numpy_helper.from_array(weight.astype(helper.tensor_dtype_to_np_dtype(number)), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@right("artifacts 3.5: another frozen parameter in the checkpoint")
def _(desk: Desk) -> None:
    more = numpy_helper.from_array(np.ones(2, np.float32), "more")
    state = desk.checkpoint(parameters(desk.state()), [more])
    assert desk.module(state=state)(X, LABELS) == desk.run.module(X, LABELS)


@right("artifacts 3.5: an eval model with its inputs in another order (fed by position there)")
def _(desk: Desk) -> None:
    module = desk.module(None, desk.edited(reversed_inputs, EVAL)).eval()
    assert module.input_names() == ["labels", "x"]
    assert module(LABELS, X) == desk.run.module.eval()(X, LABELS)


@right("two modules on one state")
def _(desk: Desk) -> None:
    """Both modules share the parameters. Each module has its own gradients; the parameters show the newest module's."""
    first, bias = desk.run, desk.run.state.parameters["fc2.bias"]
    first.module(X, LABELS)
    old = bias.grad
    second = desk.module(state=first.state)
    assert old is not None
    assert bias.grad is not None
    assert old.any()
    assert not bias.grad.any()
    second(X[:2], LABELS[:2])
    assert (bias.grad != old).any()
    before = np.array(bias.data)
    first.optimizer.step()
    assert (bias.data != before).any()
    assert second(X, LABELS) == first.module(X, LABELS)


@right("use after deletion")
def _(desk: Desk) -> None:
    """The remaining objects work after any order of deletions."""
    run = Run(desk.mlp)
    grad, data, parameter = run.state.parameters["fc2.bias"].grad, run.state.parameters["fc2.bias"].data, None
    module, optimizer, state = run.module, run.optimizer, run.state
    scheduler = LinearLRScheduler(optimizer, 0, 10, 0.1)
    del run
    module(X, LABELS)
    del module
    gc.collect()
    before = np.array(data)
    optimizer.step()
    assert grad is not None
    assert grad.any()
    assert (data != before).any()
    del optimizer
    gc.collect()
    scheduler.step()
    parameter = state.parameters["fc2.bias"]
    del state, scheduler
    gc.collect()
    parameter.data = np.zeros(5, np.float32)
    assert not data.any()
    del parameter
    gc.collect()
    data[:] = 1
    assert grad.any()


@right("threads that call one module at once")
def _(desk: Desk) -> None:
    module, grad = desk.run.module, desk.run.state.parameters["fc2.bias"].grad
    module(X, LABELS)
    assert grad is not None
    once = np.array(grad)
    threads = [threading.Thread(target=lambda: [module(X, LABELS) for _ in range(15)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(grad, 61 * once, rtol=1e-4)


# artifacts 4.1: gradients that are wrong, or fail, in 1.19.2. The tests compare with finite differences in float64.
STEP = 1e-6
# Rounding error of a difference over STEP, relative to the largest gradient.
GRADIENT_TOLERANCE = 1e-6


def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return helper.make_node(op, inputs, outputs, f"the {op}", **attributes)


WX = node("Mul", ["x", "w"], ["wx"])

# Nodes from x and w to y, shapes of x and w, opset, other constants.
GRADIENTS: dict[str, tuple[list[Any], tuple[Any, ...], tuple[int, ...], int, dict[str, np.ndarray]]] = {
    "Where with a broadcast branch (keeps the output's shape)": (
        [node("Greater", ["x", "zero"], ["c"]), node("Where", ["c", "w", "x"], ["y"])],
        ("n", 3),
        (3,),
        17,
        {"zero": np.zeros(())},
    ),
    "Split with an unused output (has only the used part)": (
        [node("Split", ["w"], ["first", "rest"], axis=0, num_outputs=2), node("Mul", ["x", "first"], ["y"])],
        (2, 3),
        (4, 3),
        18,
        {},
    ),
    "Conv with auto_pad SAME_UPPER (wrong)": (
        [node("Conv", ["x", "w"], ["y"], auto_pad="SAME_UPPER", strides=[2, 2])],
        ("n", 1, 5, 5),
        (2, 1, 4, 4),
        17,
        {},
    ),
    "AveragePool of batches of unknown size (SIGFPE)": (
        [WX, node("AveragePool", ["wx"], ["y"], kernel_shape=[2, 2])],
        ("n", 1, 4, 4),
        (1, 4, 4),
        17,
        {},
    ),
    "Gelu with approximate=tanh (that of erf)": (
        [WX, node("Gelu", ["wx"], ["y"], approximate="tanh")],
        ("n", 3),
        (3,),
        20,
        {},
    ),
    "LayerNormalization with one output": (
        [node("LayerNormalization", ["x", "w", "b"], ["y"])],
        ("n", 3),
        (3,),
        17,
        {"b": np.asarray([0.5, -1.0, 2.0])},
    ),
    "LayerNormalization without bias": ([node("LayerNormalization", ["x", "w"], ["y"])], ("n", 3), (3,), 17, {}),
    "Pad with reflect (refused)": (
        [WX, node("Pad", ["wx", "pads"], ["y"], mode="reflect")],
        ("n", 3),
        (3,),
        17,
        {"pads": np.asarray([0, 1, 0, 2])},
    ),
    "the exponent of Pow (refused)": (
        [node("Abs", ["x"], ["base"]), node("Pow", ["base", "w"], ["y"])],
        ("n", 3),
        (3,),
        17,
        {},
    ),
    "ReduceL2 without keepdims (fails)": (
        [WX, node("ReduceL2", ["wx"], ["y"], axes=[1], keepdims=0)],
        ("n", 3),
        (3,),
        13,
        {},
    ),
    "ReduceLogSumExp without keepdims (fails)": (
        [WX, node("ReduceLogSumExp", ["wx"], ["y"], axes=[1], keepdims=0)],
        ("n", 3),
        (3,),
        13,
        {},
    ),
    "LSTM without initial states (fails)": (
        [node("LSTM", ["x", "w", "r"], ["y"], hidden_size=2)],
        (3, "n", 2),
        (1, 8, 2),
        17,
        {"r": np.full((1, 8, 2), 0.1)},
    ),
    "GRU without an initial state (fails)": (
        [node("GRU", ["x", "w", "r"], ["y"], hidden_size=2)],
        (3, "n", 2),
        (1, 6, 2),
        17,
        {"r": np.full((1, 6, 2), 0.1)},
    ),
    "LSTM in both directions (refused)": (
        [node("LSTM", ["x", "w", "r"], ["y"], hidden_size=2, direction="bidirectional")],
        (3, "n", 2),
        (2, 8, 2),
        17,
        {"r": np.full((2, 8, 2), 0.1)},
    ),
}


@pytest.mark.parametrize("row", GRADIENTS)
def test_gradients(row: str, desk: Desk) -> None:
    """The gradient equals finite differences, or an error names the operator as unsupported."""
    nodes, x_shape, w_shape, opset, constants = GRADIENTS[row]
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal(w_shape)} | constants
    graph = helper.make_graph(
        [*nodes, node("Mul", ["y", "y"], ["square"]), node("ReduceMean", ["square"], ["loss"], keepdims=0)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.DOUBLE, x_shape)],
        [helper.make_tensor_value_info("loss", TensorProto.DOUBLE, [])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    try:
        folder = desk.generate(model, requires_grad=["w"], loss=None, optimizer=None)
    except ortrain.UnsupportedError as error:
        refused = str(error)
    else:
        refused = None
    if refused is not None:
        operators = "|".join(rf'{one.op_type} \("the {one.op_type}"\)' for one in nodes)
        assert re.match(rf"the model: the model uses operators that are not supported: ({operators});", refused)
        return
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / TRAIN, state)
    x = rng.standard_normal([2 if size == "n" else size for size in x_shape])
    module(x)
    found, data = np.array(state.parameters["w"].grad), state.parameters["w"].data
    wanted = np.zeros_like(found)
    for at in np.ndindex(data.shape):
        value, losses = data[at], []
        for step in (STEP, -STEP):
            data[at] = value + step
            losses.append(float(module(x)))
        data[at] = value
        wanted[at] = (losses[0] - losses[1]) / (2 * STEP)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=GRADIENT_TOLERANCE * np.abs(wanted).max())


@right("artifacts 4.1: SoftmaxCrossEntropyLoss with one output (fails there)")
def _(desk: Desk) -> None:
    def with_loss(model: ModelProto) -> None:
        loss = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
        model.graph.node.append(helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "labels"], ["loss"]))
        model.graph.input.append(helper.make_tensor_value_info("labels", TensorProto.INT64, ["batch"]))
        model.graph.output.pop()
        model.graph.output.append(loss)

    folder = desk.generate(forward(with_loss), loss=None)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    assert Module(folder / TRAIN, state)(X, LABELS) == desk.run.module(X, LABELS)
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.grad, desk.run.state.parameters[name].grad)


@right("artifacts 4.1: Dropout without a mask, without ratio, or that is off (fails, or wrong by a factor, there)")
def _(desk: Desk) -> None:
    weight = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    constants = {"ratio": np.float32(0.25), "off": np.asarray(False)}
    for inputs, outputs, ratio in (
        (["wx", "ratio"], ["y", "mask"], 0.25),
        (["wx", "ratio"], ["y"], 0.25),
        (["wx", "ratio", "off"], ["y"], 0.25),
        (["wx"], ["y"], 0.5),
    ):
        used = {"w": weight} | {name: np.asarray(value) for name, value in constants.items() if name in inputs}
        graph = helper.make_graph(
            [WX, node("Dropout", inputs, outputs), node("ReduceSum", ["y"], ["loss"], keepdims=0)],
            "graph",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64])],
            [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
            [numpy_helper.from_array(value, name) for name, value in used.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        folder = desk.generate(model, requires_grad=["w"], loss=None, additional_output_names=["y"])
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / TRAIN, state, folder / EVAL)
        x = np.ones(64, np.float32)
        _, y = module(x)
        factor = np.float32(1 / (1 - ratio))
        kept = y != 0
        assert 0 < kept.sum() < 64
        np.testing.assert_allclose(y, np.where(kept, weight * factor, 0), rtol=1e-6)
        np.testing.assert_allclose(state.parameters["w"].grad, np.where(kept, factor, 0), rtol=1e-6)
        np.testing.assert_array_equal(module.eval()(x)[1], weight)


# Full disks. The program mounts a small file system if the machine permits it, and limits the file size otherwise.
FULL = """
import errno, json, os, resource, signal, sys
from pathlib import Path
from ortrain import artifacts
from ortrain.api import CheckpointState, Module

source, folder, how = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
state = CheckpointState.load_checkpoint(source / "checkpoint")
module = Module(source / "training_model.onnx", state, source / "eval_model.onnx")
names = [name for name, _ in state.parameters]
arguments = dict(requires_grad=names, loss=artifacts.LossType.CrossEntropyLoss, artifact_directory=folder)
calls = {
    "checkpoint": lambda: CheckpointState.save_checkpoint(state, folder / "c", True),
    "external": lambda: state._native.save(str(folder / "e"), True, external_above=0),
    "safetensors": lambda: state.save_safetensors(folder / "s"),
    "export": lambda: module.export_model_for_inferencing(folder / "m.onnx", ["logits"]),
    "artifacts": lambda: artifacts.generate_artifacts(sys.argv[4], **arguments),
}
for call in calls.values():
    call()
before = {path.name: path.read_bytes() for path in folder.iterdir()}
for _, parameter in state.parameters:
    parameter.data[...] += 1
if how == "disk":
    filler = open(folder / "filler", "wb", buffering=0)
    try:
        while True:
            filler.write(bytes(1024))
    except OSError as error:
        assert error.errno == errno.ENOSPC
else:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
found = {}
for name, call in calls.items():
    try:
        call()
    except Exception as error:
        found[name] = [type(error).__name__, str(error)]
now = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "filler"}
assert now == before, (sorted(before), sorted(now))
if how == "disk":
    filler.close()
    (folder / "filler").unlink()
    for call in calls.values():
        call()
    state = CheckpointState.load_checkpoint(folder / "c")
    assert (folder / "c").read_bytes() != before["c"]
print(json.dumps(found))
"""
# Mount commands; the first one that the machine permits is used.
MOUNTING = (["unshare", "-m"], ["unshare", "-rm"], ["sudo", "-n", "unshare", "-m"])


@pytest.mark.parametrize("how", ["disk", "limit"])
def test_a_full_disk(how: str, desk: Desk) -> None:
    """A full disk is an error with its reason. Files stay as they were, without additions; later calls succeed."""
    mount = ["sh", "-c", 'mount -t tmpfs -o size=256k none "$1" && shift && exec "$@"', "sh", str(desk.folder)]
    prefix = next(
        ([*way, *mount] for way in MOUNTING if how == "disk" and _works([*way, *mount, "true"])),
        [],
    )
    kind = "disk" if prefix else "limit"
    forward_model = str(CASE / "forward.onnx")
    command = [*prefix, sys.executable, "-c", FULL, str(desk.mlp), str(desk.folder), kind, forward_model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reason = "No space left on device (os error 28)" if prefix else "File too large (os error 27)"
    found = json.loads(done.stdout)
    assert found.keys() == {"checkpoint", "external", "safetensors", "export", "artifacts"}
    for name, (error, sentence) in found.items():
        assert error == "OrtrainError", name
        assert re.fullmatch(rf"cannot (write|flush) {re.escape(str(desk.folder))}/\S+: {re.escape(reason)}", sentence)


def _works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


# Rows that other tests cover: file and test.
ELSEWHERE: dict[str, str] = {
    "api 2: load, other versions of the format": "crates/ortrain-checkpoint/src/tests.rs::other_versions_are_refused",
    "api 2: load, every flipped byte": "tests/test_bad_input.py::test_every_flipped_byte_is_found",
    "api 2: views outlive state and modules": "tests/test_state.py::test_views_outlive_everything",
    "api 3.1: a step that fails has changed nothing": "tests/test_bad_input.py::test_inputs_of_a_step",
    "api 3.2: lazy_reset_grad": "tests/test_state.py::test_gradients",
    "api 4, artifacts 7: moments from their files": "tests/test_replay.py::test_resume",
    "api 5: all recorded pairs of counts": "tests/test_replay.py::test_linear_learning_rates",
    "api 6: registration sets the rate": "tests/test_session.py::test_recorded_learning_rates",
    "api 7: FromBuffer without a flag": "tests/test_session.py::test_buffers",
    "api 8: a rate beside a scheduler": "tests/test_session.py::test_learning_rate_and_scheduler",
    "api 8: calls after Dispose": "tests/test_session.py::test_after_close",
    "api 8: outputs that do not fit": "tests/test_session.py::test_outputs_that_do_not_fit",
    "api 9: what is not trained, and why": "tests/test_inspect.py::test_obstacle_of_a_model",
    "api 9: files in the current folder": "tests/test_artifacts.py::test_files",
    "api 10: contexts, nesting, base(None)": "tests/test_onnxblock.py::test_contexts",
    "api 10: calls out of order, absolute paths": "tests/test_onnxblock.py::test_out_of_order",
    "api 10: names count on in a model alone": "tests/test_onnxblock.py::test_names_count_on",
    "api 10: reduction none, class weights": "tests/test_onnxblock.py::test_losses_without_a_reduction",
    "api 10: labels of images": "tests/test_onnxblock.py::test_targets_that_are_there",
    "api 10: a Constant in a loss": "tests/test_onnxblock.py::test_a_loss_of_ones_own",
    "api 10: nominal into a model": "tests/test_onnxblock.py::test_checkpoints_into_models",
    "artifacts 4: operators without a gradient there": "tests/test_versions.py::test_every_operator_is_trained",
    "artifacts 4.1: pooling of unknown sizes": "tests/test_versions.py::test_pooling_of_unknown_sizes_is_trained",
    "artifacts 4.3: statistics of frozen normalizations": "tests/test_batch_norm.py::test_frozen",
    "artifacts 4.3: statistics that nobody named": "tests/test_batch_norm.py::test_statistics_are_frozen_parameters",
    "artifacts 4.3: eval models of models in training mode": (
        "tests/test_batch_norm.py::test_eval_model_and_export_in_onnxruntime"
    ),
    "artifacts 7: tensors of a damaged second file": (
        "crates/ortrain-checkpoint/src/tests.rs::damage_in_external_data_is_found"
    ),
    "artifacts 7: a load beside a save": (
        "crates/ortrain-checkpoint/src/tests.rs::concurrent_loads_and_saves_are_complete"
    ),
    "nominal: values from files": "crates/ortrain/tests/nominal.rs::loaded_values_train",
    "nominal: a part of the values": "crates/ortrain/tests/nominal.rs::rejects_incomplete_files",
    "threads: sessions": "tests/test_session.py::test_threads_take_turns",
    "interrupted: killed saves": "tests/test_kill.py::test_killed_saves_leave_a_complete_file",
    "interrupted: a disk that fails at any step": (
        "crates/ortrain-checkpoint/src/tests.rs::disk_failures_leave_a_complete_state"
    ),
}


@functools.cache
def functions_of(file: str) -> set[str]:
    text = (TESTS.parent / file).read_text()
    if file.endswith(".rs"):
        return set(re.findall(r"#\[test\]\s+fn (\w+)\(", text))
    return {item.name for item in ast.walk(ast.parse(text)) if isinstance(item, ast.FunctionDef)}


@pytest.mark.parametrize("row", ELSEWHERE)
def test_elsewhere(row: str) -> None:
    file, _, name = ELSEWHERE[row].partition("::")
    assert name in functions_of(file)


def test_every_section_has_rows() -> None:
    """Every section of the two pages about errors of 1.19.2 has rows."""
    rows = " ".join([*REFUSED, *RIGHT, *ELSEWHERE])
    for section in ("api 1", "api 2", "api 3", "api 3.1", "api 3.2", "api 3.3", "api 3.4", "api 4", "api 5", "api 6"):
        assert f"{section}:" in rows, section
    for section in ("api 7", "api 8", "api 9", "api 10"):
        assert f"{section}:" in rows, section
    for section in ("artifacts 3.5", "artifacts 4.1", "artifacts 4.3", "artifacts 6", "artifacts 7"):
        assert f"{section}:" in rows, section
