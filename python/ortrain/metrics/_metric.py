"""Base class of metrics, and the form of a model's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortrain.errors import InvalidArgumentError

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class OutputForm:
    """Form of a model's outputs, which a metric needs to read them.

    ``Model`` knows it from the loss. A metric that is used alone takes it as arguments, or recognises it by shapes.

    >>> from ortrain.metrics import OutputForm, get
    >>> accuracy = get("accuracy", OutputForm(logits=True))
    >>> accuracy.update([1, 0], [[2.5], [-0.5]])
    >>> accuracy.result()
    1.0
    """

    logits: bool | None = None
    """True for scores before a softmax or sigmoid, false for probabilities, ``None`` if unknown."""
    class_axis: int | None = None
    """Axis of the classes in scores; by default it is found by shapes."""
    task: str | None = None
    """``"multiclass"``, ``"binary"`` or ``"multilabel"``; by default it is found by shapes."""
    ignore_index: int | None = None
    """Label of rows, or tokens, that do not count."""


class Metric:
    """Base class of metrics: numbers that are accumulated over batches.

    Batches of any sizes have the result of one large batch. Weights are one per row; a row with weight 2 counts as two
    rows.

    Args:
        name: the name in ``logs`` and in the history.

    >>> from ortrain.metrics import Metric
    >>> class LargestError(Metric):
    ...     higher_is_better = False
    ...     largest = 0.0
    ...
    ...     def update(self, targets, outputs, weights=None):
    ...         self.largest = max(self.largest, float(np.abs(targets - outputs).max()))
    ...
    ...     def result(self):
    ...         return self.largest
    ...
    ...     def reset(self):
    ...         self.largest = 0.0
    ...
    ...     def state(self):
    ...         return {"largest": self.largest}
    ...
    ...     def restore(self, state):
    ...         self.largest = state["largest"]
    >>> metric = LargestError("largest_error")
    >>> metric.update(np.zeros(3), np.array([0.5, -2.0, 1.0]))
    >>> metric.result()
    2.0

    """

    name: str
    """Name in ``logs`` and in the history."""
    higher_is_better: bool | None = None
    """True if a good value is large, false if it is small, ``None`` if unknown."""
    takes_weights: bool = True
    """True if rows may have weights."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"

    def update(self, targets: Any, outputs: Any, weights: Any = None) -> None:
        """Add a batch.

        Args:
            targets: the labels or values, with a first axis of rows.
            outputs: the outputs of the model for these rows.
            weights: one weight per row.

        Raises:
            InvalidArgumentError: if the shapes do not fit.

        >>> from ortrain.metrics import Accuracy
        >>> accuracy = Accuracy()
        >>> accuracy.update([0, 1], [[0.75, 0.25], [0.5, 0.25]])
        >>> accuracy.result()
        0.5

        """
        raise NotImplementedError(f"{type(self).__name__} has no method update")

    def result(self) -> float:
        """Return the value over all batches since :meth:`reset`; NaN without rows.

        >>> from ortrain.metrics import Accuracy
        >>> Accuracy().result()
        nan
        """
        raise NotImplementedError(f"{type(self).__name__} has no method result")

    def reset(self) -> None:
        """Forget all batches.

        >>> from ortrain.metrics import Accuracy
        >>> accuracy = Accuracy()
        >>> accuracy.update([0], [[0.75, 0.25]])
        >>> accuracy.reset()
        >>> accuracy.result()
        nan
        """

    def state(self) -> dict[str, Any]:
        """Return the accumulated values: numbers, lists and NumPy arrays.

        >>> from ortrain.metrics import Accuracy
        >>> accuracy = Accuracy()
        >>> accuracy.update([0, 1], [[0.75, 0.25], [0.5, 0.25]])
        >>> accuracy.state()
        {'total': 1.0, 'weight': 2.0}
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the values that :meth:`state` returned.

        >>> from ortrain.metrics import Accuracy
        >>> accuracy = Accuracy()
        >>> accuracy.restore({"total": 1.0, "weight": 2.0})
        >>> accuracy.result()
        0.5
        """

    def configure(self, form: OutputForm) -> None:
        """Set the arguments that the metric was made without.

        >>> from ortrain.metrics import OutputForm, Perplexity
        >>> perplexity = Perplexity()
        >>> perplexity.configure(OutputForm(ignore_index=-100))
        >>> perplexity.ignore_index
        -100
        """
        for field in ("logits", "class_axis", "task", "ignore_index"):
            if getattr(self, field, 0) is None:
                setattr(self, field, getattr(form, field))


class Mean(Metric):
    """Base class of metrics that are weighted means over rows: a total and the sum of the weights."""

    def reset(self) -> None:
        self._total = 0.0
        self._weight = 0.0

    def _add(self, total: float, weight: float) -> None:
        self._total += total
        self._weight += weight

    def _add_values(self, values: Array, weights: Array | None) -> None:
        """Add a value per element; weights are per row, or per element."""
        if weights is None:
            self._add(float(values.sum(dtype=np.float64)), values.size)
        else:
            spread = spread_weights(weights, values.shape)
            self._add(float((values * spread).sum(dtype=np.float64)), float(spread.sum(dtype=np.float64)))

    def result(self) -> float:
        return self._total / self._weight if self._weight else float("nan")

    def state(self) -> dict[str, Any]:
        return {"total": float(self._total), "weight": float(self._weight)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._total, self._weight = float(state["total"]), float(state["weight"])


Parts: TypeAlias = list[tuple[Array, Array, Array | None]]


def joined(parts: Parts) -> tuple[Array, Array, Array | None]:
    """Return all targets, all outputs, and all weights; ``None`` if no batch has weights."""
    targets = np.concatenate([part[0] for part in parts])
    outputs = np.concatenate([part[1] for part in parts])
    if all(part[2] is None for part in parts):
        return targets, outputs, None
    ones = [np.ones(len(part[0]), np.float32) if part[2] is None else part[2] for part in parts]
    return targets, outputs, np.concatenate(ones)


def parts_state(parts: Parts) -> dict[str, Any]:
    """Return batches as a state of arrays."""
    if not parts:
        return {}
    targets, outputs, weights = joined(parts)
    return {"targets": targets, "outputs": outputs} | ({} if weights is None else {"weights": weights})


def restored_parts(state: Mapping[str, Any]) -> Parts:
    """Return the batches of a state."""
    if "targets" not in state:
        return []
    weights = state.get("weights")
    return [
        (np.asarray(state["targets"]), np.asarray(state["outputs"]), None if weights is None else np.asarray(weights))
    ]


def spread_weights(weights: Any, shape: tuple[int, ...]) -> Array:
    """Return weights of rows as weights of elements of a shape.

    Raises:
        InvalidArgumentError: if the weights are neither one per row nor one per element.

    """
    weights = np.asarray(weights, np.float64)
    if weights.shape != shape[: weights.ndim]:
        raise InvalidArgumentError(f"weights have shape {weights.shape}, but the rows have shape {shape}")
    return np.broadcast_to(weights.reshape(weights.shape + (1,) * (len(shape) - weights.ndim)), shape)
