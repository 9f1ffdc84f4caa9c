"""Values that share memory with NumPy and DLPack; vectors, caches, devices; the names of onnxruntime's C module."""

from __future__ import annotations

import ctypes
import gc
import inspect
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import RECORDS, Run

import ortrain
from ortrain import OrtValue, capi
from ortrain.capi import OrtDevice, OrtMemType, OrtValueCache, OrtValueVector

CASE = RECORDS / "mlp_adamw_ce"
CPU = OrtDevice(OrtDevice.cpu(), OrtMemType.DEFAULT, 0)
DTYPES = [
    "float32",
    "float64",
    "float16",
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
]


def native(array: Any) -> capi.OrtValue:
    return capi.OrtValue.ortvalue_from_numpy(array, CPU)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


# Arrays.


@pytest.mark.parametrize("dtype", [*DTYPES, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3), (), (1,), (7,)])
def test_memory_is_shared(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    value = OrtValue.ortvalue_from_numpy(array)
    back = value.numpy()
    assert (back.dtype, back.shape) == (array.dtype, shape)
    assert value.data_ptr() == address(array) == address(back)
    array[...] = 0
    assert not back.any()
    back[...] = 1
    assert array.all()
    assert np.shares_memory(np.asarray(value), array)


def test_memory_at_any_address() -> None:
    room = np.zeros(4 * 5 + 1, np.uint8)
    array = room[1:].view(np.float32)
    value = OrtValue.ortvalue_from_numpy(array)
    assert value.data_ptr() == address(room) + 1
    value.update_inplace(np.arange(5, dtype=np.float32))
    np.testing.assert_array_equal(array, np.arange(5))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.arange(12, dtype=np.float32)[::2],
        np.arange(6, dtype=np.float32)[::-1],
        np.arange(6, dtype=">f4"),
        np.broadcast_to(np.float32(3), (2, 2)),
    ],
    ids=["turned", "every other", "backwards", "byte order", "one for all"],
)
def test_other_arrays_are_copied(array: np.ndarray) -> None:
    value = OrtValue.ortvalue_from_numpy(array)
    back = value.numpy()
    np.testing.assert_array_equal(back, array)
    assert back.dtype == np.float32
    assert not np.shares_memory(back, array)
    back[...] = 9
    np.testing.assert_array_equal(value.numpy(), np.full(array.shape, 9))


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_values_without_elements(shape: tuple[int, ...]) -> None:
    value = OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
    assert (value.shape(), value.data_ptr()) == (list(shape), 0)
    assert value.numpy().shape == shape
    value.update_inplace(np.ones(shape, np.float32))
    assert np.from_dlpack(value).shape == shape
    assert OrtValue.from_dlpack(value.to_dlpack()).shape() == list(shape)
    assert OrtValue.ortvalue_from_shape_and_type(shape, np.float32).numpy().shape == shape


@pytest.mark.parametrize("make", [OrtValue.ortvalue_from_numpy, native], ids=["wrapper", "native"])
@pytest.mark.parametrize(
    "array",
    [
        np.array(["a"]),
        np.array([b"a"]),
        np.array([None]),
        np.array([1j]),
        np.array(["2020"], "M8[Y]"),
        np.zeros(1, "i4,i4"),
    ],
    ids=["text", "bytes", "object", "complex", "date", "record"],
)
def test_elements_that_no_tensor_has(make: Callable[[Any], Any], array: np.ndarray) -> None:
    with pytest.raises(ortrain.UnsupportedError) as error:
        make(array)
    assert str(error.value) == f"arrays of {array.dtype} are not supported"


def test_only_the_wrapper_copies_lists() -> None:
    assert OrtValue.ortvalue_from_numpy([1.0, 2.0]).shape() == [2]  # type: ignore[arg-type]
    with pytest.raises(ortrain.InvalidArgumentError, match="expected a NumPy array, not list"):
        native([1.0])


def test_bits_of_another_type_are_shared() -> None:
    bits = np.full(3, 0x3F80, np.uint16)
    value = OrtValue.ortvalue_from_numpy_with_onnx_type(bits, 16)
    assert value.data_type() == "tensor(bfloat16)"
    np.testing.assert_array_equal(value.numpy().astype(np.float32), np.ones(3))
    bits[1] = 0
    np.testing.assert_array_equal(value.numpy().astype(np.float32), [1, 0, 1])
    turned = OrtValue.ortvalue_from_numpy_with_onnx_type(bits[::-1], 10)
    assert turned.data_type() == "tensor(float16)"
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        OrtValue.ortvalue_from_numpy_with_onnx_type(bits, 1)
    assert str(error.value) == "the bits of uint16 cannot be read as float32"
    with pytest.raises(ortrain.UnsupportedError) as unsupported:
        OrtValue.ortvalue_from_numpy_with_onnx_type(bits, 8)
    assert str(unsupported.value) == "tensors of ONNX element type 8 are not supported"


def test_value_of_a_read_only_array_is_read_only() -> None:
    array = np.ones(3, np.float32)
    array.flags.writeable = False
    value = OrtValue.ortvalue_from_numpy(array)
    assert value.data_ptr() == address(array)
    assert not value.numpy().flags.writeable
    assert not np.asarray(value).flags.writeable
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        value.update_inplace(np.zeros(3, np.float32))
    assert str(error.value) == (
        "the OrtValue shares the memory of a read-only array, so it cannot be updated; make it from a copy"
    )
    with pytest.raises(
        BufferError, match="the memory is read-only, and a DLPack capsule without a version cannot express that"
    ):
        value.to_dlpack()
    versioned = value.__dlpack__(max_version=(1, 0))
    again = OrtValue.from_dlpack(versioned)
    assert not again.numpy().flags.writeable
    assert value.__dlpack__(copy=True) is not None
    np.testing.assert_array_equal(array, np.ones(3))


class Watched(np.ndarray):
    """An array with weak references and an incorrect ``__array_interface__``."""

    @property
    def __array_interface__(self) -> dict[str, Any]:  # type: ignore[override]
        return {"data": (1, False), "shape": self.shape, "typestr": "<f4", "version": 3}


@pytest.mark.parametrize("how", ["numpy", "dlpack", "native"])
def test_values_keep_the_array_alive(how: str) -> None:
    array = np.arange(100_000, dtype=np.float32)
    watch = weakref.ref(array)
    make: dict[str, Callable[[Any], Any]] = {
        "numpy": OrtValue.ortvalue_from_numpy,
        "dlpack": OrtValue.from_dlpack,
        "native": native,
    }
    value = make[how](array)
    del array
    gc.collect()
    assert watch() is not None
    view = value.numpy()
    del value
    gc.collect()
    assert watch() is not None
    junk = [np.zeros(100_000, np.float32) for _ in range(10)]
    np.testing.assert_array_equal(view, np.arange(100_000))
    del view, junk
    gc.collect()
    assert watch() is None


def test_an_array_does_not_go_away_under_a_value() -> None:
    """``resize`` of the array or of its base is an error, even without a check of references."""
    whole = np.zeros(8, np.float32)
    part = whole[2:6]
    value = OrtValue.ortvalue_from_numpy(part)
    for array in (whole, part):
        with pytest.raises(ValueError, match="cannot resize"):
            array.resize(1 << 20, refcheck=False)
    value.update_inplace(np.ones(4, np.float32))
    np.testing.assert_array_equal(whole, [0, 0, 1, 1, 1, 1, 0, 0])
    room = bytearray(16)
    shared = OrtValue.ortvalue_from_numpy(np.frombuffer(room, np.float32))
    with pytest.raises(BufferError):
        room.clear()
    shared.update_inplace(np.ones(4, np.float32))
    assert any(room)


def test_overrides_of_a_subclass_are_ignored() -> None:
    array = np.ones(4, np.float32).view(Watched)
    value = OrtValue.ortvalue_from_numpy(array)
    np.testing.assert_array_equal(value.numpy(), np.ones(4))
    np.testing.assert_array_equal(native(array).numpy(), np.ones(4))


# Shapes and types.


@pytest.mark.parametrize(
    ("element_type", "name"),
    [
        (np.float32, "float"),
        ("float64", "double"),
        (np.dtype("f2"), "float16"),
        (bool, "bool"),
        (7, "int64"),
        (16, "bfloat16"),
    ],
)
def test_zeros(element_type: Any, name: str) -> None:
    value = OrtValue.ortvalue_from_shape_and_type([2, 3], element_type)
    assert (value.shape(), value.data_type()) == ([2, 3], f"tensor({name})")
    assert not value.numpy().any()
    scalar = capi.OrtValue.ortvalue_from_shape_and_type((), element_type, CPU)
    assert (scalar.shape(), scalar.numpy().shape) == ([], ())


@pytest.mark.parametrize(
    ("arguments", "kind", "sentence"),
    [
        (([2, 3],), ValueError, "an OrtValue without an array needs shape and element_type"),
        (
            (None, np.float32),
            ValueError,
            "an OrtValue without an array needs shape and element_type",
        ),
        ((), ValueError, "an OrtValue without an array needs shape and element_type"),
        (([2, -3], np.float32), ValueError, "a shape must be a list of sizes, got -3"),
        (([2, 0.5], np.float32), ValueError, "a shape must be a list of sizes, got 0.5"),
        (([1 << 40, 1 << 40], np.float32), ValueError, "float32[1099511627776, 1099511627776] is too large to address"),
        (([1 << 50], np.float64), MemoryError, "the system cannot allocate 9007199254740992 bytes of memory"),
        (([2], np.str_), ortrain.UnsupportedError, "tensors of <U0 are not supported"),
        (([2], np.complex64), ortrain.UnsupportedError, "tensors of complex64 are not supported"),
        (([2], 8), ortrain.UnsupportedError, "tensors of ONNX element type 8 are not supported"),
        (
            ([2], np.float32, "cuda", 0),
            ortrain.UnsupportedError,
            "device 'cuda' is not supported: ortrain keeps values in memory of the CPU, device 'cpu'",
        ),
    ],
)
def test_shapes_and_types_that_are_none(arguments: tuple[Any, ...], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind) as error:
        OrtValue.ortvalue_from_shape_and_type(*arguments)
    assert str(error.value) == sentence


def test_properties_of_a_value() -> None:
    value = OrtValue.ortvalue_from_numpy(np.zeros((2, 3)), "CPU", 0)
    assert (value.shape(), value.data_type(), value.element_type()) == ([2, 3], "tensor(double)", 11)
    assert (value.device_name(), value._ortvalue.device_name()) == ("cpu", "Cpu")
    assert value._ortvalue.proto_type() == 11
    assert (value.is_tensor(), value.has_value()) == (True, True)
    assert (value.is_tensor_sequence(), value.is_sparse_tensor()) == (False, False)
    assert np.asarray(value, np.float32).dtype == np.float32
    with pytest.raises(ValueError, match="an OrtValue of float64 must be copied to an array of float32"):
        value.__array__(np.float32, copy=False)
    assert not np.shares_memory(value.__array__(copy=True), value.numpy())


# Updates.


def test_updates() -> None:
    array = np.zeros((2, 3), np.float32)
    value = OrtValue.ortvalue_from_numpy(array)
    where = value.data_ptr()
    for source in (
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=np.float32).reshape(3, 2).T,
        np.arange(6, dtype=">f4").reshape(2, 3),
        OrtValue.ortvalue_from_numpy(np.full((2, 3), 4, np.float32)),
        # The value's own memory, in another order.
        value.numpy()[::-1],
    ):
        want = np.array(source)
        value.update_inplace(source)
        np.testing.assert_array_equal(array, want)
    assert value.data_ptr() == where
    half = OrtValue.ortvalue_from_shape_and_type([2], 16)
    half.update_inplace(np.ones(2, ml_dtypes.bfloat16))
    half.update_inplace(np.full(2, 0x3F80, np.uint16))
    np.testing.assert_array_equal(half.numpy().view(np.uint16), [0x3F80] * 2)


@pytest.mark.parametrize(
    ("source", "kind", "sentence"),
    [
        (
            np.zeros((3, 2), np.float32),
            ortrain.InvalidArgumentError,
            "the OrtValue is float32[2, 3], got float32[3, 2]",
        ),
        (
            np.zeros(6, np.float32),
            ortrain.InvalidArgumentError,
            "the OrtValue is float32[2, 3], got float32[6]",
        ),
        (np.zeros((2, 3)), ortrain.InvalidArgumentError, "the OrtValue is float32[2, 3], got float64[2, 3]"),
        (
            np.zeros((2, 3), np.int32),
            ortrain.InvalidArgumentError,
            "the OrtValue is float32[2, 3], got int32[2, 3]",
        ),
        (
            OrtValue.ortvalue_from_numpy(np.zeros(2)),
            ortrain.InvalidArgumentError,
            "the OrtValue is float32[2, 3], got float64[2]",
        ),
        (np.array([["a"] * 3] * 2), ortrain.UnsupportedError, "arrays of <U1 are not supported"),
        ([[0] * 3] * 2, TypeError, "an OrtValue can be updated from a NumPy array or an OrtValue, not list"),
    ],
)
def test_updates_that_do_not_fit(source: Any, kind: type[Exception], sentence: str) -> None:
    array = np.ones((2, 3), np.float32)
    value = OrtValue.ortvalue_from_numpy(array)
    with pytest.raises(kind) as error:
        value.update_inplace(source)
    assert str(error.value) == sentence
    assert array.all()


def test_results_are_memory_too(run: Run) -> None:
    """The result of a step has a fixed address, and can be updated and shared."""
    x, labels = np.ones((8, 10), np.float32), np.zeros(8, np.int64)
    loss = run.module(OrtValue.ortvalue_from_numpy(x), OrtValue.ortvalue_from_numpy(labels))
    number, where = float(loss.numpy()), loss.data_ptr()
    assert float(loss.numpy()) == number
    loss.update_inplace(np.full((), 3, np.float32))
    assert (float(np.from_dlpack(loss)), loss.data_ptr()) == (3, where)
    with pytest.raises(AttributeError):
        loss.unheard_of = 1


# DLPack.


@pytest.mark.parametrize("dtype", DTYPES)
def test_dlpack_with_numpy(dtype: str) -> None:
    array = np.ones((2, 3), dtype)
    value = OrtValue.ortvalue_from_numpy(array)
    taken = np.from_dlpack(value)
    assert taken.dtype == array.dtype
    assert np.shares_memory(taken, array)
    again = OrtValue.from_dlpack(array)
    assert (again.data_ptr(), again.data_type(), again.shape()) == (address(array), value.data_type(), [2, 3])
    assert value.__dlpack_device__() == (1, 0)


@pytest.mark.parametrize("arguments", [{}, {"max_version": (1, 0)}, {"max_version": (0, 8)}, {"copy": False}])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.bool_])
def test_dlpack_with_itself(arguments: dict[str, Any], dtype: Any) -> None:
    array = np.ones((2, 1, 3), dtype)
    value = OrtValue.ortvalue_from_numpy(array)
    again = OrtValue.from_dlpack(value.__dlpack__(**arguments))
    assert (again.data_ptr(), again.data_type(), again.shape()) == (address(array), value.data_type(), [2, 1, 3])


def test_booleans_travel_as_bytes() -> None:
    array = np.array([True, False, True])
    value = OrtValue.ortvalue_from_numpy(array)
    assert OrtValue.from_dlpack(value.to_dlpack()).data_type() == "tensor(uint8)"
    again = OrtValue.from_dlpack(value.to_dlpack(), is_bool_tensor=True)
    assert again.data_type() == "tensor(bool)"
    assert np.shares_memory(again.numpy(), array)
    assert np.from_dlpack(value).dtype == np.bool_
    assert OrtValue.from_dlpack(array, is_bool_tensor=True).data_type() == "tensor(bool)"
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        OrtValue.from_dlpack(np.zeros(3), is_bool_tensor=True)
    assert str(error.value) == "a tensor of booleans must be uint8 or bool, got float64"


def test_a_copy_on_request() -> None:
    array = np.ones(3, np.float32)
    copy = OrtValue.from_dlpack(OrtValue.ortvalue_from_numpy(array).__dlpack__(copy=True))
    array[...] = 0
    np.testing.assert_array_equal(copy.numpy(), np.ones(3))


@pytest.mark.parametrize("capsule", [lambda a: a.__dlpack__(), lambda a: OrtValue.ortvalue_from_numpy(a).to_dlpack()])
def test_a_capsule_is_used_once(capsule: Callable[[np.ndarray], Any]) -> None:
    made = capsule(np.arange(5.0))
    value = OrtValue.from_dlpack(made)
    for _ in range(2):
        with pytest.raises(TypeError, match="the DLPack capsule was used before; its tensor can be taken only once"):
            OrtValue.from_dlpack(made)
    del made
    gc.collect()
    np.testing.assert_array_equal(value.numpy(), np.arange(5.0))


def test_unconsumed_capsules_free_their_memory() -> None:
    array = np.zeros(100_000)
    watch = weakref.ref(array)
    value = OrtValue.ortvalue_from_numpy(array)
    capsules = [value.to_dlpack(), value.__dlpack__(max_version=(1, 0))]
    del array, value
    gc.collect()
    assert watch() is not None
    del capsules
    gc.collect()
    assert watch() is None


def test_memory_is_freed_with_its_last_view() -> None:
    array = np.zeros(100_000)
    watch = weakref.ref(array)
    value = OrtValue.ortvalue_from_numpy(array)
    taken = [np.from_dlpack(value), OrtValue.from_dlpack(value).numpy()]
    del array, value
    gc.collect()
    assert watch() is not None
    del taken
    gc.collect()
    assert watch() is None


def test_transposed_tensors_are_refused_and_not_consumed() -> None:
    array = np.arange(6.0).reshape(2, 3).T
    capsule = array.__dlpack__()
    for _ in range(2):
        with pytest.raises(ortrain.InvalidArgumentError) as error:
            OrtValue.from_dlpack(capsule)
        assert str(error.value) == (
            "the DLPack tensor has the shape [3, 2] and the strides [1, 3], so it is not contiguous; make it contiguous"
        )
    # The stride of an axis with one element has no effect.
    assert OrtValue.from_dlpack(np.arange(6.0)[:1].reshape(1, 1)).shape() == [1, 1]


class Elsewhere:
    """A tensor on another device."""

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.kind, 3)

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("the memory of a tensor on another device must not be requested")


class Older:
    """A library without arguments of ``__dlpack__`` and without ``__dlpack_device__``."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self) -> Any:
        return self.array.__dlpack__()


class Tensor(ctypes.Structure):
    """Beginning of an unversioned DLPack capsule."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def inside(capsule: Any) -> Tensor:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return Tensor.from_address(pointer(capsule, b"dltensor"))


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        (
            {"device_type": 8, "device_id": 1},
            ortrain.UnsupportedError,
            "the tensor is on a device (Metal, number 1), but ortrain shares only memory of the CPU and of CUDA; "
            "copy it there first",
        ),
        (
            {"device_type": 77},
            ortrain.UnsupportedError,
            "the tensor is on a device (DLPack type 77, number 0), but ortrain shares only memory of the CPU and of "
            "CUDA; copy it there first",
        ),
        (
            {"code": 5, "bits": 64},
            ortrain.UnsupportedError,
            "tensors of DLPack type code 5 with 64 bits and 1 lanes are not supported",
        ),
        (
            {"lanes": 4},
            ortrain.UnsupportedError,
            "tensors of DLPack type code 2 with 64 bits and 4 lanes are not supported",
        ),
        ({"ndim": -1}, ortrain.InvalidArgumentError, "the DLPack tensor has -1 axes"),
        ({"ndim": 1 << 30}, ortrain.InvalidArgumentError, "the DLPack tensor has 1073741824 axes"),
        ({"size": -5}, ortrain.InvalidArgumentError, "the DLPack tensor has the invalid shape [2, -5]"),
        (
            {"size": 1 << 61},
            ortrain.InvalidArgumentError,
            "float64[2, 2305843009213693952] is too large to address",
        ),
        ({"data": None}, ortrain.InvalidArgumentError, "the DLPack tensor has no valid data pointer"),
    ],
)
def test_capsules_that_are_refused(change: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    array = np.ones((2, 3))
    capsule = array.__dlpack__()
    tensor = inside(capsule)
    before = {name: getattr(tensor, name) for name in change if name != "size"}
    for name, changed in change.items():
        if name == "size":
            tensor.shape[1] = changed
        else:
            setattr(tensor, name, changed)
    with pytest.raises(kind) as error:
        OrtValue.from_dlpack(capsule)
    assert str(error.value) == sentence
    # The error left the capsule unused: with its old fields the capsule is valid.
    for name, value in before.items():
        setattr(tensor, name, value)
    tensor.shape[1] = 3
    assert OrtValue.from_dlpack(capsule).shape() == [2, 3]


def test_tensors_start_where_they_say() -> None:
    capsule = np.arange(4.0).__dlpack__()
    tensor = inside(capsule)
    tensor.byte_offset, tensor.shape[0] = 16, 2
    np.testing.assert_array_equal(OrtValue.from_dlpack(capsule).numpy(), [2, 3])


def test_objects_that_are_no_tensors() -> None:
    with pytest.raises(ortrain.DeviceUnavailableError, match='there is no device "cuda:3" here: '):
        OrtValue.from_dlpack(Elsewhere(2))
    for kind, name in ((8, "Metal"), (10, "ROCm"), (7, "DLPack type 7")):
        with pytest.raises(ortrain.UnsupportedError) as error:
            OrtValue.from_dlpack(Elsewhere(kind))
        assert str(error.value) == (
            f"the tensor is on a device ({name}, number 3), but ortrain shares only memory of the CPU and of CUDA; "
            f"copy it there first"
        )
    np.testing.assert_array_equal(OrtValue.from_dlpack(Older(np.arange(3))).numpy(), [0, 1, 2])
    with pytest.raises(TypeError, match="expected a DLPack capsule, or an object with __dlpack__, got int"):
        OrtValue.from_dlpack(3)
    import datetime

    other = datetime.datetime_CAPI  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="expected a DLPack capsule, got a capsule with another content"):
        OrtValue.from_dlpack(other)
    value = OrtValue.ortvalue_from_numpy(np.zeros(3))
    for arguments in ({"stream": 1}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError):
            value.__dlpack__(**arguments)  # type: ignore[arg-type]


# Steps.


def test_step_reads_the_current_memory(run: Run) -> None:
    """A write to the arrays between steps changes the inputs."""
    x, labels = np.ones((8, 10), np.float32), np.zeros(8, np.int64)
    values = [OrtValue.ortvalue_from_numpy(x), OrtValue.ortvalue_from_numpy(labels)]
    before = float(run.module(*values).numpy())
    x[...] = -1
    labels[...] = 3
    after = float(run.module(*values).numpy())
    assert after != before
    assert after == float(run.module(x, labels))
    labels[2] = 17
    with pytest.raises(ortrain.InvalidArgumentError, match="label 17 in row 2 is not one of the 5 classes"):
        run.module(*values)


def test_arrays_change_while_steps_run(run: Run) -> None:
    """A concurrent writer cannot bypass the label check: a step succeeds, or its error names the invalid label."""
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((4096, 10)).astype(np.float32), np.zeros(4096, np.int64)
    values = [OrtValue.ortvalue_from_numpy(x), OrtValue.ortvalue_from_numpy(labels)]
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            labels[...] = 1 << 40
            x[...] = np.inf
            labels[...] = 0
            x[...] = 1

    writer = threading.Thread(target=write)
    writer.start()
    outcomes = []
    try:
        # Repeat until both outcomes occurred, and at least 50 times.
        while len(outcomes) < 50 or (len(outcomes) < 5000 and len(set(outcomes)) < 2):
            try:
                run.module(*values)
                outcomes.append("run")
            except ortrain.InvalidArgumentError as error:
                outcomes.append(re.sub(r"in row \d+", "in a row", str(error)).partition(";")[0].partition('" ')[2])
    finally:
        over.set()
        writer.join()
    refused = f"(SoftmaxCrossEntropyLoss): label {1 << 40} in a row is not one of the 5 classes (0 to 4)"
    assert set(outcomes) == {"run", refused}


def test_values_are_used_by_several_threads() -> None:
    state = ortrain.CheckpointState.load_checkpoint(CASE / "checkpoint")
    module = ortrain.Module(CASE / "training_model.onnx", state)
    x, labels = np.ones((8, 10), np.float32), np.zeros(8, np.int64)
    values = [OrtValue.ortvalue_from_numpy(x), OrtValue.ortvalue_from_numpy(labels)]
    want = float(module(x, labels))
    vector, failures = OrtValueVector(), []

    def work() -> None:
        try:
            for _ in range(50):
                loss = module(*values)
                assert float(loss.numpy()) == want
                vector.push_back(loss)
                OrtValue.from_dlpack(loss).update_inplace(np.full((), want, np.float32))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [float(value.numpy()) for value in vector] == [want] * 200


# Contents of onnxruntime's extension module.


def test_a_vector() -> None:
    vector = OrtValueVector()
    assert not vector
    assert (len(vector), list(vector), repr(vector)) == (0, [], "OrtValueVector(0 values)")
    array = np.ones((2, 3), np.float32)
    value = native(array)
    vector.push_back(value)
    vector.push_back(OrtValue.ortvalue_from_numpy(np.array([True, False])))
    vector.push_back(np.arange(3).__dlpack__())
    vector.push_back(np.zeros(2, np.uint8).__dlpack__(), True)
    vector.push_back(np.zeros(2, np.uint8), is_bool_tensor=True)
    vector.reserve(100)
    vector.shrink_to_fit()
    assert vector
    assert len(vector) == 5
    assert vector[0] is value
    assert [kept.data_type() for kept in vector] == [
        "tensor(float)",
        "tensor(bool)",
        "tensor(int64)",
        "tensor(bool)",
        "tensor(bool)",
    ]
    assert vector.bool_tensor_indices() == [1, 3, 4]
    assert [vector.element_type_at(at) for at in range(5)] == [1, 9, 7, 9, 9]
    taken = OrtValue.from_dlpack(vector.dlpack_at(0))
    assert taken.data_ptr() == address(array)
    assert OrtValue.from_dlpack(vector.dlpack_at(1)).data_type() == "tensor(uint8)"
    for tensors in (
        vector.to_dlpacks(OrtValue.from_dlpack),
        [OrtValue.from_dlpack(c) for c in vector.to_dlpacks(None)],
    ):
        assert [tensor.data_ptr() for tensor in tensors] == [kept.data_ptr() for kept in vector]
    with pytest.raises(ZeroDivisionError):
        vector.to_dlpacks(lambda _: 1 / 0)


@pytest.mark.parametrize("method", ["__getitem__", "dlpack_at", "element_type_at"])
def test_indices_outside_a_vector(method: str) -> None:
    vector = OrtValueVector()
    vector.push_back(native(np.zeros(3)))
    for place in (1, 1 << 40):
        with pytest.raises(IndexError) as error:
            getattr(vector, method)(place)
        assert str(error.value) == f"index {place} is out of range for an OrtValueVector of 1"
    with pytest.raises(TypeError, match="an index into an OrtValueVector must be at least 0, got -1"):
        getattr(vector, method)(-1)
    for place in ("0", 0.0, None, slice(1), 1 << 80):
        with pytest.raises(TypeError, match="an index into an OrtValueVector must be an int"):
            getattr(vector, method)(place)


def test_vector_accepts_only_values() -> None:
    vector = OrtValueVector()
    for wrong in (3, None, [1], "x"):
        with pytest.raises(TypeError, match="expected a DLPack capsule, or an object with __dlpack__"):
            vector.push_back(wrong)
    with pytest.raises(MemoryError, match="cannot allocate 1152921504606846976 values"):
        vector.reserve(1 << 60)
    assert len(vector) == 0


def test_a_batch() -> None:
    arrays = [np.ones((2, 3), np.float32), np.array([True, False]), np.zeros((0, 2))]
    addresses, types, shapes = [address(a) for a in arrays], [np.float32, 9, np.float64], [a.shape for a in arrays]
    vector = OrtValueVector()
    vector.push_back_batch(arrays, addresses, types, shapes, [CPU] * 3)
    assert [value.data_ptr() for value in vector] == [*addresses[:2], 0]
    assert [value.data_type() for value in vector] == ["tensor(float)", "tensor(bool)", "tensor(double)"]
    wrong: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        (
            (arrays, addresses[:2], types, shapes, [CPU] * 3),
            ortrain.InvalidArgumentError,
            "there are 3 tensors, but 2 addresses, 3 element types, 3 shapes and 3 devices",
        ),
        (
            (arrays[:1], [addresses[0] + 4], types[:1], shapes[:1], [CPU]),
            ortrain.InvalidArgumentError,
            f"the elements of tensor 0 are at {addresses[0]:#x}, but the argument says {addresses[0] + 4:#x}",
        ),
        (
            (arrays[:2], addresses[:2], types[:2], [(2, 3), (3,)], [CPU] * 2),
            ortrain.InvalidArgumentError,
            "tensor 1 is bool[2], but the argument says bool[3]",
        ),
        (
            (arrays[:1], addresses[:1], [np.int32], shapes[:1], [CPU]),
            ortrain.InvalidArgumentError,
            "tensor 0 is float32[2, 3], but the argument says int32[2, 3]",
        ),
        (
            (arrays[:1], addresses[:1], types[:1], shapes[:1], [OrtDevice(OrtDevice.cuda(), 0, 0)]),
            ortrain.UnsupportedError,
            "device type 1 (cuda) is not supported: ortrain keeps values in memory of the CPU, device type 0",
        ),
    ]
    for arguments, kind, sentence in wrong:
        with pytest.raises(kind) as error:
            vector.push_back_batch(*arguments)
        assert str(error.value) == sentence
    assert len(vector) == 3


def test_vectors_keep_their_values() -> None:
    array = np.zeros(100_000)
    watch = weakref.ref(array)
    vector = OrtValueVector()
    vector.push_back(native(array))
    walk = iter(vector)
    del array, vector
    gc.collect()
    assert watch() is not None
    del walk
    gc.collect()
    assert watch() is None


def test_a_cache() -> None:
    cache = OrtValueCache()
    assert (cache.keys(), cache.count("x"), len(cache), repr(cache)) == ([], 0, 0, "OrtValueCache(0 values)")
    for name in ("x", "mask", "x"):
        cache.insert(name, native(np.zeros(3)))
    assert (cache.keys(), cache.count("x"), cache.count("y"), len(cache)) == (["mask", "x"], 1, 0, 2)
    cache.remove("x")
    with pytest.raises(RuntimeError, match='the cache has no value "x"'):
        cache.remove("x")
    cache.clear()
    assert cache.keys() == []
    with pytest.raises(TypeError):
        cache.insert("x", 3)


def test_devices() -> None:
    device = OrtDevice(OrtDevice.cuda(), OrtDevice.default_memory(), 2)
    assert (device.device_type(), device.mem_type(), device.device_id()) == (1, 0, 2)
    assert (OrtDevice.cpu(), OrtDevice.cuda(), OrtDevice.default_memory()) == (0, 1, 0)
    assert device == OrtDevice(1, 0, 2)
    assert device != CPU
    assert len({device, OrtDevice(1, 0, 2), CPU}) == 2
    assert repr(device) == "OrtDevice(1, 0, 2)"
    assert {kind.name: int(kind) for kind in OrtMemType} == {"CPU_INPUT": -2, "CPU_OUTPUT": -1, "DEFAULT": 0}
    assert OrtMemType.CPU is OrtMemType.CPU_OUTPUT
    for number, name in ((1, " (cuda)"), (9, ""), (-1, "")):
        other = OrtDevice(number, 0, 0)
        for make in (
            lambda other=other: capi.OrtValue.ortvalue_from_numpy(np.zeros(3), other),
            lambda other=other: capi.OrtValue.ortvalue_from_shape_and_type([3], np.float32, other),
        ):
            with pytest.raises(ortrain.UnsupportedError) as error:
                make()
            assert str(error.value) == (
                f"device type {number}{name} is not supported: ortrain keeps values in memory of the CPU, device type 0"
            )
    with pytest.raises(ortrain.UnsupportedError) as error:
        OrtValue.ortvalue_from_numpy(np.zeros(3), "cuda", 0)
    assert str(error.value) == "device 'cuda' is not supported: ortrain keeps values in memory of the CPU, device 'cpu'"


def test_exceptions_are_those_of_ortrain(tmp_path: Path) -> None:
    with pytest.raises(capi.NoSuchFile):
        ortrain.InferenceSession(tmp_path / "nowhere.onnx")
    with pytest.raises(capi.InvalidProtobuf):
        ortrain.InferenceSession(b"not a model")
    session = ortrain.InferenceSession(CASE / "forward.onnx")
    with pytest.raises(capi.InvalidArgument):
        session.run(None, {"x": np.zeros((2, 3), np.float32)})
    with pytest.raises(capi.NotImplemented):
        native(np.array(["a"]))
    kinds = [getattr(capi, name) for name in capi.__all__]
    errors = [kind for kind in kinds if issubclass(kind, Exception)]
    assert len(errors) == 11
    assert all(issubclass(kind, capi.Fail) for kind in errors)


def test_every_method_of_a_native_class_is_described() -> None:
    kinds = [capi.OrtDevice, capi.OrtValue, capi.OrtValueCache, capi.OrtValueVector]
    methods = [(kind, name) for kind in kinds for name in vars(kind) if not name.startswith("_")]
    assert len(methods) > 30
    for kind, name in methods:
        text = inspect.getdoc(getattr(kind, name)) or ""
        assert text.endswith("."), f"{kind.__name__}.{name} has no description"
