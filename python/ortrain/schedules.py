"""Learning rate schedules: constant, decaying, cyclic, or decided by a metric, with an optional warm-up.

A schedule is a factor of the learning rate, as a function of t, the number of completed optimizer steps.
``LRScheduler`` sets the learning rate of an optimizer by a schedule, and checkpoints store the schedule.

>>> from ortrain.schedules import Cosine, LRScheduler, Warmup
>>> scheduler = LRScheduler(optimizer, Warmup(steps=2, then=Cosine(total=6)), lr=0.01)
>>> rates = []
>>> for step in range(7):
...     rates.append(round(optimizer.get_learning_rate(), 5))
...     loss = module(x, labels)
...     optimizer.step()
...     scheduler.step()
...     module.lazy_reset_grad()
>>> rates
[0.0, 0.005, 0.01, 0.00854, 0.005, 0.00146, 0.0]

Factors are computed in float64; their product with the rate is rounded once, to float32. ``total`` and ``milestones``
count from the first step of the training, with or without a warm-up. All other counts begin after the warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from ortrain import _ortrain
from ortrain.api.optimizer import Optimizer
from ortrain.errors import InvalidArgumentError

__all__ = [
    "Constant",
    "Cosine",
    "CosineRestarts",
    "Exponential",
    "Function",
    "InverseSquareRoot",
    "LRScheduler",
    "Linear",
    "MultiStep",
    "OneCycle",
    "Polynomial",
    "ReduceOnPlateau",
    "Schedule",
    "Step",
    "Warmup",
    "resume",
]

Factor: TypeAlias = Callable[[int], float]


class Schedule:
    """Factor of the learning rate by the number of optimizer steps; the classes below are the schedules.

    Two schedules are equal if their settings are equal. ``repr`` is the code that makes the schedule; ``print`` adds a
    curve.

    >>> from ortrain.schedules import Linear, Schedule
    >>> isinstance(Linear(total=100), Schedule)
    True
    >>> Linear(total=100)
    Linear(total=100, end=0.0, start=1.0)
    >>> Linear(total=100)(25)
    0.75

    """

    _native: _ortrain.Schedule
    _function: Factor | None = None

    def __init__(self, **settings: object) -> None:
        if type(self) is Schedule:
            raise TypeError("Schedule is an abstract base class; create a schedule such as Linear(total=100)")
        self._native = _ortrain.Schedule(type(self).__name__, list(settings.items()))

    def __call__(self, t: int) -> float:
        """Return the factor after ``t`` optimizer steps. A decision by a metric counts as 1.

        Raises:
            InvalidArgumentError: if the function of the schedule returns something else than a factor.

        >>> from ortrain.schedules import Step
        >>> [Step(every=10, gamma=0.5)(t) for t in (0, 9, 10, 20)]
        [1.0, 1.0, 0.5, 0.25]

        """
        return self._native.factor(t, self._decided(t))

    def _decided(self, t: int) -> float:
        """Return the factor of the function, or 1 without one. A warm-up calls it for the last step of the warm-up."""
        return 1.0 if self._function is None else _factor_of(self._function, max(t, self._native.warmup()))

    def __repr__(self) -> str:
        text = self._native.text()
        if self._function is None:
            return text
        return text.replace("Function()", f"Function({getattr(self._function, '__name__', repr(self._function))})")

    def __str__(self) -> str:
        """Return the code that makes the schedule, and its curve.

        >>> from ortrain.schedules import Cosine, Warmup
        >>> print(Warmup(steps=20, then=Cosine(total=120)))
        Warmup(steps=20, then=Cosine(total=120, end=0.0, cycles=1), start=0.0)
            1 ┤         ▄████▇▇▆▆▅▅▄▃▂▁
              │       ▄█████████████████▇▆▅▄▃▂
              │     ▄██████████████████████████▇▆▅▃▂▁
              │   ▄███████████████████████████████████▆▅▄▃▂▁
              │ ▄███████████████████████████████████████████▇▆▅▅▄▃▂▂▁▁▁
            0 └────────────────────────────────────────────────────────────
               0                                                   step 120
        """
        last = self._native.span()
        factors = [self(t) for t in _ortrain.curve_steps(last)]
        return f"{self!r}\n{_ortrain.draw_curve(factors, last)}"

    def plot(self, steps: int | None = None, ax: Any = None) -> Any:
        """Draw the factor with matplotlib, on ``ax`` or on new axes, and return the axes.

        Args:
            steps: the last step of the plot; by default the end of the schedule.
            ax: ``matplotlib.axes.Axes``.

        Raises:
            ImportError: if matplotlib is not installed.
            InvalidArgumentError: if ``steps`` is below 1.

        >>> from ortrain.schedules import Linear
        >>> try:
        ...     axes = Linear(total=100).plot()
        ... except ImportError as error:
        ...     print(str(error).partition(";")[0])
        a plot needs matplotlib, which is not installed

        """
        last = self._native.span() if steps is None else steps
        if last < 1:
            raise InvalidArgumentError(f"steps must be at least 1, got {last}")
        if ax is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise ImportError(
                    "a plot needs matplotlib, which is not installed; install it, or print the schedule for a curve of "
                    "text"
                ) from error
            ax = pyplot.figure().add_subplot()
        shown = range(0, last + 1, max(1, last // 1000))
        ax.plot(shown, [self(t) for t in shown])
        ax.set(xlabel="optimizer step", ylabel="factor of the learning rate")
        # The settings of nested schedules may need several lines.
        ax.set_title(repr(self), fontsize="small", wrap=True)
        return ax

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self._native.text() == other._native.text() and self._function is other._function

    def __hash__(self) -> int:
        return hash(self._native.text())

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_text, (self._native.text(), self._function)


class Constant(Schedule):
    """Constant factor of 1.

    >>> from ortrain.schedules import Constant
    >>> Constant()(1000)
    1.0

    """

    def __init__(self) -> None:
        super().__init__()


class Linear(Schedule):
    """Straight line: ``start + (end - start) t/total``, and ``end`` from ``total`` on.

    Source: ``torch.optim.lr_scheduler.LinearLR``, with ``total_iters`` as ``total``.

    Args:
        total: the step at which the line ends.
        end: the last factor.
        start: the first factor.

    >>> from ortrain.schedules import Linear
    >>> [Linear(total=4, end=0.5)(t) for t in (0, 2, 4, 9)]
    [1.0, 0.75, 0.5, 0.5]

    """

    def __init__(self, total: int, end: float = 0.0, start: float = 1.0) -> None:
        super().__init__(total=total, end=end, start=start)


class Cosine(Schedule):
    """Half a cosine: ``end + (1 - end) (1 + cos(pi t/total)) / 2``, and ``end`` from ``total`` on.

    Several cycles divide the steps into parts of equal length, each with its own cosine.
    Sources: ``torch.optim.lr_scheduler.CosineAnnealingLR`` (``T_max``, ``eta_min / lr``), which rises again after
    ``T_max``; ``transformers.get_cosine_with_hard_restarts_schedule_with_warmup``.

    Args:
        total: the step at which the last cosine ends.
        end: the lowest factor.
        cycles: the number of cosines.

    >>> from ortrain.schedules import Cosine
    >>> [round(Cosine(total=4)(t), 3) for t in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    >>> [round(Cosine(total=4, cycles=2)(t), 3) for t in range(5)]
    [1.0, 0.5, 1.0, 0.5, 0.0]

    """

    def __init__(self, total: int, end: float = 0.0, cycles: int = 1) -> None:
        super().__init__(total=total, end=end, cycles=cycles)


class CosineRestarts(Schedule):
    """Repeated half cosines from 1 to ``end``; each is ``growth`` times as long as the one before.

    Source: ``torch.optim.lr_scheduler.CosineAnnealingWarmRestarts`` (``T_0``, ``T_mult``, ``eta_min / lr``).

    Args:
        first: the number of steps of the first cosine.
        growth: the length of each cosine divided by the length of the one before, a whole number.
        end: the lowest factor.

    >>> from ortrain.schedules import CosineRestarts
    >>> [round(CosineRestarts(first=2, growth=2)(t), 3) for t in range(7)]
    [1.0, 0.5, 1.0, 0.854, 0.5, 0.146, 1.0]

    """

    def __init__(self, first: int, growth: int = 1, end: float = 0.0) -> None:
        super().__init__(first=first, growth=growth, end=end)


class Polynomial(Schedule):
    """Power of the remaining share of steps: ``end + (1 - end) (1 - t/total)^power``; ``end`` from ``total`` on.

    Sources: ``torch.optim.lr_scheduler.PolynomialLR``; ``transformers.get_polynomial_decay_schedule_with_warmup``, with
    ``lr_end`` as ``end`` times the rate.

    Args:
        total: the step at which the decay ends.
        power: the exponent.
        end: the last factor.

    >>> from ortrain.schedules import Polynomial
    >>> [Polynomial(total=4, power=2.0)(t) for t in range(5)]
    [1.0, 0.5625, 0.25, 0.0625, 0.0]

    """

    def __init__(self, total: int, power: float = 1.0, end: float = 0.0) -> None:
        super().__init__(total=total, power=power, end=end)


class Exponential(Schedule):
    """``gamma^t``: every step multiplies the rate by ``gamma``.

    Source: ``torch.optim.lr_scheduler.ExponentialLR``.

    Args:
        gamma: the factor of one step.

    >>> from ortrain.schedules import Exponential
    >>> Exponential(gamma=0.5)(3)
    0.125

    """

    def __init__(self, gamma: float) -> None:
        super().__init__(gamma=gamma)


class Step(Schedule):
    """``gamma^floor(t/every)``: the rate drops at each multiple of ``every`` steps.

    Source: ``torch.optim.lr_scheduler.StepLR``.

    Args:
        every: the number of steps between two drops.
        gamma: the factor of one drop.

    >>> from ortrain.schedules import Step
    >>> [Step(every=2, gamma=0.5)(t) for t in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]

    """

    def __init__(self, every: int, gamma: float = 0.1) -> None:
        super().__init__(every=every, gamma=gamma)


class MultiStep(Schedule):
    """Drop at each milestone: ``gamma`` to the power of the number of milestones reached.

    Source: ``torch.optim.lr_scheduler.MultiStepLR``.

    Args:
        milestones: numbers of steps, in ascending order.
        gamma: the factor of one drop.

    >>> from ortrain.schedules import MultiStep
    >>> [MultiStep([2, 3], gamma=0.5)(t) for t in range(5)]
    [1.0, 1.0, 0.5, 0.25, 0.25]

    """

    def __init__(self, milestones: Sequence[int], gamma: float = 0.1) -> None:
        super().__init__(milestones=list(milestones), gamma=gamma)


class OneCycle(Schedule):
    """Half a cosine up to 1, then half a cosine down to nearly 0; the scheduler's ``lr`` is the highest rate.

    Source: ``torch.optim.lr_scheduler.OneCycleLR`` with its cosines and two phases (``max_lr`` is ``lr``).

    Args:
        total: the number of steps of the training.
        rise: the share of the steps with a rising rate (``pct_start``).
        start_division: the highest rate divided by the first rate (``div_factor``).
        final_division: the first rate divided by the last rate (``final_div_factor``).

    >>> from ortrain.schedules import OneCycle
    >>> [round(OneCycle(total=10)(t), 3) for t in (0, 2, 9)]
    [0.04, 1.0, 0.0]

    """

    def __init__(
        self, total: int, rise: float = 0.3, start_division: float = 25.0, final_division: float = 10000.0
    ) -> None:
        super().__init__(total=total, rise=rise, start_division=start_division, final_division=final_division)


class InverseSquareRoot(Schedule):
    """``sqrt(scale / (t + scale))``: a slow decay without an end, common for transformers.

    Source: ``transformers.get_inverse_sqrt_schedule``, with ``timescale`` as ``scale``.

    Args:
        scale: the number of steps until the factor is ``sqrt(1/2)``.

    >>> from ortrain.schedules import InverseSquareRoot
    >>> [InverseSquareRoot(scale=10)(t) for t in (0, 30, 150)]
    [1.0, 0.5, 0.25]

    """

    def __init__(self, scale: int) -> None:
        super().__init__(scale=scale)


class ReduceOnPlateau(Schedule):
    """Drop of the rate when a metric no longer improves; pass the metric to :meth:`LRScheduler.step`.

    Source: ``torch.optim.lr_scheduler.ReduceLROnPlateau`` with ``eps=0``.

    Args:
        factor: the factor of one drop.
        patience: the number of scheduler steps without a better metric before a drop is due.
        threshold: the least improvement over the best metric, as a share of the best metric.
        cooldown: the number of scheduler steps after a drop that do not count.
        least: the lowest factor (``min_lr / lr``).
        maximize: True if a higher metric is better.
        absolute: True if ``threshold`` is a difference instead of a share.

    >>> from ortrain.schedules import LRScheduler, ReduceOnPlateau
    >>> scheduler = LRScheduler(optimizer, ReduceOnPlateau(factor=0.5, patience=1), lr=1.0)
    >>> rates = []
    >>> for loss in (0.9, 0.8, 0.8, 0.8, 0.7):
    ...     scheduler.step(loss)
    ...     rates.append(optimizer.get_learning_rate())
    >>> rates
    [1.0, 1.0, 1.0, 0.5, 0.5]

    """

    def __init__(
        self,
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 0.0001,
        cooldown: int = 0,
        least: float = 0.0,
        maximize: bool = False,
        absolute: bool = False,
    ) -> None:
        super().__init__(
            factor=factor,
            patience=patience,
            threshold=threshold,
            cooldown=cooldown,
            least=least,
            maximize=maximize,
            absolute=absolute,
        )


class Function(Schedule):
    """Factor that a function returns. A plain function is accepted wherever a schedule is.

    Source: ``torch.optim.lr_scheduler.LambdaLR``. A checkpoint cannot store the function: pass it to :func:`resume`
    again.

    Args:
        function: a function from the number of optimizer steps to a factor, a finite number that is not negative.
            After a warm-up, its first call is for the last step of the warm-up.

    >>> from ortrain.schedules import Function
    >>> Function(lambda t: 1 / (1 + t))(3)
    0.25

    """

    def __init__(self, function: Factor) -> None:
        if not callable(function):
            raise TypeError(f"function must be a function from steps to a factor, got {type(function).__name__}")
        super().__init__()
        self._function = function


class Warmup(Schedule):
    """Straight line up to the first factor of another schedule, followed by that schedule.

    ``total`` and ``milestones`` of the other schedule include the steps of the warm-up, as in ``LinearLRScheduler``:
    ``Warmup(100, Linear(1000))`` rises for 100 steps and falls for 900. Source:
    ``transformers.get_linear_schedule_with_warmup`` and similar functions.

    Args:
        steps: the number of steps of the warm-up.
        then: a schedule, or a function from steps to a factor.
        start: the first factor, as a share of the factor at the end of the warm-up.

    >>> from ortrain.schedules import Linear, Warmup
    >>> [Warmup(2, Linear(total=6))(t) for t in range(7)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]

    """

    def __init__(self, steps: int, then: Schedule | Factor, start: float = 0.0) -> None:
        then = _schedule(then, "then")
        super().__init__(steps=steps, then=then._native, start=start)
        self._function = then._function


class LRScheduler:
    """Scheduler that sets the learning rate of an optimizer; checkpoints of its state store the schedule.

    The number of steps is the optimizer's (``optimizer.step_count``); the scheduler has no counter of its own. Making
    the scheduler sets the rate for the steps done so far.

    Args:
        optimizer: the optimizer with the learning rate.
        schedule: a schedule, or a function from steps to a factor.
        lr: the learning rate that the factors multiply: the highest or the first rate; ``None`` for the current rate of
            the optimizer. The same factors scale the learning rates of parameter groups.

    Raises:
        InvalidArgumentError: if ``lr``, or the resulting rate, is negative, infinite or NaN.

    >>> from ortrain.schedules import Exponential, LRScheduler
    >>> scheduler = LRScheduler(optimizer, Exponential(gamma=0.9), lr=0.5)
    >>> scheduler
    LRScheduler(Exponential(gamma=0.9), lr=0.5)
    >>> optimizer.get_learning_rate()
    0.5

    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule | Factor, lr: float | None = None) -> None:
        _check_optimizer(optimizer)
        lr = optimizer.get_learning_rate() if lr is None else lr
        self._optimizer = optimizer
        self._schedule = _schedule(schedule, "schedule")
        # Called first, so that a failing function changes nothing.
        decided = _value_for(self._schedule, None, optimizer.step_count)
        self._native = _ortrain.LrScheduler(optimizer._native, self._schedule._native, lr)
        if decided is not None:
            self._native.step(decided)

    def __repr__(self) -> str:
        return f"LRScheduler({self._schedule!r}, lr={self._native.lr():.6g})"

    @property
    def schedule(self) -> Schedule:
        """Schedule that sets the rate.

        >>> from ortrain.schedules import Constant, LRScheduler
        >>> LRScheduler(optimizer, Constant(), lr=0.1).schedule
        Constant()
        """
        return self._schedule

    def step(self, metric: float | None = None) -> None:
        """Set the rate for the number of optimizer steps done so far.

        Args:
            metric: the metric for :class:`ReduceOnPlateau`, such as a loss; an error for any other schedule.

        Raises:
            InvalidArgumentError: if the metric is missing, unexpected, infinite or NaN. Also if a function returns
                something else than a factor, or the rate would not be finite. The rate then stays as it was.

        >>> from ortrain.schedules import Linear, LRScheduler
        >>> scheduler = LRScheduler(optimizer, Linear(total=4), lr=1.0)
        >>> _ = module(x, labels)
        >>> optimizer.step()
        >>> scheduler.step()
        >>> optimizer.get_learning_rate()
        0.75

        """
        self._native.step(_value_for(self._schedule, metric, self._optimizer.step_count))

    def get_last_lr(self) -> float:
        """Return the current rate, a float32.

        >>> from ortrain.schedules import Constant, LRScheduler
        >>> LRScheduler(optimizer, Constant(), lr=0.5).get_last_lr()
        0.5
        """
        return self._optimizer.get_learning_rate()


def _value_for(schedule: Schedule, metric: float | None, step: int) -> float | None:
    """Return the value for a step of a schedule: the metric, or the factor of its function, if it has one."""
    if metric is not None:
        if schedule._native.takes() != "metric":
            raise InvalidArgumentError(f"a step of {schedule!r} takes no metric")
        return _number(metric, "the metric")
    return None if schedule._function is None else schedule._decided(step)


def resume(optimizer: Optimizer, function: Factor | None = None) -> LRScheduler:
    """Return the scheduler that a checkpoint was saved with, including its complete state.

    The rate stays as it was saved, so that the training continues bit for bit.

    Args:
        optimizer: an optimizer on the state of the checkpoint.
        function: the function of the schedule, if it has one: a checkpoint cannot store it.

    Raises:
        OrtrainError: if the checkpoint has no schedule, or a damaged one.
        InvalidArgumentError: if only one of the schedule and this call has a function.

    >>> from ortrain.schedules import Cosine, LRScheduler, resume
    >>> scheduler = LRScheduler(optimizer, Cosine(total=100), lr=0.5)
    >>> CheckpointState.save_checkpoint(state, "later", include_optimizer_state=True)
    >>> state = CheckpointState.load_checkpoint("later")
    >>> module = Module("training_model.onnx", state)
    >>> optimizer = Optimizer("optimizer_model.onnx", module)
    >>> resume(optimizer)
    LRScheduler(Cosine(total=100, end=0.0, cycles=1), lr=0.5)

    """
    _check_optimizer(optimizer)
    scheduler = LRScheduler.__new__(LRScheduler)
    scheduler._optimizer = optimizer
    scheduler._native = _ortrain.LrScheduler.resume(optimizer._native)
    scheduler._schedule = _resumed(scheduler._native.schedule(), function)
    return scheduler


def _resumed(native: _ortrain.Schedule, function: Factor | None) -> Schedule:
    """Return the schedule of a checkpoint, with the function that it needs."""
    takes = native.takes() == "factor"
    if takes and function is None:
        raise InvalidArgumentError(
            f"the schedule of the checkpoint, {native.text()}, has a Python function, which a checkpoint cannot "
            "store; pass the function: resume(optimizer, function)"
        )
    if function is not None and not takes:
        raise InvalidArgumentError(
            f"the schedule of the checkpoint, {native.text()}, has no function; call resume(optimizer) without one"
        )
    return _from_text(native.text(), None if function is None else Function(function)._function)


def _from_text(text: str, function: Factor | None) -> Schedule:
    """Parse the text of a schedule. The text is not run as code."""
    native = _ortrain.Schedule.parse(text)
    kinds: dict[str, type[Schedule]] = {kind.__name__: kind for kind in Schedule.__subclasses__()}
    kind = kinds[native.name()]
    schedule = kind.__new__(kind)
    schedule._native, schedule._function = native, function
    return schedule


def _schedule(value: Any, what: str) -> Schedule:
    if isinstance(value, Schedule):
        return value
    if isinstance(value, type) or not callable(value):
        shown = value.__name__ if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{what} must be a schedule or a function from steps to a factor, got {shown}")
    return Function(value)


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be an Optimizer, got {type(optimizer).__name__}")


def _number(value: object, what: str) -> float:
    """Convert a number of Python or NumPy, or a result of a module, to a float."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if not isinstance(value, Real):
        raise InvalidArgumentError(f"{what} must be a number, got {type(value).__name__}")
    return float(value)


def _factor_of(function: Factor, t: int) -> float:
    """Return the result of a function for ``t`` steps; raise an error if it is not a factor."""
    factor = _number(function(t), f"the result of the schedule's function for step {t}")
    if not (math.isfinite(factor) and factor >= 0):
        raise InvalidArgumentError(
            f"the result of the schedule's function for step {t} must be finite and at least 0, got {factor}"
        )
    return factor
