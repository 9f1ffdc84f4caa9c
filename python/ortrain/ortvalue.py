"""Tensors in memory of the CPU.

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
    """Tensor in memory of the CPU, like ``onnxruntime.OrtValue``. It keeps the memory that it was made from.

    A value made from an array (:meth:`ortvalue_from_numpy`), or from a tensor of another library (:meth:`from_dlpack`),
    shares its memory: a write to one changes the other. A step reads a copy of the elements at its beginning, so later
    writes do not affect checked values.

    >>> from ortrain import OrtValue
    >>> x, labels = OrtValue.ortvalue_from_numpy(x), OrtValue.ortvalue_from_numpy(labels)
    >>> module(x, labels)
    OrtValue(tensor(float), shape=[])
    """

    __slots__ = ("__weakref__", "_ortvalue")

    def __init__(self, ortvalue: _ortrain.OrtValue) -> None:
        if not isinstance(ortvalue, _ortrain.OrtValue):
            raise TypeError("OrtValue has no public constructor; call OrtValue.ortvalue_from_numpy(array)")
        self._ortvalue = ortvalue

    @staticmethod
    def ortvalue_from_numpy(numpy_obj: npt.NDArray[Any], device_type: str = "cpu", device_id: int = 0) -> OrtValue:
        """Make a value from an array. It keeps and shares the memory of a contiguous array; otherwise it has a copy.

        The memory is shared if the array is contiguous (in C order) and has the byte order of the machine. The value of
        a read-only array is read-only, too. Any other array, and a list, is copied.

        The element type must be one that ONNX has and an array can hold: floats of 16, 32 and 64 bits, integers of 8 to
        64 bits, booleans, and ``bfloat16`` of the package ``ml_dtypes``. A shared array keeps its memory: ``resize`` of
        it is an error.

        Raises:
            UnsupportedError: for other element types, such as strings, objects, dates and complex numbers; for a device
                other than ``"cpu"``.

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
        """Make a value as :meth:`ortvalue_from_numpy` does, with an ONNX element type of the same size for the bits.

        With ``16`` (``TensorProto.BFLOAT16``), a uint16 array holds bfloat16 numbers, and ``ml_dtypes`` is not needed.

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
        """Make zeros of a shape and an element type: a NumPy type, or a number of ``TensorProto``.

        Raises:
            ValueError: without a shape or without an element type; for a size that is negative or not an integer.
            UnsupportedError: for an element type that no tensor has; for a device other than ``"cpu"``.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_shape_and_type([2, 3], np.float32)
        OrtValue(tensor(float), shape=[2, 3])
        >>> OrtValue.ortvalue_from_shape_and_type([3], onnx.TensorProto.INT64).numpy()
        array([0, 0, 0])

        """
        if shape is None or element_type is None:
            raise ValueError("an OrtValue without an array needs shape and element_type")
        device = _device(device_type, device_id)
        return OrtValue(_ortrain.OrtValue.ortvalue_from_shape_and_type(list(shape), element_type, device))

    @staticmethod
    def from_dlpack(data: Any, is_bool_tensor: bool = False) -> OrtValue:
        """Make a value from a tensor of another library. The value shares and keeps the tensor's memory.

        ``data`` has ``__dlpack__``, as arrays and tensors of most libraries do, or is a DLPack capsule, which can be
        used once. Libraries export booleans as bytes: ``is_bool_tensor`` marks a tensor of booleans.

        Raises:
            TypeError: for other objects, and for a used capsule.
            UnsupportedError: for a tensor on a device other than the CPU and CUDA, and for an element type that ONNX
                does not have.
            InvalidArgumentError: for a tensor that is not contiguous. Also if ``is_bool_tensor`` is set for a tensor
                that is neither uint8 nor bool.

        >>> from ortrain import OrtValue
        >>> array = np.zeros(3, np.float32)
        >>> value = OrtValue.from_dlpack(array)
        >>> array[1] = 5
        >>> value.numpy()
        array([0., 5., 0.], dtype=float32)

        """
        return OrtValue(_ortrain.OrtValue.from_dlpack(data, is_bool_tensor))

    def numpy(self) -> npt.NDArray[Any]:
        """Return an array that shares the memory of the value; read-only if the value was made from such an array.

        bfloat16 becomes ``ml_dtypes.bfloat16`` if that package is installed, otherwise the bits as uint16.

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
                raise ValueError(
                    f"copy=False is not possible: an OrtValue of {array.dtype} must be copied to an array of "
                    f"{np.dtype(dtype)}"
                )
            return array.astype(dtype)
        return array.copy() if copy else array

    def update_inplace(self, np_arr: npt.NDArray[Any] | OrtValue) -> None:
        """Copy an array, or another value, of the same element type and shape into the memory of this value.

        All arrays and values on this memory show the change. :meth:`data_ptr` does not change.

        Raises:
            TypeError: if the argument is neither an array nor an OrtValue.
            InvalidArgumentError: for another element type or shape, and for the memory of a read-only array.

        >>> from ortrain import OrtValue
        >>> value = OrtValue.ortvalue_from_shape_and_type([2], np.float32)
        >>> value.update_inplace(np.ones(2, np.float32))
        >>> value.numpy()
        array([1., 1.], dtype=float32)
        >>> value.update_inplace(np.ones(3))
        Traceback (most recent call last):
        ortrain.errors.InvalidArgumentError: the OrtValue is float32[2], got float64[3]

        """
        self._ortvalue.update_inplace(np_arr._ortvalue if isinstance(np_arr, OrtValue) else np_arr)

    def data_ptr(self) -> int:
        """Return the address of the first element, which never changes; 0 without an element.

        >>> from ortrain import OrtValue
        >>> array = np.zeros(3)
        >>> OrtValue.ortvalue_from_numpy(array).data_ptr() == array.ctypes.data
        True
        """
        return self._ortvalue.data_ptr()

    def to_dlpack(self) -> Any:
        """Return a DLPack capsule that shares the memory. Booleans are exported as uint8, as in onnxruntime.

        Raises:
            BufferError: for the memory of a read-only array, because the capsule cannot express that.

        >>> from ortrain import OrtValue
        >>> capsule = OrtValue.ortvalue_from_numpy(np.arange(3)).to_dlpack()
        >>> OrtValue.from_dlpack(capsule).numpy()
        array([0, 1, 2])

        """
        return self._ortvalue.to_dlpack()

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule that shares the memory with another library; ``np.from_dlpack(value)`` calls it.

        Raises:
            BufferError: for another device, and for a stream of a value on the CPU. Also for the memory of a read-only
                array, unless the library passes a ``max_version`` of 1.0 or later.
            InvalidArgumentError: for a stream that CUDA does not have.

        >>> from ortrain import OrtValue
        >>> np.from_dlpack(OrtValue.ortvalue_from_numpy(np.arange(3)))
        array([0, 1, 2])

        """
        return self._ortvalue.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the device in the numbering of DLPack: the CPU, or a device of CUDA.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.arange(3)).__dlpack_device__()
        (1, 0)
        """
        return self._ortvalue.__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the CUDA array interface. Only values on a device of CUDA have the attribute.

        >>> import numpy as np
        >>> from ortrain import OrtValue
        >>> hasattr(OrtValue.ortvalue_from_numpy(np.arange(3)), "__cuda_array_interface__")
        False
        """
        return self._ortvalue.__cuda_array_interface__

    def shape(self) -> list[int]:
        """Return the sizes of the axes.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros((2, 3))).shape()
        [2, 3]
        """
        return self._ortvalue.shape()

    def data_type(self) -> str:
        """Return the type in the notation of onnxruntime: ``tensor(float)``, ``tensor(int64)``, ….

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros((2, 3))).data_type()
        'tensor(double)'
        """
        return self._ortvalue.data_type()

    def element_type(self) -> int:
        """Return the number of the element type in ``TensorProto.DataType``.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros(3)).element_type() == onnx.TensorProto.DOUBLE
        True
        """
        return self._ortvalue.element_type()

    def device_name(self) -> str:
        """Return the name of the device: ``cpu``.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros(3)).device_name()
        'cpu'
        """
        return self._ortvalue.device_name().lower()

    def is_tensor(self) -> bool:
        """Return True: the value is always a tensor.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros(3)).is_tensor()
        True
        """
        return self._ortvalue.is_tensor()

    def is_tensor_sequence(self) -> bool:
        """Return False: the value is never a sequence of tensors. In ortrain, a sequence is a list.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros(3)).is_tensor_sequence()
        False
        """
        return self._ortvalue.is_tensor_sequence()

    def is_sparse_tensor(self) -> bool:
        """Return False: the value is never a sparse tensor.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros(3)).is_sparse_tensor()
        False
        """
        return self._ortvalue.is_sparse_tensor()

    def has_value(self) -> bool:
        """Return True: there always is a value.

        >>> from ortrain import OrtValue
        >>> OrtValue.ortvalue_from_numpy(np.zeros(3)).has_value()
        True
        """
        return self._ortvalue.has_value()

    def __repr__(self) -> str:
        return f"OrtValue({self.data_type()}, shape={self.shape()})"


def _device(device_type: str, device_id: int) -> _ortrain.OrtDevice:
    """Return the device with this name. The CPU is the only one."""
    if device_type.lower() != "cpu":
        raise UnsupportedError(
            f"device {device_type!r} is not supported: ortrain keeps values in memory of the CPU, device 'cpu'"
        )
    return _ortrain.OrtDevice(_ortrain.OrtDevice.cpu(), _ortrain.OrtDevice.default_memory(), device_id)
