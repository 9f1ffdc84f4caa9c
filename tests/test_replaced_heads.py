"""Replacing the last layer: the usual model endings, the nodes after them, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

FLOAT = TensorProto.FLOAT
OLD, NEW, WIDTH = 7, 4, 12


def model(nodes: list[Any], weights: dict[str, tuple[int, ...]], *, image: bool = False) -> ModelProto:
    """Return a model with ``hidden`` as the input of its head: vectors, or images of 3 by 5."""
    rng = np.random.default_rng(1)
    made = {"first": rng.standard_normal((WIDTH, 6, 1, 1) if image else (6, WIDTH)).astype(np.float32)}
    made |= {name: rng.standard_normal(dims).astype(np.float32) for name, dims in weights.items()}
    tensors = [numpy_helper.from_array(value, name) for name, value in made.items()]
    before = helper.make_node("Conv" if image else "MatMul", ["x", "first"], ["before"])
    graph = helper.make_graph(
        [before, helper.make_node("Tanh", ["before"], ["hidden"]), *nodes],
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, ["N", 6, 3, 5] if image else ["N", 6])],
        [helper.make_tensor_value_info("y", FLOAT, ["N", OLD, 3, 5] if len(nodes) == 1 and image else ["N", OLD])],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def node(op: str, inputs: list[str], output: str = "y", **attributes: Any) -> Any:
    return helper.make_node(op, inputs, [output], f"the {op}", **attributes)


ENDINGS: dict[str, tuple[list[Any], dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], bool]] = {
    "Gemm": (
        [node("Gemm", ["hidden", "w", "b"], transB=1)],
        {"w": (OLD, WIDTH), "b": (OLD,)},
        {"w": (NEW, WIDTH), "b": (NEW,)},
        False,
    ),
    "Gemm, not turned, no bias": (
        [node("Gemm", ["hidden", "w"], "scores"), node("Softmax", ["scores"])],
        {"w": (WIDTH, OLD)},
        {"w": (WIDTH, NEW)},
        False,
    ),
    "MatMul": ([node("MatMul", ["hidden", "w"])], {"w": (WIDTH, OLD)}, {"w": (WIDTH, NEW)}, False),
    "MatMul and Add": (
        [
            node("MatMul", ["hidden", "w"], "product"),
            node("Add", ["b", "product"], "scores"),
            node("LogSoftmax", ["scores"]),
        ],
        {"w": (WIDTH, OLD), "b": (1, OLD)},
        {"w": (WIDTH, NEW), "b": (1, NEW)},
        False,
    ),
    "Conv": (
        [
            node("Conv", ["hidden", "w", "b"], "cells"),
            node("Relu", ["cells"], "positive"),
            node("GlobalAveragePool", ["positive"], "pooled"),
            node("Flatten", ["pooled"], "scores"),
            node("Softmax", ["scores"]),
        ],
        {"w": (OLD, WIDTH, 1, 1), "b": (OLD,)},
        {"w": (NEW, WIDTH, 1, 1), "b": (NEW,)},
        True,
    ),
    "Conv alone": ([node("Conv", ["hidden", "w"])], {"w": (OLD, WIDTH, 1, 1)}, {"w": (NEW, WIDTH, 1, 1)}, True),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_usual_endings(ending: str, tmp_path: Path) -> None:
    """Shapes fit the new classes, values the documented distribution; onnxruntime runs the model, and it learns."""
    nodes, weights, wanted, image = ENDINGS[ending]
    old = model(nodes, weights, image=image)
    made = onnx.ModelProto.FromString(artifacts.replace_head(old, NEW, seed=3))
    onnx.checker.check_model(made, full_check=True)
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
    before = {tensor.name: numpy_helper.to_array(tensor) for tensor in old.graph.initializer}
    np.testing.assert_array_equal(values["first"], before["first"])
    for name, dims in wanted.items():
        assert values[name].shape == dims
        assert np.abs(values[name]).max() <= 1 / np.sqrt(WIDTH) + 1e-6
        assert len(np.unique(values[name])) > 1
    assert np.abs(values["w"]).max() > 0.8 / np.sqrt(WIDTH)
    assert artifacts.replace_head(old, NEW, seed=3) == artifacts.replace_head(old, NEW, seed=3)
    assert artifacts.replace_head(old, NEW, seed=3) != artifacts.replace_head(old, NEW, seed=4)
    (output,) = made.graph.output
    assert output.type.tensor_type.shape.dim[1].dim_value == NEW

    x = np.random.default_rng(2).standard_normal((8, 6, 3, 5) if image else (8, 6)).astype(np.float32)
    theirs = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = theirs.run(None, {"x": x})
    assert y.shape[:2] == (8, NEW)
    np.testing.assert_allclose(ortrain.InferenceSession(made).run(None, {"x": x})[0], y, rtol=1e-4, atol=1e-5)
    artifacts.generate_artifacts(
        made.SerializeToString(),
        requires_grad=list(wanted),
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.01)
    losses = []
    for _ in range(5):
        losses.append(float(module(x, np.full_like(y, 0.3))))
        optimizer.step()
        module.lazy_reset_grad()
    assert losses[-1] < losses[0]


def test_a_head_in_the_middle() -> None:
    """An inner head is found by the name of its output."""
    nodes = [node("Gemm", ["hidden", "w"], "scores"), node("Gemm", ["scores", "v"])]
    old = model(nodes, {"w": (WIDTH, OLD), "v": (OLD, OLD)})
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        artifacts.replace_head(old, NEW, output="scores")
    assert str(error.value).startswith(
        f'the nodes after node "the Gemm" (Gemm) fit its {OLD} classes, but not {NEW}: the model: node "the Gemm"'
    )
    assert str(error.value).endswith("; name the scores as an output of the model, and rebuild the rest")
    with pytest.raises(ortrain.InvalidArgumentError, match='the model has no value "nothing", whose head is to be'):
        artifacts.replace_head(old, NEW, output="nothing")


NOT: dict[str, tuple[list[Any], dict[str, tuple[int, ...]], str]] = {
    "no layer": (
        [node("Elu", ["hidden"])],
        {},
        'the model: "y" is computed by node "the Elu" (Elu), which is not a head; name the result of a Gemm, a '
        "MatMul (with an Add), or a Conv with a kernel of size 1, with constant weights",
    ),
    "no layer at all": (
        [helper.make_node("Relu", ["x"], ["y"])],
        {},
        'the model: "y" has no head: there is no layer between "x" and it',
    ),
    "computed weights": (
        [node("Tanh", ["w"], "v"), node("Gemm", ["hidden", "v"])],
        {"w": (WIDTH, OLD)},
        'the model: "y" is computed by node "the Gemm" (Gemm), which is not a head',
    ),
    "shared weights": (
        [node("Gemm", ["hidden", "w"], "z"), node("ReduceSum", ["w"], "sum"), node("Identity", ["z"])],
        {"w": (WIDTH, OLD)},
        'the model: node "the Gemm" (Gemm) shares "w" with other nodes: a new head would change them, too',
    ),
}


@pytest.mark.parametrize("name", NOT)
def test_no_head(name: str) -> None:
    nodes, weights, sentence = NOT[name]
    with pytest.raises(ortrain.OrtrainError) as error:
        artifacts.replace_head(model(nodes, weights), NEW)
    assert str(error.value).startswith(sentence)


def test_no_classes() -> None:
    with pytest.raises(ortrain.InvalidArgumentError, match="the number of classes must be at least 1"):
        artifacts.replace_head(model([node("MatMul", ["hidden", "w"])], {"w": (WIDTH, OLD)}), 0)
    with pytest.raises((TypeError, OverflowError)):
        artifacts.replace_head(model([node("MatMul", ["hidden", "w"])], {"w": (WIDTH, OLD)}), -1)
    with pytest.raises(TypeError):
        artifacts.replace_head(model([node("MatMul", ["hidden", "w"])], {"w": (WIDTH, OLD)}), 2.5)  # type: ignore[arg-type]
