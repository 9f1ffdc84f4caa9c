"""Losses. What they compare the scores to is a new input, unless a value of that name is there."""

from __future__ import annotations

from typing import Any, Literal

import numpy.typing as npt
import onnx

from ortrain import _ortrain
from ortrain.artifacts import Loss, LossType
from ortrain.onnxblock._block import Block
from ortrain.onnxblock._model import ModelAccessor, current, find, is_defined

__all__ = ["BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "MSELoss"]


class _Loss(Block):
    def __init__(self, kind: LossType, **settings: Any) -> None:
        super().__init__()
        self._kind = kind
        self._settings = settings

    def _append(self, scores: str, target: str) -> str:
        accessor = current()
        model = accessor.model
        described = Loss(self._kind, scores=scores, target=target, **self._settings)._described()
        source = _declaring(accessor, scores).SerializeToString()
        there = is_defined(model, target)
        added, result, last = _ortrain.loss_fragment(source, described, there, accessor.last_number)
        model.graph.MergeFrom(onnx.ModelProto.FromString(added).graph)
        accessor.last_number = last
        return result


class MSELoss(_Loss):
    """The mean, sum or all of the squared differences.

    Args:
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    """

    def __init__(self, reduction: Literal["mean", "sum", "none"] = "mean") -> None:
        super().__init__(LossType.MSELoss, reduction=reduction)

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Return the name of the loss of scores and a target of their type and shape."""
        return self._append(loss_input_name, target_name)


class L1Loss(_Loss):
    """The mean, sum or all of the absolute differences.

    Args:
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    """

    def __init__(self, reduction: Literal["mean", "sum", "none"] = "mean") -> None:
        super().__init__(LossType.L1Loss, reduction=reduction)

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Return the name of the loss of scores and a target of their type and shape."""
        return self._append(loss_input_name, target_name)


class BCEWithLogitsLoss(_Loss):
    """Binary cross-entropy of the sigmoid of scores.

    Args:
        weight: floats that the losses are multiplied by, broadcast to their shape.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        pos_weight: floats that the losses of positive targets are multiplied by, broadcast.

    """

    def __init__(
        self,
        weight: npt.ArrayLike | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        pos_weight: npt.ArrayLike | None = None,
    ) -> None:
        super().__init__(LossType.BCEWithLogitsLoss, weight=weight, reduction=reduction, pos_weight=pos_weight)

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Return the name of the loss of scores and a target of their type and shape."""
        return self._append(loss_input_name, target_name)


class CrossEntropyLoss(_Loss):
    """Cross-entropy of the softmax of scores along axis 1, with labels of int64.

    Args:
        weight: a float for each class.
        reduction: ``"mean"``, weighted by class, ``"sum"`` or ``"none"``.
        ignore_index: a label whose elements count for nothing.
        label_smoothing: the share of the target, from 0 to 1, that all classes get alike.

    """

    def __init__(
        self,
        weight: npt.ArrayLike | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        settings = {"reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        super().__init__(LossType.CrossEntropyLoss, weight=weight, **settings)

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Return the name of the loss. Labels have the shape of the scores without axis 1."""
        return self._append(scores_input_name, labels_name)


def _declaring(accessor: ModelAccessor, name: str) -> onnx.ModelProto:
    """A model from which the type of a value can be read: of the model itself as little as will do."""
    graph = accessor.model.graph
    declared = find([*graph.output, *graph.input, *graph.value_info], name)
    if declared is None or not declared.type.tensor_type.HasField("shape"):
        return accessor.model
    model = onnx.ModelProto(ir_version=accessor.model.ir_version)
    model.opset_import.extend(accessor.model.opset_import)
    model.graph.name = "scores"
    model.graph.input.append(declared)
    return model
