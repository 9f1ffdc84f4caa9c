"""Random nodes on integers that stand for floats. Each pattern begins and ends with floats.

No quotient before a rounding is near the middle of two integers, where libraries round to different integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from random_graphs.building import FLOAT, Builder, Rejected, Samples, Value
from random_graphs.expanding import MICROSOFT
from random_graphs.operators import image, maker, put_between, some_axes, uniform

# Distance of a quotient from the middle of two integers, above the rounding errors of both libraries.
MARGIN_OF_INTEGERS = 2e-3
# Largest magnitude of an integer weight. The products of two of them and of bytes do not saturate 16 bits, in which
# some kernels of onnxruntime add pairs of products.
LARGEST_WEIGHT = 63
# Maximum number of integers of a value: more of them seldom are all away from the middle.
MAX_INTEGERS = 400
# Maximum number of scales to draw.
SCALES = 5
SOFTMAX_SCALE = 1 / 256


@dataclass(frozen=True)
class Quantized:
    """Integers, the scale and the zero point, and the floats that the integers stand for."""

    value: Value
    scale: Value
    zero: Value
    numbers: Samples

    @property
    def inputs(self) -> list[Value | None]:
        return [self.value, self.scale, self.zero]


def clear_halves(quotients: Sequence[np.ndarray], dtype: Any) -> None:
    """Reject quotients near the middle of two integers of the type."""
    limits = np.iinfo(dtype)
    for quotient in quotients:
        if quotient.size > MAX_INTEGERS:
            raise Rejected
        near = np.abs(quotient - np.floor(quotient) - 0.5) < MARGIN_OF_INTEGERS
        if (near & (quotient > limits.min - 1) & (quotient < limits.max + 1)).any():
            raise Rejected


def byte_type(g: Builder) -> Any:
    return g.choose([np.uint8, np.uint8, np.int8])


def range_of(g: Builder, samples: Sequence[np.ndarray], dtype: Any) -> tuple[np.float32, np.ndarray]:
    """Return a scale and a zero point that fit the numbers; a few of the numbers may be out of range.

    Draws until no quotient is near the middle of two integers.
    """
    low, high = (float(fn([fn(sample) for sample in samples])) for fn in (np.min, np.max))
    limits = np.iinfo(dtype)
    for attempt in range(SCALES):
        scale = np.float32(max(high - low, 0.05) / (limits.max - limits.min) * uniform(g, 0.9, 1.6))
        zero = np.clip(np.rint(limits.min - low / scale), limits.min, limits.max)
        try:
            clear_halves([sample.astype(np.float64) / scale + zero for sample in samples], dtype)
            break
        except Rejected:
            if attempt == SCALES - 1:
                raise
    return scale, np.asarray(zero, dtype)


def dequantized(integers: Samples, scale: np.ndarray, zero: np.ndarray) -> Samples:
    return tuple(np.asarray((one.astype(np.float32) - zero.astype(np.float32)) * scale, np.float32) for one in integers)


def to_integers(g: Builder, value: Value, dtype: Any = None) -> Quantized:
    """Add a QuantizeLinear."""
    dtype = dtype or byte_type(g)
    scale, zero = range_of(g, value.samples, dtype)
    inputs = [g.constant(scale), g.constant(zero)]
    made = g.add("QuantizeLinear", [value, *inputs])
    return Quantized(made, inputs[0], inputs[1], dequantized(made.samples, scale, zero))


def weights(g: Builder, shape: Sequence[int], axis: int, *, vector: bool = True) -> Quantized:
    """Add integer weights: constants, or the integers of a trained float. Scales are of the tensor or of an axis."""
    shape = tuple(shape)
    along = vector and g.chance(0.5)
    count = (shape[axis],) if along else ()
    scale = g.rng.uniform(0.01, 0.03, count).astype(np.float32)
    zero = np.zeros(count, np.int8)
    wide = [1 if k != axis else -1 for k in range(len(shape))] if along else []
    inputs = [g.constant(scale), g.constant(zero)]
    if g.chance(0.5):
        drawn = g.rng.integers(-LARGEST_WEIGHT, LARGEST_WEIGHT + 1, shape)
        value = g.constant(drawn, np.int8, stem="w")
    else:
        limit = scale.reshape(wide) * np.float32(LARGEST_WEIGHT)
        array = np.asarray(g.rng.uniform(-1, 1, shape) * limit, np.float32)
        clear_halves([array / scale.reshape(wide)], np.int8)
        value = g.add("QuantizeLinear", [g.parameter(array=array), *inputs], **({"axis": axis} if along else {}))
    numbers = dequantized(value.samples, scale.reshape(wide), zero.reshape(wide))
    return Quantized(value, inputs[0], inputs[1], numbers)


def computed(g: Builder, op: str, operands: Sequence[Samples], **attributes: Any) -> Samples:
    """Return the results of an operator on floats, without a node in the graph."""
    values = [Value(g.name("t"), samples) for samples in operands]
    node = helper.make_node(op, [value.name for value in values], ["r"], **attributes)
    return tuple(one[0] for one in g.run(node, values, ["r"]))


def result_range(g: Builder, numbers: Samples, dtype: Any, scale: float | None = None) -> list[Value]:
    """Add the scale and the zero point of a result, for the floats before its rounding.

    With a scale, the smallest integer stands for zero.
    """
    if scale is None:
        scale, zero = range_of(g, numbers, dtype)
    else:
        scale, zero = np.float32(scale), np.asarray(np.iinfo(dtype).min, dtype)
        clear_halves([sample.astype(np.float64) / scale + zero for sample in numbers], dtype)
    return [g.constant(scale), g.constant(zero)]


def finished(made: Value, range_: Sequence[Value]) -> Quantized:
    scale, zero = range_
    return Quantized(made, scale, zero, dequantized(made.samples, scale.array, zero.array))


# Operators from integers to integers.

Step = Callable[[Builder, Quantized], Quantized]


def linear_matmul(g: Builder, q: Quantized) -> Quantized:
    if q.value.rank < 2 or q.value.is_open(q.value.rank - 1):
        raise Rejected
    w = weights(g, [q.value.shape[-1], g.size()], 1)
    range_ = result_range(g, computed(g, "MatMul", [q.numbers, w.numbers]), q.value.array.dtype)
    return finished(g.add("QLinearMatMul", [*q.inputs, *w.inputs, *range_]), range_)


def filters(g: Builder, q: Quantized) -> tuple[Quantized, dict[str, Any]]:
    """Return integer filters for an image, and the attributes of a convolution."""
    value = q.value
    if value.rank not in (3, 4) or any(value.is_open(axis) for axis in range(1, value.rank)):
        raise Rejected
    spatial, channels = value.rank - 2, value.shape[1]
    group = g.choose([1, 1, channels])
    kernel = [int(g.rng.integers(1, min(size, 3) + 1)) for size in value.shape[2:]]
    attributes: dict[str, Any] = {
        "kernel_shape": kernel,
        "group": group,
        "strides": [int(g.rng.integers(1, 3)) for _ in range(spatial)],
        "pads": [int(g.rng.integers(0, size)) for size in kernel] * 2,
    }
    return weights(g, [group * g.choose([1, 2]), channels // group, *kernel], 0), attributes


def linear_conv(g: Builder, q: Quantized) -> Quantized:
    w, attributes = filters(g, q)
    operands = [q.numbers, w.numbers]
    bias: list[Value | None] = []
    if g.chance(0.5):
        integers = g.rng.integers(-400, 400, w.value.shape[0]).astype(np.int32)
        bias = [g.constant(integers)]
        operands.append((np.asarray(integers * (q.scale.array * w.scale.array), np.float32),) * len(g.batches))
    range_ = result_range(g, computed(g, "Conv", operands, **attributes), q.value.array.dtype)
    return finished(g.add("QLinearConv", [*q.inputs, *w.inputs, *range_, *bias], **attributes), range_)


def linear_pair(op: str) -> Step:
    def make(g: Builder, q: Quantized) -> Quantized:
        other = g.partner(q.value)
        if not other.is_float and other.name != q.value.name:
            raise Rejected
        second = to_integers(g, other, q.value.array.dtype) if other.is_float else q
        range_ = result_range(g, computed(g, op, [q.numbers, second.numbers]), q.value.array.dtype)
        pair = [*q.inputs, *second.inputs] if g.chance(0.5) else [*second.inputs, *q.inputs]
        return finished(g.add(f"QLinear{op}", [*pair, *range_], domain=MICROSOFT), range_)

    return make


def linear_map(op: str) -> Step:
    def make(g: Builder, q: Quantized) -> Quantized:
        attributes: dict[str, Any] = {}
        if op == "LeakyRelu":
            g.clear(Value(q.value.name, q.numbers), 0)
            attributes["alpha"] = uniform(g, 0.1, 0.5)
        if op == "Softmax":
            if q.value.rank < 2:
                raise Rejected
            attributes["axis"] = int(g.rng.integers(q.value.rank))
        numbers = computed(g, op, [q.numbers], **attributes)
        # For a softmax, onnxruntime rounds the reciprocal of the scale to an integer. Its quantizer writes this scale.
        scale = SOFTMAX_SCALE if op == "Softmax" else None
        if scale is not None and max(float(one.max()) for one in numbers) > 255 * scale:
            # The kernel returns 0 for 256 steps.
            raise Rejected
        range_ = result_range(g, numbers, q.value.array.dtype, scale)
        versions = {"opset": 13} if op == "Softmax" else {}
        made = g.add(f"QLinear{op}", [*q.inputs, *range_], domain=MICROSOFT, **attributes, **versions)
        return finished(made, range_)

    return make


def linear_concat(g: Builder, q: Quantized) -> Quantized:
    if q.value.rank < 1:
        raise Rejected
    axis = int(g.rng.integers(q.value.rank))
    shapes = [sample.shape for sample in q.value.samples]
    found = g.pick(lambda one: one.is_float and [sample.shape for sample in one.samples] == shapes)
    parts = [q, q if found is None else to_integers(g, found, q.value.array.dtype)]
    range_ = result_range(g, computed(g, "Concat", [one.numbers for one in parts], axis=axis), q.value.array.dtype)
    inputs = [value for one in parts for value in one.inputs]
    return finished(g.add("QLinearConcat", [*range_, *inputs], domain=MICROSOFT, axis=axis), range_)


def linear_pool(op: str) -> Step:
    def make(g: Builder, q: Quantized) -> Quantized:
        value = q.value
        if value.rank != 4 or any(value.is_open(axis) for axis in range(1, value.rank)):
            raise Rejected
        attributes: dict[str, Any] = {}
        if op == "AveragePool":
            kernel = [int(g.rng.integers(1, min(size, 3) + 1)) for size in value.shape[2:]]
            attributes = {
                "kernel_shape": kernel,
                "strides": [int(g.rng.integers(1, 3)) for _ in kernel],
                "pads": [int(g.rng.integers(0, size)) for size in kernel] * 2,
                "count_include_pad": int(g.chance(0.5)),
            }
        range_ = result_range(g, computed(g, op, [q.numbers], **attributes), value.array.dtype)
        return finished(g.add(f"QLinear{op}", [*q.inputs, *range_], domain=MICROSOFT, **attributes), range_)

    return make


def linear_gemm(g: Builder, q: Quantized) -> Quantized:
    made = gemm(g, q, g.choose([True, True, False]))
    return made if isinstance(made, Quantized) else to_integers(g, made)


def gemm(g: Builder, q: Quantized, rounded: bool) -> Quantized | Value:
    """Add a QGemm with a result of integers or of floats."""
    if q.value.rank != 2 or q.value.is_open(1):
        raise Rejected
    transposed, columns = g.chance(0.5), g.size()
    shape = [columns, q.value.shape[1]] if transposed else [q.value.shape[1], columns]
    w = weights(g, shape, 0 if transposed else 1)
    alpha = uniform(g, 0.5, 1.2) if g.chance(0.3) else 1.0
    attributes = {"transB": int(transposed), "alpha": alpha}
    numbers = computed(g, "Gemm", [q.numbers, w.numbers], **attributes)
    bias: list[Value | None] = [None]
    if g.chance(0.6):
        integers = g.rng.integers(-400, 400, columns).astype(np.int32)
        bias = [g.constant(integers)]
        added = np.float32(alpha) * integers * (q.scale.array * w.scale.array)
        numbers = tuple(np.asarray(one + added, np.float32) for one in numbers)
    inputs = [*q.inputs, *w.inputs, *bias]
    if not rounded:
        return g.add("QGemm", inputs, domain=MICROSOFT, **attributes)
    range_ = result_range(g, numbers, q.value.array.dtype)
    return finished(g.add("QGemm", [*inputs, *range_], domain=MICROSOFT, **attributes), range_)


def moved(g: Builder, q: Quantized) -> Quantized:
    """Add an operator that only moves or selects integers."""
    value = q.value
    op = g.choose(["Transpose", "Flatten", "Slice", "MaxPool", "Unsqueeze"])
    if op == "MaxPool":
        if value.rank != 4 or any(value.is_open(axis) for axis in range(1, value.rank)):
            raise Rejected
        # The largest of equal integers would be at a kink.
        g.distinct(Value(value.name, q.numbers), [2, 3])
        kernel = [int(g.rng.integers(1, min(size, 3) + 1)) for size in value.shape[2:]]
        made = g.add("MaxPool", [value], kernel_shape=kernel)
    elif op == "Slice":
        axis = some_axes(g, value, closed=True)[0] % value.rank
        start = int(g.rng.integers(0, value.shape[axis]))
        made = g.add("Slice", [value, g.ints(start), g.ints(10**6), g.ints(axis)])
    elif op == "Unsqueeze":
        if value.rank > 3:
            raise Rejected
        made = g.add("Unsqueeze", [value, g.ints(int(g.rng.integers(0, value.rank + 1)))])
    elif op == "Flatten":
        made = g.add("Flatten", [value], axis=int(g.rng.integers(0, value.rank + 1)))
    else:
        made = g.add("Transpose", [value], perm=[int(axis) for axis in g.rng.permutation(value.rank)])
    return Quantized(made, q.scale, q.zero, dequantized(made.samples, q.scale.array, q.zero.array))


STEPS: dict[str, Step] = {
    "QLinearMatMul": linear_matmul,
    "QLinearConv": linear_conv,
    "QLinearAdd": linear_pair("Add"),
    "QLinearMul": linear_pair("Mul"),
    "QLinearSigmoid": linear_map("Sigmoid"),
    "QLinearLeakyRelu": linear_map("LeakyRelu"),
    "QLinearSoftmax": linear_map("Softmax"),
    "QLinearConcat": linear_concat,
    "QLinearAveragePool": linear_pool("AveragePool"),
    "QLinearGlobalAveragePool": linear_pool("GlobalAveragePool"),
    "QGemm": linear_gemm,
    "moved integers": moved,
}
OF_IMAGES = ("QLinearConv", "QLinearAveragePool", "QLinearGlobalAveragePool", "ConvInteger")


def start(g: Builder, op: str) -> Value:
    """Return a float value for an operator of integers."""
    # A body runs on other values too, and their quotients may be near the middle of two integers.
    if g.depth:
        raise Rejected
    value = image(g, 2) if op in OF_IMAGES else g.float(2, 2) if op == "QGemm" else g.float(1, 4)
    if any(sample.size > MAX_INTEGERS for sample in value.samples):
        raise Rejected
    return value


@maker(*STEPS, weight=0.8)
def steps(g: Builder, op: str) -> Value:
    """Add one to three operators between QuantizeLinear and DequantizeLinear."""
    q = STEPS[op](g, to_integers(g, start(g, op)))
    for _ in range(g.choose([0, 0, 1, 2])):
        mark = g.mark()
        try:
            q = STEPS[g.choose(list(STEPS))](g, q)
        except Rejected:
            g.rewind(mark)
    return g.add("DequantizeLinear", q.inputs)


@maker("QuantizeLinear", weight=0.7)
def fake_quantized(g: Builder) -> Value:
    """Add QuantizeLinear and DequantizeLinear, with a scale for the tensor, for an axis, or for blocks."""
    value = start(g, "")
    axes = [axis for axis in range(value.rank) if not value.is_open(axis)]
    if g.chance(0.5) or not axes:
        return g.add("DequantizeLinear", to_integers(g, value, g.choose([np.uint8, np.int8])).inputs)
    axis, dtype = g.choose(axes), g.choose([np.uint8, np.int8])
    scale, zero = range_of(g, value.samples, dtype)
    attributes = {"axis": axis - value.rank if g.chance(0.3) else axis}
    count: tuple[int, ...] = (value.shape[axis],)
    spread: tuple[int, ...] = tuple(count[0] if k == axis else 1 for k in range(value.rank))
    repeats = 1
    if g.opset >= 21 and not value.open_axes and value.shape[axis] > 1 and g.chance(0.5):
        repeats = int(g.rng.integers(2, value.shape[axis] + 1))
        attributes["block_size"] = repeats
        count = spread = tuple(-(-size // repeats) if k == axis else size for k, size in enumerate(value.shape))
    scale_array = np.asarray(scale * g.rng.uniform(0.7, 1.5, count), np.float32)
    zero_array = np.full(count, zero, dtype)
    full = [np.repeat(one.reshape(spread), repeats, axis) for one in (scale_array, zero_array)]
    full = [one.take(range(value.shape[axis]), axis) for one in full]
    clear_halves([sample / full[0] + full[1] for sample in value.samples], dtype)
    inputs = [g.constant(scale_array), g.constant(zero_array)]
    return g.add("DequantizeLinear", [g.add("QuantizeLinear", [value, *inputs], **attributes), *inputs], **attributes)


def dynamic_range(samples: Samples) -> None:
    """Reject numbers near the middle of two integers of their dynamic quantization."""
    for sample in samples:
        low, high = min(float(sample.min()), 0.0), max(float(sample.max()), 0.0)
        if high - low < 0.05:
            raise Rejected
        scale = (high - low) / 255
        clear_halves([np.asarray(-low / scale), sample.astype(np.float64) / scale], np.int16)


@maker("DynamicQuantizeLinear", weight=0.7)
def dynamic(g: Builder) -> Value:
    """Add a dynamic quantization: dequantized, or before a product of integers."""
    value = start(g, "")
    dynamic_range(value.samples)
    integers, scale, zero = g.add_several("DynamicQuantizeLinear", [value], 3)
    if g.chance(0.3):
        return g.add("DequantizeLinear", [integers, scale, zero])
    if value.rank < 2 or value.is_open(value.rank - 1):
        raise Rejected
    return product(g, integers, scale, zero)


def product(g: Builder, integers: Value, scale: Value, zero: Value) -> Value:
    """Add MatMulInteger with the conversion of its result to floats."""
    w = weights(g, [integers.shape[-1], g.size()], 1)
    sums = g.add("MatMulInteger", [integers, w.value, zero, w.zero])
    return scaled(g, sums, scale, w.scale)


def scaled(g: Builder, sums: Value, *scales: Value) -> Value:
    """Add the product of integer sums and two scales."""
    floats = g.add_several("Cast", [sums], 1, wild=True, to=FLOAT)[0]
    return g.add("Mul", [floats, g.add("Mul", scales)])


@maker("MatMulInteger", "ConvInteger", "MatMulIntegerToFloat", weight=0.8)
def integer_products(g: Builder, op: str) -> Value:
    q = to_integers(g, start(g, op), np.uint8)
    if op == "ConvInteger":
        w, attributes = filters(g, q)
        if w.scale.rank:
            raise Rejected
        sums = g.add("ConvInteger", [q.value, w.value, q.zero, w.zero], **attributes)
        return scaled(g, sums, q.scale, w.scale)
    if q.value.rank < 2 or q.value.is_open(q.value.rank - 1):
        raise Rejected
    if op == "MatMulInteger":
        return product(g, *q.inputs)
    w = weights(g, [q.value.shape[-1], g.size()], 1)
    inputs = [q.value, w.value, q.scale, w.scale, q.zero, w.zero]
    if g.chance(0.5):
        inputs.append(g.weight([w.value.shape[1]]))
    return g.add("MatMulIntegerToFloat", inputs, domain=MICROSOFT)


@maker("DynamicQuantizeMatMul", weight=0.5)
def dynamic_matmul(g: Builder) -> Value:
    value = start(g, "")
    if value.rank < 2 or value.is_open(value.rank - 1):
        raise Rejected
    dynamic_range(value.samples)
    w = weights(g, [value.shape[-1], g.size()], 1)
    inputs = [value, w.value, w.scale, w.zero]
    if g.chance(0.5):
        inputs.append(g.weight([w.value.shape[1]]))
    return g.add("DynamicQuantizeMatMul", inputs, domain=MICROSOFT)


@maker("float QGemm", weight=0.3)
def float_gemm(g: Builder) -> Value:
    made = gemm(g, to_integers(g, start(g, "QGemm")), rounded=False)
    assert isinstance(made, Value)
    return made


# Element types without arrays in onnxruntime's interface: a cast to them and back is added as a pair.

EIGHT_BITS = {
    TensorProto.FLOAT8E4M3FN: 3,
    TensorProto.FLOAT8E5M2: 2,
    TensorProto.FLOAT8E4M3FNUZ: 3,
    TensorProto.FLOAT8E5M2FNUZ: 2,
}
FOUR_BITS = (TensorProto.INT4, TensorProto.UINT4)


@maker("narrow Cast", weight=0.5)
def narrow_cast(g: Builder) -> Value:
    """Add a cast to floats of eight bits or to integers of four bits, and back."""
    if g.depth:
        raise Rejected
    value = g.float(1, 4)
    if g.opset >= 21 and g.chance(0.4):
        # onnxruntime rounds floats to integers of four bits, but the standard truncates them.
        value = put_between(g, value, -7, 7)
        g.clear(value, *(k + 0.5 for k in range(-8, 8)))
        return g.add_cast_pair(g.add("Abs", [g.add("Round", [value])]), g.choose(FOUR_BITS))
    if g.opset < 19:
        raise Rejected
    to = g.choose(list(EIGHT_BITS))
    for sample in value.samples:
        # Numbers between two floats of eight bits, in units of their distance.
        exponents = np.floor(np.log2(np.maximum(np.abs(sample), 2.0**-6)))
        quotient = np.abs(sample) / 2.0 ** (exponents - EIGHT_BITS[to])
        if (np.abs(quotient - np.floor(quotient) - 0.5) < MARGIN_OF_INTEGERS).any() or (np.abs(sample) < 2**-6).any():
            raise Rejected
    return g.add_cast_pair(value, to)


QUANTIZED = frozenset(STEPS) | {
    "QuantizeLinear",
    "DynamicQuantizeLinear",
    "MatMulInteger",
    "ConvInteger",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "float QGemm",
    "narrow Cast",
}


def is_rounding(node: NodeProto) -> bool:
    """Return true for a node on integers that stand for floats, apart from nodes that only move integers."""
    return node.op_type in QUANTIZED or node.op_type == "DequantizeLinear"
