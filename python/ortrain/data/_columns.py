"""Columns of a table as numbers: kinds and categories of the training data, and compact arrays on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain._extras import required
from ortrain._suggest import hint
from ortrain.data._common import listed
from ortrain.data._table_file import MISSING, TableFile, is_number
from ortrain.errors import InvalidArgumentError

__all__ = ["Column", "encode", "learn", "outlier_message"]

# Most categories of a text column. A column with more is an identifier or a free text.
_MAX_CATEGORIES = 1000
# Number of different texts, and share of numbers among them, from which the first other text is a probable mistake.
_MIN_NUMBERS, _SHARE_OF_NUMBERS = 10, 0.9


@dataclass(frozen=True)
class Column:
    """Kind of a column."""

    name: str
    is_integer: bool
    categories: tuple[str, ...] | None
    """Sorted texts of a text column; ``None`` for numbers."""
    outlier: tuple[int, str] | None = None
    """First text, with its row, of a text column whose other rows are nearly all numbers."""


class _Learning:
    """Kind of a column, as far as its rows are read."""

    def __init__(self, compute: Any, arrow: Any) -> None:
        self._compute, self._arrow = compute, arrow
        self.kind = "integer"
        self.texts: set[str] = set()
        self.first_text: tuple[int, str] | None = None

    def add(self, values: Any, start: int) -> None:
        """Read a block of texts."""
        compute = self._compute
        if len(self.texts) <= _MAX_CATEGORIES:
            self.texts.update(compute.unique(values).to_pylist())
        trimmed = compute.utf8_trim_whitespace(values)
        present = trimmed.filter(compute.invert(compute.is_in(trimmed, value_set=self._arrow.array(MISSING))))
        if self.kind == "integer" and not _casts(present, self._arrow.int64(), self._arrow):
            self.kind = "number"
        if self.kind == "number" and not _casts(present, self._arrow.float64(), self._arrow):
            self.kind = "text"
            rows = ((start + row, text) for row, text in enumerate(trimmed.to_pylist()) if text not in MISSING)
            self.first_text = next((each for each in rows if not is_number(each[1])), None)

    def outlier(self) -> tuple[int, str] | None:
        """Return the first text if nearly all other texts are numbers."""
        numbers = sum(map(is_number, self.texts))
        is_mostly_numbers = len(self.texts) >= _MIN_NUMBERS and numbers >= _SHARE_OF_NUMBERS * len(self.texts)
        return self.first_text if is_mostly_numbers else None


def _casts(values: Any, kind: Any, arrow: Any) -> bool:
    try:
        values.cast(kind)
    except arrow.ArrowInvalid:
        return False
    return True


def learn(file: TableFile, names: Sequence[str], unlimited: Sequence[str]) -> list[Column]:
    """Return the kinds of columns and the categories of text columns.

    Args:
        file: the table.
        names: the columns.
        unlimited: the columns that may have any number of categories: targets.

    Raises:
        InvalidArgumentError: if a column is neither of numbers nor of texts, or has too many categories.

    """
    arrow = required("pyarrow", "pyarrow", "train", "a table")
    compute = required("pyarrow.compute", "pyarrow", "train", "a table")
    kinds = {name: file.kind_of(name) for name in names}
    for name, kind in kinds.items():
        if kind not in ("integer", "number", "text"):
            raise InvalidArgumentError(
                f"{file.path}: the column {name!r} has the type {kind}; convert it to numbers or texts, or choose "
                "others with columns= (--columns)"
            )
    learning = {name: _Learning(compute, arrow) for name, kind in kinds.items() if kind == "text"}
    start = 0
    for block in file.blocks(list(learning)) if learning else ():
        for name, state in learning.items():
            values = _as_texts(block[name], arrow, compute)
            state.add(values, start)
            if not file.is_csv:
                state.kind = "text"
        start += len(next(iter(block.values())))
    columns = []
    for name, kind in kinds.items():
        state_of = learning.get(name)
        kind = kind if state_of is None else state_of.kind
        if state_of is None or kind != "text":
            columns.append(Column(name, kind == "integer", None))
            continue
        outlier = state_of.outlier()
        if len(state_of.texts) > _MAX_CATEGORIES and outlier is not None and name not in unlimited:
            raise InvalidArgumentError(outlier_message(file.path, name, outlier))
        if len(state_of.texts) > _MAX_CATEGORIES and name not in unlimited:
            raise InvalidArgumentError(
                f"{file.path}: the column {name!r} has more than {_MAX_CATEGORIES} different texts, such as "
                f"{sorted(state_of.texts)[0]!r}; leave it out with columns= (--columns)"
            )
        columns.append(Column(name, False, tuple(sorted(state_of.texts)), outlier))
    return columns


def outlier_message(path: Path, name: str, outlier: tuple[int, str]) -> str:
    """Return the message about a text in a column of numbers."""
    return f"{path}: the column {name!r} has {outlier[1]!r} in row {outlier[0]}, nearly all other rows have numbers"


def _as_texts(values: Any, arrow: Any, compute: Any) -> Any:
    """Return a column as texts; a missing text is the empty text."""
    if arrow.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    return compute.fill_null(values.cast(arrow.string()), "")


def encode(file: TableFile, columns: Sequence[Column]) -> dict[str, npt.NDArray[Any]]:
    """Return the numbers of columns as arrays on disk: int64 or float64, and the index of a text in its categories.

    Raises:
        InvalidArgumentError: for a missing value, a text in a column of numbers, and a text that is no category; with
            its row.

    """
    arrow = required("pyarrow", "pyarrow", "train", "a table")
    compute = required("pyarrow.compute", "pyarrow", "train", "a table")
    dtypes: Mapping[str, npt.DTypeLike] = {column.name: _dtype(column) for column in columns}
    names = [column.name for column in columns]
    rows = 0
    with ExitStack() as stack:
        spools = {name: stack.enter_context(tempfile.TemporaryFile()) for name in names}
        for block in file.blocks(names):
            for column in columns:
                values = block[column.name]
                if column.categories is None:
                    found = _numbers(values, column, rows, file, arrow, compute)
                else:
                    found = _indices(values, column, rows, file.path, arrow, compute)
                spools[column.name].write(found.astype(dtypes[column.name], copy=False).tobytes())
            rows += len(block[names[0]])
        if not rows:
            raise InvalidArgumentError(f"{file.path} has no rows")
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, spool in spools.items():
            spool.flush()
            # The map has its own handle of the file, which it outlives.
            arrays[name] = np.memmap(spool, dtypes[name], "r", shape=(rows,))
    return arrays


def _dtype(column: Column) -> npt.DTypeLike:
    if column.categories is not None:
        return np.int32
    return np.int64 if column.is_integer else np.float64


def _numbers(values: Any, column: Column, start: int, file: TableFile, arrow: Any, compute: Any) -> npt.NDArray[Any]:
    """Return the numbers of a block."""
    place = f"{file.path}: the column {column.name!r}"
    kind = arrow.int64() if column.is_integer else arrow.float64()
    if file.is_csv:
        values = compute.utf8_trim_whitespace(values)
        lacks = compute.is_in(values, value_set=arrow.array(MISSING))
        values = compute.if_else(lacks, None, values)
    elif arrow.types.is_decimal(values.type):
        values = values.cast(arrow.float64())
    if values.null_count:
        row = start + int(compute.index(compute.is_null(values), True).as_py())
        raise InvalidArgumentError(f"{place} has no value in row {row}")
    try:
        found: npt.NDArray[Any] = values.cast(kind).to_numpy(zero_copy_only=False)
    except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError) as error:
        for row, value in enumerate(values.to_pylist(), start):
            if not _casts(arrow.array([value]), kind, arrow):
                number = "integers" if column.is_integer else "numbers"
                raise InvalidArgumentError(
                    f"{place} has {value!r} in row {row}, its other rows are {number}"
                ) from error
        raise
    if found.dtype.kind == "f" and np.isnan(found).any():
        raise InvalidArgumentError(f"{place} is NaN in row {start + int(np.isnan(found).argmax())}")
    return found


def _indices(values: Any, column: Column, start: int, path: Path, arrow: Any, compute: Any) -> npt.NDArray[Any]:
    """Return the indices of the texts of a block in the categories."""
    assert column.categories is not None
    if not (arrow.types.is_dictionary(values.type) or arrow.types.is_string(values.type)):
        values = values.cast(arrow.string())
    texts = _as_texts(values, arrow, compute)
    found = compute.index_in(texts, value_set=arrow.array(column.categories, arrow.string()))
    if found.null_count:
        row = int(compute.index(compute.is_null(found), True).as_py())
        text = texts[row].as_py()
        raise InvalidArgumentError(
            f"{path}: the column {column.name!r} has {text!r} in row {start + row}, which the training data does not "
            f"have; it has {listed(map(repr, column.categories))}{hint(text, column.categories)}"
        )
    indices: npt.NDArray[Any] = found.to_numpy(zero_copy_only=False)
    return indices
