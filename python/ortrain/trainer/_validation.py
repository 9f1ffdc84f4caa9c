"""The validation that options and model descriptions share: fields, types and checks, run by the package cerberus.

cerberus is imported when something is validated, and not before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Rules", "instances", "validated"]

Check = Callable[[Mapping[Any, Any], Any, Any], Iterable[str]]
Classes = tuple[type, ...]


@dataclass(frozen=True, eq=False)
class Rules:
    """The rules for a dictionary of a user."""

    schema: Mapping[str, Any]
    """Fields, as cerberus takes them."""
    types: Mapping[str, tuple[Classes, Classes]]
    """Types by names, beside those of cerberus: the classes that count, and those among them that do not."""
    checks: Mapping[str, Check]
    """Checks by names, for the rule ``check_with``: from all fields beside, the key and the value to messages."""


def instances(*kinds: type) -> tuple[Classes, Classes]:
    """The type of all instances of some classes."""
    return kinds, ()


def validated(subject: str, document: Mapping[Any, Any], rules: Rules) -> dict[Any, Any]:
    """A copy of a dictionary in which missing fields have their defaults.

    Raises:
        ValueError: for values that the rules do not allow. The message lists all of them by their fields.
        ImportError: if cerberus is not installed.

    """
    validator = _validator_class(rules)(rules.schema)
    result: dict[Any, Any] | None = validator.validated(document)
    if result is None:
        raise ValueError(f"Invalid {subject}: {validator.errors}")
    return result


@functools.cache
def _validator_class(rules: Rules) -> Any:
    """The class that validates by some rules; cerberus finds types and checks among the members of a class."""
    try:
        import cerberus
    except ImportError as error:
        raise ImportError(
            "ortrain.trainer needs cerberus, which is not installed here: pip install ortrain[trainer]", name="cerberus"
        ) from error

    checks: Any = type("Checks", (), {f"_check_with_{name}": _method(check) for name, check in rules.checks.items()})

    class Validator(checks, cerberus.Validator):  # type: ignore[misc]
        types_mapping = cerberus.Validator.types_mapping | {
            name: cerberus.TypeDefinition(name, *classes) for name, classes in rules.types.items()
        }

        def _error(self, *args: Any) -> None:
            super()._error(*args)
            # cerberus copies errors deeply, with the values that are wrong, and some values cannot be copied.
            for error in self._errors:
                error.value = None

    return Validator


def _method(check: Check) -> Callable[[Any, Any, Any], None]:
    def method(validator: Any, field: Any, value: Any) -> None:
        for message in check(validator.document, field, value):
            validator._error(field, message)

    return method
