"""Public names of classes that are defined in private modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Class = TypeVar("Class", bound=type)


def public_name(module: str) -> Callable[[Class], Class]:
    """Return a decorator that names the public module of a class, for messages and pickles."""

    def decorate(kind: Class) -> Class:
        kind.__module__ = module
        return kind

    return decorate
