"""Loops, Scans and branches against onnxruntime, and in training; endless loops; branches that contradict shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from conftest import DEVICES
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
OPSET = 17
# Tolerance of float32 after some hundred steps of a cell with values between -1 and 1.
TOLERANCE = 2e-5
# Step of central differences of a loss around 1, and their tolerance; onnxruntime computes the loss in float32.
STEP = 1e-2
DIFFERENCES = 1e-3
# Step of central differences of a loss in float64.
FINE_STEP = 1e-5
# Number of steps of a cell above the limit for unrolling.
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


@pytest.mark.parametrize("backend", DEVICES)
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


@pytest.mark.parametrize("backend", DEVICES)
def test_a_loop_in_a_scan(backend: str) -> None:
    """Each row gives the number of its own doublings, and the scan collects rows of equal size."""
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
    """Return a loop that doubles v while v is below the limit, at most `most` times."""
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


@pytest.mark.parametrize("backend", DEVICES)
def test_a_loop_that_ends_by_itself(backend: str) -> None:
    feeds = [
        {"start": np.float32(1), "limit": np.float32(limit), "most": np.int64(most)}
        for limit in (0, 1, 5, 1000)
        for most in (-1, 0, 1, 4, 100)
    ]
    assert_like_onnxruntime(while_model(), backend, *[{k: np.asarray(v) for k, v in feed.items()} for feed in feeds])


@pytest.mark.parametrize("backend", DEVICES)
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
    for part in ('Loop -> "last"', f"after {limit or 1_000_000} iterations", "iteration_limit", "raise the limit"):
        assert part in str(caught.value)
    # A loop that ends before the limit is not stopped.
    last = session.run(None, feeds | {"start": np.asarray(2.0**-20, np.float32)})[0]
    assert last == 1


def test_a_limit_is_a_number_of_iterations() -> None:
    options = ortrain.SessionOptions()
    options.iteration_limit = -1
    with pytest.raises(ortrain.InvalidArgumentError, match="iteration_limit must be at least 0, got -1"):
        ortrain.InferenceSession(while_model(), options)


RATES = {16000: 6, 8000: 3}


def two_rates(declared: int | None = None) -> ModelProto:
    """Return a layer for each of two rates: x has 6 columns at 16000 and 3 at any other; no branch fits both.

    `declared` is the number of columns that both branches declare for their result, which has 3.
    """
    weights = {f"w{columns}": np.eye(columns, 3, dtype=np.float32) + np.float32(0.1) for columns in RATES.values()}
    weights["fast"] = np.array(16000)

    def branch(columns: int) -> GraphProto:
        layer = [
            node("MatMul", ["x", f"w{columns}"], f"product{columns}", name=f"layer{columns}"),
            node("Tanh", [f"product{columns}"], f"result{columns}"),
        ]
        made = graph(layer, [], [(f"result{columns}", FLOAT, declared and ["n", declared])])
        if declared:
            made.value_info.append(helper.make_tensor_value_info(f"product{columns}", FLOAT, [declared]))
        return made

    nodes = [
        node("Equal", ["rate", "fast"], "is_fast"),
        node("If", ["is_fast"], "y", name="chosen", then_branch=branch(6), else_branch=branch(3)),
    ]
    inputs = [("x", FLOAT, ["n", "columns"]), ("rate", INT64, [])]
    return model(graph(nodes, inputs, [("y", FLOAT, ["n", declared or 3])], weights))


def of_rate(rate: int) -> dict[str, np.ndarray]:
    values = np.random.default_rng(rate).standard_normal((2, RATES[rate]), np.float32)
    return {"x": values, "rate": np.array(rate)}


@pytest.mark.parametrize("backend", DEVICES)
@pytest.mark.parametrize("declared", [None, 5])
def test_skipped_branch_may_contradict_the_shapes(declared: int | None, backend: str) -> None:
    """Shapes that a file declares may contradict the computed ones, too."""
    assert_like_onnxruntime(two_rates(declared), backend, of_rate(16000), of_rate(8000), of_rate(16000))


WRONG_BRANCH = (
    'node "chosen" (If) takes its else_branch, which cannot be run on these inputs: node "layer3" (MatMul) with inputs '
    "(x: float32[2, 6], w3: float32[3, 3]): shapes [2, 6] and [3, 3] do not fit: the left matrix has 6 columns, the "
    "right matrix has 3 rows"
)


@pytest.mark.parametrize("backend", DEVICES)
def test_executed_branch_that_contradicts_the_shapes_is_an_error(backend: str) -> None:
    session = ortrain.InferenceSession(two_rates(), providers=[backend])
    wrong = {**of_rate(16000), "rate": np.array(8000)}
    for _ in range(2):
        with pytest.raises(ortrain.InvalidArgumentError) as refused:
            session.run(None, wrong)
        assert str(refused.value) == WRONG_BRANCH
    assert session.run(None, of_rate(16000))[0].shape == (2, 3)


@pytest.mark.parametrize("declared", [None, 5])
def test_branches_for_different_shapes_train(declared: int | None, tmp_path: Path) -> None:
    """Each step trains the layer of its rate, by the slope of the loss; a failed step changes nothing."""
    proto = two_rates(declared)
    artifacts.generate_artifacts(
        proto,
        requires_grad=["w6", "w3"],
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    target = np.full((2, 3), 0.25, np.float32)

    def loss_at(name: str, value: np.ndarray, feed: dict[str, np.ndarray]) -> float:
        moved = ModelProto()
        moved.CopyFrom(proto)
        for tensor in moved.graph.initializer:
            if tensor.name == name:
                tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float32), name))
        theirs = onnxruntime.InferenceSession(moved.SerializeToString(), providers=["CPUExecutionProvider"])
        return float(np.mean((theirs.run(None, feed)[0].astype(np.float64) - target) ** 2))

    for rate, name, other in [(16000, "w6", "w3"), (8000, "w3", "w6")]:
        feed = of_rate(rate)
        losses = [float(module(feed["x"], feed["rate"], target))]
        gradient = np.array(state.parameters[name].grad)
        assert not np.any(state.parameters[other].grad)
        (start,) = (numpy_helper.to_array(tensor) for tensor in proto.graph.initializer if tensor.name == name)
        direction = np.random.default_rng(1).standard_normal(start.shape)
        ends = [loss_at(name, start + sign * STEP * direction, feed) for sign in (1, -1)]
        assert abs((ends[0] - ends[1]) / (2 * STEP) - np.sum(gradient * direction)) <= DIFFERENCES
        module.lazy_reset_grad()
        for _ in range(5):
            losses.append(float(module(feed["x"], feed["rate"], target)))
            optimizer.step()
            module.lazy_reset_grad()
        assert losses[-1] < losses[1] == losses[0]

    before = {name: (np.array(parameter.data), np.array(parameter.grad)) for name, parameter in state.parameters}
    with pytest.raises(ortrain.InvalidArgumentError) as refused:
        module(of_rate(16000)["x"], np.array(8000), target)
    assert str(refused.value).startswith(
        'node "chosen" (If) takes its else_branch, which cannot be run on these inputs'
    )
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.data, before[name][0])
        np.testing.assert_array_equal(parameter.grad, before[name][1])
    feed = of_rate(16000)
    assert np.isfinite(float(module(feed["x"], feed["rate"], target)))


@pytest.mark.parametrize("backend", DEVICES)
@pytest.mark.parametrize("axes", [[-1, -1], ["?", "?"], [-7, "columns"]])
def test_axes_of_no_size_are_open(axes: list[int | str], backend: str) -> None:
    proto = two_rates()
    proto.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", FLOAT, axes))
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", FLOAT, [-1, 3]))
    assert_like_onnxruntime(proto, backend, of_rate(16000), of_rate(8000))


@pytest.mark.parametrize("scanned", [False, True])
def test_an_if_whose_condition_follows_from_shapes_trains_in_a_body(scanned: bool, tmp_path: Path) -> None:
    """The branch that is never taken reads a value of the body by Identity alone, as exporters write it."""
    yes = graph([node("Mul", ["next", "w"], "scaled")], [], [("scaled", FLOAT, None)])
    no = graph([node("Identity", ["next"], "same")], [], [("same", FLOAT, None)])
    inside = [
        node("Add", ["v", "slice"], "next"),
        node("Shape", ["next"], "shape"),
        node("Size", ["shape"], "rank"),
        node("Equal", ["rank", "one"], "is_vector"),
        node("If", ["is_vector"], "chosen", then_branch=yes, else_branch=no),
    ]
    carried = [("v", FLOAT, [2]), ("slice", FLOAT, [2])]
    if scanned:
        body = graph(
            [*inside, node("Identity", ["chosen"], "all")], carried, [("chosen", FLOAT, [2]), ("all", FLOAT, [2])]
        )
        repeat = node("Scan", ["v0", "x"], "last", "y", body=body, num_scan_inputs=1)
    else:
        inside = [node("Gather", ["x", "i"], "slice"), *inside, node("Identity", ["on"], "still")]
        inside.append(node("Identity", ["chosen"], "all"))
        outputs = [("still", BOOL, []), ("chosen", FLOAT, [2]), ("all", FLOAT, [2])]
        body = graph(inside, [("i", INT64, []), ("on", BOOL, []), *carried[:1]], outputs)
        repeat = node("Loop", ["steps", "", "v0"], "last", "y", body=body)
    weights = {"w": np.array([0.5, -0.7], np.float32), "v0": np.ones(2, np.float32), "one": np.array(1)}
    weights["steps"] = np.array(3)
    proto = model(graph([repeat], [("x", FLOAT, [3, 2])], [("y", FLOAT, [3, 2])], weights))
    x = np.random.default_rng(4).standard_normal((3, 2), np.float32)
    assert_like_onnxruntime(proto, "cpu", {"x": x})
    artifacts.generate_artifacts(
        proto, requires_grad=["w"], loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    module(x, np.zeros((3, 2), np.float32))

    def loss(w: np.ndarray) -> float:
        state_now, losses = np.ones(2), []
        for row in x.astype(np.float64):
            state_now = (state_now + row) * w
            losses.append(state_now**2)
        return float(np.mean(losses))

    w = weights["w"].astype(np.float64)
    slopes = [(loss(w + FINE_STEP * unit) - loss(w - FINE_STEP * unit)) / (2 * FINE_STEP) for unit in np.eye(2)]
    np.testing.assert_allclose(state.parameters["w"].grad, slopes, rtol=TOLERANCE)


POOLINGS: dict[str, dict[str, Any]] = {
    "MaxPool": {"kernel_shape": [2], "strides": [1]},
    "AveragePool": {"kernel_shape": [2], "strides": [1]},
    "LpPool": {"kernel_shape": [2], "strides": [1]},
    "GlobalMaxPool": {},
    "GlobalAveragePool": {},
}


def slope_in_float64(
    proto: ModelProto, name: str, module: Module, state: CheckpointState, feed: dict[str, np.ndarray]
) -> tuple[float, float]:
    """Return the gradient of a parameter along a direction, and a central difference of the first output in float64."""
    module.lazy_reset_grad()
    module(*[feed[given] for given in module.input_names()])
    (start,) = (numpy_helper.to_array(tensor) for tensor in proto.graph.initializer if tensor.name == name)
    direction = np.random.default_rng(1).standard_normal(start.shape)
    ends = []
    for sign in (1, -1):
        moved = ModelProto()
        moved.CopyFrom(proto)
        for tensor in moved.graph.initializer:
            if tensor.name == name:
                tensor.CopyFrom(numpy_helper.from_array(start + sign * FINE_STEP * direction, name))
        ends.append(float(ortrain.InferenceSession(moved).run(None, feed)[0]))
    return float(np.sum(state.parameters[name].grad * direction)), (ends[0] - ends[1]) / (2 * FINE_STEP)


def trained(proto: ModelProto, name: str, folder: Path) -> tuple[Module, CheckpointState]:
    """Return a module for a model with the loss as its first output, and its state."""
    artifacts.generate_artifacts(proto, requires_grad=[name], artifact_directory=folder)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return Module(folder / "training_model.onnx", state), state


@pytest.mark.parametrize("along", ["channels", "cells"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_pooling_of_sizes_that_are_known_during_the_run(pooling: str, along: str, tmp_path: Path) -> None:
    """A loop with a trained weight collects rows until its condition ends it; a Scan pools these rows."""
    body = graph(
        [
            node("Mul", ["v", "w"], "next"),
            node("Less", ["i", "turns"], "still"),
            node("Tanh", ["next"], "row"),
        ],
        [("i", INT64, []), ("on", BOOL, []), ("v", TensorProto.DOUBLE, [3, 4])],
        [("still", BOOL, []), ("next", TensorProto.DOUBLE, [3, 4]), ("row", TensorProto.DOUBLE, [3, 4])],
    )
    # The rows are on the channel axis of the images, or on the pooled axis.
    order = [0, 1, 2] if along == "channels" else [1, 2, 0]
    pooled = graph(
        [
            node("Transpose", ["rows"], "turned", perm=order),
            node(pooling, ["turned"], "pool", **POOLINGS[pooling]),
            node("ReduceMean", ["pool"], "mean", keepdims=0),
            node("Add", ["sum", "mean"], "more"),
            node("Mul", ["more", "slice"], "scaled"),
            node("Sin", ["scaled"], "wave"),
            node("Identity", ["wave"], "kept"),
        ],
        [("sum", TensorProto.DOUBLE, []), ("slice", TensorProto.DOUBLE, [])],
        [("wave", TensorProto.DOUBLE, []), ("kept", TensorProto.DOUBLE, [])],
    )
    nodes = [
        node("Loop", ["", "", "x"], "last", "rows", body=body),
        node("Scan", ["zero", "slices"], "scanned", "all", body=pooled, num_scan_inputs=1),
        node("ReduceSum", ["all"], "loss", keepdims=0),
    ]
    rng = np.random.default_rng(2)
    weights = {"w": rng.uniform(0.5, 1.5, (3, 4)), "zero": np.array(0.25), "slices": rng.uniform(0.5, 1, 3)}
    weights["turns"] = np.array(2)
    inputs: Values = [("x", TensorProto.DOUBLE, [3, 4])]
    proto = model(graph(nodes, inputs, [("loss", TensorProto.DOUBLE, [])], weights))
    module, state = trained(proto, "w", tmp_path)
    got, want = slope_in_float64(proto, "w", module, state, {"x": rng.standard_normal((3, 4))})
    assert abs(got - want) <= DIFFERENCES * (1e-3 + abs(want))


def test_a_long_axis_of_a_size_that_is_known_during_the_run(tmp_path: Path) -> None:
    """TopK over this length is not a single instruction: one part of the graph becomes several at run time."""
    nodes = [
        node("Mul", ["x", "w"], "scaled"),
        node("Greater", ["x", "zero"], "positive"),
        node("NonZero", ["positive"], "places"),
        node("Squeeze", ["places", "first"], "indices"),
        node("Gather", ["scaled", "indices"], "chosen"),
        node("Sin", ["chosen"], "wave"),
        node("TopK", ["wave", "three"], "largest", "at"),
        node("Exp", ["largest"], "grown"),
        node("ReduceSum", ["grown"], "loss", keepdims=0),
    ]
    rng = np.random.default_rng(3)
    weights = {"w": np.array([0.7]), "zero": np.array(0.0), "first": np.array([0]), "three": np.array([3])}
    size = 50_000
    inputs: Values = [("x", TensorProto.DOUBLE, [size])]
    proto = model(graph(nodes, inputs, [("loss", TensorProto.DOUBLE, [])], weights))
    module, state = trained(proto, "w", tmp_path)
    got, want = slope_in_float64(proto, "w", module, state, {"x": rng.uniform(-1, 1, size)})
    assert abs(got - want) <= DIFFERENCES * abs(want)
