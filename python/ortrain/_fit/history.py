"""History of a training: loss and metrics by epoch and by step."""

from __future__ import annotations

import csv
import io
import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortrain import _files
from ortrain.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ortrain._fit.report import Report
    from ortrain._model_source import PathLike


class History(Mapping[str, list[float]]):
    """History of a training: a mapping of lists, each with one value per epoch.

    ``fit`` returns it. Its keys are ``loss``, the names of the metrics, and both with the prefix ``val_``.

    Args:
        params: settings of the run, as callbacks get them.

    >>> import ortrain
    >>> history = ortrain.History()
    >>> history.add_epoch(0, {"loss": 0.75, "val_loss": 0.5})
    >>> history.add_epoch(1, {"loss": 0.25, "val_loss": 0.5})
    >>> history["loss"]
    [0.75, 0.25]
    >>> list(history), history.epoch
    (['loss', 'val_loss'], [0, 1])
    >>> min(history["val_loss"])
    0.5

    """

    epoch: list[int]
    """Number of each epoch, from zero."""
    history: dict[str, list[float]]
    """Lists by name, as a plain dictionary."""
    params: Mapping[str, Any]
    """Settings of the run: ``epochs``, ``steps``, ``batch_size``."""

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        self.params = dict(params or {})
        self.epoch = []
        self.history = {}
        # Epochs of each list: a metric may be missing in some epochs.
        self._epochs: dict[str, list[int]] = {}
        self._steps: dict[str, array[float]] = {}
        # Makes a report with the data of the run; `fit` sets it.
        self._make_report: Callable[[], Report] | None = None

    def __getitem__(self, name: str) -> list[float]:
        if name not in self.history:
            from ortrain._suggest import hint

            raise KeyError(
                f"{name!r} is not in the history; it has {', '.join(self.history)}{hint(name, self.history)}"
            )
        return self.history[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.history)

    def __len__(self) -> int:
        return len(self.history)

    def __repr__(self) -> str:
        last = ", ".join(f"{name}={values[-1]:.4g}" for name, values in self.history.items())
        return f"History({len(self.epoch)} epochs{': ' if last else ''}{last})"

    def __getstate__(self) -> dict[str, Any]:
        # The data of the run stay behind.
        return self.__dict__ | {"_make_report": None}

    def add_epoch(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Append the values of an epoch.

        >>> import ortrain
        >>> history = ortrain.History()
        >>> history.add_epoch(0, {"loss": np.float32(0.5)})
        >>> history.history
        {'loss': [0.5]}
        """
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(float(value))
            self._epochs.setdefault(name, []).append(epoch)

    def add_steps(self, **columns: Any) -> None:
        """Append values of consecutive steps: arrays of one length, such as ``loss`` and ``learning_rate``.

        >>> import ortrain
        >>> history = ortrain.History()
        >>> history.add_steps(loss=[2.5, 2.0], learning_rate=[0.5, 0.25])
        >>> history.steps["learning_rate"]
        [0.5, 0.25]
        """
        for name, values in columns.items():
            self._steps.setdefault(name, array("d")).extend(map(float, values))

    @property
    def steps(self) -> dict[str, list[float]]:
        """Lists by name, with one value per step.

        >>> import ortrain
        >>> ortrain.History().steps
        {}
        """
        return {name: values.tolist() for name, values in self._steps.items()}

    def rows(self) -> list[dict[str, float]]:
        """Return one mapping per epoch: ``epoch`` and the values that the epoch has.

        >>> import ortrain
        >>> history = ortrain.History()
        >>> history.add_epoch(0, {"loss": 0.5})
        >>> history.rows()
        [{'epoch': 0, 'loss': 0.5}]
        """
        by_epoch: dict[int, dict[str, float]] = {epoch: {"epoch": epoch} for epoch in self.epoch}
        for name, values in self.history.items():
            for epoch, value in zip(self._epochs[name], values, strict=True):
                by_epoch[epoch][name] = value
        return list(by_epoch.values())

    def to_csv(self, path: PathLike) -> None:
        """Write one line per epoch. A value that an epoch lacks is empty; :meth:`read_csv` reads the same bits.

        >>> import ortrain
        >>> history = ortrain.History()
        >>> history.add_epoch(0, {"loss": 0.5, "accuracy": 0.75})
        >>> history.to_csv("history.csv")
        >>> from pathlib import Path
        >>> print(Path("history.csv").read_text(), end="")
        epoch,loss,accuracy
        0,0.5,0.75

        """
        text = io.StringIO()
        writer = csv.DictWriter(text, ["epoch", *self.history], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: repr(value) for name, value in row.items()} for row in self.rows())
        _files.write(path, text.getvalue().encode())

    @staticmethod
    def read_csv(path: PathLike) -> History:
        """Return the history that :meth:`to_csv` wrote.

        Raises:
            InvalidArgumentError: if the file is no history.

        >>> import ortrain
        >>> history = ortrain.History()
        >>> history.add_epoch(0, {"loss": 0.1})
        >>> history.to_csv("history.csv")
        >>> ortrain.History.read_csv("history.csv") == history
        True

        """
        history = History()
        with Path(os.fspath(path)).open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                try:
                    values = {name: float(text) for name, text in row.items() if name != "epoch" and text}
                    history.add_epoch(int(row["epoch"]), values)
                except (KeyError, TypeError, ValueError) as error:
                    raise InvalidArgumentError(f"{os.fspath(path)}, line {number}: not a line of a history") from error
        return history

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with one row per epoch and the epoch as its index.

        Raises:
            ImportError: if pandas is not installed.

        >>> import ortrain
        >>> history = ortrain.History()
        >>> history.add_epoch(0, {"loss": 0.5})
        >>> try:
        ...     frame = history.to_pandas()
        ... except ImportError as error:
        ...     print(str(error).partition(";")[0])
        ... else:
        ...     print("to_pandas needs pandas, which is not installed")
        to_pandas needs pandas, which is not installed

        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_pandas needs pandas, which is not installed; to_csv writes a file") from error
        rows = self.rows()
        return pd.DataFrame(rows, columns=["epoch", *self.history]).set_index("epoch")

    def plot(self, names: Any = None, axes: Any = None) -> Any:
        """Draw loss and metrics with matplotlib, training and validation in one picture, and return the axes.

        Args:
            names: the names to draw, without ``val_``; by default all.
            axes: one ``matplotlib.axes.Axes`` per name; by default a new figure.

        Raises:
            ImportError: if matplotlib is not installed.
            InvalidArgumentError: if the history is empty, or has no such name.

        >>> import ortrain
        >>> history = ortrain.History()
        >>> history.add_epoch(0, {"loss": 0.5, "val_loss": 0.75})
        >>> try:
        ...     axes = history.plot()
        ... except ImportError as error:
        ...     print(str(error).partition(";")[0])
        ... else:
        ...     print("a plot needs matplotlib, which is not installed")
        a plot needs matplotlib, which is not installed

        """
        names = self.curve_names() if names is None else [names] if isinstance(names, str) else list(names)
        for name in names:
            if name not in self.history and f"val_{name}" not in self.history:
                raise InvalidArgumentError(f"{name!r} is not in the history; it has {', '.join(self.curve_names())}")
        if not names:
            raise InvalidArgumentError("the history is empty: no epoch has ended")
        if axes is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise ImportError(
                    "a plot needs matplotlib, which is not installed; pip install 'ortrain[train]', or write a report, "
                    "which needs no package"
                ) from error
            figure = pyplot.figure(figsize=(5 * len(names), 3.5), layout="constrained")
            axes = [figure.add_subplot(1, len(names), index + 1) for index in range(len(names))]
        drawn = [axes] if hasattr(axes, "plot") else list(axes)
        for ax, name in zip(drawn, names, strict=True):
            for key, label in ((name, "training"), (f"val_{name}", "validation")):
                if key in self.history:
                    epochs = [epoch + 1 for epoch in self._epochs[key]]
                    ax.plot(epochs, self.history[key], label=label, marker="o" if len(epochs) == 1 else None)
            ax.set(xlabel="epoch", title=name)
            ax.legend()
        return axes

    def curve_names(self) -> list[str]:
        """Return the names without ``val_``, each once: one per picture of training and validation.

        >>> import ortrain
        >>> history = ortrain.History()
        >>> history.add_epoch(0, {"loss": 0.5, "val_loss": 0.75, "lr": 0.1})
        >>> history.curve_names()
        ['loss', 'lr']
        """
        return list(dict.fromkeys(name.removeprefix("val_") for name in self.history))

    def report(self, path: PathLike) -> Path:
        """Write a report as one HTML file and return its path; the file needs no network.

        It has the curves, the confusion matrix or the residuals, the examples with the largest loss, the trained
        parameters, time and memory of a step, and the settings. A history that ``fit`` did not return has the curves
        alone.

        >>> import ortrain
        >>> history = ortrain.History()
        >>> history.add_epoch(0, {"loss": 0.5})
        >>> history.report("report.html").name
        'report.html'
        """
        from ortrain._fit.report import Report, write_report

        report = Report(history=self) if self._make_report is None else self._make_report()
        return write_report(path, report)

    def state(self) -> dict[str, Any]:
        """Return all values, as :meth:`restore` takes them: lists and NumPy arrays.

        >>> import ortrain
        >>> ortrain.History().state()
        {'epochs': [], 'steps': {}}
        """
        import numpy as np

        epochs: list[dict[str, Any]] = [dict(row) for row in self.rows()]
        return {"epochs": epochs, "steps": {name: np.array(values) for name, values in self._steps.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace all values by the result of :meth:`state`.

        >>> import ortrain
        >>> history, other = ortrain.History(), ortrain.History()
        >>> history.add_epoch(3, {"loss": 0.5})
        >>> other.restore(history.state())
        >>> other == history, other.epoch
        (True, [3])
        """
        self.epoch, self.history, self._epochs = [], {}, {}
        for row in state["epochs"]:
            self.add_epoch(int(row["epoch"]), {name: value for name, value in row.items() if name != "epoch"})
        self._steps = {name: array("d", values) for name, values in state["steps"].items()}
