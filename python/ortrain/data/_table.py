"""Tables as sources of rows: which column fills which input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain._suggest import hint
from ortrain.data._columns import Column, encode, learn, outlier_message
from ortrain.data._common import converted, dtype_of, fingerprint, found_target, listed, to_sizes
from ortrain.data._settings import InputDescription, Settings
from ortrain.data._source import Batch
from ortrain.data._table_file import TableFile
from ortrain.errors import InvalidArgumentError

__all__ = ["Table"]


@dataclass(frozen=True)
class Filling:
    """Columns of one input of the model."""

    name: str
    dtype: np.dtype[Any]
    rank: int
    columns: list[Column]

    def width(self) -> int:
        """Return the numbers per row."""
        return sum(self._width_of(column) for column in self.columns)

    def names(self) -> list[str]:
        """Return the names of the columns."""
        return [column.name for column in self.columns]

    def _width_of(self, column: Column) -> int:
        return len(column.categories) if self.one_hot(column) and column.categories is not None else 1

    def one_hot(self, column: Column) -> bool:
        """Return True if the texts of a column become one number per category, rather than an index or a text."""
        return column.categories is not None and self.dtype.kind == "f"

    def values(self, arrays: Mapping[str, npt.NDArray[Any]], rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the values of rows."""
        parts = []
        for column in self.columns:
            found = np.asarray(arrays[column.name][rows])
            if self.one_hot(column):
                assert column.categories is not None
                part = (found[:, None] == np.arange(len(column.categories))).astype(self.dtype)
            elif self.dtype == object:
                names = np.array(column.categories or (), object)
                part = names[found][:, None] if len(names) else found.astype(str).astype(object)[:, None]
            else:
                part = converted(found, self.dtype, f"the column {column.name!r}")[:, None]
            parts.append(part)
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return joined[:, 0] if self.rank == 1 else joined


def fillings(columns: Sequence[Column], inputs: Sequence[InputDescription], path: Path) -> list[Filling]:
    """Return the columns of each input: the column of its name, or all others.

    Raises:
        InvalidArgumentError: if an input gets no columns, or another number of them than it takes.

    """
    if not inputs:
        return [Filling("x", np.dtype(np.float32), 2, list(columns))]
    by_name = {column.name: column for column in columns}
    open_inputs = [described for described in inputs if described.name not in by_name]
    names = {described.name for described in inputs}
    rest = [column for column in columns if column.name not in names]
    if len(open_inputs) > 1 or (open_inputs and not rest):
        missing = open_inputs[0].name
        raise InvalidArgumentError(
            f"{path} has no column for the model's input {missing!r}; it has {listed(by_name)}{hint(missing, by_name)}"
        )
    found = []
    for described in inputs:
        own = [by_name[described.name]] if described.name in by_name else rest
        filling = Filling(described.name, dtype_of(described), len(described.shape or []), own)
        _check_width(filling, to_sizes(described), path)
        found.append(filling)
    return found


def _check_width(filling: Filling, sizes: list[int | None], path: Path) -> None:
    """Check the number of columns of an input."""
    if len(sizes) > 1:
        raise InvalidArgumentError(
            f"a table fills inputs with 1 or 2 axes, the model's input {filling.name!r} has {len(sizes) + 1}"
        )
    expected = sizes[0] if sizes else 1
    width = filling.width()
    if expected not in (None, width):
        parts = listed(
            f"{column.name} ({len(column.categories)} categories)"
            if filling.one_hot(column) and column.categories
            else column.name
            for column in filling.columns
        )
        for column in filling.columns:
            if column.outlier is not None:
                raise InvalidArgumentError(outlier_message(path, column.name, column.outlier))
        raise InvalidArgumentError(
            f"{path}: the model's input {filling.name!r} takes {expected} numbers per row, the columns give {width}: "
            f"{parts}; choose them with columns= (--columns)"
        )


class Table:
    """Rows of a CSV, Parquet or Arrow file."""

    kind = "table"

    def __init__(
        self, path: Path, settings: Settings, inputs: Sequence[InputDescription], *, labelled: bool = True
    ) -> None:
        self._path = path
        file = TableFile(path)
        targets = self._target_names(file, settings, labelled)
        names = self._feature_names(file, settings, targets, labelled)
        for described in inputs:
            if described.name in targets and described.name not in names:
                raise InvalidArgumentError(
                    f"the model's input {described.name!r} is the target; choose another column with target= (--target)"
                )
        if settings.categories is None:
            columns = learn(file, [*names, *targets], targets)
        else:
            known = settings.categories
            integers = settings.integers or ()
            columns = [Column(name, name in integers, known.get(name)) for name in [*names, *targets]]
        self._columns, self._targets = columns[: len(names)], columns[len(names) :]
        self._fillings = fillings(self._columns, inputs, path)
        used = {name for filling in self._fillings for name in filling.names()}
        self._columns = [column for column in self._columns if column.name in used]
        self._weight = self._weight_column(file, settings, labelled)
        weight = [self._weight] if self._weight is not None else []
        self._arrays = encode(file, [*self._columns, *self._targets, *weight])
        texts = [column for column in self._targets if column.categories is not None]
        for column in texts:
            self._check_labels(column)
        if texts and len(self._targets) > 1:
            raise InvalidArgumentError(
                f"{path}: the target {texts[0].name!r} has texts; one of several targets has numbers"
            )
        self.classes = texts[0].categories if texts else settings.classes
        learned = {column.name: column.categories for column in columns if column.categories is not None}
        before = settings.categories or {}
        # Other columns of integers may have floats in further data.
        exact = {
            *targets,
            *(name for filling in self._fillings if filling.dtype.kind != "f" for name in filling.names()),
        }
        self._settings = replace(
            settings,
            target=settings.target or (tuple(targets) if len(targets) > 1 else targets[0] if targets else None),
            columns=tuple(column.name for column in self._columns),
            classes=None if self.classes is None else tuple(self.classes),
            header=settings.header or tuple(file.names),
            integers=tuple(column.name for column in columns if column.is_integer and column.name in exact),
            categories={**before, **learned},
        )

    def _target_names(self, file: TableFile, settings: Settings, labelled: bool) -> list[str]:
        """Return the target columns; empty if the rows need no labels."""
        chosen = settings.target if isinstance(settings.target, tuple) else (settings.target,)
        found = [found_target(file.names, name, self._path, "column", needed=labelled) for name in chosen]
        self._ignored = [name for name in found if name is not None]
        return self._ignored if labelled else []

    def _weight_column(self, file: TableFile, settings: Settings, labelled: bool) -> Column | None:
        """Return the column of the weights. Rows without labels need none."""
        name = settings.sample_weight
        if name is None or not labelled:
            return None
        if name not in file.names:
            raise InvalidArgumentError(
                f"{self._path} has no column {name!r}; it has {listed(file.names)}{hint(name, file.names)}"
            )
        return Column(name, False, None)

    def _feature_names(self, file: TableFile, settings: Settings, targets: list[str], labelled: bool) -> list[str]:
        """Return the columns of the inputs."""
        if settings.columns is None:
            left_out = (*self._ignored, settings.sample_weight)
            return [name for name in file.names if name not in left_out]
        for name in settings.columns:
            if name in targets:
                raise InvalidArgumentError(f"the column {name!r} is the target and cannot be an input, too")
        missing = [name for name in settings.columns if name not in file.names]
        if missing:
            whose = ", which the training data has" if settings.header else ""
            raise InvalidArgumentError(
                f"{self._path} has no column {missing[0]!r}{whose}; it has {listed(file.names)}"
                f"{hint(missing[0], file.names)}"
            )
        if settings.header and labelled:
            extra = [name for name in file.names if name not in settings.header]
            if extra:
                raise InvalidArgumentError(
                    f"{self._path} has the column {extra[0]!r}, which the training data does not have; it has "
                    f"{listed(settings.header)}{hint(extra[0], settings.header)}"
                )
        return list(settings.columns)

    def _check_labels(self, column: Column) -> None:
        """Check that each row has a label."""
        assert column.categories is not None
        if "" in column.categories:
            row = int((self._arrays[column.name] == column.categories.index("")).argmax())
            raise InvalidArgumentError(f"{self._path}: the column {column.name!r} has no label in row {row}")

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    @property
    def labels(self) -> npt.NDArray[np.int64] | None:
        """Class of each row, if the target has integers or texts."""
        if len(self._targets) != 1:
            return None
        target = self._targets[0]
        if target.categories is None and not target.is_integer:
            return None
        return np.asarray(self._arrays[target.name]).astype(np.int64)

    def take(self, rows: npt.NDArray[np.int64], seed: int, training: bool) -> Batch:
        """Read rows of the table."""
        inputs = {filling.name: filling.values(self._arrays, rows) for filling in self._fillings}
        weights = None if self._weight is None else self._arrays[self._weight.name][rows].astype(np.float32)
        if not self._targets:
            return Batch(inputs, {}, weights)
        values = [np.asarray(self._arrays[target.name][rows]) for target in self._targets]
        if len(values) > 1:
            return Batch(inputs, {"target": np.stack(values, axis=1).astype(np.float32)}, weights)
        is_label = self._targets[0].categories is not None or self._targets[0].is_integer
        return Batch(inputs, {"target": values[0].astype(np.int64 if is_label else np.float32)}, weights)

    def row_name(self, row: int) -> str:
        """Return the number of a row; the first row below the names is row 0."""
        return f"row {row}"

    def preview(self, row: int) -> dict[str, Any]:
        """Return the cells of a row."""
        cells: dict[str, Any] = {}
        for column in self._columns:
            value = self._arrays[column.name][row].item()
            cells[column.name] = value if column.categories is None else column.categories[value]
        return cells

    def describe(self) -> Mapping[str, Any]:
        """Return kind, sizes, settings and a hash of the file."""
        return {
            "kind": self.kind,
            "rows": len(self),
            "hash": fingerprint([self._path], self._path),
            "settings": self._settings.as_json(),
        }
