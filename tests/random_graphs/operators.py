"""Random nodes. The function of an operator adds a node to a graph, or raises Rejected if no node fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from random_graphs.building import BOOL, FLOAT, INT64, Builder, Rejected, Value

Maker = Callable[[Builder], Any]

MAKERS: dict[str, Maker] = {}
WEIGHTS: dict[str, float] = {}


def maker(*names: str, weight: float = 1.0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function for some operators. A function for several operators gets the name as second argument."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            if len(names) == 1:
                MAKERS[name] = function
            else:
                MAKERS[name] = lambda g, name=name: function(g, name)
            WEIGHTS[name] = weight
        return function

    return enter


def needs(g: Builder, opset: int) -> None:
    if g.opset < opset:
        raise Rejected


def uniform(g: Builder, low: float, high: float) -> float:
    return float(np.float32(g.rng.uniform(low, high)))


# Range of arguments of each element-wise operator, and points where the operator is not smooth.
UNARY: dict[str, tuple[float, float, tuple[float, ...]]] = {
    "Abs": (-40, 40, (0,)),
    "Acos": (-0.9, 0.9, ()),
    "Acosh": (1.1, 40, ()),
    "Asin": (-0.9, 0.9, ()),
    "Asinh": (-40, 40, ()),
    "Atan": (-40, 40, ()),
    "Atanh": (-0.9, 0.9, ()),
    "Ceil": (-40, 40, tuple(range(-40, 41))),
    "Cos": (-12, 12, ()),
    "Cosh": (-3, 3, ()),
    "Erf": (-12, 12, ()),
    "Exp": (-12, 3, ()),
    "Floor": (-40, 40, tuple(range(-40, 41))),
    "HardSwish": (-40, 40, (-3, 3)),
    "Identity": (-40, 40, ()),
    "Log": (0.15, 40, ()),
    "Mish": (-12, 40, ()),
    "Neg": (-40, 40, ()),
    "Relu": (-40, 40, (0,)),
    "Round": (-40, 40, tuple(k + 0.5 for k in range(-40, 40))),
    "Sigmoid": (-12, 12, ()),
    "Sign": (-40, 40, (0,)),
    "Sin": (-12, 12, ()),
    "Sinh": (-3, 3, ()),
    "Softplus": (-12, 40, ()),
    "Softsign": (-40, 40, (0,)),
    "Sqrt": (0.15, 40, ()),
    "Tan": (-1.2, 1.2, ()),
    "Tanh": (-12, 12, ()),
}


def put_between(g: Builder, value: Value, low: float, high: float) -> Value:
    """Return the value, or a value computed from it, with elements between the bounds."""
    if low <= value.minimum and value.maximum <= high:
        return value
    if g.special and not value.is_finite:
        return value
    if low > 0:
        squared = g.add("Mul", [value, value])
        value = g.add("Add", [squared, g.scalar(low + 0.1)])
        return value if value.maximum <= high else g.add("Clip", [value, None, g.scalar(high)])
    squashed = g.add(g.choose(["Tanh", "Sin"]), [value])
    return squashed if low <= -1 and high >= 1 else g.add("Mul", [squashed, g.scalar(0.9 * min(-low, high))])


@maker(*UNARY)
def unary(g: Builder, op: str) -> Value:
    low, high, kinks = UNARY[op]
    value = put_between(g, g.float(), low, high)
    g.clear(value, *kinks)
    return g.add(op, [value])


@maker("Reciprocal")
def reciprocal(g: Builder) -> Value:
    value = g.float()
    if value.minimum < 0 < value.maximum or min(abs(value.minimum), abs(value.maximum)) < 0.2:
        value = put_between(g, value, 0.2, 40)
    g.clear(value, 0)
    return g.add("Reciprocal", [value])


@maker("Celu", "Elu", "LeakyRelu", "ThresholdedRelu")
def with_alpha(g: Builder, op: str) -> Value:
    alpha, value = uniform(g, 0.2, 1.2), g.float()
    g.clear(value, alpha if op == "ThresholdedRelu" else 0)
    return g.add(op, [value], alpha=alpha)


@maker("Selu")
def selu(g: Builder) -> Value:
    value = g.float()
    g.clear(value, 0)
    return g.add(
        "Selu", [value], **({"alpha": uniform(g, 1, 2), "gamma": uniform(g, 0.5, 1.5)} if g.chance(0.5) else {})
    )


@maker("HardSigmoid")
def hard_sigmoid(g: Builder) -> Value:
    alpha, beta, value = uniform(g, 0.1, 0.6), uniform(g, 0.3, 0.7), g.float()
    g.clear(value, -beta / alpha, (1 - beta) / alpha)
    return g.add("HardSigmoid", [value], alpha=alpha, beta=beta)


@maker("Shrink")
def shrink(g: Builder) -> Value:
    lambd, bias, value = uniform(g, 0.2, 0.8), uniform(g, 0, 0.3), g.float()
    g.clear(value, lambd, -lambd)
    return g.add("Shrink", [value], lambd=lambd, bias=bias)


@maker("Gelu")
def gelu(g: Builder) -> Value:
    needs(g, 20)
    return g.add("Gelu", [g.float()], **({"approximate": "tanh"} if g.chance(0.5) else {}))


@maker("Gelu of com.microsoft", "QuickGelu", "BiasGelu", "FastGelu")
def microsoft(g: Builder, op: str) -> Value:
    value = g.float(1)
    if op == "BiasGelu" or (op == "FastGelu" and g.chance(0.5)):
        if value.is_open(value.rank - 1):
            raise Rejected
        return g.add(op, [value, g.weight(value.shape[-1:])], domain="com.microsoft")
    return g.add(op.split()[0], [value], domain="com.microsoft")


@maker("Clip")
def clip(g: Builder) -> Value:
    value = g.float()
    low, high = uniform(g, -1, 0), uniform(g, 0.2, 1)
    bounds = [g.scalar(low) if g.chance(0.7) else None, g.scalar(high) if g.chance(0.7) else None]
    g.clear(value, low, high)
    return g.add("Clip", [value, *bounds])


# Operators of two values.


@maker("Add", "Sub", "Mul", weight=2)
def arithmetic(g: Builder, op: str) -> Value:
    value = g.float()
    pair = [value, g.partner(value)]
    return g.add(op, pair if g.chance(0.5) else pair[::-1])


@maker("Div")
def div(g: Builder) -> Value:
    value = g.float()
    other = g.partner(value)
    if min(abs(other.minimum), abs(other.maximum)) < 0.2 or other.minimum < 0 < other.maximum:
        other = put_between(g, other, 0.3, 40)
    return g.add("Div", [value, other])


@maker("Pow")
def power(g: Builder) -> Value:
    value = g.float()
    if g.chance(0.4):
        exponent = g.choose([2.0, 3.0, 1.0])
        return g.add("Pow", [value, g.scalar(exponent) if g.chance(0.6) else g.constant(int(exponent), np.int64)])
    value = put_between(g, value, 0.2, 8)
    other = g.scalar(g.choose([0.5, -1.0, 1.5, -0.5])) if g.chance(0.5) else put_between(g, g.partner(value), -2, 2)
    return g.add("Pow", [value, other])


@maker("PRelu", weight=1.5)
def prelu(g: Builder) -> Value:
    value = g.float()
    g.clear(value, 0)
    slope = value if g.chance(0.3) else g.weight(g.within(value))
    return g.add("PRelu", [value, slope])


@maker("Mod")
def mod(g: Builder) -> Value:
    if g.chance(0.4):
        value = g.pick(lambda value: value.is_index)
        if value is None:
            raise Rejected
        return g.add("Mod", [value, g.constant(int(g.rng.integers(2, 5)), np.int64)])
    value, divisor = g.float(), uniform(g, 0.7, 2)
    g.clear(value, *(k * divisor for k in range(-60, 60)))
    return g.add("Mod", [value, g.scalar(divisor)], fmod=1)


@maker("Max", "Min")
def extreme(g: Builder, op: str) -> Value:
    value = g.float()
    others = [g.partner(value) for _ in range(int(g.rng.integers(1, 3)))]
    values = [value, *others]
    for at, first in enumerate(values):
        for second in values[at + 1 :]:
            if first.name != second.name:
                try:
                    g.distinct_pair(first, second)
                except ValueError as error:
                    raise Rejected from error
    if len({one.name for one in values}) < len(values):
        raise Rejected
    return g.add(op, values)


@maker("Mean", "Sum")
def several(g: Builder, op: str) -> Value:
    value = g.float()
    return g.add(op, [value, *(g.partner(value) for _ in range(int(g.rng.integers(0, 3))))])


# Comparisons and logic.


def condition(g: Builder, like: Value | None = None) -> Value:
    """Return a bool value, which broadcasts with `like`."""
    if like is None:
        found = g.pick(lambda value: value.is_bool)
        return found if found is not None and g.chance(0.7) else compare(g, g.choose(["Less", "Greater"]))
    if g.chance(0.2):
        return g.constant(g.rng.random(g.within(like)) < 0.5)
    other = g.partner(like)
    g.distinct_pair(like, other)
    return g.add(g.choose(["Less", "Greater", "LessOrEqual", "GreaterOrEqual"]), [like, other])


@maker("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", weight=0.7)
def compare(g: Builder, op: str) -> Value:
    if g.chance(0.3):
        value = g.pick(lambda value: value.is_index)
        if value is not None:
            return g.add(op, [value, g.constant(int(g.rng.integers(0, 4)), np.int64)])
    value = g.float()
    other = g.partner(value)
    if other.name != value.name or op == "Equal":
        g.distinct_pair(value, other)
    return g.add(op, [value, other])


@maker("And", "Or", "Xor", weight=0.7)
def logic(g: Builder, op: str) -> Value:
    first = condition(g)
    shape = first.samples

    def fits(other: Value) -> bool:
        if not other.is_bool:
            return False
        try:
            for a, b in zip(shape, other.samples, strict=True):
                np.broadcast_shapes(a.shape, b.shape)
        except ValueError:
            return False
        return True

    second = g.pick(fits)
    return g.add(op, [first, second if second is not None else g.constant(True, np.bool_)])


@maker("Not", weight=0.7)
def negation(g: Builder) -> Value:
    return g.add("Not", [condition(g)])


@maker("Where", weight=2)
def where(g: Builder) -> Value:
    value = g.float()
    pair = [value, g.partner(value)]
    return g.add("Where", [condition(g, value), *(pair if g.chance(0.5) else pair[::-1])])


@maker("IsNaN", "IsInf")
def is_special(g: Builder, op: str) -> Value:
    value = g.float()
    found = g.add(op, [value])
    return g.add("Where", [found, g.scalar(uniform(g, -1, 1)), value]) if g.chance(0.7) else found


# Reductions.


def some_axes(g: Builder, value: Value, *, closed: bool = False) -> list[int]:
    axes = [axis for axis in range(value.rank) if not (closed and value.is_open(axis))]
    chosen = sorted(axis for axis in axes if g.chance(0.5)) or axes[:1]
    if not chosen:
        raise Rejected
    return [axis - value.rank if g.chance(0.3) else axis for axis in chosen]


REDUCTIONS = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare"
).split()


@maker(*REDUCTIONS)
def reduction(g: Builder, op: str) -> Value:
    value = g.float(1)
    if op == "ReduceL1":
        g.clear(value, 0)
    if op == "ReduceLogSum":
        value = put_between(g, value, 0.15, 40)
    if op == "ReduceL2" and value.maximum - value.minimum < 0.1:
        raise Rejected
    keep: dict[str, Any] = {} if g.chance(0.4) else {"keepdims": int(g.chance(0.5))}
    if g.chance(0.15):
        axes = list(range(value.rank))
        inputs: list[Value | None] = [value]
        if g.chance(0.2):
            keep["noop_with_empty_axes"] = 1
    else:
        axes = some_axes(g, value)
        inputs = [value, g.ints(*axes)]
        if g.opset < 18 and op != "ReduceSum":
            # Older opsets have the axes as an attribute.
            inputs.pop()
            keep["axes"] = axes
    if op in ("ReduceMax", "ReduceMin"):
        g.distinct(value, axes)
    return g.add(op, inputs, **keep)


@maker("ArgMax", "ArgMin")
def arg(g: Builder, op: str) -> Value:
    value = g.float(1)
    axis = int(g.rng.integers(value.rank))
    g.distinct(value, [axis])
    return g.add(
        op, [value], axis=axis, keepdims=int(g.chance(0.5)), **({"select_last_index": 1} if g.chance(0.2) else {})
    )


@maker("CumSum")
def cumulative(g: Builder) -> Value:
    value = g.float(1)
    axis = int(g.rng.integers(-value.rank, value.rank))
    return g.add(
        "CumSum",
        [value, g.constant(axis, np.int64)],
        exclusive=int(g.chance(0.4)),
        reverse=int(g.chance(0.4)),
    )


# Softmax and normalization.


@maker("Softmax", "LogSoftmax", "Hardmax")
def softmax(g: Builder, op: str) -> Value:
    value = g.float(1)
    axis = int(g.rng.integers(-value.rank, value.rank))
    if op == "Hardmax":
        g.distinct(value, [axis])
    return g.add(op, [value], **({} if g.chance(0.3) and op != "Hardmax" else {"axis": axis}))


def spread(value: Value, axes: list[int]) -> None:
    """Reject a value with a small variance along the axes: normalization would amplify its rounding errors."""
    for sample in value.samples:
        if not (sample.std(axis=tuple(axes)) > 0.05).all():
            raise Rejected


@maker("LayerNormalization", "RMSNormalization")
def layer_norm(g: Builder, op: str) -> Value:
    if op == "RMSNormalization":
        needs(g, 23)
    value = g.float(1)
    axis = int(g.rng.integers(value.rank))
    if any(value.is_open(one) for one in range(axis, value.rank)):
        raise Rejected
    spread(value, list(range(axis, value.rank)))
    inputs = [value, g.weight(value.shape[axis:])]
    attributes = {"axis": axis - value.rank if g.chance(0.4) else axis, "epsilon": uniform(g, 1e-5, 1e-2)}
    if op == "RMSNormalization":
        return g.add(op, inputs, **attributes)
    if g.chance(0.6):
        inputs.append(g.weight(value.shape[axis:]))
    outputs = [True, g.chance(0.3), g.chance(0.3)]
    while not outputs[-1]:
        outputs.pop()
    return g.add_several(op, inputs, outputs, **attributes)[0]


def image(g: Builder, min_size: int = 1, channels_open: bool = False) -> Value:
    """Return a value of rank 3 or 4 with spatial axes of at least `min_size`."""
    value = g.pick(
        lambda value: (
            value.is_float
            and value.rank in (3, 4)
            and all(size >= min_size for size in value.shape[2:])
            and (channels_open or not value.is_open(1))
            and not any(value.is_open(axis) for axis in range(2, value.rank))
        )
    )
    if value is None or g.chance(0.15):
        spatial = [max(g.size(), min_size, 3) for _ in range(1 if g.chance(0.25) else 2)]
        value = g.source([g.size(), g.size(), *spatial])
    return value


@maker("InstanceNormalization", "GroupNormalization", "BatchNormalization")
def channel_norm(g: Builder, op: str) -> Value:
    value = image(g)
    channels = value.shape[1]
    if op == "GroupNormalization":
        needs(g, 21)
        groups = g.choose([k for k in range(1, channels + 1) if channels % k == 0])
        for sample in value.samples:
            rows = sample.reshape(sample.shape[0], groups, -1)
            if not (rows.std(axis=2) > 0.05).all():
                raise Rejected
        return g.add(op, [value, g.weight([channels]), g.weight([channels])], num_groups=groups)
    if op == "InstanceNormalization":
        spread(value, list(range(2, value.rank)))
        return g.add(op, [value, g.weight([channels]), g.weight([channels])])
    variance = g.constant(np.abs(g.numbers([channels])) + np.float32(0.3))
    mean = g.constant(g.numbers([channels]))
    return g.add(
        op, [value, g.weight([channels]), g.weight([channels]), mean, variance], epsilon=uniform(g, 1e-5, 1e-2)
    )


@maker("LpNormalization")
def lp_norm(g: Builder) -> Value:
    value = g.float(1)
    p, axis = int(g.rng.integers(1, 3)), int(g.rng.integers(value.rank))
    if p == 1:
        g.clear(value, 0)
    for sample in value.samples:
        if not (np.abs(sample).max(axis=axis) > 0.1).all():
            raise Rejected
    return g.add("LpNormalization", [value], p=p, axis=axis)


@maker("MeanVarianceNormalization")
def mean_variance_norm(g: Builder) -> Value:
    value = g.float(4, 4)
    axes = sorted(set(some_axes(g, value)))
    spread(value, axes)
    return g.add("MeanVarianceNormalization", [value], axes=sorted({axis % value.rank for axis in axes}))


@maker("LRN")
def lrn(g: Builder) -> Value:
    value = image(g)
    return g.add(
        "LRN", [value], size=g.choose([1, 3, 5]), alpha=uniform(g, 0.01, 0.5), beta=uniform(g, 0.4, 1), bias=1.0
    )


# Products.


@maker("MatMul", weight=2)
def matmul(g: Builder) -> Value:
    value = g.float(1, 4)
    if value.is_open(value.rank - 1):
        raise Rejected

    def fits(other: Value) -> bool:
        if not other.is_float or other.rank < 1:
            return False
        try:
            return all(np.matmul(a, b).size > 0 for a, b in zip(value.samples, other.samples, strict=True))
        except ValueError:
            return False

    with np.errstate(all="ignore"):
        other = g.pick(fits) if g.chance(0.4) else None
    if other is None:
        shape = [value.shape[-1], g.size()]
        if value.rank > 2 and g.chance(0.3):
            shape = [1 if value.is_open(0) else value.shape[0], *([1] * (value.rank - 3)), *shape]
        if g.chance(0.15):
            shape = shape[:1]
        other = g.weight(shape)
    return g.add("MatMul", [value, other])


@maker("Gemm")
def gemm(g: Builder) -> Value:
    value = g.float(2, 2)
    trans_a, trans_b = int(g.chance(0.3)), int(g.chance(0.4))
    inner = 0 if trans_a else 1
    if value.is_open(inner):
        raise Rejected
    columns = g.size()
    shape = [value.shape[inner], columns]
    inputs: list[Value | None] = [value, g.weight(shape[::-1] if trans_b else shape)]
    if g.chance(0.6):
        rows = 1 if value.is_open(1 - inner) else value.shape[1 - inner]
        inputs.append(g.weight(g.choose([[columns], [1, columns], [rows, 1], [rows, columns], [1], []])))
    attributes: dict[str, Any] = {"transA": trans_a, "transB": trans_b}
    if g.chance(0.4):
        attributes |= {"alpha": uniform(g, 0.3, 1.2), "beta": uniform(g, 0.3, 1.2)}
    return g.add("Gemm", inputs, **attributes)


@maker("Einsum")
def einsum(g: Builder) -> Value:
    value = g.float(2, 3)
    letters = "abc"[: value.rank]
    if g.chance(0.3):
        return g.add("Einsum", [value], equation=f"{letters}->{g.choose([letters[::-1], letters[:1], letters[1:]])}")
    if value.is_open(value.rank - 1):
        raise Rejected
    other = g.weight([value.shape[-1], g.size()])
    last = letters[-1]
    result = g.choose([letters[:-1] + "z", "z" + letters[:-1], letters[:-1], letters + "z"])
    return g.add("Einsum", [value, other], equation=f"{letters},{last}z->{result}")


# Convolutions and pools.


@maker("Conv", weight=1.5)
def conv(g: Builder) -> Value:
    value = image(g, 2)
    spatial, channels = value.rank - 2, value.shape[1]
    group = g.choose([1, 1, channels, *[k for k in (2, 3) if channels % k == 0]])
    out = group * g.choose([1, 2, 3])
    kernel = [int(g.rng.integers(1, min(size, 4) + 1)) for size in value.shape[2:]]
    dilations = [
        2 if (k - 1) * 2 + 1 <= size and g.chance(0.2) else 1 for k, size in zip(kernel, value.shape[2:], strict=True)
    ]
    attributes: dict[str, Any] = {"group": group, "dilations": dilations}
    attributes["strides"] = [int(g.rng.integers(1, 3)) for _ in range(spatial)]
    if g.chance(0.2) and dilations == [1] * spatial:
        attributes["auto_pad"] = g.choose(["SAME_UPPER", "SAME_LOWER", "VALID"])
    else:
        attributes["pads"] = [int(g.rng.integers(0, 3)) for _ in range(2 * spatial)]
    inputs = [value, g.weight([out, channels // group, *kernel])]
    if g.chance(0.5):
        inputs.append(g.weight([out]))
    return g.add("Conv", inputs, **attributes)


@maker("ConvTranspose")
def conv_transpose(g: Builder) -> Value:
    value = image(g, 1)
    spatial, channels = value.rank - 2, value.shape[1]
    group = g.choose([1, 1, channels])
    out = g.choose([1, 2, 3])
    kernel = [int(g.rng.integers(1, 4)) for _ in range(spatial)]
    strides = [int(g.rng.integers(1, 3)) for _ in range(spatial)]
    attributes: dict[str, Any] = {"group": group, "strides": strides}
    if g.chance(0.5):
        attributes["pads"] = [int(g.rng.integers(0, k)) for k in kernel] * 2
    if g.chance(0.3):
        attributes["output_padding"] = [int(g.rng.integers(0, s)) for s in strides]
    inputs = [value, g.weight([channels, out, *kernel])]
    if g.chance(0.5):
        inputs.append(g.weight([out * group]))
    return g.add("ConvTranspose", inputs, **attributes)


@maker("AveragePool", "MaxPool", "LpPool")
def pool(g: Builder, op: str) -> Value:
    value = image(g, 2)
    spatial = value.rank - 2
    kernel = [int(g.rng.integers(1, min(size, 4) + 1)) for size in value.shape[2:]]
    attributes: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": [int(g.rng.integers(1, 3)) for _ in range(spatial)],
    }
    if g.chance(0.5):
        attributes["pads"] = [int(g.rng.integers(0, k)) for k in kernel] * 2
    if g.chance(0.3) and op != "LpPool":
        attributes["ceil_mode"] = 1
    if op == "AveragePool" and g.chance(0.5):
        attributes["count_include_pad"] = 1
    if op == "MaxPool":
        g.distinct(value, list(range(2, value.rank)), MARGIN_OF_POOLS)
        return g.add_several(op, [value], [True, g.chance(0.15)] if g.chance(0.5) else 1, **attributes)[0]
    if op == "LpPool":
        value = put_between(g, value, 0.1, 40)
    return g.add(op, [value], **attributes)


# Margin of pools, smaller than MARGIN because a window contains few elements of a large value.
MARGIN_OF_POOLS = 1e-4


@maker("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(g: Builder, op: str) -> Value:
    value = image(g)
    if op == "GlobalMaxPool":
        g.distinct(value, list(range(2, value.rank)))
    if op == "GlobalLpPool":
        value = put_between(g, value, 0.1, 40)
    return g.add(op, [value])


# Shapes.


def counts(value: Value) -> tuple[int, ...]:
    return tuple(sample.size for sample in value.samples)


@maker("Reshape", weight=1.5)
def reshape(g: Builder) -> Value:
    value = g.float()
    opened = value.open_axes
    if len(opened) > 1:
        raise Rejected
    draw = g.rng.random()
    if opened == [0] and draw < 0.6:
        rest = split_number(g, int(np.prod(value.shape[1:])))
        first = g.choose([0, -1])
        return g.add("Reshape", [value, g.ints(first, *rest)])
    if opened:
        rest = split_number(g, int(np.prod([size for axis, size in enumerate(value.shape) if axis not in opened])))
        return g.add("Reshape", [value, g.ints(-1, *rest)])
    sizes = split_number(g, value.array.size)
    if g.chance(0.4):
        sizes[int(g.rng.integers(len(sizes)))] = -1
    return g.add("Reshape", [value, g.ints(*sizes)])


def split_number(g: Builder, number: int) -> list[int]:
    """Return random factors of a number."""
    factors = []
    while number > 1 and len(factors) < 3 and g.chance(0.8):
        factor = g.choose([k for k in range(1, number + 1) if number % k == 0])
        factors.append(factor)
        number //= factor
    return [*factors, number]


@maker("Transpose", weight=1.5)
def transpose(g: Builder) -> Value:
    value = g.float(1)
    order = [int(axis) for axis in g.rng.permutation(value.rank)]
    return g.add("Transpose", [value], **({} if g.chance(0.15) else {"perm": order}))


@maker("Flatten")
def flatten(g: Builder) -> Value:
    value = g.float(1)
    return g.add("Flatten", [value], axis=int(g.rng.integers(-value.rank, value.rank + 1)))


@maker("Squeeze")
def squeeze(g: Builder) -> Value:
    value = g.pick(
        lambda value: value.is_float and any(all(s.shape[a] == 1 for s in value.samples) for a in range(value.rank))
    )
    if value is None:
        raise Rejected
    axes = [axis for axis in range(value.rank) if all(s.shape[axis] == 1 for s in value.samples)]
    if g.chance(0.3) and all(sum(size == 1 for size in s.shape) == len(axes) for s in value.samples):
        return g.add("Squeeze", [value])
    return g.add("Squeeze", [value, g.ints(g.choose(axes))])


@maker("Unsqueeze")
def unsqueeze(g: Builder) -> Value:
    value = g.float(0, 4)
    return g.add("Unsqueeze", [value, g.ints(int(g.rng.integers(-value.rank - 1, value.rank + 1)))])


@maker("Concat", weight=1.5)
def concat(g: Builder) -> Value:
    value = g.float(1)
    axis = int(g.rng.integers(value.rank))

    def fits(other: Value) -> bool:
        return (
            other.is_float
            and other.rank == value.rank
            and all(
                a.shape[k] == b.shape[k]
                for a, b in zip(value.samples, other.samples, strict=True)
                for k in range(value.rank)
                if k != axis
            )
        )

    parts = [value]
    for _ in range(int(g.rng.integers(1, 3))):
        other = g.pick(fits)
        if (other is None or g.chance(0.3)) and not any(k in value.open_axes for k in range(value.rank) if k != axis):
            shape = list(value.shape)
            shape[axis] = g.size()
            other = g.weight(shape)
        parts.append(other if other is not None else value)
    return g.add("Concat", parts, axis=axis - value.rank if g.chance(0.3) else axis)


@maker("Split")
def split(g: Builder) -> Value:
    value = g.pick(
        lambda value: value.is_float and any(value.shape[a] >= 2 and not value.is_open(a) for a in range(value.rank))
    )
    if value is None:
        raise Rejected
    axis = g.choose([a for a in range(value.rank) if value.shape[a] >= 2 and not value.is_open(a)])
    size = value.shape[axis]
    if g.chance(0.4):
        parts = int(g.rng.integers(2, min(size, 3) + 1))
        return g.add_several("Split", [value], parts, axis=axis, **({"num_outputs": parts} if g.opset >= 18 else {}))
    cut = int(g.rng.integers(1, size))
    return g.add_several("Split", [value, g.ints(cut, size - cut)], 2, axis=axis)


@maker("Slice", weight=2.5)
def slice_(g: Builder) -> Value:
    value = g.float(1)
    axes, starts, ends, steps = [], [], [], []
    for axis in range(value.rank):
        size = min(sample.shape[axis] for sample in value.samples)
        if size < 2 or not g.chance(0.6):
            continue
        step = g.choose([1, 1, 1, 2, -1, -2])
        low, high = sorted(int(k) for k in g.rng.choice(size + 1, 2, replace=False))
        if step < 0:
            low, high = high - 1, (low - 1 if low > 0 else -(10**6))
        elif g.chance(0.2):
            high = 10**9
        if g.chance(0.3) and step > 0 and high <= size and not value.is_open(axis):
            low, high = low - size, high - size if high < size else 10**9
        axes.append(axis)
        starts.append(low)
        ends.append(high)
        steps.append(step)
    if not axes:
        raise Rejected
    inputs = [value, g.ints(*starts), g.ints(*ends), g.ints(*axes)]
    if any(step != 1 for step in steps) or g.chance(0.3):
        inputs.append(g.ints(*steps))
    return g.add("Slice", inputs)


@maker("Pad")
def pad(g: Builder) -> Value:
    value = g.float(1, 4)
    modes = ["constant", "constant", "edge", "reflect"] + (["wrap"] if g.opset >= 19 else [])
    mode = g.choose(modes)
    axes = sorted(axis for axis in range(value.rank) if g.chance(0.6)) or [0]
    widths = [[], []]
    for axis in axes:
        size = min(sample.shape[axis] for sample in value.samples)
        widest = 2 if mode in ("constant", "edge") else min(2, size - 1)
        for part in widths:
            low = -1 if mode == "constant" and size > 2 and g.chance(0.2) else 0
            part.append(int(g.rng.integers(low, widest + 1)))
    number = None
    if mode == "constant" and g.chance(0.6):
        number = g.parameter(array=g.numbers([])) if g.chance(0.4) else g.scalar(uniform(g, -1, 1))
    inputs: list[Value | None] = [value, g.ints(*widths[0], *widths[1]), number]
    if len(axes) < value.rank or g.chance(0.3):
        inputs.append(g.ints(*axes))
    return g.add("Pad", inputs, mode=mode)


@maker("Expand")
def expand(g: Builder) -> Value:
    value = g.float(0, 4)
    shape = [
        1 if value.is_open(axis) or (value.shape[axis] > 1 and g.chance(0.5)) else g.size() if size == 1 else size
        for axis, size in enumerate(value.shape)
    ]
    if g.chance(0.3):
        shape = [g.size(), *shape]
    return g.add("Expand", [value, g.ints(*shape)])


@maker("Tile")
def tile(g: Builder) -> Value:
    value = g.float(1, 4)
    return g.add("Tile", [value, g.ints(*(g.choose([1, 1, 2, 3]) for _ in range(value.rank)))])


@maker("Shape")
def shape_of(g: Builder) -> Value:
    value = g.float(1)
    if g.chance(0.5):
        return g.add("Shape", [value])
    shape = g.add("Shape", [value])
    other = g.weight([1] * value.rank) if g.chance(0.5) else g.scalar(uniform(g, -1, 1))
    return g.add("Expand", [other, shape])


@maker("Size")
def size_of(g: Builder) -> Value:
    value = g.float(1)
    count = g.add("Cast", [g.add("Size", [value])], to=FLOAT)
    return g.add("Div", [value, count])


@maker("Cast")
def cast(g: Builder) -> Value:
    value = g.pick(lambda value: value.is_index or value.is_bool)
    if value is not None and g.chance(0.6):
        return g.add("Cast", [value], to=FLOAT)
    value = g.float()
    if g.special:
        raise Rejected
    g.clear(value, *range(-40, 41))
    return g.add("Cast", [value], to=g.choose([INT64, BOOL]))


@maker("CastLike")
def cast_like(g: Builder) -> Value:
    value = g.pick(lambda value: value.is_index or value.is_bool or value.is_float)
    return g.add("CastLike", [value, g.float()])


@maker("ConstantOfShape")
def constant_of_shape(g: Builder) -> Value:
    from onnx import numpy_helper

    value = g.float(1)
    tensor = numpy_helper.from_array(np.asarray([uniform(g, 0.2, 1)], np.float32))
    return g.add("Mul", [value, g.add("ConstantOfShape", [g.add("Shape", [value])], value=tensor)])


@maker("Range")
def range_(g: Builder) -> Value:
    value = g.float(1)
    axis = int(g.rng.integers(value.rank))
    size = g.add("Gather", [g.add("Shape", [value]), g.constant(axis, np.int64)])
    numbers = g.add("Range", [g.constant(0, np.int64), size, g.constant(1, np.int64)])
    if g.chance(0.5):
        return g.add("Gather", [value, numbers], axis=axis)
    return g.add("Cast", [numbers], to=FLOAT)


@maker("EyeLike")
def eye_like(g: Builder) -> Value:
    value = g.float(2, 2)
    eye = g.add("EyeLike", [value], k=int(g.rng.integers(-1, 2)), **({"dtype": FLOAT} if g.chance(0.5) else {}))
    return g.add("Add", [value, eye])


@maker("Trilu")
def trilu(g: Builder) -> Value:
    value = g.float(2)
    inputs = [value] if g.chance(0.4) else [value, g.constant(int(g.rng.integers(-2, 3)), np.int64)]
    return g.add("Trilu", inputs, upper=int(g.chance(0.5)))


@maker("DepthToSpace", "SpaceToDepth", weight=0.7)
def depth(g: Builder, op: str) -> Value:
    block = 2
    shape = [g.size(), 4 * g.choose([1, 2]), 2, 3] if op == "DepthToSpace" else [g.size(), g.choose([1, 2, 3]), 4, 2]
    value = g.pick(
        lambda value: (
            value.is_float
            and value.rank == 4
            and not any(value.is_open(axis) for axis in (1, 2, 3))
            and (value.shape[1] % 4 == 0 if op == "DepthToSpace" else value.shape[2] % 2 == value.shape[3] % 2 == 0)
        )
    ) or g.source(shape)
    return g.add(op, [value], blocksize=block, **({"mode": "CRD"} if op == "DepthToSpace" and g.chance(0.5) else {}))


@maker("Resize")
def resize(g: Builder) -> Value:
    value = image(g, 2)
    mode = g.choose(["nearest", "linear", "cubic"])
    if mode == "cubic" and value.rank != 4:
        mode = "linear"
    spatial = value.rank - 2
    attributes: dict[str, Any] = {"mode": mode}
    attributes["coordinate_transformation_mode"] = g.choose(
        ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]
    )
    if mode == "nearest":
        attributes["nearest_mode"] = g.choose(["floor", "round_prefer_floor", "ceil"])
    if mode == "cubic" and g.chance(0.3):
        attributes["cubic_coeff_a"] = -0.5
    if g.chance(0.5):
        scales = g.constant([1.0, 1.0, *[g.choose([2.0, 1.0, 3.0]) for _ in range(spatial)]], np.float32, stem="scales")
        return g.add("Resize", [value, None, scales], **attributes)
    if value.is_open(0):
        raise Rejected
    sizes = [size * g.choose([1, 2]) for size in value.shape[2:]]
    return g.add("Resize", [value, None, None, g.ints(*value.shape[:2], *sizes)], **attributes)


@maker("ReverseSequence", weight=4)
def reverse_sequence(g: Builder) -> Value:
    value = g.float(2, 4)
    time_axis = int(g.rng.integers(2))
    if value.is_open(time_axis):
        raise Rejected
    lengths = lengths_of(g, value, 1 - time_axis, value.shape[time_axis], np.int64)
    reversed_value = g.add("ReverseSequence", [value, lengths], time_axis=time_axis, batch_axis=1 - time_axis)
    return part_of(g, reversed_value, time_axis) if g.chance(0.4) else reversed_value


def part_of(g: Builder, value: Value, axis: int) -> Value:
    """Return a slice along an axis."""
    size = value.shape[axis]
    start = int(g.rng.integers(0, size))
    return g.add("Slice", [value, g.ints(start), g.ints(int(g.rng.integers(start, size)) + 1), g.ints(axis)])


def lengths_of(g: Builder, value: Value, axis: int, longest: int, dtype: Any) -> Value:
    """Return a length from 1 to `longest` for each element of the axis: a constant or an input."""
    if value.is_open(axis):
        if any(sample.shape[axis] != batch for sample, batch in zip(value.samples, g.batches, strict=True)):
            raise Rejected
        return g.input([g.rng.integers(1, longest + 1, batch).astype(dtype) for batch in g.batches], "n")
    array = g.rng.integers(1, longest + 1, value.shape[axis]).astype(dtype)
    return g.constant(array) if g.chance(0.6) or g.depth else g.input([array] * len(g.batches), "n")


@maker("CenterCropPad", weight=0.5)
def center_crop_pad(g: Builder) -> Value:
    value = g.float(1, 4)
    axes = some_axes(g, value, closed=True)
    return g.add("CenterCropPad", [value, g.ints(*(g.size() for _ in axes))], axes=axes)


# Gather and scatter.


def index_axis(g: Builder, value: Value) -> int:
    axes = [axis for axis in range(value.rank) if not value.is_open(axis)]
    if not axes:
        raise Rejected
    return int(g.choose(axes))


@maker("Gather", weight=2.5)
def gather(g: Builder) -> Value:
    value = g.float(1, 4)
    axis = index_axis(g, value)
    shape = g.choose([[], [1], [g.size()], [g.size(), 2]])
    found = g.pick(lambda one: one.is_index and one.rank <= 2 and one.minimum >= 0 and one.maximum < value.shape[axis])
    index = found if found is not None and g.chance(0.4) else g.index(shape, value.shape[axis])
    return g.add("Gather", [value, index], **({} if axis == 0 and g.chance(0.5) else {"axis": axis}))


@maker("GatherElements", weight=1.5)
def gather_elements(g: Builder) -> Value:
    value = g.float(1, 4)
    axis = index_axis(g, value)
    if value.open_axes:
        shape = [1 if axis_ in value.open_axes else size for axis_, size in enumerate(value.shape)]
        shape[axis] = g.size()
    else:
        shape = [g.size() if a == axis else int(g.rng.integers(1, size + 1)) for a, size in enumerate(value.shape)]
    index = g.index(shape, value.shape[axis])
    return g.add("GatherElements", [value, index], axis=axis - value.rank if g.chance(0.3) else axis)


@maker("GatherND", weight=2)
def gather_nd(g: Builder) -> Value:
    value = g.float(1, 4)
    batch_dims = 1 if value.rank > 1 and not value.is_open(0) and g.chance(0.25) else 0
    depth_ = int(g.rng.integers(1, value.rank - batch_dims + 1))
    axes = range(batch_dims, batch_dims + depth_)
    if any(value.is_open(axis) for axis in axes):
        raise Rejected
    lead = [value.shape[0]] * batch_dims + g.choose([[], [g.size()], [g.size(), 2]])
    columns = [g.rng.integers(0, value.shape[axis], lead) for axis in axes]
    return g.add(
        "GatherND",
        [value, g.constant(np.stack(columns, axis=-1), np.int64)],
        **({"batch_dims": 1} if batch_dims else {}),
    )


def reductions(g: Builder) -> dict[str, Any]:
    """Return the reduction of a scatter as attributes; half of the scatters have no reduction."""
    draw = g.rng.random()
    if draw < 0.5 or g.opset < 16:
        return {}
    # onnxruntime supports maximum and minimum from opset 18, but they ignore NaN.
    extremes = ["max", "min"] if g.opset >= 18 and not g.special else []
    return {"reduction": g.choose(["add", "add", "mul", *extremes])}


def scatter_into(g: Builder, value: Value, op: str) -> Value:
    """Scatter updates into a value: an earlier value of the right shape, or new weights."""
    attributes = reductions(g)
    joined = attributes.get("reduction")
    if op == "ScatterND":
        depth_ = int(g.rng.integers(1, value.rank + 1))
        if any(value.is_open(axis) for axis in range(depth_)):
            raise Rejected
        cells = int(np.prod(value.shape[:depth_]))
        count = min(g.size(), cells)
        flat = g.rng.choice(cells, count, replace=joined == "add")
        index = np.stack(np.unravel_index(flat, value.shape[:depth_]), axis=-1)
        if any(value.is_open(axis) for axis in range(depth_, value.rank)):
            raise Rejected
        shape = [count, *value.shape[depth_:]]
        inputs = [value, g.constant(index, np.int64)]
    else:
        if value.open_axes:
            raise Rejected
        axis = index_axis(g, value)
        shape = [int(g.rng.integers(1, size + 1)) for size in value.shape]
        rows = [
            g.rng.choice(value.shape[axis], shape[axis], replace=joined == "add")
            for _ in range(int(np.prod(shape)) // shape[axis])
        ]
        index = np.moveaxis(np.reshape(rows, [*shape[:axis], *shape[axis + 1 :], shape[axis]]), -1, axis)
        attributes["axis"] = axis
        inputs = [value, g.constant(index, np.int64)]
    found = g.pick(lambda one: one.is_float and all(list(sample.shape) == shape for sample in one.samples))
    updates = found if found is not None and g.chance(0.6) else g.weight(shape)
    if joined in ("max", "min") and (value.moves or updates.moves):
        everything = np.concatenate([value.array.ravel(), updates.array.ravel()])
        if np.diff(np.sort(everything)).min(initial=1) < MARGIN_OF_POOLS:
            raise Rejected
    return g.add(op, [*inputs, updates], **attributes)


@maker("ScatterND", "ScatterElements", weight=2)
def scatter(g: Builder, op: str) -> Value:
    return scatter_into(g, g.float(1, 4), op)


@maker("TopK", weight=2.5)
def top_k(g: Builder) -> Value:
    value = g.float(1, 4)
    axis = int(g.rng.integers(value.rank))
    size = min(sample.shape[axis] for sample in value.samples)
    g.distinct(value, [axis])
    count = g.constant([int(g.rng.integers(1, size + 1))], np.int64)
    return g.add_several("TopK", [value, count], 2, axis=axis, largest=int(g.chance(0.5)))[0]


@maker("OneHot")
def one_hot(g: Builder) -> Value:
    found = g.pick(lambda one: one.is_index and one.rank <= 2 and one.minimum >= 0 and one.maximum < 6)
    count = int(g.rng.integers(2, 6))
    index = found if found is not None and g.chance(0.5) else g.index([g.size()], count)
    values = g.weight([2])
    return g.add("OneHot", [index, g.constant(count, np.int64), values], **({} if g.chance(0.5) else {"axis": 0}))


@maker("Compress", weight=0.7)
def compress(g: Builder) -> Value:
    value = g.float(1, 4)
    axis = index_axis(g, value)
    selected = g.rng.random(value.shape[axis]) < 0.6
    selected[int(g.rng.integers(selected.size))] = True
    return g.add("Compress", [value, g.constant(selected)], axis=axis)


@maker("NonZero", weight=0.7)
def non_zero(g: Builder) -> Value:
    value = g.float(1, 3)
    chosen = condition(g, value)
    # For a scalar, the standard requires a result without rows, but onnxruntime returns one row. In a body, another
    # iteration or branch may select no element, and the mean of an empty value is undefined.
    if chosen.rank == 0 or g.depth > 0:
        raise Rejected
    found = g.add("NonZero", [chosen])
    if g.chance(0.4) or value.shape != chosen.shape:
        return found
    return g.add("GatherND", [value, g.add("Transpose", [found], perm=[1, 0])])


@maker("Unique", weight=0.5)
def unique(g: Builder) -> Value:
    value = g.float(1, 3)
    g.distinct(value)
    return g.add_several("Unique", [value], [True], sorted=int(g.chance(0.7)))[0]


# Others.


@maker("Det", weight=0.5)
def det(g: Builder) -> Value:
    size = g.choose([1, 2, 3])
    value = g.pick(
        lambda value: (
            value.is_float
            and value.rank >= 2
            and value.shape[-1] == value.shape[-2] <= 4
            and not {value.rank - 1, value.rank - 2} & set(value.open_axes)
        )
    ) or g.source([g.size(), size, size])
    if g.special:
        # The products may be zero times infinity, which depends on their order.
        raise Rejected
    return g.add("Det", [value])


@maker("GridSample", weight=1.5)
def grid_sample(g: Builder) -> Value:
    value = image(g, 2)
    if value.rank != 4:
        raise Rejected
    height, width = g.size(), g.size()
    shapes = [[sample.shape[0], height, width, 2] for sample in value.samples]
    arrays = [np.asarray(g.rng.uniform(-0.95, 0.95, shape), np.float32) for shape in shapes]
    grid = g.input(arrays, "grid") if value.is_open(0) else g.parameter(array=arrays[0])
    return g.add(
        "GridSample",
        [value, grid],
        mode=(g.choose(["linear", "cubic"]) if g.opset >= 20 else g.choose(["bilinear", "bicubic"])),
        padding_mode=g.choose(["zeros", "border"]),
        align_corners=int(g.chance(0.5)),
    )


@maker("AffineGrid", weight=0.5)
def affine_grid(g: Builder) -> Value:
    needs(g, 20)
    count = g.size()
    theta = g.pick(
        lambda value: value.is_float and value.rank == 3 and value.shape[1:] == (2, 3) and not value.open_axes
    )
    theta = theta or g.parameter([count, 2, 3])
    # At least two points per axis: libraries differ in the position of a single point between two corners.
    size = g.ints(theta.shape[0], 2, g.size() + 1, g.size() + 1)
    return g.add("AffineGrid", [theta, size], align_corners=int(g.chance(0.5)))


@maker("Col2Im", weight=0.5)
def col2im(g: Builder) -> Value:
    height, width, kernel, channels = 4, 3, [2, 2], g.choose([1, 2])
    value = g.source([g.size(), channels * 4, (height - 1) * (width - 1)])
    return g.add("Col2Im", [value, g.ints(height, width), g.ints(*kernel)])


@maker("DFT", weight=0.5)
def dft(g: Builder) -> Value:
    needs(g, 20)
    value = g.float(1, 3)
    if value.is_open(value.rank - 1):
        raise Rejected
    wide = g.add("Unsqueeze", [value, g.ints(-1)])
    return g.add("DFT", [wide, None, g.constant(value.rank - 1, np.int64)], onesided=int(g.chance(0.4)))


@maker("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def class_loss(g: Builder, op: str) -> Value:
    value = g.float(2, 4)
    if value.is_open(1):
        raise Rejected
    classes = value.shape[1]
    shapes = [[sample.shape[0], *sample.shape[2:]] for sample in value.samples]
    labels = [g.rng.integers(0, classes, shape) for shape in shapes]
    for one in labels:
        one.reshape(-1)[0] = 0
    attributes: dict[str, Any] = {"reduction": g.choose(["mean", "sum", "none"])}
    if classes > 1 and g.chance(0.3):
        attributes["ignore_index"] = classes - 1
    opened = any(value.is_open(axis) for axis in range(value.rank))
    inputs: list[Value | None] = [value, g.input(labels, "t") if opened else g.constant(labels[0], np.int64)]
    if g.chance(0.4):
        inputs.append(g.constant(np.abs(g.numbers([classes]))))
    if op == "SoftmaxCrossEntropyLoss" and g.chance(0.3):
        return g.add_several(op, inputs, 2, **attributes)[0]
    return g.add(op, inputs, **attributes)


@maker("token loss")
def token_loss(g: Builder) -> Value:
    """Add a loss of scores with the classes on the last axis; some labels are ignored."""
    value = g.float(3, 4)
    last = value.rank - 1
    if value.is_open(last):
        raise Rejected
    order = [0, last, *range(1, last)]
    classes = value.shape[last]
    labels = [g.rng.integers(0, classes, sample.shape[:-1]) for sample in value.samples]
    for one in labels:
        one[g.rng.random(one.shape) < 0.3] = IGNORED
        one.reshape(-1)[0] = 0
    moved = g.add("Transpose", [value], perm=order)
    opened = any(value.is_open(axis) for axis in range(last))
    targets = g.input(labels, "t") if opened or g.chance(0.5) else g.constant(labels[0], np.int64)
    inputs: list[Value | None] = [moved, targets]
    if g.chance(0.3):
        inputs.append(g.constant(np.abs(g.numbers([classes]))))
    reduction = g.choose(["mean", "sum", "none"])
    return g.add("SoftmaxCrossEntropyLoss", inputs, reduction=reduction, ignore_index=IGNORED)


# Label that PyTorch ignores by default.
IGNORED = -100


@maker("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift", weight=0.4)
def bits(g: Builder, op: str) -> Value:
    value = g.pick(lambda value: value.is_index)
    if value is None:
        raise Rejected
    if op == "BitShift":
        count = g.constant(int(g.rng.integers(0, 4)), np.uint64)
        raised = g.add("Cast", [value], to=13)
        if value.minimum < 0:
            raise Rejected
        return g.add("BitShift", [raised, count], direction=g.choose(["LEFT", "RIGHT"]))
    return g.add(op, [value, g.constant(int(g.rng.integers(1, 8)), np.int64)])


@maker("BitwiseNot", weight=0.4)
def bitwise_not(g: Builder) -> Value:
    value = g.pick(lambda value: value.is_index)
    if value is None:
        raise Rejected
    return g.add("BitwiseNot", [value])
