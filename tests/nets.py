"""Two convolution networks that ortrain and jax train from the same values: separable convolutions, and a U-Net.

Needs onnx and NumPy alone, so that jax's environment can import it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, checker, helper, numpy_helper

SEED, OPSET, IR_VERSION = 7, 17, 8
# AdamW with the formula of the artifacts (adam_mode 1).
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 2e-3, (0.9, 0.999), 1e-6, 0.0
STEPS, BATCHES, MOMENTUM = 20, 4, 0.9


@dataclass
class Builder:
    """Nodes and values of a network under construction."""

    rng: np.random.Generator
    nodes: list[NodeProto] = field(default_factory=list)
    trained: dict[str, np.ndarray] = field(default_factory=dict)
    statistics: dict[str, np.ndarray] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)

    def node(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, list(inputs), [output], output, **attributes))
        return output

    def weight(self, name: str, shape: Sequence[int], fan_in: int) -> str:
        scale = np.sqrt(2 / fan_in)
        self.trained[name] = np.asarray(self.rng.standard_normal(shape) * scale, np.float32)
        return name

    def vector(self, name: str, size: int, about: float, spread: float) -> str:
        self.trained[name] = np.asarray(about + spread * self.rng.standard_normal(size), np.float32)
        return name

    def constant(self, name: str, values: Any, dtype: Any = np.float32) -> str:
        self.constants[name] = np.asarray(values, dtype)
        return name

    def conv(self, name: str, x: str, inputs: int, outputs: int, kernel: int, **attributes: Any) -> str:
        """Add a convolution without a bias: a BatchNormalization follows."""
        group = attributes.get("group", 1)
        shape = [outputs, inputs // group, kernel, kernel]
        weight = self.weight(f"{name}.weight", shape, inputs // group * kernel * kernel)
        return self.node("Conv", [x, weight], name, kernel_shape=[kernel, kernel], **attributes)

    def norm(self, name: str, x: str, size: int) -> str:
        """Add a BatchNormalization in inference form, as exporters write it."""
        names = [self.vector(f"{name}.weight", size, 1.0, 0.2), self.vector(f"{name}.bias", size, 0.0, 0.2)]
        self.statistics[f"{name}.mean"] = np.asarray(0.1 * self.rng.standard_normal(size), np.float32)
        self.statistics[f"{name}.var"] = np.asarray(self.rng.uniform(0.5, 1.5, size), np.float32)
        return self.node(
            "BatchNormalization", [x, *names, f"{name}.mean", f"{name}.var"], name, epsilon=1e-5, momentum=MOMENTUM
        )

    def model(self, name: str, x_shape: Sequence[int | str], y: str, y_shape: Sequence[int | str]) -> ModelProto:
        values = self.trained | self.statistics | self.constants
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, x_shape)],
            [helper.make_tensor_value_info(y, TensorProto.FLOAT, y_shape)],
            [numpy_helper.from_array(value, key) for key, value in values.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        checker.check_model(model, full_check=True)
        return model


@dataclass(frozen=True)
class Net:
    """A network with its loss, the names of its parameters and statistics, and its batches."""

    model: ModelProto
    loss: str
    trained: list[str]
    statistics: list[str]
    batches: list[tuple[np.ndarray, np.ndarray]]


def separable() -> Net:
    """Return a network of pointwise and depthwise convolutions with residuals, trained by cross-entropy.

    The convolutions are strided, dilated and of a kernel size of their own.
    """
    b = Builder(np.random.default_rng(SEED))
    low, high = b.constant("low", 0.0), b.constant("high", 6.0)

    def clipped(name: str, x: str) -> str:
        return b.node("Clip", [x, low, high], name)

    def block(name: str, x: str, inputs: int, outputs: int, kernel: int, **how: Any) -> str:
        wide = inputs * 3
        h = clipped(f"{name}.a0", b.norm(f"{name}.n0", b.conv(f"{name}.c0", x, inputs, wide, 1), wide))
        h = b.conv(f"{name}.c1", h, wide, wide, kernel, group=wide, **how)
        h = clipped(f"{name}.a1", b.norm(f"{name}.n1", h, wide))
        return b.norm(f"{name}.n2", b.conv(f"{name}.c2", h, wide, outputs, 1), outputs)

    h = b.conv("stem", "x", 3, 8, 3, strides=[2, 2], pads=[1, 1, 1, 1])
    h = clipped("stem.act", b.norm("stem.norm", h, 8))
    h = b.node("Add", [h, block("b0", h, 8, 8, 3, pads=[1, 1, 1, 1])], "b0.sum")
    # Without this Relu the next normalization would cancel b0.n2.bias, and the gradient of that bias would be rounding
    # alone.
    h = b.node("Relu", [h], "b0.act")
    h = block("b1", h, 8, 12, 5, strides=[2, 2], pads=[2, 2, 2, 2])
    h = b.node("Add", [h, block("b2", h, 12, 12, 3, dilations=[2, 2], pads=[2, 2, 2, 2])], "b2.sum")
    # Groups of several channels, and different strides and pads for the two axes.
    h = b.conv("mix", h, 12, 16, 3, group=4, strides=[1, 2], pads=[0, 1, 1, 0])
    h = clipped("mix.act", b.norm("mix.norm", h, 16))
    h = b.node("GlobalAveragePool", [h], "pooled")
    h = b.node("Flatten", [h], "flat", axis=1)
    head = [b.weight("head.weight", [5, 16], 16), b.vector("head.bias", 5, 0.0, 0.1)]
    b.node("Gemm", [h, *head], "logits", transB=1)
    model = b.model("separable", ["batch", 3, 20, 20], "logits", ["batch", 5])
    rng = np.random.default_rng(SEED + 1)
    batches = [(rng.standard_normal((6, 3, 20, 20)).astype(np.float32), rng.integers(0, 5, 6)) for _ in range(BATCHES)]
    return Net(model, "CrossEntropyLoss", list(b.trained), list(b.statistics), batches)


def unet() -> Net:
    """Return a U-Net that predicts a mask, trained by binary cross-entropy of logits.

    MaxPool shrinks the image; ConvTranspose and Resize (nearest and linear) enlarge it; Concat joins both paths.
    """
    b = Builder(np.random.default_rng(SEED + 2))

    def double(name: str, x: str, inputs: int, outputs: int) -> str:
        for part, width in enumerate((inputs, outputs)):
            h = b.norm(f"{name}.n{part}", b.conv(f"{name}.c{part}", x, width, outputs, 3, pads=[1, 1, 1, 1]), outputs)
            x = b.node("Relu", [h], f"{name}.a{part}")
        return x

    def halved(name: str, x: str) -> str:
        return b.node("MaxPool", [x], name, kernel_shape=[2, 2], strides=[2, 2])

    scales = b.constant("scales", [1, 1, 2, 2])
    d0 = double("d0", "x", 1, 4)
    d1 = double("d1", halved("p0", d0), 4, 6)
    d2 = double("d2", halved("p1", d1), 6, 8)
    d3 = double("d3", halved("p2", d2), 8, 8)
    # Each upsampling uses a different operator or mode.
    up = [b.weight("up2.weight", [8, 8, 4, 4], 8 * 4), b.vector("up2.bias", 8, 0.0, 0.1)]
    h = b.node("ConvTranspose", [d3, *up], "up2", kernel_shape=[4, 4], strides=[2, 2], pads=[1, 1, 1, 1])
    h = double("u2", b.node("Concat", [d2, h], "join2", axis=1), 16, 6)
    how = {"coordinate_transformation_mode": "half_pixel", "mode": "linear"}
    h = b.node("Resize", [h, "", scales], "up1", **how)
    h = double("u1", b.node("Concat", [d1, h], "join1", axis=1), 12, 4)
    how = {"coordinate_transformation_mode": "asymmetric", "mode": "nearest", "nearest_mode": "floor"}
    h = b.node("Resize", [h, "", scales], "up0", **how)
    h = double("u0", b.node("Concat", [d0, h], "join0", axis=1), 8, 4)
    out = [b.weight("out.weight", [1, 4, 1, 1], 4), b.vector("out.bias", 1, 0.0, 0.1)]
    b.node("Conv", [h, *out], "mask", kernel_shape=[1, 1])
    model = b.model("unet", ["batch", 1, 16, 24], "mask", ["batch", 1, 16, 24])
    rng = np.random.default_rng(SEED + 3)
    batches = []
    for _ in range(BATCHES):
        x = rng.standard_normal((3, 1, 16, 24)).astype(np.float32)
        # The target marks bright pixels, with some noise in the labels.
        batches.append((x, np.asarray((x + 0.3 * rng.standard_normal(x.shape)) > 0.5, np.float32)))
    return Net(model, "BCEWithLogitsLoss", list(b.trained), list(b.statistics), batches)


NETS: dict[str, Callable[[], Net]] = {"separable": separable, "unet": unet}
