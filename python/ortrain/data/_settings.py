"""Settings of the readers: the choices of a caller, and the classes and columns of the training data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError

__all__ = ["InputDescription", "Settings", "common_settings", "settings_for"]


class InputDescription(Protocol):
    """Input of a model: ``NodeArg``, or any object with these attributes."""

    @property
    def name(self) -> str:
        """Name of the input."""

    @property
    def type(self) -> str:
        """Type in the notation of onnxruntime: ``tensor(float)``."""

    @property
    def shape(self) -> Any:
        """A number, a name, or ``None`` per axis."""


@dataclass(frozen=True)
class Settings:
    """Choices about how data is read. ``None`` leaves a choice to the reader."""

    target: str | tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    sample_weight: str | None = None
    size: tuple[int, int] | None = None
    layout: str | None = None
    channels: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    flip: str | None = None
    crop: float | None = None
    rotation: float | None = None
    colour: float | None = None
    mixup: float | None = None
    skip_broken: bool | None = None
    tokenizer: str | None = None
    task: str | None = None
    text: str | None = None
    text_pair: str | None = None
    truncate: bool | None = None
    length: int | None = None
    buckets: tuple[int, ...] | None = None
    mask_share: float | None = None
    sample_rate: int | None = None
    seconds: float | None = None
    # Learned from the training data.
    classes: tuple[str, ...] | None = None
    categories: Mapping[str, tuple[str, ...]] | None = None
    header: tuple[str, ...] | None = None
    integers: tuple[str, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the settings that are not ``None`` as JSON values."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
        if self.categories is not None:
            values["categories"] = {name: list(texts) for name, texts in self.categories.items()}
        return {name: value for name, value in values.items() if value is not None}


_COMMON = ("target",)
_AUGMENTATION = ("flip", "crop", "rotation", "colour", "mixup")
_TEXT = ("tokenizer", "task", "length", "mask_share")
_BY_KIND = {
    "images": ("size", "layout", "channels", "mean", "std", *_AUGMENTATION, "skip_broken", "classes"),
    "table": (*_COMMON, "columns", "sample_weight", "classes", "categories", "header", "integers"),
    "arrays": (*_COMMON, "columns", "sample_weight", "classes"),
    "jsonl": (*_COMMON, *_TEXT, "text", "text_pair", "truncate", "buckets", "classes"),
    "text": _TEXT,
    "audio": ("sample_rate", "seconds", "mixup", "skip_broken", "classes"),
}
_PAIRS = ("size",)
_TUPLES = ("columns", "mean", "std", "buckets", "classes", "header", "integers")


def _normalized(name: str, value: Any) -> Any:
    """Return a value in the type of its field: JSON has lists where a field has a tuple."""
    if value is None:
        return None
    if name == "target":
        return value if isinstance(value, str) else tuple(value)
    if name in _PAIRS:
        pair = (value, value) if isinstance(value, int) else tuple(value)
        if len(pair) != 2 or not all(isinstance(part, int) and part > 0 for part in pair):
            raise InvalidArgumentError(f"{name} must be a positive number, or a pair (height, width), got {value!r}")
        return pair
    if name in _TUPLES:
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            value = (value,)
        return tuple(value)
    if name == "flip":
        value = {True: "horizontal", False: None}.get(value, value)
        if value not in (None, "horizontal", "vertical", "both"):
            raise InvalidArgumentError(f'flip must be "horizontal", "vertical" or "both", got {value!r}')
        return value
    if name == "categories":
        return {column: tuple(texts) for column, texts in value.items()}
    if name == "tokenizer":
        return str(value)
    return value


def common_settings(settings: Mapping[str, Any], *kinds: str) -> dict[str, Any]:
    """Return the settings that several kinds of data have."""
    return {name: value for name, value in settings.items() if all(name in _BY_KIND[kind] for kind in kinds)}


def settings_for(kind: str, chosen: Mapping[str, Any], like: Mapping[str, Any] | None) -> Settings:
    """Return the settings of a reader: the chosen values, then the settings of another source.

    Raises:
        InvalidArgumentError: if a setting is unknown, or belongs to another kind of data.

    """
    names = [field.name for field in fields(Settings)]
    for name, value in chosen.items():
        if name not in names:
            raise InvalidArgumentError(f"there is no setting {name!r} of data{hint(name, names)}")
        if value is not None and name not in _BY_KIND[kind]:
            kinds = " and ".join(other for other, settings in _BY_KIND.items() if name in settings)
            raise InvalidArgumentError(f"{name} is a setting of {kinds}; this data is of the kind {kind}")
    values = {name: _normalized(name, value) for name, value in chosen.items()}
    found = Settings(**values)
    if like is None:
        return found
    missing = {
        name: _normalized(name, value) for name, value in like.items() if name in names and getattr(found, name) is None
    }
    return replace(found, **missing)
