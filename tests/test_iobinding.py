"""Inputs and outputs of a session in memory of the caller, and runs with OrtValues."""

from __future__ import annotations

import ctypes
import gc
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnxruntime
import pytest
from conftest import DEVICES, RECORDS

import ortrain
from ortrain import InvalidArgumentError, IOBinding, OrtrainError, OrtValue, UnsupportedError, capi
from ortrain.capi import OrtDevice, OrtValueVector
from ortrain.iobinding import SessionIOBinding

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
CPU = OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)
# Rows of more bytes than a page, the size from which values are read in place.
ROWS = 64


def declare(name: str, shape: list[Any], kind: int = FLOAT) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, kind, shape)


def model_of(text: str) -> onnx.ModelProto:
    head = '<ir_version: 8, opset_import: ["" : 17]>\n'
    return onnx.parser.parse_model(head + text)


def both() -> onnx.ModelProto:
    """Return a model of y = 2 x and z = x + 1, for any number of rows."""
    return model_of("""
        both (float[n, 32] x) => (float[n, 32] y, float[n, 32] z) <float two = {2}, float one = {1}> {
            y = Mul (x, two)
            z = Add (x, one)
        }
    """)


def filled(rows: int = ROWS, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((rows, 32), np.float32)


def copied_inputs(session: ortrain.InferenceSession, binding: IOBinding) -> int:
    """Return the number of input bytes that a run copies into its own memory."""
    session._native.begin_trace()
    session.run_with_iobinding(binding)
    trace = session._native.end_trace()
    assert trace is not None
    return sum(int(event["args"]["bytes"]) // 2 for event in json.loads(trace) if event["name"] == "Inputs")


@pytest.fixture(name="session")
def fixture_session() -> ortrain.InferenceSession:
    return ortrain.InferenceSession(both())


@pytest.mark.parametrize("device", DEVICES)
def test_a_loop_that_binds_once(device: str) -> None:
    session = ortrain.InferenceSession(both(), providers=[device])
    x, y = filled(), np.zeros((ROWS, 32), np.float32)
    binding = session.io_binding()
    assert isinstance(binding, IOBinding)
    binding.bind_cpu_input("x", x)
    binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_numpy(y))
    for seed in range(3):
        x[:] = filled(seed=seed)
        binding.synchronize_inputs()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        np.testing.assert_array_equal(y, 2 * x)
    (value,) = binding.get_outputs()
    assert value.data_ptr() == y.ctypes.data
    (copy,) = binding.copy_outputs_to_cpu()
    assert not np.shares_memory(copy, y)
    np.testing.assert_array_equal(copy, y)


def test_inputs_are_read_where_they_lie(session: ortrain.InferenceSession) -> None:
    x = filled()
    binding = session.io_binding()
    binding.bind_output("y")
    binding.bind_cpu_input("x", x)
    assert copied_inputs(session, binding) == 0
    binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
    assert copied_inputs(session, binding) == 0
    value = OrtValue.ortvalue_from_numpy(x)
    binding.bind_ortvalue_input("x", value)
    assert copied_inputs(session, binding) == 0
    # A result shares no memory with an array, so no caller can change it during a run.
    (result,) = session.run_with_ort_values(["y"], {"x": value})
    binding.bind_ortvalue_input("x", result)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], 4 * x)


def test_sizes_may_differ_from_run_to_run(session: ortrain.InferenceSession) -> None:
    binding = session.io_binding()
    binding.bind_output("z")
    for rows in (ROWS, 1, 0, 3 * ROWS, ROWS):
        x = filled(rows, seed=rows)
        binding.bind_cpu_input("x", x)
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], x + 1)


def test_bits_are_those_of_run() -> None:
    session = ortrain.InferenceSession(RECORDS / "cnn_bn_adamw_ce" / "forward.onnx")
    (declared,) = session.get_inputs()
    shape = [size if isinstance(size, int) else 16 for size in declared.shape]
    x = np.random.default_rng(1).standard_normal(shape, np.float32)
    binding = session.io_binding()
    binding.bind_cpu_input(declared.name, x)
    for output in session.get_outputs():
        binding.bind_output(output.name)
    session.run_with_iobinding(binding)
    for found, expected in zip(binding.copy_outputs_to_cpu(), session.run(None, {declared.name: x}), strict=True):
        assert found.tobytes() == expected.tobytes()


def test_rebinding_replaces(session: ortrain.InferenceSession) -> None:
    first, second = filled(seed=1), filled(seed=2)
    places = [np.zeros((ROWS, 32), np.float32) for _ in range(2)]
    binding = session.io_binding()
    binding.bind_cpu_input("x", first)
    binding.bind_cpu_input("x", second)
    for place in places:
        binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_numpy(place))
    session.run_with_iobinding(binding)
    assert not places[0].any()
    np.testing.assert_array_equal(places[1], 2 * second)
    # An output bound to memory becomes one without, and the other way round.
    binding.bind_output("y")
    with pytest.raises(OrtrainError, match="output 'y' has no value yet: call run_with_iobinding first"):
        binding.get_outputs()
    binding.bind_cpu_input("x", first)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.get_outputs()[0].numpy(), 2 * first)
    np.testing.assert_array_equal(places[1], 2 * second)


def test_values_of_a_run_stay(session: ortrain.InferenceSession) -> None:
    x = filled()
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_output("z")
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    z, y = binding.get_outputs()
    expected = x.copy()
    x[:] = 0
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(z.numpy(), expected + 1)
    np.testing.assert_array_equal(y.numpy(), 2 * expected)
    vector = binding.get_outputs_as_ortvaluevector()
    assert [value.numpy().max() for value in vector] == [1, 0]
    binding.clear_binding_outputs()
    assert binding.get_outputs() == []
    assert binding.copy_outputs_to_cpu() == []
    binding.clear_binding_inputs()
    binding.bind_output("z")
    with pytest.raises(ValueError, match='no value was given for input "x"; none was given'):
        session.run_with_iobinding(binding)


def test_an_output_may_lie_where_an_input_does(session: ortrain.InferenceSession) -> None:
    x = filled()
    expected = x.copy()
    value = OrtValue.ortvalue_from_numpy(x)
    z = OrtValue.ortvalue_from_shape_and_type(x.shape, np.float32)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", value)
    binding.bind_ortvalue_output("y", value)
    binding.bind_ortvalue_output("z", z)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(x, 2 * expected)
    np.testing.assert_array_equal(z.numpy(), expected + 1)


def test_passed_through_input_is_not_overwritten() -> None:
    """An output that is the input itself is written after another output replaced the input in its memory."""
    session = ortrain.InferenceSession(
        model_of("""
        pass (float[n, 32] x) => (float[n, 32] y, float[n, 32] z) <float two = {2}> {
            y = Mul (x, two)
            z = Identity (x)
        }
    """)
    )
    x = filled()
    expected, z = x.copy(), np.zeros_like(x)
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_numpy(x))
    binding.bind_ortvalue_output("z", OrtValue.ortvalue_from_numpy(z))
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(x, 2 * expected)
    np.testing.assert_array_equal(z, expected)


def test_inputs_that_nodes_could_update_stay_as_they_are() -> None:
    """An accumulator updates its sum in place if the sum is training state; an input is never updated."""
    accumulate = onnx.helper.make_node(
        "InPlaceAccumulatorV2", ["sum", "x", "reset"], ["flag", "out"], domain="com.microsoft"
    )
    graph = onnx.helper.make_graph(
        [accumulate],
        "accumulate",
        [declare("sum", [4096]), declare("x", [4096]), declare("reset", [1], onnx.TensorProto.BOOL)],
        [declare("out", [4096])],
    )
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    session = ortrain.InferenceSession(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8))
    total, x = np.full(4096, 3, np.float32), np.full(4096, 4, np.float32)
    binding = session.io_binding()
    binding.bind_cpu_input("sum", total)
    binding.bind_cpu_input("x", x)
    binding.bind_cpu_input("reset", np.zeros(1, bool))
    binding.bind_output("out")
    for _ in range(2):
        session.run_with_iobinding(binding)
        assert (binding.copy_outputs_to_cpu()[0] == 7).all()
    assert (total == 3).all()
    assert (x == 4).all()


def test_binding_keeps_arrays_alive(session: ortrain.InferenceSession) -> None:
    """A binding keeps its arrays alive, also without other references to them."""
    binding = session.io_binding()
    binding.bind_cpu_input("x", filled(seed=7))
    binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_numpy(np.zeros((ROWS, 32), np.float32)))
    gc.collect()
    noise = [filled(seed=seed) for seed in range(20)]
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], 2 * filled(seed=7))
    del noise
    bound = filled(seed=3)
    binding.bind_cpu_input("x", bound)
    with pytest.raises(ValueError, match="resize"):
        bound.resize((1, 32))


def test_addresses(session: ortrain.InferenceSession) -> None:
    x, y = filled(), np.zeros((ROWS, 32), np.float32)
    binding = session.io_binding()
    binding.bind_input("x", "cpu", 0, FLOAT, x.shape, x.ctypes.data)
    binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(y, 2 * x)
    assert binding.get_outputs()[0].data_ptr() == y.ctypes.data
    # Memory allocated in C is an example.
    buffer = (ctypes.c_float * (ROWS * 32))()
    binding.bind_output("y", "cpu", 0, np.float32, [ROWS, 32], ctypes.addressof(buffer))
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(np.frombuffer(buffer, np.float32).reshape(ROWS, 32), 2 * x)


@pytest.mark.parametrize(
    ("pointer", "shape", "error", "sentence"),
    [
        (0, [2, 32], InvalidArgumentError, r"0x0 is no address of float32\[2, 32\]: it is null"),
        (1 << 20 | 2, [2, 32], InvalidArgumentError, "it is not a multiple of 4 bytes, the element size"),
        ((1 << 64) - 4, [2, 32], InvalidArgumentError, "it has no valid range of 256 bytes"),
        (-4, [2, 32], InvalidArgumentError, "an address must not be negative, got -4"),
        (64, [2, -1], InvalidArgumentError, "a shape must be a list of sizes, got -1"),
        (64, [1 << 40, 1 << 40], InvalidArgumentError, "is too large to address"),
        ("64", [2, 32], TypeError, "an address must be an int, got str"),
        (1 << 70, [2, 32], OverflowError, "int too"),
    ],
)
def test_invalid_addresses(
    session: ortrain.InferenceSession, pointer: Any, shape: list[int], error: type[Exception], sentence: str
) -> None:
    binding = session.io_binding()
    with pytest.raises(error, match=sentence):
        binding.bind_input("x", "cpu", 0, np.float32, shape, pointer)
    with pytest.raises(error, match=sentence):
        binding.bind_output("y", "cpu", 0, np.float32, shape, pointer)
    assert not binding._iobinding._inputs
    assert not binding._iobinding._outputs


def test_names(session: ortrain.InferenceSession) -> None:
    binding = session.io_binding()
    for bind in (
        lambda name: binding.bind_cpu_input(name, filled()),
        lambda name: binding.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(filled())),
        lambda name: binding.bind_input(name, "cpu", 0, np.float32, [1], 64),
    ):
        with pytest.raises(InvalidArgumentError, match=r"the model has no input 'X'; it has x; did you mean 'x'\?"):
            bind("X")
    # The run reports an unknown output name.
    binding.bind_cpu_input("x", filled())
    binding.bind_output("yy")
    with pytest.raises(InvalidArgumentError, match="the model has no output 'yy'; it has y, z"):
        session.run_with_iobinding(binding)
    with pytest.raises(ValueError, match="output 'y' is bound to an address, which needs element_type and shape"):
        binding.bind_output("y", buffer_ptr=64)
    for device, device_id in (("cuda", 0), ("dml", 1)):
        with pytest.raises(UnsupportedError, match="in memory of the CPU"):
            binding.bind_output("y", device, device_id)
        with pytest.raises(UnsupportedError, match="in memory of the CPU"):
            binding.bind_input("x", device, device_id, np.float32, [1], 64)
    for value in (filled(), [1.0], None):
        with pytest.raises(TypeError, match="expected an OrtValue, got"):
            binding.bind_ortvalue_input("x", value)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="expected an OrtValue, got"):
            binding.bind_ortvalue_output("y", value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the name of an output must be a str, got 3"):
        binding.bind_output(3)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="arrays of <U1"):
        binding.bind_cpu_input("x", np.array(["a"]))


def read_only(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    array = np.zeros(shape, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (np.zeros((ROWS - 1, 32), np.float32), r'output "z" is float32\[64, 32\], but its buffer is float32\[63, 32\]'),
        (
            np.zeros((ROWS, 33), np.float32),
            r'output "z" is float32\[64, 32\], but its buffer is float32\[64, 33\]',
        ),
        (np.zeros(ROWS * 32, np.float32), r"but its buffer is float32\[2048\]"),
        (np.zeros((ROWS, 32)), r'output "z" is float32\[n, 32\], but its buffer is float64\[64, 32\]'),
        (np.zeros((ROWS, 32), np.int32), r"but its buffer is int32\[64, 32\]"),
        (read_only((ROWS, 32)), 'the buffer of output "z": it is read-only; give a writable buffer'),
    ],
)
def test_bound_outputs_of_wrong_shape_or_type(
    session: ortrain.InferenceSession, place: np.ndarray[Any, Any], sentence: str
) -> None:
    y, before = np.zeros((ROWS, 32), np.float32), place.copy()
    binding = session.io_binding()
    binding.bind_cpu_input("x", filled())
    binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_numpy(y))
    binding.bind_ortvalue_output("z", OrtValue.ortvalue_from_numpy(place))
    with pytest.raises(InvalidArgumentError, match=sentence):
        session.run_with_iobinding(binding)
    assert not y.any()
    np.testing.assert_array_equal(place, before)


def test_bound_outputs_that_share_memory(session: ortrain.InferenceSession) -> None:
    room = np.zeros((2 * ROWS - 1, 32), np.float32)
    binding = session.io_binding()
    binding.bind_cpu_input("x", filled())
    binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_numpy(room[:ROWS]))
    binding.bind_ortvalue_output("z", OrtValue.ortvalue_from_numpy(room[ROWS - 1 :]))
    with pytest.raises(InvalidArgumentError, match='outputs "y" and "z" share memory, so one result would'):
        session.run_with_iobinding(binding)
    assert not room.any()


def test_shapes_that_come_out_of_the_run() -> None:
    """If a shape depends on values and an output does not fit, no output is written."""
    session = ortrain.InferenceSession(
        model_of("""
        select (float[n] x) => (float[n] y, int64[1, m] places) <float two = {2}> {
            y = Mul (x, two)
            places = NonZero (x)
        }
    """)
    )
    x = np.array([0, 5, 0, 7], np.float32)
    y, places = np.zeros(4, np.float32), np.zeros((1, 2), np.int64)
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_numpy(y))
    binding.bind_ortvalue_output("places", OrtValue.ortvalue_from_numpy(places))
    session.run_with_iobinding(binding)
    assert (y.tolist(), places.tolist()) == ([0, 10, 0, 14], [[1, 3]])
    x[:] = [1, 2, 3, 4]
    with pytest.raises(
        InvalidArgumentError, match=r'output "places" is int64\[1, 4\], but its buffer is int64\[1, 2\]$'
    ):
        session.run_with_iobinding(binding)
    assert (y.tolist(), places.tolist()) == ([0, 10, 0, 14], [[1, 3]])


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (np.zeros((ROWS, 31), np.float32), "axis 1 should be 32 but is 31"),
        (np.zeros((ROWS, 32)), "the element types differ"),
        (np.zeros(32, np.float32), "it should have 2 axes but has 1"),
    ],
)
def test_inputs_that_do_not_fit(session: ortrain.InferenceSession, value: np.ndarray[Any, Any], sentence: str) -> None:
    y = np.zeros((ROWS, 32), np.float32)
    binding = session.io_binding()
    binding.bind_cpu_input("x", value)
    binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_numpy(y))
    with pytest.raises(InvalidArgumentError, match=sentence):
        session.run_with_iobinding(binding)
    assert not y.any()


def test_read_only_and_scattered_inputs(session: ortrain.InferenceSession) -> None:
    binding = session.io_binding()
    binding.bind_output("z")
    binding.bind_cpu_input("x", read_only((ROWS, 32)))
    assert copied_inputs(session, binding) == 0
    # Arrays that are not contiguous are copied when they are bound.
    wide = filled(32).T.copy().T
    expected = wide.copy()
    binding.bind_cpu_input("x", wide)
    wide[:] = 0
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], expected + 1)
    # A NumPy array may begin at any address.
    raw = np.zeros(ROWS * 32 * 4 + 1, np.uint8)
    odd = raw[1:].view(np.float32).reshape(ROWS, 32)
    odd[:] = filled()
    binding.bind_cpu_input("x", odd)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], odd + 1)


def test_indices_are_copied_at_the_start_of_a_run() -> None:
    session = ortrain.InferenceSession(
        model_of("gather (float[k, 4] table, int64[n] rows) => (float[n, 4] y) { y = Gather (table, rows) }")
    )
    table, rows = filled(ROWS).reshape(-1, 4), np.arange(4096)[::-1] % 512
    rows = np.ascontiguousarray(rows)
    binding = session.io_binding()
    binding.bind_cpu_input("table", table)
    binding.bind_cpu_input("rows", rows)
    binding.bind_output("y")
    assert copied_inputs(session, binding) == rows.nbytes
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], table[rows])
    rows[17] = 512
    with pytest.raises(InvalidArgumentError, match="512"):
        session.run_with_iobinding(binding)


def test_run_options(session: ortrain.InferenceSession) -> None:
    y = np.zeros((ROWS, 32), np.float32)
    binding = session.io_binding()
    binding.bind_cpu_input("x", filled())
    binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_numpy(y))
    options = ortrain.RunOptions()
    options.terminate = True
    with pytest.raises(OrtrainError, match="terminate"):
        session.run_with_iobinding(binding, options)
    assert not y.any()
    options.terminate, options.only_execute_path_to_fetches = False, True
    session.run_with_iobinding(binding, options)
    assert y.any()


def test_invalid_bindings(session: ortrain.InferenceSession) -> None:
    other = ortrain.InferenceSession(both()).io_binding()
    with pytest.raises(InvalidArgumentError, match="the binding belongs to another session"):
        session.run_with_iobinding(other)
    with pytest.raises(InvalidArgumentError, match="no output is bound; call bind_output first"):
        session.run_with_iobinding(session.io_binding())
    with pytest.raises(TypeError, match=r"expected a binding from io_binding\(\) of the session, got dict"):
        session.run_with_iobinding({})  # type: ignore[arg-type]


def test_native_object_of_a_binding(session: ortrain.InferenceSession) -> None:
    binding = session.io_binding()
    inside = binding._iobinding
    assert isinstance(inside, SessionIOBinding)
    assert capi.SessionIOBinding is SessionIOBinding
    x, y = filled(), np.zeros((ROWS, 32), np.float32)
    inside.bind_input("x", CPU, np.float32, x.shape, x.ctypes.data)
    inside.bind_output("y", CPU, FLOAT, y.shape, y.ctypes.data)
    inside.bind_output("z", CPU)
    session.run_with_iobinding(inside)
    np.testing.assert_array_equal(y, 2 * x)
    assert [value.data_ptr() == y.ctypes.data for value in inside.get_outputs()] == [True, False]
    inside.bind_input("x", y)
    inside.bind_ortvalue_output("z", OrtValue.ortvalue_from_numpy(x)._ortvalue)
    inside.bind_ortvalue_input("x", OrtValue.ortvalue_from_numpy(y)._ortvalue)
    inside.bind_output("y", CPU)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(x, y + 1)
    with pytest.raises(UnsupportedError, match="device type 1 is not supported"):
        inside.bind_output("y", OrtDevice(1, 0, 0))
    for call in (
        lambda: inside.bind_output("y", "cpu"),
        lambda: inside.bind_input("x", "cpu", np.float32, [1], 64),
        lambda: inside.bind_input("x", CPU, np.float32, [1]),
        lambda: inside.bind_output("y", CPU, np.float32),
    ):
        with pytest.raises(TypeError):
            call()


def test_sequences_are_not_bound() -> None:
    session = ortrain.InferenceSession(RECORDS / "mlp_adamw_ce" / "optimizer_model.onnx")
    (name, *_) = [value.name for value in session.get_inputs() if value.type.startswith("seq(")]
    with pytest.raises(InvalidArgumentError, match=f"input '{name}' is a sequence of tensors and cannot be bound"):
        session.io_binding().bind_cpu_input(name, np.zeros(2, np.float32))


def test_values_of_onnxruntime(session: ortrain.InferenceSession) -> None:
    """Values of onnxruntime are used in place, and kept alive."""
    x, y = filled(), onnxruntime.OrtValue.ortvalue_from_shape_and_type([ROWS, 32], np.float32)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(x))
    binding.bind_ortvalue_output("y", y)
    assert copied_inputs(session, binding) == 0
    assert binding.get_outputs()[0].data_ptr() == y.data_ptr()
    (value,) = binding.get_outputs()
    del y, binding
    gc.collect()
    np.testing.assert_array_equal(value.numpy(), 2 * x)


# Runs with OrtValues.


def test_run_with_ort_values(session: ortrain.InferenceSession) -> None:
    x = filled()
    value = OrtValue.ortvalue_from_numpy(x)
    y, z = session.run_with_ort_values(None, {"x": value})
    assert isinstance(y, OrtValue)
    np.testing.assert_array_equal(y.numpy(), 2 * x)
    (again,) = session.run_with_ort_values(["z"], {"x": value})
    np.testing.assert_array_equal(again.numpy(), z.numpy())
    assert [found.shape() for found in session.run_with_ort_values([], {"x": value})] == [[ROWS, 32]] * 2
    options = ortrain.RunOptions()
    options.only_execute_path_to_fetches = True
    assert len(session.run_with_ort_values(["z", "y", "z"], {"x": value}, options)) == 3
    given: Any = onnxruntime.OrtValue.ortvalue_from_numpy(x)
    (theirs, _) = session.run_with_ort_values(None, {"x": given})
    assert isinstance(theirs, onnxruntime.OrtValue)
    with pytest.raises(TypeError, match="the value for 'x' must be an OrtValue, got ndarray; run accepts arrays"):
        session.run_with_ort_values(None, {"x": x})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match='no value was given for input "x"; none was given'):
        session.run_with_ort_values(None, {})
    with pytest.raises(InvalidArgumentError, match="the model has no output 'w'; it has y, z"):
        session.run_with_ort_values(["w"], {"x": value})
    with pytest.raises(InvalidArgumentError, match='the model has no input "more"; it has x'):
        session.run_with_ort_values(None, {"x": value, "more": value})


def vector(*arrays: np.ndarray[Any, Any]) -> OrtValueVector:
    values = OrtValueVector()
    for array in arrays:
        values.push_back(OrtValue.ortvalue_from_numpy(array)._ortvalue)
    return values


def test_run_with_ortvaluevector(session: ortrain.InferenceSession) -> None:
    x, places = filled(), [np.zeros((ROWS, 32), np.float32) for _ in range(2)]
    fetches = OrtValueVector()
    session.run_with_ortvaluevector(ortrain.RunOptions(), ["x"], vector(x), ["z", "y"], fetches, [CPU, CPU])
    np.testing.assert_array_equal(fetches[0].numpy(), x + 1)
    np.testing.assert_array_equal(fetches[1].numpy(), 2 * x)
    # Values in the fetches are overwritten.
    there = vector(*places)
    session.run_with_ortvaluevector(None, ["x"], vector(x), ["y", "z"], there, [CPU, CPU])
    np.testing.assert_array_equal(places[0], 2 * x)
    assert there[1].data_ptr() == places[1].ctypes.data
    for names, feeds, wanted, devices, sentence in (
        (["x", "x"], vector(x, x), ["y"], [CPU], "input 'x' is given twice"),
        (["x"], vector(), ["y"], [CPU], "expected 1 values in feeds, got 0"),
        (["x"], vector(x), ["y"], [], "expected 1 values in fetch_devices, got 0"),
        (["x"], vector(x), ["y"], [CPU], "expected 1 values in fetches, got 2"),
        ([], vector(), ["y", "z"], [CPU, CPU], 'no value was given for input "x"'),
    ):
        with pytest.raises(InvalidArgumentError, match=sentence):
            session.run_with_ortvaluevector(None, names, feeds, wanted, there, devices)
    with pytest.raises(UnsupportedError, match="device type 1 is not supported"):
        session.run_with_ortvaluevector(None, ["x"], vector(x), ["y"], OrtValueVector(), [OrtDevice(1, 0, 0)])
    with pytest.raises(TypeError, match="feed_names and fetch_names must be lists of names"):
        session.run_with_ortvaluevector(None, "x", vector(x), ["y"], OrtValueVector(), [CPU])


def test_two_threads_on_one_session(session: ortrain.InferenceSession) -> None:
    """Runs take turns: each thread gets the results of its own values."""
    rounds, errors = 40, []

    def work(seed: int, rows: int) -> None:
        try:
            binding = session.io_binding()
            x, y = filled(rows, seed), np.zeros((rows, 32), np.float32)
            binding.bind_cpu_input("x", x)
            binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_numpy(y))
            binding.bind_output("z")
            for step in range(rounds):
                x[:] = filled(rows, seed + step)
                session.run_with_iobinding(binding)
                np.testing.assert_array_equal(y, 2 * x)
                np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[1], x + 1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(100 * k, rows)) for k, rows in enumerate((ROWS, ROWS, 2, 500))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_writing_to_an_input_while_it_is_read() -> None:
    """Writing to an input during a run gives an unspecified mix of values, and no other harm."""
    session = ortrain.InferenceSession(both())
    x, y = np.zeros((1 << 12, 32), np.float32), np.zeros((1 << 12, 32), np.float32)
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_numpy(y))
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            x.fill(1)
            x.fill(0)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            session.run_with_iobinding(binding)
            assert set(np.unique(y)) <= {0, 2}
    finally:
        stop.set()
        writer.join()


# Initializers that a run may replace.


def overridable(*, listed: bool = True, ir_version: int = 8) -> onnx.ModelProto:
    """Return a model of y = w x + b with replaceable w and b; the sum of w is constant if w is not replaced."""
    inputs = [declare("x", ["n"]), declare("b", ["k"]), declare("w", [3])]
    numbers = [
        onnx.numpy_helper.from_array(np.array([1, 2, 3], np.float32), "w"),
        onnx.numpy_helper.from_array(np.array([10], np.float32), "b"),
    ]
    nodes = [
        onnx.helper.make_node("ReduceSum", ["w"], ["total"], keepdims=0),
        onnx.helper.make_node("Mul", ["x", "total"], ["product"]),
        onnx.helper.make_node("Add", ["product", "b"], ["y"]),
    ]
    graph = onnx.helper.make_graph(nodes, "affine", inputs if listed else inputs[:1], [declare("y", ["n"])], numbers)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=ir_version)


@pytest.mark.parametrize("device", DEVICES)
def test_initializers_that_are_inputs_too(device: str) -> None:
    session = ortrain.InferenceSession(overridable(), providers=[device])
    theirs = onnxruntime.InferenceSession(overridable().SerializeToString())
    assert [value.name for value in session.get_inputs()] == ["x"]
    found = [(value.name, value.type, value.shape) for value in session.get_overridable_initializers()]
    assert found == [("b", "tensor(float)", ["k"]), ("w", "tensor(float)", [3])]
    assert sorted(name for name, *_ in found) == sorted(v.name for v in theirs.get_overridable_initializers())
    x, w, b = (np.array(values, np.float32) for values in ([1, 2], [5, 5, 5], [100]))
    for feed in ({"x": x}, {"x": x, "w": w}, {"b": b, "x": x}, {"w": w, "x": x, "b": b}, {"x": x}, {"x": x, "w": -w}):
        (mine,), (expected,) = session.run(None, feed), theirs.run(None, feed)
        np.testing.assert_array_equal(mine, expected)
    with pytest.raises(InvalidArgumentError, match=r'input "w" must be float32\[3\], got float32\[2\]'):
        session.run(None, {"x": x, "w": w[:2]})
    with pytest.raises(InvalidArgumentError, match='the model has no input "q"; it has x, b, w'):
        session.run(None, {"x": x, "q": w})
    with pytest.raises(ValueError, match='no value was given for input "x"; values were given for "w"'):
        session.run(None, {"w": w})


def test_runs_without_them_have_constants() -> None:
    session = ortrain.InferenceSession(overridable())
    session.run(None, {"x": np.ones(2, np.float32)})
    session._native.begin_trace()
    session.run(None, {"x": np.ones(2, np.float32)})
    session.run(None, {"x": np.ones(2, np.float32), "w": np.ones(3, np.float32)})
    trace = session._native.end_trace()
    assert trace is not None
    names = [event["name"] for event in json.loads(trace) if event["name"] not in ("Inputs", "Outputs")]
    first, second = names[: names.index("model_run")], names[names.index("model_run") + 1 : -1]
    assert len(first) == 1
    assert not any("ReduceSum" in name for name in first)
    assert any("ReduceSum" in name for name in second)


def test_initializers_that_are_bound() -> None:
    session = ortrain.InferenceSession(overridable())
    x, w, y = np.array([1, 2], np.float32), np.full(3, 2, np.float32), np.zeros(2, np.float32)
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_cpu_input("w", w)
    binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_numpy(y))
    session.run_with_iobinding(binding)
    assert y.tolist() == [16, 22]
    w[:] = 0
    session.run_with_iobinding(binding)
    assert y.tolist() == [10, 10]
    binding.clear_binding_inputs()
    binding.bind_cpu_input("x", x)
    session.run_with_iobinding(binding)
    assert y.tolist() == [16, 22]


def test_initializers_that_cannot_be_overridden() -> None:
    plain = ortrain.InferenceSession(overridable(listed=False))
    assert plain.get_overridable_initializers() == []
    old = ortrain.InferenceSession(overridable(ir_version=3))
    assert old.get_overridable_initializers() == []
    for session in (plain, old):
        with pytest.raises(InvalidArgumentError, match='the model has no input "w"; it has x'):
            session.run(None, {"x": np.ones(2, np.float32), "w": np.ones(3, np.float32)})


def sizes() -> Iterator[tuple[int, int]]:
    yield from ((rows, total) for rows in (1, 2) for total in (4, 6))


def test_a_shape_that_is_overridable() -> None:
    """A run may replace an initializer that gives a shape, too."""
    session = ortrain.InferenceSession(
        onnx.helper.make_model(
            onnx.helper.make_graph(
                [onnx.helper.make_node("Reshape", ["x", "shape"], ["y"])],
                "reshape",
                [declare("x", ["n"]), declare("shape", [2], INT64)],
                [declare("y", ["a", "b"])],
                [onnx.numpy_helper.from_array(np.array([1, -1]), "shape")],
            ),
            opset_imports=[onnx.helper.make_opsetid("", 17)],
            ir_version=8,
        )
    )
    for rows, total in sizes():
        feed = {"x": np.arange(total, dtype=np.float32), "shape": np.array([rows, -1])}
        assert session.run(None, feed)[0].shape == (rows, total // rows)
        del feed["shape"]
        assert session.run(None, feed)[0].shape == (1, total)


def test_error_of_a_limit_names_a_sufficient_limit() -> None:
    """Inputs that are read in place belong to the caller, and do not count."""
    options = ortrain.SessionOptions()
    options.memory_limit = 1000
    session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
    x = np.zeros((64, 64), np.float32)
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_output("logits")
    needs = []
    for call in (lambda: session.run(None, {"x": x}), lambda: session.run_with_iobinding(binding)):
        with pytest.raises(ortrain.MemoryLimitError, match=r"memory_limit = [0-9]+ is enough") as error:
            call()
        needs.append(int(str(error.value).split()[2]))
    assert needs[1] < needs[0]
