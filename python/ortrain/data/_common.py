"""Parts that several readers share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain._inputs import _TYPES
from ortrain._suggest import hint
from ortrain.data._settings import InputDescription
from ortrain.errors import InvalidArgumentError, NoSuchFileError

__all__ = [
    "TARGET_NAMES",
    "check_classes",
    "converted",
    "dtype_of",
    "fingerprint",
    "found_target",
    "generator",
    "listed",
    "to_sizes",
]

TARGET_NAMES = ("target", "targets", "label", "labels", "class", "y")
"""Names under which a target is found without being named."""

# Most names that an error message lists.
_MAX_LISTED = 8
# Bytes at both ends of a file that its fingerprint covers.
_HASHED_BYTES = 1 << 20


def generator(seed: int, row: int) -> np.random.Generator:
    """Return the random numbers of one row in one batch."""
    mask = 2**64 - 1
    return np.random.Generator(np.random.Philox(key=np.array([seed & mask, row & mask], np.uint64)))


def listed(names: Iterable[object]) -> str:
    """Return names for an error message; a long list is cut."""
    texts = list(map(str, names))
    more = len(texts) - _MAX_LISTED
    return ", ".join(texts[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def dtype_of(described: InputDescription) -> np.dtype[Any]:
    """Return the element type of an input.

    Raises:
        InvalidArgumentError: if no array of NumPy has the type.

    """
    if described.type == "tensor(string)":
        return np.dtype(object)
    if described.type == "tensor(bool)":
        return np.dtype(np.bool_)
    found = _TYPES.get(described.type)
    if found is None:
        raise InvalidArgumentError(f"input {described.name!r} is a {described.type}, which no data file fills")
    return found


def to_sizes(described: InputDescription) -> list[int | None]:
    """Return the axes of an input without the batch: sizes, and ``None`` for open axes."""
    shape = list(described.shape or [])
    return [size if isinstance(size, int) and size > 0 else None for size in shape[1:]]


def converted(values: npt.NDArray[Any], dtype: np.dtype[Any], place: str) -> npt.NDArray[Any]:
    """Return values in another element type. Floats may be rounded; integers must stay equal.

    Raises:
        InvalidArgumentError: if floats would become integers, or an integer would change.

    """
    if values.dtype == dtype:
        return values
    if values.dtype.kind not in "biuf" or dtype.kind not in "biuf":
        raise InvalidArgumentError(f"{place} has elements of the type {values.dtype}, the model takes {dtype}")
    if values.dtype.kind == "f" and dtype.kind != "f":
        raise InvalidArgumentError(f"{place} has floats, the model takes {dtype}")
    cast = values.astype(dtype)
    if values.dtype.kind in "iu" and not np.can_cast(values.dtype, dtype, "safe") and not np.array_equal(cast, values):
        raise InvalidArgumentError(f"{place} has integers that {dtype} cannot hold")
    return cast


def found_target(names: Sequence[str], target: str | None, path: Path, what: str, *, needed: bool) -> str | None:
    """Return the name of the target among the columns or arrays of a file.

    Raises:
        InvalidArgumentError: if the target is missing or cannot be found without its name.

    """
    if target is not None:
        if target in names:
            return target
        if not needed:
            return None
        raise InvalidArgumentError(f"{path} has no {what} {target!r}; it has {listed(names)}{hint(target, names)}")
    found = [name for name in names if name.lower() in TARGET_NAMES]
    if len(found) == 1:
        return found[0]
    if not needed:
        return None
    several = f"{' and '.join(found)} could be the target" if found else f"no {what} is named target, label or y"
    raise InvalidArgumentError(
        f"{path}: {several}; name the {what} with target= (--target); the file has {listed(names)}"
    )


def check_classes(labels: npt.NDArray[np.int64], classes: Sequence[str], path: Path) -> None:
    """Check that each class has a row.

    Raises:
        InvalidArgumentError: if a class has no row.

    """
    counts = np.bincount(labels, minlength=len(classes))
    empty = [name for name, count in zip(classes, counts, strict=True) if count == 0]
    if empty:
        raise InvalidArgumentError(f"{path}: no row has the class {listed(empty)}")


def fingerprint(files: Iterable[Path], folder: Path) -> str:
    """Return a hash of names and sizes; for a single file of its size and its first and last MiB, not of its name."""
    digest = hashlib.sha256()
    paths = list(files)
    for path in paths:
        size = os.stat(path).st_size  # noqa: PTH116  (thousands of files)
        name = "" if path == folder else path.relative_to(folder).as_posix()
        digest.update(f"{name}\0{size}\n".encode())
    if len(paths) == 1:
        with paths[0].open("rb") as file:
            digest.update(file.read(_HASHED_BYTES))
            file.seek(max(0, paths[0].stat().st_size - _HASHED_BYTES))
            digest.update(file.read(_HASHED_BYTES))
    return digest.hexdigest()


def check_exists(path: Path) -> None:
    """Check that a path exists.

    Raises:
        NoSuchFileError: if it does not.

    """
    if not path.exists():
        raise NoSuchFileError(f"there is no file or folder {path}")
