"""Selection of the trained parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ortrain.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ortrain._inspect import ParameterInfo

__all__ = ["Selection", "arguments_of", "renamed"]

Selection: TypeAlias = str | Sequence[str] | Callable[["ParameterInfo"], bool] | None

_LAST = re.compile(r"last:(\d+)")


def arguments_of(trainable: Selection, frozen: Selection) -> dict[str, Any]:
    """Return the arguments of ``generate_artifacts`` for a selection.

    Raises:
        InvalidArgumentError: if the selection is empty, or of another type.

    """
    found: dict[str, Any] = {}
    if trainable is None or (isinstance(trainable, str) and trainable == "all"):
        pass
    elif isinstance(trainable, str) and trainable == "head":
        found["last"] = 1
    elif isinstance(trainable, str) and (last := _LAST.fullmatch(trainable)):
        found["last"] = int(last[1])
    else:
        found["requires_grad"] = _patterns("trainable", trainable)
    if frozen is not None:
        found["frozen_params"] = _patterns("frozen", frozen)
    return found


def _patterns(argument: str, selection: Any) -> Any:
    if callable(selection):
        return selection
    names = [selection] if isinstance(selection, str) else list(selection) if isinstance(selection, Sequence) else None
    if not names or not all(isinstance(name, str) for name in names):
        choices = "'all', 'head', 'last:3', " if argument == "trainable" else ""
        raise InvalidArgumentError(
            f"{argument} must be {choices}names, patterns or a callable that takes a ParameterInfo, got {selection!r}"
        )
    return names


def renamed(error: InvalidArgumentError) -> InvalidArgumentError:
    """Return an error of ``generate_artifacts`` with the names of the arguments of the model."""
    text = str(error)
    for old, new in (
        ("requires_grad", "trainable"),
        ("frozen_params", "frozen"),
        ("last must be", "the number of layers in trainable='last:n' must be"),
    ):
        text = text.replace(old, new)
    return InvalidArgumentError(text)
