"""Validation of value names."""

from __future__ import annotations

from collections.abc import Iterable, Set


def listed(names: Iterable[str], argument: str) -> list[str]:
    """Return the names of an iterable as a checked list; the names of a set are sorted, because a set has no order."""
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise TypeError(
            f"{argument} must be a set of names, got {type(names).__name__}; pass {{name}} for a single name"
        )
    found = list(names)
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"{argument} must contain names of values, of type str, got {type(name).__name__}")
    return sorted(found) if isinstance(names, Set) else found
