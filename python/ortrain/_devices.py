"""Devices of the machine and their names.

>>> import ortrain
>>> ortrain.devices()[0].name
'cpu'
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ortrain import _ortrain
from ortrain._records import record_of

__all__ = ["DeviceInfo", "devices"]

CUDA_PROVIDER = "CUDAExecutionProvider"
# Devices by the execution provider names of onnxruntime.
_PROVIDERS = {
    "CPUExecutionProvider": "cpu",
    CUDA_PROVIDER: "cuda",
    "WebGpuExecutionProvider": "webgpu",
}

# GPUs that run kernels in WGSL.
_GPU = re.compile("webgpu|(vulkan|metal|dx12)(:[0-9]+)?")
# GPUs that run kernels in CUDA C.
_CUDA = re.compile("cuda(:[0-9]+)?")
# All valid device names. A valid name without a device in this machine is a separate error.
_NAMES = re.compile(f"cpu(:0)?|reference|auto|rocm(:[0-9]+)?|{_CUDA.pattern}|{_GPU.pattern}")


@dataclass(frozen=True)
class DeviceInfo:
    """Device of this machine.

    >>> import ortrain
    >>> cpu = ortrain.devices()[0]
    >>> cpu.name, cpu.kind, cpu.tensor_bytes
    ('cpu', 'processor', None)
    """

    name: str
    """Name, as ``device=`` and ``state.to()`` accept it."""
    kind: str
    """``"processor"``; ``"discrete"``, ``"integrated"`` or ``"other"`` for a GPU; ``"software"`` for a driver that
    computes on the processor; ``"reference"`` for the evaluator that defines correct results."""
    description: str
    """Name by the driver, or the level of the instruction set."""
    driver: str
    """Driver with its version; empty without a driver."""
    memory: int | None
    """Bytes of memory; ``None`` if unknown, because Vulkan, Metal and Direct3D 12 do not report it."""
    plane_bytes: int | None
    """Maximum bytes of all weights of one element type; ``None`` if only the memory limits them."""
    tensor_bytes: int | None
    """Maximum bytes of a tensor that a step reads or writes; ``None`` if only the memory limits it."""


def devices() -> list[DeviceInfo]:
    """Return the devices: the processor, the reference evaluator, then the GPUs.

    GPUs through CUDA come first, then the GPUs of each other interface, the fastest kind first.

    Drivers that compute on the processor are included if the environment variable ``ORTRAIN_SOFTWARE_GPU`` is ``1``.

    >>> import ortrain
    >>> [device.name for device in ortrain.devices()][:2]
    ['cpu', 'reference']
    """
    return [record_of(DeviceInfo, device) for device in _ortrain.devices()]


def is_gpu(name: str) -> bool:
    """Return True for the name of a GPU that runs kernels in WGSL. This machine need not have the GPU."""
    return _GPU.fullmatch(name) is not None


def is_cuda(name: str) -> bool:
    """Return True for the name of a GPU that runs kernels in CUDA C. This machine need not have the GPU."""
    return _CUDA.fullmatch(name) is not None


def provider_names() -> list[str]:
    """Return the names that a list of providers may contain."""
    return [*_PROVIDERS, "auto", "cpu", "cuda", "dx12", "metal", "reference", "vulkan", "webgpu"]


def device_of_provider(name: str, device_id: object = 0) -> str | None:
    """Return the device for a name in a list of providers; ``None`` if no device has the name.

    ``device_id`` is the index of the GPU of ``CUDAExecutionProvider``.
    """
    device = _PROVIDERS.get(name) or (name if _NAMES.fullmatch(name) else None)
    return f"{device}:{device_id}" if name == CUDA_PROVIDER and str(device_id) != "0" else device
