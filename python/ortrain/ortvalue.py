"""Tensors in the hands of ortrain.

>>> from ortrain.ortvalue import OrtValue
>>> OrtValue.ortvalue_from_numpy(np.zeros((2, 3), np.float32))
OrtValue(tensor(float), shape=[2, 3])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain import _ortrain

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["OrtValue"]


class OrtValue:
    """An immutable tensor, as ``onnxruntime.OrtValue``: passing it to a step converts and copies nothing twice.

    >>> from ortrain import OrtValue
    >>> x, labels = OrtValue.ortvalue_from_numpy(x), OrtValue.ortvalue_from_numpy(labels)
    >>> module(x, labels)
    OrtValue(tensor(float), shape=[])
    """

    __slots__ = ("_ortvalue",)

    def __init__(self, ortvalue: _ortrain.OrtValue) -> None:
        if not isinstance(ortvalue, _ortrain.OrtValue):
            raise TypeError("OrtValue is made by OrtValue.ortvalue_from_numpy(array)")
        self._ortvalue = ortvalue

    @staticmethod
    def ortvalue_from_numpy(numpy_obj: npt.NDArray[Any]) -> OrtValue:
        """A copy of an array, whatever its strides and byte order.

        Its element type is one that ONNX has and an array can hold: floats of 16, 32 and 64 bits, integers of 8 to 64
        bits, booleans, and ``bfloat16`` of the package ``ml_dtypes``.

        Raises:
            UnsupportedError: for elements that are none of these: strings, objects, dates, complex numbers.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.arange(6).reshape(2, 3).T)
        OrtValue(tensor(int64), shape=[3, 2])

        """
        return OrtValue(_ortrain.OrtValue.from_numpy(np.asarray(numpy_obj)))

    @staticmethod
    def ortvalue_from_numpy_with_onnx_type(data: npt.NDArray[Any], onnx_element_type: int) -> OrtValue:
        """A copy of an array whose bits mean an ONNX element type of the same size.

        With ``16`` (``TensorProto.BFLOAT16``), a uint16 array holds bfloat16 numbers, no ``ml_dtypes`` needed.

        >>> from ortrain import OrtValue
        >>> one = np.asarray([0x3F80], np.uint16)
        >>> OrtValue.ortvalue_from_numpy_with_onnx_type(one, onnx.TensorProto.BFLOAT16)
        OrtValue(tensor(bfloat16), shape=[1])
        """
        return OrtValue(_ortrain.OrtValue.from_numpy(np.asarray(data), onnx_element_type))

    def numpy(self) -> npt.NDArray[Any]:
        """A copy as an array. bfloat16 is ``ml_dtypes.bfloat16`` if that is installed, else its uint16 bits.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.asarray([1, 2, 3])).numpy()
        array([1, 2, 3])
        """
        return self._ortvalue.numpy()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("an OrtValue becomes an array by a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def shape(self) -> list[int]:
        """The sizes of the axes.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros((2, 3))).shape()
        [2, 3]
        """
        return self._ortvalue.shape()

    def data_type(self) -> str:
        """The type as onnxruntime spells it: ``tensor(float)``, ``tensor(int64)``, ….

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros((2, 3))).data_type()
        'tensor(double)'
        """
        return self._ortvalue.data_type()

    def element_type(self) -> int:
        """The number of the element type in ``TensorProto.DataType``.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros(3)).element_type() == onnx.TensorProto.DOUBLE
        True
        """
        return self._ortvalue.element_type()

    def device_name(self) -> str:
        """Where it lies: ``cpu``.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros(3)).device_name()
        'cpu'
        """
        return "cpu"

    def is_tensor(self) -> bool:
        """Whether it is a tensor, which it always is.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros(3)).is_tensor()
        True
        """
        return True

    def has_value(self) -> bool:
        """Whether there is a value, which there always is.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros(3)).has_value()
        True
        """
        return True

    def __repr__(self) -> str:
        return f"OrtValue({self.data_type()}, shape={self.shape()})"
