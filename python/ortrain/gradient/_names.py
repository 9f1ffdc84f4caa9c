"""Names of values as callers pass them."""

from __future__ import annotations

from collections.abc import Iterable, Set


def listed(names: Iterable[str], argument: str) -> list[str]:
    """The names of an iterable, checked; those of a set sorted, for it has no order."""
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise TypeError(f"{argument} is a set of names, not {type(names).__name__}; write {{name}} for a single one")
    found = list(names)
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"{argument} holds names of values, which are str, not {type(name).__name__}")
    return sorted(found) if isinstance(names, Set) else found
