"""Rewrites of an ONNX model before training: node names, a fused loss node, types of expanded values.

>>> from ortrain.trainer.postprocess import run_postprocess
>>> [node.name for node in run_postprocess(model).graph.node]
['Gemm_0', 'Relu_1', 'Gemm_2']
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from onnx import GraphProto, ModelProto, NodeProto

__all__ = ["add_name", "fix_expand_shape", "fuse_softmaxNLL_to_softmaxCE", "run_postprocess"]

_LIKELIHOODS = ("nll_loss", "NegativeLogLikelihoodLoss")


def run_postprocess(model: ModelProto) -> ModelProto:
    """Applies all rewrites of this module to a model in place, and returns the model.

    >>> from ortrain.trainer.postprocess import run_postprocess
    >>> run_postprocess(model) is model
    True
    """
    return fix_expand_shape(fuse_softmaxNLL_to_softmaxCE(add_name(model)))


def add_name(model: ModelProto) -> ModelProto:
    """Names each node by its operator and index: ``Gemm_0``. The model is changed in place and returned.

    >>> from ortrain.trainer.postprocess import add_name
    >>> add_name(model).graph.node[1].name
    'Relu_1'
    """
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    return model


def fuse_softmaxNLL_to_softmaxCE(model: ModelProto) -> ModelProto:  # noqa: N802  (the reference's name)
    """Replaces each LogSoftmax with a likelihood loss by a ``SparseSoftmaxCrossEntropy``.

    The loss is ``nll_loss`` or ``NegativeLogLikelihoodLoss``. Either of its first two inputs may be the LogSoftmax, and
    an optional third input is the weight of each class. The new node outputs the loss and the log-probabilities, and is
    the last node. Two cases stay unchanged, because the new operator does not support them: a loss with
    ``ignore_index``, and a LogSoftmax over an axis other than the classes. The model is changed in place and returned.

    >>> from ortrain.trainer.postprocess import fuse_softmaxNLL_to_softmaxCE
    >>> make = onnx.helper.make_node
    >>> softmax = make("LogSoftmax", ["logits"], ["log_prob"], axis=1)
    >>> loss = make("NegativeLogLikelihoodLoss", ["log_prob", "labels"], ["loss"])
    >>> model.graph.node.extend([softmax, loss])
    >>> fused = fuse_softmaxNLL_to_softmaxCE(model).graph.node[-1]
    >>> fused.op_type, list(fused.input), list(fused.output)
    ('SparseSoftmaxCrossEntropy', ['logits', 'labels'], ['loss', 'log_prob'])
    """
    graph = model.graph
    count = 0
    for loss in [node for node in graph.node if node.op_type in _LIKELIHOODS]:
        softmax, labels = _softmax_of(graph, loss)
        if softmax is None or labels is None or not _can_be_fused(graph, softmax, loss):
            continue
        count += 1
        _fuse(graph, softmax, loss, labels, count)
    return model


def _softmax_of(graph: GraphProto, loss: NodeProto) -> tuple[NodeProto | None, str | None]:
    """Returns the LogSoftmax that a loss reads, and the name of the labels."""
    for scores, labels in ((0, 1), (1, 0)):
        softmax = _maker(graph, loss.input[scores])
        if softmax is not None and softmax.op_type == "LogSoftmax":
            return softmax, loss.input[labels]
    return None, None


def _can_be_fused(graph: GraphProto, softmax: NodeProto, loss: NodeProto) -> bool:
    # The class axis is 1 for the likelihood loss and -1 for the fused loss: the same axis only for a matrix.
    if _attribute(loss, "ignore_index") is not None:
        return False
    rank = _rank(graph, softmax.input[0])
    axis = _attribute(softmax, "axis")
    if rank is None:
        return axis in (None, 1, -1)
    return rank == 2 and axis in (None, 1, -1)


def _fuse(graph: GraphProto, softmax: NodeProto, loss: NodeProto, labels: str, count: int) -> None:
    from onnx import helper

    weights = [name for name in loss.input[2:3] if name]
    fused = helper.make_node(
        "SparseSoftmaxCrossEntropy",
        [softmax.input[0], labels, *weights],
        [loss.output[0], softmax.output[0]],
        f"nll_loss_node_{count}",
    )
    fused.attribute.extend(attribute for attribute in loss.attribute if attribute.name == "reduction")
    graph.node.remove(loss)
    graph.node.remove(softmax)
    graph.node.append(fused)
    if any(name in fused.output for node in graph.node for name in node.input):
        _sort(graph)


def _sort(graph: GraphProto) -> None:
    """Sorts the nodes topologically. Otherwise the order stays the same."""
    waiting = list(graph.node)
    open_results = {name for node in waiting for name in node.output if name}
    ordered: list[NodeProto] = []
    while waiting:
        node = next((node for node in waiting if not open_results.intersection(node.input)), waiting[0])
        waiting.remove(node)
        ordered.append(node)
        open_results.difference_update(node.output)
    copies = [type(node).FromString(node.SerializeToString()) for node in ordered]
    del graph.node[:]
    graph.node.extend(copies)


def fix_expand_shape(model: ModelProto) -> ModelProto:
    """Records the types of values that are expanded to the shape of a model input.

    The shape must be a ``Shape`` of the input, or a pattern of exporters before 2020: a ``Where`` of the ``Shape`` and
    ones. The model is changed in place and returned.

    >>> from ortrain.trainer.postprocess import fix_expand_shape
    >>> make = onnx.helper.make_node
    >>> model.graph.node.extend([make("Shape", ["x"], ["s"]), make("Expand", ["fc1.bias", "s"], ["wide"])])
    >>> [value.name for value in fix_expand_shape(model).graph.value_info]
    ['wide']
    """
    graph = model.graph
    inputs = {value.name: value for value in graph.input}
    known = {value.name for value in graph.value_info}
    for node in graph.node:
        if node.op_type != "Expand" or node.output[0] in known:
            continue
        like = inputs.get(_shape_source(graph, _maker(graph, node.input[1])) or "")
        if like is None:
            continue
        value_info = graph.value_info.add()
        value_info.name = node.output[0]
        value_info.type.CopyFrom(like.type)
        value_info.type.tensor_type.elem_type = _element_type(graph, node.input[0]) or like.type.tensor_type.elem_type
    return model


def _shape_source(graph: GraphProto, node: NodeProto | None) -> str | None:
    """Returns the value with the shape that a node computes, or None."""
    if node is None:
        return None
    if node.op_type == "Shape":
        return None if node.attribute else node.input[0]
    if node.op_type == "Reshape":
        return _shape_source(graph, _maker(graph, node.input[0]))
    if node.op_type != "Where":
        return None
    condition, ones = (_maker(graph, name) for name in node.input[:2])
    if condition is None or ones is None or (condition.op_type, ones.op_type) != ("Equal", "ConstantOfShape"):
        return None
    return _shape_source(graph, _maker(graph, node.input[2]))


def _maker(graph: GraphProto, name: str) -> NodeProto | None:
    """Returns the node that produces a value."""
    return next((node for node in graph.node if name and name in node.output), None)


def _attribute(node: NodeProto, name: str) -> int | None:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), None)


def _values(graph: GraphProto) -> Iterable[Any]:
    yield from graph.input
    yield from graph.value_info
    yield from graph.output


def _rank(graph: GraphProto, name: str) -> int | None:
    """Returns the rank of a value, if the model has its shape."""
    tensor = next((value.type.tensor_type for value in _values(graph) if value.name == name), None)
    return len(tensor.shape.dim) if tensor is not None and tensor.HasField("shape") else None


def _element_type(graph: GraphProto, name: str) -> int | None:
    """Returns the element type of a value, if the model has it."""
    for tensor in graph.initializer:
        if tensor.name == name:
            return int(tensor.data_type)
    for value in _values(graph):
        if value.name == name and value.type.tensor_type.elem_type:
            return int(value.type.tensor_type.elem_type)
    node = _maker(graph, name)
    if node is None:
        return None
    if node.op_type == "Cast":
        return _attribute(node, "to")
    tensors = [attribute.t.data_type for attribute in node.attribute if attribute.name == "value"]
    return int(tensors[0]) if tensors else None
