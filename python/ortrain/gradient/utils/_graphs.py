"""Helpers to write and rewrite ONNX graphs: names, nodes, and copies of models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError

# Default opset of generated models.
DEFAULT_OPSET = 15
# First opset with ``Sign``.
OLDEST_OPSET = 9
# Element types of weights.
FLOATS: tuple[int, ...] = (onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)


def unique_name(existing_names: set[str], name: str) -> str:
    """Returns ``name``, or ``name`` with a suffix ``_2``, ``_3``, … if it exists, and adds the result to the set."""
    found, number = name, 1
    while found in existing_names:
        number += 1
        found = f"{name}_{number}"
    existing_names.add(found)
    return found


def finite(value: object, argument: str) -> float:
    """Checks and converts a number argument.

    Raises:
        InvalidArgumentError: for an argument that is not a number, NaN, or infinite.

    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidArgumentError(f"{argument} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise InvalidArgumentError(f"{argument} must be a finite number, got {value!r}")
    return float(value)


def check_keywords(what: str, options: Iterable[str], keywords: Iterable[str]) -> None:
    """Checks that keywords are known options.

    Raises:
        TypeError: for the first unknown keyword.

    """
    known = list(options)
    for keyword in keywords:
        if keyword not in known:
            there = f"it takes {', '.join(known)}" if known else "it takes none"
            raise TypeError(f"{what} has no keyword argument {keyword!r}; {there}{hint(keyword, known)}")


def checked_opset(opset: object) -> int:
    """Checks an opset version; returns the default for None.

    Raises:
        InvalidArgumentError: for a version that is too old, or newer than the package ``onnx`` supports.

    """
    newest = onnx.defs.onnx_opset_version()
    if opset is None:
        return min(DEFAULT_OPSET, newest)
    if isinstance(opset, bool) or not isinstance(opset, (int, np.integer)) or not OLDEST_OPSET <= opset <= newest:
        raise InvalidArgumentError(f"target_opset must be an integer from {OLDEST_OPSET} to {newest}, got {opset!r}")
    return int(opset)


class GraphWriter:
    """Writer that adds nodes and constants to a graph.

    Each result gets a unique name. Constants of the same value and the same name share one initializer.
    """

    def __init__(self, opset: int, dtype: npt.DTypeLike, existing_names: set[str] | None = None) -> None:
        self.opset = opset
        self.dtype = np.dtype(dtype)
        self.element_type = helper.np_dtype_to_tensor_dtype(self.dtype)
        self.names: set[str] = set() if existing_names is None else existing_names
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], tuple[float, ...]], str] = {}

    def op(self, kind: str, *inputs: str, name: str, **attributes: Any) -> str:
        """Adds a node with a result of this name, or of this name with a number if the name exists."""
        return self.result(kind, *inputs, name=unique_name(self.names, name), **attributes)

    def result(self, kind: str, *inputs: str, name: str, **attributes: Any) -> str:
        """Adds a node with a result of exactly this name."""
        self.names.add(name)
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def _constant(self, name: str, element_type: int, shape: Sequence[int], values: Sequence[float]) -> str:
        key = (name, tuple(shape), tuple(values))
        if key not in self._constants:
            found = self._constants[key] = unique_name(self.names, name)
            self.initializers.append(helper.make_tensor(found, element_type, shape, values))
        return self._constants[key]

    def number(self, value: float, name: str) -> str:
        """Adds a scalar constant, which does not change the shape of other operands."""
        return self._constant(name, self.element_type, [], [value])

    def sizes(self, values: Sequence[int], name: str) -> str:
        """Adds a constant of integers: a shape, or axes."""
        return self._constant(name, onnx.TensorProto.INT64, [len(values)], values)

    def column(self, weights: str, name: str) -> str:
        """Reshapes weights, one for each row, to a column."""
        return self.op("Reshape", weights, self.sizes([-1, 1], "column_shape"), name=name)

    def clip(self, value: str, minimum: float, maximum: float, name: str) -> str:
        """Clips a value to two bounds."""
        bounds = [self.number(minimum, "eps_name"), self.number(maximum, "eps1_name")]
        # Before opset 12, the package onnxruntime clips only 32-bit floats.
        if self.opset >= 12:
            return self.op("Clip", value, *bounds, name=name)
        return self.op("Min", self.op("Max", value, bounds[0], name=name), bounds[1], name=name)

    def row_sums(self, value: str, name: str) -> str:
        """Computes the sums of the rows of a matrix, as a column."""
        if self.opset < 13:
            return self.op("ReduceSum", value, name=name, axes=[1], keepdims=1)
        return self.op("ReduceSum", value, self.sizes([1], "axes_name"), name=name, keepdims=1)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yields the graphs in the attributes of a node."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def uses(node: onnx.NodeProto) -> set[str]:
    """Returns the values that a node reads, including the outer values that its subgraphs read."""
    names = set(node.input)
    for graph in subgraphs(node):
        own = {entry.name for entry in [*graph.input, *graph.initializer]}
        for inner in graph.node:
            names |= uses(inner) - own
            own.update(inner.output)
    return names - {""}


def names_of(graph: onnx.GraphProto) -> set[str]:
    """Returns the names of all values of a graph and of its subgraphs."""
    entries = [*graph.input, *graph.output, *graph.initializer]
    names = {entry.name for entry in entries} | {entry.values.name for entry in graph.sparse_initializer}
    for node in graph.node:
        names.update(node.input, node.output)
        for inner in subgraphs(node):
            names |= names_of(inner)
    return names - {""}


def rename(graph: onnx.GraphProto, new: Mapping[str, str]) -> None:
    """Renames values in a graph and its subgraphs, in place."""
    for entry in [*graph.input, *graph.output, *graph.initializer, *graph.value_info]:
        entry.name = new.get(entry.name, entry.name)
    for sparse in graph.sparse_initializer:
        sparse.values.name = new.get(sparse.values.name, sparse.values.name)
    for node in graph.node:
        rename_in(node, new)


def rename_in(node: onnx.NodeProto, new: Mapping[str, str]) -> None:
    """Renames values in a node and its subgraphs, in place."""
    node.input[:] = [new.get(name, name) for name in node.input]
    node.output[:] = [new.get(name, name) for name in node.output]
    for graph in subgraphs(node):
        rename(graph, new)


def needed_nodes(nodes: Iterable[onnx.NodeProto], results: Iterable[str]) -> tuple[list[onnx.NodeProto], set[str]]:
    """Returns the nodes that results depend on, in their order, and all values that the results depend on."""
    needed, retained = set(results), []
    for node in reversed(list(nodes)):
        if needed.intersection(node.output):
            retained.append(node)
            needed |= uses(node)
    return retained[::-1], needed


def operators_of(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yields nodes, and the nodes of their subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from operators_of(graph.node)


def model_like(model: onnx.ModelProto, graph: onnx.GraphProto) -> onnx.ModelProto:
    """Returns a copy of a model with another graph; versions, producer, metadata and functions are copied."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.CopyFrom(graph)
    return copy


def checked_model(model: object, argument: str = "onx") -> onnx.ModelProto:
    """Checks that an argument is a model.

    Raises:
        TypeError: for any other argument.

    """
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(
            f"{argument} must be an onnx.ModelProto, got {type(model).__name__}; read a file with onnx.load"
        )
    return model
