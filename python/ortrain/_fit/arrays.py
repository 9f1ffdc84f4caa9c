"""Arrays as a source of rows: in memory, mapped from a file, or read in parts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ortrain._fit.description import Array, Description, Value, listed
from ortrain._fit.losses import Target
from ortrain._suggest import hint
from ortrain.data import Batch
from ortrain.errors import InvalidArgumentError

__all__ = ["ArraySource", "Column", "input_columns", "is_indexable", "row_count", "to_input"]

# Conversions of larger arrays happen batch by batch.
_MAX_CONVERTED_BYTES = 256 << 20
# Rows, and bytes of a row, that the fingerprint of an array covers.
_HASHED_ROWS, _HASHED_BYTES = 64, 1 << 16


def is_indexable(value: object) -> bool:
    """Return True for an array that can be read in parts: NumPy, a memory map, Zarr, HDF5.

    A tensor of another library is in memory, and its type is no type of NumPy.
    """
    if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        return False
    return all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__")) and bool(getattr(value, "shape", ()))


def row_count(value: Any) -> int:
    """Return the size of the first axis."""
    return int(value.shape[0])


class Column:
    """Array with one element per row, and the conversion that reading applies.

    Args:
        name: the name for messages.
        array: an array of NumPy, or an object that is read in parts.
        convert: the conversion of some rows, or ``None``.
        names: names of the elements of a row, for messages about tables.

    """

    def __init__(
        self,
        name: str,
        array: Any,
        convert: Callable[[Array], Array] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self.names = names
        self._is_numpy = isinstance(array, np.ndarray)
        if (
            convert is not None
            and self._is_numpy
            and not isinstance(array, np.memmap)
            and array.nbytes <= _MAX_CONVERTED_BYTES
        ):
            array, convert = convert(array), None
        self.array = array
        self._convert = convert
        # Arrays read by sorted positions: HDF5 requires them, and Zarr is faster.
        self._orthogonal = getattr(array, "get_orthogonal_selection", None)

    def __len__(self) -> int:
        return row_count(self.array)

    @property
    def row_bytes(self) -> int:
        """Approximate bytes of a row."""
        return int(np.prod(self.array.shape[1:], dtype=np.int64)) * int(np.dtype(self.array.dtype).itemsize)

    def buffer(self, rows: int) -> Array | None:
        """Return memory for :meth:`read`; ``None`` if a conversion allocates it."""
        if not self._is_numpy or self._convert is not None:
            return None
        return np.empty((rows, *self.array.shape[1:]), self.array.dtype)

    def read(self, rows: Array, buffer: Array | None = None) -> Array:
        """Return the rows of these positions, in the buffer if there is one."""
        if buffer is not None:
            # The default mode checks the positions, and copies twice.
            values: Array = self.array.take(rows, 0, buffer[: len(rows)], "clip")
            return values
        values = self.array.take(rows, 0) if self._is_numpy else self._read_sorted(rows)
        if type(values) is np.memmap:
            values = values.view(np.ndarray)
        return values if self._convert is None else self._convert(values)

    def read_slice(self, begin: int, end: int) -> Array:
        """Return consecutive rows, without a copy if possible."""
        values = np.asarray(self.array[begin:end])
        return values if self._convert is None else self._convert(values)

    def _read_sorted(self, rows: Array) -> Array:
        unique, back = np.unique(rows, return_inverse=True)
        values = self._orthogonal((unique,)) if self._orthogonal is not None else self.array[unique]
        return np.asarray(values)[back]

    def describe(self) -> dict[str, Any]:
        """Return shape, type and a hash of some rows."""
        count = len(self)
        digest = hashlib.sha256()
        chosen = np.unique(np.linspace(0, max(count - 1, 0), min(count, _HASHED_ROWS)).astype(np.int64))
        values = self.array[chosen] if self._is_numpy else self._read_sorted(chosen)
        for row in values:
            flat = np.ascontiguousarray(row)
            content = repr(flat.tolist()).encode() if flat.dtype.kind == "O" else flat.tobytes()
            digest.update(content[:_HASHED_BYTES])
        return {
            "shape": list(map(int, self.array.shape)),
            "dtype": str(self.array.dtype),
            "hash": digest.hexdigest()[:32],
        }


class ArraySource:
    """Rows of arrays. A batch does not depend on a seed, so several batches can be read at once.

    Args:
        inputs: the inputs by name.
        targets: the targets by name.
        weights: the weight of each row.
        begin: the first row.
        end: the row after the last one; ``None`` for all rows.

    """

    def __init__(
        self,
        inputs: Mapping[str, Column],
        targets: Mapping[str, Column],
        weights: Array | None = None,
        begin: int = 0,
        end: int | None = None,
    ) -> None:
        self.inputs = dict(inputs)
        self.targets = dict(targets)
        self.weights = weights
        counts = {name: len(column) for name, column in (*self.inputs.items(), *self.targets.items())}
        if weights is not None:
            counts["sample_weight"] = len(weights)
        if len(set(counts.values())) > 1:
            described = ", ".join(f"{name}: {count}" for name, count in counts.items())
            raise InvalidArgumentError(f"inputs and targets have different numbers of rows ({described})")
        total = next(iter(counts.values()), 0)
        self.begin, self.end = begin, total if end is None else end

    def __len__(self) -> int:
        return self.end - self.begin

    def take(self, rows: Array, seed: int, training: bool) -> Batch:
        """Read rows; see :class:`ortrain.data.Source`."""
        at = rows + self.begin if self.begin else rows
        return Batch(
            {name: column.read(at) for name, column in self.inputs.items()},
            {name: column.read(at) for name, column in self.targets.items()},
            None if self.weights is None else self.weights[at],
        )

    def part(self, begin: int, end: int) -> ArraySource:
        """Return consecutive rows as a source."""
        return ArraySource(self.inputs, self.targets, self.weights, self.begin + begin, self.begin + end)

    def with_weights(self, weights: Array | None) -> ArraySource:
        """Return the source with other weights of all rows."""
        return ArraySource(self.inputs, self.targets, weights, self.begin, self.end)

    def with_targets(self, targets: Mapping[str, Column]) -> ArraySource:
        """Return the source with converted targets."""
        return ArraySource(self.inputs, targets, self.weights, self.begin, self.end)

    def describe(self) -> dict[str, Any]:
        """Return the kind, the sizes and hashes of some rows."""
        columns = {**self.inputs, **self.targets}
        return {
            "kind": "arrays",
            "rows": len(self),
            "arrays": {name: each.describe() for name, each in columns.items()},
        }


def to_input(values: Any, value: Value, what: str) -> Array:
    """Convert rows for an input. Floats are rounded to the type of the input; integers must stay equal.

    Raises:
        InvalidArgumentError: if the shape or the type does not fit.

    """
    array = np.asarray(values)
    dtype = value.dtype
    if dtype is not None and array.dtype != dtype:
        array = _cast(array, dtype, value, what)
    rank = len(value.shape)
    if rank == 2 and array.ndim == 1 and value.shape[1] in (1, None):
        array = array[:, None]
    if not rank or array.shape == value.shape:
        return array
    wanted = value.shape[1:]
    fits = array.ndim == rank and all(
        not isinstance(size, int) or size == have for size, have in zip(wanted, array.shape[1:], strict=True)
    )
    if not fits:
        known = all(isinstance(size, int) for size in wanted)
        same = known and array.ndim and np.prod(wanted) == np.prod(array.shape[1:])  # type: ignore[arg-type]
        remedy = f"; to change the shape, pass x.reshape({', '.join(map(str, (-1, *wanted)))})" if same else ""
        raise InvalidArgumentError(
            f"{what} has rows of the shape {list(array.shape[1:])}, but input {value.name!r} is {value}{remedy}"
        )
    return array


def _cast(array: Array, dtype: np.dtype[Any], value: Value, what: str) -> Array:
    if array.dtype.kind not in "biuf":
        raise InvalidArgumentError(
            f"{what} has the type {array.dtype}, but input {value.name!r} is {value}; encode texts and dates as numbers"
        )
    cast = array.astype(dtype)
    if dtype.kind != "f" and array.dtype != dtype:
        changed = cast.astype(array.dtype) != array
        if changed.any():
            at = np.argwhere(changed)[0]
            raise InvalidArgumentError(
                f"{what} has {array[tuple(at)]} in row {at[0]}, which {dtype} of input {value.name!r} cannot hold"
            )
    return cast


def input_columns(
    x: Any, description: Description, *, names: Sequence[str] | None = None, ignored: Sequence[str] = ()
) -> dict[str, Column]:
    """Return the columns of the inputs: of one array, of a list, or of arrays by name.

    Args:
        x: the arrays.
        description: inputs and outputs of the model.
        names: names of the columns of a matrix, for messages.
        ignored: names of arrays that may be there without being an input.

    Raises:
        InvalidArgumentError: if an input is missing or unknown, or an array does not fit.

    """
    inputs = {value.name: value for value in description.inputs}
    if isinstance(x, Mapping):
        arrays = dict(x)
        unknown = [name for name in arrays if name not in inputs and name not in ignored]
        missing = [name for name in inputs if name not in arrays]
        if unknown or missing:
            wrong = unknown[0] if unknown else missing[0]
            what = f"x has {wrong!r}, which is no input" if unknown else f"x has no array for input {wrong!r}"
            raise InvalidArgumentError(
                f"{what} of the model; the inputs are {listed(list(inputs))}"
                f"{hint(wrong, inputs if unknown else arrays)}"
            )
    elif isinstance(x, (list, tuple)) and len(inputs) > 1:
        if len(x) != len(inputs):
            raise InvalidArgumentError(
                f"x has {len(x)} arrays, but the model has {len(inputs)} inputs: {listed(list(inputs))}"
            )
        arrays = dict(zip(inputs, x, strict=True))
    elif len(inputs) == 1:
        arrays = {next(iter(inputs)): x}
    else:
        raise InvalidArgumentError(
            f"x is one array, but the model has {len(inputs)} inputs; pass a dict with {listed(list(inputs))}"
        )
    return {name: _input_column(name, arrays[name], value, names, len(inputs)) for name, value in inputs.items()}


def _input_column(name: str, array: Any, value: Value, names: Sequence[str] | None, count: int) -> Column:
    what = "x" if count == 1 else f"x[{name!r}]"
    if not is_indexable(array):
        array = _as_array(array, what)
    # The shape of a few rows stands for all of them.
    to_input(np.asarray(array[:1]), value, what)

    def convert(values: Array) -> Array:
        return to_input(values, value, what)

    same = (
        isinstance(array, np.ndarray) and array.dtype == value.dtype and array.ndim == max(len(value.shape), array.ndim)
    )
    return Column(name, array, None if same else convert, names)


def target_column(name: str, values: Any, target: Target, names: Sequence[Any] | None) -> Column:
    """Return the column of a target, in the type and shape that the loss takes."""
    array = values if is_indexable(values) else _as_array(values, "y")
    return Column(name, array, lambda rows: target.convert(rows, names))


def _as_array(values: Any, what: str) -> Array:
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    elif not hasattr(values, "__array__") and hasattr(values, "__dlpack__"):
        values = np.from_dlpack(values)
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidArgumentError(f"{what} has rows of different lengths; pad the short rows ({error})") from error
    if not array.ndim:
        raise InvalidArgumentError(f"{what} must be an array with rows, got {type(values).__name__}")
    return array
