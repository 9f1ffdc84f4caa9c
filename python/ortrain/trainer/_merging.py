"""Merge of values from several processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain.errors import InvalidArgumentError

__all__ = ["Arrays", "add_undivided", "differ", "shaped"]

Arrays = dict[str, npt.NDArray[Any]]


def add_undivided(states: dict[str, Any], name: str, value: Any, mismatch: str) -> None:
    """Adds a value that must be the same in all processes."""
    if differ(states.setdefault(name, value), value):
        raise AssertionError(mismatch)


def differ(one: Any, other: Any) -> bool:
    """Returns true if two values of files differ. A NaN equals another NaN."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(differ(one[name], other[name]) for name in one)
    if one is other:
        return False
    one, other = np.asarray(one), np.asarray(other)
    return one.shape != other.shape or not bool(np.all((one == other) | ((one != one) & (other != other))))


def shaped(value: npt.NDArray[Any], shape: tuple[int, ...], what: str) -> npt.NDArray[Any]:
    """Reshapes the joined parts to the shape of the complete value."""
    try:
        return value.reshape(shape)
    except ValueError as error:
        raise InvalidArgumentError(
            f"the parts of {what} have {value.size} elements, but its shape is {list(shape)}"
        ) from error
