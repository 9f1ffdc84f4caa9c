"""The loss scaler of the older trainer, :mod:`ortrain.trainer.legacy`.

>>> from ortrain.trainer.legacy_loss_scaler import LossScaler
>>> LossScaler("loss_scale", is_dynamic_scale=True).loss_scale_
65536.0
"""

from __future__ import annotations

__all__ = ["LossScaler"]


class LossScaler:
    """A loss scale. A dynamic scale is doubled after finite steps and halved if gradients overflow.

    The scale changes by the rules of :class:`ortrain.trainer.amp.DynamicLossScaler`.

    Args:
        loss_scale_input_name: the name of the graph input for the scale.
        is_dynamic_scale: if false, the scale never changes.
        loss_scale: the first scale.
        up_scale_window: number of consecutive finite steps after which the scale is doubled.
        min_loss_scale: the lower limit when the scale is halved.
        max_loss_scale: the upper limit when the scale is doubled.

    >>> from ortrain.trainer.legacy_loss_scaler import LossScaler
    >>> scaler = LossScaler("loss_scale", True, loss_scale=8.0, up_scale_window=2)
    >>> for is_all_finite in (True, True, False, False):
    ...     scaler.update_loss_scale(is_all_finite)
    >>> scaler.loss_scale_, scaler.stable_steps_
    (4.0, 0)

    """

    def __init__(
        self,
        loss_scale_input_name: str,
        is_dynamic_scale: bool,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        self.loss_scale_input_name = loss_scale_input_name
        self.is_dynamic_scale = is_dynamic_scale
        self.initial_loss_scale_ = loss_scale
        self.up_scale_window_ = up_scale_window
        self.min_loss_scale_ = min_loss_scale
        self.max_loss_scale_ = max_loss_scale
        self.loss_scale_ = loss_scale
        self.stable_steps_ = 0

    def update_loss_scale(self, is_all_finite: bool) -> None:
        """Doubles, halves or keeps the scale after an update.

        Args:
            is_all_finite: True if all gradients of the update were finite.

        >>> from ortrain.trainer.legacy_loss_scaler import LossScaler
        >>> scaler = LossScaler("loss_scale", True, loss_scale=8.0)
        >>> scaler.update_loss_scale(False)
        >>> scaler.loss_scale_
        4.0

        """
        if not self.is_dynamic_scale:
            return
        if not is_all_finite:
            self.loss_scale_ = max(self.min_loss_scale_, self.loss_scale_ / 2)
            self.stable_steps_ = 0
            return
        self.stable_steps_ += 1
        if self.stable_steps_ >= self.up_scale_window_:
            self.loss_scale_ = min(self.max_loss_scale_, self.loss_scale_ * 2)
            self.stable_steps_ = 0

    def reset(self) -> None:
        """Restores the first scale and resets the count of finite steps.

        >>> from ortrain.trainer.legacy_loss_scaler import LossScaler
        >>> scaler = LossScaler("loss_scale", True, loss_scale=8.0)
        >>> scaler.update_loss_scale(False)
        >>> scaler.reset()
        >>> scaler.loss_scale_
        8.0
        """
        self.loss_scale_ = self.initial_loss_scale_
        self.stable_steps_ = 0
