"""Tensors of PyTorch that calls are given, and values of the engine that share their memory."""

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
# What the public function does in the end, without the looks at what it is given: it is called for each gradient.
_from_capsule = getattr(torch._C, "_from_dlpack", from_dlpack)
# What to do about a tensor that does not fit, by what it is given for.
_ADVICE = {"input": "give it", "parameter": "call the module's", "statistic": "call the module's"}


def dtype_of(what: str, kind: str) -> torch.dtype:
    """The type of PyTorch that the engine calls ``kind``.

    Raises:
        UnsupportedError: for a sequence, and for an element type that PyTorch has not.

    """
    found = _DTYPES.get(kind)
    if found is None:
        raise UnsupportedError(f"{what} is a {kind}, for which PyTorch has no tensor")
    return found


def value_of(tensor: torch.Tensor) -> _ortrain.OrtValue:
    """A value with the memory of a tensor, or of a copy if the elements do not lie in a row."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.resolve_neg().contiguous()
    return _ortrain.OrtValue.from_dlpack(to_dlpack(tensor))


def tensor_of(value: _ortrain.OrtValue) -> torch.Tensor:
    """A tensor with the memory of a value."""
    # Capsules have booleans as bytes. For all else they take the shortest way.
    return torch.from_dlpack(value) if value.element_type() == _BOOL else _from_capsule(value.to_dlpack())


class Given:
    """A tensor that calls are given: its name, what it is there for, and the type it must have."""

    __slots__ = ("_address", "_shape", "_value", "dtype", "name", "role")

    def __init__(self, role: str, name: str, kind: str) -> None:
        self.role = role
        self.name = name
        self.dtype = dtype_of(f"{role} {name!r}", kind)
        # Where the tensor of the last call lay, and the value for it.
        self._address = -1
        self._shape: Any = None
        self._value: _ortrain.OrtValue | None = None

    def value(self, tensor: torch.Tensor) -> _ortrain.OrtValue:
        """The value for a tensor, which is kept from call to call as long as the tensor lies where it did."""
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
        """Check that it is a dense tensor on the CPU of the right type.

        Raises:
            InvalidArgumentError: if not.

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
                f"{what} is of type {type(tensor).__name__}; give a torch.Tensor, as torch.as_tensor makes it"
            )
        if tensor.layout is not _DENSE:
            raise InvalidArgumentError(f"{what} is a tensor of layout {tensor.layout}; {advice} to_dense()")
        if not tensor.is_cpu:
            raise InvalidArgumentError(
                f"{what} lies on device '{tensor.device}', but the model runs on the CPU; {advice} to('cpu')"
            )
        raise InvalidArgumentError(
            f"{what} is {tensor.dtype}, but the model has it as {self.dtype}; {advice} to({self.dtype})"
        )
