"""Command ``ortrain predict``."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain import _files
from ortrain._command.option import UsageError
from ortrain._command.output import say
from ortrain._command.sources import model_file, model_to_load, open_data, require, run_config, session_options
from ortrain._fit.description import Description, describe
from ortrain._fit.model import Model
from ortrain.data import FileSource
from ortrain.errors import InvalidArgumentError

__all__ = ["predict"]

_FORMS = (".csv", ".jsonl", ".npz")


def predict(settings: Mapping[str, Any]) -> int:
    """Write the outputs of a model for each row of files."""
    require(settings, "data")
    target = Path(settings["out"]) if "out" in settings else None
    if target is not None and target.suffix.lower() not in _FORMS:
        raise UsageError(f"--out must end in {', '.join(_FORMS)}, got {target}")
    path, config = model_file(settings["model"]), run_config(settings["model"])
    description = describe(path)
    source = open_data(settings["data"], settings, description, like=config.get("data"), labelled=False)
    arguments = {name: settings[name] for name in ("device", "precision", "memory_limit") if name in settings}
    model = Model(model_to_load(settings["model"]), session_options=session_options(settings), **arguments)
    found = model.predict(source, batch_size=settings.get("batch_size"))
    outputs = found if isinstance(found, dict) else {description.outputs[0].name: found}
    loss = str(config.get("settings", {}).get("loss", ""))
    table = Predictions(source, outputs, _chosen(source, outputs, description, loss))
    if target is None:
        sys.stdout.write(table.csv())
        return 0
    writers = {".csv": lambda: table.csv().encode(), ".jsonl": table.json_lines, ".npz": table.npz}
    _files.write(target, writers[target.suffix.lower()]())
    say("data", f"{len(source):,} rows")
    say("predictions", str(target))
    return 0


def _chosen(
    source: FileSource, outputs: Mapping[str, npt.NDArray[Any]], description: Description, loss: str
) -> npt.NDArray[np.int64] | None:
    """Return the class with the highest score of each row, if the model chooses between classes."""
    if len(outputs) != 1 or not (source.classes is not None or "cross-entropy" in loss):
        return None
    if "binary cross-entropy" in loss:
        # A row may have several classes.
        return None
    (scores,) = outputs.values()
    axis = description.outputs[0].class_axis
    if scores.ndim != 2 or axis != 1 or scores.shape[1] < 2:
        return None
    if source.classes is not None and len(source.classes) != scores.shape[1]:
        return None
    chosen: npt.NDArray[np.int64] = scores.argmax(axis=1).astype(np.int64)
    return chosen


class Predictions:
    """Outputs of a model by row, and the chosen class if there are classes."""

    def __init__(
        self, source: FileSource, outputs: Mapping[str, npt.NDArray[Any]], chosen: npt.NDArray[np.int64] | None
    ) -> None:
        self.outputs, self.chosen = outputs, chosen
        self.rows = [source.row_name(row) for row in range(len(source))]
        names = source.classes
        fits = len(outputs) == 1 and all(
            names is not None and found.shape[1:] == (len(names),) for found in outputs.values()
        )
        self.classes: Sequence[str] | None = names if fits else None

    def csv(self) -> str:
        """Return a table with a column for each number of a row.

        Raises:
            InvalidArgumentError: if a row of an output is no list of numbers.

        """
        columns: dict[str, Sequence[Any]] = {"row": self.rows}
        if self.chosen is not None:
            columns["prediction"] = self._names()
        for name, values in self.outputs.items():
            if values.ndim > 2:
                raise InvalidArgumentError(
                    f"the output {name!r} has the shape {list(values.shape)}, a line of CSV holds one list of numbers; "
                    "write a .npz file"
                )
            columns.update(self._columns(name, values))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        return text.getvalue()

    def json_lines(self) -> bytes:
        """Return an object for each row."""
        names = self._names()
        lines = []
        for row, name in enumerate(self.rows):
            found: dict[str, Any] = {"row": name}
            if names:
                found["prediction"] = names[row]
            found |= {output: _plain(values[row]) for output, values in self.outputs.items()}
            lines.append(json.dumps(found) + "\n")
        return "".join(lines).encode()

    def npz(self) -> bytes:
        """Return the arrays of the outputs."""
        arrays: dict[str, Any] = {"row": np.array(self.rows), **self.outputs}
        if self.chosen is not None:
            arrays["prediction"] = np.array(self._names())
        return _files.npz(arrays)

    def _columns(self, name: str, values: npt.NDArray[Any]) -> dict[str, list[Any]]:
        """Return the columns of an output by their names."""
        if values.ndim == 1 or values.shape[1] == 1:
            return {name: _plain(values.reshape(-1))}
        parts = range(values.shape[1]) if self.classes is None else self.classes
        return {f"{name}.{part}": _plain(column) for part, column in zip(parts, values.T, strict=True)}

    def _names(self) -> list[Any]:
        if self.chosen is None:
            return []
        return [label if self.classes is None else self.classes[label] for label in self.chosen.tolist()]


def _plain(values: npt.NDArray[Any]) -> Any:
    """Return nested lists; a float of 32 or 16 bits has the fewest digits that give it back."""
    if values.dtype.kind != "f" or values.dtype.itemsize > 4:
        return values.tolist()
    if values.ndim == 0:
        return float(str(values[()]))
    return [_plain(each) for each in values]
