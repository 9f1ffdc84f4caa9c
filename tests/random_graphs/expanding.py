"""Definitions by operators of ONNX, for operators of com.microsoft without a kernel for processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

MICROSOFT = "com.microsoft"


class Nodes:
    """Nodes that replace a node, and their constants."""

    def __init__(self, stem: str, dtype: Any) -> None:
        self.stem, self.dtype = stem, dtype
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def constant(self, array: Any, dtype: Any = None) -> str:
        """Add a constant, by default of the type of the floats."""
        name = f"{self.stem} constant {len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array, dtype or self.dtype), name))
        return name

    def add(self, op: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node; returns the name of its output."""
        output = output or f"{self.stem} value {len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], **attributes))
        return output

    def moved(self, x: str, *perm: int, output: str = "") -> str:
        """Add a Transpose."""
        return self.add("Transpose", x, output=output, perm=perm)


def bias_add(n: Nodes, inputs: Sequence[str], outputs: Sequence[str], **_: Any) -> None:
    x, bias, skip = inputs
    n.add("Add", n.add("Add", x, bias), skip, output=outputs[0])


def bias_split_gelu(n: Nodes, inputs: Sequence[str], outputs: Sequence[str], **_: Any) -> None:
    total = n.add("Add", *inputs)
    size = n.add("Gather", n.add("Shape", total), n.constant([-1], np.int64))
    middle = n.add("Div", size, n.constant([2], np.int64))
    axis = n.constant([-1], np.int64)
    left = n.add("Slice", total, n.constant([0], np.int64), middle, axis)
    right = n.add("Slice", total, middle, size, axis)
    error = n.add("Erf", n.add("Div", right, n.constant(2**0.5)))
    gelu = n.add("Mul", n.add("Mul", right, n.constant(0.5)), n.add("Add", error, n.constant(1)))
    n.add("Mul", left, gelu, output=outputs[0])


def group_norm(
    n: Nodes,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    groups: int,
    epsilon: float = 1e-5,
    activation: int = 0,
    channels_last: int = 1,
    **_: Any,
) -> None:
    x, gamma, beta, skip, bias = [*inputs, "", ""][:5]
    columns = n.constant([-1, 1, 1], np.int64)
    if skip:
        # A bias for each channel, and perhaps a skip of [batch, channels], next to images.
        x = n.add("Add", x, skip)
        if bias:
            x = n.add("Add", x, bias if channels_last else n.add("Reshape", bias, columns))
        if len(outputs) > 1:
            n.add("Identity", x, output=outputs[1])
    planes = n.moved(x, 0, 3, 1, 2) if channels_last else x
    grouped = n.add("Reshape", planes, n.constant([0, groups, -1], np.int64))
    units = [n.constant(np.full(groups, value)) for value in (1, 0)]
    normal = n.add("InstanceNormalization", grouped, *units, epsilon=epsilon)
    normal = n.add("Reshape", normal, n.add("Shape", planes))
    y = n.add("Mul", normal, n.add("Reshape", gamma, columns))
    y = n.add("Add", y, n.add("Reshape", beta, columns))
    y = n.add("Mul", y, n.add("Sigmoid", y)) if activation else y
    if channels_last:
        n.moved(y, 0, 2, 3, 1, output=outputs[0])
    else:
        n.add("Identity", y, output=outputs[0])


def nhwc_conv(n: Nodes, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
    x, w, *bias = inputs
    y = n.add("Conv", n.moved(x, 0, 3, 1, 2), n.moved(w, 0, 3, 1, 2), *bias, **attributes)
    n.moved(y, 0, 2, 3, 1, output=outputs[0])


DEFINITIONS: dict[str, Callable[..., None]] = {
    "BiasAdd": bias_add,
    "BiasSplitGelu": bias_split_gelu,
    "GroupNorm": group_norm,
    "SkipGroupNorm": group_norm,
    "NhwcConv": nhwc_conv,
}


def expanded(model: ModelProto) -> ModelProto:
    """Return the model with the definitions in place of the operators in the main graph."""
    if not any(node.op_type in DEFINITIONS and node.domain == MICROSOFT for node in model.graph.node):
        return model
    wide = ModelProto()
    wide.CopyFrom(model)
    types = [value.type.tensor_type.elem_type for value in wide.graph.input]
    types += [tensor.data_type for tensor in wide.graph.initializer]
    dtype = np.float64 if TensorProto.DOUBLE in types else np.float32
    nodes = []
    for at, node in enumerate(model.graph.node):
        if node.op_type not in DEFINITIONS or node.domain != MICROSOFT:
            nodes.append(node)
            continue
        parts = Nodes(f"definition {at}", dtype)
        attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        DEFINITIONS[node.op_type](parts, list(node.input), list(node.output), **attributes)
        nodes += parts.nodes
        wide.graph.initializer.extend(parts.constants)
    del wide.graph.node[:]
    wide.graph.node.extend(nodes)
    return wide
