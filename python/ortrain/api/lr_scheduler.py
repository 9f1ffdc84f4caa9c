"""Linear learning rate schedule.

>>> from ortrain.api.lr_scheduler import LinearLRScheduler
>>> scheduler = LinearLRScheduler(optimizer, warmup_step_count=0, total_step_count=100, initial_lr=0.5)
>>> optimizer.get_learning_rate()
0.5
"""

from __future__ import annotations

from ortrain import _numbers, _ortrain
from ortrain.api.optimizer import Optimizer

__all__ = ["LinearLRScheduler"]


class LinearLRScheduler:
    """Linear warm-up, then linear decay to zero.

    Let t be the number of completed optimizer steps, W of warm-up steps, and T of all steps. The rate is ``initial_lr``
    times ``t / W`` while t < W, and times ``max(0, (T - t) / (T - W))`` from then on. Making the scheduler sets the
    rate for the current t.

    Args:
        optimizer: the optimizer with the learning rate.
        warmup_step_count: W.
        total_step_count: T.
        initial_lr: the rate at the end of the warm-up.

    >>> from ortrain.api import LinearLRScheduler
    >>> scheduler = LinearLRScheduler(optimizer, warmup_step_count=2, total_step_count=4, initial_lr=1.0)
    >>> rates = []
    >>> for step in range(5):
    ...     rates.append(optimizer.get_learning_rate())
    ...     loss = module(x, labels)
    ...     optimizer.step()
    ...     scheduler.step()
    ...     module.lazy_reset_grad()
    >>> rates
    [0.0, 0.5, 1.0, 0.5, 0.0]

    """

    def __init__(self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be an Optimizer, got {type(optimizer).__name__}")
        self._optimizer = optimizer
        self._plan = f"warmup_step_count={warmup_step_count}, total_step_count={total_step_count}"
        self._initial_lr = initial_lr
        self._native = _ortrain.LinearLRScheduler(
            optimizer._native,
            _numbers.steps("warmup_step_count", warmup_step_count),
            _numbers.steps("total_step_count", total_step_count),
            _numbers.rate("initial_lr", initial_lr),
        )

    def __repr__(self) -> str:
        return f"LinearLRScheduler({self._plan}, initial_lr={self._initial_lr})"

    def step(self) -> None:
        """Set the rate for the number of optimizer steps done so far; the scheduler has no counter of its own.

        >>> from ortrain.api import LinearLRScheduler
        >>> scheduler = LinearLRScheduler(optimizer, warmup_step_count=4, total_step_count=8, initial_lr=1.0)
        >>> _ = module(x, labels)
        >>> optimizer.step()
        >>> scheduler.step()
        >>> optimizer.get_learning_rate()
        0.25
        """
        self._native.step()
