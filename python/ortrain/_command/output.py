"""Lines that the commands print."""

from __future__ import annotations

import sys

__all__ = ["complain", "say"]

_LABEL_WIDTH = 12


def say(label: str, text: str, width: int = _LABEL_WIDTH) -> None:
    """Print a line with a label to the standard output, at once."""
    sys.stdout.write(f"{label:<{width}}{text}\n")
    sys.stdout.flush()


def complain(program: str, text: object) -> None:
    """Print one line to the standard error."""
    sys.stderr.write(f"{program}: {text}\n")
    sys.stderr.flush()
