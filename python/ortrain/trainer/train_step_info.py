"""State of a training besides its weights: step counts, and results of the last step.

>>> from ortrain.trainer.optim import AdamConfig
>>> from ortrain.trainer.train_step_info import TrainStepInfo
>>> TrainStepInfo(AdamConfig(), step=3).step
3
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ortrain.trainer.optim.config import _OptimizerConfig

__all__ = ["TrainStepInfo"]


@dataclass(eq=False)
class TrainStepInfo:
    """Counts and flags for schedulers and loss scalers. The trainer owns one instance and updates its fields.

    Args:
        optimizer_config: the config of the optimizer.
        all_finite: True if all gradients of the last update were finite; with mixed precision, an array of one bool.
        fetches: names of the only outputs that ``train_step`` and ``eval_step`` return; empty for all outputs.
        optimization_step: number of weight updates.
        step: number of calls of ``train_step``, including calls that only accumulate gradients.

    Raises:
        AssertionError: if an argument has another type, or a count is negative.

    >>> from ortrain.trainer import TrainStepInfo
    >>> from ortrain.trainer.optim import AdamConfig
    >>> info = TrainStepInfo(AdamConfig(lr=0.5), fetches=["loss"], optimization_step=2)
    >>> info.all_finite, info.fetches, info.optimization_step, info.step
    (True, ['loss'], 2, 0)
    >>> TrainStepInfo(AdamConfig(), step=-1)
    Traceback (most recent call last):
    AssertionError: 'step' must be an int of 0 or more, got -1

    """

    optimizer_config: _OptimizerConfig
    """The config of the optimizer."""
    all_finite: Any = True
    """True if all gradients of the last update were finite; with mixed precision, an array of one bool."""
    fetches: list[str] = field(default_factory=list)
    """Names of the only outputs that steps return; empty for all outputs."""
    optimization_step: int = 0
    """Number of weight updates."""
    step: int = 0
    """Number of calls of ``train_step``."""

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer_config, _OptimizerConfig):
            raise AssertionError(
                "'optimizer_config' must be a config of an optimizer, for example AdamConfig(), got "
                f"{type(self.optimizer_config).__name__}"
            )
        if not isinstance(self.all_finite, bool):
            raise AssertionError(f"'all_finite' must be True or False, got {self.all_finite!r}")
        if not isinstance(self.fetches, list) or not all(isinstance(name, str) for name in self.fetches):
            raise AssertionError(f"'fetches' must be a list of names of outputs, got {self.fetches!r}")
        for name in ("optimization_step", "step"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise AssertionError(f"{name!r} must be an int of 0 or more, got {count!r}")
