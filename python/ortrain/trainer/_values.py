"""Inputs and outputs of a trainer: arrays of NumPy, or tensors of PyTorch where a user has given some."""

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
    "given_torch",
    "is_torch_module",
    "is_torch_tensor",
    "native_of_torch",
    "tensor_of",
]


def _loaded_torch() -> Any:
    """PyTorch, if the user has imported it. ortrain itself never imports PyTorch."""
    return sys.modules.get("torch")


def is_torch_tensor(value: object) -> bool:
    """True for a tensor of PyTorch."""
    torch = _loaded_torch()
    return torch is not None and isinstance(value, torch.Tensor)


def is_torch_module(value: object) -> bool:
    """True for a ``torch.nn.Module``."""
    torch = _loaded_torch()
    return torch is not None and isinstance(value, torch.nn.Module)


def given_torch(values: Iterable[object]) -> Any:
    """PyTorch if one of these values is a tensor of it, else ``None``."""
    return _loaded_torch() if any(map(is_torch_tensor, values)) else None


def check_dense(name: str, tensor: Any) -> None:
    """Refuse a tensor of PyTorch whose elements do not lie in one block of memory: a sparse one."""
    if tensor.layout != _loaded_torch().strided:
        raise UnsupportedError(
            f"input {name!r} is a tensor of the layout {tensor.layout}; ortrain reads dense ones: give x.to_dense()"
        )


def native_of_torch(name: str, tensor: Any) -> _ortrain.OrtValue:
    """A tensor of PyTorch as the core takes it: its memory, where the elements lie in a row.

    Raises:
        UnsupportedError: for a tensor that is not on the CPU, and for one that is not dense.

    """
    check_dense(name, tensor)
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"input {name!r} lies on the device {tensor.device}; ortrain reads the CPU: give x.cpu()"
        )
    tensor = tensor.detach().contiguous()
    return _ortrain.OrtValue.from_dlpack(tensor, tensor.dtype == _loaded_torch().bool)


def as_torch(torch: Any, value: _ortrain.OrtValue) -> Any:
    """A value as a tensor of PyTorch that shares its memory."""
    # NumPy has no bfloat16, and DLPack gives booleans as bytes.
    if value.data_type() == "tensor(bfloat16)":
        return torch.from_dlpack(value)
    return torch.from_numpy(value.array())


def tensor_of(torch: Any, array: npt.NDArray[Any]) -> Any:
    """An array as a tensor of PyTorch that shares its memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(value: Any) -> npt.NDArray[Any]:
    """An array or a tensor of a state as an array."""
    if is_torch_tensor(value):
        return np.asarray(value.detach().cpu().numpy())
    return np.asarray(value)
