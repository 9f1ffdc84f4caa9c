"""Element types of values: types of NumPy, and types of PyTorch for a user who has imported it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

__all__ = ["as_dtype", "dtype_onnx_to_torch", "dtype_torch_to_numpy"]

_NUMPY_BY_TORCH: dict[str, type[np.generic]] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    # NumPy has no bfloat16.
    "bfloat16": np.float16,
    "int64": np.longlong,
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "uint8": np.uint8,
    "complex64": np.complex64,
    "complex128": np.complex128,
    "bool": np.bool_,
}

# Names of the types of ONNX, in the order of their numbers, with names of PyTorch.
_TORCH_BY_ONNX: dict[str, str | type[str] | None] = {
    "UNDEFINED": None,
    "FLOAT": "float32",
    "UINT8": "int8",
    "INT8": "int8",
    "UINT16": "int16",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "STRING": str,
    "BOOL": "bool",
    "FLOAT16": "float16",
    "DOUBLE": "float64",
    "UINT32": "int32",
    "UINT64": "int64",
    "COMPLEX64": "complex64",
    "COMPLEX128": "complex128",
}


def _is_torch_dtype(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.dtype)


def as_dtype(value: object) -> Any:
    """An element type as descriptions keep it: a ``numpy.dtype``, or a ``torch.dtype`` where one is given.

    Raises:
        AssertionError: for anything but ``numpy.dtype``, a scalar class of NumPy, and ``torch.dtype``.

    """
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value)
    if _is_torch_dtype(value):
        return value
    raise AssertionError(f"'dtype' must be a type of NumPy (numpy.dtype, numpy.float32) or of PyTorch, not {value!r}")


def dtype_torch_to_numpy(torch_dtype: object) -> type[np.generic]:
    """The type of NumPy for a type of PyTorch; both half precisions are ``numpy.float16``.

    Raises:
        ValueError: for a type without a counterpart, and for what is no ``torch.dtype``.

    """
    name = str(torch_dtype).removeprefix("torch.")
    if not _is_torch_dtype(torch_dtype) or name not in _NUMPY_BY_TORCH:
        raise ValueError(
            f"NumPy has no type for {torch_dtype!r}; a torch.dtype is wanted: {', '.join(_NUMPY_BY_TORCH)}"
        )
    return _NUMPY_BY_TORCH[name]


def dtype_onnx_to_torch(onnx_type: object) -> Any:
    """The type of PyTorch for a type of ONNX, by number or name. Integers without a sign are those with one.

    Strings are ``str``, and an undefined type is ``None``.

    Raises:
        AssertionError: for a number or a name without a counterpart.
        ValueError: for what is neither a number nor a name.
        ImportError: where PyTorch has not been imported.

    """
    if not isinstance(onnx_type, (int, str)) or isinstance(onnx_type, bool):
        raise ValueError(f"a type of ONNX is the number or the name of a type of TensorProto, not {onnx_type!r}")
    names = list(_TORCH_BY_ONNX)
    name = onnx_type if isinstance(onnx_type, str) else dict(enumerate(names)).get(onnx_type)
    if name not in _TORCH_BY_ONNX:
        raise AssertionError(f"PyTorch has no type for the type {onnx_type!r} of ONNX; there are {', '.join(names)}")
    kind = _TORCH_BY_ONNX[name]
    if not isinstance(kind, str):
        return kind
    torch = sys.modules.get("torch")
    if torch is None:
        raise ImportError("a type of PyTorch is asked for, and PyTorch has not been imported", name="torch")
    return getattr(torch, kind)
