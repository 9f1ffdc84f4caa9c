"""Metric of a function over the whole set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import numpy as np

from ortrain.errors import InvalidArgumentError
from ortrain.metrics._classification import is_positive
from ortrain.metrics._decode import Decoded, Decoder, are_logits, sigmoid, softmax
from ortrain.metrics._metric import Array, Metric, Parts, joined, parts_state, restored_parts

_FORMS = ("outputs", "classes", "probabilities")
# Functions of scikit-learn that take probabilities under the name of classes.
_LIKELIHOODS = ("log_loss", "d2_log_loss_score", "d2_brier_score")


class FunctionMetric(Decoder, Metric):
    """Metric of a function ``(targets, outputs) -> float``, computed once over the whole set.

    The targets and outputs of all batches are held in memory until :meth:`~Metric.reset`. A function with an argument
    ``sample_weight``, as in scikit-learn, gets the weights.

    Args:
        function: the function of two arrays, which have all rows.
        name: the name in ``logs``; by default the name of the function.
        higher_is_better: True if a good value is large, for callbacks with ``mode="auto"``.
        takes: the form of the second array: ``"outputs"`` of the model, ``"classes"``, or ``"probabilities"``. By
            default a function of ``sklearn.metrics`` takes classes if it calls them ``y_pred``, and probabilities if it
            calls them ``y_score`` or ``y_proba``; all other functions, and all regressions, take the outputs.
        task: ``"multiclass"``, ``"binary"`` or ``"multilabel"``; by default it is found by shapes.
        logits: True for scores before a softmax or sigmoid; by default scores that are no probabilities.
        class_axis: the axis of the classes; by default it is found by shapes.
        ignore_index: the label of rows, or tokens, that do not count among classes and probabilities.

    Raises:
        TypeError: if ``function`` cannot be called.
        InvalidArgumentError: for an unknown ``takes``; for weights that the function does not take.

    >>> from ortrain.metrics import FunctionMetric
    >>> def bias(targets, outputs):
    ...     return np.mean(outputs - targets)
    >>> metric = FunctionMetric(bias)
    >>> metric.update(np.array([1.0, 2.0]), np.array([1.5, 2.0]))
    >>> metric.update(np.array([3.0]), np.array([4.0]))
    >>> metric.name, metric.result()
    ('bias', 0.5)

    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        higher_is_better: bool | None = None,
        takes: str | None = None,
        *,
        task: str | None = None,
        logits: bool | None = None,
        class_axis: int | None = None,
        ignore_index: int | None = None,
    ) -> None:
        if not callable(function):
            raise TypeError(f"a metric must be a name, a Metric or a function, got {type(function).__name__}")
        if takes is not None and takes not in _FORMS:
            raise InvalidArgumentError(f"takes must be one of {', '.join(_FORMS)}, got {takes!r}")
        self._function = function
        self.higher_is_better = higher_is_better
        self._set_decoding(task=task, logits=logits, class_axis=class_axis, ignore_index=ignore_index)
        # functools.partial has the function inside.
        inner = getattr(function, "func", function)
        own_name = str(getattr(inner, "__name__", type(inner).__name__))
        try:
            names = list(signature(function).parameters)
        except ValueError:
            # A function of an extension module has no signature.
            names = []
        self.takes_weights = "sample_weight" in names
        self._takes = takes or _convention(inner, own_name, names)
        super().__init__(name or own_name)

    def reset(self) -> None:
        self._parts: Parts = []

    def update(self, targets: Any, outputs: Any, weights: Any = None) -> None:
        targets, outputs = np.array(targets), np.array(outputs)
        if len(targets) != len(outputs):
            raise InvalidArgumentError(f"{self.name}: {len(targets)} targets, but {len(outputs)} outputs")
        if weights is not None and not self.takes_weights:
            raise InvalidArgumentError(
                f"{self.name}: the function has no argument sample_weight, but the rows have weights"
            )
        self._parts.append((targets, outputs, None if weights is None else np.array(weights)))

    def result(self) -> float:
        if not self._parts:
            return float("nan")
        targets, outputs, weights = joined(self._parts)
        self._parts = [(targets, outputs, weights)]
        if self._takes != "outputs" and self._is_classification(targets, outputs):
            targets, outputs, weights = self._decoded(targets, outputs, weights)
        if weights is None:
            return float(self._function(targets, outputs))
        return float(self._function(targets, outputs, sample_weight=weights))

    def _is_classification(self, targets: Array, outputs: Array) -> bool:
        if self.task is not None:
            return True
        if targets.dtype.kind not in "iub":
            return False
        return outputs.ndim > targets.ndim or bool(((targets == 0) | (targets == 1)).all())

    def _decoded(self, targets: Array, outputs: Array, weights: Array | None) -> tuple[Array, Array, Array | None]:
        batch = self._decode(targets, outputs, weights)
        labels = batch.labels if batch.task == "multiclass" else (batch.labels > 0.5).astype(np.int64)
        decided = self._classes(batch) if self._takes == "classes" else self._probabilities(batch)
        return labels, decided, batch.weights

    def _classes(self, batch: Decoded) -> Array:
        if batch.task == "multiclass":
            classes: Array = batch.scores.argmax(1)
            return classes
        return is_positive(batch.scores, None, self.logits).astype(np.int64)

    def _probabilities(self, batch: Decoded) -> Array:
        scores = batch.scores
        logits = are_logits(scores, batch.task) if self.logits is None else self.logits
        if batch.task != "multiclass":
            return sigmoid(scores) if logits else scores
        likely = softmax(scores) if logits else scores
        # Functions for two classes take the probability of the second one.
        return likely[:, 1] if likely.shape[1] == 2 else likely

    def state(self) -> dict[str, Any]:
        return parts_state(self._parts)

    def restore(self, state: Mapping[str, Any]) -> None:
        self._parts = restored_parts(state)


def _convention(function: Any, name: str, names: list[str]) -> str:
    """Return the form that a function takes, by the names that scikit-learn gives to arguments."""
    module = getattr(function, "__module__", None) or ""
    second = names[1] if len(names) > 1 else ""
    if (
        not module.startswith("sklearn.")
        or module.endswith("._regression")
        or second not in ("y_pred", "y_score", "y_proba", "y_prob")
    ):
        return "outputs"
    return "classes" if second == "y_pred" and name not in _LIKELIHOODS else "probabilities"
