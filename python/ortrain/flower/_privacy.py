"""Clipping of the gradients of single examples, and noise: differentially private training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain._ortrain import DeviceArray
from ortrain.api import CheckpointState, Module
from ortrain.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["ExampleClipping", "clip_per_example"]


@dataclass(frozen=True)
class ExampleClipping:
    """Differentially private training of a client: clipping per example and Gaussian noise.

    Args:
        max_norm: the largest L2 norm of the gradient of an example, over all parameters together.
        noise_multiplier: the standard deviation of the noise divided by ``max_norm``; 0 for no noise.
        seed: the seed of the noise, for tests; a known seed gives no protection. ``None`` for the entropy of the
            system.

    Raises:
        InvalidArgumentError: for a number that is negative or not finite, and for a ``max_norm`` of 0.

    >>> from ortrain.flower import ExampleClipping
    >>> ExampleClipping(max_norm=1.0, noise_multiplier=1.1)
    ExampleClipping(max_norm=1.0, noise_multiplier=1.1, seed=None)

    """

    max_norm: float
    """Largest norm of the gradient of an example."""
    noise_multiplier: float = 0.0
    """Standard deviation of the noise divided by the largest norm."""
    seed: int | None = None
    """Seed of the noise; ``None`` for the entropy of the system."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_norm) and self.max_norm > 0):
            raise InvalidArgumentError(f"max_norm must be a number above 0, got {self.max_norm!r}")
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise InvalidArgumentError(
                f"noise_multiplier must be a number of at least 0, got {self.noise_multiplier!r}"
            )

    def generator(self, *position: int) -> np.random.Generator:
        """Return the generator of the noise at a position: client, round.

        >>> from ortrain.flower import ExampleClipping
        >>> clipping = ExampleClipping(1.0, 1.0, seed=0)
        >>> bool(clipping.generator(0, 1).normal() == clipping.generator(0, 1).normal())
        True
        """
        return np.random.default_rng(None if self.seed is None else [self.seed, *position])


def clip_per_example(
    module: Module,
    *inputs: Any,
    max_norm: float,
    noise_multiplier: float = 0.0,
    rng: np.random.Generator | None = None,
) -> float:
    """Set the gradients of a module to the mean of the clipped gradients of the examples, plus noise.

    Each example is a batch of one: a row of each input. Its gradient over all parameters is scaled to a norm of at most
    ``max_norm``. Their sum plus Gaussian noise with the standard deviation ``noise_multiplier * max_norm``, divided by
    the number of examples, becomes the gradient for :meth:`Optimizer.step <ortrain.api.Optimizer.step>`. Sums are
    float64, in the order of the rows. The method is by Abadi et al., "Deep Learning with Differential Privacy", 2016.

    Args:
        module: a module in training mode. Earlier gradients are overwritten.
        inputs: arrays with the batch as first axis, in the order of :meth:`Module.input_names
            <ortrain.api.Module.input_names>`; shapes ``[batch, ...]``.
        max_norm: the largest L2 norm of the gradient of an example, above 0.
        noise_multiplier: the standard deviation of the noise divided by ``max_norm``.
        rng: the generator of the noise; ``None`` for one from the entropy of the system.

    Returns:
        The mean of the losses of the examples, the first output of the module.

    Raises:
        InvalidArgumentError: for inputs with different numbers of rows or none; if training changes running
            statistics, which clipping does not hide; if the gradient of an example is not finite.

    >>> from ortrain.flower import clip_per_example
    >>> loss = clip_per_example(module, x, labels, max_norm=1.0, noise_multiplier=1.1)
    >>> optimizer.step()
    >>> module.lazy_reset_grad()

    """
    ExampleClipping(max_norm, noise_multiplier)
    arrays = [np.asarray(each) for each in inputs]
    rows = {len(array) if array.ndim else 0 for array in arrays}
    if len(rows) != 1 or 0 in rows:
        shapes = ", ".join(str(list(array.shape)) for array in arrays)
        raise InvalidArgumentError(
            f"each input must have the same number of rows, at least one; the shapes are {shapes}"
        )
    (count,) = rows
    module.train()
    losses = 0.0
    sums: list[npt.NDArray[np.float64]] = []
    for row in range(count):
        example = [array[row : row + 1] for array in arrays]
        if row == 0:
            loss, gradients = _first_gradients(module, example)
            sums = [np.zeros(each.shape) for each in gradients]
        else:
            loss, gradients = _gradients(module, example)
        norm = math.sqrt(sum(float(np.dot(each, each)) for each in gradients))
        if not math.isfinite(norm):
            module.lazy_reset_grad()
            raise InvalidArgumentError(f"the gradient of example {row} is not finite")
        scale = min(1.0, max_norm / norm) if norm else 1.0
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient * scale
        losses += loss
    if noise_multiplier:
        _add_noise(module._state, sums, noise_multiplier * max_norm, rng or np.random.default_rng())
    for plane, total in zip(module.gradient_planes(), sums, strict=True):
        _write(plane, total / count)
    return losses / count


def _gradients(module: Module, example: list[npt.NDArray[Any]]) -> tuple[float, list[npt.NDArray[np.float64]]]:
    module.lazy_reset_grad()
    result: Any = module(*example)
    loss = result[0] if isinstance(result, tuple) else result
    return float(np.asarray(loss)), [_read(plane) for plane in module.gradient_planes()]


def _first_gradients(module: Module, example: list[npt.NDArray[Any]]) -> tuple[float, list[npt.NDArray[np.float64]]]:
    """Return loss and gradients of an example, if the step changes no running statistics."""
    state = module._state
    before = {name: each.data.copy() for name, each in state.parameters if not each.requires_grad}
    found = _gradients(module, example)
    for name, values in before.items():
        if state.parameters[name].data.tobytes() != values.tobytes():
            for other, earlier in before.items():
                state.parameters[other] = earlier
            module.lazy_reset_grad()
            raise InvalidArgumentError(
                f"training changes the running statistic {name!r} by single examples, which clipping does not hide; "
                "train with frozen statistics (generate_artifacts(..., batch_norm='freeze')), or replace the layer"
            )
    return found


def _read(plane: Any) -> npt.NDArray[np.float64]:
    array = plane.numpy() if isinstance(plane, DeviceArray) else plane
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(array, np.float64)


def _write(plane: Any, values: npt.NDArray[np.float64]) -> None:
    dtype = np.dtype(plane.dtype)
    if dtype == np.uint16:
        bits = values.astype(np.float32).view(np.uint32)
        converted: npt.NDArray[Any] = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)
    else:
        converted = values.astype(dtype)
    if isinstance(plane, DeviceArray):
        plane.copy_from(converted)
    else:
        plane[:] = converted


def _add_noise(
    state: CheckpointState, sums: list[npt.NDArray[np.float64]], deviation: float, rng: np.random.Generator
) -> None:
    """Add noise to the elements of tensors; the elements between tensors stay zero."""
    for layout, total in zip(state.layout().trainable, sums, strict=True):
        for tensor in layout.tensors:
            count = math.prod(tensor.shape)
            total[tensor.offset : tensor.offset + count] += rng.normal(0.0, deviation, count)
