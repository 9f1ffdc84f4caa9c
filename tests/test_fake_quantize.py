"""Gradients of ``QuantizeLinear`` and ``DequantizeLinear`` are the gradients of torch's fake quantization.

tests/in_torch/fake_quantize.py writes the record.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain.gradient import vjp

RECORD = Path(__file__).parent / "data" / "torch" / "fake-quantize.npz"
# Element type and axis of each recorded case.
CASES = {
    "uint8": (TensorProto.UINT8, None),
    "int8": (TensorProto.INT8, None),
    "uint16": (TensorProto.UINT16, None),
    "int16": (TensorProto.INT16, None),
    "uint4": (TensorProto.UINT4, None),
    "int4": (TensorProto.INT4, None),
    "uint8 of filters": (TensorProto.UINT8, 0),
    "int8 of filters": (TensorProto.INT8, 0),
    "int8 of channels": (TensorProto.INT8, 1),
    "uint8 of columns": (TensorProto.UINT8, 2),
    "int4 of rows": (TensorProto.INT4, 0),
}
# Rounding of float32, relative to the largest element. torch multiplies by the reciprocal of the scale.
TOLERANCE = 1e-5
# Minimum shares of numbers inside and outside of the range, so that both gradients are compared.
MIN_SHARE = 0.1


def recorded(case: str) -> dict[str, np.ndarray]:
    with np.load(RECORD) as stored:
        return {key.split("/")[1]: stored[key] for key in stored.files if key.split("/")[0] == case}


def model(case: str, arrays: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Return a model that quantizes and dequantizes ``x``."""
    dtype, axis = CASES[case]
    along = {} if axis is None else {"axis": axis}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["q"], **along),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero_point"], ["y"], **along),
    ]
    zero_point = arrays["zero_point"]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, arrays["x"].shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, arrays["x"].shape)],
        [
            numpy_helper.from_array(arrays["scale"], "scale"),
            helper.make_tensor("zero_point", dtype, zero_point.shape, zero_point.ravel().tolist()),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_torch(case: str) -> None:
    arrays = recorded(case)
    made = model(case, arrays)
    inside = (arrays["dx"] != 0).mean()
    assert MIN_SHARE < inside < 1 - MIN_SHARE
    (y,) = ortrain.InferenceSession(made).run(None, {"x": arrays["x"]})
    assert_close(np.asarray(y), arrays["y"])
    session = ortrain.InferenceSession(vjp(made, of="y", wrt=["x", "scale"]))
    dx, dscale = session.run(["x_grad", "scale_grad"], {"x": arrays["x"], "y_grad": arrays["g"]})
    np.testing.assert_array_equal(np.asarray(dx) != 0, arrays["dx"] != 0)
    assert_close(np.asarray(dx), arrays["dx"])
    assert_close(np.asarray(dx), arrays["learned_dx"])
    assert_close(np.asarray(dscale), arrays["learned_dscale"])


@pytest.mark.parametrize("case", CASES)
def test_learned_steps(case: str) -> None:
    """The gradient of a step follows Esser et al. (2020, equation 3), without the factor of section 2.2.

    A number inside of the range contributes its rounding error in steps, and another number its limit in steps. The
    half step next to a limit is inside of the range here and in torch, and outside in the paper: it gets no gradient.
    """
    arrays = recorded(case)
    dtype, axis = CASES[case]
    name = TensorProto.DataType.Name(dtype)
    bits = int(name.lstrip("UINT"))
    low = 0 if name.startswith("U") else -(2 ** (bits - 1))
    x = arrays["x"].astype(np.float64)
    wide = [1 if k != axis else -1 for k in range(x.ndim)] if axis is not None else []
    scale, zero_point = (arrays[key].astype(np.float64).reshape(wide) for key in ("scale", "zero_point"))
    smallest, largest = low - zero_point, low + 2**bits - 1 - zero_point
    steps = x / scale
    inside = (smallest < steps) & (steps < largest)
    at_limit = ~inside & (smallest - 0.5 <= steps) & (steps <= largest + 0.5)
    g = np.where(at_limit, 0, arrays["g"])
    terms = g * np.where(inside, np.rint(steps) - steps, np.clip(steps, smallest, largest))
    expected = terms.sum(tuple(k for k in range(x.ndim) if k != axis))
    session = ortrain.InferenceSession(vjp(model(case, arrays), of="y", wrt=["scale"]))
    (found,) = session.run(["scale_grad"], {"x": arrays["x"], "y_grad": g})
    assert_close(np.asarray(found), expected)
