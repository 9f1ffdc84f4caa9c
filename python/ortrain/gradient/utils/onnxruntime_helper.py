"""Devices, providers and values, as names and as objects (``onnxcustom.utils.onnxruntime_helper``).

ortrain computes on the CPU. The names of other devices are valid here; their use is an error later.

>>> from ortrain.gradient.utils.onnxruntime_helper import device_to_providers, get_ort_device, ort_device_to_string
>>> ort_device_to_string(get_ort_device("cuda:1")), device_to_providers("cpu")
('cuda:1', ['CPUExecutionProvider'])
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain._ortrain import InferenceSession as NativeSession
from ortrain._ortrain import OrtDevice, OrtValue
from ortrain.errors import InvalidArgumentError, UnsupportedError
from ortrain.inference import InferenceSession

__all__ = [
    "device_to_providers",
    "get_ort_device",
    "get_ort_device_from_session",
    "get_ort_device_type",
    "numpy_to_ort_value",
    "ort_device_to_string",
    "provider_to_device",
]

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_DEVICES = {_CPU: "cpu", _CUDA: "cuda"}


def provider_to_device(provider_name: str) -> str:
    """Returns the device of a provider: ``"cpu"`` or ``"cuda"``.

    Raises:
        InvalidArgumentError: for an unknown provider.

    Source: ``onnxcustom.utils.onnxruntime_helper.provider_to_device``.

    >>> from ortrain.gradient.utils.onnxruntime_helper import provider_to_device
    >>> provider_to_device("CPUExecutionProvider")
    'cpu'

    """
    if provider_name not in _DEVICES:
        raise InvalidArgumentError(f"unknown provider {provider_name!r}; expected one of {', '.join(_DEVICES)}")
    return _DEVICES[provider_name]


def get_ort_device_type(device: str | OrtDevice) -> int:
    """Returns the type of a device as a number: 0 for the CPU, 1 for CUDA.

    Args:
        device: ``"cpu"`` or ``"cuda"``, or a device.

    Raises:
        InvalidArgumentError: for an unknown name.
        TypeError: for an argument that is neither a name nor a device.

    Source: ``onnxcustom.utils.onnxruntime_helper.get_ort_device_type``.

    >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device_type
    >>> get_ort_device_type("cuda")
    1

    """
    if isinstance(device, OrtDevice):
        return device.device_type()
    if not isinstance(device, str):
        raise TypeError(f"a device must be 'cpu', 'cuda' or an OrtDevice, got {type(device).__name__}")
    kinds = {"cpu": OrtDevice.cpu(), "cuda": OrtDevice.cuda()}
    if device not in kinds:
        raise InvalidArgumentError(f"unknown kind of device {device!r}; expected 'cpu' or 'cuda'")
    return kinds[device]


def get_ort_device(device: str | OrtDevice) -> OrtDevice:
    """Returns a device by its name.

    Args:
        device: ``"cpu"``; ``"cuda"`` or ``"gpu"``, with a colon and an index for a device other than the first
            (``"cuda:1"``); a device, which is returned unchanged.

    Raises:
        InvalidArgumentError: for an unknown name.
        TypeError: for an argument that is neither a name nor a device.

    Source: ``onnxcustom.utils.onnxruntime_helper.get_ort_device``.

    >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device
    >>> device = get_ort_device("gpu:1")
    >>> device.device_type() == device.cuda(), device.device_id()
    (True, 1)

    """
    if isinstance(device, OrtDevice):
        return device
    if not isinstance(device, str):
        raise TypeError(f"a device must be a name or an OrtDevice, got {type(device).__name__}")
    kind, colon, number = device.partition(":")
    if device == "cpu":
        return OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)
    if kind in ("cuda", "gpu") and (not colon or (number.isascii() and number.isdigit() and len(number) < 5)):
        return OrtDevice(OrtDevice.cuda(), OrtDevice.default_memory(), int(number or 0))
    raise InvalidArgumentError(
        f"unknown device {device!r}; expected 'cpu', 'cuda', or 'cuda' with an index, such as 'cuda:1'"
    )


def ort_device_to_string(device: OrtDevice) -> str:
    """Returns the name of a device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``; :func:`get_ort_device` is the inverse.

    Raises:
        TypeError: for an argument that is not a device.
        UnsupportedError: for a device that is neither a CPU nor a CUDA device.

    Source: ``onnxcustom.utils.onnxruntime_helper.ort_device_to_string``.

    >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, ort_device_to_string
    >>> ort_device_to_string(get_ort_device("gpu:0"))
    'cuda'

    """
    if not isinstance(device, OrtDevice):
        raise TypeError(
            f"a device must be an OrtDevice, got {type(device).__name__}; get_ort_device returns the device of a name"
        )
    names = {OrtDevice.cpu(): "cpu", OrtDevice.cuda(): "cuda"}
    kind = device.device_type()
    if kind not in names:
        raise UnsupportedError(
            f"a device of type {kind} has no name; the types with a name are {OrtDevice.cpu()} and {OrtDevice.cuda()}"
        )
    return names[kind] if device.device_id() == 0 else f"{names[kind]}:{device.device_id()}"


def numpy_to_ort_value(arr: npt.NDArray[Any], device: OrtDevice | None = None) -> OrtValue:
    """Returns an array as a value; a contiguous array shares its memory with the value.

    Args:
        arr: the array; its memory lives as long as the value.
        device: the device of the value; the CPU by default.

    Raises:
        TypeError: for an argument that is not an array.
        UnsupportedError: for an element type that tensors do not have; for another device than the CPU.

    Source: ``onnxcustom.utils.onnxruntime_helper.numpy_to_ort_value``.

    >>> from ortrain.gradient.utils.onnxruntime_helper import numpy_to_ort_value
    >>> numpy_to_ort_value(np.zeros((2, 3), np.float32)).shape()
    [2, 3]

    """
    if not isinstance(arr, (np.ndarray, np.generic)):
        raise TypeError(f"a value must be an array, got {type(arr).__name__}")
    return OrtValue.ortvalue_from_numpy(np.asarray(arr), get_ort_device("cpu") if device is None else device)


def device_to_providers(device: str | OrtDevice) -> list[str]:
    """Returns the providers that run on a device: a list of one name.

    Raises:
        InvalidArgumentError: for an unknown name.
        TypeError: for an argument that is neither a name nor a device.
        UnsupportedError: for a device that is neither a CPU nor a CUDA device.

    Source: ``onnxcustom.utils.onnxruntime_helper.device_to_providers``.

    >>> from ortrain.gradient.utils.onnxruntime_helper import device_to_providers
    >>> device_to_providers("gpu")
    ['CUDAExecutionProvider']

    """
    kind = ort_device_to_string(get_ort_device(device)).partition(":")[0]
    return [provider for provider, name in _DEVICES.items() if name == kind]


def get_ort_device_from_session(sess: Any) -> OrtDevice:
    """Returns the device of the inputs and outputs of a session.

    For a session of ortrain this is the CPU, also if the session computes on a GPU.

    Args:
        sess: a session of ortrain, or of onnxruntime.

    Raises:
        TypeError: for an argument that is not a session.
        UnsupportedError: for an onnxruntime session on another provider, or without a ``device_id`` in its options.

    Source: ``onnxcustom.utils.onnxruntime_helper.get_ort_device_from_session``.

    >>> import ortrain
    >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device_from_session, ort_device_to_string
    >>> ort_device_to_string(get_ort_device_from_session(ortrain.InferenceSession(model)))
    'cpu'

    """
    if isinstance(sess, (InferenceSession, NativeSession)):
        return get_ort_device("cpu")
    if not hasattr(sess, "get_providers"):
        raise TypeError(f"a session must have get_providers, got {type(sess).__name__}")
    providers: list[str] = sess.get_providers()
    if not providers or providers[0] not in _DEVICES:
        raise UnsupportedError(f"the device of the session is unknown: its providers are {providers}")
    if providers[0] == _CPU:
        return get_ort_device("cpu")
    options = sess.get_provider_options()
    number = options.get(_CUDA, {}).get("device_id") if options else 0
    if number is None:
        raise UnsupportedError(f"the provider options {options} of the session have no device_id")
    return get_ort_device(f"cuda:{number}")
