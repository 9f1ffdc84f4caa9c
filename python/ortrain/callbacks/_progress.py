"""Progress bar of the running epoch."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import IO, Any

import numpy as np

from ortrain._fit.units import format_bytes, format_speed
from ortrain.callbacks._callback import Callback, Logs
from ortrain.callbacks._messages import missing

# Line of a terminal, with a bar of 12 characters.
_TEXT = "{desc} {bar:12} {n_fmt}/{total_fmt}{postfix}"
# Seconds between two updates of the line: a person reads no faster.
INTERVAL_SECONDS = 0.1
# Seconds between two updates for each second that an update takes: slow metrics cost one per cent.
INTERVAL_PER_COST = 100


class ProgressBar(Callback):
    """Show a bar of the running epoch: batches, loss, metrics, samples per second, time left and memory.

    ``fit`` adds one itself where ``verbose`` asks for it. The line changes at most ten times a second, and less often
    if the metrics are slow; between two changes, a step costs less than a microsecond. The package ``tqdm`` draws it,
    also in a notebook. With ``verbose=2``, an epoch is one line of text. Without tqdm, ``fit`` writes these lines.

    Args:
        file: the stream to write to; by default the standard error, or the output of a notebook's cell.

    Raises:
        ImportError: if tqdm is not installed.

    >>> import io
    >>> from ortrain.callbacks import ProgressBar
    >>> text = io.StringIO()
    >>> try:
    ...     bar = ProgressBar(file=text)
    ... except ImportError as error:
    ...     print(str(error).partition(";")[0])
    ... else:
    ...     print("a progress bar needs tqdm, which is not installed")
    a progress bar needs tqdm, which is not installed

    """

    def __init__(self, file: IO[str] | None = None) -> None:
        self._file = file
        self._bar_type: Any = self._find_bar_type()
        self._bar: Any = None
        self._next_update = 0.0
        self._start = 0.0
        self._trained_until: float | None = None
        self._first_batch = -1
        self._last_batch = -1
        self._epoch = 0

    def _find_bar_type(self) -> Any:
        return _bar_type(self._file)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = epoch
        self._begin(self._epoch_name())

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._last_batch = batch
        now = time.perf_counter()
        if now >= self._next_update:
            self._update(batch, logs, now)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._end(self._epoch_name(), logs)

    def on_train_end(self, logs: Logs = None) -> None:
        # An interrupted epoch has no end.
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def on_test_begin(self, logs: Logs = None) -> None:
        if "epochs" not in self.params:
            self._begin("evaluate")
        else:
            # The validation shows its progress in the line of the epoch, and does not count for the speed.
            self._trained_until = time.perf_counter()

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        if "epochs" not in self.params:
            self.on_train_batch_end(batch, logs)
            return
        now = time.perf_counter()
        if now >= self._next_update and self._bar is not None:
            self._next_update = now + INTERVAL_SECONDS
            self._bar.n = self._last_batch + 1
            self._bar.set_postfix_str(f"validation: batch {batch + 1}", refresh=True)

    def on_test_end(self, logs: Logs = None) -> None:
        if "epochs" not in self.params:
            self._end("evaluate", logs)

    def on_predict_begin(self, logs: Logs = None) -> None:
        self._begin("predict")

    def on_predict_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.on_train_batch_end(batch, None)

    def on_predict_end(self, logs: Logs = None) -> None:
        self._end("predict", None)

    def _begin(self, name: str) -> None:
        self._first_batch, self._last_batch = -1, -1
        self._start = time.perf_counter()
        self._next_update = self._start + INTERVAL_SECONDS
        self._trained_until = None
        if self._bar_type is not None and self.params.get("verbose") != 2:
            total = self.params.get("steps")
            shape = self._bar_type.shape if total else "{desc} {n_fmt} batches{postfix}"
            self._bar = self._bar_type(total=total, desc=name, file=self._file, dynamic_ncols=True, bar_format=shape)

    def _update(self, batch: int, logs: Logs, now: float) -> None:
        if self._first_batch < 0:
            # A resumed epoch begins in its middle; the batches before do not count for the speed.
            self._first_batch = batch
        if self._bar is not None:
            self._bar.n = batch + 1
            self._bar.set_postfix_str(", ".join(self._values(logs, now - self._start, remaining=True)), refresh=True)
        cost = time.perf_counter() - now
        self._next_update = now + max(INTERVAL_SECONDS, INTERVAL_PER_COST * cost)

    def _end(self, name: str, logs: Logs) -> None:
        seconds = time.perf_counter() - self._start
        values = ", ".join([*self._values(logs, seconds), f"{seconds:.1f} s"])
        if self._bar is None:
            batches = self._last_batch + 1
            file = sys.stderr if self._file is None else self._file
            file.write(f"{name} {batches}/{self.params.get('steps') or batches}, {values}\n")
            file.flush()
            return
        bar, self._bar = self._bar, None
        bar.n = self._last_batch + 1
        if self._bar_type.shape == _TEXT and bar.total:
            # The last line has all values, also in a narrow terminal, which breaks the line.
            bar.bar_format, bar.ncols, bar.dynamic_ncols = _TEXT.replace(" {bar:12}", ""), None, None
        bar.set_postfix_str(values, refresh=False)
        bar.close()

    def _epoch_name(self) -> str:
        epochs = self.params.get("epochs")
        return f"epoch {self._epoch + 1}" + (f"/{epochs}" if epochs else "")

    def _values(self, logs: Logs, seconds: float, remaining: bool = False) -> list[str]:
        """Return the parts of the line: values, speed, time left, memory."""
        batches = self._last_batch + 1 - max(self._first_batch, 0)
        if self._trained_until is not None:
            seconds = self._trained_until - self._start
        rate = batches / max(seconds, 1e-9)
        size, total = self.params.get("batch_size"), self.params.get("steps")
        parts = [f"{name} {value:.4g}" for name, value in metric_values(logs or {}).items()]
        parts.append(format_speed(rate * size, "samples") if size else format_speed(rate, "batches"))
        if remaining and total and batches:
            parts.append(f"{self._bar.format_interval((total - self._last_batch - 1) / rate)} left")
        memory = step_bytes(self.model)
        if memory:
            parts.append(format_bytes(memory))
        return parts


class EpochLines(ProgressBar):
    """Lines of a :class:`ProgressBar` with ``verbose=2``, which need no package."""

    def _find_bar_type(self) -> None:
        return None


def progress(verbose: int) -> ProgressBar:
    """Return the callback that shows the progress: a bar, or lines for ``verbose=2`` and without tqdm."""
    return EpochLines() if verbose == 2 or find_spec("tqdm") is None else ProgressBar()


def _bar_type(file: IO[str] | None) -> Any:
    """Return the class of tqdm for a notebook or a terminal."""
    try:
        import tqdm
    except ImportError as error:
        raise missing("a progress bar", "tqdm", "pip install 'ortrain[train]', or verbose=0") from error
    base: Any = tqdm.tqdm
    shape = _TEXT
    if file is None and in_notebook() and find_spec("ipywidgets") is not None:
        from tqdm import notebook

        # A widget replaces the bar, if it has no width.
        base, shape = notebook.tqdm, _TEXT.replace("{bar:12}", "{bar}")
    # tqdm's thread, which redraws bars that are not updated, is not needed: a process may fork.
    return type("Bar", (base,), {"monitor_interval": 0, "shape": shape})


def in_notebook() -> bool:
    """Returns true in the kernel of a notebook."""
    shell = sys.modules.get("IPython")
    running = None if shell is None else shell.get_ipython()
    return type(running).__name__ in ("ZMQInteractiveShell", "Shell")


def is_watched() -> bool:
    """Returns true if a person looks at the progress: at a terminal or in a notebook.

    ``verbose="auto"`` shows the progress then.
    """
    return in_notebook() or bool(getattr(sys.stderr, "isatty", bool)())


def step_bytes(model: Any) -> int | None:
    """Return the bytes that the step of a model takes, or ``None`` without a module."""
    memory: Any = getattr(getattr(model, "module", None), "memory", None)
    return None if memory is None else int(memory().total)


def metric_values(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of ``logs`` by name."""
    return {name: float(value) for name, value in logs.items() if isinstance(value, (int, float, np.number))}
