"""Models that would take all memory or all time are refused at once, with a clear message."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module
from ortrain.errors import MemoryLimitError, OrtrainError

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
# Generous limit in seconds: a release build on an idle machine takes one second.
SOON = 15.0
# Maximum growth of the process's peak memory by a refusal, in MiB.
MEMORY = 600


@contextmanager
def refused(kind: type[OrtrainError], sentence: str) -> Iterator[None]:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(kind) as raised:
        yield
    assert sentence in str(raised.value)
    assert time.monotonic() - start < SOON
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY << 10


def model(nodes: list, inputs: list, outputs: list, weights: dict[str, np.ndarray] | None = None) -> ModelProto:
    tensors = [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()]
    infos = [[helper.make_tensor_value_info(*value) for value in values] for values in (inputs, outputs)]
    graph = helper.make_graph(nodes, "graph", *infos, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("size", [10**8, 4 * 10**9])
def test_windows_and_pads_beyond_count(size: int) -> None:
    attributes = {"kernel_shape": [size], "pads": [size - 1, size - 1], "count_include_pad": 1}
    node = helper.make_node("AveragePool", ["x"], ["y"], name="pool", **attributes)
    pool = model([node], [("x", FLOAT, [1, 1, 8])], [("y", FLOAT, None)])
    with refused(
        OrtrainError,
        f'node "pool" (AveragePool) with inputs (x: float32[1, 1, 8]): spatial axis 0: 8 elements with padding of '
        f"{size - 1} before and {size - 1} after are not supported; the padding is at most 16777216 at each end",
    ):
        session = ortrain.InferenceSession(pool.SerializeToString())
        session.run(None, {"x": np.ones((1, 1, 8), np.float32)})


@pytest.mark.parametrize("op", ["Reshape", "Expand", "ConstantOfShape"])
def test_a_rank_beyond_count(op: str) -> None:
    inputs = ["s"] if op == "ConstantOfShape" else ["x", "s"]
    nodes = [
        helper.make_node("ConstantOfShape", ["n"], ["s"], value=numpy_helper.from_array(np.array([1]))),
        helper.make_node(op, inputs, ["y"], name="wide"),
    ]
    large = model(nodes, [("x", FLOAT, [1]), ("n", INT64, [1])], [("y", FLOAT, None)])
    session = ortrain.InferenceSession(large.SerializeToString())
    with refused(OrtrainError, ""):
        session.run(None, {"x": np.ones(1, np.float32), "n": np.array([2**42])})


def test_a_program_of_large_inputs_is_dumped() -> None:
    relu = helper.make_node("Relu", ["x"], ["y"], name="relu")
    large = model([relu], [("x", FLOAT, [2, 2**31, 4])], [("y", FLOAT, None)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "17179869184" in ortrain.dump(large.SerializeToString(), "program")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY << 10


def test_nonzero_indices_of_a_hundred_million_elements() -> None:
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("NonZero", ["zeros"], ["y"], name="places"),
    ]
    large = model(nodes, [("shape", INT64, [1])], [("y", INT64, None)])
    with refused(
        OrtrainError,
        'node "places" (NonZero) with inputs (zeros: float32[100000000]): an input of shape [100000000] is too '
        "large, at most 67108864 elements are supported. Use Where to choose between values without indices, or "
        "Slice to split the input",
    ):
        session = ortrain.InferenceSession(large.SerializeToString())
        session.run(None, {"shape": np.array([10**8])})


def doubling() -> bytes:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("Concat", ["v", "v"], ["w"], axis=0),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", INT64, []),
            helper.make_tensor_value_info("go", BOOL, []),
            helper.make_tensor_value_info("v", FLOAT, ["n"]),
        ],
        [helper.make_tensor_value_info("on", BOOL, []), helper.make_tensor_value_info("w", FLOAT, ["m"])],
    )
    loop = helper.make_node("Loop", ["most", "", "x"], ["y"], name="doubling", body=body)
    made = model([loop], [("most", INT64, []), ("x", FLOAT, ["k"])], [("y", FLOAT, None)])
    return bytes(made.SerializeToString())


def test_a_value_that_doubles() -> None:
    session = ortrain.InferenceSession(doubling())
    with refused(
        MemoryLimitError,
        'node "doubling" (Loop): "v" grows in every iteration and has 134217728 bytes in iteration 24; '
        "without memory_limit at most 67108864 bytes are allowed, so set memory_limit if it must be larger",
    ):
        session.run(None, {"most": np.array(60), "x": np.ones(1, np.float32)})
    (y,) = session.run(None, {"most": np.array(10), "x": np.ones(1, np.float32)})
    assert y.shape == (1024,)


def test_a_value_that_doubles_within_a_limit() -> None:
    options = ortrain.SessionOptions()
    options.memory_limit = 1 << 20
    session = ortrain.InferenceSession(doubling(), options)
    with refused(MemoryLimitError, "memory_limit is 1048576"):
        session.run(None, {"most": np.array(60), "x": np.ones(1, np.float32)})


def test_functions_that_double() -> None:
    levels = 30
    functions = []
    for k in range(levels):
        op, domain = ("Relu", "") if k + 1 == levels else (f"F{k + 1}", "own")
        nodes = [helper.make_node(op, [a], [b], domain=domain) for a, b in (("x", "t"), ("t", "y"))]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
        functions.append(helper.make_function("own", f"F{k}", ["x"], ["y"], nodes, opsets))
    call = helper.make_node("F0", ["x"], ["y"], name="call", domain="own")
    made = model([call], [("x", FLOAT, [2])], [("y", FLOAT, [2])])
    made.opset_import.append(helper.make_opsetid("own", 1))
    made.functions.extend(functions)
    with refused(
        OrtrainError,
        'node "call" (F0): the inlined functions of the model have more than 262144 nodes or take more '
        "than 1073741824 bytes; this call alone has 1073741824 nodes",
    ):
        ortrain.InferenceSession(made.SerializeToString())


def test_the_largest_of_a_million() -> None:
    node = helper.make_node("TopK", ["x", "k"], ["values", "indices"])
    outputs = [("values", FLOAT, None), ("indices", INT64, None)]
    made = model([node], [("x", FLOAT, ["n"])], outputs, {"k": np.array([7])})
    x = np.random.default_rng(0).standard_normal(10**6).astype(np.float32)
    session = ortrain.InferenceSession(made.SerializeToString())
    start = time.monotonic()
    values, indices = session.run(None, {"x": x})
    assert time.monotonic() - start < SOON
    np.testing.assert_array_equal(indices, np.argsort(-x, kind="stable")[:7])
    np.testing.assert_array_equal(values, x[indices])


@pytest.mark.parametrize("count_include_pad", [0, 1])
@pytest.mark.parametrize("ceil_mode", [0, 1])
def test_averages_under_a_million_windows(count_include_pad: int, ceil_mode: int) -> None:
    """Beyond 2^20 windows the cells of each window are counted in each step, as onnxruntime counts them."""
    attributes = {"kernel_shape": [5, 3], "pads": [2, 1, 1, 1], "strides": [2, 1]}
    x = np.random.default_rng(5).standard_normal((1, 1, 4098, 600), np.float32)
    node = helper.make_node(
        "AveragePool", ["x"], ["y"], count_include_pad=count_include_pad, ceil_mode=ceil_mode, **attributes
    )
    pooled = model([node], [("x", FLOAT, x.shape)], [("y", FLOAT, None)])
    want = onnxruntime.InferenceSession(pooled.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = want.run(None, {"x": x})
    assert want.size > 2**20
    (got,) = ortrain.InferenceSession(pooled).run(None, {"x": x})
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def recurrent(op: str, steps: int | str) -> ModelProto:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op]
    node = helper.make_node(op, ["x", "w", "r"], ["", "y"], name="net", hidden_size=2, direction="bidirectional")
    weights = {"w": np.ones((2, 2 * gates, 1), np.float32), "r": np.ones((2, 2 * gates, 2), np.float32)}
    return model([node], [("x", FLOAT, [steps, 1, 1])], [("y", FLOAT, None)], weights)


@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
def test_more_steps_than_a_program_holds(op: str) -> None:
    """A flipped bit gave the sequences of a model 4294967295 steps, which took all memory."""
    sentence = (
        f'node "net" ({op}) with inputs (x: float32[{{steps}}, 1, 1], w: float32[2, {{rows}}, 1], '
        f"r: float32[2, {{rows}}, 2]): sequences of {{steps}} steps are too long, at most 65536 steps are supported. "
        f"Split longer sequences, and start each part with the final states of the previous part"
    )
    rows = {"RNN": 2, "GRU": 6, "LSTM": 8}[op]
    for steps in (65_537, (1 << 32) - 1):
        with refused(OrtrainError, sentence.format(steps=steps, rows=rows)):
            ortrain.dump(recurrent(op, steps).SerializeToString(), "program")
    # The number of steps comes with the data.
    session = ortrain.InferenceSession(recurrent(op, "steps").SerializeToString())
    with refused(OrtrainError, sentence.format(steps=65_537, rows=rows)):
        session.run(None, {"x": np.ones((65_537, 1, 1), np.float32)})
    assert session.run(None, {"x": np.ones((3, 1, 1), np.float32)})[0].shape == (2, 1, 2)


def test_a_dump_is_linear() -> None:
    """A dump of 12 000 steps with several instructions and buffers each; its time was quadratic once."""
    start = time.monotonic()
    text = ortrain.dump(recurrent("LSTM", 12_000).SerializeToString(), "program")
    assert text.count("MatMul") >= 12_000
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("sizes", [[1 << 32], [1 << 16, 1 << 16]], ids=["line", "image"])
def test_filters_beyond_count(op: str, sizes: list[int]) -> None:
    """A flipped bit gave a filter the length 2^32, and kernels made tables of 2^32 cells."""
    node = helper.make_node(op, ["x", "w"], ["y"], name="conv", group=4)
    inputs = [("x", FLOAT, [2, 4, *sizes]), ("w", FLOAT, [4, 1, *sizes])]
    conv = model([node], inputs, [("y", FLOAT, None)]).SerializeToString()
    sentence = (
        f'node "conv" ({op}) with inputs (x: float32{[2, 4, *sizes]}, w: float32{[4, 1, *sizes]}): '
        f"a filter has 4294967296 cells for each channel, {sizes}; at most 1048576 are supported"
    )
    with refused(OrtrainError, sentence):
        ortrain.InferenceSession(conv)
    start = time.monotonic()
    assert sentence in str(ortrain.inspect(conv))
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize("count_include_pad", [0, 1])
def test_gradients_of_averages_under_a_million_windows(count_include_pad: int, tmp_path: Path) -> None:
    """Averages are linear: along any direction the gradient is the loss of that direction."""
    attributes = {"kernel_shape": [5, 3], "pads": [2, 1, 1, 1], "strides": [2, 1], "ceil_mode": 1}
    shape, rng = (1, 1, 4097, 600), np.random.default_rng(5)
    nodes = [
        helper.make_node("AveragePool", ["w"], ["pooled"], count_include_pad=count_include_pad, **attributes),
        helper.make_node("Mul", ["pooled", "weights"], ["weighed"]),
        helper.make_node("ReduceSum", ["weighed"], ["loss"], keepdims=0),
    ]
    values = {"w": rng.standard_normal(shape, np.float32), "weights": rng.uniform(1, 2, (2049, 600)).astype(np.float32)}
    proto = model(nodes, [], [("loss", FLOAT, [])], values)
    artifacts.generate_artifacts(proto, requires_grad=["w"], artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    Module(tmp_path / "training_model.onnx", state)()
    gradient = state.parameters["w"].grad.astype(np.float64)
    # Positive, so that the sums do not cancel.
    direction = rng.uniform(0, 1, shape).astype(np.float32)
    along = model(nodes, [], [("loss", FLOAT, [])], values | {"w": direction})
    (wanted,) = onnxruntime.InferenceSession(along.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {}
    )
    assert abs(float((gradient * direction).sum()) / float(wanted) - 1) < 1e-5
    # At the edges windows count fewer cells.
    edges = np.zeros(shape, np.float32)
    edges[..., [0, -1], :] = edges[..., [0, -1]] = 1
    along = model(nodes, [], [("loss", FLOAT, [])], values | {"w": edges})
    (wanted,) = onnxruntime.InferenceSession(along.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {}
    )
    assert abs(float((gradient * edges).sum()) / float(wanted) - 1) < 1e-5
