"""A network in the form of an optimizing exporter, for training in torch: precomputed values become weights.

A BatchNormalization becomes part of the previous convolution; 1 + w, w / |w|, or a product of two weights are computed
once. The exported model has such a value as a parameter, found by its elements, and so it is a parameter here.
"""

from __future__ import annotations

import copy
import itertools
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, fx, nn

# Tolerance of precomputed values relative to the largest: a few operations in float32 there, in float64 here.
TOLERANCE = 1e-5
# Maximum share of a missing parameter's elements that equal other elements by chance.
CHANCE = 0.01
# Convolutions, with the number of their spatial axes.
CONVOLUTIONS = {torch.ops.aten.conv1d.default: 1, torch.ops.aten.conv2d.default: 2, torch.ops.aten.conv3d.default: 3}


class Weights:
    """The float32 initializers of a model with more than one element."""

    def __init__(self, model: onnx.ModelProto) -> None:
        stored = [numpy_helper.to_array(tensor) for tensor in model.graph.initializer]
        self.tensors = [value for value in stored if value.dtype == np.float32 and value.size > 1]

    def trained(self, parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return masks of parameter elements in tensors that contain only parameter elements."""
        elements = np.concatenate([value.ravel() for value in parameters.values()])
        held = [value.ravel() for value in self.tensors if np.isin(value, elements).all()]
        found = {key: np.isin(value, np.concatenate([elements[:0], *held])) for key, value in parameters.items()}
        return {key: places & (places.mean() > CHANCE) for key, places in found.items()}

    def like(self, computed: np.ndarray) -> np.ndarray | None:
        """Return the exporter's version of computed values, in their shape, or None."""
        for value in self.tensors:
            order = turning(value, computed, TOLERANCE * np.abs(computed).max())
            if order is not None:
                return long_axes(value).transpose(order).reshape(computed.shape)
        return None


def long_axes(value: np.ndarray) -> np.ndarray:
    """Return a tensor without axes of one element."""
    return value.reshape([size for size in value.shape if size > 1])


def turning(value: np.ndarray, wanted: np.ndarray, apart: float) -> tuple[int, ...] | None:
    """Return an axis order of the tensor's long axes that gives the required numbers within a tolerance, or None."""
    if value.size == wanted.size:
        value, flat = long_axes(value), wanted.ravel()
        for order in itertools.permutations(range(value.ndim)):
            if np.abs(value.transpose(order).ravel() - flat).max() <= apart:
                return order
    return None


def tied(path: Path) -> Weights:
    """Merge weights that the exporter wrote twice, one of them transposed; returns the weights."""
    model = onnx.load(path)
    kept: list[tuple[str, np.ndarray]] = []
    for tensor in list(model.graph.initializer):
        value = numpy_helper.to_array(tensor)
        # A constant tensor is no weight.
        if value.dtype != np.float32 or value.size == 0 or np.all(value == value.flat[0]):
            continue
        found = ((name, turning(other, value, 0.0), other) for name, other in kept)
        name, order, other = next((each for each in found if each[1] is not None), ("", None, value))
        if order is None:
            kept.append((tensor.name, value))
            continue
        model.graph.initializer.remove(tensor)
        nodes, last = [], name
        for way, sizes in (("long", long_axes(other).shape), ("turned", None), ("shaped", value.shape)):
            made = tensor.name if way == "shaped" else f"{tensor.name}_{way}"
            if sizes is None:
                nodes.append(helper.make_node("Transpose", [last], [made], perm=order))
            else:
                model.graph.initializer.append(numpy_helper.from_array(np.asarray(sizes, np.int64), f"{made}_sizes"))
                nodes.append(helper.make_node("Reshape", [last, f"{made}_sizes"], [made]))
            last = made
        for place, node in enumerate(nodes):
            model.graph.node.insert(place, node)
    onnx.save(model, path)
    return Weights(model)


def as_exported(graph: fx.GraphModule) -> None:
    """Split linear layers into product and sum; fold BatchNormalizations with fixed statistics into convolutions."""
    aten = torch.ops.aten

    def call(function: Any, *arguments: Any) -> fx.Node:
        return graph.graph.call_function(function, arguments)

    for node in list(graph.graph.nodes):
        if node.target is aten.linear.default and len(node.args) > 2:
            with graph.graph.inserting_before(node):
                product = call(aten.linear.default, *node.args[:2])
                node.replace_all_uses_with(call(aten.add.Tensor, product, node.args[2]))
        # Batch statistics cannot be folded.
        if node.target is not aten.batch_norm.default or node.args[5]:
            continue
        before, scale, shift, mean, variance, _, _, epsilon = node.args[:8]
        if before.target not in CONVOLUTIONS or len(before.users) > 1:
            continue
        x, weight, bias, *rest = (*before.args, *(None,) * (3 - len(before.args)))
        with graph.graph.inserting_before(node):
            factor = call(aten.rsqrt.default, call(aten.add.Scalar, variance, epsilon))
            factor = factor if scale is None else call(aten.mul.Tensor, factor, scale)
            sizes = (-1, *(1,) * (1 + CONVOLUTIONS[before.target]))
            turned = call(aten.mul.Tensor, weight, call(aten.view.default, factor, sizes))
            moved = call(aten.neg.default, mean) if bias is None else call(aten.sub.Tensor, bias, mean)
            moved = call(aten.mul.Tensor, moved, factor)
            moved = moved if shift is None else call(aten.add.Tensor, moved, shift)
            node.replace_all_uses_with(call(before.target, x, turned, moved, *rest))
    graph.graph.eliminate_dead_code()


def folded(net: nn.Module, x: Tensor, weights: Weights) -> nn.Module:
    """Return a float64 network with the parameters of an exported model, where they are found."""
    graph: fx.GraphModule = torch.export.export(net, (x,)).module()  # type: ignore[assignment]
    as_exported(graph)
    values = constants(graph)
    parameters = {key for key, _ in graph.named_parameters()}
    # Constant nodes that depend on parameters, in order of computation.
    computed: dict[fx.Node, None] = {}
    for node in values:
        if node.target in parameters or any(value in computed for value in node.all_input_nodes):
            computed[node] = None
    # Start with the last computed nodes: the operands of a value found in the model are not needed.
    wanted = {node for node in computed if any(user not in values for user in node.users)}
    for node in reversed(computed):
        if node not in wanted or node.op == "get_attr":
            continue
        before = [value for value in node.all_input_nodes if value in computed]
        found = None if rearranged(node, before, values) else weights.like(values[node].numpy())
        if found is None:
            wanted.update(before)
            continue
        name = f"computed_{node.name}"
        graph.register_parameter(name, nn.Parameter(torch.tensor(found, dtype=values[node].dtype)))
        with graph.graph.inserting_before(node):
            node.replace_all_uses_with(graph.graph.get_attr(name))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def constants(graph: fx.GraphModule) -> dict[fx.Node, Any]:
    """Return the values of nodes that do not depend on the batch."""
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                value = attrgetter(str(node.target))(graph)
                # Other attributes are graphs of computations without gradients.
                values[node] = value.detach() if isinstance(value, Tensor) else value
            elif node.op == "call_function" and all(value in values for value in node.all_input_nodes):
                # Some functions work in place.
                arguments, named = fx.node.map_arg((node.args, node.kwargs), lambda each: copy.deepcopy(values[each]))
                values[node] = node.target(*arguments, **named)  # type: ignore[operator]
    return values


def rearranged(node: fx.Node, before: list[fx.Node], values: dict[fx.Node, Any]) -> bool:
    """Return true if a value contains only numbers of its operands, none more often: nothing was computed.

    A constant lookup with more positions than the table has rows is another weight.
    """
    value = values[node]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return True
    given = [values[b].flatten() for b in before if isinstance(values[b], Tensor)]
    given = torch.cat(given) if given else value.flatten()
    return value.numel() <= given.numel() and bool(torch.isin(value, given).all())
