"""Dispatch of hooks to callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ortrain.callbacks._callback import Callback
from ortrain.errors import InvalidArgumentError

Hook = Callable[..., None]

# Newer names of hooks, each with its older name, which has the same meaning.
_ALIASES = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}
_HOOKS = (
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_end",
    "on_test_batch_begin",
    "on_test_batch_end",
    "on_predict_begin",
    "on_predict_end",
    "on_predict_batch_begin",
    "on_predict_batch_end",
)


class CallbackList:
    """Callbacks of a run, in the order of their calls.

    Each hook is a tuple of bound methods: only of callbacks that override the hook. A loop over an empty tuple costs
    nothing::

        for hook in callbacks.on_train_batch_end:
            hook(batch, logs)

    Args:
        callbacks: the callbacks; ``None`` for none.
        model: the model, for ``set_model``.
        params: the settings of the run, for ``set_params``. A fit has ``epochs``, an evaluation has not.

    """

    on_train_begin: tuple[Hook, ...]
    on_train_end: tuple[Hook, ...]
    on_epoch_begin: tuple[Hook, ...]
    on_epoch_end: tuple[Hook, ...]
    on_train_batch_begin: tuple[Hook, ...]
    on_train_batch_end: tuple[Hook, ...]
    on_test_begin: tuple[Hook, ...]
    on_test_end: tuple[Hook, ...]
    on_test_batch_begin: tuple[Hook, ...]
    on_test_batch_end: tuple[Hook, ...]
    on_predict_begin: tuple[Hook, ...]
    on_predict_end: tuple[Hook, ...]
    on_predict_batch_begin: tuple[Hook, ...]
    on_predict_batch_end: tuple[Hook, ...]

    def __init__(self, callbacks: Iterable[Callback] | Callback | None, model: Any, params: Mapping[str, Any]) -> None:
        if callbacks is None:
            callbacks = ()
        elif isinstance(callbacks, Callback):
            callbacks = (callbacks,)
        self.callbacks = list(callbacks)
        for callback in self.callbacks:
            if isinstance(callback, type) and issubclass(callback, Callback):
                raise InvalidArgumentError(
                    f"a callback is the class {callback.__name__}; call it: {callback.__name__}()"
                )
            # Callbacks of Keras work as well if they only use hooks, `logs` and `params`.
            if not callable(getattr(callback, "on_epoch_end", None)):
                raise InvalidArgumentError(
                    f"a callback must be an ortrain.callbacks.Callback, got {type(callback).__name__}; "
                    "LambdaCallback(on_epoch_end=f) makes one of a function"
                )
            callback.set_params(params)
            callback.set_model(model)
        self._bind()

    def _bind(self) -> None:
        for hook in _HOOKS:
            setattr(
                self, hook, tuple(getattr(callback, hook) for callback in self.callbacks if _overrides(callback, hook))
            )

    def __len__(self) -> int:
        return len(self.callbacks)

    def state(self) -> list[dict[str, Any]]:
        """Return the states of the callbacks, in their order, each with the name of the class."""
        return [
            {"class": type(callback).__name__, "state": callback.state() if hasattr(callback, "state") else {}}
            for callback in self.callbacks
        ]

    def restore(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Restore each callback from the first unused state of its class. Other callbacks start anew."""
        rest = list(states)
        for callback in self.callbacks:
            for index, saved in enumerate(rest):
                if saved["class"] == type(callback).__name__:
                    if hasattr(callback, "restore"):
                        callback.restore(saved["state"])
                    del rest[index]
                    break


def _overrides(callback: Any, hook: str) -> bool:
    """Returns true if a callback has its own code for a hook, or for the older name of the hook."""
    for name in (hook, _ALIASES.get(hook, hook)):
        method = getattr(callback, name, None)
        function = getattr(method, "__func__", method)
        if function is not None and function is not getattr(Callback, name) and not _is_empty_in_keras(function):
            return True
    return False


def _is_empty_in_keras(function: Any) -> bool:
    """Returns true if the function is a hook of Keras' base class, which does nothing."""
    return getattr(function, "__qualname__", "").startswith("Callback.") and (
        getattr(function, "__module__", "") or ""
    ).startswith(("keras.", "tf_keras."))
