"""Training graphs that run in two parts, with the names of onnxruntime's extension module.

>>> from ortrain import InferenceSession, capi
>>> config = capi.OrtModuleGraphBuilderConfiguration()
>>> config.initializer_names = config.initializer_names_to_train = ["fc2.bias"]
>>> config.input_names_require_grad = ["x"]
>>> builder = capi.OrtModuleGraphBuilder()
>>> builder.initialize(model.SerializeToString(), config)
>>> builder.build()
>>> session = InferenceSession(builder.get_gradient_model())
>>> [output.name for output in session.get_outputs()]
['x_grad', 'fc2.bias_grad']
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ortrain import _ortrain
from ortrain._operators import Source
from ortrain._options import native_options
from ortrain._ortrain import OrtDevice, OrtValueCache, OrtValueVector
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError, OrtrainError, UnsupportedError
from ortrain.inference import InferenceSession, SessionOptions

__all__ = [
    "GraphInfo",
    "OrtModuleGraphBuilder",
    "OrtModuleGraphBuilderConfiguration",
    "PartialGraphExecutionState",
    "TrainingAgent",
    "TrainingGraphTransformerConfiguration",
]


class PartialGraphExecutionState:
    """Forward pass that waits for its backward pass; empty before the forward pass.

    >>> from ortrain.capi import PartialGraphExecutionState
    >>> PartialGraphExecutionState()
    PartialGraphExecutionState(0 bytes)
    """

    __slots__ = ("_live",)

    def __init__(self) -> None:
        self._live: _ortrain.LiveForward | None = None

    @classmethod
    def _of(cls, live: _ortrain.LiveForward) -> PartialGraphExecutionState:
        state = cls()
        state._live = live
        return state

    def _waiting(self) -> _ortrain.LiveForward:
        if self._live is None:
            raise OrtrainError("this state has no forward pass; call run_forward with it first")
        return self._live

    def __repr__(self) -> str:
        return f"PartialGraphExecutionState({0 if self._live is None else self._live.bytes()} bytes)"


class TrainingAgent:
    """Runner of a training graph: the forward part up to the outputs of the model, then the backward part.

    Args:
        session: a session of a training graph from :meth:`OrtModuleGraphBuilder.get_gradient_model`.
        feed_names: the names of the session's inputs, in the order of the feeds.
        fw_devices: a device for each output of the forward pass.
        fetch_names: names of the session's outputs, in the order of the results of the backward pass.
        bw_devices: a device for each result of the backward pass.
        local_rank: the rank of the process on its machine; 0.

    Raises:
        InvalidArgumentError: for unknown names, and for inputs that ``feed_names`` does not contain.
        InvalidModelError: for a session of a model that is not a training graph.
        UnsupportedError: for a device other than the CPU.

    Source: ``onnxruntime.capi._pybind_state.TrainingAgent``.

    >>> from ortrain import InferenceSession, capi
    >>> from ortrain.gradient import OrtGradientForwardBackward
    >>> both = OrtGradientForwardBackward(model, weights_to_train=["fc2.bias"])
    >>> session = InferenceSession(both.cls_type_.save_onnx_graph(bytes)["_trained_onnx"])
    >>> cpu = capi.OrtDevice(0, 0, 0)
    >>> agent = capi.TrainingAgent(session, ["x", "fc2.bias"], [cpu], ["x_grad", "fc2.bias_grad"], [cpu, cpu], 0)
    >>> state, fetches = capi.PartialGraphExecutionState(), capi.OrtValueVector()
    >>> feeds = both.cls_type_.input_to_ort([x, both.get_initializer("fc2.bias")], [cpu, cpu])
    >>> agent.run_forward(feeds, fetches, state, None)
    >>> fetches[0].shape()
    [8, 10]

    """

    def __init__(
        self,
        session: InferenceSession | _ortrain.InferenceSession,
        feed_names: Sequence[str],
        fw_devices: Sequence[OrtDevice],
        fetch_names: Sequence[str],
        bw_devices: Sequence[OrtDevice],
        local_rank: int = 0,
    ) -> None:
        for device in [*fw_devices, *bw_devices]:
            if device.device_type() != OrtDevice.cpu():
                raise UnsupportedError("training graphs run on the CPU; pass OrtDevice(OrtDevice.cpu(), 0, 0)")
        native = session._native if isinstance(session, InferenceSession) else session
        self._native = _ortrain.ForwardBackward.of_session(native)
        inputs = [given.name for given in self._native.inputs()]
        outputs = self._native.gradient_names()
        feeds = list(feed_names)
        for name in feeds:
            if name not in inputs:
                raise InvalidArgumentError(f"the session has no input {name!r}{hint(name, inputs)}")
        missing = [name for name in inputs if name not in feeds]
        if missing:
            raise InvalidArgumentError(f"feed_names must have all inputs of the session; missing: {', '.join(missing)}")
        fetches = list(fetch_names)
        for name in fetches:
            if name not in outputs:
                raise InvalidArgumentError(f"the session has no output {name!r}{hint(name, outputs)}")
        # Index of each session input in the feeds, and of each fetch in the results.
        self._feeds = [feeds.index(name) for name in inputs]
        self._fetches = [outputs.index(name) for name in fetches]
        self._count = len(feeds)
        self.local_rank = int(local_rank)

    def run_forward(
        self,
        feeds: OrtValueVector,
        fetches: OrtValueVector,
        state: PartialGraphExecutionState,
        cache: OrtValueCache | None = None,
    ) -> None:
        """Runs the forward part of the graph; ``fetches`` then has the outputs of the model.

        Args:
            feeds: a value for each of ``feed_names``.
            fetches: the vector of results; its previous content is removed.
            state: the state that stores the pass; it replaces a previously stored pass.
            cache: accepted for compatibility with the reference; nothing is cached between passes.

        Raises:
            InvalidArgumentError: for a wrong number of feeds, or for a feed of a wrong type or shape.

        >>> from ortrain import capi
        >>> from ortrain.gradient import OrtGradientForwardBackward
        >>> both = OrtGradientForwardBackward(model, weights_to_train=["fc2.bias"])
        >>> cls, agent = both.cls_type_, both.cls_type_._training_agent
        >>> state, fetches = capi.PartialGraphExecutionState(), capi.OrtValueVector()
        >>> agent.run_forward(cls.input_to_ort([x, both.get_initializer("fc2.bias")], []), fetches, state)
        >>> fetches[0].shape()
        [8, 10]

        """
        if len(feeds) != self._count:
            raise InvalidArgumentError(f"expected {self._count} feeds, got {len(feeds)}")
        values = [feeds[at] for at in self._feeds]
        state._live, outputs = self._native.forward(values, [])
        fetches._fill(outputs)

    def run_backward(self, feeds: OrtValueVector, fetches: OrtValueVector, state: PartialGraphExecutionState) -> None:
        """Runs the backward part of the graph from the gradients of the outputs; ``fetches`` then has its results.

        Raises:
            OrtrainError: for a state without a forward pass, or if the backward pass already ran.
            InvalidArgumentError: for a wrong number of gradients, or if the type or shape of a gradient differs from
                its output.

        >>> from ortrain import capi
        >>> from ortrain.gradient import OrtGradientForwardBackward
        >>> both = OrtGradientForwardBackward(model, weights_to_train=["fc2.bias"])
        >>> cls, agent = both.cls_type_, both.cls_type_._training_agent
        >>> state, fetches = capi.PartialGraphExecutionState(), capi.OrtValueVector()
        >>> agent.run_forward(cls.input_to_ort([x, both.get_initializer("fc2.bias")], []), fetches, state)
        >>> agent.run_backward(cls.input_to_ort([np.ones((8, 10), np.float32)], []), fetches, state)
        >>> [value.shape() for value in fetches]
        [[8, 64], [10]]

        """
        results = self._native.backward(state._waiting(), list(feeds), None)
        fetches._fill([results[at] for at in self._fetches])


class TrainingGraphTransformerConfiguration:
    """Graph rewrites that the reference can apply before differentiation; they have no effect in ortrain.

    ortrain fuses operators and recomputes values according to its memory plan, regardless of these settings.

    >>> from ortrain.capi import TrainingGraphTransformerConfiguration
    >>> config = TrainingGraphTransformerConfiguration()
    >>> config.number_recompute_layers = 2
    """

    def __init__(self) -> None:
        self.attn_dropout_recompute = False
        self.gelu_recompute = False
        self.transformer_layer_recompute = False
        self.number_recompute_layers = 0
        self.enable_compute_optimizer = False
        self.enable_gelu_approximation = False
        self.enable_label_sparsity_optimization = False
        self.propagate_cast_ops_config: Any = None


class OrtModuleGraphBuilderConfiguration:
    """Options of an :class:`OrtModuleGraphBuilder`.

    >>> from ortrain.capi import OrtModuleGraphBuilderConfiguration
    >>> config = OrtModuleGraphBuilderConfiguration()
    >>> config.initializer_names_to_train = ["fc2.bias"]
    """

    initializer_names: list[str]
    """Initializers that become inputs; those of :attr:`initializer_names_to_train`, or none unless given."""
    initializer_names_to_train: list[str]
    """Initializers whose gradients are wanted."""
    input_names_require_grad: list[str] | None
    """Inputs whose gradients are wanted; ``None`` for all of floats that the outputs depend on."""

    def __init__(self) -> None:
        self.initializer_names = []
        self.initializer_names_to_train = []
        self.input_names_require_grad = []
        self.build_gradient_graph = True
        self.enable_caching = False
        self.use_memory_efficient_gradient = False
        self.loglevel = 2
        self.graph_transformer_config = TrainingGraphTransformerConfiguration()


class GraphInfo:
    """Names of a training graph, in the attributes of the reference.

    >>> from ortrain.gradient import OrtGradientForwardBackward
    >>> both = OrtGradientForwardBackward(model, weights_to_train=["fc2.bias"])
    >>> both.cls_type_._graph_info.user_input_grad_names
    {'x': 'x_grad'}
    """

    def __init__(self, native: _ortrain.ForwardBackward) -> None:
        outputs = [output.name for output in native.outputs()]
        differentiable = native.differentiable_outputs()
        self.user_input_names = [given.name for given in native.inputs()]
        # The gradients of inputs precede the gradients of weights.
        self.user_input_grad_names = dict(zip(native.differentiable_inputs(), native.gradient_names(), strict=False))
        self.initializer_names = native.weight_names()
        self.initializer_names_to_train = native.weight_names()
        self.initializer_grad_names_to_train = native.gradient_names()[len(self.user_input_grad_names) :]
        self.user_output_names = outputs
        self.module_output_gradient_name = [f"{name}_grad" for name in differentiable]
        indices = range(len(outputs))
        self.output_grad_indices_non_differentiable = [at for at in indices if outputs[at] not in differentiable]
        self.output_grad_indices_require_full_shape = [at for at in indices if outputs[at] in differentiable]
        self.module_output_indices_requires_save_for_backward: list[int] = []
        self.cached_node_arg_names: list[str] = []
        self.frontier_node_arg_map: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"GraphInfo({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class OrtModuleGraphBuilder:
    """Builder of the training graph of a model, which returns its outputs and then accepts their gradients.

    Source: ``onnxruntime.capi._pybind_state.OrtModuleGraphBuilder``.

    >>> from ortrain import capi
    >>> config = capi.OrtModuleGraphBuilderConfiguration()
    >>> config.initializer_names = config.initializer_names_to_train = ["fc2.bias", "fc2.weight"]
    >>> builder = capi.OrtModuleGraphBuilder()
    >>> builder.initialize(model.SerializeToString(), config)
    >>> builder.build()
    >>> builder.get_graph_info().initializer_grad_names_to_train
    ['fc2.bias_grad', 'fc2.weight_grad']
    """

    def __init__(self) -> None:
        self._source: Source | None = None
        self._config = OrtModuleGraphBuilderConfiguration()
        self._options: SessionOptions | None = None
        self._device = "cpu"
        self._native: _ortrain.ForwardBackward | None = None

    def initialize(self, model: bytes, config: OrtModuleGraphBuilderConfiguration) -> None:
        """Sets the model and the options.

        Raises:
            TypeError: for a model that is not ``bytes``.
            InvalidArgumentError: for ``initializer_names`` that are not in ``initializer_names_to_train``.

        >>> from ortrain import capi
        >>> config, builder = capi.OrtModuleGraphBuilderConfiguration(), capi.OrtModuleGraphBuilder()
        >>> config.initializer_names_to_train, config.input_names_require_grad = ["fc2.bias"], []
        >>> builder.initialize(model.SerializeToString(), config)

        """
        if not isinstance(model, bytes):
            raise TypeError(f"the model must be bytes, got {type(model).__name__}")
        if not isinstance(config, OrtModuleGraphBuilderConfiguration):
            raise TypeError(
                f"the configuration must be an OrtModuleGraphBuilderConfiguration, got {type(config).__name__}"
            )
        self._initialize(model, config, None)

    def _initialize(
        self, source: Source, config: OrtModuleGraphBuilderConfiguration, options: SessionOptions | None
    ) -> None:
        others = [name for name in config.initializer_names if name not in config.initializer_names_to_train]
        if others:
            raise InvalidArgumentError(
                f"initializers {', '.join(others)} are in initializer_names, but not in initializer_names_to_train; "
                "remove them from initializer_names, and they stay in the graph"
            )
        self._source, self._config, self._options, self._native = source, config, options, None

    def build(self, config: TrainingGraphTransformerConfiguration | None = None) -> None:
        """Builds the graphs. ``config`` has no effect: see :class:`TrainingGraphTransformerConfiguration`.

        Raises:
            OrtrainError: before :meth:`initialize`.
            InvalidModelError: for bytes that are not a model.
            InvalidArgumentError: for unknown names, and for names that no gradient reaches.
            UnsupportedError: for operators without a gradient, each with its node.

        >>> from ortrain import capi
        >>> config, builder = capi.OrtModuleGraphBuilderConfiguration(), capi.OrtModuleGraphBuilder()
        >>> config.initializer_names_to_train, config.input_names_require_grad = ["fc2.bias"], []
        >>> builder.initialize(model.SerializeToString(), config)
        >>> builder.build()

        """
        if self._source is None:
            raise OrtrainError("there is no model to build from: call initialize first")
        input_names = self._config.input_names_require_grad
        self._native = _ortrain.ForwardBackward(
            self._source,
            _names(self._config.initializer_names_to_train),
            None if input_names is None else _names(input_names),
            training=None,
            seed=0,
            options=native_options(self._options, self._device),
        )

    def _built(self) -> _ortrain.ForwardBackward:
        if self._native is None:
            raise OrtrainError("there is no graph yet: call build first")
        return self._native

    def get_gradient_model(self) -> bytes:
        """Returns the training graph as a model: inputs, then weights, to gradients of inputs, then of weights.

        Raises:
            OrtrainError: before :meth:`build`.
            UnsupportedError: for an operator that cannot be written at the model's opset.

        >>> from ortrain import capi
        >>> config, builder = capi.OrtModuleGraphBuilderConfiguration(), capi.OrtModuleGraphBuilder()
        >>> config.initializer_names_to_train, config.input_names_require_grad = ["fc2.bias"], []
        >>> builder.initialize(model.SerializeToString(), config)
        >>> builder.build()
        >>> [output.name for output in onnx.load_from_string(builder.get_gradient_model()).graph.output]
        ['fc2.bias_grad']

        """
        if not self._config.build_gradient_graph:
            raise OrtrainError("there is no gradient graph: build_gradient_graph is False")
        return self._built().training_model()

    def get_forward_model(self) -> bytes:
        """Returns the model with the weights as inputs, after its own inputs.

        Raises:
            OrtrainError: before :meth:`build`.

        >>> from ortrain import capi
        >>> config, builder = capi.OrtModuleGraphBuilderConfiguration(), capi.OrtModuleGraphBuilder()
        >>> config.initializer_names_to_train, config.input_names_require_grad = ["fc2.bias"], []
        >>> builder.initialize(model.SerializeToString(), config)
        >>> builder.build()
        >>> [given.name for given in onnx.load_from_string(builder.get_forward_model()).graph.input]
        ['x', 'fc2.bias']

        """
        return self._built().evaluation_model()

    def get_graph_info(self) -> GraphInfo:
        """Returns the names of inputs, outputs, weights and gradients.

        Raises:
            OrtrainError: before :meth:`build`.

        >>> from ortrain import capi
        >>> config, builder = capi.OrtModuleGraphBuilderConfiguration(), capi.OrtModuleGraphBuilder()
        >>> config.initializer_names_to_train, config.input_names_require_grad = ["fc2.bias"], []
        >>> builder.initialize(model.SerializeToString(), config)
        >>> builder.build()
        >>> builder.get_graph_info().module_output_gradient_name
        ['logits_grad']

        """
        return GraphInfo(self._built())


def _names(names: Iterable[str]) -> list[str]:
    if isinstance(names, str):
        raise TypeError(f"expected a list of names, got the name {names!r}")
    return list(names)
