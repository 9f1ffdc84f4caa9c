"""What a caller may pass for a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ortrain import _ortrain
from ortrain.api.outputs import Scalar
from ortrain.errors import InvalidArgumentError
from ortrain.ortvalue import OrtValue

# Name, type as onnxruntime spells it, and shape of an input.
Described: TypeAlias = tuple[str, str, list[int | str | None]]

# NumPy has no bfloat16: whoever has an array of it has the type, too.
_TYPES: dict[str, np.dtype[Any]] = {
    f"tensor({name})": np.dtype(kind)
    for name, kind in {"float": "float32", "double": "float64", "float16": "float16"}.items()
} | {
    f"tensor({name})": np.dtype(name) for name in (f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
}


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
    array = value.array()
    return array if array.ndim else array.view(Scalar)


def _of_kind(kind: Any, value: _ortrain.OrtValue) -> Any:
    """A copy as an ``onnxruntime.OrtValue``, in memory of its own: made from an array, it would be a view of that."""
    array = value.array()
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


def input_value(value: Any, described: Described) -> _ortrain.OrtValue:
    """A value for an input, in the type of the input if that loses nothing.

    Lists and numbers, which have no type of their own, take the type of the input: floats are rounded to it, integers
    must be in its range, and a list of floats is no tensor of integers. An array of integers is taken for an input of
    integers, and one of floats for an input of floats, if every element has its value in that type, too: int32 labels
    for int64, float64 images with values of float32. Everything else has to be cast by the caller. An ``OrtValue`` is
    taken as it is.

    Raises:
        InvalidArgumentError: if an element would change, or lists are of different lengths.
        TypeError: as :func:`native_value`.

    """
    wanted = _TYPES.get(described[1])
    if wanted is None or is_ortvalue(value):
        return native_value(value)
    if not hasattr(value, "__array__"):
        if hasattr(value, "__dlpack__"):
            value = np.from_dlpack(value)
        else:
            return _ortrain.OrtValue.from_numpy(_of_list(value, wanted, described))
    array = np.asarray(value)
    if array.dtype == wanted or array.dtype.kind not in "iuf":
        return native_value(array)
    if (array.dtype.kind == "f") != (wanted.kind == "f"):
        meant = f"; if its elements are meant, give it as .astype(np.{wanted})"
        raise InvalidArgumentError(_mismatch(described, wanted, array) + "the element types differ" + meant)
    return _ortrain.OrtValue.from_numpy(_exactly(array, wanted, described))


def _of_list(value: Any, wanted: np.dtype[Any], described: Described) -> np.ndarray[Any, np.dtype[Any]]:
    """Lists or numbers in the type of an input."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidArgumentError(
            f"input {described[0]!r} was given lists of different lengths, which are no tensor; pad the short ones "
            f"({error})"
        ) from error
    if array.size == 0:
        return array.astype(wanted)
    if array.dtype.kind not in "iuf" or (array.dtype.kind == "f" and wanted.kind != "f"):
        # The core says what is wrong with it.
        _ = native_value(value)
        raise InvalidArgumentError(_mismatch(described, wanted, array) + "the element types differ")
    return array.astype(wanted) if wanted.kind == "f" else _exactly(array, wanted, described)


def _exactly(
    array: np.ndarray[Any, np.dtype[Any]], wanted: np.dtype[Any], described: Described
) -> np.ndarray[Any, np.dtype[Any]]:
    """The array in a type that holds each of its elements."""
    if np.can_cast(array.dtype, wanted, "safe"):
        return array.astype(wanted)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(wanted)
        changed = (cast.astype(array.dtype) != array) & ~np.isnan(array)
    if wanted.kind != "f":
        # A number that wraps comes back as it was.
        limits = np.iinfo(wanted)
        changed |= (array < limits.min) | (array > limits.max)
    count = np.count_nonzero(changed)
    if count:
        verb = "be rounded" if wanted.kind == "f" else "change"
        raise InvalidArgumentError(
            f"{_mismatch(described, wanted, array)}{count} of its {array.size} elements would {verb}; if that is "
            f"meant, give it as .astype(np.{wanted})"
        )
    return cast


def _mismatch(described: Described, wanted: np.dtype[Any], array: np.ndarray[Any, np.dtype[Any]]) -> str:
    name, _, shape = described
    sizes = ", ".join("?" if size is None else str(size) for size in shape)
    return f'input "{name}" should be {wanted}[{sizes}], but {array.dtype}{list(array.shape)} was given: '
