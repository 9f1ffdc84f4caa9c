"""Error messages for wrong arguments and files. Every sentence is quoted in full."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import RECORDS, Run
from onnx import NodeProto, TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer
from ortrain.session import TrainingSession

PERCEPTRON = Path(__file__).parent.parent / "examples" / "perceptron.onnx"
WEIGHT = numpy_helper.from_array(np.ones((2, 3), np.float32), "w")


def node(op: str, inputs: list[str], outputs: list[str], name: str = "", **attributes: Any) -> NodeProto:
    return helper.make_node(op, inputs, outputs, name, **attributes)


def model(*nodes: NodeProto, weights: tuple[TensorProto, ...] = (), output: Any = None, opset: int = 17) -> bytes:
    """Return a model from x, float32[n, 2], to y."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [output or helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights,
    )
    content: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8
    ).SerializeToString()
    return content


def weight(**changes: Any) -> TensorProto:
    """Return a float32[2, 3] weight with some fields changed."""
    tensor = TensorProto()
    tensor.CopyFrom(WEIGHT)
    if "dims" in changes:
        tensor.dims[:] = changes["dims"]
    if "raw_data" in changes:
        tensor.raw_data = changes["raw_data"]
    return tensor


MATMUL = node("MatMul", ["x", "w"], ["y"], "product")
# One axis more than the maximum of a tensor.
AXES = 65
ADVICE = "at most 64 are supported; remove axes of size 1 or merge axes with Reshape"

MODELS: dict[str, tuple[bytes, type[Exception], str]] = {
    "empty": (b"", ortrain.InvalidModelError, "the model is empty; expected an ONNX model"),
    "garbage": (
        b"\xff" * 100,
        ortrain.InvalidModelError,
        "the model is not an ONNX model: its first bytes are not those of an ONNX model",
    ),
    "text": (
        b"hello, world",
        ortrain.InvalidModelError,
        "the model is not an ONNX model: it looks like text",
    ),
    "safetensors": (
        (2).to_bytes(8, "little") + b"{}",
        ortrain.InvalidModelError,
        "the model is not an ONNX model: it is a safetensors file, which has tensors but no graph",
    ),
    "a picture": (
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        ortrain.InvalidModelError,
        "the model is not an ONNX model: it is a PNG image",
    ),
    "truncated": (
        PERCEPTRON.read_bytes()[:1000],
        ortrain.InvalidModelError,
        "the model is cut short: graph, at byte 3 of 1000, is longer than the rest of the file; was it copied or "
        "downloaded completely?",
    ),
    "cyclic": (
        model(
            node("Add", ["x", "b"], ["a"], "first"),
            node("Relu", ["a"], ["b"], "second"),
            node("Relu", ["b"], ["y"], "third"),
        ),
        ortrain.InvalidModelError,
        'the model: the graph has a cycle through node "first" (Add), node "second" (Relu), node "third" (Relu)',
    ),
    "made twice": (
        model(node("Relu", ["x"], ["y"], "first"), node("Tanh", ["x"], ["y"], "second")),
        ortrain.InvalidModelError,
        'the model: "y" is defined twice, the second time by node "second" (Tanh)',
    ),
    "never made": (
        model(node("Add", ["x", "z"], ["y"], "first")),
        ortrain.InvalidModelError,
        'the model: node "first" (Add) uses "z", which is not an input, an initializer or an output of another node',
    ),
    "declared with another type": (
        model(
            node("Relu", ["x"], ["y"], "first"),
            output=helper.make_tensor_value_info("y", TensorProto.INT64, ["n", 2]),
        ),
        ortrain.InvalidModelError,
        'the model: node "first" (Relu) with inputs (x: float32[n, 2]): "y" is declared as int64[n, 2] but is '
        "float32[n, 2]",
    ),
    "shapes that do not fit": (
        model(MATMUL, weights=(numpy_helper.from_array(np.ones((5, 3), np.float32), "w"),)),
        ortrain.InvalidModelError,
        'the model: node "product" (MatMul) with inputs (x: float32[n, 2], w: float32[5, 3]): shapes [n, 2] and [5, '
        "3] do not fit: the left matrix has 2 columns, the right matrix has 5 rows",
    ),
    "more axes than there may be": (
        model(
            node("Unsqueeze", ["x", "axes"], ["y"], "wide"),
            weights=(numpy_helper.from_array(np.arange(2, AXES), "axes"),),
        ),
        ortrain.UnsupportedError,
        'the model: node "wide" (Unsqueeze) with inputs (x: float32[n, 2], axes: int64[63]): "y" has 65 axes (shape '
        f"[n, 2{', 1' * 63}]), {ADVICE}",
    ),
    "an initializer of more axes than there may be": (
        model(
            node("ReduceSum", ["w"], ["s"], "sum", keepdims=0),
            node("Add", ["x", "s"], ["y"]),
            weights=(
                helper.make_tensor("w", TensorProto.FLOAT, [1] * AXES, np.ones(1, np.float32).tobytes(), raw=True),
            ),
        ),
        ortrain.InvalidModelError,
        f'the model: "w" has 65 axes (shape [1{", 1" * 64}]), {ADVICE}',
    ),
    "oversized": (
        model(MATMUL, weights=(weight(dims=[2**40, 2**40]),)),
        ortrain.InvalidModelError,
        "the model: tensor `w` has the dimensions [1099511627776, 1099511627776], which are too many elements to "
        "address",
    ),
    "negative size": (
        model(MATMUL, weights=(weight(dims=[-2, 3]),)),
        ortrain.InvalidModelError,
        "the model: tensor `w` has the dimension -2 on axis 0; dimensions must be at least 0",
    ),
    "too little data": (
        model(MATMUL, weights=(weight(raw_data=WEIGHT.raw_data[:20]),)),
        ortrain.InvalidModelError,
        "the model: tensor `w` should have 24 bytes by its dimensions and type, but raw_data holds 20",
    ),
    "unknown operators": (
        model(
            node("Frobnicate", ["x"], ["a"], "first"),
            node("Relu", ["a"], ["b"]),
            node("Defenestrate", ["b"], ["c"], "third", domain="my.domain"),
            node("Frobnicate", ["c"], ["y"], "fourth"),
        ),
        ortrain.UnsupportedError,
        'the model: the model uses operators that are not supported: Frobnicate ("first", "fourth"); '
        'my.domain:Defenestrate ("third"); an operator can be added as a function of ONNX (docs/extending.md)',
    ),
    "too new": (
        model(node("Relu", ["x"], ["y"]), opset=99),
        ortrain.UnsupportedError,
        'the model: the model uses version 99 of operator set "ai.onnx"; versions 7 to 28 are supported',
    ),
    "too old": (
        model(node("Relu", ["x"], ["y"]), opset=3),
        ortrain.UnsupportedError,
        'the model: the model uses version 3 of operator set "ai.onnx"; versions 7 to 28 are supported',
    ),
}


def test_an_input_of_more_axes_than_there_may_be() -> None:
    """A declared shape with too many axes is an error, and so is a computed shape at run time."""
    wide = helper.make_tensor_value_info("v", TensorProto.FLOAT, [1] * AXES)
    content = onnx.load_from_string(
        model(node("ReduceSum", ["v"], ["s"], "sum", keepdims=0), node("Add", ["x", "s"], ["y"]))
    )
    content.graph.input.append(wide)
    message = f'the model: "v" has 65 axes (shape [1{", 1" * 64}]), {ADVICE}'
    with pytest.raises(ortrain.InvalidModelError, match=re.escape(message)):
        ortrain.InferenceSession(content.SerializeToString())
    content = onnx.load_from_string(model(node("Reshape", ["x", "shape"], ["y"], "wide")))
    content.graph.input.append(helper.make_tensor_value_info("shape", TensorProto.INT64, ["axes"]))
    session = ortrain.InferenceSession(content.SerializeToString())
    message = (
        'node "wide" (Reshape) with inputs (x: float32[3, 2], shape: int64[65]): "y" has 65 axes (shape '
        f"[{', '.join(f'y.{axis}' for axis in range(AXES))}]), {ADVICE}"
    )
    feeds = {"x": np.ones((3, 2), np.float32), "shape": np.array([3, 2] + [1] * 63)}
    with pytest.raises(ortrain.UnsupportedError, match=re.escape(message)):
        session.run(None, feeds)


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    content, kind, sentence = MODELS[name]
    with pytest.raises(kind) as error:
        ortrain.InferenceSession(content)
    assert str(error.value) == sentence
    assert isinstance(error.value, (ortrain.OrtrainError, RuntimeError))


def test_a_shape_that_is_declared_is_advice() -> None:
    declared = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])
    session = ortrain.InferenceSession(model(node("Relu", ["x"], ["y"], "first"), output=declared))
    (y,) = session.run(None, {"x": np.ones((4, 2), np.float32)})
    np.testing.assert_array_equal(y, np.ones((4, 2), np.float32))


def test_missing_model(tmp_path: Path) -> None:
    with pytest.raises(ortrain.NoSuchFileError) as error:
        ortrain.InferenceSession(tmp_path / "model.onnx")
    assert str(error.value) == f"cannot read {tmp_path}/model.onnx: No such file or directory (os error 2)"
    assert isinstance(error.value, FileNotFoundError)
    with pytest.raises(ortrain.OrtrainError) as folder:
        ortrain.InferenceSession(tmp_path)
    assert str(folder.value) == f"cannot read {tmp_path}: Is a directory (os error 21)"


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("../secret", "which is refused: it leads out of the model's folder by `..`"),
        (
            "/etc/hostname",
            "which is refused: it is an absolute path; it must be relative to the model's folder",
        ),
        (
            "gone.bin",
            "which cannot be read: No such file or directory (os error 2); it must be beside the model",
        ),
    ],
)
def test_external_data_outside_its_folder(location: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(24))
    folder = tmp_path / "folder"
    folder.mkdir()
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2, 3], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": "0", "length": "24"}.items():
        tensor.external_data.add(key=key, value=value)
    path = folder / "model.onnx"
    path.write_bytes(model(MATMUL, weights=(tensor,)))
    with pytest.raises(ortrain.InvalidModelError) as error:
        ortrain.InferenceSession(path)
    assert str(error.value) == f"the model {path}: tensor `w` has its data in the file `{location}`, {reason}"


@pytest.mark.parametrize(
    ("array", "found", "reason"),
    [
        (
            np.full((2, 64), 0.1),
            "float64[2, 64]",
            "128 of 128 elements would be rounded; to accept this, pass .astype(np.float32)",
        ),
        (
            np.ones((2, 64), np.int64),
            "int64[2, 64]",
            "the element types differ; to convert it, pass .astype(np.float32)",
        ),
        (np.ones(64, np.float32), "float32[64]", "it should have 2 axes but has 1"),
        (np.ones((2, 63), np.float32), "float32[2, 63]", "axis 1 should be 64 but is 63"),
    ],
)
def test_inputs_of_a_session(array: np.ndarray, found: str, reason: str) -> None:
    session = ortrain.InferenceSession(PERCEPTRON)
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        session.run(None, {"x": array})
    assert str(error.value) == f'input "x" must be float32[batch, 64], got {found}: {reason}'


def test_more_memory_than_there_is() -> None:
    sizes = numpy_helper.from_array(np.asarray([2**24, 2**22, 1]), "sizes")
    session = ortrain.InferenceSession(model(node("Expand", ["x", "sizes"], ["y"], "grow"), weights=(sizes,)))
    with pytest.raises(ortrain.OrtrainError) as error:
        session.run(None, {"x": np.ones((1, 2), np.float32)})
    assert re.fullmatch(
        r"the step needs more memory than is available: the system cannot allocate \d+ bytes of memory; "
        "a smaller batch needs less",
        str(error.value),
    )


X = np.ones((4, 10), np.float32)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ([X], "expected 2 inputs (x, labels), got 1"),
        ([X, X, X], "expected 2 inputs (x, labels), got 3"),
        (
            [X, np.zeros(4, np.float32)],
            'input "labels" must be int64[batch], got float32[4]: the element types differ; to '
            "convert it, pass .astype(np.int64)",
        ),
        (
            [X, np.zeros(3, np.int64)],
            'input "labels" must be int64[batch], got int64[3]: axis 0 is 3, but "batch" is 4 in input "x"',
        ),
        (
            [X, np.asarray([0, 1, 5, 2])],
            'node "onnx::SoftmaxCrossEntropyLoss::4" (SoftmaxCrossEntropyLoss): label 5 in row 2 is not one of the 5 '
            "classes (0 to 4)",
        ),
        (
            [X, np.asarray([0, 1, -1, 2])],
            'node "onnx::SoftmaxCrossEntropyLoss::4" (SoftmaxCrossEntropyLoss): label -1 in row 2 is not one of the '
            "5 classes (0 to 4)",
        ),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_inputs_of_a_step(inputs: list[np.ndarray], sentence: str, device: str, ours: Callable[[str], Path]) -> None:
    """A failed step changes nothing: parameters and gradients stay, and the next step gives the same result."""
    run, other = Run(ours("mlp_adamw_ce"), device=device), Run(ours("mlp_adamw_ce"), device=device)
    good = [X, np.zeros(4, np.int64)]
    for one in (run, other):
        one.module(*good)
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        run.module(*inputs)
    assert str(error.value) == sentence
    for again in range(2):
        for name, parameter in run.state.parameters:
            same = other.state.parameters[name]
            np.testing.assert_array_equal(parameter.data, same.data)
            np.testing.assert_array_equal(parameter.grad, same.grad)
        if not again:
            for one in (run, other):
                one.module(*good)
                one.optimizer.step()


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_empty_batch(device: str, ours: Callable[[str], Path]) -> None:
    """The mean of no rows is NaN, the gradients are zero, and the state stays usable."""
    run = Run(ours("mlp_adamw_ce"), device=device)
    before = run.module.get_contiguous_parameters().numpy()
    loss = run.module(np.zeros((0, 10), np.float32), np.zeros(0, np.int64))
    assert np.isnan(loss)
    for _, parameter in run.state.parameters:
        assert parameter.grad is not None
        assert not parameter.grad.any()
    run.optimizer.step()
    np.testing.assert_array_equal(run.module.get_contiguous_parameters().numpy(), before)
    assert np.isfinite(run.module(X, np.zeros(4, np.int64)))


def flipped(content: bytes, at: int) -> bytes:
    """Return the content with one bit of one byte flipped."""
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


NOT_A_CHECKPOINT = (
    "{path}: this is not a checkpoint: bytes 4 to 7 are not the identifier ODTC; generate_artifacts and "
    "save_checkpoint write checkpoints"
)
CHECKPOINTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "{path}: the checkpoint is empty"),
    "garbage": (
        lambda _: b"\xff" * 200,
        NOT_A_CHECKPOINT,
    ),
    "a model": (
        lambda _: PERCEPTRON.read_bytes(),
        "{path} is a forward model, not a checkpoint; generate_artifacts makes a checkpoint of a forward model",
    ),
    "truncated": (
        lambda content: content[:500],
        "{path}: the checkpoint is cut short, extended or damaged: the checksum at its end is missing",
    ),
    "a flipped bit": (
        lambda content: flipped(content, 900),
        "{path}: the checkpoint is damaged: its checksum is {checksum}, expected {checksum}",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(name: str, ours: Callable[[str], Path], tmp_path: Path) -> None:
    damage, sentence = CHECKPOINTS[name]
    path = tmp_path / "checkpoint"
    path.write_bytes(damage((ours("mlp_adamw_ce") / "checkpoint").read_bytes()))
    with pytest.raises(ortrain.OrtrainError) as error:
        CheckpointState.load_checkpoint(path)
    pattern = re.escape(sentence.replace("{path}", str(path))).replace(r"\{checksum\}", "[0-9a-f]{8}")
    assert re.fullmatch(pattern, str(error.value))


def test_every_flipped_byte_is_found(ours: Callable[[str], Path], tmp_path: Path) -> None:
    content = (ours("mlp_adamw_ce") / "checkpoint").read_bytes()
    path = tmp_path / "checkpoint"
    for at in range(len(content)):
        path.write_bytes(flipped(content, at))
        with pytest.raises(ortrain.OrtrainError):
            CheckpointState.load_checkpoint(path)


def test_missing_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ortrain.NoSuchFileError) as error:
        CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert str(error.value) == f"there is no file {tmp_path}/checkpoint"
    with pytest.raises(ortrain.OrtrainError) as folder:
        CheckpointState.load_checkpoint(tmp_path)
    assert str(folder.value) == f"{tmp_path} is a folder, but a checkpoint is a file"


def test_model_of_another_checkpoint(run: Run) -> None:
    with pytest.raises(ortrain.InvalidModelError) as error:
        Module(PERCEPTRON, run.state)
    assert str(error.value) == (
        f"the training model {PERCEPTRON} cannot be used here: it is a forward model, which computes no "
        f"gradients; give the "
        "training model that generate_artifacts makes from it (training_model.onnx)"
    )


# Every training file in the place of another one, with the expected message; {folder} is the folder of the files.
TRAIN, EVAL, UPDATE = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"
OF_TOGETHER = "give the training model that was made together with it (training_model.onnx)"
GIVE_UPDATE = (
    "and an optimizer model needs a node that updates the parameters (AdamWOptimizer or SGDOptimizerV2), but it "
    "has none; "
    "give the optimizer model that was made together with the checkpoint (optimizer_model.onnx)"
)
GIVE_EVAL = "give the evaluation model that was made together with the training model (eval_model.onnx)"
GIVE_CHECKPOINT = (
    "not a checkpoint; give the file that generate_artifacts wrote beside it (checkpoint), or one that save_checkpoint "
    "wrote"
)
GIVE_TENSORS = "not a safetensors file; give a file that save_safetensors, or another library, wrote"
NO_MODEL = "{folder}/checkpoint is not an ONNX model: it is a training checkpoint, not a model"
NO_GRAPH = "{folder}/w.safetensors is not an ONNX model: it is a safetensors file, which has tensors but no graph"
FACES: dict[tuple[str, str], str] = {
    (
        "train",
        EVAL,
    ): "the training model {folder}/eval_model.onnx cannot be used here: it is an evaluation model, which "
    f"computes no gradients; {OF_TOGETHER}",
    (
        "train",
        UPDATE,
    ): "the training model {folder}/optimizer_model.onnx cannot be used here: it is an optimizer model, which "
    f"computes no gradients; {OF_TOGETHER}",
    (
        "train",
        "forward.onnx",
    ): "the training model {folder}/forward.onnx cannot be used here: it is a forward model, which "
    "computes no gradients; give the training model that generate_artifacts makes from it (training_model.onnx)",
    ("train", "checkpoint"): NO_MODEL,
    ("train", "w.safetensors"): NO_GRAPH,
    ("train", "other/training_model.onnx"): "the training model {folder}/other/training_model.onnx does not fit the "
    'checkpoint: the model trains "block1.weight", "block1.scale", "block1.bias" and 8 more, but the checkpoint trains'
    ' "fc1.bias", "fc1.weight", "fc2.bias" and 1 more; give the checkpoint that was made together '
    "with the model",
    (
        "eval",
        TRAIN,
    ): "the evaluation model {folder}/training_model.onnx cannot be used here: it is a training model, with an "
    'input "fc1.weight_grad.accumulation.buffer" for a gradient; give the evaluation model that was made '
    "together with it",
    (
        "eval",
        UPDATE,
    ): "the evaluation model {folder}/optimizer_model.onnx does not fit the checkpoint: it is an optimizer "
    f"model, which does not run the forward pass; {GIVE_EVAL}",
    (
        "eval",
        "forward.onnx",
    ): "the evaluation model {folder}/forward.onnx does not fit the checkpoint: it is a forward model, "
    f'with its own value of parameter "fc1.weight"; {GIVE_EVAL}',
    (
        "eval",
        "other/eval_model.onnx",
    ): "the evaluation model {folder}/other/eval_model.onnx does not fit the checkpoint: it "
    'has no input for parameter "fc1.weight" of the training model; give the one that was made together with '
    "the training "
    "model",
    ("eval", "checkpoint"): NO_MODEL,
    (
        "optimizer",
        TRAIN,
    ): f"the optimizer model {{folder}}/training_model.onnx cannot be used here: it is a training model, {GIVE_UPDATE}",
    ("optimizer", EVAL): "the optimizer model {folder}/eval_model.onnx cannot be used here: it is an evaluation model, "
    f"{GIVE_UPDATE}",
    (
        "optimizer",
        "forward.onnx",
    ): f"the optimizer model {{folder}}/forward.onnx cannot be used here: it is a forward model, {GIVE_UPDATE}",
    ("optimizer", "checkpoint"): NO_MODEL,
    ("checkpoint", TRAIN): f"{{folder}}/training_model.onnx is a training model, {GIVE_CHECKPOINT}",
    ("checkpoint", EVAL): f"{{folder}}/eval_model.onnx is an evaluation model, {GIVE_CHECKPOINT}",
    ("checkpoint", UPDATE): f"{{folder}}/optimizer_model.onnx is an optimizer model, {GIVE_CHECKPOINT}",
    (
        "checkpoint",
        "forward.onnx",
    ): "{folder}/forward.onnx is a forward model, not a checkpoint; generate_artifacts makes a "
    "checkpoint of a forward model",
    (
        "checkpoint",
        "w.safetensors",
    ): "{folder}/w.safetensors: this looks like a safetensors file, not a checkpoint; load it with load_safetensors",
    ("parameters", TRAIN): f"{{folder}}/training_model.onnx is a training model, {GIVE_CHECKPOINT}",
    ("safetensors", TRAIN): f"{{folder}}/training_model.onnx is a training model, {GIVE_TENSORS}",
    ("safetensors", "checkpoint"): "{folder}/checkpoint is a checkpoint, not a safetensors file; load_parameters and "
    "CheckpointState.load_checkpoint read checkpoints",
    (
        "artifacts",
        TRAIN,
    ): "the model {folder}/training_model.onnx cannot be used here: it is a training model, "
    "not a forward model; give the forward model from which it was made",
    (
        "artifacts",
        UPDATE,
    ): "the model {folder}/optimizer_model.onnx cannot be used here: it is an optimizer model, "
    "not a forward model; give the forward model from which it was made",
    ("artifacts", "checkpoint"): NO_MODEL,
    (
        "session",
        "forward.onnx",
    ): "the training model {folder}/forward.onnx cannot be used here: it is a forward model, which "
    "computes no gradients; give the training model that generate_artifacts makes from it (training_model.onnx)",
    ("inference", "checkpoint"): NO_MODEL,
    ("inference", "w.safetensors"): NO_GRAPH,
    ("dump", "checkpoint"): NO_MODEL,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with every file of a training, and a subfolder with the files of another training."""
    folder: Path = tmp_path_factory.mktemp("files")
    (folder / "other").mkdir()
    for to, path in ((folder, PERCEPTRON), (folder / "other", PERCEPTRON.with_name("convnet.onnx"))):
        artifacts.generate_artifacts(
            path, loss=artifacts.LossType.CrossEntropyLoss, optimizer=artifacts.OptimType.AdamW, artifact_directory=to
        )
    (folder / "forward.onnx").write_bytes(PERCEPTRON.read_bytes())
    CheckpointState.load_checkpoint(folder / "checkpoint").save_safetensors(folder / "w.safetensors")
    return folder


def state_of(folder: Path) -> CheckpointState:
    return CheckpointState.load_checkpoint(folder / "checkpoint")


LOADERS: dict[str, Callable[[Path, Path], Any]] = {
    "train": lambda folder, path: Module(path, state_of(folder)),
    "eval": lambda folder, path: Module(folder / TRAIN, state_of(folder), path),
    "optimizer": lambda folder, path: Optimizer(path, Module(folder / TRAIN, state_of(folder))),
    "checkpoint": lambda _, path: CheckpointState.load_checkpoint(path),
    "parameters": lambda folder, path: state_of(folder).load_parameters(path),
    "safetensors": lambda folder, path: state_of(folder).load_safetensors(path),
    "artifacts": lambda folder, path: artifacts.generate_artifacts(
        path, loss=artifacts.LossType.CrossEntropyLoss, artifact_directory=folder / "other"
    ),
    "session": lambda folder, path: TrainingSession(state_of(folder), path),
    "inference": lambda _, path: ortrain.InferenceSession(path),
    "dump": lambda _, path: ortrain.dump(path),
}


@pytest.mark.parametrize(("face", "name"), [pytest.param(*key, id=" for ".join(key[::-1])) for key in FACES])
def test_a_file_for_another_one(face: str, name: str, files: Path) -> None:
    with pytest.raises(ortrain.OrtrainError) as error:
        LOADERS[face](files, files / name)
    assert str(error.value) == FACES[face, name].replace("{folder}", str(files))


def test_the_checkpoint_of_other_artifacts(files: Path) -> None:
    with pytest.raises(ortrain.InvalidModelError) as error:
        Module(files / TRAIN, state_of(files / "other"))
    assert str(error.value) == (
        f"the training model {files}/training_model.onnx does not fit the checkpoint: the model trains "
        '"fc1.weight", "fc1.bias", "fc2.weight" and 1 more, but the checkpoint trains "block1.bias", '
        '"block1.scale", "block1.weight" and 8 more; give the checkpoint that was made together with the model'
    )


def test_the_checkpoint_of_other_shapes(files: Path, tmp_path: Path) -> None:
    """The parameters have the same names but other shapes."""
    message = onnx.load(PERCEPTRON)
    for tensor in message.graph.initializer:
        if tensor.name.startswith("fc2."):
            tensor.CopyFrom(numpy_helper.from_array(np.ones([7, *tensor.dims[1:]], np.float32), tensor.name))
    message.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 7
    artifacts.generate_artifacts(message, loss=artifacts.LossType.CrossEntropyLoss, artifact_directory=tmp_path)
    with pytest.raises(ortrain.InvalidModelError) as error:
        Module(files / TRAIN, state_of(tmp_path))
    assert str(error.value) == (
        f'the training model {files}/training_model.onnx does not fit the checkpoint: "fc2.weight" is '
        f"float32[10, 96] in the "
        "model, but float32[7, 96] in the checkpoint; give the checkpoint that was made together with the model"
    )


# Program that prints the output or error of a process with an instruction-set level in its environment.
LEVELS = f"""
import numpy as np
import ortrain
try:
    session = ortrain.InferenceSession({str(PERCEPTRON)!r})
    print(session.run(None, {{"x": np.zeros((2, 64), np.float32)}})[0].shape)
except ortrain.InvalidArgumentError as error:
    print(error)
print(ortrain.InferenceSession({str(PERCEPTRON)!r}, providers=["reference"]).get_inputs()[0].name)
"""


@pytest.mark.parametrize("level", ["portable", "avx2", "avx512", "", "avx1024", "AVX2"])
def test_instruction_set_levels(level: str) -> None:
    """An unknown level is an error when a backend is created, and not before."""
    command = [sys.executable, "-c", LEVELS]
    environment = os.environ | {"ORTRAIN_ISA": level}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = (
        f'the environment variable ORTRAIN_ISA is "{level}", which is not an instruction-set level; set it to '
        '"portable", "avx2" or "avx512", or unset it to use the best level of the machine'
        if level in ("avx1024", "AVX2")
        else "(2, 10)"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{said}\nx\n", "")


@pytest.mark.parametrize("mode", ["on", "off", "", "no"])
def test_machine_code_modes(mode: str) -> None:
    """An unknown mode is an error when a backend is created, and not before."""
    command = [sys.executable, "-c", LEVELS]
    environment = os.environ | {"ORTRAIN_JIT": mode}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = (
        'the environment variable ORTRAIN_JIT is "no"; set it to "off" to interpret element-wise operations, or to '
        '"on" or unset it to run them as machine code'
        if mode == "no"
        else "(2, 10)"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{said}\nx\n", "")


def test_training_model_with_an_edited_checkpoint(run: Run) -> None:
    """The error names the parameter, which has another shape in the state."""
    message = onnx.load(RECORDS / "mlp_adamw_ce" / "training_model.onnx")
    for value in message.graph.input:
        if value.name == "fc2.bias":
            value.type.tensor_type.shape.dim[0].dim_value = 6
    with pytest.raises(ortrain.InvalidModelError, match=r"fc2\.bias"):
        Module(message, run.state)
