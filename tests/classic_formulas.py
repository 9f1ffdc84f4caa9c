"""The optimizers of the classic TrainingSession in NumPy and float64, and gradients of a linear regression.

Needs NumPy and the requirements of ``optimizer_formulas``. Attributes and rates are rounded to float32, as in ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from optimizer_formulas import Array, norm

MOMENTS = {"alpha": 0.9, "beta": 0.999, "lambda": 0.0, "max_norm_clip": 1.0}
DEFAULTS: dict[str, dict[str, float]] = {
    "SGDOptimizer": {},
    "AdamOptimizer": MOMENTS | {"epsilon": 1e-8, "do_bias_correction": 1, "weight_decay_mode": 0},
    "LambOptimizer": MOMENTS
    | {"epsilon": 1e-6, "do_bias_correction": 0, "ratio_min": -math.inf, "ratio_max": math.inf},
}
# Largest finite float32. A larger second moment overflows.
LARGEST = float(np.finfo(np.float32).max)


@dataclass
class Formulas:
    """Weights under one of the optimizers, each with its own attributes. The gradients are arguments of every step.

    Args:
        optimizer: ``SGDOptimizer``, ``AdamOptimizer`` or ``LambOptimizer``.
        weights: the weights at the start.
        attributes: floats and integers by weight; missing attributes have their default.
        clipping: True if gradients are clipped by their norm. SGD never clips.
    """

    optimizer: str
    weights: dict[str, npt.NDArray[Any]]
    attributes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    clipping: bool = True
    count: int = 1
    first: dict[str, Array] = field(default_factory=dict)
    second: dict[str, Array] = field(default_factory=dict)
    settings: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = {name: np.asarray(w, np.float64) for name, w in self.weights.items()}
        for name, w in self.weights.items():
            given = DEFAULTS[self.optimizer] | dict(self.attributes.get(name, {}))
            self.settings[name] = {setting: float(np.float32(value)) for setting, value in given.items()}
            if self.optimizer != "SGDOptimizer":
                self.first[name], self.second[name] = np.zeros_like(w), np.zeros_like(w)

    def step(
        self, gradients: Mapping[str, Any], rate: float, *, scale: float = 1.0, update_signal: bool = True
    ) -> float:
        """Update the weights by gradients that a loss scale has multiplied, and return the norm of these gradients.

        Nothing changes if ``update_signal`` is false.
        """
        wide = {name: np.asarray(gradients[name], np.float64) for name in self.weights}
        total = math.sqrt(sum(norm(g) ** 2 for g in wide.values()))
        if not update_signal:
            return total
        rate = float(np.float32(rate))
        update = {"SGDOptimizer": self._sgd, "AdamOptimizer": self._adam, "LambOptimizer": self._lamb}[self.optimizer]
        with np.errstate(all="ignore"):
            for name, g in wide.items():
                self.weights[name] = np.asarray(update(name, g / self._divisor(name, total, scale), rate))
        self.count += 1
        return total

    def _divisor(self, name: str, total: float, scale: float) -> float:
        """Return the divisor of a gradient: the loss scale, or the divisor that also clips the norm."""
        if self.optimizer == "SGDOptimizer":
            return scale
        most = self.settings[name]["max_norm_clip"]
        return total / most if self.clipping and total > scale * most else scale

    def _moments(self, name: str, g: Array) -> tuple[Array, Array, float, float]:
        """Return both moments after a step, and their divisors for the bias correction."""
        own = self.settings[name]
        first = own["alpha"] * self.first[name] + (1 - own["alpha"]) * g
        second = own["beta"] * self.second[name] + (1 - own["beta"]) * g**2
        if not own["do_bias_correction"]:
            return first, second, 1.0, 1.0
        return first, second, 1 - own["alpha"] ** self.count, 1 - own["beta"] ** self.count

    def _sgd(self, name: str, g: Array, rate: float) -> Array:
        return self.weights[name] - rate * g

    def _adam(self, name: str, g: Array, rate: float) -> Array:
        own, w = self.settings[name], self.weights[name]
        first, second, c1, c2 = self._moments(name, g)
        self.first[name], self.second[name] = first, second
        if own["weight_decay_mode"] == 0:
            return w - rate * (first / c1 / (np.sqrt(second / c2) + own["epsilon"]) + own["lambda"] * w)
        moved = w - rate * math.sqrt(c2) / c1 * first / (np.sqrt(second) + own["epsilon"])
        return np.asarray(moved - rate * own["lambda"] * moved)

    def _lamb(self, name: str, g: Array, rate: float) -> Array:
        own, w = self.settings[name], self.weights[name]
        first, second, c1, c2 = self._moments(name, g)
        direction = own["lambda"] * w + first / c1 / (np.sqrt(second / c2) + own["epsilon"])
        usable = np.isfinite(direction) & (second <= LARGEST)
        direction = np.where(usable, direction, 0.0)
        self.first[name] = np.where(usable, first, self.first[name])
        self.second[name] = np.where(usable, second, self.second[name])
        ratio = 1.0
        if norm(w) != 0 and norm(direction) != 0:
            ratio = max(own["ratio_min"], min(own["ratio_max"], norm(w) / norm(direction)))
        moved = w - rate * ratio * direction
        return np.where(np.abs(moved) <= LARGEST, moved, w)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return the state in the format of ``get_state``, in float64."""
        values: dict[str, npt.NDArray[Any]] = dict(self.weights)
        for name in self.first:
            values |= {f"Moment_1_{name}": self.first[name], f"Moment_2_{name}": self.second[name]}
        count = np.array([self.count], np.int64)
        if self.optimizer == "AdamOptimizer":
            values |= {f"Update_Count_{name}": count for name in self.weights}
        elif self.optimizer == "LambOptimizer":
            values["Step"] = count
        return values


def squared_errors(weights: Mapping[str, Any], feeds: Mapping[str, Any]) -> tuple[float, dict[str, Array]]:
    """Return the loss of ``classic_models.regression`` and its gradients."""
    x, label, w, b = (
        np.asarray(value, np.float64) for value in (feeds["X"], feeds["label"], weights["W"], weights["b"])
    )
    error = x @ w + b - label
    share = 2 * error / error.size
    return float((error**2).mean()), {"W": x.T @ share, "b": share.sum(axis=0)}
