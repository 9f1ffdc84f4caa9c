"""Metrics of classifiers that count decisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ortrain.errors import InvalidArgumentError
from ortrain.metrics._decode import Decoded, Decoder, check_labels
from ortrain.metrics._metric import Array, Mean, Metric, spread_weights

AVERAGES = ("auto", "binary", "macro", "micro", "weighted")


class Accuracy(Decoder, Mean):
    """Share of right decisions.

    Targets are class indices ``[rows]`` for scores ``[rows, classes]``, also for sequences (``[rows, length, classes]``
    or ``[rows, classes, length]``); or zeros and ones of the shape of the outputs, of which each counts.

    Args:
        name: the name in ``logs``.
        threshold: the score above which a binary decision is positive; by default 0.5, and 0 for logits.
        task: ``"multiclass"``, ``"binary"`` or ``"multilabel"``; by default it is found by shapes.
        logits: True for scores before a sigmoid.
        class_axis: the axis of the classes; by default it is found by shapes.
        ignore_index: the label of rows, or tokens, that do not count.

    >>> from ortrain.metrics import Accuracy
    >>> accuracy = Accuracy()
    >>> accuracy.update([2, 0], [[0.1, 0.2, 0.7], [0.3, 0.6, 0.1]])
    >>> accuracy.update([1], [[0.1, 0.8, 0.1]], weights=[2])
    >>> accuracy.result()
    0.75

    """

    higher_is_better = True

    def __init__(
        self,
        name: str = "accuracy",
        *,
        threshold: float | None = None,
        task: str | None = None,
        logits: bool | None = None,
        class_axis: int | None = None,
        ignore_index: int | None = None,
    ) -> None:
        self.threshold = threshold
        self._set_decoding(task=task, logits=logits, class_axis=class_axis, ignore_index=ignore_index)
        super().__init__(name)

    def update(self, targets: Any, outputs: Any, weights: Any = None) -> None:
        if weights is None and self.ignore_index is None and _are_rows_of_scores(targets, outputs):
            # The usual case, apart: a training calls it at each step.
            self._add(int(np.count_nonzero(outputs.argmax(1) == targets)), len(targets))
            return
        batch = self._decode(targets, outputs, weights)
        if batch.task == "multiclass":
            hits = batch.scores.argmax(1) == batch.labels
        else:
            hits = is_positive(batch.scores, self.threshold, self.logits) == (batch.labels > 0.5)
        if batch.weights is None:
            self._add(int(np.count_nonzero(hits)), hits.size)
        else:
            spread = spread_weights(batch.weights, hits.shape)
            self._add(float(spread[hits].sum()), float(spread.sum()))


def _are_rows_of_scores(targets: Any, outputs: Any) -> bool:
    """Returns true for arrays of one label per row and several scores per row."""
    return (
        type(targets) is type(outputs) is np.ndarray
        and targets.ndim == 1
        and outputs.ndim == 2
        and outputs.shape[1] > 1
        and len(targets) == len(outputs)
    )


class TopK(Decoder, Mean):
    """Share of rows where the right class is among the ``k`` classes with the highest scores.

    A class with the score of the k-th one counts as among them. Rows with NaN count as wrong.

    Args:
        k: the number of classes.
        name: the name in ``logs``; by default ``top`` and ``k``.
        class_axis: the axis of the classes; by default it is found by shapes.
        ignore_index: the label of rows, or tokens, that do not count.

    Raises:
        InvalidArgumentError: if ``k`` is below 1; at an update, for labels that are no classes.

    >>> from ortrain.metrics import TopK
    >>> top = TopK(2)
    >>> top.update([0, 2], [[0.3, 0.5, 0.2], [0.3, 0.5, 0.2]])
    >>> top.name, top.result()
    ('top2', 0.5)

    """

    higher_is_better = True

    def __init__(
        self, k: int = 5, name: str | None = None, *, class_axis: int | None = None, ignore_index: int | None = None
    ) -> None:
        if k < 1:
            raise InvalidArgumentError(f"k must be at least 1, got {k}")
        self.k = k
        self._set_decoding(task="multiclass", class_axis=class_axis, ignore_index=ignore_index)
        super().__init__(name or f"top{k}")

    def update(self, targets: Any, outputs: Any, weights: Any = None) -> None:
        batch = self._decode_classes(targets, outputs, weights)
        own = np.take_along_axis(batch.scores, batch.labels[:, None].astype(np.int64), 1)
        hits = ((batch.scores > own).sum(1) < self.k) & ~np.isnan(batch.scores).any(1)
        self._add_values(hits, batch.weights)


class Counts(Decoder, Metric):
    """Base class of metrics of true positives, predictions and targets per class.

    Args:
        name: the name in ``logs``.
        average: ``"binary"`` for class 1 of two; ``"macro"`` for the mean over the classes that occur; ``"micro"`` for
            all decisions together; ``"weighted"`` for the mean by the number of targets; ``"auto"`` for ``"binary"``
            with two classes and ``"macro"`` with more.
        threshold: the score above which a binary decision is positive; by default 0.5, and 0 for logits.
        task: ``"multiclass"``, ``"binary"`` or ``"multilabel"``; by default it is found by shapes.
        logits: True for scores before a sigmoid.
        class_axis: the axis of the classes; by default it is found by shapes.
        ignore_index: the label of rows, or tokens, that do not count.

    """

    higher_is_better = True
    _default_name = ""

    def __init__(
        self,
        name: str | None = None,
        average: str = "auto",
        *,
        threshold: float | None = None,
        task: str | None = None,
        logits: bool | None = None,
        class_axis: int | None = None,
        ignore_index: int | None = None,
    ) -> None:
        if average not in AVERAGES:
            raise InvalidArgumentError(f"average must be one of {', '.join(AVERAGES)}, got {average!r}")
        self.average = average
        self.threshold = threshold
        self._set_decoding(task=task, logits=logits, class_axis=class_axis, ignore_index=ignore_index)
        super().__init__(name or self._default_name)

    def reset(self) -> None:
        # Rows: true positives, predictions, targets; columns: classes.
        self._counts = np.zeros((3, 0))
        self._is_multilabel = False

    def update(self, targets: Any, outputs: Any, weights: Any = None) -> None:
        batch = self._decode(targets, outputs, weights)
        counts = self._multilabel(batch) if batch.task == "multilabel" else self._classes(batch)
        if self._counts.shape[1] == 0:
            self._counts = counts
            self._is_multilabel = batch.task == "multilabel"
        elif self._counts.shape != counts.shape:
            raise InvalidArgumentError(
                f"{self.name}: a batch has {counts.shape[1]} classes, but earlier ones have {self._counts.shape[1]}"
            )
        else:
            self._counts = self._counts + counts

    def _classes(self, batch: Decoded) -> Array:
        if batch.task == "multiclass":
            classes, labels, predicted = batch.scores.shape[1], batch.labels, batch.scores.argmax(1)
            check_labels(labels, classes, self.name)
        else:
            classes, labels = 2, (batch.labels > 0.5).astype(np.int64)
            predicted = is_positive(batch.scores, self.threshold, self.logits).astype(np.int64)
        labels = labels.astype(np.int64, copy=False)
        hits = labels == predicted
        weights = batch.weights
        return np.array(
            [
                np.bincount(labels[hits], None if weights is None else weights[hits], classes),
                np.bincount(predicted, weights, classes),
                np.bincount(labels, weights, classes),
            ],
            np.float64,
        )

    def _multilabel(self, batch: Decoded) -> Array:
        labels = batch.labels > 0.5
        predicted = is_positive(batch.scores, self.threshold, self.logits)
        weights = np.ones(len(labels)) if batch.weights is None else batch.weights
        return np.array([weights @ (labels & predicted), weights @ predicted, weights @ labels])

    def result(self) -> float:
        if self._counts.shape[1] == 0:
            return float("nan")
        average = self.average
        if average == "auto":
            average = "binary" if self._counts.shape[1] == 2 and not self._is_multilabel else "macro"
        if average == "binary" and (self._counts.shape[1] != 2 or self._is_multilabel):
            raise InvalidArgumentError(
                f"{self.name} with average='binary' needs two classes; use 'macro', 'micro' or 'weighted'"
            )
        if average == "micro":
            return float(self._score(self._counts.sum(1, keepdims=True))[0])
        scores = self._score(self._counts)
        if average == "binary":
            return float(scores[1])
        if average == "weighted":
            support = self._counts[2]
            return float(scores @ support / support.sum()) if support.sum() else 0.0
        # Classes that neither targets nor predictions have say nothing, unless each label is a decision of its own.
        occurs = np.ones(len(scores), bool) if self._is_multilabel else self._counts[1:].any(0)
        return float(scores[occurs].mean()) if occurs.any() else float("nan")

    def _score(self, counts: Array) -> Array:
        """Return the score per class from true positives, predictions and targets."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        return {"counts": self._counts.tolist(), "is_multilabel": self._is_multilabel}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._counts = np.array(state["counts"], np.float64).reshape(3, -1)
        self._is_multilabel = bool(state["is_multilabel"])


class Precision(Counts):
    """Share of right decisions among the predictions of a class.

    Args:
        name: the name in ``logs``.
        average: ``"binary"`` for class 1 of two; ``"macro"`` for the mean over the classes that occur; ``"micro"`` for
            all decisions together; ``"weighted"`` for the mean by the number of targets; ``"auto"`` for ``"binary"``
            with two classes and ``"macro"`` with more.
        settings: ``threshold``, ``task``, ``logits``, ``class_axis`` and ``ignore_index`` of :class:`Accuracy`.

    Raises:
        InvalidArgumentError: for an unknown average; at an update, for labels that are no classes.

    >>> from ortrain.metrics import Precision
    >>> precision = Precision()
    >>> precision.update([1, 0, 1, 0], [0.9, 0.8, 0.2, 0.1])
    >>> precision.result()
    0.5

    """

    _default_name = "precision"

    def _score(self, counts: Array) -> Array:
        return _share(counts[0], counts[1])


class Recall(Counts):
    """Share of right decisions among the targets of a class.

    Args:
        name: the name in ``logs``.
        average: the mean over classes, as for :class:`Precision`.
        settings: ``threshold``, ``task``, ``logits``, ``class_axis`` and ``ignore_index`` of :class:`Accuracy`.

    Raises:
        InvalidArgumentError: for an unknown average; at an update, for labels that are no classes.

    >>> from ortrain.metrics import Recall
    >>> recall = Recall(average="macro")
    >>> recall.update([1, 1, 1, 0], [0.9, 0.8, 0.2, 0.1], weights=[1, 1, 2, 1])
    >>> recall.result()
    0.75

    """

    _default_name = "recall"

    def _score(self, counts: Array) -> Array:
        return _share(counts[0], counts[2])


class F1(Counts):
    """Harmonic mean of precision and recall.

    Args:
        name: the name in ``logs``.
        average: the mean over classes, as for :class:`Precision`.
        settings: ``threshold``, ``task``, ``logits``, ``class_axis`` and ``ignore_index`` of :class:`Accuracy`.

    Raises:
        InvalidArgumentError: for an unknown average; at an update, for labels that are no classes.

    >>> from ortrain.metrics import F1
    >>> f1 = F1(average="micro")
    >>> f1.update([0, 1, 2, 2], [[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.6, 0.2, 0.2]])
    >>> f1.result()
    0.75

    """

    _default_name = "f1"

    def _score(self, counts: Array) -> Array:
        return _share(2 * counts[0], counts[1] + counts[2])


def _share(part: Array, whole: Array) -> Array:
    """Return the quotient, or zero where the whole is zero."""
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def is_positive(scores: Array, threshold: float | None, logits: bool | None) -> Array:
    """Return the binary decisions of scores."""
    positive: Array = scores > ((0.0 if logits else 0.5) if threshold is None else threshold)
    return positive
