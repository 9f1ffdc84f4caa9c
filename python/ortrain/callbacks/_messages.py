"""Lines of ``verbose`` callbacks, and errors about missing packages."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Write a line to the standard output, above a progress bar if one is shown."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    else:
        tqdm.tqdm.write(text)


def missing(user: str, package: str, remedy: str) -> ImportError:
    """Return the error about a package that is not installed."""
    return ImportError(f"{user} needs {package}, which is not installed; {remedy}")
