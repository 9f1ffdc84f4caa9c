"""Every operator's node cases with one part broken: each must run, or give an error that names the node.

No case may crash or hang. A case with an attribute or an input of a kind that the operator does not have must fail. The
broken parts are the kind of an attribute; the value of an axis, number or word; the element type, rank and sizes of an
input; the numbers of inputs and outputs.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper
from test_nodes import OPERATORS, arrays, cases

import ortrain

NAME = "the broken node"
OUT_OF_RANGE = 2**40
ERRORS = (ortrain.InvalidModelError, ortrain.UnsupportedError, ortrain.InvalidArgumentError, ortrain.MemoryLimitError)
KINDS: dict[int, Any] = {
    AttributeProto.INT: "a word",
    AttributeProto.FLOAT: "a word",
    AttributeProto.STRING: 7,
    AttributeProto.INTS: 1.5,
    AttributeProto.FLOATS: "a word",
    AttributeProto.STRINGS: 7,
    AttributeProto.TENSOR: 7,
    AttributeProto.GRAPH: 7,
}


def one_node(model: ModelProto) -> tuple[ModelProto, NodeProto]:
    """Return a copy of the model, and its only node under a new name."""
    changed = copy.deepcopy(model)
    (node,) = changed.graph.node
    node.name = NAME
    return changed, node


def broken_attributes(model: ModelProto) -> Iterator[tuple[str, ModelProto, bool]]:
    """Yield a description of the broken part, the model, and True if the model is certainly invalid."""
    for position, attribute in enumerate(model.graph.node[0].attribute):

        def replaced(value: Any, position: int = position, attribute: AttributeProto = attribute) -> ModelProto:
            changed, node = one_node(model)
            kind = AttributeProto.INTS if value == [] else None
            node.attribute[position].CopyFrom(helper.make_attribute(attribute.name, value, attr_type=kind))
            return changed

        name = attribute.name
        yield f"{name} of another kind", replaced(KINDS[attribute.type]), True
        if attribute.type == AttributeProto.INT:
            for value in (-OUT_OF_RANGE, -1000, -1, 2, 1000, OUT_OF_RANGE):
                surely = "axis" in name and abs(value) >= 1000
                yield f"{name} is {value}", replaced(value), surely
        elif attribute.type == AttributeProto.INTS:
            # Sizes, paddings and axes of both signs, and a list that is too long for any operator.
            for values in (
                [],
                [0] * 9,
                [-1] * len(attribute.ints),
                [OUT_OF_RANGE] * len(attribute.ints),
                [0] * len(attribute.ints),
            ):
                yield f"{name} is {values}", replaced(values), False
        elif attribute.type == AttributeProto.FLOAT:
            for number in (float("nan"), float("inf"), -1.0):
                yield f"{name} is {number}", replaced(number), False
        elif attribute.type == AttributeProto.STRING:
            yield f"{name} is a word of no meaning", replaced("no meaning"), True
        elif attribute.type == AttributeProto.STRINGS:
            yield f"{name} are words of no meaning", replaced(["no meaning"]), True


def broken_ports(model: ModelProto) -> Iterator[tuple[str, ModelProto, bool]]:
    (node,) = model.graph.node
    for count in range(len(node.input)):
        changed, given = one_node(model)
        del given.input[count:]
        yield f"{count} inputs", changed, False
    changed, given = one_node(model)
    given.output.extend(f"more {k}" for k in range(40))
    yield "40 more outputs", changed, node.op_type not in ("Split", "Loop", "Scan", "If")
    for position, value in enumerate(model.graph.input):
        if value.name not in node.input:
            continue
        kind = value.type.tensor_type
        sizes = [dim.dim_value for dim in kind.shape.dim]
        for dtype in (
            TensorProto.STRING,
            TensorProto.BOOL,
            TensorProto.FLOAT,
            TensorProto.INT64,
            TensorProto.COMPLEX64,
        ):
            if dtype != kind.elem_type:
                changed, _ = one_node(model)
                changed.graph.input[position].type.tensor_type.elem_type = dtype
                surely = dtype in (TensorProto.STRING, TensorProto.COMPLEX64)
                yield f"input {position} is of type {TensorProto.DataType.Name(dtype)}", changed, surely
        for shape in ([], [3, 1, 1, 1, 1, 1, 1], [0] * len(sizes), [size + 1 for size in sizes], sizes[:-1]):
            if shape != sizes:
                changed, _ = one_node(model)
                del changed.graph.input[position].type.tensor_type.shape.dim[:]
                for size in shape:
                    changed.graph.input[position].type.tensor_type.shape.dim.add().dim_value = size
                yield f"input {position} has shape {shape}", changed, False


def feeds_of(model: ModelProto, case: Any) -> dict[str, np.ndarray]:
    """Return the inputs of the case that still fit, and zeros for the others."""
    given = arrays(case.data_sets[0][0])
    feeds = {}
    for value, array in zip(model.graph.input, given, strict=False):
        kind = value.type.tensor_type
        sizes = [dim.dim_value for dim in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        feeds[value.name] = array if array.dtype == dtype and list(array.shape) == sizes else np.zeros(sizes, dtype)
    return feeds


def of_one_node() -> dict[str, list[str]]:
    """Return the names of cases of one node, by operator."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for name, case in cases()[0].items():
        if len(case.model.graph.node) == 1:
            found[case.model.graph.node[0].op_type].append(name)
    return found


CASES = of_one_node()
# Operators with cases in which a scale belongs to the whole tensor: no axis has an effect.
WITHOUT_AXIS = frozenset({"DequantizeLinear", "QuantizeLinear"})


@pytest.mark.parametrize("op", sorted(CASES))
def test_error_describes_the_broken_node(op: str) -> None:
    complaints = []
    for name in CASES[op]:
        case = cases()[0][name]
        for what, model, surely in (*broken_attributes(case.model), *broken_ports(case.model)):
            label = f"{name}: {what}"
            options = ortrain.SessionOptions()
            options.memory_limit = 1 << 28
            options.iteration_limit = 10_000
            try:
                session = ortrain.InferenceSession(model, options)
                session.run(None, feeds_of(model, case))
            except ERRORS as error:
                message = str(error)
                # Feeds are checked before any node runs.
                if NAME not in message and not message.startswith("input "):
                    complaints.append(f"{label}: names no node: {message}")
            except ortrain.OrtrainError as error:
                complaints.append(f"{label}: {type(error).__name__}: {error}")
            else:
                if surely and not (op in WITHOUT_AXIS and what.startswith("axis is ")):
                    complaints.append(f"{label}: it runs")
    assert not complaints, f"{len(complaints)} of {op}:\n" + "\n".join(complaints)


def test_every_operator_is_broken() -> None:
    assert set(CASES) == OPERATORS
