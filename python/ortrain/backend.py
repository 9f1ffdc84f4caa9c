"""Interface that ONNX defines for its backends, for tools and tests that use this interface; needs ``onnx``.

Source: `Implementing an ONNX backend <https://github.com/onnx/onnx/blob/main/docs/ImplementingAnOnnxBackend.md>`_.
Devices are ``"CPU"`` (the default), ``"REFERENCE"`` (the evaluator that defines correct results), and GPUs.

>>> import onnx, ortrain
>>> from ortrain import backend
>>> model = onnx.load(ortrain.examples.perceptron())
>>> prepared = backend.prepare(model)
>>> (logits,) = prepared.run([x])
>>> logits.shape
(8, 10)

The test suite of ONNX runs with it: ``onnx.backend.test.BackendTest(ortrain.backend, __name__)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep, namedtupledict

from ortrain import _ortrain
from ortrain._devices import device_of_provider
from ortrain._model_source import ModelLike
from ortrain.errors import OrtrainError, UnsupportedError
from ortrain.inference import InferenceSession
from ortrain.ortvalue import OrtValue

__all__ = [
    "OrtrainBackend",
    "OrtrainBackendRep",
    "is_compatible",
    "prepare",
    "run_model",
    "run_node",
    "supports_device",
]


def _device_of(name: str) -> str:
    """Return the name of the device in the other modules."""
    # Device names have capital letters in this interface, and the first device of a kind may have the number 0.
    known = name.lower().removesuffix(":0")
    if name != name.upper() or known.startswith("rocm") or device_of_provider(known) is None:
        raise UnsupportedError(
            f"unknown device {name!r}; expected one of CPU, REFERENCE, AUTO, CUDA, WEBGPU, VULKAN, METAL and DX12"
        )
    return known


class OrtrainBackendRep(BackendRep):
    """Model that is ready to run; :func:`prepare` makes it.

    >>> import onnx
    >>> from ortrain import backend
    >>> prepared = backend.prepare(onnx.load(ortrain.examples.perceptron()))
    >>> prepared.run([x])["logits"].dtype
    dtype('float32')
    """

    def __init__(self, session: InferenceSession) -> None:
        self._session = session
        self._inputs = [value.name for value in session.get_inputs()]
        self._outputs = [value.name for value in session.get_outputs()]

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the outputs, by position and by name.

        Args:
            inputs: the values of all inputs, in order or by name, or the value of the only input.
            kwargs: must be empty.

        Raises:
            InvalidArgumentError: for inputs that do not fit the model.
            TypeError: for further arguments.

        >>> import onnx
        >>> from ortrain import backend
        >>> prepared = backend.prepare(onnx.load(ortrain.examples.perceptron()))
        >>> prepared.run({"x": x})[0].shape
        (8, 10)

        """
        _nothing_more(kwargs)
        if isinstance(inputs, dict):
            feeds = dict(inputs)
        else:
            values = list(inputs) if isinstance(inputs, Sequence) else [inputs]
            if len(values) != len(self._inputs):
                names = ", ".join(self._inputs)
                raise OrtrainError(f"expected {len(self._inputs)} inputs ({names}), got {len(values)}")
            feeds = dict(zip(self._inputs, values, strict=True))
        results = self._session.run(None, feeds)
        outputs: tuple[Any, ...] = namedtupledict("Outputs", self._outputs)(*results)
        return outputs


class OrtrainBackend(Backend):
    """Backend class; its methods are the functions of this module.

    >>> from ortrain import backend
    >>> backend.OrtrainBackend.supports_device("CPU"), backend.OrtrainBackend.supports_device("CUDA:99")
    (True, False)
    """

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Return True if models run on a device: ``"CPU"``, ``"REFERENCE"``, ``"AUTO"``, or a GPU of this machine.

        GPUs are ``"CUDA"``, ``"VULKAN"``, ``"METAL"`` and ``"DX12"``, optionally with a number. ``"WEBGPU"`` is the
        best one of the last three.

        >>> from ortrain import backend
        >>> backend.supports_device("CPU:0")
        True
        """
        try:
            return bool(_ortrain.device_name(_device_of(device)))
        except OrtrainError:
            return False

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Return True if a model can be loaded: ortrain has its operators, versions and types.

        >>> import onnx
        >>> from ortrain import backend
        >>> backend.is_compatible(onnx.load(ortrain.examples.perceptron()))
        True
        """
        try:
            cls.prepare(model, device, **kwargs)
        except OrtrainError:
            return False
        return True

    @classmethod
    def prepare(cls, model: ModelLike, device: str = "CPU", **kwargs: Any) -> OrtrainBackendRep:
        """Load a model.

        Args:
            model: an ``onnx.ModelProto``, a path, or the bytes of a model.
            device: as in :meth:`supports_device`.
            kwargs: ``operators``: an :class:`ortrain.OperatorLibrary`.

        Raises:
            InvalidModelError, UnsupportedError: if the model cannot be loaded, or the device name is unknown.
            DeviceUnavailableError: if this machine does not have the device.
            TypeError: for further arguments.

        >>> import onnx
        >>> from ortrain import backend
        >>> prepared = backend.prepare(onnx.load(ortrain.examples.perceptron()), "REFERENCE")
        >>> backend.prepare(onnx.load(ortrain.examples.perceptron()), "TPU")
        Traceback (most recent call last):
        ortrain.errors.UnsupportedError: unknown device 'TPU'; expected one of CPU, REFERENCE, AUTO, CUDA, WEBGPU, \
VULKAN, METAL and DX12

        """
        operators = kwargs.pop("operators", None)
        _nothing_more(kwargs)
        return OrtrainBackendRep(InferenceSession(model, providers=[_device_of(device)], operators=operators))

    @classmethod
    def run_model(cls, model: ModelLike, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """Load a model and run it once.

        Raises:
            OrtrainError: as for :meth:`prepare` and :meth:`OrtrainBackendRep.run`.

        >>> import onnx
        >>> from ortrain import backend
        >>> (logits,) = backend.run_model(onnx.load(ortrain.examples.perceptron()), [x])
        >>> logits.shape
        (8, 10)

        """
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype[Any], tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one operator.

        Args:
            node: the operator with its attributes.
            inputs: the inputs in order, ``None`` for an omitted input; a list for a sequence.
            device: ``"CPU"`` or ``"REFERENCE"``.
            outputs_info: types and shapes of the outputs; ignored, because they are inferred.
            kwargs: ``opset_version``: the version of the operator set, by default the newest; ``operators``: an
                :class:`ortrain.OperatorLibrary`.

        Raises:
            OrtrainError: as for :meth:`prepare` and :meth:`OrtrainBackendRep.run`.

        >>> import numpy as np
        >>> from onnx import helper
        >>> from ortrain import backend
        >>> node = helper.make_node("Relu", ["x"], ["y"])
        >>> backend.run_node(node, [np.array([-1.0, 2.0], np.float32)])
        Outputs(y=array([0., 2.], dtype=float32))

        """
        version, operators = kwargs.pop("opset_version", None), kwargs.pop("operators", None)
        _nothing_more(kwargs)
        values = list(inputs.values()) if isinstance(inputs, dict) else list(inputs)
        feeds = {name: value for name, value in zip(node.input, values, strict=False) if name}
        graph = onnx.helper.make_graph(
            [node],
            "node",
            [onnx.helper.make_value_info(name, _type_of(value)) for name, value in feeds.items()],
            [onnx.ValueInfoProto(name=name) for name in node.output if name],
        )
        sets = [onnx.helper.make_opsetid("", version or onnx.defs.onnx_opset_version())]
        if node.domain not in ("", "ai.onnx"):
            sets.append(onnx.helper.make_opsetid(node.domain, 1))
        model = onnx.helper.make_model(graph, opset_imports=sets)
        return cls.prepare(model, device, operators=operators).run(feeds)


def _nothing_more(kwargs: dict[str, Any]) -> None:
    if kwargs:
        raise TypeError(f"unknown arguments: {', '.join(sorted(kwargs))}")


def _type_of(value: Any) -> onnx.TypeProto:
    """Return the type of a value: a tensor, or a sequence of tensors for a list."""
    if isinstance(value, list | tuple):
        return onnx.helper.make_sequence_type_proto(_type_of(value[0] if value else np.float32(0)))
    array = value.numpy() if isinstance(value, OrtValue) else np.asarray(value)
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnx.helper.make_tensor_type_proto(kind, array.shape)


is_compatible = OrtrainBackend.is_compatible
prepare = OrtrainBackend.prepare
run_model = OrtrainBackend.run_model
run_node = OrtrainBackend.run_node
supports_device = OrtrainBackend.supports_device
