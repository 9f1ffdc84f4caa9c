"""Numbers with units, as people read them."""

from __future__ import annotations


def format_bytes(count: int) -> str:
    """Return a number of bytes, in powers of 1000."""
    for divisor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= divisor:
            return f"{count / divisor:.3g} {unit}"
    return f"{count} B"


def format_seconds(seconds: float) -> str:
    """Return a duration: from microseconds to hours."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    for divisor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= divisor:
            return f"{seconds / divisor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def format_speed(per_second: float, unit: str) -> str:
    """Return a speed with three digits."""
    for divisor, prefix in ((1e6, "M"), (1e3, "k")):
        if per_second >= divisor:
            return f"{per_second / divisor:.3g}{prefix} {unit}/s"
    return f"{per_second:.3g} {unit}/s"
