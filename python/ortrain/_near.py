"""Hints at names that may have been meant."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: object, names: Iterable[str]) -> str | None:
    """The name that is most like another one, if any is."""
    if not isinstance(name, str):
        return None
    # Only an error needs it.
    import difflib

    folded = {other.lower(): other for other in sorted(names, reverse=True) if other}
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.67)
    return folded[close[0]] if close else None


def hint(name: object, names: Iterable[str]) -> str:
    """The end of a sentence that names it, or nothing."""
    found = nearest(name, names)
    return "" if found is None else f"; did you mean {found!r}?"


def near_to_pattern(pattern: str, names: Iterable[str]) -> str:
    """The end of a sentence that names those nearest to a pattern that fits none, or nothing."""
    import difflib

    # Of a pattern, few letters are those of a name.
    close = difflib.get_close_matches(pattern, sorted(names), n=3, cutoff=0.4)
    return f"; near are {', '.join(map(repr, close))}" if close else ""
