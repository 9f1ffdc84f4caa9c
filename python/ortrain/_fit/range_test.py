"""Choice of the learning rate by a range test (Smith, "Cyclical Learning Rates for Training Neural Networks", 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortrain._fit.engine import Engine
from ortrain._fit.feeds import Feed, Layout
from ortrain.api import CheckpointState
from ortrain.errors import AnomalyError

__all__ = ["RangeTest", "find_learning_rate"]

_LOWEST, _HIGHEST, _STEPS = 1e-7, 10.0, 100
# Factor of the average loss, and the multiple of its minimum at which the test ends.
_DECAY, _DIVERGED = 0.9, 4.0
_COLUMNS, _ROWS = 60, 6
_BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class RangeTest:
    """Loss by learning rate; ``str`` draws it, and :meth:`plot` with matplotlib.

    The suggestion is the rate at which the loss falls fastest, and at most a tenth of the rate with the lowest loss.

    >>> import ortrain
    >>> model = ortrain.Model(ortrain.examples.perceptron(), learning_rate="find")
    >>> history = model.fit(x, labels)
    >>> test = model.range_test
    >>> test.suggestion == round(model.optimizer.get_learning_rate(), 9)
    True
    """

    rates: list[float]
    """Learning rates, ascending."""
    losses: list[float]
    """Average loss at each rate."""
    suggestion: float
    """Learning rate to train with."""

    def __str__(self) -> str:
        places = np.linspace(0, len(self.losses) - 1, min(_COLUMNS, len(self.losses))).astype(int)
        losses = np.array(self.losses)[places]
        low, high = losses.min(), losses[0] * 1.5
        heights = np.clip((losses - low) / max(high - low, 1e-12), 0, 1) * _ROWS * 8
        lines = []
        for row in range(_ROWS, 0, -1):
            cells = (_BLOCKS[int(np.clip(height - (row - 1) * 8, 0, 8))] for height in heights)
            label = f"{high:.3g}" if row == _ROWS else f"{low:.3g}" if row == 1 else ""
            lines.append(f"{label:>8} ┤{''.join(cells)}".rstrip())
        scale = f"{self.rates[0]:.0e}{f'{self.rates[-1]:.0e}':>{max(len(places) - 5, 1)}}"
        return "\n".join(
            [
                f"range test: learning rate {self.suggestion:.2g}",
                *lines,
                f"{'':>8} └{'─' * len(places)}",
                f"{'':>10}{scale}",
            ]
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw the loss with matplotlib, on ``ax`` or on new axes, and return the axes.

        Raises:
            ImportError: if matplotlib is not installed.

        >>> import ortrain
        >>> try:
        ...     axes = ortrain._fit.range_test.RangeTest([1e-3, 1e-2], [2.0, 1.0], 1e-3).plot()
        ... except ImportError as error:
        ...     print(str(error).partition(";")[0])
        a plot needs matplotlib, which is not installed

        """
        if ax is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise ImportError(
                    "a plot needs matplotlib, which is not installed; pip install 'ortrain[train]', or print the test"
                ) from error
            ax = pyplot.figure().add_subplot()
        ax.plot(self.rates, self.losses)
        ax.axvline(self.suggestion, linestyle=":", label=f"{self.suggestion:.2g}")
        ax.set(xscale="log", xlabel="learning rate", ylabel="loss")
        ax.legend()
        return ax


def find_learning_rate(engine: Engine, feed: Feed, layout: Layout) -> RangeTest:
    """Train a copy of the state with a rising learning rate.

    Raises:
        AnomalyError: if the loss is not finite at the lowest rate.

    """
    trial = engine.with_state(CheckpointState.load_checkpoint(engine.state.to_bytes(include_optimizer_state=True)))
    count = _STEPS
    factor = (_HIGHEST / _LOWEST) ** (1 / (count - 1))
    rates: list[float] = []
    losses: list[float] = []
    average, best = 0.0, math.inf
    is_endless = feed.steps_per_pass is not None
    for at, step in enumerate(feed.epoch(0, 0, count if is_endless else None)):
        if at == count:
            break
        rate = _LOWEST * factor**at
        result = trial.module(*step.arguments)
        loss = float(result[0]) if isinstance(result, tuple) else float(result)
        if not math.isfinite(loss):
            break
        average = _DECAY * average + (1 - _DECAY) * loss
        smooth = average / (1 - _DECAY ** (at + 1))
        rates.append(rate)
        losses.append(smooth)
        best = min(best, smooth)
        if smooth > _DIVERGED * best:
            break
        trial.optimizer.set_learning_rate(rate)
        trial.optimizer.step()
        trial.module.lazy_reset_grad()
    if not rates:
        raise AnomalyError("the loss is not finite before the first step; check the data for NaN and infinities")
    lowest = int(np.argmin(losses))
    chosen = rates[lowest] / 10
    if lowest > 1:
        chosen = min(chosen, rates[int(np.argmin(np.gradient(losses[: lowest + 1])))])
    return RangeTest(rates, losses, float(f"{chosen:.2g}"))
