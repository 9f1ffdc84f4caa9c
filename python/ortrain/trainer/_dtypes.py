"""Element types of values: NumPy types, and PyTorch types if the user has imported PyTorch."""

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

# PyTorch type names by ONNX type name, in the order of the ONNX type numbers.
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
    """Returns an element type as descriptions store it: a ``torch.dtype`` unchanged, a NumPy type as ``numpy.dtype``.

    Raises:
        AssertionError: for anything but a ``numpy.dtype``, a scalar class of NumPy, or a ``torch.dtype``.

    """
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value)
    if _is_torch_dtype(value):
        return value
    raise AssertionError(f"'dtype' must be a type of NumPy (numpy.dtype, numpy.float32) or of PyTorch, got {value!r}")


def dtype_torch_to_numpy(torch_dtype: object) -> type[np.generic]:
    """Returns the NumPy type for a PyTorch type. ``float16`` and ``bfloat16`` both become ``numpy.float16``.

    Raises:
        ValueError: for a type without a counterpart, or a value that is not a ``torch.dtype``.

    """
    name = str(torch_dtype).removeprefix("torch.")
    if not _is_torch_dtype(torch_dtype) or name not in _NUMPY_BY_TORCH:
        raise ValueError(f"NumPy has no type for {torch_dtype!r}; expected a torch.dtype: {', '.join(_NUMPY_BY_TORCH)}")
    return _NUMPY_BY_TORCH[name]


def dtype_onnx_to_torch(onnx_type: object) -> Any:
    """Returns the PyTorch type for an ONNX type number or name. Unsigned integers become signed integers.

    Strings become ``str``, and an undefined type becomes ``None``.

    Raises:
        AssertionError: for a number or a name without a counterpart.
        ValueError: for a value that is neither a number nor a name.
        ImportError: if PyTorch has not been imported.

    """
    if not isinstance(onnx_type, (int, str)) or isinstance(onnx_type, bool):
        raise ValueError(f"an ONNX type must be the number or the name of a TensorProto type, got {onnx_type!r}")
    names = list(_TORCH_BY_ONNX)
    name = onnx_type if isinstance(onnx_type, str) else dict(enumerate(names)).get(onnx_type)
    if name not in _TORCH_BY_ONNX:
        raise AssertionError(f"PyTorch has no type for the ONNX type {onnx_type!r}; expected one of {', '.join(names)}")
    kind = _TORCH_BY_ONNX[name]
    if not isinstance(kind, str):
        return kind
    torch = sys.modules.get("torch")
    if torch is None:
        raise ImportError("a PyTorch type needs PyTorch, which is not imported: import torch first", name="torch")
    return getattr(torch, kind)
