"""Targets and outputs of classifiers, brought to one form."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ortrain.errors import InvalidArgumentError
from ortrain.metrics._metric import Array, spread_weights


class Decoded(NamedTuple):
    """Batch of a classifier, with one row per decision.

    A multi-class batch has scores ``[rows, classes]`` and labels ``[rows]``. Other batches have scores and labels of
    one shape: ``[rows]`` for a binary one, ``[rows, labels]`` for several labels.
    """

    task: str
    labels: Array
    scores: Array
    weights: Array | None


class Decoder:
    """Part of a metric that reads classes and scores: the settings of :func:`decode`."""

    name: str

    def _set_decoding(
        self,
        *,
        task: str | None = None,
        logits: bool | None = None,
        class_axis: int | None = None,
        ignore_index: int | None = None,
    ) -> None:
        self.task = task
        self.logits = logits
        self.class_axis = class_axis
        self.ignore_index = ignore_index

    def _decode(self, targets: Any, outputs: Any, weights: Any) -> Decoded:
        return decode(
            targets,
            outputs,
            weights,
            name=self.name,
            task=self.task,
            class_axis=self.class_axis,
            ignore_index=self.ignore_index,
        )

    def _decode_classes(self, targets: Any, outputs: Any, weights: Any) -> Decoded:
        """Return a batch with one score per class.

        Raises:
            InvalidArgumentError: for other scores, and for labels that are no classes.

        """
        batch = self._decode(targets, outputs, weights)
        if batch.task != "multiclass":
            raise InvalidArgumentError(f"{self.name} needs one score per class, got shape {np.shape(outputs)}")
        check_labels(batch.labels, batch.scores.shape[1], self.name)
        return batch


def decode(
    targets: Any,
    outputs: Any,
    weights: Any = None,
    *,
    name: str,
    task: str | None = None,
    class_axis: int | None = None,
    ignore_index: int | None = None,
) -> Decoded:
    """Recognise the kind of a batch by its shapes, and bring it to one form.

    Raises:
        InvalidArgumentError: if the shapes do not fit, or leave the axis of the classes open.

    """
    labels, scores = np.asarray(targets), np.asarray(outputs)
    if labels.ndim == 0 or scores.ndim == 0:
        raise InvalidArgumentError(f"{name}: targets and outputs need a first axis of rows")
    if task == "multiclass" and labels.shape == scores.shape and labels.ndim > 1:
        # One-hot labels, or soft ones from mixup.
        labels = labels.argmax(-1 if class_axis is None else class_axis)
    elif labels.ndim == scores.ndim and labels.shape[-1] == 1 and scores.shape[-1] > 1:
        # Labels as a column.
        labels = labels[..., 0]
    if labels.shape == scores.shape or (*labels.shape, 1) == scores.shape or labels.shape == (*scores.shape, 1):
        return _decode_labels(labels, scores, weights, task)
    if labels.ndim + 1 != scores.ndim:
        raise InvalidArgumentError(f"{name}: targets have shape {labels.shape}, but outputs have shape {scores.shape}")
    axis = _class_axis(labels.shape, scores.shape, class_axis, name)
    scores = np.moveaxis(scores, axis, -1)
    if weights is not None:
        weights = spread_weights(weights, labels.shape).reshape(-1)
    labels = labels.reshape(-1)
    scores = scores.reshape(-1, scores.shape[-1])
    if labels.dtype.kind == "f":
        labels = labels.astype(np.int64)
    if ignore_index is not None:
        counted = labels != ignore_index
        if not counted.all():
            labels, scores = labels[counted], scores[counted]
            weights = None if weights is None else weights[counted]
    return Decoded("multiclass", labels, scores, weights)


def _decode_labels(labels: Array, scores: Array, weights: Any, task: str | None) -> Decoded:
    rows = len(labels)
    if math.prod(labels.shape[1:]) == 1 or task == "binary":
        weights = None if weights is None else spread_weights(weights, labels.shape).reshape(-1)
        return Decoded("binary", labels.reshape(-1), scores.reshape(-1), weights)
    width = labels.shape[-1]
    decisions = labels.size // max(width, 1)
    labels, scores = labels.reshape(decisions, width), scores.reshape(decisions, width)
    if weights is not None and decisions:
        weights = np.repeat(np.asarray(weights, np.float64), decisions // rows)
    return Decoded("multilabel", labels, scores, weights)


def _class_axis(labels: tuple[int, ...], scores: tuple[int, ...], axis: int | None, name: str) -> int:
    """Return the axis of the classes: the axis of the scores that the labels do not have."""
    last, second = scores[:-1] == labels, scores[:1] + scores[2:] == labels
    if axis is not None:
        if scores[:axis] + scores[axis:][1:] == labels if axis >= 0 else last:
            return axis
    elif last and second and len(scores) > 2:
        raise InvalidArgumentError(
            f"{name}: the classes may be axis 1 or the last axis of outputs with shape {scores}; set class_axis"
        )
    elif last or second:
        return -1 if last else 1
    raise InvalidArgumentError(f"{name}: targets have shape {labels}, but outputs have shape {scores}")


def check_labels(labels: Array, classes: int, name: str) -> None:
    """Check that labels are classes.

    Raises:
        InvalidArgumentError: for another label.

    """
    if labels.size and (labels.min() < 0 or labels.max() >= classes):
        wrong = labels[(labels < 0) | (labels >= classes)][0]
        raise InvalidArgumentError(f"{name}: the label {wrong} is not one of the {classes} classes")


def softmax(scores: Array) -> Array:
    """Return the softmax over the last axis, as float64."""
    shifted: Array = scores.astype(np.float64) - scores.max(-1, keepdims=True)
    np.exp(shifted, out=shifted)
    shifted /= shifted.sum(-1, keepdims=True)
    return shifted


def sigmoid(scores: Array) -> Array:
    """Return the sigmoid, as float64."""
    # The exponential of a large number overflows.
    small: Array = np.exp(-np.abs(scores.astype(np.float64)))
    result: Array = np.where(scores >= 0, 1, small) / (1 + small)
    return result


def are_logits(scores: Array, task: str) -> bool:
    """Returns true if scores cannot be probabilities: outside 0 to 1, or, for classes, without the sum 1."""
    if (scores < 0).any() or (scores > 1).any():
        return True
    return task == "multiclass" and bool((np.abs(scores.sum(1, dtype=np.float64) - 1) > 1e-3).any())


def log_softmax_at(scores: Array, labels: Array) -> Array:
    """Return the logarithm of the softmax over the last axis, at one label per row, as float64."""
    top = scores.max(-1, keepdims=True)
    total = np.exp(scores - top, dtype=np.float64).sum(-1)
    picked = np.take_along_axis(scores, labels[:, None], 1)[:, 0]
    result: Array = picked.astype(np.float64) - top[:, 0] - np.log(total)
    return result
