"""Suggestions of similar names for error messages."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: object, names: Iterable[str]) -> str | None:
    """Return the most similar name, if there is a similar one."""
    if not isinstance(name, str):
        return None
    # Only error messages need this module.
    import difflib

    folded = {other.lower(): other for other in sorted(names, reverse=True) if other}
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.67)
    return folded[close[0]] if close else None


def hint(name: object, names: Iterable[str]) -> str:
    """Return the end of a message that suggests a similar name, or an empty text."""
    found = nearest(name, names)
    return "" if found is None else f"; did you mean {found!r}?"


def near_to_pattern(pattern: str, names: Iterable[str]) -> str:
    """Return the end of a message that lists the names nearest to an unmatched pattern, or an empty text."""
    import difflib

    # A pattern shares few letters with a name, so the cutoff is low.
    close = difflib.get_close_matches(pattern, sorted(names), n=3, cutoff=0.4)
    return f"; similar names: {', '.join(map(repr, close))}" if close else ""
