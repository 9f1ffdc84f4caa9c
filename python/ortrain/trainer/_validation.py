"""Validation of options and model descriptions with the package cerberus: fields, types and checks.

cerberus is imported at the first validation.
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
    """Validation rules for a user's dictionary."""

    schema: Mapping[str, Any]
    """Fields, in the format of cerberus."""
    types: Mapping[str, tuple[Classes, Classes]]
    """Additional types by name: the accepted classes, and their excluded subclasses."""
    checks: Mapping[str, Check]
    """Checks by name for the rule ``check_with``: functions of document, key and value that return messages."""


def instances(*kinds: type) -> tuple[Classes, Classes]:
    """Returns the type definition that accepts the instances of some classes."""
    return kinds, ()


def validated(subject: str, document: Mapping[Any, Any], rules: Rules) -> dict[Any, Any]:
    """Returns a copy of a dictionary in which missing fields have their defaults.

    Raises:
        ValueError: for values that the rules do not allow. The message lists all of them by field.
        ImportError: if cerberus is not installed.

    """
    validator = _validator_class(rules)(rules.schema)
    result: dict[Any, Any] | None = validator.validated(document)
    if result is None:
        raise ValueError(f"Invalid {subject}: {validator.errors}")
    return result


@functools.cache
def _validator_class(rules: Rules) -> Any:
    """Returns the validator class for some rules. cerberus finds types and checks among the members of a class."""
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
            # cerberus deep-copies errors together with the invalid values, and some values cannot be copied.
            for error in self._errors:
                error.value = None

    return Validator


def _method(check: Check) -> Callable[[Any, Any, Any], None]:
    def method(validator: Any, field: Any, value: Any) -> None:
        for message in check(validator.document, field, value):
            validator._error(field, message)

    return method
