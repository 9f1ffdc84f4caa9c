"""JSON lines with texts and, for classification, labels."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain._suggest import hint
from ortrain.data._common import check_classes, fingerprint, found_target, listed
from ortrain.data._settings import InputDescription, Settings
from ortrain.data._source import Batch
from ortrain.data._tokens import Tokenizer, bucket_of, check_task, language_model_batch, text_inputs
from ortrain.errors import InvalidArgumentError

__all__ = ["SUFFIXES", "JsonLines"]

SUFFIXES = (".jsonl", ".ndjson")

_TEXT_NAMES = ("text", "sentence", "content")


class JsonLines:
    """Texts of a file with one JSON object per line."""

    kind = "jsonl"

    def __init__(
        self, path: Path, settings: Settings, inputs: Sequence[InputDescription], *, labelled: bool = True
    ) -> None:
        if settings.tokenizer is None:
            raise InvalidArgumentError(
                f"{path}: texts need a tokenizer: tokenizer='tokenizer.json' (--tokenizer tokenizer.json)"
            )
        self._path = path
        self._inputs = text_inputs(inputs, settings)
        self._offsets = _line_offsets(path)
        with path.open("rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        first = self._object(0)
        task = settings.task
        needed = labelled and task in (None, "classification")
        target = None
        if needed:
            if isinstance(settings.target, tuple):
                raise InvalidArgumentError("texts have one target")
            target = found_target(
                list(first), settings.target, path, "field", needed=task is not None or settings.target is not None
            )
        task = task or ("classification" if target is not None or settings.header is not None else "causal-lm")
        self._text = _text_field(first, settings.text, target, path)
        self._settings = replace(
            settings,
            task=task,
            text=self._text,
            length=self._inputs.length,
            target=target or settings.target,
            header=tuple(first),
        )
        self._tokenizer = Tokenizer(settings.tokenizer, self._inputs.length + (task == "causal-lm"))
        check_task(self._settings, self._tokenizer)
        self.classes: Sequence[str] | None = settings.classes
        self._targets = None
        values = self._checked_values(target)
        if target is not None:
            self._targets = self._encoded(target, values)
            self._settings = replace(self._settings, classes=None if self.classes is None else tuple(self.classes))

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def labels(self) -> npt.NDArray[np.int64] | None:
        """Class of each row, if the target has integers or texts."""
        if self._targets is None or self._targets.dtype.kind == "f":
            return None
        return self._targets

    def take(self, rows: npt.NDArray[np.int64], seed: int, training: bool) -> Batch:
        """Read and tokenize rows. Without ``training`` the masked tokens of a row are always the same."""
        encoded = self._tokenizer.encode([self._object(int(row))[self._text] for row in rows])
        if self._settings.task != "classification":
            seed = seed if training else 0
            inputs, targets = language_model_batch(encoded, rows, seed, self._inputs, self._tokenizer, self._settings)
            return Batch(inputs, {"target": targets})
        tokens = [ids for ids, _ in encoded]
        width = bucket_of(max(map(len, tokens), default=0), self._inputs, self._settings.buckets)
        found = self._inputs.values(tokens, width, self._tokenizer.padding)
        return Batch(found, {} if self._targets is None else {"target": self._targets[rows]})

    def row_name(self, row: int) -> str:
        """Return the number of a row, from 0."""
        return f"row {row}"

    def preview(self, row: int) -> str:
        """Return the text of a row."""
        return str(self._object(row)[self._text])

    def describe(self) -> Mapping[str, Any]:
        """Return kind, sizes, settings and a hash of the file."""
        return {
            "kind": self.kind,
            "rows": len(self),
            "hash": fingerprint([self._path], self._path),
            "settings": self._settings.as_json(),
        }

    def _object(self, row: int) -> Mapping[str, Any]:
        """Parse the object of a row."""
        start = int(self._offsets[row])
        end = self._content.find(b"\n", start)
        line = self._content[start : len(self._content) if end < 0 else end]
        try:
            found = json.loads(line)
        except ValueError as error:
            raise InvalidArgumentError(f"{self._path}: row {row} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise InvalidArgumentError(
                f'{self._path}: row {row} must be an object such as {{"text": "...", "label": "..."}}, got '
                f"{type(found).__name__}"
            )
        return found

    def _checked_values(self, target: str | None) -> list[Any]:
        """Check that each row has a text, and return the targets."""
        values = []
        for row in range(len(self)):
            found = self._object(row)
            if not isinstance(found.get(self._text), str):
                raise InvalidArgumentError(f"{self._path}: row {row} has no text in the field {self._text!r}")
            if target is not None:
                value = found.get(target)
                if value is None or isinstance(value, (list, dict)):
                    raise InvalidArgumentError(
                        f"{self._path}: row {row} has no label or number in the field {target!r}"
                    )
                values.append(value)
        return values

    def _encoded(self, target: str, values: list[Any]) -> npt.NDArray[Any]:
        """Return the targets as labels or numbers."""
        kinds = {type(value) for value in values}
        if kinds <= {int, bool}:
            return np.array(values, np.int64)
        if kinds <= {int, float, bool}:
            lacks = [row for row, value in enumerate(values) if value != value]
            if lacks:
                raise InvalidArgumentError(f"{self._path}: the field {target!r} is NaN in row {lacks[0]}")
            return np.array(values, np.float32)
        if kinds != {str}:
            raise InvalidArgumentError(f"{self._path}: the field {target!r} has both texts and numbers")
        if self.classes is None:
            self.classes = tuple(sorted(set(values)))
        index = {name: number for number, name in enumerate(self.classes)}
        for row, value in enumerate(values):
            if value not in index:
                raise InvalidArgumentError(
                    f"{self._path}: row {row} has the class {value!r}, which the training data does not have; it has "
                    f"{listed(self.classes)}{hint(value, self.classes)}"
                )
        labels = np.array([index[value] for value in values], np.int64)
        if self._settings.classes is None:
            check_classes(labels, self.classes, self._path)
        return labels


def _line_offsets(path: Path) -> npt.NDArray[np.int64]:
    """Return where each line with content starts."""
    offsets, at = [], 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                offsets.append(at)
            at += len(line)
    if not offsets:
        raise InvalidArgumentError(f"{path} is empty; expected one JSON object per line")
    return np.array(offsets, np.int64)


def _text_field(first: Mapping[str, Any], chosen: str | None, target: str | None, path: Path) -> str:
    """Return the field of the text: the chosen one, one with a usual name, or the only one with a text."""
    texts = [name for name, value in first.items() if isinstance(value, str) and name != target]
    if chosen is not None:
        if chosen not in texts:
            raise InvalidArgumentError(f"{path} has no text field {chosen!r}; it has {listed(texts)}")
        return chosen
    usual = [name for name in texts if name in _TEXT_NAMES]
    if len(usual) == 1 or len(texts) == 1:
        return (usual or texts)[0]
    raise InvalidArgumentError(f"{path}: which field is the text? It has {listed(texts)}; choose with text= (--text)")
