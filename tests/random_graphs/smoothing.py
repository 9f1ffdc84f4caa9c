"""Smooth forms of graphs with quantized operators: their slopes are the straight-through gradients.

A rounded result becomes ``r * mask + offset``, a float that later operators read. The number r is the result before the
rounding. The mask is 1 inside of the range of the integers and 0 outside. The offset makes the sum equal to the
integer. Scales, zero points and integer weights are constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

import ortrain
from random_graphs.oracle import Feeds
from random_graphs.quantized import is_rounding

Arrays = list[np.ndarray]


def is_quantized(model: ModelProto) -> bool:
    return any(is_rounding(node) for node in model.graph.node)


class Smoothing:
    """Construction of a smooth graph from a graph in float64 and its values at each batch size."""

    def __init__(self, model: ModelProto, values: list[Feeds]) -> None:
        self.values = values
        self.stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        self.nodes: list[NodeProto] = []
        self.inputs: dict[str, Arrays] = {}
        # The float in place of each integer value, and the float before the rounding of each rounded value.
        self.reals: dict[str, str] = {}
        self.rounded: dict[str, str] = {}

    # Constants.

    def arrays(self, name: str) -> Arrays:
        """Return the values at each batch size."""
        return [self.stored[name] if name in self.stored else values[name] for values in self.values]

    def fixed(self, name: str, arrays: Arrays) -> str:
        """Add an input with a value for each batch size."""
        self.inputs[name] = arrays
        return name

    def along(self, name: str, like: str, axis: int = 0, block: int = 0) -> Arrays:
        """Return scales or zero points in float64, so that they broadcast with the integers ``like``."""
        found = []
        for array, other in zip(self.arrays(name), self.arrays(like), strict=True):
            wide = array.astype(np.float64)
            if block:
                wide = np.repeat(wide, block, axis).take(range(other.shape[axis]), axis)
            elif wide.ndim == 1 and wide.size > 1:
                wide = wide.reshape([-1 if k == axis % other.ndim else 1 for k in range(other.ndim)])
            found.append(wide if block or wide.size > 1 else wide.reshape(()))
        return found

    # Nodes.

    def add(self, op: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"smooth {len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], **attributes))
        return output

    def with_constant(self, op: str, value: str, arrays: Arrays, output: str = "") -> str:
        return self.add(op, value, self.fixed(f"constant {len(self.inputs)}", arrays), output=output)

    def real(self, name: str) -> str:
        """Return the float with the numbers of an integer value."""
        if name not in self.reals:
            self.reals[name] = self.fixed(f"{name} real", [one.astype(np.float64) for one in self.arrays(name)])
        return self.reals[name]

    def shifted(self, name: str, zero: str, axis: int = 0) -> str:
        """Return integers less their zero point."""
        if not zero:
            return self.real(name)
        return self.with_constant("Sub", self.real(name), self.along(zero, name, axis))

    def number(self, name: str, scale: str, zero: str, axis: int = 0, block: int = 0) -> str:
        """Return the floats that integers stand for."""
        value = self.real(name)
        if zero:
            value = self.with_constant("Sub", value, self.along(zero, name, axis, block))
        return self.with_constant("Mul", value, self.along(scale, name, axis, block))

    def in_steps(self, value: str, result: str, scale: str, zero: str, axis: int = 0, block: int = 0) -> None:
        """Add the rounding of a float to the integers ``result``."""
        value = self.with_constant("Div", value, self.along(scale, result, axis, block))
        if zero:
            value = self.with_constant("Add", value, self.along(zero, result, axis, block))
        self.round(value, result)

    def round(self, value: str, result: str) -> None:
        self.rounded[result] = value
        masked = self.add("Mul", value, f"{result} mask")
        self.reals[result] = self.add("Add", masked, f"{result} offset", output=f"{result} real")

    def convert(self, node: NodeProto) -> None:
        """Add the smooth form of a node."""
        if node.op_type in CONVERSIONS and is_rounding(node):
            attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
            CONVERSIONS[node.op_type](self, [*node.input, *[""] * 9], list(node.output), attributes)
            return
        copy = NodeProto()
        copy.CopyFrom(node)
        if any(name in self.reals for name in node.input) and node.op_type not in ("Shape", "Size"):
            for at, name in enumerate(node.input):
                copy.input[at] = self.reals.get(name, name)
            if node.op_type != "Cast":
                self.reals[node.output[0]] = copy.output[0] = f"{node.output[0]} real"
        self.nodes.append(copy)


Conversion = Callable[[Smoothing, list[str], list[str], dict[str, Any]], Any]


def quantize(s: Smoothing, inputs: list[str], outputs: list[str], attributes: dict[str, Any]) -> None:
    axis, block = attributes.get("axis", 1), attributes.get("block_size", 0)
    s.in_steps(inputs[0], outputs[0], inputs[1], inputs[2], axis, block)


def dequantize(s: Smoothing, inputs: list[str], outputs: list[str], attributes: dict[str, Any]) -> None:
    made = s.number(*inputs[:3], attributes.get("axis", 1), attributes.get("block_size", 0))
    s.add("Identity", made, output=outputs[0])


def quantize_dynamically(s: Smoothing, inputs: list[str], outputs: list[str], _: dict[str, Any]) -> None:
    for name in outputs[1:]:
        s.fixed(name, s.arrays(name))
    s.in_steps(inputs[0], *outputs)


def product_of_integers(s: Smoothing, inputs: list[str], outputs: list[str], attributes: dict[str, Any]) -> None:
    a, b, a_zero, b_zero, *_ = inputs
    s.reals[outputs[0]] = s.add("MatMul", s.shifted(a, a_zero, -2), s.shifted(b, b_zero, -1))


def convolution_of_integers(s: Smoothing, inputs: list[str], outputs: list[str], attributes: dict[str, Any]) -> None:
    x, w, x_zero, w_zero, *_ = inputs
    s.reals[outputs[0]] = s.add("Conv", s.shifted(x, x_zero), s.shifted(w, w_zero), **attributes)


def linear_matmul(s: Smoothing, inputs: list[str], outputs: list[str], _: dict[str, Any]) -> None:
    s.in_steps(s.add("MatMul", s.number(*inputs[:3]), s.number(*inputs[3:6], -1)), outputs[0], *inputs[6:8])


def linear_conv(s: Smoothing, inputs: list[str], outputs: list[str], attributes: dict[str, Any]) -> None:
    operands = [s.number(*inputs[:3]), s.number(*inputs[3:6], 0)]
    if inputs[8]:
        terms = zip(*(s.arrays(inputs[at]) for at in (8, 1, 4)), strict=True)
        operands.append(s.fixed(f"{outputs[0]} bias", [np.asarray(b * (x * w), np.float64) for b, x, w in terms]))
    s.in_steps(s.add("Conv", *operands, **attributes), outputs[0], *inputs[6:8])


def gemm(s: Smoothing, inputs: list[str], outputs: list[str], attributes: dict[str, Any]) -> None:
    operands = [s.number(*inputs[:3]), s.number(*inputs[3:6], 0 if attributes.get("transB") else 1)]
    if inputs[6]:
        terms = zip(*(s.arrays(inputs[at]) for at in (6, 1, 4)), strict=True)
        alpha = attributes.get("alpha", 1.0)
        operands.append(s.fixed(f"{outputs[0]} bias", [np.asarray(alpha * c * (a * b)) for c, a, b in terms]))
    made = s.add("Gemm", *operands, **attributes)
    if inputs[7]:
        s.in_steps(made, outputs[0], *inputs[7:9])
    else:
        s.add("Identity", made, output=outputs[0])


def linear(op: str, operands: int = 1) -> Conversion:
    """Return the conversion of an operator with a scale and a zero point after each operand and for its result."""

    def convert(s: Smoothing, inputs: list[str], outputs: list[str], attributes: dict[str, Any]) -> None:
        kept = {key: value for key, value in attributes.items() if key not in ("opset", "channels_last")}
        numbers = [s.number(*inputs[at : at + 3]) for at in range(0, 3 * operands, 3)]
        s.in_steps(s.add(op, *numbers, **kept), outputs[0], *inputs[3 * operands : 3 * operands + 2])

    return convert


def linear_concat(s: Smoothing, inputs: list[str], outputs: list[str], attributes: dict[str, Any]) -> None:
    names = [name for name in inputs if name]
    numbers = [s.number(*names[at : at + 3]) for at in range(2, len(names), 3)]
    s.in_steps(s.add("Concat", *numbers, **attributes), outputs[0], *names[:2])


def with_bias(s: Smoothing, made: str, bias: str, output: str) -> None:
    s.add("Add", made, bias, output=output) if bias else s.add("Identity", made, output=output)


def product_to_floats(s: Smoothing, inputs: list[str], outputs: list[str], _: dict[str, Any]) -> None:
    a, b, a_scale, b_scale, a_zero, b_zero, bias, *_ = inputs
    made = s.add("MatMul", s.number(a, a_scale, a_zero), s.number(b, b_scale, b_zero, -1))
    with_bias(s, made, bias, outputs[0])


def dynamic_product(s: Smoothing, inputs: list[str], outputs: list[str], _: dict[str, Any]) -> None:
    x, b, scale, zero, bias, *_ = inputs
    errors = []
    for array in s.arrays(x):
        low, high = min(array.min(), 0), max(array.max(), 0)
        step = (high - low) / 255
        offset = np.clip(np.rint(-low / step), 0, 255)
        errors.append((np.clip(np.rint(array / step) + offset, 0, 255) - offset) * step - array)
    made = s.add("MatMul", s.with_constant("Add", x, errors), s.number(b, scale, zero, -1))
    with_bias(s, made, bias, outputs[0])


CONVERSIONS: dict[str, Conversion] = {
    "QuantizeLinear": quantize,
    "DequantizeLinear": dequantize,
    "DynamicQuantizeLinear": quantize_dynamically,
    "MatMulInteger": product_of_integers,
    "ConvInteger": convolution_of_integers,
    "QLinearMatMul": linear_matmul,
    "QLinearConv": linear_conv,
    "QGemm": gemm,
    "QLinearAdd": linear("Add", 2),
    "QLinearMul": linear("Mul", 2),
    "QLinearSigmoid": linear("Sigmoid"),
    "QLinearLeakyRelu": linear("LeakyRelu"),
    "QLinearSoftmax": linear("Softmax"),
    "QLinearAveragePool": linear("AveragePool"),
    "QLinearGlobalAveragePool": linear("GlobalAveragePool"),
    "QLinearConcat": linear_concat,
    "MatMulIntegerToFloat": product_to_floats,
    "DynamicQuantizeMatMul": dynamic_product,
}


def smoothed(model: ModelProto, feeds: list[Feeds]) -> tuple[ModelProto, list[Feeds]]:
    """Return the smooth form of a model in float64, and its additional inputs at each batch size."""
    names = list(dict.fromkeys(name for node in model.graph.node for name in node.output if name))
    values = [{**feed, **dict(zip(names, results, strict=True))} for feed, results in evaluated(model, names, feeds)]
    s = Smoothing(model, values)
    for node in model.graph.node:
        s.convert(node)
    smooth = ModelProto()
    smooth.CopyFrom(model)
    del smooth.graph.node[:]
    smooth.graph.node.extend(s.nodes)
    constants = [{name: arrays[at] for name, arrays in s.inputs.items()} for at in range(len(feeds))]
    for result in s.rounded:
        for part in ("mask", "offset"):
            for at, constant in enumerate(constants):
                constant[f"{result} {part}"] = (
                    values[at][result].astype(np.float64) if part == "offset" else np.zeros(())
                )
    for name in constants[0]:
        dtype = helper.np_dtype_to_tensor_dtype(constants[0][name].dtype)
        smooth.graph.input.append(helper.make_tensor_value_info(name, dtype, None))
    if not s.rounded:
        return smooth, constants
    # Without the masks, later operators read the integers themselves.
    before = evaluated(
        smooth, list(s.rounded.values()), [{**feed, **more} for feed, more in zip(feeds, constants, strict=True)]
    )
    for constant, value, (_, quotients) in zip(constants, values, before, strict=True):
        for result, quotient in zip(s.rounded, quotients, strict=True):
            limits = np.iinfo(value[result].dtype)
            rounded = np.rint(quotient)
            mask = ((rounded >= limits.min) & (rounded <= limits.max)).astype(np.float64)
            constant[f"{result} mask"] = mask
            constant[f"{result} offset"] = value[result] - mask * quotient
    return smooth, constants


def evaluated(model: ModelProto, names: list[str], feeds: list[Feeds]) -> list[tuple[Feeds, Arrays]]:
    """Return the feeds with the named values of a model."""
    wide = ModelProto()
    wide.CopyFrom(model)
    del wide.graph.output[:]
    wide.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    session = ortrain.InferenceSession(wide)
    inputs = {value.name for value in wide.graph.input}
    return [
        (feed, [np.asarray(one) for one in session.run(names, {k: v for k, v in feed.items() if k in inputs})])
        for feed in feeds
    ]
