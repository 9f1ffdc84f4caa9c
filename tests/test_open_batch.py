"""`open_batch` makes a model with a fixed batch size accept any batch; an error names the obstacle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module

RNG = np.random.default_rng(7)


def drawn(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return RNG.standard_normal(shape).astype(np.float32)


def fixed(
    nodes: Sequence[onnx.NodeProto],
    initializers: dict[str, Any],
    shape: Sequence[int],
    outputs: Sequence[Sequence[int]],
) -> onnx.ModelProto:
    declare = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "graph",
        [declare("x", TensorProto.FLOAT, shape)],
        [declare(name, TensorProto.FLOAT, dims) for name, dims in zip("yz", outputs, strict=False)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in initializers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def node(op: str, reads: Sequence[str], result: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, reads, [result], f"/{result}", **attributes)


def network(batch: int) -> onnx.ModelProto:
    """Return an attention as PyTorch exports it with a fixed batch, with a class token before the sequence."""
    nodes = [
        node("MatMul", ["x", "w"], "a"),
        node("Expand", ["token", "tokens"], "t"),
        node("Concat", ["t", "a"], "b", axis=1),
        node("Reshape", ["b", "heads"], "c"),
        node("Transpose", ["c"], "q", perm=[0, 2, 1, 3]),
        node("Transpose", ["c"], "k", perm=[0, 2, 3, 1]),
        node("MatMul", ["q", "k"], "s"),
        node("Softmax", ["s"], "p", axis=-1),
        node("MatMul", ["p", "q"], "o"),
        node("Transpose", ["o"], "r", perm=[0, 2, 1, 3]),
        node("Reshape", ["r", "flat"], "f"),
        node("Gemm", ["f", "v"], "y"),
    ]
    rng = np.random.default_rng(3)
    initializers = {
        "w": rng.standard_normal((4, 8)).astype(np.float32),
        "token": rng.standard_normal((1, 1, 8)).astype(np.float32),
        "tokens": np.array([batch, 1, 8]),
        "heads": np.array([batch, 6, 2, 4]),
        "flat": np.array([batch, -1]),
        "v": rng.standard_normal((48, 3)).astype(np.float32),
    }
    return fixed(nodes, initializers, [batch, 5, 4], [[batch, 3]])


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_a_network(batch: int, tmp_path: Path) -> None:
    """Each row of a batch has the output of the original model, in ortrain and onnxruntime; any batch size trains."""
    model = network(batch)
    opened = artifacts.open_batch(model)
    loaded = onnx.load_from_string(opened)
    onnx.checker.check_model(loaded, full_check=True)
    assert loaded.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    x = drawn(14, 5, 4)
    theirs = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = np.concatenate([theirs.run(None, {"x": x[k : k + batch]})[0] for k in range(0, 14, batch)])
    for rows in (1, 5, 14):
        for session in (
            ortrain.InferenceSession(opened),
            onnxruntime.InferenceSession(opened, providers=["CPUExecutionProvider"]),
        ):
            (y,) = session.run(None, {"x": x[:rows]})
            np.testing.assert_allclose(y, expected[:rows], rtol=1e-4, atol=1e-5)
    artifacts.generate_artifacts(opened, loss=artifacts.LossType.CrossEntropyLoss, artifact_directory=tmp_path)
    module = Module(tmp_path / "training_model.onnx", CheckpointState.load_checkpoint(tmp_path / "checkpoint"))
    assert np.isfinite(module(x, np.zeros(14, np.int64)))


def self_attention(batch: int, *, merged: str) -> onnx.ModelProto:
    """Return an attention as ``torch.nn.MultiheadAttention`` computes it: the batch axis is second and includes the
    heads."""
    rng = np.random.default_rng(5)
    initializers: dict[str, Any] = {
        "heads": np.array([5, batch * 2, 2]),
        "rows": np.array([5 * batch, 4]),
        "w": rng.standard_normal((4, 4)).astype(np.float32),
    }
    back = [node("Reshape", ["g", "steps"], "b")]
    if merged == "constant":
        initializers["steps"] = np.array([5, batch, 4])
    else:
        # Exporters without constant folding leave these nodes for the sizes.
        back[:0] = [node("Unsqueeze", ["size", "zero"], "n"), node("Concat", ["five", "n", "four"], "steps", axis=0)]
        initializers |= {k: np.array(v) for k, v in {"size": batch, "zero": [0], "five": [5], "four": [4]}.items()}
    nodes = [
        node("Transpose", ["x"], "t", perm=[1, 0, 2]),
        node("Reshape", ["t", "heads"], "h"),
        node("Transpose", ["h"], "q", perm=[1, 0, 2]),
        node("Transpose", ["h"], "k", perm=[1, 2, 0]),
        node("MatMul", ["q", "k"], "s"),
        node("Softmax", ["s"], "p", axis=-1),
        node("MatMul", ["p", "q"], "o"),
        node("Transpose", ["o"], "r", perm=[1, 0, 2]),
        node("Reshape", ["r", "rows"], "f"),
        node("Gemm", ["f", "w"], "g"),
        *back,
        node("Transpose", ["b"], "y", perm=[1, 0, 2]),
    ]
    return fixed(nodes, initializers, [batch, 5, 4], [[batch, 5, 4]])


@pytest.mark.parametrize("merged", ["constant", "concatenated"])
@pytest.mark.parametrize("batch", [1, 3, 7])
def test_a_batch_that_shares_its_axis(batch: int, merged: str) -> None:
    model = self_attention(batch, merged=merged)
    x = drawn(21, 5, 4)
    theirs = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = np.concatenate([theirs.run(None, {"x": x[k : k + batch]})[0] for k in range(0, 21, batch)])
    opened = artifacts.open_batch(model)
    for rows in (1, 4, 21):
        (y,) = ortrain.InferenceSession(opened).run(None, {"x": x[:rows]})
        np.testing.assert_allclose(y, expected[:rows], rtol=1e-4, atol=1e-5)


def repeated(batch: int, *shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.repeat(drawn(1, *shape), batch, axis=0)


def constants_of_the_batch(batch: int) -> dict[str, tuple[list[onnx.NodeProto], dict[str, Any], list[int]]]:
    """Return exporter graphs with constants that repeat one value for each row of a fixed batch."""
    return {
        "token of a class": (
            [node("Concat", ["token", "x"], "y", axis=1)],
            {"token": repeated(batch, 1, 4)},
            [batch, 6, 4],
        ),
        "mask": (
            [node("Where", ["mask", "x", "low"], "y")],
            {"mask": repeated(batch, 5, 4) > 0, "low": np.float32(-9)},
            [batch, 5, 4],
        ),
        "mask that is broadcast": (
            [node("Expand", ["mask", "shape"], "m"), node("Mul", ["x", "m"], "y")],
            {"mask": repeated(batch, 1, 4), "shape": np.array([batch, 5, 4])},
            [batch, 5, 4],
        ),
        "positions": (
            [node("Gather", ["table", "places"], "p"), node("Add", ["x", "p"], "y")],
            {"table": drawn(9, 4), "places": np.tile(np.arange(5), (batch, 1))},
            [batch, 5, 4],
        ),
        "sizes that are computed": (
            [
                node("Shape", ["x"], "sizes"),
                node("Mod", ["two", "three"], "at"),
                node("Slice", ["sizes", "zero", "at"], "front"),
                node("Concat", ["front", "last"], "shape", axis=0),
                node("Reshape", ["x", "shape"], "a"),
                node("Reshape", ["a", "again"], "y"),
            ],
            {"two": np.array([2]), "three": np.array([3]), "zero": np.array([0]), "last": np.array([2, 2])}
            | {"again": np.array([batch, 20])},
            [batch, 20],
        ),
        # PyTorch exports expand(3, -1, -1) like this: the vector has three elements for every batch size.
        "an axis that is kept": (
            [
                node("ConstantOfShape", ["three"], "one", value=numpy_helper.from_array(np.array([1]))),
                node("Mul", ["one", "minus"], "kept"),
                node("Equal", ["wanted", "kept"], "is_kept"),
                node("Where", ["is_kept", "one", "wanted"], "shape"),
                node("Expand", ["token", "shape"], "t"),
                node("Concat", ["t", "x"], "y", axis=1),
            ],
            {
                "three": np.array([3]),
                "minus": np.array(-1),
                "wanted": np.array([batch, -1, -1]),
                "token": drawn(1, 1, 4),
            },
            [batch, 6, 4],
        ),
    }


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", constants_of_the_batch(1))
def test_constants_of_the_batch(name: str, batch: int) -> None:
    nodes, initializers, output = constants_of_the_batch(batch)[name]
    model = fixed(nodes, initializers, [batch, 5, 4], [output])
    x = drawn(6, 5, 4)
    theirs = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = np.concatenate([theirs.run(None, {"x": x[k : k + batch]})[0] for k in range(0, 6, batch)])
    opened = artifacts.open_batch(model)
    onnx.checker.check_model(onnx.load_from_string(opened), full_check=True)
    for rows in (1, 5, 6):
        (y,) = ortrain.InferenceSession(opened).run(None, {"x": x[:rows]})
        np.testing.assert_array_equal(y, expected[:rows])


def test_first_states_of_a_recurrent_layer() -> None:
    nodes = [
        node("LSTM", ["x", "w", "r", "b", "", "h", "c"], "a", hidden_size=3),
        node("Squeeze", ["a", "one"], "s"),
        node("Transpose", ["s"], "y", perm=[1, 0, 2]),
    ]
    # The batch is the second axis here, and the first axis of the input before the transpose.
    nodes.insert(0, node("Transpose", ["x"], "steps", perm=[1, 0, 2]))
    nodes[1].input[0] = "steps"
    zeros = np.zeros((1, 2, 3), np.float32)
    initializers = {
        "w": drawn(1, 12, 4),
        "r": drawn(1, 12, 3),
        "b": drawn(1, 24),
        "h": zeros,
        "c": zeros,
        "one": np.array([1]),
    }
    model = fixed(nodes, initializers, [2, 5, 4], [[2, 5, 3]])
    x = drawn(6, 5, 4)
    theirs = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = np.concatenate([theirs.run(None, {"x": x[k : k + 2]})[0] for k in (0, 2, 4)])
    (y,) = ortrain.InferenceSession(artifacts.open_batch(model)).run(None, {"x": x})
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_open_model_is_unchanged() -> None:
    model = onnx.load(ortrain.examples.perceptron())
    assert onnx.load_from_string(artifacts.open_batch(model)).graph == model.graph


@pytest.mark.parametrize(
    ("nodes", "initializers", "shape", "output", "sentence"),
    [
        (
            [node("MatMul", ["mix", "x"], "y")],
            {"mix": drawn(3, 3)},
            [3, 4],
            [3, 4],
            "a node depends on the batch size 3: ",
        ),
        (
            [node("Add", ["x", "each"], "y")],
            {"each": drawn(3, 4)},
            [3, 4],
            [3, 4],
            'node "/y" (Add)',
        ),
        (
            [node("Transpose", ["x"], "a"), node("Reshape", ["a", "shape"], "y")],
            {"shape": np.array([2, 6])},
            [3, 4],
            [2, 6],
            'node "/y" (Reshape)',
        ),
        (
            [node("MatMul", ["x", "w"], "a"), node("Softmax", ["a"], "y", axis=0)],
            {"w": drawn(4, 4)},
            [3, 4],
            [3, 4],
            'node "/y" (Softmax) computes other values for a row in a larger batch than for the row alone',
        ),
        (
            [node("Transpose", ["x"], "a"), node("Reshape", ["a", "shape"], "b"), node("MatMul", ["b", "w"], "y")],
            {"shape": np.array([-1, 4]), "w": drawn(4, 4)},
            [1, 4],
            [1, 4],
            'node "/y" (MatMul)',
        ),
        (
            [node("Squeeze", ["x"], "a"), node("Relu", ["a"], "y")],
            {},
            [1, 4],
            [4],
            'node "/a" (Squeeze) computes other values for a row',
        ),
        (
            [node("Gather", ["x", "first"], "a", axis=0), node("Relu", ["a"], "y")],
            {"first": np.array([0])},
            [1, 4],
            [1, 4],
            'node "/a" (Gather) computes other values for a row',
        ),
        (
            [node("Concat", ["token", "x"], "y", axis=0)],
            {"token": drawn(1, 4)},
            [1, 4],
            [2, 4],
            'node "/y" (Concat) computes other values for a row',
        ),
        (
            [node("Expand", ["token", "shape"], "a"), node("Concat", ["a", "x"], "y", axis=0)],
            {"token": drawn(1, 4), "shape": np.array([1, 4])},
            [1, 4],
            [2, 4],
            'node "/y" (Concat) computes other values for a row',
        ),
        (
            [node("Reshape", ["x", "shape"], "a"), node("Relu", ["a"], "y")],
            {"shape": np.array([4])},
            [1, 4],
            [4],
            'node "/y" (Relu) merges the batch with other axes in axis 0 of output "y"',
        ),
        (
            [node("ReduceSum", ["x", "axes"], "s", keepdims=0), node("Expand", ["s", "shape"], "y")],
            {"axes": np.array([0]), "shape": np.array([2, 4])},
            [3, 4],
            [2, 4],
            None,
        ),
    ],
    ids=[
        "product",
        "sum",
        "reshape",
        "softmax",
        "rows that change places",
        "no axis",
        "first row",
        "one row more",
        "a row for each",
        "one axis",
        "independent",
    ],
)
def test_shapes_that_depend_on_the_batch(
    nodes: list[onnx.NodeProto], initializers: dict[str, Any], shape: list[int], output: list[int], sentence: str | None
) -> None:
    model = fixed(nodes, initializers, shape, [output])
    if sentence is None:
        assert ortrain.InferenceSession(artifacts.open_batch(model)).get_inputs()[0].shape == ["batch", 4]
        return
    with pytest.raises(ortrain.InvalidModelError) as error:
        artifacts.open_batch(model)
    assert sentence in str(error.value)
    assert str(error.value).endswith(
        "; make its shape follow the batch (an element 0 or -1 in the shape of a Reshape), or export the model with an "
        "open first axis (dynamic_axes, dynamic_shapes)"
    )


@pytest.mark.parametrize("shape", [[1, 2**40], [2**40, 1], [1, 2**20, 2**20]])
def test_sizes_that_exceed_the_memory(shape: list[int]) -> None:
    """Rows are compared only if they fit into memory: a file may declare any size."""
    model = fixed([node("Relu", ["x"], "a"), node("Flatten", ["a"], "y")], {}, shape, [[shape[0], 2**40 // shape[0]]])
    opened = onnx.load_from_string(artifacts.open_batch(model))
    assert opened.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_an_empty_batch() -> None:
    model = fixed([node("Reshape", ["x", "shape"], "y")], {"shape": np.array([0, 2, 2])}, [0, 4], [[0, 2, 2]])
    (y,) = ortrain.InferenceSession(artifacts.open_batch(model)).run(None, {"x": drawn(3, 4)})
    assert y.shape == (3, 2, 2)


def test_the_hint() -> None:
    model = network(1)
    session = ortrain.InferenceSession(model)
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        session.run(None, {"x": drawn(8, 5, 4)})
    assert str(error.value) == (
        'input "x" must be float32[1, 5, 4], got float32[8, 5, 4]: axis 0 should be 1 but is 8; if it is '
        "the batch, open_batch of ortrain.artifacts allows other sizes"
    )


def test_models_without_a_batch() -> None:
    scalar = fixed([node("Relu", ["x"], "y")], {}, [], [[]])
    with pytest.raises(
        ortrain.InvalidModelError, match='its first input "x" is float32\\[\\], so it has no first axis'
    ):
        artifacts.open_batch(scalar)
