"""Sessions with the interface of onnxruntime's extension module: one call makes a session, a second one opens it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from ortrain._options import RunOptions, SessionOptions
from ortrain._ortrain import OrtDevice, OrtValue, OrtValueVector
from ortrain.classic import TrainingParameters
from ortrain.classic import TrainingSession as Classic
from ortrain.errors import OrtrainError
from ortrain.inference import InferenceSession as Inference
from ortrain.inference import ModelMetadata, NodeArg
from ortrain.iobinding import SessionIOBinding
from ortrain.ortvalue import OrtValue as Wrapped

__all__ = ["InferenceSession", "TrainingConfigurationResult", "TrainingSession"]


class InferenceSession:
    """Inference session that :meth:`initialize_session` opens. ``ortrain.InferenceSession`` takes one step for both.

    >>> from ortrain._classic_core import InferenceSession
    >>> options = ortrain.SessionOptions()
    >>> session = InferenceSession(options, ortrain.examples.perceptron(), True, False)
    >>> session.initialize_session(["CPUExecutionProvider"], [{}], set())
    >>> [value.name for value in session.outputs_meta]
    ['logits']
    """

    def __init__(
        self,
        session_options: SessionOptions | None,
        model: str | os.PathLike[str] | bytes,
        is_path: bool,
        read_config_from_model: bool = False,
        /,
    ) -> None:
        if not isinstance(model, (str, os.PathLike) if is_path else bytes):
            expected = "the path of a model must be a str" if is_path else "a model must be bytes"
            raise TypeError(f"{expected}, got {type(model).__name__}")
        self._options = session_options
        self._model: str | os.PathLike[str] | bytes | None = model
        self._session: Inference | None = None

    def initialize_session(
        self,
        provider_names: Sequence[str] = (),
        provider_options: Sequence[dict[str, str]] = (),
        disabled_optimizers: Collection[str] = (),
    ) -> None:
        """Read the model, and open the session.

        Args:
            provider_names: the providers to run on; the CPU if empty.
            provider_options: a dict for each provider, or an empty list.
            disabled_optimizers: names of graph optimizations of onnxruntime; ignored, because ortrain has others.

        Raises:
            ModelLoaded: if the session is already open.
            NoSuchFileError, InvalidModelError, UnsupportedError: as for ``ortrain.InferenceSession``.

        >>> from ortrain._classic_core import InferenceSession
        >>> session = InferenceSession(ortrain.SessionOptions(), ortrain.examples.perceptron(), True)
        >>> session.initialize_session()
        >>> session.get_providers()
        ['CPUExecutionProvider']

        """
        if self._session is not None:
            raise _loaded_already()
        assert self._model is not None
        names, options = _providers(provider_names, provider_options)
        self._session = Inference(self._model, self._options, names, options)
        self._model = None

    def _opened(self) -> Inference:
        if self._session is None:
            raise OrtrainError("the session is not open yet; call initialize_session first")
        return self._session

    def run(
        self, output_names: Sequence[str], feed: Mapping[str, npt.ArrayLike], run_options: RunOptions | None = None
    ) -> list[npt.NDArray[Any]]:
        """Run the model, as ``ortrain.InferenceSession.run`` does.

        >>> feed = {"x": x, "labels": labels, "Learning_Rate": np.array([0.1], np.float32)}
        >>> core_session.run(["loss"], feed, None)[0].shape
        ()
        """
        return self._opened().run(output_names, feed, run_options)

    def run_with_ort_values(
        self, feed: Mapping[str, OrtValue], output_names: Sequence[str], run_options: RunOptions | None = None
    ) -> list[OrtValue]:
        """Run the model, as ``ortrain.InferenceSession.run_with_ort_values`` does; the inputs are the first argument.

        >>> feed = {"x": x, "labels": labels, "Learning_Rate": np.array([0.1], np.float32)}
        >>> values = {name: ortrain.OrtValue.ortvalue_from_numpy(array)._ortvalue for name, array in feed.items()}
        >>> core_session.run_with_ort_values(values, ["loss"])[0].shape()
        []
        """
        wrapped = {name: Wrapped(value) for name, value in feed.items()}
        found = self._opened().run_with_ort_values(output_names, wrapped, run_options)
        return [value._ortvalue for value in found]

    def run_with_iobinding(self, binding: SessionIOBinding, run_options: RunOptions | None = None) -> None:
        """Run a binding, as ``ortrain.InferenceSession.run_with_iobinding`` does.

        >>> binding = core_session.io_binding()
        >>> core_session.run_with_iobinding(binding)
        Traceback (most recent call last):
        ortrain.errors.InvalidArgumentError: no output is bound; call bind_output first
        """
        self._opened().run_with_iobinding(binding, run_options)

    def io_binding(self) -> SessionIOBinding:
        """Return a new binding of inputs and outputs to memory of the caller.

        >>> type(core_session.io_binding()).__name__
        'SessionIOBinding'
        """
        return self._opened().io_binding()._iobinding

    def run_with_ortvaluevector(
        self,
        run_options: RunOptions | None,
        feed_names: Sequence[str],
        feeds: OrtValueVector,
        fetch_names: Sequence[str],
        fetches: OrtValueVector,
        fetch_devices: Sequence[OrtDevice],
    ) -> None:
        """Run the model, as ``ortrain.InferenceSession.run_with_ortvaluevector`` does.

        >>> vectors = ortrain.capi.OrtValueVector(), ortrain.capi.OrtValueVector()
        >>> core_session.run_with_ortvaluevector(None, ["x"], vectors[0], [], vectors[1], [])
        Traceback (most recent call last):
        ortrain.errors.InvalidArgumentError: expected 1 values in feeds, got 0
        """
        self._opened().run_with_ortvaluevector(run_options, feed_names, feeds, fetch_names, fetches, fetch_devices)

    def end_profiling(self) -> str:
        """Write the profile, as ``ortrain.InferenceSession.end_profiling`` does.

        >>> core_session.end_profiling()
        ''
        """
        return self._opened().end_profiling()

    def get_providers(self) -> list[str]:
        """Return the providers, as ``ortrain.InferenceSession.get_providers`` does.

        >>> core_session.get_providers()
        ['CPUExecutionProvider']
        """
        return self._opened().get_providers()

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Return the options of the providers, as ``ortrain.InferenceSession.get_provider_options`` does.

        >>> core_session.get_provider_options()
        {'CPUExecutionProvider': {}}
        """
        return self._opened().get_provider_options()

    @property
    def inputs_meta(self) -> list[NodeArg]:
        """Inputs of a run.

        >>> [value.name for value in core_session.inputs_meta]
        ['x', 'labels', 'Learning_Rate']
        """
        return self._opened().get_inputs()

    @property
    def outputs_meta(self) -> list[NodeArg]:
        """Outputs of a run.

        >>> [value.name for value in core_session.outputs_meta]
        ['loss', 'logits', 'global_gradient_norm']
        """
        return self._opened().get_outputs()

    @property
    def overridable_initializers(self) -> list[NodeArg]:
        """Initializers that a run may override.

        >>> core_session.overridable_initializers
        []
        """
        return self._opened().get_overridable_initializers()

    @property
    def model_meta(self) -> ModelMetadata:
        """Metadata of the model.

        >>> core_session.model_meta.graph_name
        'perceptron'
        """
        return self._opened().get_modelmeta()

    @property
    def session_options(self) -> SessionOptions:
        """Options of the session.

        >>> core_session.session_options.intra_op_num_threads
        0
        """
        return self._opened().get_session_options()

    @property
    def get_profiling_start_time_ns(self) -> int:
        """Start of the profile, in nanoseconds since 1970; 0 without a profile.

        >>> core_session.get_profiling_start_time_ns
        0
        """
        return self._opened().get_profiling_start_time_ns()


class TrainingConfigurationResult:
    """Result of loading a model for training.

    >>> from ortrain import capi
    >>> capi.TrainingConfigurationResult().loss_scale_input_name is None
    True
    """

    def __init__(self) -> None:
        self._loss_scale_input_name: str | None = None

    @property
    def loss_scale_input_name(self) -> str | None:
        """Name of the input with the loss scale; ``None`` without mixed precision.

        >>> from ortrain import capi
        >>> capi.TrainingConfigurationResult().loss_scale_input_name is None
        True
        """
        return self._loss_scale_input_name


class TrainingSession(InferenceSession):
    """Training session that is made without a model. ``ortrain.classic.TrainingSession`` takes one step for both.

    >>> from ortrain import capi
    >>> session = capi.TrainingSession()
    >>> parameters = capi.TrainingParameters()
    >>> parameters.loss_output_name = "loss"
    >>> result = session.read_bytes(model_with_loss.SerializeToString(), parameters, ["CPUExecutionProvider"], [{}])
    >>> [value.name for value in session.outputs_meta]
    ['loss', 'logits']
    """

    def __init__(self, session_options: SessionOptions | None = None) -> None:
        self._options = session_options
        self._model = None
        self._session = None

    def initialize_session(
        self,
        provider_names: Sequence[str] = (),
        provider_options: Sequence[dict[str, str]] = (),
        disabled_optimizers: Collection[str] = (),
    ) -> None:
        """Raise an error: :meth:`load_model` and :meth:`read_bytes` open a training session.

        Raises:
            OrtrainError: always.

        >>> from ortrain import capi
        >>> capi.TrainingSession().initialize_session()
        Traceback (most recent call last):
        ortrain.errors.OrtrainError: call load_model or read_bytes with the parameters instead of initialize_session

        """
        raise OrtrainError("call load_model or read_bytes with the parameters instead of initialize_session")

    def _opened(self) -> Classic:
        if not isinstance(self._session, Classic):
            raise OrtrainError("the session has no model yet; call load_model or read_bytes first")
        return self._session

    def load_model(
        self,
        path: str,
        parameters: TrainingParameters,
        provider_names: Sequence[str],
        provider_options: Sequence[dict[str, str]],
    ) -> TrainingConfigurationResult:
        """Read the model from a file.

        Raises:
            ModelLoaded: if the session already has a model.
            OrtrainError: as for ``ortrain.classic.TrainingSession``.

        >>> from ortrain import capi
        >>> session, parameters = capi.TrainingSession(), capi.TrainingParameters()
        >>> parameters.loss_output_name = "loss"
        >>> onnx.save(model_with_loss, "with_loss.onnx")
        >>> result = session.load_model("with_loss.onnx", parameters, ["CPUExecutionProvider"], [{}])
        >>> sorted(session.get_state())
        ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']

        """
        return self._load(path, parameters, provider_names, provider_options)

    def read_bytes(
        self,
        model: bytes,
        parameters: TrainingParameters,
        provider_names: Sequence[str],
        provider_options: Sequence[dict[str, str]],
    ) -> TrainingConfigurationResult:
        """Read the model from bytes; everything else is as for :meth:`load_model`.

        >>> from ortrain import capi
        >>> session, parameters = capi.TrainingSession(), capi.TrainingParameters()
        >>> parameters.loss_output_name = "loss"
        >>> result = session.read_bytes(model_with_loss.SerializeToString(), parameters, [], [])
        >>> result.loss_scale_input_name is None
        True
        """
        return self._load(model, parameters, provider_names, provider_options)

    def _load(
        self,
        model: str | bytes,
        parameters: TrainingParameters,
        provider_names: Sequence[str],
        provider_options: Sequence[dict[str, str]],
    ) -> TrainingConfigurationResult:
        if self._session is not None:
            raise _loaded_already()
        names, options = _providers(provider_names, provider_options)
        self._session = session = Classic(model, parameters, self._options, names, options)
        result = TrainingConfigurationResult()
        result._loss_scale_input_name = session.loss_scale_input_name
        return result

    def finalize(self) -> None:
        """Do nothing: the session is complete after loading.

        >>> from ortrain import capi
        >>> capi.TrainingSession().finalize()
        """

    def get_state(self) -> dict[str, npt.NDArray[Any]]:
        """Return the state, as ``ortrain.classic.TrainingSession.get_state`` does.

        >>> sorted(core_session.get_state())
        ['Moment_1_fc2.bias', 'Moment_2_fc2.bias', 'Update_Count_fc2.bias', 'fc2.bias']
        """
        return self._opened().get_state()

    def get_model_state(self, include_mixed_precision_weights: bool, /) -> dict[str, dict[str, npt.NDArray[Any]]]:
        """Return the weights, as ``ortrain.classic.TrainingSession.get_model_state`` does.

        >>> sorted(core_session.get_model_state(True))
        ['full_precision', 'mixed_precision']
        """
        return self._opened().get_model_state(include_mixed_precision_weights)

    def get_optimizer_state(self) -> dict[str, dict[str, npt.NDArray[Any]]]:
        """Return the optimizer state, as ``ortrain.classic.TrainingSession.get_optimizer_state`` does.

        >>> sorted(core_session.get_optimizer_state())
        ['fc2.bias']
        """
        return self._opened().get_optimizer_state()

    def get_partition_info_map(self) -> dict[str, dict[str, list[int]]]:
        """Return an empty dict, as ``ortrain.classic.TrainingSession.get_partition_info_map`` does.

        >>> core_session.get_partition_info_map()
        {}
        """
        return self._opened().get_partition_info_map()

    def load_state(self, state: Mapping[str, npt.ArrayLike], strict: bool, /) -> None:
        """Set the state, as ``ortrain.classic.TrainingSession.load_state`` does.

        >>> core_session.load_state({"fc2.bias": np.zeros(10, np.float32)}, True)
        """
        self._opened().load_state(state, strict)

    def is_output_fp32_node(self, output_name: str, /) -> bool:
        """Return True for a float32 result, as ``ortrain.classic.TrainingSession.is_output_fp32_node`` does.

        >>> core_session.is_output_fp32_node("loss")
        True
        """
        return self._opened().is_output_fp32_node(output_name)


def _providers(
    names: Sequence[str], options: Sequence[dict[str, str]]
) -> tuple[list[str] | None, list[dict[str, str]] | None]:
    """Return providers and their options in the form that sessions accept."""
    return (list(names), list(options) or None) if names else (None, None)


def _loaded_already() -> OrtrainError:
    from ortrain.capi import ModelLoaded

    return ModelLoaded("the session already has a model; create another session for another model")


def core_of(session: Classic) -> TrainingSession:
    """Wrap a session of :mod:`ortrain.classic` in the interface of this module."""
    core = TrainingSession(session._options)
    core._session = session
    return core
