"""Ctrl-C ends a run between two instructions, and the state stays as before."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

# An instruction of these tests takes a few hundredths of a second, and a run checks for signals ten times a second.
# Other load on the machine may add to both.
SOON = 3.0
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
# Matrix products large enough that a step takes a considerable part of a second on any machine.
LAYERS, WIDTH, ROWS = 24, 768, 512


@pytest.fixture(autouse=True)
def interrupts_arrive() -> Iterator[None]:
    """Install Python's handler, because shells start background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def interrupted_after(seconds: float) -> Iterator[list[float]]:
    """Send SIGINT after some seconds; yield a list that receives the time of the signal."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(seconds, send)
    timer.start()
    try:
        yield sent
    finally:
        timer.cancel()
        timer.join()


def interrupt(seconds: float, work: Callable[[], Any]) -> None:
    """Run and interrupt `work`, and assert that it ends soon after the signal."""
    with interrupted_after(seconds) as sent:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert time.monotonic() - sent[0] < SOON


def endless() -> bytes:
    """Return a model of a Loop with its iteration count as an input."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("Sin", ["v"], ["s"]),
            helper.make_node("Add", ["s", "one"], ["w"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", INT64, []),
            helper.make_tensor_value_info("go", BOOL, []),
            helper.make_tensor_value_info("v", FLOAT, [4]),
        ],
        [helper.make_tensor_value_info("on", BOOL, []), helper.make_tensor_value_info("w", FLOAT, [4])],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["most", "", "x"], ["y"], name="endless", body=body)],
        "graph",
        [helper.make_tensor_value_info("most", INT64, []), helper.make_tensor_value_info("x", FLOAT, [4])],
        [helper.make_tensor_value_info("y", FLOAT, [4])],
        [numpy_helper.from_array(np.ones(4, np.float32), "one")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def test_a_long_loop_ends() -> None:
    options = ortrain.SessionOptions()
    options.iteration_limit = 2**62
    session = ortrain.InferenceSession(endless(), options)
    feed = {"most": np.array(2**62), "x": np.zeros(4, np.float32)}
    interrupt(0.3, lambda: session.run(None, feed))
    # The session works normally afterwards.
    (y,) = session.run(None, {**feed, "most": np.array(2)})
    np.testing.assert_allclose(y, np.full(4, 1 + np.sin(1.0)), rtol=1e-6)


def test_a_long_function_of_the_host_ends() -> None:
    """The boxes do not overlap, so each one is compared with all boxes chosen before."""
    count = 300_000
    graph = helper.make_graph(
        [helper.make_node("NonMaxSuppression", ["boxes", "scores", "most"], ["y"])],
        "graph",
        [
            helper.make_tensor_value_info("boxes", FLOAT, [1, count, 4]),
            helper.make_tensor_value_info("scores", FLOAT, [1, 1, count]),
        ],
        [helper.make_tensor_value_info("y", INT64, [None, 3])],
        [numpy_helper.from_array(np.array(count), "most")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ortrain.InferenceSession(model)
    corners = np.arange(count, dtype=np.float32)[None, :, None] * np.float32(2)
    feed = {"boxes": corners + np.array([0, 0, 1, 1], np.float32), "scores": np.ones((1, 1, count), np.float32)}
    interrupt(0.5, lambda: session.run(None, feed))


def test_handlers_that_raise_nothing_end_nothing() -> None:
    session = ortrain.InferenceSession(endless())
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: calls.append(number))
    try:
        with interrupted_after(0.2):
            while not calls:
                session.run(None, {"most": np.array(300_000), "x": np.zeros(4, np.float32)})
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [signal.SIGINT]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    random = np.random.default_rng(0)
    nodes, weights = [], []
    last = "x"
    for k in range(LAYERS):
        weight = random.standard_normal((WIDTH, WIDTH), np.float32) / np.sqrt(WIDTH / 2)
        weights.append(numpy_helper.from_array(weight.astype(np.float32), f"w{k:02}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{k:02}"], [f"p{k}"]))
        nodes.append(helper.make_node("Relu", [f"p{k}"], [f"v{k}"]))
        last = f"v{k}"
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info(last, FLOAT, ["n", WIDTH])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    artifacts.generate_artifacts(
        model.SerializeToString(),
        requires_grad=[weight.name for weight in weights],
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=folder,
    )
    return folder


def gradients(state: CheckpointState) -> list[np.ndarray]:
    return [np.array(state.parameters[f"w{k:02}"].grad) for k in range(LAYERS)]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_long_step_ends_and_changes_nothing(trained: Path, share: float) -> None:
    """The interrupt hits the forward or the backward pass; gradients accumulate, or are overwritten."""
    x, target = (np.random.default_rng(k).standard_normal((ROWS, WIDTH), np.float32) for k in range(2))
    state = CheckpointState.load_checkpoint(trained / "checkpoint")
    module = Module(trained / "training_model.onnx", state)
    optimizer = Optimizer(trained / "optimizer_model.onnx", module)
    module(x, target)
    optimizer.step()
    module.lazy_reset_grad()
    start = time.monotonic()
    loss = module(x, target)
    duration = time.monotonic() - start
    once = gradients(state)
    parameters = module.get_contiguous_parameters().numpy().copy()

    # This step accumulates gradients.
    interrupt(share * duration, lambda: [module(x, target) for _ in range(20)])
    after = gradients(state)
    # Complete steps may have run before the signal.
    whole = [k for k in range(1, 21) if np.array_equal(after[0], once[0] * np.float32(k))]
    assert whole, "the gradients are those of whole steps"
    for got, want in zip(after, once, strict=True):
        np.testing.assert_allclose(got, want * whole[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(module.get_contiguous_parameters().numpy(), parameters)

    # This step overwrites gradients: they are zero until it is complete.
    module.lazy_reset_grad()
    interrupt(share * duration, lambda: [(module.lazy_reset_grad(), module(x, target)) for _ in range(20)])
    for got, want in zip(gradients(state), once, strict=True):
        assert not got.any() or np.array_equal(got, want)
    module.lazy_reset_grad()
    assert module(x, target) == loss
    for got, want in zip(gradients(state), once, strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(module.get_contiguous_parameters().numpy(), parameters)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_cell_that_is_interrupted(trained: Path, share: float) -> None:
    """A notebook sends the same signal: the state stays the same to the bit, and the cell can run again."""
    x, target = (np.random.default_rng(k).standard_normal((ROWS, WIDTH), np.float32) for k in range(2))
    state = CheckpointState.load_checkpoint(trained / "checkpoint")
    module = Module(trained / "training_model.onnx", state)
    optimizer = Optimizer(trained / "optimizer_model.onnx", module)
    state.seed = 3
    module(x, target)
    optimizer.step()
    module.lazy_reset_grad()
    start = time.monotonic()
    module(x, target)
    duration = time.monotonic() - start
    twin = copy.deepcopy(state)

    before, kept, whole = state.to_bytes(True), gradients(state), 0

    def cell() -> None:
        nonlocal before, kept, whole
        for _ in range(20):
            before, kept = state.to_bytes(True), gradients(state)
            module(x, target)
            whole += 1

    # The signal may come during to_bytes, outside of a step.
    interrupt(share * duration, cell)
    assert whole < 20
    if state.to_bytes(True) != before:
        # The signal may come right after a step, before this test counts it.
        whole += 1
    else:
        for got, want in zip(gradients(state), kept, strict=True):
            np.testing.assert_array_equal(got, want)
    assert "step 1" in repr(state)
    # The resulting state equals the state after this number of complete steps.
    other = Module(trained / "training_model.onnx", twin)
    for _ in range(whole):
        other(x, target)
    assert twin.to_bytes(True) == state.to_bytes(True)
    assert other(x, target) == module(x, target)


def sums(axes: list[int]) -> bytes:
    """Return a model that sums a tensor of ones of a shape along axes."""
    graph = helper.make_graph(
        [
            helper.make_node("ConstantOfShape", ["shape"], ["ones"], value=helper.make_tensor("one", FLOAT, [1], [1])),
            helper.make_node("ReduceSum", ["ones", "axes"], ["y"], keepdims=0),
        ],
        "graph",
        [helper.make_tensor_value_info("shape", INT64, [2])],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(np.array(axes), "axes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("axes", [[0], [1], [0, 1]])
def test_one_long_instruction(axes: list[int]) -> None:
    """Ctrl-C ends a sum of 10**12 elements along any axes, and the session continues to work."""
    session = ortrain.InferenceSession(sums(axes))
    shape = [64 if axis not in axes else 10**12 // 64 for axis in range(2)] if len(axes) == 1 else [10**6, 10**6]
    interrupt(0.3, lambda: session.run(None, {"shape": np.array(shape)}))
    (y,) = session.run(None, {"shape": np.array([2, 3])})
    np.testing.assert_array_equal(y, np.ones((2, 3), np.float32).sum(tuple(axes)))


def long_chain(length: int) -> bytes:
    """Return a chain of nodes that takes seconds to prepare."""
    kinds = [("Relu", []), ("Add", ["b"]), ("MatMul", ["w"])]
    nodes, last = [], "x"
    for k in range(length):
        op, more = kinds[k % len(kinds)]
        nodes.append(helper.make_node(op, [last, *more], [f"v{k}"]))
        last = f"v{k}"
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, ["n", 4])],
        [helper.make_tensor_value_info(last, FLOAT, ["n", 4])],
        [
            numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"),
            numpy_helper.from_array(np.ones(4, np.float32), "b"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def test_preparation_ends(tmp_path: Path) -> None:
    """Reading, inspection, artifacts and the first run of many nodes end; no file is written, sessions still work."""
    model, x = long_chain(60_000), np.ones((2, 4), np.float32)
    session = ortrain.InferenceSession(model)
    works: list[Callable[[], object]] = [
        lambda: ortrain.InferenceSession(model),
        lambda: ortrain.inspect(model),
        lambda: artifacts.generate_artifacts(
            model, loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path / "made"
        ),
        lambda: session.run(None, {"x": x}),
    ]
    for work in works:
        interrupt(0.1, work)
    assert not list(tmp_path.rglob("*.onnx"))
    short = ortrain.InferenceSession(long_chain(30))
    np.testing.assert_array_equal(short.run(None, {"x": x})[0], np.full((2, 4), 11, np.float32))
