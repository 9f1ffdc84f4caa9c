"""Range checks of the caller's integers before the core takes them: integers of Python have no bounds.

>>> from ortrain import _numbers
>>> _numbers.rate("initial_lr", 10**400)
Traceback (most recent call last):
ortrain.errors.OutOfRangeError: initial_lr is an integer outside the range of float32
"""

from __future__ import annotations

from typing import TypeVar

from ortrain.errors import OutOfRangeError

__all__ = ["rate", "steps"]

_Number = TypeVar("_Number")


def steps(name: str, count: _Number) -> _Number:
    """Return a number of steps; raise an error if int64 cannot hold it."""
    if isinstance(count, int) and not -(1 << 63) <= count < 1 << 63:
        raise OutOfRangeError(
            f"{name} must be a number of steps below 2**63, got an integer of {count.bit_length()} bits"
        )
    return count


def rate(name: str, value: _Number) -> _Number:
    """Return a learning rate; raise an error for an integer outside float32."""
    if isinstance(value, int) and abs(value) >= 1 << 128:
        raise OutOfRangeError(f"{name} is an integer outside the range of float32")
    return value
