"""Helpers for ONNX graphs: reading, pruning, and appending nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ortrain import _ortrain, artifacts
from ortrain._files import check_regular
from ortrain._model_source import ModelLike, model_source
from ortrain.errors import InvalidArgumentError, InvalidModelError, NoSuchFileError, UnsupportedError
from ortrain.ortvalue import OrtValue

Array: TypeAlias = np.ndarray[Any, Any]
# Callable (features, outputs) that returns a model.
ModelBuilder: TypeAlias = Callable[[int, int], ModelLike]

FLOATS = {
    "tensor(float)": TensorProto.FLOAT,
    "tensor(double)": TensorProto.DOUBLE,
    "tensor(float16)": TensorProto.FLOAT16,
}


@dataclass(frozen=True)
class Input:
    """Single input of a model: its name, its element type, and the shape of a row, with None for unknown sizes."""

    name: str
    dtype: np.dtype[Any]
    row: tuple[int | None, ...] | None


def read_model(model: ModelLike | ModelBuilder, features: int, outputs: int) -> ModelProto:
    """Read the model, with a symbolic batch size and its external data included."""
    if callable(model):
        model = model(features, outputs)
    source = model_source(model)
    if isinstance(source, str):
        if not os.path.exists(source):  # noqa: PTH110  (the text is the caller's)
            raise NoSuchFileError(f"there is no file {source}")
        check_regular(source)
        proto = _decoded(lambda: onnx.load(source), source)
    else:
        proto = _decoded(lambda: ModelProto.FromString(source), "the model")
    if not proto.graph.node:
        raise InvalidModelError("the model has no nodes, so there is nothing to train")
    dims = input_info(proto).type.tensor_type.shape.dim
    if dims and dims[0].dim_value > 0:
        proto = ModelProto()
        proto.ParseFromString(artifacts.open_batch(source))
    return proto


def _decoded(read: Callable[[], ModelProto], label: str) -> ModelProto:
    try:
        found: ModelProto = read()
    except Exception as error:
        # The DecodeError of protobuf is in a package that only onnx imports.
        if type(error).__name__ != "DecodeError":
            raise
        raise InvalidModelError(f"{label} is not an ONNX model: {error}") from error
    return found


def input_info(proto: ModelProto) -> ValueInfoProto:
    """Return the declaration of the only input that is not an initializer."""
    constants = {tensor.name for tensor in proto.graph.initializer}
    inputs: list[ValueInfoProto] = [info for info in proto.graph.input if info.name not in constants]
    if len(inputs) != 1:
        names = ", ".join(f'"{info.name}"' for info in inputs)
        raise InvalidArgumentError(
            f"expected a model with one input, the matrix X, got {len(inputs)}" + (f": {names}" if names else "")
        )
    return inputs[0]


def input_of(proto: ModelProto) -> Input:
    """Return the only input of a model."""
    info = input_info(proto)
    tensor = info.type.tensor_type
    try:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except KeyError:
        dtype = np.dtype(object)
    if dtype.kind not in "fiub":
        raise UnsupportedError(f'the input "{info.name}" has the type {dtype}, but X is a matrix of numbers')
    if not tensor.HasField("shape"):
        return Input(info.name, dtype, None)
    sizes = (dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim[1:])
    # Some exporters write 0 for an unknown size.
    return Input(info.name, dtype, tuple(size or None for size in sizes))


def _subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _reads(node: NodeProto) -> Iterator[str]:
    """Yield the values that a node reads, including the values that its subgraphs read."""
    yield from node.input
    for graph in _subgraphs(node):
        yield from (info.name for info in graph.output)
        for inner in graph.node:
            yield from _reads(inner)


def pruned(proto: ModelProto, outputs: Iterable[ValueInfoProto], also: Iterable[str] = ()) -> ModelProto:
    """Return the model with these outputs, without the nodes that neither the outputs nor `also` depend on."""
    outputs = list(outputs)
    required = {info.name for info in outputs} | set(also)
    retained: list[NodeProto] = []
    # Nodes are in topological order: consumers follow the producer of a value.
    for node in reversed(proto.graph.node):
        if required.intersection(node.output):
            retained.append(node)
            required.update(_reads(node))
    produced = {name for node in retained for name in node.output}
    cut = ModelProto()
    cut.CopyFrom(proto)
    graph = cut.graph
    replaced: list[tuple[Any, Iterable[Any]]] = [
        (graph.node, reversed(retained)),
        (graph.initializer, [tensor for tensor in proto.graph.initializer if tensor.name in required]),
        (graph.value_info, [info for info in proto.graph.value_info if info.name in produced]),
        (graph.output, outputs),
    ]
    for field, entries in replaced:
        del field[:]
        field.extend(entries)
    return cut


def maker(graph: GraphProto, name: str) -> NodeProto | None:
    """Return the node that computes a value."""
    return next((node for node in graph.node if name in node.output), None)


def is_float(info: ValueInfoProto) -> bool:
    """Return True if a value is declared as a tensor of floats, or has no declared type."""
    kinds = {TensorProto.UNDEFINED, TensorProto.BFLOAT16, *FLOATS.values()}
    return info.type.WhichOneof("value") in (None, "tensor_type") and info.type.tensor_type.elem_type in kinds


def unused(graph: GraphProto, name: str) -> str:
    """Return a name that no value of the graph has."""
    used_names = {value for node in graph.node for value in (*node.input, *node.output)}
    used_names.update(info.name for info in (*graph.input, *graph.initializer))
    while name in used_names:
        name += "_"
    return name


class Builder:
    """Builder that appends nodes to a model."""

    def __init__(self, model: ModelProto) -> None:
        self.graph = model.graph
        self.opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))

    def node(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = unused(self.graph, f"ortrain/{op}")
        self.graph.node.append(helper.make_node(op, inputs, [name], name, **attributes))
        return name

    def constant(self, name: str, values: Array) -> str:
        name = unused(self.graph, f"ortrain/{name}")
        self.graph.initializer.append(numpy_helper.from_array(values, name))
        return name

    def input(self, name: str, element: int, shape: Sequence[int | str]) -> str:
        name = unused(self.graph, name)
        self.graph.input.append(helper.make_tensor_value_info(name, element, shape))
        return name


def with_values(model: ModelProto, values: dict[str, Array]) -> bytes:
    """Return the model with these values in its initializers; values without an initializer are ignored."""
    there = {tensor.name for tensor in model.graph.initializer}
    native = [(name, OrtValue.ortvalue_from_numpy(value)._ortvalue) for name, value in values.items() if name in there]
    return _ortrain.with_initializers(model.SerializeToString(), native)
