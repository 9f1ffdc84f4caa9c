"""What a user reads when something is wrong with what was given. Every sentence is quoted in full."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import RECORDS, Run
from onnx import NodeProto, TensorProto, helper, numpy_helper

import ortrain
from ortrain.api import CheckpointState, Module

PERCEPTRON = Path(__file__).parent.parent / "examples" / "perceptron.onnx"
WEIGHT = numpy_helper.from_array(np.ones((2, 3), np.float32), "w")


def node(op: str, inputs: list[str], outputs: list[str], name: str = "", **attributes: Any) -> NodeProto:
    return helper.make_node(op, inputs, outputs, name, **attributes)


def model(*nodes: NodeProto, weights: tuple[TensorProto, ...] = (), output: Any = None, opset: int = 17) -> bytes:
    """A model from x, float32[n, 2], to y."""
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
    """A float32[2, 3] weight with some fields changed."""
    tensor = TensorProto()
    tensor.CopyFrom(WEIGHT)
    if "dims" in changes:
        tensor.dims[:] = changes["dims"]
    if "raw_data" in changes:
        tensor.raw_data = changes["raw_data"]
    return tensor


MATMUL = node("MatMul", ["x", "w"], ["y"], "product")

MODELS: dict[str, tuple[bytes, type[Exception], str]] = {
    "empty": (b"", ortrain.InvalidModelError, "the model is empty; an ONNX model was expected"),
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
    "truncated": (
        PERCEPTRON.read_bytes()[:1000],
        ortrain.InvalidModelError,
        "the model is cut short: graph, at byte 3 of 1000, is longer than what is left; was the file copied or "
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
        'the model: "y" is made twice: node "second" (Tanh) makes it again',
    ),
    "never made": (
        model(node("Add", ["x", "z"], ["y"], "first")),
        ortrain.InvalidModelError,
        'the model: node "first" (Add) uses "z", which is no input, initializer or output of another node',
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
        'the model: node "product" (MatMul) with inputs (x: float32[n, 2], w: float32[5, 3]): shapes [n, 2] and [5, 3] '
        "do not fit: rows of the left have 2 elements, columns of the right 5",
    ),
    "oversized": (
        model(MATMUL, weights=(weight(dims=[2**40, 2**40]),)),
        ortrain.InvalidModelError,
        "the model: tensor `w` has the dimensions [1099511627776, 1099511627776], which are more elements than can be "
        "addressed",
    ),
    "negative size": (
        model(MATMUL, weights=(weight(dims=[-2, 3]),)),
        ortrain.InvalidModelError,
        "the model: tensor `w` has the dimension -2 on axis 0; a stored tensor has dimensions of zero or more",
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
            "which cannot be read: No such file or directory (os error 2); it must lie beside the model",
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
        (np.ones((2, 64)), "float64[2, 64]", "the element types differ"),
        (np.ones(64, np.float32), "float32[64]", "it should have 2 axes but has 1"),
        (np.ones((2, 63), np.float32), "float32[2, 63]", "axis 1 should be 64 but is 63"),
    ],
)
def test_inputs_of_a_session(array: np.ndarray, found: str, reason: str) -> None:
    session = ortrain.InferenceSession(PERCEPTRON)
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        session.run(None, {"x": array})
    assert str(error.value) == f'input "x" should be float32[batch, 64], but {found} was given: {reason}'


def test_more_memory_than_there_is() -> None:
    sizes = numpy_helper.from_array(np.asarray([2**24, 2**22, 1]), "sizes")
    session = ortrain.InferenceSession(model(node("Expand", ["x", "sizes"], ["y"], "grow"), weights=(sizes,)))
    with pytest.raises(ortrain.OrtrainError) as error:
        session.run(None, {"x": np.ones((1, 2), np.float32)})
    assert re.fullmatch(
        r"the step needs more memory than there is: the system does not give \d+ bytes of memory; "
        "a smaller batch needs less",
        str(error.value),
    )


X = np.ones((4, 10), np.float32)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ([X], "2 inputs are needed (x, labels), but 1 were given"),
        ([X, X, X], "2 inputs are needed (x, labels), but 3 were given"),
        (
            [X, np.zeros(4, np.int32)],
            'input "labels" should be int64[batch], but int32[4] was given: the element types differ',
        ),
        (
            [X, np.zeros(3, np.int64)],
            'input "labels" should be int64[batch], but int64[3] was given: axis 0 is 3, but "batch" is 4 in input "x"',
        ),
        (
            [X, np.asarray([0, 1, 5, 2])],
            'node "onnx::SoftmaxCrossEntropyLoss::4" (SoftmaxCrossEntropyLoss): index 5 in row 2 is out of range for 5 '
            "entries (0 to 4)",
        ),
        (
            [X, np.asarray([0, 1, -1, 2])],
            'node "onnx::SoftmaxCrossEntropyLoss::4" (SoftmaxCrossEntropyLoss): index -1 in row 2 is out of range for '
            "5 entries (0 to 4)",
        ),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_inputs_of_a_step(inputs: list[np.ndarray], sentence: str, device: str, ours: Callable[[str], Path]) -> None:
    """A step that fails has changed nothing: parameters, gradients, and what the next step does."""
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
    """The mean over nothing is not a number; the gradients are zero, and nothing is spoiled."""
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
    """One bit of one byte differs."""
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


NOT_A_CHECKPOINT = (
    "{path}: this is not a checkpoint, which has the identifier ODTC in bytes 4 to 7; generate_artifacts and "
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
        NOT_A_CHECKPOINT,
    ),
    "truncated": (
        lambda content: content[:500],
        "{path}: the checksum at the end of the checkpoint is missing, so it was cut short, extended or is damaged",
    ),
    "a flipped bit": (
        lambda content: flipped(content, 900),
        "{path}: the checkpoint is damaged: its checksum is {checksum} but was {checksum} when it was written",
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
        f"the training model {PERCEPTRON} does not fit the checkpoint: parameter "
        '"fc1.bias" is to be trained by the checkpoint, but the model has no input of this name'
    )


def test_training_model_with_an_edited_checkpoint(run: Run) -> None:
    """A parameter of another shape than the state's is named."""
    message = onnx.load(RECORDS / "mlp_adamw_ce" / "training_model.onnx")
    for value in message.graph.input:
        if value.name == "fc2.bias":
            value.type.tensor_type.shape.dim[0].dim_value = 6
    with pytest.raises(ortrain.InvalidModelError, match=r"fc2\.bias"):
        Module(message, run.state)
