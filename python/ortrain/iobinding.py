"""Inputs and outputs of a session in memory of the caller.

>>> import ortrain
>>> session = ortrain.InferenceSession(ortrain.examples.perceptron())
>>> binding = session.io_binding()
>>> binding.bind_cpu_input("x", x)
>>> binding.bind_output("logits")
>>> session.run_with_iobinding(binding)
>>> (logits,) = binding.copy_outputs_to_cpu()
>>> logits.shape
(8, 10)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain import _ortrain
from ortrain._inputs import is_ortvalue, native_value
from ortrain._near import hint
from ortrain.errors import InvalidArgumentError, OrtrainError, UnsupportedError
from ortrain.ortvalue import OrtValue, _device

if TYPE_CHECKING:
    import numpy.typing as npt

    from ortrain.inference import InferenceSession

__all__ = ["IOBinding", "SessionIOBinding"]


class SessionIOBinding:
    """What an :class:`IOBinding` has inside, under the name and with the arguments of onnxruntime's extension module.

    Devices are an ``OrtDevice`` here, and values the native ones of :mod:`ortrain.capi`.

    >>> import ortrain
    >>> from ortrain.capi import OrtDevice
    >>> session = ortrain.InferenceSession(ortrain.examples.perceptron())
    >>> binding = session.io_binding()
    >>> inside = binding._iobinding
    >>> inside.bind_input("x", x)
    >>> inside.bind_output("logits", OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0))
    >>> session.run_with_iobinding(binding)
    >>> len(inside.get_outputs())
    1
    """

    def __init__(self, session: InferenceSession) -> None:
        self._session = session
        self._inputs: dict[str, _ortrain.OrtValue] = {}
        # In the order of binding, each with its memory if it has one.
        self._outputs: dict[str, _ortrain.OrtValue | None] = {}
        # What the last run made.
        self._values: dict[str, _ortrain.OrtValue] = {}

    def bind_input(self, name: str, *place: Any) -> None:
        """Bind an array, or elements at an address: a device, an element type, a shape and the address.

        Raises:
            InvalidArgumentError: for an input that the session does not have, an address that is null or not that of an
                element, and a shape that is none.
            UnsupportedError: for another device than the CPU.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> binding._iobinding.bind_input("x", x)

        """
        self._check_input(name)
        if len(place) == 1:
            device = _ortrain.OrtDevice(_ortrain.OrtDevice.cpu(), _ortrain.OrtDevice.default_memory(), 0)
            self._inputs[name] = _ortrain.OrtValue.ortvalue_from_numpy(np.asarray(place[0]), device)
            return
        if len(place) != 4:
            raise TypeError("an input is bound to an array, or to a device, an element type, a shape and an address")
        device, element_type, shape, pointer = place
        self._inputs[name] = _at(pointer, element_type, shape, device)

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        """Bind a value, whose memory is read.

        Raises:
            InvalidArgumentError: for an input that the session does not have.
            TypeError: for what is no OrtValue.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> binding._iobinding.bind_ortvalue_input("x", ortrain.OrtValue.ortvalue_from_numpy(x)._ortvalue)

        """
        self._check_input(name)
        self._inputs[name] = _native(ortvalue)

    def bind_output(self, name: str, *place: Any) -> None:
        """Ask for an output in memory of its own, or in memory at an address.

        The former takes a device; the latter a device, an element type, a shape and the address.

        Raises:
            InvalidArgumentError: for an address that is null or not that of an element, and a shape that is none.
            UnsupportedError: for another device than the CPU.

        >>> import ortrain
        >>> from ortrain.capi import OrtDevice
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> binding._iobinding.bind_output("logits", OrtDevice(0, 0, 0))

        """
        if len(place) not in (1, 4):
            raise TypeError("an output is bound to a device, or to that, an element type, a shape and an address")
        device = place[0]
        check_device(device)
        self._bind_output(name, None if len(place) == 1 else _at(place[3], place[1], place[2], device))

    def bind_ortvalue_output(self, name: str, ortvalue: Any) -> None:
        """Bind a value, whose memory is written.

        Raises:
            TypeError: for what is no OrtValue.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> logits = ortrain.OrtValue.ortvalue_from_shape_and_type([8, 10], np.float32)
        >>> binding._iobinding.bind_ortvalue_output("logits", logits._ortvalue)

        """
        self._bind_output(name, _native(ortvalue))

    def clear_binding_inputs(self) -> None:
        """Let go of all inputs.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()._iobinding.clear_binding_inputs()
        """
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Let go of all outputs.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()._iobinding.clear_binding_outputs()
        """
        self._outputs.clear()
        self._values.clear()

    def synchronize_inputs(self) -> None:
        """Wait until inputs have arrived. On the CPU they have.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()._iobinding.synchronize_inputs()
        """

    def synchronize_outputs(self) -> None:
        """Wait until outputs have arrived. On the CPU they have.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()._iobinding.synchronize_outputs()
        """

    def get_outputs(self) -> _ortrain.OrtValueVector:
        """The outputs, in the order of binding.

        Raises:
            OrtrainError: for an output that no run has made yet, and that has no memory.

        >>> import ortrain
        >>> len(ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()._iobinding.get_outputs())
        0

        """
        values = _ortrain.OrtValueVector()
        values._fill(self._made())
        return values

    def copy_outputs_to_cpu(self) -> list[npt.NDArray[Any]]:
        """Copies of the outputs as arrays, in the order of binding.

        Raises:
            OrtrainError: as :meth:`get_outputs`.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()._iobinding.copy_outputs_to_cpu()
        []

        """
        return [value.array() for value in self._made()]

    def _made(self) -> list[_ortrain.OrtValue]:
        made = []
        for name, place in self._outputs.items():
            value = place if place is not None else self._values.get(name)
            if value is None:
                raise OrtrainError(f"output {name!r} has no value yet: run_with_iobinding makes it")
            made.append(value)
        return made

    def _bind_output(self, name: str, value: _ortrain.OrtValue | None) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of an output is a str, not {name!r}")
        self._values.pop(name, None)
        self._outputs[name] = value

    def _check_input(self, name: str) -> None:
        described = [*self._session._described_inputs(), *self._session._described_overridable()]
        kinds = {known: kind for known, kind, _ in described}
        if name not in kinds:
            there = ", ".join(kinds)
            raise InvalidArgumentError(f"the model has no input {name!r}; it has {there}{hint(str(name), kinds)}")
        if kinds[name].startswith("seq("):
            raise InvalidArgumentError(f"input {name!r} is a sequence of tensors, which only run takes: as a list")


class IOBinding:
    """Inputs and outputs of a session in memory of the caller: what :meth:`InferenceSession.io_binding` makes.

    A run reads inputs where they lie and writes outputs where they lie; nothing is copied in between. A loop binds
    once, and puts each batch into the same array. Inputs of floats are read while the run goes: whoever writes to them
    meanwhile changes what is computed. All other are taken as they are when it begins, for indices are checked first.
    What is bound is kept until something else is bound under its name, or all bindings are cleared.

    >>> import ortrain
    >>> session = ortrain.InferenceSession(ortrain.examples.perceptron())
    >>> batch, logits = np.zeros((8, 64), np.float32), np.zeros((8, 10), np.float32)
    >>> binding = session.io_binding()
    >>> binding.bind_cpu_input("x", batch)
    >>> binding.bind_ortvalue_output("logits", ortrain.OrtValue.ortvalue_from_numpy(logits))
    >>> for images in (x, x + 1):
    ...     batch[:] = images
    ...     session.run_with_iobinding(binding)
    >>> np.array_equal(logits, session.run(None, {"x": x + 1})[0])
    True
    """

    def __init__(self, session: InferenceSession) -> None:
        self._iobinding = SessionIOBinding(session)

    def bind_cpu_input(self, name: str, arr_on_cpu: npt.NDArray[Any]) -> None:
        """Bind an array, whose memory is read at every run.

        Of an array whose elements do not lie in a row, it is a copy that is bound.

        Raises:
            InvalidArgumentError: for an input that the session does not have.
            UnsupportedError: for elements that no tensor has.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> binding.bind_cpu_input("x", x)
        >>> binding.bind_cpu_input("X", x)
        Traceback (most recent call last):
        ortrain.errors.InvalidArgumentError: the model has no input 'X'; it has x; did you mean 'x'?

        """
        self._iobinding.bind_input(name, arr_on_cpu)

    def bind_input(
        self,
        name: str,
        device_type: str,
        device_id: int,
        element_type: npt.DTypeLike | int,
        shape: Sequence[int],
        buffer_ptr: int,
    ) -> None:
        """Bind elements at an address. Whoever binds them keeps them there until they are bound no more.

        Raises:
            InvalidArgumentError: for an input that the session does not have, an address that is null or not that of an
                element, and a shape that is none.
            UnsupportedError: for another device than ``"cpu"``.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)

        """
        self._iobinding.bind_input(name, _device(device_type, device_id), element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Bind a value, whose memory is read at every run.

        Raises:
            InvalidArgumentError: for an input that the session does not have.
            TypeError: for what is no ``OrtValue``.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> binding.bind_ortvalue_input("x", ortrain.OrtValue.ortvalue_from_numpy(x))

        """
        self._iobinding.bind_ortvalue_input(name, ortvalue)

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: npt.DTypeLike | int | None = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Ask for an output: in a value of its own that each run makes, or in memory at an address.

        With an address the type and the shape of what lies there have to be said, and whoever binds it keeps it there.
        A type and a shape without an address mean nothing, as in onnxruntime. A name that the model does not have is
        found by the run.

        Raises:
            ValueError: for an address without an element type or without a shape.
            InvalidArgumentError: for an address that is null or not that of an element, and a shape that is none.
            UnsupportedError: for another device than ``"cpu"``.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> logits = np.zeros((8, 10), np.float32)
        >>> binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)

        """
        device = _device(device_type, device_id)
        if buffer_ptr is None:
            self._iobinding.bind_output(name, device)
            return
        if element_type is None or shape is None:
            raise InvalidArgumentError(
                f"output {name!r} is bound to an address, for which its element_type and its shape have to be given"
            )
        self._iobinding.bind_output(name, device, element_type, shape, buffer_ptr)

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Bind a value, whose memory each run writes.

        Raises:
            TypeError: for what is no ``OrtValue``.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> logits = ortrain.OrtValue.ortvalue_from_shape_and_type([8, 10], np.float32)
        >>> binding.bind_ortvalue_output("logits", logits)

        """
        self._iobinding.bind_ortvalue_output(name, ortvalue)

    def synchronize_inputs(self) -> None:
        """Wait until inputs have arrived. On the CPU they have.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding().synchronize_inputs()
        """
        self._iobinding.synchronize_inputs()

    def synchronize_outputs(self) -> None:
        """Wait until outputs have arrived. On the CPU they have.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding().synchronize_outputs()
        """
        self._iobinding.synchronize_outputs()

    def get_outputs(self) -> list[OrtValue]:
        """The outputs, in the order of binding: those that were bound, and those that the last run made.

        Raises:
            OrtrainError: for an output that no run has made yet, and that has no memory.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> binding.bind_ortvalue_output("logits", ortrain.OrtValue.ortvalue_from_shape_and_type([8, 10], np.float32))
        >>> binding.get_outputs()
        [OrtValue(tensor(float), shape=[8, 10])]

        """
        return [OrtValue(value) for value in self._iobinding.get_outputs()]

    def get_outputs_as_ortvaluevector(self) -> _ortrain.OrtValueVector:
        """The same as a vector of native values.

        Raises:
            OrtrainError: as :meth:`get_outputs`.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> len(binding.get_outputs_as_ortvaluevector())
        0

        """
        return self._iobinding.get_outputs()

    def copy_outputs_to_cpu(self) -> list[npt.NDArray[Any]]:
        """Copies of the outputs as arrays, in the order of binding.

        Raises:
            OrtrainError: as :meth:`get_outputs`.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> binding.bind_output("logits")
        >>> binding.copy_outputs_to_cpu()
        Traceback (most recent call last):
        ortrain.errors.OrtrainError: output 'logits' has no value yet: run_with_iobinding makes it

        """
        return self._iobinding.copy_outputs_to_cpu()

    def clear_binding_inputs(self) -> None:
        """Let go of all inputs.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding().clear_binding_inputs()
        """
        self._iobinding.clear_binding_inputs()

    def clear_binding_outputs(self) -> None:
        """Let go of all outputs.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding().clear_binding_outputs()
        """
        self._iobinding.clear_binding_outputs()


def check_device(device: object) -> None:
    """Check that values can be made on a device.

    Raises:
        TypeError: for what is no device.
        UnsupportedError: for another one than the CPU.

    """
    if not isinstance(device, _ortrain.OrtDevice):
        raise TypeError(f"a device is an OrtDevice, not {type(device).__name__}")
    if device.device_type() != _ortrain.OrtDevice.cpu():
        raise UnsupportedError(
            f"device type {device.device_type()} is not supported: ortrain keeps values in memory of the CPU, device "
            f"type 0"
        )


def _at(pointer: Any, element_type: Any, shape: Any, device: Any) -> _ortrain.OrtValue:
    """The elements at an address."""
    check_device(device)
    if not isinstance(pointer, int) or isinstance(pointer, bool):
        raise TypeError(f"an address is an int, not {type(pointer).__name__}")
    if pointer < 0:
        raise InvalidArgumentError(f"an address is not negative, and this is {pointer}")
    return _ortrain.OrtValue.ortvalue_from_pointer(pointer, element_type, list(shape), device)


def _native(value: Any) -> _ortrain.OrtValue:
    """The native value of an OrtValue. One of onnxruntime's keeps its memory, which is used where it lies."""
    if not is_ortvalue(value):
        raise TypeError(f"an OrtValue is bound, not {type(value).__name__}")
    if isinstance(value, OrtValue | _ortrain.OrtValue):
        return native_value(value)
    device = _device("cpu", 0)
    pointer, element_type, shape = value.data_ptr(), value.element_type(), value.shape()
    return _ortrain.OrtValue.ortvalue_from_pointer(pointer, element_type, list(shape), device, value)
