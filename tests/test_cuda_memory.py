"""Memory of the device "cuda" that other libraries use: DLPack and the CUDA array interface.

The software driver keeps the memory of its device in this process, so a test can look at an address.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOFTWARE = Path(__file__).parent.parent / "build" / "cuda"
SETUP = """
import ctypes
import numpy as np
import ortrain
from ortrain import CheckpointState, LossType, Module, Optimizer, OptimType, OrtValue

ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=LossType.CrossEntropyLoss, optimizer=OptimType.SGD)
state = CheckpointState.load_checkpoint("checkpoint")
module = Module("training_model.onnx", state, device="cuda")
optimizer = Optimizer("optimizer_model.onnx", module)
x, labels = np.ones((4, 64), np.float32), np.arange(4)

def elements(address, count):
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))

def raises(kind, text, call):
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
"""


def run_on_cuda(script: str, folder: Path) -> None:
    """Run a script in a process with the software driver."""
    variables = {
        "ORTRAIN_CUDA_LIBRARIES": str(SOFTWARE),
        "ORTRAIN_CUDA_CACHE": "",
        "SOFTWARE_NVRTC_CACHE": str(SOFTWARE / "modules"),
    }
    command = [sys.executable, "-c", SETUP + script]
    done = subprocess.run(command, cwd=folder, env=os.environ | variables, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_planes_have_addresses(tmp_path: Path) -> None:
    run_on_cuda(
        """
module(x, labels)
(plane,) = module.gradient_planes()
interface = plane.__cuda_array_interface__
assert interface["shape"] == plane.shape and interface["typestr"] == "<f4" and interface["version"] == 3
assert interface["strides"] is None and interface["stream"] > 2 and interface["data"][1] is False
expected = plane.numpy()
live = elements(interface["data"][0], len(plane))
assert np.array_equal(live, expected)
# A change in place is a change of the gradients.
live *= 0.0
before = state.parameters["fc1.weight"].data
optimizer.step()
assert np.array_equal(state.parameters["fc1.weight"].data, before)
""",
        tmp_path,
    )


def test_values_go_out_and_in(tmp_path: Path) -> None:
    run_on_cuda(
        """
module(x, labels)
(plane,) = module.gradient_planes()
assert plane.__dlpack_device__() == (2, 0)
value = OrtValue.from_dlpack(plane)
assert value.shape() == [len(plane)] and value.device_name() != ""
assert value.__dlpack_device__() == (2, 0)
assert value.__cuda_array_interface__["data"][0] == plane.__cuda_array_interface__["data"][0]
assert np.array_equal(value.numpy(), plane.numpy())
again = OrtValue.from_dlpack(OrtValue.from_dlpack(plane))
assert again.__cuda_array_interface__["data"][0] == plane.__cuda_array_interface__["data"][0]
# The streams of a consumer: the default ones, and none.
for stream in (None, 1, 2, -1):
    capsule = plane.__dlpack__(stream=stream, max_version=(1, 0))
    assert OrtValue.from_dlpack(capsule).shape() == [len(plane)]
raises(TypeError, "used before", lambda: OrtValue.from_dlpack(capsule))
raises(ortrain.InvalidArgumentError, "0 is no stream of CUDA", lambda: plane.__dlpack__(stream=0))
raises(BufferError, "must copy the plane", lambda: plane.__dlpack__(copy=True))
raises(BufferError, "must copy the plane", lambda: plane.__dlpack__(dl_device=(1, 0)))
# A value keeps its memory after the plane is gone.
content = plane.numpy()
del plane, module, optimizer, state
assert np.array_equal(value.numpy(), content)
""",
        tmp_path,
    )


def test_values_of_a_device_are_inputs(tmp_path: Path) -> None:
    run_on_cuda(
        """
parameters = state.trainable_planes()[0]
first = OrtValue.from_dlpack(parameters)
loss = module(OrtValue.ortvalue_from_numpy(x), OrtValue.ortvalue_from_numpy(labels))
assert np.array_equal(first.numpy(), parameters.numpy())
on_host = Module("training_model.onnx", CheckpointState.load_checkpoint("checkpoint"))(x, labels)
assert abs(float(loss.numpy()) - float(on_host)) < 1e-5
""",
        tmp_path,
    )


def test_other_devices_are_refused(tmp_path: Path) -> None:
    run_on_cuda(
        """
class Elsewhere:
    def __init__(self, kind, number):
        self.device = (kind, number)
    def __dlpack_device__(self):
        return self.device
    def __dlpack__(self, **options):
        raise AssertionError("nobody may ask")

raises(ortrain.UnsupportedError, "on a device (ROCm, number 0)", lambda: OrtValue.from_dlpack(Elsewhere(10, 0)))
raises(ortrain.DeviceUnavailableError, 'the only device is "cuda"', lambda: OrtValue.from_dlpack(Elsewhere(2, 1)))
host = OrtValue.ortvalue_from_numpy(x)
assert host.__dlpack_device__() == (1, 0) and not hasattr(host, "__cuda_array_interface__")
""",
        tmp_path,
    )


@pytest.mark.parametrize("interface", ["__dlpack__", "__cuda_array_interface__"])
def test_frozen_planes_are_read_only(interface: str, tmp_path: Path) -> None:
    run_on_cuda(
        f"""
import os
os.mkdir("frozen")
ortrain.generate_artifacts(
    ortrain.examples.perceptron(), requires_grad=["fc1.weight", "fc1.bias"], frozen_params=["fc2.weight", "fc2.bias"],
    loss=LossType.CrossEntropyLoss, optimizer=OptimType.SGD, artifact_directory="frozen")
state = CheckpointState.load_checkpoint("frozen/checkpoint").to("cuda")
(plane,) = state.frozen_planes()
if {interface!r} == "__dlpack__":
    raises(BufferError, "read-only", plane.__dlpack__)
    assert plane.__dlpack__(max_version=(1, 0))
else:
    assert plane.__cuda_array_interface__["data"][1] is True
""",
        tmp_path,
    )


# A producer of DLPack as another library is one: a tensor in a range of device memory, and a call log of the driver.
PRODUCER = """
from ctypes import CFUNCTYPE, CDLL, POINTER, Structure, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint8, c_uint16
from ctypes import c_uint64, c_void_p, py_object, pythonapi
import os

class DLTensor(Structure):
    _fields_ = [("data", c_void_p), ("kind", c_int32), ("number", c_int32), ("ndim", c_int32), ("code", c_uint8),
                ("bits", c_uint8), ("lanes", c_uint16), ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)),
                ("offset", c_uint64)]

class Managed(Structure):
    pass

Deleter = CFUNCTYPE(None, POINTER(Managed))
Managed._fields_ = [("tensor", DLTensor), ("context", c_void_p), ("deleter", Deleter)]
pythonapi.PyCapsule_New.restype, pythonapi.PyCapsule_New.argtypes = py_object, [c_void_p, c_char_p, c_void_p]
dropped, kept = [], []
pythonapi.Py_IncRef(py_object(kept))  # Values are dropped after the variables of this module.

def tensor(address, shape, strides=None, code=2, bits=32, offset=0):
    lanes = lambda numbers: (c_int64 * len(numbers))(*numbers)
    deleter = Deleter(lambda managed, dropped=dropped: dropped.append(address))
    header = DLTensor(address, 2, 0, len(shape), code, bits, 1, lanes(shape), strides and lanes(strides), offset)
    managed = Managed(header, None, deleter)
    kept.append((managed, deleter))
    return pythonapi.PyCapsule_New(byref(managed), b"dltensor", None)

driver = CDLL(os.path.join(os.environ["ORTRAIN_CUDA_LIBRARIES"], "libcuda.so.1"))
driver.software_cuda_log.restype = c_char_p
driver.software_cuda_set(b"SOFTWARE_CUDA_LOG", b"1")

def calls():
    return driver.software_cuda_log().decode().split()

def address_of(plane):
    return plane.__cuda_array_interface__["data"][0]

x, labels = np.random.default_rng(0).random((32, 64), np.float32), np.arange(32) % 10
"""


def test_tensors_of_other_libraries_are_inputs_in_place(tmp_path: Path) -> None:
    run_on_cuda(
        PRODUCER
        + """
on_host = Module("training_model.onnx", CheckpointState.load_checkpoint("checkpoint"))
other_state = CheckpointState.load_checkpoint("checkpoint")
other = Module("training_model.onnx", other_state, device="cuda")
(foreign,) = other.gradient_planes()
content = np.zeros(len(foreign), np.float32)
content[: x.size] = x.ravel()
foreign.copy_from(content)
value = OrtValue.from_dlpack(tensor(address_of(foreign), x.shape))
label_value = OrtValue.ortvalue_from_numpy(labels)
expected = float(on_host(x, labels))
for step in range(4):
    module.lazy_reset_grad()
    calls()
    loss = module(value, label_value)
    seen = calls()
    assert "cuMemcpyDtoHAsync_v2" not in seen, seen
    assert ("cuGraphLaunch" in seen) == (step > 0), seen
    # Before and after the step, the streams of both libraries wait for each other.
    assert seen.count("cuStreamWaitEvent") >= 2, seen
    assert abs(float(loss.numpy()) - expected) < 1e-5
class Tensor:
    def __dlpack_device__(self):
        return (2, 0)
    def __dlpack__(self, **options):
        assert options["stream"] > 2, "the stream of the device"
        return tensor(address_of(foreign), x.shape)
    def __array__(self, *arguments):
        raise TypeError("it is on a device")

assert abs(float(module(Tensor(), labels)) - expected) < 1e-5
# The step reads the memory itself: a change there is another input.
foreign.copy_from(content * 2)
assert abs(float(module(value, label_value).numpy()) - float(on_host(x * 2, labels))) < 1e-5
# A copy on the host does not replace the shared memory, and an update reaches it.
assert np.array_equal(value.numpy(), x * 2)
value.update_inplace(x)
assert np.array_equal(foreign.numpy(), content) and value.data_ptr() == address_of(foreign)
calls()
assert abs(float(module(value, label_value).numpy()) - expected) < 1e-5
assert calls().count("cuMemcpyDtoHAsync_v2") == 1, "the loss alone is read"
dropped.clear()
del value
assert dropped == [address_of(foreign)]
""",
        tmp_path,
    )


def test_inputs_that_a_step_overwrites_or_cannot_address_are_copied(tmp_path: Path) -> None:
    run_on_cuda(
        PRODUCER
        + """
host_state = CheckpointState.load_checkpoint("checkpoint")
on_host = Module("training_model.onnx", host_state)
label_value = OrtValue.ortvalue_from_numpy(labels)
(own,) = module.gradient_planes()
weight = state.parameters["fc1.weight"]
content = np.zeros(len(own), np.float32)
content[: x.size] = x.ravel()

def gradient_of(given):
    module.lazy_reset_grad()
    calls()
    module(given, label_value)
    assert "cuMemcpyDtoHAsync_v2" in calls()
    return weight.grad

on_host(x, labels)
expected = host_state.parameters["fc1.weight"].grad
own.copy_from(content)
assert np.abs(gradient_of(OrtValue.from_dlpack(tensor(address_of(own), x.shape))) - expected).max() < 1e-5
# One element behind a multiple of 256 bytes, from another plane.
other = Module("training_model.onnx", CheckpointState.load_checkpoint("checkpoint"), device="cuda")
(foreign,) = other.gradient_planes()
foreign.copy_from(np.roll(content, 1))
shifted = OrtValue.from_dlpack(tensor(address_of(foreign), x.shape, offset=4))
assert np.array_equal(shifted.numpy(), x)
assert np.abs(gradient_of(shifted) - expected).max() < 1e-5
""",
        tmp_path,
    )


def test_capsules_are_checked(tmp_path: Path) -> None:
    run_on_cuda(
        PRODUCER
        + """
address = address_of(module.gradient_planes()[0])
take = OrtValue.from_dlpack
raises(ortrain.InvalidArgumentError, "not contiguous", lambda: take(tensor(address, (4, 8), strides=(1, 4))))
raises(ortrain.UnsupportedError, "type code 5", lambda: take(tensor(address, (4,), code=5, bits=64)))
raises(ortrain.InvalidArgumentError, "invalid shape", lambda: take(tensor(address, (-4,))))
assert not dropped, "a refused tensor still belongs to its producer"
capsule = tensor(address, (4,))
take(capsule)
raises(TypeError, "used before", lambda: take(capsule))
# A value of another type than the input.
wrong = take(tensor(address, (32, 64), code=0, bits=32))
raises(ortrain.InvalidArgumentError, "int32", lambda: module(wrong, OrtValue.ortvalue_from_numpy(labels)))
""",
        tmp_path,
    )


def test_an_interrupt_waits_for_the_step(tmp_path: Path) -> None:
    """The device cannot stop a submitted step, so the exception follows its end, and the state is complete."""
    run_on_cuda(
        """
import os, signal, threading, time
x, labels = np.ones((4096, 64), np.float32), np.zeros(4096, np.int64)
host_state = CheckpointState.load_checkpoint("checkpoint")
on_host = Module("training_model.onnx", host_state)
host_optimizer = Optimizer("optimizer_model.onnx", on_host)
expected = []
for step in range(4):
    expected.append(float(on_host(x, labels)))
    host_optimizer.step()
    on_host.lazy_reset_grad()
# The steps that record and replay take a while, because the device computes on this processor.
module(x, labels), optimizer.step(), module.lazy_reset_grad()
start = time.monotonic()
module(x, labels), optimizer.step(), module.lazy_reset_grad()
seconds = time.monotonic() - start
signal.signal(signal.SIGINT, signal.default_int_handler)
timer = threading.Timer(seconds / 3, lambda: os.kill(os.getpid(), signal.SIGINT))
timer.start()
try:
    module(x, labels)
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    optimizer.step()
    module.lazy_reset_grad()
assert abs(float(module(x, labels)) - expected[3]) < 1e-4
""",
        tmp_path,
    )


def test_forward_and_backward_passes_copy_on_the_device(tmp_path: Path) -> None:
    """Inputs and gradients of outputs that another library owns do not go through the host."""
    run_on_cuda(
        PRODUCER
        + """
from ortrain.gradient import OrtGradientForwardBackward

def pass_of(device, given, gradient):
    both = OrtGradientForwardBackward(ortrain.examples.perceptron(), providers=device, ordered=False)
    function = both.new_instance()
    weights = [both.get_initializer(name) for name in both.weights_to_train]
    calls()
    (logits,) = function.forward([given, *weights], training=True)
    results = function.backward([gradient])
    seen = calls()
    return seen, [np.asarray(value.numpy()) for value in (logits, *results)]

seed = np.random.default_rng(1).random((32, 10), np.float32)
(plane,) = module.gradient_planes()
content = np.zeros(len(plane), np.float32)
content[: x.size], content[x.size : x.size + seed.size] = x.ravel(), seed.ravel()
plane.copy_from(content)
# The second tensor is at no multiple of 256 bytes, which a copy may read.
given = OrtValue.from_dlpack(tensor(address_of(plane), x.shape))
gradient = OrtValue.from_dlpack(tensor(address_of(plane), seed.shape, offset=4 * x.size))
(copied,) = state.trainable_planes()
calls()
copied.copy_from(plane)
copied.copy_from(OrtValue.from_dlpack(tensor(address_of(plane), (len(plane),))))
assert "cuMemcpyDtoHAsync_v2" not in calls()
assert np.array_equal(copied.numpy(), content)
seen, got = pass_of("cuda", given, gradient)
assert "cuMemcpyDtoHAsync_v2" not in seen, seen
_, expected = pass_of("cpu", x, seed)
for ours, theirs in zip(got, expected, strict=True):
    assert np.abs(ours - theirs).max() < 1e-5
# A session with its own arrays for results.
session = ortrain.TrainingSession(
    CheckpointState.load_checkpoint("checkpoint"), "training_model.onnx", device="cuda")
loss = np.zeros((), np.float32)
session.train_step([given, labels], [loss])
on_host = Module("training_model.onnx", CheckpointState.load_checkpoint("checkpoint"))
assert abs(float(loss) - float(on_host(x, labels))) < 1e-5
""",
        tmp_path,
    )
