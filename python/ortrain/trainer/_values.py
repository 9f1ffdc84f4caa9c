"""Conversion of a trainer's inputs and outputs: NumPy arrays, or PyTorch tensors if the inputs have any."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain import _ortrain
from ortrain.errors import UnsupportedError

__all__ = [
    "as_array",
    "as_torch",
    "check_dense",
    "is_torch_module",
    "is_torch_tensor",
    "native_of_torch",
    "tensor_of",
    "torch_of",
]


def _loaded_torch() -> Any:
    """Returns PyTorch if the user has imported it, else ``None``. ortrain itself never imports PyTorch."""
    return sys.modules.get("torch")


def is_torch_tensor(value: object) -> bool:
    """Returns true for a PyTorch tensor."""
    torch = _loaded_torch()
    return torch is not None and isinstance(value, torch.Tensor)


def is_torch_module(value: object) -> bool:
    """Returns true for a ``torch.nn.Module``."""
    torch = _loaded_torch()
    return torch is not None and isinstance(value, torch.nn.Module)


def torch_of(values: Iterable[object]) -> Any:
    """Returns PyTorch if one of the values is a PyTorch tensor, else ``None``."""
    return _loaded_torch() if any(map(is_torch_tensor, values)) else None


def check_dense(name: str, tensor: Any) -> None:
    """Raises an UnsupportedError for a sparse PyTorch tensor."""
    if tensor.layout != _loaded_torch().strided:
        raise UnsupportedError(f"input {name!r} has the layout {tensor.layout}, but must be dense: pass x.to_dense()")


def native_of_torch(name: str, tensor: Any) -> _ortrain.OrtValue:
    """Converts a PyTorch tensor for the core. A contiguous tensor shares its memory.

    Raises:
        UnsupportedError: for a tensor that is not on the CPU or not dense.

    """
    check_dense(name, tensor)
    if tensor.device.type != "cpu":
        raise UnsupportedError(f"input {name!r} is on the device {tensor.device}, but must be on the CPU: pass x.cpu()")
    tensor = tensor.detach().contiguous()
    return _ortrain.OrtValue.from_dlpack(tensor, tensor.dtype == _loaded_torch().bool)


def as_torch(torch: Any, value: _ortrain.OrtValue) -> Any:
    """Returns a PyTorch tensor that shares the memory of a value."""
    # NumPy has no bfloat16, and DLPack turns booleans into bytes.
    if value.data_type() == "tensor(bfloat16)":
        return torch.from_dlpack(value)
    return torch.from_numpy(value.array())


def tensor_of(torch: Any, array: npt.NDArray[Any]) -> Any:
    """Returns a PyTorch tensor that shares the memory of an array."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(value: Any) -> npt.NDArray[Any]:
    """Converts an array or tensor of a state to an array."""
    if is_torch_tensor(value):
        return np.asarray(value.detach().cpu().numpy())
    return np.asarray(value)
