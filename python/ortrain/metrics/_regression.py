"""Metrics of regressions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ortrain.errors import InvalidArgumentError
from ortrain.metrics._metric import Array, Mean, Metric, spread_weights


def _pair(targets: Any, outputs: Any, name: str) -> tuple[Array, Array]:
    """Return targets and outputs as float64 arrays of one shape; a last axis of size 1 may be missing.

    Raises:
        InvalidArgumentError: if the shapes differ otherwise.

    """
    first, second = np.asarray(targets, np.float64), np.asarray(outputs, np.float64)
    if first.shape != second.shape:
        if first.shape not in ((*second.shape, 1), second.shape[:-1]) or first.size != second.size:
            raise InvalidArgumentError(
                f"{name}: targets have shape {first.shape}, but outputs have shape {second.shape}"
            )
        second = second.reshape(first.shape)
    return first, second


class MeanAbsoluteError(Mean):
    """Mean of the absolute differences, over all elements.

    Args:
        name: the name in ``logs``.

    >>> from ortrain.metrics import MeanAbsoluteError
    >>> error = MeanAbsoluteError()
    >>> error.update([1.0, 2.0], [1.5, 2.0])
    >>> error.result()
    0.25

    """

    higher_is_better = False

    def __init__(self, name: str = "mae") -> None:
        super().__init__(name)

    def update(self, targets: Any, outputs: Any, weights: Any = None) -> None:
        first, second = _pair(targets, outputs, self.name)
        self._add_values(np.abs(first - second), weights)


class MeanSquaredError(Mean):
    """Mean of the squared differences, over all elements.

    Args:
        name: the name in ``logs``.

    >>> from ortrain.metrics import MeanSquaredError
    >>> error = MeanSquaredError()
    >>> error.update([1.0, 2.0], [1.5, 2.0], weights=[1, 3])
    >>> error.result()
    0.0625

    """

    higher_is_better = False

    def __init__(self, name: str = "mse") -> None:
        super().__init__(name)

    def update(self, targets: Any, outputs: Any, weights: Any = None) -> None:
        first, second = _pair(targets, outputs, self.name)
        self._add_values((first - second) ** 2, weights)


class RootMeanSquaredError(MeanSquaredError):
    """Square root of the mean of the squared differences.

    Args:
        name: the name in ``logs``.

    >>> from ortrain.metrics import RootMeanSquaredError
    >>> error = RootMeanSquaredError()
    >>> error.update([1.0, 2.0], [1.5, 2.5])
    >>> error.result()
    0.5

    """

    def __init__(self, name: str = "rmse") -> None:
        super().__init__(name)

    def result(self) -> float:
        return float(np.sqrt(super().result()))


class R2(Metric):
    """Coefficient of determination: 1 for exact outputs, 0 for the mean of the targets as the output.

    With several values per row it is the mean over the values. The variance of the targets is accumulated around their
    mean, so large means lose no digits.

    Args:
        name: the name in ``logs``.

    >>> from ortrain.metrics import R2
    >>> r2 = R2()
    >>> r2.update([1.0, 2.0], [1.0, 2.0])
    >>> r2.update([3.0], [4.0])
    >>> r2.result()
    0.5

    """

    higher_is_better = True

    def __init__(self, name: str = "r2") -> None:
        super().__init__(name)

    def reset(self) -> None:
        self._rows = 0
        self._weight = 0.0
        # Per value: mean of the targets, sum of squared deviations from it, sum of squared errors.
        self._sums: Array | None = None

    def update(self, targets: Any, outputs: Any, weights: Any = None) -> None:
        first, second = _pair(targets, outputs, self.name)
        if not len(first):
            return
        first, second = first.reshape(len(first), -1), second.reshape(len(first), -1)
        spread = spread_weights(np.ones(len(first)) if weights is None else weights, (len(first),))
        weight = float(spread.sum())
        if not weight:
            return
        mean = spread @ first / weight
        sums = np.array([mean, spread @ (first - mean) ** 2, spread @ (first - second) ** 2])
        if self._sums is None:
            self._sums = sums
        elif self._sums.shape != sums.shape:
            raise InvalidArgumentError(
                f"{self.name}: a batch has {sums.shape[1]} values per row, but earlier ones have {self._sums.shape[1]}"
            )
        else:
            # Means and deviations of two sets together (Chan, Golub and LeVeque).
            apart, total = sums[0] - self._sums[0], self._weight + weight
            self._sums = np.array(
                [
                    self._sums[0] + apart * (weight / total),
                    self._sums[1] + sums[1] + apart**2 * (self._weight * weight / total),
                    self._sums[2] + sums[2],
                ]
            )
        self._rows += len(first)
        self._weight += weight

    def result(self) -> float:
        if self._sums is None or self._rows < 2:
            return float("nan")
        _, deviation, error = self._sums
        # Constant targets: 1 for exact outputs, else 0, as in scikit-learn.
        constant = np.where(error == 0, 1.0, np.where(np.isnan(error), np.nan, 0.0))
        share = 1 - np.divide(error, deviation, out=np.zeros_like(error), where=deviation != 0)
        return float(np.where(deviation == 0, constant, share).mean())

    def state(self) -> dict[str, Any]:
        return {
            "rows": self._rows,
            "weight": self._weight,
            "sums": None if self._sums is None else self._sums.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._rows, self._weight = int(state["rows"]), float(state["weight"])
        self._sums = None if state["sums"] is None else np.array(state["sums"], np.float64)
