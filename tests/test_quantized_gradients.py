"""Gradients through quantized tensors: straight-through estimators, learned step sizes, and weights of a few bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_quantized_operators import MICROSOFT, f32, floats, i8, integers, u8

import ortrain
from ortrain.gradient import grad, vjp

# Rounding of float32 in sums of a few hundred products, relative to the largest gradient.
TOLERANCE = 2e-6
# Rounding of float32 in products with dequantized weights, relative to the largest gradient.
DEQUANTIZED_TOLERANCE = 1e-6


def model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, np.ndarray],
    constants: dict[str, np.ndarray],
    outputs: list[str],
    opset: int = 21,
) -> bytes:
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
    sets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    made: onnx.ModelProto = helper.make_model(graph, opset_imports=sets, ir_version=10)
    return bytes(made.SerializeToString())


def gradients(made: bytes, inputs: dict[str, np.ndarray], of: str, g: np.ndarray, wrt: list[str]) -> list[np.ndarray]:
    """Return the gradients of inputs and initializers for the gradient ``g`` of an output."""
    session = ortrain.InferenceSession(vjp(made, of=of, wrt=wrt))
    found = session.run([f"{name}_grad" for name in wrt], inputs | {f"{of}_grad": g})
    return [np.asarray(value) for value in found]


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    """Compare by a tolerance relative to the largest element."""
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(1e-3, np.abs(expected).max()))


def fake_quantize(
    x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, g: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return quantized and dequantized numbers, and the gradients of the numbers and of each of their scales.

    Straight-through estimator inside of the range; learned step sizes (Esser et al. 2020, equation 3).
    """
    limits = np.iinfo(zero_point.dtype)
    x, scale, zero = x.astype(np.float64), scale.astype(np.float64), zero_point.astype(np.float64)
    low, high = limits.min - zero, limits.max - zero
    steps = np.rint(x / scale)
    inside = (steps >= low) & (steps <= high)
    kept = np.clip(steps, low, high)
    return kept * scale, np.where(inside, g, 0), g * np.where(inside, steps - x / scale, kept)


SCALES = [
    pytest.param(f32(0.02), u8(128), None, id="tensor"),
    pytest.param(f32(0.03), i8(-5), None, id="signed tensor"),
    pytest.param(f32(0.02, 0.01, 0.05), i8(0, 3, -9), 1, id="axis"),
    pytest.param(f32(0.02, 0.01, 0.05), u8(100, 3, 200), -2, id="negative axis"),
]


@pytest.mark.parametrize(("scale", "zero_point", "axis"), SCALES)
def test_quantized_and_dequantized(scale: np.ndarray, zero_point: np.ndarray, axis: int | None) -> None:
    x, g = 3 * floats(1, (2, 3, 4)), floats(2, (2, 3, 4))
    along = {} if axis is None else {"axis": axis}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["q"], **along),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero_point"], ["y"], **along),
    ]
    inputs = {"x": x}
    made = model(nodes, inputs, {"scale": scale, "zero_point": zero_point}, ["y"])
    wide = (scale, zero_point) if axis is None else (scale[:, None], zero_point[:, None])
    y, dx, dscale = fake_quantize(x, *wide, g)
    assert_close(ortrain.InferenceSession(made).run(None, inputs)[0], y)
    found = gradients(made, inputs, "y", g, ["x", "scale"])
    assert_close(found[0], dx)
    assert_close(found[1], dscale.sum() if axis is None else dscale.sum((0, 2)))


def test_blocks() -> None:
    """Blocks of three along an axis of seven: the last block has one element."""
    x, g = floats(1, (2, 7)), floats(2, (2, 7))
    scale, zero_point = np.abs(floats(3, (2, 3))) + f32(0.01), integers(4, (2, 3), "int8")
    blocked = {"axis": 1, "block_size": 3}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["q"], **blocked),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero_point"], ["y"], **blocked),
    ]
    made = model(nodes, {"x": x}, {"scale": scale, "zero_point": zero_point}, ["y"])
    of_elements = [np.repeat(values, 3, axis=1)[:, :7] for values in (scale, zero_point)]
    _, dx, dscale = fake_quantize(x, *of_elements, g)
    found = gradients(made, {"x": x}, "y", g, ["x", "scale"])
    assert_close(found[0], dx)
    padded = np.pad(dscale, ((0, 0), (0, 2))).reshape(2, 3, 3)
    assert_close(found[1], padded.sum(2))


def test_integers_that_move() -> None:
    """Pooling, reshaping, slicing and joining of integers pass the gradient to the numbers that they stand for."""
    x, g = floats(1, (2, 3, 4, 6)), floats(2, (2, 12))
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["q"]),
        helper.make_node("MaxPool", ["q"], ["pooled"], kernel_shape=[2, 3], strides=[2, 3]),
        helper.make_node("Transpose", ["pooled"], ["moved"], perm=[0, 2, 3, 1]),
        helper.make_node("Flatten", ["moved"], ["flat"]),
        helper.make_node("Slice", ["flat", "start", "end", "axis"], ["first"]),
        helper.make_node("Slice", ["flat", "end", "last", "axis"], ["second"]),
        helper.make_node("Concat", ["second", "first"], ["joined"], axis=1),
        helper.make_node("DequantizeLinear", ["joined", "scale", "zero_point"], ["y"]),
    ]
    constants = {
        "scale": f32(0.03),
        "zero_point": u8(120),
        **{name: np.array([at]) for name, at in {"start": 0, "end": 5, "last": 12, "axis": 1}.items()},
    }
    made = model(nodes, {"x": x}, constants, ["y"])
    (found,) = gradients(made, {"x": x}, "y", g, ["x"])
    # The largest of equal integers is the first one, so the expected positions come from the integers.
    y, inside, _ = fake_quantize(x, constants["scale"], constants["zero_point"], np.ones_like(x))
    windows = y.reshape(2, 3, 2, 2, 2, 3).transpose(0, 1, 2, 4, 3, 5).reshape(2, 3, 2, 2, 6)
    flat = np.concatenate([g[:, 7:], g[:, :7]], axis=1).reshape(2, 2, 2, 3).transpose(0, 3, 1, 2)
    expected = np.zeros_like(windows)
    np.put_along_axis(expected, windows.argmax(-1)[..., None], flat[..., None], -1)
    expected = expected.reshape(2, 3, 2, 2, 2, 3).transpose(0, 1, 2, 4, 3, 5).reshape(x.shape)
    assert_close(found, expected * inside)


def dequantized(integers_: np.ndarray, scale: np.ndarray, zero_point: np.ndarray) -> np.ndarray:
    """Return the numbers that integers stand for."""
    return (integers_.astype(np.float64) - zero_point) * scale


def test_linear_convolution() -> None:
    """The gradient of ``QLinearConv`` is the gradient of the convolution of the dequantized tensors."""
    x, g = floats(1, (2, 2, 6, 5)), floats(2, (2, 3, 6, 5))
    w, w_scale = integers(3, (3, 2, 3, 3), "int8"), f32(0.01, 0.02, 0.03)
    bias = np.array([50, -30, 10], np.int32)
    constants = {
        "s": f32(0.03),
        "z": u8(120),
        "w": w,
        "ws": w_scale,
        "wz": i8(0, 0, 0),
        "ys": f32(0.4),
        "yz": u8(110),
        "b": bias,
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("QLinearConv", ["q", "s", "z", "w", "ws", "wz", "ys", "yz", "b"], ["r"], pads=[1] * 4),
        helper.make_node("DequantizeLinear", ["r", "ys", "yz"], ["y"]),
    ]
    found = gradients(model(nodes, {"x": x}, constants, ["y"]), {"x": x}, "y", g, ["x"])[0]
    plain = [
        helper.make_node("Conv", ["x", "w", "b"], ["y"], pads=[1] * 4),
    ]
    kept, inside_x, _ = fake_quantize(x, constants["s"], constants["z"], np.ones_like(x))
    weights = {
        "w": dequantized(w, w_scale[:, None, None, None], np.zeros(())).astype(np.float32),
        "b": (bias * 0.03 * w_scale.astype(np.float64)).astype(np.float32),
    }
    floating = model(plain, {"x": x}, weights, ["y"])
    y = ortrain.InferenceSession(floating).run(None, {"x": kept.astype(np.float32)})[0]
    _, inside, _ = fake_quantize(y, constants["ys"], constants["yz"], g)
    expected = gradients(floating, {"x": kept.astype(np.float32)}, "y", inside.astype(np.float32), ["x"])[0]
    assert_close(found, expected * inside_x, 4 * TOLERANCE)


@pytest.mark.parametrize("batch", [(), (2,)], ids=["matrix", "batch"])
def test_dynamic_quantization(batch: tuple[int, ...]) -> None:
    """The nodes of dynamic quantization pass the gradient to the input and to the weights behind the integers."""
    x, g = floats(1, (*batch, 3, 8)), floats(2, (*batch, 3, 5))
    w = floats(3, (8, 5))
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"]),
        helper.make_node("QuantizeLinear", ["w", "ws", "wz"], ["wq"]),
        helper.make_node("MatMulInteger", ["xq", "wq", "xz", "wz"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["xs", "ws"], ["scale"]),
        helper.make_node("Mul", ["floats", "scale"], ["y"]),
    ]
    made = model(nodes, {"x": x}, {"w": w, "ws": f32(0.02), "wz": i8(3)}, ["y"])
    dx, dw = gradients(made, {"x": x}, "y", g, ["x", "w"])
    low, high = min(0, x.min()), max(0, x.max())
    step = np.float64((high - low) / 255)
    zero = np.rint(-low / step)
    kept_x = (np.clip(np.rint(x / step) + zero, 0, 255) - zero) * step
    kept_w, inside, _ = fake_quantize(w, f32(0.02), i8(3), np.ones_like(w))
    assert_close(dx, g @ kept_w.T, 4 * TOLERANCE)
    rows_x, rows_g = kept_x.reshape(-1, 8), g.reshape(-1, 5)
    assert_close(dw, (rows_x.T @ rows_g) * inside, 4 * TOLERANCE)


def nibbles(packed: np.ndarray, high_first: bool = False) -> np.ndarray:
    """Split bytes into integers of four bits along the last axis."""
    halves = [packed & 15, packed >> 4]
    return np.stack(halves[::-1] if high_first else halves, -1).reshape(*packed.shape[:-1], -1)


def four_bits() -> tuple[str, list[np.ndarray], dict[str, int], np.ndarray]:
    """Return ``MatMulNBits``: name, inputs, attributes and the weights as floats."""
    rng = np.random.default_rng(4)
    packed, zero_points = rng.integers(0, 256, (6, 3, 8), np.uint8), rng.integers(0, 256, (6, 2), np.uint8)
    scales = floats(5, (6, 3))
    q, z = nibbles(packed).reshape(6, 48), nibbles(zero_points)[:, :3]
    weights = (q.astype(np.float64) - np.repeat(z, 16, 1)) * np.repeat(scales, 16, 1)
    return (
        "MatMulNBits",
        [packed, scales, zero_points],
        {"N": 6, "K": 40, "bits": 4, "block_size": 16},
        weights[:, :40].T,
    )


def normal_floats() -> tuple[str, list[np.ndarray], dict[str, int], np.ndarray]:
    """Return ``MatMulBnb4`` with the numbers of FP4: name, inputs, attributes and the weights as floats."""
    table = np.array([0, 5.208333e-3, 2 / 3, 1, 1 / 3, 0.5, 1 / 6, 0.25])
    table = np.concatenate([table, -table])
    packed, scales = np.random.default_rng(4).integers(0, 256, 6 * 40 // 2, np.uint8), np.abs(floats(5, (15,)))
    weights = table[nibbles(packed, high_first=True)] * np.repeat(scales, 16)
    return (
        "MatMulBnb4",
        [packed, scales],
        {"N": 6, "K": 40, "block_size": 16, "quant_type": 0},
        weights.reshape(6, 40).T,
    )


@pytest.mark.parametrize("make", [four_bits, normal_floats])
def test_weights_of_four_bits(make: Callable[[], tuple[str, list[np.ndarray], dict[str, int], np.ndarray]]) -> None:
    """Gradients equal the gradients of the model with dequantized weights; the integers have none."""
    operator, tensors, attributes, weights = make()
    x, g = floats(1, (2, 3, 40)), floats(2, (2, 3, 6))
    names = [f"b{k}" for k in range(len(tensors))]
    node = helper.make_node(operator, ["x", *names], ["y"], domain=MICROSOFT, **attributes)
    made = model([node], {"x": x}, dict(zip(names, tensors, strict=True)), ["y"])
    y = ortrain.InferenceSession(made).run(None, {"x": x})[0]
    assert_close(y, x @ weights, DEQUANTIZED_TOLERANCE)
    found = gradients(made, {"x": x}, "y", g, ["x", "b1"])
    assert_close(found[0], g @ weights.T, DEQUANTIZED_TOLERANCE)
    assert found[1].shape == tensors[1].shape
    with pytest.raises(ortrain.OrtrainError, match="only floats have gradients"):
        grad(made, of="y", wrt="b0")
