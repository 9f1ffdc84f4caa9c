"""Loss blocks. The target is a new input, unless the model has a value of its name.

>>> from ortrain.onnxblock import base, loss
>>> with base(model) as accessor:
...     name = loss.CrossEntropyLoss(label_smoothing=0.1)("logits")
>>> [entry.name for entry in accessor.model.graph.input]
['x', 'labels']
"""

from __future__ import annotations

from typing import Any, Literal

import numpy.typing as npt
import onnx

from ortrain import _ortrain
from ortrain._operators import with_operators
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
        source = with_operators(accessor.source(_declaring(accessor, scores)), accessor.operators)
        there = is_defined(model, target)
        fragment = _ortrain.loss_fragment(source, described, there, accessor.last_number)
        model.graph.MergeFrom(onnx.ModelProto.FromString(fragment.model).graph)
        accessor.last_number = fragment.last
        return fragment.output


class MSELoss(_Loss):
    """Squared error, ``(scores - target)**2``, with a reduction.

    Args:
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    >>> with onnxblock.base(model) as accessor:
    ...     name = onnxblock.loss.MSELoss()("logits")
    >>> [node.op_type for node in accessor.model.graph.node][-3:]
    ['Sub', 'Pow', 'ReduceMean']

    """

    def __init__(self, reduction: Literal["mean", "sum", "none"] = "mean") -> None:
        super().__init__(LossType.MSELoss, reduction=reduction)

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Return the name of the loss. The target has the type and shape of the scores.

        >>> with onnxblock.base(model) as accessor:
        ...     name = onnxblock.loss.MSELoss()("logits", target_name="wanted")
        >>> [entry.name for entry in accessor.model.graph.input]
        ['x', 'wanted']
        """
        return self._append(loss_input_name, target_name)


class L1Loss(_Loss):
    """Absolute error, ``abs(scores - target)``, with a reduction.

    Args:
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    >>> with onnxblock.base(model) as accessor:
    ...     name = onnxblock.loss.L1Loss(reduction="sum")("logits")
    >>> [node.op_type for node in accessor.model.graph.node][-3:]
    ['Sub', 'Abs', 'ReduceSum']

    """

    def __init__(self, reduction: Literal["mean", "sum", "none"] = "mean") -> None:
        super().__init__(LossType.L1Loss, reduction=reduction)

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Return the name of the loss. The target has the type and shape of the scores.

        >>> with onnxblock.base(model) as accessor:
        ...     name = onnxblock.loss.L1Loss()("logits", target_name="wanted")
        >>> [entry.name for entry in accessor.model.graph.input]
        ['x', 'wanted']
        """
        return self._append(loss_input_name, target_name)


class BCEWithLogitsLoss(_Loss):
    """Binary cross-entropy of the sigmoid of scores: ``-(pos_weight * t * log(p) + (1 - t) * log(1 - p)) * weight``.

    ``t`` is the target, of the type and shape of the scores, and ``p = 1 / (1 + exp(-scores))``.

    Args:
        weight: floats that scale the losses, broadcast to the shape of the losses.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        pos_weight: floats that scale the losses of positive targets, broadcast.

    >>> with onnxblock.base(model) as accessor:
    ...     name = onnxblock.loss.BCEWithLogitsLoss(pos_weight=np.full(10, 9.0))("logits")
    >>> [entry.name for entry in accessor.model.graph.input]
    ['x', 'target']

    """

    def __init__(
        self,
        weight: npt.ArrayLike | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        pos_weight: npt.ArrayLike | None = None,
    ) -> None:
        super().__init__(LossType.BCEWithLogitsLoss, weight=weight, reduction=reduction, pos_weight=pos_weight)

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Return the name of the loss. The target has the type and shape of the scores.

        >>> with onnxblock.base(model) as accessor:
        ...     name = onnxblock.loss.BCEWithLogitsLoss()("logits", target_name="wanted")
        >>> [entry.name for entry in accessor.model.graph.input]
        ['x', 'wanted']
        """
        return self._append(loss_input_name, target_name)


class CrossEntropyLoss(_Loss):
    """Cross-entropy of the softmax of scores along a class axis: ``SoftmaxCrossEntropyLoss`` (ONNX 12 and newer).

    Labels are int64; the scores have a float type.

    Args:
        weight: a float for each class.
        reduction: ``"mean"``, weighted by class, ``"sum"`` or ``"none"``.
        ignore_index: a label to ignore: its elements do not contribute to the loss.
        label_smoothing: the fraction of the target, from 0 to 1, to spread evenly over all classes. Source: Szegedy et
            al., "Rethinking the Inception Architecture for Computer Vision", 2016.
        class_axis: the class axis, -1 for the last axis.

    >>> with onnxblock.base(model) as accessor:
    ...     name = onnxblock.loss.CrossEntropyLoss(weight=np.ones(10))("logits")
    >>> accessor.model.graph.node[-1].op_type
    'SoftmaxCrossEntropyLoss'

    """

    def __init__(
        self,
        weight: npt.ArrayLike | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        class_axis: int = 1,
    ) -> None:
        super().__init__(
            LossType.CrossEntropyLoss,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            class_axis=class_axis,
        )

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Return the name of the loss. Labels have the shape of the scores without the class axis.

        >>> with onnxblock.base(model) as accessor:
        ...     name = onnxblock.loss.CrossEntropyLoss()("logits", labels_name="digit")
        >>> [entry.name for entry in accessor.model.graph.input]
        ['x', 'digit']
        """
        return self._append(scores_input_name, labels_name)


def _declaring(accessor: ModelAccessor, name: str) -> onnx.ModelProto:
    """Return a model that declares the type of a value: a model without nodes if possible, else the edited model."""
    graph = accessor.model.graph
    declared = find([*graph.output, *graph.input, *graph.value_info], name)
    if declared is None or not declared.type.tensor_type.HasField("shape"):
        return accessor.model
    model = onnx.ModelProto(ir_version=accessor.model.ir_version)
    model.opset_import.extend(accessor.model.opset_import)
    model.graph.name = "scores"
    model.graph.input.append(declared)
    return model
