"""Loops and Scans like onnxruntime, written out and as schedules of their own; loops that do not end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
import pytest
from conftest import BACKENDS
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

import ortrain

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
OPSET = 17
# float32 after some hundred steps of a cell whose values lie within -1 and 1.
TOLERANCE = 2e-5
# So many steps of a cell are more nodes than are written out.
MANY_STEPS = 600

Values = Sequence[tuple[str, int, Sequence[int | str] | None]]


def graph(
    nodes: list[Any], inputs: Values, outputs: Values, weights: dict[str, np.ndarray] | None = None
) -> GraphProto:
    infos = [[helper.make_tensor_value_info(*value) for value in values] for values in (inputs, outputs)]
    initializers = [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()]
    return helper.make_graph(nodes, "graph", *infos, initializers)


def model(made: GraphProto) -> ModelProto:
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)


def assert_like_onnxruntime(proto: ModelProto, backend: str, *feeds: dict[str, np.ndarray]) -> None:
    reference = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    session = ortrain.InferenceSession(proto, providers=[backend])
    for feed in feeds:
        for got, want in zip(session.run(None, feed), reference.run(None, feed), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE, strict=True)


def node(op: str, inputs: Sequence[str], *outputs: str, **attributes: Any) -> Any:
    return helper.make_node(op, list(inputs), list(outputs), **attributes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reverse", [0, 1])
def test_a_cell_of_any_length(backend: str, reverse: int) -> None:
    random = np.random.default_rng(1)
    weights = {"w": random.standard_normal((3, 6)), "r": random.standard_normal((6, 6)) / 6}
    cell = [
        node("MatMul", ["x", "w"], "xw"),
        node("MatMul", ["h", "r"], "hr"),
        node("Add", ["xw", "hr"], "sum"),
        node("Tanh", ["sum"], "next"),
        node("Mul", ["next", "next"], "out"),
    ]
    body = graph(cell, [("h", FLOAT, [2, 6]), ("x", FLOAT, [2, 3])], [("next", FLOAT, [2, 6]), ("out", FLOAT, [2, 6])])
    directions = {"scan_input_directions": [reverse], "scan_input_axes": [1], "scan_output_axes": [-2]}
    scan = node("Scan", ["start", "steps"], "last", "all", body=body, num_scan_inputs=1, **directions)
    inputs = [("start", FLOAT, [2, 6]), ("steps", FLOAT, [2, "time", 3])]
    outputs = [("last", FLOAT, [2, 6]), ("all", FLOAT, [2, "time", 6])]
    given = {name: value.astype(np.float32) for name, value in weights.items()}
    start = random.standard_normal((2, 6)).astype(np.float32)
    lengths = (1, 5) if backend == "reference" else (1, 5, MANY_STEPS)
    feeds = [{"start": start, "steps": random.standard_normal((2, n, 3)).astype(np.float32)} for n in lengths]
    assert_like_onnxruntime(model(graph([scan], inputs, outputs, given)), backend, *feeds)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loop_in_a_scan(backend: str) -> None:
    """The row says how often it is doubled; what is collected grows with no other row."""
    inner = graph(
        [node("Add", ["v", "v"], "twice"), node("Identity", ["on"], "still")],
        [("i", INT64, []), ("on", BOOL, []), ("v", FLOAT, [3])],
        [("still", BOOL, []), ("twice", FLOAT, [3])],
    )
    loop = [
        node("Cast", ["count"], "times", to=INT64),
        node("Loop", ["times", "", "x"], "large", body=inner),
        node("Add", ["large", "total"], "next"),
        node("Identity", ["next"], "out"),
    ]
    body = graph(
        loop,
        [("total", FLOAT, [3]), ("x", FLOAT, [3]), ("count", FLOAT, [])],
        [("next", FLOAT, [3]), ("out", FLOAT, [3])],
    )
    scan = node("Scan", ["start", "rows", "counts"], "sum", "sums", body=body, num_scan_inputs=2)
    inputs = [("start", FLOAT, [3]), ("rows", FLOAT, ["n", 3]), ("counts", FLOAT, ["n"])]
    outputs = [("sum", FLOAT, [3]), ("sums", FLOAT, ["n", 3])]
    random = np.random.default_rng(2)
    feeds = [
        {
            "start": np.zeros(3, np.float32),
            "rows": random.standard_normal((n, 3)).astype(np.float32),
            "counts": random.integers(0, 4, n).astype(np.float32),
        }
        for n in (1, 4)
    ]
    assert_like_onnxruntime(model(graph([scan], inputs, outputs)), backend, *feeds)


def while_model(*, most: bool = True, collect: bool = True) -> ModelProto:
    """v = v + v while v is below the limit, at most so often."""
    nodes = [
        node("Add", ["v", "v"], "twice"),
        node("Less", ["twice", "limit"], "still"),
        node("Identity", ["v"], "before"),
    ]
    outputs: list[Any] = [("still", BOOL, []), ("twice", FLOAT, []), *([("before", FLOAT, [])] if collect else [])]
    body = graph(nodes, [("i", INT64, []), ("on", BOOL, []), ("v", FLOAT, [])], outputs)
    results = ["last", "all"] if collect else ["last"]
    loop = node("Loop", ["most" if most else "", "", "start"], *results, body=body)
    inputs: list[Any] = [("start", FLOAT, []), ("limit", FLOAT, []), *([("most", INT64, [])] if most else [])]
    made: list[Any] = [("last", FLOAT, []), *([("all", FLOAT, ["n"])] if collect else [])]
    return model(graph([loop], inputs, made))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loop_that_ends_by_itself(backend: str) -> None:
    feeds = [
        {"start": np.float32(1), "limit": np.float32(limit), "most": np.int64(most)}
        for limit in (0, 1, 5, 1000)
        for most in (-1, 0, 1, 4, 100)
    ]
    assert_like_onnxruntime(while_model(), backend, *[{k: np.asarray(v) for k, v in feed.items()} for feed in feeds])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_value_that_grows(backend: str) -> None:
    body = graph(
        [node("Concat", ["v", "more"], "next", axis=0), node("Identity", ["on"], "still")],
        [("i", INT64, []), ("on", BOOL, []), ("v", FLOAT, ["n"])],
        [("still", BOOL, []), ("next", FLOAT, ["m"])],
    )
    loop = node("Loop", ["count", "", "start"], "last", body=body)
    inputs = [("start", FLOAT, [2]), ("more", FLOAT, [3]), ("count", INT64, [])]
    feeds = [
        {"start": np.arange(2, dtype=np.float32), "more": np.arange(3, dtype=np.float32), "count": np.asarray(count)}
        for count in (0, 1, 3)
    ]
    assert_like_onnxruntime(model(graph([loop], inputs, [("last", FLOAT, ["k"])])), backend, *feeds)


@pytest.mark.parametrize("limit", [None, 50])
def test_an_endless_loop(limit: int | None) -> None:
    options = ortrain.SessionOptions()
    options.iteration_limit = limit
    session = ortrain.InferenceSession(while_model(most=False, collect=False), options)
    feeds = {"start": np.asarray(0, np.float32), "limit": np.asarray(1, np.float32)}
    with pytest.raises(ortrain.OrtrainError) as caught:
        session.run(None, feeds)
    for part in ('"last" (Loop)', f"after {limit or 1_000_000} iterations", "iteration_limit", "raise the limit"):
        assert part in str(caught.value)
    # One that ends is not stopped.
    last = session.run(None, feeds | {"start": np.asarray(2.0**-20, np.float32)})[0]
    assert last == 1


def test_a_limit_is_a_number_of_iterations() -> None:
    options = ortrain.SessionOptions()
    options.iteration_limit = -1
    with pytest.raises(ortrain.InvalidArgumentError, match="iteration_limit is a number of iterations, not -1"):
        ortrain.InferenceSession(while_model(), options)
