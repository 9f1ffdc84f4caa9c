"""Callback that saves the model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortrain._model_source import PathLike
from ortrain.callbacks._callback import Logs
from ortrain.callbacks._messages import say
from ortrain.callbacks._monitor import MonitorCallback
from ortrain.errors import InvalidArgumentError


class ModelCheckpoint(MonitorCallback):
    """Save the model after each epoch, or after a number of steps.

    Args:
        filepath: the path to save to. Names in braces are filled in: ``{epoch}`` (from 1), ``{batch}`` and the names
            of ``logs``, such as ``{val_loss:.2f}``.
        monitor: the value in ``logs`` that decides which epoch is the best.
        verbose: 1 to print when the callback acts.
        save_best_only: True to save only if the value is better than all before.
        save_weights_only: True to write a checkpoint of the parameters, otherwise a folder by ``Model.save``.
        mode: ``"min"`` if the value should become small, ``"max"`` if large; ``"auto"`` decides by the name.
        save_freq: ``"epoch"``, or the number of steps between two saves.
        initial_value_threshold: the value that the first save has to beat, with ``save_best_only``.
        keep: the number of saves to keep; older ones of this callback are deleted. By default all are kept.

    Raises:
        InvalidArgumentError: for an unknown mode or ``save_freq``, and for ``keep`` below 1; during the training, for a
            name in braces that ``logs`` does not have.

    >>> from types import SimpleNamespace
    >>> from ortrain.callbacks import ModelCheckpoint
    >>> last_two = ModelCheckpoint("epoch-{epoch}", save_weights_only=True, keep=2)
    >>> last_two.set_model(SimpleNamespace(state=state))
    >>> for epoch in range(4):
    ...     last_two.on_epoch_end(epoch, {"loss": 0.5})
    >>> from pathlib import Path
    >>> sorted(path.name for path in Path().glob("epoch-*"))
    ['epoch-3', 'epoch-4']

    """

    def __init__(
        self,
        filepath: PathLike,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: int | str = "epoch",
        initial_value_threshold: float | None = None,
        keep: int | None = None,
    ) -> None:
        super().__init__(monitor, mode, initial_value_threshold)
        if save_freq != "epoch" and not (isinstance(save_freq, int) and save_freq > 0):
            raise InvalidArgumentError(f"save_freq must be 'epoch' or a positive number of steps, got {save_freq!r}")
        if keep is not None and keep < 1:
            raise InvalidArgumentError(f"keep must be at least 1, got {keep}")
        self.filepath = os.fspath(filepath)
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self.save_freq = save_freq
        self.keep = keep
        self.saved: list[str] = []
        """Paths of the saves that exist, the newest last."""
        self._epoch = 0
        self._steps = 0
        if isinstance(save_freq, int):
            # Bound here, so that a callback without it costs nothing at each step.
            self.on_train_batch_end = self._on_step  # type: ignore[method-assign]

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = epoch

    def _on_step(self, batch: int, logs: Logs = None) -> None:
        self._steps += 1
        if self._steps >= int(self.save_freq):
            self._steps = 0
            self._save(self._epoch, batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self.save_freq == "epoch":
            self._save(epoch, None, logs)

    def _save(self, epoch: int, batch: int | None, logs: Logs) -> None:
        logs = logs or {}
        if self.save_best_only:
            value = self._value(logs)
            # Without a value, the model is saved: a save too many loses nothing.
            if value is not None:
                if not self._is_improvement(value, self.best):
                    return
                self.best = value
        path = self._path(epoch, batch, logs)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if self.save_weights_only:
            # The class of the state, without an import that would be a cycle.
            type(self.model.state).save_checkpoint(self.model.state, path)
        else:
            self.model.save(path)
        if self.verbose:
            best = f" ({self.monitor} {self.best:.5g})" if self.save_best_only and self.best is not None else ""
            say(f"epoch {epoch + 1}: saved {path}{best}")
        self._discard_old(path)

    def _path(self, epoch: int, batch: int | None, logs: Mapping[str, Any]) -> str:
        names = {**logs, "epoch": epoch + 1}
        if batch is not None:
            names["batch"] = batch + 1
        try:
            return self.filepath.format(**names)
        except KeyError as error:
            raise InvalidArgumentError(
                f"the path {self.filepath!r} has the name {error}, but the names at this save are {', '.join(names)}"
            ) from error

    def _discard_old(self, newest: str) -> None:
        """Delete all but the last ``keep`` saves of this callback."""
        self.saved = [path for path in self.saved if path != newest] + [newest]
        while self.keep is not None and len(self.saved) > self.keep:
            old = Path(self.saved.pop(0))
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            else:
                # A large checkpoint has its values in a second file.
                old.unlink(missing_ok=True)
                old.with_name(old.name + ".data").unlink(missing_ok=True)

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "saved": self.saved, "steps": self._steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.saved, self._steps = state["best"], list(state["saved"]), int(state["steps"])
