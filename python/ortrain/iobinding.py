"""Binding of a session's inputs and outputs to memory of the caller.

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
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError, OrtrainError, UnsupportedError
from ortrain.ortvalue import OrtValue, _device

if TYPE_CHECKING:
    import numpy.typing as npt

    from ortrain.inference import InferenceSession

__all__ = ["IOBinding", "SessionIOBinding"]


class SessionIOBinding:
    """Native part of an :class:`IOBinding`, with the name and the arguments of onnxruntime's extension module.

    Devices are ``OrtDevice`` objects here, and values are the native values of :mod:`ortrain.capi`.

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
        # In the order of binding; None for an output without memory of the caller.
        self._outputs: dict[str, _ortrain.OrtValue | None] = {}
        # Outputs of the last run.
        self._values: dict[str, _ortrain.OrtValue] = {}

    def bind_input(self, name: str, *place: Any) -> None:
        """Bind an array, or memory at an address: a device, an element type, a shape and the address.

        Raises:
            InvalidArgumentError: for an unknown input, an address that is null or not aligned to an element, and an
                invalid shape.
            UnsupportedError: for a device other than the CPU.

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
            raise TypeError("expected an array, or a device, an element type, a shape and an address for an input")
        device, element_type, shape, pointer = place
        self._inputs[name] = _at(pointer, element_type, shape, device)

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        """Bind a value as an input; runs read its memory.

        Raises:
            InvalidArgumentError: for an unknown input.
            TypeError: if the value is not an OrtValue.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> binding._iobinding.bind_ortvalue_input("x", ortrain.OrtValue.ortvalue_from_numpy(x)._ortvalue)

        """
        self._check_input(name)
        self._inputs[name] = _native(ortvalue)

    def bind_output(self, name: str, *place: Any) -> None:
        """Bind an output to new memory, or to memory at an address.

        New memory takes a device. An address takes a device, an element type, a shape and the address.

        Raises:
            InvalidArgumentError: for an address that is null or not aligned to an element, and for an invalid shape.
            UnsupportedError: for a device other than the CPU.

        >>> import ortrain
        >>> from ortrain.capi import OrtDevice
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> binding._iobinding.bind_output("logits", OrtDevice(0, 0, 0))

        """
        if len(place) not in (1, 4):
            raise TypeError("expected a device, or a device, an element type, a shape and an address for an output")
        device = place[0]
        check_device(device)
        self._bind_output(name, None if len(place) == 1 else _at(place[3], place[1], place[2], device))

    def bind_ortvalue_output(self, name: str, ortvalue: Any) -> None:
        """Bind a value as an output; runs write its memory.

        Raises:
            TypeError: if the value is not an OrtValue.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> logits = ortrain.OrtValue.ortvalue_from_shape_and_type([8, 10], np.float32)
        >>> binding._iobinding.bind_ortvalue_output("logits", logits._ortvalue)

        """
        self._bind_output(name, _native(ortvalue))

    def clear_binding_inputs(self) -> None:
        """Remove the bindings of all inputs.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()._iobinding.clear_binding_inputs()
        """
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Remove the bindings of all outputs.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()._iobinding.clear_binding_outputs()
        """
        self._outputs.clear()
        self._values.clear()

    def synchronize_inputs(self) -> None:
        """Wait for the transfer of the inputs. On the CPU there is no transfer.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()._iobinding.synchronize_inputs()
        """

    def synchronize_outputs(self) -> None:
        """Wait for the transfer of the outputs. On the CPU there is no transfer.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()._iobinding.synchronize_outputs()
        """

    def get_outputs(self) -> _ortrain.OrtValueVector:
        """Return the outputs, in the order of binding.

        Raises:
            OrtrainError: for an output without memory that no run has computed yet.

        >>> import ortrain
        >>> len(ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()._iobinding.get_outputs())
        0

        """
        values = _ortrain.OrtValueVector()
        values._fill(self._output_values())
        return values

    def copy_outputs_to_cpu(self) -> list[npt.NDArray[Any]]:
        """Return copies of the outputs as arrays, in the order of binding.

        Raises:
            OrtrainError: as for :meth:`get_outputs`.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()._iobinding.copy_outputs_to_cpu()
        []

        """
        return [value.array() for value in self._output_values()]

    def _output_values(self) -> list[_ortrain.OrtValue]:
        values = []
        for name, memory in self._outputs.items():
            value = memory if memory is not None else self._values.get(name)
            if value is None:
                raise OrtrainError(f"output {name!r} has no value yet: call run_with_iobinding first")
            values.append(value)
        return values

    def _bind_output(self, name: str, value: _ortrain.OrtValue | None) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of an output must be a str, got {name!r}")
        self._values.pop(name, None)
        self._outputs[name] = value

    def _check_input(self, name: str) -> None:
        described = [*self._session._described_inputs(), *self._session._described_overridable()]
        kinds = {given.name: given.type for given in described}
        if name not in kinds:
            there = ", ".join(kinds)
            raise InvalidArgumentError(f"the model has no input {name!r}; it has {there}{hint(str(name), kinds)}")
        if kinds[name].startswith("seq("):
            raise InvalidArgumentError(
                f"input {name!r} is a sequence of tensors and cannot be bound: pass it to run as a list"
            )


class IOBinding:
    """Binding of inputs and outputs to memory of the caller; :meth:`InferenceSession.io_binding` makes it.

    A run reads inputs and writes outputs in place, without a copy. A loop binds once, and writes each batch into the
    same array. Inputs of floats are read during the run: a write to their memory in that time changes the result. All
    other inputs are read when the run begins, because indices are checked first. A bound object stays alive until its
    name is bound again, or all bindings are cleared.

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
        """Bind an array; every run reads its memory.

        An array that is not contiguous is copied, and the copy is bound.

        Raises:
            InvalidArgumentError: for an unknown input.
            UnsupportedError: for an element type that no tensor has.

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
        """Bind memory at an address. The caller keeps the memory valid until it is no longer bound.

        Raises:
            InvalidArgumentError: for an unknown input, an address that is null or not aligned to an element, and an
                invalid shape.
            UnsupportedError: for a device other than ``"cpu"``.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)

        """
        self._iobinding.bind_input(name, _device(device_type, device_id), element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Bind a value; every run reads its memory.

        Raises:
            InvalidArgumentError: for an unknown input.
            TypeError: if the value is not an ``OrtValue``.

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
        """Bind an output to a new value that each run makes, or to memory at an address.

        An address needs an element type and a shape, and the caller keeps the memory valid. A type and a shape without
        an address are ignored, as in onnxruntime. The run reports a name that the model does not have.

        Raises:
            ValueError: for an address without an element type or without a shape.
            InvalidArgumentError: for an address that is null or not aligned to an element, and for an invalid shape.
            UnsupportedError: for a device other than ``"cpu"``.

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
            raise InvalidArgumentError(f"output {name!r} is bound to an address, which needs element_type and shape")
        self._iobinding.bind_output(name, device, element_type, shape, buffer_ptr)

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Bind a value; every run writes its memory.

        Raises:
            TypeError: if the value is not an ``OrtValue``.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> logits = ortrain.OrtValue.ortvalue_from_shape_and_type([8, 10], np.float32)
        >>> binding.bind_ortvalue_output("logits", logits)

        """
        self._iobinding.bind_ortvalue_output(name, ortvalue)

    def synchronize_inputs(self) -> None:
        """Wait for the transfer of the inputs. On the CPU there is no transfer.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding().synchronize_inputs()
        """
        self._iobinding.synchronize_inputs()

    def synchronize_outputs(self) -> None:
        """Wait for the transfer of the outputs. On the CPU there is no transfer.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding().synchronize_outputs()
        """
        self._iobinding.synchronize_outputs()

    def get_outputs(self) -> list[OrtValue]:
        """Return the outputs, in the order of binding: bound values and values of the last run.

        Raises:
            OrtrainError: for an output without memory that no run has computed yet.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> binding.bind_ortvalue_output("logits", ortrain.OrtValue.ortvalue_from_shape_and_type([8, 10], np.float32))
        >>> binding.get_outputs()
        [OrtValue(tensor(float), shape=[8, 10])]

        """
        return [OrtValue(value) for value in self._iobinding.get_outputs()]

    def get_outputs_as_ortvaluevector(self) -> _ortrain.OrtValueVector:
        """Return the outputs as a vector of native values.

        Raises:
            OrtrainError: as for :meth:`get_outputs`.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> len(binding.get_outputs_as_ortvaluevector())
        0

        """
        return self._iobinding.get_outputs()

    def copy_outputs_to_cpu(self) -> list[npt.NDArray[Any]]:
        """Return copies of the outputs as arrays, in the order of binding.

        Raises:
            OrtrainError: as for :meth:`get_outputs`.

        >>> import ortrain
        >>> binding = ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding()
        >>> binding.bind_output("logits")
        >>> binding.copy_outputs_to_cpu()
        Traceback (most recent call last):
        ortrain.errors.OrtrainError: output 'logits' has no value yet: call run_with_iobinding first

        """
        return self._iobinding.copy_outputs_to_cpu()

    def clear_binding_inputs(self) -> None:
        """Remove the bindings of all inputs.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding().clear_binding_inputs()
        """
        self._iobinding.clear_binding_inputs()

    def clear_binding_outputs(self) -> None:
        """Remove the bindings of all outputs.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).io_binding().clear_binding_outputs()
        """
        self._iobinding.clear_binding_outputs()


def check_device(device: object) -> None:
    """Check that values can be made on a device.

    Raises:
        TypeError: if the argument is not a device.
        UnsupportedError: for a device other than the CPU.

    """
    if not isinstance(device, _ortrain.OrtDevice):
        raise TypeError(f"the device must be an OrtDevice, got {type(device).__name__}")
    if device.device_type() != _ortrain.OrtDevice.cpu():
        raise UnsupportedError(
            f"device type {device.device_type()} is not supported: ortrain keeps values in memory of the CPU, "
            f"device type 0"
        )


def _at(pointer: Any, element_type: Any, shape: Any, device: Any) -> _ortrain.OrtValue:
    """Return a value in the memory at an address."""
    check_device(device)
    if not isinstance(pointer, int) or isinstance(pointer, bool):
        raise TypeError(f"an address must be an int, got {type(pointer).__name__}")
    if pointer < 0:
        raise InvalidArgumentError(f"an address must not be negative, got {pointer}")
    return _ortrain.OrtValue.ortvalue_from_pointer(pointer, element_type, list(shape), device)


def _native(value: Any) -> _ortrain.OrtValue:
    """Return the native value of an OrtValue. A value of onnxruntime is used in place, and its memory kept alive."""
    if not is_ortvalue(value):
        raise TypeError(f"expected an OrtValue, got {type(value).__name__}")
    if isinstance(value, OrtValue | _ortrain.OrtValue):
        return native_value(value)
    device = _device("cpu", 0)
    pointer, element_type, shape = value.data_ptr(), value.element_type(), value.shape()
    return _ortrain.OrtValue.ortvalue_from_pointer(pointer, element_type, list(shape), device, value)
