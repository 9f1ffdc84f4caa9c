"""Learning rates that change by plan."""

from __future__ import annotations

from ortrain import _ortrain
from ortrain.api.optimizer import Optimizer

__all__ = ["LinearLRScheduler"]


class LinearLRScheduler:
    """Linear warm-up, then linear decay to zero.

    With t completed optimizer steps, W warm-up steps and T steps in all, the rate is ``initial_lr`` times ``t / W``
    while t < W, and ``max(0, (T - t) / (T - W))`` from then on. Making the scheduler sets the rate for the current t.
    """

    def __init__(self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float) -> None:
        self._optimizer = optimizer
        self._native = _ortrain.LinearLRScheduler(optimizer._native, warmup_step_count, total_step_count, initial_lr)

    def step(self) -> None:
        """Set the rate for the number of optimizer steps done so far; there is no other counter."""
        self._native.step()
