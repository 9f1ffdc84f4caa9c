"""Objects by name and settings: ``"adamw"``, or ``{"name": "adamw", "weight_decay": 0.05}``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError

__all__ = ["create", "name_and_settings"]


def name_and_settings(chosen: str | Mapping[str, Any], label: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of a text or a dict.

    Raises:
        InvalidArgumentError: if a dict has no name.

    """
    if isinstance(chosen, str):
        return chosen, {}
    settings = dict(chosen)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise InvalidArgumentError(f"{label} is a dict without the text 'name'; it has {', '.join(map(repr, chosen))}")
    return name, settings


def create(
    kind: Callable[..., Any],
    label: str,
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    others: Sequence[str] = (),
) -> Any:
    """Call a class with settings.

    Args:
        kind: the class.
        label: the name of the class in messages, such as ``optimizer 'adamw'``.
        settings: the settings of the caller.
        defaults: values of further settings, if the class has them.
        others: settings that the caller handles, for messages.

    Raises:
        InvalidArgumentError: for an unknown, a missing or a wrong setting.

    """
    parameters = inspect.signature(kind).parameters
    for name in settings:
        if name not in parameters:
            known = [*parameters, *others]
            raise InvalidArgumentError(
                f"the {label} has no setting {name!r}; it has {', '.join(known) or 'none'}{hint(name, known)}"
            )
    found = {name: value for name, value in (defaults or {}).items() if name in parameters} | dict(settings)
    for name, parameter in parameters.items():
        if name not in found and parameter.default is inspect.Parameter.empty:
            raise InvalidArgumentError(f"the {label} needs the setting {name!r}")
    try:
        return kind(**found)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{label}: {error}") from error
