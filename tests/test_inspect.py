"""What would be trained, and how it is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortrain
import ortrain._inspect
from ortrain import artifacts, onnxblock
from ortrain.__main__ import main
from ortrain.api import CheckpointState
from ortrain.artifacts import LossType

ROOT = Path(__file__).parent.parent
CONVNET = ROOT / "examples" / "convnet.onnx"
STATISTICS = [f"block{k}.{name}" for k in (1, 2, 3) for name in ("mean", "var")]


def constant(name: str, values: Any, dtype: Any = np.float32) -> TensorProto:
    return numpy_helper.from_array(np.asarray(values, dtype), name)


def everything() -> onnx.ModelProto:
    """A model with every sort of constant."""
    declare, node = helper.make_tensor_value_info, helper.make_node
    nodes = [
        node("Constant", [], ["kernel"], value=constant("value", np.ones((3, 4)))),
        node("Constant", [], ["half"], value=constant("value", 0.5)),
        node("MatMul", ["x", "kernel"], ["wide"], "first"),
        node("Add", ["wide", "shift"], ["shifted"], "shift it"),
        node("Mul", ["shifted", "half"], ["halved"], "halve"),
        node("Pow", ["halved", "two"], ["squares"], "square"),
        node("Gemm", ["squares", "w", "b"], ["y"], "second"),
        node("Reshape", ["table", "sizes"], ["rows"], "rows"),
        node("Equal", ["x", "limit"], ["same"], "compare"),
        node("Cast", ["same"], ["z"], "cast", to=TensorProto.FLOAT),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [declare("x", TensorProto.FLOAT, ["n", 3])],
        [declare("y", TensorProto.FLOAT, ["n", 1]), declare("z", TensorProto.FLOAT, ["n", 3])],
        [
            constant("shift", np.ones(4)),
            constant("two", [2]),
            constant("w", np.ones((4, 1))),
            constant("b", [1]),
            constant("table", np.ones(6)),
            constant("sizes", [2, 3], np.int64),
            constant("limit", np.ones(3)),
            constant("spare", np.ones(3)),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_every_sort_of_constant() -> None:
    found = {info.name: (info.role, info.reason) for info in ortrain.inspect(everything()).parameters}
    assert found == {
        "shift": ("trained", 'its floats go into node "shift it" (Add)'),
        "two": ("constant", 'it is a single number in node "square" (Pow)'),
        "w": ("trained", 'it is a weight of node "second" (Gemm)'),
        "b": ("trained", 'it is a weight of node "second" (Gemm)'),
        "table": ("constant", "no gradient of the loss reaches it"),
        "sizes": ("constant", "it is int64; floats are trained"),
        "limit": ("constant", "no gradient of the loss reaches it"),
        "spare": ("constant", "nothing uses it"),
        "kernel": ("trained", 'it is a weight of node "first" (MatMul)'),
        "half": ("constant", 'it is a single number in node "halve" (Mul)'),
    }
    only = ortrain.inspect(everything(), ["squares"])
    assert only.names("trained") == ["shift", "kernel"]
    with pytest.raises(ortrain.InvalidArgumentError, match='the model has no value "nothing"'):
        ortrain.inspect(everything(), ["nothing"])


def test_what_stands_in_the_way(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What making artifacts would say, too."""
    declare = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("ConvTranspose", ["x", "w"], ["y"], "up", output_shape=[8, 8])],
        "graph",
        [declare("x", TensorProto.FLOAT, ["n", 1, "h", "w"])],
        [declare("y", TensorProto.FLOAT, ["n", 1, 8, 8])],
        [constant("w", np.ones((1, 1, 2, 2)))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    found = ortrain.inspect(model)
    assert found.obstacle is not None
    assert 'node "up" (ConvTranspose)' in found.obstacle
    assert str(found).endswith(f"it cannot be trained as it is: {found.obstacle}\n")
    with pytest.raises(ortrain.UnsupportedError) as error:
        artifacts.generate_artifacts(model, loss=LossType.MSELoss, artifact_directory=tmp_path)
    assert str(error.value) == found.obstacle
    onnx.save(model, tmp_path / "model.onnx")
    assert main(["inspect", str(tmp_path / "model.onnx")]) == 1
    assert 'node "up" (ConvTranspose)' in capsys.readouterr().out


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(CONVNET)]) == 0
    printed = capsys.readouterr().out
    assert printed == str(ortrain.inspect(CONVNET))
    lines = printed.splitlines()
    assert lines[0] == "trained: 11 tensors, 25978 elements"
    assert '  fc.bias: float32[10]: it is a weight of node "fc" (Gemm)' in lines
    assert "statistics, in the checkpoint but not trained: 6 tensors, 224 elements" in lines
    assert main(["inspect", str(CONVNET), "--loss-input", "pool1"]) == 0
    assert "trained: 6 tensors" in capsys.readouterr().out
    assert main(["inspect", "no/such/file.onnx"]) == 1
    assert "no/such/file.onnx" in capsys.readouterr().err


def trained(folder: Path) -> tuple[list[str], list[str]]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return (
        [name for name, parameter in state.parameters if parameter.requires_grad],
        [name for name, parameter in state.parameters if not parameter.requires_grad],
    )


HEAD = ["fc.bias", "fc.weight"]
ALL = sorted([*HEAD, *(f"block{k}.{name}" for k in (1, 2, 3) for name in ("weight", "scale", "bias"))])


@pytest.mark.parametrize(
    ("requires_grad", "frozen", "want", "want_frozen"),
    [
        (None, None, ALL, STATISTICS),
        (["fc.*"], None, HEAD, []),
        (["fc.weight", "*.bias"], None, sorted(["fc.weight", *(name for name in ALL if name.endswith("bias"))]), None),
        (lambda info: len(info.shape) == 4, None, [f"block{k}.weight" for k in (1, 2, 3)], []),
        (None, ["block[12].*"], [n for n in ALL if n[:6] not in ("block1", "block2")], None),
        (
            HEAD,
            lambda info: info.name.startswith("block3"),
            HEAD,
            sorted(f"block3.{n}" for n in ("bias", "mean", "scale", "var", "weight")),
        ),
    ],
    ids=["all", "pattern", "patterns", "callable", "frozen patterns", "frozen callable"],
)
def test_choices(
    requires_grad: Any, frozen: Any, want: list[str], want_frozen: list[str] | None, tmp_path: Path
) -> None:
    artifacts.generate_artifacts(
        CONVNET, requires_grad, frozen, loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path
    )
    found, found_frozen = trained(tmp_path)
    assert found == want
    assert want_frozen is None or found_frozen == want_frozen


@pytest.mark.parametrize(
    ("loss", "inputs", "want"),
    [
        (LossType.MSELoss, ["squares"], ["kernel", "shift"]),
        (artifacts.Loss(LossType.MSELoss, scores="squares"), None, ["kernel", "shift"]),
        ([artifacts.Loss(LossType.L1Loss, scores="y")], None, ["b", "kernel", "shift", "w"]),
        (onnxblock.loss.MSELoss(), ["squares"], ["kernel", "shift"]),
    ],
)
def test_what_the_loss_depends_on(loss: Any, inputs: Sequence[str] | None, want: list[str], tmp_path: Path) -> None:
    artifacts.generate_artifacts(everything(), loss=loss, loss_input_names=inputs, artifact_directory=tmp_path)
    assert trained(tmp_path) == (want, [])


def test_patterns_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        artifacts.generate_artifacts(CONVNET, ["head.*"], loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path)
    assert str(error.value) == "requires_grad: the pattern 'head.*' matches no parameter of the model"
    with pytest.raises(ortrain.InvalidArgumentError, match="no parameters are to be trained"):
        artifacts.generate_artifacts(
            CONVNET, lambda _: False, loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path
        )
    assert not list(tmp_path.iterdir())
