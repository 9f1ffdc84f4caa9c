"""Loss scalers of :class:`ortrain.trainer.ORTTrainer`, for training in float16.

The loss is multiplied by a scale before the backward pass, so that small gradients do not underflow in float16. The
optimizer divides the gradients by the scale.

>>> from ortrain.trainer import TrainStepInfo
>>> from ortrain.trainer.amp.loss_scaler import DynamicLossScaler
>>> from ortrain.trainer.optim import AdamConfig
>>> scaler = DynamicLossScaler(up_scale_window=2)
>>> [scaler.update(TrainStepInfo(AdamConfig(), all_finite=finite)) for finite in (True, True, False)]
[65536.0, 131072.0, 65536.0]
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortrain.trainer.train_step_info import TrainStepInfo

__all__ = ["DynamicLossScaler", "LossScaler"]


class LossScaler:
    """Base class of loss scalers. A user's scaler is a subclass with a method ``update``.

    Args:
        loss_scale: the first scale, a finite int or float above 0.

    Raises:
        AssertionError: if the scale has another type or value.

    >>> from ortrain.trainer.amp import LossScaler
    >>> class Fixed(LossScaler):
    ...     def update(self, train_step_info):
    ...         return self.loss_scale
    >>> Fixed(128).loss_scale
    128.0

    """

    def __init__(self, loss_scale: float) -> None:
        self._input_name: str | None = None
        self.loss_scale = loss_scale
        self._initial_loss_scale = self._loss_scale

    @property
    def input_name(self) -> str | None:
        """The name of the graph input for the scale. None until the trainer sets it.

        Raises:
            AssertionError: for a new value that is not a name, or is empty.

        >>> from ortrain.trainer.amp import DynamicLossScaler
        >>> scaler = DynamicLossScaler()
        >>> scaler.input_name is None
        True
        >>> scaler.input_name = "loss_scale"

        """
        return self._input_name

    @input_name.setter
    def input_name(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise AssertionError(f"'input_name' must be the name of an input, got {name!r}")
        self._input_name = name

    @property
    def loss_scale(self) -> float:
        """The factor of the loss, a float.

        Raises:
            AssertionError: for a new value that is not a finite int or float above 0.

        >>> from ortrain.trainer.amp import DynamicLossScaler
        >>> scaler = DynamicLossScaler()
        >>> scaler.loss_scale = 1024
        >>> scaler.loss_scale
        1024.0

        """
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
            raise AssertionError(f"'loss_scale' must be a finite int or float above 0, got {scale!r}")
        self._loss_scale = float(scale)

    def reset(self) -> None:
        """Restores the first scale.

        >>> from ortrain.trainer.amp import DynamicLossScaler
        >>> scaler = DynamicLossScaler(loss_scale=256)
        >>> scaler.loss_scale = 8
        >>> scaler.reset()
        >>> scaler.loss_scale
        256.0
        """
        self._loss_scale = self._initial_loss_scale

    def update(self, train_step_info: TrainStepInfo) -> float:
        """Sets and returns the scale for the next update. The trainer calls this method after every update.

        Args:
            train_step_info: ``all_finite`` is true if the gradients of the update were finite.

        Raises:
            NotImplementedError: if the class does not override ``update``.

        >>> from ortrain.trainer import TrainStepInfo
        >>> from ortrain.trainer.amp import DynamicLossScaler
        >>> from ortrain.trainer.optim import AdamConfig
        >>> DynamicLossScaler(loss_scale=8).update(TrainStepInfo(AdamConfig(), all_finite=False))
        4.0

        """
        raise NotImplementedError(
            f"{type(self).__name__} has no update(train_step_info), which every loss scaler needs; DynamicLossScaler "
            "has one"
        )


class DynamicLossScaler(LossScaler):
    """A scale that is doubled after a number of finite steps and halved if gradients overflow.

    Args:
        automatic_update: if false, the scale never changes.
        loss_scale: the first scale, a finite int or float above 0.
        up_scale_window: number of consecutive finite steps after which the scale is doubled.
        min_loss_scale: the lower limit when the scale is halved.
        max_loss_scale: the upper limit when the scale is doubled.

    Raises:
        AssertionError: if ``loss_scale`` has another type or value.

    >>> from ortrain.trainer.amp import DynamicLossScaler
    >>> scaler = DynamicLossScaler()
    >>> scaler.automatic_update, scaler.loss_scale, scaler.up_scale_window
    (True, 65536.0, 2000)

    """

    automatic_update: bool
    """False keeps the scale as it is."""
    up_scale_window: int
    """Finite steps in a row after which the scale is doubled."""
    min_loss_scale: float
    """The smallest scale that halving gives."""
    max_loss_scale: float
    """The largest scale that doubling gives."""

    def __init__(
        self,
        automatic_update: bool = True,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        super().__init__(loss_scale)
        self.automatic_update = automatic_update
        self.up_scale_window = up_scale_window
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self._stable_steps_count = 0

    def reset(self) -> None:
        """Restores the first scale and resets the count of finite steps.

        >>> from ortrain.trainer.amp import DynamicLossScaler
        >>> scaler = DynamicLossScaler(loss_scale=256)
        >>> scaler.loss_scale = 8
        >>> scaler.reset()
        >>> scaler.loss_scale
        256.0
        """
        super().reset()
        self._stable_steps_count = 0

    def update(self, train_step_info: TrainStepInfo) -> float:
        """Doubles, halves or keeps the scale, and returns the scale.

        Args:
            train_step_info: ``all_finite`` is true if the gradients of the update were finite.

        >>> from ortrain.trainer import TrainStepInfo
        >>> from ortrain.trainer.amp import DynamicLossScaler
        >>> from ortrain.trainer.optim import AdamConfig
        >>> scaler = DynamicLossScaler(loss_scale=8, up_scale_window=1)
        >>> scaler.update(TrainStepInfo(AdamConfig()))
        16.0
        >>> scaler.update(TrainStepInfo(AdamConfig(), all_finite=False))
        8.0

        """
        if not self.automatic_update:
            return self.loss_scale
        if not train_step_info.all_finite:
            self.loss_scale = max(self.min_loss_scale, self.loss_scale / 2)
            self._stable_steps_count = 0
            return self.loss_scale
        self._stable_steps_count += 1
        if self._stable_steps_count >= self.up_scale_window:
            self.loss_scale = min(self.max_loss_scale, self.loss_scale * 2)
            self._stable_steps_count = 0
        return self.loss_scale
