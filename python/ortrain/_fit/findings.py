"""Mistakes of a model on a set of rows: confusion matrix, residuals, and the rows with the largest losses."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain._fit.picture import is_picture, png
from ortrain.metrics import OutputForm
from ortrain.metrics._decode import Decoded, decode, softmax

# Rows that the picture of outputs over targets shows.
_MAX_PAIRS = 800
_SHOWN_COLUMNS = 12
_SHOWN_CHARACTERS = 600


@dataclass(frozen=True)
class Example:
    """Row with a large loss. One of ``picture``, ``text`` and ``columns`` shows its input."""

    target: str
    """Label or value."""
    output: str
    """Class or value of the model."""
    loss: float
    """Loss of the row."""
    name: str = ""
    """File or index of the row."""
    picture: bytes | None = None
    """PNG file."""
    text: str | None = None
    """Text of the row."""
    columns: Mapping[str, Any] | None = None
    """Values by column."""


@dataclass
class Findings:
    """Mistakes, collected batch by batch.

    Args:
        form: the form of the model's outputs.
        classes: the names of the classes; by default their indices.
        keep: the number of examples to keep.
        is_regression: True if targets are values.

    """

    form: OutputForm = field(default_factory=OutputForm)
    classes: Sequence[str] | None = None
    keep: int = 12
    is_regression: bool = False
    confusion: npt.NDArray[np.int64] | None = None
    """Number of rows by target (axis 0) and output (axis 1)."""
    rows: int = 0
    """Number of rows so far."""

    def __post_init__(self) -> None:
        self._worst: list[tuple[float, int, Example]] = []
        self._targets: list[npt.NDArray[Any]] = []
        self._outputs: list[npt.NDArray[Any]] = []

    def update(
        self,
        inputs: Mapping[str, Any],
        targets: Any,
        outputs: Any,
        names: Sequence[str] | None = None,
        texts: Sequence[str] | None = None,
    ) -> None:
        """Add a batch.

        Args:
            inputs: the inputs by name.
            targets: the labels or values.
            outputs: the outputs of the model.
            names: the files, or other names, of the rows.
            texts: the texts of the rows, in place of their inputs.

        """
        count = len(np.asarray(targets))
        if self.is_regression:
            labels, predicted, losses = self._regression(targets, outputs)
        else:
            labels, predicted, losses = self._classification(targets, outputs)
        if len(losses) != count:
            # Sequences: the loss of a row is the mean over its tokens.
            if not count or len(losses) % count:
                self.rows += count
                return
            losses = losses.reshape(count, -1).mean(1)
            labels = [f"{len(labels) // count} tokens"] * count
            predicted = [""] * count
        losses = np.nan_to_num(losses, nan=np.inf)
        for index in np.argsort(-losses, kind="stable")[: self.keep]:
            loss, row = float(losses[index]), self.rows + int(index)
            if loss <= 0 or (len(self._worst) == self.keep and loss <= self._worst[0][0]):
                break
            name = f"row {row:,}" if names is None else names[index]
            shown = {"text": texts[index][:_SHOWN_CHARACTERS]} if texts is not None else _shown(inputs, int(index))
            example = Example(str(labels[index]), str(predicted[index]), loss, name, **shown)
            # Among equal losses the first row stays.
            heapq.heappush(self._worst, (loss, -row, example))
            if len(self._worst) > self.keep:
                heapq.heappop(self._worst)
        self.rows += count

    @property
    def worst(self) -> list[Example]:
        """Rows with the largest losses, the largest first."""
        return [example for _, _, example in sorted(self._worst, key=lambda entry: entry[:2], reverse=True)]

    @property
    def pairs(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
        """Targets and outputs of a regression, or ``None``."""
        if not self._targets:
            return None
        return np.concatenate(self._targets), np.concatenate(self._outputs)

    def sampled_pairs(self) -> tuple[list[float], list[float]] | None:
        """Return targets and outputs of evenly spaced rows, few enough for a picture."""
        pairs = self.pairs
        if pairs is None:
            return None
        finite = np.isfinite(pairs[0]) & np.isfinite(pairs[1])
        targets, outputs = pairs[0][finite], pairs[1][finite]
        every = max(1, -(-len(targets) // _MAX_PAIRS))
        return targets[::every].tolist(), outputs[::every].tolist()

    def class_name(self, index: int) -> str:
        """Return the name of a class."""
        return str(self.classes[index]) if self.classes is not None and index < len(self.classes) else str(index)

    def _regression(self, targets: Any, outputs: Any) -> tuple[Sequence[Any], Sequence[Any], npt.NDArray[Any]]:
        first = np.asarray(targets, np.float64)
        second = np.asarray(outputs, np.float64).reshape(first.shape)
        self._targets.append(first.reshape(-1))
        self._outputs.append(second.reshape(-1))
        first, second = first.reshape(len(first), -1), second.reshape(len(first), -1)
        return [_values(row) for row in first], [_values(row) for row in second], ((first - second) ** 2).mean(1)

    def _classification(self, targets: Any, outputs: Any) -> tuple[Sequence[Any], Sequence[Any], npt.NDArray[Any]]:
        batch = decode(
            targets,
            outputs,
            name="report",
            task=self.form.task,
            class_axis=self.form.class_axis,
            ignore_index=self.form.ignore_index,
        )
        if batch.task != "multiclass":
            return self._decisions(batch)
        likely = batch.scores.astype(np.float64) if self.form.logits is False else softmax(batch.scores)
        labels = batch.labels.astype(np.int64, copy=False)
        predicted = batch.scores.argmax(1)
        self._count(labels, predicted, batch.scores.shape[1])
        with np.errstate(divide="ignore"):
            losses = -np.log(np.take_along_axis(likely, labels[:, None], 1)[:, 0])
        shares = np.take_along_axis(likely, predicted[:, None], 1)[:, 0]
        outputs = _Outputs(self, predicted, shares)
        return _Names(self, labels), outputs, losses

    def _decisions(self, batch: Decoded) -> tuple[Sequence[Any], Sequence[Any], npt.NDArray[Any]]:
        """Return labels, outputs and losses of binary decisions, of which a row may have several."""
        scores = batch.scores.astype(np.float64)
        likely = 1 / (1 + np.exp(-np.clip(scores, -500, 500))) if self.form.logits else np.clip(scores, 0, 1)
        truth = batch.labels > 0.5
        with np.errstate(divide="ignore"):
            losses = -np.log(np.where(truth, likely, 1 - likely))
        if batch.task == "binary":
            self._count(truth.astype(np.int64), (likely > 0.5).astype(np.int64), 2)
            chosen = (likely > 0.5).astype(np.int64)
            return (
                _Names(self, truth.astype(np.int64)),
                _Outputs(self, chosen, np.where(chosen, likely, 1 - likely)),
                losses,
            )
        found = [", ".join(self.class_name(k) for k in np.flatnonzero(row)) or "none" for row in truth]
        said = [", ".join(self.class_name(k) for k in np.flatnonzero(row)) or "none" for row in likely > 0.5]
        return found, said, losses.mean(1)

    def _count(self, labels: npt.NDArray[Any], predicted: npt.NDArray[Any], classes: int) -> None:
        counts = np.bincount(labels * classes + predicted, minlength=classes * classes).reshape(classes, classes)
        self.confusion = counts if self.confusion is None else self.confusion + counts


class _Names(Sequence[str]):
    """Names of classes; only those of the worst rows are made."""

    def __init__(self, findings: Findings, indices: npt.NDArray[Any]) -> None:
        self._findings, self._indices = findings, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._findings.class_name(int(self._indices[index]))


class _Outputs(_Names):
    """Names of classes with their probabilities."""

    def __init__(self, findings: Findings, indices: npt.NDArray[Any], shares: npt.NDArray[Any]) -> None:
        super().__init__(findings, indices)
        self._shares = shares

    def __getitem__(self, index: Any) -> Any:
        return f"{super().__getitem__(index)} ({self._shares[index]:.0%})"


def _values(row: npt.NDArray[Any]) -> str:
    return ", ".join(f"{value:.4g}" for value in row[:6]) + (" ..." if len(row) > 6 else "")


def _shown(inputs: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the input of a row in the form that a person sees best: a picture, or the first columns."""
    columns: dict[str, Any] = {}
    for name, values in inputs.items():
        row = np.asarray(values[index])
        if is_picture(row.shape) and row.dtype.kind in "fui":
            return {"picture": png(row)}
        if row.ndim == 0:
            columns[name] = row.item()
        else:
            flat = row.reshape(-1)
            room = _SHOWN_COLUMNS - len(columns)
            columns |= {f"{name}[{position}]": value.item() for position, value in enumerate(flat[: max(room, 0)])}
            if len(flat) > room:
                columns["..."] = f"{flat.size} values"
    return {"columns": columns}
