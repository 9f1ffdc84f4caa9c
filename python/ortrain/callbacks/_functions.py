"""Callback of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ortrain._suggest import hint
from ortrain.callbacks._callback import Callback, Logs


class LambdaCallback(Callback):
    """Callback of functions, one per hook.

    Args:
        on_epoch_begin: called with ``epoch, logs``.
        on_epoch_end: called with ``epoch, logs``.
        on_train_begin: called with ``logs``.
        on_train_end: called with ``logs``.
        on_train_batch_begin: called with ``batch, logs``.
        on_train_batch_end: called with ``batch, logs``.
        kwargs: functions for the other hooks of :class:`Callback`.

    Raises:
        TypeError: for a name that is no hook.

    >>> from ortrain.callbacks import LambdaCallback
    >>> printer = LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch, logs["loss"]))
    >>> printer.on_epoch_end(0, {"loss": 0.5})
    0 0.5

    """

    def __init__(
        self,
        on_epoch_begin: Callable[[int, Logs], Any] | None = None,
        on_epoch_end: Callable[[int, Logs], Any] | None = None,
        on_train_begin: Callable[[Logs], Any] | None = None,
        on_train_end: Callable[[Logs], Any] | None = None,
        on_train_batch_begin: Callable[[int, Logs], Any] | None = None,
        on_train_batch_end: Callable[[int, Logs], Any] | None = None,
        **kwargs: Callable[..., Any] | None,
    ) -> None:
        hooks: dict[str, Callable[..., Any] | None] = kwargs | {
            "on_epoch_begin": on_epoch_begin,
            "on_epoch_end": on_epoch_end,
            "on_train_begin": on_train_begin,
            "on_train_end": on_train_end,
            "on_train_batch_begin": on_train_batch_begin,
            "on_train_batch_end": on_train_batch_end,
        }
        known = [name for name in dir(Callback) if name.startswith("on_")]
        for name, function in hooks.items():
            if name not in known:
                raise TypeError(f"{name!r} is not a hook of a callback{hint(name, known)}")
            if function is not None:
                setattr(self, name, function)
