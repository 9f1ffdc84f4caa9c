"""Location of a warning in the user's program."""

from __future__ import annotations

import sys

__all__ = ["level_of_user"]

_PACKAGE = __name__.partition(".")[0]


def level_of_user() -> int:
    """Returns the ``stacklevel`` of the nearest caller outside ortrain, for a warning in the calling function.

    A trainer warns from different call depths, so a fixed level would often point into ortrain.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    return level
