"""What a caller may pass for a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ortrain import _ortrain
from ortrain.ortvalue import OrtValue


def is_ortvalue(value: object) -> bool:
    """Whether a value is an ``OrtValue``: ours, onnxruntime's, or the native object inside of one of them."""
    return isinstance(value, OrtValue | _ortrain.OrtValue) or _is_of_onnxruntime(value)


def _is_of_onnxruntime(value: object) -> bool:
    kind = type(value)
    return kind.__name__ == "OrtValue" and kind.__module__.partition(".")[0] == "onnxruntime"


def as_given(outputs: Iterable[_ortrain.OrtValue], given: Sequence[object]) -> list[Any]:
    """The outputs of a step as its inputs were: ``OrtValue`` if all of those are, otherwise ndarrays."""
    wrapped = bool(given) and all(map(is_ortvalue, given))
    return [OrtValue(value) if wrapped else value.numpy() for value in outputs]


def native_value(value: Any) -> _ortrain.OrtValue:
    """A value as the core takes it.

    Raises:
        TypeError: for what is no number, no array and has no ``__array__`` and no ``__dlpack__``.

    """
    if isinstance(value, OrtValue):
        return value._ortvalue
    if isinstance(value, _ortrain.OrtValue):
        return value
    if _is_of_onnxruntime(value):
        value = value.numpy()
    elif not hasattr(value, "__array__") and hasattr(value, "__dlpack__"):
        value = np.from_dlpack(value)
    array = np.asarray(value)
    # What elements an array may have is said by the core.
    if array.dtype == object and not isinstance(value, np.ndarray):
        raise TypeError(
            f"a tensor is an array of numbers, an OrtValue, or has __array__ or __dlpack__; this is {value!r}"
        )
    return _ortrain.OrtValue.from_numpy(array)
