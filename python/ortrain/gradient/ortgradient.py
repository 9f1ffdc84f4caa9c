"""Forward and backward pass as a pair of calls, with the names of onnxcustom (``onnxcustom.training.ortgradient``).

>>> from ortrain.gradient.ortgradient import OrtGradientForwardBackward
>>> both = OrtGradientForwardBackward(model, weights_to_train=["fc2.bias", "fc2.weight"], ordered=False)
>>> function = both.new_instance()
>>> weights = [both.get_initializer(name) for name in both.weights_to_train]
>>> logits = function.forward([x, *weights], training=True)
>>> gradients = function.backward([np.ones_like(logits[0].numpy())])
>>> both.cls_type_._bw_fetches_names
['x_grad', 'fc2.bias_grad', 'fc2.weight_grad']
>>> gradients[2].shape()
[10, 96]
"""

from __future__ import annotations

import keyword
import logging
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ortrain import _files, _ortrain
from ortrain._devices import device_of_provider
from ortrain._model_source import ModelLike, PathLike, model_source
from ortrain._operators import stopped_names, with_stops
from ortrain._options import native_options
from ortrain._ortrain import OrtDevice, OrtValueCache, OrtValueVector
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError, NoSuchFileError, OrtrainError, UnsupportedError
from ortrain.gradient.agent import (
    OrtModuleGraphBuilder,
    OrtModuleGraphBuilderConfiguration,
    PartialGraphExecutionState,
    TrainingAgent,
)
from ortrain.inference import InferenceSession, RunOptions, SessionOptions
from ortrain.ortvalue import OrtValue

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["OrtGradientForwardBackward", "OrtGradientForwardBackwardFunction"]

_LOGGER = "onnxcustom"
_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
# Element types of trainable weights, as numbers of TensorProto.DataType: float32, float16, float64, bfloat16.
_FLOATS = {1, 10, 11, 16}
_MODELS = ("_trained_onnx", "_optimized_pre_grad_model")


class OrtGradientForwardBackward:
    """Forward and backward pass of a model, with its weights as inputs of both passes.

    The model has no loss: the caller supplies the gradients of the outputs. The constructor creates a class
    (:attr:`cls_type_`). Each instance of the class (:meth:`new_instance`) stores forward passes until their backward
    passes. The two passes are parts of one program, so gradients are bit-identical to a training step. Weights and
    their gradients are read and written in place.

    Args:
        onnx_model: an ``onnx.ModelProto``, bytes, or a path. The model may have subgraphs.
        weights_to_train: a list of names of float initializers, in alphabetical order. The model must have the
            initializers in the same order. ``None``: all float initializers that a gradient reaches. ``[]``: only
            gradients of inputs.
        input_names: stored without effect; the names of all inputs by default.
        output_names: stored without effect; the names of all outputs by default.
        class_name: the name of the class; ``OrtGradientForwardBackwardFunction_<id>`` by default.
        sess_options: threads, bytes, precision.
        providers: ``None`` for the CPU, a name of :func:`ortrain.devices`, a list of provider names, or a device with a
            ``type``. Arguments of a pass are copied to a GPU. Results remain on the GPU until their elements are read.
        provider_options: stored without effect.
        run_options: stored without effect.
        graph_builder_config: the inputs with gradients (``input_names_require_grad``). The default is all float inputs
            that the outputs depend on. Integer inputs have no gradient.
        device_index: the index of the GPU of ``CUDAExecutionProvider``.
        enable_logging: True to log to the logger ``onnxcustom``.
        debug: True to check in each call that the number of values equals the number of devices.
        ordered: True to check the order of the weights. If False, any order is valid, and the gradients have the same
            order.
        stop_gradients: values that pass no gradient: names of results, or patterns (``"*/assigner/*"``), like in
            :func:`ortrain.artifacts.generate_artifacts`.

    Raises:
        InvalidArgumentError: for weights that are not in alphabetical order, not in the order of the model, duplicate,
            or not initializers. Also for an unknown provider, and for a class name that is not an identifier.
        UnsupportedError: for operators without a gradient, each with its node; for a device that is not available.
        OrtrainError: if ``weights_to_train`` is ``None`` and the model has no float initializer.
        TypeError: for an argument that is not a model.

    Source: ``onnxcustom.training.ortgradient.OrtGradientForwardBackward``.

    >>> from ortrain.gradient import OrtGradientForwardBackward
    >>> both = OrtGradientForwardBackward(model, weights_to_train=["fc2.bias"])
    >>> both.cls_type_._grad_input_names
    ['x', 'fc2.bias']
    >>> OrtGradientForwardBackward(model, weights_to_train=["fc2.weight", "fc2.bias"])
    Traceback (most recent call last):
    ortrain.errors.InvalidArgumentError: weights_to_train must be a list in alphabetical order, ['fc2.bias', \
'fc2.weight'], got ['fc2.weight', 'fc2.bias']; rename the weights of the model so that their order is alphabetical, \
or pass ordered=False

    """

    onnx_model: ModelLike
    """The model as it was given."""
    weights_to_train: list[str]
    """The names of the weights, in the order in which calls are given them."""
    cls_type_: type[OrtGradientForwardBackwardFunction]
    """The class whose instances run the passes."""

    def __init__(
        self,
        onnx_model: ModelLike,
        weights_to_train: Sequence[str] | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        class_name: str | None = None,
        sess_options: SessionOptions | None = None,
        providers: Any = None,
        provider_options: Sequence[dict[str, Any]] | None = None,
        run_options: RunOptions | None = None,
        graph_builder_config: OrtModuleGraphBuilderConfiguration | None = None,
        device_index: int = 0,
        enable_logging: bool = False,
        debug: bool = False,
        *,
        ordered: bool = True,
        stop_gradients: Sequence[str] | None = None,
    ) -> None:
        self.onnx_model = onnx_model
        self.sess_options = sess_options
        self.run_options = RunOptions() if run_options is None else run_options
        self.graph_builder_config = graph_builder_config
        self.enable_logging = bool(enable_logging)
        self.debug = bool(debug)
        self.ordered = bool(ordered)
        self.stop_gradients = stopped_names(stop_gradients)
        self.providers, self.provider_options, self.device_index = _providers(providers, provider_options, device_index)
        if class_name is None:
            class_name = f"OrtGradientForwardBackwardFunction_{id(self)}"
        elif not isinstance(class_name, str) or not class_name.isidentifier() or keyword.iskeyword(class_name):
            raise InvalidArgumentError(f"class_name must be an identifier, got {class_name!r}")
        self.class_name = class_name
        self._build(weights_to_train, input_names, output_names)

    def _build(
        self,
        weights: Sequence[str] | None,
        input_names: Sequence[str] | None,
        output_names: Sequence[str] | None,
    ) -> None:
        self._logger = logging.getLogger(_LOGGER) if self.enable_logging else None
        source = model_source(self.onnx_model)
        if not source:
            raise InvalidArgumentError("the model is empty: it has no bytes")
        self._initializers = dict(_ortrain.initializers(source))
        names = self._chosen(source, weights)
        self.weights_to_train = names
        config = self.graph_builder_config
        if config is None:
            config = OrtModuleGraphBuilderConfiguration()
            config.initializer_names = config.initializer_names_to_train = names
            config.input_names_require_grad = None
            config.build_gradient_graph = True
        self._info("weights_to_train=%r", names)
        builder = OrtModuleGraphBuilder()
        builder._initialize(with_stops(source, self.stop_gradients), config, self.sess_options)
        provider = self.providers[0]
        builder._device = _ortrain.device_name(device_of_provider(provider, self.device_index) or provider)
        builder.build()
        native = builder._native
        assert native is not None
        self.input_names = _listed(input_names, [given.name for given in native.inputs()], "input_names")
        self.output_names = _listed(output_names, [output.name for output in native.outputs()], "output_names")
        self.cls_type_ = self._make_class(builder, native)
        self._info("class %s has inputs %r", self.class_name, self.cls_type_._grad_input_names)

    def _chosen(self, source: str | bytes, weights: Sequence[str] | None) -> list[str]:
        """Selects and checks the weights."""
        floats = self._select_initializer_names(self.onnx_model)
        if weights is None:
            if not floats:
                raise OrtrainError("the model has no float initializer to train")
            names = floats
        else:
            names = weights  # type: ignore[assignment]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidArgumentError(
                f"weights_to_train must be a list of names in alphabetical order, got {type(names).__name__}"
            )
        if len(set(names)) < len(names):
            twice = next(name for at, name in enumerate(names) if name in names[:at])
            raise InvalidArgumentError(f"weight {twice!r} is named twice in weights_to_train")
        for name in names:
            if name not in self._initializers:
                raise InvalidArgumentError(
                    f"weight {name!r} is not an initializer of the model{hint(name, list(self._initializers))}"
                )
        if self.ordered:
            advice = "rename the weights of the model so that their order is alphabetical, or pass ordered=False"
            if names != sorted(names):
                raise InvalidArgumentError(
                    f"weights_to_train must be a list in alphabetical order, {sorted(names)}, got {names}; {advice}"
                )
            own = [name for name in self._initializers if name in set(names)]
            if own != names:
                raise InvalidArgumentError(
                    f"weights_to_train must have the order of the initializers in the model, {own}, got {names}; "
                    f"{advice}"
                )
        if weights is None:
            # Exclude float initializers without a gradient, for example the sizes of a Resize.
            reached = set(_native(source, None, None, self.sess_options).weight_names())
            names = [name for name in names if name in reached]
        return list(names)

    def _make_class(
        self, builder: OrtModuleGraphBuilder, native: _ortrain.ForwardBackward
    ) -> type[OrtGradientForwardBackwardFunction]:
        trained, evaluated = builder.get_gradient_model(), builder.get_forward_model()
        inputs = [given.name for given in native.inputs()]
        outputs = [output.name for output in native.outputs()]
        argument_names, gradients = [*inputs, *self.weights_to_train], native.gradient_names()
        session = InferenceSession(trained, self.sess_options, providers=self.providers)
        cpu = OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)
        own = type(self.onnx_model)
        # If the caller passed an onnx message, the models are returned as onnx messages, too.
        message = getattr(own, "FromString", None)
        to_caller = message if callable(message) else bytes
        attributes: dict[str, Any] = {
            "__doc__": f"The passes of a model with weights {self.weights_to_train}.",
            "__module__": OrtGradientForwardBackwardFunction.__module__,
            "_run_options": self.run_options,
            "_sess": session,
            "_sess_eval": InferenceSession(evaluated, self.sess_options, providers=self.providers),
            "_training_agent": TrainingAgent(
                session, argument_names, [cpu] * len(outputs), gradients, [cpu] * len(gradients), 0
            ),
            "_cache": OrtValueCache(),
            "_logger": self._logger,
            "_input_names": inputs,
            "_grad_input_names": argument_names,
            "_output_names": outputs,
            "_bw_fetches_names": gradients,
            "_fw_outputs_device_info": [cpu] * len(outputs),
            "_bw_outputs_device_info": [cpu] * len(gradients),
            "_fw_no_grad_output_device_info": [cpu] * (len(outputs) - len(native.differentiable_outputs())),
            "_weights_to_train": self.weights_to_train,
            "_graph_info": builder.get_graph_info(),
            "_trained_onnx": to_caller(trained),
            "_optimized_pre_grad_model": to_caller(evaluated),
            "_graph_builder": builder,
            "_devices": [cpu] * len(argument_names),
            "_debug": self.debug,
            "_onx_inp": argument_names,
            "_onx_out": gradients,
            "_native": native,
            "_models": {"_trained_onnx": trained, "_optimized_pre_grad_model": evaluated},
        }
        return type(self.class_name, (OrtGradientForwardBackwardFunction,), attributes)

    def _info(self, message: str, *values: object) -> None:
        if self._logger is not None:
            self._logger.info("[OrtGradientForwardBackward] " + message, *values)

    @staticmethod
    def _select_initializer_names(onnx_model: ModelLike) -> list[str]:
        """Returns the names of the float initializers, in the order of the model."""
        found = _ortrain.initializers(model_source(onnx_model))
        return [name for name, value in found if value.element_type() in _FLOATS]

    @staticmethod
    def _provider_name_to_device_type(provider_name: str) -> int:
        """Returns the device type of a provider.

        Raises:
            InvalidArgumentError: for a provider other than the CPU and the CUDA provider.

        """
        if provider_name == _CPU:
            return OrtDevice.cpu()
        if provider_name == _CUDA:
            return OrtDevice.cuda()
        raise InvalidArgumentError(f"unknown provider {provider_name!r}; expected {_CPU!r} or {_CUDA!r}")

    @staticmethod
    def _repr_helper_(obj: object, indent: int = 0) -> str:
        """Formats an object: its class and its public attributes, sorted."""
        if obj is None:
            return "None"
        names = [name for name in dir(obj) if not name.startswith("_")]
        values = {name: getattr(obj, name) for name in sorted(names)}
        shown = ", ".join(f"{name}={value!r}" for name, value in values.items() if not callable(value))
        return f"{' ' * indent}{type(obj).__name__}({shown})"

    def new_instance(self) -> OrtGradientForwardBackwardFunction:
        """Creates an instance of :attr:`cls_type_`, without forward passes.

        >>> from ortrain.gradient import OrtGradientForwardBackward
        >>> both = OrtGradientForwardBackward(model, weights_to_train=["fc2.bias"])
        >>> both.new_instance().states_
        []

        """
        return self.cls_type_()

    def get_initializer(self, name: str, exc: bool = True) -> npt.NDArray[Any] | None:
        """Returns a copy of an initializer of the model as an array.

        Raises:
            OrtrainError: for an unknown initializer; with ``exc=False``, the result is ``None`` instead.

        >>> from ortrain.gradient import OrtGradientForwardBackward
        >>> both = OrtGradientForwardBackward(model, weights_to_train=["fc2.bias"])
        >>> both.get_initializer("fc2.bias").shape
        (10,)
        >>> both.get_initializer("fc3.bias", exc=False) is None
        True

        """
        found = self._initializers.get(name)
        if found is not None:
            return found.array()
        if exc:
            raise OrtrainError(f"the model has no initializer {name!r}{hint(name, list(self._initializers))}")
        return None

    def __repr__(self) -> str:
        # Scripts compare this text. `_repr_helper_` shows the attributes.
        return "OrtGradientForwardBackward(...)"

    def __getstate__(self) -> dict[str, Any]:
        # Stores the arguments of the constructor, except run options and configurations. The class is created again.
        names = (
            "class_name",
            "debug",
            "device_index",
            "enable_logging",
            "input_names",
            "onnx_model",
            "ordered",
            "output_names",
            "provider_options",
            "providers",
            "sess_options",
            "stop_gradients",
            "weights_to_train",
        )
        return {name: getattr(self, name) for name in names} | {"run_options": None, "graph_builder_config": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        required_keys = {"class_name", "onnx_model", "weights_to_train"}
        if not isinstance(state, dict) or not required_keys <= state.keys():
            raise InvalidArgumentError(
                "the state is not a pickled OrtGradientForwardBackward: it has no model or no weights"
            )
        for name, value in state.items():
            if name not in ("weights_to_train", "input_names", "output_names"):
                setattr(self, name, value)
        self.run_options = RunOptions() if self.run_options is None else self.run_options
        self.stop_gradients = stopped_names(state.get("stop_gradients"))
        self._build(state["weights_to_train"], state.get("input_names"), state.get("output_names"))


def _native(
    source: str | bytes,
    weights: list[str] | None,
    inputs: list[str] | None,
    sess_options: SessionOptions | None,
) -> _ortrain.ForwardBackward:
    options = native_options(sess_options)
    return _ortrain.ForwardBackward(source, weights, inputs, training=None, seed=0, options=options)


def _listed(requested_names: Sequence[str] | None, found: list[str], what: str) -> list[str]:
    if requested_names is None:
        return found
    names = list(requested_names)
    for name in names:
        if name not in found:
            raise InvalidArgumentError(f"{what}: the model has no {name!r}{hint(str(name), found)}")
    return names


def _providers(
    providers: Any, options: Sequence[dict[str, Any]] | None, index: int
) -> tuple[list[str], list[dict[str, Any]], int]:
    """Returns the names of providers, their options, and the index of the device."""
    if providers is not None and not isinstance(providers, (str, list, tuple)) and hasattr(providers, "type"):
        index = index if providers.type == "cpu" else (providers.index or 0)
        providers = providers.type
    if providers is None or providers == "cpu":
        names = [_CPU]
    elif isinstance(providers, str):
        device, _, number = providers.partition(":")
        if device in ("cuda", "gpu"):
            names = [_CUDA]
            index = int(number) if number.isdigit() else index
        elif device_of_provider(providers) is None:
            raise InvalidArgumentError(
                f"unknown provider {providers!r}; expected 'cpu', {_CPU!r} or a name of ortrain.devices()"
            )
        else:
            names = [providers]
    elif isinstance(providers, (list, tuple)):
        names = list(providers)
    else:
        raise InvalidArgumentError(f"providers must be a list of names, got {type(providers).__name__}")
    for name in names:
        if device_of_provider(name) is None:
            OrtGradientForwardBackward._provider_name_to_device_type(name)
    return names, [{} for _ in names] if options is None else list(options), int(index)


class OrtGradientForwardBackwardFunction:
    """Forward passes of a model, each stored until its backward pass. Each model has a subclass of this class.

    Attributes:
        states_: the forward passes without a backward pass, newest last.
        saved_tensors_: the arguments of the last forward pass.

    >>> from ortrain.gradient import OrtGradientForwardBackward
    >>> both = OrtGradientForwardBackward(model, weights_to_train=["fc2.bias"])
    >>> function = both.new_instance()
    >>> isinstance(function, both.cls_type_)
    True

    """

    _native: ClassVar[_ortrain.ForwardBackward]
    _models: ClassVar[dict[str, bytes]]
    _debug: ClassVar[bool]
    _logger: ClassVar[logging.Logger | None]
    _devices: ClassVar[list[OrtDevice]]
    _input_names: ClassVar[list[str]]
    _grad_input_names: ClassVar[list[str]]
    _output_names: ClassVar[list[str]]
    _bw_fetches_names: ClassVar[list[str]]
    _onx_inp: ClassVar[list[str]]
    _onx_out: ClassVar[list[str]]

    def __init__(self) -> None:
        if not hasattr(type(self), "_native"):
            raise TypeError("call OrtGradientForwardBackward.new_instance() to create an instance")
        self.states_: list[PartialGraphExecutionState] = []
        self.saved_tensors_: list[Any] | None = None

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} holds forward passes and cannot be pickled; pickle the "
            "OrtGradientForwardBackward and create an instance from it"
        )

    @staticmethod
    def device_name(device: OrtDevice) -> str:
        """Returns ``'Cpu'`` or ``'Gpu'``.

        Raises:
            OrtrainError: for a device of another type.

        >>> from ortrain.capi import OrtDevice
        >>> from ortrain.gradient import OrtGradientForwardBackwardFunction
        >>> OrtGradientForwardBackwardFunction.device_name(OrtDevice(0, 0, 0))
        'Cpu'

        """
        kind = device.device_type()
        if kind == OrtDevice.cpu():
            return "Cpu"
        if kind == OrtDevice.cuda():
            return "Gpu"
        raise OrtrainError(f"there is no device of type {kind}")

    @staticmethod
    def input_to_ort(
        tensors: OrtValueVector | Iterable[Any], devices: Sequence[OrtDevice], debug: bool = False
    ) -> OrtValueVector:
        """Converts values to a vector; arrays, values and DLPack tensors share their memory with the vector.

        A vector is returned unchanged.

        Raises:
            UnsupportedError: for ``None`` instead of a value.
            OrtrainError: with ``debug``, for a number of values that differs from the number of devices, or for a value
                on another device.
            TypeError: for an argument that is not a tensor.

        >>> from ortrain.capi import OrtDevice
        >>> from ortrain.gradient import OrtGradientForwardBackwardFunction
        >>> vector = OrtGradientForwardBackwardFunction.input_to_ort([np.zeros(3)], [OrtDevice(0, 0, 0)])
        >>> len(vector), vector[0].shape()
        (1, [3])

        """
        if isinstance(tensors, OrtValueVector):
            vector = tensors
        else:
            vector = OrtValueVector()
            for at, tensor in enumerate(tensors):
                vector.push_back(_value(tensor, at))
        if debug:
            if len(vector) != len(devices):
                raise OrtrainError(f"expected one value for each of {len(devices)} devices, got {len(vector)}")
            for at, device in enumerate(devices):
                there, expected = vector[at].device_name(), OrtGradientForwardBackwardFunction.device_name(device)
                if there != expected:
                    raise OrtrainError(f"value {at} is on {there}, but must be on {expected}")
        return vector

    @property
    def saved_tensors(self) -> list[Any]:
        """The arguments of the last forward pass.

        Raises:
            OrtrainError: before the first forward pass.

        >>> from ortrain.gradient import OrtGradientForwardBackward
        >>> both = OrtGradientForwardBackward(model, weights_to_train=["fc2.bias"])
        >>> function, bias = both.new_instance(), both.get_initializer("fc2.bias")
        >>> _ = function.forward([x, bias], training=True)
        >>> function.saved_tensors[1] is bias
        True

        """
        if self.saved_tensors_ is None:
            raise OrtrainError("there are no saved tensors: no forward pass has run with training=True")
        return self.saved_tensors_

    def save_for_backward(self, inputs: Iterable[Any]) -> None:
        """Saves the arguments of a forward pass, as a list of the same objects.

        >>> from ortrain.gradient import OrtGradientForwardBackward
        >>> function = OrtGradientForwardBackward(model, weights_to_train=["fc2.bias"]).new_instance()
        >>> function.save_for_backward([x])
        >>> function.saved_tensors[0] is x
        True

        """
        self.saved_tensors_ = list(inputs)

    def forward(
        self,
        inputs: OrtValueVector | Sequence[Any],
        training: bool = False,
        forward_outputs_cache: OrtValueVector | None = None,
    ) -> OrtValueVector:
        """Runs the forward pass of the model.

        Args:
            inputs: inputs of the model, then weights, in the order of ``_grad_input_names``: a vector, or a list
                of arrays, values and DLPack tensors. An array must have the element type of the model.
            training: True if a backward pass follows. The forward pass is then stored until :meth:`backward`.
            forward_outputs_cache: a vector with one value for each output, which is filled and returned.

        Returns:
            The outputs of the model.

        Raises:
            UnsupportedError: for ``None`` instead of a value.
            InvalidArgumentError: for a value of a different type or shape, or a wrong number of values.
            MemoryLimitError: if the stored passes leave too little of a ``memory_limit``.

        >>> from ortrain.gradient import OrtGradientForwardBackward
        >>> both = OrtGradientForwardBackward(model, weights_to_train=["fc2.bias"])
        >>> (logits,) = both.new_instance().forward([x, both.get_initializer("fc2.bias")])
        >>> logits.shape()
        [8, 10]

        """
        cls = type(self)
        values = list(self.input_to_ort(inputs, cls._devices, cls._debug))
        if len(values) != len(cls._grad_input_names):
            raise InvalidArgumentError(
                f"expected {len(cls._grad_input_names)} values ({', '.join(cls._grad_input_names)}), got {len(values)}"
            )
        split = len(cls._input_names)
        if training:
            live, outputs = cls._native.forward(values[:split], values[split:])
            self.states_.append(PartialGraphExecutionState._of(live))
            self.save_for_backward(inputs)
        else:
            outputs = cls._native.evaluate(values[:split], values[split:])
        self._debugged("forward: %d inputs, training=%r, %d pending passes", len(values), training, len(self.states_))
        return _filled(forward_outputs_cache, outputs, "forward_outputs_cache")

    def backward(
        self,
        grad_outputs: OrtValueVector | Sequence[Any],
        backward_outputs_cache: OrtValueVector | None = None,
    ) -> OrtValueVector:
        """Runs the backward pass of the last stored forward pass.

        Args:
            grad_outputs: a gradient for each output, of the type and shape of the output. Gradients of outputs without
                float elements may be omitted and are ignored.
            backward_outputs_cache: a vector with one value for each gradient, which is filled and returned.

        Returns:
            The gradients of inputs, then of weights, in the order of ``_bw_fetches_names``.

        Raises:
            OrtrainError: before the first forward pass with ``training=True``.
            IndexError: if every forward pass already had its backward pass.
            InvalidArgumentError: for a wrong number of gradients, or if the type or shape of a gradient differs from
                its output. The forward pass remains stored.

        >>> from ortrain.gradient import OrtGradientForwardBackward
        >>> both = OrtGradientForwardBackward(model, weights_to_train=["fc2.bias"])
        >>> function = both.new_instance()
        >>> (logits,) = function.forward([x, both.get_initializer("fc2.bias")], training=True)
        >>> of_x, of_bias = function.backward([np.ones(logits.shape(), np.float32)])
        >>> of_bias.numpy()[0]
        np.float32(8.0)

        """
        cls = type(self)
        if self.saved_tensors_ is None:
            raise OrtrainError("there are no saved tensors: run forward with training=True before backward")
        if not self.states_:
            raise IndexError(
                "every forward pass already had its backward pass; run forward with training=True before backward"
            )
        gradients = list(self.input_to_ort(_without_others(cls, grad_outputs), [], False))
        state = self.states_[-1]
        native = cls._native
        into = _gradient_buffers(backward_outputs_cache, native)
        results = native.backward(state._waiting(), gradients, into)
        self.states_.pop()
        self._debugged("backward: %d gradients, %d pending passes", len(results), len(self.states_))
        return _filled(backward_outputs_cache, results, "backward_outputs_cache")

    def _debugged(self, message: str, *values: object) -> None:
        logger = type(self)._logger
        if logger is not None:
            logger.debug("[%s] " + message, type(self).__name__, *values)

    @classmethod
    def save_onnx_graph(
        cls, folder: PathLike | type[bytes], prefix: str | None = None, suffix: str | None = None
    ) -> dict[str, str] | dict[str, bytes]:
        """Saves the training graph and the evaluation graph.

        Args:
            folder: the folder of the files; or the type ``bytes``, to return bytes instead.
            prefix: a text before the class name in the file names.
            suffix: a text after the class name.

        Returns:
            The path or the bytes of each graph, by the name of its attribute.

        Raises:
            NoSuchFileError: if the folder does not exist.

        Warns:
            UserWarning: for an existing file, which is overwritten.

        >>> from ortrain.gradient import OrtGradientForwardBackward
        >>> both = OrtGradientForwardBackward(model, weights_to_train=["fc2.bias"], class_name="Perceptron")
        >>> sorted(both.cls_type_.save_onnx_graph("."))
        ['_optimized_pre_grad_model', '_trained_onnx']

        """
        if folder is bytes:
            return dict(cls._models)
        directory = os.fspath(folder)  # type: ignore[arg-type]
        if not os.path.isdir(directory):  # noqa: PTH112  (pathlib would be all that it is imported for)
            raise NoSuchFileError(f"there is no folder {directory}")
        paths = {}
        for name in _MODELS:
            file = f"{prefix or ''}{cls.__name__}{suffix or ''}.{name}.onnx"
            path = os.path.join(directory, file)  # noqa: PTH118
            if os.path.exists(path):  # noqa: PTH110
                warnings.warn(f"{path} is overwritten", UserWarning, stacklevel=2)
            _files.write(path, cls._models[name])
            paths[name] = path
        return paths


def _value(tensor: Any, at: int) -> _ortrain.OrtValue:
    """Returns a value that shares its memory with the argument."""
    if tensor is None:
        raise UnsupportedError(f"value {at} is None; each input and weight requires a value, each output a gradient")
    if isinstance(tensor, _ortrain.OrtValue):
        return tensor
    if isinstance(tensor, OrtValue):
        return tensor._ortvalue
    if isinstance(tensor, (np.ndarray, np.generic)):
        device = OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)
        # The engine reads the elements in place, which requires an address aligned to their size.
        array = np.asarray(tensor)
        return _ortrain.OrtValue.ortvalue_from_numpy(array if array.flags.aligned else array.copy(), device)
    if hasattr(tensor, "__dlpack__"):
        return _ortrain.OrtValue.from_dlpack(tensor)
    raise TypeError(f"value {at} must be an array, an OrtValue or a DLPack tensor, got {type(tensor).__name__}")


def _without_others(
    cls: type[OrtGradientForwardBackwardFunction], gradients: OrtValueVector | Sequence[Any]
) -> OrtValueVector | Sequence[Any]:
    """Removes the gradients of outputs without a gradient."""
    differentiable = cls._native.differentiable_outputs()
    if len(differentiable) == len(cls._output_names) or len(gradients) != len(cls._output_names):
        return gradients
    return [gradients[at] for at, name in enumerate(cls._output_names) if name in differentiable]


def _gradient_buffers(cache: OrtValueVector | None, native: _ortrain.ForwardBackward) -> list[_ortrain.OrtValue] | None:
    """Returns the cached values to write the gradients of weights into, or None if the cache does not fit."""
    names = native.gradient_names()
    if not cache or len(cache) != len(names):
        return None
    first = len(names) - len(native.weight_names())
    buffers = list(cache)[first:]
    fits = [
        buffer.element_type() == weight.element_type() and buffer.shape() == weight.shape()
        for buffer, weight in zip(buffers, native.initial_weights(), strict=True)
    ]
    return buffers if all(fits) else None


def _filled(cache: OrtValueVector | None, values: list[_ortrain.OrtValue], name: str) -> OrtValueVector:
    """Returns a vector of these values: the cache if it is not empty, else a new vector."""
    if cache:
        if len(cache) != len(values):
            raise InvalidArgumentError(
                f"expected {len(values)} values in {name}, one for each result, got {len(cache)}"
            )
        cache._fill(values)
        return cache
    vector = OrtValueVector()
    for value in values:
        vector.push_back(value)
    return vector
