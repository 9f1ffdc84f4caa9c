"""Callbacks that record values: CSV files, TensorBoard, MLflow."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from ortrain import _files
from ortrain._model_source import PathLike
from ortrain.callbacks._callback import Callback, Logs
from ortrain.callbacks._messages import missing
from ortrain.errors import InvalidArgumentError


class CSVLogger(Callback):
    """Write a line of a CSV file after each epoch: ``epoch`` (from 0) and the values of ``logs``, sorted by name.

    The first epoch determines the columns. A value that a later epoch lacks is ``NA``. A resumed run adds lines.

    Args:
        filename: the file.
        separator: the character between two values.
        append: True to add to an existing file, otherwise it is replaced.

    >>> from ortrain.callbacks import CSVLogger
    >>> logger = CSVLogger("log.csv")
    >>> logger.on_train_begin()
    >>> logger.on_epoch_end(0, {"loss": 0.5, "val_loss": 0.75})
    >>> logger.on_train_end()
    >>> from pathlib import Path
    >>> print(Path("log.csv").read_text(), end="")
    epoch,loss,val_loss
    0,0.5,0.75

    """

    def __init__(self, filename: PathLike, separator: str = ",", append: bool = False) -> None:
        self.filename = os.fspath(filename)
        self.sep = separator
        self.append = append
        self.keys: list[str] | None = None
        self._file: IO[str] | None = None
        self._bytes: int | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        self._close()
        self.keys = None
        # The file is opened at the first epoch: a resumed run must not lose the lines that are there.
        self._bytes = None

    def _open(self) -> IO[str]:
        if self._file is None:
            path = Path(self.filename)
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = path.stat().st_size if path.exists() and (self.append or self._bytes is not None) else 0
            if self._bytes is not None:
                # Without the lines of epochs that the run will repeat.
                kept = min(kept, self._bytes)
            self._file = io.TextIOWrapper(_files.log(path, kept), newline="", encoding="utf-8")
        return self._file

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        logs = logs or {}
        file = self._open()
        if self.keys is None:
            self.keys = sorted(logs)
            if not any(key.startswith("val_") for key in self.keys):
                # Columns for a validation that begins in a later epoch.
                self.keys += [f"val_{key}" for key in self.keys]
        writer = csv.writer(file, delimiter=self.sep, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(["epoch", *self.keys])
        writer.writerow([epoch, *(_plain(logs.get(key, "NA")) for key in self.keys)])
        file.flush()
        self._bytes = file.tell()

    def on_train_end(self, logs: Logs = None) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def state(self) -> dict[str, Any]:
        return {"keys": self.keys, "bytes": self._bytes}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._close()
        self.keys, self._bytes = state["keys"], state["bytes"]


def _plain(value: Any) -> Any:
    """Return a number of NumPy as a number of Python, which prints all digits."""
    return value.item() if isinstance(value, np.generic) else value


class TensorBoard(Callback):
    """Write curves for TensorBoard, with the tags of Keras: ``epoch_loss``, ``batch_loss`` and so on.

    Training and validation are two runs, in the folders ``train`` and ``validation``, so that TensorBoard draws them in
    one picture. The package ``tensorboardX`` writes the files.

    Args:
        log_dir: the folder.
        histogram_freq: the number of epochs between two histograms of the trained parameters; 0 for none.
        write_steps_per_second: True to write the speed as well.
        update_freq: ``"epoch"``, ``"batch"``, or the number of steps between two points.

    Raises:
        ImportError: if tensorboardX is not installed.
        InvalidArgumentError: for an unknown ``update_freq``.

    >>> from ortrain.callbacks import TensorBoard
    >>> try:
    ...     board = TensorBoard("logs", update_freq=10)
    ... except ImportError as error:
    ...     print(str(error).partition(";")[0])
    ... else:
    ...     print("TensorBoard needs tensorboardX, which is not installed")
    TensorBoard needs tensorboardX, which is not installed

    """

    def __init__(
        self,
        log_dir: PathLike = "logs",
        histogram_freq: int = 0,
        write_steps_per_second: bool = False,
        update_freq: int | str = "epoch",
    ) -> None:
        if update_freq not in ("epoch", "batch") and not (isinstance(update_freq, int) and update_freq > 0):
            raise InvalidArgumentError(
                f"update_freq must be 'epoch', 'batch' or a positive number of steps, got {update_freq!r}"
            )
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise missing("TensorBoard", "tensorboardX", "pip install tensorboardX") from error
        self._make_writer = SummaryWriter
        self.log_dir = os.fspath(log_dir)
        self.histogram_freq = histogram_freq
        self.write_steps_per_second = write_steps_per_second
        self.update_freq = update_freq
        self._writers: dict[str, Any] = {}
        self._step = 0
        self._epoch_start = (0.0, 0)
        if update_freq == "epoch" and not write_steps_per_second:
            # Nothing to count: the hook of this callback costs nothing.
            self.on_train_batch_end = super().on_train_batch_end  # type: ignore[method-assign]

    def _writer(self, kind: str) -> Any:
        if kind not in self._writers:
            self._writers[kind] = self._make_writer(str(Path(self.log_dir, kind)))
        return self._writers[kind]

    def on_train_begin(self, logs: Logs = None) -> None:
        self._step = 0

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch_start = (time.perf_counter(), self._step)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        step = self._step
        self._step += 1
        if isinstance(self.update_freq, int):
            if self._step % self.update_freq:
                return
        elif self.update_freq == "epoch":
            return
        writer = self._writer("train")
        for name, value in (logs or {}).items():
            writer.add_scalar(f"batch_{name}", float(value), step)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        logs = dict(logs or {})
        if "learning_rate" not in logs and getattr(self.model, "optimizer", None) is not None:
            logs["learning_rate"] = self.model.optimizer.get_learning_rate()
        for name, value in logs.items():
            kind = "validation" if name.startswith("val_") else "train"
            self._writer(kind).add_scalar(f"epoch_{name.removeprefix('val_')}", float(value), epoch)
        if self.write_steps_per_second:
            start, first = self._epoch_start
            rate = (self._step - first) / max(time.perf_counter() - start, 1e-9)
            self._writer("train").add_scalar("epoch_steps_per_second", rate, epoch)
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            for name, parameter in self.model.state.parameters:
                if parameter.requires_grad:
                    self._writer("train").add_histogram(name, np.asarray(parameter.data, np.float32), epoch)
        for writer in self._writers.values():
            writer.flush()

    def on_train_end(self, logs: Logs = None) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def state(self) -> dict[str, Any]:
        return {"step": self._step}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._step = int(state["step"])


class MLflow(Callback):
    """Record the values of each epoch, and the settings of the run, in MLflow. The package is ``mlflow-skinny``.

    Args:
        tracking_uri: the address of a server (``http://...``), or a folder; by default the setting of MLflow
            (``MLFLOW_TRACKING_URI``).
        experiment_name: the experiment, which is made if it does not exist.
        run_name: the name of the run.
        run_id: an existing run to add to, instead of a new one.
        log_every_n_steps: the number of steps between two points; by default one point per epoch.
        params: further settings to record.

    Raises:
        ImportError: if MLflow is not installed.

    >>> from ortrain.callbacks import MLflow
    >>> try:
    ...     tracking = MLflow("mlruns", experiment_name="digits")
    ... except ImportError as error:
    ...     print(str(error).partition(";")[0])
    ... else:
    ...     print("MLflow needs mlflow-skinny, which is not installed")
    MLflow needs mlflow-skinny, which is not installed

    """

    def __init__(
        self,
        tracking_uri: PathLike | None = None,
        experiment_name: str = "Default",
        run_name: str | None = None,
        run_id: str | None = None,
        log_every_n_steps: int | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        if log_every_n_steps is not None and log_every_n_steps < 1:
            raise InvalidArgumentError(f"log_every_n_steps must be at least 1, got {log_every_n_steps}")
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise missing("MLflow", "mlflow-skinny", "pip install mlflow-skinny") from error
        uri = None if tracking_uri is None else os.fspath(tracking_uri)
        if uri is not None and ("://" not in uri or uri.startswith("file:")):
            # MLflow 3 refuses folders, unless the user allows them. This user names one.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            if not uri.startswith("file:"):
                uri = Path(uri).absolute().as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        self.experiment_name = experiment_name
        self.run_name = run_name
        self.run_id = run_id
        self.log_every_n_steps = log_every_n_steps
        self._extra = dict(params or {})
        self._given_run = run_id is not None
        self._step = 0
        if log_every_n_steps is not None:
            self.on_train_batch_end = self._on_step  # type: ignore[method-assign]

    def on_train_begin(self, logs: Logs = None) -> None:
        self._step = 0
        if not self._given_run:
            self.run_id = None

    def _run(self) -> str:
        """Return the run; the first call makes it, so that a resumed training adds to its own run."""
        if self.run_id is None:
            experiment = self._client.get_experiment_by_name(self.experiment_name)
            at = (
                self._client.create_experiment(self.experiment_name) if experiment is None else experiment.experiment_id
            )
            self.run_id = self._client.create_run(at, run_name=self.run_name).info.run_id
            for name, value in {**self.params, **self._extra}.items():
                if value is not None:
                    self._client.log_param(self.run_id, name, value)
        return self.run_id

    def _log(self, values: Iterable[tuple[str, Any]], step: int) -> None:
        run = self._run()
        for name, value in values:
            self._client.log_metric(run, name, float(value), step=step)

    def _on_step(self, batch: int, logs: Logs = None) -> None:
        self._step += 1
        if self.log_every_n_steps and self._step % self.log_every_n_steps == 0:
            self._log(((f"batch_{name}", value) for name, value in (logs or {}).items()), self._step)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._log((logs or {}).items(), epoch)

    def on_train_end(self, logs: Logs = None) -> None:
        self._client.set_terminated(self._run(), "FINISHED")

    def state(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "step": self._step}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.run_id, self._step = state["run_id"], int(state["step"])
