"""What is put behind a network: its predictions, and the loss of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from ortrain.sklearn._graphs import Array, Builder, input_info, pruned, with_values
from ortrain.sklearn._networks import Network

# From this opset on SoftmaxCrossEntropyLoss is an operator of ONNX.
_CROSS_ENTROPY_SINCE = 12
# The distance from which the Huber loss is a straight line.
HUBER_DELTA = 1.0


class _Head(Builder):
    """Appends a loss, or predictions, to a network."""

    def columns(self, network: Network) -> str:
        """The scores as a matrix; of one logit, those of both classes, whose softmax is its sigmoid."""
        flat = self.node("Flatten", [network.scores], axis=1)
        if network.classifier and network.columns == 1:
            halves = self.constant("halves", np.array([[-0.5, 0.5]], network.dtype))
            return self.node("Mul", [flat, halves])
        return flat

    def cross_entropy(self, columns: str, labels: str, network: Network) -> str:
        """The loss of each row, a column. The labels are a column of class numbers."""
        if self.opset >= _CROSS_ENTROPY_SINCE:
            flat = self.node("Reshape", [labels, self.constant("vector", np.array([-1], np.int64))])
            rows = self.node("SoftmaxCrossEntropyLoss", [columns, flat], reduction="none")
            return self.node("Reshape", [rows, self.constant("column", np.array([-1, 1], np.int64))])
        classes = self.constant("classes", np.arange(max(network.columns, 2), dtype=np.int64)[None])
        is_class = self.node("Cast", [self.node("Equal", [labels, classes])], to=network.element)
        logarithms = self.node("Mul", [self.node("LogSoftmax", [columns], axis=1), is_class])
        return self.node("Neg", [self.node("ReduceSum", [logarithms], axes=[1], keepdims=1)])

    def regression(self, loss: str, columns: str, target: str, dtype: np.dtype[Any]) -> str:
        """The loss of each element."""
        gap = self.node("Sub", [columns, target])
        if loss == "squared_error":
            return self.node("Mul", [gap, gap])
        size = self.node("Abs", [gap])
        if loss == "absolute_error":
            return size
        delta = self.constant("delta", np.array(HUBER_DELTA, dtype))
        half = self.constant("half", np.array(0.5, dtype))
        beyond = self.node("Relu", [self.node("Sub", [size, delta])])
        near = self.node("Sub", [size, beyond])
        parabola = self.node("Mul", [self.node("Mul", [near, near]), half])
        return self.node("Add", [parabola, self.node("Mul", [beyond, delta])])


def prediction_model(network: Network) -> ModelProto:
    """A model whose outputs are the scores as a matrix and, of a classifier, the probabilities of its classes."""
    model = ModelProto.FromString(network.model)
    builder = _Head(model)
    names = [builder.columns(network)]
    if network.classifier:
        names.append(builder.node("Softmax", names, axis=1))
    return pruned(model, map(helper.make_empty_tensor_value_info, names))


def loss_model(network: Network, loss: str) -> ModelProto:
    """A model whose outputs are the loss of a batch and its scores; targets and weights of rows are further inputs.

    The loss is the mean, over the rows, of the loss of a row times its weight; that of a row is the mean over its
    numbers.
    """
    model = ModelProto.FromString(network.model)
    builder = _Head(model)
    batch = input_info(model).type.tensor_type.shape.dim
    rows = batch[0].dim_param if batch and batch[0].dim_param else "batch"
    columns = builder.columns(network)
    if network.classifier:
        target = builder.given("labels", TensorProto.INT64, [rows, 1])
        parts = builder.cross_entropy(columns, target, network)
    else:
        target = builder.given("target", network.element, [rows, network.columns])
        parts = builder.regression(loss, columns, target, network.dtype)
    weight = builder.given("sample_weight", network.element, [rows, 1])
    mean = builder.node("ReduceMean", [builder.node("Mul", [parts, weight])], keepdims=0)
    outputs = [
        helper.make_tensor_value_info(mean, network.element, []),
        helper.make_empty_tensor_value_info(columns),
    ]
    return pruned(model, outputs)


def inference_model(network: Network, values: dict[str, Array]) -> bytes:
    """The model with the outputs that it came with, and these values in its initializers."""
    model = ModelProto.FromString(network.model)
    return with_values(pruned(model, model.graph.output), values)
