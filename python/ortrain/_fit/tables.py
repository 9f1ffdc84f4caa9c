"""Tables of pandas, Polars, PyArrow and Hugging Face as sources of rows, recognized without importing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortrain._fit.arrays import to_input
from ortrain._fit.description import Array, Description, listed
from ortrain._fit.losses import TARGET
from ortrain._suggest import hint
from ortrain.data import Batch
from ortrain.errors import InvalidArgumentError

__all__ = ["DatasetSource", "Schema", "Table", "is_dataset", "split_table", "table_of"]

_TARGET_NAMES = ("target", "label", "labels", "y")


@dataclass(frozen=True)
class Table:
    """Columns by name, in the order of the table."""

    names: list[str]
    read: Callable[[str], Array]


@dataclass(frozen=True)
class Schema:
    """Columns of the table that a model was trained with."""

    features: tuple[str, ...] | None = None
    """Columns of a single matrix, in order; ``None`` if the inputs are found by their names."""
    targets: tuple[str, ...] = ()


def is_dataset(value: object) -> bool:
    """Return True for a ``datasets.Dataset`` that can be indexed."""
    return hasattr(value, "column_names") and hasattr(value, "features") and hasattr(value, "__getitem__")


def table_of(value: Any) -> Table | None:
    """Return the columns of a table; ``None`` if the value is no table."""
    if hasattr(value, "iloc") and hasattr(value, "columns"):
        return Table(list(map(str, value.columns)), lambda name: _numpy(value[_original(value.columns, name)]))
    if hasattr(value, "get_columns") and hasattr(value, "columns"):
        return Table(list(value.columns), lambda name: _numpy(value[name]))
    if hasattr(value, "column_names") and hasattr(value, "schema") and hasattr(value, "column"):
        return Table(list(value.column_names), lambda name: _numpy(value.column(name)))
    return None


def _original(columns: Any, name: str) -> Any:
    return next(column for column in columns if str(column) == name)


def _numpy(column: Any) -> Array:
    """Return a column as an array. Lists of equal length become further axes."""
    array = np.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)
    if array.dtype == object and len(array) and all(each is not None and np.ndim(each) for each in array[:8]):
        return np.stack([np.asarray(each) for each in array])
    return array


def split_table(
    table: Table, target: Any, description: Description, schema: Schema
) -> tuple[Any, dict[str, Array], Schema]:
    """Return inputs, targets and the columns of both.

    Args:
        table: the table.
        target: the name of the target, several names, or ``None`` if the targets are not in the table.
        description: inputs and outputs of the model.
        schema: the columns of the training; other tables have the same ones, in any order.

    Raises:
        InvalidArgumentError: if a column is missing, or the columns do not fit the inputs.

    """
    wanted = [] if target is None else [target] if isinstance(target, str) else list(target)
    if target is None and schema.targets and all(name in table.names for name in schema.targets):
        wanted = list(schema.targets)
    for name in wanted:
        if name not in table.names:
            raise InvalidArgumentError(
                f"the table has no column {name!r}; it has {listed(table.names)}{hint(name, table.names)}"
            )
        if name in description.input_names:
            raise InvalidArgumentError(
                f"column {name!r} is the target and an input of the model; a target cannot be an input"
            )
    targets = {(TARGET if len(wanted) == 1 else name): table.read(name) for name in wanted}
    features = [name for name in table.names if name not in wanted]
    inputs = description.input_names
    if schema.features is not None:
        missing = [name for name in schema.features if name not in features]
        if missing:
            raise InvalidArgumentError(
                f"the table has no column {missing[0]!r}, which the table of the training had; it has "
                f"{listed(features)}{hint(missing[0], features)}"
            )
        features = list(schema.features)
    if all(name in features for name in inputs):
        return {name: table.read(name) for name in inputs}, targets, Schema(None, tuple(wanted))
    if len(inputs) == 1:
        size = description.inputs[0].shape[1] if len(description.inputs[0].shape) == 2 else None
        if len(features) == size or ((size is None or isinstance(size, str)) and len(description.inputs[0].shape) == 2):
            return _matrix(table, features), targets, Schema(tuple(features), tuple(wanted))
        if len(features) == 1:
            return table.read(features[0]), targets, Schema(tuple(features), tuple(wanted))
    else_target = "" if wanted else "; name the target: y='column'"
    raise InvalidArgumentError(
        f"the columns {listed(features)} do not fit the model, which takes "
        f"{listed([f'{value.name}: {value}' for value in description.inputs])}{else_target}"
    )


def _matrix(table: Table, features: Sequence[str]) -> Array:
    columns = []
    for name in features:
        column = table.read(name)
        if column.dtype.kind == "O":
            missing = np.array([each is None for each in column])
            column = np.where(missing, np.nan, column)
            try:
                column = column.astype(np.float64)
            except (TypeError, ValueError):
                column = table.read(name)
        if column.dtype.kind not in "biuf":
            raise InvalidArgumentError(
                f"column {name!r} has the type {column.dtype}, but the model takes numbers; encode the column"
            )
        columns.append(column)
    return np.stack(columns, axis=1)


class DatasetSource:
    """Rows of a ``datasets.Dataset``, which are read when a batch needs them.

    Args:
        dataset: the dataset.
        target: the name of the target; ``None`` finds it.
        description: inputs and outputs of the model.
        needs_target: True if a missing target is an error.

    """

    def __init__(self, dataset: Any, target: Any, description: Description, *, needs_target: bool) -> None:
        self._dataset = dataset
        names = list(dataset.column_names)
        found = [] if target is None else [target] if isinstance(target, str) else list(target)
        if not found:
            found = [name for name in names if name.lower() in _TARGET_NAMES and name not in description.input_names][
                :1
            ]
        for name in found:
            if name not in names:
                raise InvalidArgumentError(
                    f"the dataset has no column {name!r}; it has {listed(names)}{hint(name, names)}"
                )
        if needs_target and not found:
            raise InvalidArgumentError(
                f"no column of the dataset is named target or label; name it: y='column' ({listed(names)})"
            )
        features = [name for name in names if name not in found]
        inputs = {value.name: value for value in description.inputs}
        self._inputs = {name: name for name in inputs if name in features}
        if len(self._inputs) != len(inputs):
            if len(inputs) == 1 and len(features) == 1:
                self._inputs = {next(iter(inputs)): features[0]}
            else:
                raise InvalidArgumentError(
                    f"the columns {listed(features)} of the dataset do not fit the inputs {listed(list(inputs))}; "
                    "rename or remove columns"
                )
        self._values = inputs
        self._targets = {(TARGET if len(found) == 1 else name): name for name in found}
        feature = dataset.features.get(found[0]) if found and isinstance(dataset.features, Mapping) else None
        names_of_classes = getattr(feature, "names", None)
        self.classes = list(names_of_classes) if names_of_classes else None
        # The feature of a list has the feature of its elements.
        self.several_labels = len(found) == 1 and hasattr(feature, "feature")

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, rows: Array, seed: int, training: bool) -> Batch:
        """Read rows; see :class:`ortrain.data.Source`."""
        read = self._dataset[rows.tolist()]
        inputs = {}
        for name, column in self._inputs.items():
            inputs[name] = to_input(_stacked(read[column], column), self._values[name], f"column {column!r}")
        return Batch(inputs, {name: _stacked(read[column], column) for name, column in self._targets.items()})

    def describe(self) -> dict[str, Any]:
        """Return the kind, the sizes and the fingerprint of the dataset."""
        return {"kind": "dataset", "rows": len(self), "hash": str(getattr(self._dataset, "_fingerprint", ""))}


def _stacked(values: Any, column: str) -> Array:
    if hasattr(values, "__array__"):
        return np.asarray(values)
    try:
        return np.asarray([np.asarray(each) for each in values])
    except ValueError as error:
        raise InvalidArgumentError(f"column {column!r} has rows of different shapes; pad them ({error})") from error
