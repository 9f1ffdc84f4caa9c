"""Area under the ROC curve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ortrain.errors import InvalidArgumentError
from ortrain.metrics._decode import Decoder, are_logits, check_labels, softmax
from ortrain.metrics._metric import Array, Metric, Parts, joined, parts_state, restored_parts


class AUROC(Decoder, Metric):
    """Area under the ROC curve, exact: no thresholds, ties count half.

    With more than two classes it is the mean of one class against the rest, over the classes that occur. With several
    labels per row it is the mean over the labels. The scores of all rows are held in memory.

    Args:
        name: the name in ``logs``.
        task: ``"multiclass"``, ``"binary"`` or ``"multilabel"``; by default it is found by shapes.
        logits: True for scores before a softmax; by default true if rows do not sum to 1.
        class_axis: the axis of the classes; by default it is found by shapes.
        ignore_index: the label of rows, or tokens, that do not count.

    >>> from ortrain.metrics import AUROC
    >>> auroc = AUROC()
    >>> auroc.update([0, 0, 1], [0.1, 0.4, 0.35])
    >>> auroc.update([1], [0.8])
    >>> auroc.result()
    0.75

    """

    higher_is_better = True

    def __init__(
        self,
        name: str = "auroc",
        *,
        task: str | None = None,
        logits: bool | None = None,
        class_axis: int | None = None,
        ignore_index: int | None = None,
    ) -> None:
        self._set_decoding(task=task, logits=logits, class_axis=class_axis, ignore_index=ignore_index)
        super().__init__(name)

    def reset(self) -> None:
        self._parts: Parts = []
        self._kind: str | None = None

    def update(self, targets: Any, outputs: Any, weights: Any = None) -> None:
        batch = self._decode(targets, outputs, weights)
        if batch.task == "multiclass":
            check_labels(batch.labels, batch.scores.shape[1], self.name)
        if self._kind not in (None, batch.task):
            raise InvalidArgumentError(f"{self.name}: a batch is {batch.task}, but earlier ones are {self._kind}")
        self._kind = batch.task
        # Copies: the caller may use its memory again.
        self._parts.append((np.array(batch.labels), np.array(batch.scores), batch.weights))

    def result(self) -> float:
        if not self._parts:
            return float("nan")
        labels, scores, weights = joined(self._parts)
        self._parts = [(labels, scores, weights)]
        if np.isnan(scores).any():
            return float("nan")
        if self._kind == "multilabel":
            return _mean([area(labels[:, k] > 0.5, scores[:, k], weights) for k in range(scores.shape[1])])
        if self._kind == "binary":
            return area(labels > 0.5, scores, weights)
        logits = are_logits(scores, "multiclass") if self.logits is None else self.logits
        if scores.shape[1] == 2:
            # The softmax rounds; the difference of the logits has the same order.
            ranked = np.subtract(scores[:, 1], scores[:, 0], dtype=np.float64) if logits else scores[:, 1]
            return area(labels == 1, ranked, weights)
        likely = softmax(scores) if logits else scores
        return _mean([area(labels == k, likely[:, k], weights) for k in range(scores.shape[1])])

    def state(self) -> dict[str, Any]:
        return parts_state(self._parts) | {"kind": self._kind}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._parts = restored_parts(state)
        self._kind = state["kind"]


def area(positive: Array, scores: Array, weights: Array | None = None) -> float:
    """Return the area under the ROC curve of one decision; NaN if a side is empty."""
    if not len(scores):
        return float("nan")
    order = np.argsort(scores)
    ranked, is_positive = scores[order], positive[order]
    # Rows of one score form a group. The group ends where the score changes.
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    if weights is None:
        positives, total = np.cumsum(is_positive)[ends].astype(np.float64), (ends + 1).astype(np.float64)
    else:
        heavy = weights[order].astype(np.float64)
        positives, total = np.cumsum(heavy * is_positive)[ends], np.cumsum(heavy)[ends]
    above = np.diff(positives, prepend=0.0)
    below = np.diff(total - positives, prepend=0.0)
    pairs = float(above.sum() * below.sum())
    # A positive beats the negatives with lower scores, and half of the negatives with its own score.
    won = float(above @ (np.cumsum(below) - 0.5 * below))
    return won / pairs if pairs else float("nan")


def _mean(areas: list[float]) -> float:
    """Return the mean over the classes that have targets on both sides."""
    defined = [value for value in areas if not np.isnan(value)]
    return float(np.mean(defined)) if defined else float("nan")
