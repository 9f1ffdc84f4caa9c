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
