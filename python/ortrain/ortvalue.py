"""Tensors in the hands of ortrain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain import _ortrain

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["OrtValue"]


class OrtValue:
    """An immutable tensor, as ``onnxruntime.OrtValue``: passing it to a step converts and copies nothing twice."""

    __slots__ = ("_ortvalue",)

    def __init__(self, ortvalue: _ortrain.OrtValue) -> None:
        if not isinstance(ortvalue, _ortrain.OrtValue):
            raise TypeError("OrtValue is made by OrtValue.ortvalue_from_numpy(array)")
        self._ortvalue = ortvalue

    @staticmethod
    def ortvalue_from_numpy(numpy_obj: npt.NDArray[Any]) -> OrtValue:
        """A copy of an array, whatever its strides and byte order."""
        return OrtValue(_ortrain.OrtValue.from_numpy(np.asarray(numpy_obj)))

    @staticmethod
    def ortvalue_from_numpy_with_onnx_type(data: npt.NDArray[Any], onnx_element_type: int) -> OrtValue:
        """A copy of an array whose bits mean an ONNX element type of the same size.

        With ``16`` (``TensorProto.BFLOAT16``), a uint16 array holds bfloat16 numbers, no ``ml_dtypes`` needed.
        """
        return OrtValue(_ortrain.OrtValue.from_numpy(np.asarray(data), onnx_element_type))

    def numpy(self) -> npt.NDArray[Any]:
        """A copy as an array. bfloat16 is ``ml_dtypes.bfloat16`` if that is installed, else its uint16 bits."""
        return self._ortvalue.numpy()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("an OrtValue becomes an array by a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def shape(self) -> list[int]:
        """The sizes of the axes."""
        return self._ortvalue.shape()

    def data_type(self) -> str:
        """The type as onnxruntime spells it: ``tensor(float)``, ``tensor(int64)``, …."""
        return self._ortvalue.data_type()

    def element_type(self) -> int:
        """The number of the element type in ``TensorProto.DataType``."""
        return self._ortvalue.element_type()

    def device_name(self) -> str:
        """Where it lies: ``cpu``."""
        return "cpu"

    def is_tensor(self) -> bool:
        """Whether it is a tensor, which it always is."""
        return True

    def has_value(self) -> bool:
        """Whether there is a value, which there always is."""
        return True

    def __repr__(self) -> str:
        return f"OrtValue({self.data_type()}, shape={self.shape()})"
