"""Callbacks that watch a value: early stopping, and the reduction of the learning rate."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from ortrain._stacklevel import level_of_user
from ortrain._suggest import hint
from ortrain.callbacks._callback import Callback, Logs
from ortrain.callbacks._messages import say
from ortrain.errors import InvalidArgumentError, TrainingWarning

# Names, without `val_`, of values that should become large or small.
_HIGHER = re.compile(
    r"(.*_)?(acc|accuracy|top_?\d+|precision|recall|f1|auc|auroc|roc_auc|r2)(_macro|_micro|_weighted)?"
)
_LOWER = re.compile(r"(.*_)?(loss|mae|mse|rmse|mean_(absolute|squared)_error|perplexity|error)")


def is_higher_better(monitor: str, model: Any) -> bool | None:
    """Return true if a value should become large, false if small, and ``None`` if unknown."""
    name = monitor.removeprefix("val_")
    for metric in getattr(model, "metrics", None) or ():
        own = getattr(metric, "name", None)
        direction = getattr(metric, "higher_is_better", None)
        if direction is not None and own and (name == own or name.endswith(f"_{own}")):
            return bool(direction)
    if _LOWER.fullmatch(name):
        return False
    return True if _HIGHER.fullmatch(name) else None


class MonitorCallback(Callback):
    """Base class of callbacks that watch a value of ``logs``."""

    def __init__(self, monitor: str, mode: str, best: float | None = None, min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise InvalidArgumentError(f"mode must be 'auto', 'min' or 'max', got {mode!r}")
        self.monitor = monitor
        self.mode = mode
        self.min_delta = abs(min_delta)
        self.best = best
        self._sign: int | None = None

    def _is_improvement(self, value: float, reference: float | None) -> bool:
        """Returns true if a value is better than the reference by more than ``min_delta``. NaN is never better."""
        if math.isnan(value):
            return False
        if reference is None or math.isnan(reference):
            return True
        sign = self._direction()
        return sign * value - self.min_delta > sign * reference

    def _direction(self) -> int:
        """Return 1 if a large value is good, and -1 if a small one is."""
        if self._sign is None:
            higher = self.mode == "max"
            if self.mode == "auto":
                known = is_higher_better(self.monitor, self.model)
                if known is None:
                    raise InvalidArgumentError(
                        f"{type(self).__name__} monitors {self.monitor!r}, which may be better large or small; "
                        "set mode='max' or mode='min'"
                    )
                higher = known
            self._sign = 1 if higher else -1
        return self._sign

    def _value(self, logs: Logs) -> float | None:
        """Return the value that is watched; without one, warn and return ``None``."""
        logs = logs or {}
        if self.monitor in logs:
            return float(logs[self.monitor])
        has = ", ".join(logs) or "nothing"
        remedy = "; pass validation_data or validation_split" if self.monitor.startswith("val_") else ""
        near = hint(self.monitor, logs)
        warnings.warn(
            f"{type(self).__name__} monitors {self.monitor!r}, but the epoch has {has}{near or remedy}",
            TrainingWarning,
            stacklevel=level_of_user(),
        )
        return None


class EarlyStopping(MonitorCallback):
    """End the training when a value has not improved for some epochs.

    Args:
        monitor: the value in ``logs``.
        min_delta: the change that counts as an improvement is larger than this.
        patience: the number of epochs without improvement after which the training ends.
        verbose: 1 to print when the callback acts.
        mode: ``"min"`` if the value should become small, ``"max"`` if large; ``"auto"`` decides by the name.
        baseline: a value that the training has to reach. ``patience`` counts until it is reached.
        restore_best_weights: True to restore the weights of the best epoch at the end.
        start_from_epoch: the number of epochs before the first that counts.

    Raises:
        InvalidArgumentError: for an unknown mode; during the training, for ``"auto"`` and an unknown name.

    >>> from types import SimpleNamespace
    >>> from ortrain.callbacks import EarlyStopping
    >>> stopping = EarlyStopping(patience=2, restore_best_weights=True)
    >>> stopping.set_model(SimpleNamespace(state=state, stop_training=False))
    >>> stopping.on_train_begin()
    >>> for epoch, loss in enumerate([0.5, 0.25, 0.375, 0.25]):
    ...     stopping.on_epoch_end(epoch, {"val_loss": loss})
    >>> stopping.model.stop_training, stopping.best, stopping.best_epoch
    (True, 0.25, 1)

    """

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__(monitor, mode, min_delta=min_delta)
        self.patience = patience
        self.verbose = verbose
        self.baseline = baseline
        self.restore_best_weights = restore_best_weights
        self.start_from_epoch = start_from_epoch
        self._reset()

    def _reset(self) -> None:
        self.wait = 0
        self.stopped_epoch = 0
        self.best = None
        self.best_epoch = 0
        self.best_weights: dict[str, Any] | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        # A callback may serve several trainings.
        self._reset()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        value = self._value(logs)
        if value is None or epoch < self.start_from_epoch:
            return
        if self.restore_best_weights and self.best_weights is None:
            self.best_weights = copy_weights(self.model)
            self.best_epoch = epoch
        self.wait += 1
        if self._is_improvement(value, self.best):
            self.best = value
            self.best_epoch = epoch
            if self.restore_best_weights:
                self.best_weights = copy_weights(self.model)
            if self.baseline is None or self._is_improvement(value, self.baseline):
                self.wait = 0
            return
        if self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.model.stop_training = True

    def on_train_end(self, logs: Logs = None) -> None:
        if self.stopped_epoch > 0 and self.verbose:
            say(f"epoch {self.stopped_epoch + 1}: {self.monitor} has not improved for {self.wait} epochs; stopped")
        if self.restore_best_weights and self.best_weights is not None:
            if self.verbose:
                say(f"restored the weights of epoch {self.best_epoch + 1}")
            put_weights(self.model, self.best_weights)

    def state(self) -> dict[str, Any]:
        weights = (
            {} if self.best_weights is None else {name: _bytes_of(data) for name, data in self.best_weights.items()}
        )
        return {
            "wait": self.wait,
            "stopped_epoch": self.stopped_epoch,
            "best": self.best,
            "best_epoch": self.best_epoch,
            "best_weights": weights,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.wait, self.stopped_epoch = int(state["wait"]), int(state["stopped_epoch"])
        self.best, self.best_epoch = state["best"], int(state["best_epoch"])
        self.best_weights = None
        if state["best_weights"]:
            parameters = self.model.state.parameters
            self.best_weights = {
                name: np.asarray(data).view(parameters[name].dtype).reshape(parameters[name].shape)
                for name, data in state["best_weights"].items()
            }


class ReduceLROnPlateau(MonitorCallback):
    """Reduce the learning rate when a value has not improved for some epochs.

    ``logs`` gets the entry ``learning_rate``. A ``schedule`` of ``fit`` overwrites a reduction at its next step, with a
    :class:`~ortrain.TrainingWarning`.

    Args:
        monitor: the value in ``logs``.
        factor: the factor of each reduction, below 1.
        patience: the number of epochs without improvement after which the rate is reduced.
        verbose: 1 to print when the callback acts.
        mode: ``"min"`` if the value should become small, ``"max"`` if large; ``"auto"`` decides by the name.
        min_delta: the change that counts as an improvement is larger than this.
        cooldown: the number of epochs after a reduction that do not count.
        min_lr: the lowest learning rate.

    Raises:
        InvalidArgumentError: for an unknown mode and for a factor of 1 or more.

    >>> from types import SimpleNamespace
    >>> from ortrain.callbacks import ReduceLROnPlateau
    >>> plateau = ReduceLROnPlateau(factor=0.5, patience=2)
    >>> plateau.set_model(SimpleNamespace(optimizer=optimizer))
    >>> optimizer.set_learning_rate(0.25)
    >>> for epoch, loss in enumerate([0.5, 0.75, 0.5]):
    ...     plateau.on_epoch_end(epoch, {"val_loss": loss})
    >>> optimizer.get_learning_rate()
    0.125

    """

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode, min_delta=min_delta)
        if factor >= 1:
            raise InvalidArgumentError(f"factor must be below 1, got {factor}")
        self.factor = factor
        self.patience = patience
        self.verbose = verbose
        self.cooldown = cooldown
        self.min_lr = min_lr
        self._reset()

    def _reset(self) -> None:
        self.best = None
        self.wait = 0
        self.cooldown_counter = 0
        self._reduced: float | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        self._reset()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        rate = self.model.optimizer.get_learning_rate()
        if logs is not None:
            logs["learning_rate"] = rate
        if self._reduced is not None and rate != self._reduced:
            warnings.warn(
                f"the learning rate was reduced to {self._reduced:.6g}, but is {rate:.6g} now: a schedule or another "
                "callback sets it; use one of them",
                TrainingWarning,
                stacklevel=level_of_user(),
            )
            self._reduced = None
        value = self._value(logs)
        if value is None:
            return
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.wait = 0
        if self._is_improvement(value, self.best):
            self.best = value
            self.wait = 0
        elif self.cooldown_counter <= 0:
            self.wait += 1
            if self.wait >= self.patience and self._reduce(epoch):
                self.cooldown_counter = self.cooldown
                self.wait = 0

    def _reduce(self, epoch: int) -> bool:
        """Reduce the learning rate; returns false if it is the lowest one already."""
        optimizer = self.model.optimizer
        rate = optimizer.get_learning_rate()
        if rate <= np.float32(self.min_lr):
            return False
        reduced = max(rate * self.factor, self.min_lr)
        optimizer.set_learning_rate(reduced)
        self._reduced = optimizer.get_learning_rate()
        if self.verbose:
            say(f"epoch {epoch + 1}: learning rate reduced to {reduced:.6g}")
        return True

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "wait": self.wait, "cooldown_counter": self.cooldown_counter}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.wait = state["best"], int(state["wait"])
        self.cooldown_counter = int(state["cooldown_counter"])


def copy_weights(model: Any) -> dict[str, Any]:
    """Return copies of all parameters, including running statistics, by name."""
    return {name: np.array(parameter.data) for name, parameter in model.state.parameters}


def put_weights(model: Any, weights: Mapping[str, Any]) -> None:
    """Set the parameters to copies. Moments and step of the optimizer stay as they are."""
    for name, parameter in model.state.parameters:
        # A frozen parameter has its values still: writing them would discard packed copies of them.
        if parameter.requires_grad or _bytes_of(parameter.data).tobytes() != _bytes_of(weights[name]).tobytes():
            parameter.data = weights[name]


def _bytes_of(values: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of an array, which also holds types that NumPy's files lack, such as bfloat16."""
    return np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
