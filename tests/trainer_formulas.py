"""A plain float64 trainer in NumPy: gradients with a tape, schedules and optimizers as formulas.

Needs NumPy and the dependencies of ``classic_formulas``, but not ortrain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from classic_formulas import Formulas

Array = npt.NDArray[np.float64]


# Gradients.


class Var:
    """A value with its operands, and the functions for their gradients."""

    def __init__(self, value: npt.ArrayLike, *parts: tuple[Var, Callable[[Array], Array]]) -> None:
        self.value = np.asarray(value, np.float64)
        self.parts = parts
        self.grad: Array = np.zeros_like(self.value)

    def backward(self) -> None:
        """Propagate the gradient of this number to all values that it depends on."""
        order: list[Var] = []
        seen: set[int] = set()

        def visit(var: Var) -> None:
            if id(var) not in seen:
                seen.add(id(var))
                for part, _ in var.parts:
                    visit(part)
                order.append(var)

        visit(self)
        self.grad = np.ones_like(self.value)
        for var in reversed(order):
            for part, back in var.parts:
                part.grad = part.grad + back(var.grad)

    def __add__(self, other: Var) -> Var:
        return Var(
            self.value + other.value,
            (self, lambda g: summed_to(g, self.value.shape)),
            (other, lambda g: summed_to(g, other.value.shape)),
        )

    def __mul__(self, other: Var) -> Var:
        return Var(
            self.value * other.value,
            (self, lambda g: summed_to(g * other.value, self.value.shape)),
            (other, lambda g: summed_to(g * self.value, other.value.shape)),
        )

    def __matmul__(self, other: Var) -> Var:
        return Var(
            self.value @ other.value,
            (self, lambda g: summed_to(g @ other.value.swapaxes(-1, -2), self.value.shape)),
            (other, lambda g: summed_to(self.value.swapaxes(-1, -2) @ g, other.value.shape)),
        )


def summed_to(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Sum a gradient over broadcast axes to the original shape."""
    gradient = gradient.sum(axis=tuple(range(gradient.ndim - len(shape))))
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and gradient.shape[axis] != 1)
    return np.asarray(gradient.sum(axis=axes, keepdims=True) if axes else gradient)


def relu(x: Var) -> Var:
    return Var(np.maximum(x.value, 0), (x, lambda g: g * (x.value > 0)))


def transposed(x: Var) -> Var:
    """Exchange the last two axes."""
    return Var(x.value.swapaxes(-1, -2), (x, lambda g: g.swapaxes(-1, -2)))


def softmax(x: Var) -> Var:
    e = np.exp(x.value - x.value.max(axis=-1, keepdims=True))
    y = e / e.sum(axis=-1, keepdims=True)
    return Var(y, (x, lambda g: y * (g - (g * y).sum(axis=-1, keepdims=True))))


def mean(x: Var, axis: int) -> Var:
    size = x.value.shape[axis]
    return Var(x.value.mean(axis=axis), (x, lambda g: np.repeat(np.expand_dims(g, axis), size, axis) / size))


def normalized(x: Var, weight: Var, bias: Var, epsilon: float = 1e-5) -> Var:
    """Apply LayerNormalization over the last axis."""
    centred = x.value - x.value.mean(axis=-1, keepdims=True)
    scale = 1 / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon)
    y = centred * scale

    def back(g: Array) -> Array:
        return np.asarray(
            scale * (g - g.mean(axis=-1, keepdims=True) - y * (g * y).mean(axis=-1, keepdims=True)), np.float64
        )

    return Var(y, (x, back)) * weight + bias


def cross_entropy(scores: Var, labels: npt.NDArray[Any]) -> Var:
    """Return the mean of the softmax cross-entropies of rows."""
    rows = np.arange(len(labels))
    shifted = scores.value - scores.value.max(axis=-1, keepdims=True)
    log_prob = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))

    def back(g: Array) -> Array:
        share = np.exp(log_prob)
        share[rows, labels] -= 1
        return np.asarray(g * share / len(labels), np.float64)

    return Var(-log_prob[rows, labels].mean(), (scores, back))


# Models.


def perceptron(w: Mapping[str, Var], feeds: Mapping[str, Any]) -> Var:
    """Compute the loss of ``classic_models.classifier``."""
    h = relu(Var(feeds["x"]) @ w["fc1.w"] + w["fc1.b"])
    return cross_entropy(h @ w["fc2.w"] + w["fc2.b"], feeds["labels"])


def block(w: Mapping[str, Var], feeds: Mapping[str, Any]) -> Var:
    """Compute the loss of ``trainer_nets.block``."""
    x = Var(feeds["x"])
    width = x.value.shape[-1]
    query, value = x @ w["query.w"] + w["query.b"], x @ w["value.w"] + w["value.b"]
    scores = query @ transposed(x @ w["key.w"]) * Var(width**-0.5)
    h = x + (softmax(scores) @ value @ w["out.w"] + w["out.b"])
    h = normalized(h, w["norm1.w"], w["norm1.b"])
    h = h + (relu(h @ w["up.w"] + w["up.b"]) @ w["down.w"] + w["down.b"])
    pooled = mean(normalized(h, w["norm2.w"], w["norm2.b"]), 1)
    return cross_entropy(pooled @ w["head.w"] + w["head.b"], feeds["labels"])


Loss = Callable[[Mapping[str, Var], Mapping[str, Any]], Var]


def gradients_of(loss: Loss, weights: Mapping[str, Any], feeds: Mapping[str, Any]) -> tuple[float, dict[str, Array]]:
    """Return a loss, and its gradient for each weight."""
    given = {name: Var(value) for name, value in weights.items()}
    found = loss(given, feeds)
    found.backward()
    return float(found.value), {name: var.grad for name, var in given.items()}


# Schedules: the factor of the learning rate after t updates.


def constant(t: int, total: int, warmup: float, rate: float) -> float:
    return t / max(1, warmup * total) if t < warmup * total else 1.0


def cosine(t: int, total: int, warmup: float, rate: float, cycles: float = 0.5) -> float:
    w = warmup * total
    progress = (t - w) / max(1, total - w)
    return t / max(1, w) if t < w else max(0.0, 0.5 * (1 + math.cos(2 * math.pi * cycles * progress)))


def linear(t: int, total: int, warmup: float, rate: float) -> float:
    w = warmup * total
    return t / max(1, w) if t < w else max(0.0, (total - t) / max(1, total - w))


def poly(t: int, total: int, warmup: float, rate: float, end: float = 1e-7, power: float = 1.0) -> float:
    w = warmup * total
    if t < w:
        return t / max(1, w)
    if t > total:
        return end / rate
    return ((rate - end) * (1 - (t - w) / (total - w)) ** power + end) / rate


Schedule = Callable[[int, int, float, float], float]


@dataclass
class PlainTrainer:
    """Trainer that updates weights with the mean gradient of a window, at the rate of a schedule."""

    loss: Loss
    formulas: Formulas
    rate: float
    schedule: Callable[[int], float] = field(default=lambda t: 1.0)
    window: int = 1
    steps: int = 0
    updates: int = 0
    norms: list[float] = field(default_factory=list)
    sums: dict[str, Array] = field(default_factory=dict)

    def train_step(self, feeds: Mapping[str, Any]) -> float:
        loss, gradients = gradients_of(self.loss, self.formulas.weights, feeds)
        for name, gradient in gradients.items():
            self.sums[name] = self.sums.get(name, np.zeros_like(gradient)) + gradient / self.window
        self.steps += 1
        if self.steps % self.window == 0:
            self.norms.append(self.formulas.step(self.sums, self.rate * self.schedule(self.updates)))
            self.sums = {}
            self.updates += 1
        return loss


def numeric_gradient(loss: Loss, weights: Mapping[str, Array], feeds: Mapping[str, Any], name: str, at: int) -> float:
    """Compute one element of a gradient by central differences."""
    values: list[float] = []
    for sign in (1, -1):
        moved = {key: np.array(value, np.float64) for key, value in weights.items()}
        moved[name].reshape(-1)[at] += sign * 1e-6
        values.append(float(loss({key: Var(value) for key, value in moved.items()}, feeds).value))
    return (values[0] - values[1]) / 2e-6
