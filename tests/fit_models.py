"""Small models for the tests of ``Model.fit``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
FLOAT = TensorProto.FLOAT
_declare = helper.make_tensor_value_info


def _weights(name: str, *shape: int, seed: int = 0) -> Any:
    rng = np.random.default_rng([seed, *shape])
    return numpy_helper.from_array((rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32), name)


def _model(nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: list[Any]) -> bytes:
    graph = helper.make_graph(nodes, "net", inputs, outputs, weights)
    content: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()
    return content


def net(
    outputs: int = 3, end: str | None = None, *, inputs: int = 4, batch: int | str = "batch", hidden: int = 8
) -> bytes:
    """Return a perceptron: ``x`` to ``y``, with an operator such as ``Softmax`` at its end."""
    last = "y" if end is None else "scores"
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], "layer1"),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "w2", "b2"], [last], "layer2"),
    ]
    if end is not None:
        attributes = {"axis": -1} if end in ("Softmax", "LogSoftmax") else {}
        nodes.append(helper.make_node(end, [last], ["y"], **attributes))
    weights = [
        _weights("w1", inputs, hidden),
        _weights("b1", hidden),
        _weights("w2", hidden, outputs),
        _weights("b2", outputs),
    ]
    return _model(nodes, [_declare("x", FLOAT, [batch, inputs])], [_declare("y", FLOAT, [batch, outputs])], weights)


def two_ways() -> bytes:
    """Return a model with the inputs ``a`` and ``b`` and the outputs ``label`` (3 scores) and ``size`` (1 number)."""
    nodes = [
        helper.make_node("Concat", ["a", "b"], ["ab"], axis=1),
        helper.make_node("Gemm", ["ab", "w1", "b1"], ["h"]),
        helper.make_node("Tanh", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "w2", "b2"], ["label"]),
        helper.make_node("Gemm", ["r", "w3", "b3"], ["size"]),
    ]
    weights = [
        _weights("w1", 5, 8),
        _weights("b1", 8),
        _weights("w2", 8, 3),
        _weights("b2", 3),
        _weights("w3", 8, 1),
        _weights("b3", 1),
    ]
    inputs = [_declare("a", FLOAT, ["batch", 2]), _declare("b", FLOAT, ["batch", 3])]
    return _model(
        nodes, inputs, [_declare("label", FLOAT, ["batch", 3]), _declare("size", FLOAT, ["batch", 1])], weights
    )


def language_model(words: int = 11, width: int = 6) -> bytes:
    """Return a model of tokens: ``ids`` [batch, length] to ``logits`` [batch, length, words]."""
    nodes = [
        helper.make_node("Gather", ["embedding", "ids"], ["e"]),
        helper.make_node("MatMul", ["e", "w"], ["logits"]),
    ]
    weights = [_weights("embedding", words, width), _weights("w", width, words)]
    return _model(
        nodes,
        [_declare("ids", TensorProto.INT64, ["batch", "length"])],
        [_declare("logits", FLOAT, ["batch", "length", words])],
        weights,
    )


def bound_to_batch(batch: int = 4, outputs: int = 3) -> bytes:
    """Return a model with a fixed batch size: each row depends on the mean of all rows."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[0], keepdims=1),
        helper.make_node("Mul", ["m", "quarter"], ["z"]),
        helper.make_node("Add", ["x", "z"], ["xz"]),
        helper.make_node("Gemm", ["xz", "w", "b"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.full(1, 0.25, np.float32), "quarter"),
        _weights("w", 4, outputs),
        _weights("b", outputs),
    ]
    return _model(nodes, [_declare("x", FLOAT, [batch, 4])], [_declare("y", FLOAT, [batch, outputs])], weights)


def with_dropout() -> bytes:
    """Return a perceptron of 4 inputs and 3 scores, with Dropout."""
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Dropout", ["r", "ratio"], ["d"]),
        helper.make_node("Gemm", ["d", "w2", "b2"], ["y"]),
    ]
    ratio = numpy_helper.from_array(np.array(0.5, np.float32), "ratio")
    weights = [_weights("w1", 4, 8), _weights("b1", 8), _weights("w2", 8, 3), _weights("b2", 3), ratio]
    return _model(nodes, [_declare("x", FLOAT, ["batch", 4])], [_declare("y", FLOAT, ["batch", 3])], weights)


def rows(count: int = 40, inputs: int = 4, classes: int = 3, seed: int = 0) -> tuple[Array, Array]:
    """Return rows and the classes that a linear function gives them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, inputs)).astype(np.float32)
    return x, (x @ rng.standard_normal((inputs, classes))).argmax(1)
