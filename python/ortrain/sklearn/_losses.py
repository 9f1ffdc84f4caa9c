"""Heads on a network: its predictions, and the loss of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from ortrain.sklearn._graphs import Array, Builder, input_info, pruned, with_values
from ortrain.sklearn._networks import Network

# First opset with the operator SoftmaxCrossEntropyLoss.
_CROSS_ENTROPY_SINCE = 12
# Absolute error above which the Huber loss is linear.
HUBER_DELTA = 1.0


class _Head(Builder):
    """Builder that appends a loss or predictions to a network."""

    def columns(self, network: Network) -> str:
        """Add the scores as a matrix. A single logit z becomes [-z/2, z/2]: the softmax of both is the sigmoid of z."""
        flat = self.node("Flatten", [network.scores], axis=1)
        if network.classifier and network.columns == 1:
            halves = self.constant("halves", np.array([[-0.5, 0.5]], network.dtype))
            return self.node("Mul", [flat, halves])
        return flat

    def cross_entropy(self, columns: str, labels: str, network: Network) -> str:
        """Add the loss of each row, as a column. The labels are a column of class indices."""
        if self.opset >= _CROSS_ENTROPY_SINCE:
            flat = self.node("Reshape", [labels, self.constant("vector", np.array([-1], np.int64))])
            rows = self.node("SoftmaxCrossEntropyLoss", [columns, flat], reduction="none")
            return self.node("Reshape", [rows, self.constant("column", np.array([-1, 1], np.int64))])
        classes = self.constant("classes", np.arange(max(network.columns, 2), dtype=np.int64)[None])
        is_class = self.node("Cast", [self.node("Equal", [labels, classes])], to=network.element)
        logarithms = self.node("Mul", [self.node("LogSoftmax", [columns], axis=1), is_class])
        return self.node("Neg", [self.node("ReduceSum", [logarithms], axes=[1], keepdims=1)])

    def regression(self, loss: str, columns: str, target: str, dtype: np.dtype[Any]) -> str:
        """Add the loss of each element."""
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
    """Return a model that outputs the scores as a matrix and, for a classifier, the class probabilities."""
    model = ModelProto.FromString(network.model)
    builder = _Head(model)
    names = [builder.columns(network)]
    if network.classifier:
        names.append(builder.node("Softmax", names, axis=1))
    return pruned(model, map(helper.make_empty_tensor_value_info, names))


def loss_model(network: Network, loss: str) -> ModelProto:
    """Return a model that outputs the loss of a batch and the scores; targets and row weights are additional inputs.

    The loss is the mean over the rows of the row loss times the row weight. The row loss is the mean over the elements
    of the row.
    """
    model = ModelProto.FromString(network.model)
    builder = _Head(model)
    batch = input_info(model).type.tensor_type.shape.dim
    rows = batch[0].dim_param if batch and batch[0].dim_param else "batch"
    columns = builder.columns(network)
    if network.classifier:
        target = builder.input("labels", TensorProto.INT64, [rows, 1])
        parts = builder.cross_entropy(columns, target, network)
    else:
        target = builder.input("target", network.element, [rows, network.columns])
        parts = builder.regression(loss, columns, target, network.dtype)
    weight = builder.input("sample_weight", network.element, [rows, 1])
    mean = builder.node("ReduceMean", [builder.node("Mul", [parts, weight])], keepdims=0)
    outputs = [
        helper.make_tensor_value_info(mean, network.element, []),
        helper.make_empty_tensor_value_info(columns),
    ]
    return pruned(model, outputs)


def inference_model(network: Network, values: dict[str, Array]) -> bytes:
    """Return the model with its original outputs, and with these values in its initializers."""
    model = ModelProto.FromString(network.model)
    return with_values(pruned(model, model.graph.output), values)
