"""Recognition of the data that a caller passes: rows in any order, or batches."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ortrain._fit import tables
from ortrain._fit.arrays import ArraySource, Column, input_columns, is_indexable, row_count, target_column
from ortrain._fit.description import Array, Description
from ortrain._fit.losses import TARGET, Target, find_labels
from ortrain._stacklevel import level_of_user
from ortrain.data import Batch, Source
from ortrain.errors import InvalidArgumentError, TrainingWarning

__all__ = ["Data", "read_data"]

# Rows that the choice of the loss looks at, if the data is read in parts.
_SAMPLE_ROWS = 64


@dataclass
class Data:
    """Data of a training, an evaluation or a prediction: a source of rows, or an iterable of batches."""

    source: Source | None
    batches: Any
    """Iterable of batches, if there is no source."""
    raw_targets: dict[str, Any]
    """Targets of an array source, as the caller passed them."""
    class_names: dict[str, Sequence[Any]]
    """Texts of the classes by target."""
    peeked: tuple[Any, Iterator[Any]] | None = None
    """First batch of an iterable, with the rest of the iterator."""
    is_weighted: bool = False
    """True if rows have weights."""
    schema: tables.Schema | None = None
    """Columns of a table."""

    def sample(self, description: Description) -> dict[str, Array]:
        """Return targets, of all rows or of the first ones, by name."""
        if self.raw_targets:
            found = {}
            for name, values in self.raw_targets.items():
                in_memory = isinstance(values, np.ndarray) and not isinstance(values, np.memmap)
                found[name] = values if in_memory or not is_indexable(values) else np.asarray(values[: 1 << 16])
            return found
        if self.source is not None and not isinstance(self.source, ArraySource):
            batch = self.source.take(np.arange(min(len(self.source), _SAMPLE_ROWS)), 0, True)
            self.is_weighted = self.is_weighted or batch.weights is not None
            return dict(batch.targets)
        if self.batches is not None:
            from ortrain._fit.feeds import Layout

            item = self._peek()
            layout = Layout((), description, (), {}, None, None, False)
            batch = layout.converted_batch(item, needs_targets=False)
            self.is_weighted = self.is_weighted or batch.weights is not None
            return dict(batch.targets)
        return {}

    def _peek(self) -> Any:
        if self.peeked is None:
            iterator = iter(self.batches)
            item = next(iterator, None)
            if item is None:
                raise InvalidArgumentError("the data has no batches")
            self.peeked = item, iterator
        return self.peeked[0]

    @property
    def several_labels(self) -> bool:
        """True if the label of each row is a list, so that a row may have several labels."""
        return bool(getattr(self.source, "several_labels", False))

    def find_class_names(self) -> None:
        """Find the texts of the classes in the targets, if they are texts."""
        classes = getattr(self.source, "classes", None)
        if classes is not None and not self.class_names:
            self.class_names[TARGET] = list(classes)
        for name, values in self.raw_targets.items():
            found = find_labels(values) if isinstance(values, np.ndarray) else None
            if found is not None:
                self.class_names[name] = found

    def with_targets(self, targets: Sequence[Target], class_names: Mapping[str, Sequence[Any]]) -> Data:
        """Return the data with targets in the form that the loss takes."""
        if not isinstance(self.source, ArraySource):
            return self
        found = {}
        raw = self.raw_targets
        for target in targets:
            values = raw.get(target.name)
            if values is None and len(targets) == len(raw) == 1:
                values = next(iter(raw.values()))
            if values is None:
                have = ", ".join(map(repr, raw)) or "none"
                raise InvalidArgumentError(f"y has no target {target.name!r}; it has {have}")
            texts = class_names.get(target.name)
            found[target.name] = target_column(target.name, values, target, texts)
        return replace(self, source=self.source.with_targets(found))

    def split(self, share: float, seed: int = 0) -> tuple[Data, Data]:
        """Split off the last rows, as Keras does, before any shuffling. Rows of files are split at random.

        Args:
            share: the share of the second part.
            seed: the seed of a random split.

        Raises:
            InvalidArgumentError: if the data has no rows in an order, or a part would be empty.

        """
        if self.source is None:
            raise InvalidArgumentError(
                "validation_split needs rows, but the data is an iterable of batches; pass validation_data"
            )
        if not 0 < share < 1:
            raise InvalidArgumentError(f"validation_split must be from 0 to 1, without both, got {share}")
        total = len(self.source)
        count = int(total * (1.0 - share))
        if not 0 < count < total:
            raise InvalidArgumentError(
                f"validation_split={share} of {total} rows leaves no row for one of the parts; pass more rows"
            )
        self._warn_of_missing_classes(count)
        if isinstance(self.source, ArraySource):
            parts: tuple[Source, Source] = (self.source.part(0, count), self.source.part(count, total))
        elif hasattr(self.source, "labels"):
            # The last rows of a sorted file, such as iris.csv, are one class.
            from ortrain.data import split

            parts = split(self.source, share, seed)
        else:
            from ortrain.data._subset import Subset

            parts = Subset(self.source, np.arange(count)), Subset(self.source, np.arange(count, total))
        return replace(self, source=parts[0]), replace(self, source=parts[1])

    def _warn_of_missing_classes(self, count: int) -> None:
        """Warn if the last rows have a class that no other row has: the rows are probably sorted by class."""
        labels = getattr(self.source, "labels", None)
        if labels is None and len(self.raw_targets) == 1:
            (labels,) = self.raw_targets.values()
        if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "biuUS" or labels.size != len(labels):
            return
        labels = labels.reshape(-1)
        # A number that occurs once is no class.
        missing = np.setdiff1d(labels[count:], labels[:count])
        if len(missing) and len(missing) <= len(labels) // 10:
            warnings.warn(
                f"validation_split takes the last rows, and class {missing[0].item()!r} is only among them; shuffle "
                "the rows before fit, or pass validation_data",
                TrainingWarning,
                stacklevel=level_of_user(),
            )

    def describe(self) -> dict[str, Any]:
        """Return kind, sizes and a hash, for the folder of a run."""
        describe = getattr(self.source, "describe", None)
        if describe is not None:
            found: dict[str, Any] = dict(describe())
            return found
        if self.source is not None:
            return {"kind": type(self.source).__name__, "rows": len(self.source)}
        return {"kind": "batches", "class": type(self.batches).__name__}


def read_data(
    x: Any,
    y: Any,
    sample_weight: Any,
    description: Description,
    schema: tables.Schema,
    *,
    needs_targets: bool = True,
) -> Data:
    """Recognize data.

    Args:
        x: arrays, a table, a source of rows, or an iterable of batches.
        y: targets, or the name of their column.
        sample_weight: the weight of each row.
        description: inputs and outputs of the model.
        schema: columns of the table of the training.
        needs_targets: True for a training and an evaluation.

    Raises:
        InvalidArgumentError: if the data does not fit the model.

    """
    if isinstance(x, Data):
        return x
    table = tables.table_of(x)
    if table is not None:
        return _of_table(table, y, sample_weight, description, schema)
    if tables.is_dataset(x):
        if y is not None and not _is_name(y):
            raise InvalidArgumentError("y must be the name of a column of the dataset")
        source = tables.DatasetSource(x, y, description, needs_target=False)
        return _of_source(source, sample_weight)
    if _is_source(x):
        if y is not None:
            raise InvalidArgumentError("x is a source of rows, which has its targets; do not pass y")
        return _of_source(x, sample_weight)
    if _is_array(x):
        return _of_arrays(x, y, sample_weight, description)
    if hasattr(x, "__iter__"):
        if y is not None or sample_weight is not None:
            name = "y" if y is not None else "sample_weight"
            raise InvalidArgumentError(f"x is an iterable of batches (x, y), so {name} must not be given")
        return Data(None, x, {}, {})
    raise InvalidArgumentError(
        "x must be an array, a list or a dict of arrays, a table, a datasets.Dataset, a source of ortrain.data, or an "
        f"iterable of batches, got {type(x).__name__}"
    )


def _is_name(y: Any) -> bool:
    return isinstance(y, str) or (isinstance(y, (list, tuple)) and bool(y) and all(isinstance(name, str) for name in y))


def _is_source(value: Any) -> bool:
    """Return True for rows of ``ortrain.data``. Arrays and tables have a method ``take`` with other arguments."""
    if isinstance(value, np.ndarray) or not hasattr(value, "take") or not hasattr(value, "__len__"):
        return False
    try:
        return "training" in inspect.signature(value.take).parameters
    except (TypeError, ValueError):
        return False


def _is_array(x: Any) -> bool:
    if isinstance(x, Mapping):
        return True
    if isinstance(x, (list, tuple)):
        return not _is_list_of_batches(x)
    return is_indexable(x) or hasattr(x, "__array__") or (hasattr(x, "__dlpack__") and hasattr(x, "shape"))


def _is_list_of_batches(x: Sequence[Any]) -> bool:
    """Return True for a list of batches; a list of arrays or numbers is the inputs."""
    if not x:
        return True
    first = x[0]
    if isinstance(first, (list, tuple)) and len(first) in (2, 3):
        return all(hasattr(each, "__array__") or hasattr(each, "__dlpack__") for each in first[:2]) and (
            hasattr(first[0], "__dlpack__") or bool(np.ndim(first[0]))
        )
    return isinstance(first, (Mapping, Batch, tuple))


def _of_source(source: Any, sample_weight: Any) -> Data:
    if sample_weight is not None:
        source = _WeightedSource(source, np.asarray(sample_weight, np.float32))
    return Data(source, None, {}, {}, is_weighted=sample_weight is not None)


class _WeightedSource:
    """Source with a weight for each row."""

    def __init__(self, source: Source, weights: Array) -> None:
        if len(weights) != len(source):
            raise InvalidArgumentError(
                f"sample_weight has {len(weights)} elements, but the data has {len(source)} rows"
            )
        self._source, self._weights = source, weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)

    def take(self, rows: Array, seed: int, training: bool) -> Batch:
        batch = self._source.take(rows, seed, training)
        return replace(batch, weights=self._weights[rows])


def _of_table(table: tables.Table, y: Any, sample_weight: Any, description: Description, schema: tables.Schema) -> Data:
    name = y if _is_name(y) else None
    x, targets, found = tables.split_table(table, name, description, schema)
    inputs = input_columns(x, description, names=found.features)
    if name is None and y is not None:
        targets = _targets_of(y)
    return replace(_of_columns(inputs, targets, sample_weight), schema=found)


def _of_arrays(x: Any, y: Any, sample_weight: Any, description: Description) -> Data:
    targets: dict[str, Any] = {}
    if _is_name(y) and isinstance(x, Mapping):
        wanted = [y] if isinstance(y, str) else list(y)
        for name in wanted:
            if name not in x:
                raise InvalidArgumentError(f"x has no array {name!r}; it has {', '.join(map(str, x))}")
            if name in description.input_names:
                raise InvalidArgumentError(
                    f"{name!r} is the target and an input of the model; a target cannot be an input"
                )
            targets[TARGET if len(wanted) == 1 else name] = _in_memory(x[name])
        x = {name: value for name, value in x.items() if name not in wanted}
    elif y is not None:
        targets = _targets_of(y)
    return _of_columns(input_columns(x, description), targets, sample_weight)


def _targets_of(y: Any) -> dict[str, Any]:
    if isinstance(y, Mapping):
        return {str(name): _in_memory(values) for name, values in y.items()}
    table = tables.table_of(y)
    if table is not None:
        columns = [table.read(name) for name in table.names]
        return {TARGET: columns[0] if len(columns) == 1 else np.stack(columns, axis=1)}
    return {TARGET: _in_memory(y)}


def _in_memory(values: Any) -> Any:
    """Return an array of NumPy, unless the values are read in parts."""
    if is_indexable(values) and not hasattr(values, "to_numpy") and not hasattr(values, "__dlpack__"):
        return values
    if isinstance(values, np.ndarray):
        return values
    if hasattr(values, "to_numpy"):
        return np.asarray(values.to_numpy())
    if hasattr(values, "__dlpack__") and not hasattr(values, "__array__"):
        return np.from_dlpack(values)
    return np.asarray(values)


def _of_columns(inputs: dict[str, Column], targets: dict[str, Any], sample_weight: Any) -> Data:
    rows = len(next(iter(inputs.values())))
    for name, values in targets.items():
        if row_count(values) != rows:
            label = "y" if name == TARGET else f"y[{name!r}]"
            raise InvalidArgumentError(
                f"x has {rows} rows, but {label} has {row_count(values)}; each row needs one target"
            )
    weights = None
    if sample_weight is not None:
        weights = np.asarray(sample_weight, np.float32)
        if weights.shape != (rows,):
            raise InvalidArgumentError(
                f"sample_weight must have one number for each of the {rows} rows, got the shape {list(weights.shape)}"
            )
        if not np.isfinite(weights).all():
            raise InvalidArgumentError(f"sample_weight of row {int(np.argmin(np.isfinite(weights)))} is not finite")
    return Data(ArraySource(inputs, {}, weights), None, targets, {}, is_weighted=weights is not None)
