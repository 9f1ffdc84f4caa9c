"""Learning-rate schedulers of :class:`ortrain.trainer.ORTTrainer`, with a warm-up.

A scheduler computes the rate of a step from two values: ``optimization_step``, the number of completed updates, and the
learning rate of the optimizer's config. A scheduler has no state, so a checkpoint stores nothing for it.

>>> from ortrain.trainer import TrainStepInfo
>>> from ortrain.trainer.optim import AdamConfig
>>> from ortrain.trainer.optim.lr_scheduler import LinearWarmupLRScheduler
>>> scheduler = LinearWarmupLRScheduler(total_steps=8, warmup=0.25)
>>> info = TrainStepInfo(AdamConfig(lr=0.5))
>>> rates = []
>>> for t in range(9):
...     info.optimization_step = t
...     rates += scheduler.get_lr(info)
>>> [round(rate, 3) for rate in rates]
[0.0, 0.25, 0.5, 0.417, 0.333, 0.25, 0.167, 0.083, 0.0]
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ortrain.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ortrain.trainer.train_step_info import TrainStepInfo

__all__ = [
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
    "_LRScheduler",
    "checked_rate",
]

# The optimizer reads the learning rate as float32.
_LARGEST = 3.4028234663852886e38


class _LRScheduler:
    """Base class of schedulers. A user's scheduler is a subclass with a method ``get_lr``.

    >>> from ortrain.trainer import TrainStepInfo
    >>> from ortrain.trainer.optim import AdamConfig, lr_scheduler
    >>> class Halving(lr_scheduler._LRScheduler):
    ...     def get_lr(self, train_step_info):
    ...         return [train_step_info.optimizer_config.lr * 0.5**train_step_info.optimization_step]
    >>> Halving().get_lr(TrainStepInfo(AdamConfig(lr=0.1), optimization_step=2))
    [0.025]

    """

    def __init__(self) -> None:
        self._last_lr: list[float] = []

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """Returns the learning rate of the next update, in a list of one float.

        Args:
            train_step_info: the number of completed updates (``optimization_step``) and the base rate
                (``optimizer_config.lr``).

        Raises:
            NotImplementedError: if the class does not override ``get_lr``.

        >>> from ortrain.trainer import TrainStepInfo
        >>> from ortrain.trainer.optim import AdamConfig, ConstantWarmupLRScheduler
        >>> info = TrainStepInfo(AdamConfig(lr=0.5), optimization_step=1)
        >>> ConstantWarmupLRScheduler(total_steps=20, warmup=0.1).get_lr(info)
        [0.25]

        """
        raise NotImplementedError(f"{type(self).__name__} has no get_lr(train_step_info), which every scheduler needs")

    def get_last_lr(self) -> list[float]:
        """Returns the rate of the trainer's last step in a list, or an empty list before the first step.

        >>> from ortrain.trainer.optim import ConstantWarmupLRScheduler
        >>> ConstantWarmupLRScheduler(total_steps=20).get_last_lr()
        []
        """
        return self._last_lr

    def _step(self, train_step_info: TrainStepInfo) -> list[float]:
        """Returns the rate of ``get_lr`` and stores it for ``get_last_lr``.

        The trainer calls ``_step`` at every step.
        """
        self._last_lr = self.get_lr(train_step_info)
        return self._last_lr


class _WarmupLRScheduler(_LRScheduler):
    """Base class of rates that grow from 0 in the first updates and then follow a curve."""

    total_steps: int
    """Number of updates of the whole training."""
    warmup: float
    """Fraction of the updates in which the rate grows."""

    def __init__(self, total_steps: int, warmup: float) -> None:
        super().__init__()
        if isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps < 1:
            raise AssertionError(f"'total_steps' must be an int of 1 or more, got {total_steps!r}")
        if not isinstance(warmup, float) or not 0 <= warmup < 1:
            raise AssertionError(f"'warmup' must be a float of 0.0 or more and below 1.0, got {warmup!r}")
        self.total_steps = total_steps
        self.warmup = warmup

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """Returns the learning rate of the next update, in a list of one float.

        Args:
            train_step_info: the number of completed updates (``optimization_step``) and the base rate
                (``optimizer_config.lr``).

        >>> from ortrain.trainer import TrainStepInfo
        >>> from ortrain.trainer.optim import AdamConfig, LinearWarmupLRScheduler
        >>> info = TrainStepInfo(AdamConfig(lr=0.5), optimization_step=15)
        >>> LinearWarmupLRScheduler(total_steps=20, warmup=0.0).get_lr(info)
        [0.125]

        """
        t, rate = train_step_info.optimization_step, train_step_info.optimizer_config.lr
        warm = self._warm_steps()
        factor = t / max(1.0, warm) if t < warm else self._factor(t, rate)
        return [rate * factor]

    def _warm_steps(self) -> float:
        """Returns the number of warm-up updates, not rounded."""
        return self.warmup * self.total_steps

    def _progress(self, t: int) -> float:
        """Returns the completed fraction of the updates after the warm-up."""
        warm = self._warm_steps()
        return (t - warm) / max(1.0, self.total_steps - warm)

    def _factor(self, t: int, rate: float) -> float:
        """Returns the factor of the rate after ``t`` updates, for ``t`` after the warm-up."""
        raise NotImplementedError


class ConstantWarmupLRScheduler(_WarmupLRScheduler):
    """A rate that grows linearly during the warm-up and then stays constant.

    With ``t`` updates done and ``W = warmup * total_steps`` (not rounded), the factor of the rate is ``t / max(1, W)``
    while ``t < W``, and 1 afterwards.

    Args:
        total_steps: number of updates of the whole training, an int of 1 or more.
        warmup: the fraction of the updates in which the rate grows, a float of 0.0 or more and below 1.0.

    Raises:
        AssertionError: if an argument has another type or value.

    >>> from ortrain.trainer import TrainStepInfo
    >>> from ortrain.trainer.optim import SGDConfig, ConstantWarmupLRScheduler
    >>> scheduler = ConstantWarmupLRScheduler(10, 0.4)
    >>> [scheduler.get_lr(TrainStepInfo(SGDConfig(lr=1), optimization_step=t))[0] for t in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]

    """

    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)

    def _factor(self, t: int, rate: float) -> float:
        return 1.0


class CosineWarmupLRScheduler(_WarmupLRScheduler):
    """A rate that grows linearly during the warm-up and then falls along a cosine.

    With ``t`` updates done, ``N = total_steps`` and ``W = warmup * N`` (not rounded), the factor of the rate is ``t /
    max(1, W)`` while ``t < W``. Afterwards it is ``max(0, (1 + cos(2 * pi * cycles * p)) / 2)`` with ``p = (t - W) /
    max(1, N - W)``.

    Args:
        total_steps: number of updates of the whole training, an int of 1 or more.
        cycles: number of periods of the cosine, a float above 0.0; half a period falls from the rate to 0. This is the
            second argument; in other schedulers the second argument is ``warmup``.
        warmup: the fraction of the updates in which the rate grows, a float of 0.0 or more and below 1.0.

    Raises:
        AssertionError: if an argument has another type or value.

    >>> from ortrain.trainer import TrainStepInfo
    >>> from ortrain.trainer.optim import SGDConfig, CosineWarmupLRScheduler
    >>> scheduler = CosineWarmupLRScheduler(10, warmup=0.2)
    >>> rates = [scheduler.get_lr(TrainStepInfo(SGDConfig(lr=1), optimization_step=t))[0] for t in (0, 1, 2, 6, 10)]
    >>> [round(rate, 3) for rate in rates]
    [0.0, 0.5, 1.0, 0.5, 0.0]

    """

    cycles: float
    """Number of periods of the cosine."""

    def __init__(self, total_steps: int, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        if not isinstance(cycles, float) or not 0 < cycles < math.inf:
            raise AssertionError(f"'cycles' must be a float above 0.0, got {cycles!r}")
        self.cycles = cycles

    def _factor(self, t: int, rate: float) -> float:
        return max(0.0, 0.5 * (1.0 + math.cos(2.0 * math.pi * self.cycles * self._progress(t))))


class LinearWarmupLRScheduler(_WarmupLRScheduler):
    """A rate that grows linearly during the warm-up and then falls linearly to 0.

    With ``t`` updates done, ``N = total_steps`` and ``W = warmup * N`` (not rounded), the factor of the rate is ``t /
    max(1, W)`` while ``t < W``. Afterwards it is ``max(0, (N - t) / max(1, N - W))``.

    Args:
        total_steps: number of updates of the whole training, an int of 1 or more.
        warmup: the fraction of the updates in which the rate grows, a float of 0.0 or more and below 1.0.

    Raises:
        AssertionError: if an argument has another type or value.

    >>> from ortrain.trainer import TrainStepInfo
    >>> from ortrain.trainer.optim import SGDConfig, LinearWarmupLRScheduler
    >>> scheduler = LinearWarmupLRScheduler(10, 0.2)
    >>> [scheduler.get_lr(TrainStepInfo(SGDConfig(lr=1), optimization_step=t))[0] for t in (0, 1, 2, 6, 10)]
    [0.0, 0.5, 1.0, 0.5, 0.0]

    """

    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)

    def _factor(self, t: int, rate: float) -> float:
        return max(0.0, (self.total_steps - t) / max(1.0, self.total_steps - self._warm_steps()))


class PolyWarmupLRScheduler(_WarmupLRScheduler):
    """A rate that grows linearly during the warm-up and then falls to ``lr_end`` along a power curve.

    ``L`` is the optimizer's rate, ``N = total_steps`` and ``W = warmup * N`` (not rounded).
    The rate after ``t`` updates:

    - ``L * t / max(1, W)`` while ``t < W``
    - ``(L - lr_end) * (1 - (t - W) / (N - W)) ** power + lr_end`` until ``N`` updates
    - ``lr_end`` afterwards

    Args:
        total_steps: number of updates of the whole training, an int of 1 or more.
        lr_end: the final rate, a float of 0.0 or more, below the rate of the optimizer. This is the second argument; in
            other schedulers the second argument is ``warmup``.
        power: the exponent, a float of 0.0 or more; 1.0 gives a straight line.
        warmup: the fraction of the updates in which the rate grows, a float of 0.0 or more and below 1.0.

    Raises:
        AssertionError: if an argument has another type or value; in ``get_lr``, if the rate is not above ``lr_end``.

    >>> from ortrain.trainer import TrainStepInfo
    >>> from ortrain.trainer.optim import SGDConfig, PolyWarmupLRScheduler
    >>> scheduler = PolyWarmupLRScheduler(10, lr_end=0.25, power=2.0, warmup=0.0)
    >>> [scheduler.get_lr(TrainStepInfo(SGDConfig(lr=1), optimization_step=t))[0] for t in (0, 5, 10, 11)]
    [1.0, 0.4375, 0.25, 0.25]

    """

    lr_end: float
    """The last rate."""
    power: float
    """The power of the curve."""

    def __init__(self, total_steps: int, lr_end: float = 1e-7, power: float = 1.0, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        if not isinstance(lr_end, float) or not 0 <= lr_end < math.inf:
            raise AssertionError(f"'lr_end' must be a float of 0.0 or more, got {lr_end!r}")
        if not isinstance(power, float) or not 0 <= power < math.inf:
            raise AssertionError(f"'power' must be a float of 0.0 or more, got {power!r}")
        self.lr_end = lr_end
        self.power = power

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """Returns the learning rate of the next update, in a list of one float.

        Args:
            train_step_info: the number of completed updates (``optimization_step``) and the base rate
                (``optimizer_config.lr``).

        Raises:
            AssertionError: if the rate of the optimizer is not above ``lr_end``.

        >>> from ortrain.trainer import TrainStepInfo
        >>> from ortrain.trainer.optim import AdamConfig, PolyWarmupLRScheduler
        >>> PolyWarmupLRScheduler(total_steps=20, lr_end=0.5).get_lr(TrainStepInfo(AdamConfig(lr=0.1)))
        Traceback (most recent call last):
        AssertionError: 'lr_end' (0.5) must be below the learning rate of the optimizer (0.1)

        """
        rate = train_step_info.optimizer_config.lr
        if not rate > self.lr_end:
            raise AssertionError(f"'lr_end' ({self.lr_end}) must be below the learning rate of the optimizer ({rate})")
        return super().get_lr(train_step_info)

    def _factor(self, t: int, rate: float) -> float:
        if t > self.total_steps:
            return self.lr_end / rate
        warm = self._warm_steps()
        left = 1.0 - (t - warm) / (self.total_steps - warm)
        return float(((rate - self.lr_end) * left**self.power + self.lr_end) / rate)


def checked_rate(rates: Any) -> float:
    """Checks the result of a scheduler before the step uses it, and returns the learning rate.

    Args:
        rates: the result of ``get_lr``: a list, a tuple or an array with one number.

    Raises:
        InvalidArgumentError: if there is not exactly one value, or the value is not a number from 0 to the largest
            float32.

    >>> from ortrain.trainer.optim.lr_scheduler import checked_rate
    >>> checked_rate([0.5])
    0.5
    >>> checked_rate([])
    Traceback (most recent call last):
    ortrain.errors.InvalidArgumentError: expected 1 learning rate from the scheduler, got 0: []

    """
    try:
        values = list(rates)
    except TypeError:
        raise InvalidArgumentError(f"expected a list of 1 learning rate from the scheduler, got {rates!r}") from None
    if len(values) != 1:
        raise InvalidArgumentError(f"expected 1 learning rate from the scheduler, got {len(values)}: {rates!r}")
    value = values[0]
    try:
        rate = math.nan if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, OverflowError):
        rate = math.nan
    if not 0 <= rate <= _LARGEST:
        raise InvalidArgumentError(
            f"the learning rate from the scheduler must be a number from 0 to the largest float32, got {value!r}"
        )
    return rate
