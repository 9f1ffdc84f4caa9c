"""Folder of a run: checkpoints, history, settings, the trained model and the report."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ortrain import _files
from ortrain._fit.range_test import RangeTest
from ortrain._ortrain import __version__
from ortrain.api import CheckpointState
from ortrain.errors import InvalidArgumentError, OrtrainError

__all__ = ["RunFolder"]

_CONFIG, _LAST, _BEST, _HISTORY = "config.json", "last", "best", "history.csv"
_TRAINED, _REPORT = "trained.onnx", "report.html"
# Loss and learning rate of each step, as numbers of 8 bytes.
_STEPS = "steps.bin"
# Property of a checkpoint with the position of the run.
_POSITION = "ortrain.fit"
_ARRAY = "__array__"
# Settings of a run that may differ when it goes on.
_FREE = ("epochs", "verbose", "checkpoint_every", "device", "memory_limit")


class RunFolder:
    """Folder of a run. Each file is replaced atomically, so a killed process leaves a folder that can go on.

    Args:
        path: the folder; it is created.
        every: the number of steps (an integer) or seconds (a float) between two checkpoints of an epoch.

    """

    def __init__(self, path: str | os.PathLike[str], every: int | float | None) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise InvalidArgumentError(f"{self.path} is a file, but a run is kept in a folder; name a folder")
        self._every = every
        self._steps = 0
        self._saved_at = time.monotonic()
        self._before: set[str] | None = None
        self.best: float | None = None

    @property
    def has_run(self) -> bool:
        """True if the folder holds a run that can go on."""
        return (self.path / _LAST).is_file()

    def is_due(self, step: int) -> bool:
        """Return True if the position is to be saved after this step."""
        if isinstance(self._every, float):
            return time.monotonic() - self._saved_at >= self._every
        self._steps += 1
        return self._every is not None and self._steps >= self._every

    def begin(self, config: Mapping[str, Any]) -> None:
        """Write the settings of a run, and compare them with the settings of a run in the folder.

        Raises:
            InvalidArgumentError: if the folder holds a run of another model, other data or other settings, or the
                settings of another program.

        """
        self._before = {path.name for path in self.path.iterdir()} if self.path.is_dir() else None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OrtrainError(f"the folder {self.path} cannot be made: {error.strerror}; use another one") from error
        config = json.loads(json.dumps({"version": __version__, **config}, default=str))
        if self.has_run:
            self._compare(config)
        elif (self.path / _CONFIG).exists() and "settings" not in self._config():
            raise InvalidArgumentError(f"{self.path / _CONFIG} is a file of another program; use another folder")
        _files.write(self.path / _CONFIG, json.dumps(config, indent=2).encode() + b"\n")

    def discard(self) -> None:
        """Remove the settings of a run that has saved nothing, and the folder if :meth:`begin` made it."""
        if any((self.path / name).exists() for name in (_LAST, _BEST)) or not self.path.is_dir():
            return
        for path in (self.path / _CONFIG, self.path / _STEPS):
            if path.name not in (self._before or ()):
                path.unlink(missing_ok=True)
        if self._before is None and not any(self.path.iterdir()):
            self.path.rmdir()

    def _config(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.path / _CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise OrtrainError(f"{self.path / _CONFIG} cannot be read; use another folder ({error})") from error
        return found

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run that the folder holds."""
        settings: dict[str, Any] = self._config()["settings"]
        return settings

    def range_test(self) -> RangeTest | None:
        """Return the range test of the run that the folder holds."""
        found = self._config().get("range_test")
        return None if found is None else RangeTest(**found)

    def _compare(self, config: Mapping[str, Any]) -> None:
        before = self._config()
        for key, what in (
            ("model", "another model"),
            ("data", "other data"),
            ("validation_data", "other validation data"),
        ):
            if before.get(key) != config.get(key):
                raise InvalidArgumentError(
                    f"{self.path} holds a run of {what} ({_difference(before.get(key), config.get(key))}); use another "
                    "folder"
                )
        old, new = before.get("settings", {}), config["settings"]
        for name in {**old, **new}:
            if name not in _FREE and old.get(name) != new.get(name):
                raise InvalidArgumentError(
                    f"{self.path} holds a run with {name}={old.get(name)!r}, not {new.get(name)!r}; use the same "
                    "value, or another folder"
                )

    def load(self) -> tuple[CheckpointState, dict[str, Any]]:
        """Return the state and the position of the last checkpoint.

        Raises:
            OrtrainError: if the checkpoint is damaged, or is not one of a run.

        """
        state = CheckpointState.load_checkpoint(self.path / _LAST)
        if _POSITION not in state.properties:
            raise InvalidArgumentError(
                f"{self.path / _LAST} is a checkpoint, but not one of a run of fit; use another folder"
            )
        saved = json.loads(str(state.properties[_POSITION]))
        arrays: Mapping[str, Any] = {}
        if saved["arrays"]:
            with np.load(self.path / saved["arrays"], allow_pickle=False) as content:
                arrays = dict(content)
        position: dict[str, Any] = _unpacked(saved["position"], arrays)
        position["history"]["steps"] = self._logged_steps(saved["steps"])
        self.best = position.get("best")
        return state, position

    def save(self, state: CheckpointState, position: Mapping[str, Any]) -> None:
        """Write the last checkpoint with a position.

        Raises:
            OrtrainError, OSError: if a file cannot be written. The checkpoint before is still there.

        """
        arrays: dict[str, Any] = {}
        history = dict(position["history"])
        logged = self._log_steps(history.pop("steps"))
        packed = _packed({**position, "history": history, "best": self.best}, arrays)
        name = None
        if arrays:
            # The names alternate: the checkpoint on disk names a file that is complete.
            name = f"last.{int(self._newest() != 1)}.npz"
            _files.write(self.path / name, _files.npz(arrays))
        state.properties[_POSITION] = json.dumps({"arrays": name, "steps": logged, "position": packed})
        CheckpointState.save_checkpoint(state, self.path / _LAST, include_optimizer_state=True)
        self._arrays = name
        self._steps, self._saved_at = 0, time.monotonic()

    _arrays: str | None = None
    _logged = 0

    def _log_steps(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Append the new values of steps to their file: a long run does not write all of them again."""
        names = list(columns)
        rows = np.stack([np.asarray(columns[name], np.float64) for name in names], 1) if names else np.empty((0, 1))
        # A resumed run computes the values of steps after the last checkpoint again.
        with _files.log(self.path / _STEPS, self._logged * len(names) * 8) as file:
            file.write(rows[self._logged :].tobytes())
            file.flush()
            os.fsync(file.fileno())
        self._logged = len(rows)
        return {"names": names, "count": len(rows)}

    def _logged_steps(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        names, count = saved["names"], int(saved["count"])
        self._logged = count
        if not count:
            return {}
        content = np.fromfile(self.path / _STEPS, np.float64, count * len(names))
        if len(content) < count * len(names):
            raise OrtrainError(f"{self.path / _STEPS} is shorter than the checkpoint says; use another folder")
        return dict(zip(names, content.reshape(count, len(names)).T, strict=True))

    def _newest(self) -> int | None:
        """Return the number of the array file that the checkpoint on disk names."""
        if self._arrays is None and self.has_run:
            state = CheckpointState.load_checkpoint(self.path / _LAST)
            if _POSITION in state.properties:
                self._arrays = json.loads(str(state.properties[_POSITION]))["arrays"]
        return None if self._arrays is None else int(self._arrays.split(".")[1])

    def save_best(self, state: CheckpointState, logs: Mapping[str, float]) -> None:
        """Write the best checkpoint if the loss of the validation, or of the training, is the lowest one."""
        value = float(logs.get("val_loss", logs.get("loss", math.nan)))
        if math.isnan(value) or (self.best is not None and value >= self.best):
            return
        CheckpointState.save_checkpoint(state, self.path / _BEST)
        self.best = value

    def write_history(self, history: Any) -> None:
        """Write ``history.csv``."""
        history.to_csv(self.path / _HISTORY)

    @property
    def trained(self) -> Path:
        """Path of the trained model."""
        return self.path / _TRAINED

    @property
    def report(self) -> Path:
        """Path of the report."""
        return self.path / _REPORT


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                return f"{name}: {_difference(before.get(name), now.get(name))}"
    return f"{_shortened(before)} there, {_shortened(now)} here"


def _shortened(value: Any) -> str:
    """Return the beginning of a long text, such as a hash."""
    text = repr(value)
    return f"{text[:13]}...'" if isinstance(value, str) and len(text) > 40 else f"{text:.60}"


def _packed(value: Any, arrays: dict[str, Any]) -> Any:
    """Return JSON values; arrays get names and are collected."""
    if isinstance(value, Mapping):
        return {str(name): _packed(each, arrays) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_packed(each, arrays) for each in value]
    if isinstance(value, np.ndarray):
        if not value.size and value.dtype.kind == "f":
            return []
        name = f"a{len(arrays)}"
        arrays[name] = value
        return {_ARRAY: name}
    if isinstance(value, np.generic):
        return value.item()
    return value


def _unpacked(value: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        if _ARRAY in value:
            return arrays[value[_ARRAY]]
        return {name: _unpacked(each, arrays) for name, each in value.items()}
    return [_unpacked(each, arrays) for each in value] if isinstance(value, list) else value
