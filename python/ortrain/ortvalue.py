"""Tensors in the hands of ortrain.

>>> from ortrain.ortvalue import OrtValue
>>> OrtValue.ortvalue_from_numpy(np.zeros((2, 3), np.float32))
OrtValue(tensor(float), shape=[2, 3])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain import _ortrain
from ortrain.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["OrtValue"]


class OrtValue:
    """A tensor in memory of the CPU, as ``onnxruntime.OrtValue``; what it is made of is shared and kept.

    Made from an array (:meth:`ortvalue_from_numpy`) or from a tensor of another library (:meth:`from_dlpack`) it is
    that memory: whoever writes to one of them changes the other. A step takes the elements as they are when it begins;
    it reads a copy, so whatever is written meanwhile changes nothing that has been checked.

    >>> from ortrain import OrtValue
    >>> x, labels = OrtValue.ortvalue_from_numpy(x), OrtValue.ortvalue_from_numpy(labels)
    >>> module(x, labels)
    OrtValue(tensor(float), shape=[])
    """

    __slots__ = ("__weakref__", "_ortvalue")

    def __init__(self, ortvalue: _ortrain.OrtValue) -> None:
        if not isinstance(ortvalue, _ortrain.OrtValue):
            raise TypeError("OrtValue is made by OrtValue.ortvalue_from_numpy(array)")
        self._ortvalue = ortvalue

    @staticmethod
    def ortvalue_from_numpy(numpy_obj: npt.NDArray[Any], device_type: str = "cpu", device_id: int = 0) -> OrtValue:
        """An array's elements: its memory, which is kept, if they lie there in a row; otherwise a copy.

        The memory is shared if the array is contiguous (in C order) and has the byte order of the machine; a read-only
        array makes a value that is not written either. Of any other array, and of a list, it has a copy.

        Its element type is one that ONNX has and an array can hold: floats of 16, 32 and 64 bits, integers of 8 to 64
        bits, booleans, and ``bfloat16`` of the package ``ml_dtypes``. An array that is shared keeps its memory:
        ``resize`` of it is refused.

        Raises:
            UnsupportedError: for elements that are none of these: strings, objects, dates, complex numbers; for
                another device than ``"cpu"``.

        >>> from ortrain import OrtValue
        >>> array = np.arange(6).reshape(2, 3)
        >>> value = OrtValue.ortvalue_from_numpy(array)
        >>> array[1, 2] = 70
        >>> value.numpy()
        array([[ 0,  1,  2],
               [ 3,  4, 70]])
        >>> OrtValue.ortvalue_from_numpy(array.T)
        OrtValue(tensor(int64), shape=[3, 2])

        """
        return OrtValue(_ortrain.OrtValue.ortvalue_from_numpy(np.asarray(numpy_obj), _device(device_type, device_id)))

    @staticmethod
    def ortvalue_from_numpy_with_onnx_type(data: npt.NDArray[Any], onnx_element_type: int) -> OrtValue:
        """As :meth:`ortvalue_from_numpy`, for an array whose bits mean an ONNX element type of the same size.

        With ``16`` (``TensorProto.BFLOAT16``), a uint16 array holds bfloat16 numbers, no ``ml_dtypes`` needed.

        Raises:
            InvalidArgumentError: for an element type of another size.
            UnsupportedError: for an element type that ortrain does not have.

        >>> from ortrain import OrtValue
        >>> one = np.asarray([0x3F80], np.uint16)
        >>> OrtValue.ortvalue_from_numpy_with_onnx_type(one, onnx.TensorProto.BFLOAT16)
        OrtValue(tensor(bfloat16), shape=[1])

        """
        value = _ortrain.OrtValue.ortvalue_from_numpy_with_onnx_type(np.asarray(data), onnx_element_type)
        return OrtValue(value)

    @staticmethod
    def ortvalue_from_shape_and_type(
        shape: Sequence[int] | None = None,
        element_type: npt.DTypeLike | int | None = None,
        device_type: str = "cpu",
        device_id: int = 0,
    ) -> OrtValue:
        """Zeros of a shape and an element type: whatever NumPy takes for one, or a number of ``TensorProto``.

        Raises:
            ValueError: without a shape or without an element type; for a size that is negative or no integer.
            UnsupportedError: for an element type that no tensor has; for another device than ``"cpu"``.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_shape_and_type([2, 3], np.float32)
        OrtValue(tensor(float), shape=[2, 3])
        >>> OrtValue.ortvalue_from_shape_and_type([3], onnx.TensorProto.INT64).numpy()
        array([0, 0, 0])

        """
        if shape is None or element_type is None:
            raise ValueError("an OrtValue that is not made of an array needs both: its shape and its element_type")
        device = _device(device_type, device_id)
        return OrtValue(_ortrain.OrtValue.ortvalue_from_shape_and_type(list(shape), element_type, device))

    @staticmethod
    def from_dlpack(data: Any, is_bool_tensor: bool = False) -> OrtValue:
        """A tensor of another library, whose memory is shared and kept.

        ``data`` has ``__dlpack__``, as arrays and tensors of most libraries do, or is a DLPack capsule, out of which a
        tensor can be taken once. Libraries give tensors of booleans as bytes: ``is_bool_tensor`` says that these are.

        Raises:
            TypeError: for something else, and for a capsule that was used before.
            UnsupportedError: for a tensor on another device than the CPU, or of an element type that ONNX has not.
            InvalidArgumentError: for a tensor whose elements do not lie in a row; if ``is_bool_tensor`` is said of a
                tensor that is neither uint8 nor bool.

        >>> from ortrain import OrtValue
        >>> array = np.zeros(3, np.float32)
        >>> value = OrtValue.from_dlpack(array)
        >>> array[1] = 5
        >>> value.numpy()
        array([0., 5., 0.], dtype=float32)

        """
        return OrtValue(_ortrain.OrtValue.from_dlpack(data, is_bool_tensor))

    def numpy(self) -> npt.NDArray[Any]:
        """The value as an array that shares its memory; read-only if the array is that the value was made of.

        bfloat16 is ``ml_dtypes.bfloat16`` if that is installed, else its uint16 bits.

        >>> from ortrain import OrtValue
        >>> value = OrtValue.ortvalue_from_numpy(np.asarray([1, 2, 3]))
        >>> value.numpy()[0] = 7
        >>> value.numpy()
        array([7, 2, 3])
        """
        return self._ortvalue.numpy()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        array = self.numpy()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            if copy is False:
                raise ValueError(f"an OrtValue of {array.dtype} becomes an array of {np.dtype(dtype)} by a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def update_inplace(self, np_arr: npt.NDArray[Any] | OrtValue) -> None:
        """Copy an array, or another value, of the same element type and shape into the memory of this one.

        Whoever shares the memory sees it; :meth:`data_ptr` stays what it is.

        Raises:
            TypeError: for what is neither an array nor an OrtValue.
            InvalidArgumentError: for another element type or shape, and if the memory is that of a read-only array.

        >>> from ortrain import OrtValue
        >>> value = OrtValue.ortvalue_from_shape_and_type([2], np.float32)
        >>> value.update_inplace(np.ones(2, np.float32))
        >>> value.numpy()
        array([1., 1.], dtype=float32)
        >>> value.update_inplace(np.ones(3))
        Traceback (most recent call last):
        ortrain.errors.InvalidArgumentError: the OrtValue is float32[2], but float64[3] was given

        """
        self._ortvalue.update_inplace(np_arr._ortvalue if isinstance(np_arr, OrtValue) else np_arr)

    def data_ptr(self) -> int:
        """The address of the first element, which stays what it is; 0 if there is none.

        >>> from ortrain import OrtValue
        >>> array = np.zeros(3)
        >>> OrtValue.ortvalue_from_numpy(array).data_ptr() == array.ctypes.data
        True
        """
        return self._ortvalue.data_ptr()

    def to_dlpack(self) -> Any:
        """A DLPack capsule, which shares the memory. Booleans go as uint8, as onnxruntime gives them.

        Raises:
            BufferError: if the memory is that of a read-only array, which such a capsule cannot say.

        >>> from ortrain import OrtValue
        >>> capsule = OrtValue.ortvalue_from_numpy(np.arange(3)).to_dlpack()
        >>> OrtValue.from_dlpack(capsule).numpy()
        array([0, 1, 2])

        """
        return self._ortvalue.to_dlpack()

    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule for another library, which shares the memory; ``np.from_dlpack(value)`` calls it.

        Raises:
            BufferError: for another device, for a stream, and if the memory is that of a read-only array and the
                library takes no ``max_version`` from 1.0 on.

        >>> from ortrain import OrtValue
        >>> np.from_dlpack(OrtValue.ortvalue_from_numpy(np.arange(3)))
        array([0, 1, 2])

        """
        return self._ortvalue.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Where it lies, as DLPack numbers it: the CPU.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.arange(3)).__dlpack_device__()
        (1, 0)
        """
        return self._ortvalue.__dlpack_device__()

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
        return self._ortvalue.device_name().lower()

    def is_tensor(self) -> bool:
        """Whether it is a tensor, which it always is.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros(3)).is_tensor()
        True
        """
        return self._ortvalue.is_tensor()

    def is_tensor_sequence(self) -> bool:
        """Whether it is a sequence of tensors, which it never is: those are lists here.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros(3)).is_tensor_sequence()
        False
        """
        return self._ortvalue.is_tensor_sequence()

    def is_sparse_tensor(self) -> bool:
        """Whether it is a sparse tensor, which it never is.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros(3)).is_sparse_tensor()
        False
        """
        return self._ortvalue.is_sparse_tensor()

    def has_value(self) -> bool:
        """Whether there is a value, which there always is.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros(3)).has_value()
        True
        """
        return self._ortvalue.has_value()

    def __repr__(self) -> str:
        return f"OrtValue({self.data_type()}, shape={self.shape()})"


def _device(device_type: str, device_id: int) -> _ortrain.OrtDevice:
    """The only device that there is, by its name."""
    if device_type.lower() != "cpu":
        raise UnsupportedError(
            f"device {device_type!r} is not supported: ortrain keeps values in memory of the CPU, device 'cpu'"
        )
    return _ortrain.OrtDevice(_ortrain.OrtDevice.cpu(), _ortrain.OrtDevice.default_memory(), device_id)
