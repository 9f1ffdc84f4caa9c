"""The place in a user's program that a warning is about."""

from __future__ import annotations

import sys

__all__ = ["level_of_user"]

_PACKAGE = __name__.partition(".")[0]


def level_of_user() -> int:
    """The ``stacklevel`` of the nearest caller outside ortrain, for a warning that the caller of this function gives.

    A trainer warns from several depths of its own calls, so a fixed number would often point into ortrain.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    return level
