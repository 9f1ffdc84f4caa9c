"""ONNX networks in jax: the operators of these tests, and BatchNormalization in training mode.

An unknown attribute fails an assertion, because the compared functions must be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from onnx import ModelProto, NodeProto, helper, numpy_helper

Values = dict[str, Any]


def _pairs(pads: list[int]) -> list[tuple[int, int]]:
    half = len(pads) // 2
    return list(zip(pads[:half], pads[half:], strict=True))


def _conv(a: dict[str, Any], x: Any, w: Any, bias: Any = None) -> Any:
    assert a.pop("auto_pad", b"NOTSET") == b"NOTSET"
    a.pop("kernel_shape", None)
    rank = w.ndim - 2
    y = lax.conv_general_dilated(
        x,
        w,
        window_strides=a.pop("strides", [1] * rank),
        padding=_pairs(a.pop("pads", [0] * 2 * rank)),
        rhs_dilation=a.pop("dilations", [1] * rank),
        feature_group_count=a.pop("group", 1),
    )
    return y if bias is None else y + bias.reshape(1, -1, *[1] * rank)


def _conv_transpose(a: dict[str, Any], x: Any, w: Any, bias: Any = None) -> Any:
    """Convolve the dilated input with the flipped kernel."""
    rank = w.ndim - 2
    kernel, pads = a.pop("kernel_shape"), _pairs(a.pop("pads", [0] * 2 * rank))
    turned = jnp.flip(w, range(2, w.ndim)).swapaxes(0, 1)
    padding = [(size - 1 - low, size - 1 - high) for size, (low, high) in zip(kernel, pads, strict=True)]
    y = lax.conv_general_dilated(x, turned, [1] * rank, padding, lhs_dilation=a.pop("strides", [1] * rank))
    return y if bias is None else y + bias.reshape(1, -1, *[1] * rank)


def _max_pool(a: dict[str, Any], x: Any) -> Any:
    assert a.pop("ceil_mode", 0) == 0
    assert set(a.pop("dilations", [1])) == {1}
    window, rank = a.pop("kernel_shape"), x.ndim - 2
    padding = [(0, 0), (0, 0), *_pairs(a.pop("pads", [0] * 2 * rank))]
    strides = a.pop("strides", [1] * rank)
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, *window), (1, 1, *strides), padding)


def _resize(a: dict[str, Any], x: Any, roi: Any, scales: Any) -> Any:
    del roi
    sizes = [int(size * scale) for size, scale in zip(x.shape, np.asarray(scales), strict=True)]
    how = (a.pop("mode"), a.pop("coordinate_transformation_mode"), a.pop("nearest_mode", None))
    if how[:2] == (b"linear", b"half_pixel"):
        return jax.image.resize(x, sizes, "linear")
    assert how == (b"nearest", b"asymmetric", b"floor"), how
    for axis, (before, after) in enumerate(zip(x.shape, sizes, strict=True)):
        assert after % before == 0
        x = jnp.repeat(x, after // before, axis)
    return x


def _gemm(a: dict[str, Any], x: Any, w: Any, bias: Any) -> Any:
    assert (a.pop("alpha", 1.0), a.pop("beta", 1.0), a.pop("transA", 0)) == (1.0, 1.0, 0)
    return x @ (w.T if a.pop("transB", 0) else w) + bias


def _flatten(a: dict[str, Any], x: Any) -> Any:
    axis = a.pop("axis", 1)
    return x.reshape(int(np.prod(x.shape[:axis])), -1)


def _reduce_mean(a: dict[str, Any], x: Any) -> Any:
    return x.mean(tuple(a.pop("axes")), keepdims=bool(a.pop("keepdims", 1)))


def _concat(a: dict[str, Any], *xs: Any) -> Any:
    # Shapes stay NumPy arrays, because jax needs static values.
    library = np if all(isinstance(x, np.ndarray) for x in xs) else jnp
    return library.concatenate(xs, a.pop("axis"))


def _reshape(a: dict[str, Any], x: Any, shape: np.ndarray) -> Any:
    assert a.pop("allowzero", 0) == 0
    return x.reshape([x.shape[axis] if size == 0 else int(size) for axis, size in enumerate(shape)])


def _unsqueeze(_: dict[str, Any], x: Any, axes: np.ndarray) -> Any:
    library = np if isinstance(x, np.ndarray) else jnp
    return library.expand_dims(x, tuple(int(axis) for axis in axes))


def _layer_norm(a: dict[str, Any], x: Any, scale: Any, bias: Any) -> Any:
    axes, epsilon = tuple(range(a.pop("axis", -1) % x.ndim, x.ndim)), a.pop("epsilon", 1e-5)
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) / jnp.sqrt(var + epsilon) * scale + bias


def _gather(a: dict[str, Any], x: Any, indices: Any) -> Any:
    # Sizes stay NumPy arrays, as above.
    if isinstance(x, np.ndarray) and isinstance(indices, np.ndarray):
        return np.asarray(np.take(x, indices, a.pop("axis", 0)))
    return jnp.take(x, indices, a.pop("axis", 0))


def _slice(_: dict[str, Any], x: Any, starts: np.ndarray, ends: np.ndarray, axes: np.ndarray) -> Any:
    parts = [slice(None)] * x.ndim
    for start, end, axis in zip(starts, ends, axes, strict=True):
        parts[axis] = slice(int(start), int(end))
    return x[tuple(parts)]


def _lstm(a: dict[str, Any], x: Any, w: Any, r: Any, b: Any, lengths: None, h: Any, c: Any) -> Any:
    """Run one direction without peepholes, all steps for every sequence; returns the hidden values of all steps."""
    assert lengths is None
    size = a.pop("hidden_size")
    assert w.shape[0] == 1
    weights, recurrent, bias = w[0], r[0], b[0, : 4 * size] + b[0, 4 * size :]

    def step(carried: Any, row: Any) -> Any:
        h, c = carried
        i, o, f, g = jnp.split(row @ weights.T + h @ recurrent.T + bias, 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    _, y = lax.scan(step, (h[0].astype(x.dtype), c[0].astype(x.dtype)), x)
    return y[:, None]


OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": lambda _, x, y: x + y,
    "Clip": lambda _, x, low, high: jnp.clip(x, low, high),
    "Concat": _concat,
    "Constant": lambda a: numpy_helper.to_array(a.pop("value")),
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Div": lambda _, x, y: x / y,
    "Erf": lambda _, x: jax.scipy.special.erf(x),
    "Flatten": _flatten,
    "Expand": lambda _, x, shape: jnp.broadcast_to(x, [int(size) for size in shape]),
    "Gather": _gather,
    "Gemm": _gemm,
    "GlobalAveragePool": lambda _, x: x.mean(tuple(range(2, x.ndim)), keepdims=True),
    "LSTM": _lstm,
    "LayerNormalization": _layer_norm,
    "MatMul": lambda _, x, y: x @ y,
    "MaxPool": _max_pool,
    "Mul": lambda _, x, y: x * y,
    "ReduceMean": _reduce_mean,
    "Relu": lambda _, x: jnp.maximum(x, 0),
    "Reshape": _reshape,
    "Resize": _resize,
    "Shape": lambda _, x: np.asarray(x.shape),
    "Slice": _slice,
    "Squeeze": lambda _, x, axes: jnp.squeeze(x, tuple(int(axis) for axis in axes)),
    "Softmax": lambda a, x: jax.nn.softmax(x, a.pop("axis", -1)),
    "Tanh": lambda _, x: jnp.tanh(x),
    "Transpose": lambda a, x: jnp.transpose(x, a.pop("perm", None)),
    "Unsqueeze": _unsqueeze,
}


def _batch_norm(node: NodeProto, a: dict[str, Any], values: Values, statistics: Values) -> Any:
    """Normalise by the biased statistics of the batch; the running statistics move toward them.

    Running statistics outside of `statistics` do not change, and normalise the input themselves.
    """
    x, scale, bias = (values[name] for name in node.input[:3])
    a.pop("training_mode", None)
    axes, momentum, epsilon = (0, *range(2, x.ndim)), a.pop("momentum", 0.9), a.pop("epsilon", 1e-5)
    if statistics.keys().isdisjoint(node.input[3:]):
        mean, var = (values[name] for name in node.input[3:])
    else:
        mean, var = x.mean(axes), x.var(axes)
        for name, batch in zip(node.input[3:], (mean, var), strict=True):
            statistics[name] = statistics[name] * momentum + batch * (1 - momentum)
    shape = (1, -1, *[1] * (x.ndim - 2))
    normal = (x - mean.reshape(shape)) / jnp.sqrt(var.reshape(shape) + epsilon)
    return normal * scale.reshape(shape) + bias.reshape(shape)


def forward(model: ModelProto, values: Values, x: Any, statistics: Values) -> tuple[Any, Values]:
    """Return the model's output in training, and the new statistics. `values` are weights and constants by name."""
    values, statistics = {**values, "": None, model.graph.input[0].name: x}, dict(statistics)
    for node in model.graph.node:
        a = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        if node.op_type == "BatchNormalization":
            y = _batch_norm(node, a, values, statistics)
        else:
            y = OPERATORS[node.op_type](a, *[values[name] for name in node.input])
        assert not a, f"{node.op_type}: {a} is not supported"
        values[node.output[0]] = y
    return values[model.graph.output[0].name], statistics


def cross_entropy(scores: Any, labels: Any) -> Any:
    """Return the mean over all positions; the classes are on axis 1."""
    return -jnp.take_along_axis(jax.nn.log_softmax(scores, 1), labels[:, None], 1).mean()


def bce_with_logits(scores: Any, target: Any) -> Any:
    """Return the mean over all elements."""
    return (jnp.maximum(scores, 0) - scores * target + jnp.log1p(jnp.exp(-jnp.abs(scores)))).mean()


LOSSES = {"CrossEntropyLoss": cross_entropy, "BCEWithLogitsLoss": bce_with_logits}


def adamw(
    step: Any,
    rate: float,
    betas: tuple[float, float],
    epsilon: float,
    decay: float,
    w: Any,
    g: Any,
    m: Any,
    v: Any,
    mode: int = 1,
) -> tuple[Any, Any, Any]:
    """Take a step of AdamW, counted from 1: adam_mode 1 as in onnxruntime-training, 0 as in torch."""
    m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
    first, second = 1 - betas[0] ** step, 1 - betas[1] ** step
    if mode == 0:
        return w - rate * decay * w - rate / first * m / (jnp.sqrt(v) / second**0.5 + epsilon), m, v
    w = w - rate * second**0.5 / first * m / (jnp.sqrt(v) + epsilon)
    return w - rate * decay * w, m, v
