"""Element types of at most eight bits: floats of eight and four bits, integers of four and two bits."""

from __future__ import annotations

import io

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_quantized_operators import MICROSOFT, floats, without_optimizer

import ortrain

TYPES = {
    "float8_e4m3fn": TensorProto.FLOAT8E4M3FN,
    "float8_e4m3fnuz": TensorProto.FLOAT8E4M3FNUZ,
    "float8_e5m2": TensorProto.FLOAT8E5M2,
    "float8_e5m2fnuz": TensorProto.FLOAT8E5M2FNUZ,
    "float8_e8m0fnu": TensorProto.FLOAT8E8M0,
    "float4_e2m1fn": TensorProto.FLOAT4E2M1,
    "int4": TensorProto.INT4,
    "uint4": TensorProto.UINT4,
    "int2": TensorProto.INT2,
    "uint2": TensorProto.UINT2,
}
OPSET = 25


def codes(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw elements of a type from all its codes but NaN."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    bits = 4 if "4_" in name or name.endswith("4") else 2 if name.endswith("2") and "int" in name else 8
    drawn = np.random.default_rng(1).integers(0, 1 << bits, shape).astype(np.uint8).view(dtype)
    return np.where(np.isnan(drawn.astype(np.float32)), np.array(1).astype(dtype), drawn)


def model(
    nodes: list[onnx.NodeProto], inputs: dict[str, np.ndarray], outputs: list[str], constants: dict[str, np.ndarray]
) -> onnx.ModelProto:
    """Return a model with these inputs and initializers."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in inputs.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    sets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=sets, ir_version=10)


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Compare types and numbers; the unused bits of a code do not count."""
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("name", TYPES)
def test_operators_that_move_elements(name: str) -> None:
    """Elements pass through axes, slices, joins, selections, an If and a Loop."""
    x, constant = codes(name, (3, 5)), codes(name, (2, 5))
    value = helper.make_tensor_value_info
    branch = helper.make_graph(
        [helper.make_node("Identity", ["joined"], ["same"])], "then", [], [value("same", TYPES[name], None)]
    )
    other = helper.make_graph(
        [helper.make_node("Slice", ["joined", "one", "two"], ["part"])], "else", [], [value("part", TYPES[name], None)]
    )
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["continue"], ["continues"]),
            helper.make_node("Transpose", ["carried"], ["turned"], perm=[1, 0]),
            helper.make_node("Identity", ["turned"], ["collected"]),
        ],
        "body",
        [
            value("k", TensorProto.INT64, []),
            value("continue", TensorProto.BOOL, []),
            value("carried", TYPES[name], [4, 4]),
        ],
        [
            value("continues", TensorProto.BOOL, []),
            value("turned", TYPES[name], [4, 4]),
            value("collected", TYPES[name], [4, 4]),
        ],
    )
    nodes = [
        helper.make_node("Concat", ["x", "constant"], ["joined"], axis=0),
        helper.make_node("If", ["flag"], ["chosen"], then_branch=branch, else_branch=other),
        helper.make_node("Slice", ["chosen", "one", "five", "axis"], ["columns"]),
        helper.make_node("Gather", ["columns", "rows"], ["square"], axis=0),
        helper.make_node("Loop", ["count", "", "square"], ["last", "all"], body=body),
        helper.make_node("Where", ["mask", "last", "square"], ["mixed"]),
        helper.make_node("Reshape", ["mixed", "flat"], ["y"]),
    ]
    rows = np.array([4, 0, 2, 2])
    mask = np.random.default_rng(2).random((4, 4)) < 0.5
    constants = {
        "constant": constant,
        "rows": rows,
        "count": np.array(3),
        "mask": mask,
        **{key: np.array([at]) for key, at in {"one": 1, "two": 2, "five": 5, "axis": 1, "flat": -1}.items()},
    }
    feeds = {"x": x, "flag": np.array(True)}
    made = model(nodes, feeds, ["y", "all"], constants)
    y, collected = ortrain.InferenceSession(made).run(None, feeds)
    square = np.concatenate([x, constant])[rows, 1:]
    assert_same(y, np.where(mask, square.T, square).reshape(-1))
    assert_same(collected, np.stack([square.T, square, square.T]))


@pytest.mark.parametrize("name", [name for name in TYPES if name != "float8_e8m0fnu"])
def test_dequantized_weights(name: str) -> None:
    """A weight of the type in blocks is a factor of a product; onnxruntime agrees where it has the type."""
    weight, x = codes(name, (8, 5)), floats(1, (3, 8))
    scale = np.abs(floats(2, (2, 5))) + np.float32(0.1)
    nodes = [
        helper.make_node("DequantizeLinear", ["weight", "scale"], ["w"], axis=0, block_size=4),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    made = model(nodes, {"x": x}, ["y"], {"weight": weight, "scale": scale})
    (y,) = ortrain.InferenceSession(made).run(None, {"x": x})
    expected = x @ (weight.astype(np.float32) * np.repeat(scale, 4, 0))
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    if name in ("int4", "uint4"):
        made.opset_import[0].version = 21
        session = ort.InferenceSession(made.SerializeToString(), without_optimizer())
        np.testing.assert_allclose(y, session.run(None, {"x": x})[0], rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["int4", "uint4"])
@pytest.mark.parametrize("has_zero_points", [False, True])
def test_rows_of_integers(name: str, has_zero_points: bool) -> None:
    table, scales, zero_points = codes(name, (7, 32)), floats(2, (7, 2)), codes(name, (7, 2))
    rows = np.array([[1, 6, -1], [0, 3, 3]])
    constants = {"table": table, "scales": scales} | ({"zero_points": zero_points} if has_zero_points else {})
    node = helper.make_node(
        "GatherBlockQuantized",
        ["table", "rows", *list(constants)[1:]],
        ["y"],
        domain=MICROSOFT,
        block_size=16,
        gather_axis=0,
        quantize_axis=1,
    )
    made = model([node], {"rows": rows}, ["y"], constants)
    (y,) = ortrain.InferenceSession(made).run(None, {"rows": rows})
    zeros = zero_points.astype(np.float32) if has_zero_points else np.zeros((7, 2), np.float32)
    numbers = (table.astype(np.float32) - np.repeat(zeros, 16, 1)) * np.repeat(scales, 16, 1)
    np.testing.assert_allclose(y, numbers[rows], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", TYPES)
def test_files_hold_packed_elements(name: str) -> None:
    """A saved and loaded model gives the same elements, from bytes and from typed fields."""
    x = codes(name, (3, 3))
    nodes = [helper.make_node("Identity", ["w"], ["y"])]
    made = model(nodes, {}, ["y"], {"w": x})
    buffer = io.BytesIO()
    onnx.save(made, buffer)
    assert_same(ortrain.InferenceSession(buffer.getvalue()).run(None, {})[0], x)
    raw = made.graph.initializer[0]
    typed = TensorProto(name="w", dims=raw.dims, data_type=raw.data_type, int32_data=list(raw.raw_data))
    made.graph.initializer[0].CopyFrom(typed)
    assert_same(ortrain.InferenceSession(made).run(None, {})[0], x)
    typed.int32_data.append(0)
    made.graph.initializer[0].CopyFrom(typed)
    with pytest.raises(ortrain.InvalidModelError, match="int32_data"):
        ortrain.InferenceSession(made)


@pytest.mark.parametrize("operator", ["Add", "Relu", "MatMul", "Equal", "ReduceSum", "ArgMax"])
def test_arithmetic_is_refused(operator: str) -> None:
    x = codes("float8_e4m3fn", (2, 2))
    inputs = ["x", "x"] if operator in ("Add", "MatMul", "Equal") else ["x"]
    made = model([helper.make_node(operator, inputs, ["y"], name="node")], {"x": x}, ["y"], {})
    with pytest.raises(ortrain.InvalidModelError, match="input 0 is of type float8_e4m3fn"):
        ortrain.InferenceSession(made)
