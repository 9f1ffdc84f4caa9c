"""Losses and penalties as parts of a model (``onnxcustom.utils.orttraining_helper``).

>>> import ortrain
>>> from ortrain.gradient.utils.orttraining_helper import add_loss_output
>>> trained = add_loss_output(model, "absolute_error", penalty={"fc2.weight": {"l1": 0.01}})
>>> [value.name for value in trained.graph.input], [value.name for value in trained.graph.output]
(['x', 'label'], ['loss', 'logits'])
>>> session = ortrain.InferenceSession(trained)
>>> loss, logits = session.run(None, {"x": x, "label": np.zeros((8, 10), np.float32)})
>>> loss.shape
(1, 1)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper, shape_inference

from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError, UnsupportedError
from ortrain.gradient.utils._graphs import (
    DEFAULT_OPSET,
    FLOATS,
    GraphWriter,
    check_keywords,
    checked_model,
    finite,
    model_like,
    names_of,
    needed_nodes,
    rename,
    unique_name,
)
from ortrain.gradient.utils.onnx_helper import get_onnx_opset

__all__ = ["add_loss_output", "get_train_initializer", "penalty_loss_onnx"]

_Sizes: TypeAlias = list[int | str | None] | None
# First opset with broadcasting.
_OLDEST_OPSET = 7
# Prefix of the symbolic sizes that shape inference generates.
_UNNAMED = "unk__"
# Alias with the name that scripts use.
_unique_name = unique_name


def get_train_initializer(onx: onnx.ModelProto) -> dict[str, tuple[npt.NDArray[Any], onnx.TensorProto]]:
    """Returns the float initializers (16, 32 or 64 bits), by name in the order of the model: the value and the tensor.

    The value is a copy; the tensor is part of the model.

    Source: ``onnxcustom.utils.orttraining_helper.get_train_initializer``.

    >>> from ortrain.gradient.utils.orttraining_helper import get_train_initializer
    >>> {name: value.shape for name, (value, tensor) in get_train_initializer(model).items()}
    {'fc1.weight': (96, 64), 'fc1.bias': (96,), 'fc2.weight': (10, 96), 'fc2.bias': (10,)}

    """
    return {
        entry.name: (np.array(numpy_helper.to_array(entry)), entry)
        for entry in checked_model(onx).graph.initializer
        if entry.data_type in FLOATS
    }


def penalty_loss_onnx(
    name: str,
    dtype: npt.DTypeLike,
    l1: float | None = None,
    l2: float | None = None,
    existing_names: set[str] | None = None,
) -> tuple[list[onnx.TensorProto], list[onnx.NodeProto]]:
    """Returns the initializers and nodes of a penalty: ``l1`` times the sum of ``abs(w)`` plus ``l2`` times ``w * w``.

    The last node computes the penalty, ``penalty_<name>``, of shape ``(1,)``. A coefficient of 0, or ``None``, has no
    nodes.

    Args:
        name: the weight, a value of any shape.
        dtype: the type of the weight.
        l1: the coefficient of the absolute values.
        l2: the coefficient of the squares.
        existing_names: existing names; the names of the new values are added to the set.

    Raises:
        InvalidArgumentError: without any coefficient, or for a coefficient that is not a number.

    Source: ``onnxcustom.utils.orttraining_helper.penalty_loss_onnx``.

    >>> from ortrain.gradient.utils.orttraining_helper import penalty_loss_onnx
    >>> initializers, nodes = penalty_loss_onnx("w", np.float32, l2=0.5)
    >>> [(node.op_type, node.output[0]) for node in nodes]
    [('Reshape', 'reshaped_w'), ('Mul', 'square_w'), ('ReduceSum', 'reduced_w'), ('Mul', 'penalty_w')]

    """
    writer = GraphWriter(DEFAULT_OPSET, dtype, existing_names)
    vector = writer.op("Reshape", name, writer.sizes([-1], f"shape_{name}"), name=f"reshaped_{name}")
    coefficients = {
        kind: finite(coefficient, kind) for kind, coefficient in (("l1", l1), ("l2", l2)) if coefficient is not None
    }
    coefficients = {kind: coefficient for kind, coefficient in coefficients.items() if coefficient != 0}
    if not coefficients:
        raise InvalidArgumentError(f"the penalty of {name!r} requires l1 or l2, other than 0")
    parts = []
    for kind, coefficient in coefficients.items():
        if kind == "l1":
            terms = writer.op("Abs", vector, name=f"absolute_{name}")
        else:
            terms = writer.op("Mul", vector, vector, name=f"square_{name}")
        total = writer.op("ReduceSum", terms, name=f"reduced_{name}", keepdims=1)
        factor = writer.number(coefficient, f"{kind}_weight_{name}")
        part = f"penalty_{kind}_{name}" if len(coefficients) > 1 else f"penalty_{name}"
        parts.append(writer.op("Mul", total, factor, name=part))
    if len(parts) > 1:
        writer.op("Add", *parts, name=f"penalty_{name}")
    return writer.initializers, writer.nodes


class _Task(NamedTuple):
    """Inputs of a loss under construction."""

    writer: GraphWriter
    output: str
    """What is predicted."""
    label: str
    """What is expected."""
    sizes: _Sizes
    """The sizes of both."""
    weights: str | None
    """The weights of rows."""

    def weighted(self, terms: str, name: str) -> str:
        """Multiplies terms of the loss by the weights of their rows."""
        if self.weights is None:
            return terms
        writer = self.writer
        if self.sizes is None:
            terms = writer.op("Reshape", terms, writer.sizes([0, -1], "rows_shape"), name="loss_rows")
        axes = 2 if self.sizes is None else len(self.sizes)
        column = writer.sizes([-1] + [1] * (axes - 1), "weight_shape")
        weights = writer.op("Reshape", self.weights, column, name="loss_weight_column")
        return writer.op("Mul", terms, weights, name=name)

    def total(self, terms: str) -> str:
        """Sums all terms, each times the weight of its row."""
        return self.writer.op("ReduceSum", self.weighted(terms, "loss_diff_weight"), name="loss_sum", keepdims=0)


def _squared_error(task: _Task) -> str:
    writer = task.writer
    difference = writer.op("Sub", task.output, task.label, name="loss_diff")
    return task.total(writer.op("Mul", difference, difference, name="loss_diff"))


def _absolute_error(task: _Task) -> str:
    writer = task.writer
    difference = writer.op("Sub", task.output, task.label, name="loss_diff")
    return task.total(writer.op("Abs", difference, name="loss_diff"))


def _elastic(task: _Task, l1_weight: float = 0.5, l2_weight: float = 0.5) -> str:
    writer = task.writer
    l1, l2 = finite(l1_weight, "l1_weight"), finite(l2_weight, "l2_weight")
    difference = writer.op("Sub", task.output, task.label, name="loss_diff")
    absolute = writer.op("Abs", difference, name="loss_l1")
    square = writer.op("Mul", difference, difference, name="loss_l2")
    absolute = writer.op("Mul", absolute, writer.number(l1, "l1_name"), name="loss_l1")
    square = writer.op("Mul", square, writer.number(l2, "l2_name"), name="loss_l2")
    return task.total(writer.op("Add", absolute, square, name="final_loss"))


def _log(task: _Task, eps: float = 1e-6) -> str:
    writer = task.writer
    eps = finite(eps, "eps")
    if eps >= 0.5:
        raise InvalidArgumentError(f"eps must be less than 0.5, got {eps}: it is the smallest probability")
    clipped = writer.clip(task.output, eps, 1 - eps, name="clip_name")
    sums = writer.row_sums(clipped, name="clip_red_name")
    logs = writer.op("Log", writer.op("Div", clipped, sums, name="new_output_name"), name="log_name")
    second = writer.op("Cast", task.label, name="cast_name", to=writer.element_type)
    first = writer.op("Sub", writer.number(1, "one_name"), second, name="subl_name")
    classes = writer.op("Concat", first, second, name="conc_name", axis=1)
    likelihood = writer.row_sums(writer.op("Mul", logs, classes, name="mul_name"), name="like_name")
    likelihood = task.weighted(likelihood, "likew_name")
    mean = writer.op("ReduceMean", likelihood, name="reduced_loss", keepdims=0)
    return writer.op("Neg", mean, name="neg_reduced_loss")


_SCORES: dict[str, Callable[..., str]] = {
    "squared_error": _squared_error,
    "l2": _squared_error,
    "absolute_error": _absolute_error,
    "l1": _absolute_error,
    "elastic": _elastic,
    "log": _log,
}


def add_loss_output(
    onx: onnx.ModelProto,
    score_name: str = "squared_error",
    loss_name: str = "loss",
    label_name: str = "label",
    weight_name: str | None = None,
    penalty: Mapping[str, float | Mapping[str, float | None]] | None = None,
    output_index: int | str | None = None,
    **kwargs: float,
) -> onnx.ModelProto:
    """Returns a model that also computes a loss of one of its outputs.

    The inputs are the inputs of the model, then the targets (``label_name``), then row weights (``weight_name``). The
    outputs are the loss, of shape ``(1, 1)``, and the output that the loss depends on. Other outputs are removed, and
    so are unused nodes and initializers. ``Reciprocal`` becomes a quotient.

    Let ``d`` be the predicted value minus the target. The weight of a row scales its terms. The loss is

    ============================= ====================================================================================
    ``score_name``                loss
    ============================= ====================================================================================
    ``squared_error``, ``l2``     the sum of ``d * d``
    ``absolute_error``, ``l1``    the sum of ``abs(d)``
    ``elastic``                   the sum of ``l1_weight * abs(d) + l2_weight * d * d``
    ``log``                       the mean over rows of the log loss. The two columns are probabilities, clipped to
                                  ``eps`` and ``1 - eps`` and divided by their sum. Labels are int64, 0 or 1, of shape
                                  ``(rows, 1)``
    ============================= ====================================================================================

    Args:
        onx: the model; it is not changed. If a node result has the name of the label, its name in the new model is
            ``_<label>_``.
        score_name: the kind of loss.
        loss_name: the name of the loss.
        label_name: the name of the targets: of the type and the shape of the output, except for ``log``.
        weight_name: the name of an input with a weight for each row, of shape ``(rows,)``; ``None`` for no weights.
        penalty: penalties on initializers or inputs, by name, which are added to the loss: ``{"l1": a, "l2": b}`` for
            ``a`` times the sum of absolute values plus ``b`` times the sum of squares, or a float for only ``l2``.
        output_index: the output that the loss depends on, by its index or its name; required for several outputs.
        kwargs: ``l1_weight=0.5`` and ``l2_weight=0.5`` of ``elastic``, ``eps=1e-6`` of ``log``.

    Raises:
        InvalidArgumentError: for an unknown output, or an output that is not a float tensor; for several outputs
            without ``output_index``; for a name that already exists; for a penalty on an unknown value, or without a
            coefficient.
        UnsupportedError: for an unknown ``score_name``.
        TypeError: for an ``output_index`` that is neither an integer nor a name; for a penalty that is neither a float
            nor a dictionary; for an unknown keyword.

    Source: ``onnxcustom.utils.orttraining_helper.add_loss_output``, which multiplies each error by the weights of all
    rows.

    >>> import ortrain
    >>> from ortrain.gradient.utils.orttraining_helper import add_loss_output
    >>> session = ortrain.InferenceSession(add_loss_output(model, weight_name="weight"))
    >>> rows = {"x": x, "weight": np.zeros(8, np.float32), "label": np.ones((8, 10), np.float32)}
    >>> rows["weight"][2] = 0.5
    >>> loss, logits = session.run(None, rows)
    >>> np.allclose(loss, 0.5 * ((logits[2] - 1) ** 2).sum())
    True

    """
    if score_name not in _SCORES:
        raise UnsupportedError(
            f"unknown score {score_name!r}; expected one of {', '.join(_SCORES)}{hint(score_name, _SCORES)}"
        )
    score = _SCORES[score_name]
    check_keywords(f"score {score_name!r}", list(inspect.signature(score).parameters)[1:], kwargs)
    model = _rewrite_op_no_grad(checked_model(onx))
    opset = get_onnx_opset(model)
    if opset < _OLDEST_OPSET:
        raise InvalidArgumentError(f"the model has opset {opset}; losses require opset {_OLDEST_OPSET} or newer")
    graph = model.graph
    output = _selected(graph, output_index)
    _free_names(graph, output.name, label=label_name, weight=weight_name, loss=loss_name)
    element_type, sizes = _described(model, output)
    label_type = element_type
    if score is _log:
        if sizes is not None and (len(sizes) != 2 or (isinstance(sizes[1], int) and sizes[1] != 2)):
            raise InvalidArgumentError(
                f"output {output.name!r} has shape {sizes}; the log loss requires probabilities of two columns"
            )
        label_type, sizes = onnx.TensorProto.INT64, [sizes[0] if sizes else None, 1]
    existing_names = names_of(graph) | {loss_name, label_name} | ({weight_name} if weight_name is not None else set())
    writer = GraphWriter(opset, helper.tensor_dtype_to_np_dtype(element_type), existing_names)
    total = score(_Task(writer, output.name, label_name, sizes, weight_name), **kwargs)
    penalties = _penalties(writer, graph, penalty or {})
    if penalties is None:
        writer.result("Reshape", total, writer.sizes([1, 1], "loss_shape"), name=loss_name)
    else:
        shape = writer.sizes([-1, 1], "shapevect")
        added = writer.op("Reshape", penalties, shape, name="penalty_reshape")
        total = writer.op("Reshape", total, shape, name="loss_reshape")
        writer.result("Add", added, total, name=loss_name)
    inputs = [helper.make_tensor_value_info(label_name, label_type, sizes)]
    if weight_name is not None:
        inputs.append(helper.make_tensor_value_info(weight_name, element_type, [sizes[0] if sizes else None]))
    loss = helper.make_tensor_value_info(loss_name, element_type, [1, 1])
    return _with_loss(model, writer, inputs, [loss, output])


def _with_loss(
    model: onnx.ModelProto,
    writer: GraphWriter,
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
) -> onnx.ModelProto:
    """Returns a model with the written nodes, without unused nodes and initializers."""
    graph = model.graph
    nodes, needed = needed_nodes([*graph.node, *writer.nodes], [entry.name for entry in outputs])
    needed |= {entry.name for entry in graph.input}
    loss_graph = onnx.GraphProto(name=graph.name, doc_string=graph.doc_string)
    loss_graph.node.extend(nodes)
    loss_graph.input.extend([*graph.input, *inputs])
    loss_graph.output.extend(outputs)
    loss_graph.initializer.extend(entry for entry in [*graph.initializer, *writer.initializers] if entry.name in needed)
    loss_graph.sparse_initializer.extend(entry for entry in graph.sparse_initializer if entry.values.name in needed)
    loss_graph.value_info.extend(entry for entry in graph.value_info if entry.name in needed)
    return model_like(model, loss_graph)


def _selected(graph: onnx.GraphProto, output_index: int | str | None) -> onnx.ValueInfoProto:
    """Returns the output that the loss depends on."""
    outputs: list[onnx.ValueInfoProto] = list(graph.output)
    names = [entry.name for entry in outputs]
    listed = ", ".join(names)
    if output_index is None:
        if len(names) != 1:
            raise InvalidArgumentError(f"output_index must select the output of the loss; the model has {listed}")
        return outputs[0]
    if isinstance(output_index, str):
        if output_index not in names:
            raise InvalidArgumentError(
                f"the model has no output {output_index!r}; it has {listed}{hint(output_index, names)}"
            )
        return outputs[names.index(output_index)]
    if isinstance(output_index, bool) or not isinstance(output_index, (int, np.integer)):
        raise TypeError(f"output_index must be the index or the name of an output, got {type(output_index).__name__}")
    if not -len(names) <= output_index < len(names):
        raise InvalidArgumentError(f"output_index {output_index} is out of range: the model has {len(names)} outputs")
    return outputs[int(output_index)]


def _free_names(graph: onnx.GraphProto, output: str, **names: str | None) -> None:
    """Renames a node result with the name of the label, and checks that no value has any of the names."""
    label = names["label"]
    fixed = {entry.name for entry in [*graph.input, *graph.initializer]} | {output}
    if isinstance(label, str) and label not in fixed and label in names_of(graph):
        rename(graph, {label: unique_name(names_of(graph), f"_{label}_")})
    there = names_of(graph)
    used: dict[str, str] = {}
    for what, name in names.items():
        if name is None and what == "weight":
            continue
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"{what}_name must be a name, got {name!r}")
        if name in there:
            raise InvalidArgumentError(f"the model already has a value {name!r}; choose another {what}_name")
        if name in used:
            raise InvalidArgumentError(f"{used[name]}_name and {what}_name are the same: {name!r}")
        used[name] = what


def _described(model: onnx.ModelProto, output: onnx.ValueInfoProto) -> tuple[int, _Sizes]:
    """Returns the element type and the sizes of an output; no sizes if the rank is unknown."""
    kind = output.type.tensor_type
    if not kind.HasField("shape") or kind.elem_type == onnx.TensorProto.UNDEFINED:
        inferred = shape_inference.infer_shapes(model).graph.output
        kind = next(entry for entry in inferred if entry.name == output.name).type.tensor_type
    if kind.elem_type not in FLOATS:
        name = onnx.TensorProto.DataType.Name(kind.elem_type).lower()
        raise InvalidArgumentError(f"output {output.name!r} must be a tensor of floats for a loss, got {name}")
    if not kind.HasField("shape"):
        return kind.elem_type, None
    sizes: list[int | str | None] = []
    for dim in kind.shape.dim:
        if dim.HasField("dim_value"):
            sizes.append(dim.dim_value if dim.dim_value > 0 else None)
        else:
            sizes.append(dim.dim_param if dim.dim_param and not dim.dim_param.startswith(_UNNAMED) else None)
    return kind.elem_type, sizes


def _penalties(
    writer: GraphWriter, graph: onnx.GraphProto, penalty: Mapping[str, float | Mapping[str, float | None]]
) -> str | None:
    """Writes penalties; returns their sum."""
    if not isinstance(penalty, Mapping):
        raise TypeError(f"penalty must be a dictionary of names and coefficients, got {type(penalty).__name__}")
    types = {entry.name: entry.data_type for entry in graph.initializer}
    types |= {entry.name: entry.type.tensor_type.elem_type for entry in graph.input}
    total: str | None = None
    for name, coefficients in penalty.items():
        if name not in types:
            raise InvalidArgumentError(f"penalty: {name!r} is not an initializer or an input{hint(name, types)}")
        if types[name] != writer.element_type:
            kinds = [onnx.TensorProto.DataType.Name(kind).lower() for kind in (types[name], writer.element_type)]
            raise InvalidArgumentError(f"{name!r} is {kinds[0]}, but the loss of its penalty is {kinds[1]}")
        if isinstance(coefficients, (float, np.floating)):
            coefficients = {"l2": float(coefficients)}
        elif not isinstance(coefficients, Mapping):
            raise TypeError(
                f"the penalty of {name!r} must be a float, or a dictionary with 'l1' and 'l2', got "
                f"{type(coefficients).__name__}"
            )
        check_keywords(f"the penalty of {name!r}", ["l1", "l2"], coefficients)
        initializers, nodes = penalty_loss_onnx(name, writer.dtype, existing_names=writer.names, **coefficients)
        writer.initializers.extend(initializers)
        writer.nodes.extend(nodes)
        term = nodes[-1].output[0]
        total = term if total is None else writer.op("Add", total, term, name="sumop")
    return total


def _rewrite_op_no_grad(onx: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy in which ``Reciprocal`` becomes a quotient, for runtimes without a gradient of ``Reciprocal``.

    Nodes in subgraphs and nodes of unknown types do not change.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(onx)
    found = [node for node in copy.graph.node if node.op_type == "Reciprocal" and node.domain in ("", "ai.onnx")]
    if not found:
        return copy
    inferred = shape_inference.infer_shapes(onx).graph
    types = {
        entry.name: entry.type.tensor_type.elem_type
        for entry in [*inferred.value_info, *inferred.input, *inferred.output]
    }
    types |= {entry.name: entry.data_type for entry in inferred.initializer}
    existing_names, writers = names_of(copy.graph), dict[int, GraphWriter]()
    for node in found:
        kind = types.get(node.input[0]) or types.get(node.output[0])
        if kind not in FLOATS:
            continue
        writer = writers.setdefault(
            kind, GraphWriter(DEFAULT_OPSET, helper.tensor_dtype_to_np_dtype(kind), existing_names)
        )
        node.op_type = "Div"
        node.input[:] = [writer.number(1, "one"), node.input[0]]
    for writer in writers.values():
        copy.graph.initializer.extend(writer.initializers)
    return copy
