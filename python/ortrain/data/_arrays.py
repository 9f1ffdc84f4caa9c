"""Files of arrays as sources of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain._suggest import hint
from ortrain.data._array_files import LazyArray, open_arrays
from ortrain.data._common import converted, dtype_of, fingerprint, found_target, listed, to_sizes
from ortrain.data._settings import InputDescription, Settings
from ortrain.data._source import Batch
from ortrain.errors import InvalidArgumentError

__all__ = ["Arrays"]


class Arrays:
    """Rows of the arrays in a file."""

    kind = "arrays"
    classes = None

    def __init__(
        self, path: Path, settings: Settings, inputs: Sequence[InputDescription], *, labelled: bool = True
    ) -> None:
        self._path = path
        arrays = {name: array for name, array in open_arrays(path).items() if array.shape}
        if not arrays:
            raise InvalidArgumentError(f"{path} has no arrays with rows")
        targets = _target_names(arrays, settings, path, labelled)
        names = _input_names(arrays, settings, targets, path)
        for described in inputs:
            if described.name in targets and described.name not in names:
                raise InvalidArgumentError(
                    f"the model's input {described.name!r} is the target; choose another array with target= (--target)"
                )
        self._weight = _weight_name(arrays, settings, path, labelled)
        self._inputs = _assigned(names, inputs, path)
        self._targets = targets if labelled else []
        weight = [self._weight] if self._weight is not None else []
        self._arrays = {name: arrays[name] for name in [*self._inputs.values(), *self._targets, *weight]}
        self._described = {described.name: described for described in inputs}
        self._check_shapes()
        self._settings = replace(
            settings,
            target=settings.target or (tuple(targets) if len(targets) > 1 else targets[0] if targets else None),
            columns=tuple(self._inputs.values()),
        )

    def __len__(self) -> int:
        return next(iter(self._arrays.values())).shape[0]

    @property
    def labels(self) -> npt.NDArray[np.int64] | None:
        """Class of each row, if the target is one column of integers."""
        if len(self._targets) != 1:
            return None
        target = self._arrays[self._targets[0]]
        if target.dtype.kind not in "iub" or len(target.shape) > 2 or target.shape[1:] not in ((), (1,)):
            return None
        return np.asarray(target[np.arange(len(self))]).reshape(-1).astype(np.int64)

    def take(self, rows: npt.NDArray[np.int64], seed: int, training: bool) -> Batch:
        """Read rows of the arrays."""
        inputs = {}
        for name, array in self._inputs.items():
            place = f"{self._path}: the array {array!r}"
            values = self._rows(array, rows)
            inputs[name] = converted(values, dtype_of(self._described[name]), place) if self._described else values
        targets = {}
        for name in self._targets:
            values = self._rows(name, rows)
            if values.dtype.kind == "f":
                values = values.astype(np.float32)
            elif values.ndim == 1 or values.dtype.kind != "b":
                values = values.astype(np.int64)
            else:
                values = values.astype(np.float32)
            targets["target" if len(self._targets) == 1 else name] = values
        return Batch(inputs, targets, None if self._weight is None else self._weights(self._weight, rows))

    def row_name(self, row: int) -> str:
        """Return the number of a row, from 0."""
        return f"row {row}"

    def preview(self, row: int) -> dict[str, Any]:
        """Return the first numbers of a row of each input."""
        return {
            name: np.asarray(self._arrays[array][np.array([row])]).reshape(-1)[:16].tolist()
            for name, array in self._inputs.items()
        }

    def describe(self) -> Mapping[str, Any]:
        """Return kind, sizes, settings and a hash of the file."""
        files = sorted(self._path.glob("*.npy")) if self._path.is_dir() else [self._path]
        return {
            "kind": self.kind,
            "rows": len(self),
            "hash": fingerprint(files, self._path),
            "settings": self._settings.as_json(),
        }

    def _rows(self, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return rows of an array, without NaN."""
        values = np.asarray(self._arrays[name][rows])
        if values.dtype.kind == "f":
            lacks = np.isnan(values.reshape(len(values), -1))
            if lacks.any():
                row, column = np.argwhere(lacks)[0]
                at = f", column {column}" if values.ndim > 1 else ""
                raise InvalidArgumentError(f"{self._path}: the array {name!r} is NaN in row {rows[row]}{at}")
        return values

    def _weights(self, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the weights of rows."""
        weights: npt.NDArray[np.float32] = self._rows(name, rows).astype(np.float32).reshape(-1)
        if len(weights) != len(rows):
            raise InvalidArgumentError(f"{self._path}: the array {name!r} must have one weight per row")
        return weights

    def _check_shapes(self) -> None:
        """Check that all arrays have the same rows, and the shapes that the model takes."""
        first, rows = next(iter(self._arrays)), len(self)
        if not rows:
            raise InvalidArgumentError(f"{self._path} has no rows")
        for name, array in self._arrays.items():
            if array.shape[0] != rows:
                raise InvalidArgumentError(
                    f"{self._path}: the array {first!r} has {rows} rows, {name!r} has {array.shape[0]}"
                )
        for name, described in self._described.items():
            array, sizes = self._arrays[self._inputs[name]], to_sizes(described)
            fits = len(sizes) == len(array.shape) - 1 and all(
                expected in (None, size) for expected, size in zip(sizes, array.shape[1:], strict=True)
            )
            if not fits:
                raise InvalidArgumentError(
                    f"{self._path}: the array {self._inputs[name]!r} has the shape {list(array.shape)}, the model's "
                    f"input {name!r} takes {list(described.shape)}"
                )


def _target_names(arrays: Mapping[str, LazyArray], settings: Settings, path: Path, labelled: bool) -> list[str]:
    chosen = settings.target if isinstance(settings.target, tuple) else (settings.target,)
    found = [found_target(list(arrays), name, path, "array", needed=labelled) for name in chosen]
    return [name for name in found if name is not None]


def _input_names(arrays: Mapping[str, LazyArray], settings: Settings, targets: list[str], path: Path) -> list[str]:
    """Return the names of the arrays that may be inputs."""
    if settings.columns is None:
        return [name for name in arrays if name not in targets and name != settings.sample_weight]
    for name in settings.columns:
        if name not in arrays:
            raise InvalidArgumentError(f"{path} has no array {name!r}; it has {listed(arrays)}{hint(name, arrays)}")
        if name in targets:
            raise InvalidArgumentError(f"the array {name!r} is the target and cannot be an input, too")
    return list(settings.columns)


def _weight_name(arrays: Mapping[str, LazyArray], settings: Settings, path: Path, labelled: bool) -> str | None:
    """Return the array of the weights. Rows without labels need none."""
    name = settings.sample_weight
    if name is None or not labelled:
        return None
    if name not in arrays:
        raise InvalidArgumentError(f"{path} has no array {name!r}; it has {listed(arrays)}{hint(name, arrays)}")
    return name


def _assigned(names: list[str], inputs: Sequence[InputDescription], path: Path) -> dict[str, str]:
    """Return the array of each input: the one of its name; a single other one fills a single other input."""
    if not inputs:
        return {name: name for name in names}
    found = {described.name: described.name for described in inputs if described.name in names}
    rest = [described.name for described in inputs if described.name not in found]
    others = [name for name in names if name not in found]
    if len(rest) == 1 and len(others) == 1:
        found[rest[0]] = others[0]
    elif rest:
        raise InvalidArgumentError(
            f"{path} has no array for the model's input {rest[0]!r}; it has {listed(names)}; name the array like the "
            f"input, or choose one with columns= (--columns){hint(rest[0], names)}"
        )
    return {described.name: found[described.name] for described in inputs}
