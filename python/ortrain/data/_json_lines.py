"""JSON lines with texts, or pairs of texts, and for classification labels."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain._suggest import hint
from ortrain.data._common import check_classes, fingerprint, found_target, listed
from ortrain.data._settings import InputDescription, Settings
from ortrain.data._source import Batch
from ortrain.data._token_rows import TokenRows
from ortrain.data._tokens import BYTES, Tokenizer, Tokens, bucket_of, check_task, language_model_batch, text_inputs
from ortrain.errors import InvalidArgumentError

__all__ = ["SUFFIXES", "JsonLines"]

SUFFIXES = (".jsonl", ".ndjson")

_TEXT_NAMES = ("text", "sentence", "content")
# Fields of pairs of texts.
_PAIR_NAMES = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
)
# Characters of the texts that are tokenized at once.
_BLOCK_CHARACTERS = 1 << 20


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
        self._text, self._pair = _text_fields(first, settings, target, task, path)
        self._settings = replace(
            settings,
            task=task,
            text=self._text,
            text_pair=self._pair,
            length=self._inputs.length,
            target=target or settings.target,
            header=tuple(first),
        )
        # The target of a token is the token after it, so the parts of a text overlap by one token.
        shift = int(task == "causal-lm")
        self._tokenizer = Tokenizer(settings.tokenizer, self._inputs.length + shift, shift)
        check_task(self._settings, self._tokenizer)
        self.classes: Sequence[str] | None = settings.classes
        # A list as the label means several classes, even if each list has one.
        self.several_labels = False
        self._targets = None
        values = self._checked_values(target)
        if target is not None:
            self._targets = self._encoded(target, values)
            self._settings = replace(self._settings, classes=None if self.classes is None else tuple(self.classes))
        # A prediction has one row per line.
        self._rows: TokenRows | None = None
        if task != "classification" and labelled:
            self._rows = TokenRows(self._parts(), shortest=1 + shift)
            if not len(self._rows):
                raise InvalidArgumentError(f"{path}: no text has {1 + shift} tokens or more")

    def __len__(self) -> int:
        return len(self._offsets) if self._rows is None else len(self._rows)

    @property
    def labels(self) -> npt.NDArray[np.int64] | None:
        """Class of each row, if the target has integers or texts."""
        if self._targets is None or self._targets.dtype.kind == "f":
            return None
        return self._targets

    def take(self, rows: npt.NDArray[np.int64], seed: int, training: bool) -> Batch:
        """Read and tokenize rows. Without ``training`` the masked tokens of a row are always the same."""
        if self._rows is not None:
            encoded = [self._rows.tokens(int(row)) for row in rows]
        else:
            encoded = self._tokenizer.encode([self._text_of(int(row)) for row in rows])
        if self._settings.task != "classification":
            seed = seed if training else 0
            inputs, targets = language_model_batch(encoded, rows, seed, self._inputs, self._tokenizer, self._settings)
            return Batch(inputs, {"target": targets})
        tokens, segments = [row.ids for row in encoded], [row.segments for row in encoded]
        width = bucket_of(max(map(len, tokens), default=0), self._inputs, self._settings.buckets)
        found = self._inputs.values(tokens, width, self._tokenizer.padding, segments)
        return Batch(found, {} if self._targets is None else {"target": self._targets[rows]})

    def row_name(self, row: int) -> str:
        """Return the number of a row, from 0, and the number of the part if its text has several."""
        return f"row {row}" if self._rows is None else self._rows.name(row)

    def preview(self, row: int) -> str:
        """Return the text of a row, or both texts."""
        if self._rows is not None:
            return self._tokenizer.decode(self._rows.tokens(row).ids)
        text = self._text_of(row)
        return text if isinstance(text, str) else "\n".join(text)

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

    def _text_of(self, row: int) -> str | tuple[str, str]:
        """Return the text of a line, or its pair of texts."""
        found = self._object(row)
        text = str(found[self._text])
        return text if self._pair is None else (text, str(found[self._pair]))

    def _parts(self) -> Iterator[list[Tokens]]:
        """Yield the tokens of each line in parts; tokenize many lines at once."""
        texts: list[str | tuple[str, str]] = []
        characters, last = 0, len(self._offsets) - 1
        for line in range(len(self._offsets)):
            text = self._text_of(line)
            texts.append(text)
            characters += len(text)
            if characters < _BLOCK_CHARACTERS and line < last:
                continue
            if self._settings.truncate:
                yield from ([tokens] for tokens in self._tokenizer.encode(texts))
            else:
                yield from self._tokenizer.parts(texts)
            texts, characters = [], 0

    def _checked_values(self, target: str | None) -> list[Any]:
        """Check that each row has its texts, and return the targets."""
        values = []
        fields = [self._text] if self._pair is None else [self._text, self._pair]
        for row in range(len(self._offsets)):
            found = self._object(row)
            for field in fields:
                if not isinstance(found.get(field), str):
                    raise InvalidArgumentError(f"{self._path}: row {row} has no text in the field {field!r}")
            if target is not None:
                value = found.get(target)
                if value is None or isinstance(value, dict):
                    raise InvalidArgumentError(
                        f"{self._path}: row {row} has no label or number in the field {target!r}"
                    )
                values.append(value)
        return values

    def _encoded(self, target: str, values: list[Any]) -> npt.NDArray[Any]:
        """Return the targets as labels or numbers; lists of class names as zeros and ones per class."""
        kinds = {type(value) for value in values}
        place = f"{self._path}: the field {target!r}"
        if list in kinds:
            return self._encoded_lists(place, values)
        if kinds <= {int, bool}:
            return np.array(values, np.int64)
        if kinds <= {int, float, bool}:
            lacks = [row for row, value in enumerate(values) if value != value]
            if lacks:
                raise InvalidArgumentError(f"{place} is NaN in row {lacks[0]}")
            return np.array(values, np.float32)
        if kinds != {str}:
            raise InvalidArgumentError(f"{place} has both texts and numbers")
        index = self._class_index(values)
        labels = np.array([self._label(index, value, row) for row, value in enumerate(values)], np.int64)
        if self._settings.classes is None:
            assert self.classes is not None
            check_classes(labels, self.classes, self._path)
        return labels

    def _encoded_lists(self, place: str, values: list[Any]) -> npt.NDArray[Any]:
        """Return lists as rows: numbers as they are, and zeros and ones for the names of classes."""
        for row, value in enumerate(values):
            if not isinstance(value, list):
                raise InvalidArgumentError(f"{place} has {value!r} in row {row}, its other rows have lists")
        kinds = {type(element) for value in values for element in value}
        if kinds <= {int, float, bool} and kinds:
            sizes = [len(value) for value in values]
            wrong = [row for row, size in enumerate(sizes) if size != sizes[0]]
            if wrong:
                raise InvalidArgumentError(
                    f"{place} has {sizes[0]} numbers in row 0 and {sizes[wrong[0]]} in row {wrong[0]}; give names of "
                    "classes, or the same number of numbers in each row"
                )
            found = np.array(values, np.float32)
            if np.isnan(found).any():
                raise InvalidArgumentError(f"{place} is NaN in row {int(np.isnan(found).any(axis=1).argmax())}")
            self.several_labels = bool(np.isin(found, (0, 1)).all())
            return found
        if kinds and kinds != {str}:
            raise InvalidArgumentError(f"{place} has lists of other elements than names of classes, or numbers")
        index = self._class_index([name for value in values for name in value])
        if not index:
            raise InvalidArgumentError(f"{place} has no class in any row")
        self.several_labels = True
        found = np.zeros((len(values), len(index)), np.float32)
        for row, value in enumerate(values):
            for name in value:
                found[row, self._label(index, name, row)] = 1
        return found

    def _class_index(self, names: Sequence[str]) -> dict[str, int]:
        """Return the label of each class; without classes of the training data, the sorted names are the classes."""
        if self.classes is None:
            self.classes = tuple(sorted(set(names)))
        return {name: number for number, name in enumerate(self.classes)}

    def _label(self, index: Mapping[str, int], name: str, row: int) -> int:
        label = index.get(name)
        if label is None:
            raise InvalidArgumentError(
                f"{self._path}: row {row} has the class {name!r}, which the training data does not have; it has "
                f"{listed(index)}{hint(name, index)}"
            )
        return label


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


def _text_fields(
    first: Mapping[str, Any], settings: Settings, target: str | None, task: str, path: Path
) -> tuple[str, str | None]:
    """Return the field of the text, and the field of the second text of a pair.

    The default is a field with a usual name, or the only field with a text.

    Raises:
        InvalidArgumentError: if a chosen field is missing, the choice is not clear, or the texts cannot be pairs.

    """
    texts = [name for name, value in first.items() if isinstance(value, str) and name != target]
    text, pair = settings.text, settings.text_pair
    for name in (text, pair):
        if name is not None and name not in texts:
            raise InvalidArgumentError(f"{path} has no text field {name!r}; it has {listed(texts)}{hint(name, texts)}")
    if text is None and pair is None and task == "classification" and settings.tokenizer != BYTES:
        found = [names for names in _PAIR_NAMES if set(names) <= set(texts)]
        if len(found) == 1:
            return found[0]
    if pair is not None and task != "classification":
        raise InvalidArgumentError(f"text_pair is a setting of a classification; the task is {task}")
    if pair is not None and settings.tokenizer == BYTES:
        raise InvalidArgumentError("a pair of texts needs a tokenizer.json; the tokenizer bytes has no separator")
    texts = [name for name in texts if name != pair]
    if text is None:
        usual = [name for name in texts if name in _TEXT_NAMES]
        if len(usual) != 1 and len(texts) != 1:
            raise InvalidArgumentError(
                f"{path}: which field is the text? It has {listed(texts)}; choose with text= (--text)"
            )
        text = (usual or texts)[0]
    return text, pair
