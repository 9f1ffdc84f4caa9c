"""Conversion of records of the core to the public classes with the same fields."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    _Record = TypeVar("_Record", bound=DataclassInstance)
else:
    _Record = TypeVar("_Record")


def record_of(kind: type[_Record], native: object, **changed: Any) -> _Record:
    """Return a dataclass with the fields of a record of the core; ``changed`` are fields with other values."""
    names = (field.name for field in fields(kind))
    return kind(**{name: changed[name] if name in changed else getattr(native, name) for name in names})
