"""Conversion of the values that a caller may pass as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ortrain import _ortrain
from ortrain.api.outputs import Scalar
from ortrain.errors import InvalidArgumentError
from ortrain.ortvalue import OrtValue

# Name, type in the notation of onnxruntime, and shape of an input.
Described: TypeAlias = _ortrain.ValueDescription

# Kind of CUDA devices in DLPack.
_CUDA = 2

# bfloat16 is missing because NumPy does not have it: an array of bfloat16 already has a type from another package.
_TYPES: dict[str, np.dtype[Any]] = {
    f"tensor({name})": np.dtype(kind)
    for name, kind in {"float": "float32", "double": "float64", "float16": "float16"}.items()
} | {
    f"tensor({name})": np.dtype(name) for name in (f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
}


def is_ortvalue(value: object) -> bool:
    """Return True for an ``OrtValue`` of ortrain or onnxruntime, and for the native object inside one of them."""
    return isinstance(value, OrtValue | _ortrain.OrtValue) or _is_of_onnxruntime(value)


def _is_of_onnxruntime(value: object) -> bool:
    kind = type(value)
    return kind.__name__ == "OrtValue" and kind.__module__.partition(".")[0] == "onnxruntime"


def outputs_like_inputs(outputs: Iterable[_ortrain.OrtValue], inputs: Sequence[object]) -> list[Any]:
    """Return the outputs of a step in the form of its inputs: ``OrtValue`` if all inputs are, otherwise ndarrays.

    An ndarray without axes also behaves as a number (:class:`~ortrain.api.Scalar`). The outputs are
    ``onnxruntime.OrtValue`` if all inputs are.
    """
    if not inputs or not all(map(is_ortvalue, inputs)):
        return [_array(value) for value in outputs]
    kind = type(inputs[0])
    # Only the wrapper of onnxruntime has `_ortvalue`; the native object inside it has no such attribute.
    theirs = kind is not OrtValue and hasattr(inputs[0], "_ortvalue") and all(type(value) is kind for value in inputs)
    return [_of_kind(kind, value) if theirs else OrtValue(value) for value in outputs]


def _array(value: _ortrain.OrtValue) -> Any:
    array = value.result_array()
    return array if array.ndim else array.view(Scalar)


def _of_kind(kind: Any, value: _ortrain.OrtValue) -> Any:
    """Copy a value into a new ``onnxruntime.OrtValue``. Made from the array, the new value would share its memory."""
    array = value.array()
    element_type: Any = array.dtype.type
    if value.data_type() == "tensor(bfloat16)":
        # NumPy has no type for bfloat16; onnxruntime takes the bits.
        array, element_type = array.view(np.uint16), value.element_type()
    ortvalue = kind.ortvalue_from_shape_and_type(value.shape(), element_type)
    ortvalue.update_inplace(array)
    return ortvalue


def _tensor_of_cuda(value: Any) -> _ortrain.OrtValue | None:
    """Share a tensor of another library in the memory of a CUDA device; return None for any other value."""
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack_device__"):
        return None
    return _ortrain.OrtValue.from_dlpack(value) if value.__dlpack_device__()[0] == _CUDA else None


def native_value(value: Any) -> _ortrain.OrtValue:
    """Convert a value to an ``OrtValue`` of the core.

    Raises:
        TypeError: if the value is no number and no array, and has neither ``__array__`` nor ``__dlpack__``.

    """
    if isinstance(value, OrtValue):
        return value._ortvalue
    if isinstance(value, _ortrain.OrtValue):
        return value
    if (on_device := _tensor_of_cuda(value)) is not None:
        return on_device
    if _is_of_onnxruntime(value):
        value = value.numpy()
    elif not hasattr(value, "__array__") and hasattr(value, "__dlpack__"):
        value = np.from_dlpack(value)
    array = np.asarray(value)
    # The core checks the element type of an array.
    if array.dtype == object and not isinstance(value, np.ndarray):
        raise TypeError(
            f"expected an array of numbers, an OrtValue, or an object with __array__ or __dlpack__, got {value!r}"
        )
    return _ortrain.OrtValue.from_numpy(array)


def input_value(value: Any, described: Described) -> _ortrain.OrtValue:
    """Convert a value for an input, to the type of the input if no element changes.

    Lists and numbers have no type of their own and take the type of the input. Floats are rounded to it, and integers
    must be in its range. A list of floats is an error for an input of integers.

    An array of integers is accepted for an input of integers, and an array of floats for an input of floats. The type
    of the input must hold every element exactly: int32 labels for int64, float64 images with values of float32. The
    caller must cast any other array. An ``OrtValue``, and a tensor in the memory of a CUDA device, is used unchanged.

    Raises:
        InvalidArgumentError: if an element would change, or nested lists have different lengths.
        TypeError: as for :func:`native_value`.

    """
    input_dtype = _TYPES.get(described.type)
    if input_dtype is None or is_ortvalue(value):
        return native_value(value)
    if (on_device := _tensor_of_cuda(value)) is not None:
        return on_device
    if not hasattr(value, "__array__"):
        if hasattr(value, "__dlpack__"):
            value = np.from_dlpack(value)
        else:
            return _ortrain.OrtValue.from_numpy(_of_list(value, input_dtype, described))
    array = np.asarray(value)
    if array.dtype == input_dtype or array.dtype.kind not in "iuf":
        return native_value(array)
    if (array.dtype.kind == "f") != (input_dtype.kind == "f"):
        meant = f"; to convert it, pass .astype(np.{input_dtype})"
        raise InvalidArgumentError(_mismatch(described, input_dtype, array) + "the element types differ" + meant)
    return _ortrain.OrtValue.from_numpy(_exactly(array, input_dtype, described))


def _of_list(value: Any, input_dtype: np.dtype[Any], described: Described) -> np.ndarray[Any, np.dtype[Any]]:
    """Convert lists or numbers to the type of an input."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidArgumentError(
            f"input {described.name!r}: nested lists have different lengths; pad the short lists ({error})"
        ) from error
    if array.size == 0:
        return array.astype(input_dtype)
    if array.dtype.kind not in "iuf" or (array.dtype.kind == "f" and input_dtype.kind != "f"):
        # The core reports elements that no tensor can have.
        _ = native_value(value)
        raise InvalidArgumentError(_mismatch(described, input_dtype, array) + "the element types differ")
    return array.astype(input_dtype) if input_dtype.kind == "f" else _exactly(array, input_dtype, described)


def _exactly(
    array: np.ndarray[Any, np.dtype[Any]], input_dtype: np.dtype[Any], described: Described
) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the array in a type that holds each of its elements; otherwise raise an error."""
    if np.can_cast(array.dtype, input_dtype, "safe"):
        return array.astype(input_dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(input_dtype)
        changed = (cast.astype(array.dtype) != array) & ~np.isnan(array)
    if input_dtype.kind != "f":
        # An integer that wraps around converts back to its old value, so its range is checked as well.
        limits = np.iinfo(input_dtype)
        changed |= (array < limits.min) | (array > limits.max)
    count = np.count_nonzero(changed)
    if count:
        verb = "be rounded" if input_dtype.kind == "f" else "change"
        raise InvalidArgumentError(
            f"{_mismatch(described, input_dtype, array)}{count} of {array.size} elements would {verb}; to accept this, "
            f"pass .astype(np.{input_dtype})"
        )
    return cast


def _mismatch(described: Described, input_dtype: np.dtype[Any], array: np.ndarray[Any, np.dtype[Any]]) -> str:
    sizes = ", ".join(map(str, described.shape))
    return f'input "{described.name}" must be {input_dtype}[{sizes}], got {array.dtype}{list(array.shape)}: '
