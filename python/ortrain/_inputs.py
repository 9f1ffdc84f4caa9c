"""What a caller may pass for a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ortrain import _ortrain
from ortrain.api.outputs import Scalar
from ortrain.ortvalue import OrtValue


def is_ortvalue(value: object) -> bool:
    """Whether a value is an ``OrtValue``: ours, onnxruntime's, or the native object inside of one of them."""
    return isinstance(value, OrtValue | _ortrain.OrtValue) or _is_of_onnxruntime(value)


def _is_of_onnxruntime(value: object) -> bool:
    kind = type(value)
    return kind.__name__ == "OrtValue" and kind.__module__.partition(".")[0] == "onnxruntime"


def as_given(outputs: Iterable[_ortrain.OrtValue], given: Sequence[object]) -> list[Any]:
    """The outputs of a step as its inputs were: ``OrtValue`` if all of those are, otherwise ndarrays.

    An ndarray without axes is a number, too (:class:`~ortrain.api.Scalar`).
    They are onnxruntime's if all inputs are its ``onnxruntime.OrtValue``.
    """
    if not given or not all(map(is_ortvalue, given)):
        return [_array(value) for value in outputs]
    kind = type(given[0])
    # The native object inside of onnxruntime's has none inside of itself.
    theirs = kind is not OrtValue and hasattr(given[0], "_ortvalue") and all(type(value) is kind for value in given)
    return [_of_kind(kind, value) if theirs else OrtValue(value) for value in outputs]


def _array(value: _ortrain.OrtValue) -> Any:
    array = value.numpy()
    return array if array.ndim else array.view(Scalar)


def _of_kind(kind: Any, value: _ortrain.OrtValue) -> Any:
    """A copy as an ``onnxruntime.OrtValue``, in memory of its own: made from an array, it would be a view of that."""
    array = value.numpy()
    element_type: Any = array.dtype.type
    if value.data_type() == "tensor(bfloat16)":
        # NumPy has no type for these; onnxruntime takes the bits.
        array, element_type = array.view(np.uint16), value.element_type()
    made = kind.ortvalue_from_shape_and_type(value.shape(), element_type)
    made.update_inplace(array)
    return made


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
