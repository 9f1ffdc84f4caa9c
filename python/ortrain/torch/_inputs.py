"""PyTorch tensors that are arguments of a call, and engine values that share their memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from ortrain import _ortrain
from ortrain.errors import InvalidArgumentError, UnsupportedError

_DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(double)": torch.float64,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(int8)": torch.int8,
    "tensor(int16)": torch.int16,
    "tensor(int32)": torch.int32,
    "tensor(int64)": torch.int64,
    "tensor(uint8)": torch.uint8,
    "tensor(uint16)": torch.uint16,
    "tensor(uint32)": torch.uint32,
    "tensor(uint64)": torch.uint64,
    "tensor(bool)": torch.bool,
}
_BOOL, _DENSE = 9, torch.strided
# The public ``from_dlpack`` checks its argument and then calls this function. Each gradient needs one call.
_from_capsule = getattr(torch._C, "_from_dlpack", from_dlpack)
# Start of the advice in the error message for a tensor that does not match, by role.
_ADVICE = {"input": "convert it with", "parameter": "call the module's", "statistic": "call the module's"}


def dtype_of(what: str, kind: str) -> torch.dtype:
    """Returns the PyTorch type for the engine's type name ``kind``.

    Raises:
        UnsupportedError: for a sequence, or an element type that PyTorch does not have.

    """
    found = _DTYPES.get(kind)
    if found is None:
        raise UnsupportedError(f"{what} has the type {kind}, which PyTorch does not support")
    return found


def value_of(tensor: torch.Tensor) -> _ortrain.OrtValue:
    """Returns a value that shares the memory of a tensor, or of a contiguous copy if the tensor is not contiguous."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.resolve_neg().contiguous()
    return _ortrain.OrtValue.from_dlpack(to_dlpack(tensor))


def tensor_of(value: _ortrain.OrtValue) -> torch.Tensor:
    """Returns a tensor that shares the memory of a value."""
    # DLPack capsules store booleans as bytes, so booleans take the slower public function.
    return torch.from_dlpack(value) if value.element_type() == _BOOL else _from_capsule(value.to_dlpack())


class Argument:
    """A tensor argument of a call: its name, its role, and its required type."""

    __slots__ = ("_address", "_shape", "_value", "dtype", "name", "role")

    def __init__(self, role: str, name: str, kind: str) -> None:
        self.role = role
        self.name = name
        self.dtype = dtype_of(f"{role} {name!r}", kind)
        # Address and shape of the last call's tensor, and the value built for that tensor.
        self._address = -1
        self._shape: Any = None
        self._value: _ortrain.OrtValue | None = None

    def value(self, tensor: torch.Tensor) -> _ortrain.OrtValue:
        """Returns the value for a tensor, from a cache while its address, type and shape stay the same."""
        if (
            self._value is not None
            and tensor.data_ptr() == self._address
            and tensor.dtype is self.dtype
            and tensor.shape == self._shape
            and tensor.is_contiguous()
        ):
            return self._value
        self.check(tensor)
        value = value_of(tensor)
        if value.data_ptr() == tensor.data_ptr():
            self._address, self._shape, self._value = tensor.data_ptr(), tensor.shape, value
        return value

    def check(self, tensor: torch.Tensor) -> None:
        """Checks for a dense CPU tensor of the right type.

        Raises:
            InvalidArgumentError: if the tensor is not one.

        """
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.dtype is self.dtype
            and tensor.is_cpu
            and tensor.layout is _DENSE
        ):
            return
        what, advice = f"{self.role} {self.name!r}", _ADVICE[self.role]
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(
                f"{what} must be a torch.Tensor, got {type(tensor).__name__}; torch.as_tensor makes one"
            )
        if tensor.layout is not _DENSE:
            raise InvalidArgumentError(f"{what} has the layout {tensor.layout}; {advice} to_dense()")
        if not tensor.is_cpu:
            raise InvalidArgumentError(
                f"{what} is on device '{tensor.device}', but the model runs on the CPU; {advice} to('cpu')"
            )
        raise InvalidArgumentError(
            f"{what} is {tensor.dtype}, but the model has {self.dtype}; {advice} to({self.dtype})"
        )
