"""Mistakes of a model on a set of rows: confusion matrix, residuals, and the rows with the largest losses."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain._fit.picture import is_picture, png
from ortrain.metrics import OutputForm
from ortrain.metrics._decode import Decoded, decode, sigmoid, softmax

# Rows that the picture of outputs over targets shows.
_MAX_PAIRS = 800
# Classes of a confusion matrix; a vocabulary has more.
_MAX_CLASSES = 1000
_SHOWN_COLUMNS = 12
_SHOWN_CHARACTERS = 600


@dataclass(frozen=True)
class Example:
    """Row with a large loss. One of ``picture``, ``text``, ``columns`` and ``series`` shows its input."""

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
    series: Sequence[float] | None = None
    """Values in an order, such as a time series."""


@dataclass(frozen=True)
class _Row:
    """Row with a large loss. The report reads its content."""

    target: str
    output: str
    name: Callable[[], str]
    content: Callable[[], Any]

    def example(self, loss: float) -> Example:
        content = self.content()
        shown: dict[str, Any] = {}
        if isinstance(content, bytes):
            shown["picture"] = content
        elif isinstance(content, str):
            long = len(content) > _SHOWN_CHARACTERS
            shown["text"] = content[:_SHOWN_CHARACTERS] + (" ..." if long else "")
        elif isinstance(content, Mapping):
            shown["columns"] = content
        elif isinstance(content, np.ndarray):
            shown["series"] = content.tolist()
        return Example(self.target, self.output, loss, self.name(), **shown)


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
    decisions: npt.NDArray[np.int64] | None = None
    """Right decisions, positive outputs and positive targets (axis 0) of each label (axis 1), if rows have several."""
    rows: int = 0
    """Number of rows so far."""

    def __post_init__(self) -> None:
        self._worst: list[tuple[float, int, _Row]] = []
        self._targets: list[npt.NDArray[Any]] = []
        self._outputs: list[npt.NDArray[Any]] = []

    def update(
        self,
        inputs: Mapping[str, Any],
        targets: Any,
        outputs: Any,
        name: Callable[[int], str] | None = None,
        preview: Callable[[int], Any] | None = None,
    ) -> None:
        """Add a batch.

        Args:
            inputs: the inputs by name.
            targets: the labels or values.
            outputs: the outputs of the model.
            name: returns the file, or another name, of a row of the batch; called later, for few rows.
            preview: returns the content of a row of the batch, in place of its inputs: PNG bytes, a text, or values by
                column; called later, for few rows.

        """
        count = len(np.asarray(targets))
        if self.is_regression:
            labels, predicted, losses = self._regression(targets, outputs)
        else:
            labels, predicted, losses = self._classification(targets, outputs)
        if len(losses) != count:
            losses, tokens = self._means_of_rows(np.asarray(targets), losses)
            labels, predicted = [f"{number} tokens" for number in tokens], [""] * count
        losses = np.nan_to_num(losses, nan=np.inf)
        for index in map(int, np.argsort(-losses, kind="stable")[: self.keep]):
            loss, row = float(losses[index]), self.rows + index
            if loss <= 0 or (len(self._worst) == self.keep and loss <= self._worst[0][0]):
                break
            found = _Row(
                str(labels[index]),
                str(predicted[index]),
                partial(name, index) if name is not None else partial("row {:,}".format, row),
                partial(preview, index) if preview is not None else partial(_shown, _copied(inputs, index)),
            )
            # Among equal losses the first row stays.
            heapq.heappush(self._worst, (loss, -row, found))
            if len(self._worst) > self.keep:
                heapq.heappop(self._worst)
        self.rows += count

    def _means_of_rows(
        self, targets: npt.NDArray[Any], losses: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Return the mean loss of each row over its tokens, and the number of tokens that count."""
        tokens = targets.reshape(-1)
        counted = np.arange(len(tokens))
        if self.form.ignore_index is not None:
            counted = np.flatnonzero(tokens != self.form.ignore_index)
        owners = counted // (len(tokens) // len(targets))
        numbers = np.bincount(owners, minlength=len(targets))
        return np.bincount(owners, losses, len(targets)) / np.maximum(numbers, 1), numbers

    @property
    def worst(self) -> list[Example]:
        """Rows with the largest losses, the largest first."""
        entries = sorted(self._worst, key=lambda entry: entry[:2], reverse=True)
        return [row.example(loss) for loss, _, row in entries]

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
        values, guesses = first.reshape(len(first), -1), second.reshape(len(first), -1)
        return [_values(row) for row in values], [_values(row) for row in guesses], ((values - guesses) ** 2).mean(1)

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
        likely = sigmoid(scores) if self.form.logits else np.clip(scores, 0, 1)
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
        said_yes = likely > 0.5
        counts = np.array([(truth & said_yes).sum(0), said_yes.sum(0), truth.sum(0)])
        self.decisions = counts if self.decisions is None else self.decisions + counts
        found = [", ".join(self.class_name(int(k)) for k in np.flatnonzero(row)) or "none" for row in truth]
        said = [", ".join(self.class_name(int(k)) for k in np.flatnonzero(row)) or "none" for row in said_yes]
        return found, said, losses.mean(1)

    def _count(self, labels: npt.NDArray[Any], predicted: npt.NDArray[Any], classes: int) -> None:
        if classes > _MAX_CLASSES:
            return
        counts = np.bincount(labels * classes + predicted, minlength=classes * classes).reshape(classes, classes)
        self.confusion = counts if self.confusion is None else self.confusion + counts


class _Names(Sequence[str]):
    """Names of classes, made on access."""

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


def _copied(inputs: Mapping[str, Any], index: int) -> dict[str, npt.NDArray[Any]]:
    """Return the inputs of a row. The memory of the batch may be used again."""
    return {name: np.array(values[index]) for name, values in inputs.items()}


def _shown(inputs: Mapping[str, npt.NDArray[Any]]) -> Any:
    """Return the input of a row in the form that a person sees best: a picture, a series, or the first columns."""
    if len(inputs) == 1:
        (row,) = inputs.values()
        if row.dtype.kind == "f" and row.size == max(row.shape, default=1) > _SHOWN_COLUMNS:
            side = math.isqrt(row.size)
            # Pixels in a row, as the digits of many a first example are.
            return png(row.reshape(side, side)) if side * side == row.size else row.reshape(-1)
    columns: dict[str, Any] = {}
    for name, row in inputs.items():
        if is_picture(row.shape) and row.dtype.kind in "fui":
            return png(row)
        if row.ndim == 0:
            columns[name] = row.item()
        else:
            flat = row.reshape(-1)
            room = max(_SHOWN_COLUMNS - len(columns), 0)
            columns |= {f"{name}[{position}]": value.item() for position, value in enumerate(flat[:room])}
            if len(flat) > room:
                columns["..."] = f"{flat.size} values"
    return columns
